"""`rfdlc demo`: what deciding by costs, an ensemble and a budget for abstaining add, on
digits with a long tail.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from typer import Option

import rfdlc
from rfdlc.cli.request import JsonOption, SeedOption
from rfdlc.cli.train import ready
from rfdlc.cli.writing import new_table, output

if TYPE_CHECKING:
    from rfdlc.evaluation.comparison import Difference
    from rfdlc.evaluation.outcomes import Outcomes

# Chosen on images that are neither training nor test images of the demo:
# benchmarks/demo.py.
NETWORKS, RATE = 10, 0.05
REVIEWED, ASKING = (
    "5%",
    0.2,
)  # a person sees this share of the images, is right, and costs this per image
LIKELIEST, DECIDED = "most probable digit", "decided by costs"
ENSEMBLE, ABSTAINS = f"{NETWORKS} networks", f"a person sees {REVIEWED}"
MEANING = {
    DECIDED: "calibrated probabilities, and the digit of highest expected utility",
    ENSEMBLE: "ten networks instead of one, their probabilities averaged",
    ABSTAINS: (
        f"{REVIEWED} of the images go to a person, those for which that is worth most"
    ),
}


@dataclass(frozen=True)
class Step:
    """The decisions after one more step, and what it added to the mean utility; nothing
    for the first.
    """

    outcomes: "Outcomes"
    interval: tuple[float, float]
    added: "Difference | None" = None

    def counts(self) -> dict[str, int]:
        """How many test images are decided rightly, at a loss, wrongly without a loss,
        or by a person.
        """
        o = self.outcomes
        wrong = (o.decided >= 0) & ~o.correct
        found = {
            "right": o.correct,
            "costly": wrong & (o.realised < 0),
            "wrong": wrong & (o.realised >= 0),
        }
        return {
            name: int(rows.sum())
            for name, rows in (found | {"person": o.decided < 0}).items()
        }

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        found = {
            **self.counts(),
            "mean_utility": float(self.outcomes.realised.mean()),
            "interval": list(self.interval),
        }
        a = self.added
        return found | (
            {}
            if a is None
            else {"added": {"difference": a.difference, "low": a.low, "high": a.high}}
        )


def demo(
    out: Annotated[
        Path, Option("--out", "-o", help="Folder of the runs, numbered if it exists.")
    ] = Path("runs/demo"),
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """What deciding by costs, an ensemble, and asking a person about a few images each
    add; on digits with a long tail.

    Trains one network and an ensemble on scikit-learn's handwritten digits, of which
    some are rare, and decides the same test images in four ways. Nothing is downloaded.

    **Examples**

    - `rfdlc demo`
    - `rfdlc demo --seed 1 --json`
    """
    names = (out if i == 1 else out.with_name(f"{out.name}-{i}") for i in count(1))
    folder = next(name for name in names if not name.exists())
    with ready():
        data = rfdlc.load("digits-lt")
        steps = decide_in_steps(data, folder, seed)
    page, counts = folder / "report.html", data.classes.count_array
    training = (
        f"{counts.sum()} training images, {counts[0]} of digit 0 down to {counts[-1]}"
        " of digit 9"
    )
    output(
        json,
        {
            "folder": str(folder),
            "report": str(page),
            "steps": {name: step.to_dict() for name, step in steps.items()},
        },
        f"Handwritten digits: {training}; {len(data.splits['test'])} test images, 45 of"
        " each.",
        "Utility of a decision: +1 right; -1 costly: a digit taken for a more frequent"
        " one; 0 other errors;",
        f"{1 - ASKING:+g} if a person decides, who is right, and costs {ASKING:g}.",
        _table(steps),
        "What each step adds to the mean utility, with 95% intervals about other test"
        " images, the networks held fixed:",
        *(
            _said(i, name, step.added)
            for i, (name, step) in enumerate(steps.items())
            if step.added is not None
        ),
        f"report: {page} (open it in a browser, and edit the utility there)",
        f"next: rfdlc evaluate {folder}/ensemble --utility tail-sensitive --penalty"
        " -0.5",
    )


def decide_in_steps(
    data: "rfdlc.Dataset", folder: Path, seed: int = 0
) -> dict[str, Step]:
    """Train both, write the report of both, and decide the test images in four ways,
    each one step further.
    """
    assert data.test is not None
    utility = rfdlc.Utility.tail_sensitive(data.classes)
    # The loss is the mean over the networks: times their number, each takes the steps
    # of one that is trained alone.
    one, many = (
        rfdlc.train(
            data,
            "ce",
            folder / name,
            particles=networks,
            learning_rate=RATE * networks,
            seed=seed,
        )
        for name, networks in {"single": 1, "ensemble": NETWORKS}.items()
    )
    runs = {
        f"{NETWORKS} networks": folder / "ensemble",
        "one network": folder / "single",
    }
    page, title = folder / "report.html", "rfdlc demo: digits with a long tail"
    rfdlc.report(runs, utility, page, images=data.test.array, title=title)
    asks = many.decider.replace(utility=utility.with_abstain(1 - ASKING))
    deciders = {
        LIKELIEST: (one, rfdlc.Decider(utility, calibration=None, rule="argmax")),
        DECIDED: (one, one.decider.replace(utility=utility)),
        ENSEMBLE: (many, many.decider.replace(utility=utility)),
        ABSTAINS: (
            many,
            asks.fit_budget(
                rfdlc.Predictions.load(folder / "ensemble/held-out.npz"),
                budget=REVIEWED,
            ),
        ),
    }
    return _steps(
        {
            name: _decided(by, model.predict(data.test))
            for name, (model, by) in deciders.items()
        }
    )


def _decided(decider: "rfdlc.Decider", predictions: "rfdlc.Predictions") -> "Outcomes":
    """All test images are one batch: a budget is kept exactly."""
    from rfdlc.evaluation.outcomes import Outcomes

    p, actions = (
        decider.probabilities(predictions),
        decider.decide(predictions, batch=True),
    )
    assert predictions.targets is not None
    return Outcomes.of(decider.utility, predictions.targets, actions, np.asarray(p))


def _steps(found: "Mapping[str, Outcomes]") -> dict[str, Step]:
    from rfdlc.evaluation.comparison import compare_outcomes
    from rfdlc.evaluation.metrics import METRICS

    steps, before = dict[str, Step](), None
    for name, outcomes in found.items():
        interval = (
            METRICS["mean_utility"].estimates(outcomes, 0, 0)["mean_utility"].interval()
        )
        assert interval is not None
        added = (
            None
            if before is None
            else compare_outcomes([before], [outcomes])["mean_utility"]
        )
        steps[name], before = (
            Step(outcomes, (float(interval[0]), float(interval[1])), added),
            outcomes,
        )
    return steps


def _table(steps: Mapping[str, Step]) -> Any:
    table = new_table(
        "decisions", "right", "costly", "person", "utility", "95% interval"
    )
    for number, (name, step) in enumerate(steps.items()):
        mean, (low, high), counts = (
            step.outcomes.realised.mean(),
            step.interval,
            step.counts(),
        )
        cells = (str(counts[column]) for column in ("right", "costly", "person"))
        table.add_row(
            f"{number} {name}", *cells, f"{mean:.3f}", f"{low:.3f} to {high:.3f}"
        )
    return table


def _said(number: int, name: str, found: "Difference") -> str:
    """What a step added, and whether that can be told from chance."""
    clear = (
        ""
        if found.low > 0 or found.high < 0
        else "; not measurable on these test images"
    )
    return (
        f"  {number} {MEANING[name]}: {found.difference:+.3f} ({found.low:+.3f} to"
        f" {found.high:+.3f}){clear}"
    )

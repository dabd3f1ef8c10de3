"""How often `rfdlc recalibrate` writes a decider: with labels of a random sample, and
with labels that depend on the outcome.

    python benchmarks/recalibrate.py [--runs 200] [--workers 1]
        writes benchmarks/results/recalibrate.csv

Outcomes are drawn from known posteriors of three classes, and a costly mistake loses 5.
Where nothing has changed, the served decisions are the best ones: the true gain of
every revision is at most 0. Where the class mix has changed, the true gain of what is
written (or of the best option) is measured on other samples.
"""

import argparse
from typing import Any

import numpy as np

from recording import in_parallel, write
from rfdlc.decide.classes import Classes
from rfdlc.decide.decider import Decider
from rfdlc.decide.designs import Labels, sampled
from rfdlc.decide.feedback import Revision, options, review_weights
from rfdlc.decide.monitor import Decided
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError

Array = np.ndarray[Any, Any]
Row = dict[str, Any]
MIX = np.array([0.8, 0.15, 0.05])
CHANGED = np.array([0.55, 0.27, 0.18])
CLASSES = Classes.from_counts([8000, 1500, 500], ["common", "seldom", "rare"])
UTILITY = Utility([[1, 0, 0], [-1, 1, 0], [-5, -2, 1]], CLASSES).with_abstain(0.2)
DECIDER = Decider(UTILITY, calibration=None, train_prior="train")
LARGE, SMALL, OTHERS = 20_000, 5_000, 50_000
FEWER = 4  # times fewer runs of what has no requirement
LEAST_GAIN = 0.05
# Chances of a label: of mistakes and of other decisions, or by true class.
SELECTIONS: dict[str, tuple[float, ...]] = {
    "half of the mistakes, 3% of the others": (0.5, 0.03),
    "20% of the mistakes, 10% of the others": (0.2, 0.1),
    "60% of the rare class, 5% of the others": (0.05, 0.05, 0.6),
}
NONE, RANDOM, BY_ACTION, BY_CONFIDENCE = (
    "no design",
    "falsely stated as random",
    "falsely stated as by-action, with the observed shares",
    "falsely stated as by-confidence, with the observed shares",
)
STATED = (NONE, RANDOM, BY_ACTION, BY_CONFIDENCE)


def model(rng: np.random.Generator, samples: int, mix: Array) -> tuple[Array, Array]:
    """Logits whose softmax is the posterior for the class prior MIX, and classes."""
    y = rng.choice(3, samples, p=mix)
    z = 2 * (rng.normal(size=(samples, 3)) + 2 * np.eye(3)[y]) - 2 + np.log(MIX)
    return z, y


def labelled_at(selection: str, y: Array, decisions: Decided) -> Array:
    """The chance of a label of each decision."""
    chances = SELECTIONS[selection]
    if len(chances) == len(MIX):
        return np.array(chances)[y]
    mistaken = (decisions.decided >= 0) & (decisions.decided != y)
    return np.where(mistaken, *chances)


def observed(stated: str, decisions: Decided, rows: Array) -> str | None:
    """What a sender states who believes in a design: its shares are those of the
    labels.
    """
    if stated in (NONE, RANDOM):
        return None if stated == NONE else "random"
    actions, confidence = decisions.actions, decisions.probabilities.max(axis=1)
    if stated == BY_ACTION:
        names = UTILITY.actions
        kind, group = "by-action", actions
    else:
        names = ("0.6", "0.7", "0.8", "0.9", "0.95", "0.99", "1")
        kind = "by-confidence"
        group = np.searchsorted(np.array(names, dtype=float), confidence)
        group = np.minimum(group, len(names) - 1)
    shares = np.bincount(group[rows], minlength=len(names)) / np.maximum(
        np.bincount(group, minlength=len(names)), 1
    )
    parts = [
        f"{name}={share:.6f}"
        for name, share in zip(names, shares, strict=True)
        if share
    ]
    return f"{kind}:{','.join(parts)}"


def best_option(
    decisions: Decided, rows: Array, y: Array, design: str | None
) -> Revision | None:
    """What `rfdlc recalibrate` would choose; None of refused labels."""
    try:
        sample = sampled(
            Labels(rows, y[rows], [None] * len(rows)),
            UTILITY,
            decisions.actions,
            decisions.probabilities.max(axis=1),
            decisions.expected,
            design,
            decisions.probabilities,
        )
        weights = review_weights(sample.group, sample.rows)
        found = options(
            DECIDER, decisions[: sample.decisions], rows, sample.targets, weights
        )
    except InputError:
        return None
    return next((option for option in found if option.pays), found[0])


def random_run(seed: int, samples: int, changed: bool) -> Row:
    """A log with labels of a random 10%."""
    rng = np.random.default_rng(seed)
    mix = CHANGED if changed else MIX
    z, y = model(rng, samples, mix)
    decisions = Decided.of(DECIDER, z, logits=True)
    rows = np.flatnonzero(rng.random(samples) < 0.1)
    best = best_option(decisions, rows, y, "random")
    if best is None:
        return {"refused": True, "written": False, "gain": np.nan, "claimed": np.nan}
    z, y = model(rng, OTHERS, mix)
    before, after = (each.decide(z, logits=True) for each in (DECIDER, best.decider))
    gain = float((UTILITY.matrix[y, after] - UTILITY.matrix[y, before]).mean())
    return {
        "refused": False,
        "written": best.pays,
        "gain": gain,
        "claimed": best.gain,
    }


def selected_run(seed: int, selection: str, stated: str) -> Row:
    """A log where nothing has changed, with labels that depend on the outcome."""
    rng = np.random.default_rng(seed)
    z, y = model(rng, SMALL, MIX)
    decisions = Decided.of(DECIDER, z, logits=True)
    rows = np.flatnonzero(rng.random(SMALL) < labelled_at(selection, y, decisions))
    best = best_option(decisions, rows, y, observed(stated, decisions, rows))
    return {"refused": best is None, "written": best is not None and best.pays}


def unchecked_run(seed: int, selection: str) -> Row:
    """The same, with weights by the labelled share of similar decisions and no check:
    what any sender got before designs were stated.
    """
    rng = np.random.default_rng(seed)
    z, y = model(rng, SMALL, MIX)
    decisions = Decided.of(DECIDER, z, logits=True)
    rows = np.flatnonzero(rng.random(SMALL) < labelled_at(selection, y, decisions))
    confidence = decisions.probabilities.max(axis=1)
    edges = np.quantile(confidence, np.arange(1, 5) / 5)
    group = np.searchsorted(edges, confidence) + 5 * (decisions.decided < 0)
    found = options(DECIDER, decisions, rows, y[rows], review_weights(group, rows))
    return {"written": any(option.pays for option in found)}


def share(runs: list[Row], key: str) -> float:
    return round(float(np.mean([run[key] for run in runs])), 3)


def random_rows(
    runs: int, first: int, workers: int, samples: int, changed: bool
) -> list[Row]:
    each = [(seed, samples, changed) for seed in range(first, first + runs)]
    done = list(in_parallel(random_run, each, workers))
    world = "another class mix" if changed else "nothing changed"
    what = f"{world}, {samples:,} decisions, 10% labelled at random"
    rows = [
        {
            "what": f"{what}: {runs} runs: labels refused",
            "value": share(done, "refused"),
            "required": "at most 0.01",
        }
    ]
    if not changed:
        written = {"value": share(done, "written"), "required": "at most 0.025"}
        return [*rows, {"what": f"{what}: {runs} runs: written", **written}]
    large = [run for run in done if run["gain"] >= LEAST_GAIN]
    gains = [float(np.mean([run[key] for run in large])) for key in ("gain", "claimed")]
    return [
        *rows,
        {
            "what": (
                f"{what}: {len(large)} of {runs} runs with a true gain of at least"
                f" {LEAST_GAIN}: written"
            ),
            "value": share(large, "written"),
            "required": "at least 0.8",
        },
        {
            "what": f"{what}: their claimed gain (reference: the true one)",
            "value": round(gains[1], 4),
            "reference": round(gains[0], 4),
        },
    ]


def selected_rows(runs: int, first: int, workers: int) -> list[Row]:
    rows = []
    seeds = range(first, first + runs)
    fewer = seeds[: runs // FEWER]
    for selection in SELECTIONS:
        what = f"nothing changed, {SMALL:,} decisions, {selection} labelled"
        before = list(
            in_parallel(unchecked_run, [(s, selection) for s in fewer], workers)
        )
        rows.append(
            {
                "what": f"{what}: {len(before)} runs without a design and a check",
                "value": share(before, "written"),
            }
        )
        for stated in STATED:
            some = fewer if stated == BY_CONFIDENCE else seeds
            each = [(seed, selection, stated) for seed in some]
            done = list(in_parallel(selected_run, each, workers))
            rows.append(
                {
                    "what": f"{what}, {stated}: {len(done)} runs: written",
                    "value": share(done, "written"),
                    "required": "" if stated == BY_CONFIDENCE else "at most 0.025",
                }
            )
            rows.append(
                {
                    "what": f"{what}, {stated}: {len(done)} runs: refused",
                    "value": share(done, "refused"),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    how = given.runs, given.first, given.workers
    rows = [
        *random_rows(*how, LARGE, changed=True),
        *random_rows(*how, SMALL, changed=False),
        *selected_rows(*how),
    ]
    write("recalibrate", rows, ["rfdlc", "numpy", "scipy"])


if __name__ == "__main__":
    main()

"""`rfdlc demo`: RF-DLC against plain cross-entropy in about a minute on two cores; `rfdlc methods`: all methods."""

from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from rfdlc.cli.request import JsonOption
from rfdlc.cli.train import metrics_table, ready
from rfdlc.cli.writing import escaped, new_table, print_json, print_rich

if TYPE_CHECKING:
    from rfdlc.decide.evaluation import Evaluation

DEMO = Path("runs/demo")
TAIL = "a tail sample decided as a more frequent class costs 1, a right decision gains 1"


def demo(
    out: Annotated[Path, Option("--out", "-o", help="Folder of both runs; if it exists, a number is added.")] = DEMO,
    seed: Annotated[int, Option(min=0, help="Seed of both runs.")] = 0,
    json: JsonOption = False,
) -> None:
    """Handwritten digits with a long tail: plain cross-entropy against RF-DLC, under a tail-sensitive utility.

    **Examples**

    - `rfdlc demo`
    - `rfdlc demo --seed 1 --json`
    """
    folder = _free(out)
    with ready():
        results = compare(folder, seed)
        page = _report(folder)
    columns = {name: result.to_dict() for name, result in results.items()}
    if json:
        print_json({"folder": str(folder), "report": str(page), **columns})
        return
    print_rich(metrics_table(columns, "digits-lt: long-tailed training data, balanced test data"))
    print(f"utility: {TAIL}\nrun folders: {folder}/ce and {folder}/rf-dlc")
    print(f"report: {page} (open it in a browser, and edit the utility there)")
    print(f"next: rfdlc evaluate {folder}/rf-dlc --utility tail-sensitive --penalty -0.5")


def compare(folder: Path, seed: int = 0) -> "dict[str, Evaluation]":
    """Train both on digits-lt, and score them on its balanced test split with one and the same utility."""
    from rfdlc.data.load import load
    from rfdlc.decide.decider import Decider
    from rfdlc.decide.evaluation import evaluate
    from rfdlc.decide.utility import Utility
    from rfdlc.training.train import train

    data = load("digits-lt")
    utility = Utility.tail_sensitive(data.classes)
    plain = train(data, "ce", folder / "ce", seed=seed)
    ours = train(data, "rf-dlc", folder / "rf-dlc", seed=seed)
    said = {model: model.predict(data) for model in (plain, ours)}
    most_probable = Decider(utility, calibration=None, rule="argmax")
    corrected = plain.decider.replace(target_prior="uniform").replace(utility=utility)
    return {
        "cross-entropy": evaluate(said[plain], decider=most_probable),
        "cross-entropy, calibrated, prior corrected, by expected utility": evaluate(said[plain], decider=corrected),
        "RF-DLC by expected utility": evaluate(said[ours], decider=ours.decider.replace(utility=utility)),
    }


def _report(folder: Path) -> Path:
    """Both runs side by side in one page, with the images of the costliest mistakes."""
    from rfdlc.data.load import load
    from rfdlc.decide.utility import Utility
    from rfdlc.integrations.report.report import report

    data = load("digits-lt")
    assert data.test is not None
    runs = {"RF-DLC": folder / "rf-dlc", "cross-entropy": folder / "ce"}
    utility = Utility.tail_sensitive(data.classes)
    return report(runs, utility, folder / "report.html", images=data.test.array, title="rfdlc demo: digits-lt")


def _free(folder: Path) -> Path:
    """The folder, or the first of folder-2, folder-3 ... that does not exist."""
    names = (folder if i == 1 else folder.with_name(f"{folder.name}-{i}") for i in count(1))
    return next(name for name in names if not name.exists())


def methods(json: JsonOption = False) -> None:
    """List every method: what it does, whose it is, its options, particles and stages, and its relative cost.

    Options are set like settings: `rfdlc train DATA --method ride diversity=0.1`. `--json` has their meanings.

    The cost is that of a training of 200 epochs with the method's own settings, where particles share no layers.

    **Examples**

    - `rfdlc methods`
    - `rfdlc methods --json`
    """
    with ready():
        from rfdlc.training.methods import METHODS

        rows = {name: _described(row) for name, row in METHODS.items()}
    print_json({"methods": rows}) if json else print_rich(_methods_table(rows))


def _described(row: Any) -> dict[str, Any]:
    return {
        "summary": row.summary,
        "reference": row.reference,
        "particles": row.settings.get("particles", 1),
        "stages": [stage.trains for stage in row.stages],
        "cost": round(row.relative_cost(), 2),
        "options": {name: {"default": o.default, "help": o.help} for name, o in row.options.items()},
    }


def _methods_table(rows: dict[str, dict[str, Any]]) -> Any:
    from rich.box import SIMPLE

    caption = "M: particles. Cards with formulas and sources: docs/methods.md"
    style: dict[str, Any] = {"caption": caption, "caption_justify": "left", "box": SIMPLE}
    table = new_table("method", "description and reference", "M", "stages", "cost", left=2, **style)
    for name, row in rows.items():
        options = " ".join(f"{key}={option['default']:g}" for key, option in row["options"].items())
        text = f"{escaped(row['summary'])} [dim]({escaped(row['reference'])})[/]" + (f"\n{options}" if options else "")
        table.add_row(f"[bold]{name}[/]", text, str(row["particles"]), " + ".join(row["stages"]), f"{row['cost']:.3g}")
    return table

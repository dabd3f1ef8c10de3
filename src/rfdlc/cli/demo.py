"""`rfdlc demo`: RF-DLC against plain cross-entropy in about a minute on two cores."""

from itertools import count
from pathlib import Path
from typing import Annotated

from typer import Option

import rfdlc
from rfdlc.cli.request import JsonOption, SeedOption
from rfdlc.cli.train import metrics_table, ready
from rfdlc.cli.writing import output

DEMO = Path("runs/demo")


def demo(
    out: Annotated[Path, Option("--out", "-o", help="Folder of both runs; if it exists, a number is added.")] = DEMO,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Handwritten digits with a long tail: plain cross-entropy against RF-DLC, under a tail-sensitive utility.

    **Examples**

    - `rfdlc demo`
    - `rfdlc demo --seed 1 --json`
    """
    names = (out if i == 1 else out.with_name(f"{out.name}-{i}") for i in count(1))
    folder = next(name for name in names if not name.exists())
    with ready():
        columns = {name: result.to_dict() for name, result in compare(folder, seed).items()}
    page = folder / "report.html"
    output(
        json,
        {"folder": str(folder), "report": str(page), **columns},
        metrics_table(columns, "digits-lt: long-tailed training data, balanced test data"),
        "utility: a tail sample decided as a more frequent class costs 1, a right decision gains 1",
        f"run folders: {folder}/ce and {folder}/rf-dlc",
        f"report: {page} (open it in a browser, and edit the utility there)",
        f"next: rfdlc evaluate {folder}/rf-dlc --utility tail-sensitive --penalty -0.5",
    )


def compare(folder: Path, seed: int = 0) -> "dict[str, rfdlc.Evaluation]":
    """Train both on digits-lt, and score them on its balanced test split with one utility; with a report of both."""
    data = rfdlc.load("digits-lt")
    assert data.test is not None
    utility = rfdlc.Utility.tail_sensitive(data.classes)
    plain, ours = (rfdlc.train(data, method, folder / method, seed=seed) for method in ("ce", "rf-dlc"))
    corrected = plain.decider.replace(target_prior="uniform", utility=utility)
    runs = {"RF-DLC": folder / "rf-dlc", "cross-entropy": folder / "ce"}
    rfdlc.report(runs, utility, folder / "report.html", images=data.test.array, title="rfdlc demo: digits-lt")
    decided = {
        "cross-entropy": (plain, rfdlc.Decider(utility, calibration=None, rule="argmax")),
        "cross-entropy, calibrated, prior corrected, by expected utility": (plain, corrected),
        "RF-DLC by expected utility": (ours, ours.decider.replace(utility=utility)),
    }
    return {name: rfdlc.evaluate(model.predict(data), decider=by) for name, (model, by) in decided.items()}

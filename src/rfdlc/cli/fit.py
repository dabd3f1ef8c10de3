"""`rfdlc fit`: a decider from held-out predictions."""

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

import rfdlc
from rfdlc.cli import decisions
from rfdlc.cli.request import FitRequest, JsonOption, takes_request
from rfdlc.cli.writing import check_other, check_writable, output
from rfdlc.errors import counted, listing
from rfdlc.formats.files import replacing

HELD_OUT = (
    "Predictions with labels of samples that the model was not trained on (CSV,"
    " Parquet, `.npz`), or a run folder, which has its own."
)


@takes_request
def fit(
    held_out: Annotated[Path, Argument(metavar="HELD_OUT", help=HELD_OUT)],
    request: FitRequest,
    out: Annotated[Path, Option("--out", "-o", help="The decider to write.")] = Path(
        "decider.json"
    ),
    json: JsonOption = False,
) -> None:
    """Fit a decider to held-out predictions: calibration, priors, costs, sets, budgets.

    `decide`, `evaluate`, `report`, `compare`, `predict`, `export` and `serve` take it
    by `--decider`. A run keeps its calibration, unless `--calibration` or `--balanced`
    say how to fit another. The file is written whole or not at all.

    **Examples**

    - `rfdlc fit held-out.csv --costs costs.csv -o decider.json`
    - `rfdlc fit held-out.csv --costs costs.csv --abstain -0.2 --budget 5%`
    - `rfdlc fit held-out.csv -u U.csv -c counts.csv --train-prior train --target-prior
      uniform`
    - `rfdlc fit held-out.csv --expert radiologist.csv --budget
      total=10%,radiologist=2%`
    - `rfdlc fit runs/a --sets macro --coverage 0.9 -o sets.json`
    - `rfdlc fit runs/a --abstain 0.7 --budget 5% --unfamiliar 2% -o
      runs/a/decider.json`
    """
    check_writable(out, endings=(".json",))
    check_other(out, held_out)
    predictions, decider = request.fit(held_out)
    with replacing(out) as beside:
        decider.save(beside)
    lines = [
        f"Fitted to {counted(len(predictions), 'held-out sample')} of {held_out}."
        f" Actions: {listing(decider.utility.actions)}.",
        *decisions.calibrated_lines(decider, predictions),
        *fitted_lines(decider, predictions),
        f"Written to {out}; next: rfdlc decide FILE --decider {out}",
    ]
    output(json, fit_summary(out, predictions, decider), *lines)


def fitted_lines(
    decider: "rfdlc.Decider", predictions: "rfdlc.Predictions"
) -> list[str]:
    """The budget, the thresholds of unfamiliar samples and the sets of a decider."""
    lines = []
    budget = decider.deferral.budget
    if budget is not None:
        shares = [f"{name} {100 * share:.3g}%" for name, share in budget.shares.items()]
        lines.append(
            f"Budget: {listing(shares)}; one at a time, samples are handed over for a"
            f" gain of {decisions.prices_in_words(budget)}."
        )
    unfamiliar = decider.deferral.unfamiliar
    if unfamiliar is not None:
        lines.append(
            "Unfamiliar samples are handed over; false alarms among held-out samples,"
            f" classes counting equally: {decisions.rates_in_words(unfamiliar)}."
        )
    if decider.sets is not None:
        sizes = decider.decide_sets(predictions).sum(axis=1)
        lines.append(decisions.set_line(decider, sizes))
    return lines


def fit_summary(
    out: Path, predictions: "rfdlc.Predictions", decider: "rfdlc.Decider"
) -> dict[str, Any]:
    """What was fitted, for JSON."""
    summary: dict[str, Any] = {
        "out": str(out),
        "samples": len(predictions),
        "left_out": predictions.left_out,
        "classes": list(decider.utility.classes.names),
        "actions": list(decider.utility.actions),
    }
    summary |= decisions.decider_summary(decider, predictions)
    parts = {
        "budget": decider.deferral.budget,
        "unfamiliar": decider.deferral.unfamiliar,
        "sets": decider.sets,
    }
    for name, part in parts.items():
        summary[name] = None if part is None else part.to_dict()
    return summary

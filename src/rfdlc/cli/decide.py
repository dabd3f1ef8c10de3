"""`rfdlc decide` and `rfdlc evaluate`: anybody's probabilities, decided and scored."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from rfdlc.cli.request import JsonOption, Request, takes_request
from rfdlc.cli.writing import check_writable, escaped, new_table, print_json, print_rich, rounded
from rfdlc.errors import expect
from rfdlc.files import replacing

if TYPE_CHECKING:
    from rfdlc.decide.decider import Decider
    from rfdlc.decide.predictions import Predictions


PREDICTIONS = "CSV or Parquet with one column per class (and `target`, `id`), `.npz` with scores, or a run folder."
RATE = "`TRUE:DECIDED`, classes or groups: share of TRUE that is decided as DECIDED. May be repeated."
UNCERTAINTIES = "decision-probability, max-probability, entropy, mutual-information, evidential or own."
File = Annotated[Path, Argument(help=PREDICTIONS)]


@takes_request
def decide(
    file: File,
    request: Request,
    out: Annotated[Path | None, Option("--out", "-o", help="Write the decisions: CSV or Parquet.")] = None,
    save_decider: Annotated[Path | None, Option(help="Write the fitted decider (JSON).")] = None,
    json: JsonOption = False,
) -> None:
    """Turn probabilities of any model into the actions with the highest expected utility.

    **Examples**

    - `rfdlc decide probs.csv --utility U.csv --out actions.csv`
    - `rfdlc decide probs.csv --costs costs.csv --calibrate val.csv --abstain -0.2 --out actions.csv`
    - `rfdlc decide probs.npz -u U.csv --train-prior train --target-prior uniform -c counts.csv --json`
    """
    if out is not None:
        check_writable(out, endings=(".csv", ".parquet"))
        same = out.exists() and file.exists() and out.samefile(file)
        expect(not same, f"{out}: this file holds the predictions; choose another file")
    if save_decider is not None:
        check_writable(save_decider)
    predictions, prepared = request.prepare(file)
    explained = prepared.explain(predictions)
    columns = _decision_columns(predictions, prepared, explained)
    if out is not None:
        from rfdlc.tables import write_table

        write_table(out, columns)
    if save_decider is not None:
        with replacing(save_decider) as beside:
            prepared.save(beside)
    summary = _summary(prepared, explained) | {"out": None if out is None else str(out)}
    if json:
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        print_json(summary if out is not None else summary | {"decisions": rows})
    else:
        print_rich(_summary_table(prepared, explained, summary), *_summary_lines(summary))


@takes_request
def evaluate(
    file: File,
    request: Request,
    rate: Annotated[list[str] | None, Option(help=RATE)] = None,
    uncertainty: Annotated[str, Option(help=UNCERTAINTIES)] = "decision-probability",
    bootstrap: Annotated[int, Option(help="Number of resamples for 95% intervals, such as 500.")] = 0,
    seed: Annotated[int, Option(min=0, help="Seed of the resampling.")] = 0,
    json: JsonOption = False,
) -> None:
    """Score predictions and the decisions made from them; the file needs a `target` column.

    **Examples**

    - `rfdlc evaluate probs.csv --utility U.csv`
    - `rfdlc evaluate probs.csv -u tail-sensitive -c counts.csv --calibrate val.csv --bootstrap 500`
    - `rfdlc evaluate runs/a --costs costs.csv --json`
    """
    from rfdlc.decide.evaluation import evaluate as score

    predictions, prepared = request.prepare(file)
    known = predictions.classes if predictions.named and predictions.classes.counts is not None else None
    pairs = [_pair(text) for text in rate or []]
    options: dict[str, Any] = {"uncertainty": uncertainty, "bootstrap": bootstrap, "seed": seed}
    result = score(predictions, decider=prepared, classes=known, groups=pairs, **options)
    summary = _decider_summary(prepared)
    if json:
        print_json(result.to_dict() | {"decider": summary})
        return
    print_rich(result, repr(prepared))
    warning = prepared.prior_warning(prepared.read_labelled(predictions, None)[1])
    if warning:
        warnings.warn(warning, stacklevel=1)
    if not result.accuracy_by_region:
        print_rich("[dim]For head, tail and false head rate give training counts: --classes counts.csv[/dim]")


def _pair(text: str) -> tuple[str, str]:
    true, _, wrong = text.partition(":")
    expect(true and wrong, f"rate {text!r}: expected TRUE:DECIDED, such as bird:airplane")
    return true, wrong


def _decision_columns(predictions: "Predictions", decider: "Decider", explained: Any) -> dict[str, Any]:
    actions, names = decider.utility.actions, decider.utility.classes.names
    ids = range(len(explained)) if predictions.ids is None else predictions.ids.tolist()
    return {
        "id": list(ids),
        "action": [actions[i] for i in explained.action],
        "expected_utility": rounded(explained.value),
        "runner_up": [actions[i] for i in explained.runner_up],
        "runner_up_utility": rounded(explained.runner_up_value),
        "argmax": [names[i] for i in explained.argmax],
        "argmax_probability": rounded(explained.probability),
    }


def _decider_summary(decider: "Decider") -> dict[str, Any]:
    """What was fitted and corrected, for JSON."""
    target, names = decider.target_prior, decider.utility.classes.names
    return {
        "rule": decider.rule,
        "combine": decider.combine,
        "calibration": str(decider.fitted) if decider.fitted else None,
        "decided_for": decider.decided_for,
        "target_prior": None if target is None else dict(zip(names, target.tolist(), strict=True)),
    }


def _summary(decider: "Decider", explained: Any) -> dict[str, Any]:
    import numpy as np

    counts = np.bincount(explained.action, minlength=len(explained.actions))
    return {
        "samples": len(explained),
        "actions": dict(zip(explained.actions, counts.tolist(), strict=True)),
        "mean_expected_utility": float(np.mean(explained.value)),
        "changed_from_argmax": int((decider.utility.decided_class[explained.action] != explained.argmax).sum()),
        **_decider_summary(decider),
    }


def _summary_table(decider: "Decider", explained: Any, summary: dict[str, Any], most: int = 25) -> Any:
    import numpy as np

    likely, total = np.bincount(explained.argmax, minlength=len(decider.utility.classes)), summary["samples"]
    title = f"{total:,} decisions by {decider.rule}"
    table = new_table("action", "decided", "share", "by arg max", title=title)
    chosen = zip(summary["actions"].items(), decider.utility.decided_class, strict=True)
    order = sorted(chosen, key=lambda item: -item[0][1])
    for (name, count), decided in order[:most]:
        before = f"{likely[decided]:,}" if decided >= 0 else ""
        table.add_row(escaped(name), f"{count:,}", f"{count / total:.1%}", before)
    if len(order) > most:
        rest = sum(count for (_, count), _ in order[most:])
        table.add_row(f"{len(order) - most} more actions", f"{rest:,}", f"{rest / total:.1%}", "")
    return table


def _summary_lines(summary: dict[str, Any]) -> list[str]:
    from rfdlc.decide.metrics import readable

    changed = f"{summary['changed_from_argmax']:,} of {summary['samples']:,} differ from arg max."
    lines = [f"Mean expected utility {readable(summary['mean_expected_utility'])}; {changed}"]
    if summary["calibration"] is not None:
        lines.append(f"Calibrated: {summary['calibration']}.")
    lines.append(f"D{escaped(summary['decided_for'])[1:]}.")
    return lines + ([f"Written to {escaped(summary['out'])}."] if summary["out"] else [])

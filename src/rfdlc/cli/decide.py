"""Commands on anybody's predictions: `rfdlc decide`, `evaluate`, `report`, `compare`,
`mislabelled`.
"""

import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

import rfdlc
from rfdlc.cli import decisions
from rfdlc.cli.fitting import per_day
from rfdlc.cli.lake import (
    check_in_memory,
    decide_files,
    evaluate_files,
    is_folder,
    large_lake,
)
from rfdlc.cli.reading import CLASSES, paths_in
from rfdlc.cli.request import (
    DecideRequest,
    FormatOption,
    JsonOption,
    LabelledRequest,
    SeedOption,
    takes_request,
)
from rfdlc.cli.writing import (
    SHOWN,
    action_table,
    check_other,
    check_writable,
    new_table,
    output,
    part_table,
)
from rfdlc.errors import are, expect, listing
from rfdlc.formats.tables import is_table, open_table

if TYPE_CHECKING:
    from rfdlc.reporting.runs import ReportRun

PREDICTIONS = (
    "CSV or Parquet with one column per class (and `target`, `id`), `.npz` with scores,"
    " or a run folder."
)
LAKE = "With --out FOLDER/: a folder, glob or URL of tables of any size."
KEEP = (
    "Copy a column to the decisions in a folder; may be repeated. A column `id`"
    " always is."
)
TIME = (
    "With `--budget 50/day`: the column with the time of each sample (or its shift,"
    " site, ...)."
)
SKIP = (
    "With --out FOLDER/: leave out rows and files that cannot be used, and name them at"
    " the end."
)
SEVERAL = (
    "Run folders, or predictions with a `target` column (CSV, Parquet, `.npz`), shown"
    " side by side."
)
RATE = (
    "`TRUE:DECIDED`, classes or groups, or any action: share of TRUE that is decided as"
    " DECIDED. May be repeated."
)
BY = (
    "Evaluate the samples of each value, too. A column of FILE or of --labels FILE; may"
    " be repeated."
)
PER_CLASS = (
    "Recall, precision, specificity, AUROC and mean probability of each class, too."
)
UNCERTAINTIES = (
    "decision-probability, max-probability, entropy, mutual-information, evidential or"
    " own."
)
RESAMPLES = (
    "Resamples for intervals of metrics of your own that are not means; the other"
    " intervals need none."
)
# accuracy of a model whose suspects are mostly its own mistakes, where few labels are
# wrong
WEAK = 0.7
File = Annotated[Path, Argument(help=PREDICTIONS)]
Files = Annotated[list[Path], Argument(help=SEVERAL, show_default=False)]


@takes_request
def decide(
    file: Annotated[str, Argument(help=f"{PREDICTIONS} {LAKE}")],
    request: DecideRequest,
    out: Annotated[
        str | None,
        Option("--out", "-o", help="Write the decisions: CSV, Parquet, or a folder."),
    ] = None,
    keep: Annotated[list[str] | None, Option(metavar="COLUMN", help=KEEP)] = None,
    skip_broken: Annotated[bool, Option("--skip-broken", help=SKIP)] = False,
    time: Annotated[str | None, Option(metavar="COLUMN", help=TIME)] = None,
    json: JsonOption = False,
) -> None:
    """Turn probabilities of any model into the actions with the highest expected
    utility.

    A budget is kept to exactly in one file. With `--out FOLDER/` it is kept to on
    average, by prices of held-out data: the share that is handed over may be larger,
    and is printed. `50/day` needs no held-out data.

    **Examples**

    - `rfdlc decide probs.csv --utility U.csv --out actions.csv`
    - `rfdlc decide probs.csv --costs costs.csv --calibrate val.csv --abstain -0.2 --out
      actions.csv`
    - `rfdlc decide probs.npz -u U.csv --train-prior train --target-prior uniform -c
      counts.csv --json`
    - `rfdlc decide probs.csv --calibrate val.csv --expert radiologist.csv --budget 5%
      --out actions.csv`
    - `rfdlc decide probs.csv --costs costs.csv --abstain -4 --budget 50/day --time
      booked_at --out actions.csv`
    - `rfdlc decide probs.csv --calibrate val.csv --sets macro --coverage 0.9 --out
      sets.csv`
    - `rfdlc decide lake/ --decider runs/a/decider.json --keep customer --skip-broken
      --out actions/`
    """
    import numpy as np

    from rfdlc.formats.table_writing import write_table
    from rfdlc.probabilities.scores import DECIDED

    limits = per_day(request.budget, time)
    if out is not None and is_folder(out):
        expect(
            not limits,
            f"--budget {request.budget} is for one file: name a CSV or Parquet file by"
            " --out",
        )
        decide_files(file, request, out, keep or [], skip_broken, json)
        return
    expect(
        not keep,
        f"--keep {listing(keep or ())} is for folders of results: give --out FOLDER/",
    )
    expect(
        not skip_broken, "--skip-broken is for folders of results: give --out FOLDER/"
    )
    path, written = check_in_memory(file), None if out is None else Path(out)
    check_writable(written, endings=(".csv", ".parquet"))
    check_other(written, path)
    names = open_table(path).names if is_table(path) else ()
    if limits:
        known = listing(names, 20) or "scores alone"
        expect(
            time in names,
            f"{path}: no column {time!r}, which --time names; it has {known}",
        )
        request = replace(request, budget=None)
    flags = (
        ["reason"] if {*DECIDED, "reason"} <= {*names} else []
    )  # of `predict --unfamiliar`
    predictions, decider = request.prepare(
        path, columns=[*([time] if time else []), *flags]
    )
    if flags and decider.deferral.unfamiliar is None:
        decisions.warn_of_flags(file, predictions.columns["reason"])
    decider = decider.replace(budget=None) if limits else decider
    daily = (
        rfdlc.PerDay(limits, np.asarray(predictions.columns[time])) if time else None
    )
    found, columns = (
        decider.explain(predictions, batch=daily or True),
        dict[str, list[Any]](),
    )
    by_day = (
        {} if daily is None else decisions.handed_over_by_day(daily, decider, found)
    )
    if out is not None or json:
        ids = range(len(found)) if predictions.ids is None else predictions.ids.tolist()
        columns = decisions.decision_columns(decider, found, ids)
    if written is not None:
        write_table(written, columns)
    counts, value = (
        np.bincount(found.action, minlength=len(found.actions)).tolist(),
        float(np.mean(found.value)),
    )
    changed = int((decider.utility.decided_class[found.action] != found.argmax).sum())
    actions = dict(zip(found.actions, counts, strict=True))
    if json:
        summary: dict[str, Any] = {"samples": len(found), "actions": actions}
        summary |= decisions.mean_values(decider.utility, value) | {
            "changed_from_argmax": changed
        }
        summary |= decisions.decider_summary(decider, predictions)
        summary |= {
            "budget": None
            if decider.deferral.budget is None
            else decider.deferral.budget.to_dict()
        }
        summary |= (
            {"budget": {"per_day": limits, "handed_over": by_day}} if by_day else {}
        )
        summary |= (
            {}
            if found.sets is None
            else {"sets": decisions.set_summary(decider, found.sets.sum(axis=1))}
        )
        summary["out"] = None if out is None else str(out)
        if out is None:
            rows = zip(*columns.values(), strict=True)
            summary["decisions"] = [
                dict(zip(columns, row, strict=True)) for row in rows
            ]
        output(True, summary)
        return
    mean = decisions.mean_value(decider.utility, value)
    other = decisions.likeliest(decider)
    lines = [f"{mean}; {changed:,} of {len(found):,} differ from {other}."]
    lines += decisions.calibrated_lines(decider, predictions)
    lines += decisions.deferral_lines(decider, found, actions)
    lines += [decisions.daily_line(limits, by_day, found)] if by_day else []
    lines += (
        []
        if found.sets is None
        else [decisions.set_line(decider, found.sets.sum(axis=1))]
    )
    lines += [] if out is None else [f"Written to {out}."]
    likely = np.bincount(found.argmax, minlength=len(decider.utility.classes))
    own = zip(found.actions, decider.utility.decided_class, strict=True)
    by_argmax = {name: int(likely[c]) for name, c in own if c >= 0}
    output(False, {}, action_table(actions, decider.rule, by_argmax, other), *lines)


@takes_request
def evaluate(
    file: Annotated[
        str,
        Argument(
            help=f"{PREDICTIONS} Also a folder, glob or URL of tables of any size."
        ),
    ],
    request: LabelledRequest,
    rate: Annotated[list[str] | None, Option(help=RATE)] = None,
    by: Annotated[list[str] | None, Option(metavar="COLUMN", help=BY)] = None,
    per_class: Annotated[bool, Option("--per-class", help=PER_CLASS)] = False,
    uncertainty: Annotated[str, Option(help=UNCERTAINTIES)] = "decision-probability",
    bootstrap: Annotated[int, Option(help=RESAMPLES)] = 0,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Score predictions and the decisions made from them; the file needs a `target`
    column, or --labels.

    **Examples**

    - `rfdlc evaluate probs.csv --utility U.csv`
    - `rfdlc evaluate probs.csv -u tail-sensitive -c counts.csv --calibrate val.csv`
    - `rfdlc evaluate probs.csv --labels patients.csv --by sex --by centre --json`
    - `rfdlc evaluate runs/a --costs costs.csv --per-class --rate "tumour:refer"`
    - `rfdlc evaluate probs.csv --calibrate val.csv --sets class --coverage 0.9`
    - `rfdlc evaluate "lake/*/*.parquet" --decider runs/a/decider.json`
    """
    from rfdlc.evaluation.comparison import gain_over_argmax
    from rfdlc.evaluation.metrics import readable

    pairs = [text.partition(":")[::2] for text in rate or []]
    for text, pair in zip(rate or [], pairs, strict=True):
        expect(
            all(pair), f"rate {text!r}: expected TRUE:DECIDED, such as bird:airplane"
        )
    if (lake := large_lake(file)) is not None:
        alone = (
            "--labels, --skip-unknown, --groups, --by and --per-class are for one file"
            " in memory: leave them out"
        )
        expect(
            not (
                request.labels
                or request.skip_unknown
                or request.groups
                or by
                or per_class
            ),
            alone,
        )
        evaluate_files(lake, request, pairs, uncertainty, json)
        return
    predictions, decider = request.prepare(Path(file), columns=by or ())
    known = (
        predictions.classes
        if predictions.named and predictions.classes.counts is not None
        else None
    )
    options: dict[str, Any] = {
        "uncertainty": uncertainty,
        "bootstrap": bootstrap,
        "seed": seed,
    }
    result = rfdlc.evaluate(
        predictions, decider=decider, classes=known, groups=pairs, **options
    )
    gain = gain_over_argmax(result, predictions, decider)
    parts: dict[str, Any] = {
        name: result.by(predictions.columns[name]) for name in by or ()
    }
    classes = result.per_class() if per_class else {}
    if json:
        summary: dict[str, Any] = {
            "decider": decisions.decider_summary(decider, predictions)
        }
        summary |= {
            "left_out": predictions.left_out,
            "over_argmax": None if gain is None else asdict(gain),
        }
        plain = {
            name: {value: part.to_dict() for value, part in found.items()}
            for name, found in parts.items()
        }
        summary |= {
            key: found
            for key, found in (("by", plain), ("per_class", classes))
            if found
        }
        output(True, result.to_dict() | summary)
        return
    tables = [
        part_table(name, found)
        for name, found in [*parts.items(), ("class", classes)]
        if found
    ]
    hint = (
        "For head, tail and false head rate give training counts: --classes RUN (a run"
        " folder) or counts.csv"
    )
    lines = [result.promise, *decisions.calibrated_lines(decider, predictions)]
    if gain is not None:
        shown, what = (
            (gain.as_cost, "cost") if decider.utility.has_costs else (gain, "utility")
        )
        more = (
            f"a gain of {readable(gain.difference)} ({readable(gain.low)} to"
            f" {readable(gain.high)})"
        )
        other = decisions.likeliest(decider)
        lines.insert(
            0,
            f"Mean {what} {readable(shown.b)}; {other} would have {readable(shown.a)}:"
            f" {more}.",
        )
    lines += (
        [] if result.accuracy_by_region or len(decider.utility.classes) == 2 else [hint]
    )
    lines += decisions.evaluated_shares(decider, result)
    output(False, {}, result, *tables, *lines)
    if warning := decider.model.prior_warning(
        decider.model.read_labelled(predictions, None)[1]
    ):
        warnings.warn(warning, stacklevel=1)


@takes_request
def report(
    files: Files,
    request: LabelledRequest,
    out: Annotated[Path, Option("--out", "-o", help="The HTML file to write.")] = Path(
        "report.html"
    ),
    title: Annotated[str | None, Option(help="Heading of the report.")] = None,
    images: Annotated[
        Path | None,
        Option(help="Folder with the image files named by the ids, for thumbnails."),
    ] = None,
    bootstrap: Annotated[int, Option(help=RESAMPLES)] = 200,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Write one HTML file in which the utility can be edited; it opens offline in any
    browser.

    **Examples**

    - `rfdlc report runs/a -o report.html`
    - `rfdlc report runs/a runs/b --utility U.csv -o report.html`
    - `rfdlc report probs.csv --classes counts.csv --utility tail-sensitive --abstain
      0.2 --calibrate val.csv`
    """
    from rfdlc.reporting.report import write_report

    check_writable(out, endings=(".html", ".htm"))
    runs = _runs(files, request)
    found = write_report(
        runs, out, images=images, title=title, bootstrap=bootstrap, seed=seed
    )
    metrics = {
        run.name: found[run.name].to_dict() | {"left_out": run.predictions.left_out}
        for run in runs
    }
    summary = {"out": str(out), "bytes": out.stat().st_size, "runs": metrics}
    shown = [part for pair in found.items() for part in pair]
    # Not shown unasked: a page is made to be passed on, and the images may be of
    # people.
    place = None if images else runs[0].image_folder
    hint = (
        [f"next: --images {place} puts the images of the samples into the page"]
        if place
        else []
    )
    output(json, summary, *shown, f"Written to {out}: open it in a browser.", *hint)


@takes_request
def compare(
    a: Annotated[
        str,
        Argument(
            help=(
                "A run folder or predictions with a `target` column; several seeds with"
                " commas between them."
            )
        ),
    ],
    b: Annotated[
        str, Argument(help="The same for the other side: the same test samples.")
    ],
    request: LabelledRequest,
    bootstrap: Annotated[int, Option(help=RESAMPLES)] = 300,
    seed: SeedOption = 0,
    form: FormatOption = None,
    json: JsonOption = False,
) -> None:
    """Paired differences B - A of every metric with 95% intervals and p, adjusted for
    the other metrics.

    Mean utility is the question: its p is not adjusted, and the last line answers it.

    **Examples**

    - `rfdlc compare runs/a runs/b --utility U.csv`
    - `rfdlc compare a/0,a/1,a/2 b/0,b/1,b/2 --json`
    - `rfdlc compare runs/grid/method=ce,seed=0 runs/grid/method=la,seed=0`
    """
    from rfdlc.formats.table_writing import typeset
    from rfdlc.reporting.runs import compare_runs

    first, second = map(paths_in, (a, b))
    runs = _runs([*first, *second], request)
    found = compare_runs(runs[: len(first)], runs[len(first) :], bootstrap, seed)
    how = [
        f"{run.name}:"
        f" {' '.join(decisions.calibrated_lines(run.decider, run.predictions))}"
        for run in runs
    ]
    table = typeset(form, found.columns, found.rows()) if form else ""
    lost = {"left_out": {run.name: run.predictions.left_out for run in runs}}
    output(
        json,
        found.to_dict() | lost,
        *([table] if form else [found, *how, found.verdict]),
    )


def _runs(files: list[Path], request: LabelledRequest) -> "list[ReportRun]":
    """Each file with the same options, as `evaluate` reads them, and perhaps a
    calibration file of its own.
    """
    from rfdlc.reporting.runs import alike, prepared, run_names

    known = (file / CLASSES for file in files)
    like = next(
        (rfdlc.Classes.from_json(file) for file in known if file.is_file()), None
    )
    runs: list[ReportRun] = []
    for file, name, own in zip(
        files, run_names(files), request.of_each(files), strict=True
    ):
        runs.append(prepared(name, *own.prepare(file, like), file))
        like = like or runs[0].classes
    return alike(runs)


@takes_request
def mislabelled(
    file: File,
    request: LabelledRequest,
    out: Annotated[
        Path | None, Option("--out", "-o", help="Write all suspects: CSV or Parquet.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """List samples whose label is probably wrong, the most suspicious first.

    Needs predictions by models that have not seen the samples, such as those of `rfdlc
    train --cv`. Labels of rare classes are judged by what is usual for these classes;
    classes with one or two samples are not judged. Evidence is strong where a model
    that is this sure agrees with most labels. These are shown; the file has all, strong
    or weak.

    **Examples**

    - `rfdlc train patients.csv --out runs/folds --cv 5 && rfdlc mislabelled runs/folds
      --out suspects.csv`
    """
    from rfdlc.formats.table_writing import write_table

    check_writable(out, endings=(".csv", ".parquet"))
    check_other(out, file)
    predictions, decider = request.prepare(file)
    found = rfdlc.find_mislabelled(predictions, decider=decider)
    ids = (
        found.rows.tolist()
        if predictions.ids is None
        else predictions.ids[found.rows].tolist()
    )
    label, suggested = (
        [*found.classes.select(given)] for given in (found.labels, found.suggested)
    )
    columns = {
        "id": ids,
        "label": label,
        "suggested": suggested,
        "evidence": found.evidence.round(4).tolist(),
    }
    columns["strong"] = [place < found.strong for place in range(len(ids))]
    if out is not None:
        write_table(out, columns)
    rows = [
        dict(zip(columns, row, strict=True))
        for row in zip(*columns.values(), strict=True)
    ]
    table = new_table("id", "label", "suggested", "evidence in nats", left=3)
    shown, weak = min(SHOWN, found.strong), len(rows) - found.strong
    for row in rows[:shown]:
        table.add_row(*map(str, [*row.values()][:-1]))
    have, them = ("has", "it") if found.strong == 1 else ("have", "them")
    against = (
        f"{found.strong:,} of {len(predictions):,} labels {have} strong evidence"
        f" against {them}"
    )
    against += f" ({shown} {are(shown)} shown)" if shown else ""
    lines = [
        f"{against}, {weak:,} more have weak evidence"
        f" ({f'{out} has' if out else '--out FILE writes'} all)."
    ]
    right = (
        f"The model is right for {found.accuracy:.0%} of these samples, by their labels"
    )
    lines += [
        right
        + (
            ": most suspects will be its own mistakes."
            if found.accuracy < WEAK
            else "."
        )
    ]
    lines += (
        [
            "Where classes overlap, right labels are among the suspects, too: look at"
            " each."
        ]
        if found.strong
        else []
    )
    lines += (
        [f"Not judged, as they have one or two samples: {listing(found.unjudged)}."]
        if found.unjudged
        else []
    )
    summary = {
        "samples": len(predictions),
        "accuracy": found.accuracy,
        "strong": found.strong,
        "suspects": rows,
    }
    output(
        json,
        summary | {"not_judged": found.unjudged},
        *([table] if found.strong else []),
        *lines,
    )

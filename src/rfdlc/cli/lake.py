"""`rfdlc decide` and `rfdlc evaluate` for tables in many files, which do not have to
fit into memory.
"""

import os
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rfdlc
from rfdlc.cli import decisions
from rfdlc.cli.request import Request
from rfdlc.cli.writing import SHOWN, action_table, output
from rfdlc.errors import BrokenRows, InputError, counted, expect, listing
from rfdlc.formats.tables import PARQUET

if TYPE_CHECKING:
    from rfdlc.lakes.reading import Lake

MOST_BYTES = (
    2**28
)  # of Parquet files that are evaluated in memory, with intervals of every metric


def check_in_memory(file: str) -> Path:
    """The path of predictions that are read at once; raises for globs and URLs."""
    from rfdlc.lakes.reading import names_many

    expect(
        not names_many(file),
        f"{file}: several files are decided into a folder: give --out FOLDER/",
    )
    return Path(file)


def large_lake(file: str) -> "Lake | None":
    """Predictions that are evaluated from sums: globs, URLs, folders with partitions,
    other files or many bytes.
    """
    from rfdlc.lakes.reading import Lake, is_lake, names_many

    if not is_lake(file):
        return None
    lake = Lake(file)
    plain = all(
        "/" not in unit.name and unit.file.lower().endswith(PARQUET)
        for unit in lake.units
    )
    return (
        None
        if plain
        and not names_many(file)
        and sum(unit.size for unit in lake.units) <= MOST_BYTES
        else lake
    )


def evaluate_files(
    lake: "Lake", request: Request, groups: Any, uncertainty: str, json: bool
) -> None:
    """Evaluate from sums."""
    from rfdlc.lakes.evaluate import evaluate_lake

    decider = prepare_lake(request, lake, ())
    found = evaluate_lake(
        lake, decider, logits=request.logits, groups=groups, uncertainty=uncertainty
    )
    output(
        json,
        found.to_dict() | {"decided_for": decider.model.decided_for},
        found,
        found.promise,
        repr(decider),
    )


def is_folder(out: str | None) -> bool:
    """Whether decisions are written to a folder, file by file."""
    return out is not None and (
        "://" in out or out.endswith("/") or not os.path.splitext(out)[1]
    )


def prepare_lake(
    request: Request, lake: "Lake", keep: Sequence[str]
) -> "rfdlc.Decider":
    """The decider that the options ask for; columns are the classes, unless options or
    a saved decider name them.
    """
    from rfdlc.lakes.decide import lake_prior
    from rfdlc.lakes.reading import check_first_rows

    classes = request.checked_classes()
    named = None if classes else request.named_classes(lake.names, lake.source)
    if named is not None:
        check_first_rows(lake, named, request.names_classes)
    known = classes or named or _class_columns(lake, keep)
    estimate = partial(lake_prior, lake, logits=request.logits)
    return request.make_decider(Path(lake.source), classes, known, True, estimate)


def _class_columns(lake: "Lake", keep: Sequence[str]) -> "rfdlc.Classes":
    """Every column but `id`, `target` and those that are kept; raises for one that does
    not hold numbers.
    """
    from rfdlc.formats.tables import matrix_of
    from rfdlc.probabilities.scores import BOOK_KEEPING, class_columns

    names, first = (
        class_columns([name for name in lake.names if name not in keep]),
        lake.units[0],
    )
    expect(
        len(names) > 1,
        f"{lake.source}: the class columns are {listing(names) or 'none'}: expected one"
        " per class",
    )
    try:
        for batch in islice(lake.batches(first, names), 1):
            matrix_of(batch, names, first.file)
    except BrokenRows:  # they do hold numbers
        pass
    except InputError as error:
        others = (
            f"every column but {' and '.join(BOOK_KEEPING)} is a class: name the"
            " classes by --classes"
        )
        raise InputError(f"{error}; {others}, or keep the column by --keep") from None
    return rfdlc.Classes(tuple(names))


def decide_files(
    source: str,
    request: Request,
    out: str,
    keep: Sequence[str],
    skip_broken: bool,
    json: bool,
) -> None:
    """Decide file by file."""
    from rfdlc.lakes.decide import decide_lake
    from rfdlc.lakes.reading import Lake

    lake = Lake(source, skip_broken=skip_broken)
    decider = prepare_lake(request, lake, keep)
    found = decide_lake(lake, out, decider, keep=keep, logits=request.logits)
    summary: dict[str, Any] = {
        "samples": found.samples,
        "files": found.files,
        "actions": found.actions,
    }
    summary |= decisions.mean_values(decider.utility, found.mean_expected_utility)
    summary |= {"decided_for": decider.model.decided_for}
    summary |= {"files_before": found.before, "skipped": found.skipped, "budget": None}
    lines = [
        f"{decisions.mean_value(decider.utility, found.mean_expected_utility)};"
        f" d{decider.model.decided_for[1:]}."
    ]
    if (budget := decider.deferral.budget) is not None:
        handed = budget.handed_over(found.actions, decider.utility)
        summary["budget"] = budget.to_dict() | {
            "kept_by": "prices",
            "handed_over": handed,
        }
        lines.append(
            decisions.share_line(
                budget, handed, decider.deferral.unfamiliar is not None
            )
        )
        decider.deferral.warn_of_share(found.actions, decider.utility)
    lines += ["Other processes have not finished their files yet."] * (
        not found.complete
    )
    new, place = found.files - found.before, f"{counted(found.files, 'file')} in {out}"
    lines += [
        (
            f"{place}: all had been decided already."
            if not new
            else f"{place}: {new:,} decided now."
        )
    ]
    for own in found.skipped[:SHOWN]:
        what = (
            f"{counted(len(own['rows']), 'row')} ({listing(own['rows'])})"
            if own["rows"]
            else "a file"
        )
        lines.append(f"Left out {what}: {own['reason']}")
    lines += [f"Left out in {len(found.skipped):,} files; --json lists all."] * (
        len(found.skipped) > SHOWN
    )
    output(
        json,
        summary | {"out": out, "complete": found.complete},
        action_table(found.actions, decider.rule),
        *lines,
    )

"""decide_lake: decisions for tables of any size, file by file; after a kill, the same
call continues.

What is written for a file is complete or not there, and says in its metadata which
version of the file it belongs to.
"""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import Any

import numpy as np

from rfdlc.data.dataset import SKIPPING
from rfdlc.decisions.decider import Decider
from rfdlc.errors import BrokenRows, InputError, expect, listing
from rfdlc.formats.files import parse_json
from rfdlc.formats.identity import check_same_model
from rfdlc.formats.resumable import ResumableFolder, share_of
from rfdlc.formats.table_writing import open_writer
from rfdlc.formats.tables import BLOCK_BYTES
from rfdlc.lakes.reading import (
    BrokenFile,
    Lake,
    Unit,
    check_first_rows,
    cores,
    predictions_of,
)
from rfdlc.lakes.tables import DecideTable
from rfdlc.probabilities.predictions import Predictions
from rfdlc.probabilities.priors import PriorEstimate
from rfdlc.probabilities.scores import KIND
from rfdlc.progress import live

WRITTEN = b"rfdlc.decided"  # key of the metadata of what is written
GROUP_ROWS = 2**20  # of a row group
MOST_ESTIMATED = 100_000  # rows from which a class prior is estimated
REPEATED = ("action", "reason")  # columns with few different values
Report = Callable[[int], None]
Summary = dict[str, Any]  # of the decisions of one unit


@dataclass(frozen=True)
class LakeDecisions:
    """What was written."""

    out: str
    samples: int
    files: int
    actions: dict[str, int]  # how often each was chosen
    mean_expected_utility: float
    before: int  # files that were there already, of the same version
    complete: bool = True  # False where other processes still have files to do
    skipped: Sequence[
        dict[str, Any]
    ] = ()  # file, rows that were left out (None: all of a file or part), first reason


def decide_lake(
    source: str | Path | Lake,
    out: str | Path,
    decider: Decider,
    *,
    keep: Sequence[str] = (),
    logits: bool = False,
    skip_broken: bool = False,
) -> LakeDecisions:
    """Decide tables of any size in constant memory, on all cores; after a kill, the
    same call continues.

    Parameters
    ----------
    source : str or Path
        A folder, file or glob of Parquet, Arrow or CSV files with one column per class,
        or an fsspec URL.
    out : str or Path
        The folder or URL for a Parquet file per file, with the same rows in the same
        order and below the same partitions. Files that have not changed since they were
        decided are skipped.
    decider : Decider
        Budgets are kept to by their prices, on average; `decide` with `batch=True`
        needs all samples at once.
    keep : sequence of str
        Columns that are copied; `id` always is, if there is one. Other columns are not
        read.
    logits : bool
        Whether the columns of the classes hold logits.
    skip_broken : bool
        Leave out rows and files that cannot be used, and name them in `skipped`;
        otherwise the first one raises.

    Returns
    -------
    LakeDecisions
    """
    lake = source if isinstance(source, Lake) else Lake(source, skip_broken=skip_broken)
    copied = _copied_columns(lake, decider.utility.classes.names, keep)
    check_first_rows(lake, decider.utility.classes, "the utility")
    check_model_of(lake, decider)
    table = DecideTable(decider, copied, logits)
    job = {"decider": decider.to_dict(), "columns": copied, "logits": logits}
    folder = ResumableFolder(out, job)
    broken_files = dict(lake.broken)

    def decide(unit: Unit, report: Report) -> Summary | None:
        try:
            return _decide(lake, table, folder, unit, report)
        except BrokenFile as error:
            if not lake.skip_broken:
                raise InputError(f"{error}; or leave it out with {SKIPPING}") from None
            folder.delete(unit.name)  # decisions of an earlier version of the file
            broken_files[unit.file] = str(error)
            return None

    with folder.opened() as names:
        before = _decided_before(lake, folder, names)
        missing = [u for u in share_of(lake.units) if u.name not in before]
        rows_before = sum(summary["samples"] for summary in before.values())
        with live(lake.rows, "Deciding", rows_before) as show:
            tried = in_threads(decide, missing, show)
        now = {name: summary for name, summary in tried.items() if summary is not None}
        summaries = [*before.values(), *now.values()]
        if broken_files and not summaries:
            raise InputError(next(iter(broken_files.values())))
    counts = np.sum([summary["actions"] for summary in summaries], axis=0).tolist()
    samples = sum(summary["samples"] for summary in summaries)
    total_utility = sum(summary["value"] for summary in summaries)
    skipped = [summary["skipped"] for summary in summaries if summary.get("skipped")]
    for file, reason in broken_files.items():
        skipped.append({"file": file, "rows": None, "reason": reason})
    return LakeDecisions(
        out=str(out),
        samples=samples,
        files=len(summaries),
        actions=dict(zip(decider.utility.actions, counts, strict=True)),
        mean_expected_utility=total_utility / max(1, samples),
        before=len(before),
        complete=len(before) + len(tried) == len(lake.units),
        skipped=sorted(skipped, key=lambda lost: str(lost["file"])),
    )


def _copied_columns(
    lake: Lake, classes: Sequence[str], keep: Sequence[str]
) -> tuple[str, ...]:
    """The columns to copy, each once; raises where a needed column is missing."""
    copied = list(keep)
    if "id" in lake.names and "id" not in classes:
        copied.insert(0, "id")
    missing = [name for name in (*classes, *copied) if name not in lake.names]
    if missing:
        raise InputError(
            f"{lake.source}: no column {listing(missing)}; it has {listing(lake.names)}"
        )
    return tuple(dict.fromkeys(copied))


def _decided_before(
    lake: Lake, folder: ResumableFolder, names: set[str]
) -> dict[str, Summary]:
    """The summaries in files that are written already, of the present versions of their
    sources.
    """
    units = {unit.name: unit for unit in lake.units}
    if len(units) < len(lake.units):
        raise InputError(
            f"{folder.place}: two files would be written to one name: rename one of"
            " them"
        )
    stale = sorted(names - set(units))
    if stale:
        raise InputError(
            f"{folder.place} holds decisions of files that are gone"
            f" ({listing(stale)}): remove them"
        )

    def up_to_date(name: str) -> Summary | None:
        summary = _summary_in(folder, name)
        # Without some rows, a file is complete only for who leaves them out.
        if summary.get("skipped") and not lake.skip_broken:
            return None
        if summary.get("version") != lake.version(units[name]):
            return None
        return summary

    there = sorted(names)
    with ThreadPoolExecutor(cores()) as pool:
        summaries = pool.map(up_to_date, there)
        return {
            name: summary
            for name, summary in zip(there, summaries, strict=True)
            if summary is not None
        }


def _summary_in(folder: ResumableFolder, name: str) -> Summary:
    """What a written file says about itself; nothing where it cannot be read."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with folder.open(name) as file:
            metadata = ParquetFile(file).metadata.metadata or {}
        summary: Summary = parse_json(metadata.get(WRITTEN, b"{}"))
    except (OSError, ValueError, ArrowException):
        return {}
    return summary


def _decide(
    lake: Lake,
    table: DecideTable,
    folder: ResumableFolder,
    unit: Unit,
    report: Report,
) -> Summary:
    """Write the decisions of one unit; returns the summary of them, which the file
    has as well.
    """
    from pyarrow import concat_tables
    from pyarrow import table as to_table

    classes = table.decider.utility.classes.names
    others = [
        name
        for name in (*table.keep, KIND)
        if name in lake.names and name not in classes
    ]
    version = lake.version(unit)
    broken = list[BrokenRows]()
    counts = np.zeros(len(table.decider.utility.actions), dtype=np.int64)
    total_utility = 0.0
    group = list[Any]()  # tables, until they are enough for a row group

    def task(batch: Any) -> dict[str, Any]:
        return table.columns(batch, unit.file)

    with ExitStack() as stack:
        stream = stack.enter_context(folder.replacing(unit.name))
        writer = None
        for columns, batch, rows in lake.each(unit, task, classes, others, broken):
            kept = {name: batch.column(name) for name in table.keep}
            group.append(to_table({**kept, **columns}))
            codes = columns["action"].indices.to_numpy()
            counts += np.bincount(codes, minlength=len(counts))
            total_utility += float(columns["expected_utility"].sum(dtype=np.float64))
            report(rows)
            if writer is None:
                writer = stack.enter_context(
                    open_writer(stream, group[0].schema, ".parquet", REPEATED)
                )
            if sum(map(len, group)) >= GROUP_ROWS:
                writer.write_table(concat_tables(group))
                group = []
        assert writer is not None  # a file without rows gives an empty batch
        if group:
            writer.write_table(concat_tables(group))
        samples = int(counts.sum())
        if broken and not samples:
            raise BrokenFile(str(broken[0]))
        summary = {
            "version": version,
            "samples": samples,
            "actions": counts.tolist(),
            "value": total_utility,
        }
        if broken:
            first = min(broken, key=lambda error: error.rows[0])
            summary["skipped"] = {
                "file": unit.file,
                "rows": sorted({row for error in broken for row in error.rows}),
                "reason": str(first),
            }
        writer.add_key_value_metadata({WRITTEN: json.dumps(summary)})
    return summary


def check_model_of(lake: Lake, decider: Decider) -> None:
    """Warn where tables do not say of which model their scores are, but the decider
    does; where they do, each batch is compared.
    """
    if decider.model.source and KIND not in lake.names:
        check_same_model(lake.source, "", "the decider", decider.model.source, "")


def lake_prior(lake: Lake, decider: Decider, *, logits: bool = False) -> PriorEstimate:
    """The class prior of a lake in one pass: of many rows, from rows at equal
    distances, `MOST_ESTIMATED` in all.
    """
    names, classes = decider.utility.classes.names, decider.utility.classes
    step = max(1, -(-_rows(lake, names) // MOST_ESTIMATED))
    others = [KIND] if KIND in lake.names and KIND not in names else []

    read = partial(predictions_of, classes=classes, logits=logits)

    def some(unit: Unit, report: Report) -> list[Any]:
        def task(batch: Any) -> list[Any]:
            return (
                [read(batch, where=unit.file).scores.checked()]
                if batch.num_rows
                else []
            )

        found = list[Any]()
        with suppress(*[BrokenFile] if lake.skip_broken else []):
            for own, _, rows in lake.each(unit, task, names, others, [], step):
                found += own
                report(rows)
        return found

    with live(lake.rows, "Estimating the prior") as show:
        by_unit = in_threads(some, lake.units, show)
    scores = [each for unit in lake.units for each in by_unit[unit.name]]
    expect(
        scores,
        f"{lake.source}: has no rows, from which a class prior could be estimated",
    )
    values, corrected = (
        np.concatenate([each.values for each in scores], axis=1),
        any(e.corrected for e in scores),
    )
    models = {e.model for e in scores}
    expect(
        len(models) == 1,
        f"{lake.source}: holds scores of {len(models)} models: decide those of each"
        " alone",
    )
    kind = "logits" if logits else "probabilities"
    return decider.estimate_prior(
        Predictions(
            **{kind: values}, classes=classes, corrected=corrected, model=models.pop()
        )
    )


def _rows(lake: Lake, names: Sequence[str]) -> int:
    """The number of rows, estimated from the size of the first rows where files do not
    say it.
    """
    if lake.rows is not None:
        return lake.rows
    share = 1.0
    for unit in lake.units:
        with suppress(*[InputError] if lake.skip_broken else []):
            share = next(iter(lake.batches(unit, names))).num_rows / max(
                1, min(BLOCK_BYTES, unit.size)
            )
            break
    return int(share * sum(unit.size for unit in lake.units))


def in_threads(
    task: Callable[[Unit, Report], Any],
    units: Sequence[Unit],
    show: Callable[[int, str], None],
) -> dict[str, Any]:
    """The task of each unit by name, one thread per core; the first error ends all."""
    from threadpoolctl import threadpool_limits

    lock, stop, done = Lock(), Event(), 0

    def report(rows: int) -> None:
        nonlocal done
        with lock:
            done += rows
            show(rows, f"{done:,} rows")
        if stop.is_set():
            raise InterruptedError

    # A thread per core is enough: those of BLAS would wait for each other.
    with threadpool_limits(1), ThreadPoolExecutor(cores()) as pool:
        futures = {pool.submit(task, unit, report): unit.name for unit in units}
        try:
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return {name: future.result() for future, name in futures.items()}

"""decide_lake: decisions for tables of any size, file by file; after a kill, the same
call continues.

What is written for a file is complete or not there, and says in its metadata which
version of the file it belongs to.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import Any

import numpy as np

from rfdlc.data.dataset import SKIPPING
from rfdlc.decisions.decider import Decider
from rfdlc.decisions.rules import Explanation
from rfdlc.decisions.sets import PredictionSets, set_texts
from rfdlc.errors import BrokenRows, InputError, expect, listing
from rfdlc.formats.files import locked, parse_json
from rfdlc.formats.identity import check_same_model
from rfdlc.formats.table_writing import open_writer
from rfdlc.formats.tables import BLOCK_BYTES
from rfdlc.lakes.reading import (
    JOB,
    BrokenFile,
    Lake,
    Unit,
    check_first_rows,
    cores,
    filesystem,
    predictions_of,
)
from rfdlc.predicting.parts import ranks
from rfdlc.probabilities.predictions import Predictions
from rfdlc.probabilities.priors import PriorEstimate
from rfdlc.probabilities.scores import DECIDED, KIND
from rfdlc.progress import live

WRITTEN = b"rfdlc.decided"  # key of the metadata of what is written
GROUP_ROWS = 2**20  # of a row group
MOST_ESTIMATED = 100_000  # rows from which a class prior is estimated
Report = Callable[[int], None]


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


@dataclass(frozen=True)
class DecideTable:
    """A picklable function from tables of scores to tables of decisions, for any engine
    that maps tables.

    Parameters
    ----------
    decider : Decider
    keep : sequence of str
        Columns that are copied.
    logits : bool
        Whether the columns of the classes hold logits.

    Examples
    --------
    >>> import pyarrow
    >>> from rfdlc import Utility
    >>> decide = DecideTable(
    ...     Decider(Utility([[1, 0], [-5, 1]], ["healthy", "ill"])), keep=["id"]
    ... )
    >>> decide(
    ...     pyarrow.table({"id": [7, 8], "healthy": [0.9, 0.7], "ill": [0.1, 0.3]})
    ... ).select([0, 1]).to_pydict()
    {'id': [7, 8], 'action': ['healthy', 'ill']}
    """

    decider: Decider
    keep: Sequence[str] = ()
    logits: bool = False

    def __post_init__(self) -> None:
        sets = self.decider.sets
        drawn = isinstance(sets, PredictionSets) and sets.ties is not None
        expect(
            not drawn,
            "randomised sets depend on the order of all samples: fit sets that are not"
            " randomised",
        )
        written = [name for name, _ in self._fields()]
        clash = [name for name in self.keep if name in written]
        expect(
            not clash,
            f"column {listing(clash)} cannot be kept: decisions are written to a column"
            " of this name",
        )

    def __call__(self, table: Any) -> Any:
        """The decisions of a `pyarrow.Table` or `RecordBatch`, in the order of its
        rows.
        """
        import pyarrow

        columns, kept = (
            self.columns(table),
            {name: table.column(name) for name in self.keep},
        )
        fields = [table.schema.field(name) for name in self.keep]
        return pyarrow.table(
            {**kept, **columns}, pyarrow.schema([*fields, *self._fields()])
        )

    def columns(self, table: Any, where: str = "table") -> dict[str, Any]:
        """The columns of decisions by name: arrays of numpy, and of pyarrow for
        texts.
        """
        from pyarrow import DictionaryArray, array

        utility, fields = self.decider.utility, self._fields()
        action, value = np.empty(0, dtype=np.intp), np.empty(0)
        details: dict[str, Any] = {
            name: array([], kind) for name, kind in fields[len(DECIDED) :]
        }
        # Sums over the classes, as in a softmax, would be rounded otherwise in another
        # layout.
        by_columns = (
            not details
            and self.decider.model.calibrator is None
            and not self.logits
            and self.decider.gains_tell
        )
        if table.num_rows:
            given: dict[str, Any] = {
                "logits": self.logits,
                "where": where,
                "by_columns": by_columns,
            }
            predictions = predictions_of(table, utility.classes, **given)
            found = self.decider.explain(predictions) if details else None
            both = (
                self.decider.decide_values(predictions)
                if found is None
                else (found.action, found.value)
            )
            action, value = both[0], np.asarray(both[1], dtype=np.float64)
            details = {} if found is None else self._details(found)
        codes = action.astype(np.int8 if len(utility.actions) < 128 else np.int32)
        actions = DictionaryArray.from_arrays(codes, array(utility.actions, "string"))
        return {
            "action": actions,
            "expected_utility": value.astype(np.float32),
            **details,
        }

    def _details(self, found: Explanation) -> dict[str, Any]:
        """Why samples are handed over, and sets, where the decider has them."""
        from pyarrow import array

        details: dict[str, Any] = {"reason": array(found.reason, "string")}
        if found.sets is not None:
            texts = set_texts(found.sets, self.decider.utility.classes)
            details |= {
                "set": array(texts, "string"),
                "set_size": found.sets.sum(axis=1).astype(np.int32),
            }
        return {name: details[name] for name, _ in self._fields()[len(DECIDED) :]}

    def _fields(self) -> list[tuple[str, str]]:
        fields = [("action", "string"), ("expected_utility", "float32")]
        fields += (
            [("reason", "string")]
            if (self.decider.utility.decided_class < 0).any()
            else []
        )
        return fields + (
            [("set", "string"), ("set_size", "int32")]
            if self.decider.sets is not None
            else []
        )


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
    classes = decider.utility.classes.names
    copied = tuple(
        dict.fromkeys(
            [*(["id"] if "id" in lake.names and "id" not in classes else []), *keep]
        )
    )
    missing = [name for name in (*classes, *copied) if name not in lake.names]
    expect(
        not missing,
        f"{lake.source}: no column {listing(missing)}; it has {listing(lake.names)}",
    )
    check_first_rows(lake, decider.utility.classes, "the utility")
    check_model_of(lake, decider)
    table = DecideTable(decider, copied, logits)
    job = {"decider": decider.to_dict(), "columns": table.keep, "logits": logits}
    result = Result(str(out), json.loads(json.dumps(job)))
    rank, world_size = ranks()
    skipped = dict(lake.broken)

    def decide(unit: Unit, report: Report) -> dict[str, Any] | None:
        try:
            return _decide(lake, table, result, unit, report)
        except BrokenFile as error:
            if not lake.skip_broken:
                raise InputError(f"{error}; or leave it out with {SKIPPING}") from None
            with suppress(
                OSError
            ):  # what was decided for an earlier version of the file
                result.system.delete_file(f"{result.path}/{unit.name}")
            skipped[unit.file] = str(error)
            return None

    with result.opened(lake, shared=world_size > 1) as known:
        # Decisions without some rows are complete only for who leaves them out.
        done = {
            name: own
            for name, own in known.items()
            if lake.skip_broken or not own.get("skipped")
        }
        mine = [unit for unit in lake.units[rank::world_size] if unit.name not in done]
        before = sum(known["samples"] for known in done.values())
        with live(lake.rows, "Deciding", before) as show:
            new = in_threads(decide, mine, show)
    found = done | {name: own for name, own in new.items() if own is not None}
    expect(found or not skipped, next(iter(skipped.values()), ""))
    counts = np.sum([each["actions"] for each in found.values()], axis=0).tolist()
    samples, total = (
        sum(each["samples"] for each in found.values()),
        sum(each["value"] for each in found.values()),
    )
    actions = dict(zip(decider.utility.actions, counts, strict=True))
    complete = len(done) + len(new) == len(lake.units)
    left_out = [own["skipped"] for own in found.values() if own.get("skipped")]
    left_out += [
        {"file": file, "rows": None, "reason": reason}
        for file, reason in skipped.items()
    ]
    given = samples, len(found), actions, total / max(1, samples), len(done), complete
    return LakeDecisions(
        str(out), *given, sorted(left_out, key=lambda own: str(own["file"]))
    )


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


def _decide(
    lake: Lake, table: DecideTable, result: "Result", unit: Unit, report: Report
) -> dict[str, Any]:
    """Write the decisions of one unit; returns what is known about them."""
    import pyarrow

    classes, pieces = table.decider.utility.classes.names, list[Any]()
    others = [
        name
        for name in (*table.keep, KIND)
        if name in lake.names and name not in classes
    ]
    counts, total, samples = (
        np.zeros(len(table.decider.utility.actions), dtype=np.int64),
        0.0,
        0,
    )
    broken = list[BrokenRows]()
    version = lake.version(unit)

    def task(batch: Any) -> dict[str, Any]:
        return table.columns(batch, unit.file)

    with ExitStack() as stack:
        output, writer = stack.enter_context(result.replacing(unit.name)), None
        for columns, batch, rows in lake.each(
            unit, task, classes, others, broken=broken
        ):
            samples += batch.num_rows
            pieces.append(
                pyarrow.table(
                    {name: batch.column(name) for name in table.keep} | columns
                )
            )
            counts += np.bincount(
                columns["action"].indices.to_numpy(), minlength=len(counts)
            )
            total += float(columns["expected_utility"].sum(dtype=np.float64))
            report(rows)
            if writer is None:
                writer = stack.enter_context(
                    open_writer(
                        output, pieces[0].schema, ".parquet", ["action", "reason"]
                    )
                )
            if sum(map(len, pieces)) >= GROUP_ROWS:
                writer.write_table(pyarrow.concat_tables(pieces))
                pieces = []
        assert writer is not None  # a file without rows gives an empty batch
        if pieces:
            writer.write_table(pyarrow.concat_tables(pieces))
        if broken and not samples:
            raise BrokenFile(str(broken[0]))
        known = {
            "version": version,
            "samples": samples,
            "actions": counts.tolist(),
            "value": total,
        }
        if broken:
            left_out = sorted({row for error in broken for row in error.rows})
            first = min(broken, key=lambda error: error.rows[0])
            known["skipped"] = {
                "file": unit.file,
                "rows": left_out,
                "reason": str(first),
            }
        writer.add_key_value_metadata({WRITTEN: json.dumps(known)})
    return known


class Result:
    """The folder of a result, local or remote, with a description of its job."""

    def __init__(self, out: str, job: dict[str, Any]) -> None:
        self.out, self.job = out, job
        self.system, self.path = filesystem(out)

    @contextmanager
    def opened(self, lake: Lake, shared: bool) -> Iterator[dict[str, Any]]:
        """Begin or continue; gives what is known of the units that are done. Others do
        not write meanwhile.
        """
        from pyarrow.fs import FileType

        units = lake.units
        local = self.system.type_name == "local"
        with ExitStack() as stack:
            try:
                self.system.create_dir(self.path, recursive=True)
            except OSError as error:
                raise InputError(
                    f"{self.out}: cannot be created ({error}): choose another folder"
                ) from None
            if local:
                granted = stack.enter_context(
                    locked(Path(self.path), wait=False, shared=shared)
                )
                expect(
                    granted,
                    f"{self.out}: another process is writing it; wait, or choose"
                    " another folder",
                )
            names = {unit.name: unit for unit in units}
            expect(
                len(names) == len(units),
                f"{self.out}: two files would be written to one name: rename one of"
                " them",
            )
            there = self._there()
            place = f"{self.path}/{JOB}"
            if self.system.get_file_info(place).type == FileType.File:
                with self.system.open_input_stream(place) as stream:
                    begun = parse_json(stream.read())
                other = ", ".join(
                    name for name in self.job if begun.get(name) != self.job[name]
                )
                begun_with = (
                    f"{self.out} was begun with other settings ({other}): run that"
                    " command to continue"
                )
                expect(not other, f"{begun_with}, or remove the folder to start over")
            else:
                foreign = (
                    f"it holds other files ({listing(there)}): choose another folder"
                )
                expect(not there, f"{self.out}: cannot be written, {foreign}")
            stale = [name for name in there if name not in names]
            expect(
                not stale,
                f"{self.out} holds decisions of files that are gone ({listing(stale)}):"
                " remove them",
            )
            for info in (
                () if shared else self._infos()
            ):  # of killed processes; other ranks may be writing theirs
                if info.base_name.startswith(".") and info.base_name.endswith(".part"):
                    self.system.delete_file(info.path)
            with self.replacing(JOB) as stream:
                stream.write(json.dumps(self.job, ensure_ascii=False).encode())
            with ThreadPoolExecutor(cores()) as pool:
                now = list(pool.map(lambda name: lake.version(names[name]), there))
            known = {name: self._known(name) for name in there}
            yield {
                name: known[name]
                for name, version in zip(there, now, strict=True)
                if known[name].get("version") == version
            }

    @contextmanager
    def replacing(self, name: str) -> Iterator[Any]:
        """A stream to a hidden file, which takes the place of the named one when all
        went well.
        """
        folder, _, last = f"{self.path}/{name}".rpartition("/")
        beside = f"{folder}/.{last}.{os.getpid()}.part"
        try:
            self.system.create_dir(folder, recursive=True)
            with self.system.open_output_stream(beside) as stream:
                yield stream
            self.system.move(beside, f"{folder}/{last}")
        except BaseException as error:
            with suppress(OSError):
                self.system.delete_file(beside)
            if isinstance(error, OSError) and not isinstance(error, InterruptedError):
                raise InputError(
                    f"{self.out}/{name}: cannot be written ({error}): check it, and"
                    " start again"
                ) from None
            raise

    def _there(self) -> list[str]:
        """The files that are written already."""
        paths = [info.path.removeprefix(f"{self.path}/") for info in self._infos()]
        return sorted(
            path for path in paths if not path.rpartition("/")[2].startswith((".", "_"))
        )

    def _infos(self) -> list[Any]:
        from pyarrow.fs import FileSelector, FileType

        found = self.system.get_file_info(FileSelector(self.path, recursive=True))
        return [info for info in found if info.type == FileType.File]

    def _known(self, name: str) -> dict[str, Any]:
        """What a written file says about itself."""
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile

        try:
            with self.system.open_input_file(f"{self.path}/{name}") as file:
                metadata = ParquetFile(file).metadata.metadata or {}
            known: dict[str, Any] = parse_json(metadata.get(WRITTEN, b"{}"))
        except (OSError, ValueError, ArrowException):
            return {}
        return known

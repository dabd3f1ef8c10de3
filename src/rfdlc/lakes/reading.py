"""Lakes: tables in many files of a folder, a glob or a URL, read file by file in
batches of constant size.
"""

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from rfdlc.errors import BrokenRows, InputError, expect, listing
from rfdlc.formats.files import runs_inside
from rfdlc.formats.filesystems import files_below, filesystem
from rfdlc.formats.identity import digest_of_files
from rfdlc.formats.resumable import JOB
from rfdlc.formats.tables import (
    PARQUET,
    SUFFIXES,
    bounded,
    check_names,
    matrix_of,
    open_table,
    reading,
)
from rfdlc.probabilities.classes import Classes, Indices
from rfdlc.probabilities.predictions import Predictions, numbers_in
from rfdlc.probabilities.scores import (
    CHUNK_ROWS,
    KIND,
    check_left_out,
    class_columns,
    told_by,
)

UNIT_ROWS = (
    2**22
    # a larger Parquet file is decided in several units, so that all cores work and a
    # kill costs little
)
FILES_CHECKED = 8  # about as many are looked into before all are read
BATCH_ELEMENTS = 2**21  # numbers that are read at a time


class BrokenFile(InputError):
    """A file, or all of its rows, cannot be used; `skip_broken` names these instead of
    stopping.
    """


@dataclass(frozen=True)
class Unit:
    """Rows that are processed together: those of a file, or of some row groups of a
    large Parquet file.
    """

    file: str
    name: str  # of what is written for it, below the folder of the result
    state: str  # of a remote file, which changes with its content
    size: int  # bytes of the file
    rows: int | None = None  # if known before reading
    groups: tuple[int, ...] | None = None
    first: int = 0  # row of the file


class Lake:
    """Tables of one kind in many files: `source` is a folder, a file, a glob (`*`,
    `**`, `?`) or an fsspec URL.

    Folders such as `year=2026/` are partitions: what is written for a file keeps its
    path. Names that begin with `_` or `.` are skipped, and so are folders of decisions
    inside of it. With `skip_broken`, files that cannot be opened are left out, and
    named in `broken` with the reason.
    """

    def __init__(self, source: str | Path, *, skip_broken: bool = False) -> None:
        self.source = str(source)
        self.system, path = filesystem(self.source)
        base, files = _files(self.system, path)
        expect(
            files,
            f"{source}: no tables found: expected a folder, file or glob of"
            f" {listing(SUFFIXES)}",
        )
        self._base, self.skip_broken = base, skip_broken
        self.broken: dict[str, str] = {}
        with ThreadPoolExecutor(cores()) as pool:
            self.units = [
                unit for found in pool.map(self._readable, files) for unit in found
            ]
        expect(self.units, next(iter(self.broken.values()), ""))
        with self._local(self.units[0].file) as first:
            self.names = (
                open_table(first).names
                if first
                else self._parquet(self.units[0].file).schema_arrow.names
            )
        check_names(self.units[0].file, self.names)

    @property
    def rows(self) -> int | None:
        """The number of rows, if it is known before reading: CSV files do not
        say it.
        """
        known = [unit.rows for unit in self.units]
        return (
            None if None in known else sum(rows for rows in known if rows is not None)
        )

    def batches(
        self, unit: Unit, numbers: Sequence[str], others: Sequence[str] = ()
    ) -> Iterator[Any]:
        """The rows of a unit as `pyarrow.RecordBatch`: numbers (float64 in CSV files),
        and others as they are.
        """
        from pyarrow import float64, schema, string

        wanted = [*numbers, *others]
        empty = schema(
            [(name, float64() if name in numbers else string()) for name in wanted]
        ).empty_table()
        with reading(Path(unit.file), "a table"), self._local(unit.file) as local:
            if local is not None:
                table = open_table(local)
                found, names = table.batches(numbers), table.names
            else:
                file = self._parquet(unit.file)
                names, empty = file.schema_arrow.names, file.schema_arrow.empty_table()
                options = {
                    "row_groups": unit.groups,
                    "columns": wanted,
                    "use_threads": False,
                }
                found = file.iter_batches(
                    max(CHUNK_ROWS, BATCH_ELEMENTS // len(numbers)), **options
                )
            missing = [name for name in wanted if name not in names]
            expect(
                not missing,
                f"{unit.file}: no column {listing(missing)}: expected the columns of"
                f" {self.source}",
            )
            batch = None
            for batch in bounded(Path(unit.file), found, unit.size):
                yield batch.select(wanted)
            if batch is None:  # its columns are wanted nevertheless
                yield empty.select(wanted)

    def each(
        self,
        unit: Unit,
        task: Callable[[Any], Any],
        numbers: Sequence[str],
        others: Sequence[str],
        broken: list[BrokenRows],
        step: int = 1,
    ) -> Iterator[tuple[Any, Any, int]]:
        """What a task makes of each batch of a unit, of every `step`th row, these rows,
        and how many the batch has.

        Rows that the task cannot use are added to `broken` and left out; without
        `skip_broken`, the first one raises.
        """
        first = 0
        try:
            for batch in self.batches(unit, numbers, others):
                rows = np.arange(-first % step, batch.num_rows, step)
                some = batch if step == 1 else batch.take(rows)
                lost = broken if self.skip_broken else None
                yield (
                    *_on_usable(task, some, unit, unit.first + first + rows, lost),
                    batch.num_rows,
                )
                first += batch.num_rows
        except InputError as error:
            raise BrokenFile(str(error)) from None

    def version(self, unit: Unit) -> str:
        """Changes with the content of the file of a unit."""
        content = unit.state or digest_of_files([unit.file])
        return f"{unit.size} bytes, {content}"

    def _readable(self, info: Any) -> list[Unit]:
        try:
            return self._units(info)
        except InputError as error:
            if not self.skip_broken:
                raise
            self.broken[info.path] = str(error)
            return []

    def _units(self, info: Any) -> list[Unit]:
        name, local = (
            info.path.removeprefix(f"{self._base}/"),
            self.system.type_name == "local",
        )
        # of an object its ETag and time
        state = "" if local else str(self.system.handler.fs.ukey(info.path))
        if not _is_parquet(name):
            return [Unit(info.path, f"{name}.parquet", state, info.size)]
        with reading(Path(info.path), "Parquet"):
            footer = self._parquet(info.path).metadata
            sizes = [
                footer.row_group(group).num_rows
                for group in range(footer.num_row_groups)
            ]
        shares = list[list[int]]()
        for group, size in enumerate(sizes):
            if not shares or sum(sizes[i] for i in shares[-1]) + size > UNIT_ROWS:
                shares.append([])
            shares[-1].append(group)
        stem, ending = os.path.splitext(name)
        names = (
            [name]
            if len(shares) < 2
            else [f"{stem}-{i:05d}{ending}" for i in range(len(shares))]
        )
        rows = [sum(sizes[i] for i in share) for share in shares or [[]]]
        each = enumerate(zip(names, shares or [[]], strict=True))
        return [
            Unit(info.path, n, state, info.size, rows[i], tuple(g), sum(rows[:i]))
            for i, (n, g) in each
        ]

    def _parquet(self, file: str) -> Any:
        from pyarrow.parquet import ParquetFile

        return ParquetFile(self.system.open_input_file(file))

    @contextmanager
    def _local(self, file: str) -> Iterator[Path | None]:
        """A local copy of a CSV or Arrow file, which are read from the file system;
        None for Parquet.
        """
        if _is_parquet(file):
            yield None
        elif self.system.type_name == "local":
            yield Path(file)
        else:
            with tempfile.TemporaryDirectory() as folder:
                copy = Path(folder, PurePosixPath(file).name)
                with (
                    self.system.open_input_stream(file) as stream,
                    copy.open("wb") as target,
                ):
                    while block := stream.read(2**24):
                        target.write(block)
                yield copy


def predictions_of(
    table: Any,
    classes: Classes,
    *,
    logits: bool = False,
    where: str = "table",
    by_columns: bool = False,
) -> Predictions:
    """The scores of a `pyarrow.Table` or `RecordBatch`, columns matched with classes by
    name; not its other columns.
    """
    scores = matrix_of(table, classes.names, where, by_columns=by_columns)
    said = KIND in table.schema.names and KIND not in classes.names
    corrected, model = told_by(table.column(KIND).unique().to_pylist() if said else ())
    return Predictions(
        **{"logits" if logits else "probabilities": scores},
        classes=classes,
        corrected=corrected,
        model=model,
    )


def check_first_rows(lake: Lake, classes: Classes, known: str) -> None:
    """Raise for columns of other classes, by the first rows of some files; `known`
    lacks them.
    """
    beside = [name for name in class_columns(lake.names) if name not in classes.names]
    others = [*beside, *({"target"} & {*lake.names} - {*classes.names})]
    for unit in lake.units[:: 1 + len(lake.units) // FILES_CHECKED]:
        try:
            batch = next(lake.batches(unit, classes.names, others))
            values = matrix_of(batch, classes.names, unit.file)
        except InputError:  # told when all rows are read
            continue
        targets = (
            map(str, batch.column("target").unique().to_pylist())
            if "target" in others
            else ()
        )
        check_left_out(
            numbers_in([batch], beside),
            beside,
            values,
            targets,
            f"{unit.file}: {known}",
        )


def is_lake(source: str) -> bool:
    """Whether a source can only be read as a lake: a URL, a glob, or a folder of
    tables, but not of a run.
    """
    if names_many(source):
        return True
    run = any(
        os.path.exists(os.path.join(source, name))
        for name in ("config.json", "predictions.npz")
    )
    tables = os.path.isdir(source) and not run and bool(_files(*filesystem(source))[1])
    return tables and not runs_inside(
        Path(source)
    )  # the tables of runs are not predictions


def names_many(source: str) -> bool:
    """Whether a source is a URL or a glob."""
    return "://" in source or (
        bool(set(source) & {*"*?"}) and not os.path.exists(source)
    )


def cores() -> int:
    """The number of cores that this process may use."""
    return (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )


def _files(system: Any, path: str) -> tuple[str, list[Any]]:
    """The folder below which the names of files count, and the tables in it that are
    meant, sorted by path.
    """
    from pyarrow.fs import FileType

    match = re.compile("")
    if set(path) & {*"*?"}:
        plain = (
            re.escape(path)
            .replace(r"\*\*/", "(?:.*/)?")
            .replace(r"\*", "[^/]*")
            .replace(r"\?", "[^/]")
        )
        match, base = (
            re.compile(f"{plain}$"),
            re.split(r"[*?]", path)[0].rpartition("/")[0],
        )
    else:
        info = system.get_file_info(path)
        if info.type == FileType.File:
            return path.rpartition("/")[0], [info]
        expect(
            info.type == FileType.Directory,
            f"{path}: no such file or folder: expected tables, or a glob of them",
        )
        base = path
    found = files_below(system, base)
    tables = [info for info in found if info.path.lower().endswith(SUFFIXES)]
    folders = {
        info.path.removesuffix(JOB) for info in found if info.base_name == JOB
    } - {f"{base}/"}
    tables = [
        info
        for info in tables
        if match.match(info.path) and not info.path.startswith(tuple(folders))
    ]
    hidden = re.compile(r"(^|/)[._]")
    kept = [
        info for info in tables if not hidden.search(info.path.removeprefix(f"{base}/"))
    ]
    return base, sorted(kept, key=lambda info: info.path)


def _is_parquet(file: str) -> bool:
    return file.lower().endswith(PARQUET)


def _on_usable(
    task: Callable[[Any], Any],
    batch: Any,
    unit: Unit,
    rows: Indices,
    broken: list[BrokenRows] | None,
) -> tuple[Any, Any]:
    """What a task makes of a batch, and the batch, without rows that it cannot use;
    `rows` are numbers in the file.
    """
    while True:
        try:
            return task(batch), batch
        except BrokenRows as error:
            before = f"{unit.file}: {error.before.removeprefix(f'{unit.file}: ')}"
            told = BrokenRows(before, rows[error.rows].tolist(), error.after)
            if broken is None:
                raise told from None
            broken.append(told)
            left = np.delete(np.arange(len(rows)), error.rows)
            rows, batch = rows[left], batch.take(left)
        except InputError as error:
            where = f"{unit.file}, rows from {rows[0]:,} on"
            raise InputError(
                f"{where}: {str(error).removeprefix(f'{unit.file}: ')}"
            ) from None

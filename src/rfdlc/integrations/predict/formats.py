"""Tables that are written part by part and put together at the end, with few rows in memory at a time."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfileobj
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.errors import InputError

TEXTS = ("id", "target", "action")  # columns of text; all others hold numbers
NOTE = b"rfdlc.job"  # key of the metadata that say which job made a file
GROUP_ROWS, GROUP_VALUES = 2**16, 2**24  # of a row group in a Parquet file, the smaller of the two

Columns = Mapping[str, Sequence[str] | NDArray[np.float32]]


@dataclass(frozen=True)
class Format:
    """How a table is written. Parts have the columns in the same order."""

    check: Callable[[], None]  # raises where something is not installed
    write: Callable[[Path, Columns], None]
    merge: Callable[[Iterable[Path], Sequence[str], Path, str], None]  # parts, names of columns, file, note in it
    note: Callable[[Path], str | None]  # what was noted in a file, if there is one and it can hold a note


def _write_csv(path: Path, columns: Columns) -> None:
    """Rows without the names of the columns; numbers with six digits, as much as float32 holds."""
    cells = [values if name in TEXTS else [f"{v:.6g}" for v in values] for name, values in columns.items()]
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(zip(*cells, strict=True))


def _merge_csv(parts: Iterable[Path], names: Sequence[str], out: Path, note: str) -> None:
    with out.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerow(names)
    with out.open("ab") as whole:
        for part in parts:
            with part.open("rb") as file:
                copyfileobj(file, whole)


def _check_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise InputError('writing Parquet needs pyarrow: pip install "rfdlc[tables]", or write .csv') from None


def _schema(names: Iterable[str]) -> Any:
    import pyarrow

    return pyarrow.schema([(name, pyarrow.string() if name in TEXTS else pyarrow.float32()) for name in names])


def _write_parquet(path: Path, columns: Columns) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({name: list(v) if name in TEXTS else v for name, v in columns.items()}, _schema(columns))
    parquet.write_table(table, path, use_dictionary=False, write_statistics=False)


def _merge_parquet(parts: Iterable[Path], names: Sequence[str], out: Path, note: str) -> None:
    from pyarrow import concat_tables
    from pyarrow.parquet import ParquetWriter, read_table

    repeated = [name for name in ("target", "action") if name in names]
    largest = max(1, min(GROUP_ROWS, GROUP_VALUES // len(names)))
    schema = _schema(names).with_metadata({NOTE: note})
    with ParquetWriter(out, schema, use_dictionary=repeated, write_statistics=False) as writer:
        waiting: list[Any] = []
        for part in parts:
            waiting.append(read_table(part, memory_map=False))
            if sum(table.num_rows for table in waiting) >= largest:
                writer.write_table(concat_tables(waiting).cast(schema))
                waiting = []
        if waiting:
            writer.write_table(concat_tables(waiting).cast(schema))


def _noted_parquet(path: Path) -> str | None:
    from pyarrow import ArrowException
    from pyarrow.parquet import read_schema

    try:
        metadata = read_schema(path).metadata or {}
    except (OSError, ArrowException):  # it is not there, or somebody else's
        return None
    return str(metadata[NOTE].decode()) if NOTE in metadata else None


FORMATS = {
    ".parquet": Format(_check_pyarrow, _write_parquet, _merge_parquet, _noted_parquet),
    ".csv": Format(lambda: None, _write_csv, _merge_csv, lambda path: None),
}

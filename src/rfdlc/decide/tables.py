"""Tables of scores on disk: CSV with the standard library, Parquet with pyarrow. Columns are matched by name."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.decide.classes import Classes
from rfdlc.decide.dialect import delimiter_of, number
from rfdlc.decide.scores import BOOK_KEEPING, class_columns, column_order
from rfdlc.errors import InputError, listing
from rfdlc.progress import track

BLOCK = 2048  # rows parsed at a time


@dataclass(frozen=True)
class ScoreTable:
    """What a table held: scores (N, C) in the order of `classes`, and the columns `target` and `id` as text."""

    classes: Classes
    values: NDArray[np.float64]
    targets: NDArray[np.str_] | None
    ids: NDArray[np.str_] | None


def read_csv(path: Path, classes: Classes | None = None) -> ScoreTable:
    """Read a CSV (or tab-separated) file; without `classes` its columns are the classes, in their order."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            delimiter = delimiter_of(file)
            file.seek(0)
            reader = csv.reader(file, delimiter=delimiter)
            columns = [name.strip() for name in next(reader, [])]
            if not any(columns):
                raise InputError(f"{path}: is empty: expected a first line with the class names")
            classes, order = _layout(columns, classes, str(path))
            kept = [columns.index(name) if name in columns else None for name in _book_keeping(classes)]
            rows = track(_blocks(reader), f"Reading {path.name}", total=_count_lines(path) // BLOCK + 1)
            blocks = [_parse(path, columns, order, kept, block, delimiter) for block in rows]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read as CSV in UTF-8 ({error})") from None
    if not blocks:
        raise InputError(f"{path}: has column names but no rows: expected one row a sample")
    ids, targets, values = zip(*blocks, strict=True)
    return ScoreTable(classes, np.concatenate(values), _joined(targets), _joined(ids))


def read_parquet(path: Path, classes: Classes | None = None) -> ScoreTable:
    """Read a Parquet file; needs pyarrow."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise InputError(f'{path}: reading Parquet needs pyarrow: pip install "rfdlc[tables]"') from None
    try:
        table = parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"{path}: cannot be read as Parquet: truncated, or another kind of file ({error})") from None
    columns = [str(name) for name in table.column_names if not str(name).startswith("__index_level_")]
    classes, order = _layout(columns, classes, str(path))
    if not table.num_rows:
        raise InputError(f"{path}: has columns but no rows: expected one row a sample")
    values = [_numbers(path, columns[i], table.column(columns[i])) for i in order]
    kept = [table.column(name).to_pylist() if name in columns else None for name in _book_keeping(classes)]
    ids, targets = (None if column is None else np.array([str(cell) for cell in column]) for column in kept)
    return ScoreTable(classes, np.stack(values, axis=1), targets, ids)


def _layout(columns: list[str], classes: Classes | None, where: str) -> tuple[Classes, list[int]]:
    if "" in columns:
        raise InputError(
            f"{where}: column {columns.index('') + 1} has no name: expected the name of a class, id or target; "
            "leave an index out (index=False), or call it id"
        )
    if classes is None:
        names = class_columns(columns)
        if len(names) < 2:
            raise InputError(
                f"{where}: the class columns are {listing(names) or 'none'}: expected one column a class, named after "
                "it; for two classes with one probability add the other one (1 - p)"
            )
        classes = Classes(tuple(dict.fromkeys(names)))  # a name that is there twice is told of as a column
    return classes, column_order(columns, classes, where)


def _book_keeping(classes: Classes) -> list[str | None]:
    """The columns `id` and `target`; none where a class is called so, as Indonesian is among languages."""
    return [None if name in classes.names else name for name in BOOK_KEEPING]


def _count_lines(path: Path) -> int:
    """For the progress bar alone: quick beside the parsing."""
    with open(path, "rb") as file:
        return sum(piece.count(b"\n") for piece in iter(lambda: file.read(1 << 20), b""))


def _blocks(reader: Any) -> Iterator[list[tuple[int, list[str]]]]:
    """Lists of (line number, cells), blank lines left out."""
    numbered = ((reader.line_num, row) for row in reader if row)
    while block := list(islice(numbered, BLOCK)):
        yield block


def _parse(
    path: Path,
    columns: list[str],
    order: list[int],
    kept: Sequence[int | None],
    block: list[tuple[int, list[str]]],
    delimiter: str,
) -> tuple[list[str] | None, list[str] | None, NDArray[np.float64]]:
    """ids, targets and values of one block of rows."""
    for line, row in block:
        if len(row) != len(columns):
            raise InputError(f"{path} line {line}: {len(row)} cells, expected {len(columns)} as in the first line")
    try:
        values = np.array([[number(row[i], delimiter) for i in order] for _, row in block])
    except ValueError:
        raise _not_a_number(path, columns, order, block, delimiter) from None
    ids, targets = ([row[i].strip() for _, row in block] if i is not None else None for i in kept)
    return ids, targets, values


def _not_a_number(
    path: Path, columns: list[str], order: list[int], block: list[tuple[int, list[str]]], delimiter: str
) -> InputError:
    for line, row in block:
        for i in order:
            try:
                number(row[i], delimiter)
            except ValueError:
                return InputError(
                    f"{path} line {line}, column {columns[i]!r}: {row[i]!r} is not a number; "
                    f"every column but {' and '.join(BOOK_KEEPING)} is a class"
                )
    raise AssertionError("called for a block without a bad cell")


def _numbers(path: Path, name: str, column: Any) -> NDArray[np.float64]:
    if column.null_count:
        raise InputError(f"{path}: column {name!r} has {column.null_count} empty cells: expected a number in each")
    values = column.to_numpy()
    if values.dtype.kind not in "fiub":
        raise InputError(f"{path}: column {name!r} holds {column.type}, not numbers")
    return values.astype(np.float64)


def _joined(parts: Sequence[list[str] | None]) -> NDArray[np.str_] | None:
    return None if parts[0] is None else np.array([cell for part in parts if part is not None for cell in part])

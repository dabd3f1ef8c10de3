"""Tables: CSV, TSV, Parquet or a data frame with a target column; what is done to its columns is said."""

import csv
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from os.path import splitext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.dataset import SKIPPING, SPLITS, Dataset, Normalisation, Split, held_out_note, split_name
from rfdlc.data.images import SUFFIXES as IMAGE_SUFFIXES
from rfdlc.data.longtail import hold_out_indices
from rfdlc.data.table import Column, ColumnCode, TableEncoder, as_text, parse_column
from rfdlc.decide.dialect import delimiter_of
from rfdlc.errors import InputError, listing, repeated, suggestion

Table = dict[str, list[Any]]  # cells by column
OF_IMAGES = (
    ". Image files are not read from a table: list them in a .txt file, lines of 'path label', or by class folder"
)
TARGETS = ("target", "label", "class", "y")
PANDAS_INDEX = re.compile(r"__index_level_\d+__")  # written along by pandas; in sorted rows it tells the class
DECIMAL_COMMA = re.compile(r"\s*[+-]?\d*,\d+([eE][+-]?\d+)?\s*")


def read(
    source: Any,
    *,
    target: str | None = None,
    groups: str | None = None,
    split: str | None = None,
    drop: Sequence[str] = (),
    skip_broken: bool = False,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """One row a sample, one column the `target`. The encoding of the others is learned on the training rows alone.

    `groups` and `split` name columns; without a split column a stratified test part is held out.
    """
    table, where = _cells(source)
    if not any(table.values()):
        raise InputError(f"{where}: has no rows, so there is no training sample")
    target, found = _target(where, table, target)
    for column in filter(None, (groups, split, *drop)):
        _known(where, table, column)
    _one_role_each(where, [target, groups, split, *drop])
    table, skipped = _labelled(where, table, target, skip_broken)
    labels, names = _classes(where, table.pop(target))
    group_of = None if groups is None else _groups(where, groups, table.pop(groups))
    for column in drop:
        del table[column]
    positions, notes = _parts(where, table, split, labels, group_of, test_fraction, seed)
    notes += [f"column {column!r} was left out as asked" for column in drop]
    columns = {name: parse_column(name, cells) for name, cells in table.items()}
    left_out: list[str] = []
    ids = _identities(table, columns, left_out)
    notes += left_out
    if not columns:
        told = "; ".join(["", *left_out])
        raise InputError(f"{where}: no column is left to learn from beside the target {target!r}{told}")
    encoder = TableEncoder.fit({name: column[positions["train"]] for name, column in columns.items()})
    whole = Split(encoder.transform(columns), labels, ids, group_of)
    splits = {part: whole.take(place) for part, place in positions.items()}
    notes += [note for code in encoder.columns for note in _told(code, columns[code.name])]
    notes += found
    data = Dataset.of(Path(where).stem, names, splits, notes, _scale(splits["train"], encoder))
    return replace(data, encoder=encoder, skipped=tuple(skipped))


# -- cells -------------------------------------------------------------------------------------------------------------


def _cells(source: Any) -> tuple[Table, str]:
    """The cells by column, and a name for messages."""
    if not isinstance(source, Path):
        _check_names("data frame", [str(column) for column in source.columns])
        return {str(column): list(source[column]) for column in source.columns}, "data frame"
    parquet = source.suffix.lower() in (".parquet", ".pq")
    return (_read_parquet(source) if parquet else read_csv(source)), str(source)


def read_csv(path: Path) -> Table:
    """The cells of a CSV (comma, semicolon or tab between them), as text, by column."""
    lines = csv_lines(path)
    names = next(lines)
    rows = list(lines)
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}


def csv_lines(path: Path) -> Iterator[list[str]]:
    """The names of the columns, then row by row the cells."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            delimiter = delimiter_of(file)
            file.seek(0)
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            names = [name.strip() for name in next(reader, [])]
            _check_names(f"{path}, line 1", names)
            yield names
            for row in reader:
                if row and len(row) != len(names):
                    told = f"{len(row)} cells, but the first line names {len(names)} columns"
                    raise InputError(f"{path}, line {reader.line_num}: {told}")
                if row:
                    yield [_with_point(cell) for cell in row] if delimiter == ";" else row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read as a table in UTF-8 ({error})") from None


def _with_point(cell: str) -> str:
    """Where cells are parted by semicolons, a comma within a number is its decimal point.

    >>> _with_point("-0,5"), _with_point("1,5 or 2"), _with_point("4")
    ('-0.5', '1,5 or 2', '4')
    """
    return cell.replace(",", ".") if DECIMAL_COMMA.fullmatch(cell) else cell


def _read_parquet(path: Path) -> Table:
    with opened_parquet(path) as file:
        table: Table = file.read().to_pydict()
        return {name: cells for name, cells in table.items() if not PANDAS_INDEX.fullmatch(name)}


@contextmanager
def opened_parquet(path: Path) -> Iterator[Any]:
    """A Parquet file; what is wrong with it while it is read is said with its name."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise InputError(f'{path}: Parquet files need pyarrow: pip install "rfdlc[tables]"') from None
    try:
        with ParquetFile(path) as file:
            _check_names(str(path), file.schema_arrow.names)
            yield file
    except (OSError, ArrowException) as error:
        raise InputError(f"{path}: cannot be read as Parquet, it is damaged or of another format ({error})") from None


# -- what the columns mean ---------------------------------------------------------------------------------------------


def _check_names(where: str, names: Sequence[str]) -> None:
    if not names or len(set(names)) < len(names):
        raise InputError(f"{where}: expected the names of the columns, all different, got {listing(names) or 'none'}")


def _one_role_each(where: str, columns: Sequence[str | None]) -> None:
    given = [column for column in columns if column is not None]
    twice = repeated(given)
    if twice:
        raise InputError(
            f"{where}: column {twice[0]!r} is named twice: expected others for each of target, groups, split and drop"
        )


def _known(where: str, table: Table, column: str) -> None:
    if column not in table:
        raise InputError(f"{where}: there is no column {column!r}: it has {listing(table)}{suggestion(column, table)}")


def _target(where: str, table: Table, target: str | None) -> tuple[str, list[str]]:
    """The class column, and what to say where nobody named it."""
    if target is not None:
        _known(where, table, target)
        return target, []
    usual = [column for column in table if column.lower() in TARGETS]
    if len(usual) != 1:
        raise InputError(f"{where}: which column is the class? Name it with target (--target): {listing(table)}")
    return usual[0], [f"column {usual[0]!r} was taken for the class: target names another"]


def _labelled(where: str, table: Table, target: str, skip_broken: bool) -> tuple[Table, list[str]]:
    """The rows that have a target."""
    absent = [row for row, cell in enumerate(table[target]) if as_text(cell) is None]
    if absent and not skip_broken:
        rows = listing((row + 1 for row in absent), 5)
        raise InputError(
            f"{where}: the target {target!r} is missing in row {rows}; remove them, or leave them out with {SKIPPING}"
        )
    gone = set(absent)
    kept = {name: [cell for row, cell in enumerate(cells) if row not in gone] for name, cells in table.items()}
    return kept, [f"{where}: row {row + 1} has no target" for row in absent]


def _classes(where: str, cells: list[Any]) -> tuple[NDArray[np.int64], list[str]]:
    """Class indices, and the names in order: numbers by value, text by alphabet."""
    texts = [as_text(cell) or "" for cell in cells]
    numbers = parse_column("target", cells) if texts else np.empty(0)
    distinct = set(texts)
    numeric = numbers.dtype == np.float64
    if numeric and len(distinct) > max(20, len(texts) // 4) and (numbers % 1 != 0).any():
        raise InputError(
            f"{where}: the target has {len(distinct)} different fractions: expected classes, not measurements"
        )
    names = sorted(sorted(distinct), key=float) if numeric else sorted(distinct)
    alike = [pair for pair in pairwise(names) if numeric and float(pair[0]) == float(pair[1])]
    if alike:
        raise InputError(
            f"{where}: the target holds {alike[0][0]!r} and {alike[0][1]!r}, which are one number and would be two "
            "classes: write every class in one way"
        )
    index = {name: i for i, name in enumerate(names)}
    return np.array([index[text] for text in texts], dtype=np.int64), names


def _groups(where: str, column: str, cells: list[Any]) -> NDArray[Any]:
    texts = [as_text(cell) for cell in cells]
    if None in texts:
        raise InputError(f"{where}: the group column {column!r} is empty in row {texts.index(None) + 1}")
    return np.array(texts)


def _parts(
    where: str,
    table: Table,
    split: str | None,
    labels: NDArray[np.int64],
    groups: NDArray[Any] | None,
    test_fraction: float,
    seed: int,
) -> tuple[dict[str, NDArray[np.int64]], list[str]]:
    """Rows of each part: by the split column (a column named `split` is one), else with a test part held out."""
    column = split or split_column(table)
    if column is not None:
        cells = table.pop(column)
        parts = [split_name(str(cell).strip()) for cell in cells]
        if None in parts:
            row = parts.index(None)
            raise InputError(
                f"{where}: the split {cells[row]!r} in row {row + 1} of column {column!r} is unknown: expected train, "
                "val or test; where the column says something else, rename it, or leave it out with drop"
            )
        return {part: np.flatnonzero(np.array(parts) == part) for part in SPLITS}, []
    if not test_fraction:
        return {"train": np.arange(len(labels))}, []
    kept, held = hold_out_indices(labels, test_fraction, seed, groups)
    return {"train": kept, "test": held}, [held_out_note(len(held), len(labels), seed)]


def split_column(names: Iterable[str]) -> str | None:
    """The column that says of each row to which part it belongs, if there is one."""
    return next((name for name in names if name.lower() == "split"), None)


def _identities(table: Table, columns: dict[str, Column], notes: list[str]) -> list[str] | None:
    """Take out columns that only name the rows; the first of them gives the ids, as they are written."""
    ids: list[str] | None = None
    named = [name for name, column in columns.items() if names_rows(name) or column.dtype != np.float64]
    for name in named:
        texts = [as_text(cell) for cell in table[name]]
        if len(set(texts)) == len(texts) and None not in texts:
            of_images = OF_IMAGES if splitext(str(texts[0]))[1].lower() in IMAGE_SUFFIXES else ""
            notes.append(
                f"column {name!r} has another value in every row and was left out: it names rows, and tells no class"
                f"{of_images}"
            )
            ids = ids or [str(text) for text in texts]
            del columns[name]
    return ids


def names_rows(column: str) -> bool:
    """Whether a column is called as those are that only name rows.

    >>> names_rows("Patient_ID"), names_rows("PassengerId"), names_rows("idea"), names_rows("humid")
    (True, True, False, False)
    """
    usual = column.lower() in ("", "id", "index", "unnamed: 0") or column.lower().endswith(("_id", " id"))
    return usual or re.search(r"[a-z](Id|ID)$", column) is not None


def _told(column: ColumnCode, cells: Column) -> list[str]:
    """What was done to a column, where it is not obvious."""
    missing = int(np.isnan(cells).sum()) if cells.dtype == np.float64 else sum(cell is None for cell in cells)
    if column.median is None:
        said = f"column {column.name!r} became {len(column.features)} features, one a category{column.strays}"
        if column.strays:
            warnings.warn(said, stacklevel=4)
        return [said + (f"; {missing} missing values are a category of their own" if missing else "")]
    if not missing:
        return []
    flag = " and marked in a feature of their own" if column.flags_missing else ""
    return [f"column {column.name!r}: {missing} missing values were filled with the median {column.median:g}{flag}"]


def _scale(train: Split, encoder: TableEncoder) -> Normalisation:
    """Numbers are standardised; 0/1 marks stay as they are, since a rare one would become huge."""
    measured = Normalisation.of_features(train.array)
    number = encoder.is_number
    mean, std = np.where(number, measured.mean, 0.0), np.where(number, measured.std, 1.0)
    return Normalisation(tuple(mean.tolist()), tuple(std.tolist()))

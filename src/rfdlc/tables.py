"""Tables on disk, read and written by pyarrow: CSV as spreadsheets write it, Parquet (files and folders) and Arrow.

pyarrow is imported on first use. Cells of a CSV file are text until a caller converts them.
"""

import csv
import io
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rfdlc.errors import InputError, repeated
from rfdlc.files import replacing
from rfdlc.progress import track

CSV, PARQUET, ARROW = (".csv", ".tsv"), (".parquet", ".pq"), (".arrow", ".feather")
SUFFIXES = (*CSV, *PARQUET, *ARROW)
DELIMITERS = ",;\t"
HEAD_LINES = 20  # how many lines decide on the delimiter: in fewer, a comma inside a name could be mistaken for it
BLOCK_BYTES, BATCH_ROWS = 1 << 24, 1 << 14  # read at a time from CSV, and from Parquet or Arrow
PANDAS_INDEX = re.compile(r"__index_level_\d+__")  # row numbers written by pandas; in sorted rows they reveal the class
DECIMAL_COMMA = r"^(\s*[+-]?\d*),(\d+(?:[eE][+-]?\d+)?\s*)$"


class TableFile(Protocol):
    """A table on disk. `batches` reads it from the start; of a CSV file the columns in `numbers` become float64."""

    path: Path
    names: list[str]
    decimals: tuple[str, ...]  # signs that may separate the fraction of a number, the more likely one first

    def batches(self, numbers: Collection[str] = (), decimal: str = ".") -> Iterator[Any]:
        """Yield `pyarrow.RecordBatch` objects, in the order of the rows."""
        ...


def open_table(path: Path) -> TableFile:
    """Open a table: `.csv`, `.tsv`, `.parquet`, `.pq`, `.arrow`, `.feather`, or a folder of Parquet files."""
    file: TableFile = CsvFile(path) if path.suffix.lower() in CSV and not path.is_dir() else ArrowFile(path)
    check_names(str(path), file.names)
    return file


def is_table(path: Path) -> bool:
    """Whether a path is a file with the suffix of a table, or a folder of Parquet files."""
    return bool(parquet_files(path)) if path.is_dir() else path.is_file() and path.suffix.lower() in SUFFIXES


def parquet_files(folder: Path) -> list[Path]:
    """The Parquet files of a folder, sorted by name, including those in Hive partitions such as `year=2024/`."""
    found = [file for pattern in ("*.parquet", "*=*/**/*.parquet") for file in folder.glob(pattern)]
    return sorted(file for file in found if not file.name.startswith((".", "_")))


def check_names(where: str, names: Sequence[str]) -> None:
    """Raise unless there are columns and all their names differ."""
    if not any(names):
        raise InputError(f"{where}: is empty: expected a first line with the names of the columns")
    if repeated(names):
        raise InputError(f"{where}: column {repeated(names)[0]!r} appears more than once: expected different names")


# -- reading -----------------------------------------------------------------------------------------------------------


class ArrowFile:
    """Parquet or Arrow (Feather) files."""

    decimals: tuple[str, ...] = (".",)

    def __init__(self, path: Path) -> None:
        self.path, self._kind = path, "Arrow" if path.suffix.lower() in ARROW else "Parquet"
        with self._explained():
            from pyarrow.dataset import dataset

            files = [str(file) for file in (parquet_files(path) if path.is_dir() else [path])]
            partitioning = "hive" if path.is_dir() else None
            self._dataset = dataset(files, format=self._kind.lower(), partitioning=partitioning)
        self.names = [name for name in self._dataset.schema.names if not PANDAS_INDEX.fullmatch(name)]

    def batches(self, numbers: Collection[str] = (), decimal: str = ".") -> Iterator[Any]:
        """Yield the rows some thousand at a time; columns keep their types."""
        with self._explained():
            ahead = {"batch_readahead": 2, "fragment_readahead": 1}
            yield from self._dataset.to_batches(columns=self.names, batch_size=BATCH_ROWS, **ahead)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        from pyarrow import ArrowException

        try:
            yield
        except (OSError, ArrowException) as error:
            raise InputError(
                f"{self.path}: cannot be read as {self._kind}: truncated, damaged or another kind of file ({error})"
            ) from None


class CsvFile:
    """Text with one row per line; cells are separated by commas, semicolons or tabs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._text() as file:
            lines = list(islice(file, 10 * HEAD_LINES))
        self._blank = next((i for i, line in enumerate(lines) if line.strip()), 0)
        self.delimiter = delimiter_of(lines)
        header = next(csv.reader(lines[self._blank :], delimiter=self.delimiter), [])
        self.names = [name.strip() for name in header]
        self.decimals: tuple[str, ...] = (",", ".") if self.delimiter == ";" else (".",)

    def batches(self, numbers: Collection[str] = (), decimal: str = ".") -> Iterator[Any]:
        """Yield the rows some megabytes at a time; cells are text, but for those of the columns in `numbers`."""
        from pyarrow import ArrowException, float64, string
        from pyarrow import csv as arrow_csv

        kinds = {name: float64() if name in numbers else string() for name in self.names}
        options = (
            arrow_csv.ReadOptions(
                column_names=self.names, skip_rows=self._blank, skip_rows_after_names=1, block_size=BLOCK_BYTES
            ),
            arrow_csv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True),
            arrow_csv.ConvertOptions(column_types=kinds, null_values=[], decimal_point=decimal),
        )
        last: list[Any] = []
        try:
            for batch in arrow_csv.open_csv(self.path, *options):
                yield batch
                last = batch.slice(batch.num_rows - 1).to_pylist() or last
        except (OSError, ArrowException) as error:
            self._explain(numbers, error)
        if any("\n" in str(cell) for row in last for cell in row.values()):
            self._explain((), None)  # a quote that is never closed makes one cell of all that follows

    def _explain(self, numbers: Collection[str], error: Exception | None) -> None:
        """Raise for the first line that is wrong, and without one for `error`."""
        places = [i for i, name in enumerate(self.names) if name in numbers]
        line = 0
        for line, row in self._rows():
            if len(row) != len(self.names):
                told = f"{len(row)} cells, expected {len(self.names)} as in the first line"
                raise InputError(f"{self.path} line {line}: {told}")
            for i in places:
                if not is_number(row[i], self.decimals[0]):
                    raise InputError(f"{self.path} line {line}, column {self.names[i]!r}: {row[i]!r} is not a number")
        if line and error is not None:
            raise InputError(f"{self.path}: cannot be read as CSV with one decimal sign in all numbers ({error})")

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        """Line numbers and cells, without the header and blank lines; slow, for messages."""
        with self._text() as file:
            reader = csv.reader(file, delimiter=self.delimiter, strict=True)
            yield from islice(((reader.line_num, row) for row in reader if row), 1, None)

    @contextmanager
    def _text(self) -> Iterator[io.TextIOBase]:
        with readable(self.path, "CSV"), open(self.path, newline="", encoding="utf-8-sig") as file:
            yield file


@contextmanager
def readable(path: Path, what: str) -> Iterator[None]:
    """Say with the name of the file what is wrong with its text."""
    try:
        yield
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise InputError(f"{path}: cannot be read as {what} in UTF-8 ({reason})") from None


def text_batches(file: TableFile) -> Iterator[Any]:
    """Yield batches in which numbers of a CSV file, which are text, have decimal points."""
    from pyarrow import RecordBatch, compute

    for batch in file.batches():
        if file.decimals[0] == ",":
            cells = [compute.replace_substring_regex(column, DECIMAL_COMMA, r"\1.\2") for column in batch.columns]
            batch = RecordBatch.from_arrays(cells, file.names)
        yield batch


def read_columns(path: Path) -> dict[str, Any]:
    """Read all columns of a table as `pyarrow.ChunkedArray`, by name; cells of a CSV file are text."""
    import pyarrow

    file = open_table(path)
    batches = list(track(text_batches(file), f"Reading {path.name}"))
    schema = batches[0].schema if batches else pyarrow.schema([(name, pyarrow.string()) for name in file.names])
    table = pyarrow.Table.from_batches(batches, schema)
    return dict(zip(table.column_names, table.itercolumns(), strict=True))


def read_numbers(
    file: TableFile, numbers: Sequence[str], texts: Sequence[str]
) -> tuple[NDArray[np.float64], dict[str, NDArray[np.str_]]]:
    """Read some columns as one matrix (rows, numbers), and others as text by their names."""
    for decimal in file.decimals[:-1]:
        with suppress(InputError):
            return _read_numbers(file, numbers, texts, decimal)
    return _read_numbers(file, numbers, texts, file.decimals[-1])


def _read_numbers(
    file: TableFile, numbers: Sequence[str], texts: Sequence[str], decimal: str
) -> tuple[NDArray[np.float64], dict[str, NDArray[np.str_]]]:
    values: list[NDArray[np.float64]] = []
    words: dict[str, list[str]] = {name: [] for name in texts}
    total = file.path.stat().st_size // BLOCK_BYTES + 1
    for batch in track(file.batches(numbers, decimal), f"Reading {file.path.name}", total):
        values.append(np.stack([_as_floats(file.path, name, batch.column(name)) for name in numbers], axis=1))
        for name, cells in words.items():
            cells += [str(cell).strip() for cell in batch.column(name).to_pylist()]
    if not sum(map(len, values)):
        raise InputError(f"{file.path}: has column names but no rows: expected one row per sample")
    return np.concatenate(values), {name: np.array(cells) for name, cells in words.items()}


def _as_floats(path: Path, name: str, column: Any) -> NDArray[np.float64]:
    if column.null_count:
        raise InputError(f"{path}: column {name!r} has {column.null_count} empty cells: expected a number in each")
    values = column.to_numpy(zero_copy_only=False)
    if values.dtype.kind not in "fiub":
        raise InputError(f"{path}: column {name!r} holds {column.type}, not numbers")
    return values.astype(np.float64, copy=False)


# -- CSV by hand -------------------------------------------------------------------------------------------------------


def delimiter_of(lines: Iterable[str]) -> str:
    """The first delimiter that splits the first lines into the same number of cells, more than one.

    >>> delimiter_of(["a;b", "0,5;0,5"]), delimiter_of(["true,a;x;y", "a;x;y,1"])
    (';', ',')
    >>> delimiter_of(["a, b\\ttarget", "0.5\\ta, b", "0.5\\tc"])
    '\\t'
    """
    head = list(islice((line for line in lines if line.strip()), HEAD_LINES))
    for delimiter in DELIMITERS:
        widths = {len(row) for row in csv.reader(head, delimiter=delimiter)}
        if len(widths) == 1 and widths != {1}:
            return delimiter
    return max(DELIMITERS, key=head[0].count) if head else ","


def number(cell: str, decimal: str = ".") -> float:
    """A cell as a number.

    >>> number("0,5", ",")
    0.5
    """
    if "_" in cell:
        raise ValueError(f"{cell!r} is a code")  # Python alone reads 1_2 as 12
    return float(cell.replace(decimal, "."))


def is_number(cell: str, decimal: str = ".") -> bool:
    """Whether `number` reads a cell."""
    try:
        number(cell, decimal)
    except ValueError:
        return False
    return True


def read_rows(path: Path, what: str) -> tuple[str, list[tuple[int, list[str]]]]:
    """Read a small CSV file of any layout: its decimal sign, and line number and cells of every row that is not blank.

    Where semicolons separate the cells, a comma is a decimal sign, and so is a point.
    """
    with readable(path, what):
        text = path.read_text(encoding="utf-8-sig")
        delimiter = delimiter_of(text.splitlines())
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
        decimal = "," if delimiter == ";" else "."
        return decimal, [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(row)]


# -- writing -----------------------------------------------------------------------------------------------------------


def open_writer(path: Path, schema: Any, *, kind: str | None = None, repeated: Sequence[str] = ()) -> Any:
    """Open a file to write batches or tables to (`write_table`), in the format of its suffix or of `kind`.

    `repeated` names columns of text with few different values.
    """
    suffix = kind or path.suffix.lower()
    if suffix in PARQUET:
        from pyarrow.parquet import ParquetWriter

        return ParquetWriter(path, schema, use_dictionary=list(repeated), write_statistics=False)
    if suffix in ARROW:
        from pyarrow.ipc import new_file

        return new_file(path, schema)
    from pyarrow.csv import CSVWriter

    return CSVWriter(path, schema)


def write_table(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Write columns of equal length; the file is complete or not there."""
    import pyarrow

    table = pyarrow.table({name: list(values) for name, values in columns.items()})
    with replacing(path) as beside, open_writer(beside, table.schema, kind=path.suffix.lower()) as writer:
        writer.write_table(table)

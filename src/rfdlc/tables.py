"""Tables on disk, read and written by pyarrow: CSV as spreadsheets write it, Parquet (files and folders) and Arrow.

pyarrow is imported on first use. Cells of a CSV file are text until a caller converts them.
"""

import csv
import io
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

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


def open_table(path: Path) -> "TableFile":
    """Open a table: `.csv`, `.tsv`, `.parquet`, `.pq`, `.arrow`, `.feather`, or a folder of Parquet files."""
    file = CsvFile(path) if path.suffix.lower() in CSV and not path.is_dir() else ArrowFile(path)
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

    def __init__(self, path: Path) -> None:
        self.path, self._kind = path, "Arrow" if path.suffix.lower() in ARROW else "Parquet"
        with self._explained():
            from pyarrow.dataset import dataset

            files = [str(file) for file in (parquet_files(path) if path.is_dir() else [path])]
            partitioning = "hive" if path.is_dir() else None
            self._dataset = dataset(files, format=self._kind.lower(), partitioning=partitioning)
        self.names = [name for name in self._dataset.schema.names if not PANDAS_INDEX.fullmatch(name)]

    def batches(self, numbers: Collection[str] | None = None) -> Iterator[Any]:
        """Yield the rows some thousand at a time, as `pyarrow.RecordBatch`; columns keep their types."""
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
        self.decimal = "," if self.delimiter == ";" else "."

    def batches(self, numbers: Collection[str] | None = None) -> Iterator[Any]:
        """Yield the rows some megabytes at a time: cells are text, but float64 in the columns that `numbers` names."""
        from pyarrow import ArrowException, RecordBatch, float64, string
        from pyarrow import csv as arrow_csv

        commas = self.decimal == ","
        kinds = {name: string() if commas or name not in (numbers or ()) else float64() for name in self.names}
        options = (
            arrow_csv.ReadOptions(
                column_names=self.names, skip_rows=self._blank, skip_rows_after_names=1, block_size=BLOCK_BYTES
            ),
            arrow_csv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True),
            arrow_csv.ConvertOptions(column_types=kinds, null_values=[]),
        )
        last: list[Any] = []
        try:
            for batch in arrow_csv.open_csv(self.path, *options):
                if commas:
                    cells = [_with_points(name, batch.column(name), numbers) for name in self.names]
                    batch = RecordBatch.from_arrays(cells, self.names)
                yield batch
                last = batch.slice(batch.num_rows - 1).to_pylist() or last
        except (OSError, ArrowException) as error:
            self._explain(numbers or (), error)
        if any("\n" in str(cell) for row in last for cell in row.values()):
            self._explain((), None)  # a quote that is never closed makes one cell of all that follows

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yield line number and cells of every row that is not blank, after the header; slow, for small files."""
        with self._text() as file:
            reader = csv.reader(file, delimiter=self.delimiter, strict=True)
            yield from islice(
                ((reader.line_num, [cell.strip() for cell in row]) for row in reader if any(row)), 1, None
            )

    def _explain(self, numbers: Collection[str], error: Exception | None) -> None:
        """Raise for the first line that is wrong, and where there is none for `error`."""
        line = 0
        for line, row in self.rows():
            if len(row) != len(self.names):
                told = f"{len(row)} cells, expected {len(self.names)} as in the first line"
                raise InputError(f"{self.path} line {line}: {told}")
            for name, cell in zip(self.names, row, strict=True):
                if name in numbers and not is_number(cell, self.decimal):
                    raise InputError(f"{self.path} line {line}, column {name!r}: {cell!r} is not a number")
        if line and error is not None:
            raise InputError(f"{self.path}: cannot be read as CSV ({error})")

    @contextmanager
    def _text(self) -> Iterator[io.TextIOBase]:
        try:
            with open(self.path, newline="", encoding="utf-8-sig") as file:
                yield file
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            raise InputError(f"{self.path}: cannot be read as CSV in UTF-8 ({reason})") from None


TableFile = ArrowFile | CsvFile


def _with_points(name: str, cells: Any, numbers: Collection[str] | None) -> Any:
    """Text with decimal points instead of commas, and float64 where the column is one of `numbers`."""
    from pyarrow import compute, float64

    if numbers is None or name in numbers:
        cells = compute.replace_substring_regex(cells, DECIMAL_COMMA, r"\1.\2")
    return compute.utf8_trim_whitespace(cells).cast(float64()) if name in (numbers or ()) else cells


def read_columns(path: Path) -> dict[str, Any]:
    """Read all columns of a table as `pyarrow.ChunkedArray`, by name; cells of a CSV file are text."""
    import pyarrow

    file = open_table(path)
    batches = list(track(file.batches(), f"Reading {path.name}"))
    schema = batches[0].schema if batches else pyarrow.schema([(name, pyarrow.string()) for name in file.names])
    table = pyarrow.Table.from_batches(batches, schema)
    return dict(zip(table.column_names, table.itercolumns(), strict=True))


def read_numbers(
    file: TableFile, numbers: Sequence[str], texts: Sequence[str]
) -> tuple[NDArray[np.float64], dict[str, NDArray[np.str_]]]:
    """Read some columns as one matrix (rows, numbers), and others as text by their names."""
    values: list[NDArray[np.float64]] = []
    words: dict[str, list[str]] = {name: [] for name in texts}
    total = file.path.stat().st_size // BLOCK_BYTES + 1
    for batch in track(file.batches(numbers), f"Reading {file.path.name}", total):
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


# -- writing -----------------------------------------------------------------------------------------------------------


def open_writer(path: Path, schema: Any, *, kind: str | None = None, repeated: Sequence[str] = ()) -> Any:
    """Open a file to write batches or tables to (`write_table`), in the format of its suffix or of `kind`.

    `repeated` names columns of text with few different values.
    """
    suffix = kind or path.suffix.lower()
    if suffix in PARQUET:
        from pyarrow.parquet import ParquetWriter

        return ParquetWriter(path, schema, use_dictionary=list(repeated), write_statistics=False)
    from pyarrow.csv import CSVWriter

    return CSVWriter(path, schema)


def write_table(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Write columns of equal length; the file is complete or not there."""
    import pyarrow

    table = pyarrow.table({name: list(values) for name, values in columns.items()})
    with replacing(path) as beside, open_writer(beside, table.schema, kind=path.suffix.lower()) as writer:
        writer.write_table(table)

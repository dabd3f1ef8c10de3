"""Tables on disk by pyarrow, imported on first use: CSV as spreadsheets write it,
Parquet and Arrow.
"""

import csv
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice, pairwise
from mimetypes import guess_type
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.errors import BrokenRows, InputError, expect, listing, repeated
from rfdlc.formats.files import ALWAYS_UNPACKED, check_expansion, ipc_size
from rfdlc.formats.table_cells import with_points, without_empty_rows
from rfdlc.progress import track

CSV, PARQUET, ARROW = (".csv", ".tsv"), (".parquet", ".pq"), (".arrow", ".feather")
SUFFIXES = (*CSV, *PARQUET, *ARROW)
SPLIT_WORDS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
SPLIT_WORDS |= dict.fromkeys(("val", "valid", "validation", "dev"), "val")
TEXTS = ("string", "binary", "large_string", "large_binary")  # types of Arrow
# how many lines decide on the delimiter: in fewer, a comma inside a name could be
# mistaken for it
HEAD_LINES = 20
BLOCK_BYTES, BATCH_ROWS = (
    1 << 24,
    1 << 14,
)  # read at a time from CSV, and from Parquet or Arrow
PANDAS_INDEX = re.compile(
    r"__index_level_\d+__"
)  # row numbers written by pandas; in sorted rows they reveal the class
# Spreadsheets compute a cell that begins so, unless an apostrophe is in front; numbers
# are as harmless as they look.
FORMULA, NUMBER = (
    r"^'*[=+\-@\t\r\n＝＋－＠]",
    r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$",
)


def open_table(
    path: Path, *, of_samples: bool = False
) -> "ArrowFile | CsvFile | SplitFiles":
    """Open a file or folder; where rows are samples, a first line of numbers is a row
    of `column 1`, `column 2`, ...
    """
    if of_samples and (parts := split_files(path)):
        return SplitFiles(path, parts)
    file = (
        CsvFile(path, of_samples)
        if path.suffix.lower() in CSV and not path.is_dir()
        else ArrowFile(path)
    )
    check_names(str(path), file.names)
    return file


def is_table(path: Path) -> bool:
    inside = path.is_dir() and (parquet_files(path) or split_files(path))
    return bool(inside) or (path.is_file() and path.suffix.lower() in SUFFIXES)


def split_name(word: str) -> str | None:
    """train, val or test for the ways people write them; None for any other word."""
    return SPLIT_WORDS.get(word.lower())


def split_files(folder: Path) -> dict[str, Path]:
    """The tables called train, val and test in a folder; none without one to train on,
    or where it has images.
    """
    found = dict[str, Path]()
    for file in folder.glob("*"):
        if file.suffix.lower() in SUFFIXES and (split := split_name(file.stem)):
            twice = (
                f"{folder} has two tables of the split {split}: remove one, or name"
                " that to read"
            )
            expect(split not in found, twice)
            found[split] = file
    if "train" not in found or any(map(_holds_images, folder.glob("*"))):
        return {}
    return {name: found[name] for name in ("train", "val", "test") if name in found}


def _holds_images(folder: Path) -> bool:
    """Whether it is a folder that is called as those of a split are, or has images
    among the first of its files.
    """
    kinds = (guess_type(file.name)[0] or "" for file in islice(folder.glob("*"), 100))
    return folder.is_dir() and (
        split_name(folder.name) is not None
        or any(k.startswith("image/") for k in kinds)
    )


def parquet_files(folder: Path) -> list[Path]:
    """The Parquet files of a folder, sorted by name, including those in Hive partitions
    such as `year=2024/`.
    """
    found = [
        file
        for pattern in ("*.parquet", "*=*/**/*.parquet")
        for file in folder.glob(pattern)
    ]
    return sorted(file for file in found if not file.name.startswith((".", "_")))


def check_names(where: str, names: Sequence[str]) -> None:
    expect(
        any(names),
        f"{where}: is empty: expected a first line with the names of the columns",
    )
    for name in repeated(names):
        raise InputError(
            f"{where}: column {name!r} appears more than once: expected different names"
        )


class ArrowFile:
    """Columns of lists of numbers, such as embeddings, are read as one column per item:
    `name[0]`, `name[1]`, ...
    """

    def __init__(self, path: Path) -> None:
        from pyarrow import types
        from pyarrow.dataset import dataset
        from pyarrow.dataset import field as field_named

        self.path, self._kind = (
            path,
            "Arrow" if path.suffix.lower() in ARROW else "Parquet",
        )
        files, partitioning = (
            (parquet_files(path), "hive") if path.is_dir() else ([path], None)
        )
        with reading(path, self._kind):
            if self._kind == "Arrow":  # a batch is decompressed at once
                check_expansion(path, ipc_size(path))
            self._dataset = dataset(
                list(map(str, files)),
                format=self._kind.lower(),
                partitioning=partitioning,
            )
            self._stored = sum(os.path.getsize(file) for file in self._dataset.files)
            fields = [
                field
                for field in self._dataset.schema
                if not PANDAS_INDEX.fullmatch(field.name)
            ]
            self._fields: dict[str, int | None] = {
                field.name: None for field in fields
            }  # and the length of lists
            for field in fields:
                kind = (
                    getattr(field.type, "value_type", None)
                    if types.is_nested(field.type)
                    else None
                )
                if kind is not None and (
                    types.is_floating(kind) or types.is_integer(kind)
                ):
                    valid = field_named(field.name).is_valid()
                    first = (
                        self._dataset.head(1, columns=[field.name], filter=valid)
                        .column(0)
                        .to_pylist()
                    )
                    self._fields[field.name] = len(first[0]) if first else 0
        items = {
            name: [name] if n is None else [f"{name}[{i}]" for i in range(n)]
            for name, n in self._fields.items()
        }
        self.names = [item for own in items.values() for item in own]
        self._checked = False

    def batches(self, numbers: Collection[str] | None = None) -> Iterator[Any]:
        """Yield the rows some thousand at a time, as `pyarrow.RecordBatch`; columns
        keep their types.
        """
        ahead = {"batch_readahead": 2, "fragment_readahead": 1}
        with reading(self.path, self._kind):
            if not self._checked:
                self._check_texts()
                self._checked = True
            found = self._dataset.to_batches(
                columns=list(self._fields), batch_size=BATCH_ROWS, **ahead
            )
            for batch in without_empty_rows(
                self.path, bounded(self.path, found, self._stored)
            ):
                yield batch if self.names == list(self._fields) else self._flat(batch)

    def _check_texts(self) -> None:
        """Raise where one long text in a dictionary is repeated in so many rows that it
        cannot be meant.
        """
        from pyarrow import compute, types
        from pyarrow.parquet import ParquetFile

        size, files = 0, self._dataset.files if self._kind == "Parquet" else ()
        for file in files:
            opened = ParquetFile(file)
            footer, schema = opened.metadata, opened.schema_arrow  # without partitions
            plain = [field for field in schema if not types.is_nested(field.type)]
            texts = [
                field.name
                for field in plain
                if str(getattr(field.type, "value_type", field.type)) in TEXTS
            ]
            # What the footer says of single columns is not read: wrong numbers would
            # crash.
            for number in range(footer.num_row_groups):
                group = footer.row_group(number)
                if texts and group.num_rows * group.total_byte_size > ALWAYS_UNPACKED:
                    table = ParquetFile(file, read_dictionary=texts).read_row_group(
                        number, texts
                    )
                    for own in (
                        chunk for column in table.columns for chunk in column.chunks
                    ):
                        lengths = compute.cast(
                            compute.binary_length(own.dictionary), "int64"
                        )
                        size += compute.sum(lengths.take(own.indices)).as_py() or 0
                    check_expansion(self.path, size, self._stored)

    def _flat(self, batch: Any) -> Any:
        from pyarrow import RecordBatch, compute

        columns: dict[str, Any] = {}
        for (name, size), column in zip(
            self._fields.items(), batch.columns, strict=True
        ):
            if size is None:
                columns[name] = column
                continue
            lengths = (
                compute.min_max(compute.list_value_length(column)).as_py().values()
            )  # None: all are missing
            alike = (
                f"{self.path}: column {name!r} holds lists of different lengths:"
                " expected one length"
            )
            expect(set(lengths) <= {size, None}, alike)
            columns |= {
                f"{name}[{i}]": compute.list_element(column, i) for i in range(size)
            }
        return RecordBatch.from_arrays(list(columns.values()), list(columns))


def bounded(
    path: Path, batches: Iterable[Any], stored: int | None = None
) -> Iterator[Any]:
    """The batches of a file, until they are much larger than it is; offsets that are
    wrong would crash.
    """
    size = 0
    for batch in batches:
        batch.validate(full=True)
        for field in (
            batch.schema
        ):  # rows of these may show the same values, however many they are
            shared = "_view<" in str(field.type) or "run_end" in str(field.type)
            expect(
                not shared,
                f"{path}: column {field.name!r} holds {field.type}: expected plain"
                " lists and values",
            )
        size += sum(map(_unpacked, batch.columns))
        check_expansion(path, size, stored)
        yield batch


def _unpacked(column: Any) -> int:
    """At least the bytes of an array's values, each counted as often as rows
    show it.
    """
    from pyarrow import compute, types

    kind = column.type
    if types.is_dictionary(kind) and str(kind.value_type) in TEXTS:
        lengths = compute.cast(compute.binary_length(column.dictionary), "int64")
        return max(len(column), compute.sum(lengths.take(column.indices)).as_py() or 0)
    if str(kind) in (
        "string_view",
        "binary_view",
    ):  # rows may show the same text; each has its length in 16 bytes
        lengths = np.frombuffer(column.buffers()[1], np.int32)[::4][column.offset :][
            : len(column)
        ]
        return int(lengths.sum(dtype=np.int64))
    if (
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
    ):
        return len(column) + _unpacked(column.flatten())
    return max(len(column), column.nbytes)


class CsvFile:
    """Text with one row per line; cells are separated by commas, semicolons (then
    decimal commas are read) or tabs.
    """

    def __init__(self, path: Path, of_samples: bool = False) -> None:
        self.path = path
        with (
            reading(path, "CSV in UTF-8"),
            path.open(newline="", encoding="utf-8-sig") as file,
        ):
            lines = list(islice(file, 10 * HEAD_LINES))
            expect(
                not any("\0" in line for line in lines),
                f"{path}: holds NUL characters, as text in UTF-16 does: save it as"
                " UTF-8 (in Excel: CSV UTF-8)",
            )
            self._blank = next(
                (i for i, line in enumerate(lines) if line.strip().strip(",;\t")), 0
            )
            self._delimiter = delimiter_of(lines)
            reader = csv.reader(lines[self._blank :], delimiter=self._delimiter)
            self.names = [unescaped(cell.strip()) for cell in next(reader, [])]
        self.decimal = "," if self._delimiter == ";" else "."
        numbers = [
            number(name, self.decimal)
            for name in self.names
            if is_number(name, self.decimal)
        ]
        counted = all(
            a % 1 == 0 and a < b for a, b in pairwise([*numbers, np.inf])
        )  # such as years
        valued = 2 * len(numbers) > len(self.names) and not counted
        self.headless = of_samples and (
            valued or _occur_again(self.names, reader, self.decimal)
        )
        if self.headless:
            self.names = [f"column {i}" for i in range(1, len(self.names) + 1)]

    def batches(self, numbers: Collection[str] | None = None) -> Iterator[Any]:
        """Yield the rows some megabytes at a time: cells are text, but float64 in the
        columns that `numbers` names.
        """
        import pyarrow
        from pyarrow import csv as arrow_csv

        direct = (numbers or ()) if self.decimal == "." else ()
        kinds = {
            name: pyarrow.float64() if name in direct else pyarrow.string()
            for name in self.names
        }
        layout = {
            "column_names": self.names,
            "skip_rows": self._blank,
            "skip_rows_after_names": int(not self.headless),
        }
        last: list[Any] = []
        try:
            found = arrow_csv.open_csv(
                self.path,
                arrow_csv.ReadOptions(**layout, block_size=BLOCK_BYTES),
                arrow_csv.ParseOptions(
                    delimiter=self._delimiter, newlines_in_values=True
                ),
                arrow_csv.ConvertOptions(
                    column_types=kinds, null_values=[""]
                ),  # of numbers: texts are never null
            )
            for batch in without_empty_rows(self.path, found):
                header = not self.headless and _repeats(batch, self.names)
                if header or any(column.null_count for column in batch.columns):
                    self._explain(direct, None)
                yield _unescaped(
                    batch if self.decimal == "." else with_points(batch, numbers)
                )
                if batch.num_rows:
                    last = batch.slice(batch.num_rows - 1).to_pylist()
        except (OSError, pyarrow.ArrowException) as error:
            self._explain(numbers or (), error)
        if any("\n" in str(cell) for row in last for cell in row.values()):
            self._explain(
                (), None
            )  # a quote that is never closed makes one cell of all that follows

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yield line number and cells of every row that is not blank, after the header;
        slow, for small files.
        """
        with (
            reading(self.path, "CSV in UTF-8"),
            self.path.open(newline="", encoding="utf-8-sig") as file,
        ):
            reader = csv.reader(file, delimiter=self._delimiter, strict=True)
            rows = (
                (reader.line_num, [unescaped(cell.strip()) for cell in row])
                for row in reader
                if any(map(str.strip, row))
            )
            yield from islice(rows, int(not self.headless), None)

    def _explain(self, numbers: Collection[str], error: Exception | None) -> None:
        """Raise for the first line that is wrong, and where there is none for
        `error`.
        """
        line, width, checked = 0, len(self.names), set(numbers)
        for line, row in self.rows():
            where = f"{self.path} line {line}"
            expect(
                width == 1 or self.headless or row != self.names,
                f"{where}: repeats the first line, the names of the columns: remove it"
                " (files that were joined have one each)",
            )
            expect(
                len(row) == width,
                f"{where}: {len(row)} cells, expected {width} as in the first line",
            )
            for name, cell in zip(self.names, row, strict=True):
                known = name not in checked or is_number(cell, self.decimal)
                expect(known, f"{where}, column {name!r}: {cell!r} is not a number")
        expect(
            not line or error is None, f"{self.path}: cannot be read as CSV ({error})"
        )


class SplitFiles:
    """Tables of one split each, such as train.csv and test.csv, as one table with
    another column, `split`.
    """

    def __init__(self, path: Path, parts: dict[str, Path]) -> None:
        self.path, self.files = (
            path,
            {name: open_table(file, of_samples=True) for name, file in parts.items()},
        )
        first, columns = parts["train"], self.files["train"].names
        for name, file in self.files.items():
            absent = [column for column in columns if column not in file.names]
            fix = (
                f"if its rows have no class, train on {first} alone, and `rfdlc"
                " predict` them later"
            )
            expect(
                not absent,
                f"{parts[name]} lacks the columns {listing(absent)} that {first.name}"
                f" has: {fix}",
            )
        taken = (
            f"{first} has a column 'split', but {path} has a table for each: remove the"
            f" column, or name {first}"
        )
        expect(all(column.lower() != "split" for column in columns), taken)
        self.names: list[str] = [*columns, "split"]

    def batches(self, numbers: Collection[str] | None = None) -> Iterator[Any]:
        """Yield the rows of the first table, then of the others, with the types of the
        first.
        """
        from pyarrow import RecordBatch, array, string

        kinds: Any = None
        for name, file in self.files.items():
            for batch in file.batches(numbers):
                own = batch.select(self.names[:-1])
                kinds = kinds or own.schema
                with reading(
                    file.path,
                    f"a table like {next(iter(self.files.values())).path.name}",
                ):
                    columns = own.cast(kinds).columns
                yield RecordBatch.from_arrays(
                    [*columns, array([name] * len(own), string())], self.names
                )


def _occur_again(header: list[str], below: Iterable[list[str]], decimal: str) -> bool:
    """Whether most texts of the first row are values: they occur again below, and not
    because the header does.
    """
    others = list[list[str]]()
    with suppress(csv.Error):  # a cell that is too long for csv, though not for pyarrow
        for row in below:
            others.append([cell.strip() for cell in row])
    others = [row for row in others if row != header]
    texts = [
        place
        for place, cell in enumerate(header)
        if cell and not is_number(cell, decimal)
    ]
    again = [
        any(row[place : place + 1] == [header[place]] for row in others)
        for place in texts
    ]
    return 2 * sum(again) > len(texts)


def _repeats(batch: Any, names: Sequence[str]) -> bool:
    """Whether a row of texts, which may be one of values, is that of the names."""
    from pyarrow import compute, types

    if len(names) == 1 or not all(types.is_string(own.type) for own in batch.columns):
        return False
    rows = np.ones(len(batch), np.bool_)
    for name, column in zip(names, batch.columns, strict=True):
        same = compute.equal(compute.utf8_trim_whitespace(column), name)
        rows &= compute.fill_null(same, False).to_numpy(zero_copy_only=False)
        if not rows.any():
            return False
    return True


@contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """What the readers of tables raise becomes an `InputError` that names the file."""
    try:
        yield
    except InputError:
        raise
    except (
        OSError,
        ValueError,
        TypeError,
        RuntimeError,
        MemoryError,
        csv.Error,
    ) as error:  # pyarrow's are of these
        reason = (
            os.strerror(error.errno)
            if isinstance(error, OSError) and error.errno
            else str(error)
        )
        other = "it may be truncated, damaged or another kind of file"
        other = (
            "save it as UTF-8 (in Excel: CSV UTF-8)"
            if isinstance(error, UnicodeDecodeError)
            else other
        )
        problem = f"cannot be read as {kind} ({reason}): {other}"
        absent = isinstance(error, FileNotFoundError)
        raise InputError(
            f"{path}: {'no such file: correct the path' if absent else problem}"
        ) from None


def escaped(cell: str) -> str:
    """A cell that no spreadsheet computes, unless RFDLC_KEEP_FORMULAS is set; readers
    remove the apostrophe.

    >>> escaped("=1+1"), escaped("-1"), unescaped("'=1+1")
    ("'=1+1", '-1', '=1+1')
    """
    harmless = (
        "RFDLC_KEEP_FORMULAS" in os.environ
        or not re.match(FORMULA, cell)
        or re.match(NUMBER, cell)
    )
    return cell if harmless else f"'{cell}"


def unescaped(cell: str) -> str:
    return cell[1:] if cell.startswith("'") and re.match(FORMULA, cell) else cell


def _unescaped(batch: Any) -> Any:
    from pyarrow import RecordBatch, compute, types

    quoted = f"^'({FORMULA.removeprefix('^')})"
    columns = [
        (
            compute.replace_substring_regex(column, quoted, r"\1")
            if types.is_string(column.type)
            else column
        )
        for column in batch.columns
    ]
    return RecordBatch.from_arrays(columns, batch.schema.names)


def read_columns(path: Path, *, of_samples: bool = False) -> dict[str, Any]:
    """Read all columns of a table as `pyarrow.ChunkedArray`, by name; cells of a CSV
    file are text.
    """
    import pyarrow

    file = open_table(path, of_samples=of_samples)
    batches = list(track(file.batches(), f"Reading {path.name}"))
    schema = (
        batches[0].schema
        if batches
        else pyarrow.schema([(name, pyarrow.string()) for name in file.names])
    )
    table = pyarrow.Table.from_batches(batches, schema)
    return dict(zip(table.column_names, table.itercolumns(), strict=True))


def read_numbers(
    file: ArrowFile | CsvFile | SplitFiles, numbers: Sequence[str], texts: Sequence[str]
) -> tuple[NDArray[Any], dict[str, NDArray[np.str_]]]:
    """Read some columns as one matrix (rows, numbers), and others as text by their
    names.
    """
    values, words = list[NDArray[Any]](), {name: list[str]() for name in texts}
    for batch in track(
        file.batches(numbers),
        f"Reading {file.path.name}",
        file.path.stat().st_size // BLOCK_BYTES + 1,
    ):
        values.append(
            matrix_of(batch, numbers, str(file.path), first=sum(map(len, values)))
        )
        for name, texts_of in words.items():
            texts_of += [
                "" if cell is None else str(cell).strip()
                for cell in batch.column(name).to_pylist()
            ]
    expect(
        sum(map(len, values)),
        f"{file.path}: has column names but no rows: expected one row per sample",
    )
    return np.concatenate(values), {
        name: np.array(cells) for name, cells in words.items()
    }


def matrix_of(
    batch: Any,
    names: Sequence[str],
    where: str,
    by_columns: bool = False,
    first: int = 0,
) -> NDArray[Any]:
    """Columns of a batch as one matrix (rows, names): float32 where all of them are,
    float64 otherwise.

    `by_columns` is the layout in memory: then a column is copied as it is, which is
    faster. `first` counts rows before.
    """
    columns = list[NDArray[Any]]()
    for name in names:
        column, told = batch.column(name), f"{where}: column {name!r}"
        if column.null_count:
            rows = (
                first + np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))
            ).tolist()
            raise BrokenRows(
                f"{told} has {len(rows)} empty cells, first in ", rows, ": fill them in"
            )
        columns.append(column.to_numpy(zero_copy_only=False))
        expect(
            columns[-1].dtype.kind in "fiub", f"{told} holds {column.type}, not numbers"
        )
    single = all(column.dtype == np.float32 for column in columns)
    kind: Any = {"dtype": np.float32 if single else np.float64, "casting": "unsafe"}
    return (
        np.stack(columns, **kind).T if by_columns else np.stack(columns, axis=1, **kind)
    )


def delimiter_of(lines: Iterable[str]) -> str:
    """The first delimiter that splits the first lines into the same number of cells,
    more than one.
    """
    head = list(islice((line for line in lines if line.strip()), HEAD_LINES))
    for delimiter in ",;\t":
        widths = {len(row) for row in csv.reader(head, delimiter=delimiter)}
        if len(widths) == 1 and widths != {1}:
            return delimiter
    return max(",;\t", key=head[0].count) if head else ","


def number(cell: str, decimal: str = ".") -> float:
    return float(
        cell.replace("_", "code").replace(decimal, ".")
    )  # Python reads 1_2 as 12, but it is a code


def is_number(cell: str, decimal: str = ".") -> bool:
    try:
        return number(cell, decimal) is not None
    except ValueError:
        return False

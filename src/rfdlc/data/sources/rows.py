"""Rows of large files, read as they are asked for: arrays in `.npy` and `.npz`, tables in CSV and Parquet."""

import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.dataset import split_name
from rfdlc.data.sources.arrays import by_part, names_part, unreadable
from rfdlc.data.sources.table import csv_lines, opened_parquet, split_column
from rfdlc.errors import InputError

HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
PARQUET = (".parquet", ".pq")
ROWS_AT_ONCE = 4096


class ArrayRows:
    """One stored array, of which rows are read where they lie. Going forwards is cheap, also when it is compressed."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        read_header = HEADERS[np.lib.format.read_magic(file)]
        self.shape, by_column, self.dtype = read_header(file)
        if self.dtype.hasobject or not self.shape:
            raise ValueError("allow_pickle" if self.dtype.hasobject else "a single number")
        self._file, self._path, self._start = file, path, file.tell()
        self._row = self.dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))
        # What is stored column by column has no rows to read: it is taken whole.
        self._whole = self._read(range(len(self))).reshape(self.shape, order="F") if by_column else None

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, rows: range) -> NDArray[Any]:
        if self._whole is not None:
            return self._whole[rows.start : rows.stop]
        return self._read(rows).reshape(len(rows), *self.shape[1:])

    def _read(self, rows: range) -> NDArray[Any]:
        self._file.seek(self._start + rows.start * self._row)
        try:
            data = bytearray(self._file.read(len(rows) * self._row))
            if len(data) < len(rows) * self._row:
                raise EOFError("it is cut off")
        except Exception as error:  # a damaged file can fail in any way
            raise InputError(unreadable(self._path, error)) from None
        return np.frombuffer(data, dtype=self.dtype)


def open_arrays(path: Path) -> dict[str | None, dict[str, ArrayRows]]:
    """The arrays of an `.npz`, a `.npy` with the `y.npy` beside it if there is one, or a folder of `.npy` files.

    {part or None: {role: array}}, with the roles of `arrays.ROLES`. Files stay open as long as they are needed.
    """
    try:
        if path.suffix.lower() == ".npz":
            packed = zipfile.ZipFile(path)
            found = {name.removesuffix(".npy"): ArrayRows(packed.open(name), path) for name in packed.namelist()}
        elif path.is_dir():
            found = {file.stem: ArrayRows(file.open("rb"), file) for file in sorted(path.glob("*.npy"))}
        else:
            labels = path.with_name("y.npy")  # goes with X.npy, not with X_test.npy
            beside = labels.is_file() and labels != path and not names_part(path.stem)
            found = {"x": ArrayRows(path.open("rb"), path)}
            found |= {"y": ArrayRows(labels.open("rb"), labels)} if beside else {}
    except InputError:
        raise
    except Exception as error:
        raise InputError(unreadable(path, error)) from None
    return by_part(path.name, found)


class TableRows:
    """Rows of a CSV, TSV or Parquet file; with `part` those whose column `split` says so. Read forwards."""

    def __init__(self, path: Path, part: str | None = None) -> None:
        self._path, self._part = path, part
        with ExitStack() as closing:
            self.names, rows = self._open(closing)
            if part is not None and split_column(self.names) is None:
                raise InputError(f"{path} has no part {part!r}: expected a column 'split' that says it row by row")
            self._count = sum(1 for _ in rows)
        if not self._count:
            raise InputError(f"{path}: has no rows{'' if part is None else f' of the part {part!r}'} to predict")
        self._closing, self._at = ExitStack(), 0
        self._rows = self._open(self._closing)[1]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, wanted: range) -> dict[str, list[Any]]:
        """Cells by column."""
        if wanted.start < self._at:
            self._closing.close()
            self._rows, self._at = self._open(self._closing)[1], 0
        rows = list(islice(self._rows, wanted.start - self._at, wanted.stop - self._at))
        self._at = wanted.stop
        return {name: [row[i] for row in rows] for i, name in enumerate(self.names)}

    def _open(self, closing: ExitStack) -> tuple[list[str], Iterator[Any]]:
        names, rows = _parquet_rows(self._path, closing) if _is_parquet(self._path) else _csv_rows(self._path)
        column = split_column(names)
        if self._part is None or column is None:
            return names, rows
        place = names.index(column)
        return names, (row for row in rows if split_name(str(row[place]).strip()) == self._part)


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() in PARQUET


def _csv_rows(path: Path) -> tuple[list[str], Iterator[Any]]:
    lines = csv_lines(path)
    return next(lines), lines


def _parquet_rows(path: Path, closing: ExitStack) -> tuple[list[str], Iterator[Any]]:
    file = closing.enter_context(opened_parquet(path))
    batches = file.iter_batches(ROWS_AT_ONCE)
    rows = (row for batch in batches for row in zip(*batch.to_pydict().values(), strict=True))
    return list(file.schema_arrow.names), rows

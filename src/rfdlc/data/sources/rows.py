"""Rows of large arrays in `.npy` and `.npz` files, read when they are asked for."""

import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.sources.arrays import by_part, names_part, unreadable
from rfdlc.errors import InputError

HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


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

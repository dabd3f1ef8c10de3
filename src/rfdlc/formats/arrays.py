"""Arrays on disk: `.npz` and `.npy` files and folders of these, whole or row by row.

Python objects in them are never unpickled.
"""

import math
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.errors import InputError
from rfdlc.formats.files import OBJECTS, array_of, open_npz

NPZ = ".npz"
NPY = ".npy"
# Of a zip file: where the lengths of name and extra field stand in the header of a
# member, and how long the header is without them.
LENGTHS_AT = 26
HEADER = 30


def open_arrays(
    path: Path, *, streamed: Callable[[str], bool] | None = None
) -> dict[str, Any]:
    """The arrays of an `.npz`, or of the `.npy` files in a folder, by name.

    Of those whose names are `streamed`, rows are read on demand, by slices.
    """
    arrays = dict[str, Any]()
    if path.is_dir():
        for file in sorted(path.glob(f"*{NPY}")):
            mapped = streamed is not None and streamed(file.stem)
            arrays[file.stem] = open_npy(file, mapped=mapped)
        return arrays
    with _explained(path), open_npz(path, streamed is not None) as archive:
        for name in archive.files:
            if streamed is not None and streamed(name):
                arrays[name] = open_rows(path, name)
            else:
                arrays[name] = array_of(archive, name)
    return arrays


def open_npy(path: Path, *, mapped: bool = False) -> NDArray[Any]:
    """The array of an `.npy` file; `mapped` into memory, rows are read on demand."""
    with _explained(path):
        return np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)


def array_names(path: Path) -> list[str]:
    """The names of the arrays of an `.npz` file; none of one that is damaged, which
    reading it will tell.
    """
    members = list[str]()
    with suppress(Exception), zipfile.ZipFile(path) as archive:  # damaged in any way
        members = archive.namelist()
    return [name.removesuffix(NPY) for name in members]


def open_rows(path: Path, name: str) -> Any:
    """Rows of an array in an `.npz` file on demand, or the whole array where it is
    stored by column.
    """
    archive = zipfile.ZipFile(path)  # stays open as long as its rows are read
    member = archive.getinfo(f"{name}{NPY}")
    file = archive.open(member)
    shape, by_column, dtype = read_header(file)
    if dtype.hasobject or by_column or not shape:
        return np.load(path, allow_pickle=False)[name]
    if member.compress_type != zipfile.ZIP_STORED:
        return ZippedRows(path, file, file.tell(), shape, dtype)
    stored = path.open("rb")  # read directly, which is twice as fast
    stored.seek(member.header_offset + LENGTHS_AT)
    lengths = struct.unpack("<HH", stored.read(4))
    start = member.header_offset + HEADER + sum(lengths)
    return ZippedRows(path, stored, start + file.tell(), shape, dtype)


def read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape of an array in numpy's format, whether it is stored by column, and its
    type; its content follows.
    """
    if np.lib.format.read_magic(file) == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    return np.lib.format.read_array_header_2_0(file)


@dataclass(frozen=True)
class ZippedRows:
    """Rows of an array in an `.npz` file, which are cheap to read in ascending order,
    compressed or not.
    """

    path: Path
    file: IO[bytes]
    start: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        count = rows.stop - rows.start
        size = self.dtype.itemsize * math.prod(self.shape[1:])
        with _explained(self.path):
            self.file.seek(self.start + rows.start * size)
            values = np.empty((count, *self.shape[1:]), self.dtype)
            place = values.reshape(-1).view(np.uint8)
            length = self.file.readinto(place)  # type: ignore[attr-defined]
        if length != count * size:
            raise InputError(
                f"{self.path}: it ends too early, before row {rows.stop:,}: write it"
                " again"
            )
        return values


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # a damaged file can fail in any way
        raise InputError(f"{path}: {_reason(str(error))}") from None


def _reason(error: str) -> str:
    """Why numpy could not read a file, in words that a user understands."""
    if OBJECTS in error:  # of one array that is named
        return error
    if "allow_pickle" in error or "Python objects" in error:
        return f"holds {OBJECTS}, such as values.astype('U')"
    return (
        f"cannot be read as numpy arrays, it is damaged or of another format ({error})"
    )

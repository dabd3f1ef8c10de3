"""Files that are whole or not there, written by one process at a time."""

import csv
import hashlib
import io
import json
import os
import platform
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from rfdlc.errors import InputError, counted, expect

MAX_EXPANSION = 200  # times its size, that a compressed file may unpack to
LAST_CHARACTER = 0x10FFFF
OBJECTS = "Python objects, which are never unpickled: save numbers or text instead"
FOLDED = "folds.json"  # says how the folder of a cross-validation was made
ALWAYS_UNPACKED = 2**30  # bytes, however small the file is


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to write to; it takes the place of `path` only when all went
    well.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield beside
        os.replace(beside, path)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written ({reason_of(error)}); choose another file"
        ) from None
    finally:
        with suppress(OSError):  # the error above says more
            beside.unlink()


def reason_of(error: OSError) -> str:
    """What went wrong, in words of the operating system where it was one of its errors.

    The text of pyarrow's errors names hidden files.
    """
    if error.errno:
        return os.strerror(error.errno)
    return str(error)


def runs_inside(folder: Path) -> str:
    """What to say of a folder that holds run folders but is none, such as `runs/` or a
    cross-validation; or nothing.
    """
    made = (
        []
        if (folder / "config.json").exists()
        else [*folder.glob("*/config.json"), *folder.glob("*/*/config.json")]
    )
    runs = sorted(
        str(file.parent) for file in made if (file.parent / "classes.json").is_file()
    )
    if (folder / FOLDED).exists() and not (folder / "predictions.npz").exists():
        return (
            f"{folder} is a cross-validation that is not finished: run the command that"
            " began it again to continue"
        )
    held = (
        f"{counted(len(runs), 'run')}"
        f" ({', '.join(runs[:3])}{', ...' if runs[3:] else ''})"
    )
    return (
        f"{folder} is not a run folder: it holds {held}; give one of them"
        if runs
        else ""
    )


@contextmanager
def locked(path: Path, *, wait: bool = True, shared: bool = False) -> Iterator[bool]:
    """Lock a file or folder against other processes, or only against those that do not
    share it.

    Gives False where another process has the lock and this one does not `wait`; locks
    end with their process. Where there are no locks (Windows, some network drives) or
    there is no such file, nothing is locked.
    """
    try:
        import fcntl

        place, granted = os.open(path, os.O_RDONLY), True
    except (ImportError, FileNotFoundError):
        yield True
        return
    try:
        try:
            fcntl.flock(
                place,
                (fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
                | (0 if wait else fcntl.LOCK_NB),
            )
        except OSError as error:
            granted = not isinstance(error, BlockingIOError)
        yield granted
    finally:
        os.close(place)


@contextmanager
def owned(file: Path) -> Iterator[str]:
    """Be the only process that has this file, which exists meanwhile: "", or the name
    of the process that has it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield ""
        return
    while True:
        place = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(place, 200).decode(errors="replace")
            os.close(place)
            yield owner or "another process"
            return
        except OSError:  # a file system without locks
            break
        if file.exists() and os.path.samestat(os.fstat(place), file.stat()):
            break
        os.close(place)  # of a process that has just removed it
    try:
        os.ftruncate(place, 0)  # what a killed process left
        os.write(place, f"process {os.getpid()} on {platform.node()}".encode())
        yield ""
    finally:
        file.unlink(missing_ok=True)
        os.close(place)


def replace_durably(temporary: Path, path: Path) -> None:
    """Put a written file in its place, so that after a crash of the machine one of both
    is there, complete.
    """
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    with suppress(OSError):  # folders cannot be opened on Windows
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def sha256_of(path: Path) -> str:
    """The checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def has_external_data(message: Any) -> bool:
    """Whether a tensor anywhere in an ONNX message is stored outside of it."""
    if message.DESCRIPTOR.name == "TensorProto":
        return bool(message.external_data or message.data_location)
    inner = [
        value for field, value in message.ListFields() if field.message_type is not None
    ]
    return any(
        has_external_data(one)
        for v in inner
        for one in (v if isinstance(v, Sequence) else [v])
    )


def parse_json(text: str | bytes) -> Any:
    """Any JSON value; text that is nested too deeply raises ValueError, as other wrong
    text does.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_version(
    where: object, table: Mapping[str, Any], kind: str, version: int
) -> None:
    """Raise unless what a file says of itself is this kind of file, in this version of
    its format.
    """
    if table.get("format") != kind:
        raise InputError(
            f"{where} is of format {table.get('format')!r}: expected {kind!r}"
        )
    if table.get("version") == version:
        return
    maker = f", written by rfdlc {table['rfdlc']}" if "rfdlc" in table else ""
    raise InputError(
        f"{where} has format version {table.get('version')}{maker}: this rfdlc reads"
        f" version {version}; write it again with this rfdlc"
    )


def check_expansion(path: Path, size: int, stored: int | None = None) -> None:
    """Raise where `size` bytes are unpacked from a much smaller file, or from files of
    `stored` bytes.
    """
    most = float(os.environ.get("RFDLC_MAX_EXPANSION", MAX_EXPANSION))
    fits = size <= max(
        ALWAYS_UNPACKED, most * (path.stat().st_size if stored is None else stored)
    )
    big = f"{path}: unpacks to {size / 2**30:,.1f} GiB, over {most:g} times its size"
    expect(
        fits,
        f"{big}: if you trust it, allow more by the environment variable"
        " RFDLC_MAX_EXPANSION",
    )


@contextmanager
def open_npz(path: Path, streamed: bool = False) -> Iterator[Any]:
    """The arrays of an `.npz` file, without pickle; `streamed` where they are never all
    in memory.
    """
    import numpy as np

    with np.load(path, allow_pickle=False) as file:
        archive: Any = getattr(file, "zip", None)
        if archive is None:
            raise ValueError("it is one array")
        if not streamed:
            check_expansion(
                path, sum(member.file_size for member in archive.infolist())
            )
        yield file


def array_of(file: Any, key: str) -> Any:
    """One array of an `.npz` file; raises ValueError if it is not an array, or has
    invalid characters.
    """
    import numpy as np

    try:
        array = file[key]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        raise ValueError(
            f"the array {key!r} holds {OBJECTS}, such as {key}.astype('U')"
        ) from None
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{key} is not an array")
    if array.dtype.kind == "U" and array.dtype.itemsize:
        codes = array.astype(array.dtype.newbyteorder("=")).reshape(-1).view(np.uint32)
        if (codes > LAST_CHARACTER).any():
            raise ValueError(f"{key} holds characters that do not exist")
    return array


def as_csv(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """A CSV file; columns that only some rows have are empty in the others."""
    text = io.StringIO()
    writer = csv.DictWriter(
        text, list(dict.fromkeys(name for row in rows for name in row))
    )
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def read_json(path: Path) -> dict[str, Any]:
    try:
        table: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{path} cannot be read ({reason})") from None
    expect(isinstance(table, dict), f"{path}: expected a JSON object")
    return table


def ipc_size(path: Path) -> int:
    """Bytes that all batches and dictionaries of an Arrow file have once they are
    decompressed.
    """
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        try:
            footer = _Flatbuffer.root(
                data, len(data) - 10 - int.from_bytes(data[-10:-6], "little")
            )
            places = [place for field in (2, 3) for place in footer.items(field, 24)]
            blocks = Counter(
                struct.unpack_from("<qi", data, place) for place in places
            )  # some may be listed often
            return sum(
                count * _batch_size(data, *block) for block, count in blocks.items()
            )
        except (struct.error, IndexError, OverflowError):
            raise ValueError("its footer or a batch is damaged") from None


def _batch_size(data: Any, start: int, length: int) -> int:
    """Bytes of the buffers of one batch; a compressed buffer begins with its size, -1
    where it is not compressed.
    """
    prefix = (
        8 if data[start : start + 4] == b"\xff\xff\xff\xff" else 4
    )  # in files of old versions
    message = _Flatbuffer.root(data, start + prefix)
    batch, size = message.table(2), 0
    if data[message.place(1)] == 2:  # a dictionary, which has its batch inside
        batch = batch.table(1)
    for place in batch.items(2, 16):
        offset, stored = struct.unpack_from("<qq", data, place)
        if batch.place(3) and stored:
            (whole,) = struct.unpack_from("<q", data, start + length + offset)
            stored = stored if whole < 0 else whole
        size += stored
    return size


class _Flatbuffer:
    """A table in the format of Arrow's metadata, where fields have numbers; `at` is its
    place in a file.
    """

    def __init__(self, data: Any, at: int) -> None:
        self._data, self._at = data, at

    @classmethod
    def root(cls, data: Any, place: int) -> "_Flatbuffer":
        return cls(data, place + int(struct.unpack_from("<I", data, place)[0]))

    def _follow(self, place: int) -> int:
        return place + int(struct.unpack_from("<I", self._data, place)[0])

    def place(self, field: int) -> int:
        """Where the value of a field is, or 0."""
        layout, entry = (
            self._at - struct.unpack_from("<i", self._data, self._at)[0],
            4 + 2 * field,
        )
        known = entry < struct.unpack_from("<H", self._data, layout)[0]
        offset = (
            int(struct.unpack_from("<H", self._data, layout + entry)[0]) if known else 0
        )
        return self._at + offset if offset else 0

    def table(self, field: int) -> "_Flatbuffer":
        return _Flatbuffer(self._data, self._follow(self.place(field)))

    def items(self, field: int, width: int) -> range:
        """Where the items of a list are, of `width` bytes each."""
        place = self.place(field)
        first = self._follow(place) if place else 0
        count = struct.unpack_from("<I", self._data, first)[0] if place else 0
        if first + count * width > len(self._data):
            raise IndexError
        return range(first + 4, first + 4 + count * width, width)

"""Files that are whole or not there, written by one process at a time."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rfdlc.errors import InputError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to write to; it takes the place of `path` only when all went well."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield beside
        os.replace(beside, path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); choose another file") from None
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """One at a time, of all that ask for this file or folder; the lock of a process that is killed ends with it.

    Where there is nothing at `path`, or no such lock (Windows, some network drives), nobody waits.
    """
    try:
        import fcntl

        place = os.open(path, os.O_RDONLY)
    except (ImportError, FileNotFoundError):
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(place, fcntl.LOCK_EX)
        yield
    finally:
        os.close(place)


@contextmanager
def claimed(path: Path, *, shared: bool = False) -> Iterator[bool]:
    """Claim a file or folder as long as the context lasts: alone, or beside others that share it.

    Gives False, at once, where another process has it. The claim of a process that is killed ends with it; where there
    are no such locks (Windows, some network drives), nobody is refused.
    """
    try:
        import fcntl
    except ImportError:
        yield True
        return
    place = os.open(path, os.O_RDONLY)
    try:
        granted = True
        try:
            fcntl.flock(place, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            granted = not isinstance(error, BlockingIOError)
        yield granted
    finally:
        os.close(place)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{path} cannot be read ({reason})") from None
    if not isinstance(table, dict):
        raise InputError(f"{path}: expected a JSON object")
    return table

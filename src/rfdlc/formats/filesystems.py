"""File systems of paths and URLs."""

import os
from pathlib import Path
from typing import Any

from rfdlc.errors import InputError


def filesystem(path: str) -> tuple[Any, str]:
    """The file system of pyarrow for a path or a URL, and the path in it."""
    from pyarrow.fs import FSSpecHandler, LocalFileSystem, PyFileSystem

    try:
        path.encode()
    except UnicodeEncodeError:
        raise InputError(f"{os.fsencode(path)!r} is not UTF-8: rename it") from None
    if "://" not in path:
        local = Path(os.path.abspath(os.path.expanduser(path)))
        return LocalFileSystem(), local.as_posix()
    try:
        from fsspec.core import url_to_fs

        system, inside = url_to_fs(path)
    except (ImportError, ValueError) as error:
        # of fsspec, or of the package for this kind of URL
        raise InputError(
            f"{path}: cannot be opened ({error}): install fsspec and the package for"
            " its kind"
        ) from None
    return PyFileSystem(FSSpecHandler(system)), str(inside).rstrip("/")


def files_below(system: Any, folder: str) -> list[Any]:
    """What pyarrow knows of each file in a folder and its subfolders; nothing where
    there is no folder.
    """
    from pyarrow.fs import FileSelector, FileType

    everything = FileSelector(folder, recursive=True, allow_not_found=True)
    try:
        # Names are decoded when they are asked for.
        return [
            info
            for info in system.get_file_info(everything)
            if info.type == FileType.File and info.path
        ]
    except UnicodeDecodeError as error:
        raise InputError(
            f"{folder}: holds a file whose name is not UTF-8 ({error.object!r}): rename"
            " it"
        ) from None

"""The data formats, and which of them a source is of."""

import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from rfdlc.data.reader import DataReader, Place
from rfdlc.data.readers import (
    arrays,
    embedded,
    image_folder,
    image_lists,
    image_table,
    items,
    longtailed,
    medmnist,
    shards,
    table,
)
from rfdlc.errors import InputError, listing, suggestion
from rfdlc.formats.tables import SUFFIXES as OF_TABLES
from rfdlc.imports import FIRST

# Of several that recognise a data set, the first reads it: special formats come before
# general ones.
READERS: list[DataReader] = [
    longtailed.DIGITS,
    medmnist.MEDMNIST,
    image_lists.LISTS,
    arrays.NPY_FILES,
    arrays.NPZ_FILES,
    longtailed.CIFAR,
    image_lists.FOLDER_OF_LISTS,
    embedded.EMBEDDED,
    shards.SHARDS,
    image_table.IMAGE_TABLE,
    table.TABLE,
    arrays.FOLDER_OF_ARRAYS,
    image_folder.IMAGE_FOLDER,
]
# The same of objects in memory; the last takes any.
IN_MEMORY = (items.ROWS, items.ITEMS, table.FRAME, arrays.IN_MEMORY)
NEIGHBOURS = 1000  # files beside a missing one that its name is compared with


def find_reader(
    source: Any, root: str | Path | None = None, drop: Any = None
) -> tuple[DataReader, Any]:
    """Who reads a source, and what it is given: a place, or the object in memory."""
    if not isinstance(source, str | Path):
        return next(reader for reader in IN_MEMORY if reader.matches(source)), source
    folder = expanded(root)
    name = str(source).lower()
    for reader in READERS:
        if name in reader.names:
            path = reader.names[name](folder or Path())
            return reader, Place(path, folder, named=True)
    place = Place(locate(source, root), folder, drop=_columns(drop))
    if not place.path.exists():
        raise InputError(_absent(source, place.path))
    for reader in READERS:
        if reader.matches(place):
            return reader, place
    suffixes = list(OF_TABLES)
    for reader in READERS:
        suffixes += reader.suffixes
    raise InputError(
        f"{place.path}: files of this kind are not read: expected"
        f" {listing(dict.fromkeys(suffixes), 20)}, or a folder; {FIRST}"
    )


def locate(source: str | Path, root: str | Path | None) -> Path:
    """Where a path leads, inside the root. A list of images may lie elsewhere: then the
    root is that of its images.
    """
    folder = expanded(root) or Path()
    path = Path(source).expanduser()
    inside = folder / path
    if inside.exists() or not path.exists():
        return inside
    place = Place(path, folder)
    for reader in READERS:
        if reader.lists_files and reader.matches(place):
            return path
    return inside


def expanded(root: str | Path | None) -> Path | None:
    if root is None:
        return None
    return Path(root).expanduser()


def words(value: Any) -> Any:
    """Text becomes a list: `visit, ward`.

    >>> words("visit, ward")
    ['visit', 'ward']
    """
    if isinstance(value, str):
        return re.split(r"\s*,\s*", value.strip())
    return value


def _columns(drop: Any) -> tuple[str, ...]:
    """The columns that are left out; what is no list of names is an error later."""
    if isinstance(drop, Sequence):
        return tuple(words(drop))
    return ()


def _absent(source: str | Path, path: Path) -> str:
    """What to say of a source that is neither a name nor a path."""
    names = sorted({name for reader in READERS for name in reader.names})
    beside = list[str]()
    with suppress(OSError):  # a folder that is not there, or is closed
        beside = [entry.name for entry in islice(path.parent.iterdir(), NEIGHBOURS)]
    if path.suffix or re.search(r"[\\/]", str(source)):  # it was meant to be a path
        return (
            f"{path}: no such file or folder: correct the path"
            f"{suggestion(path.name, [*names, *beside])}"
        )
    return (
        f"{str(source)!r} is neither a known data set nor an existing path ({path}):"
        f" known are {listing(names, 40)}{suggestion(str(source), [*names, *beside])};"
        f" {FIRST}"
    )

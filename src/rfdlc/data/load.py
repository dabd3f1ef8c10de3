"""`load`: the front door. A name, a path, arrays or a data frame in; a Dataset out."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from json import loads
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

from rfdlc.data.dataset import Dataset
from rfdlc.data.groups import with_groups
from rfdlc.data.sources import arrays, cifar, digits, folder, listing, medmnist, table
from rfdlc.errors import InputError, suggestion
from rfdlc.errors import listing as told
from rfdlc.tables import SUFFIXES as TABLE_SUFFIXES
from rfdlc.tables import parquet_files

Reader = Callable[..., Dataset]

# Data sets that have a name of their own: how each is read, and where in a root folder it is found.
NAMES: dict[str, tuple[Reader, Callable[[Path], Path]]] = {
    "digits-lt": (digits.read, Path),
    "cifar10-lt": (cifar.read_cifar10, Path),
    "cifar100-lt": (cifar.read_cifar100, Path),
    **{name: (medmnist.read, partial(medmnist.find, name=name)) for name in medmnist.CLASS_NAMES},
    **{name: (listing.read, partial(listing.find_named, name=name)) for name in listing.NAMES},
}
PLAIN: dict[type, tuple[type, str]] = {
    bool: (bool, "true or false"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
}
SUFFIXES: dict[str, Reader] = {
    ".npz": arrays.read_npz,
    ".npy": arrays.read_npy,
    ".txt": listing.read,
    **dict.fromkeys(TABLE_SUFFIXES, table.read),
}


def load(
    source: Any,
    *,
    root: str | Path | None = None,
    groups: str | Path | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    **options: Any,
) -> Dataset:
    """Read a data set: by name (`digits-lt`), by path, or from memory (`(X, y)`, a dict of splits, a data frame).

    `root` is the folder in which a named data set is looked for (the current one if not given). `groups` is a CSV file
    that says which samples belong together, or a column of a table. Data that comes in one piece has `test_fraction` of
    it held out for testing (0: none). Other options depend on the source, `docs/data.md` lists them.

    >>> data = load("digits-lt", factor=10)
    >>> data.classes.count_array[[0, -1]].tolist(), data.input_shape
    ([129, 12], (1, 8, 8))
    """
    reader, place = find_reader(source, root)
    test_fraction, seed = as_option("test_fraction", test_fraction, float), as_option("seed", seed, int)
    if seed < 0:
        raise InputError(f"option seed={seed} is out of range: expected at least 0")
    options |= {"seed": seed} if "seed" in options_of(reader) else {}
    if "groups" in options_of(reader):  # a table: it has a column for them, and parts itself before it is encoded
        return reader(place, **_checked(reader, source, options), groups=groups, test_fraction=test_fraction)
    data = reader(place, **_checked(reader, source, options))
    if groups is not None:
        data = with_groups(data, Path(groups).expanduser())
    return data.with_test(test_fraction, seed) if list(data.splits) == ["train"] and test_fraction else data


def find_reader(source: Any, root: str | Path | None) -> tuple[Reader, Any]:
    """What reads this source, and what to give it."""
    folder_of = Path() if root is None else Path(root).expanduser()
    if isinstance(source, str) and source.lower() in NAMES:
        reader, find = NAMES[source.lower()]
        return reader, find(folder_of)
    if not isinstance(source, str | Path):
        is_frame = type(source).__name__ == "DataFrame"
        return (table.read if is_frame else arrays.from_memory), source
    path = folder_of / Path(source).expanduser()
    if not path.exists():
        raise InputError(
            f"{str(source)!r} is neither a known data set nor an existing path ({path}): "
            f"known are {told(NAMES, 40)}{suggestion(str(source), NAMES)}"
        )
    return _reader_of_path(path), path


def _reader_of_path(path: Path) -> Reader:
    if path.is_dir():
        return _reader_of_folder(path)
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"{path}: files of this kind are not read: expected {told(SUFFIXES)}, or a folder of images")
    reader = SUFFIXES[path.suffix.lower()]
    return medmnist.read if reader is arrays.read_npz and medmnist.recognises(path) else reader


def _reader_of_folder(path: Path) -> Reader:
    if cifar.recognises(path):
        return cifar.read_folder
    if listing.find(path):
        return listing.read_folder
    if parquet_files(path):
        return table.read
    return arrays.read_folder if any(path.glob("*.npy")) else folder.read


def options_of(reader: Reader) -> list[str]:
    """What a reader can be told."""
    return [p.name for p in inspect.signature(reader).parameters.values() if p.kind is p.KEYWORD_ONLY]


def all_options() -> set[str]:
    """What some reader or other can be told.

    >>> {"target", "image_size", "test_fraction"} <= all_options()
    True
    """
    readers = [*(reader for reader, _ in NAMES.values()), *SUFFIXES.values(), folder.read]
    return {"groups", "test_fraction", *(option for reader in readers for option in options_of(reader))}


def _checked(reader: Reader, source: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options, if the reader takes them all, each of the kind that it takes."""
    allowed, kinds = options_of(reader), get_type_hints(reader)
    for name in options:
        if name not in allowed:
            what = source if isinstance(source, str | Path) else "data in memory"
            known = told(dict.fromkeys(["root", "groups", "test_fraction", "seed", *allowed]), 40)
            raise InputError(f"{what} takes no option {name!r}: expected one of {known}{suggestion(name, allowed)}")
    return {name: as_option(name, value, kinds[name]) for name, value in options.items()}


def as_option(name: str, value: Any, kind: Any) -> Any:
    """An option's value as its reader takes it; text is read as a command line's.

    >>> as_option("image_size", "64", int | None), as_option("drop", "age,name", Sequence[str])
    (64, ['age', 'name'])
    """
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if value is None and NoneType in kinds:
        return None
    if Sequence[str] in kinds:
        return [word.strip() for word in value.split(",")] if isinstance(value, str) else value
    plain = next((plain for plain in PLAIN if plain in kinds), None)
    if plain is None:  # a name or a path
        return value if isinstance(value, str | Path) else str(value)
    accepted, words = PLAIN[plain]
    try:
        found = loads(value.lower()) if isinstance(value, str) else value
    except ValueError:
        found = value
    if not isinstance(found, accepted) or isinstance(found, bool) != (plain is bool):  # True is an int in Python
        raise InputError(f"option {name}={value!r} cannot be read: expected {words}")
    return found

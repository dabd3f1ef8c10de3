"""`load`: the front door. A name, a path, arrays or a data frame in; a Dataset out."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rfdlc.data.dataset import Dataset
from rfdlc.data.sources import arrays, cifar, digits
from rfdlc.errors import InputError, listing, suggestion

Reader = Callable[..., Dataset]

# Data sets with a name of their own -> how they are read from a root folder.
NAMES: dict[str, Reader] = {
    "digits-lt": digits.read,
    "cifar10-lt": cifar.read_cifar10,
    "cifar100-lt": cifar.read_cifar100,
}


def load(source: Any, *, root: str | Path | None = None, **options: Any) -> Dataset:
    """Read a data set: by name (`digits-lt`), by path, or from memory (`(X, y)`, a dict of splits, a data frame).

    `root` is the folder in which a named data set is looked for (the current one if not given). Options depend on the
    source, `docs/data.md` lists them; an unknown one is an error that says which there are.

    >>> data = load("digits-lt", factor=10)
    >>> data.classes.count_array[[0, -1]].tolist(), data.input_shape
    ([129, 12], (1, 8, 8))
    """
    reader, place = _reader(source, Path(root) if root is not None else None)
    return reader(*place, **_checked(reader, str(source) if isinstance(source, str | Path) else "arrays", options))


def _reader(source: Any, root: Path | None) -> tuple[Reader, tuple[Any, ...]]:
    if isinstance(source, str) and source in NAMES:
        return NAMES[source], (root or Path("."),)
    if not isinstance(source, str | Path):
        return arrays.from_memory, (source,)
    path = (root / source) if root is not None else Path(source)
    if not path.exists():
        hint = suggestion(str(source), NAMES)
        raise InputError(
            f"{str(source)!r} is neither a known data set nor an existing path ({path}): "
            f"known are {listing(NAMES, 40)}{hint}"
        )
    return _reader_of_path(path), (path,)


def _reader_of_path(path: Path) -> Reader:
    if path.is_dir():
        if cifar.recognises(path):
            return cifar.read_folder
        return arrays.read_folder
    readers: dict[str, Reader] = {".npz": arrays.read_npz, ".npy": arrays.read_npy}
    if path.suffix.lower() not in readers:
        raise InputError(f"{path}: files of this kind are not read; known are {listing(readers)}, or a folder")
    return readers[path.suffix.lower()]


def _checked(reader: Reader, source: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options, if the reader takes them all."""
    allowed = [p.name for p in inspect.signature(reader).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for name in options:
        if name not in allowed:
            known = listing(allowed, 40) or "none"
            raise InputError(f"{source} takes no option {name!r}: expected {known}{suggestion(name, allowed)}")
    return options

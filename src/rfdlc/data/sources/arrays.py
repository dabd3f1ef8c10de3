"""Arrays: features, embeddings or small images in `.npz`, `.npy` files, or in memory."""

import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.dataset import Dataset, Split, split_name
from rfdlc.data.table import blurred
from rfdlc.decide.classes import Classes, as_array, is_missing, numbered
from rfdlc.errors import InputError, listing

Value = TypeVar("Value")

# What the words in a key mean: `train_x`, `X_test`, `y`, `val_labels`, `groups`, ...
ROLES = {
    "x": {"x", "features", "embeddings", "inputs", "data", "images"},
    "y": {"y", "labels", "targets", "label", "target"},
    "groups": {"groups", "group"},
    "ids": {"ids", "id"},
    "names": {"names", "classes"},
}
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
EXPECTED = "x and y, or train_x, train_y, test_x, test_y (and val_x, val_y, groups, ids, names)"


def read_npz(path: Path) -> Dataset:
    """One file with all arrays: `x` and `y`, or `train_x`, `train_y`, `test_x`, ..."""
    return from_arrays(path.stem, open_npz(path))


def read_npy(path: Path, *, labels: str | Path | None = None) -> Dataset:
    """A pair of files: the features at `path`, the labels at `labels` (`y.npy` beside it if not given)."""
    beside = Path(labels) if labels is not None else path.with_name("y.npy")
    if not beside.is_file() or beside == path:
        raise InputError(
            f"{path}: there are no labels for it at {beside}; name them with labels (--labels; to rfdlc train "
            "data.labels=FILE)"
        )
    return from_arrays(path.stem, {"x": _npy(path), "y": _npy(beside)})


def read_folder(path: Path) -> Dataset:
    """A folder of `.npy` files named like the arrays in an `.npz`: `train_x.npy`, `train_y.npy`, ..."""
    arrays = {file.stem: _npy(file) for file in sorted(path.glob("*.npy"))}
    return from_arrays(path.name, arrays)


def from_memory(source: Any, *, name: str = "arrays") -> Dataset:
    """`(X, y)`, or a dict with the keys of an `.npz`, or `{"train": (X, y), "test": (X, y)}`."""
    if isinstance(source, Mapping):
        arrays: dict[str, Any] = {}
        for key, value in source.items():
            if isinstance(value, tuple | list) and len(value) == 2 and split_name(str(key)):
                arrays |= {f"{key}_x": value[0], f"{key}_y": value[1]}
            else:
                arrays[str(key)] = value
    elif isinstance(source, tuple | list) and len(source) == 2:
        arrays = {"x": source[0], "y": source[1]}
    else:
        kind = type(source).__name__
        raise InputError(f"a {kind} cannot be loaded: expected a name, a path, (X, y) or a dict of splits")
    return from_arrays(name, {k: as_array(v) for k, v in arrays.items()})


def open_npz(path: Path) -> dict[str, NDArray[Any]]:
    """All arrays in an `.npz`; one that would need unpickling is refused."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}
    except Exception as error:  # a damaged zip can fail in any way
        raise InputError(unreadable(path, error)) from None


def _npy(path: Path) -> NDArray[Any]:
    try:
        array = np.load(path, allow_pickle=False)
    except Exception as error:
        raise InputError(unreadable(path, error)) from None
    return np.asarray(array)


def unreadable(path: Path, error: Exception) -> str:
    """The message for a file that numpy cannot read."""
    if "allow_pickle" in str(error):
        return f"{path}: holds Python objects, which are never unpickled: save arrays of numbers or text instead"
    return f"{path}: cannot be read as numpy arrays, it is damaged or of another format ({error})"


# -- from named arrays to a data set -----------------------------------------------------------------------------------


def from_arrays(name: str, arrays: Mapping[str, NDArray[Any]]) -> Dataset:
    """A data set from arrays whose keys name split and role."""
    found = by_split(name, {key: as_texts(array) for key, array in arrays.items()})
    whole = found.pop(None, {})
    given_names = whole.pop("names", None)
    if whole and found:
        raise InputError(f"{name}: arrays with and without a split are mixed ({listing(arrays)}): expected {EXPECTED}")
    roles = {"train": whole} if whole else {str(split): own for split, own in found.items()}
    names = _class_names(name, roles, given_names)
    splits = {split: _split(f"{name}, {split}", own, names) for split, own in roles.items()}
    data = Dataset.of(name, names, splits)
    _check_blurred(name, roles["train"]["x"])
    return data


def _check_blurred(name: str, inputs: NDArray[Any]) -> None:
    """Warn where rounding features to 32 bits loses their differences."""
    if inputs.ndim != 2 or inputs.dtype.itemsize <= 4:
        return
    lost = [column for column in range(inputs.shape[1]) if blurred(inputs[:, column])]
    if lost:
        first = inputs[:, lost[0]]
        warnings.warn(
            f"{name}: 32 bits are too few for feature {listing(lost)}: feature {lost[0]} varies by {first.std():.2g} "
            f"around {first.mean():.6g}; subtract its mean first, in training and in prediction",
            stacklevel=2,
        )


def as_texts(array: NDArray[Any]) -> NDArray[Any]:
    """Names that numpy holds as bytes, as text; other arrays as they are."""
    return np.char.decode(array, "utf-8", "replace") if array.dtype.kind == "S" else array


def by_split(name: str, arrays: Mapping[str, Value]) -> dict[str | None, dict[str, Value]]:
    """{split or None: {role: array}} of arrays whose keys name both."""
    found: dict[str | None, dict[str, Value]] = {}
    for key, array in arrays.items():
        split, role = _meaning(name, key)
        if role in found.setdefault(split, {}):
            raise InputError(f"{name}: two arrays mean the same, {key!r} is the second ({listing(arrays)}): keep one")
        found[split][role] = array
    return found


def _meaning(name: str, key: str) -> tuple[str | None, str]:
    """(split or None, role) of a key."""
    words = _words(key)
    splits = [split for split in map(split_name, words) if split]
    roles = [role for word in words for role, aliases in ROLES.items() if word in aliases]
    if len(roles) != 1 or len(splits) > 1 or len(words) != 1 + len(splits):
        raise InputError(f"{name}: the array {key!r} has a name that is not known here: expected {EXPECTED}")
    return (splits[0] if splits else None), roles[0]


def names_split(key: str) -> bool:
    """Whether a name contains train, val or test.

    >>> names_split("X_test"), names_split("X")
    (True, False)
    """
    return any(map(split_name, _words(key)))


def _words(key: str) -> list[str]:
    return [word for word in re.split(r"[_\-. ]+", key.lower()) if word]


def _class_names(name: str, roles: Mapping[str, Mapping[str, NDArray[Any]]], given: Any) -> list[str]:
    if given is not None:
        return [str(n) for n in np.asarray(given).reshape(-1)]
    train = roles.get("train", {}).get("y")
    if train is None or not train.size:
        raise InputError(f"{name}: there are no training labels: expected {EXPECTED}")
    if train.dtype.kind not in "iufb":
        _check_known(name, "label", train)
        return [str(n) for n in np.unique(train.astype(str))]
    largest = max(float(np.nanmax(own["y"])) for own in roles.values() if "y" in own and own["y"].size)
    return numbered(largest, f"{name}: ")


def _check_known(where: str, what: str, values: NDArray[Any]) -> None:
    """None and nan would become a class, or a group."""
    absent = [i for i, value in enumerate(values.flat) if is_missing(value)]
    if absent:
        raise InputError(f"{where}: {what} {listing(absent, 5)} is missing: expected all; leave out those samples")


def _split(where: str, own: Mapping[str, NDArray[Any]], names: Sequence[str]) -> Split:
    if "x" not in own or "y" not in own:
        raise InputError(f"{where}: has {listing(own)} but needs both inputs and labels: expected {EXPECTED}")
    ids = None if "ids" not in own else [str(i) for i in _column(where, "ids", own["ids"])]
    groups = None if "groups" not in own else _as_groups(where, _column(where, "groups", own["groups"]))
    return Split(as_inputs(where, own["x"]), as_labels(where, own["y"], names), ids, groups)


def _as_groups(where: str, groups: NDArray[Any]) -> NDArray[Any]:
    if groups.dtype.kind in "Of":
        _check_known(where, "group", groups)
    return groups.astype(str) if groups.dtype.kind == "O" else groups


def _column(where: str, what: str, values: NDArray[Any], hint: str = "") -> NDArray[Any]:
    """(N,), also of a column (N, 1)."""
    flat = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
    if flat.ndim != 1:
        raise InputError(f"{where}: {what} have shape {values.shape}: expected one per sample{hint}")
    return flat


def as_labels(where: str, labels: NDArray[Any], names: Sequence[str]) -> NDArray[np.int64]:
    """Class indices (N,) from numbers or names, a column of them included."""
    return Classes(tuple(names)).encode(_column(where, "labels", labels, " (for one-hot: argmax)"), f"{where}: label")


def as_inputs(where: str, inputs: NDArray[Any]) -> NDArray[Any]:
    """uint8 images as (N, channels, H, W), or finite float32 features (N, F)."""
    if inputs.dtype == np.uint8 and inputs.ndim in (3, 4):
        return as_images(where, inputs)
    if inputs.ndim != 2 or inputs.dtype.kind not in "iufb":
        raise InputError(
            f"{where}: inputs are {inputs.dtype} of shape {inputs.shape}: expected numbers (N, features), "
            "or uint8 images (N, H, W), (N, H, W, 3) or (N, 3, H, W)"
        )
    with np.errstate(over="ignore"):  # too large values become infinite, and are reported below
        features = inputs.astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(features).all(axis=1))
    if len(wrong):
        raise InputError(
            f"{where}: row {wrong[0]} has a missing, infinite or too large value ({len(wrong)} rows have): "
            f"fill them first, with numbers up to {np.finfo(np.float32).max:.1e}"
        )
    return features


def as_images(where: str, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """uint8 (N, H, W), (N, H, W, channels) or (N, channels, H, W), with 1 or 3 channels, as (N, channels, H, W)."""
    if images.ndim == 3:
        return images[:, None]
    if images.ndim == 4 and images.shape[1] in (1, 3):
        return images
    if images.ndim == 4 and images.shape[3] in (1, 3):
        return np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    raise InputError(f"{where}: images have shape {images.shape}: expected 1 or 3 channels, (N, H, W[, channels])")


# -- rows of large arrays, read on demand ------------------------------------------------------------------------------


class ArrayRows:
    """One stored array whose rows are read from the file on demand; cheap in ascending order, also when compressed."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        read_header = HEADERS[np.lib.format.read_magic(file)]
        self.shape, by_column, self.dtype = read_header(file)
        if self.dtype.hasobject or not self.shape:
            raise ValueError("allow_pickle" if self.dtype.hasobject else "a single number")
        self._file, self._path, self._start = file, path, file.tell()
        self._row = self.dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))
        # An array stored column by column has no rows to read: it is read at once.
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
                raise EOFError("it is truncated")
        except Exception as error:  # a damaged file can fail in any way
            raise InputError(unreadable(self._path, error)) from None
        return np.frombuffer(data, dtype=self.dtype)


def open_arrays(path: Path) -> dict[str | None, dict[str, ArrayRows]]:
    """The arrays of an `.npz`, a `.npy` with the `y.npy` beside it if there is one, or a folder of `.npy` files.

    {split or None: {role: array}}, with the roles of `ROLES`. Files stay open as long as they are needed.
    """
    try:
        if path.suffix.lower() == ".npz":
            packed = zipfile.ZipFile(path)
            found = {name.removesuffix(".npy"): ArrayRows(packed.open(name), path) for name in packed.namelist()}
        elif path.is_dir():
            found = {file.stem: ArrayRows(file.open("rb"), file) for file in sorted(path.glob("*.npy"))}
        else:
            labels = path.with_name("y.npy")  # goes with X.npy, not with X_test.npy
            beside = labels.is_file() and labels != path and not names_split(path.stem)
            found = {"x": ArrayRows(path.open("rb"), path)}
            found |= {"y": ArrayRows(labels.open("rb"), labels)} if beside else {}
    except InputError:
        raise
    except Exception as error:
        raise InputError(unreadable(path, error)) from None
    return by_split(path.name, found)

"""Arrays: features, embeddings or small images in `.npz`, `.npy` files, or in memory."""

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.dataset import Dataset, Split, split_name
from rfdlc.data.table import blurred
from rfdlc.decide.classes import Classes, as_array, is_missing, numbered
from rfdlc.errors import InputError, listing

# What the words in a key mean: `train_x`, `X_test`, `y`, `val_labels`, `groups`, ...
ROLES = {
    "x": {"x", "features", "embeddings", "inputs", "data", "images"},
    "y": {"y", "labels", "targets", "label", "target"},
    "groups": {"groups", "group"},
    "ids": {"ids", "id"},
    "names": {"names", "classes"},
}
EXPECTED = "x and y, or train_x, train_y, test_x, test_y (and val_x, val_y, groups, ids, names)"


def read(path: Path) -> Dataset:
    """An `.npz`, or a folder of `.npy` files, with `x` and `y`, or with `train_x`, `train_y`, `test_x`, ..."""
    return from_arrays(path.name if path.is_dir() else path.stem, open_arrays(path))


def read_npy(path: Path, *, labels: str | Path | None = None) -> Dataset:
    """A pair of files: the features at `path`, the labels at `labels` (`y.npy` beside it if not given)."""
    beside = Path(labels) if labels is not None else path.with_name("y.npy")
    if not beside.is_file() or beside == path:
        raise InputError(
            f"{path}: there are no labels for it at {beside}; name them with labels (--labels; to rfdlc train "
            "data.labels=FILE)"
        )
    return from_arrays(path.stem, {"x": _open(path), "y": _open(beside)})


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


def open_arrays(path: Path, *, mapped: bool = False) -> dict[str, NDArray[Any]]:
    """The arrays of an `.npz`, an `.npy` with the `y.npy` beside it, or a folder of `.npy` files, by name.

    Arrays in `.npy` files may be memory-mapped, so that their rows are read on demand.
    """
    if path.is_dir():
        return {file.stem: _open(file, mapped) for file in sorted(path.glob("*.npy"))}
    if path.suffix.lower() == ".npz":
        return dict(_open(path))
    labels = path.with_name("y.npy")  # goes with X.npy, not with X_test.npy
    beside = labels.is_file() and labels != path and not any(map(split_name, _words(path.stem)))
    return {"x": _open(path, mapped)} | ({"y": _open(labels, mapped)} if beside else {})


def _open(path: Path, mapped: bool = False) -> Any:
    """What numpy reads without unpickling anything."""
    try:
        found = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
        return found if isinstance(found, np.ndarray) else {key: found[key] for key in found.files}
    except Exception as error:  # a damaged file can fail in any way
        objects = "allow_pickle" in str(error) or "Python objects" in str(error)
        fix = "holds Python objects, which are never unpickled: save arrays of numbers or text instead"
        damaged = f"cannot be read as numpy arrays, it is damaged or of another format ({error})"
        raise InputError(f"{path}: {fix if objects else damaged}") from None


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


def by_split(name: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str | None, dict[str, NDArray[Any]]]:
    """{split or None: {role: array}} of arrays whose keys name both."""
    found: dict[str | None, dict[str, NDArray[Any]]] = {}
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

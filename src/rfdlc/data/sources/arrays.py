"""Arrays: features, embeddings or small images in `.npz`, `.npy` files, or in memory."""

import math
import os
import re
import struct
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.dataset import Dataset, Split, split_name
from rfdlc.data.table import blurred
from rfdlc.decide.classes import Classes, as_array, is_missing, numbered
from rfdlc.errors import InputError, expect, listing

Arrays = dict[str, NDArray[Any]]

# What the words in a key mean: `train_x`, `X_test`, `y`, `val_labels`, `groups`, ...
ROLES = dict.fromkeys(("x", "features", "embeddings", "inputs", "data", "images"), "x")
ROLES |= dict.fromkeys(("y", "labels", "targets", "label", "target"), "y")
ROLES |= {"groups": "groups", "group": "groups", "ids": "ids", "id": "ids", "names": "names", "classes": "names"}
EXPECTED = "x and y, or train_x, train_y, test_x, test_y (and val_x, val_y, groups, ids, names)"


def read(path: Path) -> Dataset:
    """An `.npz`, or a folder of `.npy` files, with `x` and `y`, or with `train_x`, `train_y`, `test_x`, ..."""
    return from_arrays(path.name if path.is_dir() else path.stem, open_arrays(path))


def read_npy(path: Path, *, labels: str | Path | None = None) -> Dataset:
    """A pair of files: the features at `path`, the labels at `labels` (`y.npy` beside it if not given)."""
    beside = Path(labels) if labels is not None else path.with_name("y.npy")
    fix = "name them with labels (--labels; to rfdlc train data.labels=FILE)"
    expect(beside.is_file() and beside != path, f"{path}: there are no labels for it at {beside}; {fix}")
    return from_arrays(path.stem, {"x": _open(path), "y": _open(beside)})


def from_memory(source: Any, *, name: str = "arrays") -> Dataset:
    """`(X, y)`, or a dict with the keys of an `.npz`, or `{"train": (X, y), "test": (X, y)}`."""
    arrays: dict[str, Any] = {}
    for key, value in (source if isinstance(source, Mapping) else {"": source}).items():
        if (not key or split_name(str(key))) and isinstance(value, tuple | list) and len(value) == 2:
            arrays |= {f"{key}_x": value[0], f"{key}_y": value[1]}
        else:
            kind = type(value).__name__
            expect(key, f"a {kind} cannot be loaded: expected a name, a path, (X, y) or a dict of splits")
            arrays[str(key)] = value
    return from_arrays(name, arrays)


# -- files -------------------------------------------------------------------------------------------------------------


def open_arrays(path: Path, *, streamed: bool = False) -> dict[str, Any]:
    """The arrays of an `.npz`, an `.npy` with the `y.npy` beside it, or a folder of `.npy` files, by name.

    With `streamed`, rows of inputs are read on demand.
    """
    if path.is_dir():
        return {file.stem: _open(file, streamed) for file in sorted(path.glob("*.npy"))}
    if path.suffix.lower() == ".npz":
        with _explained(path):
            found = np.load(path, allow_pickle=False)
            lazy = [key for key in found.files if streamed and "x" in map(ROLES.get, _words(key))]
            return {key: _zipped(path, key) if key in lazy else found[key] for key in found.files}
    labels = path.with_name("y.npy")  # goes with X.npy, not with X_test.npy
    beside = labels.is_file() and labels != path and not any(map(split_name, _words(path.stem)))
    return {"x": _open(path, streamed)} | ({"y": _open(labels, streamed)} if beside else {})


def _open(path: Path, mapped: bool = False) -> NDArray[Any]:
    with _explained(path):
        return np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)


def _zipped(path: Path, key: str) -> Any:
    """Rows of an array in an `.npz` file: mapped where they are stored as they are, else decompressed on demand."""
    packed = zipfile.ZipFile(path)
    member = packed.getinfo(f"{key}.npy")
    stored = member.compress_type == zipfile.ZIP_STORED
    with path.open("rb") if stored else packed.open(member) as file:
        if stored:  # between the member's header and its content lie its name and another field
            file.seek(member.header_offset + 26)
            file.seek(sum(struct.unpack("<HH", file.read(4))), os.SEEK_CUR)
        old = np.lib.format.read_magic(file) == (1, 0)
        header = np.lib.format.read_array_header_1_0 if old else np.lib.format.read_array_header_2_0
        shape, by_column, dtype = header(file)
        start = file.tell()
    if dtype.hasobject or 0 in shape or (by_column and not stored):
        return np.load(path, allow_pickle=False)[key]
    if stored:
        return np.memmap(path, dtype, "r", start, shape, "F" if by_column else "C")
    return ZippedRows(path, packed.open(member), start, shape, dtype)


@dataclass(frozen=True)
class ZippedRows:
    """Rows of a compressed array, which are cheap to read in ascending order."""

    path: Path
    file: IO[bytes]
    start: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        count, size = rows.stop - rows.start, self.dtype.itemsize * math.prod(self.shape[1:])
        with _explained(self.path):
            self.file.seek(self.start + rows.start * size)
            return np.frombuffer(self.file.read(count * size), self.dtype).reshape(count, *self.shape[1:])


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a damaged file can fail in any way
        objects = "allow_pickle" in str(error) or "Python objects" in str(error)
        fix = "holds Python objects, which are never unpickled: save arrays of numbers or text instead"
        damaged = f"cannot be read as numpy arrays, it is damaged or of another format ({error})"
        raise InputError(f"{path}: {fix if objects else damaged}") from None


# -- what the arrays mean ----------------------------------------------------------------------------------------------


def from_arrays(name: str, arrays: Mapping[str, Any]) -> Dataset:
    """A data set from arrays whose keys name split and role."""
    found = by_split(name, {key: as_array(array) for key, array in arrays.items()})
    whole = found.pop("", {})
    given_names = whole.pop("names", None)
    mixed = f"{name}: arrays with and without a split are mixed ({listing(arrays)}): expected {EXPECTED}"
    expect(not (whole and found), mixed)
    roles = {"train": whole} if whole else found
    names = _class_names(name, roles) if given_names is None else [str(n) for n in given_names.reshape(-1)]
    data = Dataset.of(name, names, {split: _split(f"{name}, {split}", own, names) for split, own in roles.items()})
    inputs = roles["train"]["x"]
    wide = inputs.ndim == 2 and inputs.dtype.itemsize > 4
    lost = [column for column in range(inputs.shape[1]) if blurred(inputs[:, column])] if wide else []
    if lost:
        first = inputs[:, lost[0]]
        told = f"feature {lost[0]} varies by {first.std():.2g} around {first.mean():.6g}"
        fix = "subtract its mean first, in training and in prediction"
        warnings.warn(f"{name}: 32 bits are too few for feature {listing(lost)}: {told}; {fix}", stacklevel=2)
    return data


def by_split(name: str, arrays: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{split or "": {role: array}} of arrays whose keys name both."""
    found: dict[str, dict[str, Any]] = {}
    for key, array in arrays.items():
        words = _words(key)
        splits = [split for split in map(split_name, words) if split]
        roles = [ROLES[word] for word in words if word in ROLES]
        known = len(roles) == 1 and len(splits) <= 1 and len(words) == 1 + len(splits)
        expect(known, f"{name}: the array {key!r} has a name that is not known here: expected {EXPECTED}")
        own = found.setdefault("".join(splits), {})
        twice = f"{name}: two arrays mean the same, {key!r} is the second ({listing(arrays)}): keep one"
        expect(roles[0] not in own, twice)
        own[roles[0]] = array
    return found


def _words(key: str) -> list[str]:
    return [word for word in re.split(r"[_\-. ]+", key.lower()) if word]


def _class_names(name: str, roles: Mapping[str, Arrays]) -> list[str]:
    train = roles.get("train", {}).get("y", np.empty(0))
    expect(train.size, f"{name}: there are no training labels: expected {EXPECTED}")
    if train.dtype.kind not in "iufb":
        _check_known(name, "label", train)
        return [str(n) for n in np.unique(train.astype(str))]
    largest = [float(np.nanmax(own["y"])) for own in roles.values() if "y" in own and own["y"].size]
    return numbered(max(largest), f"{name}: ")


def _check_known(where: str, what: str, values: NDArray[Any]) -> None:
    """None and nan would become a class, or a group."""
    absent = [i for i, value in enumerate(values.flat) if is_missing(value)]
    expect(not absent, f"{where}: {what} {listing(absent, 5)} is missing: expected all; leave out those samples")


def _split(where: str, own: Arrays, names: Sequence[str]) -> Split:
    complete = "x" in own and "y" in own
    expect(complete, f"{where}: has {listing(own)} but needs both inputs and labels: expected {EXPECTED}")
    ids = None if "ids" not in own else [str(i) for i in column(where, "ids", own["ids"])]
    groups = None if "groups" not in own else column(where, "groups", own["groups"])
    if groups is not None and groups.dtype.kind in "Of":
        _check_known(where, "group", groups)
        groups = groups.astype(str) if groups.dtype.kind == "O" else groups
    labels = Classes(tuple(names)).encode(column(where, "labels", own["y"]), f"{where}: label")
    return Split(as_inputs(where, own["x"]), labels, ids, groups)


def column(where: str, what: str, values: NDArray[Any]) -> NDArray[Any]:
    """Values (N,), also of a column (N, 1)."""
    flat = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
    hint = " (for one-hot: argmax)" if what == "labels" else ""
    expect(flat.ndim == 1, f"{where}: {what} have shape {values.shape}: expected one per sample{hint}")
    return flat


def as_inputs(where: str, inputs: NDArray[Any]) -> NDArray[Any]:
    """uint8 images as (N, channels, H, W), or finite float32 features (N, F)."""
    if inputs.dtype == np.uint8 and inputs.ndim in (3, 4):
        return as_images(where, inputs)
    expect(
        inputs.ndim == 2 and inputs.dtype.kind in "iufb",
        f"{where}: inputs are {inputs.dtype} of shape {inputs.shape}: expected numbers (N, features), "
        "or uint8 images (N, H, W), (N, H, W, 3) or (N, 3, H, W)",
    )
    with np.errstate(over="ignore"):  # too large values become infinite, and are reported below
        features = inputs.astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(features).all(axis=1))
    told = f"row {next(iter(wrong), 0)} has a missing, infinite or too large value ({len(wrong)} rows have)"
    expect(not len(wrong), f"{where}: {told}: fill them first, with numbers up to {np.finfo(np.float32).max:.1e}")
    return features


def as_images(where: str, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """uint8 (N, H, W), (N, H, W, channels) or (N, channels, H, W), with 1 or 3 channels, as (N, channels, H, W)."""
    if images.ndim == 3:
        return images[:, None]
    if images.shape[1] in (1, 3):
        return images
    rule = f"{where}: images have shape {images.shape}: expected 1 or 3 channels, (N, H, W[, channels])"
    expect(images.shape[-1] in (1, 3), rule)
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2))

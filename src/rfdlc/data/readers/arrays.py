"""Arrays: features, embeddings or small images in `.npz`, `.npy` files, or in
memory.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.dataset import Dataset, Split, as_inputs, choose_split
from rfdlc.data.embedding import Embedding
from rfdlc.data.reader import DataReader, Listing, Place, Request
from rfdlc.data.rows import doubtful
from rfdlc.data.samples import UNKNOWN, Chunk, Samples, fingerprint_of, matched
from rfdlc.data.table import blurred
from rfdlc.errors import InputError, expect, listing
from rfdlc.formats.arrays import NPY, NPZ, open_arrays, open_npy
from rfdlc.formats.tables import split_name
from rfdlc.probabilities.classes import Classes, as_array, is_missing, numbered

Arrays = dict[str, NDArray[Any]]

# What the words in a key mean: `train_x`, `X_test`, `y`, `val_labels`, `groups`, ...
ROLES = dict.fromkeys(("x", "features", "embeddings", "inputs", "data", "images"), "x")
ROLES |= dict.fromkeys(("y", "labels", "targets", "label", "target"), "y")
ROLES |= {
    "groups": "groups",
    "group": "groups",
    "ids": "ids",
    "id": "ids",
    "names": "names",
    "classes": "names",
}
# Arrays of the files that `predict` and runs write.
PREDICTED = ("logits", "probabilities")
EMBEDDING = "embedding"  # the array with the text that says how features were made
EXPECTED = (
    "x and y, or train_x, train_y, test_x, test_y (and val_x, val_y, groups, ids,"
    " names)"
)


def read(place: Place) -> Dataset:
    """An `.npz`, or a folder of `.npy` files, with `x` and `y`, or with `train_x`,
    `train_y`, `test_x`, ...
    """
    path = place.path
    arrays = open_inputs(path)
    data = from_arrays(path.name if path.is_dir() else path.stem, arrays)
    if EMBEDDING not in arrays:
        return data
    embedding = Embedding.read(str(arrays[EMBEDDING]), path)
    return replace(data, embedding=embedding.beside(path))


def read_npy(place: Place, *, labels: str | Path | None = None) -> Dataset:
    """A pair of files: the features at the path, the labels at `labels` (`y.npy` beside
    it if not given).
    """
    path = place.path
    beside = Path(labels) if labels is not None else path.with_name("y.npy")
    if beside == path or not beside.is_file():
        raise InputError(
            f"{path}: there are no labels for it at {beside}; name them with labels"
            " (--labels; to rfdlc train data.labels=FILE)"
        )
    return from_arrays(path.stem, {"x": open_npy(path), "y": open_npy(beside)})


def from_memory(source: Any, *, name: str = "arrays") -> Dataset:
    """`(X, y)`, or a dict with the keys of an `.npz`, or `{"train": (X, y), "test": (X,
    y)}`.
    """
    arrays: dict[str, Any] = {}
    for key, value in (source if isinstance(source, Mapping) else {"": source}).items():
        if (
            (not key or split_name(str(key)))
            and isinstance(value, tuple | list)
            and len(value) == 2
        ):
            arrays |= {f"{key}_x": value[0], f"{key}_y": value[1]}
        else:
            kind = type(value).__name__
            expect(
                key,
                f"a {kind} cannot be loaded: expected a name, a path, (X, y) or a dict"
                " of splits",
            )
            arrays[str(key)] = value
    return from_arrays(name, arrays)


def open_inputs(path: Path, *, streamed: bool = False) -> dict[str, Any]:
    """Arrays of an `.npz`, an `.npy` (and the `y.npy` beside it) or a folder, by name;
    `streamed` inputs on demand.
    """
    if path.is_dir() or path.suffix.lower() == NPZ:
        return open_arrays(path, streamed=is_inputs if streamed else None)
    found = {"x": open_npy(path, mapped=streamed)}
    labels = path.with_name("y.npy")  # goes with X.npy, not with X_test.npy
    of_a_split = any(map(split_name, words_of(path.stem)))
    if labels.is_file() and labels != path and not of_a_split:
        found["y"] = open_npy(labels)
    return found


def is_folder(place: Place) -> bool:
    return place.path.is_dir() and any(place.path.glob(f"*{NPY}"))


def is_inputs(key: str) -> bool:
    return "x" in map(ROLES.get, words_of(key))


def open_rows(place: Place, request: Request) -> Samples:
    """`x`, and `y`, `ids` and `names` where they exist; rows of `x` are read on
    demand.
    """
    path, spec = place.path, request.spec
    arrays = open_inputs(path, streamed=True)
    if EMBEDDING in arrays:
        made = Embedding.read(str(as_array(arrays[EMBEDDING])), path)
        spec.check_embedding(path, made)
    roles, names = _roles_of(path, arrays, request.split)
    inputs = roles["x"]
    of_features = spec.embedding is not None and len(inputs.shape) == 2
    if of_features and EMBEDDING not in arrays:
        warnings.warn(
            f"{path} does not say which network made its features: that it is the one"
            " that made the training features is taken on trust",
            stacklevel=2,
        )
    labels = np.full(inputs.shape[0], UNKNOWN)
    doubt = ""
    if "y" in roles:
        theirs, indices = _labels(str(path), roles["y"], names, spec.classes)
        labels = matched(indices, theirs, spec.classes)
        doubt = doubtful(labels, (theirs[index] for index in indices))
    ids: list[str] | None = None
    if "ids" in roles:
        ids = [str(text) for text in as_array(roles["ids"])]

    def read(rows: range) -> Chunk:
        here = slice(rows.start, rows.stop)
        values = inputs[here]
        if isinstance(values, np.memmap):  # read here, in its own thread
            values = np.array(values)
        features = as_inputs(f"{path}, from row {rows.start} on", values)
        return Chunk(Split(features, labels[here], None if ids is None else ids[here]))

    return Samples(
        labels,
        named=ids is not None,
        fingerprint=fingerprint_of(path),
        read=read,
        ids=ids,
        groups=roles.get("groups"),
        doubt=doubt,
    )


def _roles_of(
    path: Path, arrays: dict[str, Any], split: str | None
) -> tuple[dict[str, Any], list[str] | None]:
    """{role: array} of a split, and the names of the classes where the file has them;
    raises unless there is one entry per sample.
    """
    splits = by_split(path.name, arrays)
    names = splits.get("", {}).pop("names", None)
    with_roles = {name or "train": roles for name, roles in splits.items() if roles}
    roles = with_roles[choose_split(str(path), with_roles, split)]
    counts = {array.shape[:1] for array in roles.values()}
    if "x" not in roles or len(counts) > 1 or () in counts:
        shapes = [f"{role} of shape {array.shape}" for role, array in roles.items()]
        raise InputError(
            f"{path}: has {', '.join(shapes)}: expected inputs x (or test_x, X_test,"
            " ...), and one of each per sample"
        )
    return roles, None if names is None else as_array(names).tolist()


def _labels(
    path: str, values: NDArray[Any], names: Sequence[str] | None, classes: Classes
) -> tuple[list[str], NDArray[np.int64]]:
    """The names of the file's classes and their indices: numbers are indices of its
    names, or are names themselves.
    """
    flat = as_array(column(path, "labels", values))
    # As they are read for training.
    whole = flat.dtype.kind == "f" and (flat == np.floor(flat)).all()
    truth = flat.dtype.kind == "b" and "True" not in classes.names
    if whole or truth:
        flat = flat.astype(np.int64)
    distinct, place = np.unique(flat, return_inverse=True)
    if names is None or distinct.dtype.kind not in "iu":
        return [str(name) for name in distinct], place.astype(np.int64)
    least = min(distinct, default=0)
    most = max(distinct, default=0)
    if least < 0 or most >= len(names):
        raise InputError(
            f"{path}: labels go from {least} to {most}, but there are {len(names)}"
            " names"
        )
    return [str(name) for name in names], flat.astype(np.int64)


def list_splits(place: Place, request: Request) -> Listing:
    """The splits of arrays, and the names of their classes."""
    path = place.path
    splits = by_split(path.name, open_inputs(path, streamed=True))
    names = splits.get("", {}).pop("names", None)
    with_roles = {split: roles for split, roles in splits.items() if roles}
    if names is not None:
        return Listing([*with_roles], [str(name) for name in as_array(names)])
    if not any("y" in roles for roles in with_roles.values()):
        return Listing([*with_roles], [])
    trained = {split or "train": roles for split, roles in with_roles.items()}
    return Listing([*with_roles], class_names(path.name, trained))


def holds_features(place: Place) -> bool:
    splits = by_split(place.path.name, open_inputs(place.path, streamed=True))
    return any(len(roles["x"].shape) == 2 for roles in splits.values() if "x" in roles)


def from_arrays(name: str, arrays: Mapping[str, Any]) -> Dataset:
    dense = {
        key: array.toarray() if hasattr(array, "toarray") else array
        for key, array in arrays.items()
    }
    found = by_split(name, {key: as_array(array) for key, array in dense.items()})
    whole = found.pop("", {})
    given_names = whole.pop("names", None)
    mixed = (
        f"{name}: arrays with and without a split are mixed ({listing(arrays)}):"
        f" expected {EXPECTED}"
    )
    expect(not (whole and found), mixed)
    roles = {"train": whole} if whole else found
    names = (
        class_names(name, roles)
        if given_names is None
        else [str(n) for n in given_names.reshape(-1)]
    )
    data = Dataset.of(
        name,
        names,
        {split: _split(f"{name}, {split}", own, names) for split, own in roles.items()},
    )
    inputs = roles["train"]["x"]
    wide = inputs.ndim == 2 and inputs.dtype.itemsize > 4
    lost = (
        [column for column in range(inputs.shape[1]) if blurred(inputs[:, column])]
        if wide
        else []
    )
    if lost:
        first = inputs[:, lost[0]]
        told = (
            f"feature {lost[0]} varies by {first.std():.2g} around {first.mean():.6g}"
        )
        fix = "subtract its mean first, in training and in prediction"
        warnings.warn(
            f"{name}: 32 bits are too few for feature {listing(lost)}: {told}; {fix}",
            stacklevel=2,
        )
    return data


def by_split(name: str, arrays: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{split or "": {role: array}} of arrays whose keys name both."""
    for key in PREDICTED:
        if key in arrays:
            raise InputError(
                f"{name}: holds predictions ({key}), not samples: `rfdlc decide`,"
                f" `evaluate` and `report` read it; samples are {EXPECTED}"
            )
    by_name: dict[str, dict[str, Any]] = {}
    for key, array in arrays.items():
        if key == EMBEDDING:
            continue
        words = words_of(key)
        splits = [split for split in map(split_name, words) if split]
        roles = [ROLES[word] for word in words if word in ROLES]
        one_role = len(roles) == 1 and len(splits) <= 1
        if not one_role or len(words) > 1 + len(splits):
            raise InputError(
                f"{name}: the array {key!r} has a name that is not known here: expected"
                f" {EXPECTED}"
            )
        of_split = by_name.setdefault("".join(splits), {})
        if roles[0] in of_split:
            raise InputError(
                f"{name}: two arrays mean the same, {key!r} is the second"
                f" ({listing(arrays)}): keep one"
            )
        of_split[roles[0]] = array
    return by_name


def words_of(key: str) -> list[str]:
    return [word for word in re.split(r"[_\-. ]+", key.lower()) if word]


def class_names(name: str, roles: Mapping[str, Arrays]) -> list[str]:
    """The names of the classes, from the training labels."""
    train = roles.get("train", {}).get("y", np.empty(0))
    expect(train.size, f"{name}: there are no training labels: expected {EXPECTED}")
    if train.dtype.kind not in "iufb":
        _check_known(name, "label", train)
        return [str(n) for n in np.unique(train.astype(str))]
    largest = [
        float(np.nanmax(own["y"]))
        for own in roles.values()
        if "y" in own and own["y"].size
    ]
    return numbered(max(largest), f"{name}: ", train.size)


def _check_known(where: str, what: str, values: NDArray[Any]) -> None:
    """None and nan would become a class, or a group."""
    absent = [i for i, value in enumerate(values.flat) if is_missing(value)]
    expect(
        not absent,
        f"{where}: {what} {listing(absent, 5)} is missing: expected all; leave out"
        " those samples",
    )


def _split(where: str, own: Arrays, names: Sequence[str]) -> Split:
    complete = "x" in own and "y" in own
    expect(
        complete,
        f"{where}: has {listing(own)} but needs both inputs and labels: expected"
        f" {EXPECTED}",
    )
    ids = (
        None if "ids" not in own else [str(i) for i in column(where, "ids", own["ids"])]
    )
    groups = None if "groups" not in own else column(where, "groups", own["groups"])
    if groups is not None and groups.dtype.kind in "Of":
        _check_known(where, "group", groups)
        groups = groups.astype(str) if groups.dtype.kind == "O" else groups
    labels = Classes(tuple(names)).encode(
        column(where, "labels", own["y"]), f"{where}: label"
    )
    return Split(as_inputs(where, own["x"]), labels, ids, groups)


def column(where: str, what: str, values: NDArray[Any]) -> NDArray[Any]:
    flat = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
    hint = " (for one-hot: argmax)" if what == "labels" else ""
    expect(
        flat.ndim == 1,
        f"{where}: {what} have shape {values.shape}: expected one per sample{hint}",
    )
    return flat


NPZ_FILES = DataReader(
    read,
    suffixes=[NPZ],
    open=open_rows,
    list_splits=list_splits,
    holds_features=holds_features,
)
FOLDER_OF_ARRAYS = replace(NPZ_FILES, suffixes=(), recognises=is_folder)
NPY_FILES = replace(NPZ_FILES, read=read_npy, suffixes=[NPY])
IN_MEMORY = DataReader(from_memory, recognises=lambda source: True)

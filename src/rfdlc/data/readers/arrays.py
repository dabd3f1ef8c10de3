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
from pydantic import PositiveInt

from rfdlc.data.dataset import SPLITS, Dataset, Split, as_images, as_inputs
from rfdlc.data.embedding import Embedding
from rfdlc.data.images import resized
from rfdlc.data.table import blurred
from rfdlc.errors import expect, listing
from rfdlc.formats.arrays import NPZ, array_names, open_arrays, open_npy
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
ORGANS = (
    "bladder,femur-left,femur-right,heart,kidney-left,kidney-right,liver,"
    "lung-left,lung-right,pancreas,spleen"
)
# The files of MedMNIST hold numbers only. These are the names in its own description.
MEDMNIST = {
    "dermamnist": "akiec,bcc,bkl,df,mel,nv,vasc",
    "pathmnist": (
        "adipose,background,debris,lymphocytes,mucus,smooth muscle,normal colon mucosa,"
        "cancer-associated stroma,colorectal adenocarcinoma epithelium"
    ),
    "octmnist": "choroidal neovascularization,diabetic macular edema,drusen,normal",
    "pneumoniamnist": "normal,pneumonia",
    "breastmnist": "malignant,normal or benign",
    "bloodmnist": (
        "basophil,eosinophil,erythroblast,immature"
        " granulocyte,lymphocyte,monocyte,neutrophil,platelet"
    ),
    "retinamnist": "0,1,2,3,4",
    "tissuemnist": "0,1,2,3,4,5,6,7",
    **dict.fromkeys(("organamnist", "organcmnist", "organsmnist"), ORGANS),
}
PREDICTED = (
    "logits",
    "probabilities",
)  # arrays of the files that `predict` and runs write
EMBEDDING = "embedding"  # the array with the text that says how features were made
EXPECTED = (
    "x and y, or train_x, train_y, test_x, test_y (and val_x, val_y, groups, ids,"
    " names)"
)


def read(path: Path) -> Dataset:
    """An `.npz`, or a folder of `.npy` files, with `x` and `y`, or with `train_x`,
    `train_y`, `test_x`, ...
    """
    arrays = open_inputs(path)
    made, data = (
        arrays.get(EMBEDDING),
        from_arrays(path.name if path.is_dir() else path.stem, arrays),
    )
    return (
        data
        if made is None
        else replace(data, embedding=Embedding.read(str(made), path).beside(path))
    )


def read_npy(path: Path, *, labels: str | Path | None = None) -> Dataset:
    """A pair of files: the features at `path`, the labels at `labels` (`y.npy` beside
    it if not given).
    """
    beside = Path(labels) if labels is not None else path.with_name("y.npy")
    fix = "name them with labels (--labels; to rfdlc train data.labels=FILE)"
    expect(
        beside.is_file() and beside != path,
        f"{path}: there are no labels for it at {beside}; {fix}",
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


def is_medmnist(path: Path) -> bool:
    """Whether an `.npz` has MedMNIST's keys: images and labels of each split, and
    nothing else, such as names.
    """
    keys = set(array_names(path))
    known = {f"{split}_{role}" for split in SPLITS for role in ("images", "labels")}
    return {"train_images", "train_labels"} <= keys <= known


def find_medmnist(root: Path, name: str) -> Path:
    """The file of a named MedMNIST in a folder: `dermamnist.npz`, or the one larger
    version there is.
    """
    plain = root / f"{name}.npz"
    found = [plain] if plain.is_file() else sorted(root.glob(f"{name}_*.npz"))
    fix = (
        f"there are several, name one by its path: {listing(found)}"
        if found
        else "download it from medmnist.com"
    )
    expect(
        len(found) == 1,
        f"{name} was not found as {plain}: {fix}, or give its folder with root"
        " (--root)",
    )
    return found[0]


def read_medmnist(path: Path, *, image_size: PositiveInt | None = None) -> Dataset:
    """The file's own splits and natural tail, classes in the file's order; resized on
    request.
    """
    arrays, ids = open_inputs(path), {}
    labels = {key: values for key, values in arrays.items() if key.endswith("_labels")}
    integers = all(values.dtype.kind in "iu" for values in labels.values())
    expect(
        integers,
        f"{path}: has labels that are not integers: expected one class number per"
        " image",
    )
    largest = max(int(values.max(initial=0)) for values in labels.values())
    known = MEDMNIST.get(_words(path.stem)[0], "").split(",")
    names = known if len(known) > largest else numbered(largest, f"{path}: ")
    for key, values in arrays.items():
        split, _, role = key.partition("_")
        ids[f"{split}_ids"] = [f"{split}/{i}" for i in range(len(values))]
        if image_size is not None and role == "images":
            arrays[key] = resized(as_images(f"{path}, {key}", values), image_size)
    return from_arrays(path.stem, {**arrays, **ids, "names": names})


def open_inputs(path: Path, *, streamed: bool = False) -> dict[str, Any]:
    """Arrays of an `.npz`, an `.npy` (and the `y.npy` beside it) or a folder, by name;
    `streamed` inputs on demand.
    """
    if path.is_dir() or path.suffix.lower() == NPZ:
        return open_arrays(path, streamed=is_inputs if streamed else None)
    found = {"x": open_npy(path, mapped=streamed)}
    labels = path.with_name("y.npy")  # goes with X.npy, not with X_test.npy
    of_a_split = any(map(split_name, _words(path.stem)))
    if labels.is_file() and labels != path and not of_a_split:
        found["y"] = open_npy(labels)
    return found


def is_inputs(key: str) -> bool:
    return "x" in map(ROLES.get, _words(key))


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
    found: dict[str, dict[str, Any]] = {}
    for key, array in arrays.items():
        if key == EMBEDDING:
            continue
        instead = "`rfdlc decide`, `evaluate` and `report` read it; samples are"
        expect(
            key not in PREDICTED,
            f"{name}: holds predictions ({key}), not samples: {instead} {EXPECTED}",
        )
        words = _words(key)
        splits = [split for split in map(split_name, words) if split]
        roles = [ROLES[word] for word in words if word in ROLES]
        known = len(roles) == 1 and len(splits) <= 1 and len(words) == 1 + len(splits)
        expect(
            known,
            f"{name}: the array {key!r} has a name that is not known here: expected"
            f" {EXPECTED}",
        )
        own = found.setdefault("".join(splits), {})
        twice = (
            f"{name}: two arrays mean the same, {key!r} is the second"
            f" ({listing(arrays)}): keep one"
        )
        expect(roles[0] not in own, twice)
        own[roles[0]] = array
    return found


def _words(key: str) -> list[str]:
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

"""Datasets of other libraries: Hugging Face `datasets`, and objects whose items are
(image or features, label).
"""

from collections.abc import Mapping
from functools import wraps
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from rfdlc.data.dataset import Dataset
from rfdlc.data.images import Resizing, fitted, picture, planes, unusable
from rfdlc.data.reader import DataReader
from rfdlc.data.readers import arrays, table
from rfdlc.data.readers.image_files import Interpolation
from rfdlc.data.rows import TARGETS
from rfdlc.errors import expect, listing
from rfdlc.formats.tables import split_name
from rfdlc.progress import track

LARGEST_SMALL, USUAL_SIDE = (
    64,
    224,
)  # squares up to the first keep their size; others become the second
TRANSFORMED = (
    "leave out transforms such as ToTensor and Normalize, since images are normalised"
    " here"
)


def holds_items(source: Any) -> bool:
    """Whether a source is such an object, or a dict of them by split."""
    if isinstance(source, Mapping):
        return bool(source) and all(holds_items(value) for value in source.values())
    sequence = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    array = hasattr(source, "shape") and not hasattr(source, "column_names")
    return sequence and not array and not isinstance(source, str | bytes | tuple | list)


def is_table(source: Any) -> bool:
    """Whether a source is one of Hugging Face that has no column of images."""
    one = next(iter(source.values())) if isinstance(source, Mapping) else source
    return hasattr(one, "column_names") and not _of_kind(one, "Image")


@wraps(table.read)
def read_rows(source: Any, **options: Any) -> Dataset:
    """Rows of Hugging Face's `datasets`, as those of a data frame."""
    import pandas as pd

    frames = []
    for split, one in _splits(source).items():
        frame = one.to_pandas()
        for name in _of_kind(one, "ClassLabel"):
            known = np.array(
                [*one.features[name].names, None], dtype=object
            )  # the last for -1: not known
            frame[name] = known[frame[name].fillna(-1).to_numpy(np.int64)]
        frames.append(
            frame.assign(split=split) if isinstance(source, Mapping) else frame
        )
        target = options.get("target") or next(iter(_of_kind(one, "ClassLabel")), None)
        options |= {"target": target} if target else {}
    return table.read(pd.concat(frames, ignore_index=True), **options)


def read(
    source: Any,
    *,
    target: str | None = None,
    image_size: PositiveInt | None = None,
    interpolation: Interpolation = "bilinear",
) -> Dataset:
    """Items in memory: images become squares of `image_size`; features and small
    squares stay as they are.
    """
    found: dict[str, Any] = {}
    for split, one in _splits(source).items():
        keys = _columns(one, target)
        names = (
            one.features[keys[1]].names
            if keys and keys[1] in _of_kind(one, "ClassLabel")
            else _names(one)
        )
        inputs, labels, image_size = _gather(
            one, keys, image_size, interpolation, split
        )
        if names and names != found.setdefault(
            "names", names
        ):  # another split numbers its classes differently
            labels = _named(f"{type(one).__name__}, {split}", names, labels)
        found |= {f"{split}_x": inputs, f"{split}_y": labels}
    data = [key for key in found if key.endswith("_x")]
    grey = all(
        found[key].ndim == 4 and (found[key] == found[key][:, :1]).all() for key in data
    )
    found |= {key: found[key][:, :1] for key in data} if grey else {}
    return arrays.from_arrays(type(source).__name__, found)


def _splits(source: Any) -> dict[str, Any]:
    if not isinstance(source, Mapping):
        return {"train": source}
    found = {split_name(str(name)): one for name, one in source.items()}
    clear = None not in found and len(found) == len(source)
    expect(
        clear,
        f"splits are called {listing(map(str, source))}: expected train and, if there"
        " are, val and test",
    )
    return {str(name): one for name, one in found.items()}


def _of_kind(one: Any, kind: str) -> list[str]:
    """The columns whose feature is of a class of `datasets`: Image, ClassLabel."""
    return [
        name
        for name, each in (getattr(one, "features", None) or {}).items()
        if type(each).__name__ == kind
    ]


def _columns(one: Any, target: str | None) -> tuple[str, str] | None:
    """The columns of images and labels; None where items are pairs."""
    if not hasattr(one, "column_names"):
        expect(
            target is None,
            f"target {target!r} names a column, but a {type(one).__name__} has none:"
            " leave it out",
        )
        return None
    usual = [name for name in one.column_names if name.lower() in TARGETS]
    wanted = [target] if target else _of_kind(one, "ClassLabel") or usual
    known = len(wanted) == 1 and wanted[0] in one.column_names
    expect(
        known,
        f"which column holds the labels? There are {listing(one.column_names)}: name"
        " one with target",
    )
    return _of_kind(one, "Image")[0], str(wanted[0])


def _names(one: Any) -> list[str] | None:
    """`classes`, as torchvision has them, also of the data set behind a subset."""
    while one is not None:
        if isinstance(names := getattr(one, "classes", None), list | tuple):
            return [
                " or ".join(name) if isinstance(name, tuple) else str(name)
                for name in names
            ]
        one = getattr(one, "dataset", None)
    return None


def _named(where: str, names: list[str], labels: NDArray[Any]) -> NDArray[Any]:
    """The names of classes whose numbers are given; text stays as it is."""
    if labels.dtype.kind not in "iu":
        return labels
    inside = bool(((labels >= 0) & (labels < len(names))).all())
    expect(
        inside,
        f"{where}: a label is out of range: expected numbers from 0 to"
        f" {len(names) - 1}",
    )
    return np.array(names)[labels]


def _gather(
    one: Any,
    keys: tuple[str, str] | None,
    side: int | None,
    interpolation: str,
    split: str,
) -> tuple[NDArray[Any], NDArray[Any], int | None]:
    """All inputs and labels, and the side of the images if that is what they are."""
    inputs, labels = list[NDArray[Any]](), list[Any]()
    for i in track(range(len(one)), f"Reading {split}", total=len(one)):
        where = f"{type(one).__name__}, {split} sample {i}"
        item = one[i]
        pair = keys is not None or (isinstance(item, tuple | list) and len(item) == 2)
        expect(
            pair,
            f"{where}: is a {type(item).__name__}: expected a pair (image or features,"
            " label)",
        )
        given, label = item if keys is None else (item[key] for key in keys)
        one_class = label is not None and np.asarray(label).size == 1
        expect(
            one_class,
            f"{where}: its label is {label}: expected one class, as a number or a name",
        )
        labels.append(label.item() if hasattr(label, "item") else label)
        values = given if hasattr(given, "getpixel") else np.asarray(given)
        if isinstance(values, np.ndarray) and values.ndim < 2:
            inputs.append(values)
            continue
        image = _checked(where, values)
        small = image.size[0] == image.size[1] <= LARGEST_SMALL
        side = side or (image.size[0] if small else USUAL_SIDE)
        inputs.append(planes(fitted(image, side, 3, Resizing("crop", interpolation))))
    expect(inputs, f"{type(one).__name__}, {split}: has no samples")
    alike = len({each.shape for each in inputs}) == 1
    expect(
        alike,
        f"{type(one).__name__}, {split}: samples differ in shape: expected images, or"
        " equally many numbers",
    )
    return np.stack(inputs), np.array(labels), side


def _checked(where: str, given: Any) -> Any:
    """Pillow's image of what an item holds."""
    if isinstance(given, np.ndarray):
        kind = f"{where}: is an array of {given.dtype} of shape {given.shape}"
        expect(
            given.dtype == np.uint8 and given.ndim in (2, 3),
            f"{kind}: expected uint8 pixels; {TRANSFORMED}",
        )
        channels = (
            given[None]
            if given.ndim == 2
            else given
            if given.shape[0] in (1, 3)
            else given.transpose(2, 0, 1)
        )
        expect(len(channels) in (1, 3), f"{kind}: expected 1 or 3 channels")
        return picture(np.ascontiguousarray(channels))
    trouble = unusable(given)
    expect(not trouble, f"{where}: {trouble}")
    return given


ROWS = DataReader(
    read_rows,
    recognises=lambda source: holds_items(source) and is_table(source),
    holds_out=True,
)
ITEMS = DataReader(read, recognises=holds_items)

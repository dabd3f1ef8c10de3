"""Samples to predict, however many: in a fixed order, read piece by piece, so that memory does not grow with them."""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.dataset import SKIPPING, Dataset, Split, choose_part
from rfdlc.data.images import SUFFIXES as IMAGE_SUFFIXES
from rfdlc.data.images import BrokenImage, ImageFiles, fitted, open_image, planes
from rfdlc.data.load import NAMES, find_reader, load, options_of
from rfdlc.data.packed import PackedText
from rfdlc.data.sources import arrays, folder, listing
from rfdlc.data.sources.arrays import as_inputs, as_texts
from rfdlc.data.sources.rows import open_arrays
from rfdlc.data.sources.table import TableRows, names_rows
from rfdlc.data.table import TableEncoder
from rfdlc.decide.classes import Classes
from rfdlc.errors import InputError
from rfdlc.tables import is_table, parquet_files

UNKNOWN = -1  # the label of a sample whose class is not known


@dataclass(frozen=True)
class Taken:
    """What a model takes: its classes, the shape of a sample, and how rows and images become one."""

    classes: Classes
    input_shape: tuple[int, ...]
    encoder: TableEncoder | None = None
    centre: float = 1.0  # the part of an image's shorter side that it looks at


@dataclass(frozen=True)
class Piece:
    """Some samples, without those that are broken, and what is wrong with each of these."""

    split: Split
    broken: tuple[str, ...] = ()


@dataclass(frozen=True)
class Samples:
    """`read(rows)` gives a piece; rows are asked for in ascending order. Broken ones are left out or raise an error.

    `fingerprint` changes where the samples do: names of image files, size and time of other files.
    """

    count: int
    labelled: bool  # whether all labels are known
    named: bool  # whether samples have ids
    fingerprint: str
    read: Callable[[range], Piece]

    def __len__(self) -> int:
        return self.count


def open_samples(
    source: str | Path,
    taken: Taken,
    *,
    root: str | Path | None = None,
    split: str | None = None,
    skip_broken: bool = False,
) -> Samples:
    """Of a folder or a list of images, one image, a table, arrays, or a named data set, labelled or not.

    Of what has parts, `split` names one, by default the last there is. With `skip_broken`, images that cannot be read
    are left out instead of stopping.
    """
    place = (Path() if root is None else Path(root).expanduser()) / Path(source).expanduser()
    rows = is_table(place)
    if rows and taken.encoder is not None:
        return _table(place, taken.encoder, split)
    if rows:
        images = len(taken.input_shape) == 3
        raise InputError(
            f"{place} is a table, but this model was trained on {'images' if images else 'arrays'} of shape "
            f"{taken.input_shape}: expected {'a folder, a list or an array of images' if images else '.npy or .npz'}"
        )
    if place.is_file() and place.suffix.lower() in IMAGE_SUFFIXES:
        return _folder(place, taken, split, skip_broken)
    reader, found = find_reader(source, root)
    if reader is folder.read:
        return _folder(found, taken, split, skip_broken)
    if reader in (listing.read, listing.read_folder):
        whole = str(source).lower() in NAMES  # found by its training list, which stands for all of them
        return _list(listing.list_file(found, split, whole=whole), taken, skip_broken)
    if reader in (arrays.read_npz, arrays.read_npy, arrays.read_folder):
        return _arrays(found, taken, split)
    sized: dict[str, Any] = {"image_size": taken.input_shape[-1]} if "image_size" in options_of(reader) else {}
    data = load(source, root=root, test_fraction=0, **sized)
    return resident(part_of(data, split, taken.classes))


def part_of(data: Dataset, split: str | None, classes: Classes) -> Split:
    """A part of a data set, labels as `classes` count them: unknown where the data set has others."""
    found = data.splits[choose_part(data.name, data.splits, split)]
    labels = _matched(found.labels, data.classes.names, classes)
    return Split(found.inputs, labels, found.ids)


def resident(split: Split) -> Samples:
    """Samples that are in memory."""

    def read(rows: range) -> Piece:
        return Piece(split.take(np.arange(rows.start, rows.stop)))

    mark = _digest([np.ascontiguousarray(split.array), split.labels])
    return Samples(len(split), _known(split.labels), split.ids is not None, mark, read)


# -- images ------------------------------------------------------------------------------------------------------------


def _folder(path: Path, taken: Taken, split: str | None, skip_broken: bool) -> Samples:
    """A folder named after a class labels what is in it."""
    root, below, names = folder.find_images(path, split)
    place = {name: i for i, name in enumerate(taken.classes.names)}
    inside = (name.removeprefix(below).split("/") for name in names)
    labels = np.fromiter((place.get(steps[0], UNKNOWN) if len(steps) > 1 else UNKNOWN for steps in inside), np.int64)
    return of_files(root, names, labels, taken, skip_broken)


def _list(path: Path, taken: Taken, skip_broken: bool) -> Samples:
    root, names, labels = listing.find_images(path, taken.classes.names)
    return of_files(root, names, labels, taken, skip_broken)


def of_files(
    root: Path, names: PackedText, labels: NDArray[np.int64], taken: Taken, skip_broken: bool = False
) -> Samples:
    """Image files, seen as the model sees them, whatever their size."""
    if len(taken.input_shape) != 3:
        raise InputError(f"{root} holds images, but this model was trained on samples of shape {taken.input_shape}")
    channels, size, width = taken.input_shape
    if size != width:
        raise InputError(
            f"{root} holds image files, which become squares, but this model was trained on arrays of {size}x{width} "
            "pixels: give it an array of such images (.npy, .npz)"
        )
    files = ImageFiles(root, names, size, channels)
    pool = ThreadPoolExecutor(os.cpu_count(), "decode")  # threads do: pillow decodes without the interpreter's lock

    def read(rows: range) -> Piece:
        images = np.empty((len(rows), channels, size, size), dtype=np.uint8)

        def fill(row: int) -> str:
            try:
                with open_image(files.path(row)) as image:
                    images[row - rows.start] = planes(fitted(image, size, channels, taken.centre))
            except BrokenImage as error:
                return str(error)
            return ""

        troubles = list(pool.map(fill, rows))
        broken = tuple(filter(None, troubles))
        if broken and not skip_broken:
            raise BrokenImage(f"{broken[0]}. Mend or remove it, or leave out what is broken with {SKIPPING}")
        kept = np.array([not trouble for trouble in troubles])
        split = Split(images, labels[rows.start : rows.stop], names.take(rows))
        return Piece(split.take(np.flatnonzero(kept)) if broken else split, broken)

    mark = _digest([*names.packed, labels])
    return Samples(len(names), _known(labels), True, mark, read)


# -- files of rows -----------------------------------------------------------------------------------------------------


def _table(path: Path, encoder: TableEncoder, split: str | None) -> Samples:
    """Rows encoded as the training rows were. A column that only names rows gives the ids; labels are not read."""
    rows = TableRows(path, split)
    features = {column.name for column in encoder.columns}
    identity = next((name for name in rows.names if name not in features and names_rows(name)), None)

    def read(wanted: range) -> Piece:
        cells = rows[wanted]
        ids = None if identity is None else [str(cell) for cell in cells[identity].to_pylist()]
        return Piece(Split(encoder.transform(cells), np.full(len(wanted), UNKNOWN), ids))

    return Samples(len(rows), False, identity is not None, _state(path), read)


def _arrays(path: Path, taken: Taken, split: str | None) -> Samples:
    """`x`, and `y`, `ids` and `names` where they are there; inputs are read row by row, labels at once."""
    parts = open_arrays(path)
    names = parts.get(None, {}).pop("names", None)
    given = {part or "train": roles for part, roles in parts.items() if roles}
    found = given[choose_part(str(path), given, split)]
    if "x" not in found:
        raise InputError(f"{path}: holds no inputs: expected an array x (or test_x, X_test, features, images, ...)")
    inputs, ids = found["x"], found.get("ids")
    lengths = {role: len(array) for role, array in found.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{count} of {role}" for role, count in lengths.items())
        raise InputError(f"{path}: has {told}: expected one of each a sample")
    everything = range(len(inputs))
    named = None if names is None else [str(name) for name in as_texts(names[range(len(names))])]
    labels = _labels(path, found["y"][everything], named, taken.classes) if "y" in found else _none(len(inputs))

    def read(rows: range) -> Piece:
        texts = None if ids is None else [str(text) for text in as_texts(ids[rows])]
        values = as_inputs(f"{path}, from row {rows.start} on", inputs[rows])
        return Piece(Split(values, labels[rows.start : rows.stop], texts))

    return Samples(len(inputs), _known(labels), ids is not None, _state(path), read)


def _labels(path: Path, given: NDArray[Any], names: Sequence[str] | None, classes: Classes) -> NDArray[np.int64]:
    """Numbers count the file's names, or are names themselves; all are unknown where the model has other classes."""
    flat = as_texts(given[:, 0] if given.ndim == 2 and given.shape[1] == 1 else given)
    if flat.ndim != 1 or not len(flat):
        raise InputError(f"{path}: labels have shape {given.shape}: expected one class a sample (for one-hot: argmax)")
    if flat.dtype.kind == "f" and (flat == np.floor(flat)).all():
        flat = flat.astype(np.int64)
    if flat.dtype.kind == "b" and "True" not in classes.names:  # as they are read for training
        flat = flat.astype(np.int64)
    distinct, place = np.unique(flat, return_inverse=True)
    if names is not None and distinct.dtype.kind in "iu":
        least, most = distinct[0], distinct[-1]
        if least < 0 or most >= len(names):
            raise InputError(f"{path}: labels go from {least} to {most}, but there are {len(names)} names")
        return _matched(flat.astype(np.int64), names, classes)
    return _matched(place.astype(np.int64), [str(name) for name in distinct], classes)


def _matched(labels: NDArray[np.int64], theirs: Sequence[str], ours: Classes) -> NDArray[np.int64]:
    """Labels of a data set in the class order of the model; unknown where the data set's classes are others."""
    if tuple(theirs) == ours.names:
        return labels
    if not set(theirs) <= set(ours.names):
        return _none(len(labels))
    return ours.encode(list(theirs))[labels]


def _none(count: int) -> NDArray[np.int64]:
    return np.full(count, UNKNOWN)


def _known(labels: NDArray[np.int64]) -> bool:
    return bool(len(labels)) and int(labels.min()) >= 0


def _digest(parts: Iterable[NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.data if part.size else b"")
    return digest.hexdigest()[:32]


def _state(path: Path) -> str:
    """Size and time of a file, or of those in a folder."""
    files = (parquet_files(path) or sorted(path.glob("*.npy"))) if path.is_dir() else [path]
    told = [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:32]

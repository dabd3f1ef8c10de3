"""CIFAR-10 and CIFAR-100 in their original pickle files, made long-tailed; nothing in the files is ever run."""

import pickle
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.dataset import Dataset, Normalisation, Split
from rfdlc.data.longtail import profile_counts, subset
from rfdlc.errors import InputError, listing

# The values that every published CIFAR-LT result was normalised with.
NORMALISATION = Normalisation((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


class Layout(NamedTuple):
    """Where a CIFAR keeps what."""

    name: str
    folder: str
    train: tuple[str, ...]
    test: str
    meta: str
    labels: str
    names: str
    classes: int


CIFAR10 = Layout(
    "cifar10-lt",
    "cifar-10-batches-py",
    tuple(f"data_batch_{k}" for k in range(1, 6)),
    "test_batch",
    "batches.meta",
    "labels",
    "label_names",
    10,
)
CIFAR100 = Layout("cifar100-lt", "cifar-100-python", ("train",), "test", "meta", "fine_labels", "fine_label_names", 100)


def read_cifar10(root: Path, *, factor: float = 100, profile: str = "exponential", seed: int = 0) -> Dataset:
    """CIFAR10-LT from `root/cifar-10-batches-py`."""
    return _read(_folder(root, CIFAR10), CIFAR10, factor, profile, seed)


def read_cifar100(root: Path, *, factor: float = 100, profile: str = "exponential", seed: int = 0) -> Dataset:
    """CIFAR100-LT from `root/cifar-100-python`."""
    return _read(_folder(root, CIFAR100), CIFAR100, factor, profile, seed)


def read_folder(path: Path, *, factor: float | None = None, profile: str = "exponential", seed: int = 0) -> Dataset:
    """A CIFAR folder by its path: all that is in it, or thinned out where a factor is asked for."""
    layout = next(layout for layout in (CIFAR10, CIFAR100) if _complete(path, layout))
    return _read(path, layout, factor, profile, seed)


def recognises(path: Path) -> bool:
    """Whether this folder is one of the two."""
    return _complete(path, CIFAR10) or _complete(path, CIFAR100)


def _complete(path: Path, layout: Layout) -> bool:
    return all((path / name).is_file() for name in (*layout.train, layout.test, layout.meta))


def _folder(root: Path, layout: Layout) -> Path:
    for folder in (root / layout.folder, root):
        if _complete(folder, layout):
            return folder
    wanted = listing((*layout.train, layout.test, layout.meta))
    raise InputError(
        f"{layout.name} was not found: expected the files {wanted} in {root / layout.folder}; "
        "unpack the Python version of the data set there, or give its folder with root (--root)"
    )


def _read(folder: Path, layout: Layout, factor: float | None, profile: str, seed: int) -> Dataset:
    names = _class_names(folder / layout.meta, layout)
    train = _joined([_batch(folder / name, layout) for name in layout.train])
    notes: list[str] = []
    if factor is not None:
        present = np.bincount(train.labels, minlength=layout.classes)
        wanted = profile_counts(int(present.max()), layout.classes, factor, profile)
        notes += _shortage(names, present, wanted, factor)
        train = train.take(subset(train.labels, wanted, seed))
    splits = {"train": train, "test": _batch(folder / layout.test, layout)}
    return Dataset.of(layout.name, names, splits, notes, NORMALISATION)


def _shortage(names: list[str], present: NDArray[Any], wanted: NDArray[Any], factor: float) -> list[str]:
    short = np.flatnonzero(present < wanted)
    if not len(short):
        return []
    told = listing((f"{names[c]} {present[c]} of {wanted[c]}" for c in short), 5)
    note = (
        f"the files hold fewer images than factor {factor:g} asks for in {len(short)} classes, all were taken: {told}"
    )
    warnings.warn(note, stacklevel=4)
    return [note]


def _joined(parts: list[Split]) -> Split:
    ids = [name for part in parts for name in part.ids or ()]
    return Split(np.concatenate([p.array for p in parts]), np.concatenate([p.labels for p in parts]), ids)


def _class_names(path: Path, layout: Layout) -> list[str]:
    names = _table(path).get(layout.names)
    if not isinstance(names, list) or len(names) != layout.classes:
        raise InputError(f"{path}: expected {layout.classes} class names under {layout.names!r}")
    return [_text(name) for name in names]


def _batch(path: Path, layout: Layout) -> Split:
    table = _table(path)
    data, labels = table.get("data"), table.get(layout.labels)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape[1:] != (3072,):
        raise InputError(f"{path}: expected 'data' as uint8 of shape (images, 3072), got {_described(data)}")
    targets = np.array(labels if isinstance(labels, list) else [])
    if targets.shape != (len(data),) or targets.dtype.kind not in "iu":
        raise InputError(f"{path}: expected {len(data)} whole numbers, one an image, under {layout.labels!r}")
    wrong = np.flatnonzero((targets < 0) | (targets >= layout.classes))
    if len(wrong):
        told = f"label {targets[wrong[0]]} of image {wrong[0]}"
        raise InputError(f"{path}: {told} is out of range: expected 0 to {layout.classes - 1}")
    ids = [f"{path.name}/{i}" for i in range(len(data))]
    return Split(np.ascontiguousarray(data.reshape(-1, 3, 32, 32)), targets.astype(np.int64), ids)


def _described(value: Any) -> str:
    return f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__


# -- pickles without their power ---------------------------------------------------------------------------------------

# All that a pickled numpy array of numbers names, and what stands for it; everything else in a pickle needs no name.
_RECONSTRUCT = np.empty(0).__reduce__()[0]
_ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): str.encode,  # how Python 3 writes bytes for Python 2
}


class _Refused(Exception):
    pass


class _ArrayUnpickler(pickle.Unpickler):
    """Builds arrays, lists, dicts, text and numbers. Any other name in the file is refused, and never looked up."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise _Refused(f"{module}.{name}")
        return _ADMITTED[module, name]


def _table(path: Path) -> dict[str, Any]:
    """The dict in a pickle file, its keys as text (Python 2 wrote them as bytes)."""
    try:
        with path.open("rb") as file:
            table = _ArrayUnpickler(file, encoding="bytes").load()
    except _Refused as error:
        raise InputError(
            f"{path}: refused, the pickle asks for {error}, which has no place in a CIFAR file; nothing in it was run. "
            "Get the file again from a source that you trust"
        ) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except Exception as error:  # a damaged pickle can fail in any way
        raise InputError(f"{path}: the pickle is truncated or damaged ({type(error).__name__}: {error})") from None
    if not isinstance(table, dict):
        raise InputError(f"{path}: expected a dict in the pickle, got {type(table).__name__}")
    return {_text(key): value for key, value in table.items()}


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)

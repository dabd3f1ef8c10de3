"""CIFAR-10 and CIFAR-100 in their original pickle files, made long-tailed. The files are parsed, never unpickled."""

import pickletools
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.dataset import Dataset, Normalisation, Split
from rfdlc.data.longtail import Profile, profile_counts, subset
from rfdlc.errors import InputError, expect, listing

# The values that every published CIFAR-LT result was normalised with.
NORMALISATION = Normalisation((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


class _Files(NamedTuple):
    """The files and keys of one of the two data sets."""

    name: str
    folder: str
    train: tuple[str, ...]
    test: str
    meta: str
    labels: str
    names: str
    classes: int


FIVE = tuple(f"data_batch_{k}" for k in range(1, 6))
CIFAR10 = _Files("cifar10-lt", "cifar-10-batches-py", FIVE, "test_batch", "batches.meta", "labels", "label_names", 10)
CIFAR100 = _Files("cifar100-lt", "cifar-100-python", ("train",), "test", "meta", "fine_labels", "fine_label_names", 100)


def read_cifar10(root: Path, *, factor: float = 100, profile: Profile = "exponential", seed: int = 0) -> Dataset:
    """CIFAR10-LT from `root/cifar-10-batches-py`."""
    return _read(_folder(root, CIFAR10), CIFAR10, factor, profile, seed)


def read_cifar100(root: Path, *, factor: float = 100, profile: Profile = "exponential", seed: int = 0) -> Dataset:
    """CIFAR100-LT from `root/cifar-100-python`."""
    return _read(_folder(root, CIFAR100), CIFAR100, factor, profile, seed)


def read_folder(path: Path, *, factor: float | None = None, profile: Profile = "exponential", seed: int = 0) -> Dataset:
    """A CIFAR folder by its path: all images, or a long-tailed subset where a factor is given."""
    layout = next(layout for layout in (CIFAR10, CIFAR100) if _complete(path, layout))
    return _read(path, layout, factor, profile, seed)


def recognises(path: Path) -> bool:
    """Whether this folder is one of the two."""
    return _complete(path, CIFAR10) or _complete(path, CIFAR100)


def _complete(path: Path, layout: _Files) -> bool:
    return all((path / name).is_file() for name in (*layout.train, layout.test, layout.meta))


def _folder(root: Path, layout: _Files) -> Path:
    found = [folder for folder in (root / layout.folder, root) if _complete(folder, layout)]
    wanted = f"the files {listing((*layout.train, layout.test, layout.meta))} in {root / layout.folder}"
    fix = "unpack the Python version of the data set there, or give its folder with root (--root)"
    expect(found, f"{layout.name} was not found: expected {wanted}; {fix}")
    return found[0]


def _read(folder: Path, layout: _Files, factor: float | None, profile: Profile, seed: int) -> Dataset:
    names = _class_names(folder / layout.meta, layout)
    train = _joined([_batch(folder / name, layout) for name in layout.train])
    notes: list[str] = []
    if factor is not None:
        present = np.bincount(train.labels, minlength=layout.classes)
        wanted = profile_counts(int(present.max()), layout.classes, factor, profile)
        short = [f"{names[c]} {present[c]} of {wanted[c]}" for c in np.flatnonzero(present < wanted)]
        if short:
            notes = [f"the files hold too few images for factor {factor:g}, all were used: {listing(short, 5)}"]
            warnings.warn(notes[0], stacklevel=3)
        train = train.take(subset(train.labels, wanted, seed))
    splits = {"train": train, "test": _batch(folder / layout.test, layout)}
    return Dataset.of(layout.name, names, splits, notes, NORMALISATION)


def _joined(batches: list[Split]) -> Split:
    ids = [name for batch in batches for name in batch.ids or ()]
    return Split(np.concatenate([b.array for b in batches]), np.concatenate([b.labels for b in batches]), ids)


def _class_names(path: Path, layout: _Files) -> list[str]:
    names = _table(path).get(layout.names)
    texts = [_text(name) for name in names] if isinstance(names, list) and len(names) == layout.classes else [None]
    if None in texts:
        raise InputError(f"{path}: expected {layout.classes} class names under {layout.names!r}")
    return [str(text) for text in texts]


def _batch(path: Path, layout: _Files) -> Split:
    table = _table(path)
    data, labels = _matrix(table.get("data")), table.get(layout.labels)
    if data is None or data.shape[1] != 3072:
        found = "something else" if data is None else f"shape {data.shape}"
        raise InputError(f"{path}: expected 'data' as uint8 of shape (images, 3072), got {found}")
    valid = isinstance(labels, list) and len(labels) == len(data) and all(type(label) is int for label in labels)
    expect(valid, f"{path}: expected {len(data)} integers, one per image, under {layout.labels!r}")
    wrong = [i for i, label in enumerate(labels or ()) if not 0 <= label < layout.classes]
    outside = f"{path}: the label of image {listing(wrong, 3)} is out of range"
    expect(not wrong, f"{outside}: expected 0 to {layout.classes - 1}")
    ids = [f"{path.name}/{i}" for i in range(len(data))]
    return Split(np.ascontiguousarray(data.reshape(-1, 3, 32, 32)), np.array(labels, dtype=np.int64), ids)


# -- pickle files as data ----------------------------------------------------------------------------------------------
#
# A pickle is a program for a stack machine. These files need few of its instructions, and here all of them only build
# lists, texts and numbers. A call stays a record of its name and arguments: nothing is looked up, imported, called or
# built, and `_matrix` makes the array from its bytes. Values are converted only where they are used, so that a small
# file cannot ask for much memory.

# All names in a pickled numpy array; the last is how Python 3 writes bytes for Python 2.
_RECONSTRUCT = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
_NAMES = {*_RECONSTRUCT, "numpy ndarray", "numpy dtype", "_codecs encode"}
_VALUES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
}
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
LONGEST_TEXT = 1000  # of a key or a class name
_SIZES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "SETITEM": 2}


class _Refused(Exception):
    pass


@dataclass(eq=False)
class _Call:
    """A call that was not made: the name of its function, its arguments, and the state for its result."""

    name: str
    arguments: Any = None
    state: Any = None


class _Pairs(list[Any]):
    """A dict as its keys and values in turn: keys may be calls."""


def _table(path: Path) -> dict[str, Any]:
    """The dict in a pickle file, its keys as text."""
    try:
        found = _parsed(path.read_bytes())
        if isinstance(found, _Pairs):
            return {str(_text(key)): value for key, value in zip(found[::2], found[1::2], strict=True)}
    except _Refused as error:
        unsafe = f"refused, the pickle asks for {error}, which does not belong in a CIFAR file; nothing in it was run"
        raise InputError(f"{path}: {unsafe}. Get the file again from a source that you trust") from None
    except Exception as error:  # it can be damaged in any way
        raise InputError(f"{path}: the pickle is truncated or damaged ({type(error).__name__}: {error})") from None
    raise InputError(f"{path}: expected a dict in the pickle, got {type(found).__name__}")


def _parsed(content: bytes) -> Any:
    """The value that a pickle describes, with calls as records."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}
    argument: Any

    def popped(start: int) -> list[Any]:
        items = stack[start:]
        del stack[start:]
        return items

    for opcode, argument, _ in pickletools.genops(content):
        match opcode.name:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case name if name in _VALUES:
                stack.append(argument)
            case name if name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            case "STRING" | "BINSTRING" | "SHORT_BINSTRING":  # bytes of Python 2
                stack.append(argument.encode("latin-1"))
            case "MARK":
                marks.append(len(stack))
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "EMPTY_LIST" | "LIST" as name:
                stack.append(popped(marks.pop()) if name == "LIST" else [])
            case "EMPTY_DICT" | "DICT" as name:
                stack.append(_Pairs(popped(marks.pop()) if name == "DICT" else []))
            case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                stack.append(tuple(popped(marks.pop() if name == "TUPLE" else -_SIZES[name])))
            case "APPENDS" | "SETITEMS" | "APPEND" | "SETITEM" as name:
                items = popped(marks.pop() if name.endswith("S") else -_SIZES[name])
                if isinstance(stack[-1], _Pairs) != name.startswith("SET"):
                    raise ValueError(f"{name} does not fit the value on the stack")
                stack[-1].extend(items)
            case "GLOBAL" | "STACK_GLOBAL" as name:
                wanted = argument if name == "GLOBAL" else " ".join(str(_text(word)) for word in popped(-2))
                if wanted not in _NAMES:
                    raise _Refused(wanted.replace(" ", "."))
                stack.append(_Call(wanted))
            case "REDUCE":
                function, arguments = popped(-2)
                stack.append(_Call(function.name, arguments))
            case "BUILD":
                (state,) = popped(-1)
                stack[-1].state = state
            case name:
                raise _Refused(f"the instruction {name}")
    (found,) = stack
    return found


def _matrix(value: Any) -> NDArray[np.uint8] | None:
    """A uint8 matrix from the record of a pickled one; None for other values."""
    match value:
        case _Call(name=name, state=(_, (int(rows), int(columns)), _Call(arguments=(kind, *_)), by_column, raw)):
            content = _bytes(raw)
            sized = content and rows > 0 and rows * columns == len(content)
            if name in _RECONSTRUCT and kind in ("u1", b"u1") and content and sized:
                pixels = np.frombuffer(content, dtype=np.uint8)
                return pixels.reshape((int(rows), int(columns)), order="F" if by_column else "C")
    return None


def _bytes(value: Any) -> bytes | None:
    match value:
        case bytes():
            return value
        case _Call(name="_codecs encode", arguments=(str(text), *_)) if text.isascii() or max(text) < "\u0100":
            return text.encode("latin-1")
    return None


def _text(value: Any) -> str | None:
    """A short text; None for other values."""
    content = value.encode("utf-8", "replace") if isinstance(value, str) else _bytes(value)
    return None if content is None or len(content) > LONGEST_TEXT else content.decode("utf-8", "replace")

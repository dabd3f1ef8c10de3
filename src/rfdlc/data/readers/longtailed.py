"""Data sets made long-tailed: scikit-learn's digits, and CIFAR's pickle files, which
are parsed and never unpickled.
"""

import pickletools
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.dataset import Dataset, Normalisation, Split
from rfdlc.data.longtail import Profile, profile_counts, subset
from rfdlc.data.reader import DataReader, Place
from rfdlc.errors import InputError, expect, listing

# The values that every published CIFAR-LT result was normalised with.
NORMALISATION = Normalisation((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


def read_digits(
    place: Place, *, factor: float = 20, profile: Profile = "exponential", seed: int = 0
) -> Dataset:
    """8x8 grey digits: a balanced test split of 45 per class, and the other images
    subsampled to the profile.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    labels = digits.target.astype(np.int64)
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)[
        :, None
    ]  # 0..16 -> 0..255
    everything = Split(images, labels, [f"digit-{i}" for i in range(len(labels))])
    test = subset(
        labels, np.full(10, 45), seed=0
    )  # the same for every seed, so that results compare
    rest = everything.take(np.setdiff1d(np.arange(len(labels)), test))
    # From the smallest class, so that every class can follow the profile exactly.
    counts = profile_counts(int(np.bincount(rest.labels).min()), 10, factor, profile)
    train = rest.take(subset(rest.labels, counts, seed))
    return Dataset.of(
        "digits-lt",
        [str(d) for d in range(10)],
        {"train": train, "test": everything.take(test)},
    )


class _Layout(NamedTuple):
    """Files and keys of a data set."""

    folder: str
    train: tuple[str, ...]
    test: str
    meta: str
    labels: str
    names: str
    classes: int

    def complete(self, folder: Path) -> bool:
        return all(
            (folder / name).is_file() for name in (*self.train, self.test, self.meta)
        )


FIVE = tuple(f"data_batch_{k}" for k in range(1, 6))
LAYOUTS = {
    "cifar10-lt": _Layout(
        "cifar-10-batches-py",
        FIVE,
        "test_batch",
        "batches.meta",
        "labels",
        "label_names",
        10,
    ),
    "cifar100-lt": _Layout(
        "cifar-100-python",
        ("train",),
        "test",
        "meta",
        "fine_labels",
        "fine_label_names",
        100,
    ),
}


def is_cifar(place: Place) -> bool:
    return any(layout.complete(place.path) for layout in LAYOUTS.values())


def find_cifar(root: Path, name: str) -> Path:
    layout = LAYOUTS[name]
    found = [
        folder / layout.meta
        for folder in (root / layout.folder, root)
        if layout.complete(folder)
    ]
    wanted = (
        f"the files {listing((*layout.train, layout.test, layout.meta))} in"
        f" {root / layout.folder}"
    )
    fix = (
        "unpack the Python version of the data set there, or give its folder with root"
        " (--root)"
    )
    expect(found, f"{name} was not found: expected {wanted}; {fix}")
    return found[0]


def read_cifar(
    place: Place,
    *,
    factor: float | None = None,
    profile: Profile = "exponential",
    seed: int = 0,
) -> Dataset:
    """A folder, completely or by a factor; or what `find_cifar` returned, by default
    with factor 100.
    """
    path = place.path
    name, layout = next(
        item
        for item in LAYOUTS.items()
        if path.name == item[1].meta or item[1].complete(path)
    )
    folder, factor = (
        (path, factor)
        if path.is_dir()
        else (path.parent, 100.0 if factor is None else factor)
    )
    named = _table(folder / layout.meta).get(layout.names)
    names = (
        [text for text in map(_text, named) if text is not None]
        if isinstance(named, list)
        else []
    )
    wanted_names = f"expected {layout.classes} class names under {layout.names!r}"
    expect(len(names) == layout.classes, f"{folder / layout.meta}: {wanted_names}")
    batches = [_batch(folder / name, layout) for name in layout.train]
    ids = [name for batch in batches for name in batch.ids or ()]
    train = Split(
        np.concatenate([b.array for b in batches]),
        np.concatenate([b.labels for b in batches]),
        ids,
    )
    notes: list[str] = []
    if factor is not None:
        present = np.bincount(train.labels, minlength=layout.classes)
        wanted = profile_counts(int(present.max()), layout.classes, factor, profile)
        short = [
            f"{names[c]} {present[c]} of {wanted[c]}"
            for c in np.flatnonzero(present < wanted)
        ]
        if short:
            notes = [
                f"the files hold too few images for factor {factor:g}, all were used:"
                f" {listing(short, 5)}"
            ]
            warnings.warn(notes[0], stacklevel=3)
        train = train.take(subset(train.labels, wanted, seed))
    return Dataset.of(
        name,
        names,
        {"train": train, "test": _batch(folder / layout.test, layout)},
        notes,
        NORMALISATION,
    )


DIGITS = DataReader(read_digits, names={"digits-lt": Path})
CIFAR = DataReader(
    read_cifar,
    recognises=is_cifar,
    names={name: partial(find_cifar, name=name) for name in LAYOUTS},
)


def _batch(path: Path, layout: _Layout) -> Split:
    table = _table(path)
    data, labels = _matrix(table.get("data")), table.get(layout.labels)
    if data is None or data.shape[1] != 3072:
        found = "something else" if data is None else f"shape {data.shape}"
        raise InputError(
            f"{path}: expected 'data' as uint8 of shape (images, 3072), got {found}"
        )
    valid = (
        isinstance(labels, list)
        and len(labels) == len(data)
        and all(type(label) is int for label in labels)
    )
    expect(
        valid,
        f"{path}: expected {len(data)} integers, one per image, under"
        f" {layout.labels!r}",
    )
    wrong = [
        i for i, label in enumerate(labels or ()) if not 0 <= label < layout.classes
    ]
    allowed = f"expected 0 to {layout.classes - 1}"
    expect(
        not wrong,
        f"{path}: the label of image {listing(wrong, 3)} is out of range: {allowed}",
    )
    ids = [f"{path.name}/{i}" for i in range(len(data))]
    return Split(
        np.ascontiguousarray(data.reshape(-1, 3, 32, 32)),
        np.array(labels, dtype=np.int64),
        ids,
    )


# A pickle is a program for a stack machine. These files need few of its instructions,
# and here all of them only build lists, texts and numbers. A call stays a list of its
# name, arguments and state: nothing is looked up, imported, called or built, and
# `_matrix` makes the array from its bytes. Values are converted only where they are
# used, so that a small file cannot ask for much memory.

# All names in a pickled numpy array; the last is how Python 3 writes bytes for Python
# 2.
_RECONSTRUCT = (
    "numpy.core.multiarray _reconstruct",
    "numpy._core.multiarray _reconstruct",
)
_NAMES = {*_RECONSTRUCT, "numpy ndarray", "numpy dtype", "_codecs encode"}
_NUMBERS = (
    "INT",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG",
    "LONG1",
    "LONG4",
    "FLOAT",
    "BINFLOAT",
)
_TEXTS = (
    "BINBYTES",
    "SHORT_BINBYTES",
    "BINBYTES8",
    "UNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE",
    "BINUNICODE8",
)
LONGEST_TEXT = 1000  # of a key or a class name


class _Pairs(list[Any]):
    """A dict as its keys and values in turn: keys may be calls."""


def _table(path: Path) -> dict[str, Any]:
    try:
        found = _parsed(path.read_bytes())
        if isinstance(found, _Pairs):
            return {
                str(_text(key)): value
                for key, value in zip(found[::2], found[1::2], strict=True)
            }
    except InputError as error:
        unsafe = (
            f"refused, the pickle asks for {error}, which does not belong in a CIFAR"
            " file; nothing in it was run"
        )
        raise InputError(
            f"{path}: {unsafe}. Get the file again from a source that you trust"
        ) from None
    except Exception as error:  # it can be damaged in any way
        raise InputError(
            f"{path}: the pickle is truncated or damaged ({type(error).__name__}:"
            f" {error})"
        ) from None
    raise InputError(
        f"{path}: expected a dict in the pickle, got {type(found).__name__}"
    )


def _parsed(content: bytes) -> Any:
    stacks: list[list[Any]] = [[]]  # a mark begins another one
    memo: dict[Any, Any] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(content):
        taken = [kind.name for kind in opcode.stack_before]
        marked = stacks.pop() if "mark" in taken else []
        items = [
            stacks[-1].pop() for kind in taken if kind not in ("mark", "stackslice")
        ][::-1] + marked
        push = stacks[-1].append
        match opcode.name:
            case "PROTO" | "FRAME" | "STOP":
                stacks[-1] += items
            case "MARK":
                stacks.append([])
            case "PUT" | "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                stacks[-1] += items
                memo[len(memo) if argument is None else argument] = stacks[-1][-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                push(memo[argument])
            case name if name in _NUMBERS + _TEXTS:
                push(argument)
            case "STRING" | "BINSTRING" | "SHORT_BINSTRING":  # bytes of Python 2
                push(argument.encode("latin-1"))
            case "NONE" | "NEWTRUE" | "NEWFALSE" as name:
                push(None if name == "NONE" else name == "NEWTRUE")
            case "EMPTY_LIST" | "LIST":
                push(items)
            case "EMPTY_DICT" | "DICT":
                push(_Pairs(items))
            case "EMPTY_TUPLE" | "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                push(tuple(items))
            case "APPEND" | "APPENDS" | "SETITEM" | "SETITEMS" as name:
                if isinstance(items[0], _Pairs) != name.startswith("SET"):
                    raise ValueError(f"{name} does not fit the value on the stack")
                items[0].extend(items[1:])
                push(items[0])
            case "GLOBAL" | "STACK_GLOBAL":
                wanted = argument or " ".join(str(_text(word)) for word in items)
                if wanted not in _NAMES:
                    raise InputError(wanted.replace(" ", "."))
                push([wanted])
            case "REDUCE":
                push([*items[0], items[1]])
            case "BUILD":
                items[0].append(items[1])
                push(items[0])
            case name:
                raise InputError(f"the instruction {name}")
    ((found,),) = stacks
    return found


def _matrix(value: Any) -> NDArray[np.uint8] | None:
    """A uint8 matrix from the record of a pickled one; None for other values."""
    match value:
        case [
            name,
            _,
            (_, (int(rows), int(columns)), [_, (kind, *_), *_], by_column, raw),
        ]:
            content = _bytes(raw)
            sized = content and rows > 0 and rows * columns == len(content)
            if name in _RECONSTRUCT and kind in ("u1", b"u1") and content and sized:
                pixels = np.frombuffer(
                    bytearray(content), dtype=np.uint8
                )  # torch warns of memory that is read-only
                return pixels.reshape(
                    (int(rows), int(columns)), order="F" if by_column else "C"
                )
    return None


def _bytes(value: Any) -> bytes | None:
    match value:
        case bytes():
            return value
        case ["_codecs encode", (str(text), *_)] if (
            text.isascii() or max(text) < "\u0100"
        ):
            return text.encode("latin-1")
    return None


def _text(value: Any) -> str | None:
    content = (
        value.encode("utf-8", "replace") if isinstance(value, str) else _bytes(value)
    )
    return (
        None
        if content is None or len(content) > LONGEST_TEXT
        else content.decode("utf-8", "replace")
    )

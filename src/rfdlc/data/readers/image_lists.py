"""Lists of image files, lines of `path label`, as ImageNet-LT, Places-LT and
iNaturalist come.
"""

import re
import warnings
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from rfdlc.data.dataset import Dataset, Normalisation, choose_split
from rfdlc.data.images import PackedText
from rfdlc.data.reader import DataReader, Listing, Place, Request
from rfdlc.data.readers.image_files import (
    Entry,
    Fit,
    ImageOptions,
    Interpolation,
    is_image,
    listed_name,
    open_files,
    read_images,
)
from rfdlc.data.samples import Samples
from rfdlc.errors import InputError, expect, listing
from rfdlc.formats.tables import split_name
from rfdlc.probabilities.classes import MOST_NUMBERED
from rfdlc.progress import track

# How many images and classes published data sets have, and with which values one of
# them is normalised.
PUBLISHED = {
    "imagenetlt": {
        "train images": 115_846,
        "val images": 20_000,
        "test images": 50_000,
        "classes": 1_000,
    },
    "placeslt": {
        "train images": 62_500,
        "val images": 7_300,
        "test images": 36_500,
        "classes": 365,
    },
    "inaturalist18": {"train images": 437_513, "val images": 24_426, "classes": 8_142},
}
NORMALISATIONS = {
    "inaturalist18": Normalisation((0.466, 0.471, 0.380), (0.195, 0.194, 0.192))
}
NAMES = {
    "imagenet-lt": "ImageNet_LT",
    "places-lt": "Places_LT",
}  # as the authors call the lists
NAMES |= dict.fromkeys(("inaturalist18", "inaturalist2018"), "iNaturalist18")


def find_lists(folder: Path) -> dict[str, dict[str, Path]]:
    """List files in a folder: {what precedes the split in the name: {split: file}}."""
    found: dict[str, dict[str, Path]] = defaultdict(dict)
    for path in sorted(folder.glob("*.txt")):
        stem, split = _stem_and_split(path)
        if split is not None:
            found[stem][split] = path
    return {stem: files for stem, files in found.items() if "train" in files}


def holds_lists(path: Path) -> bool:
    return path.is_dir() and bool(find_lists(path))


def find_named_list(root: Path, name: str) -> Path:
    found = [
        files["train"]
        for stem, files in find_lists(root).items()
        if plain_name(stem) == plain_name(name)
    ]
    wanted = (
        f"expected its lists there, such as {NAMES[name]}_train.txt; give their folder"
        " with root (--root)"
    )
    expect(found, f"{name} was not found in {root}: {wanted}")
    return found[0]


def read_list(
    place: Place,
    *,
    image_size: PositiveInt | None = None,
    fit: Fit = "auto",
    interpolation: Interpolation = "bilinear",
    cache: Path | None = None,
    skip_broken: bool = False,
    allow_links: bool = False,
) -> Dataset:
    """A training list (of a folder, the one in it), and those beside it; paths are
    relative to the root, or to it.
    """
    path = place.path
    if path.is_dir():
        path = list_file(path, "train")
    stem, split = _stem_and_split(path)
    files = (
        find_lists(path.parent).get(stem, {}) if split is not None else {"train": path}
    )
    beside = path.with_name(f"{stem}_train.txt")
    expect(
        path in files.values(),
        f"{path}: there is no training list beside it: expected {beside}",
    )
    root = (place.root or path.parent).resolve()
    broken: list[str] = []
    listed = {
        name: _list_entries(file, root, broken, allow_links)
        for name, file in files.items()
    }
    usable = any(listed.values()) or (broken and not skip_broken)
    expect(
        usable,
        f"{path}: holds no usable line: expected lines of 'path label', such as"
        " 'train/a.jpg 0'",
    )
    names, plain = _class_names(listed), plain_name(stem)
    counts = {f"{name} images": len(own) for name, own in listed.items()} | {
        "classes": len(names)
    }
    published = PUBLISHED.get(plain, {}).items()
    wrong = [
        f"{counts.get(what, 0)} {what} (published: {n})"
        for what, n in published
        if counts.get(what) != n
    ]
    notes = (
        [f"{path.parent}: differs from the published data set: {', '.join(wrong)}"]
        if wrong
        else []
    )
    for note in notes:
        warnings.warn(note, stacklevel=3)
    known, normalisation = (
        "crop" if plain in PUBLISHED and fit == "auto" else fit,
        NORMALISATIONS.get(plain),
    )
    how = ImageOptions(image_size, known, interpolation, cache, skip_broken)
    return read_images(
        stem or path.stem, root, listed, names, how, notes, broken, normalisation
    )


def list_file(path: Path, split: str | None, *, whole: bool = False) -> Path:
    """The file itself, or the list of a split, of a folder or where the file stands for
    a `whole` data set.
    """
    if path.is_file() and split is None and not whole:
        return path
    stems = find_lists(path if path.is_dir() else path.parent)
    several = (
        f"{path}: holds lists of several data sets ({listing(stems)}): give the path of"
        " one list"
    )
    expect(path.is_file() or len(stems) == 1, several)
    files = (
        next(iter(stems.values()))
        if path.is_dir()
        else stems.get(_stem_and_split(path)[0], {})
    )
    return files[choose_split(str(path), files, split)]


def list_splits(place: Place, request: Request) -> Listing:
    """The lists of a data set ("" for one list alone), and the names of the classes in
    all of them.
    """
    path = place.path
    if path.is_dir():
        path = list_file(path, "train")
    files = find_lists(path.parent).get(_stem_and_split(path)[0], {})
    if path not in files.values():
        files = {"": path}
    root = (place.root or path.parent).resolve()
    entries = {
        split: _list_entries(file, root, [], True) for split, file in files.items()
    }
    return Listing([*files], _class_names(entries))


def open_list(place: Place, request: Request) -> Samples:
    """The images of one list; a data set that was found by its name has several."""
    file = list_file(place.path, request.split, whole=place.named)
    spec = request.spec
    root, names, labels = find_listed_images(
        file, spec.classes.names, request.allow_links, place.root
    )
    return open_files(root, names, labels, spec, request.skip_broken)


def find_listed_images(
    path: Path,
    class_names: Sequence[str],
    allow_links: bool = False,
    root: Path | None = None,
) -> tuple[Path, PackedText, NDArray[np.int64]]:
    """Images to predict: root, names, labels (-1: none), which agree with folders named
    after classes.
    """
    root, labels = (root or path.parent).resolve(), array("q")
    place = {name: i for i, name in enumerate(class_names)}

    def names() -> Iterator[str]:
        for origin, line in _lines(path):
            try:
                unlabelled = is_image(line)
                name, label = _parsed(f"{line} 0" if unlabelled else line)
                name = listed_name(name, root, allow_links=allow_links)
                label = -1 if unlabelled else label
                count, folder = (
                    len(class_names),
                    place.get("".join(name.split("/")[-2:-1]), label),
                )
                expect(
                    label < count,
                    f"label {label} is out of range: the model has {count} classes",
                )
                told = (
                    f"label {label} is {class_names[label]!r} in the model, but the"
                    " image lies in a folder of"
                )
                fix = (
                    f"another class ({class_names[folder]!r}): correct the labels or"
                    " leave them out"
                )
                expect(unlabelled or folder == label, f"{told} {fix}")
            except InputError as error:
                raise InputError(f"{origin}{error}") from None
            labels.append(label)
            yield name

    packed = PackedText(track(names(), f"Reading {path.name}"))
    expect(
        len(packed),
        f"{path}: holds no usable line: expected lines of 'path' or 'path label'",
    )
    return root, packed, np.frombuffer(labels, dtype=np.int64)


def _stem_and_split(path: Path) -> tuple[str, str | None]:
    """(`ImageNet_LT`, `train`) of `ImageNet_LT_train.txt`."""
    match = re.fullmatch(r"(?:(.*)[_\-. ])?([A-Za-z]+)", path.stem)
    split = split_name(match.group(2)) if match else None
    return (str(match.group(1) or ""), split) if match and split else (path.stem, None)


def plain_name(name: str) -> str:
    """A data set's name as `imagenetlt`, without differences of spelling between lists,
    folders and people.
    """
    return re.sub(r"[^a-z0-9]", "", name.lower()).replace("2018", "18")


def _list_entries(
    path: Path, root: Path, broken: list[str], allow_links: bool
) -> list[Entry]:
    listed: list[Entry] = []
    contents: dict[str, frozenset[str]] = {}
    for origin, line in _lines(path):
        try:
            name, label = _parsed(line)
            listed.append(
                Entry(listed_name(name, root, contents, allow_links), label, origin)
            )
        except InputError as error:
            broken.append(f"{origin}{error}")
    return listed


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(map(str.strip, file), 1):
                if line and not line.startswith("#"):
                    yield f"{path}, line {number}: ", line
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path}: cannot be read as lines of 'path label' in UTF-8 ({error})"
        ) from None


def _parsed(line: str) -> tuple[str, int]:
    """Name and label; the label is what follows the last space, so that paths may have
    spaces.
    """
    name, *rest = line.rsplit(None, 1)
    label = "".join(rest)
    expect(label, f"expected 'path label', got {line!r}")
    number = re.fullmatch(r"[0-9]{1,9}", label)
    expect(
        number,
        f"the label {label!r} is not a number: expected 'path label' with a class from"
        " 0 on",
    )
    large = (
        f"the label {label} is too large: expected class numbers from 0 on, below"
        f" {MOST_NUMBERED:,}"
    )
    expect(int(label) < MOST_NUMBERED, large)
    return name, int(label)


def _class_names(listed: dict[str, list[Entry]]) -> list[str]:
    """The folder that holds a class's images where each class has its own, otherwise
    numbers.
    """
    folders: dict[Any, set[str]] = defaultdict(set)
    for entry in (entry for entries in listed.values() for entry in entries):
        folders[entry.label].add("".join(entry.name.split("/")[-2:-1]))
    count = 1 + max(folders, default=0)
    alone = len(folders) == count and all(len(names) == 1 for names in folders.values())
    names = [min(folders[c]) for c in range(count)] if alone else []
    return (
        names
        if len(set(names)) == count and all(names)
        else [str(c) for c in range(count)]
    )


LISTS = DataReader(
    read_list,
    names={name: partial(find_named_list, name=name) for name in NAMES},
    suffixes=[".txt"],
    open=open_list,
    list_splits=list_splits,
    lists_files=True,
)
FOLDER_OF_LISTS = replace(
    LISTS, names={}, suffixes=(), recognises=lambda place: holds_lists(place.path)
)

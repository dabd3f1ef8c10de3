"""List files: lines of `path label`, as ImageNet-LT, Places-LT and iNaturalist 2018 come."""

import os
import re
import warnings
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from rfdlc.data.dataset import Dataset, Normalisation, choose_split, split_name
from rfdlc.data.images import SUFFIXES, PackedText
from rfdlc.data.sources.folder import Listed, read_images
from rfdlc.decide.classes import MOST_NUMBERED
from rfdlc.errors import InputError
from rfdlc.errors import listing as told
from rfdlc.progress import track


class Published(NamedTuple):
    """How many images and classes a published data set has."""

    images: dict[str, int]
    classes: int
    normalisation: Normalisation | None = None


PUBLISHED = {
    "imagenetlt": Published({"train": 115_846, "val": 20_000, "test": 50_000}, 1_000),
    "placeslt": Published({"train": 62_500, "val": 7_300, "test": 36_500}, 365),
    "inaturalist18": Published(
        {"train": 437_513, "val": 24_426}, 8_142, Normalisation((0.466, 0.471, 0.380), (0.195, 0.194, 0.192))
    ),
}

NAMES = {  # as its authors call its lists
    "imagenet-lt": "ImageNet_LT", "places-lt": "Places_LT", "inaturalist18": "iNaturalist18",
    "inaturalist2018": "iNaturalist18",
}  # fmt: skip


def find(folder: Path) -> dict[str, dict[str, Path]]:
    """List files in a folder: {what precedes the split in the name: {split: file}}."""
    found: dict[str, dict[str, Path]] = defaultdict(dict)
    for path in sorted(folder.glob("*.txt")):
        stem, split = _stem_and_split(path)
        if split is not None:
            found[stem][split] = path
    return {stem: files for stem, files in found.items() if "train" in files}


def find_named(root: Path, name: str) -> Path:
    """The training list of a data set by its name, such as imagenet-lt."""
    for stem, files in find(root).items() if root.is_dir() else ():
        if plain_name(stem) == plain_name(name):
            return files["train"]
    raise InputError(
        f"{name} was not found in {root}: expected its lists there, such as {NAMES[name]}_train.txt; give their "
        "folder with root (--root)"
    )


def read_folder(path: Path, *, image_size: PositiveInt | None = None, skip_broken: bool = False) -> Dataset:
    """The one data set whose list files lie in this folder."""
    stems = find(path)
    if len(stems) > 1:
        raise InputError(f"{path}: holds lists of several data sets ({told(stems)}): give the path of one train list")
    return read(next(iter(stems.values()))["train"], image_size=image_size, skip_broken=skip_broken)


def read(path: Path, *, image_size: PositiveInt | None = None, skip_broken: bool = False) -> Dataset:
    """A training list and, beside it, those of val and test; paths in them are relative to their folder."""
    stem, split = _stem_and_split(path)
    files = find(path.parent).get(stem, {}) if split is not None else {"train": path}
    if path not in files.values():
        raise InputError(f"{path}: there is no training list beside it: expected {path.with_name(stem + '_train.txt')}")
    root = path.parent.resolve()
    skipped: list[str] = []
    listed = {name: _read_list(file, root, skipped, skip_broken) for name, file in files.items()}
    published = PUBLISHED.get(plain_name(stem))
    names = _class_names(listed)
    notes = _compare(path, listed, len(names), published)
    return read_images(
        stem or path.stem,
        root,
        listed,
        names,
        image_size=image_size,
        skip_broken=skip_broken,
        notes=notes,
        skipped=skipped,
        normalisation=published.normalisation if published else None,
    )


def list_file(path: Path, split: str | None, *, whole: bool = False) -> Path:
    """The list to predict: the file itself, or of a folder, or a file that stands for a `whole` data set, a split."""
    if path.is_file() and split is None and not whole:
        return path
    stems = find(path if path.is_dir() else path.parent)
    if path.is_dir() and len(stems) > 1:
        raise InputError(f"{path}: holds lists of several data sets ({told(stems)}): give the path of one list")
    files = next(iter(stems.values())) if path.is_dir() else stems.get(_stem_and_split(path)[0], {})
    return files[choose_split(str(path), files, split)]


def find_images(path: Path, class_names: Sequence[str]) -> tuple[Path, PackedText, NDArray[np.int64]]:
    """Images to predict, line by line: root, names and labels (-1: none). Does not check that files exist.

    A label is a class index of the model; where the image lies in a folder named after a class, both must agree.
    """
    root, labels = path.parent.resolve(), array("q")
    place = {name: i for i, name in enumerate(class_names)}

    def names() -> Iterator[str]:
        for number, line in _lines(path):
            name, label, trouble = _labelled_or_not(line, class_names)
            folder = place.get(name.rpartition("/")[0].rpartition("/")[2], label)
            trouble = trouble or _leaving(name, root)
            if not trouble and label >= 0 and folder != label:
                trouble = (
                    f"label {label} is {class_names[label]!r} in the model, but the image lies in a folder of another "
                    f"class ({class_names[folder]!r}): labels count the model's classes; correct or leave them out"
                )
            if trouble:
                raise InputError(f"{path}, line {number}: {trouble}")
            labels.append(label)
            yield name

    packed = PackedText(track(names(), f"Reading {path.name}"))
    if not len(packed):
        raise InputError(f"{path}: holds no usable line: expected lines of 'path' or 'path label'")
    return root, packed, np.frombuffer(labels, dtype=np.int64)


def _labelled_or_not(line: str, class_names: Sequence[str]) -> tuple[str, int, str]:
    """(name, label or -1, what is wrong)."""
    name, label, trouble = _parsed(line)
    if not trouble and label >= len(class_names):
        return name, label, f"label {label} is out of range: the model has {len(class_names)} classes, from 0 on"
    if not trouble:
        return name, label, ""
    if os.path.splitext(line.strip())[1].lower() in SUFFIXES:
        return line.strip(), -1, ""
    return name, -1, f"expected 'path', the name of an image, or 'path label', got {line.strip()!r}"


def _stem_and_split(path: Path) -> tuple[str, str | None]:
    """(`ImageNet_LT`, `train`) of `ImageNet_LT_train.txt`."""
    match = re.fullmatch(r"(?:(.*)[_\-. ])?([A-Za-z]+)", path.stem)
    split = split_name(match.group(2)) if match else None
    return (str(match.group(1) or ""), split) if match and split else (path.stem, None)


def plain_name(name: str) -> str:
    """A data set's name without differences of spelling between lists, folders and people.

    >>> plain_name("ImageNet_LT"), plain_name("imagenet-lt"), plain_name("iNaturalist2018")
    ('imagenetlt', 'imagenetlt', 'inaturalist18')
    """
    return re.sub(r"[^a-z0-9]", "", name.lower()).replace("2018", "18")


def _read_list(path: Path, root: Path, skipped: list[str], skip_broken: bool) -> Listed:
    """Every line as a name and a class; errors name the line."""
    listed, folders = Listed(), _Folders(root)
    for number, line in _lines(path):
        name, label, trouble = _parsed(line)
        trouble = trouble or folders.trouble(name)
        if not trouble:
            listed.add(name, label, f"{path}, line {number}: ")
        elif skip_broken:
            skipped.append(f"{path}, line {number}: {trouble}")
        else:
            raise InputError(f"{path}, line {number}: {trouble}")
    if not listed.names:
        raise InputError(f"{path}: holds no usable line: expected lines of 'path label', such as 'train/a.jpg 0'")
    return listed


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbers and lines, without empty ones and comments."""
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, 1):
                if line.strip() and not line.lstrip().startswith("#"):
                    yield number, line
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as lines of 'path label' in UTF-8 ({error})") from None


def _parsed(line: str) -> tuple[str, int, str]:
    """(name, label, what is wrong); the label is what follows the last space, so that paths may have spaces."""
    fields = line.strip().rsplit(None, 1)
    if len(fields) != 2:
        return "", 0, f"expected 'path label', got {line.strip()!r}"
    name, label = fields
    if not re.fullmatch(r"[0-9]{1,9}", label):
        return name, 0, f"the label {label!r} is not a number: expected 'path label' with a class from 0 on"
    if int(label) >= MOST_NUMBERED:
        return name, 0, f"the label {label} is too large: expected class numbers from 0 on, below {MOST_NUMBERED:,}"
    return name, int(label), ""


def _leaving(name: str, root: Path) -> str:
    if name.startswith(("/", "\\")) or ".." in name.split("/") or ":" in name.split("/")[0]:
        return f"the path {name!r} leaves the root {root}, or is absolute: expected one relative to it, without '..'"
    return ""


class _Folders:
    """Which files exist under a root; each folder is read once, which is much faster than one call per file."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._content: dict[str, frozenset[str]] = {}

    def trouble(self, name: str) -> str:
        """Why this path cannot be used; empty if it can."""
        folder, _, file = name.rpartition("/")
        if trouble := _leaving(name, self._root):
            return trouble
        if folder not in self._content:
            self._content[folder] = self._read(folder)
        return "" if file in self._content[folder] else f"there is no file {self._root / name}"

    def _read(self, folder: str) -> frozenset[str]:
        try:
            with os.scandir(self._root / folder) as entries:
                return frozenset(entry.name for entry in entries)
        except OSError:
            return frozenset()


def _class_names(listed: dict[str, Listed]) -> list[str]:
    """The folder that holds a class's images where each class has its own, otherwise numbers."""
    count = 1 + max(label for images in listed.values() for label in images.labels)
    folders: dict[int, set[str]] = defaultdict(set)
    for images in listed.values():
        for name, label in zip(images.names, images.labels, strict=True):
            folders[label].add(name.rpartition("/")[0].rpartition("/")[2])
    alone = len(folders) == count and all(len(names) == 1 for names in folders.values())
    names = [next(iter(folders[c])) for c in range(count)] if alone else []
    return names if len(set(names)) == count and all(names) else [str(c) for c in range(count)]


def _compare(path: Path, listed: dict[str, Listed], classes: int, published: Published | None) -> list[str]:
    """A note, and a warning, where the numbers differ from those of the published data set."""
    if published is None:
        return []
    wrong = [
        f"{len(images.names)} {split} images (published: {published.images[split]})"
        for split, images in listed.items()
        if published.images.get(split, len(images.names)) != len(images.names)
    ]
    wrong += [f"{classes} classes (published: {published.classes})"] if classes != published.classes else []
    wrong += [f"no {split} list" for split in published.images if split not in listed]
    if not wrong:
        return []
    note = f"{path.parent}: differs from the published data set: {', '.join(wrong)}"
    warnings.warn(note, stacklevel=4)
    return [note]

"""Image folders, `root/CLASS/*.png` or `root/{train,val,test}/CLASS/*.png`; and images by name, as lists have them."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import PositiveInt

from rfdlc.data.dataset import SKIPPING, Dataset, Normalisation, Split, choose_split, split_name
from rfdlc.data.images import (
    FITS_IN_MEMORY,
    SUFFIXES,
    BrokenImage,
    Header,
    ImageFiles,
    PackedText,
    attempt,
    default_size,
    header,
)
from rfdlc.errors import InputError, listing
from rfdlc.progress import track

HEADERS_READ = 50_000  # of more files, this many are opened; `rfdlc inspect` looks at all of them


def read(path: Path, *, image_size: PositiveInt | None = None, skip_broken: bool = False) -> Dataset:
    """One folder per class, sorted by name; hidden files and files that are not images are ignored."""
    root = path.resolve()
    places = _split_folders(root)
    whole = places == {"train": root}
    names = sorted({folder.name for place in places.values() for folder in _contents(place, root).folders})
    if not names:
        raise InputError(f"{path}: has no class folders with images: expected {path}/CLASS/*.png, .jpg, ...")
    if whole and all(map(split_name, names)):
        raise InputError(f"{path}: has {listing(names)} but no training folder: expected {path}/train/CLASS/*.png")
    index = {name: i for i, name in enumerate(names)}
    listed: dict[str, Listed] = {}
    skipped: list[str] = []
    ignored, loose, deeper = 0, 0, list[str]()
    for split, place in places.items():
        listed[split] = Listed()
        here = _contents(place, root)
        loose += len(here.images)
        for folder in here.folders:
            found = _contents(folder, root)
            ignored += found.others
            deeper += (below.relative_to(root).as_posix() for below in found.folders)
            if not found.images:
                skipped.append(f"{folder}: the class folder holds no image")
            for name in found.images:
                listed[split].add(name, index[folder.name])
    if skipped and not skip_broken:
        raise InputError(
            f"{skipped[0]}; expected files ending in {listing(sorted(SUFFIXES), 20)}. Remove it, or leave it out with "
            f"{SKIPPING}"
        )
    beside = [] if whole else [f.name for f in _contents(root, root).folders if f not in places.values()]
    notes = [f"{ignored} files that are not images were ignored"] if ignored else []
    notes += [f"{loose} images beside class folders were ignored: they have no class"] if loose else []
    for where, unread in (("inside class folders", deeper), ("beside the splits", beside)):
        notes += [f"{len(unread)} folders {where} were ignored: {listing(unread, 3)}"] if unread else []
    names, listed = _without_empty(names, listed)
    options = {"image_size": image_size, "skip_broken": skip_broken}
    return read_images(root.name, root, listed, names, **options, notes=notes, skipped=skipped)


def find_images(path: Path, split: str | None = None) -> tuple[Path, str, PackedText]:
    """Images to predict: one file, or all below a folder, or below its folder for `split` (by default the last).

    Returns the root, where below it the images lie ("test/", or nothing), and their names relative to the root.
    """
    root = (path if path.is_dir() else path.parent).resolve()
    places = _split_folders(root) if path.is_dir() else {"train": root}
    whole = places == {"train": root}
    if whole and split is not None:
        raise InputError(f"{path} has no split {split!r}: expected a folder {path}/{split}")
    place = root if whole else places[choose_split(str(path), places, split)]
    names = PackedText(track(_all_images(place, root), "Listing images") if path.is_dir() else [path.name])
    if not len(names):
        raise InputError(f"{path}: holds no image: expected files ending in {listing(sorted(SUFFIXES), 20)}")
    return root, "" if whole else f"{place.name}/", names


def _all_images(folder: Path, root: Path) -> Iterator[str]:
    """Names relative to the root, folder by folder; of each only the names of its images are held at a time."""
    here = "" if folder == root else folder.relative_to(root).as_posix() + "/"
    folders, images = set[str](), list[str]()
    with os.scandir(folder) as entries:
        for entry in entries:
            if _shown(entry, root) and entry.is_dir():
                folders.add(entry.name)
            elif _shown(entry, root) and _is_image(entry.name):
                images.append(entry.name)
    for name in sorted([*folders, *images]):
        if name in folders:
            yield from _all_images(folder / name, root)
        else:
            yield here + name


def _split_folders(root: Path) -> dict[str, Path]:
    """The folder of each split; the root alone where there is no `train` in it."""
    found = {folder: split_name(folder.name) for folder in _contents(root, root).folders}
    if "train" not in found.values():
        return {"train": root}
    places: dict[str, Path] = {}
    for folder, split in found.items():
        if split in places:
            raise InputError(f"{root}: both {places[split].name!r} and {folder.name!r} mean {split}: keep one of them")
        if split is not None:
            places[split] = folder
    return places


class Contents(NamedTuple):
    """Of a folder: names of its images, relative to the root; its folders; the number of other files."""

    images: list[str]
    folders: list[Path]
    others: int


def _contents(folder: Path, root: Path) -> Contents:
    """What is in a folder, by name, without hidden files."""
    with os.scandir(folder) as found:
        entries = sorted((entry for entry in found if _shown(entry, root)), key=lambda entry: entry.name)
    folders = [folder / entry.name for entry in entries if entry.is_dir()]
    place = folder.relative_to(root).as_posix()
    images = [f"{place}/{entry.name}" for entry in entries if not entry.is_dir() and _is_image(entry.name)]
    return Contents(images, folders, len(entries) - len(folders) - len(images))  # a link to nothing is a broken image


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES


def _shown(entry: os.DirEntry[str], root: Path) -> bool:
    """Whether it is not hidden; a link that leaves the root, or points to a folder that contains it, is refused."""
    if entry.name.startswith((".", "__")):
        return False
    if entry.is_symlink():
        link, target = Path(entry.path), Path(entry.path).resolve()
        if not target.is_relative_to(root):
            raise InputError(f"{link}: is a link to outside of {root}, which is refused: copy or move its target")
        if link.parent.resolve().is_relative_to(target):
            raise InputError(f"{link}: is a link to a folder that contains it, which is refused: remove it")
    return True


# -- from names and labels to a data set, in memory where it fits ------------------------------------------------------


@dataclass
class Listed:
    """Image names (relative to a root) with their class indices, and where each was named, for messages."""

    names: list[str] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)  # such as "list.txt, line 3: "; empty where the path is enough

    def add(self, name: str, label: int, origin: str = "") -> None:
        """One more image."""
        self.names.append(name)
        self.labels.append(label)
        self.origins.append(origin)

    def without(self, gone: Iterable[int]) -> "Listed":
        """All but the images at these positions."""
        left = sorted(set(range(len(self.names))) - set(gone))
        return Listed([self.names[i] for i in left], [self.labels[i] for i in left], [self.origins[i] for i in left])


def read_images(
    name: str,
    root: Path,
    listed: Mapping[str, Listed],
    class_names: Sequence[str],
    *,
    image_size: int | None,
    skip_broken: bool,
    notes: Sequence[str] = (),
    skipped: Sequence[str] = (),
    normalisation: Normalisation | None = None,
) -> Dataset:
    """Read the headers, choose size and channels, and decode what fits into memory."""
    gone, said = list(skipped), list(notes)
    headers: list[Header] = []
    checked = {}
    for split, images in listed.items():
        found, broken = _headers(root, images)
        checked[split] = _usable(images, broken, skip_broken, gone)
        headers += found.values()
    if not headers:
        raise InputError(f"{name}: no image in {root} can be used ({len(gone)} are broken)")
    size = image_size or default_size(headers)
    channels = 1 if all(h.grey for h in headers) else 3
    said += _size_note(headers, size)
    splits = _read_splits(root, checked, size, channels, skip_broken, gone)
    if gone:
        said.append(f"{len(gone)} broken files, lines or folders were skipped, the first: {gone[0]}")
    data = Dataset.of(name, class_names, splits, said, normalisation)
    return replace(data, skipped=tuple(gone))


def _headers(root: Path, images: Listed) -> tuple[dict[int, Header], dict[int, BrokenImage]]:
    count = len(images.names)
    places = np.unique(np.linspace(0, count - 1, min(count, HEADERS_READ)).astype(int)).tolist()
    return attempt(lambda i: header(root / images.names[i]), places, "Looking at images")


def _usable(images: Listed, broken: Mapping[int, BrokenImage], skip_broken: bool, gone: list[str]) -> Listed:
    """The images that are not broken; raises for broken ones unless they are to be skipped and counted."""
    if not broken:
        return images
    messages = [f"{images.origins[i]}{broken[i]}" for i in sorted(broken)]
    if not skip_broken:
        more = f"; {len(messages) - 1} more are broken" if len(messages) > 1 else ""
        raise InputError(f"{messages[0]}{more}. Repair or remove what is broken, or leave it out with {SKIPPING}")
    gone += messages
    return images.without(broken)


def _size_note(headers: Sequence[Header], size: int) -> list[str]:
    sides = {(h.width, h.height) for h in headers}
    if sides == {(size, size)}:
        return []
    pixels = sorted(sides, key=lambda side: side[0] * side[1])
    least, most = (f"{width}x{height}" for width, height in (pixels[0], pixels[-1]))
    come = f"images of {least}" if len(sides) == 1 else f"images from {least} to {most} ({len(sides)} sizes)"
    return [f"{come} become {size}x{size}: the shorter side resized, the centre kept; image_size sets another size"]


def _read_splits(
    root: Path, listed: Mapping[str, Listed], size: int, channels: int, skip_broken: bool, gone: list[str]
) -> dict[str, Split]:
    """Images in memory where all of them fit, otherwise as files; what was broken is added to `gone`."""
    files = {split: ImageFiles(root, PackedText(found.names), size, channels) for split, found in listed.items()}
    fits = sum(found.nbytes for found in files.values()) <= FITS_IN_MEMORY
    splits = {}
    for split, found in listed.items():
        labels = np.array(found.labels, dtype=np.int64)
        if not fits:
            splits[split] = Split(files[split], labels, files[split].names)
            continue
        images, broken = files[split].decode()
        _usable(found, broken, skip_broken, gone)
        whole = Split(images, labels, files[split].names)
        kept = np.setdiff1d(np.arange(len(labels)), np.array(sorted(broken), dtype=np.int64))
        splits[split] = whole.take(kept) if broken else whole
    return splits


def _without_empty(names: list[str], listed: dict[str, Listed]) -> tuple[list[str], dict[str, Listed]]:
    """Leave out classes without images (their empty folders were reported)."""
    used = sorted({label for images in listed.values() for label in images.labels})
    place = {label: i for i, label in enumerate(used)}
    for images in listed.values():
        images.labels = [place[label] for label in images.labels]
    return [names[label] for label in used], listed

"""Image folders: `root/class/*.png`, or `root/{train,val,test}/class/*.png`."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rfdlc.data.dataset import SKIPPING, Dataset, choose_part, split_name
from rfdlc.data.images import SUFFIXES
from rfdlc.data.packed import PackedText
from rfdlc.data.sources.files import Listed, read_images
from rfdlc.errors import InputError, listing
from rfdlc.progress import track


def read(path: Path, *, image_size: int | None = None, skip_broken: bool = False) -> Dataset:
    """One folder a class, sorted by name; hidden files are ignored, and so are files that are no images."""
    root = path.resolve()
    parts = _parts(root)
    names = sorted({folder.name for part in parts.values() for folder in _folders(part, root)})
    if not names:
        raise InputError(f"{path}: has no class folders with images: expected {path}/CLASS/*.png, .jpg, ...")
    if parts == {"train": root} and all(map(split_name, names)):
        raise InputError(f"{path}: has {listing(names)} but no folder to learn from: expected {path}/train/CLASS/*.png")
    index = {name: i for i, name in enumerate(names)}
    listed: dict[str, Listed] = {}
    skipped: list[str] = []
    ignored, loose, deeper = 0, 0, list[str]()
    for split, part in parts.items():
        listed[split] = Listed()
        here = _contents(part, root)
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
    notes = [f"{ignored} files that are no images were ignored"] if ignored else []
    notes += [f"{loose} images beside class folders were ignored: they have no class"] if loose else []
    beside = [] if parts == {"train": root} else [f.name for f in _folders(root, root) if f not in parts.values()]
    for place, unread in (("inside class folders", deeper), ("beside the parts", beside)):
        notes += [f"{len(unread)} folders {place} were ignored: {listing(unread, 3)}"] if unread else []
    names, listed = _without_empty(names, listed)
    return read_images(
        root.name, root, listed, names, image_size=image_size, skip_broken=skip_broken, notes=notes, skipped=skipped
    )


def find_images(path: Path, split: str | None = None) -> tuple[Path, str, PackedText]:
    """Images to predict: one file, or all below a folder, or below its part for `split` (by default the last there is).

    Gives the root, where below it the images lie ("test/", or nothing), and their names relative to the root.
    """
    root = (path if path.is_dir() else path.parent).resolve()
    parts = _parts(root) if path.is_dir() else {"train": root}
    whole = parts == {"train": root}
    if whole and split is not None:
        raise InputError(f"{path} has no part {split!r}: expected a folder {path}/{split}")
    place = root if whole else parts[choose_part(str(path), parts, split)]
    below = "" if whole else f"{place.name}/"
    names = PackedText(track(_all_images(place, root), "Listing images") if path.is_dir() else [path.name])
    if not len(names):
        raise InputError(f"{path}: holds no image: expected files ending in {listing(sorted(SUFFIXES), 20)}")
    return root, below, names


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


def _parts(root: Path) -> dict[str, Path]:
    """The folder of each split; the root alone where there is no `train` in it."""
    found = {folder: split_name(folder.name) for folder in _folders(root, root)}
    if "train" not in found.values():
        return {"train": root}
    parts: dict[str, Path] = {}
    for folder, split in found.items():
        if split in parts:
            raise InputError(f"{root}: both {parts[split].name!r} and {folder.name!r} mean {split}: keep one of them")
        if split is not None:
            parts[split] = folder
    return parts


class Contents(NamedTuple):
    """Of a folder: names of its images, relative to the root; its folders; how many other files there are."""

    images: list[str]
    folders: list[Path]
    others: int


def _contents(folder: Path, root: Path) -> Contents:
    entries = _entries(folder, root)
    folders = [folder / entry.name for entry in entries if entry.is_dir()]
    place = folder.relative_to(root).as_posix()
    images = [f"{place}/{entry.name}" for entry in entries if not entry.is_dir() and _is_image(entry.name)]
    return Contents(images, folders, len(entries) - len(folders) - len(images))  # a link to nothing is a broken image


def _folders(folder: Path, root: Path) -> list[Path]:
    return _contents(folder, root).folders


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES


def _entries(folder: Path, root: Path) -> list[os.DirEntry[str]]:
    """What is in a folder, by name, without hidden things."""
    with os.scandir(folder) as found:
        return sorted((entry for entry in found if _shown(entry, root)), key=lambda entry: entry.name)


def _shown(entry: os.DirEntry[str], root: Path) -> bool:
    """Whether it is not hidden; a link that leaves the root, or leads to a folder that it lies in, is refused."""
    if entry.name.startswith((".", "__")):
        return False
    if entry.is_symlink():
        _check_link(Path(entry.path), root)
    return True


def _check_link(link: Path, root: Path) -> None:
    """An error for a link to outside of the root, and for one that would be followed for ever."""
    shown = link.resolve()
    if not shown.is_relative_to(root):
        raise InputError(f"{link}: is a link to outside of {root}, which is refused: copy or move what it shows")
    if link.parent.resolve().is_relative_to(shown):
        raise InputError(f"{link}: is a link to a folder that it lies in, which is refused: remove it")


def _without_empty(names: list[str], listed: dict[str, Listed]) -> tuple[list[str], dict[str, Listed]]:
    """Leave out classes of which no image is left (their empty folders were reported)."""
    used = sorted({label for part in listed.values() for label in part.labels})
    place = {label: i for i, label in enumerate(used)}
    for part in listed.values():
        part.labels = [place[label] for label in part.labels]
    return [names[label] for label in used], listed

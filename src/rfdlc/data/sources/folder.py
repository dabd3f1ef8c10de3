"""Image folders: `root/class/*.png`, or `root/{train,val,test}/class/*.png`."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rfdlc.data.dataset import Dataset, Split, split_name
from rfdlc.data.images import SUFFIXES
from rfdlc.data.sources.files import Listed, read_images, read_splits
from rfdlc.errors import InputError, listing


def read(path: Path, *, image_size: int | None = None, skip_broken: bool = False) -> Dataset:
    """One folder a class, sorted by name; hidden files are ignored, and so are files that are no images."""
    root = path.resolve()
    parts = _parts(root)
    names = sorted({folder.name for part in parts.values() for folder in _folders(part, root)})
    if not names:
        raise InputError(f"{path}: has no class folders with images: expected {path}/CLASS/*.png, .jpg, ...")
    index = {name: i for i, name in enumerate(names)}
    listed: dict[str, Listed] = {}
    skipped: list[str] = []
    ignored = 0
    for split, part in parts.items():
        listed[split] = Listed()
        for folder in _folders(part, root):
            images, others = _images(folder, root)
            ignored += others
            if not images:
                skipped.append(f"{folder}: the class folder holds no image")
            for name in images:
                listed[split].add(name, index[folder.name])
    if skipped and not skip_broken:
        raise InputError(
            f"{skipped[0]}; expected files ending in {listing(sorted(SUFFIXES), 20)}. Remove it, or skip it"
        )
    notes = [f"{ignored} files that are no images were ignored"] if ignored else []
    names, listed = _without_empty(names, listed)
    return read_images(
        root.name, root, listed, names, image_size=image_size, skip_broken=skip_broken, notes=notes, skipped=skipped
    )


def has_parts(path: Path) -> bool:
    """Whether this is a folder with a `train` part."""
    return path.is_dir() and list(_parts(path.resolve())) != ["train"]


def read_samples(path: Path, class_names: Sequence[str], size: int, channels: int) -> Split:
    """Images to predict: one file, or all below a folder; a folder named after a class labels what is in it.

    Other images have the label -1, which means that it is not known.
    """
    root = (path if path.is_dir() else path.parent).resolve()
    names = list(_all_images(root, root)) if path.is_dir() else [path.name]
    if not names:
        raise InputError(f"{path}: holds no image: expected files ending in {listing(sorted(SUFFIXES), 20)}")
    place = {name: i for i, name in enumerate(class_names)}
    listed = Listed()
    for name in names:
        listed.add(name, place.get(name.split("/")[0], -1) if "/" in name else -1)
    return read_splits(root, {"test": listed}, size, channels, False, [])["test"]


def _all_images(folder: Path, root: Path) -> Iterator[str]:
    """Names relative to the root, folder by folder."""
    here = "" if folder == root else folder.relative_to(root).as_posix() + "/"
    for entry in _entries(folder, root):
        if entry.is_dir():
            yield from _all_images(folder / entry.name, root)
        elif os.path.splitext(entry.name)[1].lower() in SUFFIXES:
            yield here + entry.name


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


def _folders(folder: Path, root: Path) -> list[Path]:
    return [folder / entry.name for entry in _entries(folder, root) if entry.is_dir()]


def _images(folder: Path, root: Path) -> tuple[list[str], int]:
    """Names of the images in a folder, relative to the root, and how many other files there are."""
    files = [entry.name for entry in _entries(folder, root) if entry.is_file()]
    images = [name for name in files if os.path.splitext(name)[1].lower() in SUFFIXES]
    place = folder.relative_to(root).as_posix()
    return [f"{place}/{name}" for name in images], len(files) - len(images)


def _entries(folder: Path, root: Path) -> Iterator[os.DirEntry[str]]:
    """What is in a folder, by name, without hidden things; a link that leaves the root is refused."""
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        if entry.name.startswith((".", "__")):
            continue
        if entry.is_symlink() and not Path(entry.path).resolve().is_relative_to(root):
            raise InputError(
                f"{entry.path}: is a link to outside of {root}, which is refused: copy or move what it shows"
            )
        yield entry


def _without_empty(names: list[str], listed: dict[str, Listed]) -> tuple[list[str], dict[str, Listed]]:
    """Leave out classes of which no image is left (their empty folders were reported)."""
    used = sorted({label for part in listed.values() for label in part.labels})
    place = {label: i for i, label in enumerate(used)}
    for part in listed.values():
        part.labels = [place[label] for label in part.labels]
    return [names[label] for label in used], listed

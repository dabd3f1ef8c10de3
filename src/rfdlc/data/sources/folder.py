"""Image folders, `root/CLASS/*.png` or `root/{train,val,test}/CLASS/*.png`; and images by name, as lists have them."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import PositiveInt

from rfdlc.data.dataset import SKIPPING, Dataset, Normalisation, Split, choose_split, split_name
from rfdlc.data.images import FITS_IN_MEMORY, SUFFIXES, Header, ImageFiles, PackedText, attempt, default_size, header
from rfdlc.errors import InputError, expect, listing
from rfdlc.progress import track

HEADERS_READ = 50_000  # of more files, this many are opened; `rfdlc inspect` looks at all of them
MOST_NAMED = 10  # broken files in a message
ENDINGS = f"files ending in {listing(sorted(SUFFIXES), 20)}"


class Entry(NamedTuple):
    """One image: its name relative to a root, its class, and where it is listed, such as "list.txt, line 3: "."""

    name: str
    label: int
    origin: str = ""


def read(path: Path, *, image_size: PositiveInt | None = None, skip_broken: bool = False) -> Dataset:
    """One folder per class, sorted by name; hidden files and files that are not images are ignored."""
    root = path.resolve()
    places = _split_folders(root)
    whole = places == {"train": root}
    classes = {split: [name for name, is_dir in _entries(place, root) if is_dir] for split, place in places.items()}
    names = sorted({name for own in classes.values() for name in own})
    expect(names, f"{path}: has no class folders with images: expected {path}/CLASS/*.png, .jpg, ...")
    unsplit = whole and all(map(split_name, names))
    expect(not unsplit, f"{path}: has {listing(names)} but no training folder: expected {path}/train/CLASS/*.png")
    found: dict[str, list[tuple[str, str]]] = {split: [] for split in places}  # names and classes
    broken, deeper, others = list[str](), list[str](), 0
    for split, own in classes.items():
        for kind in own:
            folder = places[split] / kind
            inside, below = _entries(folder, root), folder.relative_to(root).as_posix()
            images = [name for name, is_dir in inside if not is_dir and _is_image(name)]  # a link to nothing is broken
            folders = [f"{below}/{name}" for name, is_dir in inside if is_dir]
            deeper, others = deeper + folders, others + len(inside) - len(images) - len(folders)
            found[split] += [(f"{below}/{image}", kind) for image in images]
            broken += [] if images else [f"{folder}: the class folder holds no image (expected {ENDINGS})"]
    unused = [name for name, is_dir in _entries(root, root) if is_dir and root / name not in places.values()]
    beside = [] if whole else unused
    loose = sum(not is_dir and _is_image(name) for place in places.values() for name, is_dir in _entries(place, root))
    notes = [f"{others} files that are not images were ignored"] if others else []
    notes += [f"{loose} images beside class folders were ignored: they have no class"] if loose else []
    for where, unread in (("inside class folders", deeper), ("beside the splits", beside)):
        notes += [f"{len(unread)} folders {where} were ignored: {listing(unread, 3)}"] if unread else []
    names = sorted({name for images in found.values() for _, name in images})
    index = {name: i for i, name in enumerate(names)}
    listed = {split: [Entry(image, index[name]) for image, name in images] for split, images in found.items()}
    return read_images(root.name, root, listed, names, image_size, skip_broken, notes, broken)


def find_images(path: Path, split: str | None = None) -> tuple[Path, str, PackedText]:
    """Images to predict: one file, or all below a folder, or below its folder for `split` (by default the last).

    Returns the root, where below it the images lie ("test/", or nothing), and their names relative to the root.
    """
    root = (path if path.is_dir() else path.parent).resolve()
    places = _split_folders(root) if path.is_dir() else {"train": root}
    whole = places == {"train": root}
    expect(not whole or split is None, f"{path} has no split {split!r}: expected a folder {path}/{split}")
    place = root if whole else places[choose_split(str(path), places, split)]
    names = PackedText(track(_all_images(place, root), "Listing images") if path.is_dir() else [path.name])
    expect(len(names), f"{path}: holds no image: expected {ENDINGS}")
    return root, "" if whole else f"{place.name}/", names


def _all_images(folder: Path, root: Path) -> Iterator[str]:
    """Names relative to the root, folder by folder, so that only the entries of one are held at a time."""
    here = "" if folder == root else folder.relative_to(root).as_posix() + "/"
    for name, is_dir in _entries(folder, root):
        if is_dir:
            yield from _all_images(folder / name, root)
        elif _is_image(name):
            yield here + name


def _split_folders(root: Path) -> dict[str, Path]:
    """The folder of each split; the root alone where there is no `train` in it."""
    named = [(split, name) for name, is_dir in _entries(root, root) if is_dir and (split := split_name(name))]
    places = {split: root / name for split, name in named}
    if "train" not in places:
        return {"train": root}
    for split, name in named:
        last = places[split].name
        expect(last == name, f"{root}: both {name!r} and {last!r} mean {split}: keep one of them")
    return places


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES


def _entries(folder: Path, root: Path) -> list[tuple[str, bool]]:
    """Names in a folder but hidden ones, and which are folders; links that leave the root or point upwards raise."""
    with os.scandir(folder) as found:
        return sorted((e.name, e.is_dir()) for e in found if not e.name.startswith((".", "__")) and _allowed(e, root))


def _allowed(entry: os.DirEntry[str], root: Path) -> bool:
    if entry.is_symlink():
        target = Path(entry.path).resolve()
        outside = f"{entry.path}: is a link to outside of {root}, which is refused: copy or move its target"
        expect(target.is_relative_to(root), outside)
        upwards = Path(entry.path).parent.resolve().is_relative_to(target)
        expect(not upwards, f"{entry.path}: is a link to a folder that contains it, which is refused: remove it")
    return True


def read_images(
    name: str,
    root: Path,
    listed: Mapping[str, Sequence[Entry]],
    class_names: Sequence[str],
    image_size: int | None,
    skip_broken: bool,
    notes: Sequence[str],
    broken: Sequence[str],  # what is broken already
    normalisation: Normalisation | None = None,
) -> Dataset:
    """Read the headers, choose size and channels, and decode what fits into memory."""
    gone = list(broken)
    headers: list[Header] = []
    usable = {}
    for split, entries in listed.items():
        some = np.unique(np.linspace(0, len(entries) - 1, min(len(entries), HEADERS_READ)).astype(int)).tolist()
        found, wrong = attempt(lambda i, own=entries: header(root / own[i].name), some, "Looking at images")  # type: ignore[misc]
        usable[split] = [entry for i, entry in enumerate(entries) if i not in wrong]
        gone += [f"{entries[i].origin}{wrong[i]}" for i in sorted(wrong)]
        headers += found.values()
    _check_broken(gone, skip_broken)
    expect(headers, f"{name}: no image in {root} can be used ({len(gone)} are broken)")
    size, channels = image_size or default_size(headers), 1 if all(h.grey for h in headers) else 3
    files = {split: ImageFiles(root, PackedText(e.name for e in own), size, channels) for split, own in usable.items()}
    fits = sum(math.prod(own.shape) for own in files.values()) <= FITS_IN_MEMORY
    splits = {}
    for split, own in files.items():
        labels = np.array([entry.label for entry in usable[split]], dtype=np.int64)
        images, wrong = own.decode() if fits else (own, {})
        gone += [f"{usable[split][i].origin}{wrong[i]}" for i in sorted(wrong)]
        kept = np.setdiff1d(np.arange(len(labels)), list(wrong)).astype(np.int64)
        whole = Split(images, labels, own.names)
        splits[split] = whole.take(kept) if wrong else whole
    _check_broken(gone, skip_broken)
    skipped = [f"{len(gone)} broken files, lines or folders were skipped, the first: {gone[0]}"] if gone else []
    data = Dataset.of(name, class_names, splits, [*notes, *_size_note(headers, size), *skipped], normalisation)
    return replace(data, skipped=tuple(gone))


def _check_broken(broken: Sequence[str], skip_broken: bool) -> None:
    """Raise for broken files unless they are to be skipped; many are named at once."""
    if broken and not skip_broken:
        more = f"; ... ({len(broken)} in all)" if len(broken) > MOST_NAMED else ""
        named = "; ".join(broken[:MOST_NAMED])
        raise InputError(f"{named}{more}. Repair or remove what is broken, or leave it out with {SKIPPING}")


def _size_note(headers: Sequence[Header], size: int) -> list[str]:
    sides = {(h.width, h.height) for h in headers}
    if sides == {(size, size)}:
        return []
    pixels = sorted(sides, key=lambda side: side[0] * side[1])
    least, most = (f"{width}x{height}" for width, height in (pixels[0], pixels[-1]))
    come = f"images of {least}" if len(sides) == 1 else f"images from {least} to {most} ({len(sides)} sizes)"
    return [f"{come} become {size}x{size}: the shorter side resized, the centre kept; image_size sets another size"]

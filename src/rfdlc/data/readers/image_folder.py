"""Folders of images: `root/[SPLIT/]CLASS/*.png`."""

import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from pydantic import PositiveInt

from rfdlc.data.dataset import LINKING, SKIPPING, Dataset, choose_split
from rfdlc.data.images import SUFFIXES, PackedText
from rfdlc.data.reader import DataReader, Listing, Place, Request
from rfdlc.data.readers.image_files import (
    Entry,
    Fit,
    ImageOptions,
    Interpolation,
    is_image,
    open_files,
    read_images,
)
from rfdlc.data.samples import UNKNOWN, Samples
from rfdlc.errors import InputError, are, counted, expect, listing
from rfdlc.formats.tables import is_table, split_name
from rfdlc.progress import track

ENDINGS = f"files ending in {listing(sorted(SUFFIXES), 20)}"
# Files that lie beside images and are none: notes, tables, annotations, and what
# systems leave behind. Others, such as .heic and .dcm, may be samples.
BESIDE = frozenset(
    {".txt", ".md", ".pdf", ".csv", ".tsv", ".json", ".xml", ".yaml", ".yml", ".html"}
    | {".db", ".ini", ".log"}
)
UNENDED = "without an ending"  # as those of DICOM may be
MOST_IGNORED = 0.01  # of what may be samples; more is an error


def read(
    place: Place,
    *,
    image_size: PositiveInt | None = None,
    fit: Fit = "auto",
    interpolation: Interpolation = "bilinear",
    cache: Path | None = None,
    skip_broken: bool = False,
    allow_links: bool = False,
) -> Dataset:
    """One folder per class, sorted by name. `allow_links` accepts links to other
    places; `skip_broken` that many files are of a kind, or at a place, not read.
    """
    path = place.path
    root = path.resolve()
    places = _split_folders(root, allow_links)
    whole = places == {"train": root}
    listed: dict[str, list[Entry]] = {split: [] for split in places}
    kinds, broken, deeper, loose = set[str](), list[str](), list[str](), 0
    others = Counter[str]()
    for split, folder in places.items():
        for kind, is_folder in _entries(folder, root, allow_links):
            if not is_folder:
                loose += is_image(kind)
                continue
            inside, below = (
                _entries(folder / kind, root, allow_links),
                (folder / kind).relative_to(root).as_posix(),
            )
            images = [
                name for name, is_dir in inside if not is_dir and is_image(name)
            ]  # a link to nothing is broken
            folders = [f"{below}/{name}" for name, is_dir in inside if is_dir]
            deeper += folders
            for name, is_dir in inside:
                others.update(() if is_dir else _unread_kind(name))
            listed[split] += [Entry(f"{below}/{image}", kind) for image in images]
            broken += (
                []
                if images
                else [
                    f"{folder / kind}: the class folder holds no image (expected"
                    f" {ENDINGS})"
                ]
            )
            kinds.add(kind)
    if kinds and not any(listed.values()):
        held = [
            name
            for name in deeper
            if any(is_image(file) for file, _ in _entries(root / name, root, True))
        ]
        if held:
            told = (
                f"{path}: images lie one level deeper than class folders, in"
                f" {listing(held, 3)}"
            )
            fix = (
                f"give {(root / held[0]).parent} for the classes in it, or move all"
                f" class folders to {path}"
            )
            raise InputError(f"{told}: {fix}")
    if not kinds:
        tables = listing(
            (
                entry.name
                for entry in sorted(path.iterdir())
                if entry.is_file() and is_table(entry)
            ),
            3,
        )
        fix = f"; for a table, name it: {path}/{tables}" if tables else ""
        raise InputError(
            f"{path}: has no class folders with images: expected {path}/CLASS/*.png,"
            f" .jpg, ...{fix}"
        )
    unsplit = (
        f"{path}: has {listing(sorted(kinds))} but no training folder: expected"
        f" {path}/train/CLASS/*.png"
    )
    expect(not (whole and all(map(split_name, kinds))), unsplit)
    inside = _entries(root, root, allow_links)
    beside = [
        name for name, is_dir in inside if is_dir and root / name not in places.values()
    ]
    notes = _ignored(path, listed, others, loose, deeper, root, skip_broken)
    if beside and not whole:
        notes.append(
            f"{len(beside)} folders beside the splits were ignored:"
            f" {listing(beside, 3)}"
        )
    names = sorted(
        {str(entry.label) for entries in listed.values() for entry in entries}
    )
    how = ImageOptions(image_size, fit, interpolation, cache, skip_broken)
    return read_images(root.name, root, listed, names, how, notes, broken)


def _unread_kind(name: str) -> list[str]:
    """The kind of a file that is not read, such as `.heic`; nothing for images."""
    return [] if is_image(name) else [os.path.splitext(name)[1].lower() or UNENDED]


def _told_kinds(others: Mapping[str, int]) -> str:
    """Which kinds of files were ignored, and what to do where they hold images."""
    kinds = [f"{count:,} {kind}" for kind, count in Counter(others).most_common()]
    pictures = sorted({*others} - BESIDE - {UNENDED})
    fix = f"; convert {listing(pictures, 5)} to PNG or JPEG" if pictures else ""
    return f"{listing(kinds, 5)}{fix}"


def _ignored(
    path: Path,
    listed: Mapping[str, Sequence[Entry]],
    others: Mapping[str, int],
    loose: int,
    deeper: Sequence[str],
    root: Path,
    skip_broken: bool,
) -> list[str]:
    """Notes on what is not read: files of `others` kinds, `loose` images, and `deeper`
    folders. Raises where they may be more than MOST_IGNORED of the samples.
    """
    notes, lost = list[str](), loose
    if others:
        lost += sum(count for kind, count in others.items() if kind not in BESIDE)
        count = sum(others.values())
        notes.append(
            f"{counted(count, 'file')} that {are(count)} no image, or of a kind that is"
            f" not read: {_told_kinds(others)}"
        )
    if loose:
        notes.append(
            f"{counted(loose, 'image')} beside class folders, which {are(loose)} in no"
            " class: move into a class folder"
        )
    if deeper:
        inside = sum(1 for name in deeper for _ in _all_images(root / name, root, True))
        lost += inside
        notes.append(
            f"{counted(inside, 'image')} in {counted(len(deeper), 'folder')} inside"
            f" class folders, {listing(deeper, 3)}: move up into the class folder"
        )
    samples = lost + sum(map(len, listed.values()))
    expect(
        skip_broken or lost <= MOST_IGNORED * samples,
        f"{path}: {lost:,} of {counted(samples, 'file')} would be ignored:"
        f" {'; '.join(notes)}; or leave them out with {SKIPPING}",
    )
    return [f"ignored: {note}" for note in notes]


def find_images(
    path: Path,
    split: str | None = None,
    allow_links: bool = False,
    skip_broken: bool = False,
) -> tuple[Path, str, PackedText]:
    """Images to predict: the root, where below it they lie (`test/`, or nothing), and
    their names below the root.
    """
    root = path.resolve()
    places = _split_folders(root, allow_links)
    whole = places == {"train": root}
    expect(
        not whole or split is None,
        f"{path} has no split {split!r}: expected a folder {path}/{split}",
    )
    place = root if whole else places[choose_split(str(path), places, split)]
    others = Counter[str]()
    found = _all_images(place, root, allow_links, others)
    names = PackedText(track(found, "Listing images"))
    kinds = f", but {_told_kinds(others)}" if others else ""
    expect(len(names), f"{path}: holds no image{kinds}: expected {ENDINGS}")
    lost = sum(count for kind, count in others.items() if kind not in BESIDE)
    if lost:
        told = (
            f"{path}: {lost:,} of {counted(len(names) + lost, 'file')} are of a kind"
            f" that is not read: {_told_kinds(others)}"
        )
        expect(
            skip_broken or lost <= MOST_IGNORED * (len(names) + lost),
            f"{told}; or leave them out with {SKIPPING}",
        )
        warnings.warn(told, stacklevel=2)
    return root, "" if whole else f"{place.name}/", names


def common_folder(files: Sequence[Path]) -> tuple[Path, str, PackedText]:
    """As `find_images`, of some files: the root is the folder that holds all of
    them.
    """
    places = [file.parent.resolve() / file.name for file in files]
    root = Path(os.path.commonpath([place.parent for place in places]))
    return root, "", PackedText(place.relative_to(root).as_posix() for place in places)


def list_splits(place: Place, request: Request) -> Listing:
    """The splits, and the folders in them, which may name classes."""
    root = place.path.resolve()
    folders = _split_folders(root, request.allow_links)
    names = set[str]()
    for folder in folders.values():
        entries = _entries(folder, root, request.allow_links)
        names |= {name for name, is_dir in entries if is_dir}
    splits = [""] if folders == {"train": root} else [*folders]
    return Listing(splits, sorted(names))


def open_folder(place: Place, request: Request) -> Samples:
    root, below, names = find_images(
        place.path, request.split, request.allow_links, request.skip_broken
    )
    return _labelled(root, below, names, request)


def open_images(files: Sequence[Path], request: Request) -> Samples:
    """Some files: a folder in them that is named after a class labels its images."""
    root, below, names = common_folder(files)
    return _labelled(root, below, names, request)


def _labelled(root: Path, below: str, names: PackedText, request: Request) -> Samples:
    """A folder named after a class labels its images."""
    place = {name: i for i, name in enumerate(request.spec.classes.names)}
    labels = np.full(len(names), UNKNOWN, dtype=np.int64)
    for row, name in enumerate(names):
        folder, _, rest = name.removeprefix(below).partition("/")
        if rest:
            labels[row] = place.get(folder, UNKNOWN)
    return open_files(root, names, labels, request.spec, request.skip_broken)


def _all_images(
    folder: Path, root: Path, allow_links: bool, others: Counter[str] | None = None
) -> Iterator[str]:
    """Names relative to the root, folder by folder, so that only the entries of one are
    held at a time; `others` counts the kinds of the other files.
    """
    here = "" if folder == root else folder.relative_to(root).as_posix() + "/"
    for name, is_dir in _entries(folder, root, allow_links):
        if is_dir:
            yield from _all_images(folder / name, root, allow_links, others)
        elif is_image(name):
            yield here + name
        elif others is not None:
            others.update(_unread_kind(name))


def _split_folders(root: Path, allow_links: bool = False) -> dict[str, Path]:
    """The folder of each split; the root alone where there is no `train` in it."""
    inside = _entries(root, root, allow_links)
    named = [
        (split, name)
        for name, is_dir in inside
        if is_dir and (split := split_name(name))
    ]
    places = {split: root / name for split, name in named}
    for split, name in named if "train" in places else ():
        last = places[split].name
        expect(
            last == name,
            f"{root}: both {name!r} and {last!r} mean {split}: keep one of them",
        )
    return places if "train" in places else {"train": root}


def _entries(
    folder: Path, root: Path, allow_links: bool = False
) -> list[tuple[str, bool]]:
    """Names in a folder but hidden ones, and which are folders; links that leave the
    root or point upwards raise.
    """
    with os.scandir(folder) as found:
        entries = [entry for entry in found if not entry.name.startswith((".", "__"))]
    for link in (Path(entry.path) for entry in entries if entry.is_symlink()):
        target = link.resolve()
        outside = f"{link}: is a link to outside of {root}, which is refused"
        fix = f"copy its target, or accept such links with {LINKING}"
        expect(allow_links or target.is_relative_to(root), f"{outside}: {fix}")
        upwards = (
            f"{link}: is a link to a folder that contains it, which is refused:"
            " remove it"
        )
        expect(not folder.resolve().is_relative_to(target), upwards)
    return sorted((entry.name, entry.is_dir()) for entry in entries)


IMAGE_FOLDER = DataReader(
    read,
    recognises=lambda place: place.path.is_dir(),
    open=open_folder,
    list_splits=list_splits,
    unlabelled=True,
)

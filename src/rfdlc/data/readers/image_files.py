"""Images in files, and folders of them: `root/[SPLIT/]CLASS/*.png`."""

import math
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from pydantic import PositiveInt

from rfdlc.data.dataset import (
    LINKING,
    SKIPPING,
    Dataset,
    Normalisation,
    Split,
    by_reason,
    choose_split,
)
from rfdlc.data.images import (
    GREY,
    SUFFIXES,
    BrokenImage,
    ImageFiles,
    Packed,
    PackedText,
    Resizing,
    attempt,
)
from rfdlc.errors import InputError, are, counted, expect, listing
from rfdlc.formats.tables import is_table, split_name
from rfdlc.progress import track

Fit = Literal["auto", "crop", "pad", "stretch"]
Interpolation = Literal["bilinear", "bicubic"]
Size = tuple[int, int]

FITS_IN_MEMORY = (
    2 * 2**30
)  # bytes of decoded pixels that are held in memory; more is streamed
CENTRE = (
    224 / 256
)  # of streamed images in evaluation: what resize 256 and centre crop 224 leave
# images are padded where more than this fraction of the training images is longer than
# 2:1
PADDED_FROM = 0.1
# side of padded squares whose images are short, but for those that are larger anyway
LARGEST_PADDED = 96
HEADERS_READ = (
    50_000  # of more files, this many are opened; `rfdlc inspect` looks at all of them
)
RELATIVE = (
    "expected paths relative to the list, or to the folder that --root {} names (root"
    " in Python)"
)
ENDINGS = f"files ending in {listing(sorted(SUFFIXES), 20)}"
# Files that lie beside images and are none: notes, tables, annotations, and what
# systems leave behind. Others, such as .heic and .dcm, may be samples.
BESIDE = frozenset(
    {".txt", ".md", ".pdf", ".csv", ".tsv", ".json", ".xml", ".yaml", ".yml", ".html"}
    | {".db", ".ini", ".log"}
)
UNENDED = "without an ending"  # as those of DICOM may be
MOST_IGNORED = 0.01  # of what may be samples; more is an error


class Entry(NamedTuple):
    """One image: its name relative to a root, its class, and where it is listed, such
    as "list.txt, line 3: ".
    """

    name: str
    label: int | str  # index or name
    origin: str = ""
    group: str | None = None


def read_folder(
    path: Path,
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
    root = path.resolve()
    places = _split_folders(root, allow_links)
    whole = places == {"train": root}
    listed: dict[str, list[Entry]] = {split: [] for split in places}
    kinds, broken, deeper, loose = set[str](), list[str](), list[str](), 0
    others = Counter[str]()
    for split, place in places.items():
        for kind, is_folder in _entries(place, root, allow_links):
            if not is_folder:
                loose += is_image(kind)
                continue
            inside, below = (
                _entries(place / kind, root, allow_links),
                (place / kind).relative_to(root).as_posix(),
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
                    f"{place / kind}: the class folder holds no image (expected"
                    f" {ENDINGS})"
                ]
            )
            kinds.add(kind)
    if kinds and not any(listed.values()):
        held = [
            folder
            for folder in deeper
            if any(is_image(name) for name, _ in _entries(root / folder, root, True))
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


def folder_splits(path: Path, allow_links: bool = False) -> tuple[list[str], list[str]]:
    """The splits of a folder of images ("" where it has none), and the folders in them,
    which may name classes.
    """
    root = path.resolve()
    places = _split_folders(root, allow_links)
    inside = [
        entry
        for place in places.values()
        for entry in _entries(place, root, allow_links)
    ]
    return [""] if places == {"train": root} else list(places), sorted(
        {name for name, is_dir in inside if is_dir}
    )


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


def is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES


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


def leaves(name: str) -> bool:
    """Whether a path is absolute, or may lead out of the folder that it is
    relative to.
    """
    return (
        name.startswith(("/", "\\"))
        or ".." in name.split("/")
        or ":" in name.split("/")[0]
    )


def listed_name(
    name: str,
    root: Path,
    contents: dict[str, frozenset[str]] | None = None,
    allow_links: bool = False,
) -> str:
    """The path relative to the root. Raises for a path that leaves the root, and for a
    file that does not exist.

    `contents` keeps the files of each folder that was listed; without it, existence is
    not checked.
    """
    name = name.removeprefix(f"{root}/")
    fix = f"expected one relative to it, or accept such paths with {LINKING}"
    expect(
        allow_links or not leaves(name),
        f"the path {name!r} leaves the root {root}, or is absolute: {fix}",
    )
    if contents is not None:
        folder, _, file = name.rpartition("/")
        if folder not in contents:  # read once: much faster than one call per file
            contents[folder] = frozenset()
            with suppress(OSError, ValueError):  # it is not there, or cannot be
                contents[folder] = frozenset(os.listdir(root / folder))
        found = file in contents[folder]
        here = not found and os.path.isfile(
            name
        )  # False for a name that is too long, too
        expect(
            found,
            f"the file {root / name} does not exist:"
            f" {RELATIVE.format(Path.cwd() if here else 'DIR')}",
        )
    return name


class ImageOptions(NamedTuple):
    """What the formats of image files have in common."""

    image_size: int | None
    fit: Fit
    interpolation: Interpolation
    cache: Path | None
    skip_broken: bool


def read_images(
    name: str,
    root: Path,
    listed: Mapping[str, Sequence[Entry]],
    class_names: Sequence[str],
    how: ImageOptions,
    notes: Sequence[str],
    broken: Sequence[str],
    normalisation: Normalisation | None = None,
    packed: Mapping[str, Packed] | None = None,
) -> Dataset:
    """Read the headers, choose size and channels, and decode what fits into memory;
    `broken` is what is known.
    """
    gone, usable, sizes, grey = (
        list(broken),
        dict[str, list[Entry]](),
        dict[str, list[Size]](),
        True,
    )
    files = dict[str, ImageFiles]()
    for split, entries in listed.items():
        names = PackedText(entry.name for entry in entries)
        files[split] = ImageFiles(
            root, names, 1, packed=packed[split] if packed else None
        )

        def header(index: int, files: ImageFiles = files[split]) -> tuple[Size, bool]:
            with files.open(index) as image:
                return image.size, image.mode in GREY

        some = np.unique(
            np.linspace(0, len(entries) - 1, min(len(entries), HEADERS_READ)).astype(
                int
            )
        ).tolist()
        found, unread = attempt(header, some, "Looking at images")
        usable[split] = [entry for i, entry in enumerate(entries) if i not in unread]
        if unread:
            files[split] = files[split][
                np.setdiff1d(np.arange(len(entries)), [*unread])
            ]
        gone += [f"{entries[i].origin}{unread[i]}" for i in sorted(unread)]
        sizes[split] = [size for size, _ in found.values()]
        grey = grey and all(is_grey for _, is_grey in found.values())
    if not any(sizes.values()):
        check_broken(gone, how.skip_broken)
    expect(
        any(sizes.values()),
        f"{name}: no image in {root} can be used ({len(gone)} are broken)",
    )
    known, channels = [size for own in sizes.values() for size in own], 1 if grey else 3
    different, (fit, fit_note) = {*known}, _fit(sizes["train"], how.fit)
    side = _side(known, how.image_size, fit)
    fits = sum(map(len, usable.values())) * channels * side**2 <= FITS_IN_MEMORY
    if (
        not fits
    ):  # those that fit are decoded first, so that truncated ones are named, too
        check_broken(gone, how.skip_broken)
    resizing = Resizing(
        fit, how.interpolation, CENTRE if fit == "crop" and not fits else 1.0
    )
    if sizes["train"]:
        usual = float(np.median([resizing.cut(*size) for size in sizes["train"]]))
        typical = np.median(np.array(sizes["train"]), axis=0)
        held = "x".join(
            str(max(1, round(side * each / typical.max()))) for each in typical.tolist()
        )
        long = fit == "pad" and typical.max() > 2 * typical.min()
        resizing = replace(
            resizing, usual_cut=round(usual, 4), content=held if long else ""
        )
        fit_note += (
            f", typically {held} pixels in it, and a larger image_size keeps more"
            if long
            else ""
        )
    index: dict[int | str, int] = {name: i for i, name in enumerate(class_names)}
    splits = {}
    for split, entries in usable.items():
        own = replace(files[split], size=side, channels=channels, resizing=resizing)
        wrong: dict[int, BrokenImage] = {}
        if (
            how.cache is not None
        ):  # more pixels than needed where they are cropped at random
            own, wrong = own.cached(
                how.cache.expanduser(), side if fits else round(side / CENTRE)
            )
        images, damaged = own.decode() if fits else (own, {})
        wrong |= damaged
        gone += [f"{entries[i].origin}{wrong[i]}" for i in sorted(wrong)]
        labels = np.array(
            [index.get(entry.label, entry.label) for entry in entries], dtype=np.int64
        )
        groups = np.array([entry.group for entry in entries])
        decoded = Split(
            images,
            labels,
            own.names,
            None if None in groups else groups,
            files=own if fits else None,
        )
        splits[split] = (
            decoded.take(np.setdiff1d(np.arange(len(own)), [*wrong]))
            if wrong
            else decoded
        )
    check_broken(gone, how.skip_broken)
    notes = [
        *notes,
        *(
            []
            if different == {(side, side)}
            else [_size_note(different, side, fit_note)]
        ),
    ]
    data = Dataset.of(name, class_names, splits, notes, normalisation)
    return replace(data, skipped=tuple(gone), resizing=resizing)


def check_broken(broken: Sequence[str], skip_broken: bool) -> None:
    reasons = by_reason(broken)
    named = "; ".join(
        [*reasons[:10], *([f"... ({len(broken)} in all)"] if len(reasons) > 10 else [])]
    )
    if broken and not skip_broken:
        raise BrokenImage(
            f"{named}. Repair or remove what is broken, or leave it out with {SKIPPING}"
        )


def _side(sizes: Sequence[Size], image_size: int | None, fit: str = "crop") -> int:
    """The side of the square that images become, by default their own, or about their
    own, if it is small.

    Long images that are padded keep about their own number of pixels, up to
    LARGEST_PADDED.
    """
    width, height = min(sizes)
    typical, long = (
        int(np.median([pick(size) for size in sizes])) for pick in (min, max)
    )
    usual = (
        max(32, typical // 4 * 4)
        if typical <= 64
        else max(side for side in (64, 128, 224) if side <= typical)
    )
    if fit == "pad" and long > 2 * typical and usual < LARGEST_PADDED:
        usual = min(
            LARGEST_PADDED,
            long // 4 * 4,
            round(usual * math.sqrt(long / typical)) // 4 * 4,
        )
    return image_size or (
        width if len({*sizes}) == 1 and width == height <= 64 else usual
    )


def _fit(sizes: Sequence[Size], wanted: Fit) -> tuple[str, str]:
    """How training images of these sizes become squares, and why."""
    told = {
        "crop": "the shorter side resized, the centre kept",
        "pad": "resized as a whole, padded",
    }
    told["stretch"] = "stretched"
    if wanted != "auto":
        return wanted, told[wanted]
    long = sum(max(size) > 2 * min(size) for size in sizes) / max(len(sizes), 1)
    fit = "pad" if long > PADDED_FROM else "crop"
    return fit, told[fit] + (
        f" ({long:.0%} of the training images are longer than 2:1)" if long else ""
    )


def _size_note(sizes: set[Size], side: int, fitted: str) -> str:
    least, *_, most = sorted([*sizes] * 2, key=math.prod)
    small, large = (f"{width}x{height}" for width, height in (least, most))
    come = (
        f"images of {small}"
        if len(sizes) == 1
        else f"images from {small} to {large} ({len(sizes)} sizes)"
    )
    return (
        f"{come} become {side}x{side}: {fitted}; data.image_size=N and data.fit=crop,"
        " pad or stretch set others"
    )

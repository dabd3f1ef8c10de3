"""Images in files, whatever lists them: read into memory, or opened in chunks."""

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.dataset import (
    LINKING,
    SKIPPING,
    Dataset,
    Normalisation,
    Split,
    by_reason,
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
from rfdlc.data.samples import Chunk, InputSpec, Samples, digest_of
from rfdlc.errors import InputError, expect, listing

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
LOOKED_FOR = 100  # images that are looked for before any is opened
RELATIVE = (
    "expected paths relative to the list, or to the folder that --root {} names (root"
    " in Python)"
)


class Entry(NamedTuple):
    """One image: its name relative to a root, its class, and where it is listed, such
    as "list.txt, line 3: ".
    """

    name: str
    label: int | str  # index or name
    origin: str = ""
    group: str | None = None


def is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES


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


def open_files(
    root: Path,
    names: PackedText,
    labels: NDArray[np.int64],
    spec: InputSpec,
    skip_broken: bool = False,
    packed: Packed | None = None,
    doubt: str = "",
) -> Samples:
    """Images below a root, or `packed` in shards, as the inputs of a model."""
    shape = spec.input_shape
    if not spec.of_images:
        raise InputError(
            f"{root} holds images, but this model was trained on samples of shape"
            f" {shape}"
        )
    channels, height, width = shape
    if height != width:
        raise InputError(
            f"{root} holds image files, which become squares, but this model was"
            f" trained on arrays of {height}x{width} pixels: give it an array of such"
            " images (.npy, .npz)"
        )
    files = ImageFiles(root, names, width, channels, spec.resizing, packed=packed)
    # One missing image would be broken: without any, the folder is wrong.
    if packed is None and names and not _any_exists(root, names[:LOOKED_FOR]):
        raise InputError(
            f"{root}: holds none of the images, such as {listing(names[:1])}:"
            f" {RELATIVE.format('DIR')}"
        )
    cut = np.zeros(len(names), np.float32)

    def read(rows: range) -> Chunk:
        here = slice(rows.start, rows.stop)
        images, wrong = files[np.array(rows)].decode(cut=cut[here])
        broken = tuple(str(wrong[i]) for i in sorted(wrong))
        check_broken(broken, skip_broken)
        split = Split(images, labels[here], names.take(rows))
        kept = np.setdiff1d(np.arange(len(rows)), [*wrong])
        if broken:
            split = split.take(kept)
        return Chunk(split, broken, kept)

    content = np.frombuffer(files.content_digest().encode(), np.uint8)
    of_features = spec.embedding is not None
    return Samples(
        labels,
        named=True,
        fingerprint=digest_of([*names.packed, labels, content]),
        read=read,
        ids=names,
        doubt=doubt,
        cut_warning=partial(spec.resizing.cut_warning, cut, of_features),
    )


def _any_exists(root: Path, names: Sequence[str]) -> bool:
    return any(os.path.isfile(root / name) for name in names)


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

"""What folders and lists of images share: from names and labels to a Dataset, in memory where they fit."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from rfdlc.data.dataset import SKIPPING, Dataset, Normalisation, Split
from rfdlc.data.images import FITS_IN_MEMORY, BrokenImage, Header, ImageFiles, attempt, check_size, default_size, header
from rfdlc.data.packed import PackedText
from rfdlc.errors import InputError

HEADERS_READ = 50_000  # more files than this: a sample of this many is opened, and `inspect` looks at all of them


@dataclass
class Listed:
    """Image names (relative to a root) with their class indices, and where each was named, for messages."""

    names: list[str] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)  # such as "list.txt, line 3: "; empty where the path says it all

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
    """Look at the headers, choose size and channels, and decode what fits into memory."""
    check_size(image_size)
    gone, told = list(skipped), list(notes)
    headers: list[Header] = []
    checked = {}
    for split, part in listed.items():
        found, broken = _headers(root, part)
        checked[split] = _left(part, broken, skip_broken, gone)
        headers += found.values()
    if not headers:
        raise InputError(f"{name}: no image in {root} can be used ({len(gone)} are broken)")
    size = image_size or default_size(headers)
    channels = 1 if all(h.grey for h in headers) else 3
    told += _size_note(headers, size)
    splits = read_splits(root, checked, size, channels, skip_broken, gone)
    if gone:
        told.append(f"{len(gone)} broken files, lines or folders were skipped, the first: {gone[0]}")
    data = Dataset.of(name, class_names, splits, told, normalisation)
    return replace(data, skipped=tuple(gone))


def _headers(root: Path, part: Listed) -> tuple[dict[int, Header], dict[int, BrokenImage]]:
    count = len(part.names)
    places = np.unique(np.linspace(0, count - 1, min(count, HEADERS_READ)).astype(int)).tolist()
    return attempt(lambda i: header(root / part.names[i]), places, "Looking at images")


def _left(part: Listed, broken: Mapping[int, BrokenImage], skip_broken: bool, gone: list[str]) -> Listed:
    """The images that are not broken; an error for the first that is, unless they are to be skipped and counted."""
    if not broken:
        return part
    messages = [f"{part.origins[i]}{broken[i]}" for i in sorted(broken)]
    if not skip_broken:
        more = f"; {len(messages) - 1} more are broken" if len(messages) > 1 else ""
        raise InputError(f"{messages[0]}{more}. Mend or remove what is broken, or leave it out with {SKIPPING}")
    gone += messages
    return part.without(broken)


def _size_note(headers: Sequence[Header], size: int) -> list[str]:
    sides = {(h.width, h.height) for h in headers}
    if sides == {(size, size)}:
        return []
    pixels = sorted(sides, key=lambda side: side[0] * side[1])
    least, most = (f"{width}x{height}" for width, height in (pixels[0], pixels[-1]))
    come = f"images of {least}" if len(sides) == 1 else f"images from {least} to {most} ({len(sides)} sizes)"
    return [f"{come} are brought to {size}x{size}: the shorter side resized, the centre kept; image_size sets another"]


def read_splits(
    root: Path, listed: Mapping[str, Listed], size: int, channels: int, skip_broken: bool, gone: list[str]
) -> dict[str, Split]:
    """Images in memory where all of them fit, otherwise as files; what was broken is added to `gone`."""
    files = {split: ImageFiles(root, PackedText(part.names), size, channels) for split, part in listed.items()}
    fits = sum(part.nbytes for part in files.values()) <= FITS_IN_MEMORY
    splits = {}
    for split, part in listed.items():
        labels = np.array(part.labels, dtype=np.int64)
        if not fits:
            splits[split] = Split(files[split], labels, files[split].names)
            continue
        images, broken = files[split].decode()
        _left(part, broken, skip_broken, gone)
        whole = Split(images, labels, files[split].names)
        kept = np.setdiff1d(np.arange(len(labels)), np.array(sorted(broken), dtype=np.int64))
        splits[split] = whole.take(kept) if broken else whole
    return splits

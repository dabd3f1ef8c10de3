"""Copies: samples with the same content, and images that look the same, which belong on one side of a split."""

from collections import Counter
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.images import PADDING, ImageFiles

Indices = NDArray[np.int64]

ALIKE = 0.99  # the correlation of two thumbnails from which on images look the same
THUMBNAIL, SMALLEST = 16, 32  # sides of thumbnails, and of images that are compared by them
MOST_COMPARED, MOST_FILES = 20_000, 50_000  # more images, or files, are compared by their content alone, or not at all
MOST_COPIES = 100  # or a hundredth of the samples: what is more frequent is no copy, as in tables with few values
LARGEST_SET = 20  # equal rows that chance does not explain are copies in sets of up to this fraction, 1/20, of all rows
BY_CHANCE = 0.01  # chance explains equal pairs if this share is expected: columns depend on each other, so more occur
ROWS_LOOKED_AT = 10_000  # for how often columns agree
FLAT = 8.0  # the standard deviation of a thumbnail, in grey levels, below which noise lowers correlations
FAINT = 4  # such thumbnails are copies if they differ by what ALIKE allows at FLAT, and by a quarter of their contrast
TAIL = 4096  # bytes at the end of a file that are compared


def first_copies(inputs: NDArray[Any] | ImageFiles) -> Indices:
    """(N,) the first sample of which each is a copy: its own place if it is none.

    Files have the same content if size and last bytes agree. Images in memory are also compared by thumbnails, wherever
    there are not too many. If most rows of features are repeated, and values are few, they are taken for coincidences.
    """
    count = len(inputs)
    if isinstance(inputs, ImageFiles):
        return joined(first_of(_hashed(_ends(inputs)))) if count <= MOST_FILES else np.arange(count)
    if inputs.ndim == 2:
        exact = first_of(_row_hashes(inputs))
        copied = (np.bincount(exact, minlength=count)[exact] > 1).sum()
        if copied and not _by_chance(inputs, exact):
            return joined(exact, count // LARGEST_SET)
        return np.arange(count) if 2 * copied > count else joined(exact)
    exact = first_of(hashes(inputs))
    compared = count <= MOST_COMPARED and min(inputs.shape[2:]) >= SMALLEST
    return joined(_alike(inputs, exact) if compared else exact)


def first_of(keys: NDArray[Any]) -> Indices:
    """(N,) the first place of each key."""
    _, start, numbers = np.unique(keys, return_index=True, return_inverse=True)
    return start[numbers]


def joined(first: Indices, most: int = 0) -> Indices:
    """`first` without the sets that are too large to be copies; the usual limit, or `most` samples if that is more."""
    large = np.bincount(first, minlength=len(first)) > max(MOST_COPIES, len(first) // 100, most)
    return np.where(large[first], np.arange(len(first)), first)


def _by_chance(rows: NDArray[Any], first: Indices) -> bool:
    """Whether independent columns that agree as often as those of different rows explain the pairs of equal rows."""
    different, times = np.unique(first, return_counts=True)
    expected, found = len(rows) ** 2 / 2, (times * (times - 1.0)).sum() / 2
    for column in rows[different[:: 1 + len(different) // ROWS_LOOKED_AT]].T:
        if expected < found * BY_CHANCE:
            return False
        count = np.unique(column, return_counts=True)[1]
        expected *= (count * (count - 1.0)).sum() / max(1, len(column) * (len(column) - 1))
    return bool(expected >= found * BY_CHANCE)


def components(first: Indices, pairs: Indices) -> Indices:
    """(N,) the number of the set that each sample is in."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    count = len(first)
    rows, columns = np.concatenate([np.arange(count), pairs[:, 0]]), np.concatenate([first, pairs[:, 1]])
    graph = coo_array((np.ones(len(rows), dtype=np.int8), (rows, columns)), (count, count))
    return connected_components(graph.tocsr(), directed=False)[1].astype(np.int64)


def hashes(images: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """(N,) of the content of each."""
    return _hashed(np.ascontiguousarray(image).tobytes() for image in images)


def _hashed(contents: Iterable[bytes]) -> NDArray[np.uint64]:
    digests = (blake2b(content, digest_size=8).digest() for content in contents)
    return np.fromiter((int.from_bytes(digest, "little") for digest in digests), np.uint64)


def _row_hashes(rows: NDArray[Any]) -> NDArray[np.uint64]:
    """(N,) hashes of rows of numbers, column by column (splitmix64)."""
    bits = np.ascontiguousarray(rows).view(f"u{rows.itemsize}")
    total = np.zeros(len(rows), dtype=np.uint64)
    for column in range(rows.shape[1]):
        mixed = (total ^ bits[:, column]) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        total = mixed ^ (mixed >> np.uint64(31))
    return total


def _ends(files: ImageFiles) -> Iterator[bytes]:
    """Size and last bytes of each file, or its place where no other has this size."""
    sizes = files.sizes()
    times = Counter(sizes)
    for place, size in enumerate(sizes):
        if size < 0 or times[size] == 1:
            yield f"alone {place}".encode()
            continue
        yield f"{size} ".encode() + files.end(place, size, TAIL)


def _alike(images: NDArray[np.uint8], first: Indices) -> Indices:
    """`first`, with images (N, channels, H, W) joined whose thumbnails are correlated, or nearly equal if faint."""
    small = np.empty((len(images), THUMBNAIL**2), dtype=np.float32)
    edges = np.concatenate([_content(images[i : i + 512]) for i in range(0, max(1, len(images)), 512)])
    for top, bottom, left, right in np.unique(edges, axis=0).tolist():
        places = np.flatnonzero((edges == (top, bottom, left, right)).all(1))
        for rows in np.split(places, range(512, len(places), 512)):
            small[rows] = _thumbnails(images[rows, :, top:bottom, left:right])
    mean, contrast = small.mean(1), small.std(1)
    small -= mean[:, None]
    small /= np.maximum(np.linalg.norm(small, axis=1, keepdims=True), 1e-6)
    for start in range(0, len(small), 256):  # joined block by block: all pairs of images of one camera are too many
        correlation = small[start : start + 256] @ small[start:].T
        pairs = np.argwhere(correlation >= 1 - 1 / (2 * FAINT**2))  # two that differ by a quarter of equal contrasts
        found, pairs = correlation[tuple(pairs.T)], start + pairs
        (a, b), low = contrast[pairs.T], contrast[pairs].min(1)
        apart = (a - b) ** 2 + 2 * a * b * (1 - found) + np.diff(mean[pairs])[:, 0] ** 2  # mean square, in grey levels
        near = (low > 0) & (apart <= np.minimum(2 * (1 - ALIKE) * FLAT**2, (low / FAINT) ** 2))
        pairs = pairs[np.where(low < FLAT, near, found >= ALIKE) & (first[pairs[:, 0]] != first[pairs[:, 1]])]
        first = first_of(components(first, pairs)) if len(pairs) else first
    return first


def _content(images: NDArray[np.uint8]) -> Indices:
    """(N, 4) top, bottom, left and right of what is inside the padding of images (N, channels, H, W).

    Images look alike for padding, which all have. It lies on both sides, as wide on each within a pixel.
    """
    plain = (images == np.array(PADDING[images.shape[1]], np.uint8)[:, None, None]).all(1)
    found = []
    for axis in (2, 1):
        lines, size = plain.all(axis), plain.shape[3 - axis]
        before, after = lines.argmin(1), lines[:, ::-1].argmin(1)  # 0 where all is plain
        both = (before > 0) & (np.abs(before - after) <= 1)
        found += [np.where(both, before, 0), np.where(both, size - after, size)]
    return np.stack(found, 1)


def _thumbnails(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Mean grey values (N, THUMBNAIL**2)."""
    grey = images.astype(np.float32).mean(1)  # (N, H, W)
    for axis in (1, 2):
        edges = np.linspace(0, grey.shape[axis], THUMBNAIL + 1).astype(int)
        sums = np.add.reduceat(grey, edges[:-1], axis)
        grey = sums / np.maximum(np.diff(edges), 1).reshape(-1, *[1] * (2 - axis))  # 0: a pixel is several of these
    return grey.reshape(len(grey), THUMBNAIL**2)

"""Copies: samples with the same content, and near-copies: pictures that were saved
again, resized or brightened.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.images import PADDING, ImageFiles, decoded, upright
from rfdlc.progress import track

if TYPE_CHECKING:
    from PIL.Image import Image

Indices = NDArray[np.int64]

ALIKE = (
    0.97  # the correlation of two thumbnails from which on their pictures are compared
)
THUMBNAIL, SMALLEST, LARGEST = (
    16,
    32,
    128,
)  # sides of thumbnails, of images that are compared, and of what is compared
NEAREST = 4  # pictures with which each is compared, by their thumbnails
APART, EDGES = (
    5.0,
    0.35,
)  # what may be left at a pixel, in grey levels, and of the range around it
NOISE, MOST = 4.5, 10.0  # and times the usual difference, up to so many grey levels
# files are compared so much smaller: compression changes the finest detail most
SHRUNK = 1.25
CALM = 1.5  # times the median range, up to which fine detail is compared
DETAIL = 0.3  # the least correlation of fine detail
WINDOW, RARE = 16, 0.1  # in windows of this side, but for this share of them
MEAN = (1 / 9, 4 / 9, 4 / 9)  # of a pixel and its neighbours, as `_near` has them
LEAST_DETAIL, FAINT = (
    0.3,
    0.25,
)  # mean squares in grey levels: of one window at least; added to all, as noise is
MOST_NEAR, FEW_NEAR = (
    0.05,
    5,
)  # near-copies, of all samples or in all: where more are found, they are not believed
MOST_COMPARED, MOST_FILES = (
    20_000,
    50_000,
)  # more images, or files, are compared by their content alone, or not at all
# or a hundredth of the samples: what is more frequent is no copy, as in tables with few
# values
MOST_COPIES = 100
# equal rows that chance does not explain are copies in sets of up to this fraction,
# 1/20, of all rows
LARGEST_SET = 20
# chance explains equal pairs if this share is expected: columns depend on each other,
# so more occur
BY_CHANCE = 0.01
ROWS_LOOKED_AT = 10_000  # for how often columns agree
TAIL = 4096  # bytes at the end of a file that are compared


def first_copies(inputs: NDArray[Any] | ImageFiles) -> Indices:
    """(N,) the first sample with the same content as each: its own place if there is no
    earlier one.

    Files have the same content if size and last bytes agree. If most rows of features
    are repeated, and values are few, they are taken for coincidences.
    """
    count = len(inputs)
    if isinstance(inputs, ImageFiles):
        return (
            joined(first_of(_hashed(_ends(inputs))))
            if count <= MOST_FILES
            else np.arange(count)
        )
    if inputs.ndim == 2:
        exact = first_of(_row_hashes(inputs))
        copied = (np.bincount(exact, minlength=count)[exact] > 1).sum()
        if copied and not _by_chance(inputs, exact):
            return joined(exact, count // LARGEST_SET)
        return np.arange(count) if 2 * copied > count else joined(exact)
    return joined(first_of(hashes(inputs)))


def near_copies(
    splits: Sequence[NDArray[Any] | ImageFiles], files: Sequence[ImageFiles | None] = ()
) -> Indices:
    """(P, 2) images in memory, each with an earlier one of which it is a near-copy;
    numbered from split to split.

    Thumbnails choose the nearest few, whose pictures are then compared, and at last the
    files that they were read from. An image with several has the first of them that is
    a near-copy of none, so that a set has nothing but copies of its first. Images of
    equal content are compared once.
    """
    count = sum(map(len, splits))
    images = [own for own in splits if isinstance(own, np.ndarray) and own.ndim == 4]
    small = len(images) < len(splits) or any(
        min(own.shape[2:]) < SMALLEST for own in images
    )
    if small or not 1 < count <= MOST_COMPARED:
        return np.empty((0, 2), dtype=np.int64)
    exact = first_of(np.concatenate([hashes(own) for own in images]))
    pictures = [picture for own in images for picture in _pictures(own)]
    sources = [
        *chain.from_iterable(
            [(own, i) for i in range(len(own))] for own in files if own is not None
        )
    ]

    @lru_cache(maxsize=1000)
    def original(place: int) -> "Image":
        return _original(*sources[place])

    def same(one: int, other: int) -> bool:
        known = len(sources) == count  # then smaller pictures are a first filter
        alike = same_picture(
            pictures[one], pictures[other], DETAIL / 3 if known else DETAIL
        )
        return alike and (not known or _same_original(original(one), original(other)))

    lead, pairs = np.arange(count), list[tuple[int, int]]()
    alone = np.flatnonzero(exact == lead)
    thumbnails = np.concatenate([_thumbnails_of(own) for own in images])
    for place, near in track(
        _nearest(thumbnails, alone), "Comparing images", total=len(alone)
    ):
        found = [other for other in near if same(place, other)]
        leads = [other for other in found if lead[other] == other]
        leads = leads or [
            own for own in {int(lead[other]) for other in found} if same(place, own)
        ]
        if found:
            pairs.append((place, (leads or found)[0]))
            lead[place] = leads[0] if leads else place
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def with_near_copies(first: Indices, pairs: Indices) -> Indices:
    """`first`, with each near-copy in the set of its first picture; copies of
    near-copies alone join nothing.
    """
    lead = np.arange(len(first))
    leads = pairs[~np.isin(pairs[:, 1], pairs[:, 0])]
    lead[leads[:, 0]] = leads[:, 1]
    return joined(first_of(first[lead[first]]))


def same_picture(
    one: NDArray[np.uint8], other: NDArray[np.uint8], least: float = DETAIL
) -> bool:
    """Whether two pictures (H, W) differ by blur, brightness and compression alone, at
    every place.

    The sharper one predicts the other: as itself, blurred or sharpened, brighter or
    darker. What is left must be small at every pixel, and the fine detail that is
    predicted, noise included, must be there in nearly all windows.
    """
    if one.shape != other.shape:
        return False
    sharp = sorted(
        map(_near, (one, other)),
        key=lambda near: -float(np.square(near[0] - near[1]).mean()),
    )
    terms, target = (
        (sharp[0] - sharp[0].mean((1, 2), keepdims=True)).reshape(3, -1),
        sharp[1][0] - sharp[1][0].mean(),
    )
    weights = np.linalg.solve(
        terms @ terms.T + 1e-3 * terms.shape[1] * np.eye(3), terms @ target.ravel()
    )
    predicted = (weights @ terms).reshape(target.shape)
    left = np.abs(target - predicted)
    allowed = APART + min(MOST, NOISE * float(np.median(left)))
    if (left > allowed + EDGES * np.ptp(target)).any():  # most pairs end here
        return False
    from scipy.ndimage import maximum_filter, minimum_filter

    ranges = np.minimum(
        *(
            maximum_filter(each, 5) - minimum_filter(each, 5)
            for each in (predicted, target)
        )
    )
    if (left > allowed + EDGES * ranges).any() or not ranges.any():
        return False
    calm = ranges <= CALM * np.median(
        ranges[ranges > 0]
    )  # edges are those of all pictures of a thing
    detail, known = (
        (near[0] - np.tensordot(MEAN, near, 1)) * calm
        for near in (_near(predicted), sharp[1])
    )
    both, sizes = (
        _windows(detail * known),
        np.sqrt(_windows(detail**2) * _windows(known**2)),
    )
    return bool(
        sizes.max() >= LEAST_DETAIL
        and np.quantile((both + FAINT) / (sizes + FAINT), RARE) >= least
    )


def _original(files: ImageFiles, index: int) -> "Image":
    """The picture in a file, grey and upright; of a large JPEG a smaller one."""
    with files.open(index) as image:
        image.draft("L", (2 * LARGEST, 2 * LARGEST))
        return upright(decoded(image, 1))


def _same_original(one: "Image", other: "Image") -> bool:
    """As `same_picture`, of images of any size: at that of the smaller one, with sides
    up to twice LARGEST.
    """
    sizes = np.array([one.size, other.size])
    small = sizes[sizes.prod(1).argmin()]
    if (
        abs(np.log(sizes[0] / sizes[1]) @ (1, -1)) > 2 / small.min()
    ):  # sides differ by more than a pixel
        return False
    width, height = (
        np.rint(small / max(SHRUNK, small.max() / (2 * LARGEST))).astype(int).tolist()
    )
    return same_picture(
        np.asarray(one.resize((width, height))),
        np.asarray(other.resize((width, height))),
    )


def _near(picture: NDArray[Any]) -> NDArray[np.float32]:
    """(3, H, W): each pixel, the mean of the four beside it, and of the four diagonal
    ones.
    """
    p = np.empty((picture.shape[0] + 2, picture.shape[1] + 2), dtype=np.float32)
    p[1:-1, 1:-1] = picture
    p[[0, -1], 1:-1] = p[[1, -2], 1:-1]
    p[:, [0, -1]] = p[:, [1, -2]]
    beside = p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:]
    return np.stack(
        [
            p[1:-1, 1:-1],
            beside / 4,
            (p[:-2, :-2] + p[2:, 2:] + p[2:, :-2] + p[:-2, 2:]) / 4,
        ]
    )


def _windows(values: NDArray[Any]) -> NDArray[Any]:
    """Means in windows of about WINDOW pixels."""
    for axis in (0, 1):
        edges = np.linspace(
            0, values.shape[axis], max(1, values.shape[axis] // WINDOW) + 1
        ).astype(int)
        values = np.add.reduceat(values, edges[:-1], axis) / np.diff(edges).reshape(
            -1, *[1] * (1 - axis)
        )
    return values


def first_of(keys: NDArray[Any]) -> Indices:
    """(N,) the first place of each key."""
    _, start, numbers = np.unique(keys, return_index=True, return_inverse=True)
    return start[numbers]


def joined(first: Indices, most: int = 0) -> Indices:
    """`first` without the sets that are too large to be copies; the usual limit, or
    `most` samples if that is more.
    """
    large = np.bincount(first, minlength=len(first)) > max(
        MOST_COPIES, len(first) // 100, most
    )
    return np.where(large[first], np.arange(len(first)), first)


def _by_chance(rows: NDArray[Any], first: Indices) -> bool:
    """Whether independent columns that agree as often as those of different rows
    explain the pairs of equal rows.
    """
    different, times = np.unique(first, return_counts=True)
    expected, found = len(rows) ** 2 / 2, (times * (times - 1.0)).sum() / 2
    for column in rows[different[:: 1 + len(different) // ROWS_LOOKED_AT]].T:
        if expected < found * BY_CHANCE:
            return False
        count = np.unique(column, return_counts=True)[1]
        expected *= (count * (count - 1.0)).sum() / max(
            1, len(column) * (len(column) - 1)
        )
    return bool(expected >= found * BY_CHANCE)


def components(first: Indices, pairs: Indices) -> Indices:
    """(N,) the number of the set that each sample is in."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    count = len(first)
    rows, columns = (
        np.concatenate([np.arange(count), pairs[:, 0]]),
        np.concatenate([first, pairs[:, 1]]),
    )
    graph = coo_array(
        (np.ones(len(rows), dtype=np.int8), (rows, columns)), (count, count)
    )
    return connected_components(graph.tocsr(), directed=False)[1].astype(np.int64)


def hashes(images: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """(N,) of the content of each."""
    return _hashed(np.ascontiguousarray(image).tobytes() for image in images)


def _hashed(contents: Iterable[bytes]) -> NDArray[np.uint64]:
    digests = (blake2b(content, digest_size=8).digest() for content in contents)
    return np.fromiter(
        (int.from_bytes(digest, "little") for digest in digests), np.uint64
    )


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


def _thumbnails_of(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Thumbnails (N, THUMBNAIL**2) of what is inside the padding of images (N,
    channels, H, W).
    """
    small = np.empty((len(images), THUMBNAIL**2), dtype=np.float32)
    edges = np.concatenate(
        [_content(images[i : i + 512]) for i in range(0, max(1, len(images)), 512)]
    )
    for top, bottom, left, right in np.unique(edges, axis=0).tolist():
        places = np.flatnonzero((edges == (top, bottom, left, right)).all(1))
        for rows in np.split(places, range(512, len(places), 512)):
            small[rows] = _thumbnails(images[rows, :, top:bottom, left:right])
    return small


def _nearest(
    small: NDArray[np.float32], places: Indices
) -> Iterator[tuple[int, list[int]]]:
    """Each place, and the earlier ones whose thumbnails are most like its own, if they
    are ALIKE or faint.
    """
    small = small[places] - small[places].mean(1, keepdims=True)
    contrast = np.linalg.norm(small, axis=1)
    small /= np.maximum(contrast, 1e-6)[:, None]
    faint = (
        1 - THUMBNAIL**2 / 2 / np.maximum(contrast, 1e-6) ** 2
    )  # differ by one grey level
    for start in range(0, len(small), 256):
        block = small[start : start + 256]
        likeness = block @ small[: start + len(block)].T
        for row, own in enumerate(likeness, start):
            near = np.flatnonzero(own[:row] >= np.minimum(ALIKE, faint[row]))
            yield (
                int(places[row]),
                places[near[np.argsort(-own[near], kind="stable")[:NEAREST]]].tolist(),
            )


def _pictures(images: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
    """Grey pictures of images (N, channels, H, W), of sides up to LARGEST: of more, the
    means of squares of pixels.
    """
    factor = -(-max(images.shape[2:]) // LARGEST)
    for image in images:
        grey = image[0] if len(image) == 1 else image.mean(0, dtype=np.float32)
        height, width = (side // factor * factor for side in grey.shape)
        squares = grey[:height, :width].reshape(
            height // factor, factor, width // factor, factor
        )
        yield (
            grey
            if factor == 1 and grey.dtype == np.uint8
            else np.rint(squares.mean((1, 3))).astype(np.uint8)
        )


def _content(images: NDArray[np.uint8]) -> Indices:
    """(N, 4) top, bottom, left and right of what is inside the padding of images (N,
    channels, H, W).

    Images look alike for padding, which all have. It lies on both sides, as wide on
    each within a pixel.
    """
    plain = (images == np.array(PADDING[images.shape[1]], np.uint8)[:, None, None]).all(
        1
    )
    found = []
    for axis in (2, 1):
        lines, size = plain.all(axis), plain.shape[3 - axis]
        before, after = (
            lines.argmin(1),
            lines[:, ::-1].argmin(1),
        )  # 0 where all is plain
        both = (before > 0) & (np.abs(before - after) <= 1)
        found += [np.where(both, before, 0), np.where(both, size - after, size)]
    return np.stack(found, 1)


def _thumbnails(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Mean grey values (N, THUMBNAIL**2)."""
    grey = images.astype(np.float32).mean(1)  # (N, H, W)
    for axis in (1, 2):
        edges = np.linspace(0, grey.shape[axis], THUMBNAIL + 1).astype(int)
        sums = np.add.reduceat(grey, edges[:-1], axis)
        grey = sums / np.maximum(np.diff(edges), 1).reshape(
            -1, *[1] * (2 - axis)
        )  # 0: a pixel is several of these
    return grey.reshape(len(grey), THUMBNAIL**2)

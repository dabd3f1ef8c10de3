"""Data with a class that is not trained on, for `unfamiliar.py simulate`: near rare or
frequent classes, or elsewhere.

Each gives training samples with a long tail and their classes, test samples with as
many of each class, and new ones.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.decomposition import TruncatedSVD

Array = NDArray[Any]
Parts = tuple[Array, Array, Array, Array, Array]
PLACES = ("any", "rare", "frequent", "far")
NEW = 300  # samples of the new class


def labels(most: int, least: int, classes: int, test: int) -> tuple[Array, Array]:
    """Of training samples, from the most frequent class to the rarest, and of test
    samples.
    """
    counts = np.round(np.geomspace(most, least, classes)).astype(int)
    return np.repeat(np.arange(classes), counts), np.repeat(np.arange(classes), test)


def like(place: str, classes: int, rng: np.random.Generator) -> int:
    """The class that the new one is near: of the rarest or the most frequent third."""
    third = classes // 3
    return int(
        rng.integers(classes - third, classes)
        if place == "rare"
        else rng.integers(third)
    )


def gaussians(
    place: str, seed: int, classes: int, width: int, most: int, apart: float
) -> Parts:
    """Gaussian classes in six groups, with variances that fall from one direction to
    the next.
    """
    rng, spectrum = np.random.default_rng(seed), np.geomspace(1, 0.1, width)
    turned = np.linalg.qr(rng.normal(size=(width, width)))[0]
    centres, group = (
        apart * rng.normal(size=(6, width)) * spectrum,
        rng.permutation(np.arange(classes) % 6),
    )
    means = centres[group] + apart * rng.normal(size=(classes, width)) * spectrum
    beside = apart * rng.normal(size=width) * spectrum
    if place in ("rare", "frequent"):
        new = means[like(place, classes, rng)] + 0.7 * beside
    else:
        new = 2 * beside if place == "far" else centres[rng.integers(6)] + beside
    train, test = labels(most, 12, classes, 200)

    def drawn(mean: Array) -> Array:
        return np.asarray(
            (mean + 1.6 * rng.normal(size=mean.shape) * np.sqrt(spectrum)) @ turned
        )

    return (
        drawn(means[train]),
        train,
        drawn(means[test]),
        test,
        drawn(np.tile(new, (NEW, 1))),
    )


def texts(place: str, seed: int) -> Parts:
    """Embeddings (128 numbers) of texts of 28 words: topics that classes share, and
    words of their own.
    """
    rng, classes, words, topics = np.random.default_rng(seed), 25, 1000, 30
    topic, usual = (
        rng.dirichlet(np.full(words, 0.03), topics),
        rng.dirichlet(np.full(words, 0.3)),
    )
    mixed = rng.dirichlet(np.full(topics, 0.25), classes + 1)
    own, share = (
        rng.dirichlet(np.full(words, 0.02), classes + 1),
        np.full(classes + 1, 0.17),
    )
    if place in ("rare", "frequent"):
        near = like(place, classes, rng)
        mixed[-1], own[-1] = (
            0.6 * mixed[near] + 0.4 * mixed[-1],
            0.5 * own[near] + 0.5 * own[-1],
        )
    share[-1] = 0.5 if place == "far" else 0.17
    train, test = labels(800, 12, classes, 100)

    def counted(y: Array) -> Array:
        found = np.empty((len(y), words), dtype=np.float32)
        for row, c in zip(found, y, strict=True):
            p = (
                0.45 * usual
                + (0.55 - share[c]) * (rng.dirichlet(6 * mixed[c] + 1e-3) @ topic)
                + share[c] * own[c]
            )
            row[:] = rng.multinomial(max(5, rng.poisson(28)), p / p.sum())
        return np.log1p(found)

    known, *others = (counted(y) for y in (train, test, np.full(NEW, classes)))
    weights = np.log(len(known) / (1 + (known > 0).sum(axis=0)))
    scaled = [
        x * weights / np.maximum(np.linalg.norm(x * weights, axis=1)[:, None], 1e-9)
        for x in (known, *others)
    ]
    x, test_x, new = map(
        TruncatedSVD(128, random_state=0).fit(scaled[0]).transform, scaled
    )
    return x, train, test_x, test, new


def digits(left: int, seed: int, projected: bool = False) -> Parts:
    """Handwritten digits without one of them, 64 pixels or 256 random features; the
    others in a random order.
    """
    (x, y), rng = load_digits(return_X_y=True), np.random.default_rng(seed)
    x = np.maximum(x @ rng.normal(0, 0.125, (64, 256)), 0) if projected else x
    counts, train, test = np.bincount(labels(110, 8, 9, 0)[0]), [], []
    for count, digit in zip(
        counts, rng.permutation(np.delete(np.arange(10), left)), strict=True
    ):
        rows = rng.permutation(np.flatnonzero(y == digit))
        train.append(rows[:count])
        test.append(rows[110:])
    codes = [
        np.repeat(np.arange(9), [len(rows) for rows in part]) for part in (train, test)
    ]
    return (
        x[np.concatenate(train)],
        codes[0],
        x[np.concatenate(test)],
        codes[1],
        x[y == left],
    )

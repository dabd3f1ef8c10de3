"""Scores of unfamiliar samples that `unfamiliar.py` compares: of logits and of
features, larger for less familiar.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.decisions.unfamiliar import FeatureDistance, energy
from rfdlc.probabilities.scores import Scores, softmax
from rfdlc.probabilities.uncertainty import entropy, mutual_information

Array = NDArray[Any]
Parts = dict[str, Array]
SHRINKAGE, NEIGHBOURS = 1e-3, 5


def mahalanobis(x: Array, y: Array) -> Callable[[Array], Array]:
    """Plain: the smallest squared distance from a class mean with the covariance within
    classes (Lee et al. 2018).
    """
    means = np.stack([x[y == c].mean(axis=0) for c in np.unique(y)])
    centred = x - means[np.unique(y, return_inverse=True)[1]]
    covariance = centred.T @ centred / len(x)
    covariance += (
        SHRINKAGE * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    )
    white = np.linalg.inv(np.linalg.cholesky(covariance)).T
    known = means @ white
    return lambda z: (
        ((z @ white) ** 2).sum(1)
        + np.min((known**2).sum(1) - 2 * (z @ white) @ known.T, axis=1)
    )


def neighbours(x: Array) -> Callable[[Array], Array]:
    """Minus the cosine of the angle to the k-th nearest training sample (Sun et al.
    2022).
    """

    def unit(z: Array) -> Array:
        return np.asarray(
            z / np.maximum(np.linalg.norm(z, axis=1, keepdims=True), 1e-12)
        )

    known = unit(x)
    return lambda z: (
        -np.partition(unit(z) @ known.T, -NEIGHBOURS, axis=1)[:, -NEIGHBOURS]
    )


def relative(
    x: Array, y: Array, shrinkage: float, unit: bool = True
) -> Callable[[Array], Array]:
    """`FeatureDistance` with another shrinkage of the covariances, and of features of
    any length.
    """

    def scaled(z: Array) -> Array:
        return (
            z / np.maximum(np.linalg.norm(z, axis=1, keepdims=True), 1e-12)
            if unit
            else z
        )

    def whitening(centred: Array) -> Array:
        covariance = centred.T @ centred / len(centred)
        identity = np.trace(covariance) / len(covariance) * np.eye(len(covariance))
        return np.linalg.inv(
            np.linalg.cholesky((1 - shrinkage) * covariance + shrinkage * identity)
        ).T

    known, counts = scaled(x), np.bincount(y)
    means = np.stack([known[y == c].mean(axis=0) for c in range(len(counts))])
    within, overall = whitening(known - means[y]), whitening(known - known.mean(axis=0))
    spread, places = (
        (((known - means[y]) @ within) ** 2).sum(axis=1).mean(),
        means @ within,
    )

    def score(z: Array) -> Array:
        white = scaled(z) @ within
        squares = (
            (white**2).sum(axis=1)[:, None]
            - 2 * white @ places.T
            + (places**2).sum(axis=1)
        )
        nearest = (squares - spread / 2 / counts).min(axis=1)
        return np.asarray(
            nearest - (((scaled(z) - known.mean(axis=0)) @ overall) ** 2).sum(axis=1)
        )

    return score


def residual(x: Array) -> Callable[[Array], Array]:
    """The length of what is outside the principal subspace with 95% of the variance (as
    in Wang et al. 2022).
    """
    centre = x.mean(axis=0)
    values, vectors = np.linalg.eigh((x - centre).T @ (x - centre) / len(x))
    outside = vectors[:, np.cumsum(values) < 0.05 * values.sum()]
    return lambda z: np.asarray(np.linalg.norm((z - centre) @ outside, axis=1))


def generalised_entropy(p: Array) -> Array:
    """sum (p (1 - p))^0.1 of the most probable tenth of the classes, at least ten (Liu
    et al. 2023).
    """
    top = -np.sort(-p, axis=-1)[..., : max(10, p.shape[-1] // 10)]
    return np.asarray((np.maximum(top * (1 - top), 1e-30) ** 0.1).sum(axis=-1))


def of_logits(logits: Array) -> Parts:
    """By name, larger is less familiar, from logits (M, N, C)."""
    each = softmax(logits)
    p = each.mean(axis=0)
    return {
        "energy": energy(Scores(logits, True)),
        "largest logit": -logits.max(axis=2).mean(axis=0),
        "largest probability": -p.max(axis=1),
        "log probability": -np.log(p.max(axis=1)),
        "entropy": entropy(p),
        "generalised entropy": generalised_entropy(p),
        "generalised entropy of each": generalised_entropy(each).mean(axis=0),
        "disagreement": np.nan_to_num(mutual_information(each)),  # 0 for one particle
    }


def of_features(x: Array, y: Array) -> Callable[[Array], Parts]:
    """By name, larger is less familiar, from features."""
    each: dict[str, Callable[[Array], Array]] = {
        "distance": FeatureDistance.fit(x, y),
        "residual": residual(x),
    }
    each |= {
        f"distance, {shrinkage:g}": relative(x, y, shrinkage)
        for shrinkage in (0.01, 0.1, 0.5)
    }
    each |= {
        f"distance of any length, {shrinkage:g}": relative(x, y, shrinkage, False)
        for shrinkage in (0.01, 0.1)
    }
    each |= {"Mahalanobis": mahalanobis(x, y), "neighbours": neighbours(x)}
    each["shortness"] = lambda z: -np.linalg.norm(z, axis=1)
    return lambda z: {name: score(z) for name, score in each.items()}

"""Uncertainty of predictions: one number per sample, larger for a less certain
prediction.
"""

import numpy as np
from numpy.typing import NDArray

from rfdlc.errors import expect
from rfdlc.probabilities.scores import Floats, safe_log, softmax


def entropy(probabilities: Floats, *, normalised: bool = False) -> NDArray[np.floating]:
    """-sum_c p(c) log p(c) in nats of (..., C); `normalised` divides by log C, so 1 is
    uniform.
    """
    # 0 log 0 is 0, because the logarithm of the floor is multiplied by 0. `+ 0.0` turns
    # -0 into 0.
    nats = -np.einsum("...c,...c->...", probabilities, safe_log(probabilities)) + 0.0
    return (
        nats / np.log(probabilities.shape[-1])
        if normalised and probabilities.shape[-1] > 1
        else nats
    )


def max_probability(probabilities: Floats) -> NDArray[np.floating]:
    """1 - max_c p(c) of (..., C) (Hendrycks and Gimpel 2017)."""
    return 1 - probabilities.max(axis=-1)


def mutual_information(probabilities: Floats) -> NDArray[np.floating]:
    """Entropy of the mean minus mean entropy over particles (M, N, C): how much they
    disagree; NaN of a single one.
    """
    if len(probabilities) == 1:  # 0 would read as no doubt
        return np.full(probabilities.shape[1], np.nan)
    return np.maximum(
        entropy(probabilities.mean(axis=0)) - entropy(probabilities).mean(axis=0), 0
    )


def disagreement(values: Floats, logits: bool) -> NDArray[np.floating]:
    """Mutual information of two or more particles (M, N, C); raises InputError
    for one.
    """
    told = (
        "uncertainty 'mutual-information' is the disagreement of particles, and there"
        " is one"
    )
    expect(len(values) > 1, f"{told}: expected two or more; choose entropy")
    return mutual_information(particle_probabilities(values, logits))


def evidential(logits: Floats) -> NDArray[np.floating]:
    """C / (sum_c max(logit_c, 0) + C) of (..., C): the paper's form of evidential
    uncertainty.
    """
    classes = logits.shape[-1]
    return classes / (np.maximum(logits, 0).sum(axis=-1) + classes)


def particle_probabilities(values: Floats, logits: bool) -> Floats:
    """Each particle's own probabilities (M, N, C), uncalibrated."""
    return softmax(values) if logits else values

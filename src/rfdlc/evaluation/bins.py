"""Bins of probabilities, in which the calibration error is measured."""

import numpy as np

from rfdlc.probabilities.classes import Indices
from rfdlc.probabilities.scores import Floats
from rfdlc.statistics.intervals import Array

ECE_BINS = 15
PRECISION = 1e-6  # of probabilities in 32 bits


def bin_of(confidence: Floats, precision: float = PRECISION) -> Indices:
    """The bin of the calibration error: equal widths, (lower, upper]; 0 belongs to the
    first.

    What is above an edge by rounding alone, a share of `precision`, is on it: 3 * 0.2
    is in the bin of 0.6.
    """
    scaled = np.ceil(confidence * np.float64(ECE_BINS * (1 - precision)))
    return np.clip(scaled, 1, ECE_BINS).astype(np.intp) - 1


def classwise_gaps(probabilities: Floats, targets: Indices) -> Array:
    """Per class and bin (C, bins) the sum over samples of 1{y = c} - p(c): sums over
    chunks of the data add up.
    """
    classes = probabilities.shape[1]
    place = bin_of(probabilities) + np.arange(classes) * ECE_BINS
    gaps: Array = -np.bincount(
        place.ravel(), probabilities.ravel(), classes * ECE_BINS
    ).astype(np.float64)
    np.add.at(gaps, place[np.arange(len(targets)), targets], 1)
    return gaps.reshape(classes, ECE_BINS)

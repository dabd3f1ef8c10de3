"""How well a confidence ranks correct before wrong decisions."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from rfdlc.statistics.intervals import (
    FEWEST_ERRORS,
    LEVEL,
    NAN,
    Array,
    Estimate,
    Interval,
    Mask,
)

Confidence = NDArray[np.floating[Any]]


def roc_area(correct: Mask, confidence: Confidence) -> Estimate:
    """Probability that a correct decision has a higher confidence than a wrong one,
    ties counting half (DeLong).
    """
    high = np.sort(confidence[correct])
    low = np.sort(confidence[~correct])
    if not len(high) or not len(low):
        return Estimate(NAN)

    # The share of the other kind that each sample is ranked right against.
    placement = np.empty(len(correct))
    for mask, others in ((correct, low), (~correct, high)):
        below = np.searchsorted(others, confidence[mask], "left")
        below_or_equal = np.searchsorted(others, confidence[mask], "right")
        placement[mask] = (below + below_or_equal) / 2 / len(others)
    value = float(placement[correct].mean())

    influence = np.empty(len(correct))
    for mask, sign in ((correct, 1), (~correct, -1)):
        samples = max(2, int(mask.sum()))
        centred = placement[mask] - placement[mask].mean()
        influence[mask] = sign * centred / np.sqrt(samples * (samples - 1))
    return ranking_estimate(value, influence, correct)


def risk_coverage(correct: Mask, confidence: Confidence) -> tuple[Array, Array]:
    """Coverage k/N and the error rate among the k most confident samples, for k = 1..N.

    Errors are spread evenly over samples of equal confidence, so the order of the
    samples does not matter.
    """
    _, place, count = np.unique(
        -np.asarray(confidence), return_inverse=True, return_counts=True
    )
    error_rates = np.bincount(place, weights=~correct, minlength=len(count)) / count
    errors = np.repeat(error_rates, count)
    kept = np.arange(1, len(errors) + 1)
    return kept / max(1, len(errors)), np.cumsum(errors) / kept


def risk_area(correct: Mask, confidence: Confidence) -> Estimate:
    """The mean over all coverages of the error rate."""
    risk = risk_coverage(correct, confidence)[1]
    if not len(risk):
        return Estimate(NAN)
    order = np.argsort(-confidence, kind="stable")
    kept = np.arange(1, len(risk) + 1)
    # A sample moves the error rate at its own place, and at those of all less confident
    # samples.
    later_share = np.cumsum((1 / kept)[::-1])[::-1]
    later_risk = np.cumsum((risk / kept)[::-1])[::-1]
    moved = risk - risk.mean() + ~correct[order] * later_share - later_risk
    influence = np.empty(len(risk))
    influence[order] = moved / len(risk)
    return ranking_estimate(float(risk.mean()), influence, correct)


def ranking_estimate(value: float, influence: Array, correct: Mask) -> Estimate:
    """A number between 0 and 1 about a ranking, with an interval by the t distribution
    of its logit.

    There is no interval with fewer than `FEWEST_ERRORS` correct or wrong decisions.
    """

    def interval(effect: float = 1.0) -> Interval | None:
        fewest = min(int(correct.sum()), int((~correct).sum()))
        if fewest < FEWEST_ERRORS or not 0 < value < 1:
            return None
        quantile = special.stdtrit(fewest, (1 + LEVEL) / 2)
        error = quantile * np.linalg.norm(influence) / (value * (1 - value))
        error *= np.sqrt(effect)
        centre = special.logit(value)
        return float(special.expit(centre - error)), float(
            special.expit(centre + error)
        )

    return Estimate(value, interval, lambda: influence, 0.0)

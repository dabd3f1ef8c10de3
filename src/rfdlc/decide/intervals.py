"""Estimates with 95% intervals: analytic for means, by test inversion for ECE.

The model, its calibration and the decision rule are held fixed; so is the number of samples per class where strata are
classes. Intervals are about other test samples of the same kind.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from rfdlc.decide.classes import Indices

LEVEL = 0.95
SMOOTHING, DRAWS = 10, 200
FEWEST = 10  # samples of an interval that rests on more than a share
Interval = tuple[float, float]
Array = NDArray[np.float64]


def wilson(share: float, samples: int) -> Interval:
    """Wilson's score interval of a share.

    >>> [round(bound, 2) for bound in wilson(1.0, 3)]
    [0.44, 1.0]
    """
    z2 = float(stats.norm.ppf((1 + LEVEL) / 2) ** 2)
    centre = (share + z2 / (2 * samples)) / (1 + z2 / samples)
    half = (z2 * (share * (1 - share) / samples + z2 / (4 * samples**2))) ** 0.5 / (1 + z2 / samples)
    return min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))


@dataclass(frozen=True)
class Mean:
    """The mean of one value per sample, or a weighted sum of the means of strata, whose values are from 0 to 1.

    `values` (N,) are NaN where a sample does not count.
    """

    values: Array
    strata: Indices | None = None
    weights: NDArray[Any] | None = None  # one per stratum, by default equal for those that have samples

    @property
    def _parts(self) -> tuple[NDArray[np.bool_], Indices, NDArray[Any], Array, Array]:
        """Which samples count, their strata, and per stratum: samples, mean and weight."""
        counts = ~np.isnan(self.values)
        place = np.zeros(len(self.values), dtype=np.int64) if self.strata is None else self.strata
        strata = int(place.max(initial=0)) + 1
        total = np.bincount(place[counts], minlength=strata)
        means = np.bincount(place[counts], weights=self.values[counts], minlength=strata) / np.maximum(total, 1)
        weights = (total > 0).astype(float) if self.weights is None else self.weights[: len(total)]
        return counts, place, total, means, weights / max(weights.sum(), 1e-300)

    @property
    def value(self) -> float:
        """The estimate, or NaN without samples."""
        counts, _, _, means, weights = self._parts
        if self.strata is None:
            return float(self.values[counts].mean()) if counts.any() else float("nan")
        return float(means @ weights) if counts.any() else float("nan")

    def influence(self) -> Array:
        """What each sample adds to the error of the estimate (N,), times N."""
        counts, place, total, means, weights = self._parts
        scale = weights / np.maximum(total, 1) * len(self.values)
        return np.where(counts, scale[place] * (np.where(counts, self.values, 0) - means[place]), 0.0)

    def interval(self) -> Interval | None:
        """Wilson's for a share; for shares by strata, a normal one in which every stratum has two samples more.

        Other means: Student's t, with the degrees of freedom that the kurtosis leaves to the variance, and shifted for
        the skewness (Hall 1992). None for fewer than ten samples, or if all values are equal.
        """
        counts, _, total, means, weights = self._parts
        known, size = self.values[counts], int(counts.sum())
        if size and self.strata is not None:
            smooth = (means * total + 1) / (total + 2)
            half = stats.norm.ppf((1 + LEVEL) / 2) * np.sqrt(
                np.sum(weights**2 * smooth * (1 - smooth) / np.maximum(total, 1))
            )
            return max(0.0, self.value - half), min(1.0, self.value + half)
        if size and np.isin(known, (0, 1)).all():
            return wilson(self.value, size)
        if size < FEWEST or np.ptp(known) == 0:
            return None
        gap, spread = known - known.mean(), known.std(ddof=1)
        freedom = min(size - 1, max(2.0, 2 * size / max(1e-9, (gap**4).mean() / (gap**2).mean() ** 2 - 1)))
        half = stats.t.ppf((1 + LEVEL) / 2, freedom) * spread / np.sqrt(size)
        skewed = (gap**3).mean() / (6 * spread**2 * size) * (1 + 2 * stats.norm.ppf((1 + LEVEL) / 2) ** 2)
        shift = float(np.clip(skewed, -half, half))
        return self.value + shift - half, self.value + shift + half


@dataclass(frozen=True)
class CalibrationGap:
    """Expected calibration error of a confidence (N,) in bins, as it is or debiased."""

    confidence: Array
    right: NDArray[np.bool_]
    place: Indices  # the bin of each sample
    debiased: bool = False

    @property
    def value(self) -> float:
        """sum over bins of (n_b / N) |accuracy_b - mean confidence_b|: too large for few samples, if not debiased."""
        if not len(self.right):
            return float("nan")
        gap = np.bincount(self.place, weights=self.right - self.confidence)
        return self._inverted[1] if self.debiased else float(np.abs(gap).sum() / len(self.right))

    @cached_property
    def _inverted(self) -> tuple[float, float, float]:
        """Lower bound, median-unbiased estimate and upper bound of the error, by inverting tests.

        True gaps are taken to be k times the observed ones, which are drawn towards their mean by ten samples. For each
        k, hits are simulated in every bin. Bounds and estimate belong to the k for which the observed error is the
        97.5%, 50% and 2.5% quantile of the simulated ones.
        """
        samples = np.bincount(self.place)
        n, size = samples[samples > 0], len(self.right)
        hits, total = (np.bincount(self.place, weights=w)[samples > 0] for w in (self.right, self.confidence))
        gap = ((hits - total) + SMOOTHING * (hits - total).sum() / size) / (n + SMOOTHING)
        accuracy = np.clip(total / n + np.linspace(0, 3, 61)[:, None] * gap, 0, 1)  # (K, bins)
        noise = np.random.default_rng(0).normal(size=(DRAWS, 1, len(n))) * np.sqrt(n * accuracy * (1 - accuracy))
        drawn = np.clip(np.rint(n * accuracy + noise), 0, n)  # binomial, nearly
        simulated, observed = np.abs(drawn - total).sum(axis=2) / size, np.abs(hits - total).sum() / size
        below = (simulated < observed).mean(axis=0) + (simulated == observed).mean(axis=0) / 2
        falling = np.maximum.accumulate(below[::-1])[::-1]
        errors = np.abs(accuracy - total / n) @ n / size
        low, middle, high = (float(errors[min(np.searchsorted(-falling, -q), 60)]) for q in (0.975, 0.5, 0.025))
        return low, middle, high

    def interval(self) -> Interval | None:
        """The bounds, widened where they would not contain the estimate itself; None for fewer than twenty samples."""
        if len(self.right) < 2 * FEWEST:
            return None
        return min(self._inverted[0], self.value), max(self._inverted[2], self.value)


@dataclass(frozen=True)
class RocArea:
    """Probability that a correct decision has a higher confidence than a wrong one, ties counting half."""

    correct: NDArray[np.bool_]
    confidence: NDArray[Any]

    @cached_property
    def _placements(self) -> tuple[Array, Array]:
        """Share of wrong decisions below each correct one, and of correct ones above each wrong one."""
        right, wrong = np.sort(self.confidence[self.correct]), np.sort(self.confidence[~self.correct])
        below = (np.searchsorted(wrong, right, "left") + np.searchsorted(wrong, right, "right")) / 2
        above = len(right) - (np.searchsorted(right, wrong, "left") + np.searchsorted(right, wrong, "right")) / 2
        return below / max(1, len(wrong)), above / max(1, len(right))

    @property
    def value(self) -> float:
        """The area, or NaN if all decisions are correct or all are wrong."""
        defined = self.correct.any() and not self.correct.all()
        return float(self._placements[0].mean()) if defined else float("nan")

    def interval(self) -> Interval | None:
        """DeLong's (1988), on the logit scale; None for fewer than three on a side, or an area of 0 or 1."""
        sizes = [len(side) for side in self._placements]
        if min(sizes) < 3 or not 0 < self.value < 1:
            return None
        variance = sum(side.var(ddof=1) / len(side) for side in self._placements)
        logit = np.log(self.value / (1 - self.value))
        half = stats.t.ppf((1 + LEVEL) / 2, min(sizes) - 1) * variance**0.5 / (self.value * (1 - self.value))
        low, high = 1 / (1 + np.exp(half - logit)), 1 / (1 + np.exp(-half - logit))
        return float(low), float(high)


def resampled(targets: Indices, rng: np.random.Generator) -> Indices:
    """Positions drawn with replacement within each class, so that the class counts stay."""
    order, counts = np.argsort(targets, kind="stable"), np.bincount(targets)
    first = (np.cumsum(counts) - counts)[targets[order]]
    return order[first + (rng.random(len(targets)) * counts[targets[order]]).astype(np.int64)]

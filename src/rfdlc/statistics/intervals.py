"""Estimates with 95% intervals, about other test samples of the same population; model
and decider are held fixed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

LEVEL = 0.95
Z = float(special.ndtri((1 + LEVEL) / 2))
FEWEST, FEWEST_HITS, FEWEST_ERRORS = (
    20,
    3,
    5,
)  # samples behind an interval of a mean, a share, a ranking
SMOOTHING, DRAWS = 10, 200  # of tests of the calibration error
NAN = float("nan")
Interval = tuple[float, float]
JEFFREYS, STRICT = (
    (0.5, 0.5),
    (0.0, 1.0),
)  # samples that are added for lower and upper bounds of sums
Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Estimate:
    """A number with its interval, None where no honest one exists; both bounds follow a
    design effect on variances.
    """

    value: float
    interval: Callable[..., Interval | None] = lambda effect=1.0: None
    influence: Callable[[], Array] | None = (
        None  # what each sample adds to the error of the value
    )
    # variance of a sample more that differs; None if influences do not tell everything
    unseen: float | None = None
    centre: Callable[..., float] | None = (
        None  # what the interval is about, where that is not the value
    )
    parts: tuple[Indices, Array] | None = (
        None  # of a mean over groups: samples and value of each
    )
    alike: Callable[[], Array] | None = (
        None  # errors of samples that tell the design effect, if influences do not
    )
    counted: Mask | None = None  # the samples that the value is about; None for all


def wilson(share: Any, samples: Any) -> tuple[Any, Any]:
    """Wilson's score interval of shares, with Poisson bounds for few hits and few
    misses (Brown et al. 2001).

    >>> [round(float(bound), 2) for bound in wilson(1.0, 3)]
    [0.44, 1.0]
    """

    def lower(share: Any) -> Any:
        hits = np.rint(share * samples)
        centre = (share + Z**2 / (2 * samples)) / (1 + Z**2 / samples)
        half = (
            Z
            * np.sqrt(share * (1 - share) / samples + Z**2 / (4 * samples**2))
            / (1 + Z**2 / samples)
        )
        poisson = special.gammaincinv(np.maximum(hits, 1), 1 - LEVEL) / samples
        few = (hits > 0) & (hits <= np.where(samples > 50, 3, 2))
        return np.clip(np.where(few, poisson, centre - half), 0, share)

    share, samples = (
        np.asarray(share, dtype=np.float64),
        np.asarray(samples, dtype=np.float64),
    )
    return lower(share), 1 - lower(1 - share)


def group_shares(
    groups: Indices, hits: Mask, scale: Callable[[Any], Any] = lambda share: share
) -> Estimate:
    """The mean over groups of `scale`(share of hits); each sample is in up to K groups
    (K, N), -1 for none.

    The interval comes from those of all groups by recovery of variance estimates (Zou
    and Donner 2008), where groups are as correlated as they overlap.
    """
    inside = groups >= 0
    samples = np.bincount(groups[inside])
    present, seen = np.maximum(samples, 1), samples > 0
    share = np.bincount(groups[inside], weights=hits[inside]) / present
    value = float(scale(share[seen]).mean()) if seen.any() else NAN

    def sums(values: Array) -> Array:  # over the groups of each sample
        return np.asarray(np.where(inside, values[groups], 0).sum(axis=0))

    def interval(effect: float = 1.0) -> Interval | None:
        if samples.sum() < FEWEST_HITS:
            return None
        halves = []
        for bound in wilson(share, present / effect):
            distance = (
                np.abs(scale(bound) - scale(share)) / np.sqrt(present) / seen.sum()
            )
            halves.append(float(np.linalg.norm(sums(distance))))
        return max(0.0, value - halves[0]), min(1.0, value + halves[1])

    slope = (
        (scale(share + 1e-6) - scale(share - 1e-6))
        / 2e-6
        / present
        / max(1, seen.sum())
    )

    def influence() -> Array:
        return np.asarray(
            np.where(inside, slope[groups] * (hits - share[groups]), 0).sum(axis=0)
        )

    unseen = (
        float(np.mean((present[seen] * seen.sum()) ** -2.0)) if seen.any() else 0.0
    )  # in any group
    return Estimate(
        value,
        interval,
        influence,
        unseen,
        parts=(samples, scale(share)),
        counted=np.any(inside, axis=0),
    )


def smallest_share(groups: Indices, hits: Mask) -> Estimate:
    """The smallest share of hits of a group (N,), with the interval that exact ones of
    all groups give together.
    """
    samples, hit = np.bincount(groups), np.bincount(groups, weights=hits)
    n, hit = samples[samples > 0], hit[samples > 0]
    if not len(n):
        return Estimate(NAN)

    def interval(effect: float = 1.0) -> Interval:
        outside, hits, misses = (
            (1 - LEVEL) / 2 / len(n),
            hit / effect,
            (n - hit) / effect,
        )  # Bonferroni
        low = special.betaincinv(np.maximum(hits, 1e-9), misses + 1, outside).min()
        return float(low), float(
            special.betaincinv(hits + 1, np.maximum(misses, 1e-9), 1 - outside).min()
        )

    return Estimate(
        float((hit / n).min()),
        interval,
        alike=group_shares(groups[None], hits[None]).influence,
    )


def mean(
    values: NDArray[Any], ends: tuple[float, float] | None = None, differs: float = 1.0
) -> Estimate:
    """The mean of one value per sample (N,), NaN where it does not count; a share, if
    all are and must be 0 or 1.

    `ends` are the smallest and the largest possible value: the interval has half a
    sample more of each. If two models differ on a sample, their values differ by up to
    the share `differs` of that range.
    """
    values = np.asarray(values, dtype=np.float64)
    counts = ~np.isnan(values)
    known, size = values[counts], int(counts.sum())
    if not size or (ends in (None, (0, 1)) and np.isin(known, (0, 1)).all()):
        return group_shares(np.where(counts, 0, -1)[None], values[None] == 1)
    value = float(known.mean())

    def interval(effect: float = 1.0) -> Interval | None:
        if size < FEWEST or (
            np.ptp(known) == 0 if ends is None else ends[1] - ends[0] < 1e-12
        ):
            return None  # nothing is known about the spread, or the value is certain
        if ends is None:
            low, high = student(known, effect)
            return (
                max(0.0, low) if known.min() >= 0 else low
            ), high  # losses are not negative
        return bounded_mean(known, np.ones(size), ends, effect)[1]

    unseen = 0.0 if ends is None else (differs * (ends[1] - ends[0]) / size) ** 2 / 2
    return Estimate(
        value,
        interval,
        lambda: np.nan_to_num(values - value) / size,
        unseen,
        counted=counts,
    )


def bounded_mean(
    values: NDArray[Any],
    weights: NDArray[Any],
    ends: Interval,
    effect: float = 1.0,
    **how: Any,
) -> tuple[float, Interval]:
    """The weighted mean of values (N,) between two ends, and its interval: of skewed
    values (`distances`).
    """
    whole = float(weights.sum())
    value = float(weights @ values / whole)
    if ends[1] - ends[0] < 1e-12:
        return value, (value, value)  # certain
    another = (
        float(weights.max()) / whole
    )  # what one more sample weighs at most (Fay and Feuer 1997)
    unseen = (value - ends[0]) * another, (ends[1] - value) * another
    below, above = distances(weights * (values - value) / whole, *unseen, effect, **how)
    return value, (
        float(max(ends[0], value - below)),
        float(min(ends[1], value + above)),
    )


def distances(
    influence: Array,
    down: float,
    up: float,
    effect: float = 1.0,
    level: float = LEVEL,
    more: Interval = JEFFREYS,
) -> Interval:
    """How far the bounds lie below and above an estimate, by what each sample adds to
    its error.

    Sums of positive and of negative parts are as gamma distributed as weighted counts
    (Fay and Feuer 1997); both are joined by Zou and Donner (2008). `more` samples of
    weight `up` or `down` are added for lower and upper quantiles: half a sample
    (Jeffreys' prior), or none and a whole one, which keeps the level of few samples too
    (`STRICT`). By a design effect, samples are fewer and weigh more.
    """
    sides = []
    for sign, unseen in ((1, effect * up), (-1, effect * down)):
        parts, quantiles = np.maximum(sign * influence, 0), []
        total, squares = float(parts.sum()), effect * float(parts @ parts)
        for tail, extra in zip(((1 - level) / 2, (1 + level) / 2), more, strict=True):
            centre, variance = total + extra * unseen, squares + extra * unseen**2
            found = (
                special.gammaincinv(centre**2 / variance, tail) * variance / centre
                if variance > 0
                else 0.0
            )
            quantiles.append(float(found))
        sides.append((max(0.0, total - quantiles[0]), quantiles[1] - total))
    return float(np.hypot(sides[0][0], sides[1][1])), float(
        np.hypot(sides[0][1], sides[1][0])
    )


def student(values: Array, effect: float = 1.0) -> Interval:
    """Student's t, with the degrees of freedom that kurtosis leaves, and shifted for
    skewness (Johnson 1978).
    """
    size, gap, spread = len(values), values - values.mean(), values.std(ddof=1)
    if spread == 0:
        return float(values[0]), float(values[0])
    freedom = min(
        size - 1,
        max(2.0, 2 * size / max(1e-9, (gap**4).mean() / (gap**2).mean() ** 2 - 1)),
    )
    half = special.stdtrit(freedom, (1 + LEVEL) / 2) * spread * np.sqrt(effect / size)
    shift = np.clip(
        effect * (gap**3).mean() / (6 * spread**2 * size) * (1 + 2 * Z**2), -half, half
    )
    return float(values.mean() + shift - half), float(values.mean() + shift + half)


def calibration_gap(
    confidence: Array, right: Mask, place: Indices, debiased: bool = False
) -> Estimate:
    """Expected calibration error in bins: sum of (n_b / N) |accuracy_b - mean
    confidence_b|, as it is or debiased.

    If not debiased, it is too large for few samples. The interval comes from inverted
    tests; it contains the value and the distance between mean confidence and accuracy,
    which is at most the error.
    """
    size = len(right)
    if not size:
        return Estimate(NAN)
    plain = float(np.abs(np.bincount(place, weights=right - confidence)).sum() / size)
    inverted = cache(lambda effect: _inverted(confidence, right, place, effect))
    value = inverted(1.0)[1] if debiased else plain

    def interval(effect: float = 1.0) -> Interval | None:
        certain = float(confidence.mean())
        signed = mean(confidence - right, (certain - 1, certain)).interval(effect)
        low, _, high = inverted(effect)
        return (
            None
            if signed is None
            else (min(low, value), max(high, value, -signed[0], signed[1]))
        )

    return Estimate(
        value,
        interval,
        centre=lambda effect=1.0: (
            inverted(effect)[1] if inverted(effect)[0] > 0 else 0.0
        ),
    )


def _inverted(
    confidence: Array, right: Mask, place: Indices, effect: float
) -> tuple[float, float, float]:
    """Lower bound, median-unbiased estimate and upper bound of the calibration error,
    by inverting tests.

    True gaps are taken to be k times the observed ones, which are drawn towards their
    mean by ten samples. For each k, hits are simulated in every bin. Bounds and
    estimate belong to the k for which the observed error is the 97.5%, 50% and 2.5%
    quantile of the simulated ones.
    """
    samples, size = np.bincount(place), len(right)
    n = samples[samples > 0]
    hits, total = (
        np.bincount(place, weights=weights)[samples > 0]
        for weights in (right, confidence)
    )
    gap = ((hits - total) + SMOOTHING * (hits - total).sum() / size) / (n + SMOOTHING)
    accuracy = np.clip(
        total / n + np.linspace(0, 3, 61)[:, None] * gap, 0, 1
    )  # (K, bins)
    noise = np.random.default_rng(0).normal(size=(DRAWS, 1, len(n))) * np.sqrt(
        effect * n * accuracy * (1 - accuracy)
    )
    drawn = np.clip(np.rint(n * accuracy + noise), 0, n)  # binomial, nearly
    simulated, observed = (
        np.abs(drawn - total).sum(axis=2) / size,
        np.abs(hits - total).sum() / size,
    )
    below = (simulated < observed).mean(axis=0) + (simulated == observed).mean(
        axis=0
    ) / 2
    falling = np.maximum.accumulate(below[::-1])[::-1]
    errors = np.abs(accuracy - total / n) @ n / size
    low, middle, high = (
        float(errors[min(np.searchsorted(-falling, -q), 60)])
        for q in (0.975, 0.5, 0.025)
    )
    return low, middle, high


def resampled(value: float, draws: Array) -> Estimate:
    """A number and its values on resamples; percentiles (Efron 1979)."""

    def interval() -> Interval | None:
        low, high = np.nanquantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return float(low), float(high)

    known = ~np.isnan(draws)
    if not known.any():
        return Estimate(value)
    return Estimate(value, interval, lambda: np.nan_to_num(draws - draws[known].mean()))


def by_group(estimate: Estimate, groups: Indices) -> Estimate:
    """An estimate whose samples come in groups (N,), drawn independently; its
    influences become those of groups.

    Variances grow by the design effect (Kish 1965): that of sums over groups of what
    samples add to the error, as a cluster bootstrap finds it, with Student's t for few
    groups, over that of independent samples. It is at least 1. Without any error,
    samples of a group are taken to be all alike.

    >>> right = np.array([1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1])
    >>> [
    ...     [round(bound, 2) for bound in e.interval()]
    ...     for e in (mean(right), by_group(mean(right), np.arange(12) // 3))
    ... ]
    [[0.47, 0.91], [0.05, 0.98]]
    """
    _, place = np.unique(groups, return_inverse=True)
    errors = estimate.influence or estimate.alike
    sizes = np.bincount(
        place if estimate.counted is None else place[estimate.counted],
        minlength=place.max() + 1,
    )
    seen = sizes > 0  # other groups tell nothing of this value
    if errors is None or seen.sum() < 2 or np.isnan(estimate.value):
        return Estimate(estimate.value)
    sums, alone, effect = (
        np.bincount(place, errors()).astype(np.float64),
        float(np.square(errors()).sum()),
        1.0,
    )
    if sizes.max() > 1:
        low, high = student(seen.sum() * sums[seen])
        effect = (
            max(1.0, ((high - low) / 2 / Z) ** 2 / alone)
            if alone > 0
            else float(sizes @ sizes / sizes.sum())
        )
    return replace(
        estimate,
        interval=partial(estimate.interval, effect),
        influence=None if estimate.influence is None else lambda: sums,
        unseen=None if estimate.unseen is None else effect * estimate.unseen,
        centre=None if estimate.centre is None else partial(estimate.centre, effect),
    )


def whole_groups(groups: Indices, rng: np.random.Generator) -> Indices:
    """Positions of groups drawn with replacement, as many as there are, each with all
    of its samples.
    """
    order, sizes = (
        np.argsort(groups, kind="stable"),
        np.unique(groups, return_counts=True)[1],
    )
    members = np.split(order, np.cumsum(sizes)[:-1])
    return np.concatenate([members[g] for g in rng.integers(0, len(sizes), len(sizes))])


def within_classes(targets: Indices, rng: np.random.Generator) -> Indices:
    """Positions drawn with replacement within each class, so that the class counts
    stay.
    """
    order, counts = np.argsort(targets, kind="stable"), np.bincount(targets)
    first = (np.cumsum(counts) - counts)[targets[order]]
    return order[
        first + (rng.random(len(targets)) * counts[targets[order]]).astype(np.int64)
    ]

"""Metrics from sums that can be added: of samples that do not fit into memory, or are
on several machines.

All sums are exact. What has to rank all samples (`error_auc`, `risk_coverage_area`)
comes from a histogram of the certainty with `BINS` bins, where samples of one bin count
as tied. Certainties that are probabilities are binned by their log-odds. Bins have a
relative width of 2^-9; `auc_error` is the largest error that they can cause.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.decisions.decider import Decider
from rfdlc.decisions.utility import Utility
from rfdlc.evaluation.bins import ECE_BINS, bin_of
from rfdlc.evaluation.evaluate import Evaluation
from rfdlc.evaluation.metrics import HEAD_FRACTIONS, METRICS
from rfdlc.evaluation.outcomes import Outcomes
from rfdlc.probabilities.classes import Classes
from rfdlc.statistics.intervals import NAN, Interval, Z, wilson

DROPPED_BITS = 14  # of 32: sign, exponent and 9 bits of the fraction remain
BINS = 2 ** (32 - DROPPED_BITS)
Array = NDArray[Any]  # of counts and sums


@dataclass
class Sums:
    """Sums over samples; those of two sets of samples are added by `+`."""

    confusion: Array  # (C, A): samples by true class and action
    # (2, 3): sums of Brier score, log-likelihood loss and gap between promise and
    # outcome; of squares
    moments: Array
    gap_by_action: Array  # (A,)
    gap_by_likeliest: Array  # (C,): by the most probable class
    by_likeliest: (
        Array  # (3, C, bins): samples, hits and confidences by the most probable class
    )
    by_true: Array  # (3, C, bins): the same by the true class
    classwise: Array  # (C, bins)
    paper: Array  # (10,)
    ranked: Array  # (2, BINS): wrong and right decisions for a class, by certainty
    # (4, C): by true class, samples covered by their set, sizes and values of sets;
    # covered, handed over
    sets: Array

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(
            **{
                each.name: getattr(self, each.name) + getattr(other, each.name)
                for each in fields(self)
            }
        )

    @classmethod
    def of(cls, o: Outcomes, probabilities: bool = True) -> "Sums":
        """The sums of some samples; `probabilities` says whether certainties are
        between 0 and 1.
        """
        classes, actions = o.utility.matrix.shape
        gap = o.gap
        each = np.stack([o.brier, o.nll, gap]).astype(np.float64)
        kept, inside = o.decided >= 0, (o.entropy > 0) & (o.entropy <= 1)
        place = (
            np.searchsorted(
                np.arange(11) / 10, 1 - np.float64(o.entropy[inside]), side="right"
            )
            - 1
        )
        paper = np.bincount(
            place, o.right[inside] - (1 - np.float64(o.entropy[inside])), 10
        )
        columns = (
            o.covered,
            o.set_size,
            o.set_value,
            None if o.covered is None else o.covered & ~kept,
        )  # NaN without
        sets = [
            np.full(classes, NAN) if c is None else np.bincount(o.targets, c, classes)
            for c in columns
        ]
        hits = np.bincount(
            o.correct[kept] * BINS + keys(o.certainty[kept], probabilities),
            minlength=2 * BINS,
        )
        return cls(
            np.bincount(
                o.targets * actions + o.actions, minlength=classes * actions
            ).reshape(classes, -1)
            * 1.0,
            np.stack([each.sum(axis=1), (each**2).sum(axis=1)]),
            np.bincount(o.actions, gap, actions),
            np.bincount(o.likeliest, gap, classes),
            _bins(o, o.likeliest),
            _bins(o, o.targets),
            np.zeros((classes, ECE_BINS)) if o.gaps is None else o.gaps,
            paper,
            hits.reshape(2, BINS) * 1.0,
            np.stack(sets),
        )

    def evaluation(
        self, decider: Decider, groups: Sequence[tuple[str, str]], uncertainty: str
    ) -> Evaluation:
        """Every metric of these sums; intervals of means, for the many samples that
        need sums.
        """
        values = metrics_of(self, decider.utility, groups)
        ordered = {name: values[name] for name in METRICS if name in values}
        samples = int(self.confusion.sum())
        known: dict[str, Any] = {"merged": _intervals(self, values, decider.utility)}
        return Evaluation(
            samples,
            ordered,
            uncertainty,
            **known,
            calibrated=decider.model.calibrator is not None,
        )

    @property
    def auc_error(self) -> float:
        """The largest error of `error_auc` that bins can cause: half of the pairs that
        share a bin.
        """
        wrong, right = self.ranked
        return float(wrong @ right / 2 / max(1.0, wrong.sum() * right.sum()))


def keys(certainty: NDArray[Any], probabilities: bool) -> NDArray[np.int64]:
    """The bin of each certainty, in the same order; probabilities by their log-odds.

    >>> keys(np.array([0.0, 0.2, 0.9, 1.0]), True).argsort().tolist()
    [0, 1, 2, 3]
    """
    values = np.asarray(certainty, dtype=np.float64)
    if probabilities:
        inside = np.clip(values, 1e-30, 1 - 1e-16)
        values = np.log(inside) - np.log1p(-inside)
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    ordered = np.where(
        bits >> 31, ~bits, bits | np.uint32(1 << 31)
    )  # as the numbers are
    return (ordered >> DROPPED_BITS).astype(np.int64)


def metrics_of(
    sums: Sums, utility: Utility, groups: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """The metrics of the registry by name, as `measure` gives them; not
    `utility_by_budget`, which has no sums.
    """
    counts, classes, decided = sums.confusion, utility.classes, utility.decided_class
    samples, of_class, of_action = counts.sum(), counts.sum(axis=1), counts.sum(axis=0)
    right = np.where(decided == np.arange(len(classes))[:, None], counts, 0).sum(
        axis=1
    )  # (C,)
    as_class = np.array([counts[:, decided == c].sum() for c in range(len(classes))])
    seen = of_class + as_class > 0
    regions, shots = (_regions(classes, kind) for kind in ("thirds", "shots"))
    best = utility.matrix.max(axis=1)
    kept = counts[:, decided >= 0].sum()
    by_action = zip(utility.actions, sums.gap_by_action, of_action, strict=True)
    values: dict[str, Any] = {
        "accuracy": _share(right.sum(), samples),
        "accuracy_by_region": _shares(right, of_class, regions),
        "accuracy_by_shots": _shares(right, of_class, shots),
        "balanced_accuracy": float(
            np.mean((right / np.maximum(of_class, 1))[of_class > 0])
        ),
        "macro_f1": float(
            np.mean((2 * right / np.maximum(of_class + as_class, 1))[seen])
        ),
        "mean_utility": float((counts * utility.matrix).sum() / samples),
        "mean_regret": float(
            (counts * (best[:, None] - utility.matrix)).sum() / samples
        ),
        "abstention_rate": _share(samples - kept, samples),
        "kept_accuracy": _share(right.sum(), kept),
        "error_auc": _roc(*sums.ranked),
        "risk_coverage_area": _risk(*sums.ranked),
        "ece": _ece(sums.by_likeliest.sum(axis=1)),
        "ece_by_region": {
            name: _ece(sums.by_likeliest[:, own].sum(axis=1))
            for name, own in regions.items()
        },
        "classwise_ece": float(np.abs(sums.classwise).sum() / samples / len(classes)),
        **dict(
            zip(
                ("brier", "nll", "utility_gap"),
                (sums.moments[0] / samples).tolist(),
                strict=True,
            )
        ),
        "utility_gap_by_region": _shares(
            sums.gap_by_likeliest, sums.by_likeliest[0], regions
        ),
        "utility_gap_by_action": {
            action: float(gap / count) for action, gap, count in by_action if count
        },
        "ece_paper": float(np.abs(sums.paper).sum() / samples),
        "ece_by_true_region": {
            name: _ece(sums.by_true[:, own].sum(axis=1))
            for name, own in regions.items()
        },
        "group_rates": _group_rates(counts, utility, groups),
    }
    return (
        values
        | _false_heads(counts, utility)
        | _set_metrics(sums, utility, of_class, regions)
    )


def _regions(classes: Classes, kind: str) -> dict[str, Array]:
    """Regions that have classes: their members."""
    found = {} if classes.counts is None else getattr(classes, kind)
    return {name: members for name, members in found.items() if len(members)}


def _false_heads(counts: Array, utility: Utility) -> dict[str, Any]:
    """Shares of tail samples that are decided as a head class."""
    classes, decided, rates = utility.classes, utility.decided_class, {}
    for fraction in HEAD_FRACTIONS if classes.counts is not None else ():
        head = classes.head_mask(fraction)
        rates[fraction] = _share(
            counts[~head][:, (decided >= 0) & head[decided]].sum(), counts[~head].sum()
        )
    defined = [rate for rate in rates.values() if not np.isnan(rate)]
    return {
        "false_head_rate": float(np.mean(defined)) if defined else NAN,
        "false_head_rates": rates,
    }


def _set_metrics(
    sums: Sums, utility: Utility, of_class: Array, regions: Mapping[str, Any]
) -> dict[str, Any]:
    covered, size, worth, handed = sums.sets
    everything = {"all": np.arange(len(of_class)), **regions}
    found: dict[str, Any] = {name: {} for name in METRICS if name.startswith("set_")}
    if not np.isnan(covered).any():
        names, seen = np.array(utility.classes.names), of_class > 0
        shares = covered[seen] / of_class[seen]
        overall = {
            "marginal": _share(covered.sum(), of_class.sum()),
            "macro": float(shares.mean()),
        }
        found["set_coverage"] = overall | {"worst": float(shares.min())}
        over = sums.confusion[:, utility.decided_class < 0].sum()
        found["set_coverage_handed_over"] = _share(handed.sum(), over)
        found["set_coverage_by_region"] = _shares(covered, of_class, regions)
        found["set_coverage_by_class"] = dict(
            zip(names[seen].tolist(), shares.tolist(), strict=True)
        )
        found["set_size"] = _shares(size, of_class, everything)
    if not np.isnan(worth).any():
        found["set_utility"] = _shares(worth, of_class, everything)
    return found


def _intervals(
    sums: Sums, values: Mapping[str, Any], utility: Utility
) -> dict[str, Interval]:
    """Wilson's of the accuracy, and normal ones of means."""
    samples = sums.confusion.sum()
    low, high = wilson(values["accuracy"], samples)
    found = {"accuracy": (float(low), float(high))}
    squares = dict(
        zip(("brier", "nll", "utility_gap"), sums.moments[1] / samples, strict=True)
    )
    best = utility.matrix.max(axis=1, keepdims=True)
    for name, each in (
        ("mean_utility", utility.matrix),
        ("mean_regret", best - utility.matrix),
    ):
        squares[name] = (sums.confusion * each**2).sum() / samples
    for name, square in squares.items():
        half = Z * float(np.sqrt(max(0.0, square - values[name] ** 2) / samples))
        found[name] = values[name] - half, values[name] + half
    return found


def _group_rates(
    counts: Array, utility: Utility, groups: Sequence[tuple[str, str]]
) -> dict[str, float]:
    pairs = {
        f"{true} as {end}": (
            counts[utility.classes.members(true)],
            utility.deciding(end),
        )
        for true, end in groups
    }
    return {
        name: _share(own[:, actions].sum(), own.sum())
        for name, (own, actions) in pairs.items()
    }


def _share(part: Any, whole: Any) -> float:
    return float(part / whole) if whole else NAN


def _shares(
    parts: Array, wholes: Array, regions: Mapping[str, Any]
) -> dict[str, float]:
    """By region, of sums (C,) by class."""
    return {
        name: _share(parts[own].sum(), wholes[own].sum())
        for name, own in regions.items()
    }


def _bins(o: Outcomes, classes: NDArray[Any]) -> Array:
    """Samples, hits and confidences by class and bin of the calibration error (3, C,
    bins).
    """
    count = len(o.utility.classes)
    place = classes * ECE_BINS + bin_of(o.confidence)
    each = [
        np.bincount(place, weights, count * ECE_BINS)
        for weights in (None, o.right, o.confidence)
    ]
    return np.stack(each).reshape(3, count, ECE_BINS).astype(np.float64)


def _ece(bins: Array) -> float:
    samples, hits, confidence = bins
    return (
        float(np.abs(hits - confidence).sum() / samples.sum()) if samples.sum() else NAN
    )


def _roc(wrong: Array, right: Array) -> float:
    below = np.cumsum(wrong) - wrong / 2
    return (
        float(right @ below / (wrong.sum() * right.sum()))
        if wrong.sum() and right.sum()
        else NAN
    )


def _risk(wrong: Array, right: Array) -> float:
    """The mean over all coverages of the error rate; errors are spread evenly over the
    samples of a bin.
    """
    count, errors = (wrong + right)[::-1], wrong[::-1]
    count, errors = count[count > 0], errors[count > 0]
    if not len(count):
        return NAN
    before, failed = np.cumsum(count) - count, np.cumsum(errors) - errors
    rate = errors / count
    # The sum over k = 1..n of (failed + rate k) / (before + k), by harmonic numbers.
    harmonic = _harmonic(before + count) - _harmonic(before)
    return float(
        (rate * count + (failed - rate * before) * harmonic).sum() / count.sum()
    )


def _harmonic(n: Array) -> Array:
    from scipy.special import digamma

    return np.asarray(digamma(n + 1))

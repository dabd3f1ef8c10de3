"""Every figure of the paper and the standard ones, each a plain function of arrays.

`targets` (N,) are class indices; `decided` (N,) too, with -1 where a sample was handed over (abstained).
An abstention is not a correct answer: it lowers `accuracy` and leaves `kept_accuracy` alone.
A figure over no samples is NaN.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.decide.classes import Classes, Indices
from rfdlc.decide.scores import PROBABILITY_FLOOR, Floats
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError

HEAD_FRACTIONS = (0.25, 0.5, 0.75)
ECE_BINS, PAPER_ECE_BINS = 15, 10


def mean(values: NDArray[Any]) -> float:
    """The mean, or NaN of nothing."""
    return float(values.mean()) if len(values) else float("nan")


# -- decisions --------------------------------------------------------------------------------------------------


def accuracy(targets: Indices, decided: Indices, members: Indices | None = None) -> float:
    """Share of samples decided for their true class; of the samples of the classes `members` if given."""
    right = decided == targets
    return mean(right if members is None else right[np.isin(targets, members)])


def recalls(targets: Indices, decided: Indices, classes: int) -> NDArray[np.float64]:
    """Accuracy of each class (C,), NaN for a class without samples."""
    total = np.bincount(targets, minlength=classes)
    right = np.bincount(targets[decided == targets], minlength=classes)
    return np.divide(right, total, out=np.full(classes, np.nan), where=total > 0)


def balanced_accuracy(targets: Indices, decided: Indices, classes: int) -> float:
    """Mean accuracy of the classes that have samples."""
    each = recalls(targets, decided, classes)
    return mean(each[~np.isnan(each)])


def macro_f1(targets: Indices, decided: Indices, classes: int) -> float:
    """Mean over the classes that are true or decided anywhere of 2 right / (true + decided)."""
    true = np.bincount(targets, minlength=classes)
    claimed = np.bincount(decided[decided >= 0], minlength=classes)
    right = np.bincount(targets[decided == targets], minlength=classes)
    seen = true + claimed > 0
    return mean(2 * right[seen] / (true + claimed)[seen])


def false_head_rate(targets: Indices, decided: Indices, classes: Classes, head_fraction: float) -> float:
    """Share of tail samples that are decided as head, where the head is the most frequent `head_fraction` of classes.

    The paper's "tail ratio" 25% is this head's share of 25%: the other 75% of the classes are tail.
    """
    head = classes.head_mask(head_fraction)
    tail_samples = ~head[targets]
    decided_head = (decided >= 0) & head[decided]
    return mean(decided_head[tail_samples])


def group_rate(targets: Indices, decided: Indices, true: Indices, as_group: Indices) -> float:
    """Share of the samples of the classes `true` that are decided as one of `as_group`."""
    return mean(np.isin(decided[np.isin(targets, true)], as_group))


def mean_utility(targets: Indices, actions: Indices, utility: Utility) -> float:
    """Mean of U[true, action]; actions index `utility.actions`."""
    return mean(utility.matrix[targets, actions])


def mean_regret(targets: Indices, actions: Indices, utility: Utility) -> float:
    """Mean of what the best action would have been worth more: max_a U[true, a] - U[true, action]."""
    return mean((utility.matrix.max(axis=1)[:, None] - utility.matrix)[targets, actions])


def abstention_rate(decided: Indices) -> float:
    """Share of samples that were handed over."""
    return mean(decided < 0)


def kept_accuracy(targets: Indices, decided: Indices) -> float:
    """Accuracy on the samples that were decided for a class."""
    kept = decided >= 0
    return mean(decided[kept] == targets[kept])


# -- knowing when one is wrong ------------------------------------------------------------------------------------


def error_auc(correct: NDArray[np.bool_], confidence: Floats) -> float:
    """Probability that a right decision has more confidence than a wrong one, ties counting half (area under ROC)."""
    correct = np.asarray(correct, dtype=bool)
    right, wrong = int(correct.sum()), int((~correct).sum())
    if not right or not wrong:
        return float("nan")
    _, place, count = np.unique(confidence, return_inverse=True, return_counts=True)
    rank = np.cumsum(count) - (count - 1) / 2  # mean rank of equal values
    return float((rank[place][correct].sum() - right * (right + 1) / 2) / (right * wrong))


def risk_coverage(correct: NDArray[np.bool_], confidence: Floats) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Coverage k/N and the error rate among the k most confident samples, for k = 1..N.

    Samples of equal confidence share their errors evenly, so that the order of the samples does not matter.
    """
    _, place, count = np.unique(-np.asarray(confidence), return_inverse=True, return_counts=True)
    wrong = np.bincount(place, weights=~np.asarray(correct, dtype=bool), minlength=len(count))
    errors = np.repeat(wrong / count, count)
    kept = np.arange(1, len(errors) + 1)
    return kept / max(1, len(errors)), np.cumsum(errors) / kept


def risk_coverage_area(correct: NDArray[np.bool_], confidence: Floats) -> float:
    """Mean error rate over all coverages: the less, the better confidence sorts out errors."""
    return mean(risk_coverage(correct, confidence)[1])


# -- calibration --------------------------------------------------------------------------------------------------


def bin_of(confidence: Floats, bins: int = ECE_BINS) -> Indices:
    """Equal-width bins (lower, upper]; 0 belongs to the first."""
    if bins < 1:
        raise InputError(f"bins is {bins}: expected 1 or more")
    edges = np.linspace(0, 1, bins + 1)
    return np.searchsorted(edges[1:-1], confidence, side="left")


def ece(confidence: Floats, correct: NDArray[np.bool_], bins: int = ECE_BINS) -> float:
    """Expected calibration error: sum over bins of (n_b / N) |accuracy_b - mean confidence_b| (Guo et al. 2017)."""
    if not len(confidence):
        return float("nan")
    gap = np.asarray(correct, dtype=np.float64) - confidence
    return float(np.abs(np.bincount(bin_of(confidence, bins), weights=gap, minlength=bins)).sum() / len(confidence))


def ece_paper(entropy: Floats, correct: NDArray[np.bool_], bins: int = PAPER_ECE_BINS) -> float:
    """The paper's measure: confidence 1 - entropy in nats, bins [lower, upper), and samples outside [0, 1) in no bin.

    They stay in the denominator. Kept to rerun the paper; it is no calibration error (use `ece`).
    """
    if not len(entropy):
        return float("nan")
    confidence = 1 - np.asarray(entropy, dtype=np.float64)
    inside = (confidence >= 0) & (confidence < 1)
    place = np.searchsorted(np.arange(bins + 1) / bins, confidence[inside], side="right") - 1
    gap = np.asarray(correct, dtype=np.float64)[inside] - confidence[inside]
    return float(np.abs(np.bincount(place, weights=gap, minlength=bins)).sum() / len(confidence))


def classwise_gaps(probabilities: Floats, targets: Indices, bins: int = ECE_BINS) -> NDArray[np.float64]:
    """For each class and bin (C, bins) the sum over samples of 1{y = c} - p(c): additive over pieces of the data."""
    classes = probabilities.shape[1]
    place = bin_of(probabilities, bins) + np.arange(classes) * bins
    gaps: NDArray[np.float64] = -np.bincount(place.ravel(), probabilities.ravel(), classes * bins).astype(np.float64)
    np.add.at(gaps, place[np.arange(len(targets)), targets], 1)
    return gaps.reshape(classes, bins)


def classwise_ece(probabilities: Floats, targets: Indices, bins: int = ECE_BINS) -> float:
    """Mean over classes of the ECE of p(c) against 1{y = c} (Kull et al. 2019)."""
    gaps = classwise_gaps(probabilities, targets, bins)
    return float(np.abs(gaps).sum() / max(1, len(targets)) / len(gaps))


def brier(probabilities: Floats, targets: Indices) -> NDArray[Any]:
    """sum_c (p(c) - 1{y = c})^2 of each sample (N,)."""
    true = probabilities[np.arange(len(targets)), targets]
    return np.einsum("nc,nc->n", probabilities, probabilities) - 2 * true + 1


def nll(true_probability: Floats) -> NDArray[Any]:
    """-log p(y) of each sample (N,), finite where p(y) is 0."""
    return -np.log(np.maximum(true_probability, PROBABILITY_FLOOR))


def false_head_rates(
    targets: Indices, decided: Indices, classes: Classes, head_fractions: Sequence[float] = HEAD_FRACTIONS
) -> dict[float, float]:
    """The false head rate at each head fraction."""
    return {fraction: false_head_rate(targets, decided, classes, fraction) for fraction in head_fractions}


def mean_false_head_rate(rates: Mapping[float, float]) -> float:
    """The mean of the rates that are defined: of two classes, for one, the first 75% are both, and none is tail."""
    each = np.array(list(rates.values()))
    return mean(each[~np.isnan(each)])

"""Metrics: plain functions of arrays, and the registry that every table, report and scorer reads.

`targets` (N,) are class indices; `decided` (N,) too, with -1 where the action is not a class (abstained).
An abstention is not a correct decision: it lowers `accuracy` and does not enter `kept_accuracy`.
A metric of no samples is NaN.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.decide.classes import Classes, Indices
from rfdlc.decide.scores import PROBABILITY_FLOOR, Floats
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError, choose

if TYPE_CHECKING:
    from rfdlc.decide.outcomes import Outcomes

HEAD_FRACTIONS = (0.25, 0.5, 0.75)
ECE_BINS, PAPER_ECE_BINS = 15, 10


def mean(values: NDArray[Any]) -> float:
    """The mean, or NaN of no values."""
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
    """Share of tail samples decided as head, where the head is the most frequent `head_fraction` of the classes.

    The paper's "tail ratio" of 25% is this head fraction of 25%: the other 75% of the classes are tail.
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
    """Mean of max_a U[true, a] - U[true, action]: the utility that the best action would have added."""
    return mean((utility.matrix.max(axis=1)[:, None] - utility.matrix)[targets, actions])


def abstention_rate(decided: Indices) -> float:
    """Share of samples whose action is not a class."""
    return mean(decided < 0)


def kept_accuracy(targets: Indices, decided: Indices) -> float:
    """Accuracy on the samples that were decided for a class."""
    kept = decided >= 0
    return mean(decided[kept] == targets[kept])


# -- detecting errors ---------------------------------------------------------------------------------------------


def error_auc(correct: NDArray[np.bool_], confidence: Floats) -> float:
    """Probability that a correct decision has a higher confidence than a wrong one, ties counting half (ROC AUC)."""
    correct = np.asarray(correct, dtype=bool)
    right, wrong = int(correct.sum()), int((~correct).sum())
    if not right or not wrong:
        return float("nan")
    _, place, count = np.unique(confidence, return_inverse=True, return_counts=True)
    rank = np.cumsum(count) - (count - 1) / 2  # mean rank of equal values
    return float((rank[place][correct].sum() - right * (right + 1) / 2) / (right * wrong))


def risk_coverage(correct: NDArray[np.bool_], confidence: Floats) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Coverage k/N and the error rate among the k most confident samples, for k = 1..N.

    Errors are spread evenly over samples of equal confidence, so the order of the samples does not matter.
    """
    _, place, count = np.unique(-np.asarray(confidence), return_inverse=True, return_counts=True)
    wrong = np.bincount(place, weights=~np.asarray(correct, dtype=bool), minlength=len(count))
    errors = np.repeat(wrong / count, count)
    kept = np.arange(1, len(errors) + 1)
    return kept / max(1, len(errors)), np.cumsum(errors) / kept


def risk_coverage_area(correct: NDArray[np.bool_], confidence: Floats) -> float:
    """Mean error rate over all coverages: lower means that confidence ranks errors better."""
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
    """The paper's measure: confidence 1 - entropy in nats, bins [lower, upper), samples outside [0, 1) in no bin.

    Those samples stay in the denominator. Kept to reproduce the paper; it is not a calibration error (use `ece`).
    """
    if not len(entropy):
        return float("nan")
    confidence = 1 - np.asarray(entropy, dtype=np.float64)
    inside = (confidence >= 0) & (confidence < 1)
    place = np.searchsorted(np.arange(bins + 1) / bins, confidence[inside], side="right") - 1
    gap = np.asarray(correct, dtype=np.float64)[inside] - confidence[inside]
    return float(np.abs(np.bincount(place, weights=gap, minlength=bins)).sum() / len(confidence))


def classwise_gaps(probabilities: Floats, targets: Indices, bins: int = ECE_BINS) -> NDArray[np.float64]:
    """Per class and bin (C, bins) the sum over samples of 1{y = c} - p(c): sums over chunks of the data add up."""
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
    """sum_c (p(c) - 1{y = c})^2 per sample (N,)."""
    true = probabilities[np.arange(len(targets)), targets]
    return np.einsum("nc,nc->n", probabilities, probabilities) - 2 * true + 1


def nll(true_probability: Floats) -> NDArray[Any]:
    """-log p(y) per sample (N,), finite where p(y) is 0."""
    return -np.log(np.maximum(true_probability, PROBABILITY_FLOOR))


def false_head_rates(
    targets: Indices, decided: Indices, classes: Classes, head_fractions: Sequence[float] = HEAD_FRACTIONS
) -> dict[float, float]:
    """The false head rate at each head fraction."""
    return {fraction: false_head_rate(targets, decided, classes, fraction) for fraction in head_fractions}


def mean_false_head_rate(rates: Mapping[float, float]) -> float:
    """The mean of the rates that are defined: with two classes, the first 75% are both classes and no tail is left."""
    each = np.array(list(rates.values()))
    return mean(each[~np.isnan(each)])


# -- the registry -------------------------------------------------------------------------------------------------


Value = float | Mapping[Any, float]


@dataclass(frozen=True)
class Metric:
    """An entry of the registry: see `register_metric`."""

    name: str
    label: str
    function: Callable[["Outcomes"], Value]
    direction: str = "higher"
    unit: str = ""
    parent: str | None = None
    headline: bool = False

    def format(self, value: float) -> str:
        """The value as tables show it.

        >>> METRICS["accuracy"].format(0.5), METRICS["nll"].format(-1.5), METRICS["nll"].format(2.5e-7)
        ('50.00%', '-1.5000', '2.5e-07')
        """
        return f"{value:.2%}" if self.unit == "%" else readable(value)


METRICS: dict[str, Metric] = {}
RESERVED = ("samples", "values", "intervals", "uncertainty")


def register_metric(
    name: str,
    label: str,
    function: Callable[["Outcomes"], Value],
    *,
    direction: str = "higher",
    unit: str = "",
    parent: str | None = None,
    headline: bool = False,
) -> Metric:
    """Add a metric to evaluations, tables, reports, model cards and scorers.

    Parameters
    ----------
    name : str
        Key in files and attribute of `Evaluation`.
    label : str
        Name in tables. If the function returns a dict, a format for its keys, such as "{} shot".
    function : callable
        Maps `Outcomes` to a number (NaN where undefined), or to a dict of numbers.
    direction : {"higher", "lower", "none"}
        Which values are better.
    unit : str
        "%" for shares between 0 and 1, which tables show as percentages; "" for plain numbers.
    parent : str, optional
        Name of the metric below which tables indent this one.
    headline : bool
        Whether short tables show the metric too.

    Returns
    -------
    Metric

    Raises
    ------
    InputError
        If the name is taken or is not an identifier, or the direction is unknown.
    """
    if not name.isidentifier() or name in METRICS or name in RESERVED:
        raise InputError(f"metric name {name!r} is taken or is not an identifier: expected a new name, such as 'top_5'")
    choose("direction", direction, ("higher", "lower", "none"))
    METRICS[name] = Metric(name, label, function, direction, unit, parent, headline)
    return METRICS[name]


def measure(outcomes: "Outcomes") -> dict[str, Value]:
    """Every registered metric, by name."""
    return {name: metric.function(outcomes) for name, metric in METRICS.items()}


def readable(value: float) -> str:
    """Four decimals, or four digits where four decimals would show nothing or would be too long.

    >>> readable(-1.5), readable(2.5e-07), readable(-1.07442e14)
    ('-1.5000', '2.5e-07', '-1.074e+14')
    """
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e7 else f"{value:.4g}"


def regions(o: "Outcomes", kind: str) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Regions that have classes, and which samples truly belong to each; nothing without training counts."""
    for name, members in ({} if o.classes.counts is None else getattr(o.classes, kind)).items():
        if len(members):
            yield name, np.isin(o.targets, members)


def _accuracies(o: "Outcomes", kind: str) -> dict[str, float]:
    return {name: mean((o.decided == o.targets)[rows]) for name, rows in regions(o, kind)}


def _ece_by_region(o: "Outcomes") -> dict[str, float]:
    return {name: ece(o.confidence[rows], o.right[rows]) for name, rows in regions(o, "thirds")}


def _false_head_rates(o: "Outcomes") -> dict[float, float]:
    return {} if o.classes.counts is None else false_head_rates(o.targets, o.decided, o.classes)


def _group_rates(o: "Outcomes") -> dict[str, float]:
    return {
        f"{true} as {wrong}": group_rate(o.targets, o.decided, o.classes.members(true), o.classes.members(wrong))
        for true, wrong in o.groups
    }


def errors(o: "Outcomes") -> tuple[NDArray[np.bool_], Floats]:
    """Of the samples decided for a class: whether the decision is correct, and the certainty."""
    kept = o.decided >= 0
    return (o.decided == o.targets)[kept], o.certainty[kept]


def _classwise_ece(o: "Outcomes") -> float:
    return float("nan") if o.gaps is None else float(np.abs(o.gaps).sum() / len(o) / len(o.gaps))


# fmt: off
for _metric in (
    Metric("accuracy", "accuracy", lambda o: accuracy(o.targets, o.decided), unit="%", headline=True),
    Metric("accuracy_by_region", "{}", lambda o: _accuracies(o, "thirds"), unit="%", parent="accuracy", headline=True),
    Metric("accuracy_by_shots", "{} shot", lambda o: _accuracies(o, "shots"), unit="%", parent="accuracy"),
    Metric("balanced_accuracy", "balanced accuracy",
           lambda o: balanced_accuracy(o.targets, o.decided, len(o.classes)), unit="%"),
    Metric("macro_f1", "macro F1", lambda o: macro_f1(o.targets, o.decided, len(o.classes)), unit="%"),
    Metric("false_head_rate", "false head rate",
           lambda o: mean_false_head_rate(_false_head_rates(o)), "lower", "%", headline=True),
    Metric("false_head_rates", "head = first {}", _false_head_rates, "lower", "%", "false_head_rate"),
    Metric("mean_utility", "mean utility", lambda o: mean_utility(o.targets, o.actions, o.utility), headline=True),
    Metric("mean_regret", "mean regret", lambda o: mean_regret(o.targets, o.actions, o.utility), "lower"),
    Metric("abstention_rate", "abstained", lambda o: abstention_rate(o.decided), "none", "%"),
    Metric("kept_accuracy", "accuracy where kept", lambda o: kept_accuracy(o.targets, o.decided), unit="%"),
    Metric("error_auc", "error detection AUC", lambda o: error_auc(*errors(o)), unit="%"),
    Metric("risk_coverage_area", "risk-coverage area", lambda o: risk_coverage_area(*errors(o)), "lower", "%"),
    Metric("ece", "ECE", lambda o: ece(o.confidence, o.right), "lower", "%", headline=True),
    Metric("ece_by_region", "{}", _ece_by_region, "lower", "%", "ece"),
    Metric("classwise_ece", "class-wise ECE", _classwise_ece, "lower", "%"),
    Metric("brier", "Brier score", lambda o: mean(o.brier), "lower"),
    Metric("nll", "negative log-likelihood", lambda o: mean(o.nll), "lower", "nats"),
    Metric("ece_paper", "ECE as in the paper", lambda o: ece_paper(o.entropy, o.right), "lower", "%"),
    Metric("group_rates", "{}", _group_rates, "none", "%"),
):
    METRICS[_metric.name] = _metric
# fmt: on

"""Metrics: one registry that evaluations, tables, reports, model cards, scorers and the study read.

`targets` (N,) are class indices; `decided` (N,) too, with -1 where the action is not a class (abstained).
A metric of no samples is NaN.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.decide.classes import Classes, Indices
from rfdlc.decide.intervals import CalibrationGap, Mean, RocArea
from rfdlc.decide.scores import PROBABILITY_FLOOR, Floats
from rfdlc.errors import InputError, choose

if TYPE_CHECKING:
    from rfdlc.decide.outcomes import Outcomes

HEAD_FRACTIONS = (0.25, 0.5, 0.75)
ECE_BINS, PAPER_ECE_BINS = 15, 10
RESERVED = ("samples", "values", "intervals", "uncertainty")
NAN = float("nan")


@dataclass(frozen=True)
class Metric:
    """An entry of the registry.

    Parameters
    ----------
    name : str
        Key in files and attribute of `Evaluation`.
    label : str
        Name in tables. If the function returns a dict, a format for its keys, such as "{} shot".
    function : callable
        Maps `Outcomes` to an array of one value per sample whose mean is the metric (NaN where a sample does not
        count), to a number (NaN where undefined), to an estimate with `value` and `interval()`, or to a dict of these.
    direction : {"higher", "lower", "none"}
        Which values are better.
    unit : str
        "%" for shares between 0 and 1, which tables show as percentages; "" for plain numbers.
    parent : str, optional
        Name of the metric below which tables indent this one.
    headline : bool
        Whether short tables show the metric too.
    resample : bool
        Whether a number has a bootstrap interval.

    Examples
    --------
    >>> METRICS["accuracy"].format(0.5), METRICS["nll"].format(-1.5), METRICS["nll"].format(2.5e-7)
    ('50.00%', '-1.5000', '2.5e-07')
    """

    name: str
    label: str
    function: Callable[["Outcomes"], Any]
    direction: str = "higher"
    unit: str = ""
    parent: str | None = None
    headline: bool = False
    resample: bool = True

    def format(self, value: float) -> str:
        """The value as tables show it."""
        return f"{value:.2%}" if self.unit == "%" else readable(value)

    def estimates(self, outcomes: "Outcomes") -> dict[Any, Any]:
        """The estimates by part, under None where the metric has no parts; arrays are means, numbers stay."""
        found = self.function(outcomes)
        parts = found if isinstance(found, Mapping) else {None: found}
        return {k: Mean(np.asarray(v, dtype=np.float64)) if isinstance(v, np.ndarray) else v for k, v in parts.items()}

    def measure(self, outcomes: "Outcomes") -> Any:
        """The metric of some samples: a number, or a dict of numbers."""
        numbers = {key: float(getattr(value, "value", value)) for key, value in self.estimates(outcomes).items()}
        return numbers.get(None, numbers)


METRICS: dict[str, Metric] = {}


def register_metric(metric: Metric) -> Metric:
    """Add a metric to evaluations, tables, reports, model cards and scorers."""
    if not metric.name.isidentifier() or metric.name in (*METRICS, *RESERVED):
        raise InputError(
            f"metric name {metric.name!r} is taken or is not an identifier: expected a new one, as 'top_5'"
        )
    choose("direction", metric.direction, ("higher", "lower", "none"))
    METRICS[metric.name] = metric
    return metric


def measure(outcomes: "Outcomes") -> dict[str, Any]:
    """Every registered metric, by name."""
    return {name: metric.measure(outcomes) for name, metric in METRICS.items()}


def readable(value: float) -> str:
    """Four decimals, or four digits where four decimals would show nothing or would be too long.

    >>> readable(-1.5), readable(2.5e-07), readable(-1.07442e14)
    ('-1.5000', '2.5e-07', '-1.074e+14')
    """
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e7 else f"{value:.4g}"


# -- decisions --------------------------------------------------------------------------------------------------


def recalls(targets: Indices, decided: Indices, classes: int) -> NDArray[np.float64]:
    """Accuracy of each class (C,), NaN for a class without samples."""
    total = np.bincount(targets, minlength=classes)
    right = np.bincount(targets[decided == targets], minlength=classes)
    return np.divide(right, total, out=np.full(classes, np.nan), where=total > 0)


def macro_f1(targets: Indices, decided: Indices, classes: int) -> float:
    """Mean of 2 right / (true + decided) over the classes that are true or decided anywhere."""
    true = np.bincount(targets, minlength=classes)
    claimed = np.bincount(decided[decided >= 0], minlength=classes)
    right = np.bincount(targets[decided == targets], minlength=classes)
    seen = true + claimed > 0
    return float(np.mean(2 * right[seen] / (true + claimed)[seen])) if seen.any() else NAN


def false_heads(
    targets: Indices, decided: Indices, classes: Classes, head_fractions: Sequence[float] = HEAD_FRACTIONS
) -> dict[float, NDArray[np.float64]]:
    """Per head fraction, 1 for a tail sample decided as head, 0 for any other tail sample, NaN for a head sample.

    The head is that share of the classes, the most frequent ones. The paper's "tail ratio" of 25% is the head fraction
    of 25%: the other 75% of the classes are tail.
    """
    heads = {fraction: classes.head_mask(fraction) for fraction in head_fractions}
    return {f: np.where(head[targets], NAN, (decided >= 0) & head[decided]) for f, head in heads.items()}


def false_head_rates(*args: Any, **options: Any) -> dict[float, float]:
    """The share of tail samples decided as head per head fraction, with the arguments of `false_heads`."""
    return {fraction: Mean(found).value for fraction, found in false_heads(*args, **options).items()}


def mean_false_head_rate(rates: Mapping[float, float]) -> float:
    """The mean of the rates that are defined: with two classes, the first 75% are both and leave no tail."""
    return Mean(np.array(list(rates.values()))).value


# -- detecting errors ---------------------------------------------------------------------------------------------


def error_auc(correct: NDArray[np.bool_], confidence: Floats) -> float:
    """Probability that a correct decision has a higher confidence than a wrong one, ties counting half (ROC AUC)."""
    return RocArea(correct, confidence).value


def risk_coverage(correct: NDArray[np.bool_], confidence: Floats) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Coverage k/N and the error rate among the k most confident samples, for k = 1..N.

    Errors are spread evenly over samples of equal confidence, so the order of the samples does not matter.
    """
    _, place, count = np.unique(-np.asarray(confidence), return_inverse=True, return_counts=True)
    wrong = np.bincount(place, weights=~correct, minlength=len(count))
    errors = np.repeat(wrong / count, count)
    kept = np.arange(1, len(errors) + 1)
    return kept / max(1, len(errors)), np.cumsum(errors) / kept


# -- calibration --------------------------------------------------------------------------------------------------


def bin_of(confidence: Floats, bins: int = ECE_BINS) -> Indices:
    """Equal-width bins (lower, upper]; 0 belongs to the first."""
    return np.searchsorted(np.linspace(0, 1, bins + 1)[1:-1], confidence, side="left")


def ece(confidence: Floats, correct: NDArray[np.bool_], bins: int = ECE_BINS) -> float:
    """Expected calibration error: sum over bins of (n_b / N) |accuracy_b - mean confidence_b| (Guo et al. 2017)."""
    gap = np.asarray(correct, dtype=np.float64) - confidence
    total = np.abs(np.bincount(bin_of(confidence, bins), weights=gap, minlength=bins)).sum()
    return float(total / len(gap)) if len(gap) else NAN


def ece_paper(entropy: Floats, correct: NDArray[np.bool_], bins: int = PAPER_ECE_BINS) -> float:
    """The paper's measure: confidence 1 - entropy in nats, bins [lower, upper), samples outside [0, 1) in no bin.

    Those samples stay in the denominator. Kept to reproduce the paper; it is not a calibration error (use `ece`).
    """
    confidence = 1 - np.asarray(entropy, dtype=np.float64)
    inside = (confidence >= 0) & (confidence < 1)
    place = np.searchsorted(np.arange(bins + 1) / bins, confidence[inside], side="right") - 1
    gap = np.asarray(correct, dtype=np.float64)[inside] - confidence[inside]
    total = np.abs(np.bincount(place, weights=gap, minlength=bins)).sum()
    return float(total / len(confidence)) if len(confidence) else NAN


def classwise_gaps(probabilities: Floats, targets: Indices, bins: int = ECE_BINS) -> NDArray[np.float64]:
    """Per class and bin (C, bins) the sum over samples of 1{y = c} - p(c): sums over chunks of the data add up."""
    classes = probabilities.shape[1]
    place = bin_of(probabilities, bins) + np.arange(classes) * bins
    gaps: NDArray[np.float64] = -np.bincount(place.ravel(), probabilities.ravel(), classes * bins).astype(np.float64)
    np.add.at(gaps, place[np.arange(len(targets)), targets], 1)
    return gaps.reshape(classes, bins)


def brier(probabilities: Floats, targets: Indices) -> NDArray[Any]:
    """sum_c (p(c) - 1{y = c})^2 per sample (N,)."""
    true = probabilities[np.arange(len(targets)), targets]
    return np.einsum("nc,nc->n", probabilities, probabilities) - 2 * true + 1


def nll(true_probability: Floats) -> NDArray[Any]:
    """-log p(y) per sample (N,), finite where p(y) is 0."""
    return -np.log(np.maximum(true_probability, PROBABILITY_FLOOR))


# -- the registry -------------------------------------------------------------------------------------------------


def regions(o: "Outcomes", kind: str, of: Indices | None = None) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Regions that have classes, and the samples whose class (`of`, or the true one) is in each."""
    for name, members in ({} if o.classes.counts is None else getattr(o.classes, kind)).items():
        if len(members):
            yield name, np.isin(o.targets if of is None else of, members)


def errors(o: "Outcomes") -> tuple[NDArray[np.bool_], Floats]:
    """Of the samples decided for a class: whether the decision is correct, and the certainty."""
    kept = o.decided >= 0
    return o.correct[kept], o.certainty[kept]


def _accuracies(o: "Outcomes", kind: str) -> dict[str, Any]:
    return {name: np.where(rows, o.correct, NAN) for name, rows in regions(o, kind)}


def _false_heads(o: "Outcomes") -> dict[float, Any]:
    return {} if o.classes.counts is None else false_heads(o.targets, o.decided, o.classes)


def _false_head_rate(o: "Outcomes") -> Any:
    """The mean of the rates at all head fractions, as a sum over true classes: their samples are independent."""
    found = np.array([rate for rate in _false_heads(o).values() if not np.isnan(rate).all()])
    if not len(found):
        return NAN
    weight = (~np.isnan(found) / (~np.isnan(found)).sum(axis=1, keepdims=True)).mean(axis=0)  # of each sample
    wrong = (np.nan_to_num(found) / (~np.isnan(found)).sum(axis=1, keepdims=True)).mean(axis=0)
    values = np.divide(wrong, weight, out=np.full(len(o), NAN), where=weight > 0)
    return Mean(values, o.targets, np.bincount(o.targets, weights=weight))


def _gap(o: "Outcomes", rows: Any = slice(None), debiased: bool = False) -> CalibrationGap:
    return CalibrationGap(o.confidence[rows], o.right[rows], bin_of(o.confidence[rows]), debiased)


def _group_rates(o: "Outcomes") -> dict[str, Any]:
    names = {f"{true} as {wrong}": (o.classes.members(true), o.classes.members(wrong)) for true, wrong in o.groups}
    return {
        name: np.where(np.isin(o.targets, true), np.isin(o.decided, wrong), NAN)
        for name, (true, wrong) in names.items()
    }


# fmt: off
for _metric in (
    Metric("accuracy", "accuracy", lambda o: o.correct, unit="%", headline=True),
    Metric("accuracy_by_region", "{}", lambda o: _accuracies(o, "thirds"), unit="%", parent="accuracy", headline=True),
    Metric("accuracy_by_shots", "{} shot", lambda o: _accuracies(o, "shots"), unit="%", parent="accuracy"),
    Metric("balanced_accuracy", "balanced accuracy", lambda o: Mean(o.correct.astype(float), o.targets), unit="%"),
    Metric("macro_f1", "macro F1", lambda o: macro_f1(o.targets, o.decided, len(o.classes)), unit="%",
           resample=False),  # resampling does not cover it where classes have few samples
    Metric("false_head_rate", "false head rate", _false_head_rate, "lower", "%", headline=True),
    Metric("false_head_rates", "head = first {}", _false_heads, "lower", "%", "false_head_rate"),
    Metric("mean_utility", "mean utility", lambda o: o.realised, headline=True),
    Metric("mean_regret", "mean regret",
           lambda o: (o.utility.matrix.max(axis=1)[:, None] - o.utility.matrix)[o.targets, o.actions], "lower"),
    Metric("abstention_rate", "abstained", lambda o: o.decided < 0, "none", "%"),
    Metric("kept_accuracy", "accuracy where kept", lambda o: np.where(o.decided < 0, NAN, o.correct), unit="%"),
    Metric("error_auc", "error detection AUC", lambda o: RocArea(*errors(o)), unit="%"),
    Metric("risk_coverage_area", "risk-coverage area",
           lambda o: Mean(risk_coverage(*errors(o))[1]).value, "lower", "%"),
    Metric("ece", "ECE", lambda o: _gap(o), "lower", "%", headline=True),
    Metric("ece_debiased", "debiased", lambda o: _gap(o, debiased=True), "lower", "%", "ece"),
    Metric("ece_by_region", "predicted {}",
           lambda o: {name: _gap(o, rows) for name, rows in regions(o, "thirds", o.likeliest)}, "lower", "%", "ece"),
    Metric("classwise_ece", "class-wise ECE",
           lambda o: NAN if o.gaps is None else np.abs(o.gaps).sum() / len(o) / len(o.gaps),
           "lower", "%", resample=False),
    Metric("brier", "Brier score", lambda o: o.brier, "lower"),
    Metric("nll", "negative log-likelihood", lambda o: o.nll, "lower", "nats"),
    Metric("utility_gap", "promised minus realised utility", lambda o: o.expected - o.realised, "none"),
    Metric("utility_gap_by_region", "predicted {}",
           lambda o: {name: np.where(rows, o.expected - o.realised, NAN)
                      for name, rows in regions(o, "thirds", o.likeliest)}, "none", "", "utility_gap"),
    Metric("utility_gap_by_action", "action {}",
           lambda o: {o.utility.actions[a]: np.where(o.actions == a, o.expected - o.realised, NAN)
                      for a in np.unique(o.actions)}, "none", "", "utility_gap"),
    Metric("ece_paper", "ECE as in the paper", lambda o: ece_paper(o.entropy, o.right), "lower", "%", resample=False),
    Metric("ece_by_true_region", "true {}",
           lambda o: {name: ece(o.confidence[rows], o.right[rows]) for name, rows in regions(o, "thirds")},
           "lower", "%", "ece_paper", resample=False),
    Metric("group_rates", "{}", _group_rates, "none", "%"),
):
    register_metric(_metric)
# fmt: on

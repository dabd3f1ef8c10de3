"""Figures of `rfdlc.decide.metrics` with scikit-learn's signatures, for its scorers and searches.

`y_true` and `y_pred` hold labels of any type, `y_proba` (N, C) has its columns in the order of the sorted labels.
Accuracy, balanced accuracy, F1, log loss and the Brier score are scikit-learn's own.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.metrics import make_scorer
from sklearn.utils.validation import check_consistent_length, column_or_1d

from rfdlc.decide import metrics
from rfdlc.decide.classes import Classes, Indices
from rfdlc.decide.scores import Floats, as_scores
from rfdlc.decide.uncertainty import max_probability
from rfdlc.decide.utility import ABSTAIN
from rfdlc.errors import InputError, listing
from rfdlc.integrations.sklearn.labels import (
    Labels,
    action_labels,
    as_sample_weight,
    as_utility,
    decided_actions,
    label_names,
    named_utility,
)


def make_utility_scorer(utility: Any, *, labels: ArrayLike | None = None, abstain_label: Any = -1) -> Any:
    """A scorer of the mean utility of an estimator's decisions, for GridSearchCV and cross_val_score.

    Give `labels`, all of them and sorted, with an array where a fold may lack a class. `tail-sensitive` tells head and
    tail by the samples of a fold: give a Utility (`Utility.tail_sensitive`) to have the same ones in every fold.

    >>> from sklearn.datasets import load_iris
    >>> from sklearn.model_selection import cross_val_score
    >>> from sklearn.naive_bayes import GaussianNB
    >>> X, y = load_iris(return_X_y=True)
    >>> cross_val_score(GaussianNB(), X, y, scoring=make_utility_scorer([[1, 0, 0], [0, 1, -5], [0, -2, 1]]), cv=3)
    array([0.58, 0.7 , 0.88])
    """
    return make_scorer(mean_utility_score, utility=utility, labels=labels, abstain_label=abstain_label)


def mean_utility_score(
    y_true: ArrayLike,
    y_pred: ArrayLike,
    *,
    utility: Any,
    labels: ArrayLike | None = None,
    abstain_label: Any = -1,
    sample_weight: ArrayLike | None = None,
) -> float:
    """Mean of U[true, decided]. `utility` as in UtilityClassifier.

    The classes are those of the utility where it has names, else `labels`, else the labels that occur in either.
    """
    gained = _gains(y_true, y_pred, utility, labels, abstain_label)[0]
    return float(np.average(gained, weights=_weights(sample_weight, gained)))


def mean_regret_score(
    y_true: ArrayLike,
    y_pred: ArrayLike,
    *,
    utility: Any,
    labels: ArrayLike | None = None,
    abstain_label: Any = -1,
    sample_weight: ArrayLike | None = None,
) -> float:
    """Mean of what the best action would have been worth more: the less, the better."""
    gained, best = _gains(y_true, y_pred, utility, labels, abstain_label)
    return float(np.average(best - gained, weights=_weights(sample_weight, gained)))


def false_head_rate_score(
    y_true: ArrayLike, y_pred: ArrayLike, *, y_train: ArrayLike, head_fraction: float = 0.5
) -> float:
    """Share of tail samples decided as head; the head is the most frequent `head_fraction` of the classes in `y_train`.

    A decision that is no class (an abstention) is no false head. The less, the better.

    >>> false_head_rate_score(["b", "b", "a"], ["a", "b", "a"], y_train=["a"] * 9 + ["b"])
    0.5
    """
    labels, counts = np.unique(column_or_1d(y_train), return_counts=True)
    classes = Classes.from_counts(counts, label_names(labels))
    return metrics.false_head_rate(*_decided(y_true, y_pred, labels), classes, head_fraction)


def group_rate_score(y_true: ArrayLike, y_pred: ArrayLike, *, true: Iterable[Any], decided: Iterable[Any]) -> float:
    """Share of the samples of the classes `true` that are decided as one of the classes `decided`."""
    groups = list(true), list(decided)
    labels = np.unique(np.concatenate([column_or_1d(y_true), column_or_1d(y_pred), *groups]))
    rows, columns = (np.searchsorted(labels, group) for group in groups)
    return metrics.group_rate(*_decided(y_true, y_pred, labels), rows, columns)


def abstention_rate_score(y_true: ArrayLike, y_pred: ArrayLike) -> float:
    """Share of decisions that are no class of `y_true`."""
    return metrics.abstention_rate(_decided(y_true, y_pred, np.unique(column_or_1d(y_true)))[1])


def kept_accuracy_score(y_true: ArrayLike, y_pred: ArrayLike) -> float:
    """Accuracy among the decisions that are a class of `y_true`."""
    return metrics.kept_accuracy(*_decided(y_true, y_pred, np.unique(column_or_1d(y_true))))


def expected_calibration_error(
    y_true: ArrayLike, y_proba: ArrayLike, *, labels: ArrayLike | None = None, bins: int = metrics.ECE_BINS
) -> float:
    """Mean gap between confidence and accuracy over equal-width bins of confidence (Guo et al. 2017).

    >>> expected_calibration_error([0, 1], [[0.8, 0.2], [0.2, 0.8]])
    0.2
    """
    y, p = _probabilities(y_true, y_proba, labels)
    return round(metrics.ece(p.max(axis=1), p.argmax(axis=1) == y, bins), 15)


def classwise_calibration_error(
    y_true: ArrayLike, y_proba: ArrayLike, *, labels: ArrayLike | None = None, bins: int = metrics.ECE_BINS
) -> float:
    """Mean over classes of the calibration error of that class's probability (Kull et al. 2019)."""
    y, p = _probabilities(y_true, y_proba, labels)
    return metrics.classwise_ece(p, y, bins)


def error_detection_auc(y_true: ArrayLike, y_proba: ArrayLike, *, labels: ArrayLike | None = None) -> float:
    """Probability that the most probable class is surer where it is right than where it is wrong."""
    y, p = _probabilities(y_true, y_proba, labels)
    return metrics.error_auc(p.argmax(axis=1) == y, -max_probability(p))


def risk_coverage_area(y_true: ArrayLike, y_proba: ArrayLike, *, labels: ArrayLike | None = None) -> float:
    """Mean error rate among the surest samples over all coverages: the less, the better."""
    y, p = _probabilities(y_true, y_proba, labels)
    return metrics.risk_coverage_area(p.argmax(axis=1) == y, -max_probability(p))


# -- from labels to indices ----------------------------------------------------------------------------------------


def _gains(
    y_true: ArrayLike, y_pred: ArrayLike, utility: Any, labels: ArrayLike | None, abstain_label: Any
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What each decision was worth, and what the best one would have been, (N,)."""
    true, decided = column_or_1d(y_true), column_or_1d(y_pred)
    check_consistent_length(true, decided)
    known = _labels(true, decided, utility, abstain_label) if labels is None else _sorted(labels)
    names = label_names(known)
    y = _positions(true, known, "y_true")
    worth = as_utility(utility, Classes.from_counts(np.bincount(y, minlength=len(known)), names))
    actions = decided_actions(decided, action_labels(worth, known, abstain_label))
    return worth.matrix[y, actions], worth.matrix.max(axis=1)[y]


def _sorted(labels: ArrayLike) -> Labels:
    """The labels as they are given; in another order, rows and columns would be taken for those of other classes."""
    given = column_or_1d(labels)
    if not np.array_equal(given, np.unique(given)):
        raise InputError(f"labels are {listing(given)}: expected each once and sorted, as rows and columns are")
    return given


def _labels(true: Labels, decided: Labels, utility: Any, abstain_label: Any) -> Labels:
    """The classes that are meant: all that the utility names, as labels like those of y; else what occurs."""
    named = named_utility(utility)
    if named is None:
        standing = abstain_label.values() if isinstance(abstain_label, dict) else (abstain_label, ABSTAIN)
        found = np.unique([*true.tolist(), *(label for label in decided.tolist() if label not in standing)])
        if np.ndim(utility) == 2 and len(utility) > len(found):
            raise InputError(
                f"utility has {len(utility)} rows but y_true and y_pred have {len(found)} classes ({listing(found)}): "
                "give labels, all of them, sorted"
            )
        return found
    names = np.array(named.classes.names)
    if true.dtype.kind == "b" and set(names) <= {"False", "True"}:
        return np.unique(names == "True")
    if true.dtype.kind not in "iufb":
        return np.unique(names)
    try:
        return np.unique(names.astype(np.float64).astype(true.dtype))
    except ValueError:
        raise InputError(f"y_true holds numbers but the utility's classes are {listing(names)}") from None


def _decided(y_true: ArrayLike, y_pred: ArrayLike, labels: Labels) -> tuple[Indices, Indices]:
    """Indices of the true labels, and of the decided ones with -1 for what is no class."""
    true, decided = column_or_1d(y_true), column_or_1d(y_pred)
    check_consistent_length(true, decided)
    place = {label: i for i, label in enumerate(labels.tolist())}
    found = np.array([place.get(label, -1) for label in decided.tolist()], dtype=np.int64)
    return _positions(true, labels, "y_true"), found


def _positions(y: Labels, labels: Labels, what: str) -> Indices:
    unknown = np.setdiff1d(y, labels).tolist()
    if unknown:
        raise InputError(f"{what} contains {unknown[0]!r}, which is no class: expected one of {listing(labels)}")
    return np.searchsorted(labels, y)


def _probabilities(y_true: ArrayLike, y_proba: ArrayLike, labels: ArrayLike | None) -> tuple[Indices, Floats]:
    true, p = column_or_1d(y_true), np.asarray(y_proba, dtype=np.float64)
    if p.ndim == 1:
        p = np.column_stack([1 - p, p])
    check_consistent_length(true, p)
    known = np.unique(true) if labels is None else _sorted(labels)
    if p.shape[1] != len(known):
        raise InputError(
            f"y_proba has {p.shape[1]} columns but there are {len(known)} classes ({listing(known)}): "
            "expected one column a class; give labels where y_true lacks some"
        )
    as_scores(p, Classes(tuple(label_names(known)))).check()
    return _positions(true, known, "y_true"), p


def _weights(sample_weight: ArrayLike | None, samples: NDArray[Any]) -> NDArray[np.float64] | None:
    return None if sample_weight is None else as_sample_weight(sample_weight, samples)

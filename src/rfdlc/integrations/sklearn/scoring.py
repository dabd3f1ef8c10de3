"""Scorers of decisions, for `GridSearchCV` and `cross_val_score`."""

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.metrics import make_scorer
from sklearn.utils.validation import check_consistent_length, column_or_1d

from rfdlc.decide.classes import Classes
from rfdlc.decide.evaluation import entries
from rfdlc.decide.metrics import METRICS, Metric
from rfdlc.decide.outcomes import Outcomes
from rfdlc.decide.utility import ABSTAIN
from rfdlc.errors import InputError, choose, listing
from rfdlc.integrations.sklearn.labels import (
    Labels,
    action_labels,
    as_sample_weight,
    as_utility,
    label_names,
    named_utility,
)

NO_CLASS, NO_ACTION = "y_true contains {!r}, which is not a class", "{!r} is not an action of the utility"


def make_utility_scorer(utility: Any, *, labels: ArrayLike | None = None, abstain_label: Any = -1) -> Any:
    """Make a scorer of the mean utility of an estimator's decisions.

    Parameters
    ----------
    utility : Utility, data frame, path, array or str
        What each action is worth for each true class, as in `UtilityClassifier`. "tail-sensitive" tells head from tail
        by the samples of each fold; pass `Utility.tail_sensitive(classes)` to have the same ones in every fold.
    labels : array-like, optional
        All labels, sorted: needed for an array `utility` if a fold may lack a class.
    abstain_label : object, default -1
        Label of an action that is not a class, as in `UtilityClassifier`.

    Returns
    -------
    callable
        A scorer `(estimator, X, y) -> float`.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.model_selection import cross_val_score
    >>> from sklearn.naive_bayes import GaussianNB
    >>> X, y = load_iris(return_X_y=True)
    >>> cross_val_score(GaussianNB(), X, y, scoring=make_utility_scorer([[1, 0, 0], [0, 1, -5], [0, -2, 1]]), cv=3)
    array([0.58, 0.7 , 0.88])
    """
    return make_scorer(mean_utility_score, utility=utility, labels=labels, abstain_label=abstain_label)


def make_metric_scorer(
    name: str, *, utility: Any = None, y_train: ArrayLike | None = None, abstain_label: Any = -1
) -> Any:
    """Make a scorer of a registered metric, negated where low values are better.

    Parameters
    ----------
    name : str
        A name in `rfdlc.decide.metrics.METRICS`, with its part where it has parts, such as "false_head_rates.0.25".
    utility : optional
        As in `make_utility_scorer`; by default that of the estimator, if it has one, else "one-hot".
    y_train : array-like, optional
        Labels whose counts say which classes are head and tail, where the utility does not.
    abstain_label : object, default -1
        Label of an action that is not a class, as in `UtilityClassifier`.

    Returns
    -------
    callable
        A scorer `(estimator, X, y) -> float`.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.model_selection import cross_val_score
    >>> from sklearn.naive_bayes import GaussianNB
    >>> X, y = load_iris(return_X_y=True)
    >>> cross_val_score(GaussianNB(), X, y, scoring=make_metric_scorer("balanced_accuracy"), cv=3).round(2)
    array([0.92, 0.94, 0.96])
    """
    metric = METRICS[choose("metric", name.partition(".")[0], METRICS)]
    return partial(_score, metric=metric, name=name, utility=utility, y_train=y_train, abstain_label=abstain_label)


def _score(
    estimator: Any, X: Any, y: ArrayLike, *, metric: Metric, name: str, utility: Any, y_train: Any, abstain_label: Any
) -> float:
    labels, own = estimator.classes_, getattr(estimator, "decider_", None)
    classes = Classes(tuple(label_names(labels)))
    if y_train is not None:
        counts = np.bincount(_positions(column_or_1d(y_train), labels, NO_CLASS), minlength=len(labels))
        classes = Classes.from_counts(counts, classes.names)
    worth = as_utility(own.utility if utility is None and own is not None else utility, classes)
    actions = _positions(
        column_or_1d(estimator.predict(X)),
        action_labels(worth, labels, abstain_label),
        NO_ACTION,
    )
    p = estimator.predict_proba(X) if hasattr(estimator, "predict_proba") else None
    outcomes = Outcomes.of(worth, _positions(column_or_1d(y), labels, NO_CLASS), actions, p)
    values = {entry.name: entry.value for entry in entries({metric.name: metric.function(outcomes)})}
    if name not in values:
        raise InputError(f"metric {name!r} is not defined: expected one of {listing(values)}, or counts as y_train")
    return -values[name] if metric.direction == "lower" else values[name]


def mean_utility_score(
    y_true: ArrayLike,
    y_pred: ArrayLike,
    *,
    utility: Any,
    labels: ArrayLike | None = None,
    abstain_label: Any = -1,
    sample_weight: ArrayLike | None = None,
) -> float:
    """Mean of U[true, decided], with the parameters of `make_utility_scorer`.

    The classes are those of the utility if it names them, else `labels`, else all labels in `y_true` and `y_pred`.

    >>> mean_utility_score(["ill", "well"], ["well", "well"], utility=[[1, -9], [0, 1]])
    -4.0
    """
    true, decided = column_or_1d(y_true), column_or_1d(y_pred)
    check_consistent_length(true, decided)
    known = _labels(true, decided, utility, abstain_label) if labels is None else _sorted(labels)
    y = _positions(true, known, NO_CLASS)
    worth = as_utility(utility, Classes.from_counts(np.bincount(y, minlength=len(known)), label_names(known)))
    actions = action_labels(worth, known, abstain_label)
    gained = worth.matrix[y, _positions(decided, actions, NO_ACTION)]
    return float(np.average(gained, weights=None if sample_weight is None else as_sample_weight(sample_weight, gained)))


def _sorted(labels: ArrayLike) -> Labels:
    """The labels as they are given; in another order, rows and columns would be taken for those of other classes."""
    given = column_or_1d(labels)
    if not np.array_equal(given, np.unique(given)):
        raise InputError(f"labels are {listing(given)}: expected each once and sorted, as rows and columns are")
    return given


def _labels(true: Labels, decided: Labels, utility: Any, abstain_label: Any) -> Labels:
    """The classes that the utility names, as labels like those of y; else those that occur."""
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


def _positions(given: Labels, allowed: Labels, problem: str) -> Labels:
    """The index of each given label among the allowed ones."""
    place = {label: i for i, label in enumerate(allowed.tolist())}
    wrong = [label for label in given.tolist() if label not in place]
    if wrong:
        raise InputError(f"{problem.format(wrong[0])}: expected one of {listing(allowed)}")
    return np.array([place[label] for label in given.tolist()], dtype=np.int64)

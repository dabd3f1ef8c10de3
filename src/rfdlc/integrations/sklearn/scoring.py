"""Scorers of decisions, for `GridSearchCV` and `cross_val_score`."""

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils.validation import column_or_1d

from rfdlc.decide.classes import Classes
from rfdlc.decide.evaluation import entries
from rfdlc.decide.metrics import METRICS
from rfdlc.decide.outcomes import Outcomes
from rfdlc.errors import InputError, choose, expect, listing
from rfdlc.integrations.sklearn.labels import Labels, action_labels, as_utility, label_names, named_utility


def make_utility_scorer(utility: Any, *, labels: ArrayLike | None = None, abstain_label: Any = -1) -> Any:
    """Make a scorer `(estimator, X, y) -> float` of the mean utility of an estimator's decisions.

    Parameters
    ----------
    utility : Utility, data frame, path, array or str
        As in `UtilityClassifier`. "tail-sensitive" ranks classes by the samples of each fold; pass
        `Utility.tail_sensitive(classes)` to have the same ranks in every fold.
    labels : array-like, optional
        All labels, sorted; by default those that the utility names, or those that the estimator was fitted to.
    abstain_label : object, default -1
        Label of an action that is not a class, as in `UtilityClassifier`.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.model_selection import cross_val_score
    >>> from sklearn.naive_bayes import GaussianNB
    >>> X, y = load_iris(return_X_y=True)
    >>> cross_val_score(GaussianNB(), X, y, scoring=make_utility_scorer([[1, 0, 0], [0, 1, -5], [0, -2, 1]]), cv=3)
    array([0.58, 0.7 , 0.88])
    """
    return partial(_score, name="mean_utility", utility=utility, labels=labels, abstain_label=abstain_label)


def make_metric_scorer(
    name: str, *, utility: Any = None, y_train: ArrayLike | None = None, abstain_label: Any = -1
) -> Any:
    """Make a scorer of a metric in `rfdlc.decide.metrics.METRICS`, negated if low values are better.

    `name` may contain a part, such as "false_head_rates.0.25". The `utility` is by default that of the estimator, or
    "one-hot". `y_train` are labels whose counts say which classes are head and tail, if the utility does not.
    """
    choose("metric", name.partition(".")[0], METRICS)
    return partial(_score, name=name, utility=utility, y_train=y_train, abstain_label=abstain_label)


def _score(
    estimator: Any, X: Any, y: ArrayLike, *, name: str, utility: Any = None, labels: Any = None, y_train: Any = None,
    abstain_label: Any = -1,
) -> float:  # fmt: skip
    own, true = getattr(estimator, "decider_", None), column_or_1d(y)
    given = own.utility if utility is None and own is not None else utility
    known = _known_labels(estimator.classes_, given) if labels is None else column_or_1d(labels)
    in_order = np.array_equal(known, np.unique(known))
    expect(in_order, f"labels are {listing(known)}: expected each once and sorted, as rows and columns are")
    classes, targets = Classes(tuple(label_names(known))), _positions(true, known, "y contains {!r}, not a class")
    if y_train is not None or (isinstance(given, str) and given == "tail-sensitive"):
        counted = true if y_train is None else column_or_1d(y_train)
        counts = np.bincount(_positions(counted, known, "y_train contains {!r}, not a class"), minlength=len(known))
        classes = Classes.from_counts(counts, classes.names)
    worth = as_utility(given, classes)
    decided, allowed = column_or_1d(estimator.predict(X)), action_labels(worth, known, abstain_label)
    actions = _positions(decided, allowed, "{!r} is not an action of the utility")
    has_all = hasattr(estimator, "predict_proba") and len(known) == len(estimator.classes_)
    outcomes = Outcomes.of(worth, targets, actions, estimator.predict_proba(X) if has_all else None)
    metric = METRICS[name.partition(".")[0]]
    values = {entry.name: entry.value for entry in entries({metric.name: metric.measure(outcomes)})}
    expect(name in values, f"metric {name!r} is not defined: expected one of {listing(values)}, or counts as y_train")
    return -values[name] if metric.direction == "lower" else values[name]


def _known_labels(fitted: Labels, utility: Any) -> Labels:
    """The classes that a utility names, as labels like those of the estimator; else those of the estimator."""
    named = named_utility(utility)
    if named is None:
        return fitted
    names, kind = np.array(named.classes.names), fitted.dtype.kind
    if kind not in "iuf":
        return np.unique(names == "True" if kind == "b" else names)
    try:
        return np.unique(names.astype(np.float64).astype(fitted.dtype))
    except ValueError:
        raise InputError(f"y holds numbers but the utility's classes are {listing(names)}") from None


def _positions(given: Labels, allowed: Labels, problem: str) -> Labels:
    """The index of each given label among the allowed ones."""
    place = {label: i for i, label in enumerate(allowed.tolist())}
    for label in given.tolist():
        expect(label in place, f"{problem.format(label)}: expected one of {listing(allowed)}")
    return np.array([place[label] for label in given.tolist()], dtype=np.int64)

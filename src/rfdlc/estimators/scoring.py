"""Scorers of decisions for `GridSearchCV`; and labels of any type as the named classes
and actions of the library.
"""

from __future__ import annotations  # `help` shows them as written

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import column_or_1d

from rfdlc.decisions.decider import UPSIDE_DOWN
from rfdlc.decisions.utility import Utility
from rfdlc.errors import InputError, expect, listing, suggestion
from rfdlc.evaluation.evaluate import entries
from rfdlc.evaluation.metrics import METRICS
from rfdlc.evaluation.outcomes import Outcomes
from rfdlc.imports import choose_registered
from rfdlc.probabilities.classes import Classes
from rfdlc.probabilities.priors import PriorLike

Labels = NDArray[Any]
_BUILT = ("one-hot", "tail-sensitive")


def make_utility_scorer(
    utility: Any, *, labels: ArrayLike | None = None, abstain_label: Any = -1
) -> Any:
    """Make a scorer `(estimator, X, y) -> float` of the mean utility of an estimator's
    decisions.

    Parameters
    ----------
    utility, abstain_label : Utility, data frame, path, array or str; object, default -1
        As in `UtilityClassifier`. "tail-sensitive" ranks classes by the samples of each
        fold; pass `Utility.tail_sensitive(classes)` to have the same ranks in every
        fold.
    labels : array-like, optional
        All labels, sorted; by default those that the utility names. An array names
        none: then they are the labels that the estimator was fitted to.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.model_selection import cross_val_score
    >>> from sklearn.naive_bayes import GaussianNB
    >>> X, y = load_iris(return_X_y=True)
    >>> cross_val_score(
    ...     GaussianNB(),
    ...     X,
    ...     y,
    ...     scoring=make_utility_scorer([[1, 0, 0], [0, 1, -5], [0, -2, 1]]),
    ...     cv=3,
    ... )
    array([0.58, 0.7 , 0.88])
    """
    return partial(
        _score,
        name="mean_utility",
        utility=utility,
        labels=labels,
        abstain_label=abstain_label,
    )


def make_metric_scorer(
    name: str,
    *,
    utility: Any = None,
    y_train: ArrayLike | None = None,
    abstain_label: Any = -1,
) -> Any:
    """Make a scorer of a metric in `METRICS` or a part of one
    ("false_head_rates.0.25"), negated if low is better.

    The `utility` is by default that of the estimator, or "one-hot"; `y_train` are
    labels whose counts rank the classes.
    """
    choose_registered("metric", name.partition(".")[0], METRICS)
    return partial(
        _score, name=name, utility=utility, y_train=y_train, abstain_label=abstain_label
    )


def _score(
    estimator: Any,
    X: Any,
    y: ArrayLike,
    *,
    name: str,
    utility: Any = None,
    labels: Any = None,
    y_train: Any = None,
    abstain_label: Any = -1,
) -> float:
    own, true = getattr(estimator, "decider_", None), column_or_1d(y)
    given = (
        getattr(estimator, "utility_", own.utility)
        if utility is None and own is not None
        else utility
    )
    known = (
        _known_labels(estimator.classes_, given)
        if labels is None
        else column_or_1d(labels)
    )
    if (
        labels is None
        and (given is None or isinstance(given, str))
        and named_utility(given) is None
    ):
        known = np.union1d(known, true)  # these utilities are defined for any classes
    in_order = np.array_equal(known, np.unique(known))
    expect(
        in_order,
        f"labels are {listing(known)}: expected each once and sorted, as rows and"
        " columns are",
    )
    classes, targets = (
        Classes(tuple(label_names(known))),
        _positions(true, known, "y contains {!r}, not a class"),
    )
    if y_train is not None or (isinstance(given, str) and given == "tail-sensitive"):
        counted = true if y_train is None else column_or_1d(y_train)
        counts = np.bincount(
            _positions(counted, known, "y_train contains {!r}, not a class"),
            minlength=len(known),
        )
        classes = Classes.from_counts(counts, classes.names)
    worth = as_utility(given, classes)
    if worth.upside_down:
        warnings.warn(UPSIDE_DOWN, stacklevel=2)
    decided, allowed = (
        column_or_1d(estimator.predict(X)),
        action_labels(worth, known, abstain_label),
    )
    actions = _positions(decided, allowed, "{!r} is not an action of the utility")
    p = None
    if hasattr(estimator, "predict_proba") and np.isin(estimator.classes_, known).all():
        p = np.zeros(
            (len(true), len(known))
        )  # 0 for a class that the estimator never saw
        p[:, np.searchsorted(known, estimator.classes_)] = estimator.predict_proba(X)
    outcomes = Outcomes.of(worth, targets, actions, p)
    metric = METRICS[name.partition(".")[0]]
    values = {
        entry.name: entry.value
        for entry in entries({metric.name: metric.measure(outcomes)})
    }
    expect(
        name in values,
        f"metric {name!r} is not defined: expected one of {listing(values)}, or counts"
        " as y_train",
    )
    return -values[name] if metric.direction == "lower" else values[name]


def _known_labels(fitted: Labels, utility: Any) -> Labels:
    """The classes that a utility names, as labels like those of the estimator; else
    those of the estimator.
    """
    named = named_utility(utility)
    return (
        fitted if named is None else np.unique(as_labels(named.classes.names, fitted))
    )


def as_labels(classes: Sequence[str], like: Labels) -> Labels:
    """Names of classes as labels of the same kind as others."""
    names, kind = np.array(classes, dtype=str), like.dtype.kind
    if kind not in "iuf":
        return np.asarray(names == "True" if kind == "b" else names)
    try:
        return names.astype(np.float64).astype(like.dtype)
    except ValueError:
        raise InputError(
            f"y holds numbers but the utility's classes are {listing(names)}"
        ) from None


def _positions(given: Labels, allowed: Labels, problem: str) -> Labels:
    """The index of each given label among the allowed ones."""
    place = {label: i for i, label in enumerate(allowed.tolist())}
    for label in given.tolist():
        expect(
            label in place,
            f"{problem.format(label)}: expected one of {listing(allowed)}",
        )
    return np.array([place[label] for label in given.tolist()], dtype=np.int64)


def label_names(labels: Labels) -> list[str]:
    """The name of each label: its text; a whole number has one name, whether it is
    stored as 1 or 1.0.
    """
    whole = labels.dtype.kind == "f" and bool((labels == np.floor(labels)).all())
    return [
        str(label) for label in (labels.astype(np.int64) if whole else labels).tolist()
    ]


def named_prior(prior: PriorLike) -> PriorLike:
    """A prior by label, `{0: 0.9, 1: 0.1}`, as a prior by name."""
    if not isinstance(prior, Mapping):
        return prior
    return dict(zip(label_names(np.array(list(prior))), prior.values(), strict=True))


def as_utility(given: Any, classes: Classes) -> Utility:
    """A utility in any form that users may pass, by row in the order of `classes`,
    matched by name if it has names.

    Further classes that it names come last.
    """
    if given is None or (isinstance(given, str) and given in _BUILT):
        return (
            Utility.tail_sensitive(classes)
            if given == "tail-sensitive"
            else Utility.one_hot(classes)
        )
    utility, present = named_utility(given), classes.names
    if utility is None:
        actions = (
            [str(i) for i in range(np.shape(given)[1])] if np.ndim(given) == 2 else None
        )
        matrix = Utility(given, actions=actions).matrix
        problem = (
            f"utility has {len(matrix)} rows but y has {len(present)} classes"
            f" ({listing(present)})"
        )
        fix = (
            "expected one row per class, in this order; if y lacks a class, as a fold"
            " may, name rows and columns"
        )
        expect(
            len(matrix) == len(present),
            f"{problem}: {fix} (a data frame, Utility(array, names))",
        )
        return Utility(matrix, classes)
    rows = utility.classes.names
    for name in sorted(set(present) - set(rows)):
        hint = f"{listing(rows)}{suggestion(name, rows)}"
        if list(present) == [str(i) for i in range(len(rows))]:
            hint += (
                '; cross_val_predict(method="predict_proba") numbers the classes: give'
                " an array, rows as labels sort"
            )
        raise InputError(
            f"y has the class {name!r} but the utility has no row for it: its rows are"
            f" {hint}"
        )
    unseen = [name for name in rows if name not in present]
    if utility.classes.counts is not None:
        return utility.with_classes(utility.classes.in_order([*present, *unseen]))
    counts = None if classes.counts is None else (*classes.counts, *(0 for _ in unseen))
    return utility.with_classes(Classes((*present, *unseen), counts, classes.groups))


def named_utility(given: Any) -> Utility | None:
    """A Utility, a CSV file or a data frame as a Utility; None for anything that does
    not name its classes.
    """
    if isinstance(given, Utility):
        return given
    if isinstance(given, str | Path) and given not in _BUILT:
        hint = (
            "expected one of these, a Utility, a data frame or an"
            f" array{suggestion(str(given), _BUILT)}"
        )
        expect(
            Path(given).is_file(),
            f"utility {str(given)!r} is neither a file nor one of {listing(_BUILT)}:"
            f" {hint}",
        )
        return Utility.read_csv(given)
    if not (hasattr(given, "columns") and hasattr(given, "index")):
        return None
    rows, columns = (
        label_names(np.asarray(axis)) for axis in (given.index, given.columns)
    )
    return Utility(given.to_numpy(), rows, columns)


def action_labels(utility: Utility, labels: Labels, abstain_label: Any) -> Labels:
    """The label that `predict` returns for each action; of those that are not classes,
    `abstain_label` or the name.
    """
    decided = list(zip(utility.actions, utility.decided_class, strict=True))
    others = [name for name, c in decided if c < 0]
    if not others:
        return labels[utility.decided_class]
    if isinstance(abstain_label, Mapping):
        label_of = dict(abstain_label)
    elif labels.dtype.kind in "iufb":
        problem = (
            f"the utility has {len(others)} actions that are not classes"
            f" ({listing(others)}) and the labels are"
        )
        expect(
            len(others) == 1,
            f"{problem} numbers: give each a number of its own, abstain_label={{action:"
            " number}",
        )
        label_of = {others[0]: abstain_label}
    else:
        label_of = {name: name for name in others}
    for name in others:
        expect(
            name in label_of,
            f"abstain_label has no label for the action {name!r}: expected one for"
            " each",
        )
        free = label_of[name] not in labels.tolist()
        expect(
            free,
            f"abstain_label {label_of[name]!r} is a class in y: expected another label",
        )
    values = [labels[c] if c >= 0 else label_of[name] for name, c in decided]
    return np.array(values, dtype=object if labels.dtype == object else None)

"""UtilityClassifier: any scikit-learn classifier, calibrated out of fold, deciding by expected utility."""

from collections.abc import Callable, Iterator
from numbers import Integral
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin, clone
from sklearn.model_selection import StratifiedGroupKFold, check_cv
from sklearn.pipeline import Pipeline
from sklearn.utils import _safe_indexing, get_tags, indexable
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, check_is_fitted, column_or_1d, has_fit_parameter

from rfdlc.decide.classes import Classes
from rfdlc.decide.decider import Decider
from rfdlc.decide.priors import PriorLike, as_prior
from rfdlc.decide.scores import Floats
from rfdlc.errors import InputError
from rfdlc.integrations.sklearn.labels import (
    action_labels,
    advantage,
    as_sample_weight,
    as_utility,
    label_names,
    named_prior,
)

Fold = tuple[Any, Floats, NDArray[np.int64]]  # a model, its probabilities (n, C) of samples it has not seen, and which


class UtilityClassifier(MetaEstimatorMixin, ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Wrap a classifier so that it decides for the action of highest expected utility.

    Its probabilities are calibrated on samples that it has not seen, corrected for the class prior, and weighed with
    the utility. For another utility nothing is fitted again: `set_utility`.

    - `estimator`: any classifier with `predict_proba`.
    - `utility`: U[true, action] as a Utility, a data frame, a CSV file, or an array with its rows in the order of the
      sorted labels; `one-hot` (also None) or `tail-sensitive`. Columns that are no class are actions of their own, such
      as `abstain`. Costs are utilities with the sign changed.
    - `calibration`: `temperature`, `bias-corrected-temperature`, `prior-corrected-temperature`, or None for none.
    - `prior`: class prior where decisions are made: `train` (as in y), `uniform`, or shares by class.
    - `estimator_prior`: class prior that the estimator's probabilities carry: `train`; `uniform` for one that balances
      the classes by weights or sampling; or shares by class.
    - `cv`: folds of the calibration (a number, a splitter, an iterable), or `prefit`: the estimator is fitted already,
      and `fit` calibrates it on the samples given, which it should not have seen.
    - `ensemble`: predict with the mean of the model of all samples and those of the folds, each calibrated. They are
      fitted in any case, and with few samples their mean is better than any one. False: the model of all samples alone.
      Where all errors cost the same, that one is asked alone too: its decisions then are those of the estimator itself.
    - `abstain_label`: what `predict` returns for an action that is no class, where labels are numbers; or
      `{action: label}`. Where labels are text it is the action's name.

    Head and tail of `tail-sensitive` are told by numbers of samples in y, whatever their weight.

    >>> from sklearn.datasets import load_breast_cancer
    >>> from sklearn.linear_model import LogisticRegression
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> model = UtilityClassifier(LogisticRegression(max_iter=5000), utility=[[1, -9, 0], [0, 1, 0]]).fit(X, y)
    >>> model.predict(X[:5]), model.actions_
    (array([0, 0, 0, 0, 0]), array([ 0,  1, -1]))
    """

    def __init__(
        self,
        estimator: Any,
        utility: Any = None,
        *,
        calibration: str | None = "temperature",
        prior: PriorLike = "train",
        estimator_prior: PriorLike = "train",
        cv: Any = 5,
        ensemble: bool = True,
        abstain_label: Any = -1,
    ) -> None:
        self.estimator = estimator
        self.utility = utility
        self.calibration = calibration
        self.prior = prior
        self.estimator_prior = estimator_prior
        self.cv = cv
        self.ensemble = ensemble
        self.abstain_label = abstain_label

    def fit(self, X: Any, y: Any, sample_weight: ArrayLike | None = None, groups: Any = None) -> Self:
        """Calibrate out of fold, and fit the estimator on everything too.

        `groups` (N,) go to the splitter: samples of one group are never on both sides (with `cv` a number, too).
        """
        if not hasattr(self.estimator, "predict_proba"):
            raise InputError(
                f"{type(self.estimator).__name__} has no predict_proba: expected a classifier with probabilities, "
                "such as CalibratedClassifierCV(estimator)"
            )
        y = check_array(column_or_1d(y, warn=True), ensure_2d=False, dtype=None, input_name="y")
        check_classification_targets(y)
        X, y, groups = indexable(X, y, groups)
        weights = None if sample_weight is None else as_sample_weight(sample_weight, X)
        prefit = isinstance(self.cv, str) and self.cv == "prefit"
        if prefit:
            check_is_fitted(self.estimator)
        self.classes_ = np.unique(self.estimator.classes_ if prefit else y)
        encoded = _encode(y, self.classes_)
        decider = self._new_decider(encoded, weights)
        actions = action_labels(decider.utility, self.classes_, self.abstain_label)  # told before any work
        folds: list[Fold] = []
        if self.calibration is not None:
            whole = [(self.estimator, self._probabilities(self.estimator, X), np.arange(len(y)))] if prefit else None
            folds = whole or list(self._folds(X, y, encoded, weights, groups))
            scores, held = _joined(folds)
            balanced = isinstance(self.estimator_prior, str) and self.estimator_prior == "uniform"
            told = None if weights is None else weights[held]
            decider.fit(scores, encoded[held], balanced=balanced, sample_weight=told)
        self.estimator_ = self.estimator if prefit else _fitted(self.estimator, X, y, weights)
        self.estimators_ = [self.estimator_, *(self._others(folds) if self.ensemble else [])]
        self.decider_, self.actions_ = decider, actions
        for name in ("n_features_in_", "feature_names_in_"):
            if hasattr(self.estimator_, name):
                setattr(self, name, getattr(self.estimator_, name))
        return self

    def predict(self, X: Any) -> NDArray[Any]:
        """The label of the action with the highest expected utility."""
        check_is_fitted(self)
        return self.actions_[self._mean(X, self.decider_.expected_utility).argmax(axis=1)]

    def predict_proba(self, X: Any) -> Floats:
        """Calibrated probabilities (N, C) under the prior where decisions are made; columns as `classes_`."""
        check_is_fitted(self)
        return self._mean(X, self.decider_.probabilities)

    def decision_function(self, X: Any) -> Floats:
        """Expected utility of every action (N, A), as `actions_`; for two actions the second's advantage (N,)."""
        check_is_fitted(self)
        return advantage(self._mean(X, self.decider_.expected_utility))

    def set_utility(self, utility: Any) -> Self:
        """Decide for another utility from now on; neither the estimator nor the calibration is fitted again."""
        check_is_fitted(self)
        decider = self.decider_.with_utility(as_utility(utility, self.decider_.utility.classes))
        self.actions_ = action_labels(decider.utility, self.classes_, self.abstain_label)
        self.decider_, self.utility = decider, utility
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        if hasattr(self.estimator, "__sklearn_tags__"):  # what it takes, the whole takes
            inner = get_tags(self.estimator)
            tags.input_tags, tags.classifier_tags.multi_class = inner.input_tags, inner.classifier_tags.multi_class
        return tags

    def _others(self, folds: list[Fold]) -> list[Any]:
        """Models of folds that know every class. A fitted or frozen estimator is the same in every fold."""
        every = len(self.classes_)
        return [m for m, *_ in folds if len(m.classes_) == every and m is not self.estimator_]

    def _mean(self, X: Any, decided: Callable[[Floats], Floats]) -> Floats:
        """The mean over models of what the Decider makes of each one's probabilities."""
        models = self.estimators_[:1] if _symmetric(self.decider_.utility.matrix) else self.estimators_
        return np.mean([np.asarray(decided(self._probabilities(model, X))) for model in models], axis=0)

    def _probabilities(self, model: Any, X: Any) -> Floats:
        """A column a class of `classes_`, whatever the model's own order; 0 for a class that it does not know."""
        found = np.asarray(model.predict_proba(X))
        p = np.zeros((len(found), len(self.classes_)), dtype=found.dtype)
        p[:, _encode(model.classes_, self.classes_)] = found
        return p

    def _new_decider(self, encoded: NDArray[np.int64], weights: NDArray[np.float64] | None) -> Decider:
        """Not fitted yet. The prior left alone is the one that the probabilities carry."""
        count = len(self.classes_)
        classes = Classes.from_counts(np.bincount(encoded, minlength=count), label_names(self.classes_))
        seen = np.bincount(encoded, weights, minlength=count)
        carried, wanted = (
            seen if isinstance(prior, str) and prior == "train" else as_prior(named_prior(prior), classes, name)
            for name, prior in (("estimator_prior", self.estimator_prior), ("prior", self.prior))
        )
        return Decider(
            as_utility(self.utility, classes),
            calibration=self.calibration,
            train_prior=carried,
            target_prior=None if wanted is seen and carried is seen else wanted,
        )

    def _folds(
        self,
        X: Any,
        y: NDArray[Any],
        encoded: NDArray[np.int64],
        weights: NDArray[np.float64] | None,
        groups: Any,
    ) -> Iterator[Fold]:
        """Models of a part of the samples, with their probabilities of the others.

        A sample whose class its fold had none of to learn from says nothing about calibration and is left out.
        """
        for learn, held in _splitter(self.cv, y, groups).split(X, y, groups):
            weights_here = None if weights is None else weights[learn]
            model = _fitted(self.estimator, _safe_indexing(X, learn), y[learn], weights_here)
            known = _encode(model.classes_, self.classes_)
            rows = np.asarray(held)[np.isin(encoded[held], known)]
            if len(rows):
                yield model, self._probabilities(model, _safe_indexing(X, rows)), rows


def _symmetric(utility: Floats) -> bool:
    """Whether every right decision is worth the same, and every wrong one."""
    rows, columns = utility.shape
    wrong = utility[~np.eye(rows, columns, dtype=bool)]
    return rows == columns and np.ptp(utility.diagonal()) == 0 and (wrong.size == 0 or np.ptp(wrong) == 0)


def _joined(folds: list[Fold]) -> tuple[Floats, NDArray[np.int64]]:
    if not folds:
        raise InputError("no sample can be held out for calibration: use fewer folds (cv), or calibration=None")
    _, scores, rows = zip(*folds, strict=True)
    return np.concatenate(scores), np.concatenate(rows)


def _splitter(cv: Any, y: NDArray[Any], groups: Any) -> Any:
    if groups is not None and (cv is None or isinstance(cv, Integral)):
        return StratifiedGroupKFold(5 if cv is None else cv)
    return check_cv(cv, y, classifier=True)


def _fitted(estimator: Any, X: Any, y: NDArray[Any], weights: NDArray[np.float64] | None) -> Any:
    """A clone fitted to the samples; the last step of a pipeline has the weights."""
    model = clone(estimator)
    if weights is None:
        return model.fit(X, y)
    if isinstance(model, Pipeline):
        return model.fit(X, y, **{f"{model.steps[-1][0]}__sample_weight": weights})
    if not has_fit_parameter(model, "sample_weight"):
        raise ValueError(f"Underlying estimator {type(model).__name__} does not support sample weights.")
    return model.fit(X, y, sample_weight=weights)


def _encode(y: NDArray[Any], classes: NDArray[Any]) -> NDArray[np.int64]:
    """Labels as indices into sorted classes; one that the estimator does not know is named."""
    unknown = np.setdiff1d(y, classes)
    if len(unknown):
        raise ValueError(f"y contains previously unseen labels: {unknown.tolist()}")
    return np.searchsorted(classes, y)

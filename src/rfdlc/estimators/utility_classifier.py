"""UtilityClassifier: any scikit-learn classifier, calibrated out of fold, deciding by
expected utility.

`DecidingMixin` is what it shares with RFDLCClassifier.
"""

from __future__ import annotations  # `help` shows them as written

import warnings
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from numbers import Integral
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin, clone
from sklearn.ensemble import BaggingClassifier
from sklearn.ensemble._forest import ForestClassifier
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import StratifiedGroupKFold, check_cv
from sklearn.pipeline import Pipeline
from sklearn.utils import _safe_indexing, get_tags, indexable, validation
from sklearn.utils.multiclass import check_classification_targets

from rfdlc.decisions.budgets import check_budget_rule, priced, weights_to
from rfdlc.decisions.decider import Decider
from rfdlc.decisions.sets import PredictionSets, check_coverage
from rfdlc.decisions.utility import Utility
from rfdlc.errors import expect, listing
from rfdlc.estimators.scoring import (
    Labels,
    action_labels,
    as_labels,
    as_utility,
    label_names,
    named_prior,
)
from rfdlc.probabilities.classes import Classes, Indices
from rfdlc.probabilities.priors import PriorLike, as_prior, normalised
from rfdlc.probabilities.scores import Floats

# times the least mean weight of a class, from which on weights change the prior
# noticeably
UNEVEN = 3
# samples from which on several calibrators are weighed: fewer cannot tell which is
# better
WEIGHED = 100
BUDGET_ENDS = (
    "the budget was fitted with the previous utility and no longer limits how many"
    " samples are handed over: call fit_budget(X, y, budget) again, with samples that"
    " fit has not seen"
)


class DecidingMixin:
    """Decisions of an estimator with `predict_proba`: it names its `classes_`, is
    fitted, and gets a `decider_`.
    """

    def predict(self: Any, X: Any) -> Labels:
        """The label of the action with the highest expected utility."""
        p = self.predict_proba(X)  # first: it raises if the estimator is not fitted
        return self.actions_[self.decider_.decide_probabilities(p)]

    def decision_function(self: Any, X: Any) -> Floats:
        """Expected utility of every action (N, A), in the order of `actions_`; of two
        actions their difference (N,).
        """
        values = self.predict_proba(X) @ self.decider_.utility.matrix
        return values[:, 1] - values[:, 0] if values.shape[1] == 2 else values

    def fit_budget(self: Any, X: Any, y: Any, budget: Any) -> Any:
        """Hand over at most a share of the samples ("5%", or shares by action), by
        samples that `fit` has not seen.
        """
        decider = self.decider_
        check_budget_rule(decider.rule)
        p = self.predict_proba(X)
        encoded = _encode(validation.column_or_1d(y, warn=True), self.classes_)
        weights = weights_to(decider.model.decided_prior, encoded)
        fitted = priced(decider.utility, p, weights, budget)
        return self._decide_with(decider.replace(budget=fitted))

    def conformalize(
        self: Any,
        X: Any,
        y: Any,
        *,
        kind: str = "macro",
        coverage: float = 0.9,
        **options: Any,
    ) -> Any:
        """Fit sets that contain the true class with a promised probability, to samples
        that `fit` has not seen.

        `kind` is "marginal", "class" or "macro"; see
        `rfdlc.decisions.sets.PredictionSets.fit` for further options.
        """
        check_coverage(coverage)
        p = self.predict_proba(X)
        encoded = _encode(validation.column_or_1d(y, warn=True), self.classes_)
        model = self.decider_.model
        shifted = model.prior_warning(encoded, rare=False) is not None
        options = {"prior": model.decided_prior, "shifted": shifted, **options}
        sets = PredictionSets.fit(
            p, encoded, self.named_classes_, kind=kind, coverage=coverage, **options
        )
        return self._decide_with(self.decider_.replace(sets=sets))

    def predict_set(self: Any, X: Any, sets: Any = None) -> NDArray[np.bool_]:
        """Which classes are in the set of each sample (N, C), in the order of
        `classes_`.

        By default the sets of `conformalize`; "u65", "u80" or a `SetUtility` are the
        sets with the highest expected utility.
        """
        p, found = (
            self.predict_proba(X),
            self.decider_ if sets is None else self.decider_.replace(sets=sets),
        )
        expect(
            found.sets,
            "no sets yet: call conformalize(X, y) with new samples, or predict_set(X,"
            " 'u65')",
        )
        members: NDArray[np.bool_] = found.sets.members(p, found.utility)
        return members

    def set_utility(self: Any, utility: Any) -> Any:
        """Decide for another utility from now on; nothing is fitted again.

        A budget belongs to its utility: it ends, with a warning, and `fit_budget` fits
        another.
        """
        validation.check_is_fitted(self)
        decider = self.decider_.replace(
            utility=self._read_utility(utility), budget=None
        )
        if self.decider_.deferral.budget is not None:
            warnings.warn(BUDGET_ENDS, stacklevel=2)
        self.utility = utility
        return self._decide_with(decider)

    def _name_classes(self: Any, labels: Labels, counts: NDArray[np.int64]) -> Utility:
        """Name the classes and read the utility; parameters that do not fit them raise
        before any work.
        """
        self.classes_, self.named_classes_ = (
            labels,
            Classes.from_counts(counts, label_names(labels)),
        )
        as_prior(named_prior(self.target_prior), self.named_classes_, "target_prior")
        return self._read_utility(self.utility)

    def _read_utility(self: Any, given: Any) -> Utility:
        """The utility of the classes in y, all actions of `utility_`; it may name
        classes of which y has no sample.
        """
        utility, labels = as_utility(given, self.named_classes_), self.classes_
        known, unseen = utility.classes, utility.classes.names[len(labels) :]
        self.actions_ = action_labels(
            utility, np.append(labels, as_labels(unseen, labels)), self.abstain_label
        )
        self.utility_ = utility
        if not unseen:
            return utility
        absent = (
            f"y has no sample of {listing(map(repr, unseen))}, which the utility names"
        )
        warnings.warn(
            f"{absent}: this model gives such a class the probability 0", stacklevel=5
        )
        seen = Classes(
            known.names[: len(labels)], known.counts and known.counts[: len(labels)]
        )
        return Utility(utility.matrix[: len(labels)], seen, utility.actions)

    def _decide_with(self: Any, decider: Decider) -> Any:
        self.decider_ = decider
        return self


@dataclass(eq=False, repr=False)
class UtilityClassifier(
    DecidingMixin,
    MetaEstimatorMixin,  # type: ignore[misc]
    ClassifierMixin,  # type: ignore[misc]
    BaseEstimator,  # type: ignore[misc]
):
    """Wrap a classifier so that it decides for the action with the highest expected
    utility.

    Its probabilities are calibrated on samples that it was not fitted to, and corrected
    for the class prior.

    Parameters
    ----------
    estimator : classifier
        Any classifier with `predict_proba`.
    utility : Utility, data frame, path, array or str, optional
        U[true, action]: a `Utility`, a data frame, the path of a CSV file, an array
        with its rows in the order of the sorted labels, "one-hot" (also None), or
        "tail-sensitive" (by the number of samples in y). Columns that are not classes
        are additional actions, such as "abstain". Pass costs with their sign changed. A
        class that it names and of which y has no sample, as in some folds, has the
        probability 0; its action stays possible.
    calibration : str or None, default "auto"
        A calibrator of `rfdlc.probabilities.calibrators.CALIBRATORS`. "auto" weighs
        several by folds; below 100 samples it is "temperature".
    target_prior, estimator_prior : str, dict or array, default "train"
        Class priors where decisions are made, and of the estimator's probabilities:
        "train" (as in y), "uniform" (of an estimator that balances the classes by
        weights or sampling), or shares by class.
    cv : int, splitter, iterable or "prefit", default 5
        Folds of the calibration. "prefit" calibrates a fitted estimator on the samples
        given to `fit`.
    ensemble : bool, default True
        Predict with the mean of the model of all samples and those of the folds; False:
        with the former alone.
    abstain_label : object or dict, default -1
        What `predict` returns for an action that is not a class if labels are numbers
        (text labels: the action's name); or `{action: label}`. Booleans are 0 and 1
        beside it, since metrics of scikit-learn need one kind of labels.

    Attributes
    ----------
    classes_, actions_, decider_, utility_ : array, array, Decider, Utility
        Labels of the classes in y, labels of the actions, what leads from probabilities
        to actions, and the utility of all classes that it names.
    estimator_, estimators_ : classifier, list of classifiers
        The model of all samples; all models that predict.

    Examples
    --------
    >>> from sklearn.datasets import load_breast_cancer
    >>> from sklearn.linear_model import LogisticRegression
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> model = UtilityClassifier(
    ...     LogisticRegression(solver="newton-cg"), utility=[[1, -9, 0], [0, 1, 0]]
    ... ).fit(X, y)
    >>> model.predict(X[:5]), model.actions_
    (array([0, 0, 0, 0, 0]), array([ 0,  1, -1]))
    """

    estimator: Any
    utility: Any = None
    _: KW_ONLY
    calibration: str | None = "auto"
    target_prior: PriorLike = "train"
    estimator_prior: PriorLike = "train"
    cv: Any = 5
    ensemble: bool = True
    abstain_label: Any = -1

    def fit(
        self, X: Any, y: Any, sample_weight: ArrayLike | None = None, groups: Any = None
    ) -> Self:
        """Calibrate out of fold, and fit the estimator to all samples. No group of
        samples is on both sides.
        """
        problem = (
            f"{type(self.estimator).__name__} has no predict_proba: expected a"
            " classifier with probabilities"
        )
        expect(
            hasattr(self.estimator, "predict_proba"),
            f"{problem}, such as CalibratedClassifierCV(estimator)",
        )
        y = validation.check_array(
            validation.column_or_1d(y, warn=True),
            ensure_2d=False,
            dtype=None,
            input_name="y",
        )
        check_classification_targets(y)
        X, y, groups = indexable(X, y, groups)
        weights = as_sample_weight(sample_weight, X, y, self.target_prior)
        prefit = isinstance(self.cv, str) and self.cv == "prefit"
        if prefit:
            validation.check_is_fitted(self.estimator)
        labels = self._labels(y, prefit)
        encoded = _encode(y, labels)
        decider = self._new_decider(labels, encoded, weights)
        folds: list[
            tuple[Any, ...]
        ] = []  # a model, its probabilities (n, C) of held-out samples, their rows
        if self.calibration is not None:
            whole = (
                [
                    (
                        self.estimator,
                        self._probabilities(self.estimator, X),
                        np.arange(len(y)),
                    )
                ]
                if prefit
                else None
            )
            folds = whole or list(self._folds(X, y, weights, groups))
            expect(
                folds,
                "no sample can be held out for calibration: use fewer folds (cv), or"
                " calibration=None",
            )
            scores, held = (np.concatenate([fold[i] for fold in folds]) for i in (1, 2))
            scores, held = (
                scores[np.argsort(held, kind="stable")],
                np.sort(held),
            )  # whatever the order of the folds
            own = {
                "sample_weight": weights,
                "groups": None if groups is None else np.asarray(groups),
            }
            given = {name: each[held] for name, each in own.items() if each is not None}
            decider = decider.fit(scores, encoded[held], **given)
        self.estimator_ = (
            self.estimator if prefit else _fitted(self.estimator, X, y, weights)
        )
        complete = [
            model
            for model, *_ in folds
            if self.ensemble and len(model.classes_) == len(labels)
        ]
        # A fitted or frozen estimator is the same in every fold.
        self.estimators_ = [
            self.estimator_,
            *(model for model in complete if model is not self.estimator_),
        ]
        for name in ("n_features_in_", "feature_names_in_"):
            if hasattr(self.estimator_, name):
                setattr(self, name, getattr(self.estimator_, name))
        return self._decide_with(decider)

    def predict_proba(self, X: Any) -> Floats:
        """Calibrated probabilities (N, C) under the prior where decisions are made, in
        the order of `classes_`.
        """
        validation.check_is_fitted(self)
        corrected = (
            self.decider_.probabilities(self._probabilities(model, X))
            for model in self.estimators_
        )
        return np.mean([np.asarray(p) for p in corrected], axis=0)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        if hasattr(
            self.estimator, "__sklearn_tags__"
        ):  # it accepts what the wrapped estimator accepts
            inner = get_tags(self.estimator)
            tags.input_tags, tags.classifier_tags.multi_class = (
                inner.input_tags,
                inner.classifier_tags.multi_class,
            )
        return tags

    def _labels(self, y: NDArray[Any], prefit: bool) -> NDArray[Any]:
        """Sorted labels: those of y, of a fitted estimator its own, of a frozen one
        both.
        """
        known = (
            np.asarray(self.estimator.classes_)
            if prefit or isinstance(self.estimator, FrozenEstimator)
            else y
        )
        unknown = np.setdiff1d(y, known).tolist() if prefit else []
        problem = (
            f"y contains previously unseen labels: {unknown}; the fitted estimator"
            f" knows {known.tolist()}"
        )
        expect(
            not unknown, f"{problem}: leave out their samples, or fit with folds (cv=5)"
        )
        return np.union1d(known, y)

    def _probabilities(self, model: Any, X: Any) -> Floats:
        """One column per class of `classes_`, in that order; 0 for a class that the
        model never saw.
        """
        found = np.asarray(model.predict_proba(X))
        if isinstance(
            model, ForestClassifier | BaggingClassifier
        ):  # 0 of m votes is not evidence of impossibility
            votes = len(model.estimators_)
            found = (votes * found + 1 / found.shape[1]) / (votes + 1)
        p = np.zeros((len(found), len(self.classes_)), dtype=found.dtype)
        extra = np.setdiff1d(model.classes_, self.classes_).tolist()
        problem = (
            f"{type(model).__name__} was fitted before and knows the classes {extra},"
            " of which y has no sample"
        )
        expect(
            not extra,
            f"{problem}: calibrate it as it is with cv='prefit', or a clone that is not"
            " fitted",
        )
        p[:, _encode(model.classes_, self.classes_)] = found
        return p

    def _new_decider(
        self, labels: NDArray[Any], encoded: Indices, weights: Floats | None
    ) -> Decider:
        """Not fitted yet; it corrects the prior only if one of the two is not that of
        the samples.
        """
        utility = self._name_classes(
            labels, np.bincount(encoded, minlength=len(labels))
        )
        classes, seen = (
            self.named_classes_,
            normalised(np.bincount(encoded, weights, len(labels)).astype(np.float64)),
        )
        carried, wanted = (
            (
                seen
                if isinstance(prior, str) and prior == "train"
                else as_prior(named_prior(prior), classes, name)
            )
            for name, prior in (
                ("estimator_prior", self.estimator_prior),
                ("target_prior", self.target_prior),
            )
        )
        target = None if wanted is seen and carried is seen else wanted
        calibration = (
            "temperature"
            if self.calibration == "auto" and len(encoded) < WEIGHED
            else self.calibration
        )
        return Decider(
            utility, calibration=calibration, train_prior=carried, target_prior=target
        )

    def _folds(
        self, X: Any, y: NDArray[Any], weights: Floats | None, groups: Any
    ) -> Iterator[Any]:
        """Models of folds, with their probabilities of the other samples whose classes
        they have seen.
        """
        grouped = groups is not None and (
            self.cv is None or isinstance(self.cv, Integral)
        )
        splitter = (
            StratifiedGroupKFold(self.cv or 5)
            if grouped
            else check_cv(self.cv, y, classifier=True)
        )
        for fit_rows, held in splitter.split(X, y, groups):
            weights_here = None if weights is None else weights[fit_rows]
            model = _fitted(
                self.estimator, _safe_indexing(X, fit_rows), y[fit_rows], weights_here
            )
            rows = np.asarray(held)[np.isin(y[held], model.classes_)]
            if len(rows):
                yield model, self._probabilities(model, _safe_indexing(X, rows)), rows


def _fitted(estimator: Any, X: Any, y: NDArray[Any], weights: Floats | None) -> Any:
    """A clone fitted to the samples; in a pipeline the last step gets the weights."""
    model = clone(estimator)
    if weights is None:
        return model.fit(X, y)
    piped = isinstance(model, Pipeline)
    supported = piped or validation.has_fit_parameter(model, "sample_weight")
    expect(
        supported,
        f"Underlying estimator {type(model).__name__} does not support sample weights.",
    )
    return model.fit(
        X,
        y,
        **{
            (
                f"{model.steps[-1][0]}__sample_weight" if piped else "sample_weight"
            ): weights
        },
    )


def _encode(y: NDArray[Any], classes: NDArray[Any]) -> Indices:
    """Labels as indices into sorted classes."""
    unknown = np.setdiff1d(y, classes).tolist()
    expect(not unknown, f"y contains previously unseen labels: {unknown}")
    return np.searchsorted(classes, y)


def as_sample_weight(
    given: ArrayLike | None, samples: Any, y: NDArray[Any], target_prior: PriorLike
) -> Any:
    """One weight per sample (N,), 0 or more and not all 0; None for None. Warns where
    they change the prior.
    """
    if given is None:
        return None
    weights = validation._check_sample_weight(given, samples, dtype=np.float64)
    expect((weights >= 0).all(), "Negative values in data passed to `sample_weight`")
    expect(weights.any(), "Sample weights must contain at least one non-zero number.")
    labels, each = np.unique(y, return_inverse=True)
    plain, weighted = (
        normalised(np.bincount(each, own).astype(np.float64)) for own in (None, weights)
    )
    moved = np.divide(weighted, plain)
    if (
        isinstance(target_prior, str)
        and target_prior == "train"
        and moved.max() > UNEVEN * moved.min()
    ):
        most = int(np.argmax(np.abs(weighted - plain)))
        shares = (
            f"{labels[most]!s} has {weighted[most]:.1%} instead of {plain[most]:.1%}"
        )
        fix = (
            "give target_prior as shares to decide for other frequencies, such as those"
            " of y"
        )
        warnings.warn(
            f"sample_weight changes the class prior that is decided for: {shares};"
            f" {fix}",
            stacklevel=3,
        )
    return weights

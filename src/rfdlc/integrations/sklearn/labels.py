"""Between the labels of a scikit-learn `y`, of any type, and the named classes and actions of the library."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import _check_sample_weight, check_is_fitted

from rfdlc.decide.classes import Classes
from rfdlc.decide.decider import Decider
from rfdlc.decide.priors import PriorLike, as_prior
from rfdlc.decide.scores import Floats
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError, expect, listing, suggestion

Labels = NDArray[Any]

_BUILT = ("one-hot", "tail-sensitive")


class DecidingMixin:
    """Decisions of an estimator with `predict_proba`: it names its `classes_`, is fitted, and gets a `decider_`."""

    classes_: Labels
    actions_: Labels
    named_classes_: Classes
    decider_: Decider
    utility: Any
    target_prior: PriorLike
    abstain_label: Any
    predict_proba: Any

    def predict(self, X: Any) -> Labels:
        """The label of the action with the highest expected utility."""
        p = self.predict_proba(X)
        return self.actions_[self.decider_.decide_probabilities(p)]

    def decision_function(self, X: Any) -> Floats:
        """Expected utility of every action (N, A), in the order of `actions_`; of two actions their difference (N,)."""
        p = self.predict_proba(X)
        values = p @ self.decider_.utility.matrix
        return values[:, 1] - values[:, 0] if values.shape[1] == 2 else values

    def set_utility(self, utility: Any) -> Self:
        """Decide for another utility from now on; nothing is fitted again."""
        check_is_fitted(self)
        self.utility = utility
        return self._decide_with(self.decider_.replace(utility=as_utility(utility, self.named_classes_)))

    def _name_classes(self, labels: Labels, counts: NDArray[np.int64]) -> Utility:
        """Name the classes and read the utility; parameters that do not fit them raise before any work."""
        self.classes_, self.named_classes_ = labels, Classes.from_counts(counts, label_names(labels))
        as_prior(named_prior(self.target_prior), self.named_classes_, "target_prior")
        utility = as_utility(self.utility, self.named_classes_)
        action_labels(utility, labels, self.abstain_label)
        return utility

    def _decide_with(self, decider: Decider) -> Self:
        self.actions_ = action_labels(decider.utility, self.classes_, self.abstain_label)
        self.decider_ = decider
        return self


def label_names(labels: Labels) -> list[str]:
    """The name of each label: its text; a whole number has one name, whether it is stored as 1 or 1.0."""
    whole = labels.dtype.kind == "f" and bool((labels == np.floor(labels)).all())
    return [str(label) for label in (labels.astype(np.int64) if whole else labels).tolist()]


def named_prior(prior: PriorLike) -> PriorLike:
    """A prior by label, `{0: 0.9, 1: 0.1}`, as a prior by name."""
    if not isinstance(prior, Mapping):
        return prior
    return dict(zip(label_names(np.array(list(prior))), prior.values(), strict=True))


def as_utility(given: Any, classes: Classes) -> Utility:
    """A utility in any form that users may pass, by row in the order of `classes`, matched by name if it has names."""
    if given is None or (isinstance(given, str) and given in _BUILT):
        return Utility.tail_sensitive(classes) if given == "tail-sensitive" else Utility.one_hot(classes)
    utility, present = named_utility(given), classes.names
    if utility is None:
        actions = [str(i) for i in range(np.shape(given)[1])] if np.ndim(given) == 2 else None
        matrix = Utility(given, actions=actions).matrix
        problem = f"utility has {len(matrix)} rows but y has {len(present)} classes ({listing(present)})"
        expect(len(matrix) == len(present), f"{problem}: expected one row per class, in this order")
        return Utility(matrix, classes)
    rows = utility.classes.names
    for name in sorted(set(present) - set(rows)):
        hint = f"{listing(rows)}{suggestion(name, rows)}"
        raise InputError(f"y has the class {name!r} but the utility has no row for it: its rows are {hint}")
    for name in sorted(set(rows) - set(present)):
        hint = f"the classes in y are {listing(present)}{suggestion(name, present)}"
        raise InputError(f"the utility has a row for the class {name!r} but y has no sample of it: {hint}")
    return utility.with_classes(classes if utility.classes.counts is None else utility.classes.in_order(present))


def named_utility(given: Any) -> Utility | None:
    """A Utility, a CSV file or a data frame as a Utility; None for anything that does not name its classes."""
    if isinstance(given, Utility):
        return given
    if isinstance(given, str | Path) and given not in _BUILT:
        hint = f"expected one of these, a Utility, a data frame or an array{suggestion(str(given), _BUILT)}"
        expect(Path(given).is_file(), f"utility {str(given)!r} is neither a file nor one of {listing(_BUILT)}: {hint}")
        return Utility.read_csv(given)
    if not (hasattr(given, "columns") and hasattr(given, "index")):
        return None
    rows, columns = (label_names(np.asarray(axis)) for axis in (given.index, given.columns))
    return Utility(given.to_numpy(), rows, columns)


def action_labels(utility: Utility, labels: Labels, abstain_label: Any) -> Labels:
    """The label that `predict` returns for each action; of those that are not classes, `abstain_label` or the name."""
    decided = list(zip(utility.actions, utility.decided_class, strict=True))
    others = [name for name, c in decided if c < 0]
    if not others:
        return labels[utility.decided_class]
    if isinstance(abstain_label, Mapping):
        label_of = dict(abstain_label)
    elif labels.dtype.kind in "iufb":
        problem = f"the utility has {len(others)} actions that are not classes ({listing(others)}) and the labels are"
        expect(len(others) == 1, f"{problem} numbers: give each a number of its own, abstain_label={{action: number}}")
        label_of = {others[0]: abstain_label}
    else:
        label_of = {name: name for name in others}
    for name in others:
        expect(name in label_of, f"abstain_label has no label for the action {name!r}: expected one for each")
        free = label_of[name] not in labels.tolist()
        expect(free, f"abstain_label {label_of[name]!r} is a class in y: expected another label")
    values = [labels[c] if c >= 0 else label_of[name] for name, c in decided]
    return np.array(values, dtype=object if labels.dtype == object else None)


def as_sample_weight(given: ArrayLike, samples: Any) -> NDArray[np.float64]:
    """One weight per sample (N,), 0 or more and not all 0."""
    weights = _check_sample_weight(given, samples, dtype=np.float64)
    expect((weights >= 0).all(), "Negative values in data passed to `sample_weight`")
    expect(weights.any(), "Sample weights must contain at least one non-zero number.")
    return weights

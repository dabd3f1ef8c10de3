"""Between the labels of a scikit-learn `y`, of any type, and the named classes and actions of the library."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import _check_sample_weight

from rfdlc.decide.classes import Classes
from rfdlc.decide.priors import PriorLike
from rfdlc.decide.scores import Floats
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError, listing, suggestion

Labels = NDArray[Any]

UTILITIES = ("one-hot", "tail-sensitive")


def label_names(labels: Labels) -> list[str]:
    """The name of each label: its text; a whole number reads the same whether it was stored as 1 or 1.0.

    >>> label_names(np.array([0.0, 1.0])), label_names(np.array(["cat", "dog"]))
    (['0', '1'], ['cat', 'dog'])
    """
    whole = labels.dtype.kind == "f" and bool((labels == np.floor(labels)).all())
    return [str(label) for label in (labels.astype(np.int64) if whole else labels).tolist()]


def named_prior(prior: PriorLike) -> PriorLike:
    """A prior by label, `{0: 0.9, 1: 0.1}`, as a prior by name."""
    if not isinstance(prior, Mapping):
        return prior
    return dict(zip(label_names(np.array(list(prior))), prior.values(), strict=True))


def as_utility(given: Any, classes: Classes) -> Utility:
    """What a user may pass as a utility, with one row a class of `classes`, in their order.

    A Utility, a data frame or a CSV file have names, which are matched; the rows of an array are in the order of
    the sorted labels. `one-hot` (also None) and `tail-sensitive` are built from the classes.
    """
    if given is None or (isinstance(given, str) and given in UTILITIES):
        return Utility.tail_sensitive(classes) if given == "tail-sensitive" else Utility.one_hot(classes)
    named = named_utility(given)
    return _from_array(given, classes) if named is None else _matched(named, classes)


def named_utility(given: Any) -> Utility | None:
    """A utility that names its classes: a Utility, the path of a CSV file, a data frame; none for anything else."""
    if isinstance(given, Utility):
        return given
    if isinstance(given, str | Path):
        return None if given in UTILITIES else _read(given)
    if not (hasattr(given, "columns") and hasattr(given, "index")):
        return None
    rows, columns = (label_names(np.asarray(axis)) for axis in (given.index, given.columns))
    return Utility(given.to_numpy(), rows, columns)


def action_labels(utility: Utility, labels: Labels, abstain_label: Any) -> Labels:
    """What `predict` returns for each action: a class's label, or what stands for handing over.

    Among labels of text that is the action's own name; among numbers it is `abstain_label`, one value or
    `{action: value}`, which must be no class's label.

    >>> action_labels(Utility.one_hot(["cat", "dog"]).with_abstain(0.5), np.array(["cat", "dog"]), -1).tolist()
    ['cat', 'dog', 'abstain']
    """
    others = [name for name, decided in zip(utility.actions, utility.decided_class, strict=True) if decided < 0]
    if not others:
        return labels[utility.decided_class]
    standing = dict(zip(others, _labels_of_others(others, labels, abstain_label), strict=True))
    taken = [label for label in standing.values() if label in set(labels.tolist())]
    if taken:
        raise InputError(
            f"abstain_label {taken[0]!r} is a class in y: choose a label that is none of {listing(labels)}"
        )
    decided = zip(utility.actions, utility.decided_class, strict=True)
    values = [labels[c] if c >= 0 else standing[name] for name, c in decided]
    return np.array(values, dtype=object if labels.dtype == object else None)


def advantage(values: Floats) -> Floats:
    """Expected utilities of every action (N, A); of two actions the second's advantage over the first (N,)."""
    return values[:, 1] - values[:, 0] if values.shape[1] == 2 else values


def as_sample_weight(given: ArrayLike, samples: Any) -> NDArray[np.float64]:
    """One weight a sample (N,), 0 or more and not all 0, or scikit-learn's own complaint."""
    weights = _check_sample_weight(given, samples, dtype=np.float64)
    if (weights < 0).any():
        raise ValueError("Negative values in data passed to `sample_weight`")
    if not weights.any():
        raise ValueError("Sample weights must contain at least one non-zero number.")
    return weights


def decided_actions(decisions: Labels, actions: Labels) -> NDArray[np.int64]:
    """The index of each decision among the labels of the actions; one that is none of them is named."""
    place = {label: i for i, label in enumerate(actions.tolist())}
    found = np.array([place.get(label, -1) for label in np.asarray(decisions).tolist()], dtype=np.int64)
    if (found < 0).any():
        wrong = np.asarray(decisions).tolist()[int(np.argmin(found))]
        raise InputError(f"{wrong!r} is no action of the utility: expected one of {listing(actions)}")
    return found


def _labels_of_others(others: list[str], labels: Labels, abstain_label: Any) -> list[Any]:
    if isinstance(abstain_label, Mapping):
        missing = [name for name in others if name not in abstain_label]
        if missing:
            raise InputError(f"abstain_label has no label for the action {missing[0]!r}: expected one for each action")
        return [abstain_label[name] for name in others]
    if labels.dtype.kind not in "iufb":
        return list(others)
    if len(others) > 1:
        raise InputError(
            f"the utility has {len(others)} actions that are no class ({listing(others)}) and the labels are numbers: "
            "give each a number of its own, abstain_label={action: number}"
        )
    return [abstain_label]


def _read(path: str | Path) -> Utility:
    if not Path(path).is_file():
        hint = suggestion(str(path), UTILITIES)
        raise InputError(
            f"utility {str(path)!r} is neither a file nor one of {listing(UTILITIES)}: expected one of these, "
            f"a Utility, a data frame or an array{hint}"
        )
    return Utility.read_csv(path)


def _matched(utility: Utility, classes: Classes) -> Utility:
    """The utility in the order of the classes; a class that only one of the two has is named."""
    rows, present = utility.classes.names, classes.names
    lacking = [name for name in present if name not in set(rows)]
    if lacking:
        hint = suggestion(lacking[0], rows)
        raise InputError(
            f"y has the class {lacking[0]!r} but the utility has no row for it: its rows are {listing(rows)}{hint}"
        )
    unseen = [name for name in rows if name not in set(present)]
    if unseen:
        hint = suggestion(unseen[0], present)
        raise InputError(
            f"the utility has a row for the class {unseen[0]!r} but y has no sample of it: "
            f"the classes in y are {listing(present)}{hint}"
        )
    return utility.with_classes(classes if utility.classes.counts is None else utility.classes.in_order(present))


def _from_array(given: ArrayLike, classes: Classes) -> Utility:
    names = classes.names
    bare = Utility(given, actions=[str(i) for i in range(np.shape(given)[1])] if np.ndim(given) == 2 else None)
    if len(bare.matrix) != len(names):
        raise InputError(
            f"utility has {len(bare.matrix)} rows but y has {len(names)} classes ({listing(names)}): "
            "expected one row a class, in this order"
        )
    return Utility(bare.matrix, classes)

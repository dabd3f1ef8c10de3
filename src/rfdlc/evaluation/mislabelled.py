"""find_mislabelled(): labels that are probably wrong, by confident learning (Northcutt
et al. 2021).

How sure a model is differs between classes, and is less for rare ones: a probability is
divided by the mean that samples with this label have, and a label is suspicious if
another class has the larger quotient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from rfdlc.decisions.decider import Decider
from rfdlc.evaluation.evaluate import decider_for
from rfdlc.probabilities.classes import Classes, Indices, as_classes
from rfdlc.probabilities.scores import Floats, safe_log

FEWEST = 3  # samples of a class: of fewer, the other folds have taught next to nothing
SHARED = 2.0  # samples by which the mean of a class is drawn to that of all classes
# share of the samples with a label for which it is the most plausible: with less, it
# was not learned
RECALLED = 0.3
# share of labels that a model, as sure as it is here, agrees with; chosen with 3% and
# 10% replaced
TRUSTED = 0.85


@dataclass(frozen=True, eq=False)
class Mislabelled:
    """Positions `rows` of suspicious samples, the most suspicious first, with their
    `labels` and `suggested` classes.

    `evidence` for the latter is in nats. It is strong for the first `strong` samples:
    as many have at least the mean probability of their suggested class, and a model
    that, as sure as this, agrees with 85% of labels. None has a label that the model
    finds for less than 30% of its samples: it has not learned that class. `classes` are
    all classes, `unjudged` the names of those with too few samples; `accuracy` is that
    of the most probable classes.
    """

    rows: Indices
    labels: Indices
    suggested: Indices
    evidence: Floats
    classes: Classes
    unjudged: list[str]
    strong: int
    accuracy: float


def find_mislabelled(
    scores: Any,
    targets: ArrayLike | None = None,
    decider: Decider | None = None,
    *,
    classes: Classes | Sequence[str] | None = None,
    logits: bool = False,
) -> Mislabelled:
    """Find samples whose label is probably wrong.

    Parameters
    ----------
    scores : Predictions, table, or array (N, C) or (M, N, C)
        Probabilities by models that were not fitted to these samples, such as those of
        `cross_validate`.
    targets, decider, classes, logits
        The labels, if `scores` has none: numbers of columns, or names that `classes` or
        columns of a table have. The others as in `evaluate`.

    Examples
    --------
    >>> p = [[0.9, 0.1], [0.8, 0.2], [0.9, 0.1], [0.1, 0.9], [0.2, 0.8], [0.95, 0.05]]
    >>> found = find_mislabelled(p, [0, 0, 0, 1, 1, 1])
    >>> found.rows.tolist(), found.suggested.tolist()
    ([5], [0])
    """
    decider = decider_for(
        decider, None, None if classes is None else as_classes(classes), scores
    )
    y, names = (
        decider.model.read_labelled(scores, targets, logits)[1],
        decider.utility.classes,
    )
    p = np.asarray(decider.probabilities(scores, logits=logits), dtype=np.float64)
    at, counts = np.arange(len(y)), np.bincount(y, minlength=p.shape[1])
    own, judged = p[at, y], counts >= FEWEST
    mean = (np.bincount(y, own, minlength=p.shape[1]) + SHARED * own.mean()) / (
        counts + SHARED
    )
    plausible = safe_log(p) - safe_log(mean)  # (N, C)
    others = np.where(np.arange(p.shape[1]) == y[:, None], -np.inf, plausible)
    suggested = others.argmax(axis=1)
    evidence = others[at, suggested] - plausible[at, y]
    suspects = np.flatnonzero((evidence > 0) & judged[y])
    rows = suspects[np.argsort(-evidence[suspects], kind="stable")]
    right = plausible.argmax(axis=1) == y
    recall = (np.bincount(y, right, minlength=p.shape[1]) + SHARED * right.mean()) / (
        counts + SHARED
    )
    known = rows[recall[y[rows]] >= RECALLED]
    strong = int(
        (
            (others[known, suggested[known]] >= 0)
            & (_agreement(plausible, y) >= TRUSTED)[known]
        ).sum()
    )
    rows = np.concatenate([known[:strong], rows[~np.isin(rows, known[:strong])]])
    few = [names.names[c] for c in np.flatnonzero((counts > 0) & ~judged)]
    accuracy = float(np.mean(p.argmax(axis=1) == y))
    return Mislabelled(
        rows, y[rows], suggested[rows], evidence[rows], names, few, strong, accuracy
    )


def _agreement(plausible: Floats, y: Indices) -> Floats:
    """(N,) share of labels that are the most plausible class (N, C), among samples as
    far ahead of the second one.

    A model that often contradicts labels where it is this sure is weak, and its
    suspects are mostly its own mistakes.
    """
    from sklearn.isotonic import IsotonicRegression  # takes a while to import

    second, first = np.sort(plausible, axis=1)[:, -2:].T
    return np.asarray(
        IsotonicRegression().fit_transform(
            first - second, plausible.argmax(axis=1) == y
        )
    )

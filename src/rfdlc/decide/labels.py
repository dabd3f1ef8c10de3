"""find_mislabelled(): samples whose label is probably wrong, by confident learning on out-of-fold probabilities.

How sure a model is of a class differs between classes, and is less for rare ones. So a probability is compared with the
mean that the samples with this label have (Northcutt et al. 2021): a label is suspicious if another class exceeds its
mean by a larger factor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from rfdlc.decide.classes import Classes, Indices, as_classes
from rfdlc.decide.decider import Decider
from rfdlc.decide.evaluation import decider_for
from rfdlc.decide.scores import Floats, safe_log

FEWEST = 3  # samples of a class: of fewer, the other folds have taught next to nothing
SHARED = 2.0  # samples by which the mean of a class is drawn to that of all classes


@dataclass(frozen=True, eq=False)
class Mislabelled:
    """Samples whose labels are suspicious, the most suspicious first.

    Parameters
    ----------
    rows, labels, suggested : arrays of int
        Positions of the samples; their classes by label; and the classes that are more plausible.
    evidence : array of float
        How much more plausible, in nats.
    unjudged : list of str
        Classes with too few samples to judge their labels.
    """

    rows: Indices
    labels: Indices
    suggested: Indices
    evidence: Floats
    classes: Classes
    unjudged: list[str]

    def __len__(self) -> int:
        return len(self.rows)


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
        Probabilities by models that were not fitted to these samples, such as those of `cross_validate`.
    targets : array (N,), optional
        The labels as names or indices, if `scores` has none.
    decider, classes, logits
        As in `evaluate`.

    Returns
    -------
    Mislabelled

    Examples
    --------
    >>> p = [[0.9, 0.1], [0.8, 0.2], [0.9, 0.1], [0.1, 0.9], [0.2, 0.8], [0.95, 0.05]]
    >>> found = find_mislabelled(p, [0, 0, 0, 1, 1, 1])
    >>> found.rows.tolist(), found.suggested.tolist()
    ([5], [0])
    """
    decider = decider_for(decider, None, None if classes is None else as_classes(classes), scores)
    y, names = decider.read_labelled(scores, targets, logits)[1], decider.utility.classes
    p = np.asarray(decider.probabilities(scores, logits=logits), dtype=np.float64)
    own, counts, at = p[np.arange(len(y)), y], np.bincount(y, minlength=p.shape[1]), np.arange(len(y))
    mean = (np.bincount(y, own, minlength=p.shape[1]) + SHARED * own.mean()) / (counts + SHARED)
    plausible = safe_log(p) - safe_log(mean)  # (N, C)
    others = plausible.copy()
    others[at, y] = -np.inf
    suggested = others.argmax(axis=1)
    evidence = others[at, suggested] - plausible[at, y]
    judged = counts >= FEWEST
    found = np.flatnonzero((evidence > 0) & judged[y])
    rows = found[np.argsort(-evidence[found], kind="stable")]
    few = [name for name, count, known in zip(names.names, counts, judged, strict=True) if count and not known]
    return Mislabelled(rows, y[rows], suggested[rows], evidence[rows], names, few)

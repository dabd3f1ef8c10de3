"""Out-of-fold probabilities: held-out samples calibrate a decider and still serve as
new ones.
"""

import warnings
from typing import TYPE_CHECKING

import numpy as np

from rfdlc.probabilities.choosing import distinct, grouped_folds, is_coarse
from rfdlc.probabilities.classes import Indices
from rfdlc.probabilities.scores import Floats, Scores

if TYPE_CHECKING:
    from rfdlc.decisions.decider import Decider


def stratified_folds(scores: Floats, y: Indices, folds: int) -> Indices:
    """The fold (N,) of each sample: copies are in one, unless scores are coarse."""
    first, copy_of = distinct(scores, y)
    if is_coarse(scores, y):
        first = copy_of = np.arange(len(y))
    order = np.lexsort((np.random.default_rng(0).random(len(first)), y[first]))
    fold = np.empty(len(first), dtype=np.int64)
    fold[order] = np.arange(len(first)) % folds
    return fold[copy_of]


def out_of_fold(
    decider: "Decider",
    scores: Scores,
    y: Indices,
    *,
    folds: int = 5,
    balanced: bool = False,
) -> Floats:
    """Corrected probabilities (N, C), each row by a calibration that was fitted without
    it, and without its group.
    """
    if decider.fitted is None or not 0 < 2 * folds <= len(y):
        return np.concatenate([p for _, p in decider.stream(scores)])
    groups = scores.groups
    fold = stratified_folds(scores.values, y, folds)
    if groups is not None and np.ptp(
        groups
    ):  # of a single group, samples are all that can be held out
        fold = grouped_folds(y, groups, folds)
    numbers, parts = np.unique(fold), []
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # about few samples: the decider itself was fitted to all of them
        for k in numbers:
            inside, outside, known = (
                fold == k,
                fold != k,
                {"logits": scores.logits, "balanced": balanced},
            )
            own = None if groups is None else groups[outside]
            fitted = decider.fit(
                scores.values[:, outside], y[outside], **known, groups=own
            )
            if decider.decided_prior is not None and fitted.effective_prior is not None:
                fitted = fitted.replace(
                    target_prior=decider.decided_prior
                )  # however the decider itself was weighted
            parts += [
                p
                for _, p in fitted.stream(
                    fitted.read(scores.values[:, inside], scores.logits)
                )
            ]
    return np.concatenate(parts)[
        np.argsort(np.concatenate([np.flatnonzero(fold == k) for k in numbers]))
    ]

"""Out-of-fold probabilities: held-out samples calibrate a decider and still serve as new ones."""

import warnings
from typing import TYPE_CHECKING

import numpy as np

from rfdlc.decide.classes import Indices
from rfdlc.decide.scores import Floats, Scores

if TYPE_CHECKING:
    from rfdlc.decide.decider import Decider


def out_of_fold(decider: "Decider", scores: Scores, y: Indices, *, folds: int = 5, balanced: bool = False) -> Floats:
    """Corrected probabilities (N, C), each row by a calibration that was fitted without it."""
    if decider.fitted is None or not 0 < 2 * folds <= len(y):
        return np.concatenate([p for _, p in decider.stream(scores)])
    order = np.lexsort((np.random.default_rng(0).random(len(y)), y))
    fold = np.empty(len(y), dtype=np.int64)
    fold[order] = np.arange(len(y)) % folds  # every class is spread over the folds
    parts = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about few samples: the decider itself was fitted to all of them
        for k in range(folds):
            inside, outside = fold == k, fold != k
            fitted = decider.fit(scores.values[:, outside], y[outside], logits=scores.logits, balanced=balanced)
            if decider.decided_prior is not None and fitted.effective_prior is not None:
                fitted = fitted.replace(target_prior=decider.decided_prior)  # however the decider itself was weighted
            parts += [p for _, p in fitted.stream(fitted.read(scores.values[:, inside], scores.logits))]
    return np.concatenate(parts)[np.argsort(np.concatenate([np.flatnonzero(fold == k) for k in range(folds)]))]

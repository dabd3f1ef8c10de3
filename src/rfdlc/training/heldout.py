"""Held-out data of a long-tailed training set are long-tailed too: metrics for balanced data need balanced weights."""

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from rfdlc.decide.decider import Decider
from rfdlc.decide.predictions import Predictions
from rfdlc.decide.scores import Floats, softmax
from rfdlc.decide.uncertainty import mutual_information


def balanced_positions(labels: NDArray[np.int64], repeats: int = 1) -> NDArray[np.int64]:
    """Positions in which every class that occurs appears equally often: rare samples are repeated evenly.

    >>> balanced_positions(np.array([0, 0, 0, 0, 1, 1])).tolist()
    [0, 1, 2, 3, 4, 5, 4, 5]
    """
    members = [np.flatnonzero(labels == c) for c in np.unique(labels)]
    largest = repeats * max(len(positions) for positions in members)
    return np.concatenate([np.resize(positions, largest) for positions in members])


def balanced(predictions: Predictions) -> Predictions:
    """Logits as if every class were equally frequent; what `evaluate` then says estimates balanced data."""
    assert predictions.targets is not None
    positions = balanced_positions(predictions.targets, repeats=4)
    logits, targets = predictions.scores.values[:, positions], predictions.targets[positions]
    unsure = None if predictions.uncertainty is None else predictions.uncertainty[positions]
    return Predictions(logits=logits, targets=targets, classes=predictions.classes, uncertainty=unsure)


def carries_uniform(decider: Decider) -> bool:
    """Whether scores belong to equally frequent classes, so that held-out samples must be weighted to match."""
    return decider.train_prior is not None and bool(np.ptp(decider.train_prior) < 1e-9)


def diversity(logits: Floats) -> dict[str, float]:
    """How far particles (M, N, C) differ: pairwise disagreement of their arg max, and mutual information in nats."""
    pairs = list(combinations(logits.argmax(-1), 2))
    disagreement = float(np.mean([np.mean(one != other) for one, other in pairs])) if pairs else 0.0
    return {"disagreement": disagreement, "mutual_information": float(mutual_information(softmax(logits)).mean())}

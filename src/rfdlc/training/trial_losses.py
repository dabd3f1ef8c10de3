"""Held-out losses of trials where classes weigh equally, and how certain the differences between trials are."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar

from rfdlc.decide.decider import Decider
from rfdlc.decide.predictions import Predictions
from rfdlc.decide.scores import Floats, safe_log, softmax


class TrialLosses(NamedTuple):
    """The losses (n,) of held-out samples in nats, and their shares (n,), by which classes weigh equally."""

    each: Floats
    shares: Floats

    @property
    def mean(self) -> float:
        return float(self.each @ self.shares)


def balanced_losses(predictions: Predictions, decider: Decider) -> TrialLosses:
    """Negative log-likelihoods at the best temperature: their mean is at most that of chance."""
    plain = decider.replace(calibration=None, target_prior="uniform").probabilities(predictions)
    log_p = safe_log(np.asarray(plain, dtype=np.float64))  # 32 bits have no probability as small as the least below
    labels = np.asarray(predictions.targets)
    weights = 1 / np.bincount(labels)[labels]

    def losses(log_temperature: float) -> TrialLosses:
        p = softmax(log_p * math.exp(-log_temperature))[np.arange(len(labels)), labels]
        return TrialLosses(-np.log(np.maximum(p, 1e-300)), weights / weights.sum())

    return losses(minimize_scalar(lambda log_t: losses(log_t).mean, bounds=(-4, 8), method="bounded").x)


def standard_errors(trials: Sequence[TrialLosses | None]) -> list[float]:
    """Of the difference to the best trial on the same samples; 0 for itself, and for trials without losses."""
    best = min((trial for trial in trials if trial is not None), key=lambda trial: trial.mean, default=None)
    if best is None:
        return [0.0] * len(trials)
    differences = [(trial or best).each - best.each for trial in trials]
    return [float(np.linalg.norm(best.shares * (own - own @ best.shares))) for own in differences]

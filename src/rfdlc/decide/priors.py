"""Class priors: the one that scores carry, the one that is decided for, and the correction between them."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rfdlc.decide.classes import Classes, Indices
from rfdlc.decide.scores import Floats
from rfdlc.errors import InputError, choose, listing
from rfdlc.progress import track

Prior = NDArray[np.float64]
PriorLike = str | ArrayLike | Mapping[str, float]

DISAGREEMENT = 0.1  # total variation between the two estimates above which the user is warned
MOST_ITERATIONS, STANDSTILL = 2000, 1e-9  # of EM: enough even for classes that look alike
NAMED = ("uniform", "train")


def as_prior(given: PriorLike, classes: Classes, what: str) -> Prior:
    """A prior (C,) from "uniform", "train" (the training frequencies), numbers in class order, or {name: share}."""
    if isinstance(given, str):
        choose(what, given, NAMED)
        return np.full(len(classes), 1 / len(classes)) if given == "uniform" else classes.prior.copy()
    named = hasattr(given, "items")  # a table, or a series of pandas such as y.value_counts(): never by position
    values = np.asarray(_by_name(given, classes, what) if named else given, dtype=np.float64)
    if values.shape != (len(classes),):
        raise InputError(f"{what} has shape {values.shape}: expected one number per class ({len(classes)})")
    if not np.isfinite(values).all() or (values < 0).any() or values.sum() <= 0:
        raise InputError(f"{what} holds {values.min()} to {values.max()}: expected shares of 0 or more, not all 0")
    return normalised(values)


def normalised(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """A read-only copy that sums to one; what does already keeps its last digits."""
    total = float(values.sum())
    shares = values.copy() if abs(total - 1) < 1e-12 else values / total
    shares.setflags(write=False)
    return shares


def prior_ratio(target: Prior, train: Prior, classes: Classes) -> Prior:
    """target / train, the factor that moves probabilities from one prior to the other."""
    impossible = np.flatnonzero((train == 0) & (target > 0))
    if len(impossible):
        raise InputError(
            f"the training prior of {listing(classes.select(impossible))} is 0 but its target prior is not: "
            "a class without training samples cannot be corrected for; give it a positive training prior"
        )
    return np.divide(target, train, out=np.zeros_like(target), where=train > 0)


@dataclass(frozen=True)
class PriorEstimate:
    """A class prior estimated from unlabelled data by EM; `check` is the BBSE estimate if there is a joint table."""

    prior: Prior
    iterations: int
    check: Prior | None

    @property
    def disagreement(self) -> float | None:
        """Total variation between the two estimates: near 0 if only the class prior has changed."""
        return None if self.check is None else float(np.abs(self.prior - self.check).sum() / 2)


def estimate_prior(probabilities: Floats, train: Prior, joint: Floats | None = None) -> PriorEstimate:
    """Saerens, Latinne and Decaestecker (2002): EM on calibrated probabilities (N, C) with known training prior.

    `joint` (C, C) holds the mean predicted probabilities of held-out data by true class (see `joint_table`); with it
    the class-conditional estimate of Lipton, Wang and Smola (2018) is made as a check.
    """
    p = np.asarray(probabilities, dtype=np.float64)
    prior, iterations = train, 0
    for _ in track(range(MOST_ITERATIONS), "Estimating the prior"):
        ratio = np.divide(prior, train, out=np.zeros_like(prior), where=train > 0)
        new = ratio * (p.T @ (1 / np.maximum(p @ ratio, 1e-300))) / len(p)
        moved = np.abs(new - prior).sum() / 2
        prior, iterations = new / new.sum(), iterations + 1
        if moved <= STANDSTILL:
            break
    estimate = PriorEstimate(prior, iterations, None if joint is None else _bbse(p.mean(axis=0), joint, prior))
    if estimate.disagreement is not None and estimate.disagreement > DISAGREEMENT:
        warnings.warn(
            f"the two estimates of the class prior (EM and BBSE) differ by {estimate.disagreement:.2f} in total "
            "variation: the data may have changed in more than its class prior, or the probabilities need calibration",
            stacklevel=3,
        )
    return estimate


def joint_table(probabilities: Floats, targets: Indices, sample_weight: Floats | None = None) -> NDArray[np.float64]:
    """(C, C): the mean over held-out samples of p(c) where the true class is y, at [c, y]."""
    joint = np.zeros((probabilities.shape[1], probabilities.shape[1]))
    weights = np.ones(len(targets)) if sample_weight is None else sample_weight
    np.add.at(joint.T, targets, probabilities * weights[:, None])
    return joint / weights.sum()


def _bbse(mean: Prior, joint: Floats, otherwise: Prior) -> Prior:
    """Least squares for w >= 0 in joint @ w = mean; the prior is w times the held-out prior (the column sums).

    A class that the held-out data lack keeps its share in `otherwise`.
    """
    from scipy.optimize import nnls

    held_out = joint.sum(axis=0)
    weights, _ = nnls(joint, mean)
    share = weights * held_out
    known = share / max(share.sum(), 1e-300) * otherwise[held_out > 0].sum()
    return np.where(held_out > 0, known, otherwise)


def _by_name(given: Any, classes: Classes, what: str) -> Sequence[Any]:
    shares = {str(name): share for name, share in given.items()}
    classes.encode(list(shares), f"{what} class")
    missing = [name for name in classes.names if name not in shares]
    if missing:
        raise InputError(f"{what} has no share for {listing(missing)}: expected one for every class")
    return [shares[name] for name in classes.names]

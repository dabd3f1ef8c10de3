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
PSEUDO_SAMPLES = 10.0  # what the training prior counts for: least mean error over the shifts of benchmarks/priors.py
DRAWS, GIBBS_CELLS, MOST_CLASSES = 400, 300_000, 1000  # of posteriors of the prior
NAMED = ("uniform", "train")


def as_prior(given: PriorLike, classes: Classes, what: str) -> Prior:
    """A prior (C,) from "uniform", "train" (the training frequencies), numbers in class order, or {name: share}."""
    if isinstance(given, str) and "=" in given:
        try:
            given = {
                name.strip(): float(share) for name, _, share in (pair.partition("=") for pair in given.split(","))
            }
        except ValueError:
            raise InputError(f"{what} {given!r} is not a prior: expected shares such as cat=0.2,dog=0.8") from None
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
    """A class prior estimated from unlabelled data; `check` is the BBSE estimate if there is a joint table."""

    prior: Prior
    iterations: int
    check: Prior | None
    draws: Floats | None = None  # (draws, C) of the posterior distribution of the prior

    @property
    def disagreement(self) -> float | None:
        """Total variation between the two estimates: near 0 if only the class prior has changed."""
        return None if self.check is None else float(np.abs(self.prior - self.check).sum() / 2)

    def interval(self, level: float = 0.95) -> tuple[Prior, Prior]:
        """Lower and upper ends (C,) of the interval of each class; the estimate itself where there are no draws."""
        draws = self.prior[None] if self.draws is None else self.draws
        low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=0)
        return low, high


def estimate_prior(probabilities: Floats, train: Prior, joint: Floats | None = None) -> PriorEstimate:
    """EM on calibrated probabilities (N, C) with known training prior (Saerens, Latinne and Decaestecker 2002).

    A Dirichlet prior worth `PSEUDO_SAMPLES` samples of the training prior keeps classes that few samples cannot rule
    out. `joint` (C, C) holds the mean predicted probabilities of held-out data by true class (see `joint_table`); with
    it the class-conditional estimate of Lipton, Wang and Smola (2018) is made as a check.
    """
    p = np.asarray(probabilities, dtype=np.float64)
    likelihood = np.divide(p, train, out=np.zeros_like(p), where=train > 0)  # p(x | y) up to a factor per sample
    prior, iterations = train, 0
    for _ in track(range(MOST_ITERATIONS), "Estimating the prior"):
        counts = prior * (likelihood.T @ (1 / np.maximum(likelihood @ prior, 1e-300)))
        new = (counts + PSEUDO_SAMPLES * train) / (len(p) + PSEUDO_SAMPLES)
        moved = np.abs(new - prior).sum() / 2
        prior, iterations = new / new.sum(), iterations + 1
        if moved <= STANDSTILL:
            break
    check = None if joint is None else _bbse(p.mean(axis=0), joint, prior)
    estimate = PriorEstimate(prior, iterations, check, _posterior(likelihood, prior, train))
    if estimate.disagreement is not None and estimate.disagreement > DISAGREEMENT + 1 / np.sqrt(len(p)):
        warnings.warn(
            f"the two estimates of the class prior (EM and BBSE) differ by {estimate.disagreement:.2f} in total "
            "variation: the data may have changed in more than its class prior, or the probabilities need calibration",
            stacklevel=3,
        )
    return estimate


def _posterior(likelihood: Floats, prior: Prior, train: Prior) -> Floats | None:
    """Draws (DRAWS, C) of the class prior given the samples: Gibbs sampling, or for many samples a Gaussian.

    Before the samples every class prior is as probable as any other (for at most 10 classes; sparser for more).
    """
    rng, (samples, classes) = np.random.default_rng(0), likelihood.shape
    flat = np.where(train > 0, min(1.0, 10 / classes), 1e-9)
    if classes > MOST_CLASSES:
        return None
    if samples * classes > GIBBS_CELLS:
        scaled = likelihood / np.maximum(likelihood @ prior, 1e-300)[:, None]
        information = scaled.T @ scaled + np.diag(flat / np.maximum(prior, 1e-6) ** 2)
        tangent = np.linalg.svd(np.ones((1, classes)))[2][1:].T  # (C, C - 1): directions that keep the sum
        factor = np.linalg.cholesky(np.linalg.pinv(tangent.T @ information @ tangent) + 1e-18 * np.eye(classes - 1))
        draws = np.maximum(prior + rng.normal(size=(DRAWS, classes - 1)) @ (tangent @ factor).T, 0)
        return draws / draws.sum(axis=1, keepdims=True)
    draws, current = np.empty((DRAWS, classes)), prior
    for step in range(-DRAWS // 5, DRAWS):
        reach = np.cumsum(likelihood * current, axis=1)
        assigned = (rng.random((samples, 1)) * reach[:, -1:] > reach).sum(axis=1)
        current = rng.dirichlet(np.bincount(assigned, minlength=classes) + flat)
        draws[max(step, 0)] = current
    return draws


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

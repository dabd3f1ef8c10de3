"""Class priors: the one that scores carry, the one that is decided for, and the correction between them."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import nnls
from scipy.special import gammaln

from rfdlc.decide.classes import Classes, Indices
from rfdlc.decide.scores import Floats, softmax
from rfdlc.errors import InputError, choose, listing
from rfdlc.progress import track

Prior = NDArray[np.float64]
PriorLike = str | ArrayLike | Mapping[str, float]

DISAGREEMENT = 0.1  # total variation between the two estimates above which the user is warned
MOST_ITERATIONS, STANDSTILL = 2000, 1e-9  # of EM: enough even for classes that look alike
NEAR = (3.0, 10.0, 30.0, 100.0, 300.0)  # samples that the carried prior counts for where a shift is small
FLAT = 10.0  # and a uniform prior where it may be anything: a flat Dirichlet distribution for 10 classes
BURN_IN, DRAWS, GIBBS_CELLS, MOST_CLASSES = 150, 500, 300_000, 1000  # of posteriors of the prior
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


def shares(classes: Classes, prior: Prior, most: int = 4) -> str:
    """The largest shares of a prior, in words."""
    falling = np.argsort(-prior, kind="stable")
    return listing([f"{classes.names[c]} {prior[c]:.1%}" for c in falling], most)


@dataclass(frozen=True)
class PriorEstimate:
    """A class prior estimated from unlabelled data; `check` is the BBSE estimate if there is a joint table."""

    prior: Prior
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


def estimate_prior(probabilities: Floats, carried: Prior, joint: Floats | None = None) -> PriorEstimate:
    """The posterior mean of the class prior, from calibrated probabilities (N, C) that carry a known prior.

    Before the samples are seen, the prior may be anything, or near the carried one at a distance that is not known: so
    classes that few samples cannot rule out are kept, and large shifts are followed. The posterior is
    drawn by Gibbs sampling; for many samples, EM (Saerens, Latinne and Decaestecker 2002) finds its mode from all of
    them. `joint` (C, C) holds the mean predicted probabilities of held-out data by true class (see `joint_table`); with
    it the class-conditional estimate of Lipton, Wang and Smola (2018) is made as a check.
    """
    p, rng = np.asarray(probabilities, dtype=np.float64), np.random.default_rng(0)
    likelihood = np.divide(p, carried, out=np.zeros_like(p), where=carried > 0)  # p(x | y) up to a factor per sample
    few = likelihood
    if p.size > GIBBS_CELLS:
        few = likelihood[rng.choice(len(p), max(1, GIBBS_CELLS // p.shape[1]), replace=False)]
    draws, pseudo_counts, prior = _posterior(few, carried, rng)
    if len(few) < len(p):
        prior = _most_probable(likelihood, prior, pseudo_counts)
        draws = _gaussian(likelihood, prior, pseudo_counts, rng)
    estimate = PriorEstimate(prior, None if joint is None else _bbse(p.mean(axis=0), joint, prior), draws)
    if estimate.disagreement is not None and estimate.disagreement > DISAGREEMENT + 1 / np.sqrt(len(p)):
        warnings.warn(
            f"the two estimates of the class prior (EM and BBSE) differ by {estimate.disagreement:.2f} in total "
            "variation: the data may have changed in more than its class prior, or the probabilities need calibration",
            stacklevel=3,
        )
    return estimate


def shift_weights(counts: NDArray[Any], carried: Prior) -> tuple[Floats, Floats]:
    """Dirichlet distributions (K, C) of a shifted class prior, and how probable counts (C,) make each of them (K,)."""
    classes = len(carried)
    flat = np.full(classes, min(1.0, FLAT / classes))
    pseudo = np.maximum(np.vstack([flat, np.outer(NEAR, carried)]), 1e-9) * np.where(carried > 0, 1.0, 1e-9)
    total = pseudo.sum(axis=1)
    evidence = gammaln(total) - gammaln(total + counts.sum()) + (gammaln(pseudo + counts) - gammaln(pseudo)).sum(axis=1)
    return pseudo, softmax(evidence)


def _posterior(likelihood: Floats, carried: Prior, rng: np.random.Generator) -> tuple[Floats, Floats, Prior]:
    """Gibbs sampling: draws (DRAWS, C) of the class prior, the mean pseudo-counts (C,), and the posterior mean (C,)."""
    prior, drawn = carried, []
    for _ in track(range(BURN_IN + DRAWS), "Estimating the prior"):
        reach = np.cumsum(likelihood * prior, axis=1)
        assigned = (rng.random((len(likelihood), 1)) * reach[:, -1:] > reach).sum(axis=1)
        counts = np.bincount(assigned, minlength=len(carried))
        pseudo, probable = shift_weights(counts, carried)
        chosen = pseudo[rng.choice(len(pseudo), p=probable)]
        prior = rng.dirichlet(counts + chosen)
        drawn.append((prior, chosen, normalised(counts + chosen)))
    draws, chosen, means = (np.array(each[BURN_IN:]) for each in zip(*drawn, strict=True))
    return draws, chosen.mean(axis=0), normalised(means.mean(axis=0))


def _most_probable(likelihood: Floats, prior: Prior, pseudo_counts: Floats) -> Prior:
    for _ in track(range(MOST_ITERATIONS), "Estimating the prior"):
        counts = prior * (likelihood.T @ (1 / np.maximum(likelihood @ prior, 1e-300)))
        new = normalised(counts + pseudo_counts)
        moved, prior = np.abs(new - prior).sum() / 2, new
        if moved <= STANDSTILL:
            break
    return prior


def _gaussian(likelihood: Floats, prior: Prior, pseudo_counts: Floats, rng: np.random.Generator) -> Floats | None:
    """Draws (DRAWS, C) of the class prior of many samples, by the curvature of their likelihood."""
    classes = len(prior)
    if classes > MOST_CLASSES:
        return None
    scaled = likelihood / np.maximum(likelihood @ prior, 1e-300)[:, None]
    information = scaled.T @ scaled + np.diag(pseudo_counts / np.maximum(prior, 1e-6) ** 2)
    tangent = np.linalg.svd(np.ones((1, classes)))[2][1:].T  # (C, C - 1): directions that keep the sum
    factor = np.linalg.cholesky(np.linalg.pinv(tangent.T @ information @ tangent) + 1e-18 * np.eye(classes - 1))
    draws = np.maximum(prior + rng.normal(size=(DRAWS, classes - 1)) @ (tangent @ factor).T, 0)
    return draws / draws.sum(axis=1, keepdims=True)


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

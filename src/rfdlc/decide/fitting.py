"""Held-out data, and the parameters of calibrators that fit them best."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.sparse import csr_array

from rfdlc.decide.classes import Indices
from rfdlc.decide.priors import Prior, shrunk
from rfdlc.decide.scores import Floats, log_softmax, softmax

STEP = 0.05  # of log T, for the curvature of the likelihood
COLDEST, HOTTEST = 0.05, 20.0  # a temperature beyond these: too few held-out samples, or a broken model
STEEPEST = 4.0  # the largest power, and one over the least
# A temperature is the most probable one under a Gaussian on log T, plus some standard errors: a temperature that is too
# low costs more than one that is too high. Chosen by regret on worlds like those of benchmarks/regret.py, with other
# seeds and logits 0.7 to 4 times too large.
LOG_T_MEAN, LOG_T_SPREAD, CAUTION = 0.25, 0.5, 0.5
SPREADS = (0.8, 0.2, 0.05)  # of Gaussians on biases: large ones to nearly none
LEAST_CERTAIN, FEW_CLASSES = 0.1, 10  # of mean probabilities: many rare classes together would outweigh the labels
MOVED = 0.1  # the least variance of what fitted biases do to a log prior
MATRIX_STRENGTH = 30.0  # of a Gaussian on each entry of a matrix: there are C of them per class


def affine(log_p: Floats, weight: Any, bias: Any, power: float = 1.0) -> Floats:
    """W log p + b for every row, in the precision of `log_p`, which may be logits: they are normalised if W asks it.

    With a power, log p is -|log p|^power.
    """
    W, b = np.asarray(weight, dtype=log_p.dtype), np.asarray(bias, dtype=log_p.dtype)
    log_p = log_softmax(log_p) if W.ndim or power != 1 else log_p
    if power != 1:
        log_p = -(np.abs(log_p) ** log_p.dtype.type(power))
    scores: Floats = log_p @ W.T if W.ndim == 2 else log_p * W
    return scores + b if b.any() else scores


class HeldOut:
    """Weighted held-out log probabilities, and the parameters of highest penalised likelihood."""

    def __init__(
        self,
        log_p: Floats,
        targets: Indices,
        sample_weight: Floats | None = None,
        balanced: bool = False,
        train_prior: Prior | None = None,
        **_: Any,
    ) -> None:
        self.log_p, self.targets, self.rows = np.asarray(log_p, dtype=np.float64), targets, np.arange(len(targets))
        repeats = np.ones(len(targets)) if sample_weight is None else np.asarray(sample_weight, dtype=np.float64)
        counts = np.bincount(targets, repeats, minlength=log_p.shape[1])
        each = 1 / (np.maximum(counts, 1e-300) * (counts > 0).sum())[targets] if balanced else 1 / repeats.sum()
        self.weights = each * repeats  # sum to one
        self.size = 1 / (repeats @ np.square(np.broadcast_to(each, len(targets))))  # effective sample size
        self.prior: Prior = np.bincount(targets, self.weights, minlength=log_p.shape[1]).astype(np.float64)
        self.train_prior = train_prior if train_prior is not None and train_prior.all() else None
        self.offset = np.zeros(log_p.shape[1])  # from the prior that the scores carry to that of the held-out data
        if train_prior is not None:
            self.prior = shrunk(self.size * self.prior, train_prior)
            self.offset = np.log(np.maximum(self.prior, 1e-300) / np.maximum(train_prior, 1e-300))

    def carried(self, weight: Any, bias: Any, power: float = 1.0) -> tuple[float, ...]:
        """The class prior that calibrated probabilities carry, from their mean over the held-out data."""
        p = self.reweighted(affine(self.log_p, weight, bias, power))
        mean = np.maximum(self.weights @ p, 1e-12)
        if self.train_prior is not None:
            # The mean of few samples is noisy: empirical Bayes draws its logarithm to that of the scores' own prior.
            moved, variance = np.log(mean / self.train_prior), self.weights @ (p - mean) ** 2 / self.size / mean**2
            variance = np.maximum(variance, LEAST_CERTAIN / (self.size * self.train_prior))
            spread = 1.0
            for _ in range(30):
                precision = (variance + spread) ** -2
                spread = max(0.0, float(precision @ (moved**2 - variance) / precision.sum()))
            spread += MOVED
            mean = self.train_prior * np.exp(moved * spread / (spread + variance))
        return tuple((mean / mean.sum()).tolist())

    def reweighted(self, scores: Floats) -> Floats:
        """Probabilities times the weights (N, C) that give the samples the prior that the scores carry."""
        p = softmax(scores + self.offset) * np.exp(-self.offset)
        return p / max(float((self.weights @ p).sum()), 1e-300)

    def loss(self, scores: Floats) -> tuple[float, Floats]:
        """The negative log-likelihood, and its derivative by the scores (N, C)."""
        slope = softmax(scores + self.offset)
        loss = -self.weights @ np.log(np.maximum(slope[self.rows, self.targets], 1e-300))
        slope *= self.weights[:, None]  # weight * (p - one-hot)
        slope[self.rows, self.targets] -= self.weights
        return float(loss), slope

    def prior_misfit(self, scores: Floats, variance: Floats | None = None) -> tuple[float, Floats, Floats]:
        """How improbable it is that mean probabilities are as far from the prior that the scores carry (nearly -log).

        Probabilities have the prior that they carry as their mean: few samples tell more by that than by their labels.
        Also the derivative by the scores (N, C), and the variance of each mean over its prior (C,) if it is not given:
        that of hits, and larger for classes without a sample to expect.
        """
        prior, p, shift = self.train_prior, softmax(scores + self.offset), np.exp(-self.offset)
        total = max(float((self.weights @ p) @ shift), 1e-300)
        mean = (self.weights @ p) * shift / total
        if variance is None:
            expected = self.size * prior
            each = self.weights @ p**2 * (shift / total) ** 2 / np.maximum(mean, 1e-300)
            few = np.sqrt(max(1.0, len(mean) / FEW_CLASSES))
            variance = np.maximum(each, LEAST_CERTAIN) / expected * (1 + 1 / expected) * few
        off = mean / prior - 1
        slope = off / variance / prior
        slope = self.weights[:, None] * (slope - slope @ mean) * shift / total  # by p
        return float((off**2 / variance).sum() / 2), p * (slope - (p * slope).sum(axis=1, keepdims=True)), variance

    def temperature(self) -> tuple[float, float]:
        """The most probable temperature and `CAUTION` standard errors more, and the standard error of its logarithm."""
        ((best, error, _, _),) = self._most_probable(csr_array((0, self.log_p.shape[1])), (1.0,))
        if min(np.abs(best - np.log([COLDEST, HOTTEST]))) < 0.01:
            warnings.warn(
                f"the fitted temperature {np.exp(best):g} lies at the edge of what is plausible ({COLDEST} to "
                f"{HOTTEST}): there may be too few held-out samples ({len(self.targets)}), or the model classifies all "
                "of them correctly, or none",
                stacklevel=5,
            )
        return float(min(np.exp(best + CAUTION * error), HOTTEST)), float(error)

    def temperature_and_bias(self, directions: csr_array) -> tuple[float, NDArray[np.float64]]:
        """T and the bias (C,), a sum of the directions (parameters, C).

        How large biases are is not known in advance: the mean over `SPREADS`, each as probable as it makes the data.
        """
        best, errors, biases, losses = map(np.array, zip(*self._most_probable(directions, SPREADS), strict=True))
        probable = softmax(-losses[None])[0]
        return float(min(np.exp(probable @ (best + CAUTION * errors)), HOTTEST)), probable @ biases

    def _most_probable(
        self, directions: csr_array, spreads: Sequence[float]
    ) -> list[tuple[float, float, Floats, float]]:
        """For each spread log T, its standard error, the bias (C,), and minus the log evidence (Laplace's method).

        Under Gaussians on log T and, with these spreads, on the factors of the directions. Mean probabilities count as
        far as a temperature and biases of the first spread explain them.
        """
        per_class, count = directions.T.tocsr(), directions.shape[0]
        middle, options = np.r_[LOG_T_MEAN, np.zeros(count)], {"maxiter": 500, "ftol": 1e-11, "gtol": 1e-7}
        plausible = np.log([COLDEST, HOTTEST])

        def scores(parameters: Floats) -> Floats:
            return self.log_p * np.exp(-parameters[0]) + per_class @ parameters[1:]

        def loss(parameters: Floats, spread: float, trust: float, variance: Floats | None) -> tuple[float, Floats]:
            found, widths = scores(parameters), np.r_[LOG_T_SPREAD, np.full(count, spread)]
            drift, (value, slope) = (parameters - middle) / widths, self.loss(found)
            if trust:
                misfit, more, _ = self.prior_misfit(found, variance)
                value, slope = value + trust * misfit / self.size, slope + trust / self.size * more
            by_log_t = -(slope * self.log_p).sum() * np.exp(-parameters[0])
            slopes = np.r_[by_log_t, directions @ slope.sum(axis=0)]
            return value + drift @ drift / 2 / self.size, slopes + drift / widths / self.size

        def lowest(start: Floats, between: Floats, *given: Any) -> tuple[Floats, float]:
            bounds = [tuple(between), *[(None, None)] * count]
            found = minimize(loss, start, given, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
            return found.x, self.size * found.fun

        best, trust, variance, fits = lowest(middle, plausible, spreads[0], 0.0, None)[0], 0.0, None, []
        if self.train_prior is not None:
            misfit, _, variance = self.prior_misfit(scores(best))
            trust = min(1.0, len(self.prior) / max(misfit, 1e-9)) ** 2  # chance gives half a unit per class
        for spread in spreads:
            given = spread, trust, variance
            best, least = lowest(best, plausible, *given)
            around = [lowest(best, np.repeat(best[0] + side, 2), *given)[1] - least for side in (-STEP, STEP)]
            p = softmax(scores(best) + self.offset)
            known = self.size * (directions.power(2) @ (self.weights @ p) - self.weights @ (p @ per_class) ** 2)
            evidence = least + np.log1p(spread**2 * known).sum() / 2
            error = 1 / np.sqrt(max(sum(around) / STEP**2, LOG_T_SPREAD**-2))
            fits.append((best[0], error, per_class @ best[1:], evidence))
        return fits

    def temperature_and_power(self, directions: csr_array) -> tuple[float, float, NDArray[np.float64]]:
        """The most probable T, power and bias (C,) of softmax(b - |log p / T|^power), under Gaussians.

        The bias is a sum of the directions (parameters, C).
        """
        logs, per_class = np.log(np.maximum(-log_softmax(self.log_p), 1e-300)), directions.T.tocsr()
        mean = np.zeros(2 + directions.shape[0])  # log T, log power, bias
        mean[0], spread = LOG_T_MEAN, np.concatenate([[LOG_T_SPREAD] * 2, np.ones(directions.shape[0])])

        def loss(parameters: Floats) -> tuple[float, Floats]:
            log_t, power = parameters[0], np.exp(parameters[1])
            scaled = -np.exp(power * (logs - log_t))
            nll, slope = self.loss(scaled + per_class @ parameters[2:])
            inner = slope * power * scaled  # by the exponent
            drift = (parameters - mean) / spread
            slopes = np.concatenate([[-inner.sum(), (inner * (logs - log_t)).sum()], directions @ slope.sum(axis=0)])
            return nll + (drift @ drift) / 2 / self.size, slopes + drift / spread / self.size

        bounds = [np.log([COLDEST, HOTTEST]), np.log([1 / STEEPEST, STEEPEST])] + [(None, None)] * directions.shape[0]
        found = minimize(loss, np.zeros(len(mean)), jac=True, method="L-BFGS-B", bounds=bounds).x
        return float(np.exp(found[0])), float(np.exp(found[1])), per_class @ found[2:]

    def matrix_and_bias(self) -> tuple[Floats, Floats]:
        """W (C, C) and b (C,), with a ridge penalty on their distance from 1/T and 0."""
        classes, penalty = self.log_p.shape[1], MATRIX_STRENGTH / self.size
        at_rest = np.vstack([np.eye(classes) / self.temperature()[0], np.zeros(classes)])  # (C + 1, C): W.T above b

        def loss(flat: Floats) -> tuple[float, Floats]:
            parameters = flat.reshape(at_rest.shape)
            drift, (nll, slope) = parameters - at_rest, self.loss(self.log_p @ parameters[:-1] + parameters[-1])
            slopes = np.vstack([self.log_p.T @ slope, slope.sum(axis=0)])
            return nll + penalty / 2 * (drift**2).sum(), (slopes + penalty * drift).ravel()

        found = minimize(loss, at_rest.ravel(), jac=True, method="L-BFGS-B", options={"maxiter": 500}).x
        found = found.reshape(at_rest.shape)
        return found[:-1].T, found[-1]

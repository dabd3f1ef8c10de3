"""Held-out data, and the parameters of calibrators that fit them best."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.lapack import dposv
from scipy.optimize import minimize
from scipy.sparse import csr_array

from rfdlc.probabilities.classes import Indices
from rfdlc.probabilities.priors import Prior, shrunk
from rfdlc.probabilities.scores import Floats, log_softmax, softmax

STEP = 0.05  # of log T, for the curvature of the likelihood
COLDEST, HOTTEST = (
    1e-3,
    1e3,
)  # bounds of a temperature: boosting needs 0.02, naive Bayes 50
COMMON = (
    0.05,
    20.0,
    # a temperature beyond these may also be that of too few held-out samples, or of a
    # broken model
)
STEEPEST = 4.0  # the largest power, and one over the least
# A temperature is the most probable one under a Gaussian on log T, plus some standard
# errors: a temperature that is too low costs more than one that is too high. Chosen by
# regret on worlds like those of benchmarks/regret.py, with other seeds and logits 0.7
# to 4 times too large.
LOG_T_MEAN, LOG_T_SPREAD, CAUTION = 0.25, 0.5, 0.5
SPREADS = (0.8, 0.2, 0.05)  # of Gaussians on biases: large ones to nearly none
LEAST_CERTAIN, FEW_CLASSES = (
    0.1,
    10,
)  # of mean probabilities: many rare classes together would outweigh the labels
MOST_NEWTON, MOST_ENTRIES = (
    1000,
    250,
)  # parameters, and entries of a matrix, that Newton's method fits
NEWTON_STEPS = 100
CONVERGED, MOST_DAMPED = (
    1e-8,
    1e6,
)  # in nats; beyond this damping no step gains anything
MOVED = 0.1  # the least variance of what fitted biases do to a prior, over it
NEVER, NO_SHARE = (
    -1e30,
    1e-12,
)  # the log probability of an absent class, at any temperature and power; and its share
BY_CHANCE = (
    0.05  # how probable it may be at least that some class has no sample by chance
)
MATRIX_STRENGTH = (
    30.0  # of a Gaussian on each entry of a matrix: there are C of them per class
)


def affine(log_p: Floats, weight: Any, bias: Any, power: float = 1.0) -> Floats:
    """W log p + b for every row, in the precision of `log_p`, which may be logits: they
    are normalised if W asks it.

    With a power, log p is -|log p|^power.
    """
    return mapped(
        raised(log_p, power) if np.ndim(weight) or power != 1 else log_p, weight, bias
    )


def raised(log_p: Floats, power: float, temperature: float = 1.0) -> Floats:
    """-|log p / T|^power of log probabilities, or of logits, which are normalised."""
    log_p = log_softmax(log_p)
    return (
        log_p
        if power == temperature == 1
        else -(np.abs(log_p / temperature) ** log_p.dtype.type(power))
    )


def mapped(scores: Floats, weight: Any, bias: Any) -> Floats:
    """W s + b for every row s, in its precision."""
    W, b = np.asarray(weight, dtype=scores.dtype), np.asarray(bias, dtype=scores.dtype)
    found: Floats = scores @ W.T if W.ndim == 2 else scores * W
    return found + b if b.any() else found


def newton(
    expansion: Callable[[Floats], tuple[float, Floats, Floats]],
    start: Floats,
    between: Floats,
) -> tuple[Floats, float, Floats]:
    """The lowest value, where it is and its second derivative, by damped Newton steps
    from (value, slope, curvature).

    The first parameter stays between two bounds; values are in nats.
    """
    best, damping = start.copy(), 0.0
    value, slope, curvature = expansion(best)
    for _ in range(NEWTON_STEPS):
        convex, downhill = curvature.copy(), -slope
        if (
            best[0] == between[int(slope[0] < 0)]
        ):  # at a bound, and the value falls beyond it
            downhill[0] = convex[0, 1:] = convex[1:, 0] = 0
            convex[0, 0] = 1
        convex.flat[:: len(convex) + 1] *= 1 + damping
        _, step, failed = dposv(
            convex, downhill
        )  # the wrappers in scipy.linalg cost more than small systems
        if failed:  # not convex here
            convex.flat[:: len(convex) + 1] = (1 + damping) * np.abs(curvature).sum(
                axis=0
            )  # diagonally dominant
            step = np.linalg.solve(convex, downhill)
        tried = best + step
        tried[0] = min(max(tried[0], between[0]), between[1])
        if (
            step @ downhill < CONVERGED and damping == 0
        ):  # the last step squares an error that is small already
            return tried, value - step @ downhill / 2, curvature
        found = expansion(tried)
        if found[0] <= value:
            best, (value, slope, curvature), damping = (
                tried,
                found,
                damping / 10 if damping > 0.1 else 0.0,
            )
        elif damping > MOST_DAMPED:  # rounding hides what is left to gain
            break
        else:
            damping = max(10 * damping, 0.1)
    return best, value, curvature


def not_held_out(
    log_p: Floats, counts: NDArray[Any], sample_weight: Floats | None = None
) -> NDArray[np.bool_]:
    """Classes (C,) without a sample that scores expect too many of for that to be
    chance (Poisson, Bonferroni).
    """
    expected = counts.sum() * np.average(softmax(log_p), axis=0, weights=sample_weight)
    return (counts == 0) & (expected > np.log(len(counts) / BY_CHANCE))


class HeldOut:
    """Weighted held-out log probabilities, and the parameters of highest penalised
    likelihood.

    A class that is `absent`, with neither samples nor a share of the prior that the
    scores carry, takes no part. One that is `left_out` of the data, though scores
    expect it, has no share of their prior: nothing moves it.
    """

    def __init__(
        self,
        log_p: Floats,
        targets: Indices,
        sample_weight: Floats | None = None,
        balanced: bool = False,
        train_prior: Prior | None = None,
        **_: Any,
    ) -> None:
        repeats = np.ones(len(targets))
        if sample_weight is not None:
            counted = np.asarray(sample_weight) > 0
            log_p, targets = log_p[counted], targets[counted]
            repeats = np.asarray(sample_weight, dtype=np.float64)[counted]
        self.targets, self.rows = targets, np.arange(len(targets))
        self.samples = repeats.sum()
        counts = np.bincount(targets, repeats, minlength=log_p.shape[1])
        each = (
            1 / (np.maximum(counts, 1e-300) * (counts > 0).sum())[targets]
            if balanced
            else 1 / repeats.sum()
        )
        self.weights = each * repeats  # sum to one
        self.size = 1 / (
            repeats @ np.square(np.broadcast_to(each, len(targets)))
        )  # effective sample size
        self.prior: Prior = np.bincount(
            targets, self.weights, minlength=log_p.shape[1]
        ).astype(np.float64)
        self.absent: NDArray[np.bool_] = (self.prior == 0) & (
            train_prior is not None and train_prior == 0
        )
        self.log_p = np.where(self.absent, NEVER, np.asarray(log_p, dtype=np.float64))
        self.left_out = not_held_out(self.log_p, counts, repeats)
        carried = (
            None
            if train_prior is None
            else np.where(self.absent, NO_SHARE, train_prior)
        )
        self.train_prior = carried if carried is not None and carried.all() else None
        self._shifted: Floats | None = None
        self.offset = np.zeros(
            log_p.shape[1]
        )  # from the prior that the scores carry to that of the held-out data
        if train_prior is not None:
            self.prior = shrunk(self.size * self.prior, train_prior)
            # Held-out samples of a class without a share contradict it: the scores are
            # then taken as they are.
            known = train_prior > 0
            np.log(
                np.divide(
                    self.prior, train_prior, where=known, out=np.ones_like(self.prior)
                ),
                out=self.offset,
            )
        self.offset[self.left_out] = np.log(NO_SHARE)

    def carried(self, weight: Any, bias: Any, power: float = 1.0) -> tuple[float, ...]:
        """The class prior that calibrated probabilities carry, from their mean over the
        held-out data.
        """
        p = self.reweighted(
            mapped(
                self.log_p if power == 1 else raised(self.log_p, power), weight, bias
            )
        )
        mean = self.weights @ p
        if self.train_prior is not None:
            mean = self._drawn_to_prior(p)
        mean = np.where(self.absent, 0, np.maximum(mean, 1e-12))
        return tuple((mean / mean.sum()).tolist())

    def _drawn_to_prior(self, p: Floats) -> Floats:
        """The mean of probabilities (N, C) as far as it tells more than chance, by
        empirical Bayes; else the prior that the scores carry.

        Few samples lack many classes. The mean probability of these is below their
        share by chance, and that of the others above. It varies as a share of hits: the
        more so, the surer probabilities are. Absent classes do not show how sure
        theirs are: no class counts as less sure than all together.
        """
        prior = np.asarray(self.train_prior)
        mean = self.weights @ p
        squares = self.weights @ (p - mean) ** 2
        overall = min(float(squares.sum()), 1.0)
        sureness = np.maximum(squares / np.maximum(mean, 1e-300), overall)
        variance = sureness / (self.size * prior)  # of the mean over the prior
        moved = mean / prior - 1
        spread = 1.0
        for _ in range(30):
            precision = (variance + spread) ** -2
            excess = float(precision @ (moved**2 - variance) / precision.sum())
            spread = max(0.0, excess)
        spread += MOVED
        return prior * (1 + moved * spread / (spread + variance))

    def reweighted(self, scores: Floats) -> Floats:
        """Probabilities times the weights (N, C) that give the samples the prior that
        the scores carry.
        """
        p = softmax(scores + self.offset) * np.exp(-self.offset)
        return p / max(float((self.weights @ p).sum()), 1e-300)

    def loss(self, scores: Floats) -> tuple[float, Floats]:
        """The negative log-likelihood, and its derivative by the scores (N, C)."""
        slope = softmax(scores + self.offset)
        loss = -self.weights @ np.log(
            np.maximum(slope[self.rows, self.targets], 1e-300)
        )
        slope *= self.weights[:, None]  # weight * (p - one-hot)
        slope[self.rows, self.targets] -= self.weights
        return float(loss), slope

    def prior_misfit(self, p: Floats) -> tuple[float, Floats]:
        """How improbable it is that mean probabilities are as far from the prior that
        the scores carry (nearly -log).

        Probabilities have the prior that they carry as their mean: few samples tell
        more by that than by their labels. Also the variance of each mean over its prior
        (C,): that of hits, larger for classes without a sample to expect.
        """
        mean = np.maximum(self.weights @ p, 1e-300) * np.exp(-self.offset)
        total = mean.sum()
        each = self.weights @ p**2 * np.exp(-2 * self.offset) / total / mean
        expected, few = (
            self.size * self.train_prior,
            np.sqrt(max(1.0, len(mean) / FEW_CLASSES)),
        )
        variance = np.maximum(each, LEAST_CERTAIN) / expected * (1 + 1 / expected) * few
        return (
            float(((mean / total / self.train_prior - 1) ** 2 / variance).sum() / 2),
            variance,
        )

    def scaled(self, log_t: float, bias: Floats) -> tuple[Floats, Floats]:
        """log p / T, its largest at 0, and the probabilities of these scores and the
        bias (C,).
        """
        if self._shifted is None:
            self._shifted = self.log_p - self.log_p.max(axis=1, keepdims=True)
        scaled, bias = self._shifted * np.exp(-log_t), bias + self.offset
        p = scaled + (bias - bias.max())
        np.exp(p, out=p)
        p /= np.maximum(p @ np.ones(len(bias)), 1e-300)[:, None]
        return scaled, p

    def expansion(
        self,
        log_t: float,
        bias: Floats,
        trust: float,
        variance: Any,
        basis: Any,
        second: bool = True,
    ) -> tuple[float, Floats, Any]:
        """The negative log-likelihood and `trust` times the misfit, and their
        derivatives by log T and along the basis.

        The basis (parameters, C) spans the biases; None stands for one parameter per
        class.
        """
        (scaled, p), weights = self.scaled(log_t, bias), self.weights
        own = self.rows, self.targets
        by_t, mean, every = (
            p * scaled,
            weights @ p,
            np.ones(len(bias)),
        )  # the derivative by log T is minus `scaled`
        value = -weights @ np.log(np.maximum(p[own], 1e-300))
        mean_t, each_t = weights @ by_t, by_t @ every
        slope_t, slope = (
            weights @ scaled[own] - mean_t.sum(),
            mean - np.bincount(self.targets, weights, len(mean)),
        )
        bent, bent_t = mean, mean_t
        if trust:
            shift, prior = np.exp(-self.offset), np.asarray(self.train_prior)
            total = max(float(mean @ shift), 1e-300)
            share = mean * shift / total
            off, sharp = share / prior - 1, trust / variance
            value += off**2 @ sharp / 2
            by_share = off * sharp / prior
            by_p = shift * (by_share - by_share @ share) / total
            each = p @ by_p
            uneven = weights * each
            bent, bent_t = (
                mean + by_p * mean - uneven @ p,
                mean_t + by_p * mean_t - uneven @ by_t,
            )
            slope_t, slope = (
                slope_t - by_p @ mean_t + uneven @ each_t,
                slope + bent - mean,
            )
        slopes = np.concatenate([[slope_t], slope if basis is None else basis @ slope])
        if not second:
            return float(value), slopes, None
        along = np.empty(
            (len(p), len(slopes))
        )  # the mean derivative of a sample's scores
        along[:, 0], along[:, 1:] = -each_t, p if basis is None else p @ basis.T
        weighted, squares = weights[:, None] * along, by_t * scaled
        bent_tt = weights @ (squares @ every)
        if trust:
            moved = -p.T @ weighted  # the sums of probabilities (C, 1 + parameters)
            moved[:, 0] -= mean_t
            moved[:, 1:] += np.diag(mean) if basis is None else (basis * mean).T
            moved *= shift[:, None]
            all_moved = moved.sum(axis=0)
            share_moved = (moved - share[:, None] * all_moved) / total
            found = (share_moved.T * (sharp / prior**2)) @ share_moved
            found -= 2 / total * ((by_p / shift) @ moved)[:, None] * all_moved
            bent_tt += (weights @ squares) @ by_p - uneven @ (squares @ every)
            doubled = along * (1 - 2 * each)[:, None]
            doubled[:, 0] -= 2 * (by_t @ by_p)
            doubled[:, 1:] += (
                2 * by_p * p if basis is None else p @ (2 * by_p * basis).T
            )
            found -= weighted.T @ doubled
            found = (found + found.T) / 2
        else:
            found = -(along.T @ weighted)
        found[0, 0] += bent_tt - slope_t
        found[0, 1:] -= bent_t if basis is None else basis @ bent_t
        found[1:, 0] = found[0, 1:]
        found[1:, 1:] += np.diag(bent) if basis is None else (basis * bent) @ basis.T
        return float(value), slopes, found

    def temperature(self) -> tuple[float, float]:
        """The most probable temperature and `CAUTION` standard errors more, and the
        standard error of its logarithm.
        """
        ((best, error, _, _),) = self._most_probable(
            csr_array((0, self.log_p.shape[1])), (1.0,)
        )
        if not COMMON[0] < np.exp(best) < COMMON[1]:
            warnings.warn(
                f"the fitted temperature {np.exp(best):g} is unusual (below {COMMON[0]}"
                f" or above {COMMON[1]}): there may be too few held-out samples"
                f" ({self.samples:g}), or the model classifies all of them correctly"
                " or none, or its scores are on another scale than logits",
                stacklevel=5,
            )
        return float(min(np.exp(best + CAUTION * error), HOTTEST)), float(error)

    def temperature_and_bias(
        self, directions: csr_array
    ) -> tuple[float, NDArray[np.float64]]:
        """T and the bias (C,), a sum of the directions (parameters, C).

        How large biases are is not known in advance: the mean over `SPREADS`, each as
        probable as it makes the data.
        """
        best, errors, biases, losses = map(
            np.array, zip(*self._most_probable(directions, SPREADS), strict=True)
        )
        probable = softmax(-losses[None])[0]
        return (
            float(min(np.exp(probable @ (best + CAUTION * errors)), HOTTEST)),
            probable @ biases,
        )

    def _most_probable(
        self, directions: csr_array, spreads: Sequence[float]
    ) -> list[tuple[float, float, Floats, float]]:
        """For each spread log T, its standard error, the bias (C,), and minus the log
        evidence (Laplace's method).

        Under Gaussians on log T and, with these spreads, on the factors of the
        directions. Mean probabilities count as far as a temperature and biases of the
        first spread explain them.
        """
        count, plausible = directions.shape[0], np.log([COLDEST, HOTTEST])
        basis = (
            directions.toarray() if count <= MOST_NEWTON else directions
        )  # sparse products of small arrays are slow
        projection = (
            None
            if count <= MOST_NEWTON and np.array_equal(basis, np.eye(len(self.prior)))
            else basis
        )
        middle = np.r_[LOG_T_MEAN, np.zeros(count)]

        def loss(
            parameters: Floats,
            precision: Floats,
            trust: float,
            variance: Any,
            *,
            second: bool = False,
        ) -> Any:
            found = self.expansion(
                parameters[0],
                parameters[1:] @ basis,
                trust,
                variance,
                projection,
                second,
            )
            drift, (value, slopes, curvature) = parameters - middle, found
            value, slopes = (
                self.size * value + drift**2 @ precision / 2,
                self.size * slopes + drift * precision,
            )
            return (
                (value, slopes, self.size * curvature + np.diag(precision))
                if second
                else (value, slopes)
            )

        def quasi_newton(
            start: Floats, between: Floats, *given: Any
        ) -> tuple[Floats, float]:
            bounds, options = (
                [tuple(between), *[(None, None)] * count],
                {"maxiter": 500, "ftol": 1e-13, "gtol": 1e-5},
            )
            found = minimize(
                loss,
                start,
                given,
                jac=True,
                method="L-BFGS-B",
                bounds=bounds,
                options=options,
            )
            return found.x, found.fun

        def lowest(start: Floats, *given: Any) -> tuple[Floats, float, float]:
            """Where the loss is lowest, its value, and its curvature along log T if the
            other parameters follow.
            """
            if count <= MOST_NEWTON:
                best, least, bent = newton(
                    lambda at: loss(at, *given, second=True), start, plausible
                )
                return (
                    best,
                    least,
                    float(
                        bent[0, 0]
                        - bent[0, 1:] @ np.linalg.solve(bent[1:, 1:], bent[1:, 0])
                    ),
                )
            best, least = quasi_newton(start, plausible, *given)
            sides = [
                quasi_newton(best, np.repeat(best[0] + side, 2), *given)[1]
                for side in (-STEP, STEP)
            ]
            return best, least, (sum(sides) - 2 * least) / STEP**2

        def probabilities(parameters: Floats) -> Floats:
            return self.scaled(parameters[0], parameters[1:] @ basis)[1]

        precisions = [
            np.r_[LOG_T_SPREAD**-2, np.full(count, spread**-2)] for spread in spreads
        ]
        best, trust, variance, fits = (
            lowest(middle, precisions[0], 0.0, None)[0],
            0.0,
            None,
            [],
        )
        if self.train_prior is not None:
            misfit, variance = self.prior_misfit(probabilities(best))
            trust = (
                min(1.0, len(self.prior) / max(misfit, 1e-9)) ** 2 / self.size
            )  # chance: half a unit per class
        for spread, precision in zip(spreads, precisions, strict=True):
            best, least, bent = lowest(best, precision, trust, variance)
            p = probabilities(best)
            known = self.size * (
                basis**2 @ (self.weights @ p) - self.weights @ (p @ basis.T) ** 2
            )
            evidence = least + np.log1p(spread**2 * known).sum() / 2
            fits.append(
                (
                    best[0],
                    1 / np.sqrt(max(bent, LOG_T_SPREAD**-2)),
                    best[1:] @ basis,
                    evidence,
                )
            )
        return fits

    def temperature_and_power(
        self, directions: csr_array
    ) -> tuple[float, float, NDArray[np.float64]]:
        """The most probable T, power and bias (C,) of softmax(b - |log p / T|^power),
        under Gaussians.

        The bias is a sum of the directions (parameters, C).
        """
        logs, per_class = (
            np.log(np.maximum(-log_softmax(self.log_p), 1e-300)),
            directions.T.tocsr(),
        )
        mean = np.zeros(2 + directions.shape[0])  # log T, log power, bias
        mean[0], spread = (
            LOG_T_MEAN,
            np.concatenate([[LOG_T_SPREAD] * 2, np.ones(directions.shape[0])]),
        )

        def loss(parameters: Floats) -> tuple[float, Floats]:
            log_t, power = parameters[0], np.exp(parameters[1])
            scaled = -np.exp(power * (logs - log_t))
            nll, slope = self.loss(scaled + per_class @ parameters[2:])
            inner = slope * power * scaled  # by the exponent
            drift = (parameters - mean) / spread
            slopes = np.concatenate(
                [
                    [-inner.sum(), (inner * (logs - log_t)).sum()],
                    directions @ slope.sum(axis=0),
                ]
            )
            return (
                nll + (drift @ drift) / 2 / self.size,
                slopes + drift / spread / self.size,
            )

        bounds = [np.log([COLDEST, HOTTEST]), np.log([1 / STEEPEST, STEEPEST])] + [
            (None, None)
        ] * directions.shape[0]
        found = minimize(
            loss, np.zeros(len(mean)), jac=True, method="L-BFGS-B", bounds=bounds
        ).x
        return float(np.exp(found[0])), float(np.exp(found[1])), per_class @ found[2:]

    def matrix_and_bias(self) -> tuple[Floats, Floats]:
        """W (C, C) and b (C,), with a ridge penalty on their distance from 1/T
        and 0.
        """
        classes, temperature = self.log_p.shape[1], self.temperature()[0]
        inputs = np.column_stack(
            [np.where(self.absent, 0, self.log_p), np.ones(len(self.rows))]
        )  # the last is for b
        weighted = np.sqrt(self.size * self.weights)[:, None] * inputs
        rest, shape = self.log_p / temperature, (classes, classes + 1)  # W beside b

        def loss(flat: Floats) -> tuple[float, Floats]:
            drift = flat.reshape(shape)
            nll, slope = self.loss(rest + inputs @ drift.T)
            slopes = self.size * slope.T @ inputs + MATRIX_STRENGTH * drift
            return (
                self.size * nll + MATRIX_STRENGTH / 2 * (drift**2).sum(),
                slopes.ravel(),
            )

        def expansion(flat: Floats) -> tuple[float, Floats, Floats]:
            p = softmax(rest + inputs @ flat.reshape(shape).T + self.offset)
            along = (p[:, :, None] * weighted[:, None]).reshape(len(p), -1)
            bent = MATRIX_STRENGTH * np.eye(flat.size) - along.T @ along
            own = (along.T @ weighted).reshape(*shape, classes + 1)
            bent.reshape(*shape, *shape)[np.arange(classes), :, np.arange(classes)] += (
                own
            )
            return *loss(flat), bent

        start = np.zeros(classes * (classes + 1))
        if len(start) <= MOST_ENTRIES:
            found = newton(expansion, start, np.array([-np.inf, np.inf]))[0]
        else:
            found = minimize(
                loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 500}
            ).x
        found = found.reshape(shape)
        return np.eye(classes) / temperature + found[:, :-1], found[:, -1]

"""Calibrators make probabilities mean what they say. Each is an affine map of log p, fitted on held-out data.

- none: log p itself;
- temperature (Guo et al. 2017): softmax(log p / T), one parameter;
- prior-corrected-temperature: biases in proportion to the log training frequency, b = -d log n: two parameters.
  A rare class has too few held-out samples for a bias of its own, but all rare classes together show how far
  the model still leans to the head;
- bias-corrected-temperature (Alexandari et al. 2020): softmax(log p / T + b), one bias per class;
- matrix-scaling (Kull et al. 2019): softmax(W log p + b), with a ridge penalty, for many held-out samples;
- auto: the one of these with the highest cross-validated likelihood.

The class prior of held-out data may differ from the prior q that the scores carry. Where q is known, what is fitted is
softmax(W log p + b + log(h / q)) with h the held-out prior, and the last term is left out afterwards.
"""

import warnings
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize, minimize_scalar
from scipy.sparse import csr_array

from rfdlc.decide.classes import Indices
from rfdlc.decide.priors import shift_weights
from rfdlc.decide.scores import Floats, log_softmax, softmax
from rfdlc.errors import InputError, expect

COLDEST, HOTTEST = 0.05, 20.0  # a temperature beyond these: too few held-out samples, or a broken model
# A temperature is the most probable one under a Gaussian on log T, plus some standard errors: a temperature that is too
# low costs more than one that is too high. Chosen by regret on worlds like those of benchmarks/regret.py, with logits
# 0.7 to 4 times too large.
LOG_T_MEAN, LOG_T_SPREAD, CAUTION = 0.25, 0.5, 0.7
STRENGTH = 1.0  # of a unit Gaussian on 1/T - 1 and on each bias: as weak as one sample, and keeps them finite
MATRIX_STRENGTH = 30.0  # times STRENGTH, on each entry of a matrix: there are C of them per class
CHOICES = ("temperature", "none", "prior-corrected-temperature", "bias-corrected-temperature", "matrix-scaling")
FOLDS, CLEARLY = 5, 1.0  # of cross-validation; standard errors below the best that a simpler calibrator may be
SAMPLES_PER_PARAMETER = 5  # held-out samples, below which a calibrator is not tried


class Calibrator(Protocol):
    """A fitted calibrator: softmax(W log p + b).

    A new one is a dataclass that inherits from this class, defines `name`, `fit` and `as_affine`, and is decorated
    with `register_calibrator`. Deciders, commands, training, exported graphs, servers and reports then know it by name.

    Attributes
    ----------
    name : str
        The name under which it is registered, such as ``"temperature"``.
    prior : sequence of float or None
        The class prior that calibrated probabilities carry, if fitting moved it; None if it is that of the scores.
    """

    name: ClassVar[str]
    prior: tuple[float, ...] | None = None

    @classmethod
    @abstractmethod
    def fit(cls, log_p: Floats, targets: Indices, **context: Any) -> Self:
        """Fit to held-out log probabilities (or logits) of shape (N, C) and class indices (N,).

        `context` holds `sample_weight` ((N,) or None; a sample with weight 2 counts as two), `balanced` (every class
        gets the same total weight), `training_counts` ((C,) or None), and the class priors that the scores carry and
        that is decided for, `train_prior` and `target_prior` ((C,) or None).
        """

    @abstractmethod
    def as_affine(self) -> tuple[Any, Any]:
        """W, a number, a vector (C,) for a diagonal or a matrix (C, C), and b, a number or a vector (C,)."""

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, ready for JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {name: np.asarray(v).tolist() if np.ndim(v) else v for name, v in values.items()}

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; lists become tuples."""
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        return cls(**{name: tuple(table[name]) if isinstance(table[name], list) else table[name] for name in names})

    def apply(self, log_p: Floats) -> Floats:
        """Calibrated probabilities (N, C) from logits or log probabilities (N, C)."""
        return softmax(_affine(log_p, *self.as_affine()))

    def __str__(self) -> str:
        return self.name


CALIBRATORS: dict[str, type[Calibrator]] = {}
Registered = TypeVar("Registered", bound=type[Calibrator])


def register_calibrator(cls: Registered) -> Registered:
    """Make a calibrator available by its `name` (a class decorator)."""
    CALIBRATORS[cls.name] = cls
    return cls


def _affine(log_p: Floats, weight: Any, bias: Any) -> Floats:
    """W log p + b for every row, in the precision of `log_p`, which may be logits: they are normalised if W asks it."""
    W, b = np.asarray(weight, dtype=log_p.dtype), np.asarray(bias, dtype=log_p.dtype)
    if W.ndim:
        log_p = log_softmax(log_p)
    scores: Floats = log_p @ W.T if W.ndim == 2 else log_p * W
    if b.any():
        scores += b
    return scores


def check_affine(calibrator: Calibrator, classes: int) -> None:
    """Raise if the parameters of a calibrator do not fit the number of classes."""
    weight, bias = calibrator.as_affine()
    one, each, square = (), (classes,), (classes, classes)
    prior = np.ones(classes) if calibrator.prior is None else calibrator.prior
    checks = ("W", weight, (one, each, square)), ("bias", bias, (one, each)), ("prior", prior, (each,))
    for what, given, allowed in checks:
        values = np.asarray(given, dtype=np.float64)
        expect(
            values.shape in allowed and np.isfinite(values).all(),
            f"{what} of the calibrator has shape {values.shape} and sum {values.sum():g}: expected finite numbers, one "
            f"per class ({classes})",
        )


@register_calibrator
@dataclass(frozen=True)
class NoCalibration(Calibrator):
    """Probabilities as they are."""

    name = "none"

    @classmethod
    def fit(cls, log_p: Floats, targets: Indices, **context: Any) -> Self:
        return cls()

    def as_affine(self) -> tuple[Any, Any]:
        return 1.0, 0.0


@dataclass(frozen=True)
class _Scaling(Calibrator):
    """softmax(log p / temperature + bias)."""

    temperature: float = 1.0
    bias: tuple[float, ...] | None = None
    prior: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        expect(
            0 < self.temperature < np.inf, f"temperature {self.temperature} cannot be used: expected a number above 0"
        )

    def as_affine(self) -> tuple[Any, Any]:
        return 1 / self.temperature, 0.0 if self.bias is None else np.array(self.bias)

    def __str__(self) -> str:
        return f"temperature {self.temperature:.3g}" + ("" if self.bias is None else " and a bias per class")

    @classmethod
    def _with_bias(cls, held_out: "_HeldOut", directions: csr_array) -> Self:
        """Fit 1/T and the coefficients of the directions (parameters, C) of the bias."""
        temperature, bias = held_out.temperature_and_bias(directions)
        return cls(temperature, tuple(bias.tolist()), held_out.carried(1 / temperature, bias))


@register_calibrator
class Temperature(_Scaling):
    """softmax(log p / T)."""

    name = "temperature"

    @classmethod
    def fit(cls, log_p: Floats, targets: Indices, **context: Any) -> Self:
        return cls(_HeldOut(log_p, targets, **context).temperature())


@register_calibrator
class PriorCorrectedTemperature(_Scaling):
    """softmax(log p / T - d log n), with n the training counts."""

    name = "prior-corrected-temperature"

    @classmethod
    def fit(cls, log_p: Floats, targets: Indices, **context: Any) -> Self:
        counts = context.get("training_counts")
        if counts is None:
            raise InputError(
                f"calibration {cls.name!r} needs training counts: give the utility classes that have them "
                "(Classes.from_labels(y_train), --classes counts.csv)"
            )
        log_count = np.log(np.maximum(counts, 1))  # shifting all biases alike changes nothing
        return cls._with_bias(
            _HeldOut(log_p, targets, **context), csr_array(np.atleast_2d(log_count.mean() - log_count))
        )


@register_calibrator
class BiasCorrectedTemperature(_Scaling):
    """softmax(log p / T + b); the bias of a class that the held-out data lack stays 0."""

    name = "bias-corrected-temperature"

    @classmethod
    def fit(cls, log_p: Floats, targets: Indices, **context: Any) -> Self:
        present, classes = np.unique(targets), log_p.shape[1]
        directions = csr_array((np.ones(len(present)), (np.arange(len(present)), present)), (len(present), classes))
        return cls._with_bias(_HeldOut(log_p, targets, **context), directions)


@register_calibrator
@dataclass(frozen=True, eq=False)
class MatrixScaling(Calibrator):
    """softmax(W log p + b) with a ridge penalty towards a fitted temperature (Kull et al. 2019)."""

    weight: Any = 1.0  # a number, (C,) or (C, C)
    bias: Any = 0.0
    prior: tuple[float, ...] | None = None
    name = "matrix-scaling"

    @classmethod
    def fit(cls, log_p: Floats, targets: Indices, **context: Any) -> Self:
        held_out = _HeldOut(log_p, targets, **context)
        weight, bias = held_out.matrix_and_bias()
        return cls(weight, bias, held_out.carried(weight, bias))

    def as_affine(self) -> tuple[Any, Any]:
        return self.weight, self.bias

    def __str__(self) -> str:
        return f"{'a matrix' if np.ndim(self.weight) == 2 else 'scales'} and a bias per class"


@register_calibrator
@dataclass(frozen=True)
class Auto(Calibrator):
    """The first of CHOICES whose cross-validated likelihood is not clearly below the highest one.

    The likelihood is that of the class prior decided for, where it is known.
    """

    chosen: str
    parameters: dict[str, Any]
    losses: dict[str, float]  # cross-validated negative log-likelihood, in nats
    prior: tuple[float, ...] | None = None
    name = "auto"

    @classmethod
    def fit(cls, log_p: Floats, targets: Indices, **context: Any) -> Self:
        classes, held_out = log_p.shape[1], _HeldOut(log_p, targets, **context)
        parameters = dict(zip(CHOICES, (0, 0, 2, classes, classes**2), strict=True))
        allowed = [name for name in CHOICES if len(targets) >= SAMPLES_PER_PARAMETER * parameters[name]]
        if context.get("training_counts") is None and CHOICES[2] in allowed:
            allowed.remove(CHOICES[2])
        weights = held_out.target_weights(context.get("target_prior"))
        each = {name: _cross_validated(CALIBRATORS[name], log_p, targets, context) for name in allowed}
        losses = {name: float(weights @ values) for name, values in each.items()}
        best = min(losses, key=losses.__getitem__)

        def clearly_behind(name: str) -> bool:
            difference = each[name] - each[best]
            mean = weights @ difference
            return bool(mean > CLEARLY * np.sqrt(weights**2 @ (difference - mean) ** 2))

        chosen = next(name for name in allowed if name == best or not clearly_behind(name))
        fitted = CALIBRATORS[chosen].fit(log_p, targets, **context)
        return cls(chosen, fitted.to_dict(), losses, fitted.prior)

    @cached_property
    def calibrator(self) -> Calibrator:
        """The chosen one."""
        return CALIBRATORS[self.chosen].from_dict(self.parameters)

    def as_affine(self) -> tuple[Any, Any]:
        return self.calibrator.as_affine()

    def __str__(self) -> str:
        losses = ", ".join(f"{name} {loss:.4f}" for name, loss in self.losses.items())
        return f"{self.calibrator} (chosen by cross-validated loss: {losses})"


def _cross_validated(kind: type[Calibrator], log_p: Floats, targets: Indices, context: dict[str, Any]) -> Floats:
    """The negative log-likelihood of each sample, calibrated by the other folds, for the class prior decided for."""
    losses, order = np.empty(len(targets)), np.random.default_rng(0).permutation(len(targets))
    fold = np.empty(len(targets), dtype=np.int64)
    fold[order[np.argsort(targets[order], kind="stable")]] = np.arange(len(targets)) % FOLDS  # stratified
    repeats, carried, target = (context.get(name) for name in ("sample_weight", "train_prior", "target_prior"))
    for k in np.unique(fold):
        inside, outside = fold != k, fold == k
        part = context | {"sample_weight": None if repeats is None else repeats[inside]}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fitted = kind.fit(log_p[inside], targets[inside], **part)
        scores, prior = _affine(log_p[outside], *fitted.as_affine()), carried if fitted.prior is None else fitted.prior
        if target is not None and prior is not None:
            scores = scores + np.log(np.maximum(target, 1e-300) / np.maximum(prior, 1e-300))
        losses[outside] = -log_softmax(scores)[np.arange(outside.sum()), targets[outside]]
    return losses


class _HeldOut:
    """Weighted held-out log probabilities, and the parameters of highest penalised likelihood."""

    def __init__(
        self,
        log_p: Floats,
        targets: Indices,
        sample_weight: Floats | None = None,
        balanced: bool = False,
        train_prior: Floats | None = None,
        **_: Any,
    ) -> None:
        self.log_p, self.targets, self.rows = np.asarray(log_p, dtype=np.float64), targets, np.arange(len(targets))
        self.repeats = np.ones(len(targets)) if sample_weight is None else np.asarray(sample_weight, dtype=np.float64)
        counts = np.bincount(targets, self.repeats, minlength=log_p.shape[1])
        share = 1 / (np.maximum(counts, 1e-300) * (counts > 0).sum())[targets] if balanced else 1 / self.repeats.sum()
        self.weights = share * self.repeats  # sum to one
        self.size = 1 / (self.repeats @ np.square(np.broadcast_to(share, len(targets))))  # effective sample size
        self.ridge = STRENGTH / self.size
        self.prior = counts / counts.sum()  # of the held-out data
        self.offset = np.zeros(log_p.shape[1])  # from the prior that the scores carry to that of the weighted data
        if train_prior is not None:
            pseudo, probable = shift_weights(counts, train_prior)
            self.prior = probable @ ((pseudo + counts) / (pseudo + counts).sum(axis=1, keepdims=True))
            if balanced:  # by construction; one more sample, spread as the scores' prior: no class is impossible
                shares = np.bincount(targets, self.weights, minlength=log_p.shape[1])
                self.offset = np.log(shares / np.maximum(train_prior, 1e-300) + self.ridge) - np.log1p(self.ridge)
            else:
                self.offset = np.log(np.maximum(self.prior, 1e-300) / np.maximum(train_prior, 1e-300))

    def target_weights(self, target: Floats | None) -> Floats:
        """The weight of each sample in data of the target prior; as in fitting where it is not known."""
        if target is None:
            return self.weights
        weights = self.repeats * (target / np.maximum(self.prior, 1e-300))[self.targets]
        return weights / weights.sum()

    def carried(self, weight: Any, bias: Any) -> tuple[float, ...]:
        """The class prior that calibrated probabilities carry, from their mean over the held-out data."""
        fitted = softmax(_affine(self.log_p, weight, bias) + self.offset)
        mean = np.maximum(self.weights @ fitted, 1e-12) * np.exp(-self.offset)
        return tuple((mean / mean.sum()).tolist())

    def loss(self, scores: Floats) -> tuple[float, Floats]:
        """The negative log-likelihood, and its derivative by the scores (N, C), which are changed."""
        slope = softmax(scores + self.offset)
        loss = -self.weights @ np.log(np.maximum(slope[self.rows, self.targets], 1e-300))
        slope *= self.weights[:, None]  # weight * (p - one-hot)
        slope[self.rows, self.targets] -= self.weights
        return float(loss), slope

    def temperature(self) -> float:
        """The most probable temperature and `CAUTION` standard errors more."""

        def loss(log_t: float) -> float:
            likelihood = self.size * self.loss(self.log_p / np.exp(log_t))[0]
            return likelihood + ((log_t - LOG_T_MEAN) / LOG_T_SPREAD) ** 2 / 2

        bounds, step = np.log([COLDEST, HOTTEST]), 0.05
        best = float(minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-6}).x)
        curvature = (loss(best + step) - 2 * loss(best) + loss(best - step)) / step**2
        if min(np.abs(best - bounds)) < 0.01:
            warnings.warn(
                f"the fitted temperature {np.exp(best):g} lies at the edge of what is plausible ({COLDEST} to "
                f"{HOTTEST}): the {len(self.targets)} held-out samples may be too few, all right, or all wrong",
                stacklevel=5,
            )
        return float(np.exp(min(best + CAUTION / np.sqrt(max(curvature, LOG_T_SPREAD**-2)), bounds[1])))

    def temperature_and_bias(self, directions: csr_array) -> tuple[float, NDArray[np.float64]]:
        """L-BFGS over (1/T, coefficients of the directions (parameters, C)); convex, so any start will do."""
        free = directions.shape[0]
        at_rest = np.eye(1 + free)[0]  # 1/T = 1, no bias

        def loss(parameters: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
            drift = parameters - at_rest
            nll, slope = self.loss(parameters[0] * self.log_p + parameters[1:] @ directions)
            slopes = np.concatenate([[(slope * self.log_p).sum()], directions @ slope.sum(axis=0)])
            return nll + self.ridge / 2 * (drift**2).sum(), slopes + self.ridge * drift

        bounds = [(1 / HOTTEST, 1 / COLDEST)] + [(None, None)] * free
        options = {"maxiter": 500, "ftol": 1e-13, "gtol": 1e-9}
        fitted = minimize(loss, at_rest, jac=True, bounds=bounds, method="L-BFGS-B", options=options).x
        return float(1 / fitted[0]), fitted[1:] @ directions

    def matrix_and_bias(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """L-BFGS over W (C, C) and b (C,), with a penalty on their distance from 1/T and 0."""
        ridge, classes = MATRIX_STRENGTH * self.ridge, self.log_p.shape[1]
        at_rest = np.vstack([np.eye(classes) / self.temperature(), np.zeros(classes)])  # (C + 1, C): W.T above b

        def loss(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
            parameters = flat.reshape(at_rest.shape)
            drift = parameters - at_rest
            nll, slope = self.loss(self.log_p @ parameters[:-1] + parameters[-1])
            slopes = np.vstack([self.log_p.T @ slope, slope.sum(axis=0)]) + ridge * drift
            return nll + ridge / 2 * (drift**2).sum(), slopes.ravel()

        found = minimize(loss, at_rest.ravel(), jac=True, method="L-BFGS-B", options={"maxiter": 500}).x
        fitted = found.reshape(at_rest.shape)
        return fitted[:-1].T, fitted[-1]

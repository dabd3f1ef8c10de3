"""Calibrators make probabilities mean what they say. Each is an affine map of log p, fitted on held-out data.

The class prior h of held-out data may differ from the prior q that the scores carry. Where q is known,
softmax(W log p + b + log(h / q)) is fitted, and the last term is left out afterwards.
"""

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize, minimize_scalar
from scipy.sparse import csr_array

from rfdlc.decide.classes import Indices
from rfdlc.decide.priors import Prior, shrunk
from rfdlc.decide.scores import Floats, log_softmax, softmax
from rfdlc.errors import InputError, expect

COLDEST, HOTTEST = 0.05, 20.0  # a temperature beyond these: too few held-out samples, or a broken model
# A temperature is the most probable one under a Gaussian on log T, plus some standard errors: a temperature that is too
# low costs more than one that is too high. Chosen by regret on worlds like those of benchmarks/regret.py, with logits
# 0.7 to 4 times too large.
LOG_T_MEAN, LOG_T_SPREAD, CAUTION = 0.25, 0.5, 1.0
STRENGTH = 1.0  # of a unit Gaussian on 1/T - 1 and on each bias: as weak as one sample, and keeps them finite
MATRIX_STRENGTH = 30.0  # times STRENGTH, on each entry of a matrix: there are C of them per class
# What `auto` chooses from, and the held-out samples below which it is not tried: a polynomial of the number of classes.
SAMPLES_NEEDED = {
    "temperature": (0,),
    "none": (50,),
    "prior-corrected-temperature": (20,),
    "bias-corrected-temperature": (5, 20),
    "matrix-scaling": (2, 0, 50),
}
FOLDS, MOST_COMPARED, CLEARLY = 5, 5000, 2.0  # of cross-validation; standard errors that a gain must exceed


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
    log_p = log_softmax(log_p) if W.ndim else log_p
    scores: Floats = log_p @ W.T if W.ndim == 2 else log_p * W
    return scores + b if b.any() else scores


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


@register_calibrator
@dataclass(frozen=True)
class Temperature(Calibrator):
    """softmax(log p / T) (Guo et al. 2017)."""

    temperature: float = 1.0
    bias: tuple[float, ...] | None = None
    prior: tuple[float, ...] | None = None
    name = "temperature"

    def __post_init__(self) -> None:
        above = 0 < self.temperature < np.inf
        expect(above, f"temperature {self.temperature} cannot be used: expected a number above 0")

    @classmethod
    def fit(cls, log_p: Floats, targets: Indices, **context: Any) -> Self:
        return cls(_HeldOut(log_p, targets, **context).temperature())

    def as_affine(self) -> tuple[Any, Any]:
        return 1 / self.temperature, 0.0 if self.bias is None else np.array(self.bias)

    def __str__(self) -> str:
        return f"temperature {self.temperature:.3g}" + ("" if self.bias is None else " and a bias per class")


@register_calibrator
class BiasCorrectedTemperature(Temperature):
    """softmax(log p / T + b) (Alexandari et al. 2020); the bias of a class that the held-out data lack stays 0."""

    name = "bias-corrected-temperature"

    @classmethod
    def fit(cls, log_p: Floats, targets: Indices, **context: Any) -> Self:
        held_out = _HeldOut(log_p, targets, **context)
        temperature, bias = held_out.temperature_and_bias(cls.directions(targets, log_p.shape[1], **context))
        return cls(temperature, tuple(bias.tolist()), held_out.carried(1 / temperature, bias))

    @classmethod
    def directions(cls, targets: Indices, classes: int, **context: Any) -> csr_array:
        """What the bias is a sum of: (parameters, C)."""
        present = np.unique(targets)
        return csr_array((np.ones(len(present)), (np.arange(len(present)), present)), (len(present), classes))


@register_calibrator
class PriorCorrectedTemperature(BiasCorrectedTemperature):
    """softmax(log p / T - d log n), with n the training counts.

    A rare class has too few held-out samples for a bias of its own, but all rare classes together show how far the
    model still leans to the head.
    """

    name = "prior-corrected-temperature"

    @classmethod
    def directions(cls, targets: Indices, classes: int, **context: Any) -> csr_array:
        counts = context.get("training_counts")
        if counts is None:
            raise InputError(
                f"calibration {cls.name!r} needs training counts: give the utility classes that have them "
                "(Classes.from_labels(y_train), --classes counts.csv)"
            )
        log_count = np.log(np.maximum(counts, 1))  # shifting all biases alike changes nothing
        return csr_array(np.atleast_2d(log_count.mean() - log_count))


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
    """The temperature, or a later one of SAMPLES_NEEDED whose cross-validated likelihood is clearly higher."""

    chosen: str
    parameters: dict[str, Any]
    losses: dict[str, float]  # cross-validated negative log-likelihood, in nats
    prior: tuple[float, ...] | None = None
    name = "auto"

    @classmethod
    def fit(cls, log_p: Floats, targets: Indices, **context: Any) -> Self:
        losses, weights = _cross_validated(log_p, targets, context)
        chosen = next(iter(SAMPLES_NEEDED))
        for name, each in losses.items():
            gain = losses[chosen] - each
            mean = weights @ gain
            if mean > CLEARLY * np.sqrt(weights**2 @ (gain - mean) ** 2):
                chosen = name
        fitted = CALIBRATORS[chosen].fit(log_p, targets, **context)
        return cls(
            chosen, fitted.to_dict(), {name: float(weights @ each) for name, each in losses.items()}, fitted.prior
        )

    @cached_property
    def calibrator(self) -> Calibrator:
        """The chosen one."""
        return CALIBRATORS[self.chosen].from_dict(self.parameters)

    def as_affine(self) -> tuple[Any, Any]:
        return self.calibrator.as_affine()

    def __str__(self) -> str:
        losses = ", ".join(f"{name} {loss:.4f}" for name, loss in self.losses.items())
        reason = f"chosen by cross-validated loss: {losses}" if losses else "too few samples to choose"
        return f"{self.calibrator} ({reason})"


def _cross_validated(log_p: Floats, targets: Indices, context: dict[str, Any]) -> tuple[dict[str, Floats], Floats]:
    """By calibrator, the negative log-likelihood of each sample, calibrated by the other folds; and their weights.

    The likelihood is that of the class prior decided for, if it is known, without classes that the held-out data lack.
    """
    repeats, carried, target = (context.get(name) for name in ("sample_weight", "train_prior", "target_prior"))
    order = np.random.default_rng(0).permutation(len(targets) if repeats is None else np.flatnonzero(repeats))
    order = order[:MOST_COMPARED]
    order = order[np.argsort(targets[order], kind="stable")]  # folds are stratified
    log_p, targets, fold = log_p[order], targets[order], np.arange(len(order)) % FOLDS
    context = context | {"sample_weight": None if repeats is None else repeats[order]}
    held_out = _HeldOut(log_p, targets, **context)
    weights = held_out.weights * (1.0 if target is None else target[targets] / held_out.prior[targets])
    weights /= weights.sum()
    if target is not None:
        target = np.where(np.bincount(targets, minlength=len(target)) > 0, target, 1e-300)
    enough = 1 / (weights**2).sum()  # the effective sample size
    tried = [name for name, needed in SAMPLES_NEEDED.items() if np.polyval(needed, log_p.shape[1]) <= enough]
    if context.get("training_counts") is None:
        tried = [name for name in tried if CALIBRATORS[name] is not PriorCorrectedTemperature]
    losses: dict[str, Floats] = {}
    for name in tried if len(tried) > 1 else ():
        losses[name] = np.empty(len(targets))
        for outside in (fold == k for k in np.unique(fold)):
            part = context | {"sample_weight": None if repeats is None else repeats[order][~outside]}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fitted = CALIBRATORS[name].fit(log_p[~outside], targets[~outside], **part)
            scores, prior = _affine(log_p[outside], *fitted.as_affine()), fitted.prior or carried
            if target is not None and prior is not None:
                scores = scores + np.log(target / np.maximum(prior, 1e-300))
            losses[name][outside] = -log_softmax(scores)[np.arange(outside.sum()), targets[outside]]
    return losses, weights


class _HeldOut:
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
        self.ridge = STRENGTH / self.size
        self.prior: Prior = np.bincount(targets, self.weights, minlength=log_p.shape[1]).astype(np.float64)
        self.offset = np.zeros(log_p.shape[1])  # from the prior that the scores carry to that of the held-out data
        if train_prior is not None:
            self.prior = shrunk(self.size * self.prior, train_prior)
            self.offset = np.log(np.maximum(self.prior, 1e-300) / np.maximum(train_prior, 1e-300))

    def carried(self, weight: Any, bias: Any) -> tuple[float, ...]:
        """The class prior that calibrated probabilities carry, from their mean over the held-out data."""
        fitted = softmax(_affine(self.log_p, weight, bias) + self.offset)
        mean = np.maximum(self.weights @ fitted, 1e-12) * np.exp(-self.offset)
        return tuple((mean / mean.sum()).tolist())

    def loss(self, scores: Floats) -> tuple[float, Floats]:
        """The negative log-likelihood, and its derivative by the scores (N, C)."""
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
        """T and the bias (C,), a sum of the directions (parameters, C); convex in 1/T, so any start will do."""
        found = self._fitted(
            np.eye(1 + directions.shape[0])[0],  # 1/T = 1, no bias
            lambda parameters: parameters[0] * self.log_p + parameters[1:] @ directions,
            lambda slope: np.concatenate([[(slope * self.log_p).sum()], directions @ slope.sum(axis=0)]),
            bounds=[(1 / HOTTEST, 1 / COLDEST)] + [(None, None)] * directions.shape[0],
            options={"maxiter": 500, "ftol": 1e-13, "gtol": 1e-9},
        )
        return float(1 / found[0]), found[1:] @ directions

    def matrix_and_bias(self) -> tuple[Floats, Floats]:
        """W (C, C) and b (C,), with a penalty on their distance from 1/T and 0."""
        classes = self.log_p.shape[1]
        found = self._fitted(
            np.vstack([np.eye(classes) / self.temperature(), np.zeros(classes)]),  # (C + 1, C): W.T above b
            lambda parameters: self.log_p @ parameters[:-1] + parameters[-1],
            lambda slope: np.vstack([self.log_p.T @ slope, slope.sum(axis=0)]),
            MATRIX_STRENGTH,
            options={"maxiter": 500},
        )
        return found[:-1].T, found[-1]

    def _fitted(
        self,
        at_rest: Floats,
        scores: Callable[[Floats], Floats],
        slopes: Callable[[Floats], Floats],
        strength: float = 1.0,
        **settings: Any,
    ) -> Floats:
        """L-BFGS, with a ridge penalty on the distance from `at_rest`; `slopes` is the transpose of `scores`."""

        def loss(flat: Floats) -> tuple[float, Floats]:
            parameters = flat.reshape(at_rest.shape)
            drift, (nll, slope) = parameters - at_rest, self.loss(scores(parameters))
            penalty = strength * self.ridge
            return nll + penalty / 2 * (drift**2).sum(), (slopes(slope) + penalty * drift).ravel()

        found: Floats = minimize(loss, at_rest.ravel(), jac=True, method="L-BFGS-B", **settings).x
        return found.reshape(at_rest.shape)

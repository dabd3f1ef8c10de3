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
from scipy.optimize import minimize
from scipy.sparse import csr_array

from rfdlc.decide.classes import Indices
from rfdlc.decide.scores import Floats, log_softmax, softmax
from rfdlc.errors import InputError

COLDEST, HOTTEST = 0.05, 20.0  # a temperature beyond these: too few held-out samples, or a broken model
STRENGTH = 1.0  # of a unit Gaussian on 1/T - 1 and on each bias: as weak as one sample, and keeps them finite
CHOICES = ("temperature", "none", "prior-corrected-temperature", "bias-corrected-temperature", "matrix-scaling")
FOLDS, CLEARLY = 5, 1.0  # of cross-validation; standard errors below the best that a simpler calibrator may be
SAMPLES_PER_ENTRY = 5  # held-out samples per entry of a matrix, below which it is not tried
MATRIX_STRENGTH = 30.0  # times STRENGTH, on each entry of a matrix: there are C of them per class


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
        gets the same total weight), `training_counts` ((C,) or None) and `train_prior` ((C,) or None, the class
        prior that the scores carry).
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
    W, b = (np.asarray(part, dtype=np.float64) for part in calibrator.as_affine())
    prior = np.ones(classes) if calibrator.prior is None else np.asarray(calibrator.prior, dtype=np.float64)
    for what, values, allowed in (
        ("W", W, ((), (classes,), (classes, classes))),
        ("bias", b, ((), (classes,))),
        ("prior", prior, ((classes,),)),
    ):
        if values.shape not in allowed:
            raise InputError(f"{what} of the calibrator has shape {values.shape}: expected one per class ({classes})")
        if not np.isfinite(values).all():
            raise InputError(f"{what} of the calibrator holds {values[~np.isfinite(values)][0]}: expected numbers")


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
        if not 0 < self.temperature < np.inf:
            raise InputError(f"temperature {self.temperature} cannot be used: expected a number above 0")

    def as_affine(self) -> tuple[Any, Any]:
        return 1 / self.temperature, 0.0 if self.bias is None else np.array(self.bias)

    def __str__(self) -> str:
        return f"temperature {self.temperature:.3g}" + ("" if self.bias is None else " and a bias per class")

    @classmethod
    def _fit(cls, held_out: "_HeldOut", directions: csr_array) -> Self:
        """Fit 1/T and the coefficients of the directions (parameters, C) of the bias."""
        temperature, bias = held_out.temperature_and_bias(directions)
        if not COLDEST * 1.001 < temperature < HOTTEST * 0.999:
            warnings.warn(
                f"the fitted temperature {temperature:g} lies at the edge of what is plausible ({COLDEST} to "
                f"{HOTTEST}): the {len(held_out.targets)} held-out samples may be too few, all right, or all wrong",
                stacklevel=5,
            )
        if not directions.shape[0]:
            return cls(temperature)
        return cls(temperature, tuple(bias.tolist()), held_out.carried(1 / temperature, bias))


@register_calibrator
class Temperature(_Scaling):
    """softmax(log p / T)."""

    name = "temperature"

    @classmethod
    def fit(cls, log_p: Floats, targets: Indices, **context: Any) -> Self:
        return cls._fit(_HeldOut(log_p, targets, **context), csr_array((0, log_p.shape[1])))


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
        return cls._fit(_HeldOut(log_p, targets, **context), csr_array(np.atleast_2d(log_count.mean() - log_count)))


@register_calibrator
class BiasCorrectedTemperature(_Scaling):
    """softmax(log p / T + b); the bias of a class that the held-out data lack stays 0."""

    name = "bias-corrected-temperature"

    @classmethod
    def fit(cls, log_p: Floats, targets: Indices, **context: Any) -> Self:
        present = np.unique(targets)
        places, shape = (np.arange(len(present)), present), (len(present), log_p.shape[1])
        return cls._fit(_HeldOut(log_p, targets, **context), csr_array((np.ones(len(present)), places), shape=shape))


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
    """The first of CHOICES whose cross-validated likelihood is not clearly below the highest one."""

    chosen: str
    parameters: dict[str, Any]
    losses: dict[str, float]  # cross-validated negative log-likelihood, in nats
    prior: tuple[float, ...] | None = None
    name = "auto"

    @classmethod
    def fit(cls, log_p: Floats, targets: Indices, **context: Any) -> Self:
        candidates = [name for name in CHOICES if name[0] != "p" or context.get("training_counts") is not None]
        if len(targets) < SAMPLES_PER_ENTRY * log_p.shape[1] ** 2:
            candidates.remove("matrix-scaling")
        each = {name: _cross_validated(CALIBRATORS[name], log_p, targets, context) for name in candidates}
        weights = _HeldOut(log_p, targets, **context).weights
        losses = {name: float(weights @ values) for name, values in each.items()}
        best, size = min(losses, key=losses.__getitem__), 1 / (weights**2).sum()

        def behind(name: str) -> float:
            """How many standard errors the likelihood is below the highest one."""
            difference = each[name] - each[best]
            mean = weights @ difference
            return mean / max(np.sqrt(weights @ (difference - mean) ** 2 / size), 1e-12)

        chosen = next(name for name in candidates if name == best or behind(name) < CLEARLY)
        with warnings.catch_warnings():
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
    """The negative log-likelihood of each sample, calibrated by the other folds."""
    losses, order = np.empty(len(targets)), np.random.default_rng(0).permutation(len(targets))
    fold = np.empty(len(targets), dtype=np.int64)
    fold[order[np.argsort(targets[order], kind="stable")]] = np.arange(len(targets)) % FOLDS  # stratified
    offset, repeats = _HeldOut(log_p, targets, **context).offset, context.get("sample_weight")
    for k in range(FOLDS):
        inside, outside = fold != k, fold == k
        if not outside.any():
            continue
        part = context | {"sample_weight": None if repeats is None else repeats[inside]}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fitted = kind.fit(log_p[inside], targets[inside], **part)
        scores = log_softmax(_affine(log_p[outside], *fitted.as_affine()) + offset)
        losses[outside] = -scores[np.arange(outside.sum()), targets[outside]]
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
        self.log_p, self.targets = np.asarray(log_p, dtype=np.float64), targets
        repeats = np.ones(len(targets)) if sample_weight is None else np.asarray(sample_weight, dtype=np.float64)
        counts = np.bincount(targets, repeats, minlength=log_p.shape[1])
        each = 1 / (np.maximum(counts, 1e-300) * (counts > 0).sum())[targets] if balanced else 1 / repeats.sum()
        self.weights = each * repeats  # sum to one
        self.ridge = STRENGTH * (repeats @ np.square(np.broadcast_to(each, len(targets))))  # 1 / effective sample size
        shares = np.bincount(targets, self.weights, minlength=log_p.shape[1])
        self.train_prior, self.offset = train_prior, np.zeros(log_p.shape[1])
        if train_prior is not None:  # one more sample, spread as the scores' prior, so that no class is impossible
            self.offset = np.log(shares / np.maximum(train_prior, 1e-300) + self.ridge) - np.log1p(self.ridge)

    def carried(self, weight: Any, bias: Any) -> tuple[float, ...]:
        """The class prior that calibrated probabilities carry, from their mean over the held-out data."""
        fitted = softmax(_affine(self.log_p, weight, bias) + self.offset)
        mean = np.maximum(self.weights @ fitted, 1e-12) * np.exp(-self.offset)
        return tuple((mean / mean.sum()).tolist())

    def temperature_and_bias(self, directions: csr_array) -> tuple[float, NDArray[np.float64]]:
        """L-BFGS over (1/T, coefficients of the directions (parameters, C)); convex, so any start will do."""
        log_p, targets, weights, ridge = self.log_p, self.targets, self.weights, self.ridge
        rows, free = np.arange(len(targets)), directions.shape[0]

        def loss(parameters: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
            inverse, coefficients, drift = parameters[0], parameters[1:], parameters - at_rest
            p = softmax(inverse * log_p + (coefficients @ directions + self.offset))
            excess = p * weights[:, None]  # d loss / d score = weight * (p - one-hot)
            nll = -weights @ np.log(np.maximum(p[rows, targets], 1e-300))
            excess[rows, targets] -= weights
            slope = np.concatenate([[(excess * log_p).sum()], directions @ excess.sum(axis=0)])
            return nll + ridge / 2 * (drift**2).sum(), slope + ridge * drift

        at_rest = np.eye(1 + free)[0]  # 1/T = 1, no bias
        bounds = [(1 / HOTTEST, 1 / COLDEST)] + [(None, None)] * free
        options = {"maxiter": 500, "ftol": 1e-13, "gtol": 1e-9}
        fitted = minimize(loss, at_rest, jac=True, bounds=bounds, method="L-BFGS-B", options=options).x
        return float(1 / fitted[0]), fitted[1:] @ directions

    def matrix_and_bias(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """L-BFGS over W (C, C) and b (C,), with a penalty on their distance from 1/T and 0."""
        log_p, targets, weights, ridge = self.log_p, self.targets, self.weights, MATRIX_STRENGTH * self.ridge
        rows, count = np.arange(len(targets)), log_p.shape[1]
        temperature, _ = self.temperature_and_bias(csr_array((0, count)))
        at_rest = np.vstack([np.eye(count) / temperature, np.zeros(count)])  # (C + 1, C): W.T above b

        def loss(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
            parameters = flat.reshape(at_rest.shape)
            p, drift = softmax(log_p @ parameters[:-1] + (parameters[-1] + self.offset)), parameters - at_rest
            nll = -weights @ np.log(np.maximum(p[rows, targets], 1e-300))
            excess = p * weights[:, None]
            excess[rows, targets] -= weights
            slope = np.vstack([log_p.T @ excess, excess.sum(axis=0)]) + ridge * drift
            return nll + ridge / 2 * (drift**2).sum(), slope.ravel()

        found = minimize(loss, at_rest.ravel(), jac=True, method="L-BFGS-B", options={"maxiter": 500}).x
        fitted = found.reshape(at_rest.shape)
        return fitted[:-1].T, fitted[-1]

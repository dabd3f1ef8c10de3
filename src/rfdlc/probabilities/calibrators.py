"""Calibrators make probabilities mean what they say. Each is an affine map of log p, or
of its power, fitted on held-out data.

The class prior h of held-out data may differ from the prior q that the scores carry.
Where q is known, softmax(W log p + b + log(h / q)) is fitted, and the last term is left
out afterwards.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol, Self, TypeVar

import numpy as np
from scipy.sparse import csr_array

from rfdlc.errors import InputError, expect
from rfdlc.probabilities.choosing import (
    chances,
    cross_validated,
    for_any_prior,
    needs_power,
)
from rfdlc.probabilities.classes import Indices
from rfdlc.probabilities.fitting import HeldOut, affine, raised
from rfdlc.probabilities.scores import Floats, softmax

QUANTILES = (
    -1.65,
    -0.7,
    0.0,
    0.7,
    1.65,
)  # standard errors of log T: temperatures that are as probable, a little wider
WITHOUT_PRIOR = (
    None,
    "none",
    "temperature",
    "auto",
)  # where fitting may leave the prior of the scores unknown
BIASED = " and a bias per class"


class Calibrator(Protocol):
    """A fitted calibrator: softmax(W log p + b), or softmax(b - W |log p|^power).

    A new one is a dataclass that inherits from this class, defines `name`, `fit` and
    `as_affine`, and is decorated with `register_calibrator`. Deciders, commands,
    training, exported graphs, servers and reports then know it by name.

    Attributes
    ----------
    name : str
        The name under which it is registered, such as ``"temperature"``.
    prior : sequence of float or None
        The class prior that calibrated probabilities carry, if fitting moved it; None
        if it is that of the scores.
    power : float
        By default 1.
    """

    name: ClassVar[str]
    prior: tuple[float, ...] | None = None
    power: float = 1.0

    @classmethod
    @abstractmethod
    def fit(cls, log_p: Floats, targets: Indices, **context: Any) -> Self:
        """Fit to held-out log probabilities (or logits) of shape (N, C) and class
        indices (N,); `Decider.fit` joins copies of a sample to one with their weight.

        `context` holds `sample_weight` ((N,) or None; a sample with weight 2 counts as
        two), `balanced` (every class gets the same total weight), `training_counts`
        ((C,) or None), `groups` ((N,) or None; samples that are alike), and the class
        priors that the scores carry and that is decided for, `train_prior` and
        `target_prior` ((C,) or None).
        """

    @abstractmethod
    def as_affine(self) -> tuple[Any, Any]:
        """W, a number, a vector (C,) for a diagonal or a matrix (C, C), and b, a number
        or a vector (C,).
        """

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, ready for JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {
            name: np.asarray(v).tolist() if np.ndim(v) else v
            for name, v in values.items()
        }

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; lists become tuples."""
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        known = {name: table[name] for name in names}
        return cls(
            **{
                name: tuple(value) if isinstance(value, list) else value
                for name, value in known.items()
            }
        )

    def apply(self, log_p: Floats) -> Floats:
        """Calibrated probabilities (N, C) from logits or log probabilities (N, C)."""
        return softmax(affine(log_p, *self.as_affine(), self.power))

    def draws(self) -> Sequence["Calibrator"]:
        """Calibrators by which class priors are estimated: as probable given the
        held-out data, by default itself.

        The middle one stands for all.
        """
        return [self]

    @property
    def short(self) -> str:
        """What was fitted, in a few words; `str` may say more."""
        return str(self)

    def __str__(self) -> str:
        return self.name


CALIBRATORS: dict[str, type[Calibrator]] = {}
Registered = TypeVar("Registered", bound=type[Calibrator])


def register_calibrator(cls: Registered) -> Registered:
    """Make a calibrator available by its `name` (a class decorator)."""
    CALIBRATORS[cls.name] = cls
    return cls


def check_affine(calibrator: Calibrator, classes: int) -> None:
    """Raise if the parameters of a calibrator do not fit the number of classes."""
    weight, bias = calibrator.as_affine()
    one, each, square = (), (classes,), (classes, classes)
    prior = np.ones(classes) if calibrator.prior is None else calibrator.prior
    checks = (
        ("W", weight, (one, each, square)),
        ("bias", bias, (one, each)),
        ("prior", prior, (each,)),
    )
    for what, given, allowed in checks:
        values = np.asarray(given, dtype=np.float64)
        found = (
            f"{what} of the calibrator has shape {values.shape} and sum"
            f" {values.sum():g}"
        )
        fits = values.shape in allowed and np.isfinite(values).all()
        expect(fits, f"{found}: expected finite numbers, one per class ({classes})")
    expect(
        0 < calibrator.power < np.inf,
        f"power {calibrator.power} cannot be used: expected a number above 0",
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
    error: float = 0.0  # the standard error of log T, if the bias is known
    name = "temperature"

    def __post_init__(self) -> None:
        above = 0 < self.temperature < np.inf
        expect(
            above,
            f"temperature {self.temperature} cannot be used: expected a number above 0",
        )

    @classmethod
    def fit(cls, log_p: Floats, targets: Indices, **context: Any) -> Self:
        temperature, error = HeldOut(log_p, targets, **context).temperature()
        return cls(temperature, error=error)

    def as_affine(self) -> tuple[Any, Any]:
        return 1 / self.temperature, 0.0 if self.bias is None else np.array(self.bias)

    @classmethod
    def with_bias(
        cls, held_out: HeldOut, temperature: float, bias: Floats, **own: Any
    ) -> Self:
        """With the class prior that its probabilities carry."""
        found = cls(temperature, tuple(bias.tolist()), **own)
        return replace(found, prior=held_out.carried(*found.as_affine(), found.power))

    def draws(self) -> Sequence[Calibrator]:
        factors = np.exp(self.error * np.array(QUANTILES)) if self.error else ()
        return [
            replace(self, temperature=float(self.temperature * factor))
            for factor in factors
        ] or [self]

    def __str__(self) -> str:
        return f"temperature {self.temperature:.3g}" + (
            "" if self.bias is None else BIASED
        )


@register_calibrator
class BiasCorrectedTemperature(Temperature):
    """softmax(log p / T + b) (Alexandari et al. 2020); the bias of a class that the
    held-out data lack stays 0.
    """

    name = "bias-corrected-temperature"

    @classmethod
    def fit(cls, log_p: Floats, targets: Indices, **context: Any) -> Self:
        held_out = HeldOut(log_p, targets, **context)
        directions = cls.directions(held_out.targets, log_p.shape[1], **context)
        return cls.with_bias(held_out, *held_out.temperature_and_bias(directions))

    @classmethod
    def directions(cls, targets: Indices, classes: int, **context: Any) -> csr_array:
        """What the bias is a sum of: (parameters, C)."""
        present = np.unique(targets)
        return csr_array(
            (np.ones(len(present)), (np.arange(len(present)), present)),
            (len(present), classes),
        )


@register_calibrator
class PriorCorrectedTemperature(BiasCorrectedTemperature):
    """softmax(log p / T - d log n), with n the training counts.

    A rare class has too few held-out samples for a bias of its own, but all rare
    classes together show how far the model still leans to the head.
    """

    name = "prior-corrected-temperature"

    @classmethod
    def directions(cls, targets: Indices, classes: int, **context: Any) -> csr_array:
        return _along_counts(cls.name, **context)


@register_calibrator
@dataclass(frozen=True)
class PowerTemperature(Temperature):
    """softmax(-|log p / T|^power): keeps the order of the classes, and has one
    parameter more than a temperature.

    A temperature moves all probabilities alike. Networks with many classes often leave
    a little probability to each of those that are out of the question, and are sure
    enough of the others (a power above 1), or the reverse (below 1).
    """

    power: float = 1.0
    name = "power-temperature"

    @classmethod
    def fit(cls, log_p: Floats, targets: Indices, **context: Any) -> Self:
        temperature, power, _ = HeldOut(
            log_p, targets, **context
        ).temperature_and_power(csr_array((0, log_p.shape[1])))
        return cls(temperature, power=power)

    def as_affine(self) -> tuple[Any, Any]:
        with np.errstate(over="ignore"):  # check_affine raises for what is not finite
            return (
                float(np.float64(self.temperature) ** -self.power),
                super().as_affine()[1],
            )

    def __str__(self) -> str:
        return f"temperature {self.temperature:.3g}, power {self.power:.3g}" + (
            "" if self.bias is None else BIASED
        )


@register_calibrator
class PriorCorrectedPower(PowerTemperature):
    """softmax(-|log p / T|^power - d log n), with n the training counts."""

    name = "prior-corrected-power"

    @classmethod
    def fit(cls, log_p: Floats, targets: Indices, **context: Any) -> Self:
        held_out = HeldOut(log_p, targets, **context)
        temperature, power, bias = held_out.temperature_and_power(
            _along_counts(cls.name, **context)
        )
        return cls.with_bias(held_out, temperature, bias, power=power)


@register_calibrator
@dataclass(frozen=True, eq=False)
class MatrixScaling(Calibrator):
    """softmax(W log p + b) with a ridge penalty towards a fitted temperature (Kull et
    al. 2019).
    """

    weight: Any = 1.0  # a number, (C,) or (C, C)
    bias: Any = 0.0
    prior: tuple[float, ...] | None = None
    power: float = 1.0
    name = "matrix-scaling"

    @classmethod
    def fit(cls, log_p: Floats, targets: Indices, **context: Any) -> Self:
        held_out = HeldOut(log_p, targets, **context)
        weight, bias = held_out.matrix_and_bias()
        return cls(weight, bias, held_out.carried(weight, bias))

    def as_affine(self) -> tuple[Any, Any]:
        return self.weight, self.bias

    def __str__(self) -> str:
        return (
            f"{'a matrix' if np.ndim(self.weight) == 2 else 'scales'} and a bias per"
            " class"
        )


@register_calibrator
@dataclass(frozen=True)
class Auto(Calibrator):
    """Those of SAMPLES_NEEDED, weighted by their cross-validated likelihood: the mean
    of W and of b.

    The mean of W log p + b is the geometric mean of probabilities; so is the class
    prior that they carry. Where a power and a temperature fit better than a temperature
    alone, -|log p / T|^power takes the place of log p in all of them.
    """

    weights: dict[str, float]  # sum to one
    parameters: dict[str, dict[str, Any]]  # of those with a weight
    losses: dict[str, float]  # cross-validated negative log-likelihood, in nats
    prior: tuple[float, ...] | None = None
    temperature: float = 1.0  # of -|log p / T|^power, which W and b are fitted to
    power: float = 1.0
    # The same without those for which some classes have too few samples, if there are
    # such: after them, the estimate of a class prior loses rare classes.
    estimating: dict[str, Any] | None = None
    name = "auto"

    @classmethod
    def fit(cls, log_p: Floats, targets: Indices, **context: Any) -> Self:
        first = (
            PowerTemperature.fit(log_p, targets, **context)
            if needs_power(CALIBRATORS, log_p, targets, context)
            else None
        )
        log_p = (
            log_p if first is None else raised(log_p, first.power, first.temperature)
        )
        losses, weights, repeats = cross_validated(CALIBRATORS, log_p, targets, context)
        shares = chances(losses, weights, repeats)
        fitted = {
            name: CALIBRATORS[name].fit(log_p, targets, **context) for name in shares
        }
        means = {name: float(weights @ each) for name, each in losses.items()}
        known = HeldOut(log_p, targets, **context), context.get("train_prior"), first
        found, kept = (
            cls._weighing(shares, fitted, means, *known),
            for_any_prior(
                shares, targets, log_p.shape[1], context.get("sample_weight")
            ),
        )
        if len(kept) == len(shares):
            return found
        return replace(
            found, estimating=cls._weighing(kept, fitted, {}, *known).to_dict()
        )

    @classmethod
    def _weighing(
        cls,
        shares: dict[str, float],
        fitted: dict[str, Calibrator],
        losses: dict[str, float],
        held_out: HeldOut,
        known: Any,
        first: PowerTemperature | None,
    ) -> Self:
        """With the class prior that the mean carries."""
        found = cls(shares, {name: fitted[name].to_dict() for name in shares}, losses)
        if first is not None:
            found = replace(found, temperature=first.temperature, power=first.power)
        carried = [fitted[name].prior for name in shares]
        if not any(carried):
            return found
        if known is None and not all(carried):
            return replace(found, prior=held_out.carried(*found.mean))
        return replace(
            found,
            prior=_mean_prior([each or known for each in carried], [*shares.values()]),
        )

    @cached_property
    def weighted(self) -> list[tuple[float, Calibrator]]:
        """Weights and calibrators, the largest weight first."""
        found = [
            (self.weights[name], CALIBRATORS[name].from_dict(each))
            for name, each in self.parameters.items()
        ]
        return sorted(found, key=lambda pair: -pair[0])

    @cached_property
    def mean(self) -> tuple[Any, Any]:
        """W and b; numbers stand for multiples of the identity matrix."""
        maps = [(share, *part.as_affine()) for share, part in self.weighted]
        full = max((W for _, W, _ in maps), key=np.ndim)
        one = np.eye(len(full)) if np.ndim(full) == 2 else 1.0
        weights = [
            share * (np.asarray(W) if np.ndim(W) == 2 else W * one)
            for share, W, _ in maps
        ]
        return sum(weights), sum(share * np.asarray(b) for share, _, b in maps)

    def as_affine(self) -> tuple[Any, Any]:
        return self.mean[0] * self.temperature**-self.power, self.mean[1]

    def draws(self) -> Sequence[Calibrator]:
        if self.estimating:
            return self.from_dict(self.estimating).draws()
        if "temperature" not in self.weights:
            return [self]
        drawn = (
            CALIBRATORS["temperature"].from_dict(self.parameters["temperature"]).draws()
        )
        weight, bias = self.as_affine()
        middle = drawn[len(drawn) // 2].as_affine()[0]
        return [
            MatrixScaling(
                weight * (each.as_affine()[0] / middle), bias, self.prior, self.power
            )
            for each in drawn
        ]

    @property
    def short(self) -> str:
        several = ", ".join(f"{share:.0%} {each.name}" for share, each in self.weighted)
        first = (
            ""
            if self.power == 1
            else f"{PowerTemperature(self.temperature, power=self.power)}, then "
        )
        return first + (
            several if len(self.weighted) > 1 else self.weighted[0][1].short
        )

    def __str__(self) -> str:
        losses = ", ".join(f"{name} {loss:.4f}" for name, loss in self.losses.items())
        several = len(self.weighted) > 1
        reason = (
            f"{'weights' if several else 'chosen'} by cross-validated loss: {losses}"
            if losses
            else ""
        )
        reason = reason or ("" if several else "too few samples or groups to choose")
        return f"{self.short} ({reason})" if reason else self.short


def _mean_prior(priors: Sequence[Any], weights: Sequence[float]) -> tuple[float, ...]:
    """Their weighted geometric mean."""
    with np.errstate(divide="ignore"):  # an absent class keeps the share 0
        logs = np.log(priors)
    return tuple(softmax(np.average(logs, axis=0, weights=weights)[None])[0].tolist())


def _along_counts(name: str, training_counts: Any = None, **_: Any) -> csr_array:
    """The direction (1, C) of a bias in proportion to the logarithm of the training
    counts.
    """
    if training_counts is None:
        raise InputError(
            f"calibration {name!r} needs training counts: give the utility classes that"
            " have them (Classes.from_labels(y_train), --classes counts.csv)"
        )
    log_count = np.log(
        np.maximum(training_counts, 1)
    )  # shifting all biases alike changes nothing
    return csr_array(np.atleast_2d(log_count.mean() - log_count))

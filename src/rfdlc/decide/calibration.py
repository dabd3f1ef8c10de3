"""Calibration: make probabilities mean what they say, fitted by likelihood on held-out data.

- temperature (Guo et al. 2017): softmax(log p / T), one number;
- bias-corrected temperature (Alexandari et al. 2020): softmax(log p / T + b), one bias a class;
- prior-corrected temperature: biases in proportion to the log training frequency, b = -d log n: two numbers in all.
  A rare class has too few held-out samples for a bias of its own, but all rare classes together show how far
  the model still leans to the head.

Biases also move the class prior of the result to that of the held-out data.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.sparse import csr_array

from rfdlc.decide.classes import Indices
from rfdlc.decide.scores import Floats, softmax
from rfdlc.errors import InputError, choose

COLDEST, HOTTEST = 0.05, 20.0  # a temperature beyond these says that the held-out part is too small or the model broken
STRENGTH = 1.0  # of a unit Gaussian on 1/T - 1 and on each bias: as weak as one sample, and none runs away
KINDS = ("temperature", "bias-corrected-temperature", "prior-corrected-temperature")


@dataclass(frozen=True)
class Calibration:
    """softmax(log p / temperature + bias). `prior` is the class prior that the result carries when biases moved it."""

    temperature: float = 1.0
    bias: tuple[float, ...] | None = None
    prior: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.temperature < np.inf:
            raise InputError(f"temperature {self.temperature} cannot be used: expected a number above 0")

    def apply(self, log_probabilities: Floats) -> Floats:
        """Calibrated probabilities (N, C) from logits or log probabilities (N, C)."""
        scores = log_probabilities * log_probabilities.dtype.type(1 / self.temperature)
        if self.bias is not None:
            scores += np.asarray(self.bias, dtype=scores.dtype)
        return softmax(scores)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, ready for JSON."""
        return {
            "temperature": self.temperature,
            "bias": None if self.bias is None else list(self.bias),
            "prior": None if self.prior is None else list(self.prior),
        }

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], classes: int) -> "Calibration":
        """The inverse of `to_dict`, for so many classes."""
        parts = {name: tuple(map(float, table[name])) for name in ("bias", "prior") if table.get(name) is not None}
        for name, values in parts.items():
            if len(values) != classes:
                raise InputError(f"{name} has {len(values)} numbers for {classes} classes: expected one a class")
        return cls(float(table["temperature"]), **parts)


def fit_calibration(
    kind: str,
    log_probabilities: Floats,
    targets: Indices,
    *,
    training_counts: Indices | None = None,
    balanced: bool = False,
    sample_weight: Floats | None = None,
) -> Calibration:
    """Fit by maximum likelihood on held-out log probabilities (N, C) and class indices (N,).

    `balanced` gives every class that is present the same total weight, as if the held-out data had a uniform prior.
    A sample with weight 2 counts as two samples (`sample_weight`, (N,)).
    Classes absent from the held-out data are no obstacle: their own bias stays 0.
    """
    choose("calibration", kind, KINDS)
    log_p = np.asarray(log_probabilities, dtype=np.float64)
    multiplicity = np.ones(len(targets)) if sample_weight is None else np.asarray(sample_weight, dtype=np.float64)
    counts = np.bincount(targets, multiplicity, minlength=log_p.shape[1])
    weights = class_weights(counts, balanced)[targets] * multiplicity / multiplicity.sum()
    ridge = STRENGTH / multiplicity.sum()
    temperature = _fit_temperature(log_p, targets, weights, ridge)
    if kind == "temperature":
        calibration = Calibration(temperature)
    else:
        directions = _bias_directions(kind, counts, training_counts)
        temperature, bias = _fit_with_bias(log_p, targets, weights, directions, temperature, ridge)
        calibration = Calibration(temperature, tuple(bias.tolist()), tuple(_held_out_prior(counts, balanced).tolist()))
    if not COLDEST * 1.001 < calibration.temperature < HOTTEST * 0.999:
        warnings.warn(
            f"the fitted temperature {calibration.temperature:g} lies at the edge of what is plausible "
            f"({COLDEST} to {HOTTEST}): the {len(targets)} held-out samples may be too few, all right, or all wrong",
            stacklevel=3,
        )
    return calibration


def class_weights(counts: NDArray[Any], balanced: bool) -> NDArray[np.float64]:
    """Weight a sample of each class: 1, or such that all classes present weigh the same and the mean stays 1."""
    if not balanced:
        return np.ones(len(counts))
    present = max(1, int((counts > 0).sum()))
    return counts.sum() / (present * np.where(counts > 0, counts, 1))


def _held_out_prior(counts: NDArray[Any], balanced: bool) -> NDArray[np.float64]:
    """The prior that the biases were fitted to; one sample is added to each class so that none is impossible."""
    if balanced:
        return np.full(len(counts), 1 / len(counts))
    smoothed: NDArray[np.float64] = (counts + 1) / (counts.sum() + len(counts))
    return smoothed


def _fit_temperature(log_p: Floats, targets: Indices, weights: Floats, ridge: float) -> float:
    """The negative log-likelihood is convex in 1/T: Newton's method, kept inside a shrinking bracket."""
    true = log_p[np.arange(len(targets)), targets]
    low, high, inverse = 1 / HOTTEST, 1 / COLDEST, 1.0
    for _ in range(60):
        p = softmax(inverse * log_p)
        mean = (p * log_p).sum(axis=1)
        slope = weights @ (mean - true) + ridge * (inverse - 1)
        curvature = weights @ ((p * log_p**2).sum(axis=1) - mean**2) + ridge
        low, high = (low, inverse) if slope > 0 else (inverse, high)
        step = inverse - slope / curvature
        step = step if low < step < high else (low + high) / 2
        if abs(step - inverse) < 1e-10 * inverse:
            break
        inverse = step
    return float(1 / inverse)


def _bias_directions(kind: str, counts: NDArray[Any], training_counts: Indices | None) -> csr_array:
    """(parameters, C): what each fitted number adds to the biases of the classes."""
    if kind == "bias-corrected-temperature":
        present = np.flatnonzero(counts)
        return csr_array((np.ones(len(present)), (np.arange(len(present)), present)), shape=(len(present), len(counts)))
    if training_counts is None:
        raise InputError(
            "calibration 'prior-corrected-temperature' needs training counts: give the utility classes that have them "
            "(Classes.from_labels(y_train), --classes counts.csv)"
        )
    log_count = np.log(np.maximum(training_counts, 1))
    return csr_array(np.atleast_2d(log_count.mean() - log_count))  # shifting all biases alike changes nothing


def _fit_with_bias(
    log_p: Floats, targets: Indices, weights: Floats, directions: csr_array, temperature: float, ridge: float
) -> tuple[float, NDArray[np.float64]]:
    """L-BFGS over (1/T, coefficients of the directions); convex, so any start will do."""
    rows, free = np.arange(len(targets)), directions.shape[0]

    def loss(parameters: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        inverse, coefficients, drift = parameters[0], parameters[1:], parameters - at_rest
        p = softmax(inverse * log_p + coefficients @ directions)
        excess = p * weights[:, None]  # d loss / d score = weight * (p - one-hot)
        nll = -weights @ np.log(np.maximum(p[rows, targets], 1e-300))
        excess[rows, targets] -= weights
        slope = np.concatenate([[(excess * log_p).sum()], directions @ excess.sum(axis=0)])
        return nll + ridge / 2 * (drift**2).sum(), slope + ridge * drift

    at_rest = np.eye(1 + free)[0]  # 1/T = 1, no bias
    start = at_rest / temperature
    bounds = [(1 / HOTTEST, 1 / COLDEST)] + [(None, None)] * free
    fitted = minimize(loss, start, jac=True, bounds=bounds, method="L-BFGS-B", options={"maxiter": 500}).x
    return float(1 / fitted[0]), fitted[1:] @ directions

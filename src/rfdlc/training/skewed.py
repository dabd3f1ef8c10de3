"""Skewed features, such as amounts and durations: logarithms that linear models and
networks can use.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from rfdlc.probabilities.scores import Floats
from rfdlc.training.networks.mixture import SignedLog

SKEWED, LEFT = (
    2.0,
    0.5,
)  # skewness from which a feature may get a logarithm; the share of it that may be left
UNITS = (0.5, 0.25, 0.1, 0.05, 0.01)  # quantiles of distances from the origin
MOST_ROWS = 2_000  # that choose

Parameters = Mapping[
    int, tuple[float, float]
]  # by feature: origin and unit of its logarithm


def skewness(values: Floats) -> float:
    """The third standardised moment; 0 for a constant."""
    centred = values - values.mean()
    spread = float(np.sqrt(np.mean(centred**2)))
    return float(np.mean((centred / spread) ** 3)) if spread > 0 else 0.0


def find_skewed(x: NDArray[np.float32], zero: NDArray[np.float32]) -> Parameters:
    """The standardised features (N, F) that are skewed, and less so as logarithms;
    `zero` (F,) is what 0 became.
    """
    some = x[np.linspace(0, len(x) - 1, min(len(x), MOST_ROWS)).astype(np.int64)]
    found = {
        feature: _least_skewed(some[:, feature], float(zero[feature]))
        for feature in range(x.shape[1])
    }
    return {feature: chosen for feature, chosen in found.items() if chosen is not None}


def _least_skewed(
    column: NDArray[np.float32], zero: float
) -> tuple[float, float] | None:
    """Origin and unit: from 0, or from the end without a long tail."""
    values = column.astype(np.float64)
    low, high, before = float(values.min()), float(values.max()), skewness(values)
    if abs(before) <= SKEWED or bool(
        ((values == low) | (values == high)).all()
    ):  # no function changes a mark
        return None
    tried: dict[tuple[float, float], float] = {}
    for origin in (zero, low if before > 0 else high):
        distance = values - origin
        for unit in np.quantile(np.abs(distance[distance != 0]), UNITS).tolist():
            tried[origin, unit] = abs(
                skewness(np.sign(distance) * np.log1p(np.abs(distance) / unit))
            )
    best = min(tried, key=lambda pair: tried[pair])
    return best if tried[best] <= LEFT * abs(before) else None


def signed_log(x: NDArray[np.float32], parameters: Parameters) -> SignedLog:
    """Logarithms that have mean 0 and deviation 1 on features (N, F)."""
    columns = list(parameters)
    origin, unit = torch.tensor(list(parameters.values()), dtype=torch.float64).T
    known = {
        "origin": origin,
        "log_unit": unit.log(),
        "scale": torch.ones(len(columns)),
    }
    plain = SignedLog(**known, shift=torch.zeros(len(columns))).float()
    deviation, mean = torch.std_mean(
        plain(torch.from_numpy(x[:, columns])).double(), 0, correction=0
    )
    known |= {"scale": 1 / deviation, "shift": -mean / deviation}
    tensors = {name: torch.zeros(x.shape[1]) for name in known}
    for name, values in known.items():
        tensors[name][columns] = values.float()
    return SignedLog(**tensors)

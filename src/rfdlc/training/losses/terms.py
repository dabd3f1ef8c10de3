"""Terms of the integrated gain. Each maps (log p (M,B,C), targets (B,), epoch) to values, or to values and weights.

What starts late compares with `epoch`, a 0-d tensor that counts from 1, so that one captured graph serves a whole
training. What the runs of a stack may have of their own is a buffer: one call then serves all of them (`RunLosses`).
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.nn import functional

from rfdlc.training.losses import CrossEntropy, Term

# -- numbers of classes, from their counts -----------------------------------------------------------------------------

Array = NDArray[np.float64]
WEIGHT_FORMS: dict[str, Callable[[Array, float, float], Array]] = {
    # name -> f(n, power, beta), by which weights are divided
    "constant": lambda n, power, beta: np.ones_like(n),
    "linear": lambda n, power, beta: n,
    "sqrt": lambda n, power, beta: np.sqrt(n),
    "log": lambda n, power, beta: np.log1p(n),
    "power": lambda n, power, beta: n**power,
    "effective": lambda n, power, beta: -np.expm1(n * np.log(beta)) / (1 - beta),  # (1 - beta^n) / (1 - beta)
}


def class_weights(
    counts: ArrayLike, form: str = "linear", *,
    power: float = 0.5, beta: float = 0.9999, target_prior: ArrayLike | None = None,
) -> Array:  # fmt: skip
    """p_target(y) / f(n_y), up to a constant: the discrepancy ratio of the paper. By default the target is uniform.

    >>> class_weights([100, 4, 0], "linear").tolist()
    [0.01, 0.25, 1.0]
    """
    n = _samples(counts)
    target = 1.0 if target_prior is None else np.asarray(target_prior, dtype=np.float64) * len(n)
    return target / WEIGHT_FORMS[form](n, power, beta)


def margins(counts: ArrayLike, largest: float = 0.5) -> Array:
    """LDAM margins n^(-1/4), scaled so that the rarest class has the largest (Cao et al. 2019).

    >>> margins([16, 1]).tolist()
    [0.25, 0.5]
    """
    margin = _samples(counts) ** -0.25
    return margin * (largest / margin.max())


def log_prior(counts: ArrayLike) -> Array:
    n = _samples(counts)
    return np.log(n / n.sum())


def _samples(counts: ArrayLike) -> Array:
    return np.maximum(np.asarray(counts, dtype=np.float64), 1.0)  # a class without samples counts as if it had one


# -- what is done to logits before any term ----------------------------------------------------------------------------


class Constants(nn.Module):
    """A module with these tensors as buffers: they move with it, and may differ between the runs of a stack."""

    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        for name, value in buffers.items():
            self.register_buffer(name, value)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class Margin(Constants):
    """Subtract scale * margin[y] from the true class's logit."""

    def __init__(self, margin: ArrayLike, scale: float) -> None:
        values = scale * as_tensor(margin)
        super().__init__(margin=values, classes=torch.arange(len(values)))

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        true = self.classes == target[:, None]  # (B, C)
        return logits - true * self.margin


class PriorInLikelihood(Constants):
    """Add tau * log prior: softmax(z + tau log p_train) is fitted, softmax(z) then belongs to a flat prior.

    `tau` is one value, or one per particle (Menon et al. 2021; Aimar et al. 2023 give each expert its own).
    """

    def __init__(self, log_prior: ArrayLike, tau: Sequence[float]) -> None:
        super().__init__(shift=as_tensor(tau)[:, None, None] * as_tensor(log_prior))  # (M or 1, 1, C)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return logits + self.shift


def as_tensor(values: ArrayLike) -> Tensor:
    return torch.tensor(np.asarray(values, dtype=np.float64), dtype=torch.get_default_dtype())


# -- terms -------------------------------------------------------------------------------------------------------------


class NegativeLogLikelihood(Constants):
    """-(1 - p(y))^focal log p(y), weighted by class after epoch `after`; the focal loss is by Lin et al. 2017."""

    def __init__(self, weights: ArrayLike, after: int = 0, focal: float = 0.0) -> None:
        super().__init__(after=torch.tensor(after), weights=as_tensor(weights))
        self.focal, self.late = focal, after > 0
        self.weighted = bool((self.weights != self.weights[0]).any())  # equal weights cancel in a weighted mean
        self.plain = not focal and bool((self.weights > 0).all())

    def forward(self, log_p: Tensor, target: Tensor, epoch: Tensor) -> Term | CrossEntropy:
        weights = torch.where(epoch > self.after, self.weights, 1.0) if self.late else self.weights  # (C,)
        term = CrossEntropy(log_p, target, weights if self.weighted else None)
        if self.plain:
            return term
        values, *of_samples = term.per_sample()
        if self.focal:
            values = (-torch.expm1(-values)).clamp(min=1e-12) ** self.focal * values  # a root is steep at 0
        return values, *of_samples


class Gain(Constants):
    """-1/alpha sum_c U[y,c] log p(c), the paper's utility term, after epoch `after`. It has no bound where U < 0.

    With `bounded`, p(c) instead of its log: minus the expected utility of acting at random from p. `sample_weights`
    weigh samples by their own class, the authors' `column_weights` classes inside the sum.
    """

    def __init__(
        self, utility: ArrayLike, alpha: float, *, bounded: bool = False, after: int = 0,
        sample_weights: ArrayLike | None = None, column_weights: ArrayLike | None = None,
    ) -> None:  # fmt: skip
        matrix = as_tensor(utility) / alpha
        gain = matrix if column_weights is None else matrix * as_tensor(column_weights)
        weights = {} if sample_weights is None else {"weights": as_tensor(sample_weights)}
        super().__init__(after=torch.tensor(after), gain=gain, **weights)
        self.bounded, self.weighted = bounded, bool(weights)

    def forward(self, log_p: Tensor, target: Tensor, epoch: Tensor) -> Term:
        started = (epoch > self.after).to(log_p.dtype)
        values = -started * ((log_p.exp() if self.bounded else log_p) * self.gain[target]).sum(-1)  # (M, B)
        return (values, self.weights[target]) if self.weighted else (values,)


class CompositeLoss(nn.Module):
    """Shifts of the logits, log-softmax, then one or more terms of the log-probabilities."""

    def __init__(self, shifts: Sequence[nn.Module], terms: Sequence[nn.Module]) -> None:
        super().__init__()
        self.shifts, self.terms = nn.ModuleList(shifts), nn.ModuleList(terms)

    def forward(self, logits: Tensor, target: Tensor, epoch: Tensor) -> list[Term | CrossEntropy]:
        for shift in self.shifts:
            logits = shift(logits, target)
        log_p = logits.log_softmax(-1)  # (M, B, C)
        return [term(log_p, target, epoch) for term in self.terms]


# -- repulsion: minus half the mean log variance across particles, the entropy of a diagonal Gaussian over them --------

REPULSIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    # name -> (head weights (R,M,F,C), logits (R,M,B,C)) -> what must differ between particles, (R,M,...)
    "head": lambda weights, logits: weights,
    "head-normalised": lambda weights, logits: functional.normalize(weights, dim=2),
    "predictions": lambda weights, logits: logits.softmax(-1),
}
FLOORS = {"head": 1e-12, "head-normalised": 1e-12, "predictions": 1e-4}  # added to the variance, for the log


def repulsion(
    kind: str, weights: Tensor, logits: Tensor, epoch: Tensor, tau: float | Tensor, strength: float | Tensor = 1.0
) -> Tensor:
    """-strength/2 exp(-epoch/tau) mean log(variance + floor), the variance biased (1/M) across particles: (R,).

    `tau` and `strength` are numbers, or one per run, (R,). Without a repulsion ("none") it is 0.
    """
    if kind == "none":
        return logits.new_zeros(len(logits))
    values = REPULSIONS[kind](weights, logits)
    spread = values.var(dim=1, correction=0) + FLOORS[kind]
    return -0.5 * strength * (-epoch / tau).exp() * spread.log().flatten(1).mean(1)


class Repulsions:
    """The repulsion of each run by its own (kind, tau, strength): (R,)."""

    def __init__(self, settings: Sequence[tuple[str, float, float]], device: torch.device) -> None:
        groups = [list(group) for _, group in groupby(settings, itemgetter(0))]
        self.kinds, self.sizes = [group[0][0] for group in groups], [len(group) for group in groups]
        self.numbers = [torch.tensor([own[1:] for own in group], device=device).unbind(1) for group in groups]

    def __call__(self, weights: Tensor, logits: Tensor, epoch: Tensor) -> Tensor:
        """Of head weights (R,M,F,C) and logits (R,M,B,C)."""
        parts = zip(self.kinds, self.numbers, weights.split(self.sizes), logits.split(self.sizes), strict=True)
        return torch.cat([repulsion(kind, own, seen, epoch, *numbers) for kind, numbers, own, seen in parts])

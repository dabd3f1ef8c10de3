"""Terms of the integrated gain, losses of methods whose particles are experts, and the
repulsion of particles.

What starts late compares with `epoch`, a 0-d tensor that counts from 1, so that one
captured graph serves a whole training. What the runs of a stack may have of their own
is a buffer: one call then serves all of them (`RunLosses`).
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

from rfdlc.training.distributed import SINGLE
from rfdlc.training.losses import CrossEntropy, Term, per_sample, true_class
from rfdlc.training.networks.particles import engagement, weighed

Array = NDArray[np.float64]
WEIGHT_FORMS: dict[str, Callable[[Array, float, float], Array]] = {
    # name -> f(n, power, beta), by which weights are divided
    "constant": lambda n, power, beta: np.ones_like(n),
    "linear": lambda n, power, beta: n,
    "sqrt": lambda n, power, beta: np.sqrt(n),
    "log": lambda n, power, beta: np.log1p(n),
    "power": lambda n, power, beta: n**power,
    "effective": lambda n, power, beta: (
        -np.expm1(n * np.log(beta)) / (1 - beta)
    ),  # (1 - beta^n) / (1 - beta)
}


def class_weights(
    counts: ArrayLike,
    form: str = "linear",
    *,
    power: float = 0.5,
    beta: float = 0.9999,
    target_prior: ArrayLike | None = None,
) -> Array:
    """p_target(y) / f(n_y), up to a constant: the discrepancy ratio of the paper. By
    default the target is uniform.

    >>> class_weights([100, 4, 0], "linear").tolist()
    [0.01, 0.25, 1.0]
    """
    n = _samples(counts)
    target = (
        1.0
        if target_prior is None
        else np.asarray(target_prior, dtype=np.float64) * len(n)
    )
    return target / WEIGHT_FORMS[form](n, power, beta)


def margins(counts: ArrayLike, largest: float = 0.5) -> Array:
    """LDAM margins n^(-1/4), scaled so that the rarest class has the largest (Cao et
    al. 2019).

    >>> margins([16, 1]).tolist()
    [0.25, 0.5]
    """
    margin = _samples(counts) ** -0.25
    return margin * (largest / margin.max())


def log_prior(counts: ArrayLike) -> Array:
    n = _samples(counts)
    return np.log(n / n.sum())


def _samples(counts: ArrayLike) -> Array:
    return np.maximum(
        np.asarray(counts, dtype=np.float64), 1.0
    )  # a class without samples counts as if it had one


class Constants(nn.Module):
    """A module with these attributes. Tensors are buffers: they move with it, and runs
    of a stack have their own.
    """

    def __init__(self, **values: Any) -> None:
        super().__init__()
        for name, value in values.items():
            (
                self.register_buffer(name, value)
                if isinstance(value, Tensor)
                else setattr(self, name, value)
            )

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class Margin(Constants):
    """Subtract scale * margin[y] from the true class's logit."""

    def __init__(self, margin: ArrayLike, scale: float) -> None:
        values = scale * as_tensor(margin)
        super().__init__(margin=values, classes=torch.arange(len(values)))

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return logits - (self.classes == target[:, None]) * self.margin


class PriorInLikelihood(Constants):
    """Fit softmax(z + tau log p_train), by one tau (Menon et al. 2021) or one per
    particle (Aimar et al. 2023).
    """

    def __init__(self, log_prior: ArrayLike, tau: Sequence[float]) -> None:
        super().__init__(
            shift=as_tensor(tau)[:, None, None] * as_tensor(log_prior)
        )  # (M or 1, 1, C)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return logits + self.shift


def as_tensor(values: ArrayLike) -> Tensor:
    return torch.tensor(
        np.asarray(values, dtype=np.float64), dtype=torch.get_default_dtype()
    )


class NegativeLogLikelihood(Constants):
    """-(1 - p(y))^focal log p(y), weighted by class after epoch `after`; the focal loss
    is by Lin et al. 2017.
    """

    def __init__(self, weights: ArrayLike, after: int = 0, focal: float = 0.0) -> None:
        super().__init__(
            after=torch.tensor(after),
            weights=as_tensor(weights),
            focal=focal,
            late=after > 0,
        )
        self.weighted = bool(
            (self.weights != self.weights[0]).any()
        )  # equal weights cancel in a weighted mean
        self.plain = not focal and bool((self.weights > 0).all())

    def forward(
        self, log_p: Tensor, target: Tensor, epoch: Tensor
    ) -> Term | CrossEntropy:
        weights = (
            torch.where(epoch > self.after, self.weights, 1.0)
            if self.late
            else self.weights
        )  # (C,)
        term = CrossEntropy(log_p, target, weights if self.weighted else None)
        if self.plain:
            return term
        values, *of_samples = term.per_sample()
        if self.focal:
            values = (-torch.expm1(-values)).clamp(
                min=1e-12
            ) ** self.focal * values  # a root is steep at 0
        return values, *of_samples


class Gain(Constants):
    """-1/alpha sum_c U[y,c] log p(c), the paper's utility term, after epoch `after`. It
    has no bound where U < 0.

    `bounded` has p(c) instead of its log; the authors' `column_weights` weigh classes
    inside the sum.
    """

    def __init__(
        self,
        utility: ArrayLike,
        alpha: float,
        *,
        bounded: bool = False,
        after: int = 0,
        sample_weights: ArrayLike | None = None,
        column_weights: ArrayLike | None = None,
    ) -> None:
        matrix = as_tensor(utility) / alpha
        gain = matrix if column_weights is None else matrix * as_tensor(column_weights)
        weights = (
            {} if sample_weights is None else {"weights": as_tensor(sample_weights)}
        )
        super().__init__(
            after=torch.tensor(after),
            gain=gain,
            bounded=bounded,
            weighted=bool(weights),
            **weights,
        )

    def forward(self, log_p: Tensor, target: Tensor, epoch: Tensor) -> Term:
        started = (epoch > self.after).to(log_p.dtype)
        values = -started * (
            (log_p.exp() if self.bounded else log_p) * self.gain[target]
        ).sum(-1)  # (M, B)
        return (values, self.weights[target]) if self.weighted else (values,)


class CompositeLoss(Constants):
    """Shifts of the logits, log-softmax, then one or more terms of the
    log-probabilities.
    """

    def __init__(self, shifts: Sequence[nn.Module], terms: Sequence[nn.Module]) -> None:
        super().__init__(shifts=nn.ModuleList(shifts), terms=nn.ModuleList(terms))

    def forward(
        self, logits: Tensor, target: Tensor, epoch: Tensor
    ) -> list[Term | CrossEntropy]:
        for shift in self.shifts:
            logits = shift(logits, target)
        log_p = logits.log_softmax(-1)  # (M, B, C)
        return [term(log_p, target, epoch) for term in self.terms]


# -- experts: a sum over them is a value per sample, (B,); values of each and sample,
# (M,B), are averaged --------------


class Diversity(Constants):
    """strength * mean(T)^2 * KL(softmax(common / T) || softmax(z / T)), (M, B); T is
    one until epoch `after`.
    """

    def __init__(self, temperature: ArrayLike, strength: float, after: int = 0) -> None:
        super().__init__(
            after=torch.tensor(after),
            temperature=as_tensor(temperature),
            strength=strength,
        )

    def forward(self, logits: Tensor, common: Tensor, epoch: Tensor) -> Tensor:
        heat = torch.where(epoch > self.after, self.temperature, 1.0)
        expected, own = (
            (common.detach() / heat).log_softmax(-1),
            (logits / heat).log_softmax(-1),
        )
        return (
            self.strength
            * heat.mean() ** 2
            * (expected.exp() * (expected - own)).sum(-1)
        )


class DiverseExperts(Constants):
    """RIDE: the sum over experts of LDAM-DRW on their own logits, minus their diversity
    (Wang et al. 2021).
    """

    def __init__(
        self, margin: Margin, likelihood: NegativeLogLikelihood, diversity: Diversity
    ) -> None:
        super().__init__(margin=margin, likelihood=likelihood, diversity=diversity)

    def forward(self, logits: Tensor, target: Tensor, epoch: Tensor) -> list[Term]:
        log_p = self.margin(logits, target).log_softmax(-1)
        ((values, *weights),) = per_sample(self.likelihood(log_p, target, epoch))
        return [
            (values.sum(0), *weights),
            (-self.diversity(logits, logits.mean(0), epoch).sum(0),),
        ]


class NestedCollaboration(Constants):
    """NCL: experts fit z + log n and agree, on all classes and on the hardest ones of
    each sample (Li et al. 2022).

    The `hard` classes are the true one and the largest logits of the first expert.
    Other logits are set to 0, as in the authors' code. `agreement` is the factor of the
    divergence of an expert from each other one, both trained.
    """

    def __init__(self, counts: ArrayLike, hard: int, agreement: float) -> None:
        super().__init__(
            logs=as_tensor(np.log(_samples(counts))), hard=hard, agreement=agreement
        )

    def forward(self, logits: Tensor, target: Tensor, epoch: Tensor) -> Tensor:
        first = logits[0].detach().scatter(1, target[:, None], torch.inf)
        shown = torch.zeros_like(first).scatter(1, first.topk(self.hard).indices, 1.0)
        values = []
        for shifted in (logits + self.logs, (logits + self.logs) * shown):
            log_p = shifted.log_softmax(-1)  # (M, B, C)
            p = log_p.exp()
            apart = len(p) * (p * log_p).sum((0, -1)) - (p.sum(0) * log_p.sum(0)).sum(
                -1
            )  # of all pairs: (B,)
            values.append(
                self.agreement * apart / max(1, len(p) - 1)
                - true_class(log_p, target).sum(0)
            )
        return values[0] + values[1]


class Routing(Constants):
    """RIDE's router, whose scores are one more column of the logits; the last expert's
    is not used.

    Binary cross-entropy; where the mean of experts so far is wrong and that of more is
    right, weighed `positive` times.
    """

    def __init__(self, positive: float) -> None:
        super().__init__(positive=torch.tensor(positive))

    def forward(self, logits: Tensor, target: Tensor, epoch: Tensor) -> Tensor:
        scores = logits[:-1, :, -1]  # (M-1, B)
        right = (logits[..., :-1].detach().cumsum(0).argmax(-1) == target).to(
            scores.dtype
        )  # (M, B)
        later = (
            right.flip(0).cumsum(0).flip(0) - right
        )  # how many longer sums of experts are right
        wanted = (1 - right[:-1]) * (later[:-1] > 0)
        return functional.binary_cross_entropy_with_logits(
            scores, wanted, pos_weight=self.positive, reduction="none"
        )


def dirichlet_divergence(logits: Tensor, target: Tensor) -> Tensor:
    """KL(Dirichlet(a) || Dirichlet(1)), a = 1 + exp(z) but for the true class, whose a
    is 1: (M, B).
    """
    z = logits.double()  # exp(30 cos) spans thirteen digits, and the terms cancel
    true = torch.arange(z.shape[-1], device=z.device) == target[:, None]  # (B, C)
    a = 1 + z.masked_fill(true, -torch.inf).exp()
    total = a.sum(-1, keepdim=True)
    gamma = (
        total[..., 0].lgamma()
        - torch.lgamma(torch.full_like(total[..., 0], z.shape[-1]))
        - a.lgamma().sum(-1)
    )
    return (gamma + ((a - 1) * (a.digamma() - total.digamma())).sum(-1)).to(
        logits.dtype
    )


class EvidentialExperts(Constants):
    """TLC: w(y) margin-adjusted NLL + epoch/annealing * Dirichlet divergence -
    diversity (Li et al. 2022).

    A sum over experts of means over the samples on which an expert is engaged: while
    the uncertainty of those before it is above `threshold` times the largest in the
    micro-batch, over all `processes`.
    """

    weights_from_logits, processes = True, SINGLE

    def __init__(
        self,
        margin: Margin,
        weights: ArrayLike,
        diversity: Diversity,
        annealing: float,
        threshold: float,
        eta: float,
    ) -> None:
        numbers = {"annealing": annealing, "threshold": threshold, "eta": eta}
        super().__init__(
            margin=margin, weights=as_tensor(weights), diversity=diversity, **numbers
        )

    def forward(self, logits: Tensor, target: Tensor, epoch: Tensor) -> list[Term]:
        shifted, held = self.margin(logits, target), logits.detach()
        weights = torch.where(epoch > self.diversity.after, self.weights, 1.0)[
            target
        ]  # (B,)
        loss = -weights * true_class(shifted.log_softmax(-1), target)  # (M, B)
        loss = loss + epoch / self.annealing * dirichlet_divergence(shifted, target)
        engaged = engagement(held)  # (M + 1, B)
        loss, unsure = (
            loss - self.diversity(logits, weighed(held, engaged, self.eta)[0], epoch),
            engaged[:-1],
        )
        most = self.processes.all_max(unsure.amax(-1, keepdim=True))
        return list(
            zip(loss, (unsure > self.threshold * most).to(loss.dtype), strict=True)
        )  # a mean for each expert


class NestedExperts(Constants):
    """ACE: expert m learns the samples of its group's classes and is silent on other
    classes (Cai et al. 2021).

    sum_m 1/B sum_{i in group m} (-log p_m(y_i) + silence * mean of z_m^2 over classes
    outside the group).
    """

    def __init__(self, groups: ArrayLike, silence: float = 1.0) -> None:
        super().__init__(groups=as_tensor(groups), silence=silence)  # (M, C)

    def forward(self, logits: Tensor, target: Tensor, epoch: Tensor) -> Tensor:
        outside = 1 - self.groups
        loud = (logits**2 * outside[:, None]).sum(-1) / outside.sum(
            -1, keepdim=True
        ).clamp(min=1)
        loss = self.silence * loud - true_class(
            logits.log_softmax(-1), target
        )  # (M, B)
        return (self.groups[:, target] * loss).sum(0)


class SelfDistillation(Constants):
    """SRepr: mean cross-entropy, plus strength * KL(mean of predictions || the first)
    (Nam et al. 2023).

    Logits are of the mean weights first, then of weights sampled around them, S times,
    held constant in the divergence.
    """

    def __init__(self, particles: int, strength: float) -> None:
        super().__init__(particles=particles, strength=strength)

    def forward(self, logits: Tensor, target: Tensor, epoch: Tensor) -> list[Term]:
        log_p = logits.log_softmax(-1)  # (M + S*M, B, C)
        teacher = (
            log_p[self.particles :]
            .detach()
            .exp()
            .unflatten(0, (-1, self.particles))
            .mean(0)
        )  # (M, B, C)
        gap = (torch.xlogy(teacher, teacher) - teacher * log_p[: self.particles]).sum(
            -1
        )
        return [(self.strength * gap,), (-true_class(log_p, target),)]


# -- repulsion: minus half the mean log variance across particles, the entropy of a
# diagonal Gaussian over them --------

REPULSIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    # name -> (head weights (R,M,F,C), logits (R,M,B,C)) -> what must differ between
    # particles, (R,M,...)
    "head": lambda weights, logits: weights,
    "head-normalised": lambda weights, logits: functional.normalize(weights, dim=2),
    "predictions": lambda weights, logits: logits.softmax(-1),
}
FLOORS = {
    "head": 1e-12,
    "head-normalised": 1e-12,
    "predictions": 1e-4,
}  # added to the variance, for the log


def repulsion(
    kind: str,
    weights: Tensor,
    logits: Tensor,
    epoch: Tensor,
    tau: float | Tensor,
    strength: float | Tensor = 1.0,
) -> Tensor:
    """-strength/2 exp(-epoch/tau) mean log(variance + floor), the variance biased (1/M)
    across particles: (R,).

    `tau` and `strength` are numbers, or one per run, (R,). Without a repulsion ("none")
    it is 0.
    """
    if kind == "none":
        return logits.new_zeros(len(logits))
    values = REPULSIONS[kind](weights, logits)
    spread = values.var(dim=1, correction=0) + FLOORS[kind]
    return -0.5 * strength * (-epoch / tau).exp() * spread.log().flatten(1).mean(1)


class Repulsions:
    """The repulsion of each run by its own (kind, tau, strength): (R,)."""

    def __init__(
        self, settings: Sequence[tuple[str, float, float]], device: torch.device
    ) -> None:
        groups = [list(group) for _, group in groupby(settings, itemgetter(0))]
        self.kinds, self.sizes = (
            [group[0][0] for group in groups],
            [len(group) for group in groups],
        )
        self.numbers = [
            torch.tensor([own[1:] for own in group], device=device).unbind(1)
            for group in groups
        ]

    def __call__(self, weights: Tensor, logits: Tensor, epoch: Tensor) -> Tensor:
        parts = zip(
            self.kinds,
            self.numbers,
            weights.split(self.sizes),
            logits.split(self.sizes),
            strict=True,
        )
        return torch.cat(
            [
                repulsion(kind, own, seen, epoch, *numbers)
                for kind, numbers, own, seen in parts
            ]
        )

"""Losses of methods whose particles are experts: RIDE and its router, TLC, ACE, and SRepr's distillation.

A sum over experts is a value per sample, (B,); values per expert and sample, (M,B), are averaged over experts.
"""

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.nn import functional

from rfdlc.training.distributed import SINGLE
from rfdlc.training.losses import Term, per_sample, true_class
from rfdlc.training.losses.terms import Constants, Margin, NegativeLogLikelihood, as_tensor
from rfdlc.training.networks.combinations import engagement, weighed


class Diversity(Constants):
    """strength * mean(T)^2 * KL(softmax(common / T) || softmax(z / T)) of every expert and sample, (M, B).

    The common prediction is held constant. T is one until epoch `after`, then one temperature per class.
    """

    def __init__(self, temperature: ArrayLike, strength: float, after: int = 0) -> None:
        super().__init__(after=torch.tensor(after), temperature=as_tensor(temperature))
        self.strength = strength

    def forward(self, logits: Tensor, common: Tensor, epoch: Tensor) -> Tensor:
        heat = torch.where(epoch > self.after, self.temperature, torch.ones_like(self.temperature))
        expected, own = (common.detach() / heat).log_softmax(-1), (logits / heat).log_softmax(-1)
        return self.strength * heat.mean() ** 2 * (expected.exp() * (expected - own)).sum(-1)


class DiverseExperts(nn.Module):
    """RIDE: the sum over experts of LDAM-DRW on their own logits, minus their diversity (Wang et al. 2021)."""

    def __init__(self, margin: Margin, likelihood: NegativeLogLikelihood, diversity: Diversity) -> None:
        super().__init__()
        self.margin, self.likelihood, self.diversity = margin, likelihood, diversity

    def forward(self, logits: Tensor, target: Tensor, epoch: Tensor) -> list[Term]:
        log_p = self.margin(logits, target).log_softmax(-1)
        ((values, *weights),) = per_sample(self.likelihood(log_p, target, epoch))
        return [(values.sum(0), *weights), (-self.diversity(logits, logits.mean(0), epoch).sum(0),)]


class Routing(Constants):
    """RIDE's router, whose scores are one more column of the logits; the last expert's is not used.

    A score should be high where the mean of the experts so far is wrong and that of more experts is right: binary
    cross-entropy with such cases weighed `positive` times, a mean over samples and scores.
    """

    def __init__(self, positive: float) -> None:
        super().__init__(positive=torch.tensor(positive))

    def forward(self, logits: Tensor, target: Tensor, epoch: Tensor) -> Tensor:
        scores = logits[:-1, :, -1]  # (M-1, B)
        right = (logits[..., :-1].detach().cumsum(0).argmax(-1) == target).to(scores.dtype)  # (M, B)
        later = right.flip(0).cumsum(0).flip(0) - right  # how many longer sums of experts are right
        wanted = (1 - right[:-1]) * (later[:-1] > 0)
        return functional.binary_cross_entropy_with_logits(scores, wanted, pos_weight=self.positive, reduction="none")


def dirichlet_divergence(logits: Tensor, target: Tensor) -> Tensor:
    """KL(Dirichlet(a) || Dirichlet(1)), a = 1 + exp(z) but for the true class, whose a is 1: (M, B)."""
    z = logits.double()  # exp(30 cos) spans thirteen digits, and the terms cancel
    true = torch.arange(z.shape[-1], device=z.device) == target[:, None]  # (B, C)
    a = 1 + z.masked_fill(true, -torch.inf).exp()
    total = a.sum(-1, keepdim=True)
    gamma = total[..., 0].lgamma() - torch.lgamma(torch.full_like(total[..., 0], z.shape[-1])) - a.lgamma().sum(-1)
    return (gamma + ((a - 1) * (a.digamma() - total.digamma())).sum(-1)).to(logits.dtype)


class EvidentialExperts(Constants):
    """TLC: a sum over experts of the mean loss of the samples on which an expert is engaged (Li et al. 2022).

    Loss: w(y) margin-adjusted NLL + epoch/annealing * Dirichlet divergence - diversity. An expert is engaged while the
    uncertainty of those before it is above `threshold` times the largest in the micro-batch, over all `processes`.
    """

    weights_from_logits, processes = True, SINGLE

    def __init__(
        self, margin: Margin, weights: ArrayLike, diversity: Diversity, annealing: float, threshold: float, eta: float
    ) -> None:
        super().__init__(weights=as_tensor(weights))
        self.margin, self.diversity = margin, diversity
        self.annealing, self.threshold, self.eta = annealing, threshold, eta

    def forward(self, logits: Tensor, target: Tensor, epoch: Tensor) -> list[Term]:
        shifted, held = self.margin(logits, target), logits.detach()
        started = epoch > self.diversity.after
        weights = torch.where(started, self.weights, torch.ones_like(self.weights))[target]  # (B,)
        loss = -weights * true_class(shifted.log_softmax(-1), target)  # (M, B)
        loss = loss + epoch / self.annealing * dirichlet_divergence(shifted, target)
        loss = loss - self.diversity(logits, weighed(held, self.eta)[0][0], epoch)
        unsure = engagement(held)[:-1]  # (M, B)
        most = self.processes.all_max(unsure.amax(-1, keepdim=True))
        return list(zip(loss, (unsure > self.threshold * most).to(loss.dtype), strict=True))  # a mean for each expert


class NestedExperts(Constants):
    """ACE: expert m learns the samples of its group's classes and is silent on other classes (Cai et al. 2021).

    sum_m 1/B sum_{i in group m} (-log p_m(y_i) + silence * mean of z_m^2 over classes outside the group). Divided by
    the whole batch: an expert's step is in proportion to its share of the samples, as the authors' learning rate is.
    """

    def __init__(self, groups: ArrayLike, silence: float = 1.0) -> None:
        super().__init__(groups=as_tensor(groups))  # (M, C)
        self.silence = silence

    def forward(self, logits: Tensor, target: Tensor, epoch: Tensor) -> Tensor:
        outside = 1 - self.groups
        loud = (logits**2 * outside[:, None]).sum(-1) / outside.sum(-1, keepdim=True).clamp(min=1)
        loss = self.silence * loud - true_class(logits.log_softmax(-1), target)  # (M, B)
        return (self.groups[:, target] * loss).sum(0)


class SelfDistillation(nn.Module):
    """SRepr: logits of the mean weights first, then of weights drawn around them, S times (Nam et al. 2023).

    Cross-entropy of all, a mean, plus strength * KL(mean of the drawn predictions, held constant || the first).
    """

    def __init__(self, particles: int, strength: float) -> None:
        super().__init__()
        self.particles, self.strength = particles, strength

    def forward(self, logits: Tensor, target: Tensor, epoch: Tensor) -> list[Term]:
        log_p = logits.log_softmax(-1)  # (M + S*M, B, C)
        teacher = log_p[self.particles :].detach().exp().unflatten(0, (-1, self.particles)).mean(0)  # (M, B, C)
        gap = (torch.xlogy(teacher, teacher) - teacher * log_p[: self.particles]).sum(-1)
        return [(self.strength * gap,), (-true_class(log_p, target),)]

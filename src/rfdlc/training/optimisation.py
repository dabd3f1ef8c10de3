"""What happens to weights: the update of a step, the learning rate of an epoch, averages and new heads.

SGD with Nesterov momentum and AdamW are one fused operation for all parameters, without a host value. Runs of a stack
may have a learning rate and a weight decay each: then there is one operation per run, on its slices of the parameters.
They are written here because a captured step needs the learning rate as a tensor, runs of a stack need a gradient norm
each, and the whole state must be a flat list of tensors that a checkpoint can hold.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from math import cos, pi
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import functional_call

from rfdlc.data.loader import seeded
from rfdlc.training.networks.particles import ParticleNet
from rfdlc.training.networks.stack import Linear, reset

Tensors = list[Tensor]


class Optimiser(Protocol):
    """`state` names every tensor that a checkpoint must keep."""

    state: dict[str, list[Tensor]]

    def step(self, parameters: Tensors, gradients: Tensors, rates: Tensor) -> None: ...


class Sgd:
    """v = momentum * v + g; p -= rate * (g + momentum * v), with g = gradient + decay * p.

    `decays` is one for all runs, which then share the first rate, or one per run.
    """

    def __init__(self, parameters: Tensors, decays: Sequence[float], momentum: float = 0.9) -> None:
        self.decays, self.momentum = list(decays), momentum
        self.constants: dict[str, Any] = {"momentum": momentum, "nesterov": momentum > 0, "dampening": 0.0}
        self.constants |= {"maximize": False, "is_first_step": False}
        self.state = {"velocity": [torch.zeros_like(p) for p in parameters]}

    def step(self, parameters: Tensors, gradients: Tensors, rates: Tensor) -> None:
        slices = _slices(len(self.decays), parameters, gradients, self.state["velocity"])
        for (own, slopes, velocity), decay, rate in zip(slices, self.decays, rates.unbind(), strict=False):
            moving = velocity if self.momentum else []
            torch._fused_sgd_(own, slopes, moving, lr=rate, weight_decay=decay, **self.constants)


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019). `decays` as in Sgd."""

    def __init__(self, parameters: Tensors, decays: Sequence[float], betas: tuple[float, float] = (0.9, 0.999)) -> None:
        self.decays = list(decays)
        self.constants: dict[str, Any] = {"beta1": betas[0], "beta2": betas[1], "eps": 1e-8}
        self.constants |= {"amsgrad": False, "maximize": False}
        self.state = {
            "first": [torch.zeros_like(p) for p in parameters],
            "second": [torch.zeros_like(p) for p in parameters],
            "steps": [torch.zeros((), device=parameters[0].device)],
        }

    def step(self, parameters: Tensors, gradients: Tensors, rates: Tensor) -> None:
        (steps,) = self.state["steps"]
        steps += 1
        counts = [steps] * len(parameters)
        slices = _slices(len(self.decays), parameters, gradients, self.state["first"], self.state["second"])
        for (own, slopes, first, second), decay, rate in zip(slices, self.decays, rates.unbind(), strict=False):
            torch._fused_adamw_(own, slopes, first, second, [], counts, lr=rate, weight_decay=decay, **self.constants)


OPTIMISERS = {"sgd": Sgd, "adamw": AdamW}


def _slices(runs: int, *lists: Tensors) -> Iterator[tuple[Tensors, ...]]:
    """The lists as they are for one run; for several, the lists of every run's slices along dimension 0."""
    if runs == 1:
        return iter([lists])
    cut = [[tensor.chunk(runs) for tensor in tensors] for tensors in lists]
    return zip(*(map(list, zip(*parts, strict=True)) for parts in cut), strict=True)


def clip(gradients: Tensors, largest: float, runs: int) -> None:
    """Scale each run's gradients in place so that their norm is at most `largest`; runs lie along dimension 0."""
    for (parts,) in _slices(runs, gradients):
        norm = torch.stack(torch._foreach_norm(parts)).norm()
        torch._foreach_mul_(parts, (largest / (norm + 1e-6)).clamp(max=1.0))


# -- learning rate of an epoch, as a factor of the base rate; epochs count from 1 -------------------------------

SCHEDULES: dict[str, Callable[[float, Sequence[float], float], float]] = {
    # name -> (share of the training done before this epoch, milestones as shares, decay) -> factor
    "step": lambda done, milestones, decay: float(decay ** sum(done >= milestone - 1e-9 for milestone in milestones)),
    "cosine": lambda done, milestones, decay: 0.5 * (1 + cos(pi * done)),
    "constant": lambda done, milestones, decay: 1.0,
    # Weights are averaged over the last quarter at half the base rate (Maddox et al. 2019: 0.05 of 0.1 on CIFAR)
    "swa": lambda done, milestones, decay: min(1.0, max(SWA_RATE, 1 - (done - 0.5) / 0.25 * (1 - SWA_RATE))),
}
SWA_RATE = 0.5


def rate(
    epoch: int, epochs: int, schedule: str = "cosine", *,
    warmup: int = 0, milestones: Sequence[float] = (0.8, 0.9), decay: float = 0.01,
) -> float:  # fmt: skip
    """Linear warm-up over the first `warmup` epochs, then the schedule.

    The paper: 200 epochs, times 0.01 after epochs 160 and 180, five epochs of warm-up.

    >>> [rate(epoch, 200, "step", warmup=5) for epoch in (1, 5, 160, 161, 181)]
    [0.2, 1.0, 1.0, 0.01, 0.0001]
    """
    return min(1.0, epoch / warmup if warmup else 1.0) * SCHEDULES[schedule]((epoch - 1) / epochs, milestones, decay)


# -- between steps: mean of weights over epochs, samples around it, heads reinitialized or normalised --------------

COLLECTED_FROM = 0.75  # share of a stage's epochs after which weights are averaged (Izmailov et al. 2018)
SAMPLED_WEIGHTS = 3  # a stream of random numbers beside those of order, augmentation and mixing


class EpochMean:
    """Mean and mean square of weights at the ends of epochs: SWA, and SWAG with a diagonal covariance.

    Izmailov et al. 2018; Maddox et al. 2019. `state` is what a checkpoint keeps.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = list(weights)
        self.state = {
            "mean": [torch.zeros_like(w) for w in weights],
            "square": [torch.zeros_like(w) for w in weights],
            "collected": [torch.zeros((), device=weights[0].device)],
        }

    @torch.no_grad()
    def collect(self) -> None:
        """Take the weights as they are now into the mean."""
        (count,) = self.state["collected"]
        count += 1
        for weight, mean, square in zip(self.weights, self.state["mean"], self.state["square"], strict=True):
            mean += (weight - mean) / count
            square += (weight**2 - square) / count

    @torch.no_grad()
    def finalize(self) -> list[Tensor]:
        """Replace the weights by their mean; their standard deviations over the epochs."""
        torch._foreach_copy_(self.weights, self.state["mean"])
        pairs = zip(self.state["mean"], self.state["square"], strict=True)
        return [(square - mean**2).clamp(min=0).sqrt() for mean, square in pairs]


class SampledNetworks:
    """S networks whose body is sampled around a network's own (SWAG), with that network's head.

    Sampled again in each epoch from (seed, epoch), so that only the deviations must be kept.
    """

    def __init__(self, net: ParticleNet, deviations: Sequence[Tensor], samples: int) -> None:
        self.net, self.samples = net, samples
        self.body = {name: p for name, p in net.named_parameters() if name.startswith(("trunk.", "branches."))}
        self.deviations = list(deviations)[: len(self.body)] or [torch.zeros_like(p) for p in self.body.values()]
        self.bodies = [{name: p.detach().clone() for name, p in self.body.items()} for _ in range(samples)]

    @torch.no_grad()
    def draw(self, epoch: int) -> None:
        """mean + deviation * noise, in place: a captured step reads the same memory."""
        for number, weights in enumerate(self.bodies):
            place = epoch * self.samples + number
            generators = [seeded(SAMPLED_WEIGHTS, seed, place) for seed in self.net.seeds]
            for (name, mean), deviation in zip(self.body.items(), self.deviations, strict=True):
                shape = mean.chunk(self.net.runs)[0].shape
                noise = torch.cat([torch.randn(shape, generator=generator) for generator in generators])
                weights[name].copy_(mean + deviation * noise.to(mean))

    def __call__(self, inputs: Tensor) -> Tensor:
        """Logits of the network, then of the sampled ones: (R, M + S*M, B, C)."""
        others = [functional_call(self.net, weights, (inputs,)) for weights in self.bodies]
        return torch.cat([self.net(inputs), *others], 1)


@torch.no_grad()
def reinitialize_head(net: ParticleNet) -> None:
    """New weights for the head, of every run by its own seed; drawn on the CPU, wherever the network is."""
    fresh = deepcopy(net.head).cpu()
    reset(fresh, net.seeds)
    net.head.load_state_dict(fresh.state_dict())


@torch.no_grad()
def normalise_head(net: ParticleNet, tau: float) -> None:
    """w_c / |w_c|^tau for every class, and no bias (Kang et al. 2020): frequent classes lose their long weights."""
    net.head.weight.div_(net.head.weight.norm(dim=1, keepdim=True) ** tau)
    if isinstance(net.head, Linear):
        net.head.bias.zero_()

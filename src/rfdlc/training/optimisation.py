"""What happens to weights: the update of a step, the learning rate of an epoch,
averages and new heads.

Optimisers are written here because a captured step needs learning rates as tensors,
runs of a stack may have a rate, a decay and a gradient norm each, and a checkpoint
keeps every tensor of a `state`. An update is one fused operation for all parameters,
which then share the first rate, or one per run on its slices of them.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from math import cos, pi

import torch
from torch import Tensor
from torch.func import functional_call

from rfdlc.data.loader import seeded
from rfdlc.training.networks.particles import ParticleNet
from rfdlc.training.networks.stack import Linear, reset

Tensors = list[Tensor]


class Sgd:
    """v = momentum * v + g; p -= rate * (g + momentum * v), with g = gradient + decay *
    p. One decay, or per run.

    `factors` of the learning rate, one per parameter; by default 1.
    """

    def __init__(
        self,
        parameters: Tensors,
        decays: Sequence[float],
        momentum: float = 0.9,
        factors: Sequence[float] = (),
    ) -> None:
        self.decays, self.factors, self.momentum = (
            decays,
            factors or [1.0] * len(parameters),
            momentum,
        )
        self.state = {"velocity": _zeros(parameters)}

    def step(self, parameters: Tensors, gradients: Tensors, rates: Tensor) -> None:
        tensors = parameters, gradients, self.state["velocity"]
        for (own, slopes, velocity), decay, rate in _groups(
            self.factors, self.decays, rates, *tensors
        ):
            torch._fused_sgd_(
                own,
                slopes,
                velocity if self.momentum else [],
                lr=rate,
                weight_decay=decay,
                momentum=self.momentum,
                nesterov=self.momentum > 0,
                dampening=0.0,
                maximize=False,
                is_first_step=False,
            )


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019). `decays` and
    `factors` as in Sgd.
    """

    def __init__(
        self,
        parameters: Tensors,
        decays: Sequence[float],
        factors: Sequence[float] = (),
    ) -> None:
        self.decays, self.factors = decays, factors or [1.0] * len(parameters)
        steps = [torch.zeros((), device=parameters[0].device)]
        self.state = {
            "first": _zeros(parameters),
            "second": _zeros(parameters),
            "steps": steps,
        }

    def step(self, parameters: Tensors, gradients: Tensors, rates: Tensor) -> None:
        *moments, (steps,) = self.state.values()
        steps += 1
        tensors = parameters, gradients, *moments
        for (own, slopes, first, second), decay, rate in _groups(
            self.factors, self.decays, rates, *tensors
        ):
            torch._fused_adamw_(
                own,
                slopes,
                first,
                second,
                [],
                [steps] * len(own),
                lr=rate,
                weight_decay=decay,
                beta1=0.9,
                beta2=0.999,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            )


OPTIMISERS = {"sgd": Sgd, "adamw": AdamW}


def _zeros(tensors: Sequence[Tensor]) -> Tensors:
    return [torch.zeros_like(tensor) for tensor in tensors]


def _slices(runs: int, *lists: Tensors) -> Iterator[tuple[Tensors, ...]]:
    """The lists as they are for one run; for several, the lists of every run's slices
    along dimension 0.
    """
    if runs == 1:
        return iter([lists])
    cut = [[tensor.chunk(runs) for tensor in tensors] for tensors in lists]
    return zip(*(map(list, zip(*parts, strict=True)) for parts in cut), strict=True)


def _groups(
    factors: Sequence[float], decays: Sequence[float], rates: Tensor, *lists: Tensors
) -> Iterator[tuple[tuple[Tensors, ...], float, Tensor]]:
    """What one fused operation updates: the tensors of a run that have the same rate,
    with their decay and rate.
    """
    for factor in dict.fromkeys(factors):
        chosen = [
            [t for t, own in zip(tensors, factors, strict=True) if own == factor]
            for tensors in lists
        ]
        scaled = rates if factor == 1 else rates * factor
        yield from zip(
            _slices(len(decays), *chosen), decays, scaled.unbind(), strict=False
        )


def clip(gradients: Tensors, largest: float, runs: int) -> None:
    """Scale each run's gradients in place so that their norm is at most `largest`; runs
    lie along dimension 0.
    """
    for (parts,) in _slices(runs, gradients):
        norm = torch.stack(torch._foreach_norm(parts)).norm()
        torch._foreach_mul_(parts, (largest / (norm + 1e-6)).clamp(max=1.0))


SCHEDULES: dict[str, Callable[[float, Sequence[float], float], float]] = {
    # name -> (share of the training done before an epoch, milestones as shares, decay)
    # -> factor of the base rate
    "step": lambda done, milestones, decay: float(
        decay ** sum(done >= milestone - 1e-9 for milestone in milestones)
    ),
    "cosine": lambda done, milestones, decay: 0.5 * (1 + cos(pi * done)),
    "constant": lambda done, milestones, decay: 1.0,
    # Weights are averaged over the last quarter at half the base rate (Maddox et al.
    # 2019: 0.05 of 0.1 on CIFAR)
    "swa": lambda done, milestones, decay: min(1.0, max(0.5, 1 - 2 * (done - 0.5))),
}


def rate(
    epoch: int,
    epochs: int,
    schedule: str = "cosine",
    *,
    warmup: int = 0,
    milestones: Sequence[float] = (0.8, 0.9),
    decay: float = 0.01,
) -> float:
    """Factor of the base rate in an epoch, from 1: linear warm-up over `warmup` epochs,
    then the schedule. The paper's:

    >>> [rate(epoch, 200, "step", warmup=5) for epoch in (1, 5, 160, 161, 181)]
    [0.2, 1.0, 1.0, 0.01, 0.0001]
    """
    return min(1.0, epoch / warmup if warmup else 1.0) * SCHEDULES[schedule](
        (epoch - 1) / epochs, milestones, decay
    )


# -- between steps: mean of weights over epochs, samples around it, heads reinitialized
# or normalised ------------------

# share of a stage's epochs after which weights are averaged (Izmailov et al. 2018)
COLLECTED_FROM = 0.75
SAMPLED_WEIGHTS = (
    3  # a stream of random numbers beside those of order, augmentation and mixing
)


class EpochMean:
    """Mean and mean square of weights at the ends of epochs: SWA (Izmailov et al.
    2018), SWAG (Maddox et al. 2019).
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = list(weights)
        collected = [torch.zeros((), device=weights[0].device)]
        self.state = {
            "mean": _zeros(weights),
            "square": _zeros(weights),
            "collected": collected,
        }

    @torch.no_grad()
    def collect(self) -> None:
        means, squares, (count,) = self.state.values()
        count += 1
        for weight, mean, square in zip(self.weights, means, squares, strict=True):
            mean += (weight - mean) / count
            square += (weight**2 - square) / count

    @torch.no_grad()
    def finalize(self) -> list[Tensor]:
        """Replace the weights by their mean; their standard deviations over the
        epochs.
        """
        means, squares, _ = self.state.values()
        torch._foreach_copy_(self.weights, means)
        return [
            (square - mean**2).clamp(min=0).sqrt()
            for mean, square in zip(means, squares, strict=True)
        ]


class SampledNetworks:
    """S networks whose body is sampled around a network's own (SWAG) in each epoch,
    with that network's head.
    """

    def __init__(
        self, net: ParticleNet, deviations: Sequence[Tensor], samples: int
    ) -> None:
        self.net, self.samples = net, samples
        self.body = {
            name: p
            for name, p in net.named_parameters()
            if name.startswith(("trunk.", "branches."))
        }
        self.deviations = list(deviations)[: len(self.body)] or _zeros(
            [*self.body.values()]
        )
        self.bodies = [
            {name: p.detach().clone() for name, p in self.body.items()}
            for _ in range(samples)
        ]

    @torch.no_grad()
    def draw(self, epoch: int) -> None:
        """mean + deviation * noise, in place: a captured step reads the same memory."""
        for place, weights in enumerate(self.bodies, epoch * self.samples):
            generators = [
                seeded(SAMPLED_WEIGHTS, seed, place) for seed in self.net.seeds
            ]
            for (name, mean), deviation in zip(
                self.body.items(), self.deviations, strict=True
            ):
                shape = mean.chunk(self.net.runs)[0].shape
                noise = torch.cat(
                    [
                        torch.randn(shape, generator=generator)
                        for generator in generators
                    ]
                )
                weights[name].copy_(mean + deviation * noise.to(mean))

    def __call__(self, inputs: Tensor) -> Tensor:
        """Logits of the network, then of the sampled ones: (R, M + S*M, B, C)."""
        others = [
            functional_call(self.net, weights, (inputs,)) for weights in self.bodies
        ]
        return torch.cat([self.net(inputs), *others], 1)


@torch.no_grad()
def reinitialize_head(net: ParticleNet) -> None:
    """New weights for the head, of every run by its own seed; drawn on the CPU,
    wherever the network is.
    """
    fresh = deepcopy(net.head).cpu()
    reset(fresh, net.seeds)
    net.head.load_state_dict(fresh.state_dict())


@torch.no_grad()
def normalise_head(net: ParticleNet, tau: float) -> None:
    """w_c / |w_c|^tau for every class, and no bias (Kang et al. 2020): frequent classes
    lose their long weights.
    """
    net.head.weight.div_(net.head.weight.norm(dim=1, keepdim=True) ** tau)
    if isinstance(net.head, Linear):
        net.head.bias.zero_()

"""SGD with Nesterov momentum, and AdamW: one fused operation for all parameters, no host value inside a step.

Runs of a stack may have a learning rate and a weight decay each: then there is one operation a run, on its slices of
the parameters. Written here because a captured step needs the learning rate as a tensor, runs of a stack need a
gradient norm each, and the whole state must be a flat list of tensors that a checkpoint can hold.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Tensors = list[Tensor]


class Optimiser(Protocol):
    """`state` names every tensor that a checkpoint must keep."""

    state: dict[str, list[Tensor]]

    def step(self, parameters: Tensors, gradients: Tensors, rates: Tensor) -> None: ...


class Sgd:
    """v = momentum * v + g; p -= rate * (g + momentum * v), with g = gradient + decay * p.

    `decays` is one for all runs, which then share the first rate, or one a run.
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

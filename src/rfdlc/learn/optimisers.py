"""SGD with Nesterov momentum, and AdamW: a few multi-tensor operations, no host value inside a step.

Written here because a captured step needs the learning rate as a tensor, runs of a stack need a gradient norm
each, and the whole state must be a flat list of tensors that a checkpoint can hold.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

Tensors = list[Tensor]


class Optimiser(Protocol):
    """`state` names every tensor that a checkpoint must keep."""

    state: dict[str, list[Tensor]]

    def step(self, parameters: Tensors, gradients: Tensors, rate: Tensor) -> None: ...


class Sgd:
    """v = momentum * v + g; p -= rate * (g + momentum * v), with g = gradient + decay * p."""

    def __init__(self, parameters: Tensors, decays: Sequence[float], momentum: float = 0.9) -> None:
        self.decays, self.momentum = list(decays), momentum
        self.state = {"velocity": [torch.zeros_like(p) for p in parameters]}

    def step(self, parameters: Tensors, gradients: Tensors, rate: Tensor) -> None:
        velocity = self.state["velocity"]
        decayed = torch._foreach_mul(parameters, self.decays)
        torch._foreach_add_(decayed, gradients)
        torch._foreach_mul_(velocity, self.momentum)
        torch._foreach_add_(velocity, decayed)
        torch._foreach_add_(decayed, velocity, alpha=self.momentum)
        torch._foreach_mul_(decayed, rate)
        torch._foreach_sub_(parameters, decayed)


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    def __init__(self, parameters: Tensors, decays: Sequence[float], betas: tuple[float, float] = (0.9, 0.999)) -> None:
        self.decays, self.betas = list(decays), betas
        self.state = {
            "first": [torch.zeros_like(p) for p in parameters],
            "second": [torch.zeros_like(p) for p in parameters],
            "steps": [torch.zeros((), device=parameters[0].device)],
        }

    def step(self, parameters: Tensors, gradients: Tensors, rate: Tensor) -> None:
        (beta1, beta2), (steps,) = self.betas, self.state["steps"]
        steps += 1
        torch._foreach_mul_(self.state["first"], beta1)
        torch._foreach_add_(self.state["first"], gradients, alpha=1 - beta1)
        torch._foreach_mul_(self.state["second"], beta2)
        torch._foreach_addcmul_(self.state["second"], gradients, gradients, value=1 - beta2)
        change = torch._foreach_div(self.state["second"], 1 - beta2**steps)
        torch._foreach_sqrt_(change)
        torch._foreach_add_(change, 1e-8)
        change = torch._foreach_div(self.state["first"], change)
        torch._foreach_div_(change, 1 - beta1**steps)
        torch._foreach_add_(change, torch._foreach_mul(parameters, self.decays))
        torch._foreach_mul_(change, rate)
        torch._foreach_sub_(parameters, change)


OPTIMISERS = {"sgd": Sgd, "adamw": AdamW}


def clip(gradients: Tensors, largest: float, runs: int) -> None:
    """Scale each run's gradients in place so that their norm is at most `largest`; runs lie along dimension 0."""
    for run in range(runs):
        parts = [gradient.chunk(runs)[run] for gradient in gradients]
        norm = torch.stack(torch._foreach_norm(parts)).norm()
        torch._foreach_mul_(parts, (largest / (norm + 1e-6)).clamp(max=1.0))

"""Convolution, batch norm and ReLU in residual blocks of K networks, forward and backward in as few passes as can be.

A stage is a chain of units: convolution, batch norm, ReLU; every second unit of a residual stage adds a shortcut
before its ReLU. What the backward pass needs beside the parameters is what the forward pass has written anyway: the
values of each unit before batch norm and after its ReLU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from rfdlc.training.networks.stack import BatchNorm, Conv

OF_A_UNIT = 5  # tensors: weight, gamma, beta, running mean, running variance


@dataclass(frozen=True)
class Unit:
    """How a unit is wired: its stride, and whether the input of the unit before it is added."""

    stride: int = 1
    residual: bool = False


Wired = tuple[Unit, Conv, BatchNorm]


def run(units: Sequence[Wired], x: Tensor) -> Tensor:
    """A chain of (wiring, convolution, batch norm) on images (K, B, H, W, C), in training mode."""
    tensors = [t for _, conv, norm in units for t in (conv.weight, norm.weight, norm.bias, norm.mean, norm.variance)]
    result: Tensor = _Chain.apply([unit for unit, _, _ in units], x, *tensors)
    return result


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, units: list[Unit], x: Tensor, *tensors: Tensor) -> Tensor:
        ops, actives, befores, norms = kernels(), [x], [], []
        weights = _as(x.dtype, tensors[::OF_A_UNIT])
        for number, (unit, weight) in enumerate(zip(units, weights, strict=True)):
            norm = tensors[OF_A_UNIT * number + 1 : OF_A_UNIT * (number + 1)]
            y, partial = ops.convolve(actives[-1], weight, unit.stride)
            known = ops.statistics(partial, y[0, ..., 0].numel(), *norm)
            actives.append(ops.activate(y, known, actives[-2] if unit.residual else None))
            befores.append(y)
            norms.append(known)
        ctx.units, ctx.needs_input = units, x.requires_grad
        ctx.save_for_backward(*weights, *actives, *befores, *norms)
        return actives[-1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        units, saved, ops = ctx.units, ctx.saved_tensors, kernels()
        count = len(units)
        weights, actives = saved[:count], saved[count : 2 * count + 1]
        befores, norms = saved[2 * count + 1 : 3 * count + 1], saved[3 * count + 1 :]
        found: list[Tensor | None] = [None] * (OF_A_UNIT * count)
        gradient, shortcut = gradient.contiguous(), None
        with _Beside(gradient) as beside:
            for number in reversed(range(count)):
                unit, x, y, known = units[number], actives[number], befores[number], norms[number]
                active = actives[number + 1] if unit.residual else None
                through, partial = ops.gate(gradient, shortcut if unit.residual else None, active, y, known)
                factors = ops.norm_gradient(partial, y[0, ..., 0].numel(), known)
                dy = ops.norm_input_gradient(through, y, known, factors, unit.residual)
                at = OF_A_UNIT * number
                found[at] = beside(ops.weight_gradient, dy, x, unit.stride)
                found[at + 1 : at + 3] = factors[3].flatten(), factors[4].flatten()
                if number == 0 and not ctx.needs_input:
                    return None, None, *found
                # What goes around a block joins where the block began: in its first convolution where the size
                # halves there, else in the gate of the unit before it
                halving = unit.stride > 1
                gradient = ops.input_gradient(dy, weights[number], unit.stride, shortcut if halving else None)
                shortcut = through if unit.residual else None if halving else shortcut
        return None, gradient if shortcut is None else gradient + shortcut, *found


def _as(dtype: torch.dtype, weights: Sequence[Tensor]) -> list[Tensor]:
    """All weights in the type of the images, channels last, in one call."""
    last = torch.channels_last
    copies = [torch.empty_like(weight, dtype=dtype, memory_format=last) for weight in weights]
    torch._foreach_copy_(copies, [weight.contiguous(memory_format=last) for weight in weights])
    return copies


class _Beside:
    """Work that nothing waits for, on a stream of its own: weight gradients run while the others go down the chain.

    What it reads is kept until both streams have met, or the allocator would give it away.
    """

    def __init__(self, like: Tensor) -> None:
        self.kept: list[Any] = []
        self.stream = _side_stream(like.device) if like.is_cuda else None

    def __enter__(self) -> "_Beside":
        return self

    def __call__(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        if self.stream is None:
            return function(*arguments)
        self.stream.wait_stream(torch.cuda.current_stream())
        self.kept.append(arguments)
        with torch.cuda.stream(self.stream):
            result = function(*arguments)
        self.kept.append(result)
        return result

    def __exit__(self, *reason: object) -> None:
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@cache
def kernels() -> Any:
    """The operations on a GPU; None without Triton, which comes with torch where there is a GPU that it knows."""
    try:
        return import_module("rfdlc.training.networks.fused.kernels")
    except ImportError:
        return None


def usable(x: Tensor) -> bool:
    """Whether images (R, B, C, H, W) can be trained on fused: kernels are there, in bfloat16, and sizes halve twice."""
    quick = x.is_cuda and torch.is_autocast_enabled("cuda") and torch.is_grad_enabled() and kernels() is not None
    return quick and x.shape[-1] % 4 == 0 and x.shape[-2] % 4 == 0

"""Convolution, batch norm and ReLU in residual blocks of K networks, forward and
backward in as few passes as can be.

Every second unit of a residual stage adds a shortcut before its ReLU. What the backward
pass needs beside parameters is what the forward pass has written anyway: the values of
each unit before batch norm and after its ReLU.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rfdlc.data.kernels import load_kernels
from rfdlc.training.networks.stack import BatchNorm, Conv

OF_A_UNIT = 5  # tensors: weight, gamma, beta, running mean, running variance
_side_stream = cache(torch.cuda.Stream)  # of a device
Wiring = list[tuple[int, bool]]  # stride of each unit, and whether it is residual


class Unit(NamedTuple):
    """A convolution, its batch norm, and whether the input of the unit before it is
    added.
    """

    conv: Conv
    norm: BatchNorm
    residual: bool = False


def run(units: Sequence[Unit], x: Tensor) -> Tensor:
    """A chain of units on images (K, B, H, W, C), in training mode."""
    tensors = [
        t
        for conv, norm, _ in units
        for t in (conv.weight, norm.weight, norm.bias, norm.mean, norm.variance)
    ]
    return _Chain.apply(
        [(unit.conv.stride, unit.residual) for unit in units], x, *tensors
    )


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wiring: Wiring, x: Tensor, *tensors: Tensor) -> Tensor:
        ops, actives, befores, norms = kernels(), [x], [], []
        weights = _as(x.dtype, tensors[::OF_A_UNIT])
        for number, ((stride, residual), weight) in enumerate(
            zip(wiring, weights, strict=True)
        ):
            norm = tensors[OF_A_UNIT * number + 1 : OF_A_UNIT * (number + 1)]
            y, partial = ops.convolve(actives[-1], weight, stride)
            known = ops.statistics(partial, y[0, ..., 0].numel(), *norm)
            actives.append(ops.activate(y, known, actives[-2] if residual else None))
            befores.append(y)
            norms.append(known)
        ctx.wiring, ctx.needs_input = wiring, x.requires_grad
        ctx.save_for_backward(*weights, *actives, *befores, *norms)
        return actives[-1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved, ops, count = ctx.saved_tensors, kernels(), len(ctx.wiring)
        weights, actives = saved[:count], saved[count : 2 * count + 1]
        befores, norms = saved[2 * count + 1 : 3 * count + 1], saved[3 * count + 1 :]
        found: list[Tensor | None] = [None] * (OF_A_UNIT * count)
        gradient, shortcut = gradient.contiguous(), None
        with _beside(gradient) as beside:
            for number, (stride, residual) in reversed(list(enumerate(ctx.wiring))):
                x, y, known = actives[number], befores[number], norms[number]
                active = actives[number + 1] if residual else None
                through, partial = ops.gate(
                    gradient, shortcut if residual else None, active, y, known
                )
                factors = ops.norm_gradient(partial, y[0, ..., 0].numel(), known)
                dy = ops.norm_input_gradient(through, y, known, factors, residual)
                at = OF_A_UNIT * number
                found[at] = beside(ops.weight_gradient, dy, x, stride)
                found[at + 1 : at + 3] = factors[3].flatten(), factors[4].flatten()
                if number == 0 and not ctx.needs_input:
                    return None, None, *found
                # What goes around a block joins where the block began: in its first
                # convolution where the size halves there, else in the gate of the unit
                # before it
                halving = stride > 1
                gradient = ops.input_gradient(
                    dy, weights[number], stride, shortcut if halving else None
                )
                shortcut = through if residual else None if halving else shortcut
        return None, gradient if shortcut is None else gradient + shortcut, *found


def _as(dtype: torch.dtype, weights: Sequence[Tensor]) -> list[Tensor]:
    """All weights in the type of the images, channels last, in one call."""
    last = torch.channels_last
    copies = [
        torch.empty_like(weight, dtype=dtype, memory_format=last) for weight in weights
    ]
    torch._foreach_copy_(
        copies, [weight.contiguous(memory_format=last) for weight in weights]
    )
    return copies


@contextmanager
def _beside(like: Tensor) -> Iterator[Callable[..., Tensor]]:
    """Calls that nothing waits for, on a stream of their own: weight gradients run
    while others go down the chain.

    What they read is kept until both streams have met, or the allocator would give it
    away.
    """
    if not like.is_cuda:
        yield lambda function, *arguments: function(*arguments)
        return
    stream, kept = _side_stream(like.device), list[Any]()

    def call(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = function(*arguments)
        kept.append((arguments, result))
        return result

    try:
        yield call
    finally:
        torch.cuda.current_stream().wait_stream(stream)


def kernels() -> Any:
    """The operations on a GPU; None where Triton cannot compile them."""
    return load_kernels("rfdlc.training.networks.fused.kernels")


def usable(x: Tensor) -> bool:
    """Whether images (R, B, C, H, W) can be trained on fused: kernels are there, in
    bfloat16, and sizes halve twice.
    """
    quick = x.is_cuda and torch.is_autocast_enabled("cuda") and kernels() is not None
    return quick and x.shape[-1] % 4 == 0 and x.shape[-2] % 4 == 0

"""Batched matrix products whose backward pass is quick on a CPU.

The gradient by x of x @ w is g @ w^T. Common BLAS libraries multiply by a transposed matrix several times more slowly
than by a plain one when matrices are as small as here, so the weights, the smallest of the three, are transposed first.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight: (K, B, inputs), (K, inputs, outputs) -> (K, B, outputs)."""
    if not by_hand(x, weight):
        return torch.bmm(x, weight)
    result: Tensor = _Product.apply(x, weight)
    return result


def by_hand(x: Tensor, weight: Tensor) -> bool:
    """Whether gradients are taken as here: in training on a CPU, in full precision."""
    training = torch.is_grad_enabled() and weight.requires_grad
    return training and x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


def input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    return gradient.bmm(weight.mT.contiguous())


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.bmm(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor]:
        x, weight = ctx.saved_tensors
        return input_gradient(gradient, weight) if ctx.needs_input_grad[0] else None, x.mT.bmm(gradient)

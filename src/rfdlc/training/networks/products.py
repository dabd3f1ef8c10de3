"""Batched affine maps and cosines whose backward pass is quick on a CPU.

The gradient by x of x @ w is g @ w^T. Common BLAS libraries multiply by a transposed matrix several times more slowly
than by a plain one when matrices are as small as here, so the weights, the smallest of the three, are transposed first.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional


def affine(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight + bias: (K, B, inputs), (K, inputs, outputs), (K, 1, outputs) -> (K, B, outputs)."""
    if not by_hand(x, weight):
        return _affine(x, weight, bias)
    result: Tensor = _Affine.apply(x, weight, bias)
    return result


def cosines(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    """scale * cos(x, weight): (K, B, features), (K, features, classes) -> (K, B, classes)."""
    if by_hand(x, weight):
        result: Tensor = _Cosines.apply(x, weight, scale)
        return result
    inverse = (x * x).sum(-1, keepdim=True).clamp(min=1e-24).rsqrt()  # multiplied last: by C numbers, not F
    return torch.bmm(x, functional.normalize(weight, dim=1)) * (scale * inverse)


def by_hand(x: Tensor, weight: Tensor) -> bool:
    """Whether gradients are taken as here: in training on a CPU, in full precision."""
    training = torch.is_grad_enabled() and weight.requires_grad
    return training and x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


def input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    return gradient.bmm(weight.mT.contiguous())


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.bmm(x, weight) if bias is None else torch.baddbmm(bias, x, weight)


class _Affine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _affine(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        by_input = input_gradient(gradient, weight) if ctx.needs_input_grad[0] else None
        by_bias = gradient.sum(1, keepdim=True) if ctx.needs_input_grad[2] else None
        return by_input, x.mT.bmm(gradient), by_bias


class _Cosines(torch.autograd.Function):
    """With u = w/|w| and z = s u'x/|x|: the gradient of z by x is s u/|x| - z x/|x|^2, that by u is s x/|x|."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: float) -> Tensor:
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_(min=1e-12).reciprocal_()
        length = torch.linalg.vector_norm(weight, dim=1, keepdim=True).clamp_(min=1e-12)
        unit, factor = weight / length, scale * inverse
        logits = torch.bmm(x, unit).mul_(factor)
        ctx.save_for_backward(x, unit, length, inverse, factor, logits)
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None]:
        x, unit, length, inverse, factor, logits = ctx.saved_tensors
        scaled, by_input = gradient * factor, None
        if ctx.needs_input_grad[0]:
            along = (gradient * logits).sum(-1, keepdim=True).mul_(inverse).mul_(inverse)
            by_input = input_gradient(scaled, unit).addcmul_(x, along, value=-1)
        by_unit = x.mT.bmm(scaled)
        by_weight = by_unit.addcmul_(unit, (unit * by_unit).sum(1, keepdim=True), value=-1).div_(length)
        return by_input, by_weight, None

"""Operations of stacked layers with backward passes of their own: faster on a CPU, smaller, or over processes."""

from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rfdlc.training.distributed import ProcessGroup

EPSILON, MOMENTUM = 1e-5, 0.1  # of layer norm and batch norm; of running statistics
PIXELS, CHANNELS = (0, 2, 3), (1, -1, 1, 1)  # axes of (B, channels, H, W), and the shape of one value per channel
aten = torch.ops.aten


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x @ weight + bias: (K, B, inputs), (K, inputs, outputs), (K, 1, outputs) -> (K, B, outputs)."""
    return _Affine.apply(x, weight, bias) if by_hand(x, weight) else torch.baddbmm(bias, x, weight)


def cosines(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    """scale * cos(x, weight): (K, B, features), (K, features, classes) -> (K, B, classes)."""
    if by_hand(x, weight):
        return _Cosines.apply(x, weight, scale)
    inverse = (x * x).sum(-1, keepdim=True).clamp(min=1e-24).rsqrt()  # multiplied last: by C numbers, not F
    return torch.bmm(x, functional.normalize(weight, dim=1)) * (scale * inverse)


def by_hand(x: Tensor, weight: Tensor) -> bool:
    """Whether gradients are taken as here: in training on a CPU, in full precision."""
    training = torch.is_grad_enabled() and weight.requires_grad
    return training and x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


def _input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    """g @ w^T: BLAS libraries multiply such small matrices several times faster by a plain one than by a transposed."""
    return gradient.bmm(weight.mT.contiguous())


class _Affine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.baddbmm(bias, x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        by_input = _input_gradient(gradient, weight) if ctx.needs_input_grad[0] else None
        return by_input, x.mT.bmm(gradient), gradient.sum(1, keepdim=True)


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
            by_input = _input_gradient(scaled, unit).addcmul_(x, along, value=-1)
        by_unit = x.mT.bmm(scaled)
        by_weight = by_unit.addcmul_(unit, (unit * by_unit).sum(1, keepdim=True), value=-1).div_(length)
        return by_input, by_weight, None


class HiddenLayer(torch.autograd.Function):
    """Affine map, layer norm, ReLU in half as many passes over memory as autograd makes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        before = torch.baddbmm(bias, x, weight)
        one = x.new_ones(before.shape[-1:])  # a weight, even of one, makes it quicker
        normed, mean, inverse = torch.native_layer_norm(before, before.shape[-1:], one, None, EPSILON)
        active = torch.addcmul(shift, normed, scale).relu_()
        ctx.save_for_backward(x, weight, scale, before, normed, mean, inverse, active)
        return active

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale, before, normed, mean, inverse, active = ctx.saved_tensors
        ones = gradient.new_ones(len(x), 1, x.shape[1])  # a product with them is a sum over the batch
        gated = aten.threshold_backward(gradient, active, 0)
        by_scale, by_shift = ones.bmm(normed.mul_(gated)), ones.bmm(gated)
        statistics = before.shape[-1:], mean, inverse, None, None, (True, False, False)
        by_before = aten.native_layer_norm_backward(gated.mul_(scale), before, *statistics)[0]
        by_input = _input_gradient(by_before, weight) if ctx.needs_input_grad[0] else None
        return by_input, x.mT.bmm(by_before), ones.bmm(by_before), by_scale, by_shift


class _SharedNorm(torch.autograd.Function):
    """Batch norm with the mean and variance of the global batch, of which every process has a shard."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, processes: ProcessGroup) -> Any:
        values = x.to(weight.dtype)
        variance, mean = torch.var_mean(values, PIXELS, correction=0)
        samples = (values[:, :1].numel() * torch.ones_like(mean[:1])).expand_as(mean)
        means, variances, counts = processes.all_gather(torch.stack([mean, variance, samples])).unbind(1)  # (world, C)
        total = counts.sum(0)
        mean = (counts * means).sum(0) / total
        variance = (counts * (variances + (means - mean) ** 2)).sum(0) / total  # within and between processes
        scale = (variance + EPSILON).rsqrt()
        ctx.save_for_backward(x, weight, mean, scale, total)
        ctx.processes = processes
        normed = (values - mean.view(CHANNELS)) * (scale * weight).view(CHANNELS) + bias.view(CHANNELS)
        ctx.mark_non_differentiable(mean, variance, total)
        return normed.to(x.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, mean, scale, total = ctx.saved_tensors
        given = gradients[0].to(weight.dtype)
        normed = (x.to(weight.dtype) - mean.view(CHANNELS)) * scale.view(CHANNELS)
        sums = torch.stack([given.sum(PIXELS), (given * normed).sum(PIXELS)])
        along_one, along_normed = (ctx.processes.all_sum(sums) / total).view(2, *CHANNELS)
        found = (given - along_one - normed * along_normed) * (scale * weight).view(CHANNELS)
        return found.to(x.dtype), sums[1], sums[0], None


def shared_norm(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, processes: ProcessGroup
) -> Tensor:
    """(B, channels, H, W) normalised; running statistics are updated as torch does, with the unbiased variance."""
    normed, seen_mean, seen_variance, total = _SharedNorm.apply(x, weight, bias, processes)
    with torch.no_grad():
        mean.lerp_(seen_mean, MOMENTUM)
        variance.lerp_(seen_variance * total / (total - 1).clamp(min=1), MOMENTUM)
    return normed


def recomputed(module: nn.Module, x: Tensor) -> Tensor:
    """`module(x)`, of which only `x` is kept; the second pass updates copies of statistics: they count a batch once."""
    if not (module.training and torch.is_grad_enabled()):
        return module(x)
    passes = count()

    def run(values: Tensor) -> Tensor:
        again = next(passes) > 0
        return functional_call(module, {name: b.clone() for name, b in module.named_buffers() if again}, (values,))

    return checkpoint(run, x, use_reentrant=False)

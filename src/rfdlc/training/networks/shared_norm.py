"""Batch normalisation with the statistics of the whole batch, of which every process has a share."""

from typing import Any

import torch
from torch import Tensor

from rfdlc.training.distributed import ProcessGroup

PIXELS = (0, 2, 3)  # of (B, channels, H, W)


class _SharedNorm(torch.autograd.Function):
    """Normalise by the mean and variance over all processes; two vectors a channel are exchanged in each direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, processes: ProcessGroup) -> Any:
        values = x.to(weight.dtype)
        variance, mean = torch.var_mean(values, PIXELS, correction=0)
        samples = (values[:, :1].numel() * torch.ones_like(mean[:1])).expand_as(mean)
        means, variances, counts = processes.all_gather(torch.stack([mean, variance, samples])).unbind(1)  # (world, C)
        total = counts.sum(0)
        mean = (counts * means).sum(0) / total
        variance = (counts * (variances + (means - mean) ** 2)).sum(0) / total  # within and between processes
        scale = (variance + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, scale, total)
        ctx.processes = processes
        shape = (1, -1, 1, 1)
        normed = (values - mean.view(shape)) * (scale * weight).view(shape) + bias.view(shape)
        ctx.mark_non_differentiable(mean, variance, total)
        return normed.to(x.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, mean, scale, total = ctx.saved_tensors
        shape = (1, -1, 1, 1)
        given = gradients[0].to(weight.dtype)
        normed = (x.to(weight.dtype) - mean.view(shape)) * scale.view(shape)
        sums = torch.stack([given.sum(PIXELS), (given * normed).sum(PIXELS)])
        along_one, along_normed = (ctx.processes.all_sum(sums) / total).view(2, *shape[:1], -1, 1, 1)
        found = (given - along_one - normed * along_normed) * (scale * weight).view(shape)
        return found.to(x.dtype), sums[1], sums[0], None, None


def shared_norm(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, momentum: float, eps: float,
    processes: ProcessGroup,
) -> Tensor:  # fmt: skip
    """(B, channels, H, W) normalised; running statistics are updated as torch does, with the unbiased variance."""
    normed, seen_mean, seen_variance, total = _SharedNorm.apply(x, weight, bias, eps, processes)
    with torch.no_grad():
        mean.lerp_(seen_mean, momentum)
        variance.lerp_(seen_variance * total / (total - 1).clamp(min=1), momentum)
    return normed

"""The operations of `networks/fused/kernels.py` in torch: their reference, by which the
chain is tested on a CPU.
"""

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv2d_input, conv2d_weight

from rfdlc.training.networks.stack import EPSILON, MOMENTUM


def convolve(x: Tensor, weight: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    y = _apart(
        functional.conv2d(_together(x), weight, None, stride, 1, 1, len(x)), len(x)
    )
    return y, _sums(y, y)


def input_gradient(
    dy: Tensor, weight: Tensor, stride: int, shortcut: Tensor | None = None
) -> Tensor:
    networks, batch, height, width, _ = dy.shape
    size = (batch, networks * weight.shape[1], height * stride, width * stride)
    dx = _apart(
        conv2d_input(size, weight, _together(dy), stride, 1, 1, networks), networks
    )
    if shortcut is not None:
        padding = (shortcut.shape[4] - dx.shape[4]) // 2
        dx[:, :, ::2, ::2] += shortcut[..., padding : padding + dx.shape[4]]
    return dx


def weight_gradient(dy: Tensor, x: Tensor, stride: int) -> Tensor:
    size = (len(dy) * dy.shape[4], x.shape[4], 3, 3)
    return conv2d_weight(_together(x), size, _together(dy), stride, 1, 1, len(x))


def statistics(
    partial: Tensor,
    count: int,
    gamma: Tensor,
    beta: Tensor,
    running_mean: Tensor,
    running_variance: Tensor,
) -> Tensor:
    mean, squares = (partial.sum(1) / count).unbind(1)
    variance = squares - mean**2
    inverse = (variance + EPSILON).rsqrt()
    scale = gamma.view_as(mean) * inverse
    running_mean.lerp_(mean.flatten().to(running_mean), MOMENTUM)
    running_variance.lerp_(
        (variance * count / (count - 1)).flatten().to(running_variance), MOMENTUM
    )
    return torch.stack([scale, beta.view_as(mean) - mean * scale, mean, inverse])


def norm_gradient(partial: Tensor, count: int, known: Tensor) -> Tensor:
    total, products = partial.sum(1).unbind(1)
    scale, _, mean, inverse = known
    by_gamma = inverse * (products - mean * total)
    slope = -scale * inverse * by_gamma / count
    return torch.stack(
        [scale, slope, -scale * total / count - slope * mean, by_gamma, total]
    )


def activate(y: Tensor, known: Tensor, shortcut: Tensor | None = None) -> Tensor:
    value = y * _channels(known[0]) + _channels(known[1])
    if shortcut is not None and shortcut.shape == y.shape:
        value = value + shortcut
    elif shortcut is not None:
        padding = (y.shape[4] - shortcut.shape[4]) // 2
        value = value + functional.pad(shortcut[:, :, ::2, ::2], (padding, padding))
    return value.relu().to(y.dtype)


def gate(
    dz: Tensor, shortcut: Tensor | None, active: Tensor | None, y: Tensor, known: Tensor
) -> tuple[Tensor, Tensor]:
    gradient = dz if shortcut is None else dz + shortcut
    if active is None:
        return dz, _sums(_opened(gradient, y, known), y)
    gradient = torch.where(active > 0, gradient, 0)
    return gradient, _sums(gradient, y)


def norm_input_gradient(
    gradient: Tensor, y: Tensor, known: Tensor, factors: Tensor, gated: bool
) -> Tensor:
    a, b, constant = (_channels(factor) for factor in factors[:3])
    return (
        a * (gradient if gated else _opened(gradient, y, known)) + b * y + constant
    ).to(y.dtype)


def _opened(gradient: Tensor, y: Tensor, known: Tensor) -> Tensor:
    return torch.where(y * _channels(known[0]) + _channels(known[1]) > 0, gradient, 0)


def _sums(values: Tensor, others: Tensor) -> Tensor:
    """(K, 1, 2, C)."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    return torch.stack([wide.sum((1, 2, 3)), (wide * others).sum((1, 2, 3))], 1)[
        :, None
    ]


def _channels(values: Tensor) -> Tensor:
    return values[:, None, None, None]


def _together(x: Tensor) -> Tensor:
    """(K, B, H, W, C) -> (B, K*C, H, W)."""
    return x.permute(1, 0, 4, 2, 3).flatten(1, 2)


def _apart(x: Tensor, networks: int) -> Tensor:
    return x.unflatten(1, (networks, -1)).permute(1, 0, 3, 4, 2).contiguous()

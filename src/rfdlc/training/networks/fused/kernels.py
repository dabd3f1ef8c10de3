"""The operations of fused stages on a GPU: batch norm, ReLU and shortcuts here,
convolutions in `convolutions.py`.

Sums over pixels (statistics of batch norm, their gradients) are partial sums, one per
program, added up in a fixed order, so that results do not change from run to run.
"""

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from rfdlc.training.networks.fused.convolutions import (
    convolve,
    input_gradient,
    weight_gradient,
)
from rfdlc.training.networks.fused.launching import Kernel, compile_together, wait_turn
from rfdlc.training.networks.stack import EPSILON, MOMENTUM

__all__ = [
    "compile_together",
    "convolve",
    "input_gradient",
    "weight_gradient",
]  # beside what is defined here


@triton.jit
def _added(partial, tiles, C: tl.constexpr, BLOCK: tl.constexpr):
    """Both sums of a network's partial ones, (tiles, 2, C)."""
    c = tl.arange(0, C)
    first = tl.zeros((BLOCK, C), dtype=tl.float32)
    second = tl.zeros((BLOCK, C), dtype=tl.float32)
    for start in range(0, tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        at = partial + (tile * (2 * C))[:, None] + c[None, :]
        first += tl.load(at, mask=(tile < tiles)[:, None], other=0.0)
        second += tl.load(at + C, mask=(tile < tiles)[:, None], other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@Kernel
def _statistics(
    partial,
    gamma,
    beta,
    running_mean,
    running_variance,
    result,
    tiles,
    count,
    networks,
    EPSILON: tl.constexpr,
    MOMENTUM: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """result (4, K, C): scale, shift, mean, 1 / deviation."""
    wait_turn()
    network = tl.program_id(0)
    total, squares = _added(
        partial + network.to(tl.int64) * tiles * (2 * C), tiles, C, BLOCK
    )
    at = network * C + tl.arange(0, C)
    mean = total / count
    variance = tl.maximum(squares / count - mean * mean, 0.0)
    inverse = 1.0 / tl.sqrt(variance + EPSILON)
    scale = tl.load(gamma + at) * inverse
    size = networks * C
    tl.store(result + at, scale)
    tl.store(result + size + at, tl.load(beta + at) - mean * scale)
    tl.store(result + 2 * size + at, mean)
    tl.store(result + 3 * size + at, inverse)
    unbiased = variance * (count / (count - 1.0))
    tl.store(
        running_mean + at, (1 - MOMENTUM) * tl.load(running_mean + at) + MOMENTUM * mean
    )
    tl.store(
        running_variance + at,
        (1 - MOMENTUM) * tl.load(running_variance + at) + MOMENTUM * unbiased,
    )


@Kernel
def _norm_gradient(
    partial, known, result, tiles, count, networks, C: tl.constexpr, BLOCK: tl.constexpr
):
    """result (5, K, C): factors of gradient, values and one in the gradient by the
    values; those of gamma and beta.
    """
    wait_turn()
    network = tl.program_id(0)
    total, products = _added(
        partial + network.to(tl.int64) * tiles * (2 * C), tiles, C, BLOCK
    )
    at, size = network * C + tl.arange(0, C), networks * C
    scale, mean = tl.load(known + at), tl.load(known + 2 * size + at)
    inverse = tl.load(known + 3 * size + at)
    by_gamma = inverse * (products - mean * total)
    slope = -scale * inverse * by_gamma / count
    tl.store(result + at, scale)
    tl.store(result + size + at, slope)
    tl.store(result + 2 * size + at, -scale * total / count - slope * mean)
    tl.store(result + 3 * size + at, by_gamma)
    tl.store(result + 4 * size + at, total)


@triton.jit
def _tile(pixels, C: tl.constexpr, BLOCK: tl.constexpr):
    """Which values a program works on: network, pixels, channels, what is inside, and
    where (pixels, channels) lie.
    """
    network = tl.program_id(1).to(tl.int64)
    pixel, c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, C)
    return (
        network,
        pixel,
        c,
        (pixel < pixels)[:, None],
        network * pixels * C + (pixel * C)[:, None] + c[None, :],
    )


@Kernel
def _activate(
    y,
    known,
    shortcut,
    z,
    pixels,
    networks,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    SHORTCUT: tl.constexpr,
    PADDING: tl.constexpr,
    CS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """relu(scale y + shift + shortcut)."""
    wait_turn()
    network, pixel, c, inside, here = _tile(pixels, C, BLOCK)
    at = network * C + c
    scale, shift = tl.load(known + at), tl.load(known + networks * C + at)
    value = (
        tl.load(y + here, mask=inside, other=0.0).to(tl.float32) * scale[None, :]
        + shift[None, :]
    )
    if SHORTCUT == 1:
        value += tl.load(shortcut + here, mask=inside, other=0.0).to(tl.float32)
    if SHORTCUT == 2:  # every other pixel, padded channels
        column, row, image = pixel % W, (pixel // W) % H, pixel // (W * H)
        place = (
            network * pixels * 4 * CS
            + ((image * (2 * H) + 2 * row) * (2 * W) + 2 * column) * CS
        )
        source = c - PADDING
        used = inside & ((source >= 0) & (source < CS))[None, :]
        value += tl.load(
            shortcut + place[:, None] + source[None, :], mask=used, other=0.0
        ).to(tl.float32)
    tl.store(z + here, tl.maximum(value, 0.0).to(z.dtype.element_ty), mask=inside)


@Kernel
def _gate(
    dz,
    shortcut,
    active,
    y,
    known,
    result,
    partial,
    pixels,
    tiles,
    networks,
    SHORTCUT: tl.constexpr,
    ACTIVE: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums of the gradient that passes a ReLU, and of its products with y. With ACTIVE
    it is written as well.
    """
    wait_turn()
    network, _, c, inside, here = _tile(pixels, C, BLOCK)
    gradient = tl.load(dz + here, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(y + here, mask=inside, other=0.0).to(tl.float32)
    if SHORTCUT:
        gradient += tl.load(shortcut + here, mask=inside, other=0.0).to(tl.float32)
    if ACTIVE:
        gradient = tl.where(
            tl.load(active + here, mask=inside, other=0.0) > 0, gradient, 0.0
        )
        rounded = gradient.to(result.dtype.element_ty)
        tl.store(result + here, rounded, mask=inside)
        gradient = rounded.to(tl.float32)
    else:
        scale, shift = (
            tl.load(known + network * C + c),
            tl.load(known + (networks + network) * C + c),
        )
        gradient = tl.where(value * scale[None, :] + shift[None, :] > 0, gradient, 0.0)
    partial += (network * tiles + tl.program_id(0)) * (2 * C) + c
    tl.store(partial, tl.sum(gradient, 0))
    tl.store(partial + C, tl.sum(gradient * value, 0))


@Kernel
def _norm_input_gradient(
    gradient,
    y,
    known,
    factors,
    result,
    pixels,
    networks,
    GATED: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_turn()
    network, _, c, inside, here = _tile(pixels, C, BLOCK)
    at, size = network * C + c, networks * C
    a, b, constant = (
        tl.load(factors + at),
        tl.load(factors + size + at),
        tl.load(factors + 2 * size + at),
    )
    slope = tl.load(gradient + here, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(y + here, mask=inside, other=0.0).to(tl.float32)
    if not GATED:
        scale, shift = tl.load(known + at), tl.load(known + size + at)
        slope = tl.where(value * scale[None, :] + shift[None, :] > 0, slope, 0.0)
    found = slope * a[None, :] + value * b[None, :] + constant[None, :]
    tl.store(result + here, found.to(result.dtype.element_ty), mask=inside)


def statistics(
    partial: Tensor,
    count: int,
    gamma: Tensor,
    beta: Tensor,
    running_mean: Tensor,
    running_variance: Tensor,
) -> Tensor:
    """(4, K, C): scale, shift, mean, 1 / deviation of batch norm; the running
    statistics are moved.
    """
    networks, tiles, _, channels = partial.shape
    result = partial.new_empty(4, networks, channels)
    _statistics[(networks,)](
        partial,
        gamma,
        beta,
        running_mean,
        running_variance,
        result,
        tiles,
        count,
        networks,
        EPSILON=EPSILON,
        MOMENTUM=MOMENTUM,
        C=channels,
        BLOCK=4096 // channels,
        num_warps=8,
    )
    return result


def norm_gradient(partial: Tensor, count: int, known: Tensor) -> Tensor:
    """(5, K, C): the three factors that `norm_input_gradient` takes, the gradients of
    gamma and of beta.
    """
    networks, tiles, _, channels = partial.shape
    result = partial.new_empty(5, networks, channels)
    _norm_gradient[(networks,)](
        partial,
        known,
        result,
        tiles,
        count,
        networks,
        C=channels,
        BLOCK=4096 // channels,
        num_warps=8,
    )
    return result


def activate(y: Tensor, known: Tensor, shortcut: Tensor | None = None) -> Tensor:
    """relu(batch norm of y + shortcut): the shortcut as it is, or every other pixel of
    it with padded channels.
    """
    _, _, height, width, channels = y.shape
    grid, pixels, block = _cut(y)
    kind, z = (
        0 if shortcut is None else 1 if shortcut.shape == y.shape else 2,
        torch.empty_like(y),
    )
    narrow = shortcut.shape[4] if shortcut is not None else 0
    _activate[grid](
        y,
        known,
        shortcut,
        z,
        pixels,
        len(y),
        H=height,
        W=width,
        C=channels,
        SHORTCUT=kind,
        PADDING=(channels - narrow) // 2,
        CS=narrow,
        BLOCK=block,
        num_warps=4,
    )
    return z


def gate(
    dz: Tensor, shortcut: Tensor | None, active: Tensor | None, y: Tensor, known: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient dz + shortcut where the ReLU was open, and partial sums of it and of
    its products with y.

    `active` is what the ReLU gave. Without it, y says whether it was open, and
    `norm_input_gradient` gates dz.
    """
    grid, pixels, block = _cut(y)
    partial = y.new_empty((len(y), grid[0], 2, y.shape[4]), dtype=torch.float32)
    result = dz if active is None else torch.empty_like(y)
    _gate[grid](
        dz,
        shortcut,
        active,
        y,
        known,
        result,
        partial,
        pixels,
        grid[0],
        len(y),
        SHORTCUT=shortcut is not None,
        ACTIVE=active is not None,
        C=y.shape[4],
        BLOCK=block,
        num_warps=4,
    )
    return result, partial


def norm_input_gradient(
    gradient: Tensor, y: Tensor, known: Tensor, factors: Tensor, gated: bool
) -> Tensor:
    """Gradient by the values y before batch norm, of the gradient after it (`gated`),
    or after its ReLU.
    """
    (grid, pixels, block), result = _cut(y), torch.empty_like(y)
    _norm_input_gradient[grid](
        gradient,
        y,
        known,
        factors,
        result,
        pixels,
        len(y),
        GATED=gated,
        C=y.shape[4],
        BLOCK=block,
        num_warps=4,
    )
    return result


def _cut(y: Tensor) -> tuple[tuple[int, int], int, int]:
    """The grid of a kernel that only reads and writes, pixels of a network, and of a
    program: 16 KiB of bfloat16.
    """
    pixels, block = prod(y.shape[1:4]), 8192 // y.shape[4]
    return (triton.cdiv(pixels, block), len(y)), pixels, block

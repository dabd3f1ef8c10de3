"""Gradients of convolutions by their weights as Triton kernels. Images lie as in `convolutions.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rfdlc.training.networks.fused import cutting
from rfdlc.training.networks.fused.launching import Kernel, after_the_one_before


@Kernel
def _weight_gradient_rows(
    dy, x, partial, batch, sets,
    H: tl.constexpr, W: tl.constexpr, CX: tl.constexpr, CY: tl.constexpr,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, IMAGES: tl.constexpr,
):  # fmt: skip
    """Products of all pixels in groups with those in their windows: partial (K, programs, 3, GROUP * CY, window)."""
    after_the_one_before()
    part, network = tl.program_id(0), tl.program_id(1).to(tl.int64)
    across: tl.constexpr = W // GROUP
    m, k, n = tl.arange(0, IMAGES * across), tl.arange(0, WINDOW), tl.arange(0, GROUP * CY)
    dy += network * batch * (H * W * CY)
    x += network * batch * (H * W * CX)
    group = m % across
    column = group[:, None] * GROUP - 1 + k[None, :] // CX
    seen = (column >= 0) & (column < W) & (k[None, :] < (GROUP + 2) * CX)
    upper = tl.zeros((WINDOW, GROUP * CY), dtype=tl.float32)
    middle, lower = upper, upper
    for step in range(sets * H):
        row = step % H
        image = (part * sets + step // H) * IMAGES + m // across
        inside = (image < batch)[:, None]
        source = x + (image * (H * W) + row * W + group * GROUP - 1)[:, None] * CX + k[None, :]
        values = tl.trans(tl.load(source, mask=inside & seen, other=0.0))
        target = dy + (image * (H * W) + row * W + group * GROUP)[:, None] * CY + n[None, :]
        below = tl.load(target + W * CY, mask=inside & (row + 1 < H), other=0.0)
        upper = tl.dot(values, below, upper, input_precision="ieee")
        middle = tl.dot(values, tl.load(target, mask=inside, other=0.0), middle, input_precision="ieee")
        above = tl.load(target - W * CY, mask=inside & (row > 0), other=0.0)
        lower = tl.dot(values, above, lower, input_precision="ieee")
    size: tl.constexpr = WINDOW * GROUP * CY
    at = partial + (network * tl.num_programs(0) + part) * (3 * size) + n[:, None] * WINDOW + k[None, :]
    tl.store(at, tl.trans(upper))
    tl.store(at + size, tl.trans(middle))
    tl.store(at + 2 * size, tl.trans(lower))


@Kernel
def _gather_weight_gradient(
    partial, result, programs, count, CX: tl.constexpr, CY: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Sum over programs and over the pixels of a group: (K, CY, 9, CX)."""
    after_the_one_before()
    place, network = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    cx, tap, cy = place % CX, (place // CX) % 9, place // (9 * CX)
    size: tl.constexpr = WINDOW * GROUP * CY
    at = partial + network * programs * (3 * size) + (tap // 3) * size + cy * WINDOW + tap % 3 * CX + cx
    total = tl.zeros((AT_ONCE, BLOCK), dtype=tl.float32)
    for start in range(0, programs, AT_ONCE):
        program = start + tl.arange(0, AT_ONCE)
        known = (program < programs)[:, None] & (place < count)[None, :]
        for pixel in tl.static_range(GROUP):
            step = program[:, None] * (3 * size) + pixel * (CY * WINDOW + CX)
            total += tl.load(at[None, :] + step, mask=known, other=0.0)
    tl.store(result + network * count + place, tl.sum(total, 0), mask=place < count)


@Kernel
def _weight_gradient_tiles(
    dy, x, partial, pixels, share,
    H: tl.constexpr, W: tl.constexpr, HX: tl.constexpr, WX: tl.constexpr,
    CX: tl.constexpr, CX_BLOCK: tl.constexpr, CY: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of the kernel (three weights), over one share of the pixels: partial (K, splits, 3, CY, 3 * CX)."""
    after_the_one_before()
    split, down, network = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    cx, cy = tl.arange(0, CX_BLOCK), tl.arange(0, CY)
    dy += network * pixels * CY
    x += network * (pixels // (H * W)) * (HX * WX * CX)
    left = tl.zeros((CY, CX_BLOCK), dtype=tl.float32)
    middle, right = left, left
    end = tl.minimum((split + 1) * share, pixels)
    for start in range(split * share, end, BLOCK):
        pixel = start + tl.arange(0, BLOCK)
        inside = pixel < end
        column, row, image = pixel % W, (pixel // W) % H, pixel // (W * H)
        gradient = tl.trans(tl.load(dy + (pixel * CY)[:, None] + cy[None, :], mask=inside[:, None], other=0.0))
        r = row * STRIDE + down - 1
        known = inside & (r >= 0) & (r < HX)
        first = column * STRIDE - 1
        at = x + (((image * HX + r) * WX + first) * CX)[:, None] + cx[None, :]
        used = (cx < CX)[None, :]
        values = tl.load(at, mask=(known & (first >= 0))[:, None] & used, other=0.0)
        left = tl.dot(gradient, values, left, input_precision="ieee")
        values = tl.load(at + CX, mask=known[:, None] & used, other=0.0)
        middle = tl.dot(gradient, values, middle, input_precision="ieee")
        values = tl.load(at + 2 * CX, mask=(known & (first + 2 < WX))[:, None] & used, other=0.0)
        right = tl.dot(gradient, values, right, input_precision="ieee")
    at = partial + (network * tl.num_programs(0) + split) * (9 * CX * CY) + down * (3 * CX * CY)
    at += cy[:, None] * (3 * CX) + cx[None, :]
    used = (cx < CX)[None, :]
    tl.store(at, left, mask=used)
    tl.store(at + CX, middle, mask=used)
    tl.store(at + 2 * CX, right, mask=used)


# -- the function that stages call -----------------------------------------------------------------------------


def weight_gradient(dy: Tensor, x: Tensor, stride: int) -> Tensor:
    """(K*outputs, C, 3, 3) in float32, channels last in memory."""
    networks, batch, height, width, channels = dy.shape
    inputs, shape = x.shape[4], {"H": height, "W": width, "CX": x.shape[4], "CY": channels}
    rows = cutting.GRADIENT_ROWS.get(channels)
    if stride == 1 and rows is not None and width % rows.group == 0:
        images = rows.images(width, networks * batch)
        sets = max(1, triton.cdiv(batch, images) * networks // rows.programs)
        programs, group, window = triton.cdiv(triton.cdiv(batch, images), sets), rows.group, rows.window(inputs)
        partial = x.new_empty((networks, programs, 3, group * channels, window), dtype=torch.float32)
        _weight_gradient_rows[(programs, networks)](
            dy, x, partial, batch, sets, **shape, GROUP=group, WINDOW=window, IMAGES=images,
            num_warps=rows.warps, num_stages=rows.ahead,
        )  # fmt: skip
    else:
        pixels, tiling, group, window = batch * height * width, cutting.GRADIENT_TILES[channels], 1, 3 * inputs
        programs = max(1, min(cutting.GRADIENT_PROGRAMS // (3 * networks), pixels // (4 * tiling.pixels)))
        share = triton.cdiv(triton.cdiv(pixels, programs), tiling.pixels) * tiling.pixels
        programs = triton.cdiv(pixels, share)
        partial = x.new_empty((networks, programs, 3, channels, window), dtype=torch.float32)
        _weight_gradient_tiles[(programs, 3, networks)](
            dy, x, partial, pixels, share, **shape, HX=x.shape[2], WX=x.shape[3], CX_BLOCK=max(16, inputs),
            STRIDE=stride, BLOCK=tiling.pixels, num_warps=tiling.warps, num_stages=tiling.ahead,
        )  # fmt: skip
    result, size = x.new_empty((networks * channels, 3, 3, inputs), dtype=torch.float32), 9 * inputs * channels
    _gather_weight_gradient[(triton.cdiv(size, 64), networks)](
        partial, result, programs, size, CX=inputs, CY=channels, GROUP=group, WINDOW=window, BLOCK=64, AT_ONCE=16
    )
    return result.permute(0, 3, 1, 2)

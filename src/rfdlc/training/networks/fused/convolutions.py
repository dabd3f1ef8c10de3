"""Convolutions of many small networks as Triton kernels, and their gradients by input. `plain.py` has both in torch.

Every program works on one network. Images lie networks first and channels last, (K, B, H, W, C), so that a tile of
pixels is one piece of memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rfdlc.training.networks.fused import cutting
from rfdlc.training.networks.fused.launching import Kernel, after_the_one_before


@triton.jit
def _window_weights(
    w, down: tl.constexpr, CX: tl.constexpr, CY: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Weights of one kernel row for GROUP neighbouring pixels at once: (window, GROUP * CY), zero where far."""
    k, n = tl.arange(0, WINDOW)[:, None], tl.arange(0, GROUP * CY)[None, :]
    right, cx, cy = k // CX - n // CY, k % CX, n % CY
    if TRANSPOSED:
        place = cx * (9 * CY) + (8 - 3 * down - right) * CY + cy
    else:
        place = cy * (9 * CX) + (3 * down + right) * CX + cx
    return tl.load(w + place, mask=(right >= 0) & (right < 3), other=0.0)


@Kernel
def _convolve_rows(
    x, w, y, partial, batch,
    H: tl.constexpr, W: tl.constexpr, CX: tl.constexpr, CY: tl.constexpr, TRANSPOSED: tl.constexpr,
    SUMS: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, IMAGES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A convolution of stride 1, or (TRANSPOSED) its gradient by the input, which is one too.

    A row of pixels is loaded once and enters three rows of results. GROUP neighbouring pixels are one row of the
    matrix product, which sees the window of GROUP + 2 pixels around them: some products are with zero, but a pixel
    is loaded (GROUP + 2) / GROUP times instead of nine.
    """
    after_the_one_before()
    part, network = tl.program_id(0), tl.program_id(1).to(tl.int64)
    parts: tl.constexpr = H // ROWS
    across: tl.constexpr = W // GROUP
    m, k, n = tl.arange(0, IMAGES * across), tl.arange(0, WINDOW), tl.arange(0, GROUP * CY)
    image, group = (part // parts) * IMAGES + m // across, m % across
    inside = image < batch
    start = (part % parts) * ROWS
    x += network * batch * (H * W * CX)
    y += network * batch * (H * W * CY)
    w += network * (9 * CX * CY)
    upper = _window_weights(w, 0, CX, CY, GROUP, WINDOW, TRANSPOSED)
    middle = _window_weights(w, 1, CX, CY, GROUP, WINDOW, TRANSPOSED)
    lower = _window_weights(w, 2, CX, CY, GROUP, WINDOW, TRANSPOSED)
    column = group[:, None] * GROUP - 1 + k[None, :] // CX
    seen = inside[:, None] & (column >= 0) & (column < W) & (k[None, :] < (GROUP + 2) * CX)
    source = x + (image * (H * W) + group * GROUP - 1)[:, None] * CX + k[None, :]
    target = y + (image * (H * W) + group * GROUP)[:, None] * CY + n[None, :]
    last = tl.zeros((IMAGES * across, GROUP * CY), dtype=tl.float32)
    this, first, second = last, last, last
    for step in range(ROWS + 2):
        row = start + step - 1
        values = tl.load(source + row * (W * CX), mask=seen & (row >= 0) & (row < H), other=0.0)
        total = tl.dot(values, lower, last, input_precision="ieee")
        last = tl.dot(values, middle, this, input_precision="ieee")
        this = tl.dot(values, upper, input_precision="ieee")
        result = total.to(y.dtype.element_ty)
        tl.store(target + (row - 1) * (W * CY), result, mask=inside[:, None] & (step >= 2))
        if SUMS:
            total = tl.where(step >= 2, result.to(tl.float32), 0.0)
            first += total
            second += total * total
    if SUMS:
        partial += (network * tl.num_programs(0) + part) * (2 * CY) + tl.arange(0, CY)
        tl.store(partial, tl.sum(tl.reshape(tl.sum(first, 0), (GROUP, CY)), 0))
        tl.store(partial + CY, tl.sum(tl.reshape(tl.sum(second, 0), (GROUP, CY)), 0))


@Kernel
def _convolve_tiles(
    x, w, y, partial, shortcut, pixels, tiles,
    H: tl.constexpr, W: tl.constexpr, HX: tl.constexpr, WX: tl.constexpr,
    CX: tl.constexpr, CX_BLOCK: tl.constexpr, CY: tl.constexpr, STRIDE: tl.constexpr, TRANSPOSED: tl.constexpr,
    SHORTCUT: tl.constexpr, SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Any convolution, or (TRANSPOSED) its gradient by the input: a sum over the nine weights for a tile of pixels.

    A pixel of the gradient of a strided convolution sees few of the nine: which ones depends on whether row and
    column are even, so that a program has pixels of one kind alone.
    """
    after_the_one_before()
    tile, network, kind = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    STEP: tl.constexpr = STRIDE if TRANSPOSED else 1
    count = tile * BLOCK + tl.arange(0, BLOCK)
    inside = count < pixels // (STEP * STEP)
    row = (count // (W // STEP)) % (H // STEP) * STEP + kind // STEP
    column = count % (W // STEP) * STEP + kind % STEP
    image = count // (W // STEP * (H // STEP))
    pixel = (image * H + row) * W + column
    cx, cy = tl.arange(0, CX_BLOCK), tl.arange(0, CY)
    x += network * (pixels // (H * W)) * (HX * WX * CX)
    y += network * pixels * CY
    w += network * (9 * CX * CY)
    total = tl.zeros((BLOCK, CY), dtype=tl.float32)
    tall, wide = 3, 3
    if STEP == 2:
        tall, wide = 1 + kind // 2, 1 + kind % 2
    for tap in range(tall * wide):
        down, right = tap // wide, tap % wide
        if STEP == 2:  # an even place sees the middle of the kernel, an odd one both its ends
            down, right = tl.where(kind // 2 == 0, 1, 2 * down), tl.where(kind % 2 == 0, 1, 2 * right)
        at = down * 3 + right
        if TRANSPOSED:
            r, c = (row + 1 - down) // STRIDE, (column + 1 - right) // STRIDE
            weights = tl.load(w + cx[:, None] * (9 * CY) + at * CY + cy[None, :])
        else:
            r, c = row * STRIDE + down - 1, column * STRIDE + right - 1
            weights = tl.load(w + cy[None, :] * (9 * CX) + at * CX + cx[:, None], mask=cx[:, None] < CX, other=0.0)
        known = inside & (r >= 0) & (c >= 0) & (r < HX) & (c < WX)
        place = ((image * HX + r) * WX + c) * CX
        values = tl.load(x + place[:, None] + cx[None, :], mask=known[:, None] & (cx < CX)[None, :], other=0.0)
        total = tl.dot(values, weights, total, input_precision="ieee")
    if SHORTCUT:  # of CX channels, the middle CY of which were not padding
        shortcut += network * (pixels // (H * W)) * (HX * WX * CX) + (CX - CY) // 2
        place = ((image * HX + row // STRIDE) * WX + column // STRIDE) * CX
        around = tl.load(shortcut + place[:, None] + cy[None, :], mask=inside[:, None] & (kind == 0), other=0.0)
        total += around.to(tl.float32)
    result = total.to(y.dtype.element_ty)
    tl.store(y + (pixel * CY)[:, None] + cy[None, :], result, mask=inside[:, None])
    if SUMS:
        total = tl.where(inside[:, None], result.to(tl.float32), 0.0)
        partial += (network * tiles + tile) * (2 * CY) + cy
        tl.store(partial, tl.sum(total, 0))
        tl.store(partial + CY, tl.sum(total * total, 0))


# -- the functions that stages call ----------------------------------------------------------------------------


def convolve(x: Tensor, weight: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """(K, B, H, W, C) with weights (K*outputs, C, 3, 3), channels last in memory and of the same type.

    The values, and partial sums (K, programs, 2, outputs) of them and of their squares.
    """
    networks, batch, height, width, _ = x.shape
    y = x.new_empty(networks, batch, height // stride, width // stride, len(weight) // networks)
    return y, _convolve(x, weight, y, stride, False)


def input_gradient(dy: Tensor, weight: Tensor, stride: int, shortcut: Tensor | None = None) -> Tensor:
    """Gradient by the input of `convolve`.

    With stride 2, a `shortcut` that took every other pixel and padded channels adds its gradient, of the shape of dy.
    """
    networks, batch, height, width, _ = dy.shape
    dx = dy.new_empty(networks, batch, height * stride, width * stride, weight.shape[1])
    _convolve(dy, weight, dx, stride, True, shortcut)
    return dx


def _convolve(
    x: Tensor, weight: Tensor, y: Tensor, stride: int, transposed: bool, shortcut: Tensor | None = None
) -> Tensor:
    networks, batch, height, width, channels = y.shape
    inputs, sums = x.shape[4], not transposed
    rows = cutting.ROWS.get(channels)
    if stride == 1 and rows is not None and width % rows.group == 0:
        images = rows.images(width, networks * batch)
        parts = rows.parts(networks * triton.cdiv(batch, images), height)
        programs = triton.cdiv(batch, images) * parts
        partial = x.new_empty((networks, programs, 2, channels) if sums else 0, dtype=torch.float32)
        _convolve_rows[(programs, networks)](
            x, weight, y, partial, batch, H=height, W=width, CX=inputs, CY=channels, TRANSPOSED=transposed, SUMS=sums,
            GROUP=rows.group, WINDOW=rows.window(inputs), IMAGES=images, ROWS=height // parts,
            num_warps=rows.warps, num_stages=rows.ahead,
        )  # fmt: skip
        return partial
    tiling, step, pixels = cutting.TILES[channels], stride if transposed else 1, batch * height * width
    tiles = triton.cdiv(pixels // step**2, tiling.pixels)
    partial = x.new_empty((networks, tiles, 2, channels) if sums else 0, dtype=torch.float32)
    _convolve_tiles[(tiles, networks, step**2)](
        x, weight, y, partial, shortcut, pixels, tiles, H=height, W=width, HX=x.shape[2], WX=x.shape[3],
        CX=inputs, CX_BLOCK=max(16, inputs), CY=channels, STRIDE=stride, TRANSPOSED=transposed, SUMS=sums,
        SHORTCUT=shortcut is not None, BLOCK=tiling.pixels, num_warps=tiling.warps, num_stages=tiling.ahead,
    )  # fmt: skip
    return partial

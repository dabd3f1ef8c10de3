"""Convolutions of many small networks as Triton kernels, and their gradients.

Every program works on one network. Images lie networks first and channels last, (K, B,
H, W, C), so that a tile of pixels is one piece of memory.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rfdlc.training.networks.fused.launching import Kernel, wait_turn


@triton.jit
def _window_weights(
    w,
    down: tl.constexpr,
    CX: tl.constexpr,
    CY: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Weights of one kernel row for GROUP neighbouring pixels at once: (window, GROUP *
    CY), zero where far.
    """
    k, n = tl.arange(0, WINDOW)[:, None], tl.arange(0, GROUP * CY)[None, :]
    right, cx, cy = k // CX - n // CY, k % CX, n % CY
    if TRANSPOSED:
        place = cx * (9 * CY) + (8 - 3 * down - right) * CY + cy
    else:
        place = cy * (9 * CX) + (3 * down + right) * CX + cx
    return tl.load(w + place, mask=(right >= 0) & (right < 3), other=0.0)


@Kernel
def _convolve_rows(
    x,
    w,
    y,
    partial,
    batch,
    H: tl.constexpr,
    W: tl.constexpr,
    CX: tl.constexpr,
    CY: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SUMS: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    IMAGES: tl.constexpr,
    TALL: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A convolution of stride 1, or (TRANSPOSED) its gradient by the input, which is
    one too.

    A row of pixels is loaded once and enters three rows of results. GROUP neighbouring
    pixels are one row of the matrix product, which sees the window of GROUP + 2 pixels
    around them: some products are with zero, but a pixel is loaded (GROUP + 2) / GROUP
    times instead of nine.
    """
    wait_turn()
    part, network = tl.program_id(0), tl.program_id(1).to(tl.int64)
    parts: tl.constexpr = H // ROWS
    across: tl.constexpr = W // GROUP
    m, k, n = tl.arange(0, TALL), tl.arange(0, WINDOW), tl.arange(0, GROUP * CY)
    image, group = (part // parts) * IMAGES + m // across, m % across
    inside = (image < batch) & (m < IMAGES * across)
    start = (part % parts) * ROWS
    x += network * batch * (H * W * CX)
    y += network * batch * (H * W * CY)
    w += network * (9 * CX * CY)
    upper = _window_weights(w, 0, CX, CY, GROUP, WINDOW, TRANSPOSED)
    middle = _window_weights(w, 1, CX, CY, GROUP, WINDOW, TRANSPOSED)
    lower = _window_weights(w, 2, CX, CY, GROUP, WINDOW, TRANSPOSED)
    column = group[:, None] * GROUP - 1 + k[None, :] // CX
    seen = (
        inside[:, None] & (column >= 0) & (column < W) & (k[None, :] < (GROUP + 2) * CX)
    )
    source = x + (image * (H * W) + group * GROUP - 1)[:, None] * CX + k[None, :]
    target = y + (image * (H * W) + group * GROUP)[:, None] * CY + n[None, :]
    last = tl.zeros((TALL, GROUP * CY), dtype=tl.float32)
    this, first, second = last, last, last
    for step in range(ROWS + 2):
        row = start + step - 1
        values = tl.load(
            source + row * (W * CX), mask=seen & (row >= 0) & (row < H), other=0.0
        )
        total = tl.dot(values, lower, last, input_precision="ieee")
        last = tl.dot(values, middle, this, input_precision="ieee")
        this = tl.dot(values, upper, input_precision="ieee")
        result = total.to(y.dtype.element_ty)
        tl.store(
            target + (row - 1) * (W * CY), result, mask=inside[:, None] & (step >= 2)
        )
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
    x,
    w,
    y,
    partial,
    shortcut,
    pixels,
    tiles,
    H: tl.constexpr,
    W: tl.constexpr,
    HX: tl.constexpr,
    WX: tl.constexpr,
    CX: tl.constexpr,
    CX_BLOCK: tl.constexpr,
    CY: tl.constexpr,
    STRIDE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SHORTCUT: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Any convolution, or (TRANSPOSED) its gradient by the input: a sum over the nine
    weights for a tile of pixels.

    A pixel of the gradient of a strided convolution sees few of the nine: which ones
    depends on whether row and column are even, so that a program has pixels of one kind
    alone.
    """
    wait_turn()
    tile, network, kind = (
        tl.program_id(0),
        tl.program_id(1).to(tl.int64),
        tl.program_id(2),
    )
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
        if (
            STEP == 2
        ):  # an even place sees the middle of the kernel, an odd one both its ends
            down, right = (
                tl.where(kind // 2 == 0, 1, 2 * down),
                tl.where(kind % 2 == 0, 1, 2 * right),
            )
        at = down * 3 + right
        if TRANSPOSED:
            r, c = (row + 1 - down) // STRIDE, (column + 1 - right) // STRIDE
            weights = tl.load(w + cx[:, None] * (9 * CY) + at * CY + cy[None, :])
        else:
            r, c = row * STRIDE + down - 1, column * STRIDE + right - 1
            weights = tl.load(
                w + cy[None, :] * (9 * CX) + at * CX + cx[:, None],
                mask=cx[:, None] < CX,
                other=0.0,
            )
        known = inside & (r >= 0) & (c >= 0) & (r < HX) & (c < WX)
        place = ((image * HX + r) * WX + c) * CX
        values = tl.load(
            x + place[:, None] + cx[None, :],
            mask=known[:, None] & (cx < CX)[None, :],
            other=0.0,
        )
        total = tl.dot(values, weights, total, input_precision="ieee")
    if SHORTCUT:  # of CX channels, the middle CY of which were not padding
        shortcut += network * (pixels // (H * W)) * (HX * WX * CX) + (CX - CY) // 2
        place = ((image * HX + row // STRIDE) * WX + column // STRIDE) * CX
        around = tl.load(
            shortcut + place[:, None] + cy[None, :],
            mask=inside[:, None] & (kind == 0),
            other=0.0,
        )
        total += around.to(tl.float32)
    result = total.to(y.dtype.element_ty)
    tl.store(y + (pixel * CY)[:, None] + cy[None, :], result, mask=inside[:, None])
    if SUMS:
        total = tl.where(inside[:, None], result.to(tl.float32), 0.0)
        partial += (network * tiles + tile) * (2 * CY) + cy
        tl.store(partial, tl.sum(total, 0))
        tl.store(partial + CY, tl.sum(total * total, 0))


@Kernel
def _weight_gradient_rows(
    dy,
    x,
    partial,
    batch,
    sets,
    H: tl.constexpr,
    W: tl.constexpr,
    CX: tl.constexpr,
    CY: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    IMAGES: tl.constexpr,
    TALL: tl.constexpr,
):
    """Products of all pixels in groups with those in their windows: partial (K,
    programs, 3, GROUP * CY, window).
    """
    wait_turn()
    part, network = tl.program_id(0), tl.program_id(1).to(tl.int64)
    across: tl.constexpr = W // GROUP
    m, k, n = tl.arange(0, TALL), tl.arange(0, WINDOW), tl.arange(0, GROUP * CY)
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
        inside = ((image < batch) & (m < IMAGES * across))[:, None]
        source = (
            x
            + (image * (H * W) + row * W + group * GROUP - 1)[:, None] * CX
            + k[None, :]
        )
        values = tl.trans(tl.load(source, mask=inside & seen, other=0.0))
        target = (
            dy + (image * (H * W) + row * W + group * GROUP)[:, None] * CY + n[None, :]
        )
        below = tl.load(target + W * CY, mask=inside & (row + 1 < H), other=0.0)
        upper = tl.dot(values, below, upper, input_precision="ieee")
        middle = tl.dot(
            values,
            tl.load(target, mask=inside, other=0.0),
            middle,
            input_precision="ieee",
        )
        above = tl.load(target - W * CY, mask=inside & (row > 0), other=0.0)
        lower = tl.dot(values, above, lower, input_precision="ieee")
    size: tl.constexpr = WINDOW * GROUP * CY
    at = (
        partial
        + (network * tl.num_programs(0) + part) * (3 * size)
        + n[:, None] * WINDOW
        + k[None, :]
    )
    tl.store(at, tl.trans(upper))
    tl.store(at + size, tl.trans(middle))
    tl.store(at + 2 * size, tl.trans(lower))


@Kernel
def _gather_weight_gradient(
    partial,
    result,
    programs,
    count,
    CX: tl.constexpr,
    CY: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Sum over programs and over the pixels of a group: (K, CY, 9, CX)."""
    wait_turn()
    place, network = (
        tl.program_id(0) * BLOCK + tl.arange(0, BLOCK),
        tl.program_id(1).to(tl.int64),
    )
    cx, tap, cy = place % CX, (place // CX) % 9, place // (9 * CX)
    size: tl.constexpr = WINDOW * GROUP * CY
    at = (
        partial
        + network * programs * (3 * size)
        + (tap // 3) * size
        + cy * WINDOW
        + tap % 3 * CX
        + cx
    )
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
    dy,
    x,
    partial,
    pixels,
    share,
    H: tl.constexpr,
    W: tl.constexpr,
    HX: tl.constexpr,
    WX: tl.constexpr,
    CX: tl.constexpr,
    CX_BLOCK: tl.constexpr,
    CY: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row of the kernel (three weights), over one share of the pixels: partial (K,
    splits, 3, CY, 3 * CX).
    """
    wait_turn()
    split, down, network = (
        tl.program_id(0),
        tl.program_id(1),
        tl.program_id(2).to(tl.int64),
    )
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
        gradient = tl.trans(
            tl.load(
                dy + (pixel * CY)[:, None] + cy[None, :],
                mask=inside[:, None],
                other=0.0,
            )
        )
        r = row * STRIDE + down - 1
        known = inside & (r >= 0) & (r < HX)
        first = column * STRIDE - 1
        at = x + (((image * HX + r) * WX + first) * CX)[:, None] + cx[None, :]
        used = (cx < CX)[None, :]
        values = tl.load(at, mask=(known & (first >= 0))[:, None] & used, other=0.0)
        left = tl.dot(gradient, values, left, input_precision="ieee")
        values = tl.load(at + CX, mask=known[:, None] & used, other=0.0)
        middle = tl.dot(gradient, values, middle, input_precision="ieee")
        values = tl.load(
            at + 2 * CX, mask=(known & (first + 2 < WX))[:, None] & used, other=0.0
        )
        right = tl.dot(gradient, values, right, input_precision="ieee")
    at = (
        partial
        + (network * tl.num_programs(0) + split) * (9 * CX * CY)
        + down * (3 * CX * CY)
    )
    at += cy[:, None] * (3 * CX) + cx[None, :]
    used = (cx < CX)[None, :]
    tl.store(at, left, mask=used)
    tl.store(at + CX, middle, mask=used)
    tl.store(at + 2 * CX, right, mask=used)


# -- how a convolution is cut into programs: row by row of the images, or tile by tile
# of their pixels ----------------


class Rows(NamedTuple):
    group: int  # neighbouring pixels that are one row of the matrix product
    programs: int  # wanted, about
    warps: int
    ahead: int  # loads in flight
    tallest: int = (
        64  # rows of the matrix product: 64, or more where there are programs enough
    )

    def images(self, width: int, of: int) -> int:
        """Images that a program works on side by side, of all there are."""
        tall = 64
        while (
            tall < self.tallest
            and of * width // (2 * tall * self.group) >= self.programs
        ):
            tall *= 2
        return max(1, tall * self.group // width)

    def rows(self, width: int, images: int) -> int:
        """Rows of the matrix product: those of the images, and empty ones up to a power
        of two.
        """
        return triton.next_power_of_2(images * width // self.group)

    def parts(self, sets: int, height: int) -> int:
        """Into how many parts an image is cut, so that there are programs enough."""
        parts = 1
        while (
            sets * parts < self.programs
            and height // parts > 4
            and height % (2 * parts) == 0
        ):
            parts *= 2
        return parts

    def window(self, channels: int) -> int:
        """Values that a row of the product sees: group + 2 pixels, up to a power of two
        that hardware can multiply.
        """
        return max(16, triton.next_power_of_2((self.group + 2) * channels))


class Tiles(NamedTuple):
    pixels: int
    warps: int
    ahead: int


# By the channels made; chosen by measuring on an H200 (benchmarks/README.md)
ROWS = {16: Rows(2, 400, 4, 4), 32: Rows(2, 200, 4, 3)}
TILES = {16: Tiles(128, 4, 2), 32: Tiles(128, 4, 3), 64: Tiles(128, 4, 3)}
GRADIENT_ROWS = {
    16: Rows(2, 200, 4, 4, tallest=128),
    32: Rows(1, 200, 8, 4, tallest=128),
}
GRADIENT_TILES = {16: Tiles(64, 4, 2), 32: Tiles(64, 4, 2), 64: Tiles(64, 4, 2)}
GRADIENT_PROGRAMS = 512


def convolve(x: Tensor, weight: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """(K, B, H, W, C) by (K*outputs, C, 3, 3): values; partial sums (K, programs, 2,
    outputs) of them and squares.
    """
    networks, batch, height, width, _ = x.shape
    y = x.new_empty(
        networks, batch, height // stride, width // stride, len(weight) // networks
    )
    return y, _convolve(x, weight, y, stride)


def input_gradient(
    dy: Tensor, weight: Tensor, stride: int, shortcut: Tensor | None = None
) -> Tensor:
    """Gradient by the input of `convolve`, and by that of a `shortcut` that halved the
    size, of the shape of dy.
    """
    networks, batch, height, width, _ = dy.shape
    dx = dy.new_empty(networks, batch, height * stride, width * stride, weight.shape[1])
    _convolve(dy, weight, dx, stride, shortcut, transposed=True)
    return dx


def _convolve(
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    stride: int,
    shortcut: Tensor | None = None,
    transposed: bool = False,
) -> Tensor:
    networks, batch, height, width, channels = y.shape
    sums, rows = not transposed, ROWS.get(channels)
    shape = {
        "H": height,
        "W": width,
        "CX": x.shape[4],
        "CY": channels,
        "TRANSPOSED": transposed,
        "SUMS": sums,
    }
    if stride == 1 and rows is not None and width % rows.group == 0:
        images = rows.images(width, networks * batch)
        parts = rows.parts(networks * triton.cdiv(batch, images), height)
        programs = triton.cdiv(batch, images) * parts
        partial = x.new_empty(
            (networks, programs, 2, channels) if sums else 0, dtype=torch.float32
        )
        _convolve_rows[(programs, networks)](
            x,
            weight,
            y,
            partial,
            batch,
            **shape,
            GROUP=rows.group,
            WINDOW=rows.window(x.shape[4]),
            IMAGES=images,
            TALL=rows.rows(width, images),
            ROWS=height // parts,
            num_warps=rows.warps,
            num_stages=rows.ahead,
        )
        return partial
    tiling, step, pixels = (
        TILES[channels],
        stride if transposed else 1,
        batch * height * width,
    )
    tiles = triton.cdiv(pixels // step**2, tiling.pixels)
    partial = x.new_empty(
        (networks, tiles, 2, channels) if sums else 0, dtype=torch.float32
    )
    _convolve_tiles[(tiles, networks, step**2)](
        x,
        weight,
        y,
        partial,
        shortcut,
        pixels,
        tiles,
        **shape,
        HX=x.shape[2],
        WX=x.shape[3],
        STRIDE=stride,
        CX_BLOCK=max(16, x.shape[4]),
        SHORTCUT=shortcut is not None,
        BLOCK=tiling.pixels,
        num_warps=tiling.warps,
        num_stages=tiling.ahead,
    )
    return partial


def weight_gradient(dy: Tensor, x: Tensor, stride: int) -> Tensor:
    """(K*outputs, C, 3, 3) in float32, channels last in memory."""
    networks, batch, height, width, channels = dy.shape
    inputs, shape = (
        x.shape[4],
        {"H": height, "W": width, "CX": x.shape[4], "CY": channels},
    )
    rows = GRADIENT_ROWS.get(channels)
    if stride == 1 and rows is not None and width % rows.group == 0:
        images = rows.images(width, networks * batch)
        sets = max(1, triton.cdiv(batch, images) * networks // rows.programs)
        programs, group, window = (
            triton.cdiv(triton.cdiv(batch, images), sets),
            rows.group,
            rows.window(inputs),
        )
        partial = x.new_empty(
            (networks, programs, 3, group * channels, window), dtype=torch.float32
        )
        _weight_gradient_rows[(programs, networks)](
            dy,
            x,
            partial,
            batch,
            sets,
            **shape,
            GROUP=group,
            WINDOW=window,
            IMAGES=images,
            TALL=rows.rows(width, images),
            num_warps=rows.warps,
            num_stages=rows.ahead,
        )
    else:
        pixels, tiling, group, window = (
            batch * height * width,
            GRADIENT_TILES[channels],
            1,
            3 * inputs,
        )
        programs = max(
            1, min(GRADIENT_PROGRAMS // (3 * networks), pixels // (4 * tiling.pixels))
        )
        share = (
            triton.cdiv(triton.cdiv(pixels, programs), tiling.pixels) * tiling.pixels
        )
        programs = triton.cdiv(pixels, share)
        partial = x.new_empty(
            (networks, programs, 3, channels, window), dtype=torch.float32
        )
        _weight_gradient_tiles[(programs, 3, networks)](
            dy,
            x,
            partial,
            pixels,
            share,
            **shape,
            HX=x.shape[2],
            WX=x.shape[3],
            CX_BLOCK=max(16, inputs),
            STRIDE=stride,
            BLOCK=tiling.pixels,
            num_warps=tiling.warps,
            num_stages=tiling.ahead,
        )
    result, size = (
        x.new_empty((networks * channels, 3, 3, inputs), dtype=torch.float32),
        9 * inputs * channels,
    )
    _gather_weight_gradient[(triton.cdiv(size, 64), networks)](
        partial,
        result,
        programs,
        size,
        CX=inputs,
        CY=channels,
        GROUP=group,
        WINDOW=window,
        BLOCK=64,
        AT_ONCE=16,
    )
    return result.permute(0, 3, 1, 2)

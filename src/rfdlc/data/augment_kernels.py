"""Random operations and affine maps of images on a GPU, a program per image: what
`policy.py` and `augment.py` compute.

There, each operation is computed for every image and kept where it was drawn, in dozens
of passes over memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rfdlc.data.policy import GREY, OPERATIONS

LARGEST = 4096  # pixels of an image, which a program holds in registers
BRIGHTNESS = tl.constexpr(OPERATIONS.index("brightness"))
CONTRAST = tl.constexpr(OPERATIONS.index("contrast"))
POSTERISE = tl.constexpr(OPERATIONS.index("posterise"))
SOLARISE = tl.constexpr(OPERATIONS.index("solarise"))
INVERT = tl.constexpr(OPERATIONS.index("invert"))
AUTOCONTRAST = tl.constexpr(OPERATIONS.index("autocontrast"))
EQUALISE = tl.constexpr(OPERATIONS.index("equalise"))
SATURATION = tl.constexpr(OPERATIONS.index("saturation"))
SHARPNESS = tl.constexpr(OPERATIONS.index("sharpness"))
RED, GREEN, BLUE = (tl.constexpr(share) for share in GREY)


@triton.jit
def _grey(source, inside, pixels: tl.constexpr, C: tl.constexpr):
    """Luminance of three channels, the mean of others."""
    grey = tl.load(source, mask=inside, other=0).to(tl.float32)
    if C == 3:
        grey = RED * grey + GREEN * tl.load(source + pixels, mask=inside, other=0).to(
            tl.float32
        )
        return grey + BLUE * tl.load(source + 2 * pixels, mask=inside, other=0).to(
            tl.float32
        )
    for c in tl.static_range(1, C):
        grey += tl.load(source + c * pixels, mask=inside, other=0).to(tl.float32)
    return grey / C


@triton.jit
def _smooth(source, value, pixel, inside, H: tl.constexpr, W: tl.constexpr):
    """The mean of a pixel (weight 5) and its neighbours (1); pixels at the edge stay as
    they are.
    """
    row, column = pixel // W, pixel % W
    inner = inside & (row > 0) & (row < H - 1) & (column > 0) & (column < W - 1)
    total = 4 * value
    for down in tl.static_range(-1, 2):
        for right in tl.static_range(-1, 2):
            total += tl.load(source + down * W + right, mask=inner, other=0).to(
                tl.float32
            )
    return tl.where(inner, total / 13, value)


@triton.jit
def _equalised(level, inside, pixels: tl.constexpr, PIXELS: tl.constexpr):
    """Values by how many pixels have smaller ones, in whole numbers; `level` (PIXELS,)
    is 0 where nothing is.
    """
    values = tl.arange(0, 256)
    counts = tl.histogram(level, 256) - tl.where(values == 0, PIXELS - pixels, 0)
    last = tl.max(tl.where(counts > 0, values, 0), 0)
    step = (pixels - tl.sum(tl.where(values == last, counts, 0), 0)) // 255
    before = tl.cumsum(counts, 0) - counts
    table = tl.where(step > 0, (before + step // 2) // tl.maximum(step, 1), values)
    return tl.gather(table, level, 0).to(tl.float32)


@triton.jit
def _recolour(
    images,
    operations,
    strengths,
    results,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    PIXELS: tl.constexpr,
):
    image, pixel = tl.program_id(0).to(tl.int64), tl.arange(0, PIXELS)
    operation, strength = tl.load(operations + image), tl.load(strengths + image)
    pixels: tl.constexpr = H * W
    inside, blend = pixel < pixels, 0.9 * strength
    images += image * (C * pixels) + pixel
    results += image * (C * pixels) + pixel
    grey = tl.zeros((PIXELS,), dtype=tl.float32)
    if (operation == SATURATION) | (operation == CONTRAST):
        grey += _grey(images, inside, pixels, C)
    if operation == CONTRAST:  # towards the mean of the image
        grey = tl.zeros((PIXELS,), dtype=tl.float32) + tl.sum(grey, 0) / pixels
    for c in tl.static_range(C):
        source = images + c * pixels
        level = tl.load(source, mask=inside, other=0).to(tl.int32)
        value = level.to(tl.float32)
        new = value
        if operation == BRIGHTNESS:
            new = value - blend * value
        if (operation == SATURATION) | (operation == CONTRAST):
            new = value + blend * (grey - value)
        if operation == POSTERISE:  # from 8 bits down to 4
            bits = tl.floor(4 * tl.abs(strength) + 0.5).to(tl.int32)
            new = ((level >> bits) << bits).to(tl.float32)
        if operation == SOLARISE:
            new = tl.where(value >= 256 * (1 - tl.abs(strength)), 255 - value, value)
        if operation == INVERT:
            new = 255 - value
        if operation == AUTOCONTRAST:
            low, high = tl.min(tl.where(inside, value, 255.0), 0), tl.max(value, 0)
            new = tl.where(
                high > low,
                (value - low) * tl.div_rn(255.0, tl.maximum(high - low, 1.0)),
                value,
            )
        if operation == EQUALISE:
            new = _equalised(level, inside, pixels, PIXELS)
        if operation == SHARPNESS:
            new = value + blend * (_smooth(source, value, pixel, inside, H, W) - value)
        found = tl.minimum(tl.maximum(tl.floor(new + 0.5), 0.0), 255.0)
        tl.store(results + c * pixels, found.to(tl.uint8), mask=inside)


@triton.jit
def _axis(line, offset, x, y, LENGTH: tl.constexpr):
    """The source of each pixel along one axis, and whether it is inside of the image
    and of the crop.
    """
    sloped = tl.load(line) * x + (tl.load(line + 1) * y + tl.load(line + 2))
    shift = tl.load(offset)
    place = sloped + (LENGTH / 2 + shift)
    half = tl.maximum((LENGTH - tl.abs(shift)) / 2, 1e-6)
    return tl.floor(place).to(tl.int32), tl.abs(sloped + shift / 2) < half


@triton.jit
def _nearest(
    images,
    matrices,
    offsets,
    results,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    PIXELS: tl.constexpr,
):
    image, pixel = tl.program_id(0).to(tl.int64), tl.arange(0, PIXELS)
    y, x = (
        (pixel // W).to(tl.float32) - (H - 1) / 2,
        (pixel % W).to(tl.float32) - (W - 1) / 2,
    )
    row, in_rows = _axis(matrices + image * 6 + 3, offsets + image * 2, x, y, H)
    column, in_columns = _axis(matrices + image * 6, offsets + image * 2 + 1, x, y, W)
    there, inside = in_rows & in_columns, pixel < H * W
    source = images + image * (C * H * W) + row * W + column
    for c in tl.static_range(C):
        value = tl.load(source + c * (H * W), mask=there & inside, other=0)
        tl.store(results + (image * C + c) * (H * W) + pixel, value, mask=inside)


def recolour(images: Tensor, operation: Tensor, strength: Tensor) -> Tensor:
    """One colour operation on each image: bytes (B, C, H, W), numbers and strengths
    (B,).
    """
    return _by_image(_recolour, images, operation, strength)


def nearest(images: Tensor, matrix: Tensor, offset: Tensor) -> Tensor:
    """Bytes (B, C, H, W), cropped at `offset` (B, 2) and then seen through `matrix` (B,
    2, 3).
    """
    return _by_image(_nearest, images, matrix, offset)


def _by_image(kernel: triton.JITFunction, images: Tensor, *given: Tensor) -> Tensor:
    (count, channels, height, width), results = images.shape, torch.empty_like(images)
    pixels = triton.next_power_of_2(height * width)
    tensors = [tensor.contiguous() for tensor in (images, *given)]
    kernel[(count,)](
        *tensors,
        results,
        C=channels,
        H=height,
        W=width,
        PIXELS=pixels,
        num_warps=min(8, -(-pixels // 256)),
    )
    return results

"""Affine maps of batches: (B, 2, 3), from a place in the result to the place it shows, in pixels from the centre."""

import torch
from torch import Tensor
from torch.nn import functional


def affine(a: Tensor, b: Tensor, c: Tensor, d: Tensor, x: Tensor | None = None, y: Tensor | None = None) -> Tensor:
    """Matrices (B, 2, 3) with rows (a, b, x) and (c, d, y), each entry (B,)."""
    zero = torch.zeros_like(a)
    rows = (a, b, zero if x is None else x), (c, d, zero if y is None else y)
    return torch.stack([torch.stack(row, 1) for row in rows], 1)


def compose(outer: Tensor, inner: Tensor) -> Tensor:
    """Apply `inner` (B, 2, 3) to a place first, then `outer`; elementwise, since TF32 products would be too coarse."""
    linear = (outer[:, :, :2, None] * inner[:, None, :, :]).sum(2)  # (B, 2, 3)
    return torch.cat([linear[..., :2], linear[..., 2:] + outer[..., 2:]], 2)


def nearest(images: Tensor, matrix: Tensor, offset: Tensor) -> Tensor:
    """Images (B, C, H, W) of any type, cropped and then seen through `matrix` (B, 2, 3), by one gather.

    The crop has the size of the image and lies `offset` (B, 2) pixels below and to the right of it; what is outside of
    the image or of the crop is zero. Each image needs H * W indices; products and sums are kept apart from
    comparisons, which a CPU is slow to broadcast.
    """
    height, width = images.shape[-2:]
    row, down = _axis(matrix[:, 1], height, width, offset[:, 0], height)
    column, right = _axis(matrix[:, 0], height, width, offset[:, 1], width)
    inside = torch.maximum(down.abs_(), right.abs_()) < 1  # (B, H, W)
    index = row.floor_().mul_(width).add_(column.floor_()).clamp_(0, height * width - 1).long()
    pixels = images.flatten(2).gather(2, index.flatten(1)[:, None].expand(-1, images.shape[1], -1))
    return pixels.view_as(images) * inside[:, None]


def _axis(line: Tensor, height: int, width: int, offset: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Where each pixel of the result comes from along one axis, (B, H, W) each: the place in the image from its edge,
    and the place from the middle of what image and crop share, which is inside of that between -1 and 1.
    """
    half = ((length - offset.abs()) / 2).clamp(min=1e-6)
    place = _sum(line, height, width, length / 2 + offset)
    return place, _sum(line / half[:, None], height, width, offset / (2 * half))


def _sum(line: Tensor, height: int, width: int, constant: Tensor) -> Tensor:
    """line[0] x + line[1] y + line[2] + constant, x and y in pixels from the centre: (B, H, W)."""
    x = torch.arange(width, device=line.device, dtype=line.dtype) - (width - 1) / 2
    y = torch.arange(height, device=line.device, dtype=line.dtype) - (height - 1) / 2
    rows = line[:, 1, None] * y + (line[:, 2] + constant)[:, None]  # (B, H)
    return (line[:, 0, None] * x)[:, None, :] + rows[:, :, None]


def bilinear(images: Tensor, matrix: Tensor) -> Tensor:
    """Images (B, C, H, W) of floats seen through `matrix` (B, 2, 3), interpolated; zero where nothing is."""
    height, width = images.shape[-2:]
    zero = torch.zeros_like(matrix[:, 0, 0])
    grid = torch.stack([_sum(matrix[:, i] * (2 / n), height, width, zero) for i, n in enumerate((width, height))], 3)
    return functional.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)

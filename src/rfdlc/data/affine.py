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


def warp(images: Tensor, matrix: Tensor, interpolation: str) -> Tensor:
    """Images (B, C, H, W) seen through `matrix` (B, 2, 3), in pixels from the centre; zero where nothing is."""
    height, width = images.shape[-2:]
    x = torch.arange(width, device=images.device, dtype=images.dtype) - (width - 1) / 2
    y = torch.arange(height, device=images.device, dtype=images.dtype) - (height - 1) / 2
    scaled = torch.stack([matrix[:, 0] * (2 / width), matrix[:, 1] * (2 / height)], 1)
    down = scaled[:, None, :, 1] * y[:, None] + scaled[:, None, :, 2]  # (B, H, 2)
    grid = scaled[:, None, None, :, 0] * x[:, None] + down[:, :, None]  # (B, H, W, 2), from -1 to 1
    return functional.grid_sample(images, grid, mode=interpolation, padding_mode="zeros", align_corners=False)

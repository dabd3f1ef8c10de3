"""Augmentation of whole batches on the device: crop, flip and rotation as one sampling of the pixels.

Random numbers are drawn apart from their use: `draw` gives the parameters of many images at once, `augment(images,
draws)` is a pure function of tensors without any wait for the device, and may be captured in a CUDA graph.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rfdlc.data.affine import affine, bilinear, compose, nearest
from rfdlc.data.policy import Policy
from rfdlc.errors import InputError, choose

Draws = dict[str, Tensor]  # what was drawn for n images: tensors (n, ...)


@dataclass(frozen=True)
class Augment:
    """Random crop of the zero-padded image, horizontal flip, rotation up to +-`rotation` degrees, in this order.

    Pixels that come in from outside are zero (black). Of a `policy` of random operations, those on colours act first
    and those on places between flip and rotation; last, `cutout` blacks out a square of that side. The defaults change
    nothing; `Augment.paper()` is what CIFAR-LT is trained with.
    """

    crop_padding: int = 0
    flip: bool = False
    rotation: float = 0.0
    interpolation: str = "nearest"
    cutout: int = 0
    policy: Policy | None = None

    def __post_init__(self) -> None:
        choose("interpolation", self.interpolation, ("nearest", "bilinear"))
        if self.crop_padding < 0 or not 0 <= self.rotation <= 180:
            raise InputError(
                f"crop_padding {self.crop_padding} and rotation {self.rotation} must be 0 or larger, rotation up to 180"
            )

    @classmethod
    def paper(cls) -> "Augment":
        """Crop with 4 pixels of padding, flip, rotation up to 15 degrees: the paper's setting for CIFAR-LT."""
        return cls(crop_padding=4, flip=True, rotation=15.0)

    def draw(self, count: int, generator: torch.Generator) -> Draws:
        """Parameters for `count` images, on the generator's device."""
        device = generator.device
        draws: Draws = {}
        if self.crop_padding:
            places = 2 * self.crop_padding + 1
            draws["crop"] = torch.randint(places, (count, 2), generator=generator, device=device)  # top, left
        if self.flip:
            draws["flip"] = torch.rand(count, generator=generator, device=device) < 0.5
        if self.rotation:
            share = torch.rand(count, generator=generator, device=device) * 2 - 1
            draws["angle"] = share * math.radians(self.rotation)  # counter-clockwise
        if self.policy is not None:
            draws |= self.policy.draw(count, generator)
        if self.cutout:
            draws["cutout"] = torch.rand((count, 2), generator=generator, device=device)  # centre, as a share
        return draws

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        """uint8 (B, C, H, W) and their draws -> (B, C, H, W), still on the scale 0..255; uint8 unless interpolated."""
        pixels = images if self.policy is None else self.policy.recolour(images.float(), draws)
        if draws.keys() & {"crop", "flip", "angle", "operation"}:
            pixels = self._sampled(pixels, draws)
        return _cut_out(pixels, draws["cutout"], self.cutout) if self.cutout else pixels

    def _sampled(self, pixels: Tensor, draws: Draws) -> Tensor:
        """Crop, flip, policy and rotation as one sampling of the pixels."""
        matrix = self._matrix(draws, len(pixels), pixels.device, pixels.shape[-1])
        if self.interpolation == "bilinear":
            cropped = _cropped(pixels, draws["crop"], self.crop_padding) if self.crop_padding else pixels
            return bilinear(cropped.float(), matrix)
        offset = draws["crop"] - self.crop_padding if self.crop_padding else matrix.new_zeros(len(pixels), 2)
        return nearest(pixels, matrix, offset.to(matrix))

    def _matrix(self, draws: Draws, count: int, device: torch.device, width: int) -> Tensor:
        """(B, 2, 3): from a place in the result to the place in the crop it shows; flip, policy, rotation composed."""
        angle = draws["angle"] if self.rotation else torch.zeros(count, device=device)
        matrix = affine(angle.cos(), -angle.sin(), angle.sin(), angle.cos())
        if self.policy is not None:
            matrix = compose(self.policy.matrix(draws, width), matrix)
        if not self.flip:
            return matrix
        sign = torch.where(draws["flip"], -1.0, 1.0)
        return torch.stack([matrix[:, 0] * sign[:, None], matrix[:, 1]], 1)


def _cropped(images: Tensor, crop: Tensor, padding: int) -> Tensor:
    """Each image cut out of its zero-padded self at its own (top, left)."""
    height, width = images.shape[-2:]
    padded = functional.pad(images, (padding,) * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # (B, C, top, left, H, W): a view, no copy
    return windows[torch.arange(len(images), device=images.device), :, crop[:, 0], crop[:, 1]]


def _cut_out(pixels: Tensor, centre: Tensor, side: int) -> Tensor:
    """A black square around `centre` (B, 2), given as a share of height and width; it may reach over the edge."""
    height, width = pixels.shape[-2:]
    top = (centre[:, 0] * height).floor() - side // 2
    left = (centre[:, 1] * width).floor() - side // 2
    down = torch.arange(height, device=pixels.device) - top[:, None]  # (B, H)
    across = torch.arange(width, device=pixels.device) - left[:, None]  # (B, W)
    inside = ((down >= 0) & (down < side))[:, :, None] & ((across >= 0) & (across < side))[:, None, :]
    return pixels * ~inside[:, None]

"""A RandAugment-style policy: for each image a few random operations of one strength, on whole batches.

Geometric operations become one affine map (composed with flip and rotation, so that pixels are sampled once); colour
operations are computed for the batch and kept where they were drawn.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rfdlc.data.affine import affine, compose
from rfdlc.errors import InputError

GREY = (0.299, 0.587, 0.114)  # luminance of red, green, blue

# -- colour: pixels (B, C, H, W) on 0..255 and a signed strength (B, 1, 1, 1) in -1..1 -> pixels -----------------------


def _blend(pixels: Tensor, other: Tensor, strength: Tensor) -> Tensor:
    """Towards `other` (strength > 0) or away from it, by up to 90%."""
    return (pixels + 0.9 * strength * (other - pixels)).clamp(0, 255)


def _grey(pixels: Tensor) -> Tensor:
    if pixels.shape[1] != 3:
        return pixels.mean(1, keepdim=True)
    red, green, blue = pixels.unbind(1)
    return (GREY[0] * red + GREY[1] * green + GREY[2] * blue)[:, None]


def brightness(pixels: Tensor, strength: Tensor) -> Tensor:
    """Darker or brighter."""
    return _blend(pixels, torch.zeros_like(pixels), strength)


def contrast(pixels: Tensor, strength: Tensor) -> Tensor:
    """Towards the mean grey, or away from it."""
    return _blend(pixels, _grey(pixels).mean((2, 3), keepdim=True), strength)


def saturation(pixels: Tensor, strength: Tensor) -> Tensor:
    """Towards grey, or away from it."""
    return _blend(pixels, _grey(pixels), strength)


def posterise(pixels: Tensor, strength: Tensor) -> Tensor:
    """Fewer levels: from 8 bits a channel down to 4."""
    step = torch.exp2((4 * strength.abs()).round())
    return (pixels / step).floor() * step


def solarise(pixels: Tensor, strength: Tensor) -> Tensor:
    """Invert what is brighter than a threshold that falls from 256 to 0."""
    return torch.where(pixels >= 256 * (1 - strength.abs()), 255 - pixels, pixels)


COLOUR: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (brightness, contrast, saturation, posterise, solarise)

# -- geometry: a signed strength (B,) in -1..1 and the width -> an affine map (B, 2, 3) about the centre ---------------


def shear_x(strength: Tensor, width: int) -> Tensor:
    """Rows move against each other, by up to 0.3 pixels a row."""
    return affine(torch.ones_like(strength), 0.3 * strength, torch.zeros_like(strength), torch.ones_like(strength))


def shear_y(strength: Tensor, width: int) -> Tensor:
    """Columns move against each other, by up to 0.3 pixels a column."""
    return affine(torch.ones_like(strength), torch.zeros_like(strength), 0.3 * strength, torch.ones_like(strength))


def translate_x(strength: Tensor, width: int) -> Tensor:
    """Sideways by up to 0.3 of the width."""
    return shear_x(torch.zeros_like(strength), width) + _shift(0.3 * width * strength, torch.zeros_like(strength))


def translate_y(strength: Tensor, width: int) -> Tensor:
    """Up or down by as much."""
    return shear_x(torch.zeros_like(strength), width) + _shift(torch.zeros_like(strength), 0.3 * width * strength)


def rotate(strength: Tensor, width: int) -> Tensor:
    """By up to 30 degrees."""
    angle = strength * math.radians(30)
    return affine(angle.cos(), -angle.sin(), angle.sin(), angle.cos())


def _shift(x: Tensor, y: Tensor) -> Tensor:
    zero = torch.zeros_like(x)
    return affine(zero, zero, zero, zero, x, y)


GEOMETRY: tuple[Callable[[Tensor, int], Tensor], ...] = (shear_x, shear_y, translate_x, translate_y, rotate)


@dataclass(frozen=True)
class Policy:
    """`layers` random operations an image, each of a random strength up to `magnitude` (0 to 1)."""

    layers: int = 2
    magnitude: float = 0.5

    def __post_init__(self) -> None:
        if self.layers < 1 or not 0 < self.magnitude <= 1:
            raise InputError(
                f"a policy needs 1 or more layers and a magnitude in (0, 1], got {self.layers} and {self.magnitude}"
            )

    def draw(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Which operations, and how strong: (count, layers) each."""
        shape, device = (count, self.layers), generator.device
        operations = len(COLOUR) + len(GEOMETRY)
        strength = (torch.rand(shape, generator=generator, device=device) * 2 - 1) * self.magnitude
        return {
            "operation": torch.randint(operations, shape, generator=generator, device=device),
            "strength": strength,
        }

    def recolour(self, pixels: Tensor, draws: dict[str, Tensor]) -> Tensor:
        """The colour operations, layer by layer, on pixels (B, C, H, W)."""
        for layer in range(self.layers):
            operation = draws["operation"][:, layer, None, None, None]
            strength = draws["strength"][:, layer, None, None, None]
            for number, colour in enumerate(COLOUR):
                pixels = torch.where(operation == number, colour(pixels, strength), pixels)
        return pixels

    def matrix(self, draws: dict[str, Tensor], width: int) -> Tensor:
        """The geometric operations of all layers as one map (B, 2, 3)."""
        total = shear_x(torch.zeros_like(draws["strength"][:, 0]), width)
        for layer in range(self.layers):
            operation, strength = draws["operation"][:, layer], draws["strength"][:, layer]
            for number, move in enumerate(GEOMETRY, start=len(COLOUR)):
                # A strength of zero leaves every place where it is.
                total = compose(total, move(torch.where(operation == number, strength, 0.0), width))
        return total

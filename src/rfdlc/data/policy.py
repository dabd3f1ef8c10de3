"""Random operations on images, as RandAugment, TrivialAugment and AutoAugment draw
them: whole batches on the device.

Colours are bytes before and after each operation, as in pillow. Most operations replace
values of a channel by others, by a table (B, C, 256) that follows from the histogram of
the image: one gather applies them all.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rfdlc.data.kernels import load_kernels

Draws = dict[str, Tensor]  # what was drawn for n images: tensors (n, ...)
GREY = (0.299, 0.587, 0.114)  # luminance of red, green, blue
SIDES = 150 / 331  # by how much of its width AutoAugment shifts an image at most


# -- geometry: affine maps (B, 2, 3) from a place in the result to that in the source,
# in pixels from the centre -------
def _affine(*entries: Tensor) -> Tensor:
    """Matrices (B, 2, 3) from their six entries, row by row, each (B,)."""
    return torch.stack([torch.stack(row, 1) for row in (entries[:3], entries[3:])], 1)


def moved(
    strength: Tensor, across: float = 0, down: float = 0, x: float = 0, y: float = 0
) -> Tensor:
    """The identity with these multiples of the strength (B,): shear along both axes,
    and shift.
    """
    one = torch.ones_like(strength)
    return _affine(
        one, across * strength, x * strength, down * strength, one, y * strength
    )


def rotation(angle: Tensor) -> Tensor:
    """By angles (B,), counter-clockwise."""
    zero = torch.zeros_like(angle)
    return _affine(angle.cos(), -angle.sin(), zero, angle.sin(), angle.cos(), zero)


def compose(outer: Tensor, inner: Tensor) -> Tensor:
    """Apply `inner` (B, 2, 3) first, then `outer`; elementwise, because TF32 products
    would be too coarse.
    """
    linear = (outer[:, :, :2, None] * inner[:, None, :, :]).sum(2)  # (B, 2, 3)
    return torch.cat([linear[..., :2], linear[..., 2:] + outer[..., 2:]], 2)


# A signed strength (B,) in -1..1 and the width -> an affine map (B, 2, 3) about the
# centre.
GEOMETRY: dict[str, Callable[[Tensor, int], Tensor]] = {
    "shear sideways": lambda strength, width: moved(
        strength, across=0.3
    ),  # by up to 0.3 pixels per row
    "shear down": lambda strength, width: moved(strength, down=0.3),
    "shift sideways": lambda strength, width: moved(strength, x=0.3 * width),
    "shift down": lambda strength, width: moved(strength, y=0.3 * width),
    "rotation": lambda strength, width: rotation(strength * math.radians(30)),
}


# -- colour: values (256,), the histogram (B, C, 256), a signed strength (B, 1, 1) in
# -1..1 -> new values (B, C, 256) --
def _blend(values: Tensor, other: Tensor | float, strength: Tensor) -> Tensor:
    return values + 0.9 * strength * (other - values)


def _contrast(values: Tensor, histogram: Tensor, strength: Tensor) -> Tensor:
    """Towards the mean grey of the image, or away from it."""
    means = (histogram * values).sum(2, keepdim=True) / histogram.sum(
        2, keepdim=True
    )  # (B, C, 1)
    return _blend(values, _grey(means), strength)


def _posterise(
    values: Tensor, histogram: Tensor, strength: Tensor
) -> Tensor:  # from 8 bits per channel down to 4
    step = torch.exp2((4 * strength.abs()).round())
    return (values / step).floor() * step


def _autocontrast(values: Tensor, histogram: Tensor, strength: Tensor) -> Tensor:
    """The smallest value of each channel becomes 0, the largest 255."""
    there = histogram > 0
    low = torch.where(there, values, 255.0).amin(2, keepdim=True)
    high = torch.where(there, values, 0.0).amax(2, keepdim=True)
    return torch.where(
        high > low, (values - low) * (255 / (high - low).clamp(min=1)), values
    )


def _equalise(values: Tensor, histogram: Tensor, strength: Tensor) -> Tensor:
    """Values are used equally often, as far as that is possible; in whole numbers, as
    pillow computes it.
    """
    last = torch.where(histogram > 0, values, 0.0).amax(2, keepdim=True).long()
    step = ((histogram.sum(2, keepdim=True) - histogram.gather(2, last)) / 255).floor()
    before = histogram.cumsum(2) - histogram
    return torch.where(
        step > 0, ((before + (step / 2).floor()) / step.clamp(min=1)).floor(), values
    )


TABLES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "identity": lambda values, histogram, strength: values,
    "brightness": lambda values, histogram, strength: _blend(values, 0.0, strength),
    "contrast": _contrast,
    "posterise": _posterise,
    # Inverts above a threshold that falls from 256 to 0.
    "solarise": lambda values, histogram, strength: torch.where(
        values >= 256 * (1 - strength.abs()), 255 - values, values
    ),
    "invert": lambda values, histogram, strength: 255 - values,
    "autocontrast": _autocontrast,
    "equalise": _equalise,
}


def _grey(pixels: Tensor) -> Tensor:
    if pixels.shape[1] != 3:
        return pixels.mean(1, keepdim=True)
    red, green, blue = pixels.unbind(1)
    return (GREY[0] * red + GREY[1] * green + GREY[2] * blue)[:, None]


def _smooth(pixels: Tensor) -> Tensor:
    """The mean of a pixel (weight 5) and its neighbours (1); pixels at the edge stay as
    they are.
    """
    if min(pixels.shape[-2:]) < 3:
        return pixels
    inner = (
        functional.avg_pool2d(pixels, 3, stride=1) * 9 + 4 * pixels[..., 1:-1, 1:-1]
    ) / 13
    found = pixels.clone()
    found[..., 1:-1, 1:-1] = inner
    return found


# What a pixel is blended with depends on its other channels or its neighbours: pixels
# (B, C, H, W) -> (B, C, H, W).
BLENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "saturation": _grey,
    "sharpness": _smooth,
}
OPERATIONS = (*TABLES, *BLENDS, *GEOMETRY)

# AutoAugment's policies for CIFAR: pairs of (operation, how often it acts, strength
# from 0 to 9).
CIFAR_PAIRS = """
invert 1 0, contrast 2 6;
rotation 7 2, shift-sideways 3 9;
sharpness 8 1, sharpness 9 3;
shear-down 5 8, shift-down 7 9;
autocontrast 5 0, equalise 9 0;
shear-down 2 7, posterise 3 7;
saturation 4 3, brightness 6 7;
sharpness 3 9, brightness 7 9;
equalise 6 0, equalise 5 0;
contrast 6 7, sharpness 6 5;
saturation 7 7, shift-sideways 5 8;
equalise 3 0, autocontrast 4 0;
shift-down 4 3, sharpness 2 6;
brightness 9 6, saturation 2 8;
solarise 5 2, invert 0 0;
equalise 2 0, autocontrast 6 0;
equalise 2 0, equalise 6 0;
saturation 9 9, equalise 6 0;
autocontrast 8 0, solarise 2 8;
brightness 1 3, saturation 7 0;
solarise 4 5, autocontrast 9 0;
shift-down 9 9, shift-down 7 9;
autocontrast 9 0, solarise 8 3;
equalise 8 0, invert 1 0;
shift-down 7 9, autocontrast 9 0
"""


@dataclass(frozen=True)
class Policy:
    """`layers` random operations per image, each of a random strength up to `magnitude`
    (0 to 1).

    With `pairs` (operation, tenths of its probability, ninths of its strength), a
    random pair of operations instead.
    """

    layers: int = 2
    magnitude: float = 0.5
    pairs: str = ""

    def draw(self, count: int, generator: torch.Generator) -> Draws:
        """Which operations, and how strong: (count, layers) each."""
        shape = count, self.layers
        on: dict[str, Any] = {"generator": generator, "device": generator.device}
        strength = torch.rand(shape, **on) * 2 - 1
        if not self.pairs:
            return {
                "operation": torch.randint(len(OPERATIONS), shape, **on),
                "strength": strength * self.magnitude,
            }
        operation, chance, strongest = (
            part.to(generator.device) for part in _parsed(self.pairs)
        )  # (pairs, 2)
        pair = torch.randint(len(operation), (count,), **on)
        acts = torch.rand(shape, **on) < chance[pair]
        return {
            "operation": operation[pair] * acts,
            "strength": strength.sign() * strongest[pair],
        }

    def unchanged(self, count: int, device: torch.device) -> Draws:
        """Draws that change nothing."""
        none = torch.zeros(count, self.layers, device=device)
        return {"operation": none.long(), "strength": none}

    def recolour(self, images: Tensor, draws: Draws) -> Tensor:
        """The colour operations, layer by layer, on bytes (B, C, H, W)."""
        for layer in range(self.layers):
            operation, strength = (
                draws["operation"][:, layer],
                draws["strength"][:, layer],
            )
            if (quick := kernels(images)) is not None:
                images = quick.recolour(images, operation, strength)
                continue
            first = len(TABLES)
            images = _changed(
                images,
                (operation > 0) & (operation < first),
                _tabled,
                operation,
                strength,
            )
            for number, other in enumerate(BLENDS.values(), start=first):
                images = _changed(
                    images, operation == number, partial(_blended, other), strength
                )
        return images

    def matrix(self, draws: Draws, width: int) -> Tensor:
        """The geometric operations of all layers as one map (B, 2, 3)."""
        total = moved(torch.zeros_like(draws["strength"][:, 0]))
        for layer in range(self.layers):
            operation, strength = (
                draws["operation"][:, layer],
                draws["strength"][:, layer],
            )
            for number, move in enumerate(
                GEOMETRY.values(), start=len(TABLES) + len(BLENDS)
            ):
                # A strength of zero is the identity.
                total = compose(
                    total, move(torch.where(operation == number, strength, 0.0), width)
                )
        return total


def kernels(images: Tensor) -> Any:
    """The same operations as kernels, for bytes on a GPU; None without kernels, and for
    images that are too large.
    """
    quick = (
        load_kernels("rfdlc.data.augment_kernels")
        if images.is_cuda and images.dtype == torch.uint8
        else None
    )
    return (
        quick
        if quick is not None and images.shape[-1] * images.shape[-2] <= quick.LARGEST
        else None
    )


def _changed(
    images: Tensor, chosen: Tensor, function: Callable[..., Tensor], *given: Tensor
) -> Tensor:
    """With the chosen ones (B,) replaced. A CPU computes these alone; a GPU all, for
    shapes that it can capture.
    """
    if images.is_cuda:
        return torch.where(
            chosen[:, None, None, None], function(images, *given), images
        )
    rows = chosen.nonzero().flatten()
    return images.index_copy(
        0, rows, function(images[rows], *(each[rows] for each in given))
    )


def _tabled(images: Tensor, operation: Tensor, strength: Tensor) -> Tensor:
    index, values = (
        images.flatten(2).long(),
        torch.arange(256, device=images.device, dtype=torch.float32),
    )
    histogram = values.new_zeros(*index.shape[:2], 256)
    histogram.scatter_add_(2, index, values.new_ones(()).expand(index.shape))
    table = values.expand_as(histogram)
    for number, new in enumerate(TABLES.values()):
        chosen = (operation == number)[:, None, None]
        table = torch.where(
            chosen, new(values, histogram, strength[:, None, None]), table
        )
    return _bytes(table).gather(2, index).view_as(images)


def _blended(
    other: Callable[[Tensor], Tensor], images: Tensor, strength: Tensor
) -> Tensor:
    pixels = images.float()
    return _bytes(_blend(pixels, other(pixels), strength[:, None, None, None]))


def _bytes(values: Tensor) -> Tensor:
    return (values + 0.5).floor_().clamp_(0, 255).to(torch.uint8)


def _parsed(pairs: str) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers of the operations, their probabilities and strengths: (pairs, 2)
    each.
    """
    rows = [
        [word.split() for word in pair.split(",")] for pair in pairs.strip().split(";")
    ]
    names = [[name.replace("-", " ") for name, _, _ in pair] for pair in rows]
    chance = torch.tensor(
        [[int(tenths) / 10 for _, tenths, _ in pair] for pair in rows]
    )
    strength = torch.tensor(
        [[int(ninths) / 9 for _, _, ninths in pair] for pair in rows]
    )
    shifts = torch.tensor(
        [[name.startswith("shift") for name in pair] for pair in names]
    )
    operation = torch.tensor(
        [[OPERATIONS.index(name) for name in pair] for pair in names]
    )
    return operation, chance, torch.where(shifts, strength * SIDES / 0.3, strength)

"""Augmentation of whole batches on the device: crop, flip, rotation, random policies and cutout.

Random numbers are drawn separately from their use: `draw` gives the parameters of many images at once, and
`augment(images, draws)` is a pure function of tensors that never waits for the device and can be captured in a CUDA
graph. All geometric operations are composed into one affine map (B, 2, 3) from a place in the result to the place in
the source, in pixels from the centre, so that pixels are sampled once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Draws = dict[str, Tensor]  # what was drawn for n images: tensors (n, ...)
GREY = (0.299, 0.587, 0.114)  # luminance of red, green, blue

# -- affine maps -------------------------------------------------------------------------------------------------------


def affine_map(a: Tensor, b: Tensor, c: Tensor, d: Tensor, x: Tensor | None = None, y: Tensor | None = None) -> Tensor:
    """Matrices (B, 2, 3) with rows (a, b, x) and (c, d, y), each entry (B,)."""
    zero = torch.zeros_like(a)
    rows = (a, b, zero if x is None else x), (c, d, zero if y is None else y)
    return torch.stack([torch.stack(row, 1) for row in rows], 1)


def compose(outer: Tensor, inner: Tensor) -> Tensor:
    """Apply `inner` (B, 2, 3) first, then `outer`; elementwise, because TF32 products would be too coarse."""
    linear = (outer[:, :, :2, None] * inner[:, None, :, :]).sum(2)  # (B, 2, 3)
    return torch.cat([linear[..., :2], linear[..., 2:] + outer[..., 2:]], 2)


def nearest(images: Tensor, matrix: Tensor, offset: Tensor) -> Tensor:
    """Images (B, C, H, W) of any type, cropped and then seen through `matrix` (B, 2, 3), by one gather.

    The crop has the size of the image and lies `offset` (B, 2) pixels below and to the right of it; what is outside of
    the image or of the crop is zero. Each image needs H * W indices; products and sums are kept apart from
    comparisons, which are slow to broadcast on a CPU.
    """
    height, width = images.shape[-2:]
    row, down = _axis(matrix[:, 1], height, width, offset[:, 0], height)
    column, right = _axis(matrix[:, 0], height, width, offset[:, 1], width)
    inside = torch.maximum(down.abs_(), right.abs_()) < 1  # (B, H, W)
    index = row.floor_().mul_(width).add_(column.floor_()).clamp_(0, height * width - 1).long()
    pixels = images.flatten(2).gather(2, index.flatten(1)[:, None].expand(-1, images.shape[1], -1))
    return pixels.view_as(images) * inside[:, None]


def _axis(line: Tensor, height: int, width: int, offset: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The source of each pixel along one axis, (B, H, W) each: its distance from the edge of the image, and its
    distance from the middle of what image and crop share, which lies between -1 and 1 inside of that.
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


# -- colour: pixels (B, C, H, W) on 0..255 and a signed strength (B, 1, 1, 1) in -1..1 -> pixels -----------------------


def _blend(pixels: Tensor, other: Tensor | float, strength: Tensor) -> Tensor:
    """Towards `other` (strength > 0) or away from it, by up to 90%."""
    return (pixels + 0.9 * strength * (other - pixels)).clamp(0, 255)


def _grey(pixels: Tensor) -> Tensor:
    if pixels.shape[1] != 3:
        return pixels.mean(1, keepdim=True)
    red, green, blue = pixels.unbind(1)
    return (GREY[0] * red + GREY[1] * green + GREY[2] * blue)[:, None]


def brightness(pixels: Tensor, strength: Tensor) -> Tensor:
    return _blend(pixels, 0.0, strength)


def contrast(pixels: Tensor, strength: Tensor) -> Tensor:
    return _blend(pixels, _grey(pixels).mean((2, 3), keepdim=True), strength)


def saturation(pixels: Tensor, strength: Tensor) -> Tensor:
    return _blend(pixels, _grey(pixels), strength)


def posterise(pixels: Tensor, strength: Tensor) -> Tensor:  # from 8 bits per channel down to 4
    step = torch.exp2((4 * strength.abs()).round())
    return (pixels / step).floor() * step


def solarise(pixels: Tensor, strength: Tensor) -> Tensor:  # inverts above a threshold that falls from 256 to 0
    return torch.where(pixels >= 256 * (1 - strength.abs()), 255 - pixels, pixels)


COLOUR: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (brightness, contrast, saturation, posterise, solarise)

# -- geometry: a signed strength (B,) in -1..1 and the width -> an affine map (B, 2, 3) about the centre ---------------


def _moved(strength: Tensor, across: float = 0, down: float = 0, x: float = 0, y: float = 0) -> Tensor:
    """The identity with these multiples of the strength: shear along both axes, and shift."""
    one = torch.ones_like(strength)
    return affine_map(one, across * strength, down * strength, one, x * strength, y * strength)


def _rotation(angle: Tensor) -> Tensor:
    return affine_map(angle.cos(), -angle.sin(), angle.sin(), angle.cos())


GEOMETRY: tuple[Callable[[Tensor, int], Tensor], ...] = (
    lambda strength, width: _moved(strength, across=0.3),  # shear by up to 0.3 pixels per row
    lambda strength, width: _moved(strength, down=0.3),  # and per column
    lambda strength, width: _moved(strength, x=0.3 * width),  # shift sideways by up to 0.3 of the width
    lambda strength, width: _moved(strength, y=0.3 * width),  # up or down by as much
    lambda strength, width: _rotation(strength * math.radians(30)),
)


@dataclass(frozen=True)
class Policy:
    """`layers` random operations per image, each of a random strength up to `magnitude` (0 to 1)."""

    layers: int = 2
    magnitude: float = 0.5

    def draw(self, count: int, generator: torch.Generator) -> Draws:
        """Which operations, and how strong: (count, layers) each."""
        shape, device = (count, self.layers), generator.device
        strength = (torch.rand(shape, generator=generator, device=device) * 2 - 1) * self.magnitude
        operations = len(COLOUR) + len(GEOMETRY)
        operation = torch.randint(operations, shape, generator=generator, device=device)
        return {"operation": operation, "strength": strength}

    def recolour(self, pixels: Tensor, draws: Draws) -> Tensor:
        """The colour operations, layer by layer, on pixels (B, C, H, W)."""
        for layer in range(self.layers):
            operation = draws["operation"][:, layer, None, None, None]
            strength = draws["strength"][:, layer, None, None, None]
            for number, colour in enumerate(COLOUR):
                pixels = torch.where(operation == number, colour(pixels, strength), pixels)
        return pixels

    def matrix(self, draws: Draws, width: int) -> Tensor:
        """The geometric operations of all layers as one map (B, 2, 3)."""
        total = _moved(torch.zeros_like(draws["strength"][:, 0]))
        for layer in range(self.layers):
            operation, strength = draws["operation"][:, layer], draws["strength"][:, layer]
            for number, move in enumerate(GEOMETRY, start=len(COLOUR)):
                # A strength of zero is the identity.
                total = compose(total, move(torch.where(operation == number, strength, 0.0), width))
        return total


@dataclass(frozen=True)
class Augment:
    """Random crop of the zero-padded image, horizontal flip, rotation up to +-`rotation` degrees, in this order.

    Pixels from outside of the image are zero (black). The colour operations of a `policy` act first and its geometric
    ones between flip and rotation; last, `cutout` blacks out a square of that side. The defaults change nothing;
    `Augment.paper()` is the setting for CIFAR-LT.
    """

    crop_padding: int = 0
    flip: bool = False
    rotation: float = 0.0
    cutout: int = 0
    policy: Policy | None = None

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
            draws["cutout"] = torch.rand((count, 2), generator=generator, device=device)  # centre, as a fraction
        return draws

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        """uint8 (B, C, H, W) and their draws -> (B, C, H, W), still on the scale 0..255; float after a policy."""
        pixels = images if self.policy is None else self.policy.recolour(images.float(), draws)
        if draws.keys() & {"crop", "flip", "angle", "operation"}:
            matrix = self._matrix(draws, len(pixels), pixels.device, pixels.shape[-1])
            offset = draws["crop"] - self.crop_padding if self.crop_padding else matrix.new_zeros(len(pixels), 2)
            pixels = nearest(pixels, matrix, offset.to(matrix))
        return _cut_out(pixels, draws["cutout"], self.cutout) if self.cutout else pixels

    def _matrix(self, draws: Draws, count: int, device: torch.device, width: int) -> Tensor:
        """(B, 2, 3): from a place in the result to its source in the crop; flip, policy and rotation composed."""
        matrix = _rotation(draws["angle"] if self.rotation else torch.zeros(count, device=device))
        if self.policy is not None:
            matrix = compose(self.policy.matrix(draws, width), matrix)
        if not self.flip:
            return matrix
        sign = torch.where(draws["flip"], -1.0, 1.0)
        return torch.stack([matrix[:, 0] * sign[:, None], matrix[:, 1]], 1)


def _cut_out(pixels: Tensor, centre: Tensor, side: int) -> Tensor:
    """A black square around `centre` (B, 2), a fraction of height and width; it may reach over the edge."""
    height, width = pixels.shape[-2:]
    top = (centre[:, 0] * height).floor() - side // 2
    left = (centre[:, 1] * width).floor() - side // 2
    down = torch.arange(height, device=pixels.device) - top[:, None]  # (B, H)
    across = torch.arange(width, device=pixels.device) - left[:, None]  # (B, W)
    inside = ((down >= 0) & (down < side))[:, :, None] & ((across >= 0) & (across < side))[:, None, :]
    return pixels * ~inside[:, None]


AUGMENTATIONS = {
    "none": Augment(),
    "crop-flip": Augment(crop_padding=4, flip=True),
    "crop-flip-rotate": Augment.paper(),
    "randaugment": Augment(crop_padding=4, flip=True, policy=Policy()),
    "trivialaugment": Augment(crop_padding=4, flip=True, policy=Policy(layers=1, magnitude=1.0)),
}

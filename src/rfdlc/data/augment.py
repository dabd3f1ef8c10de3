"""Augmentation of whole batches on the device: crop, flip, rotation, random policies,
cutout; and mixup and CutMix.

`draw` gives the random parameters of many images at once; `augment(images, draws)` is a
pure function of tensors that never waits for the device and can be captured in a CUDA
graph. All geometric operations are composed into one affine map (B, 2, 3) from a place
in the result to that in the source, in pixels from the centre: pixels are sampled once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rfdlc.data.policy import CIFAR_PAIRS, Draws, Policy, compose, kernels, rotation

ORDER, AUGMENTATION, MIXING = range(3)  # independent streams of random numbers


def _nearest(images: Tensor, matrix: Tensor, offset: Tensor) -> Tensor:
    """Images (B, C, H, W) of any type, cropped and then seen through `matrix` (B, 2,
    3), by one gather.

    The crop has the size of the image and lies `offset` (B, 2) pixels below and to the
    right of it; what is outside of the image or of the crop is zero. Comparisons are
    kept apart, since they are slow to broadcast on a CPU.
    """
    if (quick := kernels(images)) is not None:
        return quick.nearest(images, matrix, offset)
    height, width = images.shape[-2:]
    row, down = _axis(matrix[:, 1], height, width, offset[:, 0], height)
    column, right = _axis(matrix[:, 0], height, width, offset[:, 1], width)
    inside = torch.maximum(down.abs_(), right.abs_()) < 1  # (B, H, W)
    index = (
        row.floor_()
        .mul_(width)
        .add_(column.floor_())
        .clamp_(0, height * width - 1)
        .long()
    )
    pixels = images.flatten(2).gather(
        2, index.flatten(1)[:, None].expand(-1, images.shape[1], -1)
    )
    return pixels.view_as(images) * inside[:, None]


def _axis(
    line: Tensor, height: int, width: int, offset: Tensor, length: int
) -> tuple[Tensor, Tensor]:
    """The source of each pixel along one axis, (B, H, W) each: its distance from the
    edge of the image, and its distance from the middle of what image and crop share,
    which lies between -1 and 1 inside of that.
    """
    half = ((length - offset.abs()) / 2).clamp(min=1e-6)
    place = _sum(line, height, width, length / 2 + offset)
    return place, _sum(line / half[:, None], height, width, offset / (2 * half))


def _sum(line: Tensor, height: int, width: int, constant: Tensor) -> Tensor:
    """line[0] x + line[1] y + line[2] + constant, x and y in pixels from the centre:
    (B, H, W).
    """
    x, y = (
        torch.arange(n, device=line.device, dtype=line.dtype) - (n - 1) / 2
        for n in (width, height)
    )
    rows = line[:, 1, None] * y + (line[:, 2] + constant)[:, None]  # (B, H)
    return (line[:, 0, None] * x)[:, None, :] + rows[:, :, None]


@dataclass(frozen=True)
class Augment:
    """Random crop of the zero-padded image, horizontal flip, rotation up to
    +-`rotation` degrees, in this order.

    Pixels from outside of the image are zero (black). The colour operations of a
    `policy` act first and its geometric ones between flip and rotation; last, `cutout`
    blacks out a square of that side. The defaults change nothing.
    """

    crop_padding: int = 0
    flip: bool = False
    rotation: float = 0.0
    cutout: int = 0
    policy: Policy | None = None

    @classmethod
    def paper(cls) -> "Augment":
        """Crop with 4 pixels of padding, flip, rotation up to 15 degrees: the paper's
        setting for CIFAR-LT.
        """
        return cls(crop_padding=4, flip=True, rotation=15.0)

    def draw(self, count: int, generator: torch.Generator) -> Draws:
        """Parameters for `count` images, on the generator's device."""
        draws: Draws = {}
        on: dict[str, Any] = {"generator": generator, "device": generator.device}
        if self.crop_padding:
            draws["crop"] = torch.randint(
                2 * self.crop_padding + 1, (count, 2), **on
            )  # top, left
        if self.flip:
            draws["flip"] = torch.rand(count, **on) < 0.5
        if self.rotation:
            draws["angle"] = (torch.rand(count, **on) * 2 - 1) * math.radians(
                self.rotation
            )  # counter-clockwise
        if self.policy is not None:
            draws |= self.policy.draw(count, generator)
        if self.cutout:
            draws["cutout"] = torch.rand((count, 2), **on)  # centre, as a fraction
        return draws

    def identity(self, count: int, device: torch.device) -> Draws:
        """Parameters for `count` images that change nothing, but for a cutout."""
        draws: Draws = {}
        if self.crop_padding:
            draws["crop"] = torch.full((count, 2), self.crop_padding, device=device)
        if self.flip:
            draws["flip"] = torch.zeros(count, dtype=torch.bool, device=device)
        if self.rotation:
            draws["angle"] = torch.zeros(count, device=device)
        if self.policy is not None:
            draws |= self.policy.unchanged(count, device)
        return draws

    def weaker(self) -> "Augment":
        """The same crop, flip and rotation, without random operations and cutout."""
        return replace(self, policy=None, cutout=0)

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        """uint8 (B, C, H, W) and their draws -> (B, C, H, W), still on the scale
        0..255.
        """
        pixels = images if self.policy is None else self.policy.recolour(images, draws)
        if draws.keys() & {"crop", "flip", "angle", "operation"}:
            matrix = rotation(
                draws["angle"]
                if self.rotation
                else torch.zeros(len(pixels), device=pixels.device)
            )
            if self.policy is not None:
                matrix = compose(self.policy.matrix(draws, pixels.shape[-1]), matrix)
            if self.flip:
                sign = torch.where(draws["flip"], -1.0, 1.0)
                matrix = torch.stack([matrix[:, 0] * sign[:, None], matrix[:, 1]], 1)
            offset = (
                draws["crop"] - self.crop_padding
                if self.crop_padding
                else matrix.new_zeros(len(pixels), 2)
            )
            pixels = _nearest(pixels, matrix, offset.to(matrix))
        if not self.cutout:
            return pixels
        inside = (
            []
            # (B, H) and (B, W): a square around the centre, which may reach over the
            # edge
        )
        for i, size in enumerate(pixels.shape[-2:]):
            first = (draws["cutout"][:, i] * size).floor() - self.cutout // 2
            place = torch.arange(size, device=pixels.device) - first[:, None]
            inside.append((place >= 0) & (place < self.cutout))
        return pixels * ~(inside[0][:, :, None] & inside[1][:, None, :])[:, None]


def covering(augments: Sequence[Augment]) -> Augment:
    """One that can do what each of these does; they may differ in whether they crop,
    flip, rotate and have a policy.
    """
    kinds = {
        name: {getattr(own, name) for own in augments}
        for name in ("crop_padding", "rotation", "policy")
    }
    most = {
        name: next((value for value in values if value), None)
        for name, values in kinds.items()
    }
    given = {name: value for name, value in most.items() if value is not None}
    return replace(augments[0], flip=any(own.flip for own in augments), **given)


AUGMENTATIONS = {
    "none": Augment(),
    "crop": Augment(crop_padding=4),
    "crop-flip": Augment(crop_padding=4, flip=True),
    "crop-randaugment": Augment(crop_padding=4, policy=Policy()),
    "crop-flip-rotate": Augment.paper(),
    "randaugment": Augment(crop_padding=4, flip=True, policy=Policy()),
    "trivialaugment": Augment(
        crop_padding=4, flip=True, policy=Policy(layers=1, magnitude=1.0)
    ),
    "autoaugment": Augment(crop_padding=4, flip=True, policy=Policy(pairs=CIFAR_PAIRS)),
}


# -- mixup and CutMix: pairs of samples in a batch; the loss is `lam * a + (1 - lam) *
# b` ------------------------------
class Mixed(NamedTuple):
    """Mixed inputs (R, B, ...), both targets (R, B), and the weight of the
    first (R,).
    """

    inputs: Tensor
    targets: Tensor
    partners: Tensor
    lam: Tensor

    def micro_batches(self, count: int) -> "list[Mixed]":
        if count == 1:
            return [self]
        inputs, targets, partners = (each.tensor_split(count, 1) for each in self[:3])
        return [
            Mixed(*cut, self.lam) for cut in zip(inputs, targets, partners, strict=True)
        ]


def draw_shares(alpha: float, steps: int, seed: int, epoch: int) -> Tensor:
    """(steps, 3) for an epoch: lam ~ Beta(alpha, alpha) of each batch, and a place (y,
    x) for CutMix.
    """
    rng = np.random.default_rng([MIXING, seed, epoch])
    return torch.from_numpy(
        np.column_stack([rng.beta(alpha, alpha, steps), rng.random((steps, 2))])
    ).float()


def mixup(inputs: Tensor, targets: Tensor, share: Tensor) -> Mixed:
    """`lam * x + (1 - lam) * x'`; share (R, 3) is one step of `draw_shares`, x' the
    neighbour in the shuffled batch.
    """
    lam = share[:, 0].to(inputs)
    weight = lam.view(-1, *[1] * (inputs.ndim - 1))
    return Mixed(
        weight * inputs + (1 - weight) * inputs.roll(1, 1),
        targets,
        targets.roll(1, 1),
        lam,
    )


def cutmix(inputs: Tensor, targets: Tensor, share: Tensor) -> Mixed:
    """Paste a box of the neighbour, of area about 1 - lam; the returned `lam` is the
    fraction that truly remains.
    """
    side = (1 - share[:, 0]).clamp(0, 1).sqrt()
    rows, columns = (  # (R, H), (R, W): cut off at the edges
        (
            (
                torch.arange(n, device=share.device) + 0.5 - (share[:, i] * n)[:, None]
            ).abs()
            < (side * n / 2)[:, None]
        )
        for i, n in enumerate(inputs.shape[-2:], start=1)
    )
    box = rows[:, :, None] & columns[:, None, :]
    lam = 1 - box.float().mean((1, 2))
    pasted = torch.where(box[:, None, None], inputs.roll(1, 1), inputs)
    return Mixed(pasted, targets, targets.roll(1, 1), lam.to(inputs))

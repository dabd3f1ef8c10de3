"""Mixup and CutMix: pairs of samples in a batch mixed on the device. The loss is `lam * a + (1 - lam) * b`."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rfdlc.data.sampling import MIXING


class Mixed(NamedTuple):
    """Mixed inputs (R, B, ...), both targets (R, B), and the weight of the first (R,)."""

    inputs: Tensor
    targets: Tensor
    partners: Tensor
    lam: Tensor

    def micro_batches(self, count: int) -> "list[Mixed]":
        """Cut into `count` micro-batches, one after the other."""
        if count == 1:
            return [self]
        inputs, targets, partners = (each.tensor_split(count, 1) for each in self[:3])
        return [Mixed(*cut, self.lam) for cut in zip(inputs, targets, partners, strict=True)]


def draw_shares(alpha: float, steps: int, seeds: Sequence[int], epoch: int) -> Tensor:
    """(steps, R, 3) for an epoch: lam ~ Beta(alpha, alpha) of each batch, and a place (y, x) for CutMix.

    Column r depends on (seeds[r], epoch) alone.
    """
    drawn = []
    for seed in seeds:
        rng = np.random.default_rng([MIXING, seed, epoch])
        drawn.append(np.column_stack([rng.beta(alpha, alpha, steps), rng.random((steps, 2))]))
    return torch.from_numpy(np.stack(drawn, 1)).float()


def mixup(inputs: Tensor, targets: Tensor, share: Tensor) -> Mixed:
    """`lam * x + (1 - lam) * x'`; share (R, 3) is one step of `draw_shares`.

    The partner is the neighbour in the batch: batches are shuffled already, so it is as random as any.
    """
    lam = share[:, 0].to(inputs)
    weight = lam.view(-1, *[1] * (inputs.ndim - 1))
    return Mixed(weight * inputs + (1 - weight) * inputs.roll(1, 1), targets, targets.roll(1, 1), lam)


def cutmix(inputs: Tensor, targets: Tensor, share: Tensor) -> Mixed:
    """Paste a box of the neighbour, of area about 1 - lam; the returned `lam` is the fraction that truly remains."""
    height, width = inputs.shape[-2:]
    side = (1 - share[:, 0]).clamp(0, 1).sqrt()
    rows, columns = _span(share[:, 1], side, height), _span(share[:, 2], side, width)  # (R, H), (R, W)
    box = rows[:, :, None] & columns[:, None, :]
    lam = 1 - box.float().mean((1, 2))
    pasted = torch.where(box[:, None, None], inputs.roll(1, 1), inputs)
    return Mixed(pasted, targets, targets.roll(1, 1), lam.to(inputs))


def _span(centre: Tensor, side: Tensor, length: int) -> Tensor:
    """(R, length): which rows a box covers, cut off at the edges."""
    place = torch.arange(length, device=centre.device) + 0.5
    return (place - (centre * length)[:, None]).abs() < (side * length / 2)[:, None]

"""ResidentLoader: a data set that fits stays on the device, and whole epochs are prepared there in bulk."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rfdlc.data.augment import Augment, Draws
from rfdlc.data.dataset import Normalisation, Split
from rfdlc.data.replayed import Replayed
from rfdlc.data.sampling import AUGMENTATION, ORDER, EpochOrder, batch_slices, seeded, shard

# A GPU prepares this much at once: it is idle between small kernels. A CPU does best with one batch in its cache.
BYTES_AT_ONCE = 2**28


class Normaliser:
    """`x * scale + shift` over samples (..., channels, H, W) on the scale 0..255, or features (..., F)."""

    def __init__(
        self, normalisation: Normalisation | None, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
    ) -> None:
        channels, images = shape[0], len(shape) == 3
        mean, std = (normalisation.mean, normalisation.std) if normalisation else ((0.0,) * channels, (1.0,) * channels)
        spread = torch.tensor(std, dtype=torch.float64)
        scale = 1 / (spread * (255 if images else 1))  # bytes are brought to 0..1 first
        shift = -torch.tensor(mean, dtype=torch.float64) / spread
        place = (channels, 1, 1) if images else (channels,)
        self._scale = scale.float().view(place).to(device)
        self._shift = shift.float().view(place).to(device)
        self._dtype = dtype

    def __call__(self, inputs: Tensor) -> Tensor:
        """Normalised inputs of the requested type."""
        return (inputs * self._scale).add_(self._shift).to(self._dtype)


class EpochDraws(NamedTuple):
    """The random choices of R runs in an epoch: the sample at each place, and the parameters of its augmentation."""

    order: Tensor  # (R, N) sample indices
    draws: Draws  # each (R, N, ...)


class ResidentLoader:
    """Batches for R = len(seeds) runs at once. Run r depends on (seeds[r], epoch) alone, stacked or not.

    Yields inputs (R, B, channels, H, W) or (R, B, F), augmented and normalised, and targets (R, B). The last batch of
    an epoch may be smaller. `positions` are the samples of each run, equally many, where a run does not use all.
    """

    def __init__(
        self,
        split: Split,
        normalisation: Normalisation | None = None,
        *,
        batch_size: int = 128,
        seeds: Sequence[int] = (0,),
        augment: Augment | None = None,
        sampling: str = "shuffle",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        positions: Sequence[NDArray[np.int64]] | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.batch_size, self.seeds = batch_size, tuple(seeds)
        self.rank, self.world_size = rank, world_size
        self.inputs = torch.from_numpy(split.array).to(self.device)  # (N, ...)
        self.targets = torch.from_numpy(split.labels).to(self.device)  # (N,)
        self.is_images = self.inputs.dtype == torch.uint8
        self.augment = augment if augment is not None and self.is_images else Augment()
        weights = None if split.weights is None else torch.from_numpy(split.weights).to(self.device)
        self._orders, self._chosen = self._run_orders(sampling, weights, positions)
        self.count = self._orders[0].count  # samples per run and epoch
        self.slices = batch_slices(self.count, batch_size, rank=rank, world_size=world_size, drop_last=drop_last)
        at_once = BYTES_AT_ONCE // (4 * self.inputs[0].numel() * len(self.seeds) * batch_size)
        self._at_once = 1 if self.device.type == "cpu" else max(1, at_once)  # steps that are prepared in one call
        self._known: dict[tuple[int, int], Replayed] = {}
        self._normalised = Normaliser(normalisation, tuple(self.inputs.shape[1:]), self.device, dtype)

    @property
    def steps(self) -> int:
        """Batches per epoch."""
        return len(self.slices)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch from `start_step` on: a resumed epoch continues exactly where it stopped."""
        drawn = self.draw(epoch)
        for first in range(start_step, self.steps, self._at_once):
            yield from self._prepared(drawn, first, min(first + self._at_once, self.steps))

    def draw(self, epoch: int) -> EpochDraws:
        """All random choices of an epoch, drawn in bulk on the device."""
        generators = [seeded(ORDER, seed, epoch, self.device) for seed in self.seeds]
        orders = torch.stack([order.draw(g) for order, g in zip(self._orders, generators, strict=True)])
        orders = orders if self._chosen is None else self._chosen.gather(1, orders)
        drawn = [self.augment.draw(self.count, seeded(AUGMENTATION, seed, epoch, self.device)) for seed in self.seeds]
        return EpochDraws(orders, {name: torch.stack([d[name] for d in drawn]) for name in drawn[0]})

    def prepare(self, order: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Inputs (..., channels, H, W) or (..., F) and targets (...) for sample indices (...): a pure function."""
        picked = self.inputs.index_select(0, order.reshape(-1))
        if self.is_images:
            picked = self.augment(picked, {name: drawn.flatten(0, order.ndim - 1) for name, drawn in draws.items()})
        return self._normalised(picked).view(*order.shape, *self.inputs.shape[1:]), self.targets[order]

    def in_order(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every sample of this rank once, in the data set's order, not augmented: inputs (B, ...), targets (B,)."""
        mine = shard(len(self.targets), self.rank, self.world_size, self.batch_size)
        for start in range(mine.start, mine.stop, self.batch_size):
            batch = slice(start, min(start + self.batch_size, mine.stop))
            yield self._normalised(self.inputs[batch]), self.targets[batch]

    def _run_orders(
        self, sampling: str, weights: Tensor | None, positions: Sequence[NDArray[np.int64]] | None
    ) -> tuple[list[EpochOrder], Tensor | None]:
        """What draws the order of each run, and the samples (R, N) that it draws from; None for all samples."""
        if positions is None:
            return [EpochOrder(self.targets, sampling, weights)] * len(self.seeds), None
        chosen = torch.from_numpy(np.stack(positions)).to(self.device)
        known = [None if weights is None else weights[own] for own in chosen]
        return [EpochOrder(self.targets[own], sampling, w) for own, w in zip(chosen, known, strict=True)], chosen

    def _together(self, first: int, last: int) -> Replayed:
        """What prepares steps first to last: a function of the epoch's order and draws."""
        if (first, last) not in self._known:
            places, names = self._places(first, last), sorted(self.augment.draw(1, torch.Generator()))

            def prepare(order: Tensor, *draws: Tensor) -> tuple[Tensor, ...]:
                picked = (drawn.flatten(0, 1)[places] for drawn in draws)
                return self.prepare(order.flatten()[places], dict(zip(names, picked, strict=True)))

            self._known[first, last] = Replayed(prepare)
        return self._known[first, last]

    def _prepared(self, epoch: EpochDraws, first: int, last: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of steps first to last, prepared together; each is contiguous."""
        drawn = (epoch.draws[name] for name in sorted(epoch.draws))
        inputs, targets = self._together(first, last)(epoch.order, *drawn)
        runs, sample = len(self.seeds), self.inputs.shape[1:]
        size, last_size = (int(batch.stop - batch.start) for batch in (self.slices[first], self.slices[last - 1]))
        alike = last - first - (last_size != size)  # only the last of an epoch can differ
        end = alike * runs * size
        yield from zip(
            inputs[:end].view(alike, runs, size, *sample).unbind(0),
            targets[:end].view(alike, runs, size).unbind(0),
            strict=True,
        )
        if alike < last - first:
            yield inputs[end:].view(runs, -1, *sample), targets[end:].view(runs, -1)

    def _places(self, first: int, last: int) -> Tensor:
        """Where the samples of these steps lie in a flattened (R, N): by step, then by run."""
        runs = self.count * np.arange(len(self.seeds))[:, None]
        steps = [(runs + np.arange(batch.start, batch.stop)).reshape(-1) for batch in self.slices[first:last]]
        return torch.from_numpy(np.concatenate(steps)).to(self.device)

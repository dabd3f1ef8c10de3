"""ResidentLoader: a data set that fits stays on the device, and whole epochs are prepared there in bulk."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

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
        place = (-1, 1, 1) if len(shape) == 3 else (-1,)
        given = normalisation or Normalisation((0.0,) * shape[0], (1.0,) * shape[0])
        mean, std = (torch.tensor(values, dtype=torch.float64).view(place) for values in (given.mean, given.std))
        scale = 1 / (std * (255 if len(shape) == 3 else 1))  # bytes are brought to 0..1 first
        self._scale, self._shift, self._dtype = scale.float().to(device), (-mean / std).float().to(device), dtype

    def __call__(self, inputs: Tensor) -> Tensor:
        """Normalised inputs of the requested type."""
        return (inputs * self._scale).add_(self._shift).to(self._dtype)


class EpochLoader:
    """What both loaders share: the samples of every batch for R = len(seeds) runs, on each rank.

    Run r depends on (seeds[r], epoch) alone. The last batch of an epoch may be smaller. `positions` are the samples of
    each run, equally many, where a run does not use all. `drawn_on` is the device that draws the order.
    """

    def __init__(
        self, split: Split, normalisation: Normalisation | None, drawn_on: torch.device | str, *,
        batch_size: int = 128, seeds: Sequence[int] = (0,), sampling: str = "shuffle",
        device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, drop_last: bool = False,
        rank: int = 0, world_size: int = 1, positions: Sequence[NDArray[np.int64]] | None = None,
    ) -> None:  # fmt: skip
        self.device, self.batch_size, self.seeds = torch.device(device), batch_size, tuple(seeds)
        self.targets = torch.from_numpy(split.labels).to(drawn_on)  # (N,)
        weights = None if split.weights is None else torch.from_numpy(split.weights).to(drawn_on)
        self._chosen = None if positions is None else torch.from_numpy(np.stack(positions)).to(drawn_on)
        if self._chosen is None:
            self._orders = [EpochOrder(self.targets, sampling, weights)] * len(self.seeds)
        else:
            of_runs = [(self.targets[own], None if weights is None else weights[own]) for own in self._chosen]
            self._orders = [EpochOrder(labels, sampling, own) for labels, own in of_runs]
        self.count = self._orders[0].count  # samples per run and epoch
        self.slices = batch_slices(self.count, batch_size, rank=rank, world_size=world_size, drop_last=drop_last)
        mine = shard(len(split), rank, world_size, batch_size)
        self._evaluated = [mine[start : start + batch_size] for start in range(0, len(mine), batch_size)]
        self._normalised = Normaliser(normalisation, tuple(split.inputs.shape[1:]), self.device, dtype)

    @property
    def steps(self) -> int:
        """Batches per epoch, on every rank."""
        return len(self.slices)

    def draw_order(self, epoch: int) -> Tensor:
        """The sample at each place of an epoch, (R, N)."""
        generators = [seeded(ORDER, seed, epoch, self.targets.device) for seed in self.seeds]
        orders = torch.stack([order.draw(g) for order, g in zip(self._orders, generators, strict=True)])
        return orders if self._chosen is None else self._chosen.gather(1, orders)


class ResidentLoader(EpochLoader):
    """Batches for R runs at once: inputs (R, B, channels, H, W) or (R, B, F), augmented and normalised, targets (R, B).

    Options are those of EpochLoader.
    """

    def __init__(
        self, split: Split, normalisation: Normalisation | None = None, *,
        augment: Augment | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(split, normalisation, options.get("device", "cpu"), **options)
        self.inputs = torch.from_numpy(split.array).to(self.device)  # (N, ...)
        self.is_images = self.inputs.dtype == torch.uint8
        self.augment = augment if augment is not None and self.is_images else Augment()
        at_once = BYTES_AT_ONCE // (4 * self.inputs[0].numel() * len(self.seeds) * self.batch_size)
        self._at_once = 1 if self.device.type == "cpu" else max(1, at_once)  # steps that are prepared in one call
        self._known: dict[int, Replayed] = {}

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch from `start_step` on: a resumed epoch continues exactly where it stopped."""
        order, draws = self.draw(epoch)
        for first in range(start_step, self.steps, self._at_once):
            batches = self.slices[first : first + self._at_once]
            if first not in self._known:
                self._known[first] = Replayed(partial(self._together, self._places(batches), tuple(draws)))
            prepared = self._known[first](order, *draws.values())
            sizes = [len(self.seeds) * (batch.stop - batch.start) for batch in batches]
            for inputs, targets in zip(*(tensor.split(sizes) for tensor in prepared), strict=True):
                yield inputs.view(len(self.seeds), -1, *inputs.shape[1:]), targets.view(len(self.seeds), -1)

    def draw(self, epoch: int) -> tuple[Tensor, Draws]:
        """All random choices of an epoch: the sample at each place (R, N), the parameters of its augmentation."""
        drawn = [self.augment.draw(self.count, seeded(AUGMENTATION, seed, epoch, self.device)) for seed in self.seeds]
        return self.draw_order(epoch), {name: torch.stack([d[name] for d in drawn]) for name in drawn[0]}

    def prepare(self, order: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Inputs (..., channels, H, W) or (..., F) and targets (...) for sample indices (...): a pure function."""
        picked = self.inputs.index_select(0, order.reshape(-1))
        if self.is_images:
            picked = self.augment(picked, {name: drawn.flatten(0, order.ndim - 1) for name, drawn in draws.items()})
        return self._normalised(picked).view(*order.shape, *self.inputs.shape[1:]), self.targets[order]

    def in_order(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every sample of this rank once, in the data set's order, not augmented: inputs (B, ...), targets (B,)."""
        for batch in self._evaluated:
            rows = slice(batch.start, batch.stop)
            yield self._normalised(self.inputs[rows]), self.targets[rows]

    def _together(self, places: Tensor, names: tuple[str, ...], order: Tensor, *draws: Tensor) -> tuple[Tensor, ...]:
        """The samples at these places of an epoch, prepared together."""
        picked = (drawn.flatten(0, 1)[places] for drawn in draws)
        return self.prepare(order.flatten()[places], dict(zip(names, picked, strict=True)))

    def _places(self, batches: Sequence[slice]) -> Tensor:
        """Where the samples of these batches lie in a flattened (R, N): by step, then by run."""
        runs = self.count * np.arange(len(self.seeds))[:, None]
        steps = [(runs + np.arange(batch.start, batch.stop)).reshape(-1) for batch in batches]
        return torch.from_numpy(np.concatenate(steps)).to(self.device)

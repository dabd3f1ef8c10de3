"""The order of an epoch: which sample comes when, for every run and rank, reproducible from (seed, epoch) alone."""

import numpy as np
import torch
from torch import Tensor

from rfdlc.errors import choose, expect

SAMPLINGS = ("shuffle", "balanced", "sqrt")
ORDER, AUGMENTATION, MIXING = range(3)  # independent streams of random numbers


def seeded(stream: int, seed: int, epoch: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator that depends on (stream, seed, epoch) and the kind of device, and on nothing that ran before."""
    state = np.random.SeedSequence([stream, seed, epoch]).generate_state(1, np.uint64)
    return torch.Generator(device).manual_seed(int(state[0] >> np.uint64(1)))


class EpochOrder:
    """Draws the sample indices of an epoch, always as many as there are samples.

    shuffle: each sample once. balanced: with replacement, every class equally often. sqrt: with replacement, class c
    in proportion to the square root of its count. With `weights` (N,), which need shuffle, a sample appears
    N w / sum(w) times, rounded up or down at random (systematic sampling), so that equal weights change nothing.
    """

    def __init__(self, labels: Tensor, sampling: str = "shuffle", weights: Tensor | None = None) -> None:
        unfit = f"sampling {sampling!r} cannot be combined with sample weights: use sampling='shuffle'"
        expect(weights is None or sampling == "shuffle", unfit)
        self.sampling = choose("sampling", sampling, SAMPLINGS)
        self._ends = None if weights is None else torch.cumsum(weights.double() * (len(weights) / weights.sum()), 0)
        self.count = len(labels)
        self._by_class = torch.argsort(labels, stable=True)
        self._sizes = torch.bincount(labels)
        self._starts = torch.cumsum(self._sizes, 0) - self._sizes
        self._weights = torch.where(self._sizes > 0, self._sizes.double() ** (0.5 if sampling == "sqrt" else 0.0), 0.0)

    def draw(self, generator: torch.Generator) -> Tensor:
        """Sample indices (N,) on the generator's device, which must be that of the labels."""
        device = generator.device
        if self.sampling == "shuffle":
            order = torch.randperm(self.count, generator=generator, device=device)
            if self._ends is None:
                return order
            # Each sample as often as one of N evenly spaced points falls into its interval.
            offset = torch.rand((), generator=generator, device=device, dtype=torch.float64)
            points = torch.arange(self.count, device=device) + offset
            return torch.searchsorted(self._ends, points, right=True).clamp_(max=self.count - 1)[order]
        classes = torch.multinomial(self._weights, self.count, replacement=True, generator=generator)
        sizes = self._sizes[classes]
        within = (torch.rand(self.count, generator=generator, device=device, dtype=torch.float64) * sizes).long()
        return self._by_class[self._starts[classes] + within]


def batch_slices(
    count: int, batch_size: int, *, rank: int = 0, world_size: int = 1, drop_last: bool = False
) -> list[slice]:
    """Where the batches of one rank lie in the order of an epoch: all ranks together use every sample once.

    Every rank has the same number of batches, as gradient averaging needs. The samples of the last step are divided
    evenly; where fewer remain than there are ranks, they join the step before, whose batches are then one larger
    on some ranks. `drop_last` leaves them out instead (different ones each epoch, since the order changes).
    """
    few = f"{count} samples cannot be divided among {world_size} ranks: use at most {count} processes"
    expect(count >= world_size, few)
    across = batch_size * world_size
    full, remainder = divmod(count, across)
    starts = [step * across for step in range(full)]
    slices = [slice(start + rank * batch_size, start + (rank + 1) * batch_size) for start in starts]
    if drop_last or not remainder:
        return slices
    start = full * across
    if remainder < world_size:  # too few for a batch on every rank
        slices, start = slices[:-1], starts[-1]
    first, last = (start + turn * (count - start) // world_size for turn in (rank, rank + 1))
    return [*slices, slice(first, last)]


def shard(count: int, rank: int = 0, world_size: int = 1, batch_size: int = 1) -> range:
    """The samples that a rank evaluates: contiguous, so that the ranks in turn give every sample once, in order.

    Whole batches, so that each holds the same samples for any number of ranks, and rounds in the same way.
    """
    batches = -(-count // batch_size)
    first, last = (batches * turn // world_size * batch_size for turn in (rank, rank + 1))
    return range(min(first, count), min(last, count))

"""ResidentLoader: a data set that fits stays on the device, and whole epochs are
prepared there in bulk.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rfdlc.data.augment import AUGMENTATION, ORDER, Augment, covering
from rfdlc.data.dataset import Normalisation, Split
from rfdlc.data.images import ImageFiles
from rfdlc.data.policy import Draws
from rfdlc.errors import choose, expect

# A GPU prepares this much at once: it is idle between small kernels. A CPU does best
# with one batch in its cache.
BYTES_AT_ONCE = 2**28
SAMPLINGS = {
    "shuffle": 1.0,
    "balanced": 0.0,
    "sqrt": 0.5,
}  # the power of its count by which a class is drawn

# of the samples at least lie where every reader has as many; the others are read by any
# rank
EVEN = 0.9


def seeded(
    stream: int, seed: int, epoch: int, device: torch.device | str = "cpu"
) -> torch.Generator:
    """A generator that depends on (stream, seed, epoch) and the kind of device, and on
    nothing that ran before.
    """
    state = np.random.SeedSequence([stream, seed, epoch]).generate_state(1, np.uint64)
    return torch.Generator(device).manual_seed(int(state[0] >> np.uint64(1)))


class EpochOrder:
    """Draws the sample indices of an epoch, always as many as there are samples.

    shuffle: each sample once; with `weights` (N,), N w / sum(w) times, rounded at
    random (systematic sampling). balanced, sqrt: with replacement, every class equally
    often, or by the square root of its count.
    """

    def __init__(
        self, labels: Tensor, sampling: str = "shuffle", weights: Tensor | None = None
    ) -> None:
        unfit = (
            f"sampling {sampling!r} cannot be combined with sample weights: use"
            " sampling='shuffle'"
        )
        expect(weights is None or sampling == "shuffle", unfit)
        self.sampling = choose("sampling", sampling, SAMPLINGS)
        self._ends = (
            None
            if weights is None
            else torch.cumsum(weights.double() * (len(weights) / weights.sum()), 0)
        )
        self.count = len(labels)
        self._by_class = torch.argsort(labels, stable=True)
        self._sizes = torch.bincount(labels)
        self._starts = torch.cumsum(self._sizes, 0) - self._sizes
        self._weights = torch.where(
            self._sizes > 0, self._sizes.double() ** SAMPLINGS[sampling], 0.0
        )

    def draw(self, generator: torch.Generator) -> Tensor:
        """Sample indices (N,) on the generator's device, which must be that of the
        labels.
        """
        device = generator.device
        if self.sampling == "shuffle":
            order = torch.randperm(self.count, generator=generator, device=device)
            if self._ends is None:
                return order
            # Each sample as often as one of N evenly spaced points falls into its
            # interval.
            offset = torch.rand(
                (), generator=generator, device=device, dtype=torch.float64
            )
            points = torch.arange(self.count, device=device) + offset
            return torch.searchsorted(self._ends, points, right=True).clamp_(
                max=self.count - 1
            )[order]
        classes = torch.multinomial(
            self._weights, self.count, replacement=True, generator=generator
        )
        sizes = self._sizes[classes]
        within = (
            torch.rand(
                self.count, generator=generator, device=device, dtype=torch.float64
            )
            * sizes
        ).long()
        return self._by_class[self._starts[classes] + within]


def readers_of(
    shards: NDArray[np.int64], batch_size: int, seed: int = 0
) -> tuple[NDArray[np.int64], int]:
    """(N,) which reader has the shard of each sample, and the number of readers, which
    divides the global batch.

    As many readers as have nearly equally many samples; shards are dealt out by seed,
    the largest first.
    """
    sizes = np.bincount(shards)
    order = np.random.default_rng([ORDER, seed]).permutation(len(sizes))
    order = order[np.argsort(-sizes[order], kind="stable")]
    for count in (
        own
        for own in range(min(len(sizes), batch_size), 0, -1)
        if batch_size % own == 0
    ):
        reader, load = (
            np.zeros(len(sizes), dtype=np.int64),
            np.zeros(count, dtype=np.int64),
        )
        for one in order:
            reader[one] = load.argmin()
            load[reader[one]] += sizes[one]
        if count * load.min() >= EVEN * len(shards):
            break
    return reader[shards], count


def by_reader(order: Tensor, reader: Tensor, readers: int, batch_size: int) -> Tensor:
    """The samples of an epoch, rearranged so that each reader has its place in every
    batch; what remains comes last.

    A rank has the same places in all batches: it reads the shards of the same readers,
    however many ranks there are.
    """
    own, share = reader[order], batch_size // readers
    sizes = torch.bincount(own, minlength=readers)
    ranked = torch.argsort(own, stable=True)
    within = torch.empty_like(own)  # place among the samples of the same reader
    within[ranked] = (
        torch.arange(len(own)) - (torch.cumsum(sizes, 0) - sizes)[own[ranked]]
    )
    steps = int(sizes.min()) // share
    key = torch.where(
        within < steps * share, within // share * readers + own, steps * readers
    )
    return order[torch.argsort(key, stable=True)]


def batch_slices(
    count: int,
    batch_size: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    drop_last: bool = False,
) -> list[slice]:
    """Where the batches of one rank lie in the order of an epoch: all ranks together
    use every sample once.

    Every rank has equally many. The samples of the last step are divided evenly; where
    fewer remain than there are ranks, they join the step before, or `drop_last` leaves
    them out.
    """
    few = (
        f"{count} samples cannot be divided among {world_size} ranks: use at most"
        f" {count} processes"
    )
    expect(count >= world_size, few)
    across = batch_size * world_size
    full, remainder = divmod(count, across)
    starts = [step * across for step in range(full)]
    slices = [
        slice(start + rank * batch_size, start + (rank + 1) * batch_size)
        for start in starts
    ]
    if drop_last or not remainder:
        return slices
    start = full * across
    if remainder < world_size:  # too few for a batch on every rank
        slices, start = slices[:-1], starts[-1]
    first, last = (
        start + turn * (count - start) // world_size for turn in (rank, rank + 1)
    )
    return [*slices, slice(first, last)]


def shard(count: int, rank: int = 0, world_size: int = 1, batch_size: int = 1) -> range:
    """The samples that a rank evaluates: whole batches, contiguous; all ranks in turn
    give every sample once.
    """
    batches = -(-count // batch_size)
    first, last = (
        batches * turn // world_size * batch_size for turn in (rank, rank + 1)
    )
    return range(min(first, count), min(last, count))


def capture(
    function: Callable[[], Any], warm_up: int = 1, pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph that does what `function` does, on the same memory, and what the captured
    call returned.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_up):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    collecting = gc.isenabled()
    gc.collect()
    # an older graph that is freed while this one is captured would spoil it
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool):
            found = function()
    finally:
        if collecting:
            gc.enable()
    return graph, found


class Replayed:
    """A pure function of tensors whose shapes do not change, captured at its first call
    on a GPU.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self.function = function
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if not tensors[0].is_cuda:
            return self.function(*tensors)
        if self.graph is None:
            self.given = tuple(tensor.clone() for tensor in tensors)
            self.graph, self.found = capture(lambda: self.function(*self.given))
        for buffer, value in zip(self.given, tensors, strict=True):
            buffer.copy_(value, non_blocking=True)
        self.graph.replay()
        return tuple(
            result.clone() for result in self.found
        )  # the next replay writes where this one did


class Normaliser:
    """`x * scale + shift` over samples (..., channels, H, W) on the scale 0..255, or
    features (..., F).
    """

    def __init__(
        self,
        normalisation: Normalisation | None,
        shape: tuple[int, ...],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        place = (-1, 1, 1) if len(shape) == 3 else (-1,)
        given = normalisation or Normalisation((0.0,) * shape[0], (1.0,) * shape[0])
        mean, std = (
            torch.tensor(values, dtype=torch.float64).view(place)
            for values in (given.mean, given.std)
        )
        scale = 1 / (
            std * (255 if len(shape) == 3 else 1)
        )  # bytes are scaled to 0..1 first
        self._scale, self._shift, self._dtype = (
            scale.float().to(device),
            (-mean / std).float().to(device),
            dtype,
        )

    def __call__(self, inputs: Tensor) -> Tensor:
        return (inputs * self._scale).add_(self._shift).to(self._dtype)


@lru_cache(maxsize=64)
def normaliser(
    normalisation: Normalisation | None, shape: tuple[int, ...], device: torch.device
) -> Normaliser:
    """The one of a model, kept: making it costs a server more than using it."""
    return Normaliser(normalisation, shape, device, torch.float32)


class EpochLoader:
    """What both loaders share: which samples make the batches of R = len(seeds) runs,
    on each rank.

    Run r depends on (seeds[r], epoch) alone. `positions` are the samples of each run,
    where it does not use all.
    """

    def __init__(
        self,
        split: Split,
        normalisation: Normalisation | None,
        drawn_on: torch.device | str,
        *,
        batch_size: int = 128,
        seeds: Sequence[int] = (0,),
        sampling: str = "shuffle",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        positions: Sequence[NDArray[np.int64]] | None = None,
    ) -> None:
        self.device, self.batch_size, self.seeds = (
            torch.device(device),
            batch_size,
            tuple(seeds),
        )
        self.targets = torch.from_numpy(split.labels).to(drawn_on)  # (N,)
        weights = (
            None
            if split.weights is None
            else torch.from_numpy(split.weights).to(drawn_on)
        )
        self._chosen = (
            None
            if positions is None
            else torch.from_numpy(np.stack(positions)).to(drawn_on)
        )
        own = [slice(None)] if self._chosen is None else self._chosen
        known = [
            EpochOrder(
                self.targets[at], sampling, None if weights is None else weights[at]
            )
            for at in own
        ]
        self._orders = known * len(self.seeds) if self._chosen is None else known
        self.count = self._orders[0].count  # samples per run and epoch
        packed = split.inputs.packed if isinstance(split.inputs, ImageFiles) else None
        self._readers = (
            None
            if packed is None
            else readers_of(packed.places[:, 0], batch_size * world_size, seeds[0])
        )
        self._across = batch_size * world_size
        self.slices = batch_slices(
            self.count,
            batch_size,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
        )
        self.steps = len(self.slices)  # batches per epoch, on every rank
        mine = shard(len(split), rank, world_size, batch_size)
        self._evaluated = [
            mine[start : start + batch_size]
            for start in range(0, len(mine), batch_size)
        ]
        self._normalised: Callable[[Tensor], Tensor] = Normaliser(
            normalisation, tuple(split.inputs.shape[1:]), self.device, dtype
        )

    def draw_order(self, epoch: int) -> Tensor:
        generators = [
            seeded(ORDER, seed, epoch, self.targets.device) for seed in self.seeds
        ]
        orders = torch.stack(
            [order.draw(g) for order, g in zip(self._orders, generators, strict=True)]
        )
        orders = orders if self._chosen is None else self._chosen.gather(1, orders)
        if self._readers is None:
            return orders
        reader, count = self._readers
        return torch.stack(
            [
                by_reader(order, torch.from_numpy(reader), count, self._across)
                for order in orders
            ]
        )


class ResidentLoader(EpochLoader):
    """Batches of R runs: augmented, normalised inputs (R, B, channels, H, W) or (R, B,
    F), and targets (R, B).

    `augment` is one for all runs, or one per run.
    """

    def __init__(
        self,
        split: Split,
        normalisation: Normalisation | None = None,
        *,
        augment: Augment | Sequence[Augment] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(split, normalisation, options.get("device", "cpu"), **options)
        self.inputs = torch.from_numpy(split.array).to(self.device)  # (N, ...)
        self.is_images = self.inputs.dtype == torch.uint8
        several = (
            [augment or Augment()]
            if augment is None or isinstance(augment, Augment)
            else list(augment)
        )
        self._each = several if self.is_images else [Augment()]
        self.augment = covering(self._each)
        at_once = BYTES_AT_ONCE // (
            4 * self.inputs[0].numel() * len(self.seeds) * self.batch_size
        )
        self._at_once = (
            1 if self.device.type == "cpu" else max(1, at_once)
        )  # steps that are prepared in one call
        self._known: dict[tuple[int, bool], Replayed] = {}

    def epoch(
        self, epoch: int, start_step: int = 0, weak: bool = False
    ) -> Iterator[tuple[Tensor, ...]]:
        """The batches of an epoch from `start_step` on: a resumed epoch continues
        exactly where it stopped.

        With `weak`, the same inputs without random operations and cutout follow.
        """
        order, draws = self.draw(epoch)
        for first in range(start_step, self.steps, self._at_once):
            batches = self.slices[first : first + self._at_once]
            if (first, weak) not in self._known:
                self._known[first, weak] = self._together(batches, tuple(draws), weak)
            prepared = self._known[first, weak](order, *draws.values())
            sizes = [len(self.seeds) * (batch.stop - batch.start) for batch in batches]
            for batch in zip(
                *(tensor.split(sizes) for tensor in prepared), strict=True
            ):
                yield tuple(
                    tensor.view(len(self.seeds), -1, *tensor.shape[1:])
                    for tensor in batch
                )

    def draw(self, epoch: int) -> tuple[Tensor, Draws]:
        """All random choices of an epoch: the sample at each place (R, N), the
        parameters of its augmentation.
        """
        each = self._each * len(self.seeds) if len(self._each) == 1 else self._each
        generators = [
            seeded(AUGMENTATION, seed, epoch, self.device) for seed in self.seeds
        ]
        drawn = [
            own.draw(self.count, generator)
            for own, generator in zip(each, generators, strict=True)
        ]
        if len(self._each) > 1:
            drawn = [
                self.augment.identity(self.count, self.device) | own for own in drawn
            ]
        return self.draw_order(epoch), {
            name: torch.stack([d[name] for d in drawn]) for name in drawn[0]
        }

    def prepare(
        self, order: Tensor, draws: Draws, weak: bool = False
    ) -> tuple[Tensor, ...]:
        """Inputs (..., channels, H, W) or (..., F) and targets (...) for sample indices
        (...): a pure function.
        """
        picked = self.inputs.index_select(0, order.reshape(-1))
        flat = (
            {name: drawn.flatten(0, order.ndim - 1) for name, drawn in draws.items()}
            if self.is_images
            else {}
        )
        views = [
            augment(picked, flat)
            for augment in (self.augment, *((self.augment.weaker(),) if weak else ()))
        ]
        inputs, *others = (
            self._normalised(view).view(*order.shape, *self.inputs.shape[1:])
            for view in views
        )
        return inputs, self.targets[order], *others

    def transform(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace all inputs by a function of what they are when they are
        normalised.
        """
        self.inputs, self._normalised = (
            function(self._normalised(self.inputs)),
            lambda inputs: inputs,
        )

    def in_order(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every sample of this rank once, in the data set's order, not augmented:
        inputs (B, ...), targets (B,).
        """
        for batch in self._evaluated:
            rows = slice(batch.start, batch.stop)
            yield self._normalised(self.inputs[rows]), self.targets[rows]

    def _together(
        self, batches: Sequence[slice], names: tuple[str, ...], weak: bool
    ) -> Replayed:
        """What prepares these batches at once: in a flattened (R, N) their samples lie
        by step, then by run.
        """
        runs = self.count * np.arange(len(self.seeds))[:, None]
        steps = [
            (runs + np.arange(batch.start, batch.stop)).reshape(-1) for batch in batches
        ]
        places = torch.from_numpy(np.concatenate(steps)).to(self.device)

        def prepare(order: Tensor, *draws: Tensor) -> tuple[Tensor, ...]:
            picked = (drawn.flatten(0, 1)[places] for drawn in draws)
            return self.prepare(
                order.flatten()[places], dict(zip(names, picked, strict=True)), weak
            )

        return Replayed(prepare)

"""Resident loader: nothing lost or repeated, the same seed the same batches, stacked or
alone, resumed or not.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rfdlc.data.augment import AUGMENTATIONS, Augment
from rfdlc.data.dataset import Normalisation, Split
from rfdlc.data.loader import EpochOrder, ResidentLoader, batch_slices, seeded, shard
from rfdlc.errors import InputError


def numbered(count: int, classes: int = 3) -> Split:
    """Features that hold each sample's own number."""
    return Split(
        np.arange(count, dtype=np.float32)[:, None], np.arange(count) % classes
    )


def pictures(count: int = 50) -> Split:
    rng = np.random.default_rng(0)
    return Split(
        rng.integers(0, 256, (count, 3, 8, 8), dtype=np.uint8),
        rng.integers(0, 4, count),
    )


@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 9), st.booleans())
def test_every_sample_once_for_every_batch_size_and_rank_count(
    count: int, batch_size: int, world_size: int, drop_last: bool
) -> None:
    if count < world_size:
        with pytest.raises(InputError, match="cannot be divided"):
            batch_slices(count, batch_size, rank=0, world_size=world_size)
        return
    plans = [
        batch_slices(
            count, batch_size, rank=r, world_size=world_size, drop_last=drop_last
        )
        for r in range(world_size)
    ]
    seen = [i for plan in plans for part in plan for i in range(part.start, part.stop)]
    assert len(seen) == len(set(seen))
    assert len({len(plan) for plan in plans}) == 1  # as many steps on every rank
    sizes = [[part.stop - part.start for part in plan] for plan in plans]
    if drop_last:
        assert len(seen) == count // (batch_size * world_size) * batch_size * world_size
        assert all(size == batch_size for plan in sizes for size in plan)
    else:
        assert sorted(seen) == list(range(count))
        assert all(1 <= size <= batch_size + 1 for plan in sizes for size in plan)
        assert world_size > 1 or all(
            size <= batch_size for plan in sizes for size in plan
        )
    evaluated = [i for r in range(world_size) for i in shard(count, r, world_size)]
    assert evaluated == list(range(count))


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 3), st.integers(0, 3))
def test_an_epoch_loses_and_repeats_nothing(
    count: int, batch_size: int, world_size: int, epoch: int
) -> None:
    if count < world_size:
        return
    seen, evaluated = [], []
    for rank in range(world_size):
        loader = ResidentLoader(
            numbered(count), batch_size=batch_size, rank=rank, world_size=world_size
        )
        for inputs, targets in loader.epoch(epoch):
            assert (inputs[0, :, 0].long() % 3 == targets[0]).all()
            seen += inputs[0, :, 0].int().tolist()
        evaluated += [int(v) for inputs, _ in loader.in_order() for v in inputs[:, 0]]
    assert sorted(seen) == list(range(count))
    assert evaluated == list(range(count))


def batches(loader: ResidentLoader, epoch: int, start: int = 0) -> list[torch.Tensor]:
    return [inputs for inputs, _ in loader.epoch(epoch, start)]


def test_same_seed_same_batches_and_other_seed_other_ones() -> None:
    split, augment = pictures(), Augment.paper()
    first, again = (
        batches(ResidentLoader(split, batch_size=16, seeds=(5,), augment=augment), 3)
        for _ in range(2)
    )
    other_seed = batches(
        ResidentLoader(split, batch_size=16, seeds=(6,), augment=augment), 3
    )
    other_epoch = batches(
        ResidentLoader(split, batch_size=16, seeds=(5,), augment=augment), 4
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other_seed, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other_epoch, strict=True))


@pytest.mark.parametrize("sampling", ["shuffle", "balanced", "sqrt"])
def test_a_run_sees_the_same_alone_and_stacked(sampling: str) -> None:
    def loader(*seeds: int) -> ResidentLoader:
        return ResidentLoader(
            pictures(),
            batch_size=16,
            seeds=seeds,
            augment=Augment.paper(),
            sampling=sampling,
        )

    stacked = list(loader(3, 1, 4).epoch(7))
    for r, seed in enumerate((3, 1, 4)):
        for (inputs, targets), (alone, alone_targets) in zip(
            stacked, loader(seed).epoch(7), strict=True
        ):
            assert torch.equal(inputs[r], alone[0])
            assert torch.equal(targets[r], alone_targets[0])
    assert stacked[0][0].shape == (3, 16, 3, 8, 8)
    assert not torch.equal(stacked[0][0][0], stacked[0][0][1])


@pytest.mark.parametrize("start", [0, 1, 3, 4])
def test_a_resumed_epoch_continues_where_it_stopped(start: int) -> None:
    loader = ResidentLoader(pictures(), batch_size=16, augment=Augment.paper())
    whole, rest = batches(loader, 2), batches(loader, 2, start)
    assert len(whole) == loader.steps == 4
    assert len(rest) == 4 - start
    assert all(torch.equal(a, b) for a, b in zip(whole[start:], rest, strict=True))


def test_preparing_many_batches_at_once_gives_the_same_batches() -> None:
    loader, many = (
        ResidentLoader(pictures(), batch_size=16, seeds=(0, 1), augment=Augment.paper())
        for _ in range(2)
    )
    many._at_once = 3
    for first in (0, 1, 3):
        together = list(many.epoch(0, first))
        for (inputs, targets), (expected, expected_targets) in zip(
            together, loader.epoch(0, first), strict=True
        ):
            assert torch.equal(inputs, expected)
            assert torch.equal(targets, expected_targets)
            assert inputs.is_contiguous()


def test_normalisation_by_hand() -> None:
    split = pictures(10)
    normalisation = Normalisation((0.5, 0.25, 0.1), (0.2, 0.3, 0.4))
    inputs, _ = next(
        iter(ResidentLoader(split, normalisation, batch_size=10).in_order())
    )
    for channel in range(3):
        expected = (
            split.array[:, channel] / 255 - normalisation.mean[channel]
        ) / normalisation.std[channel]
        assert np.allclose(inputs[:, channel].numpy(), expected, atol=1e-5)
    measured = Normalisation.of(split.array)
    assert np.allclose(measured.mean, (split.array / 255).mean((0, 2, 3)))
    assert np.allclose(measured.std, (split.array / 255).std((0, 2, 3)))


def test_half_precision_and_drop_last() -> None:
    loader = ResidentLoader(
        pictures(), batch_size=16, drop_last=True, dtype=torch.bfloat16
    )
    shapes = [(inputs.shape, inputs.dtype) for inputs, _ in loader.epoch(0)]
    assert shapes == [((1, 16, 3, 8, 8), torch.bfloat16)] * 3


@pytest.mark.parametrize(("sampling", "power"), [("balanced", 0.0), ("sqrt", 0.5)])
def test_sampling_frequencies(sampling: str, power: float) -> None:
    sizes = np.array([6400, 1600, 0, 100, 25])
    labels = torch.from_numpy(np.repeat(np.arange(5), sizes))
    order = EpochOrder(labels, sampling).draw(seeded(0, 0, 0))
    assert len(order) == sizes.sum()
    expected = np.where(sizes > 0, np.maximum(sizes, 1) ** power, 0)
    expected = expected / expected.sum() * sizes.sum()
    drawn = np.bincount(labels[order], minlength=5)
    assert (
        np.abs(drawn - expected) <= 5 * np.sqrt(expected)
    ).all()  # five standard deviations
    within = np.bincount(order[labels[order] == 4] - 8100, minlength=25)
    assert (within > 0).all()  # every sample of the smallest class has its turn


def test_wrong_settings_are_errors() -> None:
    with pytest.raises(InputError, match="did you mean 'balanced'"):
        ResidentLoader(numbered(5), sampling="balancd")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "augment", [Augment.paper(), replace(AUGMENTATIONS["randaugment"], cutout=3)]
)
def test_replayed_preparation_is_the_preparation(augment: Augment) -> None:
    split = pictures(300)
    loader = ResidentLoader(
        split, batch_size=64, seeds=(0, 1), augment=augment, device="cuda"
    )
    for epoch in (1, 2):  # captured, then replayed
        (order, draws), found = loader.draw(epoch), list(loader.epoch(epoch))
        for part, (inputs, targets) in zip(loader.slices, found, strict=True):
            drawn = {name: values[:, part] for name, values in draws.items()}
            expected, labels = loader.prepare(order[:, part], drawn)
            torch.testing.assert_close(inputs, expected)
            assert torch.equal(targets, labels)


def test_slices_and_shards_by_hand() -> None:
    assert [(s.start, s.stop) for s in batch_slices(10, 4)] == [(0, 4), (4, 8), (8, 10)]
    two = [
        [(s.start, s.stop) for s in batch_slices(10, 2, rank=rank, world_size=2)]
        for rank in (0, 1)
    ]
    assert two == [[(0, 2), (4, 6), (8, 9)], [(2, 4), (6, 8), (9, 10)]]
    assert [list(shard(5, rank, 2)) for rank in (0, 1)] == [[0, 1], [2, 3, 4]]
    assert [list(shard(5, rank, 2, batch_size=4)) for rank in (0, 1)] == [
        [0, 1, 2, 3],
        [4],
    ]

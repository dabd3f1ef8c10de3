"""Profiles, subsets and hold-outs: counts, both sides of every class, groups never
split.
"""

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rfdlc.data import longtail
from rfdlc.data.dataset import Dataset, Split
from rfdlc.data.longtail import hold_out_indices, profile_counts, subset
from rfdlc.errors import InputError


def test_published_profiles() -> None:
    assert profile_counts(500, 100, 100).sum() == 10847
    assert profile_counts(500, 100, 100)[[0, 99]].tolist() == [500, 5]
    assert profile_counts(5000, 10, 100).tolist() == [
        5000,
        2997,
        1796,
        1077,
        645,
        387,
        232,
        139,
        83,
        50,
    ]
    assert profile_counts(5000, 10, 100, "step").tolist() == [5000] * 5 + [50] * 5
    assert profile_counts(500, 100, 50).tolist() == [
        int(500 * 50 ** (-c / 99)) for c in range(100)
    ]


@given(st.integers(2, 400), st.integers(2, 60))
def test_profile_runs_from_the_largest_to_a_whole_quotient(
    n_max: int, classes: int
) -> None:
    for factor in {
        d for d in range(1, n_max + 1) if n_max % d == 0
    }:  # where floating point could lose one
        counts = profile_counts(n_max, classes, factor)
        assert counts[0] == n_max
        assert counts[-1] == n_max // factor
        assert (np.diff(counts) <= 0).all()


@pytest.mark.parametrize(("factor", "word"), [(0.5, "factor 0.5"), (501, "factor 501")])
def test_a_factor_out_of_range_is_an_error(factor: float, word: str) -> None:
    with pytest.raises(InputError, match=word):
        profile_counts(500, 10, factor)


def test_subset_follows_counts_and_nests() -> None:
    labels = np.random.default_rng(0).integers(0, 5, 500)
    large, small = (
        subset(labels, np.array(c), seed=3)
        for c in ([50, 40, 30, 20, 10], [50, 20, 8, 3, 1])
    )
    assert np.bincount(labels[large]).tolist() == [50, 40, 30, 20, 10]
    assert np.bincount(labels[small]).tolist() == [50, 20, 8, 3, 1]
    assert set(small) <= set(large)
    assert (np.diff(large) > 0).all()
    assert (
        subset(labels, np.array([50] * 5), seed=4).tolist()
        != subset(labels, np.array([50] * 5), seed=3).tolist()
    )


labels_of = st.lists(st.integers(0, 6), min_size=1, max_size=80).map(np.array)


@given(labels_of, st.floats(0.01, 0.99), st.integers(0, 5))
def test_hold_out_keeps_every_class_on_both_sides(
    labels: np.ndarray, fraction: float, seed: int
) -> None:
    kept, held = hold_out_indices(labels, fraction, seed)
    assert sorted([*kept, *held]) == list(range(len(labels)))
    for c in np.unique(labels):
        n, h = (labels == c).sum(), (labels[held] == c).sum()
        assert h == 0 if n == 1 else 1 <= h <= n - 1
        assert abs(h - n * fraction) <= 1 or n == 1
    again = hold_out_indices(labels, fraction, seed)
    assert again[0].tolist() == kept.tolist()


@settings(max_examples=200)
@given(st.data(), labels_of, st.floats(0.05, 0.6), st.integers(0, 5))
def test_hold_out_by_group_never_splits_a_group(
    data: st.DataObject, labels: np.ndarray, fraction: float, seed: int
) -> None:
    groups = np.array(
        data.draw(
            st.lists(st.integers(0, 20), min_size=len(labels), max_size=len(labels))
        )
    )
    kept, held = hold_out_indices(labels, fraction, seed, groups)
    assert sorted([*kept, *held]) == list(range(len(labels)))
    assert not set(groups[kept]) & set(groups[held])
    assert set(np.unique(labels)) >= set(labels[kept])


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), min_size=1, max_size=30),
    st.floats(0.05, 0.6),
)
def test_groups_of_one_class_leave_it_on_both_sides(
    sizes: list[tuple[int, int]], fraction: float
) -> None:
    labels = np.concatenate([np.full(n, c) for c, n in sizes])
    groups = np.concatenate(
        [np.full(n, f"group-{g}") for g, (_, n) in enumerate(sizes)]
    )
    kept, held = hold_out_indices(labels, fraction, 0, groups)
    for c in np.unique(labels):
        assert c in labels[kept]
        assert (c in labels[held]) == (len(np.unique(groups[labels == c])) >= 2)


def test_a_large_group_stays_in_training() -> None:
    labels = np.zeros(1001, dtype=np.int64)
    kept, held = hold_out_indices(labels, 0.1, 0, np.array(["big"] * 1000 + ["small"]))
    assert (len(kept), len(held)) == (1000, 1)


@pytest.mark.parametrize("fraction", [0, 1, -0.5, 2])
def test_a_fraction_out_of_range_is_an_error(fraction: float) -> None:
    with pytest.raises(InputError, match="expected 0 < fraction < 1"):
        hold_out_indices(np.array([0, 1]), fraction)


def sites(
    seed: int, count: int = 12, classes: int = 10
) -> tuple[np.ndarray, np.ndarray]:
    """Labels and groups of about 1,500 photographs: sites of different sizes, most
    classes at some of them only.
    """
    rng, tail = np.random.default_rng(seed), 0.6 ** np.arange(classes)
    sizes = 5 + (1500 * rng.dirichlet(np.ones(count))).astype(int)
    labels = [
        rng.choice(classes, n, p=rng.dirichlet(3 * tail / tail.sum() + 0.02))
        for n in sizes
    ]
    return np.concatenate(labels), np.repeat(np.arange(count), sizes)


def counted(labels: np.ndarray, groups: np.ndarray) -> np.ndarray:
    table = np.zeros((groups.max() + 1, labels.max() + 1))
    np.add.at(table, (groups, labels), 1)
    return table[table.any(axis=1)][:, table.any(axis=0)]


def one_sided(table: np.ndarray, held: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For held-out groups (..., G): classes that are not kept, and of several groups,
    those that are not held out.
    """
    counts = held @ table
    several = (table > 0).sum(0) > 1
    return (counts == table.sum(0)).sum(-1), ((counts == 0) & several).sum(-1)


def size_off(table: np.ndarray, held: np.ndarray, fraction: float) -> np.ndarray:
    return np.abs((held @ table).sum(-1) / table.sum() - fraction)


@pytest.mark.parametrize(("count", "fraction"), [(12, 0.2), (12, 0.1), (9, 0.1)])
def test_few_groups_come_close_to_the_best_of_all_subsets(
    count: int, fraction: float
) -> None:
    subsets = (np.arange(2**count)[:, None] >> np.arange(count)) % 2 == 1
    off = []
    for seed in range(12):
        labels, groups = sites(seed, count)
        table = counted(labels, groups)
        held = np.isin(
            np.arange(count), groups[hold_out_indices(labels, fraction, 0, groups)[1]]
        )
        absent, unseen = one_sided(table, subsets)
        fewest = absent == absent.min()
        fewest &= unseen == unseen[fewest].min()
        assert (absent.min(), unseen[fewest].min()) == one_sided(table, held)
        off.append(
            size_off(table, held, fraction)
            - size_off(table, subsets[fewest], fraction).min()
        )
    assert np.mean(off) < 0.25 * fraction  # shares of classes count, too


@settings(max_examples=60)
@given(
    st.integers(0, 10**6), st.integers(2, 40), st.floats(0.05, 0.5), st.integers(0, 3)
)
def test_groups_are_never_farther_off_than_the_first_choice(
    seed: int, count: int, fraction: float, run: int
) -> None:
    labels, groups = sites(seed, count)
    table = counted(labels, groups)
    after = np.isin(
        np.arange(count), groups[hold_out_indices(labels, fraction, run, groups)[1]]
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(longtail, "MOST_COUNTED", 0)
        before = np.isin(
            np.arange(count), groups[hold_out_indices(labels, fraction, run, groups)[1]]
        )
    assert one_sided(table, after) <= one_sided(table, before)
    if one_sided(table, after) == one_sided(table, before):
        assert size_off(table, after, fraction) <= size_off(table, before, fraction)
    again = groups[hold_out_indices(labels, fraction, run, groups)[1]]
    assert (np.isin(np.arange(count), again) == after).all()


def test_many_groups_take_no_longer() -> None:
    rng = np.random.default_rng(0)
    labels, groups = rng.integers(0, 20, 100_000), rng.integers(0, 50_000, 100_000)
    began = time.process_time()
    held = hold_out_indices(labels, 0.2, 0, groups)[1]
    assert (
        time.process_time() - began < 5
    )  # work that grows with the square of groups takes minutes
    assert len(held) == pytest.approx(20_000, rel=0.01)


def test_a_split_far_from_what_was_asked_gets_a_note() -> None:
    labels = np.tile([0, 1], 50)
    groups = np.repeat([0, 1, 2], [40, 30, 30])  # every split has 30% or more
    data = Dataset.of(
        "sites",
        ["a", "b"],
        {"train": Split(np.eye(100, dtype=np.float32), labels, groups=groups)},
    )
    told = (
        "30% of the samples are held out instead of 10%: groups stay whole, and a class"
        " in two or more of them"
    )
    assert data.hold_out(0.1).notes[0].startswith(told)
    assert data.hold_out(0.25).notes == ()
    alone = replace(data, train=replace(data.train, groups=None))
    assert alone.hold_out(0.1).notes == ()

"""Profiles, subsets and hold-outs: counts, both sides of every class, groups never split."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rfdlc.data.longtail import hold_out_indices, profile_counts, subset
from rfdlc.errors import InputError


def test_published_profiles() -> None:
    assert profile_counts(500, 100, 100).sum() == 10847
    assert profile_counts(500, 100, 100)[[0, 99]].tolist() == [500, 5]
    assert profile_counts(5000, 10, 100).tolist() == [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
    assert profile_counts(5000, 10, 100, "step").tolist() == [5000] * 5 + [50] * 5
    assert profile_counts(500, 100, 50).tolist() == [int(500 * 50 ** (-c / 99)) for c in range(100)]


@given(st.integers(2, 400), st.integers(2, 60))
def test_profile_runs_from_the_largest_to_a_whole_quotient(n_max: int, classes: int) -> None:
    for factor in {d for d in range(1, n_max + 1) if n_max % d == 0}:  # where floating point could lose one
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
    large, small = (subset(labels, np.array(c), seed=3) for c in ([50, 40, 30, 20, 10], [50, 20, 8, 3, 1]))
    assert np.bincount(labels[large]).tolist() == [50, 40, 30, 20, 10]
    assert np.bincount(labels[small]).tolist() == [50, 20, 8, 3, 1]
    assert set(small) <= set(large)
    assert (np.diff(large) > 0).all()
    assert subset(labels, np.array([50] * 5), seed=4).tolist() != subset(labels, np.array([50] * 5), seed=3).tolist()


labels_of = st.lists(st.integers(0, 6), min_size=1, max_size=80).map(np.array)


@given(labels_of, st.floats(0.01, 0.99), st.integers(0, 5))
def test_hold_out_keeps_every_class_on_both_sides(labels: np.ndarray, fraction: float, seed: int) -> None:
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
    groups = np.array(data.draw(st.lists(st.integers(0, 20), min_size=len(labels), max_size=len(labels))))
    kept, held = hold_out_indices(labels, fraction, seed, groups)
    assert sorted([*kept, *held]) == list(range(len(labels)))
    assert not set(groups[kept]) & set(groups[held])
    assert set(np.unique(labels)) >= set(labels[kept])


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), min_size=1, max_size=30), st.floats(0.05, 0.6))
def test_groups_of_one_class_leave_it_on_both_sides(sizes: list[tuple[int, int]], fraction: float) -> None:
    labels = np.concatenate([np.full(n, c) for c, n in sizes])
    groups = np.concatenate([np.full(n, f"group-{g}") for g, (_, n) in enumerate(sizes)])
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

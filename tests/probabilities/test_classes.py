import json
from collections import Counter

import numpy as np
import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfdlc import Classes, InputError


def test_rank_is_by_falling_count_ties_by_class_order():
    classes = Classes.from_counts([5, 9, 5, 20])
    assert classes.order.tolist() == [3, 1, 0, 2]
    assert classes.rank.tolist() == [2, 1, 3, 0]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30))
def test_rank_equals_a_naive_sort(counts):
    classes = Classes.from_counts(counts)
    naive = sorted(range(len(counts)), key=lambda c: (-counts[c], c))
    assert classes.order.tolist() == naive
    assert [naive.index(c) for c in range(len(counts))] == classes.rank.tolist()


@pytest.mark.parametrize(
    ("number", "sizes"),
    [
        (100, (33, 33, 34)),
        (10, (3, 3, 4)),
        (7, (2, 2, 3)),
        (3, (1, 1, 1)),
        (2, (1, 0, 1)),
        (1, (1, 0, 0)),
    ],
)
def test_thirds(number, sizes):
    thirds = Classes.from_counts(list(range(number, 0, -1))).thirds
    assert tuple(len(members) for members in thirds.values()) == sizes
    assert sorted(np.concatenate(list(thirds.values())).tolist()) == list(range(number))


def test_shots_at_their_edges():
    classes = Classes.from_counts({"a": 101, "b": 100, "c": 20, "d": 19, "e": 0})
    assert {k: classes.select(v) for k, v in classes.shots.items()} == {
        "many": ("a",),
        "medium": ("b", "c"),
        "few": ("d", "e"),
    }


def test_head_mask_rounds_half_up_by_rank():
    classes = Classes.from_counts([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert np.flatnonzero(classes.head_mask(0.25)).tolist() == [
        7,
        8,
        9,
    ]  # int(2.5 + .5) = 3, as the paper's code
    with pytest.raises(InputError, match="0 < share < 1"):
        classes.head_mask(1.0)


def test_from_labels():
    assert Classes.from_labels([0, 2, 2]).counts == (1, 0, 2)
    assert Classes.from_labels(["b", "a", "b"]).to_dict() == {
        "names": ["a", "b"],
        "counts": [1, 2],
        "groups": {},
    }
    assert Classes.from_labels(["b"], names=["b", "z"]).counts == (1, 0)
    assert Classes.from_labels(np.array([1.0, 0.0])).counts == (1, 1)
    assert Classes.from_labels(np.array([0, 10, 2], dtype=object)).names == tuple(
        map(str, range(11))
    )
    assert Classes.from_labels(np.array(["é".encode(), b"a"])).names == ("a", "é")


def test_json_round_trip(tmp_path):
    classes = Classes.from_counts({"Käse": 3, "<b>": 1}, groups={"food": ["Käse"]})
    classes.to_json(tmp_path / "c.json")
    assert (
        Classes.from_json(tmp_path / "c.json")
        == classes
        == Classes.from_json(classes.to_json())
    )
    assert (
        Classes.from_json(json.loads((tmp_path / "c.json").read_text("utf-8")))
        == classes
    )


def test_counted_labels_are_sorted_and_written_tables_are_not():
    for labels in (["newt", "dog", "dog", "cat", "dog", "cat"], [10, 2, 2, 1, 2, 1]):
        counted = Classes.from_counts(pandas.Series(labels).value_counts())
        assert counted == Classes.from_counts(Counter(labels))
        assert counted.names == tuple(str(label) for label in sorted(set(labels)))
        assert counted.counts == tuple(
            labels.count(label) for label in sorted(set(labels))
        )
    assert Classes.from_counts({"newt": 1, "cat": 2}).names == ("newt", "cat")
    names, counts = np.unique(["newt", "cat", "cat"], return_counts=True)
    assert Classes.from_counts(counts, names) == Classes.from_counts(
        {"cat": 2, "newt": 1}
    )


def test_booleans_are_names_where_classes_are_called_so():
    assert Classes(("True", "False")).encode([True, False]).tolist() == [0, 1]
    assert Classes(("no", "yes")).encode([True, False]).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Classes(()), "at least one name"),
        (lambda: Classes(("a", "b", "a")), "appear more than once: a"),
        (
            lambda: Classes(("a", " ")),
            "class names must not be blank, but one of 'a', ' ' is",
        ),
        (
            lambda: Classes(("a\n", "caf\udce9")),
            r"without control characters, but 'a\\n', 'caf\\udce9' is not: rename",
        ),
        (lambda: Classes(("a",), (None,)), "training count None of class 'a'"),
        (lambda: Classes(("a",), (float("inf"),)), "training count inf of class 'a'"),
        (lambda: Classes(("a",), (1, 2)), "2 training counts for 1 classes"),
        (lambda: Classes(("a",), (-1,)), "training count -1 of class 'a'"),
        (lambda: Classes(("a",), (1.5,)), "training count 1.5"),
        (lambda: Classes(("a",), ("x",)), "training count 'x'"),
        (lambda: Classes(("a",), None, {"g": ("b",)}), "label 'b' is not a class"),
        (lambda: Classes.from_labels([]), "non-empty"),
        (
            lambda: Classes(("a", "b")).encode(np.ma.array([0, 1], mask=[1, 0])),
            "some values are masked",
        ),
        (
            lambda: Classes.from_labels([0, 0.5]),
            "label 0.5 at position 1 is not a whole number",
        ),
        (
            lambda: Classes.from_labels([0, float("nan")]),
            "label nan at position 1 is not a whole number",
        ),
        (
            lambda: Classes.from_labels(["a", None]),
            "label None at position 1 is missing",
        ),
        (
            lambda: Classes.from_labels(np.array(["a", float("nan")], dtype=object)),
            "label nan at position 1 is missing",
        ),
        (
            lambda: Classes.from_labels(["a", pandas.NA]),
            "label <NA> at position 1 is missing",
        ),
        (
            lambda: Classes.from_labels([0, -1]),
            "label -1 at position 1 is out of range",
        ),
        (
            lambda: Classes(("1", "2")).encode([2]),
            r"out of range.* pass labels.astype\(str\)",
        ),
        (
            lambda: Classes(("a", "b")).encode([2]),
            "expected a class number from 0 on, less than 2",
        ),
        (lambda: Classes(("bird", "cat")).encode(["birb"]), "did you mean 'bird'"),
        (
            lambda: Classes(("bird", "cat")).members("birb"),
            "group or class 'birb' is unknown.*did you mean 'bird'",
        ),
        (lambda: Classes(("a", "b")).rank, "no training counts"),
        (lambda: Classes.from_counts([0, 0]).prior, "all training counts are zero"),
        (lambda: Classes(("a", "b")).in_order(["a", "c"]), "'b' is in only one"),
        (lambda: Classes.from_json("missing.json"), "missing.json: cannot be read"),
        (lambda: Classes.from_json({"counts": [1]}), "a list 'names'"),
        (
            lambda: Classes.from_json({"names": ["a"], "counts": 5}),
            "a list 'counts' with one count per class",
        ),
        (
            lambda: Classes.from_json({"names": ["a"], "groups": ["a"]}),
            "an object 'groups'",
        ),
        (
            lambda: Classes.from_json({"names": ["a"], "groups": {"g": "a"}}),
            "with a list of classes per name",
        ),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(InputError, match=message):
        make()

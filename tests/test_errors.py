"""Words of error messages: suggestions, shortened lists, repeated names."""

import pytest

from rfdlc.errors import InputError, are, choose, counted, listing, repeated, suggestion


def test_suggestions() -> None:
    assert suggestion("birb", ["bird", "cat"]) == "; did you mean 'bird'?"
    assert suggestion("whale", ["bird", "cat"]) == ""
    assert "their accents are encoded otherwise" in suggestion(
        "caf\u00e9", ["cafe\u0301"]
    )
    assert choose("rule", "argmax", ["argmax", "expected-utility"]) == "argmax"
    with pytest.raises(
        InputError,
        match="rule 'armax' is unknown: expected one of argmax; did you mean 'argmax'",
    ):
        choose("rule", "armax", ["argmax"])


def test_lists_of_names() -> None:
    assert listing(range(10), most=3) == "0, 1, 2, ... (10 in all)"
    assert listing("ab") == "a, b"
    assert repeated(["b", "a", "b", "a", "c"]) == ["a", "b"]


@pytest.mark.parametrize(
    ("given", "names", "expected"),
    [
        (
            "part",
            ["path", "label", "part_id", "part_of_line"],
            "part_id",
        ),  # the shortest that has all of it
        ("Rate", ["ratio", "learning_rate"], "learning_rate"),
        ("pathh", ["path", "part_id"], "path"),
        ("id", ["part_id", "ie"], None),  # two letters are in many names
    ],
)
def test_a_longer_name_with_all_letters_is_suggested_first(given, names, expected):
    assert suggestion(given, names) == (
        "" if expected is None else f"; did you mean {expected!r}?"
    )


def test_one_is_singular():
    assert [f"{counted(n, 'more sample')} {are(n)}" for n in (0, 1, 1200)] == [
        "0 more samples are",
        "1 more sample is",
        "1,200 more samples are",
    ]

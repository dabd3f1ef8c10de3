"""Words of error messages: suggestions, shortened lists, repeated names."""

import pytest

from rfdlc.errors import InputError, choose, listing, repeated, suggestion


def test_suggestions() -> None:
    assert suggestion("birb", ["bird", "cat"]) == "; did you mean 'bird'?"
    assert suggestion("whale", ["bird", "cat"]) == ""
    assert "their accents are encoded otherwise" in suggestion("caf\u00e9", ["cafe\u0301"])
    assert choose("rule", "argmax", ["argmax", "expected-utility"]) == "argmax"
    with pytest.raises(InputError, match="rule 'armax' is unknown: expected one of argmax; did you mean 'argmax'"):
        choose("rule", "armax", ["argmax"])


def test_lists_of_names() -> None:
    assert listing(range(10), most=3) == "0, 1, 2, ... (10 in all)"
    assert listing("ab") == "a, b"
    assert repeated(["b", "a", "b", "a", "c"]) == ["a", "b"]

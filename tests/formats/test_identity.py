"""Digests of files and of models."""

import os

import numpy as np
import pytest

from rfdlc.formats import identity
from rfdlc.formats.identity import check_same_model, digest_of_files, model_name


def rewritten(path, content):
    """Other content of the same size at the same time, as `cp -p` may leave it."""
    before = path.stat()
    assert len(content) == before.st_size
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("piece", [300, identity.PIECE])
def test_small_files_are_what_they_hold(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(identity, "PIECE", piece)
    file, copy = tmp_path / "a", tmp_path / "b"
    file.write_bytes(bytes(1000))
    copy.write_bytes(bytes(1000))
    os.utime(copy, (1, 1))
    assert digest_of_files([file]) == digest_of_files([copy])
    rewritten(copy, bytes(999) + b"1")
    assert digest_of_files([file]) != digest_of_files([copy])
    assert digest_of_files([file, copy]) != digest_of_files([copy, file])
    (tmp_path / "c").write_bytes(b"")
    missing = digest_of_files([file, tmp_path / "none"])
    assert missing != digest_of_files([file, tmp_path / "c"])


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(identity, "WHOLE", 10_000)
    monkeypatch.setattr(identity, "BLOCK", 100)
    monkeypatch.setattr(identity, "BLOCKS", 20)


def test_large_files_are_sampled_over_all_of_them(tmp_path, small_blocks):
    files = [tmp_path / name for name in "abc"]
    content = np.random.default_rng(0).bytes(10_000)
    for file in files:
        file.write_bytes(content)
    before = digest_of_files(files)
    rng = np.random.default_rng(1)
    for file in files:
        for start in (0, 4_000, 8_000):  # a run of rows that is longer than a gap
            changed = bytearray(content)
            changed[start : start + 2_000] = rng.bytes(2_000)
            rewritten(file, bytes(changed))
            assert digest_of_files(files) != before
        rewritten(file, content)
    assert digest_of_files(files) == before


def test_of_large_files_the_time_counts_unless_copies_are_the_same(
    tmp_path, small_blocks
):
    file = tmp_path / "a"
    file.write_bytes(bytes(20_000))
    before, copied = digest_of_files([file]), digest_of_files([file], times=False)
    os.utime(file, (1, 1))
    assert digest_of_files([file]) != before
    assert digest_of_files([file], times=False) == copied


def test_models_differ_by_weights_classes_their_order_and_configuration():
    names = {
        model_name("w", ["a", "b"], "c"),
        model_name("v", ["a", "b"], "c"),
        model_name("w", ["b", "a"], "c"),
        model_name("w", ["ab"], "c"),
        model_name("w", ["a", "b"], "d"),
    }
    assert len(names) == 5
    assert {len(name) for name in names} == {16}


def test_what_does_not_say_its_model_is_taken_on_trust_in_one_line(recwarn):
    check_same_model("one", "1", "another", "1", "fix it")
    check_same_model("one", "", "another", "", "fix it")
    assert not recwarn.list
    for first, second, silent in (("1", "", "another"), ("", "1", "one")):
        with pytest.warns(match=f"^{silent} does not say .* model 1.* on trust$"):
            check_same_model("one", first, "another", second, "fix it")
    with pytest.raises(
        ValueError, match=r"one is of model 1, but another .* 2: fix it"
    ):
        check_same_model("one", "1", "another", "2", "fix it")

"""Arrays on disk: whole, row by row, and those that cannot be read."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rfdlc.errors import InputError
from rfdlc.formats.arrays import (
    ZippedRows,
    array_names,
    open_arrays,
    open_npy,
    open_rows,
)

X = np.arange(60, dtype=np.float32).reshape(20, 3)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_rows_are_those_of_the_array(tmp_path: Path, save: Callable[..., None]) -> None:
    save(tmp_path / "a.npz", first=np.arange(7), x=X)
    rows = open_rows(tmp_path / "a.npz", "x")
    assert isinstance(rows, ZippedRows)
    assert rows.shape == X.shape
    for start, stop in [(0, 4), (4, 20), (2, 3), (5, 5)]:
        np.testing.assert_array_equal(rows[start:stop], X[start:stop])
    assert array_names(tmp_path / "a.npz") == ["first", "x"]


def test_what_has_no_rows_in_a_file_is_read_whole(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", by_column=np.asfortranarray(X), one=np.int64(3))
    for name, expected in (("by_column", X), ("one", 3)):
        found = open_rows(tmp_path / "a.npz", name)
        assert not isinstance(found, ZippedRows)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("folder", [False, True])
def test_only_what_is_streamed_is_left_on_disk(tmp_path: Path, folder: bool) -> None:
    path = tmp_path / "a.npz"
    if folder:
        path = tmp_path
        np.save(tmp_path / "x.npy", X)
        np.save(tmp_path / "y.npy", X[:, 0])
    else:
        np.savez(path, x=X, y=X[:, 0])
    arrays = open_arrays(path, streamed=lambda name: name == "x")
    assert isinstance(arrays["x"], np.memmap if folder else ZippedRows)
    assert type(arrays["y"]) is np.ndarray
    np.testing.assert_array_equal(arrays["x"][3:9], X[3:9])
    whole = open_arrays(path)
    assert {name: type(values) for name, values in whole.items()} == {
        "x": np.ndarray,
        "y": np.ndarray,
    }


def test_rows_that_a_file_has_no_more_are_named(tmp_path: Path) -> None:
    file = tmp_path / "a.npz"
    np.savez(file, x=X)
    rows = open_rows(file, "x")
    longer = dataclasses.replace(rows, shape=(1000, 3))
    np.testing.assert_array_equal(longer[0:20], X)
    with pytest.raises(InputError, match=r"a\.npz: it ends too early"):
        longer[500:600]


def test_what_is_no_array(tmp_path: Path) -> None:
    file = tmp_path / "a.npz"
    file.write_bytes(b"PK\x03\x04 nothing")
    assert array_names(file) == []
    with pytest.raises(InputError, match=r"a\.npz: cannot be read as numpy arrays"):
        open_arrays(file)
    np.savez(file, x=np.array([{}], dtype=object))
    with pytest.raises(InputError, match=r"the array 'x' holds Python objects"):
        open_arrays(file)
    np.save(tmp_path / "b.npy", np.array([{}], dtype=object))
    with pytest.raises(InputError, match=r"b\.npy: holds Python objects"):
        open_npy(tmp_path / "b.npy")

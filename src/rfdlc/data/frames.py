"""Columns of data frames, and of cells that hold lists; labels that are given beside
them.
"""

import re
import reprlib
import warnings
from collections.abc import Mapping, Sized
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.errors import InputError, expect, listing
from rfdlc.formats.table_cells import skipped
from rfdlc.formats.tables import check_names
from rfdlc.probabilities.classes import as_array

CLASS, SPLIT = "target", "split"  # columns of what is given beside a data frame


def is_frame(source: Any) -> bool:
    """Whether this is a data frame, or `(X, y)` with a data frame X, or such pairs by
    split.
    """
    each = source.values() if isinstance(source, dict) else [source]
    pairs = [own[0] for own in each if isinstance(own, tuple | list) and len(own) == 2]
    return all(
        type(own).__name__ == "DataFrame"
        for own in (pairs if pairs and len(pairs) == len(each) else [source])
    )


def columns_of(source: Any) -> dict[str, Any]:
    """Columns of a data frame, or of data frames by split, with those of labels that
    are given beside.
    """
    if not isinstance(source, dict | tuple | list):
        return _without_empty_rows(_checked(source))
    parts = list[dict[str, Any]]()
    for split, (frame, labels) in (
        source.items() if isinstance(source, dict) else [("", source)]
    ):
        own, cells = _checked(frame), np.array(as_array(labels), dtype=object)
        taken = [name for name in own if name in (CLASS, SPLIT)]
        expect(
            not taken,
            f"data frame: column {listing(taken)} beside labels: rename or drop it",
        )
        told = (
            f"data frame: {len(frame):,} rows and labels of shape {cells.shape}:"
            " expected one label per row"
        )
        expect(cells.shape == (len(frame),), told)
        parts.append(
            own
            | {CLASS: cells}
            | ({SPLIT: np.full(len(frame), split, dtype=object)} if split else {})
        )
    differ = sorted(
        {
            name
            for own in parts
            for name in own
            if not all(name in each for each in parts)
        }
    )
    expect(
        not differ,
        f"data frames of splits: column {listing(differ)} is not in all of them: add or"
        " drop it",
    )
    return {name: np.concatenate([own[name] for own in parts]) for name in parts[0]}


def _checked(frame: Any) -> dict[str, NDArray[Any]]:
    check_names("data frame", [str(name) for name in frame.columns])
    return frame_columns(frame)


def _without_empty_rows(columns: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Without the rows in which every cell is missing, as those of a CSV file are left
    out.
    """
    empty = [*range(len(next(iter(columns.values()))))] if len(columns) > 1 else []
    for cells in columns.values():
        empty = [row for row in empty if _is_missing(cells[row])]
    if empty:
        warnings.warn(skipped("data frame", len(empty)), stacklevel=2)
        return {name: np.delete(cells, empty) for name, cells in columns.items()}
    return columns


def frame_columns(frame: Any) -> dict[str, NDArray[Any]]:
    """The columns of a data frame: numbers as they are, all others as objects."""
    columns = {str(name): frame[name] for name in frame.columns}
    arrays = {name: column.to_numpy() for name, column in columns.items()}
    others = [name for name, array in arrays.items() if array.dtype.kind not in "iuf"]
    return arrays | {
        name: np.fromiter(columns[name], dtype=object, count=len(frame))
        for name in others
    }


def categorical(frame: Any) -> set[str]:
    """The columns of a data frame whose type says that they hold categories, whatever
    these are written as.
    """
    kinds = {
        str(name): str(getattr(frame[name], "dtype", ""))
        for name in getattr(frame, "columns", ())
    }
    return {
        name
        for name, kind in kinds.items()
        if kind == "category" or kind.startswith(("Categorical", "Enum"))
    }


def list_of(name: str) -> str | None:
    """The column of lists that a column such as `name[0]` is an item of."""
    found = re.fullmatch(r"(.*)\[\d+\]", name)
    return found and found[1]


def with_items(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Lists of numbers, such as embeddings, as columns `name[0]`, `name[1]`, ..., as
    those of Parquet files are.
    """
    found: dict[str, Any] = {}
    for name, cells in columns.items():
        first = next((cell for cell in cells if not _is_missing(cell)), None)
        if not isinstance(first, Sized) or isinstance(first, str | bytes | Mapping):
            found[name] = cells
            continue
        rows = list[NDArray[np.float64]]()
        for number, cell in enumerate(cells, 1):
            row = np.full(len(first), np.nan) if _is_missing(cell) else _numbers(cell)
            if row.shape != (len(first),):
                told = (
                    f"column {name!r} holds lists, in row {number} {reprlib.repr(cell)}"
                )
                fix = "drop (--drop) leaves the column out"
                raise InputError(
                    f"{told}: expected {len(first)} numbers, as many as the first has;"
                    f" {fix}"
                )
            rows.append(row)
        found |= {
            f"{name}[{i}]": items for i, items in enumerate(np.stack(rows, axis=1))
        }
    return found


def _is_missing(cell: Any) -> bool:
    return (
        cell is None
        or type(cell).__name__ in ("NAType", "NaTType")
        or (isinstance(cell, float | np.floating) and cell != cell)
    )


def _numbers(cell: Any) -> NDArray[np.float64]:
    with suppress(TypeError, ValueError):
        return np.array(cell, dtype=np.float64)  # None becomes nan
    return np.zeros(())

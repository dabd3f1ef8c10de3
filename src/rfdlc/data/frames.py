"""Columns of data frames, and of cells that hold lists."""

import re
import reprlib
from collections.abc import Mapping, Sized
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.errors import InputError


def frame_columns(frame: Any) -> dict[str, NDArray[Any]]:
    """The columns of a data frame: numbers as they are, all others as objects."""
    columns = {str(name): frame[name] for name in frame.columns}
    arrays = {name: column.to_numpy() for name, column in columns.items()}
    others = [name for name, array in arrays.items() if array.dtype.kind not in "iuf"]
    return arrays | {name: np.fromiter(columns[name], dtype=object, count=len(frame)) for name in others}


def list_of(name: str) -> str | None:
    """The column of lists that a column such as `name[0]` is an item of."""
    found = re.fullmatch(r"(.*)\[\d+\]", name)
    return found and found[1]


def with_items(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Lists of numbers, such as embeddings, as columns `name[0]`, `name[1]`, ..., as those of Parquet files are."""
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
                told = f"column {name!r} holds lists, in row {number} {reprlib.repr(cell)}"
                fix = "drop (--drop) leaves the column out"
                raise InputError(f"{told}: expected {len(first)} numbers, as many as the first has; {fix}")
            rows.append(row)
        found |= {f"{name}[{i}]": items for i, items in enumerate(np.stack(rows, axis=1))}
    return found


def _is_missing(cell: Any) -> bool:
    return cell is None or type(cell).__name__ == "NAType" or (isinstance(cell, float) and cell != cell)


def _numbers(cell: Any) -> NDArray[np.float64]:
    with suppress(TypeError, ValueError):
        return np.array(cell, dtype=np.float64)  # None becomes nan
    return np.zeros(())

"""Columns of data frames, and of cells that hold lists."""

from collections.abc import Mapping, Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.errors import expect


def frame_columns(frame: Any) -> dict[str, NDArray[Any]]:
    """The columns of a data frame: numbers as they are, lists of numbers as one column per item, others as objects."""
    columns = {str(name): frame[name] for name in frame.columns}
    arrays = {name: column.to_numpy() for name, column in columns.items()}
    others = [name for name, array in arrays.items() if array.dtype.kind not in "iuf"]
    return with_items(arrays | {name: np.fromiter(columns[name], dtype=object, count=len(frame)) for name in others})


def with_items(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Lists of numbers, such as embeddings, as columns `name[0]`, `name[1]`, ..., as those of Parquet files are."""
    found: dict[str, Any] = {}
    for name, cells in columns.items():
        first = next((cell for cell in cells if not (cell is None or (isinstance(cell, float) and cell != cell))), None)
        if not isinstance(first, Sized) or isinstance(first, str | bytes | Mapping):
            found[name] = cells
            continue
        rows = [np.asarray(cell) if isinstance(cell, Sized) else np.full(len(first), np.nan) for cell in cells]
        alike = all(row.shape == (len(first),) and row.dtype.kind in "iufb" for row in rows)
        expect(alike, f"column {name!r} holds lists: expected numbers, and one length")
        found |= {f"{name}[{i}]": items.astype(np.float64) for i, items in enumerate(np.stack(rows, axis=1))}
    return found

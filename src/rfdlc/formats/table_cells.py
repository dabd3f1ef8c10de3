"""Cells of batches of a table: decimal commas become points, and rows in which every
cell is empty are left out.
"""

import warnings
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np

from rfdlc.errors import counted

DECIMAL_COMMA = r"^(\s*[+-]?\d*),(\d+(?:[eE][+-]?\d+)?\s*)$"


def without_empty_rows(where: object, batches: Iterable[Any]) -> Iterator[Any]:
    """The batches without the rows in which every cell is empty, as spreadsheets write
    them below the last one.

    In a table of one column an empty cell is a missing value.
    """
    count = 0
    for batch in batches:
        empty = np.full(len(batch), len(batch.columns) > 1)
        for column in batch.columns:
            empty &= _empty_cells(column) if empty.any() else False
        yield batch.filter(~empty) if empty.any() else batch
        count += int(empty.sum())
    if count:
        warnings.warn(skipped(where, count), stacklevel=2)


def skipped(where: object, count: int) -> str:
    """What to say of rows in which every cell is empty."""
    return (
        f"{where}: {counted(count, 'empty row')} skipped, and not counted where"
        " messages name rows"
    )


def _empty_cells(column: Any) -> Any:
    from pyarrow import compute, types

    empty = column.is_null(nan_is_null=types.is_floating(column.type))
    if types.is_string(column.type) or types.is_large_string(column.type):
        empty = compute.or_(
            empty,
            compute.fill_null(
                compute.equal(compute.utf8_trim_whitespace(column), ""), True
            ),
        )
    return empty.to_numpy(zero_copy_only=False)


def with_points(batch: Any, numbers: Collection[str] | None) -> Any:
    """Decimal points instead of commas in the text of the columns in `numbers` (float64
    then), or without it in all.
    """
    from pyarrow import RecordBatch, compute, float64

    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    for name in columns if numbers is None else numbers:
        columns[name] = compute.replace_substring_regex(
            columns[name], DECIMAL_COMMA, r"\1.\2"
        )
    for name in numbers or ():
        columns[name] = compute.utf8_trim_whitespace(columns[name]).cast(float64())
    return RecordBatch.from_arrays(list(columns.values()), list(columns))

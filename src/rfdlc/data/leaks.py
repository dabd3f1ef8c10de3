"""Leaks: columns of a table that alone tell the class, as a code of the diagnosis beside the diagnosis does."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.dataset import Split
from rfdlc.data.longtail import subset
from rfdlc.data.table import ColumnCode, TableEncoder

MOST_ROWS, LEAST = 5000, 20  # that are looked at, as many of each class, and of each class if there are many
FEWEST, FEWEST_CODED = 50, 10  # rows outside of the largest class, and if a column has no more values than classes:
# with fewer, a good column may tell the class by chance
ERRORS = 0.005  # of a leak, as a share of these rows; the best measurement of the irises, a good one, has 6%


def leaking_columns(train: Split, encoder: TableEncoder) -> dict[str, float]:
    """Columns that alone tell the class of nearly all held-out rows, with their share.

    Each half of the rows is told by what the other half shows, groups and copies as a whole, so that names of patients
    tell nothing. Errors are compared with those of the largest class alone: if 99% of the rows are healthy, a constant
    is right in 99%.

    >>> labels = np.arange(100) % 2
    >>> table = {"code": [f"C{label}" for label in labels], "age": np.arange(100) % 7}
    >>> encoder = TableEncoder.fit(table)
    >>> leaking_columns(Split(encoder.transform(table), labels), encoder)
    {'code': 1.0}
    """
    counts = np.bincount(train.labels)
    some = train.take(subset(train.labels, np.minimum(counts, max(LEAST, MOST_ROWS // len(counts)))))
    labels, halves = some.labels, some.hold_out(0.5)
    pairs = [(own, held[np.isin(labels[held], labels[own])]) for own, held in (halves, halves[::-1])]
    asked = np.concatenate([held for _, held in pairs])
    others, found, start = len(asked) - np.bincount(labels[asked]).max(initial=0), dict[str, float](), 0
    for column in encoder.columns if others >= FEWEST_CODED else ():
        values = _values(column, some.array[:, start : start + len(column.features)])
        start += len(column.features)
        if column.is_item or (others < FEWEST and len(np.unique(values)) > len(counts)):
            continue
        right = sum(int(_told(values, labels, *pair, column.median is not None).sum()) for pair in pairs)
        if len(asked) - right <= ERRORS * others:
            found[column.name] = right / len(asked)
    return found


def _values(column: ColumnCode, features: NDArray[Any]) -> NDArray[np.float64]:
    """One number per row: the number, or the place of the category; missing ones have a value of their own."""
    if column.median is None:
        return features @ np.arange(1.0, features.shape[1] + 1)  # one of them is 1, or none
    numbers = features[:, 0].astype(np.float64)
    missing = features[:, -1] > 0 if column.flags_missing else False
    return np.where(missing, numbers.min() - np.ptp(numbers) - 1, numbers)


def _told(
    values: NDArray[np.float64], labels: NDArray[np.int64], seen: NDArray[np.int64], held: NDArray[np.int64], near: bool
) -> NDArray[np.bool_]:
    """Whether the most frequent class of rows with the same value, or the nearest one, is that of each held-out row."""
    known, place = np.unique(values[seen], return_inverse=True)
    pairs, times = np.unique(place * (labels.max() + 1) + labels[seen], return_counts=True)
    value, label = np.divmod(pairs, labels.max() + 1)
    likely = label[np.lexsort((times, value))[np.cumsum(np.bincount(value)) - 1]]
    found = np.searchsorted((known[1:] + known[:-1]) / 2, values[held])
    return (likely[found] == labels[held]) & (near | (known[found] == values[held]))

"""Tables as features: what is done to each column is learned on the training rows and kept as plain data."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.decide.dialect import number
from rfdlc.errors import InputError, listing

MISSING = frozenset({"", "na", "n/a", "#n/a", "nan", "null", "?", "<na>", "nat"})
MOST_CATEGORIES = 1000
FEW = 0.1  # a column with a smaller share of texts among its different values was meant to hold numbers
LARGEST = float(np.finfo(np.float32).max)  # features are 32 bits wide: beyond it they would be infinite

# Rounding to 32 bits may move a number by so much of the spread of its column; a time in seconds since 1970 moves by 64
ROUNDED = 1e-3

Column = NDArray[Any]  # float64 with nan, or objects: text and None, where None is a missing value
Cells = Sequence[Any] | Column  # as they are read, or parsed


def blurred(column: NDArray[Any]) -> bool:
    """Whether numbers lie so far from 0, for their spread, that 32 bits blur what differs between them.

    >>> blurred(np.array([1.7e9, 1.7e9 + 60, 1.7e9 + 90])), blurred(np.array([1.7e9, 1e8]))
    (True, False)
    """
    spread = float(np.nanstd(column)) if len(column) else 0.0
    return 0 < ROUNDED * spread < float(np.nanmax(np.abs(column))) * float(np.finfo(np.float32).eps) / 2


def as_text(value: Any) -> str | None:
    """A cell as text, None where it is missing.

    >>> as_text(" NA "), as_text(None), as_text(float("nan")), as_text(3)
    (None, None, None, '3')
    """
    text = "" if value is None else str(value).strip()
    return None if text.lower() in MISSING else text


def parse_column(name: str, cells: Iterable[Any]) -> Column:
    """Numbers if every cell that is not missing is one, otherwise text.

    >>> parse_column("age", ["31", "", "4.5"]).tolist()
    [31.0, nan, 4.5]
    """
    if isinstance(cells, np.ndarray) and cells.dtype == np.float64:
        texts, numbers = cells, cells  # parsed before
    else:
        texts = np.array([as_text(cell) for cell in cells], dtype=object)
        try:
            numbers = np.array([math.nan if text is None else number(text) for text in texts], dtype=np.float64)
        except ValueError:
            return texts
    outside = np.flatnonzero(np.abs(numbers) > LARGEST)
    if len(outside):
        row = int(outside[0])
        raise InputError(
            f"column {name!r} has an infinite or too large value in row {row + 1} ({texts[row]}): "
            f"expected numbers up to {LARGEST:.1e}, or nothing"
        )
    return np.full(len(numbers), None) if np.isnan(numbers).all() else numbers


@dataclass(frozen=True)
class ColumnCode:
    """How one column becomes features: a number (median where missing), or one feature a category."""

    name: str
    median: float | None = None  # of a numeric column
    offset: float = 0.0  # what is taken from a number before it is rounded to 32 bits
    flags_missing: bool = False  # whether a further feature says that the number was missing
    categories: tuple[str, ...] = ()  # of a column of text
    counts_missing: bool = False  # whether missing is a category of its own

    @classmethod
    def fit(cls, name: str, column: Column) -> "ColumnCode":
        """Learn the code from training cells."""
        if column.dtype == np.float64:
            missing = np.isnan(column)
            median = 0.0 if missing.all() else float(np.nanmedian(column))
            offset = median if not missing.all() and blurred(column) else 0.0
            return cls(name, median=median, offset=offset, flags_missing=bool(missing.any()))
        present = sorted({text for text in column if text is not None})
        if len(present) > MOST_CATEGORIES:
            raise InputError(
                f"column {name!r} has {len(present)} different texts, too many to be categories (at most "
                f"{MOST_CATEGORIES}): leave it out with drop, or turn it into numbers{_among_numbers(present)}"
            )
        return cls(name, categories=tuple(present), counts_missing=any(text is None for text in column))

    @property
    def strays(self) -> str:
        """The few texts that keep a column of numbers from being one, as part of a message; mostly nothing."""
        return _among_numbers(self.categories)

    @property
    def features(self) -> list[str]:
        """Names of the features that the column becomes."""
        if self.median is not None:
            return [self.name, f"{self.name} is missing"] if self.flags_missing else [self.name]
        values = [*self.categories, "(missing)"] if self.counts_missing else self.categories
        return [f"{self.name} = {value}" for value in values]

    def transform(self, cells: Cells) -> NDArray[np.float32]:
        """(N, features); a category that was not in the training rows is all zeros."""
        if self.median is not None:
            return self._numbers(cells, self.median)
        place = {text: i for i, text in enumerate(self.categories)}
        if self.counts_missing:
            place[None] = len(self.categories)  # type: ignore[index]
        features = np.zeros((len(cells), len(self.features)), dtype=np.float32)
        texts = [as_text(cell) for cell in cells]
        for row, text in enumerate(texts):
            column = place.get(text)  # type: ignore[arg-type]
            if column is not None:
                features[row, column] = 1
        self._check_seen([text for text in texts if text is not None])
        return features

    def _check_seen(self, texts: Sequence[str]) -> None:
        """One unseen category is nothing special; where none was seen, they are written in another way."""
        if len(texts) > 1 and self.categories and not set(texts) & set(self.categories):
            warnings.warn(
                f"column {self.name!r} holds nothing that training saw (here {listing(sorted(set(texts)), 3)}; there "
                f"{listing(self.categories, 3)}): it tells the model nothing; write its values as in training",
                stacklevel=4,
            )

    def _numbers(self, cells: Cells, median: float) -> NDArray[np.float32]:
        column = parse_column(self.name, cells)
        if column.dtype != np.float64:
            texts = (text for text in column if text is not None and not _is_number(text))
            wrong = next(texts, None)
            if wrong is not None:
                raise InputError(f"column {self.name!r} holds numbers in the training data, but here {wrong!r}")
            column = np.full(len(cells), np.nan)  # all are missing
        missing = np.isnan(column)
        filled = np.where(missing, median, column) - self.offset
        return np.column_stack([filled, missing] if self.flags_missing else [filled]).astype(np.float32)


def _is_number(text: str) -> bool:
    try:
        number(text)
    except ValueError:
        return False
    return True


def _among_numbers(values: Sequence[str]) -> str:
    """
    >>> _among_numbers([*"0123456789", "10", "unknown"]), _among_numbers(["1", "2", "more"])
    ("; 'unknown' is no number: such cells may be left empty", '')
    """
    texts = [text for text in values if not _is_number(text)]
    few = 0 < len(texts) < FEW * len(values)
    return f"; {listing(map(repr, texts), 3)} is no number: such cells may be left empty" if few else ""


@dataclass(frozen=True)
class TableEncoder:
    """Rows of a table -> float32 features (N, F): fitted on the training rows, then the same for every other row.

    >>> encoder = TableEncoder.fit({"age": ["30", "", "50"], "sex": ["f", "m", "f"]})
    >>> encoder.transform({"age": ["?"], "sex": ["x"]}).tolist(), encoder.features
    ([[40.0, 1.0, 0.0, 0.0]], ('age', 'age is missing', 'sex = f', 'sex = m'))
    """

    columns: tuple[ColumnCode, ...]

    @classmethod
    def fit(cls, table: Mapping[str, Cells]) -> "TableEncoder":
        """Learn the code of every column."""
        return cls(tuple(ColumnCode.fit(name, parse_column(name, cells)) for name, cells in table.items()))

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features, in order."""
        return tuple(feature for column in self.columns for feature in column.features)

    @property
    def is_number(self) -> NDArray[np.bool_]:
        """(F,) which features are numbers and not 0/1 marks."""
        return np.array([i == 0 and c.median is not None for c in self.columns for i in range(len(c.features))])

    def transform(self, table: Mapping[str, Cells]) -> NDArray[np.float32]:
        """Features of rows given as {column: cells}; further columns are ignored."""
        absent = [column.name for column in self.columns if column.name not in table]
        if absent:
            raise InputError(f"the rows lack the columns {listing(absent)}: expected all that training had")
        lengths = {column.name: len(table[column.name]) for column in self.columns}
        if len(set(lengths.values())) > 1:
            told = listing(f"{name} has {length}" for name, length in lengths.items())
            raise InputError(f"the columns differ in length: {told}")
        return np.concatenate([column.transform(table[column.name]) for column in self.columns], axis=1)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and tables, ready for JSON."""
        return {"columns": [{**vars(column), "categories": list(column.categories)} for column in self.columns]}

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> "TableEncoder":
        """From what `to_dict` gave."""
        columns = [{**column, "categories": tuple(column["categories"])} for column in table["columns"]]
        return cls(tuple(ColumnCode(**column) for column in columns))

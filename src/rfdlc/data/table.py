"""Tables as features: what is done to each column is learned on the training rows and
kept as plain data.
"""

import re
import shlex
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.frames import list_of, with_items
from rfdlc.errors import InputError, expect, listing
from rfdlc.formats.cells import (
    DIGITS,
    FEW,
    LARGEST,
    MOST_CATEGORIES,
    TOO_LARGE,
    Cells,
    Column,
    are_numbers,
    as_numbers,
    category_column,
    parse_column,
    text_column,
    without,
)
from rfdlc.formats.dates import is_date
from rfdlc.formats.tables import is_number, number

LIMIT = re.compile(
    r"[<>\u2264\u2265]=?\s*\d+([.,]\d+)?", re.ASCII
)  # below or above what can be measured
UNSEEN = (
    "column {!r} has categories that training did not see{}: for the model these rows"
    " have none of its categories{}"
)
OUTSIDE = (
    "column {!r} has values far outside of those in training{}: the model knows nothing"
    " about such rows, check values and units"
)
NOTHING = (
    "column {!r} holds nothing that training saw (here {}; there {}): it tells the"
    " model nothing, write it as there"
)
EMPTY = "column {!r} is empty in {} of the rows, but never was in training: {}"
FILLED = (
    "column {!r} has values, but was empty in training: they tell the model nothing"
)
# rounding to 32 bits may move a number by this share of its column's spread; a Unix
# time moves by 64
ROUNDED = 1e-3
FIRST_ROWS = 3  # that a warning names

Doubt = tuple[
    str, str, str
    # what is unlike in training: a key of its kind and column, text, and text without
    # cells
]


def blurred(column: NDArray[Any]) -> bool:
    """Whether numbers lie so far from 0, for their spread, that 32 bits blur what
    differs between them.
    """
    spread = float(np.nanstd(column)) if len(column) else 0.0
    return (
        0
        < ROUNDED * spread
        < float(np.nanmax(np.abs(column))) * float(np.finfo(np.float32).eps) / 2
    )


def dropping(names: Sequence[str], frame: str = "") -> str:
    """How to leave columns out: as options, or of a `frame` that is given to an
    estimator.
    """
    options = " ".join(f"--drop {shlex.quote(name)}" for name in names)
    return (
        f"{frame}.drop(columns={[*names]})"
        if frame
        else f"{options}; in Python drop={[*names]}"
    )


def keeping(names: Sequence[str], frame: str = "") -> str:
    """How to say that columns hold categories, in the same ways."""
    options = " ".join(f"--categories {shlex.quote(name)}" for name in names)
    kinds = dict.fromkeys(names, "category")
    return (
        f"{frame}.astype({kinds})"
        if frame
        else f"{options}; in Python categories={[*names]}"
    )


def grouping(name: str, frame: str = "") -> str:
    """How to keep rows of one value together, in the same ways."""
    option = f"--groups {shlex.quote(name)} (in Python groups={name!r})"
    return f"fit(..., groups={frame}[{name!r}])" if frame else option


def strays_among(values: Sequence[str]) -> str:
    """What to say of the few texts among numbers or dates."""
    for kind, fits in (("number", is_number), ("date", is_date)):
        texts = [text for text in values if not fits(text)]
        if 0 < len(texts) < FEW * len(values):
            missing = (
                f"{listing(map(repr, texts), 3)} is not a {kind}: such cells may be"
                " left empty"
            )
            return f"; {beyond(texts) or missing}"
    return ""


def beyond(texts: Sequence[str]) -> str:
    """What to write for values beyond a limit of detection, which are not missing;
    empty if there are none.
    """
    limits = [text for text in texts if LIMIT.fullmatch(text)]
    if not limits:
        return ""
    value = float(re.sub(r"[^\d.]", "", limits[0].replace(",", ".")))
    used = (
        f"{value / 2:g}, half of the limit"
        if limits[0][0] in "<\u2264"
        else f"{value:g}, the limit"
    )
    told = (
        f"{listing(map(repr, limits), 3)} is a limit of what can be measured: better"
        " write a number"
    )
    return (
        f"{told} (for {limits[0]!r} such as {used}), and mark such cells in a yes/no"
        " column"
    )


@dataclass(frozen=True)
class ColumnCode:
    """How one column becomes features: a number or date (median where missing), or one
    feature per category.
    """

    name: str
    median: float | None = None  # of a column of numbers or dates
    offset: float = 0.0  # subtracted from a number before it is rounded to 32 bits
    flags_missing: bool = (
        False  # whether a further feature says that the number was missing
    )
    categories: tuple[str, ...] = ()  # of a column of text
    counts_missing: bool = False  # whether missing is a category of its own
    is_date: bool = False  # whether the number is that of days since 1970-01-01 (UTC)
    low: float | None = field(
        default=None, compare=False
    )  # the least number in training; older encoders have none
    high: float | None = field(default=None, compare=False)
    missing: tuple[
        str, ...
    ] = ()  # further texts that are missing values, in a column of numbers

    @classmethod
    def fit(
        cls, name: str, column: Column, missing: tuple[str, ...] = ()
    ) -> "ColumnCode":
        if column.dtype != object:
            numbers, is_date = as_numbers(column), column.dtype != np.float64
            median, flags = float(np.nanmedian(numbers)), bool(np.isnan(numbers).any())
            offset = median if blurred(numbers) else 0.0
            low, high = float(np.nanmin(numbers)), float(np.nanmax(numbers))
            return cls(
                name,
                median,
                offset,
                flags,
                is_date=is_date,
                low=low,
                high=high,
                missing=missing,
            )
        found = set(column.tolist())
        return cls(
            name, categories=tuple(sorted(found - {None})), counts_missing=None in found
        )

    @cached_property
    def _places(self) -> dict[str | None, int]:
        """The feature of each category; that of missing values is the last."""
        values = [*self.categories, *([None] if self.counts_missing else [])]
        return {value: place for place, value in enumerate(values)}

    @cached_property
    def _spellings(self) -> dict[str | None, int]:
        """`_places`, and how else booleans, and codes that were read as numbers, may be
        spelt.
        """
        if self.categories and all(map(DIGITS.fullmatch, self.categories)):
            short = {text: text.lstrip("0") or "0" for text in self.categories}
            times = Counter(short.values())
            once = [text for text, own in short.items() if times[own] == 1]
            return {
                short[text] + end: self._places[text]
                for text in once
                for end in ("", ".0")
            } | self._places
        known = {text.lower(): self._places[text] for text in self.categories}
        if len(self.categories) != 2 or known.keys() != {"true", "false"}:
            return self._places
        words = (("true", "True", "TRUE", "1"), ("false", "False", "FALSE", "0"))
        return {text: known[each[0]] for each in words for text in each} | self._places

    @property
    def of_list(self) -> str | None:
        """The column of lists, such as embeddings, that it is an item of."""
        return list_of(self.name)

    @property
    def features(self) -> dict[str, str]:
        if self.median is not None:
            return {self.name: "number"} | (
                {f"{self.name} is missing": "flag"} if self.flags_missing else {}
            )
        return {
            f"{self.name} = {'(missing)' if value is None else value}": "category"
            for value in self._places
        }

    @property
    def filling(self) -> str:
        """What the model gets for a missing value."""
        assert self.median is not None
        return f"the median {self._shown(self.median)}"

    def _shown(self, number: float) -> str:
        return (
            str(np.datetime64(int(number), "D"))
            if self.is_date
            else format(number, "g")
        )

    def _tell_missing(self, missing: NDArray[np.bool_], doubts: list[Doubt]) -> None:
        """Say that values are missing where training had none; of the items of a list,
        the first speaks for all.
        """
        known = (
            self.flags_missing
            or self.counts_missing
            or (self.of_list and not self.name.endswith("[0]"))
        )
        if not known and missing.any():
            share, none = (
                missing.mean(),
                "for the model these rows have none of its categories",
            )
            used = (
                none if self.median is None else f"the model uses {self.filling} there"
            )
            said = EMPTY.format(
                self.name, f"{share:.0%}" if share >= 0.01 else "less than 1%", used
            )
            doubts.append((EMPTY.format(self.name, "", ""), said, said))

    def _tell_unseen(self, present: Sequence[str], doubts: list[Doubt]) -> None:
        if present and not self.categories:
            doubts.append(
                (
                    FILLED.format(self.name),
                    FILLED.format(self.name),
                    FILLED.format(self.name),
                )
            )
        elif unseen := sorted(set(present) - self._spellings.keys()):
            here, brief = listing(unseen, 3), UNSEEN.format(self.name, "", "")
            said = UNSEEN.format(
                self.name, f" ({here})", f" ({listing(self.categories)})"
            )
            if len(present) > 1 and self._spellings.keys().isdisjoint(present):
                said = NOTHING.format(self.name, here, listing(self.categories, 3))
            doubts.append((brief, said, brief))

    def _tell_outside(
        self, numbers: NDArray[np.float64], doubts: list[Doubt], start: int
    ) -> None:
        """Say which numbers are further out than the range is wide, or negative as
        never in training; rows count from `start` on.
        """
        if self.low is None or self.high is None or self.of_list:
            return
        beyond = np.maximum(self.low - numbers, numbers - self.high)
        far = (beyond > self.high - self.low) | (
            (numbers < 0) & (self.low >= 0 and not self.is_date)
        )
        if far.any():
            places = np.flatnonzero(far)
            rows = [
                f"{self._shown(numbers[place])} in row {start + place + 1}"
                for place in places[:FIRST_ROWS].tolist()
            ]
            if len(places) > FIRST_ROWS:
                rows.append(f"... ({len(places):,} in all)")
            here = ", ".join(rows)
            said = OUTSIDE.format(
                self.name,
                f" ({here}; there {self._shown(self.low)} to {self._shown(self.high)})",
            )
            doubts.append(
                (OUTSIDE.format(self.name, ""), said, OUTSIDE.format(self.name, ""))
            )

    def wrong_cells(self, cells: Cells, start: int = 0) -> Iterator[tuple[int, str]]:
        """The place of each cell that `transform` refuses, and what is wrong with it;
        messages count from `start`.
        """
        if self.median is None or (not self.is_date and are_numbers(cells)):
            return
        cells = without(cells, self.missing)
        kind, fits = ("dates", is_date) if self.is_date else ("numbers", is_number)
        for place, text in enumerate(text_column(cells)):
            if text is not None and not fits(text):
                here = f"{text!r} in row {start + place + 1}"
                yield (
                    place,
                    (
                        f"column {self.name!r} holds {kind} in the training data, but"
                        f" here {here}"
                    ),
                )
            elif text is not None and not self.is_date and abs(number(text)) > LARGEST:
                yield place, TOO_LARGE.format(self.name, start + place + 1, text)

    def transform(
        self, cells: Cells, doubts: list[Doubt], start: int = 0
    ) -> NDArray[Any]:
        """Features (N, F); unseen categories are all zeros. What is unlike in training
        is added to `doubts`.
        """
        if self.median is None:
            texts, places = text_column(cells).tolist(), self._spellings
            self._tell_unseen([text for text in texts if text is not None], doubts)
            self._tell_missing(
                np.array([text is None for text in texts], dtype=np.bool_), doubts
            )
            unseen = (
                -1 if self.categories else 0
            )  # of a column that was empty in training: a constant
            found = np.fromiter(
                (places.get(text, unseen) for text in texts), np.int64, len(texts)
            )
            return found[:, None] == np.arange(len(self._places))
        cells = without(cells, self.missing)
        column = parse_column(self.name, cells, codes=False, start=start)
        if column.dtype.kind != (
            "M" if self.is_date else "f"
        ):  # where all cells are missing, they are None
            for _, told in self.wrong_cells(cells, start):
                raise InputError(told)
        numbers = as_numbers(column)
        missing = np.isnan(numbers)
        self._tell_missing(missing, doubts)
        self._tell_outside(numbers, doubts, start)
        filled = np.where(missing, self.median, numbers) - self.offset
        return (
            np.stack([filled, missing], axis=1)
            if self.flags_missing
            else filled[:, None]
        )


@dataclass(frozen=True)
class TableEncoder:
    """Rows of a table -> float32 features (N, F): fitted on the training rows, then the
    same for every other row.
    """

    columns: tuple[ColumnCode, ...]
    identity: str | None = None  # the column that names rows, if training had one

    @classmethod
    def fit(
        cls,
        table: Mapping[str, Cells],
        frame: str = "",
        categories: Collection[str] = (),
        missing: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    ) -> "TableEncoder":
        """From the cells by column; those of `categories` are never numbers or dates,
        some texts are `missing` numbers.

        Errors name options, or methods of a `frame` that is given to an estimator.
        """
        found = list[ColumnCode]()
        for name, cells in table.items():
            strays = missing.get(name, ())
            column = (
                category_column(cells)
                if name in categories
                else parse_column(name, without(cells, strays))
            )
            found.append(ColumnCode.fit(name, column, strays))
        columns = tuple(found)
        many = {
            each.name: each.categories
            for each in columns
            if len(each.categories) > MOST_CATEGORIES
        }
        odd = {name: strays_among(own) for name, own in many.items()}
        most = f"too many to be categories (at most {MOST_CATEGORIES})"
        each = [
            f"column {name!r} has {len(own)} different texts, {most}{odd[name]}"
            for name, own in many.items()
        ]
        drop, group = dropping([*many], frame), grouping(next(iter(many), ""), frame)
        belong = (
            ""
            if all(odd.values())
            else f"; if rows with the same text belong together, use {group}"
        )
        expect(
            not many,
            f"{listing(each)}; leave out what is not a category ({drop}){belong}",
        )
        return cls(columns)

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(feature for column in self.columns for feature in column.features)

    @property
    def items(self) -> int:
        """The number of columns that are items of a list, such as embeddings in a
        Parquet file.
        """
        return sum(column.of_list is not None for column in self.columns)

    @property
    def kinds(self) -> NDArray[np.str_]:
        """(F,) `number`, `flag` (0 or 1: the number is missing) or `category`
        (0 or 1).
        """
        return np.array(
            [kind for column in self.columns for kind in column.features.values()]
        )

    def transform(
        self,
        table: Mapping[str, Cells],
        doubts: list[str] | None = None,
        start: int = 0,
        told: set[str] | None = None,
    ) -> NDArray[np.float32]:
        """Features of rows {column: cells}. What is unlike in training: a warning
        unless `told`, or one of `doubts`.
        """
        absent = [column.name for column in self.columns if column.name not in table]
        absent = list(
            dict.fromkeys(list_of(name) or name for name in absent)
        )  # of a column of lists, its own name
        expect(
            not absent,
            f"the rows lack the columns {listing(absent)}: expected all that"
            " training had",
        )
        lengths = {column.name: len(table[column.name]) for column in self.columns}
        if len(set(lengths.values())) > 1:
            sizes = listing(f"{name} has {length}" for name, length in lengths.items())
            expect(False, f"the columns differ in length: {sizes}")
        found, told = list[Doubt](), set() if told is None else told
        features = [
            column.transform(table[column.name], found, start)
            for column in self.columns
        ]
        for key, text, unquoted in found:
            if doubts is not None:
                doubts.append(unquoted)
            elif key not in told:
                warnings.warn(text, stacklevel=2)
                told.add(key)
        return np.concatenate(features, axis=1, dtype=np.float32)

    def wrong_cells(self, table: Mapping[str, Cells], start: int = 0) -> dict[int, str]:
        """The places of rows that `transform` refuses, and what is wrong with the first
        such cell of each.

        None where columns are absent: then all rows are refused.
        """
        found: dict[int, str] = {}
        for column in (
            self.columns if all(column.name in table for column in self.columns) else ()
        ):
            for place, told in column.wrong_cells(table[column.name], start):
                found.setdefault(place, told)
        return found

    def encode(self, samples: Any) -> Any:
        """Features of a data frame, of `{column: cells}` or of `[{column: cell}, ...]`;
        what is none of these stays.
        """
        if (
            isinstance(samples, list)
            and samples
            and all(isinstance(row, Mapping) for row in samples)
        ):
            lists = {column.of_list for column in self.columns} & {*chain(*samples)}
            names = [
                *lists,
                *(
                    column.name
                    for column in self.columns
                    if column.of_list not in lists
                ),
            ]
            samples = {name: [row.get(name) for row in samples] for name in names}
        if not isinstance(samples, Mapping) and not hasattr(samples, "columns"):
            return samples
        known = {
            own for column in self.columns for own in (column.name, column.of_list)
        }
        cells = {
            str(name): samples[name]
            for name in getattr(samples, "columns", samples)
            if str(name) in known
        }
        for name, column in cells.items():
            several = isinstance(column, Sized) and not isinstance(column, str)
            expect(
                several,
                f"column {name!r} is {column!r}: expected a list of cells, one per row",
            )
            if hasattr(column, "tolist") and "datetime" not in str(
                getattr(column, "dtype", "")
            ):
                cells[name] = column.tolist()  # of dates it would give nanoseconds
        return self.transform(with_items(cells))

    @property
    def expected(self) -> str:
        """What `encode` takes, for messages."""
        return (
            "a data frame or {column: cells} with the columns"
            f" {listing(column.name for column in self.columns)}"
        )

    def to_dict(self) -> dict[str, Any]:
        columns = [
            {
                **asdict(column),
                "categories": list(column.categories),
                "missing": list(column.missing),
            }
            for column in self.columns
        ]
        return {"columns": columns} | (
            {} if self.identity is None else {"identity": self.identity}
        )

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> "TableEncoder":
        columns = [
            {
                **column,
                "categories": tuple(column["categories"]),
                "missing": tuple(column["missing"]),
            }
            for column in table["columns"]
        ]
        return cls(
            tuple(ColumnCode(**column) for column in columns), table.get("identity")
        )

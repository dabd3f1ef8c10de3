"""Which columns of a table become features: those that only name rows are left out, and
what is misread raises.
"""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.copies import first_copies
from rfdlc.data.frames import list_of
from rfdlc.data.readers.image_files import is_image
from rfdlc.data.table import beyond, dropping, grouping, keeping
from rfdlc.errors import expect, listing
from rfdlc.formats.cells import (
    FEW,
    FEW_CATEGORIES,
    MOST_CATEGORIES,
    NAMING,
    Column,
    as_numbers,
    category_column,
    parse_column,
    stray_texts,
    text_column,
    without,
)
from rfdlc.formats.dates import is_date
from rfdlc.formats.tables import is_number

IDENTIFIES = (
    "column {0!r} is an identifier by its name ({1:,} values in {2:,} rows) and was"
    " left out: a model would memorise it; if rows of one value belong together, as"
    " visits of a patient do, use {3}; {4}"
)
FILES = (
    "column {0!r} holds {1:,} names of images in {2:,} rows and was left out: a model"
    " would memorise them; if rows of one image belong together, use {3}"
)
# rows per value of an identifier; with more, values may be kinds of something, such as
# stores
MOST_REPEATS = 50
PEOPLE = "patient|subject|participant|person|customer|client|user|member|donor|case"
IDENTIFIER = re.compile(
    rf"({PEOPLE})[ _.-]?(id|no|nr|number|code|key)?|(.*[ _.-])?(uuid|guid|mrn|ssn)",
    re.IGNORECASE,
)
# Different whole numbers were handed out, not measured, if so many draws from their
# range would be all different with a smaller probability.
BY_CHANCE = 1e-6
# How the name of a column of numbers ends that stays a feature, whatever it holds.
FEATURE = "_feature"
CODES, MANY, SOME = (
    (3, 50),
    5,
    10_000,
)  # whole numbers of so many kinds may be codes; rows per value; rows
_CURRENCY = (
    r"([$\u00a2-\u00a5\u20a0-\u20c0]"
    r"|AUD|CAD|CHF|CNY|CZK|DKK|EUR|GBP|INR|JPY|NOK|PLN|SEK|USD)"
)
_DIGITS = (  # perhaps with thousands separators
    r"(\d{1,3}([.,'\u2019 \u00a0\u202f]\d{3})+|\d+)([.,]\d+)?"
)
_SPACE = r"[ \u00a0\u202f]?"
_MONTH = r"(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
_SIGN = r"[-+\u2212]?"
_AMOUNT = rf"{_SIGN}({_CURRENCY}{_SPACE})?{_SIGN}{_DIGITS}({_SPACE}{_CURRENCY})?"
# What a column may hold as texts that mean something else: its kind, a text of it, and
# how to write it.
MISREAD: dict[str, tuple[re.Pattern[str], Callable[[str], bool], str]] = {
    "numbers": (
        re.compile(rf"{_AMOUNT}|\({_AMOUNT}\)", re.ASCII),
        is_number,
        (
            "write them without thousands separators, currency and parentheses, with a"
            " plain minus sign and a decimal point, such as -21759.78"
        ),
    ),
    "percentages": (
        re.compile(rf"{_SIGN}\d+([.,]\d+)?{_SPACE}%", re.ASCII),
        is_number,
        "divide them by 100 and write 38.9% as 0.389",
    ),
    "dates": (
        re.compile(
            rf"(\d{{1,2}}/\d{{1,2}}/(\d\d|\d{{4}})|\d{{4}}/\d{{1,2}}/\d{{1,2}}|\d{{1,2}}-\d{{1,2}}-\d{{4}}"
            rf"|\d{{1,2}}[-/ .]*{_MONTH}[-/ .,]*\d{{2,4}}|{_MONTH}[-/ .]*(\d{{1,2}}[,"
            r" ]+)?\d{4})([ T].*)?",
            re.ASCII | re.IGNORECASE,
        ),
        is_date,
        (
            "write them as year-month-day, such as 2020-11-08, or year-month, such as"
            " 2020-11"
        ),
    ),
}


# A number and its unit, of a few letters; with few different ones, such as doses, they
# may be categories.
WITH_UNIT = re.compile(
    rf"{_SIGN}\d+(?:[.,]\d+)?{_SPACE}([A-Za-z\u00b0\u00b5\u03bc][^\d\s,;]{{0,9}})",
    re.ASCII,
)


def check_texts(
    columns: Mapping[str, Column], frame: str = "", categories: Collection[str] = ()
) -> None:
    """Raise for texts that mean numbers, percentages or dates, unless they are
    `categories`: each would be one.

    Errors name options, or methods of a `frame` that is given to an estimator.
    """
    texts = {
        name: column
        for name, column in columns.items()
        if column.dtype == object and name not in categories
    }
    found = {
        name: told
        for name, column in texts.items()
        if (told := _misread({*column.tolist()} - {None}))
    }
    keep = keeping([*found], frame)
    others = (
        f"keep them as categories ({keep}), or leave the"
        f" column{'s' * (len(found) > 1)} out"
    )
    each = "; ".join(f"column {name!r} holds {told}" for name, told in found.items())
    expect(not found, f"{each}; or {others} ({dropping([*found], frame)})")


def _misread(values: Collection[str]) -> str:
    """What different texts mean and how to write it; empty if they are what
    they say.
    """
    for kind, (written, reads, fix) in MISREAD.items():
        fits = {text for text in values if written.fullmatch(text) or reads(text)}
        wrong = sorted(text for text in fits if not reads(text))
        if wrong and len(values) - len(fits) < FEW * len(values):
            return f"texts such as {wrong[0]!r} that look like {kind}: {fix}"
    units = {
        text: found[1]
        for text in sorted(values)
        if (found := WITH_UNIT.fullmatch(text))
    }
    unit, count = next(iter(Counter(units.values()).most_common(1)), ("", 0))
    others = len(values) - count - sum(map(is_number, values))
    if len(values) > FEW_CATEGORIES and others < FEW * len(values) < count:
        shown = next(text for text in units if units[text] == unit)
        return f"numbers with a unit, such as {shown!r}: write them without {unit!r}"
    return ""


def doubtful_numbers(columns: Mapping[str, Column]) -> list[str]:
    """Notes on numbers that may be codes, and on those that may stand for missing
    values.
    """
    numbers = {
        name: column
        for name, column in columns.items()
        if column.dtype == np.float64 and not list_of(name)
    }
    notes, codes = list[str](), list[str]()
    for name, column in numbers.items():
        few = (
            len(np.unique(column[:SOME])) <= CODES[1]
        )  # sorting all of a long column takes long
        values = np.unique(column[~np.isnan(column)]) if few else np.zeros(0)
        if (
            CODES[0] <= len(values) <= min(CODES[1], len(column) // MANY)
            and (values % 1 == 0).all()
        ):
            codes.append(name)
        for value in (np.nanmin(column), np.nanmax(column)):
            if not re.fullmatch(r"9{2,}", f"{abs(value):g}"):
                continue
            others = column[(column != value) & ~np.isnan(column)]
            count = np.count_nonzero(column == value)
            if (
                count >= MANY
                and len(others)
                and np.abs(others - value).min() > np.ptp(others) > 0
            ):
                told = (
                    f"column {name!r} holds {value:g} in {count:,} rows, far from all"
                    " other numbers"
                )
                notes.append(f"{told}: where it means missing, leave these cells empty")
                warnings.warn(notes[-1], stacklevel=4)
    told = (
        "whole numbers of few kinds are taken for quantities:"
        f" {listing(map(repr, codes), 5)}"
    )
    return notes + [f"{told}; where they are codes, {keeping(codes[:1])}"] * bool(codes)


def identities(
    cells: Mapping[str, Any],
    columns: dict[str, Column],
    frame: str = "",
    categories: Collection[str] = (),
) -> tuple[list[str] | None, str | None, list[str]]:
    """Remove columns that only name the rows: the first without repeats gives the ids;
    its name, and notes.

    What the user calls `categories` stays.
    """
    ids, identity, notes = None, None, list[str]()
    own = [name for name in columns if name not in categories]
    for name in [
        name for name in own if names_rows(name) or _may_identify(name, columns[name])
    ]:
        texts = text_column(cells[name]).tolist()
        different, present = len({*texts} - {None}), len(texts) - texts.count(None)
        share, people = (
            different / max(present, 1),
            names_rows(name) and IDENTIFIER.fullmatch(name),
        )
        fewest = (
            FEW_CATEGORIES
            if people
            else max(FEW_CATEGORIES, len(texts) // MOST_REPEATS)
        )
        blanks = present < len(texts)
        names = share > NAMING and (not blanks or different > FEW_CATEGORIES)
        if names or (not blanks and _differ_unless_copies(different, columns)):
            every = "every row" if share == 1 else f"{share:.1%} of the rows"
            every += " that has one" if blanks else ""
            reason = "it names rows and says nothing about the class"
            reason += (
                f"; {_how_to_keep(name, columns[name], frame)}"
                if blanks or columns[name].dtype != object
                else ""
            )
            notes.append(
                f"column {name!r} has a different value in {every} and was left out:"
                f" {reason}"
            )
            complete = share == 1 and not blanks
            ids, identity = (
                ids or (texts if complete else None),
                identity or (None if blanks else name),
            )
        elif different > fewest and (told := _memorised(name, columns[name])):
            keep = _how_to_keep(name, columns[name], frame)
            notes.append(
                told.format(name, different, len(texts), grouping(name, frame), keep)
            )
            warnings.warn(notes[-1], stacklevel=4)
        else:
            continue
        del columns[name]
    return ids, identity, notes


def parse_columns(
    cells: Mapping[str, Any], categories: Collection[str] = ()
) -> tuple[dict[str, Column], dict[str, tuple[str, ...]]]:
    """Numbers, dates or texts by column; those of `categories` are texts, whatever they
    hold.

    Of columns of numbers also the few texts among them, which were read as missing.
    """
    columns, strays = dict[str, Column](), dict[str, tuple[str, ...]]()
    for name, own in cells.items():
        columns[name] = (
            category_column(own) if name in categories else parse_column(name, own)
        )
        if (
            columns[name].dtype == object
            and name not in categories
            and (found := stray_texts(columns[name]))
        ):
            strays[name], columns[name] = (
                found,
                parse_column(name, without(columns[name], found)),
            )
    return columns, strays


def warn_of_strays(strays: Mapping[str, tuple[str, ...]], frame: str = "") -> list[str]:
    """Say which texts among numbers were read as missing; the notes of a data set."""
    notes = list[str]()
    for name, texts in strays.items():
        told = (
            f"column {name!r} holds numbers; read as missing:"
            f" {listing(map(repr, texts), 3)}"
        )
        fix = (
            beyond(texts)
            or "leave such cells empty, or keep all as categories"
            f" ({keeping([name], frame)})"
        )
        notes.append(f"{told}; {fix}")
        warnings.warn(notes[-1], stacklevel=4)
    return notes


def without_identities(
    cells: Mapping[str, Any], frame: str, categories: Collection[str] = ()
) -> list[str]:
    """The columns of a `frame` that may become features; says which are left out:
    estimators have no notes.
    """
    columns, strays = parse_columns(cells, categories)
    check_texts(columns, frame, categories)
    warn_of_strays(strays, frame)
    with warnings.catch_warnings(action="ignore"):
        notes = identities(cells, columns, frame, categories)[2]
    for note in notes:
        warnings.warn(note, stacklevel=6)
    expect(columns, f"{frame} has no column to learn from: {'; '.join(notes)}")
    return [*columns]


def _how_to_keep(name: str, column: Column, frame: str) -> str:
    """How to keep a column that would be left out: texts as categories, numbers by
    another name.
    """
    rename = f"to keep it as a feature, rename it to {name + FEATURE!r}"
    return (
        f"to keep it as categories, {keeping([name], frame)}"
        if column.dtype == object
        else rename
    )


def _memorised(name: str, column: Column) -> str:
    """What to say of a column that a model would memorise; empty for others."""
    if column.dtype == object and all(
        text is None or is_image(text) for text in column
    ):
        return FILES
    return IDENTIFIES if identifies(name) and _may_identify(name, column) else ""


def _may_identify(name: str, column: Column) -> bool:
    """Whether it holds texts, or whole numbers that its name or they themselves show
    to be identifiers.
    """
    if column.dtype == object:
        return True
    if column.dtype != np.float64 or name.endswith(FEATURE) or list_of(name):
        return False
    if (column % 1 > 0).any():
        return False
    return identifies(name) or _handed_out(column)


def _handed_out(column: NDArray[np.float64]) -> bool:
    """Whether whole numbers lie so close, and repeat so rarely, that they were given
    to the rows one by one.

    Of ages or prices in so narrow a range some would be equal. The outermost values do
    not count: a single 999999 makes no other numbers of them.
    """
    present = column[~np.isnan(column)]
    values = np.unique(present)
    if len(values) <= max(FEW_CATEGORIES, NAMING * len(present)):
        return False
    outermost = int((1 - NAMING) * len(values))
    values = values[outermost : len(values) - outermost]
    width = values[-1] - values[0] + 1
    all_different = np.log1p(-np.arange(len(values)) / width).sum()
    return bool(all_different < log(BY_CHANCE))


def _differ_unless_copies(different: int, columns: dict[str, Column]) -> bool:
    """Whether a column with more values than there may be categories has as many as the
    table has different rows.
    """
    rows = (
        np.stack([codes_of(column) for column in columns.values()], 1)
        if different > MOST_CATEGORIES
        else np.zeros(0)
    )
    return len(rows) > 0 and different == len(np.unique(first_copies(rows)))


def codes_of(column: Column) -> NDArray[np.float64]:
    """Numbers as they are, and numbers for dates and texts."""
    if column.dtype != object:
        return as_numbers(column)
    places: dict[Any, int] = {}
    return np.fromiter(
        (places.setdefault(text, len(places)) for text in column),
        np.float64,
        len(column),
    )


def names_rows(column: str) -> bool:
    """Whether a column is called as those are that only name rows, such as Patient_ID
    or PassengerId.
    """
    usual = column.lower() in (
        "",
        "id",
        "index",
        "unnamed: 0",
    ) or column.lower().endswith(("_id", " id"))
    return usual or re.search(r"[a-z](Id|ID)$", column) is not None


def identifies(column: str) -> bool:
    """Whether the name of a column says that it identifies something, in one row or in
    several.
    """
    return (
        names_rows(column) and column.lower().endswith("id")
    ) or IDENTIFIER.fullmatch(column) is not None

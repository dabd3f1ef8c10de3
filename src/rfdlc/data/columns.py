"""Which columns of a table become features: those that only name rows are left out, and what is misread raises."""

import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.copies import first_copies
from rfdlc.data.sources.image_files import is_image
from rfdlc.data.table import FEW, MOST_CATEGORIES, Column, as_numbers, dropping, grouping, parse_column, text_column
from rfdlc.dates import is_date
from rfdlc.errors import expect
from rfdlc.tables import is_number

IDENTIFIES = (
    "column {0!r} is an identifier by its name ({1:,} values in {2:,} rows) and was left out: a model would memorise "
    "it; if rows of one value belong together, as visits of a patient do, use {3}; {4}"
)
FILES = (
    "column {0!r} holds {1:,} names of images in {2:,} rows and was left out: a model would memorise them; if rows of "
    "one image belong together, use {3}"
)
NAMING = 0.99  # a column with more different texts than this share of the rows names rows
FEW_CATEGORIES = 20  # more of a column whose name ends in id are hardly kinds of something
MOST_REPEATS = 50  # rows per value of an identifier; with more, values may be kinds of something, such as stores
PEOPLE = "patient|subject|participant|person|customer|client|user|member|donor|case"
IDENTIFIER = re.compile(rf"({PEOPLE})[ _.-]?(id|no|nr|number|code|key)?|(.*[ _.-])?(uuid|guid|mrn|ssn)", re.IGNORECASE)
_CURRENCY = r"([$\u00a2-\u00a5\u20a0-\u20c0]|AUD|CAD|CHF|CNY|CZK|DKK|EUR|GBP|INR|JPY|NOK|PLN|SEK|USD)"
_DIGITS = r"(\d{1,3}([.,'\u2019 \u00a0\u202f]\d{3})+|\d+)([.,]\d+)?"  # perhaps with thousands separators
_SPACE = r"[ \u00a0\u202f]?"
_MONTH = r"(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
# What a column may hold as texts that mean something else: its kind, a text of it, and how to write it.
MISREAD: dict[str, tuple[re.Pattern[str], Callable[[str], bool], str]] = {
    "numbers": (
        re.compile(rf"[-+]?({_CURRENCY}{_SPACE})?[-+]?{_DIGITS}({_SPACE}{_CURRENCY})?", re.ASCII),
        is_number,
        "write them without thousands separators and currency, with a decimal point, such as 21759.78",
    ),
    "percentages": (
        re.compile(rf"[-+]?\d+([.,]\d+)?{_SPACE}%", re.ASCII),
        is_number,
        "divide them by 100 and write 38.9% as 0.389",
    ),
    "dates": (
        re.compile(
            rf"(\d{{1,2}}/\d{{1,2}}/(\d\d|\d{{4}})|\d{{4}}/\d{{1,2}}/\d{{1,2}}|\d{{1,2}}-\d{{1,2}}-\d{{4}}"
            rf"|\d{{1,2}}[-/ .]*{_MONTH}[-/ .,]*\d{{2,4}}|{_MONTH}[-/ .]*(\d{{1,2}}[, ]+)?\d{{4}})([ T].*)?",
            re.ASCII | re.IGNORECASE,
        ),
        is_date,
        "write them as year-month-day, such as 2020-11-08",
    ),
}


def check_texts(columns: Mapping[str, Column], frame: str = "") -> None:
    """Raise for texts that mean numbers, percentages or dates: each would be a category of its own.

    Errors name options, or methods of a `frame` that is given to an estimator.
    """
    for name, column in columns.items():
        values = {*column.tolist()} - {None} if column.dtype == object else set()
        for kind, (written, reads, fix) in MISREAD.items():
            fits = {text for text in values if written.fullmatch(text) or reads(text)}
            wrong = sorted(text for text in fits if not reads(text))
            few = len(values) - len(fits) < FEW * len(values)
            told = f"column {name!r} holds texts such as {next(iter(wrong), '')!r} that look like {kind}: {fix}"
            expect(not (wrong and few), f"{told}; or leave the column out ({dropping([name], frame)})")


def identities(
    cells: Mapping[str, Any], columns: dict[str, Column], frame: str = ""
) -> tuple[list[str] | None, str | None, list[str]]:
    """Remove columns that only name the rows: the first without repeats gives the ids; its name, and notes."""
    ids, identity, notes = None, None, list[str]()
    for name in [name for name in columns if names_rows(name) or _may_identify(name, columns[name])]:
        texts = text_column(cells[name]).tolist()
        different = len({*texts} - {None})
        share, people = different / len(texts), names_rows(name) and IDENTIFIER.fullmatch(name)
        fewest = FEW_CATEGORIES if people else max(FEW_CATEGORIES, len(texts) // MOST_REPEATS)
        if None not in texts and (share > NAMING or _differ_unless_copies(different, columns)):
            every = "every row" if share == 1 else f"{share:.1%} of the rows"
            reason = "it names rows and says nothing about the class"
            reason += f"; {_keeping(name)}" if columns[name].dtype != object else ""  # numbers, left out by the name
            notes.append(f"column {name!r} has a different value in {every} and was left out: {reason}")
            ids, identity = ids or (texts if share == 1 else None), identity or name
        elif different > fewest and (told := _memorised(name, columns[name])):
            notes.append(told.format(name, different, len(texts), grouping(name, frame), _keeping(name)))
            warnings.warn(notes[-1], stacklevel=4)
        else:
            continue
        del columns[name]
    return ids, identity, notes


def without_identities(cells: Mapping[str, Any], frame: str) -> list[str]:
    """The columns of a `frame` that may become features; says which are left out: estimators have no notes."""
    columns = {name: parse_column(name, own) for name, own in cells.items()}
    check_texts(columns, frame)
    with warnings.catch_warnings(action="ignore"):
        notes = identities(cells, columns, frame)[2]
    for note in notes:
        warnings.warn(note, stacklevel=6)
    expect(columns, f"{frame} has no column to learn from: {'; '.join(notes)}")
    return [*columns]


def _keeping(name: str) -> str:
    """How to keep a column that is left out by its name."""
    return f"to keep it as a feature, rename it, for example to {f'{name}_feature'!r}"


def _memorised(name: str, column: Column) -> str:
    """What to say of a column that a model would memorise; empty for others."""
    if column.dtype == object and all(text is None or is_image(text) for text in column):
        return FILES
    return IDENTIFIES if identifies(name) and _may_identify(name, column) else ""


def _may_identify(name: str, column: Column) -> bool:
    """Whether it holds texts, or whole numbers under a name that says so."""
    return column.dtype == object or (identifies(name) and column.dtype == np.float64 and not (column % 1 > 0).any())


def _differ_unless_copies(different: int, columns: dict[str, Column]) -> bool:
    """Whether a column with more values than there may be categories has as many as the table has different rows."""
    rows = (
        np.stack([codes_of(column) for column in columns.values()], 1) if different > MOST_CATEGORIES else np.zeros(0)
    )
    return len(rows) > 0 and different == len(np.unique(first_copies(rows)))


def codes_of(column: Column) -> NDArray[np.float64]:
    """Numbers as they are, and numbers for dates and texts."""
    if column.dtype != object:
        return as_numbers(column)
    places: dict[Any, int] = {}
    return np.fromiter((places.setdefault(text, len(places)) for text in column), np.float64, len(column))


def names_rows(column: str) -> bool:
    """Whether a column is called as those are that only name rows, such as Patient_ID or PassengerId."""
    usual = column.lower() in ("", "id", "index", "unnamed: 0") or column.lower().endswith(("_id", " id"))
    return usual or re.search(r"[a-z](Id|ID)$", column) is not None


def identifies(column: str) -> bool:
    """Whether the name of a column says that it identifies something, in one row or in several."""
    return (names_rows(column) and column.lower().endswith("id")) or IDENTIFIER.fullmatch(column) is not None

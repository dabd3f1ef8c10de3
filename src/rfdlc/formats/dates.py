"""Dates and times as people write them: ISO 8601, of months their first day, or
day.month.year.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from rfdlc.errors import InputError

_DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d.*)?", re.ASCII)  # ISO 8601
_MONTH = re.compile(
    r"((?:19|20)\d\d-\d\d)", re.ASCII
)  # years alone that are meant: 1200-05 may be a code
_DOTTED = re.compile(
    r"^(\d{1,2})\.(\d{1,2})\.(\d{4})(?!\d)", re.ASCII
)  # day, month, year
# Times in other formats (03/01/2026, 20260301T0930, Unix time), and missing ones: as
# names, each would be its own day.
_NO_NAME = re.compile(
    r"\d{1,4}([/-])\d{1,2}\1\d{1,4}.*|\d{8}T.*|\d{9,}(\.\d*)?|nan|nat|none|<na>|",
    re.ASCII | re.IGNORECASE,
)


def since_1970(text: str) -> timedelta | None:
    """From 1970-01-01 to a date in ISO 8601 or day.month.year, perhaps with a time (in
    UTC unless it says its offset).

    >>> (
    ...     since_1970("1970-01-02T12:00+06:00"),
    ...     since_1970("2.1.1970"),
    ...     since_1970("1970-02").days,
    ...     since_1970("2024"),
    ... )
    (datetime.timedelta(days=1, seconds=21600), datetime.timedelta(days=1), 31, None)
    """
    text = _MONTH.sub(r"\1-01", text) if _MONTH.fullmatch(text) else _iso(text)
    if not _DATE.fullmatch(text):
        return None
    with suppress(ValueError):
        found = datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)) - datetime(
            1970, 1, 1, tzinfo=UTC
        )
    return None


def is_date(text: str) -> bool:
    return since_1970(text) is not None


def days_of(times: Iterable[Any]) -> list[str]:
    """The days of dates or times, as written: offsets change nothing. Names of days,
    shifts or sites stay as they are.

    >>> days_of(["2024-03-01T23:59+06:00", "2.3.2024"]), days_of(["night", 2])
    (['2024-03-01', '2024-03-02'], ['night', '2'])

    Raises
    ------
    InputError
        If a value is missing, if only some are dates, or if they are times in another
        format.
    """
    texts = [str(time).strip() for time in times]
    dates = [is_date(text) for text in texts]
    if all(dates):
        return [_iso(text)[:10] for text in texts]
    for sample, (text, date) in enumerate(zip(texts, dates, strict=True)):
        if not date and (any(dates) or _NO_NAME.fullmatch(text)):
            expected = (
                "2026-03-01, 2026-03-01T09:30 or 1.3.2026 for every sample, or names of"
                " days, shifts or sites"
            )
            raise InputError(
                f"the time of sample {sample} (counted from 0) is {text!r}: expected"
                f" {expected}"
            )
    return texts


def _iso(text: str) -> str:
    return _DOTTED.sub(lambda found: f"{found[3]}-{found[2]:0>2}-{found[1]:0>2}", text)

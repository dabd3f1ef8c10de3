"""The errors that users see: what was given, what is allowed, and the fix, in
one line.
"""

import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from unicodedata import normalize

# What could move a cursor or fake a line, and halves of characters; and what could
# reverse the order of letters, too.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
HIDDEN = re.compile(rf"{CONTROL.pattern}|[\u2028-\u202e\u2066-\u2069]")
PART = 3  # letters of a longer name that a suggestion needs
REPLACE = (  # how a folder is replaced, for messages
    "--force; in Python, remove it first"
)


class InputError(ValueError):
    """Something the user gave cannot be used. The command line prints it as one line
    and exits with 2.
    """


class BrokenRows(InputError):
    """Rows of scores that cannot be used, counted from 0; the message names the
    first.
    """

    def __init__(self, before: str, rows: Sequence[int], after: str) -> None:
        super().__init__(before, rows, after)
        self.before, self.rows, self.after = before, rows, after

    def __str__(self) -> str:
        return f"{self.told(f'row {self.rows[0]}')}; rows count from 0"

    def told(self, place: str) -> str:
        """The message with another name of the place, such as its line."""
        return f"{self.before}{place}{self.after}"


def expect(condition: object, message: str) -> None:
    if not condition:
        raise InputError(message)


def choose(what: str, given: str, allowed: Iterable[str]) -> str:
    allowed = list(allowed)
    hint = "" if given in allowed else suggestion(given, allowed)
    known = listing(allowed, 8 if hint else 40)
    expect(
        given in allowed, f"{what} {given!r} is unknown: expected one of {known}{hint}"
    )
    return given


def suggestion(given: str, allowed: Iterable[str]) -> str:
    """`; did you mean 'x'?` for a near miss, or a longer name with all of what was
    given; otherwise nothing.
    """
    text, names = str(given), [*allowed]  # what is given may be anything
    bare = text.strip().lower()
    alike = [name for name in names if str(name).strip().lower() == bare]
    longer = alike or [
        name for name in names if len(text) >= PART and bare in str(name).lower()
    ]
    close = sorted(longer, key=len)[:1] or get_close_matches(text, names, n=1)
    if close and normalize("NFC", close[0]) == normalize("NFC", str(given)):
        return (
            "; the two look alike, but their accents are encoded otherwise (Unicode"
            " NFC, NFD): write both alike"
        )
    return f"; did you mean {close[0]!r}?" if close else ""


def listing(names: Iterable[object], most: int = 8) -> str:
    """The names for a message, shortened when there are many: `0, 1, 2, ... (10 in
    all)`.
    """
    words = [str(name) for name in names]
    return (
        ", ".join(words)
        if len(words) <= most
        else ", ".join(words[:most]) + f", ... ({len(words)} in all)"
    )


def printable(text: object) -> str:
    """Text for a terminal, a log or a page: control characters are shown as escapes.

    >>> printable("a\\x1b[31m")
    'a\\\\x1b[31m'
    """
    return HIDDEN.sub(lambda found: ascii(found.group())[1:-1], str(text))


def counted(number: int, noun: str) -> str:
    """`1 epoch`, `2 epochs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def are(number: int) -> str:
    """`is` of one, `are` of others."""
    return "is" if number == 1 else "are"


def repeated(names: Iterable[str]) -> list[str]:
    return sorted(name for name, times in Counter(names).items() if times > 1)


def end_with_parent(message: str) -> None:
    """End this process, whatever it waits for, soon after the one that started it has
    ended.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        try:
            print(message, file=sys.stderr, flush=True)
        finally:  # also where nobody reads it
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

"""The dialects of CSV that spreadsheets write: comma, semicolon (with decimal commas) or tab."""

import csv
import io
import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from rfdlc.errors import InputError

DELIMITERS = ",;\t"
SEEN = 20  # lines that say what parts the cells: in two alone, a comma within a name could pass for it


def delimiter_of(lines: Iterable[str]) -> str:
    """The first delimiter that splits the first lines into the same number of cells, more than one.

    >>> delimiter_of(["a;b", "0,5;0,5"]), delimiter_of(["true,a;x;y", "a;x;y,1"])
    (';', ',')
    >>> delimiter_of(["a, b\\ttarget", "0.5\\ta, b", "0.5\\tc"])
    '\\t'
    """
    head = list(islice((line for line in lines if line.strip()), SEEN))
    for delimiter in DELIMITERS:
        widths = {len(row) for row in csv.reader(head, delimiter=delimiter)}
        if len(widths) == 1 and widths != {1}:
            return delimiter
    return max(DELIMITERS, key=head[0].count) if head else ","


def number(cell: str, delimiter: str = ",") -> float:
    """A cell as a number; where cells are parted by semicolons, a comma is a decimal point.

    >>> number("0,5", ";")
    0.5
    """
    if "_" in cell:
        raise ValueError(f"{cell!r} is a code")  # to Python alone 1_2 is 12
    return float(cell.replace(",", ".") if delimiter == ";" else cell)


def read_rows(path: Path, what: str) -> tuple[str, list[tuple[int, list[str]]]]:
    """The delimiter of a small table, and its rows that are not blank: line number and stripped cells."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        delimiter = delimiter_of(text.splitlines())
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
        return delimiter, [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(row)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise InputError(f"{path}: cannot be read as {what} in UTF-8 ({reason})") from None

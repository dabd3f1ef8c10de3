"""The dialects of CSV that spreadsheets write: comma, semicolon (with decimal commas) or tab."""

import csv
from collections.abc import Iterable
from itertools import islice

DELIMITERS = ",;\t"


def delimiter_of(lines: Iterable[str]) -> str:
    """The first delimiter that splits the first two lines into the same number of cells, more than one.

    >>> delimiter_of(["a;b", "0,5;0,5"]), delimiter_of(["true,a;x;y", "a;x;y,1"])
    (';', ',')
    """
    head = list(islice((line for line in lines if line.strip()), 2))
    for delimiter in DELIMITERS:
        widths = {len(row) for row in csv.reader(head, delimiter=delimiter)}
        if len(widths) == 1 and widths != {1}:
            return delimiter
    return max(DELIMITERS, key=head[0].count) if head else ","


def number(cell: str, delimiter: str) -> float:
    """A cell as a number; where cells are parted by semicolons, a comma is a decimal point.

    >>> number("0,5", ";")
    0.5
    """
    return float(cell.replace(",", ".") if delimiter == ";" else cell)

"""Write tables as CSV that spreadsheets do not compute, or as Parquet; as Markdown or
LaTeX for papers.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rfdlc.errors import choose
from rfdlc.formats.files import replacing
from rfdlc.formats.tables import FORMULA, NUMBER, PARQUET, escaped

FORMATS = ("markdown", "latex")
_MARKDOWN = str.maketrans({sign: f"\\{sign}" for sign in "\\|*_`<"})
_LATEX = str.maketrans(
    {sign: f"\\{sign}" for sign in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"±": r"$\pm$", "<": "$<$", ">": "$>$"}
)


def open_writer(
    path: Path, schema: Any, kind: str, repeated: Sequence[str] = ()
) -> Any:
    """Open a file of a kind (`.parquet` or `.csv`) to write tables to; `repeated` are
    columns with few values.
    """
    from pyarrow.csv import CSVWriter
    from pyarrow.parquet import ParquetWriter

    if kind not in PARQUET:
        return _CsvWriter(
            CSVWriter(
                path,
                schema.empty_table()
                .rename_columns(list(map(escaped, schema.names)))
                .schema,
            )
        )
    return ParquetWriter(
        path, schema, use_dictionary=list(repeated), write_statistics=False
    )


class _CsvWriter:
    """Writes tables whose texts and names are escaped."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def __enter__(self) -> "_CsvWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def write_table(self, table: Any) -> None:
        from pyarrow import compute, types

        for place, column in enumerate(table.columns):
            if types.is_string(column.type) and "RFDLC_KEEP_FORMULAS" not in os.environ:
                formula = compute.match_substring_regex(column, FORMULA)
                formula = compute.and_not(
                    formula, compute.match_substring_regex(column, NUMBER)
                )
                cells = compute.if_else(
                    formula, compute.binary_join_element_wise("'", column, ""), column
                )
                table = table.set_column(place, table.schema.names[place], cells)
        self._writer.write_table(
            table.rename_columns(list(map(escaped, table.schema.names)))
        )


def write_table(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Write columns of equal length; the file is complete or not there."""
    import pyarrow

    table = pyarrow.table({name: list(values) for name, values in columns.items()})
    with (
        replacing(path) as beside,
        open_writer(beside, table.schema, path.suffix.lower()) as writer,
    ):
        writer.write_table(table)


def typeset(
    kind: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1
) -> str:
    """A table for a paper, as Markdown or LaTeX (package booktabs), whose first columns
    hold text and others numbers.

    >>> print(typeset("markdown", ["method", "loss"], [["rf_dlc", "0.5"]]))
    | method | loss |
    |---|---:|
    | rf\\_dlc | 0.5 |
    """
    choose("format", kind, FORMATS)
    right = len(columns) - left
    if kind == "markdown":
        lines = [
            f"| {' | '.join(cell.translate(_MARKDOWN) for cell in row)} |"
            for row in (columns, *rows)
        ]
        return "\n".join([lines[0], "|" + "---|" * left + "---:|" * right, *lines[1:]])
    cells = [
        [re.sub(r"(?<!\w)-(?=\d)", "$-$", cell.translate(_LATEX)) for cell in row]
        for row in (columns, *rows)
    ]
    head, *body = (" & ".join(row) + r" \\" for row in cells)
    begin = rf"\begin{{tabular}}{{{'l' * left}{'r' * right}}}"
    return "\n".join(
        [begin, r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"]
    )

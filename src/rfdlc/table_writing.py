"""Write tables as CSV that spreadsheets do not compute, or as Parquet."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rfdlc.files import replacing
from rfdlc.tables import FORMULA, NUMBER, PARQUET, escaped


def open_writer(path: Path, schema: Any, kind: str, repeated: Sequence[str] = ()) -> Any:
    """Open a file of a kind (`.parquet` or `.csv`) to write tables to; `repeated` are columns with few values."""
    from pyarrow.csv import CSVWriter
    from pyarrow.parquet import ParquetWriter

    if kind not in PARQUET:
        return _CsvWriter(CSVWriter(path, schema.empty_table().rename_columns(list(map(escaped, schema.names))).schema))
    return ParquetWriter(path, schema, use_dictionary=list(repeated), write_statistics=False)


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
                formula = compute.and_not(formula, compute.match_substring_regex(column, NUMBER))
                cells = compute.if_else(formula, compute.binary_join_element_wise("'", column, ""), column)
                table = table.set_column(place, table.schema.names[place], cells)
        self._writer.write_table(table.rename_columns(list(map(escaped, table.schema.names))))


def write_table(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Write columns of equal length; the file is complete or not there."""
    import pyarrow

    table = pyarrow.table({name: list(values) for name, values in columns.items()})
    with replacing(path) as beside, open_writer(beside, table.schema, path.suffix.lower()) as writer:
        writer.write_table(table)

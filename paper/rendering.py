"""Tables as text: for a terminal, Markdown, LaTeX, CSV or JSON. Nothing here knows what
a table is about.
"""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from paper.results import Mean
from paper.scoring import DECISION_METRICS, TRUST_METRICS
from paper.specs import DATA_TITLES
from paper.tables import Cell, Row, Table
from rfdlc.evaluation.metrics import METRICS

NOT_MEASURED = "not measured here"
MARK = "≠"
TITLES = {
    "acc": "all",
    "fhr25": "FHR 25",
    "fhr50": "FHR 50",
    "fhr75": "FHR 75",
    "fhr": "FHR",
    "auc": "AUC",
    "ece": "ECE",
    "acc_penalty": "all, -1",
    "fhr_penalty": "FHR, -1",
}
DECIMALS = {"disagreement": 3, "parameters": 0} | {
    name: 3
    for name, known in (DECISION_METRICS | TRUST_METRICS).items()
    if METRICS[known.partition(".")[0]].unit != "%"
}
LEGEND = (
    "Mean ± standard deviation over seeds; published values and differences beside"
    f" them. {MARK} marks a difference of more than two deviations (of both together,"
    " or of the one that is known)."
)


def column_title(metric: str) -> str:
    """How a person reads the name of a metric."""
    return TITLES.get(
        metric,
        metric.replace("rate_", "").replace("auc_", "AUC ").replace("ece_", "ECE "),
    )


def _mean(found: Mean | None, metric: str) -> str:
    if found is None:
        return ""
    digits = DECIMALS.get(metric, 2)
    spread = (
        ""
        if found.deviation is None or metric == "parameters"
        else f" ± {found.deviation:.{digits}f}"
    )
    return f"{found.value:,.{digits}f}{spread}"


def _published(cell: Cell) -> str:
    if cell.published is None:
        return ""
    digits = DECIMALS.get(cell.metric, 2)
    spread = (
        ""
        if cell.published.deviation is None
        else f" ± {cell.published.deviation:.{digits}f}"
    )
    return f"{cell.published.value:,.{digits}f}{spread}"


def _difference(cell: Cell) -> str:
    if cell.difference is None:
        return ""
    return f"{cell.difference:+,.{DECIMALS.get(cell.metric, 2)}f}" + (
        f" {MARK}" if cell.disagrees else ""
    )


def _ours(cell: Cell) -> str:
    """Ours minus measured, its interval, and on how many seeds unless on all that were
    measured.
    """
    if cell.ours is None:
        return ""
    fewer = cell.measured is not None and cell.ours.seeds < cell.measured.seeds
    return (
        f"ours {cell.ours.value:+.2f} [{cell.ours.low:+.2f}, {cell.ours.high:+.2f}]"
        + (f" on {cell.ours.seeds} seeds" if fewer else "")
    )


def _together(cell: Cell) -> str:
    """Measured (published, difference)."""
    parts = (cell.note, _published(cell), _difference(cell), _ours(cell))
    beside = ", ".join(part for part in parts if part)
    return " ".join(
        part
        for part in (_mean(cell.measured, cell.metric), f"({beside})" if beside else "")
        if part
    )


def _seeds(row: Row) -> str:
    return str(row.seeds) if row.seeds else NOT_MEASURED


def _by_data(table: Table) -> Iterable[tuple[str, list[Row]]]:
    for data, rows in groupby(table.rows, key=lambda row: row.data):
        yield DATA_TITLES.get(data, data), list(rows)


# -- forms
# --------------------------------------------------------------------------------------


def text(tables: Sequence[Table]) -> str:
    """For a terminal: under each measured line the published values and the
    differences.
    """
    return "\n".join([*map(_text_of, tables), LEGEND]) + "\n"


def _text_of(table: Table) -> str:
    lines = [
        f"{table.name}: {table.title}" + (f"  [{table.label}]" if table.label else "")
    ]
    for data, rows in _by_data(table):
        grid = [["protocol", data, *map(column_title, table.columns), "seeds"]]
        for row in rows:
            grid.append(
                [
                    row.protocol,
                    row.label,
                    *(_mean(c.measured, c.metric) for c in row.cells),
                    _seeds(row),
                ]
            )
            if any(cell.published for cell in row.cells):
                grid.append(["", "  published", *map(_published, row.cells), ""])
            if any(cell.difference is not None for cell in row.cells):
                grid.append(["", "  difference", *map(_difference, row.cells), ""])
            if any(cell.ours or cell.note for cell in row.cells):
                grid.append(
                    [
                        "",
                        "",
                        *(
                            ", ".join(filter(None, (c.note, _ours(c))))
                            for c in row.cells
                        ),
                        "",
                    ]
                )
        lines += ["", *_aligned(grid)]
    return "\n".join([*lines, "", *([table.note, ""] if table.note else [])])


def _aligned(grid: list[list[str]]) -> list[str]:
    """Two columns of words to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in grid) for i in range(len(grid[0]))]
    padded = [
        [
            cell.ljust(w) if i < 2 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        for row in grid
    ]
    return ["  ".join(row).rstrip() for row in padded]


def markdown(tables: Sequence[Table]) -> str:
    """For a page."""
    return "\n".join(map(_markdown_of, tables))


def _markdown_of(table: Table) -> str:
    label = f" (`{table.label}`)" if table.label else ""
    lines = [f"## {table.name}", "", f"{table.title}{label}. {table.note}".strip(), ""]
    for data, rows in _by_data(table):
        lines += [
            f"**{data}**",
            "",
            _pipes(["protocol", "method", *map(column_title, table.columns), "seeds"]),
        ]
        lines += ["|---|---|" + "---:|" * len(table.columns) + "---:|"]
        lines += [
            _pipes([row.protocol, row.label, *map(_together, row.cells), _seeds(row)])
            for row in rows
        ]
        lines += [""]
    return "\n".join(lines)


def _pipes(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def latex(tables: Sequence[Table]) -> str:
    """For a paper: tabular environments with booktabs, one per data set."""
    return "\n".join(line for table in tables for line in _latex_of(table)) + "\n"


def _latex_of(table: Table) -> Iterable[str]:
    for data, rows in _by_data(table):
        yield f"% {table.name}: {table.title}. {data}"
        yield (
            rf"\begin{{tabular}}{{ll{'r' * len(table.columns)}r}}" + "\n" + r"\toprule"
        )
        yield (
            _ampersands(["protocol", data, *map(column_title, table.columns), "seeds"])
            + r" \midrule"
        )
        for row in rows:
            yield _ampersands(
                [row.protocol, row.label, *map(_together, row.cells), _seeds(row)]
            )
        yield r"\bottomrule" + "\n" + r"\end{tabular}" + "\n"


def _ampersands(cells: Iterable[str]) -> str:
    special = {"±": r"$\pm$", MARK: r"$\neq$", "_": r"\_", "%": r"\%"}
    joined = " & ".join(cells)
    for sign, code in special.items():
        joined = joined.replace(sign, code)
    return joined + r" \\"


def records(tables: Sequence[Table]) -> list[dict[str, Any]]:
    """One plain record a cell, for programs."""
    return [
        _record(table, row, cell)
        for table in tables
        for row in table.rows
        for cell in row.cells
    ]


def _record(table: Table, row: Row, cell: Cell) -> dict[str, Any]:
    measured, published = cell.measured, cell.published
    return {
        "table": table.name,
        "data": row.data,
        "protocol": row.protocol,
        "row": row.label,
        "run": row.run,
        "metric": cell.metric,
        "measured": None if measured is None else measured.value,
        "deviation": None if measured is None else measured.deviation,
        "seeds": 0 if measured is None else measured.seeds,
        "published": None if published is None else published.value,
        "published_deviation": None if published is None else published.deviation,
        "difference": cell.difference,
        "disagrees": cell.disagrees,
        "ours_minus_measured": None if cell.ours is None else cell.ours.value,
        "ours_low": None if cell.ours is None else cell.ours.low,
        "ours_high": None if cell.ours is None else cell.ours.high,
        "ours_seeds": 0 if cell.ours is None else cell.ours.seeds,
    }


def as_json(tables: Sequence[Table]) -> str:
    """All cells."""
    return json.dumps({"cells": records(tables)}, indent=1, ensure_ascii=False) + "\n"


def as_csv(tables: Sequence[Table]) -> str:
    """All cells, one per line."""
    rows = records(tables)
    out = io.StringIO()
    writer = csv.DictWriter(
        out, list(rows[0]) if rows else ["table"], lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(
        {name: "" if value is None else value for name, value in row.items()}
        for row in rows
    )
    return out.getvalue()


FORMS = {
    "text": text,
    "markdown": markdown,
    "latex": latex,
    "csv": as_csv,
    "json": as_json,
}

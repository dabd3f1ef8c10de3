"""What several commands write: checked files, JSON for programs, text and tables for
people.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rfdlc.errors import counted, expect, listing, printable

SHOWN = 25  # rows of a table that may have many
COLUMNS = {
    "mean_cost": "mean cost",
    "mean_utility": "mean utility",
    "accuracy": "accuracy",
    "ece": "ECE",
}
COLUMNS |= {
    "recall": "recall",
    "precision": "precision",
    "specificity": "specificity",
    "auroc": "AUROC",
}
COLUMNS |= {
    "predicted_share": "predicted",
    "observed_share": "observed",
    "abstention_rate": "handed over",
}
HANDED_OVER = {
    "accuracy": "wrong in accuracy",
    "recall": "missed in recall",
    "specificity": "right in specificity",
}
END_ROWS = 15  # of a table of many parts, at either end
WORTH = ("mean_cost", "mean_utility")  # the first alone where both are known
SPANNED = (*WORTH, "accuracy", "recall", "precision")  # shown with their intervals


def check_other(out: Path | None, file: Path) -> None:
    """Raise if the result would replace the predictions that it is made from."""
    same = out is not None and out.exists() and file.exists() and out.samefile(file)
    expect(not same, f"{out}: this file holds the predictions; choose another file")


def check_writable(
    path: Path | None, *, force: bool = True, endings: Sequence[str] = ()
) -> None:
    """Raise before any long work if the result, where there is one, cannot be written
    there.
    """
    if path is None:
        return
    ending = path.suffix.lower()
    expect(
        not endings or ending in endings,
        f"{path}: cannot be written, expected {' or '.join(endings)}",
    )
    folder = path.absolute().parent
    expect(
        folder.is_dir(), f"{path}: the folder {folder} does not exist; create it first"
    )
    places = [folder, path] if path.exists() else [folder]
    writable = not path.is_dir() and all(os.access(place, os.W_OK) for place in places)
    expect(writable, f"{path}: cannot be written; choose another file")
    expect(
        force or not path.exists(),
        f"{path}: exists already; choose another name, or give --force",
    )


def output(as_json: bool, table: Mapping[str, Any], *parts: Any) -> None:
    """Print the table as JSON for programs, or the parts (lines of text, rich tables)
    for people.
    """
    if as_json:
        print(json.dumps(table, ensure_ascii=False, indent=2, allow_nan=False))
        return
    from rich.console import Console
    from rich.segment import Segment
    from rich.text import Text

    class Escaped:
        """A part whose texts are shown without control characters of their own."""

        def __init__(self, part: Any) -> None:
            self.part = part

        def __rich_console__(self, console: Any, options: Any) -> Any:
            for text, style, control in console.render(self.part, options):
                yield Segment(
                    "\n".join(map(printable, text.split("\n"))), style, control
                )

    console = Console(highlight=False, emoji=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 200  # at most: tables are as wide as they need
    for part in parts:
        console.print(Escaped(part), soft_wrap=isinstance(part, str | Text))


def new_table(
    *columns: str, left: int = 1, title: str | None = None, **options: Any
) -> Any:
    """A table whose first columns hold text and the others numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        **options,
    )
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < left else "right", overflow="fold")
    return table


def part_table(kind: str, parts: Mapping[Any, Any]) -> Any:
    """Metrics of each part of the samples, by falling size: evaluations, or rows as in
    JSON.

    Of many, the largest and the smallest; others are not turned into rows, as intervals
    take time.
    """

    def cell(row: Mapping[str, Any], key: str) -> str:
        form = (
            "{:,.4f}" if key in WORTH else "{:.2%}" if "share" in key else "{:.1%}"
        ).format
        brief = form if key in WORTH else "{:.0%}".format
        bounds = " to ".join(
            map(brief, row["intervals"].get(key, ()) if key in SPANNED else ())
        ).replace("%", "")
        return (
            "" if row[key] is None else form(row[key]) + f" ({bounds})" * bool(bounds)
        )

    sizes = {
        name: part["samples"] if isinstance(part, Mapping) else part.samples
        for name, part in parts.items()
    }
    names = sorted(
        (name for name in parts if sizes[name]), key=lambda name: -sizes[name]
    )
    names = (
        names if len(names) <= 2 * END_ROWS else names[:END_ROWS] + names[-END_ROWS:]
    )
    rows = [
        (
            name,
            parts[name] if isinstance(parts[name], Mapping) else parts[name].to_dict(),
        )
        for name in names
    ]
    keys = [
        key
        for key in COLUMNS
        if key in rows[0][1]
        and (key != "abstention_rate" or any(r[key] for _, r in rows))
    ]
    keys = [key for key in keys if key != WORTH[1] or WORTH[0] not in keys]
    size, left = (
        "samples" + " (groups)" * bool(rows[0][1].get("groups")),
        len(parts) - len(rows),
    )
    told = (
        [HANDED_OVER[key] for key in keys if key in HANDED_OVER]
        if "abstention_rate" in keys
        else []
    )
    notes = [f"{left:,} more: --json"] * bool(left) + [
        f"what is handed over counts as {listing(told)}"
    ] * bool(told)
    table = new_table(
        kind, size, *map(COLUMNS.__getitem__, keys), caption="; ".join(notes) or None
    )
    for name, row in rows:
        groups = f" ({row['groups']:,})" if row.get("groups") else ""
        table.add_row(
            str(name) or "(empty)",
            f"{row['samples']:,}{groups}",
            *(cell(row, key) for key in keys),
        )
    return table


def action_table(
    counts: Mapping[str, int],
    rule: str = "",
    by_argmax: Mapping[str, int] | None = None,
    other: str = "arg max",
) -> Any:
    """The most frequent actions, and where it is known, how often arg max (the `other`
    rule) decides for the class.
    """
    total, columns = (
        sum(counts.values()),
        ["action", "decided", "share", *([f"by {other}"] if by_argmax else [])],
    )
    table = new_table(
        *columns, title=f"{counted(total, 'decision')}{f' by {rule}' if rule else ''}"
    )
    rows = sorted(counts.items(), key=lambda row: -row[1])
    if rest := rows[SHOWN:]:
        rows[SHOWN:] = [(f"{len(rest)} more actions", sum(count for _, count in rest))]
    for name, count in rows:
        likely = (by_argmax or {}).get(name)
        cells = (
            name,
            f"{count:,}",
            f"{count / max(1, total):.1%}",
            "" if likely is None else f"{likely:,}",
        )
        table.add_row(*cells[: len(columns)])
    return table

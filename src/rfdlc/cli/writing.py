"""What several commands write: files that are whole or not there, JSON for machines, tables for people."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rfdlc.errors import InputError


def check_writable(path: Path, *, force: bool = True, endings: Sequence[str] = ()) -> None:
    """Fail before any long work where the result could not be written at its end, or not as what its name says."""
    if endings and path.suffix.lower() not in endings:
        raise InputError(
            f"{path}: cannot be written as {path.suffix!r}: expected a name that ends in {' or '.join(endings)}"
        )
    folder = path.absolute().parent
    if not folder.is_dir():
        raise InputError(f"{path}: the folder {folder} does not exist; create it first")
    existing = [folder, path] if path.exists() else [folder]  # the new file takes the place of the old one
    if path.is_dir() or not all(os.access(place, os.W_OK) for place in existing):
        raise InputError(f"{path}: cannot be written; choose another file")
    if path.exists() and not force:
        raise InputError(f"{path}: exists already and may hold your edits; choose another name, or say --force")


def rounded(values: Iterable[float]) -> list[float]:
    """Six significant digits: as much as float32 holds."""
    return [float(f"{value:.6g}") for value in values]


def escaped(text: object) -> str:
    """Text whose brackets are no markup to `print_rich`."""
    from rich.markup import escape

    return escape(str(text))


def print_json(table: Mapping[str, Any]) -> None:
    """One JSON object on standard output, and nothing else."""
    print(json.dumps(table, ensure_ascii=False, indent=2, allow_nan=False))


def print_rich(*parts: Any) -> None:
    """Tables and text for people."""
    from rich.console import Console

    Console().print(*parts, sep="\n")


def new_table(*columns: str, left: int = 1, title: str | None = None, **options: Any) -> Any:
    """A table whose first columns hold text and the others numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", **options)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < left else "right", overflow="fold")
    return table

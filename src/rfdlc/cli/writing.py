"""What several commands write: checked files, JSON for programs, tables for people."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rfdlc.errors import expect


def check_writable(path: Path, *, force: bool = True, endings: Sequence[str] = ()) -> None:
    """Raise before any long work if the result cannot be written there."""
    ending = path.suffix.lower()
    expect(not endings or ending in endings, f"{path}: cannot be written, expected {' or '.join(endings)}")
    folder = path.absolute().parent
    expect(folder.is_dir(), f"{path}: the folder {folder} does not exist; create it first")
    places = [folder, path] if path.exists() else [folder]
    writable = not path.is_dir() and all(os.access(place, os.W_OK) for place in places)
    expect(writable, f"{path}: cannot be written; choose another file")
    expect(force or not path.exists(), f"{path}: exists already; choose another name, or give --force")


def rounded(values: Iterable[float]) -> list[float]:
    """Six significant digits, about the precision of float32."""
    return [float(f"{value:.6g}") for value in values]


def escaped(text: object) -> str:
    """Text whose brackets are not markup to `print_rich`."""
    from rich.markup import escape

    return escape(str(text))


def print_json(table: Mapping[str, Any]) -> None:
    print(json.dumps(table, ensure_ascii=False, indent=2, allow_nan=False))


def print_rich(*parts: Any) -> None:
    from rich.console import Console

    Console(highlight=False).print(*parts, sep="\n")


def new_table(*columns: str, left: int = 1, title: str | None = None, **options: Any) -> Any:
    """A table whose first columns hold text and the others numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", **options)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < left else "right", overflow="fold")
    return table

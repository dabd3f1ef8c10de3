"""The figures of the paper's tables as data: `published.toml` has them as printed, `figures()` reads them."""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from rfdlc.errors import InputError


@dataclass(frozen=True)
class Figure:
    """One printed number. `deviation` where the paper gives one; `copied` where it is from another paper."""

    table: str
    label: str  # of the table in the LaTeX source
    data: str
    row: str
    metric: str
    value: float
    deviation: float | None = None
    copied: bool = False


@cache
def figures() -> dict[tuple[str, str, str, str], Figure]:
    """Every figure by (table, data set, row, metric).

    >>> figures()["fhr", "cifar100-lt", "RF-DLC", "fhr"]
    Figure(table='fhr', ..., data='cifar100-lt', row='RF-DLC', metric='fhr', value=32.08, deviation=0.78, copied=False)
    """
    text = (files("paper") / "published.toml").read_text(encoding="utf-8")
    found = [figure for table in tomllib.loads(text)["tables"] for figure in _of_table(table)]
    return {(figure.table, figure.data, figure.row, figure.metric): figure for figure in found}


def published(table: str, data: str, row: str, metric: str) -> Figure | None:
    """The printed figure, or nothing where the cell is empty or there is no such cell.

    Where a table repeats a figure of another one without its deviation, it has that: one figure is judged alike
    everywhere.
    """
    figure = figures().get((table, data, row, metric))
    if figure is None or figure.deviation is not None:
        return figure
    return replace(figure, deviation=_deviations().get((data, row, metric, figure.value)))


@cache
def _deviations() -> dict[tuple[str, str, str, float], float]:
    found = figures().values()
    return {(f.data, f.row, f.metric, f.value): f.deviation for f in found if f.deviation is not None}


def _of_table(table: dict[str, Any]) -> list[Figure]:
    metrics, copied = table["metrics"].split(), table.get("copied", ())
    found = []
    for row, cells in table["rows"].items():
        words = cells.split()
        if len(words) != len(metrics):
            raise InputError(f"{table['name']}, {table['data']}, {row}: expected {len(metrics)} figures")
        for metric, word in zip(metrics, words, strict=True):
            if word != "-":
                value, _, deviation = word.partition("±")
                known = (table["name"], table["label"], table["data"], row, metric)
                found.append(Figure(*known, float(value), float(deviation) if deviation else None, row in copied))
    return found

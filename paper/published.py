"""The values of the paper's tables as data: `published.toml` has them as printed,
`published_values()` reads them.
"""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from rfdlc import InputError


@dataclass(frozen=True)
class PublishedValue:
    """One printed number. `deviation` where the paper gives one; `copied` where it is
    from another paper.
    """

    table: str
    label: str  # of the table in the LaTeX source
    data: str
    row: str
    metric: str
    value: float
    deviation: float | None = None
    copied: bool = False


@cache
def published_values() -> dict[tuple[str, str, str, str], PublishedValue]:
    """Every value by (table, data set, row, metric).

    >>> published_values()["fhr", "cifar100-lt", "RF-DLC", "fhr"]
    PublishedValue(table='fhr', ..., metric='fhr', value=32.08, deviation=0.78,
                   copied=False)
    """
    text = (files("paper") / "published.toml").read_text(encoding="utf-8")
    found = [
        value for table in tomllib.loads(text)["tables"] for value in _of_table(table)
    ]
    return {
        (value.table, value.data, value.row, value.metric): value for value in found
    }


def published(table: str, data: str, row: str, metric: str) -> PublishedValue | None:
    """The printed value, or nothing where the cell is empty or there is no such cell.

    Where a table repeats a value of another one without its deviation, it has that: one
    value is judged alike everywhere.
    """
    value = published_values().get((table, data, row, metric))
    if value is None or value.deviation is not None:
        return value
    return replace(value, deviation=_deviations().get((data, row, metric, value.value)))


@cache
def _deviations() -> dict[tuple[str, str, str, float], float]:
    found = published_values().values()
    return {
        (f.data, f.row, f.metric, f.value): f.deviation
        for f in found
        if f.deviation is not None
    }


def _of_table(table: dict[str, Any]) -> list[PublishedValue]:
    metrics, copied = table["metrics"].split(), table.get("copied", ())
    found = []
    for row, cells in table["rows"].items():
        words = cells.split()
        if len(words) != len(metrics):
            raise InputError(
                f"{table['name']}, {table['data']}, {row}: expected {len(metrics)}"
                " values"
            )
        for metric, word in zip(metrics, words, strict=True):
            if word != "-":
                value, _, deviation = word.partition("±")
                known = (table["name"], table["label"], table["data"], row, metric)
                found.append(
                    PublishedValue(
                        *known,
                        float(value),
                        float(deviation) if deviation else None,
                        row in copied,
                    )
                )
    return found

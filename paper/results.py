"""What was measured, as CSV files by data set: `runs.csv` says where each run comes
from, `metrics.csv` has one row per run and metric, `curves.csv` the points that plots
need. Nothing here needs torch.
"""

import csv
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from paper.scoring import Point, Value
from rfdlc import InputError
from rfdlc.errors import listing
from rfdlc.formats.files import locked, replacing

PACKAGED = Path(__file__).parent / "results"
COLUMNS = {
    "runs": (
        "run",
        "seed",
        "method",
        "settings",
        "seconds",
        "beside",
        "networks",
        "parameters",
        "hardware",
        "versions",
        "commit",
        "date",
    ),
    "metrics": ("run", "seed", "split", "decision", "metric", "value"),
    "curves": ("run", "seed", "split", "decision", "curve", "x", "y", "weight"),
}
UNKNOWN = (
    "seconds",
    "beside",
    "networks",
    "parameters",
)  # numbers that may be empty: a training that was interrupted
NUMBERS = (*UNKNOWN, "value", "x", "y", "weight")
REMEDY = (
    "bring back a whole file, or remove it and score the run folders again (--rescore)"
)
Rows = list[dict[str, str]]


@dataclass(frozen=True)
class Mean:
    """Mean and standard deviation over seeds; `deviation` is nothing for a
    single one.
    """

    value: float
    deviation: float | None
    seeds: int


@dataclass(frozen=True)
class Scored:
    """A run's row of `runs.csv`, its values and the points of its curves."""

    run: Mapping[str, Any]
    values: Sequence[Value]
    points: Sequence[Point]


class Results:
    """All measured values below a folder, ready to be asked."""

    def __init__(self, folder: Path = PACKAGED) -> None:
        self.folder = folder
        places = sorted(path.parent for path in folder.glob("*/metrics.csv"))
        self.runs = {place.name: _read(place / "runs.csv") for place in places}
        self._values: dict[tuple[str, str, str, str, str], dict[int, float]] = {}
        for place in places:
            for row in _read(place / "metrics.csv"):
                key = (
                    place.name,
                    row["run"],
                    row["split"],
                    row["decision"],
                    row["metric"],
                )
                self._values.setdefault(key, {})[int(row["seed"])] = float(row["value"])

    def by_seed(
        self, data: str, run: str, decision: str, metric: str, split: str = "test"
    ) -> dict[int, float]:
        """A value of every seed that was measured."""
        return self._values.get((data, run, split, decision, metric), {})

    def mean(
        self, data: str, run: str, decision: str, metric: str, split: str = "test"
    ) -> Mean | None:
        """Over the seeds, or nothing where it was not measured."""
        return mean_of(list(self.by_seed(data, run, decision, metric, split).values()))

    def parameters(self, data: str, run: str) -> Mean | None:
        """How many parameters were trained, over the seeds."""
        return mean_of(
            [
                float(row["parameters"])
                for row in self._rows(data, run)
                if row["parameters"]
            ]
        )

    def minutes(self, data: str, run: str) -> Mean | None:
        """Of one training, over seeds that had the machine to themselves; those of a
        stack share one measured time.
        """
        alone = [
            row
            for row in self._rows(data, run)
            if row["beside"] == "0" and row["seconds"]
        ]
        found = mean_of([float(row["seconds"]) / 60 for row in alone])
        return None if found is None else replace(found, deviation=None)

    def _rows(self, data: str, run: str) -> Rows:
        return [row for row in self.runs.get(data, []) if row["run"] == run]

    def measured(self, data: str) -> list[str]:
        """Names of the runs of a data set, in the order of the file."""
        return list(dict.fromkeys(row["run"] for row in self.runs.get(data, [])))


def mean_of(values: Sequence[float]) -> Mean | None:
    """Mean and sample deviation.

    >>> mean_of([1.0, 3.0])
    Mean(value=2.0, deviation=1.414..., seeds=2)
    """
    if not values:
        return None
    return Mean(
        float(np.mean(values)),
        float(np.std(values, ddof=1)) if len(values) > 1 else None,
        len(values),
    )


def curves(data: str, folder: Path = PACKAGED) -> Rows:
    """The points of every curve of a data set."""
    return _read_if_there(folder / data / "curves.csv")


def finished(
    folder: Path, data: str, calibrated: Iterable[str] = ()
) -> set[tuple[str, int]]:
    """Runs whose values are there already; of those that are named `calibrated`, the
    calibrated ones too.
    """
    values, named = _read_if_there(folder / data / "metrics.csv"), set(calibrated)
    scored = {(row["run"], row["seed"]) for row in values}
    there = {
        (row["run"], row["seed"]) for row in values if row["decision"] == "calibrated"
    }
    keys = scored & {
        (row["run"], row["seed"]) for row in _read_if_there(folder / data / "runs.csv")
    }
    return {
        (run, int(seed))
        for run, seed in keys
        if run not in named or (run, seed) in there
    }


def write(folder: Path, data: str, scored: Sequence[Scored]) -> None:
    """Put the rows of these runs in place of those they had: scoring again changes
    nothing but what changed.

    Several processes may write to one folder: none loses the rows of another.
    """
    if not scored:
        return
    tables: dict[str, list[dict[str, Any]]] = {
        "curves": [],
        "metrics": [],
        "runs": [],
    }  # runs last: they say finished
    for each in scored:
        key = {name: each.run[name] for name in ("run", "seed")}
        tables["runs"].append(dict(each.run))
        tables["metrics"] += [
            key | vars(value) | {"value": f"{value.value:.6g}"} for value in each.values
        ]
        for point in each.points:
            tables["curves"].append(
                key
                | vars(point)
                | {name: f"{vars(point)[name]:.4g}" for name in ("x", "y", "weight")}
            )
    changed = {(str(each.run["run"]), str(each.run["seed"])) for each in scored}
    place = make_folder(folder / data)
    with locked(place):
        for name, rows in tables.items():
            path = place / f"{name}.csv"
            kept = [
                row
                for row in _read_if_there(path)
                if (row["run"], row["seed"]) not in changed
            ]
            _write(
                path,
                COLUMNS[name],
                sorted(
                    [*kept, *rows], key=lambda row: (str(row["run"]), int(row["seed"]))
                ),
            )


def make_folder(folder: Path) -> Path:
    """The folder, made where it is not there yet; one that cannot be written to is
    refused.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{folder}: the folder for results cannot be made ({error.strerror});"
            " choose another"
        ) from None
    if not os.access(folder, os.W_OK):
        raise InputError(
            f"{folder}: the folder for results cannot be written to; choose another"
        )
    return folder


def _read_if_there(path: Path) -> Rows:
    return _read(path) if path.exists() else []


def _read(path: Path) -> Rows:
    columns = COLUMNS[path.stem]
    try:
        with path.open(
            newline="", encoding="utf-8-sig"
        ) as lines:  # spreadsheets begin a file with a mark
            reader = csv.DictReader(lines)
            rows, header = list(reader), reader.fieldnames or ()
    except OSError as error:
        raise InputError(
            f"{path}: the results cannot be read ({error.strerror})"
        ) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(
            f"{path}: this is not a table of results ({error}); {REMEDY}"
        ) from None
    if not set(columns) <= set(header):
        told = f"its columns are {listing(header, 12)}" if header else "it is empty"
        raise InputError(f"{path}: {told}; expected {listing(columns, 12)}; {REMEDY}")
    for row in rows:
        if not _is_whole(row, columns):
            raise InputError(
                f"{path}: {row} is damaged; expected {listing(columns, 12)}; {REMEDY}"
            )
    return rows


def _is_whole(row: Mapping[str, str], columns: Sequence[str]) -> bool:
    """Whether it has a cell a column and no more, and numbers are numbers."""
    try:
        int(row["seed"])
        numbers = [
            float(row[name])
            for name in columns
            if name in NUMBERS and (row[name] or name not in UNKNOWN)
        ]
        return (
            None not in row
            and row[columns[-1]] is not None
            and all(map(isfinite, numbers))
        )
    except (TypeError, ValueError):
        return False


def _write(
    path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]
) -> None:
    with (
        replacing(path) as beside,
        beside.open("w", newline="", encoding="utf-8") as lines,
    ):
        writer = csv.DictWriter(lines, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)

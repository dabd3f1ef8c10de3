"""The tables: each of the paper's, with what was measured beside what was published, under two protocols.

paper      as its authors ran it, on true factor-100 data: training on everything, arg max of mean logits, their ECE.
standard   one calibrated probability a sample, decided by expected utility; calibration and choices never see test
           labels; ECE of 15 bins. `calibrated` is the arg max, `calibrated -1` the decision for a penalty of -1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from paper.published import PublishedValue, published
from paper.results import Mean, Results
from paper.scoring import PENALTIES
from paper.specs import FHR, SPECS, Line, Spec
from rfdlc.errors import choose

OF_PARTICLES = ("disagreement", "mutual_information")  # the same whatever is decided


@dataclass(frozen=True)
class Cell:
    """A measured value and the published one; either may be missing."""

    metric: str
    measured: Mean | None
    published: PublishedValue | None

    @property
    def difference(self) -> float | None:
        """Measured less published."""
        if self.measured is None or self.published is None:
            return None
        return self.measured.value - self.published.value

    @property
    def deviation(self) -> float | None:
        """Of the difference: both deviations together, or the one that is known."""
        known = [each.deviation for each in (self.measured, self.published) if each and each.deviation is not None]
        return float(np.hypot.reduce(known)) if known else None

    @property
    def disagrees(self) -> bool:
        """Whether measured and published differ by more than two deviations."""
        gap, deviation = self.difference, self.deviation
        return gap is not None and deviation is not None and abs(gap) > 2 * deviation


@dataclass(frozen=True)
class Row:
    """A filled line for one data set."""

    data: str
    protocol: str
    label: str
    run: str
    cells: tuple[Cell, ...]

    @property
    def seeds(self) -> int:
        """How many seeds were measured; 0: not measured here."""
        return max((cell.measured.seeds for cell in self.cells if cell.measured), default=0)


@dataclass(frozen=True)
class Table:
    """Ready to be shown."""

    name: str
    title: str
    label: str  # of the paper's table, empty for one of ours
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    note: str


def build(name: str, results: Results) -> Table:
    """One table by its name."""
    choose("table", name, SPECS)
    spec = SPECS[name]
    wanted = ((data, line) for data in spec.data for line in spec.lines if line.data is None or data in line.data)
    rows = tuple(_row(spec, line, data, results) for data, line in wanted)
    if name == "decisions":
        rows = tuple(_with_equal_accuracy(row, results) for row in rows)
    label = next((cell.published.label for row in rows for cell in row.cells if cell.published), "")
    return Table(name, spec.title, label, tuple(spec.columns), rows, spec.note)


def _row(spec: Spec, line: Line, data: str, results: Results) -> Row:
    cells = []
    for column in spec.columns:
        metric = line.metrics.get(column, column)
        if metric in ("minutes", "parameters"):
            measured = (results.minutes if metric == "minutes" else results.parameters)(data, line.run)
        else:
            decision, _, name = metric.rpartition("|")
            decided = "" if name in OF_PARTICLES else decision or line.decision
            measured = results.mean(data, line.run, decided, name, line.split)
        asked = line.row and (line.beside is None or column in line.beside)
        origin = {"cifar10-lt-paper-profile": "cifar10-lt"}.get(data, data)
        name = line.printed.get(column, column)
        cells.append(Cell(column, measured, published(_home(spec, column), origin, line.row, name) if asked else None))
    return Row(data, line.protocol, line.label, line.run, tuple(cells))


def _home(spec: Spec, column: str) -> str:
    """The table of the paper that a column comes from, where ours joins two."""
    return "fhr" if spec.paper == "accuracy" and column in FHR else spec.paper


# -- our own comparison: the same decision for every method -----------------------------------------------------------


def frontier(results: Results, data: str, run: str) -> list[tuple[float, float, float]]:
    """(penalty, accuracy, false head rate), means over seeds, as the penalty grows under the standard protocol.

    Only penalties that every seed was scored for: a point of fewer seeds would be another curve's.
    """
    points = []
    for penalty in PENALTIES:
        found = [results.mean(data, run, f"calibrated {penalty:g}", metric) for metric in ("acc", "fhr")]
        if found[0] and found[1]:
            points.append((penalty, found[0], found[1]))
    seeds = max((rate.seeds for _, _, rate in points), default=0)
    return [(penalty, accuracy.value, rate.value) for penalty, accuracy, rate in points if rate.seeds == seeds]


def fhr_at(points: Sequence[tuple[float, float, float]], accuracy: float) -> float | None:
    """The least false head rate of a frontier at this accuracy, between its points a straight line; nothing beyond it.

    >>> fhr_at([(0, 50.0, 30.0), (-1, 40.0, 10.0)], 45.0)
    20.0
    """
    found = []
    for (_, left, high), (_, right, low) in pairwise(points):
        if min(left, right) <= accuracy <= max(left, right):
            share = 0.0 if left == right else (left - accuracy) / (left - right)
            found.append(high + share * (low - high))
    if points and accuracy < min(point[1] for point in points):
        found.append(min(point[2] for point in points))  # accuracy to spare: its last point is better in both
    return min(found, default=None)


def _with_equal_accuracy(row: Row, results: Results) -> Row:
    """Fill `fhr_ours`: the false head rate of `rf-dlc` at the accuracy that this row's method has."""
    measured = {cell.metric: cell.measured for cell in row.cells}
    accuracy = measured.get("acc")
    ours = None if accuracy is None else fhr_at(frontier(results, row.data, "rf-dlc"), accuracy.value)
    filled = None if ours is None or accuracy is None else Mean(ours, None, accuracy.seeds)
    cells = tuple(Cell(c.metric, filled, None) if c.metric == "fhr_ours" else c for c in row.cells)
    return replace(row, cells=cells)

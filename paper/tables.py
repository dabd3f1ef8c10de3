"""The tables: each of the paper's, with what was measured beside what was published,
under two protocols.

paper      as its authors ran it, on true factor-100 data: training on everything, arg
           max of mean logits, their ECE.
standard   one calibrated probability a sample, decided by expected utility; calibration
           and choices never see test labels; ECE of 15 bins. `calibrated` is the arg
           max, `calibrated -1` the decision for a penalty of -1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from scipy.special import stdtrit

from paper.published import PublishedValue, published
from paper.results import Mean, Results, mean_of
from paper.scoring import PENALTIES
from paper.specs import EQUAL, FHR, SPECS, Line, Spec
from rfdlc.errors import choose

OF_PARTICLES = ("disagreement", "mutual_information")  # the same whatever is decided


@dataclass(frozen=True)
class Paired:
    """Mean over seeds of a difference within each seed, with its 95% t interval."""

    value: float
    low: float
    high: float
    seeds: int


@dataclass(frozen=True)
class Cell:
    """A measured value and the published one; either may be missing. `ours`: `rf-dlc`
    minus the measured value.
    """

    metric: str
    measured: Mean | None
    published: PublishedValue | None
    ours: Paired | None = None
    note: str = ""

    @property
    def difference(self) -> float | None:
        """Measured less published."""
        if self.measured is None or self.published is None:
            return None
        return self.measured.value - self.published.value

    @property
    def deviation(self) -> float | None:
        """Of the difference: both deviations together, or the one that is known."""
        known = [
            each.deviation
            for each in (self.measured, self.published)
            if each and each.deviation is not None
        ]
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
        return max(
            (cell.measured.seeds for cell in self.cells if cell.measured), default=0
        )


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
    wanted = (
        (data, line)
        for data in spec.data
        for line in spec.lines
        if line.data is None or data in line.data
    )
    rows = tuple(_row(spec, line, data, results) for data, line in wanted)
    if name in EQUAL:
        rows = tuple(_with_equal_accuracy(row, results) for row in rows)
    label = next(
        (cell.published.label for row in rows for cell in row.cells if cell.published),
        "",
    )
    return Table(name, spec.title, label, tuple(spec.columns), rows, spec.note)


def _row(spec: Spec, line: Line, data: str, results: Results) -> Row:
    cells = []
    for column in spec.columns:
        metric = line.metrics.get(column, column)
        if metric in ("minutes", "parameters"):
            measured = (results.minutes if metric == "minutes" else results.parameters)(
                data, line.run
            )
        else:
            decision, _, name = metric.rpartition("|")
            decided = "" if name in OF_PARTICLES else decision or line.decision
            measured = results.mean(data, line.run, decided, name, line.split)
        asked = line.row and (line.beside is None or column in line.beside)
        origin = data.removesuffix("-paper-profile")
        name = line.printed.get(column, column)
        cells.append(
            Cell(
                column,
                measured,
                (
                    published(_home(spec, column), origin, line.row, name)
                    if asked
                    else None
                ),
            )
        )
    return Row(data, line.protocol, line.label, line.run, tuple(cells))


def _home(spec: Spec, column: str) -> str:
    """The table of the paper that a column comes from, where ours joins two."""
    return "fhr" if spec.paper == "accuracy" and column in FHR else spec.paper


# -- our own comparison: the same decision for every method
# --------------------------------------------------------------------------------------


def frontier(results: Results, data: str, run: str) -> list[tuple[float, float, float]]:
    """(penalty, accuracy, false head rate), means over seeds, as the penalty grows
    under the standard protocol.

    Only penalties that every seed was scored for: a point of fewer seeds would be
    another curve's.
    """
    points = []
    for penalty in PENALTIES:
        found = [
            results.mean(data, run, f"calibrated {penalty:g}", metric)
            for metric in ("acc", "fhr")
        ]
        if found[0] and found[1]:
            points.append((penalty, found[0], found[1]))
    seeds = max((rate.seeds for _, _, rate in points), default=0)
    return [
        (penalty, accuracy.value, rate.value)
        for penalty, accuracy, rate in points
        if rate.seeds == seeds
    ]


def seed_curves(
    results: Results, data: str, run: str
) -> dict[int, list[tuple[float, float, float]]]:
    """(penalty, accuracy, false head rate) of each seed, for every penalty that the
    seed was scored for.
    """
    found: dict[int, list[tuple[float, float, float]]] = {}
    for penalty in PENALTIES:
        accuracy, rate = (
            results.by_seed(data, run, f"calibrated {penalty:g}", metric)
            for metric in ("acc", "fhr")
        )
        for seed in sorted(accuracy.keys() & rate.keys()):
            found.setdefault(seed, []).append((penalty, accuracy[seed], rate[seed]))
    return found


def fhr_at(
    points: Sequence[tuple[float, float, float]], accuracy: float
) -> float | None:
    """The lowest false head rate of a curve at this accuracy, linear between its
    points; None where it does not reach.

    >>> fhr_at([(0, 50.0, 30.0), (-1, 40.0, 10.0)], 45.0)
    20.0
    """
    found = []
    for (_, left, high), (_, right, low) in pairwise(points):
        if min(left, right) <= accuracy <= max(left, right):
            share = 0.0 if left == right else (left - accuracy) / (left - right)
            found += [high + share * (low - high), *((low,) if left == right else ())]
    return min(found, default=None)


def fhr_by_seed(
    results: Results, data: str, run: str, accuracy: float
) -> dict[int, float]:
    """The false head rate at this accuracy on each seed's own curve; seeds that do not
    reach it are left out.
    """
    found = {
        seed: fhr_at(points, accuracy)
        for seed, points in seed_curves(results, data, run).items()
    }
    return {seed: rate for seed, rate in found.items() if rate is not None}


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Paired | None:
    """Ours minus theirs over the seeds that both have; None for fewer than two.

    >>> paired({0: 1.0, 1: 2.0, 2: 9.0}, {0: 2.0, 1: 5.0})
    Paired(value=-2.0, low=-14.70..., high=10.70..., seeds=2)
    """
    found = mean_of(
        [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    )
    if found is None or found.deviation is None:
        return None
    half = float(stdtrit(found.seeds - 1, 0.975)) * found.deviation / found.seeds**0.5
    return Paired(found.value, found.value - half, found.value + half, found.seeds)


def _with_equal_accuracy(row: Row, results: Results) -> Row:
    """Fill the columns that are accuracies: this method's false head rate there, and
    the paired difference of ours.
    """

    def filled(cell: Cell) -> Cell:
        if cell.metric == "acc" or not row.seeds:
            return cell
        theirs, ours = (
            fhr_by_seed(results, row.data, run, float(cell.metric))
            for run in (row.run, "rf-dlc")
        )
        note = (
            ""
            if len(theirs) == row.seeds
            else f"{len(theirs)} of {row.seeds} seeds"
            if theirs
            else "not reached"
        )
        pair = None if row.run == "rf-dlc" else paired(ours, theirs)
        return Cell(cell.metric, mean_of(list(theirs.values())), None, pair, note)

    return replace(row, cells=tuple(map(filled, row.cells)))

"""Paired comparisons: differences of every metric between two models, or two methods
with several seeds each.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from scipy import special

from rfdlc.decisions.decider import Decider
from rfdlc.errors import expect
from rfdlc.evaluation.evaluate import (
    ANSWERED,
    COST,
    GAP,
    REGIONAL,
    WORTH,
    Evaluation,
    aligned,
    counted_samples,
    entries,
    rich_table,
)
from rfdlc.evaluation.metrics import METRICS, Metric, measure, readable
from rfdlc.evaluation.outcomes import Outcomes, observe
from rfdlc.statistics.intervals import LEVEL, Array, Z, student

SIGNIFICANCE = 0.05
QUESTION = (
    WORTH  # the one metric that is asked about in advance: its p needs no adjustment
)


@dataclass(frozen=True)
class Difference:
    """One metric of both sides; `p` is adjusted for the number of metrics (Holm 1979),
    that of mean utility is not.
    """

    name: str
    label: str
    a: float
    b: float
    difference: float  # b - a
    low: float
    high: float
    p: float
    a_deviation: float | None = (
        None  # standard deviation over the runs of a side, if there are several
    )
    b_deviation: float | None = None

    @property
    def as_cost(self) -> "Difference":
        """The same of costs, which are utilities with their sign changed."""
        a, b, difference, high, low = (
            0.0 - v for v in (self.a, self.b, self.difference, self.low, self.high)
        )
        label = self.label.replace("utility", "cost")
        return replace(
            self, label=label, a=a, b=b, difference=difference, low=low, high=high
        )


@dataclass(frozen=True)
class Comparison:
    """Paired differences b - a with 95% intervals.

    The test samples are the same on both sides. Intervals are about other test samples
    and, with several seeds, other seeds; with one seed per side, the two models are
    held fixed. Samples are paired, seeds are not: the variances between the seeds of
    both sides are added (Welch). Intervals are for one metric at a time. Of samples in
    `groups`, such as patients, they are about other groups.
    """

    names: tuple[str, str]
    samples: int
    seeds: tuple[int, int]
    differences: tuple[Difference, ...]
    groups: int | None = None
    has_costs: bool = (
        False  # the utility of both sides is that of costs: tables show these
    )
    two_classes: bool = False  # then tables leave out what is about regions of classes

    def __getitem__(self, name: str) -> Difference:
        return next(found for found in self.differences if found.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        table = asdict(self) | {"verdict": self.verdict}
        for found in [
            each
            for each in self.differences
            if self.has_costs and each.name == QUESTION
        ]:
            table[COST] = asdict(found.as_cost) | {"name": COST}
        return table

    @property
    def verdict(self) -> str:
        """Which side decides better for the utility, if that can be told: the row of
        mean utility in words.
        """
        found = next((each for each in self.differences if each.name == QUESTION), None)
        if found is None:
            return "Too few samples to tell which one is better."
        shown, what = (found.as_cost, "cost") if self.has_costs else (found, "utility")
        (a, b), (low, high) = self.names, (readable(shown.low), readable(shown.high))
        if found.low <= 0 <= found.high:
            return (
                f"Mean {what}: no difference can be told ({b} minus {a}: {low} to"
                f" {high})."
            )
        better, gain = (
            ("better", found.difference)
            if found.low > 0
            else ("worse", -found.difference)
        )
        return (
            f"Mean {what}: {b} is {better} than {a} by {readable(gain)} (difference"
            f" {low} to {high})."
        )

    @property
    def shown(self) -> list[Difference]:
        """The differences that tables show: costs as such, and nothing about
        abstentions where there are none.
        """
        abstains = any(
            d.a or d.b for d in self.differences if d.name == "abstention_rate"
        )
        rows = [d for d in self.differences if abstains or d.name not in ANSWERED]
        rows = [
            d for d in rows if not (self.two_classes and _metric(d).name in REGIONAL)
        ]
        costs = (
            {d.name for d in rows if {WORTH, GAP} & {d.name, _metric(d).parent}}
            if self.has_costs
            else ()
        )
        return [d.as_cost if d.name in costs else d for d in rows]

    def records(self) -> list[dict[str, Any]]:
        """The rows of tables as numbers, ready for a data frame."""
        return [asdict(d) for d in self.shown]

    @property
    def columns(self) -> tuple[str, ...]:
        """The headings of `rows`."""
        return "metric", *self.names, "difference", f"{LEVEL:.0%} interval", "p"

    def rows(self) -> list[tuple[str, ...]]:
        """(metric, a, b, difference, interval, p) as tables show them; * marks p below
        0.05.
        """
        table: list[tuple[str, ...]] = []
        for d in self.shown:
            show = _metric(d).format
            p = (f"{d.p:.3f}" if d.p >= 0.0005 else "< 0.001") + "*" * (
                d.p < SIGNIFICANCE
            )
            label = f"{d.label} (the question)" if d.name == QUESTION else d.label
            sides = ((d.a, d.a_deviation), (d.b, d.b_deviation))
            means = (
                show(mean) + (f" ± {show(own)}" if own is not None else "")
                for mean, own in sides
            )
            table.append(
                (
                    label,
                    *means,
                    show(d.difference),
                    f"{show(d.low)} to {show(d.high)}",
                    p,
                )
            )
        return table

    def __repr__(self) -> str:
        return "\n".join([self.verdict, *aligned([self.columns, *self.rows()])])

    def __rich__(self) -> Any:
        several = f"{self.seeds[0]} and {self.seeds[1]} runs, not paired by seed"
        held = "models held fixed" if max(self.seeds) == 1 else several
        asked = {_likeness(each) for each in self.differences if each.name == QUESTION}
        distinct = len({_likeness(each) for each in self.differences} - asked)
        beside = "; that of the question is not" if asked else ""
        note = (
            f"p adjusted for {distinct} different comparisons (Holm){beside}; * below"
            f" {SIGNIFICANCE}"
        )
        title = (
            f"{counted_samples(self.samples, self.groups, 'paired samples')}, {held}"
        )
        return rich_table(title, self.columns, self.rows(), note)


def gain_over_argmax(
    result: Evaluation, predictions: Any, decider: Decider
) -> Difference | None:
    """Mean utility of the most probable classes (a) and of evaluated decisions (b);
    None where these are the same.
    """
    utility, outcomes = decider.utility, result.outcomes
    if outcomes is None or not set(range(len(utility.classes))) <= set(
        utility.decided_class.tolist()
    ):
        return None
    plain = decider.replace(rule="argmax", sets=None, budget=None, unfamiliar=None)
    other = observe(*plain.model.read_labelled(predictions, None), plain)
    if np.array_equal(other.actions, outcomes.actions):
        return None
    metric = METRICS["mean_utility"]
    found = paired_difference(
        *([metric.estimates(each)[metric.name]] for each in (other, outcomes))
    )
    return None if found is None else Difference(metric.name, metric.label, *found)


def compare_outcomes(
    a: Sequence[Outcomes],
    b: Sequence[Outcomes],
    names: tuple[str, str] = ("A", "B"),
    times: int = 300,
    seed: int = 0,
) -> Comparison:
    """Compare outcomes of the same samples in the same order, one per seed on each
    side; the first groups count.
    """
    same = all(np.array_equal(a[0].targets, other.targets) for other in (*a, *b))
    expect(
        same,
        "the runs have different samples: expected the same ones in the same order, or"
        " ids without repeats",
    )
    groups = next(
        (o.sample_groups for o in (*a, *b) if o.sample_groups is not None), None
    )
    if groups is not None:
        a, b = ([replace(o, sample_groups=groups) for o in side] for side in (a, b))
    abstaining = max(
        a[0], b[0], key=lambda o: np.mean(o.decided < 0)
    )  # labels say how abstentions count
    labels = {entry.name: entry.full_label for entry in entries(measure(abstaining))}
    rows = []
    for metric in METRICS.values():
        left, right = (
            [metric.estimates(o, times, seed) for o in side] for side in (a, b)
        )
        for name in [
            name for name in left[0] if all(name in each for each in (*left, *right))
        ]:
            sides = [[each[name] for each in side] for side in (left, right)]
            found = paired_difference(*sides)
            rows += (
                []
                if found is None
                else [Difference(name, labels[name], *found, *map(_deviation, sides))]
            )
    distinct = {
        _likeness(row): row.p for row in reversed(rows)
    }  # of equal ones the first, whatever metrics follow
    asked = {
        _likeness(row): distinct.pop(_likeness(row))
        for row in rows
        if row.name == QUESTION
    }
    adjusted = asked | dict(
        zip(distinct, _holm(np.array(list(distinct.values()))), strict=True)
    )
    differences = tuple(
        replace(_possible(row), p=float(adjusted[_likeness(row)])) for row in rows
    )
    count = None if groups is None else len(np.unique(groups))
    kind = all(o.utility.has_costs for o in (*a, *b)), len(a[0].classes) == 2
    return Comparison(names, len(a[0]), (len(a), len(b)), differences, count, *kind)


def paired_difference(a: Sequence[Any], b: Sequence[Any]) -> tuple[float, ...] | None:
    """Values of both sides, their difference with its interval, and p; None without an
    interval on each side.
    """
    if any(each.interval() is None for each in (*a, *b)):
        return None
    values = [np.array([each.value for each in side]) for side in (a, b)]
    left, right = (float(side.mean()) for side in values)
    centre, halves = right - left, _by_sample(a, b)
    if halves is None:
        centre, halves = _recovered(a, b)
    # Samples within seeds: the variance between seeds is added, with the degrees of
    # freedom of Satterthwaite. Pairing by seed would halve these, for a correlation
    # that is about 0 in practice (`benchmarks/coverage.py --seeds`).
    seeds = [
        (float(side.var(ddof=1)) / len(side), len(side) - 1)
        for side in values
        if len(side) > 1
    ]
    for i, half in enumerate(halves):
        variance, freedom = (half / Z) ** 2 + sum(part for part, _ in seeds), 1e9
        if any(part for part, _ in seeds):
            freedom = min(
                1e9, variance**2 / sum(part**2 / free for part, free in seeds)
            )
        halves[i] = float(special.stdtrit(freedom, (1 + LEVEL) / 2)) * variance**0.5
    low, high = (
        min(centre - halves[0], right - left),
        max(centre + halves[1], right - left),
    )
    error = (halves[0] if centre > 0 else halves[1]) / Z
    p = 2 * float(special.ndtr(-abs(centre) / error)) if error > 0 else 1.0
    return left, right, right - left, low, high, p


def _by_sample(a: Sequence[Any], b: Sequence[Any]) -> list[float] | None:
    """The distances of both bounds, by the errors of both sides on each sample
    (Student's t); None if unknown.
    """
    if any(each.unseen is None for each in (*a, *b)):
        return None
    left, right = (
        np.mean([each.influence() for each in side], axis=0) for side in (a, b)
    )
    low, high = student((right - left) * len(left))
    # A sample more that differs: no two models are certainly equal on few samples (as
    # Agresti and Min 2005).
    unseen = Z * float(np.sqrt(max(each.unseen for each in (*a, *b))))
    return [float(np.hypot(low, unseen)), float(np.hypot(high, unseen))]


def _recovered(a: Sequence[Any], b: Sequence[Any]) -> tuple[float, list[float]]:
    """The difference and the distances, from both intervals and the correlation of
    errors (Zou and Donner 2008).
    """
    centres, ends, errors = [], [], []
    for side in (a, b):
        centres.append(
            float(
                np.mean([each.centre() if each.centre else each.value for each in side])
            )
        )
        ends.append(
            np.abs(np.mean([each.interval() for each in side], axis=0) - centres[-1])
        )
        errors.append(
            np.mean(
                [each.influence() if each.influence else [0.0] for each in side], axis=0
            )
        )
    norm = np.prod(np.linalg.norm(errors, axis=1))
    correlation = float(errors[0] @ errors[1]) / norm if norm > 0 else 0.0
    sides = ((ends[1][0], ends[0][1]), (ends[1][1], ends[0][0]))
    return centres[1] - centres[0], [
        float(np.sqrt(x**2 + y**2 - 2 * correlation * x * y)) for x, y in sides
    ]


def _possible(row: Difference) -> Difference:
    """With an interval within -1 and 1, if it is that of two shares."""
    shares = _metric(row).unit == "%"
    return (
        replace(row, low=max(row.low, -1.0), high=min(row.high, 1.0)) if shares else row
    )


def _metric(row: Difference) -> Metric:
    return METRICS[row.name.partition(".")[0]]


def _deviation(side: Sequence[Any]) -> float | None:
    """The standard deviation over runs."""
    return (
        float(np.std([each.value for each in side], ddof=1)) if len(side) > 1 else None
    )


def _likeness(row: Difference) -> tuple[float, ...]:
    """The same for equal and for opposite differences: regret is minus utility, and
    tests the same.
    """
    return tuple(
        sorted(float(f"{abs(end):.6e}") for end in (row.difference, row.low, row.high))
    )


def _holm(p: Array) -> Array:
    """p-values adjusted for their number, by Holm's step-down method."""
    order = np.argsort(p)
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(
        1, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    )
    return adjusted

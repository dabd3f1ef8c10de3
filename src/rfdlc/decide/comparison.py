"""Paired comparisons: differences of every metric between two models, or two methods with several seeds each."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import stats

from rfdlc.decide.evaluation import Entry, entries
from rfdlc.decide.intervals import FEWEST, LEVEL, Array, Mean, resampled
from rfdlc.decide.metrics import METRICS, Metric, measure
from rfdlc.decide.outcomes import Outcomes
from rfdlc.errors import expect

SIGNIFICANCE = 0.05


@dataclass(frozen=True)
class Difference:
    """One metric of both sides; `p` is adjusted for the number of metrics (Holm 1979)."""

    name: str
    label: str
    a: float
    b: float
    difference: float  # b - a
    low: float
    high: float
    p: float


@dataclass(frozen=True)
class Comparison:
    """Paired differences b - a with 95% intervals.

    The test samples are the same on both sides. Intervals are about other test samples and, with several seeds, other
    seeds; with one seed per side, the two models are held fixed. Intervals are for one metric at a time.
    """

    names: tuple[str, str]
    samples: int
    seeds: tuple[int, int]
    differences: tuple[Difference, ...]

    def __getitem__(self, name: str) -> Difference:
        return next(found for found in self.differences if found.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)

    def rows(self) -> list[tuple[str, ...]]:
        """(metric, a, b, difference, interval, adjusted p) as tables show them; * marks p below 0.05."""
        table: list[tuple[str, ...]] = []
        for d in self.differences:
            show = METRICS[d.name.partition(".")[0]].format
            marked = f"{d.p:.3f}{'*' if d.p < SIGNIFICANCE else ''}"
            table.append(
                (d.label, show(d.a), show(d.b), show(d.difference), f"{show(d.low)} to {show(d.high)}", marked)
            )
        return table

    def __rich__(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        held = "models held fixed" if max(self.seeds) == 1 else f"{self.seeds[0]} and {self.seeds[1]} seeds"
        table = Table(
            title=f"{self.samples:,} paired samples, {held}",
            caption=f"p adjusted for {len(self.differences)} comparisons (Holm); * below {SIGNIFICANCE}",
            title_justify="left",
        )
        for column in ("metric", *self.names, "difference", f"{LEVEL:.0%} interval", "p"):
            table.add_column(Text(column))
        for row in self.rows():
            table.add_row(*map(Text, row))
        return table


def compare_outcomes(
    a: Sequence[Outcomes],
    b: Sequence[Outcomes],
    names: tuple[str, str] = ("A", "B"),
    *,
    bootstrap: int = 300,
    seed: int = 0,
) -> Comparison:
    """Compare outcomes of the same samples in the same order, one per seed on each side."""
    same = all(np.array_equal(a[0].targets, other.targets) for other in (*a, *b))
    expect(same, "the runs have different samples: expected the same ones in the same order, or ids")
    found: dict[str, tuple[Entry, float, float, float, float, float]] = {}
    others: list[Metric] = []
    for metric in METRICS.values():
        left, right = ([metric.estimates(o) for o in side] for side in (a, b))
        shared = [key for key in left[0] if all(key in each for each in (*left, *right))]
        if not all(hasattr(each[key], "interval") for key in shared for each in (*left, *right)):
            others += [metric] if metric.resample else []
            continue
        labelled = {e.name: e for e in entries({metric.name: metric.measure(a[0])})}
        for key in shared:
            name = metric.name if key is None else f"{metric.name}.{key}"
            sides = [each[key] for each in left], [each[key] for each in right]
            estimates = _difference(*sides) if isinstance(sides[0][0], Mean) else _apart(*sides)
            if estimates is not None:
                found[name] = (labelled[name], *estimates)
    found |= _resampled(a, b, others, bootstrap, seed)
    order = [entry.name for entry in entries(measure(a[0]))]
    kept = sorted((name for name in found if name in order), key=order.index)
    adjusted = _holm(np.array([found[name][5] for name in kept]))
    rows = [
        Difference(name, found[name][0].full_label, left, right, right - left, low, high, float(p))
        for name, p in zip(kept, adjusted, strict=True)
        for _, left, right, low, high, _ in [found[name]]
    ]
    return Comparison(names, len(a[0]), (len(a), len(b)), tuple(rows))


def _difference(a: Sequence[Mean], b: Sequence[Mean]) -> tuple[float, float, float, float, float] | None:
    """Means of both sides, interval of the difference, p: samples within seeds, by Student's t (Satterthwaite)."""
    values = [np.array([each.value for each in side]) for side in (a, b)]
    left, right = float(values[0].mean()), float(values[1].mean())
    influence: Array = np.mean([e.influence() for e in b], axis=0) - np.mean([e.influence() for e in a], axis=0)
    size = len(influence)
    counted = int(min((~np.isnan(e.values)).sum() for e in (*a, *b)))
    share = a[0].strata is not None or all(np.isin(e.values[~np.isnan(e.values)], (0, 1)).all() for e in (*a, *b))
    if counted < (2 if share else FEWEST) or np.isnan(right - left):
        return None
    scale = min(1.0, max(float(np.nanmax(np.abs(e.values))) for e in (*a, *b))) or 1.0
    # One more sample that differs: no two models are certainly equal on few samples (as Agresti and Min 2005).
    extra = (scale / counted) ** 2
    if a[0].strata is not None:  # the same for every stratum, some of which have a single sample
        _, _, total, _, weights = a[0]._parts
        changed = np.nan_to_num(np.mean([e.values for e in b], axis=0) - np.mean([e.values for e in a], axis=0))
        pooled = (float((changed**2).sum()) + 1) / (counted + 1)
        extra = 2 * pooled * float(np.sum((weights / np.maximum(total, 1)) ** 2))
        influence = influence * np.sqrt(total / np.maximum(total - 1, 1))[a[0].strata]
    parts = [(float((influence**2).sum()) / size**2 + extra, counted - 1)]
    parts += [(float(v.var(ddof=1)) / len(v), len(v) - 1) for v in values if len(v) > 1]
    variance = sum(part for part, _ in parts)
    freedom = variance**2 / sum(part**2 / free for part, free in parts)
    error = variance**0.5
    half = float(stats.t.ppf((1 + LEVEL) / 2, freedom)) * error
    p = 2 * float(stats.t.sf(abs(right - left) / error, freedom))
    return left, right, right - left - half, right - left + half, p


def _apart(a: Sequence[Any], b: Sequence[Any]) -> tuple[float, float, float, float, float] | None:
    """As `_difference`, for calibration errors: from both intervals as if samples were not shared (MOVER)."""
    bounds = [[each.interval() for each in side] for side in (a, b)]
    if any(each is None for side in bounds for each in side):
        return None
    (left, low_a, high_a), (right, low_b, high_b) = (
        np.mean([(each.value, *ends) for each, ends in zip(side, found, strict=True)], axis=0)
        for side, found in zip((a, b), bounds, strict=True)
    )
    value = right - left
    low, high = value - np.hypot(right - low_b, high_a - left), value + np.hypot(high_b - right, left - low_a)
    error = (value - low if value > 0 else high - value) / stats.norm.ppf((1 + LEVEL) / 2)
    p = 2 * stats.norm.sf(abs(value) / error) if error > 0 else 1.0
    return float(left), float(right), float(low), float(high), float(p)


def _resampled(
    a: Sequence[Outcomes], b: Sequence[Outcomes], chosen: Sequence[Metric], times: int, seed: int
) -> dict[str, tuple[Entry, float, float, float, float, float]]:
    """Percentile intervals of metrics that are not means: samples within classes, and seeds, are resampled."""

    def side(runs: Sequence[Outcomes]) -> dict[str, tuple[Entry, float]]:
        each = [list(entries({m.name: m.measure(o) for m in chosen})) for o in runs]
        return {e.name: (e, float(np.mean([row[i].value for row in each]))) for i, e in enumerate(each[0])}

    rng, drawn = np.random.default_rng(seed), []
    for _ in range(times if chosen else 0):
        rows = resampled(a[0].targets, rng)
        left, right = (side([runs[i].take(rows) for i in rng.integers(0, len(runs), len(runs))]) for runs in (a, b))
        drawn.append({name: right[name][1] - left[name][1] for name in left if name in right})
    found = {}
    first, second = side(a), side(b)
    for name, (entry, value) in first.items():
        values = np.array([d.get(name, np.nan) for d in drawn])
        values = values[~np.isnan(values)]
        if len(values) and name in second and not np.isnan(value):
            low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
            p = min(1.0, 2 * (1 + min((values <= 0).sum(), (values >= 0).sum())) / (1 + len(values)))
            found[name] = (entry, value, second[name][1], float(low), float(high), float(p))
    return found


def _holm(p: Array) -> Array:
    """p-values adjusted for their number, by Holm's step-down method."""
    order = np.argsort(p)
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(1, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
    return adjusted

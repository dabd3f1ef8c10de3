"""The numbers that the page draws; they are those of `evaluate` and
`rfdlc.evaluation.metrics`.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.decisions.budgets import budget_curve
from rfdlc.decisions.sets import PredictionSets
from rfdlc.decisions.utility import Utility
from rfdlc.evaluation import bins, metrics
from rfdlc.evaluation.outcomes import Outcomes
from rfdlc.probabilities import uncertainty
from rfdlc.probabilities.classes import Indices
from rfdlc.reporting.runs import ReportRun
from rfdlc.statistics import ranking
from rfdlc.statistics.intervals import mean

PENALTIES = (0.0, -0.1, -0.25, -0.5, -1.0, -2.0, -4.0, -8.0)
HEAD_SHARES = tuple(round(0.05 * i, 2) for i in range(1, 20))
CURVE_POINTS = 200  # as many as a screen shows
HISTOGRAM_BINS = 20
FRONTIER_PRODUCTS = (
    10_000_000_000  # multiplications for all penalties together: a few seconds at most
)
MISTAKES, ON_A_SHEET = 60, 24
SET_FACTORS = tuple(
    float(f"{2.0**step:.4g}") for step in np.arange(4, -9.1, -0.25)
)  # of thresholds
BUDGET_ROWS = 100_000  # samples behind the curve of budgets
# probabilities that are compared with thresholds, for all factors together
SET_CELLS = 200_000_000


def by_class(run: ReportRun) -> dict[str, Any]:
    """Accuracy and number of samples per class; None for a class without samples."""
    o, size = run.outcomes, len(run.classes)
    total, right = (
        np.bincount(o.targets, minlength=size),
        np.bincount(o.targets[o.correct], minlength=size),
    )
    accuracy = [
        float(hits / n) if n else None for hits, n in zip(right, total, strict=True)
    ]
    return {"accuracy": accuracy, "samples": total.tolist()}


def false_head_curve(run: ReportRun) -> list[dict[str, float]]:
    """The false head rate at head shares from 5% to 95%, where there are tail
    samples.
    """
    rates = {
        share: mean(wrong).value
        for share, wrong in metrics.false_heads(run.outcomes, HEAD_SHARES).items()
    }
    return [
        {"share": share, "rate": rate}
        for share, rate in rates.items()
        if not np.isnan(rate)
    ]


def stratified(targets: Indices, size: int, seed: int) -> Indices:
    """`size` positions with the class shares of `targets`, up to rounding; all
    positions if there are fewer.

    Systematic sampling: samples are shuffled, sorted by class, and taken at equal
    distances.
    """
    if len(targets) <= size:
        return np.arange(len(targets))
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(len(targets))
    by_class = shuffled[np.argsort(targets[shuffled], kind="stable")]
    return np.sort(
        by_class[
            ((np.arange(size) + rng.random()) * (len(targets) / size)).astype(np.int64)
        ]
    )


def frontier_samples(run: ReportRun) -> int:
    """The number of samples that the frontier uses, so that it takes reasonable
    time.
    """
    return min(
        len(run.outcomes),
        max(500, FRONTIER_PRODUCTS // (len(PENALTIES) * len(run.classes) ** 2)),
    )


def frontier(run: ReportRun, seed: int = 0) -> list[dict[str, float]]:
    """Accuracy and mean false head rate of the same probabilities as the tail-sensitive
    penalty grows.

    Empty without training counts, and if there is no tail sample.
    """
    if run.classes.counts is None:
        return []
    rows = stratified(run.outcomes.targets, frontier_samples(run), seed)
    p, targets = run.outcomes.probabilities[rows], run.outcomes.targets[rows]
    points = []
    for penalty in PENALTIES:
        utility = Utility.tail_sensitive(run.classes, penalty)
        decider = run.decider.replace(
            utility=utility, rule="expected-utility", budget=None
        )
        outcomes = Outcomes.of(utility, targets, decider.decide_probabilities(p))
        measured = {
            name: metrics.METRICS[name].measure(outcomes)
            for name in ("accuracy", "false_head_rate")
        }
        points.append({"penalty": penalty, **measured})
    return [point for point in points if not np.isnan(point["false_head_rate"])]


def reliability(run: ReportRun) -> dict[str, list[dict[str, float]]]:
    """Per bin of confidence, for all samples and each predicted region: mean
    confidence, accuracy of arg max, samples.

    The bins are those of the expected calibration error, which is the weighted mean
    distance from the diagonal.
    """
    o = run.outcomes
    lines: dict[str, list[dict[str, float]]] = {}
    masks: dict[str, Any] = {
        "all": slice(None),
        **dict(metrics.regions(o, "thirds", o.likeliest)),
    }
    for name, mask in masks.items():
        place = bins.bin_of(o.confidence[mask])
        count, total, hits = (
            np.bincount(place, weights=w)
            for w in (None, o.confidence[mask], o.right[mask])
        )
        lines[name] = [
            {
                "confidence": total[i] / count[i],
                "accuracy": hits[i] / count[i],
                "samples": int(count[i]),
            }
            for i in np.flatnonzero(count)
        ]
    return lines


def risk_coverage_points(run: ReportRun) -> list[dict[str, float]]:
    """Error rate among the most confident samples against their share, without samples
    that were abstained on.
    """
    o, kept = run.outcomes, run.outcomes.decided >= 0
    points = np.stack(ranking.risk_coverage(o.correct[kept], o.certainty[kept]), axis=1)
    shown = np.unique(
        np.linspace(0, len(points) - 1, CURVE_POINTS if len(points) else 0)
        .round()
        .astype(int)
    )
    return [
        {"coverage": float(coverage), "risk": float(risk)}
        for coverage, risk in points[shown]
    ]


def set_curve(run: ReportRun, seed: int = 0) -> dict[str, Any] | None:
    """Coverage and size of sets as their thresholds change by one factor, from small
    sets to large ones.

    `now` is the point of the fitted thresholds. None without sets of a promised
    coverage.
    """
    sets, o = run.decider.sets, run.outcomes
    if not isinstance(sets, PredictionSets):
        return None
    rows = stratified(
        o.targets, max(500, SET_CELLS // (len(SET_FACTORS) * len(run.classes))), seed
    )
    p, y, points = o.probabilities[rows], o.targets[rows], []
    for factor in SET_FACTORS:
        moved = replace(
            sets, thresholds=tuple(factor * each for each in sets.thresholds), ties=None
        )
        members = moved.members(p, run.decider.utility)
        covered, size = members[np.arange(len(y)), y], members.sum(axis=1)
        shares = np.array([covered[y == c].mean() for c in np.unique(y)])
        point = {
            "marginal": covered.mean(),
            "macro": shares.mean(),
            "worst": shares.min(),
            "size": size.mean(),
        }
        points.append({name: float(value) for name, value in point.items()})
    return {
        "points": points,
        "now": SET_FACTORS.index(1.0),
        "words": str(sets),
        "samples": len(rows),
    }


def budget_points(run: ReportRun, seed: int = 0) -> list[dict[str, float]] | None:
    """Mean utility if at most 0, 1, ... 100% are handed over, by worth; None if no
    action hands over.
    """
    o, handing = run.outcomes, run.decider.utility.decided_class < 0
    if not handing.any() or handing.all():
        return None
    rows = stratified(o.targets, BUDGET_ROWS, seed)
    shares = np.arange(101) / 100
    values = budget_curve(
        run.decider.utility, o.probabilities[rows], o.targets[rows], shares
    ).mean(axis=1)
    return [
        {"share": share, "utility": value}
        for share, value in zip(shares.tolist(), values.tolist(), strict=True)
    ]


def uncertainties(run: ReportRun) -> dict[str, dict[str, Any]]:
    """Histograms of each kind of uncertainty for correct and for wrong decisions, and
    its AUC of detecting errors.
    """
    o = run.outcomes
    kinds: dict[str, NDArray[Any]] = {
        "1 − probability of the decision": 1 - o.certainty
    }
    kinds["entropy (1 = uniform)"] = o.entropy / np.log(max(2, len(o.classes)))
    if len(run.scores.values) > 1:
        chunks = [
            uncertainty.particle_probabilities(chunk, run.scores.logits)
            for _, chunk in run.scores.chunks()
        ]
        kinds["disagreement of the particles"] = np.concatenate(
            [*map(uncertainty.mutual_information, chunks)]
        )
    kept = o.decided >= 0
    return (
        {
            name: _histogram(values[kept], o.correct[kept])
            for name, values in kinds.items()
        }
        if kept.any()
        else {}
    )


def _histogram(values: NDArray[Any], right: NDArray[np.bool_]) -> dict[str, Any]:
    """Shares of the correct and of the wrong decisions in each bin."""
    edges = np.linspace(0, max(float(values.max()), 1e-6), HISTOGRAM_BINS + 1)
    counts = {
        name: (np.histogram(values[own], edges)[0], own)
        for name, own in (("right", right), ("wrong", ~right))
    }
    shares = {
        name: (found / max(1, int(own.sum()))).tolist()
        for name, (found, own) in counts.items()
    }
    auc = ranking.roc_area(right, -values).value
    return {"edges": edges.tolist(), **shares, "auc": None if np.isnan(auc) else auc}


def promised(run: ReportRun) -> list[dict[str, Any]]:
    """Per chosen action: mean expected and realised utility, and the number of
    samples.
    """
    o = run.outcomes
    chosen = {o.utility.actions[a]: o.actions == a for a in np.unique(o.actions)}
    return [
        {"action": action, "samples": int(rows.sum())}
        | {
            "promised": float(o.expected[rows].mean()),
            "realised": float(o.realised[rows].mean()),
        }
        for action, rows in chosen.items()
    ]


def costliest(run: ReportRun) -> Indices:
    """Samples with the largest regret; among equals, those with the highest confidence
    come first.
    """
    order = np.lexsort((-run.outcomes.confidence, -run.outcomes.regret))[:MISTAKES]
    return np.asarray(order[run.outcomes.regret[order] > 0])


def sheets(run: ReportRun) -> dict[str, Indices]:
    """Samples to look at: those whose true class has the lowest probability, and those
    of the highest entropy.
    """
    true = run.outcomes.probabilities[
        np.arange(len(run.outcomes)), run.outcomes.targets
    ]
    keys = {"hardest": true, "uncertain": -run.outcomes.entropy}
    return {
        name: np.argsort(key, kind="stable")[:ON_A_SHEET] for name, key in keys.items()
    }


def mistakes(run: ReportRun, rows: Indices) -> list[dict[str, Any]]:
    """What a person needs to judge each of these samples."""
    o, p, costs = run.outcomes, run.outcomes.probabilities, run.outcomes.regret
    return [
        {
            "id": name,
            "row": int(row),
            "true": int(o.targets[row]),
            "action": int(o.actions[row]),
            "cost": float(costs[row]),
            "true_probability": float(p[row, o.targets[row]]),
            "decided_probability": (
                float(p[row, o.decided[row]]) if o.decided[row] >= 0 else None
            ),
        }
        for row, name in zip(rows, run.ids_of(rows), strict=True)
    ]

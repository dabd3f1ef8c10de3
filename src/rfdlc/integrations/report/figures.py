"""The figures of one run that the page and the plots draw; every number comes from `evaluate` or `metrics`."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.decide import metrics, uncertainty
from rfdlc.decide.classes import Indices
from rfdlc.decide.utility import Utility
from rfdlc.integrations.report.source import Run

PENALTIES = (0.0, -0.1, -0.25, -0.5, -1.0, -2.0, -4.0, -8.0)
HEAD_SHARES = tuple(round(0.05 * i, 2) for i in range(1, 20))
CURVE_POINTS = 200  # as many as a screen shows
HISTOGRAM_BINS = 20
FRONTIER_PRODUCTS = 10_000_000_000  # multiplications for all penalties together: some seconds at most
MISTAKES = 60


def regions(run: Run) -> dict[str, NDArray[np.bool_]]:
    """Which samples truly belong to head, med and tail; nothing without training counts."""
    if run.classes.counts is None:
        return {}
    return {name: np.isin(run.targets, members) for name, members in run.classes.thirds.items() if len(members)}


def by_class(run: Run) -> dict[str, Any]:
    """Accuracy and number of samples of each class; None where there is no sample."""
    each = metrics.recalls(run.targets, run.decided, len(run.classes))
    return {
        "accuracy": [None if np.isnan(value) else float(value) for value in each],
        "samples": np.bincount(run.targets, minlength=len(run.classes)).tolist(),
    }


def false_head_curve(run: Run) -> list[dict[str, float]]:
    """The false head rate at head shares from 5 % to 95 %, where there are both a head and tail samples."""
    if run.classes.counts is None:
        return []
    rates = metrics.false_head_rates(run.targets, run.decided, run.classes, HEAD_SHARES)
    return [{"share": share, "rate": rate} for share, rate in rates.items() if not np.isnan(rate)]


def frontier(run: Run, rows: Indices | None = None) -> list[dict[str, float]]:
    """Accuracy and mean false head rate of the same probabilities as the tail-sensitive penalty grows.

    `rows` are the samples to use, for large problems (see `frontier_rows`). Empty without training counts, and where
    no sample is of the tail.
    """
    if run.classes.counts is None:
        return []
    rows = np.arange(len(run.targets)) if rows is None else rows
    p, targets = run.probabilities[rows], run.targets[rows]
    points = []
    for penalty in PENALTIES:
        utility = Utility.tail_sensitive(run.classes, penalty)
        decided = run.decider.replace(utility=utility, rule="expected-utility").decide_probabilities(p)
        rates = metrics.false_head_rates(targets, decided, run.classes)
        points.append(
            {
                "penalty": penalty,
                "accuracy": metrics.accuracy(targets, decided),
                "false_head_rate": metrics.mean_false_head_rate(rates),
            }
        )
    return [point for point in points if not np.isnan(point["false_head_rate"])]


def frontier_rows(run: Run) -> int:
    """How many samples the frontier can take in reasonable time."""
    return max(500, FRONTIER_PRODUCTS // (len(PENALTIES) * len(run.classes) ** 2))


def reliability(run: Run) -> dict[str, list[dict[str, float]]]:
    """For all samples and each region, by bins of the largest probability: its mean, the accuracy of arg max, samples.

    The bins are those of the expected calibration error, which is the weighted mean distance from the diagonal.
    """
    confidence = run.probabilities.max(axis=1).astype(np.float64)
    right = run.probabilities.argmax(axis=1) == run.targets
    masks = {"all": np.ones(len(right), dtype=bool), **regions(run)}
    return {name: _bins(confidence[mask], right[mask]) for name, mask in masks.items()}


def _bins(confidence: NDArray[np.float64], right: NDArray[np.bool_]) -> list[dict[str, float]]:
    place = metrics.bin_of(confidence)
    count = np.bincount(place, minlength=metrics.ECE_BINS)
    total = np.bincount(place, weights=confidence, minlength=metrics.ECE_BINS)
    hits = np.bincount(place, weights=right, minlength=metrics.ECE_BINS)
    return [
        {"confidence": total[i] / count[i], "accuracy": hits[i] / count[i], "samples": int(count[i])}
        for i in np.flatnonzero(count)
    ]


def risk_coverage(run: Run) -> list[dict[str, float]]:
    """Error rate among the most confident samples against their share, of the samples that were not handed over."""
    kept = run.decided >= 0
    if not kept.any():
        return []
    confidence = run.probabilities[kept].max(axis=1)
    coverage, risk = metrics.risk_coverage((run.decided == run.targets)[kept], confidence)
    shown = np.unique(np.linspace(0, len(risk) - 1, CURVE_POINTS).round().astype(int))
    return [{"coverage": float(coverage[i]), "risk": float(risk[i])} for i in shown]


def uncertainties(run: Run) -> dict[str, dict[str, Any]]:
    """Histograms of each kind of uncertainty for right and for wrong decisions, and how well it tells them apart."""
    kept = run.decided >= 0
    right = (run.decided == run.targets)[kept]
    kinds = {
        "1 − largest probability": uncertainty.max_probability(run.probabilities),
        "entropy (1 = complete ignorance)": uncertainty.entropy(run.probabilities, normalised=True),
    }
    if len(run.scores.values) > 1:
        kinds["disagreement of the particles"] = _disagreement(run)
    return {name: _histogram(values[kept], right) for name, values in kinds.items()} if kept.any() else {}


def _disagreement(run: Run) -> NDArray[Any]:
    """Mutual information (N,), piece by piece so that memory stays small."""
    pieces = [
        uncertainty.mutual_information(uncertainty.particle_probabilities(piece, run.scores.logits))
        for _, piece in run.scores.chunks()
    ]
    return np.concatenate(pieces)


def _histogram(values: NDArray[Any], right: NDArray[np.bool_]) -> dict[str, Any]:
    """Shares of the right and of the wrong decisions in each bin."""
    most = max(float(values.max()), 1e-6)
    edges = np.linspace(0, most, HISTOGRAM_BINS + 1)
    shares = {
        name: (np.histogram(values[mask], edges)[0] / max(1, int(mask.sum()))).tolist()
        for name, mask in (("right", right), ("wrong", ~right))
    }
    auc = metrics.error_auc(right, -values)
    return {"edges": edges.tolist(), **shares, "auc": None if np.isnan(auc) else auc}


def regret(utility: Utility) -> NDArray[np.float64]:
    """The cost of each cell (C, A): how much more the best action would have been worth."""
    return np.asarray(utility.matrix.max(axis=1, keepdims=True) - utility.matrix)


def costliest(run: Run, most: int = MISTAKES) -> Indices:
    """Samples whose action cost most, the surest of equally costly ones first."""
    cost = regret(run.decider.utility)[run.targets, run.actions]
    order = np.lexsort((-run.probabilities.max(axis=1), -cost))[:most]
    return np.asarray(order[cost[order] > 0])


def mistakes(run: Run, rows: Indices) -> list[dict[str, Any]]:
    """What a person needs to judge each of these samples."""
    p, utility = run.probabilities[rows], run.decider.utility
    cost = regret(utility)[run.targets[rows], run.actions[rows]]
    decided = run.decided[rows]
    believed = np.where(decided >= 0, p[np.arange(len(rows)), np.maximum(decided, 0)], np.nan)
    return [
        {
            "id": name,
            "row": int(row),
            "true": int(run.targets[row]),
            "action": int(run.actions[row]),
            "cost": float(cost[i]),
            "true_probability": float(p[i, run.targets[row]]),
            "decided_probability": None if np.isnan(believed[i]) else float(believed[i]),
        }
        for i, (row, name) in enumerate(zip(rows, run.ids_of(rows), strict=True))
    ]

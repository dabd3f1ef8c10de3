"""Coverage of every 95% interval on simulated long-tailed data with a known truth: 92% to 98% is wanted.

Ten classes, Gaussian mixtures, prior 100:1, tail-sensitive utility with abstention. The probabilities are the exact
posterior, or over-confident (logits times 2.5). The truth of a metric is its value on many samples of the same class
counts, which the intervals hold fixed. A line of `compare` is the paired difference between the two.

    python benchmarks/coverage.py --repeats 400
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy.special import softmax

from recording import write
from rfdlc import Classes, Utility
from rfdlc.decide.comparison import compare_outcomes
from rfdlc.decide.evaluation import _intervals, entries
from rfdlc.decide.metrics import measure
from rfdlc.decide.outcomes import Outcomes

CLASSES = 10
PRIOR = 100.0 ** (-np.arange(CLASSES) / (CLASSES - 1))
PRIOR /= PRIOR.sum()
KNOWN = Classes.from_counts((10_000 * PRIOR).astype(int))
UTILITY = Utility.tail_sensitive(KNOWN, -1).with_abstain(0.2)
COLUMNS = ("model", "samples", "metric", "intervals", "coverage", "mean_width", "contains_estimate")
SKIPPED = ("utility_gap_by_action", "accuracy_by_shots")  # too few samples to speak of, and the same as by region


def outcomes(centres: Any, y: Any, sharpness: tuple[float, ...], rng: np.random.Generator) -> list[Outcomes]:
    x = centres[y] + rng.normal(size=(len(y), centres.shape[1]))
    return [
        Outcomes.of(UTILITY, y, (p @ UTILITY.matrix).argmax(axis=1), p)
        for z in [x @ centres.T - (centres**2).sum(axis=1) / 2 + np.log(PRIOR)]
        for p in [softmax(factor * z, axis=1) for factor in sharpness]
    ]


def simulate(samples: int, repeats: int, resamples: int, worlds: int = 4) -> Iterator[dict[str, Any]]:
    """Rows (model, samples, metric, coverage, mean width, share that contains the estimate)."""
    covered = defaultdict(list)
    for world in range(worlds):
        centres = 1.1 * np.random.default_rng(world).normal(size=(CLASSES, 8))
        rng = np.random.default_rng(100 + world)
        counts = np.maximum(1, np.round(PRIOR * samples)).astype(int)
        y = np.repeat(np.arange(CLASSES), counts)
        many = np.repeat(np.arange(CLASSES), counts * (100_000 // counts.sum()))
        exact, sure = ({e.name: e.value for e in entries(measure(o))} for o in outcomes(centres, many, (1, 2.5), rng))
        exact |= {name: 0.0 for name in exact if name.startswith(("ece", "utility_gap"))}
        truths = {"exact": exact, "over-confident": sure, "compare": {name: sure[name] - exact[name] for name in exact}}
        for _ in range(repeats // worlds):
            pair = outcomes(centres, y, (1, 2.5), rng)
            for name, o in zip(truths, pair, strict=False):
                values = {e.name: e.value for e in entries(measure(o))}
                for metric, (low, high) in _intervals(o, resamples, 0).items():
                    covered[name, metric].append((low, high, values[metric], truths[name][metric]))
            for d in compare_outcomes([pair[0]], [pair[1]], bootstrap=resamples).differences:
                covered["compare", d.name].append((d.low, d.high, d.difference, truths["compare"][d.name]))
    for (name, metric), rows in covered.items():
        low, high, value, truth = np.array(rows).T
        if not metric.startswith(SKIPPED) and len(rows) >= repeats / 2:
            near = 1e-9
            yield {
                "model": name,
                "samples": samples,
                "metric": metric,
                "intervals": len(rows),
                "coverage": round(float(np.mean((low - near <= truth) & (truth <= high + near))), 3),
                "mean_width": round(float(np.mean(high - low)), 4),
                "contains_estimate": round(float(np.mean((low - near <= value) & (value <= high + near))), 3),
            }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--resamples", type=int, default=200)
    options = parser.parse_args()
    rows = (row for samples in (100, 1000) for row in simulate(samples, options.repeats, options.resamples))
    write("coverage", rows, ("numpy", "scipy"), columns=COLUMNS)

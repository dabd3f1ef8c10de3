"""Coverage of every 95% interval on simulated long-tailed data with a known truth: 92%
to 98% is wanted.

Ten classes, Gaussian mixtures, prior 100:1, tail-sensitive utility with abstention;
samples are drawn independently. The probabilities are the exact posterior, or
over-confident (logits times 2.5). The truth of a metric is its value on many samples;
of a mean over classes, the mean over the classes that a draw contains. A line of
`compare` is the paired difference between the two models.

    python benchmarks/coverage.py [--workers 2]
    python benchmarks/coverage.py --groups
    python benchmarks/coverage.py --seeds

The second draws groups of 1 to 19 samples. A group g is right with probability t_g, of
a beta distribution with mean 0.8, so that the correlation within groups is 1/3. A row
is about the accuracy on all samples, or on those of a class that is in some of 100
groups.

The third compares the accuracies of two methods with several seeds each on 1,000
samples that both share. A sample has a difficulty for both and one for each. A seed
makes a method better or worse, by `spread` (the standard deviation of its accuracy) and
for both methods alike as `correlation` says. Rows have coverage and width of the
interval of `compare`, in which seeds are not paired, and of one from the differences of
seeds. `seed-correlation.csv` has the correlation over seeds of metrics of two methods
that are trained with the same ones, averaged over all pairs of methods in the study
(`paper/results`).
"""

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from scipy.special import expit, softmax
from scipy.stats import binom
from scipy.stats import t as student_t

from recording import RESULTS, in_parallel, write
from rfdlc import Classes, Utility
from rfdlc.evaluation.comparison import paired_difference
from rfdlc.evaluation.metrics import METRICS, regions
from rfdlc.evaluation.outcomes import Outcomes
from rfdlc.statistics.intervals import LEVEL, Estimate, by_group, mean

CLASSES, WORLDS, MANY = 10, 20, 200_000
PRIOR = 100.0 ** (-np.arange(CLASSES) / (CLASSES - 1))
PRIOR /= PRIOR.sum()
KNOWN = Classes.from_counts((10_000 * PRIOR).astype(int))
UTILITY = Utility.tail_sensitive(KNOWN, -1).with_abstain(0.2)
Row = tuple[float, float, float, float, float]
COLUMNS = (
    "model",
    "samples",
    "metric",
    "intervals",
    "coverage",
    "unavoidable",
    "verdict",
    "mean_width",
    "contains_estimate",
)
SEEDED = (
    "seeds",
    "spread",
    "correlation",
    "intervals",
    "not_paired",
    "by_seed",
    "width_not_paired",
    "width_by_seed",
)
CORRELATED = ("data", "decision", "metric", "methods", "seeds", "mean_correlation")
STUDIED = ("acc", "tail", "fhr", "nll", "ece")  # metrics of the study
LOWEST, HIGHEST = 0.92, 0.98
SHARE = 0.8  # right of the samples in groups
FEW_DIFFER = (  # means over samples on which two models rarely differ
    "accuracy",
    "false_head_rates",
    "abstention_rate",
    "utility_gap_by_region",
)


def draw(centres: Any, samples: int, rng: np.random.Generator) -> list[Outcomes]:
    """Decisions of the exact and of the over-confident model."""
    y = rng.choice(CLASSES, samples, p=PRIOR)
    x = centres[y] + rng.normal(size=(samples, centres.shape[1]))
    z = x @ centres.T - (centres**2).sum(axis=1) / 2 + np.log(PRIOR)
    models = [softmax(factor * z, axis=1) for factor in (1, 2.5)]
    return [
        Outcomes.of(UTILITY, y, (p @ UTILITY.matrix).argmax(axis=1), p) for p in models
    ]


def estimates(outcomes: Outcomes) -> dict[str, Any]:
    """Those of every metric that has intervals."""
    found = {
        name: each
        for metric in METRICS.values()
        for name, each in metric.estimates(outcomes).items()
    }
    return {
        name: each
        for name, each in found.items()
        if METRICS[name.partition(".")[0]].resample
    }


def truth(many: Estimate, here: Estimate) -> float:
    """A mean over groups is about the groups that are there."""
    if many.parts is None or here.parts is None:
        return many.value
    seen = np.flatnonzero(here.parts[0])
    return float(np.mean(many.parts[1][seen])) if len(seen) else np.nan


def changes(name: str, exact: Outcomes, sure: Outcomes) -> tuple[int, int]:
    """On how many samples behind a metric the second model is higher, and lower."""
    kind, _, part = name.partition(".")
    if kind == "utility_gap_by_region":
        row = dict(regions(exact, "thirds", exact.likeliest))[part]
        difference = np.where(row, exact.realised - sure.realised, 0)
    else:
        found = (METRICS[kind].function(o) for o in (exact, sure))
        first, second = (
            np.nan_to_num(each[parse(part)] if part else each).astype(float)
            for each in found
        )
        difference = second - first
    return int((difference > 0).sum()), int((difference < 0).sum())


def parse(part: str) -> Any:
    return float(part) if part.startswith("0.") else part


@cache
def coverage_given(differ: int, higher: float) -> float:
    """The coverage of a test that holds for every share of samples on which two models
    differ.

    Such a test holds for each number of these samples (Neyman structure): how many of
    them are higher is binomial, and a number is refused if its mid-p value is below
    2.5% on its side.
    """
    hits = np.arange(differ + 1)
    chance = binom.pmf(hits, differ, higher)
    below = np.cumsum(chance) - chance / 2
    return float(chance[(below > (1 - LEVEL) / 2) & (below < (1 + LEVEL) / 2)].sum())


def simulate(
    samples: int, repeats: int, seed: int, world: int
) -> dict[tuple[str, str], list[Row]]:
    """Of one world: bounds, estimate and truth of every interval, by model and metric,
    and what is unavoidable.
    """
    covered = defaultdict(list)
    rng = np.random.default_rng((seed, world))
    centres = 1.1 * rng.normal(size=(CLASSES, 8))
    population = draw(centres, MANY, rng)
    exact, sure = map(estimates, population)
    higher = {}
    for name in (
        name for name in exact if name in sure and name.startswith(FEW_DIFFER)
    ):
        more, less = changes(name, *population)
        higher[name] = more / max(1, more + less)
    for _ in range(repeats // WORLDS):
        drawn = draw(centres, samples, rng)
        here = [estimates(o) for o in drawn]
        truths = [
            {name: truth(many[name], e) for name, e in found.items() if name in many}
            for many, found in zip((exact, sure), here, strict=True)
        ]
        truths[0] |= {
            name: 0.0 for name in truths[0] if name.startswith(("ece", "utility_gap"))
        }
        for model, found, true in zip(
            ("exact", "over-confident"), here, truths, strict=True
        ):
            for name, estimate in found.items():
                if (bounds := estimate.interval()) is not None and name in true:
                    covered[model, name].append(
                        (*bounds, estimate.value, true[name], np.nan)
                    )
        for name in (name for name in truths[0] if name in truths[1]):
            difference = paired_difference([here[0][name]], [here[1][name]])
            if difference is not None:
                _, _, value, low, high, _ = difference
                least = (
                    coverage_given(sum(changes(name, *drawn)), higher[name])
                    if name in higher
                    else np.nan
                )
                covered["compare", name].append(
                    (low, high, value, truths[1][name] - truths[0][name], least)
                )
    return dict(covered)


def verdict(coverage: float, intervals: int, unavoidable: float) -> str:
    """Whether the coverage is wanted, but for two standard errors of the simulation."""
    low, high = (
        2 * (bound * (1 - bound) / intervals) ** 0.5 for bound in (LOWEST, HIGHEST)
    )
    if LOWEST <= coverage <= HIGHEST:
        return "inside"
    if LOWEST - low <= coverage <= HIGHEST + high:
        return "within two standard errors"
    return (
        "too few samples differ"
        if coverage > HIGHEST and unavoidable > HIGHEST - high
        else "outside"
    )


def rows(
    samples: int, repeats: int, seed: int, workers: int
) -> Iterator[dict[str, Any]]:
    covered: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for found in in_parallel(
        simulate, ((samples, repeats, seed, world) for world in range(WORLDS)), workers
    ):
        for key, each in found.items():
            covered[key] += each
    for (model, name), each in covered.items():
        low, high, value, true, least = np.array(each).T
        if len(each) >= repeats / 4:
            near = 1e-9
            coverage, unavoidable = (
                float(np.mean((low - near <= true) & (true <= high + near))),
                float(np.mean(least)),
            )
            yield {
                "model": model,
                "samples": samples,
                "metric": name,
                "intervals": len(each),
                "coverage": round(coverage, 3),
                "unavoidable": "" if np.isnan(unavoidable) else round(unavoidable, 3),
                "verdict": verdict(coverage, len(each), unavoidable),
                "mean_width": round(float(np.mean(high - low)), 4),
                "contains_estimate": round(
                    float(np.mean((low - near <= value) & (value <= high + near))), 3
                ),
            }


def grouped_rows(repeats: int, seed: int) -> Iterator[dict[str, Any]]:
    """Coverage of the accuracy of samples in groups, by intervals that know the groups
    and by those that do not.
    """
    for total, counted in ((10, 10), (25, 25), (100, 100), (100, 2), (100, 5)):
        rng, covered = np.random.default_rng((seed, total, counted)), []
        for _ in range(repeats):
            groups = np.repeat(np.arange(total), rng.integers(1, 20, total))
            right = (
                rng.random(len(groups))
                < rng.beta(2 * SHARE, 2 * (1 - SHARE), total)[groups]
            )
            estimate = mean(np.where(groups < counted, right, np.nan))
            bounds = [
                each.interval() for each in (estimate, by_group(estimate, groups))
            ]
            found = [
                bound[0] <= SHARE <= bound[1] for bound in bounds if bound is not None
            ]
            covered += [found] if len(found) == 2 else []
        each = dict(
            zip(
                ("ignoring_groups", "by_group"),
                np.mean(covered, axis=0).round(3).tolist(),
                strict=True,
            )
        )
        yield {
            "groups": total,
            "groups_that_count": counted,
            "intervals": len(covered),
            **each,
        }


def seeded_rows(repeats: int, seed: int) -> Iterator[dict[str, Any]]:
    """Two equally good methods, each with several seeds on the same samples."""
    for seeds, spread, correlation in product(
        (2, 3, 5, 10), (0.005, 0.02), (0.0, 0.3, 0.8)
    ):
        rng = np.random.default_rng(
            [seed, seeds, int(1e4 * spread), int(10 * correlation)]
        )
        ends = np.array(
            [_of_seeds(*_hits(seeds, spread, correlation, rng)) for _ in range(repeats)]
        )
        covered, width = (
            ((ends[..., 0] <= 0) & (ends[..., 1] >= 0)).mean(axis=0),
            np.ptp(ends, axis=2).mean(axis=0),
        )
        yield {
            "seeds": seeds,
            "spread": spread,
            "correlation": correlation,
            "intervals": repeats,
            **{
                name: round(float(value), 4)
                for name, value in zip(SEEDED[4:], (*covered, *width), strict=True)
            },
        }


def correlations() -> Iterator[dict[str, Any]]:
    """Of two methods over seeds, on the test split of the study."""
    values = defaultdict[tuple[str, str, str], dict[str, dict[str, float]]](
        lambda: defaultdict(dict)
    )
    for file in sorted(
        (RESULTS.parents[1] / "paper/results").glob("cifar*/metrics.csv")
    ):
        for row in csv.DictReader(file.open(newline="", encoding="utf-8")):
            if (
                row["split"] == "test"
                and row["decision"] in ("argmax", "calibrated")
                and row["metric"] in STUDIED
            ):
                runs = values[file.parent.name, row["decision"], row["metric"]]
                runs[row["run"]][row["seed"]] = float(row["value"])
    for (data, decision, metric), runs in values.items():
        seeds = [
            [own[seed] for seed in sorted(own)]
            for own in runs.values()
            if len(own) == 5
        ]
        known = [own for own in seeds if len({*own}) > 1]
        if len(known) < 3:
            continue
        above = np.asarray(np.corrcoef(known))[np.triu_indices(len(known), 1)]
        told = {
            "data": data,
            "decision": decision,
            "metric": metric,
            "methods": len(known),
            "seeds": 5,
        }
        yield {**told, "mean_correlation": round(float(above.mean()), 3)}


def _hits(
    seeds: int, spread: float, correlation: float, rng: np.random.Generator
) -> Any:
    """Which samples each run of both methods has right (2, seeds, samples)."""
    difficulty = 1 + 1.5 * rng.normal(size=1000) + 0.7 * rng.normal(size=(2, 1, 1000))
    level = difficulty + 0.7 * rng.normal(size=(2, seeds, 1000))
    slope = (expit(level) * expit(-level)).mean()
    both, own = rng.normal(size=(1, seeds, 1)), rng.normal(size=(2, seeds, 1))
    shift = np.sqrt(correlation) * both + np.sqrt(1 - correlation) * own
    return rng.random(level.shape) < expit(level + shift * spread / slope)


def _of_seeds(a: Any, b: Any) -> list[tuple[float, float]]:
    """The interval of `compare`, and one with the variance of the differences of seeds
    and their degrees of freedom.
    """
    *_, low, high, _ = (
        paired_difference(
            *([mean(hits.astype(float)) for hits in side] for side in (a, b))
        )
        or ()
    )
    gap = b.astype(float) - a
    parts = (
        gap.mean(axis=0).var(ddof=1) / gap.shape[1],
        gap.mean(axis=1).var(ddof=1) / len(gap),
    )
    freedom = sum(parts) ** 2 / max(1e-12, parts[1] ** 2 / (len(gap) - 1))
    half = student_t.ppf((1 + LEVEL) / 2, min(freedom, 1e9)) * np.sqrt(sum(parts))
    return [(low, high), (gap.mean() - half, gap.mean() + half)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--samples", type=int, nargs="*", default=(100, 1000))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--groups", action="store_true")
    parser.add_argument("--seeds", action="store_true")
    options = parser.parse_args()
    if options.groups:
        columns = (
            "groups",
            "groups_that_count",
            "intervals",
            "ignoring_groups",
            "by_group",
        )
        write(
            "coverage-groups",
            grouped_rows(options.repeats, options.seed),
            ("rfdlc", "numpy", "scipy"),
            columns=columns,
        )
        raise SystemExit
    if options.seeds:
        found = seeded_rows(options.repeats, options.seed)
        write("coverage-seeds", found, ("rfdlc", "numpy", "scipy"), columns=SEEDED)
        write("seed-correlation", correlations(), ("numpy",), columns=CORRELATED)
        raise SystemExit
    each = (options.repeats, options.seed, options.workers)
    found = (row for samples in options.samples for row in rows(samples, *each))
    write("coverage", found, ("rfdlc", "numpy", "scipy"), columns=COLUMNS)

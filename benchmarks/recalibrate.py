"""How often `rfdlc recalibrate` writes a decider: with labels of a random sample, and
with labels that depend on the outcome.

    python benchmarks/recalibrate.py [--runs 200] [--workers 1] [--seconds 3600]
        writes benchmarks/results/recalibrate-runs.csv and recalibrate.csv

Every run is appended to the first file as it ends, and the second one is made of it: an
interrupted command is simply given again.

Outcomes are drawn from known posteriors of three classes, and a costly mistake loses 5.
Where nothing has changed, the served decisions are the best ones: the true gain of
every revision is at most 0. Where the class mix has changed, the true gain of what is
written (or of the best option) is measured on other samples.
"""

import argparse
import csv
import time
from typing import Any

import numpy as np

from recording import RESULTS, append, commit, hardware, in_parallel, versions, write
from rfdlc.decisions.decider import Decider
from rfdlc.decisions.utility import Utility
from rfdlc.errors import InputError
from rfdlc.monitoring.designs import Labels, sampled
from rfdlc.monitoring.feedback import Revision, options, review_weights
from rfdlc.monitoring.monitor import Decided
from rfdlc.probabilities.classes import Classes

Array = np.ndarray[Any, Any]
Row = dict[str, Any]
MIX = np.array([0.8, 0.15, 0.05])
CHANGED = np.array([0.55, 0.27, 0.18])
CLASSES = Classes.from_counts([8000, 1500, 500], ["common", "seldom", "rare"])
UTILITY = Utility([[1, 0, 0], [-1, 1, 0], [-5, -2, 1]], CLASSES).with_abstain(0.2)
DECIDER = Decider(UTILITY, calibration=None, train_prior="train")
LARGE, SMALL, OTHERS = 20_000, 5_000, 50_000
LEAST_GAIN = 0.05
# Chances of a label: of mistakes and of other decisions, or by true class.
SELECTIONS: dict[str, tuple[float, ...]] = {
    "nothing changed, 5,000 decisions, half of mistakes and 3% of others labelled": (
        0.5,
        0.03,
    ),
    "nothing changed, 5,000 decisions, 20% of mistakes and 10% of others labelled": (
        0.2,
        0.1,
    ),
    "nothing changed, 5,000 decisions, 60% of a rare class and 5% of others labelled": (
        0.05,
        0.05,
        0.6,
    ),
}
NONE, RANDOM, BY_ACTION, BY_CONFIDENCE = (
    "no design",
    "falsely stated as random",
    "falsely stated as by-action, with the observed shares",
    "falsely stated as by-confidence, with the observed shares",
)
UNCHECKED = "no design, and no check"
GAINS = "another class mix, 20,000 decisions, 10% labelled at random"
NO_GAIN = "nothing changed, 5,000 decisions, 10% labelled at random"
# Labels, what is stated, and how many times fewer runs there are.
SCENARIOS = [
    (GAINS, "random", 1),
    (NO_GAIN, "random", 1),
    *(
        (selection, stated, fewer)
        for selection in SELECTIONS
        for stated, fewer in (
            (NONE, 1),
            (RANDOM, 1),
            (BY_ACTION, 1),
            (BY_CONFIDENCE, 4),
            (UNCHECKED, 4),
        )
    ),
]
PACKAGES = ["rfdlc", "numpy", "scipy"]
RUNS = RESULTS / "recalibrate-runs.csv"
COLUMNS = (
    "labels",
    "stated",
    "seed",
    "refused",
    "written",
    "gain",
    "claimed",
    "hardware",
    "versions",
    "commit",
)


def model(rng: np.random.Generator, samples: int, mix: Array) -> tuple[Array, Array]:
    """Logits whose softmax is the posterior for the class prior MIX, and classes."""
    y = rng.choice(3, samples, p=mix)
    z = 2 * (rng.normal(size=(samples, 3)) + 2 * np.eye(3)[y]) - 2 + np.log(MIX)
    return z, y


def labelled_at(selection: str, y: Array, decisions: Decided) -> Array:
    """The chance of a label of each decision."""
    chances = SELECTIONS[selection]
    if len(chances) == len(MIX):
        return np.array(chances)[y]
    mistaken = (decisions.decided >= 0) & (decisions.decided != y)
    return np.where(mistaken, *chances)


def observed(stated: str, decisions: Decided, rows: Array) -> str | None:
    """What a sender states who believes in a design: its shares are those of the
    labels.
    """
    if stated in (NONE, RANDOM):
        return None if stated == NONE else "random"
    actions, confidence = decisions.actions, decisions.probabilities.max(axis=1)
    if stated == BY_ACTION:
        names = UTILITY.actions
        kind, group = "by-action", actions
    else:
        names = ("0.6", "0.7", "0.8", "0.9", "0.95", "0.99", "1")
        kind = "by-confidence"
        group = np.searchsorted(np.array(names, dtype=float), confidence)
        group = np.minimum(group, len(names) - 1)
    shares = np.bincount(group[rows], minlength=len(names)) / np.maximum(
        np.bincount(group, minlength=len(names)), 1
    )
    parts = [
        f"{name}={share:.6f}"
        for name, share in zip(names, shares, strict=True)
        if share
    ]
    return f"{kind}:{','.join(parts)}"


def best_option(
    decisions: Decided, rows: Array, y: Array, design: str | None
) -> Revision | None:
    """What `rfdlc recalibrate` would choose; None of refused labels."""
    try:
        sample = sampled(
            Labels(rows, y[rows], [None] * len(rows)),
            UTILITY,
            decisions.actions,
            decisions.probabilities.max(axis=1),
            decisions.expected,
            design,
            decisions.probabilities,
        )
        weights = review_weights(sample.group, sample.rows)
        found = options(
            DECIDER, decisions[: sample.decisions], rows, sample.targets, weights
        )
    except InputError:
        return None
    return next((option for option in found if option.pays), found[0])


def random_run(seed: int, samples: int, mix: Array) -> Row:
    """A log with labels of a random 10%."""
    rng = np.random.default_rng(seed)
    z, y = model(rng, samples, mix)
    decisions = Decided.of(DECIDER, z, logits=True)
    rows = np.flatnonzero(rng.random(samples) < 0.1)
    best = best_option(decisions, rows, y, "random")
    if best is None:
        return {"refused": 1, "written": 0}
    z, y = model(rng, OTHERS, mix)
    before, after = (each.decide(z, logits=True) for each in (DECIDER, best.decider))
    gain = float((UTILITY.matrix[y, after] - UTILITY.matrix[y, before]).mean())
    return {
        "refused": 0,
        "written": int(best.pays),
        "gain": round(gain, 5),
        "claimed": round(best.gain, 5),
    }


def selected_run(seed: int, selection: str, stated: str) -> Row:
    """A log where nothing has changed, with labels that depend on the outcome."""
    rng = np.random.default_rng(seed)
    z, y = model(rng, SMALL, MIX)
    decisions = Decided.of(DECIDER, z, logits=True)
    rows = np.flatnonzero(rng.random(SMALL) < labelled_at(selection, y, decisions))
    if stated == UNCHECKED:
        paid = unchecked(decisions, rows, y)
        return {"refused": 0, "written": int(paid)}
    best = best_option(decisions, rows, y, observed(stated, decisions, rows))
    return {
        "refused": int(best is None),
        "written": int(best is not None and best.pays),
    }


def unchecked(decisions: Decided, rows: Array, y: Array) -> bool:
    """Whether labels show a gain that are weighted by the labelled share of similar
    decisions, without a design and a check.
    """
    confidence = decisions.probabilities.max(axis=1)
    edges = np.quantile(confidence, np.arange(1, 5) / 5)
    group = np.searchsorted(edges, confidence) + 5 * (decisions.decided < 0)
    found = options(DECIDER, decisions, rows, y[rows], review_weights(group, rows))
    return any(option.pays for option in found)


def run(labels: str, stated: str, seed: int) -> Row:
    """One simulated log: how often its labels are refused, or a decider is written."""
    if labels == GAINS:
        found = random_run(seed, LARGE, CHANGED)
    elif labels == NO_GAIN:
        found = random_run(seed, SMALL, MIX)
    else:
        found = selected_run(seed, labels, stated)
    return {"labels": labels, "stated": stated, "seed": seed, **found}


def summary(runs: list[Row]) -> list[Row]:
    """Shares over the runs of each scenario."""
    rows: list[Row] = []
    for labels, stated, _ in SCENARIOS:
        own = [r for r in runs if (r["labels"], r["stated"]) == (labels, stated)]
        if not own:
            continue
        what = f"{labels}; stated: {stated}"
        refused: dict[str, Any] = {"value": share(own, "refused")}
        if labels in (GAINS, NO_GAIN):
            refused["required"] = "at most 0.01"
        rows.append({"what": f"{what}: {len(own)} runs: refused", **refused})
        if labels == GAINS:
            rows += gain_rows(what, own)
            continue
        written: dict[str, Any] = {"value": share(own, "written")}
        if stated not in (BY_CONFIDENCE, UNCHECKED):
            written["required"] = "at most 0.025"
        rows.append({"what": f"{what}: {len(own)} runs: written", **written})
    return rows


def gain_rows(what: str, runs: list[Row]) -> list[Row]:
    large = [r for r in runs if r["gain"] and float(r["gain"]) >= LEAST_GAIN]
    if not large:
        return []
    claimed, gain = (
        round(float(np.mean([float(r[key]) for r in large])), 4)
        for key in ("claimed", "gain")
    )
    return [
        {
            "what": (
                f"{what}: {len(large)} runs with a true gain of at least {LEAST_GAIN}:"
                " written"
            ),
            "value": share(large, "written"),
            "required": "at least 0.8",
        },
        {
            "what": f"{what}: their claimed gain (reference: the true one)",
            "value": claimed,
            "reference": gain,
        },
    ]


def share(runs: list[Row], key: str) -> float:
    return round(float(np.mean([int(r[key]) for r in runs])), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600, help="then it ends")
    given = parser.parse_args()
    began, done = time.monotonic(), read_runs()
    there = {(r["labels"], r["stated"], int(r["seed"])) for r in done}
    tasks = [
        (labels, stated, given.first + place)
        for place in range(given.runs)
        for labels, stated, fewer in SCENARIOS
        if place < given.runs // fewer
    ]
    tasks = [task for task in tasks if task not in there]
    stamp = {"hardware": hardware(), "versions": versions(PACKAGES), "commit": commit()}
    size = 8 * given.workers
    for start in range(0, len(tasks), size):
        if time.monotonic() - began > given.seconds:
            break
        found = in_parallel(run, tasks[start : start + size], given.workers)
        append(RUNS, [row | stamp for row in found], COLUMNS)
    write("recalibrate", summary(read_runs()), PACKAGES)


def read_runs() -> list[Row]:
    """Runs that have ended."""
    if not RUNS.exists():
        return []
    with RUNS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    main()

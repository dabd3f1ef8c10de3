"""Estimated class priors beside QuaPy's EM: their error, and how often 95% intervals contain the truth.

    python benchmarks/priors.py [--draws 200 --workers 1]

The Gaussian mixtures of regret.py, with scores that carry the training prior. They are exact, or 2.5 times too large
and calibrated on 1,000 held-out samples: ours by the default (`auto`), QuaPy's by biases and a temperature (BCTS). A
draw has a world, a held-out set, and a test set for every size and shift. The prior of the test samples is drawn either
far from the training prior (Dirichlet, all ones) or near it (Dirichlet, 50 times the training prior). `error` is the
mean total variation between the estimated and the drawn prior; `coverage` is the share of the classes' intervals that
contain the truth.
QuaPy's rows are there if it is installed (pip install quapy).
"""

import argparse
import warnings
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recording import in_parallel, write
from regret import CLASSES, TRAIN, UTILITY, WORLDS, World, scores
from rfdlc import Decider

SHIFTS = {"far": np.ones(CLASSES), "near": 50 * TRAIN.prior}
HELD_OUT = 1000


def deciders(held: NDArray[np.float64], labels: NDArray[np.int64]) -> dict[str, tuple[Decider, Decider]]:
    """By kind of scores: ours, and the one that calibrates for QuaPy."""
    bare: dict[str, Any] = {"train_prior": "train", "target_prior": None}
    plain = Decider(UTILITY, calibration=None, **bare)
    kinds = ("auto", "bias-corrected-temperature")
    ours, theirs = (Decider(UTILITY, calibration=k, **bare).fit(scores(held), labels, logits=True) for k in kinds)
    return {"exact": (plain, plain), "calibrated": (ours, theirs)}


def simulate(draw: int) -> list[tuple[tuple[str, int, str, str], float, float]]:
    """Of one draw, by shift, test samples, kind of scores and estimate: its error, and the share of classes covered."""
    world, measured = World(*WORLDS[draw % len(WORLDS)], draw), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = deciders(*world.sample(TRAIN.prior, HELD_OUT))
        for (shift, concentration), samples in product(SHIFTS.items(), (10, 100, 1000)):
            truth = np.maximum(world.rng.dirichlet(concentration), 1e-6)
            truth /= truth.sum()
            log_likelihood, _ = world.sample(truth, samples)
            for kind, (ours, theirs) in fitted.items():
                z = scores(log_likelihood) if kind == "calibrated" else log_likelihood + np.log(TRAIN.prior)
                found = ours.estimate_prior(z, logits=True)
                low, high = found.interval()
                inside = float(((low <= truth) & (truth <= high)).mean())
                measured.append(((shift, samples, kind, "rfdlc"), np.abs(found.prior - truth).sum() / 2, inside))
                if find_spec("quapy"):
                    from quapy.method.aggregative import EMQ

                    other = EMQ.EM(TRAIN.prior, np.asarray(theirs.probabilities(z, logits=True)))[0]
                    error = np.abs(other - truth).sum() / 2
                    measured.append(((shift, samples, kind, "quapy EMQ"), error, np.nan))
    return measured


def rows(draws: int, workers: int) -> Iterator[dict[str, object]]:
    errors, covered = defaultdict(list), defaultdict(list)
    for each in in_parallel(simulate, ((draw,) for draw in range(draws)), workers):
        for key, error, inside in each:
            errors[key].append(error)
            covered[key].append(inside)
    for key, values in errors.items():
        row = dict(zip(("shift", "samples", "scores", "estimate"), key, strict=True))
        share = "" if np.isnan(covered[key]).any() else f"{np.mean(covered[key]):.3f}"
        yield row | {"draws": len(values), "error": f"{np.mean(values):.4f}", "coverage": share}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=200)
    columns = ("shift", "samples", "scores", "estimate", "draws", "error", "coverage")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    write("priors", rows(options.draws, options.workers), ("rfdlc", "numpy", "scipy", "quapy"), columns=columns)

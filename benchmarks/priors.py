"""Estimated class priors beside QuaPy's EM: their error, and how often 95% intervals
contain the truth.

    python benchmarks/priors.py [--draws 200 --workers 1]

The Gaussian mixtures of regret.py, with scores that carry the training prior. They are
exact, or 2.5 times too large and calibrated on 1,000 held-out samples: ours by a
temperature, to which `auto` gives most of the weight here, QuaPy's by biases and a
temperature (BCTS). The shifted prior of the test samples is drawn either far from the
training prior (Dirichlet, all ones) or near it (Dirichlet, 50 times the training
prior). `error` is the mean total variation between the estimated and the drawn prior;
`coverage` is the share of the classes' intervals that contain the truth. Rows of the
shift "all" are over far and near draws together, which few samples cannot tell apart.
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


def estimates(
    log_likelihood: NDArray[np.float64],
    held_out: tuple[NDArray[np.float64], NDArray[np.int64]],
) -> Iterator[tuple[str, str, NDArray[np.float64], NDArray[np.float64] | None]]:
    """Kind of scores, name, estimate, and ours with its intervals (2, C)."""
    for kind in ("exact", "calibrated"):
        bare: dict[str, Any] = {"train_prior": "train", "target_prior": None}
        ours = theirs = Decider(UTILITY, calibration=None, **bare)
        z = log_likelihood + np.log(TRAIN.prior)
        if kind == "calibrated":
            z, held, labels = scores(log_likelihood), scores(held_out[0]), held_out[1]
            ours = Decider(UTILITY, calibration="temperature", **bare).fit(
                held, labels, logits=True
            )
            theirs = Decider(
                UTILITY, calibration="bias-corrected-temperature", **bare
            ).fit(held, labels, logits=True)
        found = ours.estimate_prior(z, logits=True)
        yield kind, "rfdlc", found.prior, np.array(found.interval())
        if find_spec("quapy"):
            from quapy.method.aggregative import EMQ

            yield (
                kind,
                "quapy EMQ",
                EMQ.EM(TRAIN.prior, np.asarray(theirs.probabilities(z, logits=True)))[
                    0
                ],
                None,
            )


def simulate(
    shift: str, samples: int, draw: int
) -> list[tuple[tuple[str, int, str, str], float, float]]:
    """Of one draw, by kind of scores and estimate: its error, and the share of classes
    that are covered.
    """
    world = World(*WORLDS[draw % len(WORLDS)], draw)
    truth = np.maximum(world.rng.dirichlet(SHIFTS[shift]), 1e-6)
    truth /= truth.sum()
    log_likelihood, held_out = (
        world.sample(truth, samples)[0],
        world.sample(TRAIN.prior, HELD_OUT),
    )
    measured = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind, name, found, interval in estimates(log_likelihood, held_out):
            inside = (
                np.nan
                if interval is None
                else ((interval[0] <= truth) & (truth <= interval[1])).mean()
            )
            measured.append(
                (
                    (shift, samples, kind, name),
                    np.abs(found - truth).sum() / 2,
                    float(inside),
                )
            )
    return measured


def rows(draws: int, workers: int) -> Iterator[dict[str, object]]:
    errors, covered = defaultdict(list), defaultdict(list)
    for each in in_parallel(
        simulate, product(SHIFTS, (10, 100, 1000), range(draws)), workers
    ):
        for (shift, *setting), error, inside in each:
            for key in ((shift, *setting), ("all", *setting)):
                errors[key].append(error)
                covered[key].append(inside)
    for key in sorted(errors, key=lambda key: key[0] == "all"):
        row = dict(zip(("shift", "samples", "scores", "estimate"), key, strict=True))
        share = "" if np.isnan(covered[key]).any() else f"{np.mean(covered[key]):.3f}"
        yield row | {
            "draws": len(errors[key]),
            "error": f"{np.mean(errors[key]):.4f}",
            "coverage": share,
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=200)
    columns = ("shift", "samples", "scores", "estimate", "draws", "error", "coverage")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    write(
        "priors",
        rows(options.draws, options.workers),
        ("rfdlc", "numpy", "scipy", "quapy"),
        columns=columns,
    )

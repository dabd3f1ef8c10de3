"""Estimated class priors: their error by the weight of the training prior, beside QuaPy's EM, and interval coverage.

    python benchmarks/priors.py [--draws 200]

Exact posteriors of the Gaussian mixtures of regret.py, under the training prior. The shifted prior of the test samples
is drawn either far from the training prior (Dirichlet, all ones) or near it (Dirichlet, 50 times the training prior).
`error` is the mean total variation between the estimated and the drawn prior; `coverage` is the share of the classes'
95% intervals that contain the truth. QuaPy's row is there if it is installed (pip install quapy).
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from recording import write
from regret import CLASSES, TRAIN, WORLDS, World
from rfdlc.decide import priors

WEIGHTS = (0.0, 1.0, 3.0, 10.0, 30.0)  # samples that the training prior counts for
SHIFTS = {"far": np.ones(CLASSES), "near": 50 * TRAIN.prior}


def estimates(p: NDArray[np.float64]) -> Iterator[tuple[str, NDArray[np.float64], NDArray[np.float64] | None]]:
    """Name, estimate, and the interval (2, C) of the default."""
    default, draws = priors.PSEUDO_SAMPLES, priors.DRAWS
    for weight in WEIGHTS:
        priors.PSEUDO_SAMPLES, priors.DRAWS = weight, draws if weight == default else 5
        found = priors.estimate_prior(p, TRAIN.prior)
        yield f"weight {weight:g}", found.prior, np.array(found.interval()) if weight == default else None
    priors.PSEUDO_SAMPLES, priors.DRAWS = default, draws
    if find_spec("quapy"):
        from quapy.method.aggregative import EMQ

        yield "quapy EMQ", EMQ.EM(TRAIN.prior, p)[0], None


def rows(draws: int) -> Iterator[dict[str, object]]:
    errors, covered = defaultdict(list), defaultdict(list)
    for (shift, alpha), samples, draw in product(SHIFTS.items(), (10, 100, 1000), range(draws)):
        world = World(*WORLDS[draw % len(WORLDS)], draw)
        truth = np.maximum(world.rng.dirichlet(alpha), 1e-6)
        truth /= truth.sum()
        p = softmax(world.sample(truth, samples)[0] + np.log(TRAIN.prior), axis=1)
        for name, found, interval in estimates(p):
            errors[shift, samples, name].append(np.abs(found - truth).sum() / 2)
            if interval is not None:
                covered[shift, samples, name].append(((interval[0] <= truth) & (truth <= interval[1])).mean())
    for key, values in errors.items():
        row = dict(zip(("shift", "samples", "estimate"), key, strict=True))
        share = f"{np.mean(covered[key]):.3f}" if covered[key] else ""
        yield row | {"draws": len(values), "error": f"{np.mean(values):.4f}", "coverage": share}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=200)
    columns = ("shift", "samples", "estimate", "draws", "error", "coverage")
    write("priors", rows(parser.parse_args().draws), ("numpy", "scipy", "quapy"), columns=columns)

"""What calibration and priors cost against the known posterior: regret = Bayes utility
- achieved utility.

    python benchmarks/regret.py [--worlds 3 --seeds 30 --workers 1]

Gaussian mixtures with 10 classes, class prior 100:1, logits 2.5 times too large, a
tail-sensitive utility (-1) and abstention at 0.2. Held-out data of n samples are
long-tailed like the training data, balanced, or lack the three rarest classes.
Decisions are for the training prior (known), for a uniform one, or for a reversed one
that is estimated from the test samples. Rows in results/regret.csv are means over seeds
with their standard errors, and `above_best` is the difference between `auto` and the
single calibrator with the lowest mean, with the standard error of pairs. Rows of the
world "all" are over all worlds; results/regret.png shows them. Few draws with a large
regret dominate where the prior is estimated from few samples: 30 seeds cannot tell .01
there. So 200 samples, for which bounds are given, have twice as many.
"""

import argparse
import warnings
from collections import defaultdict
from collections.abc import Iterator
from itertools import product

import numpy as np
from numpy.typing import NDArray

from recording import RESULTS, in_parallel, write
from rfdlc import Classes, Decider, Utility

CLASSES, OVERCONFIDENCE, TEST = 10, 2.5, 2000
TRAIN = Classes.from_counts(
    np.geomspace(1000, 10, CLASSES).round().astype(int).tolist()
)
WORLDS = ((5, 1.2), (8, 0.8), (3, 2.0))  # dimensions and spread of the classes' means
SIZES, HELD_OUT, TARGETS = (
    (10, 50, 200, 1000),
    ("long-tailed", "balanced", "absent classes"),
    ("known", "estimated", "uniform"),
)
BOUNDED, MORE = 200, 2  # the size with bounds, and how many times as many seeds it has
CALIBRATORS = (
    "none",
    "temperature",
    "prior-corrected-temperature",
    "bias-corrected-temperature",
    "matrix-scaling",
    "auto",
)
COLUMNS = ("world", "held_out", "samples", "target", "calibration")
UTILITY = Utility.tail_sensitive(TRAIN, -1).with_abstain(0.2)
UNIFORM = np.full(CLASSES, 1 / CLASSES)
PRIORS = {
    "known": TRAIN.prior,
    "uniform": UNIFORM,
    "estimated": TRAIN.prior[::-1].copy(),
}


class World:
    """A Gaussian mixture whose posterior is known."""

    def __init__(self, dimensions: int, spread: float, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.means = self.rng.normal(size=(CLASSES, dimensions)) * spread

    def sample(
        self, prior: NDArray[np.float64], size: int
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Log likelihoods (size, C) up to a constant per row, and labels."""
        y = self.rng.choice(CLASSES, size, p=prior)
        x = self.means[y] + self.rng.normal(size=(size, self.means.shape[1]))
        return -((x[:, None] - self.means) ** 2).sum(axis=2) / 2, y


def scores(log_likelihood: NDArray[np.float64]) -> NDArray[np.float64]:
    """The logits of an over-confident model that was trained under the training
    prior.
    """
    return OVERCONFIDENCE * (log_likelihood + np.log(TRAIN.prior))


def held_out_prior(kind: str) -> NDArray[np.float64]:
    prior = {
        "long-tailed": TRAIN.prior,
        "balanced": UNIFORM,
        "absent classes": TRAIN.prior.copy(),
    }[kind].copy()
    prior[-3:] *= kind != "absent classes"
    return prior / prior.sum()


def regrets(
    number: int, seed: int, sizes: tuple[int, ...]
) -> dict[tuple[object, ...], float]:
    """Of one world, by held-out data, their size, target and calibrator."""
    world = World(*WORLDS[number], seed)
    found: dict[tuple[object, ...], float] = {}
    tests = {target: world.sample(PRIORS[target], TEST) for target in TARGETS}
    for kind, n in product(HELD_OUT, sizes):
        held, labels = world.sample(held_out_prior(kind), n)
        for name in CALIBRATORS:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                bare = Decider(UTILITY, calibration=name, train_prior="train")
                fitted = bare.fit(scores(held), labels, logits=True)
                for target, (log_likelihood, _) in tests.items():
                    if (
                        name == "auto" and target == "uniform"
                    ):  # it chooses for the prior decided for
                        fitted = bare.replace(target_prior="uniform").fit(
                            scores(held), labels, logits=True
                        )
                    found[number, kind, n, target, name] = regret(
                        fitted, target, log_likelihood
                    )
    print(f"world {number} seed {seed}", flush=True)
    return found


def rows(worlds: int, seeds: int, workers: int) -> Iterator[dict[str, object]]:
    found: dict[tuple[object, ...], list[float]] = defaultdict(list)
    draws = [
        (seed, SIZES if seed < seeds else (BOUNDED,)) for seed in range(MORE * seeds)
    ]
    for each in in_parallel(
        regrets, ((world, *draw) for draw in draws for world in range(worlds)), workers
    ):
        for (world, *cell, name), value in each.items():
            found[world, *cell, name].append(value)
            found["all", *cell, name].append(value)
    for key in sorted(found, key=lambda key: str(key[0])):
        (*cell, name), values = key, np.array(found[key])
        row = dict(zip(COLUMNS, key, strict=False)) | {
            "draws": len(values),
            "worst": f"{values.max():.4f}",
        }
        row |= {
            "regret": f"{values.mean():.4f}",
            "error": f"{standard_error(values):.4f}",
        }
        if name == "auto":
            best = min(
                CALIBRATORS[:-1], key=lambda name: float(np.mean(found[*cell, name]))
            )
            above = values - found[*cell, best]
            row |= {
                "best": best,
                "above_best": f"{above.mean():.4f}",
                "above_error": f"{standard_error(above):.4f}",
            }
        yield row


def standard_error(values: NDArray[np.float64]) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values)))


def regret(fitted: Decider, target: str, log_likelihood: NDArray[np.float64]) -> float:
    """In expectation over the labels of the test samples."""
    z = scores(log_likelihood)
    prior = (
        fitted.estimate_prior(z, logits=True)
        if target == "estimated"
        else PRIORS[target]
    )
    actions = fitted.replace(target_prior=prior).decide(z, logits=True)
    exact = (
        np.exp(log_likelihood - log_likelihood.max(axis=1, keepdims=True))
        * PRIORS[target]
    )
    values = exact / exact.sum(axis=1, keepdims=True) @ UTILITY.matrix
    return float((values.max(axis=1) - values[np.arange(len(values)), actions]).mean())


def plot(table: list[dict[str, object]]) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(HELD_OUT), len(TARGETS), figsize=(11, 9), sharex=True, sharey=True
    )
    for (i, kind), (j, target) in product(enumerate(HELD_OUT), enumerate(TARGETS)):
        for name in CALIBRATORS:
            means = [
                next(
                    float(str(r["regret"]))
                    for r in table
                    if tuple(r[column] for column in COLUMNS)
                    == ("all", kind, n, target, name)
                )
                for n in SIZES
            ]
            axes[i, j].plot(
                SIZES,
                np.maximum(means, 1e-4),
                label=name,
                linewidth=3 if name == "auto" else 1.2,
            )
        axes[i, j].set(
            xscale="log", yscale="log", title="" if i else f"target prior {target}"
        )
        axes[i, j].set_ylabel("" if j else f"held out: {kind}")
    axes[0, 2].legend(fontsize=7, loc="lower left")
    figure.supxlabel("held-out samples")
    figure.supylabel("regret")
    figure.tight_layout()
    figure.savefig(RESULTS / "regret.png", dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worlds", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    table = list(rows(options.worlds, options.seeds, options.workers))
    columns = (
        *COLUMNS,
        "draws",
        "regret",
        "error",
        "worst",
        "best",
        "above_best",
        "above_error",
    )
    print(write("regret", table, ("rfdlc", "numpy", "scipy"), columns=columns))
    plot(table)

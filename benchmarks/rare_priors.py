"""Estimated priors of classes with 6 to 40 training samples, and what decisions for
them cost.

    python benchmarks/rare_priors.py [--seeds 10 --workers 1]

Gaussian classes with 4,000 to 6 training samples. A logistic regression or gradient
boosting is fitted to all of them, and calibrated by `auto` on out-of-fold predictions,
as tables are. 3,000 test samples have the training prior (same), four times as many of
the second class (frequent), twenty times as many of one with 10 training samples
(rare), or the reversed prior. Missing a rare class costs 5 to 50, any other mistake 1.
Decisions are for the training prior, plain EM (Saerens, Latinne and Decaestecker 2002),
`rfdlc`, `rfdlc` where the training prior counts for at most 300 samples (as before), or
the true prior. `error` is the mean total variation and `cost` the mean cost of the
decisions; `se` is the standard error of its difference to that of the training prior.
`rare` is the mean factor (geometric, shares of at least 1e-5) between the estimated and
the true shares of the two rarest classes.
"""

import argparse
import warnings
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_predict

from recording import in_parallel, write
from rfdlc import Classes, Decider, Utility
from rfdlc.probabilities import priors

Array = NDArray[Any]
COUNTS = np.array([4000, 500, 120, 40, 10, 6])
CLASSES, TEST, RAREST = Classes.from_counts(COUNTS.tolist()), 3000, slice(4, None)
TRAIN, SIZE = CLASSES.prior, len(COUNTS)
WORLDS = ((4, 1.2), (8, 0.8))  # dimensions and spread of the classes' means
SHIFTS = ("same", "frequent", "rare", "reversed")
FIRST = 100  # seed: the hypotheses of `estimate_prior` were chosen on smaller ones
MODELS: dict[str, Any] = {
    "logistic": LogisticRegression(max_iter=2000),
    "boosting": HistGradientBoostingClassifier(
        max_iter=60, early_stopping=False, random_state=0
    ),
}
COST = 1 - np.eye(SIZE)
COST[1:, 0] = 5, 10, 20, 50, 50


def shifted(kind: str) -> Array:
    """The class prior of the test samples."""
    if kind == "reversed":
        return TRAIN[::-1].copy()
    prior = TRAIN * np.array(
        [1, 4 if kind == "frequent" else 1, 1, 1, 20 if kind == "rare" else 1, 1]
    )
    prior[0] = 1 - prior[1:].sum()
    return prior


def plain_em(p: Array, carried: Array) -> Array:
    """The prior of highest likelihood."""
    return priors._most_probable(p / carried, carried, np.zeros(SIZE))


def simulate(
    model: str, world: tuple[int, float], seed: int
) -> list[tuple[tuple[str, str, str], Array]]:
    """By model, shift and estimate: the error, the log factor of the rarest classes,
    and the cost.
    """
    rng, (dimensions, spread), found = np.random.default_rng(seed), world, []
    means = rng.normal(size=(SIZE, dimensions)) * spread

    def drawn(counts: Array) -> tuple[Array, Array]:
        y = np.repeat(np.arange(SIZE), counts)
        return means[y] + rng.normal(size=(len(y), dimensions)), y

    (x, y), folds = drawn(COUNTS), StratifiedKFold(5, shuffle=True, random_state=0)
    warnings.simplefilter("ignore")
    held_out = cross_val_predict(MODELS[model], x, y, cv=folds, method="predict_proba")
    fitted, utility = (
        MODELS[model].fit(x, y),
        Utility(-COST, list(CLASSES.names)).with_classes(CLASSES),
    )
    decider = Decider(utility, train_prior="train").fit(held_out, y)
    for shift in SHIFTS:
        truth = shifted(shift)
        x, y = drawn(rng.multinomial(TEST, truth))
        p = fitted.predict_proba(x)
        carried, calibrated = (
            decider.model.effective_prior,
            np.asarray(decider.replace(target_prior=None).probabilities(p)),
        )
        assert carried is not None
        with patch.object(priors, "STILL", ()):
            before = decider.estimate_prior(p).prior
        estimates = {
            "training prior": TRAIN,
            "plain EM": plain_em(calibrated, carried),
            "rfdlc, at most 300": before,
        }
        for name, prior in (
            estimates | {"rfdlc": decider.estimate_prior(p).prior, "truth": truth}
        ).items():
            cost = COST[y, decider.replace(target_prior=prior).decide(p)].mean()
            factor = np.abs(np.log(np.maximum(prior, 1e-5) / truth))[RAREST].mean()
            found.append(
                (
                    (model, shift, name),
                    np.array([np.abs(prior - truth).sum() / 2, factor, cost]),
                )
            )
    return found


def rows(seeds: int, workers: int) -> Iterator[dict[str, object]]:
    found = defaultdict(list)
    for each in in_parallel(
        simulate, product(MODELS, WORLDS, range(FIRST, FIRST + seeds)), workers
    ):
        for key, values in each:
            found[key].append(values)
    for key, values in found.items():
        error, factor, cost = np.mean(values, axis=0)
        above = (
            np.array(values)[:, 2] - np.array(found[*key[:2], "training prior"])[:, 2]
        )
        row = dict(zip(("model", "shift", "estimate"), key, strict=True)) | {
            "seeds": seeds,
            "draws": len(values),
        }
        row |= {
            "error": f"{error:.4f}",
            "rare": f"{np.exp(factor):.2f}",
            "cost": f"{cost:.4f}",
        }
        yield row | {"se": f"{above.std(ddof=1) / np.sqrt(len(above)):.4f}"}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    columns = (
        "model",
        "shift",
        "estimate",
        "seeds",
        "draws",
        "error",
        "rare",
        "cost",
        "se",
    )
    write(
        "rare_priors",
        rows(options.seeds, options.workers),
        ("rfdlc", "numpy", "scikit-learn"),
        columns=columns,
    )

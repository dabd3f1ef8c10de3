"""Promised against realised utility on test data, over 20 random utilities: at most
0.01 apart for calibrated models.

    python benchmarks/promised.py
        writes benchmarks/results/promised.csv (two minutes on one core)

The promise is the mean expected utility of the decisions, by the model's own
probabilities. A random utility has 1 for the true class, values from -1 to 0 for the
others, and abstention at a value from 0 to 0.5. `simulated` are the worlds of
regret.py, with logits 2.5 times too large; `generated` and `digits` are classifiers of
scikit-learn: a third of the samples trains, a third calibrates, a third tests. Gaps are
of several draws together, whose held-out data differ; `gap_of_one_draw` is the mean of
|gap| over single draws, which includes the chance of one held-out set.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from recording import write
from regret import TRAIN, WORLDS, World, scores
from rfdlc import Classes, Decider, Utility
from rfdlc.evaluation.metrics import METRICS
from rfdlc.evaluation.outcomes import Outcomes
from tabular import generated, long_tailed

UTILITIES, TEST, DRAWS = 20, 10_000, 3
CALIBRATIONS = (None, "temperature", "auto")
COLUMNS = (
    "data",
    "model",
    "calibration",
    "held_out",
    "test",
    "draws",
    "mean_gap",
    "largest_gap",
    "within_0.01",
    "gap_of_one_draw",
)
Split = tuple[Any, Any, Any, Any]  # held-out scores and labels, test scores and labels


def random_utility(classes: Classes, seed: int) -> Utility:
    rng = np.random.default_rng(seed)
    matrix = rng.uniform(-1, 0, (len(classes), len(classes)))
    np.fill_diagonal(matrix, 1)
    return Utility(matrix, classes).with_abstain(rng.uniform(0, 0.5))


def gaps(
    classes: Classes, calibration: str | None, splits: list[Split], logits: bool
) -> list[tuple[float, float]]:
    """Promised minus realised utility of each random utility, and the mean of its size
    over single draws.
    """
    found = []
    fitted = [
        Decider(
            Utility.one_hot(classes), calibration=calibration, train_prior="train"
        ).fit(z, y, logits=logits)
        for z, y, _, _ in splits
    ]
    p = np.concatenate(
        [
            np.asarray(d.probabilities(s[2], logits=logits))
            for d, s in zip(fitted, splits, strict=True)
        ]
    )
    targets = np.concatenate([y for *_, y in splits])
    for seed in range(UTILITIES):
        utility = random_utility(classes, seed)
        outcomes = Outcomes.of(
            utility,
            targets,
            fitted[0].replace(utility=utility).decide_probabilities(p),
            p,
        )
        each = np.split(
            outcomes.expected - outcomes.realised,
            np.cumsum([len(y) for *_, y in splits])[:-1],
        )
        one = float(np.mean([abs(values.mean()) for values in each]))
        found.append((METRICS["utility_gap"].measure(outcomes), one))
    return found


def rows() -> Iterator[dict[str, object]]:
    for i, (dimensions, spread) in enumerate(WORLDS):
        for held_out in (200, 1000, 5000):
            world, splits = World(dimensions, spread, seed=100 + i), []
            for _ in range(DRAWS):
                (held, y), (test, truth) = (
                    world.sample(TRAIN.prior, size) for size in (held_out, TEST)
                )
                splits.append((scores(held), y, scores(test), truth))
            for calibration in CALIBRATIONS:
                found = gaps(TRAIN, calibration, splits, True)
                yield row(
                    f"simulated, world {i + 1}",
                    "2.5 times the logits",
                    calibration,
                    splits,
                    found,
                )
    digits = load_digits()
    problems = {
        "generated, 5 classes to 1:15": generated(
            30_000, 20, [0.6, 0.2, 0.1, 0.06, 0.04], separation=0.8, seed=2
        ),
        "digits, long-tailed 1:15": long_tailed((digits.data, digits.target), 15),
    }
    models = {
        "logistic regression": make_pipeline(
            StandardScaler(), LogisticRegression(max_iter=1000)
        ),
        "random forest": RandomForestClassifier(random_state=0),
        "gradient boosting": HistGradientBoostingClassifier(random_state=0),
    }
    for data, (X, y) in problems.items():
        classes, draws = Classes.from_labels(y), 1 if len(y) > 10_000 else 3 * DRAWS
        for name, model in models.items():
            splits = [split(X, y, model, seed) for seed in range(draws)]
            for calibration in CALIBRATIONS:
                yield row(
                    data,
                    name,
                    calibration,
                    splits,
                    gaps(classes, calibration, splits, False),
                )


def split(X: Any, y: Any, model: Any, seed: int) -> Split:
    train, held, test = (
        part
        for _, part in StratifiedKFold(3, shuffle=True, random_state=seed).split(X, y)
    )
    fitted = clone(model).fit(X[train], y[train])
    return (
        fitted.predict_proba(X[held]),
        y[held],
        fitted.predict_proba(X[test]),
        y[test],
    )


def row(
    data: str, model: str, calibration: str | None, splits: list[Split], found: Any
) -> dict[str, object]:
    size, one = np.abs(found).T
    return {
        "data": data,
        "model": model,
        "calibration": calibration or "none",
        "held_out": len(splits[0][1]),
        "test": sum(len(y) for *_, y in splits),
        "draws": len(splits),
        "mean_gap": f"{size.mean():.4f}",
        "largest_gap": f"{size.max():.4f}",
        "within_0.01": f"{(size <= 0.01).sum()} of {UTILITIES}",
        "gap_of_one_draw": f"{one.mean():.4f}",
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # rare classes have few samples: that is the point
    write("promised", rows(), ("rfdlc", "numpy", "scikit-learn"), columns=COLUMNS)

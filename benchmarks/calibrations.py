"""Which kind of calibration fits held-out data best, and what the choice of `auto` costs.

    python benchmarks/calibrations.py [--seeds 10]
    python benchmarks/calibrations.py RUN...

Without a RUN: scikit-learn's tables, whole and with rarer classes, and three models. Two fifths of the samples train,
three tenths calibrate, three tenths are decided for a tail-sensitive utility (-1) with abstention at 0.2. Rows in
results/calibrators.csv are mean utilities over seeds, and how far `auto` is below the best single calibrator, which is
known only afterwards: how far chance alone goes is measured, too.

With RUNs: class-balanced likelihood, cross-validated inside of the held-out data. A RUN is a folder with
`held-out.npz`: one that an evidence grid trained without a tenth of the data, or its light copy (`python -m paper run
... --logits LOGITS`, then LOGITS/DATA/METHOD/held-out-SEED). Test labels are not read. A row for each run and kind in
results/calibrations.csv.
"""

import argparse
import json
import warnings
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from recording import write
from rfdlc.decide.calibrators import CALIBRATORS
from rfdlc.decide.classes import Classes
from rfdlc.decide.decider import Decider
from rfdlc.decide.outcomes import cross_fitted
from rfdlc.decide.predictions import Predictions
from rfdlc.decide.utility import Utility

TREES = 100
MARGIN = 0.005  # of mean utility
TABLES = {"wine": load_wine, "breast cancer": load_breast_cancer, "digits": load_digits, "iris": load_iris}
MODELS = {
    "forest": lambda: RandomForestClassifier(TREES, random_state=0),
    "naive Bayes": GaussianNB,
    "logistic": lambda: make_pipeline(StandardScaler(), LogisticRegression(max_iter=500)),
}
SINGLE = tuple(name for name in CALIBRATORS if name != "auto")


def tables(seed: int) -> Iterator[tuple[str, NDArray[np.float64], NDArray[np.int64]]]:
    """Each table whole, and with classes that are up to ten times rarer than the first one."""
    rng = np.random.default_rng(seed)
    for name, load in TABLES.items():
        X, y = load(return_X_y=True)
        yield name, X, y
        kept = rng.random(len(y)) < np.geomspace(1, 0.1, y.max() + 1)[rng.permutation(y.max() + 1)[y]]
        yield f"{name}, long-tailed", X[kept], y[kept]


def utilities(seed: int) -> Iterator[tuple[tuple[str, str, str], float]]:
    """(table, model, calibration), and the mean utility of the decided samples."""
    for (table, X, y), (model, make) in product(tables(seed), MODELS.items()):
        first, rest, y_first, y_rest = train_test_split(X, y, train_size=0.4, random_state=seed, stratify=y)
        held, test, y_held, y_test = train_test_split(rest, y_rest, train_size=0.5, random_state=seed)
        classes = Classes.from_labels(y_first)
        if len(classes) <= max(y_held.max(), y_test.max()):
            continue
        fitted = make().fit(first, y_first)
        p_held, p_test = (fitted.predict_proba(part) for part in (held, test))
        if model == "forest":  # as UtilityClassifier does: no vote of a hundred is not impossible
            p_held, p_test = ((TREES * p + 1 / len(classes)) / (TREES + 1) for p in (p_held, p_test))
        utility = Utility.tail_sensitive(classes, -1).with_abstain(0.2)
        for kind in CALIBRATORS:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                decider = Decider(utility, calibration=kind, train_prior="train").fit(p_held, y_held)
                yield (table, model, kind), float(utility.matrix[y_test, decider.decide(p_test)].mean())


def table_rows(seeds: int) -> Iterator[dict[str, object]]:
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for seed in range(seeds):
        for key, value in utilities(seed):
            found[key].append(value)
        print(f"seed {seed}", flush=True)
    means = {key: float(np.mean(values)) for key, values in found.items()}
    pairs = sorted({key[:2] for key in means})
    overall = {kind: float(np.mean([means[(*pair, kind)] for pair in pairs])) for kind in CALIBRATORS}
    for pair in pairs:
        best = max(SINGLE, key=lambda kind: means[(*pair, kind)])
        yield from _compared(f"{pair[0]}, {pair[1]}", {kind: means[(*pair, kind)] for kind in CALIBRATORS}, best)
    yield from _compared("all tables and models", overall, max(SINGLE, key=lambda kind: overall[kind]))
    for name, count in far_below(found, pairs).items():
        row: dict[str, object] = {
            "what": f"more than {MARGIN} below the best single one: {name}",
            "value": f"{count:.1f}",
        }
        yield row | {"unit": f"of {len(pairs)} tables and models", "reference": f"{seeds} seeds"}


def far_below(found: dict[tuple[str, str, str], list[float]], pairs: list[tuple[str, str]]) -> dict[str, float]:
    """How often `auto` is far below the calibrator that was best on the same test samples, and what chance does.

    A calibrator that was the best on the test samples of one half of the seeds is compared on the other half.
    """
    counts: dict[str, list[bool]] = defaultdict(list)
    for pair in pairs:
        values = np.array([found[(*pair, kind)] for kind in SINGLE])  # (kinds, seeds)
        counts["auto"].append(float(np.mean(found[(*pair, "auto")])) < values.mean(axis=1).max() - MARGIN)
        for half in (np.arange(values.shape[1]) % 2 == k for k in range(2)):
            other = values[:, half].mean(axis=1)
            counts["the best on the other half of the seeds"].append(
                other[values[:, ~half].mean(axis=1).argmax()] < other.max() - MARGIN
            )
    return {name: len(pairs) * float(np.mean(each)) for name, each in counts.items()}


def _compared(what: str, means: dict[str, float], best: str) -> Iterator[dict[str, object]]:
    for kind, value in means.items():
        row: dict[str, object] = {"what": f"{what}: {kind}", "value": f"{value:.4f}", "unit": "utility"}
        if kind == "auto":
            row |= {"reference": f"best: {best}", "ratio": f"{value - means[best]:+.4f}", "required": ">= -0.005"}
        yield row


def likelihood(held: Predictions, combine: str, kind: str) -> float:
    """In nats; every sample is calibrated by the other folds."""
    decider = Decider(Utility.one_hot(held.classes), combine=combine, calibration=kind).fit(held, balanced=True)
    found = cross_fitted(held, decider, balanced=True)
    return float(np.average(found.nll, weights=1 / np.bincount(found.targets)[found.targets]))


def rows(runs: list[Path]) -> Iterator[dict[str, object]]:
    for run in runs:
        settings = json.loads((run / "config.json").read_text(encoding="utf-8"))["settings"]
        held = Predictions.load(run / "held-out.npz")
        name = "/".join(run.resolve().parts[-3:])
        for kind in CALIBRATORS:
            value = f"{likelihood(held, settings['combine'], kind):.4f}"
            yield {"what": f"{name}: {kind}", "value": value, "unit": "nats", "reference": f"{len(held)} samples"}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN")
    parser.add_argument("--seeds", type=int, default=10)
    options = parser.parse_args()
    if options.runs:
        print(write("calibrations", rows(options.runs), ("rfdlc", "numpy")))
    else:
        print(write("calibrators", table_rows(options.seeds), ("rfdlc", "numpy", "scikit-learn")))

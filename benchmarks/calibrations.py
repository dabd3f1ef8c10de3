"""Which kind of calibration fits held-out data best, and what `auto` costs.

    python benchmarks/calibrations.py [--splits 256 --workers 2]
    python benchmarks/calibrations.py --log-loss [--splits 8 --workers 2]
    python benchmarks/calibrations.py RUN...

Without a RUN: scikit-learn's tables, whole and with rarer classes, and three models.
Two fifths of the samples train, three tenths calibrate, three tenths are decided for a
tail-sensitive utility (-1) with abstention at 0.2. Rows in results/calibrators.csv are
mean utilities over random splits, and the paired difference between `auto` and each
single calibrator with its standard error. The best single one is known only afterwards:
with few splits, it is best by chance.

With --log-loss: the log loss on new samples of models that are far too certain or far
too uncertain, and of those with few distinct probabilities, in results/log-loss.csv.
Splits count from 100: constants of `auto` were chosen on others.

With RUNs: class-balanced likelihood, cross-validated inside of the held-out data. A RUN
is a folder with `held-out.npz`: one that an evidence grid trained without a tenth of
the data, or its light copy (`python -m paper run ... --logits LOGITS`, then
LOGITS/DATA/METHOD/held-out-SEED). Test labels are not read. A row for each run and kind
in results/calibrations.csv.
"""

import argparse
import json
import warnings
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import (
    load_breast_cancer,
    load_digits,
    load_iris,
    load_wine,
    make_classification,
)
from sklearn.ensemble import AdaBoostClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from sklearn.tree import DecisionTreeClassifier

from recording import in_parallel, write
from rfdlc.decisions.decider import Decider
from rfdlc.decisions.utility import Utility
from rfdlc.evaluation.outcomes import cross_fitted
from rfdlc.probabilities.calibrators import CALIBRATORS
from rfdlc.probabilities.choosing import SAMPLES_NEEDED
from rfdlc.probabilities.classes import Classes
from rfdlc.probabilities.predictions import Predictions
from rfdlc.probabilities.scores import PROBABILITY_FLOOR

TREES = 100
MARGIN = 0.005  # of mean utility
FEWEST = 6  # samples of a class
TABLES = {
    "wine": load_wine,
    "breast cancer": load_breast_cancer,
    "digits": load_digits,
    "iris": load_iris,
}
MODELS = {
    "forest": lambda: RandomForestClassifier(TREES, random_state=0),
    "naive Bayes": GaussianNB,
    "logistic": lambda: make_pipeline(
        StandardScaler(), LogisticRegression(max_iter=500)
    ),
}
# Probabilities of the first ones are calibrated, and logits of the last two.
UNCALIBRATED = {
    **MODELS,
    "tree": lambda: DecisionTreeClassifier(random_state=0),
    "5 neighbours": lambda: make_pipeline(StandardScaler(), KNeighborsClassifier(5)),
    "AdaBoost": lambda: AdaBoostClassifier(random_state=0),
    "naive Bayes, log p": GaussianNB,
    "SVC, decision values": lambda: make_pipeline(StandardScaler(), SVC()),
}
LOGITS, FIRST_SPLIT = (
    {
        "naive Bayes, log p": "predict_log_proba",
        "SVC, decision values": "decision_function",
    },
    100,
)
HOLDS = f"is at most {MARGIN} below the best single one"
UNCLEAR = (
    f"is more than {MARGIN} below the best single one, but not by two standard errors"
)
WORSE = f"is more than {MARGIN} and two standard errors below the best single one"
SINGLE = tuple(SAMPLES_NEEDED)  # what `auto` weighs
COMPARED = (*SINGLE, "auto")


def tables(seed: int) -> Iterator[tuple[str, NDArray[np.float64], NDArray[np.int64]]]:
    """Each table whole, and with classes that are up to ten times rarer than the first
    one.
    """
    rng = np.random.default_rng(seed)
    for name, load in TABLES.items():
        X, y = load(return_X_y=True)
        yield name, X, y
        shares = rng.permutation(np.geomspace(1, 0.1, y.max() + 1))
        rows = [rng.permutation(np.flatnonzero(y == c)) for c in range(y.max() + 1)]
        kept = np.concatenate(
            [
                each[: max(FEWEST, round(s * len(each)))]
                for each, s in zip(rows, shares, strict=True)
            ]
        )
        yield f"{name}, long-tailed", X[kept], y[kept]


def utilities(split: int) -> dict[tuple[str, str, str], float]:
    """By table, model and calibration, the mean utility of the decided samples of one
    split.
    """
    found = {}
    for (table, X, y), (model, make) in product(tables(split), MODELS.items()):
        first, rest, y_first, y_rest = train_test_split(
            X, y, train_size=0.4, random_state=split, stratify=y
        )
        held, test, y_held, y_test = train_test_split(
            rest, y_rest, train_size=0.5, random_state=split
        )
        classes = Classes.from_labels(y_first)
        if len(classes) <= max(y_held.max(), y_test.max()):
            continue
        fitted = make().fit(first, y_first)
        p_held, p_test = (fitted.predict_proba(part) for part in (held, test))
        if (
            model == "forest"
        ):  # as UtilityClassifier does: no vote of a hundred is not impossible
            p_held, p_test = (
                (TREES * p + 1 / len(classes)) / (TREES + 1) for p in (p_held, p_test)
            )
        utility = Utility.tail_sensitive(classes, -1).with_abstain(0.2)
        for kind in COMPARED:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                decider = Decider(utility, calibration=kind, train_prior="train").fit(
                    p_held, y_held
                )
            found[table, model, kind] = float(
                utility.matrix[y_test, decider.decide(p_test)].mean()
            )
    return found


def table_rows(splits: int, workers: int) -> Iterator[dict[str, object]]:
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for each in in_parallel(utilities, ((split,) for split in range(splits)), workers):
        for key, value in each.items():
            found[key].append(value)
    pairs, verdicts = sorted({key[:2] for key in found}), []
    for pair in pairs:
        values = {kind: np.array(found[(*pair, kind)]) for kind in COMPARED}
        listed = list(_compared(f"{pair[0]}, {pair[1]}", values))
        verdicts.append(listed[-1]["required"])
        yield from listed
    few = min(len(each) for each in found.values())
    overall = {
        kind: np.mean([found[(*pair, kind)][:few] for pair in pairs], axis=0)
        for kind in COMPARED
    }
    yield from _compared("all tables and models", overall)
    for verdict in (HOLDS, UNCLEAR, WORSE):
        count = verdicts.count(verdict)
        yield {
            "what": f"auto {verdict}",
            "value": count,
            "unit": f"of {len(pairs)} tables and models",
        }


def _compared(
    what: str, values: dict[str, NDArray[np.float64]]
) -> Iterator[dict[str, object]]:
    """Mean utilities over splits; of `auto`, the difference to the best mean with the
    standard error of pairs.
    """
    best = max(SINGLE, key=lambda kind: values[kind].mean())
    for kind in COMPARED:
        difference = values["auto"] - values[best if kind == "auto" else kind]
        mean, error = (
            float(difference.mean()),
            float(difference.std(ddof=1) / np.sqrt(len(difference))),
        )
        row: dict[str, object] = {
            "what": f"{what}: {kind}",
            "value": f"{values[kind].mean():.4f}",
            "unit": "utility",
        }
        row |= {
            "reference": "auto minus this one",
            "ratio": f"{mean:+.4f} +- {error:.4f}",
        }
        if kind == "auto":
            verdict = (
                HOLDS
                if mean >= -MARGIN
                else UNCLEAR
                if mean + 2 * error >= -MARGIN
                else WORSE
            )
            row |= {"reference": f"auto minus the best: {best}", "required": verdict}
        yield row


def scores(fitted: Any, model: str, X: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probabilities (N, C), or logits."""
    found = getattr(fitted, LOGITS.get(model, "predict_proba"))(X)
    return np.column_stack([-found, found]) if found.ndim == 1 else found


def log_losses(split: int) -> dict[tuple[str, str, str], float]:
    """By table, model and calibration, the log loss on the new samples of one split, in
    nats.
    """
    shares = np.geomspace(1, 0.05, 6)
    made = {
        "n_features": 20,
        "n_informative": 8,
        "n_redundant": 6,
        "n_classes": 6,
        "class_sep": 1.2,
    }
    long_tailed = make_classification(
        3000, weights=shares / shares.sum(), random_state=split, **made
    )
    loaded = {
        name: load(return_X_y=True) for name, load in TABLES.items() if name != "iris"
    }
    found = {}
    for (table, (X, y)), (model, make) in product(
        (loaded | {"generated": long_tailed}).items(), UNCALIBRATED.items()
    ):
        first, rest, y_first, y_rest = train_test_split(
            X, y, train_size=0.4, random_state=split, stratify=y
        )
        held, test, y_held, y_test = train_test_split(
            rest, y_rest, train_size=0.5, random_state=split
        )
        fitted, utility, logits = (
            make().fit(first, y_first),
            Utility.one_hot(Classes.from_labels(y_first)),
            model in LOGITS,
        )
        z_held, z_test = (scores(fitted, model, part) for part in (held, test))
        for kind in CALIBRATORS:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                decider = Decider(utility, calibration=kind, train_prior="train").fit(
                    z_held, y_held, logits=logits
                )
            p = np.asarray(decider.probabilities(z_test, logits=logits))[
                np.arange(len(y_test)), y_test
            ]
            found[table, model, kind] = float(
                -np.log(np.maximum(p, PROBABILITY_FLOOR)).mean()
            )
    return found


def log_loss_rows(splits: int, workers: int) -> Iterator[dict[str, object]]:
    """Means over splits; the paired difference of `auto` to each, with its standard
    error.
    """
    seeds = ((FIRST_SPLIT + split,) for split in range(splits))
    found = list(in_parallel(log_losses, seeds, workers))
    for table, model in dict.fromkeys(key[:2] for key in found[0]):
        values = {
            kind: np.array([each[table, model, kind] for each in found])
            for kind in CALIBRATORS
        }
        for kind, each in values.items():
            difference = values["auto"] - each
            error = difference.std(ddof=1) / np.sqrt(splits)
            row: dict[str, object] = {
                "what": f"{table}, {model}: {kind}",
                "value": f"{each.mean():.4f}",
            }
            compared = {
                "reference": "auto minus this one",
                "ratio": f"{difference.mean():+.4f} +- {error:.4f}",
            }
            yield row | {"unit": "nats"} | (compared if kind != "auto" else {})


def likelihood(held: Predictions, combine: str, kind: str) -> float:
    """In nats; every sample is calibrated by the other folds."""
    decider = Decider(
        Utility.one_hot(held.classes), combine=combine, calibration=kind
    ).fit(held, balanced=True)
    found = cross_fitted(held, decider, balanced=True)
    return float(
        np.average(found.nll, weights=1 / np.bincount(found.targets)[found.targets])
    )


def rows(runs: list[Path]) -> Iterator[dict[str, object]]:
    for run in runs:
        settings = json.loads((run / "config.json").read_text(encoding="utf-8"))[
            "settings"
        ]
        held = Predictions.load(run / "held-out.npz")
        name = "/".join(run.resolve().parts[-3:])
        for kind in CALIBRATORS:
            value = f"{likelihood(held, settings['combine'], kind):.4f}"
            yield {
                "what": f"{name}: {kind}",
                "value": value,
                "unit": "nats",
                "reference": f"{len(held)} samples",
            }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN")
    parser.add_argument("--log-loss", action="store_true")
    parser.add_argument("--splits", type=int, help="256, of log losses 8")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    packages = ("rfdlc", "numpy", "scikit-learn")
    if options.runs:
        print(write("calibrations", rows(options.runs), packages[:2]))
    elif options.log_loss:
        print(
            write(
                "log-loss",
                log_loss_rows(options.splits or 8, options.workers),
                packages,
            )
        )
    else:
        print(
            write(
                "calibrators",
                table_rows(options.splits or 256, options.workers),
                packages,
            )
        )

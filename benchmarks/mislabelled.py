"""Mislabelled samples: precision of `find_mislabelled` and of cleanlab on the same
out-of-fold probabilities.

    pip install "rfdlc[benchmarks]"
    pip install --target cleanlab-only --no-deps cleanlab tqdm termcolor
    PYTHONPATH=cleanlab-only python benchmarks/mislabelled.py
        writes benchmarks/results/mislabelled.csv (3 minutes)

Digits of scikit-learn, as they are and with a long tail (1:10). 5% of the labels are
replaced by another class at random; five folds of four classifiers predict all samples.
n is the number of replaced labels. `precision` is the share of replaced labels among
the first n suspects, or among all of them if they are fewer; `tail precision` is the
same for samples whose (replaced) label is among the half of the classes with the fewest
samples. cleanlab ranks in each of the ways that it offers for ranked indices. Means
over 8 seeds; `worst` is the smallest difference between ours and the better way of
cleanlab among the seeds.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from cleanlab.filter import find_label_issues
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.ensemble import ExtraTreesClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from recording import write
from rfdlc import find_mislabelled
from rfdlc.data.longtail import profile_counts, subset

SEEDS, SHARE, CLASSES = (
    range(100, 108),
    0.05,
    10,
)  # others than those by which the score was chosen
RANKED = ("self_confidence", "normalized_margin")
MODELS: dict[str, Any] = {
    "logistic regression": LogisticRegression(C=0.1, max_iter=200),
    "extra trees": ExtraTreesClassifier(random_state=0),
    "random forest": RandomForestClassifier(random_state=0),
    "MLP": MLPClassifier(random_state=0, max_iter=50),
}


def noisy(factor: int, seed: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Features, labels, and which of them were replaced."""
    X, y = load_digits(return_X_y=True)
    if factor > 1:
        kept = subset(
            y, profile_counts(int(np.bincount(y).min()), CLASSES, factor), seed=seed
        )
        X, y = X[kept], y[kept]
    rng = np.random.default_rng(seed)
    replaced = np.zeros(len(y), dtype=bool)
    replaced[rng.choice(len(y), round(SHARE * len(y)), replace=False)] = True
    moved = (y + rng.integers(1, CLASSES, len(y))) % CLASSES
    return X, np.where(replaced, moved, y), replaced


def precisions(
    order: NDArray[Any], labels: NDArray[Any], replaced: NDArray[Any]
) -> tuple[float, float]:
    counts = np.bincount(labels, minlength=CLASSES)
    rare = np.argsort(np.argsort(counts, kind="stable")) < CLASSES // 2
    inside = rare[labels]
    found, tail = (
        order[: replaced.sum()],
        order[inside[order]][: (replaced & inside).sum()],
    )
    return float(replaced[found].mean()), (
        float(replaced[tail].mean()) if len(tail) else 0.0
    )


def rows() -> Iterator[dict[str, object]]:
    for factor in (1, 10):
        for name, model in MODELS.items():
            each: dict[str, list[tuple[float, float]]] = {}
            for seed in SEEDS:
                X, labels, replaced = noisy(factor, seed)
                p = np.zeros((len(labels), CLASSES))
                for learn, held in StratifiedKFold(
                    5, shuffle=True, random_state=seed
                ).split(X, labels):
                    fitted = make_pipeline(StandardScaler(), model).fit(
                        X[learn], labels[learn]
                    )
                    p[held] = fitted.predict_proba(X[held])
                found = {"rfdlc": find_mislabelled(p, labels).rows}
                found |= {
                    f"cleanlab, {way}": find_label_issues(
                        labels, p, return_indices_ranked_by=way, n_jobs=1
                    )
                    for way in RANKED
                }
                for tool, order in found.items():
                    each.setdefault(tool, []).append(
                        precisions(order, labels, replaced)
                    )
            values = {
                tool: np.array(given) for tool, given in each.items()
            }  # (seeds, 2)
            gain = values["rfdlc"] - np.maximum(
                *(values[f"cleanlab, {way}"] for way in RANKED)
            )
            for tool, given in values.items():
                means, worst = given.mean(axis=0), gain.min(axis=0)
                yield {
                    "data": f"digits, 1:{factor}",
                    "model": name,
                    "tool": tool,
                    "precision": f"{means[0]:.3f}",
                    "tail precision": f"{means[1]:.3f}",
                    "worst": f"{worst[0]:.3f}" if tool == "rfdlc" else "",
                    "worst in the tail": f"{worst[1]:.3f}" if tool == "rfdlc" else "",
                    "seeds": len(SEEDS),
                }


def main() -> None:
    warnings.simplefilter("ignore")
    found = list(rows())
    for row in found:
        print(*row.values(), sep="  ")
    print(
        write(
            "mislabelled",
            found,
            ("rfdlc", "numpy", "scikit-learn", "cleanlab"),
            columns=tuple(found[0]),
        )
    )


if __name__ == "__main__":
    main()

"""Predicting rows of a table with trees on a CPU: tree by tree, as scikit-learn walks
them, against level by level.

    python benchmarks/trees.py        writes benchmarks/results/trees.csv (two minutes)

The mixture that `rfdlc train` fits to 6,000 generated rows by default, and new rows. A
GPU and exported graphs go level by level, all trees at once; so do fewer rows than
MANY.
"""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import make_classification

import rfdlc
from recording import write
from rfdlc.training.networks import mixture
from rfdlc.training.networks.mixture import Trees

ROWS = 1, 24_000
SHAPE: dict[str, Any] = {
    "n_informative": 8,
    "n_classes": 4,
    "weights": [0.7, 0.2, 0.07, 0.03],
}


def seconds(model: rfdlc.Model, rows: NDArray[np.float32], many: int) -> float:
    mixture.MANY = many
    model.predict(rows[:1])
    began, repeats = time.perf_counter(), 20 if len(rows) == 1 else 1
    for _ in range(repeats):
        model.predict(rows)
    return (time.perf_counter() - began) / repeats


def measured() -> Iterator[dict[str, object]]:
    many = mixture.MANY
    X, y = make_classification(6000 + max(ROWS), 20, random_state=0, **SHAPE)
    X = X.astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {"preset": "table", "backbone": "mixture"}
        model = rfdlc.train(
            (X[:6000], y[:6000]), "rf-dlc", Path(folder) / "run", **given
        )
        count = sum(
            member.roots.numel()
            for member in model.net.members.values()
            if isinstance(member, Trees)
        )
        for rows in ROWS:
            own, levels = (
                seconds(model, X[6000 : 6000 + rows], many),
                seconds(model, X[6000 : 6000 + rows], 10**9),
            )
            row: dict[str, object] = {
                "what": f"{rows:,} rows, {count:,} trees",
                "value": f"{own:.3f}",
                "unit": "s",
            }
            yield row | {
                "reference": f"level by level: {levels:.3f}",
                "ratio": f"{levels / own:.1f}",
            }


if __name__ == "__main__":
    write("trees", measured(), ["rfdlc", "torch", "numpy", "scikit-learn"])

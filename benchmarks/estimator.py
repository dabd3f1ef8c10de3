"""Five particles train in at most three times the time of one MLPClassifier: 50,000 x
50, 10 classes, two cores.

    python benchmarks/estimator.py        writes benchmarks/results/estimator.csv

Same hidden layers, same number of epochs, each at its own default batch size, in turns
in one run: the least of the repetitions, which other work on the machine disturbs
least. The fit of RFDLCClassifier includes its calibration.
"""

import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from numpy.typing import NDArray
from sklearn.datasets import make_classification
from sklearn.neural_network import MLPClassifier
from threadpoolctl import threadpool_limits

from recording import write
from rfdlc import RFDLCClassifier

EPOCHS, REPETITIONS, CORES = 5, 3, 2


def seconds(model: Any, X: NDArray[Any], y: NDArray[Any]) -> float:
    start = time.perf_counter()
    model.fit(X, y)
    return time.perf_counter() - start


def rows() -> Iterator[dict[str, object]]:
    X, y = make_classification(
        50_000, 50, n_informative=20, n_classes=10, random_state=0
    )
    for hidden in ((100,), (128, 128), (256, 256)):
        pairs = []
        for _ in range(REPETITIONS):
            ours = RFDLCClassifier(
                backbone="mlp",
                hidden=hidden,
                particles=5,
                epochs=EPOCHS,
                random_state=0,
            )
            theirs = MLPClassifier(
                hidden,
                max_iter=EPOCHS,
                n_iter_no_change=EPOCHS,
                tol=0.0,
                random_state=0,
            )
            pairs.append((seconds(ours, X, y), seconds(theirs, X, y)))
            assert ours.n_iter_ == theirs.n_iter_ == EPOCHS
        mine, reference = (min(times) for times in zip(*pairs, strict=True))
        yield {
            "what": f"fit, 5 particles of hidden layers {hidden}, {EPOCHS} epochs",
            "value": f"{mine:.2f}",
            "unit": "s",
            "reference": f"one MLPClassifier: {reference:.2f} s",
            "ratio": f"{mine / reference:.2f}",
            "required": "<= 3",
        }


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # MLPClassifier would rather go on
    torch.set_num_threads(CORES)
    with threadpool_limits(CORES):
        print(write("estimator", rows(), ("rfdlc", "numpy", "scikit-learn", "torch")))

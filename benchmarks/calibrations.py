"""Which kind of calibration fits held-out data best: class-balanced likelihood, cross-validated inside of it.

    python benchmarks/calibrations.py RUN...

A RUN is a folder with `held-out.npz`: one that an evidence grid trained without a tenth of the data, or its light copy
(`python -m paper run ... --logits LOGITS`, then LOGITS/DATA/METHOD/held-out-SEED). Test labels are not
read. A row for each run and kind in results/calibrations.csv.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recording import write
from rfdlc.decide.calibrators import CALIBRATORS
from rfdlc.decide.decider import Decider
from rfdlc.decide.metrics import nll
from rfdlc.decide.predictions import Predictions
from rfdlc.decide.utility import Utility

FOLDS = 5


def likelihood(held: Predictions, combine: str, kind: str) -> float:
    """In nats; every sample is calibrated by the other folds."""
    logits, labels = held.scores.values, held.targets
    assert labels is not None
    fold = folds(labels)
    p = np.empty(logits.shape[1:])
    for k in range(FOLDS):
        decider = Decider(Utility.one_hot(held.classes), combine=combine, calibration=kind)
        decider = decider.fit(logits[:, fold != k], labels[fold != k], logits=True, balanced=True)
        p[fold == k] = decider.probabilities(logits[:, fold == k], logits=True)
    return float(np.average(nll(p[np.arange(len(labels)), labels]), weights=1 / np.bincount(labels)[labels]))


def folds(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Samples of a class spread evenly over the folds, at random."""
    mixed = np.random.default_rng(0).permutation(len(labels))
    fold = np.empty(len(labels), dtype=np.int64)
    fold[mixed[np.argsort(labels[mixed], kind="stable")]] = np.arange(len(labels)) % FOLDS
    return fold


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
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    print(write("calibrations", rows(parser.parse_args().runs), ("rfdlc", "numpy")))

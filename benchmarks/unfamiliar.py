"""Unfamiliar input: images of other data sets against a model of CIFAR100-LT, and false alarms in head and tail.

    python benchmarks/unfamiliar.py cifar100-lt.npz --test cifar100.npz --others cifar10.npz dermamnist.npz
    python benchmarks/unfamiliar.py runs/features ...             the same with the logits of a run trained on features

The first file holds train_x, train_y, the features of the training split (`rfdlc embed`); --test and --others hold x
(and y), features of the same network for test images of the same classes and for images of other data sets. Ours are
EfficientNet-Lite0 (ImageNet weights, benchmarks/lite.py) at 224 pixels, `--interpolation bilinear --crop 1`: 1,000 test
images of CIFAR-100, 1,000 of CIFAR-10 and 1,000 of rebuilt DermaMNIST. Nine tenths of the training samples train, one
tenth is held out for thresholds at a false-alarm rate of 5%; test classes are equally frequent.

Rows: the area under the ROC curve of test images against each other data set, and false alarms of test images of head
and tail classes (thirds by rank). Rivals in the same run: energy, largest probability, Mahalanobis distance. Their
thresholds are one quantile of the held-out scores; ours are by region of the most probable class.
Constants of our score were chosen with classes that were left out of training, and simulated images.
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

import rfdlc
from recording import write
from rfdlc.data.longtail import hold_out_indices
from rfdlc.decide.scores import Scores, softmax
from rfdlc.decide.unfamiliar import FeatureDistance, Unfamiliar, energy

Array = NDArray[Any]
RATE, SHRINKAGE = 0.05, 1e-3
COLUMNS = ("seed", "score", "thresholds", "other", "auroc", "false_alarms", "head", "tail", "tail_over_head")


def mahalanobis(x: Array, y: Array) -> Any:
    """Plain: the smallest squared distance from a class mean with the covariance within classes (Lee et al. 2018)."""
    means = np.stack([x[y == c].mean(axis=0) for c in np.unique(y)])
    centred = x - means[np.unique(y, return_inverse=True)[1]]
    covariance = centred.T @ centred / len(x)
    covariance += SHRINKAGE * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    white = np.linalg.inv(np.linalg.cholesky(covariance)).T
    known = means @ white
    return lambda z: ((z @ white) ** 2).sum(1) + np.min((known**2).sum(1) - 2 * (z @ white) @ known.T, axis=1)


def measured(
    source: Path, parts: dict[str, Array], test_y: Array, seed: int, train: Path | None
) -> list[dict[str, Any]]:
    """All scores of one split of the training samples."""
    with np.load(train or source) as found:
        x, y = found["train_x"].astype(np.float32), found["train_y"].astype(int)
    kept, held = hold_out_indices(y, 0.1, seed)
    classes = rfdlc.Classes.from_counts(np.bincount(y))
    with TemporaryDirectory() as folder:
        split = {"train_x": x[kept], "train_y": y[kept]}
        model = rfdlc.Model.load(source) if train else rfdlc.train(split, out=f"{folder}/run", seed=seed)
        samples = {"held-out": x[held], **parts}
        logits = {name: model.predict(each).scores.values for name, each in samples.items()}
    raw = {name: Scores(z, True) for name, z in logits.items()}
    p = {name: softmax(z).mean(axis=0) for name, z in logits.items()}
    plain, distance = mahalanobis(x[kept], y[kept]), FeatureDistance.fit(x[kept], y[kept])
    scores = {
        "features": {name: distance(each) for name, each in samples.items()},
        "energy": {name: energy(each) for name, each in raw.items()},
        "largest probability": {name: -each.max(axis=1) for name, each in p.items()},
        "Mahalanobis": {name: plain(each) for name, each in samples.items()},
    }
    rows = []
    for name, each in scores.items():
        by_region = Unfamiliar.fit(each["held-out"], p["held-out"].argmax(1), y[held], classes, false_alarm=RATE)
        alarms = {"by region": by_region.above(each["test"], p["test"].argmax(1), classes)}
        alarms["one"] = each["test"] > np.quantile(each["held-out"], 1 - RATE)
        for kind in alarms if name in ("features", "energy") else ("one",):
            head, tail = (alarms[kind][np.isin(test_y, classes.thirds[r])].mean() for r in ("head", "tail"))
            for other in [name for name in samples if name not in ("held-out", "test")]:
                truth = np.repeat([0, 1], [len(each["test"]), len(each[other])])
                auroc = roc_auc_score(truth, np.concatenate([each["test"], each[other]]))
                numbers = (auroc, alarms[kind].mean(), head, tail, tail / max(head, 1e-9))
                texts = [f"{value:.4f}" for value in numbers]
                rows.append(dict(zip(COLUMNS, (seed, name, kind, other, *texts), strict=True)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="features with train_x and train_y, or a run folder")
    parser.add_argument("--train", type=Path, help="of a run folder: the features that it was trained on")
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--others", type=Path, nargs="+", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    train = options.train if options.source.is_dir() else None
    parts, test_y = {}, np.array([])
    for name, file in [("test", options.test), *((file.stem, file) for file in options.others)]:
        with np.load(file) as found:
            parts[name] = found["x"].astype(np.float32)
            test_y = found["y"].astype(int) if name == "test" else test_y
    rows = [row for seed in options.seeds for row in measured(options.source, parts, test_y, seed, train)]
    write("unfamiliar", rows, ("rfdlc", "numpy", "torch", "scikit-learn"), columns=COLUMNS)


if __name__ == "__main__":
    main()

"""Unfamiliar input: the choice of a score, and images of other data sets against a model of CIFAR100-LT.

    python benchmarks/unfamiliar.py choose cifar100-lt.npz caltech101-lt.npz --simulated simulated.npz [--workers 8]
    python benchmarks/unfamiliar.py test cifar100-lt.npz --same cifar100.npz --others cifar10.npz dermamnist.npz
    python benchmarks/unfamiliar.py images FOLDER         writes the simulated images, for `rfdlc embed FOLDER`

The first file holds train_x, train_y: features by `rfdlc embed` of the training images. The others hold x (and y):
features of the same network. Ours are EfficientNet-Lite0 (ImageNet weights, benchmarks/lite.py) at 224 pixels,
`--interpolation bilinear --crop 1`. Those of the long-tailed training images (the files of benchmarks/features.py) were
computed earlier and with another rounding of pixels than those of all test images: of 2,048 training images, both kinds
are about 1% of their squared length apart. Features of simulated images are by `rfdlc embed FOLDER`.

choose: writes results/unfamiliar-choice.csv. No sample of the test is used. Models are trained without some classes
(a fifth of them at random, or four superclasses of CIFAR-100); a fifth of the remaining samples is held out. Families:
classes left out at random, superclasses left out, samples of the other data set, simulated images (noise, blobs,
digits), and classes left out of tables of scikit-learn (logistic regression). The rule: the score with the highest
mean over families of the AUROC, with features and of logits alone. A + B is the sum of two scores, each divided by its
standard deviation on held-out samples; A * B that of the logarithms of their upper tail probabilities there (Fisher).
Classes count equally.

test: writes results/unfamiliar.csv, three seeds of training and held-out samples (a tenth, for thresholds at a
false-alarm rate of 5%): the AUROC of samples of the same classes (1,000 test images of CIFAR-100) against each other
data set (1,000 test images of CIFAR-10, 1,000 of rebuilt DermaMNIST), and false alarms of the former in head and tail
(thirds by rank). Rivals in the same run: energy, largest probability, Mahalanobis distance. Their thresholds are one
quantile of the held-out scores; ours are by region of the most probable class.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter
from sklearn.datasets import load_digits, load_iris, load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import StandardScaler

import rfdlc
from recording import in_parallel, write
from rfdlc.data.longtail import hold_out_indices, profile_counts, subset
from rfdlc.decide.scores import Scores, softmax
from rfdlc.decide.unfamiliar import FeatureDistance, Unfamiliar, energy

Array = NDArray[Any]
Parts = dict[str, Array]
RATE, SHRINKAGE, NEIGHBOURS = 0.05, 1e-3, 5
COLUMNS = ("seed", "score", "thresholds", "other", "auroc", "false_alarms", "head", "tail", "tail_over_head")
CHOICE = ("score", "input", "family", "auroc", "deviation", "tasks")
PACKAGES = ("rfdlc", "numpy", "torch", "scikit-learn")
SUPERCLASS = np.array(  # of the classes of CIFAR-100 in alphabetical order
    [4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7, 6, 13, 15, 3, 15, 0, 11, 1, 10,
     12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10, 16, 4, 17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12, 12, 16,
     12, 1, 9, 19, 2, 10, 0, 1, 16, 12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14,
     13]
)  # fmt: skip
TABLES: dict[str, Callable[..., Any]] = {"digits": load_digits, "wine": load_wine, "iris": load_iris}


# --- scores ---------------------------------------------------------------------------------------------------------


def mahalanobis(x: Array, y: Array) -> Callable[[Array], Array]:
    """Plain: the smallest squared distance from a class mean with the covariance within classes (Lee et al. 2018)."""
    means = np.stack([x[y == c].mean(axis=0) for c in np.unique(y)])
    centred = x - means[np.unique(y, return_inverse=True)[1]]
    covariance = centred.T @ centred / len(x)
    covariance += SHRINKAGE * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    white = np.linalg.inv(np.linalg.cholesky(covariance)).T
    known = means @ white
    return lambda z: ((z @ white) ** 2).sum(1) + np.min((known**2).sum(1) - 2 * (z @ white) @ known.T, axis=1)


def neighbours(x: Array) -> Callable[[Array], Array]:
    """Minus the cosine of the angle to the k-th nearest training sample (Sun et al. 2022)."""
    known = x / np.linalg.norm(x, axis=1, keepdims=True)
    return lambda z: (
        -np.partition(z / np.linalg.norm(z, axis=1, keepdims=True) @ known.T, -NEIGHBOURS, axis=1)[:, -NEIGHBOURS]
    )


def of_logits(logits: Array) -> Parts:
    """By name, larger is less familiar, from logits (M, N, C)."""
    p = softmax(logits).mean(axis=0)
    return {
        "energy": energy(Scores(logits, True)),
        "largest logit": -logits.max(axis=2).mean(axis=0),
        "largest probability": -p.max(axis=1),
        "log probability": -np.log(p.max(axis=1)),
        "entropy": -(p * np.log(np.maximum(p, 1e-30))).sum(axis=1),
    }


def of_features(x: Array, y: Array) -> Callable[[Array], Parts]:
    """By name, larger is less familiar, from features."""
    each: dict[str, Callable[[Array], Array]] = {"distance": FeatureDistance.fit(x, y)}
    each |= {"Mahalanobis": mahalanobis(x, y), "neighbours": neighbours(x)}
    return lambda z: {name: score(z) for name, score in each.items()}


def combined(scores: dict[str, Parts], weights: Array) -> dict[str, Parts]:
    """Scores by name and part with all sums of two or three, from the weights of held-out samples."""
    scaled, tails = {}, {}
    for name, parts in scores.items():
        held = parts["held-out"]
        centre = np.average(held, weights=weights)
        scale = np.sqrt(np.average((held - centre) ** 2, weights=weights))
        scaled[name] = {part: (each - centre) / scale for part, each in parts.items()}
        order = np.argsort(held)
        below = np.concatenate([[0], np.cumsum(weights[order])]) / weights.sum()
        tails[name] = {
            part: -np.log(1 - below[np.searchsorted(held[order], each, side="left")] + 1 / len(held))
            for part, each in parts.items()
        }
    found = dict(scores)
    logits = ("energy", "largest logit", "largest probability", "log probability", "entropy")
    pairs = [*combinations(logits[:4], 2), *((a, b) for a in ("distance", "neighbours") for b in logits)]
    for a, b in pairs:
        found[f"{a} + {b}"] = {part: scaled[a][part] + scaled[b][part] for part in scores[a]}
        found[f"{a} * {b}"] = {part: tails[a][part] + tails[b][part] for part in scores[a]}
    for b in logits:
        three = ("distance", "neighbours", b)
        found[" + ".join(three)] = {part: sum(scaled[name][part] for name in three) for part in scores[b]}
    return found


# --- choice ---------------------------------------------------------------------------------------------------------


def images(folder: Path) -> None:
    """Noise, smooth blobs of colour, and digits, 150 of each as PNG files."""
    from PIL import Image

    rng, count = np.random.default_rng(1), 150
    smooth = np.stack([gaussian_filter(rng.normal(size=(32, 32, 3)), (6, 6, 0)) for _ in range(count)])
    smooth *= rng.uniform(5, 60, (count, 1, 1, 1)) / smooth.std(axis=(1, 2), keepdims=True)
    pixels = {
        "noise": rng.integers(0, 256, (count, 32, 32, 3)),
        "blobs": np.clip(rng.uniform(60, 200, (count, 1, 1, 3)) + smooth, 0, 255),
        "digits": np.repeat(np.kron(load_digits().images[:count], np.ones((4, 4)))[..., None] * 255 / 16, 3, axis=3),
    }
    for name, each in pixels.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i, image in enumerate(each.astype(np.uint8)):
            Image.fromarray(image).save(folder / name / f"{i:03}.png")


def split(x: Array, y: Array, left: Array, seed: int) -> tuple[Array, Array, Array, Array, Array, Array]:
    """Training samples, held-out samples and left-out samples with their classes, training classes counted from 0."""
    inside = ~np.isin(y, left)
    kept, held = hold_out_indices(y[inside], 0.2, seed)
    codes = np.unique(y[inside], return_inverse=True)[1]
    order = np.argsort(-np.bincount(codes), kind="stable").argsort()[codes]  # by falling frequency
    return x[inside][kept], order[kept], x[inside][held], order[held], x[~inside], y[~inside]


def aurocs(scores: dict[str, Parts], held_y: Array, weights: Parts) -> dict[tuple[str, str], float]:
    """By score and part, of held-out samples against the part, classes counting equally."""
    own, found = _equal(held_y), {}
    for name, parts in combined(scores, own).items():
        for part in parts.keys() - {"held-out"}:
            truth = np.repeat([0, 1], [len(own), len(parts[part])])
            values = np.concatenate([parts["held-out"], parts[part]])
            found[name, part] = roc_auc_score(truth, values, sample_weight=np.concatenate([own, weights[part]]))
    return found


def _equal(y: Array) -> Array:
    names, codes = np.unique(y, return_inverse=True)
    return np.asarray(len(y) / len(names) / np.bincount(codes)[codes])


def features_task(file: Path, other: Path, simulated: Path, kind: str, seed: int) -> dict[tuple[str, str], float]:
    """A model of features without some classes: AUROC by score and family."""
    with np.load(file) as found:
        x, y = found["train_x"].astype(np.float32), found["train_y"].astype(int)
    rng, names = np.random.default_rng(seed), np.unique(y)
    left = rng.permutation(names)[: len(names) // 5] if kind == "random" else np.flatnonzero(
        np.isin(SUPERCLASS, rng.permutation(20)[:4])
    )  # fmt: skip
    train_x, train_y, held_x, held_y, left_x, left_y = split(x, y, left, seed)
    with np.load(other) as found:
        rows = rng.permutation(len(found["train_x"]))[:1000]
        other_x, other_y = found["train_x"][rows].astype(np.float32), found["train_y"][rows]
    with np.load(simulated) as found:
        drawn, names = found["x"].astype(np.float32), found["y"].astype(str)
    parts = {"held-out": held_x, f"{file.stem}, {kind} classes left out": left_x}
    parts |= {f"{file.stem}, {other.stem}": other_x} | {
        f"{file.stem}, {n}": drawn[names == n] for n in np.unique(names)
    }
    weights = {part: np.ones(len(each)) for part, each in parts.items()}
    weights[f"{file.stem}, {kind} classes left out"] = _equal(left_y)
    weights[f"{file.stem}, {other.stem}"] = _equal(other_y)
    with TemporaryDirectory() as folder:
        model = rfdlc.train({"train_x": train_x, "train_y": train_y}, out=f"{folder}/run", seed=seed, refit=False)
        logits = {part: model.predict(each).scores.values for part, each in parts.items()}
    return aurocs(_scores(train_x, train_y, parts, logits), held_y, weights)


def table_task(name: str, seed: int) -> dict[tuple[str, str], float]:
    """Logistic regression without some classes: two of the digits, which are made long-tailed, or one of three."""
    x, y = TABLES[name](return_X_y=True)
    left = np.array([seed % 3])
    if name == "digits":
        y, left = np.random.default_rng(seed).permutation(10)[y], np.array([8, 9])
        rows = np.concatenate([np.flatnonzero(y > 7), subset(np.where(y > 7, -1, y), profile_counts(170, 8, 20), seed)])
        x, y = x[rows], y[rows]
    train_x, train_y, held_x, held_y, left_x, left_y = split(x, y, left, seed)
    scaler = StandardScaler().fit(train_x)
    parts = {"held-out": scaler.transform(held_x), name: scaler.transform(left_x)}
    model = LogisticRegression(max_iter=500).fit(known := scaler.transform(train_x), train_y)
    raw = {part: model.decision_function(each) for part, each in parts.items()}
    logits = {part: (z if z.ndim == 2 else np.stack([-z, z], axis=1) / 2)[None] for part, z in raw.items()}
    return aurocs(_scores(known, train_y, parts, logits), held_y, {name: _equal(left_y)})


def _scores(x: Array, y: Array, parts: Parts, logits: Parts) -> dict[str, Parts]:
    measure, found = of_features(x, y), defaultdict[str, Parts](dict)
    for part, each in parts.items():
        for name, value in (of_logits(logits[part]) | measure(each)).items():
            found[name][part] = value
    return found


def choice_rows(files: list[Path], simulated: Path, seeds: list[int], workers: int) -> Iterator[dict[str, Any]]:
    """Mean AUROC by score and family; each family counts equally in the mean, each part in its family."""
    cifar, caltech = files
    tasks: list[tuple[Any, ...]] = [(features_task, cifar, caltech, simulated, kind, seed)
                                    for kind in ("random", "super") for seed in seeds]  # fmt: skip
    tasks += [(features_task, caltech, cifar, simulated, "random", seed) for seed in seeds]
    tasks += [(table_task, name, seed) for name in TABLES for seed in range(6 if name == "digits" else 3)]
    values = defaultdict[tuple[str, str], list[float]](list)
    for each in in_parallel(_run, [(task,) for task in tasks], workers):
        for key, value in each.items():
            values[key].append(value)
    known = sorted({part for _, part in values})
    families = {"tables": [part for part in known if part in TABLES]}
    for part in [part for part in known if part not in TABLES]:
        what = part.split(", ", 1)[1]
        what = "simulated images" if what in ("noise", "blobs", "digits") else what
        families.setdefault(
            what if "left out" in what or what == "simulated images" else "the other data set", []
        ).append(part)
    rows = []
    for name in {score: None for score, _ in values}:
        means = {family: np.mean([np.mean(values[name, part]) for part in parts]) for family, parts in families.items()}
        own = "features" if any(w in name for w in ("distance", "neighbours", "Mahalanobis")) else "logits"
        rows.append({"score": name, "input": own, "family": "mean", "auroc": np.mean(list(means.values())),
                     "deviation": "", "tasks": len(tasks)})  # fmt: skip
        rows += [
            {"score": name, "input": own, "family": family, "auroc": means[family],
             "deviation": f"{np.mean([np.std(values[name, part]) for part in parts]):.4f}",
             "tasks": len(values[name, parts[0]])}
            for family, parts in families.items()
        ]  # fmt: skip
    rows.sort(key=lambda row: (row["family"] != "mean", row["family"], -row["auroc"]))
    return ({**row, "auroc": f"{row['auroc']:.4f}"} for row in rows)


def _run(task: tuple[Any, ...]) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = task[0](*task[1:])
    return found


# --- test -----------------------------------------------------------------------------------------------------------


def test_rows(file: Path, parts: Parts, same_y: Array, seed: int) -> list[dict[str, Any]]:
    """All scores of a model that one split of the training samples gives."""
    with np.load(file) as found:
        x, y = found["train_x"].astype(np.float32), found["train_y"].astype(int)
    kept, held = hold_out_indices(y, 0.1, seed)
    classes = rfdlc.Classes.from_counts(np.bincount(y))
    parts = {"held-out": x[held], **parts}
    with TemporaryDirectory() as folder:
        model = rfdlc.train({"train_x": x[kept], "train_y": y[kept]}, out=f"{folder}/run", seed=seed)
        logits = {part: model.predict(each).scores.values for part, each in parts.items()}
    likeliest = {part: softmax(logits[part]).mean(axis=0).argmax(axis=1) for part in ("held-out", "same")}
    scores, rows = _scores(x[kept], y[kept], parts, logits), []
    for name in ("distance", "energy", "largest probability", "Mahalanobis"):
        each = scores[name]
        by_region = Unfamiliar.fit(each["held-out"], likeliest["held-out"], y[held], classes, false_alarm=RATE)
        alarms = {"by region": by_region.above(each["same"], likeliest["same"], classes)}
        alarms["one"] = each["same"] > np.quantile(each["held-out"], 1 - RATE)
        for kind in alarms if name in ("distance", "energy") else ("one",):
            head, tail = (alarms[kind][np.isin(same_y, classes.thirds[r])].mean() for r in ("head", "tail"))
            for other in [part for part in parts if part not in ("held-out", "same")]:
                truth = np.repeat([0, 1], [len(each["same"]), len(each[other])])
                auroc = roc_auc_score(truth, np.concatenate([each["same"], each[other]]))
                numbers = (auroc, alarms[kind].mean(), head, tail, tail / max(head, 1e-9))
                texts = [f"{value:.4f}" for value in numbers]
                rows.append(dict(zip(COLUMNS, (seed, name, kind, other, *texts), strict=True)))
    return rows


def summary(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of all seeds, then their means and standard deviations."""
    yield from rows
    keys = ("score", "thresholds", "other")
    for key in dict.fromkeys(tuple(row[name] for name in keys) for row in rows):
        own = [row for row in rows if tuple(row[name] for name in keys) == key]
        for what, function in (("mean", np.mean), ("deviation", np.std)):
            numbers = {name: f"{function([float(row[name]) for row in own]):.4f}" for name in COLUMNS[4:]}
            yield {"seed": what, **dict(zip(keys, key, strict=True)), **numbers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    choose, test, simulate = (parts.add_parser(name) for name in ("choose", "test", "images"))
    simulate.add_argument("folder", type=Path)
    choose.add_argument("files", type=Path, nargs=2, help="CIFAR100-LT, and another long-tailed data set")
    choose.add_argument("--simulated", type=Path, required=True)
    test.add_argument("file", type=Path, help="CIFAR100-LT")
    test.add_argument("--same", type=Path, required=True, help="test samples of the same classes")
    test.add_argument("--others", type=Path, nargs="+", required=True, help="test samples of other data sets")
    for part in (choose, test):
        part.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
        part.add_argument("--workers", type=int, default=1)
        part.add_argument("--commit", default="", help="where there is no git")
    options = parser.parse_args()
    if options.part == "images":
        images(options.folder)
    elif options.part == "choose":
        rows = choice_rows(options.files, options.simulated, options.seeds, options.workers)
        write("unfamiliar-choice", rows, PACKAGES, options.commit, CHOICE)
    else:
        samples = {"same": options.same} | {file.stem: file for file in options.others}
        loaded = {name: np.load(file) for name, file in samples.items()}
        features = {name: found["x"].astype(np.float32) for name, found in loaded.items()}
        own = loaded["same"]["y"].astype(int)
        tasks = [(options.file, features, own, seed) for seed in options.seeds]
        found = [row for each in in_parallel(test_rows, tasks, options.workers) for row in each]
        write("unfamiliar", summary(found), PACKAGES, options.commit, COLUMNS)


if __name__ == "__main__":
    main()

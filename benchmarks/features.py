"""Features of a network: the default training against linear probes and class means, on
a CPU.

    python benchmarks/features.py compare cifar100-lt.npz caltech101-lt.npz
        writes results/features.csv
    python benchmarks/features.py select cifar100-lt.npz caltech101-lt.npz
        writes results/features-selection.csv
    python benchmarks/features.py calibrate cifar100-lt.npz caltech101-lt.npz
        writes results/features-calibration.csv
    python benchmarks/features.py kinds
        writes results/features-kinds.csv
    python benchmarks/features.py folds
        writes results/features-folds.csv
    taskset -c 0,1 python benchmarks/features.py time
        writes results/features-time.csv

A file holds train_x, train_y, test_x, test_y. `rfdlc embed` makes such features of
images; ours are those of EfficientNet-Lite0 (ImageNet weights, the mean over pixels of
its last layer, 1,280 numbers) at 112 pixels for CIFAR100-LT (imbalance factor 100) and
at 160 pixels for Caltech101-LT. Options: --workers N, --seeds 0 1 2, and of select
--only SETTING.

compare: accuracy on the balanced test split, by region; ECE and mean utility (1 for the
true class, -1 for a tail sample decided as a more frequent class) after the same
calibration for all. Each rival's regularisation is chosen by cross-validation on the
training data, from a grid that grows until the best is not at its edge, and for class
means, whether features are standardised. Rivals are trained on nine tenths, calibrated
on the tenth, and trained again on all; they are deterministic but for that tenth.
select: settings near the preset's, by three-fold cross-validation of the training data,
as if classes were balanced. calibrate: calibrators of the preset's runs, by three-fold
cross-validation of the training data of the files and of the kinds below; for the prior
of the training data, and as if classes were balanced. Difference and error: log loss
minus that of a temperature, and its standard error over samples (for a uniform prior,
over classes). kinds: features that nobody tuned on, generated or from data that comes
with scikit-learn; balanced test samples. folds: the same features, calibrated by 3, 5
and 10 folds: log loss, ECE, and the share of test samples that are flagged as
unfamiliar at a rate of 5%. Classes count alike. time: the default training on 10,000
samples of 1,280 features and 100 classes, which must take at most 60 s.
"""

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from sklearn.datasets import load_breast_cancer, load_digits, make_classification
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.preprocessing import PolynomialFeatures

import rfdlc
from recording import write
from rfdlc import Dataset, Decider, Utility, evaluate
from rfdlc.data.dataset import Normalisation
from rfdlc.data.longtail import hold_out_indices, profile_counts, subset
from rfdlc.probabilities.scores import softmax
from rfdlc.training.trainer import balanced_positions

Array = NDArray[Any]
Fitted = Callable[
    [Array], Array
]  # features -> logits (N, C) that carry a uniform class prior
FOLDS, STRENGTHS, FACTOR = (
    3,
    (1e-3, 3.16e-3, 1e-2, 3.16e-2),
    3.16,
)  # of rivals: C, and by how much grids grow
PRESET: dict[str, Any] = {"preset": "features", "target_prior": "uniform"}
CHOICES: dict[str, list[Any]] = {
    "whiten": [0.0, 0.4],
    "head": ["cosine", "mixed"],
    "head_scale": [15, 20, 30, 40],
    "dropout": [0.0, 0.2, 0.3, 0.5],
    "mixup": [0.0, 0.2, 0.3, 0.4],
    "epochs": [5, 10, 20],
    "learning_rate": [0.03, 0.1, 0.3],
    "weight_decay": [0.0, 5e-4, 5e-3],
    "batch_size": [64, 128, 256],
    "repulsion": ["none", "head"],
    "head_init": ["class-means", "random"],
    "particles": [1, 2, 3, 4, 5],
    "calibration": ["temperature", "prior-corrected-temperature", "auto"],
    "calibration_folds": [1, 3],
}
COMPARED = (
    "data",
    "model",
    "seed",
    "setting",
    "accuracy",
    "head",
    "med",
    "tail",
    "ece",
    "utility_arg_max",
    "utility_decided",
    "seconds",
)
SELECTED = (
    "data",
    "setting",
    "value",
    "accuracy",
    "tail",
    "nll",
    "ece",
    "utility_decided",
    "seeds",
)
CALIBRATED = (
    "data",
    "samples",
    "classes",
    "target_prior",
    "calibration",
    "nll",
    "difference",
    "error",
    "ece",
    "utility_decided",
    "seeds",
)
TIMED = (
    "samples",
    "features",
    "classes",
    "threads",
    "seed",
    "seconds",
    "of_processors",
    "required",
)
FOLDED = (
    "kind",
    "samples",
    "features",
    "classes",
    "folds",
    "nll",
    "ece",
    "flagged",
    "seconds",
    "seeds",
)
KINDS = (
    "kind",
    "samples",
    "features",
    "classes",
    "model",
    "accuracy",
    "deviation",
    "tail",
    "nll",
    "seconds",
    "seeds",
)


# -- rivals: fit(x, y, classes, strength) -> Fitted, on standardised features


def balanced_logistic(x: Array, y: Array, classes: int, strength: float) -> Fitted:
    model = LogisticRegression(C=strength, class_weight="balanced", max_iter=100).fit(
        x, y
    )
    return lambda new: _spread(model.decision_function(new), model.classes_, classes)


def adjusted_probe(x: Array, y: Array, classes: int, strength: float) -> Fitted:
    """Linear, with the log prior added to its logits in training (Menon et al. 2021)
    and an L2 penalty as above.
    """
    counts = np.maximum(np.bincount(y, minlength=classes), 1)
    inputs, labels = torch.from_numpy(x), torch.from_numpy(y)
    prior = torch.tensor(np.log(counts / counts.sum()), dtype=torch.float32)

    def loss(flat: Array) -> tuple[float, Array]:
        weights = (
            torch.tensor(flat, dtype=torch.float32).view(-1, classes).requires_grad_()
        )
        logits = inputs @ weights[:-1] + weights[-1] + prior
        value = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        total = strength * value + weights[:-1].square().sum() / 2
        return (
            total.item(),
            torch.autograd.grad(total, weights)[0].double().numpy().ravel(),
        )

    start = np.zeros((x.shape[1] + 1) * classes)
    found = minimize(
        loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 100}
    ).x.reshape(-1, classes)
    return lambda new: new @ found[:-1] + found[-1]


def class_means(x: Array, y: Array, classes: int, strength: float) -> Fitted:
    unit = _unit(x)
    means = _unit(np.stack([unit[y == c].sum(0) for c in range(classes)]))
    return lambda new: 30 * _unit(new) @ means.T


def _unit(x: Array) -> Array:
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


def _spread(scores: Array, present: Array, classes: int) -> Array:
    """Scores of scikit-learn as logits of all classes; of two classes it gives one
    column.
    """
    both = np.stack([-scores / 2, scores / 2], 1) if scores.ndim == 1 else scores
    logits = np.full((len(both), classes), both.min() - 30.0)
    logits[:, present] = both
    return logits


RIVALS: dict[str, tuple[Callable[..., Fitted], tuple[float, ...]]] = {
    "balanced logistic regression": (balanced_logistic, STRENGTHS),
    "logit-adjusted linear probe": (adjusted_probe, STRENGTHS),
    "cosine class means": (class_means, (1.0,)),
}


def scaled(data: Dataset, raw: bool = False) -> tuple[Callable[[Array], Array], int]:
    """Features as rivals see them, raw or standardised, and the number of classes."""
    found = Normalisation.of(data.train.array)
    mean, std = (
        (np.zeros(1), np.ones(1))
        if raw
        else (np.array(found.mean), np.array(found.std))
    )
    return lambda x: ((x - mean) / std).astype(np.float32), len(data.classes)


def cross_validated(
    data: Dataset, rival: str, raw: bool, strength: float, fold: int
) -> float:
    """Balanced accuracy on a fold of the training data; a class with fewer samples than
    folds is in some of them.
    """
    prepare, classes = scaled(data, raw)
    x, y = prepare(data.train.array), data.train.labels
    kept, held = list(StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(x, y))[
        fold
    ]
    logits = RIVALS[rival][0](x[kept], y[kept], classes, strength)(x[held])
    return _balanced(logits, y[held])


def fit_rival(
    data: Dataset, rival: str, raw: bool, strength: float, seed: int
) -> dict[str, Any]:
    """Calibrated on a held-out tenth, then trained on all."""
    began, (prepare, classes), fit = (
        time.perf_counter(),
        scaled(data, raw),
        RIVALS[rival][0],
    )
    x, y = prepare(data.train.array), data.train.labels
    kept, held = hold_out_indices(y, 0.1, seed)
    held_out = fit(x[kept], y[kept], classes, strength)(x[held])
    fitted = fit(x, y, classes, strength)
    seconds = time.perf_counter() - began
    known: dict[str, Any] = {
        "calibration": "temperature",
        "train_prior": "uniform",
        "target_prior": "uniform",
    }
    decider = Decider(Utility.one_hot(data.classes), **known).fit(
        held_out, y[held], logits=True, balanced=True
    )
    assert data.test is not None
    found = scores(data, decider, fitted(prepare(data.test.array))[None])
    return {
        "model": rival,
        "seed": seed,
        "setting": f"C {strength:g}, {'raw' if raw else 'standardised'}",
        **found,
        "seconds": f"{seconds:.1f}",
    }


def fit_ours(data: Dataset, seed: int, **settings: Any) -> dict[str, Any]:
    began = time.perf_counter()
    with TemporaryDirectory() as folder:
        model = rfdlc.train(
            data, out=Path(folder) / "run", seed=seed, **{**PRESET, **settings}
        )
        logits = rfdlc.Predictions.load(model.path).scores.values
    seconds = time.perf_counter() - began
    return {
        "model": "rfdlc",
        "seed": seed,
        "setting": "default",
        **scores(data, model.decider, logits),
        "seconds": f"{seconds:.1f}",
    }


def scores(data: Dataset, decider: Decider, logits: Array) -> dict[str, Any]:
    assert data.test is not None
    utility, labels = Utility.tail_sensitive(data.classes), data.test.labels
    likely, decided = (
        evaluate(
            logits,
            labels,
            decider=decider.replace(utility=utility, rule=rule),
            logits=True,
        ).values
        for rule in ("argmax", "expected-utility")
    )
    percent = {"accuracy": likely["accuracy"], **likely["accuracy_by_region"]}
    return {
        **{name: f"{100 * value:.2f}" for name, value in percent.items()},
        "ece": f"{100 * likely['ece']:.2f}",
        "utility_arg_max": f"{likely['mean_utility']:.4f}",
        "utility_decided": f"{decided['mean_utility']:.4f}",
    }


def compare(options: argparse.Namespace, pool: Any) -> Iterator[dict[str, Any]]:
    for path in options.files:
        data = rfdlc.load(path)
        ours = [pool.submit(fit_ours, data, seed) for seed in options.seeds]
        with ThreadPoolExecutor(len(RIVALS)) as threads:
            best = list(threads.map(partial(chosen, data, pool), RIVALS))
        rivals = [
            pool.submit(fit_rival, data, *key, seed)
            for key in best
            for seed in options.seeds
        ]
        rows = [{"data": data.name, **job.result()} for job in (*ours, *rivals)]
        yield from rows
        for model in ("rfdlc", *RIVALS):
            yield from _over_seeds([row for row in rows if row["model"] == model])


def _over_seeds(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for name, function in (
        ("mean", np.mean),
        ("deviation", partial(np.std, ddof=1 if len(rows) > 1 else 0)),
    ):
        found = {
            key: function([float(row[key]) for row in rows]) for key in COMPARED[4:]
        }
        yield {
            **rows[0],
            "seed": name,
            **{key: f"{value:.4f}" for key, value in found.items()},
        }


def chosen(data: Dataset, pool: Any, rival: str) -> tuple[str, bool, float]:
    """A rival with the scaling and the strength of the best cross-validated balanced
    accuracy.
    """
    found, (fit, grid) = dict[tuple[bool, float], float](), RIVALS[rival]
    wanted = list(
        product((False, True) if fit is class_means else (False,), grid)
    )  # probes: standardised
    while wanted:
        jobs = {
            key: [
                pool.submit(cross_validated, data, rival, *key, i) for i in range(FOLDS)
            ]
            for key in wanted
        }
        found |= {
            key: float(np.mean([job.result() for job in own]))
            for key, own in jobs.items()
        }
        raw, best = max(found, key=lambda key: found[key])
        edges = {min(found)[1]: best / FACTOR, max(found)[1]: best * FACTOR}
        wanted = [(raw, edges[best])] if best in edges and len(grid) > 1 else []
    return rival, raw, best


# -- what was chosen for the preset, on held-out training data


def held_out_score(
    data: Dataset, seed: int, settings: dict[str, Any]
) -> tuple[float, ...]:
    """Metrics of out-of-fold predictions as if balanced, calibrated only where
    calibrations are compared.
    """
    labels, probabilities = (
        data.train.labels,
        np.empty((len(data.train), len(data.classes))),
    )
    calibrated = {"calibration", "calibration_folds"} & set(settings)
    plain = {} if calibrated else {"hold_out": 0, "refit": False, "calibration": "none"}
    for kept, held in StratifiedKFold(FOLDS, shuffle=True, random_state=seed).split(
        labels, labels
    ):
        parts = data.held_apart(kept, held)
        with TemporaryDirectory() as folder:
            given: dict[str, Any] = {**PRESET, **plain, **settings, "seed": seed}
            model = rfdlc.train(
                replace(parts, val=None, test=parts.val),
                out=Path(folder) / "run",
                **given,
            )
            probabilities[held] = model.decider.probabilities(
                rfdlc.Predictions.load(model.path)
            )
    return held_out_metrics(data, probabilities)


def held_out_metrics(data: Dataset, probabilities: Array) -> tuple[float, ...]:
    labels = data.train.labels
    even, decider = (
        balanced_positions(labels),
        Decider(Utility.tail_sensitive(data.classes), calibration=None),
    )
    found = evaluate(probabilities[even], labels[even], decider=decider).values
    return (
        *_metrics(np.log(probabilities), labels, _tail(data)),
        100 * found["ece"],
        found["mean_utility"],
    )


def _metrics(logits: Array, y: Array, is_tail: Array) -> tuple[float, float, float]:
    nll = -np.log(np.maximum(softmax(logits)[np.arange(len(y)), y], 1e-12))
    tail = is_tail[y]
    return (
        _balanced(logits, y),
        _balanced(logits[tail], y[tail]) if tail.any() else np.nan,
        _class_mean(nll, y),
    )


def _tail(data: Dataset) -> Array:
    return np.isin(np.arange(len(data.classes)), data.classes.thirds["tail"])


def _balanced(logits: Array, y: Array) -> float:
    return 100 * _class_mean(logits.argmax(1) == y, y)


def _class_mean(values: Array, y: Array) -> float:
    return float(np.mean([values[y == c].mean() for c in np.unique(y)]))


def select(options: argparse.Namespace, pool: Any) -> Iterator[dict[str, Any]]:
    for path in options.files:
        data = rfdlc.load(path)
        tried = {
            name: values
            for name, values in CHOICES.items()
            if options.only in ("", name)
        }
        chosen = [{name: value} for name, values in tried.items() for value in values]
        jobs = [
            [pool.submit(held_out_score, data, seed, changed) for seed in options.seeds]
            for changed in chosen
        ]
        for changed, own in zip(chosen, jobs, strict=True):
            accuracy, tail, nll, ece, utility = np.mean(
                [job.result() for job in own], 0
            )
            ((name, value),) = changed.items()
            yield {
                "data": data.name,
                "setting": name,
                "value": value,
                "accuracy": f"{accuracy:.2f}",
                "tail": f"{tail:.2f}",
                "nll": f"{nll:.3f}",
                "ece": f"{ece:.2f}",
                "utility_decided": f"{utility:.4f}",
                "seeds": len(own),
            }


# -- calibrators, on held-out training data


def by_calibrator(
    source: str, seed: int
) -> dict[tuple[str, str], tuple[Array, float, float]]:
    """By target prior and calibrator: log loss of each out-of-fold sample or class, ECE
    and mean utility.
    """
    warnings.simplefilter("ignore")
    data = _source(source, seed)
    labels, found = data.train.labels, dict[tuple[str, str], Array]()
    known = np.zeros(
        len(labels), dtype=bool
    )  # a class of a single sample is not in the training part of its fold
    for kept, held in StratifiedKFold(FOLDS, shuffle=True, random_state=seed).split(
        labels, labels
    ):
        held = held[np.isin(labels[held], labels[kept])]
        parts, known[held] = data.held_apart(kept, held), True
        with TemporaryDirectory() as folder:
            given: dict[str, Any] = {**PRESET, "seed": seed}
            model = rfdlc.train(
                replace(parts, val=None, test=parts.val),
                out=Path(folder) / "run",
                **given,
            )
            out_of_fold = rfdlc.Predictions.load(model.path / "held-out.npz")
            new = rfdlc.Predictions.load(model.path)
        for key in product(("train", "uniform"), CHOICES["calibration"]):
            fresh = model.decider.replace(target_prior=key[0], calibration=key[1])
            decider = fresh.fit(out_of_fold, balanced=key[0] == "uniform")
            found.setdefault(key, np.zeros((len(labels), len(data.classes))))[held] = (
                decider.probabilities(new)
            )
    return {
        key: _judged(data, p[known], labels[known], key[0] == "uniform")
        for key, p in found.items()
    }


def _judged(
    data: Dataset, p: Array, y: Array, even: bool
) -> tuple[Array, float, float]:
    nll = -np.log(np.maximum(p[np.arange(len(y)), y], 1e-12))
    rows = balanced_positions(y) if even else np.arange(len(y))
    decider = Decider(Utility.tail_sensitive(data.classes), calibration=None)
    found = evaluate(p[rows], y[rows], decider=decider).values
    each = np.array([nll[y == c].mean() for c in np.unique(y)]) if even else nll
    return each, 100 * found["ece"], found["mean_utility"]


def _source(source: str, seed: int) -> Dataset:
    return rfdlc.load(source) if source.endswith(".npz") else of_kind(source, seed)


def calibrate(options: argparse.Namespace, pool: Any) -> Iterator[dict[str, Any]]:
    sources = [
        *options.files,
        *(kind for kind in kinds(0) if kind != "1,500 classes"),
    ]  # the largest by far
    jobs = [
        [pool.submit(by_calibrator, source, seed) for seed in options.seeds]
        for source in sources
    ]
    for source, own in zip(sources, jobs, strict=True):
        data, results = _source(source, 0), [job.result() for job in own]
        for prior, name in results[0]:
            nll, plain = (
                np.mean([r[prior, key][0] for r in results], 0)
                for key in (name, "temperature")
            )
            ece, utility = np.mean([r[prior, name][1:] for r in results], 0)
            yield {
                "data": data.name if source.endswith(".npz") else source,
                "samples": len(data.train),
                "classes": len(data.classes),
                "target_prior": prior,
                "calibration": name,
                "nll": f"{nll.mean():.4f}",
                "difference": f"{(nll - plain).mean():.4f}",
                "error": f"{(nll - plain).std(ddof=1) / len(nll) ** 0.5:.4f}",
                "ece": f"{ece:.2f}",
                "utility_decided": f"{utility:.4f}",
                "seeds": len(own),
            }


# -- other kinds of features


def gaussians(
    rng: np.random.Generator, classes: int, width: int, each: int, apart: float
) -> tuple[Array, Array]:
    labels = np.repeat(np.arange(classes), each)
    return (
        rng.normal(0, apart, (classes, width))[labels]
        + rng.normal(0, 1, (len(labels), width)),
        labels,
    )


def correlated(rng: np.random.Generator) -> tuple[Array, Array]:
    x, y = gaussians(rng, 10, 200, 300, 0.0)
    mixing = rng.normal(0, 1, (200, 200)) * np.geomspace(1, 0.03, 200)
    return rng.normal(0, 0.25, (10, 200))[y] + 6 * x @ mixing.T / 200**0.5, y


def counted(rng: np.random.Generator) -> tuple[Array, Array]:
    topics, labels = rng.dirichlet(np.full(500, 0.05), 8), np.repeat(np.arange(8), 200)
    return rng.poisson(50 * (0.3 * topics[labels] + 0.7 / 500)), labels


def kinds(seed: int) -> dict[str, tuple[Array, Array, float]]:
    """Features, labels, and the imbalance factor of the training samples."""
    rng = np.random.default_rng(seed)
    pixels, digit = load_digits(return_X_y=True)
    tumours, benign = load_breast_cancer(return_X_y=True)
    projected = pixels @ rng.normal(0, 0.125, (64, 512))
    curved = make_classification(
        3000,
        200,
        n_informative=15,
        n_redundant=15,
        n_classes=4,
        n_clusters_per_class=2,
        class_sep=1.5,
        random_state=seed,
    )
    return {
        "digits, 64 pixels": (pixels, digit, 20),
        "digits, random projections": (projected, digit, 20),
        "digits, nonnegative random features": (
            np.maximum(projected - projected.mean(0), 0),
            digit,
            20,
        ),
        "digits, projections with offset and scales": (
            (projected + 300) * np.geomspace(0.01, 100, 512),
            digit,
            20,
        ),
        "tumours, products of measurements": (
            PolynomialFeatures(2).fit_transform(tumours)[:, 1:],
            benign,
            10,
        ),
        "two Gaussian classes": (*gaussians(rng, 2, 128, 1500, 0.12), 100),
        "correlated Gaussian classes": (*correlated(rng), 50),
        "two clusters per class": (*curved, 20),
        "counts of words": (*counted(rng), 20),
        "50 classes, down to a single sample": (*gaussians(rng, 50, 256, 40, 0.35), 28),
        "1,500 classes": (*gaussians(rng, 1500, 128, 12, 0.6), 8),
    }


def of_kind(kind: str, seed: int) -> Dataset:
    """Balanced test samples, a third of the smallest class each; training samples with
    an exponential tail.
    """
    x, y, factor = kinds(seed)[kind]
    test = subset(y, np.full(y.max() + 1, int(np.bincount(y).min() * 0.3)), seed)
    rest = np.setdiff1d(np.arange(len(y)), test)
    train = rest[
        subset(
            y[rest],
            profile_counts(int(np.bincount(y[rest]).min()), y.max() + 1, factor),
            seed,
        )
    ]
    arrays = {
        "train_x": x[train],
        "train_y": y[train],
        "test_x": x[test],
        "test_y": y[test],
    }
    return rfdlc.load(
        {
            name: a.astype(np.float32 if name.endswith("x") else int)
            for name, a in arrays.items()
        }
    )


def one_kind(kind: str, seed: int, model: str) -> tuple[Any, ...]:
    """Shape, metrics on the test samples, and seconds."""
    warnings.simplefilter("ignore")
    data, began = of_kind(kind, seed), time.perf_counter()
    assert data.test is not None
    if model == "rfdlc":
        with TemporaryDirectory() as folder:
            found = rfdlc.train(
                data, out=Path(folder) / "run", target_prior="uniform", seed=seed
            )
            logits = np.log(
                np.asarray(
                    found.decider.probabilities(rfdlc.Predictions.load(found.path))
                )
            )
    else:
        fit, strengths = RIVALS[model]
        prepare, classes = scaled(data)
        strengths = (
            (0.1,) if classes > 1000 else (1e-3, 1e-2, 1e-1)[: len(strengths)]
        )  # would take an hour
        scored = partial(cross_validated, data, model, False)
        best = max(
            strengths,
            key=lambda C: np.mean(
                [scored(C, i) for i in range(FOLDS if len(strengths) > 1 else 0)]
            ),
        )
        logits = fit(prepare(data.train.array), data.train.labels, classes, best)(
            prepare(data.test.array)
        )
    metrics = _metrics(logits, data.test.labels, _tail(data))
    return (
        len(data.train),
        *data.input_shape,
        len(data.classes),
        *metrics,
        time.perf_counter() - began,
    )


def all_kinds(options: argparse.Namespace, pool: Any) -> Iterator[dict[str, Any]]:
    pairs = list(
        product(
            kinds(0), ("rfdlc", "balanced logistic regression", "cosine class means")
        )
    )
    jobs = [
        [pool.submit(one_kind, *pair[:1], seed, pair[1]) for seed in options.seeds]
        for pair in pairs
    ]
    for (kind, model), own in zip(pairs, jobs, strict=True):
        found = np.array([job.result() for job in own])
        samples, features, classes, accuracy, tail, nll, seconds = found.mean(0)
        yield {
            "kind": kind,
            "samples": int(samples),
            "features": int(features),
            "classes": int(classes),
            "model": model,
            "accuracy": f"{accuracy:.2f}",
            "deviation": f"{found[:, 3].std(ddof=1) if len(found) > 1 else 0:.2f}",
            "tail": f"{tail:.2f}",
            "nll": f"{nll:.3f}",
            "seconds": f"{seconds:.1f}",
            "seeds": len(own),
        }


def folded(kind: str, seed: int, folds: int) -> tuple[float, ...]:
    """Log loss, ECE, share of known samples that are flagged, and seconds."""
    warnings.simplefilter("ignore")
    data, began = of_kind(kind, seed), time.perf_counter()
    with TemporaryDirectory() as folder:
        model = rfdlc.train(
            data, out=Path(folder) / "run", seed=seed, **PRESET, calibration_folds=folds
        )
        seconds = time.perf_counter() - began
        held, test = (
            rfdlc.Predictions.load(model.path / f"{name}.npz")
            for name in ("held-out", "predictions")
        )
    found, decider = evaluate(test, decider=model.decider), model.decider
    handing = decider.replace(utility=decider.utility.with_abstain(0.3)).fit_unfamiliar(
        held, false_alarm=0.05
    )
    flagged = np.mean(handing.explain(test).reason == "unfamiliar")
    return (
        len(data.train),
        *data.input_shape,
        len(data.classes),
        found.nll,
        found.ece,
        float(flagged),
        seconds,
    )


def by_folds(options: argparse.Namespace, pool: Any) -> Iterator[dict[str, Any]]:
    pairs = list(
        product([kind for kind in kinds(0) if kind != "1,500 classes"], (3, 5, 10))
    )
    jobs = [
        [pool.submit(folded, kind, seed, folds) for seed in options.seeds]
        for kind, folds in pairs
    ]
    for (kind, folds), own in zip(pairs, jobs, strict=True):
        samples, features, classes, nll, ece, flagged, seconds = np.mean(
            [job.result() for job in own], axis=0
        )
        yield {
            "kind": kind,
            "samples": int(samples),
            "features": int(features),
            "classes": int(classes),
            "folds": folds,
            "nll": f"{nll:.4f}",
            "ece": f"{100 * ece:.2f}",
            "flagged": f"{100 * flagged:.2f}",
            "seconds": f"{seconds:.1f}",
            "seeds": len(own),
        }


# -- time


def timed(options: argparse.Namespace, pool: Any) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(options.threads)
    x, y = gaussians(np.random.default_rng(0), 100, 1280, 100, 0.2)
    data = rfdlc.load((x.astype(np.float32), y), test_fraction=0)
    for seed in options.seeds:
        began, used = time.perf_counter(), time.process_time()
        with TemporaryDirectory() as folder:
            rfdlc.train(data, out=Path(folder) / "run", seed=seed)
        seconds, used = time.perf_counter() - began, time.process_time() - used
        yield {
            "samples": len(y),
            "features": 1280,
            "classes": 100,
            "threads": options.threads,
            "seed": seed,
            "seconds": f"{seconds:.1f}",
            "of_processors": f"{used:.1f}",
            "required": "60 or less",
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "mode", choices=["compare", "select", "calibrate", "kinds", "folds", "time"]
    )
    parser.add_argument("files", nargs="*")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--threads", type=int, default=2, help="of the one process that is timed"
    )
    parser.add_argument(
        "--only", choices=["", *CHOICES], default="", help="one setting of select"
    )
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    modes: dict[str, tuple[str, Any, Any]] = {
        "compare": ("features", compare, COMPARED),
        "select": ("features-selection", select, SELECTED),
        "calibrate": ("features-calibration", calibrate, CALIBRATED),
        "kinds": ("features-kinds", all_kinds, KINDS),
        "folds": ("features-folds", by_folds, FOLDED),
        "time": ("features-time", timed, TIMED),
    }
    name, rows, columns = modes[options.mode]
    one_thread = partial(torch.set_num_threads, 1)
    with ProcessPoolExecutor(options.workers, get_context("spawn"), one_thread) as pool:
        print(
            write(
                name,
                rows(options, pool),
                ("rfdlc", "torch", "numpy", "scikit-learn"),
                options.commit,
                columns,
            )
        )


if __name__ == "__main__":
    main()

"""Budgets of hand-overs: shares that are kept, and balanced error beside Chow's rule.

    python benchmarks/budgets.py [--features cifar100-lt.npz]
        writes results/budgets.csv, deferral.csv, deferral.png

shares: ten classes, a long tail that turns around while the stream runs (n = 30,000)
and, in the last case, samples that become harder every 3,000; a budget of 5%. The share
of a batch of 10,000, by prices from 2,000 held-out samples, and of the window of 2,000
of the stream that is furthest from 5%, by fixed prices and by StreamController; utility
kept, as a share of what the best 5% in hindsight bring.

deferral: balanced error if a share of the samples (5, 10, 20, 30%) goes to a person who
is right; 5 seeds. "all": a handed-over sample is right; "kept": error among the samples
of each class that are kept, in the mean over classes. Methods: Chow's rule (smallest
largest probability of the plain model, which is decided by arg max), the same with
probabilities corrected to a uniform prior, and ours: utilities of 1 / prior for the
right class, handed over by worth. Simulated: 20 classes, imbalance 100, test samples of
the same prior. digits: scikit-learn's, imbalance 20, logistic regression; with
--features a file of train_x, train_y, test_x, test_y (features of `rfdlc embed`): its
first 128 principal components, logistic regression. Real test samples are weighted to
the training prior.
"""

import argparse
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_predict

from recording import RESULTS, write
from rfdlc import Classes, Decider, StreamController, Utility
from rfdlc.data.longtail import profile_counts, subset
from rfdlc.decisions.budgets import Worth, assign
from rfdlc.probabilities.scores import softmax

Array = NDArray[Any]
SHARES, SEEDS = (0.05, 0.1, 0.2, 0.3), range(5)
METHODS = {
    "Chow": "Chow's rule",
    "Chow, corrected": "Chow's rule, corrected prior",
    "ours": "by worth",
}


def drawn(
    prior: Array, rng: np.random.Generator, hardness: Any = 1.0
) -> tuple[Array, Array]:
    """Samples whose prior (n, C) may change, and probabilities of a model that keeps
    the first one.
    """
    y = (rng.random((len(prior), 1)) > np.cumsum(prior, axis=1)[:, :-1]).sum(axis=1)
    z = rng.normal(size=prior.shape)
    z[np.arange(len(y)), y] += 2 / np.asarray(hardness)
    return y, softmax(2 * z + np.log(prior[0]))


def shares(seed: int, jumps: bool) -> list[dict[str, Any]]:
    """Distances from a budget of 5%, in points."""
    rng, classes = np.random.default_rng(seed), 10
    first = np.geomspace(1, 0.01, classes)
    first /= first.sum()
    fixed = partial(np.tile, first)
    utility = Utility.one_hot(classes).with_expert("person", confusion=0.97)
    y, p = drawn(fixed((2000, 1)), rng)
    decider = Decider(utility, calibration=None).fit_budget(p, y, budget="5%")
    _, batch = drawn(fixed((10_000, 1)), rng)
    time = np.linspace(0, 1, 30_000)[:, None]
    hard = (
        np.where(np.arange(30_000) // 3000 % 2 == 1, 3.0, 1.0)
        if jumps
        else np.ones(30_000)
    )
    _, stream = drawn((1 - time) * first + time * first[::-1], rng, hard)
    worth = Worth.of(utility, stream).gains[:, 0]
    best = worth[decider.decide(stream, batch=True) == classes].sum()
    handed = {"fixed prices": decider.decide(stream) == classes}
    handed["controller"] = StreamController(decider).decide(stream) == classes
    rows = [
        ("batch of 10,000", (decider.decide(batch, batch=True) == classes).mean(), 1.0)
    ]
    rows += [("prices, same prior", (decider.decide(batch) == classes).mean(), 1.0)]
    for name, each in handed.items():
        total = np.concatenate([[0], np.cumsum(each)])
        windows = (total[2000:] - total[:-2000]) / 2000
        rows.append(
            (
                f"windows of 2,000, {name}",
                windows[np.abs(windows - 0.05).argmax()],
                worth[each].sum() / best,
            )
        )
    case = "drifting prior and jumps" if jumps else "drifting prior"
    return [
        {
            "case": case,
            "seed": seed,
            "what": what,
            "share": f"{share:.4f}",
            "utility_kept": f"{kept:.3f}",
            "points_off": f"{100 * abs(share - 0.05):.2f}",
        }
        for what, share, kept in rows
    ]


def simulated(seed: int) -> tuple[Array, Array, Array, Array]:
    """Probabilities, true classes, weights and prior of 40,000 samples; the
    probabilities are the true posterior.
    """
    prior = np.geomspace(1, 0.01, 20)
    prior /= prior.sum()
    y, p = drawn(np.tile(prior, (40_000, 1)), np.random.default_rng(seed))
    return p, y, np.ones(len(y)), prior


def fitted(
    x: Array, y: Array, test_x: Array, test_y: Array, seed: int
) -> tuple[Array, Array, Array, Array]:
    """Logistic regression, calibrated out of fold; test samples weighted to the
    training prior.
    """
    model, classes = (
        LogisticRegression(C=0.1, max_iter=200),
        Classes.from_counts(np.bincount(y)),
    )
    folds = StratifiedKFold(3, shuffle=True, random_state=seed)
    held = cross_val_predict(model, x, y, cv=folds, method="predict_proba")
    decider = Decider(
        Utility.one_hot(classes), train_prior="train", calibration="temperature"
    ).fit(held, y)
    p = np.asarray(decider.probabilities(model.fit(x, y).predict_proba(test_x)))
    weights = (classes.prior / np.bincount(test_y, minlength=len(classes)))[test_y]
    return p, test_y, weights * len(test_y), classes.prior


def digits(seed: int) -> tuple[Array, Array, Array, Array]:
    """Half of the digits are for testing; the training half is made long-tailed, in a
    random order of the classes.
    """
    x, y = load_digits(return_X_y=True)
    rng = np.random.default_rng(seed)
    x, y = x / 16, rng.permutation(10)[y]
    order = rng.permutation(len(y))
    train, test = order[: len(y) // 2], order[len(y) // 2 :]
    kept = train[subset(y[train], profile_counts(80, 10, 20), seed)]
    return fitted(x[kept], y[kept], x[test], y[test], seed)


def of_features(file: str, seed: int) -> tuple[Array, Array, Array, Array]:
    """A random four fifths of the training samples per seed."""
    with np.load(file) as found:
        x, y, test_x, test_y = (
            found[name] for name in ("train_x", "train_y", "test_x", "test_y")
        )
    folds = StratifiedKFold(5, shuffle=True, random_state=0).split(x, y)
    kept = [rows for rows, _ in folds][seed]
    pca = PCA(128, whiten=True, random_state=0).fit(x[kept].astype(np.float32))
    some, test = (pca.transform(each.astype(np.float32)) for each in (x[kept], test_x))
    return fitted(some, y[kept].astype(int), test, test_y.astype(int), seed)


def deferral(name: str, data: Any, seed: int) -> list[dict[str, Any]]:
    """Balanced errors of the three methods at every share."""
    p, y, weights, prior = data(seed)
    corrected = p / prior
    corrected /= corrected.sum(axis=1, keepdims=True)
    classes = Classes(tuple(map(str, range(len(prior)))))
    inverse = Utility(np.diag(1 / prior), classes).with_expert("person", confusion=1.0)
    ours = Worth.of(inverse, p)
    ranked = {
        "Chow": (p.argmax(axis=1), 1 - p.max(axis=1)),
        "Chow, corrected": (corrected.argmax(axis=1), 1 - corrected.max(axis=1)),
        "ours": (ours.kept, ours.gains[:, 0]),
    }
    rows = []
    for share in SHARES:
        for method, (decided, worth) in ranked.items():
            group = np.ones((1, 1), dtype=bool)
            handed = (
                assign(worth[:, None], group, [share * weights.sum()], weights)[0] >= 0
            )
            wrong, kept, seen = (
                np.bincount(y[rows], minlength=len(prior))
                for rows in (~handed & (decided != y), ~handed, slice(None))
            )
            found = {
                "all": np.mean(wrong / seen),
                "kept": np.mean((wrong / np.maximum(kept, 1))[kept > 0]),
            }
            rows.append(
                {"data": name, "seed": seed, "share": share, "method": method}
                | {
                    f"balanced_error_{kind}": f"{value:.4f}"
                    for kind, value in found.items()
                }
            )
    return rows


def means(
    rows: list[dict[str, Any]], name: str, method: str, kind: str = "all"
) -> list[float]:
    """Balanced error at every share, in the mean over seeds."""
    own = [r for r in rows if (r["data"], r["method"]) == (name, method)]
    errors = [
        [float(r[f"balanced_error_{kind}"]) for r in own if r["share"] == share]
        for share in SHARES
    ]
    return [float(np.mean(each)) for each in errors]


def plot(rows: list[dict[str, Any]], names: list[str]) -> None:
    """Balanced error against the share that is handed over; a handed-over sample is
    right.
    """
    from matplotlib import pyplot

    from rfdlc.style import STYLE

    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(
            1, len(names), figsize=(3.4 * len(names), 3), squeeze=False
        )
        for axis, name in zip(axes[0], names, strict=True):
            for method, label in METHODS.items():
                axis.plot(
                    [100 * s for s in SHARES],
                    means(rows, name, method),
                    marker="o",
                    label=label,
                )
            axis.set(title=name, xlabel="handed over, %", ylim=(0, None))
        axes[0, 0].set_ylabel("balanced error")
        axes[0, 0].legend()
        figure.tight_layout()
        figure.savefig(RESULTS / "deferral.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--features", help="a file of features of a long-tailed data set"
    )
    options = parser.parse_args()
    rows = [
        row for jumps in (False, True) for seed in SEEDS for row in shares(seed, jumps)
    ]
    packages = ("rfdlc", "numpy", "scipy", "scikit-learn")
    write("budgets", rows, packages, columns=tuple(rows[0]))
    data: dict[str, Any] = {"simulated": simulated, "digits": digits}
    if options.features:
        data["CIFAR100-LT features"] = partial(of_features, options.features)
    found = [
        row
        for name, each in data.items()
        for seed in SEEDS
        for row in deferral(name, each, seed)
    ]
    write("deferral", found, packages, columns=tuple(found[0]))
    plot(found, list(data))
    for name in data:
        for method in METHODS:
            for kind in ("all", "kept"):
                print(
                    name,
                    method,
                    kind,
                    *(f"{value:.4f}" for value in means(found, name, method, kind)),
                )


if __name__ == "__main__":
    main()

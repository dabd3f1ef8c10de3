"""Accuracy against time on long-tailed images: training settings of rf-dlc and of its
strongest rivals, in stacks.

    python benchmarks/frontier.py choose cifar100-lt --data DIR
        rows of frontier-choice.csv, on training data
    python benchmarks/frontier.py measure cifar100-lt --data DIR
        rows of frontier.csv, on the test split
    python benchmarks/frontier.py views cifar100-lt --data DIR --keep RUNS
        frontier-views.csv
    python benchmarks/frontier.py traded cifar100-lt --keep RUNS
        frontier-traded.csv
    python benchmarks/frontier.py calibrated cifar10-lt --keep RUNS
        frontier-calibrated.csv
    python benchmarks/frontier.py calibrated cifar10-lt --keep RUNS --data DIR \
        --further NAME MORE
        the same

DIR holds cifar-100-python/ (and cifar-10-batches-py/ for cifar10-lt); any other source
of `rfdlc.load` can take the place of cifar100-lt. `choose` never reads the test split.
A fifth of long-tailed training data has one or two samples of a rare class, too few to
compare settings. So it takes the classes with at least 30 samples, which are
long-tailed as well, evaluates on 25 of each (`--each`), and trains on the others; each
seed holds out other samples, or those of the first where seeds train as one stack
(`--together`). `measure` trains as the presets say, calibrates on a tenth, then trains
on everything, and evaluates the last epoch. The seeds of a row train as one stack
(`choose`: all rows of a seed whose networks agree): seconds are those of the call
divided by its runs, for all trainings of a run, with the start. `--only NAME ...`
selects rows, `--set` adds settings to all, `--seeds` are 0 to 4 by default (0 and 1 for
`choose`). Rows are appended as they come; without git, name the `--commit`.
`leaderboard.py` puts them beside published values. `views`: the runs that `measure
--keep RUNS` left, by arg max of mean logits as most authors decide, with and without
mirror images. `traded`: the same runs with fewer rare samples taken for frequent
classes, for half a point of accuracy as held-out data say. `calibrated`: runs that
`choose --keep RUNS` or `measure --keep RUNS` left, by each calibrator, fitted to their
held-out samples. With `--further`, evaluated on the training samples of another source,
NAME in the folder MORE, that the runs did not train on, such as the paper's profile of
the same images: by class means, among the classes that these have.
"""

import argparse
import csv
import json
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import rfdlc
from recording import RESULTS, append, commit, hardware, versions
from rfdlc.evaluation.bins import bin_of
from rfdlc.probabilities.calibrators import CALIBRATORS
from rfdlc.probabilities.predictions import Predictions
from rfdlc.training._stacking import OWN_IN_STACKS
from rfdlc.training.methods import SMALL_CNN
from rfdlc.training.model import Model
from rfdlc.training.run import Run

STRONG, PENALTIES = "rf-dlc-strong", (-0.25, -1.0)
SIX_VIEWS = {"test_flip": True, "test_shift": 1}  # as STRONG predicts
SHORT = {"augment": "crop-flip", "mixup": 0.1, "learning_rate": 0.2, "warm_refit": True}
ALL_SAMPLES = {"hold_out": 0, "calibration": "none"}
LONG_REFIT = {"shared_stages": 2, "epochs": 170, "refit_epochs": 400}
MORE_HELD_OUT = {
    "shared_stages": 2,
    "epochs": 240,
    "refit_epochs": 400,
    "hold_out": 0.3,
}
LONG_FIRST = {**MORE_HELD_OUT, "epochs": 400, "refit_epochs": 320}
BOTH_LONG = {"shared_stages": 2, "hold_out": 0.4}
Row = tuple[str, dict[str, Any]]  # a method, and settings that differ from its own
CHOICES: dict[str, Row] = {
    "strong": (STRONG, {}),
    "magnitude=0.5": (STRONG, {"magnitude": 0.5}),
    "trivialaugment": (STRONG, {"augment": "trivialaugment"}),
    "autoaugment": (STRONG, {"augment": "autoaugment"}),
    "cutout=0": (STRONG, {"cutout": 0}),
    "mixup=0": (STRONG, {"mixup": 0}),
    "mixup=0.4": (STRONG, {"mixup": 0.4}),
    "weight_decay=5e-4": (STRONG, {"weight_decay": 5e-4}),
    "weight_decay=1.5e-3": (STRONG, {"weight_decay": 1.5e-3}),
    # the step takes the mean loss of the particles: three times the rate is that of a
    # network alone
    "rate=0.3 decay=3.3e-4": (STRONG, {"learning_rate": 0.3, "weight_decay": 3.3e-4}),
    "rate=0.3 decay=6e-4": (STRONG, {"learning_rate": 0.3, "weight_decay": 6e-4}),
    "rate=0.3 decay=1e-3": (STRONG, {"learning_rate": 0.3}),
    "batch=64": (STRONG, {"batch_size": 64}),
    "batch=64 rate=0.05": (STRONG, {"batch_size": 64, "learning_rate": 0.05}),
    "test_flip=false": (STRONG, {"test_flip": False}),
    "combine=mean-probabilities": (STRONG, {"combine": "mean-probabilities"}),
    "tau=0,1,2": (STRONG, {"prior_tau": (0, 1, 2)}),
    "shared_stages=2": (STRONG, {"shared_stages": 2}),
    "repulsion=none": (STRONG, {"repulsion": "none"}),
    "consistency=0.5": (STRONG, {"consistency": 0.5}),
    "balpoe": ("balpoe", SIX_VIEWS),
    "schedule=step": (STRONG, {"schedule": "step", "decay": 0.1}),  # as that of balpoe
    "schedule=step autoaugment": (
        STRONG,
        {"schedule": "step", "decay": 0.1, "augment": "autoaugment"},
    ),
    "all samples": (STRONG, ALL_SAMPLES),
    "warm refit": (
        STRONG,
        {"refit": True, "warm_refit": True},
    ),  # beside "all samples", which is what a refit trains
    "warm refit, small CNN": (  # as short budgets train
        "rf-dlc",
        {
            "refit": True,
            "warm_refit": True,
            "hold_out": 0.2,
            "backbone": "cnn",
            "particles": 1,
            "repulsion": "none",
            "mixup": 0,
            "augment": "crop",
            "calibration": "auto",
            **SMALL_CNN,
        },
    ),
    "refit after three folds": (STRONG, {"refit": True, "calibration_folds": 3}),
    "test_shift=0": (STRONG, {"test_shift": 0}),
    **{
        f"warm refit, {first} + {second} epochs": (
            STRONG,
            {
                "refit": True,
                "warm_refit": True,
                "epochs": first,
                "refit_epochs": second,
            },
        )
        for first, second in ((40, 200), (120, 120), (200, 40), (40, 360))
    },
    **{
        f"short: {shared} shared stages, {epochs} epochs": (
            "rf-dlc",
            {**SHORT, **SIX_VIEWS, "shared_stages": shared, "epochs": epochs},
        )
        for shared, epochs in ((1, 34), (2, 34), (2, 40))
    },
    **{
        f"cutmix={alpha:g} cutout=0": (
            STRONG,
            {**ALL_SAMPLES, "mixup": 0, "cutmix": alpha, "cutout": 0},
        )
        for alpha in (0.2, 1)
    },
}
MEASURED: dict[str, Row] = {
    "cross-entropy": ("ce", {}),
    "logit adjustment": ("la", {}),
    "rf-dlc": ("rf-dlc", {}),
    **{  # trained and evaluated as STRONG
        f"{rival}, 200 epochs": (
            rival,
            {"epochs": 200, "refit": True, "warm_refit": True, **SIX_VIEWS},
        )
        for rival in ("balpoe", "mdcs", "ncl")
    },
    "rf-dlc-strong": (STRONG, {}),
    "rf-dlc-strong, cold refit, no shifts": (
        STRONG,
        {"warm_refit": False, "test_shift": 0},
    ),
    "rf-dlc-strong, 200 epochs": (STRONG, {"epochs": 200}),
    "rf-dlc-strong, 40 + 400 epochs": (STRONG, {"epochs": 40, "refit_epochs": 400}),
    "rf-dlc-strong, 8 particles": (STRONG, {"particles": 8}),
    "rf-dlc-strong, 2 shared stages": (STRONG, {"shared_stages": 2}),
    "rf-dlc-strong, 2 shared stages, 170 + 400 epochs": (STRONG, LONG_REFIT),
    "rf-dlc-strong, 8 particles, 2 shared stages, 170 + 400 epochs": (
        STRONG,
        {**LONG_REFIT, "particles": 8},
    ),
    "rf-dlc-strong, 2 shared stages, 240 + 400 epochs, 30% held out": (
        STRONG,
        MORE_HELD_OUT,
    ),
    "rf-dlc-strong, 2 shared stages, 400 + 320 epochs, 30% held out": (
        STRONG,
        LONG_FIRST,
    ),
    "rf-dlc-strong, 2 shared stages, 40% held out": (STRONG, BOTH_LONG),
    **{  # from seconds to minutes
        f"{particles} particles, {epochs} epochs": (
            STRONG,
            {"particles": particles, "epochs": epochs, "warmup": 5},
        )
        for particles in (1, 3, 8)
        for epochs in (20, 50, 100, 200)
    },
    **{
        f"short: 3 particles, {epochs} epochs, light augmentation": (
            "rf-dlc",
            {"epochs": epochs, **SHORT},
        )
        for epochs in (20, 40)
    },
    "short: 3 particles, 34 epochs, light augmentation, six views": (
        "rf-dlc",
        {"epochs": 34, **SHORT, **SIX_VIEWS},
    ),
    **{
        f"short: 3 particles, 2 shared stages, {epochs} epochs,"
        " light augmentation, six views": (
            "rf-dlc",
            {"epochs": epochs, "shared_stages": 2, **SHORT, **SIX_VIEWS},
        )
        for epochs in (36, 40)
    },
}
METRICS = ("accuracy", "head", "med", "tail", "false_head_rate", "ece", "nll")
FIELDS = (
    "data",
    "row",
    "method",
    "seed",
    "split",
    "particles",
    "epochs",
    "parameters",
    *METRICS,
    *(f"utility{penalty:g}" for penalty in PENALTIES),
    "seconds",
    "runs",
    "settings",
    "hardware",
    "versions",
    "commit",
)

VIEWS = ("data", "run", "seed", "views", *METRICS[:5], "hardware", "versions", "commit")
TRADED = (
    "data",
    "run",
    "seed",
    "penalty",
    "expected_loss",
    *METRICS[:5],
    "hardware",
    "versions",
    "commit",
)
CALIBRATED = (
    "data",
    "run",
    "seed",
    "split",
    "epochs",
    "calibration",
    *METRICS,
    "hardware",
    "versions",
    "commit",
)
LOSS = 0.005  # of expected accuracy, for a lower false head rate


def metrics(predictions: Predictions, decider: rfdlc.Decider) -> dict[str, float]:
    found = rfdlc.evaluate(predictions, decider=decider)
    names = ("accuracy", "ece", "nll", "false_head_rate")
    return {name: getattr(found, name) for name in names} | found.accuracy_by_region


def written(values: dict[str, float], names: Collection[str]) -> dict[str, str]:
    return {
        name: f"{value:.4f}"
        for name, value in values.items()
        if name in names and value is not None
    }


def on_test(model: Model) -> dict[str, float]:
    """Metrics of the decisions on the test split, and the mean utility of those for
    each penalty.
    """
    predictions = Predictions.load(model.path / "predictions.npz")
    row = metrics(
        predictions, model.decider.replace(utility=rfdlc.Utility.one_hot(model.classes))
    )
    for penalty in PENALTIES:
        decider = model.decider.replace(
            utility=rfdlc.Utility.tail_sensitive(model.classes, penalty)
        )
        row[f"utility{penalty:g}"] = rfdlc.evaluate(
            predictions, decider=decider
        ).mean_utility
    return row


def equally_held_out(data: rfdlc.Dataset, each: int, seed: int) -> rfdlc.Dataset:
    """The classes with enough training samples: `each` of every one is the test split,
    the others train.
    """
    labels, generator = data.train.labels, np.random.default_rng(seed)
    frequent = [
        label for label, count in enumerate(np.bincount(labels)) if count >= 1.2 * each
    ]
    held = np.concatenate(
        [
            generator.choice(np.flatnonzero(labels == label), each, False)
            for label in frequent
        ]
    )
    kept = np.setdiff1d(np.flatnonzero(np.isin(labels, frequent)), held)
    splits = {
        name: data.train.take(rows) for name, rows in (("train", kept), ("test", held))
    }
    splits = {
        name: replace(split, labels=np.searchsorted(frequent, split.labels))
        for name, split in splits.items()
    }
    return rfdlc.Dataset.of(
        data.name, [data.classes.names[label] for label in frequent], splits
    )


def views(options: argparse.Namespace, stamp: dict[str, str]) -> None:
    """Runs by arg max of mean logits, not calibrated: as they predict, with mirror
    images, and from images alone.
    """
    data = rfdlc.load(options.source, root=options.data)
    for model in map(Model.load, sorted(options.keep.iterdir())):
        decider = rfdlc.Decider(
            rfdlc.Utility.one_hot(model.classes), combine="mean-logits"
        )
        if not model.config.test_flip:
            raise SystemExit(
                f"{model.path} has no mirror images: train it with test_flip=true"
            )
        given = {
            (6 if model.config.test_shift else 2): Predictions.load(
                model.path / "predictions.npz"
            )
        }
        for count, mirrored in ((2, True), (1, False)):
            model.net.mirrored, model.net.shift = mirrored, 0
            if count not in given:
                given[count] = model.predict(data.test)
        for count, predictions in given.items():
            named = {
                "data": options.source,
                "run": model.path.name,
                "seed": model.config.seed,
                "views": count,
            }
            shown = written(metrics(predictions, decider), VIEWS)
            append(options.out, [named | shown | stamp], VIEWS)
            print(*named.values(), shown["accuracy"], flush=True)


def kept(folder: Path) -> Iterator[tuple[Run, rfdlc.Decider]]:
    """Runs of a folder and their deciders; their weights need not be there."""
    for run in map(Run, sorted(folder.iterdir())):
        yield (
            run,
            rfdlc.Decider.load(run.path / "decider.json").replace(classes=run.classes),
        )


def penalised(decider: rfdlc.Decider, penalty: float) -> rfdlc.Decider:
    return decider.replace(
        utility=rfdlc.Utility.tail_sensitive(decider.utility.classes, penalty)
    )


def expected_loss(decider: rfdlc.Decider, held: Predictions) -> float:
    """What these decisions lose of the accuracy that is expected of held-out samples,
    classes equal.
    """
    labels = np.asarray(held.targets)
    weights = 1 / np.bincount(labels)[labels]
    p, decided = decider.probabilities(held), decider.decide(held)
    return float(
        np.average(p.max(axis=1) - p[np.arange(len(p)), decided], weights=weights)
    )


def traded(options: argparse.Namespace, stamp: dict[str, str]) -> None:
    """Runs with the largest penalty (steps of .05) that loses at most `LOSS` on the
    held-out samples.
    """
    for run, decider in kept(options.keep):
        held, test = (
            Predictions.load(run.path / f"{name}.npz")
            for name in ("held-out", "predictions")
        )
        losses = {
            -step / 20: expected_loss(penalised(decider, -step / 20), held)
            for step in range(21)
        }
        penalty = min(penalty for penalty, loss in losses.items() if loss <= LOSS)
        named = {
            "data": options.source,
            "run": run.path.name,
            "seed": run.config.seed,
            "penalty": penalty,
        }
        shown = written(
            {"expected_loss": losses[penalty]}
            | metrics(test, penalised(decider, penalty)),
            TRADED,
        )
        append(options.out, [named | shown | stamp], TRADED)
        print(*named.values(), shown["accuracy"], shown["false_head_rate"], flush=True)


def predict_further(options: argparse.Namespace) -> None:
    """`further.npz` in each run: predictions of training samples of another source that
    are not among its own.
    """
    known = {
        image.tobytes()
        for image in np.asarray(
            rfdlc.load(options.source, root=options.data).train.inputs
        )
    }
    name, root = options.further
    other = rfdlc.load(name, root=root).train
    new = other.take(
        np.flatnonzero(
            [image.tobytes() not in known for image in np.asarray(other.inputs)]
        )
    )
    for path in sorted(options.keep.iterdir()):
        Model.load(path).predict(new).save(path / "further.npz")


def among_present(predictions: Predictions, decider: rfdlc.Decider) -> dict[str, float]:
    """Accuracy, ECE and NLL by class means, given that a sample is of a class that
    these predictions have.
    """
    labels = np.asarray(predictions.targets)
    present, own, counts = np.unique(labels, return_inverse=True, return_counts=True)
    p = decider.probabilities(predictions)[:, present]
    p /= p.sum(axis=1, keepdims=True)
    right, weights = p.argmax(axis=1) == own, 1 / (counts * len(counts))[own]
    gaps = np.bincount(bin_of(p.max(axis=1)), weights * (right - p.max(axis=1)))
    nll = -np.log(np.maximum(p[np.arange(len(p)), own], 1e-300))
    return {
        "accuracy": float(weights @ right),
        "ece": float(np.abs(gaps).sum()),
        "nll": float(weights @ nll),
    }


def calibrated(options: argparse.Namespace, stamp: dict[str, str]) -> None:
    """Runs by each calibrator, fitted with samples that count alike, and with classes
    that do.
    """
    if options.further and options.data:
        predict_further(options)
    split = "further" if options.further else "test"
    for run, decider in kept(options.keep):
        held = Predictions.load(run.path / "held-out.npz")
        scored = Predictions.load(
            run.path / f"{'further' if options.further else 'predictions'}.npz"
        )
        for name, even in product(CALIBRATORS, (False, True)):
            fitted = decider.replace(calibration=name).fit(held, balanced=even)
            named = {
                "data": options.source,
                "run": run.path.name,
                "seed": run.config.seed,
                "split": split,
            }
            named |= {
                "epochs": run.config.epochs,
                "calibration": name,
            }
            named["calibration"] += ", classes alike" * even
            shown = written(
                (among_present if options.further else metrics)(scored, fitted),
                CALIBRATED,
            )
            append(options.out, [named | shown | stamp], CALIBRATED)
            print(
                *named.values(),
                shown["accuracy"],
                shown["ece"],
                shown["nll"],
                flush=True,
            )


def stacks(names: list[str], rows: dict[str, Row], apart: bool) -> list[list[str]]:
    """Rows that can train as one stack, together; `apart` where each is to be timed
    alone.
    """
    groups = defaultdict(list)
    for name in names:
        method, changes = rows[name]
        differs = str(
            {key: value for key, value in changes.items() if key not in OWN_IN_STACKS}
        )
        groups[name if apart else (method, differs)].append(name)
    return list(groups.values())


def train(
    options: argparse.Namespace,
    names: list[str],
    seeds: list[int],
    rows: dict[str, Row],
    stamp: dict[str, str],
) -> None:
    """Train the seeds of these rows side by side, and append what they give."""
    choosing = options.command == "choose"
    usual: dict[str, Any] = {"refit": False} if choosing else {}
    common = dict(pair.split("=", 1) for pair in options.set)
    data = rfdlc.load(options.source, root=options.data)
    data = equally_held_out(data, options.each, seeds[0]) if choosing else data
    each = [(name, seed) for name in names for seed in seeds]
    with (
        TemporaryDirectory() if options.keep is None else nullcontext(options.keep)
    ) as folder:
        specs = []
        for name, seed in each:
            method, changes = rows[name]
            settings = {**usual, **common, **changes, "seed": seed}
            specs.append(
                rfdlc.RunSpec(Path(folder) / f"{name}-{seed}", method, settings)
            )
        began = time.perf_counter()
        models = rfdlc.train_many(data, specs, networks=options.networks)
        seconds = (time.perf_counter() - began) / len(models)
        with (models[0].path / "history.csv").open(newline="") as file:
            epochs = sum(float(row["seconds"]) for row in csv.DictReader(file))
        print(
            f"{seconds * len(models):.0f} s in all, {epochs:.0f} s of them in epochs",
            flush=True,
        )
        for (name, seed), spec, model in zip(each, specs, models, strict=True):
            config = model.config
            weights = sum(parameter.numel() for parameter in model.net.parameters())
            found = {
                "data": options.source,
                "row": name,
                "method": rows[name][0],
                "seed": seed,
            }
            found |= {
                "split": "held out" if choosing else "test",
                "particles": config.particles,
            }
            found |= {"epochs": config.epochs, "parameters": weights}
            found |= written(on_test(model), FIELDS)
            found |= {
                "seconds": f"{seconds:.1f}",
                "runs": len(models),
                "settings": json.dumps(dict(spec.settings)),
            }
            append(options.out, [found | stamp], FIELDS)
            shown = ("row", "seed", "accuracy", "tail", "ece", "seconds")
            print("  ".join(f"{key} {found[key]}" for key in shown), flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "command", choices=("choose", "measure", "views", "traded", "calibrated")
    )
    parser.add_argument("source", nargs="?", default="cifar100-lt")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--set", nargs="+", default=[])
    parser.add_argument(
        "--networks", type=int, default=24, help="most networks of a stack"
    )
    parser.add_argument(
        "--together",
        action="store_true",
        help="seeds as one stack, which the first holds out (choose)",
    )
    parser.add_argument(
        "--each", type=int, default=25, help="held-out samples per class (choose)"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="folder in which the runs stay")
    parser.add_argument(
        "--further",
        nargs=2,
        metavar=("NAME", "MORE"),
        help="another source, and its folder",
    )
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    choosing = options.command == "choose"
    ends = {
        "choose": "-choice",
        "measure": "",
        "views": "-views",
        "traded": "-traded",
        "calibrated": "-calibrated",
    }
    options.out = options.out or RESULTS / f"frontier{ends[options.command]}.csv"
    options.seeds = options.seeds or ([0, 1] if choosing else [0, 1, 2, 3, 4])
    rows = CHOICES if choosing else MEASURED
    unknown = set(options.only) - set(rows)
    if unknown:
        parser.error(f"no rows {sorted(unknown)}: expected some of {list(rows)}")
    packages = ["torch", "numpy"]
    stamp = {
        "hardware": hardware(),
        "versions": versions(packages),
        "commit": options.commit or commit(),
    }
    of_runs = {"views": views, "traded": traded, "calibrated": calibrated}.get(
        options.command
    )
    if of_runs:
        if options.keep is None:
            parser.error(
                f"{options.command} needs --keep RUNS, the folder that `measure --keep"
                " RUNS` wrote"
            )
        of_runs(options, stamp)
        return
    for seeds in (
        [[seed] for seed in options.seeds]
        if choosing and not options.together
        else [options.seeds]
    ):
        for names in stacks(options.only or list(rows), rows, apart=not choosing):
            train(options, names, seeds, rows, stamp)


if __name__ == "__main__":
    main()

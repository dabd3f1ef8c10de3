"""`tune=auto` beside the fixed settings that it chooses among, and plain cross-entropy,
within the same time.

    python benchmarks/tune.py digits-lt --budget 20s --workers 2
        on a CPU, 10 minutes
    python benchmarks/tune.py cifar100-lt --root DIR --budget 60s --seeds 0
        on a GPU
    python benchmarks/tune.py caltech101-lt-48.npz --budget 60s --seeds 0
        photographs of 48 pixels as arrays
    python benchmarks/tune.py cifar100-lt --root DIR --losses 12 25 50 100 --seeds 0
        rows of tune-losses.csv

Every run trains the network of the preset `images` for images of this size (an MLP for
digits, ResNet-32), calibrates on held-out training samples, and decides for a uniform
prior, as the test splits are balanced. `tune` spends its budget on trials and training;
the others have the epochs that the budget gives without trials, and train again on all
samples where it does; cross-entropy as a budget gives it, too: once, instead of a warm
refit. On a GPU they train side by side. Accuracy and that of tail classes are those of
the test split, which no choice has seen. Rows are appended to
benchmarks/results/tune.csv. `chosen` has the settings that `tune` chose, and `share` is
the share of the budget that its trials took. `--losses`: the held-out losses of trials
by their epochs, with the settings of rf-dlc-strong beside.
"""

import argparse
import json
import math
import time
from contextlib import suppress
from importlib import import_module
from itertools import chain, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import rfdlc
from recording import RESULTS, append, commit, hardware, in_parallel, versions
from rfdlc.training.tuning import tune
from rfdlc.training.tuning.candidates import AUGMENTED, trial_of
from rfdlc.training.tuning.planning import LONGEST, SHARE, STRONGER
from rfdlc.training.tuning.trying import held_out_losses

COMMON: dict[str, Any] = {"preset": "images", "target_prior": "uniform"}
MOST = LONGEST * 100  # epochs of a training with a budget: the preset has 100
FIELDS = (
    "data",
    "budget",
    "seed",
    "row",
    "accuracy",
    "tail",
    "nll",
    "ece",
    "epochs",
    "seconds",
    "share",
    "chosen",
    "hardware",
    "versions",
    "commit",
)

LOSSES = (
    "data",
    "seed",
    "epochs",
    "settings",
    "loss",
    "error",
    "hardware",
    "versions",
    "commit",
)


def fixed_rows(names: str = "") -> dict[str, tuple[str, dict[str, Any]]]:
    """Name, method and settings of what `tune` is compared with, of those with one of
    the names in it.
    """
    ours: dict[str, tuple[str, dict[str, Any]]]
    ours = {
        f"{name}, mixup {mixup:g}": ("rf-dlc", {"augment": name, "mixup": mixup})
        for name, mixup in AUGMENTED
    }
    ours |= {"rf-dlc-strong": ("rf-dlc-strong", {})}
    ours |= {
        "rf-dlc-strong, no flips": ("rf-dlc-strong", {"augment": "crop-randaugment"})
    }
    ours |= {
        f"cross-entropy, {name}": ("ce", {"augment": name})
        for name in ("none", "crop", "crop-flip")
    }
    return {
        row: own
        for row, own in ours.items()
        if any(name in row for name in names.split("|"))
    }


def tuned(
    source: str, root: str | None, budget: str, seed: int, more: dict[str, Any]
) -> tuple[dict[str, Any], Any]:
    """The row of `tune`, and the settings with which the others train as long."""
    data = rfdlc.load(source, root=root)
    common = {**COMMON, **more, "seed": seed}
    spent = []

    def timed(*given: Any) -> None:
        began = time.perf_counter()
        tune(*given)
        spent.append(time.perf_counter() - began)

    import_module("rfdlc.training.train").tune = timed  # type: ignore[attr-defined]
    with TemporaryDirectory() as folder:
        began = time.perf_counter()
        model = rfdlc.train(
            data, "rf-dlc", f"{folder}/tune", tune="auto", budget=budget, **common
        )
        seconds = time.perf_counter() - began
        import_module("rfdlc.training.train").tune = tune  # type: ignore[attr-defined]
        chosen = json.loads(Path(folder, "tune", "tuning.json").read_text())
        print(json.dumps(chosen), flush=True)
        row = {
            "data": data.name,
            "budget": budget,
            "seed": seed,
            "row": "tune",
            "epochs": model.config.epochs,
        }
        row |= {
            "seconds": f"{seconds:.1f}",
            "share": f"{spent[0] / model.config.budget:.2f}",
        }
        row |= {
            "chosen": " ".join(
                f"{name}={value}" for name, value in chosen["chosen"].items()
            )
        }
        length = min(round((1 + SHARE) * chosen["epochs"]), MOST)
        alike = {
            **common,
            "epochs": length,
            "tune": "off",
            **chosen.get("trainings", {}),
        }  # as a budget gives them
        return row | scores(Path(folder, "tune")), alike


def fixed(
    source: str,
    root: str | None,
    budget: str,
    settings: dict[str, Any],
    names: list[str],
) -> list[dict[str, Any]]:
    """Rows of these names, side by side."""
    data, known = rfdlc.load(source, root=root), fixed_rows()
    with TemporaryDirectory() as folder:
        specs = []
        for name in names:
            method, own = known[name]
            plain = (
                once(settings)
                if method == "ce" and settings.get("warm_refit")
                else settings
            )
            specs.append(rfdlc.RunSpec(Path(folder, name), method, {**plain, **own}))
        began = time.perf_counter()
        rfdlc.train_many(data, specs, networks=24 if torch.cuda.is_available() else 3)
        row = {"data": data.name, "budget": budget, "seed": settings["seed"]}
        row |= {"seconds": f"{(time.perf_counter() - began) / len(specs):.1f}"}
        lengths = [spec.settings["epochs"] for spec in specs]
        both = zip(names, lengths, strict=True)
        return [
            {**row, "row": name, "epochs": length, **scores(Path(folder, name))}
            for name, length in both
        ]


def losses(
    source: str, root: str | None, seed: int, lengths: list[int], more: dict[str, Any]
) -> list[dict[str, Any]]:
    """Held-out losses of trials of so many epochs; nothing is trained afterwards."""
    plain = [{"augment": "crop-flip", "mixup": 0.4}] + [
        {"augment": "randaugment", "mixup": own} for own in (0, 0.1, 0.4)
    ]
    added = [{"weight_decay": 1e-3}, STRONGER, {**STRONGER, "mixup": 0}]
    tried: list[dict[str, Any]] = plain + [
        {"augment": "randaugment", "mixup": 0.1, **own} for own in added
    ]
    rows = list[dict[str, Any]]()

    class Done(Exception): ...

    def measured(trainer: Any, run: Any) -> None:
        for length in lengths:
            found = held_out_losses(
                trainer, [trial_of(run, length, own) for own in tried], math.inf
            )
            for own, loss, error in zip(tried, *found, strict=True):
                settings = " ".join(
                    f"{name}={value:g}" if name != "augment" else value
                    for name, value in own.items()
                )
                rows.append(
                    {
                        "epochs": length,
                        "settings": settings,
                        "loss": f"{loss:.4f}",
                        "error": f"{error:.4f}",
                    }
                )
        raise Done

    import_module("rfdlc.training.train").tune = measured  # type: ignore[attr-defined]
    data = rfdlc.load(source, root=root)
    with TemporaryDirectory() as folder, suppress(Done):
        rfdlc.train(
            data, "rf-dlc", f"{folder}/run", tune="auto", **COMMON, **more, seed=seed
        )
    return [{"data": data.name, "seed": seed, **row} for row in rows]


def once(settings: dict[str, Any]) -> dict[str, Any]:
    """As many epochs in one training, as steps of the rate have it with a budget."""
    return {
        **settings,
        "refit": False,
        "warm_refit": False,
        "epochs": min(MOST, 2 * settings["epochs"]),
    }


def scores(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "metrics.json").read_text())["test"]
    values = {
        "accuracy": found["accuracy"],
        "tail": found["accuracy_by_region"]["tail"],
    }
    return {
        name: f"{value:.4f}"
        for name, value in {**values, "nll": found["nll"], "ece": found["ece"]}.items()
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source")
    parser.add_argument("--root")
    parser.add_argument("--budget", nargs="+", default=["30s"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of all runs"
    )
    parser.add_argument(
        "--rows",
        default="",
        help="fixed settings with one of these texts: none|crop, mixup 0",
    )
    parser.add_argument("--losses", nargs="+", type=int, metavar="EPOCHS")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--out",
        type=Path,
        help="default: tune.csv or tune-losses.csv beside the other results",
    )
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    stamp = {
        "hardware": hardware(),
        "versions": versions(["torch"]),
        "commit": options.commit or commit(),
    }
    more = dict(pair.split("=", 1) for pair in options.set)
    out = options.out or RESULTS / ("tune-losses.csv" if options.losses else "tune.csv")
    if options.losses:
        for seed in options.seeds:
            rows = losses(options.source, options.root, seed, options.losses, more)
            append(out, [row | stamp for row in rows], LOSSES)
        raise SystemExit
    runs = [
        (options.source, options.root, budget, seed, more)
        for budget, seed in product(options.budget, options.seeds)
    ]
    first = list(in_parallel(tuned, runs, options.workers))
    names = list(fixed_rows(options.rows))
    groups = (
        [names] if torch.cuda.is_available() else [[name] for name in names]
    )  # a GPU trains them side by side
    others = [
        (*run[:3], alike, group)
        for run, (_, alike) in zip(runs, first, strict=True)
        for group in groups
    ]
    measured = chain(
        [[row] for row, _ in first], in_parallel(fixed, others, options.workers)
    )
    for found in measured:
        append(out, [own | stamp for own in found], FIELDS)
        for own in found:
            print("  ".join(f"{key} {value}" for key, value in own.items()), flush=True)

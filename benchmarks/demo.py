"""The demo: how its settings were chosen, and its table for other seeds.

    python benchmarks/demo.py choose
        writes results/demo-choice.csv, without the demo's test images
    python benchmarks/demo.py
        writes results/demo.csv

To choose, 40 other images of every digit take the place of the test images, drawn again
for every seed.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import rfdlc
from recording import write
from rfdlc.cli.demo import decide_in_steps
from rfdlc.data.dataset import Dataset, Split
from rfdlc.data.longtail import profile_counts, subset

SEEDS = range(5)
TRIED = [(networks, rate) for networks in (1, 5, 10) for rate in (0.05, 0.1, 0.2)]
PACKAGES = ("rfdlc", "torch", "scikit-learn")


def other_digits(seed: int) -> Dataset:
    """Like `digits-lt`, without its test images: 40 others of every digit are held out,
    the rest trains.
    """
    loaded = rfdlc.load("digits-lt")
    digits = load_digits()
    assert loaded.test is not None
    images, labels = (
        np.round(digits.images * (255 / 16)).astype(np.uint8)[:, None],
        digits.target.astype(np.int64),
    )
    pool = np.setdiff1d(
        np.arange(len(labels)),
        [int(name.removeprefix("digit-")) for name in loaded.test.ids or ()],
    )
    held = pool[subset(labels[pool], np.full(10, 40), seed=100 + seed)]
    rest = np.setdiff1d(pool, held)
    kept = rest[
        subset(
            labels[rest],
            profile_counts(int(np.bincount(labels[rest]).min()), 10, 20),
            seed,
        )
    ]
    splits = {
        "train": Split(images[kept], labels[kept]),
        "test": Split(images[held], labels[held]),
    }
    return Dataset.of("digits-lt", loaded.classes.names, splits)


def choose() -> None:
    """Networks, and the learning rate of each, by the mean utility of decided held-out
    images.
    """
    found: dict[tuple[int, float], list[float]] = {pair: [] for pair in TRIED}
    for seed in SEEDS:
        data = other_digits(seed)
        utility = rfdlc.Utility.tail_sensitive(data.classes)
        for networks, rate in TRIED:
            settings: dict[str, Any] = {
                "particles": networks,
                "learning_rate": rate * networks,
                "seed": seed,
            }
            with tempfile.TemporaryDirectory() as folder:
                model = rfdlc.train(data, "ce", f"{folder}/run", **settings)
            decided = rfdlc.evaluate(
                model.predict(data.test), decider=model.decider.replace(utility=utility)
            )
            found[networks, rate].append(decided.mean_utility)
    rows = [
        {
            "networks": n,
            "rate": rate,
            "seeds": len(own),
            "mean_utility": f"{np.mean(own):.4f}",
            "standard_error": f"{np.std(own, ddof=1) / len(own) ** 0.5:.4f}",
        }
        for (n, rate), own in found.items()
    ]
    write("demo-choice", rows, PACKAGES, columns=list(rows[0]))


def run() -> None:
    rows: list[dict[str, object]] = []
    data = rfdlc.load("digits-lt")
    for seed in SEEDS:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            steps = decide_in_steps(data, Path(folder), seed)
        for name, step in steps.items():
            row = step.to_dict()
            added = row.pop("added", {"difference": "", "low": "", "high": ""})
            low, high = row.pop("interval")
            bounds = {
                "utility_low": low,
                "utility_high": high,
                **{f"added_{key}": v for key, v in added.items()},
            }
            kept = {
                key: f"{v:.4f}" if isinstance(v, float) else v
                for key, v in (row | bounds).items()
            }
            rows.append(
                {
                    "seed": seed,
                    "step": name,
                    **kept,
                    "seconds": f"{time.perf_counter() - began:.1f}",
                }
            )
    write("demo", rows, PACKAGES, columns=list(rows[0]))


if __name__ == "__main__":
    choose() if sys.argv[1:] == ["choose"] else run()

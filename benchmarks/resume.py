"""kill -9 at a random instant, then resume: the final weights equal those of an
uninterrupted run, bit for bit.

    python benchmarks/resume.py --times 50 --record
        writes benchmarks/results/resume.csv

Each time a training is started and killed at a random instant of its life, the folder
is read, and the training is resumed (and killed again, half of the time) until it is
done. The exit code is 1 where any run ended with other weights or a folder could not be
read.
"""

import argparse
import csv
import hashlib
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

# the first backward pass imports it: once here, not in every child
import torch.fx.experimental.symbolic_shapes

from recording import write
from rfdlc.data.load import load
from rfdlc.training.model import Model
from rfdlc.training.run import Run
from rfdlc.training.train import resume, train

SETTINGS: dict[str, Any] = {
    "epochs": 20,
    "checkpoint_every": 1,
    "widths": (16,),
    "average": 0.9,
    "refit": True,
    "evaluate_every": 3,
    "keep": (0.5,),
    "calibration": "temperature",
}


def work(folder: Path) -> None:
    """Start, or continue, the training in the folder."""
    if (folder / "config.json").exists():
        resume(folder)
    else:
        train("digits-lt", out=folder, **SETTINGS)


def in_child(folder: Path, kill_after: float | None) -> tuple[bool, float]:
    """Whether the training ended by itself, and the seconds it took. A kill leaves no
    chance to clean up.
    """
    began = time.perf_counter()
    child = os.fork()
    if child == 0:
        work(folder)
        os._exit(0)
    while kill_after is None or time.perf_counter() - began < kill_after:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            if status:
                raise SystemExit(
                    f"the training in {folder} failed with status {status}"
                )
            return True, time.perf_counter() - began
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False, time.perf_counter() - began


def readable(folder: Path) -> int:
    """Read all that a killed training left, as its files stand; the epoch of its
    checkpoint (-1: none yet).
    """
    if not (folder / "config.json").exists():
        return -1
    run = Run(folder)
    _ = run.metadata, run.classes
    checkpoint = run.checkpoint()
    if checkpoint is None:
        return -1
    with (
        (folder / "history.csv").open(newline="")
        if (folder / "history.csv").exists()
        else open(os.devnull)
    ) as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) in (
        len(checkpoint.history),
        len(checkpoint.history) - 1,
    ), "history.csv is not of the checkpoint"
    for name in ("metrics.json", "decider.json"):
        if (folder / name).exists():
            run.read_json(name)
    Model.load(folder, device="cpu")
    return checkpoint.epoch + 100 * checkpoint.phase


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:16]


def trial(
    number: int, root: Path, expected: str, duration: float, rng: random.Random
) -> dict[str, Any]:
    folder, kills, epochs = root / f"run-{number}", 0, []
    limit: float | None = rng.uniform(0, duration)
    while not in_child(folder, limit)[0]:
        kills += 1
        epochs.append(readable(folder))
        limit = rng.uniform(0, duration) if rng.random() < 0.5 and kills < 5 else None
    same = digest(folder) == expected
    return {
        "trial": number,
        "kills": kills,
        "killed_at": " ".join(map(str, epochs)),
        "identical": same,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--record", action="store_true", help="write benchmarks/results/resume.csv"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)  # children are forked: no pool of threads may exist here
    load("digits-lt")  # read once, here
    with tempfile.TemporaryDirectory() as place:
        root, rng = Path(place), random.Random(options.seed)
        _, duration = in_child(root / "whole", None)
        expected = digest(root / "whole")
        rows = [trial(i, root, expected, duration, rng) for i in range(options.times)]
    same, kills = (
        sum(row["identical"] for row in rows),
        sum(row["kills"] for row in rows),
    )
    if options.record:
        what = (
            f"runs with identical final weights after kill -9 ({kills} in all) and"
            " resume"
        )
        record = {
            "what": what,
            "value": same,
            "unit": "runs",
            "reference": len(rows),
            "required": len(rows),
        }
        write("resume", [record], ["rfdlc", "torch", "safetensors"])
    print(
        f"{same} of {len(rows)} runs identical after {kills} kills (a run takes"
        f" {duration:.1f} s undisturbed)"
    )
    sys.exit(same < len(rows))


if __name__ == "__main__":
    main()

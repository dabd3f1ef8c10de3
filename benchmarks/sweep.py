"""kill -9 a sweep of 30 trainings at random, five times: it ends with the table of an
undisturbed one, byte for byte.

    python benchmarks/sweep.py --record        writes benchmarks/results/sweep.csv

A grid of 30 runs that train side by side. The exit code is 1 where a table differs.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

# the first backward pass imports it: once here
import torch.fx.experimental.symbolic_shapes

from recording import write
from rfdlc.data.load import load
from rfdlc.training.sweep import sweep

GRID = """
data = "digits-lt"
[settings]
epochs = 6
widths = [16]
checkpoint_every = 1
calibration = "temperature"
[grid]
method = ["ce", "la", "rf-dlc"]
learning_rate = [0.05, 0.1]
seed = [0, 1, 2, 3, 4]
"""


def in_child(file: Path, out: Path, kill_after: float | None) -> bool:
    """Whether the sweep ended by itself."""
    child = os.fork()
    if child == 0:
        sweep(file, out)
        os._exit(0)
    began = time.perf_counter()
    while kill_after is None or time.perf_counter() - began < kill_after:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            if status:
                raise SystemExit(f"the sweep in {out} failed with status {status}")
            return True
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def measured(root: Path, times: int, rng: random.Random) -> dict[str, Any]:
    file = root / "grid.toml"
    file.write_text(GRID)
    began = time.perf_counter()
    in_child(file, root / "undisturbed", None)
    seconds, kills = time.perf_counter() - began, 0
    while kills < times and not in_child(
        file, root / "killed", rng.uniform(0.02, 0.18) * seconds
    ):
        kills += 1
    in_child(file, root / "killed", None)
    tables = [
        (folder / "table.csv").read_bytes()
        for folder in (root / "killed", root / "undisturbed")
    ]
    same = (
        sum(
            one == other
            for one, other in zip(
                *(table.splitlines() for table in tables), strict=True
            )
        )
        - 1
    )
    rows = sweep(file, root / "killed", collect=True)
    print(
        f"{same} of {len(rows)} rows equal after {kills} kills"
        f" ({seconds:.0f} s undisturbed)"
    )
    what = f"rows of a grid of {len(rows)} trainings that are equal after {kills} kills"
    return {
        "what": what,
        "value": same,
        "unit": "rows",
        "reference": len(rows),
        "required": len(rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=5, help="kills per sweep")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--record", action="store_true", help="write benchmarks/results/sweep.csv"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)  # children are forked: no pool of threads may exist here
    load("digits-lt")  # read once, here
    with tempfile.TemporaryDirectory() as place:
        rng = random.Random(options.seed)
        rows = [measured(Path(place), options.times, rng)]
    if options.record:
        write("sweep", rows, ["rfdlc", "torch"])
    sys.exit(any(row["value"] < row["required"] for row in rows))


if __name__ == "__main__":
    main()

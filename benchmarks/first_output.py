"""How long `rfdlc train` takes until its first line of output, and until its plan.

    python benchmarks/first_output.py
        writes benchmarks/results/first_output.csv (2 minutes on a quiet machine)

A table of 5,000 rows (CSV); 30,000 images of 32 pixels as arrays (.npz) and as PNG
files in folders by class. Each is trained by the command line with its defaults and
stopped after its plan. Its output is a pipe. The largest of three.
"""

import argparse
import csv
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

from recording import write

ROWS, IMAGES, CLASSES, LIMIT = 5_000, 30_000, 10, 120.0
REQUIRED = {"table": 3, "arrays": 10, "files": 10}
PLAN = "training"  # how a line of the plan begins


def sources(folder: Path) -> dict[str, Path]:
    """The data of each row, written to a folder."""
    rng = np.random.default_rng(0)
    labels, names = (
        rng.integers(0, CLASSES, IMAGES),
        [f"class{c}" for c in range(CLASSES)],
    )
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*(f"x{i}" for i in range(10)), "label"])
        writer.writerows(
            [*row, names[c]]
            for row, c in zip(rng.normal(size=(ROWS, 10)), labels, strict=False)
        )
    images = rng.integers(0, 256, (IMAGES, 32, 32, 3), dtype=np.uint8)
    np.savez(folder / "arrays.npz", X=images.transpose(0, 3, 1, 2), y=labels)
    for name in names:
        (folder / "files" / name).mkdir(parents=True)
    for number, (pixels, c) in enumerate(zip(images, labels, strict=True)):
        Image.fromarray(pixels).save(
            folder / "files" / names[c] / f"{number}.png", compress_level=1
        )
    return {
        "table": folder / "table.csv",
        "arrays": folder / "arrays.npz",
        "files": folder / "files",
    }


def measure(source: Path, out: Path) -> tuple[float, float]:
    """Seconds until the first line, and until the plan, which is printed before trials
    and training.
    """
    began, first = time.perf_counter(), 0.0
    command = [sys.executable, "-m", "rfdlc", "train", str(source), "--out", str(out)]
    with subprocess.Popen(
        command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            spent = time.perf_counter() - began
            first = first or spent
            if line.startswith(PLAN) or spent > LIMIT:
                break
        process.kill()
    return first, spent


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    with TemporaryDirectory() as temporary:
        for name, source in sources(Path(temporary)).items():
            times = [
                measure(source, Path(temporary, f"{name}-{k}"))
                for k in range(options.repeats)
            ]
            for what, values in zip(
                ("first line", "plan"), zip(*times, strict=True), strict=True
            ):
                rows.append(
                    {
                        "what": f"{name}: {what}",
                        "value": f"{max(values):.1f}",
                        "unit": "s",
                    }
                )
            rows[-2]["required"] = f"at most {REQUIRED[name]} s"
    write("first_output", rows, ["rfdlc", "numpy", "torch"], options.commit)

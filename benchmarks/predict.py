"""`rfdlc predict` over 10,000 and 100,000 small images: peak memory of both, then kill
-9 twice and go on.

    python benchmarks/predict.py        writes benchmarks/results/predict.csv

PNG files of 8 x 8 pixels, a model of digits, Parquet with actions. The exit code is 1
where memory grows with the number of images, or a row is lost, repeated or another one
after the kills.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image
from pyarrow import parquet

from recording import write
from rfdlc.data.load import load
from rfdlc.training.train import train

SMALL, LARGE = 10_000, 100_000
FOLDERS = 100
KILLED_AT = 8, 16  # of 25 parts
LARGEST_RATIO = 1.1  # of peak memory, for ten times as many images
Row = dict[str, object]


def paint(root: Path, count: int) -> None:
    """Digits with noise, so that no two images are the same."""
    images, rng = load("digits-lt").train.array, np.random.default_rng(0)
    for folder in range(FOLDERS):
        (root / f"{folder:02d}").mkdir(parents=True)
    for i in range(count):
        noisy = np.clip(
            images[i % len(images), 0].astype(int) + rng.integers(-30, 31, (8, 8)),
            0,
            255,
        )
        Image.fromarray(noisy.astype(np.uint8)).save(
            root / f"{i % FOLDERS:02d}" / f"{i:06d}.png"
        )


def predict(
    run: Path, photos: Path, out: Path, kill_at: int | None = None
) -> tuple[float, float, int]:
    """Peak memory (MiB), seconds and exit code of the command in a process of its own;
    killed after so many parts.
    """
    command = [
        sys.executable,
        "-m",
        "rfdlc",
        "predict",
        str(run),
        str(photos),
        "--out",
        str(out),
        "--abstain",
        "0.3",
    ]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    if kill_at is not None:
        while parts_done(out) < kill_at:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    _, status, usage = os.wait4(process.pid, 0)
    return (
        usage.ru_maxrss / 1024,
        time.perf_counter() - began,
        os.waitstatus_to_exitcode(status),
    )


def parts_done(out: Path) -> int:
    return len(list(out.with_name(f"{out.name}.parts").glob("part-*.parquet")))


def memory(run: Path, place: Path) -> tuple[list[Row], bool]:
    peaks, rows = [], list[Row]()
    for count in (SMALL, LARGE):
        peak, seconds, code = predict(
            run, place / str(count), place / f"{count}.parquet"
        )
        assert code == 0
        peaks.append(peak)
        speed = round(count / seconds)
        rows.append(
            {
                "what": f"{count:,} images: speed, start included",
                "value": speed,
                "unit": "images/s",
            }
        )
    rows.append(
        {
            "what": f"peak memory for {LARGE:,} images, against {SMALL:,}",
            "value": round(peaks[1], 1),
            "unit": "MiB",
            "reference": round(peaks[0], 1),
            "ratio": round(peaks[1] / peaks[0], 3),
            "required": f"ratio below {LARGEST_RATIO}",
        }
    )
    return rows, peaks[1] / peaks[0] < LARGEST_RATIO


def killed(run: Path, place: Path) -> tuple[list[Row], bool]:
    """Two kills; then the command runs to its end."""
    photos, out, whole = (
        place / str(LARGE),
        place / "killed.parquet",
        place / f"{LARGE}.parquet",
    )
    reached = []
    for wanted in KILLED_AT:
        assert predict(run, photos, out, wanted)[2] == -signal.SIGKILL
        assert not out.exists()
        reached.append(parts_done(out))
    assert predict(run, photos, out)[2] == 0
    found, expected = parquet.read_table(out), parquet.read_table(whole)
    equal = np.all(
        [
            found[name].to_numpy() == expected[name].to_numpy()
            for name in expected.column_names
        ],
        axis=0,
    )
    ids = found.column("id").to_pylist()
    what = f"kill -9 after {reached[0]} and {reached[1]} parts, then to the end"
    counts = {
        "rows": (len(ids), LARGE),
        "different images": (len(set(ids)), LARGE),
        "rows equal to those of an uninterrupted run": (int(equal.sum()), LARGE),
    }
    rows: list[Row] = [
        {
            "what": f"{what}: {name}",
            "value": value,
            "reference": wanted,
            "required": wanted,
        }
        for name, (value, wanted) in counts.items()
    ]
    return rows, all(value == wanted for value, wanted in counts.values())


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        train("digits-lt", out=place / "run", device="cpu")
        for count in (SMALL, LARGE):
            paint(place / str(count), count)
        rows, flat = memory(place / "run", place)
        more, same = killed(place / "run", place)
    write("predict", rows + more, ["rfdlc", "torch", "pyarrow", "pillow"])
    sys.exit(not (flat and same))


if __name__ == "__main__":
    main()

"""rfdlc on images that nobody tuned it for, beside the short loops that people write,
within the same time.

    taskset -c 0 python benchmarks/images.py measure --data DIR --suite cpu --seconds 60
        on one core; three hours for three seeds
    python benchmarks/images.py measure --data DIR --suite gpu --seconds 60
        on a GPU
    python benchmarks/images.py measure --data DIR --suite cpu --seconds 60 --choose
        to choose between settings: on held-out training images
    python benchmarks/images.py summary
        differences to each rival, pooled over families of sets (all of CIFAR is one)

`image_sets.py` says what DIR holds and which sets there are, `image_rivals.py` what the
rivals do. All methods get the same training images and the same seconds of wall time:
from the start of a process that reads an array of images to a calibrated model. Ours is
the command `rfdlc train FILE --budget SECONDS`, with its defaults, and `rfdlc predict`.
Predicting the test split is not counted. Every training is decided three times, each by
the utility that is measured: accuracy (the most probable class), balanced accuracy
(after correction of the class prior), and the tail-sensitive utility. `ece_low` and
`ece_high` enclose 95% of the calibration errors of a model of these probabilities that
is calibrated. `accuracy` is for classes as frequent as in training; `utility`, `nll`
and `ece` are for those of the test split.

Rows are appended to results/images.csv as they come, and rows that are there are not
measured again: the command that was interrupted goes on. `--set KEY=VALUE` gives
settings to rfdlc; such rows have the method `rfdlc KEY=VALUE`.
"""

import argparse
import csv
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import image_sets
from image_scores import Floats, Judged, calibrated, paired
from image_sets import ImageSet
from recording import RESULTS, append, commit, hardware, versions

OURS = "rfdlc"
RIVALS = ("cross-entropy", "sampler", "logit-adjustment")
PACKAGES = ("rfdlc", "torch", "numpy")
SMALLEST = 1e-12  # probability
METRICS = ("accuracy", "balanced_accuracy", "utility", "nll", "ece", "tail")
KEY = ("set", "split", "method", "seed", "seconds_asked")
FIELDS = (
    *KEY,
    "seconds_taken",
    "epochs",
    "temperature",
    "accuracy",
    "balanced_accuracy",
    "utility",
    "nll",
    "ece",
    "ece_low",
    "ece_high",
    "head",
    "medium",
    "tail",
    "hardware",
    "versions",
    "commit",
)
Row = dict[str, str]


# -- measuring
# --------------------------------------------------------------------------------------


def measured(
    images: ImageSet, method: str, seconds: float, seed: int, settings: Sequence[str]
) -> dict[str, object]:
    """What one training takes and what it is worth."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        if method == OURS:
            scores, details = ours(images, folder, seconds, seed, settings)
        else:
            scores, details = rival(images, folder, method, seconds, seed)
    judged = Judged(images.counts, images.test_y, images.balanced_test)
    metrics = judged.scores(scores)
    return details | {key: round(value, 5) for key, value in metrics.items()}


def rival(
    images: ImageSet, folder: Path, method: str, seconds: float, seed: int
) -> tuple[Floats, dict[str, object]]:
    """Test scores for a uniform prior, of a plain loop."""
    images.write(folder / "images.npz")
    words = [method, str(folder / "images.npz"), str(folder / "logits.npz")]
    if images.flips:
        words.append("--flips")
    began = time.time()
    run(
        str(Path(__file__).with_name("image_rivals.py")),
        *words,
        f"--seconds={seconds}",
        f"--seed={seed}",
        f"--began={began}",
    )
    with np.load(folder / "logits.npz") as trained:
        scores, temperature = calibrated(
            trained["held_out"],
            images.train_y[images.held_out],
            trained["test"],
            images.counts,
            uniform=method != "cross-entropy",
        )
        taken = time.time() - began - float(trained["seconds_of_test"])
        epochs = float(trained["epochs"])
    return scores, {
        "seconds_taken": round(taken, 2),
        "epochs": round(epochs, 2),
        "temperature": round(temperature, 3),
    }


def ours(
    images: ImageSet,
    folder: Path,
    seconds: float,
    seed: int,
    settings: Sequence[str],
) -> tuple[Floats, dict[str, object]]:
    """Test scores for a uniform prior, of `rfdlc train`."""
    train = str(folder / "train.npz")
    test = str(folder / "test.npz")
    result = str(folder / "run")
    out = folder / "probabilities.csv"
    np.savez(train, train_x=images.train_x, train_y=images.train_y)
    np.savez(test, test_x=images.test_x, test_y=images.test_y)
    rfdlc = ("-m", "rfdlc")
    began = time.time()
    run(
        *rfdlc,
        "train",
        train,
        f"--out={result}",
        f"--budget={seconds:g}s",
        f"seed={seed}",
        *settings,
    )
    taken = time.time() - began
    run(*rfdlc, "predict", result, test, f"--out={out}", "--target-prior=uniform")
    scores = np.log(probabilities(out, images.classes))
    return scores, {"seconds_taken": round(taken, 2)}


def run(*words: str) -> None:
    """A command of this Python; what it says is shown where it fails."""
    finished = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    if finished.returncode:
        raise RuntimeError(f"{' '.join(words)}:\n{finished.stderr[-2000:]}")


def probabilities(path: Path, classes: int) -> Floats:
    """The columns of the classes, which are named by their numbers."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    values = [[float(row[str(label)]) for label in range(classes)] for row in rows]
    return np.maximum(values, SMALLEST)


def measure(options: argparse.Namespace) -> None:
    """One row after another, without those that are there."""
    done = {tuple(row[key] for key in KEY) for row in read(options.out)}
    stamp = {
        "hardware": hardware(),
        "versions": versions(PACKAGES),
        "commit": options.commit or commit(),
    }
    split = "held-out" if options.choose else "test"
    names = options.sets or image_sets.suite(options.suite)
    for name in names:
        images: ImageSet | None = None
        for seed, method in product(options.seeds, options.methods):
            label = " ".join([method, *options.set]) if method == OURS else method
            row: dict[str, object] = {
                "set": name,
                "split": split,
                "method": label,
                "seed": seed,
                "seconds_asked": f"{options.seconds:g}",
            }
            if tuple(str(row[key]) for key in KEY) in done:
                continue
            if images is None:
                images = image_sets.load(name, options.data)
                images = images.for_choices() if options.choose else images
            row |= measured(images, method, options.seconds, seed, options.set)
            append(options.out, [row | stamp], FIELDS)
            print(" ".join(str(value) for value in row.values()), flush=True)


def read(path: Path) -> list[Row]:
    """The rows of a file; none if it is not there yet."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# -- the summary
# --------------------------------------------------------------------------------------


def selected(rows: Sequence[Row], options: argparse.Namespace) -> list[Row]:
    """Those of one split, and of a suite or of so many seconds where that is asked."""
    split = "held-out" if options.choose else "test"
    names = image_sets.suite(options.suite) if options.suite else image_sets.SOURCES
    seconds = f"{options.seconds:g}" if options.seconds else ""
    return [
        row
        for row in rows
        if row["split"] == split
        and row["set"] in names
        and row["seconds_asked"] == (seconds or row["seconds_asked"])
    ]


def lines(rows: Sequence[Row], reference: str) -> Iterator[str]:
    """Differences of every method to the reference, as text."""
    methods = sorted({row["method"] for row in rows} - {reference})
    yield f"{'difference to ' + reference:34} {'mean':>8}  95% bounds        better in"
    for method, metric in product(methods, METRICS):
        gain = paired(rows, metric, method, reference, image_sets.family)
        yield (
            f"{method + ', ' + metric:34} {gain.mean:+8.4f}"
            f"  {gain.low:+.4f} {gain.high:+.4f}   {gain.better} of {gain.count}"
        )


def over_time(rows: Sequence[Row]) -> Iterator[str]:
    """By how much methods exceed the seconds that they were given."""
    for method in sorted({row["method"] for row in rows}):
        excess = [
            float(row["seconds_taken"]) / float(row["seconds_asked"]) - 1
            for row in rows
            if row["method"] == method
        ]
        yield (
            f"{method}: seconds over those asked, median {np.median(excess):+.0%},"
            f" most {max(excess):+.0%}"
        )


def outside(rows: Sequence[Row]) -> Iterator[str]:
    """How often calibration errors are above those of a calibrated model."""
    for method in sorted({row["method"] for row in rows}):
        above = [
            float(row["ece"]) > float(row["ece_high"])
            for row in rows
            if row["method"] == method
        ]
        yield f"{method}: ECE above its 95% range in {sum(above)} of {len(above)}"


def summary(options: argparse.Namespace) -> None:
    rows = selected(read(options.out), options)
    if not rows:
        raise SystemExit(f"{options.out}: no such rows; run images.py measure first")
    references = [options.reference] if options.reference else RIVALS
    for reference in references:
        if reference in {row["method"] for row in rows}:
            print("\n".join(lines(rows, reference)), end="\n\n")
    print("\n".join([*over_time(rows), *outside(rows)]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=["measure", "summary"])
    parser.add_argument("--data", type=Path, help="the folder of published data")
    parser.add_argument("--suite", choices=["cpu", "gpu"])
    parser.add_argument("--sets", nargs="+", choices=image_sets.SOURCES)
    parser.add_argument("--methods", nargs="+", default=[*RIVALS, OURS])
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--reference", help="the method to compare with")
    parser.add_argument("--out", type=Path, default=RESULTS / "images.csv")
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    if options.task == "summary":
        summary(options)
    elif not options.data or not options.seconds:
        parser.error("measure needs --data and --seconds")
    elif not options.sets and not options.suite:
        parser.error("measure needs --suite or --sets")
    else:
        measure(options)

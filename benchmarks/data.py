"""How fast the loaders are, beside the plain way, in one run on the same cores;
appended to results/data.csv.

    python benchmarks/data.py
        resident and streamed loaders on this machine's CPU
    python benchmarks/data.py --device cuda
        the resident loader on the GPU alone (torch, numpy and pillow suffice)

What must hold: resident at least 3x a DataLoader with 2 workers that does the same
augmentation with pillow (100x one with 8 workers on an H200); streamed at least 85% of
bare pillow decoding and resizing on the same cores; memory of a streamed epoch that
does not grow with the data set.
"""

import argparse
import csv
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

sys.path.insert(
    0, str(Path(__file__).parents[1] / "src")
)  # a checkout needs no installation

from recording import append, commit, hardware, versions
from rfdlc.data.augment import Augment
from rfdlc.data.dataset import PHOTOGRAPHS, Normalisation, Split
from rfdlc.data.images import ImageFiles, PackedText
from rfdlc.data.loader import ResidentLoader
from rfdlc.data.streamed import StreamedLoader, View
from rfdlc.formats.files import replacing

RESULTS = Path(__file__).parent / "results" / "data.csv"
COLUMNS = [
    "what",
    "value",
    "unit",
    "reference",
    "ratio",
    "required",
    "hardware",
    "versions",
    "commit",
    "date",
]
NORMALISATION = Normalisation((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
IMAGES, BATCH = 10_847, 128  # as many as CIFAR100-LT has
JPEGS, SIZE = 1_200, 224


# -- the resident loader against pillow in worker processes
# --------------------------------------------------------------------------------------


class PillowAugmented(TorchDataset[tuple[Tensor, int]]):
    """Crop with padding, flip, rotation and normalisation, image by image."""

    def __init__(self, split: Split) -> None:
        self.images = np.ascontiguousarray(split.array.transpose(0, 2, 3, 1))
        self.labels = split.labels
        self.mean = torch.tensor(NORMALISATION.mean).view(3, 1, 1)
        self.std = torch.tensor(NORMALISATION.std).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image, ImageOps

        top, left = torch.randint(9, (2,)).tolist()
        image = ImageOps.expand(Image.fromarray(self.images[index]), 4).crop(
            (left, top, left + 32, top + 32)
        )
        flip, angle = torch.rand(2).tolist()
        if flip < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        image = image.rotate(30 * angle - 15)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div_(255)
        return pixels.sub_(self.mean).div_(self.std), int(self.labels[index])


def resident(
    device: torch.device, workers: int, repeats: int, runs: int = 1
) -> tuple[float, float]:
    """Images a second of the resident loader and of the DataLoader, over whole epochs
    that arrive on the device.

    The resident loader feeds a stack of `runs`, each with an order and crops of its
    own.
    """
    rng = np.random.default_rng(0)
    split = Split(
        rng.integers(0, 256, (IMAGES, 3, 32, 32), dtype=np.uint8),
        rng.integers(0, 100, IMAGES),
    )
    loader = ResidentLoader(
        split,
        NORMALISATION,
        batch_size=BATCH,
        augment=Augment.paper(),
        device=device,
        seeds=range(runs),
    )
    reference = DataLoader(
        PillowAugmented(split),
        batch_size=BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=True,
        pin_memory=device.type == "cuda",
    )

    def ours() -> None:
        for inputs, _ in loader.epoch(next(epochs)):
            last = inputs
        float(last[0, 0, 0, 0, 0])  # waits for the device

    def theirs() -> None:
        for inputs, _ in reference:
            last = inputs.to(device, non_blocking=True)
        float(last[0, 0, 0, 0])

    epochs = iter(range(1_000_000))
    ours()
    theirs()  # workers and kernels are warm now
    times = [(seconds(ours), seconds(theirs)) for _ in range(repeats)]
    return runs * IMAGES / min(t for t, _ in times), IMAGES / min(t for _, t in times)


# -- the streamed loader against bare decoding
# --------------------------------------------------------------------------------------


def photographs(
    folder: Path, count: int, size: tuple[int, int] = (500, 375)
) -> list[str]:
    """JPEGs with the detail of photographs: smooth shapes and some noise, about 80 kB
    at 500x375.
    """
    from PIL import Image

    rng = np.random.default_rng(0)
    width, height = size
    for i in range(count):
        shapes = rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
        smooth = np.asarray(
            Image.fromarray(shapes).resize(size, Image.Resampling.BICUBIC),
            dtype=np.float32,
        )
        noisy = (smooth + rng.normal(0, 8, smooth.shape)).clip(0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / f"{i}.jpg", quality=90)
    return [f"{i}.jpg" for i in range(count)]


def decode_bare(path: str) -> int:
    from PIL import Image

    with Image.open(path) as image:
        resized = image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    return int(np.asarray(resized).shape[0])


def streamed(folder: Path, cores: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Images a second of the streamed loader (training with and without jitter,
    evaluation) and of bare pillow.
    """
    names = photographs(folder, 60) * (JPEGS // 60)
    split = Split(ImageFiles(folder, PackedText(names), SIZE), np.arange(JPEGS) % 10)
    kinds = {"with colour jitter": View(), "without jitter": View(jitter=0)}
    loaders = {
        kind: StreamedLoader(
            split, PHOTOGRAPHS, batch_size=40, view=view, workers=cores
        )
        for kind, view in kinds.items()
    }
    with multiprocessing.get_context("fork").Pool(cores) as pool:
        paths = [str(folder / name) for name in names]

        def bare() -> None:
            pool.map(decode_bare, paths, chunksize=10)

        def epoch(loader: StreamedLoader) -> None:
            for _ in loader.epoch(0):
                pass

        for loader in loaders.values():
            epoch(loader)
        bare()
        rates = {}
        for kind, loader in loaders.items():
            times = [
                (seconds(partial(epoch, loader)), seconds(bare)) for _ in range(repeats)
            ]
            rates[kind] = (
                JPEGS / min(t for t, _ in times),
                JPEGS / min(t for _, t in times),
            )
    return rates


# -- memory
# --------------------------------------------------------------------------------------


def epoch_memory(folder: Path, count: int) -> float:
    """Memory, in MiB, of this process and its workers in the second half of a streamed
    epoch of `count` images.
    """
    names = PackedText(f"{i % 20}.jpg" for i in range(count))
    split = Split(ImageFiles(folder, names, 64), np.arange(count) % 10)
    loader = StreamedLoader(split, PHOTOGRAPHS, batch_size=100, workers=2)
    used = [_own_and_workers() for _ in loader.epoch(0)]
    return median(
        used[len(used) // 2 :]
    )  # it swings with the number of batches that are waiting


def _own_and_workers() -> float:
    """Data and shared memory; not the files of libraries, which other programs
    use too.
    """
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    rollups = [f"/proc/{pid}/smaps_rollup" for pid in (os.getpid(), *children)]
    fields = [
        line.split() for path in rollups for line in Path(path).read_text().splitlines()
    ]
    return (
        sum(
            int(field[1]) for field in fields if field[0] in ("Pss_Anon:", "Pss_Shmem:")
        )
        / 1024
    )


def memory(folder: Path, counts: tuple[int, int]) -> list[float]:
    """Memory of epochs of these sizes, each in a process of its own."""
    photographs(folder, 20, (100, 75))
    command = [sys.executable, __file__, "--memory-of", str(folder)]
    return [
        float(
            subprocess.run(
                [*command, str(n)], check=True, capture_output=True, text=True
            ).stdout
        )
        for n in counts
    ]


# -- results
# --------------------------------------------------------------------------------------


def seconds(work: Callable[[], None]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def row(
    what: str, value: float, unit: str, reference: str, other: float, required: str
) -> dict[str, str]:
    """A row of results, printed too."""
    ratio = value / other
    print(
        f"{what}: {value:,.0f} {unit}; {reference}: {other:,.0f}; ratio {ratio:,.3g},"
        f" required {required}"
    )
    return {
        "what": what,
        "value": f"{value:.1f}",
        "unit": unit,
        "reference": f"{reference}: {other:.1f}",
        "ratio": f"{ratio:.3g}",
        "required": required,
        "hardware": hardware(),
        "versions": versions(["torch", "numpy", "pillow"]),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def save(rows: list[dict[str, str]]) -> None:
    """Replace the rows for the same thing on the same hardware, append the others."""
    old = list(csv.DictReader(RESULTS.open(newline=""))) if RESULTS.exists() else []
    new = {(r["what"], r["hardware"]) for r in rows}
    with replacing(RESULTS) as beside:
        append(
            beside,
            [r for r in old if (r["what"], r["hardware"]) not in new] + rows,
            COLUMNS,
        )


def on_gpu(repeats: int) -> list[dict[str, str]]:
    """The resident loader on the GPU, for one run and for stacks of several: what is
    launched is the same.
    """
    reference, rows = "DataLoader, 8 workers, pillow", []
    for runs in (1, 3, 5):
        ours, theirs = resident(torch.device("cuda"), 8, repeats, runs)
        what = f"resident loader on the GPU, stack of {runs}"
        rows.append(row(what, ours, "images/s", reference, theirs, ">= 100"))
    return rows


def on_cpu(repeats: int) -> list[dict[str, str]]:
    """Resident and streamed loaders on two cores."""
    torch.set_num_threads(2)
    ours, theirs = resident(torch.device("cpu"), 2, repeats)
    reference = "DataLoader, 2 workers, pillow"
    rows = [
        row("resident loader on the CPU", ours, "images/s", reference, theirs, ">= 3")
    ]
    torch.set_num_threads(1)  # the cores belong to the workers
    with tempfile.TemporaryDirectory() as folder:
        for kind, (ours, theirs) in streamed(Path(folder), 2, repeats).items():
            what, reference = (
                f"streamed loader, training {kind}",
                "bare pillow decode and resize, 2 processes",
            )
            rows.append(row(what, ours, "images/s", reference, theirs, ">= 0.85"))
        small, large = memory(Path(folder), (4_000, 40_000))
    what, reference = (
        "memory of a streamed epoch, 40000 images",
        "the same, 4000 images",
    )
    return [*rows, row(what, large, "MiB", reference, small, "<= 1.05")]


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="whole epochs of either, of which the fastest count",
    )
    parser.add_argument(
        "--memory-of", nargs=2, metavar=("FOLDER", "COUNT"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.memory_of:
        print(epoch_memory(Path(options.memory_of[0]), int(options.memory_of[1])))
        return
    save(
        on_gpu(options.repeats) if options.device == "cuda" else on_cpu(options.repeats)
    )


if __name__ == "__main__":
    main()

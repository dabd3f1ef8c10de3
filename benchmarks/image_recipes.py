"""Recipes for images side by side on one GPU, each with the same share of its time.

    python benchmarks/image_recipes.py --data DIR --out ROWS.csv --seconds 200

A process per set, a captured graph per recipe: a step of the recipe that has had the
least time comes next. All learning rates reach zero at the deadline; rows are also
written at half and three quarters of the time, with averaged weights. `--sets` and
`--recipes` select, `--eager` does without graphs. On a CPU it only shows that
everything runs. Sets may also come from `--packed FOLDER` (written by `--pack FOLDER`),
where images are compressed.

These rows are for choices between recipes, not for claims: one seed, training images
that were held out in the place of test images, and the seconds are those of a GPU that
others use.
"""

import argparse
import csv
import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

import image_sets
from image_drawn import Bytes
from image_rivals import (
    batches,
    cropped,
    in_channels_last,
    rate_at,
    residual,
    resnet18,
)
from image_scores import Floats, Judged, calibrated
from image_sets import ImageSet
from recording import append, commit, hardware, versions

RESERVE = 12.0  # seconds for the last evaluation
QUARTERED = 40  # pixels, up to which the quick network has half the width
MEASURED_AT = (0.5, 0.75)
SETS = (
    "cifar100-lt",
    "tinyimagenet100",
    "caltech101-96",
    "dermamnist",
    "sounds-64",
)
FIELDS = (
    "set",
    "method",
    "weights",
    "seed",
    "progress",
    "seconds_asked",
    "seconds_taken",
    "epochs",
    "images_a_second",
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


@dataclass(frozen=True)
class Recipe:
    """One training: network, loss, augmentation, optimiser."""

    network: str = "quick"
    adjusted: bool = True
    balanced: bool = False
    mixup: float = 0.0
    strong: bool = False
    sgd: bool = False

    @property
    def uniform(self) -> bool:
        """Whether logits are for a uniform prior."""
        return self.adjusted or self.balanced


RECIPES: dict[str, Recipe] = {
    "cross-entropy": Recipe("resnet18", adjusted=False),
    "sampler": Recipe("resnet18", adjusted=False, balanced=True),
    "logit-adjustment": Recipe("resnet18"),
    "quick": Recipe(),
    "quick, mixup": Recipe(mixup=0.2),
    "quick, mixup, strong": Recipe(mixup=0.2, strong=True),
    "quick, mixup, sgd": Recipe(mixup=0.2, sgd=True),
    "resnet32, mixup, sgd": Recipe("resnet32", mixup=0.2, sgd=True),
}


# -- networks
# --------------------------------------------------------------------------------------


def network_of(recipe: Recipe, classes: int, side: int) -> nn.Module:
    """`quick` has the operations of ResNet-18 at 32 pixels or a quarter of them: half
    the width up to 40 pixels, then a stem that leaves 32 or 24 pixels.
    """
    if recipe.network == "resnet18":
        return resnet18(classes, side)
    if recipe.network == "resnet32":
        return residual(classes, (16, 32, 64), 5, 1)
    if side <= QUARTERED:
        return residual(classes, (32, 64, 128, 256), 2, 1)
    shrink = 2 if side <= 80 else 4 if side <= 160 else 8
    return residual(classes, (64, 128, 256, 512), 2, shrink)


# -- a step
# --------------------------------------------------------------------------------------


def strongly_changed(images: Tensor) -> Tensor:
    """Turned, sheared, moved, scaled, with other contrast and colours, with a square
    cut out: each half of the time.
    """
    count, _, side, _ = images.shape
    device = images.device

    def drawn(reach: float) -> Tensor:
        chosen = torch.rand(count, device=device) < 0.5
        return chosen * reach * (2 * torch.rand(count, device=device) - 1)

    angle = drawn(0.5)
    scale = torch.exp(drawn(0.25))
    cosine = angle.cos() * scale
    sine = angle.sin() * scale
    shear = drawn(0.3)
    top = torch.stack([cosine, -sine + shear, drawn(0.25)], 1)
    bottom = torch.stack([sine, cosine, drawn(0.25)], 1)
    grid = functional.affine_grid(
        torch.stack([top, bottom], 1), list(images.shape), align_corners=False
    )
    images = functional.grid_sample(
        images, grid, padding_mode="reflection", align_corners=False
    )
    grey = images.mean(1, keepdim=True)
    colour = 1 + drawn(0.7)[:, None, None, None]
    images = grey + colour * (images - grey)
    level = images.mean((1, 2, 3), keepdim=True)
    contrast = 1 + drawn(0.5)[:, None, None, None]
    images = level + contrast * (images - level)

    ticks = torch.arange(side, device=device)
    centre = torch.rand(2, count, 1, device=device) * side
    half = (torch.rand(count, 1, device=device) < 0.5) * side / 6
    down = (ticks - centre[0]).abs() < half
    right = (ticks - centre[1]).abs() < half
    hole = (down[:, :, None] & right[:, None, :])[:, None]
    return torch.where(hole, level, images).clamp(0, 1)


def half_precision(device: str) -> torch.autocast:
    """On a GPU; without the cache, which a graph must not read."""
    on_gpu = device == "cuda"
    return torch.autocast(device, torch.bfloat16, enabled=on_gpu, cache_enabled=False)


class Optimiser:
    """AdamW, or SGD with Nesterov's momentum, all of it on the device: a graph can
    capture it.
    """

    def __init__(self, parameters: list[Tensor], sgd: bool) -> None:
        self.parameters = parameters
        self.decayed = [p for p in parameters if p.ndim > 1]
        self.sgd = sgd
        self.largest_rate = 0.1 if sgd else 1e-3
        self.weight_decay = 5e-3 if sgd else 0.05  # apart from the gradient
        device = parameters[0].device
        self.rate = torch.zeros((), device=device)
        self.steps = torch.zeros((), device=device)
        self.first = [torch.zeros_like(p) for p in parameters]
        self.second = [torch.zeros_like(p) for p in parameters]

    @torch.no_grad()
    def step(self) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        torch._foreach_mul_(self.decayed, 1 - self.rate * self.weight_decay)
        if self.sgd:
            torch._foreach_mul_(self.first, 0.9)
            torch._foreach_add_(self.first, gradients)
            change = torch._foreach_mul(self.first, 0.9)
            torch._foreach_add_(change, gradients)
            torch._foreach_mul_(change, self.rate)
        else:
            self.steps.add_(1)
            torch._foreach_lerp_(self.first, gradients, 0.1)
            torch._foreach_mul_(self.second, 0.999)
            torch._foreach_addcmul_(self.second, gradients, gradients, 0.001)
            scale = torch._foreach_div(self.second, 1 - 0.999**self.steps)
            torch._foreach_sqrt_(scale)
            torch._foreach_add_(scale, 1e-8)
            change = torch._foreach_div(self.first, scale)
            torch._foreach_mul_(change, self.rate / (1 - 0.9**self.steps))
        torch._foreach_sub_(self.parameters, change)


class Training:
    """A recipe in the middle of its training."""

    def __init__(
        self,
        recipe: Recipe,
        images: ImageSet,
        pixels: Tensor,
        targets: Tensor,
        options: argparse.Namespace,
    ) -> None:
        device = pixels.device
        seed = options.seed
        self.chunk = options.chunk
        torch.manual_seed(seed)
        self.recipe = recipe
        self.images = images
        self.pixels = pixels
        self.targets = targets
        self.rng = np.random.default_rng(seed)
        self.labels = images.train_y[~images.held_out]
        self.stream = batches(self.labels, options.batch, recipe.balanced, self.rng)
        self.batch = min(options.batch, len(self.labels))

        network = network_of(recipe, images.classes, images.side).to(device)
        self.network = in_channels_last(network)
        self.optimiser = Optimiser(list(network.parameters()), recipe.sgd)
        state = self.network.state_dict()
        self.names = [name for name in state if state[name].is_floating_point()]
        self.state = [state[name] for name in self.names]
        self.average = [value.clone() for value in self.state]
        self.pace = torch.ones((), device=device)

        prior = images.counts / images.counts.sum()
        offsets = np.log(prior) if recipe.adjusted else np.zeros(len(prior))
        self.offsets = torch.from_numpy(offsets).float().to(device)
        self.rows = torch.zeros(self.chunk, self.batch, dtype=torch.long, device=device)
        self.shares = torch.ones(self.chunk, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.graph: Any = None
        self.consumed = 0.0
        self.steps = 0

    def body(self) -> None:
        """One step on the next row of the chunk."""
        rows = self.rows.index_select(0, self.position)[0]
        share = self.shares.index_select(0, self.position)
        self.position.add_(1)
        batch = cropped(self.pixels, rows, self.images.flips)
        if self.recipe.strong:
            batch = strongly_changed(batch)
        batch = (batch - 0.5) * 4
        targets = self.targets[rows]
        if self.recipe.mixup:
            batch = share * batch + (1 - share) * batch.flip(0)
        batch = batch.contiguous(memory_format=torch.channels_last)
        device = self.pixels.device.type
        on_gpu = device == "cuda"
        with torch.autocast(
            device, torch.bfloat16, enabled=on_gpu, cache_enabled=False
        ):
            logits = self.network(batch)
        logits = logits.float() + self.offsets
        loss = functional.cross_entropy(logits, targets, reduction="none")
        if self.recipe.mixup:
            other = functional.cross_entropy(logits, targets.flip(0), reduction="none")
            loss = share * loss + (1 - share) * other
        for parameter in self.optimiser.parameters:
            parameter.grad = None
        loss.mean().backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        with torch.no_grad():
            change = torch._foreach_sub(self.state, self.average)
            torch._foreach_mul_(change, self.pace)
            torch._foreach_add_(self.average, change)

    def prepare(self, progress: float) -> None:
        """What the next chunk of steps reads."""
        rows = np.stack([next(self.stream) for _ in range(self.chunk)])
        self.rows.copy_(torch.from_numpy(rows))
        if self.recipe.mixup:
            alpha = self.recipe.mixup
            shares = torch.from_numpy(self.rng.beta(alpha, alpha, self.chunk)).float()
            self.shares.copy_(shares)
        self.position.zero_()
        self.optimiser.rate.fill_(self.optimiser.largest_rate * rate_at(progress))
        self.pace.fill_(min(1.0, 20 / (self.steps + 1)))  # over 5% of the steps so far

    def capture(self) -> None:
        """A graph of one step, after a few without."""
        self.prepare(0)
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(4):
                self.body()
        torch.cuda.current_stream().wait_stream(beside)
        torch.cuda.synchronize()
        self.prepare(0)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.body()
        torch.cuda.synchronize()

    def train(self, progress: float) -> None:
        began = time.perf_counter()
        self.prepare(progress)
        for _ in range(self.chunk):
            if self.graph is None:
                self.body()
            else:
                self.graph.replay()
        if self.pixels.is_cuda:
            torch.cuda.synchronize()
        self.steps += self.chunk
        self.consumed += time.perf_counter() - began

    @torch.no_grad()
    def logits(self, pixels: Tensor, averaged: bool) -> Floats:
        values = self.average if averaged else self.state
        state = dict(zip(self.names, values, strict=True))
        self.network.eval()
        parts = []
        for start in range(0, len(pixels), 500):
            batch = pixels[start : start + 500].permute(0, 3, 1, 2) / 255
            batch = ((batch - 0.5) * 4).contiguous(memory_format=torch.channels_last)
            device = pixels.device.type
            with half_precision(device):
                parts.append(functional_call(self.network, state, batch).double().cpu())
        self.network.train()
        return np.asarray(torch.cat(parts).numpy())


# -- sets, packed to travel
# --------------------------------------------------------------------------------------


def pack(images: ImageSet, path: Path, quality: int) -> None:
    """WebP of all images, and the labels."""
    pictures = [*images.train_x, *images.test_x]
    files = [_compressed(picture, quality) for picture in pictures]
    np.savez(
        path,
        files=np.frombuffer(b"".join(files), np.uint8),
        ends=np.cumsum([len(file) for file in files]),
        train_labels=images.train_y.astype(np.int16),
        test_labels=images.test_y.astype(np.int16),
        held_out=images.held_out,
    )


def _compressed(picture: Bytes, quality: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "WEBP", quality=quality, method=6)
    return file.getvalue()


def unpack(name: str, path: Path) -> ImageSet:
    with np.load(path) as arrays:
        content = arrays["files"].tobytes()
        ends = arrays["ends"]
        train_y = arrays["train_labels"].astype(np.int64)
        test_y = arrays["test_labels"].astype(np.int64)
        held_out = arrays["held_out"]
    starts = np.concatenate([[0], ends[:-1]])

    def opened(ends: tuple[int, int]) -> Bytes:
        with Image.open(io.BytesIO(content[ends[0] : ends[1]])) as image:
            return np.asarray(image.convert("RGB"))

    with ThreadPoolExecutor(8) as pool:
        pictures = np.stack(list(pool.map(opened, zip(starts, ends, strict=True))))
    train_x = pictures[: len(train_y)]
    test_x = pictures[len(train_y) :]
    flips = image_sets.SOURCES[name].flips
    return ImageSet(name, train_x, train_y, held_out, test_x, test_y, flips)


# -- side by side
# --------------------------------------------------------------------------------------


def rows_of(
    images: ImageSet,
    trainings: dict[str, Training],
    pixels: dict[str, Tensor],
    progress: float,
    seconds: float,
) -> Iterator[dict[str, object]]:
    judged = Judged(images.counts, images.test_y, images.balanced_test)
    for name, training in trainings.items():
        for weights in ("average", "last") if progress == 1 else ("average",):
            averaged = weights == "average"
            scores, temperature = calibrated(
                training.logits(pixels["held_out"], averaged),
                images.train_y[images.held_out],
                training.logits(pixels["test"], averaged),
                images.counts,
                training.recipe.uniform,
            )
            seen = training.steps * training.batch
            yield {
                "set": images.name,
                "method": name,
                "weights": weights,
                "progress": progress,
                "seconds_asked": round(seconds, 1),
                "seconds_taken": round(training.consumed, 1),
                "epochs": round(seen / len(training.labels), 2),
                "images_a_second": round(seen / training.consumed),
                "temperature": round(temperature, 3),
            } | {key: round(value, 5) for key, value in judged.scores(scores).items()}


def compare(options: argparse.Namespace, name: str) -> None:
    """All recipes on one set, until the deadline."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.set_num_threads(1)
    packed = options.packed / f"{name}.npz" if options.packed else None
    if packed is not None and packed.exists():
        images = unpack(name, packed)
    else:
        images = image_sets.load(name, options.data).for_choices()
    fitted = ~images.held_out
    pixels = {
        "train": torch.from_numpy(images.train_x[fitted]).to(device),
        "held_out": torch.from_numpy(images.train_x[~fitted]).to(device),
        "test": torch.from_numpy(images.test_x).to(device),
    }
    targets = torch.from_numpy(images.train_y[fitted]).to(device)
    chosen = [
        key
        for key in options.recipes
        if images.side <= QUARTERED or RECIPES[key].network != "resnet32"
    ]
    trainings = {
        key: Training(RECIPES[key], images, pixels["train"], targets, options)
        for key in chosen
    }
    if device == "cuda" and not options.eager:
        for training in trainings.values():
            training.capture()
    for training in trainings.values():
        training.logits(pixels["test"], averaged=True)

    stamp = {
        "seed": options.seed,
        "hardware": hardware(),
        "versions": versions(["torch", "torchvision", "numpy"]),
        "commit": options.commit or commit(),
    }
    path = options.out.with_suffix(f".{name}.csv")

    def write(progress: float, seconds: float) -> None:
        for row in rows_of(images, trainings, pixels, progress, seconds):
            append(path, [row | stamp], FIELDS)

    start = time.time()
    finish = options.until - RESERVE
    if finish < start:
        raise SystemExit(f"{name}: not ready before the deadline; give more --seconds")
    pending = list(MEASURED_AT)
    print(f"{name}: ready, {finish - start:.0f} s to train", flush=True)
    while (now := time.time()) < finish:
        progress = (now - start) / (finish - start)
        if pending and progress >= pending[0]:
            write(pending.pop(0), finish - start)
        training = min(trainings.values(), key=lambda training: training.consumed)
        training.train(progress)
    write(1, finish - start)
    print(f"{name}: done", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("image-data"))
    parser.add_argument("--packed", type=Path)
    parser.add_argument("--pack", type=Path)
    parser.add_argument("--quality", type=int, default=85)
    parser.add_argument("--out", type=Path, default=Path("image-recipes.csv"))
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument(
        "--chunk", type=int, default=16, help="steps between looks at the clock"
    )
    parser.add_argument("--until", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    if options.pack:
        options.pack.mkdir(parents=True, exist_ok=True)
        for name in options.sets:
            images = image_sets.load(name, options.data).for_choices()
            pack(images, options.pack / f"{name}.npz", options.quality)
        return
    if options.until:
        compare(options, options.sets[0])
        return

    until = time.time() + options.seconds
    words = sys.argv[1:]
    running = {name: _started(words, name, until) for name in options.sets}
    failed = [name for name, process in running.items() if process.wait()]
    if failed and not options.eager and time.time() < until - 20:
        print(f"without graphs: {', '.join(failed)}", flush=True)
        again = [_started([*words, "--eager"], name, until) for name in failed]
        for process in again:
            process.wait()
    collect(options)


def _started(words: list[str], name: str, until: float) -> "subprocess.Popen[bytes]":
    command = [sys.executable, __file__, *words, "--sets", name, "--until", str(until)]
    return subprocess.Popen(command, env=os.environ)


def collect(options: argparse.Namespace) -> None:
    """The rows of all sets in one file, and a short table."""
    rows = []
    for name in options.sets:
        path = options.out.with_suffix(f".{name}.csv")
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                rows += list(csv.DictReader(file))
    with options.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        if row["progress"] == "1":
            print(
                f"{row['set']:16} {row['method']:22} {row['weights']:8}"
                f" epochs {row['epochs']:>7} accuracy {row['accuracy'][:6]}"
                f" balanced {row['balanced_accuracy'][:6]} utility {row['utility'][:6]}"
                f" nll {row['nll'][:6]} ece {row['ece'][:6]}"
            )


if __name__ == "__main__":
    main()

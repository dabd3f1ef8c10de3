"""What people write to classify long-tailed images: one network, one loop.

`cross-entropy`, the same with a class-balanced sampler (`sampler`), and with the log
prior added to the logits in the loss (`logit-adjustment`). On a GPU ResNet-18, with a
small stem below 128 pixels; on a CPU four convolutions. Crop and brightness, mirror
images where they show the same class, AdamW, warm-up, a cosine. The clock drives the
learning rate, so that it is zero at the deadline.

    python benchmarks/image_rivals.py logit-adjustment IMAGES.npz OUT.npz --seconds 60

trains one on a file of `image_sets.py` and writes its logits; the seconds run from
`--began`, which is when the command was given.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import image_sets
from image_drawn import Bytes
from image_scores import Floats, Labels
from image_sets import ImageSet

METHODS = ("cross-entropy", "sampler", "logit-adjustment")
WARM_UP = 0.05
BATCH = {"cpu": 64, "cuda": 128}
RATE = {"cpu": 2e-3, "cuda": 1e-3}
WEIGHT_DECAY = 0.05
BRIGHTNESS = 0.2
SMALL_STEM = 128  # pixels, from which on ResNet-18 has its own stem


@dataclass(frozen=True)
class Trained:
    """Logits, how often the images were seen, and what predicting the test took."""

    held_out: Floats
    test: Floats
    epochs: float
    seconds_of_test: float


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False),
                nn.BatchNorm2d(outputs),
            )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x), inplace=True)


def residual(
    classes: int, widths: Sequence[int], blocks: int, shrink: int
) -> nn.Sequential:
    """A residual network whose stem makes the image so many times smaller."""
    first = widths[0]
    layers: list[nn.Module] = [
        nn.Conv2d(3, first, 3, 2 if shrink > 1 else 1, 1, bias=False),
        nn.BatchNorm2d(first),
        nn.ReLU(inplace=True),
    ]
    layers += [nn.MaxPool2d(3, 2, 1) for _ in range(shrink.bit_length() - 2)]
    inputs = first
    for stage, width in enumerate(widths):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Block(inputs, width, stride))
            inputs = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    network = nn.Sequential(*layers)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return network


def resnet18(classes: int, side: int) -> nn.Module:
    """ResNet-18, with a stem of 3 x 3 that keeps the size below 128 pixels."""
    shrink = 1 if side < SMALL_STEM else 4
    return residual(classes, (64, 128, 256, 512), 2, shrink)


def four_convolutions(classes: int, side: int) -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 64, 128, 256):
        layers += [
            nn.Conv2d(channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
        channels = width
        if side > 4:
            layers.append(nn.MaxPool2d(2))
            side //= 2
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
    )


def in_channels_last(network: nn.Module) -> nn.Module:
    """The layout in which convolutions are fast."""
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def cropped(images: Tensor, rows: Tensor, flips: bool) -> Tensor:
    """Images of these rows as (samples, 3, side, side) between 0 and 1, moved by up to
    an eighth, mirrored half of the time, brighter or darker.
    """
    count = len(rows)
    side = images.shape[1]
    device = images.device
    ticks = torch.arange(side, device=device)
    reach = side // 8
    moves = torch.randint(-reach, reach + 1, (2, count, 1), device=device)
    mirrored = torch.rand(count, 1, device=device) < (0.5 if flips else 0.0)
    columns = torch.where(mirrored, side - 1 - ticks, ticks) + moves[1]
    down = _reflected(ticks + moves[0], side)
    right = _reflected(columns, side)
    picked = images[rows[:, None, None], down[:, :, None], right[:, None, :]]
    light = 1 + BRIGHTNESS * (2 * torch.rand(count, 1, 1, 1, device=device) - 1)
    return (picked.permute(0, 3, 1, 2) * (light / 255)).clamp(0, 1)


def _reflected(ticks: Tensor, side: int) -> Tensor:
    """Coordinates outside of the image, mirrored at its edge."""
    inside = ticks.abs()
    return torch.where(inside < side, inside, 2 * (side - 1) - inside)


def batches(
    labels: Labels, size: int, balanced: bool, rng: np.random.Generator
) -> Iterator[Labels]:
    """Rows of batches without end: each image once an epoch, or classes drawn alike."""
    counts = np.bincount(labels)
    size = min(size, len(labels))
    while True:
        if balanced:
            weights = 1 / counts[labels]
            chances = weights / weights.sum()
            order = rng.choice(len(labels), len(labels), p=chances)
        else:
            order = rng.permutation(len(labels))
        for start in range(0, len(order) - size + 1, size):
            yield order[start : start + size]


def rate_at(progress: float) -> float:
    """The share of the largest learning rate: up over 5% of the time, then a cosine."""
    if progress < WARM_UP:
        return max(progress / WARM_UP, 0.01)
    falling = (progress - WARM_UP) / (1 - WARM_UP)
    return float(0.5 + 0.5 * np.cos(np.pi * min(falling, 1)))


def train(
    images: ImageSet,
    method: str,
    seconds: float,
    seed: int,
    device: str = "cpu",
    clock: Callable[[], float] = time.time,
    began: float | None = None,
) -> Trained:
    """Train on what is not held out, for so many seconds from `began`, or from now."""
    start = clock() if began is None else began
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    fitted = ~images.held_out
    labels = images.train_y[fitted]
    pixels = torch.from_numpy(images.train_x[fitted]).to(device)
    targets = torch.from_numpy(labels).to(device)
    statistics = pixels.to(torch.float32).flatten(0, 2) / 255
    mean = statistics.mean(0)[:, None, None]
    deviation = statistics.std(0)[:, None, None] + 1e-3

    on_gpu = device == "cuda"
    build = resnet18 if on_gpu else four_convolutions
    network = in_channels_last(build(images.classes, images.side).to(device))
    optimiser = torch.optim.AdamW(
        network.parameters(), RATE[device], weight_decay=WEIGHT_DECAY
    )
    prior = torch.from_numpy(images.counts / images.counts.sum()).to(device)
    adjusted = method == "logit-adjustment"
    offsets = prior.log().float() if adjusted else torch.zeros_like(prior).float()

    steps = 0
    stream = batches(labels, BATCH[device], method == "sampler", rng)
    while (progress := (clock() - start) / seconds) < 1:
        for group in optimiser.param_groups:
            group["lr"] = RATE[device] * rate_at(progress)
        rows = torch.from_numpy(next(stream)).to(device)
        batch = (cropped(pixels, rows, images.flips) - mean) / deviation
        with torch.autocast(device, torch.bfloat16, enabled=on_gpu):
            logits = network(batch)
        loss = functional.cross_entropy(logits.float() + offsets, targets[rows])
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        steps += 1
        if on_gpu:
            torch.cuda.synchronize()

    if not steps:
        raise SystemExit(f"no step within {seconds:g} seconds: give more --seconds")

    def predicted(shown: Bytes) -> Floats:
        return predict(network, shown, mean, deviation, device)

    held_out = predicted(images.train_x[images.held_out])
    trained = clock()
    test = predicted(images.test_x)
    return Trained(
        held_out,
        test,
        steps * min(BATCH[device], len(labels)) / len(labels),
        clock() - trained,
    )


@torch.no_grad()
def predict(
    network: nn.Module, images: Bytes, mean: Tensor, deviation: Tensor, device: str
) -> Floats:
    """Logits, of the images as they are."""
    network.eval()
    logits = []
    for start in range(0, len(images), 250):
        pixels = torch.from_numpy(images[start : start + 250]).to(device)
        batch = (pixels.permute(0, 3, 1, 2) / 255 - mean) / deviation
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits.append(network(batch).double().cpu())
    return np.asarray(torch.cat(logits).numpy())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("images", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flips", action="store_true")
    parser.add_argument("--began", type=float)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = image_sets.read(options.images, options.flips)
    trained = train(
        images,
        options.method,
        options.seconds,
        options.seed,
        device,
        began=options.began,
    )
    np.savez(options.out, **vars(trained))


if __name__ == "__main__":
    main()

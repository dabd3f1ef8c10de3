"""How fast stacks train on one GPU, beside a plain PyTorch loop of the same networks in
the same run.

    python benchmarks/training.py --data DIR
        everything; four minutes on an H200
    python benchmarks/training.py --data DIR --brief
        a few epochs of everything: seconds, to try it
    python benchmarks/training.py --plot
        results/training.png from results/training.csv

ResNet-32, batch 128, CIFAR100-LT, crop, flip and rotation, `rf-dlc-paper` without
utility, the test set evaluated. DIR holds cifar-100-python/. The plain loop is what
most people write: separate modules, a DataLoader with 8 workers, autocast; a few of its
epochs are measured. Ours are measured whole.
"""

import argparse
import csv
import gc
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from data import PillowAugmented
from recording import RESULTS, write
from rfdlc.data.dataset import Dataset
from rfdlc.data.load import load
from rfdlc.training.building import choose_device, method_net, new_decider
from rfdlc.training.loop import build_stages, epochs, split_outputs
from rfdlc.training.methods import METHODS, resolve
from rfdlc.training.networks.particles import place

EPOCHS, WORKERS, PLAIN_EPOCHS, SCALE_EPOCHS = 200, 8, 3, 3
METHOD, SOURCE = "rf-dlc-paper", "cifar100-lt"
PUBLISHED = (49.8, 50.6)  # ACC of the paper's training without utility, as audited


# -- the plain loop
# --------------------------------------------------------------------------------------


class PlainBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.stride, self.padding = stride, (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        if self.padding:
            x = functional.pad(
                x[:, :, :: self.stride, :: self.stride],
                (0, 0, 0, 0, self.padding, self.padding),
            )
        return (y + x).relu()


class PlainResNet32(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        shapes = (
            [(16, 16, 1)] * 5
            + [(16, 32, 2)]
            + [(32, 32, 1)] * 4
            + [(32, 64, 2)]
            + [(64, 64, 1)] * 4
        )
        self.stem, self.norm = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(*(PlainBlock(*shape) for shape in shapes))
        self.head = nn.Parameter(functional.normalize(torch.randn(64, classes), dim=0))

    def forward(self, x: Tensor) -> Tensor:
        features = self.blocks(self.norm(self.stem(x)).relu()).mean((2, 3)).float()
        return (
            30
            * functional.normalize(features, dim=1)
            @ functional.normalize(self.head, dim=0)
        )


def plain_epochs(
    data: Dataset, particles: int, count: int, workers: int, device: torch.device
) -> Iterator[float]:
    """Seconds of each epoch: a loop over batches, a loop over networks."""
    nets = nn.ModuleList(PlainResNet32(len(data.classes)) for _ in range(particles)).to(
        device
    )
    optimiser = torch.optim.SGD(
        nets.parameters(), 0.1, 0.9, weight_decay=5e-4, nesterov=True
    )
    loader = DataLoader(
        PillowAugmented(data.train),
        128,
        shuffle=True,
        num_workers=workers,
        pin_memory=True,
        persistent_workers=True,
    )
    for _ in range(count):
        began = time.perf_counter()
        for inputs, targets in loader:
            x, y = (
                inputs.to(device, non_blocking=True),
                targets.to(device, non_blocking=True),
            )
            with torch.autocast(device.type, torch.bfloat16):
                logits = [net(x) for net in nets]
            loss = torch.stack(
                [functional.cross_entropy(values.float(), y) for values in logits]
            ).sum()
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        _wait(device)
        yield time.perf_counter() - began


# -- ours
# --------------------------------------------------------------------------------------


class Measured:
    """A stack trained for some epochs: seconds of warm-up, of the epochs and of
    evaluation; memory; accuracy.
    """

    def __init__(
        self,
        data: Dataset,
        seeds: Sequence[int],
        device: torch.device,
        stop: int,
        **settings: Any,
    ) -> None:
        _wait(device)
        if device.type == "cuda":
            gc.collect()  # of the stack before
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        row, (_, chosen) = METHODS[METHOD], resolve(METHOD, SOURCE, settings)
        net = place(
            method_net(row, chosen, data.input_shape, data.classes, seeds), device
        )
        parts = build_stages(row, chosen, data, seeds, device)
        times = []
        for epoch in epochs(net, parts, {}):
            times.append(epoch.seconds)
            if epoch.epoch == stop:
                break
        began = time.perf_counter()
        assert data.test is not None
        outputs = split_outputs(net, data.test, data.normalisation, chosen, device)[0]
        assert outputs is not None
        logits = outputs.numpy()
        decider = new_decider(METHOD, chosen, data.classes)
        chosen_classes = [decider.decide(own, logits=True) for own in logits]
        self.accuracies = [
            100 * float((own == data.test.labels).mean()) for own in chosen_classes
        ]
        self.evaluation = time.perf_counter() - began
        self.epoch = median(times[1:]) if len(times) > 1 else times[0]
        self.warm_up = times[0] - self.epoch
        self.seconds = sum(times) - self.warm_up + self.evaluation
        self.steps = parts[0].loader.steps
        self.memory = (
            torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
        )


def measure(options: argparse.Namespace) -> None:
    device = choose_device(options.device)
    data = load(SOURCE, root=options.data)
    whole = 4 if options.brief else EPOCHS
    rows: list[dict[str, object]] = []

    def note(what: str, value: float, unit: str, **more: object) -> None:
        rows.append({"what": what, "value": f"{value:.4g}", "unit": unit, **more})
        print(f"{what}: {value:.4g} {unit} {more or ''}", flush=True)

    plain = min(list(plain_epochs(data, 3, 1 + PLAIN_EPOCHS, WORKERS, device))[1:])
    plain_run = EPOCHS * plain
    note(
        f"plain loop, 3 networks, {WORKERS} workers: an epoch",
        plain,
        "s",
        reference="least of 3 epochs",
    )
    common: dict[str, Any] = {
        "reference": f"plain loop, {EPOCHS} epochs: {plain_run:.0f} s"
    }
    for seeds, limit, ratio in ((1, 45, 10), (5, 125, 18)):
        found = Measured(data, range(seeds), device, whole)
        faster = seeds * plain_run / (found.seconds * EPOCHS / whole)
        title = f"{seeds} x 3 networks, {whole} epochs and the test set"
        note(f"{title}: after warm-up", found.seconds, "s", required=f"<= {limit}")
        note(
            f"{title}: a run",
            found.seconds / seeds,
            "s",
            ratio=f"{faster:.3g}",
            required=f">= {ratio}",
            **common,
        )
        note(f"{title}: warm-up", found.warm_up, "s", required="<= 40")
        note(
            f"{title}: memory",
            found.memory,
            "GiB",
            required="<= 12" if seeds == 5 else "",
        )
        spread = f" +- {stdev(found.accuracies):.2f}" if seeds > 1 else ""
        low, high = PUBLISHED[0] - 0.5, PUBLISHED[1] + 0.5
        needed = f"{low} to {high}" if seeds == 5 and whole == EPOCHS else ""
        note(f"{title}: ACC{spread}", mean(found.accuracies), "%", required=needed)
    varied: dict[str, list[tuple[int, dict[str, int]]]] = {
        "particles": [(1, {"particles": n}) for n in (1, 3, 6, 12)],
        "seeds": [(n, {}) for n in (1, 5, 10)],
        "batch size": [
            (5, {"batch_size": n}) for n in (64, 256, 512)
        ],  # 128 is 5 seeds
    }
    for name, cases in varied.items():
        for seeds, changes in cases:
            found = Measured(data, range(seeds), device, SCALE_EPOCHS, **changes)
            value = next(iter(changes.values()), seeds)
            step = (
                f"{1000 * found.epoch / found.steps:.3f} ms a step,"
                f" {found.memory:.2f} GiB"
            )
            note(f"an epoch by {name}: {value}", found.epoch, "s", reference=step)
    write(
        "training" if not options.brief else "training-brief",
        rows,
        ("torch", "triton", "numpy"),
        options.commit,
    )


def plot() -> None:
    """Seconds an epoch against particles, seeds and batch size."""
    import matplotlib.pyplot as plt

    with (RESULTS / "training.csv").open(newline="") as lines:
        found = [
            row
            for row in csv.DictReader(lines)
            if row["what"].startswith("an epoch by ")
        ]
    names = dict.fromkeys(
        row["what"].removeprefix("an epoch by ").split(":")[0] for row in found
    )
    figure, axes = plt.subplots(1, len(names), figsize=(10, 3.2), layout="constrained")
    for axis, name in zip(axes, names, strict=True):
        points = {
            int(r["what"].split(": ")[1]): float(r["value"])
            for r in found
            if f"by {name}:" in r["what"]
        }
        if name == "batch size":
            points[128] = next(
                float(r["value"]) for r in found if r["what"] == "an epoch by seeds: 5"
            )
        xs = sorted(points)
        axis.plot(xs, [points[x] for x in xs], "o-")
        if name != "batch size":
            axis.plot(
                xs,
                [points[xs[0]] * x / xs[0] for x in xs],
                ":",
                color="grey",
                label="in proportion",
            )
            axis.legend(frameon=False)
        axis.set(
            xlabel=name,
            ylabel="seconds an epoch",
            xticks=xs,
            ylim=(0, 1.05 * axis.get_ylim()[1]),
        )
    figure.suptitle(
        "CIFAR100-LT, ResNet-32, one H200; 3 particles, batch 128; batch sizes with 5"
        " seeds"
    )
    figure.savefig(RESULTS / "training.png", dpi=150)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--commit", default="", help="commit to record, where there is no git"
    )
    parser.add_argument("--brief", action="store_true")
    parser.add_argument("--plot", action="store_true")
    chosen = parser.parse_args()
    if chosen.plot:
        plot()
    else:
        measure(chosen)

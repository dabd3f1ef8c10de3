"""Export: for every method and every backbone the graph decides as the library does, on
1,000 random inputs.

    python benchmarks/export.py        writes benchmarks/results/export.csv

Small images of 6 classes, a random utility with 8 actions: every method on the MLP (12
x 12), RF-DLC, three particles, on every backbone (a network of the user's own 12 x 12,
the others 32 x 32), and `ce`, one network, on the large ones. Most are trained for a
few epochs. The large ones would need many more, and are set up instead (`settle`). The
inputs are noise around random levels, so that decisions differ from input to input:
that they do is measured too.

A large network whose residual branches are as strong as at initialisation multiplies
rounding, whoever computes it. So for large ones the distance from 64 bits is measured
as well, of the graph and of the library, and how it depends on that strength. The exit
code is 1 where any decision differs (ties aside), where a probability differs by more
than is allowed, or where nearly all decisions are the same.
"""

import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from recording import write
from rfdlc.data.dataset import Dataset, Split
from rfdlc.data.loader import Normaliser
from rfdlc.decisions.utility import Utility
from rfdlc.exporting import export as exporting
from rfdlc.exporting.export import (
    TIE,
    TOLERANCE,
    Rounding,
    export,
    measure_rounding,
)
from rfdlc.predicting.onnx_model import OnnxModel
from rfdlc.probabilities.classes import Classes
from rfdlc.training.building import OwnBackbone
from rfdlc.training.methods import METHODS
from rfdlc.training.model import Model
from rfdlc.training.networks.backbones import BACKBONES, Bottleneck
from rfdlc.training.networks.stack import BatchNorm
from rfdlc.training.run import plain_tensors
from rfdlc.training.train import train

CLASSES, SAMPLES, CHECKED, EXACT = (
    6,
    1000,
    100,
    20,
)  # inputs; those that export compares itself; those in 64 bits
LARGE = ("resnet50", "resnet50-slim", "resnext50")
ACTIONS, MOST_ALIKE = 8, 0.95  # the share of inputs that may get the same action
TRAINED: dict[str, Any] = {
    "epochs": 4,
    "warmup": 5,
    "learning_rate": 0.05,
    "batch_size": 8,
    "widths": (16,),
    "device": "cpu",
}
ONCE = {
    **TRAINED,
    "epochs": 1,
    "learning_rate": 0.002,
}  # for large networks, which are settled after it
TAMED, STRONG = (
    0.25,
    1.0,
)  # how much a residual branch adds, in standard deviations; at initialisation 1
Row = dict[str, object]


def small_images(side: int) -> Dataset:
    """Noise around a level a class, long-tailed."""
    rng = np.random.default_rng(0)

    def split(counts: list[int]) -> Split:
        labels = np.repeat(np.arange(CLASSES), counts)
        levels = labels[:, None, None, None] * 35 + rng.integers(
            0, 60, (len(labels), 3, side, side)
        )
        return Split(levels.astype(np.uint8), labels)

    parts = {"train": split([30, 20, 14, 10, 8, 6]), "test": split([5] * CLASSES)}
    return Dataset.of("small", [f"class {i}" for i in range(CLASSES)], parts)


def own_network() -> nn.Module:
    """Somebody's own features."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(100, 8),
    )


def random_levels(shape: tuple[int, ...], count: int) -> NDArray[np.uint8]:
    """Noise around a level an image, as the training images have."""
    rng = np.random.default_rng(3)
    images = rng.integers(0, 196, (count, 1, 1, 1)) + rng.integers(
        0, 60, (count, *shape)
    )
    return images.astype(np.uint8)


def random_utility(classes: Classes) -> Utility:
    matrix = np.random.default_rng(1).uniform(-1, 1, (len(classes), ACTIONS))
    return Utility(matrix, classes, [f"action {i}" for i in range(ACTIONS)])


def settle(run: Path, data: Dataset, residual: float = TAMED) -> Model:
    """What a long training brings, without one: batch norm that knows the images, heads
    that point to the classes.

    Residual branches add `residual` standard deviations; those of networks that have
    learned add little each.
    """
    model, train, test = (
        Model.load(run, device="cpu"),
        data.splits["train"],
        data.splits["test"],
    )
    normalise = Normaliser(
        model.normalisation, model.input_shape, torch.device("cpu"), torch.float32
    )
    with torch.no_grad():
        for layer in model.net.modules():
            if isinstance(layer, Bottleneck):
                layer.norm3.weight.fill_(residual)
            if isinstance(layer, BatchNorm):
                layer.momentum = 1.0  # the statistics are those of the next batch
        features = model.net.train().features(
            normalise(torch.from_numpy(train.array).float())[None]
        )
        means = torch.stack(
            [features[:, train.labels == label].mean(1) for label in range(CLASSES)], -1
        )
        head = model.net.get_submodule("head").get_parameter("weight")
        head.copy_(functional.normalize(means - means.mean(-1, keepdim=True), dim=1))
    model.net.eval()
    save_file(plain_tensors(model.net.state_dict()), run / "model.safetensors")
    model.decider.fit(model.predict(test)).save(run / "decider.json")
    return model


def compare(
    method: str, backbone: str, side: int, folder: Path
) -> tuple[list[Row], bool]:
    """Rows for one pair, and whether all was well."""
    network: OwnBackbone | None = own_network if backbone == "own" else None
    run, data, large = folder / "run", small_images(side), backbone in LARGE
    train(
        data, method, run, backbone=network or backbone, **(ONCE if large else TRAINED)
    )
    if large:
        settle(run, data)
    model = Model.load(run, backbone=network, device="cpu")
    utility = random_utility(model.classes)
    file = export(run, folder / "model.onnx", utility=utility, backbone=network).path
    inputs = random_levels(model.input_shape, SAMPLES)
    decider, predictions = model.decider.replace(utility=utility), model.predict(inputs)
    found, expected = (
        OnnxModel.load(file).decide(inputs),
        np.asarray(decider.probabilities(predictions)),
    )
    values = np.sort(decider.utility.gains(decider.probabilities(predictions)), axis=1)
    clear = values[:, -1] - values[:, -2] > TIE * np.ptp(utility.matrix)
    equal = int((found.action == decider.decide(predictions))[clear].sum())
    alike = float(np.bincount(found.action).max() / SAMPLES)
    differences = np.abs(found.probabilities - expected).max(axis=1)
    difference = float(differences.max())
    name = f"{method}, {backbone}"
    rows: list[Row] = [
        {
            "what": f"{name}: decisions equal, of those without a tie",
            "value": equal,
            "unit": f"of {SAMPLES} random inputs",
            "reference": int(clear.sum()),
            "required": int(clear.sum()),
        },
        {
            "what": f"{name}: share of the most frequent action",
            "value": round(alike, 3),
            "unit": f"of {len(set(found.action.tolist()))} actions that were taken",
            "required": f"at most {MOST_ALIKE}",
        },
        {
            "what": f"{name}: largest difference of a probability",
            "value": f"{difference:.2e}",
            "unit": "probability",
            "required": TOLERANCE,
        },
    ]
    well = equal == clear.sum() and alike <= MOST_ALIKE and difference <= TOLERANCE
    if large:
        worst = np.argsort(-differences)[:EXACT]
        off = measure_rounding(
            model, inputs[worst], found.probabilities[worst], expected[worst]
        )
        rows.append(rounding_row(name, off))
        well &= off.graph <= off.allowed
    return rows, bool(well)


def rounding_row(name: str, off: Rounding) -> Row:
    return {
        "what": (
            f"{name}: the graph's largest distance from 64 bits (reference: the"
            " library's)"
        ),
        "value": f"{off.graph:.2e}",
        "unit": f"probability, on the {EXACT} inputs that differ most",
        "reference": f"{off.model:.2e}",
        "ratio": round(off.graph / off.model, 2),
        "required": f"at most {off.allowed:.2e}",
    }


def multiplied(backbone: str, folder: Path) -> list[Row]:
    """How far one network's features are from 64 bits, by the strength of its residual
    branches.
    """
    data, rows = small_images(32), []
    train(data, "ce", folder / "run", backbone=backbone, **ONCE)
    for residual in (TAMED, STRONG):
        model = settle(folder / "run", data, residual)
        normalise = Normaliser(
            model.normalisation, model.input_shape, torch.device("cpu"), torch.float32
        )
        inputs = normalise(
            torch.from_numpy(random_levels(model.input_shape, EXACT)).float()
        )[None]
        with torch.no_grad():
            features = model.net.features(inputs).double()
            exact = model.net.double().features(inputs.double())
        off = (features - exact).norm(dim=-1) / exact.norm(dim=-1)
        rows.append(
            {
                "what": (
                    f"{backbone}: the library's features from 64 bits, residual"
                    f" branches of strength {residual:g}"
                ),
                "value": f"{float(off.mean()):.2e}",
                "unit": (
                    f"of their length, mean of {EXACT} inputs (1 is the strength at"
                    " initialisation)"
                ),
                "reference": torch.finfo(torch.float32).eps / 2,
                "ratio": round(2 * float(off.mean()) / torch.finfo(torch.float32).eps),
            }
        )
    return rows


def main() -> None:
    warnings.simplefilter(
        "ignore"
    )  # a few epochs are too short for a plausible temperature
    cases = [(method, "mlp", 12) for method in METHODS] + [("rf-dlc", "own", 12)]
    cases += [("rf-dlc", name, 32) for name in BACKBONES if name != "mlp"] + [
        ("ce", name, 32) for name in LARGE
    ]
    rows: list[Row] = []
    right = True
    try:
        for method, backbone, side in cases:
            large = backbone in LARGE
            exporting.SAMPLES = CHECKED if large else 500
            with (
                tempfile.TemporaryDirectory() as folder,
                quick_groups(large and method == "rf-dlc"),
            ):
                found, well = compare(method, backbone, side, Path(folder))
            print(
                *(f"{row['what']} {row['value']}" for row in found),
                sep="\n",
                flush=True,
            )
            rows, right = rows + found, right and well
        with tempfile.TemporaryDirectory() as folder:
            rows += multiplied("resnext50", Path(folder))
    finally:  # what was measured is kept, whatever comes
        write("export", rows, ["rfdlc", "torch", "onnx", "onnxruntime", "onnxscript"])
    sys.exit(not right)


@contextmanager
def quick_groups(wanted: bool) -> Iterator[None]:
    """Several networks' convolutions by torch itself: on some processors oneDNN and
    NNPACK take far longer.
    """
    with (
        torch.backends.mkldnn.flags(enabled=not wanted),
        torch.backends.nnpack.flags(enabled=not wanted),
    ):
        yield


if __name__ == "__main__":
    main()

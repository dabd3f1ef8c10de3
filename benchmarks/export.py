"""Export: for every method and every backbone the graph decides as the library does, on 1,000 random inputs.

    python benchmarks/export.py        writes benchmarks/results/export.csv

Small images of 6 classes, a few epochs of training, a random utility with 8 actions: every method on the MLP (12 x 12),
and RF-DLC, three particles, on every backbone (a network of the user's own 12 x 12, the others 32 x 32). Where three
particles of up to 25 million weights take too long on two cores, they are compared on 100 inputs, and one such network
(`ce`) on 1,000. The inputs are noise around random levels, so that decisions differ from input to input: that they do
is measured too. The exit code is 1 where any decision differs (ties aside), or where nearly all are the same.
"""

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from recording import write
from rfdlc.apps.export import parity
from rfdlc.apps.export.exporting import export
from rfdlc.apps.export.parity import TIE, TOLERANCE
from rfdlc.apps.onnx_model import OnnxModel
from rfdlc.data.dataset import Dataset, Split
from rfdlc.decide.classes import Classes
from rfdlc.decide.utility import Utility
from rfdlc.learn.assembly import OwnBackbone
from rfdlc.learn.fitting import train
from rfdlc.learn.methods import METHODS
from rfdlc.learn.model import Model
from rfdlc.learn.networks.backbones import BACKBONES

CLASSES, SAMPLES, FEWER = 6, 1000, 100
LARGE = ("resnet50", "resnet50-slim", "resnext50")
ACTIONS, MOST_ALIKE = 8, 0.95  # the share of inputs that may get the same action
TRAINED: dict[str, Any] = {"epochs": 4, "learning_rate": 0.05, "batch_size": 8, "widths": (16,), "device": "cpu"}
GENTLY = {**TRAINED, "epochs": 2, "learning_rate": 0.002}  # for large networks, whose logits would explode
Row = dict[str, object]


def small_images(side: int) -> Dataset:
    """Noise around a level a class, long-tailed."""
    rng = np.random.default_rng(0)

    def split(counts: list[int]) -> Split:
        labels = np.repeat(np.arange(CLASSES), counts)
        levels = labels[:, None, None, None] * 35 + rng.integers(0, 60, (len(labels), 3, side, side))
        return Split(levels.astype(np.uint8), labels)

    parts = {"train": split([30, 20, 14, 10, 8, 6]), "test": split([5] * CLASSES)}
    return Dataset.of("small", [f"class {i}" for i in range(CLASSES)], parts)


def own_network() -> nn.Module:
    """Somebody's own features."""
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(100, 8))


def random_levels(shape: tuple[int, ...], count: int) -> NDArray[np.uint8]:
    """Noise around a level an image, as the training images have."""
    rng = np.random.default_rng(3)
    images = rng.integers(0, 196, (count, 1, 1, 1)) + rng.integers(0, 60, (count, *shape))
    return images.astype(np.uint8)


def random_utility(classes: Classes) -> Utility:
    matrix = np.random.default_rng(1).uniform(-1, 1, (len(classes), ACTIONS))
    return Utility(matrix, classes, [f"action {i}" for i in range(ACTIONS)])


def compare(method: str, backbone: str, side: int, samples: int, folder: Path) -> tuple[list[Row], bool]:
    """Rows for one pair, and whether all was well."""
    network: OwnBackbone | None = own_network if backbone == "own" else None
    run = folder / f"{method}-{backbone}"
    data, chosen = small_images(side), network or backbone
    train(data, method, run, backbone=chosen, **(GENTLY if backbone in LARGE else TRAINED))
    model = Model.load(run, backbone=network, device="cpu")
    utility = random_utility(model.classes)
    file = export(run, folder / "model.onnx", utility=utility, backbone=network).path
    inputs = random_levels(model.input_shape, samples)
    decider, predictions = model.decider.with_utility(utility), model.predict(inputs)
    found = OnnxModel.load(file).decide(inputs)
    values = np.sort(decider.expected_utility(predictions), axis=1)
    clear = values[:, -1] - values[:, -2] > TIE * np.ptp(utility.matrix)
    equal = int((found.action == decider.decide(predictions))[clear].sum())
    alike = float(np.bincount(found.action).max() / samples)
    difference = float(np.abs(found.probabilities - np.asarray(decider.probabilities(predictions))).max())
    rows: list[Row] = [
        {
            "what": f"{method}, {backbone}: decisions equal, of those without a tie",
            "value": equal,
            "unit": f"of {samples} random inputs",
            "reference": int(clear.sum()),
            "required": int(clear.sum()),
        },
        {
            "what": f"{method}, {backbone}: share of the most frequent action",
            "value": round(alike, 3),
            "unit": f"of {len(set(found.action.tolist()))} actions that were taken",
            "required": f"at most {MOST_ALIKE}",
        },
        {
            "what": f"{method}, {backbone}: largest difference of a probability",
            "value": f"{difference:.2e}",
            "unit": "probability",
            "required": TOLERANCE,
        },
    ]
    return rows, equal == clear.sum() and difference <= TOLERANCE and alike <= MOST_ALIKE


def main() -> None:
    warnings.simplefilter("ignore")  # one epoch is too short for a plausible temperature
    cases = [(method, "mlp", 12, SAMPLES) for method in METHODS] + [("rf-dlc", "own", 12, SAMPLES)]
    cases += [("rf-dlc", name, 32, FEWER if name in LARGE else SAMPLES) for name in BACKBONES if name != "mlp"]
    cases += [("ce", name, 32, SAMPLES) for name in LARGE]
    rows: list[Row] = []
    right = True
    try:
        for case in cases:
            parity.SAMPLES = min(case[-1], 500)  # what export itself compares
            with tempfile.TemporaryDirectory() as folder:
                found, well = compare(*case, Path(folder))
            print(*(f"{row['what']} {row['value']}" for row in found), sep="\n", flush=True)
            rows, right = rows + found, right and well
    finally:  # what was measured is kept, whatever comes
        write("export", rows, ["rfdlc", "torch", "onnx", "onnxruntime", "onnxscript"])
    sys.exit(not right)


if __name__ == "__main__":
    main()

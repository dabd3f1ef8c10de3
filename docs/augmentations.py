"""The picture of augmentations in data.md: python docs/augmentations.py writes
docs/figures/augmentations.png.
"""

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_image

from rfdlc.data.augment import AUGMENTATIONS, Augment
from rfdlc.data.policy import OPERATIONS, Policy
from rfdlc.training.config import TrainConfig
from rfdlc.training.loop import augmentation

SIDE, STRENGTH = 64, 0.8


def photograph() -> torch.Tensor:
    """(1, 3, SIDE, SIDE): the flower that scikit-learn ships."""
    image = (
        Image.fromarray(load_sample_image("flower.jpg"))
        .crop((150, 0, 577, 427))
        .resize((SIDE, SIDE))
    )
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]


def main() -> None:
    """One row per value of `augment`, eight draws each; and each operation of the
    policies.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    image, names = (
        photograph(),
        [name for name in AUGMENTATIONS if name not in ("none", "crop-randaugment")],
    )
    rows = {name: TrainConfig(augment=name) for name in names}
    rows["randaugment\nmagnitude=1\ncutout=0.5"] = TrainConfig(
        augment="randaugment", magnitude=1, cutout=0.5
    )
    figure, axes = plt.subplots(len(rows) + 2, 8, figsize=(8, len(rows) + 2.3))
    figure.subplots_adjust(hspace=0.15)
    for own, (name, config) in zip(axes, rows.items(), strict=False):
        augment = augmentation(config, "images", SIDE)
        assert augment is not None
        shown = augment(
            image.expand(8, -1, -1, -1),
            augment.draw(8, torch.Generator().manual_seed(6)),
        )
        show(own, shown)
        own[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
    policy, some = Policy(layers=1), len(OPERATIONS)
    draws = {
        "operation": torch.arange(some)[:, None],
        "strength": torch.full((some, 1), STRENGTH),
    }
    augment = Augment(policy=policy)
    singles = list(augment(image.expand(some, -1, -1, -1), draws))
    for place, axis in enumerate(axes[len(rows) :].flatten()):
        axis.axis("off")
        if place < some:
            axis.imshow(singles[place].permute(1, 2, 0).numpy())
            axis.set_title(OPERATIONS[place], fontsize=7, pad=2)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=80, bbox_inches="tight")
    path = Path(__file__).parent / "figures" / "augmentations.png"
    Image.open(drawn).convert("RGB").quantize(192).save(path, optimize=True)


def show(axes, images) -> None:
    for axis, each in zip(axes, images, strict=True):
        axis.imshow(each.permute(1, 2, 0).byte().numpy())
        axis.set(xticks=[], yticks=[])
        axis.set_frame_on(False)


if __name__ == "__main__":
    main()

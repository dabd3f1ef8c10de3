"""Small images in two sizes of classes, and runs that were trained for an instant."""

import warnings

import numpy as np
import pytest

import rfdlc
from rfdlc.data.dataset import Split

SIDE, CLASSES = 12, 6


@pytest.fixture(scope="session")
def small_images():
    """Noise around a level a class, long-tailed."""
    rng = np.random.default_rng(0)

    def split(counts):
        labels = np.repeat(np.arange(CLASSES), counts)
        levels = labels[:, None, None, None] * 35 + rng.integers(
            0, 60, (len(labels), 3, SIDE, SIDE)
        )
        return Split(levels.astype(np.uint8), labels)

    names = ["ant", "bee", "cat", "dog", "elk", "fox"]
    splits = {"train": split([30, 20, 14, 10, 8, 6]), "test": split([5] * CLASSES)}
    return rfdlc.Dataset.of("small", names, splits)


@pytest.fixture(scope="session")
def trained(small_images, tmp_path_factory):
    """A run folder: `trained(method, backbone, **settings)`; the same ones are trained
    once.
    """
    made = {}

    def make(method, backbone, network=None, **settings):
        key = (method, backbone, *sorted(settings.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("runs") / "run"
            settings = {
                "epochs": 4,
                "batch_size": 8,
                "learning_rate": 0.05,
                "widths": (16,),
                "hold_out": 0.2,
            } | settings
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # a few epochs are too short for a plausible temperature
                rfdlc.train(
                    small_images,
                    method,
                    made[key],
                    backbone=network or backbone,
                    device="cpu",
                    **settings,
                )
        return made[key]

    return make

"""The kernels of augmentation against the same operations in torch, which other tests
compare with pillow.
"""

import os
from importlib.util import find_spec

import pytest
import torch

from rfdlc.data import policy
from rfdlc.data.augment import AUGMENTATIONS, Augment
from rfdlc.data.policy import BLENDS, OPERATIONS, TABLES

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # how to run them without a GPU
pytestmark = pytest.mark.skipif(
    not (find_spec("triton") and (INTERPRETED or torch.cuda.is_available())),
    reason="needs Triton and a GPU",
)
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
SHAPES = [(3, 32, 32), (1, 28, 28), (2, 8, 20), (3, 64, 48), (4, 2, 5)]


def images_of(shape: tuple[int, ...], count: int) -> torch.Tensor:
    """Some of few values, some of all, one of a single value."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.linspace(0, 90, count).view(-1, 1, 1, 1)
    return (
        (128 + spread * torch.randn(count, *shape, generator=generator))
        .clamp(0, 255)
        .to(torch.uint8)
    )


def with_kernels(
    augment: Augment, images: torch.Tensor, draws: policy.Draws, monkeypatch
) -> torch.Tensor:
    from rfdlc.data import augment as module
    from rfdlc.data import augment_kernels

    with monkeypatch.context() as patch:
        for place in (policy, module):
            patch.setattr(place, "kernels", lambda images: augment_kernels)
        return augment(
            images.to(DEVICE), {name: drawn.to(DEVICE) for name, drawn in draws.items()}
        ).cpu()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("operation", [*TABLES, *BLENDS])
def test_each_operation(operation, shape, monkeypatch):
    images = images_of(shape, 6)
    for strength in (-1.0, -0.31, 0.0, 0.57, 1.0):
        draws = {
            "operation": torch.full((6, 1), OPERATIONS.index(operation)),
            "strength": torch.full((6, 1), strength),
        }
        augment = Augment(policy=policy.Policy(layers=1))
        apart = (
            with_kernels(augment, images, draws, monkeypatch).int()
            - augment(images, draws).int()
        )
        assert (
            apart.abs().max() <= 1
        )  # where a value lies between two bytes, rounding may differ
        assert (apart != 0).float().mean() < 3e-3


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [name for name in AUGMENTATIONS if name != "none"])
def test_whole_augmentations(name, shape, monkeypatch):
    augment, images = AUGMENTATIONS[name], images_of(shape, 40)
    draws = augment.draw(len(images), torch.Generator().manual_seed(1))
    found, expected = (
        with_kernels(augment, images, draws, monkeypatch),
        augment(images, draws),
    )
    assert (
        found != expected
    ).float().mean() < 2e-3  # a pixel whose source lies between two
    assert not torch.equal(found, images)

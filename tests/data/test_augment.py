"""Augmentation is exact: naive per-image references, and pillow for the rotation."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from rfdlc.data.augment import COLOUR, Augment, Policy, cutmix, draw_shares, mixup
from rfdlc.data.dataset import Split
from rfdlc.data.loader import ResidentLoader
from rfdlc.training.config import TrainConfig
from rfdlc.training.loop import augmentation


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randint(0, 256, (12, 3, 9, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def naive_crop_flip(image: np.ndarray, top: int, left: int, flip: bool, padding: int) -> np.ndarray:
    height, width = image.shape[1:]
    result = np.zeros_like(image)
    for y in range(height):
        for x in range(width):
            source_y, source_x = y + top - padding, (width - 1 - x if flip else x) + left - padding
            if 0 <= source_y < height and 0 <= source_x < width:
                result[:, y, x] = image[:, source_y, source_x]
    return result


@pytest.mark.parametrize("rotation", [0.0, 1e-9])  # the second takes the path that samples through a grid
def test_crops_and_flips_equal_a_naive_reference(images: torch.Tensor, rotation: float) -> None:
    augment = Augment(crop_padding=4, flip=True, rotation=rotation)
    draws = augment.draw(len(images), torch.Generator().manual_seed(2))
    result = augment(images, draws).numpy()
    assert len(draws["crop"].unique()) > 4
    assert 0 < draws["flip"].sum() < len(images)
    for i, image in enumerate(images.numpy()):
        top, left = draws["crop"][i].tolist()
        assert (result[i] == naive_crop_flip(image, top, left, bool(draws["flip"][i]), 4)).all()


def naive_rotation(image: np.ndarray, angle: float) -> tuple[np.ndarray, np.ndarray]:
    """Counter-clockwise by inverse mapping of pixel centres; also how far each source is from a rounding boundary."""
    height, width = image.shape[1:]
    result, margin = np.zeros_like(image), np.zeros((height, width))
    for y in range(height):
        for x in range(width):
            dx, dy = x + 0.5 - width / 2, y + 0.5 - height / 2
            source_x = math.cos(angle) * dx - math.sin(angle) * dy + width / 2
            source_y = math.sin(angle) * dx + math.cos(angle) * dy + height / 2
            margin[y, x] = min(abs(source_x - round(source_x)), abs(source_y - round(source_y)))
            if 0 <= source_x < width and 0 <= source_y < height:
                result[:, y, x] = image[:, int(source_y), int(source_x)]
    return result, margin


def test_rotation_equals_a_naive_reference_and_pillow(images: torch.Tensor) -> None:
    augment = Augment(rotation=15)
    draws = augment.draw(len(images), torch.Generator().manual_seed(3))
    assert draws["angle"].abs().max() <= math.radians(15)
    assert draws["angle"].min() < 0 < draws["angle"].max()
    result = augment(images, draws).numpy()
    for i, image in enumerate(images.numpy()):
        expected, margin = naive_rotation(image, float(draws["angle"][i]))
        sure = margin > 1e-3
        assert sure.mean() > 0.9
        assert (result[i] == expected)[:, sure].all()
        turned = np.asarray(Image.fromarray(image.transpose(1, 2, 0)).rotate(math.degrees(draws["angle"][i])))
        assert (result[i] == turned.transpose(2, 0, 1))[:, sure].all()


def test_flip_comes_before_rotation_and_crop_bounds_it(images: torch.Tensor) -> None:
    square = images[:, :, :7]
    draws = {
        "crop": torch.tensor([[0, 8]]).expand(12, 2),
        "flip": torch.ones(12, dtype=torch.bool),
        "angle": torch.full((12,), math.pi / 2),
    }
    result = Augment(crop_padding=4, flip=True, rotation=90)(square, draws).numpy()
    for i, image in enumerate(square.numpy()):
        step = naive_crop_flip(image, 0, 8, True, 4)
        assert (result[i] == np.rot90(step, axes=(1, 2))).all()


def test_cutout_blacks_out_a_square(images: torch.Tensor) -> None:
    draws = {"cutout": torch.tensor([[0.5, 0.5]]).expand(12, 2)}
    result = Augment(cutout=3)(images.clamp(min=1), draws)
    expected = images.clamp(min=1).float()
    expected[:, :, 3:6, 2:5] = 0  # around row 4 of 9, column 3 of 7
    assert torch.equal(result, expected)


@pytest.mark.parametrize("operation", range(10))
def test_each_policy_operation_changes_only_the_images_it_was_drawn_for(images: torch.Tensor, operation: int) -> None:
    chosen = torch.arange(12) % 2 == 0
    other = (operation + 1) % 10
    draws = {
        "operation": torch.where(chosen, operation, other)[:, None],
        "strength": torch.where(chosen, 0.7, 0.0)[:, None],
    }
    result = Augment(policy=Policy(layers=1))(images, draws)
    assert torch.equal(result[~chosen], images.float()[~chosen])
    assert not torch.equal(result[chosen], images.float()[chosen])
    assert result.min() >= 0
    assert result.max() <= 255


def test_colour_operations_by_hand() -> None:
    pixels = torch.tensor([100.0, 200.0, 60.0]).view(1, 3, 1, 1)
    strength = torch.tensor(0.5).view(1, 1, 1, 1)
    grey = 0.299 * 100 + 0.587 * 200 + 0.114 * 60
    by_name = {name: function(pixels, strength).flatten().tolist() for name, function in COLOUR.items()}
    assert by_name["brightness"] == pytest.approx([55, 110, 33])
    assert by_name["contrast"] == pytest.approx([v + 0.45 * (grey - v) for v in (100, 200, 60)])
    assert by_name["saturation"] == pytest.approx(by_name["contrast"])  # one pixel is its own mean
    assert by_name["posterise"] == [100, 200, 60]  # 4 levels a step: all are multiples
    assert by_name["solarise"] == [100, 55, 60]


def test_mixup_and_cutmix_by_hand() -> None:
    inputs = torch.arange(2 * 3 * 1 * 4 * 4, dtype=torch.float32).view(2, 3, 1, 4, 4)
    targets = torch.tensor([[0, 1, 2], [3, 4, 5]])
    share = torch.tensor([[0.25, 0.5, 0.5], [0.75, 0.0, 0.0]])
    mixed = mixup(inputs, targets, share)
    assert torch.allclose(mixed.inputs[0, 1], 0.25 * inputs[0, 1] + 0.75 * inputs[0, 0])
    assert mixed.partners.tolist() == [[2, 0, 1], [5, 3, 4]]
    assert mixed.lam.tolist() == [0.25, 0.75]
    pasted = cutmix(inputs, targets, share)
    taken = pasted.inputs[1, 1] == inputs[1, 0]
    assert taken.sum() == 1  # half a side of 4 around a corner: one pixel is inside
    assert taken[0, 0, 0]
    assert pasted.lam[1] == pytest.approx(1 - 1 / 16)
    assert (pasted.inputs[0, 1] == inputs[0, 0]).float().mean() == pytest.approx(1 - float(pasted.lam[0]))


def test_shares_depend_on_the_seed_alone() -> None:
    drawn = draw_shares(0.4, 50, 7, epoch=2)
    assert torch.equal(drawn, draw_shares(0.4, 50, 7, epoch=2))
    assert not torch.equal(drawn, draw_shares(0.4, 50, 3, epoch=2))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"augment": "none"}, Augment()),
        ({"augment": "auto"}, Augment(crop_padding=4)),
        ({"augment": "crop-flip-rotate"}, Augment.paper()),
        ({"augment": "randaugment"}, Augment(crop_padding=4, flip=True, policy=Policy(layers=2, magnitude=0.5))),
        (
            {"augment": "trivialaugment", "cutout": 5},
            Augment(crop_padding=4, flip=True, cutout=5, policy=Policy(layers=1, magnitude=1.0)),
        ),
    ],
)
def test_settings_choose_the_augmentation(settings: dict, expected: Augment) -> None:
    assert augmentation(TrainConfig(**settings), "images") == expected
    assert augmentation(TrainConfig(**settings), "features") is None


def test_large_images_are_cropped_by_an_eighth() -> None:
    for side, padding in ((28, 4), (32, 4), (64, 8), (160, 20)):
        found = augmentation(TrainConfig(augment="crop-flip"), "images", side)
        assert found == Augment(crop_padding=padding, flip=True)
    assert augmentation(TrainConfig(augment="none"), "images", 160) == Augment()


def test_a_policy_and_cutout_in_the_batches_of_a_training(images: torch.Tensor) -> None:
    """Each batch is what the augmentation gives for the drawn parameters, image by image."""
    split = Split(images.numpy(), np.arange(12) % 2)
    augment = augmentation(TrainConfig(augment="trivialaugment", cutout=3), "images")
    assert augment is not None
    loader = ResidentLoader(split, None, batch_size=5, seeds=(4,), augment=augment)
    order, draws = loader.draw(2)
    assert len(draws["operation"].unique()) > 4
    found = torch.cat([inputs[0] for inputs, _ in loader.epoch(2)])
    for place in range(12):
        image = images[order[0, place]][None]
        alone = augment(image, {name: values[0, place][None] for name, values in draws.items()})
        torch.testing.assert_close(found[place], alone[0] / 255)
    assert (found == 0).all(1).flatten(1).sum(1).min() >= 4  # a black square, cut off at a corner at the worst

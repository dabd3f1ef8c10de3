"""Augmentation is exact: naive per-image references, and pillow for the rotation."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from rfdlc.data.augment import AUGMENTATIONS, Augment, cutmix, draw_shares, mixup
from rfdlc.data.dataset import Split
from rfdlc.data.loader import ResidentLoader
from rfdlc.data.policy import BLENDS, CIFAR_PAIRS, OPERATIONS, TABLES, Policy
from rfdlc.training.config import TrainConfig
from rfdlc.training.loop import augmentation


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randint(
        0,
        256,
        (12, 3, 9, 7),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(1),
    )


def naive_crop_flip(
    image: np.ndarray, top: int, left: int, flip: bool, padding: int
) -> np.ndarray:
    height, width = image.shape[1:]
    result = np.zeros_like(image)
    for y in range(height):
        for x in range(width):
            source_y, source_x = (
                y + top - padding,
                (width - 1 - x if flip else x) + left - padding,
            )
            if 0 <= source_y < height and 0 <= source_x < width:
                result[:, y, x] = image[:, source_y, source_x]
    return result


@pytest.mark.parametrize(
    "rotation", [0.0, 1e-9]
)  # the second takes the path that samples through a grid
def test_crops_and_flips_equal_a_naive_reference(
    images: torch.Tensor, rotation: float
) -> None:
    augment = Augment(crop_padding=4, flip=True, rotation=rotation)
    draws = augment.draw(len(images), torch.Generator().manual_seed(2))
    result = augment(images, draws).numpy()
    assert len(draws["crop"].unique()) > 4
    assert 0 < draws["flip"].sum() < len(images)
    for i, image in enumerate(images.numpy()):
        top, left = draws["crop"][i].tolist()
        assert (
            result[i] == naive_crop_flip(image, top, left, bool(draws["flip"][i]), 4)
        ).all()


def naive_rotation(image: np.ndarray, angle: float) -> tuple[np.ndarray, np.ndarray]:
    """Counter-clockwise by inverse mapping of pixel centres; also how far each source
    is from a rounding boundary.
    """
    height, width = image.shape[1:]
    result, margin = np.zeros_like(image), np.zeros((height, width))
    for y in range(height):
        for x in range(width):
            dx, dy = x + 0.5 - width / 2, y + 0.5 - height / 2
            source_x = math.cos(angle) * dx - math.sin(angle) * dy + width / 2
            source_y = math.sin(angle) * dx + math.cos(angle) * dy + height / 2
            margin[y, x] = min(
                abs(source_x - round(source_x)), abs(source_y - round(source_y))
            )
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
        turned = np.asarray(
            Image.fromarray(image.transpose(1, 2, 0)).rotate(
                math.degrees(draws["angle"][i])
            )
        )
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
    expected = images.clamp(min=1)
    expected[:, :, 3:6, 2:5] = 0  # around row 4 of 9, column 3 of 7
    assert torch.equal(result, expected)


def drawn(operation: str, strength: float, count: int = 1) -> dict[str, torch.Tensor]:
    number = torch.full((count, 1), OPERATIONS.index(operation))
    return {"operation": number, "strength": torch.full((count, 1), strength)}


@pytest.mark.parametrize("operation", OPERATIONS[1:])
def test_each_policy_operation_changes_only_the_images_it_was_drawn_for(
    images: torch.Tensor, operation: str
) -> None:
    chosen = torch.arange(12) % 2 == 0
    draws = {
        "operation": torch.where(chosen, OPERATIONS.index(operation), 0)[:, None],
        "strength": torch.full((12, 1), 0.7),
    }
    policy, images = (
        Policy(layers=1),
        images.repeat(1, 1, 3, 3) // 2,
    )  # equalising needs 255 pixels
    result = Augment(policy=policy)(images, draws)
    assert torch.equal(result[~chosen], images[~chosen])
    assert not torch.equal(result[chosen], images[chosen])
    same = Augment(policy=policy)(images, policy.unchanged(12, torch.device("cpu")))
    assert torch.equal(same, images)


def pillow(operation: str, image: Image.Image, strength: float) -> Image.Image:
    factor = 1 - 0.9 * strength
    enhanced = {
        "brightness": "Brightness",
        "contrast": "Contrast",
        "saturation": "Color",
        "sharpness": "Sharpness",
    }
    if operation in enhanced:
        return getattr(ImageEnhance, enhanced[operation])(image).enhance(factor)
    bits, threshold = 8 - round(4 * abs(strength)), 256 * (1 - abs(strength))
    functions = {
        "posterise": lambda: ImageOps.posterize(image, bits),
        "solarise": lambda: ImageOps.solarize(image, threshold),
        "invert": lambda: ImageOps.invert(image),
        "autocontrast": lambda: ImageOps.autocontrast(image),
        "equalise": lambda: ImageOps.equalize(image),
    }
    return functions[operation]()


@pytest.mark.parametrize("strength", [-1.0, -0.3, 0.55, 1.0])
@pytest.mark.parametrize("operation", [*list(TABLES)[1:], *BLENDS])
def test_colours_equal_those_of_pillow(operation: str, strength: float) -> None:
    """Pillow cuts fractions off where ours are rounded, and rounds the mean grey: one
    step of 255 apart at most.
    """
    rng = np.random.default_rng(3)
    smooth = rng.normal(110, 25, (20, 3, 1, 1)) + rng.normal(
        0, 30, (20, 3, 24, 17)
    )  # most have no 0 and no 255
    images = torch.from_numpy(np.clip(smooth, 0, 255).astype(np.uint8))
    result = (
        Policy(layers=1)
        .recolour(images, drawn(operation, strength, 20))
        .numpy()
        .astype(int)
    )
    exact = operation in ("posterise", "solarise", "invert", "equalise")
    for image, found in zip(images.numpy(), result, strict=True):
        expected = pillow(
            operation, Image.fromarray(image.transpose(1, 2, 0)), strength
        )
        apart = np.abs(found - np.asarray(expected).astype(int).transpose(2, 0, 1))
        assert apart.max() <= (0 if exact else 1)


def test_flat_and_grey_images_keep_their_colours(images: torch.Tensor) -> None:
    """What has one value has nothing to stretch; images of one channel are grey
    already.
    """
    flat = torch.full((2, 3, 8, 8), 77, dtype=torch.uint8)
    for operation in (
        "autocontrast",
        "equalise",
        "sharpness",
        "contrast",
        "saturation",
    ):
        assert torch.equal(
            Policy(layers=1).recolour(flat, drawn(operation, 0.8, 2)), flat
        )
    grey = images[:, :1]
    assert torch.equal(
        Policy(layers=1).recolour(grey, drawn("saturation", 0.8, 12)), grey
    )


def test_layers_act_one_after_another(images: torch.Tensor) -> None:
    draws = {
        "operation": (
            torch.tensor(
                [[OPERATIONS.index("solarise"), OPERATIONS.index("equalise")]]
            ).expand(12, 2)
        )
    }
    draws["strength"] = torch.full((12, 2), 0.5)
    images = images.repeat(1, 1, 4, 4) // 2
    found = Policy(layers=2).recolour(images, draws)
    for image, own in zip(images.numpy(), found.numpy(), strict=True):
        turned = ImageOps.equalize(
            ImageOps.solarize(Image.fromarray(image.transpose(1, 2, 0)), 128)
        )
        assert (own == np.asarray(turned).transpose(2, 0, 1)).all()


def test_pairs_of_autoaugment_are_drawn_as_often_as_they_say() -> None:
    augment = AUGMENTATIONS["autoaugment"]
    assert augment.policy is not None
    draws = augment.policy.draw(200_000, torch.Generator().manual_seed(0))
    rows = [
        [word.split() for word in pair.split(",")] for pair in CIFAR_PAIRS.split(";")
    ]
    assert len(rows) == 25
    expected = np.zeros((2, len(OPERATIONS)))
    for pair in rows:
        for layer, (name, tenths, _) in enumerate(pair):
            expected[layer, OPERATIONS.index(name.replace("-", " "))] += (
                int(tenths) / 10 / 25
            )
    for layer in range(2):
        share = (
            np.bincount(draws["operation"][:, layer], minlength=len(OPERATIONS))
            / 200_000
        )
        np.testing.assert_allclose(share[1:], expected[layer, 1:], atol=0.003)
    sideways = draws["operation"] == OPERATIONS.index(
        "shift sideways"
    )  # strengths 8 and 9 of 9, to both sides
    found = draws["strength"][sideways].abs().unique() * 0.3
    torch.testing.assert_close(found, torch.tensor([8 / 9, 1.0]) * 150 / 331)
    assert abs(float(draws["strength"][sideways].sign().mean())) < 0.05


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
    assert (pasted.inputs[0, 1] == inputs[0, 0]).float().mean() == pytest.approx(
        1 - float(pasted.lam[0])
    )


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
        (
            {"augment": "randaugment"},
            Augment(crop_padding=4, flip=True, policy=Policy(layers=2, magnitude=0.5)),
        ),
        (
            {"augment": "trivialaugment", "cutout": 5},
            Augment(
                crop_padding=4,
                flip=True,
                cutout=5,
                policy=Policy(layers=1, magnitude=1.0),
            ),
        ),
        (
            {"augment": "randaugment", "magnitude": 1, "cutout": 0.5},
            Augment(
                crop_padding=4,
                flip=True,
                cutout=16,
                policy=Policy(layers=2, magnitude=1.0),
            ),
        ),
        (
            {"augment": "autoaugment", "cutout": "16"},
            Augment(
                crop_padding=4, flip=True, cutout=16, policy=Policy(pairs=CIFAR_PAIRS)
            ),
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
    """Each batch is what the augmentation gives for the drawn parameters, image by
    image.
    """
    split = Split(images.numpy(), np.arange(12) % 2)
    augment = augmentation(TrainConfig(augment="trivialaugment", cutout=3), "images")
    assert augment is not None
    loader = ResidentLoader(split, None, batch_size=5, seeds=(4,), augment=augment)
    order, draws = loader.draw(2)
    assert len(draws["operation"].unique()) > 4
    found = torch.cat([inputs[0] for inputs, _ in loader.epoch(2)])
    for place in range(12):
        image = images[order[0, place]][None]
        alone = augment(
            image, {name: values[0, place][None] for name, values in draws.items()}
        )
        torch.testing.assert_close(found[place], alone[0] / 255)
    assert (found == 0).all(1).flatten(1).sum(
        1
    ).min() >= 4  # a black square, cut off at a corner at the worst


def test_a_gpu_computes_all_images_and_selects_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def selected(
        images: torch.Tensor, chosen: torch.Tensor, function: Any, *given: torch.Tensor
    ) -> torch.Tensor:
        return torch.where(
            chosen[:, None, None, None], function(images, *given), images
        )

    augment = AUGMENTATIONS["randaugment"]
    images = torch.randint(
        0,
        200,
        (200, 3, 20, 20),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(5),
    )
    draws = augment.draw(200, torch.Generator().manual_seed(6))
    found = augment(images, draws)
    monkeypatch.setattr("rfdlc.data.policy._changed", selected)
    assert torch.equal(augment(images, draws), found)

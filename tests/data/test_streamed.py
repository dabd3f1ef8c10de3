"""Streamed loader: real JPEGs through worker processes; nothing lost, nothing counted
twice, reproducible views.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance

from rfdlc.data.augment import AUGMENTATION, Augment
from rfdlc.data.dataset import PHOTOGRAPHS, Split
from rfdlc.data.images import (
    ImageFiles,
    PackedText,
    Resizing,
    fitted,
    open_image,
    planes,
)
from rfdlc.data.loader import seeded
from rfdlc.data.policy import Policy
from rfdlc.data.streamed import DRAWN, StreamedLoader, View, recoloured
from rfdlc.errors import InputError

COUNT = 23


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Split:
    """Images whose red value is ten times their number."""
    root = tmp_path_factory.mktemp("photos")
    for i in range(COUNT):
        Image.new("RGB", (60, 48), (10 * i, 90, 200)).save(root / f"{i}.png")
    return Split(
        ImageFiles(root, PackedText(f"{i}.png" for i in range(COUNT)), 16),
        np.arange(COUNT) % 4,
    )


def numbers(inputs: torch.Tensor) -> list[int]:
    """Which images these are, by their red value."""
    return (inputs[:, 0].mean((1, 2)) * 255 / 10).round().int().tolist()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_image_once_in_training_and_evaluation(
    split: Split, workers: int, world_size: int
) -> None:
    trained, evaluated = [], []
    for rank in range(world_size):
        loader = StreamedLoader(
            split,
            batch_size=5,
            view=View(jitter=0),
            rank=rank,
            world_size=world_size,
            workers=workers,
        )
        for inputs, targets in loader.epoch(1):
            assert inputs.shape[0] == targets.shape[0] == 1
            assert (np.array(numbers(inputs[0])) % 4 == targets[0].numpy()).all()
            trained += numbers(inputs[0])
        for inputs, targets in loader.in_order():
            assert (np.array(numbers(inputs)) % 4 == targets.numpy()).all()
            evaluated += numbers(inputs)
    assert sorted(trained) == list(range(COUNT))
    assert evaluated == list(range(COUNT))


def test_batches_depend_on_seed_and_epoch_alone(split: Split) -> None:
    def batches(
        seed: int, epoch: int, workers: int, start: int = 0
    ) -> list[torch.Tensor]:
        loader = StreamedLoader(split, batch_size=5, seeds=(seed,), workers=workers)
        return [inputs for inputs, _ in loader.epoch(epoch, start)]

    first = batches(3, 1, workers=0)
    assert all(
        torch.equal(a, b) for a, b in zip(first, batches(3, 1, workers=2), strict=True)
    )
    assert all(
        torch.equal(a, b)
        for a, b in zip(first[2:], batches(3, 1, 0, start=2), strict=True)
    )
    assert not any(
        torch.equal(a, b) for a, b in zip(first, batches(4, 1, 0), strict=True)
    )
    assert not any(
        torch.equal(a, b) for a, b in zip(first, batches(3, 2, 0), strict=True)
    )


def test_workers_live_through_epochs_and_an_epoch_that_was_left(split: Split) -> None:
    loader = StreamedLoader(split, batch_size=4, view=View(jitter=0), workers=2)
    next(loader.epoch(0))  # left after one batch
    for epoch in (1, 2):
        seen = [
            number for inputs, _ in loader.epoch(epoch) for number in numbers(inputs[0])
        ]
        assert sorted(seen) == list(range(COUNT))


def test_ranks_have_as_many_steps_and_the_same_views_as_one_process(
    split: Split,
) -> None:
    whole = StreamedLoader(split, batch_size=6, workers=0)
    ranks = [
        StreamedLoader(split, batch_size=3, rank=r, world_size=2, workers=0)
        for r in (0, 1)
    ]
    assert ranks[0].steps == ranks[1].steps == whole.steps
    for (together, _), (left, _), (right, _) in zip(
        whole.epoch(5), *(r.epoch(5) for r in ranks), strict=True
    ):
        assert torch.equal(together[0], torch.cat([left[0], right[0]]))


def test_random_operations_follow_on_the_device(split: Split) -> None:
    """Those that were drawn for the place of an image in the epoch, after its crop and
    before it is normalised.
    """
    augment = Augment(policy=Policy(layers=2, magnitude=1.0), cutout=5)
    options = {"batch_size": 5, "seeds": (3,), "view": View(jitter=0), "workers": 0}
    plain = torch.cat(
        [inputs[0] for inputs, _ in StreamedLoader(split, **options).epoch(2)]
    )
    loader = StreamedLoader(split, PHOTOGRAPHS, augment=augment, **options)
    draws = augment.draw(COUNT, seeded(AUGMENTATION, 3, 2))
    changed = augment((plain * 255).round().byte(), draws)
    mean, std = (
        torch.tensor(values).view(3, 1, 1)
        for values in (PHOTOGRAPHS.mean, PHOTOGRAPHS.std)
    )
    found = torch.cat([inputs[0] for inputs, _ in loader.epoch(2)])
    torch.testing.assert_close(
        found, (changed / 255 - mean) / std, atol=1e-5, rtol=1e-4
    )
    assert len(draws["operation"].unique()) > 5
    later = torch.cat([inputs[0] for inputs, _ in loader.epoch(2, start_step=2)])
    assert torch.equal(later, found[10:])
    evaluated = torch.cat([inputs for inputs, _ in loader.in_order()])
    assert numbers(evaluated * std + mean) == list(range(COUNT))


def test_balanced_sampling(split: Split) -> None:
    labels = np.array([0] * 20 + [1] * 2 + [2])
    loader = StreamedLoader(
        Split(split.inputs, labels), batch_size=23, sampling="balanced", workers=0
    )
    drawn = np.concatenate(
        [targets[0].numpy() for epoch in range(8) for _, targets in loader.epoch(epoch)]
    )
    assert len(drawn) == 8 * 23
    assert (
        np.abs(np.bincount(drawn) - len(drawn) / 3) < 5 * np.sqrt(len(drawn) / 3)
    ).all()


def test_evaluation_is_the_centre_normalised(split: Split) -> None:
    loader = StreamedLoader(split, PHOTOGRAPHS, batch_size=4, workers=0)
    inputs, _ = next(loader.in_order())
    expected = (np.array([20, 90, 200]) / 255 - PHOTOGRAPHS.mean) / PHOTOGRAPHS.std
    assert np.allclose(inputs[2].mean((1, 2)).numpy(), expected, atol=1e-4)


def test_a_broken_image_is_named(split: Split, tmp_path: Path) -> None:
    Image.new("RGB", (60, 48)).save(tmp_path / "0.png")
    (tmp_path / "1.png").write_bytes((tmp_path / "0.png").read_bytes()[:60])
    files = ImageFiles(tmp_path, PackedText(["0.png", "1.png"]), 16)
    for workers in (0, 1):
        with pytest.raises(
            InputError, match=r"1.png: .*rfdlc inspect finds all such files"
        ) as caught:
            list(
                StreamedLoader(
                    Split(files, np.array([0, 1])), batch_size=2, workers=workers
                ).epoch(0)
            )
        assert "Traceback" not in str(caught.value)


def test_wrong_settings_are_errors(split: Split) -> None:
    with pytest.raises(InputError, match="one run"):
        StreamedLoader(split, seeds=(0, 1))
    with pytest.raises(InputError, match="use a ResidentLoader"):
        StreamedLoader(Split(np.eye(2, dtype=np.float32), np.array([0, 1])))


def test_the_callers_random_numbers_are_left_alone(split: Split) -> None:
    before = torch.get_rng_state()
    for workers in (0, 1):
        loader = StreamedLoader(split, batch_size=2, workers=workers)
        list(loader.epoch(0))
        list(loader.in_order())
    assert torch.equal(torch.get_rng_state(), before)


# -- views
# --------------------------------------------------------------------------------------


def photograph(width: int = 64, height: int = 48) -> Image.Image:
    y, x = np.mgrid[:height, :width]
    pixels = np.stack(
        [100 + 40 * np.sin(x / 9), 120 + 30 * np.cos(y / 7), 90 + x / 2], -1
    )
    return Image.fromarray(pixels.astype(np.uint8))


def test_boxes_have_the_area_and_proportions_asked_for() -> None:
    rng = np.random.default_rng(0)
    boxes = np.array(
        [View()._box(500, 375, rng.random(DRAWN).tolist()) for _ in range(2000)]
    )
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 2] <= 500).all()
    assert (boxes[:, 3] <= 375).all()
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    area, ratio = width * height / (500 * 375), width / height
    assert 0.07 < area.min() < 0.1
    assert area.max() > 0.9
    assert np.all((ratio > 0.74) & (ratio < 1.35))
    assert (
        abs(np.median(area[area < 0.56]) - 0.32) < 0.03
    )  # uniform from 0.08 on, up to where some do not fit
    assert View()._box(1000, 10, [0.999, 0.5] * 10 + [0.0] * 6)[1:4:2] == (
        0,
        10,
    )  # nothing fits: the centre


def test_a_view_is_the_crop_resized_and_flipped() -> None:
    image = photograph()
    drawn = [0.5, 0.5, *[0.0] * 18, 0.25, 0.75, 0.5, 0.5, 0.5]
    left, top, right, bottom = View()._box(64, 48, [*drawn, 0.9])
    expected = image.crop((left, top, right, bottom)).resize(
        (16, 16), Image.Resampling.BILINEAR
    )
    straight = View(jitter=0).training(image, 16, 3, [*drawn, 0.9])
    flipped = View(jitter=0).training(image, 16, 3, [*drawn, 0.1])
    assert (
        np.abs(planes(straight).astype(int) - planes(expected)).max() <= 3
    )  # pixels beyond the box may shine in
    assert (planes(flipped) == planes(straight)[:, :, ::-1]).all()


def test_evaluation_equals_resizing_and_cropping() -> None:
    image = photograph(64, 64)
    resized = planes(image.resize((32, 32), Image.Resampling.BILINEAR))[:, 2:30, 2:30]
    assert (
        np.abs(
            planes(fitted(image, 28, 3, Resizing(centre=28 / 32))).astype(int) - resized
        ).max()
        <= 2
    )


@pytest.mark.parametrize(("width", "height"), [(300, 100), (100, 300), (200, 200)])
def test_boxes_of_padded_and_stretched_images(width: int, height: int) -> None:
    rng = np.random.default_rng(0)
    drawn = [rng.random(DRAWN).tolist() for _ in range(500)]
    left, top, right, bottom = np.array(
        [View()._box(width, height, each, "pad") for each in drawn]
    ).T
    area, ratio = (
        (right - left) * (bottom - top) / max(width, height) ** 2,
        (right - left) / (bottom - top),
    )
    assert area.min() < 0.1
    assert area.max() > 0.95
    assert np.all((ratio > 0.73) & (ratio < 1.37))
    for first, last, length in (
        (left, right, width),
        (top, bottom, height),
    ):  # in the image, or around it
        assert np.all(
            ((first >= 0) & (last <= length)) | ((first <= 0) & (last >= length))
        )
    left, top, right, bottom = np.array(
        [View()._box(width, height, each, "stretch") for each in drawn]
    ).T
    assert min(left.min(), top.min()) >= 0
    assert right.max() <= width
    assert bottom.max() <= height
    ratio = (right - left) / (bottom - top) * height / width
    assert np.all((ratio > 0.7) & (ratio < 1.4))


@pytest.mark.parametrize("order", [("b", "c", "s"), ("s", "c", "b"), ("c", "s", "b")])
def test_jitter_equals_pillow_enhancements_in_any_order(order: tuple[str, ...]) -> None:
    image = photograph()
    enhance = {
        "b": (ImageEnhance.Brightness, 1.2),
        "c": (ImageEnhance.Contrast, 0.7),
        "s": (ImageEnhance.Color, 1.3),
    }
    expected = image
    for name in order:
        kind, factor = enhance[name]
        expected = kind(expected).enhance(factor)
    result = recoloured(image, 1.2, 0.7, 1.3)
    assert (
        np.abs(planes(result).astype(int) - planes(expected)).max() <= 3
    )  # each of pillow's steps rounds
    grey = recoloured(image.convert("L"), 1.2, 0.7, 1.3)
    expected = ImageEnhance.Contrast(
        ImageEnhance.Brightness(image.convert("L")).enhance(1.2)
    ).enhance(0.7)
    assert np.abs(planes(grey).astype(int) - planes(expected)).max() <= 2


def test_large_jpegs_are_decoded_smaller_for_a_view(tmp_path: Path) -> None:
    photograph(1600, 1200).save(tmp_path / "large.jpg", quality=95)
    drawn = np.random.default_rng(0).random(DRAWN).tolist()
    image = open_image(tmp_path / "large.jpg")
    quick = planes(View(jitter=0).training(image, 64, 3, drawn)).astype(int)
    assert image.size[0] < 1600
    with Image.open(tmp_path / "large.jpg") as whole:
        full = planes(
            View(jitter=0).training(whole.convert("RGB"), 64, 3, drawn)
        ).astype(int)
    assert np.abs(quick - full).mean() < 1.5


@pytest.mark.parametrize(
    "resizing",
    [Resizing(), Resizing(centre=224 / 256), Resizing("pad", "bicubic")],
    ids=str,
)
def test_large_jpegs_are_decoded_smaller_in_evaluation(
    tmp_path: Path, resizing: Resizing
) -> None:
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (15, 20, 3), dtype=np.uint8))
    coarse.resize((300, 225), Image.Resampling.BICUBIC).save(
        tmp_path / "large.jpg", quality=90
    )
    image = open_image(tmp_path / "large.jpg")
    quick = planes(fitted(image, 56, 3, resizing)).astype(int)
    assert image.size == (150, 113)
    with Image.open(tmp_path / "large.jpg") as whole:
        exact = planes(fitted(whole.convert("RGB"), 56, 3, resizing)).astype(int)
    assert np.abs(quick - exact).mean() < 1
    assert np.abs(exact - exact.mean()).mean() > 20

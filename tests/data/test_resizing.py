"""How images become squares: cropped, padded or stretched, chosen by the training
images; and caches of them.
"""

import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import rfdlc
from rfdlc.data.images import ImageFiles, Resizing, fitted, open_image, planes
from rfdlc.errors import InputError

GREY = (124, 116, 104)


def pictures(root: Path, sizes: list[tuple[int, int]]) -> Path:
    rng = np.random.default_rng(0)
    for i, (width, height) in enumerate(sizes):
        place = root / "ab"[i % 2] / f"{i:02}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(
            place
        )
    return root


def by_pillow(
    image: Image.Image, size: int, fit: str, kind: Image.Resampling
) -> np.ndarray:
    """Plain pillow; where the padding has an odd width, its halves are rounded to even
    numbers.
    """
    width, height = image.size
    if fit == "crop":
        side = min(image.size)
        left, top = (width - side) / 2, (height - side) / 2
        square = image.resize(
            (size, size), kind, box=(left, top, left + side, top + side)
        )
    elif fit == "stretch":
        square = image.resize((size, size), kind)
    else:
        halves = [Fraction(size * length, 2 * max(image.size)) for length in image.size]
        left, top = (round(Fraction(size, 2) - half) for half in halves)
        right, bottom = (round(Fraction(size, 2) + half) for half in halves)
        square = Image.new("RGB", (size, size), GREY)
        square.paste(
            image.resize((max(right - left, 1), max(bottom - top, 1)), kind),
            (left, top),
        )
    return np.asarray(square).transpose(2, 0, 1)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
def test_fits_are_pillows_own(tmp_path: Path, fit: str, interpolation: str) -> None:
    pictures(tmp_path, [(40, 20), (20, 40), (16, 16), (33, 9), (200, 1), (15, 14)])
    data = rfdlc.load(
        tmp_path, image_size=16, fit=fit, interpolation=interpolation, test_fraction=0
    )
    assert data.resizing == Resizing(fit, interpolation)
    for name, found in zip(data.train.ids or (), data.train.array, strict=True):
        with Image.open(tmp_path / name) as image:
            expected = by_pillow(
                image, 16, fit, Image.Resampling[interpolation.upper()]
            )
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("sizes", "fit", "note"),
    [
        (
            [(20, 41)] * 2 + [(20, 40)] * 6,
            "pad",
            r"resized as a whole, padded \(25% of .* longer than 2:1\)",
        ),
        (
            [(40, 20)] * 7 + [(20, 38)] * 3,
            "crop",
            r"the shorter side resized, the centre kept; data\.image_size=N",
        ),
        (
            [(41, 20)] + [(20, 38)] * 9,
            "crop",
            r"the centre kept \(10% of the training images are longer than 2:1\)",
        ),
    ],
)
def test_elongated_training_images_are_padded(
    tmp_path: Path, sizes: list, fit: str, note: str
) -> None:
    pictures(tmp_path / "train", sizes)
    pictures(tmp_path / "test", [(16, 16), (60, 10)])
    data = rfdlc.load(tmp_path)
    assert data.resizing is not None
    assert data.resizing.fit == fit
    assert re.search(note, " ".join(data.notes))
    with pytest.raises(
        InputError,
        match=r"fit='zoom' is not valid: .* 'auto', 'crop', 'pad' or 'stretch'",
    ):
        rfdlc.load(tmp_path, fit="zoom")


@pytest.mark.parametrize(
    ("size", "side", "content"),
    [
        ((160, 44), 84, "84x23"),
        ((200, 60), 96, "96x29"),
        ((320, 64), 96, "96x19"),
        ((400, 130), 128, "128x42"),
    ],
)
def test_long_images_keep_about_their_pixels(
    tmp_path: Path, size: tuple[int, int], side: int, content: str
) -> None:
    pictures(tmp_path, [size] * 10)
    data = rfdlc.load(tmp_path, test_fraction=0)
    assert data.input_shape[-1] == side
    assert data.resizing is not None
    assert data.resizing.content == content
    assert (
        f"typically {content} pixels in it, and a larger image_size keeps more"
        in " ".join(data.notes)
    )


@pytest.mark.parametrize(
    ("size", "side"),
    [((60, 48), 48), ((64, 64), 64), ((100, 75), 64), ((300, 200), 128)],
)
def test_other_images_keep_their_usual_size(
    tmp_path: Path, size: tuple[int, int], side: int
) -> None:
    pictures(tmp_path, [size] * 10)
    for fit in ("auto", "pad"):
        data = rfdlc.load(tmp_path, test_fraction=0, fit=fit)
        assert data.input_shape[-1] == side
        assert data.resizing is not None
        assert not data.resizing.content


def test_padded_images_stand_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    noise = np.random.default_rng(0).integers(0, 256, (20, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.jpg", exif=exif, quality=95)
    found = planes(fitted(open_image(tmp_path / "a.jpg"), 16, 3, Resizing("pad")))
    padded = (found == np.array(GREY)[:, None, None]).all(0)
    assert padded[:, :4].all()
    assert padded[:, 12:].all()
    assert padded[:, 4:12].mean() < 0.1


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("fit", ["crop", "pad"])
def test_a_cache_holds_what_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool, fit: str
) -> None:
    root, cache = (
        pictures(tmp_path / "set", [(40, 24), (24, 40), (30, 30), (32, 25)] * 3),
        tmp_path / "cache",
    )
    (root / "a" / "00.png").write_bytes((root / "a" / "00.png").read_bytes()[:900])
    monkeypatch.setattr(
        "rfdlc.data.readers.image_files.FITS_IN_MEMORY", 2**30 if in_memory else 0
    )
    options = {"image_size": 14, "fit": fit, "skip_broken": True, "test_fraction": 0}
    first, again = (rfdlc.load(root, cache=cache, **options) for _ in range(2))
    plain = rfdlc.load(root, **options)
    assert first.resizing == plain.resizing
    assert len(list(cache.glob("*.npy"))) == 1
    assert first.skipped == again.skipped
    assert re.search(r"00.png: the image is truncated", again.skipped[0])
    if in_memory:
        np.testing.assert_array_equal(again.train.array, plain.train.array)
        np.testing.assert_array_equal(first.train.array, plain.train.array)
        return
    files, exact = (
        again.train.take(np.array([5, 1])).inputs,
        plain.train.take(np.array([6, 2])).inputs,
    )
    assert isinstance(files, ImageFiles)
    assert isinstance(exact, ImageFiles)
    assert list(files.names) == list(exact.names)
    assert (
        np.abs(files.decode()[0].astype(int) - exact.decode()[0]).mean() < 12
    )  # noise that is resized twice
    (root / "a" / "02.png").write_bytes((root / "a" / "04.png").read_bytes())
    rfdlc.load(root, cache=cache, **options)
    assert len(list(cache.glob("*.npy"))) == 2  # a file has changed

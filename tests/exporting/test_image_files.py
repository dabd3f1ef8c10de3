"""The code of docs/export.md gives the squares of training, and so the decisions of the
run.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import rfdlc
from rfdlc.data.images import ImageFiles, PackedText, Resizing

PAGE = Path(__file__).parents[2] / "docs/export.md"


def code() -> str:
    (found,) = re.findall(
        r"```python\n(import json\n.*?)```", PAGE.read_text(encoding="utf-8"), re.S
    )
    return str(found)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Wide and high, small and large, turned by EXIF data, transparent, grey."""
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)

    def picture(width: int, height: int) -> Image.Image:
        rough = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        return rough.resize((width, height), Image.Resampling.BICUBIC)

    turned = Image.Exif()
    turned[0x0112] = 6
    picture(47, 31).save(root / "wide.png")
    picture(12, 12).save(root / "square.png")
    picture(640, 427).save(root / "large.jpg")
    picture(333, 500).save(root / "turned.jpg", exif=turned)
    picture(33, 70).convert("L").save(root / "grey.png")
    clear = picture(41, 30).convert("RGBA")
    clear.putalpha(Image.fromarray(rng.integers(0, 256, (30, 41), dtype=np.uint8)))
    clear.save(root / "clear.png", exif=turned)
    return root


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("fit", "centre"), [("crop", 1.0), ("crop", 0.875), ("pad", 1.0), ("stretch", 1.0)]
)
def test_squares_are_those_of_training(photos, fit, centre, interpolation, channels):
    space: dict[str, Any] = {}
    exec(code().partition("session = ")[0], space)
    names = sorted(path.name for path in photos.iterdir())
    own = ImageFiles(
        photos, PackedText(names), 12, channels, Resizing(fit, interpolation, centre)
    ).decode()[0]
    found = [
        space["square"](photos / name, 12, channels, fit, interpolation, centre)
        for name in names
    ]
    np.testing.assert_array_equal(found, own)


@pytest.mark.usefixtures("quick_exports")
def test_the_page_decides_as_the_run(trained, photos, tmp_path, monkeypatch):
    run = trained("rf-dlc", "resnet8")
    done = rfdlc.export(run, tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    paths = sorted(map(str, photos.iterdir()))
    space: dict[str, Any] = {}
    exec(code().replace('["a.jpg", "b.jpg"]', repr(paths)), space)
    model = rfdlc.Model.load(run, device="cpu")
    expected = model.decider.probabilities(model.predict(paths))
    np.testing.assert_allclose(space["probabilities"], expected, atol=1e-5)
    assert space["action"].tolist() == model.decide(paths).tolist()
    text = done.card.read_text(encoding="utf-8")
    assert "docs/export.md" in text
    assert "--resize" in text
    assert space["metadata"]["image_files"] in text


def test_the_card_says_the_settings_of_the_run(trained, tmp_path):
    more = {"refit": True, "warm_refit": True, "refit_epochs": 1}
    run = trained("rf-dlc", "resnet8", particles=1, mixup=0.0, repulsion="none", **more)
    text = rfdlc.export(run, tmp_path / "model.pt2").card.read_text(encoding="utf-8")
    assert "; trained further on all samples, for 1 epoch; decisions" in text
    assert "1 particle trained by `rf-dlc` with backbone=resnet8, " in text
    assert " epochs=4, " in text
    for setting in ("mixup=0.0", "repulsion=none", "utility=none"):
        assert setting in text
    assert "our default" not in text

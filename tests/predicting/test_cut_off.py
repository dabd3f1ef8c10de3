"""Predictions warn where a centre crop cuts off much of an image, unless training
images lost as much.
"""

import warnings

import numpy as np
import pytest
from PIL import Image

import rfdlc
from rfdlc.data.images import Resizing
from rfdlc.serving.backend import Limits, open_backend
from rfdlc.serving.requests import Reader

SETTINGS = {
    "epochs": 1,
    "widths": (8,),
    "backbone": "mlp",
    "hold_out": 0.2,
    "device": "cpu",
}


def pictures(root, count, size, few=()):
    """Noise of one size; `few` is the size of the first image, which an automatic
    choice would still crop.
    """
    rng = np.random.default_rng(0)
    for i in range(count):
        width, height = few if few and not i else size
        place = root / f"c{i % 2}" / f"{i}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(
            place
        )
    return root


def trained(folder, size, few=()):
    options = {"image_size": 12}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rfdlc.train(
            pictures(folder / "photos", 24, size, few),
            "ce",
            folder / "run",
            data_options=options,
            **SETTINGS,
        )
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Of squares, and one image of 4:1, whose ends the model has not seen either."""
    return trained(tmp_path_factory.mktemp("squares"), (16, 16), (64, 16))


@pytest.fixture
def long(tmp_path):
    """Two images of 4:1, and a square one."""
    root = pictures(tmp_path / "long", 3, (64, 16), (16, 16))
    return root, [root / "c1/1.png", root / "c0/2.png"]


@pytest.mark.parametrize("size", [(16, 16), (64, 16), (15, 40), (33, 9)])
@pytest.mark.parametrize(
    "resizing",
    [Resizing(), Resizing(centre=0.5), Resizing("pad"), Resizing("stretch")],
    ids=str,
)
def test_the_share_is_that_of_the_pixels_outside(size, resizing):
    left, top, right, bottom = resizing.frame(*size)
    x, y = np.meshgrid(*((np.arange(20 * side) + 0.5) / 20 for side in size))
    outside = ~((x > left) & (x < right) & (y > top) & (y < bottom))
    assert resizing.cut(*size) == pytest.approx(outside.mean(), abs=0.01)


@pytest.mark.parametrize("kind", ["csv", "npz"])
def test_predict_warns_once(run, long, tmp_path, kind):
    with pytest.warns(UserWarning, match="image") as told:
        rfdlc.predict(run, long[0], tmp_path / f"found.{kind}")
    texts = [str(each.message) for each in told if "cut off" in str(each.message)]
    assert len(texts) == 1
    assert texts[0].startswith("2 images are long")
    assert "up to 75% of an image is cut off" in texts[0]
    assert "data.fit=pad" in texts[0]


def test_servers_warn(run, long):
    """Exported models: tests/predicting/test_centre.py,
    tests/exporting/test_export.py.
    """
    reader = Reader(open_backend(run), Limits())
    (told,) = reader.read_image(long[1][0].read_bytes(), np.inf)["warnings"]
    assert told.startswith("1 image is long")
    assert "75%" in told
    assert "warnings" not in reader.read_image(
        (long[0] / "c0/0.png").read_bytes(), np.inf
    )


def test_what_the_training_images_lost_is_no_news(tmp_path):
    run = trained(tmp_path, (28, 16))  # 43% of each is cut off
    model = rfdlc.Model.load(run, device="cpu")
    assert model.resizing.usual_cut == pytest.approx(1 - 16 / 28, abs=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.predict(pictures(tmp_path / "alike", 2, (28, 16)))
    with pytest.warns(UserWarning, match="1 image is long.*up to 60%"):
        model.predict(pictures(tmp_path / "longer", 2, (28, 16), (40, 16)))

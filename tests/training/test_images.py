"""Predicting images as people have them: in class folders, in one folder, alone, and of
any size.
"""

import numpy as np
import pytest
from PIL import Image

import rfdlc
from rfdlc import InputError

COLOURS = {"blue": 2, "green": 1, "red": 0}


def paint(path, colour, side=20):
    pixels = np.full((side, side + 4, 3), 20, dtype=np.uint8)
    pixels[..., COLOURS[colour]] = 220
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    for colour, count in {"red": 12, "green": 8, "blue": 6}.items():
        for i in range(count):
            paint(root / colour / f"{i}.png", colour, side=16 + i)
    data = rfdlc.load(root, image_size=12)
    return rfdlc.train(
        data,
        "rf-dlc",
        root.parent / "run",
        epochs=6,
        backbone="mlp",
        widths=(16,),
        hold_out=0.2,
    )


def test_a_folder_without_classes(trained, tmp_path):
    for i, colour in enumerate(["red", "blue", "green"]):
        paint(tmp_path / f"{i}.png", colour, side=50)
    found = trained.predict(tmp_path)
    assert found.ids.tolist() == ["0.png", "1.png", "2.png"]
    assert found.targets is None
    assert [found.classes.names[i] for i in trained.decide(tmp_path)] == [
        "red",
        "blue",
        "green",
    ]


def test_class_folders_give_labels_and_nothing_is_held_out(trained, tmp_path):
    for i in range(5):
        paint(tmp_path / "green" / f"{i}.png", "green")
    found = trained.predict(
        tmp_path
    )  # one class only, which is too few to train on and enough to predict
    assert found.targets.tolist() == [trained.classes.names.index("green")] * 5


def test_folders_that_are_no_classes_give_no_labels(trained, tmp_path):
    paint(tmp_path / "red" / "a.png", "red")
    paint(tmp_path / "monday" / "morning" / "b.png", "blue")
    found = trained.predict(tmp_path)
    assert found.ids.tolist() == ["monday/morning/b.png", "red/a.png"]
    assert found.targets is None


def test_one_image(trained, tmp_path):
    paint(tmp_path / "x.png", "blue")
    assert trained.classes.names[trained.decide(tmp_path / "x.png")[0]] == "blue"


def test_parts_are_read_at_the_models_size(trained, tmp_path):
    for part in ("train", "test"):
        for colour in COLOURS:
            for i in range(2 if part == "train" else 1):
                paint(tmp_path / part / colour / f"{i}.png", colour, side=70)
    assert len(trained.predict(tmp_path)) == 3
    assert len(trained.predict(tmp_path, split="train")) == 6


def test_what_cannot_be_predicted(trained, tmp_path):
    with pytest.raises(InputError, match="holds no image"):
        trained.predict(tmp_path)
    (tmp_path / "broken.png").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"broken.png: .*corrupt"):
        trained.predict(tmp_path)


def test_runs_of_one_call_decode_at_one_size(tmp_path):
    """Each run ends as `train` would have left it, so files are not decoded at the size
    of the first run.
    """
    for i in range(8):
        paint(tmp_path / "photos" / "red" / f"{i}.png", "red", side=16 + i)
        paint(tmp_path / "photos" / "blue" / f"{i}.png", "blue", side=16 + i)
    specs = [
        rfdlc.RunSpec(tmp_path / f"{size}", "ce", {"image_size": size, "epochs": 1})
        for size in (8, 16)
    ]
    with pytest.raises(
        InputError,
        match="networks expect images of different sizes or scales: train each of them",
    ):
        rfdlc.train_many(tmp_path / "photos", specs)
    assert not (tmp_path / "8").exists()

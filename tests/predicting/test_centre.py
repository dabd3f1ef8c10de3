"""A model that was trained on streamed photographs looks at their centre; whoever asks
it later must do the same.
"""

import warnings
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

import rfdlc
from rfdlc.data.images import ImageFiles, Resizing
from rfdlc.serving.backend import Limits, open_backend
from rfdlc.serving.requests import Reader

SIDE = 12


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A frame of noise around a coloured centre: whoever sees more than the centre sees
    something else.
    """
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for colour in range(2):
        for part, count in (("train", 16), ("test", 6)):
            (root / part / f"c{colour}").mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (32 + i, 40, 3), dtype=np.uint8)
                pixels[4:-4, 6:-6, colour] = 250
                Image.fromarray(pixels).save(root / part / f"c{colour}" / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "streamed"
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patched.setattr("rfdlc.data.readers.image_files.FITS_IN_MEMORY", 0)
        data = rfdlc.load(photos, image_size=SIDE)
        assert isinstance(data.train.inputs, ImageFiles)
        settings = {
            "epochs": 2,
            "widths": (8,),
            "backbone": "mlp",
            "hold_out": 0.2,
            "workers": 0,
            "device": "cpu",
        }
        rfdlc.train(data, "rf-dlc", folder, **settings)
    return folder


def test_paths_are_seen_as_training_saw_them(run, photos, monkeypatch):
    model, recorded = (
        rfdlc.Model.load(run, device="cpu"),
        rfdlc.Predictions.load(run / "predictions.npz"),
    )
    assert model.resizing == Resizing(centre=224 / 256)
    found = model.predict(photos)
    assert found.ids.tolist() == recorded.ids.tolist()
    assert found.targets.tolist() == recorded.targets.tolist()
    np.testing.assert_allclose(found.scores.values, recorded.scores.values, atol=1e-4)
    model._spec = replace(model._spec, resizing=Resizing())
    otherwise = model.predict(photos).scores.values
    assert np.abs(otherwise - recorded.scores.values).max() > 0.01
    monkeypatch.setattr("rfdlc.data.readers.image_files.FITS_IN_MEMORY", 0)
    streamed = rfdlc.load(
        photos
    )  # too many for the memory: seen by this model as one of them is
    assert np.array_equal(model.predict(streamed).scores.values, otherwise)


@pytest.mark.usefixtures("quick_exports")
@pytest.mark.parametrize("form", ["run", "onnx"])
def test_servers_see_them_so_too(run, photos, tmp_path, form):
    path = run if form == "run" else rfdlc.export(run, tmp_path / "model.onnx").path
    backend, name = open_backend(path), "test/c1/3.png"
    recorded = rfdlc.Predictions.load(run / "predictions.npz")
    place = recorded.ids.tolist().index(name)
    expected = np.asarray(backend.decider.probabilities(recorded))[place]
    question = Reader(backend, Limits()).read_image(
        (photos / name).read_bytes(), np.inf
    )
    np.testing.assert_allclose(
        backend.compute(question["images"])[0][0], expected, atol=1e-4
    )
    assert "warnings" not in question
    assert (
        backend.inputs.resizing.usual_cut
        == rfdlc.Model.load(run, device="cpu").resizing.usual_cut
        > 0.2
    )
    Image.new("RGB", (90, 30)).save(tmp_path / "long.png")
    (told,) = Reader(backend, Limits()).read_image(
        (tmp_path / "long.png").read_bytes(), np.inf
    )["warnings"]
    assert told.startswith("1 image is long")


@pytest.mark.usefixtures("quick_exports")
def test_padded_images_are_padded_everywhere(tmp_path):
    root, rng, size = tmp_path / "photos", np.random.default_rng(0), (14, 40)
    for i in range(30):
        place = root / ("test" if i > 23 else "train") / f"c{i % 2}" / f"{i}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
        pixels[:, :10, i % 2] = 250  # the end, which a centre crop would not show
        Image.fromarray(pixels).save(place)
    settings = {
        "epochs": 2,
        "widths": (8,),
        "backbone": "mlp",
        "hold_out": 0.2,
        "device": "cpu",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = rfdlc.train(
            root, "ce", tmp_path / "run", data_options={"image_size": SIDE}, **settings
        )
        exported = rfdlc.export(
            tmp_path / "run", tmp_path / "model.onnx", resize=True
        ).path
    assert model.resizing == Resizing("pad")
    recorded = rfdlc.Predictions.load(tmp_path / "run" / "predictions.npz")
    found = rfdlc.Model.load(tmp_path / "run", device="cpu").predict(root)
    np.testing.assert_allclose(found.scores.values, recorded.scores.values, atol=1e-4)
    expected = np.asarray(model.decider.probabilities(recorded))
    files = [root / name for name in recorded.ids]
    whole = np.stack(
        [np.asarray(Image.open(file)).transpose(2, 0, 1) for file in files]
    )
    np.testing.assert_allclose(
        rfdlc.OnnxModel.load(exported).decide(whole).probabilities, expected, atol=2e-3
    )
    for path in (tmp_path / "run", exported):
        backend = open_backend(path)
        question = Reader(backend, Limits()).read_image(files[1].read_bytes(), np.inf)
        np.testing.assert_allclose(
            backend.compute(question["images"])[0][0], expected[1], atol=1e-4
        )

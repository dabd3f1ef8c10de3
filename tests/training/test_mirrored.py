"""Predictions from several views of an image (test_flip, test_shift): in runs, exported
graphs, maps and distances.
"""

import numpy as np
import pytest
import torch

import rfdlc
from rfdlc.reporting.attention import grad_cam
from rfdlc.serving.backend import open_backend

SETTINGS = {
    "backbone": "resnet8",
    "particles": 2,
    "shared_stages": 1,
    "epochs": 1,
    "familiarity": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("mirrored") / "run"
    rfdlc.train("digits-lt", "rf-dlc", path, **SETTINGS, test_flip=True, test_shift=2)
    return path


def shifted(images, by):
    """Down and to the right (by > 0) or up and to the left; edges are repeated."""
    places = (np.arange(images.shape[-1]) - by).clip(0, images.shape[-1] - 1)
    return images[..., places, :][..., places]


def test_logits_are_means_over_views(folder):
    images = rfdlc.load("digits-lt").test.array[:90]
    model, kept = (
        rfdlc.Model.load(folder),
        rfdlc.Predictions.load(folder / "predictions.npz"),
    )
    found = model.predict(images)
    model.net.mirrored, model.net.shift = False, 0
    views = [images, images, shifted(images, 2), shifted(images, -2)]
    views += [view[..., ::-1].copy() for view in views]
    parts = [model.predict(each).scores.values for each in views]
    assert all(np.abs(parts[0] - part).max() > 0.1 for part in parts[2:])
    np.testing.assert_allclose(found.scores.values, np.mean(parts, axis=0), atol=1e-4)
    model.net.shift = 2
    only = model.predict(images).scores.values
    np.testing.assert_allclose(only, np.mean(parts[:4], axis=0), atol=1e-4)
    np.testing.assert_allclose(
        kept.scores.values[:, :90], found.scores.values, atol=1e-4
    )


def test_graphs_maps_and_distances_follow(folder, tmp_path):
    images = rfdlc.load("digits-lt").test.array[:40]
    model = rfdlc.Model.load(folder)
    held = rfdlc.Predictions.load(folder / "held-out.npz")
    utility = rfdlc.Utility.one_hot(model.classes).with_abstain(0.0, "unfamiliar")
    decider = model.decider.replace(utility=utility).fit_unfamiliar(
        held, false_alarm=0.2
    )
    copy = model.save_pretrained(tmp_path / "copy")
    decider.save(copy / "decider.json")
    strange = open_backend(copy).compute(images)[2]
    assert np.array_equal(
        strange, decider.explain(model.predict(images)).reason == "unfamiliar"
    )
    exported = [
        rfdlc.export(copy, tmp_path / name) for name in ("strange.onnx", "strange.pt2")
    ]
    assert [each.parity.decisions_changed for each in exported] == [0, 0]
    graph = torch.export.load(exported[1].path).module()
    assert np.array_equal(graph(torch.tensor(images))[-1].numpy(), strange)
    assert grad_cam(model, images, [0] * 40).shape[0] == 40
    assert model.predict(images).unfamiliarity.shape == (40,)


@pytest.mark.parametrize("view", ["test_flip", "test_shift"])
def test_tables_have_no_views(tmp_path, view):
    rng = np.random.default_rng(0)
    table = rng.normal(size=(40, 3)).astype(np.float32), np.repeat([0, 1], 20)
    with pytest.raises(rfdlc.InputError, match=f"{view} is for images"):
        rfdlc.train(
            table, "rf-dlc", tmp_path / "run", backbone="mlp", epochs=1, **{view: 1}
        )

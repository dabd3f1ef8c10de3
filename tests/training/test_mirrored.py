"""Predictions from an image and its mirror image (test_flip): in runs, exported graphs, maps and distances."""

import numpy as np
import pytest
import torch

import rfdlc
from rfdlc.integrations.report.attention import grad_cam
from rfdlc.integrations.server.backend import open_backend

SETTINGS = {"backbone": "resnet8", "particles": 2, "shared_stages": 1, "epochs": 1, "familiarity": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("mirrored") / "run"
    rfdlc.train("digits-lt", "rf-dlc", path, **SETTINGS, test_flip=True)
    return path


def test_logits_are_means_over_both_images(folder):
    images = rfdlc.load("digits-lt").test.array[:90]
    model, kept = rfdlc.Model.load(folder), rfdlc.Predictions.load(folder / "predictions.npz")
    found, other = (model.predict(each) for each in (images, images[..., ::-1].copy()))
    model.net.mirrored = False
    parts = [model.predict(each).scores.values for each in (images, images[..., ::-1].copy())]
    assert np.abs(parts[0] - parts[1]).max() > 0.1
    np.testing.assert_allclose(found.scores.values, np.mean(parts, axis=0), atol=1e-4)
    np.testing.assert_allclose(kept.scores.values[:, :90], found.scores.values, atol=1e-4)
    np.testing.assert_allclose(other.scores.values, found.scores.values, atol=1e-4)


def test_graphs_maps_and_distances_follow(folder, tmp_path):
    images = rfdlc.load("digits-lt").test.array[:40]
    model = rfdlc.Model.load(folder)
    for name in ("model.onnx", "model.pt2"):
        assert rfdlc.export(folder, tmp_path / name).parity.decisions_changed == 0
    held = rfdlc.Predictions.load(folder / "held-out.npz")
    utility = rfdlc.Utility.one_hot(model.classes).with_abstain(0.0, "unfamiliar")
    decider = model.decider.replace(utility=utility).fit_unfamiliar(held, false_alarm=0.2)
    copy = model.save_pretrained(tmp_path / "copy")
    decider.save(copy / "decider.json")
    strange = open_backend(copy).compute(images)[2]
    assert np.array_equal(strange, decider.explain(model.predict(images)).reason == "unfamiliar")
    graph = torch.export.load(rfdlc.export(copy, tmp_path / "strange.pt2").path).module()
    assert np.array_equal(graph(torch.tensor(images))[-1].numpy(), strange)
    assert grad_cam(model, images, [0] * 40).shape[0] == 40
    assert model.predict(images).unfamiliarity.shape == (40,)


def test_tables_have_no_mirror_images(tmp_path):
    rng = np.random.default_rng(0)
    table = rng.normal(size=(40, 3)).astype(np.float32), np.repeat([0, 1], 20)
    with pytest.raises(rfdlc.InputError, match="test_flip is for images"):
        rfdlc.train(table, "rf-dlc", tmp_path / "run", backbone="mlp", epochs=1, test_flip=True)

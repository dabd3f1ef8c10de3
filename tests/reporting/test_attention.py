"""Grad-CAM against a naive computation, and on images where the place that matters is
known; contact sheets.
"""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

import rfdlc
from rfdlc.data.loader import Normaliser
from rfdlc.reporting import attention
from rfdlc.reporting.attention import grad_cam, overlaid


def squares(count, seed):
    """Noise (0), or noise with a bright square of 6 pixels at a random place (1); and
    the corner of the square.
    """
    rng = np.random.default_rng(seed)
    images, labels = (
        rng.integers(0, 90, (count, 1, 16, 16)).astype(np.uint8),
        rng.integers(0, 2, count),
    )
    corners = rng.integers(0, 11, (count, 2))
    for image, label, (row, column) in zip(images, labels, corners, strict=True):
        image[0, row : row + 6, column : column + 6] += np.uint8(150 * label)
    return images, labels, corners


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("squares") / "run"
    settings = {
        "backbone": "resnet8",
        "particles": 2,
        "epochs": 3,
        "batch_size": 32,
        "augment": "none",
        "tune": "off",
    }
    images, labels, _ = squares(160, 0)
    return (
        rfdlc.train(
            (images, labels),
            "rf-dlc",
            path,
            mixup=0,
            learning_rate=0.05,
            warmup=0,
            **settings,
        ),
        path,
    )


def test_it_equals_a_naive_computation(trained):
    model, _ = trained
    images, classes, _ = squares(3, 1)
    found = grad_cam(model, images, classes)
    scaled = Normaliser(model.normalisation, (1, 16, 16), model.device, torch.float32)(
        torch.from_numpy(images)
    )
    net, maps = model.net.eval(), []
    hook = net.branches[-1].body.register_forward_hook(
        lambda layer, given, output: maps.append(output)
    )
    with torch.enable_grad():
        logits = net.outputs(scaled.requires_grad_(True)[None])[0][0]
    hook.remove()
    width = maps[0].shape[1] // 2
    for n, label in enumerate(classes):
        seen = np.zeros(maps[0].shape[2:])
        for particle in range(2):
            score = logits[particle, n].log_softmax(-1)[label]
            slope = torch.autograd.grad(score, maps[0], retain_graph=True)[0]
            own = range(particle * width, (particle + 1) * width)
            total = sum(slope[n, c].mean() * maps[0][n, c] for c in own)
            seen += np.maximum(total.detach().numpy(), 0) / 2
        np.testing.assert_allclose(found[n], seen / max(seen.max(), 1e-12), atol=1e-4)


def test_the_network_looked_at_the_square(trained):
    model, _ = trained
    images, labels, corners = squares(60, 2)
    images, corners = images[labels == 1], corners[labels == 1]
    maps = grad_cam(model, images, [1] * len(images))
    inside, outside = [], []
    for seen, (row, column) in zip(maps, corners, strict=True):
        large = np.kron(seen, np.ones((4, 4)))  # a cell of the map is 4 pixels wide
        mask = np.zeros((16, 16), dtype=bool)
        mask[row : row + 6, column : column + 6] = True
        inside.append(large[mask].mean())
        outside.append(large[~mask].mean())
    assert np.mean(inside) > 1.5 * np.mean(outside)


@pytest.fixture
def confused(trained):
    """The trained run with other targets, so that there are mistakes; its folder, and
    its predictions.
    """
    path = trained[1]
    predictions = rfdlc.Predictions.load(path)
    wrong = rfdlc.Predictions(
        logits=predictions.scores.values,
        targets=1 - predictions.targets,
        classes=predictions.classes,
    )
    wrong.save(path / "predictions.npz")
    yield path, wrong
    predictions.save(path / "predictions.npz")


def test_the_report_shows_sheets_and_where_the_network_looked(
    trained, confused, tmp_path
):
    model, (path, wrong) = trained[0], confused
    images = rfdlc.load(squares(160, 0)[:2]).test.array
    text = rfdlc.report(path, out=tmp_path / "report.html", images=images).read_text()
    (run,) = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])["runs"]
    assert set(run["attention"]) == {str(one["row"]) for one in run["mistakes"]}
    assert all(
        url.startswith("data:image/png;base64,") for url in run["attention"].values()
    )
    p = np.asarray(model.decider.probabilities(wrong))
    true = p[np.arange(len(p)), wrong.targets]
    hardest = [one["row"] for one in run["sheets"]["hardest"]]
    assert hardest == np.argsort(true, kind="stable")[:24].tolist()
    entropy = -(p * np.log(p)).sum(1)
    uncertain = [one["row"] for one in run["sheets"]["uncertain"]]
    np.testing.assert_allclose(entropy[uncertain], np.sort(entropy)[::-1][:24])
    assert {str(row) for row in hardest + uncertain} <= set(run["thumbnails"])


def test_other_networks_and_runs_have_no_maps(tmp_path):
    images, labels, _ = squares(60, 3)
    small = images[:, :, ::2, ::2]
    model = rfdlc.train((small, labels), "ce", tmp_path / "mlp", widths=8, epochs=1)
    assert grad_cam(model, small, labels) is None
    page = rfdlc.report(
        tmp_path / "mlp",
        out=tmp_path / "report.html",
        images=rfdlc.load((small, labels)).test.array,
    )
    assert '"attention":{}' in page.read_text()


def test_photographs_are_turned_once(trained, tmp_path):
    exif, held = Image.Exif(), np.arange(256, dtype=np.uint8).reshape(16, 16)
    exif[0x0112] = 6  # the camera was turned to the right
    Image.fromarray(held).save(tmp_path / "a.png", exif=exif)
    seen = attention._inputs(trained[0], tmp_path, np.array([0]), ["a.png"])
    np.testing.assert_array_equal(seen[0, 0], np.rot90(held, -1))


def test_colours_are_where_the_map_is():
    image, seen = np.full((1, 8, 8), 100, np.uint8), np.zeros((2, 2))
    seen[0, 1] = 1
    pixels = np.asarray(overlaid(image, seen)).astype(int)
    assert (pixels[6, 1] == 100).all()
    assert pixels[1, 6].tolist() == pytest.approx(
        [193, 76, 40], abs=1
    )  # 0.6 of the colour


def test_images_of_other_samples_or_types(confused, tmp_path):
    """Too few are refused; floats between 0 and 1 give the same page as bytes, in
    either order of the axes.
    """
    path, images = confused[0], rfdlc.load(squares(160, 0)[:2]).test.array
    with pytest.raises(
        rfdlc.InputError,
        match=rf"images have shape \(5, 1, 16, 16\) for {len(images)} samples",
    ):
        rfdlc.report(path, out=tmp_path / "r.html", images=images[:5])
    pages = []
    for given in (
        images,
        images / 255,
        images.astype(np.float32).transpose(0, 2, 3, 1) / 255,
    ):
        text = rfdlc.report(
            path, out=tmp_path / "r.html", images=given, bootstrap=0
        ).read_text()
        (run,) = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])[
            "runs"
        ]
        pages.append((run["thumbnails"], run["attention"]))
    assert pages[0][1]
    assert pages[0] == pages[1] == pages[2]

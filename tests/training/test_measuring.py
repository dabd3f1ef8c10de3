"""What a budget has time for is found in a small share of it: what is clearly too slow
is not measured.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import rfdlc
from rfdlc.data.images import Resizing
from rfdlc.progress import shown
from rfdlc.training import measuring
from rfdlc.training.building import method_net
from rfdlc.training.methods import resolve
from rfdlc.training.run import Run
from rfdlc.training.trainer import Trainer
from rfdlc.training.tuning import planning

SPEED = 2e9  # multiply-adds of one image per second, of the clock below
SIDE = 80


def photos(side=SIDE, count=60):
    rng = np.random.default_rng(0)
    return (
        rng.integers(0, 256, (count, 3, side, side)).astype(np.uint8),
        np.arange(count) % 3,
    )


def network(name, side, size=0, particles=1):
    config = resolve(
        "rf-dlc",
        "",
        {"backbone": name, "image_size": size, "particles": particles},
        "images",
        60,
    )[1]
    classes = rfdlc.Classes.from_counts([20, 20, 20])
    return method_net(
        resolve("rf-dlc", "", {})[0], config, (3, side, side), classes, (0,)
    )


@pytest.mark.parametrize(
    ("name", "size", "particles"),
    [("cnn", 0, 1), ("resnet8", 32, 3), ("resnet32", 0, 3), ("resnet50", 0, 1)],
)
def test_multiply_adds_are_about_those_of_a_forward_pass(name, size, particles):
    net = network(name, 64, size, particles).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        net.features(torch.zeros(1, 1, 3, 64, 64))
    resized = counter.flop_counts["Global"].get(torch.ops.aten.bmm, 0) if size else 0
    counted = (counter.get_total_flops() - resized) / 2
    assert measuring._multiply_adds(net, size or 64) == pytest.approx(counted, rel=0.15)


def side_of(net):
    return len(net.resize.rows) if hasattr(net.resize, "rows") else SIDE


@pytest.fixture
def clock(simulated_steps):
    """The time, and which networks were measured; a step takes the time of its
    multiply-adds.
    """
    now, measured = [0.0], []
    simulated_steps(
        now,
        lambda net: 3 * 32 * measuring._multiply_adds(net, side_of(net)) / SPEED,
        lambda net: measured.append((net.name, side_of(net), net.particles)),
    )
    return now, measured


def trained(path, budget, data=None, **given):
    with shown():
        return rfdlc.train(
            data or photos(), "rf-dlc", path, budget=budget, tune="off", **given
        )


@pytest.mark.parametrize(
    ("budget", "chosen", "expected"),
    [
        (60, ("cnn", 32, 1), [("cnn", 32, 1), ("cnn", 32, 3), ("cnn", 32, 1)]),
        (200, ("cnn", 32, 3), [("cnn", 32, 1), ("cnn", 64, 3), ("cnn", 32, 3)]),
        (600, ("cnn", 64, 3), [("cnn", 32, 1), ("cnn", 64, 3)]),
        (20_000, ("auto", 0, 3), [("cnn", 32, 1), ("resnet50", SIDE, 3)]),
    ],
)
def test_a_short_budget_takes_smaller_images_in_little_time(
    tmp_path, clock, capsys, budget, chosen, expected
):
    """100 epochs of two steps. A step takes 69 s with ResNet-50, 2 and 0.5 s with three
    CNNs, 0.2 s with one.
    """
    run = trained(tmp_path / "run", budget)
    assert (
        clock[1] == expected
    )  # a network that is clearly too slow takes not even one step
    plan = json.loads((tmp_path / "run" / "tuning.json").read_text())
    assert plan["measured"] == pytest.approx(clock[0][0], abs=1e-3)
    assert plan["measured"] <= 0.05 * budget
    assert (run.config.backbone, run.config.image_size, run.config.particles) == chosen
    assert Run(tmp_path / "run").config == run.config
    said = capsys.readouterr().err
    told = (
        f"smaller    cnn on images of {chosen[1]} pixels, particles: {chosen[2]}, as"
        " the budget is short\n"
    )
    assert (told in said) == (chosen[0] == "cnn")
    assert ('pip install "rfdlc[vision]"; rfdlc embed' in said) == (chosen[0] == "cnn")


@pytest.mark.parametrize(
    ("height", "size", "least"), [(SIDE, 32, 16), (SIDE // 4, 64, 64)]
)
def test_long_images_keep_sixteen_pixels_across(tmp_path, clock, height, size, least):
    """Of padded squares of 32 pixels, a quarter is 8 pixels of the images."""
    padded = Resizing("pad", content=f"{SIDE}x{height}")
    data = replace(rfdlc.load(photos()), resizing=padded)
    assert trained(tmp_path / "run", 60, data).config.image_size == size
    assert measuring.smallest_side(Trainer(data)) == least


def test_a_size_that_is_given_stays(tmp_path, clock, capsys):
    assert trained(tmp_path / "setting", 300, image_size=72).config.image_size == 72
    data = rfdlc.load(photos())
    assert (
        trained(tmp_path / "network", 300, data, backbone="resnet20").config.image_size
        == 0
    )
    small = trained(
        tmp_path / "small", 10, photos(40)
    )  # these train a ResNet-32, which is for small images
    assert (small.config.backbone, small.config.image_size) == ("cnn", 0)
    said = capsys.readouterr().err
    assert "cnn on images of 72 pixels" in said
    assert "32 pixels" not in said


def test_a_size_of_the_data_that_is_given_stays(tmp_path, clock):
    from PIL import Image

    images, labels = photos(160, 30)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        folder = tmp_path / "photos" / f"class-{label}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.transpose(1, 2, 0)).save(folder / f"{number}.png")
    for options, size in (({}, 32), ({"image_size": SIDE}, 0)):
        out = tmp_path / f"run-{size}"
        run = rfdlc.train(
            tmp_path / "photos", out=out, data_options=options, budget=60, tune="off"
        )
        assert (run.config.backbone, run.config.image_size) == ("cnn", size)


def test_a_model_of_smaller_images_predicts_from_the_large_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(
        planning, "seconds_per_epoch", lambda trainer, runs, most, show: 1.0
    )
    monkeypatch.setattr(
        measuring, "seconds_per_epoch", lambda trainer, runs, most, show: 1.0
    )
    model = trained(tmp_path / "run", 2)
    assert (model.config.backbone, model.config.image_size) == ("cnn", 32)
    before = model.predict(photos()[0]).scores.values
    assert np.array_equal(
        before, rfdlc.Model.load(tmp_path / "run").predict(photos()[0]).scores.values
    )
    assert np.array_equal(
        before,
        rfdlc.resume(tmp_path / "run", photos()).predict(photos()[0]).scores.values,
    )

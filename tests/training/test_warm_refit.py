"""A refit that starts from the networks trained before it: by hand, in a stack,
resumed, after a common beginning.
"""

import numpy as np
import pytest
import torch

import rfdlc
from rfdlc.probabilities.predictions import Predictions
from rfdlc.training.loop import build_stages
from rfdlc.training.methods import find_method
from rfdlc.training.step import Step
from rfdlc.training.trainer import Trainer

SMALL = {
    "widths": 16,
    "particles": 2,
    "batch_size": 16,
    "epochs": 3,
    "tune": "off",
    "mixup": 0,
    "refit": True,
    "warm_refit": True,
    "checkpoint_every": 1,
}


@pytest.fixture(scope="module")
def images():
    """Three classes, each with a brighter third; a third of the first class are pairs
    of copies.
    """
    rng = np.random.default_rng(3)
    labels = np.repeat(np.arange(3), [60, 40, 20])
    pixels = rng.integers(0, 120, (120, 1, 9, 9))
    for image, label in zip(pixels, labels, strict=True):
        image[0, 3 * label : 3 * label + 3] += 60
    pixels[1:20:2] = pixels[:20:2]
    return rfdlc.load((pixels.astype(np.uint8), labels))


def assert_same(one, other):
    for name, weight in one.net.state_dict().items():
        torch.testing.assert_close(
            other.net.state_dict()[name], weight, rtol=1e-4, atol=1e-5
        )


def test_it_continues_with_the_weights_of_the_first_training(images, tmp_path):
    model = rfdlc.train(images, "rf-dlc", tmp_path / "run", **SMALL, seed=3)
    first = rfdlc.train(
        images, "rf-dlc", tmp_path / "first", **SMALL | {"refit": False}, seed=3
    )
    stage = build_stages(
        find_method("rf-dlc"), model.config, images, [3], torch.device("cpu")
    )[0]
    step = Step(first.net, stage.losses, stage.settings, stage.stage, (), stage.each)
    for epoch in (1, 2, 3):
        step.begin_epoch(epoch, stage.rates(epoch))
        for inputs, targets in stage.loader.epoch(epoch):
            step.compute(inputs, targets, torch.ones(1, 3))
    assert_same(first, model)
    with (
        np.load(tmp_path / "run/held-out.npz") as held,
        np.load(tmp_path / "first/held-out.npz") as same,
    ):
        np.testing.assert_allclose(held["logits"], same["logits"], atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"warm_refit": False}, {"refit": False}])
def test_only_before_it_held_out_samples_count_alike(images, tmp_path, settings):
    given = (
        SMALL
        | {"calibration": "prior-corrected-temperature", "target_prior": "uniform"}
        | settings
    )
    model = rfdlc.train(images, "rf-dlc", tmp_path / "run", **given)
    held = Predictions.load(tmp_path / "run/held-out.npz")
    alike, weighed = (
        model.decider.fit(held, balanced=balanced).model.calibrator
        for balanced in (False, True)
    )
    assert abs(alike.temperature - weighed.temperature) > 1e-3
    assert model.decider.model.calibrator == (weighed if settings else alike)


def test_runs_of_a_stack_equal_runs_alone_and_resumed_ones(
    images, tmp_path, monkeypatch
):
    seeds, sizes = (0, 1), []

    def fit(one, runs, _fit=Trainer.fit):
        stack = one.stacker.next_stack
        one.stacker.next_stack = lambda waiting: (
            sizes.append(len((found := stack(waiting)).members)) or found
        )
        return _fit(one, runs)

    def stop(one, run, member, epoch, _row=Trainer._history_row):
        if (run.phase, epoch.epoch) == (1, 2):
            raise KeyboardInterrupt
        return _row(one, run, member, epoch)

    specs = [
        rfdlc.RunSpec(tmp_path / f"many-{seed}", "rf-dlc", SMALL | {"seed": seed})
        for seed in seeds
    ]
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "fit", fit)
        models = rfdlc.train_many(images, specs)
    assert sizes == [2, 2]  # side by side in both phases, although there are copies
    for seed, model in zip(seeds, models, strict=True):
        path = tmp_path / f"alone-{seed}"
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "_history_row", stop)
            with pytest.raises(KeyboardInterrupt):
                rfdlc.train(images, "rf-dlc", path, **SMALL, seed=seed)
        alone = rfdlc.resume(path, images)
        assert_same(alone, model)
        cold = rfdlc.train(
            images,
            "rf-dlc",
            tmp_path / f"cold-{seed}",
            **SMALL | {"seed": seed, "warm_refit": False},
        )
        assert not torch.allclose(
            cold.net.head_weights, alone.net.head_weights, atol=1e-3
        )


def test_runs_that_begin_alike_start_again_from_their_own_weights(images, tmp_path):
    """Class weights start late: both runs are one training until then, but their refits
    have other beginnings.
    """
    late = SMALL | {"deferred": 0.7, "repulsion": "none"}
    each = {"plain": {}, "weighted": {"weights": "linear"}}
    specs = [
        rfdlc.RunSpec(tmp_path / name, "rf-dlc", late | own)
        for name, own in each.items()
    ]
    models = rfdlc.train_many(images, specs)
    for (name, own), model in zip(each.items(), models, strict=True):
        assert_same(
            rfdlc.train(images, "rf-dlc", tmp_path / f"{name}-alone", **late | own),
            model,
        )

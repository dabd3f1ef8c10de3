"""The samples by which shares are priced are held out from the networks that decide."""

import json

import numpy as np
import pytest
from sklearn.datasets import load_digits

import rfdlc
from rfdlc.cli.request import FitRequest
from rfdlc.errors import InputError
from rfdlc.probabilities.predictions import Predictions

ABSTAIN = FitRequest(abstain=1.0, budget="20%")


@pytest.fixture(scope="module")
def images():
    digits = load_digits()
    pixels = (15.9 * digits.images).astype(np.uint8)[:, None]
    return pixels, digits.target


@pytest.fixture(scope="module")
def in_time(images, tmp_path_factory):
    """A model of the first images, trained in three seconds."""
    pixels, labels = images
    data = rfdlc.load((pixels[:600], labels[:600]))
    path = tmp_path_factory.mktemp("runs") / "run"
    model = rfdlc.train(
        data, out=path, backbone="mlp", widths=32, tune="off", budget=3, test_flip=False
    )
    return model, data


def test_held_out_predictions_are_those_of_the_networks_that_decide(in_time):
    model, data = in_time
    held = Predictions.load(model.path / "held-out.npz")
    split = data.hold_out(model.config.hold_out, seed=model.config.seed).val
    assert len(held) == len(split) == round(0.2 * len(data.train))
    again = model.predict_split(split)
    np.testing.assert_array_equal(again.targets, held.targets)
    np.testing.assert_allclose(again.scores.values, held.scores.values, atol=1e-4)


def test_each_share_of_new_samples_is_within_chance(in_time, images):
    """Three standard errors of as many held-out and new samples."""
    model, _ = in_time
    pixels, _ = images
    held = Predictions.load(model.path / "held-out.npz")
    new = model.predict(pixels[600:])
    utility = model.decider.utility.with_abstain(1.0)
    for share in (0.01, 0.05, 0.2):
        decider = model.decider.replace(utility=utility).fit_budget(held, budget=share)
        handed = (utility.decided_class[decider.decide(new)] < 0).mean()
        error = np.sqrt(share * (1 - share) * (1 / len(held) + 1 / len(new)))
        assert abs(handed - share) < 3 * error + 1 / len(held)


def test_a_run_whose_networks_have_seen_the_held_out_samples_has_no_price(
    images, tmp_path
):
    pixels, labels = images
    model = rfdlc.train(
        (pixels[:300], labels[:300]),
        out=tmp_path / "run",
        backbone="mlp",
        widths=16,
        tune="off",
        epochs=2,
        refit=True,
        warm_refit=True,
    )
    for asked in (
        {"abstain": 1.0, "budget": "20%"},
        {"abstain": 1.0, "unfamiliar": "2%"},
        {"sets": "macro"},
    ):
        with pytest.raises(InputError, match="trained further on the samples of held"):
            FitRequest(**asked).fit(model.path)


def test_a_refit_that_trials_chose_counts_too(in_time, tmp_path):
    """Folders of earlier versions have it in tuning.json."""
    model, _ = in_time
    for name in ("config.json", "classes.json", "decider.json", "held-out.npz"):
        (tmp_path / name).write_bytes((model.path / name).read_bytes())
    _, decider = ABSTAIN.fit(tmp_path)
    assert decider.deferral.budget.shares == {"total": 0.2}
    chosen = {"refit": True, "warm_refit": True}
    (tmp_path / "tuning.json").write_text(json.dumps({"chosen": chosen}))
    with pytest.raises(InputError, match="train with refit=false"):
        ABSTAIN.fit(tmp_path)

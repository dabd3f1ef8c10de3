"""Early stopping on held-out data: when the loss has not fallen for long, with the
weights of the best epoch.
"""

import csv
import json

import numpy as np
import pytest
import torch

import rfdlc
from rfdlc.errors import InputError
from rfdlc.training import early_stopping, trainer

SETTINGS = {
    "widths": 64,
    "batch_size": 32,
    "learning_rate": 0.3,
    "schedule": "constant",
    "warmup": 0,
    "epochs": 60,
}
pytestmark = pytest.mark.usefixtures("quick_calibration")


@pytest.fixture(scope="module")
def data():
    """Labels that are mostly noise: a network that learns them by heart gets worse on
    others.
    """
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(240, 70)).astype(np.float32)
    return rfdlc.load(
        (
            inputs,
            np.where(
                rng.random(240) < 0.6, rng.integers(0, 2, 240), inputs[:, 0] > 0
            ).astype(int),
        )
    )


def history(path):
    with open(path / "history.csv", newline="") as file:
        return [
            (int(row["phase"]), int(row["epoch"]), row.get("held_out_nll"))
            for row in csv.DictReader(file)
        ]


def same(one, two):
    pairs = zip(
        one.net.state_dict().values(), two.net.state_dict().values(), strict=True
    )
    return all(torch.equal(*pair) for pair in pairs)


def test_it_stops_and_keeps_the_weights_of_the_best_epoch(tmp_path, data):
    model = rfdlc.train(data, "ce", tmp_path / "run", patience=4, **SETTINGS)
    rows = history(tmp_path / "run")
    losses = [float(loss) for _, _, loss in rows]
    best = int(np.argmin(losses))
    assert len(losses) == best + 1 + 4 < 60
    rfdlc.train(data, "ce", tmp_path / "all", keep=((best + 1) / 60,), **SETTINGS)
    weights = (
        rfdlc.training.run.Run(tmp_path / "all")
        .checkpoint(f"epoch-{best + 1}.ckpt")
        .net
    )
    for name, weight in model.net.state_dict().items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=0)
    assert not (tmp_path / "run" / "best.safetensors").exists()


def test_a_refit_takes_as_many_epochs_as_were_best(tmp_path, data):
    rfdlc.train(
        data,
        "ce",
        tmp_path / "run",
        patience=3,
        refit=True,
        calibration_folds=1,
        **SETTINGS,
    )
    rows = history(tmp_path / "run")
    first = [float(loss) for phase, _, loss in rows if phase == 0]
    assert sum(phase == 1 for phase, _, _ in rows) == np.argmin(first) + 1


@pytest.mark.parametrize("after", [2, 5])
def test_an_interrupted_run_stops_where_an_undisturbed_one_does(
    tmp_path, data, monkeypatch, after
):
    undisturbed = rfdlc.train(
        data, "ce", tmp_path / "one", patience=4, checkpoint_every=1, **SETTINGS
    )
    original, calls = trainer._checkpoint, []
    last = len(history(tmp_path / "one"))

    def crash(*given):
        original(*given)
        calls.append(1)
        if len(calls) == (
            last if after == 5 else after
        ):  # also right after the last epoch
            raise OSError("no power")

    monkeypatch.setattr(trainer, "_checkpoint", crash)
    with pytest.raises(OSError, match="no power"):
        rfdlc.train(
            data, "ce", tmp_path / "two", patience=4, checkpoint_every=1, **SETTINGS
        )
    again = rfdlc.resume(tmp_path / "two", data)
    assert history(tmp_path / "two") == history(tmp_path / "one")
    assert same(again, undisturbed)


@pytest.mark.parametrize(
    ("method", "settings"),
    [("crt", {}), ("ce", {"hold_out": 0}), ("ce", {"average": 0.9}), ("tau-norm", {})],
)
def test_what_cannot_stop_early_raises(tmp_path, data, method, settings):
    with pytest.raises(InputError, match="patience"):
        rfdlc.train(data, method, tmp_path / "run", patience=2, **settings)


def test_runs_of_one_call_end_when_each_of_them_does(tmp_path, data):
    """Each as if it were trained alone: runs that end at other epochs do not wait for
    each other.
    """
    each = [
        {"learning_rate": 0.001},
        {"learning_rate": 0.001, "calibration": "none"},
        {"learning_rate": 1.0, "seed": 1},
    ]
    settings = [{**SETTINGS, "patience": 3, **own} for own in each]
    rfdlc.train_many(
        data,
        [rfdlc.RunSpec(tmp_path / f"{i}", "ce", own) for i, own in enumerate(settings)],
    )
    lengths = [len(history(tmp_path / f"{i}")) for i in range(3)]
    assert lengths[2] < lengths[0] == lengths[1] < 60
    for i, own in enumerate(settings):
        alone = rfdlc.train(data, "ce", tmp_path / f"alone-{i}", **own)
        assert history(tmp_path / f"alone-{i}") == history(tmp_path / f"{i}")
        assert same(alone, rfdlc.Model.load(tmp_path / f"{i}"))


def test_it_says_when_it_ended_and_which_weights_it_kept(tmp_path, data, monkeypatch):
    said = []
    monkeypatch.setattr(early_stopping, "announce", said.append)
    for name, settings in (("early", {"refit": True}), ("late", {"epochs": 3})):
        rfdlc.train(
            data,
            "ce",
            tmp_path / name,
            patience=4,
            calibration_folds=1,
            **{**SETTINGS, **settings},
        )
    rows = history(tmp_path / "early")
    losses = [float(loss) for phase, _, loss in rows if phase == 0]
    best = int(np.argmin(losses)) + 1
    assert (
        f"stopped    after epoch {len(losses)} of 60; kept are the weights of epoch"
        f" {best}, whose" in said[0]
    )
    metrics = json.loads((tmp_path / "early" / "metrics.json").read_text())
    assert (metrics["last_epochs"], metrics["kept_epochs"]) == (
        [len(losses), best],
        [best, best],
    )
    late = 1 + int(
        np.argmin([float(loss) for _, _, loss in history(tmp_path / "late")])
    )
    assert said[1:] == [
        f"kept       the weights of epoch {late}, whose held-out loss was the lowest"
    ]
    rfdlc.train(data, "ce", tmp_path / "plain", **{**SETTINGS, "epochs": 2})
    assert "last_epochs" not in json.loads(
        (tmp_path / "plain" / "metrics.json").read_text()
    )

"""Many runs at once: each folder holds what training it alone would have left there."""

import pytest
import torch

import rfdlc
from rfdlc.errors import InputError

SMALL = {"epochs": 3, "widths": (16,)}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


def weights(path):
    return (path / "model.safetensors").read_bytes()


def test_finished_runs_are_loaded_and_unfinished_ones_go_on(tmp_path):
    alone = rfdlc.train("digits-lt", "ce", tmp_path / "alone", **SMALL)
    rfdlc.train("digits-lt", "ce", tmp_path / "a", **SMALL)
    rfdlc.train("digits-lt", "ce", tmp_path / "b", **SMALL)
    (tmp_path / "b" / "metrics.json").unlink()
    (tmp_path / "b" / "model.safetensors").unlink()
    written = (tmp_path / "a" / "model.safetensors").stat().st_mtime_ns
    plans = [rfdlc.Plan(tmp_path / name, "ce", SMALL) for name in "abc"]
    models = rfdlc.train_many("digits-lt", plans)
    assert [model.path for model in models] == [tmp_path / name for name in "abc"]
    assert (tmp_path / "a" / "model.safetensors").stat().st_mtime_ns == written
    assert all(weights(model.path) == weights(alone.path) for model in models)


def test_plans_that_cannot_be(tmp_path):
    with pytest.raises(InputError, match="folder of several plans"):
        rfdlc.train_many("digits-lt", [rfdlc.Plan(tmp_path / "a"), rfdlc.Plan(tmp_path / "b" / ".." / "a", "ce")])
    with pytest.raises(InputError, match="'epoch' is unknown"):
        rfdlc.train_many("digits-lt", [rfdlc.Plan(tmp_path / "a"), rfdlc.Plan(tmp_path / "b", settings={"epoch": 1})])
    with pytest.raises(InputError, match="networks is 0"):
        rfdlc.train_many("digits-lt", [rfdlc.Plan(tmp_path / "a")], networks=0)
    assert not list(tmp_path.iterdir())

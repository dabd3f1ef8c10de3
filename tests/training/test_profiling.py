"""The profile of a training: parts that add up, traffic counted by hand, the command's table."""

import pytest
from typer.testing import CliRunner

import rfdlc
from rfdlc.cli import app
from rfdlc.training import profiling


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(profiling, "SECONDS", 0.0)
    monkeypatch.setattr(profiling, "COPIED", {"cpu": 2**20})


def test_traffic_of_an_mlp_is_what_its_layers_move(quick):
    data = rfdlc.load("digits-lt")
    found = profiling.profile(data, "ce", widths=(16,), particles=2, batch_size=32, head="linear", epochs=3)
    activations = 2 * 32 * (16 + 10)  # particles x batch x outputs of both maps
    weights = 2 * ((64 * 16 + 16) + (16 + 16) + (16 * 10 + 10))  # maps with biases, layer norm
    assert found.traffic == 4 * (5 * activations + 7 * weights)
    assert list(found.parts) == ["data", "forward", "backward", "optimiser"]
    assert all(seconds >= 0 for seconds in found.parts.values())
    assert found.step == pytest.approx(sum(found.parts.values()))
    assert found.steps == 3 * -(-len(data.train) // 32)
    assert 0 < found.floor == pytest.approx(found.traffic / found.bandwidth)


def test_the_floor_is_the_time_that_memory_needs():
    parts = {"data": 0.5, "forward": 1.0, "backward": 2.0, "optimiser": 0.5}
    found = profiling.Profile(parts, evaluation=1.0, steps=3, stages=1, trainings=1, traffic=8e9, bandwidth=4e9)
    assert (found.step, found.floor) == (4.0, 2.0)


def test_the_command_prints_the_table_beside_the_result(quick, tmp_path):
    words = ["train", "digits-lt", "--out", str(tmp_path / "run"), "--profile", "--json", "epochs=1", "particles=1"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    for word in ("data", "forward", "backward", "optimiser", "of this bound"):
        assert word in " ".join(result.stderr.split())
    assert "stages" not in result.stderr
    assert result.stdout.startswith("{")


def test_what_is_measured_of_several_stages_and_trainings_is_named(quick, tmp_path):
    words = ["train", "digits-lt", "--method", "crt", "--out", str(tmp_path / "run"), "--profile", "epochs=1"]
    told = " ".join(CliRunner().invoke(app, [*words, "refit=true", "hold_out=0.2"]).stderr.split())
    assert "steps of the first of 2 stages take about" in told
    assert "s, twice with refit; one evaluation" in told

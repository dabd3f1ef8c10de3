"""The profile of a training: parts that add up, traffic counted by hand, the command's
table.
"""

from dataclasses import replace

import pytest
from PIL import Image
from typer.testing import CliRunner

import rfdlc
from rfdlc.cli import app
from rfdlc.cli.train import _waiting
from rfdlc.data.streamed import StreamedLoader
from rfdlc.training import profiling


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(profiling, "SECONDS", 0.0)
    monkeypatch.setattr(profiling, "COPIED", {"cpu": 2**20})


def test_traffic_of_an_mlp_is_what_its_layers_move(quick):
    data = rfdlc.load("digits-lt")
    found = profiling.profile(
        data, "ce", widths=(16,), particles=2, batch_size=32, head="linear", epochs=3
    )
    activations = 2 * 32 * (16 + 10)  # particles x batch x outputs of both maps
    weights = 2 * (
        (64 * 16 + 16) + (16 + 16) + (16 * 10 + 10)
    )  # maps with biases, layer norm
    assert found.traffic == 4 * (5 * activations + 7 * weights)
    assert list(found.parts) == ["data", "forward", "backward", "optimiser"]
    assert all(seconds >= 0 for seconds in found.parts.values())
    assert found.step == pytest.approx(sum(found.parts.values()))
    assert found.steps == 3 * -(
        -len(data.hold_out(0.2).train) // 32
    )  # as many as the training has
    assert 0 < found.floor == pytest.approx(found.traffic / found.bandwidth)


def test_the_floor_is_the_time_that_memory_needs():
    parts = {"data": 0.5, "forward": 1.0, "backward": 2.0, "optimiser": 0.5}
    found = profiling.Profile(
        parts,
        evaluation=1.0,
        steps=3,
        stages=1,
        trainings=1,
        traffic=8e9,
        bandwidth=4e9,
    )
    assert (found.step, found.floor) == (4.0, 2.0)


@pytest.mark.parametrize(
    ("data", "ahead", "step", "told"),
    [
        (
            8.0,
            True,
            8.0,
            (
                "waits for image files 50% of the time: decoding takes 8000.0 ms per"
                " step (workers=4), the"
            ),
        ),
        (
            3.0,
            True,
            4.0,
            "waits for image files 0% of the time: decoding takes 3000.0 ms",
        ),
        (1.0, False, 5.0, "waits for image files 20% of the time"),
    ],
)
def test_decoding_or_the_network_sets_the_pace(data, ahead, step, told):
    parts = {"data": data, "forward": 1.0, "backward": 2.5, "optimiser": 0.5}
    found = profiling.Profile(parts, 1.0, 3, 1, 1, 8e9, 4e9, workers=4, ahead=ahead)
    assert found.step == step
    assert told in _waiting(found)
    assert ("data.cache=DIR" in _waiting(found)) == (" 0% " not in told)
    assert _waiting(replace(found, workers=None)) == ""


def test_image_files_are_profiled_for_some_batches(quick, tmp_path, monkeypatch):
    for i in range(24):
        place = tmp_path / "set" / "ab"[i % 2] / f"{i}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (16, 16), 10 * i).save(place)
    monkeypatch.setattr("rfdlc.data.readers.image_files.FITS_IN_MEMORY", 0)
    read = []
    monkeypatch.setattr(StreamedLoader, "epoch", _counted(StreamedLoader.epoch, read))
    data = rfdlc.load(tmp_path / "set", test_fraction=0.5)
    settings = {
        "backbone": "mlp",
        "widths": (4,),
        "particles": 1,
        "batch_size": 2,
        "epochs": 1,
        "workers": 0,
    }
    found = profiling.profile(data, "ce", **settings)
    assert found.workers == 0
    assert not found.ahead
    assert found.parts["data"] > 0
    assert read == [1, 2]  # a batch to compute with, two to measure: not all six


def _counted(epoch, read):
    def counted(self, *args, **options):
        read.append(0)
        for batch in epoch(self, *args, **options):
            read[-1] += 1
            yield batch

    return counted


def test_the_command_prints_the_table_beside_the_result(quick, tmp_path):
    words = [
        "train",
        "digits-lt",
        "--out",
        str(tmp_path / "run"),
        "--profile",
        "--json",
        "epochs=1",
        "particles=1",
    ]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    for word in (
        "data",
        "forward",
        "backward",
        "optimiser",
        "6 steps take about",
        "% of its time. The rest",
    ):
        assert word in " ".join(result.stderr.split())
    assert "stages" not in result.stderr
    assert result.stdout.startswith("{")


def test_what_is_measured_of_several_stages_and_trainings_is_named(quick, tmp_path):
    words = [
        "train",
        "digits-lt",
        "--method",
        "crt",
        "--out",
        str(tmp_path / "run"),
        "--profile",
        "epochs=1",
    ]
    told = " ".join(
        CliRunner().invoke(app, [*words, "refit=true", "hold_out=0.2"]).stderr.split()
    )
    assert "steps of the first of 2 stages take about" in told
    assert "s, twice with refit; one evaluation" in told

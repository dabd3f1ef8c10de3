"""The run folder: whole at every moment, resumed bit for bit, forked, refitted, loaded
again.
"""

import csv
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import rfdlc
from rfdlc.cli import app
from rfdlc.errors import InputError
from rfdlc.formats.files import owned
from rfdlc.training import run as run_module
from rfdlc.training import trainer
from rfdlc.training.loop import TrainingStopped
from rfdlc.training.run import Run
from rfdlc.training.trainer import TrainingInterrupted

SMALL = {
    "epochs": 4,
    "widths": (16,),
    "checkpoint_every": 1,
    "calibration": "temperature",
}
FILES = {
    "config.json",
    "classes.json",
    "environment.json",
    "history.csv",
    "last.ckpt",
    "held-out.npz",
    "decider.json",
    "model.safetensors",
    "predictions.npz",
    "metrics.json",
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed run."""
    path = tmp_path_factory.mktemp("whole") / "run"
    rfdlc.train("digits-lt", out=path, keep=(0.5,), evaluate_every=2, **SMALL)
    return path


def test_weights_of_a_training_that_is_not_finished_are_called_so(whole, tmp_path):
    unfinished = tmp_path / "run"
    shutil.copytree(whole, unfinished)
    for name in ("model.safetensors", "decider.json", "predictions.npz"):
        (unfinished / name).unlink()
    with pytest.warns(
        UserWarning,
        match=(
            "not trained to the end: these are the weights after epoch 4, not"
            " calibrated"
        ),
    ):
        rfdlc.Model.load(unfinished)
    with pytest.raises(
        InputError, match=r"has no predictions.npz: .*not finished .then `rfdlc resume"
    ):
        rfdlc.Predictions.load(unfinished)


def weights(path):
    """Of a model, without the header, which says to which run they belong."""
    content = (path / "model.safetensors").read_bytes()
    return content[8 + int.from_bytes(content[:8], "little") :]


def history(path):
    with (path / "history.csv").open(newline="") as lines:
        return list(csv.DictReader(lines))


def interrupt_in(monkeypatch, epoch, act):
    """Do something in the middle of an epoch's bookkeeping."""
    original = trainer.Trainer._history_row

    def row(self, run, member, done):
        if done.epoch == epoch:
            act()
        return original(self, run, member, done)

    monkeypatch.setattr(trainer.Trainer, "_history_row", row)


def test_the_folder_has_everything(whole):
    assert {file.name for file in whole.iterdir()} >= FILES
    assert not [file for file in whole.iterdir() if file.name.startswith(".")]
    rows = history(whole)
    assert [row["epoch"] for row in rows] == ["1", "2", "3", "4"]
    assert rows[1]["disagreement"]
    assert rows[1]["mutual_information"]
    assert not rows[0]["held_out_accuracy"]
    config = json.loads((whole / "config.json").read_text())
    assert config["settings"]["widths"] == [16]
    assert config["data"]["source"] == "digits-lt"
    metrics = json.loads((whole / "metrics.json").read_text())
    assert set(metrics) == {
        "test",
        "test_tail_sensitive",
        "held_out_balanced",
        "diversity",
    }


def test_the_folder_rebuilds_its_model(whole):
    model = rfdlc.Model.load(whole)
    data = rfdlc.load("digits-lt")
    predictions = model.predict(data)
    saved = rfdlc.Predictions.load(whole / "predictions.npz")
    assert np.array_equal(predictions.scores.values, saved.scores.values)
    assert np.array_equal(saved.targets, data.test.labels)
    assert np.array_equal(
        model.predict(data.test.inputs).scores.values, saved.scores.values
    )
    assert model.predict(data.test.inputs).targets is None
    assert len(model.predict("digits-lt", split="train")) == len(data.train)
    assert model.decider.model.calibrator is not None
    utility = rfdlc.Utility.tail_sensitive(model.classes)
    assert np.array_equal(
        model.decide(data, utility),
        model.decider.replace(utility=utility).decide(saved),
    )
    with pytest.raises(InputError, match="expected \\(samples"):
        model.predict(np.zeros((3, 5)))
    with pytest.raises(
        InputError, match=r"expected .*uint8 images"
    ):  # from 0 to 1 they would be nearly black
        model.predict(data.test.inputs / 255)
    with pytest.raises(InputError, match="has no split 'val'"):
        model.predict(data, split="val")


def test_a_run_is_never_overwritten(whole):
    with pytest.raises(
        InputError, match="holds a run already: continue it with `rfdlc resume"
    ):
        rfdlc.train("digits-lt", out=whole, **SMALL)


def test_ctrl_c_stops_at_a_checkpoint_and_resume_is_identical(
    whole, tmp_path, monkeypatch
):
    interrupt_in(monkeypatch, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(
        TrainingInterrupted, match="after epoch 2 of 4; continue with `rfdlc resume"
    ):
        rfdlc.train(
            "digits-lt", out=tmp_path / "run", keep=(0.5,), evaluate_every=2, **SMALL
        )
    monkeypatch.undo()
    assert len(history(tmp_path / "run")) == 2
    rfdlc.Model.load(tmp_path / "run")  # what there is can be used
    rfdlc.resume(tmp_path / "run")
    assert weights(tmp_path / "run") == weights(whole)
    assert (tmp_path / "run" / "predictions.npz").read_bytes() == (
        whole / "predictions.npz"
    ).read_bytes()
    assert (tmp_path / "run" / "decider.json").read_bytes() == (
        whole / "decider.json"
    ).read_bytes()


def test_a_crash_between_checkpoints_costs_only_the_epochs_since(
    whole, tmp_path, monkeypatch
):
    def crash():
        raise MemoryError

    interrupt_in(monkeypatch, 4, crash)
    with pytest.raises(MemoryError):
        rfdlc.train(
            "digits-lt",
            out=tmp_path / "run",
            keep=(0.5,),
            **{**SMALL, "checkpoint_every": 2},
        )
    monkeypatch.undo()
    assert Run(tmp_path / "run").checkpoint().epoch == 2
    rfdlc.resume(tmp_path / "run")
    assert weights(tmp_path / "run") == weights(whole)


def test_kill_minus_nine_then_resume():
    script = Path(__file__).parents[2] / "benchmarks" / "resume.py"
    done = subprocess.run(
        [sys.executable, script, "--times", "3"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 runs identical" in done.stdout


def test_a_full_disk_is_said_and_the_checkpoint_is_whole(whole, tmp_path, monkeypatch):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    interrupt_in(
        monkeypatch,
        3,
        lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1])),
    )
    try:
        with pytest.raises(
            InputError,
            match=(
                r"last.ckpt cannot be written \(File too large\); last.ckpt is intact"
            ),
        ):
            rfdlc.train("digits-lt", out=tmp_path / "run", **SMALL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.undo()
    assert Run(tmp_path / "run").checkpoint().epoch == 2
    assert not [
        file for file in (tmp_path / "run").iterdir() if file.name.startswith(".")
    ]
    rfdlc.resume(tmp_path / "run")
    assert weights(tmp_path / "run") == weights(whole)


def test_an_unwritable_folder_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be made a run folder"):
        rfdlc.train("digits-lt", out=tmp_path / "file" / "run", **SMALL)


def test_a_loss_that_is_no_number_names_the_last_good_checkpoint(tmp_path, monkeypatch):
    real = trainer.epochs

    def poisoned(net, *rest):
        for epoch in real(net, *rest):
            yield epoch
            if epoch.epoch == 2:
                next(net.parameters()).data.fill_(float("nan"))

    monkeypatch.setattr(trainer, "epochs", poisoned)
    with pytest.raises(
        TrainingStopped, match=r"in epoch 3; .*last good checkpoint is epoch 2 in"
    ):
        rfdlc.train("digits-lt", out=tmp_path / "run", **SMALL)


def test_a_fork_shares_what_came_before(whole, tmp_path):
    same = rfdlc.fork(whole, tmp_path / "same", at=2)
    assert weights(same.path) == weights(whole)
    other = rfdlc.fork(
        whole,
        tmp_path / "other",
        at=2,
        utility="tail-sensitive",
        utility_form="bounded",
    )
    assert weights(other.path) != weights(whole)
    assert [row["loss"] for row in history(other.path)][:2] == [
        row["loss"] for row in history(whole)
    ][:2]
    longer = rfdlc.fork(whole, tmp_path / "longer", epochs=6)
    assert len(history(longer.path)) == 6
    with pytest.raises(InputError, match="no checkpoint at epoch 3: kept are 2"):
        rfdlc.fork(whole, tmp_path / "none", at=3)
    with pytest.raises(InputError, match="a fork cannot change particles"):
        rfdlc.fork(whole, tmp_path / "none", particles=5)
    with pytest.raises(
        InputError,
        match=r"epochs=1 is less than the epoch of the checkpoint of .*, which is 2",
    ):
        rfdlc.fork(whole, tmp_path / "none", at=2, epochs=1)
    assert not (tmp_path / "none").exists()


def test_refit_trains_on_everything_and_keeps_the_calibration(whole, tmp_path):
    model = rfdlc.train(
        "digits-lt",
        out=tmp_path / "run",
        refit=True,
        keep=(0.5,),
        evaluate_every=2,
        **SMALL,
    )
    assert [row["phase"] for row in history(model.path)] == ["0"] * 4 + ["1"] * 4
    own, other = (
        json.loads((path / "decider.json").read_text()) for path in (model.path, whole)
    )
    assert own["model"].pop("source") != other["model"].pop("source")
    assert own == other
    assert weights(model.path) != weights(whole)
    without = rfdlc.train(
        "digits-lt", out=tmp_path / "all", hold_out=0, keep=(0.5,), **SMALL
    )
    assert weights(without.path) == weights(model.path)
    assert without.decider.model.calibrator is None


def test_no_test_label_is_read_in_training(whole, tmp_path):
    data = rfdlc.load("digits-lt")
    data.test.labels[:] = 0
    model = rfdlc.train(
        data, out=tmp_path / "run", keep=(0.5,), evaluate_every=2, **SMALL
    )
    assert weights(model.path) == weights(whole)
    assert (model.path / "decider.json").read_bytes() == (
        whole / "decider.json"
    ).read_bytes()


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, 12),
            nn.BatchNorm1d(12),
            nn.ReLU(),
            nn.Dropout(0.2),
        )

    def forward(self, x):
        return self.body(x)


def test_a_network_of_ones_own(tmp_path, monkeypatch):
    whole = rfdlc.train(
        "digits-lt", out=tmp_path / "whole", backbone=Own, epochs=3, hold_out=0
    )
    interrupt_in(monkeypatch, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(TrainingInterrupted):
        rfdlc.train(
            "digits-lt", out=tmp_path / "run", backbone=Own, epochs=3, hold_out=0
        )
    monkeypatch.undo()
    rfdlc.resume(tmp_path / "run", backbone=Own)
    assert weights(tmp_path / "run") == weights(whole.path)
    with pytest.raises(InputError, match=r"backbone of its own.*pass backbone="):
        rfdlc.Model.load(whole.path)
    predictions = rfdlc.Model.load(whole.path, backbone=Own).predict("digits-lt")
    assert predictions.scores.values.shape[0] == 3


def test_resume_needs_the_same_data(tmp_path, monkeypatch):
    data = rfdlc.load("digits-lt")
    rfdlc.train(data, out=tmp_path / "run", epochs=1, widths=(8,))
    with pytest.raises(InputError, match="pass the same data again"):
        rfdlc.resume(tmp_path / "run")
    with pytest.raises(InputError, match="trained on other data"):
        rfdlc.resume(tmp_path / "run", rfdlc.load("digits-lt", factor=10))
    rfdlc.resume(tmp_path / "run", data)
    other = data.train.array.copy()
    other[1] += 1  # one sample of all
    changed = replace(data, train=replace(data.train, inputs=other))
    with pytest.raises(
        InputError,
        match=r"other contents \(\w+, now \w+\): pass the data that it was trained on",
    ):
        rfdlc.resume(tmp_path / "run", changed)


def flipped(path, place=-5):
    """One bit of the tensors, which safetensors does not notice."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_noticed_and_the_one_before_continued(
    whole, tmp_path, monkeypatch
):
    interrupt_in(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
    monkeypatch.setattr(trainer, "SECONDS_BETWEEN_CHECKPOINTS", 0)
    with pytest.raises(TrainingInterrupted):
        rfdlc.train(
            "digits-lt", out=tmp_path / "run", keep=(0.5,), evaluate_every=2, **SMALL
        )
    monkeypatch.undo()
    flipped(tmp_path / "run" / "last.ckpt")
    with pytest.warns(
        UserWarning,
        match=(
            r"last.ckpt is damaged: its checksum is wrong.*continuing from"
            r" previous.ckpt"
        ),
    ):
        rfdlc.resume(tmp_path / "run")
    assert weights(tmp_path / "run") == weights(whole)
    assert not (tmp_path / "run" / "previous.ckpt").exists()
    flipped(tmp_path / "run" / "model.safetensors")
    with pytest.raises(
        InputError, match=r"^\S*model.safetensors is damaged: its checksum is wrong"
    ):
        rfdlc.Model.load(tmp_path / "run")


OWNER = """
import sys, time
from rfdlc.training.run import Run
with Run(sys.argv[1]).claimed():
    print("owned", flush=True)
    time.sleep(60)
"""


def test_a_folder_has_one_writer(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "metrics.json").unlink()
    (tmp_path / "run" / ".last.ckpt.1.tmp").write_bytes(b"half")
    before = {file.name for file in (tmp_path / "run").iterdir()}
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "run")], stdout=subprocess.PIPE
    ) as owner:
        owner.stdout.readline()
        with pytest.raises(
            InputError,
            match=f"is being written by process {owner.pid} on .*: wait until it ends",
        ):
            rfdlc.resume(tmp_path / "run")
        owner.kill()
    rfdlc.resume(tmp_path / "run")  # locks end with their process
    assert {file.name for file in (tmp_path / "run").iterdir()} == before - {
        ".last.ckpt.1.tmp"
    } | {"metrics.json"}


def test_of_two_that_made_a_folder_at_once_one_trains(tmp_path):
    run = run_module.Run(tmp_path)
    run._made = {"settings": {"seed": 0}}
    (tmp_path / "config.json").write_text('{"settings": {"seed": 1}}')
    with (
        pytest.raises(InputError, match="was made by another process at the same time"),
        run.claimed(),
    ):
        pass
    assert not (tmp_path / ".lock").exists()


def test_image_files_are_the_same_data_in_another_folder_until_one_changes(tmp_path):
    for name in ("a", "b"):
        for i in range(4):
            (tmp_path / "photos" / name).mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng([i, ord(name)]).integers(
                0, 256, (12, 12, 3), dtype=np.uint8
            )
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{i}.png")
    shutil.copytree(tmp_path / "photos", tmp_path / "copy")

    def found(name):
        return run_module.fingerprint(rfdlc.load(tmp_path / name, test_fraction=0))

    first, second = found("photos"), found("copy")
    assert first == second
    Image.fromarray(np.zeros((12, 12, 3), np.uint8)).save(
        tmp_path / "copy" / "a" / "2.png"
    )
    third = found("copy")
    assert third["contents"] != first["contents"]
    assert (third["samples"], third["labels"]) == (first["samples"], first["labels"])


def test_folders_of_strangers(tmp_path, whole):
    with pytest.raises(
        InputError, match=r"is not a run folder: .*config.json cannot be read"
    ):
        rfdlc.Model.load(tmp_path)
    bad = tmp_path / "bad"
    bad.mkdir()
    for name in ("config.json", "classes.json", "decider.json"):
        (bad / name).write_bytes((whole / name).read_bytes())
    with pytest.raises(InputError, match="no trained weights yet"):
        rfdlc.Model.load(bad)
    torch.save(
        {"x": torch.zeros(1)}, bad / "model.safetensors"
    )  # a pickle: never opened as one
    with pytest.raises(InputError, match="not a file of weights"):
        rfdlc.Model.load(bad)
    (bad / "model.safetensors").unlink()
    (bad / "last.ckpt").write_bytes(b"\x80\x04")
    with pytest.raises(InputError, match="is not a checkpoint"):
        rfdlc.resume(bad)
    table = json.loads((whole / "config.json").read_text())
    table["settings"]["widths"] = [17]
    (bad / "config.json").write_text(json.dumps(table))
    shutil.copy(whole / "model.safetensors", bad)
    with pytest.raises(InputError, match="a run with other settings or data than"):
        rfdlc.Model.load(bad)
    for changed, message in (
        ({"method": None}, "config.json is damaged: 'method' is missing"),
        (
            {"data": {**table["data"], "input_shape": "x"}},
            "damaged where it describes the data",
        ),
        (
            {"data": {**table["data"], "input_shape": [1, 10**30, 8]}},
            "damaged where it describes the data",
        ),
        (
            {"data": {**table["data"], "input_shape": [1e308, 8, 8]}},
            "damaged where it describes the data",
        ),
        (
            {"settings": {**table["settings"], "image_size": 10**30}},
            "network of config.json cannot be made",
        ),
        (
            {"data": {**table["data"], "normalisation": {}}},
            "damaged where it describes the data .KeyError",
        ),
    ):
        (bad / "config.json").write_text(json.dumps({**table, **changed}))
        with pytest.raises(InputError, match=message):
            rfdlc.Model.load(bad)


def test_data_are_loaded_again_with_their_options(tmp_path):
    x, y = np.eye(2, dtype=np.float32).repeat(20, 0), np.arange(2).repeat(20)
    np.savez(tmp_path / "set.npz", x=x, y=y, ids=np.arange(40))
    (tmp_path / "groups.csv").write_text(
        "id,group\n" + "".join(f"{i},{i // 2}\n" for i in range(40))
    )
    small = {"epochs": 1, "widths": np.array([4])}
    rfdlc.train(
        (x, y),
        "ce",
        tmp_path / "memory",
        data_options={"test_fraction": np.float32(0.5)},
        **small,
    )
    rfdlc.resume(tmp_path / "memory", (x, y))
    grouped = {"groups": tmp_path / "groups.csv", "seed": np.int64(3)}
    rfdlc.train(
        tmp_path / "set.npz", "ce", tmp_path / "path", data_options=grouped, **small
    )
    rfdlc.resume(tmp_path / "path")
    with pytest.raises(InputError, match="a Dataset is loaded already"):
        rfdlc.train(
            rfdlc.load((x, y)), "ce", tmp_path / "late", data_options=grouped, **small
        )


def test_a_table_is_encoded_as_in_training(tmp_path):
    rng = np.random.default_rng(0)
    kind = rng.choice(["x", "y", "z"], 90, p=[0.6, 0.3, 0.1])
    colour = np.where(kind == "x", "red", np.where(kind == "y", "green", "blue"))
    lines = [f"{rng.normal():.3f},{c},{k}" for c, k in zip(colour, kind, strict=True)]
    (tmp_path / "t.csv").write_text("\n".join(["size,colour,target", *lines]))
    model = rfdlc.train(
        tmp_path / "t.csv",
        out=tmp_path / "run",
        backbone="mlp",
        epochs=15,
        widths=(8,),
        learning_rate=0.05,
    )
    new = {"size": ["0.1", ""], "colour": ["blue", "red"]}
    names = [model.classes.names[i] for i in model.decide(new)]
    assert names == ["z", "x"]
    (tmp_path / "new.csv").write_text("colour,size\nblue,0.1\nred,\n")
    again = rfdlc.Model.load(tmp_path / "run").predict(tmp_path / "new.csv")
    assert np.array_equal(again.scores.values, model.predict(new).scores.values)
    assert len(model.predict(tmp_path / "t.csv")) == 90
    assert len(model.predict(rfdlc.load(tmp_path / "t.csv"), split="train")) == 72
    (tmp_path / "others.csv").write_text(
        "size,colour,target\n1,red,x\n2,white,y\n3,pink,z\n"
    )  # as many features
    for wrong, message in (
        (
            rfdlc.load(tmp_path / "others.csv", test_fraction=0),
            "others was encoded by its own training rows",
        ),
        (
            {"size": [1, 2], "colour": ["red"]},
            "columns differ in length: size has 2, colour has 1",
        ),
        ({"size": 1, "colour": "red"}, "column 'size' is 1: expected a list of cells"),
    ):
        with pytest.raises(InputError, match=message):
            model.predict(wrong)
    rfdlc.resume(tmp_path / "run")


def test_image_files_are_streamed(tmp_path, monkeypatch):
    from PIL import Image

    rng = np.random.default_rng(0)
    for name, level, count in (("dark", 40, 12), ("light", 200, 6)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(count):
            pixels = (level + rng.integers(-30, 30, (20, 20, 3))).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{i}.png")
    monkeypatch.setattr("rfdlc.data.readers.image_files.FITS_IN_MEMORY", 0)
    given = {
        "backbone": "resnet8",
        "epochs": 3,
        "batch_size": 8,
        "workers": 0,
        "hold_out": 0.2,
        "data_options": {"image_size": 16},
    }
    whole = rfdlc.train(tmp_path / "photos", out=tmp_path / "whole", **given)
    interrupt_in(monkeypatch, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(TrainingInterrupted):
        rfdlc.train(tmp_path / "photos", out=tmp_path / "run", **given)
    interrupt_in(monkeypatch, 99, lambda: None)
    rfdlc.resume(tmp_path / "run")
    assert weights(tmp_path / "run") == weights(whole.path)
    assert len(rfdlc.Predictions.load(tmp_path / "run" / "predictions.npz")) > 0


def test_options_of_the_data_are_kept(tmp_path):
    rfdlc.train(
        "digits-lt",
        out=tmp_path / "run",
        data_options={"factor": 10},
        epochs=1,
        widths=(8,),
    )
    assert (
        rfdlc.resume(tmp_path / "run").classes.counts
        == rfdlc.load("digits-lt", factor=10).classes.counts
    )


def test_refit_where_validation_data_are_given(tmp_path):
    data = rfdlc.load("digits-lt").hold_out(0.2)
    with pytest.raises(InputError, match="has a validation split of its own"):
        rfdlc.train(data, out=tmp_path / "run", refit=True)
    with pytest.raises(InputError, match="refit needs held-out samples"):
        rfdlc.train("digits-lt", out=tmp_path / "run", refit=True, hold_out=0)


@pytest.mark.parametrize(("pause", "written"), [(10.0, [4]), (0.0, [1, 2, 3, 4])])
def test_checkpoints_come_when_time_has_passed(tmp_path, monkeypatch, pause, written):
    monkeypatch.setattr(trainer, "SECONDS_BETWEEN_CHECKPOINTS", pause)
    saved = []
    real = Run.save_checkpoint

    def save(self, checkpoint, *rest):
        saved.append(checkpoint.epoch)
        real(self, checkpoint, *rest)

    monkeypatch.setattr(Run, "save_checkpoint", save)
    rfdlc.train("digits-lt", out=tmp_path / "run", **{**SMALL, "checkpoint_every": 0})
    assert saved == written


def test_a_folder_of_runs_is_not_a_run_folder(tmp_path):
    """Of `runs/`, of a cross-validation or of a sweep, which has a table: its runs are
    named instead.
    """
    for name in ("a", "folds/fold-0", "folds/fold-1", "folds/fold-2"):
        (tmp_path / name).mkdir(parents=True)
        for file in ("config.json", "classes.json"):
            (tmp_path / name / file).write_text("{}")
    (tmp_path / "table.csv").write_text("run,accuracy\na,0.9\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")  # not of a run
    first = ", ".join(
        str(tmp_path / name) for name in ("a", "folds/fold-0", "folds/fold-1")
    )
    several = (
        f"{tmp_path} is not a run folder: it holds 4 runs ({first}, ...); give one of"
        " them"
    )
    out = ["--out", tmp_path / "p.csv"]
    commands = [
        ["evaluate", tmp_path],
        ["report", tmp_path],
        ["compare", tmp_path, tmp_path],
        ["resume", tmp_path],
    ]
    commands += [
        ["predict", tmp_path, "digits-lt", *words, *out]
        for words in ([], ["--utility", "one-hot"])
    ]
    for words in commands:
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert (type(result.exception), str(result.exception)) == (
            rfdlc.InputError,
            several,
        )
    with pytest.raises(
        rfdlc.InputError,
        match=r"folds is not a run folder: it holds 3 runs .*fold-1, \S*fold-2\); give",
    ):
        rfdlc.Model.load(tmp_path / "folds")
    with pytest.raises(rfdlc.InputError, match=r"other: has no predictions.npz"):
        rfdlc.Predictions.load(tmp_path / "other")


def test_the_name_of_a_killed_owner_is_replaced(tmp_path):
    (tmp_path / ".lock").write_text("process 1 on " + "a" * 100)
    with owned(tmp_path / ".lock") as other:
        assert not other
        assert (
            tmp_path / ".lock"
        ).read_text() == f"process {os.getpid()} on {platform.node()}"

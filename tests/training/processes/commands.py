"""`torchrun`: a worker that dies is replaced and nothing is lost; lists of JPEGs from
training to report.
"""

import csv
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.distributed import TCPStore
from torch.distributed.run import main as torchrun
from typer.testing import CliRunner

import rfdlc
from rfdlc.cli import app
from rfdlc.data.readers import image_files
from rfdlc.training import distributed
from rfdlc.training.run import Run
from rfdlc.training.trainer import Trainer


def epochs_of(path):
    if not (path / "history.csv").exists():
        return []
    with (path / "history.csv").open(newline="") as lines:
        return [int(row["epoch"]) for row in csv.DictReader(lines)]


WORKER = """
from rfdlc.cli import main

try:
    main()
except SystemExit as ended:  # its agent waits for a worker that returns
    if ended.code:
        raise
"""


def forked_torchrun(folder, *command):
    """The id of a process that is torchrun with two workers: forked, as they are."""
    script = folder / "worker.py"
    script.write_text(WORKER)
    if child := os.fork():
        return child
    for number, name in ((1, "stdout"), (2, "stderr")):
        opened = (folder / name).open("w", buffering=1)
        os.dup2(opened.fileno(), number)
        setattr(sys, name, opened)
    options = [
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
        "--start-method",
        "fork",
        "--run-path",
    ]
    try:
        torchrun([*options, str(script), *command])
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def test_a_killed_worker_costs_nothing_but_time(tmp_path):
    out = tmp_path / "run"
    command = [
        "train",
        "digits-lt",
        "-o",
        str(out),
        "-m",
        "cb",
        "epochs=40",
        "widths=16",
        "calibration=temperature",
    ]
    running = forked_torchrun(
        tmp_path, *command, "checkpoint_every=1", "parallel=ddp", "--json"
    )
    ended = None
    try:
        while len(epochs_of(out)) < 3:
            assert os.waitpid(running, os.WNOHANG) == (0, 0), (
                tmp_path / "stderr"
            ).read_text()
            time.sleep(0.01)
        workers = Path(f"/proc/{running}/task/{running}/children").read_text().split()
        assert len(workers) == 2
        os.kill(int(workers[1]), signal.SIGKILL)
        assert len(epochs_of(out)) < 40  # in the middle of it
        ended = os.waitpid(running, 0)[1]
    finally:
        if ended is None:
            os.kill(running, signal.SIGTERM)  # its workers too
    assert ended == 0, (tmp_path / "stderr").read_text()
    assert epochs_of(out) == list(range(1, 41))
    assert json.loads((tmp_path / "stdout").read_text())["run"] == str(
        out
    )  # once, by the first process
    whole = rfdlc.train(
        "digits-lt",
        "cb",
        tmp_path / "whole",
        epochs=40,
        widths=(16,),
        calibration="temperature",
    )
    for name, tensor in rfdlc.Model.load(out).net.state_dict().items():
        assert torch.allclose(tensor, whole.net.state_dict()[name], atol=1e-4)


STARTER = (
    "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); time.sleep(100)"
)


def test_a_worker_ends_soon_after_its_agent(tmp_path):
    """At the rendezvous, where it waits for another worker that never comes."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "x",
    }
    rank |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    command = [
        sys.executable,
        "-m",
        "rfdlc",
        "train",
        "digits-lt",
        "-o",
        str(tmp_path / "run"),
        "epochs=1",
    ]
    agent = subprocess.Popen(
        [sys.executable, "-c", STARTER, *command],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **rank},
    )
    until = time.monotonic() + 60
    while not store.check(["caller/1"]) and time.monotonic() < until:
        time.sleep(0.1)
    agent.kill()
    told = agent.communicate(timeout=20)[1]  # until the worker has ended, too
    assert (
        told
        == "rfdlc: process 1 ends, because torchrun has ended: start the same command"
        " again to continue the run\n"
    )


def test_a_process_that_stops_is_one_line_for_the_others(two_processes, monkeypatch):
    monkeypatch.setattr(distributed, "TIMEOUT", timedelta(seconds=3))

    def work():
        with distributed.process_group() as group:
            if group.main:
                group.barrier()
            else:
                time.sleep(6)
                os._exit(0)

    told = two_processes(work, results=(0,))[0]
    assert told.startswith("the other processes no longer answer (")
    assert told.endswith("start the same command again to continue the run")
    assert "\n" not in told


QUICK = {"epochs": 1, "widths": (8,), "calibration": "temperature"}


def test_a_command_started_again_goes_on_only_under_torchrun(tmp_path, monkeypatch):
    first = rfdlc.train("digits-lt", "ce", tmp_path, **QUICK)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    again = rfdlc.train("digits-lt", "ce", tmp_path, **QUICK)
    assert torch.equal(first.net.head.weight, again.net.head.weight)
    for other in ({"epochs": 2}, {"seed": 1}):
        with pytest.raises(rfdlc.InputError, match="holds another run"):
            rfdlc.train("digits-lt", "ce", tmp_path, **{**QUICK, **other})


# -- lists of images
# --------------------------------------------------------------------------------------


@pytest.fixture
def lists(tmp_path, monkeypatch):
    """A folder as ImageNet-LT comes: JPEGs of any size and three lists; decoded while
    training, as they do not fit.
    """
    monkeypatch.setattr(image_files, "FITS_IN_MEMORY", 0)
    rng = np.random.default_rng(0)
    for part, counts in {
        "train": (20, 9, 5),
        "val": (4, 4, 4),
        "test": (5, 5, 5),
    }.items():
        lines = []
        for label, count in enumerate(counts):
            for i in range(count):
                name = f"{part}/n{label}/{i}.jpg"
                pixels = rng.integers(0, 90, (24 + i, 30, 3), dtype=np.uint8)
                pixels[..., label] += 150
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(tmp_path / name)
                lines.append(f"{name} {label}\n")
        (tmp_path / f"ImageNet_LT_{part}.txt").write_text("".join(lines))
    return tmp_path


def run(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception:
        raise result.exception
    return result.stdout


NETWORK = [
    "backbone=resnet8",
    "shared_stages=2",
    "particles=2",
    "epochs=3",
    "batch_size=8",
    "learning_rate=0.02",
]
# Rates rise slowly: at full rates, how sums are rounded grows to more than the
# tolerance within three epochs.
WORDS = [
    *NETWORK,
    "mixup=0",
    "batch_norm=sync",
    "accumulate=1",
    "workers=0",
    "data.image_size=16",
    "warmup=5",
]


@pytest.mark.filterwarnings(
    "ignore"
)  # the lists are shorter than the published ones; few samples calibrate
def test_lists_of_images_from_training_to_report(lists, monkeypatch, two_processes):
    def interrupted(self, run, member, epoch, original=Trainer._history_row):
        if epoch.epoch == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, run, member, epoch)

    one, two = lists / "one", lists / "two"
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_history_row", interrupted)
        with pytest.raises(SystemExit):
            run("train", "imagenet-lt", "--root", lists, "--out", one, *WORDS)
    assert epochs_of(one) == [1, 2]
    assert json.loads(run("resume", one, "--json"))["test"]["accuracy"] > 0.5
    settings = Run(one).metadata["settings"]
    assert (settings["repulsion_tau"], settings["compile"]) == (
        20,
        True,
    )  # the preset of ImageNet-LT
    told = two_processes(
        lambda: run(
            "train", "imagenet-lt", "--root", lists, "--out", two, *WORDS, "--json"
        )
    )
    assert json.loads(told[0])["run"] == str(two)
    assert told[1] == ""
    assert epochs_of(one) == epochs_of(two) == [1, 2, 3]
    weights = [rfdlc.Model.load(path).net.state_dict() for path in (one, two)]
    for name, tensor in weights[0].items():
        assert torch.allclose(tensor, weights[1][name], atol=1e-5), name
    saved = rfdlc.Predictions.load(two / "predictions.npz")
    assert np.array_equal(
        saved.scores.values,
        rfdlc.Model.load(two).predict("imagenet-lt", root=lists).scores.values,
    )
    for path in (one, two):
        assert "mean_utility" in run(
            "evaluate", path, "--utility", "tail-sensitive", "--json"
        )
        run("report", path, "-o", path / "report.html", "--bootstrap", 0)
        assert (path / "report.html").stat().st_size > 10_000

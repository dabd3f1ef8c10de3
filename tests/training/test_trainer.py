"""The calls from the command to the loss, what a call leaves behind in torch, old run
folders, imported backbones.
"""

import json
import traceback
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import rfdlc
from rfdlc import imports
from rfdlc.cli import app
from rfdlc.cli.train import train as train_command
from rfdlc.data.dataset import Dataset, Split
from rfdlc.errors import InputError
from rfdlc.probabilities.model import ProbabilityModel
from rfdlc.progress import shown
from rfdlc.training import trainer
from rfdlc.training.methods import METHODS, Method

SOURCE = str(Path(rfdlc.__file__).parent)
SMALL = {"epochs": 1, "widths": (8,), "calibration": "temperature"}


class Watching(nn.Module):
    """Cross-entropy that notes the functions of ours by which it was called, the
    command first.
    """

    def __init__(self, calls):
        super().__init__()
        self.calls = [calls]

    def forward(self, logits, target, epoch):
        ours = [
            frame
            for frame in traceback.extract_stack()
            if frame.filename.startswith(SOURCE)
        ]
        command = next(
            i for i, frame in enumerate(ours) if frame.filename.endswith("cli/train.py")
        )
        self.calls[0][:] = [
            f"{Path(frame.filename).stem}.{frame.name}" for frame in ours[command + 1 :]
        ]
        return -logits.log_softmax(-1)[:, torch.arange(len(target)), target]


@pytest.mark.parametrize("kind", ["module", "function"])
def test_eight_calls_from_the_command_to_the_loss(tmp_path, monkeypatch, capsys, kind):
    calls = []
    loss = Watching(calls)
    row = Method(
        "watched",
        "here",
        loss=lambda *given: loss if kind == "module" else loss.forward,
    )
    monkeypatch.setitem(METHODS, "watched", row)
    settings = ["epochs=1", "widths=8", "batch_size=512", "calibration=temperature"]
    train_command(
        source="digits-lt", settings=settings, out=tmp_path / "run", method="watched"
    )
    assert calls[0] == "train.train"
    assert len(calls) + 1 <= 8, calls  # with the call of the loss itself


def state_of_torch():
    return (
        torch.get_rng_state(),
        torch.get_num_threads(),
        torch.backends.cudnn.benchmark,
    )


def assert_untouched(before):
    after = state_of_torch()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


class Own(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.2))


def test_global_state_of_torch_is_the_callers(tmp_path, monkeypatch):
    threads = torch.get_num_threads()
    torch.manual_seed(7)
    torch.set_num_threads(2)
    before = state_of_torch()
    try:
        rfdlc.train("digits-lt", "crt", tmp_path / "a", keep=(1.0,), **SMALL)
        assert_untouched(before)
        rfdlc.resume(tmp_path / "a")
        rfdlc.fork(tmp_path / "a", tmp_path / "b", at=1)
        assert_untouched(before)
        rfdlc.train_many(
            "digits-lt",
            [
                rfdlc.RunSpec(tmp_path / f"{i}", "ce", {**SMALL, "seed": i})
                for i in (0, 1)
            ],
        )
        assert_untouched(before)
        rfdlc.train(
            "digits-lt",
            "ce",
            tmp_path / "own",
            backbone=Own,
            epochs=1,
            calibration="temperature",
        )
        rfdlc.Model.load(tmp_path / "own", backbone=Own).predict("digits-lt")
        assert_untouched(before)
        with pytest.raises(InputError):
            rfdlc.train("digits-lt", "ce", tmp_path / "a")
        assert_untouched(before)
    finally:
        torch.set_num_threads(threads)


def test_the_network_is_built_once(tmp_path, monkeypatch):
    made = []

    def make():
        made.append(True)
        return Own()

    rfdlc.train("digits-lt", "ce", tmp_path / "run", backbone=make, epochs=1)
    assert (
        len(made) == 3
    )  # to see the shape of its features, as a template, and for the weights
    made.clear()
    rfdlc.Model.load(tmp_path / "run", backbone=make)
    assert len(made) == 1  # its weights are replaced


def test_the_plan_is_announced_and_every_step_counts(tmp_path, monkeypatch, capsys):
    moved = []

    @contextmanager
    def live(total, description):
        yield lambda steps, text: moved.append((steps, text))
        assert sum(steps for steps, _ in moved) == total

    monkeypatch.setattr(trainer, "live", live)
    with shown():
        rfdlc.train(
            "digits-lt",
            "crt",
            tmp_path / "run",
            particles=2,
            target_prior="train",
            head_epochs=1,
            **SMALL,
        )
    plan = dict(line.split(maxsplit=1) for line in capsys.readouterr().err.splitlines())
    assert plan["data"] == "digits-lt, 349 train, 86 val, 450 test samples, 10 classes"
    assert plan["network"].startswith("mlp, particles: 2, weights: ")
    assert plan["training"] == "crt, 2 epochs of 6 steps"
    assert plan["device"].startswith("cpu" if not torch.cuda.is_available() else "cuda")
    assert plan["decisions"] == "for the class prior of the training data"
    assert [text.split("  ")[0] for _, text in moved if text] == [
        "epoch 1 of 2",
        "epoch 2 of 2",
    ]


def test_a_wrong_target_prior_is_refused_before_there_is_a_folder(tmp_path):
    with pytest.raises(InputError, match="target_prior 'foo' is unknown"):
        rfdlc.train("digits-lt", out=tmp_path / "run", target_prior="foo")
    assert not (tmp_path / "run").exists()


def test_a_run_folder_of_another_format_version_is_refused(tmp_path):
    path = rfdlc.train("digits-lt", "ce", tmp_path / "run", epochs=1, widths=(4,)).path
    table = json.loads((path / "config.json").read_text())
    other = {**table, "version": 2, "rfdlc": "0.0.9"}
    (path / "config.json").write_text(json.dumps(other))
    message = (
        r"config.json has format version 2, written by rfdlc 0.0.9: this rfdlc reads"
        r" version 3; write it again with this rfdlc"
    )
    with pytest.raises(InputError, match=message):
        rfdlc.Model.load(path)


# -- backbones that are imported
# --------------------------------------------------------------------------------------


def test_a_backbone_by_its_import_path_is_found_again(tmp_path, monkeypatch):
    (tmp_path / "my_networks.py").write_text(
        "from torch import nn\n\n\ndef small():\n    return nn.Sequential(nn.Flatten(),"
        " nn.Linear(64, 8), nn.ReLU())\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    model = rfdlc.train(
        "digits-lt", "ce", tmp_path / "run", backbone="my_networks:small", **SMALL
    )
    again = rfdlc.Model.load(tmp_path / "run")
    assert np.array_equal(
        again.predict("digits-lt").scores.values,
        model.predict("digits-lt").scores.values,
    )
    rfdlc.resume(tmp_path / "run")
    (many,) = rfdlc.train_many(
        "digits-lt",
        [
            rfdlc.RunSpec(
                tmp_path / "m", "ce", {"backbone": "my_networks:small", **SMALL}
            )
        ],
    )
    assert many.config.backbone == "my_networks:small"
    for wrong in ("my_networks:large", "no_such_module:small"):
        with pytest.raises(InputError, match=f"backbone='{wrong}' cannot be imported"):
            rfdlc.train("digits-lt", "ce", tmp_path / "wrong", backbone=wrong)


def test_code_that_only_a_folder_names_is_not_imported(tmp_path, monkeypatch):
    """A function without arguments would be called: `os:abort` ends the process."""
    rfdlc.train("digits-lt", "ce", tmp_path / "run", **SMALL)
    file, made = tmp_path / "run/config.json", tmp_path / "imported"
    table = json.loads(file.read_text())
    (tmp_path / "their_networks.py").write_text(
        f"open({str(made)!r}, 'w')\nfrom torch import nn\nsmall = nn.Flatten\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("os:abort", "their_networks:small"):
        file.write_text(
            json.dumps(table | {"settings": table["settings"] | {"backbone": name}})
        )
        module = name.partition(":")[0]
        with pytest.raises(
            InputError,
            match=(
                f"'{name}' is code, .* if you trust it: `rfdlc --import {module} ...`"
            ),
        ):
            rfdlc.Model.load(tmp_path / "run")
        told = (
            CliRunner()
            .invoke(app, ["predict", str(tmp_path / "run"), "digits-lt"])
            .exception
        )
        assert isinstance(told, InputError)
    assert not made.exists()
    for kind, words in (
        ("IMPORTED", ["their_networks"]),
        ("TRUSTED", {"their_networks:small"}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(imports, kind, words)
            passed = imports.known_here()
            with pytest.raises(
                InputError, match="the backbone Flatten has no parameters"
            ):  # it was imported
                rfdlc.Model.load(tmp_path / "run")
        assert {*words} <= {*passed}  # what workers get
    assert made.exists()
    monkeypatch.setattr(imports, "TRUSTED", set())
    imports.import_own(["their_networks:small", "timm:resnet50"])
    imports.trust(None)
    assert {"their_networks:small", "timm:resnet50"} == imports.TRUSTED


@pytest.mark.parametrize(
    ("epochs", "direction", "told"), [(10, 1, True), (10, -1, False), (9, 1, False)]
)
def test_a_loss_that_rose_is_told(tmp_path, monkeypatch, epochs, direction, told):
    def moved(self, run, member, epoch, _row=trainer.Trainer._history_row):
        return _row(self, run, member, epoch) | {"loss": 20.0 + direction * epoch.epoch}

    monkeypatch.setattr(trainer.Trainer, "_history_row", moved)
    rng = np.random.default_rng(0)
    data = rng.normal(size=(60, 3)).astype(np.float32), np.repeat([0, 1], 30)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        rfdlc.train(
            data, "ce", tmp_path / "run", backbone="mlp", widths=(4,), epochs=epochs
        )
    rose = (
        "rose from 21 in the first epoch to 30 in the last: likely the learning rate is"
        " too high"
    )
    assert any(rose in str(one.message) for one in found) == told


@pytest.mark.usefixtures("quick_tables")
@pytest.mark.parametrize(
    "how", [{}, {"refit": True, "calibration_folds": 3}, {"backbone": "trees"}]
)
@pytest.mark.parametrize("grouped", [True, False])
def test_calibration_knows_which_held_out_samples_belong_together(
    tmp_path, monkeypatch, how, grouped
):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(240, 4)).astype(np.float32), rng.integers(0, 2, 240)
    x[120:] = x[:120]  # copies: without groups, these belong together
    y[120:] = y[:120]
    who = np.arange(240) % 20 if grouped else np.arange(240) % 120
    train = Split(
        x + y[:, None], y, [str(i) for i in range(240)], who if grouped else None
    )
    fitted, fit, parts = [], ProbabilityModel.fit, []

    def watched(self, predictions, *given, groups=None, **options):
        if isinstance(predictions, rfdlc.Predictions):
            fitted.append((predictions.ids, predictions.groups))
        else:  # the other folds, for metrics
            parts.append(groups)
        return fit(self, predictions, *given, groups=groups, **options)

    monkeypatch.setattr(ProbabilityModel, "fit", watched)
    data = Dataset.of("sites", ["a", "b"], {"train": train})
    rfdlc.train(
        data,
        "rf-dlc",
        tmp_path / "run",
        **{"epochs": 1, "backbone": "mlp", "widths": (4,), **how},
    )
    for ids, groups in fitted:
        same = who[ids.astype(int)]
        np.testing.assert_array_equal(groups[:, None] == groups, same[:, None] == same)
    assert len(fitted[-1][0]) == 240 or not how
    held = rfdlc.Predictions.load(tmp_path / "run/held-out.npz")
    np.testing.assert_array_equal(held.groups, fitted[-1][1])
    sizes = np.bincount(held.groups)
    seen = np.array(
        [np.bincount(own, minlength=len(sizes)) for own in parts]
    )  # (folds, groups)
    assert len(parts) == min(5, len(sizes))
    assert ((seen == 0).sum(axis=0) == 1).all()
    assert ((seen == 0) | (seen == sizes)).all()


@pytest.mark.parametrize("grouped", [True, False])
def test_a_held_out_split_far_from_what_was_asked_is_announced(
    tmp_path, capsys, grouped
):
    x, y = (
        np.random.default_rng(0).normal(size=(90, 4)).astype(np.float32),
        np.arange(90) % 2,
    )
    train = Split(x, y, groups=np.arange(90) // 30 if grouped else None)
    with shown():
        data = Dataset.of("sites", ["a", "b"], {"train": train})
        rfdlc.train(
            data, "rf-dlc", tmp_path / "run", backbone="mlp", hold_out=0.1, **SMALL
        )
    told = (
        "held-out   33% of the samples are held out instead of 10%: groups stay whole"
    )
    assert (told in capsys.readouterr().err) == grouped

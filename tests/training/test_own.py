"""Losses, methods and backbones of a user's own: what cannot work is refused, in words that name the fix."""

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import rfdlc
from rfdlc.cli import app
from rfdlc.errors import InputError
from rfdlc.training.losses import GlobalBatch, RunLosses
from rfdlc.training.methods import METHODS, Method

M, B, C = 2, 6, 4
SMALL = {"epochs": 1, "widths": (8,), "batch_size": 128, "calibration": "temperature"}
SHAPED = {
    "(2, 6, 4)": lambda z, y, epoch: z,
    "(4,)": lambda z, y, epoch: z.mean((0, 1)),
    "(6, 4)": lambda z, y, epoch: z.mean(0),
    "()": lambda z, y, epoch: z.mean(),
    "(2,)": lambda z, y, epoch: (z.mean(-1), z.mean((1, 2))),
}


class Buffered(nn.Module):
    """The loss of a function, with a number for every run of its own: such runs are computed by one mapped call."""

    def __init__(self, loss, number):
        super().__init__()
        self.loss = loss
        self.register_buffer("number", torch.tensor(number))

    def forward(self, *given):
        return self.loss(*given)


@pytest.mark.parametrize("shape", SHAPED)
@pytest.mark.parametrize("runs", [1, 2])
@pytest.mark.parametrize("micro_batch", [False, True])
def test_a_loss_of_a_wrong_shape_is_refused(shape, runs, micro_batch):
    losses = RunLosses([Buffered(SHAPED[shape], float(run)) for run in range(runs)])
    batch = GlobalBatch(torch.tensor(B), [[torch.tensor(B)]], 1) if micro_batch else None
    text = rf"returned the shape {shape} for 2 particles, 6 samples and 4 classes: expected .*, (2, 6) or (6,); it"
    with pytest.raises(InputError, match=text.replace("(", r"\(").replace(")", r"\)")):
        losses(torch.zeros(runs, M, B, C), torch.zeros(runs, B, dtype=torch.int64), torch.zeros(()), batch)


def test_losses_of_documented_shapes_are_taken():
    z, y = torch.randn(1, M, B, C), torch.zeros(1, B, dtype=torch.int64)
    for result in (
        z[0].mean(-1),
        z[0].mean((0, 2)),
        (z[0].mean(-1), torch.ones(B)),
        [z[0].mean(-1), z[0].mean((0, 2))],
    ):
        assert RunLosses([lambda *given, result=result: result])(z, y, torch.zeros(())).shape == (1,)


def test_training_with_a_loss_of_a_wrong_shape_stops_at_once(tmp_path, monkeypatch):
    wrong = Method("wrong", "here", {"head": "linear"}, loss=lambda *given: lambda z, y, epoch: -z.log_softmax(-1))
    monkeypatch.setitem(METHODS, "wrong", wrong)
    for number, accumulate in enumerate((1, 2)):
        with pytest.raises(InputError, match="the loss returned the shape"):
            rfdlc.train("digits-lt", "wrong", tmp_path / str(number), accumulate=accumulate, **SMALL)


def test_a_run_of_a_method_that_is_not_registered(tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "mine", Method("mine", "here", {"head": "linear"}))
    rfdlc.train("digits-lt", "mine", tmp_path / "run", **SMALL)
    monkeypatch.undo()
    fix = "one of your own must be registered first: `rfdlc --import MODULE ...`; in Python, "
    fix += "register it in rfdlc.methods.METHODS, then call"
    for call in (rfdlc.Model.load, rfdlc.resume):
        with pytest.raises(InputError, match=rf"its method 'mine' .*{fix} rfdlc.resume"):
            call(tmp_path / "run")
    result = CliRunner().invoke(app, ["resume", str(tmp_path / "run")])
    assert fix in str(result.exception)


def test_what_python_may_do_where_the_command_has_force(tmp_path):
    rfdlc.train("digits-lt", "ce", tmp_path / "run", **SMALL)
    with pytest.raises(InputError, match=r"\(in Python rfdlc.resume\), .*\(--force; in Python, remove it first\)"):
        rfdlc.train("digits-lt", "ce", tmp_path / "run", **SMALL)


def test_a_backbone_that_cannot_take_the_samples_is_named(tmp_path):
    def narrow():
        return nn.Sequential(nn.Flatten(), nn.Linear(10, 4))

    told = (
        r"the backbone narrow cannot take a batch of shape \(2, 1, 8, 8\).*mat1 and mat2.*samples of shape \(1, 8, 8\)"
    )
    with pytest.raises(InputError, match=told):
        rfdlc.train("digits-lt", "ce", tmp_path / "run", backbone=narrow, epochs=1)

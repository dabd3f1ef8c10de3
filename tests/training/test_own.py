"""Losses, methods and backbones of a user's own: what cannot work is refused, in words
that name the fix.
"""

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import rfdlc
from rfdlc.cli import app
from rfdlc.errors import InputError
from rfdlc.training.building import new_decider
from rfdlc.training.factories import routed
from rfdlc.training.loop import TrainingStopped
from rfdlc.training.losses import GlobalBatch, RunLosses, mean_loss
from rfdlc.training.methods import METHODS, Method, Option, Stage, resolve

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
    """The loss of a function, with a number for every run of its own: such runs are
    computed by one mapped call.
    """

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
    batch = (
        GlobalBatch(torch.tensor(B), [[torch.tensor(B)]], 1) if micro_batch else None
    )
    text = (
        rf"returned the shape {shape} for 2 particles, 6 samples and 4 classes:"
        r" expected .*, (2, 6) or (6,); it"
    )
    with pytest.raises(InputError, match=text.replace("(", r"\(").replace(")", r"\)")):
        losses(
            torch.zeros(runs, M, B, C),
            torch.zeros(runs, B, dtype=torch.int64),
            torch.zeros(()),
            batch,
        )


def test_losses_of_documented_shapes_are_taken():
    z, y = torch.randn(1, M, B, C), torch.zeros(1, B, dtype=torch.int64)
    for result in (
        z[0].mean(-1),
        z[0].mean((0, 2)),
        (z[0].mean(-1), torch.ones(B)),
        [z[0].mean(-1), z[0].mean((0, 2))],
    ):
        assert RunLosses([lambda *given, result=result: result])(
            z, y, torch.zeros(())
        ).shape == (1,)


def test_training_with_a_loss_of_a_wrong_shape_stops_at_once(tmp_path, monkeypatch):
    wrong = Method(
        "wrong",
        "here",
        {"head": "linear"},
        loss=lambda *given: lambda z, y, epoch: -z.log_softmax(-1),
    )
    monkeypatch.setitem(METHODS, "wrong", wrong)
    for number, accumulate in enumerate((1, 2)):
        with pytest.raises(InputError, match="the loss returned the shape"):
            rfdlc.train(
                "digits-lt",
                "wrong",
                tmp_path / str(number),
                accumulate=accumulate,
                **SMALL,
            )


def test_a_run_of_a_method_that_is_not_registered(tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "mine", Method("mine", "here", {"head": "linear"}))
    rfdlc.train("digits-lt", "mine", tmp_path / "run", **SMALL)
    monkeypatch.undo()
    fix = (
        "one of your own must be registered first: `rfdlc --import MODULE ...`; in"
        " Python, "
    )
    fix += "register it in rfdlc.methods.METHODS, then call"
    for call in (rfdlc.Model.load, rfdlc.resume):
        with pytest.raises(
            InputError, match=rf"its method 'mine' .*{fix} rfdlc.resume"
        ):
            call(tmp_path / "run")
    result = CliRunner().invoke(app, ["resume", str(tmp_path / "run")])
    assert fix in str(result.exception)


def test_what_python_may_do_where_the_command_has_force(tmp_path):
    rfdlc.train("digits-lt", "ce", tmp_path / "run", **SMALL)
    with pytest.raises(
        InputError,
        match=r"\(in Python rfdlc.resume\), .*\(--force; in Python, remove it first\)",
    ):
        rfdlc.train("digits-lt", "ce", tmp_path / "run", **SMALL)


def test_a_backbone_that_cannot_take_the_samples_is_named(tmp_path):
    def narrow():
        return nn.Sequential(nn.Flatten(), nn.Linear(10, 4))

    told = (
        r"the backbone narrow cannot take a batch of shape \(2, 1, 8, 8\).*mat1 and"
        r" mat2.*samples of shape \(1, 8, 8\)"
    )
    with pytest.raises(InputError, match=told):
        rfdlc.train("digits-lt", "ce", tmp_path / "run", backbone=narrow, epochs=1)


def test_a_backbone_without_parameters_is_refused(tmp_path):
    with pytest.raises(
        InputError,
        match="the backbone Flatten has no parameters to train: use backbone=mlp",
    ):
        rfdlc.train(
            "digits-lt", "ce", tmp_path / "run", backbone=nn.Flatten(), epochs=1
        )
    assert not (tmp_path / "run").exists()


# -- the class prior that a method's probabilities carry
# --------------------------------------------------------------------------------------

COUNTS = np.array([80.0, 15.0, 5.0])


def prior_of(monkeypatch, **fields):
    monkeypatch.setitem(
        METHODS, "mine", Method("mine", "here", {"head": "linear"}, **fields)
    )
    return new_decider(
        "mine",
        resolve("mine", "", {})[1],
        rfdlc.Classes.from_counts(COUNTS.astype(int)),
    ).model.train_prior


@pytest.mark.parametrize(
    ("sampling", "power"), [("shuffle", 1), ("sqrt", 0.5), ("balanced", 0)]
)
@pytest.mark.parametrize("trains", ["all", "head"])
def test_the_prior_follows_the_last_stage_that_trains_a_head(
    monkeypatch, sampling, power, trains
):
    late = Stage(epochs=1, trains=trains, settings={"sampling": sampling})
    drawn = COUNTS**power / (COUNTS**power).sum()
    assert prior_of(monkeypatch, stages=(Stage(), late)) == pytest.approx(drawn)
    router = Stage(epochs=1, trains="router", settings={"sampling": "balanced"})
    assert prior_of(
        monkeypatch, stages=(Stage(), late, router), combination=routed
    ) == pytest.approx(drawn)


def test_class_weights_of_the_last_stage_move_the_prior(monkeypatch):
    weighted = Stage(epochs=1, trains="head", settings={"weights": "linear"})
    assert prior_of(monkeypatch, stages=(Stage(), weighted)) == pytest.approx(
        [1 / 3] * 3
    )


@pytest.mark.parametrize(
    ("prior", "carried"),
    [
        ("uniform", [1 / 3, 1 / 3, 1 / 3]),
        ("train", [0.8, 0.15, 0.05]),
        (lambda config, classes: classes.count_array[::-1] / 100, [0.05, 0.15, 0.8]),
    ],
)
def test_a_method_names_its_prior_where_it_does_not_follow(monkeypatch, prior, carried):
    balanced = (
        Stage(),
        Stage(epochs=1, trains="head", settings={"sampling": "balanced"}),
    )
    assert prior_of(monkeypatch, prior=prior, stages=balanced) == pytest.approx(carried)


@pytest.mark.parametrize("prior", ["unifrom", [0.5, 0.5], np.array([0.5, 0.5]), None])
def test_a_prior_that_is_none_is_refused(prior):
    with pytest.raises(
        InputError,
        match=(
            r"prior of a method .* is unknown: expected one of uniform, train, a"
            r" function"
        ),
    ):
        Method("mine", "here", prior=prior)


@pytest.mark.parametrize(
    ("found", "message"), [([0.5, 0.5], "shape"), ([0.5, 0.4, 0.3], "sums to 1.2")]
)
def test_a_function_that_returns_no_prior_is_refused(monkeypatch, found, message):
    with pytest.raises(InputError, match=f"prior of a method .*{message}"):
        prior_of(monkeypatch, prior=lambda *given: np.array(found))


# -- what cannot be a method
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Method("x", "y", options={"margin": Option(0.5, "mine")}),
            "'margin' .* has the name of a setting: name",
        ),
        (
            lambda: Method("x", "y", options={"epochs": Option(5, "mine")}),
            "such as 'own_epochs', or .* config.epochs",
        ),
        (
            lambda: Method("x", "y", stages=()),
            "stages of a method is empty: expected one Stage or more",
        ),
        (
            lambda: Method("x", "y", stages=(Stage(), Stage(trains="router"))),
            "'router', but its method has no",
        ),
        (
            lambda: Stage(trains="neck"),
            "`trains` of a stage 'neck' is unknown: expected one of all, head, router",
        ),
        (
            lambda: Method("x", "y", stages=(Stage(epochs="late"),)),
            "epochs='late' of a stage: .* there are none",
        ),
        (
            lambda: Method(
                "x",
                "y",
                stages=(Stage(swag_samples="n"),),
                options={"m": Option(1, "")},
            ),
            (
                "swag_samples='n' of a stage: expected a number, or an option of its"
                " method, m"
            ),
        ),
    ],
)
def test_methods_that_cannot_be(make, message):
    with pytest.raises(InputError, match=message):
        make()


class Learned(nn.Module):
    """Temperatures of classes, which are learned or not."""

    def __init__(self, classes, learned, heat=0.0):
        super().__init__()
        self.heat = nn.Parameter(torch.full((classes,), heat), requires_grad=learned)

    def forward(self, z, y, epoch):
        return nn.functional.cross_entropy(
            (z * self.heat.exp())[0], y, reduction="none"
        )


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda config, classes, utility: Learned(len(classes), True),
            r"has parameters \(heat\), .*as buffers",
        ),
        (
            lambda z, y, epoch: -z.log_softmax(-1),
            "cannot be made .*'log_softmax'.*: expected a function of config",
        ),
        (Learned(10, False), "cannot be made"),
        (Buffered, "cannot be made"),
        (lambda *given: None, "returned NoneType: expected a function"),
    ],
)
@pytest.mark.parametrize("of_stage", [False, True])
def test_a_loss_that_cannot_be_is_refused_before_there_is_a_folder(
    tmp_path, monkeypatch, loss, message, of_stage
):
    stages = (Stage(), Stage(epochs=1, trains="head", loss=loss))
    mine = Method(
        "m",
        "h",
        {"head": "linear"},
        **({"stages": stages} if of_stage else {"loss": loss}),
    )
    monkeypatch.setitem(METHODS, "mine", mine)
    with pytest.raises(InputError, match=f"`loss` of the method 'm' {message}"):
        rfdlc.train("digits-lt", "mine", tmp_path / "run", **SMALL)
    assert not (tmp_path / "run").exists()


def test_frozen_parameters_of_a_loss_are_those_of_each_run():
    z, y = torch.randn(2, 1, B, C), torch.randint(C, (2, B))
    losses = [Learned(C, False, heat) for heat in (0.0, 2.0)]
    alone = [
        mean_loss(loss(z[run], y[run], torch.zeros(())))
        for run, loss in enumerate(losses)
    ]
    torch.testing.assert_close(
        RunLosses(losses)(z, y, torch.zeros(())), torch.stack(alone)
    )


def test_a_loss_of_nan_is_named_as_a_cause(tmp_path, monkeypatch):
    lost = Method(
        "m",
        "h",
        {"head": "linear"},
        loss=lambda *given: lambda z, y, epoch: z.mean(-1) * float("nan"),
    )
    monkeypatch.setitem(METHODS, "mine", lost)
    with pytest.raises(
        TrainingStopped, match=r"since step 1 of .*, or the loss returns them; there"
    ) as raised:
        rfdlc.train("digits-lt", "mine", tmp_path / "run", **SMALL)
    assert "learning_rate" not in str(raised.value)


# -- configurations of a method
# --------------------------------------------------------------------------------------


def test_the_loss_of_a_method_for_tests():
    classes = rfdlc.Classes.from_counts([80, 15, 5])
    method, z, y = METHODS["la"], torch.randn(1, B, 3), torch.randint(3, (B,))
    loss = method.loss(method.configure({"epochs": 3}), classes, None)
    adjusted = z[0] + torch.tensor([0.8, 0.15, 0.05]).log()
    torch.testing.assert_close(
        mean_loss(loss(z, y, torch.ones(()))), nn.functional.cross_entropy(adjusted, y)
    )
    assert method.configure({"prior_tau": ()}).prior_tau == ()

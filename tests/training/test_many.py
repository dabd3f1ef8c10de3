"""Many runs at once: each folder holds what training it alone would have left there."""

import csv
import json
import signal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import rfdlc
from rfdlc.data.loader import ResidentLoader
from rfdlc.errors import InputError
from rfdlc.training import trainer
from rfdlc.training._stacking import Stacker, same_until, stage_signature
from rfdlc.training.loop import TrainingStopped, training_utility
from rfdlc.training.losses import RunLosses, mean_loss
from rfdlc.training.losses.terms import (
    CompositeLoss,
    NegativeLogLikelihood,
    PriorInLikelihood,
    Repulsions,
    repulsion,
)
from rfdlc.training.methods import METHODS, resolve
from rfdlc.training.run import Run
from rfdlc.training.trainer import TrainingInterrupted

SMALL = {"epochs": 4, "widths": (16,), "batch_size": 128, "calibration": "temperature"}
TIMES = ("seconds", "samples_per_second")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def stacks(monkeypatch):
    """What was trained: for every stack its first epoch, its last one, and the folders
    of the runs of each member.
    """
    seen = []
    original = Stacker.next_stack

    def watched(self, waiting):
        stack = original(self, waiting)
        runs = [[run.path.name for run in member.runs] for member in stack.members]
        if "alone" not in stack.run.path.parts:
            seen.append((stack.run.phase, stack.start, stack.end, runs))
        return stack

    monkeypatch.setattr(Stacker, "next_stack", watched)
    return seen


def spec(folder, name, method, **settings):
    return rfdlc.RunSpec(folder / name, method, {**SMALL, **settings})


def history(path):
    with (path / "history.csv").open(newline="") as lines:
        return [
            {key: value for key, value in row.items() if key not in TIMES}
            for row in csv.DictReader(lines)
        ]


def assert_same_run(one, other, atol=2e-6):
    """Every file of two folders, but for times."""
    assert {file.name for file in one.iterdir()} == {
        file.name for file in other.iterdir()
    }
    configs = [json.loads((path / "config.json").read_text()) for path in (one, other)]
    assert configs[0] == configs[1]
    rows = [history(path) for path in (one, other)]
    assert [row.keys() for row in rows[0]] == [row.keys() for row in rows[1]]
    for mine, theirs in zip(*rows, strict=True):
        numbers = [
            [float(value or "nan") for value in row.values()] for row in (mine, theirs)
        ]
        assert numbers[0] == pytest.approx(
            numbers[1], rel=max(1e-4, 10 * atol), abs=1e-5, nan_ok=True
        )
    for file in one.glob("*.ckpt"):
        first, second = (Run(path).checkpoint(file.name) for path in (one, other))
        assert (first.phase, first.epoch, len(first.history)) == (
            second.phase,
            second.epoch,
            len(second.history),
        )
        assert_close(first.net, second.net, atol)
        assert_close(first.state, second.state, 10 * atol)
    assert_close(
        *(load_file(path / "model.safetensors") for path in (one, other)), atol
    )
    for file in ("held-out.npz", "predictions.npz"):
        logits, targets = zip(
            *(
                (p.scores.values, p.targets)
                for p in (rfdlc.Predictions.load(path / file) for path in (one, other))
            ),
            strict=True,
        )
        assert np.allclose(*logits, atol=100 * atol)
        assert np.array_equal(*targets)
    metrics = [json.loads((path / "metrics.json").read_text()) for path in (one, other)]
    assert metrics[0].keys() == metrics[1].keys()
    assert metrics[0]["test"]["accuracy"] == pytest.approx(
        metrics[1]["test"]["accuracy"], abs=0.01
    )


def assert_close(one, other, atol):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.allclose(tensor, other[name], atol=atol), name


def assert_as_alone(specs, tmp_path, data="digits-lt", atol=2e-6):
    """Train the specs together, then each alone, and compare."""
    models = rfdlc.train_many(data, specs)
    for one, model in zip(specs, models, strict=True):
        alone = tmp_path / "alone" / one.out.name
        rfdlc.train(data, one.method, alone, **one.settings)
        assert model.path == one.out
        assert_same_run(one.out, alone, atol)


# -- each run as if alone
# --------------------------------------------------------------------------------------


def test_seeds_objectives_and_schedules_in_one_stack(tmp_path, stacks):
    specs = [
        spec(tmp_path, "ce-0", "ce", keep=(0.5,), evaluate_every=2),
        spec(tmp_path, "ce-1", "ce", seed=1, weight_decay=0.0),
        spec(
            tmp_path,
            "balanced",
            "balanced-softmax",
            seed=1,
            schedule="cosine",
            warmup=0,
            learning_rate=0.02,
        ),
        spec(tmp_path, "cb", "cb", seed=2, milestones=(0.5,)),
        spec(
            tmp_path,
            "margin",
            "ce",
            seed=3,
            margin=0.5,
            utility="tail-sensitive",
            deferred=0.5,
        ),
    ]
    assert_as_alone(specs, tmp_path)
    ((_, _, _, runs),) = stacks
    assert sorted(name for (name,) in runs) == sorted(one.out.name for one in specs)


def test_particles_with_repulsions_of_their_own(tmp_path, stacks):
    common = {"particles": 2, "mixup": 0.4}
    specs = [
        spec(tmp_path, "head", "rf-dlc", **common),
        spec(
            tmp_path,
            "strong",
            "rf-dlc",
            **common,
            seed=1,
            repulsion_tau=3.0,
            repulsion_strength=2.0,
        ),
        spec(
            tmp_path,
            "predictions",
            "rf-dlc",
            particles=2,
            mixup=0.8,
            seed=1,
            repulsion="predictions",
        ),
        spec(tmp_path, "none", "rf-dlc", **common, repulsion="none", prior_tau=(0, 2)),
    ]
    assert_as_alone(specs, tmp_path)
    assert [len(runs) for _, _, _, runs in stacks] == [4]


def test_adam_with_clipping_and_averages(tmp_path):
    common = {"optimiser": "adamw", "average": 0.9, "clip": 1.0, "weight_decay": 0.01}
    rates = (1e-3, 2e-3)
    specs = [
        spec(tmp_path, str(rate), "ce", seed=1, learning_rate=rate, **common)
        for rate in rates
    ]
    assert_as_alone(specs, tmp_path, atol=1e-5)


def test_images_with_crops_of_their_own(tmp_path):
    settings = {
        "epochs": 1,
        "backbone": "resnet8",
        "augment": "crop-flip",
        "batch_size": 64,
        "learning_rate": 1e-3,
    }
    specs = [
        rfdlc.RunSpec(tmp_path / str(seed), "ce", {**settings, "seed": seed})
        for seed in (0, 1)
    ]
    assert_as_alone(
        specs, tmp_path, atol=1e-3
    )  # convolutions of one and of two networks round differently


def test_refit_trains_both_phases_as_stacks(tmp_path, stacks):
    specs = [
        spec(tmp_path, str(seed), "ce", seed=seed, epochs=2, refit=True)
        for seed in (0, 1)
    ]
    assert_as_alone(specs, tmp_path)
    assert [(phase, len(runs)) for phase, _, _, runs in stacks] == [(0, 2), (1, 2)]


# -- shared beginnings
# --------------------------------------------------------------------------------------


def test_runs_that_share_their_beginning_train_it_once(tmp_path, stacks):
    late = {"alpha": 1.0, "utility": "tail-sensitive-by-rank"}
    specs = [
        spec(tmp_path, "paper", "rf-dlc-paper", deferred=0.5),
        spec(tmp_path, "utility", "rf-dlc-paper", deferred=0.5, **late),
        spec(
            tmp_path, "later", "rf-dlc-paper", deferred=0.75, **late, evaluate_every=1
        ),
    ]
    assert_as_alone(specs, tmp_path)
    assert stacks == [
        (0, 0, 4, [["paper", "utility", "later"]]),
        (0, 2, 4, [["utility"], ["later"]]),
    ]


def test_two_stages_after_a_common_first_one(tmp_path, stacks):
    names = ("ce", "crt", "tau-norm", "la-posthoc")
    specs = [
        spec(tmp_path, f"{name}-{seed}", name, seed=seed)
        for seed in (0, 1)
        for name in names
    ]
    assert_as_alone(specs, tmp_path)
    assert stacks[0] == (
        0,
        0,
        4,
        [[f"{name}-{seed}" for name in names] for seed in (0, 1)],
    )
    assert [(start, end, len(runs)) for _, start, end, runs in stacks[1:]] == [
        (4, 14, 2),
        (4, 4, 2),
        (4, 4, 2),
    ]


@pytest.mark.parametrize("method", ["srepr", "ride"])
def test_stages_with_averages_and_routers(tmp_path, method):
    specs = [spec(tmp_path, str(seed), method, seed=seed) for seed in (0, 1)]
    assert_as_alone(specs, tmp_path, atol=2e-5)


def described(method, **settings):
    run = Run("nowhere")
    run.method_name, run.config = (
        method,
        resolve(method, "digits-lt", {"epochs": 100, **settings})[1],
    )
    return run


@pytest.mark.parametrize(
    ("one", "other", "epochs"),
    [
        (described("ce"), described("ce", seed=1), 0),
        (described("ce"), described("ce", learning_rate=0.1), 0),
        (described("ce"), described("la"), 0),
        (described("ce"), described("cb"), 0),  # weights from the first epoch on
        (described("ce"), described("elkan"), 100),
        (described("ce"), described("crt"), 100),
        (described("ce"), described("tau-norm", calibration="none"), 100),
        (described("crt"), described("crt", combine="mean-logits"), 110),
        (described("cb"), described("reweighted-elkan"), 100),
        (described("ldam"), described("ldam-drw"), 80),
        (described("ldam-drw"), described("ldam-drw", deferred=0.7), 70),
        (described("ldam-drw"), described("ldam-drw", weight_beta=0.999), 80),
        (
            described("rf-dlc-paper"),
            described("rf-dlc-paper", utility="tail-sensitive"),
            80,
        ),
        (
            described("rf-dlc-paper"),
            described("rf-dlc-paper", alpha=7.0),
            80,
        ),  # not used, but nothing here proves it
        (described("rf-dlc", alpha=7.0), described("rf-dlc"), 100),
        (described("ensemble-ldam"), described("ride"), 0),
        (
            described("ride"),
            described("ride", weight_beta=0.999),
            0,
        ),  # experts: nothing is known of their objective
    ],
)
def test_until_which_epoch_runs_are_the_same(one, other, epochs):
    assert same_until(one, other) == epochs
    assert same_until(other, one) == epochs


# -- which runs stand together, and interruptions
# --------------------------------------------------------------------------------------


def test_stacks_are_limited_and_even(tmp_path, stacks):
    specs = [spec(tmp_path, str(seed), "ce", seed=seed, epochs=1) for seed in range(5)]
    rfdlc.train_many("digits-lt", specs, networks=4)
    assert [len(runs) for _, _, _, runs in stacks] == [3, 2]


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 32},
        {"epochs": 3},
        {"optimiser": "adamw"},
        {"widths": (8,)},
        {"cutmix": 1.0},
        {"clip": 1.0},
    ],
)
def test_shapes_that_do_not_agree(change):
    assert stage_signature(described("ce"), 0) == stage_signature(
        described("la", seed=1, hold_out=0.3), 0
    )
    assert stage_signature(described("ce"), 0) != stage_signature(
        described("ce", **change), 0
    )


class Crash(Exception):
    pass


def test_an_interrupted_call_goes_on(tmp_path, stacks, monkeypatch):
    """A crash between the checkpoints of two runs: the one that is behind catches up,
    then both are a stack again.
    """
    specs = [
        spec(tmp_path, str(seed), "ce", seed=seed, checkpoint_every=1)
        for seed in (0, 1)
    ]
    original = trainer._checkpoint

    def crash(run, net, epoch, *when):
        if epoch.epoch == 2 and run.config.seed == 1:
            raise Crash
        original(run, net, epoch, *when)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "_checkpoint", crash)
        with pytest.raises(Crash):
            rfdlc.train_many("digits-lt", specs)
    stacks.clear()
    assert_as_alone(specs, tmp_path)
    assert stacks == [(0, 1, 2, [["1"]]), (0, 2, 4, [["0"], ["1"]])]


def test_ctrl_c_stops_all_runs_at_the_end_of_the_epoch(tmp_path, monkeypatch):
    specs = [
        spec(tmp_path, str(seed), "ce", seed=seed, checkpoint_every=4)
        for seed in (0, 1)
    ]
    original = trainer.Trainer._history_row

    def row(self, run, member, done):
        if done.epoch == 2 and run.config.seed == 0:
            signal.raise_signal(signal.SIGINT)
        return original(self, run, member, done)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "_history_row", row)
        with pytest.raises(
            TrainingInterrupted,
            match="after epoch 2 of 4; continue with the same call of train_many",
        ):
            rfdlc.train_many("digits-lt", specs)
    assert [Run(one.out).checkpoint().epoch for one in specs] == [2, 2]
    assert_as_alone(specs, tmp_path)


def test_finished_runs_are_loaded_and_others_trained(tmp_path, stacks):
    rfdlc.train("digits-lt", "ce", tmp_path / "a", **SMALL)
    stacks.clear()
    written = (tmp_path / "a" / "model.safetensors").stat().st_mtime_ns
    models = rfdlc.train_many(
        "digits-lt", [spec(tmp_path, name, "ce") for name in "ab"]
    )
    assert [model.path for model in models] == [tmp_path / name for name in "ab"]
    assert (tmp_path / "a" / "model.safetensors").stat().st_mtime_ns == written
    assert [runs for _, _, _, runs in stacks] == [[["b"]]]
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_a_run_that_is_lost_is_named(tmp_path):
    specs = [
        spec(tmp_path, "good", "ce"),
        spec(tmp_path, "bad", "ce", learning_rate=1e30, warmup=0),
    ]
    with pytest.raises(
        TrainingStopped,
        match=r"learning rate is too high.*(no checkpoint yet|in .*bad)",
    ):
        rfdlc.train_many("digits-lt", specs)


def test_specs_that_cannot_be(tmp_path):
    good = rfdlc.RunSpec(tmp_path / "a")
    for message, specs, options in (
        (
            "folder of several runs",
            [good, rfdlc.RunSpec(tmp_path / "b" / ".." / "a", "ce")],
            {},
        ),
        (
            "'epoch' is unknown",
            [good, rfdlc.RunSpec(tmp_path / "b", settings={"epoch": 1})],
            {},
        ),
        (
            "expected particles=2 or more",
            [good, rfdlc.RunSpec(tmp_path / "b", "ride", {"particles": 1})],
            {},
        ),
        (
            "pass backbone",
            [good, rfdlc.RunSpec(tmp_path / "b", "ce", {"backbone": "own"})],
            {},
        ),
        ("networks is 0", [good], {"networks": 0}),
    ):
        with pytest.raises(InputError, match=message):
            rfdlc.train_many("digits-lt", specs, **options)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_another_run_is_refused(tmp_path):
    rfdlc.train("digits-lt", "ce", tmp_path / "a", **SMALL)
    with pytest.raises(InputError, match=r"another run \(it differs in epochs\)"):
        rfdlc.train_many("digits-lt", [spec(tmp_path, "a", "ce", epochs=5)])
    with pytest.raises(InputError, match="it differs in method ce"):
        rfdlc.train_many("digits-lt", [spec(tmp_path, "a", "elkan")])


# -- parts
# --------------------------------------------------------------------------------------


def test_objectives_of_all_runs_in_few_calls():
    def objective(weights, tau=()):
        shifts = [PriorInLikelihood([0.1, -0.3, 0.2], tau)] if tau else []
        return CompositeLoss(
            shifts, [NegativeLogLikelihood(weights, after=int(weights[0]))]
        )

    own = [
        objective([1, 2, 3]),
        objective([3, 1, 1]),
        objective([1, 1, 1], (1.0,)),
        objective([1, 5, 1]),
    ]
    together = RunLosses(own)
    assert [group.runs for group in together.groups] == [2, 1, 1]
    logits, targets = (
        torch.randn(4, 2, 6, 3, requires_grad=True),
        torch.randint(3, (4, 6)),
    )
    for epoch in (torch.tensor(1.0), torch.tensor(2.0), torch.tensor(4.0)):
        expected = torch.stack(
            [mean_loss(one(logits[r], targets[r], epoch)) for r, one in enumerate(own)]
        )
        found = together(logits, targets, epoch)
        assert torch.allclose(found, expected)
        gradients = [
            torch.autograd.grad(losses.sum(), logits)[0] for losses in (found, expected)
        ]
        assert torch.allclose(*gradients, atol=1e-7)


@pytest.mark.parametrize("method", METHODS)
def test_the_objective_of_every_method_serves_several_runs_at_once(method):
    classes = rfdlc.Classes.from_counts([50, 20, 5, 2])
    for number, stage in enumerate(METHODS[method].stages):
        settings = resolve(method, "", {"epochs": 4, "utility": "tail-sensitive"})[
            1
        ].replace(**stage.settings)
        make, width = stage.loss or METHODS[method].loss, 4 + (stage.trains == "router")
        own = [
            make(settings, classes, training_utility(settings, classes))
            for _ in range(2)
        ]
        together = RunLosses(own)
        assert [group.runs for group in together.groups] == [2], number
        logits, targets = (
            torch.randn(
                2,
                settings.particles * (1 + stage.number("swag_samples", settings)),
                6,
                width,
            ),
            torch.randint(4, (2, 6)),
        )
        for epoch in (torch.tensor(1.0), torch.tensor(4.0)):
            expected = torch.stack(
                [
                    mean_loss(one(logits[r], targets[r], epoch))
                    for r, one in enumerate(own)
                ]
            )
            assert torch.allclose(
                together(logits, targets, epoch), expected, atol=1e-5
            ), number


def test_repulsions_of_all_runs():
    kinds = (
        ("head", 40.0, 1.0),
        ("head", 3.0, 0.5),
        ("none", 1.0, 1.0),
        ("predictions", 9.0, 0.1),
    )
    weights, logits, epoch = (
        torch.randn(4, 3, 5, 2),
        torch.randn(4, 3, 6, 2),
        torch.tensor(2.0),
    )
    found = Repulsions(kinds, torch.device("cpu"))(weights, logits, epoch)
    for run, (kind, tau, strength) in enumerate(kinds):
        one = slice(run, run + 1)
        expected = (
            0.0
            if kind == "none"
            else repulsion(kind, weights[one], logits[one], epoch, tau, strength)
        )
        assert float(found[run]) == pytest.approx(float(expected))


def test_a_loader_with_samples_of_each_run():
    split = rfdlc.load("digits-lt").train
    positions = [np.arange(0, 120), np.arange(60, 180)]
    for sampling in ("shuffle", "balanced"):
        together = ResidentLoader(
            split, seeds=(3, 4), batch_size=50, sampling=sampling, positions=positions
        )
        alone = [
            ResidentLoader(
                split.take(own), seeds=(seed,), batch_size=50, sampling=sampling
            )
            for seed, own in zip((3, 4), positions, strict=True)
        ]
        for batch, *others in zip(
            together.epoch(2), *(loader.epoch(2) for loader in alone), strict=True
        ):
            for run, other in enumerate(others):
                assert torch.equal(batch[0][run], other[0][0])
                assert torch.equal(batch[1][run], other[1][0])

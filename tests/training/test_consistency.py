"""Consistency of particles against naive loops, and what a training with it does, alone
and in a stack.
"""

import numpy as np
import pytest
import torch

import rfdlc
from rfdlc.data.augment import Augment
from rfdlc.data.dataset import Split
from rfdlc.data.loader import ResidentLoader
from rfdlc.data.policy import Policy
from rfdlc.errors import InputError
from rfdlc.training.building import method_net
from rfdlc.training.config import TrainConfig
from rfdlc.training.loop import build_stages
from rfdlc.training.losses.consistency import Consistency
from rfdlc.training.methods import find_method
from rfdlc.training.step import Step

SMALL = {
    "widths": 16,
    "particles": 3,
    "batch_size": 16,
    "epochs": 2,
    "tune": "off",
    "shared_stages": 0,
}


def naive(student, teacher, labels, factor):
    """The mean over particles and samples, one after another; logits (M, B, C)."""
    total = 0.0
    for m, particle in enumerate(student):
        for b, logits in enumerate(particle):
            aim = teacher[m, b]
            if int(aim.argmax()) == int(labels[b]):
                p = torch.exp(aim) / torch.exp(aim).sum()
                total = (
                    total - factor * (p * (logits - torch.logsumexp(logits, 0))).sum()
                )
    return total / student.shape[0] / student.shape[1]


def test_values_and_gradients_equal_a_naive_loop(sample):
    student, labels = sample
    teacher = student.flip(0) + torch.randn(
        student.shape, generator=torch.Generator().manual_seed(1)
    )
    student = student.clone().requires_grad_(True)
    term = Consistency(0.7, 10)
    aims = term.aims(teacher[None], labels[None])
    assert 0 < (aims.sum(-1) == 0).float().mean() < 1
    for epoch, ramp in ((1, 0.1), (5, 0.5), (10, 1.0), (30, 1.0)):
        found = term(student[None], aims, torch.tensor(float(epoch))).mean()
        expected = naive(student, teacher, labels, 0.7 * ramp)
        torch.testing.assert_close(found, expected)
        slopes = [torch.autograd.grad(value, student)[0] for value in (found, expected)]
        torch.testing.assert_close(*slopes)


def prepared(**settings):
    rng = np.random.default_rng(0)
    data = rfdlc.load(
        (rng.integers(0, 255, (60, 1, 8, 8)).astype(np.uint8), np.arange(60) % 3)
    )
    config = TrainConfig(
        **{
            **SMALL,
            "augment": "randaugment",
            "cutout": 0.25,
            "consistency": 0.5,
            **settings,
        }
    )
    method, device = find_method("rf-dlc"), torch.device("cpu")
    stage = build_stages(method, config, data, [0], device)[0]
    net = method_net(method, config, data.input_shape, data.classes, (0,))
    step = Step(net, stage.losses, stage.settings, stage.stage, (), stage.each)
    step.begin_epoch(1, 0.1)
    return stage, step


@pytest.mark.parametrize("settings", [{}, {"mixup": 0.4}])
def test_a_step_adds_it_to_the_objective(settings):
    stage, step = prepared(**settings)
    plain = prepared(**settings, consistency=0.0)[1]
    mix = torch.tensor([[0.7, 0.5, 0.5]])
    inputs, targets, weak = next(stage.loader.epoch(1, weak=stage.views > 1))
    mixed = step.mixed(inputs, targets, mix)
    logits = step.logits(mixed.inputs)
    added = step.loss(logits, mixed, None, step.aims(weak, mixed, 1)) - plain.loss(
        logits, mixed
    )
    teacher, lam = step.logits(weak)[0].detach(), 0.7 if "mixup" in settings else 1.0
    expected = lam * naive(logits[0], teacher, targets[0], 0.5)
    if (
        lam < 1
    ):  # the neighbour's prediction, where it is right, for the neighbour's share
        expected = expected + (1 - lam) * naive(
            logits[0], teacher.roll(1, 1), targets[0].roll(1), 0.5
        )
    torch.testing.assert_close(
        added[0], expected
    )  # the ramp ends with the first of two epochs
    assert added.item() > 0


def test_micro_batches_give_the_same_step():
    found = []
    for accumulate in (1, 4):
        stage, step = prepared(
            mixup=0.4, accumulate=accumulate, head="linear", repulsion="none"
        )
        inputs, targets, weak = next(stage.loader.epoch(1, weak=True))
        step.compute(inputs, targets, torch.tensor([[0.7, 0.5, 0.5]]), weak)
        found.append([parameter.detach().clone() for parameter in step.parameters])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_weak_view_is_that_without_operations_and_cutout():
    images = np.random.default_rng(1).integers(1, 255, (20, 3, 8, 8)).astype(np.uint8)
    split = Split(images, np.arange(20) % 2)
    augment = Augment(
        crop_padding=1, flip=True, rotation=15.0, cutout=4, policy=Policy(magnitude=1.0)
    )
    loader = ResidentLoader(split, None, batch_size=6, seeds=(1, 2), augment=augment)
    order, draws = loader.draw(3)
    rotated = {name: draws[name] for name in ("crop", "flip", "angle")}
    batches = list(loader.epoch(3, weak=True))
    for run in range(2):
        weak = torch.cat([batch[2][run] for batch in batches])
        own = {name: drawn[run] for name, drawn in rotated.items()}
        expected = Augment(crop_padding=1, flip=True, rotation=15.0)(
            torch.from_numpy(images)[order[run]], own
        )
        torch.testing.assert_close(weak, expected / 255)
        assert not torch.equal(weak, torch.cat([batch[0][run] for batch in batches]))
    for (inputs, targets), (same, labels, _) in zip(
        loader.epoch(3), batches, strict=True
    ):
        assert torch.equal(inputs, same)
        assert torch.equal(targets, labels)


def test_runs_of_a_stack_equal_runs_alone(tmp_path):
    rng = np.random.default_rng(2)
    data = rfdlc.load(
        (rng.integers(0, 255, (80, 3, 8, 8)).astype(np.uint8), np.arange(80) % 4)
    )
    common = {
        **SMALL,
        "augment": "autoaugment",
        "cutout": 0.5,
        "consistency": 1.0,
        "consistency_ramp": 0,
    }
    each = [{"seed": 1}, {"seed": 2, "mixup": 0}]
    specs = [
        rfdlc.RunSpec(tmp_path / f"many-{i}", "rf-dlc", {**common, **own})
        for i, own in enumerate(each)
    ]
    for i, (model, own) in enumerate(
        zip(rfdlc.train_many(data, specs), each, strict=True)
    ):
        alone = rfdlc.train(data, "rf-dlc", tmp_path / f"alone-{i}", **common, **own)
        without = rfdlc.train(
            data,
            "rf-dlc",
            tmp_path / f"without-{i}",
            **common | own | {"consistency": 0},
        )
        for name, weight in alone.net.state_dict().items():
            torch.testing.assert_close(
                model.net.state_dict()[name], weight, rtol=1e-4, atol=1e-5
            )
        before, after = (net.head_weights for net in (without.net, model.net))
        assert not torch.allclose(before, after, atol=1e-3)


def test_what_has_no_two_views_is_refused(tmp_path):
    data = rfdlc.load((np.zeros((40, 1, 8, 8), np.uint8), np.arange(40) % 2))
    with pytest.raises(
        InputError,
        match=(
            "consistency needs a view that is augmented further: set"
            " augment=randaugment"
        ),
    ):
        rfdlc.train(
            data, "rf-dlc", tmp_path / "run", consistency=1, augment="crop", **SMALL
        )
    assert not (tmp_path / "run").exists()

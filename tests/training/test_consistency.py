"""Consistency and distillation against naive loops; what a training with them does, alone, in a stack and resumed."""

import numpy as np
import pytest
import torch

import rfdlc
from rfdlc.data.augment import Augment
from rfdlc.data.dataset import Split
from rfdlc.data.loader import ResidentLoader
from rfdlc.data.policy import Policy
from rfdlc.errors import InputError
from rfdlc.training.config import TrainConfig
from rfdlc.training.loop import build_stages
from rfdlc.training.losses.consistency import Consistency, distilled
from rfdlc.training.methods import find_method
from rfdlc.training.model import method_net
from rfdlc.training.step import Step
from rfdlc.training.trainer import Trainer

SMALL = {"widths": 16, "particles": 3, "batch_size": 16, "epochs": 2, "tune": "off", "shared_stages": 0}


def naive(student, teacher, labels, factor):
    """The mean over particles and samples, one after another; logits (M, B, C)."""
    total = 0.0
    for m, particle in enumerate(student):
        for b, logits in enumerate(particle):
            aim = teacher[m, b]
            if int(aim.argmax()) == int(labels[b]):
                p = torch.exp(aim) / torch.exp(aim).sum()
                total = total - factor * (p * (logits - torch.logsumexp(logits, 0))).sum()
    return total / student.shape[0] / student.shape[1]


def naive_distillation(student, teacher, temperature=2.0):
    total = 0.0
    for particle in student:
        for b, logits in enumerate(particle):
            aim = teacher[:, b].mean(0) / temperature
            log_q = logits / temperature - torch.logsumexp(logits / temperature, 0)
            total = total - temperature**2 * (torch.exp(aim - torch.logsumexp(aim, 0)) * log_q).sum()
    return total / student.shape[0] / student.shape[1]


def test_values_and_gradients_equal_a_naive_loop(sample):
    student, labels = sample
    teacher = student.flip(0) + torch.randn(student.shape, generator=torch.Generator().manual_seed(1))
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
    found, expected = distilled(student[None], teacher[None]).mean(), naive_distillation(student, teacher)
    torch.testing.assert_close(found, expected)
    slopes = [torch.autograd.grad(value, student)[0] for value in (found, expected)]
    torch.testing.assert_close(*slopes)


def prepared(**settings):
    rng = np.random.default_rng(0)
    data = rfdlc.load((rng.integers(0, 255, (60, 1, 8, 8)).astype(np.uint8), np.arange(60) % 3))
    config = TrainConfig(**{**SMALL, "augment": "randaugment", "cutout": 0.25, "consistency": 0.5, **settings})
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
    added = step.loss(logits, mixed, None, step.aims(weak, mixed, 1)) - plain.loss(logits, mixed)
    teacher, lam = step.logits(weak)[0].detach(), 0.7 if "mixup" in settings else 1.0
    expected = lam * naive(logits[0], teacher, targets[0], 0.5)
    if lam < 1:  # the neighbour's prediction, where it is right, for the neighbour's share
        expected = expected + (1 - lam) * naive(logits[0], teacher.roll(1, 1), targets[0].roll(1), 0.5)
    torch.testing.assert_close(added[0], expected)  # the ramp ends with the first of two epochs
    assert added.item() > 0


@pytest.mark.parametrize("mixup", [0, 0.4])
def test_a_teacher_takes_its_share_of_the_objective(mixup):
    stage, step = prepared(mixup=mixup, consistency=0, distill=0.3, repulsion="none")
    inputs, targets = next(stage.loader.epoch(1))
    mixed = step.mixed(inputs, targets, torch.tensor([[0.7, 0.5, 0.5]]))
    logits = step.logits(mixed.inputs)
    plain = step.loss(logits, mixed)
    step.teacher = prepared(seed=5)[1].net
    known = step.teacher.particle_logits(mixed.inputs)[0].detach()
    expected = 0.7 * plain[0] + 0.3 * naive_distillation(logits[0], known)
    torch.testing.assert_close(step.loss(logits, mixed)[0], expected)


@pytest.mark.parametrize("taught", [False, True])
def test_micro_batches_give_the_same_step(taught):
    found = []
    for accumulate in (1, 4):
        stage, step = prepared(mixup=0.4, accumulate=accumulate, head="linear", repulsion="none", distill=0.5)
        step.teacher = prepared(seed=5)[1].net.eval() if taught else None
        inputs, targets, weak = next(stage.loader.epoch(1, weak=True))
        step.compute(inputs, targets, torch.tensor([[0.7, 0.5, 0.5]]), weak)
        found.append([parameter.detach().clone() for parameter in step.parameters])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_weak_view_is_that_without_operations_and_cutout():
    images = np.random.default_rng(1).integers(1, 255, (20, 3, 8, 8)).astype(np.uint8)
    split = Split(images, np.arange(20) % 2)
    augment = Augment(crop_padding=1, flip=True, rotation=15.0, cutout=4, policy=Policy(magnitude=1.0))
    loader = ResidentLoader(split, None, batch_size=6, seeds=(1, 2), augment=augment)
    order, draws = loader.draw(3)
    rotated = {name: draws[name] for name in ("crop", "flip", "angle")}
    batches = list(loader.epoch(3, weak=True))
    for run in range(2):
        weak = torch.cat([batch[2][run] for batch in batches])
        own = {name: drawn[run] for name, drawn in rotated.items()}
        expected = Augment(crop_padding=1, flip=True, rotation=15.0)(torch.from_numpy(images)[order[run]], own)
        torch.testing.assert_close(weak, expected / 255)
        assert not torch.equal(weak, torch.cat([batch[0][run] for batch in batches]))
    for (inputs, targets), (same, labels, _) in zip(loader.epoch(3), batches, strict=True):
        assert torch.equal(inputs, same)
        assert torch.equal(targets, labels)


def test_runs_of_a_stack_equal_runs_alone(tmp_path):
    rng = np.random.default_rng(2)
    data = rfdlc.load((rng.integers(0, 255, (80, 3, 8, 8)).astype(np.uint8), np.arange(80) % 4))
    common = {**SMALL, "augment": "autoaugment", "cutout": 0.5, "consistency": 1.0, "consistency_ramp": 0}
    each = [{"seed": 1}, {"seed": 2, "mixup": 0}]
    specs = [rfdlc.RunSpec(tmp_path / f"many-{i}", "rf-dlc", {**common, **own}) for i, own in enumerate(each)]
    for i, (model, own) in enumerate(zip(rfdlc.train_many(data, specs), each, strict=True)):
        alone = rfdlc.train(data, "rf-dlc", tmp_path / f"alone-{i}", **common, **own)
        without = rfdlc.train(data, "rf-dlc", tmp_path / f"without-{i}", **common | own | {"consistency": 0})
        for name, weight in alone.net.state_dict().items():
            torch.testing.assert_close(model.net.state_dict()[name], weight, rtol=1e-4, atol=1e-5)
        before, after = (net.head_weights for net in (without.net, model.net))
        assert not torch.allclose(before, after, atol=1e-3)


def test_what_has_no_two_views_is_refused(tmp_path):
    data = rfdlc.load((np.zeros((40, 1, 8, 8), np.uint8), np.arange(40) % 2))
    with pytest.raises(InputError, match="consistency needs a view that is augmented further: set augment=randaugment"):
        rfdlc.train(data, "rf-dlc", tmp_path / "run", consistency=1, augment="crop", **SMALL)
    assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match="distill is for particles of one prior"):
        TrainConfig(distill=0.5, prior_tau=(0, 2), particles=2)


@pytest.fixture(scope="module")
def easy():
    """Images of three classes, each with a bright third."""
    rng = np.random.default_rng(3)
    labels = np.repeat(np.arange(3), [60, 40, 20])
    images = rng.integers(0, 120, (120, 1, 9, 9))
    for image, label in zip(images, labels, strict=True):
        image[0, 3 * label : 3 * label + 3] += 60
    return rfdlc.load((images.astype(np.uint8), labels))


TAUGHT = {**SMALL, "epochs": 3, "refit": True, "distill": 0.5, "checkpoint_every": 1, "mixup": 0}


def test_a_refit_is_trained_towards_the_networks_that_calibrated(easy, tmp_path):
    """By hand: the first training without the held-out samples, then the second, step by step, with it as teacher."""
    settings = TAUGHT | {"backbone": "resnet8", "epochs": 2, "seed": 3, "whiten": 0}
    model = rfdlc.train(easy, "rf-dlc", tmp_path / "run", **settings)
    first = rfdlc.train(easy, "rf-dlc", tmp_path / "first", **settings | {"refit": False})
    method, config = find_method("rf-dlc"), model.config
    teacher = first.net.train()
    teacher.dropout.eval()
    stage = build_stages(method, config, easy, [3], torch.device("cpu"))[0]
    net = method_net(method, config, easy.input_shape, easy.classes, (3,))
    step = Step(net, stage.losses, stage.settings, stage.stage, (), stage.each, teacher=teacher)
    for epoch in (1, 2):
        step.begin_epoch(epoch, stage.rates(epoch))
        for inputs, targets in stage.loader.epoch(epoch):
            step.compute(inputs, targets, torch.ones(1, 3))
    for name, weight in net.state_dict().items():
        torch.testing.assert_close(model.net.state_dict()[name], weight, rtol=1e-4, atol=1e-5)
    with np.load(tmp_path / "run/held-out.npz") as held, np.load(tmp_path / "first/held-out.npz") as same:
        np.testing.assert_allclose(held["logits"], same["logits"], atol=1e-5)


def test_taught_runs_of_a_stack_equal_runs_alone_and_resumed_ones(easy, tmp_path, monkeypatch):
    seeds = (1, 2)
    specs = [rfdlc.RunSpec(tmp_path / f"many-{seed}", "rf-dlc", TAUGHT | {"seed": seed}) for seed in seeds]
    for seed, model in zip(seeds, rfdlc.train_many(easy, specs), strict=True):
        path = tmp_path / f"alone-{seed}"
        calls = []

        def stop(trainer, run, member, epoch, _row=Trainer._history_row, calls=calls):
            calls.append(run.phase)
            if len(calls) == 5:  # in the second epoch of the refit
                raise KeyboardInterrupt
            return _row(trainer, run, member, epoch)

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "_history_row", stop)
            with pytest.raises(KeyboardInterrupt):
                rfdlc.train(easy, "rf-dlc", path, **TAUGHT, seed=seed)
        assert calls == [0, 0, 0, 1, 1]
        alone = rfdlc.resume(path, easy)
        plain = rfdlc.train(easy, "rf-dlc", tmp_path / f"plain-{seed}", **TAUGHT | {"seed": seed, "distill": 0})
        assert not (tmp_path / f"plain-{seed}" / "teacher.safetensors").exists()
        for name, weight in alone.net.state_dict().items():
            torch.testing.assert_close(model.net.state_dict()[name], weight, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(plain.net.head_weights, alone.net.head_weights, atol=1e-3)


def test_runs_that_begin_alike_do_not_share_a_teacher(easy, tmp_path):
    """The class weights start late: both runs are one training until then, but their refits have other teachers."""
    late = TAUGHT | {"deferred": 0.7, "repulsion": "none"}
    each = {"plain": {}, "weighted": {"weights": "linear"}}
    specs = [rfdlc.RunSpec(tmp_path / name, "rf-dlc", late | own) for name, own in each.items()]
    models = rfdlc.train_many(easy, specs)
    for (name, own), model in zip(each.items(), models, strict=True):
        alone = rfdlc.train(easy, "rf-dlc", tmp_path / f"{name}-alone", **late | own)
        for key, weight in alone.net.state_dict().items():
            torch.testing.assert_close(model.net.state_dict()[key], weight, rtol=1e-4, atol=1e-5)

"""The loop: runs alone and stacked, deferral, optimisers, clipping, averaging, odd
data, losses of NaN.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import rfdlc
from rfdlc.data.dataset import Dataset, Split
from rfdlc.errors import InputError
from rfdlc.training.building import choose_device, method_net
from rfdlc.training.config import TrainConfig
from rfdlc.training.execution import Execution
from rfdlc.training.loop import (
    TrainingStopped,
    build_stages,
    epochs,
    split_outputs,
    training_utility,
)
from rfdlc.training.methods import METHODS, resolve
from rfdlc.training.optimisation import AdamW, Sgd, clip
from rfdlc.training.step import Step
from rfdlc.training.trainer import balanced_positions, diversity, evaluate_balanced

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


def features(counts, width=6, seed=0, name="blobs"):
    """Gaussian blobs, one per class; the test part is balanced."""
    rng = np.random.default_rng(seed)
    centres = 3 * rng.normal(size=(len(counts), width))

    def make(numbers):
        blobs = [
            centres[c] + rng.normal(size=(n, width)) for c, n in enumerate(numbers)
        ]
        return np.concatenate(blobs)

    parts = {}
    for part, numbers in {"train": counts, "test": [5] * len(counts)}.items():
        labels = np.repeat(np.arange(len(counts)), numbers)
        parts[part] = Split(make(numbers).astype(np.float32), labels.astype(np.int64))
    return Dataset.of(name, [f"class {c}" for c in range(len(counts))], parts)


def some_digits(every):
    """A part of digits-lt: images."""
    data = rfdlc.load("digits-lt")
    return Dataset.of(
        "few",
        data.classes.names,
        {"train": data.train.take(np.arange(0, len(data.train), every))},
    )


class Double:
    """The same batches in float64, where rounding cannot grow into a difference."""

    def __init__(self, loader):
        self.loader, self.steps = loader, loader.steps

    def epoch(self, epoch, **options):
        return (
            (inputs.double(), targets)
            for inputs, targets in self.loader.epoch(epoch, **options)
        )


def trained(data, seeds, method="rf-dlc", double=False, **settings):
    _, chosen = resolve(method, data.name, settings)
    net = method_net(METHODS[method], chosen, data.input_shape, data.classes, seeds)
    parts = build_stages(METHODS[method], chosen, data, seeds, CPU)
    if double:
        net.double()
        for part in parts:
            part.loader, part.losses = Double(part.loader), part.losses.double()
    return net, list(epochs(net, parts, {}))


@pytest.mark.parametrize(
    "settings",
    [
        {"mixup": 0.4},
        {
            "mixup": 0.0,
            "cutmix": 1.0,
            "clip": 0.5,
            "optimiser": "adamw",
            "learning_rate": 0.01,
        },
        {"repulsion": "predictions", "average": 0.9, "prior_tau": (0, 1, 2)},
    ],
)
def test_a_run_alone_equals_the_run_in_a_stack(settings):
    data = some_digits(8)
    common = {
        "epochs": 2,
        "batch_size": 32,
        "backbone": "resnet8",
        "shared_stages": 1,
        "augment": "crop-flip",
    }
    alone, first = trained(data, (7,), double=True, **common, **settings)
    stacked, second = trained(data, (3, 7), double=True, **common, **settings)
    assert first[-1].losses[0] == pytest.approx(second[-1].losses[1], rel=1e-6)
    for one, two in zip(
        alone.state_dict().values(), stacked.state_dict().values(), strict=True
    ):
        assert torch.allclose(one, two.chunk(2)[1], atol=1e-8)


def test_one_seed_gives_one_result_bit_for_bit():
    data = some_digits(4)
    common = {
        "epochs": 2,
        "particles": 2,
        "backbone": "resnet8",
        "augment": "crop-flip-rotate",
        "mixup": 0.4,
    }
    first, _ = trained(data, (1,), **common)
    second, _ = trained(data, (1,), **common)
    other, _ = trained(data, (2,), **common)
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


def test_training_learns():
    data = features([60, 20, 8])
    net, done = trained(data, (0,), epochs=30, batch_size=32, learning_rate=0.05)
    logits = split_outputs(net, data.test, data.normalisation, TrainConfig(), CPU)[0][
        0
    ].mean(0)
    assert (logits.argmax(-1).numpy() == data.test.labels).mean() > 0.8
    assert done[-1].losses[0] < done[0].losses[0]


@pytest.mark.parametrize(
    ("counts", "settings"),
    [
        ((30, 4), {}),  # two classes
        ((30, 10, 1), {}),  # a class with one sample
        (
            (30, 10, 4),
            {"particles": 1, "prior_tau": (1.0,)},
        ),  # one particle: no repulsion
        ((30, 10, 4), {"batch_size": 1}),  # batches of one class
        ((33, 10, 4), {"batch_size": 23}),  # a last batch of one sample
        (
            (30, 10, 4),
            {
                "weights": "log",
                "margin": 0.5,
                "utility": "tail-sensitive",
                "utility_form": "bounded",
            },
        ),
        (
            (30, 10, 4),
            {
                "head": "linear",
                "sampling": "balanced",
                "schedule": "constant",
                "deferred": 0.5,
            },
        ),
    ],
)
def test_odd_data_train(counts, settings):
    net, done = trained(features(counts), (0,), epochs=2, widths=(8,), **settings)
    assert np.isfinite(done[-1].losses).all()
    assert all(p.isfinite().all() for p in net.parameters())


def test_images_train_with_batches_of_one():
    _, done = trained(some_digits(40), (0,), epochs=1, backbone="resnet8", batch_size=1)
    assert np.isfinite(done[-1].losses).all()


def test_a_class_without_samples_is_no_division_by_zero():
    data = features([20, 5])
    named = Dataset.of("absent", ["a", "b", "c"], {"train": data.train})
    _, done = trained(
        named,
        (0,),
        "rf-dlc-paper",
        epochs=2,
        widths=(8,),
        utility="tail-sensitive",
        alpha=1.0,
    )
    assert np.isfinite(done[-1].losses).all()


def test_a_loss_that_is_no_number_stops_with_step_and_cause():
    with pytest.raises(
        TrainingStopped, match=r"since step \d+ of \d+ in epoch \d.*learning rate"
    ):
        trained(
            features([40, 9]),
            (0,),
            epochs=3,
            widths=(8,),
            batch_size=16,
            head="linear",
            learning_rate=1e30,
        )
    poisoned = features([40, 9])
    poisoned.train.inputs[:] = np.nan
    with pytest.raises(TrainingStopped, match=r"since step 1 of .* inputs hold NaN"):
        trained(poisoned, (0,), epochs=1, widths=(8,))


def test_what_is_deferred_changes_nothing_before():
    data, common = (
        features([40, 9, 3]),
        {"epochs": 4, "widths": (8,), "weights": "linear", "mixup": 0.0},
    )
    plain, _ = trained(data, (0,), **common, deferred=1.0)
    late, _ = trained(data, (0,), **common, deferred=0.5)
    never, _ = trained(data, (0,), **{**common, "weights": "constant"})
    assert torch.equal(plain.head.weight, never.head.weight)
    assert not torch.equal(plain.head.weight, late.head.weight)


def test_optimisers_equal_torch():
    start = [torch.randn(4, 3), torch.randn(5)]
    for ours, theirs in (
        (
            lambda p: Sgd(p, [0.01], 0.9),
            lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.01, nesterov=True),
        ),
        (
            lambda p: AdamW(p, [0.01]),
            lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.01),
        ),
    ):
        mine, reference = (
            [p.clone() for p in start],
            [nn.Parameter(p.clone()) for p in start],
        )
        optimiser, expected = ours(mine), theirs(reference)
        for i in range(4):
            gradients = [torch.full_like(p, 0.3 * i - 0.4) * p for p in start]
            for p, g in zip(reference, gradients, strict=True):
                p.grad = g.clone()
            optimiser.step(mine, gradients, torch.tensor([0.1]))
            expected.step()
        assert all(
            torch.allclose(a, b, atol=1e-6)
            for a, b in zip(mine, reference, strict=True)
        )


@pytest.mark.parametrize(
    ("ours", "theirs"), [(Sgd, torch.optim.SGD), (AdamW, torch.optim.AdamW)]
)
def test_factors_of_the_learning_rate_are_groups_of_torch(ours, theirs):
    start, factors = (
        [torch.randn(2, 3), torch.randn(2, 1), torch.randn(2, 4)],
        [0.1, 1.0, 0.1],
    )
    mine, reference = (
        [p.clone() for p in start],
        [nn.Parameter(p.clone()) for p in start],
    )
    options = {"momentum": 0.9, "nesterov": True} if ours is Sgd else {}
    groups = [
        {"params": [p], "lr": 0.2 * f} for p, f in zip(reference, factors, strict=True)
    ]
    optimiser, expected = (
        ours(mine, [0.01, 0.01], factors=factors),
        theirs(groups, weight_decay=0.01, **options),
    )
    for i in range(3):
        gradients = [(0.3 * i - 0.4) * p for p in start]
        for p, g in zip(reference, gradients, strict=True):
            p.grad = g.clone()
        optimiser.step(mine, gradients, torch.tensor([0.2, 0.2]))
        expected.step()
    assert all(
        torch.allclose(a, b, atol=1e-6) for a, b in zip(mine, reference, strict=True)
    )


def test_factors_fall_from_the_head_to_the_first_stage():
    changes = {
        "widths": (4, 6),
        "shared_stages": 0,
        "backbone_rate": 0.5,
        "layer_decay": 0.1,
    }
    data, (_, settings) = features([20, 8]), resolve("rf-dlc", "blobs", changes)
    net = method_net(METHODS["rf-dlc"], settings, data.input_shape, data.classes, (0,))
    (part,) = build_stages(METHODS["rf-dlc"], settings, data, (0,), CPU)
    step = Step(net, part.losses, settings)
    found = dict(zip(step.parameters, step.optimiser.factors, strict=True))
    expected = {"branches.0": 0.05, "branches.1": 0.5, "head": 1.0}
    for name, parameter in net.named_parameters():
        assert found[parameter] == pytest.approx(
            next(f for part, f in expected.items() if name.startswith(part))
        )


def test_clipping_is_by_run():
    gradients = [torch.tensor([[3.0], [0.1]]), torch.tensor([[4.0], [0.0]])]
    clip(gradients, 1.0, runs=2)
    assert torch.cat(gradients, 1)[0].norm() == pytest.approx(1.0, rel=1e-4)
    assert torch.cat(gradients, 1)[1].tolist() == pytest.approx([0.1, 0.0])


def test_a_step_keeps_the_moving_average():
    data = features([20, 8])
    _, settings = resolve(
        "rf-dlc",
        "blobs",
        {"average": 0.5, "widths": (4,), "epochs": 1, "batch_size": 64},
    )
    net = method_net(METHODS["rf-dlc"], settings, data.input_shape, data.classes, (0,))
    before = [p.detach().clone() for p in net.parameters()]
    (part,) = build_stages(METHODS["rf-dlc"], settings, data, (0,), CPU)
    step = Step(net, part.losses, settings)
    step.begin_epoch(1, 0.1)
    inputs, targets = next(iter(part.loader.epoch(1)))
    step.compute(inputs, targets, torch.full((1, 3), 0.5))
    for start, now, mean in zip(before, net.parameters(), step.average, strict=True):
        assert torch.allclose(mean, (start + now) / 2, atol=1e-6)


def test_training_utilities(tmp_path):
    classes = rfdlc.Classes.from_counts([9, 5, 5])
    matrix = training_utility(
        TrainConfig(utility="tail-sensitive", penalty=-0.5), classes
    )
    assert matrix.tolist() == [[0, 0, 0], [-0.5, 0, 0], [-0.5, 0, 0]]
    by_rank = training_utility(TrainConfig(utility="tail-sensitive-by-rank"), classes)
    assert by_rank.tolist() == [[0, 0, 0], [-1, 0, 0], [-1, -1, 0]]
    rfdlc.Utility.one_hot(classes).to_csv(tmp_path / "u.csv")
    assert (
        training_utility(TrainConfig(utility=str(tmp_path / "u.csv")), classes).tolist()
        == np.eye(3).tolist()
    )
    with pytest.raises(InputError, match="neither a file"):
        training_utility(TrainConfig(utility="nothing.csv"), classes)


def test_devices():
    assert choose_device("cpu").type == "cpu"
    with pytest.raises(InputError, match="not a device"):
        choose_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="needs a GPU"):
            choose_device("cuda")


def test_held_out_metrics_as_if_balanced():
    labels = np.array([0] * 8 + [1] * 2)
    assert np.bincount(labels[balanced_positions(labels)]).tolist() == [32, 32]
    logits = np.zeros((2, 10, 2), dtype=np.float32)
    logits[:, :, 0] = 5.0
    logits[1, 9, 1] = 20.0
    predictions = rfdlc.Predictions(
        logits=logits, targets=labels, classes=rfdlc.Classes.from_counts([8, 2])
    )
    decider = rfdlc.Decider(
        rfdlc.Utility.one_hot(predictions.classes), train_prior="uniform"
    )
    assert evaluate_balanced(predictions, decider).accuracy == pytest.approx(0.75)
    measured = diversity(logits)
    assert measured["disagreement"] == pytest.approx(0.1)
    assert 0 < measured["mutual_information"] < 0.1
    assert diversity(logits[:1]) == {}  # one network cannot disagree


def test_a_captured_step_equals_the_eager_one(monkeypatch):
    """The bookkeeping around capture, without a GPU: buffers filled, warm-up steps
    undone, shapes kept apart.
    """
    data, graphs = features([40, 9, 4]), []
    _, settings = resolve(
        "rf-dlc",
        "blobs",
        {"epochs": 2, "widths": (8,), "batch_size": 16, "average": 0.9},
    )

    def capture_without_a_gpu(function, warm_up, pool):
        for _ in range(warm_up):
            function()
        graphs.append(
            SimpleNamespace(replay=function)
        )  # a captured call computes nothing by itself
        return graphs[-1], None

    results = []
    for capture in (False, True):
        net = method_net(
            METHODS["rf-dlc"], settings, data.input_shape, data.classes, (0, 1)
        )
        (part,) = build_stages(METHODS["rf-dlc"], settings, data, (0, 1), CPU)
        step = Step(net, part.losses, settings)
        execution = Execution(step)
        if capture:
            monkeypatch.setattr(
                "rfdlc.training.execution.capture", capture_without_a_gpu
            )
            execution.capture = True
        for epoch in (1, 2):
            step.begin_epoch(epoch, 0.1)
            for inputs, targets in part.loader.epoch(epoch):
                execution(inputs, targets, torch.full((2, 3), 0.7))
        results.append([*net.parameters(), *step.average, step.total, step.good])
    assert len(graphs) == 2  # full batches, and the last one
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

"""Two gloo processes equal one with the same global batch; parts of a batch add up;
evaluation counts each sample once.

`torchrun` itself is in commands.py.
"""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

import rfdlc
from rfdlc.data.dataset import Dataset, Split
from rfdlc.errors import InputError
from rfdlc.probabilities.classes import as_classes
from rfdlc.training import distributed, loop, step
from rfdlc.training.building import method_net
from rfdlc.training.config import TrainConfig
from rfdlc.training.distributed import SINGLE, ProcessGroup, process_group
from rfdlc.training.loop import build_stages, epochs
from rfdlc.training.losses import RunLosses, mean_loss
from rfdlc.training.losses.terms import Routing, SelfDistillation
from rfdlc.training.methods import METHODS, Method, resolve
from rfdlc.training.networks.particles import place
from rfdlc.training.networks.stack import BatchNorm, share_statistics
from rfdlc.training.sharding import ShardedCopy
from rfdlc.training.train import RunSpec, train_many

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


def blobs(counts=(60, 29, 12, 6), width=6):
    """107 samples: with batches of 16 the last holds 11, which two processes cannot
    share evenly.
    """
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(len(counts)), counts)
    inputs = 3 * rng.normal(size=(len(counts), width))[labels] + rng.normal(
        size=(len(labels), width)
    )
    return Dataset.of(
        "blobs", list("abcd"), {"train": Split(inputs.astype(np.float32), labels)}
    )


def pictures():
    data = rfdlc.load("digits-lt")
    return Dataset.of(
        "few",
        data.classes.names,
        {"train": data.train.take(np.arange(0, len(data.train), 12))},
    )


class Small(torch.nn.Module):
    """A network of the user's own, with weights that it does not use."""

    def __init__(self):
        super().__init__()
        self.first, self.unused, self.norm = (
            torch.nn.Linear(6, 16),
            torch.nn.Linear(3, 3),
            torch.nn.LayerNorm(16),
        )

    def forward(self, inputs):
        return self.norm(self.first(inputs)).relu()


def trained(
    data,
    method="cb",
    group=SINGLE,
    seeds=(3,),
    network=None,
    channels_last=False,
    **changes,
):
    """Losses of the epochs and the state after three, of 7 steps each."""
    defaults = {
        "epochs": 3,
        "batch_size": 16,
        "widths": (16,),
        "warmup": 1,
        "learning_rate": 0.02,
        "mixup": 0.0,
    }
    row, settings = resolve(method, data.name, {**defaults, **changes})
    net = place(
        method_net(row, settings, data.input_shape, data.classes, seeds, network),
        CPU,
        channels_last,
    )
    for module in (
        (net, *net.single) if settings.batch_norm == "sync" and not group.single else ()
    ):
        share_statistics(module, group)
    parts = build_stages(row, settings, data, seeds, CPU, group)
    losses = [epoch.losses[0] for epoch in epochs(net, parts, {}, 0, group)]
    return losses, {name: tensor.clone() for name, tensor in net.state_dict().items()}


def gap(one, two):
    """The largest difference of losses and weights."""
    (losses, state), (other_losses, other_state) = one, two
    differences = [np.abs(np.array(losses) - other_losses).max()]
    return max(
        *differences,
        *(float((state[name] - other_state[name]).abs().max()) for name in state),
    )


UTILITY = {"utility": "tail-sensitive", "alpha": 2.0}
CASES = {
    "weighted": ("cb", {}),
    "weighted, clipped, averaged": (
        "cb-focal",
        {"clip": 0.1, "average": 0.9, "optimiser": "adamw"},
    ),
    "deferred": ("ldam-drw", {"deferred": 0.4}),
    "adjusted": ("la", {"sampling": "sqrt"}),
    "balanced softmax": ("balanced-softmax", {}),
    "repulsion and utility": ("rf-dlc", {**UTILITY, "weights": "linear"}),
    "bounded utility": ("rf-dlc", {**UTILITY, "utility_form": "bounded"}),
    "the paper": ("rf-dlc-paper", {**UTILITY, "deferred": 0.4}),
    "repulsion of predictions": ("repulsive-predictions", {}),
    "experts, then a router": ("ride", {"deferred": 0.4}),
    "evidential experts": ("tlc", {"deferred": 0.4, "head": "linear"}),
    "nested experts": ("ace", {}),
    "averages, then draws": ("srepr", {}),
}


def test_two_processes_equal_one_with_the_same_batch(two_processes, monkeypatch):
    """As a stack, whose gradients are summed, and as modules, whose gradients are
    summed by DDP: 21 steps.
    """
    data, modules = blobs(), {"network": Small, "backbone": "own"}
    every = {
        (name, str(own)): (method, {**changes, **own})
        for name, (method, changes) in CASES.items()
        for own in ({}, modules)
    }
    every["as modules, in micro-batches"] = "rf-dlc", {**modules, "accumulate": 3}
    every["a stack under DDP"] = "rf-dlc", {"parallel": "ddp"}
    for name in (
        "deferred",
        "the paper",
        "experts, then a router",
    ):  # with weights that are sharded
        every[f"{name}, sharded"] = (
            CASES[name][0],
            {**CASES[name][1], **modules, "parallel": "fsdp"},
        )

    def work():
        replicas = []
        monkeypatch.setattr(
            step,
            "overlapped",
            lambda *given: replicas.append(given) or distributed.overlapped(*given),
        )
        with process_group() as group:
            assert group.world_size == 2
            results, counts = {}, {}
            for name, (method, changes) in every.items():
                before = len(replicas)
                results[name] = trained(data, method, group, **changes)
                counts[name] = [unused for _, _, unused in replicas[before:]]
            return results, counts

    (first, counts), (second, _) = two_processes(work)
    for name, (method, changes) in every.items():
        alone = trained(data, method, **changes)
        assert alone[0][0] != alone[0][-1]
        assert gap(first[name], second[name]) == 0, name
        assert gap(alone, first[name]) < 1e-5, name
        overlaps = {"ddp": {False}, "fsdp": set()}.get(
            changes.get("parallel"), {True} if "network" in changes else set()
        )
        assert set(counts[name]) == overlaps, name


def test_gradients_are_summed_during_the_backward_pass(two_processes, monkeypatch):
    """A trace of two ResNet-8 that are computed separately: with DDP, and for
    comparison without it.
    """
    data, network = (
        pictures(),
        {"backbone": "resnet8", "execution": "separate", "particles": 2, "epochs": 1},
    )
    monkeypatch.setattr(
        distributed, "BUCKET", 0.05
    )  # megabytes: a small network has several buckets, too

    def work():
        found = {}
        with process_group() as group:
            for how in ("auto", "sum"):
                with torch.profiler.profile(
                    activities=[torch.profiler.ProfilerActivity.CPU]
                ) as trace:
                    found[how] = [trained(data, "la", group, parallel=how, **network)]
                found[how].append(hidden(trace.events()))
            return found

    first, _ = two_processes(work)
    assert gap(first["auto"][0], first["sum"][0]) < 1e-5
    assert first["auto"][1] >= 2
    assert first["sum"][1] == 0


def hidden(events):
    """All-reductions that are started while a gradient is accumulated: within the
    backward pass, whatever the load.
    """
    spans = {
        "c10d::allreduce_": [],
        "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad": [],
    }
    for event in events:
        if event.name in spans:
            spans[event.name].append((event.time_range.start, event.time_range.end))
    reductions, accumulated = spans.values()
    return sum(
        any(first <= start <= last for first, last in accumulated)
        for start, _ in reductions
    )


def test_batch_norm_needs_the_statistics_of_the_whole_batch(two_processes):
    data, network = (
        pictures(),
        {"backbone": "resnet8", "learning_rate": 0.005, "epochs": 2},
    )

    def work():
        with process_group() as group:
            return {
                kind: trained(data, "la", group, batch_norm=kind, **network)
                for kind in ("sync", "local")
            }

    first, second = two_processes(work)
    alone = trained(data, "la", **network)
    assert (
        gap(first["sync"], second["sync"]) == gap(first["local"], second["local"]) == 0
    )
    assert gap(alone, first["sync"]) < 1e-5
    assert gap(alone, first["local"]) > 1e-2


def test_shared_statistics_are_those_of_torch():
    x = torch.randn(5, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    results = []
    for shared in (None, SINGLE):
        norm = BatchNorm(1, 3).double()
        norm.shared = shared
        reset = [torch.tensor([0.5, -1.0, 2.0]), torch.tensor([0.1, 0.0, -0.3])]
        norm.load_state_dict({"weight": reset[0], "bias": reset[1]}, strict=False)
        y = norm(x)
        results.append(
            [
                y,
                norm.mean,
                norm.variance,
                *torch.autograd.grad((y**3).sum(), [x, norm.weight, norm.bias]),
            ]
        )
    for theirs, ours in zip(*results, strict=True):
        assert torch.allclose(theirs, ours, rtol=1e-10, atol=1e-12)


# -- a loss of the user's own
# --------------------------------------------------------------------------------------


def smoothed(logits, targets, epoch):
    """Values per particle and sample, as the documentation has it."""
    log_p = logits.log_softmax(-1)  # (M, B, C)
    true = log_p.gather(-1, targets.expand(len(log_p), -1)[..., None])[..., 0]
    return -0.9 * true - 0.1 * log_p.mean(-1)


class Weighted(torch.nn.Module):
    """Two terms, one of them with weights, of a sum over particles."""

    def __init__(self, classes):
        super().__init__()
        self.register_buffer(
            "weights", 1 / torch.tensor(classes.counts, dtype=torch.float32)
        )

    def forward(self, logits, targets, epoch):
        values = smoothed(logits, targets, epoch)
        return [(values.sum(0), self.weights[targets]), 0.1 * values]


OWN_LOSSES = {
    "smoothed": Method(
        "a function",
        "here",
        {"particles": 2},
        loss=lambda config, classes, utility: smoothed,
    ),
    "weighted": Method(
        "a module",
        "here",
        {"particles": 2},
        loss=lambda config, classes, utility: Weighted(classes),
    ),
}


@pytest.mark.parametrize("name", OWN_LOSSES)
def test_a_loss_of_ones_own_plain_accumulated_and_on_two_processes(
    name, two_processes, monkeypatch
):
    monkeypatch.setitem(METHODS, name, OWN_LOSSES[name])
    data = blobs()

    def work():
        with process_group() as group:
            return [
                trained(data, name, group, **changes)
                for changes in ({}, {"mixup": 0.4}, {"accumulate": 3})
            ]

    first, second = two_processes(work)
    whole, mixed = trained(data, name), trained(data, name, mixup=0.4, accumulate=2)
    assert whole[0][0] > whole[0][-1]
    assert gap(whole, trained(data, name, accumulate=4)) < 1e-5
    assert max(map(gap, first, second)) == 0
    assert gap(whole, first[0]) < 1e-5
    assert gap(whole, first[2]) < 1e-5
    assert gap(mixed, trained(data, name, mixup=0.4)) < 1e-5


def test_a_loss_of_ones_own_by_torchs_own_mean():
    """One step equals cross-entropy with label smoothing, reduced by torch."""
    logits, targets = torch.randn(2, 7, 4), torch.tensor([0, 0, 0, 0, 1, 0, 2])
    expected = [
        functional.cross_entropy(own, targets, label_smoothing=0.1) for own in logits
    ]
    found = RunLosses([smoothed])(logits[None], targets[None], torch.tensor(1.0))
    assert torch.allclose(found, sum(expected)[None] / 2)
    weights = torch.rand(4)
    values = torch.stack(
        [functional.cross_entropy(own, targets, reduction="none") for own in logits]
    )
    expected = [functional.cross_entropy(own, targets, weights) for own in logits]
    assert torch.allclose(mean_loss((values, weights[targets])), sum(expected) / 2)


# -- parts
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", ["cb", "ldam-drw", "rf-dlc", "rf-dlc-paper", "ride", "ace", "srepr"]
)
def test_losses_of_micro_batches_add_up(method):
    classes = rfdlc.Classes.from_counts([50, 9, 3])
    _, settings = resolve(
        method, "", {"epochs": 4, "utility": "tail-sensitive", "particles": 2}
    )
    matrix = loop.training_utility(settings, classes)
    row, epoch = METHODS[method], torch.tensor(4)
    generator = torch.Generator().manual_seed(0)
    target = torch.tensor([[0, 0, 0, 0, 1, 0, 2]])
    for make in [row.loss, *(stage.loss for stage in row.stages if stage.loss)]:
        own = make(settings, classes, matrix)
        loss = RunLosses([own])
        columns = 4 if isinstance(own, Routing) else 3
        logits = torch.randn(
            1,
            4 if isinstance(own, SelfDistillation) else 2,
            7,
            columns,
            generator=generator,
        )
        batch = loss.global_batch(logits[:, :, :4], target, epoch, 2)
        assert batch.size == 7
        cuts = (slice(0, 4), slice(4, 7))
        parts = [loss(logits[:, :, cut], target[:, cut], epoch, batch) for cut in cuts]
        assert float(sum(parts)) == pytest.approx(
            float(loss(logits, target, epoch)), rel=1e-5
        )
        alone = sum(loss(logits[:, :, cut], target[:, cut], epoch) for cut in cuts) / 2
        assert float(sum(parts)) != pytest.approx(
            float(alone), rel=1e-3
        )  # a mean of means is something else


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("cb", {"mixup": 0.4}),
        ("ldam-drw", {"deferred": 0.4}),
        ("rf-dlc", {**UTILITY, "weights": "linear", "mixup": 0.4}),
        ("repulsive-predictions", {}),
    ],
)
@pytest.mark.parametrize("seeds", [(3,), (3, 5)])
def test_accumulated_parts_equal_the_whole_batch(method, changes, seeds):
    one = trained(blobs(), method, seeds=seeds, **changes)
    assert (
        gap(one, trained(blobs(), method, seeds=seeds, **changes, accumulate=5)) < 1e-5
    )


def test_two_processes_accumulate(two_processes):
    """The last batch gives 6 samples to one process and 5 to the other: both must
    compute as many parts.
    """

    def work():
        with process_group() as group:
            return [
                trained(blobs(), "rf-dlc", group, accumulate=6),
                trained(
                    pictures(),
                    "tlc",
                    group,
                    accumulate=8,
                    batch_norm="sync",
                    backbone="resnet8",
                    epochs=1,
                ),
            ]

    first, second = two_processes(work)
    assert gap(trained(blobs(), "rf-dlc"), first[0]) < 1e-5
    assert gap(first[1], second[1]) == 0


def kept_for_backward(**changes):
    """Numbers that a forward pass leaves for the backward pass."""
    classes, settings, kept = (
        as_classes(3),
        TrainConfig(backbone="resnet8", **changes),
        [],
    )
    net = method_net(METHODS["ce"], settings, (1, 8, 8), classes, (0,))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x.numel()) or x, lambda x: x
    ):
        net.particle_logits(torch.zeros(1, 4, 1, 8, 8))
    return sum(kept)


def test_recomputed_activations_change_nothing_but_memory():
    data, network = (
        pictures(),
        {"backbone": "resnet8", "epochs": 1, "particles": 2, "shared_stages": 1},
    )
    results = [
        trained(data, "rf-dlc", checkpoint_activations=again, **network)
        for again in (False, True)
    ]
    assert (
        gap(*results) == 0
    )  # statistics of batch norm too, which count every batch once
    usual, less = (
        kept_for_backward(checkpoint_activations=False),
        kept_for_backward(checkpoint_activations=True),
    )
    assert less < 0.3 * usual


# -- run folders
# --------------------------------------------------------------------------------------

SMALL = {
    "epochs": 2,
    "widths": (16,),
    "evaluate_every": 1,
    "calibration": "temperature",
}


def odd():
    """449 test samples, which two processes cannot share evenly, in two batches."""
    data = rfdlc.load("digits-lt")
    parts = {"train": data.train, "test": data.test.take(np.arange(449))}
    return Dataset.of(
        "digits-lt", data.classes.names, parts, normalisation=data.normalisation
    )


def test_evaluation_by_two_processes_is_that_of_one(tmp_path, two_processes):
    data, out = odd(), tmp_path / "two"

    def work():
        if os.environ["RANK"] == "1":  # writes nothing
            os.replace = Path.mkdir = None
        model = rfdlc.train(data, "rf-dlc", out, **SMALL)
        return model.predict(
            data.test.inputs
        ).scores.values  # every process has the model, and predicts by itself

    first, second = two_processes(work)
    assert np.array_equal(first, second)
    saved, model = (
        rfdlc.Predictions.load(out / "predictions.npz"),
        rfdlc.Model.load(out),
    )
    assert len(saved) == 449
    assert np.array_equal(saved.targets, data.test.labels)
    assert np.array_equal(
        saved.scores.values, model.predict(data.test).scores.values
    )  # bit for bit
    one = rfdlc.train(data, "rf-dlc", tmp_path / "one", **SMALL)
    held = [
        rfdlc.Predictions.load(path / "held-out.npz").scores.values
        for path in (out, one.path)
    ]
    assert np.allclose(*held, atol=1e-4)
    metrics = [
        json.loads((path / "metrics.json").read_text()) for path in (out, one.path)
    ]
    assert metrics[0]["test"]["accuracy"] == metrics[1]["test"]["accuracy"]


def test_resume_and_fork_by_two_processes(tmp_path, two_processes):
    settings = {**SMALL, "epochs": 4, "keep": (0.5,)}
    whole = rfdlc.train("digits-lt", "ce", tmp_path / "whole", **settings)

    def work():
        rfdlc.fork(whole.path, tmp_path / "forked", at=2)
        return rfdlc.resume(tmp_path / "forked").path

    two_processes(work)
    forked = rfdlc.Model.load(tmp_path / "forked").net.state_dict()
    for name, tensor in whole.net.state_dict().items():
        assert torch.allclose(tensor, forked[name], atol=1e-5)


def test_one_group_after_another(two_processes):
    """At the same address, although rank 0, who keeps the store, leaves the first group
    late.
    """

    def work():
        with process_group() as group:
            time.sleep(group.main)
        with process_group() as group:
            return group.all_sum(torch.ones(1)).item()

    assert two_processes(work) == [2, 2]


def test_sharded_weights_are_whole_in_the_folder(tmp_path, two_processes):
    """Half of the weights, gradients and momenta on each rank; a fork continues from
    their checkpoint.
    """
    settings = {
        **SMALL,
        "epochs": 4,
        "keep": (0.5,),
        "average": 0.9,
        "parallel": "fsdp",
    }

    def work():
        with process_group() as group:
            net = method_net(
                METHODS["ce"], TrainConfig(widths=(16,)), (64,), as_classes(10), (0,)
            )
            shards = ShardedCopy(net, group)
            sizes = [
                sum(p.numel() for p in own)
                for own in (shards.local, net.parameters(), net.head.parameters())
            ]
            rfdlc.train("digits-lt", "ce", tmp_path / "whole", **settings)
            rfdlc.fork(tmp_path / "whole", tmp_path / "forked", at=2)
        return sizes

    for local, whole, head in two_processes(work):
        assert local == (whole - head) / 2 + head
    alone = rfdlc.train(
        "digits-lt", "ce", tmp_path / "alone", **settings
    ).net.state_dict()
    for name in ("whole", "forked"):
        for key, tensor in rfdlc.Model.load(tmp_path / name).net.state_dict().items():
            assert torch.allclose(tensor, alone[key], atol=1e-5)
    for method, changes in (
        ("ce", {"clip": 1.0}),
        ("ce", {"compile": True}),
        ("srepr", {}),
    ):
        with pytest.raises(
            InputError, match="parallel=fsdp is not for clipped gradients"
        ):
            rfdlc.train(
                "digits-lt", method, tmp_path / "no", parallel="fsdp", **changes
            )


def test_sharded_convolutions_with_channels_last(two_processes):
    """Their memory layout on a GPU, which FSDP2 does not take."""
    network = {
        "backbone": "resnet8",
        "particles": 2,
        "epochs": 1,
        "channels_last": True,
    }

    def work():
        with process_group() as group:
            return trained(
                pictures(), "la", group, parallel="fsdp", batch_norm="sync", **network
            )

    assert gap(trained(pictures(), "la", **network), two_processes(work)[0]) < 1e-5


def test_what_is_wrong_is_said_once(tmp_path, two_processes):
    """By process 0, whichever found it; nobody waits for ever."""
    data = rfdlc.load("digits-lt")

    def work(**changes):
        return lambda: rfdlc.train(data, "ce", tmp_path / "run", **changes)

    def one_is_wrong():
        return work(method_of_rank_1=1)() if os.environ["RANK"] == "1" else work()()

    assert two_processes(work(batch_size=63)) == [
        (
            "batch_size 63 cannot be divided among 2 processes: the global batch must"
            " be a multiple of 2, for example 62"
        ),
        "exit 2",
    ]
    told, ended = two_processes(one_is_wrong)
    assert told.startswith("process 1: setting 'method_of_rank_1' is unknown")
    assert ended == "exit 2"


def test_processes_that_disagree_do_not_train(tmp_path, two_processes):
    """Other settings would train silently, other epochs would never end."""
    data = blobs()
    others = replace(data, train=data.train.take(np.arange(len(data.train))[::-1]))

    def work():
        first = os.environ["RANK"] == "0"
        given = (
            {"epochs": 2, "learning_rate": 0.1}
            if first
            else {"epochs": 3, "learning_rate": 0.2}
        )
        return rfdlc.train(
            data if first else others, "ce", tmp_path / "run", widths=(4,), **given
        )

    told, ended = two_processes(work)
    assert told.startswith(
        "the processes were started with different learning_rate (0.1, 0.2), epochs (2,"
        " 3), data ({"
    )
    assert told.endswith("give all of them the same command and data")
    assert ended == "exit 2"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ProcessGroup(0, 4).shard_size(2, 1),
            "cannot be divided among 4 .* multiple of 4, for example 4",
        ),
        (
            lambda: ProcessGroup(0, 2).shard_size(8, 5),
            "accumulate 5 is more than the 4 samples",
        ),
        (
            lambda: ProcessGroup(0, 2, 0, 2).local_device(torch.device("cuda:1")),
            "device=cuda:1 would be shared by 2 processes",
        ),
    ],
)
def test_what_processes_cannot_do(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_many_trainings_are_for_one_process(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(InputError, match="one process, but 2 were started"):
        train_many("digits-lt", [RunSpec(tmp_path / "a")])


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        InputError,
        match="2 processes on this machine, but 1 GPUs: start one process per GPU",
    ):
        ProcessGroup(0, 2, 0, 2).local_device(torch.device("cuda"))


@pytest.mark.parametrize(("gpus", "backend"), [(2, "cpu:gloo,cuda:nccl"), (0, "gloo")])
def test_gpus_are_joined_by_nccl_and_cpus_by_gloo(monkeypatch, gpus, backend):
    """No machine of ours has two GPUs: the meeting is a stand-in, all around it is what
    they would run.
    """
    for name, value in {
        "RANK": 1,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": 1,
        "LOCAL_WORLD_SIZE": 2,
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    taken, met = [], []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(
        torch.distributed, "destroy_process_group", lambda: met.append("parted")
    )
    monkeypatch.setattr(
        "rfdlc.training.distributed.rendezvous", lambda *how: met.append(how)
    )
    with process_group() as group:
        assert met == [(backend, 1, 2)]
        if gpus:
            assert group.local_device(torch.device("cuda")) == torch.device("cuda", 1)
            assert taken == [1]
        else:
            assert group.local_device(CPU) == CPU
    assert met[1:] == ["parted"]

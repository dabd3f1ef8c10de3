"""The training loop: R runs of M particles as one stack, epoch by epoch.

`epochs` is a generator: it yields after each epoch, with the networks as they then are,
and whoever drives it evaluates, writes checkpoints, or stops. Order, augmentation and
mixup are functions of (seed, epoch) alone, so a training continued from the end of any
epoch is the training that was never interrupted.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rfdlc.data.augment import AUGMENTATIONS, Augment, draw_shares
from rfdlc.data.dataset import Dataset, Normalisation, Split
from rfdlc.data.images import ImageFiles
from rfdlc.data.loader import ResidentLoader, normaliser, seeded, shard
from rfdlc.data.streamed import StreamedLoader, View
from rfdlc.decisions.utility import Utility
from rfdlc.errors import InputError, expect, listing
from rfdlc.probabilities.classes import Classes, Indices
from rfdlc.training.config import TrainConfig
from rfdlc.training.distributed import SINGLE, ProcessGroup
from rfdlc.training.execution import Execution, seed_all, torch_settings
from rfdlc.training.factories import Matrix
from rfdlc.training.familiarity import first_stages
from rfdlc.training.losses import Loss, RunLosses
from rfdlc.training.methods import Method, Stage
from rfdlc.training.networks.backbones import Whitening
from rfdlc.training.networks.particles import ParticleNet
from rfdlc.training.optimisation import COLLECTED_FROM, rate, reinitialize_head
from rfdlc.training.step import Step, reduced

EVALUATED, ROWS = (
    256,
    4096,
)  # samples that are evaluated together: images, and rows of features
WHITENED_AT_ONCE = 2**29  # values of a training split
SMALLEST_CROPPED = 16  # pixels: smaller images are cropped by less than others
# a stream of random numbers beside those of order, augmentation, mixing, sampled
# weights and dropout
SHARES = 5


class TrainingStopped(RuntimeError):
    """The loss of a run is no longer a number; `path` is its folder, where it
    has one.
    """

    def __init__(self, message: str, run: int = 0, path: Path | None = None) -> None:
        super().__init__(message)
        self.run, self.path = run, path


class PreparedStage:
    """A stage of a stack of runs: what it trains on and for, from the epoch after
    `start` to `end`.

    Every run has a method, a config, classes as counted on its samples, and `positions`
    of these in the training split.
    """

    def __init__(
        self,
        number: int,
        runs: Sequence[tuple[Method, TrainConfig, Classes]],
        data: Dataset,
        device: torch.device,
        group: ProcessGroup = SINGLE,
        positions: Sequence[Indices] = (),
    ) -> None:
        self.stages = [method.stages[number] for method, _, _ in runs]
        both = list(zip(runs, self.stages, strict=True))
        self.each = [config.replace(**stage.settings) for (_, config, _), stage in both]
        self.stage, self.settings = (
            self.stages[0],
            self.each[0],
        )  # what the runs agree in
        self.start, self.end = runs[0][0].spans(runs[0][1])[number]
        drawn: dict[str, Any] = {
            "seeds": [config.seed for config in self.each],
            "sampling": self.settings.sampling,
        }
        drawn["batch_size"] = group.shard_size(
            self.settings.batch_size, self.settings.accumulate
        )
        if isinstance(data.train.inputs, ImageFiles):
            found = (
                augmentation(self.settings, "images", data.input_shape[-1]) or Augment()
            )
            drawn["view"] = View.of(found, self.settings.jitter)
            drawn["augment"] = replace(found, crop_padding=0, flip=False, rotation=0.0)
        else:
            each = [
                augmentation(config, data.kind, data.input_shape[-1])
                for config in self.each
            ]
            drawn["augment"] = each[0] if len(set(each)) == 1 else each
            drawn["positions"] = positions or None
        self.loader = _loader(
            data.train, data.normalisation, self.settings, device, group, **drawn
        )
        self.views = (
            views_of(self.settings, data.kind) if self.stage.trains == "all" else 1
        )
        losses = [
            loss_of(method, stage, config, classes)
            for (method, config, classes), stage in both
        ]
        self.losses = RunLosses(losses).to(device)

    def rates(self, epoch: int) -> list[float]:
        """The learning rate of each run."""
        rates, done, length = [], epoch - self.start, self.end - self.start
        for stage, it in zip(self.stages, self.each, strict=True):
            factor = rate(
                done,
                length,
                it.schedule,
                warmup=it.warmup,
                milestones=it.milestones,
                decay=it.decay,
            )
            rates.append(
                it.learning_rate * (stage.number("learning_rate_factor", it) * factor)
            )
        return rates

    def mixing(self, seeds: Sequence[int], epoch: int) -> Tensor:
        """(steps, R, 3): what is drawn for mixing each batch."""
        alphas = [config.mixup or config.cutmix for config in self.each]
        steps = self.loader.steps
        drawn = [
            draw_shares(alpha or 1.0, steps, seed, epoch)
            for alpha, seed in zip(alphas, seeds, strict=True)
        ]
        for shares, alpha in zip(drawn, alphas, strict=True):
            if not alpha:  # not mixed, in a stack with runs that are
                shares[:, 0] = 1
        return torch.stack(drawn, 1)


def build_stages(
    method: Method,
    config: TrainConfig,
    data: Dataset,
    seeds: Sequence[int],
    device: torch.device,
    group: ProcessGroup = SINGLE,
) -> list[PreparedStage]:
    """The method's stages with their loaders and losses, which see only the training
    split.
    """
    runs = [(method, config.replace(seed=seed), data.classes) for seed in seeds]
    return [
        PreparedStage(number, runs, data, device, group)
        for number in range(len(method.stages))
    ]


def augmentation(config: TrainConfig, kind: str, side: int = 32) -> Augment | None:
    """The augmentation of images that a config names, cropped by an eighth of large
    ones; other samples have none.
    """
    chosen = AUGMENTATIONS["crop" if config.augment == "auto" else config.augment]
    padding = (
        max(chosen.crop_padding if side >= SMALLEST_CROPPED else 1, side // 8)
        if chosen.crop_padding
        else 0
    )
    cutout = round(config.cutout * side if config.cutout < 1 else config.cutout)
    policy = chosen.policy and replace(
        chosen.policy, magnitude=config.magnitude or chosen.policy.magnitude
    )
    return (
        replace(chosen, cutout=cutout, crop_padding=padding, policy=policy)
        if kind == "images"
        else None
    )


def views_of(config: TrainConfig, kind: str) -> int:
    """2 where consistency compares an augmented view with a weaker one."""
    two, found = config.consistency > 0, augmentation(config, kind)
    needs = (
        "consistency needs a view that is augmented further: set augment=randaugment or"
        " cutout=0.5"
    )
    expect(not two or (found and found != found.weaker()), needs)
    return 1 + two


def _loader(
    split: Split,
    normalisation: Normalisation | None,
    config: TrainConfig,
    device: torch.device,
    group: ProcessGroup,
    **options: Any,
) -> ResidentLoader | StreamedLoader:
    """Batches of a split: from the device's memory, or decoded by workers where images
    are files.
    """
    options |= {"device": device, "rank": group.rank, "world_size": group.world_size}
    if not isinstance(split.inputs, ImageFiles):
        return ResidentLoader(split, normalisation, **options)
    workers = config.workers if config.workers >= 0 else None
    if (
        workers is None and group.local_world_size > 1
    ):  # processes on one machine divide its cores among them
        workers = max(1, (os.cpu_count() or 1) // group.local_world_size)
    return StreamedLoader(split, normalisation, workers=workers, **options)


def training_utility(config: TrainConfig, classes: Classes) -> Matrix | None:
    """The matrix to train with. A tail-sensitive one has no diagonal, as the authors':
    the likelihood has it.
    """
    name = config.utility
    if name in ("none", "one-hot"):
        return np.eye(len(classes)) if name == "one-hot" else None
    if name in ("tail-sensitive", "tail-sensitive-by-rank"):
        matrix = Utility.tail_sensitive(
            classes, config.penalty, by_rank=name == "tail-sensitive-by-rank"
        ).matrix
        return matrix - np.diag(np.diag(matrix))
    known = "none, one-hot, tail-sensitive, tail-sensitive-by-rank"
    expect(
        Path(name).is_file(),
        f"setting utility={name!r} is neither a file nor one of {known}",
    )
    matrix, actions = (
        Utility.read_csv(name, classes).matrix,
        f"{name} has actions that are not classes",
    )
    expect(
        matrix.shape[0] == matrix.shape[1],
        f"{actions}: training needs a square utility",
    )
    return matrix


def loss_of(
    method: Method, stage: Stage, config: TrainConfig, classes: Classes
) -> Loss:
    """The loss of a stage. What makes none, or one whose parameters nobody would train,
    raises.
    """
    utility, make = training_utility(config, classes), stage.loss or method.loss
    told = f"`loss` of the method {method.summary!r}"
    fix = (
        "expected a function of configuration, classes and utility that returns the"
        " loss, such as lambda *_: my_loss"
    )
    try:
        loss = make(config.replace(**stage.settings), classes, utility)
    except (AttributeError, TypeError) as error:  # as of the loss itself
        raise InputError(
            f"{told} cannot be made ({type(error).__name__}: {error}): {fix}"
        ) from error
    expect(callable(loss), f"{told} returned {type(loss).__name__}: {fix}")
    learned = (
        [name for name, p in loss.named_parameters() if p.requires_grad]
        if isinstance(loss, nn.Module)
        else []
    )
    apart = (
        "keep constants as buffers (register_buffer), and put what is learned into a"
        " backbone of your own"
    )
    expect(
        not learned,
        f"{told} has parameters ({listing(learned)}), which are not trained: {apart}",
    )
    return loss


@dataclass(frozen=True)
class Epoch:
    """What an epoch left behind."""

    epoch: int
    losses: list[float]  # one per run
    rates: list[float]  # one per run
    seconds: float
    samples_per_second: float  # of all runs and processes
    stacked: dict[
        str, Tensor
    ]  # what continues the training beside the networks' own, of all runs of the stack
    place: tuple[int, int] = (0, 1)  # the run, and how many the stack has

    def of(self, run: int) -> "Epoch":
        """What it left of one run of the stack."""
        runs = len(self.losses)
        losses, rates, speed = (
            [self.losses[run]],
            [self.rates[run]],
            self.samples_per_second / runs,
        )
        return replace(
            self,
            losses=losses,
            rates=rates,
            samples_per_second=speed,
            place=(run, runs),
        )

    @property
    def state(self) -> dict[str, Tensor]:
        """Of the run: made when a checkpoint asks for it, as hundreds of views take
        longer than some steps.
        """
        return of_run(self.stacked, *self.place)


def epochs(
    net: ParticleNet,
    stages: Sequence[PreparedStage],
    state: Mapping[str, Tensor],
    done: int = 0,
    processes: ProcessGroup = SINGLE,
    show: Callable[[int, str], None] = lambda steps, text: None,
    later: int = 0,
) -> Iterator[Epoch]:
    """Train from the end of epoch `done` to the last of the last stage. `state` is the
    optimiser's, of a checkpoint.

    Networks are the same on all `processes` that drive such a loop after each epoch;
    `show` is called after every step. `later` is how many steps other trainings of such
    networks will make: they share compiled kernels.
    """
    deviations: list[Tensor] = []
    with torch_settings(
        net.head_weights.device, stages[-1].end * stages[-1].loader.steps
    ):
        for stage in (stage for stage in stages if stage.end >= done):
            if stage.stage.reinitialize_head and done <= stage.start:
                reinitialize_head(net)
            if stage.settings.whiten and done == stage.start == 0:
                fit_whitening(net, stage, processes)
            if stage.settings.head_init == "class-means" and done == stage.start == 0:
                start_at_class_means(net, stage, processes)
            white = _whitened_once(net, stage)
            step = Step(
                net,
                stage.losses,
                stage.settings,
                stage.stage,
                deviations,
                stage.each,
                processes,
            )
            execution = Execution(
                step, (stage.end - max(done, stage.start)) * stage.loader.steps + later
            )
            if done > stage.start:
                step.load(state)
            for epoch in range(max(done, stage.start) + 1, stage.end + 1):
                rates, mixes = stage.rates(epoch), stage.mixing(net.seeds, epoch)
                seed_all(
                    step.device, (hash((net.seeds, epoch)) + processes.rank) % 2**63
                )
                step.begin_epoch(epoch, rates)
                began, count = time.perf_counter(), 0
                for layer in white:
                    layer.skipped = True
                batches = stage.loader.epoch(epoch, weak=stage.views > 1)
                for (inputs, targets, *weak), mix in zip(
                    batches, mixes.to(step.device), strict=True
                ):
                    execution(inputs, targets, mix, *weak)
                    count += targets.numel()
                    show(1, "")
                for layer in white:
                    layer.skipped = False
                losses = step.mean_losses()  # the one wait of the epoch
                _check_numbers(step, epoch, stage.loader.steps)
                if step.shards is not None:
                    step.shards.store()
                processes.average_(
                    list(net.buffers())
                )  # batch norm's statistics, where they are local
                if step.epoch_mean and epoch - stage.start > COLLECTED_FROM * (
                    stage.end - stage.start
                ):
                    step.epoch_mean.collect()
                seconds = time.perf_counter() - began
                yield Epoch(
                    epoch,
                    losses,
                    rates,
                    seconds,
                    processes.world_size * count / seconds,
                    step.state,
                )
            # after the last checkpoint: a run resumed from it comes by here too
            deviations = _finalize(net, stage, step, processes)


@torch.no_grad()
def start_at_class_means(
    net: ParticleNet, stage: PreparedStage, processes: ProcessGroup = SINGLE
) -> None:
    """Start cosine and mixed heads at the mean features of each class, before the first
    epoch.

    Particles weigh the samples of a class differently, by uniform random numbers. A
    class without samples keeps its random weights.
    """
    loader, settings, device = stage.loader, stage.settings, net.head.weight.device
    shape = net.particles, loader.count
    shares = torch.stack(
        [torch.rand(shape, generator=seeded(SHARES, seed, 0)) for seed in net.seeds]
    )  # (R, M, N)
    shares, classes = shares.to(device), net.head.weight.shape[-1]
    sums, total = (
        torch.zeros_like(net.head.weight),
        torch.zeros_like(net.head.weight[:, :1]),
    )  # (K, F, C), (K, 1, C)
    net.eval()
    for (inputs, targets), rows in zip(loader.epoch(0), loader.slices, strict=True):
        with torch.autocast(
            device.type, torch.bfloat16, enabled=reduced(settings, device)
        ):
            features = net.outputs(inputs)[1].flatten(0, 1)  # (K, B, F)
        members = (
            functional.one_hot(targets, classes)[:, None] * shares[..., rows, None]
        ).flatten(0, 1)  # (K, B, C)
        sums += features.mT @ (net.head.factors(features) * members)
        total += members.sum(1, keepdim=True)
    sums, total = processes.all_sum(sums), processes.all_sum(total)
    net.head.start(sums / total.clamp(min=1e-12), total > 0)


@torch.no_grad()
def fit_whitening(
    net: ParticleNet, stage: PreparedStage, processes: ProcessGroup = SINGLE
) -> None:
    """Fit the whitening of the first features to the covariance within classes, before
    the first epoch.
    """
    classes, found = net.head.weight.shape[-1], list[Tensor]()
    layers = [layer for layer in net.modules() if isinstance(layer, Whitening)]
    for inputs, targets in stage.loader.epoch(0) if layers else ():
        x, members = (
            inputs.flatten(2).float(),
            functional.one_hot(targets, classes).float(),
        )  # (R, B, F), (R, B, C)
        new = x.mT @ x, members.mT @ x, members.sum(1)
        found = (
            [one + more for one, more in zip(found, new, strict=True)]
            if found
            else list(new)
        )
    for layer in layers:
        products, sums, counts = map(processes.all_sum, found)
        sizes, samples = (
            counts[..., None].clamp(min=1),
            counts.sum(1)[:, None, None],
        )  # (R, C, 1), (R, 1, 1)
        within = (products - sums.mT @ (sums / sizes)) / (samples - classes).clamp(
            min=1
        )
        mean = sums.sum(1, keepdim=True) / samples
        layer.fit(within, products / samples - mean.mT @ mean)


def _whitened_once(net: ParticleNet, stage: PreparedStage) -> list[Whitening]:
    """Whiten all samples of a run now and not in every step, which takes as long as the
    heads; by which layers.
    """
    loader, layers = (
        stage.loader,
        [layer for layer in list(net.trunk)[:1] if isinstance(layer, Whitening)],
    )
    if (
        not layers
        or net.runs > 1
        or not isinstance(loader, ResidentLoader)
        or loader.device.type != "cpu"
    ):
        return []
    if (
        loader.inputs.ndim > 2 or loader.inputs.numel() > WHITENED_AT_ONCE
    ):  # images are augmented first
        return []
    with torch.no_grad():
        loader.transform(lambda inputs: layers[0](inputs[None])[0])
    return layers


def _finalize(
    net: ParticleNet, stage: PreparedStage, step: Step, processes: ProcessGroup
) -> list[Tensor]:
    """The end of a stage: averages replace the weights, with batch-norm statistics that
    fit them; then its own end.
    """
    deviations = step.finalize()
    if step.epoch_mean:
        net.train()
        with torch.no_grad(), step.autocast():
            for inputs, _ in stage.loader.epoch(stage.end):
                net.particle_logits(inputs)
        processes.average_(list(net.buffers()))
    if stage.stage.finalize:
        stage.stage.finalize(net, stage.settings)
    return deviations


def _check_numbers(step: Step, epoch: int, steps: int) -> None:
    good, run = min((good, run) for run, good in enumerate(step.good.tolist()))
    if good < step.steps:
        fast = (
            "the learning rate is too high: try a smaller learning_rate, warmup=5 or"
            " clip=1"
        )
        cause = (
            fast
            if epoch > 1 or good > 0
            else "the inputs hold NaN or infinite values, or the loss returns them"
        )
        lost = (
            f"the loss is not a number since step {good + 1} of {steps} in epoch"
            f" {epoch}; likely {cause}"
        )
        raise TrainingStopped(lost, run)


def of_run(tensors: Mapping[str, Tensor], run: int, runs: int) -> dict[str, Tensor]:
    """The part of one run in the state of a stack, as views. Counters are the same for
    all runs.
    """
    return {name: t.chunk(runs)[run] if t.ndim else t for name, t in tensors.items()}


def stacked(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The state of a stack from its runs': what `of_run` takes apart."""
    groups = {
        name: [own[name] for own in states if name in own]
        for name in (states[0] if states else {})
    }
    return {
        name: torch.cat(group) if group[0].ndim else group[0]
        for name, group in groups.items()
    }


def _evaluated(
    split: Split,
    normalisation: Normalisation | None,
    config: TrainConfig,
    device: torch.device,
    group: ProcessGroup,
) -> Iterator[Tensor]:
    """Normalised samples (B, ...) of this rank in order; one that a server asks for
    must not pay for a loader.
    """
    if isinstance(split.inputs, ImageFiles):
        bare = Split(split.inputs, np.zeros(len(split), dtype=np.int64))
        loader = _loader(
            bare, normalisation, config, device, group, batch_size=EVALUATED
        )
        yield from (inputs for inputs, _ in loader.in_order())
        return
    inputs, scaled = (
        torch.from_numpy(split.array).to(device),
        normaliser(normalisation, split.array.shape[1:], device),
    )
    size = EVALUATED if inputs.ndim > 2 else ROWS
    mine = shard(len(split), group.rank, group.world_size, size)
    for start in range(mine.start, mine.stop, size):
        yield scaled(inputs[start : min(start + size, mine.stop)])


@torch.no_grad()
def split_outputs(
    net: ParticleNet,
    split: Split,
    normalisation: Normalisation | None,
    config: TrainConfig,
    device: torch.device,
    group: ProcessGroup = SINGLE,
    measure: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Logits (R, M, N, C) and, if its combination states it, the uncertainty (R, N) of
    a split, on the CPU of rank 0.

    And what `measure` finds (N, ...) in features (M, B, F) of the first run and
    statistics of its first stages (B, S). Labels are not read. Each rank computes its
    shard of the samples.
    """
    logits, unsure, measured = [], [], []
    if net.training:
        net.eval()
    half = torch.autocast(device.type, torch.bfloat16, enabled=reduced(config, device))
    with half, first_stages(net) if measure else nullcontext() as statistics:
        for inputs in _evaluated(split, normalisation, config, device, group):
            particles = net.outputs(
                inputs.expand(net.runs, *inputs.shape)
            )  # every run sees the same samples
            combined, found = net.combination(*particles)
            logits.append(combined.float())
            unsure += [] if found is None else [found.float()]
            if measure and statistics:
                with torch.autocast(device.type, enabled=False):
                    measured.append(measure(particles[1][0], statistics(inputs)))
    parts = ((logits, 2), (unsure, 1), (measured, 0))
    first, second, third = (
        group.gather(torch.cat(t, dim).cpu() if t else None, dim) for t, dim in parts
    )
    return first, second, third

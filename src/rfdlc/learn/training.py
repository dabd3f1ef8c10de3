"""The training loop: R runs of M particles as one stack, epoch by epoch.

`epochs` is a generator: it yields after each epoch, with the networks as they then are, and whoever drives it
evaluates, writes checkpoints, or stops. Order, augmentation and mixup are functions of (seed, epoch) alone, so a
training continued from the end of any epoch is the training that was never interrupted.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rfdlc.data.mixing import draw_shares
from rfdlc.learn.averaging import COLLECTED_FROM, draw_head
from rfdlc.learn.methods import Stage
from rfdlc.learn.particles import ParticleNet
from rfdlc.learn.processes import ALONE, Processes
from rfdlc.learn.schedules import rate
from rfdlc.learn.settings import Settings
from rfdlc.learn.step import Step


class Loader(Protocol):
    """Batches of R runs at once: inputs (R,B,...) ready for the networks, targets (R,B)."""

    @property
    def steps(self) -> int: ...

    def epoch(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]: ...


class TrainingStopped(RuntimeError):
    """The loss is no longer a number."""


@dataclass(frozen=True)
class Part:
    """A stage made ready: what it trains on and for, from the epoch after `start` to `end`."""

    stage: Stage
    settings: Settings
    start: int
    end: int
    loader: Loader
    objective: nn.Module


@dataclass(frozen=True)
class Epoch:
    """What an epoch left behind."""

    epoch: int
    losses: list[float]  # a run
    rate: float
    seconds: float
    samples_per_second: float  # of all processes
    step: Step


def epochs(
    net: ParticleNet, parts: Sequence[Part], state: dict[str, Tensor], done: int = 0, processes: Processes = ALONE
) -> Iterator[Epoch]:
    """Train from the end of epoch `done` to the last of the last part. `state` is the optimiser's, of a checkpoint.

    Where several `processes` each drive a loop like this one, networks are the same on all of them after each epoch.
    """
    deviations: list[Tensor] = []
    for part in parts:
        if part.end < done:
            continue
        settings, length = part.settings, part.end - part.start
        if part.stage.anew and done <= part.start:
            draw_head(net)
        step = Step(net, part.objective, settings, part.stage, deviations, processes)
        if done > part.start:
            load_state(step, state)
        for epoch in range(max(done, part.start) + 1, part.end + 1):
            factor = part.stage.rate * rate(epoch - part.start, length, settings.schedule, **_schedule(settings))
            mixes = draw_shares(settings.mixup or settings.cutmix or 1.0, part.loader.steps, net.seeds, epoch)
            # a user's network may draw from the global generator
            torch.manual_seed((hash((net.seeds, epoch)) + processes.rank) % 2**63)
            step.begin_epoch(epoch, settings.learning_rate * factor)
            began, count = time.perf_counter(), 0
            for (inputs, targets), mix in zip(part.loader.epoch(epoch), mixes.to(step.device), strict=True):
                step(inputs, targets, mix)
                count += targets.numel()
            losses = step.losses()  # the one wait of the epoch
            _check_numbers(step, epoch, part.loader.steps)
            processes.mean_(list(net.buffers()))  # batch norm's statistics, where they are local
            if step.epoch_mean and epoch - part.start > COLLECTED_FROM * length:
                step.epoch_mean.collect()
            seconds = time.perf_counter() - began
            speed = processes.world * count / seconds
            yield Epoch(epoch, losses, settings.learning_rate * factor, seconds, speed, step)
        # after the last checkpoint: a run resumed from it comes by here too
        deviations = _finish(net, part, step, processes)


def _finish(net: ParticleNet, part: Part, step: Step, processes: Processes) -> list[Tensor]:
    """The end of a stage: averages in the weights' place, statistics that fit them, what else the stage asks for."""
    deviations = step.settle()
    if step.epoch_mean:
        net.train()
        with torch.no_grad(), step.autocast():
            for inputs, _ in part.loader.epoch(part.end):
                net.particle_logits(inputs)
        processes.mean_(list(net.buffers()))
    if part.stage.after:
        part.stage.after(net)
    return deviations


def spans(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Start and end epoch of each stage.

    >>> spans([200, 5])
    [(0, 200), (200, 205)]
    """
    return list(pairwise(accumulate(lengths, initial=0)))


def optimiser_state(step: Step) -> dict[str, Tensor]:
    """Every tensor that continues the training beside the networks' own: optimiser and averages, by name."""
    return {f"{name}.{i}": tensor for name, group in step.state.items() for i, tensor in enumerate(group)}


@torch.no_grad()
def load_state(step: Step, state: dict[str, Tensor]) -> None:
    """Put back what `optimiser_state` gave."""
    for name, tensor in optimiser_state(step).items():
        if name in state or not name.startswith("average."):  # a fork may begin to average
            tensor.copy_(state[name])


@torch.no_grad()
def outputs_of(
    net: ParticleNet, batches: Iterator[tuple[Tensor, Any]], context: Callable[[], Any]
) -> tuple[Tensor | None, Tensor | None]:
    """Of samples in order, on the CPU: logits (R, M, N, C), and the combination's own uncertainty (R, N) if it has one.

    Every run sees the same samples. Nothing where there are none.
    """
    net.eval()
    logits, unsure = [], []
    with context():
        for inputs, _ in batches:
            particles = net.outputs(inputs.expand(net.runs, *inputs.shape))
            logits.append(net.combination(*particles).float())
            unsure.append(net.combination.uncertainty(*particles))
    known = [values.float() for values in unsure if values is not None]
    return (
        torch.cat(logits, dim=2).cpu() if logits else None,
        torch.cat(known, dim=1).cpu() if known else None,
    )


def _schedule(settings: Settings) -> dict[str, Any]:
    return {"warmup": settings.warmup, "milestones": settings.milestones, "decay": settings.decay}


def _check_numbers(step: Step, epoch: int, steps: int) -> None:
    bad = int(step.first_bad)
    if bad < 0:
        return
    cause = "the learning rate is too high" if epoch > 1 or bad > 0 else "the inputs hold NaN or infinite values"
    raise TrainingStopped(
        f"the loss is not a number since step {bad + 1} of {steps} in epoch {epoch}; likely {cause}: "
        "try a smaller learning_rate, warmup=5 or clip=1"
    )

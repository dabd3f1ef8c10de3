"""The time of an epoch, measured on a few steps, which may take a small share of a
budget; networks that fit one.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from rfdlc.data.images import ImageFiles
from rfdlc.training.building import sensible_threads
from rfdlc.training.config import SAFETY, TrainConfig
from rfdlc.training.factories import as_they_are
from rfdlc.training.loop import epochs
from rfdlc.training.methods import SMALL_CNN
from rfdlc.training.networks.particles import ParticleNet
from rfdlc.training.run import Run
from rfdlc.training.trainer import Trainer

# of a budget, for all measuring; one step of the training is measured however long it
# takes
MOST = 0.05
QUICK, SLACK = (
    0.01,
    4,
    # of a budget, for the smallest network; how many times as fast others may be per
    # multiply-add
)
TOO_FEW_STEPS, OF_SMALL = (
    2000,
    500,
)  # of a training, with which a smaller network learns more; of the small ones
SIDES = (
    64,
    32,
)  # in pixels, of larger images that are made smaller where a budget is short
SMALLEST_CONTENT = 16  # pixels across the content of smaller images
SMALL = {
    "backbone": "cnn",
    "mixup": 0.0,
}  # learns in few steps, with this optimiser unless the user has chosen
ENOUGH = (
    0.02  # of a budget, or a second, after which more than five steps are not needed
)


class _Measured(Exception): ...  # enough steps


def steps_per_epoch(trainer: Trainer, run: Run) -> int:
    """As expected, before anything is built."""
    kept = 1 if trainer.data.val is not None else 1 - run.config.hold_out
    return math.ceil(kept * len(trainer.data.train) / run.config.batch_size)


def seconds_per_epoch(
    trainer: Trainer, runs: Sequence[Run], most: float, show: Callable[[int, str], None]
) -> float:
    """Of the runs side by side where they can be, otherwise one after another.

    No step begins that would exceed `most` seconds if it took as long as the last one.
    The first is an exception, and the second where the first has other work: on a GPU,
    with files to decode, or with heads and filters to start.
    """
    total, waiting, enough = 0.0, list(runs), min(1.0, ENOUGH * runs[0].config.budget)
    files = isinstance(trainer.data.train.inputs, ImageFiles)
    while waiting:
        stack = trainer.stacker.next_stack(waiting)
        config, share = stack.run.config, most * len(stack.members) / len(runs)
        on_gpu = stack.net.head_weights.device.type == "cuda"
        least = 1 + (
            on_gpu or files or bool(config.whiten) or config.head_init == "class-means"
        )
        times = [time.perf_counter()]

        def step(
            steps: int,
            text: str,
            times: list[float] = times,
            least: int = least,
            share: float = share,
        ) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.perf_counter())
            show(steps, text)
            spent, last = times[-1] - times[0], times[-1] - times[-2]
            if (len(times) > 5 and spent > enough) or (
                len(times) > least and spent + last > share
            ):
                raise _Measured

        with suppress(_Measured), sensible_threads(stack.net, config):
            for _ in epochs(stack.net, stack.stages, {}, show=step):
                pass
        gaps = np.diff(times)
        total += float(np.median(gaps[len(gaps) // 2 :])) * stack.stages[0].loader.steps
        waiting = [
            run
            for run in waiting
            if all(run not in member.runs for member in stack.members)
        ]
    return total


def relative_cost(trainer: Trainer, run: Run, net: ParticleNet) -> float:
    """Of an epoch of a trial, in epochs of the run. Image files are decoded for every
    trial alone.
    """
    if (
        isinstance(trainer.data.train.inputs, ImageFiles)
        or run.method.combination is not as_they_are
    ):
        return 1.0
    shared, own = len(net.trunk), len(net.branches)
    return (shared + own) / (shared + own * run.config.particles)


def suffices(trainer: Trainer, run: Run, seconds: float, measured: float = 0.0) -> bool:
    """Whether a budget has time for the usual epochs, or for many steps, if an epoch
    takes so many seconds.
    """
    possible = (
        SAFETY * (run.config.budget - measured) / (seconds * run.config.trainings)
    )
    enough = OF_SMALL if run.config.backbone == SMALL["backbone"] else TOO_FEW_STEPS
    return (
        possible >= run.config.epochs
        or possible * steps_per_epoch(trainer, run) >= enough
    )


def in_reach(
    trainer: Trainer, run: Run, net: ParticleNet, given: set[str]
) -> list[dict[str, Any]]:
    """The networks to measure, largest first: by the time of the smallest one, some are
    clearly too slow for that.
    """
    networks, files = (
        [{}, *_smaller(trainer, run, net, given)],
        isinstance(trainer.data.train.inputs, ImageFiles),
    )
    if (
        len(networks) == 1 or files or net.head_weights.device.type == "cuda"
    ):  # arithmetic takes little of small steps
        return networks
    runs = [unwritten(run, run.config.replace(**own)) for own in networks]
    pairs = zip(runs, [net, *map(trainer.stacker.build, runs[1:])], strict=True)
    work = [
        _multiply_adds(one, own.config.image_size or min(trainer.data.input_shape[1:]))
        for own, one in pairs
    ]
    unit = seconds_per_epoch(
        trainer, runs[-1:], QUICK * run.config.budget, lambda *_: None
    ) / (SLACK * work[-1])
    return networks[
        next(
            (i for i, many in enumerate(work) if suffices(trainer, run, many * unit)),
            -1,
        ) :
    ]


def _multiply_adds(net: ParticleNet, side: int) -> float:
    """About those of an image: the weights of a stage at each pixel. Sides halve from
    stage to stage.
    """
    first, stages = (
        side / (4 if net.name == "resnet50" else 1),
        enumerate((*net.trunk, *net.branches)),
    )
    late = int(
        net.name != SMALL["backbone"]
    )  # the first two stages of a ResNet have one size
    return sum(
        own.numel() * (first / 2 ** max(0, i - late)) ** 2
        for i, stage in stages
        for own in stage.parameters()
    )


def smallest_side(trainer: Trainer) -> int:
    """Of squares of which 16 pixels are left across the content; of padded long images,
    that is less than the side.
    """
    content = "" if trainer.data.resizing is None else trainer.data.resizing.content
    sides = [int(own) for own in content.split("x")] if content else [1]
    return math.ceil(SMALLEST_CONTENT * max(sides) / min(sides))


def _smaller(
    trainer: Trainer, run: Run, net: ParticleNet, given: set[str]
) -> list[dict[str, Any]]:
    """Networks that take less time, where the user has chosen none: a CNN, on smaller
    images, then one particle.
    """
    if net.name not in ("resnet32", "resnet50") or given & {
        "backbone",
        "shared_stages",
    }:
        return []
    config, side = run.config, min(trainer.data.input_shape[1:])
    sized = (
        side <= SIDES[0]
        or "image_size" in given | run.metadata["data"]["options"].keys()
    )
    rates = {} if given & {*SMALL_CNN} else SMALL_CNN
    small = {name: value for name, value in SMALL.items() if name not in given} | rates
    sides = [own for own in SIDES if own >= smallest_side(trainer)] or [SIDES[0]]
    found = [
        {**small, "image_size": own}
        for own in ([config.image_size] if sized else sides)
    ]
    several = (
        config.particles > 1
        and run.method.combination is as_they_are
        and len(config.prior_tau) < 2
    )
    fixed = given & {"particles", "learning_rate", "weight_decay"}
    return (
        [*found, found[-1] | alone(config.replace(**small))]
        if several and not fixed
        else found
    )


def unwritten(run: Run, config: TrainConfig) -> Run:
    """A run with another config that leaves nothing in the folder."""
    found = Run(run.path / ".trial" / str(hash(str(config))), writes=False)
    found.method_name, found.start, found.config = run.method_name, run.start, config
    found.metadata, found.classes = run.metadata, run.classes
    return found


def alone(config: TrainConfig) -> dict[str, Any]:
    """One of M particles, of which the mean loss has 1/M of the gradient, as sgd with a
    lower rate and more decay.
    """
    many = config.particles if config.optimiser == "sgd" else 1
    rates = {
        "learning_rate": config.learning_rate / many,
        "weight_decay": config.weight_decay * many,
    }
    return {"particles": 1, "repulsion": "none", **rates}

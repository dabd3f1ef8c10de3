"""The time of an epoch, measured on a few steps, which may take a small share of a budget."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import torch

from rfdlc.data.images import ImageFiles
from rfdlc.training.factories import as_they_are
from rfdlc.training.loop import epochs
from rfdlc.training.model import sensible_threads
from rfdlc.training.networks.particles import ParticleNet
from rfdlc.training.run import Run
from rfdlc.training.trainer import Trainer

MOST = 0.05  # of a budget, for all measuring; one step of the training is measured however long it takes
ENOUGH = 0.02  # of a budget, or a second, after which more than five steps are not needed


class _Measured(Exception):
    """Enough steps were measured."""


def steps_per_epoch(trainer: Trainer, run: Run) -> int:
    """As expected, before anything is built."""
    kept = 1 if trainer.data.val is not None else 1 - run.config.hold_out
    return math.ceil(kept * len(trainer.data.train) / run.config.batch_size)


def seconds_per_epoch(trainer: Trainer, runs: Sequence[Run], most: float, show: Callable[[int, str], None]) -> float:
    """Of the runs side by side where they can be, otherwise one after another.

    No step begins that would exceed `most` seconds if it took as long as the last one. The first is an exception, and
    the second where the first has other work: on a GPU, with files to decode, or with heads and filters to start.
    """
    total, waiting, enough = 0.0, list(runs), min(1.0, ENOUGH * runs[0].config.budget)
    files = isinstance(trainer.data.train.inputs, ImageFiles)
    while waiting:
        stack = trainer.stacker.next_stack(waiting)
        config, share = stack.run.config, most * len(stack.members) / len(runs)
        on_gpu = stack.net.head_weights.device.type == "cuda"
        least = 1 + (on_gpu or files or bool(config.whiten) or config.head_init == "class-means")
        times = [time.perf_counter()]

        def step(steps: int, text: str, times: list[float] = times, least: int = least, share: float = share) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.perf_counter())
            show(steps, text)
            spent, last = times[-1] - times[0], times[-1] - times[-2]
            if (len(times) > 5 and spent > enough) or (len(times) > least and spent + last > share):
                raise _Measured

        with suppress(_Measured), sensible_threads(stack.net, config):
            for _ in epochs(stack.net, stack.stages, {}, show=step):
                pass
        gaps = np.diff(times)
        total += float(np.median(gaps[len(gaps) // 2 :])) * stack.stages[0].loader.steps
        waiting = [run for run in waiting if all(run not in member.runs for member in stack.members)]
    return total


def relative_cost(trainer: Trainer, run: Run, net: ParticleNet) -> float:
    """Of an epoch of a trial, in epochs of the run. Image files are decoded for every trial alone."""
    if isinstance(trainer.data.train.inputs, ImageFiles) or run.method.combination is not as_they_are:
        return 1.0
    shared, own = len(net.trunk), len(net.branches)
    return (shared + own) / (shared + own * run.config.particles)

"""Where the time of a training step goes, and how close it is to the limit set by
memory bandwidth.
"""

import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rfdlc.data.loader import ResidentLoader, capture
from rfdlc.data.streamed import StreamedLoader
from rfdlc.errors import expect
from rfdlc.imports import trust
from rfdlc.training.building import (
    choose_device,
    method_net,
    sensible_threads,
    start_of,
)
from rfdlc.training.execution import Execution
from rfdlc.training.loop import PreparedStage, split_outputs
from rfdlc.training.methods import resolve
from rfdlc.training.networks.particles import ParticleNet, place
from rfdlc.training.networks.stack import Conv, Linear
from rfdlc.training.run import load_for
from rfdlc.training.settings import TABULAR
from rfdlc.training.step import Step, reduced

# An activation is written and read forward, read again backward, and so is its
# gradient: written, read
PASSES_OF_ACTIVATIONS = 5
# read forward and backward; gradient written and read; velocity read and written;
# written
PASSES_OF_WEIGHTS = 7
EVALUATED = 2000  # samples at most
SECONDS = 0.3  # that each part is measured for
COPIED = {"cpu": 2**27, "cuda": 2**30}  # bytes, several times a cache


@dataclass(frozen=True)
class Profile:
    """Seconds of each part of a step and of an evaluation, and the memory traffic of a
    step.
    """

    parts: dict[str, float]
    evaluation: float  # seconds for the samples that calibrate or test
    steps: int  # in all epochs of the first stage
    stages: int
    trainings: int  # more with `refit`
    traffic: float  # bytes that a step must move
    bandwidth: float  # bytes per second, measured by copying
    workers: int | None = None  # that decode image files; None: samples are in memory
    ahead: bool = False  # whether they do so while the device computes

    @property
    def network(self) -> float:
        """Seconds of a step without its data."""
        return sum(self.parts.values()) - self.parts["data"]

    @property
    def step(self) -> float:
        return (
            max(self.parts["data"], self.network)
            if self.ahead
            else self.parts["data"] + self.network
        )

    @property
    def floor(self) -> float:
        """The least seconds of a step, if memory were always busy."""
        return self.traffic / self.bandwidth


def profile(
    data: Any,
    method: str = "rf-dlc",
    *,
    root: str | Path | None = None,
    data_options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Profile:
    """Measure the first stage of a training as `train` would run it, on its own data,
    without training.
    """
    trust(settings.get("backbone"))
    early = resolve(method, data if isinstance(data, str) else "", settings)[1]
    start = start_of(early)
    given, _ = load_for(data, root, data_options or {}, early, start)
    row, config = resolve(
        method,
        given.name,
        {**settings, **start.settings},
        given.suits,
        len(given.train),
    )
    networks = config.backbone not in TABULAR
    expect(
        networks,
        f"only networks are profiled, but backbone is {config.backbone}: set"
        " backbone=mlp",
    )
    if given.val is None and config.hold_out:  # as in the training
        given = given.hold_out(config.hold_out, config.seed)
    device, seeds = choose_device(config.device), (config.seed,)
    net = place(
        method_net(
            row, config, given.input_shape, given.classes, seeds, start=start.weights
        ),
        device,
    )
    stage = PreparedStage(0, [(row, config, given.classes)], given, device)
    steps = (stage.end - stage.start) * stage.loader.steps
    step = Step(net, stage.losses, stage.settings, stage.stage, (), stage.each)
    captured = Execution(step, steps).capture
    step.begin_epoch(1, stage.rates(1))
    inputs, targets, *weak = next(iter(stage.loader.epoch(1, weak=stage.views > 1)))
    batch = inputs, targets, stage.mixing(seeds, 1)[0].to(device), *weak
    traffic = _traffic(net, batch[0], 2 if reduced(config, device) else 4)
    source, target = (
        torch.zeros(COPIED[device.type], dtype=torch.uint8, device=device)
        for _ in range(2)
    )
    held = given.test or given.val or given.train
    few = held if len(held) <= EVALUATED else held.take(np.arange(EVALUATED))

    def loss() -> Tensor:
        mixed = step.mixed(*batch[:3])
        return step.loss(
            step.logits(mixed.inputs),
            mixed,
            None,
            step.aims(weak[0], mixed, 1) if weak else None,
        )

    with sensible_threads(
        net, config
    ):  # forward alone, with backward, the whole step: the differences are the parts
        reading = _reading(stage.loader, device)
        forward = _seconds(loss, device, captured)
        both = _seconds(lambda: step.gradients(loss()), device, captured)
        whole = _seconds(lambda: step.compute(*batch), device, captured)
        evaluation = _seconds(
            lambda: split_outputs(net, few, given.normalisation, config, device),
            device,
            once=True,
        )
    bandwidth = (
        2 * source.numel() / _seconds(lambda: target.copy_(source), device)
    )  # each byte is read and written
    parts = {"data": reading, "forward": forward, "backward": max(both - forward, 0.0)}
    parts["optimiser"] = max(whole - both, 0.0)
    workers = stage.loader.workers if isinstance(stage.loader, StreamedLoader) else None
    evaluation, ahead = (
        evaluation * len(held) / len(few),
        bool(workers) and device.type == "cuda",
    )
    return Profile(
        parts,
        evaluation,
        steps,
        len(row.stages),
        config.trainings,
        traffic,
        bandwidth,
        workers,
        ahead,
    )


def _traffic(net: ParticleNet, inputs: Tensor, width: int) -> float:
    """The bytes that a step must move at least, with activations of `width` bytes."""
    outputs, copy = [0], deepcopy(net)
    copy.fused = False  # layer by layer, whose outputs are counted
    for module in (
        module for module in copy.modules() if isinstance(module, Conv | Linear)
    ):
        module.register_forward_hook(
            lambda module, inputs, output: outputs.append(output.numel())
        )
    with torch.no_grad():
        copy.particle_logits(inputs)
    weights = sum(parameter.numel() for parameter in net.parameters())
    return (
        PASSES_OF_ACTIVATIONS * width * sum(outputs) + PASSES_OF_WEIGHTS * 4 * weights
    )


def _reading(loader: ResidentLoader | StreamedLoader, device: torch.device) -> float:
    """Seconds per batch; of files, after the first batches, for which workers have to
    start.
    """
    if not isinstance(loader, StreamedLoader):
        return _seconds(lambda: [None for _ in loader.epoch(1)], device) / loader.steps
    batches, times = loader.epoch(1), [time.perf_counter()]
    for _ in batches:
        times.append(time.perf_counter())
        if (
            len(times) > 2 * loader.workers + 2
            and times[-1] - times[loader.workers] > 10 * SECONDS
        ):
            break
    first = loader.workers if len(times) > loader.workers + 1 else 0
    return (times[-1] - times[first]) / (len(times) - 1 - first)


def _seconds(
    function: Callable[[], Any],
    device: torch.device,
    captured: bool = False,
    once: bool = False,
) -> float:
    """The least of several measurements; on a GPU of what it does, captured as the step
    is, not of its launches.
    """
    run = capture(function, 3)[0].replay if captured else function
    times: list[float] = []
    while len(times) < 2 or (
        not once and sum(times[1:]) < SECONDS
    ):  # the first is the warm-up
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])

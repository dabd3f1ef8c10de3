"""The training loop: R runs of M particles as one stack, epoch by epoch.

`epochs` is a generator: it yields after each epoch, with the networks as they then are, and whoever drives it
evaluates, writes checkpoints, or stops. Order, augmentation and mixup are functions of (seed, epoch) alone, so a
training continued from the end of any epoch is the training that was never interrupted.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rfdlc.training.assembly import PreparedStage
from rfdlc.training.distributed import SINGLE, ProcessGroup
from rfdlc.training.execution import Execution, seed_all, torch_settings
from rfdlc.training.networks.particles import ParticleNet
from rfdlc.training.optimisation import COLLECTED_FROM, reinitialize_head
from rfdlc.training.step import Step


class TrainingStopped(RuntimeError):
    """The loss of a run is no longer a number."""

    def __init__(self, message: str, run: int = 0) -> None:
        super().__init__(message)
        self.run = run


@dataclass(frozen=True)
class Epoch:
    """What an epoch left behind."""

    epoch: int
    losses: list[float]  # one per run
    rates: list[float]  # one per run
    seconds: float
    samples_per_second: float  # of all runs and processes
    state: dict[str, Tensor]  # what continues the training beside the networks' own

    def of(self, run: int) -> "Epoch":
        """What it left of one run of the stack."""
        runs = len(self.losses)
        state, speed = of_run(self.state, run, runs), self.samples_per_second / runs
        return replace(self, losses=[self.losses[run]], rates=[self.rates[run]], samples_per_second=speed, state=state)


def epochs(
    net: ParticleNet, stages: Sequence[PreparedStage], state: Mapping[str, Tensor], done: int = 0,
    processes: ProcessGroup = SINGLE,
) -> Iterator[Epoch]:  # fmt: skip
    """Train from the end of epoch `done` to the last of the last stage. `state` is the optimiser's, of a checkpoint.

    Where several `processes` each drive a loop like this one, networks are the same on all of them after each epoch.
    """
    deviations: list[Tensor] = []
    with torch_settings(net.head_weights.device):
        for stage in (stage for stage in stages if stage.end >= done):
            if stage.stage.reinitialize_head and done <= stage.start:
                reinitialize_head(net)
            step = Step(net, stage.losses, stage.settings, stage.stage, deviations, stage.each, processes)
            execution = Execution(step, (stage.end - max(done, stage.start)) * stage.loader.steps)
            for name, tensor in step.state.items() if done > stage.start else ():
                if name in state or not name.startswith("average."):  # a fork may begin to average
                    tensor.detach().copy_(state[name])
            for epoch in range(max(done, stage.start) + 1, stage.end + 1):
                rates, mixes = stage.rates(epoch), stage.mixing(net.seeds, epoch)
                seed_all(step.device, (hash((net.seeds, epoch)) + processes.rank) % 2**63)
                step.begin_epoch(epoch, rates)
                began, count = time.perf_counter(), 0
                for (inputs, targets), mix in zip(stage.loader.epoch(epoch), mixes.to(step.device), strict=True):
                    execution(inputs, targets, mix)
                    count += targets.numel()
                losses = step.mean_losses()  # the one wait of the epoch
                _check_numbers(step, epoch, stage.loader.steps)
                processes.average_(list(net.buffers()))  # batch norm's statistics, where they are local
                if step.epoch_mean and epoch - stage.start > COLLECTED_FROM * (stage.end - stage.start):
                    step.epoch_mean.collect()
                seconds = time.perf_counter() - began
                yield Epoch(epoch, losses, rates, seconds, processes.world_size * count / seconds, step.state)
            # after the last checkpoint: a run resumed from it comes by here too
            deviations = _finalize(net, stage, step, processes)


def _finalize(net: ParticleNet, stage: PreparedStage, step: Step, processes: ProcessGroup) -> list[Tensor]:
    """The end of a stage: averages replace the weights, with batch-norm statistics that fit them; then its own end."""
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
        cause = "the learning rate is too high" if epoch > 1 or good > 0 else "the inputs hold NaN or infinite values"
        lost = f"the loss is not a number since step {good + 1} of {steps} in epoch {epoch}; likely {cause}"
        raise TrainingStopped(f"{lost}: try a smaller learning_rate, warmup=5 or clip=1", run)


def of_run(tensors: Mapping[str, Tensor], run: int, runs: int) -> dict[str, Tensor]:
    """The part of one run in the state of a stack, as views. Counters are the same for all runs."""
    return {name: t.chunk(runs)[run] if t.ndim else t for name, t in tensors.items()}


def stacked(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The state of a stack from its runs': what `of_run` takes apart."""
    groups = {name: [own[name] for own in states if name in own] for name in (states[0] if states else {})}
    return {name: torch.cat(group) if group[0].ndim else group[0] for name, group in groups.items()}

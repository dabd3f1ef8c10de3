"""What one optimisation step of a stack of runs computes, without a host value inside.
`execution.py` says how.

Learning rates, one per run, and the epoch are tensors on the device; losses are summed
there and read once per epoch. Losses and gradients of micro-batches add up to those of
a shard, and over processes to those of the global batch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce as fold
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from rfdlc.data.augment import Mixed, cutmix, mixup
from rfdlc.errors import expect
from rfdlc.training.config import TrainConfig
from rfdlc.training.distributed import SINGLE, ProcessGroup, overlapped, taken_gradients
from rfdlc.training.losses import GlobalBatch, RunLosses, reduce
from rfdlc.training.losses.consistency import Consistency
from rfdlc.training.losses.terms import Repulsions
from rfdlc.training.methods import Stage
from rfdlc.training.networks.particles import ParticleNet
from rfdlc.training.optimisation import OPTIMISERS, EpochMean, SampledNetworks, clip


class Step:
    """Forward, loss, repulsion, backward, update. `compute` it; read `mean_losses()` at
    the end of an epoch.
    """

    def __init__(
        self,
        net: ParticleNet,
        losses: RunLosses,
        settings: TrainConfig,
        stage: Stage = Stage(),  # noqa: B008
        deviations: Sequence[
            Tensor
        ] = (),  # of the weights, where an earlier stage has measured them
        each: Sequence[
            TrainConfig
        ] = (),  # of every run, where they differ in what a run may have of its own
        processes: ProcessGroup = SINGLE,
    ) -> None:
        several = not processes.single and stage.trains == "all"
        self.shards = None
        if settings.parallel == "fsdp" and several:
            from rfdlc.training.sharding import ShardedCopy

            self.shards = ShardedCopy(net, processes)
            net = self.shards.net
        self.net, self.losses, self.settings, self.stage, self.processes = (
            net,
            losses,
            settings,
            stage,
            processes,
        )
        losses.share(processes)
        each = each or [settings] * net.runs
        self.parameters: list[Tensor] = [
            p for part in net.parts(stage.trains) for p in part.parameters()
        ]
        net.requires_grad_(False)  # what is frozen needs no backward pass
        for parameter in self.parameters:
            parameter.requires_grad_(True)
        self.device = self.parameters[0].device
        options: dict[str, Any] = (
            {"momentum": settings.momentum} if settings.optimiser == "sgd" else {}
        )
        known = net.rate_factors(settings.backbone_rate, settings.layer_decay)
        options["factors"] = [
            known.get(parameter, 1.0) for parameter in self.parameters
        ]
        self.weights = (
            self.parameters if self.shards is None else self.shards.local
        )  # which are updated
        self.optimiser = OPTIMISERS[settings.optimiser](
            self.weights, _decays(each), **options
        )
        repulsions = [
            (own.repulsion, own.repulsion_tau, own.repulsion_strength) for own in each
        ]
        repelled = net.particles > 1 and any(
            kind != "none" for kind, _, _ in repulsions
        )
        self.repulsions = Repulsions(repulsions, self.device) if repelled else None
        consistent = settings.consistency > 0 and stage.trains == "all"
        ramp = settings.consistency_ramp * settings.epochs
        self.consistency = (
            Consistency(settings.consistency, ramp) if consistent else None
        )
        mixed = mixup if any(own.mixup for own in each) else None
        self.mixing = cutmix if settings.cutmix else mixed
        self.average = (
            [p.detach().clone() for p in self.weights] if settings.average else []
        )
        self.epoch_mean = EpochMean(self.parameters) if stage.weight_averaging else None
        samples = stage.number("swag_samples", settings)
        self.sampled = SampledNetworks(net, deviations, samples) if samples else None
        plain = net.routing if stage.trains == "router" else net.particle_logits
        self.forward: Callable[[Tensor], Tensor] = self.sampled or plain
        # where networks run as modules, gradients are summed over processes while the
        # backward pass goes on
        shares = settings.parallel == "ddp" or (
            settings.parallel == "auto" and net.as_modules
        )
        self.overlaps = shares and several
        self.replica: DistributedDataParallel | None = None
        self.rates, self.epoch = (
            torch.zeros(net.runs, device=self.device),
            torch.zeros((), device=self.device),
        )
        self.total, self.ones = (
            torch.zeros_like(self.rates),
            torch.ones_like(self.rates),
        )
        self.steps = 0  # of this epoch
        self.good = torch.zeros_like(
            self.total, dtype=torch.int64
        )  # steps until the loss is not a number

    def begin_epoch(self, epoch: int, rates: float | Sequence[float]) -> None:
        """Set what changes between epochs, and reset the sums. The rate is one for all
        runs, or one per run.
        """
        self.epoch.fill_(epoch)
        self.rates.copy_(torch.tensor(rates))
        self.steps = 0
        self.total.zero_()
        self.good.zero_()
        self.net.train()
        if self.shards is not None:
            self.shards.begin()
        self.net.dropout.seed(self.net.seeds, epoch, self.processes.rank)
        if self.stage.trains != "all":  # frozen layers keep their statistics too
            self.net.trunk.eval()
            self.net.branches.eval()
        if self.sampled is not None:
            self.sampled.draw(epoch)

    def compute(
        self, inputs: Tensor, targets: Tensor, mix: Tensor, *weak: Tensor
    ) -> None:
        """The step itself, over the micro-batches of inputs (R,B,...) and targets
        (R,B); `mix` is drawn for mixing.

        With consistency, a `weak` view of the inputs follows.
        """
        count = min(self.settings.accumulate, targets.shape[1])
        if (
            self.settings.accumulate > 1
            # as many on every process: they may exchange numbers inside of a
            # micro-batch
        ):
            count = self.processes.all_min(count)
        losses, gradients, batch = list[Tensor](), list[Tensor](), None
        mixed, replica = self.mixed(inputs, targets, mix), self.replica
        aims = (
            self.aims(weak[0], mixed, count).tensor_split(count, 2)
            if weak
            else [None] * count
        )
        for number, (micro, aim) in enumerate(
            zip(mixed.micro_batches(count), aims, strict=True), start=1
        ):
            with (
                nullcontext()
                if replica is None or number == count
                else replica.no_sync()
            ):
                logits = self.logits(micro.inputs, replica)
                if batch is None and (count > 1 or not self.processes.single):
                    batch = self.losses.global_batch(
                        logits.detach(), targets, self.epoch, count
                    )
                found = self.loss(logits, micro, batch, aim)
                if replica is not None or self.shards is not None:
                    found.backward(self.ones)
                else:
                    new = self.gradients(found)
                    gradients = (
                        list(torch._foreach_add(gradients, new)) if gradients else new
                    )
            losses.append(found.detach())
        total = fold(torch.add, losses)
        if replica is None and self.shards is None:
            self.processes.all_reduce_([*gradients, total])
        else:
            self.processes.all_reduce_([total])
            gradients = (
                taken_gradients(self.parameters)
                if self.shards is None
                else self.shards.gradients()
            )
        self._update(total, gradients)

    def mixed(self, inputs: Tensor, targets: Tensor, mix: Tensor) -> Mixed:
        return (
            Mixed(inputs, targets, targets, self.ones)
            if self.mixing is None
            else self.mixing(inputs, targets, mix)
        )

    @torch.no_grad()
    def aims(self, weak: Tensor, mixed: Mixed, micro_batches: int) -> Tensor:
        """What particles are trained towards: predictions of another view, mixed as the
        inputs are.
        """
        assert self.consistency is not None
        logits = torch.cat(
            [self.logits(micro) for micro in weak.tensor_split(micro_batches, 1)], 2
        )
        aims = self.consistency.aims(logits, mixed.targets)
        lam = mixed.lam[:, None, None, None]
        return aims if self.mixing is None else lam * aims + (1 - lam) * aims.roll(1, 2)

    def logits(
        self, inputs: Tensor, replica: DistributedDataParallel | None = None
    ) -> Tensor:
        with self.autocast():
            logits = (replica or self.forward)(inputs)  # (R,M,B,C)
        return logits.float() if logits.dtype == torch.bfloat16 else logits

    def loss(
        self,
        logits: Tensor,
        micro: Mixed,
        batch: GlobalBatch | None = None,
        aims: Tensor | None = None,
    ) -> Tensor:
        """Of each run, (R,), or the contribution of a micro-batch to that of a global
        batch.
        """
        losses: Tensor = self.losses(logits, micro.targets, self.epoch, batch)  # (R,)
        if self.mixing is not None:  # weighed between both labels
            others = self.losses(logits, micro.partners, self.epoch, batch)
            losses = micro.lam * losses + (1 - micro.lam) * others
        if self.consistency is not None and aims is not None:
            values = self.consistency(logits, aims, self.epoch)
            losses = losses + reduce((values,), None if batch is None else batch.size)
        if self.repulsions is not None:
            apart = self.repulsions(self.net.head_weights, logits, self.epoch)
            # every micro-batch has the same heads: each counts by its samples, all
            # together once
            losses = losses + (
                apart if batch is None else apart * (logits.shape[2] / batch.size)
            )
        return losses

    def gradients(self, losses: Tensor) -> list[Tensor]:
        """In the memory layout of their parameters: multi-tensor operations are fast
        only where layouts agree.
        """
        # Of the sum: gradients given beside the losses would import sympy, which takes
        # half a second or more.
        given = torch.autograd.grad(losses.sum(), self.parameters, allow_unused=True)
        if (
            self.overlaps and self.replica is None
        ):  # from the second step on: this one shows which weights are used
            unused = self.processes.all_any(any(g is None for g in given))
            self.replica = overlapped(
                self.net, lambda inputs: self.forward(inputs), unused
            )
        found = [
            torch.zeros_like(p) if g is None else g
            for p, g in zip(self.parameters, given, strict=True)
        ]
        pairs = zip(self.parameters, found, strict=True)
        return [
            g if g.stride() == p.stride() else torch.empty_like(p).copy_(g)
            for p, g in pairs
        ]

    @torch.no_grad()
    def _update(self, losses: Tensor, gradients: list[Tensor]) -> None:
        if self.settings.clip:
            clip(gradients, self.settings.clip, self.net.runs)
        self.optimiser.step(self.weights, gradients, self.rates)
        if self.average:
            torch._foreach_lerp_(self.average, self.weights, 1 - self.settings.average)
        self.total += losses
        self.good += self.total.abs() < math.inf  # a sum that is not a number stays so

    def mean_losses(self) -> list[float]:
        """Mean loss of each run over the epoch so far. Waits for the device."""
        return list((self.total / max(1, self.steps)).tolist())

    @property
    def _groups(self) -> dict[str, Sequence[Tensor]]:
        means = self.epoch_mean.state if self.epoch_mean else {}
        deviations = {"deviation": self.sampled.deviations} if self.sampled else {}
        return {**self.optimiser.state, "average": self.average, **means, **deviations}

    @property
    def state(self) -> dict[str, Tensor]:
        """Every tensor that continues the training beside the networks' own: optimiser
        and averages, by name.
        """
        groups = (
            self._groups if self.shards is None else self.shards.gathered(self._groups)
        )
        return {
            f"{name}.{i}": tensor
            for name, group in groups.items()
            for i, tensor in enumerate(group)
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from the state of a checkpoint; a fork may begin to average."""
        known = {
            name: own
            for name, own in self._groups.items()
            if name != "average" or "average.0" in state
        }
        if self.shards is not None:
            return self.shards.load(known, state)
        for name, group in known.items():
            for number, tensor in enumerate(group):
                tensor.detach().copy_(state[f"{name}.{number}"])
        return None

    @torch.no_grad()
    def finalize(self) -> list[Tensor]:
        """At the end of a stage, replace weights by their averages. The deviations of
        the weights, if measured.
        """
        if self.average:
            torch._foreach_copy_(self.weights, self.average)
        if self.shards is not None:
            self.shards.store()
        return self.epoch_mean.finalize() if self.epoch_mean else []

    def autocast(self) -> AbstractContextManager[object]:
        half = reduced(self.settings, self.device)
        return (
            torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)
            if half
            else nullcontext()
        )


def check_sharding(settings: TrainConfig, stages: Sequence[Stage]) -> None:
    """Raise for what needs all weights at once, where they are to be sharded."""
    averaged = any(
        stage.weight_averaging or stage.number("swag_samples", settings)
        for stage in stages
    )
    plain = settings.parallel != "fsdp" or not (
        settings.clip or settings.compile or averaged
    )
    fix = (
        "set clip=0 and compile=false, choose a method without SWA, or leave"
        " parallel=fsdp out"
    )
    expect(
        plain,
        "parallel=fsdp is not for clipped gradients, compiled networks and averages"
        f" over epochs: {fix}",
    )


def reduced(settings: TrainConfig, device: torch.device) -> bool:
    """Whether networks compute in bfloat16: `auto` where a GPU does so itself, since
    emulation is slow.
    """
    native = device.type == "cuda" and torch.cuda.is_bf16_supported(
        including_emulation=False
    )
    return settings.precision == "bf16" or (settings.precision == "auto" and native)


def _decays(each: Sequence[TrainConfig]) -> list[float]:
    """Weight decays: one where all runs have the same and their rates are the same in
    every epoch, else one per run.
    """
    alike = all(
        config.in_group(group) == each[0].in_group(group)
        for config in each
        for group in ("optimiser", "schedule")
    )
    return [own.weight_decay for own in (each[:1] if alike else each)]

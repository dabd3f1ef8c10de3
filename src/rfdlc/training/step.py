"""One optimisation step of a stack of runs, without a host value inside: on a GPU it is captured as a CUDA graph.

Learning rates, one a run, and the epoch are tensors on the device; losses are summed there and read once an epoch.
A shape of batch is captured once: the shorter last batch of an epoch has a graph of its own.

Of several processes each has a share of the batch, and `accumulate` cuts that into parts: losses and gradients of the
parts add up to those of the whole batch, over parts here and over processes before the update.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from rfdlc.data.mixing import Mixed, cutmix, mixup
from rfdlc.data.replayed import capture
from rfdlc.training.config import Settings
from rfdlc.training.methods import Stage
from rfdlc.training.networks.particles import ParticleNet
from rfdlc.training.optimisation.averaging import DrawnNetworks, EpochMean
from rfdlc.training.optimisation.optimisers import OPTIMISERS, Optimiser, clip
from rfdlc.training.per_run import Repulsions
from rfdlc.training.processes.group import ALONE, Processes
from rfdlc.training.processes.whole import Whole, class_counts

WORTH_CAPTURING, WORTH_FUSING = 200, 2000  # steps after which the warm-up of each has paid
Batch = tuple[Tensor, Tensor, Tensor]  # inputs (R,B,...), targets (R,B), what is drawn for mixing (R,3)


class Step:
    """Forward, objective, repulsion, backward, update. Call it with a batch; read `losses()` at the end of an epoch."""

    capturing = True  # off for debugging and comparison

    def __init__(
        self,
        net: ParticleNet,
        objective: nn.Module,  # of all runs: (logits (R,M,B,C), targets (R,B), epoch) -> (R,)
        settings: Settings,
        stage: Stage = Stage(),  # noqa: B008, a frozen record
        deviations: Sequence[Tensor] = (),  # of the weights, where an earlier stage has measured them
        each: Sequence[Settings] = (),  # of every run, where they differ in what a run may have of its own
        steps: int = WORTH_FUSING,  # how often it will be called, about
        processes: Processes = ALONE,
    ) -> None:
        self.net, self.objective, self.settings, self.stage = net, objective, settings, stage
        self.processes = processes
        self.full = -(-settings.batch_size // processes.world // settings.accumulate)  # samples of a part, rounded up
        each = each or [settings] * net.runs
        self.parameters: list[Tensor] = [p for part in net.parts(stage.trains) for p in part.parameters()]
        net.requires_grad_(False)  # what is frozen needs no backward pass
        for parameter in self.parameters:
            parameter.requires_grad_(True)
        self.device = self.parameters[0].device
        self.optimiser: Optimiser = OPTIMISERS[settings.optimiser](self.parameters, _decays(each), **_options(settings))
        repelled = net.particles > 1 and any(own.repulsion != "none" for own in each)
        self.repulsions = Repulsions(each, self.device) if repelled else None
        self.mixing = mixup if settings.mixup else cutmix if settings.cutmix else None
        self.average = [p.detach().clone() for p in self.parameters] if settings.average else []
        self.epoch_mean = EpochMean(self.parameters) if stage.averages == "weights" else None
        self.drawn = DrawnNetworks(net, deviations, stage.draws) if stage.draws else None
        self.rates, self.epoch = torch.zeros(net.runs, device=self.device), torch.zeros((), device=self.device)
        self.total = torch.zeros(net.runs, device=self.device)
        self.ones = torch.ones_like(self.total)
        self.steps = 0  # of this epoch
        self.good = torch.zeros_like(self.total, dtype=torch.int64)  # steps until the loss is no number
        torch.backends.cudnn.benchmark = True  # shapes are constant: the search for the fastest kernels pays
        meeting = settings.batch_norm == "sync" and not processes.alone  # inside of the networks, layer by layer
        net.fused = net.fusable and steps >= WORTH_FUSING and not meeting
        worth = stage.trains == "all" and not net.fused and not meeting
        compiling = settings.compile and self.device.type == "cuda" and worth
        self.forward: Callable[[Tensor], Tensor] = self.drawn or (
            net.routing if stage.trains == "router" else net.particle_logits
        )
        self.compiled = torch.compile(self.forward, dynamic=False) if compiling else self.forward
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self.graphs: dict[tuple[int, ...], tuple[Batch, torch.cuda.CUDAGraph]] = {}
        # what other processes do, and random numbers that are put back, cannot be captured
        capturable = processes.alone and not settings.checkpoint_activations
        self.capture = self.capturing and self.device.type == "cuda" and steps >= WORTH_CAPTURING and capturable

    def begin_epoch(self, epoch: int, rates: float | Sequence[float]) -> None:
        """Set what changes between epochs, and start the sums anew. The rate is one for all runs, or one a run."""
        self.epoch.fill_(epoch)
        self.rates.copy_(torch.tensor(rates))
        self.steps = 0
        self.total.zero_()
        self.good.zero_()
        self.net.train()
        if self.stage.trains != "all":  # frozen layers keep their statistics too
            self.net.trunk.eval()
            self.net.branches.eval()
        if self.drawn is not None:
            self.drawn.draw(epoch)

    def __call__(self, inputs: Tensor, targets: Tensor, mix: Tensor) -> None:
        self.steps += 1
        if not self.capture:
            return self.compute(inputs, targets, mix)
        shape = tuple(inputs.shape)
        if shape not in self.graphs and not self._captured(shape, (inputs, targets, mix)):
            return self.compute(inputs, targets, mix)
        static, graph = self.graphs[shape]
        for buffer, value in zip(static, (inputs, targets, mix), strict=True):
            buffer.copy_(value, non_blocking=True)
        return graph.replay()

    def compute(self, inputs: Tensor, targets: Tensor, mix: Tensor) -> None:
        """The step itself, over the parts of the batch."""
        count = self._parts(targets.shape[1])
        whole = None if count == 1 and self.processes.alone else self._whole(targets, count)
        first, *rest = self.mixed(inputs, targets, mix).parts(count)
        losses = self.objectives(first, whole)
        gradients, losses = self.gradients(losses), losses.detach()
        for part in rest:
            more = self.objectives(part, whole)
            gradients = list(torch._foreach_add(gradients, self.gradients(more)))
            losses = losses + more.detach()
        self.update(losses, gradients)

    def objectives(self, part: Mixed, whole: Whole | None = None) -> Tensor:
        """Of each run, (R,). That of mixed samples is weighed between both labels, whatever the objective.

        Where samples are a part of a whole batch, it is their part of the whole's.
        """
        # compiling is dear: only the shape of full batches is worth it
        forward = self.compiled if part.inputs.shape[1] == self.full else self.forward
        with self.autocast():
            logits = forward(part.inputs)  # (R, M, B, C)
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        known = () if whole is None else (whole,)
        losses: Tensor = self.objective(logits, part.targets, self.epoch, *known)  # (R,)
        if self.mixing is not None:
            others = self.objective(logits, part.partners, self.epoch, *known)
            losses = part.lam * losses + (1 - part.lam) * others
        if self.repulsions is not None:
            apart = self.repulsions(self.net.head_weights, logits, self.epoch)
            # every part has the same heads: each counts by its samples, all together once
            losses = losses + (apart if whole is None else apart * (logits.shape[2] / whole.size))
        return losses

    def _parts(self, samples: int) -> int:
        """In how many parts a batch is computed: as many on every process, which may meet inside of a part."""
        wanted = min(self.settings.accumulate, samples)
        return wanted if self.settings.accumulate == 1 else self.processes.least(wanted)

    def _whole(self, targets: Tensor, parts: int) -> Whole:
        """The whole batch of every run, of which these targets (R, B) are this process's share."""
        counts = class_counts(targets, self.net.head_weights.shape[-1])
        return Whole(self.processes.total(counts), self.processes, parts)

    def mixed(self, inputs: Tensor, targets: Tensor, mix: Tensor) -> Mixed:
        """Mixup or CutMix with the neighbour in the batch, or the batch as it is."""
        return Mixed(inputs, targets, targets, self.ones) if self.mixing is None else self.mixing(inputs, targets, mix)

    def gradients(self, losses: Tensor) -> list[Tensor]:
        found = torch.autograd.grad(losses, self.parameters, self.ones, allow_unused=True, materialize_grads=True)
        return [_like(p, g) for p, g in zip(self.parameters, found, strict=True)]

    @torch.no_grad()
    def update(self, losses: Tensor, gradients: list[Tensor]) -> None:
        self.processes.total_([*gradients, losses])
        if self.settings.clip:
            clip(gradients, self.settings.clip, self.net.runs)
        self.optimiser.step(self.parameters, gradients, self.rates)
        if self.average:
            torch._foreach_lerp_(self.average, self.parameters, 1 - self.settings.average)
        self.total += losses
        self.good += self.total.abs() < math.inf  # a sum that is no number stays so

    def losses(self) -> list[float]:
        """Mean loss of each run over the epoch so far. Waits for the device."""
        return [float(value) for value in (self.total / max(1, self.steps)).tolist()]

    @property
    def state(self) -> dict[str, list[Tensor]]:
        """Every tensor that continues the training beside the networks' own."""
        means = self.epoch_mean.state if self.epoch_mean else {}
        deviations = {"deviation": self.drawn.deviations} if self.drawn else {}
        return {**self.optimiser.state, "average": self.average, **means, **deviations}

    @torch.no_grad()
    def settle(self) -> list[Tensor]:
        """At the end of a stage: averages take the weights' place. The deviations of the weights, if measured."""
        for weight, average in zip(self.parameters, self.average, strict=bool(self.average)):
            weight.copy_(average)
        return self.epoch_mean.settle() if self.epoch_mean else []

    def autocast(self) -> AbstractContextManager[object]:
        if not reduced(self.settings, self.device):
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    def _captured(self, shape: tuple[int, ...], batch: Batch) -> bool:
        """Capture the step for this shape of batch: true where that worked. Warm-up steps are undone."""
        live = [*self.net.parameters(), *self.net.buffers(), self.total, self.good]
        live += [tensor for group in self.state.values() for tensor in group]
        saved = [tensor.detach().clone() for tensor in live]
        static: Batch = (batch[0].clone(), batch[1].clone(), batch[2].clone())
        try:
            graph, _ = capture(lambda: self.compute(*static), 3, self.pool)  # one replays at a time: they share memory
            self.graphs[shape] = (static, graph)
        except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
            warnings.warn(f"the step could not be captured and runs eagerly: {error}", RuntimeWarning, stacklevel=2)
            self.capture = False
        with torch.no_grad():
            for tensor, value in zip(live, saved, strict=True):
                tensor.copy_(value)
        return self.capture


def reduced(settings: Settings, device: torch.device) -> bool:
    """Whether networks compute in bfloat16."""
    return settings.precision == "bf16" or (settings.precision == "auto" and device.type == "cuda")


def _like(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient in its parameter's memory layout: multi-tensor operations are fast only where layouts agree."""
    same = gradient.stride() == parameter.stride()
    return gradient if same else torch.empty_like(parameter).copy_(gradient)


def _decays(each: Sequence[Settings]) -> list[float]:
    """Weight decays: one where all runs have the same and their rates are the same in every epoch, else one a run."""
    names = ("weight_decay", "learning_rate", "schedule", "milestones", "decay", "warmup")
    alike = len({tuple(getattr(own, name) for name in names) for own in each}) == 1
    return [own.weight_decay for own in each[:1]] if alike else [own.weight_decay for own in each]


def _options(settings: Settings) -> dict[str, float]:
    return {"momentum": settings.momentum} if settings.optimiser == "sgd" else {}

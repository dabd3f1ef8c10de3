"""What every run of a stack has of its own, in few calls for all runs: its loss and its repulsion.

Neighbours of one form (the same modules, numbers of their own) take one call, so that five seeds of a method launch as
many kernels as one.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import reduce as add
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rfdlc.training.config import TrainConfig
from rfdlc.training.distributed import SINGLE, ProcessGroup
from rfdlc.training.losses import Loss, Term, leading, reduce, terms_of, total
from rfdlc.training.losses.terms import repulsion

Item = TypeVar("Item")


@dataclass(frozen=True)
class GlobalBatch:
    """What a micro-batch must know of the global batch of which it is a part."""

    size: Tensor  # (): number of samples
    totals: list[list[Tensor]]  # for each group of losses and each of its terms, what its sum is divided by
    micro_batches: int  # that each process computes one after another


class RunLosses(nn.Module):
    """One loss per run: (logits (R,M,B,C), targets (R,B), epoch) -> (R,).

    With a `GlobalBatch`, the contribution of a micro-batch to the loss of the global batch.
    """

    processes = SINGLE

    def __init__(self, losses: Sequence[Loss]) -> None:
        super().__init__()
        groups = neighbours([_module(loss) for loss in losses], _form)
        self.sizes = [len(group) for group in groups]
        self.groups = nn.ModuleList(_Alike(group) for group in groups)

    def share(self, processes: ProcessGroup) -> None:
        """From now on a batch is spread over these processes."""
        self.processes = processes
        for module in self.modules():
            if getattr(module, "weights_from_logits", False):
                setattr(module, "processes", processes)  # noqa: B010

    def forward(self, logits: Tensor, targets: Tensor, epoch: Tensor, batch: GlobalBatch | None = None) -> Tensor:
        values = []
        for number, (group, own, labels) in enumerate(self._split(logits, targets)):
            if group.runs == 1:
                terms = leading(group.first(own.squeeze(0), labels.squeeze(0), epoch))
            else:
                terms = group(own, labels, epoch)
            by = [None] * len(terms) if batch is None else batch.totals[number]
            if batch is not None and group.weights_from_logits:  # known only now: a micro-batch has means of its own
                by = [batch.micro_batches * self.processes.all_sum(total(term)) for term in terms]
            values.append(add(torch.add, [reduce(term, divisor) for term, divisor in zip(terms, by, strict=True)]))
        return values[0] if len(values) == 1 else torch.cat(values)

    @torch.no_grad()
    def global_batch(self, logits: Tensor, targets: Tensor, epoch: Tensor, micro_batches: int) -> GlobalBatch:
        """Of all processes. `targets` (R,B) are this process's; of `logits`, of a micro-batch, the shape is read.

        Weights follow from targets, so that zeros do for the logits of micro-batches that are still to come.
        """
        size = logits.new_full((1,), targets.shape[1])
        blank = logits.new_zeros(*logits.shape[:2], targets.shape[1], logits.shape[3])
        terms = [() if group.weights_from_logits else group(*own, epoch) for group, *own in self._split(blank, targets)]
        totals = [[total(term) for term in own] for own in terms]
        flat = [size, *(each.flatten() for own in totals for each in own)]
        size, *sums = self.processes.all_sum(torch.cat(flat)).split([len(each) for each in flat])
        summed = iter(sums)
        return GlobalBatch(size[0], [[next(summed).view_as(each) for each in own] for own in totals], micro_batches)

    def _split(self, *of_runs: Tensor) -> list[tuple[Any, ...]]:
        """Each group with what belongs to its runs."""
        if len(self.groups) == 1:
            return [(self.groups[0], *of_runs)]
        return list(zip(self.groups, *(tensor.split(self.sizes) for tensor in of_runs), strict=True))


class _Alike(nn.Module):
    """Losses of one form: the first one's code, mapped over runs with every run's own buffers."""

    def __init__(self, losses: Sequence[nn.Module]) -> None:
        super().__init__()
        self.runs, self.first = len(losses), losses[0]
        self.weights_from_logits = getattr(self.first, "weights_from_logits", False)
        buffers = [dict(loss.named_buffers()) for loss in losses]
        self.names = list(buffers[0]) if self.runs > 1 else []
        for i, name in enumerate(self.names):
            self.register_buffer(f"stacked_{i}", torch.stack([own[name] for own in buffers]))

    def forward(self, logits: Tensor, targets: Tensor, epoch: Tensor) -> tuple[Term, ...]:
        """Terms with a leading axis of runs."""
        if self.runs == 1:
            return leading(self.first(logits.squeeze(0), targets.squeeze(0), epoch))
        stacked = {name: getattr(self, f"stacked_{i}") for i, name in enumerate(self.names)}
        terms = lambda buffers, *given: terms_of(functional_call(self.first, buffers, given))  # noqa: E731
        return torch.vmap(terms, in_dims=(0, 0, 0, None))(stacked, logits, targets, epoch)


def _module(loss: Loss) -> nn.Module:
    if isinstance(loss, nn.Module):
        return loss
    module = nn.Module()
    module.forward = loss
    return module


class Repulsions:
    """The repulsion of each run by its own settings: (R,). Runs without one have 0."""

    def __init__(self, settings: Sequence[TrainConfig], device: torch.device) -> None:
        self.groups: list[tuple[str, int, Tensor]] = []  # kind, runs, tau and strength (runs, 2)
        for group in neighbours(list(settings), lambda own: own.repulsion):
            numbers = torch.tensor([[own.repulsion_tau, own.repulsion_strength] for own in group], device=device)
            self.groups.append((group[0].repulsion, len(group), numbers))

    def __call__(self, weights: Tensor, logits: Tensor, epoch: Tensor) -> Tensor:
        """Of head weights (R,M,F,C) and logits (R,M,B,C)."""
        sizes = [runs for _, runs, _ in self.groups]
        found = []
        for (kind, runs, numbers), own, seen in zip(
            self.groups, weights.split(sizes), logits.split(sizes), strict=True
        ):
            none = kind == "none"
            found.append(logits.new_zeros(runs) if none else repulsion(kind, own, seen, epoch, *numbers.unbind(1)))
        return torch.cat(found)


def neighbours(items: Sequence[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Items in their order, cut where the key changes.

    >>> neighbours([1, 3, 2, 5], lambda n: n % 2)
    [[1, 3], [2], [5]]
    """
    return [list(group) for _, group in groupby(items, key)]


def _form(loss: nn.Module) -> Hashable:
    """Equal for losses that differ in the numbers of their buffers alone.

    Plain attributes steer the code; an attribute of any other kind is like no other.
    """
    plain, parts = (bool, int, float, str, type(None)), []
    for name, part in loss.named_modules():
        public = {key: value for key, value in vars(part).items() if not key.startswith("_") and key != "training"}
        constants = [(key, value if isinstance(value, plain) else id(value)) for key, value in sorted(public.items())]
        shapes = [(key, buffer.shape, buffer.dtype) for key, buffer in part.named_buffers(recurse=False)]
        parts.append((name, type(part), tuple(constants), tuple(shapes)))
    return tuple(parts)

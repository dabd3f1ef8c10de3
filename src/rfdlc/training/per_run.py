"""What every run of a stack has of its own, in few calls for all runs: its objective and its repulsion.

Neighbours of one form (the same modules, numbers of their own) take one call, so that five seeds of a method launch as
many kernels as one.
"""

from collections.abc import Callable, Hashable, Sequence
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rfdlc.training.config import Settings
from rfdlc.training.losses.repulsion import repulsion
from rfdlc.training.processes.whole import Whole

Item = TypeVar("Item")


class Objectives(nn.Module):
    """One objective a run: (logits (R,M,B,C), targets (R,B), epoch) -> losses (R,).

    A fourth argument, where given, is the whole batch of which these samples are a share.
    """

    def __init__(self, objectives: Sequence[nn.Module]) -> None:
        super().__init__()
        groups = neighbours(list(objectives), _form)
        self.sizes = [len(group) for group in groups]
        self.groups = nn.ModuleList(_Alike(group) for group in groups)

    def forward(self, logits: Tensor, targets: Tensor, epoch: Tensor, whole: Whole | None = None) -> Tensor:
        if len(self.groups) == 1:
            return self.groups[0](whole, epoch, logits, targets, *(() if whole is None else (whole.counts,)))
        counts = [() for _ in self.sizes] if whole is None else [(own,) for own in whole.counts.split(self.sizes)]
        parts = zip(self.groups, logits.split(self.sizes), targets.split(self.sizes), counts, strict=True)
        return torch.cat([group(whole, epoch, own, labels, *known) for group, own, labels, known in parts])


class _Alike(nn.Module):
    """Objectives of one form: the first one's code, mapped over runs with every run's own buffers."""

    def __init__(self, objectives: Sequence[nn.Module]) -> None:
        super().__init__()
        self.runs, self.first = len(objectives), objectives[0]
        buffers = [dict(objective.named_buffers()) for objective in objectives]
        self.names = list(buffers[0]) if self.runs > 1 else []
        for i, name in enumerate(self.names):
            self.register_buffer(f"stacked_{i}", torch.stack([own[name] for own in buffers]))

    def forward(self, whole: Whole | None, epoch: Tensor, *of_runs: Tensor) -> Tensor:
        """`of_runs`: logits (R,M,B,C), targets (R,B) and, of a share, the counts (R,C) of the whole batch."""
        if self.runs == 1:
            return self.first(*_arguments(whole, epoch, *(own.squeeze(0) for own in of_runs)))[None]
        stacked = {name: getattr(self, f"stacked_{i}") for i, name in enumerate(self.names)}
        dims = 0, None, None, *(0 for _ in of_runs)
        return torch.vmap(self._loss, in_dims=dims)(stacked, whole, epoch, *of_runs)

    def _loss(self, buffers: dict[str, Tensor], whole: Whole | None, epoch: Tensor, *of_run: Tensor) -> Tensor:
        return functional_call(self.first, buffers, _arguments(whole, epoch, *of_run))


def _arguments(whole: Whole | None, epoch: Tensor, logits: Tensor, target: Tensor, *counts: Tensor) -> tuple[Any, ...]:
    """What an objective of one run is called with."""
    return (logits, target, epoch) if whole is None else (logits, target, epoch, whole.with_counts(*counts))


class Repulsions:
    """The repulsion of each run by its own settings: (R,). Runs without one have 0."""

    def __init__(self, settings: Sequence[Settings], device: torch.device) -> None:
        self.groups: list[tuple[str, int, Tensor, Tensor]] = []  # kind, runs, tau (runs,), strength (runs,)
        for group in neighbours(list(settings), lambda own: own.repulsion):
            numbers = torch.tensor([[own.repulsion_tau, own.repulsion_strength] for own in group], device=device)
            self.groups.append((group[0].repulsion, len(group), numbers[:, 0], numbers[:, 1]))

    def __call__(self, weights: Tensor, logits: Tensor, epoch: Tensor) -> Tensor:
        """Of head weights (R,M,F,C) and logits (R,M,B,C)."""
        sizes = [runs for _, runs, _, _ in self.groups]
        parts = zip(self.groups, weights.split(sizes), logits.split(sizes), strict=True)
        return torch.cat([self._of(group, own, seen, epoch) for group, own, seen in parts])

    def _of(self, group: tuple[str, int, Tensor, Tensor], weights: Tensor, logits: Tensor, epoch: Tensor) -> Tensor:
        kind, runs, tau, strength = group
        return logits.new_zeros(runs) if kind == "none" else repulsion(kind, weights, logits, epoch, tau, strength)


def neighbours(items: Sequence[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Items in their order, cut where the key changes.

    >>> neighbours([1, 3, 2, 5], lambda n: n % 2)
    [[1, 3], [2], [5]]
    """
    return [list(group) for _, group in groupby(items, key)]


def _form(objective: nn.Module) -> Hashable:
    """Equal for objectives that differ in the numbers of their buffers alone."""
    return tuple((name, type(part), _constants(part), _shapes(part)) for name, part in objective.named_modules())


def _constants(part: nn.Module) -> Hashable:
    """Plain attributes, which steer the code; an attribute of any other kind is like no other."""
    public = {name: value for name, value in vars(part).items() if not name.startswith("_") and name != "training"}
    plain = (bool, int, float, str, type(None))
    return tuple((name, value if isinstance(value, plain) else id(value)) for name, value in sorted(public.items()))


def _shapes(part: nn.Module) -> Hashable:
    return tuple((name, buffer.shape, buffer.dtype) for name, buffer in part.named_buffers(recurse=False))

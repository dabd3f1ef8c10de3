"""A batch that comes in shares: over processes, and over the parts of an accumulated step.

What an objective divides by must be a sum over the whole batch, not over the share at hand: a mean of the shares' means
would weigh the samples of a share by what else happens to be in it. Mostly classes alone say what to divide by, so one
sum of class counts over all processes, known before any logit is, serves every term. An objective of a share is that
share's part of the whole's: they add up.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rfdlc.training.processes.group import Processes


@dataclass(frozen=True)
class Whole:
    """The batch of one run, or of every run of a stack, of which an objective sees a share."""

    counts: Tensor  # (C,) or (R, C): samples of each class in the whole batch
    processes: Processes
    parts: int  # that each process computes one after the other

    @property
    def size(self) -> Tensor:
        """() or (R,)."""
        return self.counts.sum(-1)

    def with_counts(self, counts: Tensor) -> "Whole":
        """The batch of other runs."""
        return replace(self, counts=counts)


def class_counts(targets: Tensor, classes: int) -> Tensor:
    """(R, B) targets to (R, C) counts, without a host value inside."""
    counts = torch.zeros(len(targets), classes, device=targets.device)
    return counts.scatter_add_(1, targets, torch.ones_like(targets, dtype=counts.dtype))


def batch_mean(values: Tensor, whole: Whole | None) -> Tensor:
    """Mean over the last axis, the batch: (..., B) -> (...); of a share, its part of the whole's mean."""
    return values.mean(-1) if whole is None else values.sum(-1) / whole.size.to(values)


def weighted_mean(values: Tensor, weights: Tensor, target: Tensor, whole: Whole | None) -> Tensor:
    """Mean over the batch weighted by class: values (..., B), weights (C,), target (B,) -> (...); or a share's part."""
    each = weights[target]
    total = each.sum() if whole is None else whole.counts.to(weights) @ weights
    return (values * each).sum(-1) / total

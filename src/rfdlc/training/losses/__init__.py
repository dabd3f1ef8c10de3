"""What is minimised: losses that return one value per sample, and how these become the
losses of a stack of runs.

A loss is a function or module: (logits (M,B,C), targets (B,), epoch ()) -> values (M,B)
or (B,), a pair (values, weights), or a list of such terms, which are added. The
training step divides sums by the totals of the global batch, so that its shards, one
per process, and their micro-batches add up.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from functools import reduce as fold
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from rfdlc.errors import InputError
from rfdlc.training.distributed import SINGLE, ProcessGroup

Term = tuple[Tensor, ...]  # values (M,B) or (B,); and weights (B,) or (M,B)


class CrossEntropy(NamedTuple):
    """The term (-log p(y), w[y]) before it is split by sample: its mean over a whole
    batch is one operation.
    """

    log_p: Tensor  # (M,B,C)
    target: Tensor  # (B,)
    weights: Tensor | None  # (C,)

    def per_sample(self) -> Term:
        values = -true_class(self.log_p, self.target)
        return (
            (values,) if self.weights is None else (values, self.weights[self.target])
        )

    def mean(self) -> Tensor:
        targets = self.target.expand(
            len(self.log_p), -1
        ).flatten()  # the same for all particles
        return functional.nll_loss(self.log_p.flatten(0, 1), targets, self.weights)


Loss = Callable[
    [Tensor, Tensor, Tensor],
    Tensor | Term | CrossEntropy | Sequence[Tensor | Term | CrossEntropy],
]


def true_class(values: Tensor, target: Tensor) -> Tensor:
    return values.gather(-1, target.expand(len(values), -1).unsqueeze(-1)).squeeze(
        -1
    )  # (M, B, C) -> (M, B)


def terms_of(result: Any) -> list[Term | CrossEntropy]:
    single = isinstance(result, Tensor) or (
        isinstance(result, tuple) and isinstance(result[0], Tensor)
    )
    return [
        (term,) if isinstance(term, Tensor) else term
        for term in ([result] if single else result)
    ]


def checked(result: Any, logits: Tensor) -> Any:
    """What a loss returned for logits (..., M,B,C), if it has one value per sample;
    others would train to chance.
    """
    particles, samples, classes = logits.shape[-3:]
    for tensor in (
        each for t in terms_of(result) if not isinstance(t, CrossEntropy) for each in t
    ):
        if tensor.ndim not in (1, 2) or tensor.shape[-1] != samples:
            raise InputError(
                f"the loss returned the shape {tuple(tensor.shape)} for {particles}"
                f" particles, {samples} samples and {classes} classes: expected one"
                f" value per sample, ({particles}, {samples}) or ({samples},); it takes"
                " no mean, the training step does"
            )
    return result


def per_sample(result: Any) -> tuple[Term, ...]:
    return tuple(
        t.per_sample() if isinstance(t, CrossEntropy) else tuple(t)
        for t in terms_of(result)
    )


def total(term: Term) -> Tensor:
    """What the sum of a term is divided by: the sum of its weights, (R,) or (R,M), or
    the number of samples, ().
    """
    values, *weights = term
    return (
        weights[0].detach().sum(-1)
        if weights
        else values.new_full((), values.shape[-1])
    )


def reduce(term: Term, by: Tensor | None = None, runs: int = 1) -> Tensor:
    """The weighted mean over samples, then the mean over particles: values (R,M,B) or
    (R,B) -> (R,).

    `by` is the total of the global batch of which they are a part. Weights are
    constants; if all are 0, so is the loss. `runs` is the number of axes of runs:
    without one, -> ().
    """
    values, *weights = term
    axes = tuple(range(runs, values.ndim))
    if not weights and by is None:
        return values.mean(axes)
    divisor = (total(term) if by is None else by) * math.prod(values.shape[runs:-1])
    if not weights:
        return values.sum(axes) / divisor
    share = weights[0].detach() / divisor.clamp(
        min=torch.finfo(divisor.dtype).tiny
    ).unsqueeze(-1)
    return (values * (share if share.ndim == values.ndim else share.unsqueeze(-2))).sum(
        axes
    )


def mean_loss(result: Any) -> Tensor:
    """The loss of one whole batch, (), from what a loss returns for it.

    >>> values, weights = torch.tensor([[1.0, 4.0]]), torch.tensor([1.0, 2.0])
    >>> float(mean_loss((values, weights)))
    3.0
    """
    return fold(
        torch.add,
        [
            t.mean() if isinstance(t, CrossEntropy) else reduce(t, runs=0)
            for t in terms_of(result)
        ],
    )


# -- every run of a stack has a loss of its own, in few calls for all runs
# --------------------------------------------------------------------------------------


class GlobalBatch(NamedTuple):
    """What a micro-batch must know of the global batch of which it is a part."""

    size: Tensor  # (): number of samples
    totals: list[
        list[Tensor]
    ]  # for each group of losses and each of its terms, what its sum is divided by
    micro_batches: int  # that each process computes one after another


class RunLosses(nn.Module):
    """One loss per run: (logits (R,M,B,C), targets (R,B), epoch) -> (R,), or a
    micro-batch's part of a `GlobalBatch`.

    Neighbours of one form (the same modules, numbers of their own) take one call: five
    seeds launch no more than one.
    """

    processes = SINGLE

    def __init__(self, losses: Sequence[Loss]) -> None:
        super().__init__()
        groups = [list(group) for _, group in groupby(map(_module, losses), _form)]
        self.sizes = [len(group) for group in groups]
        self.groups = nn.ModuleList(_Alike(group) for group in groups)

    def share(self, processes: ProcessGroup) -> None:
        """From now on a batch is spread over these processes."""
        self.processes = processes
        for module in self.modules():
            if getattr(module, "weights_from_logits", False):
                setattr(module, "processes", processes)  # noqa: B010

    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        epoch: Tensor,
        batch: GlobalBatch | None = None,
    ) -> Tensor:
        values = []
        for number, (group, own, labels) in enumerate(self._split(logits, targets)):
            if batch is None and group.runs == 1:
                found = checked(
                    group.first(own.squeeze(0), labels.squeeze(0), epoch), own
                )
                values.append(mean_loss(found).unsqueeze(0))
                continue
            terms = group(own, labels, epoch)
            by = [None] * len(terms) if batch is None else batch.totals[number]
            if (
                batch is not None and group.weights_from_logits
            ):  # known only now: a micro-batch has means of its own
                by = [
                    batch.micro_batches * self.processes.all_sum(total(term))
                    for term in terms
                ]
            values.append(fold(torch.add, map(reduce, terms, by)))
        return values[0] if len(values) == 1 else torch.cat(values)

    @torch.no_grad()
    def global_batch(
        self, logits: Tensor, targets: Tensor, epoch: Tensor, micro_batches: int
    ) -> GlobalBatch:
        """Of all processes, from this one's targets (R,B). Weights follow from them: of
        `logits` the shape is read.
        """
        size = logits.new_full((1,), targets.shape[1])
        blank = logits.new_zeros(*logits.shape[:2], targets.shape[1], logits.shape[3])
        terms = [
            () if group.weights_from_logits else group(*own, epoch)
            for group, *own in self._split(blank, targets)
        ]
        totals = [[total(term) for term in own] for own in terms]
        flat = [size, *(each.flatten() for own in totals for each in own)]
        size, *sums = self.processes.all_sum(torch.cat(flat)).split(
            [len(each) for each in flat]
        )
        summed = iter(sums)
        return GlobalBatch(
            size[0],
            [[next(summed).view_as(each) for each in own] for own in totals],
            micro_batches,
        )

    def _split(self, *of_runs: Tensor) -> list[tuple[Any, ...]]:
        if len(self.groups) == 1:
            return [(self.groups[0], *of_runs)]
        return list(
            zip(
                self.groups,
                *(tensor.split(self.sizes) for tensor in of_runs),
                strict=True,
            )
        )


class _Alike(nn.Module):
    """Losses of one form: the first one's code, mapped over runs with every run's own
    buffers, to (R, ...).
    """

    def __init__(self, losses: Sequence[nn.Module]) -> None:
        super().__init__()
        self.runs, self.first = len(losses), losses[0]
        self.weights_from_logits = getattr(self.first, "weights_from_logits", False)
        buffers = [dict(loss.named_buffers()) for loss in losses]
        self.names = list(buffers[0]) if self.runs > 1 else []
        for i, name in enumerate(self.names):
            self.register_buffer(
                f"stacked_{i}", torch.stack([own[name] for own in buffers])
            )

    def forward(
        self, logits: Tensor, targets: Tensor, epoch: Tensor
    ) -> tuple[Term, ...]:
        if self.runs == 1:
            terms = per_sample(
                checked(
                    self.first(logits.squeeze(0), targets.squeeze(0), epoch), logits
                )
            )
            return tuple(
                tuple(tensor.unsqueeze(0) for tensor in term) for term in terms
            )
        stacked = {
            name: getattr(self, f"stacked_{i}") for i, name in enumerate(self.names)
        }

        def of_one_run(own: Any, *given: Tensor) -> Any:
            return per_sample(
                checked(functional_call(self.first, own, given), given[0])
            )

        return torch.vmap(of_one_run, (0, 0, 0, None))(stacked, logits, targets, epoch)


def _module(loss: Loss) -> nn.Module:
    module = loss if isinstance(loss, nn.Module) else nn.Module()
    if module is not loss:
        module.forward = loss
    return module


def _form(loss: nn.Module) -> Hashable:
    """Equal for losses that differ in the numbers of their buffers alone: attributes
    steer the code.
    """
    plain, parts = (bool, int, float, str, type(None)), []
    for name, part in loss.named_modules():
        public = {
            key: value
            for key, value in vars(part).items()
            if not key.startswith("_") and key != "training"
        }
        constants = [
            (key, value if isinstance(value, plain) else id(value))
            for key, value in sorted(public.items())
        ]
        shapes = [
            (key, buffer.shape, buffer.dtype)
            for key, buffer in part.named_buffers(recurse=False)
        ]
        constants += [
            (key, id(frozen)) for key, frozen in part.named_parameters(recurse=False)
        ]
        parts.append((name, type(part), tuple(constants), tuple(shapes)))
    return tuple(parts)

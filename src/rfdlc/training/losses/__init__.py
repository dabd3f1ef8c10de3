"""What is minimised: losses that return one value per sample, and how these become the loss of a global batch.

A loss is a function or module: (logits (M,B,C), targets (B,), epoch ()) -> values (M,B) or (B,), a pair (values,
weights), or a list of such terms, which are added. It never divides by a batch, since a global batch may come in
shards, one per process, and a shard in micro-batches: the training step divides sums by the totals of the global batch,
so that micro-batches, and their gradients, add up.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Term = tuple[Tensor, ...]  # values (M,B) or (B,); and weights (B,) or (M,B)
Loss = Callable[[Tensor, Tensor, Tensor], Tensor | Term | Sequence[Tensor | Term]]


def terms_of(result: Any) -> tuple[Term, ...]:
    """What a loss returns, as a tuple of terms."""
    if isinstance(result, Tensor) or (isinstance(result, tuple) and isinstance(result[0], Tensor)):
        result = [result]
    return tuple((term,) if isinstance(term, Tensor) else tuple(term) for term in result)


def leading(result: Any) -> tuple[Term, ...]:
    """The terms of one run with a leading axis of runs, of length one."""
    return tuple(tuple(tensor.unsqueeze(0) for tensor in term) for term in terms_of(result))


def total(term: Term) -> Tensor:
    """What the sum of a term is divided by: the sum of its weights, (R,) or (R,M), or the number of samples, ()."""
    values, *weights = term
    return weights[0].detach().sum(-1) if weights else values.new_full((), values.shape[-1])


def reduce(term: Term, by: Tensor | None = None) -> Tensor:
    """The weighted mean over samples, then the mean over particles: values (R,M,B) or (R,B) -> (R,).

    `by` is the total of the global batch of which these samples are a part; by default they are all of it. Weights are
    constants. Where no sample has a weight the loss is 0.
    """
    values, *weights = term
    axes = tuple(range(1, values.ndim))
    if not weights and by is None:
        return values.mean(axes)
    divisor = (total(term) if by is None else by) * (values[0].numel() // values.shape[-1])
    if not weights:
        return values.sum(axes) / divisor
    share = weights[0].detach() / divisor.clamp(min=torch.finfo(divisor.dtype).tiny).unsqueeze(-1)
    return (values * (share if share.ndim == values.ndim else share.unsqueeze(1))).sum(axes)


def mean_loss(result: Any) -> Tensor:
    """The loss of one whole batch, from what a loss returns for it.

    >>> values, weights = torch.tensor([[1.0, 4.0]]), torch.tensor([1.0, 2.0])
    >>> float(mean_loss((values, weights)))
    3.0
    """
    return torch.stack([reduce(term) for term in leading(result)]).sum()

"""The contract of a loss, and how per-sample values become the loss of a global batch.

A global batch may come in shards, one per process, and a shard in micro-batches. A mean of their means would weigh a
sample by what else happens to be in its micro-batch, so a micro-batch contributes the sum of its values divided by the
totals of the global batch: contributions, and their gradients, add up.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

Term = tuple[Tensor] | tuple[Tensor, Tensor]  # values (M,B) or (B,); and weights (B,) or (M,B)
Loss = Callable[[Tensor, Tensor, Tensor], Tensor | Term | Sequence[Term]]
"""(logits (M,B,C), targets (B,), epoch ()) -> values, (values, weights), or a list of such terms, which are added."""


def terms_of(result: Tensor | Term | Sequence[Term]) -> tuple[Term, ...]:
    """What a loss returns, as a tuple of terms."""
    if isinstance(result, Tensor):
        return ((result,),)
    if isinstance(result, tuple) and isinstance(result[0], Tensor):
        return (cast(Term, result),)
    return tuple((term,) if isinstance(term, Tensor) else term for term in cast(Sequence[Term], result))


def leading(result: Tensor | Term | Sequence[Term]) -> tuple[Term, ...]:
    """The terms of one run with a leading axis of runs, of length one."""
    return tuple(tuple(tensor[None] for tensor in term) for term in terms_of(result))  # type: ignore[misc]


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
    by, particles = total(term) if by is None else by, values[0].numel() // values.shape[-1]
    if not weights:
        return values.sum(axes) / (by * particles)
    each = weights[0].detach()
    share = each / (by * particles).clamp(min=torch.finfo(by.dtype).tiny)[..., None]
    return (values * (share if share.ndim == values.ndim else share[:, None])).sum(axes)


def mean_loss(result: Tensor | Term | Sequence[Term]) -> Tensor:
    """The loss of one whole batch, from what a loss returns for it.

    >>> values, weights = torch.tensor([[1.0, 4.0]]), torch.tensor([1.0, 2.0])
    >>> float(mean_loss((values, weights)))
    3.0
    """
    return torch.stack([reduce(term) for term in leading(result)]).sum()

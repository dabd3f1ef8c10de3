"""Repulsion: minus half the mean log variance across particles, the entropy of a diagonal Gaussian over them.

On head weights (the paper), on normalised head weights (a cosine head cannot answer by growing norms), or on
predictions. It fades as exp(-epoch / tau).
"""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

REPULSIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    # name -> (head weights (R,M,F,C), logits (R,M,B,C)) -> what must differ between particles, (R,M,...)
    "head": lambda weights, logits: weights,
    "head-normalised": lambda weights, logits: functional.normalize(weights, dim=2),
    "predictions": lambda weights, logits: logits.softmax(-1),
}
FLOORS = {"head": 1e-12, "head-normalised": 1e-12, "predictions": 1e-4}  # added to the variance, for the log


def repulsion(
    kind: str, weights: Tensor, logits: Tensor, epoch: Tensor, tau: float | Tensor, strength: float | Tensor = 1.0
) -> Tensor:
    """-strength/2 exp(-epoch/tau) mean log(variance + floor), the variance biased (1/M) across particles: (R,).

    `tau` and `strength` are numbers, or one per run, (R,).
    """
    values = REPULSIONS[kind](weights, logits)
    spread = values.var(dim=1, correction=0) + FLOORS[kind]
    return -0.5 * strength * (-epoch / tau).exp() * spread.log().flatten(1).mean(1)

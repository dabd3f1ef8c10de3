"""Consistency: particles are trained towards their own predictions of a weaker view,
where these are right.
"""

import torch
from torch import Tensor
from torch.nn import functional


class Consistency:
    """The cross-entropy with a particle's own detached prediction of a weaker view, if
    right (Zhao et al. 2023).

    `factor` is that of the term once `epochs` have passed; it rises linearly until
    then.
    """

    def __init__(self, factor: float, epochs: float) -> None:
        self.factor, self.epochs = factor, max(1.0, epochs)

    @torch.no_grad()
    def aims(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Predictions (R, M, B, C) from logits of that shape; 0 where they are not the
        labels (R, B).
        """
        right = logits.argmax(-1) == labels.unsqueeze(1)
        return logits.softmax(-1) * right.unsqueeze(-1)

    def __call__(self, logits: Tensor, aims: Tensor, epoch: Tensor) -> Tensor:
        """Values (R, M, B) of the term."""
        return (
            -self.factor
            * (epoch / self.epochs).clamp(max=1)
            * (aims * functional.log_softmax(logits, -1)).sum(-1)
        )

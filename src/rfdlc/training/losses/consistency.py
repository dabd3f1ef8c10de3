"""Terms that train particles towards predictions: their own of a weaker view, or those of an earlier ensemble."""

import torch
from torch import Tensor
from torch.nn import functional

TEMPERATURE = 2.0  # of distillation; 1 was as accurate on held-out data, with a higher log loss


class Consistency:
    """The cross-entropy with a particle's own detached prediction of a weaker view, if right (Zhao et al. 2023).

    `factor` is that of the term once `epochs` have passed; it rises linearly until then.
    """

    def __init__(self, factor: float, epochs: float) -> None:
        self.factor, self.epochs = factor, max(1.0, epochs)

    @torch.no_grad()
    def aims(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Predictions (R, M, B, C) from logits of that shape; 0 where they are not the labels (R, B)."""
        right = logits.argmax(-1) == labels.unsqueeze(1)
        return logits.softmax(-1) * right.unsqueeze(-1)

    def __call__(self, logits: Tensor, aims: Tensor, epoch: Tensor) -> Tensor:
        """Values (R, M, B) of the term."""
        ramp = (epoch / self.epochs).clamp(max=1)
        return -(self.factor * ramp) * (aims * functional.log_softmax(logits, -1)).sum(-1)


def distilled(logits: Tensor, teacher: Tensor) -> Tensor:
    """Cross-entropy (R, M, B) of particles with an ensemble that sees the same inputs, by mean logits (R, M, B, C).

    Logits of both are divided by a temperature T, and values multiplied by T^2 (Hinton et al. 2015).
    """
    aims = (teacher.mean(1, keepdim=True) / TEMPERATURE).softmax(-1)
    return -(TEMPERATURE**2) * (aims * functional.log_softmax(logits / TEMPERATURE, -1)).sum(-1)

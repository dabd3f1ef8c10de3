"""Consistency of particles: each is trained towards what itself or the ensemble predicts, where that is right."""

import torch
from torch import Tensor
from torch.nn import functional

TARGETS, VIEWS = ("own", "ensemble"), ("weak", "same")


class Consistency:
    """The cross-entropy of softmax(z / T) with detached predictions, times T^2, `factor` and a ramp over `epochs`.

    Predictions are those of the particle itself (Zhao et al. 2023) or of the ensemble (Li et al. 2022), of a weaker
    view of the sample or of the same one. A prediction that is not right teaches nothing.

    Parameters
    ----------
    factor : float
        Of this term in the loss, once `epochs` have passed; it rises linearly until then.
    target : {"own", "ensemble"}
        Whose predictions.
    temperature : float
        T, by which logits are divided.
    """

    def __init__(self, factor: float, target: str, temperature: float, epochs: float) -> None:
        self.factor, self.ensemble, self.temperature = factor, target == "ensemble", temperature
        self.epochs = max(1.0, epochs)

    @torch.no_grad()
    def aims(self, logits: Tensor, *labels: Tensor) -> Tensor:
        """Predictions (R, M or 1, B, C) from logits (R, M, B, C); 0 where they are not right: none of labels (R, B)."""
        if self.ensemble:
            logits = logits.mean(1, keepdim=True)
        likeliest = logits.argmax(-1)  # (R, M or 1, B)
        right = torch.stack([likeliest == own.unsqueeze(1) for own in labels]).any(0)
        return (logits / self.temperature).softmax(-1) * right.unsqueeze(-1)

    def __call__(self, logits: Tensor, aims: Tensor, epoch: Tensor) -> Tensor:
        """Values (R, M, B) of the term."""
        log_p = functional.log_softmax(logits / self.temperature, -1)
        return -(self.factor * self.temperature**2 * (epoch / self.epochs).clamp(max=1)) * (aims * log_p).sum(-1)

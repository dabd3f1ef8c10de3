"""DecisionHead: the torch twin of Decider, so that an exported graph ends in actions and not in logits."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from rfdlc.decide.decider import Decider
from rfdlc.decide.scores import PROBABILITY_FLOOR
from rfdlc.errors import InputError

RULES = ("expected-utility", "cobb")  # the logarithm of an expected gain has its maximum where the gain has it
OUTPUTS = ("probabilities", "expected_utility", "action", "uncertainty", "mutual_information")


@dataclass(frozen=True)
class Stages:
    """What a Decider does to logits, as plain numbers."""

    mean_logits: bool
    weights: ArrayLike  # (M,) of the particles
    affine: tuple[ArrayLike, ArrayLike]  # calibration: W, a number, (C,) or (C, C), and b
    ratio: ArrayLike  # (C,) target prior / prior that the probabilities carry

    @classmethod
    def of(cls, decider: Decider, particles: int) -> "Stages":
        """Everything that `decider` has fitted and been told, for this many particles."""
        if decider.rule not in RULES:
            raise InputError(
                f"the decider's rule is {decider.rule!r}, but an exported graph decides by expected utility alone; "
                "for arg max use the utility one-hot, which decides the same"
            )
        ratio = decider.ratio()
        return cls(
            decider.combine == "mean-logits" or particles == 1,  # one particle's logits are taken as they are
            np.full(particles, 1 / particles) if decider.weights is None else decider.weights,
            decider.fitted.as_affine() if decider.fitted else (1.0, 0.0),
            np.ones(len(decider.utility.classes)) if ratio is None else ratio,
        )


class DecisionHead(nn.Module):
    """Particle logits (M, B, C) and a utility (C, A) -> probabilities, expected utility, action, uncertainty, ...

    `uncertainty` is the entropy of the probabilities over log C: 0 is certain, 1 knows nothing.
    `mutual_information` is what the particles disagree about, in nats (0 for one particle).
    """

    def __init__(self, decider: Decider, particles: int) -> None:
        super().__init__()
        stages = Stages.of(decider, particles)
        self.mean_logits = stages.mean_logits
        self.register_buffer("weights", torch.tensor(stages.weights, dtype=torch.float32).view(-1, 1, 1))
        self.register_buffer("slope", torch.tensor(stages.affine[0], dtype=torch.float32))
        self.register_buffer("bias", torch.tensor(stages.affine[1], dtype=torch.float32))
        self.register_buffer("ratio", torch.tensor(stages.ratio, dtype=torch.float32))
        self.weights: Tensor
        self.slope: Tensor
        self.bias: Tensor
        self.ratio: Tensor

    def forward(self, logits: Tensor, utility: Tensor) -> tuple[Tensor, ...]:
        """In the order of OUTPUTS."""
        each = logits.softmax(-1)  # (M, B, C)
        combined = (logits * self.weights).sum(0) if self.mean_logits else _safe_log((each * self.weights).sum(0))
        corrected = (self._scaled(combined) + self.bias).softmax(-1) * self.ratio
        probabilities = corrected / corrected.sum(-1, keepdim=True)  # (B, C)
        expected = probabilities @ utility  # (B, A)
        uncertainty = _entropy(probabilities) / float(np.log(max(2, probabilities.shape[-1])))
        disagreement = (_entropy(each.mean(0)) - _entropy(each).mean(0)).clamp_min(0)
        return probabilities, expected, expected.argmax(-1), uncertainty, disagreement

    def _scaled(self, combined: Tensor) -> Tensor:
        """W log p (B, C); a number W needs no normalised log p."""
        if not self.slope.ndim:
            return combined * self.slope
        log_p = combined.log_softmax(-1)
        return log_p * self.slope if self.slope.ndim == 1 else log_p @ self.slope.T


def _safe_log(probabilities: Tensor) -> Tensor:
    return probabilities.clamp_min(PROBABILITY_FLOOR).log()


def _entropy(probabilities: Tensor) -> Tensor:
    return -(probabilities * _safe_log(probabilities)).sum(-1)

"""How particles become what a network predicts: logits (R,M,B,C), features (R,M,B,F) -> logits (R,M',B,C), uncertainty.

Most methods leave their particles as they are and a Decider averages them. Experts that are routed, weighed sample by
sample or silent on some classes are combined inside the network, M' = 1, so that whoever predicts, calibrates, exports
or serves needs to know nothing of it. The uncertainty of each sample, (R,B), is a combination's own, called `measures`.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from rfdlc.decide.classes import Classes
from rfdlc.training.networks.stack import Linear

Combined = tuple[Tensor, Tensor | None]


class Combination(nn.Module):
    """Every particle as it is."""

    measures = ""

    def forward(self, logits: Tensor, features: Tensor) -> Combined:
        return logits, None


class Router(Combination):
    """Ask one expert after the other while the answer so far looks wrong; predict the mean of those asked.

    Features of expert i and the largest mean logits so far give a score (Wang et al. 2021, section 3.3 and its code).
    """

    measures = "experts_used"

    def __init__(
        self, runs: int, particles: int, width: int, classes: int, *, choices: int = 30, hidden: int = 16
    ) -> None:
        super().__init__()
        self.choices = min(choices, classes)
        self.hidden = Linear(runs * (particles - 1), width, hidden)
        self.score = Linear(runs, hidden + self.choices, 1)  # the same for all experts of a run

    def scores(self, logits: Tensor, features: Tensor) -> Tensor:
        """(R, M-1, B): above 0, expert i + 1 is asked."""
        runs, particles = logits.shape[:2]
        asked = torch.arange(1, particles, device=logits.device).view(-1, 1, 1)
        best = (logits.cumsum(1)[:, :-1] / asked).topk(self.choices, dim=-1).values  # (R, M-1, B, choices)
        seen = functional.normalize(features[:, :-1], dim=-1).flatten(0, 1)
        hidden = self.hidden(seen).relu().unflatten(0, (runs, particles - 1))
        scores = self.score(torch.cat([best, hidden], -1).flatten(1, 2))
        return scores.unflatten(1, (particles - 1, -1))[..., 0]

    def forward(self, logits: Tensor, features: Tensor) -> Combined:
        asked = (self.scores(logits, features) > 0).to(logits.dtype).cumprod(1)
        used = torch.cat([torch.ones_like(asked[:, :1]), asked], 1)  # (R, M, B): the first always is
        wide = used[..., None]
        return (wide * logits).sum(1, keepdim=True) / wide.sum(1, keepdim=True), used.sum(1)


def engagement(logits: Tensor) -> Tensor:
    """Cumulative uncertainty before each expert, and after the last: (..., M, B, C) -> (..., M+1, B).

    Evidence exp(z) gives beliefs b = exp(z)/S and the uncertainty u = C/S, S = sum exp(z) + C. w_0 = 1 and
    w_i+1 = w_i u_i / (1 - conflict), the conflict being sum_{j != k} b_i-1[j] b_i[k] (Li et al. 2022, Dempster-Shafer).
    """
    log_classes = torch.full_like(logits[..., 0], logits.shape[-1]).log()
    log_strength = torch.logaddexp(logits.logsumexp(-1), log_classes)  # (..., M, B)
    belief, unsure = (logits - log_strength[..., None]).exp(), (log_classes - log_strength).exp()
    before, after = unsure[..., :-1, :], unsure[..., 1:, :]
    # 1 - conflict, written without a difference of numbers near 1
    harmony = before + after - before * after + (belief[..., :-1, :, :] * belief[..., 1:, :, :]).sum(-1)
    factors = torch.cat([torch.ones_like(unsure[..., :1, :]), unsure[..., :1, :], after / harmony], -2)
    return factors.cumprod(-2)


def weighed(logits: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    """sum_i a_i z_i with a = softmax over experts of w_i / eta: (..., M, B, C) -> (..., 1, B, C); and the last w."""
    engaged = engagement(logits)
    shares = (engaged[..., :-1, :] / eta).softmax(-2)
    return (shares[..., None] * logits).sum(-3, keepdim=True), engaged[..., -1, :]


class Evidential(Combination):
    """Later experts count more where the earlier ones were unsure. Each sample by itself, whatever its batch."""

    measures = "fused_uncertainty"

    def __init__(self, eta: float) -> None:
        super().__init__()
        self.eta = eta

    def forward(self, logits: Tensor, features: Tensor) -> Combined:
        return weighed(logits, self.eta)


def nested_groups(classes: Classes, experts: int) -> NDArray[np.float64]:
    """(M, C): 1 where an expert speaks for a class. Expert m leaves out the m/M most frequent classes.

    >>> nested_groups(Classes.from_counts([9, 5, 1]), 3).tolist()
    [[1.0, 1.0, 1.0], [0.0, 1.0, 1.0], [0.0, 0.0, 1.0]]
    """
    first = np.arange(experts) * len(classes) // experts
    return (classes.rank >= first[:, None]).astype(np.float64)


class GroupMean(Combination):
    """For every class the mean logit of the experts that speak for it."""

    speaks: Tensor

    def __init__(self, groups: NDArray[np.float64]) -> None:
        super().__init__()
        speaks = torch.as_tensor(groups, dtype=torch.float32)[:, None]
        self.register_buffer("speaks", speaks, persistent=False)  # follows from the classes

    def forward(self, logits: Tensor, features: Tensor) -> Combined:
        return (self.speaks * logits).sum(1, keepdim=True) / self.speaks.sum(0), None

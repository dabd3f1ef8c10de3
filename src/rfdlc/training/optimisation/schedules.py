"""The learning rate of an epoch, as a factor of the base rate. Epochs count from 1."""

from collections.abc import Callable, Sequence
from math import cos, pi

from rfdlc.errors import choose

SCHEDULES: dict[str, Callable[[float, Sequence[float], float], float]] = {
    # name -> (share of the training done before this epoch, milestones as shares, decay) -> factor
    "step": lambda done, milestones, decay: float(decay ** sum(done >= milestone - 1e-9 for milestone in milestones)),
    "cosine": lambda done, milestones, decay: 0.5 * (1 + cos(pi * done)),
    "constant": lambda done, milestones, decay: 1.0,
    # Weights are averaged over the last quarter at half the base rate (Maddox et al. 2019: 0.05 of 0.1 on CIFAR)
    "swa": lambda done, milestones, decay: min(1.0, max(SWA_RATE, 1 - (done - 0.5) / 0.25 * (1 - SWA_RATE))),
}
SWA_RATE = 0.5


def rate(
    epoch: int,
    epochs: int,
    schedule: str = "cosine",
    *,
    warmup: int = 0,
    milestones: Sequence[float] = (0.8, 0.9),
    decay: float = 0.01,
) -> float:
    """Linear warm-up over the first `warmup` epochs, then the schedule.

    The paper: 200 epochs, times 0.01 after epochs 160 and 180, five epochs of warm-up.

    >>> [rate(epoch, 200, "step", warmup=5) for epoch in (1, 5, 160, 161, 181)]
    [0.2, 1.0, 1.0, 0.01, 0.0001]
    """
    choose("schedule", schedule, SCHEDULES)
    return min(1.0, epoch / warmup if warmup else 1.0) * SCHEDULES[schedule]((epoch - 1) / epochs, milestones, decay)

"""What is minimised: functions of logits, targets and the epoch that return one value per sample.

A loss never divides by a batch: it sees a micro-batch of one process, and the training step owns every mean, over
particles, samples, micro-batches and processes (`reduction.py`). The likelihood and utility terms are in `terms.py`,
losses of methods whose particles are experts in `experts.py`, and what pushes particles apart in `repulsion.py`.
"""

from rfdlc.training.losses.reduction import Loss, Term, mean_loss

__all__ = ["Loss", "Term", "mean_loss"]

"""Early stopping: a training ends when its held-out loss has not fallen for long, with the weights of the best epoch.

When it ends follows from the history alone, so that an interrupted run ends where an undisturbed one does.
"""

import numpy as np
from torch import nn

from rfdlc.data.dataset import Dataset
from rfdlc.errors import expect
from rfdlc.training.config import TABULAR
from rfdlc.training.methods import Stage
from rfdlc.training.run import Run, checksummed, read_weights

BEST = "best.safetensors"


def check_patience(run: Run, data: Dataset, single: bool) -> None:
    """Raise where a run cannot end early, but is to."""
    config = run.config
    held = single and (config.hold_out or data.val is not None) and config.backbone not in TABULAR
    needs = "patience needs held-out samples, a network and one process: leave it out, or set hold_out=0.1"
    expect(not config.patience or held, needs)
    plain = run.method.stages == (Stage(),) and not config.average
    only = "patience is for methods of one stage that do not average weights: leave it out, or set average=0"
    expect(not config.patience or plain, only)


def keep_best(run: Run, net: nn.Module) -> None:
    """Write the weights of the epoch with the lowest held-out loss so far."""
    losses = _losses(run, run.phase) if run.config.patience else []
    if losses and min(losses)[1] == run.epoch:
        run.write(BEST, checksummed(net.state_dict()))


def restore_best(run: Run, net: nn.Module) -> None:
    """Load these weights at the end of a phase that has held-out samples."""
    if run.config.patience and run.phase < run.config.folds:
        net.load_state_dict(read_weights(run.path / BEST)[0])


def ends_early(run: Run) -> bool:
    """Whether the loss has not fallen for long; a refit ends after as many epochs as were best before it."""
    if not run.config.patience or not run.epoch:
        return False
    if run.phase >= run.config.folds:
        return run.epoch >= round(float(np.mean([min(_losses(run, phase))[1] for phase in range(run.config.folds)])))
    losses = _losses(run, run.phase)
    return sum(epoch > min(losses)[1] for _, epoch in losses) >= run.config.patience


def _losses(run: Run, phase: int) -> list[tuple[float, int]]:
    """Held-out losses of a phase so far, with their epochs."""
    rows = [row for row in run.history if row["phase"] == phase and "held_out_nll" in row]
    return [(row["held_out_nll"], row["epoch"]) for row in rows]

"""Early stopping: a training ends when its held-out loss has not fallen for long, with
the weights of the best epoch.

When it ends follows from the history alone, so that an interrupted run ends where an
undisturbed one does. A training that would not end with its budget has fewer epochs.
"""

import math

import numpy as np
from torch import nn

from rfdlc.data.dataset import Dataset
from rfdlc.errors import expect
from rfdlc.progress import announce
from rfdlc.training.config import SAFETY
from rfdlc.training.methods import Stage
from rfdlc.training.run import Run
from rfdlc.training.settings import TABULAR
from rfdlc.training.trial_plan import TUNING

BEST = "best.safetensors"
SHORTEST = 0.25  # of the epochs that are left, in which the rate falls to its end


def check_patience(run: Run, data: Dataset, single: bool) -> None:
    """Raise where a run cannot end early, but is to."""
    config = run.config
    held = (
        single
        and (config.hold_out or data.val is not None)
        and config.backbone not in TABULAR
    )
    needs = (
        "patience needs held-out samples, a network and one process: leave it out, or"
        " set hold_out=0.1"
    )
    expect(not config.patience or held, needs)
    plain = run.method.stages == (Stage(),) and not config.average
    only = (
        "patience is for methods of one stage that do not average weights: leave it"
        " out, or set average=0"
    )
    expect(not config.patience or plain, only)


def keep_best(run: Run, net: nn.Module) -> None:
    """Write the weights of the epoch with the lowest held-out loss so far."""
    losses = _losses(run, run.phase) if run.config.patience else []
    if losses and min(losses)[1] == run.epoch:
        run.write(BEST, run.bound(net.state_dict()))


def restore_best(run: Run, net: nn.Module) -> None:
    """Load these weights at the end of a phase that has held-out samples, and say which
    they are.
    """
    if run.config.patience and not run.refits:
        net.load_state_dict(run.weights(BEST))
        early = (
            f"stopped    after epoch {run.epoch} of {run.epochs}; kept are the"
            " weights of"
        )
        told = early if run.epoch < run.epochs else "kept       the weights of"
        announce(
            f"{told} epoch {_best(run, run.phase)}, whose held-out loss was the lowest"
        )


def stopping(run: Run) -> dict[str, list[int]]:
    """For metrics.json: the last epoch of each training, and the epoch whose weights it
    kept.
    """
    phases = range(run.config.trainings if run.config.patience else 0)
    last = [
        max(row["epoch"] for row in run.history if row["phase"] == phase)
        for phase in phases
    ]
    kept = [
        _best(run, phase) if phase < run.config.folds else last[phase]
        for phase in phases
    ]
    return {"last_epochs": last, "kept_epochs": kept} if last else {}


def ends_early(run: Run) -> bool:
    """Whether the loss has not fallen for long; a refit ends after as many epochs as
    were best before it.
    """
    if not run.config.patience or not run.epoch:
        return False
    if run.refits:
        return run.epoch >= round(
            float(np.mean([_best(run, phase) for phase in range(run.config.folds)]))
        )
    losses = _losses(run, run.phase)
    best = min(losses)[1] if losses else 0
    return sum(epoch > best for _, epoch in losses) >= run.config.patience


def keep_to_budget(run: Run) -> bool:
    """Whether a training is shortened half-way, as its epochs take longer than
    measured.

    The epochs that are left are as many as the budget has time for, a quarter of them
    at least. Its rate falls in fewer epochs then.
    """
    config = run.config
    epochs = run.epochs
    asked = config.budget and not config.patience and len(run.spans) == 1
    if not asked or run.epoch != epochs // 2:
        return False
    plan = run.tuning
    if plan is None or not plan.chosen:
        return False
    seconds = [row["seconds"] for row in run.history]
    spent = plan.measured + sum(plan.seconds) + sum(seconds)
    each = np.mean([row["seconds"] for row in run.history if row["phase"] == run.phase])
    possible = SAFETY * (config.budget - spent) / max(float(each), 1e-9)
    later = config.trainings - 1 - run.phase
    left = epochs - run.epoch
    share = possible / (left + later * (config.refit_epochs or config.epochs))
    shorter = run.epoch + math.ceil(max(SHORTEST, share) * left)
    if shorter >= epochs:
        return False
    name = "refit_epochs" if run.refits else "epochs"
    run.config = config.replace(**{name: shorter})
    plan.chosen[name] = shorter
    run.write_json(TUNING, plan.to_dict())
    return True


def _best(run: Run, phase: int) -> int:
    return min(_losses(run, phase))[1]


def _losses(run: Run, phase: int) -> list[tuple[float, int]]:
    """Held-out losses of a phase so far, with their epochs."""
    rows = [
        row for row in run.history if row["phase"] == phase and "held_out_nll" in row
    ]
    return [(row["held_out_nll"], row["epoch"]) for row in rows]

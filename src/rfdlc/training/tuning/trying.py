"""Trials train, and the plan gets their held-out losses, where classes weigh
equally.
"""

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar

from rfdlc.decisions.decider import Decider
from rfdlc.probabilities.predictions import Predictions
from rfdlc.probabilities.scores import Floats, safe_log, softmax
from rfdlc.progress import announce, live
from rfdlc.training._stacking import Stack
from rfdlc.training.building import new_decider, sensible_threads
from rfdlc.training.loop import TrainingStopped, epochs
from rfdlc.training.measuring import steps_per_epoch
from rfdlc.training.run import Run
from rfdlc.training.trainer import Trainer
from rfdlc.training.trial_plan import TUNING, Rung, Settings, TrialPlan
from rfdlc.training.tuning.candidates import missing_regularisers, trial_of, variations
from rfdlc.training.tuning.choosing import best_first, learned_nothing
from rfdlc.training.tuning.planning import SHARE


class _OutOfTime(Exception): ...  # trials have taken all of the budget that they may


class TrialLosses(NamedTuple):
    """The losses (n,) of held-out samples in nats, and their shares (n,), by which
    classes weigh equally.
    """

    each: Floats
    shares: Floats

    @property
    def mean(self) -> float:
        return float(self.each @ self.shares)


def try_in_time(trainer: Trainer, run: Run, plan: TrialPlan, rung: Rung) -> None:
    """Try a rung that has no losses; with a budget, leave it out if too little of that
    is left.
    """
    if rung.losses:
        return
    if rung.varies and (
        learned_nothing(plan)
        or missing_regularisers(best_first(plan)[0], plan.stronger) < 0
    ):
        plan.rungs.remove(
            rung
        )  # losses are noise, or the training has settings that trials lack
        run.write_json(TUNING, plan.to_dict())
        return
    if not run.config.budget:
        _try(trainer, run, plan, rung, math.inf)
        return
    began = time.perf_counter()
    left = SHARE * run.config.budget - plan.measured - sum(plan.seconds)
    longer = 1.0  # than the rung before it, as all have equal work
    if rung.varies:
        longer = max(
            1.0, (len(variations(trainer, run)) + 1) / 2
        )  # another head trains apart
    if plan.seconds and longer * plan.seconds[-1] > left:
        plan.rungs.remove(rung)
    else:
        try:
            _try(trainer, run, plan, rung, began + left)
        except _OutOfTime:
            plan.rungs.remove(rung)
        plan.seconds.append(round(time.perf_counter() - began, 3))
    run.write_json(TUNING, plan.to_dict())


def _try(trainer: Trainer, run: Run, plan: TrialPlan, rung: Rung, until: float) -> None:
    """Train and score the trials of a rung."""
    known = list[float]()  # losses of trials that are not trained again
    if rung.varies:
        best = best_first(plan)[0]
        known = [loss for own, loss in plan.tried[-1].pairs if own == best]
        rung.trials = [best, *({**best, **own} for own in variations(trainer, run))]
    elif plan.tried:
        better = best_first(plan)
        rung.trials = better[: max(2, len(better) // 2)]
    else:
        rung.trials = plan.candidates
    new = [trial_of(run, rung.epochs, own) for own in rung.trials[len(known) :]]
    losses, errors = held_out_losses(
        trainer, new, until, plan.epochs * steps_per_epoch(trainer, run)
    )
    rung.losses = [
        round(loss, 6) if loss < math.inf else None for loss in known + losses
    ]
    if not known:
        rung.errors = [round(error, 6) for error in errors]
    run.write_json(TUNING, plan.to_dict())
    shown = ["diverged" if loss is None else f"{loss:8.4f}" for loss in rung.losses]
    rows = "".join(
        f"\n{loss}  {written_out(own)}"
        for own, loss in zip(rung.trials, shown, strict=True)
    )
    announce(
        f"{len(shown)} trials of {rung.epochs} epochs, held-out loss where classes"
        f" weigh equally:{rows}"
    )


def written_out(settings: Settings) -> str:
    return " ".join(
        f"{name}={f'{own:g}' if isinstance(own, float) else own}"
        for name, own in settings.items()
    )


def held_out_losses(
    trainer: Trainer, trials: Sequence[Run], until: float, later: int = 0
) -> tuple[list[float], list[float]]:
    """Losses and standard errors, infinite where the training loss is not a number;
    `later`: see `epochs`.
    """
    found, waiting = dict[Any, TrialLosses | None](), list(trials)
    with live(
        len(trials) * trials[0].epochs * steps_per_epoch(trainer, trials[0]),
        f"{len(trials)} trials",
    ) as show:

        def step(*_: Any, together: int) -> None:
            show(together, "")
            if time.perf_counter() > until:
                raise _OutOfTime

        while waiting:
            stack = trainer.stacker.next_stack(waiting)
            try:
                with sensible_threads(stack.net, stack.run.config):
                    shown = partial(step, together=len(stack.members))
                    for _ in epochs(
                        stack.net, stack.stages, {}, show=shown, later=later
                    ):
                        pass
                losses: dict[Any, TrialLosses | None] = _losses_of(stack)
            except TrainingStopped as error:  # the others are trained again without it
                losses = {stack.members[error.run].runs[0].path: None}
            found |= losses
            waiting = [trial for trial in waiting if trial.path not in losses]
    each = [found[trial.path] for trial in trials]
    return [math.inf if own is None else own.mean for own in each], standard_errors(
        each
    )


def _losses_of(stack: Stack) -> dict[Any, TrialLosses | None]:
    """Of the trials of a stack, by their paths."""
    found: dict[Any, TrialLosses | None] = {}
    for member in stack.members:
        (trial,) = member.runs
        predictions = member.model.predict_split(member.data.val)
        assert predictions is not None  # one process, and held-out samples
        decider = new_decider(trial.method_name, trial.config, member.data.classes)
        found[trial.path] = balanced_losses(predictions, decider)
    return found


def balanced_losses(predictions: Predictions, decider: Decider) -> TrialLosses:
    """Negative log-likelihoods at the best temperature: their mean is at most that of
    chance.
    """
    plain = decider.replace(calibration=None, target_prior="uniform").probabilities(
        predictions
    )
    log_p = safe_log(
        np.asarray(plain, dtype=np.float64)
    )  # 32 bits have no probability as small as the least below
    labels = np.asarray(predictions.targets)
    weights = 1 / np.bincount(labels)[labels]

    def losses(log_temperature: float) -> TrialLosses:
        p = softmax(log_p * math.exp(-log_temperature))[np.arange(len(labels)), labels]
        return TrialLosses(-np.log(np.maximum(p, 1e-300)), weights / weights.sum())

    return losses(
        minimize_scalar(
            lambda log_t: losses(log_t).mean, bounds=(-4, 8), method="bounded"
        ).x
    )


def standard_errors(trials: Sequence[TrialLosses | None]) -> list[float]:
    """Of the difference to the best trial on the same samples; 0 for itself, and for
    trials without losses.
    """
    best = min(
        (trial for trial in trials if trial is not None),
        key=lambda trial: trial.mean,
        default=None,
    )
    if best is None:
        return [0.0] * len(trials)
    differences = [(trial or best).each - best.each for trial in trials]
    return [
        float(np.linalg.norm(best.shares * (own - own @ best.shares)))
        for own in differences
    ]

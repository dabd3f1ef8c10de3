"""Which trial is best, by what its loss would be after as many epochs as the training
has.
"""

import math
from typing import NamedTuple

from rfdlc.training.trial_plan import Rung, Settings, TrialPlan
from rfdlc.training.tuning.candidates import missing_regularisers
from rfdlc.training.tuning.planning import LONG_EPOCHS

CLEARLY = 0.95  # of the loss, below which a variation replaces the best trial
# the least factor by which a loss is expected to fall again: those near chance fall
# fast for a while
STEEPEST = 0.7
# standard errors: as much better must a variation be, or a trial that regularises less
UNCERTAIN = 2
LESS = 0.75  # of what twice the epochs gain, twice as many again gain
RISE = 1.05  # of the loss with more epochs, from which on fewer epochs are better
SLOWER = 0.1  # of the loss, by which shorter trials with RandAugment may be behind
NOTHING, HALF = (
    0.01,
    0.5,
    # of the loss at chance, less than which teaches nothing; of what the best trial has
    # learned
)


class _Expected(NamedTuple):
    """A trial, its loss and standard error as expected at the end of the training, and
    the regularisers it lacks.
    """

    settings: Settings
    loss: float
    error: float
    missing: int
    learned: float  # by how much its loss so far is lower than at chance


def choose_settings(plan: TrialPlan) -> Settings:
    """The settings of the best trial, and the epochs: fewer where more of them clearly
    raised its loss.
    """
    if not plan.rungs:
        return {"epochs": plan.epochs, **plan.network}
    best = best_first(plan)[0]
    tried = [
        (loss, rung.epochs)
        for rung in plan.rungs
        for own, loss in rung.pairs
        if own == best
    ]
    lowest, longest = min(tried), max(tried, key=lambda pair: pair[1])
    error = UNCERTAIN * max(
        error for rung in plan.rungs for error in rung.errors or [0.0]
    )
    fewer = longest[0] > max(RISE * lowest[0], lowest[0] + error)
    if "randaugment" in best.get("augment", "") and not fewer:
        best = {**best, **plan.stronger}
    return {**plan.network, **best, "epochs": lowest[1] if fewer else plan.epochs}


def best_first(plan: TrialPlan) -> list[Settings]:
    """The trials of the last rung that has losses; of variations, the best one."""
    *earlier, last = plan.tried
    if last.varies:
        return [_best_variation(last, max(earlier[-1].errors or [0.0]))]
    trials = _expected(last, earlier, plan)
    if learned_nothing(plan):  # losses are noise
        return sorted(
            (trial.settings for trial in trials), key=plan.candidates.index
        )  # first what needs no trials
    best = min(trials, key=lambda trial: trial.loss)
    enough = HALF * max(trial.learned for trial in trials)

    def place(trial: _Expected) -> tuple[bool, int, float]:
        """Trials that regularise less come first only if they are clearly better."""
        slack = UNCERTAIN * max(trial.error, best.error)
        if trial.missing < 0 and last.epochs < LONG_EPOCHS:
            slack = max(slack, SLOWER * best.loss)
        near = trial.loss <= best.loss + slack
        if plan.chance and trial.learned < enough:
            # it has hardly begun to learn, so that its standard error says little
            near = False
        return not near, trial.missing if near else 0, trial.loss

    return [trial.settings for trial in sorted(trials, key=place)]


def learned_nothing(plan: TrialPlan) -> bool:
    """Whether the last trials are all about as good as chance."""
    *_, last = plan.tried
    return 0 < plan.chance * (1 - NOTHING) < min(loss for _, loss in last.pairs)


def _best_variation(rung: Rung, error: float) -> Settings:
    """The first trial is the best so far: others must clearly improve it."""
    (first, lowest), *others = rung.pairs
    best = first
    for own, loss in others:
        needed = (loss + UNCERTAIN * error) / CLEARLY
        if needed < lowest:
            best, lowest = own, needed
    return best


def _expected(last: Rung, earlier: list[Rung], plan: TrialPlan) -> list[_Expected]:
    """The factor by which twice the epochs lowered a loss is expected again, and less
    of it every time.

    That is until the epochs of the training: networks that are regularised learn slowly
    at first, and gain for longer.
    """
    before = {
        str(own): loss
        for rung in earlier
        for own, loss in rung.pairs
        if loss < math.inf
    }  # the latest rung's
    doublings = max(1.0, math.log2(plan.epochs / last.epochs))
    again = (1 - LESS**doublings) / (1 - LESS)
    found = []
    for (own, loss), error in zip(
        last.pairs, last.errors or [0.0] * len(last.trials), strict=True
    ):
        ratio = loss / max(before.get(str(own), loss), 1e-12)
        factor = min(1.0, max(ratio, STEEPEST)) ** again
        missing = missing_regularisers(own, plan.stronger)
        found.append(
            _Expected(own, loss * factor, error * factor, missing, plan.chance - loss)
        )
    return found

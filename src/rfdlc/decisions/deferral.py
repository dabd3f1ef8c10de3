"""Deferral: which samples are handed over beside those that the rule hands over, and
which are kept because a budget is used up.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rfdlc.decisions.budgets import (
    Budget,
    PerDay,
    Worth,
    allotted,
    allotted_per_day,
)
from rfdlc.decisions.rules import largest
from rfdlc.decisions.unfamiliar import Unfamiliar, seen_as, unfamiliar_action
from rfdlc.decisions.utility import Utility
from rfdlc.probabilities.classes import Indices
from rfdlc.probabilities.model import Probabilities
from rfdlc.probabilities.scores import Floats

# Standard errors between the share of a budget and the one handed over that get a
# warning.
SHARE_ERRORS = 4.0


@dataclass(frozen=True)
class Deferral:
    """Limits on handing over, and samples that are always handed over.

    Parameters
    ----------
    budget : Budget, optional
        Shares of samples that may be handed over, and the prices that keep to them;
        `Decider.fit_budget` finds them.
    unfamiliar : Unfamiliar, optional
        Thresholds above which samples are handed over because they are unlike all
        others; `Decider.fit_unfamiliar` finds them.
    """

    budget: Budget | None = None
    unfamiliar: Unfamiliar | None = None

    def applies(self, batch: bool | PerDay = False) -> bool:
        """Whether decisions depend on more than the rule."""
        if isinstance(batch, PerDay):
            return True
        return self.budget is not None or self.unfamiliar is not None

    def charged(self, gains: Floats, utility: Utility) -> Floats:
        """Gains (n, A) minus the prices of the budget."""
        if self.budget is None:
            return gains
        return gains - self.budget.columns(utility).astype(gains.dtype)

    def decide(
        self,
        utility: Utility,
        probabilities: Probabilities,
        charged_gains: Callable[[Floats], Floats],
        batch: bool | PerDay = False,
    ) -> tuple[Indices, NDArray[np.bool_]]:
        """Actions (N,), and which samples are unfamiliar and are handed over for it.

        Of a whole `batch`, shares or counts are kept to exactly; otherwise prices keep
        to the budget on average. Unfamiliar samples get the action `unfamiliar` if
        there is one, or else the best action that hands over: they take no share, but
        count per day.
        """
        whole = isinstance(batch, PerDay) or (batch and self.budget is not None)
        actions, forced_actions, likeliest, pieces = [], [], [], []
        for _, p in probabilities.chunks():  # once: every pass calibrates all scores
            if whole:
                pieces.append(p)
            else:
                actions.append(largest(charged_gains(p)))
            if self.unfamiliar is not None:
                forced_actions.append(unfamiliar_action(utility, p))
                likeliest.append(seen_as(p, probabilities.prior))

        flagged = np.zeros(len(probabilities), dtype=bool)
        forced = np.full(len(probabilities), -1)
        if self.unfamiliar is not None:
            score = self.unfamiliar.score(probabilities.scores)
            seen = np.concatenate(likeliest)
            flagged = self.unfamiliar.above(score, seen, utility.classes)
            forced = np.where(flagged, np.concatenate(forced_actions), -1)
        if whole:
            worth = Worth.of(utility, np.concatenate(pieces))
            action = self._allotted(utility, worth, forced, batch)
        else:
            action = np.concatenate(actions)
        return np.where(flagged, forced, action), flagged

    def flags(
        self, probabilities: Probabilities, p: Floats | None = None
    ) -> NDArray[np.bool_]:
        """Which samples are unfamiliar (none without thresholds); p are their corrected
        probabilities, where known.
        """
        if self.unfamiliar is None:
            return np.zeros(len(probabilities), dtype=bool)
        pieces = [p] if p is not None else [p for _, p in probabilities.chunks()]
        seen = np.concatenate([seen_as(p, probabilities.prior) for p in pieces])
        score = self.unfamiliar.score(probabilities.scores)
        return self.unfamiliar.above(score, seen, probabilities.model.classes)

    def warn_of_share(self, counts: Mapping[str, int], utility: Utility) -> None:
        """Warn if prices handed over a share further from that of the budget than
        chance explains, by counts of actions.

        Fewer hand-overs are no reason for it at a price of 0: no other sample was worth
        handing over. Unfamiliar samples come beside the budget, so that nothing is
        known with them.
        """
        samples = sum(counts.values())
        if self.budget is None or self.unfamiliar is not None or not samples:
            return
        behind = self.budget.samples or samples
        for name, handed in self.budget.handed_over(counts, utility).items():
            share = self.budget.shares[name]
            error = np.sqrt(share * (1 - share) * (1 / samples + 1 / behind))
            gap = handed - share
            if self.budget.prices[name] <= 0:
                gap = max(0.0, gap)
            if abs(gap) > SHARE_ERRORS * error + 1 / samples:
                warnings.warn(
                    f"{100 * handed:.3g}% of {samples:,} samples were handed over,"
                    f" where the budget ({name}) is {100 * share:.3g}%: it goes by a"
                    " price of held-out samples, which score unlike these; decide all"
                    " samples as one batch (`rfdlc decide FILE --budget SHARE`), find"
                    " the price on recent samples (--calibrate FILE, fit_budget), or"
                    " keep to the share in a stream (StreamController)",
                    stacklevel=3,
                )

    def _allotted(
        self, utility: Utility, worth: Worth, forced: Indices, batch: bool | PerDay
    ) -> Indices:
        """Actions (N,) of a whole batch; `forced` is -1 where nothing is."""
        worth.gains[forced >= 0] = -1.0
        if isinstance(batch, PerDay):
            taken = forced[:, None] == worth.actions
            choice = allotted_per_day(batch, utility, worth.gains, taken)
        else:
            assert self.budget is not None
            choice = allotted(self.budget, utility, worth.gains)
        return worth.chosen(choice)

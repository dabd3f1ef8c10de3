"""StreamController: a budget over a stream whose samples come one by one and may
change.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.decisions.budgets import (
    Budget,
    Worth,
    check_budget_rule,
    handing_over,
    limited_actions,
)
from rfdlc.decisions.decider import Decider
from rfdlc.decisions.unfamiliar import unfamiliar_action
from rfdlc.errors import expect
from rfdlc.formats.dates import days_of
from rfdlc.probabilities.classes import Indices

REFRESHED = 40  # times per window prices are computed again


class StreamController:
    """Keeps a decider's budget over a stream: in any window the share is within
    `tolerance` of the budget, or less.

    Each budget has a balance, the hand-overs so far minus those that it pays for, which
    stays within half of what the tolerance allows in a window: so no window is off by
    more, whatever the stream does. Within these limits, a sample is handed over where
    that is worth more than a price: a quantile of recent samples, lower while the
    balance is.

    Parameters
    ----------
    decider : Decider
        With a budget (`Decider.fit_budget`), whose prices are used first. With
        `per_day` it needs none: samples are handed over where that is worth more than
        deciding, in their order, up to this number on each day.
    window : int
        Number of samples over which shares are kept.
    tolerance : float
        How far shares may be from the budget.
    per_day : int, optional
        Never hand over more samples than this on a day, of all actions together.
        Unfamiliar samples are always handed over, and count.

    Attributes
    ----------
    counts : dict
        Samples and hand-overs of each day that `decide` has seen.

    Examples
    --------
    >>> from rfdlc import Decider, Utility
    >>> rng = np.random.default_rng(0)
    >>> p = rng.dirichlet([1, 1, 1], 4000)
    >>> decider = Decider(Utility.one_hot(3).with_expert("doctor", confusion=0.95))
    >>> controller = StreamController(
    ...     decider.fit_budget(p, p.argmax(axis=1), budget="5%")
    ... )
    >>> harder = rng.dirichlet([9, 9, 9], 4000)  # the price of a hand-over rises
    >>> handed = controller.decide(harder) == 3
    >>> bool(abs(handed[2000:].mean() - 0.05) <= 0.005)
    True
    """

    def __init__(
        self,
        decider: Decider,
        *,
        window: int = 2000,
        tolerance: float = 0.005,
        per_day: int | None = None,
    ) -> None:
        fix = (
            "fit one on held-out data (Decider.fit_budget), or give a number of samples"
            " per day (per_day)"
        )
        expect(
            decider.deferral.budget is not None or per_day is not None,
            f"the decider has no budget: {fix}",
        )
        check_budget_rule(decider.rule)
        handing_over(decider.utility)
        self._budget = decider.deferral.budget or Budget({}, {})
        expect(
            window * tolerance >= 2,
            f"window {window} x tolerance {tolerance} is less than 2 samples:"
            " enlarge one",
        )
        expect(
            per_day is None or per_day >= 0,
            f"per_day is {per_day}: expected a number of samples, 0 or more",
        )
        self.decider, self.window, self.per_day = decider, window, per_day
        self.counts: dict[str, dict[str, int]] = {}
        self._slack, self._shares = (
            window * tolerance / 2,
            np.array(list(self._budget.shares.values())),
        )
        self._prices = np.array(list(self._budget.prices.values()))
        self._balance = np.zeros(len(self._shares))
        self._recent = np.zeros((0, len(self._shares)))  # margins of the latest samples
        self._sorted, self._pending = self._recent, list[NDArray[np.float64]]()

    def decide(
        self, scores: Any, *, days: Sequence[Any] | None = None, logits: bool = False
    ) -> Indices:
        """The actions (N,) of the next samples of the stream, in their order; `days`
        are their days, or times.
        """
        decider = self.decider
        checked = decider.model.read(scores, logits)
        named = [""] * len(checked) if days is None else days_of(days)
        expect(
            len(named) == len(checked),
            f"{len(named)} days for {len(checked)} samples: expected one per sample",
        )
        expect(
            self.per_day is None or days is not None,
            "per_day needs the day of each sample: give days",
        )
        probabilities = decider.model(checked)
        p = probabilities.array()
        worth = Worth.of(decider.utility, p)
        strange = decider.deferral.flags(probabilities, p)
        groups = limited_actions(self._budget.shares, decider.utility)[1]
        rows = zip(worth.gains, named, strange, strict=True)
        choice = np.array(
            [self._choose(row, groups, day, odd) for row, day, odd in rows],
            dtype=np.int64,
        )
        return np.where(
            strange, unfamiliar_action(decider.utility, p), worth.chosen(choice)
        )

    def _choose(
        self, gains: NDArray[np.float64], groups: NDArray[np.bool_], day: str, odd: bool
    ) -> int:
        counted = self.counts.setdefault(day, {"samples": 0, "handed_over": 0})
        counted["samples"] += 1
        if odd:  # handed over in any case: it takes no share of the budget, but counts
            counted["handed_over"] += 1
            return -1
        prices = self._priced()
        values = gains - prices @ groups
        values[
            groups[self._balance + 1 - self._shares > self._slack].any(axis=0)
        ] = -np.inf
        if self.per_day is not None and counted["handed_over"] >= self.per_day:
            values[:] = -np.inf
        best = int(values.argmax())
        chosen = best if values[best] > 0 else -1
        self._remember(gains, prices, groups)
        handed = groups[:, chosen] if chosen >= 0 else np.zeros(len(groups), dtype=bool)
        self._balance = np.maximum(
            self._balance + handed - self._shares, -self._slack
        )  # what is not used is not saved
        counted["handed_over"] += chosen >= 0
        return chosen

    def _priced(self) -> NDArray[np.float64]:
        """The price of each budget now: none where the balance is at its lower end."""
        wanted = np.clip(self._shares * (1 - self._balance / self._slack), 0, 1)
        prices = self._prices.copy()
        if size := len(self._sorted):
            place = np.minimum(((1 - wanted) * size).astype(int), size - 1)
            prices = np.maximum(self._sorted[place, np.arange(len(place))], 0)
        prices[self._balance - self._shares < -self._slack] = 0
        return prices

    def _remember(
        self,
        gains: NDArray[np.float64],
        prices: NDArray[np.float64],
        groups: NDArray[np.bool_],
    ) -> None:
        """What each budget's actions gain over all others at their prices; sorted again
        now and then.
        """
        values, margins = gains - prices @ groups, np.empty(len(groups))
        for g, group in enumerate(groups):
            margins[g] = (
                values[group].max()
                + prices[g]
                - max(values[~group].max(initial=0.0), 0.0)
            )
        self._pending.append(margins)
        if len(self._pending) >= self.window / REFRESHED:
            self._recent, self._pending = (
                np.concatenate([self._recent, self._pending])[-self.window :],
                [],
            )
            self._sorted = (
                np.sort(self._recent, axis=0)
                if len(self._recent) >= self.window / 4
                else self._recent[:0]
            )

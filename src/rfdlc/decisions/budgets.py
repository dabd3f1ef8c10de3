"""Budgets: at most a share of the samples is handed over, those for which it is worth
most.

What handing over is worth: its expected utility minus that of the best class. A budget
becomes a price per action, found on held-out data; a sample is handed over where that
is worth more than the price.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rfdlc.decisions.utility import Utility
from rfdlc.errors import InputError, expect, listing
from rfdlc.formats.dates import days_of
from rfdlc.probabilities.classes import Indices
from rfdlc.probabilities.model import Probabilities, ProbabilityModel
from rfdlc.probabilities.priors import Prior
from rfdlc.probabilities.scores import Floats, Scores

TOTAL = "total"  # the name of the budget for all actions that hand over
# samples of a linear program with several budgets; of more, those that prices leave
# open
SOLVED_AT_ONCE = 4000
SWEEPS = 10  # over the prices of several budgets
TIE = 1e-9  # of the range of the gains
# of the range of the gains: closer to a price than rounding in 32 bits can tell
AT_PRICE = 1e-6


@dataclass(frozen=True)
class Budget:
    """Shares of samples that may be handed over, and the prices that keep to them, by
    action or `total`.

    Examples
    --------
    >>> Budget({"total": 0.05}, {"total": 0.2}).columns(
    ...     Utility([[1, 0], [0, 1]]).with_abstain(0.9)
    ... )
    array([0. , 0. , 0.2])
    """

    shares: dict[str, float]
    prices: dict[str, float]
    samples: float | None = field(
        default=None, compare=False
    )  # effective number of those behind the prices, if known

    def columns(self, utility: Utility) -> NDArray[np.float64]:
        """The price of every action (A,)."""
        own = np.array([self.prices.get(name, 0.0) for name in utility.actions])
        prices: NDArray[np.float64] = np.where(
            utility.decided_class < 0, own + self.prices.get(TOTAL, 0.0), 0.0
        )
        return prices

    def limits(self, samples: int) -> dict[str, int]:
        """How many samples of a batch may be handed over, by name."""
        return {
            name: int(np.floor(share * samples + TIE))
            for name, share in self.shares.items()
        }

    def too_few(self, samples: int) -> bool:
        """Whether no share of a batch is a whole sample: it goes by prices, as samples
        that come one at a time.
        """
        return all(
            share > 0 and self.limits(samples)[name] == 0
            for name, share in self.shares.items()
        )

    def handed_over(
        self, counts: Mapping[str, int], utility: Utility
    ) -> dict[str, float]:
        """The share of samples that was handed over, by the names of the budget;
        `counts` are those of actions.

        >>> utility = Utility.one_hot(1).with_abstain(0)
        >>> Budget({"total": 0.05}, {"total": 0.2}).handed_over(
        ...     {"0": 7, "abstain": 1}, utility
        ... )
        {'total': 0.125}
        """
        handing, samples = handing_over(utility), max(1, sum(counts.values()))
        return {
            name: sum(counts[a] for a in handing if name in (TOTAL, a)) / samples
            for name in self.shares
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain tables, ready for JSON."""
        known = {} if self.samples is None else {"samples": self.samples}
        return {"shares": self.shares, "prices": self.prices, **known}


@dataclass(frozen=True, eq=False)
class PerDay:
    """Limits per day: those samples are handed over for which it is worth most.

    Unfamiliar samples are handed over in any case. They count, too, so that other
    samples of the day get what is left.

    Parameters
    ----------
    counts : int or dict
        Samples per day: of all actions that hand over, or by action (and `total`).
    days : sequence, shape (N,)
        The day or time of each sample (2026-03-01, 2026-03-01T09:30, 1.3.2026), or the
        name of its shift or site.

    Examples
    --------
    >>> from rfdlc import Decider
    >>> decider = Decider(Utility.one_hot(["ok", "fraud"]).with_abstain(0.9))
    >>> p = [[0.6, 0.4], [0.5, 0.5], [0.3, 0.7]]
    >>> decider.decide(p, batch=PerDay(1, ["Monday", "Monday", "Tuesday"])).tolist()
    [0, 2, 2]
    """

    counts: int | Mapping[str, int]
    days: Sequence[Any] | NDArray[Any]

    def limits(self, utility: Utility) -> dict[str, int]:
        """The counts by name, checked."""
        named = (
            self.counts if isinstance(self.counts, Mapping) else {TOTAL: self.counts}
        )
        check_limited(named, utility)
        for name, count in named.items():
            whole = isinstance(count, int | np.integer) and count >= 0
            expect(
                whole,
                f"{name} {count!r} per day: expected a number of samples, 0 or more",
            )
        return {str(name): int(count) for name, count in named.items()}

    @cached_property
    def names(self) -> list[str]:
        """The day of each sample (N,)."""
        return days_of(self.days)

    def rows(self, samples: int) -> list[Indices]:
        """The samples of each day."""
        given = len(self.names)
        expect(
            given == samples,
            f"{given} days for {samples} samples: expected one per sample",
        )
        numbers = np.unique(self.names, return_inverse=True)[1]
        return np.split(
            np.argsort(numbers, kind="stable"), np.cumsum(np.bincount(numbers))[:-1]
        )


@dataclass(frozen=True)
class Worth:
    """What handing over samples is worth: the best class of each, and the gain of each
    action that hands over.
    """

    kept: Indices  # (N,) the best action that decides for a class
    gains: NDArray[
        np.float64
    ]  # (N, K) expected utility of handing over minus that of the best class
    actions: Indices  # (K,) the actions that hand over

    @classmethod
    def of(cls, utility: Utility, p: Floats) -> "Worth":
        """From corrected probabilities (N, C)."""
        handing, deciding = (
            np.flatnonzero(mask)
            for mask in (utility.decided_class < 0, utility.decided_class >= 0)
        )
        expect(
            len(deciding),
            "every action of this utility hands over: expected actions that decide for"
            " a class",
        )
        values = p.astype(np.float64) @ utility.matrix
        best = deciding[values[:, deciding].argmax(axis=1)]
        return cls(
            best,
            values[:, handing] - np.take_along_axis(values, best[:, None], axis=1),
            handing,
        )

    def chosen(self, choice: Indices) -> Indices:
        """Actions (N,) from a choice among those that hand over (N,), where -1 decides
        for the best class.
        """
        return np.where(choice < 0, self.kept, self.actions[choice])


def as_shares(given: Any, utility: Utility) -> dict[str, float]:
    """A share ("5%", 0.05) of all hand-overs, or shares by action, as numbers
    by name.
    """
    named = given if isinstance(given, Mapping) else {TOTAL: given}
    check_limited(named, utility)
    return {str(name): as_share(value) for name, value in named.items()}


def check_limited(named: Mapping[str, Any], utility: Utility) -> None:
    """Raise unless these are names of actions that hand over, or `total`."""
    handing = handing_over(utility)
    expect(
        TOTAL not in handing,
        f"an action is called {TOTAL!r}, the name of the budget of all: rename the"
        " action",
    )
    unknown = [str(name) for name in named if name not in (TOTAL, *handing)]
    expect(
        named and not unknown,
        f"budget of {listing(unknown) or 'nothing'}: expected"
        f" {listing([TOTAL, *handing])}",
    )


def handing_over(utility: Utility) -> list[str]:
    """The actions that decide for no class; raises if there are none."""
    handing = [
        name
        for name, c in zip(utility.actions, utility.decided_class, strict=True)
        if c < 0
    ]
    expect(
        handing,
        "a budget limits hand-overs, but every action decides for a class: add one"
        " (abstain, an expert)",
    )
    return handing


def as_share(given: Any, what: str = "budget") -> float:
    """0.05, "5%" or "30/600" as a number between 0 and 1.

    >>> as_share("5%"), as_share(0.05), as_share("30/600")
    (0.05, 0.05, 0.05)
    """
    try:
        number, slash, whole = str(given).strip().partition("/")
        share = (
            float(number) / float(whole) if slash else float(number.removesuffix("%"))
        )
        share /= 100 if number.endswith("%") else 1
    except (ValueError, ZeroDivisionError):
        share = -1.0
    expected = (
        "expected a share of the samples from 0 to 1, such as 0.05, 5%, or 30/600 for"
        " 30 of 600 samples"
    )
    expect(0 <= share <= 1, f"{what} {given!r}: {expected}")
    return share


def fit_budget(
    model: ProbabilityModel,
    utility: Utility,
    scores: Scores,
    targets: Indices | None,
    budget: Any,
    handed: Any = False,
) -> Budget:
    """Prices at which held-out samples, weighted to the prior that is decided for, keep
    to the budget.

    Samples that are `handed` over anyway (N,) take no share. Samples without targets
    are not weighted. The calibration is the one that decides, also of samples that it
    was fitted to: calibrations of folds would put other probabilities beside the price.
    """
    p = Probabilities(model, scores).array()
    if targets is None:
        return priced(utility, p, np.ones(len(p)), budget, handed)
    weights = weights_to(model.decided_prior, targets)
    return priced(utility, p, weights, budget, handed)


def weights_to(prior: Prior | None, targets: Indices) -> NDArray[np.float64]:
    """Weights (N,) with which samples have the class frequencies of the prior; 1
    without one.
    """
    if prior is None:
        return np.ones(len(targets))
    weights: NDArray[np.float64] = prior[targets] / np.bincount(targets)[targets]
    return weights


def priced(
    utility: Utility,
    p: Floats,
    weights: NDArray[np.float64],
    budget: Any,
    handed: Any = False,
) -> Budget:
    """Prices from corrected probabilities (N, C) of samples with weights (N,)."""
    shares = as_shares(budget, utility)
    worth = Worth.of(utility, p)
    worth.gains[np.broadcast_to(handed, len(p))] = -1.0
    names, groups = limited_actions(shares, utility)
    counts = [shares[name] * float(weights.sum()) for name in names]
    _, prices = assign(worth.gains, groups, counts, weights)
    prices = _above_ties(worth.gains, groups, prices)
    samples = float(weights.sum() ** 2 / (weights @ weights))
    return Budget(
        shares, dict(zip(names, prices.tolist(), strict=True)), round(samples, 1)
    )


def check_budget_rule(rule: str) -> None:
    """Raise unless the rule weighs hand-overs by what they are worth."""
    if rule != "expected-utility":
        raise InputError(f"a budget needs the rule 'expected-utility', not {rule!r}")


def _above_ties(
    gains: NDArray[np.float64], groups: NDArray[np.bool_], prices: NDArray[np.float64]
) -> Any:
    """Prices that are not those of several samples: rounding would hand over any share
    of these.
    """
    found, near = prices.copy(), AT_PRICE * max(float(np.ptp(gains)), 1e-300)
    for g, group in enumerate(groups):
        best, rest, _ = _margins(gains - prices @ groups + prices[g] * group, group)
        margin = best - rest
        if prices[g] > 0 and (np.abs(margin - prices[g]) <= near).sum() > 1:
            above = margin[margin > prices[g] + near]
            found[g] = (
                (prices[g] + above.min()) / 2 if len(above) else prices[g] + 2 * near
            )
    return found


def allotted(budget: Budget, utility: Utility, gains: NDArray[np.float64]) -> Indices:
    """Of a whole batch with gains (N, K), which hand-over each sample gets (N,), -1 for
    none: at most the shares.
    """
    limits = budget.limits(len(gains))
    names, groups = limited_actions(limits, utility)
    if budget.too_few(len(gains)):
        left = gains - np.array([budget.prices[name] for name in names]) @ groups
        return np.where(left.max(axis=1) > 0, left.argmax(axis=1), -1)
    return assign(gains, groups, [limits[name] for name in names])[0]


def allotted_per_day(
    limits: PerDay,
    utility: Utility,
    gains: NDArray[np.float64],
    taken: NDArray[np.bool_],
) -> Indices:
    """Which hand-over each sample with gains (N, K) gets (N,), -1 for none: at most the
    number of each day, of which `taken` (N, K) is used already.
    """
    named = limits.limits(utility)
    names, groups = limited_actions(named, utility)
    counts = np.array([named[name] for name in names])
    choice = np.empty(len(gains), dtype=np.int64)
    for rows in limits.rows(len(gains)):
        used = groups @ taken[rows].sum(axis=0)
        left = np.maximum(counts - used, 0).tolist()
        choice[rows] = assign(gains[rows], groups, left)[0]
    return choice


def limited_actions(
    named: Mapping[str, float], utility: Utility
) -> tuple[list[str], NDArray[np.bool_]]:
    """The names of the budgets, and which of the actions that hand over (K,) each
    limits.
    """
    handing = handing_over(utility)
    limited = [[name in (TOTAL, action) for action in handing] for name in named]
    return list(named), np.array(limited, dtype=bool).reshape(len(named), len(handing))


def assign(
    gains: NDArray[np.float64],
    groups: NDArray[np.bool_],
    counts: Sequence[float],
    weights: ArrayLike | None = None,
) -> tuple[Indices, NDArray[np.float64]]:
    """Hand over for the largest sum of gains (N, K), at most `counts` samples for the
    actions of each group (G, K).

    Returns the choice of each sample, -1 for none, and the price of each group: what
    one more hand-over would bring. Exact: with one budget by sorting, with several by
    linear programming, whose solutions are whole numbers because groups are single
    actions or all of them (two nested families of sets: a totally unimodular matrix).
    With weights, prices are those of weighted samples, and the samples at the limit are
    left out.
    """
    w = (
        np.ones(len(gains))
        if weights is None
        else np.asarray(weights, dtype=np.float64)
    )
    choice = np.where(gains.max(axis=1) > 0, gains.argmax(axis=1), -1)
    if all(
        (w * _among(choice, group)).sum() <= count
        for group, count in zip(groups, counts, strict=True)
    ):
        return choice, np.zeros(len(groups))
    if len(groups) == 1:
        return _assign_one(gains, groups[0], counts[0], w)
    return _assign_several(gains, groups, np.asarray(counts, dtype=np.float64), w)


def _among(choice: Indices, group: NDArray[np.bool_]) -> NDArray[np.bool_]:
    return np.asarray(np.append(group, False)[choice])  # -1 is the last


def _assign_one(
    gains: NDArray[np.float64],
    group: NDArray[np.bool_],
    count: float,
    w: NDArray[np.float64],
) -> tuple[Indices, NDArray[np.float64]]:
    """The samples for which the limited actions gain most over the others."""
    value, rest, (best, other) = _margins(gains, group)
    margin = value - rest
    order = np.argsort(-margin, kind="stable")
    fits = (np.cumsum(w[order]) <= count * (1 + TIE)) & (margin[order] > 0)
    last = int(fits.sum())
    ends = [margin[order[i]] if 0 <= i < len(gains) else 0.0 for i in (last - 1, last)]
    price = max(0.0, float(np.mean(ends)) if last else float(ends[1]))
    choice = np.where(rest > 0, other, -1)
    choice[order[:last]] = best[order[:last]]
    return choice, np.array([price])


def _margins(
    gains: NDArray[np.float64], group: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64], tuple[Indices, Indices]]:
    """The best gain among the actions of a group, that of all else (at least 0), and
    which actions these are.
    """
    rows, (inside, outside) = (
        np.arange(len(gains)),
        (np.where(mask, gains, -np.inf) for mask in (group, ~group)),
    )
    best, other = inside.argmax(axis=1), outside.argmax(axis=1)
    return inside[rows, best], np.maximum(outside[rows, other], 0), (best, other)


def _assign_several(
    gains: NDArray[np.float64],
    groups: NDArray[np.bool_],
    counts: NDArray[np.float64],
    w: NDArray[np.float64],
) -> tuple[Indices, NDArray[np.float64]]:
    """By prices that are nearly right; samples that they leave open are solved until no
    sample prefers another.
    """
    size, scale, prices = (
        SOLVED_AT_ONCE,
        max(float(np.ptp(gains)), 1e-300),
        np.zeros(len(groups)),
    )
    for g in [*range(len(groups))] * (
        SWEEPS if len(gains) > size else 0
    ):  # near: one price at a time, others fixed
        prices[g] = 0
        prices[g] = _assign_one(gains - prices @ groups, groups[g], counts[g], w)[1][0]
    while True:
        priced = np.column_stack([gains - prices @ groups, np.zeros(len(gains))])
        ranked = np.sort(priced, axis=1)
        open_ = np.zeros(len(gains), dtype=bool)
        open_[np.argsort(ranked[:, -1] - ranked[:, -2], kind="stable")[:size]] = True
        choice = priced.argmax(axis=1)
        choice[choice == gains.shape[1]] = -1
        left = counts - [(w * _among(choice, group))[~open_].sum() for group in groups]
        if (left >= 0).all():
            choice[open_], prices = _solve(gains[open_], groups, left, w[open_])
            priced = np.column_stack([gains - prices @ groups, np.zeros(len(gains))])
            loss = (
                priced.max(axis=1)
                - np.take_along_axis(priced, choice[:, None], axis=1)[:, 0]
            )
            if (
                open_.all() or loss[~open_].max() <= TIE * scale
            ):  # optimal: no sample prefers another choice
                return choice, prices
        size *= 2


def _solve(
    gains: NDArray[np.float64],
    groups: NDArray[np.bool_],
    counts: NDArray[np.float64],
    w: NDArray[np.float64],
) -> tuple[Indices, NDArray[np.float64]]:
    """The linear program over x (N, K) in [0, 1] by the simplex method, and the prices
    of its limits.
    """
    from scipy.optimize import linprog
    from scipy.sparse import csr_array, eye_array, kron, vstack

    samples, actions = gains.shape
    limits = kron(
        csr_array(w[None]), csr_array(groups.astype(float))
    )  # sum_ik w_i x_ik <= count
    rows = vstack(
        [kron(eye_array(samples), np.ones((1, actions))), limits], format="csr"
    )
    bounds = np.concatenate([np.ones(samples), counts])
    found = linprog(
        -(w[:, None] * gains).ravel(),
        A_ub=rows,
        b_ub=bounds,
        bounds=(0, 1),
        method="highs-ds",
    )
    if not found.success:
        raise InputError(
            f"budgets could not be assigned ({found.message}): expected gains of"
            " moderate size"
        )
    x = found.x.reshape(samples, actions)
    return np.where(x.max(axis=1) > 1 - 1e-6, x.argmax(axis=1), -1), np.maximum(
        -found.ineqlin.marginals[samples:], 0
    )


def budget_curve(
    utility: Utility, p: Floats, targets: Indices, shares: ArrayLike
) -> NDArray[np.float64]:
    """The utility of each labelled sample (S, N) if at most each of the shares is
    handed over, by worth.

    From corrected probabilities (N, C). The means over samples are the utility against
    the budget; the difference of two is what the next percent would bring.
    """
    worth, rows = Worth.of(utility, p), np.arange(len(p))
    best = worth.gains.argmax(axis=1)
    gain = worth.gains[rows, best]
    place = np.empty(len(p))
    place[np.argsort(-gain, kind="stable")] = rows
    kept, handed = (
        utility.matrix[targets, actions]
        for actions in (worth.kept, worth.actions[best])
    )
    counts = np.floor(np.atleast_1d(shares) * len(p) + TIE)[:, None]
    return np.where((place < counts) & (gain > 0), handed, kept)

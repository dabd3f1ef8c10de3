"""Monitor: what decisions in service are still worth, estimated without labels, beside
what held-out data promise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import gammaincc, ndtri

from rfdlc.decisions.decider import Decider
from rfdlc.decisions.rules import EXPECTED_UTILITY, UNFAMILIAR
from rfdlc.decisions.utility import Utility
from rfdlc.errors import expect
from rfdlc.monitoring.evidence import (
    LEAST,
    STAKES,
    UNSURE,
    Evidence,
    PriorBets,
    mean_bets,
)
from rfdlc.probabilities.classes import Indices
from rfdlc.probabilities.model import corrected
from rfdlc.probabilities.priors import Prior, PriorEstimate, estimate_prior
from rfdlc.probabilities.scores import Floats
from rfdlc.statistics.intervals import Z

# False alarms per month of each test; together with UNSURE they are 5%, and 1% more
# where labels are tested.
PRIOR, UTILITY, STRANGE, MISFIT = (
    "class prior",
    "expected utility",
    "unfamiliar input",
    "more than label shift",
)
OUTCOMES = "realised outcomes"  # of decisions with labels
LEVELS = {PRIOR: 0.015, UTILITY: 0.01, STRANGE: 0.01, MISFIT: 0.005, OUTCOMES: 0.01}
BLOCK = 50  # samples that bets are settled for together
BINS = (
    10  # of the largest probability, in which samples are compared with held-out ones
)
RIDGE = 0.1  # of the correction of expected utilities for another class prior
# samples of a window behind the draws of its prior; the estimate itself uses all
GIBBS = 1000


@dataclass(frozen=True, eq=False)
class Decided:
    """Decided samples: corrected probabilities (N, C), actions (N,), which are
    unfamiliar (N,), times if known.
    """

    utility: Utility
    probabilities: Floats
    actions: Indices
    unfamiliar: NDArray[np.bool_]
    times: NDArray[np.float64] | None = None  # seconds

    @classmethod
    def of(
        cls, decider: Decider, scores: Any, *, logits: bool = False, times: Any = None
    ) -> "Decided":
        """What a decider decides for scores."""
        probabilities = decider.model(scores, logits=logits)
        p = probabilities.array()
        flagged = decider.deferral.flags(probabilities, p)
        found = decider.explain_probabilities(p, flagged)
        return cls(
            decider.utility,
            p.astype(np.float64),
            found.action,
            np.asarray(found.reason == UNFAMILIAR),
            times,
        )

    def __len__(self) -> int:
        return len(self.actions)

    def __getitem__(self, rows: Any) -> "Decided":
        times = None if self.times is None else self.times[rows]
        return Decided(
            self.utility,
            self.probabilities[rows],
            self.actions[rows],
            self.unfamiliar[rows],
            times,
        )

    @cached_property
    def decided(self) -> Indices:
        """The decided class of each sample, -1 where it was handed over."""
        return self.utility.decided_class[self.actions]

    @cached_property
    def expected(self) -> Floats:
        """The expected utility of each decision."""
        return np.einsum(
            "nc,nc->n", self.probabilities, self.utility.matrix.T[self.actions]
        )

    def handed_over(self) -> dict[str, NDArray[np.bool_]]:
        """Which samples were handed over, by reason."""
        away = self.decided < 0
        return {
            EXPECTED_UTILITY: away & ~self.unfamiliar,
            UNFAMILIAR: away & self.unfamiliar,
        }

    def by_class(self, weights: Floats, right: Floats) -> list[float | None]:
        """The weighted mean of `right` (N,) over the samples decided for each class;
        None without samples.
        """
        kept, classes = self.decided >= 0, len(self.utility.classes)
        total = np.bincount(self.decided[kept], weights[kept], classes)
        hits = np.bincount(self.decided[kept], (weights * right)[kept], classes)
        return [
            float(h / t) if t > 0 else None for h, t in zip(hits, total, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class Reference:
    """Held-out decisions with labels, weighted as if their classes had the prior that
    is decided for.

    Parameters
    ----------
    decisions : Decided
        Of the held-out samples, by the same calibrator as new samples: what these are
        compared with.
    honest : Decided
        Of the held-out samples, each calibrated without itself: what is compared with
        their labels.
    targets : ndarray of shape (n_samples,)
        Their true classes.
    prior : ndarray of shape (n_classes,)
        The class prior that the probabilities carry and that is decided for.
    rates : tuple of float
        Shares of unfamiliar held-out samples by region, if the decider has thresholds.
    """

    decisions: Decided
    honest: Decided
    targets: Indices
    prior: Prior
    rates: tuple[float, ...] = ()

    @classmethod
    def fit(
        cls,
        decider: Decider,
        scores: Any,
        targets: ArrayLike | None = None,
        *,
        logits: bool = False,
    ) -> "Reference":
        """From held-out scores and labels, which may have calibrated the decider."""
        checked, y = decider.model.read_labelled(scores, targets, logits)
        prior = decider.model.decided_prior
        if prior is None:
            prior = np.bincount(y, minlength=len(decider.utility.classes)) / len(y)
        decisions = honest = Decided.of(decider, scores, logits=logits)
        if decider.model.overlap(checked, y):
            p = decider.model.out_of_fold(checked, y).astype(np.float64)
            action = decider.explain_probabilities(p, decisions.unfamiliar).action
            honest = replace(decisions, probabilities=p, actions=action)
        rates = (
            ()
            if decider.deferral.unfamiliar is None
            else tuple(decider.deferral.unfamiliar.rates.values())
        )
        return cls(decisions, honest, y, prior, rates)

    @cached_property
    def weights(self) -> Floats:
        """Of the samples (N,), summing to one."""
        counts = np.bincount(self.targets, minlength=len(self.prior))
        weights: Floats = self.prior[self.targets] / counts[self.targets]
        expect(
            weights.sum() > 0,
            "no held-out sample has a class of the prior that is decided for: give"
            " other data",
        )
        return weights / weights.sum()

    @property
    def size(self) -> float:
        """The effective number of samples."""
        return float(1 / (self.weights @ self.weights))

    @cached_property
    def realised(self) -> Floats:
        """The utility of each decision for its true class."""
        return self.honest.utility.matrix[self.targets, self.honest.actions]

    @cached_property
    def mean(self) -> Prior:
        """The mean probabilities (C,)."""
        return np.asarray(self.weights @ self.decisions.probabilities)

    @cached_property
    def error(self) -> Floats:
        """The covariance (C, C) of the error of the mean probabilities."""
        away = (self.decisions.probabilities - self.mean) * self.weights[:, None]
        return np.asarray(away.T @ away)

    @cached_property
    def correction(self) -> Floats:
        """h (C,): expected utility + h @ p has nearly the mean of the realised utility
        under any class prior.

        Under label shift the mean utility is that of each class, u_y, weighted by the
        new prior. h solves E[expected + h @ p | y] = u_y by ridge regression, with
        class-conditional means from the probabilities.
        """
        p, decisions = self.decisions.probabilities, self.decisions
        share = p * self.weights[:, None]
        total = np.maximum(share.sum(axis=0), LEAST)[:, None]
        gained = (share * decisions.utility.matrix.T[decisions.actions]).sum(
            axis=0
        ) / total[:, 0]
        gap = gained - share.T @ decisions.expected / total[:, 0]
        return np.asarray(
            np.linalg.solve(share.T @ p / total + RIDGE * np.eye(len(gap)), gap)
        )

    def signal(self, decisions: Decided) -> Floats:
        """What is watched for a drop in utility (N,)."""
        return decisions.expected + decisions.probabilities @ self.correction

    @property
    def broken_promise(self) -> float:
        """Promised minus realised utility of held-out decisions."""
        return float(self.weights @ (self.honest.expected - self.realised))

    def promise_error(self, prior: Prior) -> float:
        """The standard error of promised minus realised utility at another
        class prior.
        """
        ratio = prior / np.maximum(self.prior, LEAST)
        weights = self.weights * ratio[self.targets]
        values = self.honest.utility.matrix.T[self.honest.actions]
        promised = np.einsum(
            "nc,nc->n", corrected(self.honest.probabilities, ratio), values
        )
        return float(
            np.sqrt(weights**2 @ (self.realised - promised) ** 2)
            / max(weights.sum(), LEAST)
        )

    def values(self) -> dict[str, Any]:
        """What held-out data promise, under the names of `Window.to_dict`."""
        decisions, weights = self.honest, self.weights
        utility = float(weights @ self.realised)
        half = Z * float(np.sqrt(weights**2 @ (self.realised - utility) ** 2))
        hits = (decisions.decided == self.targets).astype(np.float64)
        return {
            "samples": len(decisions),
            "expected_utility": float(weights @ decisions.expected),
            "realised_utility": utility,
            "realised_utility_interval": [utility - half, utility + half],
            "handed_over": {
                why: float(weights @ each)
                for why, each in decisions.handed_over().items()
            },
            "unfamiliar": float(weights @ decisions.unfamiliar),
            "prior": self.prior.tolist(),
            "accuracy": decisions.by_class(weights, hits),
        }


@dataclass(frozen=True, eq=False)
class Window:
    """What is estimated of consecutive samples without their labels."""

    first: int
    samples: int
    estimate: PriorEstimate
    expected_utility: float
    interval: tuple[float, float]  # of the utility that the samples realise, 95%
    accuracy: list[float | None]  # expected, by decided class
    handed_over: dict[str, float]
    unfamiliar: float
    # p-value: can label shift explain the most probable classes and their
    # probabilities?
    misfit: float
    span: tuple[float, float] | None = None  # seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, ready for JSON."""
        low, high = self.estimate.interval()
        names = (
            "first",
            "samples",
            "expected_utility",
            "accuracy",
            "handed_over",
            "unfamiliar",
            "misfit",
            "span",
        )
        table = {name: getattr(self, name) for name in names} | {
            "expected_utility_interval": list(self.interval)
        }
        return table | {
            "prior": self.estimate.prior.tolist(),
            "prior_low": low.tolist(),
            "prior_high": high.tolist(),
        }


def assess(reference: Reference, decisions: Decided, first: int = 0) -> Window:
    """Estimate the class prior of decided samples, and from it what the decisions are
    worth.
    """
    p, carried = decisions.probabilities, np.maximum(reference.prior, LEAST)
    estimate = estimate_prior(
        p,
        carried,
        drawn=[p[np.linspace(0, len(p) - 1, min(GIBBS, len(p))).astype(np.int64)]],
    )
    moved, values = (
        corrected(p, estimate.prior / carried),
        decisions.utility.matrix.T[decisions.actions],
    )
    each = np.einsum("nc,nc->n", moved, values)
    chance = np.maximum(
        np.einsum("nc,nc->n", moved, values**2) - each**2, 0
    )  # rounding may leave less than 0
    low, high = estimate.mean_interval(p, values, carried)
    parts = (
        (high - low) / 2,
        Z * np.sqrt(chance.sum()) / len(p),
        Z * reference.promise_error(estimate.prior),
    )
    middle, half = float(each.mean()), float(np.linalg.norm(parts))
    right = moved[np.arange(len(p)), np.maximum(decisions.decided, 0)]
    return Window(
        first,
        len(p),
        estimate,
        middle,
        (middle - half, middle + half),
        decisions.by_class(np.ones(len(p)), right),
        {why: float(rows.mean()) for why, rows in decisions.handed_over().items()},
        float(decisions.unfamiliar.mean()),
        label_shift_misfit(reference, p, estimate.prior),
        (
            None
            if decisions.times is None
            else (float(decisions.times[0]), float(decisions.times[-1]))
        ),
    )


def label_shift_misfit(reference: Reference, p: Floats, prior: Prior) -> float:
    """The p-value of a chi-squared test: new samples beside held-out ones that are
    weighted for another class prior.

    They are counted by the most probable class and its probability. Held-out samples
    are weighted by the likelihood ratio of the estimated prior, so that a changed prior
    alone is not a misfit.
    """
    held = reference.decisions.probabilities
    weights = reference.weights * (held @ (prior / np.maximum(reference.prior, LEAST)))
    weights = weights / weights.sum()
    of_held, of_new, cells = _cells(held, p, weights)
    expected = np.bincount(of_held, weights, cells)
    observed = np.bincount(of_new, minlength=cells) / len(p)
    size = 1 / (1 / len(p) + weights @ weights)
    statistic = (
        size * ((observed - expected) ** 2 / np.maximum(expected, 1 / len(held))).sum()
    )
    return float(gammaincc((cells - 1) / 2, statistic / 2))


def _cells(held: Floats, p: Floats, weights: Floats) -> tuple[Indices, Indices, int]:
    """The cells of held-out (N,) and of new samples (n,) that have about 1 / BINS of
    the weight each, and their number.

    Classes that are the most probable one of at least this share have cells of their
    own, by its probability; the others share theirs.
    """
    classes = held.shape[1]
    owns = np.bincount(held.argmax(axis=1), weights, classes) >= 1 / BINS
    groups = [
        np.where(owns[each.argmax(axis=1)], each.argmax(axis=1), classes)
        for each in (held, p)
    ]
    confidences, found, cells = (
        [held.max(axis=1), p.max(axis=1)],
        [np.zeros(len(held), int), np.zeros(len(p), int)],
        0,
    )
    for group in np.unique(np.concatenate(groups)):
        own = np.flatnonzero(groups[0] == group)
        order = own[np.argsort(confidences[0][own], kind="stable")]
        sums = np.cumsum(weights[order])
        ends = (
            np.arange(1, round(sums[-1] * BINS)) / round(sums[-1] * BINS) * sums[-1]
            if len(own)
            else np.zeros(0)
        )
        edges = np.unique(
            confidences[0][
                order[np.minimum(np.searchsorted(sums, ends), len(order) - 1)]
            ]
        )
        for side in (0, 1):
            rows = groups[side] == group
            found[side][rows] = cells + np.searchsorted(edges, confidences[side][rows])
        cells += len(edges) + 1
    return found[0], found[1], cells


def misfit_level(per_month: int, samples: int) -> float:
    """The p-value of windows of this size below which label shift does not explain one,
    at the false alarms a month.
    """
    return LEVELS[MISFIT] / max(1.0, per_month / samples)


class Monitor:
    """Watch a stream of decisions for changes, with at most 5% false alarms per month.

    Parameters
    ----------
    reference : Reference
        What held-out data promise (`Reference.fit`).
    per_month : int
        Samples per month: the false alarms of a month are at most 5%.
    window : int
        Samples of each test whether label shift explains the change.

    Attributes
    ----------
    alarms : dict
        By test, after how many samples it gave an alarm; None if it did not.

    Examples
    --------
    >>> from rfdlc import Decider, Utility
    >>> rng = np.random.default_rng(0)
    >>> def model(samples, mix):  # probabilities for a class prior of 90% and 10%
    ...     y = (rng.random(samples) < mix).astype(int)
    ...     odds = np.exp(3 * rng.normal(3 * y - 1.5, 1)) / 9
    ...     return np.stack([1 / (1 + odds), odds / (1 + odds)], axis=1), y
    >>> decider = Decider(Utility.one_hot(2), calibration=None, train_prior=[0.9, 0.1])
    >>> monitor = Monitor(Reference.fit(decider, *model(5000, 0.1)), per_month=30_000)
    >>> monitor.update(Decided.of(decider, model(3000, 0.1)[0])).alarms["class prior"]
    >>> status = monitor.update(Decided.of(decider, model(1000, 0.25)[0]))
    >>> status.alarms["class prior"] < 4000
    True
    """

    def __init__(
        self, reference: Reference, *, per_month: int, window: int = 1000
    ) -> None:
        expect(
            per_month >= BLOCK,
            f"per_month is {per_month}: expected the samples of a month, at least"
            f" {BLOCK}",
        )
        self.reference, self.per_month, self.window = reference, per_month, window
        cost = float(np.log(per_month / BLOCK / LEVELS[PRIOR]))
        self._bets = PriorBets(reference.mean, reference.error, reference.size, cost)
        shares = {
            PRIOR: self._bets.shares,
            UTILITY: np.ones(len(STAKES)),
            STRANGE: np.ones(len(STAKES)),
        }
        self.evidence = {
            name: Evidence(own, LEVELS[name], per_month) for name, own in shares.items()
        }
        self.misfit: int | None = None
        far, matrix, weights = (
            -float(ndtri(UNSURE)),
            reference.decisions.utility.matrix,
            reference.weights,
        )
        signal = reference.signal(reference.decisions)
        promised = float(weights @ signal)
        self._promised = promised - far * float(
            np.sqrt(weights**2 @ (signal - promised) ** 2)
        )
        self._most = max(
            float(matrix.max() + reference.correction.max()), self._promised + LEAST
        )
        share = max(
            float(weights @ reference.decisions.unfamiliar), *reference.rates, LEAST
        )
        self._strange = (
            share
            + far * float(np.sqrt(share * (1 - share) / reference.size))
            + 1 / reference.size
        )
        self._waiting: Decided | None = None
        self._window: list[Floats] = []

    def update(self, decisions: Decided) -> "Monitor":
        """The next samples of the stream; bets are settled block by block."""
        if self._waiting is not None:
            waiting, p = (
                self._waiting,
                np.concatenate([self._waiting.probabilities, decisions.probabilities]),
            )
            actions = np.concatenate([waiting.actions, decisions.actions])
            strange = np.concatenate([waiting.unfamiliar, decisions.unfamiliar])
            decisions = Decided(decisions.utility, p, actions, strange)
        whole = len(decisions) // BLOCK * BLOCK
        for start in range(0, whole, BLOCK):
            self._settle(decisions[start : start + BLOCK])
        self._waiting = decisions[whole:]
        return self

    @property
    def alarms(self) -> dict[str, int | None]:
        return {name: own.alarm for name, own in self.evidence.items()} | {
            MISFIT: self.misfit
        }

    @property
    def trusted(self) -> bool:
        """Whether label shift can explain what was seen: if not, estimates of prior and
        utility mean little.
        """
        return self.alarms[STRANGE] is None and self.misfit is None

    def _settle(self, block: Decided) -> None:
        p = block.probabilities
        self.evidence[PRIOR].add(self._bets.factors(p))
        self.evidence[UTILITY].add(
            mean_bets(-self.reference.signal(block), -self._promised, -self._most)
        )
        if self.reference.rates:
            self.evidence[STRANGE].add(
                mean_bets(block.unfamiliar.astype(np.float64), self._strange, 0.0)
            )
        self._window.append(p)
        if len(self._window) * BLOCK >= self.window:
            recent, self._window = np.concatenate(self._window), []
            found = label_shift_misfit(
                self.reference, recent, self._bets.estimated(recent)
            )
            if self.misfit is None and found < misfit_level(
                self.per_month, len(recent)
            ):
                self.misfit = self.evidence[PRIOR].samples


def lengths_needed(
    spans: Sequence[tuple[int, PriorEstimate]], prior: Prior
) -> list[tuple[int, bool]]:
    """By class, the shortest span of samples whose interval is at most as wide as the
    share itself, and if any is.
    """
    found = []
    for c, share in enumerate(prior):
        widths = [
            (size, e, np.ptp(np.quantile(e.draws[:, c], [0.025, 0.975])))
            for size, e in spans
        ]
        fits = [size for size, e, width in widths if width <= max(share, e.prior[c])]
        found.append((fits[0], True) if fits else (spans[-1][0], False))
    return found

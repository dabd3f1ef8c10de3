"""Outcomes: decisions of labelled samples, the input of every registered metric."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.decisions.decider import Decider
from rfdlc.decisions.sets import SetUtility
from rfdlc.decisions.utility import Utility
from rfdlc.errors import InputError
from rfdlc.evaluation.bins import classwise_gaps
from rfdlc.probabilities import uncertainty
from rfdlc.probabilities.classes import Classes, Indices
from rfdlc.probabilities.scores import Floats, Scores, nll

PROBABILITY_COLUMNS = (
    "likeliest",
    "confidence",
    "certainty",
    "expected",
    "entropy",
    "brier",
    "nll",
)
ROUNDING = 1e-6  # of a sum of 32-bit probabilities
SET_COLUMNS = ("covered", "set_size", "set_value")
COLUMNS = (
    "targets",
    "actions",
    "decided",
    *PROBABILITY_COLUMNS,
    *SET_COLUMNS,
    "sample_groups",
)
# What ranks samples for error detection, from the probabilities and the scores of a
# chunk; None if it needs others.
UNCERTAINTIES: dict[str, Callable[[Floats, Floats, bool], Floats] | None] = {
    "decision-probability": None,
    "max-probability": lambda p, values, logits: -p.max(axis=1),
    "entropy": lambda p, values, logits: uncertainty.entropy(p),
    "mutual-information": lambda p, values, logits: uncertainty.disagreement(
        values, logits
    ),
    "evidential": lambda p, values, logits: uncertainty.evidential(values.mean(axis=0)),
    "own": None,
}


def without_rounding(gap: Floats, utility: Utility) -> NDArray[np.float64]:
    """Differences of utilities, 0 where sums of 32-bit probabilities explain them."""
    return np.where(np.abs(gap) < ROUNDING * np.abs(utility.matrix).max(), 0.0, gap)


@dataclass(frozen=True)
class Outcomes:
    """Decisions of labelled samples. Arrays have one entry per sample."""

    utility: Utility
    targets: Indices  # true classes
    actions: Indices  # chosen actions, as indices into `utility.actions`
    decided: Indices  # decided classes, -1 where the action is not a class
    likeliest: Indices  # most probable classes
    confidence: NDArray[np.float64]  # largest probabilities
    certainty: Floats  # minus the uncertainty that ranks samples for error detection
    expected: NDArray[np.float64]  # expected utilities of the chosen actions
    entropy: Floats  # of the probabilities, in nats
    brier: Floats  # sum_c (p(c) - 1{y = c})^2
    nll: Floats
    load_probabilities: Callable[[], Any]
    groups: Sequence[tuple[str, str]] = ()  # (true, decided) pairs of class groups
    gaps: NDArray[np.float64] | None = (
        None  # `classwise_gaps` of all samples; None for some of them
    )
    covered: NDArray[np.bool_] | None = (
        None  # whether the set contains the true class; None without sets
    )
    set_size: Indices | None = None  # classes in the set
    set_value: Floats | None = (
        None  # what the set is worth for the true class, of sets by expected utility
    )
    sample_groups: Indices | None = (
        None  # what samples belong to, such as a patient; None if they are independent
    )

    @classmethod
    def of(
        cls,
        utility: Utility,
        targets: Indices,
        actions: Indices,
        p: Floats | None = None,
        certainty: Any = None,
    ) -> "Outcomes":
        """Outcomes of given decisions; without probabilities (N, C), metrics that need
        them raise a TypeError.
        """
        columns: dict[str, Any] = dict.fromkeys(PROBABILITY_COLUMNS)
        decided = utility.decided_class[actions]
        if p is not None:
            confidence, rows = p.max(axis=1).astype(np.float64), np.arange(len(p))
            believed, true = (
                np.where(decided < 0, confidence, p[rows, decided]),
                p[rows, targets],
            )
            columns = {
                "likeliest": p.argmax(axis=1),
                "confidence": confidence,
                "certainty": believed if certainty is None else certainty,
                "expected": np.einsum("nc,nc->n", p, utility.matrix.T[actions]),
                "entropy": uncertainty.entropy(p),
                "brier": np.einsum("nc,nc->n", p, p) - 2 * true + 1,
                "nll": nll(true),
                "gaps": classwise_gaps(p, targets),
            }
        return cls(
            utility, targets, actions, decided, **columns, load_probabilities=lambda: p
        )

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def classes(self) -> Classes:
        """The classes, in the order that `targets` and `decided` index."""
        return self.utility.classes

    @property
    def correct(self) -> NDArray[np.bool_]:
        """Whether the decided class is the true one."""
        return self.decided == self.targets

    @property
    def right(self) -> NDArray[np.bool_]:
        """Whether the most probable class is the true one."""
        return self.likeliest == self.targets

    @cached_property
    def realised(self) -> NDArray[np.float64]:
        """The utility U[true, action] of each decision."""
        return self.utility.matrix[self.targets, self.actions]

    @cached_property
    def gap(self) -> NDArray[np.float64]:
        """Promised minus realised utility; what rounding of probabilities in 32 bits
        leaves of 0 is 0.
        """
        return without_rounding(self.expected - self.realised, self.utility)

    @property
    def regret(self) -> NDArray[np.float64]:
        """How much more the best action of each sample would have been worth."""
        return self.utility.matrix.max(axis=1)[self.targets] - self.realised

    @cached_property
    def bounds(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The smallest and the largest utility of each action."""
        return self.utility.matrix.min(axis=0), self.utility.matrix.max(axis=0)

    @cached_property
    def probabilities(self) -> Floats:
        """Combined, calibrated and prior-corrected probabilities (N, C), computed on
        first use.
        """
        return np.asarray(self.load_probabilities())

    def take(self, rows: Indices) -> "Outcomes":
        """The outcomes of some samples, repeated where `rows` repeats them."""
        columns = {
            name: getattr(self, name)[rows]
            for name in COLUMNS
            if getattr(self, name) is not None
        }
        return replace(
            self,
            **columns,
            load_probabilities=lambda: self.probabilities[rows],
            gaps=None,
        )


def observe(
    scores: Scores,
    y: Indices,
    decider: Decider,
    kind: str = "decision-probability",
    *,
    batch: bool = True,
) -> Outcomes:
    """Decide scores, chunk by chunk; `kind` is the uncertainty that ranks samples.

    They are one `batch`, which keeps to a budget exactly, or some of many, which go by
    its prices.
    """
    if kind == "evidential" and not scores.logits:
        raise InputError(
            "uncertainty 'evidential' needs logits, but these are probabilities: choose"
            " another"
        )
    rank = UNCERTAINTIES[kind]
    rng = np.random.default_rng(0)
    probabilities = decider.model(scores)
    decided = None
    shared = batch and decider.deferral.budget is not None
    if shared or decider.deferral.unfamiliar is not None:
        decided = decider.decide(scores, batch=batch)
    parts = []
    for rows, p in probabilities.chunks():
        actions = decider.decide_probabilities(p) if decided is None else decided[rows]
        certainty = None
        if rank is not None:
            certainty = -rank(p, scores.values[:, rows], scores.logits)
        outcomes = Outcomes.of(decider.utility, y[rows], actions, p, certainty)
        if decider.sets is not None:
            sets = decider.sets.members(p, decider.utility, rng)
            outcomes = replace(
                outcomes,
                covered=sets[np.arange(len(p)), y[rows]],
                set_size=sets.sum(axis=1),
            )
            if isinstance(decider.sets, SetUtility):
                value = decider.sets.realised(sets, p, y[rows], decider.utility)
                outcomes = replace(outcomes, set_value=value)
        parts.append(outcomes)
    return replace(_joined(parts, probabilities.array), sample_groups=scores.groups)


def _joined(parts: Sequence[Outcomes], load: Callable[[], Any]) -> Outcomes:
    names = [name for name in COLUMNS if getattr(parts[0], name) is not None]
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in names
    }
    gaps = np.sum([part.gaps for part in parts if part.gaps is not None], axis=0)
    return Outcomes(parts[0].utility, **columns, load_probabilities=load, gaps=gaps)


def cross_fitted(
    predictions: Any, decider: Decider, *, folds: int = 5, balanced: bool = False
) -> Outcomes:
    """Outcomes of held-out samples, each decided with a calibration that was fitted
    without it and its group.
    """
    scores, y = decider.model.read_labelled(predictions, None)
    p = decider.model.out_of_fold(scores, y, folds=folds, balanced=balanced)
    return replace(
        Outcomes.of(decider.utility, y, decider.decide_probabilities(p), p),
        sample_groups=scores.groups,
    )

"""Decision rules: each maps probabilities (n, C) to a gain per action (n, A); the
largest gain is chosen.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.decisions.utility import Utility
from rfdlc.errors import expect
from rfdlc.probabilities.classes import Indices
from rfdlc.probabilities.priors import Prior
from rfdlc.probabilities.scores import Floats

# Why a sample was handed over, or was not although that is worth more than the best
# class.
EXPECTED_UTILITY, OVER_BUDGET, UNFAMILIAR = (
    "expected utility",
    "over budget",
    "unfamiliar",
)
NONE = 255  # an index of no action
# rounding errors, relative to the largest difference between utilities: gains that are
# closer are equal
TIE = 4
Gain = Callable[[Floats], Floats]
Rule = Callable[
    [Utility, Prior | None], Gain
]  # the prior (C,) is the correction p(y) ratio(y) still to be applied


def largest(gains: Floats) -> Indices:
    """The one arg max of the library: for each sample the first action, in the order of
    the utility, of those tied.
    """
    if gains.flags.c_contiguous or gains.shape[1] > NONE:
        return np.asarray(gains.argmax(axis=1))
    top, first = gains.max(axis=1), np.full(len(gains), NONE, np.uint8)
    for place, column in enumerate(
        gains.T
    ):  # a pass over each column, several times as fast as numpy's arg max
        other = np.not_equal(column, top).view(np.uint8)
        np.minimum(first, np.negative(other, out=other) | np.uint8(place), out=first)
    return first.astype(np.intp)


def product(p: Floats, matrix: Floats) -> Floats:
    """p @ matrix, with the memory layout of p: by rows, or by columns as tables are
    stored.

    A single row would be another product of BLAS, whose rounding differs: a sample has
    one result, in any batch.
    """
    rows = p if len(p) > 1 else np.repeat(p, 2, axis=0)
    found = rows @ matrix if rows.flags.c_contiguous else (matrix.T @ rows.T).T
    return np.asarray(found[: len(p)])


@dataclass(frozen=True)
class Explanation:
    """Why each sample was decided as it was: arrays of shape (n_samples,), actions as
    indices into `actions`.
    """

    actions: tuple[str, ...]
    action: Indices
    value: Floats  # expected utility of the action
    runner_up: Indices  # the next best action by the same rule
    runner_up_value: Floats
    argmax: Indices  # the most probable class
    probability: Floats  # of that class
    reason: NDArray[
        np.str_
        # of a hand-over, or why a sample that is worth handing over was kept; ""
        # otherwise
    ]
    sets: NDArray[np.bool_] | None = (
        None  # which classes are in the set of each sample (n_samples, C)
    )

    def __len__(self) -> int:
        return len(self.action)


def explained(
    utility: Utility,
    gains: Floats,
    p: Floats,
    chosen: Indices | None = None,
    unfamiliar: Any = None,
    *,
    limited: bool = False,
    value: Callable[[Indices], Floats] | None = None,
) -> tuple[NDArray[Any], ...]:
    """The columns of an Explanation, from gains (n, A), corrected probabilities (n, C)
    and chosen actions if known.

    `value` gives the expected utility of an action for each sample, where it is known
    without a product in 64 bits.
    """
    rows, top, handing = (
        np.arange(len(p)),
        largest(p),
        bool((utility.decided_class < 0).any()),
    )
    first = largest(gains) if chosen is None else chosen
    others = gains.copy()
    others[rows, first] = -np.inf
    second, reason, values = largest(others), np.full(len(p), ""), np.empty((len(p), 0))
    if handing or value is None or unfamiliar is not None:
        values = p @ utility.matrix
        reason = reasons(utility, values, first, unfamiliar, limited=limited)
    value = value or (lambda action: values[rows, action])
    return first, value(first), second, value(second), top, p[rows, top], reason


def reasons(
    utility: Utility,
    values: Floats,
    chosen: Indices,
    unfamiliar: Any = None,
    *,
    limited: bool,
) -> NDArray[np.str_]:
    """Why each sample is handed over or, where a budget applies (`limited`), kept
    although that is not best.
    """
    handing = utility.decided_class < 0
    best = np.where(handing, values, -np.inf).max(axis=1) > np.where(
        handing, -np.inf, values
    ).max(axis=1)
    reason = np.where(
        handing[chosen], EXPECTED_UTILITY, np.where(best & limited, OVER_BUDGET, "")
    )
    return reason if unfamiliar is None else np.where(unfamiliar, UNFAMILIAR, reason)


def _expected_utility(utility: Utility, ratio: Prior | None) -> Gain:
    """sum_y U[y, d] p(y): with p(y) proportional to q(y) ratio(y), the correction
    belongs to the rows of U.

    A value that all actions of a row share decides nothing and is left out: in 32 bits
    it would cost the digits in which they differ.
    """
    shared = _shared(utility)
    matrix = utility.matrix
    if shared.any():
        matrix = matrix - shared[:, None]
    return _linear(matrix, ratio, float(np.ptp(utility.matrix, axis=1).max()))


def _shared(utility: Utility) -> Floats:
    """What all actions have in common for each true class (C,): 0, unless all are
    positive or all negative.
    """
    return np.clip(0, utility.matrix.min(axis=1), utility.matrix.max(axis=1))


def value_of(
    utility: Utility, ratio: Prior | None
) -> Callable[[Floats, Floats, Indices], Floats]:
    """Expected utilities (n,) from p (n, C), its gains (n, A) by the rule
    `expected-utility`, and actions (n,).

    The sum over classes is that of the gains, so that nothing has to be multiplied
    again.
    """
    weights = np.ones(len(utility.classes)) if ratio is None else ratio
    common = weights * _shared(utility)

    def value(p: Floats, gains: Floats, action: Indices) -> Floats:
        own = np.take_along_axis(gains, action[:, None], axis=1)[:, 0].astype(
            np.float64
        )
        if common.any():
            own += product(p.astype(np.float64), np.stack([common, common], axis=1))[
                :, 0
            ]
        return np.asarray(
            own / product(p, np.stack([weights, weights], axis=1).astype(p.dtype))[:, 0]
        )

    return value


def _argmax(utility: Utility, ratio: Prior | None) -> Gain:
    complete = bool((utility.class_action >= 0).all())
    expect(
        complete,
        "rule 'argmax' decides for a class: expected a utility with an action for every"
        " class",
    )
    matrix = np.tile(
        np.where(utility.decided_class < 0, -1.0, 0.0), (len(utility.classes), 1)
    )  # below any probability
    matrix[np.arange(len(utility.classes)), utility.class_action] = 1.0
    return _linear(matrix, ratio, 1.0)


def _linear(matrix: Floats, ratio: Prior | None, spread: float) -> Gain:
    """sum_y M[y, d] q(y) ratio(y); in 64 bits, gains that differ from the largest by
    rounding alone are set to it.

    `spread` is the largest difference between two actions. Numbers that people write
    come in 64 bits; in 32 bits come those of networks, which are never tied but by
    chance: for millions of them the comparison would cost a quarter.
    """
    weighed = matrix if ratio is None else matrix * ratio[:, None]
    of_type = cache(partial(weighed.astype, copy=False))

    def gain(p: Floats) -> Floats:
        gains = product(p, of_type(p.dtype))
        if p.dtype != np.float64:
            return gains
        top, near = (
            gains.max(axis=1, keepdims=True),
            TIE * spread * np.finfo(p.dtype).eps,
        )
        tied = gains >= top - (
            near if ratio is None else near * (p @ ratio.astype(p.dtype))[:, None]
        )
        if np.count_nonzero(tied) > len(p):
            np.copyto(gains, top, where=tied)
        return gains

    return gain


RULES: dict[str, Rule] = {"expected-utility": _expected_utility, "argmax": _argmax}

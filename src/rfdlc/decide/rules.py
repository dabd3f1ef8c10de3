"""Decision rules: each maps probabilities (n, C) to a gain per action (n, A); the largest gain is chosen."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from rfdlc.decide.classes import Indices
from rfdlc.decide.scores import Floats, safe_log
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError

Gain = Callable[[Floats], Floats]


@dataclass(frozen=True)
class Rule:
    """`prepare(utility, ratio)` gives the gain function; `ratio` (C,) is the prior correction still to be applied.

    `linear` rules take the ratio into their matrix, so that samples need no correction of their own.
    """

    prepare: Callable[[Utility, NDArray[np.float64]], Gain]
    linear: bool
    warning: str | None = None

    def gains(self, utility: Utility, probabilities: Floats) -> Floats:
        """The gain of each action (n, A) from corrected probabilities (n, C)."""
        return self.prepare(utility, np.ones(len(utility.classes)))(probabilities)

    def actions(self, utility: Utility, probabilities: Floats) -> Indices:
        """The chosen action of each sample (n,) from probabilities (n, C): the first one of the largest gain."""
        return largest(self.gains(utility, probabilities))


def largest(gains: Floats) -> Indices:
    """The one arg max of the library: the first action of the largest gain for each sample."""
    chosen: Indices = gains.argmax(axis=1)
    return chosen


def _expected_utility(utility: Utility, ratio: NDArray[np.float64]) -> Gain:
    """sum_y U[y, d] p(y): with p(y) proportional to q(y) ratio(y), the correction belongs to the rows of U.

    A value that all actions of a row share decides nothing and is left out: in 32 bits it would cost the digits in
    which they differ.
    """
    alike = np.clip(0, utility.matrix.min(axis=1), utility.matrix.max(axis=1))
    matrix = cache(((utility.matrix - alike[:, None]) * ratio[:, None]).astype)
    return lambda p: p @ matrix(p.dtype)


def _argmax(utility: Utility, ratio: NDArray[np.float64]) -> Gain:
    if (utility.class_action < 0).any():
        raise InputError("rule 'argmax' decides for a class: expected a utility with an action for every class")
    matrix = np.zeros_like(utility.matrix)
    matrix[np.arange(len(utility.classes)), utility.class_action] = ratio
    handed_over = np.where(utility.decided_class < 0, -1.0, 0.0)  # below any probability
    of_type = cache(matrix.astype)
    return lambda p: p @ of_type(p.dtype) + handed_over.astype(p.dtype)


def _paper_eq12(utility: Utility, ratio: NDArray[np.float64]) -> Gain:
    return lambda p: safe_log(p) @ utility.matrix.astype(p.dtype)


def _cobb(utility: Utility, ratio: NDArray[np.float64]) -> Gain:
    shifted = utility.matrix - utility.matrix.min() + 1  # in 64 bits: in 32 a wide range would cost what differs
    return lambda p: np.log(p.astype(np.float64) @ shifted)


RULES = {
    "expected-utility": Rule(_expected_utility, linear=True),
    "argmax": Rule(_argmax, linear=True),
    "paper-eq12": Rule(
        _paper_eq12,
        linear=False,
        warning="rule 'paper-eq12' is the paper's Eq. 12 as printed, kept to rerun the paper: log p <= 0, so a "
        "negative utility times log p is a reward, and the rule prefers the action with the most penalties; "
        "use 'expected-utility' for decisions",
    ),
    "cobb": Rule(_cobb, linear=False),
}

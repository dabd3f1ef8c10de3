"""Actions with their expected utilities, and why they were chosen, chunk by chunk."""

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rfdlc.decisions.rules import (
    RULES,
    Explanation,
    corrected,
    explained,
    largest,
    value_of,
)
from rfdlc.probabilities.classes import Indices
from rfdlc.probabilities.priors import Prior
from rfdlc.probabilities.scores import Floats, Scores

if TYPE_CHECKING:
    from rfdlc.decisions.decider import Decider


def decided_values(decider: "Decider", scores: Scores) -> tuple[Indices, Floats]:
    """Actions and their expected utilities (N,) where gains tell them, equal to the
    explanation's bit for bit.
    """
    chunks, ratio = [], decider.ratio()
    gain, value = (
        RULES[decider.rule](decider.utility, ratio),
        value_of(decider.utility, ratio),
    )
    for _, p in decider.calibrated(scores, ratio):
        gains = gain(p)
        action = largest(gains)
        chunks.append((action, value(p, gains, action)))
    actions, values = map(np.concatenate, zip(*chunks, strict=True))
    return actions, values


def explanation(
    decider: "Decider",
    pieces: Iterable[tuple[slice, Floats]],
    ratio: Prior | None,
    *given: Any,
    daily: bool = False,
) -> Explanation:
    """From chunks of calibrated probabilities, the ratio that corrects them, and what
    is decided already, if anything.

    `given` are the actions (N,) and which samples are unfamiliar (N,); `daily`, that
    they keep to limits per day.
    """
    chunks, rng = (
        list[Any](),
        None if decider.sets is None else np.random.default_rng(0),
    )
    utility, limited, priced = (
        decider.utility,
        daily or decider.budget is not None,
        given or decider.budget is not None,
    )
    gain, value = (
        RULES[decider.rule](utility, ratio),
        value_of(utility, ratio) if gains_tell(decider) else None,
    )
    for rows, calibrated in pieces:
        p = corrected(calibrated, ratio)
        sets = () if decider.sets is None else (decider.sets.members(p, utility, rng),)
        gains = decider.gains(p) if priced else gain(calibrated)
        worth = None if value is None else partial(value, calibrated, gains)
        own = (each[rows] for each in given)
        chunks.append(
            (*explained(utility, gains, p, *own, limited=limited, value=worth), *sets)
        )
    return Explanation(utility.actions, *map(np.concatenate, zip(*chunks, strict=True)))


def gains_tell(decider: "Decider") -> bool:
    """Whether the largest gain belongs to the action, so that it tells what the action
    is worth.
    """
    return (
        decider.rule == "expected-utility"
        and decider.budget is None
        and decider.unfamiliar is None
    )

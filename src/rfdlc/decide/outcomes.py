"""Outcomes: decisions of labelled samples, the input of every registered metric."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.decide import metrics, uncertainty
from rfdlc.decide.classes import Classes, Indices
from rfdlc.decide.decider import Decider
from rfdlc.decide.rules import largest
from rfdlc.decide.scores import Floats, Scores
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError

UNCERTAINTIES = ("max-probability", "entropy", "mutual-information", "evidential", "own")
PROBABILITY_COLUMNS = ("likeliest", "confidence", "certainty", "entropy", "brier", "nll")
SAMPLE_COLUMNS = ("targets", "actions", "decided", *PROBABILITY_COLUMNS)


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
    entropy: Floats  # of the probabilities, in nats
    brier: Floats
    nll: Floats
    load_probabilities: Callable[[], Any]
    groups: Sequence[tuple[str, str]] = ()  # (true, decided) pairs of class groups
    gaps: NDArray[np.float64] | None = None  # `classwise_gaps` of all samples; None for resampled ones

    @classmethod
    def of(
        cls,
        utility: Utility,
        targets: Indices,
        actions: Indices,
        probabilities: Floats | None = None,
        groups: Sequence[tuple[str, str]] = (),
    ) -> "Outcomes":
        """Outcomes of given decisions; without probabilities, metrics that need them raise a TypeError."""
        columns: dict[str, Any] = dict.fromkeys(PROBABILITY_COLUMNS)
        if probabilities is not None:
            columns = probability_columns(probabilities, targets)
            columns["gaps"] = metrics.classwise_gaps(probabilities, targets)
        decided = utility.decided_class[actions]
        return cls(
            utility, targets, actions, decided, **columns, load_probabilities=lambda: probabilities, groups=groups
        )

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def classes(self) -> Classes:
        """The classes, in the order that `targets` and `decided` index."""
        return self.utility.classes

    @property
    def right(self) -> NDArray[np.bool_]:
        """Whether the most probable class is the true one."""
        return self.likeliest == self.targets

    @cached_property
    def probabilities(self) -> Floats:
        """Combined, calibrated and prior-corrected probabilities (N, C), computed on first use."""
        return self.load_probabilities()

    def take(self, rows: Indices) -> "Outcomes":
        """The outcomes of some samples, repeated where `rows` repeats them."""
        columns = {name: getattr(self, name)[rows] for name in SAMPLE_COLUMNS}
        return replace(self, **columns, load_probabilities=lambda: self.probabilities[rows], gaps=None)


def probability_columns(probabilities: Floats, targets: Indices) -> dict[str, NDArray[Any]]:
    """The columns of `Outcomes` that follow from probabilities (N, C); `certainty` is the confidence."""
    confidence = probabilities.max(axis=1).astype(np.float64)
    return {
        "likeliest": largest(probabilities),
        "confidence": confidence,
        "certainty": confidence,
        "entropy": uncertainty.entropy(probabilities),
        "brier": metrics.brier(probabilities, targets),
        "nll": metrics.nll(probabilities[np.arange(len(targets)), targets]),
    }


def observe(
    scores: Scores,
    y: Indices,
    decider: Decider,
    kind: str = "max-probability",
    own: NDArray[np.float64] | None = None,
    groups: Sequence[tuple[str, str]] = (),
) -> Outcomes:
    """What metrics need to know about each sample, in one pass over the scores."""
    gaps = np.zeros((len(decider.utility.classes), metrics.ECE_BINS))
    chunks: list[dict[str, NDArray[Any]]] = []
    for rows, p in decider.stream(scores):
        true, actions = y[rows], decider.decide_probabilities(p)
        chunk = {
            "targets": true,
            "actions": actions,
            "decided": decider.utility.decided_class[actions],
            **probability_columns(p, true),
        }
        if kind != "max-probability":
            chunk["certainty"] = -own[rows] if kind == "own" and own is not None else _certainty(kind, p, scores, rows)
        chunks.append(chunk)
        gaps += metrics.classwise_gaps(p, true)
    columns: dict[str, Any] = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}

    def load_probabilities() -> Floats:
        return np.concatenate([p for _, p in decider.stream(scores)])

    return Outcomes(decider.utility, **columns, load_probabilities=load_probabilities, groups=tuple(groups), gaps=gaps)


def _certainty(kind: str, p: Floats, scores: Scores, rows: slice) -> Floats:
    """Minus the uncertainty of each sample of a chunk."""
    if kind == "entropy":
        return -uncertainty.entropy(p)
    values = scores.values[:, rows]
    if kind == "mutual-information":
        return -uncertainty.mutual_information(uncertainty.particle_probabilities(values, scores.logits))
    if not scores.logits:
        raise InputError("uncertainty 'evidential' needs logits, but these are probabilities: choose another")
    return -uncertainty.evidential(values.mean(axis=0))

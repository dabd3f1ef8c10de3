"""METHODS: a method is a row. What it optimises, with which particles, repulsion, stages and combination.

A row's `settings` are its defaults; any of them can be overridden. All rows here share one objective, the
integrated gain, whose parts the settings switch on; another method brings another function of the same shape.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import nn

from rfdlc.decide.classes import Classes
from rfdlc.errors import choose
from rfdlc.learn.objectives import (
    ExpectedGain,
    LogGain,
    Margin,
    NegativeLogLikelihood,
    Objective,
    PriorInLikelihood,
    class_weights,
    log_prior,
    margins,
)
from rfdlc.learn.settings import Settings, preset

Matrix = NDArray[np.float64]
ObjectiveFactory = Callable[
    [Settings, Classes, Matrix | None], nn.Module
]  # the utility's matrix, if one is trained with


def integrated_gain(settings: Settings, classes: Classes, utility: Matrix | None) -> Objective:
    """log p(y) weighted by the discrepancy ratio, plus 1/alpha of the utility term; margins or the prior inside p."""
    counts, after = classes.count_array, settings.deferred_epoch
    weights = class_weights(counts, settings.weights, power=settings.weight_power, beta=settings.weight_beta)
    shifts: list[nn.Module] = []
    if settings.prior_tau:
        shifts.append(PriorInLikelihood(log_prior(counts), settings.prior_tau))
    if settings.margin:
        shifts.append(
            Margin(margins(counts, settings.margin), settings.head_scale if settings.head == "cosine" else 1.0)
        )
    terms: list[nn.Module] = [NegativeLogLikelihood(weights, after)]
    if utility is not None:
        terms.append(_utility_term(settings, utility, weights, after))
    return Objective(shifts, terms)


def _utility_term(settings: Settings, utility: Matrix, weights: Matrix, after: int) -> nn.Module:
    samples = weights if settings.utility_weights == "samples" else None
    if settings.utility_form == "bounded":
        return ExpectedGain(utility, settings.alpha, sample_weights=samples, after=after)
    matrix = utility.T if settings.utility_form == "column" else utility
    columns = weights if settings.utility_weights == "columns" else None
    return LogGain(matrix, settings.alpha, sample_weights=samples, column_weights=columns, after=after)


@dataclass(frozen=True)
class Stage:
    """A part of the training: its share of the epochs, what trains, how samples are drawn, what is optimised.

    `objective` and `sampling` default to the method's and the settings'.
    """

    share: float = 1.0
    trains: Literal["all", "head"] = "all"
    sampling: str | None = None
    objective: ObjectiveFactory | None = None


@dataclass(frozen=True)
class Method:
    """One row. `prior` is the class prior of the trained probabilities, so that a Decider never corrects it twice."""

    summary: str
    reference: str
    prior: Literal["train", "uniform"]
    settings: Mapping[str, Any] = field(default_factory=dict)
    objective: ObjectiveFactory = integrated_gain
    stages: tuple[Stage, ...] = (Stage(),)


METHODS: dict[str, Method] = {
    "ce": Method(
        "cross-entropy, one network",
        "the plain baseline",
        prior="train",
        settings={"head": "linear"},
    ),
    "rf-dlc-paper": Method(
        "the paper as its authors ran it: margins, deferred weights 1/n, deferred utility, repulsion on head weights",
        "RF-DLC, sections 3 and 4 and its authors' code",
        prior="uniform",
        settings={
            "particles": 3,
            "shared_stages": 1,
            "weights": "linear",
            "margin": 0.5,
            "deferred": 0.8,
            "utility_weights": "columns",
            "repulsion": "head",
            "schedule": "step",
            "combine": "mean-logits",
            "keep": (0.8,),
        },
    ),
    "rf-dlc": Method(
        "our default: the prior inside the likelihood, mixup, repulsion; calibrated, then decided by expected utility",
        "RF-DLC with the target prior in the likelihood (docs/learn.md)",
        prior="uniform",
        settings={
            "particles": 3,
            "shared_stages": 1,
            "prior_tau": (1.0,),
            "mixup": 0.4,
            "repulsion": "head",
            "schedule": "cosine",
        },
    ),
}


def resolve(method: str, data_name: str, overrides: Mapping[str, Any], kind: str = "") -> tuple[Method, Settings]:
    """The row and the settings: defaults, then the row's, then the data set's preset, then the user's."""
    choose("method", method, METHODS)
    row = METHODS[method]
    return row, Settings().changed({**row.settings, **preset(data_name, method, kind), **overrides})

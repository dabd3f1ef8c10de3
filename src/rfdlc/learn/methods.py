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
from rfdlc.errors import InputError, choose
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
    counts, after, weights = classes.count_array, settings.deferred_epoch, _weights(settings, classes)
    shifts: list[nn.Module] = []
    if settings.prior_tau:
        shifts.append(PriorInLikelihood(_log_prior_ratio(settings, classes), settings.prior_tau))
    if settings.margin:
        shifts.append(
            Margin(margins(counts, settings.margin), settings.head_scale if settings.head == "cosine" else 1.0)
        )
    terms: list[nn.Module] = [NegativeLogLikelihood(weights, after)]
    if utility is not None:
        terms.append(_utility_term(settings, utility, weights, after))
    return Objective(shifts, terms)


def _target(settings: Settings, classes: Classes) -> Matrix:
    """The class prior aimed at, (C,)."""
    given = np.array(settings.target_prior or (1.0,) * len(classes), dtype=np.float64)
    if len(given) != len(classes) or not (given > 0).all():
        raise InputError(f"target_prior has {len(given)} numbers: expected {len(classes)}, one above 0 for each class")
    return given / given.sum()


def _weights(settings: Settings, classes: Classes) -> Matrix:
    target = _target(settings, classes) if settings.target_prior and settings.weights != "constant" else None
    power, beta = settings.weight_power, settings.weight_beta
    return class_weights(classes.count_array, settings.weights, power=power, beta=beta, target_prior=target)


def _log_prior_ratio(settings: Settings, classes: Classes) -> Matrix:
    """log p_train - log p_target; a uniform target only adds a constant, which no softmax sees."""
    target = np.log(_target(settings, classes)) if settings.target_prior else 0.0
    ratio: Matrix = log_prior(classes.count_array) - target
    return ratio


def carried_prior(settings: Settings, classes: Classes) -> Matrix:
    """The class prior of the trained probabilities: what sampling, weights and the likelihood make of the training's.

    Proportional to n^s w(n) (p_train / p_target)^-tau, with s = 1, 1/2, 0 by the sampling and tau the particles' mean:
    p_train for plain training, uniform for weights 1/n, for balanced sampling, and for the prior in the likelihood.
    """
    samples = np.maximum(classes.count_array, 1).astype(np.float64)
    drawn = {"shuffle": 1.0, "sqrt": 0.5, "balanced": 0.0}[settings.sampling]
    tau = float(np.mean(settings.prior_tau)) if settings.prior_tau else 0.0
    logs = drawn * np.log(samples) + np.log(_weights(settings, classes)) - tau * _log_prior_ratio(settings, classes)
    prior: Matrix = np.exp(logs - logs.max())
    return prior / prior.sum()


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
    """One row. `prior` gives the class prior of the trained probabilities: a Decider never corrects it twice."""

    summary: str
    reference: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    prior: Callable[[Settings, Classes], Matrix] = carried_prior
    objective: ObjectiveFactory = integrated_gain
    stages: tuple[Stage, ...] = (Stage(),)


METHODS: dict[str, Method] = {
    "ce": Method(
        "cross-entropy, one network",
        "the plain baseline",
        settings={"head": "linear"},
    ),
    "rf-dlc-paper": Method(
        "the paper as its authors ran it: margins, deferred weights 1/n, deferred utility, repulsion on head weights",
        "RF-DLC, sections 3 and 4 and its authors' code",
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
        settings={
            "particles": 3,
            "shared_stages": 1,
            "prior_tau": (1.0,),
            "mixup": 0.4,
            "repulsion": "head",
            "schedule": "cosine",
            "combine": "mean-logits",
            "calibration": "prior-corrected-temperature",
        },
    ),
}


def resolve(
    method: str, data_name: str, overrides: Mapping[str, Any], kind: str = "", samples: int = 0
) -> tuple[Method, Settings]:
    """The row and the settings: defaults, then the row's, then the data set's preset, then the user's.

    `kind` and number of training `samples` say what suits data without a preset of their own.
    """
    choose("method", method, METHODS)
    row = METHODS[method]
    sized = {"batch_size": table_batch(samples)} if kind == "features" and samples else {}
    return row, Settings().changed({**row.settings, **sized, **preset(data_name, method, kind), **overrides})


def table_batch(samples: int) -> int:
    """Rows a step: an eighth of a small table, so that it has some steps an epoch; large ones for large tables.

    >>> [table_batch(n) for n in (100, 1000, 10_000, 100_000)]
    [64, 64, 1024, 1024]
    """
    return min(1024, max(64, 2 ** int(np.log2(max(1, samples / 8)))))

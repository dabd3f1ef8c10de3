"""From a configuration and classes to the loss of a method, how it combines its
particles, and the prior it carries.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import nn

from rfdlc.data.loader import SAMPLINGS
from rfdlc.errors import expect
from rfdlc.probabilities.classes import Classes
from rfdlc.training.config import TrainConfig
from rfdlc.training.losses import Loss, terms
from rfdlc.training.networks.particles import Combination, Router
from rfdlc.training.settings import TABULAR

Matrix = NDArray[np.float64]
LossFactory = Callable[
    [TrainConfig, Classes, Matrix | None], Loss
]  # the utility's matrix, if one is trained with
CombinationFactory = Callable[
    [TrainConfig, Classes, int, int], Combination
]  # runs, width of the features


def integrated_gain(
    config: TrainConfig, classes: Classes, utility: Matrix | None
) -> terms.CompositeLoss:
    """log p(y) weighted by the discrepancy ratio, plus 1/alpha of the utility term;
    margins or the prior inside p.
    """
    after, weights = config.deferred_epoch, _weights(config, classes)
    shifts: list[nn.Module] = []
    if config.prior_tau:
        shifts.append(
            terms.PriorInLikelihood(_log_prior_ratio(config, classes), config.prior_tau)
        )
    if config.margin:
        shifts.append(_margin(config, classes))
    parts: list[nn.Module] = [terms.NegativeLogLikelihood(weights, after, config.focal)]
    if utility is not None:
        matrix, bounded = (
            utility.T if config.utility_form == "column" else utility,
            config.utility_form == "bounded",
        )
        given = {
            "samples": {"sample_weights": weights},
            "columns": {"column_weights": weights},
            "none": {},
        }
        parts.append(
            terms.Gain(
                matrix,
                config.alpha,
                bounded=bounded,
                after=after,
                **given[config.utility_weights],
            )
        )
    return terms.CompositeLoss(shifts, parts)


def diverse_experts(
    config: TrainConfig, classes: Classes, utility: Matrix | None
) -> nn.Module:
    likelihood = terms.NegativeLogLikelihood(
        _weights(config, classes), config.deferred_epoch
    )
    return terms.DiverseExperts(
        _margin(config, classes), likelihood, _diversity(config, classes)
    )


def evidential_experts(
    config: TrainConfig, classes: Classes, utility: Matrix | None
) -> nn.Module:
    """TLC. Its weights are scaled to sum to C, since its mean is not divided by their
    sum.
    """
    weights, options = _weights(config, classes), config.method_options
    annealing = (config.deferred_epoch + options["annealing"]) / options["divergence"]
    parts = (
        _margin(config, classes),
        weights * len(weights) / weights.sum(),
        _diversity(config, classes),
    )
    return terms.EvidentialExperts(
        *parts, annealing, options["threshold"], options["eta"]
    )


def _margin(config: TrainConfig, classes: Classes) -> terms.Margin:
    margins = terms.margins(classes.count_array, config.margin)
    return terms.Margin(margins, 1.0 if config.head == "linear" else config.head_scale)


def _diversity(config: TrainConfig, classes: Classes) -> terms.Diversity:
    """Temperatures C p(c) s + 1 - s, divided by their maximum: frequent classes may
    differ more.
    """
    frequency, share = (
        np.exp(terms.log_prior(classes.count_array)),
        config.method_options["temperature_share"],
    )
    heat = len(classes) * frequency * share + 1 - share
    return terms.Diversity(
        heat / heat.max(), config.method_options["diversity"], config.deferred_epoch
    )


def _target(config: TrainConfig, classes: Classes) -> Matrix | None:
    if not config.trained_prior:
        return None
    given = np.array(config.trained_prior, dtype=np.float64)
    fits = len(given) == len(classes) and (given > 0).all()
    expect(
        fits,
        f"trained_prior has {len(given)} numbers: expected {len(classes)}, one above 0"
        " for each class",
    )
    return given / given.sum()


def _weights(config: TrainConfig, classes: Classes) -> Matrix:
    target = _target(config, classes) if config.weights != "constant" else None
    power, beta = config.weight_power, config.weight_beta
    return terms.class_weights(
        classes.count_array, config.weights, power=power, beta=beta, target_prior=target
    )


def _log_prior_ratio(config: TrainConfig, classes: Classes) -> Matrix:
    """log p_train - log p_target; a uniform target only adds a constant, which no
    softmax sees.
    """
    target = _target(config, classes)
    return terms.log_prior(classes.count_array) - (
        0.0 if target is None else np.log(target)
    )


def carried_prior(config: TrainConfig, classes: Classes) -> Matrix:
    """The class prior of the trained probabilities: proportional to n^s w(n) (p_train /
    p_target)^-tau.

    s is 1, 1/2, 0 by the sampling, and tau the mean of the particles. A mixture brings
    all that it holds to p_train.
    """
    samples = np.maximum(classes.count_array, 1).astype(np.float64)
    if config.backbone in TABULAR:
        return samples / samples.sum()
    drawn = SAMPLINGS[config.sampling]
    tau = float(np.mean(config.prior_tau)) if config.prior_tau else 0.0
    logs = (
        drawn * np.log(samples)
        + np.log(_weights(config, classes))
        - tau * _log_prior_ratio(config, classes)
    )
    prior = np.exp(logs - logs.max())
    return prior / prior.sum()


def as_they_are(
    config: TrainConfig, classes: Classes, runs: int, width: int
) -> Combination:
    return Combination()  # for a Decider to average


def routed(config: TrainConfig, classes: Classes, runs: int, width: int) -> Combination:
    particles, options = config.particles, config.method_options
    expect(
        particles > 1,
        "a router chooses among experts: expected particles=2 or more, got"
        f" {particles}",
    )
    return Router(
        runs,
        particles,
        width,
        len(classes),
        int(options["router_choices"]),
        int(options["router_hidden"]),
    )

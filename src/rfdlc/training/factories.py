"""From settings and classes to what a method optimises, how it joins its particles, and the prior it carries.

Constants of other people's methods are here, each with its source; docs/methods.md says what differs from them.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import nn

from rfdlc.decide.classes import Classes
from rfdlc.errors import InputError
from rfdlc.training.config import TrainConfig
from rfdlc.training.losses.experts import (
    DiverseExperts,
    Diversity,
    EvidentialExperts,
    NestedExperts,
    Routing,
    SelfDistillation,
)
from rfdlc.training.losses.reduction import Loss
from rfdlc.training.losses.terms import (
    CompositeLoss,
    ExpectedGain,
    LogGain,
    Margin,
    NegativeLogLikelihood,
    PriorInLikelihood,
    class_weights,
    log_prior,
    margins,
)
from rfdlc.training.networks.combinations import Combination, Evidential, GroupMean, Particles, Router, nested_groups
from rfdlc.training.networks.particles import ParticleNet
from rfdlc.training.optimisation import normalise_head

# RIDE: frank-xwang/RIDE-LongTailRecognition, model/loss.py and configs/config_imbalance_cifar100_ride[_ea].json
RIDE_DIVERSITY, FREQUENCY_SHARE, ROUTER_POSITIVE, ROUTER_CHOICES = 0.2, 0.05, 100.0, 30
# TLC: lblaoke/TLC, model/loss.py and model/ResnetCifar.py
TLC_DIVERSITY, TLC_ANNEALING, TLC_THRESHOLD, TLC_ETA = 0.01, 500, 0.54, 0.2
DISTILLATION = 1.0  # ours: the paper was not at hand in full

Matrix = NDArray[np.float64]
LossFactory = Callable[[TrainConfig, Classes, Matrix | None], Loss]  # the utility's matrix, if one is trained with
CombinationFactory = Callable[[TrainConfig, Classes, int, int], Combination]  # runs, width of the features


def integrated_gain(settings: TrainConfig, classes: Classes, utility: Matrix | None) -> CompositeLoss:
    """log p(y) weighted by the discrepancy ratio, plus 1/alpha of the utility term; margins or the prior inside p."""
    after, weights = settings.deferred_epoch, _weights(settings, classes)
    shifts: list[nn.Module] = []
    if settings.prior_tau:
        shifts.append(PriorInLikelihood(_log_prior_ratio(settings, classes), settings.prior_tau))
    if settings.margin:
        shifts.append(_margin(settings, classes))
    terms: list[nn.Module] = [NegativeLogLikelihood(weights, after, settings.focal)]
    if utility is not None:
        terms.append(_utility_term(settings, utility, weights, after))
    return CompositeLoss(shifts, terms)


def _margin(settings: TrainConfig, classes: Classes) -> Margin:
    scale = settings.head_scale if settings.head == "cosine" else 1.0
    return Margin(margins(classes.count_array, settings.margin), scale)


def _target(settings: TrainConfig, classes: Classes) -> Matrix:
    """The class prior aimed at, (C,)."""
    given = np.array(settings.target_prior or (1.0,) * len(classes), dtype=np.float64)
    if len(given) != len(classes) or not (given > 0).all():
        raise InputError(f"target_prior has {len(given)} numbers: expected {len(classes)}, one above 0 for each class")
    return given / given.sum()


def _weights(settings: TrainConfig, classes: Classes) -> Matrix:
    target = _target(settings, classes) if settings.target_prior and settings.weights != "constant" else None
    power, beta = settings.weight_power, settings.weight_beta
    return class_weights(classes.count_array, settings.weights, power=power, beta=beta, target_prior=target)


def _log_prior_ratio(settings: TrainConfig, classes: Classes) -> Matrix:
    """log p_train - log p_target; a uniform target only adds a constant, which no softmax sees."""
    target = np.log(_target(settings, classes)) if settings.target_prior else 0.0
    ratio: Matrix = log_prior(classes.count_array) - target
    return ratio


def carried_prior(settings: TrainConfig, classes: Classes) -> Matrix:
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


def _utility_term(settings: TrainConfig, utility: Matrix, weights: Matrix, after: int) -> nn.Module:
    samples = weights if settings.utility_weights == "samples" else None
    if settings.utility_form == "bounded":
        return ExpectedGain(utility, settings.alpha, sample_weights=samples, after=after)
    matrix = utility.T if settings.utility_form == "column" else utility
    columns = weights if settings.utility_weights == "columns" else None
    return LogGain(matrix, settings.alpha, sample_weights=samples, column_weights=columns, after=after)


# -- experts -------------------------------------------------------------------------------------------------------


def diverse_experts(settings: TrainConfig, classes: Classes, utility: Matrix | None) -> nn.Module:
    """RIDE's first stage."""
    likelihood = NegativeLogLikelihood(_weights(settings, classes), settings.deferred_epoch)
    return DiverseExperts(_margin(settings, classes), likelihood, _diversity(settings, classes, RIDE_DIVERSITY))


def routing(settings: TrainConfig, classes: Classes, utility: Matrix | None) -> nn.Module:
    """RIDE's second stage."""
    return Routing(ROUTER_POSITIVE)


def evidential_experts(settings: TrainConfig, classes: Classes, utility: Matrix | None) -> nn.Module:
    """TLC. Its weights are scaled to sum to C, since its mean is not divided by their sum."""
    weights, after = _weights(settings, classes), settings.deferred_epoch
    return EvidentialExperts(
        _margin(settings, classes),
        weights * len(weights) / weights.sum(),
        _diversity(settings, classes, TLC_DIVERSITY),
        annealing=(after + TLC_ANNEALING) / FREQUENCY_SHARE,
        threshold=TLC_THRESHOLD,
        eta=TLC_ETA,
    )


def nested_experts(settings: TrainConfig, classes: Classes, utility: Matrix | None) -> nn.Module:
    """ACE."""
    return NestedExperts(nested_groups(classes, settings.particles))


def self_distillation(settings: TrainConfig, classes: Classes, utility: Matrix | None) -> nn.Module:
    """SRepr's second stage."""
    return SelfDistillation(settings.particles, DISTILLATION)


def _diversity(settings: TrainConfig, classes: Classes, strength: float) -> Diversity:
    """Temperatures C p(c) s + 1 - s with s = 0.05, divided by their maximum: frequent classes may differ more."""
    frequency = np.exp(log_prior(classes.count_array))
    heat = len(classes) * frequency * FREQUENCY_SHARE + 1 - FREQUENCY_SHARE
    return Diversity(heat / heat.max(), strength, settings.deferred_epoch)


# -- combinations and priors ---------------------------------------------------------------------------------------


def as_they_are(settings: TrainConfig, classes: Classes, runs: int, width: int) -> Combination:
    """Particles for a Decider to average."""
    return Particles()


def routed(settings: TrainConfig, classes: Classes, runs: int, width: int) -> Combination:
    """RIDE's."""
    if settings.particles < 2:
        raise InputError(f"a router chooses among experts: expected particles=2 or more, got {settings.particles}")
    return Router(runs, settings.particles, width, len(classes), choices=ROUTER_CHOICES)


def evidential(settings: TrainConfig, classes: Classes, runs: int, width: int) -> Combination:
    """TLC's."""
    return Evidential(TLC_ETA)


def group_mean(settings: TrainConfig, classes: Classes, runs: int, width: int) -> Combination:
    """ACE's."""
    return GroupMean(nested_groups(classes, settings.particles))


def equal_lengths(net: ParticleNet, settings: TrainConfig) -> None:
    """Tau normalisation at the end of a stage."""
    normalise_head(net, 1.0)


def uniform(settings: TrainConfig, classes: Classes) -> Matrix:
    """What balanced sampling of a last stage leaves."""
    return np.full(len(classes), 1 / len(classes))

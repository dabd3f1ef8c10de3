"""From a configuration and classes to the loss of a method, how it combines its particles, and the prior it carries."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import nn

from rfdlc.decide.classes import Classes
from rfdlc.errors import InputError
from rfdlc.training.config import TrainConfig
from rfdlc.training.losses import Loss
from rfdlc.training.losses.experts import (
    DiverseExperts,
    Diversity,
    EvidentialExperts,
    NestedExperts,
    Routing,
    SelfDistillation,
)
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

Matrix = NDArray[np.float64]
LossFactory = Callable[[TrainConfig, Classes, Matrix | None], Loss]  # the utility's matrix, if one is trained with
CombinationFactory = Callable[[TrainConfig, Classes, int, int], Combination]  # runs, width of the features


def integrated_gain(config: TrainConfig, classes: Classes, utility: Matrix | None) -> CompositeLoss:
    """log p(y) weighted by the discrepancy ratio, plus 1/alpha of the utility term; margins or the prior inside p."""
    after, weights = config.deferred_epoch, _weights(config, classes)
    shifts: list[nn.Module] = []
    if config.prior_tau:
        shifts.append(PriorInLikelihood(_log_prior_ratio(config, classes), config.prior_tau))
    if config.margin:
        shifts.append(_margin(config, classes))
    terms: list[nn.Module] = [NegativeLogLikelihood(weights, after, config.focal)]
    if utility is not None:
        terms.append(_utility_term(config, utility, weights, after))
    return CompositeLoss(shifts, terms)


def _margin(config: TrainConfig, classes: Classes) -> Margin:
    scale = config.head_scale if config.head == "cosine" else 1.0
    return Margin(margins(classes.count_array, config.margin), scale)


def _target(config: TrainConfig, classes: Classes) -> Matrix:
    """The class prior aimed at, (C,)."""
    given = np.array(config.target_prior or (1.0,) * len(classes), dtype=np.float64)
    if len(given) != len(classes) or not (given > 0).all():
        raise InputError(f"target_prior has {len(given)} numbers: expected {len(classes)}, one above 0 for each class")
    return given / given.sum()


def _weights(config: TrainConfig, classes: Classes) -> Matrix:
    target = _target(config, classes) if config.target_prior and config.weights != "constant" else None
    power, beta = config.weight_power, config.weight_beta
    return class_weights(classes.count_array, config.weights, power=power, beta=beta, target_prior=target)


def _log_prior_ratio(config: TrainConfig, classes: Classes) -> Matrix:
    """log p_train - log p_target; a uniform target only adds a constant, which no softmax sees."""
    target = np.log(_target(config, classes)) if config.target_prior else 0.0
    ratio: Matrix = log_prior(classes.count_array) - target
    return ratio


def carried_prior(config: TrainConfig, classes: Classes) -> Matrix:
    """The class prior of the trained probabilities: what sampling, weights and the likelihood make of the training's.

    Proportional to n^s w(n) (p_train / p_target)^-tau, with s = 1, 1/2, 0 by the sampling and tau the particles' mean:
    p_train for plain training, uniform for weights 1/n, for balanced sampling, and for the prior in the likelihood.
    """
    samples = np.maximum(classes.count_array, 1).astype(np.float64)
    drawn = {"shuffle": 1.0, "sqrt": 0.5, "balanced": 0.0}[config.sampling]
    tau = float(np.mean(config.prior_tau)) if config.prior_tau else 0.0
    logs = drawn * np.log(samples) + np.log(_weights(config, classes)) - tau * _log_prior_ratio(config, classes)
    prior: Matrix = np.exp(logs - logs.max())
    return prior / prior.sum()


def _utility_term(config: TrainConfig, utility: Matrix, weights: Matrix, after: int) -> nn.Module:
    samples = weights if config.utility_weights == "samples" else None
    if config.utility_form == "bounded":
        return ExpectedGain(utility, config.alpha, sample_weights=samples, after=after)
    matrix = utility.T if config.utility_form == "column" else utility
    columns = weights if config.utility_weights == "columns" else None
    return LogGain(matrix, config.alpha, sample_weights=samples, column_weights=columns, after=after)


# -- experts -------------------------------------------------------------------------------------------------------


def diverse_experts(config: TrainConfig, classes: Classes, utility: Matrix | None) -> nn.Module:
    """RIDE's first stage."""
    likelihood = NegativeLogLikelihood(_weights(config, classes), config.deferred_epoch)
    return DiverseExperts(_margin(config, classes), likelihood, _diversity(config, classes))


def routing(config: TrainConfig, classes: Classes, utility: Matrix | None) -> nn.Module:
    """RIDE's second stage."""
    return Routing(config.method_options["router_positive_weight"])


def evidential_experts(config: TrainConfig, classes: Classes, utility: Matrix | None) -> nn.Module:
    """TLC. Its weights are scaled to sum to C, since its mean is not divided by their sum."""
    weights, after, options = _weights(config, classes), config.deferred_epoch, config.method_options
    return EvidentialExperts(
        _margin(config, classes),
        weights * len(weights) / weights.sum(),
        _diversity(config, classes),
        annealing=(after + options["annealing"]) / options["divergence"],
        threshold=options["threshold"],
        eta=options["eta"],
    )


def nested_experts(config: TrainConfig, classes: Classes, utility: Matrix | None) -> nn.Module:
    """ACE."""
    return NestedExperts(nested_groups(classes, config.particles), config.method_options["silence"])


def self_distillation(config: TrainConfig, classes: Classes, utility: Matrix | None) -> nn.Module:
    """SRepr's second stage."""
    return SelfDistillation(config.particles, config.method_options["distillation"])


def _diversity(config: TrainConfig, classes: Classes) -> Diversity:
    """Temperatures C p(c) s + 1 - s, divided by their maximum: frequent classes may differ more."""
    frequency, share = np.exp(log_prior(classes.count_array)), config.method_options["temperature_share"]
    heat = len(classes) * frequency * share + 1 - share
    return Diversity(heat / heat.max(), config.method_options["diversity"], config.deferred_epoch)


# -- combinations and priors ---------------------------------------------------------------------------------------


def as_they_are(config: TrainConfig, classes: Classes, runs: int, width: int) -> Combination:
    """Particles for a Decider to average."""
    return Particles()


def routed(config: TrainConfig, classes: Classes, runs: int, width: int) -> Combination:
    """RIDE's."""
    if config.particles < 2:
        raise InputError(f"a router chooses among experts: expected particles=2 or more, got {config.particles}")
    options = config.method_options
    choices, hidden = int(options["router_choices"]), int(options["router_hidden"])
    return Router(runs, config.particles, width, len(classes), choices=choices, hidden=hidden)


def evidential_fusion(config: TrainConfig, classes: Classes, runs: int, width: int) -> Combination:
    """TLC's."""
    return Evidential(config.method_options["eta"])


def group_mean(config: TrainConfig, classes: Classes, runs: int, width: int) -> Combination:
    """ACE's."""
    return GroupMean(nested_groups(classes, config.particles))


def tau_normalisation(net: ParticleNet, config: TrainConfig) -> None:
    """What happens at the end of the only stage of tau-norm."""
    normalise_head(net, config.method_options["tau"])


def uniform(config: TrainConfig, classes: Classes) -> Matrix:
    """What balanced sampling of a last stage leaves."""
    return np.full(len(classes), 1 / len(classes))

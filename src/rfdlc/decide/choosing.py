"""How probable each calibrator is the best one, by the cross-validated likelihood of
held-out data.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.decide.classes import Indices
from rfdlc.decide.fitting import NEVER, HeldOut, mapped, raised
from rfdlc.decide.scores import Floats, log_softmax, softmax

# What `auto` weighs, and the held-out samples below which it is not tried: a polynomial
# of the number of classes.
SAMPLES_NEEDED = {
    "temperature": (0,),
    "none": (50,),
    "prior-corrected-temperature": (10,),
    "bias-corrected-temperature": (1, 10),
    "matrix-scaling": (
        0.005,
        0,
        4,
        20,
    ),  # far fewer than parameters; the cubic term keeps fits below a minute
}
# Compared beforehand: the second needs this probability of being better. Chosen by log
# loss as in benchmarks/calibrations.py, on other splits.
WITH_POWER, SURE = {"temperature": (0,), "power-temperature": (20,)}, 0.7
# Biases of a class without samples stay near 0. These two must be right for every class
# if its prior may become large.
OF_EVERY_CLASS = ("none", "matrix-scaling")
FOLDS, MOST_COMPARED, RESAMPLES = 5, 5000, 200  # of cross-validation
# The log-likelihood counts half, a temperature has odds of e to 1 in advance, and small
# weights are dropped. Chosen by utility on tables of KEEL, by regret on worlds as in
# benchmarks/regret.py: other seeds, also with biases.
TRUST, HEAD_START, LEAST_WEIGHT = 0.5, 1.0, 0.05


def chances(losses: dict[str, Floats], weights: Floats) -> dict[str, float]:
    """How probable each calibrator is the best one: the mean over resampled samples
    (pseudo-BMA+, Yao et al. 2018).
    """
    if not losses:
        return {"temperature": 1.0}
    drawn = np.random.default_rng(0).exponential(
        weights, (RESAMPLES, len(weights))
    )  # a Bayesian bootstrap
    means = (
        drawn / drawn.sum(axis=1, keepdims=True) @ np.stack([*losses.values()], axis=1)
    )
    head_start = np.array([HEAD_START * (name == "temperature") for name in losses])
    mean = softmax(head_start - TRUST / (weights @ weights) * means).mean(axis=0)
    kept = np.where(mean >= min(LEAST_WEIGHT, mean.max()), mean, 0)
    return {
        name: float(share)
        for name, share in zip(losses, kept / kept.sum(), strict=True)
        if share
    }


def needs_power(
    calibrators: Mapping[str, Any],
    log_p: Floats,
    targets: Indices,
    context: dict[str, Any],
) -> bool:
    """Whether a power with a temperature fits surely better than a temperature: then
    all are fitted to powers.
    """
    losses, weights = cross_validated(calibrators, log_p, targets, context, WITH_POWER)
    return chances(losses, weights).get("power-temperature", 0.0) > SURE


def for_any_prior(
    shares: dict[str, float], targets: Indices, classes: int
) -> dict[str, float]:
    """Weights without calibrators for which some classes have too few samples: those
    that a uniform prior would need.

    All of them if most of the weight is theirs: the others do not fit the held-out
    data.
    """
    size = (
        classes**2 / (1 / np.maximum(np.bincount(targets, minlength=classes), 1)).sum()
    )  # in effect
    scarce = [
        name
        for name in OF_EVERY_CLASS
        if np.polyval(SAMPLES_NEEDED[name], classes) > size
    ]
    kept = {name: share for name, share in shares.items() if name not in scarce}
    kept = shares if 2 * sum(kept.values()) < 1 else kept
    return {name: share / sum(kept.values()) for name, share in kept.items()}


def grouped_folds(
    targets: Indices, groups: NDArray[Any], folds: int = FOLDS
) -> Indices:
    """The fold (N,) of each sample: whole groups, the largest first, each where its
    classes are rarest so far.

    There are as many folds as groups if these are few.

    >>> grouped_folds(np.array([0, 0, 1, 0, 1, 1]), np.array(list("aabbcc"))).tolist()
    [0, 0, 1, 1, 2, 2]
    """
    _, classes, counts = np.unique(targets, return_inverse=True, return_counts=True)
    _, numbers, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    members = np.split(np.argsort(numbers, kind="stable"), np.cumsum(sizes)[:-1])
    filled = np.zeros((min(folds, len(sizes)), len(counts)))  # shares of classes
    fold = np.empty(len(targets), dtype=np.int64)
    for rows in sorted(members, key=len, reverse=True):
        share = np.bincount(classes[rows], minlength=len(counts)) / counts
        fewest = (
            filled @ share + filled.mean(axis=1) * len(rows) / len(targets)
        ).argmin()  # least sum of squares
        fold[rows] = fewest
        filled[fewest] += share
    return fold


def cross_validated(
    calibrators: Mapping[str, Any],
    log_p: Floats,
    targets: Indices,
    context: dict[str, Any],
    samples_needed: Mapping[str, tuple[float, ...]] = SAMPLES_NEEDED,
) -> tuple[dict[str, Floats], Floats]:
    """By calibrator, the negative log-likelihood of each sample, calibrated by the
    other folds; and their weights.

    The likelihood is that of the class prior decided for, if it is known, without
    classes that the held-out data lack. `groups` of the context are in one fold each:
    what was learned from a site would help with its other samples, but not with new
    sites, and the most so for the calibrator with the most parameters.
    """
    groups, context = (
        context.get("groups"),
        {name: own for name, own in context.items() if name != "groups"},
    )
    repeats, carried, target = (
        context.get(name) for name in ("sample_weight", "train_prior", "target_prior")
    )
    order = np.random.default_rng(0).permutation(
        len(targets) if repeats is None else np.flatnonzero(repeats)
    )
    order = order[:MOST_COMPARED]
    _, first, classes = np.unique(
        targets[order], return_index=True, return_inverse=True
    )
    order = order[
        np.argsort(first[classes], kind="stable")
    ]  # folds are stratified, whatever the order of the classes
    log_p, targets = log_p[order], targets[order]
    fold = (
        np.arange(len(order)) % FOLDS
        if groups is None
        else grouped_folds(targets, groups[order])
    )
    context = context | {"sample_weight": None if repeats is None else repeats[order]}
    held_out = HeldOut(log_p, targets, **context)
    weights = held_out.weights * (
        1.0 if target is None else target[targets] / held_out.prior[targets]
    )
    weights /= weights.sum()
    if target is not None:
        target = np.where(
            np.bincount(targets, minlength=len(target)) > 0, target, 1e-300
        )
    enough = 1 / (weights**2).sum()  # the effective sample size
    tried = [
        name
        for name, needed in samples_needed.items()
        if np.polyval(needed, log_p.shape[1]) <= enough
    ]
    if context.get("training_counts") is None:
        tried = [name for name in tried if name != "prior-corrected-temperature"]
    losses: dict[str, Floats] = {}
    for name in (
        tried if len(tried) > 1 and fold.any() else ()
    ):  # a single fold has no others
        losses[name] = np.empty(len(targets))
        for outside in (fold == k for k in np.unique(fold)):
            part = context | {
                "sample_weight": None if repeats is None else repeats[order][~outside]
            }
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fitted = calibrators[name].fit(
                    log_p[~outside], targets[~outside], **part
                )
            weight, bias = fitted.as_affine()
            scores = mapped(
                (
                    log_p[outside]
                    if fitted.power == 1
                    else raised(log_p[outside], fitted.power)
                ),
                weight,
                bias,
            )
            prior = fitted.prior or carried
            if target is not None and prior is not None:
                scores = scores + np.log(target / np.maximum(prior, 1e-300))
            scores = np.where(held_out.absent | held_out.left_out, NEVER, scores)
            losses[name][outside] = -log_softmax(scores)[
                np.arange(outside.sum()), targets[outside]
            ]
    return losses, weights

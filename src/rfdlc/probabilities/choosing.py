"""How probable each calibrator is the best one, by the cross-validated likelihood of
held-out data.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.probabilities.classes import Indices
from rfdlc.probabilities.fitting import NEVER, HeldOut, mapped, raised
from rfdlc.probabilities.scores import Floats, log_softmax, softmax

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


def chances(
    losses: dict[str, Floats], weights: Floats, repeats: Floats
) -> dict[str, float]:
    """How probable each calibrator is the best one: the mean over resampled samples
    (pseudo-BMA+, Yao et al. 2018).

    The weights of the samples sum to one; each sample counts as often as `repeats`.
    """
    if not losses:
        return {"temperature": 1.0}
    # A Bayesian bootstrap: the sum of as many exponential weights as a sample counts.
    drawn = np.random.default_rng(0).standard_gamma(repeats, (RESAMPLES, len(repeats)))
    drawn *= weights / repeats
    total = np.maximum(drawn.sum(axis=1, keepdims=True), 1e-300)
    means = drawn / total @ np.stack([*losses.values()], axis=1)
    head_start = np.array([HEAD_START * (name == "temperature") for name in losses])
    size = effective_size(weights, repeats)
    mean = softmax(head_start - TRUST * size * means).mean(axis=0)
    kept = np.where(mean >= min(LEAST_WEIGHT, mean.max()), mean, 0)
    return {
        name: float(share)
        for name, share in zip(losses, kept / kept.sum(), strict=True)
        if share
    }


def effective_size(weights: Floats, repeats: Floats) -> float:
    """How many samples of equal weight tell as much as samples with these weights,
    which sum to one, and of which each counts as often as `repeats`.
    """
    return float(1 / (weights**2 / repeats).sum())


def needs_power(
    calibrators: Mapping[str, Any],
    log_p: Floats,
    targets: Indices,
    context: dict[str, Any],
) -> bool:
    """Whether a power with a temperature fits surely better than a temperature: then
    all are fitted to powers.
    """
    compared = cross_validated(calibrators, log_p, targets, context, WITH_POWER)
    return chances(*compared).get("power-temperature", 0.0) > SURE


def for_any_prior(
    shares: dict[str, float],
    targets: Indices,
    classes: int,
    sample_weight: Floats | None = None,
) -> dict[str, float]:
    """Weights without calibrators for which some classes have too few samples: those
    that a uniform prior would need.

    All of them if most of the weight is theirs: the others do not fit the held-out
    data.
    """
    counts = np.bincount(targets, sample_weight, minlength=classes)
    size = classes**2 / (1 / np.maximum(counts, 1)).sum()  # in effect
    scarce = [
        name
        for name in OF_EVERY_CLASS
        if np.polyval(SAMPLES_NEEDED[name], classes) > size
    ]
    kept = {name: share for name, share in shares.items() if name not in scarce}
    kept = shares if 2 * sum(kept.values()) < 1 else kept
    return {name: share / sum(kept.values()) for name, share in kept.items()}


def distinct(
    scores: Floats, targets: Indices, groups: NDArray[Any] | None = None
) -> tuple[Indices, Indices]:
    """Positions of distinct samples, in the order in which they first come, and of
    which of them each sample (N,) is a copy: with equal scores (M, N, C), class and
    group.

    >>> scores = np.array([[[3.0], [2.0], [3.0], [3.0]]])
    >>> first, copy_of = distinct(scores, np.array([0, 0, 0, 1]))
    >>> first.tolist(), copy_of.tolist()
    ([0, 1, 3], [0, 1, 0, 2])
    """
    rows = np.ascontiguousarray(scores.transpose(1, 0, 2)).reshape(len(targets), -1)
    as_bytes = np.dtype((np.void, rows.itemsize * rows.shape[1]))
    _, equal = np.unique(rows.view(as_bytes)[:, 0], return_inverse=True)
    columns = [equal, targets] if groups is None else [equal, targets, groups]
    _, first, number = np.unique(
        np.column_stack(columns), axis=0, return_index=True, return_inverse=True
    )
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return first[order], place[number]


def is_coarse(scores: Floats, targets: Indices) -> bool:
    """Whether samples of several classes have equal scores (M, N, C), as those of a
    tree or of a few neighbours: then equal scores do not mean copies of one sample.

    To hold out all samples of a class that have some score, but not those of another
    class, would bias what is learned of this score.
    """
    of_scores, _ = distinct(scores, np.zeros_like(targets))
    of_both, _ = distinct(scores, targets)
    return len(of_scores) < len(of_both)


def drawn_samples(
    log_p: Floats, targets: Indices, repeats: Floats, groups: NDArray[Any] | None
) -> tuple[Indices, Floats]:
    """Positions of at most MOST_COMPARED samples in random order, and how many each
    counts for; none without a weight.

    A sample is one, whatever its weight: its copies are in one fold. Where scores are
    coarse and nothing is grouped, it is as many others as it counts.
    """
    rng = np.random.default_rng(0)
    if groups is not None or not is_coarse(log_p[None], targets):
        order = rng.permutation(np.flatnonzero(repeats))[:MOST_COMPARED]
        return order, repeats[order]
    parts = np.where(repeats > 0, np.maximum(np.round(repeats), 1), 0).astype(np.int64)
    ends = np.cumsum(parts)
    drawn = rng.choice(ends[-1], min(MOST_COMPARED, ends[-1]), replace=False)
    order = np.searchsorted(ends, drawn, side="right")
    return order, repeats[order] / parts[order]


def stratified_folds(scores: Floats, targets: Indices, folds: int) -> Indices:
    """The fold (N,) of each sample of scores (M, N, C), stratified by class; copies are
    in one, unless scores are coarse.
    """
    first, copy_of = distinct(scores, targets)
    if is_coarse(scores, targets):
        first = copy_of = np.arange(len(targets))
    shuffled = np.random.default_rng(0).random(len(first))
    order = np.lexsort((shuffled, targets[first]))
    fold = np.empty(len(first), dtype=np.int64)
    fold[order] = np.arange(len(first)) % folds
    return fold[copy_of]


def grouped_folds(
    targets: Indices,
    groups: NDArray[Any],
    folds: int = FOLDS,
    sample_weight: Floats | None = None,
) -> Indices:
    """The fold (N,) of each sample: whole groups, the largest first, each where its
    classes are rarest so far.

    There are as many folds as groups if these are few. A sample with weight 2 counts
    as two.

    >>> grouped_folds(np.array([0, 0, 1, 0, 1, 1]), np.array(list("aabbcc"))).tolist()
    [0, 0, 1, 1, 2, 2]
    """
    repeats = np.ones(len(targets)) if sample_weight is None else sample_weight
    _, classes = np.unique(targets, return_inverse=True)
    counts = np.bincount(classes, repeats)
    _, numbers, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    members = np.split(np.argsort(numbers, kind="stable"), np.cumsum(sizes)[:-1])
    weight = np.bincount(numbers, repeats)  # of each group
    filled = np.zeros((min(folds, len(sizes)), len(counts)))  # shares of classes
    fold = np.empty(len(targets), dtype=np.int64)
    for group in np.argsort(-weight, kind="stable"):
        rows = members[group]
        share = np.bincount(classes[rows], repeats[rows], len(counts)) / counts
        fewest = (
            filled @ share + filled.mean(axis=1) * weight[group] / weight.sum()
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
) -> tuple[dict[str, Floats], Floats, Floats]:
    """By calibrator, the negative log-likelihood of each sample, calibrated by the
    other folds; their weights, which sum to one; and how many samples each counts for.

    The likelihood is that of the class prior decided for, if it is known, without
    classes that the held-out data lack. `groups` of the context are in one fold each:
    what was learned from a site would help with its other samples, but not with new
    sites, and the most so for the calibrator with the most parameters.
    """
    groups = context.get("groups")
    carried = context.get("train_prior")
    target = context.get("target_prior")
    repeats = context.get("sample_weight")
    repeats = np.ones(len(targets)) if repeats is None else repeats
    context = {name: own for name, own in context.items() if name != "groups"}
    order, repeats = drawn_samples(log_p, targets, repeats, groups)
    _, first, classes = np.unique(
        targets[order], return_index=True, return_inverse=True
    )
    # Folds are stratified, whatever the order of the classes.
    stratified = np.argsort(first[classes], kind="stable")
    order, repeats = order[stratified], repeats[stratified]
    log_p, targets = log_p[order], targets[order]
    fold = (
        np.arange(len(order)) % FOLDS
        if groups is None
        else grouped_folds(targets, groups[order], sample_weight=repeats)
    )
    context = context | {"sample_weight": repeats}
    held_out = HeldOut(log_p, targets, **context)
    weights = held_out.weights * (
        1.0 if target is None else target[targets] / held_out.prior[targets]
    )
    weights /= weights.sum()
    if target is not None:
        target = np.where(
            np.bincount(targets, minlength=len(target)) > 0, target, 1e-300
        )
    enough = effective_size(weights, repeats)
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
            part = context | {"sample_weight": repeats[~outside]}
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
    return losses, weights, repeats

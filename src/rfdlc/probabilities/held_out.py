"""Warnings about held-out samples: columns in another order, classes without samples,
another mix of classes.
"""

import warnings
from typing import Any

import numpy as np

from rfdlc.errors import listing
from rfdlc.probabilities.classes import Classes, Indices
from rfdlc.probabilities.fitting import not_held_out
from rfdlc.probabilities.priors import Prior, in_words
from rfdlc.probabilities.scores import Floats, Scores, safe_log, softmax

GIVEN_CALIBRATION = (
    ", given the calibration, whose error is not included in the intervals"
)
# Held-out samples of a class: its share is estimated from fewer with a warning.
FEW = 30
ENOUGH = 20  # samples for a warning about the order of columns, or about one class
LIKELY = 0.6  # the balanced accuracy of another order of columns that gets a warning
SURE = 3.0  # standard errors by which that must be better
MOST_SAMPLES = 10_000  # that orders of columns are compared on
MOST_ORDERED = 1000  # classes: orders are compared in cubic time
LEAST_SCORED = 1e-6  # the probability from which on a class is one that the model knows
# Total variation between class frequencies and the prior decided for that gets a
# warning; so does a class that is more or less frequent by that factor and so many
# standard errors.
FAR = 0.2
TIMES = 3.0
ERRORS = 4.0


def warn_of_order(scores: Scores, targets: Indices, classes: Classes) -> None:
    """Warn if an array, whose columns have no names, fits its labels far better with
    them in another order.

    Weights of classes in a training shift the columns of log p. They do not change
    centred columns, if true classes count equally. Half of the samples choose the
    order, and the others judge it: some order fits any few samples.
    """
    if len(targets) < ENOUGH or len(classes) > MOST_ORDERED:
        return
    compared = min(len(targets), MOST_SAMPLES)
    rows = np.linspace(0, len(targets) - 1, compared).astype(int)
    # Sorted by class, so that every other row is half of each class.
    rows = rows[np.argsort(targets[rows], kind="stable")]
    y = targets[rows]
    size = len(classes)
    log_p = safe_log(scores.values[0, rows], scores.logits)
    equal = 1 / np.bincount(y)[y]
    likely = (log_p - equal @ log_p / equal.sum()).argmax(axis=1)
    pairs = likely * size + y
    choosing = np.bincount(pairs[0::2], minlength=size**2).reshape(size, size)
    judging = np.bincount(pairs[1::2], minlength=size**2).reshape(size, size)

    samples = judging.sum(axis=0)
    judged = np.flatnonzero(judging.any(axis=0))
    if len(judged) < 2:
        return
    # Its trace is the balanced accuracy.
    recall = judging / np.maximum(samples, 1) / len(judged)
    as_they_are = float(recall.trace())
    if as_they_are >= 0.5:  # no order is twice as good
        return
    from scipy.optimize import linear_sum_assignment  # takes a while to import

    shares = choosing / np.maximum(choosing.sum(axis=0), 1)
    best = linear_sum_assignment(shares, maximize=True)[1]
    in_order = float(recall[np.arange(size), best].sum())
    # Of their difference, at most.
    error = np.sqrt((1 / samples[judged]).sum()) / len(judged)
    better = as_they_are < in_order / 2 and in_order - as_they_are > SURE * error
    if in_order >= LIKELY and better:
        warnings.warn(
            f"as they are, the columns of the scores are right for {as_they_are:.0%} of"
            f" the samples, in the order {listing(classes.select(best))} for"
            f" {in_order:.0%} (classes count equally, and weights of classes in the"
            " training are allowed for): they must be in the order of the utility, or"
            " give a data frame with the names of classes",
            stacklevel=5,
        )


def warn_of_absent(
    classes: Classes,
    log_p: Floats,
    targets: Indices,
    train_prior: Prior | None,
    target_prior: Prior | None,
    weights: Floats,
) -> None:
    """Warn of classes that scores give a probability, but held-out samples with
    `weights` (N,) do not, nor the prior that they carry.
    """
    counts = np.bincount(targets, weights, minlength=len(classes))
    samples = int(counts.sum())
    carried = np.ones(len(classes)) if train_prior is None else train_prior
    left_out = not_held_out(log_p, counts, weights) & (carried > 0)
    if samples >= ENOUGH and (targets == targets[0]).all():
        warnings.warn(
            f"all {samples:,} held-out samples are of class"
            f" {classes.names[targets[0]]!r}: calibration takes it for nearly certain"
            " in future, too; fit with samples of all classes, or without calibration",
            stacklevel=5,
        )
    elif left_out.any():
        names = listing(map(repr, classes.select(np.flatnonzero(left_out))))
        warnings.warn(
            f"the held-out samples have none of {names}, which the scores give a"
            " probability: calibration learns nothing about it, and leaves its share"
            " about as the model has it; hold out samples of it, take"
            " calibration='temperature' (--calibration temperature), which needs none,"
            " or give its share (target_prior, --target-prior)",
            stacklevel=5,
        )
    absent = (carried == 0) & (counts == 0)
    if target_prior is not None:
        absent &= target_prior > 0
    if absent.any():
        absent &= softmax(log_p).max(axis=0) > LEAST_SCORED
    if absent.any():
        names = listing(classes.select(np.flatnonzero(absent)))
        warnings.warn(
            f"the held-out samples have none of {names}, and the class prior that the"
            " scores carry has no share for it: calibration leaves it out, and its"
            " probability stays about that of the model; hold out samples of it, or"
            " give its share (train_prior; estimator_prior of a UtilityClassifier)",
            stacklevel=5,
        )


def warn_of_few(classes: Classes, joint: Floats) -> None:
    """Warn, where a class prior is estimated, of classes whose probabilities few
    held-out samples have checked.
    """
    samples = joint.sum(axis=0)
    few = np.flatnonzero((samples > 0) & (samples < FEW))
    if len(few):
        counted = listing(f"{samples[c]:.0f} of {classes.names[c]!r}" for c in few)
        warnings.warn(
            "the estimated class prior rests on few held-out samples"
            f" ({counted}): its intervals take calibrated probabilities for right, and"
            f" may be too narrow for these classes; hold out at least {FEW} of each, or"
            " give their shares (target_prior, --target-prior)",
            stacklevel=4,
        )


def prior_warning(
    classes: Classes, targets: Indices, prior: Prior | None, rare: bool
) -> str | None:
    """What to say if the class frequencies of labelled samples are far from the prior
    that is decided for.
    """
    if prior is None:
        return None
    size: Any = max(1, len(targets))
    shares = np.bincount(targets, minlength=len(classes)) / size
    distance = np.abs(shares - prior).sum() / 2
    far = distance >= FAR + 0.5 * np.sqrt(len(classes) / size)
    unlike = np.maximum(shares, prior) >= TIMES * np.minimum(shares, prior)
    variance = np.maximum(prior * (1 - prior), shares * (1 - shares)) / size
    certain = np.abs(shares - prior) > ERRORS * np.sqrt(variance)
    if not far and not (rare and (unlike & certain).any()):
        return None
    return (
        f"the samples have the class frequencies {in_words(classes, shares)}, but"
        f" decisions are made for the class prior {in_words(classes, prior)}: set the"
        " target prior (target_prior, --target-prior) to theirs, if it is that of"
        " future samples; metrics are of the samples as they are"
    )

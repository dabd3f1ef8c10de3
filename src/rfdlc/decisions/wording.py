"""What is said about deciders: errors, warnings, and the class prior that is decided
for.
"""

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rfdlc.errors import listing
from rfdlc.formats.identity import check_same_model
from rfdlc.probabilities.classes import Classes, Indices
from rfdlc.probabilities.fitting import not_held_out
from rfdlc.probabilities.predictions import Predictions
from rfdlc.probabilities.priors import in_words, is_uniform
from rfdlc.probabilities.scores import CORRECTED, Floats, Scores, safe_log, softmax

if TYPE_CHECKING:
    from rfdlc.decisions.decider import Decider

GIVEN = ", given the calibration, whose error is not included in the intervals"
FEW = (
    30  # held-out samples of a class: its share is estimated from fewer with a warning
)
ENOUGH, LIKELY = (
    20,
    0.6,
)  # samples, and the balanced accuracy of another order of columns, that get a warning
SURE = 3.0  # standard errors by which that must be better
LOOKED_AT, MOST_ORDERED = (
    10_000,
    1000,
)  # samples for that, and classes: orders are compared in cubic time
LEAST_SCORED = 1e-6  # the probability from which on a class is one that the model knows
# total variation between class frequencies and the prior decided for that gets a
# warning
FAR = 0.2
TIMES, ERRORS = (
    3.0,
    4.0,
    # so does a class that is more or less frequent by that factor and so many standard
    # errors
)
WEIGHTS = (
    "{} weights for {} particles: expected one per particle, or one particle that"
    " combines them"
)
UPSIDE_DOWN = (
    "every right decision is worth the least of its row: if these are costs, turn them"
    " into a utility (Utility.from_costs; on the command line --costs)"
)
CORRECTED_TWICE = (
    "these probabilities are calibrated and corrected already (their column"
    " rfdlc_scores says so), and a second time would distort them: decide them without"
    " --decider, --calibrate and priors, or write raw ones (rfdlc predict --raw)"
)
OTHER_MODEL = (
    "decide them by the decider of the model that scored them (decider.json of its run"
    " folder), or fit one to its held-out predictions (--calibrate FILE; Decider.fit)"
)
NOT_A_UTILITY = (
    "utility is a {}: expected a Utility, such as Utility.read_csv(file) or"
    " Utility(frame)"
)
IMPOSSIBLE = (
    "the training prior of {} is 0 but its target prior is not: a class without"
    " training samples cannot be corrected for; give it a positive training prior"
)
NOTHING_LEFT = (
    " has all its probability on classes whose target prior is 0, so that nothing is"
    " left to decide from: give these classes a small share"
)
DECIDER_FILE = (
    ": expected a JSON file of `--save-decider`, `Decider.save` or a run folder"
)
NEEDS_SETS = (
    "this decider has no sets: fit them to held-out predictions (Decider.fit_sets;"
    " --sets macro --coverage 0.9 with --calibrate FILE), or answer with sets by"
    " expected utility (sets='u65', --sets u65)"
)
NEEDS_TRAIN_PRIOR = (
    "a target prior needs the training prior (train_prior, --train-prior) that the"
    " scores carry: 'train' for a plainly trained model, 'uniform' after reweighting or"
    " logit adjustment, or numbers; or a calibration with biases, fitted (--calibrate"
    " FILE)"
)
SETS_DROPPED = (
    "{} changed: the sets were fitted to other probabilities and are left out: fit them"
    " again (Decider.fit_sets, --sets with --calibrate FILE)"
)

# standard errors between the share of a budget and the one handed over that get a
# warning
SHARE_ERRORS = 4.0
OFF_SHARE = (
    "{:.3g}% of {:,} samples were handed over, where the budget ({}) is {:.3g}%: it"
    " goes by a price of held-out samples, which score unlike these; decide all samples"
    " as one batch (`rfdlc decide FILE --budget SHARE`), find the price on recent"
    " samples (--calibrate FILE, fit_budget), or keep to the share in a stream"
    " (StreamController)"
)

ONE_CLASS = (
    "calibration takes it for nearly certain in future, too; fit with samples of all"
    " classes, or without calibration"
)
NOT_HELD_OUT = (
    "the held-out samples have none of {}, which the scores give a probability:"
    " calibration learns nothing about it, and leaves its share about as the model has"
    " it; hold out samples of it, take calibration='temperature' (--calibration"
    " temperature), which needs none, or give its share (target_prior, --target-prior)"
)
FEW_HELD_OUT = (
    "the estimated class prior rests on few held-out samples ({}): its intervals take"
    " calibrated probabilities for right, and may be too narrow for these classes; hold"
    " out at least {} of each, or give their shares (target_prior, --target-prior)"
)
ABSENT = (
    "the held-out samples have none of {}, and the class prior that the scores carry"
    " has no share for it: calibration leaves it out, and its probability stays about"
    " that of the model; hold out samples of it, or give its share (train_prior;"
    " estimator_prior of a UtilityClassifier)"
)


def check_model(decider: "Decider", scores: Scores, file: str) -> None:
    """Raise for scores of another model than the decider's; warn where scores of a
    file, or the decider that was fitted for them, do not say of which they are.
    """
    fitted = decider.model or decider.fitted is not None
    if not fitted or not (file or (decider.model and scores.model)):
        return
    check_same_model(
        f"{file or 'scores'}", scores.model, "the decider", decider.model, OTHER_MODEL
    )


def decided_for(decider: "Decider") -> str:
    """The prior that is decided for, in words."""
    classes, target = decider.utility.classes, decider.target_prior
    if target is None:
        return "decided for the class prior that the scores carry"
    if decider.estimate is not None:
        shares = in_words(classes, target, decider.estimate.interval())
        return (
            "decided for the estimated class prior"
            f" {shares}{'' if _temperature_alone(decider) else GIVEN}"
        )
    if is_uniform(target):
        return "decided for a uniform class prior"
    natural = classes.counts is not None and np.abs(target - classes.prior).max() < 1e-9
    return (
        "decided for the class prior"
        f" {'of the training data' if natural else in_words(classes, target)}"
    )


def _temperature_alone(decider: "Decider") -> bool:
    """Whether intervals of estimates include the error of the calibration: they do that
    of a temperature.
    """
    fitted = decider.fitted
    if fitted is None:
        return True
    weight, bias = fitted.as_affine()
    return np.ndim(weight) == 0 and not np.any(bias) and fitted.power == 1


def left_open(decider: "Decider", scores: Any) -> str:
    """Words that follow `decided_for`: the prior of corrected scores, or what an
    estimated one leaves open.
    """
    if isinstance(scores, Predictions) and str(scores.scores.corrected).startswith(
        CORRECTED
    ):
        return f": {scores.scores.corrected}"
    ends = (
        None
        if decider.estimate is None
        else decider.utility_interval(scores, decider.estimate)
    )
    if ends is None:
        return ""
    what, low, high = (
        ("cost", 0.0 - ends[1], 0.0 - ends[0])
        if decider.utility.has_costs
        else ("utility", *ends)
    )
    return f": a mean expected {what} from {low:.3g} to {high:.3g} (95% interval)"


def warn_of_order(
    given: Any, scores: Scores, targets: Indices, classes: Classes
) -> None:
    """Warn if an array, whose columns have no names, fits its labels far better with
    them in another order.

    Weights of classes in a training shift the columns of log p. They do not change
    centred columns, if true classes count equally. Half of the samples choose the
    order, and the others judge it: some order fits any few samples.
    """
    named = isinstance(given, Predictions) or hasattr(given, "columns")
    if named or len(targets) < ENOUGH or len(classes) > MOST_ORDERED:
        return
    rows = np.linspace(0, len(targets) - 1, min(len(targets), LOOKED_AT)).astype(int)
    rows = rows[
        np.argsort(targets[rows], kind="stable")
    ]  # so that every other row is half of each class
    y, log_p, size = (
        targets[rows],
        safe_log(scores.values[0, rows], scores.logits),
        len(classes),
    )
    equal = 1 / np.bincount(y)[y]
    likely = (log_p - equal @ log_p / equal.sum()).argmax(axis=1)
    pairs = likely * size + y
    choosing, judging = (
        np.bincount(pairs[i::2], minlength=size**2).reshape(size, size) for i in (0, 1)
    )
    samples, judged = judging.sum(axis=0), np.flatnonzero(judging.any(axis=0))
    recall = (
        judging / np.maximum(samples, 1) / len(judged)
    )  # its trace is the balanced accuracy
    if (
        len(judged) < 2 or (own := float(recall.trace())) >= 0.5
    ):  # no order is twice as good
        return
    from scipy.optimize import linear_sum_assignment  # takes a while to import

    best = linear_sum_assignment(
        choosing / np.maximum(choosing.sum(axis=0), 1), maximize=True
    )[1]
    other = float(recall[np.arange(size), best].sum())
    error = np.sqrt((1 / samples[judged]).sum()) / len(
        judged
    )  # of their difference, at most
    if other >= LIKELY and own < other / 2 and other - own > SURE * error:
        warnings.warn(
            f"as they are, the columns of the scores are right for {own:.0%} of the"
            f" samples, in the order {listing(classes.select(best))} for {other:.0%}"
            " (classes count equally, and weights of classes in the training are"
            " allowed for): they must be in the order of the utility, or give a data"
            " frame with the names of classes",
            stacklevel=4,
        )


def warn_of_absent(
    decider: "Decider",
    log_p: Floats,
    targets: Indices,
    sample_weight: Floats | None = None,
) -> None:
    """Warn of classes that scores give a probability, but held-out samples do not, nor
    the prior that they carry.
    """
    if decider.calibration in (None, "none"):
        return
    classes = decider.utility.classes
    counts = np.bincount(targets, sample_weight, minlength=len(classes))
    samples = int(counts.sum())
    carried = (
        np.ones(len(classes)) if decider.train_prior is None else decider.train_prior
    )
    if samples >= ENOUGH and (targets == targets[0]).all():
        only = classes.names[targets[0]]
        warnings.warn(
            f"all {samples:,} held-out samples are of class {only!r}: {ONE_CLASS}",
            stacklevel=3,
        )
    elif (left_out := not_held_out(log_p, counts, sample_weight) & (carried > 0)).any():
        told = NOT_HELD_OUT.format(
            listing(map(repr, classes.select(np.flatnonzero(left_out))))
        )
        warnings.warn(told, stacklevel=3)
    absent = (
        (carried == 0)
        & (counts == 0)
        & (decider.target_prior is None or decider.target_prior > 0)
    )
    if (
        absent.any()
        and (absent := absent & (softmax(log_p).max(axis=0) > LEAST_SCORED)).any()
    ):
        warnings.warn(
            ABSENT.format(listing(classes.select(np.flatnonzero(absent)))), stacklevel=3
        )


def warn_of_few(decider: "Decider") -> None:
    """Warn, where a class prior is estimated, of classes whose probabilities few
    held-out samples have checked.
    """
    held = np.zeros(0) if decider.joint is None else decider.joint.sum(axis=0)
    few = np.flatnonzero((held > 0) & (held < FEW))
    if len(few):
        names = decider.utility.classes.names
        warnings.warn(
            FEW_HELD_OUT.format(
                listing(f"{held[c]:.0f} of {names[c]!r}" for c in few), FEW
            ),
            stacklevel=3,
        )


def warn_of_share(decider: "Decider", counts: Mapping[str, int]) -> None:
    """Warn if prices handed over a share further from that of the budget than chance
    explains, by counts of actions.

    Fewer hand-overs are no reason for it at a price of 0: no other sample was worth
    handing over. Unfamiliar samples come beside the budget, so that nothing is known
    with them.
    """
    budget, samples = decider.budget, sum(counts.values())
    if budget is None or decider.unfamiliar is not None or not samples:
        return
    for name, handed in budget.handed_over(counts, decider.utility).items():
        share = budget.shares[name]
        error = np.sqrt(
            share * (1 - share) * (1 / samples + 1 / (budget.samples or samples))
        )
        gap = handed - share if budget.prices[name] > 0 else max(0.0, handed - share)
        if abs(gap) > SHARE_ERRORS * error + 1 / samples:
            warnings.warn(
                OFF_SHARE.format(100 * handed, samples, name, 100 * share), stacklevel=3
            )


def prior_warning(decider: "Decider", targets: Indices, rare: bool) -> str | None:
    """What to say if the class frequencies of labelled samples are far from the prior
    that is decided for.
    """
    classes, size, prior = (
        decider.utility.classes,
        max(1, len(targets)),
        decider.decided_prior,
    )
    found = np.bincount(targets, minlength=len(classes)) / size
    if prior is None:
        return None
    far = np.abs(found - prior).sum() / 2 >= FAR + 0.5 * np.sqrt(len(classes) / size)
    unlike = np.maximum(found, prior) >= TIMES * np.minimum(found, prior)
    error = np.sqrt(np.maximum(prior * (1 - prior), found * (1 - found)) / size)
    if not far and not (
        rare and (unlike & (np.abs(found - prior) > ERRORS * error)).any()
    ):
        return None
    return (
        f"the samples have the class frequencies {in_words(classes, found)}, but"
        f" decisions are made for the class prior {in_words(classes, prior)}: set the"
        " target prior (target_prior, --target-prior) to theirs, if it is that of"
        " future samples; metrics are of the samples as they are"
    )

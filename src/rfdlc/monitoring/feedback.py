"""Labels that come later: realised utility from what was reviewed, and deciders
calibrated again from it.
"""

import hashlib
import json
import warnings
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.special import ndtri

from rfdlc.decisions import budgets
from rfdlc.decisions.decider import Decider
from rfdlc.decisions.utility import Utility
from rfdlc.errors import counted, expect
from rfdlc.evaluation.metrics import worth_in_words
from rfdlc.evaluation.outcomes import without_rounding
from rfdlc.formats.identity import check_same_model
from rfdlc.monitoring.designs import Sample
from rfdlc.monitoring.evidence import UNSURE
from rfdlc.monitoring.monitor import LEVELS, OUTCOMES, Decided, Reference
from rfdlc.probabilities.calibrators import (
    CALIBRATORS,
    Calibrator,
    MatrixScaling,
    NoCalibration,
)
from rfdlc.probabilities.choosing import SAMPLES_NEEDED
from rfdlc.probabilities.classes import Indices
from rfdlc.probabilities.model import corrected
from rfdlc.probabilities.priors import Prior, estimate_prior
from rfdlc.probabilities.scores import Floats, safe_log, softmax
from rfdlc.statistics import intervals
from rfdlc.statistics.intervals import LEVEL, STRICT, Interval, bounded_mean, distances

FOLDS, FEWEST = 5, 50  # labels below which nothing is advised
TINY = 1e-300


@dataclass(frozen=True)
class Realised:
    """The mean utility of all decisions, from those that have labels."""

    utility: float
    interval: (
        Interval | None
    )  # about decisions without a label; None of fewer labels than an interval needs
    promised: float  # the mean expected utility of the same decisions
    # promised minus realised utility of labelled decisions, with their weights
    utility_gap: float
    utility_gap_interval: Interval | None  # about other outcomes of such decisions
    labelled: int
    decisions: int
    covered: float  # share of the decisions that are like some labelled one
    has_costs: bool = False  # words show the utility as costs
    design: str = ""  # that chose the labelled decisions
    left_out: int = 0  # labels that this design did not choose

    @property
    def words(self) -> str:
        """The mean and its interval."""
        return f"realised {self.worth} {self.shown(self.utility)} ({self.ends})"

    @property
    def chosen(self) -> str:
        """How many labels there are, and what chose their decisions, in words."""
        text = f"{counted(self.labelled, 'label')} ({self.design})"
        if self.left_out:
            text += f", {self.left_out:,} more left out, which this did not choose"
        return text

    @property
    def worth(self) -> str:
        """What the numbers are called in words."""
        return "cost" if self.has_costs else "utility"

    def shown(self, *ends: float) -> str:
        """A utility, or both ends of its interval, in words."""
        return worth_in_words(self.has_costs, *ends)

    @property
    def ends(self) -> str:
        """The interval in words, and what it is about."""
        if self.labelled == self.decisions:
            return "every decision has a label"
        over = f"over all {self.decisions:,} decisions"
        return (
            f"{self.shown(*self.interval)} {over}"
            if self.interval
            else "too few labels for an interval"
        )

    @property
    def broken(self) -> bool:
        """Whether outcomes differ from what was promised by more than chance explains
        (two-sided, 5%).
        """
        ends = self.utility_gap_interval
        return ends is not None and not ends[0] <= 0 <= ends[1]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, as the server and `rfdlc recalibrate` give them."""
        costs = (
            {"realised_cost": 0.0 - self.utility, "promised_cost": 0.0 - self.promised}
            if self.has_costs
            else {}
        )
        return costs | {
            "realised_utility": self.utility,
            "interval": self.interval,
            "promised_utility": self.promised,
            "utility_gap": self.utility_gap,
            "utility_gap_interval": self.utility_gap_interval,
            "labels": self.labelled,
            "labelled": self.design,
            "labels_left_out": self.left_out,
            "decisions": self.decisions,
        }

    @property
    def promise(self) -> str:
        """Whether decisions were worth what their probabilities promised, in words."""
        if self.utility_gap_interval is None:
            return (
                "too few labels to tell whether decisions are worth what they promise"
            )
        gap, ends = self.shown(self.utility_gap), self.shown(*self.utility_gap_interval)
        said = f"promised minus realised {self.worth} {gap} ({ends})"
        if not self.broken:
            return f"{said}: the promise is met, as far as these labels tell"
        return (
            f"{said}: decisions are worth {'less' if self.utility_gap > 0 else 'more'}"
            " than promised"
        )


def review_weights(group: Indices, rows: Indices, propensity: Any = None) -> Floats:
    """Inverse propensities (n,) of labelled rows: given ones, or the share of each
    stratum that has labels.
    """
    if propensity is not None:
        given = np.asarray(propensity, dtype=np.float64)
        right = given.shape == (len(rows),) and bool(
            (given > 0).all() and (given <= 1).all()
        )
        expect(
            right,
            "propensity: expected a probability above 0 and at most 1 for every label",
        )
        return 1 / given
    return (
        np.bincount(group)
        / np.maximum(np.bincount(group[rows], minlength=group.max() + 1), 1)
    )[group[rows]]


def realised_by(
    sample: Sample, utility: Utility, actions: Indices, expected: Floats
) -> Realised:
    """The mean utility of the decisions that a checked sample of labels stands for.

    `actions` and `expected` are those of all decisions, in the order of time.
    """
    size = sample.decisions
    found = realised_utility(
        utility,
        sample.targets,
        actions[:size],
        expected[:size],
        sample.group,
        sample.rows,
        sample.propensity,
    )
    return replace(found, design=str(sample.design), left_out=sample.left_out)


def realised_utility(
    utility: Utility,
    targets: Indices,
    actions: Indices,
    expected: Floats,
    group: Indices,
    rows: Indices,
    propensity: Any = None,
) -> Realised:
    """The mean utility with its 95% interval, from the classes (n,) of labelled rows
    among N decisions.

    `actions`, `expected` and `group` (N,) are actions, expected utilities and strata of
    all decisions. The interval is that of a mean of skewed values
    (`intervals.distances`), where a costly mistake may not have been labelled yet. It
    is about these N decisions: without noise once all have labels. Promises are tested
    by the gap.
    """
    values = utility.matrix[targets, actions[rows]]
    weights, own = review_weights(group, rows, propensity), group[rows]
    whole = float(weights.sum())
    mean = float(weights @ values / whole)
    labelled, total = np.bincount(own, minlength=group.max() + 1), np.bincount(group)
    if (
        propensity is None
    ):  # each stratum has the weight that it should have: what varies is inside of it
        middle, several = (
            np.bincount(own, values, len(total)) / np.maximum(labelled, 1),
            labelled[own] > 1,
        )
        scale = np.sqrt(labelled[own] / np.maximum(labelled[own] - 1, 1))
        away, unseen = (
            np.where(several, scale * (values - middle[own]), values - mean),
            1 - labelled[own] / total[own],
        )
    else:
        away, unseen = values - mean, 1 - np.asarray(propensity, dtype=np.float64)
    another = (
        float(np.sqrt(unseen.mean()) * (weights @ weights)) / whole**2
    )  # what one more sample weighs
    low, high = float(utility.matrix.min()), float(utility.matrix.max())
    ends = max(0.0, mean - low) * another, max(0.0, high - mean) * another
    below, above = distances(
        np.asarray(weights * np.sqrt(unseen) * away / whole, dtype=np.float64), *ends
    )
    known = labelled[group] > 0
    promised = float(expected[known].mean() if propensity is None else expected.mean())
    gap, gap_ends = _gap(utility, values, actions[rows], expected[rows], weights)
    few = len(rows) < intervals.FEWEST
    interval = None if few else (max(low, mean - below), min(high, mean + above))
    shares = len(rows), len(group), float(known.mean()), utility.has_costs
    return Realised(mean, interval, promised, gap, None if few else gap_ends, *shares)


def _gap(
    utility: Utility,
    values: Floats,
    actions: Indices,
    expected: Floats,
    weights: Floats,
    level: float = LEVEL,
) -> tuple[float, Interval]:
    """Promised minus realised utility (`utility_gap` of `evaluate`), weighted.

    Given the scores, outcomes of a calibrated model have the promised mean: their own
    noise is all that counts, also if every decision has a label. The interval is that
    of `evaluate` with strict bounds: advice must not follow from a few rare mistakes
    that did not happen.
    """
    gaps, used = (
        without_rounding(expected - values, utility),
        utility.matrix[:, np.unique(actions)],
    )
    promised = float(weights @ (values + gaps) / weights.sum())
    ends = promised - float(used.max()), promised - float(used.min())
    return bounded_mean(gaps, weights, ends, level=level, more=STRICT)


@dataclass(frozen=True)
class OutcomeCheck:
    """Labels of consecutive decisions beside what these promised."""

    first: int
    decisions: int
    labelled: int
    utility_gap: float | None  # promised minus realised; None of too few labels
    interval: Interval | None  # at the level of the alarm
    differs: bool  # from held-out data, by more than chance explains


def check_outcomes(
    reference: Reference,
    decisions: Decided,
    sample: Sample,
    first: int,
    last: int,
    per_month: int,
) -> OutcomeCheck:
    """Whether labels of the decisions from `first` to before `last` keep the promise as
    well as held-out data did.

    Windows of a month and all their decisions together give a false alarm with a
    probability of at most `LEVELS[OUTCOMES]`, half of it each.
    """
    inside = (sample.rows >= first) & (sample.rows < last)
    labelled = int(inside.sum())
    if labelled < intervals.FEWEST:
        return OutcomeCheck(first, last - first, labelled, None, None, False)
    rows = sample.rows[inside]
    weights = review_weights(sample.group, sample.rows, sample.propensity)[inside]
    actions = decisions.actions[rows]
    values = decisions.utility.matrix[sample.targets[inside], actions]
    false_alarms = LEVELS[OUTCOMES] / 2 / max(1.0, per_month / (last - first))
    gap, (low, high) = _gap(
        decisions.utility,
        values,
        actions,
        decisions.expected[rows],
        weights,
        1 - false_alarms,
    )
    unsure = -float(ndtri(UNSURE)) * reference.promise_error(reference.prior)
    promised = reference.broken_promise
    differs = low > promised + unsure or high < promised - unsure
    return OutcomeCheck(first, last - first, labelled, gap, (low, high), differs)


def decider_version(decider: Decider) -> str:
    """A short name of everything that a decider decides by.

    >>> from rfdlc import Utility
    >>> decider = Decider(Utility.one_hot(2))
    >>> decider_version(decider) == decider_version(
    ...     Decider.from_dict(decider.to_dict())
    ... )
    True
    """
    return _version(decider)


@lru_cache(maxsize=64)
def _version(decider: Decider) -> str:
    table = decider.to_dict()
    for name in ("joint", "calibrated_on"):  # how it was fitted
        del table["model"][name]
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:12]


def on_top(old: Decider, new: Decider) -> tuple[float, Floats]:
    """(a, b) with log p_new = a log p_old + b up to a constant, for corrected
    probabilities of two deciders.

    Raises
    ------
    InputError
        If the calibrators differ by more than a temperature and biases, or the deciders
        combine particles differently or have other thresholds for unfamiliar input.
    """
    check_same_model(
        "this decider",
        new.model.source,
        "the one served",
        old.model.source,
        "recalibrate the decider that is served, or serve its model again",
    )
    W, b, power = _affine(old)
    W_new, b_new, power_new = _affine(new)
    same = (
        old.model.combine == new.model.combine
        and np.array_equal(old.model.weights, new.model.weights)
        and power == power_new
        # the model's own process applies these thresholds
        and old.deferral.unfamiliar == new.deferral.unfamiliar
    )
    fits = same and np.shape(W) == np.shape(W_new)
    scale = float(np.sum(W_new) / np.sum(W)) if fits and np.sum(W) else np.nan
    fits = (
        fits
        and bool(np.allclose(scale * np.asarray(W), W_new, rtol=1e-6, atol=1e-12))
        and scale > 0
    )
    names = old.utility.classes.names == new.utility.classes.names
    expect(
        fits and names,
        "this decider was not recalibrated from the one that is served: serve its model"
        " again",
    )
    return scale, b_new - scale * b


def _affine(decider: Decider) -> tuple[Any, Floats, float]:
    """W, b and the power of corrected probabilities, softmax(W log p + b)."""
    calibrator = decider.model.calibrator or NoCalibration()
    weight, bias = calibrator.as_affine()
    bias = np.asarray(bias) + np.zeros(len(decider.utility.classes))
    ratio = decider.model.ratio
    if ratio is not None:
        bias = np.log(np.maximum(ratio, TINY)) + bias
    return weight, bias, calibrator.power


def revised(p: Floats, scale: float, bias: Floats) -> Floats:
    """Probabilities (N, C) of a recalibrated decider, from those of the old one."""
    return softmax(scale * safe_log(np.asarray(p, dtype=np.float64)) + bias).astype(
        p.dtype
    )


@dataclass(frozen=True, eq=False)
class Revision:
    """A way to decide from now on, and what it gains per sample: a cross-fitted
    difference with its interval.

    Intervals are 95% ones of all options together.
    """

    name: str
    decider: Decider
    gain: float
    interval: Interval

    @property
    def pays(self) -> bool:
        """Whether the whole interval is above 0. Without a gain, some option pays in
        about 2.5% of cases at most.
        """
        return self.interval[0] > 0


def options(
    decider: Decider,
    decisions: Decided,
    rows: Indices,
    targets: Indices,
    weights: Floats,
) -> list[Revision]:
    """What a new prior, a recalibration, or both would gain, the best first.

    `decisions` are all that were logged, `rows` (n,) those with labels `targets`, and
    `weights` their inverse propensities. The new prior is estimated from all of them
    without labels; so are the prices of a budget.
    """
    expect(
        len(rows) >= FEWEST,
        f"{len(rows)} labels of logged decisions: expected at least {FEWEST} to learn"
        " from",
    )
    served = _served_prior(decider, targets, weights)
    p = decisions.probabilities
    new = estimate_prior(p, np.maximum(served, 1e-12)).prior * (
        served > 0
    )  # what has no probability stays so
    new /= new.sum()
    labelled, mine, strange = (
        p[rows],
        decisions.actions[rows],
        decisions.unfamiliar[rows],
    )
    fold = np.random.default_rng(0).permutation(len(rows)) % FOLDS
    outside = [fold != k for k in (*range(FOLDS), FOLDS)]  # the last one: all
    fits = [
        _calibrator(labelled[each], targets[each], weights[each], served)
        for each in outside
    ]
    found, none = [], [None] * (FOLDS + 1)
    ways = ("prior", none, new), ("calibration", fits, served), ("both", fits, new)
    for name, calibrators, prior in ways:
        chosen, (*each_own, final), priced = (
            np.empty(len(rows), dtype=np.int64),
            calibrators,
            decider,
        )
        if decider.deferral.budget is not None:
            budget = budgets.priced(
                decider.utility,
                _decided(p, final, served, prior),
                np.ones(len(p)),
                decider.deferral.budget.shares,
                decisions.unfamiliar,
            )
            priced = decider.replace(budget=budget)
        for k, own in enumerate(each_own):
            chosen[fold == k] = priced.decide_probabilities(
                _decided(labelled[fold == k], own, served, prior)
            )
        chosen[strange] = mine[strange]  # handed over in any case
        gained = _gain(decider.utility, targets, mine, chosen, weights, len(ways))
        found.append(Revision(name, _composed(priced, final, served, prior), *gained))
    return sorted(found, key=lambda option: -option.gain)


def _gain(
    utility: Utility,
    targets: Indices,
    old: Indices,
    new: Indices,
    weights: Floats,
    tried: int,
) -> tuple[float, Interval]:
    """The mean gain of new actions, with an interval at the level of all options tried
    together (Bonferroni).

    Few decisions change, and gains are skewed. What a changed decision may gain or lose
    at most is added, so that a costly mistake counts before its class was seen.
    """
    U, (before, after) = utility.matrix, np.unique([old, new], axis=1)
    possible = U[:, after] - U[:, before]
    ends = min(0.0, float(possible.min())), max(0.0, float(possible.max()))
    level = 1 - (1 - LEVEL) / tried
    return bounded_mean(
        U[targets, new] - U[targets, old], weights, ends, level=level, more=STRICT
    )


def _served_prior(decider: Decider, targets: Indices, weights: Floats) -> Prior:
    if decider.model.decided_prior is not None:
        return decider.model.decided_prior
    return np.bincount(targets, weights, len(decider.utility.classes)) / weights.sum()


def _calibrator(
    p: Floats, targets: Indices, weights: Floats, served: Prior
) -> Calibrator:
    """A temperature, with biases where there are labels enough for them; both scale log
    p by one number.
    """
    name = "bias-corrected-temperature"
    effective = float(weights.sum() ** 2 / (weights @ weights))
    name = (
        name
        if effective >= np.polyval(SAMPLES_NEEDED[name], len(served))
        else "temperature"
    )
    repeats = (
        weights * effective / weights.sum()
    )  # as much as the labels tell, not more
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CALIBRATORS[name].fit(
            safe_log(p), targets, sample_weight=repeats, train_prior=served
        )


def _decided(p: Floats, own: Calibrator | None, served: Prior, prior: Prior) -> Floats:
    carried = served if own is None or own.prior is None else np.array(own.prior)
    return corrected(
        p if own is None else own.apply(safe_log(p)), prior / np.maximum(carried, TINY)
    )


def _composed(
    decider: Decider, own: Calibrator | None, served: Prior, prior: Prior
) -> Decider:
    """The calibrator on top of the served probabilities, as one map of the scores."""
    weight, bias, power = _affine(decider)
    scale, shift = (1.0, 0.0) if own is None else own.as_affine()
    carried = served if own is None or own.prior is None else np.array(own.prior)
    fitted = MatrixScaling(
        weight * scale, bias * scale + shift, tuple(carried.tolist()), power
    )
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # sets of coverage are left out: they promise nothing for other probabilities
        changes: dict[str, Any] = {
            "calibrator": fitted,
            "target_prior": prior,
            "budget": decider.deferral.budget,
            "joint": None,
        }
        return decider.replace(**changes, calibrated_on=None)

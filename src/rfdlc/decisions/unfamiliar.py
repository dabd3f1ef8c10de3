"""Unfamiliar input: samples that are far from all that was trained on, whatever class
is the most probable.

A score (larger is less familiar) from logits or probabilities (`energy`,
`predictive_entropy`), from features (`FeatureDistance`), or the sum of two, and
thresholds with a stated false-alarm rate on held-out samples, the same for samples that
are seen as what they are in head and tail.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rfdlc.decisions.rules import UNFAMILIAR, largest
from rfdlc.decisions.utility import Utility
from rfdlc.errors import InputError, expect
from rfdlc.probabilities.classes import Classes, Indices, as_array
from rfdlc.probabilities.model import Probabilities, ProbabilityModel
from rfdlc.probabilities.priors import Prior
from rfdlc.probabilities.scores import Floats, Scores
from rfdlc.probabilities.uncertainty import entropy, particle_probabilities
from rfdlc.statistics.ranking import roc_area

EVERYWHERE = "all"  # the region of all classes where training counts are not known
# of covariances to a multiple of the identity: chosen on left-out classes,
# docs/deferral.md
SHRINKAGE = 0.25
SHARED = 20  # what all held-out samples together count in every region, as samples
LEFT_OUT, LOOKED_AT = (
    20,
    5_000,
)  # classes and held-out samples by which it is decided whether the energy counts
NORMALISED = 1e-3  # below it, energies are what rounding leaves of 0
AUTO = "auto"


@dataclass(frozen=True)
class Unfamiliar:
    """Thresholds of a score by region of the class that a sample looks like, and what
    they do to held-out samples.

    It is the most probable class if all were equally frequent. For a prior that favours
    frequent classes, many rare samples would count as head: the threshold would be too
    low for them, and would change with the prior.

    Parameters
    ----------
    false_alarm : float
        The share of familiar samples that may be called unfamiliar.
    thresholds : dict
        By region: `head`, `med`, `tail`; or `all`, if training counts are not known.
    rates : dict
        Share of held-out samples above the thresholds, by region of the true class,
        classes counting equally.
    kind : str
        What the score is: `energy` and `entropy` are computed from scores, `given`
        comes with the predictions; or the sum of two, such as `energy + entropy`.
    scales : dict
        What each term of a sum is divided by: its standard deviation on held-out
        samples; `given` has the weight of all other terms together.
    """

    false_alarm: float
    thresholds: dict[str, float]
    rates: dict[str, float]
    kind: str = "energy"
    scales: dict[str, float] = field(default_factory=dict)

    @classmethod
    def fit(
        cls,
        score: ArrayLike,
        likeliest: Indices,
        targets: Indices,
        classes: Classes,
        *,
        false_alarm: float = 0.05,
        kind: str = "energy",
        scales: Mapping[str, float] | None = None,
    ) -> "Unfamiliar":
        """From held-out scores (N,), most probable classes and true classes.

        The threshold of a region is exceeded by the same share of each region's own
        samples: those of its classes that look like them. The share is such that all
        samples exceed theirs at the rate. Samples of other regions do not count: rare
        ones that are mistaken for frequent ones would raise the threshold of the head,
        and frequent ones that look rare, which are the doubtful ones, that of the tail.
        New classes would hide below it.

        Raises
        ------
        InputError
            If the rate is not between 0 and 1, or there are too few samples for it.
        """
        expect(
            0 < false_alarm < 1,
            f"false_alarm is {false_alarm}: expected a share between 0 and 1, such as"
            " 0.05",
        )
        values, needed = (
            np.asarray(score, dtype=np.float64),
            int(np.ceil(1 / false_alarm)),
        )
        few = (
            f"{len(values)} held-out samples cannot show a false-alarm rate of"
            f" {false_alarm:g}"
        )
        expect(
            len(values) >= needed,
            f"{few}: expected at least {needed}, or a higher rate",
        )
        places, shares, order = (
            _regions(classes),
            np.empty(len(values)),
            np.argsort(values, kind="stable"),
        )
        seen, true = (
            {name: np.isin(each, own) for name, own in places.items()}
            for each in (likeliest, targets)
        )
        counted = {
            name: (seen[name] & true[name]) + SHARED / len(values) for name in places
        }
        for (
            name,
            weights,
        ) in (
            counted.items()
        ):  # the share of a region's weight that is not above each sample
            last = np.searchsorted(values[order], values[seen[name]], side="right") - 1
            shares[seen[name]] = (np.cumsum(weights[order]) / weights.sum())[last]
        level = _promised(shares, false_alarm)
        thresholds = {
            name: quantile(values, weights, level) for name, weights in counted.items()
        }
        found = cls(false_alarm, thresholds, {}, kind, dict(scales or {}))
        above, weights = (
            found.above(values, likeliest, classes),
            1 / np.bincount(targets)[targets],
        )
        each = {
            name: np.average(above[own], weights=weights[own])
            for name, own in true.items()
            if own.any()
        }
        return replace(found, rates={name: float(rate) for name, rate in each.items()})

    def above(
        self, score: Floats, likeliest: Indices, classes: Classes
    ) -> NDArray[np.bool_]:
        """Which samples are unfamiliar."""
        return np.asarray(score) > self.limits(classes)[likeliest]

    def limits(self, classes: Classes) -> NDArray[np.float64]:
        """The threshold by most probable class (C,)."""
        limits = np.full(len(classes), np.inf)
        everywhere = {
            EVERYWHERE: np.arange(len(classes))
        }  # thresholds that were found without training counts
        for name, members in (
            everywhere if EVERYWHERE in self.thresholds else _regions(classes)
        ).items():
            limits[members] = self.thresholds[name]
        return limits

    @property
    def terms(self) -> dict[str, float]:
        """By name, what each term of the score is divided by."""
        return {name: self.scales.get(name, 1.0) for name in self.kind.split(PLUS)}

    def score(self, scores: Scores) -> Floats:
        """The score (N,) of samples, larger for less familiar."""
        return np.sum(
            [TERMS[name](scores) / scale for name, scale in self.terms.items()], axis=0
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain tables, ready for JSON."""
        return asdict(self)


def energy(scores: Scores) -> NDArray[np.float64]:
    """-log sum_c exp(logit_c), the mean over particles (N,) (Liu et al. 2020); larger
    is less familiar.
    """
    expect(
        scores.logits,
        "energy needs logits, but these are probabilities: give logits, or scores of"
        " your own",
    )
    top = scores.values.max(axis=2)
    total = np.exp(scores.values - top[..., None]).sum(axis=2)
    mean: NDArray[np.float64] = -(np.log(total) + top).mean(axis=0, dtype=np.float64)
    return mean


def predictive_entropy(scores: Scores) -> NDArray[np.float64]:
    """Entropy of the mean probability over particles (N,), as they are, not
    calibrated.
    """
    pieces = (
        particle_probabilities(values, scores.logits).mean(axis=0)
        for _, values in scores.chunks()
    )
    return np.concatenate([entropy(p) for p in pieces]).astype(np.float64)


def _given(scores: Scores) -> Floats:
    if scores.unfamiliarity is None:
        raise InputError(
            "these predictions have no 'unfamiliarity', on which the decider was"
            " fitted: add it"
        )
    return scores.unfamiliarity


PLUS, GIVEN = " + ", "given"
TERMS: dict[str, Callable[[Scores], Floats]] = {
    "energy": energy,
    "entropy": predictive_entropy,
    GIVEN: _given,
}


@dataclass(frozen=True)
class FeatureDistance:
    """How far features are from those of every class: a relative Mahalanobis distance
    of features of unit length.

    min_c [d_c(x) - s / (2 n_c)] - d_0(x), where d_c is the squared Mahalanobis distance
    from the mean of class c with the covariance within classes, s its mean over
    training samples, and d_0 the distance from the mean of all with the covariance of
    all (Ren et al. 2021). The mean of n_c samples is uncertain, too, which adds s / n_c
    to the distance of new samples: without the correction, those of rare classes would
    look far away.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> y = rng.integers(0, 3, 300)
    >>> distance = FeatureDistance.fit(
    ...     rng.normal(size=(300, 8)) + 9 * np.eye(3, 8)[y], y
    ... )
    >>> near, far = distance(rng.normal(size=(2, 8)) + 9 * np.eye(8)[[0, 7]])
    >>> bool(near < far)
    True
    """

    means: NDArray[np.float64]  # (C, F), in whitened coordinates within classes
    within: NDArray[np.float64]  # (F, F): features @ within are white within classes
    centre: NDArray[np.float64]  # (F,) in whitened coordinates of all
    overall: NDArray[np.float64]  # (F, F)
    excess: NDArray[np.float64]  # (C,) s / (2 n_c)

    @classmethod
    def fit(cls, features: ArrayLike, targets: ArrayLike) -> "FeatureDistance":
        """From training features (N, F) and their classes; classes without samples are
        left out.
        """
        x, (_, y) = _unit(features), np.unique(as_array(targets), return_inverse=True)
        fits = x.ndim == 2 and len(x) == len(y)
        expect(
            fits,
            f"features have shape {x.shape} for {len(y)} targets: expected one row per"
            " target",
        )
        counts = np.bincount(y)
        means = np.zeros((len(counts), x.shape[1]))
        np.add.at(means, y, x)
        means /= counts[:, None]
        within, overall = whitening(x - means[y]), whitening(x - x.mean(axis=0))
        spread = float((((x - means[y]) @ within) ** 2).sum(axis=1).mean())
        return cls(
            means @ within,
            within,
            x.mean(axis=0) @ overall,
            overall,
            spread / 2 / counts,
        )

    def __call__(self, features: ArrayLike) -> NDArray[np.float64]:
        """The score of each sample (N,), larger for less familiar."""
        x = _unit(features)
        white = x @ self.within
        squares = (
            (white**2).sum(axis=1)[:, None]
            - 2 * white @ self.means.T
            + (self.means**2).sum(axis=1)
        )
        nearest: NDArray[np.float64] = (squares - self.excess).min(axis=1)
        return nearest - ((x @ self.overall - self.centre) ** 2).sum(axis=1)


def fit_unfamiliar(
    model: ProbabilityModel,
    utility: Utility,
    scores: Scores,
    targets: Indices,
    false_alarm: float,
    kind: str = AUTO,
) -> Unfamiliar:
    """Thresholds on held-out samples of a kind of score, by default of what the scores
    allow.
    """
    if not (utility.decided_class < 0).any():
        raise InputError(
            "unfamiliar samples are handed over, but every action decides for a class:"
            " add one (abstain)"
        )
    if kind == AUTO:
        kind = _usual(scores, targets)
    names = kind.split(PLUS)
    if not set(names) <= set(TERMS) or len({*names}) != len(names):
        raise InputError(
            f"score {kind!r} is not known: expected {AUTO}, or one or a sum of"
            f" {', '.join(TERMS)}, such as 'energy + entropy'"
        )
    scales = {}
    if len(names) > 1:
        # Tails have few samples and count as much.
        weights = 1 / np.bincount(targets)[targets]
        scales = {name: deviation(TERMS[name](scores), weights) for name in names}
        if GIVEN in names:  # as much as all others together
            scales[GIVEN] /= len(names) - 1
    score = Unfamiliar(false_alarm, {}, {}, kind, scales).score(scores)
    prior = model.decided_prior
    chunks = Probabilities(model, scores).chunks()
    likeliest = np.concatenate([seen_as(p, prior) for _, p in chunks])
    return Unfamiliar.fit(
        score,
        likeliest,
        targets,
        utility.classes,
        false_alarm=false_alarm,
        kind=kind,
        scales=scales,
    )


def _usual(scores: Scores, targets: Indices) -> str:
    """The kind that was chosen for such scores; log-probabilities, as of models of
    tables, have no energy.
    """
    energetic = (
        scores.logits and float(np.abs(energy(scores)).max(initial=0)) > NORMALISED
    )
    if energetic and not _energy_helps(scores, targets):
        return "entropy" if scores.unfamiliarity is None else "given + entropy"
    if scores.unfamiliarity is None:
        return "energy + entropy" if energetic else "entropy"
    return "given + energy + entropy" if energetic else GIVEN


def _energy_helps(scores: Scores, targets: Indices) -> bool:
    """Whether, with the energy, the entropy is better at telling samples of a class
    whose logits are left out.

    The energy of cosine heads, and of logits that correct for the class prior, may be
    lowest between all classes.
    """
    rows = np.linspace(0, len(scores) - 1, min(len(scores), LOOKED_AT)).astype(int)
    values, y = scores.values[:, rows], targets[rows]
    present, weights, gains = np.unique(y), 1 / np.bincount(y)[y], []
    if len(present) < 3:
        return True
    for left in present[
        np.linspace(0, len(present) - 1, min(len(present), LEFT_OUT)).astype(int)
    ]:
        others, new = Scores(np.delete(values, left, axis=2), True), y == left
        terms = [energy(others), predictive_entropy(others)]
        both = np.sum(
            [term / deviation(term[~new], weights[~new]) for term in terms], axis=0
        )
        gains.append(roc_area(new, both).value - roc_area(new, terms[1]).value)
    return float(np.mean(gains)) >= 0


def deviation(values: Floats, weights: Floats) -> float:
    """The weighted standard deviation."""
    mean = np.average(values, weights=weights)
    return max(float(np.sqrt(np.average((values - mean) ** 2, weights=weights))), 1e-12)


def unlike_prior(prior: Prior | None, classes: int) -> Floats:
    """Factors (C,) of probabilities for a prior that make all classes equally frequent;
    0 for impossible ones.
    """
    even = np.ones(classes)
    if prior is None:
        return even
    return np.divide(even, prior, out=np.zeros_like(even), where=np.asarray(prior) > 0)


def seen_as(p: Floats, prior: Prior | None) -> Indices:
    """The most probable class (n,) if all were equally frequent, from probabilities
    (n, C) for a prior.
    """
    return largest(p * unlike_prior(prior, p.shape[1]))


def actions_for(utility: Utility) -> Indices:
    """The actions among which unfamiliar samples are decided: all, if none
    hands over.
    """
    named = [i for i, name in enumerate(utility.actions) if name == UNFAMILIAR]
    handing = np.flatnonzero(utility.decided_class < 0)
    return (
        np.array(named)
        if named
        else handing
        if len(handing)
        else np.arange(len(utility.actions))
    )


def unfamiliar_action(utility: Utility, p: Floats) -> Indices:
    """The best action (n,) for samples that are unfamiliar, from corrected
    probabilities (n, C).
    """
    allowed = actions_for(utility)
    return np.asarray(allowed[(p @ utility.matrix[:, allowed]).argmax(axis=1)])


def _regions(classes: Classes) -> Mapping[str, Any]:
    return (
        {EVERYWHERE: np.arange(len(classes))}
        if classes.counts is None
        else classes.thirds
    )


def _promised(values: Floats, false_alarm: float) -> float:
    """The threshold that new samples exceed with this probability: one more than the
    held-out samples counts.
    """
    return quantile(
        values,
        np.ones(len(values)),
        min(1.0, (1 - false_alarm) * (1 + 1 / len(values))),
    )


def quantile(values: Floats, weights: Floats, level: float) -> float:
    """The smallest value that at least this share of the weight does not exceed."""
    order = np.argsort(values, kind="stable")
    share = np.cumsum(weights[order]) / weights.sum()
    return float(
        values[order[min(int(np.searchsorted(share, level - 1e-12)), len(order) - 1)]]
    )


def _unit(features: ArrayLike) -> NDArray[np.float64]:
    x = as_array(features).astype(np.float64)
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def whitening(
    centred: NDArray[np.float64], shrinkage: float = SHRINKAGE
) -> NDArray[np.float64]:
    """L with L L^T the inverse of the shrunk covariance."""
    covariance = centred.T @ centred / len(centred)
    size = len(covariance)
    shrunk = (1 - shrinkage) * covariance + shrinkage * max(
        np.trace(covariance) / size, 1e-12
    ) * np.eye(size)
    found: NDArray[np.float64] = np.linalg.inv(np.linalg.cholesky(shrunk)).T
    return found

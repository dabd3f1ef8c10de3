"""Prediction sets: several classes as one answer, by a coverage promise or by expected
utility.
"""

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from rfdlc.decisions.utility import Utility
from rfdlc.errors import InputError, choose, expect, listing
from rfdlc.probabilities.classes import Classes, Indices
from rfdlc.probabilities.priors import Prior
from rfdlc.probabilities.scores import Floats

Mask = NDArray[np.bool_]
KINDS = ("marginal", "class", "macro")
DISCOUNTS: dict[
    str, Callable[[Any], Any]
] = {  # of a set of k classes (Zaffalon, Corani and Maua 2012)
    "u65": lambda k: 1.6 / k - 0.6 / k**2,
    "u80": lambda k: 2.2 / k - 1.2 / k**2,
}
ROUNDING = 1e-5  # relative: what 32 bits may change in a probability at its threshold
FORBIDDEN = -1e6  # an action that can be worth this little is never part of a set


@dataclass(frozen=True)
class PredictionSets:
    """Sets that contain the true class with a promised probability: the classes with
    p(y|x) >= threshold(y).

    The promise holds for samples that are exchangeable with the held-out samples; see
    `fit` and docs/sets.md.

    Parameters
    ----------
    kind : {"marginal", "class", "macro"}
        "marginal": one threshold for all classes, which gives the smallest sets for a
        share of all samples. "class": the share of covered samples is promised for
        every class. "macro": the threshold is proportional to the prior of the class,
        which gives the smallest sets for the mean over classes of their coverage.
    coverage : float
        The promised probability.
    thresholds, samples : tuple of float, tuple of int
        One per class: of probabilities that are calibrated and corrected; held-out
        samples.
    groups : tuple of int
        Classes with the same number share a promise: it holds for their samples
        together. -1: no promise.
    ties : tuple of float, optional
        Randomised sets: the probability with which each class stays in the set at its
        threshold.
    empty : bool
        Whether a set may be empty; otherwise it has the class that is nearest to its
        threshold.
    max_size, held_out : int and float, optional
        The largest size of a set, which keeps its most probable classes; then no
        coverage is promised, but that of the held-out samples is known.
    """

    kind: str
    coverage: float
    thresholds: tuple[float, ...]
    samples: tuple[int, ...]
    groups: tuple[int, ...]
    ties: tuple[float, ...] | None = None
    empty: bool = False
    max_size: int | None = None
    held_out: float | None = None
    scaled: ClassVar[bool] = True  # whether rows of probabilities must sum to one

    def __post_init__(self) -> None:
        fits = self.max_size is None or self.max_size >= 1
        expect(
            fits,
            f"the largest size of a set is {self.max_size}: expected a number of"
            " classes, 1 or more",
        )
        for name in ("thresholds", "samples", "groups", "ties"):  # JSON has lists
            value = getattr(self, name)
            object.__setattr__(self, name, value if value is None else tuple(value))
        sizes = {
            len(self.thresholds),
            len(self.samples),
            len(self.groups),
            len(self.ties or self.groups),
        }
        expect(
            len(sizes) == 1,
            f"sets have {sorted(sizes)} thresholds, samples and groups: expected one"
            " per class",
        )
        choose("sets", self.kind, KINDS)
        check_coverage(self.coverage)
        fits = bool(
            np.all(np.isfinite(self.thresholds) & (np.array(self.thresholds) >= 0))
        )
        expect(
            fits,
            f"thresholds of sets are {listing(self.thresholds)}: expected numbers of 0"
            " or more",
        )

    @classmethod
    def fit(
        cls,
        p: Floats,
        targets: Indices,
        classes: Classes,
        *,
        kind: str = "macro",
        coverage: float = 0.9,
        prior: Prior | None = None,
        shifted: bool = False,
        least: int | None = None,
        randomised: bool = False,
        empty: bool = False,
        max_size: int | None = None,
    ) -> "PredictionSets":
        """Thresholds from held-out samples: corrected probabilities (N, C) and true
        classes (N,).

        A threshold leaves out at most floor((N + 1)(1 - coverage)) - 1 of its N
        samples: then a new exchangeable sample is covered with a probability of at
        least `coverage`, and at most 1 / (N + 1) more if there are no ties.

        Parameters
        ----------
        kind, coverage, empty, max_size
            As in `PredictionSets`.
        prior, shifted : array of shape (n_classes,), bool
            The prior that `p` carries, by default the mean of `p`; whether to weigh the
            samples to these frequencies.
        least : int, optional
            For "class": classes with fewer samples are pooled with those of similar
            frequency until a pool has as many; by default 2 / (1 - coverage).
        randomised : bool
            Samples exactly at a threshold are covered at random: closer to the promise
            if many scores are equal.
        """
        choose("sets", kind, KINDS)
        check_coverage(coverage)
        alpha, count = 1 - coverage, len(classes)
        samples = np.bincount(targets, minlength=count)
        needed = int(np.ceil(1 / alpha - 1 - 1e-9))
        few = (
            f"{len(targets)} held-out samples cannot promise a coverage of {coverage:g}"
        )
        expect(
            len(targets) >= needed,
            f"{few}: expected at least {needed}, or a lower coverage",
        )
        least = int(np.ceil(2 / alpha - 1e-9)) if least is None else least
        expect(
            least >= needed,
            f"least is {least}: a coverage of {coverage:g} needs at least {needed}"
            " samples",
        )
        prior = p.mean(axis=0, dtype=np.float64) if prior is None else prior
        scale = np.maximum(prior, 1e-12) if kind == "macro" else np.ones(count)
        scores = p[np.arange(len(targets)), targets] / scale[targets]
        weights = np.ones(len(targets))
        if shifted and kind != "class":  # within a class all weights are alike
            weights = (prior / np.maximum(samples, 1))[targets] * len(targets)
        every = [(range(count), range(count))]
        pools = (
            _pools(samples, classes, min(least, len(targets)))
            if kind == "class"
            else every
        )
        thresholds, groups, ties = (
            np.zeros(count),
            np.zeros(count, dtype=int),
            np.ones(count),
        )
        for group, (own, sources) in enumerate(pools):
            rows = np.isin(targets, list(sources))
            at, keep = _threshold(scores[rows], weights[rows], alpha)
            mine, promised = list(own), len(own) == len(sources)
            thresholds[mine], ties[mine], groups[mine] = (
                at * (1 - ROUNDING),
                keep,
                group if promised else -1,
            )
        thresholds *= scale
        at_ties = tuple(ties.tolist()) if randomised else None
        lists = (
            tuple(thresholds.tolist()),
            tuple(samples.tolist()),
            tuple(groups.tolist()),
        )
        found = cls(kind, float(coverage), *lists, at_ties, empty, max_size)
        if max_size is None:
            return found
        covered = found.members(p, Utility.one_hot(classes))[
            np.arange(len(targets)), targets
        ]
        found = replace(found, held_out=float(np.average(covered, weights=weights)))
        warnings.warn(
            f"{found}: a coverage of {coverage:.4g} is not promised for sets of a"
            " largest size",
            stacklevel=3,
        )
        return found

    def members(
        self, p: Floats, utility: Utility, rng: np.random.Generator | None = None
    ) -> Mask:
        """Which classes are in the set of each sample (n, C), from corrected
        probabilities (n, C).
        """
        thresholds = np.asarray(self.thresholds, dtype=p.dtype)
        inside: Mask = p >= thresholds
        if self.ties is not None:
            drawn = (np.random.default_rng(0) if rng is None else rng).random(
                (len(p), 1)
            )
            inside &= (p > thresholds * (1 + 2 * ROUNDING)) | (
                drawn < np.asarray(self.ties)
            )
        lost = np.flatnonzero(~inside.any(axis=1))
        if len(lost) and not self.empty:
            inside[lost, (p[lost] / np.maximum(thresholds, 1e-30)).argmax(axis=1)] = (
                True
            )
        if self.max_size is not None:
            large = np.flatnonzero(inside.sum(axis=1) > self.max_size)
            falling = np.argsort(
                np.where(inside[large], -p[large], 1), axis=1, kind="stable"
            )
            inside[large[:, None], falling[:, self.max_size :]] = False
        return inside

    def promises(self, classes: Classes) -> list[dict[str, Any]]:
        """For each class its held-out samples, and the classes for whose samples
        together the coverage is promised.
        """
        groups = (
            np.array(self.groups)
            if self.max_size is None
            else np.full(len(self.groups), -1)
        )
        together = {
            g: classes.select(np.flatnonzero(groups == g)) for g in set(self.groups)
        } | {-1: ()}
        rows = zip(classes.names, self.samples, groups.tolist(), strict=True)
        return [
            {"class": name, "samples": n, "promised_for": list(together[g])}
            for name, n, g in rows
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and tables, ready for JSON."""
        return {
            name: value
            for name, value in asdict(self).items()
            if value is not None or name == "ties"
        }

    def __str__(self) -> str:
        whose = {
            "marginal": "",
            "macro": ", not of each class",
            "class": " of each class",
        }
        share = f"{100 * self.coverage:.4g}% of samples{whose[self.kind]}"
        share = (
            share
            if self.held_out is None
            else f"{self.held_out:.1%} of held-out samples"
        )
        most = "" if self.max_size is None else f" of at most {self.max_size} classes"
        return f"prediction sets ({self.kind}){most} contain the true class for {share}"


@dataclass(frozen=True)
class SetUtility:
    """Sets by expected utility: an answer of k classes is worth a discount of what the
    right class alone is worth.

    With m(y) the least value of a wrong answer to y and v(y) = U[y, y] that of the
    right one, a set S of k >= 2 classes is worth m(y) + discount(k) (v(y) - m(y)) where
    y is in S, and m(y) where it is not. A single class and every other action
    (`abstain`) are worth what the utility says. Classes without an action, and classes
    whose action can be worth -1e6 or less, are never in a set of several.

    The best set is exact, and found by sorting: the expected utility of S is a constant
    plus discount(k) times the sum over S of w(y) = p(y) (v(y) - m(y)). For discount(k)
    >= 0, swapping a member for a class with a larger w never lowers it, so the k
    classes with the largest w are a best set of size k, and one pass over k compares
    these. This needs a discount that depends on the size alone and is not negative, and
    an m(y) that does not depend on S; it holds for every utility matrix.

    Parameters
    ----------
    discount : tuple of float
        For sets of 1, 2, ... classes, the first 1; larger sets are not considered. See
        `SetUtility.of`.

    Examples
    --------
    >>> sets = SetUtility.of("u65", 3)
    >>> [round(each, 2) for each in sets.discount]
    [1.0, 0.65, 0.47]
    >>> sets.members(
    ...     np.array([[0.5, 0.45, 0.05], [0.9, 0.05, 0.05]]), Utility.one_hot(3)
    ... ).tolist()
    [[True, True, False], [True, False, False]]
    """

    discount: tuple[float, ...]
    kind: ClassVar[str] = "utility"
    scaled: ClassVar[bool] = False  # whether rows of probabilities must sum to one

    def __post_init__(self) -> None:
        try:
            values = np.array(self.discount, dtype=np.float64).reshape(-1)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"the discount of a set must be numbers, one per size ({error})"
            ) from None
        right = (
            len(values)
            and np.isfinite(values).all()
            and values.min() >= 0
            and abs(values[0] - 1) < 1e-9
        )
        expect(
            right,
            f"the discount of sets is {listing(values.tolist())}: expected numbers of 0"
            " or more for sets of 1, 2, ... classes, the first of them 1, since a set"
            " of one class is that class",
        )
        object.__setattr__(self, "discount", tuple(values.tolist()))

    @classmethod
    def of(
        cls, discount: str | Callable[[int], float] | Sequence[float], classes: int
    ) -> "SetUtility":
        """From "u65", "u80", a function of the size, or one number per size."""
        if isinstance(discount, str):
            discount = DISCOUNTS[choose("discount", discount, DISCOUNTS)]
        values = (
            [discount(k) for k in range(1, classes + 1)]
            if callable(discount)
            else list(discount)
        )
        return cls(tuple(values[:classes]))

    def members(
        self, p: Floats, utility: Utility, rng: np.random.Generator | None = None
    ) -> Mask:
        """The set of each sample (n, C) with the highest expected utility; empty where
        handing over is worth more.

        Rows of `p` need not sum to one.
        """
        allowed, gain, alone = self.terms(utility)
        plain, each = (
            p @ alone.astype(p.dtype),
            np.arange(len(p)),
        )  # what actions are worth above missing the class
        best = plain.argmax(axis=1)
        single, decided = plain[each, best], utility.decided_class[best]
        chosen: Mask = np.zeros(p.shape, dtype=bool)
        chosen[each, decided] = decided >= 0
        most = min(len(self.discount), int(allowed.sum()))
        if most < 2:
            return chosen
        # Sorting is what a set costs: rows and sizes that cannot win are left out. k
        # classes are worth at most discount(k) sqrt(k) times the root of the sum of
        # squares, and at most what `_bound` says.
        worth, discount = (
            p * gain.astype(p.dtype),
            np.array(self.discount[1:most], dtype=p.dtype),
        )
        reach = (1 + ROUNDING) * (
            discount * np.sqrt(np.arange(2, most + 1, dtype=p.dtype))
        ).max()
        rows = np.flatnonzero(
            reach * np.sqrt(np.einsum("nc,nc->n", worth, worth)) > single
        )
        worth = worth[rows]
        worth[:, ~allowed] = -np.inf
        kept = np.flatnonzero(_bound(worth, self.discount[:most]) > single[rows])
        rows, worth = rows[kept], worth[kept]
        single = single[rows]
        share = (single / np.maximum(np.maximum(worth, 0).sum(axis=1), 1e-30)).min(
            initial=np.inf
        )
        sizes = int(
            (np.maximum.accumulate(discount[::-1]) > share * (1 - ROUNDING)).sum()
        )
        if not sizes:
            return chosen
        np.negative(worth, out=worth)  # the best classes come first
        rising = np.sort(worth, axis=1)[:, : sizes + 1]
        values = np.cumsum(rising, axis=1)[:, 1:]
        values *= discount[:sizes]
        size = values.argmin(axis=1)  # two classes less
        several = np.flatnonzero(-values[np.arange(len(size)), size] > single)
        worth, size = worth[several], size[several] + 2
        members = worth <= rising[several, size - 1][:, None]
        excess = np.flatnonzero(
            members.sum(axis=1) > size
        )  # more classes are as good as the last one
        ranks = np.argsort(np.argsort(worth[excess], axis=1, kind="stable"), axis=1)
        members[excess] = ranks < size[excess][:, None]
        chosen[rows[several]] = members
        return chosen

    def realised(
        self, members: Mask, p: Floats, targets: Indices, utility: Utility
    ) -> Floats:
        """What each answer is worth for the true class (n,); `members` are the sets of
        corrected probabilities.
        """
        _, gain, alone = self.terms(utility)
        rows, size = np.arange(len(p)), members.sum(axis=1)
        discounted = (
            np.array(self.discount)[size - 1] * gain[targets] * members[rows, targets]
        )
        missed = utility.matrix[targets, 0] - alone[targets, 0]
        single = utility.matrix[targets, (p @ alone.astype(p.dtype)).argmax(axis=1)]
        return np.where(size > 1, missed + discounted, single)

    @staticmethod
    def terms(utility: Utility) -> tuple[Mask, Floats, Floats]:
        """Classes that sets may have (C,), v(y) - m(y) (C,), and what each action is
        worth above m(y) (C, A).
        """
        matrix, own = utility.matrix, utility.class_action
        answers = matrix[:, own]
        allowed, right = (
            (own >= 0) & (answers.min(axis=0) > FORBIDDEN),
            answers.diagonal().copy(),
        )
        answers[:, ~allowed] = np.inf
        np.fill_diagonal(answers, np.inf)
        wrong = answers.min(axis=1)
        missed = np.where(np.isfinite(wrong), wrong, right)
        return allowed, np.where(allowed, right - missed, 0.0), matrix - missed[:, None]

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and tables, ready for JSON."""
        return {"kind": self.kind, "discount": list(self.discount)}

    def __str__(self) -> str:
        return "prediction sets with the highest expected utility"


Sets = PredictionSets | SetUtility


def as_sets(given: Any, classes: int) -> Sets:
    """Sets from what `to_dict` gives, the name of a discount, or as they are; for this
    number of classes.
    """
    if isinstance(given, str):
        return SetUtility.of(given, classes)
    if isinstance(given, dict):
        given = (
            SetUtility(tuple(given["discount"]))
            if "discount" in given
            else PredictionSets(**given)
        )
    known, kind = isinstance(given, PredictionSets | SetUtility), type(given).__name__
    expect(
        known,
        f"sets is a {kind}: expected 'u65', 'u80', a SetUtility, or those of"
        " Decider.fit_sets",
    )
    size = len(given.thresholds) if isinstance(given, PredictionSets) else classes
    expect(
        size == classes,
        f"sets are for {size} classes, but there are {classes}: fit them again",
    )
    found: Sets = given
    return found


def set_texts(members: Mask, classes: Classes) -> list[str]:
    """Each set as a JSON list of names, which any name is safe in.

    >>> set_texts(
    ...     np.array([[True, True], [False, True]]), Classes(("cat", "dog, or so"))
    ... )
    ['["cat", "dog, or so"]', '["dog, or so"]']
    """
    names = np.array(
        [json.dumps(name, ensure_ascii=False) for name in classes.names], dtype=object
    )
    rows, columns = np.nonzero(members)
    ends = np.cumsum(np.bincount(rows, minlength=len(members)))[:-1]
    return [f"[{', '.join(part)}]" for part in np.split(names[columns], ends)]


def _bound(worth: Floats, discount: tuple[float, ...]) -> Floats:
    """What no set of two or more classes is worth more than (n,), from the two largest
    worths of each row.

    k classes are worth at most discount(k) (w1 + (k - 1) w2): w1 times a function of w2
    / w1 that never falls.
    """
    largest = np.arange(len(worth)), worth.argmax(axis=1)
    first = worth[largest]
    worth[largest] = -np.inf
    ratio = np.maximum(worth.max(axis=1), 0) / np.maximum(first, 1e-30)
    worth[largest] = first
    steps = _most_worth(discount)
    bound: Floats = np.maximum(first, 0) * steps[
        np.ceil(ratio * (len(steps) - 1)).astype(np.intp)
    ].astype(worth.dtype)
    return bound


@lru_cache(maxsize=4)
def _most_worth(discount: tuple[float, ...]) -> Floats:
    """max_k discount(k) (1 + (k - 1) r) for ratios r from 0 to 1, rounded up."""
    sizes = np.arange(1, len(discount))[:, None]
    values: Floats = (
        np.array(discount[1:])[:, None] * (1 + sizes * np.linspace(0, 1, 257))
    ).max(axis=0)
    return values * (1 + ROUNDING)


def check_coverage(coverage: float) -> None:
    """Raise for what cannot be promised."""
    fits = isinstance(coverage, int | float | np.number) and 0 < coverage < 1
    expect(
        fits,
        f"coverage is {coverage}: expected a share between 0 and 1, both excluded, such"
        " as 0.9",
    )


def _threshold(scores: Floats, weights: Floats, alpha: float) -> tuple[float, float]:
    """The threshold that leaves out as much weight as alpha allows, and the probability
    to keep a sample at it.
    """
    order = np.argsort(scores)
    ranked, total = scores[order], float(weights.sum())
    test = float(
        weights.max()
    )  # the new sample counts as well, with the largest weight that it may have
    below = np.concatenate([[0.0], np.cumsum(weights[order])])[:-1]
    allowed = alpha * (total + test)
    place = int(np.searchsorted(below + test, allowed * (1 + 1e-12), side="right")) - 1
    if place < 0:
        return 0.0, 1.0
    at = float(ranked[place])
    left = float(weights[scores < at].sum())
    return at, float(
        np.clip(
            1 - (allowed - left) / (float(weights[scores == at].sum()) + test), 0, 1
        )
    )


def _pools(
    samples: Indices, classes: Classes, least: int
) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Groups of classes that share a promise, and the classes whose samples make it.

    Classes are pooled in the order of their frequency, which does not depend on the
    held-out scores. If all rare classes together have fewer than `least` samples, the
    next frequent classes lend theirs.
    """
    falling = np.lexsort(
        (-samples, -(samples if classes.counts is None else np.array(classes.counts)))
    ).tolist()
    pools: list[tuple[Sequence[int], Sequence[int]]] = [
        ([c], [c]) for c in falling if samples[c] >= least
    ]
    rare, pooled = [c for c in falling if samples[c] < least], list[list[int]]()
    for c in rare:
        if not pooled or samples[pooled[-1]].sum() >= least:
            pooled.append([])
        pooled[-1].append(c)
    if len(pooled) > 1 and samples[pooled[-1]].sum() < least:
        last = pooled.pop()
        pooled[-1] += last
    for pool in pooled:
        lenders = [c for c in reversed(falling) if samples[c] >= least]
        sources = list(pool)
        while samples[sources].sum() < least and lenders:
            sources.append(lenders.pop(0))
        if len(sources) > len(pool):
            warnings.warn(
                f"the classes {listing(classes.select(np.array(pool)))} have"
                f" {samples[pool].sum()} held-out samples: those of"
                f" {listing(classes.select(np.array(sources[len(pool) :])))} are used"
                " as well, so that no coverage is promised for these classes",
                stacklevel=4,
            )
        pools.append((pool, sources))
    return pools

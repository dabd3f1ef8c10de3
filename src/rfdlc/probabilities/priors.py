"""Class priors: the one that scores carry, the one that is decided for, and the
correction between them.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import nnls
from scipy.special import gammaln

from rfdlc.errors import choose, expect, listing
from rfdlc.formats.tables import is_number
from rfdlc.probabilities.classes import Classes, Indices
from rfdlc.probabilities.scores import Floats, softmax
from rfdlc.progress import track

Prior = NDArray[np.float64]
PriorLike = str | ArrayLike | Mapping[str, float]

DISAGREEMENT = (
    0.1  # total variation between the two estimates above which the user is warned
)
MOST_ITERATIONS, STANDSTILL = (
    2000,
    1e-9,
)  # of EM: enough even for classes that look alike
NEAR = (
    3.0,
    10.0,
    30.0,
    100.0,
    300.0,
)  # samples that the carried prior counts for where a shift is small
# And where there may be none. With 300, a class of one in a thousand is expected to
# move by twice its share, however many samples say that nothing has moved. Up to MANY
# samples cannot tell a small shift from none.
STILL, MANY = (1e3, 3e3, 1e4, 3e4, 1e5), 1000
# and a uniform prior where it may be anything: a flat Dirichlet distribution for 10
# classes
FLAT = 10.0
BURN_IN, DRAWS, GIBBS_CELLS = 100, 500, 300_000  # of posteriors of the prior
SIMULATED = 1000  # draws from a prior
NAMED = ("uniform", "train")
MOST_SHARES = 12  # in words
ROUNDED = 0.05  # how far a sum of rounded shares may be from one


def as_prior(given: PriorLike, classes: Classes, what: str) -> Prior:
    """A prior (C,) from "uniform", "train" (the training frequencies), numbers in class
    order, or {name: share}.
    """
    if isinstance(given, str) and "=" in given:
        pairs = [pair.partition("=")[::2] for pair in given.split(",")]
        wrong = [share for _, share in pairs if not is_number(share)]
        expect(
            not wrong,
            f"{what} {given!r} is not a prior: expected shares such as cat=0.2,dog=0.8",
        )
        given = {name.strip(): float(share) for name, share in pairs}
    if isinstance(given, str):
        expect(
            given != "estimate",
            f"{what} cannot be estimated here, where samples come one by one: estimate"
            " it from a file (`rfdlc predict RUN DATA --target-prior estimate`,"
            " Decider.estimate_prior) and give the numbers, such as cat=0.2,dog=0.8",
        )
        choose(what, given, NAMED)
        return (
            np.full(len(classes), 1 / len(classes))
            if given == "uniform"
            else classes.prior.copy()
        )
    named = hasattr(
        given, "items"
    )  # a table, or a series of pandas such as y.value_counts(): never by position
    if named:
        table = {str(name): share for name, share in given.items()}  # type: ignore[union-attr]
        classes.encode(list(table), f"{what} class")
        missing = [name for name in classes.names if name not in table]
        if (
            len(classes) == 2
            and len(missing) == 1
            and 0 < (rest := 1 - float(next(iter(table.values())))) <= 1
        ):
            table, missing = {**table, missing[0]: rest}, []
        expect(
            not missing,
            f"{what} has no share for {listing(missing)}: expected one for every class",
        )
        given = [table[name] for name in classes.names]
    values, count = np.asarray(given, dtype=np.float64), len(classes)
    expect(
        values.shape == (count,),
        f"{what} has shape {values.shape}: expected one number per class ({count})",
    )
    right = np.isfinite(values).all() and (values >= 0).all() and values.sum() > 0
    expect(
        right,
        f"{what} holds {values.min()} to {values.max()}: expected shares of 0 or more,"
        " not all 0",
    )
    total = float(values.sum())
    meant = bool((values == np.round(values)).all()) or any(
        abs(total / whole - 1) <= ROUNDED for whole in (1, 100)
    )
    expect(
        meant,
        f"{what} sums to {total:.4g}: expected shares that sum to 1, percentages that"
        " sum to 100, or counts",
    )
    return normalised(values)


def normalised(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """A read-only copy that sums to one; what does already keeps its last digits."""
    total = float(values.sum())
    shares = values.copy() if abs(total - 1) < 1e-12 else values / total
    shares.setflags(write=False)
    return shares


def as_weights(
    given: ArrayLike, what: str, samples: int | None = None
) -> NDArray[np.float64]:
    """Weights of particles, which sum to one, or of samples, which count
    repetitions.
    """
    values, size = (
        np.asarray(given, dtype=np.float64),
        "one per particle" if samples is None else f"{samples} of them",
    )
    right = (
        values.ndim == 1
        and samples in (None, len(values))
        and 0 < values.sum() < np.inf
        and values.min() >= 0
    )
    expect(
        right, f"{what} is {values}: expected {size}, numbers of 0 or more, not all 0"
    )
    return normalised(values) if samples is None else values


def as_groups(given: ArrayLike, samples: int) -> NDArray[np.int64]:
    """Numbers of groups, from labels of any kind, one per sample."""
    values = np.asarray(given)
    expect(
        values.shape == (samples,),
        f"groups have shape {values.shape}: expected one label per sample,"
        f" ({samples},)",
    )
    return np.unique(
        values if values.dtype != object else values.astype(str), return_inverse=True
    )[1].astype(np.int64)


def is_uniform(prior: Prior | None) -> bool:
    """Whether a prior is known and has equally frequent classes."""
    return prior is not None and bool(np.ptp(prior) < 1e-12)


def in_words(
    classes: Classes, prior: Prior, interval: tuple[Prior, Prior] | None = None
) -> str:
    """The shares of a prior in words, of many classes the largest and the smallest,
    with 95% intervals if given.
    """
    spans = "" if interval is None else " ({:.1%} to {:.1%})"
    bounds = np.transpose(interval or (prior, prior))
    falling = np.argsort(-prior, kind="stable")
    shares = [
        f"{classes.names[c]} {prior[c]:.1%}{spans.format(*bounds[c])}" for c in falling
    ]
    if len(shares) > MOST_SHARES:
        shares = [*shares[:4], "...", *shares[-2:]]
    return ", ".join(shares) + (
        f" ({len(prior)} in all)" if len(prior) > MOST_SHARES else ""
    )


@dataclass(frozen=True)
class PriorEstimate:
    """A class prior estimated from unlabelled data; `check` is the BBSE estimate if
    there is a joint table.
    """

    prior: Prior
    check: Prior | None
    draws: Floats  # (draws, C) of the posterior distribution of the prior

    @property
    def disagreement(self) -> float | None:
        """Total variation between the two estimates: near 0 if only the class prior has
        changed.
        """
        return (
            None
            if self.check is None
            else float(np.abs(self.prior - self.check).sum() / 2)
        )

    def interval(self) -> tuple[Prior, Prior]:
        """Lower and upper ends (C,) of the 95% interval of each class."""
        low, high = np.quantile(self.draws, [0.025, 0.975], axis=0)
        return low, high

    def mean_interval(
        self, p: Floats, values: Floats, carried: Prior
    ) -> tuple[float, float]:
        """The 95% interval of a mean of expected values, from p (N, C) with the carried
        prior and values (N, C).
        """
        ratios, gain = self.draws / np.maximum(carried, 1e-300), p * values
        low, high = np.quantile(
            [np.mean((gain @ r) / (p @ r)) for r in ratios], [0.025, 0.975]
        )
        return float(low), float(high)


def estimate_prior(
    probabilities: Floats,
    carried: Prior,
    joint: Floats | None = None,
    drawn: Sequence[Floats] = (),
) -> PriorEstimate:
    """The posterior mean of the class prior, from calibrated probabilities (N, C) that
    carry a known prior.

    Before the samples are seen, the prior may be anything, or near the carried one at a
    distance that is not known: so classes that few samples cannot rule out are kept,
    rare ones stay near their share unless samples speak against it, and large shifts
    are followed. The posterior is drawn by Gibbs sampling; for many samples, EM
    (Saerens, Latinne and Decaestecker 2002) finds its mode from all of them. `joint`
    (C, C) holds sums of predicted probabilities of held-out data by true class (see
    `joint_table`); with it the class-conditional estimate of Lipton, Wang and Smola
    (2018) is made as a check. `drawn` are the probabilities of the samples `gibbs_rows`
    by calibrators that are as probable: the posterior is that of all of them.
    """
    p, rng = np.asarray(probabilities, dtype=np.float64), np.random.default_rng(0)
    drawn = drawn or [p[gibbs_rows(p.shape)]]
    chains = [
        _posterior(_likelihood(few, carried), carried, rng, DRAWS // len(drawn))
        for few in drawn
    ]
    draws, pseudo_counts, means = (
        np.array(each) for each in zip(*chains, strict=True)
    )  # (K, draws, C), (K, C), (K, C)
    prior, used = normalised(means.mean(axis=0)), len(drawn[0])
    if used < len(p):
        around = draws.mean(axis=1, keepdims=True)
        draws = (
            (draws - around) * np.sqrt(used / len(p)) + around - prior
        )  # a Gaussian by then
        prior = _most_probable(
            _likelihood(p, carried), prior, pseudo_counts.mean(axis=0)
        )
        draws = np.maximum(prior + draws, 0)
        draws /= draws.sum(axis=2, keepdims=True)
    draws = draws.reshape(-1, len(carried))
    estimate = PriorEstimate(
        prior, None if joint is None else _bbse(p.mean(axis=0), joint, prior), draws
    )
    if (
        estimate.disagreement is not None
        and estimate.disagreement > DISAGREEMENT + 1 / np.sqrt(len(p))
    ):
        warnings.warn(
            "the two estimates of the class prior (by likelihood and BBSE) differ by"
            f" {estimate.disagreement:.2f} in total variation: the data may have"
            " changed in more than their class prior, or the scores need calibration",
            stacklevel=3,
        )
    return estimate


def unlikely(targets: Indices, prior: Prior | None, largest: float) -> bool:
    """Whether class frequencies of samples (N,) can hardly be those of draws from a
    prior, and can be weighted to it.

    By Pearson's statistic against simulated draws, at a level of 5%. With weights, no
    sample may have more than the `largest` share: one of a rare class would decide
    alone.
    """
    if prior is None:
        return False
    counts, expected = (
        np.bincount(targets, minlength=len(prior)),
        len(targets) * np.maximum(prior, 1e-12),
    )
    draws = np.random.default_rng(0).multinomial(len(targets), prior, SIMULATED)
    own, drawn = (
        np.sum((each - expected) ** 2 / expected, axis=-1) for each in (counts, draws)
    )
    shares = prior[counts > 0] / counts[counts > 0]
    return bool(np.mean(drawn >= own) < 0.05 and shares.max() <= largest)


def shrunk(counts: Floats, carried: Prior) -> Prior:
    """The posterior mean of the class prior of labelled samples, from the counts (C,)
    of their classes.
    """
    pseudo, probable = _shifts(counts, carried)
    return probable @ ((pseudo + counts) / (pseudo + counts).sum(axis=1, keepdims=True))


def _shifts(counts: NDArray[Any], carried: Prior) -> tuple[Floats, Floats]:
    """Dirichlet distributions (K, C) of a shifted class prior, and how probable counts
    (C,) make each of them (K,).
    """
    classes = len(carried)
    flat = np.full(classes, min(1.0, FLAT / classes))
    near = NEAR + STILL if counts.sum() > MANY else NEAR
    pseudo = np.maximum(np.vstack([flat, np.outer(near, carried)]), 1e-9) * np.where(
        carried > 0, 1.0, 1e-9
    )
    total = pseudo.sum(axis=1)
    evidence = (
        gammaln(total)
        - gammaln(total + counts.sum())
        + (gammaln(pseudo + counts) - gammaln(pseudo)).sum(axis=1)
    )
    return pseudo, softmax(evidence)


def gibbs_rows(shape: tuple[int, ...]) -> Indices:
    """Positions of as many samples of probabilities (N, C) as Gibbs sampling uses."""
    samples, classes = shape
    most = max(1, GIBBS_CELLS // classes)
    return (
        np.arange(samples)
        if samples <= most
        else np.random.default_rng(0).choice(samples, most, replace=False)
    )


def _likelihood(probabilities: Floats, carried: Prior) -> Floats:
    """p(x | y) up to a factor per sample."""
    p = np.asarray(probabilities, dtype=np.float64)
    return np.divide(p, carried, out=np.zeros_like(p), where=carried > 0)


def _posterior(
    likelihood: Floats, carried: Prior, rng: np.random.Generator, draws: int
) -> tuple[Floats, Floats, Prior]:
    """Gibbs sampling: draws (draws, C) of the class prior, the mean pseudo-counts (C,),
    and the posterior mean (C,).
    """
    prior, drawn = carried, []
    for _ in track(range(BURN_IN + draws), "Estimating the prior"):
        reach = np.cumsum(likelihood * prior, axis=1)
        assigned = (rng.random((len(likelihood), 1)) * reach[:, -1:] > reach).sum(
            axis=1
        )
        counts = np.bincount(assigned, minlength=len(carried))
        pseudo, probable = _shifts(counts, carried)
        chosen = pseudo[rng.choice(len(pseudo), p=probable)]
        prior = rng.dirichlet(counts + chosen)
        drawn.append((prior, chosen, normalised(counts + chosen)))
    found, chosen, means = (
        np.array(each[BURN_IN:]) for each in zip(*drawn, strict=True)
    )
    return found, chosen.mean(axis=0), normalised(means.mean(axis=0))


def _most_probable(likelihood: Floats, prior: Prior, pseudo_counts: Floats) -> Prior:
    for _ in track(range(MOST_ITERATIONS), "Estimating the prior"):
        new = normalised(
            prior * (likelihood.T @ (1 / np.maximum(likelihood @ prior, 1e-300)))
            + pseudo_counts
        )
        moved, prior = np.abs(new - prior).sum() / 2, new
        if moved <= STANDSTILL:
            break
    return prior


def joint_table(
    probabilities: Floats, targets: Indices, sample_weight: Floats | None = None
) -> NDArray[np.float64]:
    """(C, C): the sum over held-out samples of p(c) where the true class is y, at [c,
    y]; columns sum to samples.
    """
    joint = np.zeros((probabilities.shape[1], probabilities.shape[1]))
    weights = np.ones(len(targets)) if sample_weight is None else sample_weight
    np.add.at(joint.T, targets, probabilities * weights[:, None])
    return joint


def _bbse(mean: Prior, joint: Floats, otherwise: Prior) -> Prior:
    """Least squares for w >= 0 in joint @ w = mean; the prior is w times the held-out
    counts (the column sums).

    A class that the held-out data lack keeps its share in `otherwise`.
    """
    held_out = joint.sum(axis=0)
    weights, _ = nnls(joint, mean)
    share = weights * held_out
    return np.where(
        held_out > 0,
        share / max(share.sum(), 1e-300) * otherwise[held_out > 0].sum(),
        otherwise,
    )

"""What a training of images is worth: one training, decided by several utilities.

Probabilities carry a prior, that of the classes in training or a uniform one. A
temperature is fitted on held-out images; then the most probable class under the prior
of training maximises accuracy, under a uniform prior the mean of the classes' recalls,
and any utility is decided by its expectation.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]
BINS = 15
SIMULATIONS = 200
PENALTY = -1.0
LOWER = ("nll", "ece")  # metrics that are better when lower


def log_softmax(scores: Floats) -> Floats:
    shifted = scores - scores.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def negative_log_likelihood(scores: Floats, labels: Labels) -> float:
    return float(-log_softmax(scores)[np.arange(len(labels)), labels].mean())


def fitted_temperature(scores: Floats, offsets: Floats, labels: Labels) -> float:
    """The temperature T between 0.2 and 10 with which softmax(scores / T + offsets)
    fits the labels best.
    """
    from scipy.optimize import minimize_scalar

    def loss(log_temperature: float) -> float:
        scaled = scores / np.exp(log_temperature) + offsets
        return negative_log_likelihood(scaled, labels)

    bounds = (np.log(0.2), np.log(10))
    best = minimize_scalar(loss, bounds=bounds, method="bounded")
    return float(np.exp(best.x))


def expected_calibration_error(probabilities: Floats, labels: Labels) -> float:
    """15 bins of equal width, of the highest probability."""
    confidence = probabilities.max(axis=1)
    correct = probabilities.argmax(axis=1) == labels
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = np.bincount(bins, confidence - correct, BINS)
    return float(np.abs(gaps).sum() / len(labels))


def calibrated_range(probabilities: Floats, seed: int = 0) -> tuple[float, float]:
    """Between which values 95% of the calibration errors are, if the probabilities are
    right: with labels drawn from them.
    """
    rng = np.random.default_rng(seed)
    confidence = probabilities.max(axis=1)
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    errors = []
    for _ in range(SIMULATIONS):
        correct = rng.uniform(size=len(confidence)) < confidence
        gaps = np.bincount(bins, confidence - correct, BINS)
        errors.append(np.abs(gaps).sum() / len(confidence))
    low, high = np.quantile(errors, [0.025, 0.975])
    return float(low), float(high)


def tail_sensitive(counts: Labels) -> Floats:
    """1 for the true class, -1 for a class that is more frequent, else 0: the values of
    `rfdlc.Utility.tail_sensitive`.
    """
    more_frequent = counts[None, :] > counts[:, None]
    return np.eye(len(counts)) + np.where(more_frequent, PENALTY, 0.0)


def thirds(counts: Labels) -> list[Labels]:
    """Head, medium and tail: the classes by falling count, in three parts."""
    return np.array_split(np.argsort(-counts, kind="stable"), 3)


def recalls(decided: Labels, labels: Labels, classes: int) -> Floats:
    """The share of each class that is decided right; NaN for a class without images."""
    right = np.bincount(labels[decided == labels], minlength=classes)
    with np.errstate(invalid="ignore"):
        return right / np.bincount(labels, minlength=classes)


@dataclass(frozen=True)
class Judged:
    """What a training is evaluated against: training counts and test labels."""

    counts: Labels
    labels: Labels
    balanced_test: bool

    @property
    def prior(self) -> Floats:
        return np.asarray(self.counts / self.counts.sum())

    def scores(self, uniform_prior_scores: Floats) -> dict[str, float]:
        """Metrics of calibrated scores for a uniform prior, such as logits of a
        training with logit adjustment.

        `accuracy` is that of classes as frequent as in training, decided by the most
        probable class under that prior, also where the test split is balanced.
        `utility`, `nll` and `ece` are for the classes as frequent as in the test split.
        """
        classes = len(self.counts)
        log_prior = np.log(self.prior)
        as_trained = uniform_prior_scores + log_prior
        frequent = recalls(as_trained.argmax(axis=1), self.labels, classes)
        balanced = recalls(uniform_prior_scores.argmax(axis=1), self.labels, classes)
        present = np.isfinite(frequent)
        weights = self.prior[present] / self.prior[present].sum()

        served = uniform_prior_scores if self.balanced_test else as_trained
        probabilities = np.exp(log_softmax(served))
        utility = tail_sensitive(self.counts)
        actions = (probabilities @ utility).argmax(axis=1)
        low, high = calibrated_range(probabilities)
        regions = [np.nanmean(balanced[third]) for third in thirds(self.counts)]
        return {
            "accuracy": float(weights @ frequent[present]),
            "balanced_accuracy": float(np.nanmean(balanced)),
            "utility": float(utility[self.labels, actions].mean()),
            "nll": negative_log_likelihood(served, self.labels),
            "ece": expected_calibration_error(probabilities, self.labels),
            "ece_low": low,
            "ece_high": high,
            "head": float(regions[0]),
            "medium": float(regions[1]),
            "tail": float(regions[2]),
        }


def calibrated(
    held_out: Floats,
    held_out_labels: Labels,
    test: Floats,
    counts: Labels,
    uniform: bool,
) -> tuple[Floats, float]:
    """Test scores for a uniform prior, and the temperature that was fitted.

    `uniform`: the scores are for a uniform prior already (logit adjustment, balanced
    sampling); otherwise for that of training. Held-out images are as frequent as those
    of training.
    """
    log_prior = np.log(counts / counts.sum())
    offsets = log_prior if uniform else np.zeros(len(counts))
    temperature = fitted_temperature(held_out, offsets, held_out_labels)
    return test / temperature + offsets - log_prior, temperature


# -- pooling over sets
# --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """The mean of the difference between two methods, with 95% bounds, and in how many
    sets or families of sets the first is better.
    """

    mean: float
    low: float
    high: float
    count: int
    better: int


def paired(
    rows: Sequence[Mapping[str, str]],
    metric: str,
    method: str,
    reference: str,
    family: Callable[[str], str] = str,
) -> Difference:
    """Families of sets are the independent units (Student's t): seeds are averaged
    within a set, then the differences of sets within a family.
    """
    from scipy.stats import t as student

    values: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        by_method = values.setdefault(row["set"], {})
        by_method.setdefault(row["method"], []).append(float(row[metric]))
    by_family: dict[str, list[float]] = {}
    for name, by_method in values.items():
        if method in by_method and reference in by_method:
            gain = np.mean(by_method[method]) - np.mean(by_method[reference])
            by_family.setdefault(family(name), []).append(float(gain))
    if not by_family:
        raise ValueError(f"no set has both {method!r} and {reference!r}")
    gains = np.array([np.mean(group) for group in by_family.values()])
    middle = float(gains.mean())
    better = int((gains < 0).sum() if metric in LOWER else (gains > 0).sum())
    if len(gains) == 1:
        return Difference(middle, -np.inf, np.inf, 1, better)
    error = gains.std(ddof=1) / np.sqrt(len(gains))
    reach = float(student.ppf(0.975, len(gains) - 1) * error)
    return Difference(middle, middle - reach, middle + reach, len(gains), better)

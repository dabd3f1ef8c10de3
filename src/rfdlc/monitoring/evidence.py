"""Sequential tests that hold whenever one looks: bets against "nothing has changed",
whose wealth is the evidence.

A bet multiplies its wealth by a factor per sample whose mean is at most 1 while nothing
has changed. Wealth above 1/a then has a probability of at most a, at any time (Ville
1939). A change may come at any time: every block of samples starts bets of its own with
an equal part of the wealth of a month (Shin, Ramdas and Rinaldo 2024).
"""

import numpy as np
from scipy.special import ndtri

from rfdlc.probabilities.priors import Prior
from rfdlc.probabilities.scores import Floats

RICHEST, LEAST = 1e200, 1e-12
STAKES = 2.0 ** -np.arange(1, 9)  # shares of the wealth that bets on a mean can lose
SHIFT, MOST_OF = (
    0.1,
    0.5,
    # total variation of the shifts that fixed bets are on, and the most that one class
    # gains
)
MEMORIES, SHRUNK, STEPS = (
    (300, 1000),
    0.3,
    10,
)  # samples behind a learned bet, pseudo-counts per sample, steps of EM
UNSURE = 0.01  # probability that held-out data mislead about where nothing has changed


class Evidence:
    """Wealth of bets over blocks of samples; `level` is the probability of a false
    alarm in `horizon` samples.
    """

    def __init__(self, shares: Floats, level: float, horizon: int) -> None:
        self.shares, self.level, self.horizon = shares / shares.sum(), level, horizon
        self.alarm: int | None = None  # samples until the first alarm
        self._wealth, self._month, self.samples = np.zeros(len(shares)), 0, 0

    def add(self, log_factors: Floats) -> None:
        """The factors (n, bets) of the next block of samples, as logarithms."""
        size = len(log_factors)
        if self._month + size > self.horizon:  # a new month, and its own false alarms
            self._wealth, self._month = np.zeros(len(self.shares)), 0
        self._month, self.samples = self._month + size, self.samples + size
        with np.errstate(over="ignore"):
            grown = (self._wealth + size / self.horizon) * np.exp(
                log_factors.sum(axis=0)
            )
        self._wealth = np.minimum(grown, RICHEST)
        if self.alarm is None and self.value >= 1 / self.level:
            self.alarm = self.samples

    @property
    def value(self) -> float:
        """The e-value now: at most 1 on average while nothing has changed."""
        return float(self.shares @ self._wealth + 1 - self._month / self.horizon)


def mean_bets(values: Floats, null: float, low: float) -> Floats:
    """Log factors (n, stakes) of bets that the mean has risen above `null`, for values
    of at least `low`.
    """
    return np.log1p(STAKES * (values[:, None] - null) / max(null - low, LEAST))


class PriorBets:
    """Bets on a changed class prior by likelihood ratios.

    Under label shift the likelihood ratio of x is sum_y p(y | x) w(y), with w the new
    prior over the old one. Its mean is w @ mean while nothing has changed, whatever the
    calibration, with `mean` (C,) that of p. Held-out data know it up to an error of
    covariance `error` (C, C): ratios are divided by a mean that allows for it
    (`_allowed`). The new prior has more of one class, of all classes alike or of
    frequent ones, or is learned from the samples.
    """

    def __init__(
        self, mean: Prior, error: Floats, held_out: float, cost: float
    ) -> None:
        self.mean, self._error, classes = np.maximum(mean, LEAST), error, len(mean)
        self._held_out, self._cost = (
            held_out,
            cost,
        )  # log of the wealth that gives an alarm
        onto = np.vstack(
            [np.eye(classes), np.full(classes, 1 / classes), mean**2 / (mean @ mean)]
        )
        apart = np.abs(onto - mean).sum(axis=1, keepdims=True) / 2
        part = np.minimum(SHIFT / np.maximum(apart, LEAST), MOST_OF)
        self._fixed = (1 - part) + part * onto / self.mean  # (C + 2, C)
        kinds = np.array([0.35 / classes] * classes + [0.3, 0.1])
        self.shares = np.concatenate(
            [kinds, np.full(len(MEMORIES), 0.25 / len(MEMORIES))]
        )
        self._means = [
            self._allowed(w, share) for w, share in zip(self._fixed, kinds, strict=True)
        ]
        # A bet learned from few samples follows the error of held-out data only as far
        # as these samples show it.
        memories = np.array(MEMORIES)
        self._correlated = np.sqrt((classes - 1) * memories / (memories + held_out))
        self._recent, self._learned = (
            np.zeros((0, classes)),
            [self.mean for _ in MEMORIES],
        )

    def factors(self, p: Floats) -> Floats:
        """Log factors (n, bets) of a block of probabilities (n, C); bets are learned
        from the blocks before.
        """
        weights = [new / self.mean for new in self._learned]
        learned = zip(
            weights, self.shares[-len(weights) :], self._correlated, strict=True
        )
        ratios = (
            p
            @ np.vstack([self._fixed, weights]).T
            / [*self._means, *(self._allowed(*each) for each in learned)]
        )
        self._recent = np.concatenate([self._recent, p])[-max(MEMORIES) :]
        self._learned = [
            self.estimated(
                self._recent[-size:],
                new,
                SHRUNK * size / len(self._recent[-size:]),
                STEPS,
            )
            for new, size in zip(self._learned, MEMORIES, strict=True)
        ]
        return np.log(np.maximum(ratios, 1e-300))

    def _allowed(self, weights: Prior, share: float, correlated: float = 0.0) -> float:
        """The mean of a ratio, enlarged so that false alarms are as rare as stated,
        averaged over held-out data.

        If the true mean is z standard errors e above the known one, wealth of x comes
        with a probability of x^-k with k = 1 - 2 z e / s^2 instead of 1 / x, where s^2
        = n e^2 is the variance of the ratio and n the number of held-out samples.
        Averaged over z, dividing by 1 + log(x) / n restores 1 / x. It is never more
        than what is exceeded with a probability of `UNSURE` alone.
        """
        middle = float(weights @ self.mean)
        error = float(
            np.sqrt(
                max(float((weights - middle) @ self._error @ (weights - middle)), 0.0)
            )
        )
        most = -float(ndtri(UNSURE * share)) * error
        return (
            middle
            + correlated * error
            + min((self._cost - float(np.log(share))) / self._held_out, most)
        )

    def estimated(
        self,
        p: Floats,
        start: Prior | None = None,
        shrunk: float = 0.01,
        steps: int = 50,
    ) -> Prior:
        """A class prior by EM, from probabilities (n, C), with pseudo-counts of the old
        one.
        """
        likelihood, new = p / self.mean, self.mean if start is None else start
        for _ in range(steps):
            counts = (
                new * (likelihood.T @ (1 / np.maximum(likelihood @ new, 1e-300)))
                + shrunk * len(p) * self.mean
            )
            new = counts / counts.sum()
        return new

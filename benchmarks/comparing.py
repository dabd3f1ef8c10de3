"""One rule for every comparison, whichever side is ahead.

A difference counts if its 95% interval (Student's t) leaves out zero: ours is "better"
or "worse" then, and else "within chance". Where nothing was measured again, there is no
interval and no word. Differences are of pairs: the same folds, the same seeds.

Folds of one data set share training samples, so their differences vary less than those
of new data. Their standard error is the corrected one of Nadeau and Bengio (2003).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev

from scipy.stats import t

LEVEL = 0.95
BETTER, WITHIN, WORSE = VERDICTS = ("better", "within chance", "worse")


def verdict(gain: float, standard_error: float, degrees: float) -> str:
    """Whether a gain of ours, with so many degrees of freedom, is more than chance.

    >>> verdict(0.3, 0.1, 4), verdict(-0.3, 0.1, 4), verdict(0.2, 0.1, 4)
    ('better', 'worse', 'within chance')
    """
    bound = standard_error * float(t.ppf((1 + LEVEL) / 2, degrees))
    if gain > bound:
        return BETTER
    return WORSE if gain < -bound else WITHIN


def of_seeds(gains: Sequence[float]) -> str:
    """The verdict on gains of independent pairs, one per seed.

    >>> of_seeds([0.2, 0.3, 0.1, 0.2]), of_seeds([0.2, 0.3, -0.1])
    ('better', 'within chance')
    """
    error = stdev(gains) / math.sqrt(len(gains))
    return verdict(fmean(gains), error, len(gains) - 1)


def of_folds(gain: float, deviation: float, repeats: int, parts: int) -> str:
    """The verdict on a mean gain over all folds of a repeated cross-validation, by the
    deviation of these gains.

    >>> of_folds(0.02, 0.02, 3, 5), of_folds(0.021, 0.02, 1, 5)
    ('within chance', 'within chance')
    """
    folds = repeats * parts
    error = deviation * math.sqrt(1 / folds + 1 / (parts - 1))
    return verdict(gain, error, folds - 1)


def of_row(row: Mapping[str, object]) -> str:
    """The verdict on RFDLCClassifier beside the model of a row of tabular.csv, which
    has the deviation over all folds by the square root of those of one repeat.
    """
    repeats, parts = map(int, str(row["folds"]).split(" x "))
    deviation = float(str(row["standard_error"])) * math.sqrt(parts)
    return of_folds(float(str(row["difference"])), deviation, repeats, parts)


def counted(verdicts: Iterable[str]) -> tuple[int, int, int]:
    """How many are better, within chance, and worse."""
    listed = list(verdicts)
    better, within, worse = (listed.count(word) for word in VERDICTS)
    return better, within, worse


def in_words(verdicts: Iterable[str]) -> str:
    """
    >>> in_words(["better", "worse", "better"])
    'better in 2, within chance in 0, worse in 1'
    """
    numbers = zip(VERDICTS, counted(verdicts), strict=True)
    return ", ".join(f"{word} in {number}" for word, number in numbers)

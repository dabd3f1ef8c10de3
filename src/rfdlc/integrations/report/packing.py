"""Arrays as text inside the page: probabilities in 16 bits on a logarithmic scale, deflated, in base64.

The scale is logarithmic because a temperature and a prior act on logarithms: every probability keeps a relative error
of at most `STEP / 2` (0.02 %) down to the floor that the library itself takes logarithms with.
"""

import base64
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.decide.classes import Indices
from rfdlc.decide.scores import PROBABILITY_FLOOR, Floats

LEVELS = 65535
STEP = float(-np.log(PROBABILITY_FLOOR) / LEVELS)
MOST_CELLS = 2_000_000  # probabilities in one page, all runs together: two bytes each, about 4 MB as text


def quantise(probabilities: Floats) -> NDArray[np.uint16]:
    """-log p in steps of `STEP`, so that 0 stands for certainty and `LEVELS` for the floor."""
    levels = np.log(np.clip(probabilities, PROBABILITY_FLOOR, 1.0)) * (-1 / STEP)
    return np.rint(levels).astype(np.uint16)


def dequantise(levels: NDArray[np.uint16]) -> NDArray[np.float64]:
    """What the page makes of the levels: exp(-STEP level), rows divided by their sum."""
    p = np.exp(levels.astype(np.float64) * -STEP)
    return np.asarray(p / p.sum(axis=1, keepdims=True))


def pack(array: NDArray[Any]) -> str:
    """Little-endian bytes in planes (all first bytes, then all second ones ...), which deflate better; in base64."""
    plain = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    planes = plain.reshape(-1).view(np.uint8).reshape(-1, plain.itemsize).T
    return base64.b64encode(zlib.compress(planes.tobytes(), 6)).decode("ascii")


def stratified(targets: Indices, size: int, seed: int) -> Indices:
    """`size` positions in which every class keeps its share as nearly as whole samples allow; all if there are fewer.

    Systematic sampling: the samples are shuffled, put in order of their class, and taken at equal distances.
    """
    if len(targets) <= size:
        return np.arange(len(targets))
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(len(targets))
    by_class = shuffled[np.argsort(targets[shuffled], kind="stable")]
    places = ((np.arange(size) + rng.random()) * (len(targets) / size)).astype(np.int64)
    return np.sort(by_class[places])

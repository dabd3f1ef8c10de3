"""`digits-lt`: scikit-learn's handwritten digits made long-tailed. Needs no download."""

from pathlib import Path

import numpy as np

from rfdlc.data.dataset import Dataset, Split
from rfdlc.data.longtail import Profile, profile_counts, subset

TEST_PER_CLASS = 45


def read(root: Path | None = None, *, factor: float = 20, profile: Profile = "exponential", seed: int = 0) -> Dataset:
    """8x8 grey digits: a balanced test split of 45 per class, and the other images subsampled to the profile."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    labels = digits.target.astype(np.int64)
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)[:, None]  # 0..16 -> 0..255
    everything = Split(images, labels, [f"digit-{i}" for i in range(len(labels))])
    test = subset(labels, np.full(10, TEST_PER_CLASS), seed=0)  # the same for every seed, so that results compare
    rest = everything.take(np.setdiff1d(np.arange(len(labels)), test))
    # From the smallest class, so that every class can follow the profile exactly.
    counts = profile_counts(int(np.bincount(rest.labels).min()), 10, factor, profile)
    train = rest.take(subset(rest.labels, counts, seed))
    return Dataset.of("digits-lt", [str(d) for d in range(10)], {"train": train, "test": everything.take(test)})

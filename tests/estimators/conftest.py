"""Small imbalanced problems, and one thread: these fits are too small to share out."""

import numpy as np
import pytest
from sklearn.datasets import make_classification
from threadpoolctl import threadpool_limits


@pytest.fixture(autouse=True)
def one_thread():
    with threadpool_limits(1):
        yield


@pytest.fixture(scope="session")
def three():
    """(X, y) of three classes, 70%, 20% and 10%, that overlap."""
    X, y = make_classification(
        400,
        8,
        n_informative=5,
        n_classes=3,
        weights=[0.7, 0.2, 0.1],
        class_sep=0.7,
        random_state=0,
    )
    return X, y


@pytest.fixture(scope="session")
def named(three):
    """The same with text for labels."""
    X, y = three
    return X, np.array(["common", "rare", "rarest"])[y]


@pytest.fixture(scope="session")
def two():
    """(X, y) of two classes, 80% and 20%."""
    X, y = make_classification(
        500, 6, n_informative=4, weights=[0.8], class_sep=0.6, random_state=1
    )
    return X, y

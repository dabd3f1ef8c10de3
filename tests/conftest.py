"""What makes tests of several folders shorter, where it is not what they test."""

from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings

settings.register_profile(
    "no deadline", deadline=None
)  # the first example may import a library
settings.load_profile("no deadline")


@pytest.fixture(scope="module")
def quick_tables() -> Iterator[None]:
    """Few small candidates: for tests of what is done with a model of a table, not of
    how good it is.
    """
    from rfdlc.training import tabular

    small = {
        "TREES": 8,
        "ITERATIONS": 5,
        "PENALTIES": {"linear": 1.0},
        "LARGE": 0,
    }  # no perceptrons
    with pytest.MonkeyPatch.context() as patch:
        for name, value in small.items():
            patch.setattr(tabular, name, value)
        yield


@pytest.fixture(scope="module")
def quick_calibration() -> Iterator[None]:
    """A temperature where nothing else is asked for: for tests of what is done with a
    run, not of its calibration.
    """
    from rfdlc.probabilities import calibrators

    no_samples = np.empty(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrators, "needs_power", lambda *arguments: False)
        patch.setattr(
            calibrators,
            "cross_validated",
            lambda *arguments: ({}, no_samples, no_samples),
        )
        yield


@pytest.fixture(scope="session")
def quick_exports() -> Iterator[None]:
    """torch lists its translations to ONNX again in every export, which takes a quarter
    of the time of a small one.
    """
    registration = pytest.importorskip("torch.onnx._internal.exporter._registration")
    with pytest.MonkeyPatch.context() as patch:
        if (
            made := getattr(registration, "onnxscript_apis", None)
        ) is not None:  # not a public name
            once = SimpleNamespace(
                get_torchlib_ops=cache(lambda: made.get_torchlib_ops())
            )
            patch.setattr(registration, "onnxscript_apis", once)
        yield

"""Rounding in 32 bits is told from a graph that is not the model: 64 bits say which of
the two it is.
"""

from contextlib import nullcontext
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
from torch import nn

import rfdlc
from rfdlc.exporting import export as exporting
from rfdlc.exporting.export import (
    Parity,
    Rounding,
    measure_parity,
    measure_rounding,
    random_samples,
)


def own_network():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(100, 8),
    )


@pytest.mark.parametrize(
    ("method", "backbone"),
    [("rf-dlc-paper", "resnet8"), ("ce", "own"), ("ride", "mlp")],
)
def test_64_bits_are_the_same_network(trained, method, backbone):
    network = own_network if backbone == "own" else None
    model = rfdlc.Model.load(
        trained(method, backbone, network), backbone=network, device="cpu"
    )
    inputs = random_samples(model, 50)
    library = np.asarray(model.decider.probabilities(model.predict(inputs)))
    same, moved = (
        measure_rounding(model, inputs, library + shift, library) for shift in (0, 3e-5)
    )
    assert same.graph == same.model == moved.model
    assert 0 < same.model < 2e-6
    assert moved.graph == pytest.approx(3e-5, abs=2e-6)


def test_64_bits_are_asked_only_where_32_differ(trained):
    model = rfdlc.Model.load(trained("rf-dlc", "mlp"), device="cpu")

    def off_by(distance, **options):
        def answer(inputs):
            predictions = model.predict(inputs)
            probabilities = np.asarray(model.decider.probabilities(predictions)).copy()
            probabilities[7, 2] += distance  # one sample of a batch
            return SimpleNamespace(
                probabilities=probabilities, action=model.decider.decide(predictions)
            )

        return measure_parity(model, answer, **options)

    assert off_by(5e-6).rounding is None
    assert off_by(1e-3, full=False).rounding is None
    wrong = off_by(2e-5)
    assert wrong.rounding.graph == pytest.approx(2e-5, rel=0.05)
    assert wrong.rounding.model < 1e-6
    assert asdict(wrong)["rounding"]["graph"] == wrong.rounding.graph
    with pytest.raises(
        rfdlc.InputError,
        match="from 64 bits the graph differs by 2e-05, the model itself by",
    ):
        wrong.check("runs/a")


@pytest.mark.parametrize(
    ("difference", "changed", "rounding", "refused"),
    [
        (9e-6, 0, None, False),
        (1.1e-5, 0, None, True),
        (
            2e-5,
            0,
            Rounding(graph=8e-6, model=1.5e-5),
            False,
        ),  # the library's rounding alone
        (5e-5, 0, Rounding(graph=4e-5, model=2e-5), False),  # both round
        (9e-5, 0, Rounding(graph=9e-5, model=2e-5), True),  # more than rounding
        (1.2e-5, 0, Rounding(graph=1.2e-5, model=1e-7), True),
        (5e-5, 1, Rounding(graph=4e-5, model=2e-5), True),  # a decision is a decision
    ],
)
def test_what_is_refused(difference, changed, rounding, refused):
    parity = Parity(500, "random samples", difference, changed, 0, rounding=rounding)
    with (
        pytest.raises(rfdlc.InputError, match="nothing was written")
        if refused
        else nullcontext()
    ):
        parity.check("runs/a")


def test_samples_are_spread_over_the_test_split(tmp_path, monkeypatch):
    """The first of a sorted test split have one class."""
    x = np.repeat(np.arange(3.0), 40)[:, None] + np.zeros((1, 2))
    np.savez(
        tmp_path / "d.npz",
        X_train=x,
        y_train=x[:, 0].astype(int),
        X_test=x,
        y_test=x[:, 0].astype(int),
    )
    rfdlc.train(
        tmp_path / "d.npz", "ce", tmp_path / "run", epochs=1, widths=(4,), device="cpu"
    )
    monkeypatch.setattr(exporting, "SAMPLES", 5)
    inputs, recorded = exporting._samples(
        rfdlc.Model.load(tmp_path / "run", device="cpu")
    )
    assert inputs[:, 0].tolist() == [0, 0, 1, 2, 2]
    whole = rfdlc.Predictions.load(tmp_path / "run" / "predictions.npz").scores.values
    np.testing.assert_array_equal(
        recorded.scores.values, whole[:, [0, 29, 59, 89, 119]]
    )

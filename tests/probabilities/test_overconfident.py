"""Models that are far too certain or too uncertain: `auto` recovers probabilities whose
truth is known.
"""

import json

import numpy as np
import pytest
from scipy.special import log_softmax, softmax
from sklearn.datasets import load_digits
from sklearn.naive_bayes import GaussianNB

from rfdlc import Classes, Decider, Utility
from rfdlc.probabilities.calibrators import CALIBRATORS
from rfdlc.probabilities.scores import DEEPEST, safe_log

HELD, NEW = slice(None, 1500), slice(1500, None)


def drawn(log_p, rng):
    """Labels of which these are the log probabilities."""
    return (log_p + rng.gumbel(size=log_p.shape)).argmax(axis=1)


def nll(p, y):
    return float(-np.log(np.asarray(p, dtype=np.float64)[np.arange(len(y)), y]).mean())


def calibrated(scores, y, kind="auto", *, logits=False, **settings):
    """Probabilities of new samples, and the decider."""
    decider = Decider(Utility.one_hot(scores.shape[1]), calibration=kind, **settings)
    decider = decider.fit(scores[HELD], y[HELD], logits=logits)
    return np.asarray(decider.probabilities(scores[NEW], logits=logits)), decider


@pytest.mark.filterwarnings("ignore:the fitted temperature")
@pytest.mark.parametrize(
    ("power", "logits"),
    [
        (0.02, False),
        (0.02, True),
        (1, False),
        (4, False),
        (4, True),
        (40, True),
        (100, True),
    ],
)
def test_auto_recovers_probabilities_that_were_raised_to_a_power(power, logits):
    rng = np.random.default_rng(1)
    true = log_softmax(rng.normal(scale=2, size=(6000, 8)), axis=1)
    y, given = (
        drawn(true, rng),
        power * true if logits else softmax(power * true, axis=1),
    )
    p, _ = calibrated(given, y, logits=logits)
    assert nll(p, y[NEW]) < nll(np.exp(true[NEW]), y[NEW]) + 0.005
    np.testing.assert_allclose(p.sum(axis=1), 1)


@pytest.mark.parametrize(("temperature", "power"), [(0.5, 0.4), (3, 2.5)])
def test_auto_recovers_powers_of_log_probabilities(temperature, power):
    rng = np.random.default_rng(2)
    given = log_softmax(rng.normal(scale=3, size=(6000, 6)), axis=1)
    true = log_softmax(-((-given / temperature) ** power), axis=1)
    y = drawn(true, rng)
    exact = nll(np.exp(true[NEW]), y[NEW])
    p, decider = calibrated(np.exp(given), y)
    assert nll(p, y[NEW]) < exact + 0.005
    assert decider.model.calibrator.power == pytest.approx(power, rel=0.3)  # drawn to 1
    assert (
        nll(calibrated(np.exp(given), y, "temperature")[0], y[NEW]) > exact + 0.01
    )  # there was something to find
    assert (
        f"power {decider.model.calibrator.power:.3g}, then "
        in decider.model.calibrator.short
    )


def test_auto_is_the_mean_of_maps_of_powers():
    """A model with powers, a bias and confused classes, against a naive loop over the
    calibrators with a weight.
    """
    rng = np.random.default_rng(3)
    given = log_softmax(rng.normal(scale=4, size=(4000, 4)), axis=1)
    y = drawn(
        -np.sqrt(-given) * 2 @ (np.eye(4) + 0.3 * np.eye(4, k=1)).T + [0, 1, 0, -1], rng
    )
    prior = np.bincount(y[HELD]) / 1500
    p, decider = calibrated(given, y, logits=True, train_prior=prior)
    fitted = decider.model.calibrator
    assert fitted.power != 1
    expected = np.zeros((len(y[NEW]), 4))
    for name, share in fitted.weights.items():
        weight, bias = CALIBRATORS[name].from_dict(fitted.parameters[name]).as_affine()
        weight = np.asarray(weight) if np.ndim(weight) == 2 else np.eye(4) * weight
        for row, log_p in enumerate(given[NEW]):
            expected[row] += share * (
                weight @ [-((-x / fitted.temperature) ** fitted.power) for x in log_p]
                + bias
            )
    np.testing.assert_allclose(
        fitted.apply(given[NEW]), softmax(expected, axis=1), rtol=1e-9
    )
    assert "matrix-scaling" in fitted.weights
    mean = fitted.apply(given[HELD]).mean(axis=0)
    np.testing.assert_allclose(
        fitted.prior, mean, atol=0.02
    )  # which calibrated probabilities carry
    again = Decider.from_dict(json.loads(json.dumps(decider.to_dict())))
    np.testing.assert_array_equal(
        np.asarray(again.probabilities(given[NEW], logits=True)), p
    )
    middle = fitted.draws()[len(fitted.draws()) // 2]
    np.testing.assert_allclose(
        middle.apply(given[NEW]), fitted.apply(given[NEW]), rtol=1e-9
    )


def test_the_temperatures_by_which_priors_are_estimated_keep_the_power():
    rng = np.random.default_rng(4)
    given = log_softmax(rng.normal(scale=3, size=(4000, 6)), axis=1)
    y = drawn(-np.sqrt(-2 * given), rng)
    fitted = calibrated(given, y, logits=True)[1].model.calibrator
    draws = fitted.draws()
    assert fitted.power < 0.8
    assert len(draws) == 5
    assert [each.power for each in draws] == [fitted.power] * 5
    np.testing.assert_allclose(draws[2].apply(given), fitted.apply(given), rtol=1e-9)
    sure = [each.apply(given).max(axis=1).mean() for each in draws]
    assert sure == sorted(sure, reverse=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_probabilities_of_exactly_0_and_1_lose_no_more_than_their_errors_cost(dtype):
    """As an unpruned tree gives them: right in 80 of 100 cases, otherwise any of the
    others.
    """
    rng = np.random.default_rng(5)
    true = np.full((5, 5), 0.05) + 0.75 * np.eye(5)
    predicted = rng.integers(5, size=6000)
    y = drawn(np.log(true[predicted]), rng)
    p, _ = calibrated(np.eye(5, dtype=dtype)[predicted], y)
    assert np.isfinite(p).all()
    assert nll(p, y[NEW]) < nll(true[predicted[NEW]], y[NEW]) + 0.01


@pytest.mark.filterwarnings("ignore:the fitted temperature")
def test_auto_is_as_good_as_any_single_calibrator_of_naive_bayes():
    """Log probabilities down to -1e6. Earlier calibrators left probabilities of 0 to
    true classes.
    """
    X, y = load_digits(return_X_y=True)
    order = np.random.default_rng(6).permutation(len(y))
    first, held, new = np.split(order, [700, 1250])
    model = GaussianNB().fit(X[first], y[first])
    utility, loss = Utility.one_hot(Classes.from_labels(y[first])), {}
    assert model.predict_log_proba(X[new]).min() < -1e5
    for kind in (
        "temperature",
        "bias-corrected-temperature",
        "power-temperature",
        "matrix-scaling",
        "auto",
    ):
        decider = Decider(utility, calibration=kind, train_prior="train")
        decider = decider.fit(model.predict_log_proba(X[held]), y[held], logits=True)
        loss[kind] = nll(
            decider.probabilities(model.predict_log_proba(X[new]), logits=True), y[new]
        )
    assert loss["auto"] < min(loss.values()) + 0.01
    assert loss["auto"] < 0.65


def test_logits_are_as_far_apart_as_probabilities_can_be():
    z = np.array([[0.0, -1e6, -3.0], [5e8, 5e8 - 1, -1e300]])
    expected = [[0, -DEEPEST, -3], [5e8, 5e8 - 1, 5e8 - DEEPEST]]
    np.testing.assert_array_equal(safe_log(z, logits=True), expected)
    np.testing.assert_array_equal(z[0], [0, -1e6, -3])  # the argument is not changed
    assert np.exp(-DEEPEST) > np.finfo(np.float64).tiny

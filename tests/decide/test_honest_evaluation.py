"""Each test fails on a known mistake of evaluation; all use the public interface only.

What the mistakes gave: ECE of 42% in the tail of an exact posterior; intervals of ECE that never covered and excluded
their own estimate; "100% to 100%" for three of three; tail accuracy covered 57% of the time; unpaired comparisons; no
word about evaluating on the samples that calibrated.
"""

import warnings

import numpy as np
import pytest
from scipy.special import softmax

import rfdlc
from rfdlc import Classes, Decider, Predictions, Utility, evaluate

CLASSES = Classes.from_counts([900, 500, 280, 150, 85, 47, 26, 14, 8, 5])
PRIOR = np.array(CLASSES.counts) / sum(CLASSES.counts)
CENTRES = np.random.default_rng(5).normal(size=(10, 8))


def draw(samples, seed, sharpness=1.0):
    """Labels and probabilities of a Gaussian mixture; at sharpness 1 they are the exact posterior."""
    rng = np.random.default_rng(seed)
    y = rng.choice(10, samples, p=PRIOR)
    x = CENTRES[y] + rng.normal(size=(samples, 8))
    return y, softmax(sharpness * (x @ CENTRES.T - (CENTRES**2).sum(axis=1) / 2 + np.log(PRIOR)), axis=1)


def coverage(name, truth, draws=60, samples=100, sharpness=1.0):
    """How often the interval of a metric contains the truth, and how often its own estimate."""
    inside = []
    for seed in range(draws):
        y, p = draw(samples, seed, sharpness)
        result = evaluate(p, y, classes=CLASSES, bootstrap=50)
        bounds = result.intervals.get(name)
        if bounds is not None:
            low, high = bounds
            inside.append((low - 1e-9 <= truth <= high + 1e-9, low <= result.flat()[name] <= high))
    return np.mean(inside, axis=0)


@pytest.fixture(scope="module")
def truth():
    y, p = draw(100_000, 1000)
    return evaluate(p, y, classes=CLASSES).flat()


def test_the_exact_posterior_is_calibrated_in_every_predicted_region():
    y, p = draw(40_000, 0)
    for region, error in evaluate(p, y, classes=CLASSES).ece_by_region.items():
        assert error < 0.05, region  # 42% in the tail, where regions were those of the true class


def test_three_of_three_is_not_certain():
    low, high = evaluate([[0.9, 0.1]] * 3, [0, 0, 0], bootstrap=50).intervals["accuracy"]
    assert low < 0.6
    assert high == 1


def test_the_interval_of_ece_covers_0_for_a_calibrated_model_and_contains_its_estimate():
    covered, contained = coverage("ece", 0.0)
    assert covered > 0.85
    assert contained == 1


def test_the_accuracy_of_few_tail_samples_is_covered(truth):
    assert coverage("accuracy_by_region.tail", truth["accuracy_by_region.tail"])[0] > 0.85


@pytest.mark.parametrize("name", ["risk_coverage_area", "utility_gap", "balanced_accuracy", "false_head_rate"])
def test_intervals_at_a_hundred_samples_cover(truth, name):
    assert coverage(name, 0.0 if name == "utility_gap" else truth[name])[0] > 0.85


def test_intervals_need_no_resampling():
    y, p = draw(300, 3)
    named = set(evaluate(p, y, classes=CLASSES).intervals)
    assert named >= {"accuracy", "macro_f1", "false_head_rate", "ece", "error_auc", "risk_coverage_area", "utility_gap"}


def test_a_mean_of_too_few_samples_has_no_interval():
    y, p = draw(100, 4)
    predicted = np.isin(p.argmax(axis=1), CLASSES.thirds["tail"]).sum()
    assert 0 < predicted < 20
    assert "utility_gap_by_region.tail" not in evaluate(p, y, classes=CLASSES).intervals


def test_differences_are_paired():
    y, p = draw(500, 7)
    _, sharp = draw(500, 7, 1.3)
    a, b = (Predictions(probabilities=each, targets=y, classes=CLASSES) for each in (p, sharp))
    found = rfdlc.compare(a, b)
    for name in ("nll", "brier", "risk_coverage_area"):
        apart = [evaluate(each).intervals[name] for each in (a, b)]
        unpaired = np.hypot(*(high - low for low, high in apart))
        assert found[name].high - found[name].low < 0.6 * unpaired, name


def test_evaluating_on_what_calibrated_is_reported():
    y, p = draw(400, 6, 2.5)
    decider = Decider(Utility.one_hot(CLASSES)).fit(p[:200], y[:200])
    with pytest.warns(UserWarning, match="samples that calibrated"):
        assert evaluate(p[:200], y[:200], decider).calibration_overlap == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert evaluate(p[200:], y[200:], decider).calibration_overlap == 0

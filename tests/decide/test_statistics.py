"""Calibration and priors against a known posterior: each test fails on a known statistical mistake."""

import numpy as np
import pytest

from rfdlc import Classes, Decider, Utility
from rfdlc.decide.calibrators import CALIBRATORS
from rfdlc.decide.priors import estimate_prior

COUNTS = np.geomspace(1000, 10, 10).round().astype(int)
CLASSES = Classes.from_counts(COUNTS.tolist())
UTILITY = Utility.tail_sensitive(CLASSES, -1).with_abstain(0.2)
TRAIN, UNIFORM = CLASSES.prior, np.full(10, 0.1)


def draw(prior, size, seed, spread=1.2):
    """Log likelihoods of a Gaussian mixture in five dimensions, and labels."""
    means = np.random.default_rng(100).normal(size=(10, 5)) * spread
    rng = np.random.default_rng(seed)
    y = rng.choice(10, size, p=prior)
    x = means[y] + rng.normal(size=(size, 5))
    return -((x[:, None] - means) ** 2).sum(axis=2) / 2, y


def over_confident(log_likelihood):
    return 2.5 * (log_likelihood + np.log(TRAIN))


def regret(decider, log_likelihood, prior):
    exact = np.exp(log_likelihood - log_likelihood.max(axis=1, keepdims=True)) * prior
    values = exact / exact.sum(axis=1, keepdims=True) @ UTILITY.matrix
    actions = decider.decide(over_confident(log_likelihood), logits=True)
    return (values.max(axis=1) - values[np.arange(len(values)), actions]).mean()


def fitted(kind, prior, size, seed, **options):
    log_likelihood, y = draw(prior, size, seed)
    return Decider(UTILITY, calibration=kind, train_prior="train").fit(
        over_confident(log_likelihood), y, logits=True, **options
    )


def test_a_balanced_held_out_set_does_not_spoil_the_temperature():
    for seed in range(3):
        decider = fitted("temperature", UNIFORM, 1000, seed)
        assert decider.fitted.temperature == pytest.approx(2.5, rel=0.15)  # 5.3 where the two priors are taken for one
        assert regret(decider.replace(target_prior="train"), draw(TRAIN, 3000, 50)[0], TRAIN) < 0.005


@pytest.mark.parametrize("prior", [TRAIN, UNIFORM], ids=["long-tailed", "balanced"])
def test_the_prior_after_fitting_biases_is_that_of_the_calibrated_probabilities(prior):
    test = draw(TRAIN, 3000, 51)[0]
    kind = "bias-corrected-temperature"
    mean = [regret(fitted(kind, prior, 200, s).replace(target_prior=TRAIN), test, TRAIN) for s in range(4)]
    assert np.mean(mean) < 0.015
    estimate = fitted(kind, prior, 1000, 9).estimate_prior(over_confident(test), logits=True)
    assert np.abs(estimate.prior - TRAIN).sum() / 2 < 0.06
    assert (estimate.prior / TRAIN)[TRAIN > 0.01].min() > 0.3  # no class of the test data is thrown away


def test_balanced_weights_are_penalised_by_their_effective_sample_size():
    test = draw(UNIFORM, 3000, 52)[0]
    kind, found = "bias-corrected-temperature", []
    for seed in range(4):
        decider = fitted(kind, TRAIN, 200, seed, balanced=True)
        found.append(regret(decider.replace(target_prior=UNIFORM), test, UNIFORM))
    assert np.mean(found) < 0.05


@pytest.mark.parametrize("size", [10, 100])
def test_small_files_keep_their_classes(size):
    decider = fitted("temperature", TRAIN, 1000, 1)
    lost = []
    for seed in range(10):
        log_likelihood, _ = draw(TRAIN, size, 60 + seed)
        estimate = decider.estimate_prior(over_confident(log_likelihood), logits=True)
        known, estimated = (
            regret(decider.replace(target_prior=prior), log_likelihood, TRAIN) for prior in (TRAIN, estimate)
        )
        lost.append(estimated - known)
    assert np.mean(lost) < 0.025


def test_the_calibrator_is_chosen_by_cross_validated_likelihood():
    chosen = fitted("auto", TRAIN, 400, 2)
    assert chosen.fitted.chosen == "temperature"
    assert "chosen by cross-validated loss" in repr(chosen)
    rng = np.random.default_rng(0)
    y = rng.choice(10, 3000, p=TRAIN)
    biased = np.log(np.full((3000, 10), 0.05) + 0.5 * np.eye(10)[y]) + 3 * np.eye(10)[0]  # leans to one class
    found = CALIBRATORS["auto"].fit(biased - np.log(np.exp(biased).sum(axis=1, keepdims=True)), y)
    assert found.chosen in ("bias-corrected-temperature", "matrix-scaling")
    assert found.losses[found.chosen] < found.losses["temperature"] - 0.05
    again = CALIBRATORS["auto"].from_dict(found.to_dict())
    assert np.array_equal(again.as_affine()[1], found.as_affine()[1])


@pytest.mark.parametrize(("size", "most"), [(100, 0.985), (1000, 0.985)])
def test_intervals_of_an_estimated_prior_cover_it(size, most):
    rng, inside = np.random.default_rng(3), []
    for seed in range(60):
        truth = rng.dirichlet(np.full(10, 1.0))
        log_likelihood, _ = draw(truth, size, 200 + seed)
        p = np.exp(log_likelihood - log_likelihood.max(axis=1, keepdims=True)) * TRAIN
        low, high = estimate_prior(p / p.sum(axis=1, keepdims=True), TRAIN).interval()
        inside.append((low <= truth) & (truth <= high))
    assert 0.9 < np.mean(inside) < most

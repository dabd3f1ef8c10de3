"""Calibration and priors on synthetic data whose truth is known."""

import warnings

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy.optimize import minimize, minimize_scalar
from scipy.special import log_softmax, softmax
from scipy.stats import poisson

from rfdlc import Classes, Decider, InputError, Predictions, Utility, evaluate
from rfdlc.probabilities import fitting
from rfdlc.probabilities.calibrators import CALIBRATORS, BiasCorrectedTemperature
from rfdlc.probabilities.choosing import FOLDS, grouped_folds, stratified_folds
from rfdlc.probabilities.fitting import (
    CAUTION,
    COLDEST,
    HOTTEST,
    LOG_T_MEAN,
    LOG_T_SPREAD,
    SPREADS,
    HeldOut,
    not_held_out,
)
from rfdlc.probabilities.scores import CorrectedProbabilities


def sample(rng, n, prior, sharpness=1.0, separation=2.0):
    """Labels from `prior`, and logits whose softmax is the true posterior under that
    prior, times `sharpness`.
    """
    classes = len(prior)
    y = rng.choice(classes, n, p=prior)
    x = rng.normal(size=(n, classes))
    x[np.arange(n), y] += separation
    return (
        separation * x * sharpness + sharpness * np.log(prior),
        y,
    )  # log p(x|y) + log p(y), up to a constant


def nll(log_p, y, weights=None):
    return -np.average(log_p[np.arange(len(y)), y], weights=weights)


def cautious(z, y, weights=None):
    """The most probable temperature under a Gaussian on log T, and some standard errors
    more.
    """
    size = (
        len(y) if weights is None else weights.sum() ** 2 / (weights**2).sum()
    )  # the effective sample size

    def loss(s):
        prior = ((s - LOG_T_MEAN) / LOG_T_SPREAD) ** 2 / 2
        return size * nll(log_softmax(z / np.exp(s), axis=1), y, weights) + prior

    best = minimize_scalar(loss, bounds=(-2, 2), method="bounded").x
    return np.exp(
        best
        + CAUTION
        / np.sqrt((loss(best + 0.02) - 2 * loss(best) + loss(best - 0.02)) / 0.02**2)
    )


def test_temperature_is_the_most_probable_one_and_a_standard_error_more():
    rng = np.random.default_rng(0)
    z, y = sample(rng, 2000, [0.6, 0.3, 0.1], sharpness=3)
    fitted = CALIBRATORS["temperature"].fit(z, y).temperature
    assert fitted == pytest.approx(cautious(z, y), rel=1e-3)
    assert fitted == pytest.approx(3, rel=0.1)


def test_class_balanced_temperature_weights_the_likelihood_and_its_sample_size():
    rng = np.random.default_rng(1)
    z, y = sample(rng, 2000, [0.9, 0.08, 0.02], sharpness=2)
    weights = 1 / np.bincount(y)[y]
    fitted = CALIBRATORS["temperature"].fit(z, y, balanced=True).temperature
    assert fitted == pytest.approx(cautious(z, y, weights), rel=1e-3)


def test_temperature_and_power_are_the_most_probable_ones():
    rng = np.random.default_rng(5)
    z, y = sample(rng, 1500, [0.5, 0.3, 0.2], sharpness=2)
    distance = -log_softmax(z, axis=1)

    def loss(parameters):
        temperature, power = np.exp(parameters)
        drift = (parameters[0] - LOG_T_MEAN) ** 2 + parameters[1] ** 2
        scores = log_softmax(-((distance / temperature) ** power), axis=1)
        return len(y) * nll(scores, y) + drift / LOG_T_SPREAD**2 / 2

    best = np.exp(
        minimize(
            loss,
            [0.5, 0.1],
            method="Nelder-Mead",
            options={"xatol": 1e-6, "fatol": 1e-9},
        ).x
    )
    fitted = CALIBRATORS["power-temperature"].fit(z, y)
    np.testing.assert_allclose([fitted.temperature, fitted.power], best, rtol=1e-3)


def test_a_power_and_what_the_model_leans_to_the_head_are_fitted_together():
    rng = np.random.default_rng(8)
    counts = np.array([400, 40, 4])
    z, y = sample(rng, 3000, [1 / 3] * 3, sharpness=2)
    z = z + 0.8 * np.log(counts)  # a model that leans to the head
    distance, direction = (
        -log_softmax(z, axis=1),
        np.log(counts).mean() - np.log(counts),
    )

    def loss(parameters):
        temperature, power = np.exp(parameters[:2])
        drift = (
            (parameters[0] - LOG_T_MEAN) ** 2 + parameters[1] ** 2
        ) / LOG_T_SPREAD**2 + parameters[2] ** 2
        scores = -((distance / temperature) ** power) + parameters[2] * direction
        return len(y) * nll(log_softmax(scores, axis=1), y) + drift / 2

    options = {"xatol": 1e-6, "fatol": 1e-9, "maxiter": 2000}
    best = minimize(loss, [0.5, 0.1, 0.2], method="Nelder-Mead", options=options).x
    fitted = CALIBRATORS["prior-corrected-power"].fit(z, y, training_counts=counts)
    np.testing.assert_allclose(
        [fitted.temperature, fitted.power], np.exp(best[:2]), rtol=2e-3
    )
    np.testing.assert_allclose(fitted.bias, best[2] * direction, atol=2e-3)
    expected = softmax(
        -((distance / fitted.temperature) ** fitted.power) + fitted.bias, axis=1
    )
    np.testing.assert_allclose(fitted.apply(z), expected, rtol=1e-9)
    np.testing.assert_allclose(fitted.prior, expected.mean(axis=0), atol=0.02)


def test_a_power_mends_what_a_temperature_cannot_and_keeps_the_order():
    """Each class has a little probability that it should not have."""
    rng = np.random.default_rng(6)
    z, y = sample(rng, 6000, np.full(20, 0.05), separation=2)
    p = 0.7 * softmax(z, axis=1) + 0.3 / 20
    held, new = slice(None, 3000), slice(3000, None)
    loss, error = {}, {}
    for name in ("temperature", "power-temperature"):
        decider = Decider(Utility.one_hot(20), calibration=name).fit(p[held], y[held])
        found = np.asarray(decider.probabilities(p[new]))
        loss[name], error[name] = (
            nll(np.log(found), y[new]),
            evaluate(p[new], y[new], decider).ece,
        )
        assert (np.argsort(found, axis=1) == np.argsort(p[new], axis=1)).all()
        again = Decider.from_dict(decider.to_dict())
        np.testing.assert_array_equal(np.asarray(again.probabilities(p[new])), found)
    exact = nll(log_softmax(z[new], axis=1), y[new])
    assert loss["power-temperature"] - exact < (loss["temperature"] - exact) / 2
    assert error["power-temperature"] < 0.6 * error["temperature"]


def test_a_power_of_one_is_a_temperature():
    z = np.random.default_rng(7).normal(size=(5, 4))
    same = [
        CALIBRATORS[name](1.7).apply(z) for name in ("temperature", "power-temperature")
    ]
    np.testing.assert_allclose(same[0], same[1], rtol=1e-12)
    with pytest.raises(InputError, match="power -1 cannot be used"):
        Decider(
            Utility.one_hot(4),
            calibrator=CALIBRATORS["power-temperature"](1.0, power=-1),
        )
    with pytest.raises(
        InputError, match="sum inf: expected finite"
    ):  # 1e-300^-4 is more than a float can hold
        Decider(
            Utility.one_hot(4),
            calibrator=CALIBRATORS["power-temperature"](1e-300, power=4.0),
        )
    with pytest.raises(
        InputError, match="'prior-corrected-power' needs training counts"
    ):
        CALIBRATORS["prior-corrected-power"].fit(z, np.arange(5) % 4)


def test_over_confidence_is_mended_on_the_other_half():
    rng = np.random.default_rng(2)
    z, y = sample(rng, 8000, np.full(5, 0.2), sharpness=4, separation=1.2)
    decider = Decider(Utility.one_hot(5)).fit(z[:4000], y[:4000], logits=True)
    before = evaluate(z[4000:], y[4000:], utility=Utility.one_hot(5), logits=True).ece
    after = evaluate(z[4000:], y[4000:], decider, logits=True).ece
    assert before > 0.1
    assert after < 0.02


def test_bias_corrected_temperature_recovers_scale_and_biases():
    rng = np.random.default_rng(3)
    z, y = sample(rng, 20_000, [0.5, 0.3, 0.2], sharpness=2)
    shift = np.array([1.0, 0.0, -1.0])
    fitted = CALIBRATORS["bias-corrected-temperature"].fit(z - shift, y)
    bias = np.array(fitted.bias)
    assert fitted.temperature == pytest.approx(2, rel=0.05)
    assert bias - bias.mean() == pytest.approx(
        shift / 2, abs=0.1
    )  # scores are divided by 2, so the shift is too
    assert fitted.prior == pytest.approx([0.5, 0.3, 0.2], abs=0.02)


def brute_force(z, y, directions, spread, weights=None):
    """log T, its standard error, the factors of the directions and minus the log
    posterior, by general methods.
    """
    size = len(y) if weights is None else weights.sum() ** 2 / (weights**2).sum()

    def loss(log_t, factors):
        log_p = log_softmax(z / np.exp(log_t) + np.array(factors) @ directions, axis=1)
        drift = ((log_t - LOG_T_MEAN) / LOG_T_SPREAD) ** 2 + (
            np.array(factors) ** 2
        ).sum() / spread**2
        return size * nll(log_p, y, weights) + drift / 2

    best = minimize(
        lambda x: loss(x[0], x[1:]),
        np.zeros(1 + len(directions)),
        options={"gtol": 1e-6},
    )
    around = [
        minimize(lambda x, s=s: loss(best.x[0] + s, x), best.x[1:]).fun - best.fun
        for s in (-0.05, 0.05)
    ]
    return best.x[0], 0.05 / np.sqrt(sum(around)), best.x[1:], best.fun, loss


def test_bias_corrected_is_the_most_probable_under_each_spread():
    rng = np.random.default_rng(4)
    z, y = sample(rng, 300, [0.5, 0.3, 0.2], sharpness=2)
    z = log_softmax(z, axis=1)
    found = HeldOut(z, y)._most_probable(
        BiasCorrectedTemperature.directions(y, 3), SPREADS
    )
    for spread, (log_t, error, bias, _) in zip(SPREADS, found, strict=True):
        expected = brute_force(z, y, np.eye(3), spread)
        assert (log_t, error) == pytest.approx(expected[:2], rel=0.01)
        assert bias == pytest.approx(expected[2], abs=1e-3)


def test_spreads_of_biases_are_as_probable_as_integrals_over_the_parameters_say():
    rng = np.random.default_rng(12)
    z, y = sample(rng, 300, [0.5, 0.3, 0.2], sharpness=2)
    counts, weights = np.array([500, 50, 5]), 1 / np.bincount(y)[y]
    direction = np.log(counts).mean() - np.log(counts)
    evidence, log_ts, factors = [], [], []
    for spread in SPREADS:
        log_t, error, factor, least, loss = brute_force(
            z, y, direction[None], spread, weights
        )
        log_ts.append(log_t + CAUTION * error)
        factors.append(factor[0])
        grid = np.exp(
            [
                [least - loss(t, [d]) for t in log_t + np.linspace(-0.5, 0.5, 41)]
                for d in np.linspace(-1, 1, 161)
            ]
        )
        evidence.append(np.log(grid.sum() / spread) - least)
    probable = (
        np.exp(evidence - np.max(evidence)) / np.exp(evidence - np.max(evidence)).sum()
    )
    assert probable.min() > 0.05
    assert probable.max() < 0.9
    fitted = CALIBRATORS["prior-corrected-temperature"].fit(
        z, y, training_counts=counts, balanced=True
    )
    assert fitted.temperature == pytest.approx(np.exp(probable @ log_ts), rel=0.01)
    assert fitted.bias == pytest.approx(probable @ factors * direction, abs=0.01)


def test_biases_are_as_large_as_held_out_samples_say():
    found = []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        for size, shift in ((50, np.zeros(4)), (500, np.array([1.0, -1.0, 1.0, -1.0]))):
            z, y = sample(rng, size, [0.4, 0.3, 0.2, 0.1], sharpness=2)
            bias = np.array(
                CALIBRATORS["bias-corrected-temperature"].fit(z - 2 * shift, y).bias
            )
            found.append(np.abs(bias - bias.mean() - shift).mean())
    assert (
        np.mean(found[::2]) < 0.12
    )  # none: unit Gaussians on the biases leave twice as much
    assert np.mean(found[1::2]) < 0.25


@pytest.mark.parametrize(
    "basis",
    [None, np.array([[1.0, -0.5, 0.2, 0.0]]), np.eye(4)[[0, 2]], np.zeros((0, 4))],
)
@pytest.mark.parametrize("trust", [0.0, 0.3])
def test_loss_and_misfit_have_the_derivatives_of_finite_differences(basis, trust):
    rng = np.random.default_rng(3)
    z, y = sample(rng, 40, [0.4, 0.3, 0.2, 0.1], sharpness=2)
    prior = np.array([0.1, 0.2, 0.3, 0.4])
    held_out = HeldOut(log_softmax(z, axis=1), y, train_prior=prior, balanced=True)
    _, variance = held_out.prior_misfit(softmax(z, axis=1))
    spanned = np.eye(4) if basis is None else basis
    at = rng.normal(size=1 + len(spanned)) / 2

    def naive(parameters):
        scores = z * np.exp(-parameters[0]) + parameters[1:] @ spanned
        mean = held_out.weights @ held_out.reweighted(scores)
        likelihood = nll(
            log_softmax(scores + held_out.offset, axis=1), y, held_out.weights
        )
        return likelihood + trust * ((mean / prior - 1) ** 2 / variance).sum() / 2

    def expansion(parameters):
        return held_out.expansion(
            parameters[0], parameters[1:] @ spanned, trust, variance, basis
        )

    value, slopes, curvature = expansion(at)
    assert value == pytest.approx(naive(at))
    for step, slope, bent in zip(
        1e-5 * np.eye(len(at)), slopes, curvature, strict=True
    ):
        assert slope == pytest.approx(
            (naive(at + step) - naive(at - step)) / 2e-5, rel=1e-5, abs=1e-8
        )
        assert bent == pytest.approx(
            (expansion(at + step)[1] - expansion(at - step)[1]) / 2e-5,
            rel=1e-5,
            abs=1e-8,
        )


@pytest.mark.parametrize(
    "sharpness", [0.4, 2.0, 8.0]
)  # where the start is not convex, too
@pytest.mark.parametrize("train_prior", [None, np.array([0.7, 0.2, 0.1])])
def test_newton_finds_the_optimum_of_a_quasi_newton_method(
    monkeypatch, sharpness, train_prior
):
    z, y = sample(np.random.default_rng(14), 60, [0.4, 0.3, 0.3], sharpness)
    held_out = HeldOut(log_softmax(z, axis=1), y, train_prior=train_prior)
    directions = BiasCorrectedTemperature.directions(y, 3)
    found, matrix = (
        held_out._most_probable(directions, SPREADS),
        held_out.matrix_and_bias(),
    )
    monkeypatch.setattr(fitting, "MOST_NEWTON", -1)
    monkeypatch.setattr(fitting, "MOST_ENTRIES", -1)
    for exact, other in zip(
        found, held_out._most_probable(directions, SPREADS), strict=True
    ):
        assert exact[0] == pytest.approx(other[0], abs=1e-5)
        assert exact[1] == pytest.approx(other[1], rel=0.01)  # by differences there
        assert exact[2] == pytest.approx(other[2], abs=1e-5)
        assert exact[3] == pytest.approx(other[3], abs=1e-5)
    for exact, other in zip(matrix, held_out.matrix_and_bias(), strict=True):
        assert exact == pytest.approx(other, abs=2e-3)


def test_prior_corrected_temperature_finds_how_far_a_model_leans_to_the_head():
    rng = np.random.default_rng(11)
    z, y = sample(rng, 20_000, np.full(4, 0.25), sharpness=2)
    counts = np.array(
        [1000, 200, 50, 0]
    )  # a class without training samples counts as if it had one
    lean = 0.4 * np.log(np.maximum(counts, 1))
    fitted = CALIBRATORS["prior-corrected-temperature"].fit(
        z + 2 * lean, y, training_counts=counts
    )
    bias = np.array(fitted.bias)
    assert fitted.temperature == pytest.approx(2, rel=0.05)
    assert bias - bias[0] == pytest.approx(lean[0] - lean, abs=0.15)
    assert fitted.prior == pytest.approx(np.full(4, 0.25), abs=0.02)


def test_prior_corrected_temperature_needs_training_counts():
    decider = Decider(Utility.one_hot(2), calibration="prior-corrected-temperature")
    with pytest.raises(InputError, match="needs training counts"):
        decider.fit([[0.9, 0.1], [0.3, 0.7]], [0, 1])


@pytest.mark.parametrize("kind", ["temperature", "bias-corrected-temperature"])
@pytest.mark.parametrize("balanced", [False, True])
def test_absent_classes_are_no_obstacle(kind, balanced):
    rng = np.random.default_rng(5)
    z, y = sample(rng, 400, [0.5, 0.3, 0.2])
    z = np.column_stack(
        [z, rng.normal(size=(400, 2))]
    )  # two classes that the held-out part lacks
    fitted = CALIBRATORS[kind].fit(z, y, balanced=balanced)
    assert np.isfinite(fitted.temperature)
    if fitted.bias is not None:
        assert fitted.bias[3:] == (0, 0)
        assert min(fitted.prior) > 0


def without_the_last_class(size=3000):
    """Logits of five classes, twice too large, and labels without the last; the prior
    of the other four.
    """
    rng, prior = np.random.default_rng(3), np.array([0.5, 0.3, 0.12, 0.07, 0.01])
    log_p = log_softmax(rng.normal(0, 1.5, (size, 5)) + np.log(prior), axis=1)
    y = (softmax(log_p, axis=1).cumsum(axis=1) < rng.random((size, 1))).sum(axis=1)
    kept = y < 4
    return 2 * log_p[kept], y[kept], np.append(prior[:4] / prior[:4].sum(), 0)


@pytest.mark.parametrize(
    "kind",
    [
        "temperature",
        "bias-corrected-temperature",
        "power-temperature",
        "matrix-scaling",
    ],
)
def test_a_class_without_share_and_samples_takes_no_part(kind):
    logits, y, prior = without_the_last_class()
    log_p = log_softmax(logits, axis=1)
    own = (
        log_p if kind == "matrix-scaling" else log_softmax(logits[:, :4], axis=1)
    )  # only matrices see the scale
    found = CALIBRATORS[kind].fit(log_p, y, train_prior=prior)
    alone = CALIBRATORS[kind].fit(own[:, :4], y, train_prior=prior[:4])
    for each, expected in zip(found.as_affine(), alone.as_affine(), strict=True):
        kept = np.asarray(each)[(slice(4),) * np.ndim(each)]
        np.testing.assert_allclose(kept, expected, atol=1e-3)
    if found.prior is not None:
        assert found.prior[4] == 0
        np.testing.assert_allclose(found.prior[:4], alone.prior, rtol=1e-3)


@pytest.mark.parametrize("kind", ["temperature", "auto"])
def test_a_decider_warns_of_a_class_without_share_and_calibrates_the_others(kind):
    logits, y, prior = without_the_last_class()
    decider = Decider(Utility(np.eye(5)), train_prior=prior, calibration=kind)
    with pytest.warns(UserWarning, match="held-out samples have none of 4") as told:
        fitted = decider.fit(logits, y, logits=True)
    assert len(told) == 1
    true = softmax(
        logits / 2, axis=1
    )  # the last class too: its logit is as much too large
    assert (
        np.abs(np.asarray(fitted.probabilities(logits, logits=True)) - true).mean()
        < 0.01
    )
    with pytest.raises(InputError, match="training prior of 4 is 0"):
        fitted.replace(target_prior="uniform").decide(logits, logits=True)


def test_held_out_samples_of_a_class_without_share_are_fitted_as_they_are():
    logits, y, prior = without_the_last_class()
    y = np.where(np.arange(len(y)) < 20, 4, y)
    found = CALIBRATORS["temperature"].fit(logits, y, train_prior=prior)
    assert (
        1.7 < found.temperature < 2.2
    )  # 2 is true, but for the labels that were changed


def test_auto_with_one_sample_or_without_weight_is_a_temperature():
    one = Decider(Utility.one_hot(3)).fit([[0.5, 0.3, 0.2]], [0]).model.calibrator
    assert one.losses == {}  # with one candidate, nothing is cross-validated
    assert str(one).endswith("(too few samples or groups to choose)")
    weights = np.where(
        np.arange(300) % 5 < 1, 1.0, 0.0
    )  # of every fifth sample, which would all be in one fold
    z, y = sample(np.random.default_rng(6), 300, np.full(3, 1 / 3), sharpness=2)
    order = np.argsort(y, kind="stable")
    weighted = CALIBRATORS["auto"].fit(
        log_softmax(z[order], axis=1), y[order], sample_weight=weights
    )
    alone = CALIBRATORS["auto"].fit(log_softmax(z[order][::5], axis=1), y[order][::5])
    assert weighted.weights == pytest.approx(alone.weights)
    for found, expected in zip(weighted.as_affine(), alone.as_affine(), strict=True):
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("calibration", sorted(CALIBRATORS))
@hypothesis.settings(deadline=None, max_examples=6)
@hypothesis.given(
    st.integers(0, 999),
    st.integers(2, 4),
    st.integers(1, 2),
    st.sampled_from([0.0, 1.0, 6.0]),
    st.booleans(),
)
def test_weights_are_repetitions(calibration, seed, classes, particles, step, grouped):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(15, 120))
    y = rng.choice(classes, size)
    z = 2 * rng.normal(size=(particles, size, classes))
    z[:, np.arange(size), y] += 1.5
    if step:  # coarse scores, which samples share
        z = np.round(z / step) * step
    repeats = rng.integers(0, 4, size)
    repeats[0] = 1
    groups = rng.integers(0, 8, size) if grouped else np.arange(size)
    counts = rng.integers(5, 100, classes).tolist()
    decider = Decider(
        Utility.one_hot(Classes.from_counts(counts)),
        calibration=calibration,
        train_prior="train",
        weights=rng.random(particles) if particles > 1 else None,
    )
    options = {"logits": True, "balanced": seed % 2 == 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weighted = decider.fit(
            z, y, sample_weight=repeats, groups=groups if grouped else None, **options
        )
        repeated = decider.fit(
            z.repeat(repeats, axis=1),
            y.repeat(repeats),
            groups=groups.repeat(repeats) if grouped else None,
            **options,
        )
    np.testing.assert_allclose(
        weighted.probabilities(z, logits=True),
        repeated.probabilities(z, logits=True),
        atol=1e-9,
    )
    np.testing.assert_allclose(
        weighted.model.joint, repeated.model.joint, rtol=1e-5, atol=1e-6
    )


def test_out_of_fold_copies_of_a_sample_are_held_out_together():
    z, y = sample(np.random.default_rng(3), 60, [0.5, 0.3, 0.2])
    fold = stratified_folds(z[None].repeat(4, axis=1), y.repeat(4), 5)
    assert (fold.reshape(60, 4) == fold[::4, None]).all()
    assert np.bincount(fold).tolist() == [48] * 5


def test_samples_with_the_coarse_scores_of_a_tree_are_no_copies():
    rng = np.random.default_rng(5)
    leaf = rng.integers(0, 2, 400)
    y = (rng.random(400) < np.array([0.2, 0.7])[leaf]).astype(int)
    p = np.array([[0.9, 0.1], [0.1, 0.9]])[leaf]
    fold = stratified_folds(p[None], y, 5)
    counts = np.zeros((5, 2, 2))
    np.add.at(counts, (fold, leaf, y), 1)
    assert (counts > 0).all()  # each fold has both classes of both leaves
    decider = Decider(Utility.one_hot(2)).fit(p, y)
    found = np.asarray(decider.probabilities(p))[:, 1]
    assert [found[leaf == k].mean() for k in (0, 1)] == pytest.approx(
        [y[leaf == k].mean() for k in (0, 1)], abs=0.05
    )


def test_auto_does_not_depend_on_the_order_of_the_classes():
    z, y = sample(np.random.default_rng(7), 150, [0.5, 0.3, 0.2], sharpness=2)
    turned = np.array([2, 0, 1])  # class c becomes turned[c]
    found = CALIBRATORS["auto"].fit(log_softmax(z, axis=1), y)
    other = CALIBRATORS["auto"].fit(
        log_softmax(z[:, np.argsort(turned)], axis=1), turned[y]
    )
    assert other.weights == pytest.approx(found.weights, abs=1e-4)
    assert other.apply(z[:, np.argsort(turned)])[:, turned] == pytest.approx(
        found.apply(z), abs=1e-4
    )


def test_a_few_samples_that_are_all_right_do_not_make_a_model_certain():
    z = np.eye(3)[[0, 1, 2]] * 2
    assert 0.5 < CALIBRATORS["temperature"].fit(z, np.array([0, 1, 2])).temperature < 2


def test_a_broken_model_stays_within_bounds_and_is_warned_of():
    z = np.eye(3)[np.arange(3000) % 3] * 2
    with pytest.warns(
        UserWarning, match="temperature 112.* is unusual .below 0.05 or above 20"
    ):
        fitted = CALIBRATORS["temperature"].fit(z, (np.arange(3000) + 1) % 3)
    assert COLDEST <= fitted.temperature <= HOTTEST


def test_zero_probabilities_are_no_obstacle():
    decider = Decider(Utility.one_hot(2)).fit(
        [[1, 0], [0, 1], [1, 0], [0, 1], [0.5, 0.5], [1, 0]], [0, 1, 0, 1, 0, 1]
    )
    assert np.isfinite(decider.probabilities([[1, 0], [0, 1]])).all()


TRAIN, TARGET = np.array([0.7, 0.2, 0.08, 0.02]), np.array([0.1, 0.2, 0.3, 0.4])


@pytest.fixture(scope="module")
def shifted():
    """Posteriors under the training prior, of samples from the target prior."""
    rng = np.random.default_rng(6)
    z, y = sample(rng, 20_000, TARGET)
    return z - np.log(TARGET) + np.log(TRAIN), y


def test_em_recovers_a_shifted_prior(shifted):
    z, _ = shifted
    decider = Decider(Utility.one_hot(4), train_prior=TRAIN)
    estimate = decider.estimate_prior(z, logits=True)
    assert np.abs(estimate.prior - TARGET).sum() / 2 < 0.02
    assert estimate.check is None  # no held-out labels were given


def test_em_agrees_with_bbse_after_fitting(shifted):
    rng = np.random.default_rng(7)
    z, _ = shifted
    held_out, y = sample(rng, 20_000, TRAIN)
    for kind in ("temperature", "bias-corrected-temperature"):
        decider = Decider(Utility.one_hot(4), calibration=kind, train_prior=TRAIN).fit(
            held_out, y, logits=True
        )
        estimate = decider.estimate_prior(z, logits=True)
        assert np.abs(estimate.prior - TARGET).sum() / 2 < 0.02
        assert np.abs(estimate.check - TARGET).sum() / 2 < 0.04
        assert estimate.disagreement < 0.04


def test_a_wrong_training_prior_is_warned_of(shifted):
    rng = np.random.default_rng(8)
    held_out, y = sample(rng, 20_000, TRAIN)
    mistaken = Decider(Utility.one_hot(4), train_prior="uniform").fit(
        held_out, y, logits=True
    )
    with pytest.warns(UserWarning, match="by likelihood and BBSE.*differ by"):
        mistaken.estimate_prior(shifted[0], logits=True)


def test_an_estimate_stays_behind_the_target_prior_that_it_gave(shifted):
    decider = Decider(Utility.one_hot(4), train_prior=TRAIN)
    estimate = decider.estimate_prior(shifted[0][:500], logits=True)
    estimated = decider.replace(target_prior=estimate)
    assert estimated.model.estimate is estimate
    moved = estimated.replace(rule="argmax")
    assert moved.replace(utility=Utility.one_hot(4)).model.estimate is estimate
    assert "estimated" in moved.model.decided_for
    for other in (None, "uniform"):
        assert estimated.replace(target_prior=other).model.estimate is None


def test_correction_equals_bayes_rule(shifted):
    z, y = shifted
    corrected = Decider(
        Utility.one_hot(4), train_prior=TRAIN, target_prior=TARGET
    ).probabilities(z, logits=True)
    naive = softmax(z, axis=1) * TARGET / TRAIN
    assert np.asarray(corrected) == pytest.approx(
        naive / naive.sum(1, keepdims=True), abs=1e-12
    )
    plain = evaluate(z, y, utility=Utility.one_hot(4), logits=True).accuracy
    better = evaluate(
        z,
        y,
        Decider(Utility.one_hot(4), train_prior=TRAIN, target_prior=TARGET),
        logits=True,
    ).accuracy
    assert better > plain + 0.05


class TestNeverTwice:
    decider = Decider(Utility.one_hot(4), train_prior=TRAIN, target_prior="uniform")

    def test_corrected_probabilities_are_refused_everywhere(self, shifted):
        corrected = self.decider.probabilities(shifted[0], logits=True)
        other = Decider(Utility.one_hot(4), train_prior=TRAIN, target_prior="uniform")
        piece = corrected[:10]
        for use in (
            lambda p: other.decide(p),
            lambda p: other.probabilities(p),
            lambda p: other.explain(p),
            lambda p: other.fit(p, [0] * len(p)),
            lambda p: other.estimate_prior(p),
            lambda p: Predictions(probabilities=p),
            lambda p: evaluate(p, [0] * len(p)),
        ):
            for given in (corrected, piece, corrected[None]):
                with pytest.raises(
                    InputError, match="a second time would distort them"
                ):
                    use(given)

    def test_fitting_and_estimating_again_start_anew(self, shifted):
        z, _ = shifted
        held_out, y = sample(np.random.default_rng(10), 5000, TRAIN)
        once = Decider(Utility.one_hot(4), train_prior=TRAIN).fit(
            held_out, y, logits=True
        )
        twice = Decider(Utility.one_hot(4), train_prior=TRAIN).fit(
            held_out, y, logits=True
        )
        twice.fit(held_out, y, logits=True)
        assert once.model.calibrator == twice.model.calibrator
        first = once.replace(target_prior=once.estimate_prior(z, logits=True))
        again = first.replace(target_prior=first.estimate_prior(z, logits=True))
        assert first.model.target_prior == pytest.approx(
            again.model.target_prior, abs=1e-9
        )

    def test_uniform_after_reweighting_is_left_alone(self):
        p = np.array([[0.4, 0.3, 0.2, 0.1]])
        same = Decider(
            Utility.one_hot(4), train_prior="uniform", target_prior="uniform"
        ).probabilities(p)
        assert np.asarray(same) == pytest.approx(p)

    def test_biases_take_the_prior_of_held_out_data_into_account(self):
        rng = np.random.default_rng(11)
        z, y = sample(rng, 20_000, np.full(4, 0.25))
        biased = z + np.log(
            TRAIN
            # a model trained on the long tail, its biases fitted on balanced held-out
            # data
        )
        for given, carried in ((TRAIN, TRAIN), (None, np.full(4, 0.25))):
            decider = Decider(
                Utility.one_hot(4),
                calibration="bias-corrected-temperature",
                train_prior=given,
            )
            fitted = decider.fit(biased, y, logits=True)
            assert fitted.model.effective_prior == pytest.approx(carried, abs=0.01)
            p = fitted.replace(target_prior="uniform").probabilities(
                biased, logits=True
            )
            assert np.asarray(p) == pytest.approx(softmax(z, axis=1), abs=0.05)

    def test_the_training_prior_must_be_said(self):
        with pytest.raises(InputError, match="needs the training prior"):
            Decider(Utility.one_hot(4), target_prior="uniform", calibration=None)
        with pytest.raises(InputError, match="needs the training prior"):
            Decider(Utility.one_hot(4), target_prior="uniform").fit(np.eye(4), range(4))
        with pytest.raises(InputError, match="needs the training prior"):
            Decider(Utility.one_hot(4)).estimate_prior([[0.25] * 4])
        unfitted = Decider(
            Utility.one_hot(4),
            target_prior="uniform",
            calibration="bias-corrected-temperature",
        )
        with pytest.raises(InputError, match="needs the training prior"):
            unfitted.decide([[0.25] * 4])


def test_the_mark_goes_with_slices_but_not_with_other_numbers():
    p = np.full((3, 2), 0.5).view(CorrectedProbabilities)
    assert isinstance(p[:1], CorrectedProbabilities)
    assert type(p * 2) is np.ndarray
    assert type(p.sum(axis=1)) is np.ndarray
    assert isinstance(p.max(), float)


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        ("unifrom", "did you mean 'uniform'"),
        ([0.5, 0.5], r"shape \(2,\): expected one number per class \(4\)"),
        ([0.5, 0.5, -0.1, 0.1], "shares of 0 or more"),
        ([0, 0, 0, 0], "not all 0"),
        ([np.nan, 1, 1, 1], "shares of 0 or more"),
        (
            [0.5] * 4,
            (
                "target_prior sums to 2: expected shares that sum to 1, percentages"
                " that sum to 100, or counts"
            ),
        ),
        ({"a": 0.1, "b": 0.2, "c": 0.3, "d": 0.05}, "sums to 0.65"),
        ({"a": 1, "b": 1, "c": 1}, "no share for d"),
        ({"a": 1, "b": 1, "c": 1, "e": 1}, "class 'e' is not a class"),
    ],
)
def test_bad_priors(prior, message):
    with pytest.raises(InputError, match=message):
        Decider(
            Utility.one_hot(list("abcd")), train_prior="uniform", target_prior=prior
        )


@pytest.mark.parametrize(
    "prior",
    [[20, 30, 0, 50], [0.2, 0.3, 0, 0.5], [2, 3, 0, 5], [0.198, 0.297, 0, 0.495]],
)
def test_priors_are_shares_percentages_or_counts(prior):
    decider = Decider(
        Utility.one_hot(list("abcd")), train_prior="uniform", target_prior=prior
    )
    np.testing.assert_allclose(decider.model.target_prior, [0.2, 0.3, 0, 0.5])


def test_a_class_that_was_never_trained_cannot_be_corrected_for():
    classes = Classes.from_counts({"a": 5, "b": 0})
    decider = Decider(
        Utility.one_hot(classes), train_prior="train", target_prior="uniform"
    )
    with pytest.raises(InputError, match="training prior of b is 0"):
        decider.decide([[0.5, 0.5]])


def sites(rng, count, each, shift, common=0.0):
    """Samples of sites: each site has class frequencies of its own, and distorts logits
    in its own way.
    """
    classes, scores, labels = 6, [], []
    shared = np.eye(classes) + common * np.roll(np.eye(classes), 1, axis=1)
    for _ in range(count):
        y = rng.choice(classes, each, p=rng.dirichlet(np.ones(classes)))
        x = rng.normal(size=(each, classes))
        x[np.arange(each), y] += 2
        scores.append(
            x @ (shared + 0.3 * shift * rng.normal(size=shared.shape))
            + shift * rng.normal(size=classes)
        )
        labels.append(y)
    return (
        np.concatenate(scores),
        np.concatenate(labels),
        np.repeat([f"site {g}" for g in range(count)], each),
    )


@pytest.mark.parametrize("count", [3, 15])
def test_auto_by_groups_is_better_on_new_groups(count):
    auto, gained = Decider(Utility.one_hot(6)), []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        (x, y, groups), (new, new_y, _) = (
            sites(rng, count, 60, 1.5),
            sites(rng, 40, 50, 1.5),
        )
        leaking, grouped = (
            auto.fit(x, y, logits=True, groups=own) for own in (None, groups)
        )
        assert (
            leaking.model.calibrator.weights["matrix-scaling"] > 0.9
        )  # it knows the sites, which are in all folds
        assert grouped.model.calibrator.weights.get("matrix-scaling", 0) < 0.1
        losses = [
            nll(np.log(each.probabilities(new, logits=True)), new_y)
            for each in (leaking, grouped)
        ]
        gained.append(losses[0] - losses[1])
    assert min(gained) > 0.05  # nats


def test_auto_by_groups_still_finds_what_all_groups_share():
    x, y, groups = sites(np.random.default_rng(0), 20, 60, 0.0, common=0.9)
    assert (
        Decider(Utility.one_hot(6))
        .fit(x, y, logits=True, groups=groups)
        .model.calibrator.weights["matrix-scaling"]
        > 0.9
    )


def test_one_group_gives_a_temperature_and_groups_are_one_per_sample():
    x, y, groups = sites(np.random.default_rng(0), 1, 300, 1.5)
    auto = Decider(Utility.one_hot(6))
    assert auto.fit(x, y, logits=True, groups=groups).model.calibrator.weights == {
        "temperature": 1.0
    }
    with pytest.raises(
        InputError,
        match=r"groups have shape \(299,\): expected one label per sample, \(300,\)",
    ):
        auto.fit(x, y, logits=True, groups=groups[1:])


@pytest.mark.parametrize("seed", range(20))
def test_folds_keep_groups_whole_and_are_stratified(seed):
    rng = np.random.default_rng(seed)
    groups, y = (
        rng.integers(0, rng.integers(2, 80), 400),
        rng.choice(4, 400, p=[0.6, 0.2, 0.15, 0.05]),
    )
    fold = grouped_folds(y, groups)
    count = min(FOLDS, len(np.unique(groups)))
    assert sorted(set(fold)) == list(range(count))
    assert all(len(set(fold[groups == g])) == 1 for g in groups)
    if len(np.unique(groups)) > 40:
        shares = np.array(
            [np.bincount(y[fold == k], minlength=4) for k in range(count)]
        ) / np.bincount(y)
        assert np.abs(shares - 1 / count).max() < 0.12


def with_and_without_the_rarest(size=3000):
    """Probabilities, 1.5 times too sure, of seven classes, their labels, the posterior,
    and what is not of class 5.
    """
    rng, prior = (
        np.random.default_rng(8),
        np.array([0.55, 0.2, 0.1, 0.06, 0.045, 0.025, 0.02]),
    )
    centres, y = rng.normal(0, 1.1, (7, 5)), rng.choice(7, size, p=prior)
    x = centres[y] + rng.normal(size=(size, 5))
    log_p = log_softmax(
        np.log(prior) - ((x[:, None] - centres) ** 2).sum(axis=2) / 2, axis=1
    )
    return softmax(1.5 * log_p, axis=1), y, np.exp(log_p), y != 5


@pytest.mark.parametrize(
    "kind", ["auto", "temperature", "bias-corrected-temperature", "matrix-scaling"]
)
@pytest.mark.parametrize("known", [False, True])
def test_a_class_that_was_not_held_out_keeps_its_share(kind, known):
    p, y, posterior, kept = with_and_without_the_rarest()
    prior = np.bincount(y) / len(y) if known else None
    decider = Decider(
        Utility.one_hot(list("abcdefg")),
        calibration=kind,
        train_prior=prior,
        target_prior=prior,
    )
    with pytest.warns(
        UserWarning,
        match="held-out samples have none of 'f', which .* calibration='temperature'",
    ):
        found = np.asarray(decider.fit(p[kept], y[kept]).probabilities(p))
    assert found[:, 5].mean() == pytest.approx(posterior[:, 5].mean(), rel=0.2)
    by_all = np.asarray(decider.fit(p, y).probabilities(p))
    losses = [
        -(posterior * np.log(each)).sum(axis=1).mean() for each in (found, by_all)
    ]
    assert losses[0] < losses[1] + 0.01


@pytest.mark.parametrize(
    "kind",
    [
        "auto",
        "bias-corrected-temperature",
        "prior-corrected-temperature",
        "prior-corrected-power",
    ],
)
@pytest.mark.parametrize("factor", [1, 100])
def test_many_classes_that_few_samples_lack_keep_their_share(kind, factor):
    rng = np.random.default_rng(1)
    classes = Classes.from_counts(
        np.geomspace(20000, 20000 / factor, 300).round().astype(int).tolist()
    )
    means = rng.normal(size=(300, 20)) * 0.75

    def draw(size):
        labels = rng.choice(300, size, p=classes.prior)
        x = means[labels] + rng.normal(size=(size, 20))
        z = x @ means.T - (means**2).sum(axis=1) / 2 + np.log(classes.prior)
        return log_softmax(z, axis=1), labels

    held_out, labels = draw(100)
    new, _ = draw(1000)
    absent = np.bincount(labels, minlength=300) == 0
    decider = Decider(
        Utility.one_hot(classes), calibration=kind, train_prior=classes.prior
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted = decider.fit(1.1 * held_out, labels, logits=True)
    found = np.asarray(fitted.probabilities(1.1 * new, logits=True))
    share = np.exp(new)[:, absent].sum(axis=1).mean()
    assert found[:, absent].sum(axis=1).mean() == pytest.approx(share, abs=0.025)
    divergence = (np.exp(new) * (new - np.log(found))).sum(axis=1).mean()
    assert divergence < 0.04


def test_a_class_that_chance_left_out_of_the_held_out_data_gets_no_warning():
    p, y, _, kept = with_and_without_the_rarest()
    few = np.flatnonzero(kept)[:60]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Decider(Utility.one_hot(7)).fit(p[few], y[few])


@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(st.integers(2, 8), st.integers(5, 300), st.integers(0, 99))
def test_left_out_classes_are_those_that_poisson_counts_would_hardly_miss(
    classes, size, seed
):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(rng.uniform(0.05, 2, classes), size)
    counts = np.bincount(rng.integers(0, classes - 1, size), minlength=classes)
    expected = [
        counts[c] == 0 and poisson.pmf(0, p[:, c].sum()) < 0.05 / classes
        for c in range(classes)
    ]
    assert not_held_out(np.log(np.maximum(p, 1e-300)), counts).tolist() == expected


def test_the_share_of_one_of_two_classes_implies_the_other():
    decider = Decider(
        Utility.one_hot(["good", "bad"]),
        train_prior="uniform",
        target_prior={"bad": 0.1},
    )
    np.testing.assert_allclose(decider.model.target_prior, [0.9, 0.1])
    np.testing.assert_allclose(
        decider.replace(target_prior="bad=0.25").model.target_prior, [0.75, 0.25]
    )
    for share in (1.5, 10, -0.5):
        with pytest.raises(InputError, match="target_prior has no share for good"):
            decider.replace(target_prior={"bad": share})


@pytest.mark.parametrize(
    ("calibration", "said"),
    [("temperature", False), ("bias-corrected-temperature", True)],
)
def test_intervals_of_estimates_name_the_calibration_that_they_leave_out(
    calibration, said
):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 600)
    z = rng.normal(size=(600, 3)) + 2 * np.eye(3)[y]
    decider = Decider(
        Utility.one_hot(list("abc")),
        calibration=calibration,
        train_prior=[0.5, 0.3, 0.2],
    )
    decider = decider.fit(z, y, logits=True)
    decider = decider.replace(target_prior=decider.estimate_prior(z, logits=True))
    assert (
        "given the calibration, whose error is not included in the intervals"
        in decider.model.decided_for
    ) == said

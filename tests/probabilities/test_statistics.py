"""Calibration and priors against a known posterior: each test fails on a known
statistical mistake.
"""

import warnings

import numpy as np
import pandas
import pytest

from rfdlc import Classes, Decider, InputError, Predictions, Utility, evaluate
from rfdlc.decisions.decider import utility_interval
from rfdlc.probabilities.calibrators import CALIBRATORS
from rfdlc.probabilities.choosing import for_any_prior
from rfdlc.probabilities.priors import estimate_prior

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


def test_decisions_are_for_the_natural_class_prior_by_default():
    """Earlier the prior that the scores carry was decided for, here a uniform one: a
    regret of 0.19.
    """
    log_likelihood, _ = draw(TRAIN, 3000, 53)
    decider = Decider(UTILITY, calibration=None, train_prior="uniform")
    exact = np.exp(log_likelihood) * TRAIN
    values = exact / exact.sum(axis=1, keepdims=True) @ UTILITY.matrix
    lost = (
        values.max(axis=1)
        - values[np.arange(3000), decider.decide(log_likelihood, logits=True)]
    )
    assert lost.mean() < 1e-6
    assert "of the training data" in decider.model.decided_for


def test_samples_far_from_the_prior_that_is_decided_for_are_named():
    decider = Decider(
        Utility.one_hot(Classes.from_counts({"a": 90, "b": 10})), train_prior="train"
    )
    assert decider.model.prior_warning(np.repeat([0, 1], [85, 15])) is None
    said = decider.model.prior_warning(np.repeat([0, 1], [50, 50]))
    assert (
        "the class frequencies a 50.0%, b 50.0%, but decisions are made for the class"
        " prior a 90.0%, b 10.0%" in said
    )
    assert (
        decider.replace(target_prior="uniform").model.prior_warning(
            np.repeat([0, 1], [50, 50])
        )
        is None
    )
    rare = decider.replace(
        target_prior=[0.99, 0.01]
    )  # far from 10% for a rare class, though not in total variation
    assert rare.model.prior_warning(np.repeat([0, 1], [900, 100])) is not None
    assert (
        rare.model.prior_warning(np.repeat([0, 1], [29, 1])) is None
    )  # one sample is no evidence
    assert rare.model.prior_warning(np.repeat([0, 1], [980, 20])) is None


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_file_of_corrected_probabilities_is_not_corrected_again(tmp_path, kind):
    """Earlier such files did not say what they hold, and a decider corrected them a
    second time.
    """
    decider = Decider(
        Utility.one_hot(["a", "b"]),
        train_prior=[0.9, 0.1],
        target_prior="uniform",
        calibration=None,
    )
    table = pandas.DataFrame(
        np.asarray(decider.probabilities([[0.8, 0.2], [0.6, 0.4]])), columns=["a", "b"]
    )
    table["rfdlc_scores"] = "corrected"
    path = tmp_path / f"p.{kind}"
    table.to_csv(path, index=False) if kind == "csv" else table.to_parquet(path)
    with pytest.raises(InputError, match="a second time would distort them"):
        decider.decide(Predictions.load(path))
    assert Decider(Utility.one_hot(["a", "b"])).decide(
        Predictions.load(path)
    ).tolist() == [1, 1]


@pytest.mark.parametrize("ids", [["x1", "x2", "x3", "x4"], ["17", "4", "230", "9"]])
def test_samples_that_calibrated_are_known_by_their_ids(tmp_path, ids):
    """The scores differ, as from another model. Earlier nothing was noticed."""
    p = np.array([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3], [0.4, 0.6]])
    held_out = Predictions(probabilities=p, targets=[0, 1, 0, 1], ids=ids)
    Decider(Utility.one_hot(2)).fit(held_out).save(tmp_path / "d.json")
    decider = Decider.load(tmp_path / "d.json")
    with pytest.warns(UserWarning, match="about 50% of the samples that calibrated"):
        evaluate(
            Predictions(probabilities=p[:2] * 0.5 + 0.25, targets=[0, 1], ids=ids[:2]),
            decider=decider,
        )


def test_row_numbers_are_not_ids(recwarn):
    p = np.array([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]])
    decider = Decider(Utility.one_hot(2)).fit(
        Predictions(probabilities=p, targets=[0, 1, 0], ids=["0", "1", "2"])
    )
    evaluate(
        Predictions(
            probabilities=p * 0.4 + 0.3, targets=[0, 1, 0], ids=["0", "1", "2"]
        ),
        decider=decider,
    )
    assert not [warning for warning in recwarn if "calibrated" in str(warning.message)]


@pytest.mark.parametrize("size", [10, 50])
def test_a_temperature_from_few_samples_is_no_worse_than_none(size):
    """Earlier, with 10 samples, a regret of 0.016 against 0.015 without calibration."""
    test = draw(TRAIN, 2000, 54)[0]
    plain = regret(Decider(UTILITY, calibration=None, train_prior="train"), test, TRAIN)
    for kind in ("temperature", "auto"):
        found = [
            regret(fitted(kind, TRAIN, size, seed), test, TRAIN) for seed in range(6)
        ]
        assert np.mean(found) < plain


def test_many_classes_are_decided_in_products_of_many_rows():
    """Earlier a chunk of 5,000 classes had 52 rows, and each read the whole utility."""
    decider = Decider(Utility.one_hot(3000))
    scores = decider.model.read(np.full((600, 3000), 1 / 3000, dtype=np.float32))
    assert next(scores.chunks())[1].shape[1] >= 512


def test_a_balanced_held_out_set_does_not_spoil_the_temperature():
    for seed in range(3):
        decider = fitted("temperature", UNIFORM, 1000, seed)
        assert decider.model.calibrator.temperature == pytest.approx(
            2.5, rel=0.15
        )  # 5.3 where the two priors are taken for one
        assert (
            regret(
                decider.replace(target_prior="train"), draw(TRAIN, 3000, 50)[0], TRAIN
            )
            < 0.005
        )


@pytest.mark.parametrize("prior", [TRAIN, UNIFORM], ids=["long-tailed", "balanced"])
def test_the_prior_after_fitting_biases_is_that_of_the_calibrated_probabilities(prior):
    test = draw(TRAIN, 3000, 51)[0]
    kind = "bias-corrected-temperature"
    mean = [
        regret(fitted(kind, prior, 200, s).replace(target_prior=TRAIN), test, TRAIN)
        for s in range(4)
    ]
    assert np.mean(mean) < 0.015
    estimate = fitted(kind, prior, 1000, 9).estimate_prior(
        over_confident(test), logits=True
    )
    assert np.abs(estimate.prior - TRAIN).sum() / 2 < 0.06
    assert (estimate.prior / TRAIN)[
        TRAIN > 0.01
    ].min() > 0.3  # no class of the test data is thrown away


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
            regret(decider.replace(target_prior=prior), log_likelihood, TRAIN)
            for prior in (TRAIN, estimate)
        )
        lost.append(estimated - known)
    assert np.mean(lost) < 0.025


def test_calibrators_are_weighted_by_cross_validated_likelihood():
    found = fitted("auto", TRAIN, 400, 2)
    weights, losses = found.model.calibrator.weights, found.model.calibrator.losses
    assert max(weights, key=weights.get) == "temperature"  # the truth
    assert sum(weights.values()) == pytest.approx(1)
    assert losses["none"] > losses["temperature"] + 0.05
    assert "none" not in weights
    assert f"{weights['temperature']:.0%} temperature, " in repr(found)
    assert repr(found).count(f"{found.model.calibrator.short} (") == 1
    assert found.model.calibrator.short.count("%") == len(weights)
    assert (
        f"(weights by cross-validated loss: temperature {losses['temperature']:.4f},"
        " none " in repr(found)
    )
    rng = np.random.default_rng(0)
    y = rng.choice(10, 3000, p=TRAIN)
    biased = (
        np.log(np.full((3000, 10), 0.05) + 0.5 * np.eye(10)[y]) + 3 * np.eye(10)[0]
    )  # leans to one class
    found = CALIBRATORS["auto"].fit(
        biased - np.log(np.exp(biased).sum(axis=1, keepdims=True)), y
    )
    assert found.weights.keys() <= {"bias-corrected-temperature", "matrix-scaling"}
    again = CALIBRATORS["auto"].from_dict(found.to_dict())
    assert np.array_equal(again.as_affine()[1], found.as_affine()[1])


def test_priors_are_estimated_without_calibrators_that_lack_samples_of_some_class():
    """A matrix has 26% of the weight, from few samples of the rarest class."""
    decider, reversed_prior = fitted("auto", TRAIN, 200, 29), TRAIN[::-1].copy()
    log_likelihood, _ = draw(reversed_prior, 1000, 70)
    assert (
        decider.model.calibrator.weights["matrix-scaling"] > 0.1
    )  # which decides with the others
    z = over_confident(log_likelihood)
    estimate = decider.estimate_prior(z, logits=True)
    assert (
        regret(decider.replace(target_prior=estimate), log_likelihood, reversed_prior)
        < 0.025
    )
    again = Decider.from_dict(decider.to_dict()).estimate_prior(z, logits=True)
    assert np.array_equal(again.prior, estimate.prior)
    kept = CALIBRATORS["auto"].from_dict(decider.model.calibrator.estimating)
    assert np.array_equal(
        decider.replace(calibrator=kept).estimate_prior(z, logits=True).prior,
        estimate.prior,
    )
    assert "matrix-scaling" not in kept.weights
    assert sum(kept.weights.values()) == pytest.approx(1)


def test_calibrators_for_any_prior_need_samples_of_every_class():
    shares = {
        "temperature": 0.5,
        "bias-corrected-temperature": 0.1,
        "none": 0.1,
        "matrix-scaling": 0.3,
    }
    few, many, lacking = COUNTS // 10, COUNTS, COUNTS * (np.arange(10) < 7)
    for counts, expected in (
        (many, shares),
        (few, {"temperature": 5 / 6, "bias-corrected-temperature": 1 / 6}),
        (lacking, {"temperature": 5 / 6, "bias-corrected-temperature": 1 / 6}),
    ):
        assert for_any_prior(
            shares, np.repeat(np.arange(10), counts), 10
        ) == pytest.approx(expected)
    most = {"temperature": 0.4, "matrix-scaling": 0.6}
    assert for_any_prior(most, np.repeat(np.arange(10), few), 10) == most


@pytest.mark.parametrize("target", [TRAIN, UNIFORM], ids=["long-tailed", "uniform"])
def test_weighted_calibrators_are_the_geometric_mean_of_their_corrected_probabilities(
    target,
):
    decider, z = (
        fitted("auto", TRAIN, 100, 3).replace(target_prior=target),
        over_confident(draw(TRAIN, 300, 55)[0]),
    )
    expected = np.zeros((300, 10))
    for name, share in decider.model.calibrator.weights.items():
        alone = decider.replace(
            calibrator=CALIBRATORS[name].from_dict(
                decider.model.calibrator.parameters[name]
            )
        )
        expected += share * np.log(alone.probabilities(z, logits=True))
    assert len(decider.model.calibrator.weights) > 1
    expected = np.exp(expected) / np.exp(expected).sum(axis=1, keepdims=True)
    assert np.asarray(decider.probabilities(z, logits=True)) == pytest.approx(expected)


def test_weighted_matrices_and_numbers_are_one_matrix():
    matrix = np.array([[1.0, 0.25], [-0.5, 2.0]])
    scaling = CALIBRATORS["matrix-scaling"](weight=matrix, bias=np.array([1.0, 0.0]))
    temperature = CALIBRATORS["temperature"](0.5)
    auto = CALIBRATORS["auto"](
        weights={"matrix-scaling": 0.25, "temperature": 0.75},
        parameters={
            "matrix-scaling": scaling.to_dict(),
            "temperature": temperature.to_dict(),
        },
        losses={},
    )
    weight, bias = auto.as_affine()
    assert np.array_equal(weight, 0.25 * matrix + 1.5 * np.eye(2))
    assert np.array_equal(bias, [0.25, 0])


@pytest.mark.parametrize("size", [100, 500])
@pytest.mark.parametrize(
    "concentration", [np.ones(10), 50 * TRAIN], ids=["far", "near"]
)
def test_intervals_of_an_estimated_prior_cover_it(size, concentration):
    """Earlier 77% to 88% of shifts near the training prior."""
    rng, inside = np.random.default_rng(3), []
    for seed in range(40):
        truth = rng.dirichlet(concentration)
        log_likelihood, _ = draw(truth, size, 200 + seed)
        p = np.exp(log_likelihood - log_likelihood.max(axis=1, keepdims=True)) * TRAIN
        low, high = estimate_prior(p / p.sum(axis=1, keepdims=True), TRAIN).interval()
        inside.append((low <= truth) & (truth <= high))
    assert 0.91 < np.mean(inside) < 0.985


def test_a_known_prior_of_the_scores_tells_more_about_a_temperature_than_few_labels():
    """Calibrated probabilities have it as their mean. Without it, the mean square error
    is 2 to 3 times as large.
    """
    prior, errors = np.where(np.arange(10) < 7, TRAIN, 0), []
    for seed in range(20):
        log_likelihood, y = draw(prior / prior.sum(), 200, 300 + seed)
        log_p = over_confident(log_likelihood)
        found = [
            CALIBRATORS["temperature"].fit(log_p, y, train_prior=known)
            for known in (None, TRAIN)
        ]
        errors.append([np.log(each.temperature / 2.5) ** 2 for each in found])
    assert np.mean(errors, axis=0)[1] < 0.6 * np.mean(errors, axis=0)[0]


def test_the_prior_that_biases_carry_is_not_lost_in_noise_with_many_classes():
    """The mean probability of a thousand samples differs more from the truth than a
    mean drawn to the known prior.
    """
    counts = np.geomspace(500, 5, 100).round()
    train, rng, lost = counts / counts.sum(), np.random.default_rng(4), []
    for _ in range(3):
        means = 0.9 * rng.normal(size=(100, 16))
        y = rng.choice(100, 5000, p=train)
        z = (
            (means[y] + rng.normal(size=(5000, 16))) @ means.T
            - (means**2).sum(axis=1) / 2
            + np.log(train)
        )
        fit = CALIBRATORS["prior-corrected-temperature"].fit
        found = [
            fit(z[:1000], y[:1000], training_counts=counts, train_prior=known)
            for known in (train, None)
        ]
        lost.append(
            [
                np.abs(each.prior - each.apply(z[1000:]).mean(axis=0)).sum() / 2
                for each in found
            ]
        )
    assert np.mean(lost, axis=0)[0] < 0.8 * np.mean(lost, axis=0)[1]


def test_intervals_of_an_estimated_prior_include_the_uncertainty_of_the_temperature():
    """Earlier the calibration was held fixed, and 84% of far shifts were covered."""
    decider, inside, widths = fitted("temperature", TRAIN, 200, 5), [], []
    log_likelihood, _ = draw(UNIFORM, 1000, 80)
    drawn = [each.temperature for each in decider.model.calibrator.draws()]
    assert np.log(drawn).mean() == pytest.approx(
        np.log(decider.model.calibrator.temperature)
    )
    assert np.log(drawn).std() == pytest.approx(
        decider.model.calibrator.error, rel=0.15
    )
    exact = decider.replace(
        calibrator=CALIBRATORS["temperature"](decider.model.calibrator.temperature)
    )
    assert len(exact.model.calibrator.draws()) == 1
    for each in (decider, exact):
        low, high = each.estimate_prior(
            over_confident(log_likelihood), logits=True
        ).interval()
        inside.append(((low <= UNIFORM) & (high >= UNIFORM)).sum())
        widths.append((high - low).mean())
    assert widths[0] > 1.1 * widths[1]
    assert inside[0] >= inside[1]


def test_an_estimated_prior_is_the_mean_over_calibrators_that_are_as_probable():
    """All samples could be of either class: over-confident scores call them the
    frequent one, others the rare one.
    """
    carried = np.array([0.98, 0.02])
    sharp, flat = (
        np.tile(carried**power / (carried**power).sum(), (200, 1))
        for power in (1.3, 0.7)
    )
    estimate = estimate_prior(flat, carried, drawn=[sharp, sharp, flat, flat, flat])
    low, high = estimate.interval()
    assert estimate_prior(sharp, carried).prior[1] < 0.03
    assert estimate_prior(flat, carried).prior[1] > 0.97
    assert estimate.prior[1] == pytest.approx(
        0.6, abs=0.03
    )  # earlier 0 or 1: the calibration was held fixed
    assert (low < 0.03).all()
    assert (high > 0.97).all()


RARE = np.array([4000, 500, 120, 40, 10, 6]) / 4676


def estimated_shares(truth):
    """Factors (5, 6) between estimated and training shares, of classes that
    look alike.
    """
    found = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        means, y = 0.8 * rng.normal(size=(6, 4)), rng.choice(6, 4000, p=truth)
        x = means[y] + rng.normal(size=(4000, 4))
        p = np.exp(-((x[:, None] - means) ** 2).sum(axis=2) / 2) * RARE
        found.append(
            estimate_prior(p / p.sum(axis=1, keepdims=True), RARE).prior / RARE
        )
    return np.array(found)


def test_rare_classes_keep_their_share_where_nothing_has_moved():
    """Earlier they were off by a factor of 1.7 in the mean."""
    assert np.exp(np.abs(np.log(estimated_shares(RARE)))[:, 4:].mean()) < 1.3


@pytest.mark.parametrize(
    ("moved", "factor"), [(1, 4), (4, 40)], ids=["frequent", "rare"]
)
def test_shifts_of_single_classes_are_followed(moved, factor):
    truth = RARE.copy()
    truth[moved] *= factor
    truth[0] = 1 - truth[1:].sum()
    assert estimated_shares(truth)[:, moved].mean() == pytest.approx(factor, rel=0.2)


def test_an_estimated_prior_is_shown_with_its_intervals():
    decider, log_likelihood = (
        fitted("temperature", TRAIN, 1000, 1),
        draw(UNIFORM, 300, 70)[0],
    )
    z = over_confident(log_likelihood)
    decided = decider.replace(target_prior=decider.estimate_prior(z, logits=True))
    assert "decided for the estimated class prior" in repr(decided)
    assert "% to " in decided.model.decided_for
    low, high = utility_interval(decided, z, logits=True)
    p = decided.probabilities(z, logits=True)
    assert low < decided.utility.gains(p).max(axis=1).mean() < high
    assert decided.replace(target_prior="uniform").model.estimate is None
    with pytest.raises(
        InputError, match=r"cannot be estimated here.*--target-prior estimate"
    ):
        decider.replace(target_prior="estimate")


def test_priors_of_many_samples_are_estimated_from_all_of_them():
    log_likelihood, _ = draw(UNIFORM, 40_000, 71)
    p = np.exp(log_likelihood - log_likelihood.max(axis=1, keepdims=True)) * TRAIN
    estimate = estimate_prior(p / p.sum(axis=1, keepdims=True), TRAIN)
    low, high = estimate.interval()
    assert np.abs(estimate.prior - UNIFORM).sum() / 2 < 0.02
    assert ((low <= estimate.prior) & (estimate.prior <= high)).all()
    assert (high - low).max() < 0.03


def test_a_matrix_mends_scores_that_mistake_classes_from_few_samples():
    """Naive Bayes on dependent features; earlier `auto` tried a matrix from 170 samples
    of ten classes on.
    """
    rng = np.random.default_rng(0)
    means, common = rng.normal(size=(10, 8)) * 1.3, rng.normal(size=(8, 2))
    covariance = (
        0.1 * np.eye(8) + 0.9 * common @ common.T / np.square(common).sum(axis=1).mean()
    )
    root, inverse = np.linalg.cholesky(covariance), np.linalg.inv(covariance)

    def sample(size):
        y = rng.integers(0, 10, size)
        gap = (means[y] + rng.normal(size=(size, 8)) @ root.T)[:, None] - means
        exact = np.exp(-np.einsum("nci,ij,ncj->nc", gap, inverse, gap) / 2)
        return (
            -(gap**2 / np.diag(covariance)).sum(axis=2) / 2,
            exact / exact.sum(axis=1, keepdims=True),
            y,
        )

    held, _, y = sample(120)
    scores, exact, _ = sample(3000)
    utility = Utility.one_hot(10)
    regret = {}
    for kind in ("auto", "temperature", "matrix-scaling"):
        decider = Decider(utility, calibration=kind, train_prior="uniform").fit(
            held, y, logits=True
        )
        regret[kind] = np.mean(
            exact.max(axis=1)
            - exact[np.arange(3000), decider.decide(scores, logits=True)]
        )
    assert regret["auto"] == regret["matrix-scaling"] < 0.7 * regret["temperature"]


@pytest.mark.parametrize("rare", [6, 40])
def test_classes_with_few_held_out_samples_get_a_warning_where_a_prior_is_estimated(
    rare,
):
    """Intervals hold the calibrated probabilities of the class fixed, which 6 samples
    hardly check.
    """
    rng, y = np.random.default_rng(0), np.repeat([0, 1], [32 * rare, rare])
    z = rng.normal(size=(len(y), 2)) + 2 * np.eye(2)[y] + np.log([32, 1])
    utility, prior = Utility.one_hot(["a", "b"]), [32 / 33, 1 / 33]
    decider = Decider(utility, calibration="temperature", train_prior=prior).fit(
        z, y, logits=True
    )
    for each in (decider, Decider.from_dict(decider.to_dict())):
        with warnings.catch_warnings(record=True, action="always") as told:
            each.estimate_prior(z, logits=True)
        found = [str(warning.message) for warning in told]
        assert len(found) == (rare < 30)
        assert (
            not found
            or "rests on few held-out samples (6 of 'b'): its intervals" in found[0]
        )

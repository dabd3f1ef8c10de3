"""Intervals cover and contain their estimates, and evaluation does not flatter; more in
benchmarks/coverage.py.

Earlier mistakes gave an ECE of 42% in the tail of an exact posterior, intervals of ECE
that never covered and excluded their own estimate, "100% to 100%" for three of three,
and tail accuracy covered 57% of the time.
"""

import numpy as np
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats
from scipy.special import softmax
from sklearn.metrics import balanced_accuracy_score

from rfdlc import Classes, Decider, Predictions, Utility, compare, evaluate
from rfdlc.evaluation.outcomes import cross_fitted, observe
from rfdlc.probabilities import scores
from rfdlc.statistics import ranking
from rfdlc.statistics.intervals import (
    STRICT,
    bounded_mean,
    distances,
    group_shares,
    mean,
    student,
    within_classes,
)

CLASSES = Classes.from_counts([900, 500, 280, 150, 85, 47, 26, 14, 8, 5])
PRIOR = np.array(CLASSES.counts) / sum(CLASSES.counts)
CENTRES = np.random.default_rng(5).normal(size=(10, 8))


def draw(samples, rng, sharpness=1.0):
    """Labels and probabilities of a Gaussian mixture; at sharpness 1 they are the exact
    posterior.
    """
    y = rng.choice(10, samples, p=PRIOR)
    x = CENTRES[y] + rng.normal(size=(samples, 8))
    z = x @ CENTRES.T - (CENTRES**2).sum(axis=1) / 2 + np.log(PRIOR)
    return y, softmax(sharpness * z, axis=1)


def test_three_of_three_is_not_certain():
    low, high = evaluate([[0.9, 0.1]] * 3, [0, 0, 0]).intervals["accuracy"]
    assert (low, high) == (pytest.approx(0.4385, abs=1e-4), 1)


def test_the_exact_posterior_is_calibrated_in_every_predicted_region():
    y, p = draw(40_000, np.random.default_rng(0))
    result = evaluate(p, y, classes=CLASSES)
    assert max(result.ece_by_region.values()) < 0.05
    assert (
        result.ece_by_true_region["tail"] > 0.1
    )  # the paper's grouping conditions on the truth


def test_ece_has_an_interval_that_covers_and_contains_it():
    rng = np.random.default_rng(1)
    covered = []
    for _ in range(25):
        y, p = draw(300, rng)
        result = evaluate(p, y, classes=CLASSES)
        low, high = result.intervals["ece"]
        assert low <= result.ece_debiased <= result.ece <= high
        covered.append(low <= 1e-9)  # the posterior is exact: the true error is 0
    assert np.mean(covered) > 0.85


@pytest.mark.parametrize("sharpness", [1.0, 2.5])
def test_intervals_cover(sharpness):
    utility = Utility.tail_sensitive(CLASSES, -1).with_abstain(0.2)
    y, p = draw(100_000, np.random.default_rng(2), sharpness)
    truth = evaluate(p, y, utility=utility).flat()
    rng, covered = np.random.default_rng(3), {}
    for _ in range(60):
        y, p = draw(100, rng, sharpness)
        for name, (low, high) in evaluate(p, y, utility=utility).intervals.items():
            covered.setdefault(name, []).append(low <= truth[name] <= high)
    for name in (
        "accuracy",
        "accuracy_by_region.tail",
        "false_head_rate",
        "mean_utility",
        "brier",
        "nll",
        "utility_gap",
        "risk_coverage_area",
        "balanced_accuracy",
    ):
        assert np.mean(covered[name]) > 0.85, name


def test_the_interval_of_macro_f1_covers_it_where_classes_have_few_samples():
    """Recall falls from 90 to 25% for the rarest of 15 classes, and mistakes go to
    frequent ones.
    """
    shares, recalls = np.geomspace(1, 0.004, 15), np.linspace(0.9, 0.25, 15)
    shares, rng = shares / shares.sum(), np.random.default_rng(0)

    def sample(count):
        y = rng.choice(15, count, p=shares)
        d = np.where(rng.random(count) < recalls[y], y, rng.choice(15, count, p=shares))
        right = y == d
        places = np.stack([y, np.where(right, -1, d)])
        return group_shares(
            places,
            np.stack([right, np.zeros(count, dtype=bool)]),
            lambda s: 2 * s / (1 + s),
        )

    truth = sample(500_000).value
    found = np.array([sample(900).interval() for _ in range(400)])
    above, below = (found[:, 0] > truth).mean(), (found[:, 1] < truth).mean()
    assert above + below < 0.1
    assert above < 0.08


def test_intervals_need_no_resampling():
    y, p = draw(300, np.random.default_rng(3))
    named = set(evaluate(p, y, classes=CLASSES).intervals)
    assert named >= {
        "accuracy",
        "macro_f1",
        "false_head_rate",
        "ece",
        "error_auc",
        "risk_coverage_area",
        "utility_gap",
    }


def test_a_mean_of_too_few_samples_has_no_interval():
    y, p = draw(100, np.random.default_rng(4))
    predicted = np.isin(p.argmax(axis=1), CLASSES.thirds["tail"]).sum()
    assert 0 < predicted < 20
    assert "utility_gap_by_region.tail" not in evaluate(p, y, classes=CLASSES).intervals


def test_ends_beyond_the_observed_values_widen_the_interval():
    values = np.repeat(
        [0.0, 1.0], [90, 10]
    )  # a utility that can be -1, of which no sample was seen
    low, high = mean(values, (-1, 1)).interval()
    share = mean(values).interval()
    assert mean(values, (0, 1)).interval() == share
    assert low < share[0]
    assert low <= 0.1 <= high


@pytest.mark.parametrize("hits", [1, 3, 10, 50])
def test_a_bounded_mean_of_two_values_has_the_interval_of_jeffreys(hits):
    values = np.repeat([-1.0, 3.0], [100 - hits, hits])
    low, high = mean(values, (-1, 3)).interval()
    expected = -1 + 4 * special.betaincinv(hits + 0.5, 100 - hits + 0.5, [0.025, 0.975])
    assert (low, high) == pytest.approx(expected, abs=0.03)  # 0.01 of the range


@pytest.mark.parametrize("hits", [0, 1, 5])
@pytest.mark.parametrize("level", [0.95, 0.99])
def test_strict_bounds_of_counts_are_the_exact_ones_of_poisson(hits, level):
    """Garwood (1936), by quantiles of chi-squared: no sample more for the lower bound,
    a whole one for the upper.
    """
    below, above = distances(np.ones(hits), 0.0, 1.0, level=level, more=STRICT)
    low = stats.chi2.ppf((1 - level) / 2, 2 * hits) / 2 if hits else 0.0
    assert (hits - below, hits + above) == pytest.approx(
        (low, stats.chi2.isf((1 - level) / 2, 2 * hits + 2) / 2)
    )


def test_a_weighted_mean_has_the_interval_of_a_mean_if_weights_are_equal():
    values = np.random.default_rng(0).choice([0.0, 1.0, 20.0], 100, p=[0.5, 0.48, 0.02])
    found = bounded_mean(values, np.full(100, 7.0), (0.0, 20.0))
    assert found[0] == pytest.approx(values.mean())
    assert found[1] == pytest.approx(mean(values, (0.0, 20.0)).interval())
    assert bounded_mean(np.ones(9), np.ones(9), (1.0, 1.0)) == (1, (1, 1))


def test_no_error_in_many_samples_leaves_errors_possible():
    low, high = mean(np.ones(40), (-1, 1)).interval()
    bound = 1 - 2 * special.betaincinv(0.5, 40.5, 0.975)
    assert (low, high) == (pytest.approx(bound, abs=0.01), 1)
    assert (
        mean(np.full(40, 0.2), (0.2, 0.2)).interval() is None
    )  # of a certain value, as of an abstention


def test_coarse_scores_that_calibrated_are_noticed_by_their_order():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 500)
    votes = np.where(
        rng.random(500) < 0.6, y, rng.integers(0, 11, 500) / 10
    )  # as of a small forest
    table = pandas.DataFrame(
        {
            "a": 1 - votes,
            "b": votes,
            "id": np.arange(500),
            "target": np.array(["a", "b"])[y],
        }
    )
    decider = Decider(Utility.one_hot(["a", "b"])).fit(table[:200])
    assert "scores" not in decider.model.calibrated_on
    with pytest.warns(UserWarning, match="about 100% of the samples that calibrated"):
        evaluate(table[:200], decider=decider)
    with pytest.warns(UserWarning, match="about 4.% of the samples"):
        evaluate(table[100:], decider=decider)
    assert evaluate(table[200:], decider=decider).calibration_overlap == 0


def test_samples_with_other_ids_are_others_though_their_scores_are_equal():
    rng = np.random.default_rng(0)
    y, p = rng.integers(0, 2, 400), rng.random(400)
    p[:200][rng.random(200) < 0.08] = p[200:][rng.random(200) < 0.08] = (
        1.0  # what a forest is sure of
    )
    table = pandas.DataFrame(
        {
            "a": 1 - p,
            "b": p,
            "id": [f"n{i}" for i in range(400)],
            "target": np.array(["a", "b"])[y],
        }
    )
    decider = Decider(Utility.one_hot(["a", "b"])).fit(table[:200])
    assert "scores" in decider.model.calibrated_on
    assert evaluate(table[200:], decider=decider).calibration_overlap == 0
    renamed = table[:200].assign(id=[f"m{i}" for i in range(200)])
    with pytest.warns(UserWarning, match="about 100% of the samples that calibrated"):
        evaluate(renamed, decider=decider)


def test_a_broken_promise_is_named():
    y, p = draw(400, np.random.default_rng(0))
    _, sure = draw(400, np.random.default_rng(0), 4)
    assert "the promise is met" in evaluate(p, y, classes=CLASSES).promise
    broken = evaluate(sure, y, classes=CLASSES)
    low, high = broken.intervals["utility_gap"]
    assert low > 0
    shown = (
        f"Promised minus realised utility {broken.utility_gap:.4f} ({low:.4f} to"
        f" {high:.4f})"
    )
    assert broken.promise.startswith(f"{shown}: decisions are worth less")
    assert (
        "than promised; calibrate on samples like these. In parts they are worth less"
        " for " in broken.promise
    )
    assert (
        f"worth less for predicted head {broken.utility_gap_by_region['head']:.4f}"
        in broken.promise
    )
    assert evaluate(p[:5], y[:5], classes=CLASSES).promise.startswith("Too few samples")
    broken.intervals["utility_gap"] = (-0.1, 0.9)
    assert (
        "the promise is met on the whole, as far as these samples tell. In parts"
        " they are" in broken.promise
    )


def test_decisions_that_are_worth_more_than_promised_are_not_called_a_broken_promise():
    y, p = draw(400, np.random.default_rng(0))
    _, unsure = draw(400, np.random.default_rng(0), 0.2)
    kept = evaluate(unsure, y, classes=CLASSES)
    assert kept.intervals["utility_gap"][1] < 0
    assert (
        "decisions are worth more than promised; calibrate on samples like these."
        in kept.promise
    )
    assert "In parts they are worth more for predicted head -" in kept.promise
    assert "worth less" not in kept.promise
    calibrated = Predictions(
        probabilities=unsure, targets=y, classes=CLASSES, corrected=True
    )
    said = evaluate(calibrated).promise
    assert (
        "set the target prior to theirs (--target-prior; for files of predict, there),"
        " or calibrate again on " in said
    )
    fitted = Decider(Utility.one_hot(CLASSES)).fit(p, y)
    assert evaluate(unsure, y, fitted).calibrated


def test_differences_are_paired():
    y, p = draw(500, np.random.default_rng(7))
    _, sharp = draw(500, np.random.default_rng(7), 1.3)
    a, b = (
        Predictions(probabilities=each, targets=y, classes=CLASSES)
        for each in (p, sharp)
    )
    found = compare(a, b)
    for name in ("nll", "brier", "risk_coverage_area"):
        apart = [evaluate(each).intervals[name] for each in (a, b)]
        unpaired = np.hypot(*(high - low for low, high in apart))
        assert found[name].high - found[name].low < 0.6 * unpaired, name


def test_a_weighted_sum_of_strata_equals_the_mean_of_the_rates():
    y, p = draw(500, np.random.default_rng(4))
    result = evaluate(p, y, classes=CLASSES)
    assert result.false_head_rate == pytest.approx(
        np.mean(list(result.false_head_rates.values()))
    )
    assert result.balanced_accuracy == pytest.approx(
        balanced_accuracy_score(y, p.argmax(axis=1))
    )


def test_influence_gives_the_standard_error():
    values = np.where(
        np.arange(50) % 3 == 0, np.nan, np.random.default_rng(0).normal(size=50)
    )
    known = values[~np.isnan(values)]
    error = np.linalg.norm(mean(values).influence())
    assert error == pytest.approx(known.std() / np.sqrt(len(known)))


def test_resampling_keeps_the_class_counts():
    y = np.random.default_rng(0).integers(0, 5, 200)
    rows = within_classes(y, np.random.default_rng(1))
    assert (np.bincount(y[rows]) == np.bincount(y)).all()
    assert len(set(rows)) < 200


def test_errors_are_ranked_by_the_confidence_of_the_decision():
    p = np.array([[0.55, 0.45], [0.6, 0.4], [0.7, 0.3], [0.05, 0.95]])
    decider = Decider(
        Utility([[1, 0], [-9, 1]])
    )  # decides 1 unless 0 is nearly certain
    result = evaluate(p, [1, 0, 0, 1], decider)
    assert (
        result.error_auc
        == ranking.roc_area(
            np.array([True, False, False, True]), np.array([0.45, 0.4, 0.3, 0.95])
        ).value
        == 1
    )


@pytest.mark.parametrize("seed", range(5))
def test_equal_scores_of_a_forest_are_no_evidence_of_the_same_samples(seed):
    """Votes of 200 trees: other samples have equal ones, about as often in one set as
    between two.
    """
    rng = np.random.default_rng(seed)
    votes = rng.multinomial(200, rng.dirichlet([3, 0.5, 0.4, 0.3], 3000)) / 200
    y = np.array([rng.choice(4, p=p) for p in votes])
    names = np.array([f"sample {i}" for i in range(3000)])
    first, second, both = (
        np.arange(1000),
        np.arange(1000, 3000),
        rng.permutation(np.arange(500, 2500)),
    )

    def overlap(held_out, evaluated, *, ids):
        given = [
            Predictions(
                probabilities=votes[rows],
                targets=y[rows],
                ids=names[rows] if ids else None,
            )
            for rows in (held_out, evaluated)
        ]
        decider = Decider(Utility.one_hot(4), calibration=None).fit(given[0])
        return decider.model.overlap(*decider.model.read_labelled(given[1], None))

    assert len(np.unique(votes[first], axis=0)) < 0.99 * 1000
    assert overlap(first, second, ids=False) == 0
    assert overlap(first, both, ids=True) == pytest.approx(0.5, abs=0.1)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 99), st.integers(20, 300), st.floats(0.05, 1))
def test_the_same_samples_are_found_by_fine_scores_in_any_order(seed, size, share):
    rng = np.random.default_rng(seed)
    p, y = rng.dirichlet(np.ones(3), 2 * size), rng.integers(0, 3, 2 * size)
    same = int(np.ceil(share * size))
    rows = rng.permutation(np.r_[:same, size : 2 * size - same])
    decider = Decider(Utility.one_hot(3), calibration=None).fit(p[:size], y[:size])
    assert decider.model.overlap(
        *decider.model.read_labelled(p[rows], y[rows])
    ) == pytest.approx(same / size)


def test_evaluating_on_what_calibrated_is_noticed(tmp_path):
    y, p = draw(300, np.random.default_rng(6), 2.5)
    decider = Decider(Utility.one_hot(CLASSES)).fit(p[:200], y[:200])
    decider.save(tmp_path / "decider.json")
    for each in (decider, Decider.load(tmp_path / "decider.json")):
        with pytest.warns(
            UserWarning, match="about 100% of the samples that calibrated"
        ):
            assert evaluate(p[:200], y[:200], each).calibration_overlap == 1
        with pytest.warns(UserWarning, match="about 50%"):
            assert evaluate(p[100:], y[100:], each).to_dict()[
                "calibration_overlap"
            ] == pytest.approx(0.5, abs=0.1)
        assert evaluate(p[200:], y[200:], each).calibration_overlap == 0


def test_cross_fitted_outcomes_are_those_of_fits_without_the_sample():
    y, p = draw(400, np.random.default_rng(7), 2.5)
    decider = Decider(
        Utility.one_hot(CLASSES), calibration="bias-corrected-temperature"
    ).fit(p, y)
    predictions = Predictions(probabilities=p, targets=y, classes=CLASSES)
    outcomes, inside = (
        cross_fitted(predictions, decider),
        observe(*decider.model.read_labelled(predictions, None), decider),
    )
    assert (outcomes.targets == y).all()
    assert outcomes.probabilities.shape == p.shape
    assert scores.nll(outcomes.probabilities[np.arange(400), y]) == pytest.approx(
        outcomes.nll
    )
    assert (
        outcomes.nll.mean() > inside.nll.mean()
    )  # what was fitted to a sample is better on it


@pytest.mark.parametrize(
    ("seen", "ends"), [([1.0] * 27 + [0.2], (-8.0, 1.0)), ([0.0] * 28, (-8.0, 0.0))]
)
def test_an_interval_of_a_mean_stays_where_the_mean_can_be(seen, ends):
    low, high = mean(np.array(seen), ends).interval()
    assert ends[0] <= low <= np.mean(seen) <= high <= ends[1]


def test_intervals_of_losses_are_not_negative():
    losses = np.r_[np.full(60, 1e-3), 3.0]  # one large loss among small ones
    low, high = student(losses)
    assert low < 0
    assert mean(losses).interval() == (0.0, high)
    assert mean(losses - 1).interval()[0] == pytest.approx(low - 1)

"""Samples in groups, such as patients: intervals cover, folds keep groups whole, and
files keep them.

The truth is known: every sample of group g is of class 0 with probability t_g, whose
mean is 0.8, and the models always say the same. As if samples were independent,
intervals cover 60% of the time.
"""

from dataclasses import replace

import numpy as np
import pytest
from scipy.special import softmax

import rfdlc
from rfdlc import Decider, InputError, Predictions, Utility, compare, evaluate
from rfdlc.evaluation.comparison import gain_over_argmax, paired_difference
from rfdlc.evaluation.metrics import METRICS, Metric
from rfdlc.evaluation.outcomes import Outcomes, cross_fitted
from rfdlc.probabilities.choosing import grouped_folds
from rfdlc.statistics.intervals import (
    by_group,
    group_shares,
    mean,
    whole_groups,
    wilson,
)
from tests.probabilities.test_calibrators import sites

UTILITY, SHARE = Utility([[1, 0], [-3, 1]]), 0.8


def draw(rng, groups=25, most=20):
    """Outcomes of two models that always give class 0 a probability of 0.9 and
    of 0.7.
    """
    place = np.repeat(np.arange(groups), rng.integers(1, most, groups))
    y = (
        rng.random(len(place)) > rng.beta(2 * SHARE, 2 * (1 - SHARE), groups)[place]
    ).astype(np.int64)
    models = [np.tile([sure, 1 - sure], (len(y), 1)) for sure in (0.9, 0.7)]
    each = [
        Outcomes.of(UTILITY, y, np.zeros(len(y), dtype=np.int64), p) for p in models
    ]
    return [replace(outcomes, sample_groups=place) for outcomes in each]


def expected(of_0, of_1):
    return SHARE * of_0 + (1 - SHARE) * of_1


TRUTH = {
    "accuracy": SHARE,
    "mean_utility": expected(1, -3),
    "brier": expected(0.02, 1.62),
    "nll": expected(-np.log(0.9), -np.log(0.1)),
    "ece": 0.1,
    "utility_gap": 0.6 - 0.2,
}


def alone(outcomes):
    return replace(outcomes, sample_groups=None)


def test_intervals_of_groups_cover_and_those_of_samples_do_not():
    rng, covered = (
        np.random.default_rng(0),
        {name: [] for name in (*TRUTH, "difference")},
    )
    change = expected(
        np.log(0.9 / 0.7), np.log(0.1 / 0.3)
    )  # of the loss, from the first to the second model
    for _ in range(200):
        models = draw(rng)
        for name, truth in TRUTH.items():
            bounds = [
                METRICS[name].estimates(each)[name].interval()
                for each in (alone(models[0]), models[0])
            ]
            covered[name].append([low <= truth <= high for low, high in bounds])
        pairs = [map(alone, models), models]
        losses = [
            [METRICS["nll"].estimates(model)["nll"] for model in pair] for pair in pairs
        ]
        bounds = [paired_difference(*([each] for each in pair))[3:5] for pair in losses]
        covered["difference"].append([low <= change <= high for low, high in bounds])
    for name, found in covered.items():
        samples, groups = np.mean(found, axis=0)
        assert samples < 0.8, name
        assert 0.91 < groups < 0.99, name


@pytest.mark.parametrize(
    "name", ["accuracy", "mean_utility", "balanced_accuracy", "nll", "error_auc"]
)
def test_the_standard_error_is_that_of_a_cluster_bootstrap(name):
    rng = np.random.default_rng(1)
    place = np.repeat(np.arange(120), rng.integers(2, 12, 120))
    y = (rng.random(len(place)) < rng.beta(1, 2, 120)[place]).astype(np.int64)
    p = softmax(
        np.eye(2)[y] + rng.normal(size=(120, 2))[place] + rng.normal(size=(len(y), 2)),
        axis=1,
    )
    outcomes = Outcomes.of(UTILITY, y, p.argmax(axis=1), p)
    members = [np.flatnonzero(place == g) for g in range(120)]
    drawn = []
    for _ in range(400):
        rows = np.concatenate([members[g] for g in rng.integers(0, 120, 120)])
        drawn.append(METRICS[name].measure(outcomes.take(rows)))
    clustered, plain = (
        np.linalg.norm(METRICS[name].estimates(each)[name].influence())
        for each in (replace(outcomes, sample_groups=place), outcomes)
    )
    assert clustered == pytest.approx(np.std(drawn), rel=0.12)
    assert plain < 0.8 * np.std(drawn)


def test_numbers_are_resampled_by_whole_groups():
    metric = Metric("spread", "spread", lambda o: float(np.std(o.nll)))
    outcomes, rng, drawn = (
        draw(np.random.default_rng(2))[0],
        np.random.default_rng(7),
        [],
    )
    for _ in range(50):
        chosen = rng.integers(0, 25, 25)
        rows = [
            row
            for g in chosen
            for row in range(len(outcomes))
            if outcomes.sample_groups[row] == g
        ]
        drawn.append(np.std(outcomes.nll[rows]))
    found = metric.estimates(outcomes, 50, seed=7)["spread"].interval()
    assert found == pytest.approx(tuple(np.quantile(drawn, [0.025, 0.975])))
    groups = np.array([7, 3, 3, 9, 7, 7])
    for seed in range(20):
        counts = np.bincount(
            whole_groups(groups, np.random.default_rng(seed)), minlength=6
        )
        assert all(len(set(counts[groups == g])) == 1 for g in groups)


def test_groups_of_one_sample_change_nothing_and_one_group_tells_nothing():
    hits = mean(np.arange(30) % 3 > 0)
    assert by_group(hits, np.arange(30)[::-1]).interval() == hits.interval()
    assert by_group(hits, np.zeros(30, dtype=int)).interval() is None
    assert by_group(mean(np.full(30, np.nan)), np.arange(30) // 2).interval() is None


def test_without_errors_groups_count_as_samples():
    """How alike samples of a group are is unknown."""
    right = group_shares(np.zeros((1, 60), dtype=int), np.ones((1, 60), dtype=bool))
    assert by_group(right, np.arange(60) // 3).interval() == (
        pytest.approx(float(wilson(1.0, 20)[0])),
        1,
    )


def test_samples_that_do_not_count_change_no_interval():
    """Rates of rare classes are about the groups that have them, however many other
    samples there are.
    """
    rng, other = np.random.default_rng(8), np.repeat(np.arange(40), 50)
    for groups in (np.arange(12), np.arange(12) // 2, np.arange(12) // 6):
        for values in (
            np.ones(12),
            np.arange(12) % 3 > 0,
            rng.normal(size=12).repeat(2),
        ):
            own = np.resize(groups, len(values))
            known, counted = (
                np.concatenate([values, np.full(len(other), np.nan)]),
                np.concatenate([own, other]),
            )
            assert by_group(mean(known), counted).interval() == pytest.approx(
                by_group(mean(values), own).interval()
            )
    one = np.concatenate([np.zeros(12, dtype=int), other])
    alone = mean(np.concatenate([np.arange(12) % 2, np.full(len(other), np.nan)]))
    assert (alone.interval() is None, by_group(alone, one).interval()) == (False, None)


@pytest.mark.parametrize("groups", [2, 4])
def test_intervals_of_a_class_in_few_groups_cover(groups):
    """The class is in some of 30 groups; with the degrees of freedom of all groups, 83%
    and 89% are covered.
    """
    rng, covered, place = np.random.default_rng(9), [], np.repeat(np.arange(30), 20)
    for _ in range(300):
        right = rng.random(600) < rng.beta(2 * SHARE, 2 * (1 - SHARE), 30)[place]
        low, high = by_group(
            mean(np.where(place < groups, right, np.nan)), place
        ).interval()
        covered.append(low <= SHARE <= high)
    assert 0.92 < np.mean(covered) < 0.99


def test_rankings_of_errors_in_few_groups_have_no_interval():
    rng = np.random.default_rng(10)
    wrong, p = np.arange(200) < 20, rng.uniform(0.5, 1, 200)
    y, scores = wrong.astype(np.int64), np.stack([p, 1 - p], axis=1)
    few, many = np.where(wrong, 0, np.arange(200)), np.arange(200) // 2
    found = [
        evaluate(Predictions(probabilities=scores, targets=y, groups=own))
        for own in (few, many)
    ]
    assert ["error_auc" in each.intervals for each in found] == [False, True]
    assert found[0].error_auc == found[1].error_auc


def grouped(rng, samples=300, noise=0.5, **known):
    """Predictions of samples of 40 patients, whose scores are off in the same way."""
    groups = rng.integers(0, 40, samples)
    y = rng.integers(0, 3, samples)
    z = (
        2.0 * np.eye(3)[y]
        + rng.normal(size=(40, 3))[groups]
        + noise * rng.normal(size=(samples, 3))
    )
    return Predictions(
        logits=z, targets=y, groups=[f"patient {g}" for g in groups], **known
    )


def test_evaluations_say_that_intervals_are_by_group():
    given = grouped(np.random.default_rng(3))
    found, plain = (
        evaluate(given),
        evaluate(Predictions(logits=given.scores.values, targets=given.targets)),
    )
    assert (
        str(found).splitlines()[0]
        == found.__rich__().title
        == "300 samples in 40 groups (intervals by group)"
    )
    assert str(plain).splitlines()[0] == "300 samples"
    assert (found.to_dict()["groups"], plain.groups) == (40, None)
    assert "groups" not in plain.to_dict()
    assert found.flat() == pytest.approx(plain.flat(), nan_ok=True)
    assert found.intervals.keys() == plain.intervals.keys()
    for name in ("accuracy", "mean_utility", "nll", "ece", "risk_coverage_area"):
        assert np.ptp(found.intervals[name]) > 1.1 * np.ptp(plain.intervals[name]), name


def test_sets_have_intervals_by_group():
    held, given = (grouped(np.random.default_rng(seed), 600) for seed in (4, 5))
    decider = Decider(Utility.one_hot(3)).fit(held).fit_sets(held, kind="class")
    found = evaluate(given, decider=decider)
    plain = evaluate(
        Predictions(logits=given.scores.values, targets=given.targets), decider=decider
    )
    for name in (
        "set_coverage.marginal",
        "set_coverage.worst",
        "set_coverage_by_class.1",
    ):
        assert found.intervals[name][0] < plain.intervals[name][0], name


def test_comparisons_take_groups_from_either_side_and_match_them_by_id():
    ids = [f"n{i}" for i in range(300)]
    a = grouped(np.random.default_rng(5), ids=ids)
    order = np.random.default_rng(0).permutation(300)
    noisy = a.scores.values[:, order] + 0.4 * np.random.default_rng(6).normal(
        size=(1, 300, 3)
    )
    b = Predictions(logits=noisy, targets=a.targets[order], ids=[ids[i] for i in order])
    plain = Predictions(logits=a.scores.values, targets=a.targets, ids=ids)
    found = [compare(a, b), compare(b, a)]
    assert [each.groups for each in found] == [40, 40]
    assert (
        found[0].__rich__().title
        == "300 paired samples in 40 groups (intervals by group), models held fixed"
    )
    assert (found[0]["nll"].low, found[0]["nll"].high) == pytest.approx(
        (-found[1]["nll"].high, -found[1]["nll"].low)
    )
    assert (found[0]["nll"].low, found[0]["nll"].high) != (
        compare(plain, b)["nll"].low,
        compare(plain, b)["nll"].high,
    )
    assert compare(plain, b).groups is None


def test_the_gain_over_arg_max_is_by_group():
    given = grouped(np.random.default_rng(7))
    utility = Utility([[1, 0, 0], [-4, 1, 0], [-4, 0, 1]])
    plain = Predictions(logits=given.scores.values, targets=given.targets)
    found, samples = (
        gain_over_argmax(evaluate(p, utility=utility), p, Decider(utility))
        for p in (given, plain)
    )
    assert found.difference == samples.difference
    assert found.high - found.low != samples.high - samples.low


def test_folds_keep_groups_whole():
    x, y, groups = sites(np.random.default_rng(0), 12, 40, 1.5)
    given = Predictions(logits=x, targets=y, groups=groups)
    decider = Decider(Utility.one_hot(6), calibration="matrix-scaling").fit(given)
    fold, p = grouped_folds(y, groups), np.empty((len(y), 6))
    for k in range(5):
        fitted = decider.fit(x[fold != k], y[fold != k], logits=True).replace(
            target_prior=decider.model.decided_prior
        )
        p[fold == k] = fitted.probabilities(x[fold == k], logits=True)
    np.testing.assert_allclose(cross_fitted(given, decider).probabilities, p, atol=1e-9)


def test_metrics_out_of_fold_are_those_of_new_groups():
    gap = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        (x, y, groups), (new, new_y, _) = (
            sites(rng, 12, 60, 1.5),
            sites(rng, 60, 40, 1.5),
        )
        decider = Decider(Utility.one_hot(6), calibration="matrix-scaling").fit(
            x, y, logits=True
        )
        honest = evaluate(new, new_y, decider, logits=True).nll
        given = [Predictions(logits=x, targets=y, groups=own) for own in (groups, None)]
        gap.append([cross_fitted(each, decider).nll.mean() - honest for each in given])
    whole, leaking = np.mean(gap, axis=0)
    assert leaking < -0.2  # nats: it looks better than it is
    assert abs(whole) < 0.1


def test_one_group_is_divided_by_samples():
    x, y, groups = sites(np.random.default_rng(0), 1, 200, 1.5)
    fitted = Decider(Utility.one_hot(6), calibration="matrix-scaling").fit(
        x, y, logits=True
    )
    one, none = (
        cross_fitted(Predictions(logits=x, targets=y, groups=own), fitted).nll
        for own in (groups, None)
    )
    np.testing.assert_allclose(one, none)
    assert one.mean() > evaluate_without_warning(x, y, fitted)


def evaluate_without_warning(x, y, decider):
    with pytest.warns(UserWarning, match="calibrated this decider"):
        return evaluate(x, y, decider, logits=True).nll


def test_a_decider_takes_the_groups_of_predictions():
    x, y, groups = sites(np.random.default_rng(0), 15, 60, 1.5)
    auto = Decider(Utility.one_hot(6))
    given = auto.fit(x, y, logits=True, groups=groups).model.calibrator
    carried = auto.fit(Predictions(logits=x, targets=y, groups=groups)).model.calibrator
    assert (
        carried == given != auto.fit(Predictions(logits=x, targets=y)).model.calibrator
    )


def test_groups_are_kept_in_files_as_integers(tmp_path):
    given = Predictions(
        probabilities=[[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]],
        groups=["b", "a", "b"],
        classes=["x", "y"],
    )
    assert given.groups.tolist() == [1, 0, 1]
    given.save(tmp_path / "p.npz")
    with np.load(tmp_path / "p.npz", allow_pickle=False) as file:
        assert (file["groups"].dtype, file["groups"].tolist()) == (np.int64, [1, 0, 1])
    loaded = Predictions.load(tmp_path / "p.npz")
    swapped = loaded.with_classes(rfdlc.Classes(("y", "x")))
    assert (
        loaded.groups.tolist()
        == swapped.groups.tolist()
        == swapped.scores.groups.tolist()
        == [1, 0, 1]
    )
    with pytest.raises(
        InputError,
        match=r"groups have shape \(2,\): expected one label per sample, \(3,\)",
    ):
        Predictions(probabilities=given.scores.values, groups=[0, 1])


def test_predictions_of_another_format_version_are_refused(tmp_path):
    path = tmp_path / "p.npz"
    arrays = {"probabilities": np.full((1, 2), 0.5), "version": np.array(2)}
    np.savez(path, format=np.array("rfdlc-predictions"), **arrays)
    message = r"p.npz has format version 2: this rfdlc reads version 1; write it again"
    with pytest.raises(InputError, match=message):
        Predictions.load(path)
    np.savez(path, **arrays)  # somebody else's
    assert len(Predictions.load(path)) == 1


def test_files_without_groups_are_read(tmp_path):
    path = tmp_path / "predictions.npz"
    Predictions(probabilities=[[0.5, 0.5]], targets=[0]).save(path)
    assert Predictions.load(path).groups is None
    with np.load(path, allow_pickle=False) as file:
        assert "groups" not in file.files

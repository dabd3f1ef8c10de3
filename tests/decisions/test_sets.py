"""Prediction sets: coverage by simulation with known truth, set decisions by brute
force over all sets.
"""

from itertools import combinations

import numpy as np
import pytest

from rfdlc.decisions.decider import Decider
from rfdlc.decisions.sets import DISCOUNTS, PredictionSets, SetUtility
from rfdlc.decisions.utility import Utility
from rfdlc.errors import InputError
from rfdlc.evaluation.evaluate import evaluate
from rfdlc.probabilities.classes import Classes
from rfdlc.probabilities.scores import softmax

PRIOR = np.array([0.6, 0.25, 0.1, 0.05])


def world(samples, rng, prior=PRIOR, noise=1.0):
    """Labels, and logits that carry the prior: one noisy view of the class."""
    y = rng.choice(len(prior), samples, p=prior)
    x = 1.2 * np.eye(len(prior))[y] + rng.normal(size=(samples, len(prior)))
    return noise * (1.2 * x) + np.log(prior), y


def decider(
    kind="marginal", coverage=0.9, samples=1000, seed=0, prior=PRIOR, **options
):
    z, y = world(samples, np.random.default_rng(seed), prior)
    classes = Classes.from_counts(np.rint(prior * 1000).astype(int).tolist())
    new = Decider(Utility.one_hot(classes), train_prior="train", calibration=None)
    return new.fit_sets(z, y, logits=True, kind=kind, coverage=coverage, **options)


# --- the quantile
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "coverage"), [(9, 0.9), (10, 0.9), (57, 0.8), (999, 0.95), (1000, 0.9)]
)
def test_threshold_is_the_finite_sample_quantile(samples, coverage):
    p = np.random.default_rng(samples).dirichlet(np.ones(3), samples)
    y = np.random.default_rng(1).integers(3, size=samples)
    sets = PredictionSets.fit(
        p, y, Classes.from_counts([5, 3, 2]), kind="marginal", coverage=coverage
    )
    # the ceil((n + 1) coverage)-th smallest of 1 - p(y), as in the papers
    nonconformity = np.sort(1 - p[np.arange(samples), y])
    expected = 1 - nonconformity[int(np.ceil((samples + 1) * coverage - 1e-9)) - 1]
    assert np.allclose(sets.thresholds, expected, rtol=2e-5)
    inside = sets.members(p, Utility.one_hot(3))
    assert inside[np.arange(samples), y].mean() >= coverage


def test_macro_divides_by_the_prior_once():
    rng = np.random.default_rng(0)
    z, y = world(5000, rng)
    new = decider("macro", samples=5000)
    ratio = np.array(new.sets.thresholds) / PRIOR
    assert np.allclose(ratio, ratio[0])
    # Scores that carry a uniform prior are adjusted already: macro and marginal sets
    # are the same.
    flat = Decider(
        Utility.one_hot(4), train_prior="uniform", calibration=None, target_prior=None
    )
    adjusted = z - np.log(PRIOR)
    macro, plain = (
        flat.fit_sets(adjusted, y, logits=True, kind=kind)
        for kind in ("macro", "marginal")
    )
    assert np.allclose(macro.sets.thresholds, plain.sets.thresholds)
    # An unknown prior is the mean of the held-out probabilities.
    unknown = Decider(Utility.one_hot(4), calibration=None).fit_sets(
        z, y, logits=True, kind="macro"
    )
    assert np.allclose(
        np.array(unknown.sets.thresholds) / softmax(z).mean(axis=0), ratio[0], rtol=0.1
    )


# --- coverage
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["marginal", "class", "macro"])
def test_promised_coverage_in_the_mean_of_simulated_splits(kind):
    found, by_class = [], []
    for seed in range(60):
        z, y = world(4000, np.random.default_rng(1000 + seed))
        covered = decider(kind, seed=seed).decide_sets(z, logits=True)[
            np.arange(4000), y
        ]
        found.append(covered.mean())
        by_class.append([covered[y == c].mean() for c in range(4)])
    if kind == "class":
        assert np.abs(np.mean(by_class, axis=0) - 0.9).max() < 0.03
    else:
        assert abs(np.mean(found) - 0.9) < 0.01
    worst = np.mean(by_class, axis=0).min()
    assert (worst < 0.7) == (kind == "marginal")  # the rare class pays for small sets
    assert (worst > 0.85) == (kind != "marginal")


def test_samples_that_calibrated_are_used_out_of_fold():
    prior, found = np.full(10, 1 / 10), []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        (z, y), (new, truth) = world(200, rng, prior, 3.0), world(3000, rng, prior, 3.0)
        fitted = Decider(Utility.one_hot(10), calibration="matrix-scaling").fit(
            z, y, logits=True
        )
        both = fitted.fit_sets(z, y, kind="marginal", logits=True)
        inside = PredictionSets.fit(
            np.asarray(fitted.probabilities(z, logits=True)),
            y,
            fitted.utility.classes,
            kind="marginal",
        )
        pair = both, fitted.replace(sets=inside)
        found.append(
            [
                each.decide_sets(new, logits=True)[np.arange(3000), truth].mean()
                for each in pair
            ]
        )
    out_of_fold, in_sample = np.mean(found, axis=0)
    assert out_of_fold > 0.885
    assert in_sample < out_of_fold - 0.02


def test_a_shifted_prior_is_weighed():
    rng = np.random.default_rng(0)
    z, y = world(5000, rng)
    target = PRIOR[::-1]
    new = Decider(
        Utility.one_hot(4), train_prior=PRIOR, target_prior=target, calibration=None
    )
    sets = new.fit_sets(z, y, logits=True, kind="marginal")
    fresh, truth = world(20000, rng, target)
    scores = fresh - np.log(target) + np.log(PRIOR)  # a model of the training prior
    assert (
        abs(sets.decide_sets(scores, logits=True)[np.arange(20000), truth].mean() - 0.9)
        < 0.02
    )


@pytest.mark.parametrize("moved", [0.0, 0.05, 0.15])
def test_small_known_shifts_are_weighed_too(moved):
    rng, shares, covered = (
        np.random.default_rng(0),
        np.array([0.9, 0.06, 0.03, 0.01]),
        [],
    )
    means = rng.normal(0, 1.3, (4, 3))
    target = shares + moved * np.array([-1, 0.2, 0.3, 0.5])

    def drawn(count, prior):
        y = rng.choice(4, count, p=prior)
        x = means[y] + rng.normal(size=(count, 3))
        return np.log(shares) - ((x[:, None] - means) ** 2).sum(axis=-1) / 2, y

    for _ in range(10):
        (z, y), (new, truth) = drawn(1500, shares), drawn(5000, target)
        decider = Decider(
            Utility.one_hot(4),
            train_prior=shares,
            target_prior=target,
            calibration=None,
        )
        sets = decider.fit_sets(
            z, y, logits=True, kind="marginal", coverage=0.95
        ).decide_sets(new, logits=True)
        covered.append(sets[np.arange(5000), truth].mean())
    assert np.mean(covered) == pytest.approx(0.95, abs=0.01)


def test_ties_are_covered_at_random_if_asked():
    rng = np.random.default_rng(0)
    p = np.tile([[0.8, 0.2], [0.6, 0.4]], (1000, 1))
    y = (rng.random(2000) > p[:, 0]).astype(int)
    plain, randomised = (
        Decider(Utility.one_hot(2), calibration=None).fit_sets(
            p, y, kind="marginal", coverage=0.75, randomised=each
        )
        for each in (False, True)
    )
    covered = [
        each.decide_sets(p, seed=1)[np.arange(2000), y].mean()
        for each in (plain, randomised)
    ]
    assert covered[0] > 0.84
    assert abs(covered[1] - 0.75) < 0.02
    assert np.array_equal(
        randomised.decide_sets(p, seed=3), randomised.decide_sets(p, seed=3)
    )
    assert Decider.from_dict(randomised.to_dict()).sets == randomised.sets


def test_sets_are_never_empty_unless_asked():
    z, _ = world(2000, np.random.default_rng(5))
    full, bare = decider(coverage=0.5), decider(coverage=0.5, empty=True)
    sizes = [each.decide_sets(z, logits=True).sum(axis=1) for each in (full, bare)]
    assert sizes[0].min() == 1
    assert sizes[1].min() == 0
    alone = full.decide_sets(z, logits=True)[sizes[1] == 0]
    assert np.array_equal(alone.argmax(axis=1), z[sizes[1] == 0].argmax(axis=1))


# --- rare classes
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["marginal", "class", "macro"])
def test_a_largest_size_keeps_the_most_probable_classes(kind):
    """Against a loop over samples; the share of held-out samples that is covered is
    measured, and nothing promised.
    """
    rng = np.random.default_rng(0)
    z, y = world(1000, rng, noise=0.5)
    p = softmax(z)
    free = Decider(Utility.one_hot(4)).fit_sets(p, y, kind=kind, coverage=0.95)
    with pytest.warns(
        UserWarning,
        match=r"of at most 2 classes contain .* a coverage of 0.95 is not promised",
    ):
        cut = Decider(Utility.one_hot(4)).fit_sets(
            p, y, kind=kind, coverage=0.95, max_size=2
        )
    expected = free.decide_sets(p)
    assert expected.sum(axis=1).max() > 2
    for row, own in zip(p, expected, strict=True):
        inside = sorted(np.flatnonzero(own), key=lambda c: -row[c])
        own[inside[2:]] = False
    np.testing.assert_array_equal(cut.decide_sets(p), expected)
    assert cut.sets.held_out == pytest.approx(expected[np.arange(len(y)), y].mean())
    assert cut.sets.held_out < 0.95
    assert not any(
        row["promised_for"] for row in cut.sets.promises(cut.utility.classes)
    )
    again = Decider.from_dict(cut.to_dict())
    assert again.sets == cut.sets
    np.testing.assert_array_equal(again.decide_sets(p), expected)
    with pytest.raises(InputError, match="the largest size of a set is 0"):
        free.fit_sets(p, y, max_size=0)


def test_coverage_of_samples_that_are_handed_over():
    """Of sets that are mostly one class it is far below the promise, as these samples
    are the hard ones.
    """
    rng = np.random.default_rng(0)
    (z, y), (q, truth) = world(1000, rng), world(4000, rng)
    p, q = softmax(z), softmax(q)
    plain = Decider(Utility.one_hot(4).with_abstain(0.6))
    found = plain.fit_sets(p, y, kind="marginal", coverage=0.7)
    handed, inside = found.decide(q) == 4, found.decide_sets(q)[np.arange(4000), truth]
    result = evaluate(q, truth, found)
    assert result.set_coverage_handed_over == pytest.approx(inside[handed].mean())
    assert (
        result.set_coverage_handed_over < 0.6 < 0.67 < result.set_coverage["marginal"]
    )
    assert "coverage of sets, handed over" in [label for label, _, _ in result.rows()]
    assert evaluate(q, truth, plain).set_coverage_handed_over == {}


def test_rare_classes_share_a_promise_that_is_reported():
    counts = [900, 500, 30, 9, 8, 7, 3, 1]
    classes = Classes.from_counts(counts, [f"c{i}" for i in range(8)])
    samples = [90, 50, 21, 9, 8, 7, 0, 0]
    y = np.repeat(np.arange(8), samples)
    p = np.random.default_rng(0).dirichlet(np.ones(8), len(y))
    sets = PredictionSets.fit(p, y, classes, kind="class", coverage=0.9)
    promised = {row["class"]: row["promised_for"] for row in sets.promises(classes)}
    assert promised["c0"] == ["c0"]
    assert promised["c2"] == ["c2"]
    assert (
        promised["c3"] == promised["c7"] == ["c3", "c4", "c5", "c6", "c7"]
    )  # 24 samples together
    scores = np.sort(p[np.arange(len(y)), y][y >= 3])
    assert np.isclose(
        sets.thresholds[7], scores[1], rtol=2e-5
    )  # floor(25 * 0.1) = 2nd smallest


def test_too_few_rare_samples_borrow_and_lose_the_promise():
    classes = Classes.from_counts([90, 50, 3], ["a", "b", "c"])
    y = np.repeat([0, 1, 2], [90, 50, 3])
    p = np.random.default_rng(0).dirichlet(np.ones(3), len(y))
    with pytest.warns(UserWarning, match="those of b are used as well"):
        sets = PredictionSets.fit(p, y, classes, kind="class")
    assert [row["promised_for"] for row in sets.promises(classes)] == [["a"], ["b"], []]


# --- sets as actions
# --------------------------------------------------------------------------------------


def brute_force(p, utility, discount):
    """The highest expected utility of all actions and all sets, by the definition."""
    matrix, own, count = utility.matrix, utility.class_action, len(p)
    allowed = [
        c for c in range(count) if own[c] >= 0 and matrix[:, own[c]].min() > -1e6
    ]
    best = (p @ matrix).max()
    for size in range(2, len(discount) + 1):
        for chosen in combinations(allowed, size):
            value = 0.0
            for y in range(count):
                wrong = [matrix[y, own[d]] for d in allowed if d != y]
                missed = min(wrong) if wrong else matrix[y, own[y]]
                value += p[y] * (
                    missed
                    + (
                        discount[size - 1] * (matrix[y, own[y]] - missed)
                        if y in chosen
                        else 0
                    )
                )
            best = max(best, value)
    return best


def worth(chosen, p, utility, sets):
    """The expected utility of a decision, by the definition."""
    _, gain, alone = SetUtility.terms(utility)
    members, missed = np.flatnonzero(chosen), (utility.matrix - alone)[:, 0]
    if len(members) < 2:
        action = (
            utility.class_action[members[0]]
            if len(members)
            else (p @ utility.matrix).argmax()
        )
        return p @ utility.matrix[:, action]
    return p @ missed + sets.discount[len(members) - 1] * (p * gain)[members].sum()


@pytest.mark.parametrize("part", range(4))
def test_set_decisions_equal_brute_force(part):
    rng = np.random.default_rng(part)
    for case in range(250):
        count = int(rng.integers(2, 11 if case % 25 == 0 else 7))
        p = rng.dirichlet(np.full(count, rng.choice([0.3, 1, 5])))
        matrix = (
            np.eye(count)
            if case % 3 == 0
            else rng.normal(size=(count, count)) + 2 * np.eye(count)
        )
        matrix[:, rng.integers(count)] -= (
            1e7 * (case % 5 == 0) * (rng.random(count) < 0.3)
        )
        utility = Utility(matrix)
        utility = (
            utility.with_abstain(float(rng.uniform(-1, 1))) if case % 2 else utility
        )
        kind = ("u65", "u80", lambda k: k**-0.5, np.append(1, rng.random(count - 1)))[
            case % 4
        ]
        sets = SetUtility.of(kind, count)
        chosen = sets.members(p[None], utility)[0]
        best = brute_force(p, utility, sets.discount)
        assert worth(chosen, p, utility, sets) == pytest.approx(
            best, abs=1e-9 * max(1, abs(best))
        )
        forbidden = matrix.min(axis=0) <= -1e6
        assert chosen.sum() < 2 or not (chosen & forbidden).any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_and_sizes_that_are_left_out_are_never_the_best(dtype):
    """The best set of each size is known without search; equal probabilities, negative
    gains, sums other than one.
    """
    rng, count = np.random.default_rng(0), 30
    for case in range(24):
        p = rng.dirichlet(np.full(count, (0.03, 0.3, 3)[case % 3]), 400)
        p = (
            np.round(p * 8) + (case % 4 == 1) * 1e-3 if case % 2 else p * (1 + case)
        ).astype(dtype)
        matrix = (
            np.eye(count)
            if case % 4 < 2
            else rng.normal(size=(count, count)) + (case % 5) * np.eye(count)
        )
        utility = Utility(matrix).with_abstain(float(rng.uniform(-1, 1)))
        kind = (
            "u65",
            "u80",
            lambda k: k**-0.5,
            np.append(1, rng.random(9)),
            [1, 0.5, 0.9],
        )[case % 5]
        sets = SetUtility.of(kind, count)
        _, gain, alone = SetUtility.terms(utility)
        falling = np.cumsum(-np.sort(-p * gain, axis=1), axis=1)[
            :, 1 : len(sets.discount)
        ]
        best = np.maximum(
            (p @ alone).max(axis=1), (falling * sets.discount[1:]).max(axis=1)
        )
        chosen = sets.members(p, utility)
        size = chosen.sum(axis=1)
        found = np.array(sets.discount)[size - 1] * (p * gain * chosen).sum(axis=1)
        found = np.where(size > 1, found, (p @ alone).max(axis=1))
        np.testing.assert_allclose(found, best, rtol=2e-5, atol=2e-5 * p.max())


def test_u65_and_u80_are_named_after_pairs():
    assert [round(float(DISCOUNTS[name](2)), 6) for name in ("u65", "u80")] == [
        0.65,
        0.8,
    ]


def test_equally_good_classes_keep_the_size():
    sets = SetUtility((1.0, 0.9))
    assert sets.members(np.full((1, 4), 0.25), Utility.one_hot(4)).tolist() == [
        [True, True, False, False]
    ]


def test_a_set_is_empty_where_handing_over_is_worth_more():
    utility = Utility.one_hot(3).with_abstain(0.9)
    chosen = SetUtility.of("u65", 3).members(
        np.array([[0.4, 0.3, 0.3], [1, 0, 0]]), utility
    )
    assert chosen.sum(axis=1).tolist() == [0, 1]


# --- the decider
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["marginal", "class", "macro", "u80"])
def test_sets_are_saved_with_the_decider(tmp_path, kind):
    new = decider() if kind == "u80" else decider(kind)
    new = new.replace(sets="u80") if kind == "u80" else new
    new.save(tmp_path / "decider.json")
    loaded, (z, _) = (
        Decider.load(tmp_path / "decider.json"),
        world(100, np.random.default_rng(9)),
    )
    assert loaded.sets == new.sets
    assert np.array_equal(
        loaded.decide_sets(z, logits=True), new.decide_sets(z, logits=True)
    )


def test_other_probabilities_need_other_sets():
    new = decider()
    with pytest.warns(
        UserWarning,
        match="target_prior changed: the sets were fitted to other probabilities",
    ):
        moved = new.replace(target_prior="uniform")
    assert moved.sets is None
    with pytest.raises(InputError, match="has no sets"):
        moved.decide_sets([[0.7, 0.1, 0.1, 0.1]])
    scaled = Utility(2 * np.eye(4))
    same = new.replace(target_prior=new.model.target_prior, utility=scaled)
    assert same.sets == new.sets
    utility_sets = new.replace(sets="u65")
    assert utility_sets.replace(target_prior="uniform").sets == utility_sets.sets


@pytest.mark.parametrize("coverage", [0, 1, -0.1, 90, float("nan"), "0.9"])
def test_coverage_outside_0_and_1(coverage):
    with pytest.raises(
        InputError, match=r"coverage is .*: expected a share between 0 and 1"
    ):
        decider(coverage=coverage)


def test_bad_sets_are_refused():
    z, y = world(50, np.random.default_rng(0))
    new = Decider(Utility.one_hot(4))
    for wrong, message in (
        ({"kind": "marginl"}, "sets 'marginl' is unknown.*did you mean 'marginal'"),
        (
            {"coverage": 0.99},
            (
                "50 held-out samples cannot promise a coverage of 0.99: expected at"
                " least 99"
            ),
        ),
        (
            {"kind": "class", "least": 3},
            "least is 3: a coverage of 0.9 needs at least 9",
        ),
    ):
        with pytest.raises(InputError, match=message):
            new.fit_sets(z, y, logits=True, **wrong)
    with pytest.raises(InputError, match="at least one particle and one sample"):
        new.fit_sets(z[:0], y[:0], logits=True)
    with pytest.raises(InputError, match="no targets"):
        new.fit_sets(z, logits=True)
    with pytest.raises(InputError, match="sets are for 4 classes, but there are 3"):
        Decider(Utility.one_hot(3), sets=decider().sets)
    table = decider().to_dict()
    for wrong, message in (
        (
            {"thresholds": [0.1, 0.1, float("nan"), 0.1]},
            "expected numbers of 0 or more",
        ),
        ({"groups": [0]}, "expected one per class"),
        ({"coverage": 2}, "coverage is 2"),
    ):
        with pytest.raises(InputError, match=message):
            Decider.from_dict(table | {"sets": table["sets"] | wrong})
    for discount in ((0.5, 0.2), (1, -1), (1, float("nan")), ()):
        with pytest.raises(InputError, match="discount of sets"):
            SetUtility(discount)
    with pytest.raises(
        InputError, match=r"discount 'u66' is unknown.*did you mean 'u65'"
    ):
        Decider(Utility.one_hot(3), sets="u66")


@pytest.mark.parametrize("kind", ["class", "macro"])
def test_samples_that_calibrated_with_equal_weights_keep_the_promise(kind):
    """Folds carry the prior that the decider carries, however its calibration was
    weighted.
    """
    rng, prior = np.random.default_rng(0), np.array([0.85, 0.1, 0.05])
    (z, y), (new, true) = world(2000, rng, prior), world(20_000, rng, prior)
    fitted = Decider(
        Utility.one_hot(3),
        train_prior=prior,
        calibration="bias-corrected-temperature",
        target_prior=None,
    )
    sets = fitted.fit(z, y, logits=True, balanced=True).fit_sets(
        z, y, logits=True, kind=kind, coverage=0.9
    )
    covered = sets.decide_sets(new, logits=True)[np.arange(len(true)), true]
    assert covered.mean() == pytest.approx(0.9, abs=0.02)
    if kind == "class":
        assert [covered[true == c].mean() for c in range(3)] == pytest.approx(
            [0.9] * 3, abs=0.06
        )

"""How often labels report a missed promise or a gain where there is none; outcomes are
drawn from known posteriors.

A mistake on the rare class costs 50, so that outcomes are skewed.
"""

import numpy as np
import pytest

from rfdlc import Decider, Utility, evaluate
from rfdlc.monitoring.designs import Design
from rfdlc.monitoring.feedback import _gain, options, realised_utility
from rfdlc.monitoring.monitor import Decided
from rfdlc.probabilities.scores import softmax

MIX = np.array([0.85, 0.12, 0.03])
COSTS = Utility([[0, -1, -1], [-5, 0, -1], [-50, -50, 0]]).with_abstain(-0.8)
EQUAL = Utility.one_hot(3).with_abstain(0.95)


def draw(rng, samples, sharp=1.0):
    """Exact posteriors if `sharp` is 1, and true classes."""
    y = rng.choice(3, samples, p=MIX)
    return (
        softmax(
            sharp
            * (1.8 * (rng.normal(size=(samples, 3)) + 1.8 * np.eye(3)[y]) + np.log(MIX))
        ),
        y,
    )


def realised(rng, samples, reviewed, sharp=1.0, utility=COSTS):
    """What labels show of one stream; decisions of a largest probability above 0.9 have
    labels with a chance.
    """
    p, y = draw(rng, samples, sharp)
    expected = p @ utility.matrix
    actions = expected.argmax(axis=1)
    rows = np.flatnonzero(
        rng.random(samples) < np.where(p.max(axis=1) > 0.9, reviewed, 1)
    )
    design = Design.parse(f"by-confidence:0.9=1,1={reviewed}")
    group = design.strata(utility, actions, p.max(axis=1))
    return realised_utility(
        utility, y[rows], actions, expected.max(axis=1), group, rows
    )


@pytest.mark.parametrize(
    ("utility", "samples", "reviewed", "least"),
    [
        (COSTS, 300, 1, 0),
        (COSTS, 1000, 0.3, 0),
        (COSTS, 3000, 1, 0.015),
        (EQUAL, 300, 1, 0),
        (EQUAL, 1000, 0.3, 0),
        (EQUAL, 3000, 1, 0.03),
    ],
)
def test_the_promise_of_an_exact_posterior_is_missed_by_chance_only(
    utility, samples, reviewed, least
):
    rng = np.random.default_rng(0)
    missed = [
        realised(rng, samples, reviewed, utility=utility).broken for _ in range(500)
    ]
    assert (
        least <= np.mean(missed) < 0.07
    )  # 5% and two standard errors; less where few mistakes can be expected


@pytest.mark.parametrize("reviewed", [1, 0.3])
def test_a_promise_of_overconfident_scores_is_found_to_be_missed(reviewed):
    rng = np.random.default_rng(1)
    found = [realised(rng, 1000, reviewed, sharp=2.0) for _ in range(100)]
    assert np.mean([each.broken and each.utility_gap > 0 for each in found]) > 0.8
    assert "decisions are worth less than promised" in next(
        each.promise for each in found if each.broken
    )


def test_with_all_labels_the_gap_is_that_of_evaluate():
    p, y = draw(np.random.default_rng(2), 400)
    expected = p @ COSTS.matrix
    none, rows = np.zeros(400, np.int64), np.arange(400)
    found = realised_utility(
        COSTS, y, expected.argmax(axis=1), expected.max(axis=1), none, rows
    )
    result = evaluate(p, y, utility=COSTS)
    assert found.utility_gap == pytest.approx(result.utility_gap)
    (low, high), (lower, higher) = (
        result.intervals["utility_gap"],
        found.utility_gap_interval,
    )
    assert 1 < (higher - lower) / (high - low) < 1.5  # strict bounds
    assert "the promise is met, as far as these labels tell" in found.promise


def test_actions_of_a_known_worth_keep_their_promise():
    expected = np.full(60, -0.8) + 1e-9  # rounded sums of probabilities
    rows, none = np.arange(60), np.zeros(60, np.int64)
    found = realised_utility(COSTS, none, np.full(60, 3), expected, none, rows)
    assert found.utility_gap_interval == (0, 0)
    assert not found.broken


@pytest.mark.parametrize("utility", [COSTS, EQUAL])
@pytest.mark.parametrize("samples", [100, 400])
def test_no_other_decisions_are_shown_to_pay_where_the_served_ones_are_the_best(
    utility, samples
):
    """Three other ways to decide exact posteriors lose or gain nothing: each has a true
    gain of at most 0.
    """
    rng, false = np.random.default_rng(3), 0
    for _ in range(600):
        p, y = draw(rng, samples)
        others = [
            softmax(a * np.log(p) + b * rng.normal(size=3))
            for a, b in ((0.9, 0), (1, 0.15), (1.1, 0.1))
        ]
        old, *new = ((each @ utility.matrix).argmax(axis=1) for each in (p, *others))
        false += any(
            _gain(utility, y, old, each, np.ones(samples), 3)[1][0] > 0 for each in new
        )
    assert false <= 23  # 2.5% of 600, and two standard errors


def test_a_recalibration_seldom_pays_for_an_exact_posterior():
    rng, decider, paid = np.random.default_rng(4), Decider(COSTS), 0
    for _ in range(20):
        p, y = draw(rng, 300)
        found = options(
            decider, Decided.of(decider, p), np.arange(300), y, np.ones(300)
        )
        paid += any(option.pays for option in found)
    assert paid <= 2  # it was one in five


@pytest.mark.parametrize("utility", [COSTS, EQUAL])
def test_a_recalibration_of_overconfident_scores_still_pays(utility):
    rng, decider = np.random.default_rng(5), Decider(utility)
    p, y = draw(rng, 2000, sharp=3.0)
    best = options(decider, Decided.of(decider, p), np.arange(2000), y, np.ones(2000))[
        0
    ]
    assert best.pays
    p, y = draw(rng, 200_000, sharp=3.0)
    gains = (
        utility.matrix[y, best.decider.decide(p)] - utility.matrix[y, decider.decide(p)]
    )
    assert best.interval[0] < gains.mean() < best.interval[1]

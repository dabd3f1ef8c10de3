"""Labels that came later: inverse propensities, and deciders calibrated again on top of
what is served.
"""

import numpy as np
import pytest

from rfdlc import Decider, InputError, Utility
from rfdlc.monitoring.designs import Design
from rfdlc.monitoring.feedback import (
    decider_version,
    on_top,
    options,
    realised_utility,
    review_weights,
    revised,
)
from rfdlc.monitoring.monitor import Decided
from tests.monitoring.simulated_service import MIX, U, model


def strata_of(decisions):
    design = Design.parse("by-confidence:0.9=20%,1=2%")
    return design.strata(U, decisions.actions, decisions.probabilities.max(axis=1))


@pytest.fixture(scope="module")
def served():
    rng = np.random.default_rng(0)
    return Decider(U, train_prior="train").fit(*model(rng, 2000), logits=True)


@pytest.fixture(scope="module")
def stream(served):
    z, y = model(
        np.random.default_rng(1), 20_000, [0.4, 0.3, 0.3], sharp=2.5
    )  # another prior, and overconfident
    return z, y, Decided.of(served, z, logits=True)


def test_intervals_cover_the_mean_of_all_decisions_though_reviews_are_biased(stream):
    _, y, decisions = stream
    values, group, rng = (
        U.matrix[y, decisions.actions],
        strata_of(decisions),
        np.random.default_rng(2),
    )
    chance = np.where(
        decisions.probabilities.max(axis=1) < 0.9, 0.2, 0.02
    )  # unsure ones are reviewed more often
    hits, naive = {"estimated": 0, "given": 0}, 0
    for _ in range(100):
        rows = np.flatnonzero(rng.random(len(y)) < chance)
        for name, known in (("estimated", None), ("given", chance[rows])):
            found = realised_utility(
                U, y[rows], decisions.actions, decisions.expected, group, rows, known
            )
            hits[name] += found.interval[0] <= values.mean() <= found.interval[1]
        naive += abs(values[rows].mean() - values.mean()) < abs(
            found.utility - values.mean()
        )
    assert min(hits.values()) >= 88
    assert naive < 20


def test_all_labels_leave_nothing_open(stream):
    _, y, decisions = stream
    values, rows = U.matrix[y, decisions.actions], np.arange(len(y))
    for known in (None, np.ones(len(y))):
        found = realised_utility(
            U,
            y,
            decisions.actions,
            decisions.expected,
            strata_of(decisions),
            rows,
            known,
        )
        assert found.utility == pytest.approx(values.mean())
        assert np.ptp(found.interval) == pytest.approx(0)
        assert found.covered == 1
        assert found.ends == "every decision has a label"


@pytest.mark.parametrize(("labels", "known"), [(2, False), (19, False), (20, True)])
def test_few_labels_have_no_interval(stream, labels, known):
    rows, none, (_, y, decisions) = (
        np.arange(labels),
        np.zeros(40, np.int64),
        (each[:40] for each in stream),
    )
    found = realised_utility(
        U, y[rows], decisions.actions, decisions.expected, none, rows
    )
    assert [
        each is not None for each in (found.interval, found.utility_gap_interval)
    ] == [known, known]
    assert known or (
        "too few labels" in found.ends
        and "too few labels" in found.promise
        and not found.broken
    )


def test_few_labels_without_a_mistake_do_not_promise_that_there_is_none(stream):
    _, y, decisions = stream
    values, group, rng = (
        U.matrix[y, decisions.actions],
        strata_of(decisions),
        np.random.default_rng(3),
    )
    right = np.flatnonzero(values == 1)[:30]
    found = realised_utility(
        U, y[right], decisions.actions, decisions.expected, group, right
    )
    assert found.interval[0] < 0.8
    assert (found.utility, found.interval[1]) == pytest.approx((1, 1))
    hits = {"estimated": 0, "given": 0}
    for _ in range(200):  # 200 labels, of which a few are of costly mistakes
        rows = np.flatnonzero(rng.random(len(y)) < 0.01)
        for name, known in (("estimated", None), ("given", np.full(len(rows), 0.01))):
            found = realised_utility(
                U, y[rows], decisions.actions, decisions.expected, group, rows, known
            )
            hits[name] += found.interval[0] <= values.mean() <= found.interval[1]
    assert min(hits.values()) >= 185


def test_a_budget_is_kept_after_a_recalibration(served, stream):
    z, y, _ = stream
    limited = served.fit_budget(
        *model(np.random.default_rng(4), 2000), budget=0.01, logits=True
    )
    logged, rows = Decided.of(limited, z, logits=True), np.arange(0, 20_000, 40)
    for option in options(limited, logged, rows, y[rows], np.ones(len(rows))):
        chosen, unlimited = (
            d.decide(z, logits=True)
            for d in (option.decider, option.decider.replace(budget=None))
        )
        handed, more = (
            (U.decided_class[each] < 0).mean() for each in (chosen, unlimited)
        )
        assert handed == pytest.approx(min(0.01, more), abs=0.0005)
        gained = (U.matrix[y, chosen] - U.matrix[y, logged.actions]).mean()
        assert option.interval[0] - 0.02 < gained < option.interval[1] + 0.02


def test_recalibration_pays_where_scores_are_overconfident(served, stream):
    z, y, decisions = stream
    rows = np.arange(0, 20_000, 10)
    found = options(
        served, decisions, rows, y[rows], review_weights(strata_of(decisions), rows)
    )
    best = found[0]
    assert best.pays
    assert best.name == "both"
    others = np.setdiff1d(np.arange(20_000), rows)
    gained = (
        U.matrix[y, best.decider.decide(z, logits=True)]
        - U.matrix[y, decisions.actions]
    )
    assert best.interval[0] - 0.02 < gained[others].mean() < best.interval[1] + 0.02
    assert best.decider.model.decided_prior == pytest.approx([0.4, 0.3, 0.3], abs=0.06)


def test_a_recalibrated_decider_acts_on_scores_as_on_served_probabilities(
    served, stream
):
    (z, y, decisions), rows = (each[:1000] for each in stream), np.arange(500)
    for option in options(served, decisions, rows, y[rows], np.ones(500)):
        scale, bias = on_top(served, option.decider)
        p = np.asarray(option.decider.probabilities(z, logits=True))
        assert revised(decisions.probabilities, scale, bias) == pytest.approx(
            p, abs=1e-4
        )  # floored at 1e-12
        assert decider_version(option.decider) != decider_version(served)
        again = Decider.from_dict(option.decider.to_dict())
        assert decider_version(again) == decider_version(option.decider)


def test_a_class_without_a_target_prior_stays_without_one(stream):
    z, y, _ = (each[:2000] for each in stream)
    decider = Decider(
        U, calibration=None, train_prior="train", target_prior=[0.7, 0.3, 0.0]
    )
    decisions, rows = Decided.of(decider, z, logits=True), np.arange(0, 2000, 4)
    for option in options(decider, decisions, rows, y[rows] % 2, np.ones(len(rows))):
        assert option.decider.model.decided_prior[2] == 0
        assert (
            np.asarray(option.decider.probabilities(z, logits=True))[:, 2] == 0
        ).all()


def test_other_deciders_and_few_labels_are_refused(served, stream):
    _, y, decisions = stream
    other = Decider(U, calibration="matrix-scaling", train_prior="train")
    other = other.fit(*model(np.random.default_rng(3), 2000), logits=True)
    with pytest.raises(
        InputError, match="not recalibrated from the one that is served"
    ):
        on_top(served, other)
    watchful = served.fit_unfamiliar(
        *model(np.random.default_rng(3), 2000), logits=True
    )
    with pytest.raises(
        InputError, match="not recalibrated from the one that is served"
    ):
        on_top(served, watchful)
    with pytest.raises(
        InputError, match="10 labels of logged decisions: expected at least 50"
    ):
        options(served, decisions, np.arange(10), y[:10], np.ones(10))
    with pytest.raises(InputError, match="propensity: expected a probability above 0"):
        review_weights(strata_of(decisions), np.arange(2), [0.5, 0.0])
    assert served.model.decided_prior == pytest.approx(MIX)


def test_words_are_in_costs_where_these_were_given():
    costs, rng = Utility.from_costs([[0, 2], [5, 0]]), np.random.default_rng(0)
    y, actions = rng.integers(0, 2, (2, 100))
    given = y, actions, np.full(100, -1.0), np.zeros(100, dtype=int), np.arange(100)
    found, plain = (
        realised_utility(costs, *given),
        realised_utility(Utility([[1, -1], [-4, 1]]), *given),
    )
    assert (found.to_dict()["realised_cost"], found.to_dict()["promised_cost"]) == (
        -found.utility,
        1,
    )
    assert found.words.startswith(f"realised cost {-found.utility:.4f} (")
    low, high = found.utility_gap_interval
    said = (
        f"promised minus realised cost {-found.utility_gap:.4f} ({-high:.4f} to"
        f" {-low:.4f})"
    )
    assert found.promise.startswith(said)
    assert "realised_cost" not in plain.to_dict()
    assert "realised utility" in plain.words + plain.promise

"""Bets that hold at any time, windows beside the truth of a simulated world, and shifts
that are not label shift.
"""

import warnings

import numpy as np
import pytest

from rfdlc import Classes, Decider, InputError, Utility
from rfdlc.monitoring.evidence import STAKES, Evidence, PriorBets, mean_bets
from rfdlc.monitoring.monitor import (
    MISFIT,
    PRIOR,
    STRANGE,
    UTILITY,
    Decided,
    Monitor,
    Reference,
    assess,
    label_shift_misfit,
    misfit_level,
)
from tests.monitoring.simulated_service import MIX, U, model


@pytest.fixture(scope="module")
def decider():
    return Decider(U, calibration=None, train_prior="train")


@pytest.fixture(scope="module")
def reference(decider):
    return Reference.fit(decider, *model(np.random.default_rng(0), 8000), logits=True)


def watched(reference, decider, *streams, per_month=30_000):
    monitor = Monitor(reference, per_month=per_month)
    for stream in streams:
        monitor.update(Decided.of(decider, stream, logits=True))
    return monitor


def test_wealth_is_that_of_a_naive_sum_over_starts():
    rng, horizon = np.random.default_rng(1), 400
    blocks = [rng.normal(-0.01, 0.1, (50, 3)) for _ in range(6)]
    evidence, shares = (
        Evidence(np.array([1.0, 2.0, 1.0]), 0.01, horizon),
        np.array([0.25, 0.5, 0.25]),
    )
    for block in blocks:
        evidence.add(block)
    naive = 1 - 300 / horizon  # not bet yet
    for start in range(6):
        naive += (
            50 / horizon * shares @ np.exp(np.concatenate(blocks[start:]).sum(axis=0))
        )
    assert evidence.value == pytest.approx(naive)
    assert evidence.alarm is None
    assert evidence.samples == 300


def test_bets_on_a_mean_have_mean_one_at_the_null_and_a_level_that_holds():
    rng = np.random.default_rng(2)
    assert pytest.approx(np.ones(len(STAKES))) == np.exp(
        mean_bets(np.array([0.0, 1.0]), 0.25, 0.0)
    ).T @ [0.75, 0.25]
    alarms = 0
    for _ in range(200):
        evidence = Evidence(np.ones(len(STAKES)), 0.2, 1000)
        for _ in range(20):
            evidence.add(mean_bets((rng.random(50) < 0.25).astype(float), 0.25, 0.0))
        alarms += evidence.alarm is not None
    assert alarms <= 0.2 * 200


def test_ratios_of_priors_have_a_mean_of_one_where_nothing_has_changed(decider):
    z, _ = model(np.random.default_rng(3), 200_000)
    p = np.asarray(decider.probabilities(z, logits=True))
    bets = PriorBets(p.mean(axis=0), np.zeros((3, 3)), 1e12, 10.0)
    assert np.exp(bets.factors(p)).mean(axis=0) == pytest.approx(
        np.ones(len(bets.shares)), abs=1e-9
    )


def test_a_changed_prior_is_found_and_no_change_is_not(reference, decider):
    rng = np.random.default_rng(4)
    before = model(rng, 4000)[0]
    quiet = watched(reference, decider, before)
    assert not any(quiet.alarms.values())
    assert quiet.trusted
    shifted = watched(reference, decider, before, model(rng, 1000, [0.7, 0.2, 0.1])[0])
    assert 4000 < shifted.alarms[PRIOR] <= 5000
    assert shifted.trusted
    worse = watched(reference, decider, before, model(rng, 1000, [0.5, 0.25, 0.25])[0])
    assert 4000 < worse.alarms[UTILITY] <= 5000


def test_months_have_few_false_alarms(decider):
    rng, alarms = np.random.default_rng(5), []
    for _ in range(10):  # each with held-out data of its own
        reference = Reference.fit(decider, *model(rng, 1000), logits=True)
        alarms.append(
            any(
                watched(
                    reference, decider, model(rng, 3000)[0], per_month=3000
                ).alarms.values()
            )
        )
    assert sum(alarms) <= 1


def test_updates_in_any_pieces_are_the_same(reference, decider):
    stream = model(np.random.default_rng(6), 1003)[0]
    whole, pieces = (
        watched(reference, decider, stream),
        watched(reference, decider, *np.array_split(stream, 17)),
    )
    assert pieces.evidence[PRIOR].value == pytest.approx(whole.evidence[PRIOR].value)
    assert pieces.evidence[UTILITY].samples == 1000


def test_windows_estimate_the_utility_that_is_realised(reference, decider):
    rng = np.random.default_rng(7)
    for mix in (MIX, [0.6, 0.25, 0.15], [0.5, 0.2, 0.3]):
        z, y = model(rng, 5000, mix)
        decisions = Decided.of(decider, z, logits=True)
        window = assess(reference, decisions)
        realised = U.matrix[y, decisions.actions].mean()
        assert abs(window.expected_utility - realised) < 0.03
        assert window.interval[0] < realised < window.interval[1]
        assert np.abs(window.estimate.prior - mix).max() < 0.03
        for c in range(3):
            rows = decisions.decided == c
            assert window.accuracy[c] == pytest.approx((y[rows] == c).mean(), abs=0.05)
        assert window.handed_over["expected utility"] == pytest.approx(
            (decisions.decided < 0).mean()
        )


def test_a_window_that_is_all_handed_over_is_certain_of_its_utility(reference, decider):
    z = np.log(np.random.default_rng(11).dirichlet([50.0, 50.0, 50.0], 200)) + np.log(
        MIX
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        window = assess(
            reference,
            Decided.of(
                decider.replace(utility=U.with_abstain(0.9, "ask")), z, logits=True
            ),
        )
    assert window.handed_over["expected utility"] == 1
    assert window.expected_utility == pytest.approx(0.9)
    assert np.ptp(window.interval) < 1


def test_the_correction_of_expected_utilities_follows_another_prior(reference, decider):
    z, y = model(np.random.default_rng(8), 20_000, [0.4, 0.3, 0.3])
    decisions = Decided.of(decider, z, logits=True)
    realised = U.matrix[y, decisions.actions].mean()
    assert (
        abs(reference.signal(decisions).mean() - realised)
        < abs(decisions.expected.mean() - realised) / 3
    )


def test_label_shift_fits_and_blurred_input_does_not(reference, decider):
    rng = np.random.default_rng(9)
    shifted, blurred = (
        model(rng, 2000, [0.6, 0.25, 0.15])[0],
        model(rng, 2000, sharp=0.6)[0],
    )
    p = np.asarray(decider.probabilities(shifted, logits=True))
    assert label_shift_misfit(reference, p, np.array([0.6, 0.25, 0.15])) > 0.001
    monitor = watched(reference, decider, blurred)
    assert not monitor.trusted
    assert monitor.alarms[MISFIT] is not None


@pytest.mark.parametrize("seed", [0, 2])
def test_samples_that_calibrated_the_decider_are_a_fair_reference(seed):
    """Ten rare samples among 1,000: the calibrators of folds differ much from the one
    of new samples.
    """
    rng, mix = np.random.default_rng(seed), [0.985, 0.009, 0.004, 0.002]
    skew = np.array(
        [[1, 0.2, 0, 0], [0, 0.6, 0.3, 0], [0.2, 0, 0.8, -0.3], [0, 0.5, 0, 0.4]]
    )

    def skewed(samples, sharp=1.0):
        y = rng.choice(4, samples, p=mix)
        return (
            sharp
            * (2 * (rng.normal(size=(samples, 4)) + 2 * np.eye(4)[y]) + np.log(mix))
            @ skew,
            y,
        )

    held, y = skewed(1000)
    utility = Utility.one_hot(Classes.from_counts([9850, 90, 40, 20])).with_abstain(0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a class has one sample
        decider = Decider(utility, train_prior="train").fit(held, y, logits=True)
    reference = Reference.fit(decider, held, y, logits=True)
    same = Decided.of(decider, held, logits=True)
    assert label_shift_misfit(reference, same.probabilities, reference.prior) > 0.9
    assert not any(watched(reference, decider, held, skewed(5000)[0]).alarms.values())
    assert (
        watched(reference, decider, skewed(2000, sharp=0.6)[0]).alarms[MISFIT] == 1000
    )
    # What labels are compared with is still out of fold: the calibrator has seen them.
    realised = utility.matrix[y, same.actions]
    assert np.array_equal(reference.decisions.actions, same.actions)
    apart = decider.model.out_of_fold(
        *decider.model.read_labelled(held, y, logits=True)
    )
    assert np.array_equal(
        reference.realised, utility.matrix[y, decider.decide_probabilities(apart)]
    )
    assert not np.array_equal(reference.realised, realised)


def test_unfamiliar_input_raises_an_alarm():
    rng = np.random.default_rng(13)  # of twelve seeds, alarms come at 2,288 in the mean
    held, y = model(rng, 8000)
    decider = Decider(U, calibration=None, train_prior="train").fit_unfamiliar(
        held, y, false_alarm=0.005, logits=True
    )
    reference = Reference.fit(decider, held, y, logits=True)
    monitor = watched(reference, decider, model(rng, 2000)[0])
    assert monitor.trusted
    far = model(rng, 1000)[0] - 8 * (
        rng.random((1000, 1)) < 0.2
    )  # lower logits: a larger energy
    monitor.update(Decided.of(decider, far, logits=True))
    assert 2000 < monitor.alarms[STRANGE] < 2500
    assert not monitor.trusted


def test_traffic_is_checked(reference):
    with pytest.raises(
        InputError, match="per_month is 3: expected the samples of a month"
    ):
        Monitor(reference, per_month=3)


def test_scores_that_look_like_a_rare_class_are_more_than_label_shift():
    """As a feature in other units: nearly all samples become one rare class, with
    probabilities like any others.
    """
    rng, mix = np.random.default_rng(3), np.array([0.7, 0.18, 0.11, 0.01])
    decider = Decider(
        Utility.one_hot(Classes.from_counts((mix * 10_000).tolist())),
        calibration=None,
        train_prior="train",
    )

    def drawn(samples, prior, moved=0.0):
        y = rng.choice(4, samples, p=prior)
        return (
            2
            * (rng.normal(size=(samples, 4)) + 2 * np.eye(4)[y] + moved * np.eye(4)[3])
            + np.log(mix),
            y,
        )

    reference = Reference.fit(decider, *drawn(3000, mix), logits=True)
    for moved, prior in ((5.0, mix), (0.0, [0.4, 0.3, 0.2, 0.1])):
        p = np.asarray(
            decider.probabilities(drawn(2000, prior, moved)[0], logits=True)
        ).astype(float)
        found = assess(reference, Decided.of(decider, np.log(p), logits=True))
        assert (found.misfit < misfit_level(30_000, 2000)) == bool(moved)


def test_scores_under_another_prior_seldom_misfit(decider):
    """P-values of label shift are not smaller than they should be, whatever the size of
    the shift.
    """
    rng, found = np.random.default_rng(11), []
    for _ in range(10):
        reference = Reference.fit(decider, *model(rng, 3000), logits=True)
        for prior in (MIX, [0.7, 0.2, 0.1], [0.4, 0.3, 0.3]):
            for _ in range(5):
                found.append(
                    assess(
                        reference,
                        Decided.of(decider, model(rng, 1000, prior)[0], logits=True),
                    ).misfit
                )
    assert np.mean(np.array(found) < 0.05) <= 0.09
    assert np.mean(np.array(found) < 0.01) <= 0.035

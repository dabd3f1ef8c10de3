"""Designs that chose decisions for labels: what they say, what refuses them, and what
follows from labels that depend on the outcome.
"""

import numpy as np
import pytest

from rfdlc import Decider, InputError
from rfdlc.monitoring.designs import Design, Labels, sampled
from rfdlc.monitoring.feedback import options, realised_by, review_weights
from rfdlc.monitoring.monitor import Decided
from tests.monitoring.simulated_service import MIX, U, model

DECIDER = Decider(U, calibration=None, train_prior="train")  # exact posteriors


def stream(rng, samples, mix=MIX):
    z, y = model(rng, samples, mix)
    return Decided.of(DECIDER, z, logits=True), y


def sample(decisions, y, rows, design=None, sent=None, propensity=None):
    """The labels of some rows, as `rfdlc recalibrate` uses them."""
    return sampled(
        Labels(rows, y[rows], sent or [None] * len(rows), propensity),
        U,
        decisions.actions,
        decisions.probabilities.max(axis=1),
        decisions.expected,
        design,
        decisions.probabilities,
    )


def errors_first(rng, decisions, y):
    """Half of the mistakes and 3% of the others."""
    mistaken = (decisions.decided >= 0) & (decisions.decided != y)
    return np.flatnonzero(rng.random(len(y)) < np.where(mistaken, 0.5, 0.03))


def observed_shares(decisions, rows):
    """By-action, with the shares that happen to have labels."""
    parts = []
    for action in np.unique(decisions.actions):
        share = np.mean(np.isin(np.flatnonzero(decisions.actions == action), rows))
        parts.append(f"{U.actions[action]}={share:.6f}")
    return "by-action:" + ",".join(parts)


def test_designs_are_read_and_written():
    for text, again in (
        ("random", "random"),
        ("random:10%", "random:0.1"),
        ("by-action:abstain=100%,others=5%", "by-action:abstain=1,others=0.05"),
        ("by-confidence:0.9=20%,1=0.02", "by-confidence:0.9=0.2,1=0.02"),
        ("propensity", "propensity"),
    ):
        assert str(Design.parse(text)) == again
        assert Design.parse(again) == Design.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("randum", "labelled 'randum' is unknown: expected one of .*random"),
        ("random:0%", "share '0%': expected a share above 0%"),
        ("random:many", "share 'many': expected a share above 0%"),
        ("by-action", "share '': expected a share above 0%"),
        ("by-action:a=5%,a=6%", "every name may be there once"),
        ("by-confidence:0.9=20%", "expected rising ends .* the last one 1"),
        ("by-confidence:0.9=20%,0.5=2%,1=1%", "expected rising ends"),
        ("by-confidence:low=20%,1=1%", "expected rising ends"),
        ("propensity:5%", "propensity has no shares"),
    ],
)
def test_what_is_no_design_is_refused(text, message):
    with pytest.raises(InputError, match=message):
        Design.parse(text)


def test_actions_of_a_design_are_those_of_the_decider():
    unknown = Design.parse("by-action:yeti=100%,others=5%")
    with pytest.raises(InputError, match="no action is called yeti: expected common"):
        unknown.check_names(U.actions)
    absent = Design.parse("by-action:abstain=100%,rare=50%")
    with pytest.raises(InputError, match="common, seldom has no share: name every ac"):
        absent.check_names(U.actions)


def test_labels_without_a_design_are_refused_unless_all_have_one():
    rng = np.random.default_rng(0)
    decisions, y = stream(rng, 1000)
    rows = np.flatnonzero(rng.random(1000) < 0.2)
    with pytest.raises(InputError, match="may have been sent because of the outcome"):
        sample(decisions, y, rows)
    whole = sample(decisions, y, np.arange(600))  # later ones wait for their labels
    assert (str(whole.design), whole.decisions) == ("random:1", 600)


def test_labels_of_one_design_are_used_and_others_left_out():
    rng = np.random.default_rng(1)
    decisions, y = stream(rng, 2000)
    rows = rng.permutation(2000)[:400]
    sent = ["random"] * 300 + [None] * 100
    used = sample(decisions, y, rows, sent=sent)
    assert (len(used.rows), used.left_out) == (300, 100)
    assert sample(decisions, y, rows, design="random", sent=sent).left_out == 100
    mixed = ["random"] * 300 + ["random:20%"] * 100
    with pytest.raises(InputError, match=r"sent as random, random:0.2: name the des"):
        sample(decisions, y, rows, sent=mixed)
    assert len(sample(decisions, y, rows, design="random", sent=mixed).rows) == 300
    with pytest.raises(InputError, match="no label was sent as propensity"):
        sample(decisions, y, rows, design="propensity", sent=mixed)


DESIGNS = {
    "random": lambda p, actions: np.full(len(p), 0.1),
    "random:10%": lambda p, actions: np.full(len(p), 0.1),
    "by-action:abstain=100%,others=5%": lambda p, actions: np.where(
        actions == 3, 1, 0.05
    ),
    "by-confidence:0.9=30%,1=3%": lambda p, actions: np.where(
        p.max(axis=1) <= 0.9, 0.3, 0.03
    ),
    "propensity": lambda p, actions: 0.02 + 0.3 * (1 - p.max(axis=1)),
}


@pytest.mark.parametrize("design", DESIGNS)
def test_samples_of_a_true_design_are_used_and_estimate_the_mean(design):
    """The mean utility of 2,000 decisions, in the interval of at least 88 of 100."""
    rng, refused, covered = np.random.default_rng(2), 0, 0
    for _ in range(100):
        decisions, y = stream(rng, 2000, [0.6, 0.25, 0.15])
        chance = DESIGNS[design](decisions.probabilities, decisions.actions)
        rows = np.flatnonzero(rng.random(2000) < chance)
        propensity = chance[rows] if design == "propensity" else None
        try:
            used = sample(decisions, y, rows, design, propensity=propensity)
        except InputError:
            refused += 1
            continue
        found = realised_by(used, U, decisions.actions, decisions.expected)
        true = U.matrix[y, decisions.actions][: used.decisions].mean()
        covered += found.interval[0] <= true <= found.interval[1]
    assert refused <= 4  # 1% at most, and three standard errors
    assert covered >= 88


@pytest.mark.parametrize("stated", ["random", "by-action"])
def test_a_false_design_is_refused(stated):
    rng, refused = np.random.default_rng(3), 0
    for _ in range(40):
        decisions, y = stream(rng, 2000)
        rows = errors_first(rng, decisions, y)
        design = "random" if stated == "random" else observed_shares(decisions, rows)
        try:
            sample(decisions, y, rows, design)
        except InputError:
            refused += 1
    assert refused == 40


def test_shares_that_are_not_the_stated_ones_are_refused():
    rng = np.random.default_rng(4)
    decisions, y = stream(rng, 2000)
    rows = np.flatnonzero(rng.random(2000) < 0.05)
    with pytest.raises(InputError, match=r"have a label, and the stated share is 0.1,"):
        sample(decisions, y, rows, "random:10%")
    with pytest.raises(InputError, match=r"decisions of abstain have a label, and the"):
        sample(decisions, y, rows, "by-action:abstain=100%,others=5%")
    with pytest.raises(InputError, match=r"these labels stand for .* decisions of"):
        sample(decisions, y, rows, "propensity", propensity=np.full(len(rows), 0.1))
    with pytest.raises(InputError, match="expected a propensity with each label"):
        sample(decisions, y, rows, "propensity")


def best(decisions, used):
    found = options(
        DECIDER,
        decisions[: used.decisions],
        used.rows,
        used.targets,
        review_weights(used.group, used.rows, used.propensity),
    )
    return next((option for option in found if option.pays), found[0])


def test_a_gain_is_found_from_a_random_sample():
    """10% of 10,000 labelled; the class mix has changed, and the gain is over 0.1."""
    rng, written = np.random.default_rng(5), 0
    mix = [0.45, 0.3, 0.25]
    z, y = model(rng, 50_000, mix)
    for _ in range(6):
        decisions, targets = stream(rng, 10_000, mix)
        rows = np.flatnonzero(rng.random(10_000) < 0.1)
        option = best(decisions, sample(decisions, targets, rows, "random"))
        before, after = (d.decide(z, logits=True) for d in (DECIDER, option.decider))
        assert (U.matrix[y, after] - U.matrix[y, before]).mean() > 0.05
        written += option.pays
    assert written >= 5


def test_labels_of_mistakes_would_have_written_a_decider_that_loses():
    """Where nothing has changed, no revision gains; these labels show one that does."""
    rng, claimed = np.random.default_rng(6), 0
    for _ in range(3):
        decisions, y = stream(rng, 10_000)
        rows = errors_first(rng, decisions, y)
        weights = np.ones(len(rows))
        found = options(DECIDER, decisions, rows, y[rows], weights)
        claimed += found[0].pays
        for design in (None, "random", observed_shares(decisions, rows)):
            with pytest.raises(InputError, match="say how decisions were chosen"):
                sample(decisions, y, rows, design)
    assert claimed >= 2  # the refusal is what keeps it from being written


def test_a_design_of_many_labels_is_read_once(monkeypatch):
    rng, parse = np.random.default_rng(4), Design.parse
    read = []
    decisions, y = stream(rng, 2000)
    rows = np.sort(rng.permutation(2000)[:400])

    def count(text):
        read.append(text)
        return parse(text)

    monkeypatch.setattr(Design, "parse", count)
    sample(decisions, y, rows, sent=["random:20%"] * 400)
    assert len(read) <= 2

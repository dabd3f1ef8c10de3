"""Paired comparisons: narrower than unpaired ones, and right about seeds and multiple
comparisons.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import norm
from typer.testing import CliRunner

import rfdlc
from rfdlc import InputError, Predictions
from rfdlc.evaluation.comparison import (
    Comparison,
    Difference,
    _holm,
    compare_outcomes,
    gain_over_argmax,
)
from rfdlc.evaluation.metrics import METRICS

NAMES = ["a", "b", "c"]


def predictions(seed, noise=0.5, samples=400, ids=None):
    y = np.random.default_rng(0).integers(0, 3, samples)
    z = 2.0 * np.eye(3)[y] + np.random.default_rng(1).normal(size=(samples, 3))
    z = z + noise * np.random.default_rng(seed).normal(size=(samples, 3))
    return Predictions(
        logits=z,
        targets=y,
        ids=ids,
        classes=rfdlc.Classes.from_counts([90, 30, 9], NAMES),
    )


def test_paired_intervals_are_narrower_than_unpaired_ones():
    a, b = predictions(2), predictions(3)
    found = rfdlc.compare(a, b)["accuracy"]
    apart = [rfdlc.evaluate(each).intervals["accuracy"] for each in (a, b)]
    unpaired = np.hypot(*(high - low for low, high in apart))
    assert found.low <= found.difference <= found.high
    assert found.high - found.low < 0.75 * unpaired
    assert found.difference == pytest.approx(
        rfdlc.evaluate(b).accuracy - rfdlc.evaluate(a).accuracy
    )


def test_equal_models_do_not_differ():
    a, b = predictions(2), predictions(2)
    for found in rfdlc.compare(a, b, bootstrap=20).differences:
        assert found.low <= 0 <= found.high
        assert found.p == 1


def test_false_alarms_are_rare():
    alarms = [
        not low <= 0 <= high
        for seed in range(60)
        for found in [
            rfdlc.compare(predictions(seed), predictions(1000 + seed), bootstrap=0)[
                "mean_utility"
            ]
        ]
        for low, high in [(found.low, found.high)]
    ]
    assert np.mean(alarms) < 0.15


def test_seeds_are_a_level_of_their_own():
    ours, theirs = (
        [predictions(s) for s in range(20, 24)],
        [predictions(s, 0.6) for s in range(30, 34)],
    )
    several, one = (
        rfdlc.compare(ours, theirs, bootstrap=20),
        rfdlc.compare(ours[0], theirs[0], bootstrap=20),
    )
    assert several.seeds == (4, 4)
    means = [
        np.mean([rfdlc.evaluate(p).accuracy for p in side]) for side in (ours, theirs)
    ]
    assert several["accuracy"].difference == pytest.approx(means[1] - means[0])
    spread = np.hypot(
        *(
            np.std([rfdlc.evaluate(p).accuracy for p in side], ddof=1) / 2
            for side in (ours, theirs)
        )
    )
    assert (
        several["accuracy"].high - several["accuracy"].low > 2 * 1.96 * spread
    )  # what the seeds alone would give
    assert one.seeds == (1, 1)


def test_samples_are_matched_by_id():
    ids = [f"s{i}" for i in range(400)]
    a, b = predictions(2, ids=ids), predictions(3, ids=ids)
    order = np.random.default_rng(0).permutation(400)
    turned = Predictions(
        logits=b.scores.values[:, order],
        targets=b.targets[order],
        ids=np.array(ids)[order],
        classes=b.classes,
    )
    assert (
        rfdlc.compare(a, turned, bootstrap=0)["nll"]
        == rfdlc.compare(a, b, bootstrap=0)["nll"]
    )
    with pytest.raises(InputError, match="no id in common"):
        rfdlc.compare(a, predictions(3, ids=[f"t{i}" for i in range(400)]))
    some = Predictions(
        logits=b.scores.values[:, :150],
        targets=b.targets[:150],
        ids=ids[:150],
        classes=b.classes,
    )
    few = Predictions(
        logits=a.scores.values[:, :150],
        targets=a.targets[:150],
        ids=ids[:150],
        classes=a.classes,
    )
    with pytest.warns(
        UserWarning,
        match="only the 150 samples in common are compared, of 400 of .* and 150 of ",
    ):
        found = rfdlc.compare(a, some, bootstrap=0)
    assert found["nll"] == rfdlc.compare(few, some, bootstrap=0)["nll"]
    with pytest.raises(InputError, match="different samples"):
        rfdlc.compare(predictions(2), predictions(3, samples=300))
    swapped = np.where(
        np.isin(order, (7, 30)), 1 - turned.targets.clip(max=1), turned.targets
    )
    other = Predictions(
        logits=turned.scores.values, targets=swapped, ids=turned.ids, classes=b.classes
    )
    with pytest.raises(
        InputError,
        match="have other labels for the ids s30, s7: expected one label for each id",
    ):
        rfdlc.compare(a, other)


def test_each_side_may_have_a_decider_of_its_own():
    """As when the probabilities of each were calibrated before, and passed with those
    that it gives.
    """
    a, b, classes = (
        predictions(2),
        predictions(3, 0.9),
        rfdlc.Classes.from_counts([90, 30, 9], NAMES),
    )
    plain = rfdlc.Decider(rfdlc.Utility.tail_sensitive(classes))
    deciders = (
        plain.fit(predictions(2, samples=200)),
        plain.fit(predictions(3, 0.9, samples=300)).replace(rule="argmax"),
    )
    found = rfdlc.compare([a, a], b, decider=deciders)
    with pytest.warns(UserWarning, match="samples that calibrated this decider"):
        each = [
            rfdlc.evaluate(p, decider=d) for p, d in zip((a, b), deciders, strict=True)
        ]
    for name in ("nll", "mean_utility"):
        assert (found[name].a, found[name].b) == pytest.approx(
            [getattr(one, name) for one in each]
        )
    assert found["nll"].b != pytest.approx(
        rfdlc.compare(a, b, decider=deciders[0])["nll"].b
    )
    none = rfdlc.compare(a, b, decider=(deciders[0], None))
    own = rfdlc.Decider(plain.utility)
    assert none["nll"].b == pytest.approx(rfdlc.evaluate(b, decider=own).nll)
    assert none["mean_utility"].b == pytest.approx(
        rfdlc.evaluate(b, decider=own).mean_utility
    )  # one utility for both
    with pytest.raises(
        InputError,
        match="decider has 3 entries: expected a Decider, or two, one for each side",
    ):
        rfdlc.compare(a, b, decider=(*deciders, None))


def test_seeds_are_not_paired():
    """Whatever their order: in the study, runs of two methods with the same seed are
    hardly more alike than others.
    """
    ours, theirs = (
        [predictions(s) for s in range(20, 24)],
        [predictions(s, 0.6) for s in range(30, 34)],
    )
    found = [
        rfdlc.compare(ours, order, bootstrap=0)["accuracy"]
        for order in (theirs, theirs[1:] + theirs[:1])
    ]
    assert (found[0].low, found[0].high) == pytest.approx(
        (found[1].low, found[1].high), abs=1e-12
    )
    assert (
        "4 and 4 runs, not paired by seed"
        in rfdlc.compare(ours, theirs, bootstrap=0).__rich__().title
    )


def test_holm():
    assert _holm(np.array([0.01, 0.04, 0.03])) == pytest.approx([0.03, 0.06, 0.06])


def test_command_line(tmp_path):
    from rfdlc.cli import app

    for name, seed in (("a", 2), ("b", 3), ("b2", 4)):
        predictions(seed).save(tmp_path / f"{name}.npz")
    files = [str(tmp_path / "a.npz"), f"{tmp_path / 'b.npz'},{tmp_path / 'b2.npz'}"]
    printed = CliRunner().invoke(app, ["compare", *files, "--bootstrap", "10"])
    assert printed.exit_code == 0, printed.output
    assert "paired samples" in printed.output
    assert "Mean utility: " in printed.output.splitlines()[-1]
    found = json.loads(
        CliRunner()
        .invoke(app, ["compare", *files, "--bootstrap", "10", "--json"])
        .stdout
    )
    assert found["seeds"] == [1, 2]
    assert {d["name"] for d in found["differences"]} >= {
        "accuracy",
        "mean_utility",
        "ece",
        "error_auc",
    }


@pytest.mark.parametrize(
    ("low", "difference", "high", "words"),
    [
        (0.1, 0.2, 0.3, "y is better than x by 0.2000 (difference 0.1000 to 0.3000)"),
        (
            -0.3,
            -0.2,
            -0.1,
            "y is worse than x by 0.2000 (difference -0.3000 to -0.1000)",
        ),
        (-0.1, 0.2, 0.3, "no difference can be told (y minus x: -0.1000 to 0.3000)"),
    ],
)
def test_the_verdict_is_about_the_utility(low, difference, high, words):
    other = Difference("accuracy", "accuracy", 0.5, 0.9, 0.4, 0.3, 0.5, 0.01)
    worth = Difference(
        "mean_utility", "mean utility", 1.0, 1 + difference, difference, low, high, 0.9
    )
    found = Comparison(("x", "y"), 40, (1, 1), (other, worth))
    assert found.verdict == f"Mean utility: {words}."
    assert found.to_dict()["verdict"] == found.verdict
    assert "Too few samples" in replace(found, differences=(other,)).verdict


@pytest.mark.parametrize("seed", range(8))
def test_the_verdict_agrees_with_the_row_of_mean_utility(seed):
    """Its p is that of one comparison, those of other metrics are adjusted; regret asks
    the same.
    """
    found = rfdlc.compare(predictions(seed), predictions(seed + 50, 0.6), bootstrap=0)
    row = next(row for row in found.rows() if row[0] == "mean utility (the question)")
    assert row[-1].endswith("*") == ("no difference" not in found.verdict)
    worth = found["mean_utility"]
    half = (worth.high - worth.low) / 2
    assert worth.p == pytest.approx(
        2 * norm.sf(1.96 * abs(worth.difference) / half), rel=0.1, abs=1e-3
    )
    assert found["mean_regret"].p == worth.p
    others = {
        d.p
        for d in found.differences
        if d.name not in ("mean_utility", "mean_regret", "accuracy")
    }
    assert max(others) == 1


def test_the_gain_over_arg_max_is_that_of_the_samples():
    """Arg max by hand; nothing is said where decisions are the same, or a class cannot
    be decided for.
    """
    given = predictions(2)
    matrix = np.array([[1.0, 0, 0], [-2, 1, 0], [-5, -1, 1]])
    decider = rfdlc.Decider(rfdlc.Utility(matrix, given.classes))
    result = rfdlc.evaluate(given, decider=decider)
    found = gain_over_argmax(result, given, decider)
    p = np.exp(given.scores.values[0])
    realised = [
        matrix[given.targets, action]
        for action in (p.argmax(1), (p @ matrix).argmax(1))
    ]
    assert (found.a, found.b) == pytest.approx([each.mean() for each in realised])
    error = np.std(realised[1] - realised[0], ddof=1) / 20
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.15)
    one_hot = rfdlc.Decider(rfdlc.Utility.one_hot(given.classes))
    assert (
        gain_over_argmax(rfdlc.evaluate(given, decider=one_hot), given, one_hot) is None
    )
    two = rfdlc.Decider(rfdlc.Utility(matrix[:, :2], given.classes, NAMES[:2]))
    assert gain_over_argmax(rfdlc.evaluate(given, decider=two), given, two) is None


def test_opposite_differences_count_once(monkeypatch):
    sides = predictions(2, 0), predictions(5, 1)
    found = rfdlc.compare(*sides, bootstrap=0)
    assert found["mean_regret"].difference == pytest.approx(
        -found["mean_utility"].difference
    )
    monkeypatch.delitem(METRICS, "mean_regret")
    without = rfdlc.compare(*sides, bootstrap=0)
    assert len(without.differences) == len(found.differences) - 1
    assert [row.p for row in without.differences] == [
        found[row.name].p for row in without.differences
    ]
    assert 0 < min(row.p for row in without.differences) < 1


def test_tables_show_what_was_answered_where_something_abstains():
    sides, utility = (
        (predictions(2), predictions(3)),
        rfdlc.Utility.one_hot(predictions(2).classes),
    )
    answered = {METRICS[name].label for name in ("abstention_rate", "kept_accuracy")}
    assert not answered & {
        row[0] for row in rfdlc.compare(*sides, utility=utility).rows()
    }
    assert answered < {
        row[0]
        for row in rfdlc.compare(*sides, utility=utility.with_abstain(0.8)).rows()
    }
    outcomes = [
        rfdlc.evaluate(sides[0], utility=each).outcomes
        for each in (utility, utility.with_abstain(0.8))
    ]
    for a, b in (outcomes, outcomes[::-1]):  # whichever side abstains
        labels = [row[0] for row in compare_outcomes([a], [b]).rows()]
        assert {
            "accuracy (abstained: wrong)",
            "balanced accuracy (abstained: wrong)",
        } < {*labels}


def test_tables_show_neither_rounding_nor_a_p_value_of_0():
    row = Difference("nll", "NLL", 0.5, 0.5 + 1e-17, 1e-17, -3e-18, 2e-17, 1e-9)
    shown = Comparison(
        ("A", "B"),
        10,
        (1, 1),
        (row, replace(row, name="accuracy", difference=-1e-18, p=0.2)),
    ).rows()
    assert shown[0] == (
        "NLL",
        "0.5000",
        "0.5000",
        "0.0000",
        "0.0000 to 0.0000",
        "< 0.001*",
    )
    assert shown[1][3:] == ("0.00%", "0.00% to 0.00%", "0.200")


@pytest.mark.parametrize("samples", [4, 8, 30])
def test_differences_of_shares_are_within_one(samples):
    y = np.arange(samples) % 2
    right, wrong = (
        Predictions(probabilities=np.eye(2)[each] * 0.98 + 0.01, targets=y)
        for each in (y, 1 - y)
    )
    for a, b in ((right, wrong), (wrong, right)):
        shares = [
            d
            for d in rfdlc.compare(a, b, bootstrap=20).differences
            if METRICS[d.name.split(".")[0]].unit == "%"
        ]
        assert shares
        assert all(-1 <= d.low <= d.difference <= d.high <= 1 for d in shares)


def test_rows_are_in_costs_where_these_were_given():
    """Also those of promised minus realised utility, as `evaluate` has them."""
    rng = np.random.default_rng(0)
    costs = rfdlc.Utility.from_costs(
        [[0, 1, 1], [2, 0, 1], [9, 2, 0]], NAMES
    ).with_abstain(-0.3)
    y = rng.integers(0, 3, 300)
    a, b = (
        rfdlc.Predictions(
            probabilities=softmax(rng.normal(size=(300, 3)) + 2 * np.eye(3)[y], axis=1),
            targets=y,
        )
        for _ in range(2)
    )
    found = rfdlc.compare(a, b, costs, classes=NAMES)
    rows = {row["name"]: row for row in found.records()}
    assert not [row["label"] for row in rows.values() if "utility" in row["label"]]
    plain = found["utility_gap"]
    assert (rows["utility_gap"]["a"], rows["utility_gap"]["low"]) == (
        -plain.a,
        -plain.high,
    )
    assert rows["utility_gap"]["label"] == "promised minus realised cost"


def test_costs_are_utilities_with_their_sign_changed():
    costs = rfdlc.Utility.from_costs([[0, 1, 1], [2, 0, 1], [9, 2, 0]], NAMES)
    assert costs.has_costs
    assert not rfdlc.Utility.one_hot(NAMES).has_costs
    assert not rfdlc.Utility(np.zeros((3, 3)), NAMES).has_costs
    assert not costs.with_abstain(0.5).has_costs  # a gain
    assert costs.with_abstain(-0.5).has_costs
    plain = Difference("mean_utility", "mean utility", -3.0, -1.0, 2.0, 0.5, 3.5, 0.01)
    cost = plain.as_cost
    assert (cost.label, cost.a, cost.b, cost.difference, cost.low, cost.high) == (
        "mean cost",
        3,
        1,
        -2,
        -3.5,
        -0.5,
    )
    found = Comparison(("A", "B"), 9, (1, 1), (plain,), has_costs=True)
    assert (
        found.verdict
        == "Mean cost: B is better than A by 2.0000 (difference -3.5000 to -0.5000)."
    )
    assert found.rows()[0][:5] == (
        "mean cost (the question)",
        "3.0000",
        "1.0000",
        "-2.0000",
        "-3.5000 to -0.5000",
    )
    assert found.to_dict()["mean_cost"]["b"] == 1
    assert repr(found).splitlines() == [
        found.verdict,
        (
            "metric                         A       B  difference        95% interval  "
            "     p"
        ),
        (
            "mean cost (the question)  3.0000  1.0000     -2.0000  -3.5000 to -0.5000 "
            " 0.010*"
        ),
    ]


@pytest.mark.parametrize("classes", [2, 3])
def test_tables_about_two_classes_have_no_regions(classes):
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(classes), (2, 300))
    known = rfdlc.Classes(
        [f"c{i}" for i in range(classes)], counts=[90, 30, 10][:classes]
    )
    labels, utility = rng.integers(0, classes, 300), rfdlc.Utility.one_hot(known)
    sides = [
        rfdlc.Predictions(probabilities=each, targets=labels, classes=known)
        for each in p
    ]
    found = rfdlc.compare(*sides, utility)
    shown = {difference.name for difference in found.shown}
    assert "balanced_accuracy" in shown
    assert any(
        name.startswith(("false_head_rate", "accuracy_by_")) for name in shown
    ) == (classes > 2)
    assert any(
        difference.name.startswith("false_head_rate")
        for difference in found.differences
    )  # as before, in JSON

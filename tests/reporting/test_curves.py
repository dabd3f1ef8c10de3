"""The curves of the report are those of the library."""

import json
import shutil
import subprocess

import numpy as np
import pytest

from rfdlc import Decider, Utility, evaluate
from rfdlc.probabilities.classes import Classes
from rfdlc.reporting import curves
from rfdlc.reporting.report import STEP, asset, quantise
from rfdlc.reporting.runs import ReportRun

from .conftest import dequantise, make_predictions


@pytest.fixture
def run(predictions):
    utility = Utility.tail_sensitive(predictions.classes, -0.5).with_abstain(0.3)
    return ReportRun(
        "a", predictions, Decider(utility, train_prior="train", target_prior="uniform")
    )


def test_probabilities_before_and_after_the_prior(run):
    ratio = 1 / np.array(run.classes.prior)
    moved = run.calibrated * ratio
    assert np.allclose(
        moved / moved.sum(axis=1, keepdims=True), run.outcomes.probabilities, atol=1e-6
    )


def test_false_head_curve_passes_through_the_metrics(run):
    curve = {point["share"]: point["rate"] for point in curves.false_head_curve(run)}
    for share, rate in evaluate(
        run.predictions, decider=run.decider
    ).false_head_rates.items():
        assert curve[share] == pytest.approx(rate)


def test_reliability_gives_the_calibration_error(run):
    result = evaluate(run.predictions, decider=run.decider)
    lines = curves.reliability(run)
    for name, expected in {"all": result.ece, **result.ece_by_region}.items():
        bins = lines[name]
        total = sum(bin["samples"] for bin in bins)
        error = (
            sum(
                bin["samples"] * abs(bin["accuracy"] - bin["confidence"])
                for bin in bins
            )
            / total
        )
        assert error == pytest.approx(expected, abs=1e-6)


@pytest.mark.skipif(
    shutil.which("node") is None, reason="no node, which runs the scripts of the page"
)
def test_page_and_headline_agree_on_ece_where_confidences_are_on_edges():
    """As those of a forest of 20 trees; the page has them rounded to levels of
    log p.
    """
    rng = np.random.default_rng(0)
    likely = rng.integers(10, 21, 3000) / 20
    p = np.stack([likely, 1 - likely], axis=1)
    y = (rng.random(3000) > likely).astype(int)
    shown = dequantise(quantise(p))
    given = json.dumps(
        [shown.max(axis=1).tolist(), shown.argmax(axis=1).tolist(), y.tolist(), STEP]
    )
    code = f"{asset('decisions.js')}\nconsole.log(calibrationError(...{given}))"
    found = subprocess.run(
        ["node", "-"], input=code, capture_output=True, text=True, check=True
    ).stdout
    assert float(found) == pytest.approx(evaluate(p, y).ece, abs=1e-4)


def test_frontier_is_what_evaluate_says_for_each_penalty(run):
    for point in curves.frontier(run):
        utility = Utility.tail_sensitive(run.classes, point["penalty"])
        result = evaluate(run.predictions, decider=run.decider.replace(utility=utility))
        assert point["accuracy"] == pytest.approx(result.accuracy)
        assert point["false_head_rate"] == pytest.approx(result.false_head_rate)


def test_by_class_and_risk_coverage(run):
    result = evaluate(run.predictions, decider=run.decider)
    each = curves.by_class(run)
    assert np.average(each["accuracy"], weights=each["samples"]) == pytest.approx(
        result.accuracy
    )
    last = curves.risk_coverage_points(run)[-1]
    assert last == pytest.approx({"coverage": 1.0, "risk": 1 - result.kept_accuracy})


def test_uncertainties_are_shares_with_the_auc_of_evaluate(run):
    kinds = curves.uncertainties(run)
    assert len(kinds) == 3  # two particles can disagree
    for histogram in kinds.values():
        assert sum(histogram["right"]) == pytest.approx(1)
        assert sum(histogram["wrong"]) == pytest.approx(1)
    result = evaluate(run.predictions, decider=run.decider)
    assert kinds["1 − probability of the decision"]["auc"] == pytest.approx(
        result.error_auc, abs=1e-6
    )


def test_set_curve_passes_through_the_metrics(run):
    assert curves.set_curve(run) is None
    fitted = run.decider.fit_sets(
        make_predictions(600, seed=5), kind="macro", coverage=0.8
    )
    found = curves.set_curve(ReportRun("a", run.predictions, fitted))
    result, now = (
        evaluate(run.predictions, decider=fitted),
        found["points"][found["now"]],
    )
    assert now == pytest.approx(result.set_coverage | {"size": result.set_size["all"]})
    sizes = [point["size"] for point in found["points"]]
    assert sizes == sorted(sizes)
    assert sizes[0] == 1
    assert sizes[-1] > 4


def test_budget_curve_passes_through_the_metrics(run):
    plain = run.decider.replace(utility=Utility.one_hot(run.classes))
    assert curves.budget_points(ReportRun("a", run.predictions, plain)) is None
    asking = run.decider.replace(
        utility=Utility.one_hot(run.classes).with_expert("doctor", confusion=0.9)
    )
    points = curves.budget_points(ReportRun("a", run.predictions, asking))
    result = evaluate(run.predictions, decider=asking)
    for share, value in result.utility_by_budget.items():
        assert points[round(100 * share)] == pytest.approx(
            {"share": share, "utility": value}
        )


@pytest.mark.filterwarnings("error")
def test_curves_of_other_utilities_leave_out_the_budget(run):
    held = make_predictions()
    limited = run.decider.fit_sets(held).fit_budget(held, budget="5%")
    found = ReportRun("a", run.predictions, limited)
    assert curves.frontier(found) == curves.frontier(run)
    assert np.array_equal(found.calibrated, run.calibrated)


def test_costliest_mistakes_come_first(run):
    listed = curves.mistakes(run, curves.costliest(run))
    costs = [one["cost"] for one in listed]
    assert costs == sorted(costs, reverse=True)
    matrix = run.decider.utility.matrix
    assert (
        costs[0]
        == max(
            matrix[y].max() - matrix[y, a]
            for y, a in zip(run.outcomes.targets, run.outcomes.actions, strict=True)
        )
        > 0
    )
    first = listed[0]
    assert run.outcomes.actions[first["row"]] == first["action"]
    assert first["id"] == f"sample-{first['row']}"
    assert first["true_probability"] == pytest.approx(
        float(run.outcomes.probabilities[first["row"], first["true"]])
    )


def test_without_counts_there_is_no_tail(predictions):
    bare = Classes(predictions.classes.names)
    run = ReportRun("a", predictions.with_classes(bare), Decider(Utility.one_hot(bare)))
    assert curves.frontier(run) == []
    assert curves.false_head_curve(run) == []
    assert list(curves.reliability(run)) == ["all"]


def test_all_handed_over(predictions):
    utility = Utility.one_hot(predictions.classes).with_abstain(2)
    run = ReportRun("a", make_predictions(), Decider(utility))
    assert curves.risk_coverage_points(run) == []
    assert curves.uncertainties(run) == {}

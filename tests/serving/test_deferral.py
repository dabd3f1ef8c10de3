"""Budgets, experts and unfamiliar samples: alike in the library, an exported file, the
server and estimators.
"""

import csv
import shutil
import warnings

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.utils import shuffle

import rfdlc
from rfdlc.serving.backend import Answer, open_backend


@pytest.fixture
def folder(run, tmp_path):
    """A run whose decider may ask an expert about 40% of the samples, and hands over
    unfamiliar ones.
    """
    place = tmp_path / "run"
    shutil.copytree(run, place)
    decider, held = (
        rfdlc.Decider.load(place),
        rfdlc.Predictions.load(place / "held-out.npz"),
    )
    utility = rfdlc.Utility.one_hot(decider.utility.classes).with_expert(
        "doctor", confusion=0.97, cost=0.1
    )
    decider = (
        decider.replace(utility=utility)
        .fit_budget(held, budget=0.4)
        .fit_unfamiliar(held, false_alarm=0.1)
    )
    decider.save(place / "decider.json")
    return place


@pytest.mark.usefixtures("quick_exports")
def test_everywhere_alike(folder, samples, tmp_path, start):
    model = rfdlc.Model.load(folder, device="cpu")
    expected = model.decider.explain(model.predict(samples))
    assert {*expected.reason} == {"", "expected utility", "over budget", "unfamiliar"}
    actions = [expected.actions[a] for a in expected.action]

    exported = rfdlc.export(folder, tmp_path / "model.onnx")
    assert exported.parity.decisions_changed == 0
    graph = rfdlc.OnnxModel.load(exported.path)
    decided = graph.decide(samples)
    assert np.array_equal(decided.action, expected.action)
    assert np.array_equal(decided.reason, expected.reason)
    other = rfdlc.Utility.one_hot(model.classes).with_abstain(0.8)
    plain = model.decider.replace(utility=other, budget=None).explain(
        model.predict(samples)
    )
    assert np.array_equal(graph.decide(samples, other).reason, plain.reason)
    with start(open_backend(exported.path)) as served:
        answer = rfdlc.Client(served.url).decide(arrays=samples)
        assert answer["action"] == actions
        assert answer["reason"] == expected.reason.tolist()
        answer = rfdlc.Client(served.url).decide(arrays=samples, utility=other)
        assert answer["reason"] == plain.reason.tolist()
    backend = open_backend(folder)
    assert (
        Answer.of(backend.decider, *backend.compute(samples)).columns["reason"]
        == expected.reason.tolist()
    )
    rfdlc.predict(folder, "digits-lt", tmp_path / "table.csv")
    with open(tmp_path / "table.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    batch = model.decider.explain(
        model.predict("digits-lt"), batch=True
    )  # all samples share the budget
    assert [row["action"] for row in rows] == [batch.actions[a] for a in batch.action]
    assert [row["reason"] for row in rows] == batch.reason.tolist()
    again = rfdlc.Predictions.load(
        tmp_path / "table.csv"
    )  # the column of reasons is not a class
    assert again.classes.names == model.classes.names


def test_what_a_graph_cannot_have(folder, tmp_path):
    with pytest.raises(
        rfdlc.InputError,
        match="need the utility in the graph: export without utility_input",
    ):
        rfdlc.export(folder, tmp_path / "model.onnx", utility_input=True)


def test_estimators_keep_a_budget():
    x, y = shuffle(*load_digits(return_X_y=True), random_state=0)
    utility = rfdlc.Utility.one_hot([str(c) for c in range(10)]).with_abstain(0.999)
    model = rfdlc.UtilityClassifier(
        LogisticRegression(max_iter=500, C=1e-3), utility, cv=2
    ).fit(x[:700], y[:700])
    assert (model.predict(x[1200:]) == -1).mean() > 0.3
    model.fit_budget(x[700:1200], y[700:1200], "5%")
    share = (model.predict(x[1200:]) == -1).mean()
    assert share == pytest.approx(0.05, abs=0.03)
    assert model.decider_.deferral.budget.shares == {"total": 0.05}
    with pytest.warns(
        UserWarning,
        match=(
            r"budget was fitted with the previous utility .* call fit_budget\(X, y,"
            r" budget"
        ),
    ):
        model.set_utility(utility)
    assert (model.predict(x[1200:]) == -1).mean() > 0.3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.set_utility(utility)  # there is no budget left to lose
    assert (
        model.fit_budget(x[700:1200], y[700:1200], "5%").predict(x[1200:]) == -1
    ).mean() == share

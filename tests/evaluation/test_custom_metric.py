"""A metric that is registered from outside is seen on every surface."""

import json

import numpy as np
import pytest
from sklearn.datasets import load_iris
from sklearn.naive_bayes import GaussianNB
from typer.testing import CliRunner

import rfdlc
from rfdlc.cli import app
from rfdlc.errors import InputError
from rfdlc.estimators.scoring import make_metric_scorer
from rfdlc.evaluation.evaluate import Evaluation
from rfdlc.evaluation.metrics import METRICS, Metric, register_metric

TABLE = (
    "id,cat,dog,newt,target\nx,0.5,0.3,0.2,dog\ny,0.2,0.7,0.1,cat\nz,0.1,0.1,0.8,newt\n"
)


def top_2(outcomes):
    best = np.argsort(-outcomes.probabilities, axis=1)[:, :2]
    return float((best == outcomes.targets[:, None]).any(axis=1).mean())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Trained before the metric is registered."""
    pytest.importorskip("torch")
    place = tmp_path_factory.mktemp("runs") / "digits"
    return rfdlc.train("digits-lt", "ce", place, epochs=1, device="cpu").path


@pytest.fixture(autouse=True)
def registered():
    register_metric(Metric("top_2", "top-2 accuracy", top_2, unit="%", headline=True))
    yield
    del METRICS["top_2"]


def test_evaluation():
    p = np.array([[0.5, 0.3, 0.2], [0.2, 0.7, 0.1], [0.8, 0.15, 0.05]])
    result = rfdlc.evaluate(p, [1, 0, 2], bootstrap=5)
    assert (
        result.top_2
        == result.flat()["top_2"]
        == result.to_dict()["top_2"]
        == pytest.approx(2 / 3)
    )
    assert "top-2 accuracy" in str(result)
    assert "top_2" in dir(result)
    assert "top_2" in result.intervals


def test_command_line(tmp_path):
    (tmp_path / "p.csv").write_text(TABLE)
    table = CliRunner().invoke(app, ["evaluate", str(tmp_path / "p.csv")])
    assert "top-2 accuracy" in table.output
    printed = CliRunner().invoke(app, ["evaluate", str(tmp_path / "p.csv"), "--json"])
    assert json.loads(printed.stdout)["top_2"] == 1


def test_report(tmp_path):
    (tmp_path / "p.csv").write_text(TABLE)
    text = rfdlc.report(
        tmp_path / "p.csv", out=tmp_path / "r.html", bootstrap=0
    ).read_text(encoding="utf-8")
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    listed = next(metric for metric in data["metrics"] if metric["name"] == "top_2")
    assert listed == {
        "name": "top_2",
        "label": "top-2 accuracy",
        "direction": "higher",
        "unit": "%",
        "nested": False,
        "headline": True,
    }
    assert data["runs"][0]["metrics"]["top_2"] == 1


def test_model_card(run):
    from rfdlc.exporting.export import Parity, card

    model = rfdlc.Model.load(run)
    text = card(model, "model.onnx", "float32", Parity(1, "test samples", 0.0, 0, 0))
    assert "| top-2 accuracy |" in text
    assert '{"type": "top_2", "value": ' in text


def test_scorer():
    X, y = load_iris(return_X_y=True)
    model = GaussianNB().fit(X, y)
    best = np.argsort(-model.predict_proba(X), axis=1)[:, :2]
    assert make_metric_scorer("top_2")(model, X, y) == pytest.approx(
        (best == y[:, None]).any(axis=1).mean()
    )


def test_older_results_are_read_without_it(run):
    values = json.loads((run / "metrics.json").read_text())["test"]
    from rfdlc.cli.train import metrics_table

    assert "top-2 accuracy" not in [
        str(cell) for cell in metrics_table({"test": values}).columns[0].cells
    ]
    assert Evaluation(1, values, "entropy").accuracy == values["accuracy"]


@pytest.mark.parametrize("name", ["accuracy", "top 5", "samples", "rows", "outcomes"])
def test_names_that_are_refused(name):
    with pytest.raises(
        rfdlc.InputError, match=f"metric name '{name}' is taken or is not an identifier"
    ):
        register_metric(Metric(name, "x", top_2))


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        (lambda o: np.arange(len(o)), 1.0),
        (lambda o: list(range(len(o))), 1.0),  # one value per sample, in any form
        (lambda o: np.float32(0.5), 0.5),
        (lambda o: np.array(3), 3.0),
        (
            lambda o: {"a": 1, "b": o.targets == 0},
            {"a": 1.0, "b": pytest.approx(1 / 3)},
        ),
    ],
)
def test_what_a_metric_may_return(monkeypatch, returned, value):
    monkeypatch.setitem(METRICS, "own", Metric("own", "own", returned))
    result = rfdlc.evaluate(np.full((3, 3), 1 / 3), [0, 1, 2], bootstrap=2)
    assert result.own == value


@pytest.mark.parametrize(
    "returned",
    [
        lambda o: np.ones(2),
        lambda o: [1.0, 0.0],
        lambda o: np.ones((3, 1)),
        lambda o: None,
        lambda o: "high",
        lambda o: {"a": np.ones(4)},
    ],
)
def test_what_a_metric_may_not_return(monkeypatch, returned):
    monkeypatch.setitem(METRICS, "own", Metric("own", "own", returned))
    message = (
        r"metric 'own' returned .* for 3 samples: expected a number, one value per"
        r" sample, or a dict of these"
    )
    with pytest.raises(InputError, match=message):
        rfdlc.evaluate(np.full((3, 3), 1 / 3), [0, 1, 2])

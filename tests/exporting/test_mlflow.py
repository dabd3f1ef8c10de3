"""A model in a real local store of MLflow decides as the library does."""

import numpy as np
import pandas
import pytest

import rfdlc
from rfdlc.exporting.mlflow import log_model, save_model

mlflow = pytest.importorskip("mlflow")


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file://{tmp_path}/store")
    yield
    mlflow.set_tracking_uri("")


def test_a_logged_model_decides_as_the_library(store, tmp_path):
    model = rfdlc.train("digits-lt", "ce", tmp_path / "run", epochs=2)
    model.decider = model.decider.replace(
        utility=rfdlc.Utility.tail_sensitive(model.classes).with_abstain(0.6)
    )
    images = rfdlc.load("digits-lt").test.inputs[:50]
    with mlflow.start_run():
        info = log_model(model)
    found = mlflow.pyfunc.load_model(info.model_uri).predict(images)
    explained = model.decider.explain(model.predict(images))
    assert found["action"].tolist() == [explained.actions[i] for i in explained.action]
    assert "abstain" in set(found["action"])
    assert np.array_equal(found["expected_utility"], explained.value)
    assert np.allclose(found.filter(like="p(").sum(axis=1), 1)


def test_a_saved_table_takes_a_data_frame(tmp_path):
    rng = np.random.default_rng(0)
    table = pandas.DataFrame(
        {"age": rng.integers(20, 90, 200), "ward": rng.choice(["a", "b"], 200)}
    )
    table["outcome"] = np.where(
        table["age"] + 10 * (table["ward"] == "b") > 60, "ill", "well"
    )
    table.to_csv(tmp_path / "table.csv", index=False)
    options = {"target": "outcome"}
    model = rfdlc.train(
        tmp_path / "table.csv",
        out=tmp_path / "run",
        data_options=options,
        backbone="mlp",
        epochs=3,
    )
    save_model(model, tmp_path / "saved")
    rows = table.drop(columns="outcome").head(20)
    found = mlflow.pyfunc.load_model(str(tmp_path / "saved")).predict(rows)
    assert found["action"].tolist() == [
        model.classes.names[i] for i in model.decide(rows)
    ]

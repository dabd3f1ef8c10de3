"""Encodings of the previous version: old run folders give the same features, and so do
the tables themselves.
"""

import json
from pathlib import Path

import numpy as np

import rfdlc
from rfdlc.data.table import TableEncoder
from rfdlc.tables import read_columns

FOLDER = Path(__file__).parents[1] / "compatibility" / "table-v1"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())


def test_an_old_run_folder_encodes_new_rows_as_before() -> None:
    encoder = TableEncoder.from_dict(
        json.loads((FOLDER / "run" / "config.json").read_text())["data"]["encoder"]
    )
    assert list(encoder.features) == EXPECTED["features"]
    assert (
        encoder.transform(read_columns(FOLDER / "new.csv")).tolist() == EXPECTED["new"]
    )


def test_a_table_is_encoded_as_before() -> None:
    data = rfdlc.load(FOLDER / "train.csv", target="label", seed=1)
    assert data.train.array[:4].tolist() == EXPECTED["train"]
    assert data.normalisation is not None
    np.testing.assert_array_equal(data.normalisation.mean, EXPECTED["mean"])
    np.testing.assert_array_equal(data.normalisation.std, EXPECTED["std"])


def test_an_old_run_folder_predicts_as_before() -> None:
    model = rfdlc.Model.load(FOLDER / "run", device="cpu")
    found = model.decider.probabilities(model.predict(FOLDER / "new.csv"))
    np.testing.assert_allclose(found, EXPECTED["probabilities"], atol=1e-6)

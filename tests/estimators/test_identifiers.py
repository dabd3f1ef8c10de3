"""Columns of data frames that name rows, or are written as something else, as `rfdlc
train` treats them.
"""

import pickle
import warnings

import numpy as np
import pandas as pd
import pytest

import rfdlc
from rfdlc import InputError, RFDLCClassifier

pytestmark = pytest.mark.usefixtures("quick_tables")


def visits(rows=300, **columns):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, rows)
    return pd.DataFrame({"x": rng.normal(size=rows) + y, **columns}), np.where(
        y, "ill", "well"
    )


IDS = {
    "customer_id": np.arange(300) // 2 + 100_000,
    "case_id": np.arange(300),
    "order_no": [f"ORD-{i:06d}" for i in range(300)],
    "patient": [f"p{i % 100}" for i in range(300)],
}


@pytest.mark.parametrize("backbone", ["mixture", "trees", "mlp", "features"])
@pytest.mark.parametrize("name", IDS)
def test_identifiers_are_left_out_as_train_does(backbone, name):
    X, y = visits(**{name: IDS[name]})
    with warnings.catch_warnings(action="ignore"):
        assert rfdlc.load((X, y)).encoder.features == ("x",)
    epochs = 2 if backbone in ("mlp", "features") else "auto"
    with pytest.warns(UserWarning, match=f"column '{name}' .* was left out") as told:
        model = RFDLCClassifier(backbone=backbone, epochs=epochs, random_state=0).fit(
            X, y
        )
    assert any(each.filename == __file__ for each in told)
    assert "--groups" not in str(told[0].message)
    assert model.left_out_ == (name,)
    assert model.n_features_in_ == 1
    model = pickle.loads(pickle.dumps(model))  # noqa: S301
    with warnings.catch_warnings(action="error"):
        p = model.predict_proba(X)
        np.testing.assert_array_equal(
            model.predict_proba(X.assign(**{name: "other"})), p
        )
        np.testing.assert_array_equal(model.predict_proba(X[["x"]]), p)


def test_identifiers_of_a_first_pass_are_left_out_of_later_ones():
    X, y = visits(case_id=IDS["case_id"], ward=["a", "b", "c"] * 100)
    model = RFDLCClassifier(random_state=0)
    with pytest.warns(
        UserWarning, match="'case_id' has a different value in every row"
    ):
        model.partial_fit(X[:200], y[:200], classes=["ill", "well"])
    with warnings.catch_warnings(action="error"):
        model.partial_fit(X[200:], y[200:])
    assert model.left_out_ == ("case_id",)


def test_nothing_to_learn_from_is_an_error():
    X, y = visits(case_id=IDS["case_id"])
    with pytest.raises(
        InputError,
        match="X has no column to learn from: column 'case_id' has a different value",
    ):
        RFDLCClassifier().fit(X[["case_id"]], y)


@pytest.mark.parametrize("rows", [300, 1200])
@pytest.mark.parametrize(
    ("form", "kind"), [("{:,.2f}", "numbers"), ("{:.1%}", "percentages")]
)
def test_texts_that_mean_numbers_are_an_error(rows, form, kind):
    values = np.random.default_rng(0).uniform(0, 20_000, rows)
    X, y = visits(rows, amount=[form.format(value) for value in values])
    fix = r"; or keep them as categories \(X.astype\({'amount': 'category'}\)\)"
    fix += r", or leave the column out \(X.drop\(columns=\['amount'\]\)\)"
    with pytest.raises(
        InputError,
        match=f"'amount' holds texts such as .* that look like {kind}: .*{fix}",
    ):
        RFDLCClassifier().fit(X, y)

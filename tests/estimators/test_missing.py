"""Missing values: NaN in arrays means what an empty cell of a data frame means."""

import pickle
import warnings

import numpy as np
import pandas as pd
import pytest
from scipy import sparse
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import get_tags

from rfdlc import InputError, RFDLCClassifier, UtilityClassifier

pytestmark = pytest.mark.usefixtures("quick_tables")


def with_missing(X, columns=(0, 2, 5)):
    """A copy without a fifth of the values of some columns."""
    found, rng = X.copy(), np.random.default_rng(0)
    for column in columns:
        found[rng.random(len(X)) < 0.2, column] = np.nan
    return found


@pytest.mark.parametrize("backbone", ["mixture", "trees", "mlp", "features"])
def test_missing_values_of_arrays_are_empty_cells_of_data_frames(three, backbone):
    X, y = with_missing(three[0][:200]), three[1][:200]
    names = [f"f{i}" for i in range(X.shape[1])]
    frame = pd.DataFrame(X, columns=names)
    epochs = 3 if backbone in ("mlp", "features") else "auto"
    model = RFDLCClassifier(backbone=backbone, epochs=epochs, random_state=0).fit(X, y)
    p = model.predict_proba(X)
    of_frame = clone(model).fit(frame, y)
    np.testing.assert_array_equal(of_frame.predict_proba(frame), p)
    assert [code.median for code in model.encoder_.columns] == np.nanmedian(
        X, axis=0
    ).tolist()
    assert [code.flags_missing for code in model.encoder_.columns] == np.isnan(X).any(
        axis=0
    ).tolist()
    assert of_frame.n_features_in_ == model.n_features_in_ == 8
    np.testing.assert_array_equal(model.predict_proba(X.astype(object).tolist()), p)
    with pytest.warns(UserWarning, match="does not have valid feature names"):
        np.testing.assert_array_equal(of_frame.predict_proba(X), p)
    with pytest.warns(UserWarning, match="was fitted without feature names"):
        np.testing.assert_array_equal(model.predict_proba(frame), p)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict_proba(X), p)  # noqa: S301


def test_missing_values_tell_a_class():
    """Where a value is missing more often in one class, the model knows it: it is not
    only filled.
    """
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 600)
    X = rng.normal(size=(600, 2))
    X[rng.random(600) < np.where(y == 1, 0.8, 0.1), 0] = np.nan
    model = RFDLCClassifier(backbone="trees", random_state=0).fit(X[:400], y[:400])
    assert model.score(X[400:], y[400:]) > 0.8
    assert (
        cross_val_score(make_pipeline(StandardScaler(), clone(model)), X, y, cv=3).min()
        > 0.75
    )


def test_values_that_are_missing_in_predictions_alone_are_medians(three):
    X, y = three
    model = RFDLCClassifier(backbone="trees", random_state=0).fit(X[:, :4], y)
    absent = X[:7, :4].copy()
    absent[2, 1], absent[4, 3] = np.nan, np.nan
    filled = np.where(np.isnan(absent), np.median(X[:, :4], axis=0), absent)
    with pytest.warns(
        UserWarning,
        match="column '1', '3' has missing values, but had none in training: .* median",
    ):
        p = model.predict_proba(absent)
    np.testing.assert_array_equal(p, model.predict_proba(filled))
    named = clone(model).fit(pd.DataFrame(X[:, :4], columns=list("abcd")), y)
    with pytest.warns(UserWarning, match="column 'b', 'd' has missing values"):
        np.testing.assert_array_equal(
            named.predict_proba(pd.DataFrame(absent, columns=list("abcd"))), p
        )
    some = clone(model).fit(with_missing(X[:, :4], [0]), y)
    with pytest.warns(
        UserWarning,
        match="column '1' is empty in 14% of the rows, but never was in training",
    ):
        p = some.predict_proba(absent)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_allclose(some.predict_proba(filled), p, atol=1e-6)


def test_a_column_without_any_value_changes_no_prediction(three):
    X, y = three
    empty = np.c_[X, np.full(len(X), np.nan)]
    model = RFDLCClassifier(backbone="mlp", epochs=3, random_state=0).fit(empty, y)
    filled = empty.copy()
    filled[:, -1] = 5
    with pytest.warns(
        UserWarning, match="column '8' has values, but was empty in training"
    ):
        np.testing.assert_array_equal(
            model.predict_proba(filled), model.predict_proba(empty)
        )


def test_partial_fit_of_missing_values(three):
    X, y = with_missing(three[0]), three[1]
    model, of_frame = (
        RFDLCClassifier(backbone="mlp", particles=1, random_state=0) for _ in range(2)
    )
    for rows in np.array_split(np.arange(len(X)), 2):
        model.partial_fit(X[rows], y[rows], classes=[0, 1, 2])
        of_frame.partial_fit(pd.DataFrame(X[rows]), y[rows], classes=[0, 1, 2])
    np.testing.assert_array_equal(
        model.predict_proba(X), of_frame.predict_proba(pd.DataFrame(X))
    )


def test_infinite_values_and_sparse_missing_ones_are_errors(three):
    X, y = three
    for value in (np.inf, -np.inf):
        wrong = with_missing(X)
        wrong[3, 1] = value
        with pytest.raises(ValueError, match="Input X contains infinity"):
            RFDLCClassifier(backbone="trees").fit(wrong, y)
    with pytest.raises(
        InputError, match=r"X is sparse and holds NaN: .* X\.toarray\(\)"
    ):
        RFDLCClassifier(backbone="trees").fit(sparse.csr_matrix(with_missing(X)), y)
    model = RFDLCClassifier(backbone="mlp", epochs=1, random_state=0).fit(
        with_missing(X), y
    )
    np.testing.assert_array_equal(
        model.predict_proba(sparse.csr_matrix(X)), model.predict_proba(X)
    )
    with pytest.raises(ValueError, match="Input X contains infinity"):
        model.predict(np.full((1, 8), np.inf))
    assert get_tags(model).input_tags.allow_nan
    assert get_tags(UtilityClassifier(model)).input_tags.allow_nan
    assert not get_tags(UtilityClassifier(LogisticRegression())).input_tags.allow_nan

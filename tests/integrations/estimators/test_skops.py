"""Estimators in files of skops: nothing is pickled, and what is loaded decides alike."""

import numpy as np
import pytest
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

import rfdlc

skops = pytest.importorskip("skops.io", reason="needs skops: pip install skops")
X, y = load_iris(return_X_y=True)
X, y = X[:120], y[:120]  # a tail: 50, 50 and 20 samples
COSTLY = rfdlc.Utility([[1, 0, 0], [0, 1, 0], [0, -5, 1]])


@pytest.mark.parametrize(
    "estimator",
    [
        rfdlc.UtilityClassifier(LogisticRegression(max_iter=500), COSTLY),
        rfdlc.RFDLCClassifier(COSTLY, backbone="mlp", epochs=2),
    ],
    ids=["UtilityClassifier", "RFDLCClassifier"],
)
def test_what_is_loaded_decides_alike(estimator, tmp_path):
    fitted = estimator.fit(X, y)
    skops.dump(fitted, tmp_path / "estimator.skops")
    held = skops.get_untrusted_types(file=tmp_path / "estimator.skops")
    assert held
    assert all(name.startswith("rfdlc.") for name in held)
    loaded = skops.load(tmp_path / "estimator.skops", trusted=held)
    np.testing.assert_array_equal(loaded.predict(X), fitted.predict(X))
    np.testing.assert_array_equal(loaded.predict_proba(X), fitted.predict_proba(X))
    assert not np.array_equal(fitted.predict(X), fitted.predict_proba(X).argmax(1))  # the costs are kept, and matter


def test_a_file_is_not_loaded_unless_its_types_are_trusted(tmp_path):
    fitted = rfdlc.UtilityClassifier(LogisticRegression(max_iter=500)).fit(X, y)
    skops.dump(fitted, tmp_path / "estimator.skops")
    with pytest.raises(skops.exceptions.UntrustedTypesFoundException):
        skops.load(tmp_path / "estimator.skops")

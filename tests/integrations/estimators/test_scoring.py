"""Metrics with scikit-learn's signatures: against plain loops."""

import numpy as np
import pytest
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score
from sklearn.model_selection import cross_val_score

from rfdlc import InputError, Utility, make_utility_scorer
from rfdlc.integrations.sklearn import scoring

TRUE = ["a", "a", "b", "b", "c", "c"]
SAID = ["a", "b", "b", "a", "abstain", "c"]
UTILITY = Utility([[2, 0, 0, 0.5], [-3, 1, 0, 0.5], [-9, -1, 4, 0.5]], ["a", "b", "c"], ["a", "b", "c", "abstain"])


def test_mean_utility_and_regret():
    gained = [2, 0, 1, -3, 0.5, 4]
    assert scoring.mean_utility_score(TRUE, SAID, utility=UTILITY) == pytest.approx(np.mean(gained))
    assert scoring.mean_utility_score(TRUE, SAID, utility=UTILITY.matrix) == pytest.approx(np.mean(gained))
    regret = [0, 2, 0, 4, 3.5, 0]
    assert scoring.mean_regret_score(TRUE, SAID, utility=UTILITY) == pytest.approx(np.mean(regret))
    weights = [1, 2, 0, 1, 1, 5]
    expected = np.average(gained, weights=weights)
    assert scoring.mean_utility_score(TRUE, SAID, utility=UTILITY, sample_weight=weights) == pytest.approx(expected)


def test_numbers_and_classes_that_a_fold_lacks():
    utility = Utility(np.eye(4) - 1)  # classes 0 to 3
    assert scoring.mean_utility_score([0, 3], [0, 2], utility=utility) == -0.5
    assert scoring.mean_utility_score([-1, 1], [1, 1], utility=np.eye(2)) == 0.5  # -1 is a class here
    assert scoring.mean_utility_score([True, False], [True, True], utility=Utility(np.eye(2), ["True", "False"])) == 0.5
    handed_over = np.column_stack([np.eye(2), [0.3, 0.3]])
    assert scoring.mean_utility_score([0, 1], [-1, 1], utility=handed_over) == pytest.approx(0.65)
    with pytest.raises(InputError, match="'d' is no action"):
        scoring.mean_utility_score(TRUE, [*SAID[:5], "d"], utility=UTILITY)
    with pytest.raises(InputError, match="y_true contains 'd'"):
        scoring.mean_utility_score(["d"], ["a"], utility=UTILITY)
    with pytest.raises(InputError, match="numbers but the utility's classes are a, b, c"):
        scoring.mean_utility_score([1], [1], utility=UTILITY)
    with pytest.raises(InputError, match=r"3 rows but y_true and y_pred have 2 classes \(0, 2\): give labels"):
        scoring.mean_utility_score([0, 2], [0, 0], utility=np.eye(3))
    assert scoring.mean_utility_score([0, 2], [0, 0], utility=np.eye(3), labels=[0, 1, 2]) == 0.5
    with pytest.raises(InputError, match="labels are 2, 0, 1: expected each once and sorted"):
        scoring.mean_utility_score([0, 2], [0, 0], utility=np.eye(3), labels=[2, 0, 1])


def test_one_hot_utility_is_accuracy():
    X, y = load_iris(return_X_y=True)
    model = LogisticRegression(max_iter=500)
    ours = cross_val_score(model, X, y, scoring=make_utility_scorer("one-hot"))
    np.testing.assert_allclose(ours, cross_val_score(model, X, y, scoring="accuracy"))


def test_rates():
    train = ["a"] * 9 + ["b"] * 3 + ["c"]  # the head is a, of three classes the first half rounded up: a and b
    tail = [(t, s) for t, s in zip(TRUE, SAID, strict=True) if t == "c"]
    expected = np.mean([s in ("a", "b") for _, s in tail])
    assert scoring.false_head_rate_score(TRUE, SAID, y_train=train, head_fraction=0.5) == expected
    assert scoring.false_head_rate_score(TRUE, SAID, y_train=train, head_fraction=0.25) == 0.25
    assert scoring.group_rate_score(TRUE, SAID, true=["b", "c"], decided=["a"]) == 0.25
    assert scoring.group_rate_score(TRUE, SAID, true=iter(["b", "c"]), decided=iter(["a"])) == 0.25
    assert scoring.abstention_rate_score(TRUE, SAID) == pytest.approx(1 / 6)
    assert scoring.kept_accuracy_score(TRUE, SAID) == pytest.approx(3 / 5)


def test_probabilities():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(3), 400)
    y = np.array(["a", "b", "c"])[rng.integers(0, 3, 400)]
    confidence, right = p.max(1), np.array(["a", "b", "c"])[p.argmax(1)] == y
    bins = np.minimum((confidence * 15).astype(int), 14)
    expected = sum(abs((right[bins == b] - confidence[bins == b]).sum()) for b in range(15)) / 400
    assert scoring.expected_calibration_error(y, p) == pytest.approx(expected)
    pairs = [(c > w) + 0.5 * (c == w) for c in confidence[right] for w in confidence[~right]]
    assert scoring.error_detection_auc(y, p) == pytest.approx(np.mean(pairs))
    order = np.argsort(-confidence)
    risks = np.cumsum(~right[order]) / np.arange(1, 401)
    assert scoring.risk_coverage_area(y, p) == pytest.approx(risks.mean())
    assert 0 < scoring.classwise_calibration_error(y, p) < 1
    with pytest.raises(InputError, match="3 columns but there are 2 classes"):
        scoring.expected_calibration_error(["a", "b"], p[:2])
    assert scoring.expected_calibration_error(["a", "b"], p[:2], labels=["a", "b", "c"]) >= 0
    with pytest.raises(InputError, match="labels are c, b, a: expected each once and sorted"):
        scoring.expected_calibration_error(["a", "b"], p[:2], labels=["c", "b", "a"])
    for score in (scoring.expected_calibration_error, scoring.classwise_calibration_error):
        with pytest.raises(InputError, match="bins is 0: expected 1 or more"):
            score(["a", "b"], p[:2], labels=["a", "b", "c"], bins=0)
    for wrong, told in (([[3, -2], [1, 4]], "hold -2"), ([[0.5, 0.6], [0.1, 0.9]], "row 0 .* sums to 1.1")):
        with pytest.raises(InputError, match=told):
            scoring.expected_calibration_error(["a", "b"], wrong)
    assert accuracy_score(y, np.array(["a", "b", "c"])[p.argmax(1)]) == right.mean()

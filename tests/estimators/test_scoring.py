"""Scorers: against plain loops."""

import warnings

import numpy as np
import pytest
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_predict, cross_val_score

from rfdlc import InputError, Utility, UtilityClassifier, make_utility_scorer
from rfdlc.estimators import scoring

TRUE = ["a", "a", "b", "b", "c", "c"]
SAID = ["a", "b", "b", "a", "abstain", "c"]
UTILITY = Utility(
    [[2, 0, 0, 0.5], [-3, 1, 0, 0.5], [-9, -1, 4, 0.5]],
    ["a", "b", "c"],
    ["a", "b", "c", "abstain"],
)


class Fixed:
    """An estimator whose decisions are `said`."""

    def __init__(self, said, classes=None):
        self.said, self.classes_ = (
            np.asarray(said),
            np.unique(said) if classes is None else np.asarray(classes),
        )

    def predict(self, X):
        return self.said


def score(true, said, utility, classes=None, **options):
    return make_utility_scorer(utility, **options)(Fixed(said, classes), None, true)


def test_mean_utility():
    gained = [2, 0, 1, -3, 0.5, 4]
    assert score(TRUE, SAID, UTILITY) == pytest.approx(np.mean(gained))
    assert score(TRUE, SAID, UTILITY.matrix, ["a", "b", "c"]) == pytest.approx(
        np.mean(gained)
    )
    assert score(["a", "b", "b"], ["a", "a", "b"], "tail-sensitive") == pytest.approx(
        (1 + 0 + 1) / 3
    )


def test_numbers_and_classes_that_a_fold_lacks():
    assert score([0, 3], [0, 2], Utility(np.eye(4) - 1)) == -0.5  # classes 0 to 3
    assert score([-1, 1], [1, 1], np.eye(2), [-1, 1]) == 0.5  # -1 is a class here
    assert (
        score([True, False], [True, True], Utility(np.eye(2), ["True", "False"])) == 0.5
    )
    handed_over = np.column_stack([np.eye(2), [0.3, 0.3]])
    assert score([0, 1], [-1, 1], handed_over, [0, 1]) == pytest.approx(0.65)
    with pytest.raises(InputError, match="'d' is not an action"):
        score(TRUE, [*SAID[:5], "d"], UTILITY)
    with pytest.raises(InputError, match="y contains 'd'"):
        score(["d"], ["a"], UTILITY)
    with pytest.raises(
        InputError, match="numbers but the utility's classes are a, b, c"
    ):
        score([1], [1], UTILITY)
    with pytest.raises(
        InputError, match=r"utility has 3 rows but y has 2 classes \(0, 2\)"
    ):
        score([0, 2], [0, 0], np.eye(3), [0, 2])
    assert score([0, 2], [0, 0], np.eye(3), labels=[0, 1, 2]) == 0.5
    assert (
        score(["a", "d"], ["a", "b"], "one-hot", ["a", "b"]) == 0.5
    )  # d was not in the training part
    with pytest.raises(
        InputError, match="labels are 2, 0, 1: expected each once and sorted"
    ):
        score([0, 2], [0, 0], np.eye(3), labels=[2, 0, 1])


def test_one_hot_utility_is_accuracy():
    X, y = load_iris(return_X_y=True)
    model = LogisticRegression(max_iter=500)
    ours = cross_val_score(model, X, y, scoring=make_utility_scorer("one-hot"))
    np.testing.assert_allclose(ours, cross_val_score(model, X, y, scoring="accuracy"))


def test_a_scorer_of_any_registered_metric():
    X, y = load_iris(return_X_y=True)
    model = LogisticRegression(max_iter=500)
    for name, reference in (
        ("balanced_accuracy", "balanced_accuracy"),
        ("nll", "neg_log_loss"),
    ):
        ours = cross_val_score(model, X, y, scoring=scoring.make_metric_scorer(name))
        np.testing.assert_allclose(
            ours, cross_val_score(model, X, y, scoring=reference)
        )
    decided = UtilityClassifier(model, utility=np.eye(3) * [1, 2, 3]).fit(X, y)
    scored = scoring.make_metric_scorer("mean_utility")(decided, X, y)
    assert scored == pytest.approx(np.mean((decided.predict(X) == y) * (y + 1)))
    with pytest.raises(
        InputError, match=r"metric 'acuracy' is unknown.*did you mean 'accuracy'"
    ):
        scoring.make_metric_scorer("acuracy")


def test_a_class_that_the_estimator_never_saw_has_probability_0():
    X, y = load_iris(return_X_y=True)
    model = LogisticRegression(max_iter=500).fit(X[y > 0], y[y > 0])
    p = np.column_stack([np.zeros(150), model.predict_proba(X)])
    reference = np.mean(-np.log(np.maximum(p[np.arange(150), y], 1e-12)))
    found = -scoring.make_metric_scorer("nll", utility=Utility.one_hot(3))(model, X, y)
    assert found == pytest.approx(reference)


def test_a_scorer_of_a_metric_by_frequency():
    X, y = load_iris(return_X_y=True)
    model, train = (
        LogisticRegression(max_iter=500).fit(X[:, :1], y),
        [0] * 9 + [1] * 3 + [2],
    )
    found = -scoring.make_metric_scorer("false_head_rates.0.5", y_train=train)(
        model, X[:, :1], y
    )
    assert found == pytest.approx(
        np.mean(model.predict(X[y == 2, :1]) < 2)
    )  # head: the first two of three classes
    with pytest.raises(InputError, match="or counts as y_train"):
        scoring.make_metric_scorer("false_head_rates.0.5")(model, X[:, :1], y)


def test_classes_that_scikit_learn_numbers_are_named_as_the_cause():
    X, y = load_iris(return_X_y=True)
    names = np.array(["a", "b", "c"])[y]
    given = UtilityClassifier(LogisticRegression(max_iter=500), UTILITY)
    with pytest.raises(InputError, match="numbers the classes: give an array"):
        cross_val_predict(given, X, names, cv=3, method="predict_proba")
    by_position = UtilityClassifier(LogisticRegression(max_iter=500), UTILITY.matrix)
    assert cross_val_predict(
        by_position, X, names, cv=3, method="predict_proba"
    ).shape == (150, 3)


def test_costs_that_are_given_as_utilities_are_warned_about():
    X, y = load_iris(return_X_y=True)
    model, costs = (
        LogisticRegression(max_iter=500).fit(X, y),
        np.ones((3, 3)) - np.eye(3),
    )
    with pytest.warns(
        UserWarning, match="worth the least of its row: if these are costs"
    ):
        assert make_utility_scorer(costs)(model, X, y) > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make_utility_scorer(Utility.from_costs(costs))(model, X, y) < 0

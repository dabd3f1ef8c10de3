"""scikit-learn's own checks, every one of the installed release."""

from sklearn.linear_model import LogisticRegression
from sklearn.utils.estimator_checks import parametrize_with_checks

from rfdlc import UtilityClassifier


@parametrize_with_checks([UtilityClassifier(LogisticRegression(C=1))])
def test_utility_classifier(estimator, check):
    check(estimator)

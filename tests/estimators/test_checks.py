"""scikit-learn's own checks, every one of the installed release; `make oldest` runs
those of the oldest supported.
"""

from sklearn.linear_model import LogisticRegression
from sklearn.utils.estimator_checks import parametrize_with_checks

from rfdlc import RFDLCClassifier, UtilityClassifier

# A mini-batch of other samples is another step: as of any network that is trained in
# mini-batches, scikit-learn's own MLPClassifier included, which is checked with its
# full-batch solver. What does hold is in test_estimator.py.
MINI_BATCHES = "mini-batches of weighted samples are not those of repeated samples"
EXPECTED = {
    "check_sample_weight_equivalence_on_dense_data": MINI_BATCHES,
    "check_sample_weight_equivalence_on_sparse_data": MINI_BATCHES,
}


def expected_failures(estimator):
    return EXPECTED if isinstance(estimator, RFDLCClassifier) else {}


@parametrize_with_checks(
    [
        UtilityClassifier(LogisticRegression(C=1)),
        RFDLCClassifier(backbone="mlp", hidden=(32,), particles=2, epochs=30),
    ],
    expected_failed_checks=expected_failures,
)
def test_every_check(estimator, check):
    check(estimator)

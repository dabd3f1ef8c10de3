"""The way of data through the files is short."""

from tests import tracing


def test_scores_pass_few_files_until_they_are_actions():
    passed = tracing.to_an_action()
    assert passed[0] == "decisions/decider.py"
    assert len(passed) <= 10


def test_data_pass_no_more_files_than_before_until_they_have_a_loss():
    passed = tracing.to_a_loss()
    assert passed[0] == "training/train.py"
    assert passed[-1] == "training/execution.py"
    assert len(passed) <= 45

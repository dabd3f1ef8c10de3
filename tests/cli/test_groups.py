"""`--groups`: which rows of a table of predictions depend on each other."""

import json

import numpy as np
import pandas
import pytest
from scipy.special import softmax

from rfdlc import Decider, Predictions, Utility, evaluate

NAMES = ["cat", "dog", "newt"]


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """Test and held-out rows of patients with several visits; visits of a patient have
    nearly the same scores.
    """
    rng, found = np.random.default_rng(0), {}
    for name, patients in (("test", 60), ("val", 80)):
        of_patient = rng.choice(3, patients, p=[0.6, 0.25, 0.15])
        patient = np.repeat(np.arange(patients), 5)
        y = of_patient[patient]
        z = (
            (3 * rng.normal(size=(patients, 3)))[patient]
            + 3 * np.eye(3)[y]
            + 0.1 * rng.normal(size=(len(y), 3))
        )
        frame = pandas.DataFrame(softmax(z, axis=1), columns=NAMES)
        frame["id"], frame["patient"] = (
            [f"{name}-{i}" for i in range(len(y))],
            [f"p{p:03}" for p in patient],
        )
        frame["target"] = np.array(NAMES)[y]
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
        found[name] = frame
    (tmp_path / "U.csv").write_text(
        "true,cat,dog,newt\ncat,1,0,0\ndog,0,1,0\nnewt,-1,-1,1\n"
    )
    monkeypatch.chdir(tmp_path)
    return found


def predictions(frame, groups=None):
    return Predictions(
        probabilities=frame[NAMES].to_numpy(),
        targets=frame.target,
        classes=NAMES,
        groups=groups,
    )


def test_intervals_are_those_of_the_library_with_groups(run, tables):
    code, out, err = run(
        "evaluate", "test.csv", "--utility", "U.csv", "--groups", "patient", "--json"
    )
    assert (code, err) == (0, "")
    test, decider = tables["test"], Decider(Utility.read_csv("U.csv"))
    expected, apart = (
        evaluate(predictions(test, groups), decider=decider).to_dict()
        for groups in (test.patient, None)
    )
    found = json.loads(out)
    assert found["groups"] == 60
    assert found["intervals"] == {
        name: pytest.approx(ends) for name, ends in expected["intervals"].items()
    }
    assert found["intervals"]["accuracy"] != pytest.approx(
        apart["intervals"]["accuracy"]
    )


def test_calibration_keeps_groups_in_one_fold(run, tables):
    test, val = (predictions(tables[name]) for name in ("test", "val"))
    decided = []
    for groups in ((), ("--groups", "patient")):
        options = ("--utility", "U.csv", *groups, "-o", "d.json")
        assert run("fit", "val.csv", *options)[0] == 0
        decided.append(Decider.load("d.json").probabilities(test))
    expected = Decider(Utility.read_csv("U.csv"), calibration="auto").fit(
        val, groups=tables["val"].patient
    )
    np.testing.assert_allclose(decided[1], expected.probabilities(test), atol=1e-9)
    assert np.abs(decided[0] - decided[1]).max() > 1e-3


def test_the_column_may_be_that_of_labels(run, tables):
    tables["test"].drop(columns=["patient", "target"]).to_csv("bare.csv", index=False)
    tables["test"][["id", "target", "patient"]].sample(frac=1, random_state=0).to_csv(
        "labels.csv", index=False
    )
    usual = run("evaluate", "test.csv", "-u", "U.csv", "--groups", "patient", "--json")
    assert (
        run(
            "evaluate",
            "bare.csv",
            "-u",
            "U.csv",
            "--labels",
            "labels.csv",
            "--groups",
            "patient",
            "--json",
        )
        == usual
    )
    for side in (("test.csv", "bare.csv"), ("bare.csv", "test.csv")):
        code, out, _ = run(
            "compare",
            *side,
            "-u",
            "U.csv",
            "--labels",
            "labels.csv",
            "--groups",
            "patient",
        )
        assert code == 0
        assert "300 paired samples in 60 groups" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("evaluate", "test.csv", "--groups", "patien"),
            "test.csv: no column patien, it has",
        ),
        (
            ("decide", "test.csv", "--groups", "patien"),
            "test.csv: no column 'patien' for --groups; give one",
        ),
        (
            ("decide", "test.csv", "--groups", "patient", "--calibrate", "other.csv"),
            "--calibrate other.csv: no column",
        ),
        (
            ("evaluate", "empty.csv", "--groups", "patient"),
            "column 'patient' is empty in row 3: fill it in",
        ),
        (
            ("evaluate", "test.npz", "--groups", "patient"),
            "test.npz: no column 'patient' for --groups",
        ),
    ],
)
def test_a_column_that_is_not_there_is_named(arguments, said, run, tables):
    tables["val"].drop(columns="patient").to_csv("other.csv", index=False)
    predictions(tables["test"]).save("test.npz")
    tables["test"].assign(
        patient=tables["test"].patient.where(np.arange(300) != 2)
    ).to_csv("empty.csv", index=False)
    code, _, err = run(*arguments, "-u", "U.csv")
    assert code == 2
    assert said in err

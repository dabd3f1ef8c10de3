"""`rfdlc fit`: a decider from held-out predictions, with every option there is."""

import json

import numpy as np
import pandas
import pytest
from scipy.special import softmax

from rfdlc import Classes, Decider, Predictions, Utility

NAMES = ("cat", "dog", "newt")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Predictions of new and held-out samples, training counts and a utility."""
    rng = np.random.default_rng(0)
    for name in ("test", "val"):
        y = rng.choice(3, 400, p=[0.7, 0.2, 0.1])
        z = 3 * (rng.normal(size=(400, 3)) + 1.5 * np.eye(3)[y])
        frame = pandas.DataFrame(softmax(z, axis=1), columns=NAMES)
        frame["target"] = np.array(NAMES)[y]
        frame["id"] = [f"{name}-{i}" for i in range(400)]
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    (tmp_path / "counts.csv").write_text(
        "class,count,group\ncat,500,pet\ndog,60,pet\nnewt,8,wild\n"
    )
    (tmp_path / "U.csv").write_text(
        "true,cat,dog,newt,ask\ncat,1,0,0,0.3\ndog,-1,1,0,0.3\nnewt,-4,-1,1,0.3\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def fitted_run(folder):
    """A run folder with a decider and held-out predictions."""
    run = folder / "run"
    run.mkdir()
    classes = Classes(NAMES)
    classes.to_json(run / "classes.json")
    Predictions.load("val.csv").save(run / "held-out.npz")
    Predictions.load("test.csv").save(run / "predictions.npz")
    decider = Decider(Utility.one_hot(classes), calibration="temperature")
    decider.fit(Predictions.load("val.csv")).save(run / "decider.json")
    return run


def test_a_decider_is_that_of_the_library(run, folder):
    code, _, err = run(
        "fit",
        "val.csv",
        *("-u", "U.csv", "-c", "counts.csv"),
        *("--calibration", "temperature", "--balanced"),
        *("--train-prior", "train", "--target-prior", "uniform"),
        *("--sets", "class", "--coverage", "80%", "--set-size", "2"),
        *("--unfamiliar", "5%", "--budget", "total=5%,ask=4%"),
        *("-o", "d.json"),
    )
    assert (code, err.count("a coverage of 0.8 is not promised")) == (0, 1)
    counts = {"cat": 500, "dog": 60, "newt": 8}
    groups = {"pet": ["cat", "dog"], "wild": ["newt"]}
    classes = Classes.from_counts(counts, groups=groups)
    val = Predictions.load("val.csv", classes)
    expected = Decider(
        Utility.read_csv("U.csv", classes),
        calibration="temperature",
        train_prior="train",
        target_prior="uniform",
    ).fit(val, balanced=True)
    expected = expected.fit_sets(val, kind="class", coverage=0.8, max_size=2)
    expected = expected.fit_unfamiliar(val, false_alarm=0.05)
    expected = expected.fit_budget(val, budget={"total": "5%", "ask": "4%"})
    expected.save("expected.json")
    assert (folder / "d.json").read_text() == (folder / "expected.json").read_text()


def test_a_page_of_at_most_eight_lines_says_what_was_fitted_and_what_is_next(
    run, folder
):
    code, out, _ = run(
        *("fit", "val.csv", "-u", "U.csv", "--sets", "class", "--budget", "5%"),
        *("--unfamiliar", "5%", "-o", "d.json"),
    )
    lines = out.splitlines()
    assert (code, len(lines)) == (0, 7)
    assert lines[0] == (
        "Fitted to 400 held-out samples of val.csv. Actions: cat, dog, newt, ask."
    )
    assert lines[-1] == "Written to d.json; next: rfdlc decide FILE --decider d.json"
    price = Decider.load("d.json").deferral.budget.prices["total"]
    assert f"Budget: total 5%; one at a time, samples are handed over for a gain of total {price:.4f} or more." in lines  # fmt: skip  # noqa: E501
    assert run("decide", "test.csv", "--decider", "d.json")[0] == 0


def test_json_is_all_that_is_printed(run, folder):
    words = ("fit", "val.csv", "-u", "U.csv", "--budget", "5%", "--json")
    code, out, _ = run(*words)
    summary = json.loads(out)
    decider = Decider.load("decider.json")
    assert code == 0
    assert summary["out"] == "decider.json"
    assert (summary["samples"], summary["left_out"]) == (400, 0)
    assert summary["actions"] == [*NAMES, "ask"]
    assert summary["calibration"] == str(decider.model.calibrator)
    assert summary["budget"] == decider.deferral.budget.to_dict()
    assert (summary["sets"], summary["unfamiliar"]) == (None, None)


def test_a_run_keeps_its_calibration_unless_another_is_named(run, fitted_run):
    saved = Decider.load(fitted_run)
    val = Predictions.load("val.csv")
    assert run("fit", fitted_run, "-u", "U.csv", "--sets", "macro")[0] == 0
    kept = saved.replace(utility=Utility.read_csv("U.csv")).fit_sets(val)
    assert Decider.load("decider.json").to_dict() == kept.to_dict()
    code, _, _ = run("fit", fitted_run, "--calibration", "matrix-scaling")
    other = saved.replace(calibration="matrix-scaling").fit(val)
    assert code == 0
    assert Decider.load("decider.json").to_dict() == other.to_dict()


def test_a_decider_may_start_from_a_saved_one(run, fitted_run):
    val = Predictions.load("val.csv")
    words = ("fit", "val.csv", "--decider", fitted_run, "--abstain", "0.4")
    assert run(*words, "--budget", "10%")[0] == 0
    saved = Decider.load(fitted_run)
    expected = saved.replace(utility=saved.utility.with_abstain(0.4))
    expected = expected.fit_budget(val, budget="10%")
    assert Decider.load("decider.json").to_dict() == expected.to_dict()
    # One that is not calibrated is, and one that was is only if it is asked for.
    Decider(Utility.read_csv("U.csv"), calibration="temperature").save("plain.json")
    assert run("fit", "val.csv", "--decider", "plain.json", "-o", "a.json")[0] == 0
    calibrated = Decider.load("plain.json").fit(val)
    assert Decider.load("a.json").to_dict() == calibrated.to_dict()


def test_labels_may_be_in_a_file_of_their_own(run, folder):
    frame = pandas.read_csv("val.csv")
    frame.drop(columns="target").to_csv("bare.csv", index=False)
    labels = frame[["id", "target"]].sample(frac=1, random_state=0)
    labels.to_csv("labels.csv", index=False)
    assert run("fit", "val.csv", "-u", "U.csv", "-o", "a.json")[0] == 0
    words = ("fit", "bare.csv", "-u", "U.csv", "--labels", "labels.csv")
    assert run(*words, "-o", "b.json")[0] == 0
    assert (folder / "a.json").read_text() == (folder / "b.json").read_text()


def test_a_prior_is_estimated_of_samples_without_labels(run, folder):
    words = ("-c", "counts.csv", "--train-prior", "train")
    words = ("fit", "val.csv", *words, "--target-prior", "estimate")
    assert run(*words, "--unlabelled", "test.csv")[0] == 0
    classes = Classes.from_counts({"cat": 500, "dog": 60, "newt": 8})
    decider = Decider(Utility.one_hot(classes), train_prior="train")
    decider = decider.fit(Predictions.load("val.csv", classes))
    estimate = decider.estimate_prior(Predictions.load("test.csv", classes))
    expected = decider.replace(target_prior=estimate).model.target_prior
    saved = Decider.load("decider.json").model.target_prior
    np.testing.assert_allclose(saved, expected, atol=1e-9)


def test_what_is_not_calibrated_needs_no_labels(run, folder):
    frame = pandas.read_csv("test.csv")
    frame.drop(columns="target").to_csv("bare.csv", index=False)
    words = ("-c", "counts.csv", "--train-prior", "train", "--target-prior", "uniform")
    code, out, _ = run(
        "fit", "bare.csv", "-u", "U.csv", *words, "--calibration", "none"
    )
    assert code == 0
    assert "Decided for a uniform class prior." in out
    assert Decider.load("decider.json").model.calibrator is None
    code, _, err = run("fit", "bare.csv", "-u", "U.csv")
    assert (code, "bare.csv: has no true classes: expected a column" in err) == (
        2,
        True,
    )


def test_a_file_is_written_whole_or_not_at_all(run, folder, monkeypatch):
    (folder / "d.json").write_text("before")

    def interrupted(self, path):
        path.write_text('{"half":')
        raise OSError("disk full")

    monkeypatch.setattr(Decider, "save", interrupted)
    code, out, err = run("fit", "val.csv", "-o", "d.json")
    assert (code, out, "disk full" in err) == (2, "", True)
    assert (folder / "d.json").read_text() == "before"
    assert not [path for path in folder.iterdir() if "half" in path.read_text()]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("none.csv",), "none.csv: no such file"),
        (("val.csv", "-o", "d.txt"), "d.txt: cannot be written, expected .json"),
        (("val.csv", "-o", "no/d.json"), "the folder"),
        (("val.csv", "--budget", "50/day"), "give a share here, such as 5%"),
        (("val.csv", "--budget", "5%"), "every action decides for a class: add one"),
        (("val.csv", "--coverage", "0.9"), "--coverage is for sets: give --sets"),
        (("val.csv", "--target", "name"), "--target name names a column of --labels"),
        (
            ("val.csv", "--target-prior", "estimate"),
            "--target-prior estimate is for samples without labels: give them by",
        ),
        (
            ("val.csv", "--unlabelled", "test.csv"),
            "test.csv is for an estimated class prior: give --target-prior estimate",
        ),
    ],
)
def test_bad_input_is_one_line(run, folder, words, message):
    code, out, err = run("fit", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not (folder / "decider.json").exists()


def test_a_folder_without_held_out_predictions_says_what_to_give(run, fitted_run):
    (fitted_run / "held-out.npz").unlink()
    code, _, err = run("fit", fitted_run)
    assert code == 2
    assert "has no held-out predictions (held-out.npz): give predictions" in err


def test_samples_that_networks_were_trained_on_are_refused(run, fitted_run):
    settings = {"settings": {"refit": True, "warm_refit": True}}
    (fitted_run / "config.json").write_text(json.dumps(settings))
    code, _, err = run("fit", fitted_run, "-o", "d.json")
    assert code == 2
    assert f"`rfdlc fit FILE --decider {fitted_run} -o decider.json`" in err
    assert run("fit", "val.csv", "--decider", fitted_run, "-o", "d.json")[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("decide", "test.csv", "--save-decider", "d.json"),
            "--save-decider is not an option of `rfdlc decide`: it is --out of `rfdlc"
            " fit`. Make a decider (`rfdlc fit HELD_OUT --out ...`), then give"
            " --decider decider.json",
        ),
        (
            ("watch", "test.csv", "-r", "val.csv", "--budget=5%"),
            "it is --budget of `rfdlc fit`",
        ),
        (
            ("decide", "test.csv", "--calibrat", "val.csv"),
            "`rfdlc decide` has no option --calibrat: see its --help; did you mean"
            " '--calibrate'?",
        ),
        (("inspect", "test.csv", "--budget", "5%"), "has no option --budget"),
    ],
)
def test_an_option_of_another_command_is_named(run, folder, words, message):
    code, out, err = run(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_wrong_value_is_said_as_before(run, folder):
    code, _, err = run("decide", "test.csv", "--abstain", "much")
    assert code == 2
    assert "Invalid value for '--abstain'" in " ".join(err.split())

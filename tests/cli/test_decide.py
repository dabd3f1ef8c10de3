"""The command line as a user runs it: exit codes, files, JSON, and one clear line for
bad input.
"""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
from scipy.special import softmax

from rfdlc import Classes, Decider, InputError, Predictions, Utility, evaluate
from rfdlc.cli.writing import check_writable

NAMES = ("cat", "dog", "newt")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with predictions for test and held-out data, training counts and a
    utility.
    """
    rng = np.random.default_rng(0)
    for name in ("test", "val"):
        y = rng.choice(3, 400, p=[0.7, 0.2, 0.1])
        z = 3 * (rng.normal(size=(400, 3)) + 1.5 * np.eye(3)[y])
        frame = pandas.DataFrame(
            softmax(z, axis=1)[:, [1, 2, 0]], columns=["dog", "newt", "cat"]
        )
        frame["target"], frame["id"] = (
            np.array(NAMES)[y],
            [f"{name}-{i}" for i in range(400)],
        )
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
        frame.to_parquet(tmp_path / f"{name}.parquet")
    (tmp_path / "counts.csv").write_text(
        "class,count,group\ncat,500,pet\ndog,60,pet\nnewt,8,wild\n"
    )
    (tmp_path / "U.csv").write_text(
        "true,cat,dog,newt,ask\ncat,1,0,0,0.3\ndog,-1,1,0,0.3\nnewt,-4,-1,1,0.3\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_decide_writes_what_the_library_decides(run, folder):
    code, out, err = run(
        "decide",
        "test.csv",
        "--utility",
        "U.csv",
        "--calibrate",
        "val.csv",
        "--out",
        "actions.csv",
    )
    assert (code, err) == (0, "")
    assert "400 decisions" in out
    utility = Utility.read_csv("U.csv")
    decider = Decider(utility).fit(Predictions.load("val.csv"))
    with open("actions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    why = decider.explain(Predictions.load("test.csv"))
    assert [row["action"] for row in rows] == [utility.actions[a] for a in why.action]
    assert [float(row["expected_utility"]) for row in rows] == pytest.approx(
        why.value.tolist(), rel=1e-4
    )
    assert [row["argmax"] for row in rows] == [
        utility.classes.names[c] for c in why.argmax
    ]
    assert rows[7]["id"] == "test-7"
    assert {"ask", "cat", "newt"} <= {row["action"] for row in rows}


def test_json_is_all_that_is_printed(run, folder):
    code, out, _ = run("decide", "test.csv", "-u", "U.csv", "--json")
    table = json.loads(out)
    assert code == 0
    assert (
        table["samples"]
        == 400
        == sum(table["actions"].values())
        == len(table["decisions"])
    )
    assert table["decisions"][0].keys() >= {
        "id",
        "action",
        "expected_utility",
        "runner_up",
        "argmax",
    }


@pytest.mark.parametrize("source", ["test.parquet", "test.npz"])
def test_other_formats_decide_alike(run, folder, source):
    predictions = Predictions.load("test.csv", Classes(NAMES))
    predictions.save("test.npz")
    run("decide", "test.csv", "-u", "U.csv", "-o", "a.csv")
    code, _, _ = run("decide", source, "-u", "U.csv", "-o", "b.parquet")
    assert code == 0
    assert (
        pandas.read_parquet("b.parquet")["action"].tolist()
        == pandas.read_csv("a.csv")["action"].tolist()
    )


def test_evaluate_prints_what_the_library_computes(run, folder):
    options = (
        "-u",
        "U.csv",
        "-c",
        "counts.csv",
        "--calibrate",
        "val.csv",
        "--rate",
        "wild:pet",
    )
    code, out, _ = run("evaluate", "test.csv", *options, "--json")
    classes = Classes.from_counts(
        {"cat": 500, "dog": 60, "newt": 8},
        groups={"pet": ["cat", "dog"], "wild": ["newt"]},
    )
    decider = Decider(Utility.read_csv("U.csv", classes)).fit(
        Predictions.load("val.csv")
    )
    expected = evaluate(
        Predictions.load("test.csv"), decider=decider, groups=[("wild", "pet")]
    )
    table = json.loads(out)
    assert code == 0
    assert table["false_head_rates"] == {
        str(k): v for k, v in expected.false_head_rates.items()
    }
    assert table["group_rates"] == expected.group_rates
    for name in (
        "accuracy",
        "mean_utility",
        "ece",
        "nll",
        "brier",
        "classwise_ece",
        "error_auc",
    ):
        assert table[name] == pytest.approx(getattr(expected, name), rel=1e-12), name
    assert table["false_head_rate"] > 0
    likely = evaluate(
        Predictions.load("test.csv"), decider=decider.replace(rule="argmax")
    ).mean_utility
    assert [table["over_argmax"][side] for side in "ab"] == pytest.approx(
        [likely, expected.mean_utility]
    )
    words = "arg max after calibration" if decider.model.calibrator else "arg max"
    assert (
        f"{words} would have {likely:.4f}: a gain of"
        in run("evaluate", "test.csv", *options)[1]
    )
    code, out, _ = run(
        "evaluate",
        "test.csv",
        "-u",
        "tail-sensitive",
        "-c",
        "counts.csv",
        "--bootstrap",
        "20",
    )
    assert code == 0
    assert "95% interval" in out
    assert "false head rate" in out
    assert out.rstrip().endswith("Decided for the class prior that the scores carry.")
    calibrated = run("evaluate", "test.csv", "--calibrate", "val.csv")[1]
    decider = Decider(Utility.one_hot(list(classes.names)))
    decider = decider.fit(Predictions.load("val.csv"))
    assert f"Calibrated: {decider.model.calibrator.short}." in calibrated


def test_arg_max_is_said_to_be_that_of_calibrated_probabilities(run, folder):
    """That of the probabilities as they were may have another utility."""
    for words, options in (
        ("arg max", ()),
        ("arg max after calibration", ("--calibrate", "val.csv")),
    ):
        code, out, _ = run("decide", "test.csv", "-u", "U.csv", *options)
        assert (code, f"differ from {words}." in " ".join(out.split())) == (0, True)


def test_numbers_in_a_file_of_labels_are_no_positions(run, folder):
    """Columns are in the order of the alphabet, and the numbers may be in another."""
    frame = pandas.read_csv("test.csv")
    frame.assign(
        target=frame["target"].map({"newt": 0, "cat": 1, "dog": 2}).fillna(3)
    ).astype({"target": int})[["id", "target"]].to_csv("numbers.csv", index=False)
    frame.drop(columns="target").to_csv("bare.csv", index=False)
    code, _, err = run("evaluate", "bare.csv", "--labels", "numbers.csv")
    assert (
        code,
        "numbers.csv: target '" in err,
        "write the names of the classes" in err,
    ) == (2, True, True)


def test_labels_from_a_file(run, folder):
    """Matched by id or path, in any order; also where ids are paths and the labels are
    named by file.
    """
    frame = pandas.read_csv("test.csv")
    frame.drop(columns="target").to_csv("bare.csv", index=False)
    labels = frame[["id", "target"]].sample(frac=1, random_state=0)
    labels.to_csv("labels.csv", index=False)
    labels.rename(columns={"id": "Path", "target": "label"}).to_parquet(
        "labels.parquet"
    )
    expected = run("evaluate", "test.csv", "--json")[1]
    for file in ("labels.csv", "labels.parquet"):
        assert run("evaluate", "bare.csv", "--labels", file, "--json")[1] == expected
    frame.drop(columns="target").assign(id="photos/" + frame["id"]).to_csv(
        "paths.csv", index=False
    )
    assert (
        run("evaluate", "paths.csv", "--labels", "labels.csv", "--json")[1] == expected
    )
    compared = json.loads(
        run("compare", "bare.csv", "bare.csv", "--labels", "labels.csv", "--json")[1]
    )
    assert {row["difference"] for row in compared["differences"]} == {0}
    assert run("report", "bare.csv", "--labels", "labels.csv", "--bootstrap", 0)[0] == 0
    folders = [f"{i}/test-{i % 200}" for i in range(400)]  # two files of one name
    frame.drop(columns="target").assign(id=folders).to_csv("folders.csv", index=False)
    labels[:-1].to_csv("short.csv", index=False)
    pandas.concat([labels, labels[:1]]).to_csv("twice.csv", index=False)
    frame[["id", "cat"]].to_csv("none.csv", index=False)
    named = labels.rename(columns={"id": "customer_id"})
    named.to_csv("named.csv", index=False)
    code, out, err = run("evaluate", "bare.csv", "--labels", "named.csv", "--json")
    assert (code, out) == (0, expected)
    assert "column 'customer_id' has all ids, and was taken for them" in err
    named.assign(again=named["customer_id"]).to_csv("doubt.csv", index=False)
    frame.drop(columns=["target", "id"]).to_csv("nameless.csv", index=False)
    for file, labels_file, message in (
        ("bare.csv", "short.csv", "none for"),
        ("bare.csv", "twice.csv", "several for "),
        ("bare.csv", "none.csv", "expected columns id (or path) and target"),
        (
            "bare.csv",
            "doubt.csv",
            "it has customer_id, target, again: rename those that are meant",
        ),
        ("nameless.csv", "labels.csv", "has no ids"),
        ("folders.csv", "labels.csv", "several for"),
    ):
        code, _, err = run("evaluate", file, "--labels", labels_file)
        assert code == 2
        assert message in err


def test_labels_of_unknown_classes_are_left_out_if_asked(run, folder):
    frame = pandas.read_csv("test.csv")
    frame.drop(columns="target").to_csv("bare.csv", index=False)
    labels = frame[["id", "target"]].assign(sex=np.where(np.arange(400) % 2, "f", "m"))
    labels.loc[[3, 50, 200], "target"], labels.loc[[7], "target"] = "genet", "cats"
    labels.sample(frac=1, random_state=0).to_csv("labels.csv", index=False)
    words = ("evaluate", "bare.csv", "-u", "U.csv", "--labels", "labels.csv")
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    told = (
        "labels.csv: target: 4 of 400 samples have a class that is not in the"
        " predictions: genet (3), cats (1)"
    )
    hint = (
        "first in the row of test-3; leave them out with skip_unknown=True"
        " (--skip-unknown), or correct the labels"
    )
    assert f"{told}, {hint}" in " ".join(err.split())
    code, out, err = run(*words, "--skip-unknown", "--by", "sex", "--json")
    assert (code, f"{told}; they are left out" in " ".join(err.split())) == (0, True)
    found, left = json.loads(out), frame.drop(index=[3, 7, 50, 200])
    left.to_csv("left.csv", index=False)
    expected = json.loads(run("evaluate", "left.csv", "-u", "U.csv", "--json")[1])
    assert found["samples"] == expected["samples"] == 396
    assert (found["left_out"], expected["left_out"]) == (4, 0)
    assert found == found | expected | {"left_out": 4}
    assert {name: part["samples"] for name, part in found["by"]["sex"].items()} == {
        "m": 198,
        "f": 198,
    }
    code, out, err = run(
        "compare", "bare.csv", "bare.csv", *words[4:], "--skip-unknown", "--json"
    )
    assert (code, json.loads(out)["samples"]) == (0, 396)


def test_samples_without_a_row_of_labels_are_left_out_if_asked(run, folder):
    frame = pandas.read_csv("test.csv")
    frame.drop(columns="target").to_csv("bare.csv", index=False)
    labels = frame[["id", "target"]].assign(sex=np.where(np.arange(400) % 2, "f", "m"))
    labels[100:].to_csv("labels.csv", index=False)
    words = (
        "evaluate",
        "bare.csv",
        "--labels",
        "labels.csv",
        "--by",
        "sex",
        "--groups",
        "sex",
    )
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    told = (
        "expected one row for each id of bare.csv; none for test-0, test-1, test-2, ..."
        " (100 in all)"
    )
    assert (
        f"{told}: leave them out with skip_unknown=True (--skip-unknown)"
        in " ".join(err.split())
    )
    code, out, err = run(*words, "--skip-unknown", "--json")
    assert (
        code,
        "100 of 400 samples have no label; they are left out" in " ".join(err.split()),
    ) == (0, True)
    labels[100:].assign(id="x" + labels["id"]).to_csv("labels.csv", index=False)
    assert run(*words, "--skip-unknown")[0] == 2  # none at all fits
    frame[100:].assign(sex=labels["sex"]).to_csv("left.csv", index=False)
    expected = json.loads(
        run("evaluate", "left.csv", "--by", "sex", "--groups", "sex", "--json")[1]
    )
    assert json.loads(out) == expected | {"left_out": 100}


@pytest.fixture
def some_labels(folder):
    """Predictions of which only some have labels, and those alone; and labels in a file
    of their own.
    """
    for name in ("test", "val"):
        frame = pandas.read_csv(f"{name}.csv")
        frame[150:].to_csv(f"labelled-{name}.csv", index=False)
        frame.loc[:149, "target"] = None
        frame.to_csv(f"some-{name}.csv", index=False)
        frame.to_parquet(f"some-{name}.parquet")
        frame[["id", "target"]].to_csv(f"labels-{name}.csv", index=False)
        frame.drop(columns="target").to_csv(f"bare-{name}.csv", index=False)
    return folder


def test_decide_needs_no_labels(run, some_labels):
    expected = run("decide", "bare-test.csv", "-u", "U.csv", "--json")
    assert expected[0] == 0
    for file in ("some-test.csv", "some-test.parquet"):
        assert run("decide", file, "-u", "U.csv", "--json") == expected
    frame = pandas.read_csv("some-test.csv").assign(target="")
    frame.to_csv("none.csv", index=False)
    assert run("decide", "none.csv", "-u", "U.csv", "--json") == expected
    code, _, err = run("evaluate", "none.csv")
    assert (
        code,
        "none.csv: none of 400 samples has a label: expected its true class (or"
        " --labels" in err,
    ) == (2, True)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_samples_without_labels_are_left_out_if_asked(run, some_labels, ending):
    file, held = f"some-test.{ending}", f"some-val.{ending}"
    first = {"csv": "line 2", "parquet": "row 0 (counted from 0)"}[ending]
    options = ("-u", "U.csv", "--json")
    for words, wrong in (
        (("evaluate", file), file),
        (("compare", file, "labelled-test.csv"), file),
        (("report", file), file),
        (("mislabelled", file), file),
        (("evaluate", "labelled-test.csv", "--calibrate", held), held),
        (("decide", "test.csv", "--calibrate", held), held),
    ):
        code, out, err = run(*words, *options)
        assert (code, out) == (2, "")
        fix = "leave them out with skip_unknown=True (--skip-unknown), or fill them in"
        assert (
            f"{wrong}: 150 of 400 samples have no label, first in {first}; {fix}"
            in " ".join(err.split())
        )
    calibrated = ("--calibrate", held, "--skip-unknown", *options)
    code, out, err = run("evaluate", file, *calibrated)
    assert (
        code,
        f"{file}: 150 of 400 samples have no label; they are left out"
        in " ".join(err.split()),
    ) == (0, True)
    found = json.loads(out)
    expected = json.loads(
        run(
            "evaluate", "labelled-test.csv", "--calibrate", "labelled-val.csv", *options
        )[1]
    )
    assert found == expected | {"left_out": 150}
    assert json.loads(run("decide", file, *calibrated)[1])["samples"] == 400
    compared = json.loads(
        run("compare", file, "labelled-test.csv", "--skip-unknown", "--json")[1]
    )
    assert {row["difference"] for row in compared["differences"]} == {0}
    assert compared["left_out"] == {"some-test": 150, "labelled-test": 0}
    reported = json.loads(
        run("report", file, "--skip-unknown", "--json", "--bootstrap", 0)[1]
    )
    assert [(own["samples"], own["left_out"]) for own in reported["runs"].values()] == [
        (250, 150)
    ]


def test_labels_of_a_file_may_be_empty_if_asked(run, some_labels):
    words = ("evaluate", "bare-test.csv", "--labels", "labels-test.csv", "--json")
    code, _, err = run(*words)
    told = (
        "labels-test.csv: target: 150 of 400 samples have no label, first in the row of"
        " test-0; leave them out"
    )
    assert (code, told in " ".join(err.split())) == (2, True)
    found = json.loads(run(*words, "--skip-unknown")[1])
    assert found == json.loads(run("evaluate", "labelled-test.csv", "--json")[1]) | {
        "left_out": 150
    }
    full = json.loads(run("evaluate", "test.csv", "--json")[1])
    pandas.read_csv("test.csv")[["id", "target"]].to_csv("all.csv", index=False)
    assert (
        json.loads(run("evaluate", "some-test.csv", "--labels", "all.csv", "--json")[1])
        == full
    )


def test_unknown_classes_of_a_table_are_left_out_if_asked(run, folder):
    frame = pandas.read_csv("test.csv")
    frame.loc[[3, 50], "target"], frame.loc[[60], "target"] = "genet", None
    frame.to_csv("odd.csv", index=False)
    code, out, err = run("evaluate", "odd.csv", "--skip-unknown", "--json")
    assert (code, json.loads(out)["left_out"]) == (0, 3)
    assert "odd.csv: 1 of 400 samples have no label; they are left out" in " ".join(
        err.split()
    )
    assert (
        "odd.csv: 2 of 400 samples have a class that is not in the predictions:"
        " genet (2)" in " ".join(err.split())
    )


def test_repeated_ids_are_named(run, folder):
    frame = pandas.read_csv("test.csv")
    frame.loc[[7, 8], "id"] = ["test-5", "test-6"]
    frame.to_csv("twice.csv", index=False)
    for command in ("decide", "evaluate"):
        code, _, err = run(command, "twice.csv", "-u", "U.csv")
        told = (
            "twice.csv: 2 ids are in several rows (test-5, test-6), and each row"
            " counts: remove repeated rows"
        )
        assert (code, told in " ".join(err.split())) == (0, True)
    assert "several rows" not in run("decide", "test.csv", "-u", "U.csv")[2]


def test_the_column_of_labels_in_a_file_can_be_named(run, folder):
    frame = pandas.read_csv("test.csv")
    frame.drop(columns="target").to_csv("bare.csv", index=False)
    wrong = frame["target"].to_numpy()[::-1]
    labels = frame[["id"]].assign(
        label=wrong, Label=wrong, Diagnosis=frame["target"], age=40
    )
    labels.to_csv("labels.csv", index=False)
    expected, words = (
        run("evaluate", "test.csv", "--json")[1],
        ("--labels", "labels.csv"),
    )
    assert (
        run("evaluate", "bare.csv", *words, "--json")[1] != expected
    )  # by the column label
    assert (
        run("evaluate", "bare.csv", *words, "--target", "Diagnosis", "--json")[1]
        == expected
    )
    labels.assign(Label=frame["target"]).to_csv(
        "labels.csv", index=False
    )  # differs from label in case alone
    assert (
        run("evaluate", "bare.csv", *words, "--target", "Label", "--json")[1]
        == expected
    )
    compared = json.loads(
        run(
            "compare", "bare.csv", "test.csv", *words, "--target", "Diagnosis", "--json"
        )[1]
    )
    assert {row["difference"] for row in compared["differences"]} == {0}
    assert (
        run("report", "bare.csv", *words, "--target", "Diagnosis", "--bootstrap", 0)[0]
        == 0
    )
    frame.drop(columns="target").to_csv("lake.tsv", index=False, sep="\t")
    for given, message in (
        (
            ["bare.csv", *words, "--target", "diagnosis"],
            "labels.csv: column 'diagnosis' is unknown: expected one of id",
        ),
        (["bare.csv", *words, "--target", "diagnosis"], "did you mean 'Diagnosis'?"),
        (
            ["bare.csv", "--target", "Diagnosis"],
            "--target Diagnosis names a column of --labels FILE: give that, too",
        ),
        (
            ["*.tsv", "--target", "Diagnosis"],
            "--target Diagnosis names a column of --labels FILE: give that, too",
        ),
    ):
        code, out, err = run("evaluate", *given)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err


def test_priors_on_the_command_line(run, folder):
    base = (
        "decide",
        "test.csv",
        "-u",
        "U.csv",
        "-c",
        "counts.csv",
        "--json",
        "--train-prior",
    )
    base = (*base, "cat=0.7,dog=0.2,newt=0.1", "--target-prior")
    uniform = json.loads(run(*base, "uniform")[1])
    by_name = json.loads(run(*base, "cat=1,dog=1,newt=1")[1])
    (folder / "prior.csv").write_text("class,share\nnewt,0.333\ndog,0.333\ncat,0.333\n")
    by_file = json.loads(run(*base, "prior.csv")[1])
    assert uniform["target_prior"] == pytest.approx(
        dict.fromkeys(uniform["target_prior"], 1 / 3)
    )
    assert uniform["decisions"] == by_name["decisions"] == by_file["decisions"]
    estimated = json.loads(run(*base, "estimate", "--calibrate", "val.csv")[1])
    assert sum(estimated["target_prior"].values()) == pytest.approx(1)
    low, high = estimated["expected_utility_interval"]
    assert low <= estimated["mean_expected_utility"] <= high
    assert all(low < high for low, high in estimated["target_prior_interval"].values())
    for command in ("decide", "evaluate"):
        told = run(command, *base[1:6], *base[7:], "cat=1,dog=6,newt=1")[1]
        assert "class prior dog 75.0%, " in told
    code, _, told = run(*base, "cat=0.2,dog=0.2,newt=0.2")
    assert code
    assert "target_prior sums to 0.6: expected shares that sum to 1" in told


def test_a_saved_decider_decides_alike(run, folder):
    options = (
        "--calibrate",
        "val.csv",
        "--train-prior",
        "train",
        "--target-prior",
        "uniform",
        "-c",
        "counts.csv",
    )
    run("decide", "test.csv", "-u", "U.csv", *options, "-o", "a.csv")
    options = [word for word in options if word not in ("--calibrate", "val.csv")]
    run("fit", "val.csv", "-u", "U.csv", *options, "-o", "d.json")
    code, _, _ = run("decide", "test.csv", "--decider", "d.json", "-o", "b.csv")
    assert code == 0
    assert (folder / "a.csv").read_text() == (folder / "b.csv").read_text()


def test_a_saved_calibration_is_not_replaced(run, folder):
    run("fit", "val.csv", "-u", "U.csv", "-o", "d.json")
    run("decide", "test.csv", "--decider", "d.json", "-o", "a.csv")
    for command in ("decide", "evaluate"):
        code, out, err = run(
            command, "test.csv", "--decider", "d.json", "--calibrate", "val.csv"
        )
        assert (code, out) == (2, "")
        told = (
            "--decider d.json is calibrated, and --calibrate val.csv would replace"
            " that: give one of the two"
        )
        assert told in " ".join(err.split())
    Decider(Utility.read_csv("U.csv")).save("plain.json")  # nothing is lost
    run(
        "decide",
        "test.csv",
        "--decider",
        "plain.json",
        "--calibrate",
        "val.csv",
        "-o",
        "b.csv",
    )
    assert (folder / "a.csv").read_text() == (folder / "b.csv").read_text()


def test_files_that_are_not_deciders_are_told(run, folder):
    err = " ".join(run("decide", "test.csv", "--decider", "U.csv")[2].split())
    assert err.startswith("rfdlc: U.csv: cannot be read as a decider")
    assert "expected a JSON file of `rfdlc fit`" in err
    assert (
        "rfdlc: none.json: no such file: expected a JSON"
        in run("decide", "test.csv", "--decider", "none.json")[2]
    )


def test_a_saved_decider_knows_its_columns(run, folder):
    run("fit", "val.csv", "-u", "U.csv", "-o", "d.json")
    run("decide", "test.csv", "--decider", "d.json", "-o", "a.csv")
    lines = (folder / "test.csv").read_text().splitlines()
    (folder / "more.csv").write_text(
        "\n".join(
            f"{line},{'score' if i == 0 else 0.5}" for i, line in enumerate(lines)
        )
    )
    code, _, err = run("decide", "more.csv", "--decider", "d.json", "-o", "b.csv")
    assert code == 0, err
    assert (folder / "a.csv").read_text() == (folder / "b.csv").read_text()
    (folder / "less.csv").write_text(
        (folder / "more.csv").read_text().replace("newt,", "nwet,", 1)
    )
    code, _, err = run("decide", "less.csv", "--decider", "d.json")
    assert code == 2
    assert "less.csv: no column for class 'newt'" in err
    assert "did you mean 'nwet'?" in err


@pytest.mark.parametrize("option", ["--costs", "--utility"])
def test_a_table_of_utilities_knows_its_columns(run, folder, option):
    """Other columns, of text or numbers, are ignored in both tables, as they are with a
    saved decider.
    """
    for name in ("test", "val"):
        frame = pandas.read_csv(f"{name}.csv")
        frame.insert(1, "customer", [f"c{i}" for i in range(len(frame))])
        frame.assign(price=7.5).to_parquet(f"more-{name}.parquet")
    found = []
    for prefix, kind in (("", "csv"), ("more-", "parquet")):
        words = "--calibrate", f"{prefix}val.{kind}", option, "U.csv", "--json"
        found.append(
            [
                run(command, f"{prefix}test.{kind}", *words)
                for command in ("evaluate", "decide")
            ]
        )
        assert [code for code, _, _ in found[-1]] == [0, 0], found[-1]
    plain, more = ([json.loads(out) for _, out, _ in each] for each in found)
    assert more[0]["mean_utility"] == pytest.approx(plain[0]["mean_utility"])
    assert more[1]["actions"] == plain[1]["actions"]
    code, _, err = run(
        "evaluate", "more-test.parquet"
    )  # every column is a class where nothing names them
    assert code == 2
    assert "column 'customer' holds" in err


@pytest.mark.parametrize("option", ["--costs", "--utility"])
@pytest.mark.parametrize(
    ("cell", "by", "message"),
    [
        ("", "", "no such file"),
        ("dog,2,0", "dog,,0", "table.csv line 3, column 'cat': '' is not a number"),
        (
            "dog,2,0",
            "dog,60 EUR,0",
            "table.csv line 3, column 'cat': '60 EUR' is not a number",
        ),
        (
            "dog,2,0",
            "dgo,2,0",
            (
                "no column for the class 'dgo'; it has .* line begins with its true .*"
                " mean 'dog'"
            ),
        ),
        (
            "newt,9,3,0",
            "newt,9,3,0\nask,1,1,1",
            "table.csv: more.* has no column for the class 'ask'",
        ),  # transposed
    ],
)
def test_a_wrong_table_of_utilities_is_named_beside_other_columns(
    run, folder, option, cell, by, message
):
    frame = pandas.read_csv("test.csv").assign(patient=[f"h{i}" for i in range(400)])
    frame.to_csv("more.csv", index=False)
    frame.to_parquet("more.parquet")
    if cell:
        (folder / "table.csv").write_text(
            "true,cat,dog,newt\ncat,0,1,1\ndog,2,0,1\nnewt,9,3,0\n".replace(cell, by)
        )
    for command, file in (("decide", "more.csv"), ("evaluate", "more.parquet")):
        code, _, err = run(command, file, option, "table.csv")
        assert code == 2
        assert re.search(
            f"^rfdlc: .*table.csv.*{message.removeprefix('table.csv')}",
            " ".join(err.split()),
        ), err


def test_other_columns_are_ignored_wherever_classes_are_known(run, folder):
    for name in ("test", "val"):
        frame = pandas.read_csv(f"{name}.csv").assign(patient="h1", visit_day=3)
        frame.to_csv(f"more-{name}.csv", index=False)
    words = (
        "--classes",
        "counts.csv",
        "--train-prior",
        "train",
        "--costs",
        "U.csv",
        "--json",
    )
    found = [
        json.loads(run("decide", f"{more}test.csv", *words)[1])
        for more in ("", "more-")
    ]
    assert found[0] == found[1]
    (folder / "run").mkdir()
    Classes(NAMES).to_json("run/classes.json")
    Predictions.load("test.csv", Classes(NAMES)).save("run/predictions.npz")
    code, out, err = run(
        "compare", "more-test.csv", "run", "--costs", "U.csv", "--json"
    )
    assert code == 0, err
    assert {row["difference"] for row in json.loads(out)["differences"]} == {0}
    frame = pandas.read_csv("more-test.csv")
    decider, plain = Decider(Utility.read_csv("U.csv")), pandas.read_csv("test.csv")
    assert (decider.decide(frame) == decider.decide(plain)).all()
    loaded = Predictions.load("more-test.csv", classes=NAMES)
    assert (decider.probabilities(loaded) == decider.probabilities(frame)).all()
    frame.rename(columns={"newt": "Newt"}).to_csv("case.csv", index=False)
    code, _, err = run("decide", "case.csv", "--classes", "counts.csv")
    assert code == 2
    assert "no column for class 'newt'; there are " in err
    assert "or take the class out of --classes counts.csv; did you mean 'Newt'?" in err


def test_a_class_that_a_decider_lacks_does_not_vanish_from_a_data_frame(
    folder, lacking
):
    decider = Decider(Utility.read_csv("lacking.csv"))
    with pytest.raises(
        InputError,
        match=(
            r"no class 'newt', but there is such a column, and rows sum to 1 only with"
        ),
    ):
        decider.decide(lacking)
    lacking.loc[lacking.index[:3], "target"] = "newt"
    with pytest.raises(
        InputError, match=r"no class 'newt', .* and true classes are called so"
    ):
        decider.decide(lacking)


@pytest.mark.parametrize(("short", "written"), [("a", "A"), ("b", " b ")])
def test_a_short_name_in_another_case_is_suggested(short, written):
    frame = pandas.DataFrame([[0.5, 0.5, 1]], columns=[written, "other", "age"])
    with pytest.raises(
        InputError, match=f"no column for class '{short}'; .* did you mean '{written}'"
    ):
        Decider(Utility([[1, 0], [0, 1]], [short, "other"])).decide(frame)


@pytest.fixture
def lacking(folder):
    """The table of utilities without the row of newt, which is rare: no probability of
    it is above 1%.
    """
    (folder / "lacking.csv").write_text(
        "true,cat,dog,newt,ask\ncat,1,0,0,0.3\ndog,-1,1,0,0.3\n"
    )
    frame = pandas.read_csv("test.csv")
    frame["newt"] *= 0.009
    for name in ("cat", "dog"):
        frame[name] /= (frame["cat"] + frame["dog"]) / (1 - frame["newt"])
    frame["cat"] = 1 - frame["dog"] - frame["newt"]
    frame = frame.assign(
        customer=[f"c{i}" for i in range(len(frame))], price=7.5, score=0.001, flag=1
    )
    return frame[frame["target"] != "newt"]


@pytest.mark.parametrize("kind", ["csv", "parquet", "rounded", "logits"])
@pytest.mark.parametrize(
    "command",
    [("decide",), ("evaluate",), ("report",), ("compare", "test.csv"), ("decider",)],
)
def test_a_class_without_a_row_does_not_vanish(run, folder, lacking, command, kind):
    name, words = (
        f"rare.{'parquet' if kind == 'parquet' else 'csv'}",
        ["--costs", "lacking.csv"],
    )
    if kind == "logits":  # these sum to anything: the true classes tell
        lacking[[*NAMES]] = np.log(lacking[[*NAMES]])
        lacking.loc[lacking.index[:3], "target"] = "newt"
        words.append("--logits")
    lacking = lacking.round(3) if kind == "rounded" else lacking
    lacking.to_parquet(name) if kind == "parquet" else lacking.to_csv(name, index=False)
    if command == ("decider",):
        Decider(Utility.read_csv("lacking.csv")).save("d.json")
        command, words = ("decide",), ["--decider", "d.json", *words[2:]]
    code, out, err = run(command[0], name, *command[1:], *words)
    assert code == 2, out
    by = "utility of d.json" if "d.json" in words else "lacking.csv"
    assert err.startswith(f"rfdlc: {name}: ")
    assert f"{by}: no class 'newt', but there is such a column" in err


def test_a_class_without_a_row_in_folders_of_tables(run, folder, lacking):
    (folder / "lake").mkdir()
    for part in range(2):
        lacking[part::2].to_parquet(f"lake/{part}.parquet")
    for words in (["decide", "lake", "-o", "out/"], ["evaluate", "lake/*.parquet"]):
        code, _, err = run(*words, "--costs", "lacking.csv")
        assert code == 2
        assert (
            "0.parquet: lacking.csv: no class 'newt', but there is such a column" in err
        )


def test_numbers_that_do_not_complete_probabilities_are_no_classes(
    run, folder, lacking
):
    """Rounded rows do not sum to 1 exactly, and columns of small numbers are there."""
    rng = np.random.default_rng(0)
    lacking[["cat", "dog"]] = (
        lacking[["cat", "dog"]].div(lacking["cat"] + lacking["dog"], axis=0).round(2)
    )
    lacking.assign(
        newt=rng.random(len(lacking)), rate=0.002 * rng.random(len(lacking))
    ).to_csv("two.csv", index=False)
    code, _, err = run("decide", "two.csv", "--costs", "lacking.csv")
    assert code == 0, err


def test_a_table_of_utilities_lacks_a_class_of_the_predictions(run, folder, lacking):
    Predictions.load("test.csv").save("test.npz")
    code, _, err = run("decide", "test.npz", "--costs", "lacking.csv")
    assert (code, err) == (
        2,
        "rfdlc: lacking.csv: has no row for 'newt': expected one per class\n",
    )


def test_wrong_targets_and_cells_are_named_by_their_line(run, folder):
    lines = (folder / "test.csv").read_text().splitlines()
    for name, cell, told in (
        (
            "empty",
            "",
            (
                ": 1 of 400 samples have no label, first in line 6; leave them out with"
                " skip_"
            ),
        ),
        (
            "unknown",
            "goshawk",
            (
                ": 1 of 400 samples have a class that is not in the predictions:"
                " goshawk (1), first in line 6; "
            ),
        ),
    ):
        cells = lines[5].split(",")
        text = "\n".join(
            [
                *lines[:2],
                *lines[2:5],
                ",".join([*cells[:3], cell, cells[4]]),
                *lines[6:],
            ]
        )
        (folder / f"{name}.csv").write_text(text)
        code, _, err = run("evaluate", f"{name}.csv")
        assert code == 2
        assert err.startswith(f"rfdlc: {name}.csv{told}")
        assert (run("decide", f"{name}.csv")[0], name) in ((0, "empty"), (2, "unknown"))
    frame = pandas.read_csv("test.csv")
    frame.loc[7, "target"] = "goshawk"
    frame.to_parquet("unknown.parquet")
    assert (
        "unknown.parquet row 7 (counted from 0): target 'goshawk'"
        in run("decide", "unknown.parquet")[2]
    )
    (folder / "cell.csv").write_text(
        "\n".join([*lines[:3], f",{lines[3].split(',', 1)[1]}", *lines[4:]])
    )
    err = run("decide", "cell.csv")[2]
    assert err.startswith("rfdlc: cell.csv line 4, column 'dog': '' is not a number")


def test_ids_that_repeat_are_named(run, folder):
    frame = pandas.read_csv("test.csv")
    pandas.concat([frame, frame[3:5]]).to_csv("twice.csv", index=False)
    code, _, err = run("evaluate", "twice.csv")
    assert code == 0
    assert (
        "twice.csv: 2 ids are in several rows (test-3, test-4), and each row counts"
        in err
    )
    assert "in several rows" not in run("evaluate", "test.csv")[2]


def test_abstaining_is_one_more_action_of_a_saved_decider(run, folder):
    run("fit", "val.csv", "-u", "U.csv", "-o", "d.json")
    run("fit", "val.csv", "--decider", "d.json", "--abstain", "0.4", "-o", "a.json")
    run("fit", "val.csv", "-u", "U.csv", "--abstain", "0.4", "-o", "b.json")
    assert (folder / "a.json").read_text() == (folder / "b.json").read_text()
    actions = Decider.load("a.json").utility.actions
    assert set(actions) == {*NAMES, "ask", "abstain"}


def test_a_folder_with_predictions_and_a_decider(run, folder):
    (folder / "run").mkdir()
    Predictions.load("test.csv").save("run/predictions.npz")
    decider = Decider(Utility.one_hot(["dog", "newt", "cat"])).fit(
        Predictions.load("val.csv")
    )
    decider.save("run/decider.json")
    plain = json.loads(run("evaluate", "run", "--json")[1])
    assert plain["decider"]["calibration"] == str(decider.model.calibrator)
    changed = json.loads(run("evaluate", "run", "-u", "U.csv", "--json")[1])
    assert changed["decider"]["calibration"] == str(decider.model.calibrator)
    assert changed["abstention_rate"] > 0 == plain["abstention_rate"]


def test_costs_and_abstain(run, folder):
    (folder / "costs.csv").write_text(
        "true,cat,dog,newt\ncat,0,1,1\ndog,2,0,1\nnewt,9,2,0\n"
    )
    table = json.loads(
        run(
            "decide", "test.csv", "--costs", "costs.csv", "--abstain", "-0.5", "--json"
        )[1]
    )
    assert table["actions"]["abstain"] > 0
    assert table["mean_expected_utility"] < 0


def test_costs_are_shown_as_costs(run, folder):
    (folder / "costs.csv").write_text(
        "true,cat,dog,newt\ncat,0,1,1\ndog,2,0,1\nnewt,9,2,0\n"
    )
    given, other = ("test.csv", "--costs", "costs.csv"), ("test.csv", "-u", "U.csv")
    decided = json.loads(run("decide", *given, "--json")[1])
    assert decided["mean_expected_cost"] == -decided["mean_expected_utility"] > 0
    assert (
        f"Mean expected cost {decided['mean_expected_cost']:.3g}"[:21]
        in run("decide", *given)[1]
    )
    many = json.loads(
        run("decide", *given, "--out", "many/", "--json")[1]
    )  # file by file
    assert many["mean_expected_cost"] == pytest.approx(
        decided["mean_expected_cost"], rel=1e-5
    )
    found = json.loads(run("evaluate", *given, "--json")[1])
    assert found["mean_cost"] == -found["mean_utility"] > 0
    assert found["intervals"]["mean_cost"] == [
        -end for end in found["intervals"]["mean_utility"][::-1]
    ]
    shown = run("evaluate", *given)[1]
    low, high = found["intervals"]["mean_cost"]
    row = next(line for line in shown.splitlines() if "mean cost" in line)
    assert re.findall(r"-?\d[\d.]*", row) == [
        f"{each:.4f}" for each in (found["mean_cost"], low, high)
    ]
    assert "mean utility" not in shown
    pair = json.loads(run("compare", "test.csv", *given, "--json")[1])
    assert pair["mean_cost"]["a"] == found["mean_cost"]
    both = run("compare", "test.csv", *given)[1]
    assert "mean cost" in both
    assert "mean utility" not in both
    assert "Mean cost: no difference can be told" in both
    plain = [
        json.loads(run(*words, "--json")[1])
        for words in (("evaluate", *other), ("compare", "test.csv", *other))
    ]
    assert not any("mean_cost" in each for each in plain)
    assert "mean utility" in run("evaluate", *other)[1]
    (folder / "typo.csv").write_text(
        "true,cat,dog,newtt\ncat,0,1,1\ndog,2,0,1\nnewt,9,2,0\n"
    )
    code, out, err = run("decide", "test.csv", "--costs", "typo.csv")
    assert (code, "did you mean 'newt'?" in " ".join(err.split())) == (0, True)
    assert "Mean expected cost " in out


def test_the_interval_of_an_estimated_prior_is_of_costs_too(run, folder):
    (folder / "costs.csv").write_text(
        "true,cat,dog,newt\ncat,0,1,1\ndog,2,0,1\nnewt,9,2,0\n"
    )
    words = ["-c", "counts.csv", "--train-prior", "train", "--target-prior", "estimate"]
    low, high = json.loads(
        run("decide", "test.csv", "--costs", "costs.csv", *words, "--json")[1]
    )["expected_utility_interval"]
    assert low < high < 0
    for command in ("decide", "evaluate"):
        out = " ".join(
            run(command, "test.csv", "--costs", "costs.csv", *words)[1].split()
        )
        assert (
            f": a mean expected cost from {-high:.3g} to {-low:.3g} (95% interval)"
            in out
        )
        out = " ".join(run(command, "test.csv", "-u", "U.csv", *words)[1].split())
        assert ": a mean expected utility from " in out


def test_decisions_and_costs_without_class_names_are_no_input(run, folder):
    run("decide", "test.csv", "-u", "U.csv", "-o", "decided.csv")
    assert (
        "these are decisions: give the file of probabilities"
        in run("evaluate", "decided.csv")[2]
    )
    (folder / "bare.csv").write_text("cat,dog,newt\n0,1,1\n2,0,1\n9,2,0\n")
    err = run("decide", "test.csv", "--costs", "bare.csv")[2]
    assert "bare.csv: the corner cell 'cat' does not say what lines and columns" in err
    assert "each line begins with its true class" in err


def test_a_table_with_the_wrong_sign_is_told(run, folder):
    (folder / "costs.csv").write_text(
        "true,cat,dog,newt,ask\ncat,0,1,1,0.5\ndog,2,0,1,0.5\nnewt,0,0,0,0.5\n"
    )
    assert (
        "costs.csv: every right decision is worth the least"
        in run("decide", "test.csv", "-u", "costs.csv")[2]
    )
    assert (
        "U.csv: every right decision costs the most"
        in run("decide", "test.csv", "--costs", "U.csv")[2]
    )
    assert (
        run("decide", "test.csv", "-u", "costs.csv")[2].count("every right decision")
        == 1
    )
    (folder / "odd.csv").write_text(
        "true,cat,dog,newt\ncat,0,1,1\ndog,2,0,1\nnewt,0,0,1\n"
    )  # right for one of them
    assert (
        "odd.csv: taking 'dog' for 'newt' is worth more than being right"
        in run("decide", "test.csv", "-u", "odd.csv")[2]
    )
    (folder / "flat.csv").write_text(
        "true,cat,dog,newt\ncat,1,1,1\ndog,0,0,0\nnewt,2,2,2\n"
    )
    for words in (("-u", "U.csv"), ("--costs", "costs.csv"), ("-u", "flat.csv")):
        assert run("decide", "test.csv", *words)[2] == ""


def test_utility_new_and_show(run, folder):
    code, out, _ = run(
        "utility",
        "new",
        "new.csv",
        "-c",
        "counts.csv",
        "-k",
        "tail-sensitive",
        "--penalty",
        -2,
    )
    assert code == 0
    assert "rfdlc decide FILE --utility new.csv" in out
    assert Utility.read_csv("new.csv").matrix.tolist() == [
        [1, 0, 0],
        [-2, 1, 0],
        [-2, -2, 1],
    ]
    assert (
        run("utility", "new", "new.csv", "-c", "a,b")[0] == 2
    )  # never over a file that may hold edits
    assert (
        run("utility", "new", "new.csv", "-c", "test.csv", "--force", "--abstain", 0.1)[
            0
        ]
        == 0
    )
    assert Utility.read_csv("new.csv").actions == ("dog", "newt", "cat", "abstain")
    assert (
        run("utility", "new", "new.csv", "-c", 'St. John, "a, b",v1.5', "--force")[0]
        == 0
    )
    assert Utility.read_csv("new.csv").classes.names == ("St. John", "a, b", "v1.5")
    assert json.loads(run("utility", "show", "U.csv", "--json")[1])["actions"] == [
        "cat",
        "dog",
        "newt",
        "ask",
    ]
    assert "newt" in run("utility", "show", "U.csv")[1]


def test_counts_and_priors_as_a_spreadsheet_writes_them(run, folder):
    options = [
        "decide",
        "test.csv",
        "-u",
        "tail-sensitive",
        "--train-prior",
        "train",
        "--json",
        "--target-prior",
    ]
    (folder / "prior.csv").write_text("class,share\ncat,0.25\ndog,0.5\nnewt,0.25\n")
    expected = run(*options, "prior.csv", "-c", "counts.csv")
    (folder / "semicolons.csv").write_text(
        "\ufeffclass ; count\r\ncat ; 500\r\n\r\ndog ; 60\r\nnewt ; 8\r\n"
    )
    (folder / "commas.csv").write_text("class;share\ncat;0,25\ndog;0,5\nnewt;0,25\n")
    (folder / "counted.csv").write_text("class,count\ndog,40\ncat,20\nnewt,20\n")
    for prior in ("commas.csv", "counted.csv"):
        code, out, _ = run(*options, prior, "-c", "semicolons.csv")
        assert (code, out) == (0, expected[1])
    (folder / "weights.csv").write_text("class,weight\ncat,1\ndog,1\nnewt,1\n")
    assert (
        "expected columns class,share or class,count"
        in run(*options, "weights.csv", "-c", "counts.csv")[2]
    )


def test_names_are_printed_as_they_are(run, folder):
    (folder / "odd.csv").write_text("[red]x[/red],[b]\n0.9,0.1\n")
    code, out, _ = run("decide", "odd.csv", "-o", "[b]decided.csv")
    assert code == 0
    assert "[red]x[/red]" in out
    assert "Written to [b]decided.csv" in out
    assert (
        "Written to [b]new.csv"
        in run("utility", "new", "[b]new.csv", "-c", "odd.csv")[1]
    )


def test_a_file_in_a_folder_that_is_closed_fails_before_any_work(folder, monkeypatch):
    (folder / "old.csv").write_text("")
    monkeypatch.setattr("os.access", lambda path, mode: path != folder)
    with pytest.raises(InputError, match="cannot be written; choose another file"):
        check_writable(folder / "old.csv")


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "test.csv", "--bootstrap", 9],
        ["report", "test.csv"],
        ["inspect", "x"],
    ],
)
def test_a_seed_below_0_is_refused(run, folder, words):
    code, out, err = run(*words, "--seed", -1)
    assert (code, out) == (2, "")
    assert "--seed" in err
    assert "equal to 0" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["decide", "none.csv"], "none.csv: no such file"),
        (["evaluate", "runs/none"], "runs/none: no such file or run folder"),
        (
            ["decide", "test.csv", "-u", "none.csv"],
            "no such file; expected a CSV file or one of one-hot",
        ),
        (
            ["decide", "test.csv", "-u", "test.parquet"],
            "expected a CSV file, as `rfdlc utility new` writes one",
        ),
        (
            ["decide", "test.csv", "-u", "U.csv", "--penalty", "-3"],
            "penalty -3.0 is for the utility tail-sensitive",
        ),
        (
            ["evaluate", "test.csv", "--penalty", "-3"],
            "penalty -3.0 is for the utility tail-sensitive, not",
        ),
        (["decide", "test.csv", "-u", "tail-sensitive"], "needs training counts"),
        (["decide", "test.csv", "-u", "counts.csv"], "is not a number"),
        (["decide", "test.csv", "--rule", "best"], "rule 'best' is unknown"),
        (["decide", "test.csv", "--target-prior", "uniform"], "--train-prior"),
        (
            [
                "decide",
                "test.csv",
                "--train-prior",
                "cat=x,dog=1,newt=1",
                "--target-prior",
                "uniform",
            ],
            "'x' is not a number",
        ),
        (
            ["decide", "test.csv", "-u", "U.csv", "--costs", "U.csv"],
            "exclude each other",
        ),
        (
            ["decide", "test.csv", "--costs", "costs.csv", "--abstain", "9"],
            "write --abstain -9 for a cost of 9",
        ),
        (
            ["decide", "test.csv", "-o", "no/such/folder/a.csv"],
            "does not exist; create it first",
        ),
        (["decide", "test.csv", "-o", "."], "holds other files"),
        (
            ["decide", "test.csv", "--calibrate", "none.csv"],
            "none.csv: no such file",
        ),
        (
            ["decide", "test.csv", "--logits"],
            "test.csv: these are probabilities, not logits",
        ),
        (
            ["decide", "test.csv", "--classes", "a,b"],
            (
                "no column for class 'a', 'b'; there are dog, newt, cat, target, id:"
                " rename or add the column, or take the class out of --classes a,b"
            ),
        ),
        (
            ["decide", "test.csv", "--classes", "latin.csv"],
            "save it as UTF-8 (in Excel: CSV UTF-8)",
        ),
        (
            ["decide", "test.csv", "--classes", "endless.csv"],
            "endless.csv: training count inf of class 'cat'",
        ),
        (
            ["decide", "test.csv", "--classes", "thousands.csv"],
            "count of 'cat': '12.000' could be read in two ways",
        ),
        (
            ["decide", "test.csv", "--classes", "untold.csv"],
            "training counts are read from a CSV with columns class",
        ),
        (
            ["decide", "test.csv", "--train-prior", "none"],
            "'none' is unknown: expected uniform, train, estimate",
        ),
        (
            ["decide", "test.csv", "--train-prior", "cat=1,cat=2,dog=1"],
            "training prior of 'cat' is given twice",
        ),
        (["decide", "test.csv", "--calibration", "temperature"], "--calibrate FILE"),
        (
            ["evaluate", "bare.csv", "--calibrate", "half.csv"],
            "half.csv: line 2 of the probabilities sums to 0.5",
        ),
        (
            ["decide", "test.csv", "-o", "a.xlsx"],
            "a.xlsx: cannot be written, expected .csv",
        ),
        (["decide", "test.csv", "-o", "./test.csv"], "holds the predictions"),
        (
            ["report", "test.csv", "-o", "a.pdf"],
            "a.pdf: cannot be written, expected .html",
        ),
        (["evaluate", "bare.csv"], "no targets"),
        (
            ["decide", "test.csv", "--calibrate", "bare.csv"],
            "--calibrate bare.csv: has no true classes",
        ),
        (
            ["decide", "test.csv", "--costs", "none.csv"],
            "costs 'none.csv': no such file; expected a CSV file",
        ),
        (["evaluate", "test.csv", "--rate", "cat"], "expected TRUE:DECIDED"),
        (["evaluate", "half.csv"], "line 2 of the probabilities sums to 0.5"),
        (["utility", "new", "x.csv", "-c", "nothing.json"], "no such file"),
        (["utility", "new", "x.csv", "-c", "a,nothing.csv"], "no such file"),
        (
            ["utility", "new", "x.csv", "-c", "a,b", "-k", "magic"],
            "kind 'magic' is unknown",
        ),
        (["utility", "show", "none.csv"], "no such file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, folder, words, message):
    (folder / "bare.csv").write_text("a,b\n0.5,0.5\n")
    (folder / "half.csv").write_text("a,b,target\n0.25,0.25,a\n")
    (folder / "costs.csv").write_text(
        "class,cat,dog,newt\ncat,0,1,1\ndog,1,0,1\nnewt,1,1,0\n"
    )
    (folder / "latin.csv").write_bytes("class,count\nré,1\n".encode("latin-1"))
    (folder / "endless.csv").write_text("class,count\ncat,inf\ndog,1\nnewt,1\n")
    (folder / "thousands.csv").write_text("class;count\ncat;12.000\ndog;500\nnewt;8\n")
    (folder / "untold.csv").write_text("Class,n\ncat,12\ndog,5\nnewt,8\n")
    before = sorted(path.name for path in folder.iterdir())
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err.startswith("rfdlc: ")
    assert err.count("\n") == 1
    assert message in err
    assert (
        sorted(path.name for path in folder.iterdir()) == before
    )  # nothing half-written


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["decide", "--help"],
        ["evaluate", "--help"],
        ["utility", "new", "--help"],
    ],
)
def test_help_has_examples(run, words):
    code, out, _ = run(*words)
    assert code == 0
    assert "rfdlc" in out
    assert words == ["--help"] or "Examples" in out


def test_python_dash_m(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "rfdlc", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("rfdlc 0.")


def test_columns_and_intervals_are_made_once_and_only_where_they_are_written(
    run, folder, monkeypatch
):
    from rfdlc.cli import decisions
    from rfdlc.decisions import decider as decider_module

    made = []
    noted = {
        "decision_columns": decisions.decision_columns,
        "utility_interval": decider_module.utility_interval,
    }
    for place, name in (
        (decisions, "decision_columns"),
        (decider_module, "utility_interval"),
    ):
        monkeypatch.setattr(
            place,
            name,
            lambda *given, name=name: (made.append(name), noted[name](*given))[1],
        )
    words = [
        "decide",
        "test.csv",
        "--classes",
        "counts.csv",
        "--train-prior",
        "train",
        "--target-prior",
        "estimate",
    ]
    for more, expected in (
        ([], ["utility_interval"]),
        (["--json"], ["decision_columns", "utility_interval"]),
        (["--out", "a.csv"], ["decision_columns", "utility_interval"]),
    ):
        made.clear()
        assert run(*words, *more)[0] == 0
        assert made == expected


@pytest.mark.parametrize("kind", ["marginal", "class", "macro", "u65"])
def test_sets_are_those_of_the_library(run, folder, kind):
    coverage = [] if kind == "u65" else ["--coverage", "80%"]
    words = (
        "test.csv",
        "-u",
        "U.csv",
        "--calibrate",
        "val.csv",
        "--sets",
        kind,
        *coverage,
    )
    code, out, err = run("decide", *words, "-o", "sets.csv")
    assert (code, err) == (0, "")
    words = (
        "with the highest expected utility"
        if kind == "u65"
        else f"Prediction sets ({kind}) contain the true class"
    )
    assert words in out
    held, test = Predictions.load("val.csv"), Predictions.load("test.csv")
    decider = Decider(Utility.read_csv("U.csv")).fit(held)
    decider = (
        decider.replace(sets="u65")
        if kind == "u65"
        else decider.fit_sets(held, kind=kind, coverage=0.8)
    )
    members = decider.decide_sets(test)
    with open("sets.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    expected = [
        set(decider.utility.classes.select(np.flatnonzero(each))) for each in members
    ]
    assert [set(json.loads(row["set"])) for row in rows] == expected
    assert [int(row["set_size"]) for row in rows] == members.sum(axis=1).tolist()
    # A saved decider has the sets.
    run("fit", "val.csv", "-u", "U.csv", "--sets", kind, *coverage, "-o", "d.json")
    code, again, _ = run("decide", "test.csv", "--decider", "d.json", "--json")
    table = json.loads(again)
    assert [json.loads(row["set"]) for row in table["decisions"]] == [
        json.loads(row["set"]) for row in rows
    ]
    assert table["sets"]["mean_size"] == members.sum(axis=1).mean()
    if kind == "class":
        assert [row["promised_for"] for row in table["sets"]["promises"]] == [
            ["dog"],
            ["newt"],
            ["cat"],
        ]


@pytest.mark.parametrize("kind", ["macro", "u65"])
def test_the_largest_size_of_sets(run, folder, kind):
    words = ("test.csv", "-u", "U.csv", "--calibrate", "val.csv", "--sets", kind)
    sizes = [
        row["set_size"]
        for row in json.loads(run("decide", *words, "--json")[1])["decisions"]
    ]
    assert max(sizes) > 1
    code, out, err = run("decide", *words, "--set-size", 1, "--json")
    found = json.loads(out)
    assert max(row["set_size"] for row in found["decisions"]) == 1
    if kind == "u65":
        assert err == ""
    else:
        assert "of at most 1 classes contain the true class for" in err
        assert "is not promised" in err
        assert found["sets"]["max_size"] == 1
        said = run("decide", *words, "--set-size", 1)[1]
        assert (
            f"for {found['sets']['held_out_coverage']:.1%} of held-out samples"
            in " ".join(said.split())
        )
        assert "not promised: any coverage" in " ".join(said.split())
    code, _, err = run("decide", "test.csv", "--set-size", 3)
    assert (code, "--set-size 3 is for sets: give --sets" in err) == (2, True)


def test_evaluate_reports_what_sets_by_utility_are_worth(run, folder):
    words = (
        "test.csv",
        "-u",
        "U.csv",
        "-c",
        "counts.csv",
        "--abstain",
        "0.4",
        "--calibrate",
        "val.csv",
    )
    table = json.loads(run("evaluate", *words, "--sets", "u80", "--json")[1])
    test = Predictions.load("test.csv", Classes.from_counts([500, 60, 8], NAMES))
    utility = Utility.read_csv("U.csv").with_abstain(0.4)
    utility = utility.with_classes(test.classes.in_order(utility.classes.names))
    decider = (
        Decider(utility)
        .fit(Predictions.load("val.csv", test.classes))
        .replace(sets="u80")
    )
    sets, actions, values = decider.decide_sets(test), decider.decide(test), []
    own = [utility.actions.index(name) for name in utility.classes.names]
    targets = [utility.classes.names.index(test.classes.names[y]) for y in test.targets]
    for members, action, y in zip(sets, actions, targets, strict=True):
        least = min(utility.matrix[y, own[c]] for c in range(3) if c != y)
        k, right = members.sum(), utility.matrix[y, own[y]]
        several = (
            least + (2.2 / k - 1.2 / k**2) * (right - least) * members[y]
            if k > 1
            else None
        )
        values.append(utility.matrix[y, action] if several is None else several)
    assert {0, 1, 2} <= set(sets.sum(axis=1).tolist())
    assert table["set_utility"]["all"] == pytest.approx(np.mean(values))
    tail = [
        value
        for value, y in zip(values, test.targets, strict=True)
        if test.classes.names[y] == NAMES[2]
    ]
    assert table["set_utility"]["tail"] == pytest.approx(np.mean(tail))
    assert (
        table["set_utility"]["all"] >= table["mean_utility"] - 0.05
    )  # a set is chosen where it is worth more
    low, high = table["intervals"]["set_utility.all"]
    assert low < table["set_utility"]["all"] < high
    assert (
        json.loads(run("evaluate", *words, "--sets", "macro", "--json")[1])[
            "set_utility"
        ]
        == {}
    )


def test_evaluate_reports_coverage_and_size(run, folder):
    words = (
        "test.csv",
        "-c",
        "counts.csv",
        "--calibrate",
        "val.csv",
        "--sets",
        "macro",
    )
    code, out, _ = run("evaluate", *words, "--json")
    table, test = (
        json.loads(out),
        Predictions.load("test.csv", Classes.from_counts([500, 60, 8], NAMES)),
    )
    held = Predictions.load("val.csv", test.classes)
    members = (
        Decider(Utility.one_hot(test.classes))
        .fit(held)
        .fit_sets(held)
        .decide_sets(test)
    )
    covered, y = members[np.arange(400), test.targets], test.targets
    shares = [covered[y == c].mean() for c in range(3)]
    assert code == 0
    assert table["set_coverage"] == pytest.approx(
        {"marginal": covered.mean(), "macro": np.mean(shares), "worst": min(shares)}
    )
    assert table["set_size"] == pytest.approx(
        {"all": members.sum() / 400}
        | {
            name: members[y == c].sum(axis=1).mean()
            for c, name in enumerate(("head", "med", "tail"))
        }
    )
    low, high = table["intervals"]["set_coverage.worst"]
    assert low < min(shares) < high
    assert "coverage of sets, macro" in run("evaluate", *words)[1]
    assert (
        "set_coverage.macro"
        not in json.loads(run("evaluate", "test.csv", "--json")[1])["intervals"]
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--sets", "macro"), "--sets macro needs held-out predictions with targets"),
        (
            ("--sets", "macro", "--calibrate", "val.csv", "--coverage", "1"),
            "coverage is 1.0: expected a share between 0",
        ),
        (
            ("--sets", "macro", "--calibrate", "val.csv", "--coverage", "90"),
            "--coverage '90': expected a share of the samples",
        ),
        (
            ("--sets", "macro", "--calibrate", "val.csv", "--coverage", "0.999"),
            "400 held-out samples cannot promise",
        ),
        (("--sets", "u80", "--coverage", "0.9"), "u80 decides by expected utility"),
        (("--coverage", "0.9"), "--coverage is for sets"),
        (("--sets", "makro"), "sets 'makro' is unknown"),
    ],
)
def test_sets_that_cannot_be_promised(run, folder, words, message):
    code, out, err = run("decide", "test.csv", *words)
    assert (code, out) == (2, "")
    assert message in err


def test_each_input_may_have_a_calibration_file_of_its_own(run, folder):
    frame = pandas.read_csv("val.csv")
    frame[["dog", "newt", "cat"]] = (
        frame[["dog", "newt", "cat"]] ** 0.2
    )  # less sure, as another model
    frame[["dog", "newt", "cat"]] /= (
        frame[["dog", "newt", "cat"]].to_numpy().sum(axis=1, keepdims=True)
    )
    frame.to_csv("other.csv", index=False)
    shared = json.loads(
        run("compare", "test.csv", "test.csv", "--calibrate", "val.csv", "--json")[1]
    )
    apart = json.loads(
        run(
            "compare",
            "test.csv",
            "test.csv",
            "--calibrate",
            "val.csv",
            "--calibrate",
            "other.csv",
            "--json",
        )[1]
    )
    differences = [
        {row["name"]: row["difference"] for row in found["differences"]}
        for found in (shared, apart)
    ]
    assert differences[0]["nll"] == 0
    assert differences[1]["nll"] > 0.01
    code, _, err = run(
        "evaluate", "test.csv", "--calibrate", "val.csv", "--calibrate", "other.csv"
    )
    assert (code, "--calibrate is given 2 times: expected one file" in err) == (2, True)
    Path("fitted").mkdir()
    run("fit", "val.csv", "-o", "fitted/decider.json")
    Predictions.load("test.csv").save("fitted/predictions.npz")
    own = json.loads(run("evaluate", "fitted", "--json")[1])["nll"]
    code, out, _ = run("compare", "fitted", "test.csv", "--calibrate", "other.csv")
    assert (code, out.count("Calibrated: ")) == (0, 2)
    found = json.loads(
        run("compare", "fitted", "test.csv", "--calibrate", "other.csv", "--json")[1]
    )["differences"]
    assert next(row["a"] for row in found if row["name"] == "nll") == pytest.approx(
        own
    )  # as the folder was calibrated
    code, _, err = run("compare", "fitted", "fitted", "--calibrate", "other.csv")
    assert (
        code,
        "all inputs have a calibration of their own: leave it out, or give" in err,
    ) == (2, True)
    several = (
        "--calibrate",
        "val.csv",
        "--calibrate",
        "val.csv",
        "--calibrate",
        "other.csv",
    )
    code, _, err = run("compare", "test.csv", "test.csv", *several)
    assert (code, "3 times for 2 inputs: expected once, or once per input" in err) == (
        2,
        True,
    )


def test_a_run_keeps_its_prior_beside_a_table_whose_classes_are_in_another_order(
    run, folder
):
    Path("fitted").mkdir()
    words = ("--classes", "counts.csv", "--train-prior", "uniform")
    run("fit", "val.csv", *words, "-o", "fitted/decider.json")
    classes = Classes.from_counts({"cat": 500, "dog": 60, "newt": 8})
    for name, to in (
        ("test.csv", "fitted/predictions.npz"),
        ("val.csv", "fitted/held-out.npz"),
    ):
        Predictions.load(name, classes).save(to)
    classes.to_json("fitted/classes.json")
    own = json.loads(run("evaluate", "fitted", "--json")[1])
    beside = json.loads(
        run(
            "evaluate",
            "test.csv",
            "--classes",
            "counts.csv",
            "--train-prior",
            "train",
            "--json",
        )[1]
    )
    Path("sorted.csv").write_text(
        "class,count,group\nnewt,8,wild\ncat,500,pet\ndog,60,pet\n"
    )
    for more in ((), ("--classes", "sorted.csv")):
        words = (
            "fitted",
            "test.csv",
            "--utility",
            "tail-sensitive",
            *more,
            "--train-prior",
            "train",
            "--json",
        )
        code, out, err = run("compare", *words)
        assert (code, err) == (0, "")
        row = next(
            row for row in json.loads(out)["differences"] if row["name"] == "nll"
        )
        assert (row["a"], row["b"]) == pytest.approx((own["nll"], beside["nll"]))
    code, _, err = run("evaluate", "fitted", "--train-prior", "train")
    assert (
        code,
        "fitted knows the class prior of its scores: leave the option out" in err,
    ) == (2, True)
    again = json.loads(
        run("evaluate", "fitted", "--calibration", "temperature", "--json")[1]
    )["nll"]
    words = (
        "--calibrate",
        "fitted/held-out.npz",
        "--calibration",
        "temperature",
        "--json",
    )
    assert (
        again == json.loads(run("evaluate", "fitted", *words)[1])["nll"] != own["nll"]
    )


def test_evaluate_says_whether_the_promise_is_met(run, folder):
    assert "decisions are worth less than promised" in " ".join(
        run("evaluate", "test.csv")[1].split()
    )
    assert "the promise is met" in " ".join(
        run("evaluate", "test.csv", "--calibrate", "val.csv")[1].split()
    )


def test_files_that_are_not_there_and_labels_that_are_missing_are_named_so(
    run, tmp_path
):
    (tmp_path / "p.csv").write_text("id,cat,dog\nx,0.4,0.6\ny,0.9,0.1\n")
    code, _, err = run("evaluate", tmp_path / "p.csv")
    assert (code, "or --labels FILE" in err) == (2, True)
    code, _, err = run(
        "evaluate", tmp_path / "p.csv", "--labels", tmp_path / "none.csv"
    )
    assert (code, err.endswith("none.csv: no such file: correct the path\n")) == (
        2,
        True,
    )


def test_a_column_of_times_is_not_a_class(run, folder):
    pandas.read_csv("test.csv").assign(time="2025-08-01 00:02:04").to_csv(
        "timed.csv", index=False
    )
    known = run("evaluate", "test.csv", "--classes", "counts.csv")
    assert run("evaluate", "timed.csv", "--classes", "counts.csv")[:2] == known[:2]
    pandas.read_csv("test.csv").assign(tiem="2025-08-01 00:02:04").to_csv(
        "timed.csv", index=False
    )
    assert run("evaluate", "timed.csv", "--classes", "counts.csv")[:2] == known[:2]


def test_tables_are_not_squeezed_where_there_is_no_terminal(run, folder, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    words = "compare", "test.csv", "test.parquet", "--classes", "counts.csv"
    lines = run(*words)[1].splitlines()
    assert any("metric" in line and "95% interval" in line for line in lines)
    assert any("false head rate, head = first 25%" in line for line in lines)
    assert max(map(len, lines)) > 80
    monkeypatch.setenv("COLUMNS", "60")
    assert (
        max(map(len, run(*words)[1].splitlines()[:-3])) <= 60
    )  # the last lines are text, which the terminal wraps


def test_costs_of_two_classes_have_a_threshold(run, folder):
    (folder / "costs.csv").write_text("true,good,bad\ngood,0,1\nbad,40,0\n")
    code, out, err = run("utility", "show", "--costs", "costs.csv")
    assert (code, err) == (0, "")
    assert "Costs: rows are the true class" in " ".join(out.split())
    assert re.search(r"bad +40 +0", out)
    told = "bad is decided where the probability of bad is above 2.44%."
    assert told in " ".join(out.split())
    shares = pytest.approx({"good": 40 / 41, "bad": 1 / 41})
    assert (
        json.loads(run("utility", "show", "--costs", "costs.csv", "--json")[1])[
            "thresholds"
        ]
        == shares
    )
    code, out, err = run("utility", "show", "costs.csv")
    assert "if these are costs, give them with --costs" in err
    for words in ((), ("costs.csv", "--costs", "costs.csv")):
        code, _, err = run("utility", "show", *words)
        assert (code, "expected one, a utility or --costs FILE" in err) == (2, True)
    p = np.array([0.02, 0.024, 0.025, 0.5])
    rows = [
        f"{1 - each},{each},{name}"
        for each, name in zip(p, ("good", "bad", "good", "bad"), strict=True)
    ]
    (folder / "two.csv").write_text("\n".join(["good,bad,target", *rows]))
    found = json.loads(run("decide", "two.csv", "--costs", "costs.csv", "--json")[1])
    assert found["thresholds"] == shares
    assert [row["action"] for row in found["decisions"]] == [
        "good",
        "good",
        "bad",
        "bad",
    ]
    for command in ("decide", "evaluate"):
        assert told in " ".join(
            run(command, "two.csv", "--costs", "costs.csv")[1].split()
        )
        assert (
            "is above"
            not in run(command, "two.csv", "--costs", "costs.csv", "--abstain", "-0.5")[
                1
            ]
        )
    (folder / "costs.csv").write_text(
        "true,bad,good\nbad,0,40\ngood,1,0\n"
    )  # in another order
    assert told in " ".join(run("utility", "show", "--costs", "costs.csv")[1].split())
    assert "thresholds" not in json.loads(
        run("decide", "two.csv", "--rule", "argmax", "--json")[1]
    )
    assert Utility(
        [[0, -40], [-1, 0]], ["bad", "good"], ["good", "bad"]
    ).threshold == pytest.approx(40 / 41)
    assert Utility([[1, 0], [1, 0]]).threshold is None

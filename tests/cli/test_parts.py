"""`rfdlc evaluate --by`, `--per-class` and `--rate`, on files as a user has them."""

import json

import numpy as np
import pandas
import pytest
from scipy.special import softmax

from rfdlc import Classes, Decider, Predictions, Utility, evaluate
from rfdlc.evaluation.evaluate import Evaluation

NAMES = ["flu", "cold", "tumour"]
MATRIX = np.array([[1, 0, 0, 0.5], [0, 1, 0, 0.5], [-4, -4, 1, 0.5]])


@pytest.fixture
def frame(tmp_path, monkeypatch):
    """Probabilities with target, id, sex and year; and a utility with the action
    `refer`.
    """
    rng = np.random.default_rng(0)
    y = rng.choice(3, 240, p=[0.6, 0.3, 0.1])
    table = pandas.DataFrame(
        softmax(2 * np.eye(3)[y] + rng.normal(size=(240, 3)), axis=1), columns=NAMES
    )
    table["target"], table["id"] = np.array(NAMES)[y], [f"v{i}" for i in range(240)]
    table["sex"], table["year"] = (
        rng.choice(["F", "M"], 240, p=[0.4, 0.6]),
        rng.integers(2020, 2023, 240),
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    table.to_csv("probs.csv", index=False)
    Utility(MATRIX, NAMES, [*NAMES, "refer"]).to_csv("U.csv")
    return table


def lines(out, *words):
    """The cells of the rows of a table that begin with one of the words."""
    return [
        line.split()
        for line in out.splitlines()
        if line.split()[:1] and line.split()[0] in words
    ]


def test_by_columns_of_the_predictions(run, frame):
    words = ("evaluate", "probs.csv", "-u", "U.csv", "--by", "sex", "--by", "year")
    code, out, _ = run(*words, "--json")
    found = json.loads(out)["by"]
    assert (code, [*found], {*found["year"]}) == (
        0,
        ["sex", "year"],
        {"2020", "2021", "2022"},
    )
    for column, parts in found.items():
        for value, part in parts.items():
            frame[frame[column].astype(str) == value].drop(
                columns=["sex", "year"]
            ).to_csv("cut.csv", index=False)
            alone = json.loads(run("evaluate", "cut.csv", "-u", "U.csv", "--json")[1])
            assert (
                part["samples"]
                == alone["samples"]
                == (frame[column].astype(str) == value).sum()
            )
            for name in ("mean_utility", "accuracy", "ece", "abstention_rate"):
                assert part[name] == pytest.approx(alone[name]), name
            assert part["intervals"]["accuracy"] == pytest.approx(
                alone["intervals"]["accuracy"]
            )
    out = run(*words)[1]
    part, (row, _) = found["sex"]["M"], lines(out, "M", "F")
    low, high = part["intervals"]["accuracy"]
    assert row[:3] == ["M", str(part["samples"]), f"{part['mean_utility']:.4f}"]
    assert f"{part['accuracy']:.1%} ({100 * low:.0f} to {100 * high:.0f})" in " ".join(
        row
    )
    assert row[-2:] == [f"{part['ece']:.1%}", f"{part['abstention_rate']:.1%}"]
    assert "what is handed over counts as wrong in accuracy" in " ".join(out.split())
    of_classes = " ".join(
        run(
            "evaluate",
            "probs.csv",
            "-u",
            "U.csv",
            "--classes",
            ",".join(NAMES),
            "--per-class",
        )[1].split()
    )
    assert (
        "what is handed over counts as missed in recall, right in specificity"
        in of_classes
    )
    assert (
        "handed over"
        not in run("evaluate", "probs.csv", "--by", "sex", "--by", "year")[1]
    )


def test_other_columns_are_left_out_if_the_classes_are_named(run, frame):
    code, _, err = run("evaluate", "probs.csv", "--by", "year")
    assert (
        code,
        "column 'sex': 'M' is not a number" in err
        or "column 'sex': 'F' is not a number" in err,
    ) == (2, True)
    named = json.loads(
        run(
            "evaluate",
            "probs.csv",
            "--by",
            "year",
            "--classes",
            ",".join(NAMES),
            "--json",
        )[1]
    )
    both = json.loads(
        run("evaluate", "probs.csv", "--by", "year", "--by", "sex", "--json")[1]
    )
    assert named["by"]["year"] == both["by"]["year"]


def test_by_columns_of_a_file_of_labels(run, frame, tmp_path):
    """For a run folder: its targets stay unless the file has some, and rows are matched
    by id.
    """
    frame.drop(columns=["sex", "year"]).to_csv("plain.csv", index=False)
    (tmp_path / "run").mkdir()
    predictions = Predictions.load("plain.csv", Classes(NAMES))
    predictions.save("run/predictions.npz")
    mixed = frame.sample(frac=1, random_state=1)
    mixed[["id", "sex"]].to_csv("patients.csv", index=False)
    mixed[["id", "sex", "target"]].assign(target="flu").to_csv(
        "others.csv", index=False
    )
    mixed.assign(sex=mixed["sex"].where(mixed.index > 9, ""))[["id", "sex"]].rename(
        columns={"id": ""}
    ).to_csv("rownames.csv", index=False)
    expected = json.loads(
        run("evaluate", "probs.csv", "--by", "sex", "--by", "year", "--json")[1]
    )
    for file in ("run", "plain.csv"):
        found = json.loads(
            run("evaluate", file, "--labels", "patients.csv", "--by", "sex", "--json")[
                1
            ]
        )
        assert found["by"]["sex"]["F"]["samples"] == (frame["sex"] == "F").sum()
        assert (
            found["by"]["sex"]["F"]["accuracy"]
            == expected["by"]["sex"]["F"]["accuracy"]
        )
        assert found["accuracy"] == expected["accuracy"]
    others = json.loads(
        run("evaluate", "run", "--labels", "others.csv", "--by", "sex", "--json")[1]
    )
    assert others["accuracy"] == pytest.approx(
        (predictions.scores.values[0].argmax(axis=1) == 0).mean()
    )
    code, out, err = run("evaluate", "run", "--labels", "rownames.csv", "--by", "sex")
    assert (code, "column '' has all ids" in err) == (0, True)
    assert lines(out, "(empty)")[0][:2] == ["(empty)", "10"]
    for words, message in (
        (
            ["probs.csv", "--by", "sx"],
            "probs.csv: no column sx, it has flu, cold, tumour, target, id, sex, year",
        ),
        (
            ["run", "--by", "sex"],
            "run: no column sex, it has scores alone; see also --labels FILE",
        ),
        (
            ["run", "--by", "sx", "--labels", "patients.csv"],
            "patients.csv: column 'sx' is unknown: expected one of id",
        ),
        (
            ["run", "--labels", "patients.csv"],
            "patients.csv: expected columns id (or path) and target",
        ),
    ):
        code, _, err = run("evaluate", *words)
        assert (code, message in " ".join(err.split())) == (2, True), err


def test_intervals_of_values_are_by_group(run, frame, tmp_path):
    (tmp_path / "run").mkdir()
    scores, sex, patient = (
        frame[NAMES].to_numpy(),
        frame["sex"].to_numpy(),
        np.arange(240) // 6,
    )
    known = {
        "targets": frame["target"].to_numpy(),
        "ids": frame["id"].to_numpy(),
        "classes": NAMES,
        "groups": patient,
    }
    predictions = Predictions(probabilities=scores, **known)
    predictions.save("run/predictions.npz")
    frame[["id", "sex"]].to_csv("patients.csv", index=False)
    words = (
        "evaluate",
        "run",
        "--labels",
        "patients.csv",
        "--by",
        "sex",
        "--per-class",
    )
    found, result = json.loads(run(*words, "--json")[1]), evaluate(predictions)
    for value, part in result.by(sex).items():
        own = found["by"]["sex"][value]
        assert own["groups"] == len(np.unique(patient[sex == value])) < own["samples"]
        assert own["intervals"]["accuracy"] == pytest.approx(part.intervals["accuracy"])
    assert found["per_class"] == result.per_class()
    out, groups = run(*words)[1], found["per_class"]["tumour"]["groups"]
    assert out.count("samples (groups)") == 2
    assert lines(out, "tumour")[0][:3] == [
        "tumour",
        str(found["per_class"]["tumour"]["samples"]),
        f"({groups})",
    ]


def test_by_the_groups_of_a_run(run, frame, tmp_path):
    """The column that `rfdlc train --groups` named: run folders have numbers, the table
    of the training has names.
    """
    (tmp_path / "run").mkdir()
    data = {"options": {"groups": "site"}, "source": "training.csv"}
    (tmp_path / "run" / "config.json").write_text(json.dumps({"data": data}))
    sites = np.random.default_rng(2).choice(["Bern", "Agra", "Cork"], 240)
    frame.assign(site=sites)[["id", "site"]].to_csv("training.csv", index=False)
    known = {
        "targets": frame["target"].to_numpy(),
        "ids": frame["id"].to_numpy(),
        "classes": NAMES,
    }
    scores, right = (
        frame[NAMES].to_numpy(),
        frame[NAMES].idxmax(axis=1) == frame["target"],
    )
    Predictions(probabilities=scores, **known, groups=sites).save("run/predictions.npz")
    for words, names in (
        ((), "012"),
        (("--labels", "training.csv"), ("Agra", "Bern", "Cork")),
    ):
        code, out, err = run("evaluate", "run", "--by", "site", *words, "--json")
        assert (
            code,
            "--labels training.csv has the names" in " ".join(err.split()),
        ) == (0, not words)
        found = json.loads(out)["by"]["site"]
        assert {*found} == {*names}
        for name, site in zip(names, ("Agra", "Bern", "Cork"), strict=True):
            assert found[name]["samples"] == (sites == site).sum()
            assert found[name]["accuracy"] == pytest.approx(right[sites == site].mean())
        row = lines(run("evaluate", "run", "--by", "site", *words)[1], names[0])[0]
        assert row[:3] == [names[0], str((sites == "Agra").sum()), "(1)"]
    code, _, err = run("evaluate", "run", "--by", "sit")
    assert (
        code,
        "run: no column sit, it has site; see also --labels FILE"
        in " ".join(err.split()),
    ) == (2, True)
    Predictions(probabilities=scores, **known).save("run/predictions.npz")
    code, _, err = run("evaluate", "run", "--by", "site")
    assert (
        code,
        "run: --by site: the run has no groups of its test split: --labels training.csv"
        in err,
    ) == (2, True)


def test_each_class(run, frame):
    words = (
        "evaluate",
        "probs.csv",
        "-u",
        "U.csv",
        "--by",
        "sex",
        "--by",
        "year",
        "--per-class",
    )
    rates = ("--rate", "tumour:refer", "--rate", "tumour:tumour")
    found = json.loads(run(*words, *rates, "--json")[1])
    predictions = Predictions(
        probabilities=frame[NAMES].to_numpy(),
        targets=frame["target"].to_numpy(),
        classes=NAMES,
    )
    decider = Decider(Utility(MATRIX, NAMES, [*NAMES, "refer"]))
    assert found["per_class"] == evaluate(predictions, decider=decider).per_class()
    row, rate = found["per_class"]["tumour"], found["group_rates"]
    assert rate == {
        "tumour as refer": row["abstention_rate"],
        "tumour as tumour": row["recall"],
    }
    assert rate["tumour as refer"] > 0
    out = run(*words, *rates)[1]
    low, high = row["intervals"]["recall"]
    cells = lines(out, "tumour")[-1]
    assert cells[:3] == ["tumour", str(row["samples"]), f"{row['recall']:.1%}"]
    assert f"({100 * low:.0f} to {100 * high:.0f}) {row['precision']:.1%}" in " ".join(
        cells
    )
    shares = (f"{row[name]:.2%}" for name in ("predicted_share", "observed_share"))
    assert cells[-5:] == [
        *(f"{row[n]:.1%}" for n in ("specificity", "auroc")),
        *shares,
        f"{row['abstention_rate']:.1%}",
    ]
    assert "per_class" not in json.loads(
        run("evaluate", "probs.csv", "--by", "sex", "--by", "year", "--json")[1]
    )


def test_of_many_classes_the_most_and_the_least_frequent_are_shown(
    run, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    names = [f"c{i:02}" for i in range(45)]
    y = np.concatenate(
        [np.full(i + 1, i) for i in range(40)]
    )  # of five classes there is no sample
    table = pandas.DataFrame(
        np.random.default_rng(0).dirichlet(np.ones(45), len(y)), columns=names
    )
    table.assign(target=np.array(names)[y]).to_csv("many.csv", index=False)
    out = run("evaluate", "many.csv", "--per-class")[1]
    shown = [row[0] for row in lines(out, *names)]
    assert shown == [*names[39:24:-1], *names[14::-1]]
    assert "15 more: --json" in out
    assert [
        *json.loads(run("evaluate", "many.csv", "--per-class", "--json")[1])[
            "per_class"
        ]
    ] == names


def test_of_many_values_only_those_that_are_shown_take_time(run, frame, monkeypatch):
    frame.assign(day=np.arange(240) // 2).to_csv("days.csv", index=False)
    rows, whole = [], Evaluation.to_dict
    monkeypatch.setattr(
        Evaluation, "to_dict", lambda self: rows.append(self) or whole(self)
    )
    out = run(
        "evaluate",
        "days.csv",
        *(word for name in ("sex", "year", "day") for word in ("--by", name)),
    )[1]
    assert "90 more: --json" in out
    assert len(rows) == 2 + 3 + 30


def test_parts_of_tables_of_any_size_are_refused(run, frame, tmp_path):
    (tmp_path / "lake").mkdir()
    frame.drop(columns=["sex", "year"]).to_parquet("lake/a.parquet")
    for words in (["--per-class"], ["--by", "sex"], ["--groups", "sex"]):
        code, _, err = run("evaluate", "lake/*.parquet", *words)
        told = (
            "--labels, --skip-unknown, --groups, --by and --per-class are for one file"
            " in memory: leave them out"
        )
        assert (code, told in err) == (2, True)

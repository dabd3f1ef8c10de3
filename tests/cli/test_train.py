"""train, resume, fork and predict from the command line."""

import csv
import json
import re
import shlex
import shutil

import numpy as np
import pytest
from typer.testing import CliRunner

from rfdlc.cli import app
from rfdlc.cli.train import _learned_little
from rfdlc.decisions.decider import Decider
from rfdlc.decisions.utility import Utility
from rfdlc.errors import InputError
from rfdlc.probabilities.predictions import Predictions
from rfdlc.training.model import Model
from rfdlc.training.run import Run
from rfdlc.training.settings import GROUPS

pytestmark = pytest.mark.usefixtures("quick_tables", "quick_calibration")
SMALL = ["epochs=2", "widths=8"]


def run(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "run"
    assert run("train", "digits-lt", "--out", path, *SMALL, "keep=0.5").exit_code == 0
    return path


def test_train_says_what_it_did(tmp_path):
    result = run(
        "train", "digits-lt", "--out", tmp_path / "run", "--method", "ce", *SMALL
    )
    assert result.exit_code == 0
    assert "false head rate" in result.stdout
    assert "next: rfdlc evaluate" in result.stdout


def test_without_a_test_part_the_next_step_is_another(tmp_path):
    x, y = np.eye(4, dtype=np.float32).repeat(5, 0), np.arange(4).repeat(5)
    np.savez(tmp_path / "set.npz", train_x=x, train_y=y, val_x=x, val_y=y)
    result = run("train", tmp_path / "set.npz", "--out", tmp_path / "run", *SMALL)
    assert f"next: rfdlc predict {tmp_path / 'run'} DATA --out" in result.stdout


def test_train_says_what_was_done_to_the_data(tmp_path):
    rows = "".join(f"p{k},{'' if k == 3 else k},{'ab'[k % 2]}\n" for k in range(20))
    (tmp_path / "t.csv").write_text("name,age,label\n" + rows + "p20,20,\n")
    shown = run(
        "train",
        tmp_path / "t.csv",
        "--out",
        tmp_path / "run",
        "data.skip_broken=true",
        "backbone=mlp",
        *SMALL,
    ).stdout
    assert (
        "data: column 'name' has a different value in every row and was left out"
        in shown
    )
    notes = json.loads(run("resume", tmp_path / "run", "--json").stdout)["notes"]
    assert notes[0].startswith("the data has no test split: ")
    assert notes[-1].startswith("broken, left out: 1: ")
    assert notes[-1].endswith(": row 21 has no target")
    assert all(f"data: {note}\n" in shown for note in notes)


def test_the_final_table_has_one_utility(folder, tmp_path):
    plain = run("resume", folder).stdout
    assert "tail-sensitive" not in plain  # nobody asked for it
    assert f"next: rfdlc evaluate {folder}\n" in plain
    tested = json.loads((folder / "metrics.json").read_text())["test"]
    row = next(line for line in plain.splitlines() if "mean utility" in line).split()
    assert f"{tested['mean_utility']:.3f}" in row
    folder = shutil.copytree(folder, tmp_path / "sensitive")
    reached = Run(folder).checkpoint()
    config = json.loads((folder / "config.json").read_text())
    config["settings"]["utility"] = "tail-sensitive"
    (folder / "config.json").write_text(json.dumps(config))
    Run(folder).save_checkpoint(reached)  # belongs to this configuration, too
    shown = run("resume", folder).stdout
    told = json.loads(
        run(
            "evaluate",
            folder,
            "--utility",
            "tail-sensitive",
            "--rule",
            "argmax",
            "--json",
        ).stdout
    )
    decided = json.loads((folder / "metrics.json").read_text())["test_tail_sensitive"]
    assert "utility tail-sensitive" in shown
    row = next(line for line in shown.splitlines() if "mean utility" in line).split()
    assert row[-2:] == [f"{told['mean_utility']:.3f}", f"{decided['mean_utility']:.3f}"]


def test_a_model_that_learned_nothing_is_named(tmp_path):
    """Labels of noise: the log loss is that of the class frequencies; with labels that
    follow a column, it is not.
    """
    rng = np.random.default_rng(0)
    x, noise = rng.normal(size=200), rng.random(200) < 0.3
    for name, label in (("noise", noise), ("learned", x > 0.5)):
        lines = [
            f"{value:.4f},{'rare' if rare else 'common'}"
            for value, rare in zip(x, label, strict=True)
        ]
        (tmp_path / f"{name}.csv").write_text("\n".join(["x,target", *lines]))
        shown = run("train", tmp_path / f"{name}.csv", "--out", tmp_path / name).stdout
        assert (
            "almost nothing was learned: a log loss of" in " ".join(shown.split())
        ) == (name == "noise")
        found = Predictions.load(tmp_path / name / "predictions.npz")
        p = Decider.load(tmp_path / name).probabilities(found)
        count = int(
            (np.asarray(found.targets) == [*found.classes.names].index("rare")).sum()
        )
        told = (
            f"never the most probable class: rare ({count} test samples); decisions by"
            " costs (--costs) may"
        )
        assert (
            (told in " ".join(shown.split()))
            == (name == "noise")
            == ({*p.argmax(axis=1)} == {0})
        )
    assert (
        _learned_little(0.1, np.zeros(5, dtype=int)) is None
    )  # one class alone says nothing about a model


def test_groups_are_a_data_option(tmp_path):
    rows = [f"{k % 7},{'ab'[k % 3 == 0]},w{k // 4}" for k in range(80)]
    (tmp_path / "t.csv").write_text("\n".join(["v,outcome,who", *rows]))
    out = tmp_path / "run"
    words = [
        "train",
        tmp_path / "t.csv",
        "--target",
        "outcome",
        "--groups",
        "who",
        "--out",
        out,
        "backbone=mlp",
        *SMALL,
    ]
    assert run(*words).exit_code == 0
    assert json.loads((out / "config.json").read_text())["data"]["options"] == {
        "target": "outcome",
        "groups": "who",
    }
    assert [column.name for column in Model.load(out).encoder.columns] == ["v"]
    with pytest.raises(
        InputError, match="groups is an option and not a setting: write --groups who"
    ):
        run("train", tmp_path / "t.csv", "groups=who")


@pytest.mark.parametrize(
    "name", ["id", "target", "action", "set", "time", "rfdlc_scores"]
)
def test_a_class_with_the_name_of_a_column_is_refused_before_training(tmp_path, name):
    """Tables of predictions would lose it, or have two columns of one name."""
    rows = "".join(f"{k},{name if k % 2 else 'other'}\n" for k in range(20))
    (tmp_path / "t.csv").write_text("age,label\n" + rows)
    for words in ((), ("--cv", "2")):
        with pytest.raises(
            InputError,
            match=f"a class is called '{name}', as a column of tables .* is: rename it",
        ):
            run("train", tmp_path / "t.csv", "--out", tmp_path / "run", *SMALL, *words)
        assert not (tmp_path / "run" / "model.safetensors").exists()


def test_force_replaces_a_run_only_if_a_new_one_begins(tmp_path):
    out = tmp_path / "run"
    for words in (["--method", "ce"], ["--force"]):
        assert run("train", "digits-lt", "--out", out, *SMALL, *words).exit_code == 0
    assert json.loads((out / "config.json").read_text())["method"] == "rf-dlc"
    with pytest.raises(InputError, match="holds a run already"):
        run("train", "digits-lt", "--out", out, *SMALL)
    with pytest.raises(InputError, match="factor"):
        run("train", "digits-lt", "--out", out, "--force", "data.factor=many")
    assert run("fork", out, "--out", tmp_path / "f", *SMALL).exit_code == 0
    (tmp_path / ".f.replaced" / "kept").mkdir(
        parents=True
    )  # of a process that was killed
    assert (
        run(
            "fork", out, "--out", tmp_path / "f", *SMALL, "--force", "penalty=-0.5"
        ).exit_code
        == 0
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f", "run"]


def test_predictions_of_a_labelled_table_keep_the_labels(tmp_path):
    rows = [f"p{k},{k % 5 + 10 * (k % 3 == 0)},{'ab'[k % 3 == 0]}" for k in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["id,v,outcome", *rows]))
    run(
        "train",
        tmp_path / "t.csv",
        "--target",
        "outcome",
        "--out",
        tmp_path / "run",
        "backbone=mlp",
        "epochs=20",
    )
    assert (
        run(
            "predict", tmp_path / "run", tmp_path / "t.csv", "--out", tmp_path / "p.csv"
        ).exit_code
        == 0
    )
    lines = [
        line.replace('"', "").split(",")
        for line in (tmp_path / "p.csv").read_text().splitlines()
    ]
    assert lines[0] == [
        "id",
        "a",
        "b",
        "target",
        "action",
        "expected_utility",
        "rfdlc_scores",
    ]
    assert [line[3] for line in lines[1:]] == [row[-1] for row in rows]
    for line in lines[1:]:
        assert line[4] == ("a" if float(line[1]) >= float(line[2]) else "b")
        assert float(line[5]) == max(float(line[1]), float(line[2]))
    assert (
        json.loads(run("evaluate", tmp_path / "p.csv", "--json").stdout)["samples"]
        == 60
    )
    (tmp_path / "bare.csv").write_text("id,v\np1,3\n")
    run("predict", tmp_path / "run", tmp_path / "bare.csv", "--out", tmp_path / "q.csv")
    assert "target" not in (tmp_path / "q.csv").read_text()


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_table_of_predictions_says_for_which_prior_it_was_decided(
    tmp_path, folder, kind
):
    out, saved = tmp_path / f"p.{kind}", tmp_path / "again.npz"
    run("predict", folder, "digits-lt", "--out", out, "--target-prior", "uniform")
    Predictions.load(out).save(saved)
    for file in (out, saved):
        told = run("decide", file, "--out", tmp_path / "d.csv").stdout
        assert (
            "Decided for the class prior that the scores carry: corrected for a uniform"
            " class prior." in told
        )
    told = json.loads(run("evaluate", out, "--json").stdout)["decider"]["decided_for"]
    assert told.endswith("corrected for a uniform class prior")
    told = run("predict", folder, "digits-lt", "--out", out, "--raw").stdout
    assert f"decide them with --decider {folder}, and the same priors" in told


def test_json_is_all_there_is_on_stdout(folder, tmp_path):
    told = json.loads(run("resume", folder, "--json").stdout)
    assert told["run"] == str(folder)
    assert 0 <= told["test"]["accuracy"] <= 1
    told = json.loads(
        run(
            "fork", folder, "--at", 1, "--out", tmp_path / "f", "penalty=-0.5", "--json"
        ).stdout
    )
    assert told["run"] == str(tmp_path / "f")
    told = json.loads(
        run(
            "predict", folder, "digits-lt", "--out", tmp_path / "p.npz", "--json"
        ).stdout
    )
    assert told["samples"] == 450
    assert (
        "writes probabilities and the decided action"
        in run("predict", folder, "digits-lt", "-o", tmp_path / "p.npz").stdout
    )


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_predicted_tables_hold_calibrated_probabilities(tmp_path, folder, kind):
    out = tmp_path / f"p.{kind}"
    assert (
        "the file holds logits"
        not in run("predict", folder, "digits-lt", "--out", out).stdout
    )
    table, model = Predictions.load(out), Model.load(folder)
    expected = model.decider.probabilities(model.predict("digits-lt"))
    assert table.scores.values[0] == pytest.approx(np.asarray(expected), abs=1e-5)
    assert (
        table.targets.tolist()
        == Predictions.load(folder / "predictions.npz").targets.tolist()
    )


def test_predict_takes_costs_as_utilities_with_the_other_sign(tmp_path, folder):
    names = [str(k) for k in range(10)]
    costs = np.random.default_rng(0).uniform(0, 5, (10, 10)) * (1 - np.eye(10))
    for file, table in (("costs.csv", costs), ("U.csv", -costs)):
        rows = [
            ",".join([name, *map(str, row)])
            for name, row in zip(names, table, strict=True)
        ]
        (tmp_path / file).write_text("\n".join([",".join(["true", *names]), *rows]))
    for words in (
        ["--costs", tmp_path / "costs.csv"],
        ["--utility", tmp_path / "U.csv"],
    ):
        assert (
            run(
                "predict",
                folder,
                "digits-lt",
                "-o",
                tmp_path / f"{words[0]}.csv",
                *words,
            ).exit_code
            == 0
        )
    written = [
        (tmp_path / f"--{name}.csv").read_text() for name in ("costs", "utility")
    ]
    assert written[0] == written[1]
    assert "action" in written[0].splitlines()[0]


def test_predict_hands_over_and_answers_with_sets_of_a_fitted_decider(tmp_path, folder):
    """Thresholds are of the held-out samples of the run, and budgets of one batch."""
    held = Predictions.load(folder / "held-out.npz")
    test = Predictions.load(folder / "predictions.npz")
    made = tmp_path / "d.json"
    words = [
        *("--abstain", "0.6", "--sets", "macro", "--coverage", "80%"),
        *("--budget", "20%", "--unfamiliar", "10%"),
    ]
    assert run("fit", folder, *words, "-o", made).exit_code == 0
    words = ["predict", folder, "digits-lt", "--decider", made]
    assert run(*words, "-o", tmp_path / "p.csv").exit_code == 0
    decider = Decider.load(folder)
    decider = decider.replace(utility=decider.utility.with_abstain(0.6)).fit_sets(
        held, kind="macro", coverage=0.8
    )
    decider = decider.fit_unfamiliar(held, false_alarm=0.1).fit_budget(
        held, budget="20%"
    )
    expected = decider.explain(test, batch=True)
    with open(tmp_path / "p.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["action"] for row in rows] == [
        decider.utility.actions[a] for a in expected.action
    ]
    assert [row["reason"] for row in rows] == expected.reason.tolist()
    assert {"unfamiliar", "over budget"} <= {*expected.reason.tolist()}
    assert [json.loads(row["set"]) for row in rows] == [
        [str(c) for c in np.flatnonzero(s)] for s in expected.sets
    ]
    with pytest.raises(
        InputError,
        match=r"takes no decider \(sets, budget, unfamiliar\): write a table",
    ):
        run(*words, "-o", tmp_path / "q.npz")


def test_predict_takes_costs_for_a_fitted_decider(tmp_path, folder):
    """What each action is worth is that of the costs; the calibration stays."""
    decider = Decider.load(folder)
    uniform = decider.replace(target_prior="uniform")
    uniform.save(tmp_path / "d.json")
    names = decider.utility.classes.names
    costs = 2.0 * (1 - np.eye(len(names)))
    lines = [",".join(["true", *names])]
    for name, row in zip(names, costs, strict=True):
        lines.append(",".join([name, *map(str, row)]))
    (tmp_path / "costs.csv").write_text("\n".join(lines))
    words = ["--decider", tmp_path / "d.json", "--costs", tmp_path / "costs.csv"]
    words = ["predict", folder, "digits-lt", *words, "-o", tmp_path / "p.csv"]
    assert run(*words).exit_code == 0
    with open(tmp_path / "p.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    test = Predictions.load(folder / "predictions.npz")
    utility = Utility.from_costs(costs, decider.utility.classes)
    actions, values = uniform.replace(utility=utility).decide_values(test)
    assert [row["action"] for row in rows] == [names[a] for a in actions]
    worth = [float(row["expected_utility"]) for row in rows]
    np.testing.assert_allclose(worth, values, atol=1e-4)


def test_an_estimated_prior_with_sets_leads_to_commands_that_work(tmp_path, folder):
    out, made = tmp_path / "p.csv", tmp_path / "d.json"
    sets = ("--sets", "macro", "--set-size", "3", "--abstain", "0.2")
    run("fit", folder, *sets, "-o", made)
    words = ("predict", folder, "digits-lt", "--split", "test", "--decider", made)
    with pytest.raises(InputError) as refused:
        run(*words, "--target-prior", "estimate", "-o", out)
    _, then = (shlex.split(text) for text in re.findall("`(.*?)`", str(refused.value)))
    assert then[-1] == "scores.npz"
    scores = tmp_path / "scores.npz"
    assert run(*words[:-2], "-o", scores).exit_code == 0
    assert run(*then[1:-1], scores, *sets, "-o", made).exit_code == 0
    assert run(*words, "-o", out).exit_code == 0
    with open(out, newline="") as file:
        rows = list(csv.DictReader(file))
    logits = Predictions.load(scores)
    decider = Decider.load(folder)
    decider = decider.replace(
        utility=decider.utility.with_abstain(0.2),
        target_prior=decider.estimate_prior(logits),
    )
    decider = decider.fit_sets(
        Predictions.load(folder / "held-out.npz"), kind="macro", max_size=3
    )
    expected = decider.explain(logits)
    assert [row["action"] for row in rows] == [
        decider.utility.actions[a] for a in expected.action
    ]
    assert [json.loads(row["set"]) for row in rows] == [
        [str(c) for c in np.flatnonzero(s)] for s in expected.sets
    ]


def test_a_predicted_table_is_decided_again_with_its_budget(tmp_path, folder):
    """Its probabilities are corrected: the budget goes to the samples that gain most,
    without held-out data.
    """
    words, table = ["--abstain", "0.8", "--budget", "5%"], tmp_path / "p.csv"
    run("fit", folder, *words, "-o", tmp_path / "d.json")
    made = ["--decider", tmp_path / "d.json"]
    assert run("predict", folder, "digits-lt", "-o", table, *made).exit_code == 0
    with table.open(newline="") as file:
        rows = [
            {name: cell for name, cell in row.items() if name != "target"}
            for row in csv.DictReader(file)
        ]
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    shown = run("decide", table, *words, "-o", tmp_path / "actions.csv").stdout
    gains = np.array([0.8 - max(float(row[str(c)]) for c in range(10)) for row in rows])
    with (tmp_path / "actions.csv").open(newline="") as file:
        handed = [row["action"] == "abstain" for row in csv.DictReader(file)]
    assert np.flatnonzero(handed).tolist() == sorted(
        np.argsort(-gains, kind="stable")[:22].tolist()
    )  # of 450
    assert "Budget: total 5%, handed over 4.9%; of all samples as one batch. " in shown
    assert f" {(gains > 0).sum() - 22} more samples are worth handing over" in shown
    with pytest.raises(
        InputError,
        match=(
            r"corrected already.*: decide them without --decider, --calibrate and"
            r" priors"
        ),
    ):
        run("decide", table, *words, "--decider", folder)
    with pytest.raises(InputError, match=r"corrected already.*rfdlc predict --raw"):
        run("decide", table, "--target-prior", "uniform")


def test_evaluate_reads_the_folder(folder):
    told = json.loads(
        run("evaluate", folder, "--utility", "tail-sensitive", "--json").stdout
    )
    metrics = json.loads((folder / "metrics.json").read_text())
    found = told.get("mean_utility", told.get("evaluation", {}).get("mean_utility"))
    assert found == pytest.approx(metrics["test_tail_sensitive"]["mean_utility"])


def test_trials_are_reported(tmp_path):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 200)
    images = rng.integers(0, 60, (200, 1, 8, 8)) + 40 * labels[:, None, None, None]
    np.savez(tmp_path / "images.npz", x=images.astype(np.uint8), y=labels)
    words = [
        "train",
        tmp_path / "images.npz",
        "--out",
        tmp_path / "run",
        "epochs=30",
        "widths=8",
        "batch_size=64",
    ]
    result = run(*words, "tune=2", "--json")
    found = json.loads(result.stdout)["tuning"]
    assert found == json.loads((tmp_path / "run" / "tuning.json").read_text())
    assert len(found["candidates"]) == 2
    assert found["chosen"]["epochs"] == 30


def test_bad_input(tmp_path, folder):
    with pytest.raises(
        InputError,
        match=r"expected one of backbone, .* in all\); did you mean 'epochs'",
    ) as found:
        run("train", "digits-lt", "--out", tmp_path / "x", "epohcs=3")
    assert len(str(found.value)) < 200
    with pytest.raises(InputError, match="learning_rate='inf' is not possible"):
        run("train", "digits-lt", "--out", tmp_path / "x", "learning_rate=inf")
    with pytest.raises(
        InputError, match="factor='many' is not valid: input should be a valid number"
    ):
        run("train", "digits-lt", "--out", tmp_path / "x", "data.factor=many")
    with pytest.raises(InputError, match="x is not a run folder"):
        run("predict", tmp_path / "x", "digits-lt", "--out", tmp_path / "p.csv")
    with pytest.raises(InputError, match="expected key=value"):
        run("train", "digits-lt", "fast", "--out", tmp_path / "x")
    with pytest.raises(
        InputError,
        match=r"kind of file '.txt' is unknown: expected one of .npz, .parquet, .csv",
    ):
        run("predict", folder, "digits-lt", "--out", tmp_path / "p.txt")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("train", "digits-lt", "out=runs/a"),
            "out is an option and not a setting: write --out runs/a",
        ),
        (("train", "digits-lt", "data=b"), "setting 'data' is unknown"),
        (("train", "digits-lt", "--budget", "soon"), "budget='soon' is not a duration"),
        (("train", "digits-lt", "--log", "tensorbord"), "did you mean 'tensorboard'"),
        (
            ("fork", "FOLDER", "tune=auto"),
            "a fork continues a training and has no trials",
        ),
        (("fork", "FOLDER", "at=1"), "write --at 1"),
        (("fork", "FOLDER", "backbone=resnet8"), "a fork cannot change backbone"),
        (("fork", "FOLDER", "method=ride"), "a fork cannot continue as ride"),
    ],
)
def test_pairs_that_are_no_settings(tmp_path, folder, words, message):
    with pytest.raises(InputError, match=message):
        run(
            *(str(folder) if word == "FOLDER" else word for word in words),
            "--out",
            tmp_path / "new",
        )
    assert not (tmp_path / "new").exists()


def test_settings_are_judged_beside_those_of_the_method(tmp_path):
    assert (
        run(
            "train", "digits-lt", "--out", tmp_path / "run", "prior_tau=0,1,2", *SMALL
        ).exit_code
        == 0
    )  # 3 particles
    with pytest.raises(InputError, match="prior_tau has 2 values for 3 particles"):
        run("train", "digits-lt", "--out", tmp_path / "new", "prior_tau=0,1")


def test_settings_are_listed():
    listed = run("train", "--settings").stdout
    assert "prior_tau=" in listed
    assert "epochs=100" in listed
    groups = listed.split("\n\n")
    assert [group.strip().partition(":")[0] for group in groups] == list(GROUPS)
    assert sum(group.count("\nmixup=") for group in groups) == 1

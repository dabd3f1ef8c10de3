"""Cross-validation: every sample is predicted by a run that has not seen it, and
commands read the folder.
"""

import json
import re

import numpy as np
import pytest
from torch import nn
from typer.testing import CliRunner

import rfdlc
from rfdlc import InputError
from rfdlc.cli import app
from rfdlc.data.longtail import assign_folds
from rfdlc.progress import shown
from rfdlc.training import trainer

SMALL = {
    "epochs": 1,
    "widths": (4,),
    "backbone": "mlp",
    "particles": 1,
    "device": "cpu",
}


def grouped(path, samples=90):
    rng = np.random.default_rng(0)
    y = np.repeat([0, 1, 2], [60, 24, 6])
    x = rng.normal(2 * y[:, None], size=(samples, 2)).round(3)
    lines = [
        f"r{i},{a},{b},{i // 3},{'abc'[c]}"
        for i, ((a, b), c) in enumerate(zip(x, y, strict=True))
    ]
    path.write_text("\n".join(["id,u,v,who,target", *lines]))
    return path


def test_every_sample_is_predicted_by_a_run_that_has_not_seen_it(tmp_path):
    source, out = grouped(tmp_path / "t.csv"), tmp_path / "cv"
    found = rfdlc.cross_validate(
        source, "ce", out, folds=3, data_options={"groups": "who"}, **SMALL
    )
    data = rfdlc.load(source, groups="who", test_fraction=0)
    fold = data.train.folds(3)
    assert len(found.predictions) == 90
    assert list(found.predictions.ids) == [f"r{i}" for i in range(90)]
    for number, path in enumerate(found.folds):
        model = rfdlc.Model.load(path)
        held = np.flatnonzero(fold == number)
        assert sum(model.classes.counts) == 90 - len(held)
        own = model.decider.probabilities(model.predict(data.train.take(held)))
        np.testing.assert_allclose(
            found.predictions.scores.values[0, held], own, atol=1e-6
        )
        assert not set(data.train.groups[held]) & set(data.train.groups[fold != number])
    assert found.evaluation.groups == 30
    assert (
        found.predictions.groups.tolist()
        == np.unique(data.train.groups, return_inverse=True)[1].tolist()
    )
    told = json.loads((out / "metrics.json").read_text())
    assert [fold["groups"] for fold in told["folds"]] == [10, 10, 10]
    again = rfdlc.cross_validate(
        source, "ce", out, folds=3, data_options={"groups": "who"}, **SMALL
    )  # all is there
    np.testing.assert_array_equal(
        again.predictions.scores.values, found.predictions.scores.values
    )
    with pytest.raises(
        InputError, match="holds a cross-validation with other settings"
    ):
        rfdlc.cross_validate(
            source, "ce", out, folds=2, data_options={"groups": "who"}, **SMALL
        )


def test_commands_know_the_groups_of_a_run(tmp_path, monkeypatch):
    source, run = grouped(tmp_path / "t.csv"), tmp_path / "run"
    rfdlc.train(
        source, "ce", run, data_options={"groups": "who"}, hold_out=0.3, **SMALL
    )
    data = rfdlc.load(source, groups="who")
    test, held = (
        rfdlc.Predictions.load(run / name)
        for name in ("predictions.npz", "held-out.npz")
    )
    who = {f"r{i}": i // 3 for i in range(90)}
    for found in (test, held):
        of = np.array([who[name] for name in found.ids])
        np.testing.assert_array_equal(
            found.groups[:, None] == found.groups, of[:, None] == of
        )
    assert json.loads((run / "metrics.json").read_text())["test"]["groups"] == len(
        set(data.test.groups)
    )
    fitted, fit = [], rfdlc.Decider.fit
    monkeypatch.setattr(
        rfdlc.Decider,
        "fit",
        lambda self, given, *more, **kw: (
            fitted.append(given) or fit(self, given, *more, **kw)
        ),
    )
    evaluated = CliRunner().invoke(
        app,
        ["evaluate", str(run), "--calibration", "temperature"],
        catch_exceptions=False,
    )
    assert (
        f"{len(test)} samples in {len(set(data.test.groups))} groups (intervals by"
        " group)" in evaluated.stdout
    )
    np.testing.assert_array_equal(fitted[0].groups, held.groups)


def plain():
    return nn.Linear(3, 3)


def test_folds_of_other_data_are_not_used_again(tmp_path):
    """The first call's runs have seen samples that another order of rows holds out."""
    source = grouped(tmp_path / "t.csv")
    given = {**SMALL, "backbone": plain}
    found = rfdlc.cross_validate(source, "ce", tmp_path / "cv", folds=2, **given)
    again = rfdlc.cross_validate(source, "ce", tmp_path / "cv", folds=2, **given)
    np.testing.assert_array_equal(
        again.predictions.scores.values, found.predictions.scores.values
    )
    header, *rows = source.read_text().splitlines()
    source.write_text("\n".join([header, *rows[::-1]]))
    with pytest.raises(InputError, match="was trained on other data"):
        rfdlc.cross_validate(source, "ce", tmp_path / "cv", folds=2, **given)


def test_commands_read_the_folder(tmp_path):
    source, out = grouped(tmp_path / "t.csv"), tmp_path / "cv"
    words = [
        "train",
        str(source),
        "--method",
        "ce",
        "--out",
        str(out),
        "--cv",
        "2",
        "epochs=1",
        "widths=4",
        "--json",
    ]
    with shown():
        result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.stderr.startswith(f"checking settings\nreading {source}\n")
    told = json.loads(result.stdout)
    assert (told["test"]["samples"], len(told["folds"])) == (90, 2)
    evaluated = CliRunner().invoke(
        app, ["evaluate", str(out), "--utility", "tail-sensitive", "--json"]
    )
    assert json.loads(evaluated.stdout)["mean_utility"] == pytest.approx(
        told["test_tail_sensitive"]["mean_utility"]
    )
    printed = CliRunner().invoke(app, words[:-1], catch_exceptions=False).stdout
    plain = json.loads(CliRunner().invoke(app, ["evaluate", str(out), "--json"]).stdout)
    assert re.search(
        rf"accuracy +{plain['accuracy']:.3f}\s", printed
    )  # what `evaluate` prints by default
    assert re.search(rf"mean utility +{plain['mean_utility']:.3f}\s", printed)
    assert "corrected for the class prior of the training data" in printed
    assert rfdlc.compare(out, out)["accuracy"].difference == 0
    rfdlc.report(
        {"cv": out},
        rfdlc.Utility.tail_sensitive(rfdlc.Predictions.load(out).classes),
        tmp_path / "r.html",
    )
    assert "fold" not in (out / "decider.json").read_text()
    assert (
        CliRunner().invoke(app, words).exit_code == 0
    )  # continued: nothing was left to do
    assert CliRunner().invoke(app, [*words[:-2], "--force", "widths=8"]).exit_code == 0
    assert json.loads((out / "folds.json").read_text())["settings"] == {
        "epochs": "1",
        "widths": "8",
    }


def test_what_was_interrupted_says_how_to_go_on(tmp_path, monkeypatch):
    """A fold alone cannot be resumed: its data are in memory."""
    source, out = grouped(tmp_path / "t.csv"), tmp_path / "cv"
    words = [
        "train",
        str(source),
        "--method",
        "ce",
        "--out",
        str(out),
        "--cv",
        "2",
        "epochs=2",
        "widths=4",
    ]
    done, fit = [], trainer.Trainer.fit

    def stopped(self, runs):
        done.append(runs)
        if len(done) == 2:
            raise trainer.TrainingInterrupted(
                "stopped after epoch 1 of 2; continue with `rfdlc resume fold-1`"
            )
        return fit(self, runs)

    monkeypatch.setattr(trainer.Trainer, "fit", stopped)
    with shown():
        result = CliRunner().invoke(app, words)
    assert result.exit_code == 130
    assert "stopped in fold 2 of 2; do the same again to continue" in result.stderr
    assert "resume" not in result.stderr
    with pytest.raises(
        InputError,
        match=(
            "is a cross-validation that is not finished: run the command that began it"
        ),
    ):
        rfdlc.Predictions.load(out)
    assert CliRunner().invoke(app, words).exit_code == 0
    assert len(rfdlc.Predictions.load(out)) == 90


def test_folds_keep_copies_together():
    labels = np.repeat([0, 1], [20, 10])
    first = np.arange(30)
    first[[3, 7, 25]] = 2  # copies of sample 2
    fold = assign_folds(labels, 5, first=first)
    assert len(set(fold[[2, 3, 7, 25]])) == 1
    assert (np.bincount(fold[labels == 0], minlength=5) > 2).all()

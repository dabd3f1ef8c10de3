"""Sweeps: a grid and an array of jobs end with the same table, however often they are
killed.
"""

import json
import os
import random
import shutil
import signal
import time
from itertools import product

import numpy as np
import pytest
from typer.testing import CliRunner

import rfdlc
from rfdlc.cli import app
from rfdlc.cli import sweep as sweep_command
from rfdlc.errors import InputError
from rfdlc.training.plans import Plan, row_of
from rfdlc.training.sweep import names_of, summary

GRID = """
data = "{data}"
[settings]
epochs = 3
batch_size = 64
widths = [4]
calibration = "temperature"
checkpoint_every = 1
method = "ce"
preset = "features"
[grid]
method = ["ce", "la"]
learning_rate = [0.05, 0.2]
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Three overlapping classes of 120, 40 and 12 samples, with a test split."""
    rng, labels = np.random.default_rng(0), np.repeat(np.arange(3), [120, 40, 12])
    centres = rng.normal(size=(3, 6))
    file = tmp_path_factory.mktemp("data") / "blobs.npz"
    parts = {}
    for split in ("train", "test"):
        inputs = centres[labels] + rng.normal(size=(len(labels), 6))
        parts |= {f"{split}_x": inputs.astype(np.float32), f"{split}_y": labels}
    np.savez(file, **parts)
    return file


def written(tmp_path, text, data):
    file = tmp_path / "grid.toml"
    file.write_text(text.format(data=data))
    return file


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    rows = rfdlc.sweep(written(folder, GRID, data), folder / "grid")
    return {
        "folder": folder,
        "grid": (rows, (folder / "grid" / "table.csv").read_text()),
    }


def killed(work, seconds):
    """Run `work` in a process that is killed after a while; whether it ended before."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1] == 0


def test_killed_at_random_it_ends_with_the_same_table(data, tmp_path, undisturbed):
    file, rng = written(tmp_path, GRID, data), random.Random(0)
    for _ in range(3):
        killed(lambda: rfdlc.sweep(file, tmp_path / "out"), rng.uniform(0.1, 1.2))
    rows = rfdlc.sweep(file, tmp_path / "out")
    assert rows == undisturbed["grid"][0]
    assert (tmp_path / "out" / "table.csv").read_text() == undisturbed["grid"][1]


def test_a_grid_is_every_combination_as_trained_alone(data, tmp_path, undisturbed):
    rows = undisturbed["grid"][0]
    expected = [(method, rate) for method in ("ce", "la") for rate in (0.05, 0.2)]
    assert [(row["method"], row["learning_rate"]) for row in rows] == expected
    assert {row["state"] for row in rows} == {"finished"}
    plain = {
        "epochs": 3,
        "batch_size": 64,
        "widths": [4],
        "calibration": "temperature",
        "preset": "features",
    }
    rfdlc.train(data, "la", tmp_path / "alone", **plain, learning_rate=0.2)
    alone = row_of(tmp_path / "alone", {})
    assert alone["test_nll"] == rows[-1]["test_nll"]
    assert alone["held_out_accuracy"] == rows[-1]["held_out_accuracy"]
    found = summary(
        [{**row, "learning_rate": 0, "seed": number} for number, row in enumerate(rows)]
    )  # as of seeds
    means = {
        method: np.mean(
            [row["held_out_nll"] for row in rows if row["method"] == method]
        )
        for method in ("ce", "la")
    }
    assert [row["held_out_nll"] for row in found] == pytest.approx(
        sorted(means.values())
    )
    assert [row["seeds"] for row in found] == [2, 2]
    for row in found:
        own = [each["test_ece"] for each in rows if each["method"] == row["method"]]
        assert row["test_ece_deviation"] == pytest.approx(np.std(own, ddof=1))


def test_the_jobs_of_an_array_give_the_same_table(data, tmp_path, undisturbed):
    file, out = written(tmp_path, GRID, data), tmp_path / "out"
    rows = rfdlc.sweep(file, out, collect=True)
    assert {row["state"] for row in rows} == {"waiting"}
    rfdlc.sweep(file, out, runs_per_job=2, job=1)
    states = [row["state"] for row in rfdlc.sweep(file, out, collect=True)]
    assert states == ["waiting"] * 2 + ["finished"] * 2
    rfdlc.sweep(file, out, runs_per_job=2, job=0)
    assert rfdlc.sweep(file, out, collect=True) == undisturbed["grid"][0]
    assert (out / "table.csv").read_text() == undisturbed["grid"][1]


def test_a_run_that_diverges_does_not_end_the_sweep(data, tmp_path):
    text = GRID.replace("[0.05, 0.2]", "[1e30, 0.05]").replace('["ce", "la"]', '["ce"]')
    file = written(tmp_path, text, data)
    rows = rfdlc.sweep(file, tmp_path / "out")
    assert [row["state"] for row in rows] == ["diverged", "finished"]
    assert rfdlc.sweep(file, tmp_path / "out") == rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grid = 3", r"grid.toml: data: field required"),
        (
            'data = "d"\nmethod = "ce"',
            (
                r"grid.toml: method: is not known here: expected .*under \[settings\],"
                r" or as lists"
            ),
        ),
        ('data = "d"\n[grid]\nseed = []', r"grid.seed has no values"),
        ('data = "d', r"cannot be read as TOML"),
        (
            'data = "digits-lt"\n[grid]\nlearning_rat=[1]',
            r"setting 'learning_rat' is unknown.*learning_rate",
        ),
        (
            ('data = "digits-lt"\n[settings]\ntune="auto"\n[grid]\nseed=[1]'),
            r"tune and budget are for a run that is trained alone",
        ),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path, text, message):
    (tmp_path / "grid.toml").write_text(text)
    with pytest.raises(InputError, match=message):
        rfdlc.sweep(tmp_path / "grid.toml", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_shows_what_fits(data, tmp_path, undisturbed, monkeypatch):
    file, out = written(tmp_path, GRID, data), tmp_path / "out"
    shutil.copytree(undisturbed["folder"] / "grid", out)
    for width, shown in (("80", "loss  accuracy  ECE  test accuracy"), ("44", "loss")):
        monkeypatch.setenv("COLUMNS", width)
        done = CliRunner().invoke(
            app, ["sweep", str(file), "--out", str(out), "--collect"]
        )
        heading = next(
            line for line in done.stdout.splitlines() if "learning_rate" in line
        )
        assert " ".join(heading.split()) == " ".join(
            f"method learning_rate seeds {shown}".split()
        )
        assert "4 runs: 4 finished" in done.stdout
        said = " ".join(done.stdout.split()).partition("not shown, but in table.csv: ")[
            2
        ]
        left = ["accuracy", "ECE", "test accuracy"][: 3 if width == "44" else 0]
        assert said.startswith(
            ", ".join([*left, "tail-sensitive test utility", "test loss", "test ECE"])
        )
    monkeypatch.setenv("COLUMNS", "200")
    assert (
        "not shown"
        not in CliRunner()
        .invoke(app, ["sweep", str(file), "--out", str(out), "--collect"])
        .stdout
    )
    monkeypatch.setattr(sweep_command, "MOST_SHOWN", 3)
    done = CliRunner().invoke(app, ["sweep", str(file), "--out", str(out), "--collect"])
    assert "not shown, but in table.csv: 1 row\n" in done.stdout
    assert (
        len(
            json.loads(
                CliRunner()
                .invoke(app, ["sweep", str(file), "-o", str(out), "--json"])
                .stdout
            )["rows"]
        )
        == 4
    )


def test_the_table_has_deviations_over_seeds_and_says_what_its_utility_is(tmp_path):
    file, nll = tmp_path / "grid.toml", {"ce": (0.5, 0.7), "la_x": (0.25, 0.25)}
    file.write_text('data = "d"\n[grid]\nmethod = ["ce", "la_x"]\nseed = [0, 1]')
    for (method, values), seed in product(nll.items(), range(2)):
        folder = tmp_path / f"out/method={method},seed={seed}"
        folder.mkdir(parents=True)
        metrics = {
            "held_out_balanced": {"nll": values[seed]},
            "test": {"accuracy": 0.5},
        }
        metrics["test_tail_sensitive"] = {"mean_utility": 0.1}
        (folder / "metrics.json").write_text(json.dumps(metrics))
    words = ["sweep", str(file), "--out", str(tmp_path / "out"), "--collect"]
    shown = CliRunner().invoke(app, words, env={"COLUMNS": "120"}).stdout
    assert "± standard deviations over seeds" in shown
    rows = [" ".join(line.split()) for line in shown.splitlines()]
    assert "method seeds loss test accuracy tail-sensitive test utility" in rows
    assert rows.index("la_x 2 0.25 ± 0 0.5 ± 0 0.1 ± 0") + 1 == rows.index(
        "ce 2 0.6 ± 0.14 0.5 ± 0 0.1 ± 0"
    )
    assert (
        "test utility: of the decisions for a penalty of -1, others than"
        in " ".join(shown.split())
    )
    assert CliRunner().invoke(
        app, [*words, "--format", "markdown"]
    ).stdout.splitlines() == [
        (
            "| method | seeds | held-out loss | test accuracy | tail-sensitive test"
            " utility |"
        ),
        "|---|---:|---:|---:|---:|",
        r"| la\_x | 2 | 0.25 ± 0 | 0.5 ± 0 | 0.1 ± 0 |",
        "| ce | 2 | 0.6 ± 0.14 | 0.5 ± 0 | 0.1 ± 0 |",
    ]
    latex = CliRunner().invoke(app, [*words, "--format", "latex"]).stdout.splitlines()
    assert latex[0] == r"\begin{tabular}{lrrrr}"
    assert r"la\_x & 2 & 0.25 $\pm$ 0 & 0.5 $\pm$ 0 & 0.1 $\pm$ 0 \\" in latex
    means = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["means"]
    assert means == summary(rfdlc.sweep(file, tmp_path / "out", collect=True))
    assert means[1]["held_out_nll_deviation"] == pytest.approx(0.02**0.5)


def test_names_are_safe_and_different(data, tmp_path):
    assert names_of([{"utility": "../a b.csv"}, {"utility": "../a/b.csv"}]) == [
        "utility=.._a_b.csv-0",
        "utility=.._a_b.csv-1",
    ]
    file = written(tmp_path, GRID, data)
    plan = Plan.read(file)
    assert len(plan.changes()) == 4
    with pytest.raises(InputError, match="job is 4: expected 0 to 3"):
        rfdlc.sweep(file, tmp_path / "out", job=4)

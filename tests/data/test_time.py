"""Rows in the order of time: the newest are the test split, those before calibrate, the
oldest train.
"""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import rfdlc
from rfdlc.cli import app
from rfdlc.errors import InputError


@pytest.fixture
def file(tmp_path):
    """100 visits, shuffled, two on each day of 2024; the age grows with time."""
    days = np.datetime64("2024-01-01") + np.arange(100) // 2
    lines = [
        f"{day},{k},{'rare' if k % 5 == 0 else 'common'}" for k, day in enumerate(days)
    ]
    np.random.default_rng(0).shuffle(lines)
    (tmp_path / "t.csv").write_text("\n".join(["visit,age_feature,label", *lines]))
    return tmp_path / "t.csv"


def ages(split):
    return sorted(split.array[:, 0].astype(int).tolist())


def test_the_newest_rows_are_the_test_split(file):
    data = rfdlc.load(file, time="visit")
    assert (ages(data.train), ages(data.val), ages(data.test)) == (
        [*range(64)],
        [*range(64, 80)],
        [*range(80, 100)],
    )
    assert [column.name for column in data.encoder.columns] == ["age_feature"]
    told = (
        "by 'visit', 64 old rows train, 16 calibrate, the newest 20 test; it is not a"
        " feature"
    )
    assert told in data.notes
    data = rfdlc.load(file, time="visit", test_fraction=0.5)
    assert [len(split) for split in data.splits.values()] == [
        24,
        26,
        50,
    ]  # a day is on one side


def test_numbers_are_times_and_ties_stay_together(tmp_path):
    rows = [
        f"{year},{k % 7},{'ab'[k % 2]}"
        for k, year in enumerate([2019] * 50 + [2020] * 30 + [2021] * 20)
    ]
    (tmp_path / "t.csv").write_text("\n".join(["year,v,label", *rows]))
    assert [
        len(split)
        for split in rfdlc.load(tmp_path / "t.csv", time="year").splits.values()
    ] == [50, 30, 20]


def test_groups_on_both_sides_are_told(file):
    first, *rows = file.read_text().splitlines()
    file.write_text(
        "\n".join([f"{first},who", *(f"{row},p{row.endswith('rare')}" for row in rows)])
    )
    notes = rfdlc.load(file, time="visit", groups="who").notes
    assert (
        "2 groups of the split test are in the training split, too: its scores look"
        " better than they are" in notes
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time": "when"}, "column 'when' does not exist"),
        (
            {"time": "label", "target": "age_feature"},
            "column 'label' holds '(common|rare)': as time, expected dates",
        ),
        (
            {"time": "visit", "test_fraction": 0},
            "time 'visit' holds the newest rows out: expected test_fraction above 0",
        ),
        (
            {"time": "visit", "split": "age_feature"},
            "time 'visit' and split 'age_feature' both divide the rows",
        ),
    ],
)
def test_what_cannot_be_is_said(file, options, message):
    with pytest.raises(InputError, match=message):
        rfdlc.load(file, **options)


def test_empty_and_equal_times_are_refused(tmp_path):
    for cells, message in (
        (["", "1", "2"], "the time 'when' is missing in row 1"),
        (["1", "1", "2"], "2 different"),
    ):
        lines = [f"{cell},{k},{'ab'[k % 2]}" for k, cell in enumerate(cells * 1)]
        (tmp_path / "t.csv").write_text("\n".join(["when,v,label", *lines]))
        with pytest.raises(InputError, match=message):
            rfdlc.load(tmp_path / "t.csv", time="when")


def test_the_command_line(file, tmp_path):
    shown = (
        CliRunner()
        .invoke(
            app,
            ["inspect", str(file), "--time", "visit", "--json"],
            catch_exceptions=False,
        )
        .stdout
    )
    assert json.loads(shown)["splits"] == {"train": 64, "val": 16, "test": 20}
    words = ["train", str(file), "--time", "visit", "--out", str(tmp_path / "run")]
    with pytest.raises(
        InputError,
        match=(
            r"folds mix old and new rows: leave out time \(--time\) or folds \(--cv\)"
        ),
    ):
        CliRunner().invoke(app, [*words, "--cv", "3"], catch_exceptions=False)
    result = CliRunner().invoke(
        app, [*words, "backbone=mlp", "epochs=2", "widths=4"], catch_exceptions=False
    )
    assert result.exit_code == 0
    assert (
        sorted(rfdlc.Predictions.load(tmp_path / "run").targets.tolist())
        == [0] * 16 + [1] * 4
    )
    assert len(rfdlc.Predictions.load(tmp_path / "run" / "held-out.npz")) == 16

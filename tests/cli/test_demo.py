"""The demo: four ways to decide the same test images, whose numbers agree with one
another.
"""

import csv
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rfdlc.cli import app
from rfdlc.cli.demo import ABSTAINS, DECIDED, ENSEMBLE, LIKELIEST, MEANING, _said
from rfdlc.evaluation.comparison import Difference

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    result = CliRunner().invoke(
        app, ["demo", "--out", str(tmp_path_factory.mktemp("demo") / "runs"), "--json"]
    )
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_counts_and_utilities_agree(found):
    assert list(found["steps"]) == [LIKELIEST, DECIDED, ENSEMBLE, ABSTAINS]
    for step in found["steps"].values():
        assert step["right"] + step["costly"] + step["wrong"] + step["person"] == 450
        assert step["mean_utility"] == pytest.approx(
            (step["right"] - step["costly"] + 0.8 * step["person"]) / 450
        )
        low, high = step["interval"]
        assert low < step["mean_utility"] < high


def test_each_step_is_compared_with_the_one_before(found):
    steps = list(found["steps"].values())
    assert "added" not in steps[0]
    for before, after in pairwise(steps):
        added = after["added"]
        assert added["difference"] == pytest.approx(
            after["mean_utility"] - before["mean_utility"]
        )
        assert added["low"] < added["difference"] < added["high"]


def test_the_budget_is_kept_and_costs_bring_more_than_chance(found):
    steps = found["steps"]
    assert [step["person"] for step in steps.values()] == [0, 0, 0, 22]  # 5% of 450
    assert steps[DECIDED]["added"]["low"] > 0
    assert steps[ABSTAINS]["added"]["low"] > 0


def test_the_readme_shows_what_is_printed(found):
    """The sentences are the same, and the numbers are those of the committed results of
    the same seed.
    """
    with open(
        ROOT / "benchmarks/results/demo.csv", newline="", encoding="utf-8"
    ) as file:
        rows = {row["step"]: row for row in csv.DictReader(file) if row["seed"] == "0"}
    for number, (name, row) in enumerate(rows.items()):
        utility, low, high = (
            f"{float(row[key]):.3f}"
            for key in ("mean_utility", "utility_low", "utility_high")
        )
        cells = (
            f"{number} {name}",
            row["right"],
            row["costly"],
            row["person"],
            utility,
            f"{low} to {high}",
        )
        assert "   ".join(cells) in re.sub(" {3,}", "   ", README)
        if number:
            values = (
                float(row[f"added_{key}"]) for key in ("difference", "low", "high")
            )
            added = Difference("mean_utility", "", 0, 0, *values, p=1)
            assert f"\n{_said(number, name, added)}\n" in README
    assert set(rows) == set(found["steps"])


def test_the_readme_has_the_means_over_seeds():
    with open(
        ROOT / "benchmarks/results/demo.csv", newline="", encoding="utf-8"
    ) as file:
        rows = list(csv.DictReader(file))
    added = {
        name: [float(row["added_difference"]) for row in rows if row["step"] == name]
        for name in MEANING
    }
    one, two, three = (f"{sum(values) / len(values):.3f}" for values in added.values())
    assert f"the steps add {one}, {two} and {three}" in README


def test_a_gain_that_may_be_chance_is_called_so():
    clear, unclear = (
        Difference("mean_utility", "", 0.8, 0.83, 0.03, low, 0.05, 0.1)
        for low in (0.01, -0.01)
    )
    assert _said(2, ENSEMBLE, clear).endswith("+0.030 (+0.010 to +0.050)")
    assert _said(2, ENSEMBLE, unclear).endswith("; not measurable on these test images")


def test_the_table_is_for_people(tmp_path, monkeypatch, found):
    from rfdlc.cli import demo

    monkeypatch.setattr(demo, "decide_in_steps", lambda data, folder, seed: {})
    (tmp_path / "runs").mkdir()
    printed = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "runs")]).stdout
    assert "129 of digit 0 down to 6 of digit 9; 450 test images, 45 of each" in printed
    assert f"report: {tmp_path}/runs-2/report.html" in printed.replace("\n", "")

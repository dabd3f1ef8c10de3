"""Figures in the README are those of the committed results."""

import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

ROOT = Path(__file__).parent.parent


def test_the_table_is_that_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    sys.modules.pop("headline", None)
    import headline

    assert headline.block() in (ROOT / "README.md").read_text(encoding="utf-8"), (
        "run python benchmarks/headline.py --write"
    )


def test_the_sentence_on_tables_counts_those_of_the_results(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    sys.modules.pop("headline", None)
    import headline

    header = "problem,choices,metric,model,difference,standard_error,folds\n"
    # The difference to the best other model. The file has a standard error of 0.1: its
    # correction for overlapping folds and t with 14 degrees of freedom make it 0.27.
    cells = {
        ("a", "development"): (0.28, -0.05),
        ("b", "new"): (-0.26, -0.28),
        ("c", "new"): (0.0, 0.26),
        ("d", "new"): (1, 1),
    }
    with (tmp_path / "tabular.csv").open("w") as file:
        file.write(header)
        for (problem, choices), differences in cells.items():
            for metric, best in zip(("log loss", "one-hot"), differences, strict=True):
                file.write(f"{problem},{choices},{metric},RFDLCClassifier,,,\n")
                cell = f"{problem},{choices},{metric}"
                file.write(f"{cell},forest,{best + 0.5},0.1,3 x 5\n")
                file.write(f"{cell},boosting,{best},0.1,3 x 5\n")
    monkeypatch.setattr(headline, "RESULTS", tmp_path)
    assert (
        headline.chosen_and_new()
        == "Of the 4 tables, 1 were used for choices: better in 1, within chance in 1,"
        " worse in 0. On the 3 others it is better in 2, within chance in 3, worse in 1"
        " of 6."
    )
    page = tmp_path / "page.md"
    page.write_text(f"before\n{headline.START}\nold\n\nold\n{headline.END}\n\nafter\n")
    monkeypatch.setattr(headline, "lines", lambda: iter(["| new |"]))
    headline.write(page)
    assert (
        page.read_text() == f"before\n{headline.START}\n| new"
        f" |\n\n{headline.chosen_and_new()}\n{headline.END}\n\nafter\n"
    )


def test_the_leaderboard_is_that_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    sys.modules.pop("leaderboard", None)
    import leaderboard

    written = (ROOT / "docs/leaderboard.md").read_text(encoding="utf-8")
    assert written == leaderboard.page(), "run python benchmarks/leaderboard.py --write"
    drawn = (ROOT / "docs" / leaderboard.FIGURE).read_text(encoding="utf-8")
    for number, (title, *_) in enumerate(leaderboard.timed("cifar100-lt"), 1):
        assert f"{number}  {title}</text>" in drawn, (
            "run python benchmarks/leaderboard.py --write"
        )


def test_the_leaderboard_puts_measured_beside_published_and_invents_nothing(
    monkeypatch, tmp_path
):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    sys.modules.pop("leaderboard", None)
    import leaderboard

    header = (
        "data,row,method,seed,split,accuracy,tail,false_head_rate,ece,utility-1,"
        "seconds,parameters,commit\n"
    )
    cold = "rf-dlc-strong, cold refit, no shifts"
    rows = (
        'cifar100-lt,"balpoe, 200 epochs",balpoe,0,test,0.1,0.1,,,,,,old',
        (
            'cifar100-lt,"balpoe, 200'
            ' epochs",balpoe,0,test,0.55,0.38,0.3,,0.4,50,1400000,new'
        ),
        (  # another seed
            'cifar100-lt,"balpoe, 200'
            ' epochs",balpoe,1,test,0.57,0.40,0.3,,0.4,52,1400000,newer'
        ),
        'cifar100-lt,"balpoe, 200 epochs",balpoe,0,held out,0.9,0.9,,,,,,new',
        'cifar100-lt,"3 particles, 20 epochs",rf-dlc-strong,0,test,0.5,,,,,,,new',
        "cifar100-lt,rf-dlc-strong,rf-dlc-strong,1,test,0.9,,,,,,,new",
        *(
            f'cifar100-lt,"{cold}",rf-dlc-strong,{seed},test,0.{seed}5,,0.{seed},,,,,new'
            for seed in (1, 2, 5)
        ),
    )
    traded = "data,run,seed,penalty,accuracy,tail,false_head_rate\n"
    traded += "cifar100-lt,rf-dlc-strong-1,1,-0.2,0.5,0.4,0.1\n"
    traded += "cifar100-lt,rf-dlc-strong-2,2,-0.2,0.6,0.4,0.1\n"
    (tmp_path / "frontier-traded.csv").write_text(traded)
    (tmp_path / "frontier.csv").write_text(header + "\n".join(rows), encoding="utf-8")
    monkeypatch.setattr(leaderboard, "RESULTS", tmp_path)
    found = {
        row[0]: [c.replace("\xa0", " ") for c in row[1:]]
        for row in leaderboard.of_frontier("cifar100-lt")
    }
    assert found["BalPoE, 3 experts, 400 epochs"] == [
        "55.9 / - / -",
        "last epoch, 5 seeds",
        "-",
        "56.0 ± 1.4",
        "39.0 ± 1.4",
        "30.0 ± 0.0",
        "-",
        "0.400 ± 0.000",
        "51",
        "1.40 M",
        "2",
    ]
    beside = "\n".join(
        leaderboard.tables(list(leaderboard.of_frontier("cifar100-lt")))
    ).replace("\xa0", " ")
    assert (
        "| BalPoE, 3 experts, 400 epochs | 55.9 / - / - | 56.0 / 39.0 / 30.0"
        " (calibrated) | last epoch" in beside
    )
    assert (
        "| SHIKE, 3 experts | 56.3 / - / - | - | best epoch on the test set | - |"
        in beside
    )
    assert found["SHIKE, 3 experts"] == [
        "56.3 / - / -",
        "best epoch on the test set",
        *["-"] * 9,
    ]
    # Runs that are traded have another name now, and are below the row of their own,
    # the seeds of which are compared.
    traded = (
        "**`rf-dlc-strong`, cold refit, no shifts**, accuracy traded for FHR, from 20.0"
        " and 15.0"
    )
    assert found[traded][3] == "55.0 ± 7.1"
    titles = [line.split(" | ")[0].strip("| ") for line in beside.splitlines()]
    assert (
        titles.index(traded)
        == titles.index("**`rf-dlc-strong`, cold refit, no shifts**") + 1
    )
    assert (
        titles.index("**`rf-dlc-strong`**")
        < titles.index("BalPoE, 3 experts, 400 epochs")
        < titles.index(traded)
    )
    assert found["**`rf-dlc-strong`, 3 particles, 20 epochs**"] == [
        *["-"] * 3,
        "50.0",
        *["-"] * 6,
        "1",
    ]


def test_pages_state_comparisons_as_the_results_have_them(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in ("headline", "comparisons"):
        sys.modules.pop(name, None)
    import comparisons

    assert comparisons.missing() == []


def test_a_page_that_says_something_else_is_found(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    sys.modules.pop("comparisons", None)
    import comparisons

    (tmp_path / "page.md").write_text("A is better than B.")
    said = [("page.md", "A is better"), ("page.md", "A is within chance of B")]
    monkeypatch.setattr(comparisons, "ROOT", tmp_path)
    monkeypatch.setattr(comparisons, "STATED", (lambda: iter(said),))
    assert comparisons.missing() == said[1:]


def test_comparisons_count_both_ways_by_95_percent_intervals(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import comparing

    rng = np.random.default_rng(0)
    for shift, expected in ((0.0, (0.025, 0.95, 0.025)), (3.0, (0.98, 0.02, 0.0))):
        gains = shift + rng.normal(size=(2000, 5))
        words = [comparing.of_seeds(own.tolist()) for own in gains]
        shares = np.array(comparing.counted(words)) / len(words)
        assert shares == pytest.approx(expected, abs=0.02)
    # Corrected standard error of three times five folds: (1/15 + 1/4) ** 0.5 = 0.563.
    bound = 0.563 * stats.t.ppf(0.975, 14)
    for factor, expected in ((1.01, "better"), (0.99, "within chance")):
        assert comparing.of_folds(factor * bound, 1.0, 3, 5) == expected
    assert comparing.of_folds(-1.01 * bound, 1.0, 3, 5) == "worse"

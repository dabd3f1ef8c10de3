"""Figures in the README are those of the committed results."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_table_is_that_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    sys.modules.pop("headline", None)
    import headline

    assert headline.table() in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_leaderboard_is_that_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    sys.modules.pop("leaderboard", None)
    import leaderboard

    written = (ROOT / "docs/leaderboard.md").read_text(encoding="utf-8")
    assert written == leaderboard.page(), "run python benchmarks/leaderboard.py --write"
    drawn = (ROOT / "docs" / leaderboard.FIGURE).read_text(encoding="utf-8")
    for number, (title, *_) in enumerate(leaderboard.timed("cifar100-lt"), 1):
        assert f"{number}  {title}</text>" in drawn, "run python benchmarks/leaderboard.py --write"


def test_the_leaderboard_puts_measured_beside_published_and_invents_nothing(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    sys.modules.pop("leaderboard", None)
    import leaderboard

    header = "data,row,method,seed,split,accuracy,tail,false_head_rate,ece,utility-1,seconds,parameters,commit\n"
    rows = (
        'cifar100-lt,"balpoe, 200 epochs",balpoe,0,test,0.1,0.1,,,,,,old',
        'cifar100-lt,"balpoe, 200 epochs",balpoe,0,test,0.55,0.38,0.3,,0.4,50,1400000,new',
        'cifar100-lt,"balpoe, 200 epochs",balpoe,1,test,0.57,0.40,0.3,,0.4,52,1400000,newer',  # another seed
        'cifar100-lt,"balpoe, 200 epochs",balpoe,0,held out,0.9,0.9,,,,,,new',
        'cifar100-lt,"3 particles, 20 epochs",rf-dlc-strong,0,test,0.5,,,,,,,new',
    )
    (tmp_path / "frontier.csv").write_text(header + "\n".join(rows), encoding="utf-8")
    monkeypatch.setattr(leaderboard, "RESULTS", tmp_path)
    found = {row[0]: [c.replace("\xa0", " ") for c in row[1:]] for row in leaderboard.of_frontier("cifar100-lt")}
    assert found["BalPoE, 3 experts, 400 epochs"] == [
        "55.9 / - / -", "last epoch, 5 seeds", "-", "56.0 ± 1.4", "39.0 ± 1.4", "30.0 ± 0.0", "-", "0.400 ± 0.000",
        "51", "1.40 M", "2",
    ]  # fmt: skip
    beside = "\n".join(leaderboard.tables(list(leaderboard.of_frontier("cifar100-lt")))).replace("\xa0", " ")
    assert "| BalPoE, 3 experts, 400 epochs | 55.9 / - / - | 56.0 / 39.0 / 30.0 (calibrated) | last epoch" in beside
    assert "| SHIKE, 3 experts | 56.3 / - / - | - | best epoch on the test set | - |" in beside
    assert found["SHIKE, 3 experts"] == ["56.3 / - / -", "best epoch on the test set", *["-"] * 9]
    assert found["**`rf-dlc-strong`, 3 particles, 20 epochs**"] == [*["-"] * 3, "50.0", *["-"] * 6, "1"]

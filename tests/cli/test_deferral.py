"""Budgets, experts and unfamiliar samples on the command line."""

import csv
import json

import numpy as np
import pytest

from rfdlc import Decider, Predictions, Utility

NAMES = ("cat", "dog", "newt")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Logits of test and held-out samples, and a doctor who knows newts and confuses
    cats and dogs.
    """
    rng = np.random.default_rng(0)
    for name in ("test", "val"):
        y = rng.choice(3, 400, p=[0.6, 0.25, 0.15])
        z = rng.normal(size=(400, 3)) + 2 * np.eye(3)[y]
        Predictions(logits=z, targets=y, classes=NAMES).save(tmp_path / f"{name}.npz")
    (tmp_path / "doctor.csv").write_text(
        "true,newt,cat,dog,cost\ncat,0,0.8,0.2,0.05\nnewt,1,0,0,0.05\ndog,0,0.2,0.8,0.05\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_expert_and_budget(run, folder):
    words = ("--expert", "doctor.csv", "--budget", "5%")
    assert run("fit", "val.npz", *words, "-o", "d.json")[0] == 0
    words = ("test.npz", "--decider", "d.json", "--out", "actions.csv")
    code, out, err = run("decide", *words)
    assert (code, err) == (0, "")
    rows = table("actions.csv")
    handed = [row for row in rows if row["action"] == "doctor"]
    assert len(handed) == 20  # of 400
    assert {row["reason"] for row in handed} == {"expected utility"}
    over = [row for row in rows if row["reason"] == "over budget"]
    assert over
    told = (  # by no price of held-out samples
        "Budget: total 5%, handed over 5.0%; of all samples as one batch. "
    )
    assert f"{told}{len(over)} more samples are worth handing over." in out
    confusion = [[0.8, 0.2, 0], [0.2, 0.8, 0], [0, 0, 1]]
    utility = Utility.one_hot(NAMES).with_expert(
        "doctor", confusion=confusion, cost=0.05
    )
    val, test = Predictions.load("val.npz"), Predictions.load("test.npz")
    decider = Decider(utility).fit(val).fit_budget(val, budget=0.05)
    assert [row["action"] for row in rows] == [
        utility.actions[a] for a in decider.decide(test, batch=True)
    ]
    # The saved decider has the share, which evaluations keep to as one batch; it is not
    # asked for again.
    assert Decider.load("d.json").deferral.budget == decider.deferral.budget
    code, out, err = run("evaluate", "test.npz", "--decider", "d.json", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (
        found["abstention_rate"]
        == (decider.decide(test, batch=True) == 3).mean()
        == 0.05
    )
    code, out, _ = run("evaluate", "test.npz", "--decider", "d.json")
    assert "Budget: total 5%, handed over 5.0%; of all samples as one batch." in out
    assert found["utility_by_budget"]["0.05"] >= found["utility_by_budget"]["0.0"]


def test_budgets_by_action(run, folder):
    words = (
        "--abstain",
        "0.7",
        "--expert",
        "doctor.csv",
        "--budget",
        "total=10%,doctor=2%",
    )
    code, out, _ = run("decide", "test.npz", "--calibrate", "val.npz", *words, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["actions"]["doctor"] == 8
    assert found["actions"]["doctor"] + found["actions"]["abstain"] == 40
    assert found["budget"]["shares"] == {"total": 0.1, "doctor": 0.02}


def test_unfamiliar_samples(run, folder):
    words = ("--calibrate", "val.npz", "--abstain", "0.2", "--unfamiliar", "5%")
    code, out, err = run("decide", "test.npz", *words, "--out", "actions.csv")
    assert (code, err) == (0, "")
    flagged = [row for row in table("actions.csv") if row["reason"] == "unfamiliar"]
    assert {row["action"] for row in flagged} == {"abstain"}
    assert 4 <= len(flagged) <= 40
    assert (
        f"{len(flagged)} unfamiliar; false alarms among held-out samples, classes"
        " counting equally: all" in out
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--abstain", "0.5", "--budget", "5%"],
            "--budget 5% needs held-out predictions with targets",
        ),
        (
            ["--abstain", "0.5", "--unfamiliar", "5%"],
            "--unfamiliar 5% needs held-out predictions with targets",
        ),
        (
            ["--budget", "5%", "--calibrate", "val.npz"],
            "every action decides for a class: add one",
        ),
        (
            ["--abstain", "0.5", "--budget", "120%", "--calibrate", "val.npz"],
            "budget '120%': expected a share",
        ),
        (
            ["--abstain", "0.5", "--budget", "doc=5%", "--calibrate", "val.npz"],
            "budget of doc: expected total, abstain",
        ),
        (
            ["--expert", "bad.csv"],
            "'dog' is 0.5, 0.4, 0, with sum 0.9: expected shares of answers",
        ),
        (["--expert", "few.csv"], "no column for the answer newt"),
    ],
)
def test_bad_input_is_one_line(run, folder, words, message):
    (folder / "bad.csv").write_text(
        "true,cat,dog,newt\ncat,1,0,0\ndog,.5,.4,0\nnewt,0,0,1\n"
    )
    (folder / "few.csv").write_text("true,cat,dog\ncat,1,0\ndog,0,1\nnewt,0,1\n")
    code, out, err = run("decide", "test.npz", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_shares_are_read_with_spaces_and_named_by_their_option(run, folder):
    words = ("decide", "test.npz", "--calibrate", "val.npz", "--abstain", "0.6")
    assert run(*words, "--budget", "total=10%, abstain=2%")[0] == 0
    code, _, err = run(*words, "--unfamiliar", "200")
    assert code == 2
    assert "--unfamiliar '200': expected a share of the samples" in err


def test_suspects_do_not_replace_the_predictions(run, folder):
    (folder / "p.csv").write_text(
        "cat,dog,newt,target\n" + "0.9,0.1,0,dog\n0.1,0.9,0,dog\n" * 30
    )
    code, _, err = run("mislabelled", "p.csv", "--out", "p.csv")
    assert code == 2
    assert "p.csv: this file holds the predictions; choose another file" in err
    assert (folder / "p.csv").read_text().startswith("cat,dog,newt,target")


def test_samples_that_were_flagged_before_are_not_forgotten_silently(run, folder):
    lines = ["id,cat,dog,newt,action,expected_utility,reason,rfdlc_scores"]
    lines += [
        f"{i},0.6,0.3,0.1,abstain,0.5,{'unfamiliar' if i < 3 else 'expected-utility'},"
        for i in range(5)
    ]
    (folder / "decided.csv").write_text("\n".join(lines))
    code, _, err = run("decide", "decided.csv", "--abstain", "0.5")
    assert code == 0
    told = (
        "decided.csv: 3 samples are marked as unfamiliar and decided like others; to"
        " hand them over here, too: "
    )
    assert told + "`rfdlc predict RUN DATA --raw --keep COLUMN`" in " ".join(
        err.split()
    )


def test_budget_per_day(run, folder):
    test = Predictions.load("test.npz")
    p, days = Decider(Utility.one_hot(NAMES)).probabilities(test), np.arange(400) % 7
    times = [f"2026-03-0{day + 1}T23:0{day}" for day in days]
    lines = [
        "cat,dog,newt,seen_at",
        *(f"{a},{b},{c},{time}" for (a, b, c), time in zip(p, times, strict=True)),
    ]
    (folder / "probs.csv").write_text("\n".join(lines))
    words = ("probs.csv", "--abstain", "0.95", "--budget", "9/day", "--time", "seen_at")
    code, out, err = run("decide", *words, "--out", "actions.csv")
    assert code == 0, err
    handed = np.array([row["action"] == "abstain" for row in table("actions.csv")])
    for day in range(7):
        unsure = np.sort(p[days == day].max(axis=1))
        assert (
            p[handed & (days == day)].max(axis=1).max() <= unsure[8] < 0.95
        )  # the nine least sure of the day
        assert (handed & (days == day)).sum() == 9
    more = int((p.max(axis=1) < 0.95).sum()) - 63
    assert (
        f"Budget per day: total 9. Handed over: 9 on each of 7 days, 63 in all; {more}"
        " more samples" in " ".join(out.split())
    )
    code, out, err = run("decide", *words, "--json")
    assert json.loads(out)["budget"] == {
        "per_day": {"total": 9},
        "handed_over": {f"2026-03-0{d + 1}": 9 for d in range(7)},
    }
    for given, message in (
        (
            ("--budget", "9/day"),
            (
                "--budget 9/day needs the time of each sample: give its column by"
                " --time COLUMN"
            ),
        ),
        (
            ("--time", "seen_at"),
            "--time seen_at is for a budget per day: give --budget 50/day as well",
        ),
        (
            ("--budget", "9.5/day", "--time", "seen_at"),
            "expected samples per day, such as 50/day",
        ),
        (
            ("--budget", "9/week", "--time", "seen_at"),
            "expected samples per day, such as 50/day",
        ),
        (
            ("--budget", "9/day", "--time", "when"),
            "no column 'when', which --time names; it has cat, dog, newt, seen_at",
        ),
        (
            ("--budget", "9/day", "--time", "seen_at", "--out", "many/"),
            "is for one file",
        ),
    ):
        code, out, err = run("decide", "probs.csv", "--abstain", "0.95", *given)
        assert (code, out) == (2, "")
        assert message in " ".join(err.split())


def test_an_action_may_have_day_in_its_name(run, folder):
    (folder / "day_team.csv").write_text((folder / "doctor.csv").read_text())
    words = ("test.npz", "--calibrate", "val.npz", "--expert", "day_team.csv")
    code, out, err = run("decide", *words, "--budget", "day_team=5%")
    assert code == 0, err
    assert "Budget: day_team 5%, handed over 5.0%; of all samples as one batch." in out
    code, _, err = run("evaluate", *words, "--budget", "9/day")
    assert code == 2
    assert (
        "--budget 9/day is for `rfdlc decide` of one file, with --time COLUMN"
        in " ".join(err.split())
    )


def test_an_action_that_can_never_be_chosen_is_named(run, folder):
    costs = "true,cat,dog,newt,inspect\ncat,0,1,1,2\ndog,9,0,1,2\nnewt,50,50,0,2\n"
    (folder / "costs.csv").write_text(costs)
    code, _, err = run("decide", "test.npz", "--costs", "costs.csv")
    assert code == 0
    assert (
        "the action 'inspect' will never be chosen: 'newt' is at least as good whatever"
        " the true class is" in err
    )
    alarm = ("--calibrate", "val.npz", "--unfamiliar", "5%")
    assert (
        "never be chosen"
        not in run("decide", "test.npz", "--costs", "costs.csv", *alarm)[2]
    )  # they get it
    (folder / "costs.csv").write_text(costs.replace(",2", ",0.5"))
    assert "never be chosen" not in run("decide", "test.npz", "--costs", "costs.csv")[2]

"""`rfdlc watch`: a page and JSON from predictions, and errors that say what to give."""

import json

import numpy as np
import pandas
import pytest
from scipy.special import softmax

import rfdlc
from rfdlc import Classes, Decider, Predictions, Utility
from rfdlc.monitoring.designs import Labels, sampled
from rfdlc.monitoring.feedback import check_outcomes
from rfdlc.monitoring.monitor import Decided, Reference
from rfdlc.reporting.watch_page import write_page
from rfdlc.serving.backend import Answer
from rfdlc.serving.decision_log import DecisionLog

MIX = np.array([0.8, 0.15, 0.05])
CLASSES = Classes.from_counts([8000, 1500, 500], ["common", "<seldom>", "rare"])


def model(rng, samples, mix=MIX, sharp=1.0):
    y = rng.choice(3, samples, p=mix)
    return (
        sharp * (2 * (rng.normal(size=(samples, 3)) + 2 * np.eye(3)[y]) - 2)
        + np.log(MIX),
        y,
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("watch"), np.random.default_rng(0)
    z, y = model(rng, 4000)
    Predictions(logits=z, targets=y, classes=CLASSES).save(folder / "held.npz")
    Decider(Utility.one_hot(CLASSES), calibration=None, train_prior="train").save(
        folder / "decider.json"
    )
    shifted = np.concatenate(
        [model(rng, 2000)[0], model(rng, 2000, [0.6, 0.25, 0.15])[0]]
    )
    Predictions(logits=shifted, classes=CLASSES).save(folder / "shifted.npz")
    Predictions(logits=model(rng, 2000, sharp=0.5)[0], classes=CLASSES).save(
        folder / "blurred.npz"
    )
    return folder


def test_a_changed_prior_is_on_the_page_and_in_the_json(place, run):
    out = place / "w.html"
    code, shown, _ = run(
        "watch",
        place / "shifted.npz",
        "-r",
        place / "held.npz",
        "--decider",
        place / "decider.json",
        "-o",
        out,
        "--json",
    )
    found, page = json.loads(shown), out.read_text(encoding="utf-8")
    assert code == 3  # for cron and CI
    assert found["trusted"]
    assert 2000 < found["tests"]["class prior"]["alarm_at_sample"] <= 3000
    assert [window["samples"] for window in found["windows"]] == [1000] * 4
    assert found["windows"][-1]["prior"] == pytest.approx([0.6, 0.25, 0.15], abs=0.06)
    assert found["reference"]["prior"] == pytest.approx(MIX.tolist())
    rare = found["classes"][2]
    assert rare["samples_needed"] >= found["classes"][0]["samples_needed"] == 1000
    assert "The class prior has changed" in page
    assert "&lt;seldom&gt;" in page
    assert "<seldom>" not in page
    assert page.count("<svg") == 4
    assert "{{" not in page
    assert "<script" not in page


def test_without_an_alarm_the_exit_code_is_zero(place, run):
    Predictions(logits=model(np.random.default_rng(5), 2000)[0], classes=CLASSES).save(
        place / "same.npz"
    )
    given = (
        "watch",
        place / "same.npz",
        "-r",
        place / "held.npz",
        "--decider",
        place / "decider.json",
    )
    code, shown, _ = run(*given, "-o", place / "s.html")
    assert code == 0
    said = " ".join(shown.split())
    assert (
        "No change in what can be seen without labels (class mix, scores), as far as"
        " 2,000 samples show. Whether labels still mean the same cannot be seen without"
        " labels: send those of a random sample" in said
    )
    found = json.loads(run(*given, "-o", place / "s.html", "--json")[1])
    assert found["seen"] == ["class mix", "scores"]
    assert found["unseen"].startswith("Whether labels still mean the same cannot")
    assert found["tests"]["realised outcomes"] == {
        "alarm_at_sample": None,
        "false_alarms_per_month": 0.01,
        "tested": False,
    }
    assert "not tested: no labels" in (place / "s.html").read_text(encoding="utf-8")


def flipped(rng, y, share):
    """Labels of which a share has become another class."""
    other = (y + rng.integers(1, 3, len(y))) % 3
    return np.where(rng.random(len(y)) < share, other, y)


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_labels_of_predictions_show_what_scores_cannot(place, run, share):
    rng = np.random.default_rng(5)
    z, y = model(rng, 3000)
    y[1000:] = flipped(rng, y[1000:], share)  # the scores are as they were
    Predictions(logits=z, targets=y, classes=CLASSES).save(place / "labelled.npz")
    code, shown, _ = run(
        "watch",
        place / "labelled.npz",
        "-r",
        place / "held.npz",
        "--decider",
        place / "decider.json",
        "--json",
        "-o",
        place / "s.html",
    )
    found = json.loads(shown)
    alarms = {name: test["alarm_at_sample"] for name, test in found["tests"].items()}
    outcomes = alarms.pop("realised outcomes")
    assert not any(alarms.values())
    assert found["unseen"] is None
    assert found["seen"][-1] == "realised outcomes"
    if share:
        assert code == 3
        assert outcomes == 2000  # the end of the first window with flipped labels
        assert "Outcomes differ from what decisions promise" in found["verdict"][0]
        assert found["windows"][1]["outcomes"]["utility_gap"] == pytest.approx(
            share * (1 - 1 / 20), abs=0.05
        )
    else:
        assert (code, outcomes) == (0, None)
        assert found["verdict"][0].startswith("No change in what can be seen by scores")


def test_outcomes_raise_few_false_alarms(place):
    """Windows of labels that keep the promise, at a level 60 times that of a month."""
    held = Predictions.load(place / "held.npz")
    decider = Decider.load(place / "decider.json")
    reference = Reference.fit(decider, held)
    rng, false = np.random.default_rng(6), 0
    for _ in range(300):
        z, y = model(rng, 500)
        decisions = Decided.of(decider, z, logits=True)
        everyone = np.arange(500)
        sample = sampled(
            Labels(everyone, y, [None] * 500),
            decider.utility,
            decisions.actions,
            decisions.probabilities.max(axis=1),
            decisions.expected,
        )
        false += check_outcomes(
            reference, decisions, sample, 0, 500, per_month=500
        ).differs
    assert false <= 5  # 0.5% of 300, and two standard errors


def test_labels_of_some_predictions_are_not_used(place, run):
    z, y = model(np.random.default_rng(5), 2000)
    names = np.where(np.arange(2000) < 1500, "", np.array(CLASSES.names)[y])
    table = pandas.DataFrame(softmax(z, axis=1), columns=CLASSES.names)
    table.assign(target=names).to_csv(place / "labelled.csv", index=False)
    given = (
        "watch",
        place / "labelled.csv",
        "-r",
        place / "held.npz",
        "--decider",
        place / "decider.json",
    )
    code, shown, _ = run(*given, "-o", place / "s.html", "--json")
    found = json.loads(shown)
    assert code == 0
    assert found["unseen"] is not None
    assert "some samples have none" in found["verdict"][-1]


def test_what_label_shift_does_not_explain_is_not_trusted(place):
    out = place / "b.html"
    watched = rfdlc.watch(
        place / "blurred.npz",
        place / "held.npz",
        decider=place / "decider.json",
        window=500,
    )
    write_page(watched, out, "blurred.npz")
    assert not watched.monitor.trusted
    assert len(watched.windows) == 4
    assert watched.verdict[0].startswith(
        "The estimates below are not to be trusted: no class prior explains"
    )
    assert "not to be trusted" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["shifted.npz", "-r", "held.npz"],
            "give its decider, --decider FILE or RUN; `rfdlc fit",
        ),
        (
            ["shifted.npz", "-r", "shifted.npz", "--decider", "decider.json"],
            "need labels: a column 'target'",
        ),
        (
            [
                "shifted.npz",
                "-r",
                "held.npz",
                "--decider",
                "decider.json",
                "--window",
                "soon",
            ],
            "expected samples",
        ),
        (
            [
                "shifted.npz",
                "-r",
                "held.npz",
                "--decider",
                "decider.json",
                "--window",
                "1d",
            ],
            "needs the times of a log",
        ),
        (["none.npz", "-r", "held.npz", "--decider", "decider.json"], "no such file"),
    ],
)
def test_errors_say_what_to_give(place, run, words, message):
    given = [
        str(place / word) if word.endswith((".npz", ".json")) else word
        for word in words
    ]
    code, _, said = run("watch", *given, "-o", place / "e.html")
    assert code == 2
    assert message in said


@pytest.mark.parametrize("fitted", [False, True])
def test_a_table_that_predict_wrote_needs_raw_probabilities(
    place, run, fitted, tmp_path
):
    held, decider = (
        Predictions.load(place / "held.npz"),
        Decider.load(place / "decider.json"),
    )
    (decider.replace(calibration="temperature").fit(held) if fitted else decider).save(
        tmp_path / "decider.json"
    )
    p = np.full((100, 3), 1 / 3)
    Predictions(probabilities=p, classes=CLASSES, corrected=True).save(
        tmp_path / "p.npz"
    )
    given = (
        "watch",
        tmp_path / "p.npz",
        "-r",
        place / "held.npz",
        "--decider",
        tmp_path / "decider.json",
    )
    code, _, told = run(*given, "-o", tmp_path / "s.html")
    assert code == 2
    told = " ".join(told.split())
    assert (
        "calibrated and corrected already, and the decider would do so again: write raw"
        " ones (rfdlc predict" in told
    )
    assert "--calibrate" not in told


def test_predictions_are_not_a_log_to_recalibrate_from(place, run):
    given = (
        "recalibrate",
        place / "held.npz",
        "--decider",
        place / "decider.json",
        "-o",
        place / "new.json",
    )
    code, _, err = run(*given)
    assert code == 2
    assert (
        "held.npz: is not a log of decisions: expected a folder of `rfdlc serve"
        " --log-decisions`" in err
    )


def labelled_log(folder, samples, mix, share=1.0, flips=0.0):
    """A log of decisions for the prior MIX, and for a random share of them the label of
    a sample that has the prior `mix`.
    """
    decider = Decider(
        Utility.one_hot(CLASSES),
        calibration=None,
        train_prior="train",
        target_prior="train",
    )
    rng = np.random.default_rng(7)
    z, y = model(rng, samples, mix)
    y = flipped(rng, y, flips)
    chosen = rng.random(samples) < share
    log = DecisionLog(folder)
    log.add(
        Answer.of(
            decider,
            np.asarray(decider.probabilities(z, logits=True)),
            np.zeros(samples),
        )
    )
    log.close()
    ids = Predictions.load(folder).ids.tolist()
    lines = [
        json.dumps({"id": name, "label": CLASSES.names[c]})
        for name, c, used in zip(ids, y, chosen, strict=True)
        if used
    ]
    (folder / "feedback.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return decider


def test_recalibrate_writes_what_pays_and_nothing_else(tmp_path, run):
    live = tmp_path / "live.json"
    live.write_text("as it was")
    labelled_log(tmp_path / "same", 300, MIX)
    code, shown, _ = run("recalibrate", tmp_path / "same", "-o", live)
    assert code == 0  # a nightly job has nothing to do
    assert f"Not written, {live} is as before" in " ".join(shown.split())
    found = json.loads(run("recalibrate", tmp_path / "same", "-o", live, "--json")[1])
    assert not found["written"]
    assert found["options"][found["kind"]]["interval"][0] <= 0
    assert live.read_text() == "as it was"
    forced = json.loads(
        run("recalibrate", tmp_path / "same", "-o", live, "--force", "--json")[1]
    )
    assert forced["written"]
    assert Decider.load(live).utility.classes.names == CLASSES.names

    mix = [0.1, 0.2, 0.7]
    served = labelled_log(tmp_path / "moved", 3000, mix)
    moved = json.loads(run("recalibrate", tmp_path / "moved", "-o", live, "--json")[1])
    assert moved["written"]
    assert moved["options"][moved["kind"]]["pays"]
    z, y = model(
        np.random.default_rng(8), 20_000, mix
    )  # others of the same kind: it does pay
    right = [
        np.mean(Decided.of(each, z, logits=True).actions == y)
        for each in (served, Decider.load(live))
    ]
    assert right[1] - right[0] == pytest.approx(
        moved["options"][moved["kind"]]["gain"], abs=0.03
    )


def test_recalibrate_asks_how_labels_were_chosen(tmp_path, run):
    live = tmp_path / "live.json"
    mix = [0.1, 0.2, 0.7]
    labelled_log(tmp_path / "log", 4000, mix, share=0.2)
    given = ("recalibrate", tmp_path / "log", "-o", live)
    code, _, said = run(*given, "--force")
    assert code == 2
    assert not live.exists()
    assert "may have been sent because of the outcome: say how" in " ".join(
        said.split()
    )
    code, _, said = run(*given, "--labelled", "random:30%", "--force")
    assert code == 2
    assert not live.exists()
    assert "and the stated share is 0.3" in " ".join(said.split())
    found = json.loads(run(*given, "--labelled", "random:20%", "--json")[1])
    assert found["written"]
    assert found["labelled"] == "random:0.2"


def test_watch_tests_labels_of_a_stated_sample(place, tmp_path, run):
    labelled_log(tmp_path / "log", 4000, MIX, share=0.2, flips=0.3)
    given = ("watch", tmp_path / "log", "-r", place / "held.npz", "--json")
    page = ("-o", tmp_path / "w.html")
    code, shown, _ = run(*given, *page)
    unstated = json.loads(shown)
    assert code == 0
    assert unstated["unseen"] is not None
    assert "Labels are not used" in unstated["verdict"][-1]
    code, shown, _ = run(*given, *page, "--labelled", "random")
    stated = json.loads(shown)
    assert code == 3
    assert stated["unseen"] is None
    assert stated["tests"]["realised outcomes"]["alarm_at_sample"] <= 4000
    assert stated["tests"]["class prior"]["alarm_at_sample"] is None

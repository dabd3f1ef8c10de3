"""Scoring: values against naive loops, and files that scoring again does not change."""

import json

import numpy as np
import pytest
from scipy.special import softmax

from paper import results
from paper.folders import RECORD, copy_light
from paper.scoring import Point, Value, eq12, score
from rfdlc.decisions.decider import Decider
from rfdlc.decisions.utility import Utility
from rfdlc.probabilities.classes import Classes
from rfdlc.probabilities.predictions import Predictions

CLASSES = Classes.from_counts({"bird": 90, "airplane": 30, "ship": 10, "frog": 3})


def predictions(samples, seed, particles=2):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 4, samples)
    logits = rng.normal(size=(particles, samples, 4)).astype(np.float32)
    logits[:, np.arange(samples), y] += 1.5
    return Predictions(logits=logits, targets=y, classes=CLASSES)


@pytest.fixture
def run(tmp_path):
    """A run folder and one that calibrates it, as trainings leave them."""
    folders = {"run": ("predictions.npz", 400), "held": ("held-out.npz", 200)}
    for seed, (name, (file, samples)) in enumerate(folders.items()):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(
            json.dumps({"settings": {"combine": "mean-logits"}})
        )
        (folder / "environment.json").write_text("{}")
        (folder / RECORD).write_text("{}")
        CLASSES.to_json(folder / "classes.json")
        predictions(samples, seed).save(folder / file)
    return tmp_path / "run"


def value(values, decision, metric, split="test"):
    found = [
        f.value
        for f in values
        if (f.split, f.decision, f.metric) == (split, decision, metric)
    ]
    assert len(found) == 1
    return found[0]


def test_equation_12_rewards_penalties():
    """As the audit says: for the tail-sensitive utility it prefers the action with the
    most penalties, the head.
    """
    classes = Classes.from_counts(range(30, 0, -1))
    p = softmax(np.random.default_rng(0).normal(size=(500, 30)), axis=1)
    utility = Utility.tail_sensitive(classes)
    bayes = Decider(utility).decide(p)
    naive = [
        max(
            range(30),
            key=lambda d: sum(utility.matrix[y, d] * np.log(row[y]) for y in range(30)),
        )
        for row in p
    ]
    paper = eq12(p, utility)
    assert paper.tolist() == naive
    assert (
        paper == 0
    ).mean() > 0.9  # the most frequent class has the most penalties in its column
    assert (bayes == 0).mean() < 0.05
    assert (paper != bayes).mean() > 0.5
    one_hot = Utility.one_hot(30)
    assert eq12(p, one_hot).tolist() == p.argmax(axis=1).tolist()


def test_the_papers_decision_against_a_loop(run):
    values, _ = score(run)
    found = Predictions.load(run / "predictions.npz")
    right, false_head, tail_samples, gained = 0, 0, 0, 0.0
    rank = [0, 1, 2, 3]
    for logits, y in zip(found.scores.values.mean(0), found.targets, strict=True):
        decided = int(np.argmax(logits))
        right += decided == y
        tail_samples += y >= 2  # a head of half the classes
        false_head += y >= 2 and decided < 2
        gained += 1.0 if decided == y else (-1.0 if rank[decided] < rank[y] else 0.0)
    assert value(values, "argmax", "acc") == pytest.approx(100 * right / 400)
    assert value(values, "argmax", "fhr50") == pytest.approx(
        100 * false_head / tail_samples
    )
    assert value(values, "argmax", "utility") == pytest.approx(gained / 400)
    birds = found.targets == 0
    as_planes = found.scores.values.mean(0)[birds].argmax(1) == 1
    assert value(values, "argmax", "rate_bird-plane") == pytest.approx(
        100 * as_planes.mean()
    )


def test_expected_utility_against_a_loop(run):
    values, _ = score(run)
    found = Predictions.load(run / "predictions.npz")
    z = found.scores.values.astype(np.float64)
    p = (np.exp(z) / np.exp(z).sum(-1, keepdims=True)).mean(0)
    right = 0
    for each, y in zip(p, found.targets, strict=True):
        gains = [
            sum(each[t] * (1 if t == d else (-1 if d < t else 0)) for t in range(4))
            for d in range(4)
        ]
        right += int(np.argmax(gains)) == y
    assert value(values, "expected-utility", "acc") == pytest.approx(100 * right / 400)


def test_without_held_out_samples_nothing_is_calibrated(run):
    values, points = score(run)
    assert not [value for value in values if value.decision.startswith("calibrated")]
    assert {point.decision for point in points} == {"argmax"}


def test_calibrated_decisions_trade_accuracy_for_fewer_false_heads(run):
    values, points = score(run, run.parent / "held")
    rates = [
        value(values, f"calibrated {penalty}", "fhr")
        for penalty in ("0", "-0.25", "-1")
    ]
    assert rates[0] >= rates[1] >= rates[2]
    assert rates[0] > rates[2]
    assert value(values, "calibrated 0", "acc") == value(values, "calibrated", "acc")
    assert value(values, "calibrated", "ece") < value(
        values, "argmax", "ece"
    )  # mean logits are overconfident here
    weights = sum(
        p.weight
        for p in points
        if (p.decision, p.curve) == ("calibrated", "reliability")
    )
    assert weights == pytest.approx(1)


def test_a_light_copy_scores_as_the_folder_does(run):
    copy_light(run, run.parent / "light")
    whole, light = (
        score(run, run.parent / "held")[0],
        score(run.parent / "light", run.parent / "held")[0],
    )
    assert [(f.decision, f.metric) for f in whole] == [
        (f.decision, f.metric) for f in light
    ]
    np.testing.assert_allclose(
        [f.value for f in whole], [f.value for f in light], rtol=0.02, atol=0.6
    )


def test_writing_again_replaces_the_rows_of_a_run_and_keeps_the_others(tmp_path):
    provenance = dict.fromkeys(results.COLUMNS["runs"], "")

    def scored(run, seed, number):
        values = [Value("test", "argmax", "acc", number)]
        points = [Point("test", "argmax", "reliability", 0.5, 0.25, 1.0)]
        return results.Scored({**provenance, "run": run, "seed": seed}, values, points)

    results.write(
        tmp_path,
        "made",
        [scored("b", 0, 1.0), scored("a", 1, 3.0), scored("a", 0, 2.0)],
    )
    before = {path.name: path.read_text() for path in (tmp_path / "made").iterdir()}
    results.write(tmp_path, "made", [scored("a", 0, 2.0)])
    assert {
        path.name: path.read_text() for path in (tmp_path / "made").iterdir()
    } == before
    results.write(tmp_path, "made", [scored("a", 0, 4.0)])
    found = results.Results(tmp_path)
    assert found.by_seed("made", "a", "argmax", "acc") == {0: 4.0, 1: 3.0}
    assert found.mean("made", "a", "argmax", "acc").deviation == pytest.approx(
        np.std([4, 3], ddof=1)
    )
    assert results.finished(tmp_path, "made") == {("a", 0), ("a", 1), ("b", 0)}
    assert found.mean("made", "c", "argmax", "acc") is None
    assert len(results.curves("made", tmp_path)) == 3

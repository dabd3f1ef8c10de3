"""Labels that are probably wrong: found, ranked, fair to rare classes, and listed by
the command.
"""

import json

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import rfdlc
from rfdlc import find_mislabelled
from rfdlc.cli import app


def world(counts, seed=0, flips=20):
    """Gaussian classes and their exact posteriors, which are less certain of rare
    classes; some labels replaced.
    """
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(len(counts)), counts)
    centres = 3 * np.eye(len(counts))
    x = centres[y] + rng.normal(size=(len(y), len(counts)))
    log_p = np.log(counts) - ((x[:, None] - centres) ** 2).sum(-1) / 2
    p = np.exp(log_p - log_p.max(1, keepdims=True))
    labels, replaced = y.copy(), rng.choice(len(y), flips, replace=False)
    labels[replaced] = (y[replaced] + rng.integers(1, len(counts), flips)) % len(counts)
    return p / p.sum(1, keepdims=True), labels, labels != y


def test_evidence_is_what_the_formula_says():
    p, labels, _ = world([40, 20, 6], flips=5)
    found = find_mislabelled(p, labels)
    own = np.array([p[i, y] for i, y in enumerate(labels)])
    mean = [
        (own[labels == k].sum() + 2 * own.mean()) / ((labels == k).sum() + 2)
        for k in range(3)
    ]
    expected = {}
    for i, y in enumerate(labels):
        ratios = {k: np.log(p[i, k] / mean[k]) for k in range(3) if k != y}
        best = max(ratios, key=ratios.get)
        if (value := ratios[best] - np.log(p[i, y] / mean[y])) > 0:
            expected[i] = best, value
    assert found.rows.tolist() == sorted(expected, key=lambda i: -expected[i][1])
    assert found.suggested.tolist() == [expected[i][0] for i in found.rows]
    np.testing.assert_allclose(found.evidence, [expected[i][1] for i in found.rows])
    np.testing.assert_array_equal(found.labels, labels[found.rows])


def test_labels_may_be_names_where_classes_have_names():
    p, labels, _ = world([40, 20, 6], flips=5)
    names, expected = ["cat", "dog", "newt"], find_mislabelled(p, labels).rows.tolist()
    texts = np.array(names)[labels]
    assert find_mislabelled(p, texts, classes=names).rows.tolist() == expected
    assert (
        find_mislabelled(pd.DataFrame(p, columns=names), pd.Series(texts)).rows.tolist()
        == expected
    )
    mixed = pd.DataFrame(p[:, ::-1], columns=names[::-1])  # matched by name
    assert find_mislabelled(mixed, texts).rows.tolist() == expected
    fix = (
        r"target 'cat' is not a class: expected one of 0, 1, 2; if the classes have"
        r" names, .*classes=\[\.\.\.\]"
    )
    for scores, given in (
        (p, texts),
        (pd.DataFrame(p), texts),
        (p, texts.astype(object)),
    ):
        with pytest.raises(rfdlc.InputError, match=fix):
            find_mislabelled(scores, given)
    with pytest.raises(
        rfdlc.InputError,
        match=r"'bird' is not a class: expected one of cat, dog, newt$",
    ):
        find_mislabelled(p, ["bird"] * len(p), classes=names)


def test_replaced_labels_come_first_also_in_the_tail():
    """And right labels of rare classes are not flagged because the model is less
    certain of them.
    """
    hits, tail_hits, flagged = [], [], []
    for seed in range(10):
        p, labels, wrong = world([300, 100, 30], seed)
        found = find_mislabelled(p, labels)
        hits.append(wrong[found.rows[:20]].mean())
        tail = found.rows[labels[found.rows] == 2]
        tail_hits.append(wrong[tail[: (wrong & (labels == 2)).sum()]].mean())
        right = (labels == 2) & ~wrong
        flagged.append(np.isin(np.flatnonzero(right), found.rows).mean())
    assert np.mean(hits) > 0.85
    assert np.mean(tail_hits) > 0.85
    assert np.mean(flagged) < 0.2


def test_strong_suspects_are_as_many_as_confident_learning_counts():
    """Counted by a loop. The first ones are mostly wrong, the weak ones mostly right;
    right labels have few.
    """
    strong, weak, false = [], [], []
    for seed in range(10):
        p, labels, wrong = world([300, 100, 30], seed)
        found = find_mislabelled(p, labels)
        own = np.array([p[i, y] for i, y in enumerate(labels)])
        mean = [
            (own[labels == k].sum() + 2 * own.mean()) / ((labels == k).sum() + 2)
            for k in range(3)
        ]
        pairs = zip(found.rows, found.suggested, strict=True)
        assert (
            0.7 * (counted := sum(p[i, k] >= mean[k] for i, k in pairs))
            <= found.strong
            <= counted
        )
        strong.append(wrong[found.rows[: found.strong]].mean())
        weak.append(wrong[found.rows[found.strong :]].mean())
        false.append(find_mislabelled(*world([300, 100, 30], seed, flips=0)[:2]).strong)
    assert np.mean(strong) > 0.9
    assert np.mean(weak) < 0.4
    assert np.mean(false) < 2


def test_a_class_that_was_not_learned_has_no_strong_suspects():
    """Eight samples of a class that the model takes for others, as surely as these:
    none has a wrong label.
    """
    for seed in range(10):
        p, labels, wrong = world([300, 100, 30], seed)
        p = np.column_stack([p, np.full(len(p), 1e-7)])
        lost = np.random.default_rng(seed).choice(
            np.flatnonzero(~wrong & (p.max(1) > 0.9)), 8, replace=False
        )
        labels, before = labels.copy(), find_mislabelled(p[:, :3], labels)
        labels[lost] = 3
        found = find_mislabelled(p, labels)
        strong = found.rows[: found.strong]
        assert not np.isin(strong, lost).any()
        assert set(lost) <= set(found.rows)  # they are listed, with weak evidence
        assert found.strong >= 0.8 * before.strong
        assert (np.diff(found.evidence[: found.strong]) <= 0).all()
        assert (np.diff(found.evidence[found.strong :]) <= 0).all()


def weak_world(seed, share, sharpness=1.5):
    """Classes with a long tail that a model, too sure of itself, is right for in less
    than half of all cases.
    """
    rng = np.random.default_rng(seed)
    counts = np.array([200, 150, 110, 80, 60, 45, 35, 25])
    y, centres = np.repeat(np.arange(8), counts), rng.normal(size=(8, 8)) / 2
    x = centres[y] + rng.normal(size=(len(y), 8))
    log_p = sharpness * (np.log(counts) - ((x[:, None] - centres) ** 2).sum(-1) / 2)
    p = np.exp(log_p - log_p.max(1, keepdims=True))
    replaced = rng.random(len(y)) < share
    return (
        p / p.sum(1, keepdims=True),
        np.where(replaced, (y + rng.integers(1, 8, len(y))) % 8, y),
        replaced,
    )


@pytest.mark.parametrize("share", [0.03, 0.1])
def test_a_weak_model_has_strong_evidence_against_few_labels(share):
    """At most so many as are wrong, and mostly wrong ones; before, a third of all
    labels were called so.
    """
    strong, wrong = 0, 0
    for seed in range(10):
        p, labels, replaced = weak_world(seed, share)
        found = find_mislabelled(p, labels)
        assert found.accuracy == (p.argmax(1) == labels).mean() < 0.6
        assert found.strong <= replaced.sum()
        strong, wrong = (
            strong + found.strong,
            wrong + replaced[found.rows[: found.strong]].sum(),
        )
    assert wrong >= strong / 2


def test_the_command_says_how_often_the_model_is_right(tmp_path):
    for name, (p, labels, _) in {
        "weak": weak_world(0, 0.03),
        "good": world([300, 100, 30]),
    }.items():
        classes = [f"c{k}" for k in range(p.shape[1])]
        frame = pd.DataFrame(p, columns=classes).assign(
            target=np.array(classes)[labels]
        )
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
        words = ["mislabelled", str(tmp_path / f"{name}.csv")]
        shown = " ".join(
            CliRunner().invoke(app, words, catch_exceptions=False).stdout.split()
        )
        right = (p.argmax(1) == labels).mean()
        ending = ": most suspects will be its own mistakes." if name == "weak" else "."
        assert (
            f"The model is right for {right:.0%} of these samples, by their"
            f" labels{ending}" in shown
        )
        told = json.loads(
            CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False).stdout
        )
        assert told["accuracy"] == pytest.approx(right)


def test_the_command_shows_strong_suspects_and_writes_all(tmp_path):
    p, labels, _ = world([300, 100, 30])
    found, names = find_mislabelled(p, labels), ["a", "b", "c"]
    ids = [f"s{i}" for i in range(len(p))]
    frame = pd.DataFrame(p, columns=names).assign(
        id=ids, target=np.array(names)[labels]
    )
    frame.to_csv(tmp_path / "p.csv", index=False)
    words = ["mislabelled", str(tmp_path / "p.csv")]
    shown = CliRunner().invoke(app, words, catch_exceptions=False).stdout
    assert [
        line.split()[0] for line in shown.splitlines() if line.startswith("  s")
    ] == [ids[i] for i in found.rows[: found.strong]]
    weak = len(found.rows) - found.strong
    assert found.strong > 0 < weak
    told = (
        f"{found.strong} of 430 labels have strong evidence against them"
        f" ({found.strong} are shown), {weak} more"
    )
    assert f"{told} have weak evidence (--out FILE writes all)." in shown
    shown = (
        CliRunner()
        .invoke(app, [*words, "--out", str(tmp_path / "s.csv")], catch_exceptions=False)
        .stdout
    )
    assert f"{told} have weak evidence ({tmp_path / 's.csv'} has all)." in shown
    written = pd.read_csv(tmp_path / "s.csv")
    assert written["id"].tolist() == [ids[i] for i in found.rows]
    assert written["strong"].tolist() == [True] * found.strong + [False] * weak


def test_classes_with_too_few_samples_are_not_judged(tmp_path):
    p, labels, _ = world([50, 30, 10], flips=4)
    p, labels = np.vstack([p, [[0.9, 0.09, 0.01]] * 2]), np.append(labels, [3, 3])
    p = np.column_stack([p, np.full(len(p), 1e-6)])
    found = find_mislabelled(
        p / p.sum(1, keepdims=True), labels, classes=["a", "b", "c", "single"]
    )
    assert found.unjudged == ["single"]
    assert not set(found.rows) & {90, 91}
    assert (found.suggested < 3).all()
    frame = pd.DataFrame(p, columns=["a", "b", "c", "single"]).assign(
        id=[f"s{i}" for i in range(len(p))]
    )
    frame.assign(target=found.classes.select(labels)).to_csv(
        tmp_path / "p.csv", index=False
    )
    words = [
        "mislabelled",
        str(tmp_path / "p.csv"),
        "--out",
        str(tmp_path / "s.csv"),
        "--json",
    ]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    told = json.loads(result.stdout)
    assert [row["id"] for row in told["suspects"]] == [f"s{i}" for i in found.rows]
    assert told["not_judged"] == ["single"]
    assert pd.read_csv(tmp_path / "s.csv")["suggested"].tolist() == list(
        found.classes.select(found.suggested)
    )
    shown = CliRunner().invoke(app, words[:2], catch_exceptions=False).stdout
    assert told["strong"] == found.strong
    assert f"{found.strong} of 92 labels have strong evidence against them" in shown
    assert rfdlc.Mislabelled is type(found)

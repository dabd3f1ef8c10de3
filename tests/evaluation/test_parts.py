"""Evaluations of parts of the samples: by value, by class, and rates of actions that
are not classes.
"""

from dataclasses import replace

import numpy as np
import pandas
import pytest
import sklearn.metrics as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax

from rfdlc import Classes, Decider, InputError, Predictions, Utility, evaluate
from rfdlc.evaluation.merging import Sums
from rfdlc.evaluation.metrics import of_class
from rfdlc.evaluation.outcomes import Outcomes
from rfdlc.statistics.intervals import wilson

NAMES = ("flu", "cold", "tumour")
CLASSES = Classes.from_counts(
    dict(zip(NAMES, (90, 40, 5), strict=True)), groups={"mild": ["flu", "cold"]}
)
UTILITY = Utility(
    [[1, 0, 0, 0.5], [0, 1, 0, 0.5], [-4, -4, 1, 0.5]], CLASSES, [*NAMES, "refer"]
)


def scored(rng, samples=300, shares=(0.6, 0.3, 0.1), **known):
    y = rng.choice(3, samples, p=shares)
    z = 1.5 * np.eye(3)[y] + rng.normal(size=(samples, 3))
    return Predictions(logits=z, targets=y, classes=CLASSES, **known)


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.sampled_from([4, 32, 1024]))
def test_each_class_has_the_metrics_of_scikit_learn(seed, samples, parts):
    rng = np.random.default_rng(seed)
    y, p = (
        rng.integers(0, 3, samples),
        rng.multinomial(parts, [1 / 3] * 3, samples) / parts,
    )  # many are tied
    result = evaluate(p, y, utility=UTILITY)
    decided, rows = result.outcomes.decided, result.per_class()
    assert list(rows) == list(NAMES)
    for c, row in enumerate(rows.values()):
        own, found = y == c, decided == c
        share = {"zero_division": np.nan}
        expected = {
            "samples": own.sum(),
            "recall": reference.recall_score(own, found, **share),
            "precision": reference.precision_score(own, found, **share),
            "specificity": reference.recall_score(~own, ~found, **share),
            "auroc": (
                reference.roc_auc_score(own, p[:, c])
                if 0 < own.sum() < samples
                else np.nan
            ),
            "abstention_rate": (decided[own] == -1).mean() if own.any() else np.nan,
            "predicted_share": p[:, c].mean(),
            "observed_share": own.mean(),
        }
        defined = {
            name: None if np.isnan(value) else pytest.approx(value)
            for name, value in expected.items()
        }
        assert {name: row[name] for name in expected} == defined


def test_referred_samples_of_a_class_are_neither_recalled_nor_wrongly_decided():
    y = np.array([2, 2, 2, 2, 0])
    p = np.array(
        [
            [0.0, 0.0, 1.0],
            [0.5, 0.1, 0.4],
            [0.5, 0.1, 0.4],
            [1.0, 0.0, 0.0],
            [0.5, 0.1, 0.4],
        ]
    )
    row = evaluate(p, y, utility=UTILITY).per_class()["tumour"]
    assert (
        row["recall"],
        row["abstention_rate"],
        row["precision"],
        row["specificity"],
    ) == (0.25, 0.5, 1, 1)


def test_intervals_of_a_class_are_those_of_its_counts():
    result = evaluate(scored(np.random.default_rng(0)), utility=UTILITY)
    o, rows = result.outcomes, result.per_class()
    for c, name in enumerate(NAMES):
        both = np.sum((o.targets == c) & (o.decided == c))
        for metric, among in (
            ("recall", o.targets == c),
            ("precision", o.decided == c),
        ):
            assert rows[name]["intervals"][metric] == pytest.approx(
                wilson(both / among.sum(), among.sum())
            ), metric
        low, high = rows[name]["intervals"]["auroc"]
        assert low < rows[name]["auroc"] < high
    two = evaluate([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7]], [0, 1, 1]).per_class()["1"]
    assert (two["recall"], "recall" in two["intervals"], two["groups"]) == (
        1,
        False,
        None,
    )


def test_classes_of_few_groups_have_intervals_of_these_groups():
    """All samples of a class in one group tell nothing about other groups; in three,
    little.
    """
    y, groups = (
        np.repeat([0, 1, 2], 30),
        np.concatenate(
            [np.arange(30), np.full(30, 100), np.repeat([200, 201, 202], 10)]
        ),
    )
    p = np.eye(3)[np.where(np.arange(90) % 3 == 0, (y + 1) % 3, y)] * 0.7 + 0.1
    rows = evaluate(
        Predictions(probabilities=p, targets=y, groups=groups, classes=CLASSES)
    ).per_class()
    assert [row["groups"] for row in rows.values()] == [30, 1, 3]
    assert rows["flu"]["intervals"]["recall"] == pytest.approx(wilson(2 / 3, 30))
    assert "recall" not in rows["cold"]["intervals"]
    assert ["auroc" in row["intervals"] for row in rows.values()] == [
        False,
        False,
        False,
    ]  # others are in 4 groups


def test_intervals_of_a_class_cover():
    """Patients differ: each has a recall and an offset of the score of its own. Samples
    alone cover too rarely.
    """
    rng, covered = np.random.default_rng(1), {"recall": [], "auroc": []}
    utility, patients = Utility.one_hot(2), 60

    def draw(patients):
        place = np.repeat(np.arange(patients), rng.integers(1, 12, patients))
        y = (np.arange(patients) % 3 == 0)[place].astype(np.int64)
        margin = (
            (2 * y - 1)
            + rng.normal(size=patients)[place]
            + 0.5 * rng.normal(size=len(y))
        )
        p = softmax(np.stack([np.zeros(len(y)), margin], axis=1), axis=1)
        return replace(
            Outcomes.of(utility, y, p.argmax(axis=1), p), sample_groups=place
        )

    truth = {name: part.value for name, part in of_class(draw(60_000), 1).items()}
    for _ in range(200):
        outcomes = draw(patients)
        by_group, plain = (
            of_class(outcomes, 1),
            of_class(replace(outcomes, sample_groups=None), 1),
        )
        for name, found in covered.items():
            bounds = [part[name].interval() for part in (plain, by_group)]
            found.append([low <= truth[name] <= high for low, high in bounds])
    for name, found in covered.items():
        plain, by_group = np.mean(found, axis=0)
        assert plain < 0.85, name
        assert 0.88 < by_group < 0.995, name


@pytest.mark.parametrize("grouped", [False, True])
def test_a_part_is_evaluated_as_if_it_were_a_file_of_its_own(grouped):
    rng = np.random.default_rng(2)
    groups = rng.integers(0, 80, 300) if grouped else None
    predictions, sex = (
        scored(rng, groups=groups),
        rng.choice(["f", "m", "x"], 300, p=[0.3, 0.6, 0.1]),
    )
    decider = Decider(UTILITY).fit(scored(rng))
    found = evaluate(predictions, decider=decider, groups=[("tumour", "refer")]).by(sex)
    assert list(found) == ["m", "f", "x"]
    for value, part in found.items():
        rows = sex == value
        alone = Predictions(
            logits=predictions.scores.values[:, rows],
            targets=predictions.targets[rows],
            classes=CLASSES,
            groups=groups[rows] if grouped else None,
        )
        expected = evaluate(alone, decider=decider, groups=[("tumour", "refer")])
        assert part.samples == expected.samples == rows.sum()
        assert part.flat() == pytest.approx(expected.flat(), nan_ok=True)
        assert part.intervals.keys() == expected.intervals.keys()
        for name, bounds in expected.intervals.items():
            assert part.intervals[name] == pytest.approx(bounds, abs=1e-12), name
        assert part.groups == expected.groups
        assert part.per_class().keys() == expected.per_class().keys()


@settings(max_examples=30)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=30))
def test_parts_add_up(values):
    rng = np.random.default_rng(len(values))
    result = evaluate(
        softmax(rng.normal(size=(len(values), 3)), axis=1),
        rng.integers(0, 3, len(values)),
    )
    parts = result.by(values)
    sizes = [part.samples for part in parts.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert {value: values.count(value) for value in values} == {
        value: part.samples for value, part in parts.items()
    }
    for name in ("accuracy", "mean_utility", "nll", "brier"):
        total = sum(part.samples * getattr(part, name) for part in parts.values())
        assert total / len(values) == pytest.approx(getattr(result, name)), name


def test_values_are_of_any_kind_and_one_per_sample():
    result = evaluate([[0.9, 0.1], [0.4, 0.6], [0.7, 0.3]], [0, 1, 1])
    assert list(result.by(pandas.Series(["f", "m", "m"]))) == ["m", "f"]
    assert list(result.by(np.array(["f", None, "f"], dtype=object))) == ["f", "None"]
    assert list(result.by(np.array([True, False, False]))) == [False, True]
    assert list(result.by([2020, 2021, 2021])) == [2021, 2020]
    with pytest.raises(
        InputError, match=r"values have shape \(2,\): expected one per sample, \(3,\)"
    ):
        result.by(["f", "m"])


def test_sums_have_no_parts():
    decider = Decider(UTILITY)
    sums = Sums.of(evaluate(scored(np.random.default_rng(3)), decider=decider).outcomes)
    for ask in (lambda e: e.by([0] * 300), lambda e: e.per_class()):
        with pytest.raises(
            InputError, match="keeps no samples: evaluate a file in memory"
        ):
            ask(sums.evaluation(decider, (), "decision-probability"))


def test_rates_of_actions_that_are_not_classes():
    predictions, decider = scored(np.random.default_rng(4)), Decider(UTILITY)
    pairs = [
        ("tumour", "refer"),
        ("tumour", "mild"),
        ("tumour", "tumour"),
        ("mild", "refer"),
    ]
    result = evaluate(predictions, decider=decider, groups=pairs)
    y, actions = predictions.targets, decider.decide(predictions)
    tumour, referred = y == 2, actions == 3
    assert result.group_rates == {
        "tumour as refer": referred[tumour].mean(),
        "tumour as mild": (actions[tumour] < 2).mean(),
        "tumour as tumour": (actions[tumour] == 2).mean(),
        "mild as refer": referred[~tumour].mean(),
    }
    assert sum([*result.group_rates.values()][:3]) == pytest.approx(1)
    assert 0 < result.group_rates["tumour as refer"] < 1
    assert result.intervals["group_rates.tumour as refer"] == pytest.approx(
        wilson(referred[tumour].mean(), tumour.sum())
    )
    summed = Sums.of(result.outcomes).evaluation(decider, pairs, "decision-probability")
    assert summed.group_rates == pytest.approx(result.group_rates)
    for pair, message in (
        (
            ("tumour", "refr"),
            (
                "'refr' is unknown: expected one of mild, flu, cold, tumour, refer; did"
                " you mean 'refer'"
            ),
        ),
        (
            ("refer", "tumour"),
            "'refer' is unknown: expected one of mild, flu, cold, tumour",
        ),
    ):
        with pytest.raises(InputError, match=message):
            evaluate(predictions, decider=decider, groups=[pair])


def test_a_group_of_classes_goes_before_an_action_of_its_name():
    classes = Classes(NAMES, groups={"refer": ["flu", "cold"]})
    utility = Utility(UTILITY.matrix, classes, UTILITY.actions)
    assert utility.deciding("refer").tolist() == [0, 1]
    assert UTILITY.deciding("refer").tolist() == [3]

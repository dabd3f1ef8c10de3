"""Metrics from sums equal those of all samples in memory; rankings are within the
stated error.
"""

import json
import warnings

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv
from pyarrow import parquet as pq

from rfdlc import Classes, Decider, InputError, Utility, evaluate, evaluate_lake
from rfdlc.evaluation.evaluate import entries
from rfdlc.evaluation.merging import Sums
from rfdlc.evaluation.outcomes import observe
from rfdlc.lakes.reading import Lake

CLASSES = Classes(
    ("cat", "dog", "newt", "owl"), (500, 120, 30, 5), {"pets": ("cat", "dog")}
)
RANKED = ("error_auc", "risk_coverage_area")
NOT_MERGED = {"utility_by_budget", "ece_debiased"}


def samples(count=5000):
    rng = np.random.default_rng(0)
    z = rng.normal(size=(count, 4)) * 2
    y = np.array([rng.choice(4, p=np.exp(row) / np.exp(row).sum()) for row in z * 0.8])
    p = np.exp(z)
    return p / p.sum(axis=1, keepdims=True), y


@pytest.fixture(scope="module")
def lake(tmp_path_factory):
    folder, (p, y) = tmp_path_factory.mktemp("lake"), samples()
    for number, rows in enumerate(np.array_split(np.arange(len(y)), 5)):
        place = folder / f"part={number % 2}"
        place.mkdir(exist_ok=True)
        columns = dict(zip(CLASSES.names, p[rows].T, strict=True)) | {
            "target": CLASSES.select(y[rows])
        }
        pq.write_table(
            pa.table(columns), place / f"{number}.parquet", row_group_size=300
        )
    return folder


def deciders():
    p, y = samples(400)
    utility = Utility(np.eye(4) - 0.3 * np.arange(4)[:, None], CLASSES)
    plain = Decider(utility, train_prior="train", target_prior="uniform")
    return {
        "plain": Decider(utility),
        "corrected": plain,
        "abstains": Decider(utility.with_abstain(0.2)),
        "coverage": (
            Decider(utility, calibration="temperature").fit_sets(p, y, coverage=0.8)
        ),
        "coverage, abstains": (
            Decider(utility.with_abstain(0.2)).fit_sets(p, y, coverage=0.8)
        ),
        "u65": Decider(utility, sets="u65"),
    }


@pytest.mark.parametrize("name", deciders())
def test_equals_memory(lake, name):
    decider, (p, y) = deciders()[name], samples()
    rates = [("owl", "pets")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # samples that fitted sets are among these
        expected = evaluate(p, y, decider, groups=rates)
    found = evaluate_lake(lake, decider, groups=rates)
    assert found.samples == len(y)
    numbers = {
        each.name: each
        for each in entries(expected.values)
        if each.metric.name not in NOT_MERGED
    }
    assert found.flat().keys() == numbers.keys()
    for key, value in found.flat().items():
        exact = numbers[key].metric.name not in RANKED
        assert value == pytest.approx(
            numbers[key].value, abs=1e-10 if exact else 1e-4, nan_ok=True
        ), key
    for key in (
        "accuracy",
        "mean_utility",
        "mean_regret",
        "nll",
        "brier",
        "utility_gap",
    ):
        np.testing.assert_allclose(
            found.intervals[key], expected.intervals[key], atol=0.004
        )
    assert found.promise.startswith("Promised minus realised utility")


def test_the_stated_error_of_the_ranking_holds():
    """Certainties that many samples nearly share, so that bins matter."""
    rng, (p, y) = np.random.default_rng(0), samples(3000)
    decider = deciders()["plain"]
    for certain in (
        0.999 + 1e-5 * rng.random(3000),
        1 - 10 ** rng.uniform(-12, -1, 3000),
        rng.random(3000),
    ):
        q = np.full((3000, 4), (1 - certain)[:, None] / 3)
        q[np.arange(3000), p.argmax(axis=1)] = certain
        scores, targets = decider.model.read_labelled(q, y)
        sums = Sums.of(observe(scores, targets, decider))
        exact = evaluate(q, y, decider).error_auc
        assert (
            abs(sums.evaluation(decider, (), "decision-probability").error_auc - exact)
            <= sums.auc_error + 1e-12
        )


def test_command(lake, capsys, monkeypatch):
    from rfdlc.cli import main

    monkeypatch.setattr(
        "sys.argv", ["rfdlc", "evaluate", f"{lake}/*/*.parquet", "--json"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    p, y = samples()
    assert json.loads(capsys.readouterr().out)["accuracy"] == pytest.approx(
        evaluate(p, y).accuracy
    )


def test_which_folders_are_evaluated_from_sums(lake, tmp_path):
    """Few Parquet files are read at once, whatever their names; partitions, globs and
    CSV files are not.
    """
    from rfdlc.cli.lake import large_lake

    flat = tmp_path / "flat"
    flat.mkdir()
    table = pa.table({"a": [0.5], "b": [0.5]})
    pq.write_table(table, flat / "part.0.parquet")
    assert large_lake(str(flat)) is None
    assert len(large_lake(f"{flat}/*.parquet").units) == 1
    assert large_lake(str(lake)) is not None
    csv.write_csv(table, flat / "1.csv")
    assert len(large_lake(str(flat)).units) == 2


def test_wrong_groups_are_named_before_a_row_is_read(lake, monkeypatch):
    monkeypatch.setattr(Lake, "batches", None)
    with pytest.raises(InputError, match=r"group or class 'fish' is unknown"):
        evaluate_lake(lake, deciders()["plain"], groups=[("owl", "fish")])


def test_errors_name_the_file(tmp_path):
    (tmp_path / "a.csv").write_text(
        "cat,dog,newt,owl,target\n1,0,0,0,cat\n1,0,0,0,fox\n"
    )
    with pytest.raises(
        InputError, match=r"a.csv, rows from 0 on: target 'fox' is not a class"
    ):
        evaluate_lake(tmp_path, deciders()["plain"])
    (tmp_path / "a.csv").write_text("cat,dog,newt,owl\n1,0,0,0\n")
    with pytest.raises(InputError, match="no column target"):
        evaluate_lake(tmp_path, deciders()["plain"])

"""Sets of a run are the same in the library, in an exported file, behind the server and
in tables of predictions.
"""

import csv
import json
import shutil

import numpy as np
import pytest
import torch

import rfdlc
from rfdlc.decisions.sets import SetUtility
from rfdlc.exporting.graph import CoverageHead, SetUtilityHead
from rfdlc.serving.backend import open_backend


@pytest.mark.usefixtures("quick_exports")
@pytest.mark.parametrize("kind", ["macro", "u80"])
def test_everywhere_alike(run, samples, tmp_path, start, kind):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    decider = rfdlc.Decider.load(folder)
    held = rfdlc.Predictions.load(folder / "held-out.npz")
    decider = (
        decider.replace(sets=kind)
        if kind == "u80"
        else decider.fit_sets(held, kind=kind, coverage=0.95)
    )
    decider.save(folder / "decider.json")
    model = rfdlc.Model.load(folder, device="cpu")
    members = model.decider.decide_sets(model.predict(samples))
    assert len(np.unique(members.sum(axis=1))) > 1
    names = [list(model.classes.select(np.flatnonzero(each))) for each in members]

    exported = rfdlc.export(folder, tmp_path / "model.onnx")
    assert exported.parity.sets_changed == 0
    graph = rfdlc.OnnxModel.load(exported.path)
    assert np.array_equal(graph.decide(samples).sets, members)
    other = rfdlc.Utility.one_hot(model.classes).with_abstain(0.8)
    expected = model.decider.replace(utility=other).decide_sets(model.predict(samples))
    assert np.array_equal(graph.decide(samples, other).sets, expected)
    if kind == "macro":
        with start(open_backend(exported.path)) as served:
            assert rfdlc.Client(served.url).decide(arrays=samples)["set"] == names
        assert open_backend(folder).decider.sets == decider.sets
        rfdlc.predict(folder, "digits-lt", tmp_path / "table.csv")
        with open(tmp_path / "table.csv", newline="") as file:
            rows = list(csv.DictReader(file))[: len(samples)]
        assert [json.loads(row["set"]) for row in rows] == names
        assert [float(row["set_size"]) for row in rows] == members.sum(axis=1).tolist()
        again = rfdlc.Predictions.load(
            tmp_path / "table.csv"
        )  # the columns of sets are not classes
        assert again.classes.names == model.classes.names


def test_sets_that_a_graph_cannot_have(run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    decider = rfdlc.Decider.load(folder)
    decider.fit_sets(
        rfdlc.Predictions.load(folder / "held-out.npz"), randomised=True
    ).save(folder / "decider.json")
    with pytest.raises(
        rfdlc.InputError, match="sets are randomised, but an exported graph is not"
    ):
        rfdlc.export(folder, tmp_path / "model.onnx")
    decider.replace(sets="u65").save(folder / "decider.json")
    with pytest.raises(rfdlc.InputError, match="export without utility_input"):
        rfdlc.export(folder, tmp_path / "model.onnx", utility_input=True)


def test_torch_and_numpy_give_the_same_sets():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.full(8, 0.5), 2000).astype(np.float32)
    plain = rfdlc.Decider(rfdlc.Utility.one_hot(8), calibration=None)
    few = [
        {"kind": "macro", "max_size": 2},
        {"coverage": 0.3, "empty": True, "max_size": 1},
        {"max_size": 9},
    ]
    for options in (
        {"kind": "class"},
        {"kind": "macro"},
        {"coverage": 0.3},
        {"coverage": 0.3, "empty": True},
        *few,
    ):
        sets = plain.fit_sets(p, rng.integers(8, size=2000), **options).sets
        found = CoverageHead(sets, plain.utility)(torch.tensor(p)).numpy()
        assert np.array_equal(found, sets.members(p, plain.utility))
    matrix = rng.normal(size=(8, 8)) + 3 * np.eye(8)
    matrix[2, 5] = -1e7
    actions = rfdlc.Utility(matrix).with_abstain(1.2)
    fewer = rfdlc.Utility(
        matrix[:, :7], [str(c) for c in range(8)], [str(c) for c in range(7)]
    )
    for utility in (plain.utility, actions, fewer):
        for discount in ("u65", "u80", (1.0, 0.9, 0.85), (1.0,)):
            sets = SetUtility.of(discount, 8)
            found = SetUtilityHead(sets, utility)(torch.tensor(p)).numpy()
            assert np.array_equal(found, sets.members(p, utility))

"""Skewed features of tables: logarithms for linear models and networks, chosen on
training rows, kept in the model.
"""

from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.special import softmax
from scipy.stats import skew
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier

import rfdlc
from rfdlc import InputError, RFDLCClassifier
from rfdlc.training import tabular
from rfdlc.training.networks.mixture import sees_logs
from rfdlc.training.skewed import UNITS, find_skewed, signed_log, skewness


@pytest.fixture(autouse=True)
def small_candidates(monkeypatch):
    monkeypatch.setattr(tabular, "TREES", 8)
    monkeypatch.setattr(tabular, "ITERATIONS", 5)
    monkeypatch.setattr(tabular, "SMALL", 0)  # one perceptron
    monkeypatch.setattr(
        "sklearn.neural_network.MLPClassifier", partial(MLPClassifier, max_iter=20)
    )


def payments(samples, seed):
    """Payments with three classes, two of them rare: features, logarithms, true
    probabilities (N, 3) and labels.

    Log odds are linear in the logarithms, so that a logistic regression on these is the
    best that can be fitted.
    """
    rng = np.random.default_rng(seed)
    amount, seconds = (
        np.exp(rng.normal(3, 2, samples)),
        np.exp(rng.normal(0, 1.5, samples)),
    )
    logs = np.stack([np.log(amount), np.log(seconds)], axis=1)
    fraud, error = (
        -4 + 0.9 * (logs[:, 0] - 3) - 0.5 * logs[:, 1],
        -4 - 0.8 * (logs[:, 0] - 3) + 0.8 * logs[:, 1],
    )
    p = softmax(np.stack([np.zeros(samples), fraud, error], axis=1), axis=1)
    return (
        np.stack([amount, seconds], axis=1),
        logs,
        p,
        (p.cumsum(axis=1) < rng.random((samples, 1))).sum(axis=1),
    )


def log_loss(p, y):
    return -float(np.mean(np.log(p[np.arange(len(y)), y])))


def standardised(x):
    """Features in 32 bits, and what 0 became."""
    mean, std = x.mean(axis=0), x.std(axis=0)
    return ((x - mean) / std).astype(np.float32), (-mean / std).astype(np.float32)


def naive_logs(x, zero):
    """Column by column and candidate by candidate; None where a column stays as
    it is.
    """
    found = []
    for column, origin in zip(
        x.astype(np.float64).T, zero.astype(np.float64), strict=True
    ):
        before, best = skew(column), None
        for start in (origin, column.min() if before > 0 else column.max()):
            moved = column - start
            for quantile in UNITS:
                unit = np.quantile(np.abs(moved[moved != 0]), quantile)
                logged = np.array(
                    [np.sign(d) * np.log(1 + abs(d) / unit) for d in moved]
                )
                if best is None or abs(skew(logged)) < abs(skew(best)):
                    best = logged
        use = (
            abs(before) > 2
            and abs(skew(best)) <= abs(before) / 2
            and len(np.unique(column)) > 2
        )
        found.append((best - best.mean()) / best.std() if use else None)
    return found


def test_logs_are_those_of_a_naive_search():
    rng = np.random.default_rng(0)
    amount = np.exp(rng.normal(3, 2, 700))
    columns = {
        "amount": amount,
        "owed": -amount[::-1],
        "above a minimum": 1000 + np.exp(rng.normal(0, 1.5, 700)),
        "count": rng.poisson(np.exp(rng.normal(1, 1.2, 700))).astype(float),
        "gain or loss": rng.choice([-1, 1, 1, 1], 700) * amount,
        "normal": rng.normal(size=700),
        "rare flag": (rng.random(700) < 0.02).astype(float),
        "mildly skewed": rng.gamma(4, size=700),
    }
    x, zero = standardised(np.stack(list(columns.values()), axis=1))
    log = signed_log(x, find_skewed(x, zero))
    found, expected = (
        log(torch.from_numpy(x)).numpy(),
        dict(zip(columns, naive_logs(x, zero), strict=True)),
    )
    used = [name for name, column in expected.items() if column is not None]
    assert used == ["amount", "owed", "above a minimum", "count", "gain or loss"]
    for number, (name, column) in enumerate(expected.items()):
        if column is None:
            np.testing.assert_array_equal(found[:, number], x[:, number], err_msg=name)
        else:
            np.testing.assert_allclose(
                found[:, number], column, atol=2e-3, err_msg=name
            )  # amounts in 32 bits
            order = np.argsort(x[:, number], kind="stable")
            assert (np.diff(found[order, number]) >= 0).all()
    assert abs(np.corrcoef(found[:, 0], np.log(amount))[0, 1]) > 0.995


def test_features_without_skewness_need_no_logs():
    x = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    assert not find_skewed(x, np.zeros(3, np.float32))
    assert not find_skewed(np.ones((5, 2), np.float32), np.zeros(2, np.float32))
    assert skewness(np.ones(4)) == 0
    values = np.random.default_rng(1).exponential(size=50)
    assert skewness(values) == pytest.approx(skew(values))


def test_logs_are_finite_for_all_that_a_table_may_hold():
    x, zero = standardised(payments(300, 0)[0])
    log = signed_log(x, find_skewed(x, zero))
    ends = torch.tensor([[3.4e38, -3.4e38], [-3.4e38, 3.4e38], zero.tolist()])
    for kind in (torch.float32, torch.float64):
        assert log.to(kind)(ends.to(kind)).isfinite().all()


def test_trees_and_networks_see_what_suits_them():
    assert [
        sees_logs(name) for name in ("linear-small", "quadratic", "perceptron", "mlp")
    ] == [True] * 4
    assert not any(
        map(
            sees_logs,
            (
                "forest-random",
                "forest-extra",
                "boosting",
                "boosting-small",
                "linear-raw",
            ),
        )
    )


def test_a_mixture_is_near_the_optimum_on_skewed_amounts():
    """Within 1.5% of a logistic regression that knows the logarithms; on standardised
    amounts it was 8% above.
    """
    X, logs, _, y = payments(1500, 0)
    new, new_logs, p, truth = payments(20_000, 1)
    informed = log_loss(
        LogisticRegression().fit(logs, y).predict_proba(new_logs), truth
    )
    model = RFDLCClassifier(random_state=0).fit(X, y)
    found = log_loss(model.predict_proba(new), truth)
    assert informed < 1.03 * log_loss(p, truth)
    assert found < 1.015 * informed


@pytest.mark.usefixtures("quick_exports")
def test_a_run_keeps_its_logs(tmp_path, monkeypatch):
    """From a file to a folder, to predictions, to ONNX; also with networks, missing
    values and categories.
    """
    monkeypatch.setattr(tabular, "MEDIUM", 50)  # with networks
    X, _, _, y = payments(400, 2)
    frame = pd.DataFrame(X, columns=["amount", "seconds"]).assign(
        label=np.array(["fine", "fraud", "error"])[y]
    )
    frame["country"] = np.where(np.arange(400) % 3, "here", "there")
    frame.loc[::9, "seconds"] = np.nan
    frame.to_csv(tmp_path / "t.csv", index=False)
    model = rfdlc.train(tmp_path / "t.csv", out=tmp_path / "run", epochs=2)
    features = list(model.encoder.features)
    assert [features[i] for i in np.flatnonzero(model.net.log.scale)] == [
        "amount",
        "seconds",
    ]
    loaded = rfdlc.Model.load(tmp_path / "run")
    expected = loaded.predict(frame)
    np.testing.assert_array_equal(
        expected.scores.values, model.predict(frame).scores.values
    )
    exported = rfdlc.export(tmp_path / "run", tmp_path / "m.onnx")
    assert (
        exported.parity.decisions_changed,
        exported.parity.largest_difference < 1e-5,
    ) == (0, True)
    graph = rfdlc.OnnxModel.load(tmp_path / "m.onnx").decide(frame)
    np.testing.assert_allclose(
        graph.probabilities, loaded.decider.probabilities(expected), atol=1e-5
    )
    state = load_file(tmp_path / "run" / "model.safetensors")
    save_file(
        {**state, "log.scale": torch.ones(2)}, tmp_path / "run" / "model.safetensors"
    )
    with pytest.raises(InputError, match="weights do not fit"):
        rfdlc.Model.load(tmp_path / "run")


def test_trees_alone_have_no_logs():
    X, _, _, y = payments(200, 3)
    model = RFDLCClassifier(random_state=0, backbone="trees").fit(X, y)
    assert not [name for name in model.weights_ if name.startswith("log.")]

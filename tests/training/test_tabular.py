"""Trees, linear models and mixtures: computed as scikit-learn does, weighed, and a run
from end to end.
"""

import json
import warnings
from collections import Counter
from contextlib import contextmanager
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.special import log_softmax
from sklearn.datasets import make_classification
from sklearn.ensemble import (
    ExtraTreesClassifier,
    HistGradientBoostingClassifier,
    RandomForestClassifier,
)
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import PolynomialFeatures
from threadpoolctl import threadpool_info, threadpool_limits

import rfdlc
from rfdlc import InputError, RFDLCClassifier
from rfdlc.data.dataset import Dataset, Split
from rfdlc.data.longtail import assign_folds
from rfdlc.errors import listing
from rfdlc.progress import shown
from rfdlc.training import tabular
from rfdlc.training.methods import resolve
from rfdlc.training.networks.mixture import (
    MANY,
    Forest,
    Mixture,
    boosting,
    forest,
    linear,
    perceptron,
    products,
)


@pytest.fixture(autouse=True)
def few_trees(monkeypatch):
    monkeypatch.setattr(tabular, "TREES", 8)
    monkeypatch.setattr(tabular, "ITERATIONS", 5)
    monkeypatch.setattr(tabular, "PENALTIES", {"linear": 1.0})
    monkeypatch.setattr(tabular, "SMALL", 0)  # one perceptron


def problem(classes, samples=300):
    weights = [0.6, 0.3, 0.1] if classes == 3 else [0.8, 0.2]
    X, y = make_classification(
        samples, 6, n_informative=4, n_classes=classes, weights=weights, random_state=0
    )
    X = np.round(X.astype(np.float32), 1)  # many features lie on thresholds
    return X, y


def table(path, samples=150):
    X, y = problem(3, samples)
    frame = pd.DataFrame(X, columns=list("abcdef")).assign(
        kind=np.array(["common", "rare", "rarest"])[y]
    )
    frame["colour"] = np.where(X[:, 0] > 0, "red", "blue")
    frame.to_csv(path, index=False)
    return path


@pytest.mark.parametrize("classes", [2, 3])
def test_trees_are_evaluated_as_scikit_learn_does(classes):
    X, y = problem(classes)
    prior = np.bincount(y) / len(y)
    found = HistGradientBoostingClassifier(max_iter=20, random_state=0).fit(X, y)
    ours = boosting(found, classes)
    np.testing.assert_allclose(
        ours(torch.tensor(X))[0].softmax(-1), found.predict_proba(X), atol=1e-6
    )
    for kind in (RandomForestClassifier, ExtraTreesClassifier):
        found = kind(20, random_state=0).fit(X, y)
        with_prior = (20 * found.predict_proba(X) + prior) / 21
        np.testing.assert_allclose(
            forest(found, prior)(torch.tensor(X))[0].exp(), with_prior, atol=1e-6
        )
    found = LogisticRegression(C=0.1, max_iter=300).fit(X, y)
    np.testing.assert_allclose(
        linear(found, classes)(torch.tensor(X))[0].softmax(-1),
        found.predict_proba(X),
        atol=1e-5,
    )
    found = MLPClassifier((9,), tol=0.1, random_state=0).fit(X, y)
    np.testing.assert_allclose(
        perceptron(found, classes)(torch.tensor(X))[0].softmax(-1),
        found.predict_proba(X),
        atol=1e-5,
    )
    wide = PolynomialFeatures(2, include_bias=False).fit_transform(X.astype(np.float64))
    np.testing.assert_allclose(
        np.sort(products(torch.tensor(X)), axis=1), np.sort(wide, axis=1), atol=1e-4
    )
    scaled = wide / wide.std(axis=0)
    found = LogisticRegression(max_iter=300).fit(scaled, y)
    ours = tabular._fit_quadratic(classes, X, y, None, 0)(torch.tensor(X))[0].softmax(
        -1
    )
    np.testing.assert_allclose(ours, found.predict_proba(scaled), atol=5e-3)


@pytest.mark.parametrize("classes", [2, 3])
def test_many_samples_at_a_time_have_the_values_of_few(classes):
    X, y = problem(classes)
    prior, x = np.bincount(y) / len(y), torch.tensor(X)
    x[7, 2] = np.nan
    models = [
        boosting(
            HistGradientBoostingClassifier(max_iter=20, random_state=k).fit(X, y),
            classes,
        )
        for k in (0, 1)
    ]
    forests = [
        forest(RandomForestClassifier(20, random_state=k).fit(X, y), prior)
        for k in (0, 1)
    ]
    for both in (type(each[0]).joined(each) for each in (models, forests)):
        assert both._trees
        few = torch.cat([both(part) for part in x.split(MANY - 1)], dim=1)
        np.testing.assert_allclose(both(x), few, atol=1e-5)


def test_nodes_of_a_file_that_are_mixed_up_are_walked_all_the_same():
    """Two trees that end in a leaf of the second; then a node that is its own child on
    one side alone.
    """
    numbers = {
        "threshold": torch.zeros(4),
        "value": torch.tensor([[0.0], [0], [5], [7]]),
        "baseline": torch.zeros(1, 1),
    }
    x = torch.linspace(-1, 1, 2 * MANY)[:, None]
    for left, right, right_sum in (
        ([2, 2, 2, 3], [3, 3, 2, 3], 14.0),
        ([0, 2, 2, 3], [3, 3, 2, 3], 14.0),
    ):
        indices = {"left": left, "right": right, "feature": [0] * 4, "roots": [[0, 1]]}
        state = {
            name: torch.tensor(values) for name, values in indices.items()
        } | numbers
        sums = Forest.rebuilt(state, 1, 1).sums(x)[0, :, 0]
        assert sums[-1] == right_sum
        assert sums[0] == (10 if left[0] else 5)


@pytest.mark.parametrize("seen", [[0, 2], [0, 2, 3]])
def test_classes_that_were_never_seen_are_unlikely(seen):
    X, y = problem(len(seen))
    labels, inputs = np.array(seen)[y], torch.tensor(X)
    prior = np.full(4, 0.25)
    boosted = HistGradientBoostingClassifier(max_iter=20, random_state=0).fit(X, labels)
    logistic = LogisticRegression().fit(X, labels)
    for found, ours in (
        (boosted, boosting(boosted, 4)),
        (logistic, linear(logistic, 4)),
    ):
        p = ours(inputs)[0].softmax(-1).double().numpy()
        assert 0 < np.delete(p, seen, axis=1).max() < 0.01
        p = p[:, seen] / p[:, seen].sum(axis=1, keepdims=True)
        np.testing.assert_allclose(p, found.predict_proba(X), atol=1e-5)
    trees = RandomForestClassifier(5, random_state=0).fit(X, labels)
    expected = np.full((len(X), 4), 0.25 / 6)
    expected[:, seen] += 5 / 6 * trees.predict_proba(X)
    np.testing.assert_allclose(
        forest(trees, prior)(inputs)[0].exp(), expected, atol=1e-6
    )


@pytest.mark.filterwarnings("ignore:Stochastic Optimizer")
def test_models_that_are_joined_are_the_models():
    X, y = problem(3)
    each = [
        tabular._fit_forest("forest-random", np.ones(3) / 3, 99, X, y, None, seed)
        for seed in (0, 1)
    ]
    parts = slice(0, 200), slice(100, 300)
    boosted = [
        tabular._fit_boosting({}, 3, X[part], y[part], None, 0) for part in parts
    ]
    weights = np.linspace(0.1, 2, len(y))
    perceptrons = [
        tabular._fit_perceptron(1e-4, 3, X, y, given, 0) for given in (None, weights)
    ]
    for models in (each, boosted, perceptrons):
        joined, inputs = type(models[0]).joined(models), torch.tensor(X)
        assert torch.equal(
            joined(inputs), torch.cat([model(inputs) for model in models])
        )


def test_folds_are_stratified_and_keep_groups_together():
    rng = np.random.default_rng(0)
    labels = np.concatenate([np.repeat([0, 1, 2], [60, 23, 4]), [3]])
    fold = assign_folds(labels, 5)
    counts = np.array(
        [[np.sum((fold == k) & (labels == c)) for k in range(5)] for c in range(4)]
    )
    assert (np.ptp(counts, axis=1) <= 1).all()
    assert fold[-1] == -1  # the only sample of its class is always seen
    assert counts[:3].sum() == 87
    groups = rng.permutation(np.arange(88) // 4)
    labels[groups == groups[-1]] = 3  # one group alone has this class
    fold = assign_folds(labels, 5, groups=groups)
    assert all(len(set(fold[groups == g])) == 1 for g in np.unique(groups))
    assert set(fold[labels == 3]) == {-1}
    for k in range(5):
        assert set(labels[fold == k]) <= set(labels[fold != k])
    assert not np.array_equal(assign_folds(labels, 5, seed=1), assign_folds(labels, 5))


def test_weights_have_the_highest_likelihood(monkeypatch):
    """Of the normalized product of powers: found as on a grid; a useless candidate gets
    none.
    """
    monkeypatch.setattr(tabular, "PRIOR_SAMPLES", 0)
    rng = np.random.default_rng(0)
    labels, rows, shares = (
        rng.integers(0, 3, 200),
        np.arange(200),
        np.full(200, 1 / 200),
    )
    truth = np.eye(3)[labels]
    log_p = log_softmax(
        np.stack(
            [truth * 2 + rng.normal(0, 1, (200, 3)), truth + rng.normal(0, 1, (200, 3))]
        ),
        axis=2,
    )
    grid = np.linspace(0, 3, 61)
    losses = [
        [
            -log_softmax(v * log_p[0] + w * log_p[1], axis=1)[rows, labels].mean()
            for w in grid
        ]
        for v in grid
    ]
    best = np.unravel_index(np.argmin(losses), (61, 61))
    np.testing.assert_allclose(
        tabular._weights(log_p, labels, shares), grid[list(best)], atol=0.03
    )
    noise = log_softmax(-truth + rng.normal(0, 1, (200, 3)), axis=1)
    assert tabular._weights(np.stack([log_p[0], noise]), labels, shares)[1] == 0
    monkeypatch.setattr(tabular, "PRIOR_SAMPLES", 1e6)
    np.testing.assert_allclose(tabular._weights(log_p, labels, shares), 0.5, atol=1e-3)


def test_the_prior_of_weights_knows_as_much_as_one_sample(monkeypatch):
    """Its precision is the mean information of a sample, by hand: the covariance of log
    p under the mean prediction.
    """
    monkeypatch.setattr(tabular, "RIDGE", 0)
    rng = np.random.default_rng(0)
    labels, shares = rng.integers(0, 3, 40), rng.dirichlet(np.ones(40))
    log_p = log_softmax(np.eye(3)[labels] + rng.normal(0, 1, (2, 40, 3)), axis=2)
    seen = {}

    def minimize(loss, start, **given):
        seen["value"] = lambda weights: loss(np.array(weights))[0]
        return found(loss, start, **given)

    found = tabular.minimize
    monkeypatch.setattr(tabular, "minimize", minimize)

    def likelihood(weights):
        p = log_softmax(np.tensordot(weights, log_p, axes=1), axis=1)
        return -p[np.arange(40), labels] @ shares

    tabular._weights(log_p, labels, shares)
    p = np.exp(log_softmax(log_p.mean(0), axis=1))
    information = sum(
        s * np.cov(z, aweights=q, ddof=0)
        for s, q, z in zip(shares, p, log_p.swapaxes(0, 1), strict=True)
    )
    for weights in ([0.5, 0.5], [0.9, 0.2], [0.0, 1.5]):
        away = np.array(weights) - 0.5
        expected = likelihood(weights) + shares @ shares * away @ information @ away / 2
        assert seen["value"](weights) == pytest.approx(expected)


@pytest.mark.usefixtures("quick_exports")
def test_a_table_from_end_to_end(tmp_path, monkeypatch):
    """Chosen alike by the same seed, loaded without code, predicted, evaluated and
    exported from the folder.
    """
    monkeypatch.setattr(tabular, "MEDIUM", 50)  # with networks
    source, folder = table(tmp_path / "t.csv"), tmp_path / "run"
    model = rfdlc.train(
        source,
        out=folder,
        epochs=2,
        calibration="temperature",
        data_options={"target": "kind"},
    )
    choice = (folder / "choice.json").read_text()
    rows = json.loads(choice)["candidates"]
    assert {
        "linear",
        "quadratic",
        "forest-random",
        "forest-extra",
        "boosting",
        "perceptron",
    } <= {row["name"] for row in rows}
    assert sum(row["weight"] for row in rows) == pytest.approx(1)
    loaded = rfdlc.Model.load(folder)
    found = loaded.predict(source).scores.values
    np.testing.assert_array_equal(found, model.predict(source).scores.values)
    assert (
        len(found)
        == sum(row["weight"] > 0 for row in rows)
        == len(loaded.decider.model.weights)
    )
    held = rfdlc.Predictions.load(folder / "held-out.npz")
    assert (
        len(held) == rfdlc.load(source, target="kind").classes.count_array.sum()
    )  # nothing is lost to calibration
    assert (
        rfdlc.evaluate(
            rfdlc.Predictions.load(folder), decider=loaded.decider
        ).mean_utility
        > 0.6
    )
    exported = rfdlc.export(folder, tmp_path / "m.onnx").parity
    members = listing(
        f"{row['name']} ({row['weight']:.2f})" for row in rows if row["weight"] > 0
    )
    assert f"likelihood: {members}; decisions" in (tmp_path / "m.md").read_text()
    assert (exported.decisions_changed, exported.largest_difference < 1e-5) == (0, True)
    graph, frame = rfdlc.OnnxModel.load(tmp_path / "m.onnx"), pd.read_csv(source)
    expected = loaded.decide(source)
    for rows in (
        frame,
        {name: frame[name] for name in frame},
        frame.to_dict("records"),
    ):
        np.testing.assert_array_equal(graph.decide(rows).action, expected)
        np.testing.assert_array_equal(loaded.decide(rows), expected)
    for decide in (graph.decide, loaded.decide):
        with pytest.raises(
            InputError, match=r"or a data frame or {column: cells} with the columns "
        ):
            decide(frame.to_numpy()[:, 1:])
    assert (
        rfdlc.resume(folder).decider.to_dict() == loaded.decider.to_dict()
    )  # finished: nothing is fitted again
    (folder / "metrics.json").unlink()
    again = rfdlc.resume(folder)  # as after a kill: from the start
    assert (folder / "choice.json").read_text() == choice
    np.testing.assert_array_equal(again.predict(source).scores.values, found)


def test_the_estimator_is_the_table_of_the_command_line():
    X, y = problem(3, 150)
    model = RFDLCClassifier("tail-sensitive", random_state=0, backbone="trees").fit(
        X, y
    )
    assert set(model.choice_.losses) == {
        "forest-random",
        "forest-extra",
        "boosting",
        "boosting-small",
    }
    p = model.predict_proba(X)
    np.testing.assert_allclose(model.predict_proba(X[:7]), p[:7], atol=1e-12)
    assert (p.argmax(1) == y).mean() > 0.8
    assert model.decider_.decide_probabilities(p).tolist() == model.predict(X).tolist()
    model.set_params(hidden=(4,)).partial_fit(X, y)  # starts networks
    assert model.predict_proba(X).shape == p.shape
    weighted = RFDLCClassifier(random_state=0, backbone="trees").fit(
        X, y, np.where(y == 0, 0.0, 1.0)
    )
    assert weighted.classes_.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("name", "broken"),
    [("left", -1), ("right", 10**6), ("feature", 99), ("left", 0)],
    ids=str,
)  # a child that is its own ancestor would be a circle
def test_files_that_point_outside_are_refused(name, broken, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "refused"
    if not folder.exists():
        X, y = problem(2, 60)
        data = Dataset.of("t", ["a", "b"], {"train": Split(X, y)})
        rfdlc.train(data, out=folder, backbone="trees")
        save_file(load_file(folder / "model.safetensors"), folder / "whole.safetensors")
    state = load_file(folder / "whole.safetensors")
    key = next(key for key in state if key.endswith(f".{name}") and "forest" in key)
    state[key][1] = broken
    save_file(state, folder / "model.safetensors")
    with pytest.raises(
        InputError, match=f"weights do not fit .*{name} of the trees points outside"
    ):
        rfdlc.Model.load(folder)


def test_what_cannot_be_a_table(tmp_path):
    source = table(tmp_path / "t.csv", 40)
    with pytest.raises(
        InputError, match="backbone=trees is for tables, but digits-lt has images"
    ):
        rfdlc.train("digits-lt", out=tmp_path / "a", backbone="trees")
    with pytest.raises(InputError, match="backbone=trees is for methods that mix"):
        rfdlc.train(
            source,
            "ce",
            tmp_path / "b",
            backbone="trees",
            data_options={"target": "kind"},
        )
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "b").exists()


def test_a_mixture_is_computed_in_full_precision():
    """Also where the rest of a prediction is in 16 bits, as on a GPU."""
    X, y = problem(3)
    member, inputs = linear(LogisticRegression().fit(X, y), 3), torch.tensor(X)[None]
    net = Mixture({"linear": member}, torch.ones(1), torch.zeros(1, 3))
    expected = net(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(net(inputs), expected)


def test_the_model_of_all_samples_counts_as_much_as_the_folds():
    each = [
        linear(LogisticRegression().fit(*[v[part] for v in problem(3)]), 3)
        for part in np.split(np.arange(300), 3)
    ]
    net = Mixture(
        {"linear": type(each[0]).joined(each)}, torch.ones(1), torch.zeros(1, 3)
    )
    x = torch.tensor(problem(3)[0])
    first, second, last = (model(x)[0].softmax(-1) for model in each)
    np.testing.assert_allclose(
        net(x[None])[0, 0].exp(), (first + second) / 4 + last / 2, atol=1e-6
    )


def test_shared_children_in_a_file_cost_no_time():
    """A chain in which both children are the next node has 2^n ways."""
    nodes = torch.arange(100)
    following = (nodes + 1).clamp(max=99)
    state = {
        "feature": torch.zeros_like(nodes),
        "left": following,
        "right": following,
        "roots": nodes[None, :1],
    }
    state |= {
        "threshold": torch.zeros(100),
        "value": torch.zeros(100, 2),
        "baseline": torch.zeros(1, 2),
    }
    assert Forest.rebuilt(state, 1, 2).depth == 99


def test_a_validation_split_keeps_weights_and_ids():
    X, y = problem(2, 60)
    splits = {"train": Split(X[:40], y[:40], ids=[f"a{i}" for i in range(40)])}
    splits["val"] = Split(
        X[40:], y[40:], ids=[f"b{i}" for i in range(20)], weights=np.arange(1.0, 21)
    )
    data = Dataset.of("t", ["a", "b"], splits)
    samples, ((_, held),) = tabular._splits(data, rfdlc.TrainConfig())
    assert list(samples.take(held).ids) == [f"b{i}" for i in range(20)]
    np.testing.assert_array_equal(samples.weights, [1.0] * 40 + list(range(1, 21)))


def test_settings_without_effect_are_named(tmp_path, capsys):
    source = table(tmp_path / "t.csv", 60)
    rare = pd.concat(
        [
            pd.read_csv(source),
            pd.DataFrame([{**dict.fromkeys("abcdef", 9.0), "kind": "one"}]),
        ]
    )
    rare.assign(split="train").to_csv(source, index=False)
    with shown():
        rfdlc.train(
            source,
            out=tmp_path / "run",
            backbone="trees",
            epochs=3,
            data_options={"target": "kind"},
        )
    plan = capsys.readouterr().err
    assert "ignored    epochs=3: for networks; use backbone=mlp" in plan
    assert "note       never held out, as they have one sample: one" in plan
    X, y = problem(2, 60)
    with pytest.warns(UserWarning, match="widths=\\(4,\\), epochs=3 has no effect"):
        RFDLCClassifier(backbone="trees", epochs=3, hidden=(4,), random_state=0).fit(
            X, y
        )


def test_predictions_of_a_table_keep_what_names_its_rows(tmp_path):
    """Also where the column is not called id; categories that are new are named."""
    source = table(tmp_path / "t.csv", 60)
    frame = pd.read_csv(source)
    frame.insert(0, "beetle", [f"beetle {i}" for i in range(60)])
    frame.to_csv(source, index=False)
    rfdlc.train(
        source, out=tmp_path / "run", backbone="trees", data_options={"target": "kind"}
    )
    frame.loc[3, "colour"] = "green"
    frame.drop(columns="kind").iloc[:9].to_csv(tmp_path / "new.csv", index=False)
    with pytest.warns(
        UserWarning,
        match="'colour' has categories that training did not see \\(green\\)",
    ):
        rfdlc.predict(tmp_path / "run", tmp_path / "new.csv", tmp_path / "p.csv")
    assert pd.read_csv(tmp_path / "p.csv")["id"].tolist() == [
        f"beetle {i}" for i in range(9)
    ]


def test_members_that_are_worse_than_chance_get_equal_weights():
    wrong = np.log(np.tile([0.2, 0.8], (3, 40, 1)))
    weights = tabular._weights(wrong, np.zeros(40, dtype=np.int64), np.full(40, 1 / 40))
    np.testing.assert_allclose(weights, 1 / 3)


def test_the_temperature_of_a_bad_candidate_is_no_concern_of_users():
    generator = np.random.default_rng(0)
    labels, logits = np.arange(400) % 2, 500 * generator.normal(size=(400, 2))
    classes = rfdlc.Classes.from_labels(labels)
    with warnings.catch_warnings(action="error"):
        slope, _ = tabular._scale(
            "linear", logits, Split(logits, labels), classes, rfdlc.TrainConfig()
        )
    assert slope < 1 / 20  # it was unusual


def test_members_that_know_more_together_are_more_certain_together(monkeypatch):
    """The sum of the fitted weights scales the logits; the weights of the decider sum
    to one.
    """
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(90, 3)).astype(np.float32), rng.integers(0, 2, 90)
    data = Dataset.of("table", ["a", "b"], {"train": Split(x + y[:, None], y)})
    row, config = resolve("rf-dlc", "table", {"device": "cpu"}, "table", 90)
    candidates = {
        "linear": partial(tabular._fit_linear, 1.0, 2),
        "linear-small": partial(tabular._fit_linear, 0.1, 2),
    }
    monkeypatch.setattr(tabular, "_candidates", lambda *_: candidates)
    found = []
    for total in (1.0, 2.5):
        monkeypatch.setattr(
            tabular, "_weights", lambda *_, total=total: total * np.array([0.7, 0.3])
        )
        found.append(tabular.fit_table(data, row, config))
    once, more = found
    np.testing.assert_allclose(more.weights, once.weights)
    np.testing.assert_allclose(more.weights, [0.7, 0.3])
    differences = [fitted.logits[..., 1] - fitted.logits[..., 0] for fitted in found]
    np.testing.assert_allclose(
        differences[1], 2.5 * differences[0], rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(more.net.slope, 2.5 * once.net.slope)
    torch.testing.assert_close(more.net.bias, 2.5 * once.net.bias)


def test_a_budget_leaves_out_candidates_that_would_end_too_late(monkeypatch):
    """By a clock of our own: of 10 s, 9 are for the fits; a candidate is judged after
    each of its steps.
    """
    clock, steps = [0.0], []
    monkeypatch.setattr(tabular.time, "monotonic", lambda: clock[0])

    def candidate(name, count, seconds, goes):
        for step in range(count):
            clock[0] += seconds
            steps.append(name)
            if not goes((step + 1) / count):
                return None
        return name, np.empty(0)

    def fitted(budget, efforts=None, **each):
        clock[0] = 0.0
        steps.clear()
        fits = {name: partial(candidate, name, *given) for name, given in each.items()}
        return list(
            tabular._in_time(
                fits,
                efforts or dict.fromkeys(fits, 1),
                budget,
                lambda steps, text: None,
            )
        )

    each = {
        "linear": (2, 0.5),
        "forest": (2, 1.0),
        "boosting": (4, 3.0),
        "quadratic": (2, 1.5),
        "mlp": (1, 0.1),
    }
    assert fitted(0, **each) == list(each)
    assert fitted(10, **each) == [
        "linear",
        "forest",
        "quadratic",
    ]  # boosting would end at 15, and mlp begins at 9
    assert steps.count("boosting") == 1
    assert fitted(10, slow=(2, 20.0), quick=(1, 0.1)) == [
        "slow"
    ]  # something is fitted in any case
    assert "quick" not in steps
    once = {
        "linear": (1, 1.0),
        "forest": (1, 4.0),
        "boosting": (1, 4.5),
        "mlp": (10, 0.2),
    }
    assert fitted(10, **once) == [
        "linear",
        "forest",
        "boosting",
    ]  # which ends at 9.5, and is kept
    efforts = {"linear": 2, "forest": 10, "boosting": 10, "mlp": 1}
    assert fitted(10, efforts, **once) == [
        "linear",
        "forest",
        "mlp",
    ]  # 12 took 5 s: boosting would end at 9.2
    assert "boosting" not in steps


def test_a_table_with_a_budget(tmp_path, capsys):
    source = table(tmp_path / "t.csv", 60)
    with shown():
        rfdlc.train(
            source,
            out=tmp_path / "run",
            budget="0.001s",
            data_options={"target": "kind"},
        )
    text = capsys.readouterr().err
    assert "perceptron; those for which 0.001 s are enough" in text
    assert (
        "left out   forest-random, forest-extra, boosting, boosting-small, quadratic,"
        " perceptron: not within" in text
    )
    choice = json.loads((tmp_path / "run/choice.json").read_text())
    assert [row["name"] for row in choice["candidates"]] == ["linear"]
    assert not (tmp_path / "run/tuning.json").exists()
    rfdlc.predict(tmp_path / "run", source, tmp_path / "p.csv")
    assert len(pd.read_csv(tmp_path / "p.csv")) == 60
    with pytest.raises(
        InputError, match="tune is for networks: set backbone=mlp, or leave it out"
    ):
        rfdlc.train(
            source,
            out=tmp_path / "other",
            tune="auto",
            budget="1s",
            data_options={"target": "kind"},
        )


def test_small_tables_are_fitted_by_one_thread_each(monkeypatch):
    """Threads of a small fit wait for each other, for minutes where other programs use
    the cores.
    """
    X, y = problem(2, 40)
    splits, rows = [(np.arange(20), np.arange(20, 40))], [np.arange(20)]
    seen = []

    def fit(x, labels, weights, seed):
        seen.append(
            max(
                pool["num_threads"]
                for pool in threadpool_info()
                if pool["user_api"] == "openmp"
            )
        )
        return tabular._fit_linear(1.0, 2, x, labels, weights, seed)

    for most in (tabular.ALONE, 0):
        monkeypatch.setattr(tabular, "ALONE", most)
        with threadpool_limits(2):
            assert (
                tabular._fit_all(
                    fit, X, 0, Split(X, y), splits, rows, lambda share: True
                )
                is not None
            )
    assert seen == [1, 2]


def test_progress_moves_with_every_fit(monkeypatch):
    """By its effort: one of boosting counts as 60 epochs of one network."""
    X, y = problem(2, 80)
    moved = []

    @contextmanager
    def live(total, text):
        yield lambda steps, name: moved.append((total, steps, name))

    monkeypatch.setattr(tabular, "live", live)
    monkeypatch.setattr(tabular, "MEDIUM", 50)  # with networks
    with warnings.catch_warnings(action="ignore"):
        RFDLCClassifier(random_state=0, epochs=3).fit(X, y)
    (total,) = {total for total, _, _ in moved}
    counts = Counter(name for _, _, name in moved)
    assert total == sum(steps for _, steps, _ in moved)
    assert (counts["boosting"], counts["mlp"]) == (
        6,
        3,
    )  # five folds and all samples; epochs
    assert {(name, steps) for _, steps, name in moved} >= {
        ("boosting", 60),
        ("linear", 3),
        ("mlp", 6),
    }


def test_a_mixture_does_not_extrapolate():
    """Far outside of the training range it is as certain as at its end."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(400, 2))
    y = (X[:, 0] + rng.normal(size=400) > 0).astype(int)
    model = RFDLCClassifier(random_state=0).fit(X, y)
    ends = np.stack([X.min(axis=0), X.max(axis=0)])
    at_ends = model.predict_proba(ends)
    np.testing.assert_allclose(model.predict_proba(ends * 1e6), at_ends, rtol=1e-6)
    assert at_ends.max() < 0.9999
    assert at_ends[1, 1] > 0.9

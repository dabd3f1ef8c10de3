"""RFDLCClassifier: the training of `rfdlc train`, calibration, weights, early stopping,
and life in scikit-learn.
"""

import io
import pickle
import pydoc

import joblib
import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.datasets import make_blobs
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

import rfdlc
from rfdlc import (
    Classes,
    Decider,
    InputError,
    RFDLCClassifier,
    Utility,
    UtilityClassifier,
    make_utility_scorer,
)
from rfdlc.data.dataset import Dataset, Split
from rfdlc.data.longtail import hold_out_indices
from rfdlc.training.config import TrainConfig
from rfdlc.training.methods import resolve

SMALL = {
    "backbone": "mlp",
    "hidden": (16,),
    "particles": 2,
    "epochs": 20,
    "random_state": 0,
}
COSTLY = [[1, 0, 0], [-2, 1, 0], [-8, -3, 1]]


@pytest.fixture(scope="module")
def fitted(three):
    X, y = three
    return RFDLCClassifier(COSTLY, **SMALL).fit(X, y)


def run_of(X, y, path, **settings):
    data = Dataset.of(
        "arrays",
        [str(c) for c in np.unique(y)],
        {"train": Split(X.astype(np.float32), y)},
    )
    return rfdlc.train(
        data, out=path, backbone="mlp", particles=2, widths=(16,), epochs=20, **settings
    )


def test_it_is_the_training_of_the_command_line(three, tmp_path, fitted):
    X, y = three
    model = run_of(X, y, tmp_path / "run", seed=0)
    theirs = model.predict(X.astype(np.float32)).scores.values
    ours = np.concatenate(list(fitted._stream(X)), axis=1)
    np.testing.assert_allclose(ours, theirs, atol=1e-3)
    assert fitted.decider_.model.calibrator.temperature == pytest.approx(
        model.decider.model.calibrator.temperature, rel=1e-4
    )
    uniform = RFDLCClassifier(COSTLY, target_prior="uniform", **SMALL).fit(X, y)
    utility = Utility(COSTLY, model.classes)
    np.testing.assert_array_equal(
        fitted.predict(X), model.decide(X.astype(np.float32), utility)
    )
    flat = model.decider.replace(target_prior="uniform", utility=utility)
    np.testing.assert_array_equal(
        uniform.predict(X), flat.decide(model.predict(X.astype(np.float32)))
    )


def test_heads_of_features_are_those_of_the_command_line(three, tmp_path):
    """Trained again on all samples, with a calibration out of fold; continued from
    where they are.
    """
    X, y = three
    X = X.astype(np.float32)
    model = rfdlc.train(
        (X, y),
        out=tmp_path / "run",
        preset="features",
        epochs=20,
        data_options={"test_fraction": 0},
    )
    ours = RFDLCClassifier(
        backbone="features", epochs=20, warm_start=True, random_state=0
    ).fit(X, y)
    theirs = model.predict(X).scores.values
    np.testing.assert_allclose(
        np.concatenate(list(ours._stream(X)), axis=1), theirs, atol=1e-3
    )
    assert ours.decider_.model.calibrator.temperature == pytest.approx(
        model.decider.model.calibrator.temperature, rel=1e-4
    )
    assert (ours.settings_.widths, ours.settings_.head_init) == ((), "class-means")
    before = ours.weights_
    ours.set_params(learning_rate=0.0).fit(X, y)
    np.testing.assert_array_equal(ours.weights_["head.weight"], before["head.weight"])


def test_the_command_line_reads_a_table_the_same_way(three, tmp_path):
    from typer.testing import CliRunner

    from rfdlc.cli import app

    X, y = three
    X = X.astype(np.float32)
    frame = pd.DataFrame(X, columns=[f"f{i}" for i in range(X.shape[1])]).assign(
        kind=y, split="train"
    )
    frame.to_csv(tmp_path / "table.csv", index=False)
    words = [
        "train",
        "table.csv",
        "--target",
        "kind",
        "--root",
        str(tmp_path),
        "--out",
        str(tmp_path / "run"),
    ]
    result = CliRunner().invoke(
        app,
        [*words, "backbone=mlp", "particles=2", "widths=16", "epochs=20"],
        catch_exceptions=False,
    )
    assert result.exit_code == 0
    model = rfdlc.Model.load(tmp_path / "run")
    ours = RFDLCClassifier(**SMALL).fit(X, y)
    np.testing.assert_allclose(
        np.concatenate(list(ours._stream(X)), axis=1),
        model.predict(frame).scores.values,
        atol=1e-3,
    )
    np.testing.assert_array_equal(ours.predict(X), model.decide(frame))


def test_defaults_are_those_of_the_command_line():
    ours = RFDLCClassifier(random_state=0)._config(500, first=True)
    theirs = resolve("rf-dlc", "patients", {}, "table", 500)[1]
    assert {f: getattr(ours, f) for f in TrainConfig.model_fields} == {
        f: getattr(theirs, f) for f in TrainConfig.model_fields
    }


def test_decisions_are_the_deciders_on_the_held_out_calibration(three, fitted):
    X, y = three
    kept, held = hold_out_indices(y, 0.1, 0)
    logits = np.concatenate(list(fitted._stream(X)), axis=1)
    decider = Decider(
        Utility(COSTLY, Classes.from_labels(y)),
        combine="mean-logits",
        calibration="prior-corrected-temperature",
        train_prior="uniform",
    ).fit(logits[:, held], y[held], logits=True)
    decider = decider.replace(target_prior=np.bincount(y) / len(y))
    np.testing.assert_array_equal(
        fitted.predict(X), decider.decide(logits, logits=True)
    )
    np.testing.assert_allclose(
        fitted.predict_proba(X), decider.probabilities(logits, logits=True)
    )
    np.testing.assert_allclose(
        fitted.decision_function(X),
        decider.utility.gains(decider.probabilities(logits, logits=True)),
    )
    assert len(kept) + len(held) == len(y)


def test_groups_are_never_on_both_sides(three, monkeypatch):
    X, y = three
    groups = np.arange(len(X)) // 5
    seen = {}
    original = Dataset.hold_out

    def spy(self, *args, **options):
        parted = original(self, *args, **options)
        seen["train"], seen["val"] = (
            set(parted.train.groups),
            parted.val.groups.tolist(),
        )
        return parted

    def calibrating(self, *args, groups, **options):
        seen["calibrating"] = groups.tolist()
        return fit(self, *args, groups=groups, **options)

    fit = Decider.fit
    monkeypatch.setattr(Decider, "fit", calibrating)
    monkeypatch.setattr(Dataset, "hold_out", spy)
    RFDLCClassifier(**SMALL).fit(X, y, groups=groups)
    assert seen["val"]
    assert not seen["train"] & set(seen["val"])
    assert seen["calibrating"] == seen["val"]


def test_set_utility_trains_nothing(three, fitted, monkeypatch):
    X, y = three
    model = pickle.loads(pickle.dumps(fitted))  # noqa: S301
    monkeypatch.setattr("rfdlc.estimators.estimator._train_particles", None)
    abstaining = np.column_stack([np.eye(3), np.full(3, 0.8)])
    model.set_utility(abstaining)
    np.testing.assert_array_equal(
        model.predict(X) == -1, model.predict_proba(X).max(1) < 0.8
    )
    assert model.predict_proba(X) == pytest.approx(fitted.predict_proba(X))
    assert model.set_utility("tail-sensitive").decider_.utility.matrix == pytest.approx(
        Utility.tail_sensitive(Classes.from_labels(y)).matrix
    )


def test_sample_weights(three):
    X, y = three
    plain = RFDLCClassifier(**SMALL).fit(X, y)
    ones = RFDLCClassifier(**SMALL).fit(X, y, sample_weight=np.full(len(y), 2.5))
    np.testing.assert_allclose(plain.predict_proba(X), ones.predict_proba(X))
    removed = RFDLCClassifier(**SMALL).fit(X[:300], y[:300])
    zeros = RFDLCClassifier(**SMALL).fit(X, y, sample_weight=np.arange(len(y)) < 300)
    np.testing.assert_allclose(removed.predict_proba(X), zeros.predict_proba(X))
    wrong = np.where(
        np.arange(len(y)) % 2, y, (y + 1) % 3
    )  # half of the labels are wrong, and have little weight
    weights = np.where(np.arange(len(y)) % 2, 1.0, 0.01)
    informed = RFDLCClassifier(**SMALL | {"epochs": 30}).fit(
        X, wrong, sample_weight=weights
    )
    misled = RFDLCClassifier(**SMALL | {"epochs": 30}).fit(X, wrong)
    assert informed.score(X, y) > misled.score(X, y) + 0.1


def test_weighted_order_appears_as_often_as_it_weighs():
    from rfdlc.data.loader import EpochOrder, seeded

    weights = torch.tensor([0.0, 1.0, 2.0, 3.0, 0.5, 5.5])
    expected = (weights * 6 / weights.sum()).numpy()
    order = EpochOrder(torch.zeros(6, dtype=torch.long), weights=weights)
    counts = np.array(
        [np.bincount(order.draw(seeded(0, 0, e)), minlength=6) for e in range(400)]
    )
    assert (np.abs(counts - expected) < 1).all()
    np.testing.assert_allclose(counts.mean(0), expected, atol=0.1)
    with pytest.raises(InputError, match="cannot be combined with sample weights"):
        EpochOrder(torch.zeros(6, dtype=torch.long), "balanced", weights)


def test_early_stopping_keeps_the_best_epoch(three):
    X, y = three
    model = RFDLCClassifier(
        **SMALL | {"epochs": 200}, early_stopping=True, patience=5, learning_rate=0.02
    ).fit(X, y)
    curve = model.held_out_loss_curve_
    assert model.n_iter_ == len(curve) == int(np.argmin(curve)) + 6 < 200
    _, held = hold_out_indices(y, 0.1, 0)
    p = np.exp(np.concatenate(list(model._stream(X[held])), axis=1).mean(0))
    p /= p.sum(1, keepdims=True)
    weight = 1 / np.bincount(y[held])[y[held]]
    loss = np.average(-np.log(p[np.arange(len(held)), y[held]]), weights=weight)
    assert loss == pytest.approx(min(curve), rel=1e-6)


def test_weightings_and_priors(three):
    X, y = three
    for weighting in ("none", "linear", "sqrt", "effective"):
        model = RFDLCClassifier(weighting=weighting, **SMALL).fit(X, y)
        assert model.predict_proba(X).mean(0) == pytest.approx(
            np.bincount(y) / len(y), abs=0.12
        )
    flat = RFDLCClassifier(target_prior="uniform", **SMALL).fit(X, y)
    assert (flat.predict(X) == 0).mean() < (
        RFDLCClassifier(**SMALL).fit(X, y).predict(X) == 0
    ).mean()
    with pytest.raises(InputError, match="weighting 'prior-ish' is unknown"):
        RFDLCClassifier(weighting="prior-ish").fit(X, y)
    assert RFDLCClassifier(weighting="sqrt")._config(100, first=True).weights == "sqrt"


def test_partial_fit_learns_and_counts(three):
    X, y = three
    model = RFDLCClassifier(**SMALL)
    for _ in range(30):
        for part in (slice(0, 200), slice(200, 400)):
            model.partial_fit(X[part], y[part], classes=[0, 1, 2])
    assert model.score(X, y) > RFDLCClassifier(**SMALL).partial_fit(
        X, y, classes=[0, 1, 2]
    ).score(X, y)
    assert model.class_counts_.tolist() == (30 * np.bincount(y)).tolist()
    assert model.n_iter_ == 60
    one_class = model.partial_fit(X[y == 1][:3], [1, 1, 1])
    assert one_class.predict(X).shape == y.shape
    with pytest.raises(ValueError, match="classes must be passed on the first call"):
        RFDLCClassifier(**SMALL).partial_fit(X, y)
    with pytest.raises(ValueError, match="has classes not in"):
        model.partial_fit(X, y + 1)


def test_warm_start_goes_on(three):
    X, y = three
    model = RFDLCClassifier(**SMALL, warm_start=True).fit(X, y)
    first = model.loss_curve_
    again = model.fit(X, y)
    assert again.loss_curve_[0] < first[0]
    with pytest.raises(
        ValueError,
        match=r"warm_start can only be used where `self.classes_` is the same",
    ):
        model.fit(X, y + 1)
    with pytest.raises(
        ValueError, match="X has 3 features, but RFDLCClassifier is expecting 8"
    ):
        model.fit(X[:, :3], y)
    with pytest.raises(
        ValueError, match="particles was 2 when training began and is 5 now"
    ):
        model.set_params(particles=5).fit(X, y)


def test_it_is_reproducible_and_leaves_the_global_generator_alone(three, fitted):
    X, y = three
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    again = RFDLCClassifier(COSTLY, **SMALL).fit(X, y)
    assert torch.equal(torch.rand(3), expected)
    np.testing.assert_array_equal(again.predict_proba(X), fitted.predict_proba(X))
    other = RFDLCClassifier(
        COSTLY, **SMALL | {"random_state": np.random.RandomState(3)}
    ).fit(X, y)
    assert not np.allclose(other.predict_proba(X), fitted.predict_proba(X))


def test_pickles_are_plain_and_small(three, fitted):
    X, _ = three
    data = pickle.dumps(fitted)
    assert b"torch.storage" not in data
    assert (
        len(data) < 4 * sum(array.nbytes for array in fitted.weights_.values()) + 20_000
    )
    assert not fitted.optimiser_
    file = io.BytesIO()
    joblib.dump(fitted, file)
    file.seek(0)
    np.testing.assert_array_equal(joblib.load(file).predict(X), fitted.predict(X))
    moved = pickle.loads(data).set_params(device="cuda")  # noqa: S301
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="needs a GPU"):
            moved.predict(X)
        assert moved.set_params(device="cpu").predict(X).shape == (len(X),)


def test_sparse_input_is_dense_input(three, fitted):
    X, y = three
    model = RFDLCClassifier(COSTLY, **SMALL).fit(sparse.csr_array(X), y)
    np.testing.assert_allclose(
        model.predict_proba(sparse.csc_matrix(X)), fitted.predict_proba(X)
    )


def test_features_far_from_zero_are_the_same_features(three):
    """Seconds since 1970: 32 bits alone would leave multiples of 128."""
    X, y = three
    whole = np.round(100 * X)  # so that nothing is lost in 64 bits
    far = whole + np.where(np.arange(X.shape[1]) < 4, 1.7e9, 0)
    near, model = (
        RFDLCClassifier(COSTLY, **SMALL).fit(each, y) for each in (whole, far)
    )
    np.testing.assert_allclose(
        model.predict_proba(far), near.predict_proba(whole), atol=1e-4
    )
    np.testing.assert_allclose(
        model.predict_proba(sparse.csr_array(far)), model.predict_proba(far)
    )
    model = (
        RFDLCClassifier(COSTLY, **SMALL)
        .partial_fit(far, y, classes=[0, 1, 2])
        .partial_fit(far, y)
    )
    assert np.ptp(model.predict_proba(far)[:, 0]) > 0.1
    with pytest.raises(ValueError, match="too large for dtype"):
        near.predict(1e300 * X)


def test_uncertainty_grows_where_classes_meet():
    X, y = make_blobs(300, centers=[[-2, 0], [2, 0]], random_state=0)
    model = RFDLCClassifier(**SMALL | {"epochs": 30}).fit(X, y)
    places = [[-2, 0], [0, 0]]
    for kind in ("entropy", "max-probability", "mutual-information"):
        clear, between = model.predict_uncertainty(places, kind)
        assert 0 <= clear < between
    with pytest.raises(InputError, match="kind 'variance' is unknown"):
        model.predict_uncertainty(places, "variance")
    with pytest.raises(
        InputError, match="there is one: expected two or more; choose entropy"
    ):
        RFDLCClassifier(**SMALL | {"particles": 1}).fit(X, y).predict_uncertainty(
            places, "mutual-information"
        )


def test_it_is_at_home_in_scikit_learn(named):
    X, y = named
    frame = pd.DataFrame(X, columns=[f"f{i}" for i in range(X.shape[1])])
    frame["colour"] = np.where(X[:, 0] > 0, "red", "blue")
    encode = make_column_transformer(
        (OneHotEncoder(sparse_output=False), ["colour"]), remainder="passthrough"
    )
    pipe = (
        make_pipeline(encode, RFDLCClassifier(COSTLY, **SMALL))
        .set_output(transform="pandas")
        .fit(frame, y)
    )
    assert pipe[-1].feature_names_in_[0] == "onehotencoder__colour_blue"
    assert set(pipe.predict(frame)) <= {"common", "rare", "rarest"}
    search = GridSearchCV(
        RFDLCClassifier(COSTLY, **SMALL),
        {"epochs": [1, 20]},
        scoring=make_utility_scorer(COSTLY),
        cv=2,
    ).fit(X, y)
    assert search.best_params_ == {"epochs": 20}
    assert len(cross_val_score(clone(search.best_estimator_), X, y, cv=2)) == 2


def test_wrong_input(three, named):
    X, y = three
    with pytest.raises(
        InputError, match="y has the class 'rarest' but the utility has no row"
    ):
        RFDLCClassifier(Utility.one_hot(["common", "rare"]), **SMALL).fit(*named)
    with pytest.warns(
        UserWarning, match="y has no sample of '3', which the utility names"
    ):
        model = RFDLCClassifier(Utility.one_hot(4), **SMALL).fit(X, y)
    assert (model.predict_proba(X).shape, list(model.actions_)) == (
        (len(X), 3),
        [0, 1, 2, 3],
    )
    np.testing.assert_array_equal(
        model.predict(X), RFDLCClassifier(**SMALL).fit(X, y).predict(X)
    )
    with pytest.raises(ValueError, match=r"only one class: \[1\]"):
        RFDLCClassifier(**SMALL).fit(X[:3], [1, 1, 1])
    with pytest.raises(ValueError, match="too large for dtype"):
        RFDLCClassifier(**SMALL).fit(np.where(np.arange(8) == 3, 1e200, X), y)
    with pytest.raises(InputError, match="setting widths="):
        RFDLCClassifier(hidden=(0,)).fit(X, y)
    with pytest.raises(InputError, match=r"target_prior 'unifrom' is unknown"):
        RFDLCClassifier(**SMALL, target_prior="unifrom").fit(X, y)
    with pytest.raises(InputError, match="setting particles=0 is not possible"):
        RFDLCClassifier(particles=0).fit(X, y)
    with pytest.warns(UserWarning, match="no class has two samples"):
        RFDLCClassifier(**SMALL).fit(X[:3], [0, 1, 2])


@pytest.mark.parametrize("backbone", ["mlp", "trees"])
def test_data_frames_are_read_as_rfdlc_train_reads_tables(backbone):
    """Features and their scaling are those of `rfdlc.load`; names of columns are
    checked as scikit-learn does.
    """
    rng = np.random.default_rng(0)
    size = rng.normal(size=120)
    frame = pd.DataFrame(
        {
            "size": size,
            "line": rng.choice(["a", "b"], 120),
            "day": "31.1.2024",
            "flag": True,
        }
    )
    frame.loc[3, "size"], frame.loc[5, "line"] = np.nan, None
    y = np.where(size > 0.8, "rare", "usual")
    model = rfdlc.RFDLCClassifier(backbone=backbone, epochs=3, random_state=0).fit(
        frame, y
    )
    data = rfdlc.load(frame.assign(target=y), test_fraction=0)
    assert (
        [code.name for code in model.encoder_.columns]
        == list(model.feature_names_in_)
        == list(frame)
    )
    assert model.encoder_.features == data.encoder.features
    np.testing.assert_allclose(
        model.normalisation_.mean, data.normalisation.mean, atol=1e-6
    )
    assert model.n_features_in_ == 4
    p = pickle.loads(pickle.dumps(model)).predict_proba(frame[:7])  # noqa: S301
    np.testing.assert_allclose(p, model.predict_proba(frame[:7]), atol=1e-7)
    with pytest.raises(InputError, match="X has no columns: expected a data frame"):
        model.predict(frame.to_numpy())
    with pytest.raises(ValueError, match="yet now missing:\n- line"):
        model.predict(frame.drop(columns="line"))
    plain = rfdlc.RFDLCClassifier(backbone="mlp", epochs=1, random_state=0).fit(
        frame[["size"]].fillna(0), y
    )
    assert plain.encoder_ is None


def test_errors_about_data_frames_name_what_the_estimator_has():
    rng = np.random.default_rng(0)
    size, y = rng.normal(size=1_200), rng.integers(0, 2, 1_200)
    frame = pd.DataFrame(
        {
            "claim": [f"C{i % 1_100}" for i in range(1_200)],
            "size": size,
            "line": rng.choice(["a", "b"], 1_200),
        }
    )
    with pytest.raises(
        InputError,
        match=r"X\.drop\(columns=\['claim'\]\).*fit\(\.\.\., groups=X\['claim'\]\)$",
    ) as told:
        RFDLCClassifier().fit(frame, y)
    assert "--" not in str(told.value)
    kept = frame.drop(columns=["claim"])
    model = RFDLCClassifier(backbone="mlp", epochs=1, random_state=0).fit(
        kept, y, groups=frame["claim"]
    )
    for call in (model.predict, model.predict_proba, model.decision_function):
        with pytest.raises(
            ValueError,
            match=r"0 sample\(s\) .* minimum of 1 is required by RFDLCClassifier",
        ):
            call(kept.iloc[:0])


def test_a_budget_leaves_out_candidates(three, capsys):
    X, y = three
    whole = RFDLCClassifier(random_state=0, verbose=True).fit(X, y)
    assert "Fitting arrays" in capsys.readouterr().err
    short = RFDLCClassifier(random_state=0, budget="0.01s").fit(X, y)
    assert capsys.readouterr().err == ""
    assert len(short.choice_.losses) == 1 < len(whole.choice_.losses)
    with pytest.raises(
        InputError,
        match=(
            "budget='soon' is not a duration: expected seconds, or a number with s, m"
        ),
    ):
        clone(short).set_params(budget="soon").fit(X, y)
    with pytest.warns(
        UserWarning,
        match="budget has no effect: networks alone take as long as their epochs",
    ):
        RFDLCClassifier(backbone="mlp", epochs=1, budget=5, random_state=0).fit(X, y)


def test_labels_that_differ_in_spelling_alone_are_told(three):
    X, y = three
    labels = np.where(
        y == 0, "bad", np.where(np.arange(len(y)) % 2 == 0, " Bad", "good")
    )
    with pytest.warns(
        UserWarning,
        match=(
            "classes ' Bad', 'bad' differ in case, spaces, hyphens or hidden"
            " characters alone"
        ),
    ):
        RFDLCClassifier(backbone="mlp", epochs=1, random_state=0).fit(X, labels)


def test_help_shows_short_types():
    for kind in (RFDLCClassifier, UtilityClassifier):
        shown = pydoc.plain(pydoc.render_doc(kind))
        assert "_typing" not in shown
        assert max(map(len, shown.splitlines())) < 1000

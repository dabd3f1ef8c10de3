"""UtilityClassifier: out-of-fold calibration, decisions, utilities, priors, and what it
wraps.
"""

import pickle
import warnings
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.compose import make_column_transformer
from sklearn.datasets import make_classification
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import (
    FixedThresholdClassifier,
    GridSearchCV,
    GroupKFold,
    StratifiedKFold,
    cross_val_score,
)
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.svm import LinearSVC

from rfdlc import (
    Classes,
    Decider,
    InputError,
    Utility,
    UtilityClassifier,
    make_utility_scorer,
)
from rfdlc.decisions.sets import SetUtility
from rfdlc.estimators.scoring import make_metric_scorer
from rfdlc.probabilities.calibrators import CALIBRATORS

COSTLY = [[1, 0, 0], [-2, 1, 0], [-8, -3, 1]]


@pytest.mark.parametrize("ensemble", [False, True])
def test_calibration_is_out_of_fold_as_in_a_plain_loop(three, ensemble):
    X, y = three
    model = UtilityClassifier(
        GaussianNB(),
        COSTLY,
        cv=StratifiedKFold(4),
        ensemble=ensemble,
        calibration="temperature",
    ).fit(X, y)
    models, scores, targets = [GaussianNB().fit(X, y)], [], []
    for learn, held in StratifiedKFold(4).split(X, y):
        models.append(GaussianNB().fit(X[learn], y[learn]))
        scores.append(models[-1].predict_proba(X[held]))
        targets.append(y[held])
    utility = Utility(COSTLY, Classes.from_labels(y))
    reference = Decider(utility, calibration="temperature", train_prior="train").fit(
        np.concatenate(scores), np.concatenate(targets)
    )
    temperature = reference.model.calibrator.temperature
    assert model.decider_.model.calibrator.temperature == pytest.approx(
        reference.model.calibrator.temperature
    )
    assert temperature > 1.01  # naive Bayes is too sure: there was something to do
    softer = [
        each.predict_proba(X) ** (1 / temperature)
        for each in (models if ensemble else models[:1])
    ]
    p = np.mean([each / each.sum(1, keepdims=True) for each in softer], 0)
    np.testing.assert_allclose(model.predict_proba(X), p, atol=1e-6)
    np.testing.assert_allclose(model.decision_function(X), p @ COSTLY, atol=1e-6)
    np.testing.assert_array_equal(model.predict(X), (p @ COSTLY).argmax(1))


@pytest.mark.parametrize(
    ("c00", "c01", "c10", "c11"), [(0, 9, 1, 0), (0.5, 4, 2, -1), (0, 1, 2, 0)]
)
@pytest.mark.parametrize(
    "estimator",
    [LogisticRegression(), GaussianNB(), HistGradientBoostingClassifier(max_iter=10)],
)
def test_two_classes_equal_elkans_threshold(two, estimator, c00, c01, c10, c11):
    X, y = two  # c_ij: cost of deciding i where j is true
    threshold = (c10 - c00) / (c10 - c00 + c01 - c11)
    theirs = FixedThresholdClassifier(
        estimator, threshold=threshold, response_method="predict_proba"
    ).fit(X, y)
    ours = UtilityClassifier(
        estimator, -np.array([[c00, c10], [c01, c11]]), calibration=None
    ).fit(X, y)
    np.testing.assert_array_equal(ours.predict(X), theirs.predict(X))
    assert 0 < ours.predict(X).mean() < 1


@pytest.mark.parametrize("calibration", [None, "temperature"])
@pytest.mark.parametrize(
    "estimator", [LogisticRegression(), RandomForestClassifier(20, random_state=0)]
)
def test_symmetric_costs_equal_plain_predict(two, three, estimator, calibration):
    for X, y in (two, three):
        costs = 3.5 * (1 - np.eye(len(np.unique(y))))
        ours = UtilityClassifier(
            estimator, -costs, calibration=calibration, ensemble=False
        ).fit(X, y)
        np.testing.assert_array_equal(
            ours.predict(X), clone(estimator).fit(X, y).predict(X)
        )


def test_a_temperature_leaves_the_most_probable_class_alone(three):
    X, y = three
    plain = GaussianNB().fit(X, y)
    ours = UtilityClassifier(
        GaussianNB(), ensemble=False, calibration="temperature"
    ).fit(X, y)
    np.testing.assert_array_equal(ours.predict(X), plain.predict(X))


class Counting(ClassifierMixin, BaseEstimator):
    """Counts how often it is fitted, over all its clones."""

    fits = 0

    def fit(self, X, y):
        type(self).fits += 1
        self.model_ = GaussianNB().fit(X, y)
        self.classes_ = self.model_.classes_
        return self

    def predict_proba(self, X):
        return self.model_.predict_proba(X)


def test_set_utility_fits_nothing(three):
    X, y = three
    Counting.fits = 0
    model = UtilityClassifier(Counting()).fit(X, y)
    assert Counting.fits == 6  # five folds, and the whole
    before = model.decider_.model.calibrator
    assert model.set_utility(COSTLY) is model
    assert Counting.fits == 6
    assert model.decider_.model.calibrator is before
    fresh = UtilityClassifier(Counting(), COSTLY).fit(X, y)
    np.testing.assert_array_equal(model.predict(X), fresh.predict(X))
    assert model.get_params()["utility"] is COSTLY
    with pytest.raises(ValueError, match="rows but y has"):
        model.set_utility([[1, 0]])
    assert model.get_params()["utility"] is COSTLY  # nothing has changed
    with pytest.raises(NotFittedError):
        UtilityClassifier(Counting()).set_utility(COSTLY)


def test_prefit_calibrates_on_what_it_is_given(three):
    X, y = three
    fitted = GaussianNB().fit(X[:200], y[:200])
    model = UtilityClassifier(
        fitted, COSTLY, cv="prefit", calibration="temperature"
    ).fit(X[200:], y[200:])
    assert model.estimator_ is fitted
    reference = Decider(
        Utility(COSTLY), calibration="temperature", train_prior=np.bincount(y[200:])
    ).fit(fitted.predict_proba(X[200:]), y[200:])
    assert model.decider_.model.calibrator.temperature == pytest.approx(
        reference.model.calibrator.temperature
    )
    with pytest.raises(NotFittedError):
        UtilityClassifier(GaussianNB(), cv="prefit").fit(X, y)
    with pytest.raises(ValueError, match=r"previously unseen labels: \[7\]"):
        UtilityClassifier(fitted, cv="prefit").fit(X[:10], np.r_[y[:9], 7])


class Backwards(ClassifierMixin, BaseEstimator):
    """Names its classes from the last to the first, and has its columns so."""

    def fit(self, X, y):
        self.model_ = GaussianNB().fit(X, y)
        self.classes_ = self.model_.classes_[::-1]
        return self

    def predict_proba(self, X):
        return self.model_.predict_proba(X)[:, ::-1]


def test_columns_are_matched_with_the_classes_that_a_model_names(three):
    X, y = three
    pairs = (
        (Backwards(), GaussianNB(), 3),
        (Backwards().fit(X, y), GaussianNB().fit(X, y), "prefit"),
    )
    for backwards, plain, cv in pairs:
        found, expected = (
            UtilityClassifier(each, COSTLY, cv=cv).fit(X, y)
            for each in (backwards, plain)
        )
        np.testing.assert_array_equal(found.classes_, expected.classes_)
        np.testing.assert_allclose(found.predict_proba(X), expected.predict_proba(X))
        np.testing.assert_array_equal(found.predict(X), expected.predict(X))


def test_frozen_estimators_are_left_as_they_are(three):
    from sklearn.frozen import FrozenEstimator

    X, y = three
    fitted = GaussianNB().fit(X[:200], y[:200])
    frozen = UtilityClassifier(FrozenEstimator(fitted), COSTLY).fit(X[200:], y[200:])
    prefit = UtilityClassifier(fitted, COSTLY, cv="prefit").fit(X[200:], y[200:])
    np.testing.assert_allclose(frozen.predict_proba(X), prefit.predict_proba(X))
    assert len(frozen.estimators_) == len(prefit.estimators_) == 1


class Recording(GaussianNB):
    """Remembers which samples every fit and every prediction saw, by their first
    feature.
    """

    seen: ClassVar = []

    def fit(self, X, y):
        self.learned = set(X[:, 0])
        return super().fit(X, y)

    def predict_proba(self, X):
        type(self).seen.append((self.learned, set(X[:, 0])))
        return super().predict_proba(X)


@pytest.mark.parametrize("calibration", ["temperature", "auto"])
def test_held_out_samples_may_lack_a_class_that_the_fitted_estimator_knows(
    named, calibration
):
    from sklearn.frozen import FrozenEstimator

    X, y = named
    fitted, seen = LogisticRegression().fit(X, y), y != "rarest"
    costs = pd.DataFrame(COSTLY, np.unique(y), np.unique(y))
    with pytest.warns(
        UserWarning, match="held-out samples have none of rarest"
    ) as told:
        prefit = UtilityClassifier(
            fitted, costs, cv="prefit", calibration=calibration
        ).fit(X[seen], y[seen])
    assert len(told) == 1
    p, own = prefit.predict_proba(X), fitted.predict_proba(X)
    assert np.abs(p - own).max() < 0.1  # it is calibrated on its own samples
    with pytest.warns(UserWarning, match="held-out samples have none of rarest"):
        frozen = UtilityClassifier(
            FrozenEstimator(fitted), costs, calibration=calibration
        ).fit(X[seen], y[seen])
    np.testing.assert_allclose(frozen.predict_proba(X), p)


def test_labels_that_differ_from_those_of_a_fitted_estimator_are_named(named):
    from sklearn.frozen import FrozenEstimator

    X, y = named
    seen = y != "rarest"
    less = LogisticRegression().fit(X[seen], y[seen])
    with pytest.raises(
        InputError,
        match=r"\['rarest'\]; the fitted estimator knows \['common', 'rare'\]",
    ):
        UtilityClassifier(less, cv="prefit").fit(X, y)
    all_known = make_pipeline(
        StandardScaler(), FrozenEstimator(LogisticRegression().fit(X, y))
    )
    with pytest.raises(
        InputError,
        match=r"knows the classes \['rarest'\], of which y has no sample: .*prefit",
    ):
        UtilityClassifier(all_known).fit(X[seen], y[seen])


@pytest.mark.parametrize("cv", ["prefit", 4])
def test_calibration_knows_the_groups(three, monkeypatch, cv):
    X, y = three
    groups, seen, fit = [f"site {i % 8}" for i in range(len(X))], [], Decider.fit
    monkeypatch.setattr(
        Decider,
        "fit",
        lambda self, *a, groups, **o: seen.append(groups) or fit(self, *a, **o),
    )
    UtilityClassifier(GaussianNB().fit(X, y), cv=cv).fit(X, y, groups=groups)
    assert seen[0].tolist() == groups


@pytest.mark.parametrize("cv", [4, np.int64(4), GroupKFold(3)])
def test_groups_are_never_on_both_sides(three, cv):
    X, y = three
    groups = np.arange(len(X)) // 8
    group_of = dict(zip(X[:, 0], groups, strict=True))
    Recording.seen = []
    UtilityClassifier(Recording(), cv=cv).fit(X, y, groups=groups)
    assert len(Recording.seen) == (4 if cv == 4 else 3)
    for learned, held in Recording.seen:
        assert not {group_of[x] for x in learned} & {group_of[x] for x in held}


def test_a_class_that_a_fold_could_not_learn_is_left_out_of_calibration(three):
    X, y = three
    rare = np.r_[y[:-1], 9]  # a class of one sample: its fold has never seen it
    with pytest.warns(UserWarning, match="least populated class"):
        model = UtilityClassifier(GaussianNB(), cv=4, calibration="temperature").fit(
            X, rare
        )
    assert list(model.classes_) == [0, 1, 2, 9]
    assert [len(each.classes_) for each in model.estimators_] == [
        4,
        4,
        4,
        4,
    ]  # of all samples, and of three folds
    assert (
        model.decider_.model.calibrator.temperature < 3
    )  # the impossible sample would have made it far larger


@pytest.mark.parametrize("calibration", sorted(set(CALIBRATORS) - {"auto"}))
@pytest.mark.parametrize("estimator_prior", ["train", "uniform"])
def test_sample_weights_count_as_repetitions(three, calibration, estimator_prior):
    X, y = three
    weights = np.random.default_rng(0).integers(0, 4, len(y))
    fitted = GaussianNB().fit(X, y)
    utility = Utility.tail_sensitive(
        Classes.from_labels(y)
    )  # has counts of its own, which weights leave alone
    options = {
        "cv": "prefit",
        "target_prior": "uniform",
        "calibration": calibration,
        "estimator_prior": estimator_prior,
    }
    weighted = UtilityClassifier(fitted, utility, **options).fit(
        X, y, sample_weight=weights
    )
    repeated = UtilityClassifier(fitted, utility, **options).fit(
        X.repeat(weights, 0), y.repeat(weights)
    )
    np.testing.assert_allclose(
        weighted.predict_proba(X), repeated.predict_proba(X), rtol=1e-4
    )


def test_sample_weights_reach_the_estimator(three):
    X, y = three
    weights = np.random.default_rng(0).integers(0, 4, len(y))
    piped = make_pipeline(StandardScaler(), LogisticRegression())
    assert UtilityClassifier(piped).fit(X, y, sample_weight=weights).score(X, y) > 0.5
    with pytest.raises(
        ValueError, match="KNeighborsClassifier does not support sample weights"
    ):
        UtilityClassifier(KNeighborsClassifier()).fit(X, y, sample_weight=weights)
    with pytest.raises(ValueError, match="Negative values"):
        UtilityClassifier(GaussianNB()).fit(X, y, sample_weight=-np.ones(len(y)))


def test_priors_are_corrected_once(three):
    X, y = three
    shares = np.bincount(y) / len(y)
    plain = UtilityClassifier(GaussianNB(), calibration=None).fit(X, y).predict_proba(X)
    uniform = (
        UtilityClassifier(GaussianNB(), calibration=None, target_prior="uniform")
        .fit(X, y)
        .predict_proba(X)
    )
    expected = plain / shares
    np.testing.assert_allclose(uniform, expected / expected.sum(1, keepdims=True))
    back = (
        UtilityClassifier(GaussianNB(), calibration=None, estimator_prior="uniform")
        .fit(X, y)
        .predict_proba(X)
    )
    expected = plain * shares
    np.testing.assert_allclose(back, expected / expected.sum(1, keepdims=True))
    shifted = {0: 0.2, 1: 0.2, 2: 0.6}
    given = (
        UtilityClassifier(GaussianNB(), calibration=None, target_prior=shifted)
        .fit(X, y)
        .predict_proba(X)
    )
    expected = plain / shares * [0.2, 0.2, 0.6]
    np.testing.assert_allclose(given, expected / expected.sum(1, keepdims=True))


def test_abstaining(three, named):
    X, y = three
    handed = np.column_stack([np.eye(3), np.full(3, 0.6)])
    model = UtilityClassifier(GaussianNB(), handed).fit(X, y)
    unsure = model.predict_proba(X).max(1) < 0.6
    np.testing.assert_array_equal(model.predict(X) == -1, unsure)
    assert 0 < unsure.mean() < 1
    assert model.decision_function(X).shape == (len(X), 4)
    moved = model.set_params(abstain_label=99).set_utility(handed)
    assert 99 in moved.predict(X)
    assert -1 not in moved.predict(X)
    X, y = named
    words = UtilityClassifier(
        GaussianNB(), Utility.one_hot(["common", "rare", "rarest"]).with_abstain(0.6)
    ).fit(X, y)
    np.testing.assert_array_equal(words.predict(X) == "abstain", unsure)
    with pytest.raises(InputError, match="abstain_label 1 is a class in y"):
        UtilityClassifier(GaussianNB(), handed, abstain_label=1).fit(*three)
    two_others = Utility(
        np.zeros((3, 5)), ["0", "1", "2"], ["0", "1", "2", "ask", "wait"]
    )
    with pytest.raises(
        InputError, match=r"2 actions that are not classes \(ask, wait\)"
    ):
        UtilityClassifier(GaussianNB(), two_others).fit(*three)
    both = UtilityClassifier(
        GaussianNB(), two_others, abstain_label={"ask": -1, "wait": -2}
    ).fit(*three)
    assert list(both.actions_) == [0, 1, 2, -1, -2]


def test_utilities_of_every_kind_are_one(named, tmp_path):
    X, y = named
    names = ["rarest", "common", "rare"]  # matched by name, whatever the order
    order = [2, 0, 1]
    utility = Utility(np.array(COSTLY)[np.ix_(order, order)], names)
    utility.to_csv(tmp_path / "costs.csv")
    frame = pd.DataFrame(utility.matrix, index=names, columns=names)
    expected = UtilityClassifier(GaussianNB(), COSTLY).fit(X, y).predict(X)
    for given in (
        utility,
        tmp_path / "costs.csv",
        str(tmp_path / "costs.csv"),
        frame,
        np.array(COSTLY),
    ):
        np.testing.assert_array_equal(
            UtilityClassifier(GaussianNB(), given).fit(X, y).predict(X), expected
        )
    tail = UtilityClassifier(GaussianNB(), "tail-sensitive").fit(X, y)
    counted = Utility.tail_sensitive(Classes.from_labels(y))
    assert tail.decider_.utility == counted


def test_classes_that_only_one_side_has_are_named(named):
    X, y = named
    with pytest.raises(
        InputError, match="y has the class 'rarest' but the utility has no row for it"
    ):
        UtilityClassifier(GaussianNB(), Utility.one_hot(["common", "rare"])).fit(X, y)
    with pytest.raises(InputError, match=r"'rarest' but .* did you mean 'rarets'"):
        UtilityClassifier(
            GaussianNB(), Utility.one_hot(["common", "rare", "rarets"])
        ).fit(X, y)
    with pytest.raises(
        InputError, match=r"2 rows but y has 3 classes \(common, rare, rarest\)"
    ):
        UtilityClassifier(GaussianNB(), np.eye(2)).fit(X, y)
    with pytest.raises(
        InputError, match="if y lacks a class, as a fold may, name rows and columns"
    ):
        UtilityClassifier(GaussianNB(), np.eye(4)).fit(X, y)
    with pytest.raises(
        InputError,
        match=r"neither a file nor one of one-hot, tail-sensitive.*did you mean",
    ):
        UtilityClassifier(GaussianNB(), "tail-sensitve").fit(X, y)
    with pytest.raises(InputError, match="calibration 'platt' is unknown"):
        UtilityClassifier(GaussianNB(), calibration="platt").fit(X, y)
    with pytest.raises(InputError, match="LinearSVC has no predict_proba"):
        UtilityClassifier(LinearSVC()).fit(X, y)
    with pytest.raises(
        InputError, match=r"target_prior 'unifrom' is unknown.*did you mean 'uniform'"
    ):
        UtilityClassifier(GaussianNB(), target_prior="unifrom").fit(X, y)
    with pytest.raises(ValueError, match="Input y contains NaN"):
        UtilityClassifier(GaussianNB()).fit(X, np.where(y == "rare", np.nan, 1.0))
    with pytest.raises(ValueError, match=r"Found array with 0 sample\(s\)"):
        UtilityClassifier(GaussianNB()).fit(X[:0], y[:0])


# Four classes, the last without a sample, and a second opinion.
WIDE = np.array(
    [
        [1, 0, 0, 0, 0.2],
        [-2, 1, 0, 0.6, 0.2],
        [-8, -3, 1, 0.6, 0.2],
        [-9, -9, -9, 1, 0.2],
    ]
)


@pytest.mark.parametrize("kind", ["text", "objects", "numbers", "floats"])
def test_a_class_that_only_the_utility_has_gets_probability_0(three, kind):
    X, y = three
    names, labels = (
        ["a", "b", "c", "d"],
        np.array(["a", "b", "c", "d"], dtype=object if kind == "objects" else str),
    )
    if kind in ("numbers", "floats"):
        names, labels = (
            ["0", "1", "2", "10"],
            np.array([0, 1, 2, 10], dtype=int if kind == "numbers" else float),
        )
    order = [3, 1, 0, 2]  # the one without a sample may come first
    utility = Utility(
        WIDE[order][:, [*order, 4]],
        [names[i] for i in order],
        [*(names[i] for i in order), "ask"],
    )
    with pytest.warns(
        UserWarning, match=f"y has no sample of '{names[3]}', which the utility names"
    ) as said:
        model = UtilityClassifier(GaussianNB(), utility).fit(X, labels[y])
    assert len(said) == 1
    np.testing.assert_array_equal(model.classes_, labels[:3])
    ask = "ask" if kind in ("text", "objects") else -1
    assert list(model.actions_) == [*labels, ask]
    p = UtilityClassifier(GaussianNB()).fit(X, y).predict_proba(X)
    np.testing.assert_allclose(model.predict_proba(X), p)
    values = (
        np.column_stack([p, np.zeros(len(p))]) @ WIDE
    )  # the class has probability 0
    np.testing.assert_array_equal(model.predict(X), model.actions_[values.argmax(1)])
    np.testing.assert_allclose(model.decision_function(X), values)
    assert labels[3] in model.predict(
        X
    )  # its action is worth 0.6 for two of the others
    with pytest.warns(UserWarning, match="no sample of"):
        again = UtilityClassifier(GaussianNB()).fit(X, labels[y]).set_utility(utility)
    np.testing.assert_array_equal(again.predict(X), model.predict(X))


def test_folds_without_a_rare_class_are_scored(named):
    """Folds by time: the first training part lacks the class that comes late, and the
    last test part has no other.
    """
    X, y = named
    rows = np.argsort(y == "rarest", kind="stable")
    X, y = X[rows], y[rows]
    early, late = np.arange(200), np.arange(200, len(y))
    assert "rarest" not in y[early]
    folds = [
        (early, late),
        (np.arange(0, len(y), 2), early),
        (np.r_[early, late[::2]], np.flatnonzero(y == "rarest")),
    ]
    utility = Utility(COSTLY, ["common", "rare", "rarest"])
    searched = UtilityClassifier(GaussianNB(), utility, cv=2)
    with pytest.warns(UserWarning, match="no sample of 'rarest'"):
        found = cross_val_score(
            searched,
            X,
            y,
            scoring=make_utility_scorer(utility),
            cv=folds,
            error_score="raise",
        )
    expected = []
    for fit_rows, held in folds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            decided = clone(searched).fit(X[fit_rows], y[fit_rows]).predict(X[held])
        worth = {
            (t, d): COSTLY[i][j]
            for i, t in enumerate(utility.actions)
            for j, d in enumerate(utility.actions)
        }
        expected.append(
            np.mean([worth[pair] for pair in zip(y[held], decided, strict=True)])
        )
    np.testing.assert_allclose(found, expected)
    with pytest.warns(UserWarning, match="no sample of 'rarest'"):
        own = cross_val_score(
            searched,
            X,
            y,
            scoring=make_metric_scorer("mean_utility"),
            cv=folds,
            error_score="raise",
        )
    np.testing.assert_allclose(
        own, expected
    )  # the utility of the estimator has the row, too
    with pytest.raises(
        InputError, match="y has the class 'rarest' but the utility has no row for it"
    ):
        UtilityClassifier(GaussianNB(), Utility.one_hot(["common", "rare"])).fit(X, y)


def test_it_is_at_home_in_scikit_learn(named, tmp_path):
    X, y = named
    frame = pd.DataFrame(X, columns=[f"f{i}" for i in range(X.shape[1])])
    frame["colour"] = np.where(X[:, 0] > 0, "red", "blue")
    numbers = [c for c in frame if c != "colour"]
    encode = make_column_transformer(
        (OneHotEncoder(sparse_output=False), ["colour"]), (StandardScaler(), numbers)
    )
    inside = UtilityClassifier(make_pipeline(encode, LogisticRegression()), COSTLY).fit(
        frame, y
    )
    assert list(inside.feature_names_in_) == list(frame.columns)
    outside = make_pipeline(encode, UtilityClassifier(LogisticRegression(), COSTLY))
    outside.set_output(transform="pandas").fit(frame, y)
    assert inside.score(frame, y) > 0.5
    assert list(outside[-1].feature_names_in_[:2]) == [
        "onehotencoder__colour_blue",
        "onehotencoder__colour_red",
    ]
    search = GridSearchCV(
        UtilityClassifier(LogisticRegression(), COSTLY, cv=2),
        {"estimator__C": [0.01, 1], "calibration": ["temperature", None]},
        scoring=make_utility_scorer(Utility(COSTLY, ["common", "rare", "rarest"])),
        cv=2,
    ).fit(X, y)
    scores = cross_val_score(
        LogisticRegression(), X, y, scoring=make_utility_scorer(COSTLY), cv=2
    )
    assert search.best_score_ > scores.mean()
    copied = pickle.loads(pickle.dumps(inside))  # noqa: S301
    np.testing.assert_array_equal(copied.predict(frame), inside.predict(frame))
    assert clone(inside).get_params()["utility"] == COSTLY


def boosted(module, name):
    return getattr(pytest.importorskip(module), name)


def skorch_net():
    """A network of skorch."""
    skorch = pytest.importorskip("skorch")
    from torch import manual_seed, nn

    manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3), nn.Softmax(-1)
    )
    return skorch.NeuralNetClassifier(
        layers, lr=0.1, max_epochs=15, train_split=None, verbose=0
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: boosted("lightgbm", "LGBMClassifier")(n_estimators=5, verbose=-1),
        lambda: boosted("xgboost", "XGBClassifier")(n_estimators=5),
        skorch_net,
    ],
    ids=["lightgbm", "xgboost", "skorch"],
)
def test_other_libraries_can_be_wrapped(three, make):
    X, y = three
    X = X.astype(np.float32)
    model = UtilityClassifier(make(), COSTLY, cv=2).fit(X, y)
    bare = model.estimator_.predict(X)
    worth = np.array(COSTLY)
    assert worth[y, model.predict(X)].mean() > worth[y, bare].mean()


def test_probabilities_do_not_depend_on_the_utility(three):
    """Earlier one model spoke for a one-hot utility, and the mean of six for
    any other.
    """
    X, y = three
    plain, costly = (
        UtilityClassifier(GaussianNB(), utility).fit(X, y).predict_proba(X)
        for utility in (None, COSTLY)
    )
    np.testing.assert_allclose(plain, costly)


def test_no_vote_of_a_forest_is_not_impossible(three):
    """Earlier p = 0 of 20 trees was taken as it is, and a few such samples drove the
    temperature.
    """
    X, y = three
    forest = RandomForestClassifier(20, random_state=0).fit(X, y)
    smoothed = (
        UtilityClassifier(forest, cv="prefit", calibration=None)
        .fit(X, y)
        .predict_proba(X)
    )
    assert forest.predict_proba(X).min() == 0
    assert 0.001 < smoothed.min() < 1 / 20


def test_sets_of_new_samples():
    X, y = make_classification(
        4000, n_informative=8, n_classes=4, weights=[0.6, 0.25, 0.1], random_state=0
    )
    names = np.array(["a", "b", "c", "d"])[y]
    model = UtilityClassifier(LogisticRegression(max_iter=500)).fit(
        X[:1000], names[:1000]
    )
    with pytest.raises(InputError, match="no sets yet"):
        model.predict_set(X)
    sizes = {}
    for kind in ("marginal", "class", "macro"):
        members = model.conformalize(
            X[1000:2500], names[1000:2500], kind=kind, coverage=0.85
        ).predict_set(X[2500:])
        assert members.shape == (1500, 4)
        covered, sizes[kind] = (
            members[np.arange(1500), y[2500:]],
            members.sum(axis=1).mean(),
        )
        shares = [covered[y[2500:] == c].mean() for c in range(4)]
        assert (
            abs((np.mean(shares) if kind == "class" else covered.mean()) - 0.85) < 0.04
        )
        assert (min(shares) < 0.6) == (kind == "marginal")
    assert sizes["marginal"] < sizes["macro"]
    expected = SetUtility.of("u80", 4).members(
        model.predict_proba(X[:50]), model.decider_.utility
    )
    assert np.array_equal(model.predict_set(X[:50], "u80"), expected)
    with pytest.raises(InputError, match=r"coverage is 1\.5"):
        model.conformalize(X, names, coverage=1.5)
    with pytest.raises(InputError, match="previously unseen labels"):
        model.conformalize(X[:100], np.full(100, "z"))


@pytest.mark.parametrize("target", ["train", "uniform"])
def test_weights_that_move_the_prior_are_told(target: str) -> None:
    rng = np.random.default_rng(0)
    y = np.repeat([0, 1], [90, 10])
    X, balanced = rng.normal(size=(100, 2)) + y[:, None], np.where(y == 1, 9.0, 1.0)
    model = UtilityClassifier(LogisticRegression(), target_prior=target)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.fit(X, y, sample_weight=balanced)
        model.fit(X, y, sample_weight=1 + rng.random(100))
    told = [str(one.message) for one in found if "class prior" in str(one.message)]
    assert told == (
        [
            "sample_weight changes the class prior that is decided for: 0 has 50.0%"
            " instead of 90.0%; give target_prior as shares to decide for other"
            " frequencies, such as those of y"
        ]
        if target == "train"
        else []
    )

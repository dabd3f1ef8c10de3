"""The Decider against brute force and its own promises."""

import json
import warnings

import numpy as np
import pandas
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import softmax

from rfdlc import (
    Classes,
    Decider,
    InputError,
    Predictions,
    Utility,
    compare,
    evaluate,
    report,
)


@st.composite
def problems(draw):
    """Probabilities (N, C) and a utility (C, A) of small whole numbers, so that sums
    are exact enough to compare.
    """
    n, c, a = draw(st.integers(1, 5)), draw(st.integers(2, 5)), draw(st.integers(2, 6))
    weights = draw(arrays(np.int64, (n, c), elements=st.integers(0, 9)))
    assume((weights.sum(axis=1) > 0).all())
    matrix = draw(arrays(np.int64, (c, a), elements=st.integers(-5, 5)))
    return weights / weights.sum(axis=1, keepdims=True), matrix.astype(float)


def utility_of(matrix):
    return Utility(
        matrix,
        [f"c{i}" for i in range(len(matrix))],
        [f"a{i}" for i in range(matrix.shape[1])],
    )


def gain_of(probabilities, matrix, action):
    return sum(p * matrix[y, action] for y, p in enumerate(probabilities))


@given(problems())
def test_equals_brute_force_over_all_actions(problem):
    p, matrix = problem
    for row, action in zip(p, Decider(utility_of(matrix)).decide(p), strict=True):
        best = max(gain_of(row, matrix, a) for a in range(matrix.shape[1]))
        assert gain_of(row, matrix, action) == pytest.approx(best, abs=1e-12)


@given(problems(), st.integers(-7, 7))
def test_a_constant_in_a_row_changes_nothing(problem, constant):
    p, matrix = problem
    shifted = matrix.copy()
    shifted[0] += constant
    before, after = (
        Decider(utility_of(matrix)).decide(p),
        Decider(utility_of(shifted)).decide(p),
    )
    for row, one, other in zip(p, before, after, strict=True):  # equal, or equally good
        assert gain_of(row, matrix, one) == pytest.approx(
            gain_of(row, matrix, other), abs=1e-12
        )


@given(problems(), st.randoms())
def test_moves_with_a_permutation_of_classes(problem, random):
    p, matrix = problem
    order = list(range(len(matrix)))
    random.shuffle(order)
    before = Decider(utility_of(matrix))
    after = Decider(utility_of(matrix[order]))
    assert before.utility.gains(before.probabilities(p)) == pytest.approx(
        after.utility.gains(after.probabilities(p[:, order])), abs=1e-12
    )


@given(problems())
def test_one_hot_is_argmax_under_every_rule(problem):
    p, _ = problem
    top = np.sort(p, axis=1)
    assume((top[:, -1] - top[:, -2] > 1e-9).all())
    for rule in ("expected-utility", "argmax"):
        assert (
            Decider(Utility.one_hot(p.shape[1]), rule=rule).decide(p).tolist()
            == p.argmax(axis=1).tolist()
        )


def test_argmax_never_hands_over_and_needs_every_class():
    utility = Utility.one_hot(3).with_abstain(5)
    p = np.array([[0.2, 0.5, 0.3]])
    assert Decider(utility).decide(p).tolist() == [3]
    assert Decider(utility, rule="argmax").decide(p).tolist() == [1]
    with pytest.raises(InputError, match="an action for every class"):
        Decider(Utility([[1, 0], [0, 1]], ["a", "b"], ["wait", "go"]), rule="argmax")


def test_argmax_follows_the_corrected_prior():
    decider = Decider(
        Utility.one_hot(2),
        train_prior=[0.9, 0.1],
        target_prior="uniform",
        rule="argmax",
    )
    assert decider.decide([[0.8, 0.2], [0.95, 0.05]]).tolist() == [1, 0]


class TestCombination:
    rng = np.random.default_rng(1)
    z = rng.normal(size=(3, 40, 4)).astype(np.float32)

    def test_mean_probabilities(self):
        naive = softmax(self.z, axis=2).mean(axis=0)
        assert Decider(Utility.one_hot(4)).probabilities(
            self.z, logits=True
        ) == pytest.approx(naive, abs=1e-6)

    def test_mean_logits(self):
        naive = softmax(self.z.mean(axis=0), axis=1)
        decider = Decider(Utility.one_hot(4), combine="mean-logits")
        assert decider.probabilities(self.z, logits=True) == pytest.approx(
            naive, abs=1e-6
        )
        from_p = decider.probabilities(softmax(self.z, axis=2))
        assert from_p == pytest.approx(naive, abs=1e-6)

    def test_weights(self):
        naive = np.tensordot([0.5, 0.25, 0.25], softmax(self.z, axis=2), axes=1)
        decider = Decider(Utility.one_hot(4), weights=[2, 1, 1])
        assert decider.probabilities(self.z, logits=True) == pytest.approx(
            naive, abs=1e-6
        )
        with pytest.raises(InputError, match="3 weights for 2 particles"):
            decider.decide(self.z[:2], logits=True)
        combined = Decider(Utility.one_hot(4)).probabilities(
            self.z[0], logits=True
        )  # as raw tables of a run are
        assert decider.probabilities(self.z[0], logits=True) == pytest.approx(
            np.asarray(combined)
        )

    def test_columns_in_another_order_are_noticed(self):
        rng = np.random.default_rng(0)
        y = rng.choice(3, 200, p=[0.1, 0.2, 0.7])
        p = softmax(2.5 * np.eye(3)[y] + rng.normal(size=(200, 3)), axis=1)
        decider = Decider(Utility.one_hot(["rare", "some", "usual"]))
        with pytest.warns(
            UserWarning,
            match=(
                r"right for \d+% of the samples, in the order usual, rare, some for"
                r" [89]\d%"
            ),
        ):
            decider.fit(p[:, [2, 0, 1]], y)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            decider.fit(p, y)
            decider.fit(
                rng.dirichlet(np.ones(3), 200), y
            )  # knows nothing, in any order

    @pytest.mark.parametrize("prior", [[0.95, 0.05], [0.8, 0.12, 0.05, 0.03]])
    def test_weights_of_rare_classes_are_not_another_order_of_columns(self, prior):
        """Weighted scores take frequent classes for the rarest; with their columns
        permuted they do not.
        """
        size, decider = len(prior), Decider(Utility.one_hot(len(prior)))
        for seed in range(20):
            rng = np.random.default_rng(seed)
            y = rng.choice(size, 2000, p=prior)
            log_p = np.log(prior) + 2 * (
                2 * np.eye(size)[y] + rng.normal(size=(2000, size))
            )  # those of Bayes
            for weight in (1, 20_000):  # of the rarest class, in the training
                p = softmax(log_p + np.log([*[1] * (size - 1), weight]), axis=1)
                assert weight == 1 or np.mean(p.argmax(axis=1) == y) < 0.35
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    decider.model.read_labelled(p, y)
                with pytest.warns(
                    UserWarning, match="the columns of the scores are right for"
                ):
                    decider.model.read_labelled(p[:, np.roll(np.arange(size), 1)], y)

    def test_some_order_of_columns_fits_any_few_samples(self):
        rng = np.random.default_rng(0)
        y = rng.permutation(100)[:40]
        p = softmax(np.eye(100)[y] + rng.normal(size=(40, 100)), axis=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Decider(Utility.one_hot(100)).model.read_labelled(p, y)

    def test_costs_taken_for_utilities_are_noticed(self):
        costs = [[0, 1, 5], [2, 0, 1], [9, 9, 0]]
        with pytest.warns(
            UserWarning,
            match=(
                "every right decision is worth the least of its row: if these are costs"
            ),
        ):
            Decider(Utility(costs))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for utility in (
                Utility.from_costs(costs),
                Utility(np.ones((3, 3))),
                Utility([[1, 0, 0], *costs[1:]]),
            ):
                Decider(utility).replace(combine="mean-logits")

    def test_one_particle_is_a_plain_model(self):
        for combine in ("mean-probabilities", "mean-logits"):
            decider = Decider(Utility.one_hot(4), combine=combine)
            alone, stacked = (
                decider.probabilities(z, logits=True) for z in (self.z[0], self.z[:1])
            )
            assert np.array_equal(alone, stacked)

    def test_calibration_comes_after_combination(self):
        y = self.rng.integers(0, 4, 40)
        decider = Decider(Utility.one_hot(4), calibration="temperature").fit(
            self.z, y, logits=True
        )
        pooled = np.log(softmax(self.z, axis=2).mean(axis=0))
        expected = softmax(pooled / decider.model.calibrator.temperature, axis=1)
        assert decider.probabilities(self.z, logits=True) == pytest.approx(
            expected, abs=1e-5
        )


class TestWhatIsAccepted:
    utility = Utility([[1, 0, 0], [-5, 1, 0], [-2, 0, 1]], ["cat", "dog", "newt"])
    p = np.array([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]])

    def expected(self):
        return Decider(self.utility).decide(self.p).tolist()

    def test_lists_float32_float16_and_integers(self):
        for given_scores in (
            self.p.tolist(),
            self.p.astype(np.float32),
            self.p.astype(np.float16),
        ):
            assert (
                Decider(self.utility).decide(given_scores).tolist() == self.expected()
            )
        assert Decider(self.utility).decide([[1, 0, 0]]).tolist() == [0]

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_torch_tensors(self, dtype):
        tensor = torch.tensor(self.p, dtype=dtype, requires_grad=True)
        assert Decider(self.utility).decide(tensor).tolist() == self.expected()

    def test_data_frames_are_matched_by_name(self):
        frame = pandas.DataFrame(self.p, columns=["cat", "dog", "newt"])[
            ["newt", "cat", "dog"]
        ]
        frame["target"] = ["cat", "dog"]
        assert Decider(self.utility).decide(frame).tolist() == self.expected()
        assert (
            Decider(self.utility).fit(frame).model.calibrator is not None
        )  # takes the targets from their column

    def test_numbers_in_a_data_frame_are_names_where_classes_are_called_by_numbers(
        self,
    ):
        frame = pandas.DataFrame({2: [0.9, 0.2], 1: [0.1, 0.8], "target": [2, 1]})
        assert evaluate(frame).accuracy == 1
        assert evaluate(frame, pandas.Series([2, 1])).accuracy == 1
        assert evaluate(frame.iloc[1:], [1]).accuracy == 1
        assert (
            evaluate(
                frame.rename(columns={2: "b", 1: "a"}).assign(target=[0, 1])
            ).accuracy
            == 1
        )  # indices

    def test_priors_of_pandas_are_matched_by_name(self):
        shares = pandas.Series({"newt": 5, "cat": 3, "dog": 2})
        decider = Decider(self.utility, train_prior="uniform", target_prior=shares)
        assert decider.model.target_prior.tolist() == [0.3, 0.2, 0.5]

    def test_predictions_are_matched_by_name(self):
        predictions = Predictions(
            probabilities=self.p[:, [2, 0, 1]], classes=Classes(("newt", "cat", "dog"))
        )
        assert Decider(self.utility).decide(predictions).tolist() == self.expected()

    def test_many_chunks_equal_one_row_at_a_time(self):
        p = softmax(np.random.default_rng(0).normal(size=(3000, 300)), axis=1)
        decider = Decider(
            Utility.tail_sensitive(Classes.from_counts(range(300, 0, -1)))
        )
        assert decider.decide(p).tolist() == [
            int(decider.decide(row[None])[0]) for row in p
        ]

    @pytest.mark.parametrize(
        ("scores", "message"),
        [
            ([0.5, 0.3, 0.2], r"shape \(3,\): expected \(samples, classes\)"),
            (np.zeros((1, 1, 1, 3)), r"shape \(1, 1, 1, 3\)"),
            ([[0.5, 0.5]], "2 columns but there are 3 classes"),
            (np.zeros((0, 3)), "at least one particle and one sample"),
            ([[0.5, np.nan, 0.5]], "scores hold nan in row 0, column 'dog'"),
            ([[1, 0, 0], [np.inf, 0, 0]], "scores hold inf in row 1, column 'cat'"),
            (
                [[1, 0, 0], [1.5, -0.5, 0]],
                (
                    "scores hold -0.5 in row 1, column 'dog'.*for logits set logits"
                    " .--logits"
                ),
            ),
            (
                [[1.0000001, -1e-7, 0]],
                (
                    "scores hold -1e-07 in row 0, column 'dog'.*set values that"
                    " rounding left below 0"
                ),
            ),
            (
                [[100, 0, 0], [33, 33, 33]],
                (
                    "sums to 100: .*; these are percentages: divide them by 100; rows"
                    " count from 0"
                ),
            ),
            (
                [[98, 1.5, 0.5], [101, 0, 0]],
                "sums to 100: .*; divide each row by its sum",
            ),
            (
                [[1, 0, 0], [0.5, 0.2, 0.2]],
                "row 1 of the probabilities sums to 0.9.*expected rows that sum to 1",
            ),
            ([["a", "b", "c"]], "scores must be numbers"),
            ([[1, 0], [1, 0, 0]], "scores must be numbers"),
            (
                pandas.DataFrame([[1, 0, 0]], columns=["cat", "dog", "newtt"]),
                "did you mean 'newtt'",
            ),
            (
                pandas.DataFrame([[1, 0]], columns=["cat", "dog"]),
                "no column for class 'newt'",
            ),
            (
                pandas.DataFrame([[1, 0, 0]], columns=["cat", "cat", "dog"]),
                "'cat' appears more than once",
            ),
            (
                pandas.DataFrame([["x", 0, 0]], columns=["cat", "dog", "newt"]),
                "must be numbers",
            ),
        ],
    )
    def test_bad_scores(self, scores, message):
        with pytest.raises(InputError, match=message):
            Decider(self.utility).decide(scores)

    def test_bad_values_late_in_the_data_name_their_row(self):
        p = np.full((200_000, 3), 1 / 3, dtype=np.float32)
        p[190_000, 2] = np.nan
        with pytest.raises(
            InputError, match=r"row 190000, column 'newt'.*; rows count from 0"
        ):
            Decider(self.utility).decide(p)
        with pytest.raises(InputError, match="expected finite logits"):
            Decider(self.utility).decide(p, logits=True)

    def test_one_column_for_two_classes(self):
        with pytest.raises(
            InputError,
            match=r"row 0 .* sums to 0.4.* for two classes add the other one \(1 - p\)",
        ):
            evaluate([[0.4], [0.9]], [0, 0])

    @pytest.mark.parametrize("offset", [1e7, -1e7])
    def test_what_all_actions_are_worth_alike_decides_nothing(self, offset):
        p = softmax(np.random.default_rng(0).normal(size=(500, 3)), axis=1).astype(
            np.float32
        )
        shifted = Utility(
            self.utility.matrix + offset * np.array([[1], [2], [0]]),
            self.utility.classes,
        )
        assert np.array_equal(
            Decider(shifted).decide(p), Decider(self.utility).decide(p)
        )
        assert np.array_equal(
            Decider(shifted).explain(p).action, Decider(self.utility).decide(p)
        )

    def test_rounded_probabilities_pass(self):
        assert Decider(self.utility).decide([[0.333, 0.333, 0.333]]).tolist() == [1]

    @pytest.mark.parametrize(
        ("targets", "message"),
        [
            ([0], "1 targets for 2 samples"),
            ([0, 3], "target 3 at position 1 is out of range"),
            (["cat", "bird"], "target 'bird' is not a class"),
            (None, "no targets"),
            ([0, np.nan], "target nan at position 1 is not a whole number"),
        ],
    )
    def test_bad_targets(self, targets, message):
        with pytest.raises(InputError, match=message):
            Decider(self.utility).fit(self.p, targets)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"rule": "max"},
                "rule 'max' is unknown: expected one of expected-utility",
            ),
            ({"combine": "mean"}, "combine 'mean' is unknown"),
            ({"calibration": "platt"}, "calibration 'platt' is unknown"),
            ({"calibration": True}, "calibration True is unknown"),
            ({"weights": [-1, 2]}, "expected one per particle"),
        ],
    )
    def test_bad_options(self, options, message):
        with pytest.raises(InputError, match=message):
            Decider(self.utility, **options)

    def test_a_matrix_is_no_utility_yet(self):
        with pytest.raises(InputError, match="utility is a ndarray"):
            Decider(np.eye(3))


def test_explain():
    utility = Utility([[1, 0], [-5, 1]], ["healthy", "ill"]).with_abstain(0.4)
    why = Decider(utility).explain([[0.7, 0.3], [1.0, 0.0]])
    # expected utilities: healthy .7 - 1.5 = -.8, ill .3, abstain .4; then healthy 1,
    # ill 0, abstain .4
    assert [why.actions[i] for i in why.action] == ["abstain", "healthy"]
    assert why.value == pytest.approx([0.4, 1])
    assert [why.actions[i] for i in why.runner_up] == ["ill", "abstain"]
    assert why.runner_up_value == pytest.approx([0.3, 0.4])
    assert why.argmax.tolist() == [0, 0]
    assert why.probability == pytest.approx([0.7, 1])


def test_large_values_alike_do_not_hide_what_differs():
    p = np.random.default_rng(0).dirichlet(np.ones(3), 200).astype(np.float32)
    matrix = np.array([[1, 0, 0], [-2, 1, 0], [-9, -3, 1]])
    near, far = (Decider(Utility(matrix + base)) for base in (0, 1e7))
    best = far.utility.gains(far.probabilities(p)).argmax(axis=1)
    assert (best == near.decide(p)).all()


@pytest.mark.parametrize(
    "ask", [Decider.decide, Decider.explain, Decider.probabilities]
)
def test_a_sample_of_which_the_target_prior_leaves_nothing(ask):
    decider = Decider(Utility.one_hot(3), train_prior="uniform", target_prior=[1, 1, 0])
    assert ask(decider, [[0, 1, 0], [1, 0, 0]]) is not None
    with pytest.raises(
        InputError,
        match=r"row 1 has all its probability on classes whose target prior is 0",
    ):
        ask(decider, [[0, 1, 0], [0, 0, 1]])


def test_scores_with_masked_values_are_refused():
    with pytest.raises(InputError, match="some values are masked"):
        Decider(Utility.one_hot(2)).decide(
            np.ma.array([[0.5, 0.5]], mask=[[True, False]])
        )


def test_evaluate_refuses_a_utility_for_a_decider():
    with pytest.raises(
        InputError,
        match="decider is a Utility: expected a Decider; give a utility as utility=",
    ):
        evaluate([[0.5, 0.5]], [0], Utility.one_hot(2))


def test_evaluate_takes_a_utility_beside_a_decider():
    decider = Decider(Utility.one_hot(2)).fit(
        [[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]], [0, 1, 1]
    )
    handing_over = Utility.one_hot(2).with_abstain(2)
    beside = evaluate([[0.9, 0.1]], [0], decider, utility=handing_over)
    assert (
        beside.to_dict()
        == evaluate([[0.9, 0.1]], [0], decider.replace(utility=handing_over)).to_dict()
    )
    assert beside.abstention_rate == 1


def test_a_data_frame_is_a_utility_wherever_predictions_are_judged(tmp_path):
    frame = pandas.DataFrame(
        [[0.0, -4, -1], [-9, 0, -1]], ["ok", "bad"], ["ok", "bad", "review"]
    )
    p, y = np.array([[0.95, 0.05], [0.6, 0.4], [0.2, 0.8]]), ["ok", "bad", "bad"]
    utility = Utility(frame)
    assert (
        evaluate(p, y, utility=frame).to_dict()
        == evaluate(p, y, utility=utility).to_dict()
    )
    assert (
        evaluate(p, y, Decider(utility), utility=2 * frame).mean_utility == -2 / 3
    )  # ok, review, bad
    one, other = (
        Predictions(probabilities=each, targets=y, classes=["ok", "bad"])
        for each in (p, p[:, ::-1])
    )
    assert (
        compare(one, other, frame).differences
        == compare(one, other, utility).differences
    )
    assert (
        report(one, frame, tmp_path / "r.html")
        .read_text(encoding="utf-8")
        .count("review")
    )
    for wrong in (frame.to_numpy(), "costs.csv"):
        with pytest.raises(
            InputError,
            match=f"utility is a {type(wrong).__name__}: expected a Utility, such as",
        ):
            evaluate(p, y, utility=wrong)
    with pytest.raises(
        InputError,
        match=r"utility is a DataFrame: expected a Utility, .* Utility\(frame\)",
    ):
        Decider(utility).replace(utility=frame)


@pytest.mark.parametrize(
    "groups",
    [[7, 7, 8], ["anna", "anna", "bo"], pandas.Series([7, 7, 8]), 3, [("a", "b", "c")]],
)
def test_groups_of_samples_are_not_pairs_of_classes(groups):
    with pytest.raises(
        InputError,
        match=(
            r"pairs \(true, decided\) of classes.*Predictions\(\.\.\., groups=customers"
        ),
    ):
        evaluate([[0.9, 0.1], [0.4, 0.6], [0.7, 0.3]], [0, 1, 1], groups=groups)


def test_a_new_utility_fits_nothing_again():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 200)
    z = rng.normal(size=(200, 2)) * 3 + 2 * np.eye(2)[y]
    decider = Decider(Utility([[1, 0], [0, 1]], ["a", "b"])).fit(z, y, logits=True)
    other = decider.replace(
        utility=Utility([[1, 0], [-9, 1]], ["b", "a"])
    )  # rows in another order: matched by name
    assert other.model.calibrator is decider.model.calibrator
    assert other.utility.matrix.tolist() == [
        [-9, 1],
        [1, 0],
    ]  # actions are numbered as the user's
    assert decider.utility.matrix.tolist() == [[1, 0], [0, 1]]


def test_actions_are_numbered_as_those_of_the_utility_that_was_given():
    p = np.random.default_rng(0).dirichlet([1, 1, 1], 50)
    costs = np.array([[0, 1, 5, 0.4], [2, 0, 1, 0.4], [3, 9, 0, 0.4]])
    names, actions = ["c", "a", "b"], ["c", "a", "b", "ask"]
    given = Utility(-costs, names, actions)
    decider = Decider(Utility.one_hot(["a", "b", "c"]), calibration=None).replace(
        utility=given
    )
    expected = [actions[k] for k in (p[:, [2, 0, 1]] @ costs).argmin(axis=1)]
    assert len(set(expected)) > 2
    assert [given.actions[k] for k in decider.decide(p)] == expected


def test_held_out_samples_of_one_class_get_a_warning():
    z = np.random.default_rng(0).normal(size=(30, 2))
    with pytest.warns(
        UserWarning,
        match=(
            "all 30 held-out samples are of class 'ok': calibration takes it for nearly"
        ),
    ):
        Decider(Utility.one_hot(["ok", "ill"])).fit(
            z, np.zeros(30, dtype=int), logits=True
        )


@pytest.mark.parametrize("kind", ["temperature", "bias-corrected-temperature", None])
def test_json_round_trip(tmp_path, kind):
    rng = np.random.default_rng(0)
    z, y = rng.normal(size=(2, 200, 3)) * 3, rng.integers(0, 3, 200)
    classes = Classes.from_counts({"a": 5, "b": 3, "c": 2}, groups={"g": ["a"]})
    decider = Decider(
        Utility.tail_sensitive(classes).with_abstain(0.1),
        combine="mean-logits",
        weights=[1, 3],
        calibration=kind,
        train_prior="train",
        target_prior={"a": 0.2, "b": 0.2, "c": 0.6},
    ).fit(z, y, logits=True)
    decider.save(tmp_path / "d.json")
    loaded = Decider.load(tmp_path / "d.json")
    assert loaded.to_dict() == decider.to_dict()
    assert np.array_equal(
        loaded.probabilities(z, logits=True), decider.probabilities(z, logits=True)
    )
    estimates = [each.estimate_prior(z, logits=True) for each in (decider, loaded)]
    assert estimates[0].check is not None
    assert np.array_equal(
        estimates[0].check, estimates[1].check
    )  # the table behind the check is saved too


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": "rfdlc-run", "version": 4}',
        '{"format": "rfdlc-decider", "version": 4}',
    ],
)
def test_a_damaged_file_is_refused(tmp_path, text):
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(InputError, match=r"d.json: cannot be read as a decider"):
        Decider.load(tmp_path / "d.json")


def test_a_decider_of_another_format_version_is_refused(tmp_path):
    table = Decider(Utility.one_hot(2)).to_dict()
    (tmp_path / "d.json").write_text(json.dumps({**table, "version": 3}))
    message = r"version 3: this rfdlc reads version 5; write it again with this rfdlc"
    with pytest.raises(InputError, match=message):
        Decider.load(tmp_path / "d.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": [1.0]}, r"bias of the calibrator has shape \(1,\)"),
        ({"prior": [0.5, 0.5]}, r"prior of the calibrator has shape \(2,\)"),
        ({"temperature": 0}, "temperature 0 cannot be used"),
    ],
)
def test_a_calibration_that_does_not_fit_is_refused(tmp_path, change, message):
    table = (
        Decider(Utility.one_hot(3), calibration="temperature")
        .fit([[0.5, 0.3, 0.2]], [0])
        .to_dict()
    )
    table["model"]["calibrator"] |= change
    (tmp_path / "d.json").write_text(json.dumps(table))
    with pytest.raises(InputError, match=message):
        Decider.load(tmp_path / "d.json")


def test_a_changed_rule_and_calibration():
    decider = Decider(Utility([[1, 0], [0, 1]], ["a", "b"], ["go", "stop"]))
    with pytest.raises(InputError, match="an action for every class"):
        decider.replace(rule="argmax")
    again = decider.replace(calibration="bias-corrected-temperature").fit(
        [[0.5, 0.5], [0.1, 0.9]], [0, 1]
    )
    assert again.model.calibrator.bias is not None
    scores = [[0.7, 0.3]]
    for bare in (
        again.replace(calibration=None),
        again.replace(calibration="temperature"),
    ):  # not fitted yet
        np.testing.assert_allclose(bare.probabilities(scores), scores)
    assert (
        again.replace(calibration="bias-corrected-temperature").model.calibrator
        is again.model.calibrator
    )


def test_deciders_are_immutable():
    decider = Decider(
        Utility.one_hot(2), train_prior="uniform", target_prior=[0.2, 0.8]
    )
    with pytest.raises(AttributeError):
        decider.rule = "argmax"
    with pytest.raises(ValueError, match="read-only"):
        decider.model.target_prior[0] = 1
    fitted = decider.fit([[0.9, 0.1], [0.3, 0.7]], [0, 1])
    assert (decider.model.calibrator, fitted.model.calibrator is None) == (None, False)
    with pytest.raises(
        InputError, match="parameter 'prior' is unknown: expected one of utility"
    ):
        decider.replace(prior="uniform")


def test_saved_deciders_hold_no_code(tmp_path):
    Decider(Utility.one_hot(2)).save(tmp_path / "d.json")
    assert json.loads((tmp_path / "d.json").read_text())["format"] == "rfdlc-decider"


def test_a_run_folder_gives_its_decider(tmp_path):
    decider = Decider(Utility([[1, 0], [-5, 1]], ["healthy", "ill"])).fit(
        [[0.9, 0.1], [0.4, 0.6]], [0, 1]
    )
    decider.save(tmp_path / "decider.json")
    assert Decider.load(tmp_path).to_dict() == decider.to_dict()


def test_a_utility_that_is_a_path_is_refused_in_copies_too():
    with pytest.raises(
        InputError,
        match=r"utility is a str: expected a Utility, such as .*Utility.read_csv",
    ):
        Decider(Utility.one_hot(3)).replace(utility="costs.csv")


def test_ties_are_decided_by_the_order_of_actions_and_not_by_rounding():
    rng, names = np.random.default_rng(0), list("abcdef")
    for _ in range(300):
        counts, matrix = rng.integers(1, 20, 6), rng.integers(-3, 4, (6, 4))
        exact = counts @ matrix
        order, p = rng.permutation(6), (counts / counts.sum())[None]
        plain = Decider(Utility(matrix, names, list("wxyz")))
        turned = Decider(
            Utility(matrix[order], [names[i] for i in order], list("wxyz"))
        )
        first = np.flatnonzero(exact == exact.max())[0]
        assert plain.decide(p)[0] == turned.decide(p[:, order])[0] == first
        ratio = plain.replace(train_prior=[1, 1, 1, 1, 1, 1], target_prior=counts)
        assert ratio.decide(np.full((1, 6), 1 / 6))[0] == first
    act = Utility([[1, 0], [-9, 0]], ["well", "ill"], ["act", "wait"])
    assert Decider(act).decide(np.array([[0.9, 0.1]])).tolist() == [
        0
    ]  # 0.9 - 9 * 0.1 is not quite 0


@pytest.mark.parametrize("calibration", ["auto", "temperature", "none", None])
def test_a_target_prior_without_a_training_prior_raises_at_once(calibration):
    utility = Utility.one_hot(["a", "b"])
    with pytest.raises(InputError, match="needs the training prior"):
        Decider(utility, calibration=calibration, target_prior="uniform")
    learns = Decider(
        utility, calibration="bias-corrected-temperature", target_prior="uniform"
    )
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 200)
    z = rng.normal(size=(200, 2)) + np.eye(2)[y]
    assert len(learns.fit(z, y, logits=True).decide(z, logits=True)) == 200


def test_masked_logits_calibrate():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 200)
    z = np.column_stack([rng.normal(size=(200, 2)) + np.eye(2)[y], np.full(200, -1e9)])
    decider = Decider(
        Utility.one_hot(["a", "b", "c"]),
        calibration="temperature",
        train_prior=[0.5, 0.4, 0.1],
    )
    assert 0.5 < decider.fit(z, y, logits=True).model.calibrator.temperature < 2

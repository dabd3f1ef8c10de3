import tracemalloc
import warnings

import numpy as np
import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rfdlc import Classes, InputError, Utility

CLASSES = Classes.from_counts(
    {"cat": 10, "dog": 30, "newt": 10}, groups={"pets": ["cat", "dog"]}
)


def test_tail_sensitive_spares_ties_and_by_rank_does_not():
    # rows true, columns decided; cat and newt have equal counts
    assert Utility.tail_sensitive(CLASSES, -2).matrix.tolist() == [
        [1, -2, 0],
        [0, 1, 0],
        [0, -2, 1],
    ]
    assert Utility.tail_sensitive(CLASSES, -2, by_rank=True).matrix.tolist() == [
        [1, -2, 0],
        [0, 1, 0],
        [-2, -2, 1],
    ]


@given(st.lists(st.integers(0, 9), min_size=2, max_size=12), st.floats(-5, 0))
def test_tail_sensitive_equals_naive(counts, penalty):
    naive = [
        [
            1 if d == y else penalty if counts[d] > counts[y] else 0
            for d in range(len(counts))
        ]
        for y in range(len(counts))
    ]
    assert (
        Utility.tail_sensitive(Classes.from_counts(counts), penalty).matrix.tolist()
        == naive
    )


def test_class_and_group_sensitive():
    assert Utility.class_sensitive(CLASSES, {("cat", "newt"): -1}).matrix.tolist() == [
        [1, 0, -1],
        [0, 1, 0],
        [0, 0, 1],
    ]
    grouped = Utility.group_sensitive(CLASSES, "pets", "newt", -3)
    assert grouped.matrix.tolist() == [[1, 0, -3], [0, 1, -3], [0, 0, 1]]
    assert Utility.group_sensitive(CLASSES, ["newt"], ["dog"], -1).matrix[2, 1] == -1


def test_a_data_frame_brings_its_names():
    frame = pandas.DataFrame(
        [[1, 0], [-5, 2]], index=["ill", "well"], columns=["well", "ill"]
    )
    utility = Utility(frame)
    assert (utility.classes.names, utility.actions) == (
        ("ill", "well"),
        ("well", "ill"),
    )
    assert utility.with_classes(Classes(("well", "ill"))).matrix.tolist() == [
        [-5, 2],
        [1, 0],
    ]
    assert Utility.from_costs(-frame) == utility == Utility(frame, ["ill", "well"])
    assert Utility(pandas.DataFrame(np.eye(2)), ["a", "b"]) == Utility.one_hot(
        ["a", "b"]
    )
    with pytest.raises(
        InputError,
        match="the data frame names its rows ill, well, but well, ill are given",
    ):
        Utility(frame, ["well", "ill"])


def test_costs_and_abstain():
    utility = Utility.from_costs([[0, 1], [5, 0]], ["a", "b"]).with_abstain([0.5, -1])
    assert utility.matrix.tolist() == [[0, -1, 0.5], [-5, 0, -1]]
    assert utility.actions == ("a", "b", "abstain")
    assert utility.decided_class.tolist() == [0, 1, -1]
    assert Utility([[1, 0, 0.3], [0, 1, 0.3]]).actions == ("0", "1", "abstain")


def test_actions_need_not_be_classes():
    utility = Utility([[1, 0], [0, 1], [0, 2]], ["a", "b", "c"], ["wait", "b"])
    assert utility.decided_class.tolist() == [-1, 1]
    assert utility.class_action.tolist() == [-1, 1, -1]


@pytest.mark.parametrize("action", ["Malignant", "malignnat"])
def test_an_action_called_nearly_as_a_class_is_told(action):
    with pytest.warns(
        UserWarning,
        match=f"the action '{action}' is not a class.*did you mean 'malignant'",
    ):
        Utility(np.eye(2), ["benign", "malignant"], ["benign", action])


def test_classes_that_no_action_decides_for_are_named():
    with pytest.warns(
        UserWarning,
        match="no action decides for b, c, as for other classes: these can never be",
    ) as seen:
        Utility(np.zeros((4, 3)), ["d", "c", "b", "a"], ["ask", "a", "d"])
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Utility(
            np.eye(2), ["ill", "well"], ["treat", "wait"]
        )  # actions of another kind
        Utility.one_hot(["ill", "well"]).with_abstain(0.2)
    with pytest.warns(UserWarning, match="did you mean 'okapi'") as seen:
        Utility(np.eye(2), ["lion", "okapi"], ["lion", "Okapy"])
    assert len(seen) == 1


def test_a_misspelt_row_suggests_no_misspelt_action(tmp_path):
    (tmp_path / "c.csv").write_text("true,Lion,Okapi\nLion,0,1\nOkapy,1,0\n")
    fix = (
        "classes Lion, Okapy do not match Lion, Okapi: 'Okapy' is in only one of them;"
        " did you mean 'Okapi'"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InputError, match=fix):
            Utility.read_csv(tmp_path / "c.csv", Classes(("Lion", "Okapi")))


@given(arrays(float, (3, 4), elements=st.floats(-1e6, 1e6)))
def test_csv_round_trip(tmp_path_factory, matrix):
    path = tmp_path_factory.mktemp("u") / "u.csv"
    utility = Utility(matrix, ['a "quoted", name', "ünï", "<c>"])
    utility.to_csv(path)
    assert Utility.read_csv(path) == utility


def test_csv_is_matched_by_name_never_by_position(tmp_path):
    path = tmp_path / "u.csv"
    path.write_text(
        "true,newt,refer,dog,cat\ndog,1,2,3,4\ncat,5,6,7,8\nnewt,9,10,11,12\n"
    )
    utility = Utility.read_csv(path, CLASSES)
    assert utility.actions == ("cat", "dog", "newt", "refer")
    assert utility.matrix.tolist() == [[8, 7, 5, 6], [4, 3, 1, 2], [12, 11, 9, 10]]
    assert utility.classes.counts == (10, 30, 10)


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_csv_of_other_spreadsheets(tmp_path, delimiter):
    path = tmp_path / "u.csv"
    path.write_text(
        "\ufeff,a,b\n\na,1,0\nb,-1,1\n".replace(",", delimiter), encoding="utf-8"
    )
    assert Utility.read_csv(path).matrix.tolist() == [[1, 0], [-1, 1]]


def test_csv_with_decimal_commas_and_with_odd_names(tmp_path):
    path = tmp_path / "u.csv"
    path.write_text("true;a;b\na;1;0,5\nb;-1,25;1\n")
    assert Utility.read_csv(path).matrix.tolist() == [[1, 0.5], [-1.25, 1]]
    path.write_text("true,a;x;y;z,b\na;x;y;z,1,0\nb,0,1\n")
    assert Utility.read_csv(path).actions == ("a;x;y;z", "b")


@pytest.mark.parametrize(
    ("corner", "transposed"),
    [
        ("true", False),
        ("", False),
        ("True class", False),
        ("true x decided", False),
        ("y_true / y_pred", False),
        ("class \\ action", False),
        ("decided", True),
        ("Decided x true", True),
        ("predicted class", True),
        ("action \\ true class", True),
        ("predicted vs actual", True),
    ],
)
def test_the_corner_cell_says_what_lines_are(tmp_path, corner, transposed):
    (tmp_path / "u.csv").write_text(f"{corner},a,b\na,1,0\nb,-5,1\n")
    expected = [[1, -5], [0, 1]] if transposed else [[1, 0], [-5, 1]]
    for classes in (None, Classes(("a", "b"))):
        utility = Utility.read_csv(tmp_path / "u.csv", classes)
        assert utility.matrix.tolist() == expected


def test_lines_of_a_transposed_table_may_be_other_actions(tmp_path):
    (tmp_path / "u.csv").write_text("decided,b,a\na,-5,1\nb,1,0\nask,.5,.25\n")
    utility = Utility.read_csv(tmp_path / "u.csv", Classes(("a", "b")))
    assert utility.actions == ("a", "b", "ask")
    assert utility.matrix.tolist() == [[1, 0, 0.25], [-5, 1, 0.5]]


@pytest.mark.parametrize(
    "corner", ["costs", "x", "true decided", "true x true", "decided / action", "a|b|c"]
)
def test_a_corner_cell_that_says_nothing_of_lines_is_refused(tmp_path, corner):
    (tmp_path / "u.csv").write_text(f"{corner},a,b\na,1,0\nb,-5,1\n")
    with pytest.raises(InputError, match=r"u\.csv.*expected true where each line is"):
        Utility.read_csv(tmp_path / "u.csv")


def test_axes_of_a_data_frame_say_what_lines_are():
    frame = pandas.DataFrame([[1, 0], [-5, 1]], ["a", "b"], ["a", "b"])
    right = [[1, 0], [-5, 1]]
    assert Utility(frame).matrix.tolist() == right
    assert Utility(frame.rename_axis("diagnosis")).matrix.tolist() == right
    assert Utility(frame.T.rename_axis("decided")).matrix.tolist() == right
    assert Utility(frame.T.rename_axis(columns="true")).matrix.tolist() == right


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "u.csv: expected a first line"),
        ("true,a,b\n", "u.csv: expected a first line"),
        ("true,a,b\na,1,0\nb,x,1\n", "u.csv line 3, column 'a': 'x' is not a number"),
        ("true,a,b\na,1,0\nb,1\n", "u.csv line 3: 2 cells, expected 3"),
        ("true,a,b\na,1,0\nb,nan,1\n", "u.csv: utility holds nan in row 1, column 0"),
        ("true,a,a\na,1,0\nb,0,1\n", "u.csv: action 'a' appears more than once"),
        ("true,a,b\na,1,0\na,0,1\n", "u.csv: class names must differ"),
        (
            "true;a;b\na;0,5;0\nb;-1.000;1\n",
            "u.csv: holds both '0,5' and '-1.000': expected one decimal sign",
        ),
        (
            "0,1\n0,1\n1,0\n",
            "u.csv: the first line begins with the class '0': expected a first column",
        ),
        ("true,a,b\na,1,0\nb,0,1\n", "u.csv: classes a, b do not match cat, dog, newt"),
    ],
)
def test_bad_csv(tmp_path, text, message):
    (tmp_path / "u.csv").write_text(text)
    with pytest.raises(InputError, match=message):
        Utility.read_csv(
            tmp_path / "u.csv", CLASSES if "do not match" in message else None
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Utility.one_hot("cat"),
            "classes are the text 'cat': expected a list of names",
        ),
        (lambda: Utility([1, 2]), r"shape \(2,\): expected \(classes, actions\)"),
        (lambda: Utility([[1, 2], [3]]), "rows of equal length"),
        (lambda: Utility([[1, "x"]]), "table of numbers"),
        (lambda: Utility([[np.inf, 0], [0, 1]]), "holds inf in row 0, column 0"),
        (
            lambda: Utility([[1, 0], [-1e40, 1]]),
            r"holds -1e\+40 in row 1, column 0: expected .* at most 1e\+30",
        ),
        (lambda: Utility(np.eye(3), ["a", "b"]), "3 rows but there are 2 classes"),
        (lambda: Utility(np.ones((2, 5))), "5 columns for 2 classes"),
        (lambda: Utility.tail_sensitive(CLASSES, 1), "penalty 1 is not a loss"),
        (lambda: Utility.tail_sensitive(CLASSES, float("nan")), "penalty nan"),
        (lambda: Utility.tail_sensitive(Classes(("a", "b"))), "no training counts"),
        (
            lambda: Utility.class_sensitive(CLASSES, {("cat", "dig"): -1}),
            "did you mean 'dog'",
        ),
        (
            lambda: Utility.class_sensitive(CLASSES, {("cat", "cat"): -1}),
            "two different classes",
        ),
        (
            lambda: Utility.group_sensitive(CLASSES, "pets", "cat"),
            "groups overlap in cat",
        ),
        (lambda: Utility.one_hot(2).with_abstain([1, 2, 3]), "abstain has 3 values"),
        (
            lambda: Utility.one_hot(2).with_abstain(0).with_abstain(0),
            "action 'abstain' already",
        ),
        (lambda: Utility.read_csv("missing.csv"), "missing.csv: no such file"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_the_matrix_cannot_be_changed_behind_the_decider():
    with pytest.raises(ValueError, match="read-only"):
        Utility.one_hot(2).matrix[0, 0] = 5


def test_repr_of_a_large_one_is_short():
    assert (
        repr(Utility.tail_sensitive(Classes.from_counts(range(1, 101))))
        == "Utility of 100 classes and 100 actions: values from -1 to 1, 4950 of them"
        " negative"
    )


def test_costs_may_be_a_file(tmp_path):
    (tmp_path / "costs.csv").write_text("true,cat,newt,vet\ncat,0,1,0.5\nnewt,50,0,2\n")
    costs = Utility.from_costs(tmp_path / "costs.csv")
    assert (costs.actions, costs.matrix.tolist()) == (
        ("cat", "newt", "vet"),
        [[0, -1, -0.5], [-50, 0, -2]],
    )
    assert Utility.from_costs(
        str(tmp_path / "costs.csv"), ["newt", "cat"]
    ).classes.names == ("newt", "cat")
    with pytest.raises(
        InputError, match=r"costs.csv names its actions: leave out actions=\['a'\]"
    ):
        Utility.from_costs(tmp_path / "costs.csv", actions=["a"])


def test_dominated_actions_are_those_that_no_probability_makes_best():
    rng = np.random.default_rng(0)
    utility = (
        Utility.one_hot(3)
        .with_abstain([0.4, 0.5, 0.9], "ask")
        .with_abstain([0.4, 0.5, 0.8], "doubt")
    )
    utility = utility.with_abstain([-1, -1, 0.9], "late").with_abstain(-1, "lose")
    best = {
        utility.actions[a]
        for a in np.unique(
            (rng.dirichlet([0.5] * 3, 20_000) @ utility.matrix).argmax(axis=1)
        )
    }
    assert best.isdisjoint(utility.dominated)
    assert utility.dominated == {"doubt": "ask", "late": "2", "lose": "0"}


@pytest.mark.parametrize(
    "make",
    [
        Utility.one_hot,
        Utility.tail_sensitive,
        lambda classes: Utility.class_sensitive(classes, {}),
        lambda classes: Utility.group_sensitive(classes, "0", "1"),
    ],
)
def test_more_classes_than_a_matrix_may_have_are_named_before_it_is_made(make):
    classes = Classes.from_counts([1] * 20_000)
    tracemalloc.start()
    try:
        with pytest.raises(
            InputError, match="20,000 x 20,000 values: expected at most 14,142 classes"
        ):
            make(classes)
        assert tracemalloc.get_traced_memory()[1] < 1e8
    finally:
        tracemalloc.stop()


def test_one_hot_is_one_matrix():
    tracemalloc.start()
    try:
        utility = Utility.one_hot(2_000)
        assert tracemalloc.get_traced_memory()[1] < 1.2 * utility.matrix.nbytes
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(utility.matrix, np.eye(2_000))
    with pytest.raises(ValueError, match="read-only"):
        utility.matrix[0, 0] = 2

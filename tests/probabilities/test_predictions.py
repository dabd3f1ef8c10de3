"""Predictions on disk: what is read, and what is refused."""

import json
import warnings
from pathlib import Path

import numpy as np
import pandas
import pytest

from rfdlc import Classes, Decider, InputError, Predictions, Utility, evaluate

P = np.array([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]])
NAMES = ("cat", "dog", "newt")


def test_npz_round_trip(tmp_path):
    classes = Classes.from_counts({"cat": 3, "Ä": 2, "<c>": 1}, groups={"g": ["cat"]})
    saved = Predictions(
        logits=np.log(P)[None].repeat(2, 0),
        targets=[2, 0],
        ids=["x/1.png", "y"],
        classes=classes,
    )
    saved.save(tmp_path / "p.npz")
    loaded = Predictions.load(tmp_path / "p.npz")
    assert np.array_equal(loaded.scores.values, saved.scores.values)
    assert loaded.scores.logits
    assert loaded.targets.tolist() == [2, 0]
    assert loaded.ids.tolist() == ["x/1.png", "y"]
    assert loaded.classes == classes


def test_npz_of_other_people(tmp_path):
    np.savez(
        tmp_path / "p.npz",
        probs=P,
        labels=[0, 2],
        names=np.array(NAMES),
        counts=[5, 3, 1],
    )
    loaded = Predictions.load(tmp_path / "p.npz")
    assert loaded.classes == Classes.from_counts([5, 3, 1], NAMES)
    assert loaded.targets.tolist() == [0, 2]
    np.savez(tmp_path / "bare.npz", probabilities=P)
    assert not Predictions.load(tmp_path / "bare.npz").named


def test_npz_with_numbers_for_names_has_names_for_targets(tmp_path):
    """As scikit-learn has them: `classes=model.classes_, targets=y`; class 3 has no
    sample here.
    """
    np.savez(tmp_path / "p.npz", probabilities=P, targets=[1, 2], classes=[1, 2, 3])
    assert Predictions.load(tmp_path / "p.npz").targets.tolist() == [0, 1]
    np.savez(tmp_path / "p.npz", probabilities=P, targets=[1, 2], classes=NAMES)
    assert Predictions.load(tmp_path / "p.npz").targets.tolist() == [1, 2]


def test_npz_whose_probabilities_are_said_to_be_logits(tmp_path):
    np.savez(tmp_path / "p.npz", probs=np.log(P))
    with pytest.raises(
        InputError, match="but logits are asked for: name the array 'logits'"
    ):
        Predictions.load(tmp_path / "p.npz", logits=True)
    np.savez(tmp_path / "p.npz", logits=np.log(P))
    assert Predictions.load(tmp_path / "p.npz", logits=True).scores.logits


def test_classes_may_be_a_list_of_names(tmp_path):
    given = Predictions(probabilities=P, targets=["newt", "cat"], classes=list(NAMES))
    assert (given.named, given.classes, given.targets.tolist()) == (
        True,
        Classes(NAMES),
        [2, 0],
    )
    np.savez(tmp_path / "p.npz", probabilities=P)
    assert Predictions.load(tmp_path / "p.npz", ["a", "b", "c"]).classes.names == (
        "a",
        "b",
        "c",
    )
    assert evaluate(P, ["cat", "newt"], classes=NAMES).accuracy == 1


def test_npz_with_names_in_bytes(tmp_path):
    names = np.char.encode(np.array(["Mücke", "dog", "newt"]), "utf-8")
    np.savez(
        tmp_path / "p.npz",
        probabilities=P,
        targets=names[[2, 0]],
        classes=names,
        ids=names[:2],
    )
    loaded = Predictions.load(tmp_path / "p.npz")
    assert (loaded.classes.names[0], loaded.ids[0], loaded.targets.tolist()) == (
        "Mücke",
        "Mücke",
        [2, 0],
    )
    np.savez(tmp_path / "p.npz", probabilities=P, ids=np.array([b"\xff", b"a"]))
    with pytest.raises(InputError, match="some names are bytes that are not UTF-8"):
        Predictions.load(tmp_path / "p.npz")


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet"])
def test_tables_are_matched_by_name(tmp_path, kind):
    frame = pandas.DataFrame(P[:, [2, 0, 1]], columns=["newt", "cat", "dog"])
    frame["target"], frame["id"] = ["newt", "cat"], ["p1", "p2"]
    path = tmp_path / f"p.{kind}"
    (
        frame.to_parquet(path)
        if kind == "parquet"
        else frame.to_csv(path, index=False, sep="\t" if kind == "tsv" else ",")
    )
    loaded = Predictions.load(path, Classes(NAMES))
    assert loaded.scores.values[0] == pytest.approx(P)
    assert loaded.targets.tolist() == [2, 0]
    assert loaded.ids.tolist() == ["p1", "p2"]
    assert Predictions.load(path).classes.names == ("newt", "cat", "dog")


def test_csv_longer_than_a_block_with_blank_lines_and_quotes(tmp_path):
    lines = [
        'id,"a,b",c',
        *(f'"s ""{i}""",0.{i % 10},{1 - i % 10 / 10}' for i in range(5000)),
        "",
        "",
    ]
    (tmp_path / "p.csv").write_text("\n".join(lines))
    loaded = Predictions.load(tmp_path / "p.csv")
    assert loaded.scores.values.shape == (1, 5000, 2)
    assert loaded.classes.names == ("a,b", "c")
    assert loaded.ids[4999] == 's "4999"'
    assert loaded.scores.values[0, :, 0] == pytest.approx(np.arange(5000) % 10 / 10)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_class_may_be_called_as_a_column_of_ours(tmp_path, kind):
    frame = pandas.DataFrame({"en": [0.25], "id": [0.75], "target": ["id"]})
    (
        frame.to_csv(tmp_path / "p.csv", index=False)
        if kind == "csv"
        else frame.to_parquet(tmp_path / "p.parquet")
    )
    loaded = Predictions.load(tmp_path / f"p.{kind}", ["en", "id"])
    assert (loaded.scores.values.tolist(), loaded.targets.tolist(), loaded.ids) == (
        [[[0.25, 0.75]]],
        [1],
        None,
    )


def test_csv_with_decimal_commas(tmp_path):
    (tmp_path / "p.csv").write_text("cat;dog;target\n0,75;0,25;cat\n")
    loaded = Predictions.load(tmp_path / "p.csv")
    assert loaded.scores.values.tolist() == [[[0.75, 0.25]]]
    assert loaded.targets.tolist() == [0]


@pytest.mark.parametrize(
    ("names", "targets", "expected"),
    [
        (
            ("cat", "dog"),
            [1, 0],
            [1, 0],
        ),  # no class is called by a number: these are indices
        (
            ("1", "2"),
            ["1", "2"],
            [0, 1],
        ),  # classes are called by numbers: these are names
        (("1", "2"), [0, 1], [0, 1]),  # numbers are indices
        (("cat", "dog"), np.array(["dog", "cat"], dtype=object), [1, 0]),
    ],
)
def test_targets_by_name_and_by_index(names, targets, expected):
    loaded = Predictions(
        probabilities=[[1, 0], [0, 1]], targets=targets, classes=Classes(names)
    )
    assert loaded.targets.tolist() == expected


def test_rounded_probabilities_are_divided_by_their_sums(tmp_path):
    text = "cat,dog,newt\n0.33,0.33,0.33\n0.34,0.34,0.33\n0.5,0.25,0.25\n"
    with pytest.warns(
        UserWarning, match="are rounded: rows that do not sum to 1 are divided"
    ) as told:
        loaded = Predictions.load(write(tmp_path / "p.csv", text))
    assert len(told) == 1
    expected = [[1 / 3] * 3, [34 / 101, 34 / 101, 33 / 101], [0.5, 0.25, 0.25]]
    np.testing.assert_allclose(loaded.scores.values[0], expected, rtol=1e-12)
    decider = Decider(Utility.one_hot(["cat", "dog", "newt"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once, when the file is read
        np.testing.assert_allclose(decider.probabilities(loaded), expected, rtol=1e-12)
    for kind in (np.float32, np.float64):
        given = np.array([[0.24, 0.24, 0.25, 0.25], [0.5, 0.25, 0.25, 0]], kind)
        with pytest.warns(UserWarning, match="are rounded"):
            found = Decider(Utility.one_hot(4)).probabilities(given)
        assert found.dtype == kind
        np.testing.assert_allclose(found[0], np.array([24, 24, 25, 25]) / 98, rtol=1e-6)
        np.testing.assert_array_equal(found[1], given[1])


@pytest.mark.filterwarnings("ignore:the probabilities are rounded")
@pytest.mark.parametrize("decimals", [2, 3, 4])
def test_every_rounded_distribution_is_accepted(decimals):
    rng = np.random.default_rng(decimals)
    for classes in (2, 3, 10, 100):
        p = rng.dirichlet(np.full(classes, 0.5), 2000).round(decimals)
        assert len(Predictions(probabilities=p).scores.checked()) == 2000


@pytest.mark.parametrize(
    "row",
    [
        [0.24, 0.24, 0.24, 0.25],  # 0.97: more than four times 0.005
        [0.52, 0.52, *[0] * 8],  # 1.04: eight of ten were not rounded up
        [0.241, 0.241, 0.241, 0.25],  # 0.973: thousandths explain 0.002
        [0.3, 0.3, 0.3],  # 0.9: rounded to hundredths at least
        [0.32123, 0.33123, 0.33123],  # 0.98369: not rounded
        [0] * 300,
        [1, 1, 0],
    ],
)
def test_sums_that_rounding_does_not_explain_are_refused(row):
    with pytest.raises(
        InputError,
        match=r"row 1 of the probabilities sums to .*: expected rows that sum to 1",
    ):
        Predictions(probabilities=[np.eye(len(row))[0], row]).scores.checked()


def test_floats_that_are_not_rounded_stay_as_they_are():
    p = (
        np.random.default_rng(0).dirichlet([1, 1, 1], 50)
        * np.linspace(0.991, 1.009, 50)[:, None]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = Predictions(probabilities=p).scores
        assert scores.checked() is scores


def write(path, text):
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "p.csv: is empty"),
        ("\n\n", "p.csv: is empty"),
        ("cat,dog,newt\n", "p.csv: has column names but no rows"),
        ("id,target\n1,cat\n", "p.csv: column|p.csv: no column for class"),
        (
            "cat,dog,newt\n0.5,0.3,0.2\n0.5,oops,0.2\n",
            "p.csv line 3, column 'dog': 'oops' is not a number",
        ),
        ("cat,dog,newt\n0.5,,0.2\n", "p.csv line 2, column 'dog': '' is not a number"),
        ("cat,dog,newt\n0.5,0.5\n", "p.csv line 2: 2 cells, expected 3"),
        ("cat,dog,dog\n1,0,0\n", "p.csv: column 'dog' appears more than once"),
        (
            "cat,dog,nwet\n1,0,0\n",
            (
                "p.csv: no column for class 'newt'; there are cat, dog, nwet: .*did you"
                " mean 'nwet'"
            ),
        ),
        ("cat,dog\n1,0\n", "p.csv: no column for class 'newt'"),
        (
            "cat,dog,newt,target\n1,0,0,bird\n",
            "p.csv line 2: target 'bird' is not a class",
        ),
        ("cat,dog,newt,target\n1,0,0,3\n", "p.csv line 2: target '3' is not a class"),
        (
            ",cat,dog,newt\n0,1,0,0\n",
            (
                r"p.csv: column 1 has no name.*leave an index out \(index=False\), or"
                r" call it id"
            ),
        ),
        (
            "cat,dog,newt\n1,0,0\n0.5,0.5,0.3\n",
            (
                "p.csv: line 3 of the probabilities sums to 1.3.*; taken for classes:"
                " cat, dog, newt$"
            ),
        ),
        (
            "cat,dog,newt\n1,0,0\n\n1.2,0,-0.2\n",
            "p.csv: scores hold -0.2 in line 4, column 'newt': expected prob",
        ),
        (
            "cat,dog,newt\n1,0,0\n1,nan,0\n",
            "p.csv: scores hold nan in line 3, column 'dog': expected prob",
        ),
        (
            "cat,dog,newt\n97,2,1\n33,33,34\n",
            "p.csv: line 2 .* sums to 100: .* percentages: divide them by 100",
        ),
    ],
)
def test_bad_csv(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        Predictions.load(write(tmp_path / "p.csv", text), Classes(NAMES))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "cat,dog,label\n0.4,0.6,dog\n",
            (
                "'dog' is not a number; every column but id and target is a class:"
                " leave others out"
            ),
        ),
        (
            "id,fraud,target\n7,0.4,1\n",
            r"p.csv: the class columns are fraud: .* add the other one \(1 - p\)",
        ),
        (
            "cat,dog,age\n0.4,0.6,40\n",
            (
                r"sums to 41: .* for classes: cat, dog, age \(give their names by"
                r" classes, --cl"
            ),
        ),
    ],
)
def test_csv_that_lacks_a_class_or_has_one_too_many(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        Predictions.load(write(tmp_path / "p.csv", text))


def test_duplicate_columns_without_known_classes(tmp_path):
    with pytest.raises(InputError, match="'dog' appears more than once"):
        Predictions.load(write(tmp_path / "p.csv", "cat,dog,dog\n1,0,0\n"))


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "p.csv").write_bytes(b"cat,dog\n\xff\xfe,1\n")
    with pytest.raises(InputError, match=r"p.csv: cannot be read as CSV in UTF-8"):
        Predictions.load(tmp_path / "p.csv")


def test_truncated_parquet(tmp_path):
    path = tmp_path / "p.parquet"
    pandas.DataFrame(P, columns=NAMES).to_parquet(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(
        InputError, match=r"p.parquet: cannot be read as Parquet.*truncated"
    ):
        Predictions.load(path)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (["x", "y"], "column 'newt' holds .*not numbers"),
        ([0.1, None], "1 empty .* in row 1:.*; rows count from 0"),
    ],
)
def test_parquet_without_numbers(tmp_path, column, message):
    pandas.DataFrame({"cat": P[:, 0], "dog": P[:, 1], "newt": column}).to_parquet(
        tmp_path / "p.parquet"
    )
    with pytest.raises(InputError, match=message):
        Predictions.load(tmp_path / "p.parquet")


def test_pickled_objects_are_refused(tmp_path):
    class Payload:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    np.savez(tmp_path / "p.npz", probabilities=np.array([Payload()], dtype=object))
    with pytest.raises(InputError, match="without pickle"):
        Predictions.load(tmp_path / "p.npz")
    assert not (tmp_path / "ran").exists()
    np.savez(
        tmp_path / "ids.npz", probabilities=P, ids=np.array(["a", "b"], dtype=object)
    )
    with pytest.raises(
        InputError,
        match=(
            r"ids.npz.*the array 'ids' holds Python objects.* such as ids.astype\('U'\)"
        ),
    ):
        Predictions.load(tmp_path / "ids.npz")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda d: Predictions.load(write(d / "p.xlsx", "a")),
            r"unknown kind of file '.xlsx': expected .npz, .csv",
        ),
        (lambda d: Predictions.load(d / "p.csv"), "no such file"),
        (
            lambda d: Predictions.load(write(d / "p.npz", "no zip")),
            "p.npz: cannot be read as .npz",
        ),
        (lambda d: Predictions(), "either logits or probabilities"),
        (lambda d: Predictions(probabilities=P, logits=P), "exactly one of the two"),
        (
            lambda d: Predictions(probabilities=P, targets=[0]),
            r"targets have shape \(1,\) for 2 samples",
        ),
        (
            lambda d: Predictions(probabilities=P, ids=["a", "b", "c"]),
            r"ids have shape \(3,\)",
        ),
        (
            lambda d: Predictions(probabilities=P, uncertainty=["a", "b"]),
            "uncertainty must be numbers",
        ),
        (
            lambda d: Predictions(probabilities=P).with_classes(Classes(("a", "b"))),
            "3 columns but there are 2 classes",
        ),
        (
            lambda d: Predictions(probabilities=P, classes=Classes(NAMES)).with_classes(
                Classes(("a", "b", "c"))
            ),
            "'cat' is",
        ),
    ],
)
def test_bad_input(tmp_path, make, message):
    with pytest.raises(InputError, match=message):
        make(tmp_path)


def test_npz_with_unknown_or_doubled_keys(tmp_path):
    np.savez(tmp_path / "p.npz", scores=P)
    with pytest.raises(
        InputError, match="holds scores: expected an array 'probabilities' or 'logits'"
    ):
        Predictions.load(tmp_path / "p.npz")
    np.savez(tmp_path / "p.npz", probs=P, probabilities=P)
    with pytest.raises(InputError, match="holds both 'probabilities' and 'probs'"):
        Predictions.load(tmp_path / "p.npz")
    np.savez(tmp_path / "p.npz", probs=P, classes=json.dumps({"names": ["a"]}))
    with pytest.raises(InputError, match="3 columns but there are 1 classes"):
        Predictions.load(tmp_path / "p.npz")
    for damaged in ("{", "5"):
        np.savez(tmp_path / "p.npz", probs=P, classes=damaged)
        with pytest.raises(
            InputError,
            match=rf"p.npz: 'classes' holds '{damaged}': expected an array of names",
        ):
            Predictions.load(tmp_path / "p.npz")
    np.savez(tmp_path / "p.npz", probs=P, classes=NAMES, counts=5)
    with pytest.raises(InputError, match="1 training counts for 3 classes"):
        Predictions.load(tmp_path / "p.npz")


@pytest.mark.parametrize("path", ["runs/a", Path("runs/a")])
def test_a_path_in_place_of_scores_is_named(path):
    for call in (
        lambda: evaluate(path, [0, 1]),
        lambda: Decider(Utility.one_hot(2)).decide(path),
    ):
        with pytest.raises(
            InputError,
            match=r"'runs/a' is a path, not scores: read it by rfdlc.Predictions.load",
        ):
            call()


def test_numbers_in_tables_are_no_positions_of_named_classes(tmp_path):
    """The columns are sorted by name; whoever wrote numbers may have had
    another order.
    """
    told = (
        r"target '0' is not a class: expected one of cat, dog; .* write the names of"
        r" the classes"
    )
    with pytest.raises(InputError, match=f"p.csv line 2: {told}"):
        Predictions.load(write(tmp_path / "p.csv", "cat,dog,target\n1,0,0\n0,1,1\n"))
    frame = pandas.DataFrame({"cat": [1.0, 0.0], "dog": [0.0, 1.0], "target": [0, 1]})
    frame.to_parquet(tmp_path / "p.parquet")
    with pytest.raises(InputError, match=told):
        Predictions.load(tmp_path / "p.parquet")
    assert evaluate(frame).accuracy == 1  # integers in Python are positions
    renamed = frame.rename(columns={"cat": "1", "dog": "0"})
    assert evaluate(renamed).accuracy == 0  # unless classes are called so


def test_columns_of_dates_lists_and_texts_cannot_be_classes(tmp_path):
    """Rows that are rounded look as if a class were left out: other columns are looked
    at, whatever they hold.
    """
    frame = pandas.DataFrame({"a": [0.3, 0.333, 0.2], "b": [0.7, 0.666, 0.8]})
    beside = {
        "day": pandas.date_range("2026-01-01", periods=3),
        "words": ["x", "y", "z"],
        "boxes": [[1.0], [2.0], [3.0]],
    }
    frame.assign(**beside).to_parquet(tmp_path / "p.parquet")
    loaded = Predictions.load(tmp_path / "p.parquet", classes=["a", "b"])
    np.testing.assert_allclose(loaded.scores.values[0].sum(axis=1), 1, atol=0.01)
    decider = Decider(Utility.one_hot(Classes(("a", "b"))))
    assert (
        decider.decide(loaded).tolist()
        == decider.decide(frame.assign(**beside)).tolist()
        == [1, 1, 1]
    )


def test_tables_with_some_labels(tmp_path):
    frame = pandas.DataFrame(P, columns=["cat", "dog", "newt"]).assign(
        target=[None, "newt"]
    )
    frame.to_csv(tmp_path / "p.csv", index=False)
    loaded, decider = (
        Predictions.load(tmp_path / "p.csv"),
        Decider(Utility.one_hot(["cat", "dog", "newt"])),
    )
    assert loaded.targets is None
    assert len(decider.decide(loaded)) == len(P)
    told = "1 of 2 samples have no label"
    for use in (decider.fit, evaluate):
        with pytest.raises(
            InputError,
            match=rf"{told}, first in row 0 .counted from 0.: .*skip_unknown=True",
        ):
            use(loaded)
    with pytest.raises(
        InputError,
        match=rf"p.csv: {told}, first in line 2; leave them out with skip_unknown=True",
    ):
        Predictions.load(tmp_path / "p.csv", skip_unknown=False)
    with pytest.warns(UserWarning, match=rf"{told}; they are left out"):
        left = Predictions.load(tmp_path / "p.csv", skip_unknown=True)
    assert (left.left_out, left.targets.tolist()) == (1, [2])
    np.testing.assert_array_equal(left.scores.values[0], P[1:])
    with pytest.raises(InputError, match=rf"{told}: leave them out .dropna"):
        evaluate(frame, decider=decider)


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ({"probabilities": P.astype(complex)}, "scores must be numbers, .* complex"),
        (
            {"probabilities": P, "corrected": [True, False]},
            "'corrected' has 2 values: expected one",
        ),
    ],
)
def test_arrays_of_another_kind_are_told(tmp_path, arrays, told):
    np.savez(tmp_path / "p.npz", **arrays)
    with pytest.raises(InputError, match=rf"p\.npz: {told}"):
        Predictions.load(tmp_path / "p.npz")

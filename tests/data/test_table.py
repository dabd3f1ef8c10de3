"""Tables: encodings learned on the training rows, every missing value and dropped
column said.
"""

import json
import re
import reprlib
import warnings
from contextlib import nullcontext
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import rfdlc
from rfdlc.data.columns import names_rows
from rfdlc.data.dataset import spelt_alike
from rfdlc.data.opening import open_samples
from rfdlc.data.samples import InputSpec
from rfdlc.data.table import TableEncoder, blurred, strays_among
from rfdlc.errors import InputError
from rfdlc.formats.cells import as_text, parse_column, stray_texts
from rfdlc.probabilities.classes import Classes

ROWS = """patient_id,age,sex,note,split,label
p1,30,f,a,train,ill
p2,,m,b,train,well
p3,50,f,,train,well
p4,40,f,a,test,well
p5,?,x,c,val,ill
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "t.csv").write_text(ROWS)
    return tmp_path / "t.csv"


def test_a_csv_by_hand(path: Path) -> None:
    data = rfdlc.load(path)
    assert data.classes.names == ("ill", "well")
    assert data.classes.counts == (1, 2)
    assert data.encoder is not None
    expected = [
        "age",
        "age is missing",
        "sex = f",
        "sex = m",
        "note = a",
        "note = b",
        "note = (missing)",
    ]
    assert list(data.encoder.features) == expected
    assert data.train.array.tolist() == [
        [30, 0, 1, 0, 1, 0, 0],
        [40, 1, 0, 1, 0, 1, 0],
        [50, 0, 1, 0, 0, 0, 1],
    ]
    assert data.val is not None
    assert data.val.array.tolist() == [
        [40, 1, 0, 0, 0, 0, 0]
    ]  # the median of training, unseen categories
    assert list(data.val.ids or ()) == ["p5"]
    notes = " | ".join(data.notes)
    assert "'patient_id' has a different value in every row and was left out" in notes
    assert (
        "'age': 2 missing values were filled with the median 40 and marked in a feature"
        " of their own" in notes
    )
    assert (
        data.notes[-1] == "column 'label' was taken for the class: target names another"
    )
    assert rfdlc.load(path, target="label").notes == data.notes[:-1]
    assert (
        "'note' became 3 features, one per category; 1 missing values are a category of"
        " their own" in notes
    )
    assert data.normalisation is not None
    assert data.normalisation.mean[0] == 40
    assert data.normalisation.mean[1:] == (0,) * 6
    assert data.normalisation.std[1:] == (1,) * 6


def test_the_encoding_is_plain_data_for_new_rows(path: Path) -> None:
    data = rfdlc.load(path)
    assert data.encoder is not None
    again = TableEncoder.from_dict(json.loads(json.dumps(data.encoder.to_dict())))
    assert again == data.encoder
    new = {
        "age": ["60", None],
        "sex": ["m", "unheard of"],
        "note": ["b", ""],
        "extra": [1, 2],
    }
    assert again.transform(new).tolist() == [
        [60, 0, 0, 1, 0, 1, 0],
        [40, 1, 0, 0, 0, 0, 1],
    ]
    with pytest.raises(InputError, match="lack the columns age, note"):
        again.transform({"sex": ["m"]})
    with pytest.raises(
        InputError, match="'age' holds numbers in the training data, but here 'old'"
    ):
        again.transform({**new, "age": ["old", "3"]})
    assert again.transform({**new, "age": ["", "?"]})[:, :2].tolist() == [
        [40, 1],
        [40, 1],
    ]


def test_a_note_says_how_to_keep_a_column_that_is_left_out_by_its_name(
    tmp_path: Path,
) -> None:
    for name in ("order_id", "order_id_feature"):
        rows = [f"t{k},{500 - k},{k % 7},{'ab'[k % 2]}" for k in range(60)]
        (tmp_path / "t.csv").write_text("\n".join([f"text,{name},visits,label", *rows]))
        data = rfdlc.load(tmp_path / "t.csv")
        assert data.encoder is not None
        notes = [
            note for note in data.notes if "a different value in every row" in note
        ]
        assert notes[0].endswith(
            "it names rows and says nothing about the class"
        )  # whatever its name
        if name == "order_id":
            assert notes[1].endswith(
                "; to keep it as a feature, rename it to 'order_id_feature'"
            )
        else:
            assert len(notes) == 1
            assert name in data.encoder.features


def test_digits_with_leading_zeros_are_codes(tmp_path: Path) -> None:
    rows = [
        f"{['01067', '10115', '00123'][k % 3]},{k % 7},{'ab'[k % 2]},{k:04d}"
        for k in range(60)
    ]
    (tmp_path / "t.csv").write_text("\n".join(["zip,visits,label,number", *rows]))
    data = rfdlc.load(tmp_path / "t.csv")
    assert data.encoder is not None
    assert [*data.encoder.features] == [
        "zip = 00123",
        "zip = 01067",
        "zip = 10115",
        "visits",
    ]
    assert (
        "column 'zip' holds codes, digits with leading zeros, and became 3 features,"
        " one per category" in data.notes
    )
    assert data.encoder.identity == "number"  # not a feature: it names rows
    expected = data.encoder.transform(
        {"zip": ["01067", "10115", "00123"], "visits": [1, 2, 3]}
    ).tolist()
    assert expected[0] == [0, 1, 0, 1]
    for zips in (
        [1067, 10115, 123],
        ["1067", "10115", "123"],
        [1067.0, 10115.0, 123.0],
    ):  # JSON, pandas
        rows = [{"zip": code, "visits": k} for k, code in enumerate(zips, 1)]
        assert data.encoder.encode(rows).tolist() == expected


def test_leading_zeros_after_training_do_not_matter_to_a_number() -> None:
    encoder = TableEncoder.fit({"zip": ["10115", "20095"]})
    assert encoder.transform({"zip": ["01067"]}).tolist() == [[1067]]
    assert parse_column("x", ["0.5", "007", "12"]).dtype == np.float64  # measurements
    assert parse_column("x", pa.array(["0", "10", "7"])).dtype == np.float64
    assert parse_column("x", pa.array(["0", "10", " 07", "NA"])).tolist() == [
        "0",
        "10",
        "07",
        None,
    ]


def test_too_many_codes_stay_numbers_and_a_warning_says_so(tmp_path: Path) -> None:
    lines = ["code,label", *(f"{k % 1500:05d},{'ab'[k % 2]}" for k in range(3000))]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    with pytest.warns(
        UserWarning,
        match=(
            r"'code' has digits with leading zeros, as codes have, but became a number"
        ),
    ):
        assert rfdlc.load(tmp_path / "t.csv").input_shape == (1,)


@given(
    st.lists(
        st.one_of(st.none(), st.floats(-1e6, 1e6), st.sampled_from(["x", "y", "NA"])),
        min_size=1,
        max_size=20,
    )
)
def test_encodings_are_finite_and_survive_json(cells: list) -> None:
    encoder = TableEncoder.fit({"c": cells})
    assert TableEncoder.from_dict(json.loads(json.dumps(encoder.to_dict()))) == encoder
    features = encoder.transform({"c": cells})
    assert features.shape == (len(cells), len(encoder.features))
    assert np.isfinite(features).all()


@pytest.mark.parametrize(
    ("text", "suffix"),
    [(ROWS.replace(",", "\t"), "tsv"), (ROWS.replace(",", ";"), "csv")],
)
def test_other_delimiters(tmp_path: Path, text: str, suffix: str) -> None:
    (tmp_path / f"t.{suffix}").write_text("\ufeff" + text, encoding="utf-8")
    assert len(rfdlc.load(tmp_path / f"t.{suffix}").train) == 3


@pytest.mark.parametrize(("delimiter", "quote"), [("\t", ""), (";", '"')])
def test_commas_within_names_part_no_cells(
    tmp_path: Path, delimiter: str, quote: str
) -> None:
    names = [
        f"{quote}{name}{quote}" for name in ("age, years", "mass, kg, lean", "label")
    ]
    lines = [delimiter.join((f"{i}.5", f"{i}", "ab"[i % 2])) for i in range(10)]
    (tmp_path / "t.csv").write_text("\n".join([delimiter.join(names), *lines]))
    encoder = rfdlc.load(tmp_path / "t.csv").encoder
    assert encoder is not None
    assert encoder.features == ("age, years", "mass, kg, lean")


def test_categories_written_in_another_way_are_told() -> None:
    encoder = TableEncoder.fit({"sex": ["f", "m", "f"]})
    with pytest.warns(
        UserWarning, match="column 'sex' holds nothing that training saw"
    ):
        assert not encoder.transform({"sex": ["F", "M"]}).any()
    with pytest.warns(
        UserWarning,
        match=r"column 'sex' has categories that training did not see \(x\)",
    ):
        assert encoder.transform({"sex": ["x", "m"]}).tolist() == [[0, 0], [0, 1]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert encoder.transform({"sex": ["f", "m"]}).any()
    with pytest.warns(
        UserWarning, match=r"did not see \(x\): .* none of its categories \(f, m\)$"
    ) as warned:
        assert not encoder.transform({"sex": ["x"]}).any()  # one row
    assert len(warned) == 1


def test_values_of_a_column_that_was_empty_in_training_change_nothing() -> None:
    encoder = TableEncoder.fit(
        {"age": [1, 2, 4], "dose": ["", None, "NA"], "unit": np.full(3, np.nan)}
    )
    empty, nothing = (
        {"age": [1, 2], "dose": ["", None], "unit": [np.nan, np.nan]},
        "was empty in training",
    )
    with pytest.warns(
        UserWarning,
        match=f"column 'dose' has values, but {nothing}: they tell the model nothing",
    ):
        filled = encoder.transform(empty | {"dose": ["5", "mg"]})
    with pytest.warns(UserWarning, match=f"column 'unit' has values, but {nothing}"):
        np.testing.assert_array_equal(
            encoder.transform(empty | {"unit": [1.0, np.nan]}), filled
        )
    np.testing.assert_array_equal(encoder.transform(empty), filled)
    assert filled.tolist() == [[1, 1, 1], [2, 1, 1]]


def test_values_that_are_missing_as_never_in_training_are_told() -> None:
    trained: dict[str, Any] = {
        "sex": ["f", "m", "f"],
        "age": [1, 2, 4],
        "when": ["2024-01-01", "2024-01-03", "2024-02-01"],
    }
    encoder, rows = (
        TableEncoder.fit(trained),
        {"sex": ["", "m"], "age": [1, 2], "when": ["2024-01-01", "2024-01-03"]},
    )
    none = (
        "column 'sex' is empty in 50% of the rows, but never was in training: for the"
        " model .* none of its categories"
    )
    with pytest.warns(UserWarning, match=none):
        encoder.transform(rows)
    doubts = list[str]()
    encoder.transform({"sex": ["f"], "age": ["?"], "when": [None]}, doubts)
    used = [text.partition("training: ")[2] for text in doubts]
    assert used == [
        "the model uses the median 2 there",
        "the model uses the median 2024-01-03 there",
    ]
    with pytest.warns(
        UserWarning,
        match="column 'sex' is empty in 100% of the rows, but never was in training",
    ):
        encoder.transform(
            {name: [*cells[:1]] for name, cells in rows.items()}
        )  # one row
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TableEncoder.fit({"sex": ["f", None], "age": [1, None]}).transform(
            {"sex": [None] * 2, "age": [None] * 2}
        )


RANGES: dict[str, list[Any]] = {
    "age": [18, 95, 40],
    "crp": [0.1, 300, 2],
    "delta": [-1, 1, None],
    "when": ["2024-01-01", "2024-01-31", "2024-01-11"],
}


@pytest.mark.parametrize(
    ("name", "inside", "outside", "told"),
    [
        ("age", 172, 610, "({}; there 18 to 95)"),  # 95 and the range of 77
        ("age", 0, -1, "({}; there 18 to 95)"),
        ("crp", 599.9, 600, "({}; there 0.1 to 300)"),
        ("crp", 0, -5, "({}; there 0.1 to 300)"),  # negative, as never in training
        ("delta", -3, -3.5, "({}; there -1 to 1)"),
        (
            "when",
            "2024-03-01",
            "2024-03-02",
            "({}; there 2024-01-01 to 2024-01-31)",
        ),
        (
            "when",
            "2023-12-02",
            "1969-01-01",
            "({}; there 2024-01-01 to 2024-01-31)",
        ),
    ],
)
@pytest.mark.parametrize("rows", [1, 5])
def test_numbers_far_outside_of_training_are_named(
    name: str, inside: Any, outside: Any, told: str, rows: int
) -> None:
    encoder = TableEncoder.from_dict(
        json.loads(json.dumps(TableEncoder.fit(RANGES).to_dict()))
    )
    usual = {column: cells[:1] * rows for column, cells in RANGES.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoder.transform({**usual, name: [inside] * rows})
    start = f"column '{name}' has values far outside of those in training"
    with pytest.warns(UserWarning, match=start) as warned:
        encoder.transform({**usual, name: [outside] * rows}, start=10)
    named = ", ".join(f"{outside} in row {11 + row}" for row in range(min(rows, 3)))
    if rows == 5:
        named += ", ... (5 in all)"
    assert [str(each.message).partition(": ")[0] for each in warned] == [
        f"{start} {told.format(named)}"
    ]
    doubts = list[str]()
    encoder.transform({**usual, name: [outside] * rows}, doubts)
    assert [doubt.partition(":")[0] for doubt in doubts] == [
        start
    ]  # as a server answers: no cell, no range


def test_an_encoder_without_ranges_names_no_number() -> None:
    table = TableEncoder.fit(RANGES).to_dict()
    for column in table["columns"]:
        del column["low"], column["high"]
    encoder = TableEncoder.from_dict(table)
    assert encoder == TableEncoder.fit(
        RANGES
    )  # so that a data set read now fits to a model of before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoder.transform(
            {column: cells[:1] for column, cells in RANGES.items()} | {"age": [610]}
        )


def test_a_column_is_named_once_however_many_chunks_are_read(tmp_path: Path) -> None:
    lines = [f"{610 + i},{'xyz'[i % 3]},{'' if i % 2 else 1}" for i in range(12)]
    (tmp_path / "new.csv").write_text("\n".join(["age,sex,mass", *lines]))
    encoder = TableEncoder.fit({"age": [18, 95], "sex": ["f", "m"], "mass": [1, 2]})
    samples = open_samples(
        tmp_path / "new.csv", InputSpec(Classes(("a", "b")), (4,), encoder)
    )
    with warnings.catch_warnings(record=True, action="always") as warned:
        for start in (0, 3, 6, 9):
            samples.read(range(start, start + 3))
    assert sorted(str(each.message).split("'")[1] for each in warned) == [
        "age",
        "mass",
        "sex",
    ]


@pytest.mark.parametrize("cell", ["41.97 EUR", "1e50"])
def test_a_wrong_cell_is_named_with_its_file_and_row(tmp_path: Path, cell: str) -> None:
    (tmp_path / "new.csv").write_text(
        "\n".join(["amount,when", "1,a", "2,b", "3,a", f"{cell},b"])
    )
    spec = InputSpec(Classes(("a", "b")), (1,), TableEncoder.fit({"amount": [1, 2, 4]}))
    samples = open_samples(tmp_path / "new.csv", spec)
    samples.read(range(2))
    with pytest.raises(InputError, match=r"new\.csv: column 'amount' .*in row 4"):
        samples.read(range(2, 4))


@pytest.mark.parametrize("copies", [5, 900])
def test_a_column_that_differs_apart_from_copies_names_rows(
    tmp_path: Path, copies: int
) -> None:
    lines = [f"T{i:05},{i * 37 % 1009 / 7:.3f},{'ab'[i % 2]}" for i in range(1500)]
    (tmp_path / "t.csv").write_text(
        "\n".join(["transaction_id,amount,label", *lines, *lines[:copies]])
    )
    data = rfdlc.load(tmp_path / "t.csv")
    assert data.encoder is not None
    assert data.encoder.features == ("amount",)
    assert (
        data.encoder.identity == "transaction_id"
    )  # predictions have it, but ids of samples are unique
    assert data.train.ids is None
    share = f"{1500 / (1500 + copies):.1%}"
    assert any(
        f"'transaction_id' has a different value in {share} of the rows" in note
        for note in data.notes
    )


def visits(tmp_path: Path, name: str, values: list[Any]) -> rfdlc.Dataset:
    lines = [
        f"{value},{i * 37 % 10007 / 7:.3f},{'ab'[i % 2]}"
        for i, value in enumerate(values)
    ]
    (tmp_path / "t.csv").write_text("\n".join([f"{name},amount,label", *lines]))
    return rfdlc.load(tmp_path / "t.csv")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (
            "patient_id",
            [f"P{i // 2}" for i in range(2400)],
        ),  # more texts than there may be categories
        ("patient_id", [i // 2 for i in range(240)]),
        (
            "patient_id",
            [f"{i // 2}.0" if i % 9 else "" for i in range(240)],
        ),  # whole numbers, as floats
        ("PatientID", [i % 47 for i in range(4700)]),  # people, in many rows each
        ("customer", [i % 100 for i in range(300)]),
        ("order_id", [i % 100 for i in range(300)]),
        ("case", [*range(300)]),
    ],
)
def test_an_identifier_is_never_a_feature(
    tmp_path: Path, name: str, values: list[Any]
) -> None:
    repeats = len(set(values)) < len(values)
    with (
        pytest.warns(UserWarning, match=f"use --groups {name}")
        if repeats
        else nullcontext()
    ):
        data = visits(tmp_path, name, values)
    assert data.encoder is not None
    assert data.encoder.features == ("amount",)
    assert data.encoder.identity == (None if repeats else name)
    assert (
        len(
            [
                note
                for note in data.notes
                if f"'{name}'" in note and "was left out" in note
            ]
        )
        == 1
    )
    if repeats and "" not in values:
        grouped = rfdlc.load(tmp_path / "t.csv", groups=name)
        assert grouped.test is not None
        assert grouped.train.groups is not None
        assert grouped.test.groups is not None
        assert not set(grouped.train.groups) & set(grouped.test.groups)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("Kunden-Nr", [*range(10_001, 10_301)]),
        ("vorgang", [7 * i % 300 for i in range(300)]),  # in any order
        ("nummer", [i + i // 9 for i in range(300)]),  # with gaps
        ("beleg", [2024_0001 + i % 150 + 500 * (i // 150) for i in range(300)]),
        ("konto", [*range(299), 999_999]),
        ("kunde", [f"{i}.0" if i % 9 else "" for i in range(300)]),
        ("station", [*range(299), 5]),  # one occurs twice
    ],
)
def test_whole_numbers_that_were_handed_out_are_identifiers_whatever_their_name(
    tmp_path: Path, name: str, values: list[Any]
) -> None:
    data = visits(tmp_path, name, values)
    assert data.encoder is not None
    assert data.encoder.features == ("amount",)
    told = [note for note in data.notes if f"column {name!r} has a different" in note]
    assert len(told) == 1
    assert told[0].endswith(f"rename it to '{name}_feature'")
    assert (
        f"{name}_feature"
        in visits(tmp_path, f"{name}_feature", values).encoder.features
    )


@pytest.mark.parametrize(
    ("name", "values"),
    [
        # Of 240 draws from 20,000 numbers none repeats in one of four tables.
        ("price", [(i * 7919) % 20_011 for i in range(240)]),
        ("share", [i + 0.5 * (i == 7) for i in range(240)]),
        ("rank", [*range(20)]),  # too few to tell
        ("age", [i % 90 for i in range(240)]),
        ("year", [1900 + i % 100 for i in range(240)]),
        ("zip", [10000 + 7 * (i // 2) for i in range(240)]),
        ("cases", [i % 90 for i in range(240)]),
        ("index", [i % 90 for i in range(240)]),
        ("ward_id", [i % 5 for i in range(240)]),
        ("store_id", [i % 31 for i in range(3100)]),
        ("user", [i % 90 + 0.5 for i in range(240)]),
        ("humid", [i % 90 for i in range(240)]),
    ],
)
def test_other_numbers_stay_features(
    tmp_path: Path, name: str, values: list[Any]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = visits(tmp_path, name, values)
    assert data.encoder is not None
    assert data.encoder.features == (name, "amount")


def test_an_identifier_of_few_kinds_is_a_category_with_a_warning(
    tmp_path: Path,
) -> None:
    with pytest.warns(
        UserWarning,
        match="'store_id' became .*; it looks like an identifier: groups=store_id",
    ):
        data = visits(tmp_path, "store_id", [f"S{i % 30}" for i in range(3000)])
    assert data.encoder is not None
    assert len(data.encoder.features) == 31


@pytest.mark.parametrize(
    "trained", [[True, False], ["true", "false"], ["TRUE", "FALSE"]]
)
def test_booleans_may_be_spelt_otherwise(trained: list[Any]) -> None:
    encoder = TableEncoder.fit({"smoker": [*trained, None]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for yes, no in (
            (True, False),
            ("true", "false"),
            ("TRUE", "FALSE"),
            ("True", "False"),
            (1, 0),
            ("1", "0"),
        ):
            assert (
                encoder.transform({"smoker": [no, yes, None]}).tolist()
                == np.eye(3).tolist()
            )
    with pytest.warns(UserWarning, match=r"training did not see \(yes\)"):
        encoder.transform({"smoker": ["yes", "true"]})
    mixed = TableEncoder.fit({"smoker": ["true", "false", "maybe"]})
    with pytest.warns(UserWarning, match=r"training did not see \(True\)"):
        mixed.transform({"smoker": ["True", "false"]})


def test_codes_with_underscores_are_no_numbers() -> None:
    assert TableEncoder.fit({"code": ["1_2", "12", "1_2"]}).features == (
        "code = 12",
        "code = 1_2",
    )


def test_a_text_among_numbers_is_missing_and_told(tmp_path: Path) -> None:
    lines = [
        f"{'unknown' if i % 9 == 3 else i // 2},"
        f"{'#N/A' if i == 4 else i / 2},{'ab'[i % 2]}"
        for i in range(60)
    ]
    (tmp_path / "t.csv").write_text("\n".join(["age,mass,label", *lines]))
    with pytest.warns(
        UserWarning,
        match=(
            "column 'age' holds numbers; read as missing: 'unknown'; leave such cells"
            " empty"
        ),
    ):
        data = rfdlc.load(tmp_path / "t.csv", test_fraction=0)
    encoder = data.encoder
    assert encoder is not None
    assert encoder.features == ("age", "age is missing", "mass", "mass is missing")
    ages = np.array([np.nan if i % 9 == 3 else i // 2 for i in range(60)])
    expected = np.stack(
        [np.where(np.isnan(ages), np.nanmedian(ages), ages), np.isnan(ages)], 1
    )
    np.testing.assert_array_equal(data.train.inputs[:, :2], expected)
    again = TableEncoder.from_dict(json.loads(json.dumps(encoder.to_dict())))
    rows = {"age": ["7", "unknown", ""], "mass": [1, 2, 3]}
    assert again.transform(rows)[:, :2].tolist() == [
        [7, 0],
        *[[np.nanmedian(ages), 1]] * 2,
    ]
    with pytest.raises(
        InputError,
        match="holds numbers in the training data, but here 'unheard of' in row 2",
    ):
        again.transform({**rows, "age": ["7", "unheard of", ""]})
    assert [*again.wrong_cells({**rows, "age": ["unknown", "7", "unheard of"]})] == [2]


@pytest.mark.parametrize(
    "written",
    [
        b'{"columns": ["x"]}',
        b"[1]",
        b'{"columns": 3}',
        b'{"columns": [{"pandas_type": "categorical"}]}',
        b"{oops",
        b"[",
    ],
)
def test_what_pandas_did_not_write_about_a_parquet_file_says_nothing(
    tmp_path: Path, written: bytes
) -> None:
    table = pa.table({"x": [1.0, 2.0] * 20, "target": ["a", "b"] * 20})
    pq.write_table(
        table.replace_schema_metadata({b"pandas": written}), tmp_path / "t.parquet"
    )
    encoder = rfdlc.load(tmp_path / "t.parquet").encoder
    assert encoder is not None
    assert encoder.features == ("x",)


@pytest.mark.parametrize(
    "values",
    [
        ["1", "2", "more"] * 20,
        [f"{i}" for i in range(1, 60)] + ["A1"],
        ["007", *"ab", *map(str, range(30))],
    ],
)
def test_texts_among_few_numbers_or_names_are_no_missing_values(
    values: list[str],
) -> None:
    """Of a few kinds, of numbers that name rows, and of codes."""
    assert stray_texts(values) == ()
    assert stray_texts([*map(str, range(30)), *map(str, range(30)), "more"]) == (
        "more",
    )


@pytest.mark.parametrize(
    ("cell", "used"),
    [
        ("<20", "10, half of the limit"),
        ("> 500", "500, the limit"),
        ("\u2264 0,5", "0.25, half of the limit"),
    ],
)
def test_a_limit_of_detection_is_told(tmp_path: Path, cell: str, used: str) -> None:
    fix = (
        f"'{cell}' is a limit of what can be measured: better write a number (for"
        f" '{cell}' such as {used})"
    )
    for count in (60, 2400):
        lines = [
            f'"{cell if i % 5 == 0 else i + 20.5}",{"ab"[i % 2]}' for i in range(count)
        ]
        (tmp_path / "t.csv").write_text("\n".join(["ferritin,label", *lines]))
        with pytest.warns(UserWarning, match="'ferritin' holds numbers") as told:
            data = rfdlc.load(tmp_path / "t.csv", test_fraction=0)
        assert fix in str(told[0].message)
        assert "empty" not in str(told[0].message)
        assert data.encoder is not None
        assert data.encoder.features == ("ferritin", "ferritin is missing")


def test_too_many_texts_are_left_out_or_groups() -> None:
    with pytest.raises(
        InputError,
        match=(
            r"--drop ward; .* belong together, use --groups ward \(in Python"
            r" groups='ward'\)$"
        ),
    ) as told:
        TableEncoder.fit({"ward": [f"w{i}" for i in range(1001)]})
    assert "numbers" not in str(told.value)


def test_decimal_commas_are_numbers(tmp_path: Path) -> None:
    lines = [f"{i}.5,{'ab'[i % 2]}" for i in range(10)]
    (tmp_path / "points.csv").write_text("\n".join(["size,target", *lines]))
    (tmp_path / "commas.csv").write_text(
        "\n".join(["size;target", *lines]).replace(",", ";").replace(".", ",")
    )
    points, commas = (
        rfdlc.load(tmp_path / f"{name}.csv") for name in ("points", "commas")
    )
    assert commas.encoder == points.encoder
    assert commas.train.array.tolist() == points.train.array.tolist()


def test_parquet_and_data_frames_equal_the_csv(path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv(path)
    frame.to_parquet(path.with_suffix(".parquet"))
    expected = rfdlc.load(path)
    for source in (frame, path.with_suffix(".parquet")):
        data = rfdlc.load(source)
        assert data.encoder == expected.encoder
        assert data.train.array.tolist() == expected.train.array.tolist()
        assert data.classes == expected.classes


def test_row_numbers_that_pandas_wrote_are_no_feature(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": range(20), "y": ["a"] * 10 + ["b"] * 10})
    pandas.concat([frame[frame.x % 2 == 0], frame]).to_parquet(tmp_path / "t.parquet")
    data = rfdlc.load(tmp_path / "t.parquet")
    assert data.encoder is not None
    assert data.encoder.features == ("x",)


def test_labels_beside_a_data_frame_are_those_of_a_column() -> None:
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame(
        {
            "age": rng.normal(size=60),
            "ward": pandas.Categorical(rng.choice(["N", "S"], 60)),
        }
    )
    labels = pandas.Series(rng.choice(["ill", "well"], 60))
    expected, found = (
        rfdlc.load(frame.assign(target=labels), target="target"),
        rfdlc.load((frame, labels)),
    )
    assert found.encoder == expected.encoder
    assert found.classes == expected.classes
    for name, split in expected.splits.items():
        np.testing.assert_array_equal(found.splits[name].array, split.array)
        np.testing.assert_array_equal(found.splits[name].labels, split.labels)
    parts = {"train": (frame[:40], labels[:40]), "test": (frame[40:], labels[40:])}
    whole = rfdlc.load(
        frame.assign(target=labels, split=["train"] * 40 + ["test"] * 20),
        target="target",
    )
    np.testing.assert_array_equal(rfdlc.load(parts).test.array, whole.test.array)
    for wrong, message in (
        ((frame, labels[1:]), r"60 rows and labels of shape \(59,\)"),
        ((frame.assign(target=1), labels), "column target beside labels"),
        (
            {"train": parts["train"], "test": (frame[["age"]][40:], labels[40:])},
            "column ward is not in all of them: add",
        ),
        (
            {
                "train": parts["train"],
                "val": (frame[["age"]], labels),
                "test": parts["test"],
            },
            "column ward is not in all",
        ),
    ):
        with pytest.raises(InputError, match=message):
            rfdlc.load(wrong)
    with pytest.raises(
        InputError,
        match=(
            "target 'age' names a column, but labels are given, too: leave one of them"
        ),
    ):
        rfdlc.load((frame, labels), target="age")


def test_lists_in_a_data_frame_are_read_as_those_of_a_file(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    cells = [row.tolist() for row in rng.normal(size=(40, 3))]
    frame = pandas.DataFrame(
        {
            "embedding": cells,
            "language": rng.choice(["de", "fr"], 40),
            "label": [*"ab"] * 20,
        }
    )
    frame.to_parquet(tmp_path / "t.parquet")
    expected = rfdlc.load(tmp_path / "t.parquet")
    assert expected.input_shape == (5,)
    for own in (frame, frame.assign(embedding=[np.array(row) for row in cells])):
        found = rfdlc.load(own)
        assert found.encoder == expected.encoder
        np.testing.assert_array_equal(found.train.array, expected.train.array)
    for own in (frame, tmp_path / "t.parquet"):
        without = rfdlc.load(own, drop=["embedding"])
        assert without.input_shape == (2,)
        assert "column 'embedding' was left out as asked" in without.notes
    with pytest.raises(
        InputError, match="column 'mass' does not exist"
    ):  # it is no list
        rfdlc.load(frame.assign(**{"mass[kg]": 1.0}), drop=["mass"])
    assert expected.encoder is not None
    rows = frame.drop(columns="label")
    for again in (rows, rows.to_dict("list"), rows.to_dict("records")):
        assert (
            expected.encoder.encode(again).tolist()
            == expected.encoder.encode(rows).tolist()
        )
    np.testing.assert_allclose(expected.encoder.encode(rows)[:, :3], cells, rtol=1e-6)
    for wrong in ([1.0, 2.0], ["x", "y", "z"], [[1.0], [2.0], [3.0]]):
        told = (
            r"column 'embedding' holds lists, in row 2"
            rf" {re.escape(reprlib.repr(wrong))}: expected 3 numbers"
        )
        ragged = frame.assign(embedding=[cells[0], wrong, *cells[2:]])
        with pytest.raises(
            InputError,
            match=(
                rf"{told}, as many as the first has; drop \(--drop\) leaves the"
                r" column out"
            ),
        ):
            rfdlc.load(ragged)
        assert rfdlc.load(ragged, drop=["embedding"]).input_shape == (2,)
        beside = expected.encoder.encode(
            rows.assign(tags=ragged["embedding"])
        )  # what the model does not need
        assert beside.tolist() == expected.encoder.encode(rows).tolist()


@pytest.mark.parametrize("missing", [None, float("nan"), "NA"])
def test_missing_lists_and_items_are_missing_numbers(missing: Any) -> None:
    pandas = pytest.importorskip("pandas")
    missing = pandas.NA if missing == "NA" else missing
    cells = [missing, *([float(i), None if i == 5 else 1.0] for i in range(9))]
    data = rfdlc.load(
        pandas.DataFrame({"e": cells, "label": [*"ab"] * 5}), test_fraction=0
    )
    assert data.encoder is not None
    assert data.encoder.features == (
        "e[0]",
        "e[0] is missing",
        "e[1]",
        "e[1] is missing",
    )
    assert data.train.array[:, [1, 3]].sum(axis=0).tolist() == [1, 2]


def test_texts_in_lists_of_a_file_are_categories(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"tags": [["01"], [], ["02", "03"]] * 4, "label": [*"ab"] * 6}),
        tmp_path / "t.parquet",
    )
    assert rfdlc.load(tmp_path / "t.parquet").input_shape == (3,)


def test_the_split_column_however_it_is_written(path: Path) -> None:
    expected = rfdlc.load(path)
    path.write_text(ROWS.replace("split", "Split"))
    data = rfdlc.load(path)
    assert data.encoder == expected.encoder
    assert {split: len(part) for split, part in data.splits.items()} == {
        "train": 3,
        "val": 1,
        "test": 1,
    }


def test_a_split_column_that_is_dropped_splits_nothing(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "x,split,y\n" + "".join(f"{i},{i % 3},{'ab'[i % 2]}\n" for i in range(20))
    )
    data = rfdlc.load(tmp_path / "t.csv", drop="split")
    assert {split: len(part) for split, part in data.splits.items()} == {
        "train": 16,
        "test": 4,
    }
    assert "column 'split' was left out as asked" in data.notes


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    arrays = [pyarrow.array([1, 2]), pyarrow.array([3, 4]), pyarrow.array(["a", "b"])]
    parquet.write_table(
        pyarrow.Table.from_arrays(arrays, ["x", "x", "y"]), tmp_path / "t.parquet"
    )
    for source in (
        tmp_path / "t.parquet",
        pandas.DataFrame([[1, 3, "a"]], columns=["x", "x", "y"]),
    ):
        with pytest.raises(
            InputError, match=r"column 'x' appears more than once|duplicate field names"
        ):
            rfdlc.load(source)


def test_a_test_part_is_held_out_and_the_encoding_knows_nothing_of_it(
    tmp_path: Path,
) -> None:
    rows = [f"{i / 2},{'ab'[i % 2]},{'pq'[i % 2]}{i // 2}" for i in range(40)]
    (tmp_path / "t.csv").write_text("value,class,kind\n" + "\n".join(rows))
    data = rfdlc.load(tmp_path / "t.csv", target="class", drop=["kind"], seed=2)
    assert data.test is not None
    assert len(data.test) == 8
    assert "8 of 40 samples were held out" in data.notes[0]
    assert data.encoder is not None
    assert data.encoder.columns[0].median == np.median(data.train.array[:, 0])
    assert "column 'kind' was left out as asked" in data.notes


def test_groups_by_column(tmp_path: Path) -> None:
    rows = [f"{i % 7},{'ab'[i // 4 % 2]},person {i // 4}" for i in range(48)]
    (tmp_path / "t.csv").write_text("value,label,person\n" + "\n".join(rows))
    data = rfdlc.load(tmp_path / "t.csv", groups="person").hold_out(0.2)
    groups = [set(part.groups) for part in data.splits.values()]  # type: ignore[arg-type]
    assert sum(map(len, groups)) == len(set.union(*groups)) == 12
    assert data.encoder is not None
    assert data.encoder.features == ("value",)


def test_numbers_as_classes_are_in_order(tmp_path: Path) -> None:
    rows = [f"{i},{c}" for i, c in enumerate([10, 2, 1, 2, 10, 1, 10, 2] * 2)]
    (tmp_path / "t.csv").write_text("value,y\n" + "\n".join(rows))
    assert rfdlc.load(tmp_path / "t.csv").classes.names == ("1", "2", "10")


def test_missing_targets(path: Path) -> None:
    path.write_text(ROWS + "p6,3,f,a,train,\n")
    with pytest.raises(InputError, match="target 'label' is missing in row 6"):
        rfdlc.load(path)
    data = rfdlc.load(path, skip_broken=True)
    assert len(data.train) == 3
    assert "row 6 has no target" in data.skipped[0]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            ROWS,
            {"target": "lable"},
            "column 'lable' does not exist.*did you mean 'label'",
        ),
        (ROWS, {"groups": "ward"}, "column 'ward' does not exist"),
        (ROWS, {"drop": ["ward"]}, "column 'ward' does not exist"),
        (
            ROWS.replace("label", "outcome"),
            {},
            "which column is the class.*patient_id, age",
        ),
        (ROWS + "p7,1,f\n", {}, "line 7: 3 cells, expected 6 as in the first line"),
        (
            ROWS.replace("sex", "age"),
            {},
            "column 'age' appears more than once: expected different names",
        ),
        ("", {}, "is empty: expected a first line with the names of the columns"),
        (
            ROWS.replace("val", "later"),
            {},
            "split 'later' in row 5 of column 'split' is unknown",
        ),
        (
            ROWS.replace("50", "inf"),
            {},
            "column 'age' has an infinite or too large value in row 3",
        ),
        (
            ROWS.replace("50", "1e39"),
            {},
            r"column 'age' has an infinite or too large value in row 3 \(1e39\)",
        ),
        (ROWS, {"drop": "age,ward"}, "column 'ward' does not exist"),
        ("label\na\nb\n", {}, "no column is left to learn from"),
        (
            "file,label\na.PNG,a\nb.png,b\n",
            {},
            (
                r"the file does not exist: expected .*: 2 times \(.*line 2: .*a.PNG;"
                r" .*line 3: .*b.png\)"
            ),
        ),
        ("x,y\n1,a\n2,a\n", {"test_fraction": 0}, "one class"),
        (
            "x,y\n" + "".join(f"1,{i}.5\n" for i in range(40)),
            {},
            "expected classes, not measurements",
        ),
        ("x,y\n", {}, "no training sample"),
        (ROWS, {"groups": "label"}, "column 'label' is named twice"),
        (ROWS, {"drop": ["label"]}, "column 'label' is named twice"),
        (
            "x,y\n1,1\n2,0\n3,1.0\n",
            {},
            "the target holds '1' and '1.0', which are one number",
        ),
    ],
)
def test_wrong_tables_are_named(
    path: Path, text: str, options: dict, message: str
) -> None:
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        rfdlc.load(path, **options)


@pytest.mark.parametrize("images", [False, True])
def test_measurements_as_classes_are_not_taken_without_a_word(
    path: Path, images: bool
) -> None:
    """An error where most numbers are different, a warning where rounding makes them
    repeat, nothing for levels.
    """
    if images:
        Image.new("L", (8, 8)).save(path.with_name("a.png"))
    for count, values in ((40, None), (30, "warns"), (10, "levels")):
        cells = [
            f"{'a.png' if images else i / 2},{i % count / 2 + 0.25}"
            for i in range(40 if values is None else 200)
        ]
        path.write_text("\n".join([f"{'path' if images else 'x'},y", *cells]))
        found = (
            pytest.raises(InputError)
            if values is None
            else warnings.catch_warnings(record=True)
        )
        with found as told:
            warnings.simplefilter("always")
            rfdlc.load(path, target="y")
        texts = (
            [str(told.value)] if values is None else [str(own.message) for own in told]
        )
        named = [
            text
            for text in texts
            if f"the target has {count} different fractions: expected classes" in text
        ]
        assert len(named) == (values != "levels")


def test_other_wrong_files(path: Path) -> None:
    path.write_bytes(b"a,b\n\xff\xff,1\n")
    with pytest.raises(InputError, match=r"t.csv: cannot be read as CSV in UTF-8"):
        rfdlc.load(path)
    path.with_suffix(".parquet").write_bytes(b"nonsense")
    with pytest.raises(InputError, match=r"t.parquet: cannot be read as Parquet"):
        rfdlc.load(path.with_suffix(".parquet"))


def test_too_many_categories() -> None:
    cells = [f"c{i // 2}" for i in range(2400)]
    with pytest.raises(
        InputError, match="column 'city' has 1200 different texts, too many"
    ):
        TableEncoder.fit({"city": cells})
    both = (
        r"'city' has 1200 .*'last word' has 1200 .*--drop city --drop 'last word'; .*"
        r" drop=\['city', 'last word'\]"
    )
    with pytest.raises(InputError, match=both):
        TableEncoder.fit({"city": cells, "age": range(2400), "last word": cells})
    assert parse_column("n", [" 1 ", "nan"]).tolist()[0] == 1


def test_a_large_offset_leaves_what_differs(tmp_path):
    """Seconds since 1970: a float32 there is a multiple of 128."""
    seconds = [1_700_000_000 + 7 * k for k in range(40)]
    rows = "".join(f"{s},{'ab'[k % 2]}\n" for k, s in enumerate(seconds))
    (tmp_path / "t.csv").write_text("time,target\n" + rows)
    data = rfdlc.load(tmp_path / "t.csv", test_fraction=0)
    code = data.encoder.columns[0]
    assert code.offset == code.median == np.median(seconds)
    np.testing.assert_array_equal(
        data.train.array[:, 0], np.array(seconds) - np.median(seconds)
    )
    again = TableEncoder.from_dict(json.loads(json.dumps(data.encoder.to_dict())))
    assert again.transform({"time": [seconds[3]]})[0, 0] == data.train.array[3, 0]
    old = {
        key: value for key, value in vars(code).items() if key != "offset"
    }  # a run folder without offsets
    assert (
        TableEncoder.from_dict({"columns": [old]}).transform({"time": ["1700000128"]})[
            0, 0
        ]
        == 1_700_000_128
    )


def test_features_that_32_bits_blur_are_told():
    x = np.linspace(0, 1, 20)[:, None] + [[0.0, 1e8]]
    with pytest.warns(
        UserWarning,
        match=(
            r"32 bits are too few for feature 1: .* around 1e\+08; subtract its mean"
            r" first"
        ),
    ):
        rfdlc.load((x, np.arange(20) % 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rfdlc.load((x[:, :1], np.arange(20) % 2))


def test_features_equal_those_of_scikit_learn() -> None:
    from sklearn.impute import SimpleImputer
    from sklearn.preprocessing import OneHotEncoder

    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(50, 3))
    numbers[rng.random((50, 3)) < 0.2] = np.nan
    texts = rng.choice(np.array(["a", "b", "c", None], dtype=object), (50, 2))
    table = {f"n{i}": numbers[:, i] for i in range(3)} | {
        f"t{i}": texts[:, i] for i in range(2)
    }
    encoder = TableEncoder.fit({name: cells[:30] for name, cells in table.items()})
    imputer = SimpleImputer(strategy="median").fit(numbers[:30])
    one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False).fit(
        texts[:30]
    )
    found = encoder.transform(table)
    assert (
        found[:, encoder.kinds == "number"]
        == imputer.transform(numbers).astype(np.float32)
    ).all()
    assert (found[:, encoder.kinds == "flag"] == np.isnan(numbers)).all()
    assert (found[:, encoder.kinds == "category"] == one_hot.transform(texts)).all()
    for row in range(50):
        alone = {name: [cells.tolist()[row]] for name, cells in table.items()}
        assert (encoder.transform(alone)[0] == found[row]).all()


def test_an_encoder_by_hand() -> None:
    encoder = TableEncoder.fit({"age": ["30", "", "50"], "sex": ["f", "m", "f"]})
    assert encoder.transform({"age": ["?"], "sex": ["x"]}).tolist() == [[40, 1, 0, 0]]
    assert encoder.features == ("age", "age is missing", "sex = f", "sex = m")


def test_cells_and_names_by_hand() -> None:
    assert [as_text(cell) for cell in (" NA ", None, float("nan"), 3)] == [
        None,
        None,
        None,
        "3",
    ]
    assert str(parse_column("age", ["31", "", "4.5"]).tolist()) == "[31.0, nan, 4.5]"
    assert blurred(np.array([1.7e9, 1.7e9 + 60, 1.7e9 + 90]))
    assert not blurred(np.array([1.7e9, 1e8]))
    strays = "; 'unknown' is not a number: such cells may be left empty"
    assert strays_among([*"0123456789", "10", "unknown"]) == strays
    assert strays_among(["1", "2", "more"]) == ""
    assert [
        names_rows(name) for name in ("Patient_ID", "PassengerId", "idea", "humid")
    ] == [True, True, False, False]


DATED = """seen,when,note,label
2024-01-01,2024-01-01T12:00:00Z,2024-01-01,a
2024-01-03,2024-01-02 00:00:00+06:00,2024-01-02,b
,,soon,a
2024-01-05,2024-01-04T06:00,2024-01-04,b
"""
DAYS = [
    [19723, 19723.5],
    [19725, 19723.75],
    [19725, 19723.75],
    [19727, 19726.25],
]  # of January 1st: 19723


def dated(kind: str, path: Path) -> Any:
    """The table above, with dates as texts or as each library stores them."""
    cells = [line.split(",") for line in DATED.splitlines()[1:]]
    days = [date.fromisoformat(seen) if seen else None for seen, *_ in cells]
    times = [datetime.fromisoformat(when) if when else None for _, when, *_ in cells]
    aware = [
        time and (time if time.tzinfo else time.replace(tzinfo=UTC)) for time in times
    ]
    columns = {
        "seen": days,
        "when": aware,
        "note": [row[2] for row in cells],
        "label": [row[3] for row in cells],
    }
    if kind == "csv":
        (path / "t.csv").write_text(DATED)
        return path / "t.csv"
    if kind == "parquet":
        columns["when"] = pa.array(aware, pa.timestamp("ns", "Asia/Omsk"))
        pq.write_table(pa.table(columns), path / "t.parquet")
        return path / "t.parquet"
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame(columns).astype(
        {"seen": "datetime64[ns]", "when": "datetime64[ns, Asia/Omsk]"}
    )


@pytest.mark.parametrize("kind", ["csv", "parquet", "frame"])
def test_dates_are_days_since_1970(tmp_path: Path, kind: str) -> None:
    data = rfdlc.load(dated(kind, tmp_path), test_fraction=0)
    assert data.encoder is not None
    assert data.encoder.features == (
        "seen",
        "seen is missing",
        "when",
        "when is missing",
    )  # every note is another
    assert (
        data.train.array[:, [0, 2]] + [code.offset for code in data.encoder.columns]
    ).tolist() == DAYS
    assert (
        data.train.array[:, 1].tolist()
        == data.train.array[:, 3].tolist()
        == [0, 0, 1, 0]
    )
    filled = (
        "1 missing values were filled with the median 2024-01-03 and marked in a"
        " feature of their own"
    )
    assert (
        f"column 'seen': dates became one number, days since 1970-01-01; {filled}"
        in data.notes
    )
    encoder = TableEncoder.from_dict(json.loads(json.dumps(data.encoder.to_dict())))
    assert encoder == data.encoder
    future = np.array(["2031-01-01"], "datetime64[ns]")
    for seen, when in (
        (["2031-01-01"], [None]),
        (future, np.array([""])),
        (pa.array(future), pa.nulls(1)),
    ):
        days = (date(2031, 1, 1) - date(1970, 1, 1)).days
        assert encoder.transform({"seen": seen, "when": when})[
            :, [0, 1, 3]
        ].tolist() == [[days, 0, 1]]
    assert (
        encoder.transform({"seen": ["1.1.2031"], "when": [None]}).tolist()
        == encoder.transform({"seen": ["2031-01-01"], "when": [None]}).tolist()
    )
    for wrong in ("soon", "2024", "2024-13-01", "20240101", "1.13.2031", "1.1.31"):
        with pytest.raises(
            InputError,
            match=f"'seen' holds dates in the training data, but here '{wrong}'",
        ):
            encoder.transform({"seen": ["2024-01-01", wrong], "when": [None, None]})


def test_classes_that_differ_in_spelling_alone_are_named(tmp_path: Path) -> None:
    names = ["No Defect", "no-defect", "1", "-1", "deep"] * 4
    (tmp_path / "t.csv").write_text(
        "x,class\n" + "".join(f"{i},{name}\n" for i, name in enumerate(names))
    )
    with pytest.warns(
        UserWarning, match="classes 'No Defect', 'no-defect' differ in case"
    ):
        found = [
            note
            for note in rfdlc.load(tmp_path / "t.csv").notes
            if "spell them alike" in note
        ]
    assert found == [
        "classes 'No Defect', 'no-defect' differ in case, spaces, hyphens or hidden"
        " characters alone: if they are one class, spell them alike"
    ]


def test_classes_that_look_the_same_are_named() -> None:
    hidden = ["ok", "ok\u200b", "caf\u00e9", "cafe\u0301", "K1", "K2"]
    assert [told.split(" differ")[0] for told in spelt_alike(hidden)] == [
        r"classes 'ok', 'ok\u200b'",
        "classes 'caf\u00e9', 'cafe\u0301'",
    ]


@pytest.mark.parametrize(
    ("names", "joined"),
    [
        (["x", "y", "x|y"], "'x|y'"),
        (["x;z", "y; z", "x;y"], "'x;y'"),
        (["red, dark", "red", "dark"], "'red, dark'"),
        (["red, dark", "blue"], None),
        (["animal/cat", "animal/dog", "toy/cat", "toy/dog"], None),  # folders
        (["a|b", "c|d"], None),
    ],
)
def test_several_labels_in_one_cell_are_told(
    tmp_path: Path, names: list[str], joined: str | None
) -> None:
    rows = [f"{i / 2},{name!r}" for i, name in enumerate((names * 30)[:60])]
    (tmp_path / "t.csv").write_text("\n".join(["x,target", *rows]).replace("'", '"'))
    with warnings.catch_warnings(record=True, action="always") as warned:
        data = rfdlc.load(tmp_path / "t.csv")
    told = [note for note in data.notes if "several labels of one sample" in note]
    assert told == [str(one.message) for one in warned if "several" in str(one.message)]
    if joined is None:
        assert not told
    else:
        assert told[0].startswith(f"classes such as {joined} look like")


def test_a_text_among_dates_is_told(tmp_path: Path) -> None:
    assert parse_column("year", ["2024", "1999"]).dtype == np.float64
    assert parse_column("when", ["2024-01-01", "soon", ""]).tolist() == [
        "2024-01-01",
        "soon",
        None,
    ]
    lines = [
        f"{'soon' if i == 3 else f'2024-01-{i // 2 + 1:02}'},{'ab'[i % 2]}"
        for i in range(60)
    ]
    (tmp_path / "t.csv").write_text("\n".join(["when,label", *lines]))
    with pytest.warns(
        UserWarning,
        match="column 'when' became .* one per category; 'soon' is not a date",
    ):
        rfdlc.load(tmp_path / "t.csv", test_fraction=0)
    with pytest.raises(
        InputError,
        match="'age' holds numbers in the training data, but here '2024-01-01'",
    ):
        TableEncoder.fit({"age": [1, 2]}).transform({"age": ["2024-01-01"]})


def test_dates_as_classes_are_texts(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("x,y\n1,2024-02-01\n2,2024-01-01\n3,2024-02-01\n")
    assert rfdlc.load(tmp_path / "t.csv", test_fraction=0).classes.names == (
        "2024-01-01",
        "2024-02-01",
    )


def test_a_run_that_has_dates_as_categories_reads_them_so() -> None:
    column = {
        "name": "when",
        "categories": ["2024-01-01", "2024-01-02"],
        "median": None,
        "offset": 0.0,
        "flags_missing": False,
        "counts_missing": False,
        "missing": [],
    }
    encoder = TableEncoder.from_dict({"columns": [column]})
    for cells in (["2024-01-02"], pa.array([date(2024, 1, 2)])):
        assert encoder.transform({"when": cells}).tolist() == [[0, 1]]


@pytest.mark.parametrize("name", ["nofile.parquet", "folder/nofile", "folder/"])
def test_a_file_that_is_not_there(name: str) -> None:
    with pytest.raises(
        InputError,
        match=(
            r"^(nofile.parquet|folder/nofile|folder): no such file or folder: correct"
        ),
    ):
        rfdlc.load(name)
    with pytest.raises(
        InputError,
        match=(
            r"'digits' is neither a known data set nor an existing path.*known are"
            r" .*did you mean"
        ),
    ):
        rfdlc.load("digits")


@pytest.mark.parametrize(
    ("kind", "cells"),
    [
        ("struct<a: int64>", [{"a": 1}, {"a": 2}]),
        (
            "map<string, int64>",
            pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())),
        ),
        ("list<element: list<element: double>>", [[[1.0]], [[2.0, 3.0]]]),
    ],
)
def test_nested_columns_are_no_categories(
    tmp_path: Path, kind: str, cells: Any
) -> None:
    nested = pa.concat_arrays([pa.array(cells)] * 10)
    table = {"x": np.arange(20) / 4, "nested": nested, "y": ["a", "b", "b", "a"] * 5}
    pq.write_table(pa.table(table), tmp_path / "t.parquet")
    data = rfdlc.load(tmp_path / "t.parquet")
    assert data.encoder is not None
    assert data.encoder.features == ("x",)
    (note,) = [note for note in data.notes if "column 'nested' holds" in note]
    assert "which is no number, text or date" in note
    assert kind.split("<")[0] in note
    with pytest.raises(InputError, match="the target 'nested' holds "):
        rfdlc.load(tmp_path / "t.parquet", target="nested")

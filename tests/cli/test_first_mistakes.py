"""Slips of a first hour: what is said names the place and the cure."""

import warnings

import numpy as np
import pandas as pd
import pytest

import rfdlc
from rfdlc.cli.reading import read_utility
from rfdlc.errors import InputError
from rfdlc.training.config import TrainConfig, parse_pairs


def costs(tmp_path, **cells):
    table = pd.DataFrame(
        {
            "benign": {"benign": 0, "malignant": 25},
            "malignant": {"benign": 1, "malignant": 0},
        },
        dtype=float,
    )
    for name, value in cells.items():
        true, action = name.split("_as_")
        table.loc[true, action] = value
    table.rename_axis("true").to_csv(tmp_path / "costs.csv")
    return str(tmp_path / "costs.csv")


CLASSES = rfdlc.Classes(["benign", "malignant"], [80, 20])


def test_a_wrong_sign_of_one_cost_is_told(tmp_path):
    with warnings.catch_warnings(action="error"):
        read_utility(costs(tmp_path), CLASSES, costs=True)
    with pytest.warns(
        UserWarning,
        match=(
            "taking 'malignant' for 'benign' costs less than being right: is its sign"
        ),
    ):
        read_utility(costs(tmp_path, malignant_as_benign=-25), CLASSES, costs=True)
    with pytest.warns(
        UserWarning,
        match="taking 'benign' for 'malignant' is worth more than being right",
    ):
        read_utility(
            costs(tmp_path, benign_as_benign=0.5, malignant_as_malignant=30), CLASSES
        )


def test_the_misspelt_class_is_named_and_not_the_right_one(tmp_path):
    costs(tmp_path)
    text = tmp_path / "costs.csv"
    text.write_text(text.read_text().replace("malignant", "malingant"))
    with pytest.raises(
        InputError, match="'malingant' is in only one of them; did you mean 'malignant'"
    ):
        read_utility(str(text), CLASSES, costs=True)


def test_short_names_and_second_files(tmp_path, monkeypatch):
    with pytest.raises(
        InputError, match="setting 'lr' is unknown: did you mean 'learning_rate'"
    ):
        TrainConfig.check_names(["lr"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test.csv").write_text("a\n1\n")
    with pytest.raises(
        InputError, match=r"put both into one folder as train\.csv and test\.csv"
    ):
        parse_pairs(["test.csv"])
    with pytest.raises(InputError, match=r"expected key=value, for example epochs=20$"):
        parse_pairs(["other.csv"])
    many = ",".join(["0.001"] * 1000)  # longer than a name of a file may be
    assert parse_pairs([f"trained_prior={many}"]) == {"trained_prior": many}
    (tmp_path / "hospital").mkdir()
    for wrong in ("hopsital", "./hopsital"):
        with pytest.raises(InputError, match="did you mean 'hospital'"):
            rfdlc.load(wrong)
    with pytest.raises(InputError, match="no such file or folder: correct the path"):
        rfdlc.load("nowhere/at/all.csv")  # beside which there is nothing to list


@pytest.fixture
def patients(tmp_path):
    """Two rows per patient, one in each split for some of them; the class is the last
    of many columns.
    """
    rng = np.random.default_rng(0)
    rows = pd.DataFrame({"patient_id": [f"P{i // 2}" for i in range(120)]})
    for number in range(9):
        rows[f"value {number}"] = rng.normal(size=120).round(3)
    rows["diagnosis"] = np.where(rows["value 0"] > 1, "sick", "well")
    rows[:81].to_csv(tmp_path / "train.csv", index=False)
    rows[81:].to_csv(tmp_path / "test.csv", index=False)
    return tmp_path


def test_images_one_level_deeper_are_told(tmp_path):
    from PIL import Image

    for name in ("animals/cat", "animals/dog", "vehicles/car"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("L", (32, 32)).save(tmp_path / name / "0.png")
    told = (
        r"one level deeper than class folders, in animals/cat, animals/dog,"
        r" vehicles/car: give .*/animals for the cl"
    )
    for skip in (False, True):
        with pytest.raises(InputError, match=told):
            rfdlc.load(tmp_path, skip_broken=skip)
    (tmp_path / "empty/cat").mkdir(parents=True)
    with pytest.raises(InputError, match="the class folder holds no image"):
        rfdlc.load(tmp_path / "empty")


def test_texts_that_mean_missing_are_told(tmp_path):
    lines = [f"{i},{('a', 'NA', 'b', '')[i % 4]}" for i in range(12)]
    (tmp_path / "t.csv").write_text("\n".join(["x,target", *lines]))
    with pytest.raises(
        InputError,
        match=(
            r"missing in row 2, 4, .*\('NA' means missing: where it is a class, rename"
            r" it\); r"
        ),
    ):
        rfdlc.load(tmp_path / "t.csv")
    (tmp_path / "t.csv").write_text("\n".join(["x,target", *lines]).replace("NA", ""))
    with pytest.raises(InputError, match=r"\(6 in all\); remove them"):
        rfdlc.load(tmp_path / "t.csv")


def test_thousands_separators_are_told():
    rng = np.random.default_rng(0)
    texts = [
        f"{value:,.2f}".translate(str.maketrans(",.", ".,"))
        for value in rng.uniform(10, 20_000, 3000)
    ]
    frame = pd.DataFrame(
        {"amount": texts, "target": ["a", "b"] * 1500, "x": range(3000)}
    )
    for rows in (
        pd.concat([frame, frame]),
        frame,
        frame[:600],
        frame[:40],
    ):  # repeated, and all different
        with pytest.raises(
            InputError,
            match="look like numbers: write them without thousands separators",
        ):
            rfdlc.load(rows)
    few = pd.DataFrame(
        {"amount": ["1,200", "950", "3,400,000", "12"] * 10, "target": ["a", "b"] * 20}
    )
    with pytest.raises(
        InputError,
        match=r"such as '1,200' that look like numbers.*--drop amount; in Python drop=",
    ):
        rfdlc.load(few)
    with warnings.catch_warnings(action="error"):
        rfdlc.load(
            pd.DataFrame(
                {
                    "host": ["10.0.0.1", "web", "192.168.100.200"] * 10,
                    "target": ["a", "b"] * 15,
                }
            )
        )


MISREAD = {
    "numbers": (
        "21,759.78",
        "21'759.78",
        "21 759.78",
        "21\u00a0759,78",
        "\u20ac217.50",
        "CHF 21'759.78",
        "$1",
        "3,5",
        "(1,026)",
        "\u22120.5",
    ),
    "percentages": ("38.9%", "12 %", "-3,5%", "\u22122%"),
    "dates": (
        "08/11/2020",
        "8/11/20 12:30",
        "2020/11/08",
        "08-11-2020",
        "8-Nov-20",
        "8 November 2020",
        "Nov 8, 2020",
        "Dec-2019",
    ),
}


@pytest.mark.parametrize(
    ("kind", "text"),
    [(kind, text) for kind, texts in MISREAD.items() for text in texts],
)
def test_texts_that_mean_something_else_are_told(kind, text):
    frame = pd.DataFrame(
        {"x": range(40), "bill": [text, ""] * 20, "target": ["a", "b"] * 20}
    )
    with pytest.raises(
        InputError, match=f"'bill' holds texts such as .* that look like {kind}: "
    ):
        rfdlc.load(frame)


@pytest.mark.parametrize(
    ("form", "unit"),
    [("{} kg", "kg"), ("{}mmHg", "mmHg"), ("{} \u00b5g/L", "\u00b5g/L")],
)
def test_numbers_with_a_unit_are_told(form, unit):
    values = np.arange(50) / 10
    frame = pd.DataFrame(
        {
            "x": range(50),
            "dose": [form.format(value) for value in values],
            "target": ["a", "b"] * 25,
        }
    )
    with pytest.raises(
        InputError,
        match=(
            "'dose' holds numbers with a unit, such as '0.0.*': write them without"
            f" '{unit}'"
        ),
    ):
        rfdlc.load(frame)
    with warnings.catch_warnings(
        action="error"
    ):  # few are kinds of something, and so are those of several units
        rfdlc.load(
            frame.assign(dose=[form.format(value) for value in values // 1]),
            test_fraction=0,
        )
        rfdlc.load(
            frame.assign(dose=[f"{k}{'abc'[k % 3]}" for k in range(25)] * 2),
            test_fraction=0,
        )


def test_what_looks_like_something_else_may_be_categories(tmp_path):
    """By option, of a file, and by type, of a data frame or a Parquet file: numbers and
    identifiers, too.
    """
    rows = {
        "share": ["10%", "20%"] * 40,
        "ward": [1, 2, 2, 10] * 20,
        "patient_id": [f"p{k // 2}" for k in range(80)],
        "x": np.random.default_rng(0).normal(size=80),
        "target": ["a", "b", "b", "a"] * 20,
    }
    frame, kinds = pd.DataFrame(rows), ["share", "ward", "patient_id"]
    frame.to_csv(tmp_path / "t.csv", index=False)
    features = rfdlc.load(tmp_path / "t.csv", categories=kinds).encoder.features
    assert {
        "share = 10%",
        "share = 20%",
        "ward = 1",
        "ward = 2",
        "ward = 10",
        "patient_id = p0",
    } <= {*features}
    typed = frame.drop(columns="patient_id").astype(
        {"share": "category", "ward": "category"}
    )
    typed.to_parquet(
        tmp_path / "t.parquet"
    )  # in which the type of numbers is that of pandas' own metadata
    expected = ["share = 10%", "share = 20%", "ward = 1", "ward = 10", "ward = 2", "x"]
    assert [*rfdlc.load(typed).encoder.features] == expected
    assert [*rfdlc.load(tmp_path / "t.parquet").encoder.features] == expected
    X = typed[["ward", "x"]]
    model = rfdlc.RFDLCClassifier(epochs=1, backbone="mlp").fit(X, typed["target"])
    assert [*model.encoder_.features] == ["ward = 1", "ward = 10", "ward = 2", "x"]
    plain = X.astype({"ward": float})  # as a file with missing cells has it
    np.testing.assert_allclose(
        model.predict_proba(plain), model.predict_proba(X), rtol=1e-6
    )
    with pytest.raises(
        InputError, match=r"column 'wards' does not exist: .*did you mean 'ward'"
    ):
        rfdlc.load(tmp_path / "t.csv", categories=["wards"])


def test_what_is_wrong_with_several_columns_is_told_at_once():
    frame = pd.DataFrame(
        {"x": range(40), "share": ["1%", "2%"] * 20, "on": ["1/2/2020", ""] * 20}
    )
    told = (
        r"'share' holds .* percentages: .*; column 'on' holds .* dates:"
        r" .*\(--categories share --categories on; "
    )
    with pytest.raises(
        InputError,
        match=told
        + r".*, or leave the columns out \(--drop share --drop on; in Python drop=",
    ):
        rfdlc.load(frame.assign(target=["a", "b"] * 20))


def test_dates_are_no_classes():
    frame = pd.DataFrame(
        {
            "x": [k / 2 for k in range(60)],
            "day": pd.date_range("2026-01-01", periods=30).astype(str).tolist() * 2,
        }
    )
    with pytest.raises(
        InputError,
        match="the target has 30 different dates: expected classes, not times",
    ):
        rfdlc.load(frame, target="day")
    months = frame.assign(
        day=frame["day"].where(frame["x"] < 12.5, "2026-02-01").str[:7]
    )
    assert rfdlc.load(months, target="day").classes.names == ("2026-01", "2026-02")


def test_numbers_that_may_be_codes_or_missing_are_told():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "ward": rng.integers(1, 9, 200),
            "sex": rng.integers(0, 2, 200),
            "age": rng.integers(0, 100, 200),
        }
    )
    frame["temperature"] = np.where(
        rng.random(200) < 0.1, -9999, rng.normal(60, 5, 200)
    )
    frame["dose"], frame["target"] = (
        rng.integers(0, 3, 200) * 0.5,
        rng.choice(["a", "b"], 200),
    )
    with pytest.warns(
        UserWarning,
        match=(
            "column 'temperature' holds -9999 in [0-9]+ rows, far from all other"
            " numbers"
        ),
    ):
        notes = rfdlc.load(frame).notes
    told = (
        "whole numbers of few kinds are taken for quantities: 'ward'; where they are"
        " codes, --categories ward"
    )
    assert sum(note.startswith(told) for note in notes) == 1
    with warnings.catch_warnings(action="error"):  # 99 is an age
        rfdlc.load(frame.drop(columns="temperature"), test_fraction=0)


def test_columns_that_are_named_at_once_are_told():
    frame = pd.DataFrame(
        {"a": [1, 2] * 20, "b": [1, 2] * 20, "target": ["x", "y"] * 20}
    )
    with pytest.raises(
        InputError,
        match=(
            "'a,b' does not exist: it names several, and drop and categories are"
            " repeated for each"
        ),
    ):
        rfdlc.load(frame, categories=["a,b"])


def test_comments_are_left_out_with_empty_ones_among_them(tmp_path):
    frame = pd.DataFrame(
        {
            "x": [k % 40 for k in range(80)],
            "comment": [f"seen {k}" if k % 5 else "" for k in range(80)],
        }
    )
    frame["target"] = ["a", "b"] * 40
    data = rfdlc.load(frame)
    assert [*data.encoder.features] == ["x"]
    told = (
        "column 'comment' has a different value in every row that has one and was left"
        " out: it names rows and says "
    )
    assert any(
        note.startswith(told) and "--categories comment" in note for note in data.notes
    )
    assert data.train.ids is None
    frame["comment"] = [
        f"ward {k % 3}" if k % 40 == 0 else "" for k in range(80)
    ]  # two different ones are kinds
    assert "comment = ward 0" in rfdlc.load(frame).encoder.features


def test_months_are_dates():
    frame = pd.DataFrame(
        {
            "month": ["2020-03", "2019-12", "2020-04", "2020-03-05"] * 10,
            "target": ["a", "b"] * 20,
        }
    )
    code = rfdlc.load(frame).encoder.columns[0]
    assert code.is_date
    assert code.transform(["2020-03", "2020-03-01"], []).tolist() == [[18322], [18322]]


def test_codes_are_no_dates_or_numbers():
    codes = {
        "part": ["1200-05", "9", "1234-77"],
        "size": ["S", "1 200", "2 100"],
        "ip": ["10.0.0.1", "10.1.2.3", "::1"],
    }
    frame = pd.DataFrame(
        {**{name: own * 12 for name, own in codes.items()}, "target": ["a", "b"] * 18}
    )
    assert len(rfdlc.load(frame).encoder.features) == 9


def test_paths_from_the_current_folder_are_told(tmp_path, monkeypatch):
    from PIL import Image

    (tmp_path / "lists").mkdir()
    (tmp_path / "photos").mkdir()
    for i in range(4):
        Image.new("L", (32, 32), i).save(tmp_path / f"photos/{i}.png")
    (tmp_path / "lists/all.csv").write_text(
        "\n".join(["path,label", *(f"photos/{i}.png,{'ab'[i % 2]}" for i in range(4))])
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        InputError,
        match=(
            rf"the file does not exist: .* that --root {tmp_path}"
            r" names.*lists/photos/0.png"
        ),
    ):
        rfdlc.load("lists/all.csv")
    assert len(rfdlc.load("lists/all.csv", root=tmp_path, test_fraction=0).train) == 4


def test_whole_numbers_are_names_however_they_are_stored():
    p = pd.DataFrame(np.tile(np.eye(3), (20, 1)) * 0.7 + 0.1, columns=[1, 2, 3])
    for kind in (int, float, str):
        assert rfdlc.evaluate(p, np.array([1, 2, 3] * 20, dtype=kind)).accuracy == 1


def test_negative_labels_are_told():
    told = (
        r"label -1 at position 1 is out of range: expected a class number from 0 on,"
        r" less than 1; if it is the name"
    )
    with pytest.raises(InputError, match=told):
        rfdlc.Classes.from_labels([0, -1])


def test_columns_that_may_be_the_class_come_first(patients):
    with pytest.raises(
        InputError,
        match=(
            r"Name it with target \(--target\): diagnosis, patient_id, .* \(11 in all\)"
        ),
    ):
        rfdlc.load(patients)


def test_identifiers_and_groups_in_two_splits_are_told(patients):
    told = (
        "column 'patient_id' is an identifier by its name (60 values in 120 rows) and"
        " was left out"
    )
    with pytest.warns(
        UserWarning, match="use --groups patient_id .*; to keep it as categories, --cat"
    ):
        data = rfdlc.load(patients, target="diagnosis")
    assert any(note.startswith(told) for note in data.notes)
    assert data.encoder is not None
    assert "patient_id" not in {column.name for column in data.encoder.columns}
    notes = rfdlc.load(patients, target="diagnosis", groups="patient_id").notes
    assert (
        "1 groups of the split test are in the training split, too: its scores look"
        " better than they are" in notes
    )
    encoder = rfdlc.load(
        patients, target="diagnosis", categories=["patient_id"]
    ).encoder  # as the warning says
    assert encoder is not None
    assert "patient_id" in {column.name for column in encoder.columns}
    frame = pd.read_csv(patients / "test.csv")[1:]
    frame.to_csv(patients / "test.csv", index=False)
    assert not any(
        "groups" in note
        for note in rfdlc.load(patients, target="diagnosis", groups="patient_id").notes
    )

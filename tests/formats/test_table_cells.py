"""Rows in which every cell is empty, as spreadsheets write them, are skipped by all
readers of tables.
"""

import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow
import pytest
from pyarrow import feather, parquet

import rfdlc
from rfdlc import InputError, Predictions
from rfdlc.formats.tables import open_table, read_columns

ROWS = [f"{i / 4},{'abc'[i % 3]},{('ill', 'well')[i % 2]}" for i in range(24)]


def write(path: Path, rows: list[str], header: str = "x,ward,target") -> Path:
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


@pytest.mark.parametrize(
    ("empty", "cells"),
    [(",,", ","), (";;", ";"), ("\t\t", "\t"), (' ,"", ', ","), ("", ",")],
)
def test_empty_rows_of_a_csv_file_are_skipped(
    tmp_path: Path, empty: str, cells: str
) -> None:
    rows = [row.replace(",", cells) for row in ROWS]
    header = "x,ward,target".replace(",", cells)
    plain = rfdlc.load(write(tmp_path / "plain.csv", rows, header), test_fraction=0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        other = [empty, *rows[:3], empty, *rows[3:], *[empty] * 5]
        found = rfdlc.load(write(tmp_path / "t.csv", other, header), test_fraction=0)
    assert found.train.array.tolist() == plain.train.array.tolist()
    assert found.train.labels.tolist() == plain.train.labels.tolist()
    assert [str(each.message) for each in told] == [
        f"{tmp_path}/t.csv: 7 empty rows skipped, and not counted where messages name"
        " rows"
    ][: bool(empty)]


def test_a_row_with_one_cell_is_not_empty(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the target 'target' is missing in row 25"):
        rfdlc.load(write(tmp_path / "t.csv", [*ROWS, "1,,", ",,"]))


def test_empty_rows_above_the_header_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("\n".join([",,", "", "x,ward,target", *ROWS]))
    assert list(read_columns(tmp_path / "t.csv")) == ["x", "ward", "target"]


def test_empty_rows_of_other_tables_are_skipped(tmp_path: Path) -> None:
    whole = {
        "x": [1.0, None, 2.0],
        "n": [1, None, None],
        "t": ["a", None, ""],
        "e": [[0.5, 1.0], None, [1.0, 2.0]],
    }
    table = pyarrow.table(whole)
    parquet.write_table(table, tmp_path / "t.parquet")
    feather.write_feather(table, tmp_path / "t.arrow")
    for name in ("t.parquet", "t.arrow"):
        with pytest.warns(UserWarning, match=rf"{name}: 1 empty row skipped"):
            assert read_columns(tmp_path / name)["x"].to_pylist() == [1.0, 2.0]
    frame = pd.DataFrame(
        {
            "x": np.arange(24) / 2,
            "s": pd.NaT,
            "t": ["a", "b", "c"] * 8,
            "target": ["u", "v"] * 12,
        }
    )
    empty = pd.DataFrame({name: [None] for name in frame})
    with pytest.warns(UserWarning, match="data frame: 2 empty rows skipped"):
        found = rfdlc.load(pd.concat([empty, frame, empty]), test_fraction=0)
    assert len(found.train) == 24
    assert found.encoder == rfdlc.load(frame, test_fraction=0).encoder
    assert found.encoder.columns[0].flags_missing is False


@pytest.mark.parametrize("mark", [",", ";"])
def test_empty_rows_of_probabilities_are_skipped(tmp_path: Path, mark: str) -> None:
    rows = [
        row.replace(",", mark)
        for row in ("p0,0.75,0.25", ",,", "p1,0.5,0.5", " ,,", ",,")
    ]
    with pytest.warns(UserWarning, match=r"p.csv: 3 empty rows skipped"):
        found = Predictions.load(
            write(tmp_path / "p.csv", rows, f"id{mark}cat{mark}dog")
        )
    assert found.scores.values[0].tolist() == [[0.75, 0.25], [0.5, 0.5]]
    write(
        tmp_path / "p.csv", [*rows, mark.join(["p2", "", "1"])], f"id{mark}cat{mark}dog"
    )
    with pytest.raises(
        InputError, match=r"p.csv line 7, column 'cat': '' is not a number"
    ):
        Predictions.load(tmp_path / "p.csv")


def test_a_missing_value_in_a_single_column_is_kept(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"x": [1.0, None]}), tmp_path / "t.parquet")
    (tmp_path / "t.csv").write_text('x\n1.0\n""\n')
    with warnings.catch_warnings(action="error"):
        assert [
            len(read_columns(tmp_path / name)["x"]) for name in ("t.parquet", "t.csv")
        ] == [2, 2]


def test_a_large_file_warns_once(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.csv", [f"{i},{'x' * 200},a" for i in range(100_000)] + [",,"] * 3
    )
    with pytest.warns(UserWarning, match="3 empty rows skipped") as told:
        assert sum(len(batch) for batch in open_table(path).batches()) == 100_000
    assert len(told) == 1


def test_predictions_have_no_rows_for_empty_ones(tmp_path: Path) -> None:
    from rfdlc.training.train import train

    train(
        write(tmp_path / "t.csv", ROWS),
        out=tmp_path / "r",
        backbone="trees",
        data_options={"test_fraction": 0},
    )
    from rfdlc.predicting.predict import predict

    new = write(
        tmp_path / "new.csv",
        [*(row.rsplit(",", 1)[0] for row in ROWS[:4]), ",", ","],
        "x,ward",
    )
    with pytest.warns(UserWarning, match="2 empty rows skipped"):
        done = predict(tmp_path / "r", new, tmp_path / "o.csv")
    assert done.samples == len(pd.read_csv(tmp_path / "o.csv")) == 4
    assert done.actions.keys() == {"ill", "well"}

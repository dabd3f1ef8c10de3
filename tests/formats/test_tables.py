"""One reader of tables for data sets and predictions: CSV, Parquet files and folders,
Arrow.
"""

from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import feather, parquet

import rfdlc
from rfdlc import InputError, Predictions
from rfdlc.formats.table_writing import write_table
from rfdlc.formats.tables import (
    delimiter_of,
    is_number,
    number,
    open_table,
    read_columns,
)

P = np.array([[0.75, 0.25], [0.5, 0.5], [0.125, 0.875]])


def scores(rows: slice = slice(None)) -> pyarrow.Table:
    names = np.array(["p0", "p1", "p2"])
    return pyarrow.table({"id": names[rows], "cat": P[rows, 0], "dog": P[rows, 1]})


def test_a_folder_of_parquet_files_is_one_table(tmp_path: Path) -> None:
    for i in range(3):
        parquet.write_table(scores(slice(i, i + 1)), tmp_path / f"part-{i}.parquet")
    (tmp_path / "_SUCCESS").touch()
    loaded = Predictions.load(tmp_path)
    assert loaded.scores.values[0].tolist() == P.tolist()
    assert loaded.ids is not None
    assert loaded.ids.tolist() == ["p0", "p1", "p2"]


def test_a_folder_of_parquet_files_is_a_data_set(tmp_path: Path) -> None:
    for kind in ("train", "test"):
        (tmp_path / f"split={kind}").mkdir()
        rows = {"size": [1.5, 2.5, 3.5, 4.5], "label": ["a", "b", "a", "b"]}
        parquet.write_table(
            pyarrow.table(rows), tmp_path / f"split={kind}" / "0.parquet"
        )
    data = rfdlc.load(tmp_path)
    assert {split: len(part) for split, part in data.splits.items()} == {
        "train": 4,
        "test": 4,
    }
    assert data.train.array.tolist() == [[1.5], [2.5], [3.5], [4.5]]


def test_arrow_files(tmp_path: Path) -> None:
    for name in ("p.feather", "p.arrow"):
        feather.write_feather(scores(), tmp_path / name)
    for name in ("p.feather", "p.arrow"):
        assert Predictions.load(tmp_path / name).scores.values[0].tolist() == P.tolist()
    (tmp_path / "p.arrow").write_bytes(b"nonsense")
    with pytest.raises(InputError, match=r"p.arrow: cannot be read as Arrow"):
        Predictions.load(tmp_path / "p.arrow")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_what_is_written_is_read(tmp_path: Path, suffix: str) -> None:
    columns = {"a, b": ['x "y"', "z\nz"], "n": [0.1, 1 / 3]}
    write_table(tmp_path / f"t.{suffix}", columns)
    found = read_columns(tmp_path / f"t.{suffix}")
    assert found["a, b"].to_pylist() == columns["a, b"]
    assert [float(cell) for cell in found["n"].to_pylist()] == columns["n"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'cat,dog\n1,0\n1,"0\n0,1\n',
            (
                r"p.csv line \d: 1 cells|p.csv: cannot be read as CSV in UTF-8"
                r" \(unexpected end"
            ),
        ),
        ("cat;dog\n0,5;half\n", "p.csv line 2, column 'dog': 'half' is not a number"),
        ("cat,dog\n1_0,0\n", "p.csv line 2, column 'cat': '1_0' is not a number"),
        (
            'cat,dog\n"1\n",0\n\n0,x\n',
            "p.csv line 5, column 'dog': 'x' is not a number",
        ),
        ("cat,dog", "p.csv: has column names but no rows"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "p.csv").write_text(text)
    with pytest.raises(InputError, match=message):
        Predictions.load(tmp_path / "p.csv")


def test_a_quote_that_is_never_closed(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('x,label\n1,a\n2,"b\n3,a\n4,b\n')
    with pytest.raises(InputError, match="unexpected end of data"):
        rfdlc.load(tmp_path / "t.csv")
    (tmp_path / "t.csv").write_text('x,label\n1,a\n2,"b\n3,a"\n')
    assert read_columns(tmp_path / "t.csv")["label"].to_pylist() == ["a", "b\n3,a"]


@pytest.mark.parametrize("line", ["0,5;0,5;x, y", "0.5;0.5;x, y", " 0.5;0,5 ;x, y"])
def test_semicolons_with_either_decimal_sign(tmp_path: Path, line: str) -> None:
    (tmp_path / "p.csv").write_text("\n".join(["cat;dog;id", *["1;0;none"] * 50, line]))
    loaded = Predictions.load(tmp_path / "p.csv")
    assert loaded.scores.values[0, [0, -1]].tolist() == [[1, 0], [0.5, 0.5]]
    assert loaded.ids is not None
    assert loaded.ids[-1] == "x, y"


def test_the_header_comes_after_blank_lines_and_may_span_two(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(
        b'\xef\xbb\xbf\n\n"size\nin mm", label \r\n1,a\r\n\r\n2,b\r\n'
    )
    file = open_table(tmp_path / "t.csv")
    assert file.names == ["size\nin mm", "label"]
    assert [batch.to_pydict() for batch in file.batches()] == [
        {"size\nin mm": ["1", "2"], "label": ["a", "b"]}
    ]


def test_a_header_that_cannot_be_parsed_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a" * 200_000 + ",label\n1,a\n")
    with pytest.raises(
        InputError,
        match=r"t.csv: cannot be read as CSV in UTF-8 \(field larger than field limit",
    ):
        open_table(tmp_path / "t.csv")


def test_a_table_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        InputError, match=r"t.csv: cannot be written \(Not a directory\)"
    ):
        write_table(tmp_path / "file" / "t.csv", {"a": [1]})


@pytest.mark.parametrize(
    ("lines", "delimiter"),
    [
        (["a;b", "0,5;0,5"], ";"),
        (["true,a;x;y", "a;x;y,1"], ","),
        (["a, b\ttarget", "0.5\ta, b", "0.5\tc"], "\t"),
        ([], ","),
    ],
)
def test_delimiters(lines: list[str], delimiter: str) -> None:
    assert delimiter_of(lines) == delimiter


def test_numbers() -> None:
    assert number("0,5", ",") == 0.5
    assert [is_number(cell) for cell in ("1e3", "1_2", "a", "")] == [
        True,
        False,
        False,
        False,
    ]


def test_a_cell_that_is_too_long_for_the_search_of_a_header(tmp_path: Path) -> None:
    rows = ["a,b", *(f"{i},x" for i in range(50)), f"1,{'y' * 200_000}", "2,z"]
    (tmp_path / "t.csv").write_text("\n".join(rows))
    for of_samples in (False, True):
        assert len(read_columns(tmp_path / "t.csv", of_samples=of_samples)["a"]) == 52


def test_a_table_whose_rows_are_all_empty_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("id,a,b\n,,\n,,\n")
    with (
        pytest.warns(UserWarning, match="2 empty rows skipped"),
        pytest.raises(InputError, match=r"e\.csv: has column names but no rows"),
    ):
        Predictions.load(tmp_path / "e.csv")


def test_text_in_utf_16_without_a_mark_is_told(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_bytes("cat,dog\n1,0\n".encode("utf-16-le"))
    with pytest.raises(InputError, match=r"p\.csv: holds NUL characters, as text in U"):
        Predictions.load(tmp_path / "p.csv")


@pytest.mark.parametrize("line", ["age,sex,label", ' age, sex ,"label"'])
def test_a_header_in_the_middle_is_named(tmp_path: Path, line: str) -> None:
    rows = [f"{i / 7},m,{'ab'[i % 2]}" for i in range(40)]
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["age,sex,label", *rows[:20], "", line, *rows[20:]]))
    told = r"t\.csv line 23: repeats the first line, the names of the columns"
    with pytest.raises(InputError, match=told):
        rfdlc.load(path)
    path.write_text("\n".join(["label", "a", "label", "b"]))  # may be a word of a list
    assert read_columns(path)["label"].to_pylist() == ["a", "label", "b"]
    path.write_text("\n".join(["a,b", "1,0", "a,b", "0,1"]))  # columns of numbers
    with pytest.raises(InputError, match=r"t\.csv line 3: repeats the first line"):
        Predictions.load(path)

"""A folder with a table for each split (train.csv, test.csv) is one table with splits,
wherever data are read.
"""

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import rfdlc
from rfdlc.errors import InputError
from rfdlc.formats.tables import open_table, split_files
from rfdlc.progress import shown


def rows(count, seed):
    rng = np.random.default_rng(seed)
    labels = np.where(np.arange(count) % 5 == 0, "rare", "common")
    return pd.DataFrame(
        {
            "age": rng.normal(50 + 20 * (labels == "rare"), 5).round(2),
            "ward": "A",
            "label": labels,
        }
    )


@pytest.fixture
def folder(tmp_path):
    rows(60, 0).to_csv(tmp_path / "train.csv", index=False)
    rows(20, 1)[["label", "ward", "age"]].assign(more=1).to_csv(
        tmp_path / "Test.csv", index=False
    )  # in another order
    (tmp_path / "notes.md").write_text("not a table")
    rows(7, 2).to_csv(tmp_path / "old.csv", index=False)  # of no split
    return tmp_path


@pytest.mark.parametrize("validation", ["", "valid", "dev"])
def test_every_table_is_a_split(folder, validation):
    if validation:
        rows(30, 3).to_csv(folder / f"{validation}.csv", index=False)
    data = rfdlc.load(folder)
    expected = {"train": 60, "test": 20} | ({"val": 30} if validation else {})
    assert {name: len(split) for name, split in data.splits.items()} == expected
    np.testing.assert_allclose(data.test.array[:, 0], rows(20, 1)["age"], rtol=1e-6)
    assert data.classes.counts == (48, 12)
    assert "more" not in data.encoder.features


def test_parquet_files_of_other_types(tmp_path):
    rows(60, 0).assign(age=lambda table: table["age"].round().astype(float)).to_parquet(
        tmp_path / "train.parquet"
    )
    rows(20, 1).assign(age=lambda table: table["age"].round().astype(int)).to_parquet(
        tmp_path / "test.parquet"
    )
    data = rfdlc.load(tmp_path)
    assert (len(data.train), len(data.test)) == (60, 20)  # and not 80 rows to train on
    rows(20, 1).assign(age="old").to_parquet(tmp_path / "test.parquet")
    with pytest.raises(
        InputError,
        match=r"test\.parquet: cannot be read as a table like train\.parquet",
    ):
        rfdlc.load(tmp_path)


def test_a_run_predicts_the_split_that_is_asked_for_or_the_last(
    folder, tmp_path, capsys
):
    model = rfdlc.train(folder, "rf-dlc", tmp_path / "run", backbone="mlp", epochs=2)
    predicted = rfdlc.predict(
        tmp_path / "run", folder, out=tmp_path / "p.csv", split="test"
    )
    assert predicted.samples == 20
    with shown():
        assert (
            rfdlc.predict(tmp_path / "run", folder, out=tmp_path / "q.csv").samples
            == 20
        )
    assert "using the split 'test' of train, test" in capsys.readouterr().err
    again = model.predict(pd.read_csv(folder / "Test.csv")).scores.values
    np.testing.assert_allclose(
        again, model.predict(rfdlc.load(folder).test).scores.values, atol=1e-5
    )


def test_what_does_not_fit_is_named(folder):
    (folder / "Test.csv").unlink()
    pd.DataFrame({"age": [1.0], "ward": ["A"]}).to_csv(folder / "test.csv", index=False)
    with pytest.raises(
        InputError,
        match=(
            r"test\.csv lacks the columns label that train\.csv has: .* `rfdlc predict`"
            r" them"
        ),
    ):
        rfdlc.load(folder)
    rows(20, 1).assign(Split="train").to_csv(folder / "train.csv", index=False)
    rows(20, 1).assign(Split="test").to_csv(folder / "test.csv", index=False)
    with pytest.raises(
        InputError, match=r"has a column 'split', but .* has a table for each"
    ):
        open_table(folder, of_samples=True)


def test_two_tables_of_one_split_are_refused(folder):
    rows(9, 4).to_parquet(folder / "training.parquet")
    with pytest.raises(
        InputError,
        match=r"has two tables of the split train: remove one, or name that to read",
    ):
        rfdlc.load(folder)
    assert len(rfdlc.load(folder / "train.csv").train) > 9


def test_image_folders_are_not_searched_for_tables(tmp_path, monkeypatch):
    for split in ("train", "test"):
        for kind in ("ant", "bee"):
            (tmp_path / split / kind).mkdir(parents=True)
            for number in range(3):
                Image.new("RGB", (8, 8), (40 * number, 90, 9)).save(
                    tmp_path / split / kind / f"{number}.png"
                )
    asked = []
    monkeypatch.setattr(
        "rfdlc.data.readers.image_folder.is_table", lambda path: asked.append(path)
    )
    assert len(rfdlc.load(tmp_path).train) == 6
    assert not asked


def test_folders_of_other_things_stay_what_they_are(folder):
    (folder / "runs/first").mkdir(parents=True)
    assert list(split_files(folder)) == ["train", "test"]
    (folder / "ant").mkdir()
    (folder / "ant/1.png").write_bytes(b"")
    assert not split_files(folder)
    (folder / "ant/1.png").unlink()
    (folder / "ant").rmdir()
    (folder / "train.csv").unlink()
    assert not split_files(folder)  # nothing to train on
    for path in ("runs/first", "runs"):
        (folder / path).rmdir()
    with pytest.raises(
        InputError,
        match=(
            r"has no class folders with images.*; for a table, name it: .*/Test\.csv,"
            r" old\.csv"
        ),
    ):
        rfdlc.load(folder)

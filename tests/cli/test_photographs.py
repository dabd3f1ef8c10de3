"""Photographs of camera traps: a table with the columns file, species, site and date,
from training to evaluation.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pyarrow import parquet

import rfdlc
from rfdlc.errors import InputError

SPECIES = ("deer", "fox", "owl")
EMBED = (
    "--backbone",
    "tests.predicting.encoders:corners",
    "--image-size",
    "8",
    "--device",
    "cpu",
)


def write_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """60 photographs of 3 species at 10 sites, one per day."""
    root, rng, found = tmp_path_factory.mktemp("traps"), np.random.default_rng(0), []
    (root / "photos").mkdir()
    for i in range(60):
        pixels = (
            rng.integers(0, 90, (12, 12, 3), dtype=np.uint8)
            + 120 * np.eye(3, dtype=np.uint8)[i % 3]
        )
        Image.fromarray(pixels).save(root / "photos" / f"{i:02}.png")
        day = f"2024-{1 + i // 28:02}-{1 + i % 28:02}"
        found.append(
            {
                "file": f"photos/{i:02}.png",
                "species": SPECIES[i % 3],
                "site": f"s{i % 10}",
                "date": day,
            }
        )
    return root, found


@pytest.fixture
def traps(rows):
    return write_rows(rows[0] / "obs.csv", rows[1])


def emptied(rows, name: str, **cells: dict[int, str]) -> Path:
    """The table with other cells: `species={3: ""}`."""
    root, found = rows
    changed = [dict(row) for row in found]
    for column, values in cells.items():
        for row, value in values.items():
            changed[row][column] = value
    return write_rows(root / name, changed)


# -- groups
@pytest.mark.parametrize("suffix", ["parquet", "npz"])
def test_embed_keeps_groups_and_train_keeps_them_together(run, traps, tmp_path, suffix):
    out = tmp_path / f"features.{suffix}"
    code, said, _ = run(
        "embed", traps, "--target", "species", "--groups", "site", "--out", out, *EMBED
    )
    assert code == 0
    assert f"next: rfdlc train {out} --out runs/features" in said
    data = rfdlc.load(out)
    sites = [set(split.groups.tolist()) for split in data.splits.values()]
    assert len(data.splits) == 2
    assert not sites[0] & sites[1]
    assert sites[0] | sites[1] == {f"s{i}" for i in range(10)}
    told = "column 'group' says which samples belong together"
    assert (told in data.notes) == (suffix == "parquet")


def test_embed_keeps_groups_with_splits_and_from_a_file(run, rows, traps, tmp_path):
    root, found = rows
    split = write_rows(
        root / "split.csv",
        [{**row, "split": "test" if row["site"] == "s9" else "train"} for row in found],
    )
    out = tmp_path / "a.parquet"
    assert (
        run(
            "embed",
            split,
            "--target",
            "species",
            "--groups",
            "site",
            "--out",
            out,
            *EMBED,
        )[0]
        == 0
    )
    table = parquet.read_table(out).to_pydict()
    assert {
        (site, part)
        for site, part in zip(table["group"], table["split"], strict=True)
        if part == "test"
    } == {("s9", "test")}
    folder = tmp_path / "folder"
    for row in found[:12]:
        (folder / row["species"]).mkdir(parents=True, exist_ok=True)
        name = f"{row['species']}/{Path(row['file']).name}"
        (folder / name).write_bytes((root / row["file"]).read_bytes())
    groups = [
        {"id": f"{row['species']}/{Path(row['file']).name}", "site": row["site"]}
        for row in found[:12]
    ]
    file, out = write_rows(tmp_path / "sites.csv", groups), tmp_path / "b.parquet"
    assert run("embed", folder, "--groups", file, "--out", out, *EMBED)[0] == 0
    table = parquet.read_table(out).to_pydict()
    assert dict(zip(table["id"], table["group"], strict=True)) == {
        row["id"]: row["site"] for row in groups
    }
    write_rows(file, groups[1:])
    code, _, said = run(
        "embed", folder, "--groups", file, "--out", tmp_path / "c.parquet", *EMBED
    )
    assert code == 2
    assert "1 of 12 train samples have no group, the first is 'deer/00.png'" in said


def test_embed_names_a_column_of_groups_that_is_not_there(run, traps, tmp_path):
    code, _, said = run(
        "embed",
        traps,
        "--target",
        "species",
        "--groups",
        "sites",
        "--out",
        tmp_path / "a.npz",
        *EMBED,
    )
    assert code == 2
    assert "did you mean 'site'?" in said


# -- labels that are missing
@pytest.mark.parametrize("column", ["species", "site"])
def test_embed_says_which_rows_lack_a_label_or_group(run, rows, tmp_path, column):
    table, out = (
        emptied(rows, "holes.csv", **{column: {2: "", 40: ""}}),
        tmp_path / "features.parquet",
    )
    words = (
        "embed",
        table,
        "--target",
        "species",
        "--groups",
        "site",
        "--out",
        out,
        *EMBED,
    )
    code, _, said = run(*words)
    what = {"species": "label", "site": "group"}[column]
    assert code == 2
    assert (
        f"2 of 60 images lack something: photos/02.png has no {what}, photos/40.png has"
        f" no {what}" in said
    )
    assert "--skip-broken" in said
    assert not out.exists()
    code, said, _ = run(*words, "--skip-broken")
    assert code == 0
    assert "2 broken samples left out" in said
    found = parquet.read_table(out).to_pydict()
    assert len(found["target"]) == 58
    assert None not in found["target"] + found["group"]
    assert not {"photos/02.png", "photos/40.png"} & {*found["id"]}
    assert out.with_name("features.parquet.skipped.txt").read_text().splitlines() == [
        f"photos/{i}.png has no {what}" for i in ("02", "40")
    ]


@pytest.fixture(scope="module")
def model(rows):
    root, _ = rows
    features = rfdlc.embed(
        write_rows(root / "all.csv", rows[1]),
        root / "all.parquet",
        target="species",
        image_size=8,
        backbone="tests.predicting.encoders:corners",
        device="cpu",
    )
    return rfdlc.train(features.path, "ce", root / "run", epochs=2, device="cpu").path


@pytest.mark.parametrize("suffix", ["csv", "npz"])
def test_predict_says_why_there_is_no_target(run, rows, model, tmp_path, suffix):
    table = emptied(rows, "unknown.csv", species={2: "", 8: "okapi"})
    table.write_text(table.read_text().replace("species", "target"))
    out = tmp_path / f"p.{suffix}"
    code, _, said = run("predict", model, table, "--out", out)
    assert code == 0
    told = (
        "2 of 60 rows have no or unknown labels (row 3: '', row 9: 'okapi'): in a table"
        " their target is empty"
    )
    assert said.count(told) == 1
    assert rfdlc.Predictions.load(out).targets is None
    if suffix == "csv":  # the other labels are there
        scored = rfdlc.Predictions.load(out, skip_unknown=True)
        expected = [
            row["species"] for place, row in enumerate(rows[1]) if place not in (2, 8)
        ]
        assert [scored.classes.names[label] for label in scored.targets] == expected
        code, _, said = run("evaluate", out)
        assert (code, "--skip-unknown" in said) == (2, True)
        assert run("evaluate", out, "--skip-unknown")[0] == 0


def test_predict_says_that_numbers_are_not_names(model, tmp_path):
    np.savez(tmp_path / "new.npz", x=np.zeros((4, 6), np.float32), y=[0, 1, 2, 0])
    with pytest.warns(
        UserWarning,
        match=(
            r"4 of 4 rows have no or unknown labels \(row 1: '0', row 2: '1',"
            r" .*\.\.\.\)"
        ),
    ):
        assert rfdlc.Model.load(model).predict(tmp_path / "new.npz").targets is None


def test_predict_is_silent_where_no_row_has_a_label(run, rows, model, tmp_path):
    table = emptied(rows, "new.csv", species=dict.fromkeys(range(60), ""))
    table.write_text(table.read_text().replace("species", "target"))
    code, _, said = run("predict", model, table, "--out", tmp_path / "p.csv")
    assert code == 0
    assert "labels" not in said


# -- time
def test_the_newest_photographs_are_the_test_split(run, rows, traps, tmp_path):
    data = rfdlc.load(traps, target="species", time="date")
    found = {name: list(split.ids) for name, split in data.splits.items()}
    names = [row["file"] for row in rows[1]]
    assert found == {"train": names[:38], "val": names[38:48], "test": names[48:]}
    assert (
        "by 'date', 38 old rows train, 10 calibrate, the newest 12 test; it is not a"
        " feature" in data.notes
    )
    words = (
        "train",
        traps,
        "--target",
        "species",
        "--time",
        "date",
        "--out",
        tmp_path / "run",
        "--method",
        "ce",
    )
    assert run(*words, "epochs=1", "backbone=resnet8", "tune=off", "--json")[0] == 0
    tested = rfdlc.Predictions.load(tmp_path / "run")
    assert tested.ids is not None
    assert tested.ids.tolist() == names[48:]


def test_without_time_photographs_are_drawn_and_stay_so(traps):
    data = rfdlc.load(traps, target="species", groups="site")
    assert [*data.splits] == ["train", "test"]
    assert not set(data.train.groups) & set(data.test.groups)
    assert [*rfdlc.load(traps, target="species", test_fraction=0).splits] == ["train"]


def test_time_and_a_split_exclude_each_other(rows):
    root, found = rows
    table = write_rows(root / "both.csv", [{**row, "split": "train"} for row in found])
    with pytest.raises(
        InputError, match="time 'date' and split 'split' both divide the rows"
    ):
        rfdlc.load(table, target="species", time="date")


# -- messages
def test_a_folder_that_holds_a_run_is_refused_before_data_are_read(
    run, traps, model, monkeypatch
):
    monkeypatch.setattr(
        "rfdlc.training.train.load_for", lambda *_: pytest.fail("data were read")
    )
    code, _, said = run("train", traps, "--target", "species", "--out", model)
    assert code == 2
    assert "holds a run already: continue it with `rfdlc resume" in said


def test_predict_says_where_the_test_split_of_a_run_is(run, rows, model):
    code, _, said = run("predict", model, rows[0] / "all.parquet", "--split", "test")
    assert code == 2
    assert (
        f"the run held its test split out itself, and {model}/predictions.npz has the"
        " predictions of it" in said
    )
    assert f"`rfdlc evaluate {model}`" in said
    assert run("evaluate", model)[0] == 0
    assert run("decide", model)[0] == 0
    said = run(
        "predict", model, write_rows(rows[0] / "other.csv", rows[1]), "--split", "test"
    )[2]
    assert "has no split 'test'" in said
    assert "held" not in said


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        ({"species": {4: ""}}, "the label is missing"),
        ({"site": {4: ""}}, "the group is missing"),
        (
            {"file": {4: ""}, "species": {4: ""}},
            "the path is missing and the label is missing",
        ),
    ],
)
def test_a_row_that_is_not_complete_says_what_is_missing(rows, cells, told):
    with pytest.raises(InputError, match=f"line 6: {told}"):
        rfdlc.load(
            emptied(rows, "incomplete.csv", **cells), target="species", groups="site"
        )


# -- evaluation
@pytest.fixture
def predicted(run, rows, traps, model, tmp_path):
    """Predictions without labels, and without folders in front of the names."""
    assert run("predict", model, traps, "--out", tmp_path / "p.csv")[0] == 0
    return tmp_path / "p.csv"


@pytest.mark.parametrize(
    "name", ["file", "File", "filename", "file_name", "filepath", "image_path"]
)
def test_labels_are_found_by_the_path_column_that_train_knows(
    run, rows, predicted, tmp_path, name
):
    table = write_rows(
        tmp_path / "labels.csv", [{"site": row["site"], **row} for row in rows[1]]
    )
    table.write_text(table.read_text().replace("file", name, 1))
    code, said, told = run(
        "evaluate", predicted, "--labels", table, "--target", "species", "--json"
    )
    assert code == 0
    assert json.loads(said)["samples"] == 60
    assert "was taken for them" not in told


def test_labels_that_are_empty_are_named(run, rows, predicted):
    table = emptied(rows, "labels.csv", species={2: "", 40: ""})
    code, _, said = run("evaluate", predicted, "--labels", table, "--target", "species")
    assert code == 2
    assert (
        "2 of 60 samples have no label, first in the row of photos/02.png; leave them"
        " out with" in said
    )
    assert "--skip-unknown" in said


def test_a_run_folder_tells_its_classes(run, traps, predicted, model, tmp_path):
    words = ("evaluate", predicted, "--labels", traps, "--target", "species")
    said = run(*words)[1]
    assert "--classes RUN (a run folder) or counts.csv" in " ".join(said.split())
    code, said, _ = run(*words, "--classes", model, "--json")
    assert code == 0
    assert json.loads(said)["accuracy_by_region"]
    assert (
        run(
            "utility",
            "new",
            tmp_path / "U.csv",
            "--classes",
            model,
            "--kind",
            "tail-sensitive",
        )[0]
        == 0
    )
    assert rfdlc.Utility.read_csv(tmp_path / "U.csv").classes.names == SPECIES


def test_a_prior_of_names_with_commas_is_a_table(run, predicted):
    code, _, said = run(
        "decide", predicted, "--target-prior", "Ibis, sacred=0.5,owl=0.5"
    )
    assert code == 2
    assert "'Ibis' has no share" in said
    assert "a CSV file with the columns class and share (or count)" in said


def test_a_model_predicts_a_list_of_paths(rows, model):
    root, found = rows
    loaded = rfdlc.Model.load(model)
    paths = [str(root / row["file"]) for row in found[:3]]
    predictions = loaded.predict(paths)
    np.testing.assert_array_equal(
        predictions.scores.values, loaded.predict(tuple(map(Path, paths))).scores.values
    )
    np.testing.assert_array_equal(
        predictions.scores.values[:, :1], loaded.predict(paths[0]).scores.values
    )
    with pytest.raises(InputError, match=r"none\.png: not an existing image file"):
        loaded.predict([paths[0], "none.png"])

"""Data as people have them: embeddings in Parquet, tables without a header, tables of
images, links, groups.
"""

import shutil
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import csv, parquet

import rfdlc
from rfdlc.data.opening import holds_features, open_samples
from rfdlc.data.samples import InputSpec
from rfdlc.data.splits import open_splits
from rfdlc.errors import InputError
from rfdlc.formats.tables import read_columns

RNG = np.random.default_rng(0)


# -- Parquet columns of lists
@pytest.mark.parametrize(
    "kind", [pyarrow.list_(pyarrow.float32()), pyarrow.list_(pyarrow.float32(), 3)]
)
def test_a_column_of_lists_is_one_feature_per_item(
    tmp_path: Path, kind: pyarrow.DataType
) -> None:
    vectors = RNG.normal(size=(20, 3)).astype(np.float32)
    columns = {
        "embedding": pyarrow.array(vectors.tolist(), kind),
        "age": np.arange(20.0),
        "label": ["a", "b"] * 10,
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    data = rfdlc.load(tmp_path / "t.parquet", test_fraction=0)
    assert data.encoder is not None
    assert data.encoder.features == (
        "embedding[0]",
        "embedding[1]",
        "embedding[2]",
        "age",
    )
    np.testing.assert_array_equal(data.train.array[:, :3], vectors)
    spec = InputSpec(data.classes, (4,), data.encoder)
    found = open_samples(tmp_path / "t.parquet", spec).read(range(5, 9)).split
    np.testing.assert_array_equal(found.array[:, :3], vectors[5:9])


@pytest.mark.parametrize("cells", [[[1.0, 2.0], [3.0]], [[1.0], [2.0, 3.0]]])
def test_lists_of_different_lengths_are_refused(tmp_path: Path, cells: list) -> None:
    parquet.write_table(
        pyarrow.table({"v": cells, "label": ["a", "b"]}), tmp_path / "t.parquet"
    )
    with pytest.raises(
        InputError, match=r"t.parquet: column 'v' holds lists of different lengths"
    ):
        rfdlc.load(tmp_path / "t.parquet", test_fraction=0)


@pytest.mark.parametrize(
    "kind", [pyarrow.list_(pyarrow.float32()), pyarrow.list_(pyarrow.float32(), 2)]
)
@pytest.mark.parametrize("missing", [0, 1, 3])
def test_a_missing_list_is_missing_numbers(
    tmp_path: Path, missing: int, kind: pyarrow.DataType
) -> None:
    vectors: list = [[1.0, 2.0], [3.0, 6.0], [5.0, 4.0]]
    vectors.insert(missing, None)
    columns = {"v": pyarrow.array(vectors, kind), "label": ["a", "b", "a", "b"]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    found = rfdlc.load(tmp_path / "t.parquet", test_fraction=0).train.array
    np.testing.assert_array_equal(found[missing], [3, 1, 4, 1])  # medians, marked
    np.testing.assert_array_equal(
        np.delete(found, missing, 0)[:, ::2], [[1, 2], [3, 6], [5, 4]]
    )


def test_lists_of_texts_stay_as_they_are(tmp_path: Path) -> None:
    parquet.write_table(
        pyarrow.table({"words": [["a"], ["b", "c"]]}), tmp_path / "t.parquet"
    )
    assert read_columns(tmp_path / "t.parquet")["words"].to_pylist() == [
        ["a"],
        ["b", "c"],
    ]


# -- tables without a header
def test_a_first_line_of_numbers_is_a_row(tmp_path: Path) -> None:
    rows = [
        f"{a:.1f},{a:.1f},{'Iris-setosa' if a < 5 else 'Iris-virginica'}"
        for a in np.linspace(4, 6, 12)
    ]
    (tmp_path / "iris.csv").write_text("\n".join(rows))
    with pytest.raises(
        InputError, match=r"which column is the class.*: column 3, column 1, column 2"
    ):
        rfdlc.load(tmp_path / "iris.csv")
    data = rfdlc.load(tmp_path / "iris.csv", target="column 3", test_fraction=0)
    assert len(data.train) == 12
    assert any(
        "the first line holds values and was read as a row" in note
        for note in data.notes
    )
    np.testing.assert_allclose(data.train.array[0], [4, 4])
    spec = InputSpec(data.classes, (2,), data.encoder, target="column 3")
    samples = open_samples(tmp_path / "iris.csv", spec)
    assert len(samples) == 12
    assert samples.labelled


@pytest.mark.parametrize("header", ["0,1,2", "1990,1995,2005", "x,1990,label"])
def test_names_that_are_numbers_stay_names(tmp_path: Path, header: str) -> None:
    (tmp_path / "t.csv").write_text(
        f"{header}\n" + "\n".join(f"{i},{i % 3},{'ab'[i % 2]}" for i in range(10))
    )
    assert (
        len(
            rfdlc.load(
                tmp_path / "t.csv", target=header.split(",")[2], test_fraction=0
            ).train
        )
        == 10
    )


@pytest.mark.parametrize(
    "first",
    ["1,2,3,x,red", "p,x,s,n,red", "4.5,x,s,n,red"],
    ids=["growing whole numbers", "texts", "texts and a number"],
)
def test_texts_that_occur_again_are_values(tmp_path: Path, first: str) -> None:
    a, b, c, d, _ = first.split(",")
    rows = [first]
    for i in range(30):
        colour = "red" if i % 3 else "blue"
        cells = [a, b, c] if i % 2 == 0 else [i, i, i]
        rows.append(",".join(map(str, [*cells, d, colour])))
    (tmp_path / "t.csv").write_text("\n".join(rows))
    data = rfdlc.load(tmp_path / "t.csv", target="column 5", test_fraction=0)
    assert len(data.train) == 31
    assert data.classes.names == ("blue", "red")
    header = "size,shape,surface,odour,colour"
    (tmp_path / "t.csv").write_text("\n".join([header, *rows]))
    assert (
        len(rfdlc.load(tmp_path / "t.csv", target="colour", test_fraction=0).train)
        == 31
    )
    assert (
        next(iter(read_columns(tmp_path / "t.csv"))) == "size"
    )  # only rows of samples may have no header


# -- tables of images
@pytest.fixture
def photos(tmp_path: Path) -> Path:
    rows = ["path,label,patient,split,age"]
    for i in range(12):
        suffix = ("png", "ppm", "jpg")[i % 3]
        place = tmp_path / "images" / f"{i}.{suffix}"
        place.parent.mkdir(exist_ok=True)
        Image.new("RGB", (16, 16), (200 if i % 2 else 20, 10 * i, 0)).save(place)
        label = "red" if i % 2 else "dark"
        part = "test" if i > 8 else "train"
        rows.append(f"images/{place.name},{label},p{i // 2},{part},30")
    (tmp_path / "photos.csv").write_text("\n".join(rows))
    return tmp_path / "photos.csv"


def test_a_table_of_images(photos: Path) -> None:
    data = rfdlc.load(photos, groups="patient")
    assert data.classes.names == ("dark", "red")
    assert {name: len(split) for name, split in data.splits.items()} == {
        "train": 9,
        "test": 3,
    }
    assert data.input_shape == (3, 16, 16)
    assert list(data.train.ids or ())[:2] == ["images/0.png", "images/1.ppm"]
    assert data.train.groups is not None
    assert data.train.groups.tolist() == [f"p{i // 2}" for i in range(9)]
    assert data.train.labels.tolist() == [i % 2 for i in range(9)]
    held = data.hold_out(0.3)
    assert held.val is not None
    assert not set(held.train.groups) & set(held.val.groups)  # type: ignore[arg-type]
    spec = InputSpec(data.classes, data.input_shape)
    samples = open_samples(photos, spec, split="test")
    assert samples.labelled
    assert len(samples) == 3
    np.testing.assert_array_equal(samples.read(range(3)).split.array, data.test.array)  # type: ignore[union-attr]


def test_the_column_of_images_may_have_any_name(photos: Path) -> None:
    photos.write_text(photos.read_text().replace("path,", "Bild,", 1))
    data = rfdlc.load(photos)
    assert data.kind == "images"
    assert list(data.train.ids or ())[:2] == ["images/0.png", "images/1.ppm"]
    away = (
        photos.parent / "elsewhere" / "photos.csv"
    )  # the files are not there: names like these may be a feature
    away.parent.mkdir()
    away.write_text(photos.read_text())
    assert rfdlc.load(away).kind != "images"


def test_the_groups_of_a_table_of_images_are_found(photos: Path) -> None:
    """Those of a table of features are not: a column `group` may be a feature."""
    assert rfdlc.load(photos).train.groups is None
    header, *lines = photos.read_text().splitlines()
    photos.write_text("\n".join([header.replace("patient", "Group"), *lines]))
    data = rfdlc.load(photos)
    assert data.train.groups is not None
    assert data.train.groups.tolist() == [f"p{i // 2}" for i in range(9)]
    assert any(
        "column 'Group' says which images belong together" in note
        for note in data.notes
    )
    photos.write_text(
        "\n".join(
            [header.replace("patient", "Group"), lines[0].replace("p0", ""), *lines[1:]]
        )
    )
    assert rfdlc.load(photos).train.groups is None  # not all of them are known
    features = photos.with_name("t.csv")
    features.write_text(
        "x,group,label\n" + "\n".join(f"{i},{i % 3},{'ab'[i % 2]}" for i in range(12))
    )
    assert rfdlc.load(features, test_fraction=0).input_shape[0] > 1


def test_a_table_of_images_without_splits_or_with_broken_rows(photos: Path) -> None:
    lines = [",".join(line.split(",")[:2]) for line in photos.read_text().splitlines()]
    photos.write_text("\n".join(lines))
    data = rfdlc.load(photos)
    assert data.test is not None
    assert "held out" in " ".join(data.notes)
    photos.write_text(
        "\n".join([*lines, "images/none.png,red", "../x.png,red", "images/3.png,"])
    )
    message = (
        r"line 14: the file .* does not exist.*line 15: the path .* leaves .*line 16:"
        r" the label is missing"
    )
    with pytest.raises(InputError, match=message):
        rfdlc.load(photos)
    assert len(rfdlc.load(photos, skip_broken=True).skipped) == 3
    with pytest.raises(
        InputError, match=r"line 15: the path '../x.png' leaves the root"
    ):
        open_samples(photos, InputSpec(data.classes, data.input_shape))


def test_rows_of_a_table_of_images_are_named_by_their_line(photos: Path) -> None:
    """As an editor counts lines: with the header, blank lines, and the rows of other
    splits.
    """
    data = rfdlc.load(photos)
    header, *lines = photos.read_text().splitlines()
    bad = lines[-1].replace(lines[-1].split(",")[0], "../x.png")
    photos.write_text("\n".join([header, *lines[:3], "", *lines[3:], bad]))
    number = photos.read_text().splitlines().index(bad) + 1
    assert number == len(lines) + 3
    with pytest.raises(
        InputError, match=rf"photos.csv, line {number}: the path '../x.png' leaves"
    ):
        rfdlc.load(photos)
    spec, split = (
        InputSpec(data.classes, data.input_shape),
        bad.split(",")[header.split(",").index("split")],
    )
    for given in (None, split):
        with pytest.raises(
            InputError, match=rf"photos.csv, line {number}: the path '../x.png' leaves"
        ):
            open_samples(photos, spec, split=given)
    table = csv.read_csv(photos)
    parquet.write_table(table, photos.with_suffix(".parquet"))  # which has no lines
    with pytest.raises(
        InputError,
        match=rf"photos.parquet, row {len(lines) + 1}: the path '../x.png' leaves",
    ):
        rfdlc.load(photos.with_suffix(".parquet"))


def test_a_column_of_images_may_have_blanks_and_empty_cells(photos: Path) -> None:
    lines = photos.read_text().splitlines()
    photos.write_text(
        "\n".join([lines[0], ",red,p9,train,30", *(f" {line}" for line in lines[1:])])
    )
    assert len(rfdlc.load(photos, skip_broken=True).train) == 9
    with pytest.raises(InputError, match="line 2: the path is missing"):
        rfdlc.load(photos)
    table = photos.with_name("t.csv")
    table.write_text(
        "image,x,label\n" + "\n".join(f",{i},{'ab'[i % 2]}" for i in range(10))
    )
    assert rfdlc.load(table, test_fraction=0).kind == "features"


def test_absolute_paths(photos: Path) -> None:
    header, *lines = photos.read_text().splitlines()
    absolute = [f"{photos.parent.resolve()}/{line}" for line in lines]
    photos.write_text("\n".join([header, *absolute]))
    data = rfdlc.load(photos)
    assert list(data.train.ids or ())[:2] == ["images/0.png", "images/1.ppm"]
    elsewhere = photos.parent / "lists" / "photos.csv"
    elsewhere.parent.mkdir()
    elsewhere.write_text(photos.read_text())
    with pytest.raises(
        InputError,
        match=(
            r"the path leaves .* \(--allow-links\): 12 times \(.*line 2: '/.*0.png';"
            r" .*line 3"
        ),
    ):
        rfdlc.load(elsewhere)
    other = rfdlc.load(elsewhere, allow_links=True)
    np.testing.assert_array_equal(other.train.array, data.train.array)
    spec = InputSpec(data.classes, data.input_shape)
    for table, allow in ((photos, False), (elsewhere, True)):
        samples = open_samples(table, spec, split="test", allow_links=allow)
        np.testing.assert_array_equal(
            samples.read(range(3)).split.array, data.test.array
        )  # type: ignore[union-attr]
    lines = [
        f"{place} {label}"
        for place, label, *_ in (
            line.replace("red", "1").replace("dark", "0").split(",")
            for line in absolute
        )
    ]
    (photos.parent / "lists" / "my_train.txt").write_text("\n".join(lines))
    found = rfdlc.load(
        photos.parent / "lists" / "my_train.txt", allow_links=True, test_fraction=0
    )
    assert len(found.train) == 12
    assert (
        open_samples(
            photos.parent / "lists" / "my_train.txt", spec, allow_links=True
        ).labels.tolist()
        == [0, 1] * 6
    )


def test_every_broken_image_is_named(photos: Path) -> None:
    data = rfdlc.load(photos)
    for name in ("1.ppm", "4.ppm"):
        (photos.parent / "images" / name).write_bytes(b"P6 16 16 255 \n")
    spec = InputSpec(data.classes, data.input_shape)
    with pytest.raises(
        InputError,
        match=(
            r"truncated.*2 times.*1.ppm; .*4.ppm\). Repair or remove .*skip_broken=True"
            r" \(--skip-broken\)"
        ),
    ):
        open_samples(photos, spec, split="train").read(range(9))


# -- lists whose images are in another folder
@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Images in store/0 and store/1, and lists of them in another folder; the current
    folder is above both.
    """
    rows = []
    for i in range(12):
        place = tmp_path / "store" / f"{i % 2}" / f"{i}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (20 * i, 0, 0)).save(place)
        rows.append((f"{i % 2}/{i}.png", i % 2))
    (tmp_path / "lists").mkdir()
    for name, header in (("usual.csv", "path"), ("any.csv", "Image Index")):
        lines = [f"{header},label", *(f"{path},{'ab'[label]}" for path, label in rows)]
        (tmp_path / "lists" / name).write_text("\n".join(lines))
    (tmp_path / "lists" / "all.txt").write_text(
        "\n".join(f"{path} {label}" for path, label in rows)
    )
    (tmp_path / "lists" / "of_splits").mkdir()
    for split in ("train", "test"):
        shutil.copy(
            tmp_path / "lists" / "all.txt",
            tmp_path / "lists" / "of_splits" / f"My_{split}.txt",
        )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["usual.csv", "any.csv", "all.txt", "of_splits"])
@pytest.mark.parametrize("absolute", [False, True])
def test_the_root_is_the_folder_that_paths_of_a_list_are_relative_to(
    apart: Path, name: str, absolute: bool
) -> None:
    source = apart / "lists" / name if absolute else f"lists/{name}"
    root = apart / "store" if absolute else "store"
    data = rfdlc.load(source, root=root, test_fraction=0)
    assert list(data.train.ids or ()) == [f"{i % 2}/{i}.png" for i in range(12)]
    assert data.train.array[:, 0, 0, 0].tolist() == [20 * i for i in range(12)]
    spec = InputSpec(data.classes, data.input_shape)
    found = open_samples(source, spec, root=root).read(range(12)).split
    np.testing.assert_array_equal(found.array, data.train.array)
    splits, names = open_splits(source, spec, root=root)
    assert {len(own) for own in splits.values()} == {12}
    assert names == data.classes.names
    assert not holds_features(source, root)


@pytest.mark.parametrize("name", ["usual.csv", "all.txt"])
def test_a_list_without_its_images_names_the_folder_and_the_root(
    apart: Path, name: str
) -> None:
    tried = apart / "lists"
    with pytest.raises(
        InputError,
        match=rf"the file does not exist: expected .* --root DIR.*{tried}/0/0.png",
    ):
        rfdlc.load(f"lists/{name}")
    spec = InputSpec(rfdlc.Classes(("a", "b")), (3, 16, 16))
    with pytest.raises(
        InputError,
        match=(
            rf"{tried}: holds none of the images, such as 0/0.png: expected .*"
            r" --root DIR"
        ),
    ):
        open_samples(f"lists/{name}", spec)
    with pytest.raises(
        InputError, match=rf"the file does not exist.*{apart}/lists/of_splits/0/0.png"
    ):
        rfdlc.load(f"lists/{name}", root="lists/of_splits")


def test_a_list_whose_column_of_images_has_another_name_suggests_the_root(
    apart: Path,
) -> None:
    with pytest.raises(
        InputError,
        match=(
            r"no column is left .*'Image Index'.*; if these are image files, .*"
            r" --root DIR"
        ),
    ):
        rfdlc.load("lists/any.csv")


def test_paths_that_leave_the_root_are_refused(apart: Path) -> None:
    Image.new("RGB", (16, 16)).save(apart / "secret.png")
    file = apart / "lists" / "usual.csv"
    file.write_text(file.read_text() + "\n../secret.png,a")
    with pytest.raises(
        InputError, match=rf"the path '../secret.png' leaves the root {apart}/store"
    ):
        rfdlc.load("lists/usual.csv", root="store")
    assert (
        len(
            rfdlc.load(
                "lists/usual.csv", root="store", allow_links=True, test_fraction=0
            ).train
        )
        == 13
    )


def test_other_files_are_looked_for_in_the_root_alone(apart: Path) -> None:
    (apart / "t.csv").write_text(
        "x,label\n" + "\n".join(f"{i},{'ab'[i % 2]}" for i in range(12))
    )
    with pytest.raises(InputError, match=r"store/t.csv: no such file"):
        rfdlc.load("t.csv", root="store")


# -- links and groups
def test_links_that_leave_the_folder(tmp_path: Path) -> None:
    store, root = tmp_path / "store", tmp_path / "photos"
    for kind in "ab":
        (root / kind).mkdir(parents=True)
        store.mkdir(exist_ok=True)
        for i in range(3):
            Image.new("L", (8, 8), 40 * i).save(store / f"{kind}{i}.png")
            (root / kind / f"{i}.png").symlink_to(store / f"{kind}{i}.png")
    with pytest.raises(
        InputError, match=r"link to outside of .*allow_links=True \(--allow-links\)"
    ):
        rfdlc.load(root)
    data = rfdlc.load(root, allow_links="true", test_fraction=0)
    assert len(data.train) == 6
    spec = InputSpec(data.classes, data.input_shape)
    with pytest.raises(InputError, match=r"link to outside of .*--allow-links"):
        open_samples(root, spec)
    samples = open_samples(root, spec, allow_links=True)
    np.testing.assert_array_equal(samples.read(range(6)).split.array, data.train.array)
    assert samples.labels.tolist() == data.train.labels.tolist()
    (root / "a" / "up").symlink_to(root)
    with pytest.raises(InputError, match="a folder that contains it"):
        rfdlc.load(root, allow_links=True)


def test_group_files_may_have_blanks_and_missing_cells(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "t.npz",
        x=RNG.normal(size=(4, 2)),
        y=[0, 1, 0, 1],
        ids=["a", "b", "c", "d"],
    )
    table = tmp_path / "groups.csv"
    table.write_text("id , group\n a, 1\nb ,1 \nc,2\n d , 2\n")
    found = rfdlc.load(tmp_path / "t.npz", groups=table, test_fraction=0).train.groups
    assert found is not None
    assert found.tolist() == ["1", "1", "2", "2"]
    parquet.write_table(
        pyarrow.table({"id": ["a", "b"], "group": ["1", None]}),
        tmp_path / "groups.parquet",
    )
    with pytest.raises(InputError, match="line 3: the group of b is empty"):
        rfdlc.load(tmp_path / "t.npz", groups=tmp_path / "groups.parquet")


def test_a_test_list_needs_no_groups(photos: Path) -> None:
    rows = [line.split(",") for line in photos.read_text().splitlines()[1:]]
    for split in ("train", "test"):
        lines = [
            f"{path} {int(label == 'red')}"
            for path, label, _, own, _ in rows
            if own == split
        ]
        (photos.parent / f"my_{split}.txt").write_text("\n".join(lines))
    groups = [
        f"{path},{patient}" for path, _, patient, split, _ in rows if split == "train"
    ]
    (photos.parent / "groups.csv").write_text("\n".join(["path,patient", *groups]))
    data = rfdlc.load(
        photos.parent / "my_train.txt", groups=photos.parent / "groups.csv"
    )
    assert data.train.groups is not None
    assert data.train.groups.tolist() == [f"p{i // 2}" for i in range(9)]
    assert data.test is not None
    assert data.test.groups is None


def test_a_test_split_needs_no_groups(tmp_path: Path) -> None:
    x, y = RNG.normal(size=(12, 2)), np.arange(12) % 2
    np.savez(tmp_path / "t.npz", train_x=x, train_y=y, test_x=x[:4], test_y=y[:4])
    rows = [f"train,{i},patient {i // 2}" for i in range(12)]
    (tmp_path / "groups.csv").write_text("\n".join(["split,index,patient", *rows]))
    data = rfdlc.load(tmp_path / "t.npz", groups=tmp_path / "groups.csv")
    assert data.train.groups is not None
    assert data.test is not None
    assert data.test.groups is None
    (tmp_path / "groups.csv").write_text(
        "\n".join(["split,index,patient", *rows, "test,0,patient 0"])
    )
    with pytest.raises(InputError, match="3 of 4 test samples have no group"):
        rfdlc.load(tmp_path / "t.npz", groups=tmp_path / "groups.csv")

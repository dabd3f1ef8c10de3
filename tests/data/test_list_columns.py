"""Tables with a column of embeddings beside names of images and dates: which columns
are features.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from typer.testing import CliRunner

import rfdlc
from rfdlc.cli import app
from rfdlc.data.load import check_source
from rfdlc.data.opening import holds_features, open_samples
from rfdlc.data.samples import InputSpec
from rfdlc.errors import InputError

ROWS = 60
EMBEDDINGS = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)


def frame() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "image": [f"img {i:03d}.jpg" for i in range(ROWS)],
            "site": [f"site {i % 10}" for i in range(ROWS)],
            "species": ["fox" if i % 3 else "lynx" for i in range(ROWS)],
            "embedding": list(EMBEDDINGS),
        }
    )


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def written(table: pd.DataFrame, name: str = "traps.parquet") -> Path:
        if name.endswith(".csv"):
            table.to_csv(tmp_path / name, index=False)
        else:
            table.to_parquet(tmp_path / name)
        return tmp_path / name

    return written


def save_images(folder: Path) -> None:
    for name in frame()["image"]:
        Image.new("RGB", (8, 8), (len(name), int(name[4:7]), 0)).save(folder / name)


@pytest.mark.parametrize("on_disk", [True, False])
def test_embeddings_beside_names_of_images_that_do_not_exist(
    write: Callable[..., Path], on_disk: bool
) -> None:
    source = write(frame()) if on_disk else frame()
    data = rfdlc.load(source, target="species", groups="site", test_fraction=0)
    np.testing.assert_array_equal(data.train.array, EMBEDDINGS)
    assert list(data.train.ids or ()) == frame()["image"].tolist()
    if on_disk:
        assert holds_features(source)
        spec = InputSpec(data.classes, data.input_shape, data.encoder, target="species")
        found = open_samples(source, spec).read(range(ROWS)).split
        assert list(found.ids or ()) == frame()["image"].tolist()
        np.testing.assert_array_equal(found.array, EMBEDDINGS)


def test_images_that_exist_are_read(write: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    source = write(frame())
    save_images(tmp_path / "photos")
    assert rfdlc.load(source, target="species").kind == "features"
    assert rfdlc.load(
        source, target="species", root=tmp_path / "photos"
    ).input_shape == (3, 8, 8)
    save_images(tmp_path)
    assert rfdlc.load(source, target="species").input_shape == (3, 8, 8)
    assert rfdlc.load(
        source, target="species", drop=["site", "embedding"]
    ).input_shape == (3, 8, 8)
    with pytest.raises(
        InputError, match=r"column 'sit' does not exist.*did you mean 'site'"
    ):
        rfdlc.load(source, target="species", drop=["sit"])


def test_repeated_names_of_images_are_not_categories(
    write: Callable[..., Path],
) -> None:
    """Two animals in one image: 30 names in 60 rows."""
    table = frame().assign(image=[f"img {i // 2}.jpg" for i in range(ROWS)])
    with pytest.warns(
        UserWarning, match="column 'image' holds 30 names of images .* --groups image"
    ):
        data = rfdlc.load(
            write(table), target="species", groups="site", test_fraction=0
        )
    np.testing.assert_array_equal(data.train.array, EMBEDDINGS)


@pytest.mark.parametrize("drop", ["image", ["image"], "image, site"])
def test_a_table_without_its_column_of_paths_is_any_other(
    write: Callable[..., Path], tmp_path: Path, drop: str | list[str]
) -> None:
    save_images(tmp_path)
    source = write(
        frame().drop(columns="embedding").assign(weight=np.arange(ROWS) / 2),
        "traps.csv",
    )
    assert rfdlc.load(source, target="species").kind == "images"
    options = {"target": "species", "drop": drop}
    check_source(source, None, options)
    data = rfdlc.load(source, **options, test_fraction=0)
    assert data.encoder is not None
    names = [column.name for column in data.encoder.columns]
    assert names == (["weight"] if "site" in drop else ["site", "weight"])
    assert rfdlc.load(source, root=tmp_path, **options).kind == "features"
    assert "column 'image' was left out as asked" in data.notes


def test_the_command_takes_drop(write: Callable[..., Path], tmp_path: Path) -> None:
    save_images(tmp_path)
    given = ["inspect", str(write(frame())), "--target", "species", "--groups", "site"]
    assert (
        "images 3x8x8" in CliRunner().invoke(app, given, catch_exceptions=False).stdout
    )
    assert (
        "features 4"
        in CliRunner()
        .invoke(app, [*given, "--drop", "image"], catch_exceptions=False)
        .stdout
    )


@pytest.mark.parametrize("skip_broken", [True, False])
def test_paths_without_any_file_name_the_way_out(
    write: Callable[..., Path], skip_broken: bool
) -> None:
    source = write(
        frame().drop(columns="embedding").rename(columns={"image": "Image"}), "t.csv"
    )
    message = (
        r"does not exist: .* --root DIR .*60 times .*--drop Image \(in Python"
        r" drop=\['Image'\]\) reads the other"
    )
    with pytest.raises(InputError, match=message):
        rfdlc.load(source, target="species", skip_broken=skip_broken)
    assert rfdlc.load(source, target="species", drop=["Image"]).kind == "features"


@pytest.mark.parametrize("on_disk", [True, False])
@pytest.mark.parametrize("as_text", [True, False])
def test_dates_beside_lists_are_left_out(
    write: Callable[..., Path], on_disk: bool, as_text: bool
) -> None:
    taken = pd.date_range("2025-03-01", periods=ROWS, freq="7h", tz="Europe/Berlin")
    table = frame().assign(
        taken=taken.strftime("%Y-%m-%d %H:%M") if as_text else taken, hour=taken.hour
    )
    source = write(table) if on_disk else table
    data = rfdlc.load(source, target="species", groups="site", test_fraction=0)
    np.testing.assert_array_equal(
        data.train.array, np.column_stack([EMBEDDINGS, taken.hour])
    )
    (note,) = (note for note in data.notes if "'taken'" in note)
    assert "holds dates and was left out" in note
    assert "to keep it, write it as a number" in note
    assert data.encoder is not None
    later = table.assign(taken=taken + pd.Timedelta(days=999))
    np.testing.assert_array_equal(data.encoder.encode(later), data.train.array)
    by_time = rfdlc.load(source, target="species", groups="site", time="taken")
    assert by_time.input_shape == (5,)
    alone = rfdlc.load(table.drop(columns="embedding"), target="species", groups="site")
    assert alone.encoder is not None
    assert (
        "taken" in alone.encoder.features
    )  # without lists, a date is a feature as before

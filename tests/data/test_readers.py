"""One registry of formats: load, predict and embed read a source in the same way."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import rfdlc
from rfdlc.data.dataset import Dataset, Split
from rfdlc.data.load import register_source
from rfdlc.data.opening import holds_features, open_samples
from rfdlc.data.reader import DataReader, Listing, Place, Request
from rfdlc.data.registry import READERS, find_reader
from rfdlc.data.samples import Chunk, InputSpec, Samples, in_memory
from rfdlc.data.splits import open_splits
from rfdlc.errors import InputError

SPEC = InputSpec(rfdlc.Classes(("a", "b")), (2,))
IMAGES = InputSpec(rfdlc.Classes(("a", "b")), (1, 4, 4))


@pytest.fixture
def formats() -> Iterator[list[DataReader]]:
    """The registry, which is as before after a test."""
    before = list(READERS)
    yield READERS
    READERS[:] = before


def read_notes(path: Path, *, scale: float = 1.0) -> Dataset:
    """Rows of two numbers and a class, after a line of notes."""
    rows = [line.split(",") for line in path.read_text().splitlines()[1:]]
    inputs = scale * np.array([row[:2] for row in rows], np.float32)
    labels = np.array(["ab".index(row[2]) for row in rows])
    return Dataset.of(path.stem, ["a", "b"], {"train": Split(inputs, labels)})


@pytest.mark.usefixtures("formats")
def test_a_format_of_a_usual_suffix_is_read_alike_by_load_and_predict(tmp_path: Path):
    file = tmp_path / "own.csv"
    file.write_text("# measured in May\n1,2,a\n3,4,b\n5,6,a\n")
    register_source(
        read_notes,
        suffixes=[".csv"],
        recognises=lambda path: path.read_text().startswith("#"),
    )
    data = rfdlc.load(file, test_fraction=0)
    samples = open_samples(file, SPEC)
    assert data.train.array.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert samples.read(range(1, 3)).split.array.tolist() == [[3, 4], [5, 6]]
    assert samples.labels.tolist() == data.train.labels.tolist() == [0, 1, 0]
    plain = tmp_path / "plain.csv"  # which it does not recognise
    plain.write_text("x,label\n1,a\n2,b\n")
    reader, _ = find_reader(plain)
    assert reader.holds_out


def read_counted(place: Place) -> Dataset:
    raise AssertionError(f"{place.path} is not read as a whole")


def open_counted(place: Place, request: Request) -> Samples:
    """A file that says how many samples it has, each of which is its number."""
    count = json.loads(place.path.read_text())[request.split or "test"]

    def read(rows: range) -> Chunk:
        inputs = np.repeat(np.array(rows, np.float32)[:, None], 2, axis=1)
        return Chunk(Split(inputs, labels[rows.start : rows.stop]))

    labels = np.full(count, -1)
    return Samples(labels, named=False, fingerprint="", read=read)


def test_a_format_that_opens_samples_is_not_read_into_memory(
    tmp_path: Path, formats: list[DataReader]
) -> None:
    formats.insert(0, DataReader(read_counted, suffixes=[".count"], open=open_counted))
    file = tmp_path / "much.count"
    file.write_text(json.dumps({"train": 3, "test": 10**6}))
    samples = open_samples(file, SPEC)
    assert len(samples) == 10**6
    assert samples.take(range(999_998, 10**6)).split.array[:, 0].tolist() == [
        999_998,
        999_999,
    ]
    assert len(open_samples(file, SPEC, split="train")) == 3
    assert not holds_features(file)
    with pytest.raises(AssertionError, match="is not read as a whole"):
        rfdlc.load(file)


def test_a_format_that_lists_splits_is_embedded(
    tmp_path: Path, formats: list[DataReader]
) -> None:
    def open_one(place: Place, request: Request) -> Samples:
        images = np.full((2, 1, 4, 4), len(request.split or ""), np.uint8)
        labels = [request.spec.classes.names.index(name) for name in ("y", "x")]
        return in_memory(Split(images, np.array(labels)))

    def list_splits(place: Place, request: Request) -> Listing:
        return Listing(["train", "test"], ["x", "y"])

    formats.insert(
        0,
        DataReader(
            read_counted, suffixes=[".own"], open=open_one, list_splits=list_splits
        ),
    )
    (tmp_path / "images.own").touch()
    splits, names = open_splits(tmp_path / "images.own", IMAGES)
    assert names == ("x", "y")
    assert {name: own.labels.tolist() for name, own in splits.items()} == {
        "train": [1, 0],
        "test": [1, 0],
    }
    assert splits["train"].read(range(1)).split.array.max() == 5


def test_a_place_may_be_of_several_formats_and_the_first_reads_it(
    tmp_path: Path, formats: list[DataReader]
) -> None:
    (tmp_path / "a").mkdir()
    np.save(tmp_path / "x.npy", np.eye(2))
    names = [reader.read.__module__.rpartition(".")[2] for reader in formats]
    reader, place = find_reader(tmp_path)
    matching = [
        name
        for name, reader in zip(names, formats, strict=True)
        if reader.matches(place)
    ]
    assert matching == ["arrays", "image_folder"]
    assert reader.read.__module__.endswith("arrays")


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("t.csv", "x,label\n1,a\n2,b\n", {}, "t.csv: holds features, not images"),
        (
            "t.csv",
            "x,label\n1,a\n2,b\n",
            {"target": "label"},
            "target 'label' is a column of a table of images, but .*t.csv is not one",
        ),
        ("t.none", None, {"target": "label"}, "t.none: no such file or folder"),
    ],
)
def test_what_cannot_be_embedded(
    tmp_path: Path,
    name: str,
    content: str | None,
    options: dict[str, Any],
    message: str,
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        open_splits(tmp_path / name, IMAGES, **options)


def test_predictions_are_no_samples_wherever_their_array_stands(tmp_path: Path):
    np.savez(tmp_path / "p.npz", format="predictions", logits=np.zeros((4, 1, 2)))
    with pytest.raises(InputError, match=r"p: holds predictions \(logits\)"):
        rfdlc.load(tmp_path / "p.npz")
    with pytest.raises(InputError, match=r"p.npz: holds predictions \(logits\)"):
        open_samples(tmp_path / "p.npz", SPEC)


def test_an_image_file_has_no_split_and_no_columns_of_labels(tmp_path: Path):
    Image.new("L", (4, 4), 7).save(tmp_path / "one.png")
    splits, names = open_splits(tmp_path / "one.png", IMAGES)
    assert names == ()
    assert splits[""].read(range(1)).split.array.max() == 7
    with pytest.raises(InputError, match="an image file has no split 'test'"):
        open_samples(tmp_path / "one.png", IMAGES, split="test")
    with pytest.raises(InputError, match="target 'kind' is a column of a table"):
        open_splits(tmp_path / "one.png", IMAGES, target="kind")

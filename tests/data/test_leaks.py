"""Groups from files, and what an inspection finds."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import rfdlc
from rfdlc.data.inspection import Inspection
from rfdlc.errors import InputError


def images(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint8)[:, None, None] * np.ones((1, 4, 4), dtype=np.uint8)


@pytest.fixture
def data() -> rfdlc.Dataset:
    return rfdlc.load({"train": (images(1, 2, 3, 3, 4), [0, 1, 0, 1, 0]), "test": (images(4, 5, 2), [0, 1, 1])})


def test_duplicates_across_splits_and_labels(data: rfdlc.Dataset) -> None:
    leaks = Inspection.of(data)
    assert leaks.repeated == 3
    assert set(leaks.across_splits) == {"train: 1", "train: 4"}
    assert leaks.across_labels == ("train: 2",)
    assert leaks.groups_across_splits is None
    assert leaks.broken == ()


def test_samples_in_two_splits_are_reported_when_they_are_loaded(data: rfdlc.Dataset) -> None:
    assert "2 of 3 test samples are copies of training samples: `rfdlc inspect` lists them" in data.notes


def test_features_are_compared_too() -> None:
    leaks = Inspection.of(rfdlc.load({"train": (np.eye(3), [0, 1, 1]), "test": (np.eye(3)[:1], [0])}))
    assert leaks.across_splits == ("train: 0",)


GROUPS = "split,index,lesion\n" + "".join(f"train,{i},L{i}\n" for i in range(5)) + "test,0,L4\ntest,1,L9\ntest,2,L1\n"


def test_groups_by_split_and_index(tmp_path: Path) -> None:
    (tmp_path / "groups.csv").write_text(GROUPS)
    source = {"train": (images(1, 2, 3, 3, 4), [0, 1, 0, 1, 0]), "test": (images(4, 5, 2), [0, 1, 1])}
    data = rfdlc.load(source, groups=tmp_path / "groups.csv")
    assert data.train.groups is not None
    assert data.train.groups.tolist() == ["L0", "L1", "L2", "L3", "L4"]
    assert Inspection.of(data).groups_across_splits == ("L1", "L4")


def test_groups_by_id_come_before_the_test_part_is_held_out(tmp_path: Path) -> None:
    lines = ["path,patient"]
    for i in range(24):
        path = tmp_path / "set" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), 10 * i).save(path)
        lines.append(f"{'ab'[i % 2]}/{i}.png,person {i // 4}")
    (tmp_path / "groups.csv").write_text("\n".join(lines))
    data = rfdlc.load(tmp_path / "set", groups=tmp_path / "groups.csv")
    assert Inspection.of(data).groups_across_splits == ()
    assert data.test is not None
    assert len(data.test) % 4 == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("split,index,lesion\ntrain,0,L0\n", "4 of 5 train samples have no group, the first is 'train/1'"),
        (GROUPS + "test,2,L7\n", "line 10: test/2 is in two groups, 'L1' and 'L7'"),
        (GROUPS.replace("L2", ""), "line 4: the group of train/2 is empty"),
        (GROUPS.replace("train,2", "train,two"), "1 of 5 train samples have no group, the first is 'train/2'"),
        (GROUPS.replace("train,2", "tram,2"), "1 of 5 train samples have no group, the first is 'train/2'"),
        ("a,b\n1,2\n", r"has the columns a, b: expected a CSV with the columns split,index,GROUP"),
        ("id,a,b\n1,2,3\n", "has the columns id, a, b"),
        ("id,group\nx,1\n", "5 of 5 train samples have no group"),
    ],
)
def test_wrong_group_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "groups.csv").write_text(text)
    source = {"train": (images(1, 2, 3, 3, 4), [0, 1, 0, 1, 0]), "test": (images(4, 5, 2), [0, 1, 1])}
    with pytest.raises(InputError, match=message):
        rfdlc.load(source, groups=tmp_path / "groups.csv")


def test_files_on_disk_are_decoded_and_the_broken_ones_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rfdlc.data.sources.image_files.FITS_IN_MEMORY", 10)
    for i, (place, shade) in enumerate([("train/a", 1), ("train/a", 2), ("train/b", 3), ("test/a", 2), ("test/b", 9)]):
        path = tmp_path / place / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (40, 40), shade).save(path)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40), dtype=np.uint8)).save(tmp_path / "test/b/x.png")
    whole = (tmp_path / "test/b/x.png").read_bytes()
    (tmp_path / "test/b/x.png").write_bytes(whole[: len(whole) // 2])  # its header is right
    leaks = Inspection.of(rfdlc.load(tmp_path))
    assert leaks.across_splits == ("train: train/a/1.png",)
    assert len(leaks.broken) == 1
    assert "test/b/x.png: the image is truncated" in leaks.broken[0]

"""Groups from files, and what an inspection finds."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from typer.testing import CliRunner

import rfdlc
from rfdlc.cli import app
from rfdlc.data.inspection import Inspection
from rfdlc.errors import InputError


def images(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint8)[:, None, None] * np.ones(
        (1, 4, 4), dtype=np.uint8
    )


@pytest.fixture
def data() -> rfdlc.Dataset:
    return rfdlc.load(
        {
            "train": (images(1, 2, 3, 3, 4), [0, 1, 0, 1, 0]),
            "test": (images(4, 5, 2), [0, 1, 1]),
        }
    )


def test_duplicates_across_splits_and_labels(data: rfdlc.Dataset) -> None:
    leaks = Inspection.of(data)
    assert leaks.repeated == 3
    assert set(leaks.across_splits) == {"train: 1 and test: 2", "train: 4 and test: 0"}
    assert leaks.across_labels == ("train: 2 and train: 3",)
    assert leaks.groups_across_splits is None
    assert leaks.broken == ()


def test_samples_in_two_splits_are_reported_when_they_are_loaded(
    data: rfdlc.Dataset,
) -> None:
    assert (
        "2 of 3 test samples are copies of training samples: `rfdlc inspect` lists them"
        in data.notes
    )


def test_features_are_compared_too() -> None:
    leaks = Inspection.of(
        rfdlc.load({"train": (np.eye(3), [0, 1, 1]), "test": (np.eye(3)[:1], [0])})
    )
    assert leaks.across_splits == ("train: 0 and test: 0",)


GROUPS = (
    "split,index,lesion\n"
    + "".join(f"train,{i},L{i}\n" for i in range(5))
    + "test,0,L4\ntest,1,L9\ntest,2,L1\n"
)


def test_groups_by_split_and_index(tmp_path: Path) -> None:
    (tmp_path / "groups.csv").write_text(GROUPS)
    source = {
        "train": (images(1, 2, 3, 3, 4), [0, 1, 0, 1, 0]),
        "test": (images(4, 5, 2), [0, 1, 1]),
    }
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
        (
            "split,index,lesion\ntrain,0,L0\n",
            "4 of 5 train samples have no group, the first is 'train/1'",
        ),
        (GROUPS + "test,2,L7\n", "line 10: test/2 is in two groups, 'L1' and 'L7'"),
        (GROUPS.replace("L2", ""), "line 4: the group of train/2 is empty"),
        (
            GROUPS.replace("train,2", "train,two"),
            "1 of 5 train samples have no group, the first is 'train/2'",
        ),
        (
            GROUPS.replace("train,2", "tram,2"),
            "1 of 5 train samples have no group, the first is 'train/2'",
        ),
        (
            "a,b\n1,2\n",
            r"has the columns a, b: expected a CSV with the columns split,index,GROUP",
        ),
        ("id,a,b\n1,2,3\n", "has the columns id, a, b"),
        ("id,group\nx,1\n", "5 of 5 train samples have no group"),
    ],
)
def test_wrong_group_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "groups.csv").write_text(text)
    source = {
        "train": (images(1, 2, 3, 3, 4), [0, 1, 0, 1, 0]),
        "test": (images(4, 5, 2), [0, 1, 1]),
    }
    with pytest.raises(InputError, match=message):
        rfdlc.load(source, groups=tmp_path / "groups.csv")


def test_files_on_disk_are_decoded_and_the_broken_ones_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rfdlc.data.readers.image_files.FITS_IN_MEMORY", 10)
    for i, (place, shade) in enumerate(
        [("train/a", 1), ("train/a", 2), ("train/b", 3), ("test/a", 2), ("test/b", 9)]
    ):
        path = tmp_path / place / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (40, 40), shade).save(path)
    Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (40, 40), dtype=np.uint8)
    ).save(tmp_path / "test/b/x.png")
    whole = (tmp_path / "test/b/x.png").read_bytes()
    (tmp_path / "test/b/x.png").write_bytes(
        whole[: len(whole) // 2]
    )  # its header is right
    leaks = Inspection.of(rfdlc.load(tmp_path))
    assert leaks.across_splits == ("train: train/a/1.png and test: test/a/3.png",)
    assert len(leaks.broken) == 1
    assert "test/b/x.png: the image is truncated" in leaks.broken[0]


CODES = {"healthy": "Z00", "flu": "J10", "measles": "B05"}


def patients(path: Path, count: int = 300) -> Path:
    """A table in which a code of the diagnosis, and an index of it, were left; 90% are
    healthy.
    """
    rng = np.random.default_rng(0)
    lines = ["patient,age,ward,diagnosis code,severity,diagnosis"]
    for k in range(count):
        found = ["healthy", "flu", "measles"][0 if k % 10 else 1 + k // 10 % 2]
        code, ward = f"{CODES[found]}.{rng.integers(2)}", "AB"[rng.integers(2)]
        severity = list(CODES).index(found) + rng.uniform(0, 0.9)
        lines.append(
            f"p{k // 3},{rng.integers(20, 90)},{ward},{code},{severity:.3f},{found}"
        )
    path.write_text("\n".join(lines))
    return path


def test_columns_that_tell_the_class_are_named(tmp_path: Path) -> None:
    file = patients(tmp_path / "p.csv", 900)
    result = CliRunner().invoke(
        app, ["inspect", str(file), "--target", "diagnosis", "--drop", "patient"]
    )
    told = (
        "alone tells the class of 100.0% of the rows: if it is known only after the"
        " class"
    )
    assert f"! column 'diagnosis code' {told}" in result.stdout
    assert (
        "(--drop 'diagnosis code'; in Python drop=['diagnosis code'])" in result.stdout
    )
    assert f"! column 'severity' {told}" in result.stdout
    assert result.stdout.count("alone tells") == 2
    with pytest.warns(
        UserWarning, match="'diagnosis code' alone tells the class of 100.0%"
    ):  # so does `train`
        rfdlc.load(file, target="diagnosis", drop=["patient", "severity"])


def transactions(path: Path, filled: dict[str, float], flag: bool = False) -> Path:
    """3,000 transactions of three kinds, 90% legal; the share of each with a date, or a
    flag of fraud.
    """
    rng = np.random.default_rng(0)
    lines = ["amount,chargeback,suspect,kind"]
    for k in range(3000):
        kind = ("stolen", "fake")[k // 10 % 2] if k % 10 == 0 else "legal"
        date = (
            f"2025-0{rng.integers(1, 10)}-1{rng.integers(10)}"
            if rng.random() < filled[kind]
            else ""
        )
        amount = rng.normal()
        suspect = "NY"[kind != "legal" if flag else rng.integers(2)]
        lines.append(f"{amount:.3f},{date},{suspect},{kind}")
    path.write_text("\n".join(lines))
    return path


def test_a_column_that_is_filled_outside_of_the_largest_class_is_named(
    tmp_path: Path,
) -> None:
    file = transactions(tmp_path / "t.csv", {"legal": 0, "stolen": 0.9, "fake": 1})
    told = (
        r"'chargeback' is filled in 9\d\..% of the rows outside of the class 'legal',"
        r" and in hardly any other: .*--drop"
    )
    with pytest.warns(UserWarning, match=told):
        rfdlc.load(file, target="kind")
    file = transactions(tmp_path / "t.csv", {"legal": 1, "stolen": 0.1, "fake": 0})
    with pytest.warns(
        UserWarning,
        match=(
            r"'chargeback' is empty in 9\d\..% of the rows outside of the class 'legal'"
        ),
    ):
        rfdlc.load(file, target="kind")
    file = transactions(
        tmp_path / "t.csv", {"legal": 0.5, "stolen": 0.5, "fake": 0.5}, flag=True
    )
    with pytest.warns(
        UserWarning,
        match=(
            "'suspect' alone tells 'legal' from the other classes in 100.0% of the rows"
        ),
    ):
        rfdlc.load(file, target="kind")


@pytest.mark.parametrize(
    "filled",
    [(0.6, 0.6, 0.6), (0.9, 0.6, 0.6), (0.1, 0.4, 0.4), (0.0, 0.2, 0.2), (0.1, 1, 1)],
)
def test_values_that_are_missing_more_often_in_one_class_are_no_leaks(
    tmp_path: Path, filled: tuple[float, ...]
) -> None:
    file = transactions(
        tmp_path / "t.csv", dict(zip(("legal", "stolen", "fake"), filled, strict=True))
    )
    assert not [
        note for note in rfdlc.load(file, target="kind").notes if "--drop" in note
    ]


def test_a_column_with_no_more_values_than_classes_needs_fewer_rows(
    tmp_path: Path,
) -> None:
    lines = ["age,outcome,late"] + [
        f"{k % 13},{k % 20 == 0},{int(k % 20 == 0)}" for k in range(300)
    ]
    (tmp_path / "t.csv").write_text(
        "\n".join(lines)
    )  # 15 of 300, 12 of them in the training split
    with pytest.warns(UserWarning, match="'late' alone tells the class"):
        rfdlc.load(tmp_path / "t.csv", target="outcome")


def test_what_tells_the_group_does_not_tell_the_class(tmp_path: Path) -> None:
    """Ten visits of each patient, who is ill or not: the date of birth names the
    patient, and nobody else.
    """
    days = [f"19{p % 60 + 40}-0{p % 9 + 1}-1{p % 7}" for p in range(120)]
    lines = ["patient,born,ill"] + [
        f"p{k // 10},{days[k // 10]},{k // 10 % 3 == 0}" for k in range(1200)
    ]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    notes = rfdlc.load(tmp_path / "t.csv", target="ill", groups="patient").notes
    assert not [note for note in notes if "alone tells" in note]


@pytest.mark.parametrize(
    "load", [load_iris, load_wine, load_breast_cancer, load_digits]
)
def test_good_measurements_are_no_leaks(load) -> None:
    frame = load(as_frame=True).frame
    for rows in (
        frame,
        frame.sample(frac=0.5, random_state=0),
        frame.sample(frac=0.3, random_state=1),
    ):
        assert not [
            note for note in rfdlc.load(rows, target="target").notes if "--drop" in note
        ]

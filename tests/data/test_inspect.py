"""`rfdlc inspect`: what a person reads, what a program reads, and the picture."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from rfdlc.cli import app, main
from rfdlc.data.inspection import Inspection, plot_tail
from rfdlc.data.load import load
from rfdlc.errors import InputError
from rfdlc.probabilities.classes import Classes


def run(*arguments: object) -> str:
    result = CliRunner().invoke(
        app, ["inspect", *map(str, arguments)], catch_exceptions=False
    )
    assert result.exit_code == 0
    return result.stdout


def test_what_a_person_reads() -> None:
    shown = run("digits-lt", "--factor", "10")
    assert "images 1x8x8, 10 classes" in shown
    assert "Imbalance factor 10.8" in shown  # 129 over 12
    assert "head (first third)" in shown
    assert "no sample is in two splits" in shown
    assert "groups are not known" in shown


def test_options_of_the_data_are_those_of_train() -> None:
    assert "Imbalance factor 10.8" in run("digits-lt", "data.factor=10")
    with pytest.raises(
        InputError,
        match=r"'factor=10' is not an option: expected data.key=value, as data.fit=pad",
    ):
        run("digits-lt", "factor=10")
    with pytest.raises(InputError, match=r"has no option 'fit'"):
        run("digits-lt", "data.fit=pad")


def test_what_a_program_reads(tmp_path: Path) -> None:
    images = np.array([1, 2, 3, 3, 4, 4], dtype=np.uint8)[:, None, None] * np.ones(
        (1, 4, 4), dtype=np.uint8
    )
    np.savez(
        tmp_path / "set.npz",
        train_x=images[:5],
        train_y=[0, 1, 0, 1, 0],
        test_x=images[5:],
        test_y=[0],
        train_groups=list("abcde"),
        test_groups=["e"],
    )
    found = json.loads(run(tmp_path / "set.npz", "--json"))
    assert found["splits"] == {"train": 5, "test": 1}
    assert found["input_shape"] == [1, 4, 4]
    assert found["imbalance_factor"] == 1.5
    assert found["classes"] == [
        {"name": "0", "rank": 0, "train": 3, "test": 1},
        {"name": "1", "rank": 1, "train": 2, "test": 0},
    ]
    assert found["repeated_samples"] == 2
    assert found["samples_in_several_splits"] == {
        "count": 1,
        "examples": ["train: 4 and test: 0"],
    }
    assert found["samples_with_several_labels"] == {
        "count": 1,
        "examples": ["train: 2 and train: 3"],
    }
    assert found["groups_in_several_splits"] == {"count": 1, "examples": ["e"]}
    assert [(r["name"], r["classes"], r["samples"]) for r in found["shots"]] == [
        ("few", 2, 5)
    ]
    assert "1 groups are in more than one split" in run(tmp_path / "set.npz")


def test_broken_files_stop_it_or_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(6):
        path = tmp_path / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("L", (8, 8), i).save(path)
    (tmp_path / "a" / "zero.png").touch()
    monkeypatch.setattr(sys, "argv", ["rfdlc", "inspect", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "a/zero.png: the file is empty" in message
    found = json.loads(run(tmp_path, "--skip-broken", "--json"))
    assert len(found["skipped"]) == 1
    assert run(tmp_path, "--skip-broken").count("left out") == 1


def test_damage_behind_a_good_header_is_found_in_files_that_are_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rfdlc.data.readers.image_files.FITS_IN_MEMORY", 10)
    pixels = np.random.default_rng(0).integers(0, 256, (6, 40, 40), dtype=np.uint8)
    for i in range(6):
        path = tmp_path / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels[i]).save(path)
    path.write_bytes(path.read_bytes()[:900])
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert "1 files cannot be read" in result.stdout
    assert isinstance(result.exception, InputError)
    assert "b/5.png: the image is truncated" in str(result.exception)
    assert len(json.loads(run(tmp_path, "--skip-broken", "--json"))["broken"]) == 1


def test_broken_files_are_listed_by_reason_above_what_can_be_read(
    tmp_path: Path,
) -> None:
    for i in range(20):
        path = tmp_path / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        pixels = np.full((20, 20), i, np.uint16 if i > 12 else np.uint8)
        Image.fromarray(pixels).save(path)
    (tmp_path / "a" / "zero.png").touch()
    shown = run(tmp_path, "--skip-broken")
    lines = [line.split() for line in shown.split("Checks")[1].splitlines()]
    assert "! 8 broken files, rows or folders were left out:" in shown
    assert (
        " ".join(shown.split()).count("the image has 16 or more bits per channel") == 1
    )
    assert "7 times (" in " ".join(shown.split())
    order = [" ".join(line[:5]) for line in lines if line[:1] in (["!"], ["✓"])]
    assert order.index("! 8 broken files, rows") < order.index(
        "✓ every other sample can"
    )


def test_a_table_with_a_target(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "v,outcome,who\n"
        + "\n".join(f"{i / 2},{'ab'[i % 2]},w{i // 4}" for i in range(40))
    )
    found = json.loads(
        run(tmp_path / "t.csv", "--target", "outcome", "--groups", "who", "--json")
    )
    assert found["kind"] == "features"
    assert found["groups_in_several_splits"]["count"] == 0


@pytest.mark.parametrize("count", [2, 7, 100, 8142])
def test_a_picture_and_a_table_for_any_number_of_classes(
    tmp_path: Path, count: int
) -> None:
    sizes = np.maximum(1, 300 // np.arange(1, count + 1))
    labels = np.repeat(np.arange(count), sizes)
    np.savez(
        tmp_path / "set.npz",
        x=np.arange(len(labels), dtype=np.float32)[:, None],
        y=labels,
    )
    shown = run(
        tmp_path / "set.npz", "--plot", tmp_path / "tail.png", "--test-fraction", 0
    )
    assert len(shown.splitlines()) < 60
    assert ("more" in shown) == (count > 30)
    with Image.open(tmp_path / "tail.png") as picture:
        assert picture.size == (1350, 675)
        assert len(set(picture.convert("RGB").get_flattened_data())) > 20


def test_names_in_a_picture_are_no_formulas(tmp_path: Path) -> None:
    plot_tail(Classes(("a$_{$", "b"), (5, 1)), tmp_path / "tail.png", "from $5 to $_{$")
    with Image.open(tmp_path / "tail.png") as picture:
        assert picture.size == (1350, 675)


def test_pictures_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classes = Classes.from_counts([5, 1])
    with pytest.raises(InputError, match=r"tail.png: cannot be written \(No such file"):
        plot_tail(classes, tmp_path / "nowhere" / "tail.png", "x")
    with pytest.raises(InputError, match=r"tail.xyz: the picture cannot be written"):
        plot_tail(classes, tmp_path / "tail.xyz", "x")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r'pip install "rfdlc\[plots\]"'):
        plot_tail(classes, tmp_path / "tail.png", "x")


def test_class_names_are_not_markup() -> None:
    data = load(
        {"train": (np.eye(4), ["[red]a[/]", "[b]", "[b]", "[b]"])}, test_fraction=0
    )
    assert Inspection.of(data).to_dict()["classes"][0]["name"] == "[b]"


def test_a_test_split_far_from_what_was_asked_is_told(tmp_path: Path) -> None:
    rows = [f"{i / 2},{i % 2},{i // 30}" for i in range(90)]  # three sites of 30 rows
    (tmp_path / "t.csv").write_text("\n".join(["x,outcome,site", *rows]))
    given = (
        tmp_path / "t.csv",
        "--target",
        "outcome",
        "--groups",
        "site",
        "--json",
        "--test-fraction",
    )
    told = (
        "33% of the samples are held out instead of 20%: groups stay whole, and a class"
        " in two or more of them "
    )
    assert any(note.startswith(told) for note in json.loads(run(*given, 0.2))["notes"])
    assert not any(
        "instead of" in note for note in json.loads(run(*given, 0.3))["notes"]
    )


@pytest.mark.parametrize("fits", [2**31, 0])
def test_all_broken_images_are_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: int
) -> None:
    """An empty file is found by its header, truncated ones when they are decoded: one
    error names both kinds.
    """
    monkeypatch.setattr("rfdlc.data.readers.image_files.FITS_IN_MEMORY", fits)
    rng = np.random.default_rng(0)
    for i in range(12):
        Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(
            tmp_path / f"{i}.jpg"
        )
    (tmp_path / "t.csv").write_text(
        "path,label\n" + "".join(f"{i}.jpg,{'ab'[i % 2]}\n" for i in range(12))
    )
    (tmp_path / "3.jpg").write_bytes(b"")
    for i in (5, 8):
        whole = (tmp_path / f"{i}.jpg").read_bytes()
        (tmp_path / f"{i}.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        InputError, match=r"3.jpg: the file is empty.*truncated.*: 2 times \("
    ) as told:
        run(tmp_path / "t.csv")
    named = re.findall(r"(\d+)\.jpg", str(told.value))
    assert sorted(named) == ["3", "5", "8"]

"""Arrays, MedMNIST files and `rfdlc.load`: what is read, and which error wrong input
raises.
"""

import json
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_array
from sklearn.datasets import load_digits

import rfdlc
from rfdlc.data.dataset import Dataset, Split
from rfdlc.data.load import register_source
from rfdlc.data.opening import open_samples
from rfdlc.data.registry import READERS
from rfdlc.data.samples import InputSpec, Samples
from rfdlc.errors import InputError

RNG = np.random.default_rng(0)


def features(count: int, width: int = 4) -> np.ndarray:
    return RNG.normal(size=(count, width)).astype(np.float32)


def test_a_pair_in_memory_gets_a_test_split_and_says_so() -> None:
    x, y = features(100), np.repeat([0, 1, 2], [80, 18, 2])
    data = rfdlc.load((x, y), seed=3)
    assert data.test is not None
    assert np.bincount(data.test.labels).tolist() == [16, 4, 1]
    assert data.classes.counts == (64, 14, 1)
    assert "21 of 100 samples were held out" in data.notes[0]
    together = np.concatenate([data.train.array, data.test.array])
    assert sorted(map(tuple, together.tolist())) == sorted(map(tuple, x.tolist()))
    assert data.normalisation is not None
    assert np.allclose(
        data.normalisation.mean, data.train.array.mean(0), atol=1e-6
    )  # measured without the test part
    assert len(rfdlc.load((x, y), test_fraction=0).train) == 100
    assert (data.kind, data.input_shape) == ("features", (4,))


def test_a_sparse_matrix_is_the_same_as_a_dense_one() -> None:
    x, y = np.eye(4).repeat(5, 0), np.arange(4).repeat(5)
    np.testing.assert_array_equal(
        rfdlc.load((csr_array(x), y)).train.array, rfdlc.load((x, y)).train.array
    )


def test_splits_in_memory_with_text_labels() -> None:
    data = rfdlc.load(
        {
            "train": (features(4), ["b", "a", "b", "b"]),
            "test": [features(2), ["a", "b"]],
        },
        name="mine",
    )
    assert data.classes.names == ("a", "b")
    assert data.train.labels.tolist() == [1, 0, 1, 1]
    assert data.name == "mine"
    assert data.notes == ()


@pytest.mark.parametrize(
    "keys",
    ["{split}_x {split}_y", "X_{split} y_{split}", "{split}-features {split}-labels"],
)
def test_npz_keys(tmp_path: Path, keys: str) -> None:
    arrays = {}
    for split, count in (("train", 6), ("valid", 3), ("test", 2)):
        x, y = keys.format(split=split).split()
        arrays |= {x: features(count), y: np.arange(count) % 2}
    np.savez(tmp_path / "set.npz", **arrays)
    data = rfdlc.load(tmp_path / "set.npz")
    assert {split: len(part) for split, part in data.splits.items()} == {
        "train": 6,
        "val": 3,
        "test": 2,
    }


def test_npz_with_groups_ids_and_names(tmp_path: Path) -> None:
    groups = np.repeat(["p1", "p2", "p3", "p4", "p5", "p6"], 2)
    np.savez(
        tmp_path / "set.npz",
        x=features(12),
        y=np.arange(12) // 6,
        groups=groups[:, None],
        ids=np.arange(12)[:, None],
        names=["healthy", "ill"],
    )
    data = rfdlc.load(tmp_path / "set.npz", test_fraction=0.3)
    assert data.test is not None
    assert data.test.groups is not None
    assert not set(data.train.groups) & set(data.test.groups)  # type: ignore[arg-type]
    assert data.classes.names == ("healthy", "ill")
    held = data.hold_out(0.3)
    assert held.val is not None
    assert not set(held.train.groups) & set(held.val.groups)  # type: ignore[arg-type]
    assert [groups[int(i)] for i in held.val.ids or ()] == held.val.groups.tolist()  # type: ignore[union-attr]


def test_npy_pairs_and_folders(tmp_path: Path) -> None:
    np.save(tmp_path / "X.npy", features(10))
    np.save(tmp_path / "y.npy", np.arange(10) % 2)
    np.save(tmp_path / "other.npy", np.arange(10) // 5)
    assert rfdlc.load(tmp_path / "X.npy", test_fraction=0).classes.counts == (5, 5)
    assert (
        rfdlc.load(
            tmp_path / "X.npy", labels=tmp_path / "other.npy", test_fraction=0
        ).train.labels.tolist()[:5]
        == [0] * 5
    )
    (tmp_path / "other.npy").unlink()
    assert len(rfdlc.load(tmp_path, test_fraction=0).train) == 10
    (tmp_path / "y.npy").unlink()
    with pytest.raises(
        InputError, match=r"no labels for it at .*y.npy; name them with labels"
    ):
        rfdlc.load(tmp_path / "X.npy")


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((6, 5, 4), (1, 5, 4)),
        ((6, 5, 4, 3), (3, 5, 4)),
        ((6, 3, 5, 4), (3, 5, 4)),
        ((6, 5, 4, 1), (1, 5, 4)),
    ],
)
def test_images_in_arrays(shape: tuple, expected: tuple) -> None:
    images = RNG.integers(0, 256, shape, dtype=np.uint8)
    data = rfdlc.load({"train": (images, [0, 1] * 3)}, test_fraction=0)
    assert (data.kind, data.input_shape) == ("images", expected)
    if shape == (6, 5, 4, 3):
        assert (data.train.array[2, 1] == images[2, :, :, 1]).all()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ((features(3), [0, 1]), "3 inputs, 2 labels"),
        ((features(3), [0, 0, 0]), "one class"),
        ((features(3), [0, -1, 1]), "label -1 at position 1"),
        ((features(3), [0, 0.5, 1]), r"label 0\.5"),
        ((features(3), [[0, 1], [1, 0], [0, 1]]), "one-hot: argmax"),
        (
            (np.array([[1.0, np.nan], [0, 0]]), [0, 1]),
            r"row 0 has a missing, .* give a data frame, pd\.DataFrame\(x\)",
        ),
        (
            (np.full((2, 3), 1e39), [0, 1]),
            "row 0 has a missing, infinite or too large value.*3.4e.38$",
        ),
        (
            (features(3), [0, 1, 50_000_000]),
            "label 50000000 is too large.*less than 1,000,000",
        ),
        ((features(3), [0, 1, np.inf]), "label inf is too large"),
        ((np.zeros((3, 0)), [0, 1, 1]), r"shape \(0,\) hold nothing to learn from"),
        (
            {"train": (features(3), [0, 1, 1]), "test": (features(2)[:, :1], [0, 1])},
            r"test samples have shape \(1,\), but training samples",
        ),
        ((np.zeros((2, 3, 4, 5)), [0, 1]), r"float64 of shape \(2, 3, 4, 5\)"),
        ((np.zeros((2, 5, 5, 7), np.uint8), [0, 1]), "expected 1 or 3 channels"),
        (
            (np.zeros((2, 5, 5, 4), np.uint8), [0, 1]),
            r"leave out transparency, images\[..., :3\]",
        ),
        (
            (np.ones((2, 5, 5)), [0, 1]),
            r"up to 1, give np.round\(255 \* x\).astype\('uint8'\)",
        ),
        (
            (np.full((2, 5, 5), 200.0), [0, 1]),
            r"up to 200, give np.round\(x\).astype\('uint8'\)",
        ),
        (
            (np.full((2, 5, 5), 4095, np.uint16), [0, 1]),
            r"give np.round\(x \* \(255 / 4095\)\).astype\('uint8'\)",
        ),
        ({"train": (features(2), [0, 1]), "x": features(2)}, "mixed"),
        ({"train_x": features(2)}, "no training labels"),
        ({"train_y": [0, 1]}, "needs both inputs and labels"),
        (
            {"x": features(2), "images": features(2), "y": [0, 1]},
            "two arrays mean the same, 'images' is the second",
        ),
        ({"blub": [0]}, "'blub' has a name that is not known"),
        ({"test": (features(2), [0, 1])}, "no training labels"),
        (7, "a int cannot be loaded"),
        ((features(0), []), "no training labels"),
        (([[1, 2], [3]], [0, 1]), "a list whose entries differ in length"),
        (
            (features(3), np.array(["a", None, np.nan], dtype=object)),
            "label 1, 2 is missing",
        ),
        (
            {"x": features(3), "y": [0, 1, 1], "groups": ["a", None, "b"]},
            "group 1 is missing",
        ),
        (
            {"x": features(3), "y": [0, 1, 1], "groups": [0, np.nan, 1]},
            "group 1 is missing",
        ),
        (
            {"x": features(2), "y": [0, 1], "groups": [[0, 1], [2, 3]]},
            r"groups have shape \(2, 2\)",
        ),
        ({"x": features(2), "y": [0, 1], "ids": 3}, r"ids have shape \(\)"),
        (
            (np.ma.array(features(2), mask=[[True] * 4, [False] * 4]), [0, 1]),
            "some values are masked",
        ),
    ],
)
def test_wrong_arrays_are_named(source: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        rfdlc.load(source)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": "x"}, "seed='x' is not valid: input should be a valid integer"),
        (
            {"seed": -1},
            "seed=-1 is not valid: input should be greater than or equal to 0",
        ),
        (
            {"profile": "stp"},
            "profile='stp' is not valid: input should be 'exponential' or 'step'",
        ),
        (
            {"factor": "many"},
            "factor='many' is not valid: input should be a valid number",
        ),
        (
            {"test_fraction": "half"},
            "test_fraction='half' is not valid: input should be a valid number",
        ),
    ],
)
def test_options_of_another_kind_are_named(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        rfdlc.load("digits-lt", **options)


def test_options_may_be_text_as_on_a_command_line(tmp_path: Path) -> None:
    assert (
        rfdlc.load("digits-lt", factor="10", seed="3").classes.counts
        == rfdlc.load("digits-lt", factor=10).classes.counts
    )
    np.savez(
        tmp_path / "m.npz",
        train_images=np.zeros((4, 8, 8), np.uint8),
        train_labels=[[0], [1], [0], [1]],
    )
    assert rfdlc.load(
        tmp_path / "m.npz", image_size="6", test_fraction="0.5"
    ).input_shape == (1, 6, 6)
    with pytest.raises(
        InputError, match="image_size=0 is not valid: input should be greater than 0"
    ):
        rfdlc.load(tmp_path / "m.npz", image_size=0)


def test_damaged_files_and_python_objects(tmp_path: Path) -> None:
    for name in ("a.npz", "a.npy"):
        (tmp_path / name).write_bytes(b"nothing")
        with pytest.raises(
            InputError,
            match=rf"{name}: (cannot be read as numpy|holds Python)|no labels",
        ):
            rfdlc.load(tmp_path / name)
    np.savez(
        tmp_path / "objects.npz", x=np.array([{}, []], dtype=object), y=np.array([0, 1])
    )
    with pytest.raises(
        InputError,
        match=r"the array 'x' holds .*never unpickled.* such as x.astype\('U'\)",
    ):
        rfdlc.load(tmp_path / "objects.npz")
    np.save(tmp_path / "x.npy", np.array(["a", "b"], dtype=object))
    np.save(tmp_path / "y.npy", np.array([0, 1]))
    with pytest.raises(
        InputError, match=r"x.npy: holds Python objects.* such as values.astype\('U'\)"
    ):
        rfdlc.load(tmp_path / "x.npy")


def test_unknown_names_options_and_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'cifar10-lt'"):
        rfdlc.load("cifar10lt")
    with pytest.raises(
        InputError, match=r"digits-lt has no option 'factr'.*did you mean 'factor'"
    ):
        rfdlc.load("digits-lt", factr=3)
    with pytest.raises(InputError, match="data in memory has no option"):
        rfdlc.load((features(4), [0, 0, 1, 1]), factor=3)
    (tmp_path / "a.xls").touch()
    with pytest.raises(InputError, match="files of this kind are not read"):
        rfdlc.load("a.xls", root=tmp_path)


def test_digits() -> None:
    data = rfdlc.load("digits-lt")
    assert data.classes.counts == tuple(
        int(129 * 20 ** (-c / 9) + 1e-9) for c in range(10)
    )
    assert data.test is not None
    assert np.bincount(data.test.labels).tolist() == [45] * 10
    assert not set(data.train.ids or ()) & set(data.test.ids or ())
    assert data.train.array.max() == 255
    theirs = load_digits()  # numbered as there
    for split in data.splits.values():
        rows = [int(name.removeprefix("digit-")) for name in split.ids or ()]
        assert np.array_equal(
            split.array, np.round(theirs.images[rows, None] * 255 / 16)
        )
        assert np.array_equal(split.labels, theirs.target[rows])
    other = rfdlc.load("digits-lt", seed=1)
    assert list(other.test.ids or ()) == list(data.test.ids or ())  # type: ignore[union-attr]
    assert list(other.train.ids or ()) != list(data.train.ids or ())
    with pytest.raises(InputError, match="validation samples already"):
        data.hold_out().hold_out()


def medmnist(
    path: Path,
    size: int = 28,
    colour: bool = True,
    classes: int = 7,
    **changes: np.ndarray | None,
) -> Path:
    arrays = {}
    for split, count in (("train", 3 * classes), ("val", classes), ("test", classes)):
        shape = (count, size, size, 3) if colour else (count, size, size)
        arrays[f"{split}_images"] = RNG.integers(0, 256, shape, dtype=np.uint8)
        arrays[f"{split}_labels"] = (np.arange(count) % classes).astype(np.uint8)[
            :, None
        ]
    np.savez(
        path,
        **{
            key: array for key, array in (arrays | changes).items() if array is not None
        },
    )
    return path


@pytest.mark.parametrize(("size", "colour"), [(28, True), (28, False), (64, True)])
def test_medmnist_shapes(tmp_path: Path, size: int, colour: bool) -> None:
    path = medmnist(tmp_path / "dermamnist.npz", size, colour)
    data = rfdlc.load("dermamnist", root=tmp_path)
    assert data.input_shape == (3 if colour else 1, size, size)
    assert data.classes.names == ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
    assert {split: len(part) for split, part in data.splits.items()} == {
        "train": 21,
        "val": 7,
        "test": 7,
    }
    with np.load(path) as file:
        expected = (
            file["val_images"].transpose(0, 3, 1, 2)
            if colour
            else file["val_images"][:, None]
        )
    assert data.val is not None
    assert (data.val.array == expected).all()
    assert rfdlc.load(path, image_size=32).input_shape[1:] == (32, 32)


def test_medmnist_names_and_versions(tmp_path: Path) -> None:
    assert rfdlc.load(medmnist(tmp_path / "unknown.npz", classes=3)).classes.names == (
        "0",
        "1",
        "2",
    )
    medmnist(tmp_path / "bloodmnist_64.npz", 64, classes=8)
    assert rfdlc.load("bloodmnist", root=tmp_path).classes.names[0] == "basophil"
    medmnist(tmp_path / "bloodmnist_128.npz", 64, classes=8)
    with pytest.raises(InputError, match="several, name one by its path"):
        rfdlc.load("bloodmnist", root=tmp_path)
    with pytest.raises(InputError, match=r"pathmnist was not found as .*pathmnist.npz"):
        rfdlc.load("pathmnist", root=tmp_path)


def test_images_and_labels_of_ones_own_keep_names_and_groups(tmp_path: Path) -> None:
    groups = {
        f"{split}_groups": np.arange(count) // 2
        for split, count in (("train", 9), ("val", 3), ("test", 3))
    }
    path = medmnist(
        tmp_path / "own.npz",
        classes=3,
        names=np.array([b"cat", b"dog", b"eel"]),
        **groups,
    )
    data = rfdlc.load(path)
    assert data.classes.names == ("cat", "dog", "eel")
    assert data.train.groups is not None
    assert data.train.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4]


def opened(path: Path, names: tuple[str, ...] = ("0", "1")) -> Samples:
    return open_samples(path, InputSpec(rfdlc.Classes(names), (4,)))


def test_labels_of_another_length_are_no_labels(tmp_path: Path) -> None:
    np.save(tmp_path / "y.npy", np.arange(9) % 2)
    for name in ("X", "X_test"):
        np.save(tmp_path / f"{name}.npy", features(6))
    assert not opened(tmp_path / "X_test.npy").labelled  # y.npy belongs to X.npy
    with pytest.raises(
        InputError, match=r"X.npy: has x of shape \(6, 4\), y of shape \(9,\)"
    ):
        opened(tmp_path / "X.npy")
    np.savez(tmp_path / "long.npz", x=features(6), ids=np.arange(7))
    with pytest.raises(
        InputError, match=r"long.npz: has x of shape \(6, 4\), ids of shape \(7,\)"
    ):
        opened(tmp_path / "long.npz")


@pytest.mark.parametrize("names", [("0", "1"), ("False", "True")])
def test_labels_that_are_true_or_false(tmp_path: Path, names: tuple[str, ...]) -> None:
    np.savez(
        tmp_path / "set.npz", x=features(4), y=np.array([True, False, False, True])
    )
    assert rfdlc.load(tmp_path / "set.npz", test_fraction=0).train.labels.tolist() == [
        1,
        0,
        0,
        1,
    ]
    assert opened(tmp_path / "set.npz", names).read(range(4)).split.labels.tolist() == [
        1,
        0,
        0,
        1,
    ]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", ["C", "F"])
def test_rows_of_an_npz_are_read_on_demand(
    tmp_path: Path, save: Callable, order: str
) -> None:
    x = np.asarray(RNG.integers(0, 9, (20_000, 200)).astype(np.float32), order=order)  # type: ignore[call-overload]
    save(tmp_path / "set.npz", test_x=x, test_ids=np.arange(20_000))
    tracemalloc.start()
    samples = open_samples(
        tmp_path / "set.npz", InputSpec(rfdlc.Classes(("0", "1")), (200,))
    )
    for start in range(0, 20_000, 500):
        assert (
            samples.read(range(start, start + 500)).split.array
            == x[start : start + 500]
        ).all()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    for rows in (range(19_990, 20_000), range(10, 20)):
        chunk = samples.read(rows).split
        assert (chunk.array == x[rows.start : rows.stop]).all()
        assert list(chunk.ids or ()) == [str(row) for row in rows]
    if order == "C":  # what is stored by column has no rows
        assert peak < 4e6 < x.nbytes


def test_an_npz_that_is_damaged_or_empty(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "set.npz", x=features(3000), y=np.arange(3000) % 2)
    content = bytearray((tmp_path / "set.npz").read_bytes())
    content[20_000:20_100] = bytes(100)
    (tmp_path / "set.npz").write_bytes(content)
    with pytest.raises(
        InputError, match=r"set.npz: cannot be read as numpy arrays, it is damaged"
    ):
        opened(tmp_path / "set.npz").read(range(3000))
    np.savez(tmp_path / "empty.npz", x=features(0))
    assert len(opened(tmp_path / "empty.npz")) == 0


def test_a_table_for_a_model_of_arrays_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "a,b,colour,label\n1,2,red,0\n3,4,blue,1\n"
    )  # 4 features by an encoding of its own
    with pytest.raises(
        InputError,
        match=r"t.csv is a table, but this model was trained on arrays of shape \(4,\)",
    ):
        opened(tmp_path / "t.csv")


def test_names_as_bytes(tmp_path: Path) -> None:
    inputs, labels = np.ones((6, 2), np.float32), np.array(["Möwe", "cat", "cat"] * 2)
    np.savez(tmp_path / "set.npz", x=inputs, y=np.char.encode(labels, "utf-8"))
    data = rfdlc.load(tmp_path / "set.npz", test_fraction=0)
    assert data.classes.names == ("Möwe", "cat")
    assert data.train.labels.tolist() == [0, 1, 1] * 2
    taken = InputSpec(data.classes, (2,))
    assert (
        open_samples(tmp_path / "set.npz", taken).read(range(6)).split.labels.tolist()
        == [0, 1, 1] * 2
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train_labels": np.zeros((21, 14), np.uint8)},
            r"labels have shape \(21, 14\): expected one per sample",
        ),
        (
            {"train_images": np.zeros((21, 28, 28, 28), np.uint8)},
            r"\(21, 28, 28, 28\): expected 1 or 3 channels",
        ),
        ({"train_images": np.zeros((21, 28, 28), np.float32)}, "float32"),
        ({"train_labels": np.zeros((21, 1), np.float32)}, "not integers"),
        ({"train_labels": np.zeros((20, 1), np.uint8)}, "21 inputs, 20 labels"),
        ({"train_labels": np.zeros((21, 1), np.uint8)}, "one class"),
        ({"test_labels": None}, "test: has x, ids but needs both inputs and labels"),
    ],
)
def test_other_medmnist_variants_are_named(
    tmp_path: Path, changes: dict, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        rfdlc.load(medmnist(tmp_path / "chestmnist.npz", **changes))


# -- formats from outside
# --------------------------------------------------------------------------------------


def read_lines(
    path: Path,
    *,
    target: str = "label",
    scale: float = 1.0,
    columns: Sequence[str] = ("a",),
) -> Dataset:
    """A format that the library does not know: one JSON object per line."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    inputs = np.array(
        [[scale * row[column] for column in columns] for row in rows], dtype=np.float32
    )
    names = sorted({row[target] for row in rows})
    return Dataset.of(
        path.stem,
        names,
        {"train": Split(inputs, np.array([names.index(row[target]) for row in rows]))},
    )


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Path]:
    """A file in a format that is registered, until the end of a test."""
    before = list(READERS)
    names = {"mine": lambda root: root / "set.jsonl"}
    register_source(read_lines, names=names, suffixes=[".jsonl"])
    rows = [{"a": i, "b": -i, "kind": "xy"[i % 2]} for i in range(10)]
    (tmp_path / "set.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    yield tmp_path
    READERS[:] = before


def test_a_format_registered_outside_is_read_with_its_options(lines: Path) -> None:
    data = rfdlc.load(
        lines / "set.jsonl", target="kind", scale="2", columns="a, b", test_fraction=0
    )
    assert data.train.array[3].tolist() == [6, -6]
    assert data.classes.names == ("x", "y")
    assert (
        len(rfdlc.load("mine", root=lines, target="kind").test or ()) == 2
    )  # held out as for any other format
    with pytest.raises(
        InputError, match=r"has no option 'targt'.*did you mean 'target'"
    ):
        rfdlc.load(lines / "set.jsonl", targt="kind")
    with pytest.raises(
        InputError,
        match="option scale='big' is not valid: input should be a valid number",
    ):
        rfdlc.load("mine", root=lines, target="kind", scale="big")
    spec = InputSpec(data.classes, (1,))
    with pytest.raises(KeyError, match="label"):  # its own errors come through
        open_samples(lines / "set.jsonl", spec)


def test_a_format_registered_outside_trains_and_predicts(lines: Path) -> None:
    options = {"target": "kind", "columns": "a,b"}
    model = rfdlc.train(
        "mine",
        "ce",
        lines / "run",
        root=lines,
        data_options=options,
        epochs=1,
        device="cpu",
    )
    assert model.input_shape == (2,)


def test_what_is_registered_last_is_asked_first(lines: Path) -> None:
    register_source(
        lambda path: read_lines(path, target="kind", scale=3),
        recognises=lambda path: path.stem == "set",
    )
    assert rfdlc.load(lines / "set.jsonl", test_fraction=0).train.array[1].tolist() == [
        3
    ]


def test_a_data_set_is_shown_in_one_line():
    images, labels = np.zeros((6, 3, 8, 8), np.uint8), np.array([0, 0, 0, 0, 1, 1])
    data = rfdlc.load({"train": (images, labels), "test": (images[:3], labels[3:])})
    assert (
        repr(data)
        == "Dataset('arrays': images (3, 8, 8), 2 classes of 4 to 2 samples, train 6,"
        " test 3)"
    )
    assert (
        repr(rfdlc.Split(images, labels, groups=labels))
        == "Split(6 samples of shape (3, 8, 8), groups)"
    )


def test_numbers_are_no_samples(tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", x=np.float64(3), y=np.int64(1))
    with pytest.raises(InputError, match=r"set\.npz: has x of shape \(\), y of shape"):
        open_samples(tmp_path / "set.npz", InputSpec(rfdlc.Classes(("a", "b")), (4,)))

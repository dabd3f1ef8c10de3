"""CIFAR in its own pickle files, tiny: right labels, the asked-for tail, and nothing in
a file is ever run.
"""

import os
import pickle
import pickletools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rfdlc
from rfdlc.data.readers.longtailed import _matrix, _table
from rfdlc.errors import InputError


def images_of(labels: list[int], start: int) -> np.ndarray:
    """Images that tell their label and their number: the first two bytes of
    each plane.
    """
    data = np.zeros((len(labels), 3072), dtype=np.uint8)
    data[:, 0], data[:, 1], data[:, 2] = labels, np.arange(len(labels)) + start, 7
    data[:, 1024] = 200  # green, first pixel
    return data


def dump(path: Path, protocol: int = 2, **fields: object) -> None:
    with path.open("wb") as file:
        pickle.dump(
            {key.encode(): value for key, value in fields.items()},
            file,
            protocol=protocol,
        )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """CIFAR-10 with 20 training images a class in 5 batches of 40, and 3 test images a
    class.
    """
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 20)).tolist()
    for k in range(5):
        part = labels[40 * k : 40 * k + 40]
        dump(folder / f"data_batch_{k + 1}", data=images_of(part, 40 * k), labels=part)
    test = [c for c in range(10) for _ in range(3)]
    dump(folder / "test_batch", data=images_of(test, 0), labels=test)
    dump(folder / "batches.meta", label_names=[f"kind {c}".encode() for c in range(10)])
    return tmp_path


@pytest.fixture
def hundred(tmp_path: Path) -> Path:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    labels = [c for c in range(100) for _ in range(4)]
    dump(
        folder / "train",
        data=images_of(labels, 0),
        fine_labels=labels,
        coarse_labels=[0] * 400,
    )
    dump(folder / "test", data=images_of(labels[:50], 0), fine_labels=labels[:50])
    dump(folder / "meta", fine_label_names=[f"n{c}".encode() for c in range(100)])
    return tmp_path


def test_labels_follow_their_images(root: Path) -> None:
    data = rfdlc.load("cifar10-lt", root=root, factor=10)
    assert data.classes.counts == tuple(int(20 * 10 ** (-c / 9)) for c in range(10))
    assert data.classes.names[3] == "kind 3"
    assert (data.train.array[:, 0, 0, 0] == data.train.labels).all()
    assert (data.train.array[:, 0, 0, 2] == 7).all()
    assert (data.train.array[:, 1, 0, 0] == 200).all()  # planes: red, green, blue
    assert data.test is not None
    assert np.bincount(data.test.labels).tolist() == [3] * 10
    assert (data.test.array[:, 0, 0, 0] == data.test.labels).all()
    assert data.test.array.flags.writeable  # torch warns of memory that is not
    number = data.train.array[:, 0, 0, 1]
    assert len(np.unique(number)) == len(number)
    assert data.train.ids is not None
    assert [f"data_batch_{n // 40 + 1}/{n % 40}" for n in number] == list(
        data.train.ids
    )


def test_seed_chooses_the_subset_and_step_profile(root: Path) -> None:
    one, again, other = (
        rfdlc.load("cifar10-lt", root=root, factor=10, seed=s) for s in (1, 1, 2)
    )
    assert (
        list(one.train.ids or ())
        == list(again.train.ids or ())
        != list(other.train.ids or ())
    )
    step = rfdlc.load("cifar10-lt", root=root, factor=4, profile="step")
    assert step.classes.counts == (20,) * 5 + (5,) * 5


def test_a_subset_on_disk_is_taken_whole_and_a_shortage_is_said(root: Path) -> None:
    folder = root / "cifar-10-batches-py"
    labels = [
        c
        for c, n in enumerate([int(20 * 10 ** (-c / 9)) for c in range(10)])
        for _ in range(n)
    ]
    for k in range(5):
        part = labels[k::5]
        dump(folder / f"data_batch_{k + 1}", data=images_of(part, 0), labels=part)
    assert len(rfdlc.load("cifar10-lt", root=root, factor=10).train) == len(labels)
    with pytest.warns(
        UserWarning, match=r"too few images for factor 2.*kind 1 15 of 18.*9 in all"
    ):
        data = rfdlc.load("cifar10-lt", root=root, factor=2)
    assert len(data.train) == len(labels)
    assert "too few images" in data.notes[0]


def test_cifar100_and_a_folder_by_its_path(hundred: Path) -> None:
    data = rfdlc.load("cifar100-lt", root=hundred, factor=4)
    assert data.classes.count_array[[0, -1]].tolist() == [4, 1]
    assert len(rfdlc.load(hundred / "cifar-100-python").train) == 400
    assert (
        len(
            rfdlc.load("cifar100-lt", root=hundred / "cifar-100-python", factor=1).train
        )
        == 400
    )


def test_files_of_python_2_and_of_later_protocols(root: Path) -> None:
    for protocol in (0, 1, 2, 3, 4):
        path = root / f"p{protocol}"
        dump(path, protocol, data=images_of([1, 2], 0), labels=[1, 2])
        table = _table(path)
        assert table["labels"] == [1, 2]
        assert (_matrix(table["data"]) == images_of([1, 2], 0)).all()
    # What Python 2 wrote: byte strings as text, numpy under its old name, integers of
    # 64 bits.
    array = np.arange(6, dtype=np.uint8)
    raw = (
        b"\x80\x02}U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01K\x02K\x03\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x06\x00\x01\x02\x03\x04\x05tbs."
    )
    (root / "old").write_bytes(raw)
    assert (_matrix(_table(root / "old")["data"]) == array.reshape(2, 3)).all()


class Payload:
    def __init__(self, call: object, *arguments: object) -> None:
        self.reduced = call, arguments

    def __reduce__(self) -> tuple:
        return self.reduced


@pytest.mark.parametrize("where", ["data_batch_3", "test_batch", "batches.meta"])
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_malicious_pickle_is_refused_and_runs_nothing(
    root: Path, where: str, protocol: int
) -> None:
    mark = root / "owned"
    payloads = [
        (Payload(os.system, f"touch {mark}"), "system"),
        (Payload(eval, f"open({str(mark)!r}, 'w')"), "eval"),
        (Payload(open, str(mark), "w"), "open"),
        (Payload(np.load, str(mark)), "load"),
    ]
    path = root / "cifar-10-batches-py" / where
    for payload, word in payloads:
        dump(path, protocol, data=payload, labels=[0])
        with pytest.raises(
            InputError,
            match=(
                rf"{where}: refused, the pickle asks for .*{word}.*nothing in it"
                r" was run"
            ),
        ):
            rfdlc.load("cifar10-lt", root=root, factor=10)
        assert not mark.exists()


def test_a_payload_inside_an_array_of_objects_is_refused(root: Path) -> None:
    mark = root / "owned"
    objects = np.array([Payload(os.system, f"touch {mark}")], dtype=object)
    dump(root / "cifar-10-batches-py" / "data_batch_1", data=objects, labels=[0])
    with pytest.raises(InputError, match="refused"):
        rfdlc.load("cifar10-lt", root=root)
    assert not mark.exists()


def test_a_dtype_that_sets_its_own_state_is_never_built(root: Path) -> None:
    """A dtype of one object field whose flags say that it holds none: numpy would
    follow the bytes as addresses.
    """

    class Dtype:
        def __reduce__(self) -> tuple:
            state = (3, "|", None, ("f",), {"f": (np.dtype(object), 0)}, 8, 1, 0)
            return np.dtype, ("V8", False, True), state

    class Array:
        def __reduce__(self) -> tuple:
            reconstruct = np.empty(0).__reduce__()[0]
            return (
                reconstruct,
                (np.ndarray, (0,), b"b"),
                (1, (1,), Dtype(), False, b"\x41" * 8),
            )

    path = root / "cifar-10-batches-py" / "data_batch_1"
    dump(path, data=Array(), labels=[0])
    assert _matrix(_table(path)["data"]) is None
    with pytest.raises(InputError, match="data_batch_1: expected 'data' as uint8"):
        rfdlc.load("cifar10-lt", root=root)


@pytest.mark.parametrize(
    "shape", [(-1, -8), (2, 3), (8,), (0, 0), (True, 8), (10**30, 0)]
)
def test_an_array_whose_shape_does_not_fit_its_bytes_is_not_made(
    root: Path, shape: tuple
) -> None:
    class Array:
        def __reduce__(self) -> tuple:
            state = (1, shape, np.dtype(np.uint8), False, b"\x07" * 8)
            return np.empty(0).__reduce__()[0], (np.ndarray, (0,), b"b"), state

    dump(root / "array", data=Array())
    found = _matrix(_table(root / "array")["data"])
    assert found is None or found.shape == (1, 8)


def test_a_small_file_cannot_ask_for_much_memory(root: Path) -> None:
    """A long text that is encoded many times stays one text until it is used: it would
    be 5 GB.
    """
    text = b"X" + (100_000).to_bytes(4, "little") + b"a" * 100_000 + b"q\x00"
    encoded = b"c_codecs\nencode\nh\x00U\x06latin1\x86R"
    (root / "large").write_bytes(
        b"\x80\x02}(U\x05names](" + text + encoded * 50_000 + b"eu."
    )
    assert len(_table(root / "large")["names"]) == 50_001
    dump(root / "cifar-10-batches-py" / "batches.meta", label_names=[b"a" * 2000] * 10)
    with pytest.raises(InputError, match=r"batches.meta: expected 10 class names"):
        rfdlc.load("cifar10-lt", root=root)


def outcome(content: bytes) -> str:
    """The word read, or the message for the user; any other error is a failure."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "batch"
        path.write_bytes(content)
        try:
            _matrix(_table(path).get("data"))
        except InputError as error:
            return str(error).removeprefix(str(path))
    return "read"


VALID = {
    protocol: pickle.dumps(
        {b"data": images_of([1, 2], 0)[:, :40].copy(), b"labels": [1, 2], "x": None},
        protocol,
    )
    for protocol in (0, 1, 2, 3, 4)
}


@settings(max_examples=300)
@given(
    st.sampled_from(sorted(VALID)),
    st.lists(st.tuples(st.integers(0), st.integers(0, 255)), max_size=8),
)
def test_damage_is_an_error_of_one_line(
    protocol: int, changes: list[tuple[int, int]]
) -> None:
    content = bytearray(VALID[protocol])
    assert outcome(bytes(content)) == "read"
    for place, value in changes:
        content[place % len(content)] = value
    assert outcome(bytes(content)).startswith(
        ("read", ": the pickle", ": refused", ": expected a dict")
    )


INSTRUCTIONS = st.sampled_from(
    [opcode.code.encode("latin-1") for opcode in pickletools.opcodes]
)


@settings(max_examples=500)
@given(
    st.lists(
        INSTRUCTIONS
        | st.binary(max_size=6)
        | st.sampled_from([b"K\x01", b"q\x00", b"h\x00"]),
        max_size=30,
    )
)
def test_any_program_is_an_error_of_one_line(program: list[bytes]) -> None:
    content = b"\x80\x02" + b"".join(program) + b"."
    assert outcome(content).startswith(
        ("read", ": the pickle", ": refused", ": expected a dict")
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"data": np.zeros((2, 3071), np.uint8), "labels": [0, 1]},
            r"expected 'data' as uint8 .* \(2, 3071\)",
        ),
        (
            {"data": np.zeros((2, 3072), np.float32), "labels": [0, 1]},
            "got something else",
        ),
        ({"data": [1, 2], "labels": [0, 1]}, "got something else"),
        ({"labels": [0, 1]}, "got something else"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [0]}, "expected 2 integers"),
        (
            {"data": np.zeros((2, 3072), np.uint8), "labels": [0, "a"]},
            "expected 2 integers",
        ),
        (
            {"data": np.zeros((2, 3072), np.uint8), "labels": [0, 10]},
            "the label of image 1 is out of range: expected 0 to 9",
        ),
    ],
)
def test_wrong_content_is_named(root: Path, fields: dict, message: str) -> None:
    dump(root / "cifar-10-batches-py" / "data_batch_2", **fields)
    with pytest.raises(InputError, match=f"data_batch_2: .*{message}"):
        rfdlc.load("cifar10-lt", root=root)


@pytest.mark.parametrize("keep", [0, 1, 100, 5000])
def test_a_truncated_pickle_is_named(root: Path, keep: int) -> None:
    path = root / "cifar-10-batches-py" / "data_batch_2"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(
        InputError, match="data_batch_2: the pickle is truncated or damaged"
    ):
        rfdlc.load("cifar10-lt", root=root)


def test_a_pickle_of_something_else_and_wrong_names(root: Path) -> None:
    folder = root / "cifar-10-batches-py"
    dump(folder / "batches.meta", label_names=[b"one"])
    with pytest.raises(InputError, match=r"batches.meta: expected 10 class names"):
        rfdlc.load("cifar10-lt", root=root)
    (folder / "batches.meta").write_bytes(pickle.dumps([1]))
    with pytest.raises(InputError, match="expected a dict in the pickle, got list"):
        rfdlc.load("cifar10-lt", root=root)


def test_a_missing_folder_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(
        InputError,
        match=r"cifar100-lt was not found: expected .* train, test, meta in .*--root",
    ):
        rfdlc.load("cifar100-lt", root=tmp_path)

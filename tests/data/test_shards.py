"""WebDataset tars and Parquet files of images: the samples of the folder they were made
from, and damaged ones.
"""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet

import rfdlc
from rfdlc.data.dataset import Split
from rfdlc.data.images import ImageFiles
from rfdlc.data.loader import by_reader, readers_of
from rfdlc.data.opening import open_samples
from rfdlc.data.readers import image_files
from rfdlc.data.readers.shards import find_images, image_bytes
from rfdlc.data.samples import InputSpec
from rfdlc.data.splits import open_splits
from rfdlc.data.streamed import StreamedLoader
from rfdlc.errors import InputError

NAMES = ("ant", "bee", "cow")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for split, count in (("train", 8), ("test", 2)):
        for name in NAMES:
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{i}.png")
    return root


def members(folder: Path, split: str) -> list[tuple[str, Path]]:
    return [
        (name, file)
        for name in NAMES
        for file in sorted((folder / split / name).glob("*.png"))
    ]


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def pack(folder: Path, out: Path, label: str = "cls", per_shard: int = 5) -> Path:
    """Shards of five, as WebDataset writes them: an image, and its label in a file of
    the same key.
    """
    out.mkdir()
    for split in ("train", "test"):
        found = members(folder, split)
        for number, start in enumerate(range(0, len(found), per_shard)):
            with tarfile.open(out / f"{split}-{number:03d}.tar", "w") as tar:
                for i, (name, file) in enumerate(
                    found[start : start + per_shard], start
                ):
                    key = f"{name}/{i:05d}" if label == "folder" else f"{i:05d}"
                    add(tar, f"{key}.png", file.read_bytes())
                    if label == "cls":
                        add(tar, f"{key}.cls", str(NAMES.index(name)).encode())
                    elif label == "json":
                        add(
                            tar,
                            f"{key}.json",
                            json.dumps({"label": name, "camera": 3}).encode(),
                        )
    if label == "cls":
        (out / "classes.txt").write_text("\n".join(NAMES))
    return out


def pack_parquet(folder: Path, out: Path) -> Path:
    """As Hugging Face writes images: a struct of bytes and path, and names of classes
    in the metadata.
    """
    out.mkdir()
    features = {
        "image": {"_type": "Image"},
        "label": {"names": list(NAMES), "_type": "ClassLabel"},
    }
    for split in ("train", "test"):
        found = members(folder, split)
        for number, start in enumerate(range(0, len(found), 11)):
            part = found[start : start + 11]
            images = [
                {"bytes": file.read_bytes(), "path": file.name} for _, file in part
            ]
            table = pa.table(
                {"image": images, "label": [NAMES.index(name) for name, _ in part]}
            )
            table = table.replace_schema_metadata(
                {"huggingface": json.dumps({"info": {"features": features}})}
            )
            parquet.write_table(
                table, out / f"{split}-{number:05d}-of-00003.parquet", row_group_size=4
            )
    return out


def same(one: rfdlc.Dataset, other: rfdlc.Dataset) -> None:
    assert one.classes == other.classes
    assert one.splits.keys() == other.splits.keys()
    for split, own in one.splits.items():
        assert np.array_equal(own.array, other.splits[split].array)
        assert np.array_equal(own.labels, other.splits[split].labels)


@pytest.mark.parametrize("label", ["cls", "json", "folder", "parquet"])
def test_the_samples_are_those_of_the_folder(
    folder: Path, tmp_path: Path, label: str
) -> None:
    out = tmp_path / "shards"
    pack_parquet(folder, out) if label == "parquet" else pack(folder, out, label)
    expected, data = rfdlc.load(folder, image_size=16), rfdlc.load(out, image_size=16)
    same(data, expected)
    assert len(set(data.train.ids or ())) == 24
    classes = expected.classes
    found = open_samples(out, InputSpec(classes, (3, 16, 16)))
    assert np.array_equal(found.read(range(6)).split.array, expected.test.array)  # type: ignore[union-attr]
    assert np.array_equal(found.labels, expected.test.labels)  # type: ignore[union-attr]
    splits, names = open_splits(out, InputSpec(rfdlc.Classes(("0", "1")), (3, 16, 16)))
    assert {split: len(own) for split, own in splits.items()} == {
        "train": 24,
        "test": 6,
    }
    assert names == NAMES


def test_one_tar_alone_has_a_test_split_held_out(folder: Path, tmp_path: Path) -> None:
    out = pack(folder, tmp_path / "shards", "folder", per_shard=24)
    data = rfdlc.load(out / "train-000.tar")
    assert (len(data.train), len(data.test or ())) == (18, 6)
    assert next(iter(data.train.ids or ())) == "train-000.tar/ant/00000.png"


def test_shards_that_do_not_fit_are_streamed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tars, tables = (
        pack(folder, tmp_path / "tars"),
        pack_parquet(folder, tmp_path / "tables"),
    )
    monkeypatch.setattr(image_files, "FITS_IN_MEMORY", 0)
    given: dict[str, Any] = {"image_size": 16, "fit": "stretch"}
    expected, data = rfdlc.load(folder, **given), rfdlc.load(tars, **given)
    with pytest.raises(
        InputError, match=r"cannot be read at random: name a folder .*data.cache=FOLDER"
    ):
        rfdlc.load(tables, **given)
    cached = [
        rfdlc.load(source, **given, cache=tmp_path / "cache")
        for source in (folder, tables)
    ]
    for pair in ((expected, data), cached):
        assert isinstance(pair[1].train.inputs, ImageFiles)
        loaders = [
            StreamedLoader(own.train, own.normalisation, workers=0, batch_size=5)
            for own in pair
        ]
        for one, two in zip(*(loader.in_order() for loader in loaders), strict=True):
            assert all(map(torch.equal, one, two))
    assert np.array_equal(
        data.train.first, expected.train.first
    )  # ends of files are compared


# -- readers
# --------------------------------------------------------------------------------------


def test_each_rank_reads_its_own_shards_in_the_order_of_one_process(
    folder: Path, tmp_path: Path
) -> None:
    packed = pack(folder, tmp_path / "tars", "folder", per_shard=4)
    root, names, labels, where = find_images(packed, None, "train", NAMES)
    split = Split(ImageFiles(root, names, 16, packed=where), labels)
    options: dict[str, Any] = {"workers": 0, "seeds": (3,)}
    alone = StreamedLoader(split, batch_size=8, **options)
    ranks = [
        StreamedLoader(split, batch_size=4, rank=rank, world_size=2, **options)
        for rank in (0, 1)
    ]
    epochs = []
    for epoch in (1, 2):
        order = alone.draw_order(epoch)[0]
        assert sorted(order.tolist()) == list(range(24))
        read = [set[int](), set[int]()]
        for rank, loader in enumerate(ranks):
            assert torch.equal(loader.draw_order(epoch)[0], order)
            read[rank] = {
                int(where.places[i, 0])
                for place in loader.slices
                for i in order[place].tolist()
            }
        assert not read[0] & read[1]
        assert len(read[0] | read[1]) == 6
        epochs.append(order)
    assert not torch.equal(*epochs)


def test_readers_of_unequal_shards() -> None:
    shards = np.repeat(np.arange(7), [30, 3, 9, 22, 1, 27, 8])
    reader, count = readers_of(shards, 12, seed=1)
    assert np.bincount(reader).tolist() == [
        33,
        35,
        32,
    ]  # 30 + 3, 27 + 8, 22 + 9 + 1; 4 or 6 readers would have very different numbers
    assert all(len(set(reader[shards == one])) == 1 for one in range(7))
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    for drawn in (
        order,
        torch.randint(0, 100, (100,), generator=torch.Generator().manual_seed(1)),
    ):
        found = by_reader(drawn, torch.from_numpy(reader), count, 12)
        assert torch.equal(found.sort().values, drawn.sort().values)
        for step in range(int(np.bincount(reader[drawn]).min()) // 4):
            assert (
                reader[found[12 * step : 12 * (step + 1)]].tolist()
                == np.repeat(np.arange(3), 4).tolist()
            )
    equal = np.repeat(np.arange(8), 5)
    assert readers_of(equal, 16)[1] == 8
    assert len({tuple(readers_of(equal, 4, seed)[0]) for seed in range(3)}) == 3


# -- what is refused
# --------------------------------------------------------------------------------------


def test_a_truncated_tar_is_named_and_training_does_not_start(
    folder: Path, tmp_path: Path
) -> None:
    """Wherever it is cut: in an image, in a header, between members, and in the zeros
    at the end.
    """
    out = pack(folder, tmp_path / "shards")
    file = out / "train-002.tar"
    content = file.read_bytes()
    with tarfile.open(file) as tar:
        last = tar.getmembers()[-1]
    for length in (
        700,
        512,
        last.offset,
        last.offset + 100,
        last.offset + 1024,
        last.offset + 1536,
    ):
        file.write_bytes(content[:length])
        with pytest.raises(
            InputError, match=r"train-002.tar: is damaged or truncated.*pack it again"
        ):
            rfdlc.train(out, "ce", tmp_path / "run", data_options={"skip_broken": True})
    assert not (tmp_path / "run").exists()
    (out / "train-003.tar").write_bytes(b"x" * 2000)
    with pytest.raises(
        InputError, match=r"train-002.tar: .*; .*train-003.tar: is damaged"
    ):
        rfdlc.load(out)
    file.write_bytes(content + content)
    with pytest.raises(InputError, match=r"train-002.tar: holds more after its end"):
        rfdlc.load(out)
    file.write_bytes(b"")
    with pytest.raises(
        InputError, match=r"train-002.tar: is damaged or truncated \(empty file\)"
    ):
        rfdlc.load(out)


def broken_tar(kind: str, tar: tarfile.TarFile, image: bytes) -> None:
    link = tarfile.TarInfo("a.png")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    add(tar, "0.png", image)
    add(tar, "0.cls", {"number": b"123456789", "sparse": b"10000"}.get(kind, b"1"))
    if kind == "link":
        tar.addfile(link)
    elif kind == "upwards":
        add(tar, "../1.png", image)
    elif kind == "absolute":
        add(tar, "/1.png", image)
    elif kind == "two":
        add(tar, "0.jpg", image)
    elif kind == "large":
        add(tar, "1.cls", bytes(2 << 20))
    elif kind == "alone":
        add(tar, "1.cls", b"0")
    elif kind == "unlabelled":
        add(tar, "1.png", image)
    elif kind == "image":
        add(tar, "1.png", image[:300])
        add(tar, "1.cls", b"0")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "link",
            r"a.tar: 'a.png' is a link, a device or a sparse file, which is refused",
        ),
        ("upwards", r"a.tar: the name '../1.png' is absolute or leaves the tar"),
        ("absolute", r"a.tar: the name '/1.png' is absolute or leaves the tar"),
        ("two", r"a.tar: the sample '0' has two images, '0.png' and '0.jpg'"),
        ("large", r"a.tar: 1.cls has 2,097,152 bytes: expected at most 1,048,576"),
        ("alone", r"a.tar: 1 samples have a label but no image, the first is '/1'"),
        ("unlabelled", r"a.tar/1.png has no label, .*skip_broken"),
        ("image", r"a.tar/1.png: the image is truncated or corrupt"),
        (
            "number",
            (
                r"the label 123456789 is too large: expected class numbers from 0 on,"
                r" less than 1,000,000"
            ),
        ),
        (
            "sparse",
            (
                r"the label 10000 is too large for 1 samples: expected class numbers"
                r" from 0 on, less than 10,000"
            ),
        ),
    ],
)
def test_what_is_wrong_in_a_tar(
    folder: Path, tmp_path: Path, kind: str, message: str
) -> None:
    image = next((folder / "train" / "ant").glob("*.png")).read_bytes()
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        broken_tar(kind, tar, image)
    with pytest.raises(InputError, match=message):
        rfdlc.load(tmp_path / "a.tar", test_fraction=0)


def test_labels_beside_other_metadata(folder: Path, tmp_path: Path) -> None:
    """A label file comes before fields of JSON, unless one is asked for; JSON without a
    label is not one.
    """
    image = next((folder / "train" / "ant").glob("*.png")).read_bytes()
    with (
        tarfile.open(tmp_path / "both.tar", "w") as both,
        tarfile.open(tmp_path / "plain.tar", "w") as plain,
    ):
        for name in ("ant", "bee"):
            add(both, f"{name}/1.cls", name[1:].encode())
            for tar, fields in (
                (both, {"label": "c", "camera": name[:1]}),
                (plain, {"camera": 8}),
            ):
                add(tar, f"{name}/1.png", image)
                add(tar, f"{name}/1.json", json.dumps(fields).encode())

    def names(file: str, **given: Any) -> tuple[str, ...]:
        return rfdlc.load(tmp_path / file, test_fraction=0, **given).classes.names

    assert names("both.tar") == ("ee", "nt")
    assert names("both.tar", target="camera") == ("a", "b")
    assert names("plain.tar") == ("ant", "bee")


def test_class_names_are_those_of_the_label_column(
    folder: Path, tmp_path: Path
) -> None:
    image = next((folder / "train" / "ant").glob("*.png")).read_bytes()
    kinds = {"fine_label": ["x", "y"], "coarse_label": ["u", "v"]}
    features = {
        name: {"_type": "ClassLabel", "names": names} for name, names in kinds.items()
    }
    columns = {
        "image": [image] * 4,
        "fine_label": [0, 1, 0, 1],
        "coarse_label": [0, 0, 1, 1],
        "age": [0, 1, 2, 3],
    }
    known = {"huggingface": json.dumps({"info": {"features": features}})}
    parquet.write_table(
        pa.table(columns).replace_schema_metadata(known), tmp_path / "a.parquet"
    )
    for target, names in {**kinds, "age": ["0", "1", "2", "3"]}.items():
        found = rfdlc.load(
            tmp_path / "a.parquet", target=target, test_fraction=0
        ).classes.names
        assert list(found) == names
        assert (
            open_splits(
                tmp_path / "a.parquet",
                InputSpec(rfdlc.Classes(("0", "1")), (3, 16, 16)),
                target=target,
            )[1]
            == found
        )
    with pytest.raises(
        InputError, match=r"no sample has a label; .* name one with target"
    ):
        rfdlc.load(tmp_path / "a.parquet", test_fraction=0)


def test_a_damaged_parquet_file_is_named(folder: Path, tmp_path: Path) -> None:
    out = pack_parquet(folder, tmp_path / "tables")
    file = out / "train-00001-of-00003.parquet"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(
        InputError, match=r"train-00001-of-00003.parquet: cannot be read as Parquet"
    ):
        rfdlc.load(out)
    first = next((folder / "train").rglob("*.png")).read_bytes()
    parquet.write_table(
        pa.table({"image": [first, b"", None], "label": [0, 1, 1]}),
        tmp_path / "a.parquet",
    )
    with pytest.raises(InputError, match=r"a.parquet, row 2: the image is missing"):
        rfdlc.load(tmp_path / "a.parquet")
    parquet.write_table(
        pa.table({"image": [b"\x89PNG nothing"], "label": [0]}), tmp_path / "a.parquet"
    )
    with pytest.raises(
        InputError, match=r"a.parquet/0: pillow cannot read this as an image"
    ):
        rfdlc.load(tmp_path / "a.parquet")


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary(6)])
def test_a_table_with_bytes_that_are_no_images_is_a_table(
    tmp_path: Path, kind: pa.DataType
) -> None:
    """Checksums are left out, and texts that were written as bytes stay texts."""
    rng, rows = np.random.default_rng(0), 60
    labels = [NAMES[i % 3] for i in range(rows)]
    columns = {
        "checksum": pa.array([b"\xff\xfe" + rng.bytes(4) for _ in range(rows)], kind),
        "height": rng.normal(size=rows),
        "colour": pa.array(
            [(b"red", b"blue")[i % 2] for i in range(rows)], pa.binary()
        ),
        "label": pa.array([name.encode() for name in labels], pa.binary()),
    }
    parquet.write_table(pa.table(columns), tmp_path / "table.parquet")
    data = rfdlc.load(tmp_path / "table.parquet", test_fraction=0)
    assert (data.kind, data.classes.names) == ("features", NAMES)
    assert data.encoder is not None
    assert [code.name for code in data.encoder.columns] == ["height", "colour"]
    assert data.encoder.columns[1].categories == ("blue", "red")
    assert (
        "column 'checksum' holds bytes that are neither images nor text, and was"
        " left out" in data.notes
    )
    parquet.write_table(
        pa.table({k: columns[k] for k in ("checksum", "label")}),
        tmp_path / "bytes.parquet",
    )
    with pytest.raises(
        InputError, match=r"no column is left to learn from.*'checksum' holds bytes"
    ):
        rfdlc.load(tmp_path / "bytes.parquet")


def test_images_beside_other_bytes_are_found(folder: Path, tmp_path: Path) -> None:
    """Also behind a column of other bytes, and where the first image is missing or
    damaged.
    """
    files = sorted((folder / "train").rglob("*.png"))
    images = [file.read_bytes() for file in files]
    table = {
        "hash": [b"\xff\xfe" + bytes([i]) for i in range(len(files))],
        "picture": [b"\0damaged", *images[1:]],
    }
    table |= {"label": [file.parent.name for file in files]}
    parquet.write_table(pa.table(table), tmp_path / "images.parquet")
    assert image_bytes(tmp_path / "images.parquet") == "picture"
    data = rfdlc.load(tmp_path / "images.parquet", skip_broken=True)
    assert data.kind == "images"
    assert len(data.train) + len(data.test) == len(files) - 1

"""Images in shards: WebDataset tars, and Parquet files with encoded images. Nothing is
extracted to disk.
"""

import json
import re
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from rfdlc.data.dataset import Dataset, choose_split
from rfdlc.data.images import ImageFiles, Packed, PackedText
from rfdlc.data.reader import DataReader, Listing, Place, Request
from rfdlc.data.readers.image_files import (
    Entry,
    Fit,
    ImageOptions,
    Interpolation,
    is_image,
    open_files,
    read_images,
)
from rfdlc.data.rows import TARGETS, open_table_rows
from rfdlc.data.samples import Samples
from rfdlc.errors import InputError, expect, listing
from rfdlc.formats.files import parse_json
from rfdlc.formats.tables import PARQUET, bounded, is_table, reading, split_name
from rfdlc.probabilities.classes import numbered
from rfdlc.progress import track

TAR = (".tar",)
CLASS_FILE = "classes.txt"  # beside the shards: names of numbered classes, one per line
LABELS, LARGEST_LABEL = (".cls", ".json"), 1 << 20  # bytes
END = 2 * tarfile.BLOCKSIZE  # zeros at the end of every tar
ROWS = 256  # of a Parquet file at a time
# How files begin that images are stored in: JPEG, PNG, BMP, GIF, WebP, TIFF, PPM.
SIGNATURES = (
    b"\xff\xd8\xff",
    b"\x89PNG",
    b"BM",
    b"GIF8",
    b"RIFF",
    b"II*\0",
    b"MM\0*",
    b"P4",
    b"P5",
    b"P6",
)


class Shards(NamedTuple):
    """Samples of one split in the order of its shards; a label is a text, a number, or
    None where there is none.
    """

    names: list[str]
    labels: list[Any]
    packed: Packed


def is_tars(path: Path) -> bool:
    return any(shard_files(path, TAR).values())


def holds_shards(path: Path) -> bool:
    """Whether there are tars, or Parquet files of which the first has a column of
    encoded images.
    """
    files = next(filter(None, shard_files(path, PARQUET).values()), None)
    return is_tars(path) or (files is not None and image_bytes(files[0]) is not None)


def shard_files(path: Path, suffixes: Sequence[str]) -> dict[str, list[Path]]:
    """Shards by split, by the folder that they are in or the first word of their names;
    all are `train` without.

    Where some of them name a split, the others are under "".
    """
    if not path.is_dir():
        return {
            "train": (
                [path] if path.is_file() and path.suffix.lower() in suffixes else []
            )
        }
    folders = [
        path,
        *(
            folder
            for folder in path.iterdir()
            if folder.is_dir() and split_name(folder.name)
        ),
    ]
    found = sorted(
        file
        for folder in folders
        for suffix in suffixes
        for file in folder.glob(f"*{suffix}")
    )
    splits: dict[str | None, list[Path]] = {}
    for file in (file for file in found if not file.name.startswith((".", "_"))):
        word = re.match(r"[A-Za-z]*", file.name)
        split = (
            split_name(file.parent.name)
            if file.parent != path
            else split_name(word[0] if word else "")
        )
        splits.setdefault(split, []).append(file)
    return {
        split or ("train" if len(splits) == 1 else ""): files
        for split, files in splits.items()
    }


def read(
    place: Place,
    *,
    target: str | None = None,
    image_size: PositiveInt | None = None,
    fit: Fit = "auto",
    interpolation: Interpolation = "bilinear",
    cache: Path | None = None,
    skip_broken: bool = False,
) -> Dataset:
    """WebDataset tars, with labels `KEY.cls`, the field `target` of `KEY.json`, or else
    the folder of an image.

    Or Parquet files with a column of encoded images, as Hugging Face writes them, and
    the label column `target`.
    """
    path = place.path
    splits = open_shards(path, target, split=None)
    named = class_names_of(path, target)
    broken = list[str]()
    listed, packed, labels = dict[str, list[Entry]](), dict[str, Packed](), list[Any]()
    for split, found in splits.items():
        missing = [
            name
            for name, label in zip(found.names, found.labels, strict=True)
            if label is None
        ]
        broken += [
            f"{path}: {name} has no label, or its label cannot be read"
            for name in missing
        ]
        usable = [i for i, label in enumerate(found.labels) if label is not None]
        listed[split] = [
            Entry(found.names[i], _named(found.labels[i], named)) for i in usable
        ]
        packed[split] = found.packed[np.array(usable, dtype=np.int64)]
        labels += [found.labels[i] for i in usable]
    expect(
        labels,
        f"{path}: no sample has a label; where several columns or fields may be it,"
        " name one with target",
    )
    names, root = (
        _class_names(path, labels, named, len(labels)),
        (path if path.is_dir() else path.parent).resolve(),
    )
    counts = [f"{len(part.packed.files)} of {split}" for split, part in splits.items()]
    notes = [f"shards: {', '.join(counts)}"]
    how = ImageOptions(image_size, fit, interpolation, cache, skip_broken)
    data = read_images(
        path.stem, root, listed, names, how, notes, broken, packed=packed
    )
    inside = (
        isinstance(data.train.inputs, ImageFiles)
        and cache is None
        and packed["train"].column
    )
    large = (
        f"{path}: the decoded images do not fit into memory, and rows of Parquet files"
        " cannot be read at random"
    )
    expect(
        not inside,
        f"{large}: name a folder for them with cache (data.cache=FOLDER), or a smaller"
        " image_size",
    )
    return data


def open_shards(path: Path, target: str | None, split: str | None) -> dict[str, Shards]:
    """The samples of every split, or of one; raises for shards that are damaged, and
    names all of them.
    """
    tars = is_tars(path)
    files = shard_files(path, TAR if tars else PARQUET)
    unclear = (
        f"{path}: {listing((file.name for file in files.get('', ())), 3)} belong to no"
        " split, but others do"
    )
    expect(
        "" not in files,
        f"{unclear}: expected names such as train-000.tar and test-000.tar",
    )
    wanted = {split: files[split]} if split else files
    return {
        name: _indexed(own, path if path.is_dir() else path.parent, target, tars)
        for name, own in wanted.items()
    }


def find_images(
    path: Path, target: str | None, split: str | None, class_names: Sequence[str]
) -> tuple[Path, PackedText, NDArray[np.int64], Packed]:
    """Images to predict: root, names, labels (-1: none), and where the images lie."""
    chosen = choose_split(
        str(path), shard_files(path, TAR if is_tars(path) else PARQUET), split
    )
    found = open_shards(path, target, chosen)[chosen]
    named, index = (
        class_names_of(path, target),
        {name: i for i, name in enumerate(class_names)},
    )
    labels = [index.get(_named(label, named), -1) for label in found.labels]
    root = (path if path.is_dir() else path.parent).resolve()
    return root, PackedText(found.names), np.array(labels, dtype=np.int64), found.packed


def open_images(place: Place, request: Request) -> Samples:
    """Images of one split; for a model of other samples, the rows of a table."""
    path, spec = place.path, request.spec
    if not spec.of_images and is_table(path):
        return open_table_rows(place, request)
    root, names, labels, packed = find_images(
        path, spec.target, request.split, spec.classes.names
    )
    return open_files(root, names, labels, spec, request.skip_broken, packed)


def list_splits(place: Place, request: Request) -> Listing:
    """The splits, and the names of all classes in them."""
    path, target = place.path, request.spec.target
    splits = open_shards(path, target, split=None)
    labels = [
        label
        for shards in splits.values()
        for label in shards.labels
        if label is not None
    ]
    names = _class_names(path, labels, class_names_of(path, target))
    return Listing([*splits], names)


def class_names_of(path: Path, target: str | None) -> list[str]:
    """Names of numbered classes: of `classes.txt`, or as Hugging Face keeps them; none
    where they are not known.
    """
    file = (path if path.is_dir() else path.parent) / CLASS_FILE
    if file.is_file():
        return [
            line.strip()
            for line in file.read_text("utf-8-sig").splitlines()
            if line.strip()
        ]
    parquet = next(filter(None, shard_files(path, PARQUET).values()), [])
    with suppress(KeyError, TypeError, AttributeError, ValueError, InputError):
        features = (
            parse_json(_schema(parquet[0]).metadata[b"huggingface"])["info"]["features"]
            if parquet
            else {}
        )
        labels = [own for name, own in features.items() if is_label(name, target)]
        return [str(name) for name in labels[0]["names"]] if len(labels) == 1 else []
    return []


def is_label(name: str, target: str | None) -> bool:
    """Whether a column or field holds labels: the one that is asked for, or one with a
    usual name.
    """
    return name == target if target else name.lower() in TARGETS


def _class_names(
    path: Path, labels: Sequence[Any], named: Sequence[str], samples: int | None = None
) -> list[str]:
    """Of numbers, those that are given or the numbers up to the largest; of texts, all
    of them.
    """
    if not labels or not all(isinstance(label, int) for label in labels):
        return sorted({_named(label, named) for label in labels})
    most = max(labels)
    large = (
        f"{path}: the label {most} is too large: expected class numbers from 0 on,"
        f" below {len(named)}"
    )
    expect(not named or most < len(named), f"{large}, the number of class names")
    return list(named) or numbered(most, f"{path}: ", samples)


def _named(label: Any, names: Sequence[str]) -> str:
    return (
        names[label]
        if isinstance(label, int) and 0 <= label < len(names)
        else str(label)
    )


def _indexed(
    files: Sequence[Path], root: Path, target: str | None, tars: bool
) -> Shards:
    names, labels, places, wrong = (
        list[str](),
        list[Any](),
        list[tuple[int, ...]](),
        list[str](),
    )
    column = "" if tars else str(image_bytes(files[0]))
    for number, file in enumerate(track(files, "Reading shards")):
        try:
            for name, label, *place in (
                _tar_samples(file, target) if tars else _rows(file, column, target)
            ):
                names.append(f"{file.relative_to(root).as_posix()}/{name}")
                labels.append(label)
                places.append((number, *place))
        except InputError as error:
            wrong.append(str(error))
    expect(
        not wrong,
        "; ".join(wrong[:10])
        + (f"; ... ({len(wrong)} in all)" if len(wrong) > 10 else ""),
    )
    return Shards(
        names,
        labels,
        Packed(tuple(files), np.array(places, np.int64).reshape(-1, 4), column),
    )


# -- tars
# --------------------------------------------------------------------------------------


def _tar_samples(
    file: Path, target: str | None
) -> Iterator[tuple[str, Any, int, int, int]]:
    """Name, label, 0, first byte and size of every image."""
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, Any] = {}
    with file.open("rb") as opened:
        for name, start, size in _members(file):
            folder, _, base = name.rpartition("/")
            key, suffix = f"{folder}/{base.split('.')[0]}", Path(base).suffix.lower()
            if is_image(base):
                both = (
                    f"the sample {key.lstrip('/')!r} has two images,"
                    f" {images.get(key, ('',))[0]!r} and {name!r}"
                )
                expect(key not in images, f"{file}: {both}: expected one per sample")
                images[key] = name, start, size
            elif suffix in LABELS:
                expect(
                    size <= LARGEST_LABEL,
                    f"{file}: {name} has {size:,} bytes: expected at most"
                    f" {LARGEST_LABEL:,}",
                )
                opened.seek(start)
                found = _label(opened.read(size), suffix, target)
                if suffix == ".json" and not target and found is None:
                    continue  # other metadata
                if labels.setdefault(key, found) is None or suffix == (
                    ".json" if target else ".cls"
                ):
                    labels[key] = found
    alone = sorted(labels.keys() - images.keys())
    expect(
        not alone,
        f"{file}: {len(alone)} samples have a label but no image, the first is"
        f" {''.join(alone[:1])!r}",
    )
    for key, (name, start, size) in images.items():
        folder = name.rpartition("/")[0].rpartition("/")[2]
        yield name, labels.get(key) if labels else folder or None, 0, start, size


def _members(file: Path) -> Iterator[tuple[str, int, int]]:
    """Name, first byte and size of the regular files; raises where the tar is damaged
    or holds anything but files.
    """
    damaged = f"{file}: is damaged or truncated"
    try:
        with tarfile.open(file, "r:") as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # or all of them would stay in memory
                name = member.name.removeprefix("./")
                if member.isdir() or name.rpartition("/")[2].startswith((".", "__")):
                    continue
                plain = member.isreg() and not member.issparse()
                refused = (
                    "is a link, a device or a sparse file, which is refused: pack its"
                    " content"
                )
                expect(plain, f"{file}: {name!r} {refused}")
                leaves = name.startswith(("/", "\\")) or ".." in name.split("/")
                refused = "is absolute or leaves the tar, which is refused: rename it"
                expect(not leaves, f"{file}: the name {name!r} {refused}")
                yield name, member.offset_data, member.size
            end = tar.offset
        with file.open("rb") as opened:
            opened.seek(end)
            rest, zero = opened.read(END), True
            while zero and (more := opened.read(1 << 20)):
                zero = not any(more)
    except InputError:
        raise
    except Exception as error:  # a damaged tar can fail in any way
        raise InputError(
            f"{damaged} ({error}): copy or pack it again (compressed tars are not read)"
        ) from None
    expect(
        len(rest) == END and not any(rest),
        f"{damaged} after {end:,} bytes: copy or pack it again",
    )
    expect(
        zero,
        f"{file}: holds more after its end, as tars that were concatenated do: pack one"
        " tar of them",
    )


def _label(content: bytes, suffix: str, target: str | None) -> Any:
    """The number or text of a label file; None where there is none."""
    try:
        found: Any = content.decode("utf-8").strip()
        if suffix == ".json":
            table = parse_json(content)
            keys = [key for key in table if is_label(key, target)]
            found = table.get(keys[0]) if len(keys) == 1 else None
    except (UnicodeDecodeError, json.JSONDecodeError, AttributeError, InputError):
        return None
    if isinstance(found, str) and re.fullmatch(r"[0-9]{1,9}", found):
        return int(found)
    return (
        found
        if (isinstance(found, str) and found) or (type(found) is int and found >= 0)
        else None
    )


# -- Parquet
# --------------------------------------------------------------------------------------


def image_bytes(file: Path) -> str | None:
    """The column of a Parquet file that holds encoded images: bytes, or a struct with
    the field `bytes`.

    Bytes of a struct are images, as in data sets of Hugging Face; others where one of
    the first begins as images do.
    """
    if not file.is_file() or file.suffix.lower() not in PARQUET:
        return None
    from pyarrow import types

    for field in _schema(file):
        kind, inside = field.type, False
        if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
            kind, inside = kind.field("bytes").type, True
        if (types.is_binary(kind) or types.is_large_binary(kind)) and (
            inside or _begin_as_images(file, field.name)
        ):
            return str(field.name)
    return None


def _begin_as_images(file: Path, column: str) -> bool:
    from pyarrow.parquet import ParquetFile

    with reading(file, "Parquet"):
        batches = bounded(
            file,
            ParquetFile(file).iter_batches(ROWS, columns=[column]),
            file.stat().st_size,
        )
        first = next(batches, None)
        return first is not None and any(
            (cell or b"").startswith(SIGNATURES) for cell in first.column(0).to_pylist()
        )


def _schema(file: Path) -> Any:
    from pyarrow.parquet import read_schema

    with reading(file, "Parquet"):
        return read_schema(file)


def _rows(
    file: Path, column: str, target: str | None
) -> Iterator[tuple[str, Any, int, int, int]]:
    """Name, label, row group, row in it and size of every image."""
    from pyarrow import compute, types
    from pyarrow.parquet import ParquetFile

    with reading(file, "Parquet"):
        opened, row = ParquetFile(file), 0
        names = opened.schema_arrow.names
        usual = [name for name in names if is_label(name, target)]
        known = column in names and (len(usual) == 1 or target is None)
        expect(
            known,
            f"{file}: has the columns {listing(names)}: expected {column!r} and"
            f" {target or 'a label'!r}",
        )
        for group in range(opened.num_row_groups):
            start, stored = row, file.stat().st_size
            batches = opened.iter_batches(
                ROWS, row_groups=[group], columns=[column, *usual[:1]]
            )
            for batch in bounded(file, batches, stored):
                cells = batch.column(column)
                images = cells.field("bytes") if types.is_struct(cells.type) else cells
                sizes = compute.binary_length(images).to_pylist()
                labels = (
                    batch.column(usual[0]).to_pylist()
                    if len(usual) == 1
                    else [None] * len(sizes)
                )
                for size, label in zip(sizes, labels, strict=True):
                    expect(size, f"{file}, row {row + 1}: the image is missing")
                    given = (
                        label
                        if isinstance(label, str | None)
                        else _label(str(label).encode(), ".cls", None)
                    )
                    yield str(row), given, group, row - start, size
                    row += 1


SHARDS = DataReader(
    read,
    recognises=lambda place: holds_shards(place.path),
    open=open_images,
    list_splits=list_splits,
)

"""Samples to predict, in a fixed order, read chunk by chunk, so that memory does not
grow with their number.
"""

import hashlib
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.columns import names_rows
from rfdlc.data.dataset import SKIPPING, Dataset, Split, as_inputs, choose_split
from rfdlc.data.embedding import Embedding
from rfdlc.data.images import CROPPED, ImageFiles, Packed, PackedText, Resizing
from rfdlc.data.load import expanded, find_reader, known_names, load, locate, options_of
from rfdlc.data.readers import (
    arrays,
    embedded,
    image_files,
    image_lists,
    image_table,
    shards,
)
from rfdlc.data.readers.table import (
    TARGETS,
    TableRows,
    doubtful,
    rows_of_splits,
    split_column,
)
from rfdlc.data.table import TableEncoder
from rfdlc.errors import InputError, expect, listing, suggestion
from rfdlc.formats.cells import text_column
from rfdlc.formats.identity import digest_of_files, digest_of_table
from rfdlc.formats.tables import is_table, open_table, parquet_files, split_files
from rfdlc.formats.threads import ahead
from rfdlc.probabilities.classes import Classes, as_array
from rfdlc.probabilities.scores import GROUP

AHEAD = 2  # chunks that are read while one is computed
Sources = str | Path | Sequence[str | Path]  # several are image files
UNKNOWN = -1  # the label of a sample whose class is not known


@dataclass(frozen=True)
class InputSpec:
    """The inputs of a model: its classes, the shape of a sample, and how rows and
    images are converted to it.
    """

    classes: Classes
    input_shape: tuple[int, ...]
    encoder: TableEncoder | None = None
    resizing: Resizing = CROPPED
    target: str | None = (
        None  # the class column of the training table, where it was named
    )
    groups: str | None = None  # and its column of groups
    embedding: Embedding | None = (
        None  # how the features were made, where that is known
    )


class Chunk(NamedTuple):
    """Some samples without the broken ones, and what is wrong with each of these."""

    split: Split
    broken: tuple[str, ...] = ()
    kept: NDArray[np.int64] | None = (
        None  # the places of the samples among those that were asked for; None: all
    )
    columns: Mapping[str, Any] = MappingProxyType(
        {}
    )  # of a table, those that are copied, by name


@dataclass(frozen=True)
class Samples:
    """Samples that are read chunk by chunk; rows are requested in ascending order."""

    labels: NDArray[np.int64]
    named: bool  # whether samples have ids
    # changes when the samples do: with the names and the content of files
    fingerprint: str
    read: Callable[[range], Chunk]  # broken samples are left out, or raise
    ids: Sequence[str] | None = None  # where they are known before samples are read
    groups: NDArray[Any] | None = (
        None  # of all samples; what is read has none, or the same
    )
    left_out: Mapping[int, str] = field(
        default_factory=dict
    )  # further rows that are left out, and why
    doubt: str = ""  # which labels are missing or unknown, where some are
    columns: Callable[[range], Mapping[str, Any]] = (
        lambda rows: {}
    )  # of a table, those that are copied
    cut_warning: Callable[[], str] = (
        str  # of images that were read so far, where much of them was cut off
    )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def labelled(self) -> bool:
        return bool(len(self)) and int((self.labels < 0).sum()) <= len(self.left_out)

    def take(self, rows: range) -> Chunk:
        """These rows with their groups, but without those that are left out."""
        split, broken, kept, _ = self.read(rows)
        places = rows.start + (np.arange(len(rows)) if kept is None else kept)
        split = (
            split if self.groups is None else replace(split, groups=self.groups[places])
        )
        gone = np.isin(places, [*self.left_out])
        reasons = (self.left_out[row] for row in places[gone].tolist())
        columns = {
            name: cells.take(places[~gone] - rows.start)
            for name, cells in self.columns(rows).items()
        }
        left = split.take(np.flatnonzero(~gone)) if gone.any() else split
        return Chunk(left, (*broken, *reasons), columns=columns)

    def read_ahead(
        self, parts: Sequence[range], size: int
    ) -> Iterator[tuple[int, Chunk]]:
        """The rows of each part, `size` at a time, with the number of the part; others
        are read meanwhile.
        """
        whole = enumerate(parts)
        pieces = (
            (number, rows[at : at + size])
            for number, rows in whole
            for at in range(0, len(rows), size)
        )
        return ahead(lambda piece: (piece[0], self.take(piece[1])), pieces, AHEAD)


def image_paths(source: Sources, root: str | Path | None = None) -> list[Path]:
    """The image files that a source names; nothing for other sources. Several paths
    must all be image files.
    """
    several = not isinstance(source, str | Path)
    places = [
        locate(each, root)
        for each in ([source] if isinstance(source, str | Path) else source)
    ]
    others = [
        str(place)
        for place in places
        if not (place.is_file() and image_files.is_image(place.name))
    ]
    fix = (
        "expected several image files, or one source: a folder, or a list with one path"
        " per line"
    )
    expect(
        not (several and others),
        f"{listing(others, 3)}: not an existing image file: {fix}",
    )
    return [] if others else places


def open_samples(
    source: Sources,
    spec: InputSpec,
    *,
    root: str | Path | None = None,
    split: str | None = None,
    skip_broken: bool = False,
    allow_links: bool = False,
    keep: Sequence[str] = (),
) -> Samples:
    """Samples of any source, labelled or not, by default of the last split that it has;
    `keep` are columns to copy.
    """
    if keep:
        known: dict[str, Any] = {
            "root": root,
            "split": split,
            "skip_broken": skip_broken,
            "allow_links": allow_links,
        }
        return _with_columns(
            open_samples(source, spec, **known), source, root, split, keep
        )
    if files := image_paths(source, root):
        expect(
            split is None,
            f"{files[0]}: an image file has no split {split!r}: leave it out",
        )
        return _folder(*image_files.common_folder(files), spec, skip_broken)
    assert isinstance(source, str | Path)
    place, folder = locate(source, root), expanded(root)
    images = len(spec.input_shape) == 3
    if images and (column := image_table.image_column(place, folder)) is not None:
        target = target_column(place, spec, [column])
        given = place, column, target, split, spec.classes.names, allow_links, folder
        where, names, labels, doubt = image_table.find_images(*given)
        return replace(of_files(where, names, labels, spec, skip_broken), doubt=doubt)
    if (made := embedded.metadata(place)) is not None and spec.encoder is None:
        return _embedded(place, spec, split, made["embedding"])
    if images and shards.holds_shards(place):
        where, names, labels, packed = shards.find_images(
            place, spec.target, split, spec.classes.names
        )
        return of_files(where, names, labels, spec, skip_broken, packed)
    if is_table(place):
        wanted = "a folder, a list or an array of images" if images else ".npy or .npz"
        trained = f"{'images' if images else 'arrays'} of shape {spec.input_shape}"
        expect(
            spec.encoder,
            f"{place} is a table, but this model was trained on {trained}: expected"
            f" {wanted}",
        )
        return _table(place, spec, split, skip_broken)
    reader, found = find_reader(source, root)
    if reader is image_files.read_folder:
        return _folder(
            *image_files.find_images(found, split, allow_links, skip_broken),
            spec,
            skip_broken,
        )
    if reader is image_lists.read_list:
        whole = (
            str(source).lower() in known_names()
        )  # found by its training list, which stands for all of them
        file = image_lists.list_file(found, split, whole=whole)
        listed = image_lists.find_listed_images(
            file, spec.classes.names, allow_links, folder
        )
        return of_files(*listed, spec, skip_broken)
    if reader in (arrays.read, arrays.read_npy):
        return _arrays(found, spec, split)
    sized: dict[str, Any] = (
        {"image_size": spec.input_shape[-1]}
        if "image_size" in options_of(reader)
        else {}
    )
    return in_memory(
        split_of(load(source, root=root, test_fraction=0, **sized), split, spec.classes)
    )


def _with_columns(
    samples: Samples,
    source: Sources,
    root: str | Path | None,
    split: str | None,
    keep: Sequence[str],
) -> Samples:
    """Samples with the columns `keep` of the table that they are read from; raises for
    other sources.
    """
    place = locate(source, root) if isinstance(source, str | Path) else None
    told = f"column {listing(keep)} cannot be kept"
    if place is None or not is_table(place):
        raise InputError(
            f"{told}: {place or 'a list of image files'} is not a table: leave out keep"
            " (--keep)"
        )
    if parts := split_files(place):
        split = choose_split(str(place), parts, split)
    elif (
        split is None
        and embedded.metadata(place) is not None
        and (column := split_column(open_table(place).names))
    ):
        split = choose_split(str(place), splits_in(open_table(place), column), None)
    rows = TableRows(place, split)
    for name in keep:
        known = (
            f"expected one of {listing(rows.names, 20)}{suggestion(name, rows.names)}"
        )
        expect(
            name in rows.names, f"{place}: {told}: there is no column {name!r}: {known}"
        )
    alike = (
        f"{place}: {told}: it has {len(rows.labels):,} rows for {len(samples):,}"
        " samples; join them by id"
    )
    expect(len(rows.labels) == len(samples), alike)

    def columns(wanted: range) -> dict[str, Any]:
        cells = rows[wanted]
        return {
            **samples.columns(wanted),
            **{name: _plain(cells[name]) for name in keep},
        }

    return replace(samples, columns=columns)


def _plain(cells: Any) -> Any:
    """A column without a dictionary, and texts in the one type that is written."""
    from pyarrow import string, types

    kind = cells.type.value_type if types.is_dictionary(cells.type) else cells.type
    return cells.cast(
        string() if types.is_large_string(kind) or types.is_string_view(kind) else kind
    )


def splits_in(file: Any, column: str) -> list[str]:
    """The splits that a column of a table names."""
    cells = [
        cell for batch in file.batches() for cell in batch.column(column).to_pylist()
    ]
    return [
        split
        for split, rows in rows_of_splits(str(file.path), column, cells).items()
        if len(rows)
    ]


def in_memory(one: Split) -> Samples:
    mark = digest_of([np.ascontiguousarray(one.array), one.labels])
    known: dict[str, Any] = {"ids": one.ids, "groups": one.groups}
    return Samples(
        one.labels,
        one.ids is not None,
        mark,
        lambda rows: Chunk(one.take(np.array(rows))),
        **known,
    )


def holds_features(source: Sources, root: str | Path | None = None) -> bool:
    """Whether a source holds features (or another table) rather than images."""
    if image_paths(source, root):
        return False
    assert isinstance(source, str | Path)
    place, folder = locate(source, root), expanded(root)
    if is_table(place):
        return image_table.image_column(
            place, folder
        ) is None and not shards.holds_shards(place)
    reader, found = find_reader(source, root)
    if reader not in (arrays.read, arrays.read_npy):
        return False
    splits = arrays.by_split(place.name, arrays.open_inputs(found, streamed=True))
    return any(len(roles["x"].shape) == 2 for roles in splits.values() if "x" in roles)


def split_of(data: Dataset, split: str | None, classes: Classes) -> Split:
    """A split of a data set, labelled by the indices of `classes`: unknown where the
    data set has other classes.
    """
    found = data.splits[choose_split(data.name, data.splits, split)]
    return Split(
        found.inputs, _matched(found.labels, data.classes.names, classes), found.ids
    )


def _folder(
    root: Path, below: str, names: PackedText, spec: InputSpec, skip_broken: bool
) -> Samples:
    """A folder named after a class labels its images."""
    place = {name: i for i, name in enumerate(spec.classes.names)}
    inside = (name.removeprefix(below).split("/") for name in names)
    labels = np.fromiter(
        (
            place.get(steps[0], UNKNOWN) if len(steps) > 1 else UNKNOWN
            for steps in inside
        ),
        np.int64,
    )
    return of_files(root, names, labels, spec, skip_broken)


def of_files(
    root: Path,
    names: PackedText,
    labels: NDArray[np.int64],
    spec: InputSpec,
    skip_broken: bool = False,
    packed: Packed | None = None,
) -> Samples:
    shape = spec.input_shape
    expect(
        len(shape) == 3,
        f"{root} holds images, but this model was trained on samples of shape {shape}",
    )
    trained = f"this model was trained on arrays of {shape[-2:][0]}x{shape[-1]} pixels"
    fix = "give it an array of such images (.npy, .npz)"
    expect(
        shape[-1] == shape[-2],
        f"{root} holds image files, which become squares, but {trained}: {fix}",
    )
    files = ImageFiles(root, names, shape[-1], shape[0], spec.resizing, packed=packed)
    there = (
        packed is not None
        or not names
        or any(os.path.isfile(root / name) for name in names[:100])
    )
    fix = image_files.RELATIVE.format(
        "DIR"
    )  # one missing image would be broken: without any, the folder is wrong
    expect(
        there, f"{root}: holds none of the images, such as {listing(names[:1])}: {fix}"
    )

    cut = np.zeros(len(names), np.float32)

    def read(rows: range) -> Chunk:
        images, wrong = files[np.array(rows)].decode(cut=cut[rows.start : rows.stop])
        broken = tuple(str(wrong[i]) for i in sorted(wrong))
        image_files.check_broken(broken, skip_broken)
        split = Split(images, labels[rows.start : rows.stop], names.take(rows))
        kept = np.setdiff1d(np.arange(len(rows)), [*wrong])
        return Chunk(split.take(kept) if broken else split, broken, kept)

    warn = partial(spec.resizing.cut_warning, cut, spec.embedding is not None)
    content = np.frombuffer(files.content_digest().encode(), np.uint8)
    mark = digest_of([*names.packed, labels, content])
    return Samples(labels, True, mark, read, names, cut_warning=warn)


def _table(
    path: Path, spec: InputSpec, split: str | None, skip_broken: bool
) -> Samples:
    """Rows encoded as the training rows were. Of the other columns, the one that named
    rows there gives the ids.

    Without it, rows are numbered if some may be left out. Groups are copied as `group`;
    an empty cell is its own.
    """
    from pyarrow import array

    encoder: Any = spec.encoder
    features = {column.name for column in encoder.columns}
    split = (
        choose_split(str(path), parts, split) if (parts := split_files(path)) else split
    )
    rows = TableRows(
        path, split, target_column(path, spec, features), spec.classes.names
    )
    others = [
        name for name in rows.names if name not in features and name != spec.groups
    ]
    group_of = None
    if spec.groups in rows.names and GROUP not in spec.classes.names:
        group_of = np.array(
            [
                text or f"row {row}"
                for row, text in enumerate(rows.texts(spec.groups), 1)
            ]
        )
    identity = (
        encoder.identity
        if encoder.identity in others
        else next(filter(names_rows, others), None)
    )
    told, named = (
        set[str](),
        identity is not None or skip_broken,
    )  # each column is named once
    where = f"{path}{'' if split is None else f', split {split}'}"

    def read(wanted: range) -> Chunk:
        cells, kept, wrong = rows[wanted], np.arange(len(wanted)), dict[int, str]()
        names = (
            [row + 1 for row in wanted]
            if identity is None
            else cells[identity].to_pylist()
        )
        try:
            features = encoder.transform(cells, start=wanted.start, told=told)
        except InputError as error:
            wrong = encoder.wrong_cells(cells, wanted.start)
            if not (wrong and skip_broken):
                way_out = f"; or leave such rows out with {SKIPPING}" if wrong else ""
                raise InputError(f"{where}: {error}{way_out}") from None
            kept = np.setdiff1d(kept, [*wrong])
            features = encoder.transform(
                {name: own.take(kept) for name, own in cells.items()}, told=told
            )
        ids = [str(names[place]) for place in kept] if named else None
        split = Split(features, rows.labels[wanted.start + kept], ids)
        return Chunk(
            split, tuple(f"{where}: {wrong[place]}" for place in sorted(wrong)), kept
        )

    def columns(wanted: range) -> dict[str, Any]:
        return (
            {}
            if group_of is None
            else {GROUP: array(group_of[wanted.start : wanted.stop])}
        )

    known: dict[str, Any] = {
        "groups": group_of,
        "doubt": rows.doubt,
        "columns": columns,
    }
    return Samples(rows.labels, named, _state(path), read, **known)


def _embedded(
    path: Path, spec: InputSpec, split: str | None, made: Embedding
) -> Samples:
    """Features that `rfdlc embed` wrote, of the same embedding as those that the model
    was trained on.
    """
    _check_embedding(path, spec, made)
    file = open_table(path)
    if (column := split_column(file.names)) is not None:
        split = choose_split(str(path), splits_in(file, column), split)
    rows = TableRows(
        path, split, target_column(path, spec, [embedded.FEATURES]), spec.classes.names
    )

    def read(wanted: range) -> Chunk:
        cells = rows[wanted]
        columns = [
            cells[f"{embedded.FEATURES}[{i}]"].to_numpy() for i in range(made.width)
        ]
        ids = text_column(cells["id"]).astype(str).tolist() if "id" in cells else None
        return Chunk(
            Split(
                np.stack(columns, axis=1), rows.labels[wanted.start : wanted.stop], ids
            )
        )

    return Samples(
        rows.labels, "id" in rows.names, _state(path), read, doubt=rows.doubt
    )


def _check_embedding(path: Path, spec: InputSpec, made: Embedding) -> None:
    fits = (made.width,) == spec.input_shape and (
        spec.embedding is None or made.is_like(spec.embedding)
    )
    other = (
        f"{path}: has features of {made.backbone} ({made.width}), but this model was"
        " trained on other ones"
    )
    expect(
        fits,
        f"{other}: embed with the network, weights and options that it was trained"
        " with",
    )


def target_column(path: Path, spec: InputSpec, features: Collection[str]) -> str | None:
    others = [
        name for name in open_table(path, of_samples=True).names if name not in features
    ]
    targets = [
        name
        for name in others
        if (name.lower() in TARGETS if spec.target is None else name == spec.target)
    ]
    return targets[0] if len(targets) == 1 else None


def _arrays(path: Path, spec: InputSpec, split: str | None) -> Samples:
    """`x`, and `y`, `ids` and `names` where they exist; rows of `x` are read on
    demand.
    """
    opened = arrays.open_inputs(path, streamed=True)
    if (made := opened.get(arrays.EMBEDDING)) is not None:
        _check_embedding(path, spec, Embedding.read(str(as_array(made)), path))
    splits = arrays.by_split(path.name, opened)
    names = splits.get("", {}).pop("names", None)
    given = {name or "train": roles for name, roles in splits.items() if roles}
    found = given[choose_split(str(path), given, split)]
    counts = {array.shape[:1] for array in found.values()}
    alike = "x" in found and len(counts) == 1 and () not in counts
    shapes = ", ".join(
        f"{role} of shape {array.shape}" for role, array in found.items()
    )
    expect(
        alike,
        f"{path}: has {shapes}: expected inputs x (or test_x, X_test, ...), and one of"
        " each per sample",
    )
    features = spec.embedding is not None and len(found["x"].shape) == 2
    if features and made is None:
        warnings.warn(
            f"{path} does not say which network made its features: that it is the one"
            " that made the training features is taken on trust",
            stacklevel=2,
        )
    inputs, ids, labels, doubt = (
        found["x"],
        found.get("ids"),
        np.full(found["x"].shape[0], UNKNOWN),
        "",
    )
    if "y" in found:
        given_names = None if names is None else as_array(names).tolist()
        theirs, indices = _labels(str(path), found["y"], given_names, spec.classes)
        labels = _matched(indices, theirs, spec.classes)
        doubt = doubtful(labels, (theirs[index] for index in indices))

    def read(rows: range) -> Chunk:
        here = slice(rows.start, rows.stop)
        texts = None if ids is None else [str(text) for text in as_array(ids[here])]
        values = inputs[here]
        values = (
            np.array(values) if isinstance(values, np.memmap) else values
        )  # read here, in its own thread
        return Chunk(
            Split(
                as_inputs(f"{path}, from row {rows.start} on", values),
                labels[here],
                texts,
            )
        )

    texts = None if ids is None else [str(text) for text in as_array(ids)]
    return Samples(
        labels,
        ids is not None,
        _state(path),
        read,
        texts,
        found.get("groups"),
        doubt=doubt,
    )


def _labels(
    path: str, given: NDArray[Any], names: Sequence[str] | None, classes: Classes
) -> tuple[list[str], NDArray[np.int64]]:
    """The names of the file's classes and their indices: numbers are indices of its
    names, or are names themselves.
    """
    flat = as_array(arrays.column(path, "labels", given))
    whole = flat.dtype.kind == "f" and (flat == np.floor(flat)).all()
    if whole or (
        flat.dtype.kind == "b" and "True" not in classes.names
    ):  # as they are read for training
        flat = flat.astype(np.int64)
    distinct, place = np.unique(flat, return_inverse=True)
    if names is None or distinct.dtype.kind not in "iu":
        return [str(name) for name in distinct], place.astype(np.int64)
    least, most = min(distinct, default=0), max(distinct, default=0)
    inside = least >= 0 and most < len(names)
    expect(
        inside,
        f"{path}: labels go from {least} to {most}, but there are {len(names)} names",
    )
    return [str(name) for name in names], flat.astype(np.int64)


def _matched(
    labels: NDArray[np.int64], theirs: Sequence[str], ours: Classes
) -> NDArray[np.int64]:
    place = {name: i for i, name in enumerate(ours.names)}
    return np.array([place.get(name, UNKNOWN) for name in theirs], dtype=np.int64)[
        labels
    ]


def digest_of(given: Iterable[NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for values in given:
        digest.update(values.data if values.size else b"")
    return digest.hexdigest()[:32]


def _state(path: Path) -> str:
    """Of a file, or of the tables or arrays in a folder."""
    if not path.is_dir():
        return digest_of_table([path.name, digest_of_files([path])])[:32]
    tables = parquet_files(path) or [*split_files(path).values()]
    files = tables or sorted(path.glob("*.npy"))
    names = [str(file.relative_to(path)) for file in files]
    return digest_of_table([names, digest_of_files(files)])[:32]

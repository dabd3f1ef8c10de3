"""Samples in a fixed order, read chunk by chunk, so that memory does not grow with
their number.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.dataset import Split
from rfdlc.data.embedding import Embedding
from rfdlc.data.images import CROPPED, Resizing
from rfdlc.data.table import TableEncoder
from rfdlc.errors import InputError
from rfdlc.formats.identity import digest_of_files, digest_of_table
from rfdlc.formats.tables import parquet_files, split_files
from rfdlc.formats.threads import ahead
from rfdlc.probabilities.classes import Classes

AHEAD = 2  # chunks that are read while one is computed
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
    # the class column of the training table, where it was named
    target: str | None = None
    groups: str | None = None  # and its column of groups
    # how the features were made, where that is known
    embedding: Embedding | None = None

    @property
    def of_images(self) -> bool:
        return len(self.input_shape) == 3

    def check_embedding(self, path: Path, embedding: Embedding) -> None:
        """Raise where features were not made as those that the model was trained on."""
        fits = self.input_shape == (embedding.width,)
        if fits and self.embedding is not None:
            fits = embedding.is_like(self.embedding)
        if not fits:
            raise InputError(
                f"{path}: has features of {embedding.backbone} ({embedding.width}), but"
                " this model was trained on other ones: embed with the network, weights"
                " and options that it was trained with"
            )


class Chunk(NamedTuple):
    """Some samples without the broken ones, and what is wrong with each of these."""

    split: Split
    broken: tuple[str, ...] = ()
    # the places of the samples among those that were asked for; None: all
    kept: NDArray[np.int64] | None = None
    # of a table, those that are copied, by name
    columns: Mapping[str, Any] = MappingProxyType({})


def no_columns(rows: range) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Samples:
    """Samples that are read chunk by chunk; rows are requested in ascending order."""

    labels: NDArray[np.int64]
    named: bool  # whether samples have ids
    # changes when the samples do: with the names and the content of files
    fingerprint: str
    read: Callable[[range], Chunk]  # broken samples are left out, or raise
    ids: Sequence[str] | None = None  # where they are known before samples are read
    # of all samples; what is read has none, or the same
    groups: NDArray[Any] | None = None
    # further rows that are left out, and why
    left_out: Mapping[int, str] = field(default_factory=dict)
    doubt: str = ""  # which labels are missing or unknown, where some are
    # of a table, those that are copied
    columns: Callable[[range], Mapping[str, Any]] = no_columns
    # of images that were read so far, where much of them was cut off
    cut_warning: Callable[[], str] = str
    split: str | None = None  # of a table whose rows say it, the one that is read

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def labelled(self) -> bool:
        return bool(len(self)) and int((self.labels < 0).sum()) <= len(self.left_out)

    def take(self, rows: range) -> Chunk:
        """These rows with their groups, but without those that are left out."""
        split, broken, kept, _ = self.read(rows)
        places = rows.start + (np.arange(len(rows)) if kept is None else kept)
        if self.groups is not None:
            split = replace(split, groups=self.groups[places])
        gone = np.isin(places, [*self.left_out])
        reasons = (self.left_out[row] for row in places[gone].tolist())
        columns = {
            name: cells.take(places[~gone] - rows.start)
            for name, cells in self.columns(rows).items()
        }
        if gone.any():
            split = split.take(np.flatnonzero(~gone))
        return Chunk(split, (*broken, *reasons), columns=columns)

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


def in_memory(split: Split) -> Samples:
    return Samples(
        split.labels,
        named=split.ids is not None,
        fingerprint=digest_of([np.ascontiguousarray(split.array), split.labels]),
        read=lambda rows: Chunk(split.take(np.array(rows))),
        ids=split.ids,
        groups=split.groups,
    )


def matched(
    labels: NDArray[np.int64], names: Sequence[str], classes: Classes
) -> NDArray[np.int64]:
    """Labels that index `names` as indices of the classes: UNKNOWN for names of no
    class.
    """
    place = {name: i for i, name in enumerate(classes.names)}
    index = np.array([place.get(name, UNKNOWN) for name in names], dtype=np.int64)
    return index[labels]


def digest_of(arrays: Iterable[NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for values in arrays:
        digest.update(values.data if values.size else b"")
    return digest.hexdigest()[:32]


def fingerprint_of(path: Path) -> str:
    """Of a file, or of the tables or arrays in a folder."""
    if not path.is_dir():
        return digest_of_table([path.name, digest_of_files([path])])[:32]
    tables = parquet_files(path) or [*split_files(path).values()]
    files = tables or sorted(path.glob("*.npy"))
    names = [str(file.relative_to(path)) for file in files]
    return digest_of_table([names, digest_of_files(files)])[:32]

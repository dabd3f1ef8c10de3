"""Rows of tables on disk, read in ascending order: their cells, labels and splits, and
the features of a model.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.columns import names_rows
from rfdlc.data.dataset import SKIPPING, SPLITS, Split, choose_split
from rfdlc.data.reader import Place, Request
from rfdlc.data.samples import (
    UNKNOWN,
    Chunk,
    InputSpec,
    Samples,
    fingerprint_of,
    no_columns,
)
from rfdlc.errors import InputError
from rfdlc.formats.cells import text_column
from rfdlc.formats.tables import open_table, split_files, split_name
from rfdlc.probabilities.scores import GROUP

TARGETS = ("target", "label", "class", "y")
SHOWN = 3  # rows with doubtful labels that are named


class TableRows:
    """Rows of a table (or of a split), read in ascending order; `labels` index
    `classes`, and are -1 for others.
    """

    def __init__(
        self,
        path: Path,
        split: str | None = None,
        target: str | None = None,
        classes: Sequence[str] = (),
    ) -> None:
        self._file = open_table(path, of_samples=True)
        self._split = split
        self.names = self._file.names
        self._column = split_column(self.names)
        if split is not None and self._column is None:
            raise InputError(
                f"{path} has no split {split!r}: expected a column 'split' that says it"
                " row by row"
            )
        if target:
            place: dict[str | None, int] = {name: i for i, name in enumerate(classes)}
            texts = self.texts(target)
            self.labels = np.array(
                [place.get(text, UNKNOWN) for text in texts], np.int64
            )
        else:
            self.labels = np.full(sum(map(len, self._batches())), UNKNOWN)
        self.doubt = ""
        if target is not None:
            self.doubt = doubtful(self.labels, self.texts(target))
        if not len(self.labels):
            of_split = "" if split is None else f" of the split {split!r}"
            raise InputError(f"{path}: has no rows{of_split} to predict")
        self._coming: Iterator[Any] = iter(())
        self._held: Any = None  # a table with the rows from `_at` on
        self._at = len(self.labels)

    def __getitem__(self, wanted: range) -> dict[str, Any]:
        from pyarrow import Table, concat_tables

        if wanted.start < self._at:
            self._coming = self._batches()
            self._at = 0
            self._held = Table.from_batches([next(self._coming)])
        while self._at + len(self._held) < wanted.stop:
            passed = min(wanted.start - self._at, len(self._held))
            self._held = self._held.slice(passed)
            self._at += passed
            following = Table.from_batches([next(self._coming)])
            self._held = concat_tables([self._held, following])
        rows = self._held.slice(wanted.start - self._at, len(wanted))
        return dict(zip(rows.column_names, rows.itercolumns(), strict=True))

    def texts(self, column: str) -> Iterator[str | None]:
        for batch in self._batches():
            yield from text_column(batch.column(column))

    def _batches(self) -> Iterator[Any]:
        for batch in self._file.batches():
            if self._split is None:
                yield batch
                continue
            cells = batch.column(self._column).to_pylist()
            splits = [split_name(str(cell).strip()) for cell in cells]
            in_split = [split == self._split for split in splits]
            yield batch.filter(np.array(in_split, dtype=bool))


def open_table_rows(place: Place, request: Request) -> Samples:
    """Rows encoded as the training rows were. Of the other columns, the one that named
    rows there gives the ids.

    Without it, rows are numbered if some may be left out. Groups are copied as `group`;
    an empty cell is its own.
    """
    path, spec = place.path, request.spec
    if spec.encoder is None:
        raise InputError(_no_table(path, spec))
    split = request.split
    if parts := split_files(path):
        split = choose_split(str(path), parts, split)
    features = {column.name for column in spec.encoder.columns}
    target = target_column(path, spec.target, features)
    rows = TableRows(path, split, target, spec.classes.names)
    encoded = EncodedRows(path, rows, spec, split, request.skip_broken)
    groups = encoded.groups()
    return Samples(
        rows.labels,
        named=encoded.named,
        fingerprint=fingerprint_of(path),
        read=encoded.read,
        groups=groups,
        doubt=rows.doubt,
        columns=no_columns if groups is None else partial(_copied_groups, groups),
        split=split,
    )


def _no_table(path: Path, spec: InputSpec) -> str:
    """What to say of a table for a model of images or arrays."""
    kind, expected = "arrays", ".npy or .npz"
    if spec.of_images:
        kind, expected = "images", "a folder, a list or an array of images"
    return (
        f"{path} is a table, but this model was trained on {kind} of shape"
        f" {spec.input_shape}: expected {expected}"
    )


def _copied_groups(groups: NDArray[Any], rows: range) -> dict[str, Any]:
    from pyarrow import array

    return {GROUP: array(groups[rows.start : rows.stop])}


class EncodedRows:
    """Rows of a table as the features of a model."""

    def __init__(
        self,
        path: Path,
        rows: TableRows,
        spec: InputSpec,
        split: str | None,
        skip_broken: bool,
    ) -> None:
        assert spec.encoder is not None
        self.rows = rows
        self.spec = spec
        self.encoder = spec.encoder
        self.skip_broken = skip_broken
        self.where = str(path) if split is None else f"{path}, split {split}"
        features = {column.name for column in self.encoder.columns}
        others = [n for n in rows.names if n not in features and n != spec.groups]
        self.identity = self.encoder.identity
        if self.identity not in others:
            self.identity = next(filter(names_rows, others), None)
        self.named = self.identity is not None or skip_broken
        self._told = set[str]()  # each column is named once

    def groups(self) -> NDArray[Any] | None:
        """Of each row, where the model knows which column says them."""
        column = self.spec.groups
        if column is None or column not in self.rows.names:
            return None
        if GROUP in self.spec.classes.names:
            return None
        texts = enumerate(self.rows.texts(column), 1)
        return np.array([text or f"row {row}" for row, text in texts])

    def read(self, wanted: range) -> Chunk:
        cells = self.rows[wanted]
        kept = np.arange(len(wanted))
        wrong = dict[int, str]()
        try:
            features = self.encoder.transform(
                cells, start=wanted.start, told=self._told
            )
        except InputError as error:
            wrong = self.encoder.wrong_cells(cells, wanted.start)
            if not wrong:
                raise InputError(f"{self.where}: {error}") from None
            if not self.skip_broken:
                raise InputError(
                    f"{self.where}: {error}; or leave such rows out with {SKIPPING}"
                ) from None
            kept = np.setdiff1d(kept, [*wrong])
            usable = {name: column.take(kept) for name, column in cells.items()}
            features = self.encoder.transform(usable, told=self._told)
        labels = self.rows.labels[wanted.start + kept]
        split = Split(features, labels, self._ids(cells, wanted, kept))
        broken = tuple(f"{self.where}: {wrong[place]}" for place in sorted(wrong))
        return Chunk(split, broken, kept)

    def _ids(
        self, cells: dict[str, Any], wanted: range, kept: NDArray[np.int64]
    ) -> list[str] | None:
        if not self.named:
            return None
        if self.identity is None:
            return [str(wanted.start + place + 1) for place in kept]
        names = cells[self.identity].to_pylist()
        return [str(names[place]) for place in kept]


def doubtful(labels: NDArray[np.int64], texts: Iterable[str | None]) -> str:
    """Which labels are missing or unknown (-1), how they are written and what follows;
    empty if all are missing.
    """
    count = int((labels < 0).sum())
    if not count:
        return ""
    rows = enumerate(zip(labels, texts, strict=True), 1)
    odd = ((row, text) for row, (label, text) in rows if label < 0)
    first = list(islice(odd, SHOWN))
    some_known = count < len(labels)
    if not some_known and all(text is None for _, text in chain(first, odd)):
        return ""
    shown = ", ".join(f"row {row}: {text or ''!r}" for row, text in first)
    if count > len(first):
        shown += ", ..."
    follows = "no column target is written"
    if some_known:
        follows = (
            "in a table their target is empty (`rfdlc evaluate TABLE --skip-unknown`"
            " leaves them out), and .npz has none"
        )
    return (
        f"{count:,} of {len(labels):,} rows have no or unknown labels ({shown}):"
        f" {follows}"
    )


def target_column(
    path: Path, target: str | None, features: Collection[str]
) -> str | None:
    """The column of labels: the one that is named, or the only one with a usual name;
    None where there is none.
    """
    columns = open_table(path, of_samples=True).names
    others = [name for name in columns if name not in features]
    if target is None:
        targets = [name for name in others if name.lower() in TARGETS]
    else:
        targets = [name for name in others if name == target]
    return targets[0] if len(targets) == 1 else None


def split_column(names: Iterable[str]) -> str | None:
    return next((name for name in names if name.lower() == "split"), None)


def splits_in(file: Any, column: str) -> list[str]:
    """The splits that a column of a table names."""
    cells = list[Any]()
    for batch in file.batches():
        cells += batch.column(column).to_pylist()
    rows_of = rows_of_splits(str(file.path), column, cells)
    return [split for split, rows in rows_of.items() if len(rows)]


def rows_of_splits(where: str, column: str, cells: Any) -> dict[str, NDArray[np.int64]]:
    texts = text_column(cells).tolist()
    splits = [split_name(str(text)) for text in texts]
    if None in splits:
        row = splits.index(None)
        raise InputError(
            f"{where}: the split {texts[row]!r} in row {row + 1} of column {column!r}"
            " is unknown: expected train, val or test; where the column says something"
            " else, rename it, or leave it out with drop"
        )
    return {name: np.flatnonzero(np.array(splits) == name) for name in SPLITS}

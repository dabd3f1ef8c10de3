"""Rows of tables on disk: their labels, splits and cells, read in ascending order."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.dataset import SPLITS
from rfdlc.data.samples import UNKNOWN
from rfdlc.errors import InputError
from rfdlc.formats.cells import text_column
from rfdlc.formats.tables import open_table, split_name

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

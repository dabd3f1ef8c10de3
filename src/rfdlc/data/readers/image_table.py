"""Tables of image files: one column with paths, and columns with labels and, where they
are, groups and splits.
"""

import os
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from rfdlc.data.dataset import Dataset, by_reason
from rfdlc.data.frames import list_of
from rfdlc.data.images import SUFFIXES, PackedText
from rfdlc.data.reader import DataReader, Listing, Place, Request
from rfdlc.data.readers.image_files import (
    Entry,
    Fit,
    ImageOptions,
    Interpolation,
    is_image,
    listed_name,
    open_files,
    read_images,
)
from rfdlc.data.readers.shards import image_bytes
from rfdlc.data.readers.table import (
    check_columns,
    check_roles,
    classes_of,
    rows_by_time,
    single_columns,
)
from rfdlc.data.rows import (
    TableRows,
    open_table_rows,
    rows_of_splits,
    split_column,
    splits_in,
    target_column,
)
from rfdlc.data.samples import InputSpec, Samples
from rfdlc.errors import InputError, expect, listing, suggestion
from rfdlc.formats.cells import text_column
from rfdlc.formats.tables import CsvFile, is_table, open_table, read_columns, split_name

FEW_COLUMNS, BEGINNING = (
    20,
    2**16,
)  # of a list of images, whatever the column of paths is called; bytes looked at
PATHS = (
    "path",
    "file",
    "filename",
    "file_name",
    "filepath",
    "image",
    "image_path",
    "img",
)


def image_column(
    path: Path, root: Path | None = None, drop: Collection[str] = ()
) -> str | None:
    """The column of a table that holds paths of images, relative to the root or to the
    table, if there is one.

    Beside a column of lists, such as embeddings, paths without files only name the
    rows.
    """
    if path.is_dir() or not is_table(path) or image_bytes(path) is not None:
        return None
    file = open_table(path, of_samples=True)
    names = [
        name for name in file.names if name not in drop and list_of(name) not in drop
    ]
    usual = [name for name in names if name.lower() in PATHS]
    with path.open(
        "rb"
    ) as start:  # other tables are not read for that: their beginning says enough
        begins = start.read(BEGINNING).lower()
    mentioned = len(names) <= FEW_COLUMNS and any(
        suffix.encode() in begins for suffix in SUFFIXES
    )
    others = [name for name in names if name not in usual] if mentioned else []
    known = (
        [] if any(map(list_of, names)) else usual
    )  # which hold paths even where no file exists
    for batch in islice(file.batches() if usual or others else (), 1):
        for name in (*usual, *others):
            texts = [
                text
                for text in text_column(batch.column(name).slice(0, 100))
                if text is not None
            ]
            if (
                texts
                and all(map(is_image, texts))
                and (name in known or _any_exists(root or path.parent, texts))
            ):
                return name
    return None


def _any_exists(root: Path, names: Iterable[str | None]) -> bool:
    return any(name is not None and os.path.isfile(root / name) for name in names)


def read(
    place: Place,
    *,
    target: str | None = None,
    groups: str | None = None,
    split: str | None = None,
    image_size: PositiveInt | None = None,
    fit: Fit = "auto",
    interpolation: Interpolation = "bilinear",
    cache: Path | None = None,
    skip_broken: bool = False,
    allow_links: bool = False,
    test_fraction: float = 0.2,
    time: str | None = None,
    drop: Sequence[str] = (),
) -> Dataset:
    """One row per image; paths are relative to the root, or to the table. `groups`,
    `split`, `time` name columns.

    Columns without a role are not read: `drop` matters if there are several columns of
    paths.
    """
    path = place.path
    where = str(path)
    table = read_columns(path)
    paths = str(image_column(path, place.root, drop))
    root = (place.root or path.parent).resolve()
    usual = None if groups else group_column(table, target, split)
    groups = groups or usual
    target, notes = check_roles(
        where, table, target, groups, split, time, *single_columns(table, drop)
    )
    notes += (
        []
        if usual is None
        else [
            f"column {usual!r} says which images belong together: groups names another"
        ]
    )
    column, splits = (
        split or split_column(table),
        {"train": np.arange(len(table[target]))},
    )
    if time is not None:
        splits, note = rows_by_time(where, time, table[time], test_fraction, column)
        notes.append(note)
    elif column is not None:
        splits = rows_of_splits(where, column, table[column])
    images, labels = text_column(table[paths]), text_column(table[target])
    group_of = (
        np.full(len(images), "") if groups is None else text_column(table[groups])
    )
    broken, contents, origin = (
        list[str](),
        dict[str, frozenset[str]](),
        _origins(path, len(images)),
    )
    listed: dict[str, list[Entry]] = {name: [] for name in splits}
    for name, rows in splits.items():
        for row in rows.tolist():
            try:
                cells = {
                    "path": images[row],
                    "label": labels[row],
                    "group": group_of[row],
                }
                absent = [
                    f"the {what} is missing"
                    for what, cell in cells.items()
                    if cell is None
                ]
                expect(not absent, " and ".join(absent))
                image = listed_name(images[row], root, contents, allow_links)
                group = None if groups is None else group_of[row]
                listed[name].append(Entry(image, labels[row], origin(row), group))
            except InputError as error:
                broken.append(f"{origin(row)}{error}")
    if not any(listed.values()) and not _any_exists(root, images):
        fix = (
            f"--drop {shlex.quote(paths)} (in Python drop=[{paths!r}]) reads the other"
            " columns as a table"
        )
        raise InputError(
            f"{'; '.join(by_reason(broken)[:10])}. If {paths!r} only names the rows,"
            f" {fix}"
        )
    names = classes_of(
        where, [entry.label for entries in listed.values() for entry in entries]
    )[1]
    how = ImageOptions(image_size, fit, interpolation, cache, skip_broken)
    return read_images(path.stem, root, listed, names, how, notes, broken)


def _origins(path: Path, count: int) -> Callable[[int], str]:
    """Where a row (from 0 on) is: the line of a text file, header included, otherwise
    its number from 1 on.
    """
    file = open_table(path, of_samples=True)
    if not isinstance(file, CsvFile):
        return lambda row: f"{path}, row {row + 1}: "
    before = int(not file.headless)
    with path.open("rb") as lines:
        plain = (
            sum(1 for _ in lines) == before + count
        )  # without blank lines and line breaks inside cells
    numbers: Sequence[int] = range(before + 1, before + count + 1)
    if not plain:
        with suppress(InputError):  # pyarrow reads some files that csv does not
            numbers = [line for line, _ in file.rows()]
    known = len(numbers) == count
    return lambda row: (
        f"{path}, line {numbers[row]}: " if known else f"{path}, row {row + 1}: "
    )


def _origin_in(path: Path, split: str | None, place: int) -> str:
    """Where the row at a place among those of a split is."""
    table = read_columns(path, of_samples=True)
    cells = text_column(
        next(iter(table.values())) if split is None else table[str(split_column(table))]
    )
    own = [
        row
        for row, cell in enumerate(cells)
        if split is None or split_name(str(cell).strip()) == split
    ]
    return _origins(path, len(cells))(own[place])


def group_column(table: Mapping[str, Any], *others: str | None) -> str | None:
    """A column that is called group and has no empty cell, unless it is one of the
    others.
    """
    usual = (name for name in table if name.lower() == "group" and name not in others)
    return next((name for name in usual if None not in text_column(table[name])), None)


def open_images(place: Place, request: Request) -> Samples:
    """Images that the rows name, which may not exist; for a model of other samples, the
    rows of a table.
    """
    path, spec = place.path, request.spec
    column = image_column(path, place.root)
    if column is None or not spec.of_images:
        return open_table_rows(place, request)
    target = target_column(path, spec.target, [column])
    rows = TableRows(path, request.split, target, spec.classes.names)
    root = (place.root or path.parent).resolve()
    names = text_column(rows[range(len(rows.labels))][column])
    for row, name in enumerate(names):
        try:
            expect(name, "the path is missing")
            names[row] = listed_name(name, root, allow_links=request.allow_links)
        except InputError as error:
            origin = _origin_in(path, request.split, row)
            raise InputError(f"{origin}{error}") from None
    return open_files(
        root,
        PackedText(names),
        rows.labels,
        spec,
        request.skip_broken,
        doubt=rows.doubt,
    )


def list_splits(place: Place, request: Request) -> Listing:
    """The splits of a table of images, the names of its classes, and its groups."""
    path, spec = place.path, request.spec
    file = open_table(path, of_samples=True)
    target = spec.target or target_column(path, None, [])
    if target is not None and target not in file.names:
        raise InputError(
            f"{path}: column {target!r} does not exist: expected one of"
            f" {listing(file.names)}{suggestion(target, file.names)}"
        )
    classes = set[str]()
    if target is not None:
        for batch in file.batches():
            texts = text_column(batch.column(target))
            classes |= {str(text) for text in texts if text is not None}
    column = split_column(file.names)
    splits = [""] if column is None else splits_in(file, column)
    return Listing(splits, sorted(classes), _groups_by_split(path, spec))


def _groups_by_split(path: Path, spec: InputSpec) -> dict[str, NDArray[Any]]:
    """Of each split: the column that is named, or one that is called group and has no
    empty cell, as in training.
    """
    table = read_columns(path)
    column = spec.groups
    if column is None:
        column = group_column(table, spec.target)
    elif column not in table or column == spec.target:
        raise InputError(
            f"{path}: column {column!r} cannot be the groups: expected one of"
            f" {listing(table)}{suggestion(column, table)}"
        )
    if column is None:
        return {}
    groups = text_column(table[column])
    by_split = split_column(table)
    if by_split is None:
        return {"": groups}
    rows = rows_of_splits(str(path), by_split, table[by_split])
    return {split: groups[places] for split, places in rows.items()}


IMAGE_TABLE = DataReader(
    read,
    recognises=lambda place: (
        image_column(place.path, place.root, place.drop) is not None
    ),
    open=open_images,
    list_splits=list_splits,
    check=check_columns,
    lists_files=True,
)

"""Tables: CSV, Parquet, Arrow or a data frame with a target column; what is done to its
columns is said in notes.
"""

import shlex
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.columns import (
    check_texts,
    codes_of,
    doubtful_numbers,
    identifies,
    identities,
    parse_columns,
    warn_of_strays,
)
from rfdlc.data.copies import first_copies
from rfdlc.data.dataset import (
    HELD_OUT,
    SKIPPING,
    Dataset,
    Normalisation,
    Split,
)
from rfdlc.data.frames import (
    CLASS,
    categorical,
    columns_of,
    is_frame,
    list_of,
    with_items,
)
from rfdlc.data.inspection import leaking_columns
from rfdlc.data.longtail import far_from_asked, hold_out_indices
from rfdlc.data.reader import DataReader, Place
from rfdlc.data.readers.image_files import is_image
from rfdlc.data.rows import TARGETS, open_table_rows, rows_of_splits, split_column
from rfdlc.data.table import OUTSIDE, ColumnCode, TableEncoder, strays_among
from rfdlc.errors import expect, listing, suggestion
from rfdlc.formats.cells import (
    FEW_CATEGORIES,
    MOST_CATEGORIES,
    Column,
    as_numbers,
    holds_codes,
    parse_column,
    text_column,
)
from rfdlc.formats.dates import is_date
from rfdlc.formats.tables import is_table, open_table, read_columns

Table = dict[str, Any]  # cells by column: a column of pyarrow, or an array
LEAKS = (
    "column {0!r} {1}: if it is known only after the class, or made from it, leave it"
    " out (--drop {2}; in Python drop=[{0!r}])"
)
DATED = (
    "column {!r} holds dates and was left out beside lists of features: new rows are"
    " later than all in training; to keep it, write it as a number, such as the month"
    " or the hour"
)


def read(
    source: Any,
    *,
    target: str | None = None,
    groups: str | None = None,
    split: str | None = None,
    drop: Sequence[str] = (),
    categories: Sequence[str] = (),
    skip_broken: bool = False,
    test_fraction: float = 0.2,
    seed: int = 0,
    time: str | None = None,
) -> Dataset:
    """One row per sample; `target`, `groups`, `split`, `time`, `drop`, `categories`
    name columns.

    Training rows give the encoding. Categories may be numbers, such as codes, which are
    then no quantities.
    """
    path = source.path if isinstance(source, Place) else None
    if path is None:
        where = "data frame"
        table = columns_of(source)
    else:
        where = str(path)
        table = read_columns(path, of_samples=True)
    if isinstance(source, dict | tuple | list):
        expect(
            target is None,
            f"target {target!r} names a column, but labels are given, too: leave one of"
            " them out",
        )
        target = CLASS
    expect(
        len(next(iter(table.values()))),
        f"{where}: has no rows, so there is no training sample",
    )
    single = single_columns(table, drop)
    table = {
        column: cells for column, cells in table.items() if list_of(column) not in drop
    }
    target, found = check_roles(
        where, table, target, groups, split, time, *single, *categories
    )
    if "column 1" in table:
        found.append(
            "the first line holds values and was read as a row: columns are called"
            " column 1, column 2, ..."
        )
    table, absent = _with_class(where, table, target, skip_broken)
    expect(
        not _is_nested(table[target]),
        f"{where}: the target {target!r} holds {getattr(table[target], 'type', '')}:"
        " expected texts or numbers",
    )
    labels, names = classes_of(where, table.pop(target))
    group_of = None
    if groups is not None:
        empty = listing(_missing(table[groups]), 5)
        expect(
            not empty, f"{where}: the group column {groups!r} is empty in row {empty}"
        )
        group_of = text_column(table.pop(groups)).astype(str)
    table, notes = _readable(table, drop, lists=path is None)
    column = split or split_column(table)
    positions = {"train": np.arange(len(labels))}
    if time is not None:
        positions, note = rows_by_time(
            where, time, table.pop(time), test_fraction, column
        )
        notes.append(note)
    elif column is not None:
        positions = rows_of_splits(where, column, table.pop(column))
    coded = {*categories, *_typed_categories(source, table)}
    columns, strays = parse_columns(table, coded)
    dates = (
        [name for name, own in columns.items() if own.dtype.kind == "M"]
        if any(map(list_of, columns))
        else []
    )
    notes += [DATED.format(name) for name in dates if columns.pop(name) is not None]
    check_texts(columns, categories=coded)
    notes += warn_of_strays(strays)
    ids, identity, left_out = identities(table, columns, categories=categories)
    listed = (
        ["if these are image files, name their folder with --root DIR"]
        if ids and is_image(ids[0])
        else []
    )
    told = "; ".join(["", *left_out, *notes, *listed])
    expect(
        columns,
        f"{where}: no column is left to learn from beside the target {target!r}{told}",
    )
    first = None
    if column is None and time is None and test_fraction:
        first = first_copies(
            np.stack([codes_of(column) for column in columns.values()], 1)
        )
        kept, held = hold_out_indices(labels, test_fraction, seed, group_of, first)
        positions, told = (
            {"train": kept, "test": held},
            HELD_OUT.format(len(held), len(labels), seed),
        )
        notes = [
            told,
            *far_from_asked(labels, names, group_of, held, test_fraction),
            *notes,
        ]
    train = positions["train"]
    parsed = {name: column[train] for name, column in columns.items()}
    encoder = replace(
        TableEncoder.fit(parsed, categories=coded, missing=strays), identity=identity
    )
    known = {
        OUTSIDE.format(name, "") for name in columns
    }  # metrics show what far values of a test split do
    whole = Split(encoder.transform(columns, told=known), labels, ids, group_of)
    if first is not None:
        vars(whole)["first"] = (
            first  # not computed again: the note on copies is about this split
        )
    splits = {name: whole.take(rows) for name, rows in positions.items()}
    notes += [
        *left_out,
        *(
            note
            for code in encoder.columns
            for note in _told(code, columns[code.name], table)
        ),
        *found,
    ]
    notes += doubtful_numbers(columns)
    scaling = Normalisation.of_table(splits["train"].array, encoder)
    data = Dataset.of(Path(where).stem, names, splits, notes, scaling)
    for name, found_in in leaking_columns(data.train, encoder, names).items():
        data = replace(
            data, notes=(*data.notes, LEAKS.format(name, found_in, shlex.quote(name)))
        )
        warnings.warn(data.notes[-1], stacklevel=3)
    return replace(
        data,
        encoder=encoder,
        skipped=tuple(f"{where}: row {row} has no target" for row in absent),
    )


def check_columns(place: Place, options: Mapping[str, Any]) -> None:
    """Raise for a role whose column is not in the first line of the table."""
    names = dict.fromkeys(open_table(place.path, of_samples=True).names)
    roles = [options.get(role) for role in ("target", "groups", "split", "time")]
    dropped = single_columns(names, options.get("drop", ()))
    check_roles(str(place.path), names, *roles, *dropped)


def _with_class(
    where: str, table: Table, target: str, skip_broken: bool
) -> tuple[Table, list[int]]:
    """The rows that have a class, and the numbers, from 1 on, of those that
    have none.
    """
    absent = _missing(table[target])
    told = (
        f"{where}: the target {target!r} is missing in row"
        f" {listing(absent, 5)}{_spelt(table[target], absent)}"
    )
    expect(
        skip_broken or not absent,
        f"{told}; remove them, or leave them out with {SKIPPING}",
    )
    if not absent:
        return table, []
    kept = np.setdiff1d(np.arange(len(table[target])), np.array(absent) - 1)
    return {name: cells.take(kept) for name, cells in table.items()}, absent


def _typed_categories(source: Any, table: Table) -> set[str]:
    """Columns of a data frame or a file whose types say that they hold categories,
    unless these are too many.
    """
    if isinstance(source, Place):
        marked = _written_as_categories(source.path)
    else:
        marked = _categories_of_frames(source)
    for name, cells in table.items():
        if str(getattr(cells, "type", "")).startswith("dictionary"):
            marked.add(name)
    return {
        name
        for name in marked & {*table}
        if len({*text_column(table[name])}) <= MOST_CATEGORIES
    }


def _categories_of_frames(source: Any) -> set[str]:
    """Of one data frame, or of those of several splits, with labels or without."""
    parts = source.values() if isinstance(source, dict) else [source]
    marked = set[str]()
    for part in parts:
        frame = part[0] if isinstance(part, tuple | list) else part
        marked |= categorical(frame)
    return marked


def _written_as_categories(path: Path) -> set[str]:
    """Columns of a Parquet file that pandas wrote as categories, whose own types say so
    of texts alone.

    What pandas has not written there, as any file may have it, says nothing.
    """
    from pyarrow.parquet import read_schema

    if path.suffix.lower() != ".parquet" or not path.is_file():
        return set()
    try:
        described = read_schema(path).pandas_metadata
    except (ValueError, RecursionError):  # no JSON
        return set()
    columns = described.get("columns") if isinstance(described, dict) else None
    found = (
        [own for own in columns if isinstance(own, dict)]
        if isinstance(columns, list)
        else []
    )
    return {
        str(own.get("name")) for own in found if own.get("pandas_type") == "categorical"
    }


def _readable(
    table: Table, drop: Sequence[str], lists: bool
) -> tuple[Table, list[str]]:
    """The columns that may become features, with those of `lists` item by item, and
    notes on the others.
    """
    notes = [f"column {column!r} was left out as asked" for column in drop]
    kept = {name: cells for name, cells in table.items() if name not in drop}
    kept = with_items(kept) if lists else kept
    unread = [name for name, cells in kept.items() if _holds_bytes(cells)]
    notes += [
        f"column {name!r} holds bytes that are neither images nor text, and was"
        " left out"
        for name in unread
    ]
    nested = {name: cells.type for name, cells in kept.items() if _is_nested(cells)}
    notes += [
        f"column {name!r} holds {kind}, which is no number, text or date, and was left"
        " out"
        for name, kind in nested.items()
    ]
    unread += nested
    return {name: cells for name, cells in kept.items() if name not in unread}, notes


def single_columns(table: Iterable[str], drop: Sequence[str]) -> list[str]:
    """What is dropped, without columns of lists, which are read as one column
    per item.
    """
    lists = {list_of(column) for column in table}
    return [name for name in drop if name not in lists]


def check_roles(
    where: str, table: Table, target: str | None, *others: str | None
) -> tuple[str, list[str]]:
    """The class column, given or found, and a note if it was found; raises for columns
    that are not there.
    """
    usual, found = (
        [column for column in table if column.lower() in TARGETS],
        list[str](),
    )
    columns = [column for column in table if column.lower() != "split"]
    if target is None:
        likely = listing(
            [*columns[-1:], *columns[:-1]]
        )  # the class is often the last column
        expect(
            len(usual) == 1,
            f"{where}: which column is the class? Name it with target (--target):"
            f" {likely}",
        )
        target, found = (
            usual[0],
            [f"column {usual[0]!r} was taken for the class: target names another"],
        )
    roles = [name for name in (target, *others) if name is not None]
    for name in roles:
        known = f"expected one of {listing(columns)}{suggestion(name, table)}"
        known = (
            "it names several, and drop and categories are repeated for each (--drop a"
            " --drop b)"
            if {*name.split(",")} <= {*table}
            else known
        )
        expect(name in table, f"{where}: column {name!r} does not exist: {known}")
        once = (
            "expected another column for each of target, groups, split, time, drop,"
            " categories"
        )
        expect(
            roles.count(name) == 1, f"{where}: column {name!r} is named twice: {once}"
        )
    return target, found


def _missing(cells: Any) -> list[int]:
    return [row for row, text in enumerate(text_column(cells), 1) if text is None]


def _spelt(cells: Any, rows: Sequence[int]) -> str:
    """What to say of texts that were read as missing, and may be the name of a
    class.
    """
    taken = np.asarray(cells.take(np.array(rows, dtype=np.int64) - 1), dtype=object)
    found = sorted({cell.strip() for cell in taken if isinstance(cell, str)} - {""})
    return (
        f" ({listing(map(repr, found), 3)} means missing: where it is a class,"
        " rename it)"
        if found
        else ""
    )


def classes_of(where: str, cells: Any) -> tuple[NDArray[np.int64], list[str]]:
    """Class indices, and the names in order: numbers by value, text by alphabet."""
    texts, numbers = text_column(cells), parse_column("target", cells, codes=False)
    names = sorted(set(texts))
    dates = numbers.dtype.kind == "M" and len(names) > FEW_CATEGORIES
    expect(
        not dates,
        f"{where}: the target has {len(names)} different dates: expected classes, not"
        " times",
    )
    if numbers.dtype == np.float64:
        told = (
            f"{where}: the target has {len(names)} different fractions: expected"
            " classes, not measurements"
        )
        if len(names) > FEW_CATEGORIES and (numbers % 1 != 0).any():
            expect(len(names) <= len(texts) // 4, told)
            warnings.warn(
                f"{told}; where they are codes, each is a class", stacklevel=2
            )
        names = sorted(names, key=float)
        for one, other in pairwise(names):
            told = (
                f"{where}: the target holds {one!r} and {other!r}, which are one number"
                " and would be two classes"
            )
            expect(float(one) != float(other), f"{told}: write every class in one way")
    index = {name: i for i, name in enumerate(names)}
    return np.fromiter((index[text] for text in texts), np.int64), names


def rows_by_time(
    where: str, name: str, cells: Any, fraction: float, split: str | None
) -> tuple[dict[str, NDArray[np.int64]], str]:
    """About a fraction of the rows to test, the newest, and of the others to calibrate;
    equal times stay together.
    """
    expect(
        split is None,
        f"{where}: time {name!r} and split {split!r} both divide the rows: leave"
        " one out",
    )
    column, missing = (
        parse_column(name, cells, codes=False),
        listing(_missing(cells), 5),
    )
    expect(
        fraction,
        f"{where}: time {name!r} holds the newest rows out: expected test_fraction"
        " above 0",
    )
    expect(
        not missing,
        f"{where}: the time {name!r} is missing in row {missing}: fill it in, or remove"
        " the rows",
    )
    wrong = next(
        (text for text in column if isinstance(text, str) and not is_date(text)), ""
    )
    expect(
        column.dtype != object,
        f"{where}: column {name!r} holds {wrong!r}: as time, expected dates or numbers",
    )
    known, place = np.unique(column, return_inverse=True)
    expect(
        len(known) > 2,
        f"{where}: the time {name!r} has {len(known)} different values: expected 3 or"
        " more",
    )
    test = _newest(place, fraction, 2)
    rest = np.flatnonzero(~test)
    calibrates = _newest(place[rest], fraction, 1)
    found = {
        "train": rest[~calibrates],
        "val": rest[calibrates],
        "test": np.flatnonzero(test),
    }
    sizes = "{:,} old rows train, {:,} calibrate, the newest {:,} test".format(
        *map(len, found.values())
    )
    return found, f"by {name!r}, {sizes}; it is not a feature"


def _newest(place: NDArray[np.int64], fraction: float, least: int) -> NDArray[np.bool_]:
    """Which rows are from that place on, `least` or later, from which there are about
    the fraction of them.
    """
    later = np.cumsum(np.bincount(place)[::-1])[::-1]  # rows from each place on
    return np.asarray(
        place >= least + np.abs(later[least:] - fraction * len(place)).argmin()
    )


def _holds_bytes(cells: Any) -> bool:
    """Whether a column of pyarrow has bytes that are not text."""
    from pyarrow import ArrowException

    if "binary" in str(getattr(cells, "type", "")):
        try:
            cells.cast("binary").cast("string")
        except ArrowException:
            return True
    return False


def _is_nested(cells: Any) -> bool:
    """Whether a column of pyarrow has structs, maps or lists of lists: as texts, each
    would be a category.
    """
    from pyarrow import types

    kind = getattr(cells, "type", None)
    if kind is None or not types.is_nested(kind):
        return False
    inner = getattr(kind, "value_type", kind)
    return types.is_map(kind) or types.is_nested(inner)


def _told(column: ColumnCode, cells: Column, table: Table) -> list[str]:
    missing = (
        sum(cell is None for cell in cells)
        if cells.dtype == object
        else int(np.isnan(as_numbers(cells)).sum())
    )
    coded = holds_codes(table[column.name])
    if column.median is None:
        strays = strays_among(column.categories)
        coding = "holds codes, digits with leading zeros, and " if coded else ""
        said = (
            f"column {column.name!r} {coding}became {len(column.features)} features,"
            f" one per category{strays}"
        )
        identity = identifies(column.name) and len(column.features) > FEW_CATEGORIES
        fix = (
            f"groups={column.name} (--groups) keeps its rows together, drop (--drop)"
            " leaves it out"
        )
        said += f"; it looks like an identifier: {fix}" if identity else ""
        if strays or identity:
            warnings.warn(said, stacklevel=4)
        return [
            said
            + (
                f"; {missing} missing values are a category of their own"
                if missing
                else ""
            )
        ]
    flag = " and marked in a feature of their own" if column.flags_missing else ""
    filled = (
        f"{missing} missing values were filled with {column.filling}{flag}"
        if missing
        else ""
    )
    dates = "dates became one number, days since 1970-01-01" if column.is_date else ""
    said = "; ".join(filter(None, (dates, filled)))
    notes = [f"column {column.name!r}: {said}"] if said else []
    if coded:
        digits = (
            f"column {column.name!r} has digits with leading zeros, as codes have, but"
            " became a number"
        )
        notes.append(
            f"{digits}, having over {MOST_CATEGORIES} kinds: if it is a code, leave it"
            " out with drop (--drop)"
        )
        warnings.warn(notes[-1], stacklevel=4)
    return notes


TABLE = DataReader(
    read,
    recognises=lambda place: is_table(place.path),
    open=open_table_rows,
    check=check_columns,
    holds_features=lambda place: True,
    holds_out=True,
)
FRAME = DataReader(read, recognises=is_frame, holds_out=True)

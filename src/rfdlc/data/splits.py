"""All splits of a source of images, with labels and groups, to embed them."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.dataset import SKIPPING
from rfdlc.data.load import GroupFile, expanded, find_reader, load, locate
from rfdlc.data.readers import arrays, image_files, image_lists, image_table, shards
from rfdlc.data.readers.table import rows_of_splits, split_column
from rfdlc.data.samples import (
    InputSpec,
    Samples,
    image_paths,
    in_memory,
    of_files,
    open_samples,
    splits_in,
    target_column,
)
from rfdlc.errors import expect, listing, suggestion
from rfdlc.formats.cells import text_column
from rfdlc.formats.tables import open_table, read_columns
from rfdlc.probabilities.classes import Classes, as_array

NO_IMAGES = "{}: holds features, not images: there is nothing to embed"


def open_splits(
    source: str | Path,
    spec: InputSpec,
    *,
    root: str | Path | None = None,
    target: str | None = None,
    groups: str | Path | None = None,
    skip_broken: bool = False,
    allow_links: bool = False,
) -> tuple[dict[str, Samples], tuple[str, ...]]:
    """All splits of a source of images ("" where it has none), and the names of its
    classes, as they are found.
    """
    options = {"skip_broken": skip_broken, "allow_links": allow_links}
    found, names = _splits_of(source, spec, root, target, **options)
    place = locate(source, root)
    table = image_table.image_column(place, expanded(root)) is not None
    group_of = (
        _column_groups(place, found, groups, target)
        if table
        else _file_groups(found, groups)
    )
    found = {
        split: replace(own, groups=group_of.get(split, own.groups))
        for split, own in found.items()
    }
    labelled = any((own.labels >= 0).any() for own in found.values())
    lacking = {split: _lacking(own, labelled) for split, own in found.items()}
    each = [reason for own in lacking.values() for reason in own.values()]
    told = (
        f"{place}: {len(each):,} of {sum(map(len, found.values())):,} images lack"
        f" something: {listing(each, 3)}"
    )
    fix = f"fill it in, or leave these images out with {SKIPPING}"
    if each and not skip_broken:
        # A folder need not be divided into classes: what lies beside class folders may
        # be meant to stay unlabelled.
        expect(
            not table and find_reader(source, root)[0] is image_files.read_folder,
            f"{told}: {fix}",
        )
        warnings.warn(f"{told}; no labels are written: {fix}", stacklevel=3)
        return found, names
    return {
        split: replace(own, left_out=lacking[split]) for split, own in found.items()
    }, names


def _lacking(samples: Samples, labelled: bool) -> dict[int, str]:
    """What rows lack: a label where others have one, or a group."""
    absent = {"label": (samples.labels < 0) & labelled}
    absent |= (
        {}
        if samples.groups is None
        else {"group": np.array([group is None for group in samples.groups])}
    )
    rows = np.flatnonzero(np.any([*absent.values()], axis=0)).tolist()
    names = {
        row: f"sample {row}" if samples.ids is None else samples.ids[row]
        for row in rows
    }
    return {
        row: (
            f"{names[row]} has no"
            f" {' and no '.join(what for what in absent if absent[what][row])}"
        )
        for row in rows
    }


def _column_groups(
    path: Path,
    splits: Mapping[str, Samples],
    given: str | Path | None,
    target: str | None,
) -> dict[str, NDArray[Any]]:
    """Of a table: the column that is named, or one that is called group and has no
    empty cell, as in training.
    """
    table = read_columns(path)
    column = image_table.group_column(table, target) if given is None else str(given)
    if column is None:
        return {}
    fix = f"expected one of {listing(table)}{suggestion(column, table)}"
    expect(
        column in table and column != target,
        f"{path}: column {column!r} cannot be the groups: {fix}",
    )
    cells, of = text_column(table[column]), split_column(table)
    rows = (
        {"": np.arange(len(cells))}
        if of is None
        else rows_of_splits(str(path), of, table[of])
    )
    return {split: cells[rows[split]] for split in splits}


def _file_groups(
    splits: Mapping[str, Samples], given: str | Path | None
) -> dict[str, Any]:
    """Of other sources: a file as in training."""
    file = None if given is None else GroupFile(Path(given).expanduser())
    found = (
        {
            split: file.find(split or "train", len(own), own.ids)
            for split, own in splits.items()
        }
        if file
        else {}
    )
    return {split: own for split, own in found.items() if own is not None}


def _splits_of(
    source: str | Path,
    spec: InputSpec,
    root: str | Path | None,
    target: str | None,
    **options: Any,
) -> tuple[dict[str, Samples], tuple[str, ...]]:
    place, folder = locate(source, root), expanded(root)
    splits, names = [""], list[str]()
    table = image_table.image_column(place, folder) is not None
    named = table or target is None or shards.holds_shards(place)
    expect(
        named,
        f"target {target!r} is a column of a table of images, but {source} is not one",
    )
    if table:
        target = target or target_column(place, spec, [])
        splits, names = _of_table(place, target)
    elif not image_paths(source, root):
        reader, found_at = find_reader(source, root)
        if reader is image_files.read_folder:
            splits, names = image_files.folder_splits(
                found_at, options.get("allow_links", False)
            )
        elif reader is image_lists.read_list:
            files, names = image_lists.list_splits(found_at, folder)
            known = replace(spec, classes=Classes(tuple(names)))
            skip, links = (
                options.get("skip_broken", False),
                options.get("allow_links", False),
            )
            lists = {
                split: image_lists.find_listed_images(file, names, links, folder)
                for split, file in files.items()
            }
            return {
                split: of_files(*found, known, skip) for split, found in lists.items()
            }, tuple(names)
        elif reader is shards.read:
            splits, names = shards.list_splits(found_at, target)
        elif reader in (arrays.read, arrays.read_npy):
            splits, names = _of_arrays(source, place.name, found_at)
        else:
            data = load(source, root=root, test_fraction=0)
            expect(data.kind == "images", NO_IMAGES.format(source))
            return {
                split: in_memory(own) for split, own in data.splits.items()
            }, data.classes.names
    known = replace(
        spec, classes=Classes(tuple(names)) if names else spec.classes, target=target
    )
    opened = {
        split: open_samples(source, known, root=root, split=split or None, **options)
        for split in splits
    }
    return opened, tuple(names)


def _of_table(place: Path, target: str | None) -> tuple[list[str], list[str]]:
    """The splits of a table of images, and the names of its classes."""
    file = open_table(place, of_samples=True)
    known = (
        f"expected one of {listing(file.names)}{suggestion(str(target), file.names)}"
    )
    expect(
        target is None or target in file.names,
        f"{place}: column {target!r} does not exist: {known}",
    )
    texts = (
        [text_column(batch.column(target)) for batch in file.batches()]
        if target
        else []
    )
    column = split_column(file.names)
    splits = [""] if column is None else splits_in(file, column)
    return splits, sorted(
        {str(text) for cells in texts for text in cells if text is not None}
    )


def _of_arrays(
    source: str | Path, name: str, place: Path
) -> tuple[list[str], list[str]]:
    """The splits of arrays of images, and the names of their classes."""
    found = arrays.by_split(name, arrays.open_inputs(place, streamed=True))
    given = found.get("", {}).pop("names", None)
    roles = {split: own for split, own in found.items() if own}
    expect(
        all(len(own["x"].shape) > 2 for own in roles.values() if "x" in own),
        NO_IMAGES.format(source),
    )
    labelled = any("y" in own for own in roles.values())
    names = (
        arrays.class_names(
            name, {split or "train": own for split, own in roles.items()}
        )
        if labelled
        else []
    )
    return list(roles), (
        names if given is None else [str(each) for each in as_array(given)]
    )

"""All splits of a source of images, with labels and groups, to embed them."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rfdlc.data.dataset import SKIPPING
from rfdlc.data.load import GroupFile, load
from rfdlc.data.opening import image_paths, open_samples
from rfdlc.data.reader import DataReader, Listing, Place, Request
from rfdlc.data.registry import find_reader, locate
from rfdlc.data.samples import InputSpec, Samples, in_memory
from rfdlc.errors import InputError, listing
from rfdlc.probabilities.classes import Classes

Splits = dict[str, Samples]


def open_splits(
    source: str | Path,
    spec: InputSpec,
    *,
    root: str | Path | None = None,
    target: str | None = None,
    groups: str | Path | None = None,
    skip_broken: bool = False,
    allow_links: bool = False,
) -> tuple[Splits, tuple[str, ...]]:
    """All splits of a source of images ("" where it has none), and the names of its
    classes, as they are found.
    """
    column = None if groups is None else str(groups)
    spec = replace(spec, target=target, groups=column)
    request = Request(spec, None, skip_broken, allow_links)
    partly_labelled = False
    if image_paths(source, root):
        _check_target(source, target, None)
        contents = Listing([""], [])
        splits = _open_each(source, root, request, contents)
    else:
        reader, place = find_reader(source, root)
        _check_target(source, target, reader)
        contents, splits = _read(source, root, reader, place, request)
        partly_labelled = reader.unlabelled
    group_of = contents.groups or _groups_of_file(splits, groups)
    for split, samples in splits.items():
        if split in group_of:
            splits[split] = replace(samples, groups=group_of[split])
    incomplete = _incomplete(splits)
    reasons = [reason for rows in incomplete.values() for reason in rows.values()]
    if reasons and not skip_broken:
        count = sum(map(len, splits.values()))
        lacking = (
            f"{locate(source, root)}: {len(reasons):,} of {count:,} images lack"
            f" something: {listing(reasons, 3)}"
        )
        fix = f"fill it in, or leave these images out with {SKIPPING}"
        if not partly_labelled:
            raise InputError(f"{lacking}: {fix}")
        warnings.warn(f"{lacking}; no labels are written: {fix}", stacklevel=3)
        return splits, tuple(contents.classes)
    for split, samples in splits.items():
        splits[split] = replace(samples, left_out=incomplete[split])
    return splits, tuple(contents.classes)


def _check_target(
    source: str | Path, target: str | None, reader: DataReader | None
) -> None:
    """Raise where a column of labels is named for images without columns."""
    named = reader is not None and reader.list_splits and "target" in reader.options
    if target is not None and not named:
        raise InputError(
            f"target {target!r} is a column of a table of images, but {source} is not"
            " one"
        )


def _read(
    source: str | Path,
    root: str | Path | None,
    reader: DataReader,
    place: Place,
    request: Request,
) -> tuple[Listing, Splits]:
    """What the splits hold, and their samples: in memory, where the format has no other
    way.
    """
    if reader.holds_features is not None and reader.holds_features(place):
        raise InputError(_no_images(source))
    if reader.list_splits is not None:
        contents = reader.list_splits(place, request)
        return contents, _open_each(source, root, request, contents)
    data = load(source, root=root, test_fraction=0)
    if data.kind != "images":
        raise InputError(_no_images(source))
    splits = {name: in_memory(split) for name, split in data.splits.items()}
    return Listing([*splits], data.classes.names), splits


def _no_images(source: str | Path) -> str:
    return f"{source}: holds features, not images: there is nothing to embed"


def _open_each(
    source: str | Path, root: str | Path | None, request: Request, contents: Listing
) -> Splits:
    spec = request.spec
    if contents.classes:
        spec = replace(spec, classes=Classes(tuple(contents.classes)))
    return {
        split: open_samples(
            source,
            spec,
            root=root,
            split=split or None,
            skip_broken=request.skip_broken,
            allow_links=request.allow_links,
        )
        for split in contents.splits
    }


def _groups_of_file(splits: Splits, groups: str | Path | None) -> dict[str, Any]:
    """Those of a file, as in training; none for a test split that needs none."""
    if groups is None:
        return {}
    file = GroupFile(Path(groups).expanduser())
    group_of = {}
    for split, samples in splits.items():
        found = file.find(split or "train", len(samples), samples.ids)
        if found is not None:
            group_of[split] = found
    return group_of


def _incomplete(splits: Splits) -> Mapping[str, dict[int, str]]:
    """The rows of every split that lack a label where others have one, or a group, and
    what they lack.
    """
    labelled = any((samples.labels >= 0).any() for samples in splits.values())
    return {split: _lacking(samples, labelled) for split, samples in splits.items()}


def _lacking(samples: Samples, labelled: bool) -> dict[int, str]:
    absent = {"label": (samples.labels < 0) & labelled}
    if samples.groups is not None:
        absent["group"] = np.array([group is None for group in samples.groups])
    reasons = dict[int, str]()
    for row in np.flatnonzero(np.any([*absent.values()], axis=0)).tolist():
        name = f"sample {row}" if samples.ids is None else samples.ids[row]
        parts = [part for part in absent if absent[part][row]]
        reasons[row] = f"{name} has no {' and no '.join(parts)}"
    return reasons

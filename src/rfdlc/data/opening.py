"""Samples of any source, to predict them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rfdlc.data.dataset import Dataset, Split, choose_split
from rfdlc.data.load import load
from rfdlc.data.reader import Request
from rfdlc.data.readers.image_files import is_image
from rfdlc.data.readers.image_folder import open_images
from rfdlc.data.registry import find_reader, locate
from rfdlc.data.rows import TableRows
from rfdlc.data.samples import InputSpec, Samples, in_memory, matched
from rfdlc.errors import InputError, listing, suggestion
from rfdlc.formats.tables import is_table
from rfdlc.probabilities.classes import Classes

Sources = str | Path | Sequence[str | Path]  # several are image files


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
    request = Request(spec, split, skip_broken, allow_links)
    samples = _opened(source, root, request)
    if keep:
        return _with_columns(samples, source, root, split, keep)
    return samples


def _opened(source: Sources, root: str | Path | None, request: Request) -> Samples:
    files = image_paths(source, root)
    if files:
        if request.split is not None:
            raise InputError(
                f"{files[0]}: an image file has no split {request.split!r}: leave it"
                " out"
            )
        return open_images(files, request)
    assert isinstance(source, str | Path)
    reader, place = find_reader(source, root)
    if reader.open is not None:
        return reader.open(place, request)
    options = dict[str, Any]()
    if "image_size" in reader.options:
        options["image_size"] = request.spec.input_shape[-1]
    data = load(source, root=root, test_fraction=0, **options)
    return in_memory(split_of(data, request.split, request.spec.classes))


def split_of(data: Dataset, split: str | None, classes: Classes) -> Split:
    """A split of a data set, labelled by the indices of `classes`: unknown where the
    data set has other classes.
    """
    chosen = data.splits[choose_split(data.name, data.splits, split)]
    labels = matched(chosen.labels, data.classes.names, classes)
    return Split(chosen.inputs, labels, chosen.ids)


def image_paths(source: Sources, root: str | Path | None = None) -> list[Path]:
    """The image files that a source names; nothing for other sources. Several paths
    must all be image files.
    """
    one = isinstance(source, str | Path)
    paths = [source] if isinstance(source, str | Path) else source
    places = [locate(path, root) for path in paths]
    others = [
        str(place) for place in places if not (place.is_file() and is_image(place.name))
    ]
    if not others:
        return places
    if one:
        return []
    raise InputError(
        f"{listing(others, 3)}: not an existing image file: expected several image"
        " files, or one source: a folder, or a list with one path per line"
    )


def holds_features(source: Sources, root: str | Path | None = None) -> bool:
    """Whether a source holds features (or another table) rather than images."""
    if image_paths(source, root):
        return False
    reader, place = find_reader(source, root)
    return reader.holds_features is not None and reader.holds_features(place)


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
    refused = f"column {listing(keep)} cannot be kept"
    if not isinstance(source, str | Path):
        raise InputError(
            f"{refused}: a list of image files is not a table: leave out keep (--keep)"
        )
    path = locate(source, root)
    if not is_table(path):
        raise InputError(f"{refused}: {path} is not a table: leave out keep (--keep)")
    rows = TableRows(path, samples.split or split)
    for name in keep:
        if name not in rows.names:
            raise InputError(
                f"{path}: {refused}: there is no column {name!r}: expected one of"
                f" {listing(rows.names, 20)}{suggestion(name, rows.names)}"
            )
    if len(rows.labels) != len(samples):
        raise InputError(
            f"{path}: {refused}: it has {len(rows.labels):,} rows for"
            f" {len(samples):,} samples; join them by id"
        )

    def columns(wanted: range) -> dict[str, Any]:
        cells = rows[wanted]
        copied = {name: _plain(cells[name]) for name in keep}
        return {**samples.columns(wanted), **copied}

    return replace(samples, columns=columns)


def _plain(cells: Any) -> Any:
    """A column without a dictionary, and texts in the one type that is written."""
    from pyarrow import string, types

    kind = cells.type
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_large_string(kind) or types.is_string_view(kind):
        kind = string()
    return cells.cast(kind)

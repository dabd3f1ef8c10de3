"""Files of features that `rfdlc embed` wrote: Parquet with a column of lists, and how
they were made.
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.dataset import Dataset, Split, choose_split
from rfdlc.data.embedding import Embedding
from rfdlc.data.reader import DataReader, Place, Request
from rfdlc.data.readers.arrays import from_arrays
from rfdlc.data.readers.table import classes_of
from rfdlc.data.rows import (
    TableRows,
    open_table_rows,
    rows_of_splits,
    split_column,
    splits_in,
    target_column,
)
from rfdlc.data.samples import Chunk, Samples, fingerprint_of
from rfdlc.errors import expect, listing
from rfdlc.formats.cells import text_column
from rfdlc.formats.files import parse_json
from rfdlc.formats.tables import PARQUET, bounded, open_table, reading

KEY, CLASSES = "rfdlc.embedding", "rfdlc.classes"  # of the metadata, in JSON
FEATURES, GROUP = "features", "group"  # columns


def metadata(path: Path) -> dict[str, Any] | None:
    """`Embedding` and class names in a Parquet file of `rfdlc embed`; None for any
    other file.
    """
    if path.suffix.lower() not in PARQUET or not path.is_file():
        return None
    from pyarrow import ArrowException
    from pyarrow.parquet import read_schema

    found, names = dict[bytes, bytes](), []
    with suppress(
        OSError, ValueError, ArrowException
    ):  # reading it will say what is wrong
        schema = read_schema(path)
        found = (schema.metadata or {}) if FEATURES in schema.names else {}
    if KEY.encode() not in found:
        return None
    with suppress(ValueError):
        names = parse_json(found.get(CLASSES.encode(), b""))
    known = [str(name) for name in names] if isinstance(names, list) else []
    return {
        "embedding": Embedding.read(found[KEY.encode()], path).beside(path),
        "names": known,
    }


def read(place: Place) -> Dataset:
    """Features, labels, ids and splits, without the encoding of a table."""
    from pyarrow import Table
    from pyarrow.parquet import ParquetFile

    path = place.path
    found = metadata(path)
    assert found is not None
    with reading(path, "Parquet"):
        file = ParquetFile(path)
        cells = Table.from_batches(
            bounded(path, file.iter_batches()), file.schema_arrow
        )
    embedding = found["embedding"]
    known = {name: cells[name] for name in cells.column_names if name != FEATURES}
    expect(
        "target" in known,
        f"{path}: has no labels: embed a labelled source, or add a column target",
    )
    absent = listing(
        [
            row
            for row, text in enumerate(text_column(known["target"]), 1)
            if text is None
        ],
        5,
    )
    expect(not absent, f"{path}: the target is missing in row {absent}: remove them")
    labels, names = classes_of(str(path), known["target"])
    texts = np.array(names)[labels]
    present = set(names)
    order = (
        [name for name in found["names"] if name in present]
        if present <= {*found["names"]}
        else names
    )
    column = split_column(known)
    splits = (
        rows_of_splits(str(path), column, known[column])
        if column
        else {"": np.arange(len(labels))}
    )
    features = features_of(cells[FEATURES], embedding.width)
    arrays: dict[str, Any] = {"names": order}
    for split, rows in splits.items():
        own = {"x": features[rows], "y": texts[rows]}
        own |= (
            {"ids": text_column(known["id"])[rows].astype(str)} if "id" in known else {}
        )
        groups = text_column(known[GROUP])[rows] if GROUP in known else np.full(1, None)
        own |= {} if (groups == None).all() else {"groups": groups}  # noqa: E711
        arrays |= {
            f"{split}_{role}": values for role, values in own.items() if len(rows)
        }
    data = from_arrays(path.stem, arrays)
    notes = (
        ()
        if data.train.groups is None
        else (f"column {GROUP!r} says which samples belong together",)
    )
    return replace(data, embedding=embedding, notes=(*data.notes, *notes))


def open_features(place: Place, request: Request) -> Samples:
    """Features of the same embedding as those that the model was trained on; for a
    model of tables, the rows of a table.
    """
    path, spec = place.path, request.spec
    made = metadata(path)
    if made is None or spec.encoder is not None:
        return open_table_rows(place, request)
    embedding: Embedding = made["embedding"]
    spec.check_embedding(path, embedding)
    file = open_table(path)
    split = request.split
    column = split_column(file.names)
    if column is not None:
        split = choose_split(str(path), splits_in(file, column), split)
    target = target_column(path, spec.target, [FEATURES])
    rows = TableRows(path, split, target, spec.classes.names)

    def read(wanted: range) -> Chunk:
        cells = rows[wanted]
        columns = [cells[f"{FEATURES}[{i}]"].to_numpy() for i in range(embedding.width)]
        ids = None
        if "id" in cells:
            ids = text_column(cells["id"]).astype(str).tolist()
        labels = rows.labels[wanted.start : wanted.stop]
        return Chunk(Split(np.stack(columns, axis=1), labels, ids))

    return Samples(
        rows.labels,
        named="id" in rows.names,
        fingerprint=fingerprint_of(path),
        read=read,
        doubt=rows.doubt,
        split=split,
    )


def features_of(column: Any, width: int) -> NDArray[np.float32]:
    """A column of lists as one array (rows, width)."""
    from pyarrow import compute

    flat = (
        compute.list_flatten(column).to_numpy(zero_copy_only=False)
        if len(column)
        else np.empty(0)
    )
    expect(
        flat.size == len(column) * width,
        f"column {FEATURES!r} has {flat.size} numbers: expected {width} per row",
    )
    return flat.reshape(-1, width).astype(np.float32, copy=False)


EMBEDDED = DataReader(
    read,
    recognises=lambda place: metadata(place.path) is not None,
    open=open_features,
    holds_features=lambda place: True,
)

"""embed: features of any number of images by any network; after a kill, the same call
continues.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.embedding import Embedding
from rfdlc.data.images import PackedText
from rfdlc.data.readers.arrays import EMBEDDING
from rfdlc.data.readers.embedded import CLASSES, FEATURES, GROUP, KEY
from rfdlc.data.samples import Chunk, InputSpec, Samples, digest_of
from rfdlc.data.splits import open_splits
from rfdlc.errors import choose, expect
from rfdlc.formats.files import replacing
from rfdlc.formats.resumable import ranks
from rfdlc.predicting.parts import (
    ArrayStore,
    Computed,
    Parts,
    Report,
    TableStore,
)
from rfdlc.predicting.predict import local_device
from rfdlc.probabilities.classes import Classes
from rfdlc.probabilities.predictions import readable_ids
from rfdlc.training.building import choose_device
from rfdlc.training.embedding import Embedder, new_embedder

OUTPUTS = (".parquet", ".npz")
ROWS = 1024  # of a part: what a kill costs
ON_GPU, ON_CPU, BYTES = (
    256,
    32,
    2**26,
)  # images computed together, and the most bytes of them
UNLABELLED = Classes(("unlabelled",))


@dataclass(frozen=True)
class Embedded:
    """What was written."""

    path: Path
    samples: int  # rows of the file
    skipped: int  # broken images that were left out
    embedding: Embedding
    weights: Path  # a copy of the network's weights, for new images
    complete: bool = True  # False where other processes still have parts to do
    skipped_file: Path | None = None  # names the broken images


def embed(
    source: str | Path,
    out: str | Path,
    *,
    backbone: str,
    pretrained: str = "none",
    layers: Sequence[str] = (),
    flips: bool = False,
    image_size: int = 0,
    channels: int = 3,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    fit: str | None = None,
    crop: float | None = None,
    interpolation: str | None = None,
    options: Mapping[str, Any] | None = None,
    half: bool = False,
    batch_size: int = 0,
    device: str = "auto",
    root: str | Path | None = None,
    target: str | None = None,
    groups: str | Path | None = None,
    skip_broken: bool = False,
    allow_links: bool = False,
) -> Embedded:
    """Write the features of images by any network, in constant memory; after a kill,
    the same call continues.

    The file keeps how it was made, and a copy of the weights is written beside it: a
    model that is trained on the file predicts from images.

    Parameters
    ----------
    source, root, target, groups
        A folder, list or table of images, arrays of images, or the name of a data set;
        its folder, or that of a list's images; the class column of a table; which
        images belong together, as in `rfdlc.load`. All splits are embedded.
    out
        `.parquet` or `.npz`.
    backbone, pretrained, options
        `timm:NAME`, `package.module:function`, a file `.onnx`, or the name of a
        built-in backbone; its weights, a safetensors file, `hub` or `none`; further
        arguments of timm.
    layers, flips
        Names of modules (of ONNX: of outputs) whose mean over pixels or tokens is
        taken, side by side, by default `output`; whether the features of an image and
        its mirror image are averaged.
    image_size, channels, mean, std, fit, crop, interpolation
        Where they differ from what the network says: the side of images, colour (3) or
        grey (1), mean and standard deviation of channels on the scale 0..1; for image
        files `crop`, `pad` or `stretch`, the fraction of the square that is used, and
        `bilinear` or `bicubic`.
    half, batch_size, device
        Compute in 16 bits on a GPU; images computed together; `auto`, `cpu`, `cuda` or
        `cuda:N`.
    skip_broken, allow_links
        Leave out and list images that cannot be read, or have no label or group where
        others have one; accept links that leave a folder of images.

    Examples
    --------
    >>> from tempfile import mkdtemp
    >>> import rfdlc
    >>> done = embed(
    ...     "digits-lt",
    ...     f"{mkdtemp()}/digits.npz",
    ...     backbone="resnet8",
    ...     channels=1,
    ...     image_size=8,
    ... )
    >>> done.samples, rfdlc.load(done.path).input_shape
    (885, (64,))
    """
    path, kind = Path(out), choose("kind of file", Path(out).suffix.lower(), OUTPUTS)
    together = (
        f"{ranks()[1]} processes write one file together in Parquet alone: choose"
        " .parquet"
    )
    expect(ranks()[1] == 1 or kind == ".parquet", together)
    place = choose_device(local_device() if device == "auto" else device)
    given: dict[str, Any] = {
        "layers": tuple(layers) or None,
        "flips": flips,
        "half": half,
        "crop": crop,
    }
    given |= {
        "mean": mean,
        "std": std,
        "interpolation": interpolation,
        "fit": fit,
        "options": options,
    }
    embedder = new_embedder(
        backbone,
        pretrained,
        device=place,
        image_size=image_size,
        channels=channels,
        **given,
    )
    shape = embedder.embedding.input_shape
    spec = InputSpec(
        UNLABELLED, shape, resizing=embedder.embedding.resizing, target=target
    )
    where: dict[str, Any] = {
        "root": root,
        "target": target,
        "groups": groups,
        "skip_broken": skip_broken,
    }
    where |= {"allow_links": allow_links}
    splits, names = open_splits(source, spec, **where)
    weights = path.with_name(f"{path.name}.{embedder.embedding.weights_name}")
    with replacing(weights) as beside:
        digest = embedder.save(beside)
    embedding = embedder.embedding.model_copy(
        update={"weights": digest, "file": weights.name}
    )
    size = batch_size or (ON_GPU if place.type == "cuda" else ON_CPU)
    rows = Rows(
        embedder,
        splits,
        names,
        max(1, min(size, BYTES // int(np.prod(shape)))),
        kind == ".parquet",
    )
    job = {
        "embedding": embedding.model_dump(mode="json"),
        "source": [own.fingerprint for own in splits.values()],
    }
    if GROUP in rows.names:
        known = (() if own.groups is None else own.groups for own in splits.values())
        job["groups"] = digest_of(
            packed for own in known for packed in PackedText(map(str, own)).packed
        )
    count = sum(map(len, splits.values()))
    parts = Parts(
        path, rows.store(embedding), count, ROWS, job | {"columns": rows.names}
    )
    complete = parts.fill(rows.compute, "Embedding")
    skipped, listed = parts.skipped if complete else (0, None)
    return Embedded(
        path, count - skipped, skipped, embedding, weights, complete, listed
    )


class Rows:
    """From images of all splits, one after another, to the columns of the file."""

    def __init__(
        self,
        embedder: Embedder,
        splits: Mapping[str, Samples],
        classes: Sequence[str],
        size: int,
        tables: bool,
    ) -> None:
        self.embedder, self.splits, self.classes, self.size, self.tables = (
            embedder,
            splits,
            classes,
            size,
            tables,
        )
        self.labelled = bool(classes) and all(own.labelled for own in splits.values())
        named = all(own.named for own in splits.values())
        grouped = any(own.groups is not None for own in splits.values())
        known = {
            "id": named,
            "target": self.labelled,
            "split": set(splits) != {""},
            GROUP: grouped,
        }
        self.names = [name for name, has in known.items() if has]

    def store(self, embedding: Embedding) -> Any:
        """How parts are written."""
        text, names = (
            embedding.model_dump_json(),
            list(self.classes) if self.labelled else [],
        )
        if not self.tables:
            return ArrayStore({EMBEDDING: text} | ({"names": names} if names else {}))
        import pyarrow

        columns = [(name, pyarrow.string()) for name in self.names]
        columns += [(FEATURES, pyarrow.list_(pyarrow.float32(), embedding.width))]
        kept = {KEY: text, CLASSES: json.dumps(names, ensure_ascii=False)}
        return TableStore(
            pyarrow.schema(columns, kept),
            ".parquet",
            ["target", "split", GROUP],
            embedding.width,
        )

    def compute(self, parts: Sequence[range], report: Report) -> Iterator[Computed]:
        """Each part in turn: what the store writes, and what was wrong with the images
        that were left out.
        """
        for _, found in groupby(
            self.embedder.stream(self._read(parts)), lambda each: each[0][0]
        ):
            pieces = list[tuple[str, Chunk, Any]]()
            for (_, split, piece), features in found:
                pieces.append((split, piece, features))
                report(len(piece.split) + len(piece.broken))
            yield (
                self._rows(pieces),
                [line for _, piece, _ in pieces for line in piece.broken],
            )

    def _read(
        self, parts: Sequence[range]
    ) -> Iterator[tuple[tuple[int, str, Chunk], NDArray[np.uint8]]]:
        """Part, split and the rest of each chunk, and its images; each split is read
        ahead of the network.
        """
        first = 0
        for name, samples in self.splits.items():
            stop = first + len(
                samples
                # rows of parts are counted over all splits, those of a split from its
                # first
            )
            own = [
                range(max(rows.start, first) - first, min(rows.stop, stop) - first)
                for rows in parts
            ]
            wanted = [(number, rows) for number, rows in enumerate(own) if rows]
            for place, piece in samples.read_ahead(
                [rows for _, rows in wanted], self.size
            ):
                rest = replace(
                    piece.split, inputs=piece.split.labels
                )  # images are not kept until the part is done
                yield (
                    (wanted[place][0], name, Chunk(rest, piece.broken)),
                    piece.split.array,
                )
            first += len(samples)

    def _rows(self, pieces: Sequence[tuple[str, Chunk, Any]]) -> Any:
        splits, found = (
            [piece.split for _, piece, _ in pieces],
            [features for *_, features in pieces],
        )
        of = [split for split, piece, _ in pieces for _ in range(len(piece.split))]
        columns: dict[str, Any] = {
            "split": of,
            "id": [name for own in splits for name in readable_ids(own.ids or ())],
        }
        if self.labelled:
            columns["target"] = [
                self.classes[label] for own in splits for label in own.labels
            ]
        none = np.full(ROWS, None)  # of a test split of its own, which needs no groups
        columns[GROUP] = [
            group
            for own in splits
            for group in (none[: len(own)] if own.groups is None else own.groups)
        ]
        features = np.concatenate(found)
        if not self.tables:
            texts = {"id": "ids", "target": "y", GROUP: "groups"}
            given = {texts[name]: columns[name] for name in self.names if name in texts}
            arrays = {
                name: np.array([text or "" for text in own], dtype=str)
                for name, own in given.items()
            }
            return {"x": features, "split": np.array(of, dtype=str), **arrays}
        import pyarrow

        values = pyarrow.FixedSizeListArray.from_arrays(
            features.reshape(-1), features.shape[1]
        )
        cells = [
            pyarrow.array(
                [None if t is None else str(t) for t in columns[name]], pyarrow.string()
            )
            for name in self.names
        ]
        return pyarrow.table([*cells, values], [*self.names, FEATURES])

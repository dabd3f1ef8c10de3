"""Ray Data: deciding, predicting and embedding as stages of a dataset; reading, retries
and writing are Ray's.

A stage is `dataset.map_batches`. Deciding is a function that any worker calls; a model
is loaded once per actor, of which each has a GPU where the cluster has some. Ray starts
actors that died again, and repeats their blocks.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rfdlc.decisions.decider import Decider
from rfdlc.decisions.utility import Utility
from rfdlc.errors import InputError, expect, listing
from rfdlc.imports import import_own, known_here
from rfdlc.lakes.tables import DecideTable
from rfdlc.probabilities.predictions import Predictions
from rfdlc.probabilities.priors import PriorLike

if TYPE_CHECKING:
    from rfdlc.predicting.predict import Predicted

PART_ROWS = 1024  # samples of a source that an actor predicts at a time


def decide(
    dataset: Any,
    decider: Decider,
    *,
    keep: Sequence[str] = (),
    logits: bool = False,
    **options: Any,
) -> Any:
    """The decisions of a Ray dataset with one column per class.

    Parameters
    ----------
    dataset : ray.data.Dataset
    decider, keep, logits
        As of `DecideTable`.
    **options
        Of `map_batches`, such as `batch_size` and `num_cpus`.

    Returns
    -------
    ray.data.Dataset
        Columns `action` and `expected_utility`, beside those that are kept.
    """
    given = {"batch_format": "pyarrow", "zero_copy_batch": True} | options
    return dataset.map_batches(DecideTable(decider, tuple(keep), logits), **given)


def predict(
    dataset: Any,
    run: str | Path,
    *,
    inputs: str | None = None,
    keep: Sequence[str] = (),
    utility: Utility | None = None,
    raw: bool = False,
    **options: Any,
) -> Any:
    """The predictions of a trained model for a Ray dataset, as `rfdlc.predict` writes
    them to tables.

    Parameters
    ----------
    dataset : ray.data.Dataset
        Rows of a table with the columns that the model was trained on; or a column of
        arrays, images or features.
    run : str or Path
        The run folder, at a place that all machines of the cluster can read.
    inputs : str, optional
        The column of arrays; by default the rows of the table are the samples.
    keep : sequence of str
        Columns that are copied.
    utility, raw
        As of `rfdlc.predict`.
    **options
        Of `map_batches`, such as `concurrency` (actors), `num_gpus` and `batch_size`.
    """
    given = {
        "run": str(run),
        "inputs": inputs,
        "keep": tuple(keep),
        "utility": utility,
        "raw": raw,
    }
    return dataset.map_batches(
        PredictBatch, fn_constructor_kwargs=given, **_actors(options)
    )


def embed(
    dataset: Any,
    backbone: str,
    *,
    inputs: str = "image",
    features: str = "features",
    keep: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """The features of images in a Ray dataset by any network.

    Parameters
    ----------
    dataset : ray.data.Dataset
        With a column of images of the size that the network needs: uint8, channels
        last, as Ray reads them, or first.
    backbone : str
        As of `rfdlc.embed`.
    inputs, features, keep
        The column of images, the column that is written, and columns that are copied.
    settings : mapping
        Further arguments of `rfdlc.embed` about the network: `pretrained`, `layers`,
        `image_size`, `half`, ...
    **options
        Of `map_batches`, such as `concurrency` (actors), `num_gpus` and `batch_size`.
    """
    given: dict[str, Any] = {
        "backbone": backbone,
        "inputs": inputs,
        "features": features,
        "keep": tuple(keep),
    }
    given |= {"settings": dict(settings or {})}
    return dataset.map_batches(
        EmbedBatch, fn_constructor_kwargs=given, **_actors(options)
    )


class PredictBatch:
    """Predicts batches of columns (arrays by name)."""

    def __init__(
        self,
        run: str,
        inputs: str | None,
        keep: Sequence[str],
        utility: Utility | None,
        raw: bool,
    ) -> None:
        from rfdlc.predicting.predict import Table
        from rfdlc.training.model import Model

        self.model, self.inputs, self.keep = Model.load(run), inputs, keep
        self.model.decider = self.model.decider.replace(utility=utility)
        self.table = Table(self.model, raw)
        clash = [name for name in keep if name in self.table.schema.names]
        expect(
            not clash,
            f"column {listing(clash)} cannot be kept: predictions are written to a"
            " column of this name",
        )

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        kept = {name: batch[name] for name in self.keep}
        if not len(next(iter(batch.values()))):
            return kept | {
                name: np.empty(0, dtype=np.float32) for name in self.table.schema.names
            }
        rows = {name: batch[name] for name in batch if name not in self.keep}
        given = (
            rows
            if self.inputs is None
            else stacked(batch[self.inputs], self.model.inputs.input_shape)
        )
        found: Predictions = self.model.predict(given)
        return kept | {
            name: np.asarray(column)
            for name, column in self.table.columns(found).items()
        }


class EmbedBatch:
    """Embeds batches of columns (arrays by name)."""

    def __init__(
        self,
        backbone: str,
        inputs: str,
        features: str,
        keep: Sequence[str],
        settings: Mapping[str, Any],
    ) -> None:
        from rfdlc.training.building import choose_device
        from rfdlc.training.embedding import new_embedder

        self.inputs, self.features, self.keep = inputs, features, keep
        given = {"pretrained": "none", "device": choose_device("auto"), **settings}
        self.embedder = new_embedder(backbone, given.pop("pretrained"), **given)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        kept = {name: batch[name] for name in self.keep}
        images = stacked(batch[self.inputs], self.embedder.embedding.input_shape)
        return kept | {self.features: np.asarray(self.embedder(images))}


def stacked(samples: Any, shape: Sequence[int]) -> Any:
    """Samples as one array (N, *shape); images with the channels last, as Ray reads
    them, or without, are turned.

    >>> (
    ...     stacked(np.zeros((2, 8, 9, 3)), (3, 8, 9)).shape,
    ...     stacked(np.zeros((5, 8, 9)), (1, 8, 9)).shape,
    ... )
    ((2, 3, 8, 9), (5, 1, 8, 9))
    """
    array = np.stack(list(samples))
    if len(shape) == 3 and array.shape[1:] != tuple(shape):
        array = (
            array[:, None]
            if array.ndim == 3
            else np.ascontiguousarray(np.moveaxis(array, -1, 1))
        )
    return array


def predict_source(
    run: str | Path,
    source: Any,
    out: str | Path,
    *,
    address: str | None = None,
    actors: int | None = None,
    utility: Utility | None = None,
    target_prior: PriorLike | None = None,
    decider: Decider | None = None,
    raw: bool = False,
    **where: Any,
) -> "Predicted":
    """Like `rfdlc.predict`, on a Ray cluster: Parquet files in the folder `out`, one or
    more per block.

    Actors read their samples themselves: the run folder and the source must be readable
    on all machines.
    """
    from rfdlc.predicting.predict import (
        Predicted,
        decide_by,
        shares_of,
        warn_of_training,
    )
    from rfdlc.training.model import Model

    remote, folder = "://" in str(out), Path(out)
    fresh = remote or not (folder.suffix or folder.exists())
    expect(
        fresh,
        f"{out}: engine ray writes Parquet files into a new folder: choose one that"
        " does not exist",
    )
    ray = start(address)
    model = Model.load(run)
    samples = model.open_samples(source, **where)
    warn_of_training(run, source, len(samples), where.get("root"), where.get("split"))
    decide_by(model, samples, utility, target_prior, decider)
    starts = range(0, len(samples), PART_ROWS)
    given: dict[str, Any] = {
        "run": str(run),
        "source": source,
        "decider": model.decider.to_dict(),
        "raw": raw,
    }
    given |= {"folder": os.getcwd(), "where": where, "imports": known_here()}
    parts = ray.data.from_items(
        [{"start": first} for first in starts], override_num_blocks=len(starts)
    )
    options = _actors(
        {"batch_size": 1} | ({} if actors is None else {"concurrency": actors})
    )
    found = parts.map_batches(PredictPart, fn_constructor_kwargs=given, **options)
    place = str(out) if remote else str(folder.absolute())
    found.write_parquet(place, mode="error")
    counts, told = (
        dict.fromkeys(model.decider.utility.actions, 0),
        model.decider.model.decided_for,
    )
    for batch in ray.data.read_parquet(place, columns=["action"]).iter_batches(
        batch_format="pyarrow"
    ):
        for row in batch["action"].value_counts().to_pylist():
            counts[row["values"]] += row["counts"]
    written = sum(counts.values())
    model.decider.deferral.warn_of_share(counts, model.decider.utility)
    shares = shares_of(model.decider, counts)
    return Predicted(
        Path(out), written, len(samples) - written, told, True, None, counts, *shares
    )


class PredictPart:
    """Predicts parts of a source by their first sample, as `rfdlc.predict` does."""

    def __init__(
        self,
        run: str,
        source: Any,
        decider: dict[str, Any],
        raw: bool,
        folder: str,
        where: dict[str, Any],
        imports: Sequence[str],
    ) -> None:
        from rfdlc.predicting.predict import Table
        from rfdlc.training.model import Model

        with suppress(
            OSError
            # to which relative paths belong; where it is not there, absolute ones may
            # be
        ):
            os.chdir(folder)
        import_own(imports)
        model = Model.load(run)
        model.decider = Decider.from_dict(decider)
        self.samples = model.open_samples(source, **where)
        self.table = Table(model, raw, self.samples)

    def __call__(self, batch: Mapping[str, Any]) -> Any:
        from pyarrow import concat_tables

        rows = [
            range(first, min(first + PART_ROWS, len(self.samples)))
            for first in batch["start"].tolist()
        ]
        return concat_tables(
            part
            for part, _ in self.table.compute(self.samples, rows, lambda count: None)
        )


def start(address: str | None = None) -> Any:
    """Ray, connected to the cluster at an address, or to a new one on this machine; one
    that is connected is kept.
    """
    try:
        import ray
        import ray.data
    except ImportError:
        raise InputError(
            'engine ray needs Ray Data: pip install "rfdlc[ray]"'
        ) from None
    if not ray.is_initialized():
        ray.init(address=address, include_dashboard=False, log_to_driver=False)
    return ray


def _actors(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `map_batches` for actors: as many as there are GPUs, one each, or else
    one per two cores.
    """
    there = start().cluster_resources()
    gpus, cpus = (int(there.get(name, 0)) for name in ("GPU", "CPU"))
    usual = {
        "concurrency": gpus or max(1, cpus // 2),
        "num_gpus": 1 if gpus else 0,
        "batch_format": "numpy",
    }
    return usual | dict(options)

"""Model: a run folder made ready to predict and decide."""

from collections.abc import Iterator, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rfdlc.data.dataset import Dataset, Normalisation, Split
from rfdlc.data.images import ImageFiles
from rfdlc.data.samples import Chunk, InputSpec, Samples, of_files, open_samples, split_of
from rfdlc.data.sources.arrays import as_images, as_inputs
from rfdlc.data.table import TableEncoder
from rfdlc.decide.classes import Classes, Indices, as_array
from rfdlc.decide.decider import Decider
from rfdlc.decide.predictions import Predictions
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError
from rfdlc.training.assembly import OwnBackbone, choose_device, method_net, place, shared_outputs
from rfdlc.training.config import Settings
from rfdlc.training.methods import find_method
from rfdlc.training.networks.particles import ParticleNet
from rfdlc.training.processes.group import ALONE, Processes
from rfdlc.training.run import Run

SAMPLES_AT_ONCE, BYTES_AT_ONCE = 1000, 2**25  # of inputs that are read and computed together


class Model:
    """Trained particles, their classes, and the calibrated Decider.

    `Model.load(folder)` rebuilds everything from the run folder alone; a backbone of the user's own is passed again.
    """

    def __init__(
        self,
        net: ParticleNet,
        classes: Classes,
        decider: Decider,
        settings: Settings,
        normalisation: Normalisation | None,
        input_shape: tuple[int, ...],
        encoder: TableEncoder | None = None,
        path: Path | None = None,
        centre: float = 1.0,
    ) -> None:
        self.net, self.classes, self.decider, self.settings = net, classes, decider, settings
        self.normalisation, self.input_shape, self.encoder, self.path = normalisation, input_shape, encoder, path
        self.centre = centre  # the part of an image's shorter side that is looked at

    @classmethod
    def load(cls, path: str | Path, *, backbone: OwnBackbone | None = None, device: str = "auto") -> "Model":
        """From a run folder. `backbone` only for a run that was trained with one of the user's own."""
        run = Run(path)
        config, classes = run.config, run.classes
        settings = find_method(config["method"]).configure({**config["settings"], "device": device})
        shape, normalisation, encoder, centre = _samples_of(run)
        net = method_net(find_method(config["method"]), settings, shape, classes, (settings.seed,), backbone)
        _load_weights(net, run)
        net = place(net, choose_device(device))
        decider = read_decider(run, settings, classes)
        return cls(net, classes, decider, settings, normalisation, shape, encoder, run.path, centre)

    def predict(
        self, inputs: Any, *, split: str | None = None, root: str | Path | None = None, skip_broken: bool = False
    ) -> Predictions:
        """Logits of samples: a Dataset, a Split, an array (N, ...), a table, or a data set's name or path.

        Images may lie in one folder without classes, or be listed in a file, and one image is a data set too: labels
        are read where a folder has the name of a class, or a list has them. Of what has parts, `split` names one;
        without it the last of train, val and test. A table (CSV or Parquet file, data frame, columns by name) gives all
        its rows, encoded as the training rows were; labels in it are not read. `skip_broken` leaves out broken image
        files. For more than fits into memory there is `rfdlc.predict`.
        """
        if isinstance(inputs, str | Path):
            return self.predict_samples(self.open_samples(inputs, split=split, root=root, skip_broken=skip_broken))
        found = self._split(inputs, split)
        if isinstance(found.inputs, ImageFiles):
            files = found.inputs
            return self.predict_samples(of_files(files.root, files.names, found.labels, self._spec, skip_broken))
        return self.predict_split(found)

    def open_samples(
        self, source: str | Path, *, split: str | None = None, root: str | Path | None = None, skip_broken: bool = False
    ) -> Samples:
        """Samples at a path, as this model takes them."""
        if not isinstance(source, str | Path):
            raise InputError(
                f"a {type(source).__name__} is no path: expected a folder, a file or a data set's name; "
                "samples in memory are for Model.load(run).predict"
            )
        return open_samples(source, self._spec, root=root, split=split, skip_broken=skip_broken)

    @property
    def _spec(self) -> InputSpec:
        return InputSpec(self.classes, self.input_shape, self.encoder, self.centre)

    def predict_pieces(self, samples: Samples, rows: range) -> Iterator[tuple[Predictions | None, Chunk]]:
        """What it says of these rows, some at a time; the next are read meanwhile. None where all are broken."""
        size = max(1, min(SAMPLES_AT_ONCE, BYTES_AT_ONCE // int(np.prod(self.input_shape))))
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        with ThreadPoolExecutor(1, "read") as reader:
            coming = reader.submit(samples.read, parts[0]) if parts else None
            for following in [*parts[1:], None][: len(parts)]:
                assert coming is not None
                piece = coming.result()
                coming = reader.submit(samples.read, following) if following is not None else None
                yield (self.predict_split(piece.split) if len(piece.split) else None), piece

    def predict_split(self, split: Split) -> Predictions:
        """Logits of samples that are there."""
        shape = tuple(split.inputs.shape[1:])
        if shape != self.input_shape:
            raise InputError(f"samples have shape {shape}, but this model was trained on {self.input_shape}")
        found = predictions_of(self.net, split, self.normalisation, self.settings, self.classes)
        assert found is not None
        return found

    def predict_samples(self, samples: Samples) -> Predictions:
        """All of them, in memory."""
        pieces = list(self.predict_pieces(samples, range(len(samples))))
        found = [predictions for predictions, _ in pieces if predictions is not None]
        if not found:
            raise InputError(f"none of the samples can be read, the first: {pieces[0][1].broken[0]}")
        labels = np.concatenate([piece.split.labels for _, piece in pieces])
        ids = None if found[0].ids is None else np.concatenate([part.ids for part in found if part.ids is not None])
        unsure = [part.uncertainty for part in found if part.uncertainty is not None]
        return Predictions(
            logits=np.concatenate([part.scores.values for part in found], axis=1),
            targets=labels if labels.min() >= 0 else None,
            ids=ids,
            classes=self.classes,
            uncertainty=np.concatenate(unsure) if unsure else None,
        )

    def decide(self, inputs: Any, utility: Utility | None = None, **where: Any) -> Indices:
        """Actions of highest expected utility, by the calibrated Decider, for this utility or the Decider's own."""
        decider = self.decider if utility is None else self.decider.replace(utility=utility)
        return decider.decide(self.predict(inputs, **where))

    def _split(self, inputs: Any, name: str | None) -> Split:
        """Samples in memory."""
        if isinstance(inputs, Split):
            return inputs
        if isinstance(inputs, Dataset):
            if inputs.encoder != self.encoder:
                raise InputError(
                    f"{inputs.name} was encoded by its own training rows, not by those of this model: give the table "
                    "itself (its path, or a data frame), or an array where the model was trained on one"
                )
            return split_of(inputs, name, self.classes)
        rows = None if self.encoder is None else _columns(inputs)
        array: NDArray[Any] = as_array(inputs) if rows is None or self.encoder is None else self.encoder.transform(rows)
        if array.dtype == np.uint8 and array.ndim in (3, 4):
            array = as_images("array", array)
        if array.shape[1:] != self.input_shape or not len(array):
            raise InputError(f"an array of shape {array.shape} was given: expected (samples, {self.input_shape})")
        return Split(as_inputs("array", array), np.full(len(array), -1, dtype=np.int64))


def _columns(inputs: Any) -> Mapping[str, Sequence[Any]] | None:
    """Cells by column of a data frame or a mapping; nothing for other kinds of input."""
    if isinstance(inputs, Mapping):
        single = [name for name, cells in inputs.items() if isinstance(cells, str) or not isinstance(cells, Sized)]
        if single:
            told = f"column {single[0]!r} is {inputs[single[0]]!r}"
            raise InputError(f"{told}: expected a list of cells, one a row, also of a single row")
        return inputs
    columns = getattr(inputs, "columns", None)
    return None if columns is None else {str(column): inputs[column].tolist() for column in columns}


def _samples_of(run: Run) -> tuple[tuple[int, ...], Normalisation | None, TableEncoder | None, float]:
    """What a run folder says of its samples: shape, normalisation, encoder, and the part of an image that is seen."""
    data = run.config["data"]
    try:
        shape = tuple(int(side) for side in data["input_shape"])
        scale = data["normalisation"]
        known = None if scale is None else Normalisation(*(tuple(map(float, scale[key])) for key in ("mean", "std")))
        encoder = TableEncoder.from_dict(data["encoder"]) if data.get("encoder") else None
        if min(shape) < 1 or (encoder is not None and shape != (len(encoder.features),)):
            raise ValueError(f"samples of shape {shape}")
        return shape, known, encoder, float(data.get("centre", 1))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(f"{run.path}/config.json is damaged where it describes the data ({error!r})") from None


def read_decider(run: Run, settings: Settings, classes: Classes) -> Decider:
    """The folder's Decider; before calibration, one that combines particles and leaves probabilities alone."""
    path = run.path / "decider.json"
    return (
        Decider.load(path).replace(classes=classes)
        if path.exists()
        else new_decider(run.config["method"], settings, classes)
    )


def new_decider(method: str, settings: Settings, classes: Classes) -> Decider:
    """Not fitted yet. It knows the prior that the method's probabilities carry, and how the method decides."""
    row = find_method(method)
    return Decider(
        row.utility(classes),
        combine=settings.combine,
        calibration=None if settings.calibration == "none" else settings.calibration,
        train_prior=row.prior(settings, classes),
        target_prior=row.target_prior,
        rule=row.rule,
    )


def predictions_of(
    net: ParticleNet, split: Split, normalisation: Normalisation | None, settings: Settings, classes: Classes,
    processes: Processes = ALONE,
) -> Predictions | None:  # fmt: skip
    """What a network says of a split; labels only go along, where they are known.

    Several `processes` share the samples out, and process 0 has the predictions.
    """
    logits, unsure = shared_outputs(net, split, normalisation, settings, next(net.parameters()).device, processes)
    if logits is None:
        return None
    return Predictions(
        logits=logits[0].numpy(),
        targets=split.labels if len(split.labels) and split.labels.min() >= 0 else None,
        ids=None if split.ids is None else list(split.ids),
        classes=classes,
        uncertainty=None if unsure is None else unsure[0].numpy(),
    )


def _load_weights(net: ParticleNet, run: Run) -> None:
    try:
        net.load_state_dict(run.weights())
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise InputError(f"{run.path}: the weights do not fit the network of config.json ({reason})") from None


def as_tensors(net: ParticleNet) -> dict[str, torch.Tensor]:
    """The networks' state, ready for a file."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in net.state_dict().items()}

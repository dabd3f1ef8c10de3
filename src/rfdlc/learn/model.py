"""Model: a run folder made ready to predict and decide."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rfdlc.data.dataset import Dataset, Normalisation, Split
from rfdlc.data.load import load_samples
from rfdlc.data.sources.table import read_csv
from rfdlc.data.table import TableEncoder
from rfdlc.decide.classes import Classes, Indices
from rfdlc.decide.decider import Decider
from rfdlc.decide.predictions import Predictions
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError
from rfdlc.learn.assembly import OwnBackbone, choose_device, method_net, place, shared_outputs
from rfdlc.learn.methods import find_method
from rfdlc.learn.particles import ParticleNet
from rfdlc.learn.processes import ALONE, Processes
from rfdlc.learn.run import Run
from rfdlc.learn.settings import Settings


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
    ) -> None:
        self.net, self.classes, self.decider, self.settings = net, classes, decider, settings
        self.normalisation, self.input_shape, self.encoder, self.path = normalisation, input_shape, encoder, path

    @classmethod
    def load(cls, path: str | Path, *, backbone: OwnBackbone | None = None, device: str = "auto") -> "Model":
        """From a run folder. `backbone` only for a run that was trained with one of the user's own."""
        run = Run(path)
        config, classes = run.config, run.classes
        settings = replace(Settings().changed(config["settings"]), device=device)
        data = config["data"]
        shape = tuple(int(side) for side in data["input_shape"])
        net = method_net(find_method(config["method"]), settings, shape, classes, (settings.seed,), backbone)
        _load_weights(net, run)
        normalisation = data["normalisation"]
        known = None if normalisation is None else Normalisation(*(tuple(normalisation[k]) for k in ("mean", "std")))
        encoder = TableEncoder.from_dict(data["encoder"]) if data.get("encoder") else None
        net = place(net, choose_device(device))
        return cls(net, classes, read_decider(run, settings, classes), settings, known, shape, encoder, run.path)

    def predict(self, inputs: Any, *, split: str | None = None, root: str | Path | None = None) -> Predictions:
        """Logits of samples: a Dataset, a Split, an array (N, ...), a table, or a data set's name or path.

        Images may lie in one folder without classes, and one image is a data set too: labels are read where a folder
        has the name of a class.
        Of a data set with parts, `split` names one; without it the test part, else val, else train. A table (CSV
        file, data frame, columns by name) gives all its rows, encoded as the training rows were; labels in it are
        not read.
        """
        chosen = self._split(inputs, split, root)
        shape = tuple(chosen.inputs.shape[1:])
        if shape != self.input_shape:
            raise InputError(f"samples have shape {shape}, but this model was trained on {self.input_shape}")
        found = predictions_of(self.net, chosen, self.normalisation, self.settings, self.classes)
        assert found is not None
        return found

    def decide(self, inputs: Any, utility: Utility | None = None, **where: Any) -> Indices:
        """Actions of highest expected utility, by the calibrated Decider, for this utility or the Decider's own."""
        decider = self.decider if utility is None else self.decider.with_utility(utility)
        return decider.decide(self.predict(inputs, **where))

    def _split(self, inputs: Any, name: str | None, root: str | Path | None) -> Split:
        rows = None if self.encoder is None or _is_data_set(inputs, name) else _table(inputs, root)
        if rows is not None and self.encoder is not None:
            features = self.encoder.transform(rows)
            return Split(features, np.full(len(features), -1, dtype=np.int64))
        if isinstance(inputs, str | Path):
            inputs = load_samples(inputs, self.classes.names, self.input_shape, root=root)
        if isinstance(inputs, Split):
            return inputs
        if isinstance(inputs, Dataset):
            wanted = name or next(part for part in ("test", "val", "train") if part in inputs.splits)
            if wanted not in inputs.splits:
                raise InputError(f"{inputs.name} has no part {wanted!r}: it has {', '.join(inputs.splits)}")
            found = inputs.splits[wanted]
            return replace(found, labels=_matched(found.labels, inputs.classes, self.classes))
        array = np.asarray(inputs)
        if array.shape[1:] != self.input_shape:
            raise InputError(f"an array of shape {array.shape} was given: expected (samples, {self.input_shape})")
        array = array if array.dtype == np.uint8 else array.astype(np.float32)
        return Split(array, np.full(len(array), -1, dtype=np.int64))


def _is_data_set(inputs: Any, name: str | None) -> bool:
    """Whether a data set with parts is meant, and not the rows of a table."""
    return name is not None or isinstance(inputs, Dataset | Split | np.ndarray)


def _table(inputs: Any, root: str | Path | None) -> Mapping[str, Sequence[Any]] | None:
    """Cells by column of a CSV file, a data frame or a mapping; nothing for other kinds of input."""
    if isinstance(inputs, str | Path):
        path = Path(inputs) if root is None else Path(root) / inputs
        return read_csv(path) if path.suffix.lower() in (".csv", ".tsv") else None
    if isinstance(inputs, Mapping):
        return inputs
    columns = getattr(inputs, "columns", None)
    return None if columns is None else {str(column): inputs[column].tolist() for column in columns}


def read_decider(run: Run, settings: Settings, classes: Classes) -> Decider:
    """The folder's Decider; before calibration, one that combines particles and leaves probabilities alone."""
    path = run.path / "decider.json"
    return (
        Decider.load(path).with_classes(classes)
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


def _matched(labels: Indices, theirs: Classes, ours: Classes) -> Indices:
    """Labels of a data set in the class order of the model; unknown where the data set's classes are others."""
    if theirs.names == ours.names:
        return labels
    if not set(theirs.names) <= set(ours.names):
        return np.full(len(labels), -1, dtype=np.int64)
    return ours.encode(list(theirs.names))[labels]


def _load_weights(net: ParticleNet, run: Run) -> None:
    try:
        net.load_state_dict(run.weights())
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise InputError(f"{run.path}: the weights do not fit the network of config.json ({reason})") from None


def as_tensors(net: ParticleNet) -> dict[str, torch.Tensor]:
    """The networks' state, ready for a file."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in net.state_dict().items()}

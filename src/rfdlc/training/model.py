"""Model: a run folder made ready to predict and decide."""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rfdlc.data.dataset import Dataset, Normalisation, Split, as_inputs
from rfdlc.data.embedding import Embedding
from rfdlc.data.images import ImageFiles, Resizing
from rfdlc.data.opening import Sources, holds_features, open_samples, split_of
from rfdlc.data.readers.image_files import open_files
from rfdlc.data.samples import Chunk, InputSpec, Samples
from rfdlc.data.table import TableEncoder
from rfdlc.decisions.decider import Decider
from rfdlc.decisions.utility import Utility
from rfdlc.errors import InputError
from rfdlc.formats.identity import check_same_model
from rfdlc.probabilities.classes import Indices, as_array
from rfdlc.probabilities.predictions import Predictions
from rfdlc.training import hub
from rfdlc.training.building import (
    OwnBackbone,
    choose_device,
    method_net,
    mixture_net,
    new_decider,
)
from rfdlc.training.distributed import SINGLE, ProcessGroup
from rfdlc.training.embedding import Embedder, load_embedder
from rfdlc.training.familiarity import FILE, MOST, Familiarity
from rfdlc.training.loop import split_outputs
from rfdlc.training.networks.mixture import Mixture
from rfdlc.training.networks.particles import ParticleNet, place
from rfdlc.training.run import DECIDER, MODEL, Run
from rfdlc.training.settings import TABULAR

# Of inputs that are read and computed together
SAMPLES_AT_ONCE = 1000
BYTES_AT_ONCE = 2**25


class Model:
    """Trained particles with a calibrated Decider: made by `Model.load` and
    `rfdlc.train`.

    Attributes
    ----------
    net, classes, decider, config, path
        The trained networks, class names and training counts, the `Decider`, the
        `TrainConfig`, and the run folder.

    Examples
    --------
    >>> from tempfile import mkdtemp
    >>> import rfdlc
    >>> folder = rfdlc.train("digits-lt", "ce", f"{mkdtemp()}/run", epochs=2).path
    >>> Model.load(folder).decide("digits-lt").shape
    (450,)
    """

    net: Any  # ParticleNet or Mixture: what `outputs` and `combination` are needed of

    def __init__(self, run: Run, net: ParticleNet | Mixture) -> None:
        self.net = net
        self.path = run.path
        self.classes = run.classes
        self.device = next(net.parameters()).device
        self.config = run.config.replace(device=str(self.device))

        data = run.metadata["data"]
        self.input_shape, self.normalisation, self.encoder, self.resizing = _samples_of(
            run
        )
        self.embedding: Embedding | None = None
        if data.get("embedding") is not None:
            self.embedding = Embedding.read(data["embedding"], run.path / "config.json")
        options = data.get("options", {})
        self._spec = InputSpec(
            run.classes,
            self.input_shape,
            self.encoder,
            self.resizing,
            target=options.get("target"),
            groups=options.get("groups"),
            embedding=self.embedding,
        )

        self.identity = run.model  # the name that its predictions and decider have
        self.decider = _decider_of(run)
        self.familiarity: Familiarity | None = None
        # Before the weights are whole, the file may be of the fold before.
        if (run.path / MODEL).exists() and (run.path / FILE).exists():
            self.familiarity = Familiarity(run.weights(FILE)).to(self.device)

    def __repr__(self) -> str:
        return (
            f"Model({str(self.path)!r}: {self.config.particles} of"
            f" {self.config.backbone}, {self.decider!r})"
        )

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        backbone: OwnBackbone | None = None,
        device: str = "auto",
    ) -> "Model":
        """The model of a run folder, on a device. A run with a function or module as
        its `backbone` needs it again.
        """
        run = Run(path)
        shape = _samples_of(run)[0]
        tabular = run.config.backbone in TABULAR
        net: Any = None
        if not tabular:
            try:
                net = method_net(
                    run.method,
                    run.config,
                    shape,
                    run.classes,
                    seeds=(run.config.seed,),
                    network=backbone,
                    start={},
                )
            except InputError:
                raise
            # a size that no machine has
            except (RuntimeError, MemoryError, ValueError) as error:
                raise InputError(
                    f"{run.path}: the network of config.json cannot be made ({error})"
                ) from None
        weights = run.weights()
        try:
            if tabular:
                net = mixture_net(run.method, run.config, shape, run.classes, weights)
            net.load_state_dict(weights)
        except (RuntimeError, KeyError, InputError) as error:
            reason = str(error).splitlines()[-1].strip()
            raise InputError(
                f"{run.path}: the weights do not fit the network of config.json"
                f" ({reason})"
            ) from None
        return cls(run, place(net, choose_device(device)))

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        revision: str | None = None,
        backbone: OwnBackbone | None = None,
        device: str = "auto",
    ) -> "Model":
        """The model in a folder of `save_pretrained`, or in a repository OWNER/NAME of
        the Hugging Face hub.

        Examples
        --------
        >>> Model.from_pretrained("me/skin-lesions", revision="v1")  # doctest: +SKIP
        """
        return cls.load(hub.fetched(name, revision), backbone=backbone, device=device)

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write what `from_pretrained` needs, with the current decider and a README.md,
        and return the folder.

        config.json names the training data, by their path if they were files.
        """
        return self._save(Path(folder), Path(folder).name)

    def push_to_hub(
        self, repository: str, *, private: bool = True, message: str = "rfdlc model"
    ) -> str:
        """Upload the files of `save_pretrained` to OWNER/NAME of the Hugging Face hub,
        and return the address.
        """
        with TemporaryDirectory() as folder:
            return hub.upload(
                self._save(Path(folder), repository), repository, private, message
            )

    def _save(self, folder: Path, name: str) -> Path:
        hub.copy_model(self.path, folder)
        check_same_model(
            "the decider",
            self.decider.model.source or self.identity,
            "the model",
            self.identity,
            "save a decider that was fitted to this model",
        )
        self.decider.replace(source=self.identity).save(folder / "decider.json")
        card = folder / "README.md"
        if not card.exists():
            text = hub.model_card(name, self.path, self.decider)
            card.write_text(text, encoding="utf-8")
        elif hub.tells_otherwise(card, self.decider):
            warnings.warn(
                f"{card} was kept, but is about other decisions: edit it, or delete it"
                " and save",
                stacklevel=3,
            )
        return folder

    def predict(
        self,
        inputs: Any,
        *,
        split: str | None = None,
        root: str | Path | None = None,
        skip_broken: bool = False,
        allow_links: bool = False,
    ) -> Predictions:
        """Logits of samples, in memory; for more samples than that, use
        `rfdlc.predict`.

        Parameters
        ----------
        inputs
            A Dataset, a Split, an array (N, ...), a table (file, data frame, columns by
            name), or the name or path of data, for example a folder or list of images;
            or the paths of images. Rows of a table are encoded as the training rows.
        split, root
            Which split (by default the last), and the folder of a named data set or of
            a list's images.
        skip_broken, allow_links
            Leave out broken images; accept links that leave a folder of images.
        """
        if isinstance(inputs, str | Path) or _are_paths(inputs):
            return self.predict_samples(
                self.open_samples(
                    inputs,
                    split=split,
                    root=root,
                    skip_broken=skip_broken,
                    allow_links=allow_links,
                )
            )
        samples = self._split(inputs, split)
        files = samples.inputs
        if isinstance(files, ImageFiles):
            return self.predict_samples(
                open_files(
                    files.root,
                    files.names,
                    samples.labels,
                    self.inputs,
                    skip_broken,
                    files.packed,
                )
            )
        return self._predict(samples)

    def open_samples(self, source: Sources, **options: Any) -> Samples:
        """The samples at a path, or in several image files, in the form that this model
        needs.
        """
        paths = source if isinstance(source, list | tuple) else [source]
        if not all(isinstance(path, str | Path) for path in paths):
            raise InputError(
                f"a {type(source).__name__} is not a path: expected a folder, a file or"
                " a data set's name; samples in memory are for Model.load(run).predict"
            )
        spec = self._spec
        if self.embedding is not None and not holds_features(
            source, options.get("root")
        ):
            self._check_embedder()
            spec = self.inputs
        samples = open_samples(source, spec, **options)
        if samples.doubt and not samples.labelled:
            warnings.warn(samples.doubt, stacklevel=3)
        return samples

    def _check_embedder(self) -> None:
        """Raise where the weights of the network that made the features are not
        there.
        """
        _ = self.embedder

    @property
    def inputs(self) -> InputSpec:
        """What is predicted from: images, for a model of features that keeps how they
        were made.
        """
        embedding = self.embedding
        if embedding is None or not (self.path / embedding.weights_name).exists():
            return self._spec
        return replace(
            self._spec,
            input_shape=embedding.input_shape,
            resizing=embedding.resizing,
        )

    @cached_property
    def embedder(self) -> Embedder:
        """The network that made the features, where it is known: images are embedded as
        the training images were.
        """
        assert self.embedding is not None
        return load_embedder(
            self.embedding, self.path / self.embedding.weights_name, self.device
        )

    def predict_pieces(
        self, samples: Samples, parts: Sequence[range]
    ) -> Iterator[tuple[int, Predictions | None, Chunk]]:
        """Predictions of each part's rows in pieces, with the part's number; None for a
        piece of broken samples.
        """
        shape = self.input_shape
        if self.embedding is not None:
            shape = self.embedding.input_shape
        size = max(1, min(SAMPLES_AT_ONCE, BYTES_AT_ONCE // int(np.prod(shape))))
        for number, piece in samples.read_ahead(parts, size):
            predictions = None
            if len(piece.split):
                predictions = self._predict(piece.split)
            yield number, predictions, piece

    def predict_samples(self, samples: Samples) -> Predictions:
        """Logits of all samples, in memory."""
        pieces = list(self.predict_pieces(samples, [range(len(samples))]))
        warning = samples.cut_warning()
        if warning:
            warnings.warn(warning, stacklevel=3)
        parts = [predictions for _, predictions, _ in pieces if predictions is not None]
        if not parts:
            raise InputError(
                "none of the samples can be read, the first:"
                f" {''.join(pieces[0][2].broken[:1])}"
            )
        splits: list[Any] = [piece.split for _, _, piece in pieces]
        columns: dict[str, Any] = {}
        labels = np.concatenate([split.labels for split in splits])
        if labels.min() >= 0:
            columns["targets"] = labels
        if samples.groups is not None:
            columns["groups"] = np.concatenate([split.groups for split in splits])
        for name in ("ids", "uncertainty", "unfamiliarity"):
            if getattr(parts[0], name) is not None:
                columns[name] = np.concatenate([getattr(part, name) for part in parts])
        return Predictions(
            logits=np.concatenate([part.scores.values for part in parts], axis=1),
            classes=self.classes,
            model=self.identity,
            **columns,
        )

    def predict_split(
        self, split: Split | None, group: ProcessGroup = SINGLE
    ) -> Predictions | None:
        """Predictions of a split, if there is one, with labels where they are known; on
        rank 0 of several processes.
        """
        if split is None:
            return None
        logits, uncertainty, unfamiliarity = split_outputs(
            self.net,
            split,
            self.normalisation,
            self.config,
            self.device,
            group,
            self.familiarity,
        )
        if logits is None:
            return None
        columns: dict[str, Any] = {"groups": split.together}
        if split.labels.min(initial=0) >= 0:
            columns["targets"] = split.labels
        if split.ids is not None:
            columns["ids"] = list(split.ids)
        if uncertainty is not None:
            columns["uncertainty"] = uncertainty[0].numpy()
        if unfamiliarity is not None:
            columns["unfamiliarity"] = unfamiliarity.numpy()
        return Predictions(
            logits=logits[0].numpy(),
            classes=self.classes,
            model=self.identity,
            **columns,
        )

    def fit_familiarity(self, run: Run, split: Split) -> None:
        """Fit the `Familiarity` of training samples, with which predictions have an
        unfamiliarity, and write it.
        """
        chosen = np.random.default_rng(0).permutation(len(split))[:MOST]
        samples = split.take(np.sort(chosen))

        def beside_each_other(features: Tensor, first: Tensor) -> Tensor:
            return torch.cat([features.movedim(0, 1).flatten(1), first], 1)

        measured = split_outputs(
            self.net,
            samples,
            self.normalisation,
            self.config,
            self.device,
            measure=beside_each_other,
        )[2]
        assert measured is not None  # every process looks at all of them
        particles, width = self.net.head_weights.shape[1:3]
        features, first = np.split(
            measured.double().numpy(), [particles * width], axis=1
        )
        features = features.reshape(-1, particles, width).swapaxes(0, 1)
        familiarity = Familiarity.fit(features, first, samples.labels)
        self.familiarity = familiarity.to(self.device)
        run.write(FILE, run.bound(self.familiarity.state_dict()))

    def decide(
        self, inputs: Any, utility: Utility | None = None, **where: Any
    ) -> Indices:
        """Actions of highest expected utility, by the calibrated Decider, for this
        utility or the Decider's own.
        """
        decider = self.decider
        if utility is not None:
            decider = decider.replace(utility=utility)
        return decider.decide(self.predict(inputs, **where))

    def _predict(self, split: Split) -> Predictions:
        if self.embedding is not None and len(split.inputs.shape) == 4:
            split = replace(split, inputs=self.embedder(split.array))
        shape = tuple(split.inputs.shape[1:])
        if shape != self.input_shape:
            raise InputError(
                f"samples have shape {shape}, but this model was trained on"
                f" {self.input_shape}"
            )
        predictions = self.predict_split(split)
        assert predictions is not None
        return predictions

    def _split(self, inputs: Any, name: str | None) -> Split:
        if isinstance(inputs, Split):
            return inputs
        if isinstance(inputs, Dataset):
            if inputs.encoder != self.encoder:
                raise InputError(
                    f"{inputs.name} was encoded by its own training rows, not by those"
                    " of this model: give the table itself, its path or a data frame"
                )
            return split_of(inputs, name, self.classes)
        array = as_array(self.encoder.encode(inputs) if self.encoder else inputs)
        shape = array.shape  # as it is passed: `as_inputs` may change it
        expected = f"(samples, {self.input_shape})"
        if self.encoder is not None:
            expected = f"{expected}, or {self.encoder.expected}"
        fits = self.encoder is None or shape[1:] == self.input_shape
        if fits:
            array = as_inputs("array", array)
            images = self.embedding is not None and array.ndim == 4
            fits = images or array.shape[1:] == self.input_shape
        if not fits or not len(array):
            raise InputError(
                f"an array of shape {shape} was given: expected {expected}"
            )
        return Split(array, np.full(len(array), -1, dtype=np.int64))


def _are_paths(inputs: Any) -> bool:
    """Whether these are paths of several files."""
    return (
        isinstance(inputs, list | tuple)
        and len(inputs) > 0
        and all(isinstance(path, str | Path) for path in inputs)
    )


def _decider_of(run: Run) -> Decider:
    """The Decider of a run; before calibration, one that leaves probabilities alone."""
    saved = run.path / DECIDER
    if not saved.exists():
        return new_decider(run.method_name, run.config, run.classes)
    decider = Decider.load(saved).replace(classes=run.classes)
    identity = run.model
    if not identity:
        return decider
    check_same_model(
        str(saved),
        decider.model.source,
        str(run.path / MODEL),
        identity,
        "restore the file that belongs to the weights, or train the run again",
    )
    return decider.replace(source=identity)


def _samples_of(
    run: Run,
) -> tuple[tuple[int, ...], Normalisation | None, TableEncoder | None, Resizing]:
    """From config.json: shape, normalisation, encoder, and how image files become
    squares.
    """
    data = run.metadata["data"]
    try:
        shape = tuple(int(side) for side in data["input_shape"])
        scale = data["normalisation"]
        normalisation = None
        if scale is not None:
            mean = tuple(map(float, scale["mean"]))
            std = tuple(map(float, scale["std"]))
            normalisation = Normalisation(mean, std)
        encoder = None
        if data.get("encoder"):
            encoder = TableEncoder.from_dict(data["encoder"])
        if (
            min(shape) < 1
            or math.prod(shape) > 2**31
            or (encoder is not None and shape != (len(encoder.features),))
        ):
            raise ValueError(f"samples of shape {shape}")
        return shape, normalisation, encoder, Resizing.of(data)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(
            f"{run.path}/config.json is damaged where it describes the data ({error!r})"
        ) from None

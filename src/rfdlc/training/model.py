"""Model: a run folder made ready to predict and decide. The networks of runs are built
here.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rfdlc.data.dataset import Dataset, Normalisation, Split, as_inputs
from rfdlc.data.embedding import Embedding
from rfdlc.data.images import ImageFiles, Resizing
from rfdlc.data.opening import Sources, holds_features, open_samples, split_of
from rfdlc.data.readers.image_files import open_files
from rfdlc.data.samples import Chunk, InputSpec, Samples
from rfdlc.data.table import TableEncoder
from rfdlc.decisions.decider import Decider
from rfdlc.decisions.utility import Utility
from rfdlc.errors import InputError, expect
from rfdlc.formats.identity import check_same_model
from rfdlc.probabilities.classes import Classes, Indices, as_array
from rfdlc.probabilities.predictions import Predictions
from rfdlc.training import hub
from rfdlc.training.config import TABULAR, TrainConfig
from rfdlc.training.distributed import SINGLE, ProcessGroup
from rfdlc.training.embedding import Embedder, load_embedder
from rfdlc.training.familiarity import FILE, MOST, Familiarity
from rfdlc.training.loop import split_outputs
from rfdlc.training.methods import NETWORKS, Method, find_method
from rfdlc.training.networks.backbones import backbone, imported, own
from rfdlc.training.networks.mixture import (
    Mixture,
    Networks,
    rebuilt_log,
    rebuilt_member,
    rebuilt_range,
)
from rfdlc.training.networks.particles import ParticleNet, place
from rfdlc.training.networks.pretrained import (
    PREFIX,
    Resize,
    Start,
    Weights,
    starting_point,
    timm_backbone,
)
from rfdlc.training.run import MODEL, Run

OwnBackbone = Callable[[], nn.Module] | nn.Module

# The settings that choose the network
NETWORK: tuple[str, ...] = (
    "backbone",
    "pretrained",
    "image_size",
    "interpolation",
    "backbone_options",
)
SMALL_STEP = 10_000_000  # multiplications
SAMPLES_AT_ONCE, BYTES_AT_ONCE = (
    1000,
    2**25,
)  # of inputs that are read and computed together


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
        self.net, self.path, self.classes = net, run.path, run.classes
        self.device = next(net.parameters()).device
        self.config = run.config.replace(device=str(self.device))
        self.input_shape, self.normalisation, self.encoder, self.resizing = _samples_of(
            run
        )
        options, made = (
            run.metadata["data"].get("options", {}),
            run.metadata["data"].get("embedding"),
        )
        self.embedding = (
            None if made is None else Embedding.read(made, run.path / "config.json")
        )
        shape, roles = self.input_shape, (options.get("target"), options.get("groups"))
        self._spec = InputSpec(
            run.classes, shape, self.encoder, self.resizing, *roles, self.embedding
        )
        saved = (
            run.path / "decider.json"
        )  # before calibration, a Decider that leaves probabilities alone
        found = (
            Decider.load(saved).replace(classes=run.classes) if saved.exists() else None
        )
        self.identity = run.model  # the name that its predictions and decider have
        if found is not None and self.identity:
            weights = str(run.path / MODEL)
            fix = "restore the file that belongs to the weights, or train the run again"
            check_same_model(
                str(saved), found.model.source, weights, self.identity, fix
            )
            found = found.replace(source=self.identity)
        self.decider = found or new_decider(run.method_name, run.config, run.classes)
        done = (
            run.path / "model.safetensors"
        ).exists()  # before, the file may be of the fold before
        known = run.weights(FILE) if done and (run.path / FILE).exists() else None
        self.familiarity = None if known is None else Familiarity(known).to(self.device)

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
        given = run.method, run.config, _samples_of(run)[0], run.classes
        tabular = run.config.backbone in TABULAR
        try:
            net: Any = (
                None
                if tabular
                else method_net(*given, (run.config.seed,), backbone, start={})
            )
        except InputError:
            raise
        except (
            RuntimeError,
            MemoryError,
            ValueError,
        ) as error:  # a size that no machine has
            raise InputError(
                f"{run.path}: the network of config.json cannot be made ({error})"
            ) from None
        weights = run.weights()
        try:
            net = mixture_net(*given, weights) if tabular else net
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
        fix = "save a decider that was fitted to this model"
        own = self.decider.model.source or self.identity
        check_same_model("the decider", own, "the model", self.identity, fix)
        self.decider.replace(source=self.identity).save(folder / "decider.json")
        card = folder / "README.md"
        if not card.exists():
            card.write_text(
                hub.model_card(name, self.path, self.decider), encoding="utf-8"
            )
        elif hub.tells_otherwise(card, self.decider):
            told = (
                f"{card} was kept, but is about other decisions: edit it, or delete it"
                " and save"
            )
            warnings.warn(told, stacklevel=3)
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
        several = (
            isinstance(inputs, list | tuple)
            and len(inputs)
            and all(isinstance(x, str | Path) for x in inputs)
        )
        if several or isinstance(inputs, str | Path):
            where: dict[str, Any] = {
                "split": split,
                "root": root,
                "allow_links": allow_links,
            }
            return self.predict_samples(
                self.open_samples(inputs, skip_broken=skip_broken, **where)
            )
        found = self._split(inputs, split)
        if isinstance(files := found.inputs, ImageFiles):
            samples = open_files(
                files.root,
                files.names,
                found.labels,
                self.inputs,
                skip_broken,
                files.packed,
            )
            return self.predict_samples(samples)
        return self._predict(found)

    def open_samples(self, source: Sources, **options: Any) -> Samples:
        """The samples at a path, or in several image files, in the form that this model
        needs.
        """
        other = (
            f"a {type(source).__name__} is not a path: expected a folder, a file or a"
            " data set's name"
        )
        paths = source if isinstance(source, list | tuple) else [source]
        named = all(isinstance(path, str | Path) for path in paths)
        expect(named, f"{other}; samples in memory are for Model.load(run).predict")
        own = self.embedding is None or holds_features(source, options.get("root"))
        _ = own or self.embedder  # raises where its weights are not there
        samples = open_samples(source, self._spec if own else self.inputs, **options)
        if samples.doubt and not samples.labelled:
            warnings.warn(samples.doubt, stacklevel=3)
        return samples

    @property
    def inputs(self) -> InputSpec:
        """What is predicted from: images, for a model of features that keeps how they
        were made.
        """
        spec, made = self._spec, self.embedding
        if made is None or not (self.path / made.weights_name).exists():
            return spec
        return replace(spec, input_shape=made.input_shape, resizing=made.resizing)

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
        shape = (
            self.input_shape if self.embedding is None else self.embedding.input_shape
        )
        size = max(1, min(SAMPLES_AT_ONCE, BYTES_AT_ONCE // int(np.prod(shape))))
        for number, piece in samples.read_ahead(parts, size):
            yield (
                number,
                (self._predict(piece.split) if len(piece.split) else None),
                piece,
            )

    def predict_samples(self, samples: Samples) -> Predictions:
        """Logits of all samples, in memory."""
        pieces = list(self.predict_pieces(samples, [range(len(samples))]))
        if told := samples.cut_warning():
            warnings.warn(told, stacklevel=3)
        found = [predictions for _, predictions, _ in pieces if predictions is not None]
        expect(
            found,
            "none of the samples can be read, the first:"
            f" {''.join(pieces[0][2].broken[:1])}",
        )
        splits: list[Any] = [piece.split for _, _, piece in pieces]
        labels = np.concatenate([own.labels for own in splits])
        known: dict[str, Any] = {"targets": labels} if labels.min() >= 0 else {}
        known |= (
            {}
            if samples.groups is None
            else {"groups": np.concatenate([own.groups for own in splits])}
        )
        for name in ("ids", "uncertainty", "unfamiliarity"):
            if getattr(found[0], name) is not None:
                known[name] = np.concatenate(
                    [getattr(predictions, name) for predictions in found]
                )
        logits = np.concatenate(
            [predictions.scores.values for predictions in found], axis=1
        )
        known["model"] = self.identity
        return Predictions(logits=logits, classes=self.classes, **known)

    def predict_split(
        self, split: Split | None, group: ProcessGroup = SINGLE
    ) -> Predictions | None:
        """Predictions of a split, if there is one, with labels where they are known; on
        rank 0 of several processes.
        """
        given = self.normalisation, self.config, self.device, group, self.familiarity
        logits, unsure, strange = (
            (None,) * 3 if split is None else split_outputs(self.net, split, *given)
        )
        if split is None or logits is None:
            return None
        known: dict[str, Any] = (
            {"targets": split.labels} if split.labels.min(initial=0) >= 0 else {}
        )
        known |= {
            "ids": None if split.ids is None else list(split.ids),
            "classes": self.classes,
        }
        known |= {
            "unfamiliarity": None if strange is None else strange.numpy(),
            "groups": split.together,
        }
        return Predictions(
            logits=logits[0].numpy(),
            uncertainty=None if unsure is None else unsure[0].numpy(),
            model=self.identity,
            **known,
        )

    def fit_familiarity(self, run: Run, split: Split) -> None:
        """Fit the `Familiarity` of training samples, with which predictions have an
        unfamiliarity, and write it.
        """
        some = split.take(
            np.sort(np.random.default_rng(0).permutation(len(split))[:MOST])
        )

        def both(features: Tensor, first: Tensor) -> Tensor:
            return torch.cat([features.movedim(0, 1).flatten(1), first], 1)

        found = split_outputs(
            self.net, some, self.normalisation, self.config, self.device, measure=both
        )[2]
        assert found is not None  # every process looks at all of them
        particles, width = self.net.head_weights.shape[1:3]
        features, first = np.split(found.double().numpy(), [particles * width], axis=1)
        features = features.reshape(-1, particles, width).swapaxes(0, 1)
        self.familiarity = Familiarity.fit(features, first, some.labels).to(self.device)
        run.write(FILE, run.bound(self.familiarity.state_dict()))

    def decide(
        self, inputs: Any, utility: Utility | None = None, **where: Any
    ) -> Indices:
        """Actions of highest expected utility, by the calibrated Decider, for this
        utility or the Decider's own.
        """
        decider = (
            self.decider if utility is None else self.decider.replace(utility=utility)
        )
        return decider.decide(self.predict(inputs, **where))

    def _predict(self, split: Split) -> Predictions:
        if self.embedding is not None and len(split.inputs.shape) == 4:
            split = replace(split, inputs=self.embedder(split.array))
        shape, own = tuple(split.inputs.shape[1:]), self.input_shape
        expect(
            shape == own,
            f"samples have shape {shape}, but this model was trained on {own}",
        )
        found = self.predict_split(split)
        assert found is not None
        return found

    def _split(self, inputs: Any, name: str | None) -> Split:
        if isinstance(inputs, Split):
            return inputs
        if isinstance(inputs, Dataset):
            own = (
                f"{inputs.name} was encoded by its own training rows, not by those of"
                " this model"
            )
            expect(
                inputs.encoder == self.encoder,
                f"{own}: give the table itself, its path or a data frame",
            )
            return split_of(inputs, name, self.classes)
        array = as_array(self.encoder.encode(inputs) if self.encoder else inputs)
        rows = f", or {self.encoder.expected}" if self.encoder else ""
        told = (
            f"an array of shape {array.shape} was given: expected (samples,"
            f" {self.input_shape}){rows}"
        )
        expect(self.encoder is None or array.shape[1:] == self.input_shape, told)
        array = as_inputs("array", array)
        images = self.embedding is not None and array.ndim == 4
        expect((images or array.shape[1:] == self.input_shape) and len(array), told)
        return Split(array, np.full(len(array), -1, dtype=np.int64))


def _samples_of(
    run: Run,
) -> tuple[tuple[int, ...], Normalisation | None, TableEncoder | None, Resizing]:
    """From config.json: shape, normalisation, encoder, and how image files become
    squares.
    """
    data = run.metadata["data"]
    try:
        shape, scale = (
            tuple(int(side) for side in data["input_shape"]),
            data["normalisation"],
        )
        known = (
            None
            if scale is None
            else Normalisation(
                *(tuple(map(float, scale[key])) for key in ("mean", "std"))
            )
        )
        encoder = (
            TableEncoder.from_dict(data["encoder"]) if data.get("encoder") else None
        )
        if (
            min(shape) < 1
            or math.prod(shape) > 2**31
            or (encoder is not None and shape != (len(encoder.features),))
        ):
            raise ValueError(f"samples of shape {shape}")
        return shape, known, encoder, Resizing.of(data)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(
            f"{run.path}/config.json is damaged where it describes the data ({error!r})"
        ) from None


def new_decider(method: str, config: TrainConfig, classes: Classes) -> Decider:
    """A Decider that is not fitted, with the prior that the method's probabilities
    carry.
    """
    row = find_method(method)
    target, calibration = row.target_prior or config.target_prior, config.calibration
    known: dict[str, Any] = {
        "train_prior": row.carried(config, classes),
        "combine": config.combine,
    }
    known |= {"target_prior": None if target == "scores" else target}
    return Decider(
        row.utility(classes),
        calibration=None if calibration == "none" else calibration,
        **known,
    )


def choose_device(wanted: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise InputError(
            f"setting device={wanted!r} is not a device: expected auto, cpu, cuda or"
            " cuda:N"
        ) from None
    missing = (
        f"setting device={wanted!r} needs a GPU, but torch finds none: use device=cpu"
        " or device=auto"
    )
    expect(device.type != "cuda" or torch.cuda.is_available(), missing)
    return device


def own_network(
    config: TrainConfig, given: OwnBackbone | None = None
) -> OwnBackbone | None:
    """The backbone of the user's own that was given, or that the config names as
    package.module:function.
    """
    if (
        given is not None
        or ":" not in config.backbone
        or config.backbone.startswith(PREFIX)
    ):
        return given
    found: OwnBackbone = imported(
        config.backbone, "package.module:function on the path, or timm:NAME"
    )
    return found


def start_of(config: TrainConfig, network: OwnBackbone | None = None) -> Start:
    """What a training with this config starts from."""
    return starting_point(
        own_network(config, network),
        **{name: getattr(config, name) for name in NETWORK},
    )


def method_net(
    method: Method,
    config: TrainConfig,
    shape: tuple[int, ...],
    classes: Classes,
    seeds: Sequence[int],
    network: OwnBackbone | None = None,
    start: Weights | None = None,
) -> ParticleNet:
    """The network for samples of this shape and len(seeds) runs; `network` is a
    backbone of the user's own.

    `start` are the weights of a network to start from; an empty one is for weights that
    are loaded later.
    """
    name, size = config.backbone, config.image_size
    network = own_network(config, network)
    missing = (
        "this run has a backbone of its own, which a folder cannot hold: pass"
        " backbone=... again"
    )
    expect(
        name != "own" or network is not None,
        f"{missing}, or train with 'package.module:function'",
    )
    if name == "auto":  # samples are (F,) or (channels, height, width)
        side = (size or min(shape[1:])) if len(shape) == 3 else 0
        name = "mlp" if side < 16 else "resnet32" if side < 64 else "resnet50"
    expect(
        not config.lora or name.startswith(PREFIX),
        f"lora={config.lora} is for backbone=timm:NAME, got {name!r}",
    )
    with torch.random.fork_rng(
        devices=[]
    ):  # a network of the user's own draws its first weights
        needed = (
            f"backbone {name!r} with image_size={size} needs images (channels, height,"
            " width)"
        )
        expect(not size or len(shape) == 3, f"{needed}, got samples of shape {shape}")
        seen = (shape[0], size, size) if size else shape
        if name.startswith(PREFIX):
            found = timm_backbone(
                name, seen, size, config.backbone_options, start, config.lora
            )
        elif network is not None:
            found = own(network, torch.zeros(2, *seen), start)
        else:
            found = backbone(name, seen, config.widths, config.whiten)
        options: dict[str, Any] = {
            name: getattr(config, name) for name in ("head", "head_scale", "dropout")
        }
        mlp = name == "mlp" and network is None
        white = (
            len(found.stages) - len(config.widths) if mlp else 0
        )  # whitening is the same for all particles
        deepest = max(0, len(found.stages) - white - mlp)
        options["shared_stages"] = white + min(config.shared_stages, deepest)
        combine = partial(method.combination, config, classes)
        net = ParticleNet(
            found,
            len(classes),
            particles=config.particles,
            seeds=seeds,
            combine=combine,
            **options,
        )
    if seen != shape:
        net.resize = Resize(shape[1], shape[2], size, config.interpolation)
    for view in ("test_flip", "test_shift"):
        expect(
            not getattr(config, view) or len(shape) == 3,
            f"{view} is for images, got samples of shape {shape}",
        )
    net.name, net.recompute = name, config.checkpoint_activations
    net.mirrored, net.shift = config.test_flip, config.test_shift
    net.execute(config.execution)
    return net


def mixture_net(
    method: Method,
    config: TrainConfig,
    shape: tuple[int, ...],
    classes: Classes,
    weights: Mapping[str, Tensor],
) -> Mixture:
    """The mixture that these weights are of: what it has as members, their
    names say.
    """
    states, members = dict[str, dict[str, Tensor]](), dict[str, nn.Module]()
    for key, tensor in weights.items():
        if key.startswith("members."):
            _, name, rest = key.split(".", 2)
            states.setdefault(name, {})[rest] = tensor
    for name, state in sorted(states.items()):  # files sort their tensors
        if name in NETWORKS:
            seeds = range(len(state["net.head.weight"]) // config.particles)
            members[name] = Networks(
                method_net(
                    method, config.replace(**NETWORKS[name]), shape, classes, seeds
                )
            )
        else:
            members[name] = rebuilt_member(name, state, shape[0], len(classes))
    count, log = len(members), rebuilt_log(weights, shape[0])
    training_range = rebuilt_range(weights, shape[0])
    slope = torch.zeros(count)
    bias = torch.zeros(count, len(classes))
    return Mixture(members, slope, bias, log, training_range)


@contextmanager
def sensible_threads(net: nn.Module, config: TrainConfig) -> Iterator[None]:
    """One thread for steps so small that more threads cost more than they save (small
    MLPs on a CPU).
    """
    before, weights = torch.get_num_threads(), list(net.parameters())
    small = (
        all(w.ndim < 4 for w in weights)
        and sum(w.numel() for w in weights) * config.batch_size < SMALL_STEP
    )
    if small:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

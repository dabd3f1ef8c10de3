"""Run: a training in its folder. The folder is all that commands share; every file is
written whole or not at all.

config.json              method, settings, where the data came from
classes.json             names and training counts
last.ckpt                all that continues the training (safetensors)
epoch-N.ckpt             checkpoints that were kept
history.csv              one row per epoch
held-out.npz             predictions of held-out data
model.safetensors        the trained weights
decider.json             calibration and combination
predictions.npz          particle logits of the test split
metrics.json             their metrics
environment.json         versions and hardware
pretrained.safetensors   the weights it started from
embedding.*              the weights that made its features
choice.json              of a table: candidates, weights
tuning.json              trials before it, and what they chose
familiarity.safetensors  fitted to training samples
"""

import hashlib
import json
import os
import platform
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from rfdlc import __version__
from rfdlc.data.dataset import Dataset, Normalisation, by_reason
from rfdlc.data.images import ImageFiles
from rfdlc.data.load import load
from rfdlc.data.registry import find_reader
from rfdlc.errors import InputError, expect, listing
from rfdlc.formats.files import (
    as_csv,
    check_version,
    owned,
    parse_json,
    read_json,
    replace_durably,
    runs_inside,
)
from rfdlc.formats.identity import digest_of_table, model_name
from rfdlc.imports import recorded
from rfdlc.probabilities.classes import Classes
from rfdlc.probabilities.predictions import Predictions
from rfdlc.training.config import TrainConfig
from rfdlc.training.methods import Method, find_method
from rfdlc.training.networks.pretrained import Start, Weights
from rfdlc.training.settings import settings_where
from rfdlc.training.trial_plan import TUNING, Settings, TrialPlan

FORMAT = "rfdlc-run"
VERSION = 3  # another number for whatever changes what the folder says
HASHED = 4096  # samples at a time
PREFIXES = "net.", "state."  # of the tensors of a checkpoint
LAST, PREVIOUS = "last.ckpt", "previous.ckpt"
# One entry of the metadata of files of weights, as the order of several is random;
# in it the checksum, and what the weights belong to
KNOWN, CHECKSUM = "rfdlc", "sha256"
CLASSES, CONFIGURATION = "classes", "configuration"
MODEL, DECIDER, HELD_OUT = "model.safetensors", "decider.json", "held-out.npz"
MAY_CHANGE = settings_where(lambda setting: setting.may_change_on_resume)
NO_MODEL_DEPENDS_ON = settings_where(
    lambda setting: setting.may_change_on_resume or setting.only_when_written
)
# Keys of `describe_data` that change where data or a run folder are moved: no model
# depends on them
PLACE = ("source", "root", "options", "name", "notes")

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Checkpoint:
    """The end of an epoch. `phase` counts trainings: a refit is the last one."""

    phase: int
    epoch: int
    net: dict[str, Tensor]
    state: dict[str, Tensor]  # of the optimiser and the weight averages
    history: Rows


class Run:
    """A training run: its folder, method and config, and how far it is. Of several
    processes, one `writes`.
    """

    def __init__(self, path: str | Path, writes: bool = True) -> None:
        self.path, self.writes, self.phase, self.epoch = Path(path), writes, 0, 0
        self.history: Rows = []
        self.trained: dict[
            str, Tensor
        ] = {}  # weights of the training before a warm refit
        self._made: dict[str, Any] | None = (
            None  # the config.json that this process wrote
        )
        self._refit: tuple[Any, Any] = (
            None,
            None,
        )  # the config, and the same with the epochs of a refit

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Only this process writes the folder meanwhile; what a killed one left
        half-written is removed.
        """
        if not self.writes:
            yield
            return
        with owned(self.path / ".lock") as other:
            expect(
                not other,
                f"{self.path} is being written by {other}: wait until it ends, or"
                " choose another folder",
            )
            same = self._made is None or read_json(
                self.path / "config.json"
            ) == json.loads(json.dumps(self._made))
            expect(
                same,
                f"{self.path} was made by another process at the same time: choose"
                " another folder",
            )
            for left in self.path.glob(".*.tmp"):
                left.unlink(missing_ok=True)
            yield

    def create(
        self,
        data: Mapping[str, Any],
        classes: Classes,
        copies: Mapping[str, Path] | None = None,
        **more: Any,
    ) -> None:
        """Make the folder, if there is none, of this method and config on what
        `describe_data` gave, with `copies`.
        """
        if self.exists or not self.writes:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"{self.path} cannot be made a run folder ({error.strerror}): choose"
                " another"
            ) from None
        versions = {
            "rfdlc": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        hardware = {
            "platform": platform.platform(),
            "threads": torch.get_num_threads(),
            "numpy": np.__version__,
        }
        hardware["gpu"] = (
            torch.cuda.get_device_name() if torch.cuda.is_available() else None
        )
        described = {
            "method": self.method_name,
            "settings": self.config.to_dict(),
            "data": data,
            **recorded(),
            **more,
        }
        if self.start is not None:
            self.write("pretrained.safetensors", save(plain_tensors(self.start)))
        for name, source in (copies or {}).items():
            self.write(name, partial(shutil.copyfile, source))
        self.write_json("classes.json", classes.to_dict())
        self.write_json("environment.json", {**versions, **hardware})
        self._made = {
            "format": FORMAT,
            "version": VERSION,
            "rfdlc": __version__,
            **described,
        }
        self.write_json("config.json", self._made)  # last

    @cached_property
    def start(self) -> Weights | None:
        """The weights that its networks start from (setting `pretrained`); None for
        random ones.
        """
        path = self.path / "pretrained.safetensors"
        with _readable(path, "a file of weights"):
            return load_file(path) if path.exists() else None

    @property
    def exists(self) -> bool:
        return (self.path / "config.json").exists()

    @property
    def finished(self) -> bool:
        return (self.path / "metrics.json").exists()  # written last

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """config.json: method, settings, and where the data came from."""
        table = self.read_json("config.json")
        check_version(self.path / "config.json", table, FORMAT, VERSION)
        for name, kind, inner in (
            ("method", str, ""),
            ("settings", dict, "method_options"),
            ("data", dict, "options"),
        ):
            fits = isinstance(table.get(name), kind) and (
                not inner or isinstance(table[name].get(inner, {}), dict)
            )
            expect(
                fits,
                f"{self.path}/config.json is damaged: {name!r} is missing or of another"
                " kind",
            )
        return table

    @cached_property
    def config(self) -> TrainConfig:
        """The settings."""
        return self.method.configure(self.metadata["settings"] | self.chosen)

    @property
    def tuning(self) -> TrialPlan | None:
        """Trials before the training, and what they chose; None where there are
        none.
        """
        path = self.path / TUNING
        return TrialPlan.read(self.read_json(TUNING), path) if path.exists() else None

    @property
    def chosen(self) -> Settings:
        """What trials chose."""
        return plan.chosen if (plan := self.tuning) else {}

    @property
    def given(self) -> set[str]:
        """The settings that the user chose, where there are trials, which leave these
        as they are.
        """
        return set(self.metadata.get("given", ()))

    @cached_property
    def method_name(self) -> str:
        return str(self.metadata["method"])

    @property
    def method(self) -> Method:
        return find_method(self.method_name, self.path)

    @cached_property
    def classes(self) -> Classes:
        return Classes.from_json(self.read_json("classes.json"))

    @property
    def configuration(self) -> str:
        """A digest of what a model depends on beside its weights and its classes:
        method, settings and data, wherever these are.
        """
        settings = self.metadata["settings"] | self.chosen
        data = dict(self.metadata["data"])
        for name in NO_MODEL_DEPENDS_ON:
            settings.pop(name, None)
        for name in PLACE:
            data.pop(name, None)
        return digest_of_table([self.method_name, settings, data])

    @property
    def model(self) -> str:
        """The name of the trained model; nothing where there is none yet, or where its
        file does not say what it belongs to.
        """
        path = self.path / MODEL
        if not path.exists():
            return ""
        with _readable(path, "a file of weights"):
            with safe_open(path, framework="pt") as file:
                metadata = _metadata(file)
            if not {CHECKSUM, CLASSES, CONFIGURATION} <= set(metadata):
                return ""
            names = parse_json(metadata[CLASSES])
            return model_name(metadata[CHECKSUM], names, metadata[CONFIGURATION])

    def bound(self, tensors: Mapping[str, Tensor], **known: str) -> bytes:
        """A safetensors file that says which classes, in which order, and which
        configuration its tensors belong to.
        """
        names = json.dumps(list(self.classes.names))
        belongs = {CLASSES: names, CONFIGURATION: self.configuration}
        return checksummed(tensors, {**known, **belongs})

    def check_bound(self, path: Path, metadata: Mapping[str, str]) -> None:
        """Raise for a file of other classes or of another configuration than this
        folder; warn where it does not say of which it is.
        """
        if CLASSES not in metadata or CONFIGURATION not in metadata:
            warnings.warn(
                f"{path} does not say to which classes and configuration its weights"
                f" belong: that they are those of {self.path} is taken on trust",
                stacklevel=3,
            )
            return
        names = [str(name) for name in parse_json(metadata[CLASSES])]
        known = list(self.classes.names)
        how = "in another order" if sorted(names) == sorted(known) else "other ones"
        expect(
            names == known,
            f"the outputs of {path} are the classes {listing(names)}, but"
            f" {self.path}/classes.json has {how}: {listing(known)}; restore the file"
            " that belongs to the weights",
        )
        expect(
            metadata[CONFIGURATION] == self.configuration,
            f"{path} is of a run with other settings or data than"
            f" {self.path}/config.json: restore the file that belongs to this run; to"
            " train on with other settings, fork it (`rfdlc fork`)",
        )

    def write_model(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the trained weights, and before that into the decider and the held-out
        predictions that they are theirs.
        """
        if not self.writes:
            return
        checksum = _checksum(plain_tensors(tensors))
        name = model_name(checksum, self.classes.names, self.configuration)
        if (self.path / DECIDER).exists():
            table = self.read_json(DECIDER)
            table["model"]["source"] = name
            self.write(DECIDER, f"{json.dumps(table)}\n".encode())
        if (self.path / HELD_OUT).exists():
            self.write(HELD_OUT, Predictions.load(self.path / HELD_OUT).of(name).save)
        self.write(MODEL, self.bound(tensors))

    @property
    def spans(self) -> list[tuple[int, int]]:
        return self.method.spans(self.phase_config)

    @property
    def refits(self) -> bool:  # on all samples, after the trainings that calibrate
        return self.phase >= self.config.folds

    @property
    def phase_config(self) -> TrainConfig:
        """The settings, with the epochs of the training that goes on."""
        own = self.config.refit_epochs if self.refits else 0
        if (
            own and self._refit[0] is not self.config
        ):  # made once: every epoch asks several times
            self._refit = self.config, self.config.replace(epochs=own)
        return self._refit[1] if own else self.config

    @property
    def epochs(self) -> int:
        return self.spans[-1][1]

    def read_json(self, name: str) -> dict[str, Any]:
        try:
            return read_json(self.path / name)
        except InputError as error:
            raise InputError(
                runs_inside(self.path) or f"{self.path} is not a run folder: {error}"
            ) from None

    def checkpoint(self, name: str = LAST) -> Checkpoint | None:
        """The last checkpoint, the one before it where it is damaged or missing, or a
        kept one; None if none exists.
        """
        names = (LAST, PREVIOUS) if name == LAST else (name,)
        paths = [path for path in map(self.path.joinpath, names) if path.exists()]
        for path in paths:
            try:
                with _readable(path, "a checkpoint"):
                    found, meta = read_weights(path)
                    self.check_bound(path, meta)
                    net, state = (
                        {
                            k.removeprefix(p): v
                            for k, v in found.items()
                            if k.startswith(p)
                        }
                        for p in PREFIXES
                    )
                    return Checkpoint(
                        int(meta["phase"]),
                        int(meta["epoch"]),
                        net,
                        state,
                        parse_json(meta["history"]),
                    )
            except InputError as error:
                if path == paths[-1]:
                    raise
                warnings.warn(f"{error}: continuing from {PREVIOUS}", stacklevel=2)
        return None

    def weights(self, name: str = MODEL) -> dict[str, Tensor]:
        """The trained weights, or those of the last checkpoint while training goes on;
        or what another file holds.
        """
        path, fix = self.path / name, f"`rfdlc resume {self.path}`"
        if path.exists():
            with _readable(path, "a file of weights"):
                tensors, metadata = read_weights(path)
                self.check_bound(path, metadata)
                return tensors
        if (found := self.checkpoint()) is None:
            raise InputError(
                f"{self.path} has no trained weights yet: train it with {fix}"
            )
        early = (
            "is not trained to the end: these are the weights after epoch"
            f" {found.epoch}, not calibrated"
        )
        warnings.warn(f"{self.path} {early}; finish it with {fix}", stacklevel=2)
        return found.net

    def save_checkpoint(
        self, checkpoint: Checkpoint, kept_as: str | None = None
    ) -> None:
        """Write last.ckpt, then history.csv, which follows from it."""
        if not self.writes:
            return
        both = zip(PREFIXES, (checkpoint.net, checkpoint.state), strict=True)
        named = {
            f"{prefix}{name}": tensor
            for prefix, tensors in both
            for name, tensor in tensors.items()
        }
        known = {
            "phase": checkpoint.phase,
            "epoch": checkpoint.epoch,
            "history": checkpoint.history,
        }
        data = self.bound(
            named, **{name: json.dumps(value) for name, value in known.items()}
        )
        for name in filter(None, (kept_as, LAST)):
            self.write(name, data)
        self.write_history(checkpoint.history)

    def write_history(self, rows: Rows) -> None:
        """One row per epoch."""
        self.write("history.csv", as_csv(rows))

    def write_json(self, name: str, table: Mapping[str, Any]) -> None:
        self.write(
            name, (json.dumps(table, indent=1, ensure_ascii=False) + "\n").encode()
        )

    def write(self, name: str, content: bytes | Callable[[Path], object]) -> None:
        """Bytes, or a file written by a function: at any time the folder has the old
        one or the new one, complete.
        """
        if not self.writes:
            return
        temporary = self.path / f".{name}.{os.getpid()}.tmp"
        try:
            (
                temporary.write_bytes(content)
                if isinstance(content, bytes)
                else content(temporary)
            )
            if name == LAST:
                with suppress(FileNotFoundError):
                    os.replace(self.path / LAST, self.path / PREVIOUS)
            replace_durably(temporary, self.path / name)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            intact = (
                f"{n} is intact" for n in (LAST, PREVIOUS) if (self.path / n).exists()
            )
            state = next(intact, "there was no checkpoint yet")
            problem = (
                f"{self.path}/{name} cannot be written ({error.strerror or error});"
                f" {state}"
            )
            raise InputError(
                f"{problem}: free some disk space, then `rfdlc resume {self.path}`"
            ) from None


@contextmanager
def _readable(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except (SafetensorError, KeyError, ValueError, TypeError, OSError) as error:
        raise InputError(f"{path} is not {what} ({error})") from None


def checksummed(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> bytes:
    """A safetensors file whose metadata has a checksum of the tensors."""
    plain = plain_tensors(tensors)
    known = {**(metadata or {}), CHECKSUM: _checksum(plain)}
    return save(plain, {KNOWN: json.dumps(known)})


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file; raises where its checksum, if it has
    one, is wrong.
    """
    with safe_open(path, framework="pt") as file:
        names = file.keys()
        tensors = {name: file.get_tensor(name) for name in names}
        meta = _metadata(file)
    damaged = (
        f"{path} is damaged: its checksum is wrong; restore it from a copy, or train"
        " the run again"
    )
    expect(CHECKSUM not in meta or meta[CHECKSUM] == _checksum(tensors), damaged)
    return tensors, meta


def _metadata(file: Any) -> dict[str, str]:
    """What an opened safetensors file says of its tensors; those of earlier versions
    and of others have entries of their own.
    """
    found: dict[str, str] = file.metadata() or {}
    return {**parse_json(found[KNOWN])} if KNOWN in found else found


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def plain_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that are ready for a file."""
    return {
        name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()
    }


def describe_data(
    data: Dataset, source: Any, root: str | Path | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """What a run folder keeps of its data: how to load them again, what a model needs,
    and a fingerprint.
    """
    scale, broken = data.normalisation, "; ".join(by_reason(data.skipped))
    where = {"source": str(source), "root": None if root is None else str(root)}
    return {
        **(where if isinstance(source, str | Path) else {}),
        "options": json.loads(
            json.dumps(dict(options), default=str)
        ),  # paths and numbers of numpy as text
        "name": data.name,
        "input_shape": list(data.input_shape),
        "normalisation": (
            None
            if scale is None
            else {"mean": list(scale.mean), "std": list(scale.std)}
        ),
        "encoder": None if data.encoder is None else data.encoder.to_dict(),
        **({"resizing": None} if data.resizing is None else data.resizing.to_dict()),
        "embedding": (
            None if data.embedding is None else data.embedding.model_dump(mode="json")
        ),
        "fingerprint": fingerprint(data),
        "notes": [
            *data.notes,
            *([f"broken, left out: {len(data.skipped)}: {broken}"] if broken else []),
        ],
    }


def load_for(
    source: Any,
    root: str | Path | None,
    options: Mapping[str, Any],
    config: TrainConfig,
    start: Start,
) -> tuple[Dataset, dict[str, Any]]:
    """The data as a network expects them, and the options that load them so: image
    files are decoded at its size.
    """
    if isinstance(source, Dataset):
        expect(
            not options,
            f"a Dataset is loaded already: give data_options ({', '.join(options)}) to"
            " rfdlc.load",
        )
        data, options = source, {}
    else:
        options = {
            **sizes_for(source, root, config, start, options.get("drop")),
            **options,
        }
        data = load(source, root=root, **options)
    if start.preprocessing is not None:
        data = replace(
            data,
            normalisation=Normalisation(
                start.preprocessing.mean, start.preprocessing.std
            ),
        )
    return data, options


def sizes_for(
    source: Any, root: str | Path | None, config: TrainConfig, start: Start, drop: Any
) -> dict[str, Any]:
    """The options that decode image files as a network expects them; none for other
    data.
    """
    if isinstance(source, Dataset):
        return {}
    reader, _ = find_reader(source, root, drop)
    wanted = config.replace(**start.settings)
    sizes = dict[str, Any]()
    if wanted.image_size and "image_size" in reader.options:
        sizes["image_size"] = wanted.image_size
    if wanted.interpolation != "auto" and "interpolation" in reader.options:
        sizes["interpolation"] = wanted.interpolation
    return sizes


def data_of(run: Run, data: Any = None) -> Dataset:
    """The data that a run was trained on, passed again or loaded from where they were;
    other data are refused.
    """
    table = run.metadata["data"]
    given = data if data is not None else table.get("source")
    expect(
        given is not None,
        f"{run.path} was trained on data in memory: pass the same data again,"
        " resume(path, data)",
    )
    if isinstance(given, Dataset):
        found = given
    else:
        found = load(given, root=table.get("root"), **table.get("options", {}))
    before = table["fingerprint"]
    now = fingerprint(found)
    changed = [
        f"{what} ({before.get(what)}, now {now[what]})"
        for what in now
        if before.get(what) != now[what]
    ]
    other = (
        f"{run.path} was trained on other data than {found.name}: other"
        f" {', '.join(changed)}"
    )
    expect(
        not changed,
        f"{other}: pass the data that it was trained on, or train a new run",
    )
    scale = table["normalisation"]  # which may be a pretrained network's
    return replace(
        found,
        normalisation=(
            None if scale is None else Normalisation(*map(tuple, scale.values()))
        ),
    )


def fingerprint(data: Dataset) -> dict[str, Any]:
    """The number of samples that a run is trained and calibrated on, and hashes of
    their labels and contents in order.

    Of image files, names and contents are hashed, not times: a copy of the folder is
    the same data. Of many files, their contents are sampled (`digest_of_files`).
    """
    splits = [split for name, split in data.splits.items() if name != "test"]
    labels, contents = hashlib.sha256(), hashlib.sha256()
    for split in splits:
        labels.update(np.ascontiguousarray(split.labels).tobytes())
        if isinstance(split.inputs, ImageFiles):
            contents.update(
                b"".join(part.tobytes() for part in split.inputs.names.packed)
            )
            contents.update(split.inputs.content_digest(times=False).encode())
            continue
        for start in range(0, len(split), HASHED):
            contents.update(
                np.ascontiguousarray(split.inputs[start : start + HASHED]).tobytes()
            )
    return {
        "samples": sum(map(len, splits)),
        "labels": labels.hexdigest()[:16],
        "contents": contents.hexdigest()[:16],
    }

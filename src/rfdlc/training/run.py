"""The run folder: the only thing commands share. Every file is written whole or not at all.

config.json        method, settings, where the data came from      classes.json       names and training counts
last.ckpt          all that continues the training (safetensors)   epoch-N.ckpt       checkpoints that were kept
history.csv        one row an epoch                                held-out.npz       predictions of held-out data
model.safetensors  the trained weights                             decider.json       calibration and combination
predictions.npz    particle logits of the test split               metrics.json       what they are worth
environment.json   versions and hardware
"""

import csv
import io
import json
import os
import platform
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from rfdlc import __version__
from rfdlc.decide.classes import Classes
from rfdlc.errors import InputError
from rfdlc.files import read_json

FORMAT, VERSION = "rfdlc-run", 1

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Checkpoint:
    """The end of an epoch. `phase` counts trainings: a refit is the second one."""

    phase: int
    epoch: int
    net: dict[str, Tensor]
    state: dict[str, Tensor]  # of the optimiser and the moving average
    history: Rows


class Run:
    """A folder with one training in it. Of several processes that train, one `writes`."""

    def __init__(self, path: str | Path, writes: bool = True) -> None:
        self.path, self.writes = Path(path), writes

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any], classes: Classes) -> "Run":
        """A new folder. One that holds a run already is refused, never overwritten."""
        run = cls(path)
        if (run.path / "config.json").exists():
            raise InputError(
                f"{path} holds a run already: continue it with `rfdlc resume {path}`, or choose another folder"
            )
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{path} cannot be made a run folder ({error.strerror}): choose another folder") from None
        run.write_json("classes.json", classes.to_dict())
        run.write_json("environment.json", environment())
        run.write_json("config.json", {"format": FORMAT, "version": VERSION, "rfdlc": __version__, **config})  # last
        return run

    def was_asked_for(self, config: Mapping[str, Any]) -> bool:
        """Whether the folder holds a run of just this configuration."""
        if not (self.path / "config.json").exists():
            return False
        asked = json.loads(json.dumps(config))
        return {key: value for key, value in self.config.items() if key in asked} == asked

    # -- reading ----------------------------------------------------------------------------------------------

    @property
    def config(self) -> dict[str, Any]:
        """What was asked for."""
        table = self.read_json("config.json")
        if table.get("format") != FORMAT or table.get("version") != VERSION:
            raise InputError(f"{self.path}/config.json is not of a run of this version (expected {FORMAT} {VERSION})")
        for name, kind in (("method", str), ("settings", dict), ("data", dict)):
            if not isinstance(table.get(name), kind):
                raise InputError(f"{self.path}/config.json is damaged: {name!r} is missing or of another kind")
        return table

    @property
    def classes(self) -> Classes:
        """Names and training counts."""
        return Classes.from_json(self.read_json("classes.json"))

    def read_json(self, name: str) -> dict[str, Any]:
        """A JSON file of the folder."""
        try:
            return read_json(self.path / name)
        except InputError as error:
            raise InputError(f"{self.path} is no run folder: {error}") from None

    def checkpoint(self, name: str = "last.ckpt") -> Checkpoint | None:
        """The last checkpoint, or none before the first one."""
        path = self.path / name
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                meta = file.metadata()
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            return Checkpoint(
                int(meta["phase"]), int(meta["epoch"]), _under(tensors, "net."), _under(tensors, "state."),
                json.loads(meta["history"]),
            )  # fmt: skip
        except (SafetensorError, KeyError, ValueError, TypeError, OSError) as error:
            raise InputError(f"{path} is not a checkpoint of ours ({error})") from None

    def weights(self) -> dict[str, Tensor]:
        """The trained weights, or those of the last checkpoint while training goes on."""
        path = self.path / "model.safetensors"
        if path.exists():
            try:
                return load_file(path)
            except (SafetensorError, OSError) as error:
                raise InputError(f"{path} is not a file of weights ({error})") from None
        found = self.checkpoint()
        if found is None:
            raise InputError(f"{self.path} has no trained weights yet: train it with `rfdlc resume {self.path}`")
        warnings.warn(
            f"{self.path} is not trained to its end: these are the weights after epoch {found.epoch}, not calibrated; "
            f"finish it with `rfdlc resume {self.path}`",
            stacklevel=2,
        )
        return found.net

    # -- writing ----------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: Checkpoint, kept_as: str | None = None) -> None:
        """Write last.ckpt, then history.csv, which follows from it."""
        if not self.writes:
            return
        tensors = _over(checkpoint.net, "net.") | _over(checkpoint.state, "state.")
        meta = {
            "phase": str(checkpoint.phase),
            "epoch": str(checkpoint.epoch),
            "history": json.dumps(checkpoint.history),
        }
        data = save(tensors, meta)
        if kept_as:
            self.write(kept_as, data)
        self.write("last.ckpt", data)
        self.write_history(checkpoint.history)

    def write_history(self, rows: Rows) -> None:
        """One row an epoch; columns that only some rows have are empty in the others."""
        columns = list(dict.fromkeys(key for row in rows for key in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows(rows)
        self.write("history.csv", text.getvalue().encode())

    def write_json(self, name: str, table: Mapping[str, Any]) -> None:
        """A JSON file."""
        self.write(name, (json.dumps(table, indent=1, ensure_ascii=False) + "\n").encode())

    def write_with(self, name: str, save_to: Callable[[Path], object]) -> None:
        """A file that something else writes: at any instant the folder has the old one or the new one, whole."""
        if not self.writes:
            return
        temporary = self.path / f".{name}.tmp"
        try:
            save_to(temporary)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, self.path / name)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            kept = (self.path / "last.ckpt").exists()
            state = "last.ckpt is whole" if kept else "there was no checkpoint yet"
            raise InputError(
                f"{self.path}/{name} cannot be written ({error.strerror or error}); {state}: make room, then "
                f"`rfdlc resume {self.path}`"
            ) from None

    def write(self, name: str, data: bytes) -> None:
        """A file of these bytes, in the same way."""
        self.write_with(name, lambda path: path.write_bytes(data))


def environment() -> dict[str, Any]:
    """Versions and hardware, for whoever compares results."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "rfdlc": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
    }


def _over(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

"""train, resume, fork: a training in a run folder, from settings to predictions.

Under `torchrun` every process carries out the same training on its share of the samples; process 0 writes.
"""

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rfdlc.data.dataset import Dataset
from rfdlc.data.images import ImageFiles
from rfdlc.data.load import load
from rfdlc.data.streamed import View
from rfdlc.decide.classes import Classes
from rfdlc.errors import InputError
from rfdlc.training.assembly import OwnBackbone, choose_device, method_net
from rfdlc.training.config import Settings
from rfdlc.training.jobs.driving import train_stack
from rfdlc.training.jobs.finishing import finish_phase
from rfdlc.training.jobs.job import Job, Lane, Traveller
from rfdlc.training.methods import find_method, resolve
from rfdlc.training.model import Model
from rfdlc.training.processes.group import ALONE, Processes, joined, under_torchrun
from rfdlc.training.run import Checkpoint, Run

FIXED_IN_FORKS = (
    "backbone", "widths", "particles", "shared_stages", "head", "seed", "hold_out", "refit", "optimiser",
)  # fmt: skip
SECONDS_UNTIL_FILES_AGREE = 90


def train(
    data: Any,
    method: str = "rf-dlc",
    out: str | Path = "runs/rf-dlc",
    *,
    root: str | Path | None = None,
    data_options: Mapping[str, Any] | None = None,
    backbone: OwnBackbone | str | None = None,
    **settings: Any,
) -> Model:
    """Train on a Dataset, or on the name, path or arrays of one; everything is kept in the folder `out`.

    `backbone` is the name of one, or a network of your own: a function that makes a module which maps a batch to
    features (called once a particle), or a module (copied). Other keywords are settings. `root` and `data_options`
    go to `rfdlc.load`.
    """
    network = None if backbone is None or isinstance(backbone, str) else backbone
    if backbone is not None:
        settings = {**settings, "backbone": "own" if network is not None else backbone}
    with joined() as processes:
        with processes.together():
            resolve(method, data if isinstance(data, str) else "", settings)  # a wrong setting is told before any work
            given, description = load_described(data, root, data_options)
            chosen = checked_settings(given, method, settings, network, processes)
            job = new_job(given, description, method, chosen, out, network, processes)
        return _carry_out(job)


def load_described(
    data: Any, root: str | Path | None, options: Mapping[str, Any] | None
) -> tuple[Dataset, dict[str, Any]]:
    """The data, and what a run folder keeps of them."""
    if isinstance(data, Dataset) and options:
        raise InputError(f"a Dataset is loaded already: give data_options ({', '.join(options)}) to rfdlc.load")
    given = data if isinstance(data, Dataset) else load(data, root=root, **(options or {}))
    return given, {**_source(data, root, dict(options or {})), **_description(given)}


def checked_settings(
    data: Dataset, method: str, settings: Mapping[str, Any], network: OwnBackbone | None = None,
    processes: Processes = ALONE,
) -> Settings:  # fmt: skip
    """All settings of a training on these data. One that cannot be fails here, before there is a folder."""
    row, chosen = resolve(method, data.name, settings, data.kind, len(data.train))
    _check_data(data, chosen)
    _check_processes(chosen, processes)
    method_net(row, chosen, data.input_shape, data.classes, (chosen.seed,), network)
    return chosen


def new_job(
    data: Dataset,
    description: Mapping[str, Any],
    method: str,
    settings: Settings,
    out: str | Path,
    network: OwnBackbone | None = None,
    processes: Processes = ALONE,
) -> Job:
    """A training in a folder of its own, made here."""
    config = {"method": method, "settings": settings.to_dict(), "data": dict(description)}
    run = _folder(out, config, data.classes, processes)
    return Job(run, method, settings, data, network, processes)


def _folder(out: str | Path, config: Mapping[str, Any], classes: Classes, processes: Processes) -> Run:
    """The run folder, made by the process that writes. A command that is started again finds it and goes on."""
    if processes.writes and not (under_torchrun() and Run(out).was_asked_for(config)):
        Run.create(out, config, classes)
    return Run(out, processes.writes)


def resume(path: str | Path, data: Any = None, *, backbone: OwnBackbone | None = None) -> Model:
    """Continue a training from its last checkpoint, or finish what was left undone after it.

    `data` only for a run that was trained on data in memory; `backbone` only for one with a network of the user's own.
    """
    with joined() as processes:
        with processes.together():
            run = Run(path, processes.writes)
            config = run.config
            settings = find_method(config["method"]).configure(config["settings"])
            _check_processes(settings, processes)
            found = same_data(run, config["data"], data)
        return _carry_out(Job(run, config["method"], settings, found, backbone, processes))


def fork(
    path: str | Path,
    out: str | Path,
    *,
    at: int | None = None,
    method: str | None = None,
    data: Any = None,
    backbone: OwnBackbone | str | None = None,
    **changes: Any,
) -> Model:
    """Continue from a checkpoint of another run in a folder of its own, with other settings or as another method.

    `at` is the epoch of a kept checkpoint (setting `keep`); without it the last one is taken. Another `method` brings
    the settings of its row: `crt` from the end of `ce`, `ldam-drw` from the late epoch of `ldam`.
    """
    if isinstance(backbone, str):  # the name of one, a setting like others
        backbone, changes = None, {**changes, "backbone": backbone}
    with joined() as processes:
        with processes.together():
            _begin_fork(Run(path), out, at, method, changes, processes)
        return resume(out, data, backbone=backbone)


def _begin_fork(
    source: Run, out: str | Path, at: int | None, method: str | None, changes: Mapping[str, Any], processes: Processes
) -> None:
    """A folder of its own with the other run's checkpoint in it."""
    config = source.config
    row = find_method(method or config["method"])
    if row.combination is not find_method(config["method"]).combination:
        raise InputError(f"a fork cannot go on as {method}: its networks have other parts; start a new run")
    old = find_method(config["method"]).configure(config["settings"])
    new = row.configure({**old.to_dict(), **changes}) if method is None else _settings_as(method, config, changes)
    moved = [name for name in FIXED_IN_FORKS if getattr(old, name) != getattr(new, name)]
    if moved:
        raise InputError(f"a fork cannot change {', '.join(moved)}: its checkpoint has them inside; start a new run")
    checkpoint = source.checkpoint("last.ckpt" if at is None else f"epoch-{at}.ckpt")
    if checkpoint is None:
        kept = sorted(file.stem.removeprefix("epoch-") for file in source.path.glob("epoch-*.ckpt"))
        raise InputError(f"{source.path} has no checkpoint at epoch {at}: kept are {', '.join(kept) or 'none'}")
    if checkpoint.epoch > sum(row.stage_epochs(new)):
        raise InputError(
            f"epochs={new.epochs} is less than the checkpoint of {source.path} has, which is of epoch "
            f"{checkpoint.epoch}: expected more, or an earlier checkpoint"
        )
    origin = {"path": str(source.path), "epoch": checkpoint.epoch, "changes": {k: str(v) for k, v in changes.items()}}
    table = {
        "method": method or config["method"],
        "settings": new.to_dict(),
        "data": config["data"],
        "forked_from": origin,
    }
    run = _folder(out, table, source.classes, processes)
    if run.checkpoint() is None:
        run.save_checkpoint(checkpoint)


def _settings_as(method: str, config: Mapping[str, Any], changes: Mapping[str, Any]) -> Settings:
    """Another method's settings for the data of a run, with what its user had set."""
    name, kind = config["data"]["name"], "images" if len(config["data"]["input_shape"]) == 3 else "features"
    usual = resolve(config["method"], name, {}, kind)[1].to_dict()
    chosen = {key: value for key, value in config["settings"].items() if value != usual[key]}
    return resolve(method, name, {**chosen, **changes}, kind)[1]


# -- the phases --------------------------------------------------------------------------------------------------


def _carry_out(job: Job) -> Model:
    """Train (twice with `refit`: first without the held-out part, which calibrates), then write what is asked for."""
    last = _last_checkpoint(job.run, job.processes)
    reached, history = (0, []) if last is None else (last.phase, list(last.history))
    model = None
    for phase in range(reached, job.phases):
        data, start = job.samples(phase), last if last is not None and last.phase == phase else None
        (net,) = train_stack([Lane([Traveller(job, history, job.epochs)], data, start)], data, phase)
        model = finish_phase(job, net, data, phase)
    assert model is not None
    return model


def _last_checkpoint(run: Run, processes: Processes) -> Checkpoint | None:
    """The same for all processes: a file system that machines share may show an older file to some for a while."""
    with processes.together():
        if not (run.path / "config.json").exists():
            raise InputError(f"{run.path} is not to be seen: several machines need a run folder that they share")
    for _ in range(SECONDS_UNTIL_FILES_AGREE):
        found = run.checkpoint()
        reached = torch.tensor([-1, -1] if found is None else [found.phase, found.epoch])
        if (processes.everyones(reached) == reached).all():
            return found
        time.sleep(1)
    raise InputError(f"{run.path}/last.ckpt is not the same on all machines: the run folder must be one they share")


# -- checks ----------------------------------------------------------------------------------------------------------


def _check_processes(settings: Settings, processes: Processes) -> None:
    """Settings that these processes cannot have."""
    processes.share(settings.batch_size, settings.accumulate)
    processes.own_device(choose_device(settings.device))
    if settings.batch_norm == "sync" and settings.backbone == "own" and not processes.alone:
        raise InputError("batch_norm=sync is for built-in networks: use batch_norm=local with a backbone of your own")


def _check_data(data: Dataset, settings: Settings) -> None:
    if settings.refit and data.val is not None:
        raise InputError(
            f"refit trains again on held-out samples, but {data.name} has a validation part of its own "
            f"({len(data.val)} samples) that only calibrates: leave refit out"
        )
    if settings.refit and not settings.hold_out:
        raise InputError("refit needs a held-out part to calibrate on: set hold_out=0.1")


def _source(data: Any, root: str | Path | None, options: dict[str, Any]) -> dict[str, Any]:
    """How to load the data again: with which options, and where they were loaded from somewhere, from where."""
    plain = {"options": json.loads(json.dumps(options, default=str))}  # paths, numpy's numbers: text says them too
    if not isinstance(data, str | Path):
        return plain
    return {"source": str(data), "root": None if root is None else str(root), **plain}


def _description(data: Dataset) -> dict[str, Any]:
    """What a model must know of its data, and a fingerprint by which a resumed run knows them again."""
    scale, skipped = data.normalisation, len(data.skipped)
    return {
        "name": data.name,
        "input_shape": list(data.input_shape),
        "normalisation": None if scale is None else {"mean": list(scale.mean), "std": list(scale.std)},
        "encoder": None if data.encoder is None else data.encoder.to_dict(),
        "centre": View().evaluated if isinstance(data.train.inputs, ImageFiles) else 1.0,
        "fingerprint": _fingerprint(data),
        "notes": [*data.notes, *([f"broken, left out: {skipped}"] if skipped else [])],
    }


def _fingerprint(data: Dataset) -> str:
    """Of the labels in order, and of some samples."""
    digest = hashlib.sha256(np.ascontiguousarray(data.train.labels).tobytes())
    some = np.linspace(0, len(data.train) - 1, min(64, len(data.train))).astype(np.int64)
    few = data.train.take(some).inputs
    shown = "\n".join(few.names).encode() if isinstance(few, ImageFiles) else np.ascontiguousarray(few).tobytes()
    digest.update(shown)
    return digest.hexdigest()[:16]


def same_data(run: Run, table: Mapping[str, Any], data: Any) -> Dataset:
    """The data that a run was trained on, given again or loaded from where they were; others are refused."""
    if data is None and "source" not in table:
        raise InputError(f"{run.path} was trained on data in memory: pass the same data again, resume(path, data)")
    given = data if data is not None else table["source"]
    found = given if isinstance(given, Dataset) else load(given, root=table.get("root"), **table.get("options", {}))
    if _fingerprint(found) != table["fingerprint"]:
        raise InputError(f"{run.path} was trained on other data than {found.name}: labels or samples differ")
    return found

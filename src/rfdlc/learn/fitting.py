"""train, resume, fork: a training in a run folder, from settings to predictions.

The trainer sees training data alone: held-out samples calibrate, and the test split is scored by `score_test` after
everything has been chosen and written.

Under `torchrun` every process carries out the same training on its share of the samples; process 0 writes.
"""

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from rfdlc.data.dataset import Dataset
from rfdlc.data.images import ImageFiles
from rfdlc.data.load import load
from rfdlc.decide.classes import Classes
from rfdlc.decide.evaluation import evaluate
from rfdlc.decide.predictions import Predictions
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError
from rfdlc.learn.assembly import (
    OwnBackbone,
    build_parts,
    choose_device,
    method_net,
    place,
    sensible_threads,
)
from rfdlc.learn.heldout import balanced, carries_uniform, diversity
from rfdlc.learn.methods import Method, find_method, resolve
from rfdlc.learn.model import Model, as_tensors, new_decider, predictions_of
from rfdlc.learn.particles import ParticleNet
from rfdlc.learn.processes import Processes, joined, under_torchrun
from rfdlc.learn.run import Checkpoint, Rows, Run
from rfdlc.learn.settings import Settings
from rfdlc.learn.stack import share_statistics
from rfdlc.learn.stopping import stop_at_epoch_end
from rfdlc.learn.training import Epoch, TrainingStopped, epochs, optimiser_state
from rfdlc.progress import live

FIXED_IN_FORKS = (
    "backbone", "widths", "particles", "shared_stages", "head", "seed", "hold_out", "refit", "optimiser",
)  # fmt: skip
SECONDS_UNTIL_FILES_AGREE = 90


class TrainingInterrupted(KeyboardInterrupt):
    """Stopped by Ctrl-C; the message says where it stopped and how to go on."""


@dataclass(frozen=True)
class Job:
    """All that a training in a folder needs."""

    run: Run
    name: str  # of the method
    settings: Settings
    data: Dataset
    network: OwnBackbone | None
    device: torch.device
    processes: Processes

    @property
    def method(self) -> Method:
        return find_method(self.name)

    @property
    def epochs(self) -> int:
        """Of all stages."""
        return sum(self.method.stage_epochs(self.settings))


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
            options = dict(data_options or {})
            given = data if isinstance(data, Dataset) else load(data, root=root, **options)
            row, chosen = resolve(method, given.name, settings, given.kind, len(given.train))
            _check_data(given, chosen)
            device = _place_of(chosen, processes)
            method_net(row, chosen, given.input_shape, given.classes, (chosen.seed,), network)  # fails now or never
            source = _source(data, root, options)
            config = {"method": method, "settings": chosen.to_dict(), "data": {**source, **_description(given)}}
            run = _folder(out, config, given.classes, processes)
        return _carry_out(Job(run, method, chosen, given, network, device, processes))


def resume(path: str | Path, data: Any = None, *, backbone: OwnBackbone | None = None) -> Model:
    """Continue a training from its last checkpoint, or finish what was left undone after it.

    `data` only for a run that was trained on data in memory; `backbone` only for one with a network of the user's own.
    """
    with joined() as processes:
        with processes.together():
            run = Run(path, processes.writes)
            config = run.config
            settings = Settings().changed(config["settings"])
            device = _place_of(settings, processes)
            found = _same_data(run, config["data"], data)
        return _carry_out(Job(run, config["method"], settings, found, backbone, device, processes))


def fork(
    path: str | Path,
    out: str | Path,
    *,
    at: int | None = None,
    method: str | None = None,
    data: Any = None,
    backbone: OwnBackbone | None = None,
    **changes: Any,
) -> Model:
    """Continue from a checkpoint of another run in a folder of its own, with other settings or as another method.

    `at` is the epoch of a kept checkpoint (setting `keep`); without it the last one is taken. Another `method` brings
    the settings of its row: `crt` from the end of `ce`, `ldam-drw` from the late epoch of `ldam`.
    """
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
    old = Settings().changed(config["settings"])
    new = old.changed(changes) if method is None else _settings_as(method, config, changes)
    moved = [name for name in FIXED_IN_FORKS if getattr(old, name) != getattr(new, name)]
    if moved:
        raise InputError(f"a fork cannot change {', '.join(moved)}: its checkpoint has them inside; start a new run")
    checkpoint = source.checkpoint("last.ckpt" if at is None else f"epoch-{at}.ckpt")
    if checkpoint is None:
        kept = sorted(file.stem.removeprefix("epoch-") for file in source.path.glob("epoch-*.ckpt"))
        raise InputError(f"{source.path} has no checkpoint at epoch {at}: kept are {', '.join(kept) or 'none'}")
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


def _folder(out: str | Path, config: Mapping[str, Any], classes: Classes, processes: Processes) -> Run:
    """The run folder, made by the process that writes. A command that is started again finds it and goes on."""
    if processes.writes and not (under_torchrun() and Run(out).was_asked_for(config)):
        Run.create(out, config, classes)
    return Run(out, processes.writes)


def _place_of(settings: Settings, processes: Processes) -> torch.device:
    """The device of this process. Settings that several processes cannot have are told here."""
    processes.share(settings.batch_size, settings.accumulate)
    if settings.batch_norm == "sync" and settings.backbone == "own" and not processes.alone:
        raise InputError("batch_norm=sync is for built-in networks: use batch_norm=local with a backbone of your own")
    return processes.own_device(choose_device(settings.device))


# -- the phases --------------------------------------------------------------------------------------------------


def _carry_out(job: Job) -> Model:
    """Train (twice with `refit`: first without the held-out part, which calibrates), then write what is asked for."""
    whole = job.data
    calibrating = whole.val is None and job.settings.hold_out > 0
    without = whole.hold_out(job.settings.hold_out, seed=job.settings.seed) if calibrating else whole
    phases = [without, whole] if job.settings.refit else [without]
    last = _last_checkpoint(job.run, job.processes)
    reached, history = (0, []) if last is None else (last.phase, list(last.history))
    net = None
    for phase, data in enumerate(phases):
        if phase < reached:
            continue
        start = last if last is not None and last.phase == phase else None
        net = _train_phase(job, data, phase, start, history)
        if data.val is not None:
            _calibrate(job, net, data)
    assert net is not None
    job.run.write("model.safetensors", save(as_tensors(net)))
    job.processes.wait()  # for the files, which all read
    model = Model.load(job.run.path, backbone=job.network, device=str(job.device))
    score_test(job.run, model, whole, job.processes)
    job.processes.wait()
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


def _train_phase(job: Job, data: Dataset, phase: int, start: Checkpoint | None, history: Rows) -> ParticleNet:
    """Train to the last epoch of the last stage, writing checkpoints."""
    settings, seeds, processes = job.settings, (job.settings.seed,), job.processes
    net = method_net(job.method, settings, data.input_shape, data.classes, seeds, job.network)
    if start is not None:
        net.load_state_dict(start.net)
        job.run.write_history(history)  # a crash may have come between the two files
    net = place(net, job.device)
    processes.same_(list(net.state_dict().values()))  # a network of the user's own may have been drawn differently
    if settings.batch_norm == "sync" and not processes.alone:
        share_statistics(net, processes)
    parts = build_parts(job.method, settings, data, seeds, job.device, processes)
    done, state = (start.epoch, start.state) if start else (0, {})
    label = f"Training {data.name}" + (" again, on everything" if phase else "")
    with live(job.epochs, label, done) as show, stop_at_epoch_end() as stopping, sensible_threads(net, settings):
        try:
            for epoch in epochs(net, parts, state, done, processes):
                history.append(_row(job, net, data, phase, epoch))
                stop = processes.any(stopping())
                _keep(job, net, phase, epoch, history, stop)
                done = epoch.epoch
                show(1, f"loss {epoch.losses[0]:.3f}  rate {epoch.rate:.2g}  {epoch.samples_per_second:,.0f} samples/s")
                if stop and done < job.epochs:
                    raise TrainingInterrupted(_how_to_go_on(job, done))
        except TrainingStopped as error:
            raise TrainingStopped(f"{error}; {_last_good(job)}") from None
        except KeyboardInterrupt as error:
            raise TrainingInterrupted(str(error) or _how_to_go_on(job, _saved_epoch(job))) from None
    return net


def _row(job: Job, net: ParticleNet, data: Dataset, phase: int, epoch: Epoch) -> dict[str, Any]:
    """History of one epoch; with figures on held-out data, as if balanced, where they are due."""
    row: dict[str, Any] = {
        "phase": phase,
        "epoch": epoch.epoch,
        "loss": epoch.losses[0],
        "learning_rate": epoch.rate,
        "seconds": round(epoch.seconds, 3),
        "samples_per_second": round(epoch.samples_per_second, 1),
    }
    every = job.settings.evaluate_every
    due = epoch.epoch == job.epochs or (every and epoch.epoch % every == 0)
    if data.val is None or not due:
        return row
    predictions = _predictions(job, net, data)
    if predictions is None:
        return row
    figures = evaluate(balanced(predictions), decider=new_decider(job.name, job.settings, data.classes))
    held = {"accuracy": figures.accuracy, "ece": figures.ece, "nll": figures.nll}
    return {**row, **{f"held_out_{k}": v for k, v in held.items()}, **diversity(predictions.scores.values)}


def _keep(job: Job, net: ParticleNet, phase: int, epoch: Epoch, history: Rows, now: bool) -> None:
    """Write a checkpoint where one is due."""
    settings, number = job.settings, epoch.epoch
    kept = number in {round(share * settings.epochs) for share in settings.keep}
    if now or kept or number == job.epochs or number % settings.checkpoint_every == 0:
        checkpoint = Checkpoint(phase, number, net.state_dict(), optimiser_state(epoch.step), history)
        job.run.save_checkpoint(checkpoint, f"epoch-{number}.ckpt" if kept else None)


def _calibrate(job: Job, net: ParticleNet, data: Dataset) -> None:
    """Fit the Decider on held-out data, weighted to the prior that the probabilities carry."""
    predictions = _predictions(job, net, data)
    if predictions is None:
        return
    decider = new_decider(job.name, job.settings, job.data.classes)
    if decider.calibration is not None:
        decider.fit(predictions, balanced=carries_uniform(decider))
    job.run.write_with("decider.json", decider.save)
    job.run.write_with("held-out.npz", predictions.save)


def _predictions(job: Job, net: ParticleNet, data: Dataset) -> Predictions | None:
    """Of held-out samples, by all processes together; the one that writes has them."""
    assert data.val is not None
    return predictions_of(net, data.val, data.normalisation, job.settings, job.data.classes, job.processes)


def score_test(run: Run, model: Model, data: Dataset, processes: Processes) -> None:
    """The one place where test labels are read: predictions.npz and metrics.json, after everything was chosen."""
    test, known = data.test, (model.normalisation, model.settings, model.classes)
    predictions = None if test is None else predictions_of(model.net, test, *known, processes)
    if not processes.writes:
        return
    metrics: dict[str, Any] = {}
    if (run.path / "held-out.npz").exists():
        held = balanced(Predictions.load(run.path / "held-out.npz"))
        metrics["held_out_balanced"] = evaluate(held, decider=model.decider).to_dict()
    if predictions is not None:
        run.write_with("predictions.npz", predictions.save)
        metrics["test"] = evaluate(predictions, decider=model.decider).to_dict()
        metrics["diversity"] = diversity(predictions.scores.values)
        if predictions.uncertainty is not None:
            metrics[model.net.combination.measures] = float(predictions.uncertainty.mean())
        if data.classes.imbalance_factor > 1:
            decider = model.decider.with_utility(Utility.tail_sensitive(data.classes))
            metrics["test_tail_sensitive"] = evaluate(predictions, decider=decider).to_dict()
    run.write_json("metrics.json", metrics)


# -- small things --------------------------------------------------------------------------------------------------


def _saved_epoch(job: Job) -> int:
    found = job.run.checkpoint()
    return 0 if found is None else found.epoch


def _how_to_go_on(job: Job, epoch: int) -> str:
    return f"stopped after epoch {epoch} of {job.epochs}; go on with `rfdlc resume {job.run.path}`"


def _last_good(job: Job) -> str:
    epoch = _saved_epoch(job)
    return f"the last good checkpoint is epoch {epoch} in {job.run.path}" if epoch else "there is no checkpoint yet"


def _check_data(data: Dataset, settings: Settings) -> None:
    if settings.refit and data.val is not None:
        raise InputError(
            f"refit trains again on held-out samples, but {data.name} has a validation part of its own "
            f"({len(data.val)} samples) that only calibrates: leave refit out"
        )
    if settings.refit and not settings.hold_out:
        raise InputError("refit needs a held-out part to calibrate on: set hold_out=0.1")


def _source(data: Any, root: str | Path | None, options: dict[str, Any]) -> dict[str, Any]:
    """How to load the data again, where they were loaded from somewhere."""
    if not isinstance(data, str | Path):
        return {}
    return {"source": str(data), "root": None if root is None else str(root), "options": options}


def _description(data: Dataset) -> dict[str, Any]:
    """What a model must know of its data, and a fingerprint by which a resumed run knows them again."""
    scale = data.normalisation
    return {
        "name": data.name,
        "input_shape": list(data.input_shape),
        "normalisation": None if scale is None else {"mean": list(scale.mean), "std": list(scale.std)},
        "encoder": None if data.encoder is None else data.encoder.to_dict(),
        "fingerprint": _fingerprint(data),
    }


def _fingerprint(data: Dataset) -> str:
    """Of the labels in order, and of some samples."""
    digest = hashlib.sha256(np.ascontiguousarray(data.train.labels).tobytes())
    some = np.linspace(0, len(data.train) - 1, min(64, len(data.train))).astype(np.int64)
    few = data.train.take(some).inputs
    shown = "\n".join(few.names).encode() if isinstance(few, ImageFiles) else np.ascontiguousarray(few).tobytes()
    digest.update(shown)
    return digest.hexdigest()[:16]


def _same_data(run: Run, table: Mapping[str, Any], data: Any) -> Dataset:
    if data is None and "source" not in table:
        raise InputError(f"{run.path} was trained on data in memory: pass the same data again, resume(path, data)")
    given = data if data is not None else table["source"]
    found = given if isinstance(given, Dataset) else load(given, root=table.get("root"), **table.get("options", {}))
    if _fingerprint(found) != table["fingerprint"]:
        raise InputError(f"{run.path} was trained on other data than {found.name}: labels or samples differ")
    return found

"""train, resume, fork: a training in a run folder, from settings to predictions.

The trainer sees training data alone: held-out samples calibrate, and the test split is scored by `score_test` after
everything has been chosen and written.
"""

import hashlib
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save

from rfdlc.data.dataset import Dataset
from rfdlc.data.images import ImageFiles
from rfdlc.data.load import load
from rfdlc.decide.evaluation import evaluate
from rfdlc.decide.predictions import Predictions
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError
from rfdlc.learn.assembly import (
    OwnBackbone,
    Recipe,
    choose_device,
    method_net,
    place,
    sensible_threads,
    stack_part,
)
from rfdlc.learn.heldout import balanced, carries_uniform, diversity
from rfdlc.learn.methods import Method, find_method, resolve
from rfdlc.learn.model import Model, as_tensors, new_decider, predictions_of
from rfdlc.learn.particles import ParticleNet
from rfdlc.learn.run import Checkpoint, Rows, Run
from rfdlc.learn.settings import Settings
from rfdlc.learn.training import Epoch, Part, TrainingStopped, epochs, of_run, spans, stacked
from rfdlc.progress import live

FIXED_IN_FORKS = (
    "backbone", "widths", "particles", "shared_stages", "head", "seed", "hold_out", "refit", "optimiser",
)  # fmt: skip


class TrainingInterrupted(KeyboardInterrupt):
    """Stopped by Ctrl-C; the message says where it stopped and how to go on."""


@dataclass(frozen=True)
class Job:
    """All that a training in a folder needs."""

    run: Run
    name: str  # of the method
    settings: Settings
    data: Dataset
    network: OwnBackbone | None = None

    @property
    def device(self) -> torch.device:
        return choose_device(self.settings.device)

    @property
    def method(self) -> Method:
        return find_method(self.name)

    @property
    def epochs(self) -> int:
        """Of all stages."""
        return self.spans[-1][1]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Start and end epoch of every stage."""
        return spans(self.method.stage_epochs(self.settings))

    @property
    def calibrates(self) -> bool:
        """Whether a part of the training data is held out for it."""
        return self.data.val is None and self.settings.hold_out > 0

    @property
    def phases(self) -> int:
        """Trainings: two with `refit`, first without the held-out part, then on everything."""
        return 2 if self.settings.refit else 1

    def samples(self, phase: int) -> Dataset:
        """What a phase trains on, and what it holds out."""
        if phase == 0 and self.calibrates:
            return self.data.hold_out(self.settings.hold_out, seed=self.settings.seed)
        return self.data


@dataclass
class Traveller:
    """A job on its way through a training: what it has behind it, and the epoch after which it leaves."""

    job: Job
    history: Rows
    until: int


@dataclass(frozen=True)
class Lane:
    """One run of a stack. Jobs that are the same for a while share it: the first as far as the stack goes."""

    travellers: Sequence[Traveller]
    data: Dataset  # what it trains on, and its held-out part
    start: Checkpoint | None = None
    positions: NDArray[np.int64] | None = None  # of its samples in those of the stack; none: all of them

    @property
    def job(self) -> Job:
        return self.travellers[0].job

    def on_it(self, epoch: int) -> list[Traveller]:
        """Those who have not left before this epoch."""
        return [traveller for traveller in self.travellers if epoch <= traveller.until]


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
    resolve(method, data if isinstance(data, str) else "", settings)  # a wrong setting is told before any work
    given, description = load_described(data, root, data_options)
    chosen = checked_settings(given, method, settings, network)
    return _carry_out(new_job(given, description, method, chosen, out, network))


def load_described(
    data: Any, root: str | Path | None, options: Mapping[str, Any] | None
) -> tuple[Dataset, dict[str, Any]]:
    """The data, and what a run folder keeps of them."""
    given = data if isinstance(data, Dataset) else load(data, root=root, **(options or {}))
    return given, {**_source(data, root, dict(options or {})), **_description(given)}


def checked_settings(
    data: Dataset, method: str, settings: Mapping[str, Any], network: OwnBackbone | None = None
) -> Settings:
    """All settings of a training on these data. One that cannot be fails here, before there is a folder."""
    row, chosen = resolve(method, data.name, settings, data.kind, len(data.train))
    _check_data(data, chosen)
    choose_device(chosen.device)
    method_net(row, chosen, data.input_shape, data.classes, (chosen.seed,), network)
    return chosen


def new_job(
    data: Dataset,
    description: Mapping[str, Any],
    method: str,
    settings: Settings,
    out: str | Path,
    network: OwnBackbone | None = None,
) -> Job:
    """A training in a folder of its own, made here."""
    config = {"method": method, "settings": settings.to_dict(), "data": dict(description)}
    return Job(Run.create(out, config, data.classes), method, settings, data, network)


def resume(path: str | Path, data: Any = None, *, backbone: OwnBackbone | None = None) -> Model:
    """Continue a training from its last checkpoint, or finish what was left undone after it.

    `data` only for a run that was trained on data in memory; `backbone` only for one with a network of the user's own.
    """
    run = Run(path)
    config = run.config
    settings = Settings().changed(config["settings"])
    found = same_data(run, config["data"], data)
    return _carry_out(Job(run, config["method"], settings, found, backbone))


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
    source = Run(path)
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
        raise InputError(f"{path} has no checkpoint at epoch {at}: kept are {', '.join(kept) or 'none'}")
    origin = {"path": str(path), "epoch": checkpoint.epoch, "changes": {k: str(v) for k, v in changes.items()}}
    table = {
        "method": method or config["method"],
        "settings": new.to_dict(),
        "data": config["data"],
        "forked_from": origin,
    }
    run = Run.create(out, table, source.classes)
    run.save_checkpoint(checkpoint)
    return resume(out, data, backbone=backbone)


def _settings_as(method: str, config: Mapping[str, Any], changes: Mapping[str, Any]) -> Settings:
    """Another method's settings for the data of a run, with what its user had set."""
    name, kind = config["data"]["name"], "images" if len(config["data"]["input_shape"]) == 3 else "features"
    usual = resolve(config["method"], name, {}, kind)[1].to_dict()
    chosen = {key: value for key, value in config["settings"].items() if value != usual[key]}
    return resolve(method, name, {**chosen, **changes}, kind)[1]


# -- the phases --------------------------------------------------------------------------------------------------


def _carry_out(job: Job) -> Model:
    """Train (twice with `refit`: first without the held-out part, which calibrates), then write what is asked for."""
    last = job.run.checkpoint()
    reached, history = (0, []) if last is None else (last.phase, list(last.history))
    model = None
    for phase in range(reached, job.phases):
        data, start = job.samples(phase), last if last is not None and last.phase == phase else None
        (net,) = train_stack([Lane([Traveller(job, history, job.epochs)], data, start)], data, phase)
        model = finish_phase(job, net, data, phase)
    assert model is not None
    return model


def finish_phase(job: Job, net: ParticleNet, data: Dataset, phase: int) -> Model | None:
    """Calibrate where samples were held out; after the last phase, write and score the model."""
    if data.val is not None:
        _calibrate(job, net, data)
    if phase + 1 < job.phases:
        return None
    job.run.write("model.safetensors", save(as_tensors(net)))
    model = Model.load(job.run.path, backbone=job.network, device=job.settings.device)
    score_test(job.run, model, job.data)
    return model


def train_stack(lanes: Sequence[Lane], samples: Dataset, phase: int) -> list[ParticleNet]:
    """Train lanes that are equally far until the first jobs on them leave; the networks of each lane.

    Everyone's history and checkpoints are written on the way. After the last epoch the networks are the trained ones.
    """
    job, starts = lanes[0].job, [lane.start for lane in lanes if lane.start is not None]
    done, end = starts[0].epoch if starts else 0, lanes[0].travellers[0].until
    net, nets = _networks(lanes, starts)
    parts, state = _parts(lanes, samples, done, end), stacked([start.state for start in starts])
    for traveller in (traveller for lane in lanes for traveller in lane.travellers if starts):
        traveller.job.run.write_history(traveller.history)  # a crash may have come between the two files
    label, threads = _label(lanes, phase), sensible_threads(net, job.settings)
    with live(end, label, done) as show, _stop_at_epoch_end() as stopping, threads:
        try:
            for epoch in epochs(net, parts, state, done):
                for run, lane in enumerate(lanes):
                    _note(lane, nets[run], phase, epoch.of(run))
                stop = stopping()  # asked once: all runs are kept at the same epoch
                for run, lane in enumerate(lanes):
                    _keep(lane, nets[run], phase, epoch.of(run), stop)
                done = epoch.epoch
                show(1, _figures(epoch))
                if stop and done < max(lane.job.epochs for lane in lanes):
                    raise TrainingInterrupted(_how_to_go_on(lanes, done))
                if done == end < parts[-1].end:
                    break
        except TrainingStopped as error:
            raise TrainingStopped(f"{error}; {_last_good(lanes[error.run].job)}") from None
        except KeyboardInterrupt as error:
            raise TrainingInterrupted(str(error) or _how_to_go_on(lanes, _saved_epoch(job))) from None
    return nets


def _networks(lanes: Sequence[Lane], starts: Sequence[Checkpoint]) -> tuple[ParticleNet, list[ParticleNet]]:
    """The stack, and the networks of each lane, which share its memory."""
    job, seeds = lanes[0].job, [lane.job.settings.seed for lane in lanes]
    net = _network(job, seeds)
    if starts:
        net.load_state_dict(stacked([start.net for start in starts]))
    net = place(net, job.device)
    if len(lanes) == 1:
        return net, [net]
    nets = [place(_network(lane.job, [seed]), job.device) for lane, seed in zip(lanes, seeds, strict=True)]
    for run, own in enumerate(nets):
        own.load_state_dict(of_run(net.state_dict(), run, len(lanes)), assign=True)
    return net, nets


def _network(job: Job, seeds: Sequence[int]) -> ParticleNet:
    return method_net(job.method, job.settings, job.data.input_shape, job.data.classes, seeds, job.network)


def _parts(lanes: Sequence[Lane], samples: Dataset, done: int, end: int) -> list[Part]:
    """The stages between two epochs, and the one that has just ended: its last touch comes after its checkpoint."""
    job = lanes[0].job
    recipes = [
        Recipe(lane.job.method, lane.job.settings, lane.job.settings.seed, lane.data.classes, lane.positions)
        for lane in lanes
    ]
    numbers = [i for i, (first, last) in enumerate(job.spans) if last >= done and first < end]
    return [stack_part(recipes, samples, number, job.device) for number in numbers]


def _note(lane: Lane, net: ParticleNet, phase: int, epoch: Epoch) -> None:
    """An epoch in the history of every job on a lane."""
    for traveller in lane.on_it(epoch.epoch):
        traveller.history.append(_row(traveller.job, net, lane.data, phase, epoch))


def _row(job: Job, net: ParticleNet, data: Dataset, phase: int, epoch: Epoch) -> dict[str, Any]:
    """History of one epoch; with figures on held-out data, as if balanced, where they are due."""
    row: dict[str, Any] = {
        "phase": phase,
        "epoch": epoch.epoch,
        "loss": epoch.losses[0],
        "learning_rate": epoch.rates[0],
        "seconds": round(epoch.seconds, 3),
        "samples_per_second": round(epoch.samples_per_second, 1),
    }
    every = job.settings.evaluate_every
    due = epoch.epoch == job.epochs or (every and epoch.epoch % every == 0)
    if data.val is None or not due:
        return row
    predictions = _predictions(job, net, data)
    figures = evaluate(balanced(predictions), decider=new_decider(job.name, job.settings, data.classes))
    held = {"accuracy": figures.accuracy, "ece": figures.ece, "nll": figures.nll}
    return {**row, **{f"held_out_{k}": v for k, v in held.items()}, **diversity(predictions.scores.values)}


def _keep(lane: Lane, net: ParticleNet, phase: int, epoch: Epoch, now: bool) -> None:
    """Write a checkpoint for every job on a lane to whom one is due; whoever leaves takes one along."""
    number = epoch.epoch
    for traveller in lane.on_it(number):
        run, settings = traveller.job.run, traveller.job.settings
        kept = number in {round(share * settings.epochs) for share in settings.keep}
        if now or kept or number == traveller.until or number % settings.checkpoint_every == 0:
            checkpoint = Checkpoint(phase, number, net.state_dict(), epoch.state, traveller.history)
            run.save_checkpoint(checkpoint, f"epoch-{number}.ckpt" if kept else None)


def _calibrate(job: Job, net: ParticleNet, data: Dataset) -> None:
    """Fit the Decider on held-out data, weighted to the prior that the probabilities carry."""
    predictions = _predictions(job, net, data)
    decider = new_decider(job.name, job.settings, job.data.classes)
    if decider.calibration is not None:
        decider.fit(predictions, balanced=carries_uniform(decider))
    job.run.write_with("decider.json", decider.save)
    job.run.write_with("held-out.npz", predictions.save)


def _predictions(job: Job, net: ParticleNet, data: Dataset) -> Predictions:
    assert data.val is not None
    return predictions_of(net, data.val, data.normalisation, job.settings, job.data.classes)


def score_test(run: Run, model: Model, data: Dataset) -> None:
    """The one place where test labels are read: predictions.npz and metrics.json, after everything was chosen."""
    metrics: dict[str, Any] = {}
    if (run.path / "held-out.npz").exists():
        held = balanced(Predictions.load(run.path / "held-out.npz"))
        metrics["held_out_balanced"] = evaluate(held, decider=model.decider).to_dict()
    if data.test is not None:
        predictions = model.predict(data.test)
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


@contextmanager
def _stop_at_epoch_end() -> Iterator[Any]:
    """Ctrl-C sets a mark, read at the end of an epoch; a second one stops at once."""
    marked: list[bool] = []

    def mark(signum: int, frame: Any) -> None:
        if marked:
            raise KeyboardInterrupt
        marked.append(True)
        print("stopping at the end of this epoch; press Ctrl-C again to stop at once", file=sys.stderr)

    try:
        previous = signal.signal(signal.SIGINT, mark)
    except ValueError:  # not in the main thread: Ctrl-C is not ours to handle
        yield lambda: False
        return
    try:
        yield lambda: bool(marked)
    finally:
        signal.signal(signal.SIGINT, previous)


def _saved_epoch(job: Job) -> int:
    found = job.run.checkpoint()
    return 0 if found is None else found.epoch


def _how_to_go_on(lanes: Sequence[Lane], epoch: int) -> str:
    job = lanes[0].job
    way = f"`rfdlc resume {job.run.path}`" if len(lanes) == 1 else "the same call of train_many"
    return f"stopped after epoch {epoch} of {job.epochs}; go on with {way}"


def _label(lanes: Sequence[Lane], phase: int) -> str:
    runs = f"{len(lanes)} runs on " if len(lanes) > 1 else ""
    return f"Training {runs}{lanes[0].data.name}" + (" again, on everything" if phase else "")


def _figures(epoch: Epoch) -> str:
    return f"loss {epoch.losses[0]:.3f}  rate {epoch.rates[0]:.2g}  {epoch.samples_per_second:,.0f} samples/s"


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


def same_data(run: Run, table: Mapping[str, Any], data: Any) -> Dataset:
    if data is None and "source" not in table:
        raise InputError(f"{run.path} was trained on data in memory: pass the same data again, resume(path, data)")
    given = data if data is not None else table["source"]
    found = given if isinstance(given, Dataset) else load(given, root=table.get("root"), **table.get("options", {}))
    if _fingerprint(found) != table["fingerprint"]:
        raise InputError(f"{run.path} was trained on other data than {found.name}: labels or samples differ")
    return found

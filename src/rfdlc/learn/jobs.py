"""Jobs on their way: trainings in run folders, side by side as runs of a stack, their histories and checkpoints.

The trainer sees training data alone: held-out samples calibrate, and the test split is scored by `score_test` after
everything has been chosen and written.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save

from rfdlc.data.dataset import Dataset
from rfdlc.decide.evaluation import evaluate
from rfdlc.decide.predictions import Predictions
from rfdlc.decide.utility import Utility
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
from rfdlc.learn.methods import Method, find_method
from rfdlc.learn.model import Model, as_tensors, new_decider, predictions_of
from rfdlc.learn.particles import ParticleNet
from rfdlc.learn.processes import ALONE, Processes
from rfdlc.learn.run import Checkpoint, Rows, Run
from rfdlc.learn.settings import Settings
from rfdlc.learn.stack import share_statistics
from rfdlc.learn.stopping import stop_at_epoch_end
from rfdlc.learn.training import Epoch, Part, TrainingStopped, epochs, of_run, spans, stacked
from rfdlc.progress import live

SECONDS_BETWEEN_CHECKPOINTS = 10.0  # an epoch may take a tenth of a second: writing after each would slow it down


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
    processes: Processes = ALONE  # that carry it out together

    @property
    def device(self) -> torch.device:
        """Of this process."""
        return self.processes.own_device(choose_device(self.settings.device))

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


def finish_phase(job: Job, net: ParticleNet, data: Dataset, phase: int) -> Model | None:
    """Calibrate where samples were held out; after the last phase, write and score the model."""
    if data.val is not None:
        _calibrate(job, net, data)
    if phase + 1 < job.phases:
        return None
    job.run.write("model.safetensors", save(as_tensors(net)))
    job.processes.wait()  # for the files, which all read
    model = Model.load(job.run.path, backbone=job.network, device=str(job.device))
    score_test(job.run, model, job.data, job.processes)
    job.processes.wait()
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
    label, threads, written = _label(lanes, phase), sensible_threads(net, job.settings), time.monotonic()
    with live(end, label, done) as show, stop_at_epoch_end() as stopping, threads:
        try:
            for epoch in epochs(net, parts, state, done, job.processes):
                for run, lane in enumerate(lanes):
                    _note(lane, nets[run], phase, epoch.of(run))
                stop = job.processes.any(stopping())  # asked once: all runs are kept at the same epoch
                rested = time.monotonic() - written > SECONDS_BETWEEN_CHECKPOINTS
                for run, lane in enumerate(lanes):
                    _keep(lane, nets[run], phase, epoch.of(run), stop, rested)
                written = time.monotonic() if rested else written
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
    job.processes.same_(list(net.state_dict().values()))  # a network of the user's own may have been drawn differently
    if job.settings.batch_norm == "sync" and not job.processes.alone:
        share_statistics(net, job.processes)
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
    return [stack_part(recipes, samples, number, job.device, job.processes) for number in numbers]


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
    if predictions is None:
        return row
    figures = evaluate(balanced(predictions), decider=new_decider(job.name, job.settings, data.classes))
    held = {"accuracy": figures.accuracy, "ece": figures.ece, "nll": figures.nll}
    return {**row, **{f"held_out_{k}": v for k, v in held.items()}, **diversity(predictions.scores.values)}


def _keep(lane: Lane, net: ParticleNet, phase: int, epoch: Epoch, now: bool, rested: bool) -> None:
    """Write a checkpoint for every job on a lane to whom one is due; whoever leaves takes one along."""
    number = epoch.epoch
    for traveller in lane.on_it(number):
        run, settings = traveller.job.run, traveller.job.settings
        kept = number in {round(share * settings.epochs) for share in settings.keep}
        every = settings.checkpoint_every
        if now or kept or number == traveller.until or (number % every == 0 if every else rested):
            checkpoint = Checkpoint(phase, number, net.state_dict(), epoch.state, traveller.history)
            run.save_checkpoint(checkpoint, f"epoch-{number}.ckpt" if kept else None)


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


def score_test(run: Run, model: Model, data: Dataset, processes: Processes = ALONE) -> None:
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


# -- what is said ---------------------------------------------------------------------------------------------------


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

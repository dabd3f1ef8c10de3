"""The loop, driven for jobs side by side as runs of a stack: their histories and checkpoints, and when to stop.

Only training data are seen here, and what a job holds out of them; never the test split.
"""

import time
from collections.abc import Sequence
from typing import Any

from rfdlc.data.dataset import Dataset
from rfdlc.decide.evaluation import evaluate
from rfdlc.progress import live
from rfdlc.training.assembly import Recipe, method_net, place, sensible_threads, stack_part
from rfdlc.training.heldout import balanced, diversity
from rfdlc.training.jobs.finishing import held_out_predictions
from rfdlc.training.jobs.job import Job, Lane
from rfdlc.training.jobs.stopping import stop_at_epoch_end
from rfdlc.training.loop import Epoch, PreparedStage, TrainingStopped, epochs, of_run, stacked
from rfdlc.training.model import new_decider
from rfdlc.training.networks.particles import ParticleNet
from rfdlc.training.networks.stack import share_statistics
from rfdlc.training.run import Checkpoint

SECONDS_BETWEEN_CHECKPOINTS = 10.0  # an epoch may take a tenth of a second: writing after each would slow it down


class TrainingInterrupted(KeyboardInterrupt):
    """Stopped by Ctrl-C; the message says where it stopped and how to go on."""


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


def _parts(lanes: Sequence[Lane], samples: Dataset, done: int, end: int) -> list[PreparedStage]:
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
    predictions = held_out_predictions(job, net, data)
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

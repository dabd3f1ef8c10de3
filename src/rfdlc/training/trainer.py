"""Trainer: trains runs in their folders, with histories, checkpoints, calibration and metrics.

Training and calibration see only the training split; test labels are read once, after everything has been written.
Under `torchrun` every process trains on its shard of the samples, and rank 0 writes.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from rfdlc.data.dataset import Dataset
from rfdlc.decide.evaluation import Evaluation, evaluate
from rfdlc.decide.metrics import measure
from rfdlc.decide.outcomes import cross_fitted
from rfdlc.decide.predictions import Predictions
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError, expect
from rfdlc.progress import live, speaks
from rfdlc.training._stacking import Member, Stack, Stacker
from rfdlc.training.assembly import OwnBackbone, choose_device, sensible_threads
from rfdlc.training.config import TrainConfig
from rfdlc.training.distributed import SINGLE, ProcessGroup
from rfdlc.training.heldout import balanced, balanced_positions, diversity
from rfdlc.training.loop import Epoch, TrainingStopped, epochs
from rfdlc.training.methods import resolve
from rfdlc.training.model import Model, new_decider, predictions_of
from rfdlc.training.networks.particles import ParticleNet
from rfdlc.training.run import Checkpoint, Run, plain_tensors

SECONDS_BETWEEN_CHECKPOINTS = 10.0  # an epoch may take a tenth of a second: writing after each would slow it down
SECONDS_UNTIL_FILES_AGREE = 90


class TrainingInterrupted(KeyboardInterrupt):
    """Stopped by Ctrl-C; the message says where it stopped and how to continue."""


class Trainer:
    """Trains runs on one data set: `group` are the processes that train, `networks` the most networks of a stack."""

    def __init__(
        self, data: Dataset, *, backbone: OwnBackbone | None = None, group: ProcessGroup = SINGLE, networks: int = 24
    ) -> None:
        self.data, self.group = data, group
        self.stacker = Stacker(data, backbone, group, networks)

    def configure(self, out: str | Path, method: str, settings: Mapping[str, Any]) -> TrainConfig:
        """All settings of a run on these data. What cannot be trained raises here, before there is a folder."""
        data = self.data
        row, config = resolve(method, data.name, settings, data.kind, len(data.train))
        known = f"{data.name} has a validation split of its own that only calibrates: leave refit out"
        expect(not config.refit or data.val is None, f"refit trains again on held-out samples, but {known}")
        expect(not config.refit or config.hold_out, "refit needs held-out samples to calibrate on: set hold_out=0.1")
        self.check_processes(config)
        self.stacker.built[Path(out)] = self.stacker.build(row, config, [config.seed])
        return config

    def check_processes(self, config: TrainConfig) -> None:
        """Raise for settings that these processes cannot have."""
        self.group.shard_size(config.batch_size, config.accumulate)
        self.group.local_device(choose_device(config.device))
        own = config.backbone == "own" or ":" in config.backbone
        possible = self.group.single or config.batch_norm == "local" or not own
        expect(possible, "batch_norm=sync is for built-in backbones: use batch_norm=local with one of your own")

    def restore(self, run: Run) -> Run:
        """The run at its last checkpoint, the same on all ranks: a shared file system may show an old one at first."""
        with self.group.raising_together():
            expect(run.exists, f"{run.path} is not visible: several machines need a run folder that they share")
        for _ in range(SECONDS_UNTIL_FILES_AGREE):
            found = run.restore()
            reached = torch.tensor([-1, -1] if found is None else [found.phase, found.epoch])
            if (self.group.all_gather(reached) == reached).all():
                return run
            time.sleep(1)
        raise InputError(f"{run.path}/last.ckpt differs between machines: they must share the run folder")

    def fit(self, runs: Sequence[Run]) -> list[Model]:
        """Train all runs to their ends; the models in the order of the runs."""
        models: dict[Path, Model] = {}
        waiting = list(runs)
        while waiting:
            stack = self.stacker.next_stack(waiting)
            saved = time.monotonic()
            with sensible_threads(stack.net, stack.run.config), _reported(stack) as (show, stopping):
                for epoch in epochs(stack.net, stack.stages, stack.state, stack.start, self.group):
                    for run, member, own, _ in stack.unstack(epoch):
                        run.history.append(self._history_row(run, member, own))
                    stop = self.group.all_any(stopping())  # asked once: all runs stop at the same epoch
                    due = time.monotonic() - saved > SECONDS_BETWEEN_CHECKPOINTS
                    saved = time.monotonic() if due else saved
                    for run, member, own, leaves in stack.unstack(epoch):
                        _checkpoint(run, member.net, own, stop or leaves, due)
                    rate, speed = epoch.rates[0], epoch.samples_per_second
                    show(1, f"loss {epoch.losses[0]:.3f}  rate {rate:.2g}  {speed:,.0f} samples/s")
                    if stop and epoch.epoch < max(member.runs[0].epochs for member in stack.members):
                        raise TrainingInterrupted(_how_to_continue(stack, epoch.epoch))
                    if epoch.epoch == stack.end < stack.stages[-1].end:
                        break
            for member in (member for member in stack.members if stack.end == member.runs[0].epochs):
                model = self._end_phase(member)
                if model is not None:
                    models[model.path] = model
                    waiting.remove(member.runs[0])
        return [models[run.path] for run in runs]

    def _history_row(self, run: Run, member: Member, epoch: Epoch) -> dict[str, Any]:
        """One row of the history; with metrics on held-out data, as if balanced, where they are due."""
        row: dict[str, Any] = {"phase": run.phase, "epoch": epoch.epoch, "loss": epoch.losses[0]}
        row |= {"learning_rate": epoch.rates[0], "seconds": round(epoch.seconds, 3)}
        row["samples_per_second"] = round(epoch.samples_per_second, 1)
        every = run.config.evaluate_every
        due = epoch.epoch == run.epochs or (every and epoch.epoch % every == 0)
        predictions = self._held_out_predictions(run, member) if due else None
        if predictions is None:
            return row
        decider = new_decider(run.method_name, run.config, member.data.classes)
        found = evaluate(balanced(predictions), decider=decider.replace(target_prior="uniform"))
        row |= {"held_out_accuracy": found.accuracy, "held_out_ece": found.ece, "held_out_nll": found.nll}
        return row | diversity(predictions.scores.values)

    def _held_out_predictions(self, run: Run, member: Member) -> Predictions | None:
        """Predictions of the held-out split, if there is one, by all ranks together; rank 0 has them."""
        data = member.data
        if data.val is None:
            return None
        return predictions_of(member.net, data.val, data.normalisation, run.config, self.data.classes, self.group)

    def _end_phase(self, member: Member) -> Model | None:
        """Calibrate where samples were held out; after the last phase, write and score the model."""
        run, net = member.runs[0], member.net
        predictions = self._held_out_predictions(run, member)
        if predictions is not None:
            decider = new_decider(run.method_name, run.config, self.data.classes)
            if decider.calibration is not None:  # weighted to the prior that the probabilities carry
                decider = decider.fit(predictions)
            run.write_with("decider.json", decider.save)
            run.write_with("held-out.npz", predictions.save)
        run.phase, run.epoch = run.phase + 1, 0
        if run.phase <= run.config.refit:
            return None
        run.write("model.safetensors", save(plain_tensors(net.state_dict())))
        self.group.barrier()  # all ranks read the files
        device = next(net.parameters()).device
        model = Model(run, net.eval().requires_grad_(True), run.config.replace(device=str(device)))
        score_test(run, model, self.data, self.group)
        self.group.barrier()
        return model


def score_test(run: Run, model: Model, data: Dataset, group: ProcessGroup = SINGLE) -> None:
    """The one place where test labels are read: predictions.npz and metrics.json, after everything was chosen."""
    test, known = data.test, (model.normalisation, model.config, model.classes)
    predictions = None if test is None else predictions_of(model.net, test, *known, group)
    if not group.main:
        return
    metrics: dict[str, Any] = {}
    if (run.path / "held-out.npz").exists():
        held = Predictions.load(run.path / "held-out.npz")
        outcomes = cross_fitted(held, model.decider.replace(target_prior="uniform"))
        outcomes = outcomes.take(balanced_positions(outcomes.targets, repeats=4))
        metrics["held_out_balanced"] = Evaluation(len(outcomes), measure(outcomes), "decision-probability").to_dict()
    if predictions is not None:
        run.write_with("predictions.npz", predictions.save)
        metrics["test"] = evaluate(predictions, decider=model.decider).to_dict()
        metrics["diversity"] = diversity(predictions.scores.values)
        if predictions.uncertainty is not None:
            metrics[model.net.combination.measures] = float(predictions.uncertainty.mean())
        if data.classes.imbalance_factor > 1:
            decider = model.decider.replace(utility=Utility.tail_sensitive(data.classes))
            metrics["test_tail_sensitive"] = evaluate(predictions, decider=decider).to_dict()
    run.write_json("metrics.json", metrics)


def _checkpoint(run: Run, net: ParticleNet, epoch: Epoch, now: bool, due: bool) -> None:
    """Write a checkpoint if it is time for one; `due` where no setting says when."""
    number, every = epoch.epoch, run.config.checkpoint_every
    kept = number in {round(share * run.config.epochs) for share in run.config.keep}
    if now or kept or (number % every == 0 if every else due):
        checkpoint = Checkpoint(run.phase, number, net.state_dict(), epoch.state, run.history)
        run.save_checkpoint(checkpoint, f"epoch-{number}.ckpt" if kept else None)


@contextmanager
def _reported(stack: Stack) -> Iterator[tuple[Callable[[int, str], None], Callable[[], bool]]]:
    """A progress bar, and whether Ctrl-C was pressed; errors say where the training stopped and how to continue."""
    runs = f"{len(stack.members)} runs on " if len(stack.members) > 1 else ""
    label = f"Training {runs}{stack.members[0].data.name}" + (" again, on all samples" if stack.run.phase else "")
    for run in (run for member in stack.members for run in member.runs if stack.start):
        run.write_history(run.history)  # a crash may have come between the checkpoint and this file
    with live(stack.end, label, stack.start) as show, _stop_at_epoch_end() as stopping:
        try:
            yield show, stopping
        except TrainingStopped as error:
            run = stack.members[error.run].runs[0]
            saved = run.checkpoint()
            good = saved and f"the last good checkpoint is epoch {saved.epoch} in {run.path}"
            raise TrainingStopped(f"{error}; {good or 'there is no checkpoint yet'}") from None
        except KeyboardInterrupt as error:
            saved = stack.run.checkpoint()
            raise TrainingInterrupted(str(error) or _how_to_continue(stack, saved.epoch if saved else 0)) from None


@contextmanager
def _stop_at_epoch_end() -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets a flag, read at the end of an epoch; a second one stops at once."""
    pressed: list[int] = []

    def press(signum: int, frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(signum)
        if speaks():
            print("stopping at the end of this epoch; press Ctrl-C again to stop at once", file=sys.stderr)

    main = threading.current_thread() is threading.main_thread()  # which alone handles signals
    previous = signal.signal(signal.SIGINT, press) if main else None
    try:
        yield lambda: bool(pressed)
    finally:
        if main:
            signal.signal(signal.SIGINT, previous)


def _how_to_continue(stack: Stack, epoch: int) -> str:
    way = f"`rfdlc resume {stack.run.path}`" if len(stack.members) == 1 else "the same call of train_many"
    return f"stopped after epoch {epoch} of {stack.run.epochs}; continue with {way}"

"""Trainer: trains runs in their folders, with histories, checkpoints, calibration and
metrics.

Training and calibration see only the training split; test labels are read once, after
everything has been written.
"""

import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import combinations
from typing import Any

import numpy as np
import torch

from rfdlc.data.dataset import Dataset
from rfdlc.decisions.decider import Decider
from rfdlc.decisions.utility import Utility
from rfdlc.errors import InputError, counted, expect, listing
from rfdlc.evaluation.evaluate import Evaluation, evaluate
from rfdlc.evaluation.metrics import measure
from rfdlc.evaluation.outcomes import cross_fitted
from rfdlc.probabilities.classes import Indices
from rfdlc.probabilities.predictions import Predictions
from rfdlc.probabilities.priors import is_uniform
from rfdlc.probabilities.scores import Floats, softmax
from rfdlc.probabilities.uncertainty import mutual_information
from rfdlc.progress import announce, live, speaks
from rfdlc.training import early_stopping
from rfdlc.training._stacking import Member, Stack, Stacker
from rfdlc.training.building import (
    OwnBackbone,
    choose_device,
    new_decider,
    sensible_threads,
)
from rfdlc.training.distributed import SINGLE, ProcessGroup
from rfdlc.training.early_stopping import (
    BEST,
    check_patience,
    ends_early,
    keep_best,
    keep_to_budget,
    restore_best,
)
from rfdlc.training.loop import Epoch, TrainingStopped, epochs, loss_of, views_of
from rfdlc.training.model import Model
from rfdlc.training.networks.mixture import Mixture
from rfdlc.training.networks.particles import ParticleNet
from rfdlc.training.networks.pretrained import PREFIX
from rfdlc.training.run import MAY_CHANGE, PREVIOUS, Checkpoint, Run, data_of
from rfdlc.training.settings import TABULAR
from rfdlc.training.sinks import Write, check_sinks, open_sinks, step_of
from rfdlc.training.step import check_sharding
from rfdlc.training.tabular import check_table, fit_table, table_plan

SECONDS_BETWEEN_CHECKPOINTS = (
    30.0  # an epoch may take a tenth of a second: writing after each would slow it down
)
SECONDS_UNTIL_FILES_AGREE = 90
ENOUGH_TO_LEARN = (
    10  # epochs, after which a loss above that of the first is worth a warning
)
OTHERS = {
    "features": "; preset=table for a table",
    "table": "; preset=features for those of a network",
}


class TrainingInterrupted(KeyboardInterrupt):
    """Stopped by Ctrl-C; the message says where it stopped and how to continue."""


class Trainer:
    """Trains runs on one data set: `group` are the processes that train, `networks` the
    most networks of a stack.
    """

    def __init__(
        self,
        data: Dataset,
        *,
        backbone: OwnBackbone | None = None,
        group: ProcessGroup = SINGLE,
        networks: int = 24,
    ) -> None:
        self.data, self.group = data, group
        self.stacker = Stacker(data, backbone, group, networks)
        self.announced: dict[str, str] = {}

    def check(self, run: Run) -> None:
        """Raise for a run that cannot be trained here, or whose folder holds another
        run.
        """
        config, data, group = run.config, self.data, self.group
        if run.writes and run.exists:
            data_of(other := Run(run.path), data)
            same = {*MAY_CHANGE, *other.chosen}
            names = [
                name
                for name, value in config
                if name not in same and getattr(other.config, name) != value
            ]
            names += (
                []
                if other.method_name == run.method_name
                else [f"method {other.method_name}"]
            )
            expect(
                not names,
                f"{run.path} holds another run (it differs in {listing(names)}): choose"
                " another folder",
            )
        only = (
            f"{data.name} has a validation split of its own that only calibrates: leave"
            " refit out"
        )
        expect(
            not config.refit or data.val is None,
            f"refit trains again on held-out samples, but {only}",
        )
        expect(
            not config.refit or config.hold_out,
            "refit needs held-out samples to calibrate on: set hold_out=0.1",
        )
        check_sinks(run)
        views_of(config, data.kind)
        check_patience(run, data, group.single)
        check_sharding(config, run.method.stages)
        group.shard_size(config.batch_size, config.accumulate)
        group.local_device(choose_device(config.device))
        own = config.backbone == "own" or ":" in config.backbone
        possible = group.single or config.batch_norm == "local" or not own
        expect(
            possible,
            "batch_norm=sync is for built-in backbones: use batch_norm=local with one"
            " of your own",
        )
        new_decider(run.method_name, config, data.classes)
        if config.backbone in TABULAR:
            check_table(run.method, config, data, group.single)
            return
        self.stacker.built[run.path] = self.stacker.build(run)
        for stage in run.method.stages:
            loss_of(run.method, stage, config, data.classes)

    def announce_plan(self, stack: Stack, waiting: int = 1) -> None:
        """Say what is going to be trained; what was said before trials is not said
        again.
        """
        plan = _plan(stack, waiting)
        if new := [
            note for note in stack.members[0].data.notes if note not in self.data.notes
        ]:
            plan["held-out"] = "; ".join(new)
        if unsaid := {
            name: text
            for name, text in plan.items()
            if self.announced.get(name) != text
        }:
            announce(_lines(unsaid))
        self.announced = plan

    def fit(self, runs: Sequence[Run]) -> list[Model]:
        """Train all runs to their ends; the models in the order of the runs."""
        with ExitStack() as claims:
            with self.group.raising_together():
                for run in runs:
                    claims.enter_context(run.claimed())
            tables = [run for run in runs if run.config.backbone in TABULAR]
            waiting, planned = (
                [self._restored(run) for run in runs if run not in tables],
                False,
            )
            sinks = {run.path: claims.enter_context(open_sinks(run)) for run in runs}
            models = {run.path: self._fit_table(run, sinks[run.path]) for run in tables}
            while waiting:
                stack = self.stacker.next_stack(waiting)
                if not planned:
                    self.announce_plan(stack, len(waiting))
                    planned = True
                later = len(waiting) > len(stack.members) or any(
                    r.phase + 1 < r.config.trainings for r in waiting
                )
                saved = time.monotonic()
                with (
                    sensible_threads(stack.net, stack.run.config),
                    _reported(stack) as (show, pressed),
                ):
                    ended = ends_early(stack.run)  # before it was interrupted
                    shortened = False
                    planned_epochs = stack.run.epochs
                    given = (
                        stack.net,
                        stack.stages,
                        stack.state,
                        stack.start,
                        self.group,
                        show,
                    )
                    for epoch in () if ended else epochs(*given):
                        present = list(stack.unstack(epoch))
                        for run, member, own, _ in present:
                            run.history.append(self._history_row(run, member, own))
                            sinks[run.path](run.history[-1], step_of(run))
                        stop = self.group.all_any(
                            bool(pressed)
                        )  # asked once: all runs stop at the same epoch
                        due = time.monotonic() - saved > SECONDS_BETWEEN_CHECKPOINTS
                        saved = time.monotonic() if due else saved
                        ended = ends_early(stack.run)
                        shortened = keep_to_budget(stack.run)
                        now = stop or ended or shortened
                        for run, member, own, leaves in present:
                            keep_best(run, member.model.net)
                            _checkpoint(run, member.model.net, own, now or leaves, due)
                        where = (
                            f"epoch {epoch.epoch} of {stack.run.epochs}  loss"
                            f" {epoch.losses[0]:.3f}"
                        )
                        show(
                            0,
                            f"{where}  rate {epoch.rates[0]:.2g} "
                            f" {epoch.samples_per_second:,.0f} samples/s",
                        )
                        last = ended or epoch.epoch == max(
                            member.runs[0].epochs for member in stack.members
                        )
                        if stop and (later or not last):
                            raise KeyboardInterrupt
                        if ended or epoch.epoch == stack.end < stack.stages[-1].end:
                            break
                        if shortened:  # goes on as a stack of fewer epochs
                            break
                if shortened:
                    announce(
                        f"shorter    {stack.run.epochs} instead of {planned_epochs}"
                        " epochs: they take longer than measured"
                    )
                # a run that may end early is alone in its stack
                for member in (
                    member
                    for member in stack.members
                    if ended or stack.end == member.runs[0].epochs
                ):
                    if (
                        model := self._end_phase(member, sinks[member.runs[0].path])
                    ) is not None:
                        models[model.path] = model
                        waiting.remove(member.runs[0])
            return [models[run.path] for run in runs]

    def _restored(self, run: Run) -> Run:
        """At the last checkpoint, the same on all ranks: a shared file system may show
        an old one at first.
        """
        with self.group.raising_together():
            expect(
                run.exists,
                f"{run.path} is not visible: several machines need a run folder that"
                " they share",
            )
        for _ in range(SECONDS_UNTIL_FILES_AGREE):
            if (found := run.checkpoint()) is not None:
                run.phase, run.epoch, run.history = (
                    found.phase,
                    found.epoch,
                    list(found.history),
                )
            reached = torch.tensor([run.phase, run.epoch])
            if (self.group.all_gather(reached) == reached).all():
                return run
            time.sleep(1)
        raise InputError(
            f"{run.path}/last.ckpt differs between machines: they must share the run"
            " folder"
        )

    def _history_row(self, run: Run, member: Member, epoch: Epoch) -> dict[str, Any]:
        """One row of the history; with metrics on held-out data, as if balanced, where
        they are due.
        """
        row: dict[str, Any] = {
            "phase": run.phase,
            "epoch": epoch.epoch,
            "loss": epoch.losses[0],
        }
        row |= {"learning_rate": epoch.rates[0], "seconds": round(epoch.seconds, 3)}
        row["samples_per_second"] = round(epoch.samples_per_second, 1)
        every = run.config.evaluate_every or bool(run.config.patience)
        due = epoch.epoch == run.epochs or (every and epoch.epoch % every == 0)
        predictions = member.model.predict_split(
            member.data.val if due else None, self.group
        )
        if predictions is None:
            return row
        found = evaluate_balanced(
            predictions, new_decider(run.method_name, run.config, member.data.classes)
        )
        row |= {
            "held_out_accuracy": found.accuracy,
            "held_out_ece": found.ece,
            "held_out_nll": found.nll,
        }
        return row | diversity(predictions.scores.values)

    def _end_phase(self, member: Member, write: Write) -> Model | None:
        """Calibrate where samples were held out; after the last phase, write and score
        the model.
        """
        run, model = member.runs[0], member.model
        first, last = (run.history[place]["loss"] for place in (0, -1))
        if (
            last > first and run.epoch >= ENOUGH_TO_LEARN and len(run.spans) == 1
        ):  # later stages have other losses
            rose = (
                f"the training loss of {run.path} rose from {first:.3g} in the first"
                f" epoch to {last:.3g} in the last"
            )
            warnings.warn(
                f"{rose}: likely the learning rate is too high; try a smaller"
                " learning_rate",
                stacklevel=2,
            )
        restore_best(run, model.net)
        if run.config.familiarity:
            model.fit_familiarity(run, member.data.train)
        predictions = model.predict_split(member.data.val, self.group)
        if predictions is not None:
            if run.phase:
                fold = self.data.train.folds(run.config.folds, run.config.seed)
                rows = np.concatenate(
                    [np.flatnonzero(fold == k) for k in range(run.phase + 1)]
                )  # as they are joined
                groups = self.data.train.together
                predictions = _joined(
                    run,
                    predictions,
                    len(rows),
                    None if groups is None else groups[rows],
                )
            _calibrate(run, predictions)
        run.phase, run.epoch = run.phase + 1, 0
        warm = run.refits and run.config.warm_refit
        run.trained = (
            {name: own.clone() for name, own in model.net.state_dict().items()}
            if warm
            else {}
        )
        return (
            None
            if run.phase < run.config.trainings
            else self._finish(run, model.net.requires_grad_(True), write)
        )

    def _fit_table(self, run: Run, write: Write) -> Model:
        """Fit the mixture of a run, from the start where it is not finished."""
        if run.finished:
            return Model.load(run.path, device=run.config.device)
        announce(
            _lines(
                table_plan(self.data, run.method_name, run.config) | _single(self.data)
            )
        )
        try:
            found = fit_table(self.data, run.method, run.config)
        except KeyboardInterrupt:
            again = f"start again with `rfdlc resume {run.path}`"
            raise TrainingInterrupted(
                f"stopped before the table was fitted; {again}"
            ) from None
        held, ids = found.held, None if found.held.ids is None else list(found.held.ids)
        run.write_json("choice.json", found.choice.to_dict())
        known: dict[str, Any] = {
            "targets": held.labels,
            "ids": ids,
            "groups": held.together,
        }
        _calibrate(
            run,
            Predictions(logits=found.logits, classes=self.data.classes, **known),
            found.weights,
        )
        return self._finish(run, found.net, write)

    def _finish(self, run: Run, net: ParticleNet | Mixture, write: Write) -> Model:
        """Write the trained networks, and score them."""
        run.write_model(net.state_dict())
        if run.writes:
            for name in (PREVIOUS, BEST):
                (run.path / name).unlink(missing_ok=True)
        self.group.barrier()  # all ranks read the files
        model = Model(run, net.eval())
        score_test(run, model, self.data, self.group)
        metrics = run.read_json("metrics.json") if run.config.log and run.writes else {}
        inner = {
            name: found for name, found in metrics.items() if isinstance(found, dict)
        }
        parts = {
            f"{name}/{key}": value
            for name, found in inner.items()
            for key, value in found.items()
        }
        write(metrics | parts, step_of(run))
        self.group.barrier()
        return model


def _joined(
    run: Run, predictions: Predictions, samples: int, groups: Any
) -> Predictions:
    """Held-out predictions of this fold after those of the folds before it: `samples`,
    in groups (N,) or None.
    """
    before = samples - len(predictions)
    earlier: Any = Predictions.load(
        run.path / "held-out.npz"
    )  # a resumed run may have written this fold already
    both: dict[str, Any] = {"groups": groups}
    for name in ("targets", "ids", "uncertainty", "unfamiliarity"):
        if (own := getattr(predictions, name)) is not None:
            both[name] = np.concatenate([getattr(earlier, name)[:before], own])
    logits = np.concatenate(
        [earlier.scores.values[:, :before], predictions.scores.values], axis=1
    )
    return Predictions(logits=logits, classes=predictions.classes, **both)


def _calibrate(
    run: Run, predictions: Predictions, weights: Floats | None = None
) -> None:
    """Write the decider, fitted to held-out predictions, and the predictions."""
    decider = new_decider(run.method_name, run.config, run.classes).replace(
        weights=weights
    )
    if decider.model.calibration is not None:
        # Classes that count alike cure scores that lean to the head. A warm refit does
        # so, too, and needs less noise.
        warm = run.config.refit and run.config.warm_refit
        even = is_uniform(decider.model.target_prior) and not warm
        decider = decider.fit(predictions, balanced=even)
    run.write("decider.json", decider.save)
    run.write("held-out.npz", predictions.save)


def score_test(
    run: Run, model: Model, data: Dataset, group: ProcessGroup = SINGLE
) -> None:
    """The one place where test labels are read: predictions.npz and metrics.json, after
    everything was chosen.
    """
    predictions = model.predict_split(data.test, group)
    if not group.main:
        return
    metrics: dict[str, Any] = early_stopping.stopping(run)
    if (run.path / "held-out.npz").exists():
        held = Predictions.load(run.path / "held-out.npz")
        metrics["held_out_balanced"] = evaluate_balanced(held, model.decider).to_dict()
    if predictions is not None:
        run.write("predictions.npz", predictions.save)
        metrics["test"] = evaluate(predictions, decider=model.decider).to_dict()
        metrics |= (
            {"diversity": found}
            if (found := diversity(predictions.scores.values))
            else {}
        )
        if predictions.uncertainty is not None:
            metrics[model.net.combination.measures] = float(
                predictions.uncertainty.mean()
            )
        if data.classes.imbalance_factor > 1:
            decider = model.decider.replace(
                utility=Utility.tail_sensitive(data.classes)
            )
            metrics["test_tail_sensitive"] = evaluate(
                predictions, decider=decider
            ).to_dict()
    run.write_json("metrics.json", metrics)


def evaluate_balanced(predictions: Predictions, decider: Decider) -> Evaluation:
    """Metrics of held-out samples as if classes were equally frequent, calibrated on
    other folds of them.
    """
    outcomes = cross_fitted(
        predictions, decider.replace(target_prior="uniform"), balanced=True
    )
    outcomes = outcomes.take(balanced_positions(outcomes.targets))
    return Evaluation(len(outcomes), measure(outcomes), "decision-probability")


def balanced_positions(labels: Indices) -> Indices:
    """Positions in which every class that occurs appears equally often: rare samples
    are repeated evenly.
    """
    members = [np.flatnonzero(labels == c) for c in np.unique(labels)]
    return np.concatenate(
        [np.resize(rows, 4 * max(map(len, members))) for rows in members]
    )


def diversity(logits: Floats) -> dict[str, float]:
    """How far particles (M, N, C) differ, if there are several: disagreement of arg
    max, mutual information in nats.
    """
    if len(logits) == 1:
        return {}
    disagreement = float(
        np.mean(
            [np.mean(one != other) for one, other in combinations(logits.argmax(-1), 2)]
        )
    )
    return {
        "disagreement": disagreement,
        "mutual_information": float(mutual_information(softmax(logits)).mean()),
    }


def _checkpoint(run: Run, net: ParticleNet, epoch: Epoch, now: bool, due: bool) -> None:
    """Write a checkpoint if it is time for one; `due` where no setting says when."""
    number, every = epoch.epoch, run.config.checkpoint_every
    kept = number in {round(share * run.config.epochs) for share in run.config.keep}
    if now or kept or (number % every == 0 if every else due):
        checkpoint = Checkpoint(
            run.phase, number, net.state_dict(), epoch.state, run.history
        )
        run.save_checkpoint(checkpoint, f"epoch-{number}.ckpt" if kept else None)


def _plan(stack: Stack, waiting: int) -> dict[str, str]:
    """What is going to be trained, on what and for which class prior, in a few
    lines.
    """
    run, model, data = stack.run, stack.members[0].model, stack.members[0].data
    samples = ", ".join(f"{len(split):,} {name}" for name, split in data.splits.items())
    weights = sum(parameter.numel() for parameter in model.net.parameters())
    folds = f"{run.config.folds} folds, " if run.config.folds > 1 else ""
    epochs = (
        f"{folds}{counted(run.epochs, 'epoch')} of"
        f" {counted(stack.stages[-1].loader.steps, 'step')}"
    )
    side_by_side = (
        f", the first of {waiting} runs, {len(stack.members)} side by side"
        if waiting > 1
        else ""
    )
    net, shared = model.net, len(model.net.trunk)
    network = net.name
    if run.config.image_size:
        network += f" at {run.config.image_size} pixels"
    random = ", random weights" if net.name.startswith(PREFIX) else ""
    network += (
        f", pretrained ({run.config.pretrained})" if run.start is not None else random
    )
    network += (
        f", {shared} of {shared + len(net.branches)} stages shared" if shared else ""
    )
    return {
        "data": f"{data.name}, {samples} samples, {len(data.classes)} classes",
        **_image_plan(data),
        **_single(data),
        "network": (
            f"{network}, particles: {run.config.particles}, weights: {weights:,}"
        ),
        "training": (
            f"{run.method_name},"
            f" {epochs}{', then again on all samples' * run.config.refit}{side_by_side}"
        ),
        "settings": f"preset {run.config.preset}{OTHERS.get(run.config.preset, '')}",
        "device": f"{model.device}, {counted(torch.get_num_threads(), 'CPU thread')}",
        "decisions": model.decider.model.decided_for.removeprefix("decided "),
    }


def _image_plan(data: Dataset) -> dict[str, str]:
    """How image files become squares, and how many samples are copies, where a split
    was made here.
    """
    lines = dict[str, str]()
    if (how := data.resizing) is not None:
        inside = (
            f" (typically {how.content} in it; data.image_size=N keeps more)"
            * bool(how.content)
        )
        words = {"crop": "the centre", "pad": "padded" + inside, "stretch": "stretched"}
        lines["images"] = (
            f"{data.input_shape[-1]} pixels, {words[how.fit]}, {how.interpolation}"
        )
    compared = [
        split.first
        for split in (data.train, data.val)
        if split is not None and "first" in vars(split)
    ]
    copies = sum(len(first) - len(set(first.tolist())) for first in compared)
    return lines | (
        {"duplicates": f"{copies:,} kept on one side of the split"} if copies else {}
    )


def _single(data: Dataset) -> dict[str, str]:
    names = data.classes.select(np.flatnonzero(data.classes.count_array == 1))
    return (
        {"note": f"never held out, as they have one sample: {listing(names)}"}
        if len(names)
        else {}
    )


def _lines(named: dict[str, str]) -> str:
    return "\n".join(f"{name:10} {text}" for name, text in named.items())


@contextmanager
def _reported(stack: Stack) -> Iterator[tuple[Callable[[int, str], None], list[int]]]:
    """A progress bar, and a list that Ctrl-C fills; errors say where the training
    stopped and how to continue.
    """
    first, several = stack.run, len(stack.members) > 1
    pressed: list[int] = []
    runs = f"{len(stack.members)} runs on " if several else ""
    again = " again, on all samples" if first.refits else ""
    fold = (
        f", fold {first.phase + 1} of {first.config.folds}"
        if first.config.folds > 1 and not again
        else again
    )
    label = f"Training {runs}{stack.members[0].data.name}{fold}"

    def press(signum: int, frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(signum)
        if speaks():
            print(
                "stopping at the end of this epoch; press Ctrl-C again to stop at once",
                file=sys.stderr,
            )

    main = (
        threading.current_thread() is threading.main_thread()
    )  # which alone handles signals
    previous = signal.signal(signal.SIGINT, press) if main else None
    try:
        for run in (
            run for member in stack.members for run in member.runs if stack.start
        ):
            run.write_history(
                run.history
            )  # a crash may have come between the checkpoint and this file
        spans = [
            (max(stage.start, stack.start), min(stage.end, stack.end), stage)
            for stage in stack.stages
        ]
        with live(
            sum((end - start) * stage.loader.steps for start, end, stage in spans),
            label,
        ) as show:
            yield show, pressed
    except TrainingStopped as error:
        run = stack.members[error.run].runs[0]
        good = (
            saved := run.checkpoint()
        ) and f"the last good checkpoint is epoch {saved.epoch} in {run.path}"
        raise TrainingStopped(
            f"{error}; {good or 'there is no checkpoint yet'}", path=run.path
        ) from None
    except KeyboardInterrupt:
        saved = first.checkpoint()
        way = (
            "the same call of train_many" if several else f"`rfdlc resume {first.path}`"
        )
        where = f"stopped after epoch {saved.epoch if saved else 0} of {first.epochs}"
        raise TrainingInterrupted(f"{where}; continue with {way}") from None
    finally:
        if main:
            signal.signal(signal.SIGINT, previous)

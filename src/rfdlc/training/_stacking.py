"""Runs whose shapes agree train as one stack, each with its own seed, loss, schedule,
weight decay and repulsion.

Runs that are the same training up to an epoch share one member of the stack until then.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf
from pathlib import Path

import numpy as np
from torch import Tensor

from rfdlc.data.augment import AUGMENTATIONS
from rfdlc.data.dataset import Dataset
from rfdlc.data.images import ImageFiles
from rfdlc.data.policy import Policy
from rfdlc.probabilities.classes import Indices
from rfdlc.training.building import OwnBackbone, choose_device, method_net
from rfdlc.training.config import TrainConfig
from rfdlc.training.distributed import ProcessGroup
from rfdlc.training.factories import as_they_are, integrated_gain
from rfdlc.training.loop import Epoch, PreparedStage, of_run, stacked
from rfdlc.training.methods import Stage
from rfdlc.training.model import Model
from rfdlc.training.networks.particles import ParticleNet, place
from rfdlc.training.networks.stack import share_statistics
from rfdlc.training.run import Run
from rfdlc.training.settings import settings_where

# Settings that matter only after the deferred epoch.
DEFERRED = settings_where(lambda setting: setting.in_stacks == "deferred")
# All that two runs may differ in that begin as one training. Options of a method are
# compared where they matter.
NOT_FROM_THE_START = (
    *DEFERRED,
    *settings_where(lambda setting: setting.in_stacks == "unlearned"),
    "method_options",
)
# Settings that may differ between the runs of a stack.
OWN_IN_STACKS = settings_where(lambda setting: setting.in_stacks != "shared")


@dataclass(frozen=True)
class Member:
    """One network of a stack and the runs that share it: the first stays to the end,
    others may leave before.
    """

    runs: list[Run]
    model: Model  # of the first; shares the memory of the stack
    data: Dataset  # with its held-out split


@dataclass(frozen=True)
class Stack:
    """Runs that are equally far and train as one network, from the end of epoch `start`
    to epoch `end`.
    """

    run: Run  # the first of them: all agree in what is not in `OWN_IN_STACKS`
    members: list[Member]
    net: ParticleNet
    stages: list[PreparedStage]
    state: dict[str, Tensor]
    start: int
    end: int

    @cached_property
    def lasts(self) -> list[list[int]]:
        """The last epoch of each run of each member."""
        return [
            [min(self.end, same_until(member.runs[0], run)) for run in member.runs]
            for member in self.members
        ]

    def unstack(self, epoch: Epoch) -> Iterator[tuple[Run, Member, Epoch, bool]]:
        """Each run that has not left before, with what the epoch is for it, and whether
        it leaves after it.
        """
        for number, member in enumerate(self.members):
            for run, last in zip(member.runs, self.lasts[number], strict=True):
                if epoch.epoch <= last:
                    run.epoch = epoch.epoch
                    yield run, member, epoch.of(number), epoch.epoch == last


class Stacker:
    """Forms stacks of runs on one data set, with at most `networks` particles of all
    runs in each.
    """

    def __init__(
        self,
        data: Dataset,
        backbone: OwnBackbone | None,
        group: ProcessGroup,
        networks: int,
    ) -> None:
        self.data, self.backbone, self.group, self.networks = (
            data,
            backbone,
            group,
            networks,
        )
        self.held_out: dict[tuple[int, int, float, int], tuple[Dataset, Indices]] = {}
        self.built: dict[Path, ParticleNet] = {}

    def build(self, run: Run, seeds: Sequence[int] = ()) -> ParticleNet:
        """The network of a run, or of a stack of runs like it. What does not fit the
        data raises here.
        """
        return method_net(
            run.method,
            run.config,
            self.data.input_shape,
            self.data.classes,
            seeds=seeds or (run.config.seed,),
            network=self.backbone,
            start=run.start,
        )

    def next_stack(self, waiting: Sequence[Run]) -> Stack:
        """The stack to train next: the runs that are least far, so that they can join
        the others.
        """
        first = min(waiting, key=lambda run: (run.phase, run.epoch))
        groups: list[
            list[Run]
        ] = []  # together are runs that are the same training from here on, for a while
        for run in (
            run
            for run in waiting
            if (run.phase, run.epoch) == (first.phase, first.epoch)
        ):
            same = next(
                (group for group in groups if same_until(group[0], run) > run.epoch), []
            )
            if not same:
                groups.append(same)
            same.append(run)
        groups = [
            runs
            for runs in groups
            if self._signature(runs[0]) == self._signature(first)
        ]
        groups.sort(
            key=lambda runs: (runs[0].method_name, str(runs[0].config.replace(seed=0)))
        )  # losses side by side
        most = max(1, self.networks // first.config.particles)
        size = ceil(
            len(groups) / ceil(len(groups) / most)
        )  # stacks of about the same size
        number = _stage_number(first)
        following = stage_signature(first, number)
        later = [
            run
            for run in waiting
            if run.phase == first.phase and run.epoch > first.epoch
        ]
        ahead = [
            run.epoch
            for run in later
            if stage_signature(run, _stage_number(run)) == following
        ]
        end = (
            first.epochs if len(waiting) == 1 else min([first.spans[number][1], *ahead])
        )
        return self._stack(groups[:size], end)

    def _stack(self, shared: list[list[Run]], end: int) -> Stack:
        runs = [sharing[0] for sharing in shared]
        first, start, alone = runs[0], runs[0].epoch, len(runs) == 1
        device = self.group.local_device(choose_device(first.config.device))
        checkpoints = [
            found for run in runs if start and (found := run.checkpoint()) is not None
        ]
        nets = [
            self.built.pop(run.path) if run.path in self.built else self.build(run)
            for run in runs
        ]
        net = nets[0] if alone else self.build(first, [run.config.seed for run in runs])
        if checkpoints:
            net.load_state_dict(stacked([found.net for found in checkpoints]))
        elif first.refits and first.config.warm_refit:
            net.load_state_dict(stacked([run.trained for run in runs]))
        net = place(net, device)
        self.group.broadcast_(
            list(net.state_dict().values())
        )  # a backbone of the user's own may be random
        if first.config.batch_norm == "sync" and not self.group.single:
            for module in (net, *net.single):
                share_statistics(module, self.group)
        for number, own in enumerate(() if alone else nets):
            place(own, device).load_state_dict(
                of_run(net.state_dict(), number, len(nets)), assign=True
            )
        samples = [self._samples(run) for run in runs]
        parts = zip(shared, nets, samples, strict=True)
        members = [
            Member(sharing, Model(sharing[0], own), data)
            for sharing, own, (data, _) in parts
        ]
        data = samples[0][0] if alone else self.data
        positions = [own for _, own in samples if own is not None and not alone]
        described = [
            (run.method, run.phase_config, own.classes)
            for run, (own, _) in zip(runs, samples, strict=True)
        ]
        # with the stage that has just ended: it is finalized after its last checkpoint
        numbers = [
            i
            for i, (begin, last) in enumerate(first.spans)
            if last >= start and begin < end
        ]
        stages = [
            PreparedStage(number, described, data, device, self.group, positions)
            for number in numbers
        ]
        return Stack(
            first,
            members,
            net,
            stages,
            stacked([found.state for found in checkpoints]),
            start,
            end,
        )

    def _signature(self, run: Run) -> Hashable:
        """Equal for runs that can train in one stack from where they are. Image files
        are streamed to one run alone.
        """
        alone = (
            run.path
            if run.config.patience or isinstance(self.data.train.inputs, ImageFiles)
            else None
        )
        numbers = range(
            _stage_number(run) + 1
        )  # with a stage that has just ended, which is still to be finalized
        stages = tuple(
            stage_signature(run, number)
            for number in numbers
            if run.spans[number][1] >= run.epoch
        )
        return alone, len(self._samples(run)[0].train), stages

    def _samples(self, run: Run) -> tuple[Dataset, Indices | None]:
        """What a run trains on in its phase, and the positions of it in the training
        split; None: all of it.
        """
        if run.refits or self.data.val is not None or not run.config.hold_out:
            return self.data, None
        key = run.phase, run.config.folds, run.config.hold_out, run.config.seed
        if key not in self.held_out:
            self.held_out = {
                known: own
                for known, own in self.held_out.items()
                if known[0] == run.phase
            }
            if run.config.folds > 1:
                inside = (
                    self.data.train.folds(run.config.folds, run.config.seed)
                    == run.phase
                )
                kept, held = np.flatnonzero(~inside), np.flatnonzero(inside)
                self.held_out[key] = self.data.held_apart(kept, held), kept
            else:
                kept, _ = self.data.train.hold_out(*key[2:])
                self.held_out[key] = self.data.hold_out(key[2], seed=key[3]), kept
        return self.held_out[key]


def stage_signature(run: Run, number: int) -> Hashable:
    """Equal for runs whose stage of this number can train in one stack, on equally many
    samples.
    """
    stage, combination = run.method.stages[number], run.method.combination
    config = run.config.replace(**stage.settings)
    policy = None if config.augment == "auto" else AUGMENTATIONS[config.augment].policy
    mixing = (
        bool(config.cutmix),
        None if policy == Policy() else policy,
    )  # runs may do without mixup and RandAugment
    options = (
        config.method_options
        if stage.finalize or combination is not as_they_are
        else None
    )  # used by the stack
    shared = tuple(value for name, value in config if name not in OWN_IN_STACKS)
    return (
        run.spans[number],
        _kind(stage, config),
        stage.finalize,
        combination,
        options,
        mixing,
        shared,
    )


def same_until(one: Run, other: Run) -> int:
    """The last epoch up to which two runs are the same training, on the same data; 0 if
    they never are.
    """
    same = 0
    for (mine, end), (theirs, their_end) in zip(
        _training(one), _training(other), strict=False
    ):
        same = min(end, their_end) if mine == theirs else same
        if mine != theirs or end != their_end:
            break
    return same


def _training(run: Run) -> Iterator[tuple[Hashable, int]]:
    """All that a training does from its beginning, in order, each until an epoch:
    stages, cut where deferred settings start to matter.
    """
    method, config, options = (
        run.method,
        run.phase_config,
        str(run.config.method_options),
    )
    late = tuple(getattr(config, name) for name in DEFERRED)
    begins = (
        inf
        if config.weights == "constant" and config.utility == "none"
        else config.deferred_epoch
    )
    shared = tuple(value for name, value in config if name not in NOT_FROM_THE_START)
    past: Hashable = (
        method.combination,
        method.combination is as_they_are or options,
        run.config.folds,
        shared,
    )
    past = (
        past,
        run.path if run.refits and config.warm_refit else None,
    )  # which starts from weights of its own
    for stage, (start, end) in zip(method.stages, run.spans, strict=True):
        loss, rate = (
            stage.loss or method.loss,
            stage.number("learning_rate_factor", config),
        )
        plain = loss is integrated_gain  # until these matter, it is what it is without
        past = (
            past,
            end,
            rate,
            _kind(stage, config),
            str(stage.settings),
            loss,
            plain or options,
        )
        if plain and start < begins:
            yield past, int(min(begins, end))
        if not plain or begins < end:
            yield (past, begins, late if begins < inf else None), end
        past = past, stage.finalize, stage.finalize is None or options


def _stage_number(run: Run) -> int:
    """The stage that comes next, or the last one where only its finalization is
    left.
    """
    ends = [end for _, end in run.spans]
    return next(
        (number for number, end in enumerate(ends) if end > run.epoch), len(ends) - 1
    )


def _kind(stage: Stage, config: TrainConfig) -> Hashable:
    return (
        stage.trains,
        stage.reinitialize_head,
        stage.weight_averaging,
        stage.number("swag_samples", config),
    )

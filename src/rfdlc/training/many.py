"""train_many: many trainings on one data set, in as few stacks as can be, each in a run folder of its own.

Runs whose shapes agree train side by side as one stack, every one with its own seed, objective, schedule, weight decay
and repulsion. Runs that are the same training up to an epoch share one run of the stack until then. What was
interrupted goes on from the run folders: there is no other state.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.dataset import Dataset
from rfdlc.data.images import ImageFiles
from rfdlc.data.longtail import hold_out_indices
from rfdlc.errors import InputError
from rfdlc.training.config import Settings
from rfdlc.training.fitting import checked_settings, load_described, new_job, same_data
from rfdlc.training.jobs.driving import train_stack
from rfdlc.training.jobs.finishing import finish_phase
from rfdlc.training.jobs.job import Job, Lane, Traveller
from rfdlc.training.jobs.sharing import form, same_until
from rfdlc.training.methods import find_method, resolve
from rfdlc.training.model import Model
from rfdlc.training.networks.particles import ParticleNet
from rfdlc.training.processes.group import started
from rfdlc.training.run import Rows, Run

Positions = NDArray[np.int64]
ELSEWHERE = ("device", "workers", "compile")  # a run may go on with others than it began with


@dataclass(frozen=True)
class Plan:
    """A training that is wanted: its folder, its method, and the settings that differ from the method's."""

    out: str | Path
    method: str = "rf-dlc"
    settings: Mapping[str, Any] = field(default_factory=dict)


def train_many(
    data: Any,
    plans: Sequence[Plan],
    *,
    root: str | Path | None = None,
    data_options: Mapping[str, Any] | None = None,
    networks: int = 24,
) -> list[Model]:
    """Train every plan on the same data; the models in the order of the plans.

    Each folder ends up as `rfdlc.train` would have left it. Runs whose shapes agree train as stacks of at most so many
    `networks` (particles of all runs); what runs have in common at the beginning is trained once. A folder whose run is
    finished is loaded, an unfinished one goes on: after an interruption, simply call this again. `data`, `root` and
    `data_options` are those of `rfdlc.train`.

    >>> from tempfile import mkdtemp
    >>> plans = [Plan(f"{mkdtemp()}/run", "ce", {"seed": seed, "epochs": 2}) for seed in (0, 1)]
    >>> [model.settings.seed for model in train_many("digits-lt", plans)]
    [0, 1]
    """
    _check(data, plans, networks)
    given, description = load_described(data, root, data_options)
    settings = [checked_settings(given, plan.method, plan.settings) for plan in plans]
    for plan, chosen in zip(plans, settings, strict=True):
        _check_folder(plan, chosen, given)
    models: dict[Path, Model] = {}
    begun = []
    for plan, chosen in zip(plans, settings, strict=True):
        run = Run(plan.out)
        if (run.path / "metrics.json").exists():  # written last
            models[run.path] = Model.load(run.path, device=chosen.device)
        elif (run.path / "config.json").exists():
            begun.append(Progress.of(Job(run, plan.method, chosen, given)))
        else:
            begun.append(Progress.of(new_job(given, description, plan.method, chosen, plan.out)))
    models |= Queue(given, begun, networks).work_off()
    return [models[Path(plan.out)] for plan in plans]


@dataclass
class Progress:
    """A job and how far it is: epochs done in a phase."""

    job: Job
    phase: int
    done: int
    history: Rows

    @classmethod
    def of(cls, job: Job) -> "Progress":
        """What the run folder says."""
        last = job.run.checkpoint()
        return cls(job, 0, 0, []) if last is None else cls(job, last.phase, last.epoch, list(last.history))

    @property
    def stage(self) -> int:
        """The number of the stage that comes next, or of the last one where only its end is left."""
        ends = [end for _, end in self.job.spans]
        return next((number for number, end in enumerate(ends) if end > self.done), len(ends) - 1)

    @property
    def end(self) -> int:
        """The last epoch of that stage."""
        return self.job.spans[self.stage][1]

    @property
    def forms(self) -> Hashable:
        """Of that stage, and of the one before where that has just ended: its last touch is still to come."""
        ends = [end for _, end in self.job.spans]
        return tuple(form(self.job, number) for number in range(self.stage + 1) if ends[number] >= self.done)

    def is_like(self, other: "Progress") -> bool:
        """Whether both could be in one stack if they were equally far."""
        return form(self.job, self.stage) == form(other.job, other.stage)


class Queue:
    """Unfinished jobs on the same data. Those that are least far go first, so that they can join the others."""

    def __init__(self, data: Dataset, waiting: Sequence[Progress], networks: int) -> None:
        self.data, self.waiting, self.networks = data, list(waiting), networks
        self.held_out: dict[tuple[float, int], tuple[Dataset, Positions]] = {}

    def work_off(self) -> dict[Path, Model]:
        """Train all; the models by their folders."""
        models: dict[Path, Model] = {}
        while self.waiting:
            for progress, net in self._train(*self.next_stack()):
                model = finish_phase(progress.job, net, self._samples(progress)[0], progress.phase)
                progress.phase, progress.done = progress.phase + 1, 0
                if model is not None:
                    models[progress.job.run.path] = model
                    self.waiting.remove(progress)
        return models

    def next_stack(self) -> tuple[list[list[Progress]], int]:
        """The runs of the next stack, each with the jobs that share it, and the epoch to which they train."""
        first = min(self.waiting, key=lambda progress: (progress.phase, progress.done))
        beside = [p for p in self.waiting if (p.phase, p.done) == (first.phase, first.done)]
        fitting = [run for run in _shared(beside) if self._form(run[0]) == self._form(first)]
        most = max(1, self.networks // first.job.settings.particles)
        size = ceil(len(fitting) / ceil(len(fitting) / most))  # stacks of about the same size
        ahead = [p.done for p in self.waiting if p.phase == first.phase and p.done > first.done and p.is_like(first)]
        return sorted(fitting, key=_objective_first)[:size], min([first.end, *ahead])

    def _train(self, runs: list[list[Progress]], end: int) -> list[tuple[Progress, ParticleNet]]:
        """Train a stack; the jobs whose last epoch is behind them, with their networks."""
        lanes = [self._lane(run, end) for run in runs]
        if len(lanes) == 1:
            lanes = [replace(lanes[0], positions=None)]
        nets = train_stack(lanes, self.data if len(lanes) > 1 else lanes[0].data, runs[0][0].phase)
        for run, lane in zip(runs, lanes, strict=True):
            for progress, traveller in zip(run, lane.travellers, strict=True):
                progress.done = traveller.until
        return [(run[0], net) for run, net in zip(runs, nets, strict=True) if end == run[0].job.epochs]

    def _lane(self, run: list[Progress], end: int) -> Lane:
        host = run[0]
        untils = [end, *(min(end, same_until(host.job, other.job)) for other in run[1:])]
        travellers = [Traveller(p.job, p.history, until) for p, until in zip(run, untils, strict=True)]
        data, positions = self._samples(host)
        return Lane(travellers, data, host.job.run.checkpoint() if host.done else None, positions)

    def _form(self, progress: Progress) -> Hashable:
        """Equal for jobs that can train in one stack from where they are. Image files are streamed to one run alone."""
        alone = id(progress) if isinstance(self.data.train.inputs, ImageFiles) else None
        return alone, len(self._samples(progress)[0].train), progress.forms

    def _samples(self, progress: Progress) -> tuple[Dataset, Positions | None]:
        """What a job trains on in its phase, and where that lies in the training part; none: it is all of it."""
        job, settings = progress.job, progress.job.settings
        if progress.phase > 0 or not job.calibrates:
            return job.samples(progress.phase), None
        key = settings.hold_out, settings.seed
        if key not in self.held_out:
            train = self.data.train
            self.held_out[key] = job.samples(0), hold_out_indices(train.labels, *key, train.groups)[0]
        return self.held_out[key]


def _shared(progress: Sequence[Progress]) -> list[list[Progress]]:
    """Runs for jobs that are equally far: whatever is the same training from here on, for a while, shares one."""
    runs: list[list[Progress]] = []
    for one in progress:
        same = [run for run in runs if same_until(run[0].job, one.job) > one.done]
        if same:
            same[0].append(one)
        else:
            runs.append([one])
    return runs


def _objective_first(run: list[Progress]) -> tuple[str, str]:
    """Sorts runs of one method side by side: one call of the objective serves neighbours."""
    job = run[0].job
    return job.name, str({**job.settings.to_dict(), "seed": None})


def _check(data: Any, plans: Sequence[Plan], networks: int) -> None:
    """What can be wrong before the data are loaded."""
    if started() > 1:
        raise InputError(f"train_many trains in one process, but {started()} were started: leave torchrun out")
    if networks < 1:
        raise InputError(f"networks is {networks}: expected 1 or more, the most networks that train as one stack")
    folders = [Path(plan.out).resolve() for plan in plans]
    for plan, folder in zip(plans, folders, strict=True):
        if folders.count(folder) > 1:
            raise InputError(f"{plan.out} is the folder of several plans: expected one folder a plan")
        resolve(plan.method, data if isinstance(data, str) else "", plan.settings)


def _check_folder(plan: Plan, settings: Settings, data: Dataset) -> None:
    """A folder that holds another training than the planned one is refused."""
    run = Run(plan.out)
    if not (run.path / "config.json").exists():
        return
    config = run.config
    same_data(run, config["data"], data)
    begun = find_method(config["method"]).configure(config["settings"]).to_dict()
    others = [name for name, value in settings.to_dict().items() if name not in ELSEWHERE and begun[name] != value]
    if config["method"] != plan.method or others:
        what = ", ".join(others) or f"method {config['method']}"
        raise InputError(
            f"{plan.out} holds another run than the planned one (it differs in {what}): choose another folder"
        )

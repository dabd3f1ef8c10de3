"""A job: a training in a run folder. Jobs travel on lanes, and a lane is one run of a stack."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rfdlc.data.dataset import Dataset
from rfdlc.training.assembly import OwnBackbone, choose_device
from rfdlc.training.config import Settings
from rfdlc.training.loop import spans
from rfdlc.training.methods import Method, find_method
from rfdlc.training.processes.group import ALONE, Processes
from rfdlc.training.run import Checkpoint, Rows, Run


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

"""The plan of the trials before a training, which tuning.json keeps: what is tried, for
how long, and every loss.
"""

import math
from typing import Any

from pydantic import BaseModel, ValidationError

from rfdlc.errors import InputError, listing

TUNING = "tuning.json"

Settings = dict[str, Any]  # some of a config


class Rung(BaseModel):
    """Trials of equally many epochs; those of a rung that is still to come are not
    known.
    """

    epochs: int
    varies: bool = False  # the best trial so far, and variations of it
    trials: list[Settings] = []
    losses: list[float | None] = []  # None where a trial diverged: JSON has no infinity
    errors: list[
        float
    ] = []  # of the differences to the best trial; unknown of variations

    @property
    def pairs(self) -> list[tuple[Settings, float]]:
        """The trials and their losses, infinite where they diverged."""
        losses = [math.inf if loss is None else loss for loss in self.losses]
        return list(zip(self.trials, losses, strict=True))


class TrialPlan(BaseModel):
    """Rungs of trials, of which each continues with the better half of the one before
    it.
    """

    epochs: int  # of each training that follows
    seconds_per_epoch: float | None = (
        None  # with a budget, as are `measured` and `seconds`
    )
    rungs: list[Rung]
    candidates: list[Settings] = []  # of the first rung
    network: Settings = {}  # a smaller one, as the budget is short
    # of a training with RandAugment that is longer than its trials
    stronger: Settings = {}
    chance: float = (
        0.0  # the loss of a network that has learned nothing; older plans have none
    )
    measured: float = 0.0  # seconds that measuring took
    seconds: list[float] = []  # that rungs took
    chosen: Settings = {}  # at the end of all trials

    @classmethod
    def read(cls, table: dict[str, Any], where: object) -> "TrialPlan":
        """What `to_dict` gave; raises InputError for anything else."""
        try:
            return cls.model_validate(table)
        except ValidationError as error:
            places = listing(".".join(map(str, each["loc"])) for each in error.errors())
            raise InputError(
                f"{where} is damaged ({places}): remove the run folder, and train again"
            ) from None

    @property
    def tried(self) -> list[Rung]:
        return [rung for rung in self.rungs if rung.losses]

    def to_dict(self) -> dict[str, Any]:
        """As tuning.json has it: what is not known yet, and settings that nothing
        changes, are left out.
        """
        return {
            name: value
            for name, value in self.model_dump(exclude_unset=True).items()
            if value != {}
        }

"""What trainings have in common: whether they fit into one stack, and until which epoch they are the same training."""

from collections.abc import Hashable
from math import inf

from rfdlc.training.config import Settings
from rfdlc.training.factories import LossFactory, integrated_gain
from rfdlc.training.jobs.job import Job
from rfdlc.training.methods import Stage

# The class weights and the utility term, which begin after the deferred epoch.
LATE = frozenset(
    (
        "weights", "weight_power", "weight_beta", "utility", "penalty", "utility_form", "utility_weights", "alpha",
        "deferred",
    )
)  # fmt: skip
# Nothing that a network learns from.
BOOKS = frozenset(("combine", "calibration", "evaluate_every", "checkpoint_every", "keep", "refit"))
# What every run of a stack may have of its own; in all other settings they agree.
OWN = LATE | BOOKS | {
    "seed", "hold_out", "target_prior", "margin", "focal", "prior_tau", "repulsion", "repulsion_tau",
    "repulsion_strength", "learning_rate", "weight_decay", "schedule", "milestones", "decay", "warmup", "mixup",
    "cutmix",
}  # fmt: skip


def form(job: Job, number: int) -> Hashable:
    """Equal for jobs whose stage of this number can train in one stack, on equally many samples."""
    stage = job.method.stages[number]
    settings = job.settings.changed(stage.settings)
    mixing = bool(settings.mixup), bool(settings.cutmix)
    shape = (
        stage.trains,
        stage.reinitialize_head,
        stage.weight_averaging,
        stage.swag_samples,
        stage.finalize,
        job.method.combination,
    )
    return job.spans[number], shape, mixing, _values(settings, OWN)


def same_until(one: Job, other: Job) -> int:
    """The last epoch up to which both jobs are the same training, on the same data: 0 if they never are."""
    if one.method.combination is not other.method.combination:
        return 0
    if _values(one.settings, LATE | BOOKS) != _values(other.settings, LATE | BOOKS):
        return 0
    same = 0
    for mine, theirs, (_, end) in zip(one.method.stages, other.method.stages, one.spans, strict=False):
        make, late = _objective(one, mine), _late(one.settings) | _late(other.settings)
        if make is not _objective(other, theirs) or _training(mine) != _training(theirs):
            return same
        if len(late) > 1:  # the integrated gain is what it is without them, until they begin
            return max(same, int(min(end, *(epoch for epoch, _ in late)))) if make is integrated_gain else same
        same = end
        if mine.finalize is not theirs.finalize:
            return same
    return same


def _values(settings: Settings, without: frozenset[str]) -> Hashable:
    return tuple(getattr(settings, name) for name in Settings.model_fields if name not in without)


def _objective(job: Job, stage: Stage) -> LossFactory:
    return stage.loss or job.method.loss


def _training(stage: Stage) -> Hashable:
    """All that a stage does before its end."""
    changes = tuple(sorted(stage.settings.items()))
    return (
        stage.epochs,
        stage.trains,
        changes,
        stage.learning_rate_factor,
        stage.reinitialize_head,
        stage.weight_averaging,
        stage.swag_samples,
    )


def _late(settings: Settings) -> set[tuple[float, Hashable]]:
    """The epoch after which something begins, and what."""
    if settings.weights == "constant" and settings.utility == "none":
        return {(inf, None)}
    return {(settings.deferred_epoch, tuple(getattr(settings, name) for name in sorted(LATE)))}

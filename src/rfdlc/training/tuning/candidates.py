"""What trials try: augmentation and mixup at first, then variations of the best
trial.
"""

import math

from rfdlc.data.images import ImageFiles
from rfdlc.training.factories import as_they_are
from rfdlc.training.measuring import alone, unwritten
from rfdlc.training.run import Run
from rfdlc.training.trainer import Trainer
from rfdlc.training.trial_plan import Settings

MOST_TRIALS = 8  # of tune=auto
# Augmentation and mixup, in the order in which they are tried where there is no time
# for all of them.
AUGMENTED = (
    ("crop", 0.0),
    ("none", 0.0),
    ("crop-flip", 0.0),
    ("crop-flip", 0.4),
    ("randaugment", 0.0),
    ("crop-randaugment", 0.0),
    ("crop", 0.4),
    ("randaugment", 0.4),
)
ENOUGH, MOST_HELD_OUT = 1000, 0.3  # held-out samples of trials, and the largest share
OTHER_HEAD = {"cosine": "linear", "linear": "cosine"}


def find_candidates(trainer: Trainer, run: Run) -> list[Settings]:
    """What is tried: never a setting that the user has given, and mixing only where the
    method leaves it open.
    """
    config = run.config
    files = isinstance(
        trainer.data.train.inputs, ImageFiles
    )  # decoded for every trial alone: few trials
    augments = trainer.data.kind == "images" and "augment" not in run.given
    mixes = run.method.mixes and not config.cutmix and "mixup" not in run.given
    found: list[Settings] = []
    for augment, mixup in AUGMENTED:
        mixed = mixup and (config.mixup or mixup)
        own = {
            "augment": augment if augments else config.augment,
            "mixup": mixed if mixes else config.mixup,
        }
        if own not in found and not (files and "randaugment" in augment):
            found.append(own)
    return found[: MOST_TRIALS if config.tune == "auto" else int(config.tune)]


def variations(trainer: Trainer, run: Run) -> list[Settings]:
    """What is changed in the best settings: a lower rate, or another head."""
    config, given, mixes = run.config, run.given, run.method.mixes
    others: list[Settings] = [{"learning_rate": 0.3 * config.learning_rate}]
    random = config.head_init == "random"
    if config.head in OTHER_HEAD and mixes and (random or config.head == "cosine"):
        others.append({"head": OTHER_HEAD[config.head]})
    return [own for own in others if not own.keys() & given]


def trial_of(run: Run, length: int, settings: Settings) -> Run:
    """One network with these settings, and otherwise those of the run; it leaves
    nothing in the folder.
    """
    config = run.config
    warmup = min(
        config.warmup, math.ceil(length / 3)
    )  # as slow as in the training: it keeps high rates stable
    enough = min(
        MOST_HELD_OUT, ENOUGH / sum(run.classes.counts or (1,))
    )  # of few samples, more are held out
    shorter: Settings = {
        "epochs": length,
        "warmup": warmup,
        "hold_out": max(config.hold_out, enough),
        "refit": False,
    }
    shorter |= {
        "keep": (),
        "evaluate_every": 0,
        "patience": 0,
        "tune": "off",
        "log": (),
    }
    found = config.replace(**{**shorter, **settings})
    if run.method.combination is as_they_are:
        found = found.replace(prior_tau=found.prior_tau[:1], **alone(found))
    return unwritten(run, found)


def missing_regularisers(settings: Settings, stronger: Settings) -> int:
    """How many the trial lacks; -1 if the training adds stronger ones to its
    RandAugment.
    """
    if stronger and "randaugment" in settings.get("augment", ""):
        return -1
    return (settings.get("augment") == "none") + (settings.get("mixup") == 0)

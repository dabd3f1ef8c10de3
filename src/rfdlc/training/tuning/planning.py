"""How many epochs a training has, and how many trials of how many epochs come before
it.
"""

import math
import time
from typing import NamedTuple

from rfdlc.progress import announce, live
from rfdlc.training import measuring
from rfdlc.training.config import SAFETY, TrainConfig
from rfdlc.training.measuring import (
    MOST,
    relative_cost,
    seconds_per_epoch,
    steps_per_epoch,
    unwritten,
)
from rfdlc.training.networks.particles import ParticleNet
from rfdlc.training.networks.pretrained import INSTALL
from rfdlc.training.run import Run
from rfdlc.training.trainer import Trainer
from rfdlc.training.trial_plan import Rung, Settings, TrialPlan
from rfdlc.training.tuning.candidates import find_candidates, trial_of, variations

SHARE = 0.3  # of the work of the training, that its trials may cost
FEWEST_STEPS = 20  # of a trial
LONGEST = 4  # times the usual number of epochs, whatever the budget
# cost of a trial in trainings as long: it has one network. More is other work on the
# machine
DEAREST = 2.0
# of the usual number of epochs, below which a budget is too short for good results
FEW = 0.25
# Those of rf-dlc-strong, for trainings with RandAugment of so many epochs and steps:
# half of them do not show the gain.
STRONGER: Settings = {
    "magnitude": 1.0,
    "cutout": 0.5,
    "mixup": 0.1,
    "weight_decay": 1e-3,
}
LONG_EPOCHS, LONG_STEPS = 100, 7000


class Speed(NamedTuple):
    """What measuring found. Without a budget, no seconds are measured."""

    seconds: float  # of an epoch
    cost: float  # of an epoch of a trial, relative to that
    measured: float  # seconds that measuring took


def plan_trials(
    trainer: Trainer, run: Run, net: ParticleNet, began: float
) -> TrialPlan:
    """The plan of a run whose network is `net`; its measuring began then."""
    candidates = find_candidates(trainer, run) if run.config.tune != "off" else []
    network, speed = Settings(), Speed(0.0, relative_cost(trainer, run, net), 0.0)
    if run.config.budget:
        network, speed = _network_in_time(trainer, run, net, candidates, began)
        run = unwritten(run, run.config.replace(**network))
    if network:
        _announce_network(run.config)
    plan = _with_share(trainer, run, candidates, speed, SHARE if candidates else 0.0)
    if (
        candidates and not plan.rungs
    ):  # trials that cannot be afforded leave their time to epochs
        plan = _with_share(trainer, run, candidates, speed, 0.0)
    plan.network, plan.chance = network, round(math.log(len(trainer.data.classes)), 6)
    if run.method.mixes and plan.epochs >= max(
        LONG_EPOCHS, LONG_STEPS / steps_per_epoch(trainer, run)
    ):
        plan.stronger = {
            name: value for name, value in STRONGER.items() if name not in run.given
        }
    if run.config.budget:
        plan.measured, plan.seconds = round(speed.measured, 3), []
        side = trainer.data.input_shape[-1] if trainer.data.resizing is not None else 0
        sides = run.config.image_size or side, measuring.smallest_side(trainer)
        _announce_shortage(
            run.config, plan, speed, steps_per_epoch(trainer, run), sides
        )
    return plan


def _network_in_time(
    trainer: Trainer,
    run: Run,
    net: ParticleNet,
    candidates: list[Settings],
    began: float,
) -> tuple[Settings, Speed]:
    """The settings and the speed of the largest network for which the budget suffices,
    or else of the smallest.
    """
    networks, measured = measuring.in_reach(trainer, run, net, run.given), 0.0
    for network in networks:
        smaller = unwritten(run, run.config.replace(**network))
        left = MOST * run.config.budget - measured
        most = (
            left if network is networks[-1] else left / 2
        )  # the others need some of it
        speed = _measured(trainer, smaller, net, candidates, began, most)
        measured = speed.measured
        if measuring.suffices(trainer, smaller, speed.seconds, measured):
            break
    return network, speed


def _measured(
    trainer: Trainer,
    run: Run,
    net: ParticleNet,
    candidates: list[Settings],
    began: float,
    most: float,
) -> Speed:
    """The speed of a run; where steps take too long, the cost of trials is what is
    expected.
    """
    budget, cost = run.config.budget, relative_cost(trainer, run, net)
    usual = (
        ""
        if "budget" in run.given
        else ", as usual for images on a CPU: --budget changes it"
    )
    announce(f"measuring  steps, for a budget of {budget:g} s{usual}")
    with live(None, "measuring steps") as show:
        seconds = seconds_per_epoch(trainer, [unwritten(run, run.config)], most, show)
        measured = time.perf_counter() - began
        trials = [trial_of(run, run.config.epochs, own) for own in candidates]
        left, expected = (
            MOST * budget - measured,
            cost * len(trials) * seconds / steps_per_epoch(trainer, run),
        )
        if trials and 2 * expected <= left:  # the first step takes longer
            cost = min(
                DEAREST,
                seconds_per_epoch(trainer, trials, left, show)
                / (len(trials) * seconds),
            )
            measured = time.perf_counter() - began
    return Speed(seconds, cost, measured)


def _with_share(
    trainer: Trainer, run: Run, candidates: list[Settings], speed: Speed, share: float
) -> TrialPlan:
    """The plan in which trials cost at most this share of the training."""
    config = run.config
    length = config.epochs
    work = (
        share * length * config.trainings / speed.cost
    )  # epochs of all trials together
    if config.budget:
        possible = (
            SAFETY * (config.budget - speed.measured) / (speed.seconds * (1 + share))
        )
        length = epochs_of_each(config, possible)
        in_time = (
            SAFETY * max(0.0, share * config.budget - speed.measured) / speed.seconds
        )
        longest = (
            share / (1 - share) * length * config.trainings
        )  # a budget may exceed what the training can use
        work = min(in_time, longest) / speed.cost
    least = max(
        1, math.ceil(FEWEST_STEPS * config.batch_size / len(trainer.data.train))
    )
    varied = (
        len(variations(trainer, run)) / 2
    )  # in rungs: they train as long as its last two
    count, rungs = _rungs(len(candidates), work, least, varied, length)
    return TrialPlan(
        epochs=length,
        seconds_per_epoch=speed.seconds or None,
        rungs=rungs,
        candidates=candidates[:count],
    )


def _rungs(
    candidates: int, work: float, least: int, varied: float, length: int
) -> tuple[int, list[Rung]]:
    """How many trials there are at first, and the rungs, of `least` to `length` epochs,
    which have equal work.
    """
    most = int(math.log2(max(1, candidates)))
    for last in (
        varied,
        0.0,
    ):  # variations are left out where there is no time for them
        for halvings in range(most, 0, -1):
            if 2**halvings * (halvings + last) <= work / least:
                each = work / (halvings + last)
                rungs = [
                    Rung(epochs=min(length, int(each / 2**k)))
                    for k in range(halvings, 0, -1)
                ]
                return 2**halvings, rungs + (
                    [Rung(epochs=rungs[-1].epochs, varies=True)] if last else []
                )
    return 1, []


def epochs_of_each(config: TrainConfig, possible: float) -> int:
    """Of each training, of the epochs that are possible in all."""
    return int(min(max(1, possible / config.trainings), LONGEST * config.epochs))


def _announce_network(config: TrainConfig) -> None:
    """That a smaller network is trained."""
    pixels = f" on images of {config.image_size} pixels" if config.image_size else ""
    announce(
        f"smaller    {config.backbone}{pixels}, particles: {config.particles}, as the"
        " budget is short"
    )
    if pixels:
        embed = (
            "rfdlc embed PHOTOS --backbone timm:resnet50 --pretrained hub --out"
            " F.parquet; rfdlc train F.parquet"
        )
        announce(
            f"features   of a pretrained network usually suit photos better: {INSTALL};"
            f" {embed}"
        )


def _remedy(
    config: TrainConfig,
    plan: TrialPlan,
    speed: Speed,
    steps: int,
    sides: tuple[int, int],
) -> str:
    """Where a budget has time for few steps of `steps` per epoch: how long more take,
    and of images which size fits.

    `sides` are that of the images, and the smallest that leaves enough of them.
    """
    side, smallest = sides
    wanted = measuring.OF_SMALL * speed.seconds * config.trainings / steps / SAFETY
    left = config.budget - speed.measured
    if not plan.epochs * steps < measuring.OF_SMALL < config.epochs * steps:
        return ""
    fits = (
        int(side * (max(0.0, left) / wanted) ** 0.5) // 8 * 8
    )  # time goes with the pixels
    sized = (
        f", and so does data.image_size={fits} in this budget"
        if fits >= smallest
        else ""
    )
    return (
        f"; {math.ceil(speed.measured + wanted)} s give {measuring.OF_SMALL} steps,"
        f" about the least of use{sized}"
    )


def _announce_shortage(
    config: TrainConfig,
    plan: TrialPlan,
    speed: Speed,
    steps: int,
    sides: tuple[int, int],
) -> None:
    """That a budget is too short for good results, or even for the least that is
    trained.
    """
    if plan.epochs < FEW * config.epochs:
        share = SHARE if plan.candidates else 0
        training = (
            config.epochs * speed.seconds * config.trainings * (1 + share) / SAFETY
        )
        enough = f"{math.ceil(speed.measured + training)} s give all of them"
        less = (
            "" if plan.network else "; fewer particles and a smaller backbone take less"
        )
        announce(
            f"too short  {plan.epochs} of {config.epochs} epochs;"
            f" {enough}{less}{_remedy(config, plan, speed, steps, sides)}"
        )
    expected = speed.measured + plan.epochs * speed.seconds * config.trainings
    if expected > config.budget:
        told = (
            f"the training ends about {math.ceil(expected - config.budget)} s after its"
            " budget"
        )
        slow = f"one epoch takes about {speed.seconds:.2g} s, and one is the least"
        announce(f"overrun    {slow}: {told} of {config.budget:g} s")

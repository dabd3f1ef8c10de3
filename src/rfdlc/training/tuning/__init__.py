"""tune: short trials on held-out samples choose what a preset cannot know, before the
training itself.

Trials are runs of one network, which train side by side where they can. By successive
halving, the better half of them is tried again with twice the epochs; at last the best
one is varied. The loss of a trial is that of the held-out samples at its best
temperature, where classes weigh equally. All work is counted in epochs, so that the
same folder and seed give the same choice. tuning.json has the plan and every loss: a
run that was interrupted continues from it.
"""

import math
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from rfdlc.errors import expect
from rfdlc.progress import announce, live
from rfdlc.training.building import choose_device
from rfdlc.training.config import SAFETY, TrainConfig
from rfdlc.training.measuring import seconds_per_epoch, unwritten
from rfdlc.training.networks.particles import ParticleNet
from rfdlc.training.run import Run
from rfdlc.training.settings import TABULAR, settings_where
from rfdlc.training.trainer import Trainer, TrainingInterrupted
from rfdlc.training.trial_plan import TUNING, TrialPlan
from rfdlc.training.tuning.choosing import choose_settings, learned_nothing
from rfdlc.training.tuning.planning import SHARE, epochs_of_each, plan_trials
from rfdlc.training.tuning.trying import try_in_time, written_out

# seconds of images on a CPU, where nothing that is given says how long they may take
CPU_BUDGET = 600.0
DECIDES_TIME = set(settings_where(lambda setting: setting.decides_time))
ASKS_FOR_TRIALS = settings_where(lambda setting: setting.asks_for_trials)
LOOKED_AT = 2.0  # seconds, to say how long a training without a budget takes
# the share that is held out with a budget: the calibration and prices of the networks
# that decide rest on it
HELD_OUT = 0.2


def check_tuning(trainer: Trainer, run: Run, given: Mapping[str, Any]) -> TrainConfig:
    """The config of a run, without trials where none are possible; raises where the
    user asked for them.
    """
    config, data = run.config, trainer.data
    table = config.backbone in TABULAR
    reasons = {
        "needs held-out samples: set hold_out=0.1": (
            config.hold_out or data.val is not None
        ),
        "is for networks: set backbone=mlp, or leave it out": not table,
        f"is for methods of one stage, which {run.method_name} is not": (
            len(run.method.stages) == 1
        ),
        "is for one process: leave torchrun out": trainer.group.single,
    }
    reason = next((reason for reason, holds in reasons.items() if not holds), "")
    asked = [
        name
        for name in ASKS_FOR_TRIALS
        if name in given and getattr(config, name) not in ("off", 0)
    ]
    if table and "budget" in asked:  # which leaves out candidates
        asked.remove("budget")
    expect(not (asked and reason), f"{''.join(asked[:1])} {reason}")
    if reason:
        return config.replace(tune="off", budget=config.budget if table else 0)
    hours = (
        config.preset == "images"
        and config.tune == "auto"
        and DECIDES_TIME.isdisjoint(given)
    )
    if hours and choose_device(config.device).type == "cpu":
        config = config.replace(budget=CPU_BUDGET)
    if config.budget and "hold_out" not in given and data.val is None:
        config = config.replace(hold_out=HELD_OUT)
    return config


def tune(trainer: Trainer, run: Run) -> None:
    """Choose the settings of a run by trials, if its config asks for them and it has
    not been chosen before.
    """
    if not run.config.tuned or run.finished or run.chosen:
        return
    began = time.perf_counter()
    with run.claimed():
        try:
            plan = _make_trials(trainer, run, began)
        except KeyboardInterrupt:
            raise TrainingInterrupted(
                f"stopped during the trials; continue with `rfdlc resume {run.path}`"
            ) from None
        if run.config.budget:  # measuring and trials may have taken less than planned
            left = SAFETY * (run.config.budget - plan.measured - sum(plan.seconds))
            assert plan.seconds_per_epoch is not None
            length = epochs_of_each(run.config, left / plan.seconds_per_epoch)
            plan.epochs = max(plan.epochs, length)
        plan.chosen = choose_settings(plan)
        if "epochs" in run.given and not run.config.budget:
            plan.chosen["epochs"] = run.config.epochs
        warmup = math.ceil(
            plan.chosen["epochs"] / 3
        )  # most epochs are to have the full rate
        if "warmup" not in run.given and warmup < run.config.warmup:
            plan.chosen["warmup"] = warmup
        run.write_json(TUNING, plan.to_dict())
    run.config = run.config.replace(**plan.chosen)
    if plan.rungs or len(plan.chosen) > 1:
        announce(f"chosen     {written_out(plan.chosen)}")
    if plan.tried and learned_nothing(plan):
        announce(
            "trials     learned nothing in their time, so they chose nothing: more"
            " time, or tune=off, may help"
        )


def _make_trials(trainer: Trainer, run: Run, began: float) -> TrialPlan:
    """The plan with all losses; those that tuning.json has are not computed again."""
    stack = trainer.stacker.next_stack([run])
    trainer.announce_plan(stack)
    plan = run.tuning or plan_trials(trainer, run, stack.net, began)
    run.config = run.config.replace(**plan.network)
    run.write_json(TUNING, plan.to_dict())
    if plan.rungs:
        announce(
            f"trials     {len(plan.candidates)} settings, halved until one is left,"
            " then varied"
        )
        _announce_time(trainer, run, stack.net)
    elif run.config.tune != "off":
        announce(
            "trials     none: the training is too short, or the given settings leave"
            " nothing to choose"
        )
    for rung in list(plan.rungs):
        try_in_time(trainer, run, plan, rung)
    return plan


def _announce_time(trainer: Trainer, run: Run, net: ParticleNet) -> None:
    """Without a budget, on a CPU: how long all of it takes, by a few steps. It may be
    hours.
    """
    if run.config.budget or net.head_weights.device.type != "cpu":
        return
    with live(None, "measuring steps (--budget 10m limits the time)") as show:
        seconds = seconds_per_epoch(
            trainer, [unwritten(run, run.config)], LOOKED_AT, show
        )
    whole = timedelta(
        seconds=max(
            1, round((1 + SHARE) * seconds * run.config.epochs * run.config.trainings)
        )
    )
    announce(
        f"time       about {whole} in all, a quarter of it for the trials; --budget 10m"
        " limits it"
    )

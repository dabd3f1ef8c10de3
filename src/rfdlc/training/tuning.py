"""tune: short trials on held-out samples choose what a preset cannot know, before the training itself.

Trials are runs of one network, which train side by side where they can. By successive halving, the better half of them
is tried again with twice the epochs; at last the best one is varied. The loss of a trial is that of the held-out
samples at its best temperature, where classes weigh equally. All work is counted in epochs, so that the same folder and
seed give the same choice. tuning.json has the plan and every loss: a run that was interrupted continues from it.
"""

import math
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np

from rfdlc.data.images import ImageFiles
from rfdlc.errors import expect
from rfdlc.progress import announce, live
from rfdlc.training import measuring
from rfdlc.training.config import SAFETY, TABULAR, TrainConfig
from rfdlc.training.factories import as_they_are
from rfdlc.training.loop import TrainingStopped, epochs
from rfdlc.training.measuring import MOST, relative_cost, seconds_per_epoch, steps_per_epoch
from rfdlc.training.methods import FOLDS, MOST_FOLDED
from rfdlc.training.model import new_decider, sensible_threads
from rfdlc.training.networks.particles import ParticleNet
from rfdlc.training.networks.pretrained import INSTALL
from rfdlc.training.run import Run
from rfdlc.training.trainer import Trainer, TrainingInterrupted
from rfdlc.training.trial_losses import TrialLosses, balanced_losses, standard_errors

FILE = "tuning.json"
MOST_TRIALS = 8  # of tune=auto
SHARE = 0.3  # of the work of the training, that its trials may cost
FEWEST_STEPS = 20  # of a trial
LOOKED_AT = 2.0  # seconds, to say how long a training without a budget takes
LONGEST = 4  # times the usual number of epochs, whatever the budget
FEW = 0.25  # of the usual number of epochs, below which a budget is too short for good results
PLENTY = 2  # times the usual number of epochs, from which on a budget is better spent on more trainings than on epochs
ENOUGH, MOST_HELD_OUT = 1000, 0.3  # held-out samples of trials, and the largest share
RETURNED = 0.2  # the share that is held out where a refit trains the same networks on it
CLEARLY = 0.95  # of the loss, below which a variation replaces the best trial
STEEPEST = 0.7  # the least factor by which a loss is expected to fall again: those near chance fall fast for a while
UNCERTAIN = 2  # standard errors: as much better must a trial be that regularises less
LESS = 0.75  # of what twice the epochs gain, twice as many again gain
RISE = 1.05  # of the loss with more epochs, from which on fewer epochs are better
# In the order in which they are tried where there is no time for all of them.
AUGMENTED = [{"augment": augment, "mixup": mixup} for augment, mixup in (
    ("crop", 0.0), ("none", 0.0), ("crop-flip", 0.0), ("crop-flip", 0.4), ("randaugment", 0.0),
    ("crop-randaugment", 0.0), ("crop", 0.4), ("randaugment", 0.4),
)]  # fmt: skip

Settings = dict[str, Any]

PLAIN: Settings = {"prior_tau": "", "head": "linear"}  # cross-entropy: the prior is divided out afterwards
# Those of rf-dlc-strong, for trainings with RandAugment of so many epochs and steps: half of them do not show the gain.
STRONGER: Settings = {"magnitude": 1.0, "cutout": 0.5, "mixup": 0.1, "weight_decay": 1e-3}
LONG_EPOCHS, LONG_STEPS = 100, 7000
SLOWER = 0.1  # of the loss, by which shorter trials with RandAugment may be behind


class _OutOfTime(Exception): ...  # trials have taken all of the budget that they may


def check_tuning(trainer: Trainer, run: Run, given: Mapping[str, Any]) -> TrainConfig:
    """The config of a run, without trials where none are possible; raises where the user asked for them."""
    config, data = run.config, trainer.data
    table = config.backbone in TABULAR
    reasons = {
        "needs held-out samples: set hold_out=0.1": config.hold_out or data.val is not None,
        "is for networks: set backbone=mlp, or leave it out": not table,
        f"is for methods of one stage, which {run.method_name} is not": len(run.method.stages) == 1,
        "is for one process: leave torchrun out": trainer.group.single,
    }
    reason = next((reason for reason, holds in reasons.items() if not holds), "")
    trials = ("tune",) if table else ("tune", "budget")  # the budget of a table leaves out candidates
    asked = [name for name in trials if name in given and getattr(config, name) not in ("off", 0)]
    expect(not (asked and reason), f"{''.join(asked[:1])} {reason}")
    return config.replace(tune="off", budget=config.budget if table else 0) if reason else config


def tune(trainer: Trainer, run: Run) -> None:
    """Choose the settings of a run by trials, if its config asks for them and it has not been chosen before."""
    if not run.config.tuned or run.finished or "chosen" in run.tuning:
        return
    began = time.perf_counter()
    with run.claimed():
        try:
            stack = trainer.stacker.next_stack([run])
            trainer.announce_plan(stack)
            plan = run.tuning or _plan(trainer, run, stack.net, began)
            run.config = run.config.replace(**plan.get("network", {}))
            run.write_json(FILE, plan)
            if plan["rungs"]:
                announce(f"trials     {len(plan['candidates'])} settings, halved until one is left, then varied")
                _announce_time(trainer, run, stack.net)
            elif run.config.tune != "off":
                announce("trials     none: the training is too short, or the given settings leave nothing to choose")
            for rung in list(plan["rungs"]):
                _try_in_time(trainer, run, plan, rung)
        except KeyboardInterrupt:
            raise TrainingInterrupted(f"stopped during the trials; continue with `rfdlc resume {run.path}`") from None
        if run.config.budget:  # measuring and trials may have taken less than planned
            left = SAFETY * (run.config.budget - plan["measured"] - sum(plan["seconds"]))
            length = _length(run.config.replace(**plan.get("trainings", {})), left / plan["seconds_per_epoch"])
            plan["epochs"] = max(plan["epochs"], length)
        chosen = _chosen(plan)
        if "epochs" in run.metadata.get("given", ()) and not run.config.budget:
            chosen["epochs"] = run.config.epochs
        run.write_json(FILE, {**plan, "chosen": chosen})
    run.config = run.config.replace(**chosen)
    if plan["rungs"] or len(chosen) > 1:
        announce(f"chosen     {_words(chosen)}")


def _announce_time(trainer: Trainer, run: Run, net: ParticleNet) -> None:
    """Without a budget, on a CPU: how long all of it takes, by a few steps. It may be hours."""
    if run.config.budget or net.head_weights.device.type != "cpu":
        return
    with live(None, "measuring steps (--budget 10m limits the time)") as show:
        seconds = seconds_per_epoch(trainer, [measuring.unwritten(run, run.config)], LOOKED_AT, show)
    whole = timedelta(seconds=max(1, round((1 + SHARE) * seconds * run.config.epochs * run.config.trainings)))
    announce(f"time       about {whole} in all, a quarter of it for the trials; --budget 10m limits it")


def _plan(trainer: Trainer, run: Run, net: ParticleNet, began: float) -> dict[str, Any]:
    """How many epochs the training has, what is tried before it, and for how many epochs each time."""
    config, given = run.config, set(run.metadata.get("given", ()))
    candidates = _candidates(trainer, run, given) if config.tune != "off" else []
    seconds, cost, measured, network = 0.0, relative_cost(trainer, run, net), 0.0, Settings()
    networks = measuring.in_reach(trainer, run, net, given) if config.budget else []
    for network in networks:
        run = measuring.unwritten(run, config.replace(**network))
        most = (MOST * config.budget - measured) / (1 if network is networks[-1] else 2)  # of which others need some
        seconds, cost, measured = _measured(trainer, run, candidates, relative_cost(trainer, run, net), began, most)
        if measuring.suffices(trainer, run, seconds, measured):
            break
    config = run.config
    if network:
        pixels = f" on images of {config.image_size} pixels" if config.image_size else ""
        announce(f"smaller    {network['backbone']}{pixels}, particles: {config.particles}, as the budget is short")
        if pixels:
            embed = (
                "rfdlc embed PHOTOS --backbone timm:resnet50 --pretrained hub --out F.parquet; rfdlc train F.parquet"
            )
            announce(f"features   of a pretrained network usually suit photos better: {INSTALL}; {embed}")
    least = max(1, math.ceil(FEWEST_STEPS * config.batch_size / len(trainer.data.train)))
    varied = len(_varied(trainer, run, given)) / 2  # in rungs: they train as long as its last two
    most = 2 ** int(math.log2(max(1, len(candidates))))
    for share in (SHARE, 0.0) if candidates else (0.0,):  # trials that cannot be afforded leave their time to epochs
        length, more = config.epochs, dict[str, Any]()
        work = share * length * config.trainings / cost  # epochs of all trials together
        if config.budget:
            possible = SAFETY * (config.budget - measured) / (seconds * (1 + share))
            more = _trainings(trainer, config, given, possible)
            length = _length(config.replace(**more), possible)
            work = SAFETY * max(0.0, share * config.budget - measured) / (seconds * cost)
        count, rungs = _rungs(most, work, least, varied, length)
        if rungs:
            break
    spent = length * (1 + ("warm_refit" in more))  # on each network
    if config.budget and spent < FEW * config.epochs:
        training = config.epochs * seconds * config.trainings * (1 + SHARE * bool(candidates)) / SAFETY
        enough = f"{math.ceil(measured + training)} s give all of them"
        less = "" if network else "; fewer particles and a smaller backbone take less"
        announce(f"too short  {spent} of {config.epochs} epochs; {enough}{less}")
    expected = measured + length * seconds * config.replace(**more).trainings
    if config.budget and expected > config.budget:
        told = f"the training ends about {math.ceil(expected - config.budget)} s after its budget"
        slow = f"one epoch takes about {seconds:.2g} s, and one is the least"
        announce(f"overrun    {slow}: {told} of {config.budget:g} s")
    plan: dict[str, Any] = {"epochs": length, "seconds_per_epoch": seconds or None, "rungs": rungs}
    long = run.method.mixes and spent >= max(LONG_EPOCHS, LONG_STEPS / steps_per_epoch(trainer, run))
    stronger = {name: value for name, value in STRONGER.items() if long and name not in given}
    chosen = {"trainings": more, "network": network, "stronger": stronger}
    plan |= {"candidates": candidates[:count]} | {name: own for name, own in chosen.items() if own}
    return plan | ({"measured": round(measured, 3), "seconds": []} if config.budget else {})  # of the rungs


def _measured(
    trainer: Trainer, run: Run, candidates: list[Settings], cost: float, began: float, most: float
) -> tuple[float, float, float]:
    """Seconds of an epoch, those of trials relative to it (as expected where steps take too long), and of measuring."""
    budget = run.config.budget
    announce(f"measuring  steps, for a budget of {budget:g} s")
    with live(None, "measuring steps") as show:
        seconds = seconds_per_epoch(trainer, [measuring.unwritten(run, run.config)], most, show)
        measured = time.perf_counter() - began
        trials = [_trial(run, run.config.epochs, own) for own in candidates]
        left, expected = MOST * budget - measured, cost * len(trials) * seconds / steps_per_epoch(trainer, run)
        if trials and 2 * expected <= left:  # the first step takes longer
            cost = seconds_per_epoch(trainer, trials, left, show) / (len(trials) * seconds)
            measured = time.perf_counter() - began
    return seconds, cost, measured


def _length(config: TrainConfig, possible: float) -> int:
    """The epochs of each training, of those that are possible in all."""
    return int(min(max(1, possible / config.trainings), LONGEST * config.epochs))


def _rungs(most: int, work: float, least: int, varied: float, length: int) -> tuple[int, list[dict[str, Any]]]:
    """How many trials there are at first, and the rungs, of `least` to `length` epochs, which have equal work."""
    most_first, possible = range(int(math.log2(most)), 0, -1), work / least
    fitting = ((k, more) for more in (varied, 0.0) for k in most_first if 2**k * (k + more) <= possible)
    halvings, varied = next(fitting, (0, 0.0))  # variations are left out where there is no time for them
    count = 2**halvings
    each = work / max(1, halvings + varied)
    rungs: list[dict[str, Any]] = [{"epochs": min(length, int(each / (count / 2**k)))} for k in range(halvings)]
    if rungs and varied:
        rungs.append({"epochs": rungs[-1]["epochs"], "varies": True})
    return count, rungs


def _trainings(trainer: Trainer, config: TrainConfig, given: set[str], possible: float) -> Settings:
    """With a budget, all samples are trained on in the end: after folds, or further unless rates fall in steps."""
    fixed = given & {"refit", "warm_refit", "calibration_folds", "hold_out"}
    free = trainer.data.val is None and config.hold_out and not config.refit and not fixed and possible >= 2
    folds = len(trainer.data.train) <= MOST_FOLDED and possible >= (FOLDS + 1) * PLENTY * config.epochs
    more = {"calibration_folds": FOLDS} if folds else {"warm_refit": True, "hold_out": RETURNED}
    return {"refit": True, **more} if free and (folds or config.schedule == "cosine") else {}


def _candidates(trainer: Trainer, run: Run, given: set[str]) -> list[Settings]:
    """What is tried: never a setting that the user has given, and mixing only where the method leaves it open."""
    config, inputs = run.config, trainer.data.train.inputs
    free = {"augment"} if trainer.data.kind == "images" else set()
    free |= {"mixup"} if run.method.mixes and not config.cutmix else set()
    usual = {name: getattr(config, name) for name in ("augment", "mixup")}
    tried = [{**own, "mixup": own["mixup"] and (config.mixup or own["mixup"])} for own in AUGMENTED]
    if isinstance(inputs, ImageFiles):  # decoded for every trial alone: few trials
        tried = [own for own in tried if "randaugment" not in str(own["augment"])]
    found = [{**usual, **{name: own[name] for name in free - given}} for own in tried]
    most = MOST_TRIALS if config.tune == "auto" else int(config.tune)
    return list({str(own): own for own in found}.values())[:most]


def _varied(trainer: Trainer, run: Run, given: set[str], best: Settings | None = None) -> list[Settings]:
    """The best settings at a lower rate, and as plain networks or with another head."""
    config, images, mixes = run.config, trainer.data.kind == "images", run.method.mixes
    others: list[Settings] = [{"learning_rate": 0.3 * config.learning_rate}]
    head, random = {"cosine": "linear", "linear": "cosine"}.get(config.head), config.head_init == "random"
    if images and mixes and random and not PLAIN.keys() & given:
        others.append(PLAIN)
    elif head and mixes and (random or head == "cosine"):
        others.append({"head": head})
    return [{**(best or {}), **own} for own in others if not own.keys() & given]


def _try_in_time(trainer: Trainer, run: Run, plan: dict[str, Any], rung: dict[str, Any]) -> None:
    """With a budget, leave out a rung for which too little of it is left; the plan records that."""
    if not run.config.budget or "losses" in rung:
        return _try(trainer, run, plan, rung)
    began, before = time.perf_counter(), plan["seconds"]
    left = SHARE * run.config.budget - plan["measured"] - sum(before)
    given = set(run.metadata.get("given", ()))
    varied = (len(_varied(trainer, run, given)) + 1) / 2  # another head trains apart
    longer = max(1.0, varied) if rung.get("varies") else 1.0  # other rungs take equally long
    if before and longer * before[-1] > left:
        plan["rungs"].remove(rung)
    else:
        try:
            _try(trainer, run, plan, rung, began + left)
        except _OutOfTime:
            plan["rungs"].remove(rung)
        before.append(round(time.perf_counter() - began, 3))
    return run.write_json(FILE, plan)


def _try(trainer: Trainer, run: Run, plan: dict[str, Any], rung: dict[str, Any], until: float = math.inf) -> None:
    """Train and score the trials of a rung, unless tuning.json has their losses."""
    if "losses" in rung:
        return
    known, done = list[float](), [earlier for earlier in plan["rungs"] if "losses" in earlier]
    if rung.get("varies"):
        best = _best(plan)[0]
        known = [loss for own, loss in _pairs(done[-1]) if own == best]
        rung["trials"] = [best, *_varied(trainer, run, set(run.metadata.get("given", ())), best)]
    else:
        better = _best(plan) if done else plan["candidates"]
        rung["trials"] = better[: max(2, len(better) // 2)] if done else better
    new = rung["trials"][1:] if known else rung["trials"]
    later = plan["epochs"] * steps_per_epoch(trainer, run)
    found, errors = _losses(trainer, [_trial(run, rung["epochs"], own) for own in new], until, later)
    losses = known + found  # the best one is not trained again
    rung["losses"] = [round(loss, 6) if loss < math.inf else None for loss in losses]  # JSON has no infinity
    if not known:
        rung["errors"] = [round(error, 6) for error in errors]
    run.write_json(FILE, plan)
    shown = ["diverged" if loss is None else f"{loss:8.4f}" for loss in rung["losses"]]
    rows = "".join(f"\n{loss}  {_words(own)}" for own, loss in zip(rung["trials"], shown, strict=True))
    announce(f"{len(losses)} trials of {rung['epochs']} epochs, held-out loss where classes weigh equally:{rows}")


def _best(plan: dict[str, Any]) -> list[Settings]:
    """The trials of the last rung that has losses, best first.

    The factor by which twice the epochs lowered the loss of a trial is expected again, and less of it every time until
    the epochs of the training: networks that are regularised learn slowly at first, and gain for longer. So trials
    that regularise less come first only if they are clearly better.
    """
    done = [rung for rung in plan["rungs"] if "losses" in rung]
    last, earlier = done[-1], done[:-1]
    if last.get("varies"):  # the first is the best so far: others must clearly improve it, but for plain networks
        error = UNCERTAIN * max(earlier[-1].get("errors", [0.0]))
        least = [loss if "prior_tau" in own else (loss + error) / CLEARLY for own, loss in _pairs(last)]
        return [last["trials"][int(np.argmin([_pairs(last)[0][1], *least[1:]]))]]
    known = {str(own): loss for rung in earlier for own, loss in _pairs(rung) if loss < math.inf}  # the latest rung's
    doublings = max(1.0, math.log2(plan["epochs"] / last["epochs"]))
    again = (1 - LESS**doublings) / (1 - LESS)
    ratios = [loss / max(known.get(str(own), loss), 1e-12) for own, loss in _pairs(last)]
    factors = [min(1.0, max(ratio, STEEPEST)) ** again for ratio in ratios]
    expected = [math.inf if math.isinf(loss) else loss * f for (_, loss), f in zip(_pairs(last), factors, strict=True)]
    errors = [error * f for error, f in zip(last.get("errors", [0.0] * len(factors)), factors, strict=True)]
    first, weak = int(np.argmin(expected)), [_weak(own, plan.get("stronger", {})) for own in last["trials"]]
    early = SLOWER * expected[first] if last["epochs"] < LONG_EPOCHS else 0.0
    slack = [max(UNCERTAIN * max(e, errors[first]), early if w < 0 else 0.0) for e, w in zip(errors, weak, strict=True)]
    near = [loss <= expected[first] + more for loss, more in zip(expected, slack, strict=True)]
    order = sorted(range(len(near)), key=lambda i: (not near[i], weak[i] if near[i] else 0, expected[i]))
    return [last["trials"][i] for i in order]


def _weak(settings: Settings, stronger: Settings) -> int:
    """How many regularisers the trial lacks; -1 if the training adds stronger ones to its RandAugment."""
    if stronger and "randaugment" in settings.get("augment", ""):
        return -1
    return (settings.get("augment") == "none") + (settings.get("mixup") == 0)


def _pairs(rung: dict[str, Any]) -> list[tuple[Settings, float]]:
    losses = [math.inf if loss is None else loss for loss in rung["losses"]]
    return list(zip(rung["trials"], losses, strict=True))


def _chosen(plan: dict[str, Any]) -> Settings:
    """The settings of the best trial, and the epochs: fewer where more of them clearly raised its loss."""
    more = plan.get("network", {}) | plan.get("trainings", {})
    if not plan["rungs"]:
        return {"epochs": plan["epochs"], **more}
    best = _best(plan)[0]
    tried = [(loss, rung["epochs"]) for rung in plan["rungs"] for own, loss in _pairs(rung) if own == best]
    lowest, longest = min(tried), max(tried, key=lambda pair: pair[1])
    error = UNCERTAIN * max(error for rung in plan["rungs"] for error in rung.get("errors", [0.0]))
    fewer = longest[0] > max(RISE * lowest[0], lowest[0] + error)
    if "randaugment" in best.get("augment", "") and not fewer:
        best = {**best, **plan.get("stronger", {})}
    return {**more, **best, "epochs": lowest[1] if fewer else plan["epochs"]}


def _trial(run: Run, length: int, settings: Settings) -> Run:
    config = run.config
    warmup = min(config.warmup, math.ceil(length / 3))  # as slow as in the training: it keeps high rates stable
    enough = min(MOST_HELD_OUT, ENOUGH / sum(run.classes.counts or (1,)))  # of few samples, more are held out
    shorter: Settings = {"epochs": length, "warmup": warmup, "hold_out": max(config.hold_out, enough), "refit": False}
    shorter |= {"keep": (), "evaluate_every": 0, "patience": 0, "tune": "off", "log": ()}
    found = config.replace(**{**shorter, **settings})
    if run.method.combination is as_they_are:
        found = found.replace(prior_tau=found.prior_tau[:1], **measuring.alone(found))
    return measuring.unwritten(run, found)


def _losses(trainer: Trainer, trials: Sequence[Run], until: float, later: int = 0) -> tuple[list[float], list[float]]:
    """Held-out losses and standard errors, infinite where the training loss is not a number; `later`: see `epochs`."""
    found, waiting = dict[Any, TrialLosses | None](), list(trials)
    with live(len(trials) * trials[0].epochs * steps_per_epoch(trainer, trials[0]), f"{len(trials)} trials") as show:

        def step(*_: Any, together: int) -> None:
            show(together, "")
            if time.perf_counter() > until:
                raise _OutOfTime

        while waiting:
            stack = trainer.stacker.next_stack(waiting)
            try:
                with sensible_threads(stack.net, stack.run.config):
                    shown = partial(step, together=len(stack.members))
                    for _ in epochs(stack.net, stack.stages, {}, show=shown, later=later):
                        pass
            except TrainingStopped as error:
                lost = stack.members[error.run].runs[0]
                found[lost.path] = None
                waiting.remove(lost)
                continue
            for member in stack.members:
                (trial,) = member.runs
                predictions = member.model.predict_split(member.data.val)
                assert predictions is not None  # one process, and held-out samples
                decider = new_decider(trial.method_name, trial.config, member.data.classes)
                found[trial.path] = balanced_losses(predictions, decider)
                waiting.remove(trial)
    each = [found[trial.path] for trial in trials]
    return [math.inf if own is None else own.mean for own in each], standard_errors(each)


def _words(settings: Settings) -> str:
    return " ".join(f"{name}={f'{own:g}' if isinstance(own, float) else own}" for name, own in settings.items())

"""CIFAR-LT with ResNet-32: the paper's training and ours, several seeds as one stack,
on one GPU.

    python benchmarks/learn.py --data DIR --out results.csv \
        --seeds 0 1 2 paper paper-utility
    python benchmarks/learn.py --data DIR --out held.csv --mode selection \
        --seeds 0 1 tau1 tau1-mixup
    python benchmarks/learn.py --data DIR --out results.csv --mode refit \
        --seeds 0 1 2 rf-dlc
    python benchmarks/learn.py --data DIR --out smoke.csv --mode smoke \
        --seeds 0 1 2 paper

Every method has a configuration of its name for CIFAR100-LT, and with `-cifar10` for
CIFAR10-LT; docs/methods.md ends with the commands.

Modes: `test` trains on everything and scores the test split once. `selection` trains
without a held-out part of the training data and scores that part as if it were
balanced: settings are chosen on it. `refit` does both, and the test split is scored
with the calibration fitted on the held-out part. `rescore` does the scoring of `refit`
again from logits kept with --logits, without training. `smoke` times a step eagerly,
captured, compiled.

DIR holds cifar-100-python/ and cifar-10-batches-py/. Each configuration's rows are
appended as it finishes; one that is in the file already is skipped, so an interrupted
command is simply given again.
"""

import argparse
import csv
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from configurations import CONFIGS
from recording import append, commit, hardware, versions
from rfdlc.data.dataset import Dataset
from rfdlc.data.load import load
from rfdlc.decisions.decider import Decider
from rfdlc.decisions.utility import Utility
from rfdlc.evaluation.evaluate import evaluate
from rfdlc.probabilities.predictions import Predictions
from rfdlc.probabilities.priors import is_uniform
from rfdlc.training.building import choose_device, method_net, new_decider
from rfdlc.training.config import TrainConfig, parse_pairs
from rfdlc.training.loop import build_stages, epochs, split_outputs
from rfdlc.training.methods import METHODS, resolve
from rfdlc.training.networks.particles import ParticleNet, place
from rfdlc.training.trainer import balanced_positions, diversity

Array = np.ndarray[Any, Any]
PENALTIES = (-0.05, -0.1, -0.15, -0.2, -0.25, -0.3, -0.4, -0.5, -0.75, -1.0)
FIELDS = (
    "config",
    "mode",
    "seed",
    "decision",
    "metric",
    "value",
    "seconds",
    "hardware",
    "versions",
    "commit",
)


class Bench:
    """Data read once, stacks kept at their deferred epoch for forks, rows written as
    they come.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, choose_device(options.device)
        self.data: dict[str, Dataset] = {}
        self.kept: dict[
            tuple[str, int], tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
        ] = {}
        self.began = time.perf_counter()
        self.done = _read_done(options.out)
        measured = options.commit or commit()
        self.stamp = {
            "hardware": hardware(),
            "versions": versions(["torch", "numpy"]),
            "commit": measured,
        }

    def run(self) -> None:
        for name in self.options.configs:
            if (name, self.options.mode) in self.done:
                print(f"{name}: already in {self.options.out}", flush=True)
                continue
            if time.perf_counter() - self.began > self.options.time_budget:
                print(f"{name}: not started, the time budget is spent", flush=True)
                continue
            modes: dict[str, Callable[[str], object]] = {
                "smoke": self.smoke,
                "test": self.test,
                "selection": self.selection,
                "refit": self.refit,
                "rescore": self.rescore,
            }
            modes[self.options.mode](name)

    def test(
        self, name: str, deciders: list[Decider] | None = None, mode: str = "test"
    ) -> None:
        """Train on everything, score the test split once."""
        method, settings, data = self.ready(name)
        net, seconds = self.trained(name, method, settings, data)
        assert data.test is not None
        found, unsure, _ = split_outputs(
            net, data.test, data.normalisation, settings, self.device
        )
        assert found is not None
        logits = found.numpy()
        fitted = deciders or [self.decider(name, settings)] * net.runs
        stated = (
            {}
            if unsure is None
            else {net.combination.measures: unsure.mean(1).tolist()}
        )
        self.report(
            name,
            mode,
            settings,
            logits,
            data.test.labels,
            fitted,
            seconds,
            stated=stated,
        )
        self.keep_logits(name, logits, data.test.labels, seconds)

    def selection(self, name: str, mode: str = "selection") -> list[Decider]:
        """Train without the held-out part, fit the calibration on it, and score it as
        balanced data.
        """
        method, settings, whole = self.ready(name)
        data = whole.hold_out(self.options.hold_out, seed=0)
        net, seconds = self.trained(name + "-held-out", method, settings, data)
        assert data.val is not None
        outputs = split_outputs(
            net, data.val, data.normalisation, settings, self.device
        )[0]
        assert outputs is not None
        logits = outputs.numpy()
        self.keep_logits(f"{name}-held-out", logits, data.val.labels, seconds)
        return self.calibrated(name, mode, settings, logits, data.val.labels, seconds)

    def refit(self, name: str) -> None:
        """The calibration of a run without the held-out part, for a run on
        everything.
        """
        self.test(name, self.selection(name, "refit-held-out"), "refit")

    def rescore(self, name: str) -> None:
        """Calibrate on kept held-out logits, score kept test logits; rows say where and
        when those were trained.
        """
        _, settings, _ = self.ready(name)
        held, labels, seconds = self.kept_logits(f"{name}-held-out")
        deciders = self.calibrated(
            name, "refit-held-out", settings, held, labels, seconds
        )
        logits, labels, seconds = self.kept_logits(name)
        self.report(name, "refit", settings, logits, labels, deciders, seconds)

    # -- parts
    # ----------------------------------------------------------------------------------

    def ready(self, name: str) -> tuple[str, TrainConfig, Dataset]:
        config = CONFIGS[name]
        changes: dict[str, Any] = {**config.settings, **parse_pairs(self.options.set)}
        if self.options.epochs:
            changes["epochs"] = self.options.epochs
        changes["compile"] = self.options.compile
        _, settings = resolve(config.method, config.data, changes)
        if config.data not in self.data:
            data = load(config.data, root=self.options.data)
            self.data[config.data] = (
                _small(data, self.options.tiny) if self.options.tiny else data
            )
        return config.method, settings, self.data[config.data]

    def trained(
        self, name: str, method: str, settings: TrainConfig, data: Dataset
    ) -> tuple[ParticleNet, float]:
        """The trained stack and the seconds it took; forked from the kept state of
        another one where there is such.
        """
        seeds, row = self.options.seeds, METHODS[method]
        net = place(
            method_net(row, settings, data.input_shape, data.classes, seeds),
            self.device,
        )
        parts = build_stages(row, settings, data, seeds, self.device)
        state: dict[str, torch.Tensor] = {}
        config, suffix = (
            CONFIGS[name.removesuffix("-held-out")],
            "-held-out" * name.endswith("-held-out"),
        )
        shared = f"{config.fork_of}{suffix}", config.shared_epochs(settings)
        done = shared[1] if shared in self.kept else 0
        if done:
            weights, state = self.kept[shared]
            net.load_state_dict(weights)
        wanted = self.forks_of(name.removesuffix("-held-out"))
        began = time.perf_counter()
        for epoch in epochs(net, parts, state, done):
            if epoch.epoch in wanted:
                self.kept[name, epoch.epoch] = (
                    _cloned(net.state_dict()),
                    _cloned(epoch.state),
                )
            if epoch.epoch % max(1, settings.epochs // 10) == 0 or epoch.epoch <= 2:
                losses = " ".join(f"{loss:.3f}" for loss in epoch.losses)
                print(
                    f"  {name} epoch {epoch.epoch} loss {losses} {epoch.seconds:.2f} s",
                    flush=True,
                )
        return net, time.perf_counter() - began

    def forks_of(self, name: str) -> set[int]:
        """Epochs after which other configurations of this command go on from
        this one.
        """
        forks = [
            other for other in self.options.configs if CONFIGS[other].fork_of == name
        ]
        return {CONFIGS[other].shared_epochs(self.ready(other)[1]) for other in forks}

    def decider(self, name: str, settings: TrainConfig) -> Decider:
        config = CONFIGS[name]
        return new_decider(config.method, settings, self.data[config.data].classes)

    def calibrated(
        self,
        name: str,
        mode: str,
        settings: TrainConfig,
        logits: Array,
        labels: Array,
        seconds: float,
    ) -> list[Decider]:
        """A decider a seed, fitted on held-out logits, and what it makes of them."""
        bare = self.decider(name, settings)
        balanced = is_uniform(bare.model.target_prior)
        deciders = [
            bare.fit(part, labels, logits=True, balanced=balanced) for part in logits
        ]
        self.report(
            name, mode, settings, logits, labels, deciders, seconds, balance=True
        )
        return deciders

    def report(
        self,
        name: str,
        mode: str,
        settings: TrainConfig,
        logits: Array,
        labels: Array,
        deciders: list[Decider],
        seconds: float,
        balance: bool = False,
        stated: dict[str, list[float]] | None = None,
    ) -> None:
        """Figures of every seed: arg max of both combinations, then expected utility at
        every penalty.

        `stated` are metrics of the networks themselves, one per seed.
        """
        counted = self.data[CONFIGS[name].data].classes
        rows: list[dict[str, Any]] = []
        for run, (seed, part, decider) in enumerate(
            zip(self.options.seeds, logits, deciders, strict=True)
        ):
            rows_of = balanced_positions(labels) if balance else np.arange(len(labels))
            predictions = Predictions(
                logits=part[:, rows_of], targets=labels[rows_of], classes=counted
            )
            for decision, chosen in _decisions(decider, predictions):
                for metric, value in _metrics(chosen, predictions).items():
                    rows.append(
                        {
                            "seed": seed,
                            "decision": decision,
                            "metric": metric,
                            "value": value,
                        }
                    )
            extra = (
                diversity(part)
                | {"seconds": seconds}
                | {m: v[run] for m, v in (stated or {}).items()}
            )
            if decider.model.calibrator is not None:
                extra["temperature"] = 1 / float(
                    decider.model.calibrator.as_affine()[0]
                )
            rows += [
                {"seed": seed, "decision": "", "metric": m, "value": v}
                for m, v in extra.items()
            ]
        stamp = {
            "config": name,
            "mode": mode,
            "seconds": round(seconds, 1),
            **self.stamp,
        }
        append(
            self.options.out,
            [{**row, "value": f"{row['value']:.6g}", **stamp} for row in rows],
            FIELDS,
        )
        _print_table(name, mode, rows, seconds)

    def keep_logits(
        self, name: str, logits: Array, labels: Array, seconds: float
    ) -> None:
        if self.options.logits:
            self.options.logits.mkdir(parents=True, exist_ok=True)
            for seed, part in zip(self.options.seeds, logits, strict=True):
                path, stamp = (
                    self.options.logits / f"{name}-{seed}.npz",
                    json.dumps(self.stamp),
                )
                half = part.astype(np.float16)
                np.savez_compressed(
                    path,
                    logits=half,
                    targets=labels,
                    seconds=seconds,
                    stamp=np.array(stamp),
                )

    def kept_logits(self, name: str) -> tuple[Array, Array, float]:
        """Logits (R, M, N, C), labels and seconds of training; further rows carry the
        stamp of that training.
        """
        files = [
            np.load(self.options.logits / f"{name}-{seed}.npz")
            for seed in self.options.seeds
        ]
        self.stamp = json.loads(str(files[0]["stamp"]))
        logits = np.stack([file["logits"].astype(np.float32) for file in files])
        return logits, files[0]["targets"], float(files[0]["seconds"])

    def smoke(self, name: str) -> None:
        """Seconds an epoch: eager, captured, compiled and captured (the first epoch of
        each warms up).
        """
        method, settings, data = self.ready(name)
        from rfdlc.training.execution import Execution

        for variant in ("eager", "captured", "compiled"):
            chosen = settings.replace(compile=variant == "compiled")
            row, seeds = METHODS[method], self.options.seeds
            net = place(
                method_net(row, chosen, data.input_shape, data.classes, seeds),
                self.device,
            )
            parts = build_stages(row, chosen, data, seeds, self.device)
            Execution.capturing = variant != "eager"
            times = []
            for epoch in epochs(net, parts, {}):
                times.append(epoch.seconds)
                if epoch.epoch == (2 if variant == "eager" else 4):
                    break
            Execution.capturing = True
            memory = (
                torch.cuda.max_memory_allocated() / 2**30
                if self.device.type == "cuda"
                else 0.0
            )
            steps = parts[0].loader.steps
            print(
                f"{name} {variant}: first epoch {times[0]:.1f} s, then"
                f" {min(times[1:]):.3f} s an epoch, {1000 * min(times[1:]) / steps:.2f}"
                f" ms a step, {memory:.1f} GiB, loss {epoch.losses}",
                flush=True,
            )


# -- metrics
# --------------------------------------------------------------------------------------


def _decisions(
    decider: Decider, predictions: Predictions
) -> Iterator[tuple[str, Decider]]:
    classes, one_hot = predictions.classes, Utility.one_hot(predictions.classes)
    priors: dict[str, Any] = {
        "train_prior": decider.model.train_prior,
        "target_prior": decider.model.target_prior,
    }
    for combine in ("mean-logits", "mean-probabilities"):
        yield (
            f"argmax {combine}",
            Decider(one_hot, combine=combine, calibration=None, **priors),
        )
    plain = Decider(
        one_hot,
        combine=decider.model.combine,
        calibration=None,
        rule=decider.rule,
        **priors,
    )
    known = decider.replace(classes=classes)
    yield "method", known  # its own utility and rule, calibrated where it was fitted
    if decider.model.calibrator is not None:
        yield "argmax calibrated", known.replace(utility=one_hot)
    for penalty in PENALTIES:
        utility = Utility.tail_sensitive(classes, penalty)
        yield f"expected-utility {penalty}", plain.replace(utility=utility)
        if decider.model.calibrator is not None:
            yield (
                f"expected-utility calibrated {penalty}",
                known.replace(utility=utility),
            )


def _metrics(decider: Decider, predictions: Predictions) -> dict[str, float]:
    """The standard metrics; utility is always that of the penalty -1, whatever the
    decision was made for.
    """
    result = evaluate(predictions, decider=decider)
    judge = Utility.tail_sensitive(predictions.classes, -1.0)
    assert predictions.targets is not None
    gained = judge.matrix[predictions.targets, decider.decide(predictions)].mean()
    rates = {
        f"fhr{round(100 * share)}": 100 * rate
        for share, rate in result.false_head_rates.items()
    }
    regions = {
        region: 100 * value for region, value in result.accuracy_by_region.items()
    }
    named = {
        "acc": 100 * result.accuracy,
        **regions,
        **rates,
        "fhr": 100 * result.false_head_rate,
    }
    return {
        **named,
        "utility": float(gained),
        "ece": 100 * result.ece,
        "nll": result.nll,
    }


def _print_table(
    name: str, mode: str, rows: list[dict[str, Any]], seconds: float
) -> None:
    print(
        f"== {name} ({mode}), {seconds:.0f} s, mean of"
        f" {len({row['seed'] for row in rows})} seeds",
        flush=True,
    )
    shown = (
        "acc",
        "head",
        "med",
        "tail",
        "fhr25",
        "fhr50",
        "fhr75",
        "fhr",
        "utility",
        "ece",
        "nll",
    )
    decisions = dict.fromkeys(row["decision"] for row in rows if row["decision"])
    brief = [
        d
        for d in decisions
        if d == "method" or "argmax" in d or d.endswith((" -0.1", " -0.25", " -1.0"))
    ]  # the file has all
    for decision in brief:
        here = [row for row in rows if row["decision"] == decision]
        means = {
            m: np.mean([row["value"] for row in here if row["metric"] == m])
            for m in shown
        }
        print(
            f"  {decision:34s}" + " ".join(f"{m} {means[m]:.3g}" for m in shown),
            flush=True,
        )
    for metric in (
        "disagreement",
        "mutual_information",
        "temperature",
        "experts_used",
        "fused_uncertainty",
    ):
        values = [row["value"] for row in rows if row["metric"] == metric]
        if values:
            print(f"  {metric} {np.mean(values):.3f}", flush=True)


# -- files
# --------------------------------------------------------------------------------------


def _read_done(path: Path) -> set[tuple[str, str]]:
    if not path.exists():
        return set()
    with path.open(newline="") as lines:
        return {(row["config"], row["mode"]) for row in csv.DictReader(lines)}


def _small(data: Dataset, samples: int) -> Dataset:
    """Every k-th sample, to try the script on a CPU."""
    from dataclasses import replace

    assert data.test is not None
    few = [
        split.take(np.arange(0, len(split), max(1, len(split) // samples)))
        for split in (data.train, data.test)
    ]
    return replace(data, train=few[0], test=few[1])


def _cloned(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configs", nargs="+", choices=sorted(CONFIGS))
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        help="folder with cifar-100-python/ and the like",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/learn.csv")
    )
    parser.add_argument(
        "--mode",
        choices=("test", "selection", "refit", "rescore", "smoke"),
        default="test",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=0, help="other than the preset's")
    parser.add_argument(
        "--set",
        nargs="*",
        default=[],
        metavar="key=value",
        help="settings for every configuration",
    )
    parser.add_argument("--hold-out", type=float, default=0.2)
    parser.add_argument(
        "--time-budget",
        type=float,
        default=1e9,
        help="start nothing after this many seconds",
    )
    parser.add_argument(
        "--logits",
        type=Path,
        help="keep held-out and test logits in this folder, float16",
    )
    parser.add_argument(
        "--commit",
        help="commit to record, where the script runs outside the repository",
    )
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--tiny", type=int, default=0, help="about so many samples, to try the script"
    )
    Bench(parser.parse_args()).run()


if __name__ == "__main__":
    main()

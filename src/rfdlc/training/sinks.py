"""Sinks: the history and the metrics of a run also go to TensorBoard, MLflow or Weights
& Biases while it trains.

Each is a function that opens a run in its store and returns two functions: one writes
numbers of a step, one closes the store with whether the training ended well. What
identifies a run in its store is in sinks.json of the run folder, so that a resumed run
continues there.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from rfdlc.errors import expect
from rfdlc.training.run import Run

Write = Callable[[Mapping[str, Any], int], None]
Close = Callable[[bool], object]
PROJECT = "rfdlc"  # the experiment or project, unless the environment names another


def _tensorboard(run: Run, known: str, step: int) -> tuple[str, Write, Close]:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(run.path / "tensorboard"), purge_step=step + 1)

    def write(values: Mapping[str, Any], at: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, at)
        writer.flush()

    return "", write, lambda well: writer.close()


def _mlflow(run: Run, known: str, step: int) -> tuple[str, Write, Close]:
    """In the store of MLFLOW_TRACKING_URI, by default that of MLflow."""
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    client, name = MlflowClient(), os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    if not known:
        experiment = client.get_experiment_by_name(name)
        number = (
            experiment.experiment_id
            if experiment is not None
            else client.create_experiment(name)
        )
        known = client.create_run(number, run_name=run.path.name).info.run_id
        params = [
            Param(key, str(value)[:6000]) for key, value in _settings(run).items()
        ]
        client.log_batch(known, params=params)

    def write(values: Mapping[str, Any], at: int) -> None:
        now = int(1000 * time.time())
        client.log_batch(
            known,
            metrics=[
                Metric(name, float(value), now, at) for name, value in values.items()
            ],
        )

    return (
        known,
        write,
        lambda well: client.set_terminated(known, "FINISHED" if well else "KILLED"),
    )


def _wandb(run: Run, known: str, step: int) -> tuple[str, Write, Close]:
    """In its project of WANDB_PROJECT; WANDB_MODE=offline keeps everything in the run
    folder.
    """
    import wandb

    project = os.environ.get("WANDB_PROJECT", PROJECT)
    given: dict[str, Any] = {
        "project": project,
        "name": run.path.name,
        "dir": str(run.path),
        "config": _settings(run),
    }
    found = wandb.init(**given, id=known or None, resume="allow", reinit="create_new")
    return (
        found.id,
        lambda values, at: found.log(dict(values), step=at),
        lambda well: found.finish(0 if well else 1),
    )


OPENERS: dict[
    str, Callable[[Run, str, int], tuple[str, Write, Close]]
] = {  # by the package that each needs
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _wandb,
}


def check_sinks(run: Run) -> None:
    """Raise where the package of a sink is not installed."""
    for name in run.config.log:
        expect(
            find_spec(name) is not None,
            f'log={name} needs {name}: pip install "rfdlc[log]"',
        )


@contextmanager
def open_sinks(run: Run) -> Iterator[Write]:
    """A function that writes the numbers among values to all sinks of a run; they are
    closed at the end.
    """
    opened: list[tuple[Write, Close]] = []

    def write(values: Mapping[str, Any], step: int) -> None:
        known = {
            name: each
            for name, each in values.items()
            if isinstance(each, int | float) and math.isfinite(each)
        }
        for writing, _ in opened:
            writing(known, step)

    well = False
    try:
        if run.writes and run.config.log and not run.finished:
            known = (
                run.read_json("sinks.json")
                if (run.path / "sinks.json").exists()
                else {}
            )
            for name in run.config.log:
                known[name], send, close = OPENERS[name](
                    run, known.get(name, ""), step_of(run)
                )
                opened.append((send, close))
                run.write_json("sinks.json", known)
        yield write
        well = True
    finally:
        for _, closing in opened:
            closing(well)


def step_of(run: Run) -> int:
    """Epochs of all phases so far."""
    return run.phase * run.epochs + run.epoch


def _settings(run: Run) -> dict[str, Any]:
    return {"method": run.method_name, **run.config.to_dict()}

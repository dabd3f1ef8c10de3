"""A search over settings by Optuna: it asks for trials, and prunes them on held-out
metrics while they train.

A trial depends on (seed, its number) and on the trials before it, which are in files.
So a search that was killed asks for the same trials again, and continues the last one
from its checkpoint.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rfdlc.errors import InputError, choose, expect
from rfdlc.files import read_json
from rfdlc.training.loop import TrainingStopped
from rfdlc.training.plans import (
    STOPPED,
    TABLE,
    Plan,
    Range,
    Row,
    Search,
    row_of,
    write_rows,
)
from rfdlc.training.run import Run
from rfdlc.training.train import prepare_runs, without_trials

# of a trial that has ended: its settings, state, and held-out metric by epoch
RECORD = "trial.json"
DIRECTIONS: dict[str, Any] = {
    "held_out_nll": "minimize",
    "held_out_accuracy": "maximize",
    "held_out_ece": "minimize",
}
STATES = {
    "finished": "COMPLETE",
    "pruned": "PRUNED",
    "diverged": "FAIL",
}  # here, and as Optuna calls them


class _Pruned(Exception):
    """The trial is worse than others were after as many epochs."""


def search(plan: Plan, folder: Path, *, collect: bool = False) -> list[Row]:
    """Train trial after trial; the rows of the table."""
    asked = plan.search
    assert asked is not None
    choose("metric of a search", asked.metric, DIRECTIONS)
    rows, records = list[Row](), list[dict[str, Any]]()
    for number in range(asked.trials):
        path = folder / f"trial-{number:04d}"
        if not (path / RECORD).exists() and not collect:
            _train(plan, asked, path, records)
        if not (path / RECORD).exists():
            break
        records.append(read_json(path / RECORD))
        rows.append(
            row_of(path, records[-1]["settings"], test=False)
            | {"state": records[-1]["state"]}
        )
        write_rows(folder / TABLE, rows)
    return rows


def _train(
    plan: Plan, asked: Search, path: Path, records: Sequence[dict[str, Any]]
) -> None:
    """Ask for a trial, train it to its end or until it is pruned, and record it."""
    trial = ask(asked, records)
    job = plan.job(
        path.parent,
        [{"evaluate_every": 1, **plan.settings, **trial.params}],
        [path.name],
    )
    trainer, (run,) = prepare_runs(
        job.data, without_trials(job.specs), job.root, job.options
    )
    held = (
        "a search compares held-out metrics, but nothing is held out: set hold_out=0.1"
    )
    expect(run.config.hold_out or trainer.data.val is not None, held)
    reported: dict[int, float] = {}

    def report(run: Run) -> None:
        for row in run.history:  # of a trial that is continued, with all epochs before
            value, epoch = row.get(asked.metric), int(row["epoch"])
            if value is None or row["phase"] or epoch in reported:
                continue
            reported[epoch] = value
            trial.report(value, epoch)
            if asked.prune and epoch < run.epochs and trial.should_prune():
                raise _Pruned

    trainer.watch = report
    state = "finished"
    try:
        trainer.fit([run])
        report(run)  # of a trial that had only to be recorded
        if not reported:  # trees have no epochs
            reported[0] = row_of(path, {})[asked.metric]
    except _Pruned:
        state = "pruned"
    except TrainingStopped as error:
        state = "diverged"
        run.write_json(STOPPED, {"reason": str(error)})
    run.write_json(
        RECORD, {"settings": trial.params, "state": state, "values": reported}
    )


def ask(asked: Search, records: Sequence[dict[str, Any]]) -> Any:
    """The next trial of a study in memory that knows the recorded ones."""
    try:
        import optuna
    except ModuleNotFoundError:
        raise InputError('a search needs optuna: pip install "rfdlc[search]"') from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(
        seed=asked.seed + len(records), n_startup_trials=asked.startup
    )
    pruner = optuna.pruners.MedianPruner(n_startup_trials=asked.startup)
    study = optuna.create_study(
        direction=DIRECTIONS[asked.metric], sampler=sampler, pruner=pruner
    )
    space = {
        name: _distribution(optuna.distributions, name, own)
        for name, own in asked.space.items()
    }
    for record in records:
        values = {int(epoch): value for epoch, value in record["values"].items()}
        last = values[max(values)] if values and record["state"] != "diverged" else None
        given: dict[str, Any] = {
            "params": record["settings"],
            "distributions": space,
            "intermediate_values": values,
        }
        state = optuna.trial.TrialState[STATES[record["state"]]]
        study.add_trial(optuna.trial.create_trial(state=state, value=last, **given))
    return study.ask(space)


def _distribution(kinds: Any, name: str, own: list[Any] | Range) -> Any:
    if isinstance(own, list):
        plain = all(isinstance(value, str | int | float | bool) for value in own)
        expect(
            own and plain,
            f"search.space.{name}: expected numbers or texts, such as [0.05, 0.1]",
        )
        return kinds.CategoricalDistribution(own)
    inside = (
        own.low < own.high and (own.low > 0 or not own.log) and math.isfinite(own.high)
    )
    expect(
        inside,
        f"search.space.{name}: low {own.low}, high {own.high}: expected low < high, and"
        " low > 0 with log",
    )
    if own.integer:
        return kinds.IntDistribution(int(own.low), int(own.high), log=own.log)
    return kinds.FloatDistribution(own.low, own.high, log=own.log)

"""Sweeps: many trainings from one TOML file, each in a run folder of its own, here, on
Ray or one job at a time.

The run folders are all that a sweep remembers. Started again, it continues them, and
its table is the same.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rfdlc.errors import InputError, choose, expect
from rfdlc.imports import IMPORTED, import_own
from rfdlc.training.plans import OF_DATA, TABLE, Job, Plan, Row, row_of, write_rows
from rfdlc.training.settings import settings_where

ENGINES = ("local", "ray")
# Runs that differ in these are trained in turn
APART = settings_where(lambda setting: setting.starts_network)
MOST_RUNS, LONGEST_NAME = 10_000, 120
DEVIATION = "_deviation"  # behind the name of a metric
RETRIES = 3  # of a job on Ray whose worker has died


def sweep(
    file: str | Path,
    out: str | Path | None = None,
    *,
    engine: str = "local",
    address: str | None = None,
    runs_per_job: int = 1,
    job: int | None = None,
    networks: int = 24,
    collect: bool = False,
) -> list[Row]:
    """Train a grid of settings; each run is in a folder of its own.

    After an interruption, make the same call again: finished runs stay, unfinished ones
    are continued, and the table is the same.

    Parameters
    ----------
    file
        A TOML file with `data`, `settings` of all runs, and a `grid` or a list of
        `runs`.
    out
        The folder of the run folders and of `table.csv`; by default `out` of the file,
        or `runs/` and its name.
    engine, address
        `local`: side by side in this process. `ray`: as tasks of a cluster.
    runs_per_job, job
        For `ray` and `job`: how many runs one job trains side by side. `job` trains one
        of them, here, as a task of an array does.
    networks, collect
        The largest number of networks of a stack; `collect` trains nothing.

    Returns
    -------
    list of dict
        One row per run: its name, state and settings, and its metrics on held-out and
        on test data.
    """
    path = Path(file).expanduser()
    plan, folder = Plan.read(path), folder_of(path, out)
    choose("engine", engine, ENGINES)
    expect(runs_per_job >= 1, f"runs_per_job is {runs_per_job}: expected 1 or more")
    changes = plan.changes()
    expect(
        len(changes) <= MOST_RUNS,
        f"{path}: has {len(changes):,} runs: expected at most {MOST_RUNS:,}",
    )
    names, most = (
        names_of(changes),
        len(changes) if engine == "local" and job is None else runs_per_job,
    )
    parts = [
        group[at : at + most]
        for group in _groups(changes)
        for at in range(0, len(group), most)
    ]
    jobs = [
        plan.job(folder, [changes[i] for i in own], [names[i] for i in own])
        for own in parts
    ]
    if job is not None:
        expect(0 <= job < len(jobs), f"job is {job}: expected 0 to {len(jobs) - 1}")
        jobs[job].train(networks)
    elif engine == "ray" and not collect:
        _on_ray(jobs, address, networks)
    for each in jobs if engine == "local" and job is None and not collect else ():
        each.train(networks)
    rows = [
        row_of(folder / name, own) for name, own in zip(names, changes, strict=True)
    ]
    if job is None and folder.is_dir():
        write_rows(folder / TABLE, rows)
    return rows


def folder_of(file: str | Path, out: str | Path | None) -> Path:
    """Where a sweep keeps its runs."""
    path = Path(file).expanduser()
    return Path(out or Plan.read(path).out or Path("runs") / path.stem)


def names_of(changes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of run folders, by what is different in each run.

    >>> names_of([{"method": "ce", "seed": 0}, {"method": "ce", "seed": 1}, {}])
    ['method=ce,seed=0', 'method=ce,seed=1', 'run']
    """
    texts = [
        ",".join(f"{name}={value}" for name, value in own.items()) or "run"
        for own in changes
    ]
    names = [
        re.sub(r"[^\w.,=+-]+", "_", text)[:LONGEST_NAME].lstrip(".") for text in texts
    ]
    times = Counter(names)
    return [
        name if times[name] == 1 else f"{name}-{number}"
        for number, name in enumerate(names)
    ]


def _groups(changes: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Positions of runs that may be trained by one call: on the same data, with the
    same kind of network.
    """
    found: dict[str, list[int]] = {}
    for number, own in enumerate(changes):
        key = str(
            [
                (name, value)
                for name, value in sorted(own.items())
                if name.startswith(OF_DATA) or name in APART
            ]
        )
        found.setdefault(key, []).append(number)
    return list(found.values())


def _on_ray(jobs: Sequence[Job], address: str | None, networks: int) -> None:
    """One task per job, with a GPU of its own where the cluster has any. Ray tries
    again where a worker has died.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise InputError('engine=ray needs ray: pip install "rfdlc[ray]"') from None
    opened = not ray.is_initialized()
    if opened:
        ray.init(address=address, log_to_driver=False)
    try:
        gpus = 1 if ray.cluster_resources().get("GPU") else 0
        task = ray.remote(max_retries=RETRIES, num_cpus=1, num_gpus=gpus)(_train_in)
        ray.get([task.remote(os.getcwd(), IMPORTED, job, networks) for job in jobs])
    except ray.exceptions.RayTaskError as error:
        raise error.as_instanceof_cause() from None
    finally:
        if opened:
            ray.shutdown()


def _train_in(folder: str, imports: Sequence[str], job: Job, networks: int) -> None:
    """On a worker of Ray, to which relative paths must mean what they mean here."""
    with suppress(OSError):  # not there: absolute paths may be
        os.chdir(folder)
    import_own(imports)
    job.train(networks)


def summary(rows: Sequence[Row]) -> list[Row]:
    """Means and standard deviations over the finished seeds, with their number, best
    first by the held-out loss.

    >>> run = {"run": "a", "state": "finished", "lr": 1, "seed": 0, "held_out_nll": 1.0}
    >>> rows = [run, {**run, "run": "b", "seed": 2, "held_out_nll": 3.0}]
    >>> summary(rows)
    [{'lr': 1, 'seeds': 2, 'held_out_nll': 2.0,
      'held_out_nll_deviation': 1.4142135623730951}]
    """
    groups: dict[str, tuple[Row, list[Row]]] = {}
    for row in (row for row in rows if row["state"] == "finished"):
        own = {
            name: value
            for name, value in row.items()
            if name not in ("run", "state", "seed")
        }
        numbers = {
            name: own.pop(name)
            for name in list(own)
            if name.startswith(("held_out_", "test_"))
        }
        groups.setdefault(str(own), (own, []))[1].append(numbers)
    found = list[Row]()
    for own, each in groups.values():
        row = {**own, "seeds": len(each)}
        for name in each[0]:
            values = [numbers[name] for numbers in each]
            row[name] = fmean(values)
            row |= {f"{name}{DEVIATION}": stdev(values)} if len(values) > 1 else {}
        found.append(row)
    return sorted(found, key=lambda row: row.get("held_out_nll", 0.0))

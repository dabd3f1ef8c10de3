"""The command for many trainings: `rfdlc sweep`."""

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

import rfdlc
from rfdlc.cli.request import JsonOption
from rfdlc.cli.train import ready
from rfdlc.cli.writing import new_table, output

MOST_SHOWN = 20  # rows; the others are in table.csv


def sweep(
    grid: Annotated[Path, Argument(metavar="GRID.toml", help="Data, settings, and a grid, runs or a search.")],
    out: Annotated[Path | None, Option("--out", "-o", help="The folder of the runs; by default runs/GRID.")] = None,
    engine: Annotated[str, Option("--engine", help="local, ray, or slurm, which writes a script.")] = "local",
    address: Annotated[str | None, Option("--address", help="Of a Ray cluster; by default one here.")] = None,
    runs_per_job: Annotated[int, Option("--runs-per-job", help="For ray and slurm: runs side by side on a GPU.")] = 1,
    job: Annotated[int | None, Option("--job", help="Train one job, from 0, as a task of an array does.")] = None,
    networks: Annotated[int, Option("--networks", help="Most networks that are trained as one stack.")] = 24,
    collect: Annotated[bool, Option("--collect", help="Train nothing; write the table of what is there.")] = False,
    json: JsonOption = False,
) -> None:
    """Train a grid of settings, or search among them; each run is in a folder of its own.

    After an interruption, the same command continues. `table.csv` has one row per run.

    **Examples**

    - `rfdlc sweep grid.toml`
    - `rfdlc sweep grid.toml --engine ray --address auto --runs-per-job 8`
    - `rfdlc sweep grid.toml --out runs/grid --engine slurm`
    - `rfdlc sweep grid.toml --out runs/grid --collect`
    """
    with ready():
        from rfdlc.training.sweep import SCRIPT, folder_of, summary

        where: dict[str, Any] = {"engine": engine, "address": address, "runs_per_job": runs_per_job, "job": job}
        rows = rfdlc.sweep(grid, out, networks=networks, collect=collect, **where)
        folder = folder_of(grid, out)
    states = [row["state"] for row in rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    lines, found = [f"{len(rows)} runs: {counts}; {folder / 'table.csv'}"], summary(rows)
    if engine == "slurm":
        lines.append(f"next: sbatch {folder / SCRIPT}; then rfdlc sweep {grid} --out {folder} --collect")
    columns = list(dict.fromkeys(name for row in found for name in row))
    table = new_table(*columns, title="Means over seeds, by the held-out loss")
    for row in found[:MOST_SHOWN]:
        table.add_row(*(_cell(row.get(name, "")) for name in columns))
    output(json, {"folder": str(folder), "rows": rows}, *([table] if found else []), *lines)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

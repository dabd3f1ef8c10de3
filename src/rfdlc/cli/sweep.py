"""The command for many trainings: `rfdlc sweep`."""

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

import rfdlc
from rfdlc.cli.request import JsonOption
from rfdlc.cli.train import ready
from rfdlc.cli.writing import new_table, output
from rfdlc.errors import counted

MOST_SHOWN = 20  # rows; the others are in table.csv
METRICS = {"held_out_nll": "loss", "held_out_accuracy": "accuracy", "held_out_ece": "ECE"}  # and their headings
METRICS |= {"test_accuracy": "test accuracy", "test_tail_sensitive_utility": "test utility", "test_nll": "test loss"}
METRICS["test_ece"] = "test ECE"


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
    output(json, {"folder": str(folder), "rows": rows}, *(_means(found) if found else []), *lines)


def _means(found: list[dict[str, Any]]) -> list[Any]:
    """The settings that differ and as many metrics as the terminal has columns for, and what was left out."""
    from rich.console import Console

    own = [name for name in found[0] if name not in METRICS]
    names = [*own, *(name for name in METRICS if name in found[0])]
    shown = {name: [row.get(name, "") for row in found[:MOST_SHOWN]] for name in names}
    texts = {name: [f"{v:.4g}" if isinstance(v, float) else str(v) for v in values] for name, values in shown.items()}
    cells = {name: [METRICS.get(name, name), *texts[name]] for name in names}
    left = [counted(len(found) - MOST_SHOWN, "row")] * (len(found) > MOST_SHOWN)
    while len(names) > len(own) + 1 and sum(max(map(len, cells[name])) + 3 for name in names) > Console().width:
        left.insert(0, METRICS[names.pop()])
    title = "Means over seeds, on held-out data as if classes were equally frequent; the lowest loss first"
    table = new_table(*(cells[name][0] for name in names), title=title)
    for row in zip(*(cells[name][1:] for name in names), strict=True):
        table.add_row(*row)
    return [table, *([f"not shown, but in table.csv: {', '.join(left)}"] if left else [])]

"""The command for many trainings: `rfdlc sweep`."""

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

import rfdlc
from rfdlc.cli.request import FormatOption, JsonOption
from rfdlc.cli.train import ready
from rfdlc.cli.writing import new_table, output
from rfdlc.errors import counted

MOST_SHOWN = 20  # rows; the others are in table.csv
METRICS = {
    "held_out_nll": "loss",
    "held_out_accuracy": "accuracy",
    "held_out_ece": "ECE",
}  # and their headings
UTILITY = "test_tail_sensitive_utility"
METRICS |= {
    "test_accuracy": "test accuracy",
    UTILITY: "tail-sensitive test utility",
    "test_nll": "test loss",
}
METRICS["test_ece"] = "test ECE"
TITLE = (
    "Means ± standard deviations over seeds, on held-out data as if classes were"
    " equally frequent; lowest loss first"
)
EXPLAINED = (
    "tail-sensitive test utility: of the decisions for a penalty of -1, others than"
    " those of the test accuracy"
)


def sweep(
    grid: Annotated[
        Path,
        Argument(metavar="GRID.toml", help="Data, settings, and a grid or runs."),
    ],
    out: Annotated[
        Path | None,
        Option("--out", "-o", help="The folder of the runs; by default runs/GRID."),
    ] = None,
    engine: Annotated[str, Option("--engine", help="local or ray.")] = "local",
    address: Annotated[
        str | None, Option("--address", help="Of a Ray cluster; by default one here.")
    ] = None,
    runs_per_job: Annotated[
        int,
        Option("--runs-per-job", help="For ray and --job: runs side by side on a GPU."),
    ] = 1,
    job: Annotated[
        int | None,
        Option("--job", help="Train one job, from 0, as a task of an array does."),
    ] = None,
    networks: Annotated[
        int, Option("--networks", help="Most networks that are trained as one stack.")
    ] = 24,
    collect: Annotated[
        bool,
        Option("--collect", help="Train nothing; write the table of what is there."),
    ] = False,
    form: FormatOption = None,
    json: JsonOption = False,
) -> None:
    """Train a grid of settings; each run is in a folder of its own.

    After an interruption, the same command continues. `table.csv` has one row per run.

    **Examples**

    - `rfdlc sweep grid.toml`
    - `rfdlc sweep grid.toml --engine ray --address auto --runs-per-job 8`
    - `rfdlc sweep grid.toml --runs-per-job 8 --job "$SLURM_ARRAY_TASK_ID"`
    - `rfdlc sweep grid.toml --out runs/grid --collect --format latex`
    """
    with ready():
        from rfdlc.training.sweep import folder_of, summary

        where: dict[str, Any] = {
            "engine": engine,
            "address": address,
            "runs_per_job": runs_per_job,
            "job": job,
        }
        rows = rfdlc.sweep(grid, out, networks=networks, collect=collect, **where)
        folder = folder_of(grid, out)
    states = [row["state"] for row in rows]
    counts = ", ".join(
        f"{states.count(state)} {state}" for state in dict.fromkeys(states)
    )
    lines, found = (
        [f"{len(rows)} runs: {counts}; {folder / 'table.csv'}"],
        summary(rows),
    )
    shown = _means(found, form) if found else []
    output(
        json,
        {"folder": str(folder), "rows": rows, "means": found},
        *shown,
        *([] if form else lines),
    )


def _means(found: list[dict[str, Any]], form: str | None) -> list[Any]:
    """The settings that differ, metrics as far as the terminal has columns, and what
    was left out; or all, typeset.
    """
    from rich.console import Console

    from rfdlc.formats.table_writing import typeset
    from rfdlc.training.sweep import DEVIATION

    known = [name for name in METRICS if name in found[0]]
    own = [name for name in found[0] if name.removesuffix(DEVIATION) not in METRICS]

    def cell(row: dict[str, Any], name: str) -> str:
        value, deviation = row.get(name, ""), row.get(f"{name}{DEVIATION}")
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        return text if deviation is None else f"{text} ± {deviation:.2g}"

    rows, names = found if form else found[:MOST_SHOWN], [*own, *known]
    before = {
        name: "held-out " for name in METRICS if form and name.startswith("held_out")
    }  # there is no title
    heading = {name: before.get(name, "") + METRICS.get(name, name) for name in names}
    cells = {
        name: [heading[name], *(cell(row, name) for row in rows)] for name in names
    }
    if form:
        columns, *lines = zip(*cells.values(), strict=True)
        return [typeset(form, columns, lines, left=len(own) - 1)]
    left = [counted(len(found) - MOST_SHOWN, "row")] * (len(found) > MOST_SHOWN)
    while (
        len(names) > len(own) + 1
        and sum(max(map(len, cells[name])) + 3 for name in names) > Console().width
    ):
        left.insert(0, METRICS[names.pop()])
    told: dict[str, Any] = {
        "caption": EXPLAINED if UTILITY in names else None,
        "caption_justify": "left",
    }
    table = new_table(*(cells[name][0] for name in names), title=TITLE, **told)
    for row in zip(*(cells[name][1:] for name in names), strict=True):
        table.add_row(*row)
    return [
        table,
        *([f"not shown, but in table.csv: {', '.join(left)}"] if left else []),
    ]

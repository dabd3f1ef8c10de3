"""What a table still lacks, and the runs that would fill it."""

import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rfdlc.errors import InputError
from rfdlc.evidence import grids
from rfdlc.evidence.experiments import Experiment, run_grid
from rfdlc.evidence.grids import Grid
from rfdlc.evidence.results import PACKAGED
from rfdlc.evidence.tables import Table


def grids_for(tables: Sequence[Table]) -> list[Grid]:
    """The grids of the package, each cut to the runs of these tables that were not measured with all their seeds."""
    measured: dict[tuple[str, str], int] = {}
    for row in (row for table in tables for row in table.rows):
        measured[row.data, row.run] = min(row.seeds, measured.get((row.data, row.run), row.seeds))
    found = []
    for name in grids.names():
        grid = grids.read(name)
        wanted = Counter(run.name for stack in grid.stacks for run in stack if not run.hold_out)
        lacking = {run for run, seeds in wanted.items() if measured.get((grid.data.name, run), seeds) < seeds}
        stacks = tuple(tuple(run for run in stack if run.name in lacking) for stack in grid.stacks)
        if any(stacks):
            found.append(Grid(grid.name, grid.data, tuple(stack for stack in stacks if stack)))
    return found


def complete(tables: Sequence[Table], data: Path, runs: Path, out: Path) -> None:
    """Train and score what is missing. Grids that cannot run, for want of their data say, are named and left out."""
    wanted, failed = grids_for(tables), []
    for grid in wanted:
        try:
            run_grid(Experiment(grid, runs, out), data, say=_say)
        except InputError as error:
            failed.append(error)
            _say(f"{grid.name}: left out, {error}")
    if failed and len(failed) == len(wanted):
        raise InputError(f"nothing could be run: {failed[0]}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def own_copy(out: Path) -> Path:
    """A folder for new results: one that has none yet begins with what the package has."""
    if any(out.glob("*/figures.csv")):
        return out
    try:
        shutil.copytree(PACKAGED, out, dirs_exist_ok=True) if PACKAGED.exists() else out.mkdir(
            parents=True, exist_ok=True
        )
    except OSError as error:
        raise InputError(f"{out}: the folder for results cannot be made ({error.strerror}); choose another") from None
    return out

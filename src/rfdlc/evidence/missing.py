"""What a table still lacks, and the runs that would fill it."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rfdlc.errors import InputError
from rfdlc.evidence import grids
from rfdlc.evidence.experiments import Experiment, run_grid
from rfdlc.evidence.grids import Grid
from rfdlc.evidence.results import PACKAGED
from rfdlc.evidence.tables import Table


def grids_for(tables: Sequence[Table]) -> list[Grid]:
    """The grids of the package, each cut to the runs of these tables that were not measured."""
    absent = {(row.data, row.run) for table in tables for row in table.rows if not row.seeds}
    found = []
    for name in grids.names():
        grid = grids.read(name)
        stacks = tuple(tuple(run for run in stack if (grid.data.name, run.name) in absent) for stack in grid.stacks)
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
    """A folder for new results: one that is not there yet begins with what the package has."""
    if out.is_dir():
        return out
    try:
        shutil.copytree(PACKAGED, out) if PACKAGED.exists() else out.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"{out}: the folder for results cannot be made ({error.strerror}); choose another") from None
    return out

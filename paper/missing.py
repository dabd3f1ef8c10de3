"""What a table still lacks, and the runs that would fill it."""

import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from paper import grids
from paper.experiments import Experiment, run_grid
from paper.grids import Grid
from paper.results import PACKAGED, make_folder
from paper.tables import Table
from rfdlc.errors import InputError


def grids_for(tables: Sequence[Table]) -> list[Grid]:
    """The grids of the package, each cut to the runs of these tables that were not measured with all their seeds."""
    measured: dict[tuple[str, str], int] = {}
    for row in (row for table in tables for row in table.rows):
        measured[row.data, row.run] = min(row.seeds, measured.get((row.data, row.run), row.seeds))
    cut = [_lacking(grids.read(name), measured) for name in grids.names()]
    return [grid for grid in cut if grid.stacks]


def _lacking(grid: Grid, measured: Mapping[tuple[str, str], int]) -> Grid:
    """The grid without runs that no table wants or that have all their seeds."""
    wanted = Counter(run.name for stack in grid.stacks for run in stack if not run.hold_out)
    lacking = {run for run, seeds in wanted.items() if measured.get((grid.data.name, run), seeds) < seeds}
    return grid.cut(lambda run: run.name in lacking)


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
        shutil.copytree(PACKAGED, make_folder(out), dirs_exist_ok=True)
    except OSError as error:
        raise InputError(f"{out}: the package's results cannot be copied there ({error}); choose another") from None
    return out

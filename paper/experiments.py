"""Grids -> runs -> results: trains what is missing, scores every run, and writes its
rows when it is finished.
"""

import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from paper import grids, results
from paper.folders import RECORD, check_same, copy_light, provenance, write_record
from paper.grids import Grid, Wanted, run_settings
from paper.scoring import TASKS, score
from paper.tables import Table
from rfdlc import Dataset, InputError, Utility
from rfdlc.errors import choose, listing

LATE = (
    "weights",
    "utility",
    "penalty",
    "alpha",
)  # what the paper's method starts after `deferred`
SECONDS_A_NETWORK = (
    9  # ResNet-32, 200 epochs, in a stack on one H200: for the estimate alone
)


class Cost(NamedTuple):
    """Of a run alone, and in its stack, where it may share the beginning of another
    one.
    """

    alone: float
    here: float


def work(data_name: str, stack: Sequence[Wanted]) -> list[Cost]:
    """The cost of each run. Runs that differ only in what starts late share what comes
    before it.
    """
    from rfdlc.training.methods import resolve

    costs, begun = [], set()
    for run in stack:
        method, settings = resolve(run.method, data_name, run_settings(run))
        alone = (
            method.relative_cost(settings.epochs)
            / method.settings.get("particles", 1)
            * settings.particles
        )
        early = {
            key: value
            for key, value in run.settings.items()
            if key not in LATE or not settings.deferred
        }
        beginning = run.method, run.seed, run.hold_out, str(sorted(early.items()))
        costs.append(
            Cost(
                alone, alone * (1 - settings.deferred) if beginning in begun else alone
            )
        )
        begun.add(beginning)
    return costs


def estimate(grid: Grid) -> list[tuple[str, int, float]]:
    """For each stack its runs, how many there are, and their work."""
    return [
        (
            title(stack),
            len(stack),
            sum(cost.here for cost in work(grid.data.source, stack)),
        )
        for stack in grid.stacks
    ]


def title(stack: Sequence[Wanted]) -> str:
    """What a person reads of a stack."""
    return listing(dict.fromkeys(run.name for run in stack), 4)


def print_estimate(grid: Grid) -> None:
    """A line a stack, and the sum."""
    rows = estimate(grid)
    for runs, count, cost in rows:
        print(f"{count:4d} runs {cost:7.1f} network-trainings  {runs}")
    total = sum(cost for _, _, cost in rows)
    minutes = total * SECONDS_A_NETWORK / 60
    print(
        f"{grid.name}: {total:.0f} network-trainings, about {minutes:.0f} minutes of"
        " one H200 for ResNet-32, 200 epochs"
    )


class Experiment:
    """One grid, where its data, runs and results are, and what is left to do."""

    def __init__(
        self,
        grid: Grid,
        runs: Path,
        out: Path,
        logits: Path | None = None,
        commit: str = "",
        networks: int = 24,
        beside: int = 0,
    ) -> None:
        self.grid, self.out, self.commit, self.networks, self.beside = (
            grid,
            out,
            commit,
            networks,
            beside,
        )
        self.runs = runs / grid.data.name
        self.logits = None if logits is None else logits / grid.data.name

    def folder(self, wanted: Wanted) -> Path | None:
        """The finished folder of a run, or its light copy; nothing where there
        is none.
        """
        whole = self.runs / wanted.folder
        if (whole / "metrics.json").exists():
            return whole
        light = None if self.logits is None else self.logits / wanted.folder
        return light if light is not None and (light / RECORD).exists() else None

    def check(self) -> None:
        """What was trained already is what the grid means."""
        for run in (run for stack in self.grid.stacks for run in stack):
            folder = self.folder(run)
            if folder is not None:
                check_same(run, self.grid.data.recipe, folder)

    def calibration(self, wanted: Wanted) -> Path | None:
        """The run that calibrates this one: of the same seed, else any of the same
        name; whole rather than light.
        """
        places = [self.runs, *([] if self.logits is None else [self.logits])]
        found = [
            path.parent
            for place in places
            for path in sorted((place / wanted.name).glob("held-out-*/held-out.npz"))
        ]
        same = [path for path in found if path.name == f"held-out-{wanted.seed}"]
        return next(iter(same or found), None)

    def finished(self, stack: Sequence[Wanted]) -> set[tuple[str, int]]:
        """Runs that have their rows. One scored before that which calibrates it was
        trained has not all of them.
        """
        calibrated = {run.name for run in stack if run.hold_out}
        return results.finished(self.out, self.grid.data.name, calibrated)

    def missing(self, stack: Sequence[Wanted]) -> list[Wanted]:
        """What has to be trained: runs without rows and folder, and what calibrates
        those.
        """
        known = self.finished(stack)
        runs = [
            run
            for run in stack
            if not run.hold_out and (run.name, run.seed) not in known
        ]
        wanted = {run.name for run in runs}
        needed = [*runs, *(run for run in stack if run.hold_out and run.name in wanted)]
        return [run for run in needed if self.folder(run) is None]

    def train(self, missing: Sequence[Wanted], data: Dataset) -> None:
        """Train runs in one call, and note what it took."""
        from rfdlc.training.loop import TrainingStopped
        from rfdlc.training.train import RunSpec, train_many
        from rfdlc.training.trainer import TrainingInterrupted

        resumed = any(
            (self.runs / run.folder / "config.json").exists() for run in missing
        )
        began = time.perf_counter()
        plans = [self._plan(RunSpec, run, data) for run in missing]
        try:
            models = train_many(data, plans, networks=self.networks)
        except TrainingStopped as error:
            raise InputError(f"{title(missing)}: {error}") from None
        except (
            TrainingInterrupted
        ):  # its message is about one folder, which does not know its data
            raise TrainingInterrupted(
                "stopped; run the same command again to continue"
            ) from None
        seconds = time.perf_counter() - began
        costs = work(self.grid.data.source, missing)
        networks = sum(model.config.particles for model in models)
        for run, model, cost in zip(missing, models, costs, strict=True):
            share = (
                None
                if resumed
                else seconds * cost.alone / sum(each.here for each in costs)
            )
            parameters = sum(weight.numel() for weight in model.net.parameters())
            took = (
                {}
                if share is None
                else {"seconds": round(share, 2), "beside": self.beside}
            )
            record = {**took, "networks": networks, "parameters": parameters}
            write_record(
                self.runs / run.folder, self.grid.data.recipe, self.commit, **record
            )

    def _plan(self, plan: Any, run: Wanted, data: Dataset) -> Any:
        """What `train_many` takes; a class-sensitive utility becomes a file beside the
        runs.
        """
        settings = run_settings(run)
        task = settings.get("utility")
        if task in TASKS:
            self.runs.mkdir(parents=True, exist_ok=True)
            settings["utility"] = str((self.runs / f"{task}.csv").resolve())
            Utility.group_sensitive(data.classes, *TASKS[task]).to_csv(
                settings["utility"]
            )
        return plan(self.runs / run.folder, run.method, settings)

    def score(self, stack: Sequence[Wanted], again: bool = False) -> int:
        """Write the rows of every finished run of a stack that has none yet (or
        `again`); how many were scored.
        """
        known = set() if again else self.finished(stack)
        scored = []
        for run in stack:
            folder = (
                None
                if run.hold_out or (run.name, run.seed) in known
                else self.folder(run)
            )
            if folder is not None:
                found = score(folder, self.calibration(run), self.grid.data.target)
                scored.append(results.Scored(provenance(run, folder), *found))
        results.write(self.out, self.grid.data.name, scored)
        return len(scored)

    def finish(
        self, stack: Sequence[Wanted], logits_seeds: Sequence[int] | None, again: bool
    ) -> int:
        """Keep and score what was trained; how many runs were scored."""
        for run in stack:
            whole = self.runs / run.folder
            if (whole / "metrics.json").exists() and not (
                whole / RECORD
            ).exists():  # its stack was interrupted
                write_record(whole, self.grid.data.recipe, self.commit)
        self.keep_logits(stack, logits_seeds)
        return self.score(stack, again)

    def keep_logits(self, stack: Iterable[Wanted], seeds: Sequence[int] | None) -> None:
        """Light copies of finished folders: of the seeds asked for, and of all that
        calibrate.
        """
        for run in stack:
            whole, asked = (
                self.runs / run.folder,
                run.hold_out or seeds is None or run.seed in seeds,
            )
            light = None if self.logits is None else self.logits / run.folder
            if (
                light is not None
                and asked
                and (whole / RECORD).exists()
                and not light.exists()
            ):
                copy_light(whole, light)


# -- the command
# --------------------------------------------------------------------------------------


def run_grid(
    experiment: Experiment,
    data: Path,
    *,
    time_budget: float = float("inf"),
    logits_seeds: Sequence[int] | None = None,
    rescore: bool = False,
    say: Any = print,
) -> None:
    """Every stack in order: train what is missing, score it, write its rows. Nothing
    starts after the time budget.

    A stack is scored while the next one trains.
    """
    began, loaded = time.perf_counter(), None
    experiment.check()
    begun = experiment.out / experiment.grid.data.name
    for place in filter(
        None, (experiment.out, begun if begun.exists() else None, experiment.logits)
    ):
        results.make_folder(
            place
        )  # one that cannot be used fails here, before anything is trained
    with ThreadPoolExecutor(max_workers=1) as scorer:
        scoring = []
        for stack in experiment.grid.stacks:
            missing = [] if rescore else experiment.missing(stack)
            if missing and time.perf_counter() - began > time_budget:
                say(f"{title(stack)}: not started, the time budget is spent")
                continue
            if missing:
                loaded = loaded or experiment.grid.data.load(data)
                experiment.train(missing, loaded)
                say(
                    f"{title(stack)}: {len(missing)} trained,"
                    f" {time.perf_counter() - began:.0f} s"
                )
            scoring.append(
                scorer.submit(experiment.finish, stack, logits_seeds, rescore)
            )
        scored = sum(each.result() for each in scoring)
    say(f"{experiment.grid.name}: {scored} scored, {time.perf_counter() - began:.0f} s")


def only(wanted: Sequence[Grid], names: Sequence[str]) -> list[Grid]:
    """The grids, cut to the runs of these methods, or of these names; a grid without
    any is left out.
    """
    runs = [run for grid in wanted for stack in grid.stacks for run in stack]
    for name in names:
        choose(
            "--only",
            name,
            sorted({run.method for run in runs} | {run.name for run in runs}),
        )
    cut = [
        grid.cut(lambda run: run.method in names or run.name in names)
        for grid in wanted
    ]
    return [grid for grid in cut if grid.stacks]


# -- what tables still lack
# --------------------------------------------------------------------------------------


def grids_for(tables: Sequence[Table]) -> list[Grid]:
    """The grids of the package, each cut to the runs of these tables that were not
    measured with all their seeds.
    """
    measured: dict[tuple[str, str], int] = {}
    for row in (row for table in tables for row in table.rows):
        measured[row.data, row.run] = min(
            row.seeds, measured.get((row.data, row.run), row.seeds)
        )
    cut = [_lacking(grids.read(name), measured) for name in grids.names()]
    return [grid for grid in cut if grid.stacks]


def _lacking(grid: Grid, measured: Mapping[tuple[str, str], int]) -> Grid:
    """The grid without runs that no table wants or that have all their seeds."""
    wanted = Counter(
        run.name for stack in grid.stacks for run in stack if not run.hold_out
    )
    lacking = {
        run
        for run, seeds in wanted.items()
        if measured.get((grid.data.name, run), seeds) < seeds
    }
    return grid.cut(lambda run: run.name in lacking)


def complete(tables: Sequence[Table], data: Path, runs: Path, out: Path) -> None:
    """Train and score what is missing. Grids that cannot run, for want of their data
    say, are named and left out.
    """
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
    """A folder for new results: one that has none yet begins with what the
    package has.
    """
    if any(out.glob("*/metrics.csv")):
        return out
    try:
        shutil.copytree(results.PACKAGED, results.make_folder(out), dirs_exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{out}: the package's results cannot be copied there ({error}); choose"
            " another"
        ) from None
    return out

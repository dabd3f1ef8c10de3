"""Grids -> runs -> results: trains what is missing, scores every run, writes its rows as soon as it is finished.

    python -m paper.experiments cifar100 --data DIR --runs RUNS --out RESULTS
    python -m paper.experiments cifar100 --dry-run
    python -m paper.experiments cifar100 --runs RUNS --out RESULTS --rescore     # trains nothing

A run is finished when RESULTS has its rows, or when RUNS (or LOGITS) has its folder: a grid that was interrupted goes
on, and nothing is ever trained twice. A folder of other data, or with another share held out, is refused: after such a
change to a grid give its data another name. Test-set logits of all particles stay in the run folder. `--logits LOGITS`
keeps light copies of the folders, with logits as float16 and without weights; they can be scored as the folders can.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from paper import grids, results
from paper.costs import estimate, print_estimate, title, work
from paper.folders import RECORD, check_same, copy_light, provenance, write_record
from paper.grids import Grid, Wanted, run_settings
from paper.scoring import TASKS, score
from rfdlc.data.dataset import Dataset
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError, choose

STOPPED = "stopped; the same command goes on"


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
        self.grid, self.out, self.commit, self.networks, self.beside = grid, out, commit, networks, beside
        self.runs = runs / grid.data.name
        self.logits = None if logits is None else logits / grid.data.name

    def folder(self, wanted: Wanted) -> Path | None:
        """The finished folder of a run, or its light copy; nothing where there is none."""
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
        """The run that calibrates this one: of the same seed, else any of the same name; whole rather than light."""
        places = [self.runs, *([] if self.logits is None else [self.logits])]
        found = [
            path.parent for place in places for path in sorted((place / wanted.name).glob("held-out-*/held-out.npz"))
        ]
        same = [path for path in found if path.name == f"held-out-{wanted.seed}"]
        return next(iter(same or found), None)

    def finished(self, stack: Sequence[Wanted]) -> set[tuple[str, int]]:
        """Runs that have their rows. One scored before that which calibrates it was trained has not all of them."""
        calibrated = {run.name for run in stack if run.hold_out}
        return results.finished(self.out, self.grid.data.name, calibrated)

    def missing(self, stack: Sequence[Wanted]) -> list[Wanted]:
        """What has to be trained: runs without rows and folder, and what calibrates those."""
        known = self.finished(stack)
        runs = [run for run in stack if not run.hold_out and (run.name, run.seed) not in known]
        wanted = {run.name for run in runs}
        needed = [*runs, *(run for run in stack if run.hold_out and run.name in wanted)]
        return [run for run in needed if self.folder(run) is None]

    def train(self, missing: Sequence[Wanted], data: Dataset) -> None:
        """Train runs in one call, and note what it took."""
        from rfdlc.training.jobs.driving import TrainingInterrupted
        from rfdlc.training.loop import TrainingStopped
        from rfdlc.training.many import Plan, train_many

        resumed = any((self.runs / run.folder / "config.json").exists() for run in missing)
        began = time.perf_counter()
        plans = [self._plan(Plan, run, data) for run in missing]
        try:
            models = train_many(data, plans, networks=self.networks)
        except TrainingStopped as error:
            raise InputError(f"{title(missing)}: {error}") from None
        except TrainingInterrupted:  # its message is about one folder, which does not know its data
            raise TrainingInterrupted(STOPPED) from None
        seconds = time.perf_counter() - began
        costs = work(self.grid.data.source, missing)
        networks = sum(model.settings.particles for model in models)
        for run, model, cost in zip(missing, models, costs, strict=True):
            share = None if resumed else seconds * cost.alone / sum(each.here for each in costs)
            parameters = sum(weight.numel() for weight in model.net.parameters())
            took = {} if share is None else {"seconds": round(share, 2), "beside": self.beside}
            record = {**took, "networks": networks, "parameters": parameters}
            write_record(self.runs / run.folder, self.grid.data.recipe, self.commit, **record)

    def _plan(self, plan: Any, run: Wanted, data: Dataset) -> Any:
        """What `train_many` takes; a class-sensitive utility becomes a file beside the runs."""
        settings = run_settings(run)
        task = settings.get("utility")
        if task in TASKS:
            self.runs.mkdir(parents=True, exist_ok=True)
            settings["utility"] = str((self.runs / f"{task}.csv").resolve())
            Utility.group_sensitive(data.classes, *TASKS[task]).to_csv(settings["utility"])
        return plan(self.runs / run.folder, run.method, settings)

    def score(self, stack: Sequence[Wanted], again: bool = False) -> int:
        """Write the rows of every finished run of a stack that has none yet (or `again`); how many were scored."""
        known = set() if again else self.finished(stack)
        scored = []
        for run in stack:
            folder = None if run.hold_out or (run.name, run.seed) in known else self.folder(run)
            if folder is not None:
                found = score(folder, self.calibration(run), self.grid.data.target)
                scored.append(results.Scored(provenance(run, folder), *found))
        results.write(self.out, self.grid.data.name, scored)
        return len(scored)

    def finish(self, stack: Sequence[Wanted], logits_seeds: Sequence[int] | None, again: bool) -> int:
        """Keep and score what was trained; how many runs were scored."""
        for run in stack:
            whole = self.runs / run.folder
            if (whole / "metrics.json").exists() and not (whole / RECORD).exists():  # its stack was interrupted
                write_record(whole, self.grid.data.recipe, self.commit)
        self.keep_logits(stack, logits_seeds)
        return self.score(stack, again)

    def keep_logits(self, stack: Iterable[Wanted], seeds: Sequence[int] | None) -> None:
        """Light copies of finished folders: of the seeds asked for, and of all that calibrate."""
        for run in stack:
            whole, asked = self.runs / run.folder, run.hold_out or seeds is None or run.seed in seeds
            light = None if self.logits is None else self.logits / run.folder
            if light is not None and asked and (whole / RECORD).exists() and not light.exists():
                copy_light(whole, light)


# -- the command ------------------------------------------------------------------------------------------------------


def run_grid(
    experiment: Experiment,
    data: Path,
    *,
    time_budget: float = float("inf"),
    logits_seeds: Sequence[int] | None = None,
    rescore: bool = False,
    say: Any = print,
) -> None:
    """Every stack in order: train what is missing, score it, write its rows. Nothing starts after the time budget.

    A stack is scored while the next one trains.
    """
    began, loaded = time.perf_counter(), None
    experiment.check()
    begun = experiment.out / experiment.grid.data.name
    for place in filter(None, (experiment.out, begun if begun.exists() else None, experiment.logits)):
        results.make_folder(place)  # one that cannot be used fails here, before anything is trained
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
                say(f"{title(stack)}: {len(missing)} trained, {time.perf_counter() - began:.0f} s")
            scoring.append(scorer.submit(experiment.finish, stack, logits_seeds, rescore))
        scored = sum(each.result() for each in scoring)
    say(f"{experiment.grid.name}: {scored} scored, {time.perf_counter() - began:.0f} s")


def _only(wanted: Sequence[Grid], names: Sequence[str]) -> list[Grid]:
    """The grids, cut to the runs of these methods, or of these names; a grid without any is left out."""
    runs = [run for grid in wanted for stack in grid.stacks for run in stack]
    for name in names:
        choose("--only", name, sorted({run.method for run in runs} | {run.name for run in runs}))
    cut = [grid.cut(lambda run: run.method in names or run.name in names) for grid in wanted]
    return [grid for grid in cut if grid.stacks]


def _pairs(words: Sequence[str]) -> dict[str, str]:
    """Settings of `--set`. Without any, scoring needs no torch."""
    if not words:
        return {}
    from rfdlc.training.config import parse_pairs

    return parse_pairs(words)


def main(words: Sequence[str] | None = None) -> None:
    """The command line, with what is in the standard library alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", nargs="+", help=f"{', '.join(grids.names())}, or a TOML file")
    parser.add_argument("--data", "--root", type=Path, default=Path(), help="folder in which data sets are looked for")
    parser.add_argument("--runs", type=Path, default=Path("runs/evidence"), help="where run folders are")
    parser.add_argument("--out", type=Path, default=results.PACKAGED, help="where result CSVs are")
    parser.add_argument("--logits", type=Path, help="keep light copies of run folders here, and read them")
    parser.add_argument(
        "--logits-seeds", type=int, nargs="*", help="of these seeds only; what calibrates is always kept"
    )
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of the grid's")
    parser.add_argument("--only", nargs="+", metavar="METHOD", help="only runs of these methods or names")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="key=value", help="settings for every run, to try a grid"
    )
    parser.add_argument("--networks", type=int, default=24, help="the most networks that train as one stack")
    parser.add_argument("--commit", default="", help="commit to record, where there is no git")
    parser.add_argument(
        "--beside", type=int, default=0, help="so many other trainings share the machine: noted with the wall time"
    )
    parser.add_argument("--time-budget", type=float, default=float("inf"), help="start no stack after so many seconds")
    parser.add_argument("--rescore", action="store_true", help="score all folders again, train nothing")
    parser.add_argument("--dry-run", action="store_true", help="print all runs, and what training them costs")
    options = parser.parse_args(words)
    if options.beside < 0:
        raise InputError(f"--beside {options.beside}: expected 0 or more, how many other trainings there are")
    began = time.perf_counter()
    wanted = [grids.read(name, options.seeds, _pairs(options.set)) for name in options.grid]
    wanted = _only(wanted, options.only) if options.only else wanted
    for grid in wanted if not options.rescore else ():
        estimate(grid)  # a method or setting that cannot be fails here, before anything is trained
    for grid in wanted:
        if options.dry_run:
            print_estimate(grid)
            continue
        where = options.runs, options.out, options.logits
        experiment = Experiment(grid, *where, options.commit, options.networks, options.beside)
        run_grid(
            experiment,
            options.data,
            time_budget=options.time_budget - (time.perf_counter() - began),
            logits_seeds=options.logits_seeds,
            rescore=options.rescore,
            say=lambda line: print(line, flush=True),
        )


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    except ModuleNotFoundError as error:
        print(f'{error}; training needs more: pip install "rfdlc[train]"', file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        raise SystemExit(130) from None

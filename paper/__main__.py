"""The study's command line: `python -m paper tables`, `page`, `figures` and `run`."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paper import grids, page, rendering
from paper.results import PACKAGED, Results
from paper.specs import SPECS
from paper.tables import build
from rfdlc import InputError
from rfdlc.errors import choose

RUNS = Path("runs/paper")
STOPPED = "stopped; run the same command again to continue"


def tables(options: argparse.Namespace) -> None:
    """Print tables: measured and published values, their difference, and where they
    disagree.
    """
    wanted = [choose("table", options.table, SPECS)] if options.table else list(SPECS)
    if options.list:
        print("\n".join(f"{name:20s} {SPECS[name].title}" for name in wanted))
        return
    folder = options.results or PACKAGED
    if options.run:
        from paper.experiments import complete, own_copy

        folder = own_copy(options.results or Path("results"))
        complete(
            [build(name, Results(folder)) for name in wanted],
            options.data,
            options.runs,
            folder,
        )
    found = _measured(folder)
    print(
        rendering.FORMS[options.form]([build(name, found) for name in wanted]), end=""
    )


def print_page(options: argparse.Namespace) -> None:
    """Print docs/evidence.md."""
    print(page.text(_measured(options.results or PACKAGED)), end="")


def figures(options: argparse.Namespace) -> None:
    """Draw every figure as PNG and SVG."""
    from paper.plots import draw_all

    _measured(options.results or PACKAGED)
    print(
        "\n".join(
            str(path) for path in draw_all(options.results or PACKAGED, options.folder)
        )
    )


def _measured(folder: Path) -> Results:
    if not any(folder.glob("*/metrics.csv")):
        problem = (
            "it has no results (DATA/metrics.csv)"
            if folder.is_dir()
            else "there is no such folder"
        )
        raise InputError(
            f"--results {folder}: {problem}; omit it to use the committed results"
        )
    return Results(folder)


def run(options: argparse.Namespace) -> None:
    """Train the missing runs of grids and score them; each run's rows are written as
    soon as it is finished.

    A run is finished when the results have its rows, or when --runs (or --logits) has
    its folder: an interrupted grid continues, and nothing is trained twice. A folder
    that was trained on other data, or with another share held out, is refused: after
    such a change to a grid, give its data another name.
    """
    from paper.experiments import Experiment, estimate, only, print_estimate, run_grid

    if options.beside < 0:
        raise InputError(
            f"--beside {options.beside}: expected 0 or more, the number of other"
            " trainings"
        )
    began = time.perf_counter()
    wanted = [
        grids.read(name, options.seeds, _settings(options.set)) for name in options.grid
    ]
    wanted = only(wanted, options.only) if options.only else wanted
    for grid in wanted if not options.rescore else ():
        estimate(
            grid
        )  # an unknown method or setting fails here, before anything is trained
    for grid in wanted:
        if options.dry_run:
            print_estimate(grid)
            continue
        where = options.runs, options.results or PACKAGED, options.logits
        experiment = Experiment(
            grid, *where, options.commit, options.networks, options.beside
        )
        run_grid(
            experiment,
            options.data,
            time_budget=options.time_budget - (time.perf_counter() - began),
            logits_seeds=options.logits_seeds,
            rescore=options.rescore,
            say=lambda line: print(line, flush=True),
        )


def _settings(words: Sequence[str]) -> dict[str, str]:
    """Settings of `--set`. Without any, scoring needs no torch."""
    if not words:
        return {}
    from rfdlc.training.config import parse_pairs

    return parse_pairs(words)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m paper", description="The paper's tables, rerun."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, action: Callable[[argparse.Namespace], None], examples: Sequence[str]
    ) -> Callable[..., Any]:
        epilog = "examples:\n" + "\n".join(
            f"  python -m paper {words}" for words in examples
        )
        made = commands.add_parser(
            name,
            help=str(action.__doc__).splitlines()[0],
            description=action.__doc__,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.set_defaults(action=action)
        made.add_argument(
            "--results",
            type=Path,
            help="folder of result CSVs; by default the committed ones",
        )
        return made.add_argument

    add = command(
        "tables",
        tables,
        ["tables fhr", "tables --list", "tables accuracy --form markdown"],
    )
    add("table", nargs="?", help="one table; without it, all of them")
    add(
        "--form",
        choices=list(rendering.FORMS),
        default="text",
        help="default: %(default)s",
    )
    add("--list", action="store_true", help="only print the names of the tables")
    add(
        "--run",
        action="store_true",
        help="first train and score missing runs, into a copy in `results`",
    )
    _add_places(add)
    command("page", print_page, ["page > docs/evidence.md"])
    add = command("figures", figures, ["figures docs/figures"])
    add("folder", type=Path, help="folder that the figures are written to")
    add = command(
        "run",
        run,
        ["run cifar100 --data DIR", "run cifar100 --dry-run", "run cifar100 --rescore"],
    )
    add("grid", nargs="+", help=f"{', '.join(grids.names())}, or a TOML file")
    _add_places(add)
    add(
        "--logits",
        type=Path,
        help=(
            "keep copies of run folders here, with logits as float16 and without"
            " weights"
        ),
    )
    add(
        "--logits-seeds",
        type=int,
        nargs="*",
        help="seeds to copy; runs that calibrate are always copied",
    )
    add("--seeds", type=int, nargs="+", help="instead of the grid's seeds")
    add(
        "--only",
        nargs="+",
        metavar="METHOD",
        help="only runs of these methods, or with these names",
    )
    add(
        "--set",
        nargs="*",
        default=[],
        metavar="key=value",
        help="settings of every run, to try a grid",
    )
    add(
        "--networks",
        type=int,
        default=24,
        help="maximum number of networks that are trained as one stack",
    )
    add("--commit", default="", help="commit to record, where git is missing")
    add(
        "--beside",
        type=int,
        default=0,
        help="number of other trainings on this machine, recorded with the wall time",
    )
    add(
        "--time-budget",
        type=float,
        default=float("inf"),
        help="start no stack after this many seconds",
    )
    add(
        "--rescore",
        action="store_true",
        help="score all folders again and train nothing",
    )
    add(
        "--dry-run",
        action="store_true",
        help="print the runs and the cost of training them",
    )
    return parser


def _add_places(add: Callable[..., Any]) -> None:
    add(
        "--data",
        "--root",
        type=Path,
        default=Path(),
        help="folder that contains the data sets",
    )
    add(
        "--runs",
        type=Path,
        default=RUNS,
        help="folder of run folders, default: %(default)s",
    )


def main(words: Sequence[str] | None = None) -> None:
    """Run one command."""
    options = _parser().parse_args(words)
    options.action(options)


if __name__ == "__main__":
    try:
        main()
    except (InputError, ModuleNotFoundError) as error:
        hint = (
            '; training needs more: pip install "rfdlc[train]"'
            if isinstance(error, ModuleNotFoundError)
            else ""
        )
        print(f"{error}{hint}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        raise SystemExit(130) from None

"""`rfdlc reproduce`: the paper's tables, measured beside published."""

from pathlib import Path
from typing import Annotated

import typer

from rfdlc.cli.request import JsonOption
from rfdlc.cli.writing import print_json
from rfdlc.errors import InputError, choose


def reproduce(
    table: Annotated[str | None, typer.Argument(metavar="TABLE", help="One table; without it, all of them.")] = None,
    run: Annotated[bool, typer.Option("--run", help="Train and score what is missing first (needs data).")] = False,
    data: Annotated[Path, typer.Option("--data", "--root", help="Folder in which data sets are looked for.")] = Path(),
    runs: Annotated[Path, typer.Option("--runs", help="Where run folders are kept.")] = Path("runs/evidence"),
    results: Annotated[
        Path | None,
        typer.Option("--results", help="Result CSVs; by default the package's, with --run a copy in `results`."),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="As Markdown.")] = False,
    latex: Annotated[bool, typer.Option("--latex", help="As LaTeX.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="As CSV, one line a figure.")] = False,
    json: JsonOption = False,
    names: Annotated[bool, typer.Option("--list", help="Only name the tables.")] = False,
    figures: Annotated[Path | None, typer.Option("--figures", help="Draw all figures into this folder.")] = None,
) -> None:
    """Print the paper's tables: published and measured figures, their difference, and where they disagree.

    Figures come from the CSV files of the package; `--run` trains what is not there yet, given the data.

    **Examples**

    - `rfdlc reproduce fhr`
    - `rfdlc reproduce --list`
    - `rfdlc reproduce accuracy --markdown`
    - `rfdlc reproduce --figures docs/figures`
    - `rfdlc reproduce fhr --run --data data`
    """
    from paper import page, rendering
    from paper.results import PACKAGED, Results
    from paper.specs import SPECS
    from paper.tables import build

    chosen = [form for form, asked in {"markdown": markdown, "latex": latex, "csv": csv, "json": json}.items() if asked]
    if len(chosen) > 1:
        raise InputError(f"--{chosen[0]} and --{chosen[1]} cannot both be shown: choose one")
    wanted = [choose("table", table, SPECS)] if table else list(SPECS)
    if names:
        titles = {name: SPECS[name].title for name in wanted}
        if json:
            print_json({"tables": titles})
        else:
            print("\n".join(f"{name:20s} {title}" for name, title in titles.items()))
        return
    folder = results or PACKAGED
    if run:
        from rfdlc.cli.train import ready

        with ready():
            from paper.missing import complete, own_copy

            folder = own_copy(results or Path("results"))
            complete([build(name, Results(folder)) for name in wanted], data, runs, folder)
    if not any(folder.glob("*/figures.csv")):
        lacking = "nothing measured in it (DATA/figures.csv)" if folder.is_dir() else "no such folder"
        raise InputError(f"--results {folder}: {lacking}; leave it out for the package's own results")
    if figures is not None:
        from paper.plots import draw_all

        paths = [str(path) for path in draw_all(folder, figures)]
        if json:
            print_json({"figures": paths})
        else:
            print("\n".join(paths))
        return
    found = Results(folder)
    if chosen == ["markdown"] and not table:
        print(page.text(found), end="")
        return
    print(rendering.FORMS[chosen[0] if chosen else "text"]([build(name, found) for name in wanted]), end="")

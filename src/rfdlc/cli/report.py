"""`rfdlc report`, `rfdlc plot` and `rfdlc compare`: the HTML report, figures for papers, paired differences."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from rfdlc.cli.request import JsonOption, Request, takes_request
from rfdlc.cli.writing import check_writable, escaped, print_json, print_rich

if TYPE_CHECKING:
    from rfdlc.integrations.report.runs import ReportRun

Files = Annotated[
    list[Path],
    Argument(
        help="Run folders, or predictions with a `target` column (CSV, Parquet, `.npz`), shown side by side.",
        show_default=False,
    ),
]


@takes_request
def report(
    files: Files,
    request: Request,
    out: Annotated[Path, Option("--out", "-o", help="The HTML file to write.")] = Path("report.html"),
    title: Annotated[str | None, Option(help="Heading of the report.")] = None,
    images: Annotated[Path | None, Option(help="Folder with the image files named by the ids, for thumbnails.")] = None,
    bootstrap: Annotated[int, Option(help="Resamples for 95% intervals; 0 for none.")] = 200,
    seed: Annotated[int, Option(min=0, help="Seed of the bootstrap and of the embedded samples.")] = 0,
    json: JsonOption = False,
) -> None:
    """Write one HTML file in which the utility can be edited; it opens offline in any browser.

    **Examples**

    - `rfdlc report runs/a -o report.html`
    - `rfdlc report runs/a runs/b --utility U.csv -o report.html`
    - `rfdlc report probs.csv --classes counts.csv --utility tail-sensitive --abstain 0.2 --calibrate val.csv`
    """
    from rfdlc.integrations.report.report import write_report

    check_writable(out, endings=(".html", ".htm"))
    runs = _prepare(files, request)
    evaluations = write_report(runs, out, images=images, title=title, bootstrap=bootstrap, seed=seed)
    if json:
        runs_json = {name: evaluation.to_dict() for name, evaluation in evaluations.items()}
        print_json({"out": str(out), "bytes": out.stat().st_size, "runs": runs_json})
        return
    for name, evaluation in evaluations.items():
        print_rich(f"[bold]{escaped(name)}[/bold]", evaluation)
    print_rich(f"Written to {escaped(out)}: open it in a browser.")


@takes_request
def plot(
    files: Files,
    kind: Annotated[str, Option("--kind", "-k", help="frontier, reliability, tail, confusion or risk-coverage.")],
    request: Request,
    out: Annotated[Path, Option("--out", "-o", help="The file to write: .svg, .pdf or .png.")] = Path("figure.svg"),
    json: JsonOption = False,
) -> None:
    """Draw one figure for a paper or a slide; several runs are drawn together.

    **Examples**

    - `rfdlc plot runs/a --kind reliability -o reliability.svg`
    - `rfdlc plot runs/a runs/b --kind frontier -o frontier.pdf`
    - `rfdlc plot probs.csv --classes counts.csv --kind tail -o tail.png`
    """
    from rfdlc.integrations.report import plots

    check_writable(out)
    plots.check(kind, out)
    plots.draw(_prepare(files, request), kind, out)
    if json:
        print_json({"out": str(out), "kind": kind, "runs": [str(file) for file in files]})
    else:
        print_rich(f"Written to {escaped(out)}.")


@takes_request
def compare(
    a: Annotated[str, Argument(help="A run folder or predictions with a `target` column; several seeds with commas.")],
    b: Annotated[str, Argument(help="The same for the other side: the same test samples.")],
    request: Request,
    bootstrap: Annotated[int, Option(help="Resamples for metrics that are not means.")] = 300,
    seed: Annotated[int, Option(min=0, help="Seed of the bootstrap.")] = 0,
    json: JsonOption = False,
) -> None:
    """Paired differences B - A of every metric with 95% intervals, and p adjusted for the number of metrics.

    **Examples**

    - `rfdlc compare runs/a runs/b --utility U.csv`
    - `rfdlc compare a/0,a/1,a/2 b/0,b/1,b/2 --json`
    """
    from rfdlc.integrations.report.runs import compare_runs

    first = [Path(name) for name in a.split(",")]
    runs = _prepare([*first, *(Path(name) for name in b.split(","))], request)
    found = compare_runs(runs[: len(first)], runs[len(first) :], bootstrap, seed)
    if json:
        print_json(found.to_dict())
    else:
        print_rich(found)


def _prepare(files: list[Path], request: Request) -> "list[ReportRun]":
    """Each file with the same options, as `evaluate` reads them."""
    from rfdlc.integrations.report.runs import alike, prepared, run_names

    names = run_names(files)
    return alike([prepared(name, *request.prepare(file), file) for file, name in zip(files, names, strict=True)])

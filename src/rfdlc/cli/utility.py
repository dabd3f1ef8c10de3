"""`rfdlc utility new` writes a matrix to edit; `rfdlc utility show` prints one in
colour.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from rfdlc.cli.decisions import threshold_lines, thresholds
from rfdlc.cli.reading import BUILDERS, read_classes, read_utility
from rfdlc.cli.request import AbstainOption, Force, JsonOption, PenaltyOption
from rfdlc.cli.writing import check_writable, new_table, output
from rfdlc.errors import choose, expect, listing
from rfdlc.formats.files import replacing

app = typer.Typer(
    help="Write and look at utility matrices U[true, action].", no_args_is_help=True
)

CLASSES = (
    "`cat,dog,newt`, CSV with columns class,count, JSON, a run folder, or predictions."
)
SHOWN = 30  # a larger matrix is summarised


@app.command("new")
def new(
    out: Annotated[Path, Argument(help="The CSV file to write.")],
    classes: Annotated[str, Option("--classes", "-c", help=CLASSES)],
    kind: Annotated[
        str,
        Option("--kind", "-k", help="`one-hot`, or `tail-sensitive` (needs counts)."),
    ] = "one-hot",
    penalty: PenaltyOption = None,
    abstain: AbstainOption = None,
    force: Force = False,
    json: JsonOption = False,
) -> None:
    """Write a utility as a CSV template: rows are true classes, columns are actions.
    Edit the numbers.

    **Examples**

    - `rfdlc utility new U.csv --classes healthy,ill --abstain 0.2`
    - `rfdlc utility new U.csv --classes counts.csv --kind tail-sensitive --penalty
      -0.5`
    - `rfdlc utility new U.csv --classes probs.csv`
    """
    check_writable(out, force=force)
    utility = read_utility(
        choose("kind", kind, BUILDERS), read_classes(classes), penalty=penalty
    )
    if abstain is not None:
        utility = utility.with_abstain(abstain)
    with replacing(out) as beside:
        utility.to_csv(beside)
    following = (
        f"Written to {out}: edit the numbers, then rfdlc decide FILE --utility {out}"
    )
    output(json, {"out": str(out)} | utility.to_dict(), _heat_map(utility), following)


@app.command("show")
def show(
    file: Annotated[
        Path | None, Argument(help="A utility as CSV.", show_default=False)
    ] = None,
    costs: Annotated[
        Path | None, Option(help="CSV of costs instead of utilities: U = -cost.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Print a utility matrix in colour: green is gain, red is loss. With two classes
    and actions, the threshold, too.

    **Examples**

    - `rfdlc utility show U.csv`
    - `rfdlc utility show --costs costs.csv`
    """
    given = [str(path) for path in (file, costs) if path is not None]
    expect(
        len(given) == 1,
        f"got {listing(given) or 'no table'}: expected one, a utility or --costs FILE",
    )
    utility = read_utility(given[0], None, costs=costs is not None)
    output(
        json,
        utility.to_dict() | thresholds(utility),
        _heat_map(utility, costs is not None),
        *threshold_lines(utility),
    )


def _heat_map(utility: Any, costs: bool = False) -> Any:
    from rich.text import Text

    if max(utility.matrix.shape) > SHOWN:
        return repr(utility)
    scale = float(abs(utility.matrix).max()) or 1.0
    what = "Costs" if costs else "Utility"
    table = new_table(
        "true",
        *utility.actions,
        title=f"{what}: rows are the true class, columns the action",
    )
    for name, row in zip(utility.classes.names, utility.matrix, strict=True):
        shown = 0.0 - row if costs else row
        cells = (
            Text(f"{value:g}", style=_shade(own / scale))
            for value, own in zip(shown, row, strict=True)
        )
        table.add_row(name, *cells)
    return table


def _shade(value: float) -> str:
    """Green or red, the stronger the farther from 0."""
    strong = int(90 + 110 * abs(value))
    return (
        f"black on rgb(60,{strong},60)"
        if value > 0
        else f"white on rgb({strong},40,40)"
        if value < 0
        else "dim"
    )

"""Commands about data: `rfdlc inspect`."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rfdlc.cli.request import JsonOption
from rfdlc.cli.train import Root, Source
from rfdlc.cli.writing import check_writable, escaped, print_json
from rfdlc.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from rfdlc.data.inspection import Inspection, Region

MOST_CLASSES, ENDS = 30, 8  # up to this many classes are all listed; of more, this many from either end
BAR = 24


def inspect(
    source: Source,
    root: Root = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture of the tail, such as tail.png.")] = None,
    skip_broken: Annotated[
        bool, typer.Option("--skip-broken", help="Leave out broken files and rows, and report them.")
    ] = False,
    target: Annotated[str | None, typer.Option(metavar="COLUMN", help="The class column of a table.")] = None,
    groups: Annotated[
        str | None,
        typer.Option(metavar="FILE_OR_COLUMN", help="Samples that belong together: a CSV file or a column of a table."),
    ] = None,
    drop: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Leave out a column; may be repeated.")
    ] = None,
    labels: Annotated[Path | None, typer.Option(help="The labels of an .npy file of features.")] = None,
    factor: Annotated[float | None, typer.Option(help="Imbalance factor of a data set that is subsampled.")] = None,
    profile: Annotated[str | None, typer.Option(help="exponential or step.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Side of the images in pixels.")] = None,
    test_fraction: Annotated[float | None, typer.Option(help="Fraction held out where there is no test split.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of everything that is drawn.")] = None,
    json: JsonOption = False,
) -> None:
    """Show the classes and the tail of a data set, and what is wrong with it: duplicates, leaks, broken files.

    **Examples**

    - `rfdlc inspect digits-lt`
    - `rfdlc inspect cifar100-lt --root data --plot tail.png`
    - `rfdlc inspect dermamnist --root data --groups lesions.csv`
    - `rfdlc inspect photos/ --skip-broken --json`
    - `rfdlc inspect patients.csv --target diagnosis --groups patient`
    """
    from rfdlc.data.inspection import Inspection, plot_tail
    from rfdlc.data.load import load

    if plot is not None:
        check_writable(plot)
    options: dict[str, Any] = {"root": root, "target": target, "groups": groups, "drop": drop or None, "labels": labels}
    options |= {"factor": factor, "profile": profile, "image_size": image_size, "test_fraction": test_fraction}
    options |= {"seed": seed, "skip_broken": skip_broken or None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # each is among the notes, which are shown
        data = load(source, **{name: value for name, value in options.items() if value is not None})
    found = Inspection.of(data)
    if plot is not None:
        plot_tail(data.classes, plot, data.name)
    if json:
        print_json(found.to_dict())
    else:
        _show(found, plot)
    if found.leaks.broken and not skip_broken:
        raise InputError(
            f"{found.leaks.broken[0]}; {len(found.leaks.broken)} files are broken: repair or remove them, "
            "or leave them out with --skip-broken"
        )


def _show(found: "Inspection", plot: Path | None) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    data = found.data
    shape = "x".join(map(str, data.input_shape))
    splits = ", ".join(f"{len(split):,} {name}" for name, split in data.splits.items())
    console.print(f"\n[bold]{escaped(data.name)}[/]: {data.kind} {shape}, {len(data.classes):,} classes; {splits}")
    console.print(f"Imbalance factor [bold]{data.classes.imbalance_factor:,.1f}[/] (largest over smallest class)\n")
    console.print(_class_table(found))
    console.print(_region_table(found.thirds + found.shots, len(data.train)))
    _show_checks(console, found)
    if plot is not None:
        console.print(f"The picture of the tail is in [bold]{escaped(plot)}[/]")


def _class_table(found: "Inspection") -> "Table":
    from rich import box
    from rich.table import Table

    classes, splits = found.data.classes, found.data.splits
    table = Table(box=box.SIMPLE_HEAD, title="Classes by training samples", title_justify="left", title_style="bold")
    table.add_column("rank", justify="right")
    table.add_column("class", overflow="fold")
    for split in splits:
        table.add_column(split, justify="right")
    table.add_column("region")
    table.add_column("")
    counts = {split: found.counts(split) for split in splits}
    region = {int(c): name for name, members in classes.thirds.items() for c in members}
    most = max(1, int(counts["train"].max()))
    order = classes.order.tolist()
    shown = order if len(order) <= MOST_CLASSES else order[:ENDS] + order[-ENDS:]
    for place, c in enumerate(shown):
        if len(shown) < len(order) and place == ENDS:
            table.add_row("...", f"{len(order) - 2 * ENDS:,} more", *["..."] * len(splits), "", "")
        numbers = [f"{counts[split][c]:,}" for split in splits]
        bar = "█" * max(1, round(BAR * counts["train"][c] / most)) if counts["train"][c] else ""
        table.add_row(
            str(classes.rank[c]), escaped(classes.names[c]), *numbers, region[c], f"[{COLOURS[region[c]]}]{bar}[/]"
        )
    return table


COLOURS = {"head": "blue", "med": "green", "tail": "red"}


def _region_table(regions: "list[Region]", samples: int) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title="Regions", title_justify="left", title_style="bold")
    table.add_column("region")
    for heading in ("classes", "samples", "share", "samples per class"):
        table.add_column(heading, justify="right")
    for region in regions:
        span = f"{region.least:,}" if region.least == region.most else f"{region.least:,} to {region.most:,}"
        share = f"{region.samples / samples:.1%}"
        table.add_row(MEANING[region.name], f"{region.classes:,}", f"{region.samples:,}", share, span)
        if region.name == "tail":
            table.add_section()
    return table


MEANING = {
    "head": "head (first third)",
    "med": "med (second third)",
    "tail": "tail (last third)",
    "many": "many (over 100)",
    "medium": "medium (20 to 100)",
    "few": "few (under 20)",
}


def _show_checks(console: "Console", found: "Inspection") -> None:
    data, leaks = found.data, found.leaks
    console.print("[bold]Checks[/]")
    several = len(data.splits) > 1
    if several:
        _check(console, leaks.across_splits, "no sample is in two splits", "samples are in more than one split")
    _check(console, leaks.across_labels, "no sample has two labels", "samples occur with more than one label")
    if leaks.groups_across_splits is None:
        console.print("  [dim]-[/] groups are not known: name lesions, patients or tracks with --groups")
    elif several:
        _check(console, leaks.groups_across_splits, "no group is in two splits", "groups are in more than one split")
    _check(console, leaks.broken, "every sample can be read", "files cannot be read")
    if leaks.repeated:
        console.print(f"  [dim]-[/] {leaks.repeated:,} different samples occur more than once, in any split")
    if data.skipped:
        _check(console, data.skipped, "", "broken files, lines or folders were skipped")
    for note in data.notes:
        console.print(f"  [dim]-[/] {escaped(note)}")


def _check(console: "Console", wrong: tuple[str, ...], fine: str, bad: str) -> None:
    if not wrong:
        console.print(f"  [green]✓[/] {fine}")
        return
    from rfdlc.errors import listing

    console.print(f"  [yellow]![/] [bold]{len(wrong):,}[/] {bad}: {escaped(listing(wrong, 3))}")

"""Commands about data: `rfdlc inspect`."""

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from rfdlc.cli.request import JsonOption
from rfdlc.cli.train import Root, Source
from rfdlc.cli.writing import check_writable, escaped, new_table, print_json, print_rich
from rfdlc.errors import expect, listing

if TYPE_CHECKING:
    from rfdlc.data.inspection import Inspection

MOST_CLASSES, ENDS, BAR = 30, 8, 24  # of more classes, this many from either end are listed
COLOURS = {"head": "blue", "med": "green", "tail": "red"}
MEANING = {
    "head": "head (first third)", "med": "med (second third)", "tail": "tail (last third)",
    "many": "many (over 100)", "medium": "medium (20 to 100)", "few": "few (under 20)",
}  # fmt: skip


def inspect(
    source: Source,
    root: Root = None,
    plot: Annotated[Path | None, Option(help="Write a picture of the tail, such as tail.png.")] = None,
    skip_broken: Annotated[bool, Option("--skip-broken", help="Leave out broken files and rows, report them.")] = False,
    target: Annotated[str | None, Option(metavar="COLUMN", help="The class column of a table.")] = None,
    groups: Annotated[str | None, Option(help="CSV file or column of a table: samples that belong together.")] = None,
    drop: Annotated[list[str] | None, Option(metavar="COLUMN", help="Leave out a column; may be repeated.")] = None,
    labels: Annotated[Path | None, Option(help="The labels of an .npy file of features.")] = None,
    factor: Annotated[float | None, Option(help="Imbalance factor of a data set that is subsampled.")] = None,
    profile: Annotated[str | None, Option(help="exponential or step.")] = None,
    image_size: Annotated[int | None, Option(help="Side of the images in pixels.")] = None,
    test_fraction: Annotated[float | None, Option(help="Fraction held out where there is no test split.")] = None,
    seed: Annotated[int | None, Option(min=0, help="Seed of everything that is drawn.")] = None,
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
    broken = found.leaks.broken
    hint = "repair or remove them, or leave them out with --skip-broken"
    expect(skip_broken or not broken, f"{''.join(broken[:1])}; {len(broken)} files are broken: {hint}")


def _show(found: "Inspection", plot: Path | None) -> None:
    from rich.box import SIMPLE_HEAD

    data, style = found.data, {"box": SIMPLE_HEAD, "title_style": "bold"}
    shape = "x".join(map(str, data.input_shape))
    splits = ", ".join(f"{len(split):,} {name}" for name, split in data.splits.items())
    factor = f"{data.classes.imbalance_factor:,.1f}"
    print_rich(
        f"\n[bold]{escaped(data.name)}[/]: {data.kind} {shape}, {len(data.classes):,} classes; {splits}",
        f"Imbalance factor [bold]{factor}[/] (largest over smallest class)\n",
        _class_table(found, style),
        _region_table(found, style),
        "[bold]Checks[/]",
        *_checks(found),
        *([] if plot is None else [f"The picture of the tail is in [bold]{escaped(plot)}[/]"]),
    )


def _class_table(found: "Inspection", style: dict[str, Any]) -> Any:
    classes, splits = found.data.classes, found.data.splits
    counts = {split: found.counts(split) for split in splits}
    table = new_table("rank", "class", *splits, "region", "", title="Classes by training samples", left=2, **style)
    table.columns[-1].justify = table.columns[-2].justify = "left"
    region = {int(c): name for name, members in classes.thirds.items() for c in members}
    most, order = max(1, int(counts["train"].max())), classes.order.tolist()
    shown = order if len(order) <= MOST_CLASSES else order[:ENDS] + order[-ENDS:]
    for place, c in enumerate(shown):
        if len(shown) < len(order) and place == ENDS:
            table.add_row("...", f"{len(order) - 2 * ENDS:,} more", *["..."] * len(splits), "", "")
        numbers = [f"{counts[split][c]:,}" for split in splits]
        bar = "█" * max(1, round(BAR * counts["train"][c] / most)) if counts["train"][c] else ""
        bar = f"[{COLOURS[region[c]]}]{bar}[/]"
        table.add_row(str(classes.rank[c]), escaped(classes.names[c]), *numbers, region[c], bar)
    return table


def _region_table(found: "Inspection", style: dict[str, Any]) -> Any:
    table = new_table("region", "classes", "samples", "share", "samples per class", title="Regions", **style)
    for region in found.thirds + found.shots:
        span = f"{region.least:,}" if region.least == region.most else f"{region.least:,} to {region.most:,}"
        share = f"{region.samples / len(found.data.train):.1%}"
        cells = MEANING[region.name], f"{region.classes:,}", f"{region.samples:,}", share, span
        table.add_row(*cells, end_section=region.name == "tail")
    return table


def _checks(found: "Inspection") -> Iterator[str]:
    data, leaks, several = found.data, found.leaks, len(found.data.splits) > 1
    if several:
        yield _check(leaks.across_splits, "no sample is in two splits", "samples are in more than one split")
    yield _check(leaks.across_labels, "no sample has two labels", "samples occur with more than one label")
    if leaks.groups_across_splits is None:
        yield "  [dim]-[/] groups are not known: name lesions, patients or tracks with --groups"
    elif several:
        yield _check(leaks.groups_across_splits, "no group is in two splits", "groups are in more than one split")
    yield _check(leaks.broken, "every sample can be read", "files cannot be read")
    if leaks.repeated:
        yield f"  [dim]-[/] {leaks.repeated:,} different samples occur more than once, in any split"
    if data.skipped:
        yield _check(data.skipped, "", "broken files, lines or folders were skipped")
    yield from (f"  [dim]-[/] {escaped(note)}" for note in data.notes)


def _check(wrong: Sequence[str], fine: str, bad: str) -> str:
    if not wrong:
        return f"  [green]✓[/] {fine}"
    return f"  [yellow]![/] [bold]{len(wrong):,}[/] {bad}: {escaped(listing(wrong, 3))}"

"""Commands about data: `rfdlc inspect`."""

import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

import rfdlc
from rfdlc.cli.request import (
    DataRequest,
    JsonOption,
    Source,
    data_options,
    takes_request,
)
from rfdlc.cli.writing import check_writable, new_table, output
from rfdlc.errors import InputError, expect, listing

if TYPE_CHECKING:
    from rfdlc.data.inspection import Inspection

FURTHER = "Further options of the data, as for `rfdlc train`: `data.fit=pad`."
MOST_CLASSES, ENDS, BAR = (
    30,
    8,
    24,
)  # of more classes, this many from either end are listed
COLOURS = {"head": "blue", "med": "green", "tail": "red"}
MEANING = {"head": "first third", "med": "second third", "tail": "last third"}
MEANING |= {"many": "over 100", "medium": "20 to 100", "few": "under 20"}


@takes_request
def inspect(
    source: Source,
    request: DataRequest,
    further: Annotated[
        list[str] | None,
        Argument(metavar="data.KEY=VALUE", help=FURTHER, show_default=False),
    ] = None,
    plot: Annotated[
        Path | None, Option(help="Write a picture of the tail, such as tail.png.")
    ] = None,
    labels: Annotated[
        Path | None, Option(help="The labels of an .npy file of features.")
    ] = None,
    factor: Annotated[
        float | None, Option(help="Imbalance factor of a data set that is subsampled.")
    ] = None,
    profile: Annotated[str | None, Option(help="exponential or step.")] = None,
    image_size: Annotated[
        int | None, Option(help="Side of the images in pixels.")
    ] = None,
    test_fraction: Annotated[
        float | None, Option(help="Fraction held out where there is no test split.")
    ] = None,
    seed: Annotated[
        int | None, Option(min=0, help="Seed of everything that is drawn.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show the classes and the tail of a data set, and what is wrong with it:
    duplicates, leaks, broken files.

    **Examples**

    - `rfdlc inspect digits-lt`
    - `rfdlc inspect cifar100-lt --root data --plot tail.png`
    - `rfdlc inspect photos/ --groups lesions.csv --skip-broken --json`
    - `rfdlc inspect patients.csv --target diagnosis --groups patient`
    - `rfdlc inspect photos/ data.image_size=128 data.fit=pad`
    """
    from rfdlc.data.inspection import Inspection, plot_tail
    from rfdlc.data.readers.image_files import check_broken

    check_writable(plot)
    options: dict[str, Any] = {
        **request.given(),
        "root": request.root,
        "labels": labels,
        "seed": seed,
    }
    options |= {
        "factor": factor,
        "profile": profile,
        "image_size": image_size,
        "test_fraction": test_fraction,
    }
    for pair in further or ():
        named = pair.startswith("data.") and "=" in pair
        expect(
            named,
            f"{pair!r} is not an option: expected data.key=value, as data.fit=pad",
        )
    options |= data_options(further or ())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter(
            "always", UserWarning
        )  # each is among the notes, which are shown
        data = _loaded(
            source,
            {name: value for name, value in options.items() if value is not None},
        )
    found = Inspection.of(data)
    if plot is not None:
        plot_tail(data.classes, plot, data.name)
    splits = ", ".join(f"{len(split):,} {name}" for name, split in data.splits.items())
    shape = "x".join(map(str, data.input_shape))
    output(
        json,
        found.to_dict(),
        f"\n{data.name}: {data.kind} {shape}, {len(data.classes):,} classes; {splits}",
        f"Imbalance factor {data.classes.imbalance_factor:,.1f} (largest over smallest"
        " class)\n",
        _class_table(found),
        _region_table(found),
        "Checks",
        *_checks(found, {str(each.message) for each in warned}),
        *([] if plot is None else [f"The picture of the tail is in {plot}"]),
    )
    check_broken(found.broken, request.skip_broken)


def _loaded(source: str, options: dict[str, Any]) -> "rfdlc.Dataset":
    """As `rfdlc.load`, but what is found broken only when it is decoded is named with
    what is broken before.
    """
    from rfdlc.data.images import BrokenImage
    from rfdlc.data.inspection import Inspection
    from rfdlc.data.readers.image_files import check_broken

    try:
        return rfdlc.load(source, **options)
    except BrokenImage:
        broken: tuple[str, ...] = ()
        with suppress(InputError):  # no image is left: the first error says why
            usable = rfdlc.load(source, **options | {"skip_broken": True})
            broken = (*usable.skipped, *Inspection.of(usable).broken)
        check_broken(broken, skip_broken=False)
        raise


def _class_table(found: "Inspection") -> Any:
    from rich.text import Text

    classes, splits = found.data.classes, found.data.splits
    counts = {split: found.counts(split) for split in splits}
    table = new_table(
        "rank",
        "class",
        *splits,
        "region",
        "",
        title="Classes by training samples",
        left=2,
    )
    table.columns[-1].justify = table.columns[-2].justify = "left"
    region = {int(c): name for name, members in classes.thirds.items() for c in members}
    train, order = counts["train"], classes.order.tolist()
    shown = order if len(order) <= MOST_CLASSES else order[:ENDS] + order[-ENDS:]
    for place, c in enumerate(shown):
        if len(shown) < len(order) and place == ENDS:
            table.add_row(
                "...", f"{len(order) - 2 * ENDS:,} more", *["..."] * len(splits), "", ""
            )
        bar = "█" * max(int(train[c] > 0), round(BAR * train[c] / max(1, train.max())))
        numbers = [f"{counts[split][c]:,}" for split in splits]
        table.add_row(
            str(classes.rank[c]),
            classes.names[c],
            *numbers,
            region[c],
            Text(bar, COLOURS[region[c]]),
        )
    return table


def _region_table(found: "Inspection") -> Any:
    table = new_table(
        "region", "classes", "samples", "share", "samples per class", title="Regions"
    )
    for region in found.regions("thirds") + found.regions("shots"):
        name, classes, samples, least, most = region.values()
        span = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        cells = (
            f"{classes:,}",
            f"{samples:,}",
            f"{samples / len(found.data.train):.1%}",
            span,
        )
        table.add_row(f"{name} ({MEANING[name]})", *cells, end_section=name == "tail")
    return table


def _checks(found: "Inspection", warned: set[str]) -> Iterator[Any]:
    """One line for each check: passed (✓), failed (!), or a remark (-)."""
    from rich.text import Text

    from rfdlc.data.dataset import LISTED, by_reason

    def few(wrong: Any) -> str:
        return f" {listing(wrong, 3)}"

    def reasons(wrong: Any) -> str:
        return "".join(f"\n      {reason}" for reason in by_reason(wrong))

    data, several, other = (
        found.data,
        len(found.data.splits) > 1,
        "other " * bool(found.data.skipped),
    )
    # what was found, whether it was looked for, what to say without and with findings,
    # and how to list them
    checks = [
        (
            found.across_splits,
            several and (found.across_splits or not data.alike),
            "no sample is in two splits",
            "samples are in more than one split",
            few,
        ),
        (
            found.across_labels,
            True,
            "no sample has two labels",
            "samples occur with more than one label",
            few,
        ),
        (
            found.groups_across_splits,
            several,
            "no group is in two splits",
            "groups are in more than one split",
            few,
        ),
        (
            data.skipped,
            bool(data.skipped),
            "",
            "broken files, rows or folders were left out",
            reasons,
        ),
        (
            found.broken,
            True,
            f"every {other}sample can be read",
            "files cannot be read",
            reasons,
        ),
    ]
    for wrong, made, fine, bad, listed in checks:
        if made and wrong is not None:
            bad = f"{len(wrong):,} {bad}:{listed(wrong)}"
            yield (
                Text.assemble("  ", ("! ", "yellow"), bad)
                if wrong
                else Text.assemble("  ", ("✓ ", "green"), fine)
            )
    if found.groups_across_splits is None:
        yield "  - groups are not known: name lesions, patients or tracks with --groups"
    if found.repeated:
        yield (
            f"  - {found.repeated:,} different samples occur more than once, in any"
            " split"
        )
    for note in sorted(data.notes, key=lambda note: note not in warned):
        text = note.removesuffix(LISTED)  # above
        yield (
            Text.assemble("  ", ("! ", "yellow"), text)
            if note in warned
            else f"  - {text}"
        )

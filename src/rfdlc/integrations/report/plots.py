"""Figures for papers and slides, drawn with matplotlib from the numbers of the
report.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rfdlc.errors import InputError, choose, expect
from rfdlc.files import replacing
from rfdlc.integrations.report import curves
from rfdlc.integrations.report.runs import ReportRun, check_number
from rfdlc.style import STYLE, brief

MOST_CLASSES = 50  # a confusion matrix with more is drawn by region
WIDTH, HEIGHT = 4.6, 3.4  # inches: one column of most papers
REGION_COLOURS = {"head": "#2a6fb5", "med": "#b7800a", "tail": "#b03078"}
RUN_COLOURS = (
    "#2f3b4a",
    "#c2570c",
    "#2a7d8c",
    "#8a4fa3",
    "#6b7a1f",
    "#a83a50",
    "#3a62b8",
    "#7a6248",
)
RUN_DASHES = ("-", "--", ":", "-.")


def check(kind: str, out: Path) -> Any:
    """matplotlib's pyplot, or an error before any work if the figure cannot be drawn or
    written.
    """
    choose("kind", kind, KINDS)
    drawn = out.suffix.lower() in (".svg", ".pdf", ".png")
    expect(
        drawn,
        f"{out}: cannot be drawn as {out.suffix or 'a file without ending'!r}: expected"
        " svg, pdf, png",
    )
    try:
        import matplotlib
    except ImportError:
        raise InputError('plots need matplotlib: pip install "rfdlc[plots]"') from None
    matplotlib.use("agg")  # files only: no window, no display needed
    from matplotlib import pyplot

    return pyplot


def draw(runs: Sequence[ReportRun], kind: str, out: Path) -> None:
    """Draw one kind of figure of the runs into a file."""
    check_number(runs)
    pyplot, ending = check(kind, out), out.suffix.lower().lstrip(".")
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(ending)
    with pyplot.rc_context(STYLE):
        figure = KINDS[kind](pyplot, runs)
        try:
            with replacing(out) as beside:
                figure.savefig(
                    beside,
                    format=ending,
                    bbox_inches="tight",
                    dpi=200,
                    metadata=undated,
                )
        finally:
            pyplot.close(figure)


def _need_counts(run: ReportRun, kind: str) -> None:
    give = "give classes with counts (--classes FILE with columns class,count)"
    expect(
        run.classes.counts is not None,
        f"{run.name}: the figure {kind!r} needs training counts: {give}",
    )


def _axes(
    pyplot: Any, x: str, y: str, digits: tuple[int | None, int | None] = (0, 0)
) -> tuple[Any, Any]:
    """Axes in percent."""
    from matplotlib.ticker import PercentFormatter

    figure, axes = pyplot.subplots(figsize=(WIDTH, HEIGHT))
    axes.set(xlabel=x, ylabel=y)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=digits[0]))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=digits[1]))
    return figure, axes


def _run_style(i: int) -> dict[str, Any]:
    return {
        "color": RUN_COLOURS[i % len(RUN_COLOURS)],
        "linestyle": RUN_DASHES[i % len(RUN_DASHES)],
    }


def _lines(
    axes: Any,
    runs: Sequence[ReportRun],
    points: Sequence[Any],
    missing: str = "",
    **style: Any,
) -> None:
    """One line (x, y) per run; a legend for several."""
    for i, (run, line) in enumerate(zip(runs, points, strict=True)):
        expect(line, f"{run.name}: {missing}")
        axes.plot(*zip(*line, strict=True), label=run.name, **_run_style(i), **style)
    if len(runs) > 1:
        axes.legend()


def _frontier(pyplot: Any, runs: Sequence[ReportRun]) -> Any:
    """Accuracy against false head rate; each point is labelled with its penalty."""
    figure, axes = _axes(pyplot, "false head rate", "accuracy", (None, None))
    for run in runs:
        _need_counts(run, "frontier")
    points = [
        [
            (p["false_head_rate"], p["accuracy"], p["penalty"])
            for p in curves.frontier(run)
        ]
        for run in runs
    ]
    missing = "the figure 'frontier' needs samples of rare classes; there are none"
    _lines(
        axes,
        runs,
        [[point[:2] for point in line] for line in points],
        missing,
        marker="o",
        markersize=4,
    )
    for x, y, penalty in points[0]:  # every run has the same penalties
        axes.annotate(
            f"{penalty:g}", (x, y), (4, 3), textcoords="offset points", fontsize=7
        )
    axes.margins(0.08)
    return figure


def _risk_coverage(pyplot: Any, runs: Sequence[ReportRun]) -> Any:
    figure, axes = _axes(
        pyplot, "coverage (share of samples decided)", "error rate", (0, None)
    )
    points = [
        [(p["coverage"], p["risk"]) for p in curves.risk_coverage_points(run)]
        for run in runs
    ]
    _lines(
        axes, runs, points, "every sample was abstained on: there is no risk to draw"
    )
    axes.set(xlim=(0, 1), ylim=(0, None))
    return figure


def _reliability(pyplot: Any, runs: Sequence[ReportRun]) -> Any:
    """By region for one run, over all samples for several."""
    figure, axes = _axes(pyplot, "confidence", "accuracy")
    axes.plot([0, 1], [0, 1], color="#8a8f96", linestyle=(0, (4, 4)), linewidth=1)
    for i, run in enumerate(runs):
        lines = curves.reliability(run)
        together = len(runs) > 1 or len(lines) == 1
        for region, bins in lines.items():
            if not bins or (region == "all") != together:
                continue
            style = _run_style(i) if together else {"color": REGION_COLOURS[region]}
            across, up, sizes = np.array(
                [(b["confidence"], b["accuracy"], b["samples"]) for b in bins]
            ).T
            axes.plot(
                across,
                up,
                linewidth=1.4,
                label=run.name if together else region,
                **style,
            )
            axes.scatter(
                across,
                up,
                s=6 + 40 * sizes / sizes.max(),
                color=style["color"],
                zorder=3,
            )
    axes.set(xlim=(0, 1.02), ylim=(0, 1.02))
    axes.legend()
    return figure


def _tail(pyplot: Any, runs: Sequence[ReportRun]) -> Any:
    """Training counts by decreasing frequency (above), and the accuracy of each class
    in the same order (below).
    """
    from matplotlib.ticker import PercentFormatter

    _need_counts(runs[0], "tail")
    classes = runs[0].classes
    order, places = classes.order, np.arange(len(classes))
    region_of = {
        int(y): name for name, members in classes.thirds.items() for y in members
    }
    colours = [REGION_COLOURS[region_of[int(y)]] for y in order]
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(WIDTH, HEIGHT * 1.35), sharex=True
    )
    above.bar(
        places, np.maximum(classes.count_array[order], 0.8), width=0.9, color=colours
    )
    above.set(yscale="log", ylabel="training samples", ylim=(0.8, None))
    above.yaxis.set_major_formatter("{x:,.0f}")
    above.minorticks_off()
    below.set(
        xlabel="classes by decreasing frequency", ylabel="accuracy", ylim=(0, 1.02)
    )
    below.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    if len(classes) <= 20:
        below.set_xticks(
            places, [brief(classes.names[y]) for y in order], rotation=45, ha="right"
        )
    each = [
        np.array(curves.by_class(run)["accuracy"], dtype=float)[order] for run in runs
    ]
    if len(runs) > 1:
        _lines(below, runs, [list(enumerate(values)) for values in each], linewidth=1)
    else:
        below.scatter(places, each[0], c=colours, s=14, clip_on=False, zorder=3)
        handles = [
            pyplot.Rectangle((0, 0), 1, 1, color=REGION_COLOURS[name])
            for name in classes.thirds
        ]
        above.legend(handles, list(classes.thirds))
    return figure


def _confusion(pyplot: Any, runs: Sequence[ReportRun]) -> Any:
    """Shares of each row, one panel per run; by region if there are too many
    classes.
    """
    figure, panels = pyplot.subplots(
        1, len(runs), figsize=(WIDTH * len(runs), HEIGHT * 1.2), squeeze=False
    )
    for run, axes in zip(runs, panels[0], strict=True):
        shares, rows, columns = _confusion_shares(run)
        axes.grid(visible=False)
        axes.imshow(shares, vmin=0, vmax=1, cmap="Blues", aspect="auto")
        small = 7 if len(rows) <= 20 else 4
        axes.set_xticks(
            range(len(columns)), [*map(brief, columns)], rotation=90, fontsize=small + 1
        )
        axes.set_yticks(range(len(rows)), [*map(brief, rows)], fontsize=small + 1)
        axes.set(
            xlabel="decided", ylabel="true", title=run.name if len(runs) > 1 else ""
        )
        for (i, j), share in np.ndenumerate(shares) if len(rows) <= 20 else ():
            if share >= 0.005:
                ink = "white" if share > 0.55 else "#1d2126"
                axes.text(
                    j,
                    i,
                    f"{100 * share:.0f}",
                    ha="center",
                    va="center",
                    fontsize=small,
                    color=ink,
                )
    figure.tight_layout()
    return figure


def _confusion_shares(
    run: ReportRun,
) -> tuple[np.ndarray[Any, Any], list[str], list[str]]:
    """Shares with the names of rows and columns; classes by decreasing frequency, if it
    is known.
    """
    classes, utility = run.classes, run.decider.utility
    order = np.arange(len(classes)) if classes.counts is None else classes.order
    blocks = {classes.names[y]: np.array([y]) for y in order}
    if len(classes) > MOST_CLASSES:
        _need_counts(run, "confusion")
        blocks = dict(classes.thirds)
    block_of = np.empty(len(classes), dtype=np.int64)
    block_of[np.concatenate([*blocks.values()])] = np.repeat(
        range(len(blocks)), [*map(len, blocks.values())]
    )
    others = np.flatnonzero(utility.decided_class < 0)
    columns = block_of[utility.decided_class]
    columns[others] = len(blocks) + np.arange(len(others))
    counts = np.zeros((len(blocks), len(blocks) + len(others)))
    np.add.at(
        counts, (block_of[run.outcomes.targets], columns[run.outcomes.actions]), 1
    )
    names = [*blocks, *(utility.actions[a] for a in others)]
    return counts / np.maximum(counts.sum(axis=1, keepdims=True), 1), [*blocks], names


KINDS: dict[str, Callable[[Any, Sequence[ReportRun]], Any]] = {
    "frontier": _frontier,
    "reliability": _reliability,
    "tail": _tail,
    "confusion": _confusion,
    "risk-coverage": _risk_coverage,
}

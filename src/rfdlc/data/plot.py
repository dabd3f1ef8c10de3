"""A picture of the tail: training samples of each class by rank, for a handful of classes or for thousands."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.decide.classes import Classes
from rfdlc.errors import InputError
from rfdlc.files import replacing
from rfdlc.style import STYLE, brief

COLOURS = {"head": "#1b6ca8", "med": "#6aa84f", "tail": "#d1495b"}
MOST_NAMES = 40  # more class names than this cannot be read on one axis


def plot_tail(classes: Classes, path: Path, title: str) -> None:
    """Write the picture; the suffix of the path decides the format."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError('a picture of the tail needs matplotlib: pip install "rfdlc[plots]"') from None
    with rc_context({"text.parse_math": STYLE["text.parse_math"]}), replacing(path) as beside:
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes, counts = figure.subplots(), classes.count_array[classes.order]
        _draw(axes, classes, counts)
        _label(axes, classes, counts, title)
        try:
            figure.savefig(beside, format=path.suffix.lstrip("."), dpi=150)
        except ValueError as error:
            raise InputError(f"{path}: the picture cannot be written ({error})") from None


def _draw(axes: Any, classes: Classes, counts: NDArray[np.int64]) -> None:
    """Bars where there are few classes, an area where there are many, in the colours of the regions."""
    start = 0
    for region, members in classes.thirds.items():
        stop = start + len(members)
        heights = counts[start:stop]
        told = f"{region}: {len(members):,} classes, {heights.sum():,} samples"
        if len(counts) <= MOST_NAMES:
            axes.bar(np.arange(start, stop), heights, width=0.8, color=COLOURS[region], label=told)
        else:
            edges = np.arange(start, stop + 1) - 0.5
            axes.stairs(heights, edges, baseline=0, fill=True, color=COLOURS[region], label=told)
        start = stop


def _label(axes: Any, classes: Classes, counts: NDArray[np.int64], title: str) -> None:
    least = int(counts[counts > 0].min())
    steep = counts.max() >= 20 * least
    if steep:
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.7 * least)
    axes.set_xlim(-0.6, len(counts) - 0.4)
    factor = classes.imbalance_factor
    axes.set_title(f"{title}: {counts.sum():,} training samples, imbalance factor {factor:,.4g}", loc="left")
    axes.set_ylabel("training samples (log scale)" if steep else "training samples")
    if len(counts) <= MOST_NAMES:
        names = [brief(name) for name in classes.select(classes.order)]
        turned = max(map(len, names)) * len(names) > 90  # else they would touch each other
        axes.set_xticks(range(len(names)), names, rotation=40 if turned else 0, ha="right" if turned else "center")
        if len(counts) <= 12:
            for bars in axes.containers:
                axes.bar_label(bars, fmt="{:,.0f}", padding=2, fontsize=9)
    else:
        axes.set_xlabel("class, by rank of its training samples")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")

"""The figures, from the result files alone: PNG and SVG by one command, `python -m
paper figures DIR`.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paper.results import Mean, Results, curves
from paper.specs import DATA_TITLES, TAIL
from paper.tables import frontier
from rfdlc import InputError
from rfdlc.style import STYLE

FORMATS = ("png", "svg")
WIDTH, HEIGHT = 5.2, 3.6  # inches
# share of the samples below which a bin of a reliability diagram says nothing
FEWEST = 0.002
BESIDE = {
    "loc": "upper left",
    "bbox_to_anchor": (1.01, 1.02),
}  # a dozen methods hide the lines otherwise
REGION_COLOURS = {
    "acc": "#2f3b4a",
    "head": "#2a6fb5",
    "med": "#b7800a",
    "tail": "#b03078",
}
ABLATIONS: dict[
    str, dict[str, str]
] = {  # figure -> where a point lies, and its run of CIFAR100-LT
    "particles": {
        str(k): "rf-dlc-paper" if k == 3 else f"rf-dlc-paper+particles={k}"
        for k in range(1, 9)
    },
    "weights": {
        form: "rf-dlc-paper" if form == "linear" else f"rf-dlc-paper+weights={form}"
        for form in ("constant", "log", "sqrt", "effective", "linear")
    },
}
ACROSS = {"particles": "particles", "weights": "class weights 1/f(n), f is ..."}
RUNS = {  # name -> title and colour; dashed is trained with the utility
    "ce": ("CE", "#8a8f96"),
    "focal": ("focal", "#b9a27c"),
    "cb": ("CB", "#7a6248"),
    "cb+deferred=0.8": ("CB, weights late", "#c99b6b"),
    "la": ("LA", "#6b7a1f"),
    "ldam-drw": ("LDAM-DRW", "#2a7d8c"),
    "ride": ("RIDE", "#3a62b8"),
    "tlc": ("TLC", "#8a4fa3"),
    "ace": ("ACE", "#a83a50"),
    "srepr": ("SRepr", "#4d9950"),
    "rf-dlc-paper": ("RF-DLC (paper)", "#c2570c"),
    TAIL: ("RF-DLC (paper), trained with utility", "#c2570c"),
    "rf-dlc": ("RF-DLC (ours)", "#111111"),
}


def draw_all(folder: Path, out: Path) -> list[Path]:
    """Draw every figure whose runs were measured; returns the files written."""
    try:
        import matplotlib
    except ImportError:
        raise InputError(
            'figures need matplotlib: pip install "rfdlc[plots]"'
        ) from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{out}: the folder for figures cannot be made ({error.strerror}); choose"
            " another"
        ) from None
    results, written = Results(folder), []
    with pyplot.rc_context({**STYLE, "legend.fontsize": 7.5}):
        for name, draw in _drawings(results, folder):
            figure, axes = pyplot.subplots(figsize=(WIDTH, HEIGHT))
            if draw(axes):
                written += [_save(figure, out / f"{name}.{form}") for form in FORMATS]
            pyplot.close(figure)
    if not written:
        raise InputError(f"{folder}: nothing has been measured that could be drawn")
    return written


def _drawings(
    results: Results, folder: Path
) -> Iterator[tuple[str, Callable[[Any], bool]]]:
    """Every figure: its name, and what draws it and says whether there was anything to
    draw.
    """
    for name in measured_ablations(results):
        yield name, partial(_by_region, results=results, name=name)
    for data in results.runs:
        yield f"frontier-{data}", partial(_frontiers, results=results, data=data)
        for decision in ("argmax", "calibrated"):
            yield (
                f"reliability-{data}-{decision}",
                partial(_reliability, folder=folder, data=data, decision=decision),
            )
        yield f"risk-coverage-{data}", partial(_risk_coverage, folder=folder, data=data)


def _save(figure: Any, path: Path) -> Path:
    try:
        figure.savefig(
            path,
            bbox_inches="tight",
            dpi=200,
            metadata={"Date": None} if path.suffix == ".svg" else None,
        )
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written ({error.strerror}); choose another folder"
        ) from None
    return path


# -- ablations
# --------------------------------------------------------------------------------------


def measured_ablations(results: Results) -> list[str]:
    """Those that have more than one point, and so are drawn."""
    there = results.measured("cifar100-lt")
    return [
        name
        for name, runs in ABLATIONS.items()
        if sum(run in there for run in runs.values()) > 1
    ]


def _by_region(axes: Any, results: Results, name: str) -> bool:
    """Accuracy of each region with two deviations up and down."""
    runs, there = ABLATIONS[name], results.measured("cifar100-lt")
    measured = [place for place, run in runs.items() if run in there]
    places = [list(runs).index(place) for place in measured]
    for region, colour in REGION_COLOURS.items():
        found = [
            results.mean("cifar100-lt", runs[place], "argmax", region)
            for place in measured
        ]
        known: list[Mean] = [mean for mean in found if mean is not None]
        spread = [2 * (mean.deviation or 0.0) for mean in known]
        title = "all" if region == "acc" else region
        style = {"color": colour, "marker": "o", "markersize": 4, "capsize": 2}
        axes.errorbar(
            places, [mean.value for mean in known], spread, label=title, **style
        )
    axes.set(
        xlabel=ACROSS[name],
        ylabel="accuracy (%)",
        title="CIFAR100-LT, the paper's method: mean and two deviations",
    )
    axes.set_xticks(places, measured)
    axes.legend(**BESIDE)
    return True


# -- methods
# --------------------------------------------------------------------------------------


def _frontiers(axes: Any, results: Results, data: str) -> bool:
    """False head rate against accuracy as the penalty grows, every method calibrated
    and decided alike.

    As far as our default was scored for: runs of an earlier time know fewer penalties.
    """
    axes.set(
        xlabel="accuracy (%), more is better",
        ylabel="false head rate (%), less is better",
    )
    found = {run: points for run in RUNS if (points := frontier(results, data, run))}
    last = min((point[0] for point in found.get("rf-dlc", [])), default=-1.0)
    shown = {
        run: [point for point in points if point[0] >= last]
        for run, points in found.items()
    }
    for run, points in shown.items():
        _line(axes, run, [p[1] for p in points], [p[2] for p in points])
    ends = sorted({points[-1][0] for points in shown.values()}, reverse=True)
    axes.set_title(
        f"{DATA_TITLES.get(data, data)}: penalties 0 (top) to"
        f" {' or '.join(f'{end:g}' for end in ends)}"
    )
    if shown:
        axes.legend(**BESIDE)
    return bool(shown)


def _line(axes: Any, run: str, across: Any, up: Any) -> None:
    """A method's line: its name and colour; dashed where it was trained with the
    utility, broad for ours.
    """
    title, colour = RUNS[run]
    style, width = "--" if run == TAIL else "-", 2 if run == "rf-dlc" else 1.2
    axes.plot(
        across,
        up,
        style,
        marker=".",
        markersize=4,
        label=title,
        color=colour,
        linewidth=width,
    )


def _reliability(axes: Any, folder: Path, data: str, decision: str) -> bool:
    """Accuracy by confidence: bins of all seeds, weighed by their samples."""
    how = {"argmax": "mean logits, not calibrated", "calibrated": "calibrated"}[
        decision
    ]
    axes.plot([0, 1], [0, 1], color="#8a8f96", linestyle=(0, (4, 4)), linewidth=1)
    axes.set(
        xlabel="confidence",
        ylabel="share of right answers",
        xlim=(0, 1.02),
        ylim=(0, 1.02),
    )
    axes.set_title(f"{DATA_TITLES.get(data, data)}: {how}")
    return _mean_curves(axes, folder, data, decision, "reliability")


def _risk_coverage(axes: Any, folder: Path, data: str) -> bool:
    axes.set(
        xlabel="coverage (share of samples decided)",
        ylabel="error rate",
        xlim=(0, 1.02),
    )
    axes.set_title(f"{DATA_TITLES.get(data, data)}: calibrated")
    drawn = _mean_curves(axes, folder, data, "calibrated", "risk-coverage")
    axes.set_ylim(
        bottom=0
    )  # after the curves: it would keep the top where it is without any
    return drawn


def _mean_curves(axes: Any, folder: Path, data: str, decision: str, curve: str) -> bool:
    rows = [
        row
        for row in curves(data, folder)
        if (row["split"], row["decision"], row["curve"]) == ("test", decision, curve)
    ]
    drawn = False
    for run in RUNS:
        points = np.array(
            [
                [float(row[name]) for name in ("x", "y", "weight")]
                for row in rows
                if row["run"] == run
            ]
        )
        if len(points):
            drawn = True
            _line(
                axes,
                run,
                *(_binned(points) if curve == "reliability" else _averaged(points)),
            )
    if drawn:
        axes.legend(**BESIDE)
    return drawn


def _binned(points: Any) -> tuple[Any, Any]:
    """Points of the same fifteenth of the confidence, as one: their mean by weight;
    none of a few samples.
    """
    place = np.clip(np.ceil(points[:, 0] * 15) - 1, 0, 14).astype(int)
    weights = points[:, 2]
    total = np.bincount(place, weights, 15)
    seen = total > FEWEST * total.sum()
    return tuple(
        np.bincount(place, weights * points[:, i], 15)[seen] / total[seen]
        for i in (0, 1)
    )


def _averaged(points: Any) -> tuple[Any, Any]:
    """Mean over seeds at each coverage."""
    wanted = np.unique(points[:, 2])
    return wanted, np.array([points[points[:, 2] == at, 1].mean() for at in wanted])

"""The leaderboard: methods for long-tailed images, published values beside measured
ones, from the committed results.

    python benchmarks/leaderboard.py
        prints docs/leaderboard.md
    python benchmarks/leaderboard.py --write
        writes it, and figures/accuracy-against-time.svg beside it

Measured values are means over seeds of `paper/results` (the study),
`results/frontier.csv` and `results/finetune.csv`. Published ones are those of
`paper/published.toml` and of `published.csv`, which says what each was selected on.
"""

import csv
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import mean, stdev

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
Row = dict[str, str]
# our run -> its title, the paper's row of accuracies, that of false head rates
STUDY = {
    "ce": ("Cross-entropy", "CE", "CE"),
    "cb": ("CB loss", "CB Loss", "CB Loss"),
    "cb+deferred=0.8": (
        "CB loss, weights after 80% of the epochs",
        "CB Loss",
        "CB Loss",
    ),
    "ldam-drw": ("LDAM-DRW", "LDAM", "LDAM"),
    "la": ("Logit adjustment", "LA", ""),
    "srepr": ("SRepr", "SRepr", ""),
    "ace": ("ACE", "ACE", ""),
    "ride": ("RIDE", "RIDE", "RIDE"),
    "tlc": ("TLC", "TLC", "TLC"),
    "rf-dlc-paper": ("RF-DLC as in its paper", "RF-DLC", ""),
    "rf-dlc-paper+utility=tail-sensitive-by-rank": (
        "RF-DLC as in its paper, tail-sensitive",
        "",
        "RF-DLC",
    ),
    "rf-dlc": ("**`rf-dlc`**", "", ""),
}
MEASURED = (
    "accuracy",
    "tail",
    "FHR",
    "ECE",
    "utility",
    "seconds",
    "parameters",
    "seeds",
)
TRADED = "accuracy traded for FHR"
NOW = {
    "rf-dlc-strong": "rf-dlc-strong, cold refit, no shifts"
}  # rows of frontier.csv of runs with an earlier name
SPACE = "\N{NO-BREAK SPACE}"
TICKS = 10, 20, 50, 100, 200  # seconds
PEER = "BalPoE, 3 experts, 400 epochs"  # a line in the figure
FIGURE = "figures/accuracy-against-time.svg"
# Variants of others, in the table alone.
UNDRAWN = (
    "again, three seeds",
    "cold refit, no shifts",
    "tail-sensitive",
    "strong, 40 + 400 epochs",
    "strong, 2 shared stages, 170 + 400 epochs",
    "strong, 2 shared stages, 400 + 320 epochs, 30% held out",
)
INTRODUCTION = """<!-- python benchmarks/leaderboard.py --write -->
# Leaderboard

Here you can compare methods for long-tailed images: published values beside what this
library measures.

The first table of a data set is measured here. Values are means and standard deviations
over seeds, of the last epoch.

- **accuracy**, **tail**, false head rate (**FHR**) and **ECE**, in percent: calibrated
  on held-out training data and decided for balanced classes.
- **utility**: mean utility of decisions for a penalty of -1 if a rare class is taken
  for a frequent one.
- **seconds**: of one run on one H200, its share where several seeds trained as one
  stack. Runs beside other jobs have none. They are of the commit in the CSV file:
  kernels have become about a tenth faster since most rows.

The second table has accuracy / tail accuracy / false head rate as published, and beside
them as measured here by arg max, the decision of the authors. It says what published
values were selected on: some are of the best epoch on the test set.

`rf-dlc-strong` trains for 400 epochs on nine tenths of the samples, calibrates on the
others, and trains the same networks for 400 epochs on all. It predicts from an image,
two shifted copies and their mirror images. *Cold refit, no shifts*: new networks for
the second training, predictions from image and mirror image. *Again*: the first seeds
once more, in a smaller stack. BalPoE, MDCS and `ncl` train and predict here as
`rf-dlc-strong`, 200 epochs. Other methods train once and predict from the image alone
([what that gives](methods.md#rf-dlc-paper-rf-dlc-rf-dlc-strong)).

*Accuracy traded for FHR*: runs of the row above, decided with a penalty for rare
samples taken for frequent classes. *From* are the accuracy and the FHR of the same runs
without it. The penalty is the largest that loses at most half a point of the accuracy
that is expected of held-out training data (`frontier.py traded`). On test samples the
loss can be larger. The half point itself was set when the curve of penalties on the
test split was known. The penalty of each run was not.

`-` means not published or not measured. Sources: [the study](evidence.md),
`benchmarks/frontier.py` and `benchmarks/finetune.py` with their CSV files in
`benchmarks/results`, and `benchmarks/published.csv`.
"""
SCALES = {
    "accuracy": 100,
    "tail": 100,
    "false_head_rate": 100,
    "ece": 100,
    "utility-1": 1,
}  # of frontier, finetune


def read(path: Path) -> list[Row]:
    """The rows of a CSV file; an empty list if the file does not exist."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def shown(values: Iterable[float], digits: int = 1) -> str:
    """Mean and standard deviation over seeds; `-` where nothing was measured."""
    found = list(values)
    spread = f"{SPACE}±{SPACE}{stdev(found):.{digits}f}" if len(found) > 1 else ""
    return f"{mean(found):.{digits}f}{spread}" if found else "-"


def paper_values() -> dict[tuple[str, str, str], str]:
    """What the paper prints, without deviations, by data set, row and metric."""
    tables = tomllib.loads((ROOT / "paper/published.toml").read_text(encoding="utf-8"))[
        "tables"
    ]
    return {
        (table["data"], row, metric): f"{float(cell.partition('±')[0]):.1f}"
        for table in tables
        if table["name"] in ("accuracy-tail", "fhr")
        for row, cells in table["rows"].items()
        for metric, cell in zip(table["metrics"].split(), cells.split(), strict=True)
        if cell != "-"
    }


def of_study(data: str) -> Iterator[list[str]]:
    """Rows of the methods of the study."""
    printed, values = (
        paper_values(),
        defaultdict[tuple[str, str, str], list[float]](list),
    )
    for row in read(ROOT / f"paper/results/{data}/metrics.csv"):
        if row["split"] == "test":
            values[row["run"], row["decision"], row["metric"]].append(
                float(row["value"])
            )
    runs = read(ROOT / f"paper/results/{data}/runs.csv")
    for run, (title, theirs, heads) in STUDY.items():
        names = ((theirs, "acc"), (theirs, "tail"), (heads, "fhr"))
        published = [printed.get((data, name, metric), "-") for name, metric in names]
        plain = [
            shown(values[run, "argmax", metric]).partition(SPACE)[0]
            for metric in ("acc", "tail", "fhr")
        ]
        own = [each for each in runs if each["run"] == run]
        # Seconds of trainings that had the machine to themselves.
        seconds = [
            float(each["seconds"])
            for each in own
            if each["seconds"] and each["beside"] == "0"
        ]
        yield [
            title,
            triple(published),
            "not stated" if any(each != "-" for each in published) else "-",
            triple(plain),
            *(
                shown(values[run, "calibrated", metric])
                for metric in ("acc", "tail", "fhr", "ece")
            ),
            shown(values[run, "calibrated -1", "utility"], 3),
            f"{mean(seconds):.0f}" if seconds else "-",
            parameters(own),
            str(len(own)),
        ]


def triple(cells: list[str]) -> str:
    """`accuracy / tail / FHR`, or `-` where there is nothing."""
    return "-" if all(cell == "-" for cell in cells) else f"{SPACE}/{SPACE}".join(cells)


def parameters(rows: list[Row]) -> str:
    known = [float(row["parameters"]) for row in rows if row.get("parameters")]
    return f"{mean(known) / 1e6:.2f}{SPACE}M" if known else "-"


def measured(name: str, data: str) -> dict[str, list[Row]]:
    """Rows of a CSV file of one data set on its test split by `row`; of the latest
    commit if it repeats a seed.
    """
    groups: dict[str, list[Row]] = {}
    for row in read(RESULTS / f"{name}.csv"):
        if row["data"] == data and row["split"] == "test":
            same = groups.get(row["row"], [])
            again = any(old["seed"] == row["seed"] for old in same)
            groups[row["row"]] = [
                *(old for old in same if not again or old["commit"] == row["commit"]),
                row,
            ]
    return groups


def cells(rows: list[Row]) -> list[str]:
    """What was measured of one row of `frontier.csv` or `finetune.csv`."""
    values = [
        shown(
            (scale * float(row[name]) for row in rows if row.get(name)),
            1 if scale > 1 else 3,
        )
        for name, scale in SCALES.items()
    ]
    accuracy, tail, heads, ece, utility = values
    seconds = [float(row["seconds"]) for row in rows if row.get("seconds")]
    took = f"{mean(seconds):.0f}" if seconds else "-"
    return [
        accuracy,
        tail,
        heads,
        ece,
        utility,
        took,
        parameters(rows),
        str(len(rows) or "-"),
    ]


def of_frontier(data: str) -> Iterator[list[str]]:
    """Rows of `published.csv`, beside ours where one is measured; then the others of
    `frontier.csv`.
    """
    groups = measured("frontier", data)
    for row in read(ROOT / "benchmarks/published.csv"):
        if row["data"] == data:
            found = cells(groups.pop(row["row"], []))
            if found[6] == "-" and row["parameters"]:
                found[6] = f"{float(row['parameters']) / 1e6:.1f}{SPACE}M (published)"
            yield [
                row["method"],
                triple([row["accuracy"], "-", "-"]),
                row["selected on"],
                "-",
                *found,
            ]
    traded = defaultdict[str, list[Row]](list)
    for row in read(RESULTS / "frontier-traded.csv"):
        if row["data"] == data:
            name = row["run"].rpartition("-")[0]
            traded[NOW.get(name, name)].append(row)
    for name, rows in groups.items():
        method = rows[0]["method"]
        title = (
            f"`{method}`"
            if name == method
            else f"`{method}`, {name.removeprefix(method).lstrip(', ')}"
        )
        title = f"**{title}**" if method.startswith("rf-dlc") else title
        yield [title, "-", "-", "-", *cells(rows)]
        if name in traded:
            seeds = {row["seed"] for row in traded[name]}
            before = cells([row for row in rows if row["seed"] in seeds])
            start = " and ".join(
                cell.partition(SPACE)[0] for cell in (before[0], before[2])
            )
            yield [
                f"{title}, {TRADED}, from {start}",
                "-",
                "-",
                "-",
                *cells(traded.pop(name)),
            ]
    assert not traded, (
        f"frontier-traded.csv has runs of no row of frontier.csv: {', '.join(traded)}"
    )


def of_finetune(data: str) -> Iterator[list[str]]:
    """Rows of pretrained networks."""
    for name, rows in measured("finetune", data).items():
        yield [
            "**preset `finetune`**" if name == "ours" else name,
            "-",
            "-",
            "-",
            *cells(rows),
        ]


def tables(rows: list[list[str]]) -> list[str]:
    """Markdown: what was measured, the highest accuracy first; then what was
    published.
    """
    ordered, accuracy = list[tuple[float, list[str]]](), 0.0
    for row in (row for row in rows if row[4] != "-"):
        accuracy = (
            accuracy if TRADED in row[0] else float(row[4].split(SPACE)[0])
        )  # that of the row above
        ordered.append((-accuracy, row))
    measured = [row for _, row in sorted(ordered, key=lambda pair: pair[0])]
    published = [row for row in rows if row[1] != "-"]
    lines = markdown(("method", *MEASURED), [[row[0], *row[4:]] for row in measured])
    if published:
        titles = (
            "method",
            "published",
            "measured, arg max",
            "selected on",
            "parameters",
        )
        lines += markdown(
            titles, [[row[0], row[1], here(row), row[2], row[10]] for row in published]
        )
    return lines


def here(row: list[str]) -> str:
    """What stands beside a published value: by arg max, or calibrated where only that
    was recorded.
    """
    plain = [cell.partition(SPACE)[0] for cell in row[4:7]]
    return (
        row[3]
        if row[3] != "-" or row[4] == "-"
        else f"{triple(plain)}{SPACE}(calibrated)"
    )


def markdown(titles: Iterable[str], rows: Iterable[list[str]]) -> list[str]:
    lines = [f"| {' | '.join(row)} |" for row in (titles, *rows)]
    return [
        lines[0],
        "|---" + "|---:" * (lines[0].count("|") - 2) + "|",
        *lines[1:],
        "",
    ]


def timed(data: str) -> list[tuple[str, float, float, float, bool]]:
    """(title, seconds, accuracy, tail, whether ours) of what the figure shows, the
    fastest first.
    """
    rows = [
        row
        for row in (*of_study(data), *of_frontier(data))
        if row[9] != "-" and row[4] != "-"
    ]
    found = []
    for title, *rest in rows:
        title = title.replace("*", "").replace("`", "")
        if title.endswith(UNDRAWN):
            continue
        accuracy, tail, seconds = (
            float(rest[i].partition(SPACE)[0]) for i in (3, 4, 8)
        )
        found.append((title, seconds, accuracy, tail, "rf-dlc" in title))
    return sorted(found, key=lambda row: row[1])


def draw(data: str, path: Path) -> None:
    """Accuracy, and that of the tail, against seconds of a run on one H200."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    from rfdlc.style import STYLE

    rows = timed(data)
    published = {
        row["method"]: float(row["accuracy"])
        for row in read(ROOT / "benchmarks/published.csv")
    }
    with matplotlib.rc_context(STYLE):
        figure, axes = pyplot.subplots(1, 2, figsize=(10, 5.5), layout="constrained")
        for place, (axis, what) in enumerate(
            zip(axes, ("accuracy (%)", "accuracy of tail classes (%)"), strict=True)
        ):
            for number, (title, *values, ours) in enumerate(rows, 1):
                at, look = (
                    (values[0], values[1 + place]),
                    {"color": "C0" if ours else "0.6"},
                )
                axis.plot(*at, "o" if ours else "s", label=f"{number}  {title}", **look)
                way = -1 if number % 2 else 1  # neighbours on two sides
                align = (
                    {"ha": "right", "va": "baseline"}
                    if number % 2
                    else {"ha": "left", "va": "top"}
                )
                axis.annotate(
                    str(number),
                    at,
                    xytext=(4 * way, -4 * way),
                    textcoords="offset points",
                    **align,
                )
            axis.set(
                xscale="log",
                xlim=(8, 320),
                xlabel="seconds of a run on one H200",
                ylabel=what,
            )
            axis.set_xticks(TICKS, map(str, TICKS))
            axis.set_xticks([], minor=True)
        axes[0].axhline(published[PEER], color="0.6", linestyle=":", linewidth=1)
        at, fraction = (0.98, published[PEER]), ("axes fraction", "data")
        axes[0].annotate(
            "BalPoE, 3 experts,\nas published",
            at,
            xycoords=fraction,
            ha="right",
            va="top",
        )
        figure.legend(
            *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2
        )
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def page() -> str:
    """The whole page."""
    lines = [INTRODUCTION]
    for title, *sources, data in (
        (
            "CIFAR100-LT, factor 100, ResNet-32 from random weights",
            of_study,
            of_frontier,
            "cifar100-lt",
        ),
        (
            "CIFAR10-LT, factor 100, ResNet-32 from random weights",
            of_study,
            of_frontier,
            "cifar10-lt",
        ),
        (
            "CIFAR100-LT, pretrained network (preset `finetune`)",
            of_finetune,
            "cifar100-lt",
        ),
        (
            "Caltech101-LT, pretrained network (preset `finetune`)",
            of_finetune,
            "caltech101-lt",
        ),
    ):
        lines += [
            f"## {title}",
            "",
            *tables([row for source in sources for row in source(data)]),
        ]
        if data == "cifar100-lt" and of_frontier in sources:
            lines += [f"![Accuracy against seconds of a run]({FIGURE})", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        (ROOT / "docs/leaderboard.md").write_text(page(), encoding="utf-8")
        draw("cifar100-lt", ROOT / "docs" / FIGURE)
    else:
        print(page())

"""The table of the README, and the sentences on its tables: what people use, and rfdlc,
from the committed results.

python benchmarks/headline.py            prints it
python benchmarks/headline.py --write    puts it into README.md
"""

import csv
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from statistics import mean

START, END = "<!-- python benchmarks/headline.py -->", "<!-- headline.py ends here -->"
RESULTS = Path(__file__).parent / "results"
Row = dict[str, str]


def rows(name: str, **given: str) -> list[Row]:
    """The rows of results/name.csv that have the given values."""
    with (RESULTS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if given.items() <= row.items()]


def rounded(text: str) -> str:
    """To one digit as people do it: 61.05 is 61.1."""
    return str(Decimal(text).quantize(Decimal("0.1"), ROUND_HALF_UP))


def costs() -> tuple[str, str]:
    here = {
        row["decision"]: float(row["mean_cost"]) for row in rows("costs", cost="25")
    }
    return (
        f"the most probable class: {here['most probable class']:.2f}",
        f"{here['calibrated, decided']:.2f}",
    )


def verdicts(**given: str) -> str:
    """How often RFDLCClassifier is better than the best of the others, by table and
    metric.
    """
    problems = defaultdict(list)
    for row in rows("tabular", **given):
        if row["model"] != "RFDLCClassifier":
            problems[row["problem"], row["metric"]].append(row)
    counts = [0, 0, 0]
    for others in problems.values():
        best = min(others, key=lambda row: float(row["difference"]))
        ahead, error = float(best["difference"]), float(best["standard_error"])
        counts[0 if ahead > 0 else 1 if ahead >= -error else 2] += 1
    return (
        f"better in {counts[0]}, within one standard error in {counts[1]}, worse in"
        f" {counts[2]}"
    )


def tables() -> tuple[str, str]:
    return (
        "the best of five classifiers of scikit-learn and imbalanced-learn",
        verdicts(),
    )


def of_tables(what: str = "problem", **given: str) -> int:
    """How many tables there are, or how many metrics of each."""
    return len({row[what] for row in rows("tabular", **given)})


def chosen_and_new() -> str:
    """What the tables give that were used for choices, and the others."""
    chosen, new, all_tables = (
        of_tables(choices="development"),
        of_tables(choices="new"),
        of_tables(),
    )
    told = (
        f"Of the {all_tables} tables, {chosen} were used for choices:"
        f" {verdicts(choices='development')}. "
    )
    return (
        f"{told}On the {new} others it is {verdicts(choices='new')} of"
        f" {new * of_tables('metric')}."
    )


def features() -> tuple[str, str]:
    probe = rows(
        "features", data="cifar100-lt", model="logit-adjusted linear probe", seed="0"
    )[0]
    ours = rows(
        "features", data="cifar100-lt", model="rfdlc", seed="mean", setting="default"
    )[0]
    told = [
        f"{rounded(row['accuracy'])}, {rounded(row['tail'])}" for row in (probe, ours)
    ]
    return f"logit-adjusted linear probe: {told[0]}", told[1]


def shares(name: str, **given: str) -> str:
    """Mean accuracy and accuracy of rare classes, in percent."""
    here = rows(name, **given)
    return ", ".join(
        f"{100 * mean(float(row[key]) for row in here):.1f}"
        for key in ("accuracy", "tail")
    )


def photographs() -> tuple[str, str]:
    rival, ours = (
        shares("finetune", data="caltech101-lt", row=row)
        for row in ("logit adjustment, three networks", "ours")
    )
    return f"three networks, logit adjustment: {rival}", ours


def scratch() -> tuple[str, str]:
    names = (
        "balpoe, 200 epochs",
        "rf-dlc-strong, 200 epochs",
        "rf-dlc-strong, 2 shared stages, 40% held out",
    )
    here = [{"data": "cifar100-lt", "row": row, "split": "test"} for row in names]
    here = [
        {**given, "commit": rows("frontier", **given)[-1]["commit"]} for given in here
    ]  # the last that measured it
    seconds = [
        mean(float(own["seconds"]) for own in rows("frontier", **given))
        for given in here
    ]
    rival, *ours = (
        f"{shares('frontier', **g)} in {s:.0f} s"
        for g, s in zip(here, seconds, strict=True)
    )
    published = rows("../published", data="cifar100-lt", row=names[0])[0]["accuracy"]
    return (
        f"BalPoE, as published: {published}; trained and evaluated as ours: {rival}",
        "; ".join(ours),
    )


def sets() -> tuple[str, str]:
    found = {row["method"]: row for row in rows("sets", data="cifar100-lt")}
    kinds = {
        "MAPIE": "MAPIE lac",
        "TorchCP": "TorchCP class-conditional",
        "": "rfdlc macro",
    }
    told = []
    for name, method in kinds.items():
        row = found[f"{method}, calibrated"]
        told.append(
            f"{name}: {float(row['macro']):.0%}, {float(row['size']):.1f}".removeprefix(
                ": "
            )
        )
    return "; ".join(told[:2]), told[2]


def wrong_labels() -> tuple[str, str]:
    cells: dict[bool, dict[tuple[str, str], float]] = {True: {}, False: {}}
    for row in rows("mislabelled"):
        own, place = cells[row["tool"] == "rfdlc"], (row["data"], row["model"])
        own[place] = max(
            own.get(place, 0), float(row["precision"])
        )  # the better ranking of cleanlab
    theirs, ours = (
        f"{min(own.values()):.0%} to {max(own.values()):.0%}"
        for own in (cells[False], cells[True])
    )
    return f"cleanlab: {theirs}", ours


def images() -> tuple[str, str]:
    def utility(config: str, mode: str, decision: str) -> float:
        here = rows(
            "learn", config=config, mode=mode, decision=decision, metric="utility"
        )
        return mean(float(row["value"]) for row in here)

    paper = utility("paper-utility", "test", "argmax mean-logits")
    ours = utility("rf-dlc", "refit", "expected-utility calibrated -1.0")
    return f"the paper's training, arg max: {paper:.2f}", f"{ours:.2f}"


def calibrators() -> tuple[str, str]:
    start = "all tables and models: "
    found = {
        row["what"].removeprefix(start): float(row["value"])
        for row in rows("calibrators")
        if start in row["what"]
    }
    ours = found.pop("auto")
    return (
        f"the best single calibrator: {max(found.values()):.3f}",
        f"{ours:.3f}, a weighted mean of all",
    )


def unfamiliar() -> tuple[str, str]:
    """Ours with thresholds by region, which is what `fit_unfamiliar` does."""
    kinds = (("largest probability", "one"), ("energy + entropy", "by region"))
    here = [
        rows(
            "unfamiliar",
            model="refitted network",
            seed="mean",
            score=score,
            thresholds=kind,
        )
        for score, kind in kinds
    ]
    theirs, ours = (
        ", ".join(f"{float(row['auroc']):.2f}" for row in found) for found in here
    )
    return f"the largest probability: {theirs}", ours


TASKS: dict[str, tuple[str, Callable[[], tuple[str, str]]]] = {
    "Breast tumours, a missed one costs 25: mean cost of a decision": ("costs", costs),
    f"{of_tables()} imbalanced tables, {of_tables('metric')} metrics each": (
        "tabular",
        tables,
    ),
    "Features of a pretrained network, CIFAR100-LT: accuracy, rare classes (%)": (
        "features",
        features,
    ),
    "Three EfficientNet-Lite0 fine-tuned on Caltech101-LT:"
    " accuracy, rare classes (%)": (
        "finetune",
        photographs,
    ),
    "Three ResNet-32 trained on CIFAR100-LT: accuracy, rare classes (%)": (
        "frontier",
        scratch,
    ),
    "Prediction sets for 90%, CIFAR100-LT:"
    " coverage averaged over classes, classes in a set": (
        "sets",
        sets,
    ),
    "Digits with 5% wrong labels: share of suspects that are wrong": (
        "mislabelled",
        wrong_labels,
    ),
    "ResNet-32 on CIFAR100-LT, taking a rare class for a frequent one costs 1:"
    " mean utility": (
        "learn",
        images,
    ),
    "Calibration of 24 tables and models: mean utility": ("calibrators", calibrators),
    "Recognise images of other data sets (CIFAR-10, DermaMNIST)"
    " with a fine-tuned network: AUROC": (
        "unfamiliar",
        unfamiliar,
    ),
}


def lines() -> Iterator[str]:
    yield "| task | what people use | rfdlc | |"
    yield "|---|---|---|---|"
    for task, (name, compare) in TASKS.items():
        theirs, ours = compare()
        yield f"| {task} | {theirs} | {ours} | [csv](benchmarks/results/{name}.csv) |"


def table() -> str:
    return "\n".join(lines())


def block() -> str:
    """The table and the sentences on it, between the lines that name this script."""
    return f"{START}\n{table()}\n\n{chosen_and_new()}\n{END}\n"


def write(page: Path) -> None:
    """Replace what is between the lines that name this script."""
    before, _, rest = page.read_text(encoding="utf-8").partition(f"{START}\n")
    page.write_text(before + block() + rest.partition(f"{END}\n")[2], encoding="utf-8")


if __name__ == "__main__":
    print(block())
    if "--write" in sys.argv:
        write(RESULTS.parents[1] / "README.md")

"""The table of the README, and the sentences on its tables: what people use, and rfdlc,
from the committed results.

python benchmarks/headline.py            prints it
python benchmarks/headline.py --write    puts it into README.md

The column of differences has the verdict of `comparing.py` on each number, paired by
seed or fold; a dash where nothing was measured again.
"""

import csv
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from statistics import mean

from comparing import in_words, of_row, of_seeds, verdict

START, END = "<!-- python benchmarks/headline.py -->", "<!-- headline.py ends here -->"
RESULTS = Path(__file__).parent / "results"
PAPER = RESULTS.parents[1] / "paper/results"
PAPER_RUNS = ("rf-dlc-paper", "rf-dlc-paper+utility=tail-sensitive-by-rank")
DECIDED_FOR = ("calibrated -1", "utility")  # a decision, and its metric
NOT_REPEATED = "–"
Row = dict[str, str]
Cells = tuple[str, str, str]  # what people use, rfdlc, and the verdict


def rows(name: str, **given: str) -> list[Row]:
    """The rows of results/name.csv that have the given values."""
    with (RESULTS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if given.items() <= row.items()]


def rounded(text: str) -> str:
    """To one digit as people do it: 61.05 is 61.1."""
    return str(Decimal(text).quantize(Decimal("0.1"), ROUND_HALF_UP))


def costs() -> Cells:
    here = {
        row["decision"]: float(row["mean_cost"]) for row in rows("costs", cost="25")
    }
    return (
        f"the most probable class: {here['most probable class']:.2f}",
        f"{here['calibrated, decided']:.2f}",
        NOT_REPEATED,
    )


def of_cell(others: list[Row]) -> str:
    """The verdict on RFDLCClassifier beside the best of the others."""
    best = min(others, key=lambda row: float(row["difference"]))
    return of_row(best)


def verdicts(**given: str) -> str:
    """How often RFDLCClassifier is better than the best of the others, by table and
    metric.
    """
    problems = defaultdict(list)
    for row in rows("tabular", **given):
        if row["model"] != "RFDLCClassifier":
            problems[row["problem"], row["metric"]].append(row)
    return in_words(of_cell(others) for others in problems.values())


def tables() -> Cells:
    return (
        "the best of five classifiers of scikit-learn and imbalanced-learn",
        verdicts(),
        "95% intervals",
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


def by_seed(found: list[Row], key: str) -> dict[str, float]:
    return {row["seed"]: float(row[key]) for row in found if row["seed"].isdecimal()}


def paired(ours: dict[str, float], theirs: dict[str, float]) -> str:
    """The verdict on differences of the same seeds; a single value is that of all."""
    if len(theirs) == 1:
        (value,) = theirs.values()
        theirs = dict.fromkeys(ours, value)
    return of_seeds([ours[seed] - theirs[seed] for seed in ours if seed in theirs])


def both(ours: list[Row], theirs: list[Row]) -> str:
    """The verdicts on accuracy, and on that of rare classes."""
    return ", ".join(
        paired(by_seed(ours, key), by_seed(theirs, key)) for key in ("accuracy", "tail")
    )


def features() -> Cells:
    where = {"data": "cifar100-lt"}
    probe = rows(
        "features",
        **where,
        model="logit-adjusted linear probe",
        seed="0",
    )
    ours = rows("features", **where, model="rfdlc", setting="default")
    mean_row = next(row for row in ours if row["seed"] == "mean")
    told = [
        f"{rounded(row['accuracy'])}, {rounded(row['tail'])}"
        for row in (probe[0], mean_row)
    ]
    return f"logit-adjusted linear probe: {told[0]}", told[1], both(ours, probe)


def shares(name: str, **given: str) -> str:
    """Mean accuracy and accuracy of rare classes, in percent."""
    here = rows(name, **given)
    return ", ".join(
        f"{100 * mean(float(row[key]) for row in here):.1f}"
        for key in ("accuracy", "tail")
    )


def photographs() -> Cells:
    here = [
        {"data": "caltech101-lt", "row": row}
        for row in ("logit adjustment, three networks", "ours")
    ]
    rival, ours = (shares("finetune", **given) for given in here)
    theirs, mine = (rows("finetune", **given) for given in here)
    return f"three networks, logit adjustment: {rival}", ours, both(mine, theirs)


def scratch() -> Cells:
    names = (
        "balpoe, 200 epochs",
        "rf-dlc-strong, 200 epochs",
        "rf-dlc-strong, 2 shared stages, 40% held out",
    )
    here = [{"data": "cifar100-lt", "row": row, "split": "test"} for row in names]
    here = [
        {
            **given,
            "commit": rows("frontier", **given)[-1]["commit"],
        }
        for given in here
    ]  # the last that measured it
    measured = [rows("frontier", **given) for given in here]
    seconds = [mean(float(own["seconds"]) for own in found) for found in measured]
    rival, *ours = (
        f"{shares('frontier', **g)} in {s:.0f} s"
        for g, s in zip(here, seconds, strict=True)
    )
    published = rows("../published", data="cifar100-lt", row=names[0])[0]["accuracy"]
    return (
        f"BalPoE, as published: {published}; trained and evaluated as ours: {rival}",
        "; ".join(ours),
        "; ".join(both(found, measured[0]) for found in measured[1:]),
    )


def sets() -> Cells:
    found = {row["method"]: row for row in rows("sets", data="cifar100-lt")}
    kinds = {
        "MAPIE LAC": "MAPIE lac",
        "MAPIE APS": "MAPIE aps",
        "TorchCP": "TorchCP class-conditional",
        "": "rfdlc macro",
    }
    told = []
    for name, method in kinds.items():
        row = found[f"{method}, calibrated"]
        text = f"{name}: {float(row['macro']):.0%}, {float(row['size']):.1f}"
        told.append(text.removeprefix(": "))
    return "; ".join(told[:3]), told[3], NOT_REPEATED


def wrong_labels() -> Cells:
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
    return f"cleanlab: {theirs}", ours, NOT_REPEATED


def decided_utilities(run: str, data: str = "cifar100-lt") -> dict[str, float]:
    """Of a training of the study, by seed: calibrated, and decided by expected
    utility.
    """
    path = PAPER / data / "metrics.csv"
    with path.open(newline="", encoding="utf-8") as file:
        return {
            row["seed"]: float(row["value"])
            for row in csv.DictReader(file)
            if (row["run"], row["split"]) == (run, "test")
            and (row["decision"], row["metric"]) == DECIDED_FOR
        }


def images() -> Cells:
    """The paper's training that is best if all are decided alike."""
    candidates = [decided_utilities(run) for run in PAPER_RUNS]
    paper = max(candidates, key=lambda own: mean(own.values()))
    ours = decided_utilities("rf-dlc")
    return (
        f"the paper's training, decided alike: {mean(paper.values()):.2f}",
        f"{mean(ours.values()):.2f}",
        paired(ours, paper),
    )


def calibrators() -> Cells:
    start = "all tables and models: "
    found = {
        row["what"].removeprefix(start): row
        for row in rows("calibrators")
        if start in row["what"]
    }
    ours = found.pop("auto")
    best = max(found.values(), key=lambda row: float(row["value"]))
    gain, error = map(float, ours["ratio"].split(" +- "))
    return (
        f"the best single calibrator: {float(best['value']):.3f}",
        f"{float(ours['value']):.3f}, a weighted mean of all",
        verdict(gain, error, math.inf),
    )


def unfamiliar() -> Cells:
    """Ours with thresholds by region, which is what `fit_unfamiliar` does, beside the
    best of the others on each data set.
    """
    scores = {
        "largest probability": "one",
        "Mahalanobis": "one",
        "energy + entropy": "by region",
    }
    told, verdicts_told = [], []
    measured = {
        (score, other): by_seed(found, "auroc") or {"": float(found[0]["auroc"])}
        for score, kind in scores.items()
        for other in ("cifar10", "dermamnist")
        if (
            found := rows(
                "unfamiliar",
                model="refitted network",
                score=score,
                thresholds=kind,
                other=other,
            )
        )
    }
    for score in scores:
        both_sets = (measured[score, other] for other in ("cifar10", "dermamnist"))
        values = ", ".join(f"{mean(own.values()):.2f}" for own in both_sets)
        told.append(f"{score}: {values}")
    for other in ("cifar10", "dermamnist"):
        rivals = [measured[score, other] for score in [*scores][:2]]
        best = max(rivals, key=lambda own: mean(own.values()))
        verdicts_told.append(paired(measured["energy + entropy", other], best))
    return "; ".join(told[:2]), told[2], ", ".join(verdicts_told)


TASKS: dict[str, tuple[str, Callable[[], Cells]]] = {
    "Breast tumours, a missed one costs 25: mean cost of a decision": (
        "benchmarks/results/costs.csv",
        costs,
    ),
    f"{of_tables()} imbalanced tables, {of_tables('metric')} metrics each": (
        "benchmarks/results/tabular.csv",
        tables,
    ),
    "Features of a pretrained network, CIFAR100-LT: accuracy, rare classes (%)": (
        "benchmarks/results/features.csv",
        features,
    ),
    "Three EfficientNet-Lite0 fine-tuned on Caltech101-LT:"
    " accuracy, rare classes (%)": (
        "benchmarks/results/finetune.csv",
        photographs,
    ),
    "Three ResNet-32 trained on CIFAR100-LT: accuracy, rare classes (%)": (
        "benchmarks/results/frontier.csv",
        scratch,
    ),
    "Prediction sets for 90%, CIFAR100-LT:"
    " coverage averaged over classes, classes in a set": (
        "benchmarks/results/sets.csv",
        sets,
    ),
    "Digits with 5% wrong labels: share of suspects that are wrong": (
        "benchmarks/results/mislabelled.csv",
        wrong_labels,
    ),
    "ResNet-32 on CIFAR100-LT, taking a rare class for a frequent one costs 1:"
    " mean utility": (
        "paper/results/cifar100-lt/metrics.csv",
        images,
    ),
    "Calibration of 24 tables and models: mean utility": (
        "benchmarks/results/calibrators.csv",
        calibrators,
    ),
    "Recognise images of other data sets (CIFAR-10, DermaMNIST)"
    " with a fine-tuned network: AUROC": (
        "benchmarks/results/unfamiliar.csv",
        unfamiliar,
    ),
}


def lines() -> Iterator[str]:
    yield "| task | what people use | rfdlc | rfdlc is | |"
    yield "|---|---|---|---|---|"
    for task, (path, compare) in TASKS.items():
        link = f"[csv]({path})"
        yield f"| {task} | {' | '.join(compare())} | {link} |"


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

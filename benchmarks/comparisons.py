"""Every comparison that README and docs state, once more from the committed results.

    python benchmarks/comparisons.py    fails where a page says something else

A page has each statement as it is made here; verdicts are those of `comparing.py`.
What no file of results has per seed or fold has no verdict.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean

import headline
from comparing import BETTER, WITHIN, WORSE, counted, of_row
from headline import by_seed, decided_utilities, paired, rows

ROOT = Path(__file__).parents[1]
Row = dict[str, str]
Statement = tuple[str, str]  # a page, and what it says

SHORT = {
    "logistic regression": "LR",
    "random forest": "RF",
    "gradient boosting": "GB",
    "MLP": "MLP",
    "balanced random forest": "BRF",
}
METRICS = ("log loss", "one-hot", "tail-sensitive", "inverse-frequency")
OURS = "RFDLCClassifier"


# --- tables, with scikit-learn
# --------------------------------------------------------------------------------------


def best_others() -> dict[tuple[str, str], Row]:
    """By table and metric, the best of the other classifiers."""
    others = defaultdict(list)
    for row in rows("tabular"):
        if row["model"] != OURS:
            others[row["problem"], row["metric"]].append(row)
    return {
        cell: min(found, key=lambda row: float(row["difference"]))
        for cell, found in others.items()
    }


def classifier_rows() -> Iterator[str]:
    """The rows of the table of docs/scikit-learn.md."""
    best = best_others()
    ours = {(row["problem"], row["metric"]): row for row in rows("tabular", model=OURS)}
    for problem in dict.fromkeys(problem for problem, _ in best):
        about = ours[problem, "log loss"]
        star = " *" if about["choices"] == "development" else ""
        classes = len(about["counts"].split())
        cells = []
        for metric in METRICS:
            other = best[problem, metric]
            value = f"{float(ours[problem, metric]['mean']):.3f}"
            word = of_row(other)
            if word == BETTER:
                value = f"**{value}**"
            elif word == WORSE:
                value = f"{value} ▾"
            cells.append(f"{value}, {float(other['mean']):.3f} {SHORT[other['model']]}")
        size = f"({classes}, {about['samples']})"
        yield f"| {problem}{star} {size} | {' | '.join(cells)} |"


def classifiers() -> Iterator[Statement]:
    page = "docs/scikit-learn.md"
    for line in classifier_rows():
        yield page, line
    best = best_others()
    kinds = {"new": "never used for a choice", "development": "used for choices"}
    for choices, name in kinds.items():
        here = [row for row in best.values() if row["choices"] == choices]
        better, within, worse = counted(map(of_row, here))
        tables = len({row["problem"] for row in here})
        yield (
            page,
            f"| {name}, {tables} tables x {len(METRICS)} metrics"
            f" | {better} | {within} | {worse} |",
        )
    losses = [row for (_, metric), row in best.items() if metric == "log loss"]
    better, within, worse = counted(map(of_row, losses))
    yield (
        page,
        f"In log loss RFDLCClassifier is better on {better} of {len(losses)} tables,"
        f" within chance on {within} and worse on {worse}.",
    )
    higher, lower = of_decisions()
    yield (
        page,
        "its mean tail-sensitive utility is higher than that of\n"
        f"their arg max in {higher[0]} of {higher[1]} cases (tables x classifiers),"
        f" and lower in {lower}.",
    )


def of_decisions() -> tuple[tuple[int, int], int]:
    """How often expected utility has a higher mean than arg max, and a lower one."""
    values: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for row in rows("tabular", metric="tail-sensitive"):
        if row["decision"] in ("expected utility", "arg max"):
            values[row["problem"], row["model"]][row["decision"]] = float(row["mean"])
    gains = [own["expected utility"] - own["arg max"] for own in values.values()]
    higher = sum(gain > 0 for gain in gains)
    return (higher, len(gains)), sum(gain < 0 for gain in gains)


# --- prediction sets
# --------------------------------------------------------------------------------------

SETS = {
    "rfdlc marginal": "`marginal` (as MAPIE LAC, TorchCP split)",
    "rfdlc class": "`class`",
    "rfdlc macro": "**`macro`**",
    "MAPIE aps": "MAPIE APS",
    "TorchCP class-conditional": "TorchCP class-conditional",
}
WITHOUT_SIZE = ("rfdlc marginal", "rfdlc class", "rfdlc macro")


def prediction_sets() -> Iterator[Statement]:
    for data in ("cifar100-lt", "surveys", "flights"):
        found = {row["method"]: row for row in rows("sets", data=data)}
        for method, name in SETS.items():
            row = found[f"{method}, calibrated"]
            shares = [
                f"{float(row[key]):.1%}" for key in ("marginal", "macro", "worst")
            ]
            ours = "" if method in WITHOUT_SIZE else f"{float(row['at_macro']):.2f}"
            size = f"{float(row['size']):.2f}"
            yield (
                "docs/sets.md",
                f"| {data} | {name} | {' | '.join([*shares, size, ours])} |",
            )


# --- handing over
# --------------------------------------------------------------------------------------

CHOW = {
    "simulated": "simulated: Chow's rule / with corrected prior / by worth",
    "CIFAR100-LT features": "CIFAR100-LT, features of a network",
    "digits": "digits, 4 training samples in the rarest class",
}
RULES = ("Chow", "Chow, corrected", "ours")
SHARES = ("0.05", "0.1", "0.2", "0.3")


def balanced_errors(data: str, share: str) -> dict[str, dict[str, float]]:
    """By rule and seed."""
    return {
        rule: by_seed(
            rows("deferral", data=data, share=share, method=rule), "balanced_error_all"
        )
        for rule in RULES
    }


def handing_over() -> Iterator[Statement]:
    """Bold: the smallest, if it is so by the rule beside each of the others."""
    for data, name in CHOW.items():
        cells = []
        for share in SHARES:
            found = balanced_errors(data, share)
            least = min(found, key=lambda rule: mean(found[rule].values()))
            surely = all(
                paired(found[other], found[least]) == BETTER
                for other in RULES
                if other != least
            )
            told = {
                rule: f"{100 * mean(own.values()):.1f}" for rule, own in found.items()
            }
            if surely:
                told[least] = f"**{told[least]}**"
            cells.append(" / ".join(told[rule] for rule in RULES))
        yield "docs/deferral.md", f"| {name} | {' | '.join(cells)} |"


# --- the study
# --------------------------------------------------------------------------------------


DATA = {
    "cifar100-lt": "CIFAR100-LT",
    "cifar10-lt": "CIFAR10-LT",
    "dermamnist": "DermaMNIST",
    "dermamnist-separated": "DermaMNIST, no shared lesions",
}
PLAIN = "rf-dlc-paper"
TRAINED_FOR_IT = "rf-dlc-paper+utility=tail-sensitive-by-rank"
METHODS = {
    "ce": "CE",
    "focal": "focal",
    "cb": "CB",
    "cb+deferred=0.8": "CB, weights late",
    "ldam-drw": "LDAM",
    "la": "LA",
    "ace": "ACE",
    "srepr": "SRepr",
    "ride": "RIDE",
    "tlc": "TLC",
    PLAIN: "RF-DLC (paper)",
    TRAINED_FOR_IT: "RF-DLC (paper) trained for it",
}


def study() -> Iterator[Statement]:
    """The utility of `rf-dlc` beside every method, all decided alike; and of the
    paper's training without a utility beside the one with it.
    """
    for data, name in DATA.items():
        ours = decided_utilities("rf-dlc", data)
        methods = defaultdict(list)
        for run, method in METHODS.items():
            if theirs := decided_utilities(run, data):
                methods[paired(ours, theirs)].append(method)
        told = f"  - {name}: better than {len(methods[BETTER])} methods"
        if methods[WITHIN]:
            told = f"{told}, within chance of {' and '.join(methods[WITHIN])}"
        if methods[WORSE]:
            told = f"{told}, worse than {' and '.join(methods[WORSE])}"
        yield "docs/findings.md", f"{told}.\n"
    words = (
        paired(decided_utilities(PLAIN, data), decided_utilities(TRAINED_FOR_IT, data))
        for data in DATA
    )
    listed = "; ".join(
        f"{name}: {word}" for name, word in zip(DATA.values(), words, strict=True)
    )
    yield "docs/findings.md", f"({listed})"


def readme() -> Iterator[Statement]:
    yield "README.md", headline.block()


STATED: tuple[Callable[[], Iterator[Statement]], ...] = (
    readme,
    classifiers,
    prediction_sets,
    handing_over,
    study,
)


def missing() -> list[Statement]:
    """Statements that a page does not have."""
    pages = dict[str, str]()
    found = []
    for statements in STATED:
        for page, text in statements():
            if page not in pages:
                pages[page] = (ROOT / page).read_text(encoding="utf-8")
            if text not in pages[page]:
                found.append((page, text))
    return found


def main() -> None:
    wrong = missing()
    for page, text in wrong:
        print(f"{page} does not say what the results give:\n{text}\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

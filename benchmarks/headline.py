"""The table at the head of the README, from `results/learn.csv`.

python benchmarks/headline.py
"""

import csv
import statistics
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "learn.csv"
ROWS = (  # label, configuration, mode, decision
    ("the paper's training with its utility, arg max", "paper-utility", "test", "argmax mean-logits"),
    ("`rf-dlc`, no utility", "rf-dlc", "refit", "argmax calibrated"),
    ("the same model, decided for a penalty of -0.25", "rf-dlc", "refit", "expected-utility calibrated -0.25"),
    ("the same model, decided for a penalty of -1", "rf-dlc", "refit", "expected-utility calibrated -1.0"),
)
METRICS = {
    "accuracy %": "acc",
    "tail accuracy %": "tail",
    "false head rate %": "fhr",
    "mean utility": "utility",
    "ECE %": "ece",
}


def table(path: Path = RESULTS) -> str:
    """Mean and standard deviation over seeds, as Markdown. Utility is that of the penalty -1 in every row."""
    with path.open(newline="") as file:
        measured = list(csv.DictReader(file))
    lines = ["| |" + "|".join(METRICS) + "|", "|---|" + "---|" * len(METRICS)]
    for label, config, mode, decision in ROWS:
        here = [row for row in measured if (row["config"], row["mode"], row["decision"]) == (config, mode, decision)]
        cells = [_cell([float(row["value"]) for row in here if row["metric"] == name]) for name in METRICS.values()]
        lines.append(f"|{label}|" + "|".join(cells) + "|")
    return "\n".join(lines)


def _cell(values: list[float]) -> str:
    digits = 3 if max(map(abs, values)) < 1 else 1
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


if __name__ == "__main__":
    print(table())

"""docs/evidence.md, generated from the result files: `python -m paper page >
docs/evidence.md`.
"""

from paper import rendering
from paper.plots import measured_ablations
from paper.results import Results
from paper.specs import DATA_TITLES, SPECS
from paper.tables import build, frontier

INTRODUCTION = """\
# Evidence

Every table of the paper, rerun. This page is generated from the CSV files in
`paper/results`, and a test fails when it is stale:
`python -m paper page > docs/evidence.md`. Conclusions: [Findings](findings.md).

A cell is `measured (published, difference)`. {legend} Accuracies, rates, AUC and ECE
are percentages; the mean utility is that of the tail-sensitive utility with a penalty
of -1. Every row is a mean over runs: `metrics.csv` has one row per run and metric,
`runs.csv` the hardware, versions, commit and time of each run.

Two protocols:

- **paper**: as the authors ran it, on true factor-100 data: training on everything, the
  arg max of the mean logits, no calibration, their measure of ECE.
- **standard**: calibrated probabilities, decided by expected utility. The calibration
  (two numbers: a temperature and a correction of the prior) is fitted on a tenth of the
  training data, with a model trained without it, or on the validation split where there
  is one; no choice used a test label. ECE with 15 bins of the maximum probability.

```
python -m paper tables fhr                      # one table, from the CSV files
python -m paper tables fhr --run --data DIR     # train missing runs first
python -m paper run cifar100 --dry-run          # what a grid costs
```
"""


def text(results: Results) -> str:
    """The whole page."""
    tables = rendering.markdown([build(name, results) for name in SPECS])
    parts = [
        INTRODUCTION.format(legend=rendering.LEGEND),
        _measured(results),
        _contents(),
        tables,
        _figures(results),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _measured(results: Results) -> str:
    """What was run where."""
    lines = ["| data | runs | hardware | commits |", "|---|---:|---|---|"]
    for data, rows in results.runs.items():
        made = {
            name: ", ".join(sorted({row[name] for row in rows if row[name]}))
            for name in ("hardware", "commit")
        }
        lines.append(
            f"| {DATA_TITLES.get(data, data)} | {len(rows)} | {made['hardware']} |"
            f" {made['commit']} |"
        )
    return "\n".join(
        [*(lines if results.runs else ["Nothing has been measured yet."]), ""]
    )


def _figures(results: Results) -> str:
    """Links to the figures that `python -m paper figures` draws."""
    names = measured_ablations(results)
    for data in results.runs:
        if frontier(results, data, "rf-dlc"):
            kinds = (
                f"frontier-{data}",
                f"reliability-{data}-argmax",
                f"reliability-{data}-calibrated",
            )
            names += [*kinds, f"risk-coverage-{data}"]
    links = "\n".join(f"![{name}](figures/{name}.png)" for name in names)
    return (
        "## Figures\n\nDrawn from the same files: `python -m paper figures"
        f" docs/figures`.\n\n{links}"
    )


def _contents() -> str:
    return "Tables: " + ", ".join(f"[{name}](#{name})" for name in SPECS) + ".\n"

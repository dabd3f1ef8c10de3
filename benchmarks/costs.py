"""One classifier, three costs: the picture of the README, and what decisions cost.

    python benchmarks/costs.py   writes results/costs.csv and docs/figures/costs.png

Naive Bayes for the 569 breast tumours of scikit-learn (one split: 219 train, 150 fit a
temperature, 200 are decided). A false alarm costs 1; a missed tumour costs 1, 5 or 25.
It is an illustration: 200 samples of one split, on which this model was chosen among
several.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.naive_bayes import GaussianNB

import rfdlc
from recording import write

FIELDS = (
    "cost",
    "decision",
    "missed",
    "false_alarms",
    "mean_cost",
    "low",
    "high",
    "samples",
)
COSTS = (1, 5, 25)
NAMES = ("benign", "malignant")
COLOURS = ("#4477aa", "#ee6677")
PICTURE = Path(__file__).parents[1] / "docs" / "figures" / "costs.png"


def scores() -> tuple[NDArray[Any], ...]:
    """Held-out probabilities and labels, and those of new samples."""
    data = load_breast_cancer()
    names = np.array(["malignant", "benign"])[data.target]
    rest, x_new, y_rest, y_new = train_test_split(
        data.data, names, test_size=200, stratify=names, random_state=0
    )
    x, x_held, y, y_held = train_test_split(
        rest, y_rest, test_size=150, stratify=y_rest, random_state=0
    )
    model = GaussianNB().fit(x, y)
    return model.predict_proba(x_held), y_held, model.predict_proba(x_new), y_new


def utility(cost: int) -> rfdlc.Utility:
    return rfdlc.Utility([[0, -1], [-cost, 0]], NAMES)


def measure(
    p_held: NDArray[Any], y_held: NDArray[Any], p: NDArray[Any], y: NDArray[Any]
) -> list[dict[str, Any]]:
    found = []
    calibrated = rfdlc.Decider(utility(1), calibration="temperature").fit(
        p_held, y_held
    )
    raw = rfdlc.Decider(utility(1))
    ways = {
        "most probable class": raw.replace(rule="argmax"),
        "decided, not calibrated": raw,
        "calibrated, decided": calibrated,
    }
    for cost in COSTS:
        for name, way in ways.items():
            decider = way.replace(utility=utility(cost))
            actions, result = (
                np.array(NAMES)[decider.decide(p)],
                rfdlc.evaluate(p, y, decider),
            )
            low, high = result.intervals["mean_utility"]
            found.append(
                {
                    "cost": cost,
                    "decision": name,
                    "missed": int(((y == "malignant") & (actions == "benign")).sum()),
                    "false_alarms": int(
                        ((y == "benign") & (actions == "malignant")).sum()
                    ),
                    "mean_cost": f"{-result.mean_utility:.3f}",
                    "low": f"{-high:.3f}",
                    "high": f"{-low:.3f}",
                    "samples": len(y),
                }
            )
    return found


def draw(
    p_held: NDArray[Any], y_held: NDArray[Any], p: NDArray[Any], y: NDArray[Any]
) -> None:
    import matplotlib.pyplot as plt

    decider = rfdlc.Decider(utility(1), calibration="temperature").fit(p_held, y_held)
    ill = decider.probabilities(p)[:, 1]
    order = np.argsort(ill)
    figure, axes = plt.subplots(3, 1, figsize=(9, 4), sharex=True)
    for axis, cost in zip(axes, COSTS, strict=True):
        actions = decider.replace(utility=utility(cost)).decide(p)[order]
        wrong = np.array(NAMES)[actions] != y[order]
        for action, colour in enumerate(COLOURS):
            here = np.flatnonzero(actions == action)
            axis.bar(
                here,
                np.ones(len(here)),
                width=1.0,
                color=colour,
                label=f"decided {NAMES[action]}",
                linewidth=0,
            )
        axis.plot(
            np.flatnonzero(wrong),
            np.full(wrong.sum(), 0.5),
            "x",
            color="black",
            ms=5,
            label="wrong",
        )
        missed = int((wrong & (y[order] == "malignant")).sum())
        errors = f"{missed} missed, {int(wrong.sum()) - missed} false alarms"
        title = (
            f"a missed tumour costs {'as much as' if cost == 1 else f'{cost} times'} a"
            f" false alarm: {errors}"
        )
        axis.set_title(title, fontsize=10, loc="left", color="#444444")
        axis.set(yticks=[], ylim=(0, 1), xlim=(-0.5, len(y) - 0.5))
        axis.spines[:].set_visible(False)
    places = [
        int(np.searchsorted(ill[order], share)) for share in (0.01, 0.05, 0.2, 0.5, 0.9)
    ]
    axes[2].set_xticks(places, ["1%", "5%", "20%", "50%", "90%"])
    axes[2].set_xlabel(
        "200 new tumours, ordered by the calibrated probability of being malignant"
    )
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        ncols=3,
        loc="upper right",
        frameon=False,
        fontsize=9,
    )
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    figure.savefig(PICTURE, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    data = scores()
    write("costs", measure(*data), ["rfdlc", "numpy", "scikit-learn"], columns=FIELDS)
    draw(*data)

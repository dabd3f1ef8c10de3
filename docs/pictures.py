"""The pictures of concepts.md, from simulated data: python docs/pictures.py writes
docs/figures/concept-*.png.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

import rfdlc

FIGURES = Path(__file__).parent / "figures"
INK, COLOURS = "#444444", ("#4477aa", "#ccbb44", "#ee6677", "#999999")
PRIOR = np.array([0.6, 0.25, 0.1, 0.05])


def softmax(z):
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def simulate(rng, samples, scale=1.0, separation=2.0):
    """Probabilities of a model that is right about its uncertainty if scale is 1, and
    too certain above.
    """
    y = rng.choice(4, samples, p=PRIOR)
    x = separation * np.eye(4)[y] + rng.normal(size=(samples, 4))
    return softmax(scale * (separation * x + np.log(PRIOR))), y


def utility(plt):
    names = ["benign", "suspicious", "malignant"]
    costly = [[0, -1, -1], [-1, 0, -1], [-10, -10, 0]]
    kinds = [
        ("equal costs", rfdlc.Utility(np.eye(3) - 1, names)),
        ("a missed malignant case costs 10", rfdlc.Utility(costly, names)),
        ("and asking costs 0.4", rfdlc.Utility(costly, names).with_abstain(-0.4)),
    ]
    figure, axes = plt.subplots(1, 3, figsize=(9, 3), gridspec_kw={"wspace": 0.35})
    corners = np.array([[0, 0], [1, 0], [0.5, np.sqrt(3) / 2]])
    grid = (
        np.array([(i, j, 200 - i - j) for i in range(201) for j in range(201 - i)])
        / 200
    )
    for axis, (title, each) in zip(axes, kinds, strict=True):
        actions = rfdlc.Decider(each).decide(grid)
        axis.scatter(
            *(grid @ corners).T,
            c=[COLOURS[a] for a in actions],
            s=4,
            marker="h",
            linewidths=0,
        )
        axis.set_title(title, fontsize=10, color=INK, pad=12)
        for (x, y), name, (dx, dy) in zip(
            corners, names, [(-2, -12), (2, -12), (0, 4)], strict=True
        ):
            axis.annotate(
                name,
                (x, y),
                (dx, dy),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=INK,
            )
        axis.set_aspect("equal")
        axis.axis("off")
    handles = [plt.Line2D([], [], marker="s", ls="", color=c) for c in COLOURS]
    figure.legend(
        handles,
        [f"decide {n}" for n in names] + ["ask"],
        ncols=4,
        loc="lower center",
        frameon=False,
        fontsize=8,
    )
    return figure


def prior(plt):
    figure, axis = plt.subplots(figsize=(6, 3.2))
    evidence = np.linspace(-6, 6, 200)
    for share, colour in zip((0.5, 0.1, 0.01), COLOURS, strict=False):
        curve = 1 / (1 + np.exp(-evidence - np.log(share / (1 - share))))
        axis.plot(
            evidence, curve, color=colour, lw=2, label=f"{share:.0%} of all cases"
        )
    axis.legend(frameon=False, fontsize=9)
    axis.set(
        xlabel="evidence in the sample (log likelihood ratio)",
        ylabel="probability of the class",
    )
    return figure


def calibration(plt):
    rng = np.random.default_rng(0)
    (p_held, y_held), (p_new, y_new) = (
        simulate(rng, n, scale=3, separation=1.3) for n in (1000, 40000)
    )
    decider = rfdlc.Decider(rfdlc.Utility.one_hot(4), calibration="temperature").fit(
        p_held, y_held
    )
    figure, axis = plt.subplots(figsize=(4.4, 4))
    axis.plot([0, 1], [0, 1], color="#bbbbbb", lw=1)
    for p, label, colour in [
        (p_new, "as the model says", COLOURS[2]),
        (decider.probabilities(p_new), "calibrated", COLOURS[0]),
    ]:
        top, right = p.max(axis=1), p.argmax(axis=1) == y_new
        bins = [(top >= low) & (top < low + 0.1) for low in np.arange(0.3, 1, 0.1)]
        seen = [b for b in bins if b.sum() > 100]
        axis.plot(
            [top[b].mean() for b in seen],
            [right[b].mean() for b in seen],
            "o-",
            color=colour,
            label=label,
        )
    axis.set(
        xlabel="stated probability of the most probable class",
        ylabel="share that is right",
        xlim=(0.2, 1),
        ylim=(0.2, 1),
    )
    axis.legend(frameon=False, fontsize=9)
    return figure


def sets(plt):
    rng = np.random.default_rng(0)
    (p_held, y_held), (p_new, y_new) = (
        simulate(rng, 2000, separation=1.2),
        simulate(rng, 40000, separation=1.2),
    )
    classes = rfdlc.Classes.from_counts((1000 * PRIOR).astype(int))
    decider = rfdlc.Decider(rfdlc.Utility.one_hot(classes), train_prior="train").fit(
        p_held, y_held
    )
    figure, axis = plt.subplots(figsize=(6, 3.2))
    for kind, colour, shift in [
        ("marginal", COLOURS[2], -0.2),
        ("macro", COLOURS[0], 0.2),
    ]:
        inside = decider.fit_sets(p_held, y_held, kind=kind, coverage=0.9).decide_sets(
            p_new
        )
        covered = [inside[y_new == c, c].mean() for c in range(4)]
        size = inside.sum(axis=1).mean()
        axis.bar(
            np.arange(4) + shift,
            covered,
            0.38,
            color=colour,
            label=f"{kind}: {size:.1f} classes in a set",
        )
    axis.axhline(0.9, color=INK, lw=1, ls=":")
    axis.set(
        xlabel="share of the class in the data",
        ylabel="coverage of the class",
        ylim=(0, 1.3),
        yticks=np.linspace(0, 1, 6),
    )
    axis.set_xticks(range(4), [f"{share:.0%}" for share in PRIOR])
    axis.legend(frameon=False, fontsize=9, ncols=2, loc="upper center")
    return figure


def pictures() -> Iterator[Path]:
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {"axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"}
    )
    for draw in (utility, prior, calibration, sets):
        path = FIGURES / f"concept-{draw.__name__}.png"
        draw(plt).savefig(
            path, dpi=110, bbox_inches="tight", metadata={"Software": None}
        )
        yield path


if __name__ == "__main__":
    for written in pictures():
        print(written)

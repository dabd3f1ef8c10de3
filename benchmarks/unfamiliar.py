"""Unfamiliar input: the choice of a score, and images of other data sets against models
of CIFAR100-LT.

    python benchmarks/unfamiliar.py choose OUT
        OUT/MODELS/KIND-SEED.npz: benchmarks/unfamiliar_networks.py
    python benchmarks/unfamiliar.py test OUT
        with OUT/strong alone: --name unfamiliar-strong
    python benchmarks/unfamiliar.py simulate
        data by benchmarks/unfamiliar_simulated.py

choose: writes results/unfamiliar-choice.csv. No image of the test is used. Samples of
classes that a model does not know are unfamiliar: heads on features of CIFAR100-LT and
of Caltech101-LT were trained without some classes; of fine-tuned networks of
CIFAR100-LT, out-of-fold logits of some classes are not looked at; logistic regressions
of tables of scikit-learn. Families: one class of each superclass left out (`siblings`),
classes at random, superclasses; for heads also images of the other data set and
simulated images (noise, blobs, digits); and classes left out of tables. The rule for
scores of logits: the highest mean over all families of the AUROC, of single scores and
sums of two, which an exported graph computes. For scores with features: the smallest
regret over the families of networks that were fine-tuned without some classes (rows
`fine-tuned`), which is the most that the best of energy, largest probability and
Mahalanobis distance is above a score in any of them; of about the same ones, the
highest AUROC of classes left out. `familiarity` is what networks with this setting
give. Its parts were chosen before on networks that were trained alike, with first
features of another network. A + B is the sum of two scores, each divided by its
standard deviation on held-out samples, A + energy + entropy has A twice. With excess,
all terms have the same weight (the excess of the energy over what the entropy explains:
benchmarks/unfamiliar_development.py). A * B is the sum of the logarithms of their upper
tail probabilities there (Fisher). Classes count equally.

test: writes results/unfamiliar.csv, from models of all classes, KIND `none`: the AUROC
of test images of the same classes against each other data set, and false alarms of the
former in head and tail (thirds by rank), at thresholds for a false-alarm rate of 5% on
held-out samples. Rivals in the same run: energy, largest probability, Mahalanobis
distance. Their thresholds are one quantile of the held-out scores; ours are by region
of the most probable class, too: then the AUROC is that of the false-alarm rate from
which a sample is unfamiliar. Rows `by region, classes equal` are of thresholds in which
each class of a region counts equally, as they were before. The class that a sample
looks like is the most probable one of the raw scores, which carry a uniform prior. Rows
`by region, natural prior` are by the class that is most probable for the prior of the
training data, as regions of heads were before.

simulate: writes results/unfamiliar-simulated.csv: which share of a new class is found
at a false-alarm rate, and the false alarms of test samples in the proportions of the
training data, by region of the true class (classes counting equally), and of samples of
the tail that look like it. The new class is near a rare class or a frequent one, in one
of the groups of classes (any), or far from all; of digits, each is left out in turn.
Score: the default now and before. Thresholds: the default now (`own`); by all held-out
samples that look like a region, as before; and one for all. Rows of the part `choice`
were looked at when scores and thresholds were chosen, those of `confirmation` were not.
"""

import argparse
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits, load_iris, load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import StandardScaler

import rfdlc
from recording import in_parallel, write
from rfdlc.data.longtail import hold_out_indices, profile_counts, subset
from rfdlc.decisions.unfamiliar import Unfamiliar, fit_unfamiliar, quantile
from rfdlc.probabilities.scores import softmax
from unfamiliar_scores import of_features, of_logits
from unfamiliar_simulated import PLACES, digits, gaussians, texts

Array = NDArray[Any]
Parts = dict[str, Array]
WEIGHTED, NATURAL = "by region, classes equal", "by region, natural prior"
RATE, SURPRISING = (
    0.05,
    0.5,
)  # of false alarms; standard deviations of the energy that the entropy leaves
COLUMNS = (
    "model",
    "seed",
    "score",
    "thresholds",
    "other",
    "auroc",
    "false_alarms",
    "head",
    "tail",
    "tail_over_head",
)
CHOICE = ("score", "input", "family", "auroc", "deviation", "tasks")
SIMULATION = (
    "part",
    "data",
    "new",
    "familiarity",
    "score",
    "thresholds",
    "rate",
    "auroc",
    "found",
    "false_alarms",
    "head",
    "tail",
    "tail_seen_as_tail",
    "tasks",
    "kinds",
)
RATES = (0.02, 0.05)
FEATURES = {"preset": "features", "familiarity": True}
# name: data by place (or digit) and seed, settings, seeds of the choice, seeds of the
# confirmation
WORLDS: dict[
    str,
    tuple[Callable[[Any, int], Any], dict[str, Any], tuple[int, ...], tuple[int, ...]],
] = {
    "Gaussian features": (
        lambda new, seed: gaussians(new, seed, 25, 128, 800, 1.0),
        FEATURES,
        (0,),
        (1,),
    ),
    "text embeddings": (texts, FEATURES, (0,), (1,)),
    "digits": (digits, FEATURES, (0,), (1,)),
    "digits, random features": (
        lambda new, seed: digits(new, seed, True),
        FEATURES,
        (),
        (0,),
    ),
    "table, MLP": (
        lambda new, seed: gaussians(new, seed, 12, 20, 500, 1.3),
        {"preset": "table", "backbone": "mlp", "familiarity": True},
        (0,),
        (1,),
    ),
    "table, mixture": (
        lambda new, seed: gaussians(new, seed, 6, 8, 150, 1.5),
        {"preset": "table"},
        (),
        (0,),
    ),
}
PACKAGES = ("rfdlc", "numpy", "torch", "scikit-learn")
SUPERCLASS = np.array(  # of the classes of CIFAR-100 in alphabetical order
    [
        4,
        1,
        14,
        8,
        0,
        6,
        7,
        7,
        18,
        3,
        3,
        14,
        9,
        18,
        7,
        11,
        3,
        9,
        7,
        11,
        6,
        11,
        5,
        10,
        7,
        6,
        13,
        15,
        3,
        15,
        0,
        11,
        1,
        10,
        12,
        14,
        16,
        9,
        11,
        5,
        5,
        19,
        8,
        8,
        15,
        13,
        14,
        17,
        18,
        10,
        16,
        4,
        17,
        4,
        2,
        0,
        17,
        4,
        18,
        17,
        10,
        3,
        2,
        12,
        12,
        16,
        12,
        1,
        9,
        19,
        2,
        10,
        0,
        1,
        16,
        12,
        9,
        13,
        15,
        13,
        16,
        19,
        2,
        4,
        6,
        19,
        5,
        5,
        8,
        19,
        18,
        1,
        2,
        15,
        6,
        0,
        17,
        8,
        14,
        13,
    ]
)
TABLES: dict[str, Callable[..., Any]] = {
    "digits": load_digits,
    "wine": load_wine,
    "iris": load_iris,
}


LOGITS = (
    "energy",
    "largest logit",
    "largest probability",
    "log probability",
    "entropy",
    "generalised entropy",
    "generalised entropy of each",
    "disagreement",
)
SIMULATED, DATA, FINE_TUNED = (
    ("noise", "blobs", "digits"),
    ("caltech101", "caltech", "cifar100"),
    "fine-tuned",
)
MODELS = {
    "networks": "network",
    "fine-tuned": "refitted network",
    "strong": "rf-dlc-strong",
    "heads-112": "head, 112 pixels",
}
LEFT_OUT = {
    "siblings": "siblings left out",
    "random": "classes left out",
    "super": "superclasses left out",
}
OURS = (
    "familiarity + energy + entropy + excess",
    "energy + entropy + excess",
    "familiarity + energy + entropy",
    "energy + entropy",
    "distance + energy + entropy",
    "familiarity + entropy",
    "distance + entropy",
    "entropy",
)
RIVALS = ("energy", "largest probability", "Mahalanobis", "distance")


# --- choice
# --------------------------------------------------------------------------------------


def combined(scores: dict[str, Parts], weights: Array) -> dict[str, Parts]:
    """Scores by name and part with sums of two, from the weights of held-out
    samples.
    """
    known = {
        name: parts for name, parts in scores.items() if "held-out" in parts
    }  # not features of refitted networks
    scaled, tails = standardised(known, weights), {}
    for name, parts in known.items():
        held = parts["held-out"]
        order = np.argsort(held)
        below = np.concatenate([[0], np.cumsum(weights[order])]) / weights.sum()
        tails[name] = {
            part: -np.log(
                np.maximum(
                    1 - below[np.searchsorted(held[order], each, side="left")], 0
                )
                + 1 / len(held)
            )
            for part, each in parts.items()
        }
    found = dict(scores)
    logits = [name for name in scores if name in LOGITS]
    features = [
        name
        for name in scaled
        if name.startswith(("distance", "familiarity")) or name == "neighbours"
    ]
    for a, b in [*combinations(logits, 2), *((a, b) for a in features for b in logits)]:
        found[f"{a} + {b}"] = {
            part: scaled[a][part] + scaled[b][part] for part in scores[a]
        }
        if a in features:
            found[f"{a} * {b}"] = {
                part: tails[a][part] + tails[b][part] for part in scores[a]
            }
    for a in features:
        both = {
            part: scaled["energy"][part] + scaled["entropy"][part] for part in scores[a]
        }
        found[f"{a} + energy + entropy"] = {
            part: 2 * scaled[a][part] + both[part] for part in scores[a]
        }
    rest = unexplained(scaled, weights)
    final = {
        part: each + np.maximum(0, rest[part] - SURPRISING)
        for part, each in found["energy + entropy"].items()
    }
    found["energy + entropy + excess"] = final
    for a in features:
        found[f"{a} + energy + entropy + excess"] = {
            part: scaled[a][part] + final[part] for part in scores[a]
        }
    return found


def standardised(scores: dict[str, Parts], weights: Array) -> dict[str, Parts]:
    """Scores by name and part, with mean 0 and standard deviation 1 on weighted
    held-out samples.
    """
    found = {}
    for name, parts in scores.items():
        centre = np.average(parts["held-out"], weights=weights)
        scale = max(
            np.sqrt(np.average((parts["held-out"] - centre) ** 2, weights=weights)),
            1e-12,
        )
        found[name] = {part: (each - centre) / scale for part, each in parts.items()}
    return found


def unexplained(scaled: dict[str, Parts], weights: Array) -> Parts:
    """By part, what the entropy leaves of the energy, by least squares, in standard
    deviations.
    """
    share = np.average(
        scaled["energy"]["held-out"] * scaled["entropy"]["held-out"], weights=weights
    )
    rest = {
        part: each - share * scaled["entropy"][part]
        for part, each in scaled["energy"].items()
    }
    return standardised({"rest": rest}, weights)["rest"]


def left_out(kind: str, seed: int, classes: Array) -> Array:
    """Classes that a model is trained without; superclasses are those of CIFAR-100."""
    rng = np.random.default_rng(seed)
    if kind == "siblings":
        return np.array(
            [rng.choice(np.flatnonzero(group == SUPERCLASS)) for group in range(20)]
        )
    if kind == "random":
        return rng.permutation(classes)[: len(classes) // 5]
    return np.flatnonzero(
        np.isin(SUPERCLASS, rng.permutation(20)[:4] if kind == "super" else [])
    )


def split(
    x: Array, y: Array, left: Array, seed: int
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """Training samples, held-out samples and left-out samples with their classes,
    training classes counted from 0.
    """
    inside = ~np.isin(y, left)
    kept, held = hold_out_indices(y[inside], 0.2, seed)
    codes = np.unique(y[inside], return_inverse=True)[1]
    order = np.argsort(-np.bincount(codes), kind="stable").argsort()[
        codes
    ]  # by falling frequency
    return (
        x[inside][kept],
        order[kept],
        x[inside][held],
        order[held],
        x[~inside],
        y[~inside],
    )


def aurocs(
    scores: dict[str, Parts], held_y: Array, weights: Parts
) -> dict[tuple[str, str], float]:
    """By score and part, of held-out samples against the part, classes counting
    equally.
    """
    own, found = equal(held_y), {}
    for name, parts in combined(scores, own).items():
        for part in parts.keys() - {"held-out", "familiar"}:
            truth = np.repeat([0, 1], [len(own), len(parts[part])])
            values = np.concatenate([parts["held-out"], parts[part]])
            found[name, part] = roc_auc_score(
                truth, values, sample_weight=np.concatenate([own, weights[part]])
            )
    return found


def equal(y: Array) -> Array:
    names, codes = np.unique(y, return_inverse=True)
    return np.asarray(len(y) / len(names) / np.bincount(codes)[codes])


def read(file: Path) -> tuple[dict[str, Parts], Parts, Array]:
    """Scores by name and part, the classes of samples by part, and training counts, of
    one model.
    """
    scores, labels = defaultdict[str, Parts](dict), {}
    with np.load(file) as found:
        for key in found.files:
            part, _, name = key.partition("/")
            if name == "y":
                labels[part] = found[key]
            elif name == "logits":
                for each, values in of_logits(found[key].astype(np.float64)).items():
                    scores[each][part] = values
            elif name and name != "likeliest":
                scores[name][part] = found[key].astype(np.float64)
        return scores, labels, found["counts"]


def model_task(file: Path) -> dict[tuple[str, str], float]:
    """AUROC by score and family of a model without some classes."""
    scores, labels, _ = read(file)
    kind = file.stem.partition("-")[0]
    families = {
        "left out": LEFT_OUT[kind],
        "simulated": "simulated images",
        **dict.fromkeys(DATA, "another data set"),
    }
    start = FINE_TUNED if file.parent.name == "networks" else "heads"
    weights = {
        part: np.ones(len(y)) if part == "simulated" else equal(y)
        for part, y in labels.items()
    }
    found = aurocs(scores, labels["held-out"], weights)
    return {
        (name, f"{start}, {families.get(part, part)}"): auroc
        for (name, part), auroc in found.items()
    }


def masked_task(file: Path, kind: str, seed: int) -> dict[tuple[str, str], float]:
    """AUROC by score of logits: a network of all classes, whose logits of some classes
    are not looked at.
    """
    with np.load(file) as found:
        logits, y = (
            found["held-out/logits"].astype(np.float64),
            found["held-out/y"].astype(int),
        )
    left = left_out(kind, seed, np.unique(y))
    outside, scores = np.isin(y, left), defaultdict[str, Parts](dict)
    for name, values in of_logits(np.delete(logits, left, axis=2)).items():
        scores[name] = {"held-out": values[~outside], "left out": values[outside]}
    found = aurocs(scores, y[~outside], {"left out": equal(y[outside])})
    return {
        (name, f"networks, {LEFT_OUT[kind]}"): auroc
        for (name, _), auroc in found.items()
    }


def table_task(name: str, seed: int) -> dict[tuple[str, str], float]:
    """Logistic regression without some classes: two of the digits, which are made
    long-tailed, or one of three.
    """
    x, y = TABLES[name](return_X_y=True)
    left = np.array([seed % 3])
    if name == "digits":
        y, left = np.random.default_rng(seed).permutation(10)[y], np.array([8, 9])
        rows = np.concatenate(
            [
                np.flatnonzero(y > 7),
                subset(np.where(y > 7, -1, y), profile_counts(170, 8, 20), seed),
            ]
        )
        x, y = x[rows], y[rows]
    train_x, train_y, held_x, held_y, left_x, left_y = split(x, y, left, seed)
    scaler = StandardScaler().fit(train_x)
    parts = {"held-out": scaler.transform(held_x), name: scaler.transform(left_x)}
    model = LogisticRegression(max_iter=500).fit(
        known := scaler.transform(train_x), train_y
    )
    scores, measure = defaultdict[str, Parts](dict), of_features(known, train_y)
    for part, each in parts.items():
        z = model.decision_function(each)
        logits = (z if z.ndim == 2 else np.stack([-z, z], axis=1) / 2)[None]
        for score, value in (of_logits(logits) | measure(each)).items():
            scores[score][part] = value
    found = aurocs(scores, held_y, {name: equal(left_y)})
    return {(score, f"tables, {name}"): auroc for (score, _), auroc in found.items()}


def choice_rows(out: Path, workers: int) -> Iterator[dict[str, Any]]:
    """Mean AUROC by score and family; each family counts equally in the mean, each
    table in its family.
    """
    files = [
        file
        for file in sorted(out.glob("*/*.npz"))
        if file.stem.partition("-")[0] in LEFT_OUT
    ]
    tasks: list[tuple[Any, ...]] = [(model_task, file) for file in files]
    networks = sorted((out / "fine-tuned").glob("none-*.npz"))
    tasks += [
        (masked_task, file, kind, seed)
        for seed, file in enumerate(networks)
        for kind in LEFT_OUT
    ]
    tasks += [
        (table_task, name, seed)
        for name in TABLES
        for seed in range(6 if name == "digits" else 3)
    ]
    values = defaultdict[tuple[str, str], list[float]](list)
    for each in in_parallel(_run, [(task,) for task in tasks], workers):
        for key, value in each.items():
            values[key].append(value)
    families = defaultdict[str, list[str]](list)
    for part in sorted({part for _, part in values}):
        families["tables" if part.startswith("tables") else part].append(part)
    rows: list[dict[str, Any]] = []
    for name in {score: None for score, _ in values}:
        own = (
            "logits"
            if all(word in LOGITS for word in re.split(r" [+*] ", name))
            else "features"
        )
        known = {
            family: parts
            for family, parts in families.items()
            if all((name, part) in values for part in parts)
        }
        means = {
            family: np.mean([np.mean(values[name, part]) for part in parts])
            for family, parts in known.items()
        }
        tuned = [family for family in known if family.startswith(FINE_TUNED)]
        heads = [family for family in known if family.startswith("heads")]
        best = {
            family: max(np.mean(values[rival, family]) for rival in RIVALS[:3])
            for family in tuned + heads
        }
        found = {
            "mean": [means[family] for family in known if family not in tuned],
            "mean of heads": [means[family] for family in heads],
            "mean of fine-tuned": [means[family] for family in tuned],
        }
        summaries = {what: float(np.mean(each)) for what, each in found.items() if each}
        for what, own_families in {FINE_TUNED: tuned, "heads": heads}.items():
            apart = [float(best[family] - means[family]) for family in own_families]
            summaries |= {f"regret of {what}": max(apart)} if apart else {}
        for what, value in summaries.items():
            rows.append(
                {
                    "score": name,
                    "input": own,
                    "family": what,
                    "auroc": value,
                    "deviation": "",
                    "tasks": "",
                }
            )
        rows += [
            {
                "score": name,
                "input": own,
                "family": family,
                "auroc": means[family],
                "deviation": (
                    f"{np.mean([np.std(values[name, part]) for part in parts]):.4f}"
                ),
                "tasks": sum(len(values[name, part]) for part in parts),
            }
            for family, parts in known.items()
        ]
    rows.sort(
        key=lambda row: (
            not row["family"].startswith(("mean", "regret")),
            row["family"],
            -row["auroc"],
        )
    )
    return ({**row, "auroc": f"{row['auroc']:.4f}"} for row in rows)


def _run(task: tuple[Any, ...]) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = task[0](*task[1:])
    return found


# --- test
# --------------------------------------------------------------------------------------


def smallest_rate(scores: Parts, likeliest: Parts, classes: rfdlc.Classes) -> Parts:
    """By part, minus the false-alarm rate from which a sample is above the threshold of
    its region.
    """
    found = {part: np.zeros(len(each)) for part, each in scores.items()}
    for members in classes.thirds.values():
        own = np.isin(likeliest["held-out"], members)
        held = np.sort(scores["held-out"][own])
        for part, each in scores.items():
            here = np.isin(likeliest[part], members)
            found[part][here] = (
                np.searchsorted(held, each[here], side="left") / len(held) - 1
            )
    return found


def test_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Scores of a model of all classes."""
    scores, labels, counts = read(file)
    classes, held_y = rfdlc.Classes.from_counts(counts), labels["held-out"].astype(int)
    same_y = labels["cifar100"].astype(int)
    with np.load(file) as found:
        raw = {
            part: (
                softmax(found[f"{part}/logits"].astype(float))
                .mean(axis=0)
                .argmax(axis=1)
            )
            for part in labels
        }
        decided = {
            part: found[f"{part}/likeliest"]
            for part in labels
            if f"{part}/likeliest" in found
        }
    places = {"by region": raw, **({NATURAL: decided} if decided else {})}
    likeliest = places["by region"]
    every, model = combined(scores, equal(held_y)), MODELS.get(file.parent.name, "head")
    for name in [name for name in (*OURS, *RIVALS) if name in every]:
        each = every[name]
        alarms: dict[str, Any] = {"one": None}
        if "held-out" in each:
            alarms = {}
            for kind, place in places.items():
                by_region = Unfamiliar.fit(
                    each["held-out"],
                    place["held-out"],
                    held_y,
                    classes,
                    false_alarm=RATE,
                )
                alarms[kind] = by_region.above(
                    each["cifar100"], place["cifar100"], classes
                )
            alarms["one"] = each["cifar100"] > np.quantile(each["held-out"], 1 - RATE)
            alarms[WEIGHTED] = np.zeros(len(same_y), dtype=bool)
            for members in classes.thirds.values():
                held, here = (
                    np.isin(likeliest[part], members)
                    for part in ("held-out", "cifar100")
                )
                own = equal(held_y)[held]
                level = min(1.0, (1 - RATE) * (1 + (own**2).sum() / own.sum() ** 2))
                limit = quantile(each["held-out"][held], own, level)
                alarms[WEIGHTED] |= here & (each["cifar100"] > limit)
        for kind in alarms if name in OURS else ("one",):
            texts = ["", "", "", ""]
            if alarms[kind] is not None:
                head, tail = (
                    alarms[kind][np.isin(same_y, classes.thirds[r])].mean()
                    for r in ("head", "tail")
                )
                texts = [
                    f"{value:.4f}"
                    for value in (
                        alarms[kind].mean(),
                        head,
                        tail,
                        tail / max(head, 1e-9),
                    )
                ]
            ranks = (
                smallest_rate(each, places[kind], classes) if kind in places else each
            )
            for other in [
                part for part in each if part not in ("held-out", "cifar100")
            ]:
                truth = np.repeat([0, 1], [len(each["cifar100"]), len(each[other])])
                auroc = roc_auc_score(
                    truth, np.concatenate([ranks["cifar100"], ranks[other]])
                )
                text = "" if kind == WEIGHTED else f"{auroc:.4f}"
                given = (
                    model,
                    file.stem.rpartition("-")[2],
                    name,
                    kind,
                    other,
                    text,
                    *texts,
                )
                yield dict(zip(COLUMNS, given, strict=True))


def summary(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of all seeds, then their means and, of two seeds or more, sample
    standard deviations.

    For our scores also the mean and deviation of the AUROC minus that of the best
    rival, by seed.
    """
    yield from rows
    keys, aurocs = (
        ("model", "score", "thresholds", "other"),
        defaultdict[tuple[str, ...], list[float]](list),
    )
    for row in rows:
        if row["auroc"]:
            aurocs[tuple(row[name] for name in keys)].append(float(row["auroc"]))
    for key in dict.fromkeys(tuple(row[name] for name in keys) for row in rows):
        own = [row for row in rows if tuple(row[name] for name in keys) == key]
        values = {
            name: [float(row[name]) for row in own]
            for name in COLUMNS[5:]
            if own[0][name]
        }
        named = dict(zip(keys, key, strict=True))
        yield {
            "seed": "mean",
            **named,
            **{name: f"{np.mean(each):.4f}" for name, each in values.items()},
        }
        if len(own) > 1:
            deviations = {
                name: f"{np.std(each, ddof=1):.4f}" for name, each in values.items()
            }
            yield {"seed": "deviation", **named, **deviations}
            rivals = [aurocs[key[0], rival, "one", key[3]] for rival in RIVALS[:3]]
            best = max(rivals, key=lambda each: np.mean(each) if each else 0.0)
            if key[1] in OURS and len(best) == len(aurocs[key]) > 1:
                apart = np.subtract(aurocs[key], best)
                yield {
                    "seed": "minus best rival",
                    **named,
                    "auroc": f"{apart.mean():.4f}",
                }
                yield {
                    "seed": "deviation of it",
                    **named,
                    "auroc": f"{apart.std(ddof=1):.4f}",
                }


# --- simulation
# --------------------------------------------------------------------------------------


def one_limit(values: Array, rate: float) -> float:
    return quantile(
        values, np.ones(len(values)), min(1.0, (1 - rate) * (1 + 1 / len(values)))
    )


def limits_before(
    values: Array, likeliest: Array, classes: rfdlc.Classes, rate: float
) -> Array:
    """Thresholds by class: of all held-out samples that look like a region, or of all,
    where these are few.
    """
    found = np.full(len(classes), one_limit(values, rate))
    for members in classes.thirds.values():
        own = values[np.isin(likeliest, members)]
        found[members] = (
            one_limit(own, rate) if len(own) >= max(20, 1 / rate) else found[members]
        )
    return found


def simulated(
    part: str, world: str, new: Any, seed: int
) -> list[tuple[tuple[Any, ...], str, list[float]]]:
    """What identifies a row, the kind of score, and values, of a model that was trained
    without the new class.
    """
    warnings.simplefilter("ignore")
    make, settings, *_ = WORLDS[world]
    x, y, test_x, test_y, new_x = (
        each.astype(int if each.ndim == 1 else np.float32) for each in make(new, seed)
    )
    with TemporaryDirectory() as folder:
        model = rfdlc.train(
            rfdlc.load((x, y), test_fraction=0),
            out=f"{folder}/run",
            seed=seed,
            **settings,
        )
        held = rfdlc.Predictions.load(Path(folder) / "run" / "held-out.npz")
    sides, classes, rows = (
        (held, model.predict(test_x), model.predict(new_x)),
        model.classes,
        [],
    )
    weights = np.asarray(classes.counts)[test_y] / np.bincount(test_y)[test_y]
    truth, both = (
        np.repeat([0, 1], [len(test_y), len(new_x)]),
        np.append(weights / weights.mean(), np.ones(len(new_x))),
    )
    decider = model.decider.replace(
        utility=rfdlc.Utility.one_hot(classes).with_abstain(0), target_prior="uniform"
    )
    likeliest = [
        np.asarray(decider.probabilities(each)).argmax(axis=1) for each in sides
    ]
    head, tail = (
        np.isin(test_y, classes.thirds[region]) for region in ("head", "tail")
    )
    for familiarity in ("no", "yes") if held.unfamiliarity is not None else ("no",):
        scores = [each.scores for each in sides]
        scores = (
            scores
            if familiarity == "yes"
            else [replace(each, unfamiliarity=None) for each in scores]
        )
        before = (
            "energy + entropy" if familiarity == "no" else "given + energy + entropy"
        )
        before = before if "mixture" not in world else "entropy"  # of log-probabilities
        for (score, kind), rate in product(
            {"now": "auto", "before": before}.items(), RATES
        ):
            fitted = fit_unfamiliar(
                decider.model,
                decider.utility,
                scores[0],
                np.asarray(held.targets),
                rate,
                kind,
            )
            values = [fitted.score(each) for each in scores]
            limits = {
                "own": fitted.limits(classes),
                "before": limits_before(values[0], likeliest[0], classes, rate),
                "one": np.full(len(classes), one_limit(values[0], rate)),
            }
            auroc = roc_auc_score(truth, np.concatenate(values[1:]), sample_weight=both)
            for name, limit in limits.items():
                alarms, found = (
                    values[side] > limit[likeliest[side]] for side in (1, 2)
                )
                shares = [
                    found.mean(),
                    np.average(alarms, weights=weights),
                    alarms[head].mean(),
                    alarms[tail].mean(),
                ]
                shares.append(
                    alarms[tail & np.isin(likeliest[1], classes.thirds["tail"])].mean()
                )
                place = new if isinstance(new, str) else "each in turn"
                rows.append(
                    (
                        (part, world, place, familiarity, score, name, rate),
                        fitted.kind,
                        [auroc, *shares],
                    )
                )
    return rows


def simulated_rows(workers: int) -> Iterator[dict[str, Any]]:
    """Means over tasks, also over all kinds of data of a part, which count equally."""
    tasks = [
        (part, world, new, seed)
        for world, (make, _, *seeds) in WORLDS.items()
        for part, own in zip(("choice", "confirmation"), seeds, strict=True)
        for seed in own
        for new in (range(10) if "digits" in world else PLACES)
    ]
    found = defaultdict[tuple[Any, ...], list[tuple[str, list[float]]]](list)
    for key, kind, values in (
        row for rows in in_parallel(simulated, tasks, workers) for row in rows
    ):
        found[key].append((kind, values))
    means = {
        key: np.mean([values for _, values in own], axis=0)
        for key, own in found.items()
    }
    worlds = defaultdict[tuple[Any, ...], dict[str, list[Array]]](
        lambda: defaultdict(list)
    )
    for (part, world, _, *rest), values in means.items():
        worlds[part, "mean", "", *rest][world].append(values)
    for key, each in worlds.items():
        means[key] = np.mean(
            [np.mean(values, axis=0) for values in each.values()], axis=0
        )
    for key, values in sorted(
        means.items(), key=lambda each: (each[0][1] == "mean", each[0])
    ):
        written = [f"{value:.4f}" for value in values]
        counts = (
            (len(found[key]), "; ".join(sorted({kind for kind, _ in found[key]})))
            if key in found
            else ("", "")
        )
        yield dict(zip(SIMULATION, (*key, *written, *counts), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    for name in ("choose", "test", "simulate"):
        part = parts.add_parser(name)
        if name != "simulate":
            part.add_argument("folder", type=Path)
        part.add_argument("--workers", type=int, default=1)
        part.add_argument("--commit", default="", help="where there is no git")
        part.add_argument("--name", help="of the CSV file, if not that of all models")
    options = parser.parse_args()
    if options.part == "choose":
        write(
            options.name or "unfamiliar-choice",
            choice_rows(options.folder, options.workers),
            PACKAGES,
            options.commit,
            CHOICE,
        )
    elif options.part == "simulate":
        rows = simulated_rows(options.workers)
        write(
            options.name or "unfamiliar-simulated",
            rows,
            PACKAGES,
            options.commit,
            SIMULATION,
        )
    else:
        tested = [
            row
            for file in sorted(options.folder.glob("*/none-*.npz"))
            for row in test_rows(file)
        ]
        write(
            options.name or "unfamiliar",
            summary(tested),
            PACKAGES,
            options.commit,
            COLUMNS,
        )


if __name__ == "__main__":
    main()

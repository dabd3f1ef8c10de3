"""From a run folder to metrics: everything that the tables and plots need, from saved
logits alone.

Scoring trains nothing and needs no torch: a new metric or utility is a new call.
Decisions have these names:

argmax               the paper's: arg max of the mean logits, nothing calibrated
mean-probabilities   arg max of the particles' mean probability
expected-utility     of mean probabilities, for the tail-sensitive utility with penalty
                     -1; nothing calibrated
eq12                 the paper's Eq. 12 as printed, same utility
calibrated           the standard protocol: particles combined as the method says,
                     calibrated on held-out data; arg max
calibrated -0.25     the same, expected utility for that penalty (every one of
                     PENALTIES)
calibrated TASK      the same, expected utility for a class-sensitive task (those of
                     TASKS)

Percentages are percentages. `utility` is always the mean utility under the penalty -1,
whatever was decided for.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc import Classes, Decider, Predictions, Utility
from rfdlc.decisions.rules import largest
from rfdlc.evaluation import bins, metrics
from rfdlc.evaluation.evaluate import entries
from rfdlc.evaluation.metrics import METRICS
from rfdlc.evaluation.outcomes import Outcomes
from rfdlc.formats.files import read_json
from rfdlc.probabilities import uncertainty
from rfdlc.probabilities.classes import Indices
from rfdlc.probabilities.scores import Floats, safe_log
from rfdlc.statistics import ranking

PENALTIES = (
    0.0,
    -0.05,
    -0.1,
    -0.15,
    -0.2,
    -0.25,
    -0.3,
    -0.4,
    -0.5,
    -0.75,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
)
COVERAGES = tuple(k / 20 for k in range(1, 21))
CALIBRATION = (  # chosen by held-out likelihood, see docs/training.md
    "prior-corrected-temperature"
)
# True and decided classes of the paper's class-sensitive tasks. Its code counts
# vehicles taken for classes 3 to 7, its text speaks of mammals taken for vehicles: both
# are here, and the frog is in neither unless said.
_VEHICLES, _MAMMALS = ("automobile", "truck"), ("cat", "deer", "dog", "horse")
TASKS = {
    "bird-plane": (("bird",), ("airplane",)),
    "vehicle-mammal": (_VEHICLES, _MAMMALS),
    "mammal-vehicle": (_MAMMALS, _VEHICLES),
    "vehicle-animal": (_VEHICLES, (*_MAMMALS, "frog")),
}


@dataclass(frozen=True)
class Value:
    """One number of a run."""

    split: str
    decision: str
    metric: str
    value: float


@dataclass(frozen=True)
class Point:
    """One point of a curve of a run; `weight` is the share of samples behind it."""

    split: str
    decision: str
    curve: str
    x: float
    y: float
    weight: float


def score(
    run: Path, calibration: Path | None = None, target: str = "uniform"
) -> tuple[list[Value], list[Point]]:
    """Metrics and curves of a run folder. `calibration` is the folder of a run whose
    held-out samples calibrate it.

    Without one, the run's own validation split does, where it has one, and is scored
    too. `target` is the class prior that decisions are for: `uniform`, or `natural`,
    that of the held-out samples.
    """
    combine = read_json(run / "config.json")["settings"]["combine"]
    test = Predictions.load(run / "predictions.npz")
    values, points = _plain(test, "test")
    own = run / "held-out.npz"
    if own.exists():
        values += _plain(Predictions.load(own), "val")[0]
    held = own if calibration is None else calibration / "held-out.npz"
    if held.exists():
        decider = Decider(
            Utility.one_hot(test.classes), combine=combine, calibration=CALIBRATION
        )
        decider = decider.fit(Predictions.load(held), balanced=target == "uniform")
        # Of a training alike that held samples out: it decides this run on purpose.
        decider = decider.replace(source=test.scores.model)
        more = _calibrated(decider, test)
        values, points = values + more[0], points + more[1]
    return [
        value for value in values if value.value == value.value
    ], points  # without those of empty regions


# -- decisions
# --------------------------------------------------------------------------------------


def eq12(p: Floats, utility: Utility) -> Indices:
    """The actions of Eq. 12 as printed, the largest sum_y U[y, d] log p(y).

    log p is never positive, so that a negative utility times log p is a reward: the
    rule prefers the actions with the most penalties.
    """
    normalised = p / p.sum(axis=1, keepdims=True)
    return largest(safe_log(normalised) @ utility.matrix.astype(p.dtype))


def _plain(predictions: Predictions, split: str) -> tuple[list[Value], list[Point]]:
    """What follows from logits alone: the paper's protocol, and uncalibrated expected
    utility.
    """
    classes, y = predictions.classes, _targets(predictions)
    one_hot, tail = Utility.one_hot(classes), Utility.tail_sensitive(classes)
    by_logits = _probabilities(
        Decider(one_hot, combine="mean-logits", calibration=None), predictions
    )
    averaged = Decider(one_hot, combine="mean-probabilities", calibration=None)
    by_probabilities = _probabilities(averaged, predictions)
    decided = {
        "argmax": largest(by_logits),
        "mean-probabilities": largest(by_probabilities),
        "expected-utility": (
            averaged.replace(utility=tail).decide_probabilities(by_probabilities)
        ),
        "eq12": eq12(by_probabilities, tail),
    }
    found = [
        Value(split, name, *pair)
        for name, each in decided.items()
        for pair in decision_metrics(y, each, classes)
    ]
    for name, p in (("argmax", by_logits), ("mean-probabilities", by_probabilities)):
        found += [Value(split, name, *pair) for pair in trust_metrics(y, p, classes)]
    logits = predictions.scores.values.mean(0)
    found += [
        Value(split, "argmax", *pair)
        for pair in paper_uncertainty(y, by_logits, logits, classes)
    ]
    found += [
        Value(split, "argmax", *pair)
        for pair in task_rates(y, decided["argmax"], classes)
    ]
    if len(predictions.scores.values) > 1:
        from rfdlc.training.trainer import diversity

        found += [
            Value(split, "", *pair)
            for pair in diversity(predictions.scores.values).items()
        ]
    return found, list(_curves(split, "argmax", y, by_logits))


def _calibrated(decider: Decider, test: Predictions) -> tuple[list[Value], list[Point]]:
    """The standard protocol: one calibrated probability, decided for every penalty and
    task.
    """
    classes, y, p = test.classes, _targets(test), _probabilities(decider, test)
    decided = {"calibrated": largest(p)}
    for penalty in PENALTIES:
        utility = Utility.tail_sensitive(classes, penalty)
        decided[f"calibrated {penalty:g}"] = decider.replace(
            utility=utility
        ).decide_probabilities(p)
    found = [
        Value("test", name, *pair)
        for name, each in decided.items()
        for pair in decision_metrics(y, each, classes)
    ]
    found += [
        Value("test", "calibrated", *pair) for pair in trust_metrics(y, p, classes)
    ]
    found += [
        Value("test", "calibrated", *pair)
        for pair in task_rates(y, decided["calibrated"], classes)
    ]
    for task, (true, wrong) in known_tasks(classes).items():
        chosen = decider.replace(
            utility=Utility.group_sensitive(classes, true, wrong)
        ).decide_probabilities(p)
        name = f"calibrated {task}"
        found.append(Value("test", name, "acc", 100 * float(np.mean(y == chosen))))
        found += [Value("test", name, *pair) for pair in task_rates(y, chosen, classes)]
    assert decider.model.calibrator is not None
    found.append(
        Value(
            "test",
            "calibrated",
            "temperature",
            1 / float(decider.model.calibrator.as_affine()[0]),
        )
    )
    return found, list(_curves("test", "calibrated", y, p))


def _targets(predictions: Predictions) -> Indices:
    assert predictions.targets is not None
    return predictions.targets


def _probabilities(decider: Decider, predictions: Predictions) -> Floats:
    return np.asarray(decider.probabilities(predictions))


# -- metrics
# --------------------------------------------------------------------------------------

Pairs = Iterator[tuple[str, float]]


# The study's name of a metric -> its name in the registry, with the part where it has
# parts.
DECISION_METRICS = {
    "acc": "accuracy",
    **{region: f"accuracy_by_region.{region}" for region in ("head", "med", "tail")},
    "balanced": "balanced_accuracy",
    **{
        f"fhr{100 * share:g}": f"false_head_rates.{share}"
        for share in metrics.HEAD_FRACTIONS
    },
    "fhr": "false_head_rate",
    "utility": "mean_utility",
}
REGION_METRICS = {"ece": "ece", "auc": "error_auc"}
TRUST_METRICS = {"nll": "nll", "brier": "brier", "aurc": "risk_coverage_area"}


def read_metrics(
    outcomes: Outcomes, names: Mapping[str, str], suffix: str = ""
) -> Pairs:
    """Metrics of the registry under the study's names; shares in percent."""
    wanted = dict.fromkeys(name.partition(".")[0] for name in names.values())
    found = {
        entry.name: entry
        for entry in entries({name: METRICS[name].measure(outcomes) for name in wanted})
    }
    for ours, name in names.items():
        if name in found:
            yield (
                f"{ours}{suffix}",
                found[name].value * (100 if found[name].metric.unit == "%" else 1),
            )


def decision_metrics(y: Indices, decided: Indices, classes: Classes) -> Pairs:
    """Accuracy, by region too, false head rates and the mean utility under the penalty
    -1.
    """
    return read_metrics(
        Outcomes.of(Utility.tail_sensitive(classes), y, decided), DECISION_METRICS
    )


def trust_metrics(y: Indices, p: Floats, classes: Classes) -> Pairs:
    """Standard measures of probabilities: ECE with 15 bins, AUC of error detection, by
    true region too.
    """
    outcomes = Outcomes.of(Utility.one_hot(classes), y, largest(p), p)
    for suffix, mask in _regions(y, classes):
        region = outcomes.take(np.flatnonzero(mask))
        yield from read_metrics(region, REGION_METRICS, suffix)
        yield (
            f"auc_entropy{suffix}",
            100 * ranking.roc_area(region.right, -region.entropy).value,
        )
    yield from read_metrics(outcomes, TRUST_METRICS)


def paper_uncertainty(y: Indices, p: Floats, logits: Floats, classes: Classes) -> Pairs:
    """The paper's three scores of one model, by its own measure of ECE: see
    `metrics.ece_paper`.
    """
    right = largest(p) == y
    unsure: Mapping[str, NDArray[Any]] = {
        "mcp": uncertainty.max_probability(p),
        "evidential": uncertainty.evidential(logits),
        "bayesian": uncertainty.entropy(p),
    }
    for name, each in unsure.items():
        for suffix, mask in _regions(y, classes):
            yield (
                f"paper_auc_{name}{suffix}",
                100 * ranking.roc_area(right[mask], -each[mask]).value,
            )
            yield (
                f"paper_ece_{name}{suffix}",
                100 * metrics.ece_paper(each[mask], right[mask]),
            )


def known_tasks(classes: Classes) -> dict[str, tuple[Sequence[str], Sequence[str]]]:
    """The class-sensitive tasks whose classes are all there."""
    return {
        task: pair
        for task, pair in TASKS.items()
        if {*pair[0], *pair[1]} <= set(classes.names)
    }


def task_rates(y: Indices, decided: Indices, classes: Classes) -> Pairs:
    """Share of the samples of the true classes that were decided as one of the wrong
    ones.
    """
    for task, (true, wrong) in known_tasks(classes).items():
        yield (
            f"rate_{task}",
            100
            * float(
                np.isin(
                    decided[np.isin(y, classes.members(true))], classes.members(wrong)
                ).mean()
            ),
        )


def _regions(y: Indices, classes: Classes) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    yield "", np.ones(len(y), dtype=bool)
    for region, members in classes.thirds.items():
        yield f"_{region}", np.isin(y, members)


def _curves(split: str, decision: str, y: Indices, p: Floats) -> Iterator[Point]:
    """Reliability by bin of confidence, and the error rate of the most confident share
    of the samples.
    """
    confidence, right = p.max(1).astype(np.float64), largest(p) == y
    place = bins.bin_of(confidence)
    for k in np.unique(place):
        inside = place == k
        share = float(inside.mean())
        yield Point(
            split,
            decision,
            "reliability",
            float(confidence[inside].mean()),
            float(right[inside].mean()),
            share,
        )
    coverage, risk = ranking.risk_coverage(right, confidence)
    for wanted in COVERAGES:
        at = max(0, round(wanted * len(y)) - 1)
        yield Point(
            split,
            decision,
            "risk-coverage",
            float(coverage[at]),
            float(risk[at]),
            wanted,
        )

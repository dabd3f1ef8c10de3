"""Metrics: one registry that evaluations, tables, reports, model cards, scorers and the
study read.

`targets` (N,) are class indices; `decided` (N,) too, with -1 where the action is not a
class (abstained). A metric of no samples is NaN.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.decisions.budgets import budget_curve
from rfdlc.errors import choose, expect
from rfdlc.evaluation.bins import bin_of
from rfdlc.evaluation.outcomes import Outcomes
from rfdlc.probabilities.classes import Indices
from rfdlc.probabilities.scores import Floats
from rfdlc.progress import track
from rfdlc.statistics import intervals
from rfdlc.statistics.intervals import (
    NAN,
    Array,
    Estimate,
    Mask,
    group_shares,
    mean,
    whole_groups,
    within_classes,
)
from rfdlc.statistics.ranking import risk_area, roc_area

BUDGETS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3)
HEAD_FRACTIONS = (0.25, 0.5, 0.75)
RESIDUE = 1e-14  # what rounding leaves of 0
RESERVED = (  # attributes of Evaluation
    "samples",
    "groups",
    "values",
    "uncertainty",
    "outcomes",
    "bootstrap",
    "calibration_overlap",
    "intervals",
    "flat",
    "rows",
    "to_dict",
    "promise",
    "by",
    "per_class",
)


@dataclass(frozen=True)
class Metric:
    """An entry of the registry.

    Parameters
    ----------
    name, label : str
        Key in files and attribute of `Evaluation`; name in tables, or for a dict a
        format of its keys ("{} shot").
    function : callable
        Maps `Outcomes` to an array of one value per sample whose mean is the metric
        (NaN where a sample does not count), to a number (NaN where undefined), to an
        estimate of `rfdlc.statistics.intervals`, or to a dict of these.
    direction : {"higher", "lower", "none"}
        Which values are better.
    unit : str
        "%" for shares between 0 and 1, which tables show as percentages; "" for plain
        numbers.
    parent : str, optional
        Name of the metric below which tables indent this one.
    headline, resample, table : bool
        Whether short tables show the metric too; whether a number has a bootstrap
        interval; whether tables, reports and model cards show the metric at all.

    Examples
    --------
    >>> (
    ...     METRICS["accuracy"].format(0.5),
    ...     METRICS["nll"].format(-1.5),
    ...     METRICS["nll"].format(2.5e-7),
    ... )
    ('50.00%', '-1.5000', '2.5e-07')
    """

    name: str
    label: str
    function: Callable[[Outcomes], Any]
    direction: str = "higher"
    unit: str = ""
    parent: str | None = None
    headline: bool = False
    resample: bool = True
    table: bool = True

    def format(self, value: float) -> str:
        """The value as tables show it."""
        shown = 0.0 if abs(value) < RESIDUE else value
        return f"{shown:.2%}" if self.unit == "%" else readable(shown)

    def _parts(self, outcomes: Outcomes) -> dict[Any, Any]:
        """Numbers and estimates by part, under None where the metric has no parts."""
        found = self.function(outcomes)
        parts = found if isinstance(found, Mapping) else {None: found}
        return {key: self._checked(part, len(outcomes)) for key, part in parts.items()}

    def _checked(self, part: Any, samples: int) -> Any:
        """An estimate, a number, or the mean of one value per sample; anything else
        raises.
        """
        if isinstance(part, float | Estimate):
            return part
        values = np.asarray(part)
        told = (
            f"metric {self.name!r} returned {type(part).__name__} of shape"
            f" {values.shape} for {samples} samples"
        )
        right = values.dtype.kind in "biuf" and values.shape in ((), (samples,))
        expect(
            right,
            f"{told}: expected a number, one value per sample, or a dict of these",
        )
        return mean(values) if values.ndim else float(values)

    def measure(self, outcomes: Outcomes) -> Any:
        """The metric of some samples: a number, or a dict of numbers."""
        numbers = {
            key: float(getattr(part, "value", part))
            for key, part in self._parts(outcomes).items()
        }
        return numbers.get(None, numbers)

    def estimates(
        self, outcomes: Outcomes, times: int = 0, seed: int = 0
    ) -> dict[str, Estimate]:
        """Estimates by name as in `Evaluation.flat`; numbers are resampled within
        classes, or by whole groups.
        """
        found, rng, drawn, groups = (
            self._parts(outcomes),
            np.random.default_rng(seed),
            [],
            outcomes.sample_groups,
        )
        plain = [key for key, part in found.items() if not isinstance(part, Estimate)]
        for _ in track(range(times), "Resampling") if plain and self.resample else ():
            rows = (
                within_classes(outcomes.targets, rng)
                if groups is None
                else whole_groups(groups, rng)
            )
            drawn.append(self._parts(outcomes.take(rows)))
        if groups is not None:
            found |= {
                key: intervals.by_group(part, groups)
                for key, part in found.items()
                if key not in plain
            }
        for key in plain:
            found[key] = intervals.resampled(
                float(found[key]),
                np.array([float(each.get(key, NAN)) for each in drawn]),
            )
        return {
            self.name if key is None else f"{self.name}.{key}": part
            for key, part in found.items()
        }


METRICS: dict[str, Metric] = {}


def register_metric(metric: Metric) -> Metric:
    """Add a metric to evaluations, tables, reports, model cards and scorers."""
    free = metric.name.isidentifier() and metric.name not in (*METRICS, *RESERVED)
    expect(
        free,
        f"metric name {metric.name!r} is taken or is not an identifier: expected a new"
        " one, as 'top_5'",
    )
    choose("direction", metric.direction, ("higher", "lower", "none"))
    METRICS[metric.name] = metric
    return metric


def measure(outcomes: Outcomes) -> dict[str, Any]:
    """Every registered metric, by name."""
    return {name: metric.measure(outcomes) for name, metric in METRICS.items()}


def readable(value: float) -> str:
    """Four decimals, or four digits where four decimals would show nothing or would be
    too long.

    >>> readable(-1.5), readable(2.5e-07), readable(-1.07442e14)
    ('-1.5000', '2.5e-07', '-1.074e+14')
    """
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e7 else f"{value:.4g}"


def worth_in_words(costs: bool, *ends: float) -> str:
    """A utility, or both ends of its interval: as costs with the sign changed."""
    return " to ".join(
        map(readable, (0.0 - end for end in reversed(ends)) if costs else ends)
    )


def false_heads(
    o: Outcomes, head_fractions: Sequence[float] = HEAD_FRACTIONS
) -> dict[float, Array]:
    """Per head fraction, 1 for a tail sample decided as head, 0 for any other tail
    sample, NaN for a head sample.

    The head is that share of the classes, the most frequent ones. The paper's "tail
    ratio" of 25% is the head fraction of 25%: the other 75% of the classes are tail.
    Empty without training counts.
    """
    heads = (
        {}
        if o.classes.counts is None
        else {f: o.classes.head_mask(f) for f in head_fractions}
    )
    return {
        f: np.where(head[o.targets], NAN, (o.decided >= 0) & head[o.decided])
        for f, head in heads.items()
    }


def ece_paper(entropy: Floats, correct: Mask, bins: int = 10) -> float:
    """The paper's measure: confidence 1 - entropy in nats, bins [lower, upper), samples
    outside [0, 1) in no bin.

    Those samples stay in the denominator. Kept to reproduce the paper; it is not a
    calibration error.
    """
    confidence = 1 - np.asarray(entropy, dtype=np.float64)
    inside = (confidence >= 0) & (confidence < 1)
    place = (
        np.searchsorted(np.arange(bins + 1) / bins, confidence[inside], side="right")
        - 1
    )
    gap = np.asarray(correct, dtype=np.float64)[inside] - confidence[inside]
    total = np.abs(np.bincount(place, weights=gap, minlength=bins)).sum()
    return float(total / len(confidence)) if len(confidence) else NAN


def regions(
    o: Outcomes, kind: str, of: Indices | None = None
) -> Iterator[tuple[str, Mask]]:
    """Regions that have classes, and the samples whose class (`of`, or the true one) is
    in each.
    """
    for name, members in (
        {} if o.classes.counts is None else getattr(o.classes, kind)
    ).items():
        if len(members):
            yield name, np.isin(o.targets if of is None else of, members)


def _by_region(o: Outcomes, values: Any, kind: str = "thirds") -> dict[str, Any]:
    return {name: np.where(rows, values, NAN) for name, rows in regions(o, kind)}


def _ece(o: Outcomes, rows: Any = True, debiased: bool = False) -> Estimate:
    rows = np.broadcast_to(rows, len(o))
    found = intervals.calibration_gap(
        o.confidence[rows], o.right[rows], bin_of(o.confidence[rows]), debiased
    )
    return replace(
        found,
        alike=mean(np.where(rows, o.confidence - o.right, NAN)).influence,
        counted=rows,
    )


def _kept(o: Outcomes, area: Callable[[Mask, Floats], Estimate]) -> Estimate:
    """An area of the samples that were decided for a class."""
    kept = o.decided >= 0
    found, influence = area(o.correct[kept], o.certainty[kept]), np.zeros(len(o))
    if found.influence is not None:
        influence[kept] = found.influence()
    return _ranked(
        o,
        replace(found, influence=lambda: influence, counted=kept),
        kept & o.correct,
        kept & ~o.correct,
    )


def _ranked(o: Outcomes, found: Estimate, *sides: Mask) -> Estimate:
    """Without an interval where samples of one side come from few groups."""
    groups = o.sample_groups
    few = (
        groups is not None
        and min(len(np.unique(groups[rows])) for rows in sides)
        < intervals.FEWEST_ERRORS
    )
    return Estimate(found.value) if few else found


def _macro_f1(o: Outcomes) -> Estimate:
    """Of the samples that are of a class or decided as it, the share s is both: its F1
    is 2s / (1 + s).
    """
    places = np.stack([o.targets, np.where(o.correct, -1, o.decided)])
    return group_shares(
        places,
        np.stack([o.correct, np.zeros(len(o), dtype=bool)]),
        lambda s: 2 * s / (1 + s),
    )


def _false_head_rate(o: Outcomes) -> Estimate:
    """The mean of the rates that are defined: with two classes, the first 75% are both
    and leave no tail.
    """
    found = np.array(list(false_heads(o).values())).reshape(-1, len(o))
    return group_shares(
        np.where(np.isnan(found), -1, np.arange(len(found))[:, None]), found == 1
    )


def _worth(
    o: Outcomes,
    values: NDArray[Any],
    offset: Any,
    sign: int = 1,
    rows: Any = True,
    **more: Any,
) -> Estimate:
    """The mean of offset + sign * utility, which the actions bound."""
    low, high = (bound[np.unique(o.actions[rows])] for bound in o.bounds)
    ends = sorted(
        (
            offset + sign * float(low.min(initial=np.inf)),
            offset + sign * float(high.max(initial=-np.inf)),
        )
    )
    return mean(np.where(rows, values, NAN), (ends[0], ends[1]), **more)


def _gap(o: Outcomes, rows: Any = True, **more: Any) -> Estimate:
    """Promised minus realised utility."""
    promised = float((o.realised + o.gap)[rows].mean()) if np.any(rows) else 0.0
    return _worth(o, o.gap, promised, -1, rows, **more)


def _gap_by_action(o: Outcomes) -> dict[str, Estimate]:
    """A sample that another model decides otherwise leaves the group, which counts
    about half.
    """
    return {
        o.utility.actions[a]: _gap(o, o.actions == a, differs=0.5)
        for a in np.unique(o.actions)
    }


def _group_rates(o: Outcomes) -> dict[str, Any]:
    pairs = {
        f"{true} as {end}": (o.classes.members(true), o.utility.deciding(end))
        for true, end in o.groups
    }
    return {
        name: np.where(np.isin(o.targets, t), np.isin(o.actions, a), NAN)
        for name, (t, a) in pairs.items()
    }


def of_class(o: Outcomes, c: int) -> dict[str, Estimate]:
    """Estimates of class c against all others, with intervals about the groups that
    have such samples.
    """
    own, decided, p, groups = (
        o.targets == c,
        o.decided == c,
        o.probabilities[:, c],
        o.sample_groups,
    )
    pairs = {
        "recall": (decided, own),
        "precision": (own, decided),
        "specificity": (~decided, ~own),
    }
    pairs |= {"abstention_rate": (o.decided < 0, own), "observed_share": (own, True)}
    found = {
        name: mean(np.where(rows, hits, NAN)) for name, (hits, rows) in pairs.items()
    }
    found["auroc"] = _ranked(o, roc_area(own, p), own, ~own)
    if groups is not None:
        found = {name: intervals.by_group(each, groups) for name, each in found.items()}
    return found | {"predicted_share": Estimate(float(p.mean(dtype=np.float64)))}


def _set_coverage(o: Outcomes) -> dict[str, Any]:
    if o.covered is None:
        return {}
    macro, worst = (
        group_shares(o.targets[None], o.covered[None]),
        intervals.smallest_share(o.targets, o.covered),
    )
    return {"marginal": o.covered, "macro": macro, "worst": worst}


def _set_utility(o: Outcomes) -> dict[str, Any]:
    if o.set_value is None:
        return {}
    ends = float(o.utility.matrix.min()), float(o.utility.matrix.max())
    return {
        name: mean(values, ends)
        for name, values in {"all": o.set_value, **_by_region(o, o.set_value)}.items()
    }


def _coverage_by_class(o: Outcomes) -> dict[str, Any]:
    if o.covered is None:
        return {}
    return {
        o.classes.names[c]: mean(np.where(o.targets == c, o.covered, NAN))
        for c in np.unique(o.targets)
    }


def _by_budget(o: Outcomes) -> dict[float, Any]:
    """Utility if at most a share is handed over; empty if no action hands over."""
    handing = o.utility.decided_class < 0
    if not handing.any() or handing.all():
        return {}
    curve = budget_curve(o.utility, o.probabilities, o.targets, BUDGETS)
    ends = float(o.utility.matrix.min()), float(o.utility.matrix.max())
    return {
        most: mean(values, ends) for most, values in zip(BUDGETS, curve, strict=True)
    }


for _metric in (
    Metric("accuracy", "accuracy", lambda o: o.correct, unit="%", headline=True),
    Metric(
        "accuracy_by_region",
        "{}",
        lambda o: _by_region(o, o.correct),
        unit="%",
        parent="accuracy",
        headline=True,
    ),
    Metric(
        "accuracy_by_shots",
        "{} shot",
        lambda o: _by_region(o, o.correct, "shots"),
        unit="%",
        parent="accuracy",
    ),
    Metric("abstention_rate", "abstained", lambda o: o.decided < 0, "none", "%"),
    Metric(
        "kept_accuracy",
        "accuracy where answered",
        lambda o: np.where(o.decided < 0, NAN, o.correct),
        unit="%",
    ),
    Metric(
        "balanced_accuracy",
        "balanced accuracy",
        lambda o: group_shares(o.targets[None], o.correct[None]),
        unit="%",
    ),
    Metric("macro_f1", "macro F1", _macro_f1, unit="%"),
    Metric(
        "false_head_rate",
        "false head rate",
        _false_head_rate,
        "lower",
        "%",
        headline=True,
    ),
    Metric(
        "false_head_rates",
        "head = first {}",
        false_heads,
        "lower",
        "%",
        "false_head_rate",
    ),
    Metric(
        "mean_utility",
        "mean utility",
        lambda o: _worth(o, o.realised, 0),
        headline=True,
    ),
    Metric(
        "utility_by_budget",
        "by expected utility, at most {} handed over",
        _by_budget,
        parent="mean_utility",
    ),
    Metric(
        "mean_regret",
        "mean regret",
        lambda o: _worth(o, o.regret, o.utility.matrix.max(), -1),
        "lower",
    ),
    Metric("set_coverage", "coverage of sets, {}", _set_coverage, unit="%"),
    Metric(
        "set_coverage_handed_over",
        "coverage of sets, handed over",
        lambda o: {} if o.covered is None else np.where(o.decided < 0, o.covered, NAN),
        unit="%",
    ),
    Metric(
        "set_coverage_by_region",
        "coverage of sets, {}",
        lambda o: {} if o.covered is None else _by_region(o, o.covered),
        unit="%",
    ),
    Metric(
        "set_coverage_by_class",
        "coverage of sets, class {}",
        _coverage_by_class,
        unit="%",
    ),
    Metric(
        "set_size",
        "mean size of sets, {}",
        lambda o: (
            {}
            if o.set_size is None
            else {"all": o.set_size, **_by_region(o, o.set_size)}
        ),
        "lower",
    ),
    Metric("set_utility", "mean utility of sets, {}", _set_utility),
    Metric("error_auc", "error detection AUC", lambda o: _kept(o, roc_area), unit="%"),
    Metric(
        "risk_coverage_area",
        "risk-coverage area",
        lambda o: _kept(o, risk_area),
        "lower",
        "%",
    ),
    Metric("ece", "ECE", _ece, "lower", "%", headline=True),
    Metric(
        "ece_debiased",
        "debiased",
        lambda o: _ece(o, debiased=True),
        "lower",
        "%",
        "ece",
    ),
    Metric(
        "ece_by_region",
        "predicted {}",
        lambda o: {
            name: _ece(o, rows) for name, rows in regions(o, "thirds", o.likeliest)
        },
        "lower",
        "%",
        "ece",
    ),
    Metric(
        "classwise_ece",
        "class-wise ECE",
        lambda o: (
            NAN if o.gaps is None else np.abs(o.gaps).sum() / len(o) / len(o.gaps)
        ),
        "lower",
        "%",
        resample=False,
    ),
    Metric("brier", "Brier score", lambda o: o.brier, "lower"),
    Metric("nll", "negative log-likelihood", lambda o: o.nll, "lower", "nats"),
    Metric("utility_gap", "promised minus realised utility", _gap, "none"),
    Metric(
        "utility_gap_by_region",
        "predicted {}",
        lambda o: {
            name: _gap(o, rows) for name, rows in regions(o, "thirds", o.likeliest)
        },
        "none",
        parent="utility_gap",
    ),
    Metric(
        "utility_gap_by_action",
        "action {}",
        _gap_by_action,
        "none",
        parent="utility_gap",
    ),
    Metric(
        "ece_paper",
        "ECE as in the paper",
        lambda o: ece_paper(o.entropy, o.right),
        "lower",
        "%",
        resample=False,
        table=False,
    ),
    Metric(
        "ece_by_true_region",
        "true {}",
        lambda o: {name: _ece(o, rows).value for name, rows in regions(o, "thirds")},
        "lower",
        "%",
        "ece_paper",
        resample=False,
        table=False,
    ),
    Metric("group_rates", "{}", _group_rates, "none", "%"),
):
    register_metric(_metric)

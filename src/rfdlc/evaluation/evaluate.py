"""evaluate(): every registered metric of a model and its decisions, in one result."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from rfdlc.decisions.decider import Decider
from rfdlc.decisions.utility import Utility
from rfdlc.errors import choose, expect, listing
from rfdlc.evaluation.bins import classwise_gaps
from rfdlc.evaluation.metrics import (
    METRICS,
    Metric,
    measure,
    of_class,
    worth_in_words,
)
from rfdlc.evaluation.outcomes import UNCERTAINTIES, Outcomes, observe
from rfdlc.probabilities.classes import Classes, as_array, as_classes
from rfdlc.probabilities.predictions import Predictions
from rfdlc.probabilities.scores import check_no_path, class_columns
from rfdlc.progress import track
from rfdlc.statistics.intervals import LEVEL, Interval

COINCIDENCE = 0.01  # of the coarse scores of two sets of samples, some are equal
WORTH, COST = "mean_utility", "mean_cost"  # the second where utilities are costs
GAP = "utility_gap"
ANSWERED = ("abstention_rate", "kept_accuracy")
OF_RARER = {
    "recall": "recall",
    "precision": "precision",
    "specificity": "specificity",
    "auroc": "AUROC",
}
IF_ABSTAINED = dict.fromkeys(
    ("accuracy", "balanced_accuracy", "macro_f1"), " (abstained: wrong)"
)
OF_CLASS_IF_ABSTAINED = {
    "recall": " (abstained: missed)",
    "specificity": " (abstained: right)",
}
REGIONAL = (
    "accuracy_by_region",
    "accuracy_by_shots",
    "false_head_rate",
    "false_head_rates",
    "ece_by_region",
    "utility_gap_by_region",
    "set_coverage_by_region",
)
MOST_PARTS = 12  # a metric with more parts is not listed in tables


@dataclass(frozen=True)
class Entry:
    """One number of an evaluation: `name` as in `Evaluation.flat()`, `label` as in
    tables.
    """

    metric: Metric
    name: str
    label: str
    value: float

    def is_cost(self, utility: Utility | None) -> bool:
        """Whether it is shown as a cost, with its sign changed."""
        return (
            utility is not None
            and utility.has_costs
            and bool({WORTH, GAP} & {self.name, self.metric.parent})
        )

    @property
    def full_label(self) -> str:
        """The label with that of the parent: "accuracy, tail"."""
        return (
            f"{METRICS[self.metric.parent].label}, {self.label}"
            if self.metric.parent
            else self.label
        )


def entries(
    values: Mapping[str, Any],
    headline: bool = False,
    most_parts: float = np.inf,
    shown: bool = False,
) -> Iterator[Entry]:
    """The numbers in the values of an evaluation (or in a `metrics.json`), in the order
    of the registry.

    Those to be `shown` lack what is there to rerun the paper, and shots that give the
    numbers of the regions again.
    """
    # Tables show how many samples were answered beside the accuracy, if not all.
    table, abstains = (
        headline or most_parts < np.inf,
        bool(values.get("abstention_rate")),
    )
    for metric in METRICS.values():
        value = values.get(metric.name)
        parts = value if isinstance(value, Mapping) else {None: value}
        hidden = (
            table and not abstains
            if metric.name in ANSWERED
            else headline and not metric.headline
        )
        hidden |= shown and (
            not metric.table
            or (metric.name == "accuracy_by_shots" and _as_regions(values))
        )
        if value is None or hidden or len(parts) > most_parts:
            continue
        for key, number in parts.items():
            name = metric.name if key is None else f"{metric.name}.{key}"
            label = metric.label.format(f"{key:.0%}" if isinstance(key, float) else key)
            label += IF_ABSTAINED.get(metric.name, "") if abstains else ""
            yield Entry(metric, name, label, float("nan" if number is None else number))


def _as_regions(values: Mapping[str, Any]) -> bool:
    """Whether shots have the accuracies of the regions."""
    kinds = (values.get(f"accuracy_by_{kind}") or {} for kind in ("shots", "region"))
    shots, regions = (np.array([*kind.values()], dtype=np.float64) for kind in kinds)
    return np.array_equal(shots, regions, equal_nan=True)


@dataclass(frozen=True)
class Evaluation:
    """Metrics of decisions; every registered metric is an attribute. Metrics by region
    need training counts.

    Parameters
    ----------
    samples : int
    values : dict
        Each metric by name: a number, or a dict of numbers. Shares are between 0 and 1.
    uncertainty : str
        What ranked the samples for `error_auc` and `risk_coverage_area`.
    calibration_overlap : float
        Share of the samples that calibrated the decider which are among these samples;
        0 is wanted.
    intervals : dict
        95% intervals by name as in `flat()`, about other test samples: the model and
        its calibration are held fixed. Of samples in groups they are about other
        groups.

    Examples
    --------
    >>> result = evaluate(
    ...     [[0.9, 0.1], [0.4, 0.6], [0.7, 0.3]],
    ...     [0, 1, 1],
    ...     classes=Classes.from_counts([9, 1]),
    ... )
    >>> result.accuracy_by_region["tail"], result.flat()["accuracy_by_region.tail"]
    (0.5, 0.5)
    """

    samples: int
    values: dict[str, Any]
    uncertainty: str
    outcomes: Outcomes | None = field(default=None, repr=False, compare=False)
    bootstrap: tuple[int, int] = field(default=(0, 0), repr=False)
    calibration_overlap: float = 0.0
    merged: dict[str, Interval] = field(
        default_factory=dict, repr=False, compare=False
    )  # intervals, of sums alone
    calibrated: bool = field(
        default=False, repr=False, compare=False
    )  # whether the probabilities were, already

    @cached_property
    def intervals(self) -> dict[str, Interval]:
        if self.outcomes is None:
            return self.merged
        estimates = [
            metric.estimates(self.outcomes, *self.bootstrap)
            for metric in METRICS.values()
        ]
        bounds = {
            name: estimate.interval()
            for each in estimates
            for name, estimate in each.items()
        }
        return {name: found for name, found in bounds.items() if found is not None}

    @property
    def groups(self) -> int | None:
        """The number of groups that the samples come in, such as patients; None if they
        are independent.
        """
        groups = None if self.outcomes is None else self.outcomes.sample_groups
        return None if groups is None else len(np.unique(groups))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self.values:
            raise AttributeError(
                f"an evaluation has no {name!r}; it has {', '.join(METRICS)}"
            )
        return self.values[name]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.values]

    def flat(self) -> dict[str, float]:
        """Every number under one name: `accuracy`, `accuracy_by_region.tail`,
        `false_head_rates.0.25` ...
        """
        return {entry.name: entry.value for entry in entries(self.values)}

    def to_dict(self) -> dict[str, Any]:
        """Plain tables ready for JSON; a metric that is not defined is None."""
        named = {
            "samples": self.samples,
            **self.values,
            "uncertainty": self.uncertainty,
            "intervals": self.intervals,
        }
        named |= {} if self.groups is None else {"groups": self.groups}
        if self._has_costs:
            ends = self.intervals.get(WORTH)
            named |= {COST: 0.0 - self.values[WORTH]}
            named["intervals"] = self.intervals | (
                {COST: (0.0 - ends[1], 0.0 - ends[0])} if ends else {}
            )
        return dict(_plain(named | {"calibration_overlap": self.calibration_overlap}))

    def by(self, values: ArrayLike) -> "dict[Any, Evaluation]":
        """The evaluation of the samples of each value (N,), such as a sex or a centre;
        the most frequent first.

        >>> result = evaluate([[0.9, 0.1], [0.4, 0.6], [0.7, 0.3]], [0, 1, 1])
        >>> {value: part.accuracy for value, part in result.by(["f", "f", "m"]).items()}
        {'f': 1.0, 'm': 0.0}
        """
        o, given, found = self._samples, as_array(values), {}
        expect(
            given.shape == (len(o),),
            f"values have shape {given.shape}: expected one per sample, ({len(o)},)",
        )
        given = given.astype(str) if given.dtype == object else given
        names, place, counts = np.unique(given, return_inverse=True, return_counts=True)
        for i in track(np.argsort(-counts, kind="stable"), "Evaluating"):
            part = o.take(np.flatnonzero(place == i))
            part = replace(part, gaps=classwise_gaps(part.probabilities, part.targets))
            found[names[i].item()] = replace(
                self, samples=len(part), values=measure(part), outcomes=part
            )
        return found

    def per_class(self) -> dict[str, dict[str, Any]]:
        """Metrics of each class against all others, ready for JSON; one that is not
        defined is None.

        An action that is not a class decides for none: `abstention_rate` is its share
        of the samples of the class. `predicted_share`, the mean probability, is to be
        compared with `observed_share` (calibration in the large).

        >>> rows = evaluate([[0.9, 0.1], [0.4, 0.6], [0.7, 0.3]], [0, 1, 1]).per_class()
        >>> [
        ...     rows["1"][name]
        ...     for name in ("samples", "recall", "precision", "specificity", "auroc")
        ... ]
        [2, 0.5, 1.0, 1.0, 1.0]
        """
        o, found = self._samples, {}
        for c, name in enumerate(track(o.classes.names, "Evaluating")):
            parts, own = of_class(o, c), o.targets == c
            groups = (
                None
                if o.sample_groups is None
                else len(np.unique(o.sample_groups[own]))
            )
            row = {
                "samples": int(own.sum()),
                "groups": groups,
                **{key: part.value for key, part in parts.items()},
            }
            bounds = {key: part.interval() for key, part in parts.items()}
            found[name] = _plain(
                row | {"intervals": {key: own for key, own in bounds.items() if own}}
            )
        return found

    @property
    def _has_costs(self) -> bool:
        return self.outcomes is not None and self.outcomes.utility.has_costs

    @property
    def _samples(self) -> Any:
        expect(
            self.outcomes is not None,
            "an evaluation from sums keeps no samples: evaluate a file in memory",
        )
        return self.outcomes

    @property
    def promise(self) -> str:
        """Whether decisions were worth what their probabilities promised, in words."""
        gaps = [
            e
            for e in entries(self.values)
            if e.metric.name.startswith("utility_gap") and e.name in self.intervals
        ]
        gaps = [e for e in gaps if self._rarer is None or e.metric.name not in REGIONAL]
        less: dict[str, str] = {}
        more: dict[str, str] = {}
        shown = {}
        for entry in gaps:
            low, high = self.intervals[entry.name]
            value, ends = (
                worth_in_words(self._has_costs, *each)
                for each in ([entry.value], [low, high])
            )
            shown[entry.name] = f"{value} ({ends})"
            if not low <= 0 <= high:
                (less if low > 0 else more)[entry.name] = (
                    f"{entry.label} {shown[entry.name]}"
                )
        if "utility_gap" not in shown:
            return (
                "Too few samples to tell whether decisions are worth what they promise."
            )
        said = (
            f"Promised minus realised {'cost' if self._has_costs else 'utility'}"
            f" {shown[GAP]}: "
        )
        parts = (
            f"{len(less) + len(more)} of {len(gaps)} intervals exclude 0, where chance"
            " alone gives one in twenty"
        )
        whole = [
            word
            for word, off in (("less", less), ("more", more))
            if off.pop("utility_gap", None)
        ]
        if whole:
            other = (
                "set the target prior to theirs (--target-prior; for files of predict,"
                " there), or calibrate again"
            )
            advice = other if self.calibrated else "calibrate"
            said += (
                f"decisions are worth {whole[0]} than promised; {advice} on samples"
                " like these."
            )
        else:
            said += (
                f"the promise is met{' on the whole' if less or more else ''}, as far"
                " as these samples tell."
            )
        off = [
            f"worth {word} for {listing(each.values())}"
            for word, each in (("less", less), ("more", more))
            if each
        ]
        return said + (
            f" In parts they are {' and '.join(off)} ({parts})." if off else ""
        )

    def rows(self) -> list[tuple[str, str, str]]:
        """(metric, value, interval) as tables show them, without metrics that are not
        defined; costs as such.
        """
        rows, rarer = list[tuple[str, str, str]](), self._rarer
        for entry in entries(self.values, most_parts=MOST_PARTS, shown=True):
            rows += (
                self._of_class(rarer)
                if rarer is not None and entry.name == "balanced_accuracy"
                else []
            )
            if not np.isnan(entry.value) and (
                rarer is None or entry.metric.name not in REGIONAL
            ):
                label, value = entry.label, entry.value
                bounds: tuple[float, ...] = self.intervals.get(entry.name, ())
                if self.outcomes is not None and entry.is_cost(self.outcomes.utility):
                    label, value = label.replace("utility", "cost"), 0.0 - value
                    bounds = tuple(0.0 - end for end in reversed(bounds))
                show = entry.metric.format
                rows.append(
                    (
                        "  " * bool(entry.metric.parent) + label,
                        show(value),
                        " to ".join(map(show, bounds)),
                    )
                )
        return rows

    @property
    def _rarer(self) -> int | None:
        """The rarer of two classes, which tables show instead of regions of classes;
        None of more classes.
        """
        o = self.outcomes
        if o is None or len(o.classes) != 2:
            return None
        counts = (
            np.bincount(o.targets, minlength=2)
            if o.classes.counts is None
            else np.array(o.classes.counts)
        )
        return int(counts[1] <= counts[0])

    def _of_class(self, c: int) -> list[tuple[str, str, str]]:
        found = {
            name: part
            for name, part in of_class(self._samples, c).items()
            if name in OF_RARER
        }
        name, known = (
            self._samples.classes.names[c],
            {key: e for key, e in found.items() if not np.isnan(e.value)},
        )
        ends = {
            key: " to ".join(map("{:.2%}".format, e.interval() or ()))
            for key, e in known.items()
        }
        told = OF_CLASS_IF_ABSTAINED if self.values.get("abstention_rate") else {}
        labels = {
            key: f"{OF_RARER[key]} of {name}{told.get(key, '')}"
            for key in OF_RARER
            if key in known
        }
        return [
            (label, f"{known[key].value:.2%}", ends[key])
            for key, label in labels.items()
        ]

    def __repr__(self) -> str:
        return "\n".join(
            [counted_samples(self.samples, self.groups), *aligned(self.rows())]
        )

    def __rich__(self) -> Any:
        title, columns = (
            counted_samples(self.samples, self.groups),
            ("metric", "value", f"{LEVEL:.0%} interval"),
        )
        return rich_table(title, columns, self.rows())


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of a table as text: the first column on the left, others on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    shape = "  ".join(
        [f"{{:<{widths[0]}}}", *(f"{{:>{width}}}" for width in widths[1:])]
    )
    return [shape.format(*row).rstrip() for row in rows]


def counted_samples(samples: int, groups: int | None, kind: str = "samples") -> str:
    """What a table is about, in words; intervals of samples in groups are about other
    groups.
    """
    return f"{samples:,} {kind}" + (
        "" if groups is None else f" in {groups:,} groups (intervals by group)"
    )


def rich_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    caption: str | None = None,
) -> Any:
    """A table of plain text, with numbers in all columns but the first."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, caption=caption, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if i else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def evaluate(
    scores: Any,
    targets: ArrayLike | None = None,
    decider: Decider | None = None,
    *,
    utility: Utility | None = None,
    classes: Classes | Sequence[str] | None = None,
    logits: bool = False,
    groups: Sequence[tuple[str, str]] = (),
    uncertainty: str = "decision-probability",
    bootstrap: int = 0,
    seed: int = 0,
    batch: bool = True,
) -> Evaluation:
    """Decide labelled samples and compute every registered metric.

    Parameters
    ----------
    scores : Predictions, table, or array (N, C) or (M, N, C)
        Probabilities of any model, or logits.
    targets : array (N,), optional
        True classes as names or indices, if `scores` has none.
    decider : Decider, optional
        How scores become decisions; by default the most probable class is decided.
    utility, classes : Utility or data frame, and Classes, optional
        Replace the utility of `decider`, without fitting again; names and training
        counts, if `scores` has none.
    logits : bool
        Whether an array or a table holds logits.
    groups : list of (str, str)
        Pairs (true, decided) of classes or class groups whose confusion rate is
        computed.
    uncertainty : {"decision-probability", "max-probability", "entropy",
    "mutual-information", "evidential", "own"}
        Ranks samples for `error_auc` and `risk_coverage_area`; some methods store their
        "own" in predictions.
    bootstrap, seed : int
        Number of resamples, such as 500, and their seed, for intervals of your own
        metrics that are not means.
    batch : bool
        Whether all samples are one batch, which keeps to a budget exactly, or are
        decided one at a time by its prices.

    Returns
    -------
    Evaluation

    Examples
    --------
    >>> round(evaluate([[0.9, 0.1], [0.4, 0.6], [0.7, 0.3]], [0, 1, 1]).accuracy, 3)
    0.667
    """
    choose("uncertainty", uncertainty, UNCERTAINTIES)
    expect(
        bootstrap >= 0,
        f"bootstrap is {bootstrap}: expected a number of resamples, such as 500, or 0"
        " for none",
    )
    decider = decider_for(
        decider, utility, None if classes is None else as_classes(classes), scores
    )
    checked, y = decider.model.read_labelled(scores, targets, logits)
    outcomes = replace(
        observe(checked, y, decider, uncertainty, batch=batch), groups=as_pairs(groups)
    )
    if uncertainty == "own":
        own = getattr(scores, "uncertainty", None)
        expect(
            own is not None,
            "uncertainty 'own' is not stored in these predictions, as in those of some"
            " methods",
        )
        outcomes = replace(outcomes, certainty=-np.asarray(own))
    overlap = decider.model.overlap(checked, y)
    if overlap > COINCIDENCE:
        warnings.warn(
            f"about {overlap:.0%} of the samples that calibrated this decider seem to"
            " be evaluated, by their scores: if they are, metrics of probabilities"
            " look better than they are; evaluate on other samples",
            stacklevel=2,
        )
    calibrated = decider.model.calibrator is not None or bool(checked.corrected)
    return Evaluation(
        len(y),
        measure(outcomes),
        uncertainty,
        outcomes,
        (bootstrap, seed),
        overlap,
        {},
        calibrated,
    )


def as_pairs(groups: Any) -> tuple[tuple[Any, Any], ...]:
    """Checked pairs (true, decided) of classes or class groups, of which `evaluate`
    computes rates.
    """
    given = [*groups] if isinstance(groups, Iterable) else [groups]
    wrong = [
        pair for pair in given if not isinstance(pair, tuple | list) or len(pair) != 2
    ]
    problem = f"groups has {len(given)} entries such as {wrong[0]!r}" if wrong else ""
    fix = (
        "customers or patients, one per sample, belong to the predictions:"
        " Predictions(..., groups=customers)"
    )
    expect(
        not wrong,
        f"{problem}: here it names pairs (true, decided) of classes, such as [('ill',"
        f" 'healthy')]; {fix}",
    )
    return tuple((true, decided) for true, decided in given)


def decider_for(
    decider: Decider | None, utility: Any, classes: Classes | None, scores: Any
) -> Decider:
    """The decider with another utility and classes, if given; or a new one, by default
    with the classes of `scores`.
    """
    utility = (
        Utility(utility)
        if hasattr(utility, "columns") and hasattr(utility, "index")
        else utility
    )
    if decider is None:
        decider = Decider(
            Utility.one_hot(classes or _classes_of(scores))
            if utility is None
            else utility
        )
    kind = type(decider).__name__
    expect(
        isinstance(decider, Decider),
        f"decider is a {kind}: expected a Decider; give a utility as utility=",
    )
    return decider.replace(utility=utility, classes=classes)


def _classes_of(scores: Any) -> Classes:
    """From predictions or a table, or as many as there are columns."""
    if isinstance(scores, Predictions):
        return scores.classes
    if hasattr(scores, "columns"):
        return Classes(tuple(class_columns([str(name) for name in scores.columns])))
    check_no_path(scores)
    n, shape = np.ndim(scores), np.shape(scores)
    expect(
        n in (2, 3),
        f"scores have shape {shape}: expected (samples, classes) or (particles,"
        " samples, classes)",
    )
    return as_classes(shape[-1])


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value

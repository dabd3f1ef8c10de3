"""evaluate(): every figure of a model and its decisions, in one result."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rfdlc.decide import metrics, uncertainty
from rfdlc.decide.classes import Classes, Indices, as_classes
from rfdlc.decide.decider import Decider
from rfdlc.decide.predictions import Predictions
from rfdlc.decide.scores import Floats, Scores, class_columns
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError, choose
from rfdlc.progress import track

UNCERTAINTIES = ("max-probability", "entropy", "mutual-information", "evidential", "own")
LEVEL = 0.95  # of bootstrap intervals


@dataclass(frozen=True)
class Evaluation:
    """What decisions were worth and how far probabilities can be trusted. Shares are between 0 and 1, not percent.

    Figures by region and false head rates need training counts and are empty without them.
    `intervals` maps a figure's name (as in `flat()`) to its bootstrap interval, where one was asked for.
    """

    samples: int
    accuracy: float
    balanced_accuracy: float
    macro_f1: float
    mean_utility: float
    mean_regret: float
    abstention_rate: float
    kept_accuracy: float
    accuracy_by_region: dict[str, float]
    accuracy_by_shots: dict[str, float]
    false_head_rates: dict[float, float]
    group_rates: dict[str, float]
    error_auc: float
    risk_coverage_area: float
    ece: float
    ece_by_region: dict[str, float]
    ece_paper: float
    brier: float
    nll: float
    classwise_ece: float
    uncertainty: str
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def false_head_rate(self) -> float:
        """Mean of the false head rates at the head fractions; NaN without training counts."""
        return metrics.mean_false_head_rate(self.false_head_rates)

    def flat(self) -> dict[str, float]:
        """Every figure under one name: `accuracy`, `accuracy_by_region.tail`, `false_head_rates.0.25` ..."""
        return {**_flatten(asdict(self)), "false_head_rate": self.false_head_rate}

    def to_dict(self) -> dict[str, Any]:
        """Plain tables ready for JSON; a figure that is not defined is None."""
        table = asdict(self) | {"false_head_rate": self.false_head_rate}
        return {name: _plain(value) for name, value in table.items()}

    def rows(self) -> list[tuple[str, str, str]]:
        """(figure, value, interval) as a person reads them; figures that are not defined are left out."""
        flat = self.flat()
        shown = [(label, name, percent) for label, name, percent in _LABELS if not np.isnan(flat.get(name, np.nan))]
        shown += [(rate, f"group_rates.{rate}", True) for rate in self.group_rates]
        return [(label, _figure(flat[n], p), _interval(self.intervals.get(n), p)) for label, n, p in shown]

    def __str__(self) -> str:
        rows = self.rows()
        wide = max(len(label) for label, _, _ in rows)
        lines = [f"{label.ljust(wide)}  {value.rjust(8)}  {interval}".rstrip() for label, value, interval in rows]
        return "\n".join([f"{self.samples:,} samples", *lines])

    def __rich__(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(title=f"{self.samples:,} samples", title_justify="left")
        table.add_column("figure")
        table.add_column("value", justify="right")
        if self.intervals:
            table.add_column(f"{LEVEL:.0%} interval")
        for row in self.rows():
            table.add_row(*map(Text, row[: 3 if self.intervals else 2]))
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
    uncertainty: str = "max-probability",
    bootstrap: int = 0,
    seed: int = 0,
) -> Evaluation:
    """Decide and score. Without a decider or utility, decisions are the most probable classes.

    A `utility` beside a `decider` takes the place of its own; nothing is fitted again.
    `groups` are pairs (true, decided) of class groups whose confusion rate is wanted. `uncertainty` ranks samples for
    `error_auc` and the risk-coverage area; `own` is what predictions bring themselves. `bootstrap` is a number of
    resamplings (500, say) for intervals.

    >>> result = evaluate([[0.9, 0.1], [0.4, 0.6], [0.7, 0.3]], [0, 1, 1], classes=Classes.from_counts([9, 1]))
    >>> round(result.accuracy, 3), result.accuracy_by_region
    (0.667, {'head': 1.0, 'tail': 0.5})
    """
    choose("uncertainty", uncertainty, UNCERTAINTIES)
    if decider is not None and not isinstance(decider, Decider):
        raise InputError(f"decider is a {type(decider).__name__}: expected a Decider; give a utility as utility=")
    classes = None if classes is None else as_classes(classes)
    if decider is None:
        decider = Decider(utility or Utility.one_hot(_known_classes(scores, classes)))
    elif utility is not None:
        decider = decider.replace(utility=utility)
    if classes is not None:
        decider = decider.replace(classes=classes)
    if bootstrap < 0:
        raise InputError(f"bootstrap {bootstrap} is no number of resamplings: expected 0 or more, such as 500")
    checked, y = decider.read_labelled(scores, targets, logits)
    own = scores.uncertainty if isinstance(scores, Predictions) else None
    if uncertainty == "own" and own is None:
        raise InputError("uncertainty 'own' comes with predictions of a model that states one: choose another")
    record, gaps = _observe(checked, y, decider, uncertainty, own)
    measure = partial(_measure, utility=decider.utility, groups=tuple(groups))
    figures = measure(record)
    classwise = float(np.abs(gaps).sum() / len(y) / len(gaps))
    intervals = _bootstrap(record, measure, bootstrap, seed) if bootstrap else {}
    return Evaluation(samples=len(y), **figures, classwise_ece=classwise, uncertainty=uncertainty, intervals=intervals)


def _known_classes(scores: Any, classes: Classes | None) -> Classes:
    """From the argument, from the predictions, or as many as there are columns."""
    if classes is not None:
        return classes
    if isinstance(scores, Predictions):
        return scores.classes
    if hasattr(scores, "columns"):
        return Classes(tuple(class_columns([str(name) for name in scores.columns])))
    shape = np.shape(scores)
    if len(shape) not in (2, 3):
        raise InputError(f"scores have shape {shape}: expected (samples, classes) or (particles, samples, classes)")
    return Classes(tuple(str(i) for i in range(shape[-1])))


Record = dict[str, NDArray[Any]]  # one entry a sample in each column


def _observe(
    scores: Scores, y: Indices, decider: Decider, kind: str, own: NDArray[np.float64] | None
) -> tuple[Record, NDArray[np.float64]]:
    """What the figures need of each sample, in one pass over the scores; and the class-wise calibration gaps."""
    gaps = np.zeros((len(decider.utility.classes), metrics.ECE_BINS))
    parts: list[Record] = []
    for rows, p in decider.stream(scores):
        true, actions = y[rows], decider.decide_probabilities(p)
        piece = {
            "target": true,
            "action": actions,
            "decided": decider.utility.decided_class[actions],
            "right": p.argmax(axis=1) == true,
            "confidence": p.max(axis=1).astype(np.float64),
            "entropy": uncertainty.entropy(p),
            "brier": metrics.brier(p, true),
            "nll": metrics.nll(p[np.arange(len(p)), true]),
        }
        piece["sureness"] = -own[rows] if own is not None and kind == "own" else _sureness(kind, piece, scores, rows)
        parts.append(piece)
        gaps += metrics.classwise_gaps(p, true)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, gaps


def _sureness(kind: str, piece: Record, scores: Scores, rows: slice) -> Floats:
    """Minus the uncertainty of each sample of a piece."""
    if kind == "max-probability":
        return piece["confidence"]
    if kind == "entropy":
        return -piece["entropy"]
    values = scores.values[:, rows]
    if kind == "mutual-information":
        return -uncertainty.mutual_information(uncertainty.particle_probabilities(values, scores.logits))
    if not scores.logits:
        raise InputError("uncertainty 'evidential' is made from logits: expected logits, or another uncertainty")
    return -uncertainty.evidential(values.mean(axis=0))


def _measure(record: Record, utility: Utility, groups: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """All figures that follow from one entry a sample; also run on resampled records."""
    classes, y, decided, right = utility.classes, record["target"], record["decided"], record["right"]
    known = classes.counts is not None
    thirds, shots = (classes.thirds, classes.shots) if known else ({}, {})
    kept = decided >= 0
    correct, sureness = (decided == y)[kept], record["sureness"][kept]
    each = _by_class_members(y, thirds)
    return {
        "accuracy": metrics.accuracy(y, decided),
        "balanced_accuracy": metrics.balanced_accuracy(y, decided, len(classes)),
        "macro_f1": metrics.macro_f1(y, decided, len(classes)),
        "mean_utility": metrics.mean_utility(y, record["action"], utility),
        "mean_regret": metrics.mean_regret(y, record["action"], utility),
        "abstention_rate": metrics.abstention_rate(decided),
        "kept_accuracy": metrics.kept_accuracy(y, decided),
        "accuracy_by_region": {name: metrics.mean((decided == y)[mask]) for name, mask in each.items()},
        "accuracy_by_shots": {
            name: metrics.mean((decided == y)[mask]) for name, mask in _by_class_members(y, shots).items()
        },
        "false_head_rates": metrics.false_head_rates(y, decided, classes) if known else {},
        "group_rates": {
            f"{true} as {wrong}": metrics.group_rate(y, decided, classes.members(true), classes.members(wrong))
            for true, wrong in groups
        },
        "error_auc": metrics.error_auc(correct, sureness),
        "risk_coverage_area": metrics.risk_coverage_area(correct, sureness),
        "ece": metrics.ece(record["confidence"], right),
        "ece_by_region": {n: metrics.ece(record["confidence"][mask], right[mask]) for n, mask in each.items()},
        "ece_paper": metrics.ece_paper(record["entropy"], right),
        "brier": metrics.mean(record["brier"]),
        "nll": metrics.mean(record["nll"]),
    }


def _by_class_members(y: Indices, regions: Mapping[str, Indices]) -> dict[str, NDArray[np.bool_]]:
    """Which samples belong to each region that has classes."""
    return {name: np.isin(y, members) for name, members in regions.items() if len(members)}


def _bootstrap(
    record: Record, measure: Callable[[Record], dict[str, Any]], times: int, seed: int
) -> dict[str, tuple[float, float]]:
    """Percentile intervals from resampled samples (Efron 1979)."""
    rng, size = np.random.default_rng(seed), len(record["target"])
    drawn: dict[str, list[float]] = {}
    for _ in track(range(times), "Resampling"):
        rows = rng.integers(0, size, size)
        figures = measure({name: column[rows] for name, column in record.items()})
        figures["false_head_rate"] = metrics.mean_false_head_rate(figures["false_head_rates"])
        for name, value in _flatten(figures).items():
            drawn.setdefault(name, []).append(value)
    tails = (1 - LEVEL) / 2
    return {
        name: tuple(np.nanquantile(values, [tails, 1 - tails]).tolist())
        for name, values in drawn.items()
        if not np.isnan(values).all()
    }


def _flatten(figures: Mapping[str, Any]) -> dict[str, float]:
    flat: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, Mapping) and name != "intervals":
            flat |= {f"{name}.{key}": number for key, number in value.items()}
        elif isinstance(value, float):
            flat[name] = value
    return flat


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def readable(value: float) -> str:
    """Four decimals, or four digits where the decimals would tell nothing, or more than a table has room for.

    >>> readable(-1.5), readable(2.5e-07), readable(-1.07442e14)
    ('-1.5000', '2.5e-07', '-1.074e+14')
    """
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e7 else f"{value:.4g}"


def _figure(value: float, percent: bool) -> str:
    return f"{value:.2%}" if percent else readable(value)


def _interval(bounds: tuple[float, float] | None, percent: bool) -> str:
    return "" if bounds is None else f"{_figure(bounds[0], percent)} to {_figure(bounds[1], percent)}"


# How a person reads each figure: label, name in `flat()`, whether as a percentage.
_LABELS = [
    ("accuracy", "accuracy", True),
    *((f"  {region}", f"accuracy_by_region.{region}", True) for region in ("head", "med", "tail")),
    *((f"  {shots} shot", f"accuracy_by_shots.{shots}", True) for shots in ("many", "medium", "few")),
    ("balanced accuracy", "balanced_accuracy", True),
    ("macro F1", "macro_f1", True),
    ("false head rate", "false_head_rate", True),
    *((f"  head = first {f:.0%}", f"false_head_rates.{f}", True) for f in metrics.HEAD_FRACTIONS),
    ("mean utility", "mean_utility", False),
    ("mean regret", "mean_regret", False),
    ("abstained", "abstention_rate", True),
    ("accuracy where kept", "kept_accuracy", True),
    ("error detection AUC", "error_auc", True),
    ("risk-coverage area", "risk_coverage_area", False),
    ("ECE", "ece", True),
    *((f"  {region}", f"ece_by_region.{region}", True) for region in ("head", "med", "tail")),
    ("class-wise ECE", "classwise_ece", True),
    ("Brier score", "brier", False),
    ("negative log-likelihood", "nll", False),
    ("ECE as in the paper", "ece_paper", True),
]

"""watch(): logged decisions as windows with estimates, tests and a verdict;
recalibrate() from labels.
"""

import re
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.decide import feedback
from rfdlc.decide import monitor as monitoring
from rfdlc.decide.classes import Indices
from rfdlc.decide.decider import Decider
from rfdlc.decide.metrics import readable, worth_in_words
from rfdlc.decide.predictions import Predictions, encode_targets
from rfdlc.decide.priors import estimate_prior
from rfdlc.decide.rules import UNFAMILIAR
from rfdlc.decide.sets import PredictionSets
from rfdlc.errors import InputError, counted, expect, listing
from rfdlc.files import parse_json
from rfdlc.progress import track
from rfdlc.tables import is_table, open_table, parquet_files, read_numbers

DECIDERS, LABELS = "deciders", "feedback.jsonl"  # in the folder of a log
SECONDS = {"h": 3600, "d": 86_400, "w": 7 * 86_400}
MONTH = 30 * SECONDS["d"]
WINDOWS, SHORTEST = (
    20,
    1000,
)  # by default: so many windows at most, and their shortest length
TRAFFIC = 30_000  # samples of a month, at least
COLUMNS = ("id", "action", "reason", "decider")
NOT_TRUSTED = "The estimates below are not to be trusted"


@dataclass(frozen=True, eq=False)
class Log:
    """Decisions of one decider, and the labels that came for some of them."""

    decider: Decider
    version: str
    decisions: monitoring.Decided
    left_out: int = 0  # decisions of other versions of the decider
    rows: Indices | None = None  # of decisions with labels
    targets: Indices | None = None
    propensity: NDArray[np.float64] | None = None
    unused: bool = (
        False  # whether predictions have labels: estimates and tests do without
    )


def read_log(
    source: str | Path,
    decider: str | Path | Decider | None = None,
    logits: bool = False,
) -> Log:
    """Decisions of a log of `rfdlc serve` by its last decider, or the given one; or
    predictions and their decider.
    """
    place = Path(source)
    given = Decider.load(decider) if isinstance(decider, str | Path) else decider
    if not (place / DECIDERS).is_dir():
        if given is None:
            made = (
                "`rfdlc decide` writes one for your costs and calibration"
                " (--save-decider FILE)"
            )
            raise InputError(
                f"{place}: is not a log of decisions: give its decider, --decider FILE"
                f" or RUN; {made}"
            )
        predictions = Predictions.load(place, given.utility.classes, logits=logits)
        changes = any(
            part is not None
            for part in (given.fitted, given.train_prior, given.target_prior)
        )
        twice = (
            "these probabilities are calibrated and corrected already, and the decider"
            " would do so again"
        )
        fix = (
            "write raw ones (rfdlc predict RUN DATA --raw --out FILE), or give a log of"
            " decisions"
        )
        expect(
            not (changes and predictions.scores.corrected), f"{place}: {twice}: {fix}"
        )
        unused = predictions.targets is not None or (
            is_table(place) and "target" in open_table(place).names
        )
        return Log(
            given,
            feedback.decider_version(given),
            monitoring.Decided.of(given, predictions),
            unused=unused,
        )
    expect(
        parquet_files(place),
        f"{place}: has no decisions yet: the server writes them every minute, and at"
        " its end",
    )
    file = open_table(place)
    absent = [name for name in (*COLUMNS, "time") if name not in file.names]
    expect(
        not absent,
        f"{place}: has no column {listing(absent)}: expected a log of `rfdlc serve"
        " --log-decisions`",
    )
    last = read_numbers(
        open_table(sorted(parquet_files(place))[-1]), ["time"], ["decider"]
    )[1]["decider"][-1]
    version = str(last) if given is None else feedback.decider_version(given)
    served = Decider.load(place / DECIDERS / f"{last}.json") if given is None else given
    names = list(served.utility.classes.names)
    values, texts = read_numbers(file, [*names, "time"], COLUMNS)
    order = np.argsort(values[:, -1], kind="stable")
    order = order[texts["decider"][order] == version]
    expect(
        len(order),
        f"{place}: has no decisions of decider {version}: give one of"
        f" {place / DECIDERS}",
    )
    place_of = {name: i for i, name in enumerate(served.utility.actions)}
    actions = np.array(
        [place_of[name] for name in texts["action"][order]], dtype=np.int64
    )
    strange = texts["reason"][order] == UNFAMILIAR
    decisions = monitoring.Decided(
        served.utility, values[order, :-1], actions, strange, values[order, -1]
    )
    labels = _labels(place / LABELS, texts["id"][order], served)
    return Log(served, version, decisions, len(values) - len(order), *labels)


def _labels(
    path: Path, ids: NDArray[np.str_], decider: Decider
) -> tuple[Any, Any, Any]:
    """Rows, classes and propensities of labelled decisions; the first label of a
    decision counts.

    Lines that cannot be read, as a full disk or a loss of power leaves them, and labels
    that conflict with the first one are left out, and counted in a warning.
    """
    if not path.is_file():
        return None, None, None
    where = {name: i for i, name in enumerate(ids.tolist())}
    found = dict[int, tuple[str, float | None]]()
    torn = conflicting = 0
    content = path.read_bytes()
    # What follows the last line end is being written.
    for line in content[: content.rfind(b"\n") + 1].splitlines():
        try:
            entry = parse_json(line)
            row = where.get(entry["id"])
            label, propensity = str(entry["label"]), entry.get("propensity")
        except (ValueError, KeyError, TypeError, AttributeError):
            torn += 1
            continue
        if row is None:
            continue
        first, _ = found.setdefault(row, (label, propensity))
        conflicting += label != first
    if torn:
        warnings.warn(
            f"{path}: {counted(torn, 'line')} left out: expected objects with id and"
            " label",
            stacklevel=2,
        )
    if conflicting:
        warnings.warn(
            f"{path}: {counted(conflicting, 'label')} left out: the first label of a"
            " decision counts, and these conflict with it",
            stacklevel=2,
        )
    if not found:
        return None, None, None
    labels, given = zip(*found.values(), strict=True)
    known = all(each is not None for each in given)
    targets = encode_targets(list(labels), decider.utility.classes)
    return (
        np.array(list(found)),
        targets,
        np.array(given, dtype=np.float64) if known else None,
    )


@dataclass(frozen=True, eq=False)
class Watch:
    """What a log shows, beside what held-out data promise."""

    log: Log
    reference: monitoring.Reference
    monitor: monitoring.Monitor
    windows: list[monitoring.Window]
    whole: monitoring.Window  # all samples together
    lengths: list[
        tuple[int, bool]
    ]  # by class, the samples that its interval needs, and whether there are as many
    realised: feedback.Realised | None
    options: list[feedback.Revision]

    @property
    def worth(self) -> str:
        """What expected utilities are called in words."""
        return "cost" if self.log.decider.utility.has_costs else "utility"

    def shown(self, *ends: float) -> str:
        """A utility, or both ends of its interval, in words."""
        return worth_in_words(self.log.decider.utility.has_costs, *ends)

    def fits(self, window: monitoring.Window) -> bool:
        """Whether label shift can explain the scores of a window: if not, its estimates
        mean little.
        """
        return window.misfit >= monitoring.misfit_level(
            self.monitor.per_month, window.samples
        )

    @property
    def trusted(self) -> bool:
        """Whether label shift can explain all windows, and what the monitor has
        seen.
        """
        return self.monitor.trusted and all(map(self.fits, [*self.windows, self.whole]))

    @property
    def verdict(self) -> list[str]:
        """What to know first, in words."""
        alarms, seen, last = (
            self.monitor.alarms,
            len(self.log.decisions),
            self.windows[-1],
        )
        promised, lines = self.reference.values(), []
        if not self.trusted:
            why = []
            if alarms[monitoring.STRANGE] is not None:
                share = f"from {promised['unfamiliar']:.1%} to {last.unfamiliar:.1%}"
                why.append(
                    f"unfamiliar input has risen {share} (alarm at sample"
                    f" {alarms[monitoring.STRANGE]:,})"
                )
            if (
                sample := alarms[monitoring.MISFIT]
            ) is not None or self.monitor.trusted:
                when = (
                    "in some windows"
                    if sample is None
                    else f"alarm at sample {sample:,}"
                )
                why.append(f"no class prior explains the scores ({when})")
            lines.append(
                f"{NOT_TRUSTED}: {' and '.join(why)}. The data have changed in more"
                " than their class prior: have samples reviewed, and compare with"
                " their labels."
            )
        elif alarms[monitoring.PRIOR] is not None:
            away = float(np.abs(last.estimate.prior - self.reference.prior).sum() / 2)
            lines.append(
                "The class prior has changed, as far as scores can tell (alarm at"
                f" sample {alarms[monitoring.PRIOR]:,}): the last window is {away:.2f}"
                " in total variation from the prior that is decided for. Labels of"
                " some samples would show it."
            )
        if alarms[monitoring.UTILITY] is not None:
            when, before = (
                f"alarm at sample {alarms[monitoring.UTILITY]:,}",
                self.shown(promised["realised_utility"]),
            )
            ends = (
                f"{self.shown(*last.interval)} in the last window if only the class"
                " prior has changed"
            )
            told = (
                ends
                if self.trusted
                else "the scores do not tell how much, labels of some samples would"
            )
            lines.append(
                f"Decisions are worth less ({when}): {told}; held-out data promised"
                f" {before}."
            )
        if not lines:
            lines.append(
                f"Nothing has changed as far as {counted(seen, 'sample')} show."
            )
        if self.log.left_out:
            lines.append(
                f"Left out: {counted(self.log.left_out, 'decision')} of other deciders"
                f" than {self.log.version}. Name the decider with --decider"
                f" LOG/{DECIDERS}/V.json."
            )
        return lines + self._labelled()

    def _labelled(self) -> list[str]:
        found = self.realised
        if found is None:
            told = (
                "Labels (`target`) are not used here: `rfdlc evaluate` with the same"
                " decider compares decisions "
            )
            return [f"{told}with them."] if self.log.unused else []
        lines = [f"{found.labelled:,} labels: {found.words}; {found.promise}."]
        for option in [each for each in self.options if each.pays][:1]:
            what = {
                "prior": "A new prior",
                "calibration": "A recalibration",
                "both": "A recalibration and a new prior",
            }
            ends = f"{readable(option.interval[0])} to {readable(option.interval[1])}"
            more = f"{readable(option.gain)} per sample ({ends})"
            lines.append(f"{what[option.name]} would gain {more}: rfdlc recalibrate.")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, ready for JSON."""
        classes, monitor = self.log.decider.utility.classes.names, self.monitor
        tests = {
            name: (
                {
                    "alarm_at_sample": when,
                    "false_alarms_per_month": monitoring.LEVELS[name],
                }
                | (
                    {"e_value": monitor.evidence[name].value}
                    if name in monitor.evidence
                    else {}
                )
            )
            for name, when in monitor.alarms.items()
        }
        return {
            "verdict": self.verdict,
            "trusted": self.trusted,
            "samples": len(self.log.decisions),
            "left_out": self.log.left_out,
            "decider": self.log.version,
            "per_month": monitor.per_month,
            "tests": tests,
            "reference": self.reference.values(),
            "whole": self.whole.to_dict(),
            "windows": [
                window.to_dict() | {"trusted": self.fits(window)}
                for window in self.windows
            ],
            "classes": [
                {"class": name, "samples_needed": size, "enough": enough}
                for name, (size, enough) in zip(classes, self.lengths, strict=True)
            ],
            "realised": None if self.realised is None else asdict(self.realised),
            "options": [
                {"name": o.name, "gain": o.gain, "interval": o.interval, "pays": o.pays}
                for o in self.options
            ],
        }


def watch(
    source: str | Path,
    reference: Any,
    out: str | Path | None = None,
    *,
    decider: str | Path | Decider | None = None,
    window: str | int | None = None,
    per_month: int | None = None,
    logits: bool = False,
) -> Watch:
    """Estimate without labels what decisions are worth, and test whether anything has
    changed.

    Parameters
    ----------
    source : path
        The folder of `rfdlc serve --log-decisions`, or predictions of samples in the
        order in which they came.
    reference : path or Predictions
        Held-out predictions with targets: a file, or a run folder.
    out : path, optional
        Write a page of HTML.
    decider : path or Decider, optional
        Of predictions; or which decider of a log, by default its last.
    window : int or str, optional
        Samples of a window, or its time ("6h", "1d"); by default a twentieth of all
        samples, at least 1,000.
    per_month : int, optional
        Samples of a month, for the rate of false alarms; by default as the times of the
        log say.
    logits : bool
        Whether tables of predictions hold logits.

    Returns
    -------
    Watch
        With `verdict`, `windows`, `monitor.alarms` and `to_dict()`.
    """
    log = read_log(source, decider, logits)
    held = reference
    if not isinstance(reference, Predictions):
        place = Path(reference)
        own = place / "held-out.npz"
        held = Predictions.load(
            own if own.is_file() else place, log.decider.utility.classes, logits=logits
        )
    expect(
        held.targets is not None,
        f"{reference}: held-out predictions need labels: a column 'target'",
    )
    known = monitoring.Reference.fit(log.decider, held)
    decisions, spans = log.decisions, list(_spans(log.decisions, window))
    if per_month is None:
        seconds = (
            MONTH
            if decisions.times is None
            else max(float(np.ptp(decisions.times)), SECONDS["d"])
        )
        per_month = max(TRAFFIC, round(len(decisions) * MONTH / seconds))
    monitor = monitoring.Monitor(known, per_month=per_month).update(decisions)
    windows = [
        monitoring.assess(known, decisions[a:b], a)
        for a, b in track(spans, "Estimating windows")
    ]
    whole = monitoring.assess(known, decisions) if len(windows) > 1 else windows[0]
    sizes, carried = (
        [2**k for k in range(20) if 2**k < len(spans)],
        np.maximum(known.prior, 1e-12),
    )
    recent = [(len(decisions) - spans[-size][0], spans[-size][0]) for size in sizes]
    longer = [
        (size, estimate_prior(decisions.probabilities[start:], carried))
        for size, start in recent
    ]
    lengths = monitoring.lengths_needed(
        [*longer, (len(decisions), whole.estimate)], known.prior
    )
    realised, found = _from_labels(log)
    result = Watch(log, known, monitor, windows, whole, lengths, realised, found)
    if out is not None:
        from rfdlc.integrations.report.watch_page import write_page

        write_page(result, Path(out), str(source))
    return result


def _spans(
    decisions: monitoring.Decided, window: str | int | None
) -> Iterator[tuple[int, int]]:
    """First and last row of each window; a short rest belongs to the last one."""
    text, size = str(window or ""), len(decisions)
    timed = re.fullmatch(r"(\d+)([hdw])", text)
    expect(
        not text or timed or (text.isdecimal() and int(text) >= 50),
        f"window {text!r}: expected samples (at least 50), or a time such as 6h, 1d"
        " or 1w",
    )
    if timed is None:
        length = min(int(text) if text else max(SHORTEST, -(-size // WINDOWS)), size)
        starts = list(range(0, max(1, size - length // 2), length))
    else:
        if decisions.times is None:
            raise InputError(
                f"window {text!r} needs the times of a log: give a number of samples"
            )
        slot = (decisions.times - decisions.times[0]) // (
            int(timed[1]) * SECONDS[timed[2]]
        )
        starts = np.flatnonzero(np.diff(slot, prepend=-1)).tolist()
    yield from zip(starts, [*starts[1:], size], strict=True)


def _from_labels(log: Log) -> tuple[feedback.Realised | None, list[feedback.Revision]]:
    if log.rows is None or log.targets is None:
        return None, []
    decisions = log.decisions
    group = feedback.strata(decisions.probabilities.max(axis=1), decisions.decided < 0)
    given = (
        log.targets,
        decisions.actions,
        decisions.expected,
        group,
        log.rows,
        log.propensity,
    )
    realised = feedback.realised_utility(decisions.utility, *given)
    weights = feedback.review_weights(group, log.rows, log.propensity)
    enough = len(log.rows) >= feedback.FEWEST
    return realised, (
        feedback.options(log.decider, decisions, log.rows, log.targets, weights)
        if enough
        else []
    )


def recalibrate(
    source: str | Path,
    out: str | Path,
    *,
    kind: str | None = None,
    decider: str | Path | Decider | None = None,
    force: bool = False,
) -> tuple[feedback.Revision, list[feedback.Revision], feedback.Realised]:
    """Write a decider that is calibrated again from logged decisions and labels that
    came later; nothing is trained.

    It is written if the interval of its gain is above 0 (`Revision.pays`), or with
    `force`: a server takes it up at once. If nothing can be gained, it is written with
    a probability of about 2.5% at most: intervals are corrected for the three options.
    `kind` is "prior" (a new target prior), "calibration" or "both"; by default the one
    that gains most, of those that pay if any does. `decider` is the one whose decisions
    count, by default the last. Returns what was chosen, all of them, and the realised
    utility.

    Raises
    ------
    InputError
        If the folder is not a log, or has too few labels.
    """
    fix = (
        "of predictions with labels, `rfdlc decide FILE --calibrate LABELLED"
        " --save-decider DECIDER` makes a decider"
    )
    logged = (
        f"{source}: is not a log of decisions: expected a folder of `rfdlc serve"
        f" --log-decisions`; {fix}"
    )
    expect((Path(source) / DECIDERS).is_dir(), logged)
    log = read_log(source, decider)
    absent = (
        f"{source}: no labels of decisions of decider {log.version}: POST /feedback"
        " them first"
    )
    expect(
        log.rows is not None,
        (
            f"{absent}, or name an earlier decider by --decider"
            if log.left_out
            else absent
        ),
    )
    realised, found = _from_labels(log)
    few = f"{source}: {counted(len(log.rows if log.rows is not None else ()), 'label')}"
    expect(found, f"{few}: expected at least {feedback.FEWEST} to learn from")
    chosen = [option for option in found if kind in (None, option.name)]
    expect(chosen, f"kind {kind!r} is unknown: expected prior, calibration or both")
    assert realised is not None
    best = next((option for option in chosen if option.pays), chosen[0])
    if not (best.pays or force):
        return best, found, realised
    from rfdlc.files import replacing

    if isinstance(log.decider.sets, PredictionSets):
        lost = "prediction sets were fitted to other probabilities and are left out"
        warnings.warn(
            f"{out}: {lost}: fit them again on held-out data (Decider.fit_sets)",
            stacklevel=2,
        )
    with replacing(Path(out)) as beside:
        best.decider.save(beside)
    return best, found, realised


def stamp(seconds: float) -> str:
    """A time for people, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))

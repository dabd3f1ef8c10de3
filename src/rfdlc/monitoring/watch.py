"""watch(): logged decisions as windows with estimates, tests and a verdict;
recalibrate() from labels.
"""

import re
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.decisions.decider import Decider
from rfdlc.decisions.rules import UNFAMILIAR
from rfdlc.decisions.sets import PredictionSets
from rfdlc.errors import InputError, counted, expect, listing
from rfdlc.evaluation.metrics import readable, worth_in_words
from rfdlc.formats.files import parse_json
from rfdlc.formats.tables import is_table, open_table, parquet_files, read_numbers
from rfdlc.monitoring import feedback
from rfdlc.monitoring import monitor as monitoring
from rfdlc.monitoring.designs import PROPENSITY, Labels, Sample, sampled
from rfdlc.probabilities.predictions import Predictions, encode_targets
from rfdlc.probabilities.priors import estimate_prior
from rfdlc.progress import track

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
UNSEEN = (
    "Whether labels still mean the same cannot be seen without labels: send those of a"
    " random sample (POST /feedback)."
)


@dataclass(frozen=True, eq=False)
class Log:
    """Decisions of one decider, and the labels that came for some of them."""

    decider: Decider
    version: str
    decisions: monitoring.Decided
    left_out: int = 0  # decisions of other versions of the decider
    labels: Labels | None = None
    unused: bool = False  # whether some predictions have labels, and others have none


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
            made = "`rfdlc fit HELD_OUT --costs FILE` writes one for your costs"
            raise InputError(
                f"{place}: is not a log of decisions: give its decider, --decider FILE"
                f" or RUN; {made}"
            )
        predictions = Predictions.load(place, given.utility.classes, logits=logits)
        model = given.model
        parts = (model.calibrator, model.train_prior, model.target_prior)
        changes = any(part is not None for part in parts)
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
        targets, labels = predictions.targets, None
        if targets is not None:
            labels = Labels(np.arange(len(targets)), targets, [None] * len(targets))
        partly = is_table(place) and "target" in open_table(place).names
        return Log(
            given,
            feedback.decider_version(given),
            monitoring.Decided.of(given, predictions),
            labels=labels,
            unused=labels is None and partly,
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
    return Log(served, version, decisions, len(values) - len(order), labels)


def _labels(path: Path, ids: NDArray[np.str_], decider: Decider) -> Labels | None:
    """Labels of decisions; the first label of a decision counts, and the last design
    that was stated with it.

    Lines that cannot be read, as a full disk or a loss of power leaves them, and labels
    that conflict with the first one are left out, and counted in a warning.
    """
    if not path.is_file():
        return None
    where = {name: i for i, name in enumerate(ids.tolist())}
    labels = dict[int, str]()
    stated = dict[int, tuple[str, float]]()  # designs and propensities
    torn = conflicting = 0
    content = path.read_bytes()
    # What follows the last line end is being written.
    for line in content[: content.rfind(b"\n") + 1].splitlines():
        try:
            entry = parse_json(line)
            row = where.get(entry["id"])
            label = str(entry["label"])
            design = _design_of(entry)
        except (ValueError, KeyError, TypeError, AttributeError):
            torn += 1
            continue
        if row is None:
            continue
        if labels.setdefault(row, label) != label:
            conflicting += 1
        elif design is not None:
            stated[row] = design
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
    if not labels:
        return None
    designs = [stated.get(row, (None, np.nan)) for row in labels]
    return Labels(
        np.array(list(labels)),
        encode_targets(list(labels.values()), decider.utility.classes),
        [design for design, _ in designs],
        np.array([propensity for _, propensity in designs]),
    )


def _design_of(entry: dict[str, Any]) -> tuple[str, float] | None:
    """The design that a label was sent with, and its propensity, NaN of other
    designs.
    """
    if entry.get("propensity") is not None:
        return PROPENSITY, float(entry["propensity"])
    if entry.get("labelled") is not None:
        return str(entry["labelled"]), np.nan
    return None


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
    learned: "FromLabels"

    @property
    def realised(self) -> feedback.Realised | None:
        """What decisions were worth; None without labels that stand for all."""
        return self.learned.realised

    @property
    def options(self) -> list[feedback.Revision]:
        """What other ways to decide would gain, the best first."""
        return self.learned.options

    @property
    def alarms(self) -> dict[str, int | None]:
        """By test, after how many samples it gave an alarm."""
        return self.monitor.alarms | {monitoring.OUTCOMES: self.learned.alarm}

    @property
    def seen(self) -> list[str]:
        """What was tested for a change."""
        names = ["class mix", "scores"]
        if self.reference.rates:
            names.append("unfamiliar input")
        if self.learned.tested:
            names.append("realised outcomes")
        return names

    @property
    def unseen(self) -> str | None:
        """What no test has seen; None where outcomes were tested."""
        return None if self.learned.tested else UNSEEN

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
        if self.learned.alarm is not None:
            lines.append(
                "Outcomes differ from what decisions promise (alarm at sample"
                f" {self.learned.alarm:,}): by their labels, decisions are not worth"
                " what held-out data show."
            )
        if not lines:
            how = "by scores and labels" if self.learned.tested else "without labels"
            lines.append(
                f"No change in what can be seen {how} ({', '.join(self.seen)}), as far"
                f" as {counted(seen, 'sample')} show."
            )
        if self.unseen is not None:
            lines.append(self.unseen)
        if self.log.left_out:
            lines.append(
                f"Left out: {counted(self.log.left_out, 'decision')} of other deciders"
                f" than {self.log.version}. Name the decider with --decider"
                f" LOG/{DECIDERS}/V.json."
            )
        return lines + self._labelled()

    def _labelled(self) -> list[str]:
        found = self.realised
        if self.log.unused:
            return [
                "Labels (`target`) are not used: some samples have none, and the others"
                " may have been chosen by their outcome."
            ]
        if self.learned.refused:
            return [f"Labels are not used: {self.learned.refused}."]
        if found is None:
            return []
        lines = [f"{found.chosen}: {found.words}; {found.promise}."]
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
            for name, when in self.alarms.items()
        }
        tests[monitoring.OUTCOMES]["tested"] = self.learned.tested
        return {
            "verdict": self.verdict,
            "trusted": self.trusted,
            "samples": len(self.log.decisions),
            "left_out": self.log.left_out,
            "decider": self.log.version,
            "per_month": monitor.per_month,
            "tests": tests,
            "seen": self.seen,
            "unseen": self.unseen,
            "reference": self.reference.values(),
            "whole": self.whole.to_dict(),
            "windows": [
                window.to_dict()
                | {"trusted": self.fits(window)}
                | {"outcomes": None if labels is None else asdict(labels)}
                for window, labels in zip(
                    self.windows, self.learned.by_window, strict=True
                )
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
    *,
    decider: str | Path | Decider | None = None,
    window: str | int | None = None,
    per_month: int | None = None,
    logits: bool = False,
    labelled: str | None = None,
) -> Watch:
    """Estimate without labels what decisions are worth, and test for changes.

    Scores tell of a changed class mix, of other scores and of unfamiliar input. They
    cannot tell whether labels still mean the same: that takes labels. Where labels of
    the log were chosen by a stated design, outcomes are tested against what decisions
    promised.

    Parameters
    ----------
    source : path
        The folder of `rfdlc serve --log-decisions`, or predictions of samples in the
        order in which they came.
    reference : path or Predictions
        Held-out predictions with targets: a file, or a run folder.
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
    labelled : str, optional
        How decisions were chosen for labels (`rfdlc.monitoring.designs.Design`), unless
        the labels were sent with it.

    Returns
    -------
    Watch
        With `verdict`, `windows`, `alarms`, `seen`, `unseen` and `to_dict()`;
        `rfdlc.reporting.watch_page.write_page` makes a page of it.
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
    learned = _watch_labels(log, labelled, known, spans, per_month)
    return Watch(log, known, monitor, windows, whole, lengths, learned)


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


@dataclass(frozen=True, eq=False)
class FromLabels:
    """What labels show, or why they are refused."""

    by_window: list[feedback.OutcomeCheck | None]
    realised: feedback.Realised | None = None
    options: list[feedback.Revision] = field(default_factory=list)
    whole: feedback.OutcomeCheck | None = None
    refused: str = ""

    @property
    def tested(self) -> bool:
        """Whether outcomes of any window were tested."""
        return any(each.interval is not None for each in self._each())

    @property
    def alarm(self) -> int | None:
        """After how many samples outcomes differ from what was promised."""
        ends = [each.first + each.decisions for each in self._each() if each.differs]
        return min(ends, default=None)

    def _each(self) -> list[feedback.OutcomeCheck]:
        return [each for each in (*self.by_window, self.whole) if each is not None]


def _watch_labels(
    log: Log,
    labelled: str | None,
    reference: monitoring.Reference,
    spans: list[tuple[int, int]],
    per_month: int,
) -> FromLabels:
    none: list[feedback.OutcomeCheck | None] = [None] * len(spans)
    if log.labels is None:
        return FromLabels(none)
    try:
        sample = _sample(log, labelled)
    except InputError as error:
        return FromLabels(none, refused=str(error))
    decisions, size = log.decisions, sample.decisions

    def tested(first: int, last: int) -> feedback.OutcomeCheck | None:
        if first >= size:
            return None  # labels are still to come
        end = min(last, size)
        return feedback.check_outcomes(
            reference, decisions, sample, first, end, per_month
        )

    from_log = decisions.times is not None
    options = _options(log, sample) if from_log else []
    return FromLabels(
        [tested(first, last) for first, last in spans],
        feedback.realised_by(
            sample, decisions.utility, decisions.actions, decisions.expected
        ),
        options,
        tested(0, size),
    )


def _sample(log: Log, labelled: str | None) -> Sample:
    """The labels of a log that stand for its decisions."""
    assert log.labels is not None
    decisions = log.decisions
    return sampled(
        log.labels,
        decisions.utility,
        decisions.actions,
        decisions.probabilities.max(axis=1),
        decisions.expected,
        labelled,
        decisions.probabilities,
    )


def _options(log: Log, sample: Sample) -> list[feedback.Revision]:
    if len(sample.rows) < feedback.FEWEST:
        return []
    weights = feedback.review_weights(sample.group, sample.rows, sample.propensity)
    decisions = log.decisions[: sample.decisions]
    return feedback.options(
        log.decider, decisions, sample.rows, sample.targets, weights
    )


def recalibrate(
    source: str | Path,
    out: str | Path,
    *,
    kind: str | None = None,
    decider: str | Path | Decider | None = None,
    force: bool = False,
    labelled: str | None = None,
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

    Labels stand for other decisions only if these were chosen without a look at the
    outcome. `labelled` says how, unless labels were sent with it: "random",
    "random:10%", "by-action:review=100%,others=5%", "by-confidence:0.9=20%,1=2%" or
    "propensity" (`rfdlc.monitoring.designs.Design`). No design is needed where every
    decision has a label.

    Raises
    ------
    InputError
        If the folder is not a log, has too few labels, or these do not fit the design.
    """
    fix = "of predictions with labels, `rfdlc fit LABELLED -o DECIDER` makes a decider"
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
        log.labels is not None,
        (
            f"{absent}, or name an earlier decider by --decider"
            if log.left_out
            else absent
        ),
    )
    sample = _sample(log, labelled)
    found = _options(log, sample)
    few = f"{source}: {counted(len(sample.rows), 'label')}"
    expect(found, f"{few}: expected at least {feedback.FEWEST} to learn from")
    chosen = [option for option in found if kind in (None, option.name)]
    expect(chosen, f"kind {kind!r} is unknown: expected prior, calibration or both")
    decisions = log.decisions
    realised = feedback.realised_by(
        sample, decisions.utility, decisions.actions, decisions.expected
    )
    best = next((option for option in chosen if option.pays), chosen[0])
    if not (best.pays or force):
        return best, found, realised
    from rfdlc.formats.files import replacing

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

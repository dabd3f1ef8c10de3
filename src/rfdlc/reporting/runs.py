"""What is reported: labelled predictions of a model and the Decider that turns them
into actions.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np

from rfdlc.data.registry import locate
from rfdlc.decisions.decider import Decider
from rfdlc.decisions.utility import Utility
from rfdlc.errors import InputError, expect, listing
from rfdlc.evaluation.comparison import Comparison, compare_outcomes
from rfdlc.evaluation.evaluate import decider_for
from rfdlc.evaluation.outcomes import Outcomes, observe
from rfdlc.formats.files import parse_json
from rfdlc.probabilities.classes import Classes, Indices, as_classes
from rfdlc.probabilities.predictions import Predictions
from rfdlc.probabilities.scores import Floats, Scores

Source = str | Path | Predictions
MOST_RUNS = 8  # more colours cannot be told apart


@dataclass(frozen=True)
class ReportRun:
    """Labelled predictions of one model, its Decider, and the settings that its folder
    records.
    """

    name: str
    predictions: Predictions
    decider: Decider
    made: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def _labelled(self) -> tuple[Scores, Indices]:
        try:
            return self.decider.model.read_labelled(self.predictions, None)
        except InputError as error:
            raise InputError(f"{self.name}: {error}") from None

    @property
    def scores(self) -> Scores:
        """Checked scores (M, N, C) in the class order of the utility."""
        return self._labelled[0]

    @cached_property
    def outcomes(self) -> Outcomes:
        """The decisions, in the class order of the utility."""
        return observe(*self._labelled, self.decider)

    @property
    def classes(self) -> Classes:
        """The classes in the order of every array of this run."""
        return self.decider.utility.classes

    @cached_property
    def calibrated(self) -> Floats:
        """Combined and calibrated probabilities (N, C), not corrected for the prior."""
        plain = self.decider.replace(target_prior=None, sets=None, budget=None)
        return np.asarray(plain.probabilities(self.predictions))

    @property
    def image_folder(self) -> Path | None:
        """Where the images of the samples are, if the run was trained on image files
        that are still there.
        """
        data = self.made.get("config", {}).get("data", {})
        if self.predictions.ids is None or "source" not in data:
            return None
        place = locate(data["source"], data.get("root"))
        folder = place if place.is_dir() else Path(data.get("root") or place.parent)
        return folder if (folder / self.ids_of([0])[0]).is_file() else None

    def ids_of(self, rows: Any) -> list[str]:
        """Names of samples: their ids, or their positions."""
        return [
            str(name)
            for name in (
                rows if self.predictions.ids is None else self.predictions.ids[rows]
            )
        ]


def as_runs(
    given: Source | Sequence[Source] | Mapping[str, Source],
    utility: Utility | None = None,
    decider: Decider | Sequence[Decider | None] | None = None,
    classes: Classes | Sequence[str] | None = None,
) -> list[ReportRun]:
    """Runs from whatever `report` accepts; a folder has its own decider, unless one is
    given, for all or for each.
    """
    several: Any = given if isinstance(given, Mapping | list | tuple) else [given]
    sources = list(several.values() if isinstance(several, Mapping) else several)
    names = map(str, several) if isinstance(several, Mapping) else run_names(sources)
    known = None if classes is None else as_classes(classes)
    deciders = (
        decider if isinstance(decider, list | tuple) else [decider] * len(sources)
    )
    runs = []
    for name, source, own in zip(names, sources, deciders, strict=True):
        kind = type(source).__name__
        expected = (
            "expected a run folder, a file of predictions, or"
            " Predictions(probabilities=..., targets=...)"
        )
        expect(isinstance(source, Source), f"a {kind} cannot be reported: {expected}")
        path = None if isinstance(source, Predictions) else Path(source)
        expect(
            path is None or path.exists(),
            f"{path}: no such run folder or file of predictions",
        )
        if path is not None:
            source = Predictions.load(path, known)
            own = (
                Decider.load(path)
                if own is None and (path / "decider.json").is_file()
                else own
            )
        elif known is not None:
            source = source.with_classes(known)
        runs.append(
            prepared(name, source, decider_for(own, utility, known, source), path)
        )
    return alike(runs)


def prepared(
    name: str, predictions: Predictions, decider: Decider, source: Path | None
) -> ReportRun:
    """A run with training counts from its predictions or its folder, if its decider has
    none.
    """
    if decider.utility.classes.counts is None:
        if predictions.named and predictions.classes.counts is not None:
            decider = decider.replace(classes=predictions.classes)
        elif source is not None and (source / "classes.json").is_file():
            decider = decider.replace(
                classes=Classes.from_json(source / "classes.json")
            )
    return ReportRun(
        name, predictions, decider, {} if source is None else _recorded(source)
    )


def alike(runs: Sequence[ReportRun]) -> list[ReportRun]:
    """The runs with the classes and the utility of the first, so that their metrics can
    be compared.
    """
    check_number(runs[:1])
    first, utility = runs[0], runs[0].decider.utility
    for run in runs[1:]:
        odd = (
            listing(sorted(set(run.classes.names) ^ set(first.classes.names)))
            or "another order"
        )
        same = run.classes.names == first.classes.names
        expect(
            same,
            f"{run.name}: expected the same classes as in {first.name} (--classes);"
            f" found {odd}",
        )
    return [first] + [
        replace(r, decider=r.decider.replace(utility=utility, classes=first.classes))
        for r in runs[1:]
    ]


def check_number(runs: Sequence[Any]) -> None:
    """Raise if a figure cannot tell so many runs apart."""
    expect(
        0 < len(runs) <= MOST_RUNS,
        f"{len(runs)} runs: expected 1 to {MOST_RUNS} in one report",
    )


def compare(
    a: Source | Sequence[Source],
    b: Source | Sequence[Source],
    utility: Utility | None = None,
    *,
    decider: Decider | tuple[Decider | None, Decider | None] | None = None,
    classes: Classes | Sequence[str] | None = None,
    bootstrap: int = 300,
    seed: int = 0,
) -> Comparison:
    """Compare two models on the same test samples: paired differences of every metric
    with 95% intervals.

    Parameters
    ----------
    a, b : path, Predictions, or list of these
        Run folders, files of predictions or `Predictions`; a list holds seeds of one
        method.
    utility, classes : optional
        As in `report`.
    decider : Decider, or two of them, optional
        As in `report`, or one for each side: both decide for `utility`, or for that of
        the first.
    bootstrap, seed : int
        Number of resamples for your own metrics that are not means, and their seed.

    Returns
    -------
    Comparison

    Examples
    --------
    >>> a = Predictions(
    ...     probabilities=[[0.9, 0.1], [0.3, 0.7], [0.6, 0.4]], targets=[0, 1, 1]
    ... )
    >>> b = Predictions(
    ...     probabilities=[[0.9, 0.1], [0.3, 0.7], [0.4, 0.6]], targets=[0, 1, 1]
    ... )
    >>> round(compare(a, b)["accuracy"].difference, 3)
    0.333
    """
    left, right = (
        list(side) if isinstance(side, list | tuple) else [side] for side in (a, b)
    )
    pair = decider if isinstance(decider, list | tuple) else (decider, decider)
    expect(
        len(pair) == 2,
        f"decider has {len(pair)} entries: expected a Decider, or two, one for each"
        " side",
    )
    runs = as_runs(
        [*left, *right],
        utility,
        [pair[0]] * len(left) + [pair[1]] * len(right),
        classes,
    )
    return compare_runs(runs[: len(left)], runs[len(left) :], bootstrap, seed)


def compare_runs(
    a: Sequence[ReportRun], b: Sequence[ReportRun], bootstrap: int = 300, seed: int = 0
) -> Comparison:
    """Compare runs, whose samples are matched by id where all have ids: those that all
    of them have.
    """
    left, right = ([run.outcomes for run in side] for side in (a, b))
    ids = [run.predictions.ids for run in (*a, *b) if run.predictions.ids is not None]
    if len(ids) == len(a) + len(b) and all(
        len(each) == len(np.unique(each)) for each in ids
    ):
        shared = reduce(np.intersect1d, ids)
        expect(
            len(shared),
            f"{a[0].name} and {b[0].name} have no id in common: expected the same test"
            " samples",
        )
        if max(map(len, ids)) > len(shared):
            counts = " and ".join(
                f"{len(side[0].outcomes):,} of {side[0].name}" for side in (a, b)
            )
            warnings.warn(
                f"only the {len(shared):,} samples in common are compared, of {counts}",
                stacklevel=3,
            )
        places = [np.flatnonzero(np.isin(each, shared)) for each in ids]
        places = [
            place[np.argsort(each[place])]
            for place, each in zip(places, map(np.asarray, ids), strict=True)
        ]
        found = [
            run.outcomes.take(place)
            for run, place in zip((*a, *b), places, strict=True)
        ]
        for run, own in zip((*a, *b), found, strict=True):
            differ = shared[own.targets != found[0].targets]
            told = (
                f"{a[0].name} and {run.name} have other labels for the ids"
                f" {listing(differ, 3)}"
            )
            expect(not len(differ), f"{told}: expected one label for each id")
        left, right = found[: len(a)], found[len(a) :]
    names = side_names(*([run.name for run in side] for side in (a, b)))
    return compare_outcomes(left, right, names, bootstrap, seed)


def side_names(a: Sequence[str], b: Sequence[str]) -> tuple[str, str]:
    """What both sides are called: several runs by what their names begin with, or by
    all of them.

    >>> side_names(["method=ce,seed=0", "method=ce,seed=1"], ["la"])
    ('method=ce (mean of 2 runs)', 'la')
    """
    starts = map(commonprefix, (a, b))
    sides = [
        (s, re.sub(r"[^/\\,_ -]*$", "", start).strip("/\\,_ -"))
        for s, start in zip((a, b), starts, strict=True)
    ]
    told = len({start for _, start in sides}) == 2
    names = (
        side[0] if len(side) == 1 else (told and start) or listing(side)
        for side, start in sides
    )
    first, second = (
        f"{n} (mean of {len(s)} runs)" * (len(s) > 1) or n
        for n, s in zip(names, (a, b), strict=True)
    )
    return first, second


def run_names(sources: Sequence[Source]) -> list[str]:
    """Short names that differ: the last part of the path; the whole path or a number
    where names would be equal.

    >>> run_names(["runs/a", "runs/b/predictions.npz", "old/a"])
    ['runs/a', 'predictions', 'old/a']
    """
    paths = [
        Path(source) if isinstance(source, str | Path) else Path("predictions")
        for source in sources
    ]
    short = [path.name if path.is_dir() else path.stem for path in paths]
    names = [
        str(path) if short.count(name) > 1 else name
        for path, name in zip(paths, short, strict=True)
    ]
    return [
        f"{name} ({i})" if names.count(name) > 1 else name
        for i, name in enumerate(names, 1)
    ]


def _recorded(source: Path) -> dict[str, Any]:
    """The settings, environment and history in a run folder; damaged files are left
    out.
    """
    found: dict[str, Any] = {"source": str(source)}
    for name in ("config", "environment"):
        with suppress(OSError, ValueError):
            found[name] = dict(
                parse_json((source / f"{name}.json").read_text(encoding="utf-8"))
            )
    with suppress(OSError, ValueError):
        rows = np.genfromtxt(
            source / "history.csv", delimiter=",", names=True, encoding="utf-8", ndmin=1
        )
        names = rows.dtype.names or ()
        if "phase" in names:  # the first training: others repeat it
            rows = rows[rows["phase"] == rows["phase"][0]]
        shown = [name for name in names if name != "phase"]
        columns = {
            name: rows[name].tolist() for name in shown if np.isfinite(rows[name]).any()
        }
        found["history"] = {
            n: [v if np.isfinite(v) else None for v in values]
            for n, values in columns.items()
        }
    return found

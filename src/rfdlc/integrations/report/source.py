"""Runs: predictions of one model with the Decider that turns them into actions, from folders, files or memory."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rfdlc.decide.classes import Classes, Indices, as_classes
from rfdlc.decide.decider import Decider
from rfdlc.decide.predictions import Predictions
from rfdlc.decide.scores import Floats, Scores
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError

Source = str | Path | Predictions
MOST_RUNS = 8  # more than that nobody tells apart in a figure


@dataclass(frozen=True)
class Run:
    """One model's predictions of labelled samples, its Decider, and what its folder says of how it was made."""

    name: str
    predictions: Predictions
    decider: Decider
    made: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def _labelled(self) -> tuple[Scores, Indices]:
        try:
            return self.decider.read_labelled(self.predictions, None)
        except InputError as error:
            raise InputError(f"{self.name}: {error}") from None

    @property
    def scores(self) -> Scores:
        """Checked scores (M, N, C) in the class order of the utility."""
        return self._labelled[0]

    @property
    def targets(self) -> Indices:
        """True classes (N,) in the class order of the utility."""
        return self._labelled[1]

    @property
    def classes(self) -> Classes:
        """The classes in the order of every array of this run."""
        return self.decider.utility.classes

    @cached_property
    def calibrated(self) -> Floats:
        """Combined and calibrated probabilities (N, C) before any correction of the prior."""
        return np.asarray(self.decider.replace(target_prior=None).probabilities(self.predictions))

    @cached_property
    def probabilities(self) -> Floats:
        """Combined, calibrated and prior-corrected probabilities (N, C)."""
        if self.decider.target_prior is None:
            return self.calibrated
        return np.asarray(self.decider.probabilities(self.predictions))

    @cached_property
    def actions(self) -> Indices:
        """The action of each sample (N,)."""
        return self.decider.decide(self.predictions)

    @cached_property
    def decided(self) -> Indices:
        """The decided class of each sample (N,), -1 where it was handed over."""
        return np.asarray(self.decider.utility.decided_class[self.actions])

    def ids_of(self, rows: Indices) -> list[str]:
        """Names of samples: their ids, or their positions."""
        ids = self.predictions.ids
        return [str(row) for row in rows] if ids is None else [str(name) for name in ids[rows]]


def as_runs(
    given: Source | Sequence[Source] | Mapping[str, Source],
    utility: Utility | None = None,
    decider: Decider | None = None,
    classes: Classes | Sequence[str] | None = None,
) -> list[Run]:
    """Runs from anything a user may hand over; a folder brings its own decider unless one is given."""
    if isinstance(given, Mapping):
        several = list(given.values())
    else:
        several = list(given) if isinstance(given, list | tuple) else [given]  # type: ignore[list-item]
    for source in several:
        if not isinstance(source, str | Path | Predictions):
            raise InputError(
                f"a {type(source).__name__} cannot be reported: expected a run folder, a file of predictions, or "
                "Predictions(probabilities=..., targets=...)"
            )
    names = map(str, given) if isinstance(given, Mapping) else run_names(several)
    known = None if classes is None else as_classes(classes)
    read = [_read_run(name, source, utility, decider, known) for name, source in zip(names, several, strict=True)]
    return alike(read)


def alike(runs: Sequence[Run]) -> list[Run]:
    """The runs with the classes and the utility of the first, so that their figures can be compared."""
    if not 0 < len(runs) <= MOST_RUNS:
        raise InputError(f"{len(runs)} runs: expected 1 to {MOST_RUNS} in one report")
    first = runs[0].decider.utility
    return [runs[0], *(_with_utility(run, first) for run in runs[1:])]


def run_names(sources: Sequence[Source]) -> list[str]:
    """Short names that differ: the last part of the path, more of it or a number where that is not enough.

    >>> run_names(["runs/a", "runs/b/predictions.npz", "old/a"])
    ['runs/a', 'predictions', 'old/a']
    """
    paths = [None if isinstance(source, Predictions) else Path(source) for source in sources]
    short = ["predictions" if path is None else path.stem if path.suffix else path.name for path in paths]
    names = [
        str(path) if path is not None and short.count(name) > 1 else name
        for path, name in zip(paths, short, strict=True)
    ]
    return [f"{name} ({i})" if names.count(name) > 1 else name for i, name in enumerate(names, 1)]


def folder_notes(source: Path) -> dict[str, Any]:
    """What a run folder says of how it was made; a bare file says where it lies."""
    if not source.is_dir():
        return {"source": str(source)}
    tables = {name: _json_table(source / f"{name}.json") for name in ("config", "environment")}
    found = {"source": str(source), **tables, "history": _history(source / "history.csv")}
    return {name: value for name, value in found.items() if value}


def with_known_classes(name: str, predictions: Predictions, decider: Decider, source: Path | None) -> Decider:
    """The decider with training counts from wherever they are known: the predictions, or the folder's classes."""
    if decider.utility.classes.counts is not None:
        return decider
    if predictions.named and predictions.classes.counts is not None:
        return decider.replace(classes=predictions.classes)
    saved = None if source is None else source / "classes.json"
    if saved is not None and saved.is_file():
        known = Classes.from_json(saved)
        if set(known.names) != set(decider.utility.classes.names):
            raise InputError(f"{name}: {saved} names other classes than the predictions; expected the same")
        return decider.replace(classes=known)
    return decider


def _read_run(
    name: str, source: Source, utility: Utility | None, decider: Decider | None, classes: Classes | None
) -> Run:
    if isinstance(source, Predictions):
        predictions, path = source if classes is None else source.with_classes(classes), None
    else:
        path = Path(source)
        if not path.exists():
            raise InputError(f"{path}: no such run folder or file of predictions")
        predictions = Predictions.load(path, classes)
        if decider is None and path.is_dir() and (path / "decider.json").is_file():
            decider = Decider.load(path / "decider.json")
    if decider is None:
        decider = Decider(utility or Utility.one_hot(predictions.classes))
    elif utility is not None:
        decider = decider.replace(utility=utility)
    if classes is not None:
        decider = decider.replace(classes=classes)
    decider = with_known_classes(name, predictions, decider, path)
    return Run(name, predictions, decider, {} if path is None else folder_notes(path))


def _with_utility(run: Run, utility: Utility) -> Run:
    if set(run.classes.names) != set(utility.classes.names):
        odd = sorted(set(run.classes.names) ^ set(utility.classes.names))[0]
        raise InputError(f"{run.name}: class {odd!r} is not in every run; runs side by side need the same classes")
    if run.classes.names != utility.classes.names:
        raise InputError(f"{run.name}: has its classes in another order than the first run; give classes (--classes)")
    return Run(run.name, run.predictions, run.decider.replace(utility=utility, classes=utility.classes), run.made)


def _json_table(path: Path) -> dict[str, Any]:
    """A JSON object beside the predictions; a damaged one must not keep the report from being written."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return table if isinstance(table, dict) else {}


def _history(path: Path) -> dict[str, list[float | None]]:
    """The columns of numbers of a training history."""
    if not path.is_file():
        return {}
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = {name: [_number(row.get(name)) for row in rows] for name in (rows[0] if rows else ())}
    return {name: values for name, values in columns.items() if any(value is not None for value in values)}


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if np.isfinite(value) else None

"""Grids: which runs a measurement needs, from TOML files. A run is its data, method, settings and seed, and no more.

    seeds = [0, 1, 2]
    calibration = { hold_out = 0.1, seeds = [0] }       # trainings without a tenth of the data, which calibrates
    [data]
    source = "cifar100-lt"                              # and options of `rfdlc.load`
    [[stacks]]                                          # what is trained in one call; the most important first
    runs = [{ method = "ce" }, { method = "rf-dlc-paper", utility = "tail-sensitive-by-rank" }]

Runs train on all training data. Several grids may name the same run: it is trained once.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from rfdlc.data.dataset import Dataset, Split
from rfdlc.data.load import load
from rfdlc.data.longtail import profile_counts, subset
from rfdlc.errors import InputError, choose, listing

TARGETS = ("uniform", "natural")
# Runs train on everything; what calibrates them is held out of runs of its own. Weights of every epoch are not kept.
MEASURED = {"refit": False, "checkpoint_every": 40}
NAMELESS = ("compile", "device", "workers")  # settings that change where and how fast a run is trained, not what it is
DATA_KEYS = ("source", "name", "target", "options", "separated", "largest", "factor", "test")


@dataclass(frozen=True)
class Source:
    """A data set as a grid wants it.

    - `target`: the class prior that decisions are for: `uniform` (CIFAR-LT is tested so), or `natural`, the data's.
    - `separated`: no group (lesion) lies in two splits: training loses those of val and test, val those of test.
    - `largest`, `factor`: thinned to an exponential profile from `largest` samples down to `largest / factor`.
    - `test`: which part is scored, where it is not called so (`val` of iNaturalist).
    """

    source: str
    name: str
    target: str = "uniform"
    options: Mapping[str, Any] = field(default_factory=dict)
    separated: bool = False
    largest: int = 0
    factor: float = 1.0
    test: str = "test"

    def load(self, root: Path) -> Dataset:
        """Read it from `root`; paths in the options are relative to that too."""
        options = dict(self.options)
        if "groups" in options:
            options["groups"] = root / options["groups"]
        data = replace(load(self.source, root=root, **options), name=self.source)
        if self.test == "val":
            data = replace(data, val=None, test=data.val)
        data = without_shared_groups(data) if self.separated else data
        return thinned(data, self.largest, self.factor) if self.largest else data


@dataclass(frozen=True)
class Wanted:
    """One run: its method, the settings that differ from the method's, its seed, and what was held out of it."""

    method: str
    settings: Mapping[str, Any]
    seed: int
    hold_out: float = 0.0

    @property
    def name(self) -> str:
        """Method and settings, such as `rf-dlc-paper+particles=2`: the same for all seeds."""
        named = sorted((key, value) for key, value in self.settings.items() if key not in NAMELESS)
        return "+".join([self.method, *(f"{key}={value}" for key, value in named)])

    @property
    def folder(self) -> str:
        """Where it lies below the folder of its data."""
        return f"{self.name}/{'held-out' if self.hold_out else 'seed'}-{self.seed}"


def run_settings(run: Wanted) -> dict[str, Any]:
    """All settings of a run: its own, and those that every measurement has."""
    return {**MEASURED, "hold_out": run.hold_out, **run.settings, "seed": run.seed}


@dataclass(frozen=True)
class Grid:
    """Data and stacks of runs, in the order in which they are wanted."""

    name: str
    data: Source
    stacks: tuple[tuple[Wanted, ...], ...]


def names() -> list[str]:
    """The grids that come with the package."""
    return sorted(file.name.removesuffix(".toml") for file in (files("rfdlc.evidence") / "grids").iterdir())


def read(name: str, seeds: Sequence[int] | None = None, extra: Mapping[str, Any] | None = None) -> Grid:
    """A grid by its name, or from a TOML file of the user's own.

    `seeds` replaces those of the file; `extra` settings go to every run, and into its name.
    """
    if name.endswith(".toml"):
        try:
            text = Path(name).read_text(encoding="utf-8")
        except OSError as error:
            raise InputError(f"{name}: the grid cannot be read ({error.strerror})") from None
    else:
        choose("grid", name, names())
        text = (files("rfdlc.evidence") / "grids" / f"{name}.toml").read_text(encoding="utf-8")
    try:
        return _grid(Path(name).stem, tomllib.loads(text), seeds, dict(extra or {}))
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise InputError(
            f"grid {name} cannot be read: {error!r}; expected [data] with a source, and [[stacks]]"
        ) from None


def _grid(name: str, table: dict[str, Any], seeds: Sequence[int] | None, extra: dict[str, Any]) -> Grid:
    stacks = []
    for stack in table["stacks"]:
        chosen = seeds or stack.get("seeds", table["seeds"])
        stacks.append(tuple(_stack(stack["runs"], chosen, table.get("calibration"), extra)))
    return Grid(name, _source(table["data"]), tuple(stacks))


def _stack(
    runs: list[dict[str, Any]], seeds: Sequence[int], calibration: dict[str, Any] | None, extra: dict[str, Any]
) -> Iterator[Wanted]:
    for run in runs:
        settings = {key: value for key, value in run.items() if key != "method"} | extra
        yield from (Wanted(run["method"], settings, seed) for seed in seeds)
        if calibration is not None:
            yield from (Wanted(run["method"], settings, seed, calibration["hold_out"]) for seed in calibration["seeds"])


def _source(table: dict[str, Any]) -> Source:
    unknown = [key for key in table if key not in DATA_KEYS]
    if unknown:
        raise InputError(f"[data] {unknown[0]!r} is unknown: expected {listing(DATA_KEYS)}")
    choose("target", table.get("target", TARGETS[0]), TARGETS)
    return Source(**{"name": table["source"], **table})


# -- variants of data -------------------------------------------------------------------------------------------------


def without_shared_groups(data: Dataset) -> Dataset:
    """Training loses the groups of val and test, val those of test; the test part stays as it is."""
    parts = data.splits
    absent = [name for name, part in parts.items() if part.groups is None]
    if absent:
        raise InputError(f"{data.name}: groups of {absent[0]} are not known, so they cannot be separated: give groups")
    later: set[str] = set()
    for name in ("test", "val", "train"):
        if name in parts:
            groups = parts[name].groups
            assert groups is not None
            parts[name] = _kept(parts[name], ~np.isin(groups, sorted(later)))
            later |= set(groups.tolist())
    return replace(Dataset.of(data.name, data.classes.names, parts, data.notes), normalisation=data.normalisation)


def thinned(data: Dataset, largest: int, factor: float) -> Dataset:
    """The training part cut to an exponential profile; an error where it holds too few samples for it."""
    wanted = profile_counts(largest, len(data.classes), factor)[data.classes.rank]
    short = np.flatnonzero(data.classes.count_array < wanted)
    if len(short):
        c = int(short[0])
        told = f"{data.classes.names[c]} has {data.classes.count_array[c]} of {wanted[c]}"
        raise InputError(
            f"{data.name} holds too few training samples for a profile from {largest} down by {factor:g}: {told}; "
            "expected the whole data set"
        )
    parts = data.splits | {"train": data.train.take(subset(data.train.labels, wanted))}
    return replace(Dataset.of(data.name, data.classes.names, parts, data.notes), normalisation=data.normalisation)


def _kept(part: Split, mask: np.ndarray[Any, np.dtype[np.bool_]]) -> Split:
    return part.take(np.flatnonzero(mask))

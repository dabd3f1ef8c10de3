"""Grids: which runs a measurement needs, from TOML files. A run is its data, method, settings and seed, and no more.

    seeds = [0, 1, 2]
    calibration = { hold_out = 0.1, seeds = [0] }       # trainings without a tenth of the data, which calibrates
    [data]
    source = "cifar100-lt"                              # and options of `rfdlc.load`
    [[stacks]]                                          # what is trained in one call; the most important first
    runs = [{ method = "ce" }, { method = "rf-dlc-paper", utility = "tail-sensitive-by-rank" }]

Runs train on all training data. Grids may name the same run several times: it is trained once. Data that are not the
source as it comes (`options`, `separated`, `largest`) need a `name`: results are kept by it.
"""

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from rfdlc.data.dataset import Dataset, Split
from rfdlc.data.load import load
from rfdlc.data.longtail import profile_counts, subset
from rfdlc.errors import InputError, choose, listing

TARGETS = ("uniform", "natural")
TESTS = ("test", "val")
# Runs train on everything; what calibrates them is held out of runs of its own. Weights of every epoch are not kept.
MEASURED = {"refit": False, "checkpoint_every": 40}
NAMELESS = ("compile", "device", "workers")  # settings that change where and how fast a run is trained, not what it is
# What a file may say, and as what; a stack that has no seeds of its own has those of the file.
KEYS: dict[str, dict[str, tuple[type, ...]]] = {
    "grid": {"seeds": (list,), "calibration": (dict,), "data": (dict,), "stacks": (list,)},
    "[data]": {
        "source": (str,), "name": (str,), "target": (str,), "options": (dict,), "separated": (bool,),
        "largest": (int,), "factor": (int, float), "test": (str,),
    },
    "calibration": {"hold_out": (int, float), "seeds": (list,)},
    "[[stacks]]": {"seeds": (list,), "runs": (list,)},
}  # fmt: skip
CALLED = {str: "text", list: "a list", dict: "a table", bool: "true or false", int: "a whole number", float: "a number"}


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

    @property
    def recipe(self) -> dict[str, Any]:
        """What makes the samples what they are, as plain data: all that differs from the source as it comes."""
        parts = ("options", "separated", "largest", "factor", "test")
        usual = {each.name: each.default for each in fields(self)} | {"options": {}}
        changed = {name: getattr(self, name) for name in parts if getattr(self, name) != usual[name]}
        return {"source": self.source, **changed}

    def load(self, root: Path) -> Dataset:
        """Read it from `root`; paths in the options are relative to that too."""
        options = dict(self.options)
        if "groups" in options:
            options["groups"] = root / options["groups"]
        data = replace(load(self.source, root=root, **options), name=self.source)
        if self.test == "val":
            if data.val is None:
                raise InputError(f'{self.source} has no val part that could be scored: leave out test = "val"')
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

    def cut(self, wanted: Callable[[Wanted], bool]) -> "Grid":
        """With these runs alone; a stack that has none of them is gone."""
        stacks = (tuple(filter(wanted, stack)) for stack in self.stacks)
        return replace(self, stacks=tuple(stack for stack in stacks if stack))


def names() -> list[str]:
    """The grids that come with the package."""
    return sorted(file.name.removesuffix(".toml") for file in (files("paper") / "grids").iterdir())


def read(name: str, seeds: Sequence[int] | None = None, extra: Mapping[str, Any] | None = None) -> Grid:
    """A grid by its name, or from a TOML file of the user's own.

    `seeds` replaces those of the file; `extra` settings go to every run, and into its name.
    """
    if name.endswith(".toml"):
        try:
            text = Path(name).read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "this is no text"
            raise InputError(f"{name}: the grid cannot be read ({reason})") from None
    else:
        choose("grid", name, names())
        text = (files("paper") / "grids" / f"{name}.toml").read_text(encoding="utf-8")
    try:
        return _grid(Path(name).stem, tomllib.loads(text), seeds, dict(extra or {}))
    except (tomllib.TOMLDecodeError, InputError) as error:
        raise InputError(f"grid {name}: {error}") from None


def _grid(name: str, given: dict[str, Any], seeds: Sequence[int] | None, extra: dict[str, Any]) -> Grid:
    table = _checked("grid", given, ("data", "stacks"))
    calibration = _calibration(table["calibration"]) if "calibration" in table else ()
    stacks = []
    for each in table["stacks"]:
        stack = _checked("[[stacks]]", each, ("runs",))
        chosen = _seeds(seeds or stack.get("seeds", table.get("seeds", [])))
        runs = [wanted for run in stack["runs"] for wanted in _wanted(run, chosen, calibration, extra)]
        stacks.append(tuple({run.folder: run for run in runs}.values()))
    if not any(stacks):
        raise InputError("it has no runs: expected [[stacks]] with runs = [{ method = ... }]")
    return Grid(name, _source(table["data"]), tuple(stacks))


def _checked(where: str, table: Any, needed: Sequence[str]) -> dict[str, Any]:
    """A table of the file, once its keys and the kinds of their values are known to be right."""
    if not isinstance(table, dict):
        raise InputError(f"{where} is {table!r}: expected a table")
    for key, value in table.items():
        kinds = KEYS[where][choose(f"{where} key", key, KEYS[where])]
        if type(value) not in kinds:  # not isinstance: true is no number
            raise InputError(f"{where} {key} = {value!r} cannot be used: expected {CALLED[kinds[-1]]}")
    for key in needed:
        if key not in table:
            raise InputError(f"{where} has no {key}: expected {listing(KEYS[where])}")
    return table


def _seeds(seeds: Sequence[Any]) -> Sequence[int]:
    if not seeds or any(type(seed) is not int for seed in seeds):
        raise InputError(f"seeds = {list(seeds)} cannot be used: expected whole numbers, such as seeds = [0, 1, 2]")
    return seeds


def _calibration(given: Any) -> list[tuple[float, int]]:
    """What is held out of the trainings that calibrate, and their seeds."""
    table = _checked("calibration", given, ("hold_out", "seeds"))
    if not 0 < table["hold_out"] < 1:
        raise InputError(
            f"calibration hold_out = {table['hold_out']} is no share of the training data: expected 0.1, say"
        )
    return [(table["hold_out"], seed) for seed in _seeds(table["seeds"])]


def _wanted(
    run: Any, seeds: Sequence[int], calibration: Sequence[tuple[float, int]], extra: Mapping[str, Any]
) -> Iterator[Wanted]:
    if not isinstance(run, dict) or type(run.get("method")) is not str:
        raise InputError(f'run {run!r} has no method: expected {{ method = "ce" }}, and settings beside it')
    settings = {key: value for key, value in run.items() if key != "method"} | dict(extra)
    if "seed" in settings:
        raise InputError("a run has no seed of its own: give seeds = [...] to the grid or the stack, or --seeds")
    yield from (Wanted(run["method"], settings, seed) for seed in seeds)
    yield from (Wanted(run["method"], settings, seed, hold_out) for hold_out, seed in calibration)


def _source(given: Any) -> Source:
    table = _checked("[data]", given, ("source",))
    choose("[data] target", table.get("target", TARGETS[0]), TARGETS)
    choose("[data] test", table.get("test", TESTS[0]), TESTS)
    if "factor" in table and "largest" not in table:
        raise InputError(
            f"[data] factor = {table['factor']} needs `largest`, the samples of the most frequent class; for the "
            f"factor of the source write options = {{ factor = {table['factor']} }}"
        )
    if table.get("largest", 1) < 1:
        raise InputError(f"[data] largest = {table['largest']} is no number of samples: expected 1 or more")
    changed = [key for key in ("options", "separated", "largest") if table.get(key)]
    if changed and "name" not in table:
        raise InputError(f"[data] with {changed[0]} needs a name, under which its results are kept: name = ...")
    name = table.get("name", table["source"])
    if not name or set(name) & set("/\\") or name.startswith("."):
        raise InputError(f"[data] name = {name!r} cannot be a folder of results: expected a plain name")
    return Source(**{"name": name, **table})


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

"""Grids: which runs a measurement needs, from TOML files. A run is its data, method,
settings and seed.

    seeds = [0, 1, 2]
    # extra runs without a tenth of the data, which calibrates
    calibration = { hold_out = 0.1, seeds = [0] }
    [data]
    source = "cifar100-lt"  # and options of `rfdlc.load`
    [[stacks]]              # trained in one call; the most important first
    runs = [
      { method = "ce" },
      { method = "rf-dlc-paper", utility = "tail-sensitive-by-rank" },
    ]

Runs train on all training data. A run that several grids name is trained once. A
changed source (`options`, `separated`, `largest`) needs a `name`, under which its
results are kept.
"""

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rfdlc import Dataset, InputError, load
from rfdlc.data.longtail import profile_counts, subset
from rfdlc.errors import choose, suggestion

# Runs train on everything; runs of their own calibrate them on held-out samples. Only
# few checkpoints are kept.
MEASURED = {"refit": False, "checkpoint_every": 40}
NAMELESS = (
    "compile",
    "device",
    "workers",
)  # settings that change where and how fast a run trains, not its result
Seeds = Annotated[list[int], Field(min_length=1)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Source(_Table):
    """A data set as a grid wants it.

    - `target`: the class prior that decisions are for: `uniform` (CIFAR-LT is tested
      so), or `natural`, the data's.
    - `separated`: no group (lesion) lies in two splits: training loses those of val and
      test, val those of test.
    - `largest`, `factor`: thinned to an exponential profile from `largest` samples down
      to `largest / factor`.
    - `test`: the split that is scored (`val` of iNaturalist).
    """

    source: str
    name: str = Field(pattern=r"^[^./\\][^/\\]*$")
    target: Literal["uniform", "natural"] = "uniform"
    options: dict[str, Any] = {}
    separated: bool = False
    largest: int | None = Field(None, ge=1)
    factor: float = 1.0
    test: Literal["test", "val"] = "test"

    @model_validator(mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        if not isinstance(given, dict) or "source" not in given:
            return given
        if "factor" in given and "largest" not in given:
            raise ValueError(
                f"factor = {given['factor']} needs `largest`, the number of samples of"
                " the most frequent class; for the factor of the source write options"
                f" = {{ factor = {given['factor']} }}"
            )
        changed = [key for key in ("options", "separated", "largest") if given.get(key)]
        if changed and "name" not in given:
            raise ValueError(
                f"{changed[0]} needs a name, under which its results are kept: name"
                " = ..."
            )
        return {"name": given["source"], **given}

    @property
    def recipe(self) -> dict[str, Any]:
        """What makes the samples what they are: everything that differs from the
        unchanged source.
        """
        return {
            "source": self.source,
            **self.model_dump(
                exclude_defaults=True, exclude={"source", "name", "target"}
            ),
        }

    def load(self, root: Path) -> Dataset:
        """Read it from `root`; paths in the options are relative to `root` too."""
        options = dict(self.options)
        if "groups" in options:
            options["groups"] = root / options["groups"]
        data = replace(load(self.source, root=root, **options), name=self.source)
        if self.test == "val":
            if data.val is None:
                raise InputError(
                    f'{self.source} has no val split to score: omit test = "val"'
                )
            data = replace(data, val=None, test=data.val)
        data = without_shared_groups(data) if self.separated else data
        return thinned(data, self.largest, self.factor) if self.largest else data


class _Calibration(_Table):
    hold_out: float = Field(gt=0, lt=1)
    seeds: Seeds


class _Stack(_Table):
    runs: list[dict[str, Any]]
    seeds: Seeds | None = None


class _File(_Table):
    data: Source
    stacks: list[_Stack]
    seeds: Seeds | None = None
    calibration: _Calibration | None = None


_KEYS = [
    key for table in (_File, Source, _Calibration, _Stack) for key in table.model_fields
]


@dataclass(frozen=True)
class Wanted:
    """One run: its method, the settings that differ from the method's, its seed, and
    the share held out.
    """

    method: str
    settings: Mapping[str, Any]
    seed: int
    hold_out: float = 0.0

    @property
    def name(self) -> str:
        """Method and settings, such as `rf-dlc-paper+particles=2`: the same for all
        seeds.
        """
        named = sorted(
            (key, value) for key, value in self.settings.items() if key not in NAMELESS
        )
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
    return sorted(
        file.name.removesuffix(".toml") for file in (files("paper") / "grids").iterdir()
    )


def read(
    name: str,
    seeds: Sequence[int] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Grid:
    """A grid by its name, or from a TOML file.

    `seeds` replaces those of the file; `extra` settings are added to every run, and to
    its name.
    """
    if name.endswith(".toml"):
        try:
            text = Path(name).read_text(
                encoding="utf-8-sig"
            )  # some editors write a byte order mark
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{name}: the grid cannot be read ({error})") from None
    else:
        choose("grid", name, names())
        text = (files("paper") / "grids" / f"{name}.toml").read_text(encoding="utf-8")
    try:
        return _grid(
            Path(name).stem, _File(**tomllib.loads(text)), seeds, dict(extra or {})
        )
    except ValidationError as error:
        raise InputError(f"grid {name}: {_problem(error)}") from None
    except (tomllib.TOMLDecodeError, InputError) as error:
        raise InputError(f"grid {name}: {error}") from None


def _problem(error: ValidationError) -> str:
    first = error.errors()[0]
    where, message = (
        ".".join(map(str, first["loc"])),
        first["msg"].removeprefix("Value error, "),
    )
    if first["type"] == "value_error":
        return f"[{where}] {message}"
    hint = (
        suggestion(str(first["loc"][-1]), _KEYS)
        if first["type"] == "extra_forbidden"
        else ""
    )
    return f"{where} = {first['input']!r}: {message}{hint}"


def _grid(
    name: str, file: _File, seeds: Sequence[int] | None, extra: Mapping[str, Any]
) -> Grid:
    stacks = []
    for stack in file.stacks:
        chosen = seeds or stack.seeds or file.seeds
        if not chosen:
            raise InputError(
                "it has no seeds: expected whole numbers, such as seeds = [0, 1, 2]"
            )
        runs = [
            wanted
            for run in stack.runs
            for wanted in _wanted(run, chosen, file.calibration, extra)
        ]
        stacks.append(tuple({run.folder: run for run in runs}.values()))
    if not any(stacks):
        raise InputError(
            "it has no runs: expected [[stacks]] with runs = [{ method = ... }]"
        )
    return Grid(name, file.data, tuple(stacks))


def _wanted(
    run: Mapping[str, Any],
    seeds: Sequence[int],
    calibration: _Calibration | None,
    extra: Mapping[str, Any],
) -> Iterator[Wanted]:
    if not isinstance(run.get("method"), str):
        raise InputError(
            f'run {run!r} has no method: expected {{ method = "ce" }}, and settings'
            " beside it"
        )
    settings = {key: value for key, value in run.items() if key != "method"} | dict(
        extra
    )
    if "seed" in settings:
        raise InputError(
            "a run has no seed of its own: give seeds = [...] to the grid or the stack,"
            " or --seeds"
        )
    yield from (Wanted(run["method"], settings, seed) for seed in seeds)
    if calibration is not None:
        yield from (
            Wanted(run["method"], settings, seed, calibration.hold_out)
            for seed in calibration.seeds
        )


# -- variants of data
# --------------------------------------------------------------------------------------


def without_shared_groups(data: Dataset) -> Dataset:
    """Training loses the groups of val and test, val those of test; the test split
    stays as it is.
    """
    splits = data.splits
    absent = [name for name, split in splits.items() if split.groups is None]
    if absent:
        raise InputError(
            f"{data.name}: groups of {absent[0]} are not known, so they cannot be"
            " separated: give groups"
        )
    later: set[str] = set()
    for name in ("test", "val", "train"):
        if name in splits:
            groups = splits[name].groups
            assert groups is not None
            splits[name] = splits[name].take(
                np.flatnonzero(~np.isin(groups, sorted(later)))
            )
            later |= set(groups.tolist())
    return replace(
        Dataset.of(data.name, data.classes.names, splits, data.notes),
        normalisation=data.normalisation,
    )


def thinned(data: Dataset, largest: int, factor: float) -> Dataset:
    """The training split cut to an exponential profile; an error where it holds too few
    samples for it.
    """
    wanted = profile_counts(largest, len(data.classes), factor)[data.classes.rank]
    short = np.flatnonzero(data.classes.count_array < wanted)
    if len(short):
        c = int(short[0])
        short_of = (
            f"{data.classes.names[c]} has {data.classes.count_array[c]} of {wanted[c]}"
        )
        raise InputError(
            f"{data.name} holds too few training samples for a profile from {largest}"
            f" down by {factor:g}: {short_of}; expected the whole data set"
        )
    splits = data.splits | {"train": data.train.take(subset(data.train.labels, wanted))}
    return replace(
        Dataset.of(data.name, data.classes.names, splits, data.notes),
        normalisation=data.normalisation,
    )

"""Plans of sweeps: what a TOML file asks for, the jobs that train it, and the rows of
their table.
"""

import tomllib
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rfdlc.errors import InputError, expect, listing
from rfdlc.formats.files import as_csv, read_json, replacing
from rfdlc.training.loop import TrainingStopped
from rfdlc.training.run import Run
from rfdlc.training.train import RunSpec, train_many

TABLE, STOPPED = "table.csv", "stopped.json"
OF_DATA = "data."  # in front of options of the data
METRICS_SHOWN = ("accuracy", "nll", "ece")

Row = dict[str, Any]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Plan(_Section):
    """What a file asks for: settings of all runs, and those that differ."""

    data: str
    root: str | None = None
    data_options: dict[str, Any] = {}
    out: str | None = None
    settings: dict[str, Any] = {}
    grid: dict[str, list[Any]] = {}
    runs: list[dict[str, Any]] = Field([{}], min_length=1)

    @classmethod
    def read(cls, path: Path) -> "Plan":
        """The plan in a TOML file; raises an InputError that says what is wrong with
        it.
        """
        try:
            found = cls.model_validate(tomllib.loads(path.read_text("utf-8")))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            problem = f"{first['msg'][0].lower()}{first['msg'][1:]}"
            if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
                known = f"expected one of {listing(cls.model_fields, 20)}"
                problem = (
                    f"is not known here: {known}; settings are under [settings], or as"
                    " lists under [grid]"
                )
            raise InputError(f"{path}: {place}: {problem}") from None
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: cannot be read as TOML ({error})") from None
        for name, values in found.grid.items():
            expect(
                values,
                f"{path}: grid.{name} has no values: expected a list such as [0.05,"
                " 0.1]",
            )
        return found

    def changes(self) -> list[dict[str, Any]]:
        """What is different in each run: every combination of the grid, for each of
        `runs`.
        """
        axes = [
            [(name, value) for value in values] for name, values in self.grid.items()
        ]
        return [
            {**run, **dict(chosen)} for run in self.runs for chosen in product(*axes)
        ]

    def job(
        self, out: Path, changes: Sequence[Mapping[str, Any]], names: Sequence[str]
    ) -> "Job":
        """Runs with the same options of the data."""
        options, specs = dict(self.data_options), list[RunSpec]()
        for own, name in zip(changes, names, strict=True):
            settings = {**self.settings, **own}
            options |= {
                key.removeprefix(OF_DATA): settings.pop(key)
                for key in [*settings]
                if key.startswith(OF_DATA)
            }
            specs.append(
                RunSpec(out / name, str(settings.pop("method", "rf-dlc")), settings)
            )
        return Job(self.data, self.root, options, specs)


class Job(NamedTuple):
    """Runs that one process trains, side by side where they can be."""

    data: str
    root: str | None
    options: Mapping[str, Any]
    specs: Sequence[RunSpec]

    def train(self, networks: int = 24) -> None:
        """Train to the end. A run whose loss is not a number is recorded, and the
        others go on.
        """
        waiting = [
            spec for spec in self.specs if not (Path(spec.out) / STOPPED).exists()
        ]
        while waiting:
            try:
                train_many(
                    self.data,
                    waiting,
                    root=self.root,
                    data_options=self.options,
                    networks=networks,
                )
                return
            except TrainingStopped as error:
                lost = next(spec for spec in waiting if Path(spec.out) == error.path)
                Run(lost.out).write_json(STOPPED, {"reason": str(error)})
                waiting.remove(lost)


def row_of(path: Path, changes: Mapping[str, Any]) -> Row:
    """A run in the table: without metrics where it is not finished."""
    row: Row = {"run": path.name, "state": "waiting", **changes}
    if (path / STOPPED).exists():
        return row | {"state": "diverged"}
    if not (path / "metrics.json").exists():
        return row | (
            {"state": "unfinished"} if (path / "config.json").exists() else {}
        )
    metrics = read_json(path / "metrics.json")
    row["state"] = "finished"
    for part, prefix in (("held_out_balanced", "held_out"), ("test", "test")):
        own = metrics.get(part, {})
        row |= {f"{prefix}_{name}": own[name] for name in METRICS_SHOWN if name in own}
    if "test_tail_sensitive" in metrics:
        row["test_tail_sensitive_utility"] = metrics["test_tail_sensitive"].get(
            "mean_utility"
        )
    return row


def write_rows(path: Path, rows: list[Row]) -> None:
    with replacing(path) as beside:
        beside.write_bytes(as_csv(rows))

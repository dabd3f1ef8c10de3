"""train_many: many trainings on one data set, each in a run folder of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rfdlc.data.dataset import Dataset
from rfdlc.errors import InputError
from rfdlc.learn.fitting import resume, train
from rfdlc.learn.methods import find_method
from rfdlc.learn.model import Model
from rfdlc.learn.settings import Settings


@dataclass(frozen=True)
class Plan:
    """A training that is wanted: its folder, its method, and the settings that differ from the method's."""

    out: str | Path
    method: str = "rf-dlc"
    settings: Mapping[str, Any] = field(default_factory=dict)


def train_many(
    data: Any,
    plans: Sequence[Plan],
    *,
    root: str | Path | None = None,
    data_options: Mapping[str, Any] | None = None,
    networks: int = 24,
) -> list[Model]:
    """Train every plan on the same data; the models in the order of the plans.

    A folder whose run is finished is loaded and not trained again; an unfinished one goes on. `data`, `root` and
    `data_options` are those of `rfdlc.train`.
    """
    _check(plans, networks)
    return [_carried_out(plan, data, root, data_options) for plan in plans]


def _carried_out(plan: Plan, data: Any, root: str | Path | None, options: Mapping[str, Any] | None) -> Model:
    path = Path(plan.out)
    if (path / "metrics.json").exists():  # written last
        return Model.load(path, device=Settings().changed(plan.settings).device)
    if (path / "config.json").exists():
        return resume(path, data if isinstance(data, Dataset) else None)
    return train(data, plan.method, path, root=root, data_options=options, **plan.settings)


def _check(plans: Sequence[Plan], networks: int) -> None:
    if networks < 1:
        raise InputError(f"networks is {networks}: expected 1 or more, the most networks that train as one stack")
    folders = [Path(plan.out).resolve() for plan in plans]
    for plan, folder in zip(plans, folders, strict=True):
        if folders.count(folder) > 1:
            raise InputError(f"{plan.out} is the folder of several plans: expected one folder a plan")
        find_method(plan.method)
        Settings().changed(plan.settings)

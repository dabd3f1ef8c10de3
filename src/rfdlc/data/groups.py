"""Groups (lesion, patient, track) from a CSV file: what must not lie on two sides of a split."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from rfdlc.data.dataset import SPLITS, Dataset, Split, split_name
from rfdlc.errors import InputError, listing
from rfdlc.tables import read_columns

IDS = ("id", "path", "file", "image", "name")
FORMAT = "a CSV with the columns split,index,GROUP (index from 0 in each split) or id,GROUP"


def with_groups(data: Dataset, path: Path) -> Dataset:
    """The data set with every sample's group, from a CSV with the columns `split,index,GROUP` or `id,GROUP`.

    GROUP may have any name, such as lesion. Every sample must have a group; rows for other samples are ignored.
    """
    table = {name: [str(cell) for cell in cells.to_pylist()] for name, cells in read_columns(path).items()}
    columns = {name.lower(): name for name in table}
    key = next((name for name in IDS if name in columns), None)
    keys = {"split", "index"} if {"split", "index"} <= set(columns) else {key}
    rest = [name for name in columns if name not in keys]
    if None in keys or ("group" not in rest and len(rest) != 1):
        raise InputError(f"{path}: has the columns {listing(table)}: expected {FORMAT}")
    values = table[columns["group" if "group" in rest else rest[0]]]
    names = _by_place(path, table, columns) if "index" in keys else table[columns[str(key)]]
    group_of = _unique(path, names, values)
    sample = _place if "index" in keys else _id
    parts = {split: _grouped(path, split, part, group_of, sample) for split, part in data.splits.items()}
    return replace(data, train=parts["train"], val=parts.get("val"), test=parts.get("test"))


def _by_place(path: Path, table: dict[str, list[str]], columns: dict[str, str]) -> list[str]:
    """Keys such as `train/17`."""
    keys = []
    for line, (split, index) in enumerate(zip(table[columns["split"]], table[columns["index"]], strict=True), 2):
        if split_name(split) is None or not index.isdecimal():
            told = f"split {split!r} and index {index!r}"
            raise InputError(f"{path}, line {line}: {told}: expected {', '.join(SPLITS)} and a number from 0 on")
        keys.append(f"{split_name(split)}/{int(index)}")
    return keys


def _unique(path: Path, names: list[str], values: list[str]) -> dict[str, str]:
    group_of: dict[str, str] = {}
    for line, (name, value) in enumerate(zip(names, values, strict=True), 2):
        if not value:
            raise InputError(f"{path}, line {line}: the group of {name} is empty")
        if group_of.setdefault(name, value) != value:
            raise InputError(f"{path}, line {line}: {name} is in two groups, {group_of[name]!r} and {value!r}")
    return group_of


def _place(part: Split, split: str, index: int) -> str:
    return f"{split}/{index}"


def _id(part: Split, split: str, index: int) -> str:
    return "" if part.ids is None else part.ids[index]


def _grouped(
    path: Path, split: str, part: Split, group_of: dict[str, str], sample: Callable[[Split, str, int], str]
) -> Split:
    names = [sample(part, split, index) for index in range(len(part))]
    absent = [name for name in names if name not in group_of]
    if absent:
        told = f"{len(absent)} of {len(names)} {split} samples have no group, the first is {absent[0]!r}"
        raise InputError(f"{path}: {told}: expected {FORMAT}, with a row for every sample")
    return replace(part, groups=np.array([group_of[name] for name in names]))

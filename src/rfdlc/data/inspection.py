"""Inspection: all there is to know about a data set before training on it, as plain data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.dataset import Dataset
from rfdlc.data.leaks import Leaks, find_leaks

EXAMPLES = 5


@dataclass(frozen=True)
class Region:
    """Some classes together: how many, their training samples, and the range of their counts."""

    name: str
    classes: int
    samples: int
    least: int
    most: int


@dataclass(frozen=True)
class Inspection:
    """A data set and what was found in it."""

    data: Dataset
    leaks: Leaks

    @classmethod
    def of(cls, data: Dataset) -> "Inspection":
        """Look at every sample; files that are not in memory are decoded for it."""
        return cls(data, find_leaks(data))

    @property
    def thirds(self) -> list[Region]:
        """Head, med and tail: equal thirds of the classes by rank."""
        return _regions(self.data.classes.count_array, self.data.classes.thirds)

    @property
    def shots(self) -> list[Region]:
        """Many, medium and few: by the number of training samples."""
        return _regions(self.data.classes.count_array, self.data.classes.shots)

    def counts(self, split: str) -> NDArray[np.int64]:
        """Samples of each class in a split."""
        return np.bincount(self.data.splits[split].labels, minlength=len(self.data.classes))

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        data, classes, leaks = self.data, self.data.classes, self.leaks
        counts = {split: self.counts(split).tolist() for split in data.splits}
        groups = leaks.groups_across_splits
        return {
            "name": data.name,
            "kind": data.kind,
            "input_shape": list(data.input_shape),
            "splits": {split: len(part) for split, part in data.splits.items()},
            "imbalance_factor": classes.imbalance_factor,
            "classes": [
                {"name": name, "rank": int(classes.rank[c])} | {split: counts[split][c] for split in counts}
                for c, name in enumerate(classes.names)
            ],
            "thirds": [vars(region) for region in self.thirds],
            "shots": [vars(region) for region in self.shots],
            "repeated_samples": leaks.repeated,
            "samples_in_several_splits": _counted(leaks.across_splits),
            "samples_with_several_labels": _counted(leaks.across_labels),
            "groups_in_several_splits": None if groups is None else _counted(groups),
            "broken": list(leaks.broken),
            "skipped": list(data.skipped),
            "notes": list(data.notes),
        }


def _counted(names: tuple[str, ...]) -> dict[str, Any]:
    return {"count": len(names), "examples": list(names[:EXAMPLES])}


def _regions(counts: NDArray[np.int64], members: Mapping[str, NDArray[np.int64]]) -> list[Region]:
    return [
        Region(name, len(place), int(counts[place].sum()), int(counts[place].min()), int(counts[place].max()))
        for name, place in members.items()
        if len(place)
    ]

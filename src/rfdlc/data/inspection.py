"""Inspection: what there is to know about a data set before training: regions, leaks, and a picture of the tail."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.dataset import Dataset, Split
from rfdlc.data.images import ImageFiles, attempt, decoded, open_image
from rfdlc.decide.classes import Classes
from rfdlc.errors import InputError
from rfdlc.files import replacing
from rfdlc.style import STYLE, brief

Digests = NDArray[np.uint64]
EXAMPLES = 5
COLOURS = {"head": "#1b6ca8", "med": "#6aa84f", "tail": "#d1495b"}
MOST_NAMES = 40  # more class names than this cannot be read on one axis


class Region(NamedTuple):
    """Some classes together: how many, their training samples, and the range of their counts."""

    name: str
    classes: int
    samples: int
    least: int
    most: int


class Leaks(NamedTuple):
    """What a comparison of the decoded content of all samples found; each is named by its first occurrence."""

    repeated: int  # how many different contents occur more than once
    across_splits: tuple[str, ...]  # those in more than one split
    across_labels: tuple[str, ...]  # those with more than one label
    groups_across_splits: tuple[str, ...] | None  # None: groups are not known
    broken: tuple[str, ...]  # files that cannot be decoded, and why


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
        return self._regions(self.data.classes.thirds)

    @property
    def shots(self) -> list[Region]:
        """Many, medium and few: by the number of training samples."""
        return self._regions(self.data.classes.shots)

    def _regions(self, members: Mapping[str, NDArray[np.int64]]) -> list[Region]:
        own = {name: self.data.classes.count_array[place] for name, place in members.items() if len(place)}
        return [Region(name, len(n), int(n.sum()), int(n.min()), int(n.max())) for name, n in own.items()]

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
            "splits": {name: len(split) for name, split in data.splits.items()},
            "imbalance_factor": classes.imbalance_factor,
            "classes": [
                {"name": name, "rank": int(classes.rank[c])} | {split: counts[split][c] for split in counts}
                for c, name in enumerate(classes.names)
            ],
            "thirds": [region._asdict() for region in self.thirds],
            "shots": [region._asdict() for region in self.shots],
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


def find_leaks(data: Dataset) -> Leaks:
    """Compare all samples; files are decoded for it, with a progress bar."""
    found = {name: digest(split) for name, split in data.splits.items()}
    names = [
        f"{name}: {i if split.ids is None else split.ids[i]}"
        for name, split in data.splits.items()
        for i in found[name][0].tolist()
    ]
    splits = np.concatenate([np.full(len(usable), k) for k, (usable, _, _) in enumerate(found.values())])
    labels = np.concatenate([data.splits[name].labels[usable] for name, (usable, _, _) in found.items()])
    contents = np.concatenate([digests for _, digests, _ in found.values()])
    _, first, same, counts = np.unique(contents, return_index=True, return_inverse=True, return_counts=True)
    return Leaks(
        repeated=int((counts > 1).sum()),
        across_splits=tuple(names[first[i]] for i in _with_several(same, splits)),
        across_labels=tuple(names[first[i]] for i in _with_several(same, labels)),
        groups_across_splits=_shared_groups(data),
        broken=tuple(message for _, _, broken in found.values() for message in broken),
    )


def digest(split: Split) -> tuple[NDArray[np.int64], Digests, list[str]]:
    """Positions that can be decoded, a hash of the content of each, and what is wrong with the others."""
    if not isinstance(split.inputs, ImageFiles):
        rows = np.ascontiguousarray(split.inputs)
        return np.arange(len(rows)), np.array([_hash(row) for row in rows], dtype=np.uint64), []
    files = split.inputs
    done, broken = attempt(lambda i: _hash_file(files.path(i), files.channels), range(len(split)), "Comparing images")
    usable = np.array(sorted(done), dtype=np.int64)
    hashes = np.array([done[i] for i in usable.tolist()], dtype=np.uint64)
    return usable, hashes, [str(broken[i]) for i in sorted(broken)]


def _hash(values: NDArray[np.generic]) -> int:
    return int.from_bytes(blake2b(values.tobytes(), digest_size=8).digest(), "little")


def _hash_file(path: Path, channels: int) -> int:
    with open_image(path) as image:
        pixels = np.asarray(decoded(image, channels))
    return _hash(np.concatenate([np.array(pixels.shape, dtype=np.int64).view(np.uint8), pixels.reshape(-1)]))


def _with_several(same: NDArray[np.int64], values: NDArray[np.int64]) -> list[int]:
    """Of the items numbered by `same`, those that come with more than one value."""
    pairs = np.unique(np.stack([same, values]), axis=1)
    items, counts = np.unique(pairs[0], return_counts=True)
    return [int(item) for item in items[counts > 1]]


def _shared_groups(data: Dataset) -> tuple[str, ...] | None:
    seen = [set(split.groups.tolist()) for split in data.splits.values() if split.groups is not None]
    if not seen:
        return None
    groups, counts = np.unique(np.array([group for found in seen for group in found]), return_counts=True)
    return tuple(str(group) for group in groups[counts > 1])


def plot_tail(classes: Classes, path: Path, title: str) -> None:
    """Write a picture of the training samples of each class by rank; the suffix of the path decides the format."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError('a picture of the tail needs matplotlib: pip install "rfdlc[plots]"') from None
    with rc_context({"text.parse_math": STYLE["text.parse_math"]}), replacing(path) as beside:
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        _draw(figure.subplots(), classes, title)
        try:
            figure.savefig(beside, format=path.suffix.lstrip("."), dpi=150)
        except ValueError as error:
            raise InputError(f"{path}: the picture cannot be written ({error})") from None


def _draw(axes: Any, classes: Classes, title: str) -> None:
    """Bars with names for few classes, an area for many, in the colours of the regions."""
    counts, stop = classes.count_array[classes.order], 0
    named = len(counts) <= MOST_NAMES
    for region, members in classes.thirds.items():
        start, stop = stop, stop + len(members)
        own = counts[start:stop]
        style = {"color": COLOURS[region], "label": f"{region}: {len(members):,} classes, {own.sum():,} samples"}
        if named:
            bars = axes.bar(np.arange(start, stop), own, width=0.8, **style)
            axes.bar_label(bars, fmt="{:,.0f}" if len(counts) <= 12 else "", padding=2, fontsize=9)
        else:
            axes.stairs(own, np.arange(start, stop + 1) - 0.5, baseline=0, fill=True, **style)
    least = int(counts[counts > 0].min())
    steep = counts.max() >= 20 * least
    if steep:
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.7 * least)
    axes.set_xlim(-0.6, len(counts) - 0.4)
    if named:
        names = [brief(name) for name in classes.select(classes.order)]
        turned = max(map(len, names)) * len(names) > 90  # else they would touch each other
        axes.set_xticks(range(len(names)), names, rotation=40 if turned else 0, ha="right" if turned else "center")
    else:
        axes.set_xlabel("class, by rank of its training samples")
        axes.xaxis.set_major_formatter("{x:,.0f}")
    samples = f"{counts.sum():,} training samples, imbalance factor {classes.imbalance_factor:,.4g}"
    axes.set_title(f"{title}: {samples}", loc="left")
    axes.set_ylabel("training samples (log scale)" if steep else "training samples")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")

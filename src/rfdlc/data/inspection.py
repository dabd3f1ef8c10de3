"""Inspection: what there is to know about a data set before training: regions, leaks,
and a picture of the tail.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.copies import hashes
from rfdlc.data.dataset import Dataset, Split
from rfdlc.data.images import ImageFiles, attempt, decoded
from rfdlc.data.longtail import subset
from rfdlc.data.table import ColumnCode, TableEncoder
from rfdlc.errors import InputError
from rfdlc.formats.files import replacing
from rfdlc.probabilities.classes import Classes
from rfdlc.style import STYLE, brief

EXAMPLES = 5
COLOURS = {"head": "#1b6ca8", "med": "#6aa84f", "tail": "#d1495b"}
MOST_ROWS, LEAST = (
    5000,
    20,
)  # in which a leak is looked for, as many of each class, and of each if there are many
FEWEST, FEWEST_CODED = (
    50,
    10,
)  # outside of the largest class, lest it be chance; if values are no more than classes
# of a leak, as a share of these rows; the best measurement of the irises, a good one,
# has 6%
ERRORS = 0.005
# of the rows may be of the class that presence tells: it is usual that most people lack
# a test
MOST_TOLD = 0.6
MOST_NAMES = 40  # more class names than this cannot be read on one axis


@dataclass(frozen=True)
class Inspection:
    """A data set, and what a comparison of all samples found; contents are named by
    their first occurrence.
    """

    data: Dataset
    repeated: int  # how many different contents occur more than once
    across_splits: tuple[str, ...]  # those in more than one split
    across_labels: tuple[str, ...]  # those with more than one label
    groups_across_splits: tuple[str, ...] | None  # None: groups are not known
    broken: tuple[str, ...]  # files that cannot be decoded, and why

    @classmethod
    def of(cls, data: Dataset) -> "Inspection":
        found: dict[int, list[tuple[str, int]]] = defaultdict(
            list
        )  # where each content is: split and place
        broken: list[str] = []
        for name, split in data.splits.items():
            contents, wrong = _contents(split)
            broken += wrong
            for place, content in contents.items():
                found[content].append((name, place))
        several = [places for places in found.values() if len(places) > 1]

        def pairs(kind: Callable[[str, int], Any]) -> tuple[str, ...]:
            """The first of each content, and the first that differs from it in this."""
            each = [
                (own[0], next((o for o in own if kind(*o) != kind(*own[0])), None))
                for own in several
            ]
            named = [
                [f"{n}: {data.splits[n].name(i)}" for n, i in pair]
                for a, b in each
                if b and (pair := (a, b))
            ]
            return tuple(map(" and ".join, named))

        splits, labels = (
            pairs(lambda name, place: name),
            pairs(lambda name, place: data.splits[name].labels[place]),
        )
        known = [
            set(split.groups.tolist())
            for split in data.splits.values()
            if split.groups is not None
        ]
        times = Counter(group for groups in known for group in groups)
        shared = (
            tuple(str(group) for group in sorted(times, key=str) if times[group] > 1)
            if known
            else None
        )
        return cls(data, len(several), splits, labels, shared, tuple(broken))

    def regions(self, kind: str) -> list[dict[str, Any]]:
        """thirds: head, med and tail by rank of the classes; shots: many, medium and
        few by training samples.
        """
        members = (
            self.data.classes.thirds if kind == "thirds" else self.data.classes.shots
        )
        own = {
            name: self.data.classes.count_array[place]
            for name, place in members.items()
            if len(place)
        }
        return [
            {
                "name": name,
                "classes": len(n),
                "samples": int(n.sum()),
                "least": int(n.min()),
                "most": int(n.max()),
            }
            for name, n in own.items()
        ]

    def counts(self, split: str) -> NDArray[np.int64]:
        return np.bincount(
            self.data.splits[split].labels, minlength=len(self.data.classes)
        )

    def to_dict(self) -> dict[str, Any]:
        data, classes = self.data, self.data.classes
        counts = {split: self.counts(split).tolist() for split in data.splits}
        each = [
            {"name": name, "rank": int(classes.rank[c])}
            | {split: counts[split][c] for split in counts}
            for c, name in enumerate(classes.names)
        ]
        return {
            "name": data.name,
            "kind": data.kind,
            "input_shape": list(data.input_shape),
            "splits": {name: len(split) for name, split in data.splits.items()},
            "imbalance_factor": classes.imbalance_factor,
            "classes": each,
            "thirds": self.regions("thirds"),
            "shots": self.regions("shots"),
            "repeated_samples": self.repeated,
            "samples_in_several_splits": _counted(self.across_splits),
            "near_copies_in_several_splits": _counted(data.alike),
            "samples_with_several_labels": _counted(self.across_labels),
            "groups_in_several_splits": _counted(self.groups_across_splits),
            "broken": list(self.broken),
            "skipped": list(data.skipped),
            "notes": list(data.notes),
        }


def _counted(names: tuple[str, ...] | None) -> dict[str, Any] | None:
    return (
        None
        if names is None
        else {"count": len(names), "examples": list(names[:EXAMPLES])}
    )


def _contents(split: Split) -> tuple[dict[int, int], list[str]]:
    """A hash of the decoded content of every sample, by its place, and what is wrong
    with those that are missing.
    """
    files = split.inputs
    if not isinstance(files, ImageFiles):
        return dict(enumerate(hashes(files).tolist())), []

    def content(place: int) -> int:
        with files.open(place) as image:
            pixels = np.asarray(decoded(image, files.channels))
        values = np.array(pixels.shape, dtype=np.int64).tobytes() + pixels.tobytes()
        return int.from_bytes(blake2b(values, digest_size=8).digest(), "little")

    done, broken = attempt(content, range(len(files)), "Comparing images")
    return {place: done[place] for place in sorted(done)}, [
        str(broken[place]) for place in sorted(broken)
    ]


def leaking_columns(
    train: Split, encoder: TableEncoder, names: Sequence[str]
) -> dict[str, str]:
    """Columns that alone tell the class of nearly all held-out rows, or by whether they
    are filled; what was found.

    Half of the rows predict the other half, groups and copies as a whole, so that names
    of patients do not help. Errors are compared with those of the largest class alone:
    if 99% of the rows are healthy, a constant is right in 99%.
    """
    counts = np.bincount(train.labels)
    most = int(counts.argmax())
    name = repr(names[most])
    some = train.take(
        subset(train.labels, np.minimum(counts, max(LEAST, MOST_ROWS // len(counts))))
    )
    labels, halves = some.labels, some.hold_out(0.5)
    pairs = [
        (own, held[np.isin(labels[held], labels[own])])
        for own, held in (halves, halves[::-1])
    ]
    asked = np.concatenate([held for _, held in pairs])
    others, found, start = (
        len(asked) - np.bincount(labels[asked]).max(initial=0),
        dict[str, str](),
        0,
    )
    questions = {
        "the class of": labels,
        f"{name} from the other classes in": (labels == most).astype(np.int64),
    }
    for column in encoder.columns if others >= FEWEST_CODED else ():
        place = slice(start, start + len(column.features))
        values, start = _values(column, some.array[:, place]), place.stop
        coded = len(np.unique(values)) <= len(counts)
        if column.flags_missing or column.counts_missing:
            told = _told_by_presence(
                train.array[:, start - 1] > 0, train.labels == most, name, train.groups
            )
            found |= {} if told is None else {column.name: told}
        if column.of_list or (others < FEWEST and not coded):
            continue
        for what, known in (
            questions.items() if coded else [*questions.items()][:1]
        ):  # any iris is a setosa or not
            right = sum(
                int(_predicted(values, known, *pair, column.median is not None).sum())
                for pair in pairs
            )
            if len(asked) - right <= ERRORS * (
                len(asked) - np.bincount(known[asked]).max()
            ):
                found |= {
                    column.name: (
                        f"alone tells {what} {right / len(asked):.1%} of the rows"
                    )
                }
                break
    return found


def _told_by_presence(
    empty: NDArray[np.bool_],
    largest: NDArray[np.bool_],
    name: str,
    groups: NDArray[Any] | None,
) -> str | None:
    """What to say if a column is filled, or empty, in half of the rows of one side, and
    hardly in any of the other.
    """
    sides = [
        (~largest, f"outside of the class {name}"),
        (largest, f"of the class {name}"),
    ]
    for side, where in sides[: 1 + (largest.mean() < MOST_TOLD)]:
        for event, state in ((~empty, "filled"), (empty, "empty")):
            hits, chance = (
                event & side,
                event.sum() * (1 - side.mean()),
            )  # rows of the other side, if by chance
            count = hits.sum() if groups is None else len(np.unique(groups[hits]))
            rare = (
                event.sum() - hits.sum() <= ERRORS * chance
                and min(count, chance) >= LEAST
            )
            if rare and 2 * hits.sum() >= side.sum():
                return (
                    f"is {state} in {hits.sum() / side.sum():.1%} of the rows {where},"
                    " and in hardly any other"
                )
    return None


def _values(column: ColumnCode, features: NDArray[Any]) -> NDArray[np.float64]:
    """One number per row: the number, or the place of the category; missing ones have a
    value of their own.
    """
    if column.median is None:
        return features @ np.arange(
            1.0, features.shape[1] + 1
        )  # one of them is 1, or none
    numbers = features[:, 0].astype(np.float64)
    missing = features[:, -1] > 0 if column.flags_missing else False
    return np.where(missing, numbers.min() - np.ptp(numbers) - 1, numbers)


def _predicted(
    values: NDArray[np.float64],
    labels: NDArray[np.int64],
    seen: NDArray[np.int64],
    held: NDArray[np.int64],
    near: bool,
) -> NDArray[np.bool_]:
    """Whether the most frequent class of seen rows with the same value, or the nearest,
    is that of held-out rows.
    """
    known, place = np.unique(values[seen], return_inverse=True)
    pairs, times = np.unique(
        place * (labels.max() + 1) + labels[seen], return_counts=True
    )
    value, label = np.divmod(pairs, labels.max() + 1)
    likely = label[np.lexsort((times, value))[np.cumsum(np.bincount(value)) - 1]]
    found = np.searchsorted((known[1:] + known[:-1]) / 2, values[held])
    return (likely[found] == labels[held]) & (near | (known[found] == values[held]))


def plot_tail(classes: Classes, path: Path, title: str) -> None:
    """Write a picture of the training samples of each class by rank; the suffix of the
    path decides the format.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(
            'a picture of the tail needs matplotlib: pip install "rfdlc[plots]"'
        ) from None
    with rc_context(STYLE), replacing(path) as beside:
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        _draw(figure.subplots(), classes, title)
        try:
            figure.savefig(beside, format=path.suffix.lstrip("."), dpi=150)
        except ValueError as error:
            raise InputError(
                f"{path}: the picture cannot be written ({error})"
            ) from None


def _draw(axes: Any, classes: Classes, title: str) -> None:
    counts, stop = classes.count_array[classes.order], 0
    named = len(counts) <= MOST_NAMES
    for region, members in classes.thirds.items():
        start, stop = stop, stop + len(members)
        own = counts[start:stop]
        style = {
            "color": COLOURS[region],
            "label": f"{region}: {len(members):,} classes, {own.sum():,} samples",
        }
        if named:
            bars = axes.bar(np.arange(start, stop), own, width=0.8, **style)
            axes.bar_label(
                bars, fmt="{:,.0f}" if len(counts) <= 12 else "", padding=2, fontsize=9
            )
        else:
            axes.stairs(
                own, np.arange(start, stop + 1) - 0.5, baseline=0, fill=True, **style
            )
    least = int(counts[counts > 0].min())
    steep = counts.max() >= 20 * least
    if steep:
        axes.set(yscale="log", ylim=(0.7 * least, None))
    if named:
        names = [brief(name) for name in classes.select(classes.order)]
        turned = (
            max(map(len, names)) * len(names) > 90
        )  # else they would touch each other
        axes.set_xticks(
            range(len(names)),
            names,
            rotation=40 if turned else 0,
            ha="right" if turned else "center",
        )
    else:
        axes.set_xlabel("class, by rank of its training samples")
        axes.xaxis.set_major_formatter("{x:,.0f}")
    samples = (
        f"{counts.sum():,} training samples, imbalance factor"
        f" {classes.imbalance_factor:,.4g}"
    )
    axes.set_title(f"{title}: {samples}", loc="left")
    axes.set(
        xlim=(-0.6, len(counts) - 0.4),
        ylabel=f"training samples{' (log scale)' if steep else ''}",
    )
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(visible=False, axis="x")
    axes.legend(loc="upper right")

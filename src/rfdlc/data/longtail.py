"""Long tails: imbalance profiles, seeded subsets that follow them, and hold-outs by
class and by group.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rfdlc.data.copies import components
from rfdlc.errors import expect
from rfdlc.probabilities.scores import Floats

FEW, STARTS = (
    32,
    20,
    # groups, up to which further subsets are exchanged: this finds the best one nearly
    # always
)
MOST_COUNTED = 1_000_000  # groups x groups x classes, above which none are exchanged
PLENTY = 10  # samples of a class from which on a note says that none is held out
FAR = 1.5  # times as many held-out samples as asked, or as few, that get a note
Indices = NDArray[np.int64]

Profile = Literal["exponential", "step"]


def profile_counts(
    n_max: int, classes: int, factor: float, profile: Profile = "exponential"
) -> Indices:
    """How many samples each class keeps: n_max for the first down to n_max / factor for
    the last.

    exponential: `int(n_max * factor**(-c / (C - 1)))`; step: the first half n_max, the
    rest `int(n_max / factor)`.
    """
    allowed = f"expected 1 (balanced) to {n_max} (one sample in the last class)"
    expect(
        1 <= factor <= n_max, f"imbalance factor {factor} is out of range: {allowed}"
    )
    place = np.arange(classes)
    share = (
        place / (classes - 1)
        if profile == "exponential"
        else (place >= (classes + 1) // 2).astype(float)
    )
    # The small term keeps integers exact: 49 * 49**-1.0 is 0.999... in floating point.
    return np.floor(n_max * float(factor) ** -share + 1e-9).astype(np.int64)


def subset(labels: Indices, counts: Indices, seed: int = 0) -> Indices:
    """Positions, in order, of a seeded random subset with `counts[c]` samples of class
    c; smaller ones are nested.
    """
    kept = [
        _shuffled(np.flatnonzero(labels == c), seed, c)[: counts[c]]
        for c in range(len(counts))
    ]
    return np.sort(np.concatenate(kept))


def hold_out_indices(
    labels: Indices,
    fraction: float,
    seed: int = 0,
    groups: NDArray[Any] | None = None,
    first: Indices | None = None,
) -> tuple[Indices, Indices]:
    """Split positions into (kept, held out): about `fraction` of every class, seeded.

    A class with two samples is on both sides, one with a single sample is kept. With
    `groups` (N,), no group is on both sides, but a class in two or more groups is,
    wherever groups of several classes allow it; few groups are chosen so that shares
    come close to the fraction, mostly whatever the seed. `first` (N,) is the sample of
    which each is a copy, if not its own place: copies are on one side. Without groups,
    how many are held out does not depend on the seed, as long as a class has samples
    without copies: runs of several seeds can train side by side.
    """
    expect(
        0 < fraction < 1,
        f"hold-out fraction {fraction} is out of range: expected 0 < fraction < 1",
    )
    own = np.arange(len(labels))
    first = own if first is None else first
    if groups is not None:
        held = _held_groups(
            labels,
            fraction,
            seed,
            groups if (first == own).all() else joined_groups(groups, first),
        )
    else:
        held, copies = (
            np.zeros(len(labels), dtype=bool),
            np.bincount(first, minlength=len(labels)),
        )
        copies[first[labels != labels[first]]] = (
            0  # those of several classes are never held out
        )
        for c, count in zip(*np.unique(labels, return_counts=True), strict=True):
            members = _shuffled(
                np.flatnonzero((labels == c) & (copies > 0)), seed, int(c)
            )
            free = _share(int(count), fraction)
            for member, size in zip(
                members.tolist(), copies[members].tolist(), strict=True
            ):
                if size <= free:
                    held[member], free = True, free - size
            if (
                len(members) and not held[members].any()
            ):  # none fits: the fewest copies, unless they are the class
                held[members[copies[members].argmin()]] = copies[members].min() < count
        held = held[first]
    return np.flatnonzero(~held), np.flatnonzero(held)


def joined_groups(groups: NDArray[Any], first: Indices) -> Indices:
    """Groups that share copies as one, under the name that comes first."""
    _, start, numbers = np.unique(groups, return_index=True, return_inverse=True)
    together = components(first, np.stack([np.arange(len(first)), start[numbers]], 1))
    least = np.full(len(first), len(first))
    np.minimum.at(least, together, numbers)
    return least[together]


def _share(count: int, fraction: float) -> int:
    """How many of `count` to hold out: at least one and not all where there are two,
    none of a single one.
    """
    return 0 if count < 2 else min(max(1, round(count * fraction)), count - 1)


def _held_groups(
    labels: Indices, fraction: float, seed: int, groups: NDArray[Any]
) -> NDArray[np.bool_]:
    """Which samples (N,) are held out: whole groups, the best of several exchanges
    where these are few enough.
    """
    _, group_of = np.unique(groups, return_inverse=True)
    present, class_of = np.unique(labels, return_inverse=True)
    (classes, members), counts = np.unique(
        np.stack([class_of, group_of]), axis=1, return_counts=True
    )
    side = _first_choice(present, classes, members, counts, fraction, seed)
    if len(side) ** 2 * len(present) <= MOST_COUNTED:
        table = np.zeros((len(side), len(present)))
        table[members, classes] = counts
        off = abs(float((side @ table).sum()) / len(labels) - fraction)
        deviation = partial(_deviation, table, fraction, off)
        drawn = (
            np.random.default_rng(seed).random(
                (STARTS if len(side) <= FEW else 0, len(side))
            )
            < fraction
        )
        found = [_exchanged(table, start, deviation) for start in (side, *drawn)]
        side = min(found, key=lambda each: float(deviation(each @ table)))
    return side[group_of]


def _first_choice(
    present: Indices,
    classes: Indices,
    members: Indices,
    counts: Indices,
    fraction: float,
    seed: int,
) -> NDArray[np.bool_]:
    """Decide group by group (G,), the classes with the fewest groups first, since those
    have the least choice.
    """
    table: dict[int, dict[int, int]] = defaultdict(dict)  # {class: {group: samples}}
    for c, group, count in zip(
        classes.tolist(), members.tolist(), counts.tolist(), strict=True
    ):
        table[c][group] = count
    side: dict[int, bool] = {}  # group -> held out?
    for c in sorted(table, key=lambda c: (len(table[c]), c)):
        sizes = table[c]
        held = sum(size for group, size in sizes.items() if side.get(group, False))
        kept = any(side.get(group) is False for group in sizes)
        wanted = _share(sum(sizes.values()), fraction)
        undecided = [
            int(g)
            for g in _shuffled(np.array(sorted(sizes)), seed, int(present[c]))
            if int(g) not in side
        ]
        if (
            undecided and not kept
        ):  # the largest, so that a single large group is never what is held out
            stays = max(undecided, key=lambda group: sizes[group])
            undecided.remove(stays)
            side[stays] = False
        for group in undecided:
            side[group] = held + sizes[group] <= wanted
            held += sizes[group] * side[group]
        if (
            undecided and not held
        ):  # none is small enough: a class on one side only would be worse
            side[min(undecided, key=lambda group: sizes[group])] = True
    return np.array([side[group] for group in range(len(side))], dtype=bool)


def _deviation(table: Floats, fraction: float, off: float, held: Floats) -> Floats:
    """How far held-out samples by class (..., C) are from what is asked, of samples by
    group and class (G, C).

    It is that of their share of all samples, and of each class on average. More than
    these counts a share that is farther off than `off`, more a class that is not held
    out though it is in several groups, and most one not kept.
    """
    total, several = table.sum(axis=0), (table > 0).sum(axis=0) > 1
    wanted = np.array([_share(int(count), fraction) for count in total])
    size = np.abs(held.sum(axis=-1) / total.sum() - fraction)
    missing = ((held == 0) & several).sum(axis=-1) + (len(total) + 1) * (
        held == total
    ).sum(axis=-1)
    found: Floats = (
        4 * missing
        + 2 * (size > off)
        + size
        + (np.abs(held - wanted) / total).mean(axis=-1)
    )
    return found


def _exchanged(
    table: Floats, side: NDArray[np.bool_], deviation: Callable[[Floats], Floats]
) -> NDArray[np.bool_]:
    """Move one group (G,), or two against each other, as long as the deviation falls:
    always to the lowest.
    """
    side, held = side.copy(), side @ table
    while True:
        moves = np.where(side, -1, 1)[:, None] * table
        inside, outside = np.flatnonzero(side), np.flatnonzero(~side)
        pairs = np.stack(np.meshgrid(inside, outside), -1).reshape(-1, 2)
        tried = np.concatenate([moves, moves[pairs].sum(axis=1)])
        values = deviation(held + tried)
        best = int(values.argmin())
        if values[best] >= deviation(held):
            return side
        side[best if best < len(side) else pairs[best - len(side)]] ^= True
        held = held + tried[best]


def far_from_asked(
    labels: Indices,
    names: Sequence[str],
    groups: NDArray[Any] | None,
    held: Indices,
    fraction: float,
) -> list[str]:
    """Notes on held-out samples that are far more or fewer than asked, or lack a class,
    as they come in groups (N,).
    """
    counts, here = (
        np.bincount(own, minlength=len(names)) for own in (labels, labels[held])
    )
    absent = (
        np.flatnonzero((here == 0) & (counts >= PLENTY)).tolist() if len(held) else []
    )
    found = [
        f"no sample of {names[c]!r} is held out, of {counts[c]}: all belong together,"
        " so scores lack the class"
        for c in absent
    ]
    for note in found:
        warnings.warn(note, stacklevel=4)
    share = fraction if groups is None else len(held) / len(groups)
    if not fraction / FAR <= share <= fraction * FAR:
        reason = (
            "groups stay whole, and a class in two or more of them is kept on both"
            " sides"
        )
        found.append(
            f"{share:.0%} of the samples are held out instead of {100 * fraction:.3g}%:"
            f" {reason}"
        )
    return found


def _shuffled(positions: ArrayLike, seed: int, stream: int) -> Indices:
    return np.random.default_rng([seed, stream]).permutation(
        np.asarray(positions, dtype=np.int64)
    )


def assign_folds(
    labels: Indices,
    folds: int,
    seed: int = 0,
    groups: NDArray[Any] | None = None,
    first: Indices | None = None,
) -> Indices:
    """The fold (N,) in which each sample is held out: stratified, groups and copies as
    a whole; -1 for never.

    Every class of a held-out sample is in the other folds, too: what would leave none
    there is never held out. `first` is the sample of which each is a copy, or itself.

    >>> assign_folds(np.array([0, 0, 0, 0, 1, 1, 2]), 2).tolist()
    [1, 0, 0, 1, 0, 1, -1]
    """
    own = np.arange(len(labels))
    first = own if first is None else first
    if groups is not None:
        from sklearn.model_selection import StratifiedGroupKFold

        together = groups if (first == own).all() else joined_groups(groups, first)
        count = len(np.unique(together))
        joined = (
            ""
            if together is groups
            else f" (of {len(np.unique(groups))}, as copies join groups)"
        )
        expect(
            count >= folds,
            f"{count} groups{joined} cannot be divided into {folds} folds: use fewer"
            " folds",
        )
        found = np.full(len(labels), -1)
        with warnings.catch_warnings(
            action="ignore"
        ):  # classes that have fewer samples than there are folds
            splits = StratifiedGroupKFold(folds, shuffle=True, random_state=seed).split(
                labels, labels, together
            )
            for number, (_, held) in enumerate(splits):
                found[held] = number
    else:
        together, members = first, np.flatnonzero(first == own)
        order = [
            _shuffled(members[labels[members] == c], seed, int(c))
            for c in np.unique(labels)
        ]
        found = np.empty(len(labels), dtype=np.int64)
        found[np.concatenate(order)] = np.arange(len(members)) % folds
        found = found[first]
    alone = [c for c in np.unique(labels) if len(np.unique(found[labels == c])) == 1]
    return np.where(np.isin(together, together[np.isin(labels, alone)]), -1, found)

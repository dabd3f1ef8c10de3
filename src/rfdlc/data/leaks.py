"""Leaks: exact duplicates and groups that lie in more than one split, and one content with two labels."""

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.dataset import Dataset, Split
from rfdlc.data.images import ImageFiles, attempt, decoded, open_image

Digests = NDArray[np.uint64]


@dataclass(frozen=True)
class Leaks:
    """What was found by comparing the decoded content of all samples; each is named by its first occurrence."""

    repeated: int  # how many different contents occur more than once
    across_splits: tuple[str, ...]  # those in more than one split
    across_labels: tuple[str, ...]  # those with more than one label
    groups_across_splits: tuple[str, ...] | None  # None: groups are not known
    broken: tuple[str, ...]  # files that cannot be decoded, and why


def find_leaks(data: Dataset) -> Leaks:
    """Compare all samples; files are decoded for it, with a progress bar."""
    names: list[str] = []
    broken: list[str] = []
    contents: list[Digests] = []
    splits: list[NDArray[np.int64]] = []
    labels: list[NDArray[np.int64]] = []
    for split, part in data.splits.items():
        usable, digests, trouble = digest(part)
        broken += trouble
        names += [f"{split}: {part.ids[i] if part.ids is not None else i}" for i in usable.tolist()]
        contents.append(digests)
        splits.append(np.full(len(usable), len(splits), dtype=np.int64))
        labels.append(part.labels[usable])
    _, first, same, counts = np.unique(
        np.concatenate(contents), return_index=True, return_inverse=True, return_counts=True
    )
    return Leaks(
        repeated=int((counts > 1).sum()),
        across_splits=tuple(names[first[i]] for i in _with_several(same, np.concatenate(splits))),
        across_labels=tuple(names[first[i]] for i in _with_several(same, np.concatenate(labels))),
        groups_across_splits=_shared_groups(data),
        broken=tuple(broken),
    )


def digest(part: Split) -> tuple[NDArray[np.int64], Digests, list[str]]:
    """Positions that can be decoded, a hash of the content of each, and what is wrong with the others."""
    if not isinstance(part.inputs, ImageFiles):
        rows = np.ascontiguousarray(part.inputs)
        return np.arange(len(rows)), np.array([_hash(row) for row in rows], dtype=np.uint64), []
    files = part.inputs
    done, broken = attempt(lambda i: _hash_file(files.path(i), files.channels), range(len(part)), "Comparing images")
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
    """Of the things numbered by `same`, those that come with more than one value."""
    pairs = np.unique(np.stack([same, values]), axis=1)
    things, counts = np.unique(pairs[0], return_counts=True)
    return [int(thing) for thing in things[counts > 1]]


def _shared_groups(data: Dataset) -> tuple[str, ...] | None:
    seen = [set(part.groups.tolist()) for part in data.splits.values() if part.groups is not None]
    if not seen:
        return None
    everywhere = [group for groups in seen for group in groups]
    groups, counts = np.unique(np.array(everywhere), return_counts=True)
    return tuple(str(group) for group in groups[counts > 1])

"""PackedText: many short texts in one buffer, so that a million paths cost little and forked workers share them."""

from array import array
from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray


class PackedText(Sequence[str]):
    """An unchanging sequence of texts, stored as UTF-8 in one array with offsets.

    A list of strings is touched, and so copied page by page, in every forked worker that reads it, because reading
    changes reference counts. Two arrays are not.

    >>> names = PackedText(["cat", "Möwe", ""])
    >>> names[1], len(names), list(names.take([2, 0]))
    ('Möwe', 3, ['', 'cat'])
    """

    def __init__(self, texts: Iterable[str]) -> None:
        packed, ends = bytearray(), array("q")
        for text in texts:  # one by one: a million names from a generator are never a million objects
            packed += text.encode("utf-8", "surrogateescape")
            ends.append(len(packed))
        self._bytes = np.frombuffer(packed, dtype=np.uint8)
        self._ends = np.frombuffer(ends, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> "PackedText": ...
    def __getitem__(self, index: int | slice) -> "str | PackedText":
        if isinstance(index, slice):
            return self.take(range(len(self))[index])
        place = range(len(self))[index]  # raises IndexError, counts from the end
        start = int(self._ends[place - 1]) if place else 0
        return self._bytes[start : int(self._ends[place])].tobytes().decode("utf-8", "surrogateescape")

    def take(self, indices: Iterable[int] | NDArray[np.int64]) -> "PackedText":
        """The texts at these positions, in that order."""
        return PackedText(self[int(i)] for i in indices)

    @property
    def packed(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """All texts as bytes, and where each ends: what a fingerprint is taken of."""
        return self._bytes, self._ends

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

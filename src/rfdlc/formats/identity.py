"""Identity: which model an artefact is of, and what files hold.

A model is its weights, its classes in order and its configuration. One short digest
names it. Deciders, predictions and exported graphs carry that name, and whoever reads
two of them compares.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rfdlc.errors import InputError

DIGITS = 16  # of the names of models
WHOLE = 2**26  # bytes of files of which all are read
PIECE = 2**20  # bytes of a file that are in memory at a time
BLOCK, BLOCKS = 2**12, 2**10  # bytes of a sample of larger files, and their number


def digest_of_table(table: Any) -> str:
    """A digest of what can be written as JSON.

    >>> digest_of_table({"a": 1, "b": 2}) == digest_of_table({"b": 2, "a": 1})
    True
    """
    text = json.dumps(table, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def model_name(weights: str, classes: Sequence[str], configuration: str) -> str:
    """The name of a model, from digests of its weights and its configuration and from
    its classes in order.
    """
    return digest_of_table([weights, list(classes), configuration])[:DIGITS]


def check_same_model(
    first: str, first_model: str, second: str, second_model: str, fix: str
) -> None:
    """Raise where two artefacts are of different models; warn where one does not say of
    which it is.

    `first` and `second` are words for the artefacts; neither is compared where both do
    not say it.
    """
    if first_model == second_model:
        return
    if first_model and second_model:
        raise InputError(
            f"{first} is of model {first_model}, but {second} of model {second_model}:"
            f" {fix}"
        )
    silent, other = (second, first) if first_model else (first, second)
    name = first_model or second_model
    warnings.warn(
        f"{silent} does not say which model it is of: that it is model {name}, as"
        f" {other} is, is taken on trust",
        stacklevel=1,
    )


def digest_of_files(files: Sequence[str | Path], *, times: bool = True) -> str:
    """A digest of what files hold, in their order; names are not part of it.

    Of files of up to 64 MiB together all bytes are read. Of more, the digest is that of
    all sizes and times of change, and of 1,024 blocks of 4 KiB at equal distances over
    all bytes. Without `times`, copies of large files have the same digest, too. A file
    that is missing counts as such.
    """
    states = [_state(file) for file in files]
    sizes = np.array([size for size, _ in states], dtype=np.int64)
    digest = hashlib.blake2b(sizes.tobytes(), digest_size=16)
    ends = np.maximum(sizes, 0).cumsum()
    total = int(ends[-1]) if len(ends) else 0
    if total <= WHOLE:
        for file in files:
            for place in range(0, WHOLE, PIECE):
                piece = _content(file, place, PIECE)
                digest.update(piece)
                if len(piece) < PIECE:
                    break
        return digest.hexdigest()
    if times:
        digest.update(np.array([time for _, time in states], dtype=np.int64).tobytes())
    for place in np.linspace(0, total - BLOCK, BLOCKS).astype(np.int64).tolist():
        number = int(np.searchsorted(ends, place, side="right"))
        start = int(ends[number] - sizes[number])
        digest.update(_content(files[number], place - start, BLOCK))
    return digest.hexdigest()


def _state(file: str | Path) -> tuple[int, int]:
    """Size and time of a file; -1 for one that is missing."""
    try:
        found = os.stat(file)
    except OSError:
        return -1, -1
    return found.st_size, found.st_mtime_ns


def _content(file: str | Path, start: int, count: int) -> bytes:
    """Some bytes of a file; none where it cannot be read, which readers will tell."""
    try:
        with open(file, "rb") as opened:
            opened.seek(start)
            return opened.read(count)
    except OSError:
        return b""

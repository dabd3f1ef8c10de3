"""Labels that come later: their requests, the ids of decisions, and the file that keeps
them.
"""

import hmac
import json
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from rfdlc.errors import InputError
from rfdlc.formats.files import locked, replacing
from rfdlc.monitoring.designs import PROPENSITY, Design
from rfdlc.serving.requests import require

MOST_LABELS = 10_000
LONGEST_DESIGN = 2_000  # characters
KEY = "ids.key"  # in the folder of a log
KEY_BYTES = 32
CODE_BYTES = 8  # of an id: what others would have to guess
EXPECTED = (
    f"expected ids and labels, two lists of the same length, up to {MOST_LABELS:,}, and"
    " optionally labelled (how decisions were chosen for labels) and propensity"
)


class Feedback(BaseModel):
    """Labels that came later, by the ids of answers; `labelled` says how decisions were
    chosen for them, a propensity is the probability with which one was.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    ids: list[str] = Field(min_length=1, max_length=MOST_LABELS)
    labels: list[str] = Field(min_length=1, max_length=MOST_LABELS)
    propensity: list[float] | None = Field(None, max_length=MOST_LABELS)
    labelled: str | None = Field(None, max_length=LONGEST_DESIGN)


@dataclass(frozen=True)
class Ids:
    """Ids of decisions: the name of a process, a number, and a code of both that only
    holders of the key of the log can compute.

    >>> ids = Ids(b"key", "3f2a9c01")
    >>> ids.of(17, 1)
    ['3f2a9c01-17-ef1ad9b515db9f40']
    """

    key: bytes
    process: str

    @classmethod
    def of_log(cls, folder: Path) -> "Ids":
        """Ids of a new process that logs to this folder, whose key all processes
        share.
        """
        path = folder / KEY
        with locked(folder):
            if not path.exists():
                with replacing(path) as beside:
                    place = os.open(beside, os.O_WRONLY | os.O_CREAT, 0o600)
                    with os.fdopen(place, "wb") as file:
                        file.write(secrets.token_bytes(KEY_BYTES))
        key = path.read_bytes()
        if len(key) != KEY_BYTES:
            raise InputError(
                f"{path}: has {len(key)} bytes, expected {KEY_BYTES}: remove it, and"
                " labels of earlier decisions are not taken any more"
            )
        return cls(key, secrets.token_hex(4))

    def of(self, first: int, count: int) -> list[str]:
        """Ids of consecutive decisions of this process."""
        names = [f"{self.process}-{number}" for number in range(first, first + count)]
        return [f"{name}-{self._code(name)}" for name in names]

    def number(self, text: str) -> int | None:
        """The number of a decision of this process, -1 of a decision of another one;
        None where the log gave no such id.
        """
        name, _, code = text.rpartition("-")
        code_bytes = code.encode("utf-8", "replace")
        if not hmac.compare_digest(self._code(name).encode(), code_bytes):
            return None
        process, _, number = name.partition("-")
        return int(number) if process == self.process else -1

    def _code(self, name: str) -> str:
        words = name.encode("utf-8", "replace")
        return blake2b(words, key=self.key, digest_size=CODE_BYTES).hexdigest()


@dataclass(frozen=True)
class ReceivedLabels:
    """The labels of a request, one for each decision of the log that it names."""

    numbers: NDArray[np.int64]  # of decisions of this process; -1 of others
    targets: NDArray[np.int32]
    propensity: NDArray[np.float64]  # NaN where it is not known
    lines: list[bytes]  # what is kept of each
    design: str | None = None  # that chose these decisions
    repeated: int = 0  # that were there twice in the request
    conflicting: int = 0  # other labels of a decision than its first one
    unknown: int = 0  # ids that the log never gave


def read_labels(
    classes: Sequence[str], body: bytes, ids: Ids, actions: Sequence[str]
) -> ReceivedLabels:
    """The labels in the body of a request, checked; designs name these actions."""
    try:
        request = Feedback.model_validate(from_json(body))
    except (ValueError, ValidationError, RecursionError):
        require(False, EXPECTED)
    chances = request.propensity or [np.nan] * len(request.ids)
    require(len(request.ids) == len(request.labels) == len(chances), EXPECTED)
    right = request.propensity is None or all(0 < chance <= 1 for chance in chances)
    require(right, "propensity: expected probabilities above 0, at most 1")
    design = _read_design(request, actions)
    place = {name: i for i, name in enumerate(classes)}
    require(
        all(label in place for label in request.labels),
        "labels: expected names of classes",
    )

    first: dict[str, str] = {}
    numbers, targets, propensity, lines = [], [], [], []
    repeated = conflicting = unknown = 0
    now = time.time()
    for name, label, chance in zip(request.ids, request.labels, chances, strict=True):
        number = ids.number(name)
        if number is None:
            unknown += 1
            continue
        if name in first:
            repeated += label == first[name]
            conflicting += label != first[name]
            continue
        first[name] = label
        entry = {"id": name, "label": label, "time": now}
        if request.propensity is not None:
            entry["propensity"] = chance
        if design is not None:
            entry["labelled"] = design
        numbers.append(number)
        targets.append(place[label])
        propensity.append(chance)
        lines.append(json.dumps(entry).encode() + b"\n")
    return ReceivedLabels(
        np.array(numbers, dtype=np.int64),
        np.array(targets, dtype=np.int32),
        np.array(propensity, dtype=np.float64),
        lines,
        design,
        repeated,
        conflicting,
        unknown,
    )


def _read_design(request: Feedback, actions: Sequence[str]) -> str | None:
    """The stated design as it is written everywhere; a propensity alone states one."""
    if request.labelled is None:
        return None if request.propensity is None else PROPENSITY
    try:
        design = Design.parse(request.labelled)
        design.check_names(actions)
    except InputError as error:
        require(False, str(error))
    require(
        (design.kind == PROPENSITY) == (request.propensity is not None),
        "labelled: propensity needs a propensity of each label, and other designs have"
        " none",
    )
    return str(design)


def append(path: Path, text: bytes) -> None:
    """Add whole lines to a file, or nothing where that fails.

    A line that was torn before, as by a loss of power, is ended first: what is added
    never becomes a part of it.
    """
    path.touch()
    with locked(path), path.open("a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                text = b"\n" + text
        rest = memoryview(text)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(size)
            raise

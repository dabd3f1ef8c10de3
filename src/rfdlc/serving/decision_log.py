"""Logged decisions: Parquet files without payloads, the labels that come later, and a
monitor of both.

Decisions are gathered on the event loop and written by a thread: a request only appends
to a list.
"""

import asyncio
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import Request
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from rfdlc.decisions.decider import Decider
from rfdlc.decisions.rules import UNFAMILIAR
from rfdlc.errors import InputError, expect
from rfdlc.formats.files import replacing
from rfdlc.formats.identity import digest_of_files
from rfdlc.monitoring.designs import PROPENSITY, Design, Labels, sampled
from rfdlc.monitoring.feedback import FEWEST, Realised, decider_version, realised_by
from rfdlc.monitoring.monitor import Decided, Monitor, Reference
from rfdlc.monitoring.watch import DECIDERS, LABELS
from rfdlc.probabilities.predictions import Predictions
from rfdlc.probabilities.scores import CORRECTED, KIND
from rfdlc.serving.backend import MONTH, Answer
from rfdlc.serving.metrics import Metrics
from rfdlc.serving.requests import Refusal, require

LOGGER = logging.getLogger("rfdlc.serve")
GATHERED, ROWS, SECONDS, FILES = (
    512,
    10_000,
    60.0,
    2_000,
)  # answers and rows per step and file; files that are kept
RING = 2**18  # decisions whose labels may still come
WAITING = 20 * ROWS  # rows that wait for a slow disk; more are not logged
MONITORED = (
    1_000,
    1_000_000,
)  # of a file so many samples are tested at least, and so many probabilities at most
LOGGED = ("time", "action", "expected_utility", "reason")
MOST_LABELS, LONGEST, MOST_BYTES = 10_000, 200, 2**21
MOST_DESIGNS = 100  # of labels that one process receives
FEEDBACK = (
    f"expected ids and labels, two lists of the same length, up to {MOST_LABELS:,}, and"
    " optionally labelled (how decisions were chosen for labels) and propensity"
)
UNKNOWN = (
    "realised_utility",
    "interval",
    "promised_utility",
    "utility_gap",
    "utility_gap_interval",
)  # without labels
KEPT = (
    "labels of ids unknown to this process are kept: rfdlc watch and rfdlc recalibrate"
    " match them with the log"
)


class Feedback(BaseModel):
    """Labels that came later, by the ids of answers; `labelled` says how decisions were
    chosen for them, a propensity is the probability with which one was.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    ids: list[str] = Field(min_length=1, max_length=MOST_LABELS)
    labels: list[str] = Field(min_length=1, max_length=MOST_LABELS)
    propensity: list[float] | None = Field(None, max_length=MOST_LABELS)
    labelled: str | None = Field(None, max_length=10 * LONGEST)


FEEDBACK_ROUTE: dict[str, Any] = {
    "responses": {
        status: {"model": Refusal}
        for status in (400, 401, 404, 408, 411, 413, 415, 422)
    },
    "openapi_extra": {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": Feedback.model_json_schema()}},
        }
    },
}


@dataclass(frozen=True)
class _Block:
    """Consecutive decisions of one decider."""

    decider: Decider
    first: int  # their place among all decisions
    p: NDArray[np.float32]  # (n, C)
    index: NDArray[np.int64]  # (n,) of the actions
    columns: dict[str, Any]  # those of LOGGED, one entry per decision


class DecisionLog:
    """The log of one version of a model; used on the event loop, except for what
    `_write` does in its thread.
    """

    def __init__(
        self, folder: Path, held_out: Predictions | None = None, per_month: int = MONTH
    ) -> None:
        (folder / DECIDERS).mkdir(parents=True, exist_ok=True)
        expect(
            os.access(folder, os.W_OK),
            f"--log-decisions {folder}: cannot be written; choose another folder",
        )
        self.folder, self.prefix, self.held_out = folder, secrets.token_hex(4), held_out
        self.monitor: Monitor | None = None
        self.per_month = per_month
        self.dropped = 0
        self._count, self._written, self._queued = 0, time.monotonic(), 0
        self._answers: list[tuple[float, Answer]] = []
        self._blocks: list[_Block] = []
        self._thread = ThreadPoolExecutor(1, "decision-log")
        self._of_version = np.zeros(RING, dtype=np.int32)  # 0: none
        self._action, self._confidence = (
            np.zeros(RING, dtype=np.int32),
            np.zeros(RING, dtype=np.float32),
        )
        self._expected, self._propensity = np.zeros(RING), np.full(RING, np.nan)
        self._label = np.full(RING, -1, dtype=np.int32)
        self._design = np.zeros(RING, dtype=np.int32)  # the place in `_designs`
        self._designs: list[str | None] = [None]
        self._versions: dict[str, int] = {}

    def add(self, answer: Answer) -> list[str]:
        """Log decisions that were made; their ids."""
        size = len(answer.probabilities)
        first, self._count = self._count, self._count + size
        self._answers.append((time.time(), answer))
        if len(self._answers) >= GATHERED:
            self._gather()
        return [f"{self.prefix}-{i}" for i in range(first, first + size)]

    def tend(self) -> None:
        """Write what has waited long enough; called once per second."""
        if time.monotonic() - self._written >= SECONDS:
            self.flush()

    def flush(self) -> "Future[None] | None":
        """Write all that was logged so far."""
        self._gather()
        return self._send()

    def close(self) -> None:
        self.flush()
        self._thread.shutdown()

    async def answer(
        self, request: Request, decider: Decider, metrics: Metrics, seconds: float
    ) -> dict[str, Any]:
        """Keep the labels of a request: what decisions were worth, and what to do."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        require(
            kind == "application/json", "expected content type application/json", 415
        )
        length = request.headers.get("content-length", "0")
        fits = length.isdecimal() and len(length) < 20 and int(length) <= MOST_BYTES
        require(
            fits, f"the body is too large: expected at most {MOST_BYTES:,} bytes", 413
        )
        try:
            async with asyncio.timeout(seconds):
                body = await request.body()
        except (TimeoutError, ClientDisconnect):
            require(False, "the body was not complete: try again", 408)
        found, lines = self.receive(body, decider)
        realised, refused = None, ""
        try:
            realised = self.learn(found, decider)
        except InputError as error:
            refused = f"no estimate from these labels, which are kept: {error}"
        text = "".join(json.dumps(line) + "\n" for line in lines)
        await asyncio.wrap_future(
            self._thread.submit(_append, self.folder / LABELS, text)
        )
        metrics.count_feedback(len(found), realised)
        known = {
            "matched": len(found),
            "unknown": len(lines) - len(found),
            "decider": decider_version(decider),
        }
        values: dict[str, Any] = (
            dict.fromkeys(UNKNOWN) if realised is None else realised.to_dict()
        )
        said = refused or advice(realised, metrics.moved)
        return {
            **known,
            **values,
            "advice": f"{said}; {KEPT}" if known["unknown"] else said,
        }

    def receive(
        self, body: bytes, decider: Decider
    ) -> tuple[list[tuple[int, int, float, int]], list[dict[str, Any]]]:
        """Checked labels: (place, class, propensity, design) of those that are known
        here, and the lines to keep.
        """
        try:
            given = Feedback.model_validate(from_json(body))
        except (ValueError, ValidationError, RecursionError):
            require(False, FEEDBACK)
        chances = given.propensity or [np.nan] * len(given.ids)
        require(len(given.ids) == len(given.labels) == len(chances), FEEDBACK)
        right = given.propensity is None or all(0 < chance <= 1 for chance in chances)
        require(right, "propensity: expected probabilities above 0, at most 1")
        design = self._read_design(given, decider)
        names = {name: i for i, name in enumerate(decider.utility.classes.names)}
        require(
            all(label in names for label in given.labels),
            "labels: expected names of classes",
        )
        found, lines, now = [], [], time.time()
        for name, label, chance in zip(given.ids, given.labels, chances, strict=True):
            prefix, _, number = name[:LONGEST].partition("-")
            if (
                prefix == self.prefix
                and number.isdecimal()
                and 0 <= self._count - 1 - int(number) < RING
            ):
                found.append((int(number), names[label], chance, design))
            lines.append({"id": name[:LONGEST], "label": label, "time": now})
            lines[-1] |= {} if np.isnan(chance) else {"propensity": chance}
            if design:
                lines[-1]["labelled"] = self._designs[design]
        return found, lines

    def _read_design(self, given: Feedback, decider: Decider) -> int:
        """The place of the stated design in `_designs`."""
        stated = given.labelled
        if stated is None and given.propensity is not None:
            stated = PROPENSITY
        if stated is None:
            return 0
        try:
            design = Design.parse(stated)
            design.check_names(decider.utility)
        except InputError as error:
            require(False, str(error))
        require(
            (design.kind == PROPENSITY) == (given.propensity is not None),
            "labelled: propensity needs a propensity of each label, and other designs"
            " have none",
        )
        if str(design) not in self._designs:
            require(
                len(self._designs) <= MOST_DESIGNS,
                f"labelled: expected at most {MOST_DESIGNS} designs",
            )
            self._designs.append(str(design))
        return self._designs.index(str(design))

    def learn(
        self, found: list[tuple[int, int, float, int]], decider: Decider
    ) -> Realised | None:
        """The realised utility of the decisions of this decider, from all labels so
        far.

        Raises
        ------
        InputError
            If labels do not stand for all decisions.
        """
        self._gather()
        for number, label, chance, design in found:
            self._label[number % RING], self._propensity[number % RING] = label, chance
            if design:
                self._design[number % RING] = design
        mine = np.flatnonzero(
            self._of_version == self._versions.get(decider_version(decider), -1)
        )
        mine = mine[np.argsort((mine - self._numbered) % RING)]  # in the order of time
        rows = np.flatnonzero(self._label[mine] >= 0)
        if not len(rows):
            return None
        labels = Labels(
            rows,
            self._label[mine[rows]].astype(np.int64),
            [self._designs[place] for place in self._design[mine[rows]]],
            self._propensity[mine[rows]],
        )
        actions = self._action[mine].astype(np.int64)
        expected = self._expected[mine]
        sample = sampled(
            labels, decider.utility, actions, self._confidence[mine], expected
        )
        return realised_by(sample, decider.utility, actions, expected)

    def _gather(self) -> None:
        """From answers to columns, for many answers at once."""
        answers, self._answers = self._answers, []
        for _, own in groupby(answers, lambda each: id(each[1].decider)):
            self._join(list(own))
        if sum(len(block.p) for block in self._blocks) >= ROWS:
            self._send()

    def _join(self, answers: list[tuple[float, Answer]]) -> None:
        """Answers of one decider."""
        decider = answers[0][1].decider
        p = np.concatenate([answer.probabilities for _, answer in answers]).astype(
            np.float32
        )
        columns: dict[str, Any] = {
            name: [cell for _, answer in answers for cell in answer.columns[name]]
            for name in LOGGED
            if name != "time"
        }
        columns["time"] = np.repeat(
            [when for when, _ in answers],
            [len(answer.probabilities) for _, answer in answers],
        )
        version, place = (
            decider_version(decider),
            {name: i for i, name in enumerate(decider.utility.actions)},
        )
        action = np.array([place[name] for name in columns["action"]], dtype=np.int64)
        first = self._numbered
        self._numbered += len(p)
        spots = np.arange(first, first + len(p)) % RING
        self._of_version[spots] = self._versions.setdefault(
            version, len(self._versions) + 1
        )
        self._action[spots], self._expected[spots] = action, columns["expected_utility"]
        self._confidence[spots] = p.max(axis=1)
        self._label[spots], self._propensity[spots] = -1, np.nan
        self._design[spots] = 0
        self._blocks.append(_Block(decider, first, p, action, columns))

    _numbered = 0  # decisions that have been gathered

    def _send(self) -> "Future[None] | None":
        blocks, self._blocks, self._written = self._blocks, [], time.monotonic()
        size = sum(len(block.p) for block in blocks)
        if not size or self._queued + size > WAITING:
            self.dropped += size
            return None
        self._queued += size

        def write() -> None:
            for _, same in groupby(blocks, lambda block: id(block.decider)):
                own = list(same)
                count = sum(len(block.p) for block in own)
                with _reported("watched", count):
                    with _reported("logged", count) as failed:
                        self._write(own)
                    if failed:
                        self.dropped += count
                    else:
                        self._watch(own)
            self._queued -= size

        return self._thread.submit(write)

    def _write(self, blocks: list[_Block]) -> None:
        """One complete file of one decider."""
        import pyarrow
        from pyarrow.parquet import write_table

        decider, first = blocks[0].decider, blocks[0].first
        version, p = (
            decider_version(decider),
            np.concatenate([block.p for block in blocks]),
        )
        place = self.folder / DECIDERS / f"{version}.json"
        if not place.is_file():
            with replacing(place) as beside:
                decider.save(beside)
        columns: dict[str, Any] = {
            "id": [
                f"{self.prefix}-{block.first + i}"
                for block in blocks
                for i in range(len(block.p))
            ],
            **{
                name: [cell for block in blocks for cell in block.columns[name]]
                for name in LOGGED
            },
            "decider": [version] * len(p),
            KIND: [CORRECTED] * len(p),
        }
        columns |= {
            name: p[:, c] for c, name in enumerate(decider.utility.classes.names)
        }
        prior = decider.model.decided_prior
        known = {
            "rfdlc_decider": version,
            "rfdlc_prior": json.dumps(None if prior is None else prior.tolist()),
        }
        stamp = datetime.now(UTC).strftime(
            "%Y%m%dT%H%M%S.%f"
        )  # the last by name is the last written
        with replacing(
            self.folder / f"decisions-{stamp}-{first:012d}-{self.prefix}.parquet"
        ) as beside:
            write_table(pyarrow.table(columns).replace_schema_metadata(known), beside)
        for old in sorted(self.folder.glob("decisions-*.parquet"))[:-FILES]:
            old.unlink(missing_ok=True)

    def _watch(self, blocks: list[_Block]) -> None:
        if self.held_out is None:
            return
        decider, p = blocks[0].decider, np.concatenate([block.p for block in blocks])
        if self.monitor is None or self._monitored != decider_version(decider):
            self.monitor = Monitor(
                Reference.fit(decider, self.held_out), per_month=self.per_month
            )
            self._monitored = decider_version(decider)
        index = np.concatenate([block.index for block in blocks])
        strange = np.array(
            [cell == UNFAMILIAR for block in blocks for cell in block.columns["reason"]]
        )
        most = max(
            MONITORED[0], MONITORED[1] // p.shape[1]
        )  # spread evenly over a file
        own = np.linspace(0, len(p) - 1, min(len(p), most)).astype(np.int64)
        kept = p[own].astype(np.float64)
        kept /= kept.sum(axis=1, keepdims=True)
        self.monitor.update(Decided(decider.utility, kept, index[own], strange[own]))

    _monitored = ""


@contextmanager
def _reported(what: str, decisions: int) -> Iterator[list[str]]:
    """Log a failure, such as a full disk, which must not stop the server; its name is
    in the list afterwards.
    """
    found: list[str] = []
    try:
        yield found
    except Exception as error:
        found.append(type(error).__name__)
        fields = {"error": found[0], "decisions": decisions}
        LOGGER.error(f"decisions were not {what}", extra={"fields": fields})


def _append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def advice(found: Realised | None, moved: float) -> str:
    """What labels and scores suggest to do; `moved` is the total variation of the class
    prior.
    """
    said = []
    if found is None or found.labelled < FEWEST:
        said.append(f"too few labels to advise: at least {FEWEST} are needed")
    else:
        said.append(
            found.promise
            + (", so recalibration may pay (rfdlc recalibrate)" if found.broken else "")
        )
    if moved > 0.1:
        said.append(
            f"the class prior has moved by {moved:.2f}: a new prior may pay (rfdlc"
            " recalibrate --kind prior)"
        )
    return "; ".join(said)


class DeciderFile:
    """A file whose decider is taken up whenever it changes."""

    def __init__(self, path: Path, take_up: Callable[[Decider], None]) -> None:
        self.path, self._take_up, self._seen = path, take_up, ""
        if (found := self._changed()) is not None:
            take_up(found)

    async def tend(self) -> None:
        """Take up a changed file; one that cannot be used is logged, and the old
        decider stays.
        """
        try:
            if (found := await asyncio.to_thread(self._changed)) is not None:
                self._take_up(found)
                LOGGER.info(
                    "decider", extra={"fields": {"version": decider_version(found)}}
                )
        except InputError as error:
            LOGGER.error("decider refused", extra={"fields": {"error": str(error)}})

    def _changed(self) -> Decider | None:
        with suppress(OSError):
            self.path.stat()  # raises where it is not there
            content = digest_of_files([self.path])
            if content != self._seen:
                self._seen = content
                decider = Decider.load(self.path)
                decider_version(decider)  # computed here, not between requests
                return decider
        return None

"""Logged decisions: Parquet files without payloads, the labels that come later, and a
monitor of both.

Decisions are gathered on the event loop and written by a thread: a request only appends
to a list.
"""

import asyncio
import json
import logging
import os
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
from fastapi import HTTPException
from numpy.typing import NDArray

from rfdlc.decisions.decider import Decider
from rfdlc.decisions.rules import UNFAMILIAR
from rfdlc.errors import InputError, expect
from rfdlc.formats.files import replacing
from rfdlc.formats.identity import digest_of_files
from rfdlc.monitoring import designs
from rfdlc.monitoring.feedback import FEWEST, Realised, decider_version, realised_by
from rfdlc.monitoring.monitor import Decided, Monitor, Reference
from rfdlc.monitoring.watch import DECIDERS, LABELS
from rfdlc.probabilities.predictions import Predictions
from rfdlc.probabilities.scores import CORRECTED, KIND
from rfdlc.serving.backend import MONTH, Answer
from rfdlc.serving.labels import Feedback, Ids, ReceivedLabels, append
from rfdlc.serving.metrics import Metrics
from rfdlc.serving.requests import HEADERS, Refusal, require

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
LOGGED = ("id", "time", "action", "expected_utility", "reason")
# Lines of labels beyond the first one of each decision in the ring: labels of decisions
# of earlier processes, or out of the ring, and designs that are stated again.
MOST_EARLIER = RING
MOST_DESIGNS = 100  # of labels that one process receives
UNKNOWN = (
    "realised_utility",
    "interval",
    "promised_utility",
    "utility_gap",
    "utility_gap_interval",
)  # without labels
EARLIER = (
    "labels of earlier decisions are kept: rfdlc watch and rfdlc recalibrate match them"
    " with the log"
)
NOT_KEPT = (
    "too many labels of earlier decisions, or designs that were stated again, came,"
    f" over {MOST_EARLIER:,}: those after were not kept; restart the server before you"
    " send them again"
)
CONFLICTING = "the first label of a decision counts: conflicting ones were left out"
NOT_WRITTEN = (
    "the labels could not be written to the log, and none of them counts: send them"
    " again when its disk has space"
)

FEEDBACK_ROUTE: dict[str, Any] = {
    "responses": {
        status: {"model": Refusal}
        for status in (400, 401, 404, 408, 411, 413, 415, 422, 429, 503)
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


@dataclass(frozen=True)
class _Ring:
    """A copy of what is known of the last decisions, at their places in the ring."""

    numbered: int  # decisions so far
    mine: NDArray[np.bool_]  # whether the decider is the one that is asked for
    label: NDArray[np.int32]  # -1 is none
    action: NDArray[np.int32]
    confidence: NDArray[np.float32]
    expected: NDArray[np.float64]
    propensity: NDArray[np.float64]  # NaN where none was sent
    design: NDArray[np.int32]  # the place in `designs`
    designs: list[str | None]


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
        self.folder, self.ids, self.held_out = folder, Ids.of_log(folder), held_out
        self.monitor: Monitor | None = None
        self.per_month = per_month
        self.dropped = 0
        self._count, self._written, self._queued = 0, time.monotonic(), 0
        self._answers: list[tuple[float, list[str], Answer]] = []
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
        self._designs: dict[str | None, int] = {None: 0}  # their places
        self._versions: dict[str, int] = {}
        self._writing = asyncio.Lock()  # labels are judged and written one by one
        self._estimating = asyncio.Lock()
        self._received = 0  # requests with labels
        self._estimated = (0, "")  # of them, and the version of the decider
        self._earlier = 0  # lines that count towards MOST_EARLIER
        self._learned: tuple[Realised | None, str] = (None, "")

    def add(self, answer: Answer) -> list[str]:
        """Log decisions that were made; their ids."""
        size = len(answer.probabilities)
        first, self._count = self._count, self._count + size
        ids = self.ids.of(first, size)
        self._answers.append((time.time(), ids, answer))
        if len(self._answers) >= GATHERED:
            self._gather()
        return ids

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
        self, labels: ReceivedLabels, decider: Decider, metrics: Metrics
    ) -> dict[str, Any]:
        """Keep the labels of a request: what decisions were worth, and what to do."""
        async with self._writing:
            self._check_designs(labels.design)
            counts, kept = self._judge(labels)
            if kept.any():
                await self._keep([labels.lines[row] for row in np.flatnonzero(kept)])
            self._take(labels, kept)
            self._earlier += int(kept.sum()) - counts["matched"]
        realised, refused = await self._estimate(decider)
        metrics.count_feedback(counts["matched"], realised)
        values: dict[str, Any] = (
            dict.fromkeys(UNKNOWN) if realised is None else realised.to_dict()
        )
        said = [refused or advice(realised, metrics.moved)]
        if counts["earlier"]:
            said.append(EARLIER)
        if counts["not_kept"]:
            said.append(NOT_KEPT)
        if counts["conflicting"]:
            said.append(CONFLICTING)
        return {
            **counts,
            "decider": decider_version(decider),
            **values,
            "advice": "; ".join(said),
        }

    async def _keep(self, lines: list[bytes]) -> None:
        """Write all lines, or refuse the request."""
        text = b"".join(lines)
        try:
            await asyncio.wrap_future(
                self._thread.submit(append, self.folder / LABELS, text)
            )
        except OSError as error:
            fields = {"error": type(error).__name__, "labels": len(lines)}
            LOGGER.error("labels were not kept", extra={"fields": fields})
            raise HTTPException(503, NOT_WRITTEN, HEADERS[503]) from None

    def _check_designs(self, design: str | None) -> None:
        require(
            design in self._designs or len(self._designs) <= MOST_DESIGNS,
            f"labelled: expected at most {MOST_DESIGNS} different designs until the"
            " server is restarted",
        )

    def _judge(
        self, labels: ReceivedLabels
    ) -> tuple[dict[str, int], NDArray[np.bool_]]:
        """Counts of what the labels of a request are, and which of them are kept.

        The first label of a decision counts, and the last design that was stated for
        it: a label that was there already is kept again where its design is new.
        """
        self._gather()
        here = self._holds(labels.numbers)
        before = np.where(here, self._label[labels.numbers % RING], -1)
        taken = here & (before < 0)
        repeated = here & (before == labels.targets)
        conflicting = here & (before >= 0) & (before != labels.targets)
        restated = repeated & self._states_another_design(labels)
        further = ~here | restated
        not_kept = further & (np.cumsum(further) > MOST_EARLIER - self._earlier)
        counts = {
            "matched": int(taken.sum()),
            "earlier": int((~here & ~not_kept).sum()),
            "repeated": int((repeated & ~not_kept).sum()) + labels.repeated,
            "conflicting": int(conflicting.sum()) + labels.conflicting,
            "unknown": labels.unknown,
            "not_kept": int(not_kept.sum()),
        }
        return counts, taken | (further & ~not_kept)

    def _states_another_design(self, labels: ReceivedLabels) -> NDArray[np.bool_]:
        """Whether a design or propensity differs from what the ring has for its
        decision.
        """
        if labels.design is None:
            return np.zeros(len(labels.numbers), dtype=np.bool_)
        spots = labels.numbers % RING
        differs = self._design[spots] != self._designs.get(labels.design, -1)
        if labels.design == designs.PROPENSITY:
            differs |= self._propensity[spots] != labels.propensity
        return differs

    def _holds(self, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which decisions of this process are still in the ring."""
        return (numbers >= max(0, self._numbered - RING)) & (numbers < self._numbered)

    def _take(self, labels: ReceivedLabels, kept: NDArray[np.bool_]) -> None:
        rows = np.flatnonzero(kept & self._holds(labels.numbers))
        spots = labels.numbers[rows] % RING
        self._label[spots] = labels.targets[rows]
        if labels.design is not None and len(rows):
            place = self._designs.setdefault(labels.design, len(self._designs))
            self._design[spots] = place
            self._propensity[spots] = labels.propensity[rows]
        self._received += 1

    async def _estimate(self, decider: Decider) -> tuple[Realised | None, str]:
        """The realised utility of the decisions of this decider, from all labels so
        far, or why there is none: requests that come during an estimate share the next
        one.
        """
        received = self._received
        async with self._estimating:
            name = decider_version(decider)
            if self._estimated[0] < received or self._estimated[1] != name:
                self._gather()
                used = slice(0, min(self._numbered, RING))
                version = self._versions.get(name, -1)
                ring = _Ring(
                    self._numbered,
                    self._of_version[used] == version,
                    self._label[used].copy(),
                    self._action[used].copy(),
                    self._confidence[used].copy(),
                    self._expected[used].copy(),
                    self._propensity[used].copy(),
                    self._design[used].copy(),
                    list(self._designs),
                )
                received = self._received
                self._learned = await asyncio.to_thread(_learn, decider, ring)
                self._estimated = (received, name)
            return self._learned

    def _gather(self) -> None:
        """From answers to columns, for many answers at once."""
        answers, self._answers = self._answers, []
        for _, own in groupby(answers, lambda each: id(each[2].decider)):
            self._join(list(own))
        if sum(len(block.p) for block in self._blocks) >= ROWS:
            self._send()

    def _join(self, answers: list[tuple[float, list[str], Answer]]) -> None:
        """Answers of one decider."""
        decider = answers[0][2].decider
        p = np.concatenate([answer.probabilities for *_, answer in answers]).astype(
            np.float32
        )
        columns: dict[str, Any] = {
            name: [cell for *_, answer in answers for cell in answer.columns[name]]
            for name in LOGGED
            if name not in ("id", "time")
        }
        columns["id"] = [name for _, ids, _ in answers for name in ids]
        columns["time"] = np.repeat(
            [when for when, *_ in answers],
            [len(answer.probabilities) for *_, answer in answers],
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
            self.folder / f"decisions-{stamp}-{first:012d}-{self.ids.process}.parquet"
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


def _learn(decider: Decider, ring: _Ring) -> tuple[Realised | None, str]:
    """The realised utility of the decisions of a decider, or why labels do not stand
    for them.
    """
    mine = np.flatnonzero(ring.mine)
    mine = mine[np.argsort((mine - ring.numbered) % RING)]  # in the order of time
    rows = np.flatnonzero(ring.label[mine] >= 0)
    if not len(rows):
        return None, ""
    labels = designs.Labels(
        rows,
        ring.label[mine[rows]].astype(np.int64),
        [ring.designs[place] for place in ring.design[mine[rows]]],
        ring.propensity[mine[rows]],
    )
    actions = ring.action[mine].astype(np.int64)
    expected = ring.expected[mine]
    try:
        sample = designs.sampled(
            labels, decider.utility, actions, ring.confidence[mine], expected
        )
    except InputError as error:
        return None, f"no estimate from these labels, which are kept: {error}"
    return realised_by(sample, decider.utility, actions, expected), ""


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

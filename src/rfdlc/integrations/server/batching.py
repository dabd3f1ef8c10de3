"""Batcher: requests that wait while a batch is computed become the next batch. Nobody waits for a batch to fill."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.integrations.server.deciding import Answer

TURNS = (
    3  # of the event loop before a batch is taken: what has arrived already is read first, and none waits by the clock
)


@dataclass(frozen=True)
class Waiting:
    """Samples of one request, and where their answer goes."""

    inputs: NDArray[Any]
    answer: "asyncio.Future[Answer]"


class Batcher:
    """One thread computes; the event loop collects. How much may wait is decided at the door, not here."""

    def __init__(self, compute: Callable[[NDArray[Any]], Answer], largest: int) -> None:
        self.compute, self.largest = compute, largest
        self.waiting: deque[Waiting] = deque()
        self._thread = ThreadPoolExecutor(1, "compute")
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    def start(self) -> None:
        """Needs a running event loop."""
        self._task = asyncio.create_task(self._work())

    async def close(self) -> None:
        """Compute what is waiting, then end."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            await self._task
        self._thread.shutdown()

    async def submit(self, inputs: NDArray[Any]) -> Answer:
        """The model's answer for samples (n, ...). Whoever gives up waiting is left out of the next batch."""
        waiting = Waiting(inputs, asyncio.get_running_loop().create_future())
        self.waiting.append(waiting)
        self._wake.set()
        return await waiting.answer

    async def _work(self) -> None:
        while self.waiting or not self._closing:
            for _ in range(TURNS):
                await asyncio.sleep(0)
            batch = self._next()
            if not batch:
                self._wake.clear()
                if not self._closing:
                    await self._wake.wait()
                continue
            await self._answer(batch)

    async def _answer(self, batch: list[Waiting]) -> None:
        """All together; where that fails, each request alone, so that one cannot spoil the answers of others."""
        joined = np.concatenate([item.inputs for item in batch]) if len(batch) > 1 else batch[0].inputs
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._thread, self.compute, joined)
        except Exception as error:  # a request fails, the server goes on
            if len(batch) > 1:
                for item in batch:
                    await self._answer([item])
            elif not batch[0].answer.done():
                batch[0].answer.set_exception(error)
            return
        start = 0
        for item in batch:
            rows = slice(start, start + len(item.inputs))
            start = rows.stop
            if not item.answer.done():
                item.answer.set_result(answer.part(rows))

    def _next(self) -> list[Waiting]:
        """As many requests as fit; one that is larger than a batch goes alone."""
        batch: list[Waiting] = []
        size = 0
        while self.waiting and (not batch or size + len(self.waiting[0].inputs) <= self.largest):
            item = self.waiting.popleft()
            if not item.answer.done():
                batch.append(item)
                size += len(item.inputs)
        return batch

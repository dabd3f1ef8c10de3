"""Batcher: requests that wait while a batch is computed become the next batch. No request waits for a batch to fill."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.integrations.server.backend import Answer

TURNS = 3  # of the event loop before a batch is formed, so that requests that have arrived are read first


@dataclass(frozen=True, eq=False)
class Waiting:
    """Samples of one request, and the future of their answer."""

    inputs: NDArray[Any]
    answer: "asyncio.Future[Answer]"


class Batcher:
    """One thread computes, the event loop collects. How much may wait is bounded by the middleware."""

    def __init__(self, compute: Callable[[NDArray[Any]], Answer], largest: int) -> None:
        self.compute, self.largest = compute, largest
        self.waiting: deque[Waiting] = deque()
        self._thread = ThreadPoolExecutor(1, "compute")
        self._wake = asyncio.Event()
        self._closing = False
        self._task = asyncio.create_task(self._work())

    async def close(self) -> None:
        """Compute what is waiting, then end."""
        self._closing = True
        self._wake.set()
        await self._task
        self._thread.shutdown()

    async def submit(self, inputs: NDArray[Any]) -> Answer:
        """The answer for samples (n, ...). A request that is cancelled is dropped from the queue."""
        item = Waiting(inputs, asyncio.get_running_loop().create_future())
        self.waiting.append(item)
        self._wake.set()
        try:
            return await item.answer
        except asyncio.CancelledError:
            with suppress(ValueError):  # it may be in the batch that is being computed
                self.waiting.remove(item)
            raise

    async def _work(self) -> None:
        while self.waiting or not self._closing:
            for _ in range(TURNS):
                await asyncio.sleep(0)
            if self.waiting:
                await self._answer(self._next())
            elif not self._closing:
                self._wake.clear()
                await self._wake.wait()

    def _next(self) -> list[Waiting]:
        """As many requests as fit; one that is larger than a batch is computed alone."""
        batch = [self.waiting.popleft()]
        size = len(batch[0].inputs)
        while self.waiting and size + len(self.waiting[0].inputs) <= self.largest:
            batch.append(self.waiting.popleft())
            size += len(batch[-1].inputs)
        return batch

    async def _answer(self, batch: list[Waiting]) -> None:
        """All together; if that fails, one by one, so that one request cannot fail the others."""
        joined = np.concatenate([item.inputs for item in batch]) if len(batch) > 1 else batch[0].inputs
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._thread, self.compute, joined)
        except Exception as error:  # the request fails, the server goes on
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
                item.answer.set_result(answer.rows(rows))

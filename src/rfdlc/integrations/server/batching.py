"""Batcher: requests that wait while a batch is computed become the next batch. No request waits for a batch to fill."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.integrations.server.backend import Answer

TURNS = 3  # of the event loop before a batch is formed, so that requests that have arrived are read first
Batch = dict["asyncio.Future[Answer]", NDArray[Any]]  # the samples of each request by the future of its answer


class Batcher:
    """One thread computes, the event loop collects. How much may wait is bounded by the middleware."""

    def __init__(self, compute: Callable[[NDArray[Any]], Answer], largest: int) -> None:
        self.compute, self.largest = compute, largest
        self.waiting: Batch = {}  # in the order of arrival
        self._thread = ThreadPoolExecutor(1, "compute")
        self._wake, self._closing = asyncio.Event(), False
        self._task = asyncio.create_task(self._work())

    async def close(self) -> None:
        """Compute what is waiting, then end."""
        self._closing = True
        self._wake.set()
        await self._task
        self._thread.shutdown()

    async def submit(self, inputs: NDArray[Any]) -> Answer:
        """The answer for samples (n, ...). A request that is cancelled is dropped from the queue."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.waiting[answer] = inputs
        self._wake.set()
        try:
            return await answer
        finally:
            self.waiting.pop(answer, None)

    async def _work(self) -> None:
        while self.waiting or not self._closing:
            for _ in range(TURNS):
                await asyncio.sleep(0)
            if self.waiting:
                await self._answer(self._next())
            elif not self._closing:
                self._wake.clear()
                await self._wake.wait()

    def _next(self) -> Batch:
        """As many requests as fit; one that is larger than a batch is computed alone."""
        batch: Batch = {}
        size = 0
        for answer, inputs in list(self.waiting.items()):
            size += len(inputs)
            if batch and size > self.largest:
                break
            batch[answer] = self.waiting.pop(answer)
        return batch

    async def _answer(self, batch: Batch) -> None:
        """All together; if that fails, one by one, so that one request cannot fail the others."""
        joined = np.concatenate(list(batch.values()))
        try:
            computed = await asyncio.get_running_loop().run_in_executor(self._thread, self.compute, joined)
        except Exception as error:  # the request fails, the server goes on
            for answer, inputs in batch.items():
                if len(batch) > 1:
                    await self._answer({answer: inputs})
                elif not answer.done():
                    answer.set_exception(error)
            return
        start = 0
        for answer, inputs in batch.items():
            if not answer.done():
                answer.set_result(computed.rows(slice(start, start + len(inputs))))
            start += len(inputs)

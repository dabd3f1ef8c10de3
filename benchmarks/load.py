"""A load generator: keep-alive connections to 127.0.0.1, each with one request at a time, every answer kept."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

LONGEST = 120.0  # seconds that any load may last


@dataclass(frozen=True)
class Reply:
    """Status 0: the connection ended without an answer."""

    index: int  # of the request
    status: int
    body: bytes
    seconds: float


class Connection(asyncio.Protocol):
    """Takes the next request from the common iterator as soon as its last one is answered."""

    def __init__(self, todo: Iterator[tuple[int, bytes]], replies: list[Reply], done: "asyncio.Future[None]") -> None:
        self.todo, self.replies, self.done = todo, replies, done
        self.index, self.began, self.data = -1, 0.0, b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.send()

    def send(self) -> None:
        following = next(self.todo, None)
        if following is None:
            self.index = -1
            self.transport.close()
            return
        self.index, request = following
        self.began, self.data = time.perf_counter(), b""
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, end, body = self.data.partition(b"\r\n\r\n")
        if not end or len(body) < int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0):
            return
        self.replies.append(Reply(self.index, int(head[9:12]), body, time.perf_counter() - self.began))
        if b"connection: close" in head.lower():
            self.index = -1
            self.transport.close()
            return
        self.send()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.index >= 0:
            self.replies.append(Reply(self.index, 0, b"", time.perf_counter() - self.began))
        if not self.done.done():
            self.done.set_result(None)


def _given(connection: Connection) -> Connection:
    return connection


def request(body: bytes, kind: str = "application/json", path: str = "/decide", token: str | None = None) -> bytes:
    """The bytes of a POST."""
    authorised = f"Authorization: Bearer {token}\r\n" if token else ""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\n{authorised}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def load(port: int, requests: Sequence[bytes], concurrency: int) -> tuple[list[Reply], float]:
    """All requests over so many connections: the answers, and the seconds that all took."""

    async def run() -> tuple[list[Reply], float]:
        loop, replies = asyncio.get_running_loop(), list[Reply]()
        todo, ends = iter(enumerate(requests)), [loop.create_future() for _ in range(concurrency)]
        began = time.perf_counter()
        async with asyncio.timeout(LONGEST):
            while True:  # a connection that the server closed is opened again while requests are left
                connections = [Connection(todo, replies, end) for end in ends]
                opened = [loop.create_connection(partial(_given, one), "127.0.0.1", port) for one in connections]
                try:
                    await asyncio.gather(*opened)
                except ConnectionRefusedError:  # the server has ended
                    return replies, time.perf_counter() - began
                await asyncio.gather(*ends)
                if len(replies) >= len(requests) or any(reply.status == 0 for reply in replies):
                    return replies, time.perf_counter() - began
                ends = [loop.create_future() for _ in range(concurrency)]

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


@contextmanager
def server(model: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`rfdlc serve` on a free port of 127.0.0.1, in a process of its own; ended at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "rfdlc", "serve", str(model), "--port", str(port), "--quiet", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        assert process.stderr is not None
        for line in process.stderr:  # ends where the process does
            if json.loads(line)["event"] == "ready":
                break
        yield process, port
    finally:
        process.terminate()
        process.communicate(timeout=30)

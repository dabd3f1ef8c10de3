"""A load generator: keep-alive connections to 127.0.0.1, each with one request at a
time, every answer kept.
"""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
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
    """Takes the next request from the common iterator as soon as its last one is
    answered.
    """

    def __init__(
        self,
        todo: Iterator[tuple[int, bytes]],
        replies: list[Reply],
        done: "asyncio.Future[None]",
    ) -> None:
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
        if not end or len(body) < int(
            head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0
        ):
            return
        self.replies.append(
            Reply(self.index, int(head[9:12]), body, time.perf_counter() - self.began)
        )
        if b"connection: close" in head.lower():
            self.index = -1
            self.transport.close()
            return
        self.send()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.index >= 0:
            self.replies.append(
                Reply(self.index, 0, b"", time.perf_counter() - self.began)
            )
        if not self.done.done():
            self.done.set_result(None)


def _given(connection: Connection) -> Connection:
    return connection


def request(
    body: bytes,
    kind: str = "application/json",
    path: str = "/decide",
    token: str | None = None,
) -> bytes:
    """The bytes of a POST."""
    authorised = f"Authorization: Bearer {token}\r\n" if token else ""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type:"
        f" {kind}\r\n{authorised}"
    )
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def load(
    port: int, requests: Sequence[bytes], concurrency: int
) -> tuple[list[Reply], float]:
    """All requests over so many connections: the answers, and the seconds that all
    took.
    """

    async def run() -> tuple[list[Reply], float]:
        loop, replies = asyncio.get_running_loop(), list[Reply]()
        todo, ends = (
            iter(enumerate(requests)),
            [loop.create_future() for _ in range(concurrency)],
        )
        began = time.perf_counter()
        async with asyncio.timeout(LONGEST):
            while (
                True
                # a connection that the server closed is opened again while requests are
                # left
            ):
                connections = [Connection(todo, replies, end) for end in ends]
                opened = [
                    loop.create_connection(partial(_given, one), "127.0.0.1", port)
                    for one in connections
                ]
                try:
                    await asyncio.gather(*opened)
                except ConnectionRefusedError:  # the server has ended
                    return replies, time.perf_counter() - began
                await asyncio.gather(*ends)
                if len(replies) >= len(requests) or any(
                    reply.status == 0 for reply in replies
                ):
                    return replies, time.perf_counter() - began
                ends = [loop.create_future() for _ in range(concurrency)]

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


@dataclass(frozen=True)
class Wrk:
    """What wrk says of a load."""

    requests: int
    # answers without the expected text, other statuses, and errors of connections
    wrong: int
    seconds: float
    p99: float  # ms


CHECKED = """
wrk.method, wrk.body, wrong = "POST", os.getenv("WRK_BODY"), 0
wrk.headers["Content-Type"] = "application/json"
local expected, threads = os.getenv("WRK_EXPECTED"), {}
function setup(thread) table.insert(threads, thread) end
function response(status, headers, body)
  local found = string.find(body, expected, 1, true)
  if status ~= 200 or not found then wrong = wrong + 1 end
end
function done(summary, latency, requests)
  local bad, e = 0, summary.errors
  for _, thread in ipairs(threads) do bad = bad + thread:get("wrong") end
  bad = bad + e.connect + e.read + e.write + e.timeout
  local seconds, p99 = summary.duration / 1e6, latency:percentile(99) / 1e3
  io.write(string.format("DONE %d %d %f %f", summary.requests, bad, seconds, p99))
end
"""


def by_wrk(
    port: int, body: str, expected: str, connections: int, seconds: int = 8
) -> Wrk | None:
    """One request over and over by wrk, every answer searched for `expected`; nothing
    where wrk is not installed.
    """
    program = shutil.which("wrk")
    if program is None:
        return None
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(CHECKED)
        script.flush()
        words = [program, "-t2", f"-c{connections}", f"-d{seconds}s", "-s", script.name]
        told = subprocess.run(
            [*words, f"http://127.0.0.1:{port}/decide"],
            env={**os.environ, "WRK_BODY": body, "WRK_EXPECTED": expected},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    requests, wrong, took, p99 = told.rpartition("DONE ")[2].split()
    return Wrk(int(requests), int(wrong), float(took), float(p99))


@contextmanager
def server(model: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`rfdlc serve` on a free port of 127.0.0.1, in a process of its own; ended at the
    end.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "rfdlc",
        "serve",
        str(model),
        "--port",
        str(port),
        "--quiet",
        *options,
    ]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:  # ends where the process does
            if json.loads(line)["event"] == "ready":
                break
        yield process, port
    finally:
        process.terminate()
        process.communicate(timeout=30)

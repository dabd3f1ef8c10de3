"""Honest and hostile clients of one server: how long honest requests wait, alone and
beside each kind of attack.

Honest clients are in one process and hostile ones in another, so that neither waits for
the other. Before the mixed load each kind of attack is sent alone for a few seconds,
and the waits of honest requests beside it are printed.
"""

import asyncio
import json
import logging
import multiprocessing
import os
import random
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from load import request, server
from malformed import malformed
from serve import resident

TOKEN = "0123456789abcdef-hostile"
HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
FEEDBACK = 2**21  # bytes, the largest body of labels
ENDLESS = 2.0  # seconds that one endless attack lasts
CONNECTIONS, PAUSE = 8, 0.02  # of honest clients, seconds between the requests of each
HOSTILE, HOSTILE_PAUSE = 16, 0.05
QUIET, ALONE = 20.0, 6.0  # seconds, for the reference and for each kind of attack
WARM = 5.0  # seconds, before anything is measured
MOST_RATIO = 3  # of the 99th percentile to that of the quiet server
MOST_GROWTH = 1.3  # of the memory to that of the quiet server
REPEATED = 1  # times that each kind of attack is sent alone
Row = dict[str, Any]
Attack = Callable[[int], Coroutine[Any, Any, None]]  # of a port
Waits = tuple[
    Counter[int], list[float]
]  # statuses, and sorted seconds of requests that were answered


async def ask(port: int, content: bytes) -> tuple[int, float]:
    """Status and seconds of one request on a connection of its own; 0 where there is no
    answer.
    """
    began = time.perf_counter()
    try:
        async with asyncio.timeout(30):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(content)
            await writer.drain()
            status = int((await reader.readuntil(b"\r\n"))[9:12])
            await reader.readuntil(b"\r\n\r\n")
            writer.close()
            return status, time.perf_counter() - began
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
        return 0, time.perf_counter() - began


def honest(port: int, seconds: float, pipe: Any) -> None:
    """Send the waits of honest clients."""
    sample = json.dumps({"arrays": np.zeros((1, 1, 8, 8), int).tolist()}).encode()
    found: list[tuple[int, float]] = []

    async def client() -> None:
        while time.monotonic() < until:
            found.append(await ask(port, request(sample, token=TOKEN)))
            await asyncio.sleep(PAUSE)

    async def run() -> None:
        await asyncio.gather(*(client() for _ in range(CONNECTIONS)))

    until = time.monotonic() + seconds
    asyncio.run(run())
    pipe.send(
        (
            Counter(status for status, _ in found),
            sorted(took for status, took in found if status == 200),
        )
    )


async def send(
    content: bytes, port: int, then: bytes = b"", reads: bool = True, hold: float = 0.0
) -> None:
    """What a hostile client does with one connection: `then` is sent twice per second
    while it is held.
    """
    try:
        async with asyncio.timeout(15):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(content)
            for _ in range(int(hold / 0.5)):
                await asyncio.sleep(0.5)
                writer.write(then)
            if reads:
                await reader.read(4096)
            writer.transport.abort()
    except (OSError, TimeoutError):
        pass


async def endless(content: bytes, port: int) -> None:
    """Send requests without end on one connection, and read the answers; connect again
    whenever it is closed.
    """

    async def read(reader: asyncio.StreamReader) -> None:
        while await reader.read(65536):
            pass

    async def write(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(content)
            await writer.drain()

    with suppress(TimeoutError):
        async with asyncio.timeout(ENDLESS):
            while True:
                with suppress(OSError):
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                    reading = asyncio.create_task(read(reader))
                    writing = asyncio.create_task(write(writer))
                    both = reading, writing
                    try:
                        await asyncio.wait(both, return_when="FIRST_COMPLETED")
                    finally:
                        for task in both:
                            task.cancel()
                        await asyncio.gather(*both, return_exceptions=True)
                        writer.transport.abort()


async def in_turns(content: bytes, count: int, port: int) -> None:
    """Send some requests, read their answers, and begin again."""
    with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, ValueError):
        async with asyncio.timeout(ENDLESS):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                while True:
                    writer.write(content)
                    for _ in range(count):
                        head = await reader.readuntil(b"\r\n\r\n")
                        size = head.lower().partition(b"content-length: ")[2]
                        await reader.readexactly(int(size.partition(b"\r\n")[0]))
            finally:
                writer.transport.abort()


def pipelined(content: bytes) -> bytes:
    """As many copies as one read of the server holds."""
    return content * max(1, 65536 // len(content))


def get(path: str) -> bytes:
    head = f"GET {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    return head.encode()


def unknown_labels() -> bytes:
    """The largest body of labels; no decision has these ids."""
    ids = [f"{'f' * 180}-{number:09d}" for number in range(9_900)]
    body = json.dumps({"ids": ids, "labels": ["0"] * len(ids)}).encode()
    assert len(body) <= FEEDBACK
    return request(body, path="/feedback", token=TOKEN)


def attacks() -> dict[str, list[Attack]]:
    """All that hostile clients do, by kind. Made once: making it costs more than
    sending it.
    """
    known = (
        f"Host: a\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type:"
        " application/json\r\n"
    )
    head = f"POST /decide HTTP/1.1\r\n{known}".encode()
    wide = {
        "matrix": [[float(i) for i in range(1000)]] * 10,
        "actions": [f"a{i}" for i in range(1000)],
    }
    costly = json.dumps({"probabilities": [[0.1] * 10] * 256, "utility": wide}).encode()
    trailers = head + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 5000
    body = head + b"Content-Length: 16000000\r\n\r\n" + b" " * 500_000
    full, deep = (
        request(costly, path="/decide?full=true", token=TOKEN),
        b'{"inputs": [' * 2000,
    )
    malformed_ones: list[Attack] = [
        partial(send, content) for content in malformed(66, 0, TOKEN)
    ]
    return {
        "malformed requests": malformed_ones,
        "trailers": [partial(send, trailers)],
        "slow headers": [
            partial(send, b"POST /decide HTTP/1.1\r\n", then=b"x: y\r\n", hold=12.0)
        ],
        "held connections": [
            partial(
                send,
                b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n",
                then=b"\r\n",
                hold=12.0,
            )
        ],
        "unfinished bodies": [partial(send, body, reads=False, hold=2.0)],
        "large answers that nobody reads": [partial(send, full, reads=False, hold=3.0)],
        "1,000 actions": [partial(send, request(costly, token=TOKEN))],
        "full answers for 1,000 actions": [partial(send, full)],
        "deep JSON": [
            partial(send, request(deep, path="/v2/models/run/infer", token=TOKEN))
        ],
        "random bytes": [partial(send, os.urandom(3000))],
        "endless GET /health without a token": [partial(endless, pipelined(HEALTH))],
        "waves of 16 GET /health without a token": [partial(in_turns, HEALTH * 16, 16)],
        "endless GET of other routes": [
            partial(in_turns, get(path), 1)
            for path in ("/metrics", "/openapi.json", "/docs", "/v2/models/run")
        ],
        "unknown labels": [partial(in_turns, unknown_labels(), 1)],
        "unfinished labels": [
            partial(send, unknown_labels()[:-1], reads=False, hold=2.0)
        ],
    }


def hostile(port: int, seconds: float, count: Any, kind: str | None = None) -> None:
    """Attack with one kind, or with all."""
    logging.getLogger("asyncio").setLevel(
        logging.ERROR
    )  # of connections that the server closed
    known = attacks()
    chosen = [
        attack
        for name, each in known.items()
        if kind in (None, name)
        for attack in each
    ]

    async def client(rng: random.Random) -> None:
        while time.monotonic() < until:
            for attack in rng.sample(chosen, min(60, len(chosen))):
                await attack(port)
                count.value += 1
                await asyncio.sleep(HOSTILE_PAUSE)
                if time.monotonic() > until:
                    return

    async def run() -> None:
        await asyncio.gather(
            *(client(random.Random(number)) for number in range(HOSTILE))
        )

    until = time.monotonic() + seconds
    asyncio.run(run())


def p99(waits: list[float]) -> float:
    """In milliseconds."""
    return 1000 * waits[int(0.99 * (len(waits) - 1))] if waits else float("inf")


class Clients:
    """Honest and hostile clients of a port, in processes."""

    def __init__(self, port: int) -> None:
        self.port, self.context = port, multiprocessing.get_context("spawn")
        self.attacks = self.context.Value("q", 0)

    def honest(self, seconds: float) -> Any:
        """A pipe that gets their waits when they are done."""
        ours, theirs = self.context.Pipe()
        self.context.Process(
            target=honest, args=(self.port, seconds, theirs), daemon=True
        ).start()
        return ours

    def hostile(self, seconds: float, kind: str | None = None) -> Any:
        """Their process, which attacks already."""
        before = self.attacks.value
        process = self.context.Process(
            target=hostile, args=(self.port, seconds, self.attacks, kind), daemon=True
        )
        process.start()
        slow = (
            time.monotonic() + 3
        )  # attacks that hold a connection are counted when they end
        while self.attacks.value == before and time.monotonic() < slow:
            time.sleep(0.05)
        return process


def survey(clients: Clients, quiet: list[float]) -> None:
    """Print how long honest requests wait beside each kind of attack."""
    print(f"{'honest requests beside':40} median      p99  longest (ms), ratio of p99")
    for kind in ("nothing", *attacks()):
        process = None if kind == "nothing" else clients.hostile(ALONE + 3, kind)
        _, waits = clients.honest(ALONE).recv()
        if process is not None:
            process.terminate()
            process.join(60)
        values = (
            1000 * waits[len(waits) // 2],
            p99(waits),
            1000 * waits[-1],
            p99(waits) / p99(quiet),
        )
        print(
            f"{kind:40} {values[0]:6.1f}  {values[1]:7.1f}  {values[2]:7.1f}        "
            f" {values[3]:.1f}",
            flush=True,
        )


def alone(kinds: Iterable[str]) -> Iterator[Row]:
    """Each kind of attack alone: honest requests and memory beside it, and just
    before it.
    """
    with served() as (process, port):
        clients = Clients(port)
        clients.honest(WARM).recv()
        for kind in list(kinds) * REPEATED:
            yield from beside(kind, process, clients)


def beside(kind: str, process: Any, clients: "Clients") -> Iterator[Row]:
    """One attack on a server that runs already."""
    _, quiet = clients.honest(ALONE).recv()
    before, sent = resident(process), clients.attacks.value
    began = time.perf_counter()
    enemy = clients.hostile(ALONE + 3, kind)
    pipe, most = clients.honest(ALONE), before
    while not pipe.poll(0.1):
        most = max(most, resident(process))
    statuses, loud = pipe.recv()
    enemy.join(60)
    common = {
        "inputs": clients.attacks.value - sent,
        "seconds": round(time.perf_counter() - began),
    }
    ratio = p99(loud) / p99(quiet)
    yield common | {
        "what": f"honest requests beside {kind}: p99",
        "value": f"{p99(loud):.1f} ms, quiet {p99(quiet):.1f}, {dict(statuses)}",
        "required": f"ratio at most {MOST_RATIO}",
        "holds": ratio <= MOST_RATIO and statuses.keys() == {200},
    }
    yield common | {
        "what": f"memory beside {kind}",
        "memory_mb": round(most),
        "value": f"{before:.0f} to at most {most:.0f} MiB",
        "required": f"ratio at most {MOST_GROWTH}",
        "holds": most <= MOST_GROWTH * before,
    }


@contextmanager
def served() -> Iterator[tuple[Any, int]]:
    """A server of a small network that logs its decisions: its process and its port."""
    from rfdlc.training.train import train

    with tempfile.TemporaryDirectory() as place:
        folder, token = Path(place) / "run", Path(place) / "token.txt"
        token.write_text(TOKEN)
        with warnings.catch_warnings(action="ignore"):
            train("digits-lt", out=folder, epochs=2, device="cpu")
        options = ["--token-file", str(token), "--log-decisions", f"{place}/log"]
        with server(folder, *options) as running:
            yield running


def mixed_load(minutes: float) -> Iterator[Row]:
    """All kinds at once; what must hold of honest requests, of memory and of
    SIGTERM.
    """
    with served() as (process, port):
        clients = Clients(port)
        clients.honest(min(WARM, QUIET)).recv()
        _, quiet = clients.honest(QUIET).recv()
        survey(clients, quiet)
        before, sent = resident(process), clients.attacks.value
        enemy = clients.hostile(60 * minutes + 8)
        pipe, most = clients.honest(60 * minutes), before
        while not pipe.poll(1.0):
            most = max(most, resident(process))
        statuses, loud = pipe.recv()
        after, began = resident(process), time.perf_counter()
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        stopped = next(
            line
            for line in map(json.loads, process.stderr)
            if line["event"] == "stopped"
        )
        process.wait(60)
        ended = time.perf_counter() - began
        enemy.join(90)
    what = f"load of {minutes:g} min, {clients.attacks.value - sent:,} hostile requests"
    bad = {status: n for status, n in statuses.items() if status not in (200, 503, 429)}
    yield {
        "what": f"{what}: honest requests",
        "inputs": statuses.total(),
        "value": dict(statuses),
        "holds": not bad,
    }
    told, required = (
        f"{p99(loud):.1f} ms, quiet {p99(quiet):.1f}",
        f"ratio at most {MOST_RATIO}",
    )
    holds = p99(loud) <= MOST_RATIO * p99(quiet)
    yield {"what": f"{what}: p99", "value": told, "required": required, "holds": holds}
    grown = f"{before:.0f} to {after:.0f} MiB, at most {most:.0f}"
    yield {
        "what": f"{what}: memory",
        "value": grown,
        "required": "within 20%",
        "holds": after <= 1.2 * before,
    }
    answered = f"{ended:.1f} s, {stopped['answered']} of {stopped['accepted']} answered"
    good = ended <= 10 and stopped["answered"] == stopped["accepted"]
    yield {
        "what": f"{what}: SIGTERM",
        "value": answered,
        "required": "10 s, all answered",
        "holds": good,
    }

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
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from load import request, server
from malformed import malformed
from serve import resident

TOKEN = "0123456789abcdef-hostile"
CONNECTIONS, PAUSE = 8, 0.02  # of honest clients, seconds between the requests of each
HOSTILE, HOSTILE_PAUSE = 16, 0.05
QUIET, ALONE = 20.0, 6.0  # seconds, for the reference and for each kind of attack
MOST_RATIO = 3  # of the 99th percentile to that of the quiet server
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
        "1,000 actions, full answer": [partial(send, full)],
        "deep JSON": [
            partial(send, request(deep, path="/v2/models/run/infer", token=TOKEN))
        ],
        "random bytes": [partial(send, os.urandom(3000))],
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


def mixed_load(minutes: float) -> Iterator[Row]:
    """All kinds at once; what must hold of honest requests, of memory and of
    SIGTERM.
    """
    from rfdlc.training.train import train

    with tempfile.TemporaryDirectory() as place:
        folder, token = Path(place) / "run", Path(place) / "token.txt"
        token.write_text(TOKEN)
        with warnings.catch_warnings(action="ignore"):
            train("digits-lt", out=folder, epochs=2, device="cpu")
        with server(folder, "--token-file", str(token)) as (process, port):
            clients = Clients(port)
            clients.honest(min(5.0, QUIET)).recv()  # warm-up
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

"""The server under load on 127.0.0.1: 10,000 requests, 64 at a time, every answer
compared with the library's.

    python benchmarks/serve.py        writes benchmarks/results/serve.csv

Then: the same without batches, the load of another generator (wrk, where it is
installed), twice the load that the queue holds, SIGTERM under load, and malformed
requests while memory is watched. The exit code is 1 where anything that is required
does not hold.
"""

import json
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from load import Reply, by_wrk, load, server
from load import request as post
from malformed import against_the_document, malformed
from recording import write
from rfdlc.data.load import load as load_data
from rfdlc.training.model import Model
from rfdlc.training.train import train

REQUESTS, CONCURRENCY, UNBATCHED, MALFORMED, DOCUMENTED = 10_000, 64, 2_000, 1_000, 500
ROUNDS, QUEUE = 10, 64
TOKEN = "a-token-for-the-benchmark"
Row = dict[str, Any]


def questions(samples: NDArray[Any], count: int) -> list[bytes]:
    bodies = [
        post(json.dumps({"arrays": sample[None].tolist()}).encode())
        for sample in samples
    ]
    return [bodies[i % len(bodies)] for i in range(count)]


def wrong_answers(model: Model, samples: NDArray[Any], replies: list[Reply]) -> int:
    """How many of the answers are not what the library says of the same sample."""
    explained = model.decider.explain(model.predict(samples))
    names, wrong = model.decider.utility.actions, 0
    for reply in replies:
        told, i = json.loads(reply.body), reply.index % len(samples)
        near = abs(told["expected_utility"][0] - explained.value[i]) < 1e-5
        tie = explained.value[i] - explained.runner_up_value[i] < 1e-5
        wrong += not (near and (tie or told["action"] == [names[explained.action[i]]]))
    return wrong


def full_load(folder: Path, model: Model, samples: NDArray[Any]) -> list[Row]:
    """In rounds, so that whatever else the machine does slows all of them alike."""
    replies: list[Reply] = []
    batched = alone = together = 0.0
    with server(folder) as (_, port), server(folder, "--batch", "1") as (_, plain):
        for warm_up in (port, plain):
            load(warm_up, questions(samples, 300), 8)
        for _ in range(ROUNDS):
            found, seconds = load(
                port, questions(samples, REQUESTS // ROUNDS), CONCURRENCY
            )
            replies, batched = replies + found, batched + seconds
            alone += load(plain, questions(samples, UNBATCHED // ROUNDS), 1)[1]
            together += load(
                plain, questions(samples, UNBATCHED // ROUNDS), CONCURRENCY
            )[1]
    good = [reply for reply in replies if reply.status == 200]
    latency = np.array([reply.seconds for reply in replies]) * 1000
    speed, unbatched = REQUESTS / batched, UNBATCHED / min(alone, together)
    what = f"digits, {REQUESTS:,} requests, {CONCURRENCY} at a time"
    return [
        {
            "what": f"{what}: answered",
            "value": len(good),
            "unit": "requests",
            "required": REQUESTS,
        },
        {
            "what": f"{what}: wrong answers",
            "value": wrong_answers(model, samples, good),
            "required": 0,
        },
        {
            "what": (
                f"{what}: throughput against batches of 1 (the better of 1 and"
                f" {CONCURRENCY} clients)"
            ),
            "value": round(speed, 1),
            "unit": "requests/s",
            "reference": round(unbatched, 1),
            "ratio": round(speed / unbatched, 2),
            "required": 5,
        },
        {
            "what": "batches of 1, one client",
            "value": round(UNBATCHED / alone, 1),
            "unit": "requests/s",
        },
        *(
            {
                "what": f"{what}: p{q}",
                "value": round(float(np.percentile(latency, q)), 1),
                "unit": "ms",
            }
            for q in (50, 99)
        ),
    ]


def another_generator(folder: Path, model: Model, samples: NDArray[Any]) -> list[Row]:
    """The same load by wrk, where it is installed (Debian: apt-get install wrk): one
    request, over and over.
    """
    body = json.dumps({"arrays": samples[:1].tolist()})
    action = model.decider.utility.actions[model.decide(samples[:1])[0]]
    with server(folder) as (_, port):
        load(port, questions(samples, 300), 8)
        done = by_wrk(port, body, f'"action":["{action}"]', CONCURRENCY)
    if done is None:
        print("wrk is not installed: its rows are left out")
        return []
    what = f"digits by wrk, {CONCURRENCY} connections"
    return [
        {
            "what": f"{what}: wrong answers and errors, of {done.requests:,} requests",
            "value": done.wrong,
            "required": 0,
        },
        {
            "what": f"{what}: throughput",
            "value": round(done.requests / done.seconds, 1),
            "unit": "requests/s",
        },
        {"what": f"{what}: p99", "value": round(done.p99, 1), "unit": "ms"},
    ]


def overload(folder: Path, model: Model, samples: NDArray[Any]) -> list[Row]:
    """Twice as many clients as the queue has places; each asks again at once."""
    with server(folder, "--queue", str(QUEUE)) as (process, port):
        replies, _ = load(port, questions(samples, REQUESTS // 2), 2 * QUEUE)
        alive = (
            process.poll() is None
            and load(port, questions(samples, 1), 1)[0][0].status == 200
        )
    counts = Counter(reply.status for reply in replies)
    good = [reply for reply in replies if reply.status == 200]
    what = f"{2 * QUEUE} clients of a queue of {QUEUE}"
    return [
        {
            "what": f"{what}: answered, rightly",
            "value": len(good) - wrong_answers(model, samples, good),
        },
        {
            "what": f"{what}: refused with 429",
            "value": counts[429],
            "reference": len(replies),
        },
        {
            "what": f"{what}: any other status",
            "value": len(replies) - counts[200] - counts[429],
            "required": 0,
        },
        {
            "what": f"{what}: server alive and answering afterwards",
            "value": int(alive),
            "required": 1,
        },
    ]


def termination(folder: Path, samples: NDArray[Any]) -> list[Row]:
    with server(folder) as (process, port):
        threading.Timer(1.5, lambda: process.send_signal(signal.SIGTERM)).start()
        replies, _ = load(port, questions(samples, 100_000), CONCURRENCY)
        assert process.stderr is not None
        stopped = next(
            line
            for line in map(json.loads, process.stderr)
            if line["event"] == "stopped"
        )
    whole = sum(reply.status == 200 for reply in replies)
    return [
        {
            "what": (
                f"SIGTERM with {CONCURRENCY} clients: accepted requests that were"
                " answered whole"
            ),
            "value": whole,
            "unit": "requests",
            "reference": stopped["accepted"],
            "required": stopped["accepted"],
        }
    ]


def resident(process: Any) -> float:
    """Mebibytes of a server's memory, with its processes (the model, readers of
    bodies).
    """
    pids = [
        process.pid,
        *Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split(),
    ]
    pages = 0
    for pid in pids:
        with suppress(OSError):  # one that has just ended
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def abuse(folder: Path) -> list[Row]:
    token_file = folder / "token.txt"
    token_file.write_text(TOKEN)
    with server(folder, "--token-file", str(token_file)) as (process, port):
        load(port, malformed(MALFORMED, 0, TOKEN), 4)
        against_the_document(port, TOKEN, 20)
        before = resident(process)
        replies, _ = load(port, malformed(MALFORMED, 1, TOKEN), 4)
        statuses = against_the_document(port, TOKEN, DOCUMENTED)
        after = resident(process)
    refused = sum(400 <= reply.status < 500 for reply in replies)
    documented = sum(count for status, count in statuses.items() if 400 <= status < 500)
    print(f"statuses of schemathesis' requests: {dict(statuses)}")
    return [
        {
            "what": (
                "malformed requests refused with 4xx: images, bombs, NaN, shapes,"
                " bytes, tokens"
            ),
            "value": refused,
            "reference": MALFORMED,
            "required": MALFORMED,
        },
        {
            "what": (
                "requests of schemathesis that break the OpenAPI document refused"
                " with 4xx"
            ),
            "value": documented,
            "reference": statuses.total(),
            "required": statuses.total(),
        },
        {
            "what": (
                f"memory after {MALFORMED + statuses.total():,} more malformed"
                " requests, against before them"
            ),
            "value": round(after, 1),
            "unit": "MiB",
            "reference": round(before, 1),
            "ratio": round(after / before, 3),
            "required": "ratio below 1.05",
        },
    ]


def main() -> None:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "digits"
        model = train("digits-lt", out=folder, device="cpu")
        data = load_data("digits-lt").test
        assert data is not None
        rows = [
            *full_load(folder, model, data.array),
            *another_generator(folder, model, data.array),
            *overload(folder, model, data.array),
            *termination(folder, data.array),
            *abuse(folder),
        ]
    rows.append(
        {
            "what": "whole benchmark",
            "value": round(time.perf_counter() - began, 1),
            "unit": "s",
        }
    )
    write(
        "serve", rows, ["rfdlc", "torch", "fastapi", "uvicorn", "uvloop", "httptools"]
    )
    exact = all(
        row["value"] == row["required"]
        for row in rows
        if row.get("required", 5) not in (5, "ratio below 1.05")
    )
    sys.exit(not (exact and rows[2]["ratio"] >= 5 and rows[-2]["ratio"] < 1.05))


if __name__ == "__main__":
    main()

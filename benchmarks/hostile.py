"""Hostile input: fuzzed parsers, mixed load on the server, kills and racing writers, tests of each known defect.

    python benchmarks/hostile.py fuzz --count 100000 --workers 2      every parser of strangers' bytes (`fuzzing.py`)
    python benchmarks/hostile.py load --minutes 30                    honest and hostile clients of one server
    python benchmarks/hostile.py kills --count 100 --workers 2        kill -9 at random instants; two writers at once
    python benchmarks/hostile.py lines                                tests of each defect that was found

Rows are appended to benchmarks/results/hostile.csv as they come. The exit code is 1 where one does not hold. Inputs
that broke something are kept in build/hostile. The server listens on 127.0.0.1 only.
"""

import argparse
import asyncio
import hashlib
import json
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fuzzing import PARSERS, fuzz
from load import request, server
from malformed import malformed
from recording import RESULTS, append, commit, hardware, in_parallel, versions
from serve import resident

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "build" / "hostile"
COLUMNS: tuple[str, ...] = (
    "what",
    "inputs",
    "accepted",
    "refused",
    "tracebacks",
    "crashes",
    "stuck",
    "slow",
    "slowest_s",
    "memory_mb",
)
COLUMNS += ("seconds", "value", "required", "holds", "hardware", "versions", "commit", "date")
TOKEN = "0123456789abcdef-hostile"
CONNECTIONS, PAUSE = 8, 0.02  # of honest clients, seconds between the requests of each
HOSTILE, HOSTILE_PAUSE = 16, 0.05
QUIET = 20.0  # seconds, for the reference
# The tests of each defect that a review of hostile input found, by its number there, and of what was promised.
LINES = {
    "1 CIFAR files are parsed, never unpickled": "tests/data/test_cifar.py",
    "2 parts of predictions belong to a job": "tests/integrations/predict/test_predict.py",
    "3 connections, trailers, bodies and slow readers": "tests/integrations/server/test_connections.py",
    "4 work that timed out": "tests/integrations/server/test_workers.py tests/integrations/server/test_malformed.py",
    "5 ONNX external data": "tests/integrations/export/test_export.py",
    "6 changed data are not resumed": "tests/training/test_run.py",
    "7 processes that disagree": "tests/training/test_processes.py",
    "8 one writer per run folder": "tests/training/test_run.py tests/test_hostile.py",
    "9 utilities with a large offset": "tests/integrations/export/test_export.py",
    "10 formulas, escapes, bombs, nonsense": "tests/test_hostile.py tests/integrations/server/test_limits.py",
    "promise: readiness and liveness, drain, TLS, limits": "tests/integrations/server/test_limits.py",
    "promise: Open Inference Protocol, versions": "tests/integrations/server/test_inference.py",
    "promise: signatures": "tests/integrations/test_signing.py",
}
Row = dict[str, Any]


def record(row: Row) -> bool:
    """Append a row; whether it holds."""
    common = {"hardware": hardware(), "versions": versions(("numpy", "pyarrow", "onnxruntime", "uvicorn"))}
    common |= {"commit": commit(), "date": datetime.now(UTC).date().isoformat()}
    append(RESULTS / "hostile.csv", [row | common], COLUMNS)
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return bool(row["holds"])


def fuzzed(names: list[str], count: int, seed: int, workers: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as place:
        for name in names:
            yield fuzz(name, count, seed, workers, Path(place), KEPT)


def lines() -> Iterator[Row]:
    for what, files in LINES.items():
        began = time.perf_counter()
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files.split(), "-W", "ignore", "--co"]
        counted = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.count("::")
        done = subprocess.run(words[:-1], cwd=ROOT, capture_output=True, text=True, check=False)
        row: Row = {"what": f"line {what}", "inputs": counted, "seconds": round(time.perf_counter() - began)}
        print(done.stdout[-2000:] if done.returncode else "", end="")
        yield row | {"value": f"exit code {done.returncode}", "required": "exit code 0", "holds": done.returncode == 0}


# The server: honest clients in one process, hostile ones in another, so that neither waits for the other.


async def ask(port: int, content: bytes) -> tuple[int, float]:
    """Status and seconds of one request on a connection of its own; 0 where there is no answer."""
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
    """Statuses and latencies of honest clients."""
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
    pipe.send((Counter(status for status, _ in found), sorted(took for status, took in found if status == 200)))


def attacks(rng: random.Random) -> list[Callable[[int], Any]]:
    """What hostile clients do, each with a port."""
    known = f"Host: a\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n"
    head = f"POST /decide HTTP/1.1\r\n{known}".encode()
    wide = {"matrix": [[float(i) for i in range(1000)]] * 10, "actions": [f"a{i}" for i in range(1000)]}
    costly = json.dumps({"probabilities": [[0.1] * 10] * 256, "utility": wide}).encode()
    wrong = malformed(66, rng.randrange(10**6), TOKEN)

    async def send(port: int, content: bytes, then: bytes = b"", reads: bool = True, hold: float = 0.0) -> None:
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

    return [
        *(partial(send, content=content) for content in wrong),
        partial(send, content=head + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 5000),
        partial(send, content=b"POST /decide HTTP/1.1\r\n", then=b"x: y\r\n", hold=12.0),
        partial(send, content=b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n", then=b"\r\n", hold=12.0),
        partial(send, content=head + b"Content-Length: 16000000\r\n\r\n" + b" " * 500_000, reads=False, hold=2.0),
        partial(send, content=request(costly, path="/decide?full=true", token=TOKEN), reads=False, hold=3.0),
        partial(send, content=request(costly, token=TOKEN)),
        partial(send, content=request(b'{"inputs": [' * 2000, path="/v2/models/run/infer", token=TOKEN)),
        partial(send, content=os.urandom(3000)),
    ]


def hostile(port: int, seconds: float, count: Any) -> None:
    rng = random.Random(0)
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # of connections that the server closed

    async def client(rng: random.Random) -> None:
        while time.monotonic() < until:
            for attack in rng.sample(attacks(rng), 60):
                await attack(port)
                count.value += 1
                await asyncio.sleep(HOSTILE_PAUSE)
                if time.monotonic() > until:
                    return

    async def run() -> None:
        await asyncio.gather(*(client(random.Random(rng.random())) for _ in range(HOSTILE)))

    until = time.monotonic() + seconds
    asyncio.run(run())


def mixed_load(minutes: float) -> Iterator[Row]:
    from rfdlc.training.train import train

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as place:
        folder, token = Path(place) / "run", Path(place) / "token.txt"
        token.write_text(TOKEN)
        with warnings.catch_warnings(action="ignore"):
            train("digits-lt", out=folder, epochs=2, device="cpu")
        with server(folder, "--token-file", str(token)) as (process, port):

            def clients(seconds: float) -> tuple[Any, Any]:
                ours, theirs = context.Pipe()
                worker = context.Process(target=honest, args=(port, seconds, theirs))
                worker.start()
                return worker, ours

            worker, pipe = clients(min(5.0, QUIET))  # warm-up
            pipe.recv(), worker.join()
            worker, pipe = clients(QUIET)
            (_, quiet), before = pipe.recv(), resident(process)
            worker.join()
            count = context.Value("q", 0)
            enemy = context.Process(target=hostile, args=(port, 60 * minutes + 5, count))
            enemy.start()
            worker, pipe = clients(60 * minutes)
            most = before
            while not pipe.poll(1.0):
                most = max(most, resident(process))
            statuses, loud = pipe.recv()
            after, began = resident(process), time.perf_counter()
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            stopped = next(line for line in map(json.loads, process.stderr) if line["event"] == "stopped")
            process.wait(60)
            ended = time.perf_counter() - began
            for each in (worker, enemy):
                each.join(90)
    p99 = [1000 * values[int(0.99 * (len(values) - 1))] for values in (quiet, loud)]
    what = f"load of {minutes:g} min, {count.value:,} hostile requests"
    bad = {status: n for status, n in statuses.items() if status not in (200, 503, 429)}
    yield {"what": f"{what}: honest requests", "inputs": statuses.total(), "value": dict(statuses), "holds": not bad}
    ratio = p99[1] / p99[0]
    told = f"{p99[1]:.1f} ms, quiet {p99[0]:.1f}"
    yield {"what": f"{what}: p99", "value": told, "required": "ratio at most 3", "holds": ratio <= 3}
    grown = f"{before:.0f} to {after:.0f} MiB, at most {most:.0f}"
    yield {"what": f"{what}: memory", "value": grown, "required": "within 20%", "holds": after <= 1.2 * before}
    answered = f"{ended:.1f} s, {stopped['answered']} of {stopped['accepted']} answered"
    good = ended <= 10 and stopped["answered"] == stopped["accepted"]
    yield {"what": f"{what}: SIGTERM", "value": answered, "required": "10 s, all answered", "holds": good}


# Kills: a command is killed at a random instant, run again until it is done, and its result compared with a whole one.

SETTINGS = ("epochs=8", "checkpoint_every=1", "backbone=mlp", "widths=16", "device=cpu")
MANY = (
    "import sys, rfdlc; a, b = (sys.argv[1] + '/a', sys.argv[1] + '/b');"
    "common = dict(epochs=8, backbone='mlp', widths=(16,), device='cpu', checkpoint_every=1);"
    "specs = [rfdlc.RunSpec(a, settings=common), rfdlc.RunSpec(b, settings=common | {'seed': 1})];"
    "rfdlc.train_many('digits-lt', specs)"
)


def command(kind: str, out: Path, run: Path) -> list[str]:
    """The words that begin or continue a job."""
    words, started = [sys.executable, "-m", "rfdlc"], (out / "config.json").exists()
    training = ["resume", str(out)] if started else ["train", "digits-lt", "--out", str(out), *SETTINGS]
    match kind:
        case "train":
            return [*words, *training]
        case "torchrun":
            torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            return [sys.executable, "-m", *torchrun, "-m", "rfdlc", *training]
        case "predict":
            return [*words, "predict", str(run), str(run.parent / "many.npz"), "--out", str(out)]
        case "export":
            return [*words, "export", str(run), str(out)]
        case "report":
            return [*words, "report", str(run), "--out", str(out)]
    return [sys.executable, "-c", MANY, str(out)]


KINDS = {"train": "", "torchrun": "", "train_many": "", "predict": ".parquet", "export": ".onnx", "report": ".html"}


def result(kind: str, out: Path) -> str:
    """A hash of what must be the same; "" where nothing is there. Raises where something is there in part."""
    from safetensors.numpy import load_file

    digest = hashlib.sha256()
    if kind in ("train", "torchrun", "train_many"):
        folders = [out / "a", out / "b"] if kind == "train_many" else [out]
        for folder in folders:
            if not (folder / "metrics.json").exists():
                return ""
            json.loads((folder / "metrics.json").read_text())
            for name, values in sorted(load_file(folder / "model.safetensors").items()):
                digest.update(name.encode() + values.tobytes())
        return digest.hexdigest()
    if not out.exists():
        return ""
    if kind == "predict":
        from pyarrow.parquet import read_table

        table = read_table(out)
        assert table.num_rows == 20_000
        return hashlib.sha256(repr(table.to_pydict()).encode()).hexdigest()
    if kind == "export":
        from rfdlc.integrations.onnx.model import OnnxModel

        return hashlib.sha256(
            OnnxModel.load(out).decide(np.zeros((1, 1, 8, 8), np.uint8)).probabilities.tobytes()
        ).hexdigest()
    text = out.read_text(encoding="utf-8")
    assert text.rstrip().endswith("</html>")
    return "whole"


def start(kind: str, out: Path, run: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    words = command(kind, out, run)
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, env=env, text=True, start_new_session=True, **pipes)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, error = process.communicate(timeout=300)
    return process.returncode, error


def descendants(parent: int) -> list[int]:
    """Children of a process, their children and so on."""
    parents: dict[int, int] = {}
    for place in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(place.parent.name)] = int(place.read_text().rpartition(")")[2].split()[1])
    own = [child for child, above in parents.items() if above == parent]
    return own + [further for child in own for further in descendants(child)]


def killed(kind: str, number: int, place: Path, seconds: float, expected: str, both: bool) -> str:
    """Kill one job, or start two at once; what went wrong, or nothing."""
    rng, run, out = random.Random(number), place / "run", place / f"{kind}-{number}{KINDS[kind]}"
    try:
        if both:
            ends = [finish(process) for process in [start(kind, out, run), start(kind, out, run)]]
            if not any(code == 0 for code, _ in ends):
                return f"neither of two writers finished: {ends}"
            if any("Traceback" in error and "InputError" not in error for _, error in ends if kind != "torchrun"):
                return f"a writer failed: {ends}"
        else:
            process = start(kind, out, run)
            try:
                process.wait(rng.uniform(0.2, 1.1) * seconds)
            except subprocess.TimeoutExpired:
                for each in (process.pid, *descendants(process.pid)):  # torchrun's are in sessions of their own
                    with suppress(ProcessLookupError):
                        os.kill(each, signal.SIGKILL)
            process.communicate()
            found = result(kind, out)  # raises for what is torn
            if found not in ("", expected):
                return "another result after the kill"
        if result(kind, out) != expected:
            code, error = finish(start(kind, out, run))
            if code:
                return f"exit code {code}: {error[-300:]}"
        return "" if result(kind, out) == expected else "another result"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def kills(kinds: list[str], count: int, workers: int) -> Iterator[Row]:
    from rfdlc.data.load import load

    with tempfile.TemporaryDirectory() as where:
        place = Path(where)
        images = load("digits-lt").train.array
        np.savez(place / "many.npz", x=np.resize(images, (20_000, *images.shape[1:])))
        assert finish(start("train", place / "run", place))[0] == 0
        for turn, kind in enumerate(kinds):
            began, whole = time.perf_counter(), place / f"{kind}-whole{KINDS[kind]}"
            code, error = finish(start(kind, whole, place / "run"))
            assert code == 0, error
            seconds, expected = time.perf_counter() - began, result(kind, whole)
            racing = [i % 4 == 1 for i in range(len(range(turn, count, len(kinds))))]
            jobs = [(kind, i, place, seconds, expected, both) for i, both in enumerate(racing)]
            found = list(in_parallel(killed, jobs, workers))
            wrong = [text for text in found if text]
            for text in wrong:
                print(f"{kind}: {text}")
            row: Row = {"what": f"kills of {kind}, {sum(racing)} of them two writers at once", "inputs": len(found)}
            row |= {"seconds": round(time.perf_counter() - began), "value": f"{len(wrong)} lost, torn or other"}
            yield row | {"required": 0, "holds": not wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("fuzz", "load", "kills", "lines"))
    parser.add_argument("--count", type=int, default=0, help="inputs per parser (100,000), or kills (100)")
    parser.add_argument("--parsers", default=",".join(PARSERS))
    parser.add_argument("--kinds", default=",".join(KINDS), help="what is killed")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=30)
    given = parser.parse_args()
    rows = {
        "fuzz": lambda: fuzzed(given.parsers.split(","), given.count or 100_000, given.seed, given.workers),
        "load": lambda: mixed_load(given.minutes),
        "kills": lambda: kills(given.kinds.split(","), given.count or 100, given.workers),
        "lines": lines,
    }[given.what]()
    good = [record(row) for row in rows]
    raise SystemExit(0 if all(good) else 1)


if __name__ == "__main__":
    main()

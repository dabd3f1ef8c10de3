"""Hostile input: fuzzed parsers, load on the server, kills, tests of each known defect.

    python benchmarks/hostile.py fuzz --count 100000 --workers 2
        every parser of strangers' bytes (`fuzzing.py`)
    python benchmarks/hostile.py load --minutes 30
        honest and hostile clients (`hostile_load.py`)
    python benchmarks/hostile.py attacks
        each kind of attack alone: honest requests and memory beside it
    python benchmarks/hostile.py kills --count 100 --workers 2
        kill -9 at random instants; two writers at once
    python benchmarks/hostile.py lines
        tests of each defect that was found

Rows are appended to benchmarks/results/hostile.csv as they come. The exit code is 1
where one does not hold. Inputs that broke something are kept in build/hostile. The
server listens on 127.0.0.1 only.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from fuzzing import PARSERS, fuzz
from hostile_load import alone, attacks, mixed_load
from recording import RESULTS, append, commit, hardware, in_parallel, versions

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
COLUMNS += (
    "seconds",
    "value",
    "required",
    "holds",
    "hardware",
    "versions",
    "commit",
    "date",
)
# The tests of each defect that a review of hostile input found, by its number there,
# and of what was promised.
LINES = {
    "1 CIFAR files are parsed, never unpickled": "tests/data/test_cifar.py",
    "2 parts of predictions belong to a job": ("tests/predicting/test_predict.py"),
    "3 connections, trailers, bodies and slow readers": (
        "tests/serving/test_connections.py"
    ),
    "4 work that timed out": (
        "tests/serving/test_workers.py"
        " tests/serving/test_malformed.py"
        " tests/serving/test_limits.py"
    ),
    "5 ONNX external data": "tests/exporting/test_export.py",
    "6 changed data are not resumed": "tests/training/test_run.py",
    "7 processes that disagree": "tests/training/test_processes.py",
    "8 one writer per run folder": "tests/training/test_run.py tests/test_hostile.py",
    "9 utilities with a large offset": "tests/exporting/test_export.py",
    "10 formulas, escapes, bombs, nonsense": (
        "tests/test_hostile.py tests/serving/test_limits.py "
        "tests/serving/test_connections.py"
    ),
    "11 one admission for all routes": "tests/serving/test_admission.py",
    "12 ids, labels that conflict, lines that were torn": (
        "tests/serving/test_decision_log.py"
    ),
    "promise: readiness and liveness, drain, TLS, limits": (
        "tests/serving/test_limits.py"
    ),
    "promise: Open Inference Protocol, versions": ("tests/serving/test_inference.py"),
}
Row = dict[str, Any]


def record(row: Row) -> bool:
    """Append a row; whether it holds."""
    common = {
        "hardware": hardware(),
        "versions": versions(("numpy", "pyarrow", "onnxruntime", "uvicorn")),
    }
    common |= {"commit": commit(), "date": datetime.now(UTC).date().isoformat()}
    append(RESULTS / "hostile.csv", [row | common], COLUMNS)
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return bool(row["holds"])


def fuzzed(names: list[str], count: int, seed: int, workers: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    ) as place:
        for name in names:
            yield fuzz(name, count, seed, workers, Path(place), KEPT)


def lines() -> Iterator[Row]:
    for what, files in LINES.items():
        began = time.perf_counter()
        words = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *files.split(),
            "-W",
            "ignore",
            "--co",
        ]
        counted = subprocess.run(
            words, cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.count("::")
        done = subprocess.run(
            words[:-1], cwd=ROOT, capture_output=True, text=True, check=False
        )
        row: Row = {
            "what": f"line {what}",
            "inputs": counted,
            "seconds": round(time.perf_counter() - began),
        }
        print(done.stdout[-2000:] if done.returncode else "", end="")
        yield row | {
            "value": f"exit code {done.returncode}",
            "required": "exit code 0",
            "holds": done.returncode == 0,
        }


# Kills: a command is killed at a random instant, run again until it is done, and its
# result compared with a whole one.

SETTINGS = ("epochs=8", "checkpoint_every=1", "backbone=mlp", "widths=16", "device=cpu")
MANY = (
    "import sys, rfdlc; a, b = (sys.argv[1] + '/a', sys.argv[1] + '/b');common ="
    " dict(epochs=8, backbone='mlp', widths=(16,), device='cpu',"
    " checkpoint_every=1);specs = [rfdlc.RunSpec(a, settings=common), rfdlc.RunSpec(b,"
    " settings=common | {'seed': 1})];rfdlc.train_many('digits-lt', specs)"
)


def command(kind: str, out: Path, run: Path) -> list[str]:
    """The words that begin or continue a job."""
    words, started = [sys.executable, "-m", "rfdlc"], (out / "config.json").exists()
    training = (
        ["resume", str(out)]
        if started
        else ["train", "digits-lt", "--out", str(out), *SETTINGS]
    )
    match kind:
        case "train":
            return [*words, *training]
        case "torchrun":
            torchrun = [
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "2",
            ]
            return [sys.executable, "-m", *torchrun, "-m", "rfdlc", *training]
        case "predict":
            return [
                *words,
                "predict",
                str(run),
                str(run.parent / "many.npz"),
                "--out",
                str(out),
            ]
        case "export":
            return [*words, "export", str(run), str(out)]
        case "report":
            return [*words, "report", str(run), "--out", str(out)]
    return [sys.executable, "-c", MANY, str(out)]


KINDS = {
    "train": "",
    "torchrun": "",
    "train_many": "",
    "predict": ".parquet",
    "export": ".onnx",
    "report": ".html",
}


def result(kind: str, out: Path) -> str:
    """A hash of what must be the same; "" where nothing is there. Raises where
    something is there in part.
    """
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
        from rfdlc.predicting.onnx_model import OnnxModel

        return hashlib.sha256(
            OnnxModel.load(out)
            .decide(np.zeros((1, 1, 8, 8), np.uint8))
            .probabilities.tobytes()
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
            parents[int(place.parent.name)] = int(
                place.read_text().rpartition(")")[2].split()[1]
            )
    own = [child for child, above in parents.items() if above == parent]
    return own + [further for child in own for further in descendants(child)]


def killed(
    kind: str, number: int, place: Path, seconds: float, expected: str, both: bool
) -> str:
    """Kill one job, or start two at once; what went wrong, or nothing."""
    rng, run, out = (
        random.Random(number),
        place / "run",
        place / f"{kind}-{number}{KINDS[kind]}",
    )
    try:
        if both:
            ends = [
                finish(process)
                for process in [start(kind, out, run), start(kind, out, run)]
            ]
            if not any(code == 0 for code, _ in ends):
                return f"neither of two writers finished: {ends}"
            if any(
                "Traceback" in error and "InputError" not in error
                for _, error in ends
                if kind != "torchrun"
            ):
                return f"a writer failed: {ends}"
        else:
            process = start(kind, out, run)
            try:
                process.wait(rng.uniform(0.2, 1.1) * seconds)
            except subprocess.TimeoutExpired:
                for each in (
                    process.pid,
                    *descendants(process.pid),
                ):  # torchrun's are in sessions of their own
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
            jobs = [
                (kind, i, place, seconds, expected, both)
                for i, both in enumerate(racing)
            ]
            found = list(in_parallel(killed, jobs, workers))
            wrong = [text for text in found if text]
            for text in wrong:
                print(f"{kind}: {text}")
            row: Row = {
                "what": f"kills of {kind}, {sum(racing)} of them two writers at once",
                "inputs": len(found),
            }
            row |= {
                "seconds": round(time.perf_counter() - began),
                "value": f"{len(wrong)} lost, torn or other",
            }
            yield row | {"required": 0, "holds": not wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("fuzz", "load", "attacks", "kills", "lines"))
    parser.add_argument(
        "--count",
        type=int,
        default=0,
        help="inputs per parser (100,000), or kills (100)",
    )
    parser.add_argument("--parsers", default=",".join(PARSERS))
    parser.add_argument("--kinds", default=",".join(KINDS), help="what is killed")
    parser.add_argument(
        "--attacks", default="", help="kinds of attacks, between semicolons (all)"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=30)
    given = parser.parse_args()
    rows = {
        "fuzz": lambda: fuzzed(
            given.parsers.split(","), given.count or 100_000, given.seed, given.workers
        ),
        "load": lambda: mixed_load(given.minutes),
        "attacks": lambda: alone(
            given.attacks.split(";") if given.attacks else attacks()
        ),
        "kills": lambda: kills(
            given.kinds.split(","), given.count or 100, given.workers
        ),
        "lines": lines,
    }[given.what]()
    good = [record(row) for row in rows]
    raise SystemExit(0 if all(good) else 1)


if __name__ == "__main__":
    main()

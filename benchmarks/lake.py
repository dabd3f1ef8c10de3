"""Deciding a lake: 20,000,000 x 20 probabilities in 40 Parquet files, on 2 cores.

`python benchmarks/lake.py` measures, each in a process of its own and all in one run:

- the time of `rfdlc.lakes.decide.decide_lake`, and that of pyarrow alone:
  reading the same columns and writing the same columns as `decide_lake` does (with
  pyarrow's defaults, a file per thread), and copying all that is read;
- peak memory (resident), also for twice the rows;
- `kill -9` at random moments, then once to the end: every id once, equal to an
  undisturbed result;
- whether the decisions of every file equal `Decider.explain` on the arrays of that file
  bit for bit.

It needs 6 GB of disk below `--folder`; `--rows 400000 --files 8` tries it in seconds.
Twice the rows are two links to each file. Written to `results/lake.csv`.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet as pq

from recording import write
from rfdlc import Classes, Decider, Utility

NAMES = tuple(f"class_{i:02d}" for i in range(20))
MOST_TIME, MOST_MEMORY, REPEATS, KILLS = 1.5, 1024, 3, 3
Row = dict[str, object]


def decider() -> Decider:
    """Costs of confusion, and a class prior that differs from that of the scores."""
    rng = np.random.default_rng(0)
    costs = -rng.random((20, 20))
    np.fill_diagonal(costs, 1)
    prior = np.geomspace(1, 0.01, 20) / np.geomspace(1, 0.01, 20).sum()
    return Decider(
        Utility(costs, Classes(NAMES), NAMES), train_prior=prior, target_prior="uniform"
    )


def make(folder: Path, rows: int, files: int) -> None:
    """Softmax of normal logits in 32 bits, and an id."""
    folder.mkdir(parents=True)
    for number in range(files):
        rng, count = np.random.default_rng(number), rows // files
        p = np.exp(2 * rng.standard_normal((count, 20), dtype=np.float32))
        p /= p.sum(axis=1, keepdims=True)
        columns = {
            "id": np.arange(number * count, (number + 1) * count),
            **dict(zip(NAMES, p.T.copy(), strict=True)),
        }
        pq.write_table(
            pa.table(columns),
            folder / f"part-{number:05d}.parquet",
            use_dictionary=False,
        )


def doubled(folder: Path, twice: Path) -> None:
    twice.mkdir()
    for copy in "ab":
        for file in folder.iterdir():
            os.link(file, twice / f"{copy}-{file.name}")


def decide(source: Path, out: Path) -> None:
    from rfdlc.lakes.decide import decide_lake

    decide_lake(source, out, decider())


def read_and_write(source: Path, decided: Path, out: Path) -> None:
    """What pyarrow alone needs to read the columns that are decided and to write
    columns such as the decisions.
    """
    out.mkdir()
    columns = pq.read_table(min(decided.glob("*.parquet")))

    def one(file: Path) -> None:
        read = 0
        with pq.ParquetWriter(out / file.name, columns.schema) as writer:
            for batch in pq.ParquetFile(file).iter_batches(2**16, use_threads=False):
                read += batch.num_rows
            writer.write_table(columns.slice(0, read))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, sorted(source.glob("*.parquet"))))


def copy(source: Path, out: Path) -> None:
    """pyarrow alone reads the columns that are decided and writes them again."""
    out.mkdir()

    def one(file: Path) -> None:
        table = pq.ParquetFile(file)
        with pq.ParquetWriter(out / file.name, table.schema_arrow) as writer:
            for group in range(table.num_row_groups):
                writer.write_table(table.read_row_group(group, use_threads=False))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, sorted(source.glob("*.parquet"))))


def run(task: str, *paths: Path, until: int | None = None) -> tuple[float, float, int]:
    """Seconds and peak MiB of a task in a process of its own, and its exit code; killed
    after `until` files.

    Seconds are those of the task, measured inside: imports of both sides count to
    neither.
    """
    command = [sys.executable, __file__, "--task", task, *map(str, paths)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while process.poll() is None and (
        until is None or len(list(paths[-1].glob("part*"))) <= until
    ):
        time.sleep(0.005)
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    said, _ = process.communicate()
    seconds, peak = map(float, said.split()) if said else (np.nan, np.nan)
    return seconds, peak, process.returncode


def timed(task: str, *paths: Path) -> tuple[float, float]:
    """The median time and the largest memory of some repeats; the last path is written,
    and removed before.
    """
    found = []
    for _ in range(REPEATS):
        shutil.rmtree(paths[-1], ignore_errors=True)
        seconds, peak, code = run(task, *paths)
        assert code == 0
        found.append((seconds, peak))
    return float(np.median([seconds for seconds, _ in found])), max(
        peak for _, peak in found
    )


def same(left: Path, right: Path) -> int:
    """How many rows of two results are equal."""
    files = sorted(file.name for file in left.glob("*.parquet"))
    assert files == sorted(file.name for file in right.glob("*.parquet"))
    return sum(
        _equal_rows(pq.read_table(left / name), pq.read_table(right / name))
        for name in files
    )


def _equal_rows(left: pa.Table, right: pa.Table) -> int:
    if left.column_names != right.column_names or len(left) != len(right):
        return 0
    columns = [
        (left[name].cast("string"), right[name].cast("string"))
        for name in left.column_names
    ]
    return int(
        np.all([np.asarray(a) == np.asarray(b) for a, b in columns], axis=0).sum()
    )


def in_memory(source: Path, decided: Path) -> int:
    """How many rows equal those of `Decider.explain` on the arrays of a file."""
    equal, made = 0, decider()
    actions = np.array(made.utility.actions)
    for file in sorted(source.glob("*.parquet")):
        table, written = pq.read_table(file), pq.read_table(decided / file.name)
        found = made.explain(
            np.stack([table[name].to_numpy() for name in NAMES], axis=1)
        )
        alike = written["id"].to_numpy() == table["id"].to_numpy()
        alike &= np.asarray(written["action"].cast("string")) == actions[found.action]
        values = written["expected_utility"].to_numpy().view(np.uint32)
        equal += int(
            (alike & (values == found.value.astype(np.float32).view(np.uint32))).sum()
        )
    return equal


def killed(source: Path, place: Path, whole: Path, files: int) -> tuple[list[int], int]:
    """kill -9 at random moments; the number of files that were complete then, and of
    rows that are right at the end.
    """
    out, rng, reached = place / "killed", random.Random(0), list[int]()
    for share in sorted(rng.uniform(0.05, 0.9) for _ in range(KILLS)):
        assert (
            run("decide", source, out, until=int(share * files))[2] == -signal.SIGKILL
        )
        reached.append(len(list(out.glob("part*"))))
    assert run("decide", source, out)[2] == 0
    return reached, same(out, whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--files", type=int, default=40)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--task", nargs="+")
    given = parser.parse_args()
    if given.task:
        import resource

        name, *paths = given.task
        if name == "decide":
            import rfdlc.lakes.decide  # noqa: F401
        started = time.perf_counter()
        tasks: dict[str, Any] = {
            "decide": decide,
            "read-and-write": read_and_write,
            "copy": copy,
        }
        tasks[name](*map(Path, paths))
        seconds = time.perf_counter() - started
        print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        rows, right = measure(Path(folder), given.rows, given.files)
    write("lake", rows, ["rfdlc", "numpy", "pyarrow"])
    sys.exit(not right)


def measure(place: Path, rows: int, files: int) -> tuple[list[Row], bool]:
    source, twice, out = place / "lake", place / "twice", place / "out"
    make(source, rows, files)
    doubled(source, twice)
    what = f"{rows:,} x 20 in {files} Parquet files"
    once, memory = timed("decide", source, out)
    both, more = timed("decide", twice, place / "out-twice")
    plain, _ = timed("read-and-write", source, out, place / "plain")
    copied, _ = timed("copy", source, place / "copied")
    equal = in_memory(source, out)
    reached, kept = killed(source, place, out, files)
    found: list[dict[str, Any]] = [
        {
            "what": (
                f"{what}: seconds, beside pyarrow reading and writing the same columns"
            ),
            "value": once,
            "reference": plain,
            "ratio": once / plain,
            "required": MOST_TIME,
        },
        {
            "what": (
                f"{what}: seconds, beside pyarrow copying the columns that are read"
            ),
            "value": once,
            "reference": copied,
            "ratio": once / copied,
            "required": MOST_TIME,
        },
        {
            "what": f"{what}: peak memory",
            "value": memory,
            "unit": "MiB",
            "required": MOST_MEMORY,
        },
        {
            "what": "twice the rows: peak memory",
            "value": more,
            "unit": "MiB",
            "reference": memory,
            "ratio": more / memory,
            "required": MOST_MEMORY,
        },
        {
            "what": "twice the rows: seconds",
            "value": both,
            "reference": once,
            "ratio": both / once,
        },
        {
            "what": f"{what}: rows equal to those in memory, bit for bit",
            "value": equal,
            "reference": rows,
        },
        {
            "what": (
                f"kill -9 after {', '.join(map(str, reached))} files, then to the end:"
                " rows as without kills"
            ),
            "value": kept,
            "reference": rows,
        },
    ]
    for row in found:
        row |= {
            key: f"{value:.4g}"
            for key, value in row.items()
            if isinstance(value, float)
        }
    right = (
        once <= MOST_TIME * plain
        and max(memory, more) <= MOST_MEMORY
        and equal == kept == rows
    )
    return found, right


if __name__ == "__main__":
    main()

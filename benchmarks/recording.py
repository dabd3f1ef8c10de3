"""What every benchmark writes: rows of a CSV file with the hardware, versions, commit
and date they come from.
"""

import csv
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rfdlc.formats.files import replacing

RESULTS = Path(__file__).parent / "results"
MEASURED = ("what", "value", "unit", "reference", "ratio", "required")


def hardware() -> str:
    """Processor, cores and, where there is one, the GPU."""
    names = [
        line.partition(":")[2].strip()
        for line in _processor_lines()
        if line.startswith(("model name", "Model name"))
    ]
    text = f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"
    try:
        gpu = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return text
    return f"{text}, {gpu}"


def versions(packages: Iterable[str]) -> str:
    """`python 3.11.7, numpy 2.4.6 ...`"""
    found = [f"python {platform.python_version()}"]
    for name in packages:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} absent")
    return ", ".join(found)


def commit() -> str:
    """The commit that was measured, marked where files differ from it."""
    try:
        head = _git("rev-parse", "--short=10", "HEAD")
        changed = _git(
            "status",
            "--porcelain",
            "--untracked-files=no",
            "--",
            "src",
            "benchmarks/*.py",
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed else "")


def write(
    name: str,
    rows: Iterable[dict[str, object]],
    packages: Iterable[str],
    measured: str = "",
    columns: Sequence[str] = MEASURED,
    before: Iterable[dict[str, object]] = (),
) -> Path:
    """Print the rows as a person reads them, then write `results/<name>.csv`;
    `measured` is the commit without git.

    Rows of earlier runs (`before`) come first, and keep their hardware, versions,
    commit and date.

    The file is replaced when all rows are there: a benchmark that was stopped leaves
    the old one.
    """
    common = {
        "hardware": hardware(),
        "versions": versions(packages),
        "commit": measured or commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.csv"
    found = [*before]
    for row in rows:
        found.append(row | common)
        print(
            "  ".join(f"{key} {value}" for key, value in row.items() if value != ""),
            flush=True,
        )
    with (
        replacing(path) as beside,
        open(beside, "w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.DictWriter(file, (*columns, *common))
        writer.writeheader()
        writer.writerows(found)
    return path


def append(path: Path, rows: Iterable[dict[str, Any]], columns: Sequence[str]) -> None:
    """Add rows to a file that grows while a long benchmark runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        if new:
            writer.writeheader()
        writer.writerows(rows)


def in_parallel(
    task: Callable[..., Any], arguments: Iterable[tuple[Any, ...]], workers: int
) -> Iterator[Any]:
    """Results of a task in the order of its arguments, from so many processes."""
    if workers == 1:
        yield from (task(*each) for each in arguments)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(task, *zip(*arguments, strict=True))


def _git(*words: str) -> str:
    folder = Path(__file__).parent.parent
    return subprocess.run(
        ["git", *words], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


def _processor_lines() -> list[str]:
    try:
        listed = subprocess.run(
            ["lscpu"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return listed.splitlines()

"""What the evidence keeps of a run: a record beside its files, a light copy, its row of
`runs.csv`.
"""

import json
import shutil
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from paper.grids import Wanted, run_settings
from rfdlc import InputError, Predictions
from rfdlc.formats.files import read_json, replacing

RECORD = (  # in the run folder: how long it took, and of which commit it is
    "experiment.json"
)


def write_record(
    folder: Path, data: Mapping[str, Any], of_commit: str, **took: float
) -> None:
    """Note of which data and commit a training is, and what it took where that is
    known: not if it was interrupted.
    """
    record = {
        **took,
        "data": data,
        "commit": of_commit or commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }
    with replacing(folder / RECORD) as beside:
        beside.write_text(json.dumps(record) + "\n", encoding="utf-8")


def copy_light(run: Path, to: Path) -> None:
    """A run folder without weights and checkpoints, its logits as float16."""
    beside = to.with_name(f".{to.name}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    for name in ("config.json", "classes.json", "environment.json", RECORD):
        shutil.copy(run / name, beside)
    for name in ("predictions.npz", "held-out.npz"):
        if (run / name).exists():
            found = Predictions.load(run / name)
            half = found.scores.values.astype(np.float16)
            classes = np.array(json.dumps(found.classes.to_dict()))
            assert found.targets is not None
            np.savez_compressed(
                beside / name, logits=half, targets=found.targets, classes=classes
            )
    shutil.rmtree(to, ignore_errors=True)
    beside.replace(to)


def check_same(run: Wanted, data: Mapping[str, Any], folder: Path) -> None:
    """A finished folder is refused where it is of other data than the grid's, or had
    another share held out.

    Its name says neither: a grid that was edited would be given metrics of what it was
    before.
    """
    wanted = float(run_settings(run)["hold_out"]), data
    record = read_json(folder / RECORD) if (folder / RECORD).exists() else {}
    found = (
        read_json(folder / "config.json")["settings"]["hold_out"],
        record.get("data", data),
    )
    for what, ours, theirs in zip(("hold_out =", "data ="), wanted, found, strict=True):
        if ours != theirs:
            raise InputError(
                f"{folder} was trained with {what} {theirs}, and the grid has {ours}:"
                " give the data another name ([data] name = ...), or other folders"
                " (--runs, --out, --logits)"
            )


def provenance(run: Wanted, folder: Path) -> dict[str, Any]:
    """The row of a run in `runs.csv`."""
    where, made = read_json(folder / "environment.json"), read_json(folder / RECORD)
    return {
        "run": run.name,
        "seed": run.seed,
        "method": run.method,
        "settings": " ".join(
            f"{key}={value}" for key, value in sorted(run.settings.items())
        ),
        **{name: value for name, value in made.items() if name != "data"},
        "hardware": where["gpu"] or f"CPU, {where['platform']}",
        "versions": ", ".join(
            f"{name} {where[name]}" for name in ("rfdlc", "python", "torch", "numpy")
        ),
    }


def commit() -> str:
    """Of the working tree this file lies in; nothing where there is no git."""
    words = ["git", "rev-parse", "--short=10", "HEAD"]
    try:
        return subprocess.run(
            words, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"

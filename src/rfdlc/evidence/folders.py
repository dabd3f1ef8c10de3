"""What the evidence keeps of a run: a record beside its files, a light copy, its row of `runs.csv`."""

import json
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from rfdlc.decide.predictions import Predictions
from rfdlc.evidence.grids import Wanted
from rfdlc.files import read_json, replacing

RECORD = "experiment.json"  # in the run folder: how long it took, and of which commit it is


def write_record(folder: Path, of_commit: str, **took: float) -> None:
    """Note of which commit a training is, and what it took as far as that is known: not where it was interrupted."""
    record = {
        **took,
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
            np.savez_compressed(beside / name, logits=half, targets=found.targets, classes=classes)
    shutil.rmtree(to, ignore_errors=True)
    beside.replace(to)


def provenance(run: Wanted, folder: Path) -> dict[str, Any]:
    """The row of a run in `runs.csv`."""
    where, made = read_json(folder / "environment.json"), read_json(folder / RECORD)
    return {
        "run": run.name,
        "seed": run.seed,
        "method": run.method,
        "settings": " ".join(f"{key}={value}" for key, value in sorted(run.settings.items())),
        **made,
        "hardware": where["gpu"] or f"CPU, {where['platform']}",
        "versions": ", ".join(f"{name} {where[name]}" for name in ("rfdlc", "python", "torch", "numpy")),
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

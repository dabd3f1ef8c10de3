"""predict: what a model says of any number of samples, written as it comes; what was killed goes on where it was."""

import hashlib
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rfdlc.data.samples import Samples
from rfdlc.decide.decider import Decider
from rfdlc.decide.predictions import Predictions
from rfdlc.decide.scores import BOOK_KEEPING, DECIDED
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError, choose
from rfdlc.files import replacing
from rfdlc.integrations.predict.formats import FORMATS, TEXTS, Columns
from rfdlc.integrations.predict.parts import Parts
from rfdlc.progress import live
from rfdlc.training.assembly import OwnBackbone
from rfdlc.training.model import Model

KINDS = (".npz", *FORMATS)
PART_ROWS, PART_VALUES = 4096, 2**22  # of a part, the smaller of the two: what a kill costs, and what is in memory


@dataclass(frozen=True)
class Predicted:
    """What was written: `samples` rows; `skipped` broken ones were left out, which `skipped_file` names.

    `complete` is False where other processes still have parts to do: the last one writes the file.
    """

    path: Path
    samples: int
    skipped: int
    complete: bool = True
    skipped_file: Path | None = None


def predict(
    run: str | Path,
    source: str | Path,
    out: str | Path,
    *,
    split: str | None = None,
    root: str | Path | None = None,
    utility: Utility | None = None,
    skip_broken: bool = False,
    backbone: OwnBackbone | None = None,
) -> Predicted:
    """Predict a folder or list of images, a table, arrays or a named data set, in constant memory, to one file.

    `.parquet` and `.csv` hold calibrated probabilities, one column a class, and with `utility` the action of highest
    expected utility; after a kill, the same call goes on where it was. Under torchrun each process does its share.
    `.npz` holds the logits of every particle, and is made in memory.
    """
    path = Path(out)
    kind = choose("kind of file", path.suffix.lower(), KINDS)
    rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    _check_kind(kind, world_size, utility)
    model = Model.load(run, backbone=backbone, device=_device())
    samples = model.open_samples(source, split=split, root=root, skip_broken=skip_broken)
    if kind == ".npz":
        return _whole(model, samples, path)
    table = Table(model, samples, utility)
    size = max(1, min(PART_ROWS, PART_VALUES // len(table.names)))
    job: dict[str, Any] = {"model": fingerprint(Path(run)), "source": samples.fingerprint}
    job |= {"utility": table.fingerprint, "columns": _digest(table.names)}
    job |= {"number of samples": len(samples), "size of parts": size}
    parts = Parts(path, FORMATS[kind], len(samples), size, job)
    parts.open()
    try:
        _work(table, parts, parts.share(rank, world_size), shown=rank == 0)
    except InputError:
        if world_size == 1:  # others may be at work on their first parts
            parts.leave()
        raise
    return _finished(parts, table.names)


class Table:
    """From samples to the columns of the file."""

    def __init__(self, model: Model, samples: Samples, utility: Utility | None) -> None:
        self.model, self.samples = model, samples
        self.decider: Decider = model.decider if utility is None else model.decider.replace(utility=utility)
        self.decides = utility is not None
        classes = model.classes.names
        clash = [name for name in classes if name in (*BOOK_KEEPING, *DECIDED)]
        if clash:
            raise InputError(f"a class is called {clash[0]!r}, as a column of the table is: write .npz instead")
        self.names = [
            *(["id"] if samples.named else []),
            *classes,
            *(["target"] if samples.labelled else []),
            *(DECIDED if self.decides else ()),
        ]

    @property
    def fingerprint(self) -> str:
        """Of the utility that is decided by."""
        utility = self.decider.utility
        return _digest([*utility.actions, utility.matrix.tolist()]) if self.decides else "none"

    def part(self, rows: range) -> tuple[Columns, list[str]]:
        """The columns of these rows, and what was wrong with those that were left out."""
        pieces, broken = [], list[str]()
        for predictions, piece in self.model.predict_pieces(self.samples, rows):
            broken += piece.broken
            if predictions is not None:
                pieces.append(self._columns(predictions))
        return {name: _joined(name, [piece[name] for piece in pieces]) for name in self.names}, broken

    def _columns(self, found: Predictions) -> dict[str, Any]:
        probabilities = np.asarray(self.decider.probabilities(found), dtype=np.float32)
        columns: dict[str, Any] = {name: probabilities[:, i] for i, name in enumerate(found.classes.names)}
        columns["id"] = [] if found.ids is None else found.ids.tolist()
        if self.samples.labelled and found.targets is not None:
            columns["target"] = list(found.classes.select(found.targets))
        if self.decides:
            explained = self.decider.explain(found)
            columns["action"] = [self.decider.utility.actions[i] for i in explained.action]
            columns["expected_utility"] = np.asarray(explained.value, dtype=np.float32)
        return columns


def _joined(name: str, pieces: Sequence[Any]) -> Sequence[str] | NDArray[np.float32]:
    if name in TEXTS:
        return [text for piece in pieces for text in piece]
    return np.concatenate([np.empty(0, dtype=np.float32), *pieces])


def _work(table: Table, parts: Parts, mine: Sequence[int], *, shown: bool) -> None:
    total = sum(len(parts.rows(part)) for part in mine)
    bar = live(parts.count, "Predicting", parts.count - total) if shown else nullcontext(lambda steps, text: None)
    with bar as show:
        for part in mine:
            rows = parts.rows(part)
            parts.write(part, *table.part(rows))
            show(len(rows), f"{rows.stop:,} of {parts.count:,}")


def _finished(parts: Parts, names: Sequence[str]) -> Predicted:
    complete = parts.merge(names) or not parts.folder.exists()
    skipped = 0
    if complete and parts.skipped.exists():
        with parts.skipped.open("rb") as file:
            skipped = sum(1 for _ in file)
    file_of_skipped = parts.skipped if skipped else None
    return Predicted(parts.out, parts.count - skipped, skipped, complete, file_of_skipped)


def _whole(model: Model, samples: Samples, path: Path) -> Predicted:
    """Logits of every particle, in memory."""
    found = model.predict_samples(samples)
    with replacing(path) as beside:
        found.save(beside)
    return Predicted(path, len(found), len(samples) - len(found))


def _check_kind(kind: str, world_size: int, utility: Utility | None) -> None:
    if world_size > 1 and kind != ".parquet":
        raise InputError(f"{world_size} processes write one file together in Parquet alone: choose .parquet")
    if kind != ".npz":
        FORMATS[kind].check()
    elif utility is not None:
        raise InputError(
            "a utility decides for tables: write .parquet or .csv, or decide later with `rfdlc decide FILE.npz`"
        )


def _device() -> str:
    """Under torchrun each process of a machine has a GPU of its own."""
    local = os.environ.get("LOCAL_RANK")
    if local is None or not torch.cuda.is_available():
        return "auto"
    return f"cuda:{int(local) % torch.cuda.device_count()}"


def fingerprint(run: Path) -> str:
    """Of all that a run's predictions depend on."""
    weights = run / "model.safetensors"
    digest = hashlib.sha256()
    for file in (weights if weights.exists() else run / "last.ckpt", run / "decider.json", run / "config.json"):
        digest.update(file.read_bytes() if file.exists() else b"")
    return digest.hexdigest()[:32]


def _digest(values: Sequence[Any]) -> str:
    return hashlib.sha256(repr(list(values)).encode()).hexdigest()[:32]

"""predict: predictions of any number of samples, written as they come; after a kill, the same call continues.

The table is written in parts, in a folder beside the file that they become. Parts carry the hash of their job in their
names, so that those of another model or source are never joined.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rfdlc.data.samples import Samples
from rfdlc.decide.predictions import Predictions
from rfdlc.decide.priors import PriorEstimate, PriorLike
from rfdlc.decide.rules import largest
from rfdlc.decide.scores import BOOK_KEEPING, CORRECTED, DECIDED, KIND, RAW
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError, choose, expect, listing
from rfdlc.files import locked, read_json, replacing
from rfdlc.progress import live
from rfdlc.tables import open_writer
from rfdlc.training.model import Model, OwnBackbone

KINDS = (".npz", ".parquet", ".csv")
MOST_ESTIMATED, BLOCKS = 20_000, 20  # samples from which a class prior is estimated, and where they are taken from
PART_ROWS, PART_VALUES = 4096, 2**22  # of a part, the smaller of the two: what a kill costs, and what is in memory
JOB = "job.json"
SKIPPED, MADE_BY = b"rfdlc.skipped", b"rfdlc.job"  # keys of metadata in Parquet files
REPEATED = ("target", "action", KIND)  # columns of text with few different values
TEXTS = ("id", *REPEATED)  # all other columns hold numbers
GROUP_ROWS, GROUP_VALUES = 2**16, 2**24  # of a row group in the file, the smaller of the two


@dataclass(frozen=True)
class Predicted:
    """What was written."""

    path: Path
    samples: int  # rows of the file
    skipped: int  # broken samples that were left out
    decided_for: str  # the class prior, in words
    complete: bool = True  # False where other processes still have parts to do: the last one writes the file
    skipped_file: Path | None = None  # names the broken samples


def predict(
    run: str | Path, source: str | Path, out: str | Path, *, split: str | None = None, root: str | Path | None = None,
    utility: Utility | None = None, target_prior: PriorLike | None = None, raw: bool = False,
    skip_broken: bool = False, allow_links: bool = False, backbone: OwnBackbone | None = None,
) -> Predicted:  # fmt: skip
    """Predict any number of samples in constant memory, and write one file; after a kill, the same call continues.

    Parameters
    ----------
    run, source
        The run folder; a folder or list of images, one image, a table, arrays, or the name of a data set.
    out
        `.parquet` or `.csv`: calibrated probabilities and the decided action. `.npz`: logits, computed in memory.
    split, root
        `train`, `val` or `test`, by default the last that the source has; the folder in which to find the source.
    utility, target_prior
        What a table is decided for, by default as the run; the prior "estimate" is estimated from these samples.
    raw
        Write the model's own probabilities to a table, for a decider to calibrate and correct later.
    skip_broken, allow_links
        Leave out and list images that cannot be read; accept links that leave a folder of images.
    backbone
        The backbone of a run that was trained with one of your own.

    Returns
    -------
    Predicted
        The file and the number of samples in it.
    """
    path, kind = Path(out), choose("kind of file", Path(out).suffix.lower(), KINDS)
    asked = {"utility": utility, "target prior": target_prior, "raw": raw}
    rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    alone = world_size == 1 or kind == ".parquet"
    expect(alone, f"{world_size} processes write one file together in Parquet alone: choose .parquet")
    given = listing([name for name, value in asked.items() if value is not None and value is not False])
    tables = f"{given}: for tables, but {path} holds logits; write .parquet or .csv, or decide it with `rfdlc decide`"
    expect(not given or kind != ".npz", tables)
    model = Model.load(run, backbone=backbone, device=_device())
    where: dict[str, Any] = {"split": split, "root": root, "allow_links": allow_links}
    samples = model.open_samples(source, skip_broken=skip_broken, **where)
    if target_prior is not None:
        estimated = isinstance(target_prior, str) and target_prior == "estimate"
        model.decider = model.decider.replace(target_prior=_estimated(model, samples) if estimated else target_prior)
    if kind == ".npz":
        found = model.predict_samples(samples)
        with replacing(path) as beside:
            found.save(beside)
        return Predicted(path, len(found), len(samples) - len(found), model.decider.decided_for)
    table = Table(model, samples, utility, raw)
    size = max(1, min(PART_ROWS, PART_VALUES // len(table.schema)))
    job: dict[str, Any] = {"model": _fingerprint(Path(run)), "source": samples.fingerprint}
    prior = model.decider.decided_prior  # to four digits: an estimated one has the rounding of the device
    job |= {"prior": None if prior is None else [float(f"{share:.4g}") for share in prior]}
    job |= {"utility": table.decider.utility.to_dict()}
    job |= {"columns": table.schema.names, "kind of scores": table.kind}
    job |= {"number of samples": len(samples), "size of parts": size}
    parts = Parts(path, table.schema, len(samples), size, job)
    with parts.opened(rank, world_size) as mine:
        share = sum(len(parts.rows(part)) for part in range(rank, parts.number, world_size))
        done = share - sum(len(parts.rows(part)) for part in mine)
        try:
            with live(
                share, "Predicting" if world_size == 1 else f"Predicting, 1 of {world_size} shares", done
            ) as show:
                for part in mine:
                    parts.write(part, *table.part(rows := parts.rows(part)))
                    done += len(rows)
                    show(len(rows), f"{done:,} of {share:,}")
        except InputError:
            if world_size == 1:  # others may be at work on their first parts
                parts.leave()
            raise
        complete = parts.join() or not parts.folder.exists()
    skipped = parts.skipped.read_bytes().count(b"\n") if complete and parts.skipped.exists() else 0
    listed, prior = parts.skipped if skipped else None, model.decider.decided_for
    return Predicted(path, len(samples) - skipped, skipped, prior, complete, listed)


class Table:
    """From samples to the columns of the file."""

    def __init__(self, model: Model, samples: Samples, utility: Utility | None, raw: bool) -> None:
        import pyarrow

        self.model, self.samples, self.kind = model, samples, RAW if raw else CORRECTED
        self.decider = decider = model.decider.replace(utility=utility)
        self.written = decider.replace(fitted=None, train_prior=None, target_prior=None) if raw else decider
        matrix = decider.utility.matrix  # a product with the identity is left out: it is slow for many classes
        self.one_hot = decider.rule == "expected-utility" and np.array_equal(matrix, np.eye(*matrix.shape))
        classes = model.classes.names
        clash = listing(set(classes) & {*BOOK_KEEPING, *DECIDED, KIND})
        expect(not clash, f"a class is called {clash}, as a column of the table is: write .npz instead")
        known = {"id": samples.named, "target": samples.labelled}
        names = [name for name in ("id", *classes, "target", *DECIDED, KIND) if known.get(name, True)]
        prior = decider.train_prior if raw else decider.decided_prior
        carried = None if prior is None else dict(zip(classes, prior.tolist(), strict=True))
        self.schema = pyarrow.schema(
            [(name, pyarrow.string() if name in TEXTS else pyarrow.float32()) for name in names],
            {"rfdlc.scores": json.dumps({"scores": self.kind, "prior": carried}, ensure_ascii=False)},
        )

    def part(self, rows: range) -> tuple[Any, list[str]]:
        """These rows as a `pyarrow.Table`, and what was wrong with those that were left out."""
        import pyarrow

        pieces, broken = [self.schema.empty_table()], list[str]()
        for predictions, piece in self.model.predict_pieces(self.samples, rows):
            broken += piece.broken
            if predictions is not None:
                pieces.append(pyarrow.table(self._columns(predictions), self.schema))
        return pyarrow.concat_tables(pieces), broken

    def _columns(self, found: Predictions) -> dict[str, Any]:
        corrected = np.asarray(self.decider.probabilities(found))
        written = corrected if self.written is self.decider else np.asarray(self.written.probabilities(found))
        chosen, values = largest(corrected), corrected.max(axis=1)
        if not self.one_hot:
            explained = self.decider.explain_probabilities(corrected)
            chosen, values = explained.action, explained.value
        columns: dict[str, Any] = dict(zip(found.classes.names, written.T.astype(np.float32), strict=True))
        columns |= {"action": [self.decider.utility.actions[i] for i in chosen], KIND: [self.kind] * len(found)}
        columns |= {"expected_utility": np.asarray(values, dtype=np.float32), "id": found.ids}
        if found.targets is not None:
            columns["target"] = found.classes.select(found.targets)
        return {name: columns[name] for name in self.schema.names}


class Parts:
    """Rows 0 to `count` in parts of `size`, Parquet files that are complete or not there; `job` says what they are."""

    def __init__(self, out: Path, schema: Any, count: int, size: int, job: Mapping[str, Any]) -> None:
        self.out, self.count, self.size, self.job = out, count, size, json.loads(json.dumps(job))
        self.folder, self.skipped = out.with_name(f"{out.name}.parts"), out.with_name(f"{out.name}.skipped.txt")
        self._hash = sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:16]
        self._schema = schema.with_metadata({**(schema.metadata or {}), MADE_BY: self._hash})
        self._files = [self.folder / f"part-{self._hash}-{part:08d}.parquet" for part in range(-(-count // size))]
        self.number = len(self._files)
        self._parent = out.absolute().parent  # where processes wait for each other: it is always there

    @contextmanager
    def opened(self, rank: int = 0, world_size: int = 1) -> Iterator[list[int]]:
        """Begin or continue this job; gives the parts to do by this process. Only those of the job write meanwhile."""
        with ExitStack() as locks:
            with locked(self._parent):
                try:
                    self.folder.mkdir(exist_ok=True)
                except OSError as error:
                    raise InputError(f"{self.folder}: cannot be created ({error.strerror})") from None
                granted = locks.enter_context(locked(self.folder, wait=False, shared=world_size > 1))
                expect(granted, f"{self.out}: another process is writing it; wait, or choose another file")
                if world_size > 1 and self._is_written():
                    self._remove()
                    mine = []
                else:
                    self._check_same()
                    with replacing(self.folder / JOB) as beside:
                        beside.write_text(json.dumps(self.job, indent=1), encoding="utf-8")
                    mine = [part for part in self._missing() if part % world_size == rank]
            yield mine

    def rows(self, part: int) -> range:
        """The rows of a part."""
        return range(part * self.size, min(self.count, (part + 1) * self.size))

    def write(self, part: int, table: Any, broken: Sequence[str]) -> None:
        """Write one finished part, with what was wrong with the samples that were left out of it."""
        lines = "".join(f"{' '.join(text.split())}\n" for text in broken).encode("utf-8", "surrogateescape")
        schema = self._schema.with_metadata({**self._schema.metadata, SKIPPED: lines})
        with replacing(self._files[part]) as beside, open_writer(beside, schema, ".parquet") as writer:
            writer.write_table(table.cast(schema))

    def join(self) -> bool:
        """Join all parts to the file and remove the folder; False where some are missing, or another process did it."""
        with locked(self._parent):
            if JOB not in self._names() or self._missing():
                return False
            joined = self.folder / f"joined{self.out.suffix}"
            with replacing(joined) as beside:
                skipped = self._join(beside)
            self.skipped.unlink(missing_ok=True)
            if skipped:
                with replacing(self.skipped) as beside:
                    beside.write_bytes(skipped)
            os.replace(joined, self.out)
            self._remove()
        return True

    def leave(self) -> None:
        """Remove the folder where no part was finished: it would only bar other jobs."""
        with locked(self._parent):
            if self._names() <= {JOB}:
                self._remove()

    def _join(self, path: Path) -> bytes:
        """Write all parts to one file; returns what was wrong with the samples that were left out."""
        from pyarrow import concat_tables

        parts, skipped = range(len(self._files)), b""
        group = max(1, min(GROUP_ROWS, GROUP_VALUES // len(self._schema)) // self.size)  # parts of a row group
        with open_writer(path, self._schema, self.out.suffix.lower(), REPEATED) as writer:
            for first in parts[::group]:
                tables = [self._read(part) for part in parts[first : first + group]]
                skipped += b"".join(table.schema.metadata.get(SKIPPED, b"") for table in tables)
                writer.write_table(concat_tables(table.cast(self._schema) for table in tables))
        return skipped

    def _read(self, part: int) -> Any:
        """A part as a table; raises where rows of it are lost."""
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table

        file, again = self._files[part], "remove it, and run the command again"
        try:
            table = read_table(file, memory_map=False)
        except (OSError, ArrowException) as error:
            raise InputError(f"{file}: cannot be read ({error}); {again}") from None
        found = table.num_rows + (table.schema.metadata or {}).get(SKIPPED, b"").count(b"\n")
        expect(
            found == len(self.rows(part)), f"{file}: holds {found} samples, expected {len(self.rows(part))}; {again}"
        )
        return table

    def _check_same(self) -> None:
        names = self._names()
        begun = read_json(self.folder / JOB) if JOB in names else self.job
        other = ", another ".join(name for name in self.job if begun.get(name) != self.job[name])
        fix = f"or remove the folder to start over (rm -r '{self.folder}')"
        told = f"{self.folder} was begun with another {other}: run the command that it was begun with to continue"
        expect(not other, f"{told}, {fix}")
        ours = all(name.startswith((".", "part-", "joined", JOB)) for name in names)
        expect(ours, f"{self.folder} holds other files: move them, or choose another name for the predictions")
        same = all(self._hash in name for name in names if name.startswith("part-"))
        expect(same, f"{self.folder} holds parts of another job: choose another name for the file, {fix}")

    def _is_written(self) -> bool:
        """Whether the file is there, made by this job."""
        from pyarrow import ArrowException
        from pyarrow.parquet import read_schema

        with suppress(OSError, ArrowException):  # it is not there, or somebody else's
            return (read_schema(self.out).metadata or {}).get(MADE_BY) == self._hash.encode()
        return False

    def _names(self) -> set[str]:
        return set(os.listdir(self.folder)) if self.folder.exists() else set()

    def _missing(self) -> list[int]:
        """The parts that are still to be done."""
        names = self._names()
        return [part for part, file in enumerate(self._files) if file.name not in names]

    def _remove(self) -> None:
        """The description of the job goes last: without it, the parts would seem to be somebody else's."""
        for name in sorted(self._names(), key=JOB.__eq__):
            os.unlink(self.folder / name)
        if self.folder.exists():
            self.folder.rmdir()


def _estimated(model: Model, samples: Samples) -> PriorEstimate:
    """The class prior of the samples; of many, from blocks that are spread evenly."""
    blocks = 1 if len(samples) <= MOST_ESTIMATED else BLOCKS
    size = min(len(samples), MOST_ESTIMATED) // blocks
    starts = np.linspace(0, len(samples) - size, blocks).astype(int).tolist()
    pieces = (piece for start in starts for piece in model.predict_pieces(samples, range(start, start + size)))
    logits = [predictions.scores.values for predictions, _ in pieces if predictions is not None]
    return model.decider.estimate_prior(np.concatenate(logits, axis=1), logits=True)


def _device() -> str:
    """Under torchrun each process of a machine has a GPU of its own."""
    local, gpus = os.environ.get("LOCAL_RANK"), torch.cuda.device_count()
    return f"cuda:{int(local) % gpus}" if local is not None and gpus else "auto"


def _fingerprint(run: Path) -> str:
    """Of all that a run's predictions depend on."""
    weights = "model.safetensors" if (run / "model.safetensors").exists() else "last.ckpt"
    files = [run / name for name in (weights, "decider.json", "config.json")]
    return sha256(b"".join(file.read_bytes() for file in files if file.exists())).hexdigest()[:32]

"""Parts: a large result, computed part by part; after a kill, the same call continues.

Parts lie in a folder beside the file that they become. They carry the hash of their job
in their names, so that those of another model or source are never joined.
"""

import json
import os
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rfdlc.errors import InputError, expect
from rfdlc.formats.arrays import open_rows, read_header
from rfdlc.formats.files import locked, read_json, replacing
from rfdlc.formats.table_writing import open_writer
from rfdlc.formats.threads import ahead
from rfdlc.progress import live

JOB = "job.json"
SKIPPED, MADE_BY = b"rfdlc.skipped", b"rfdlc.job"  # keys of metadata in Parquet files
GROUP_ROWS, GROUP_VALUES = (
    2**16,
    2**24,
)  # of a row group in a Parquet file, the smaller of the two
AGAIN = "remove it, and run the command again"

Computed = tuple[
    Any, Sequence[str]
]  # the rows of a part, and what was wrong with the samples that were left out
Report = Callable[[int], None]
Compute = Callable[[Sequence[range], Report], Iterator[Computed]]


class Store(Protocol):
    """The format of parts and of the file that they become."""

    @property
    def suffix(self) -> str:
        """Of the files of parts."""

    def begin(self, path: Path | None, count: int = 0) -> None:
        """All `count` rows are going to be written in order: they may be joined at
        `path` meanwhile; None: no more.
        """

    def write(self, path: Path, rows: Any, skipped: bytes) -> None:
        """Write the rows of a part, and a line for each sample that was left
        out of it.
        """

    def join(
        self, files: Sequence[Path], sizes: Sequence[int], path: Path, job: str
    ) -> bytes:
        """Write parts of these numbers of samples to one file; returns the lines of all
        of them.
        """

    def job_of(self, path: Path) -> str | None:
        """The hash of the job that wrote a file, where it says so."""


class Parts:
    """Samples 0 to `count` in parts of `size`, files that are complete or not there;
    `job` says what they are.
    """

    def __init__(
        self, out: Path, store: Store, count: int, size: int, job: Mapping[str, Any]
    ) -> None:
        job = {**job, "number of samples": count, "size of parts": size}
        self.out, self.store, self.count, self.size = out, store, count, size
        self.job = json.loads(json.dumps(job))
        self.folder, self._list = (
            out.with_name(f"{out.name}.parts"),
            out.with_name(f"{out.name}.skipped.txt"),
        )
        self._hash = sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:16]
        self._numbers = range(-(-count // size))
        self._files = [
            self.folder / f"part-{self._hash}-{part:08d}{store.suffix}"
            for part in self._numbers
        ]
        self._parent = (
            out.absolute().parent
        )  # where processes wait for each other: it is always there

    def fill(self, compute: Compute, description: str) -> bool:
        """Compute the missing parts, and join all; False where other processes still
        have parts to do.

        `compute` gets the rows of several parts and yields each in turn; it reports how
        many samples it has done by a function. Under torchrun, processes share the
        parts.
        """
        rank, world_size = ranks()
        with self.opened(rank, world_size) as mine:
            own = sum(len(self.rows(part)) for part in self._numbers[rank::world_size])
            done = own - sum(len(self.rows(part)) for part in mine)
            share = f", 1 of {world_size} shares" if world_size > 1 else ""
            begun = self.folder / f"joined-begun{self.out.suffix}"
            if mine == list(self._numbers):
                self.store.begin(begun, self.count)
            elif world_size == 1:
                begun.unlink(missing_ok=True)  # of a process that was killed
            try:
                with live(own, f"{description}{share}", done) as show:

                    def report(samples: int) -> None:
                        nonlocal done
                        done += samples
                        show(samples, f"{done:,} of {own:,}")

                    computed = zip(
                        mine, compute([self.rows(i) for i in mine], report), strict=True
                    )
                    for _ in ahead(
                        lambda each: self.write(each[0], *each[1]), computed, 1
                    ):
                        pass
            except InputError:
                if world_size == 1:  # others may be at work on their first parts
                    self.leave()
                raise
            else:
                return self.join() or not self.folder.exists()
            finally:
                self.store.begin(None)

    @property
    def skipped(self) -> tuple[int, Path | None]:
        """The number of samples that were left out, and the file that lists them."""
        lines = self._list.read_bytes().count(b"\n") if self._list.exists() else 0
        return lines, self._list if lines else None

    @contextmanager
    def opened(self, rank: int = 0, world_size: int = 1) -> Iterator[list[int]]:
        """Begin or continue this job; gives the parts to do by this process. Only those
        of the job write meanwhile.
        """
        with ExitStack() as locks:
            with locked(self._parent):
                try:
                    self.folder.mkdir(exist_ok=True)
                except OSError as error:
                    raise InputError(
                        f"{self.folder}: cannot be created ({error.strerror})"
                    ) from None
                granted = locks.enter_context(
                    locked(self.folder, wait=False, shared=world_size > 1)
                )
                expect(
                    granted,
                    f"{self.out}: another process is writing it; wait, or choose"
                    " another file",
                )
                if world_size > 1 and self.store.job_of(self.out) == self._hash:
                    self._remove()
                    mine = []
                else:
                    self._check_same()
                    with replacing(self.folder / JOB) as beside:
                        beside.write_text(
                            json.dumps(self.job, indent=1), encoding="utf-8"
                        )
                    mine = [
                        part for part in self._missing() if part % world_size == rank
                    ]
            yield mine

    def rows(self, part: int) -> range:
        """The rows of a part."""
        return range(part * self.size, min(self.count, (part + 1) * self.size))

    def write(self, part: int, rows: Any, broken: Sequence[str]) -> None:
        """Write one finished part, with what was wrong with the samples that were left
        out of it.
        """
        lines = "".join(f"{' '.join(text.split())}\n" for text in broken).encode(
            "utf-8", "surrogateescape"
        )
        with replacing(self._files[part]) as beside:
            self.store.write(beside, rows, lines)

    def join(self) -> bool:
        """Join all parts to the file and remove the folder; False where some are
        missing, or another process did it.
        """
        with locked(self._parent):
            if JOB not in self._names() or self._missing():
                return False
            joined, sizes = (
                self.folder / f"joined{self.out.suffix}",
                [len(self.rows(i)) for i in self._numbers],
            )
            with replacing(joined) as beside:
                skipped = self.store.join(self._files, sizes, beside, self._hash)
            self._list.unlink(missing_ok=True)
            if skipped:
                with replacing(self._list) as beside:
                    beside.write_bytes(skipped)
            os.replace(joined, self.out)
            self._remove()
        return True

    def leave(self) -> None:
        """Remove the folder where no part was finished: it would only bar other
        jobs.
        """
        with locked(self._parent):
            if self._names() <= {JOB}:
                self._remove()

    def _check_same(self) -> None:
        names = self._names()
        begun = read_json(self.folder / JOB) if JOB in names else self.job
        other = ", ".join(
            name for name in self.job if begun.get(name) != self.job[name]
        )
        fix = f"or remove the folder to start over (rm -r '{self.folder}')"
        told = (
            f"{self.folder} was begun with other settings ({other}): run that command"
            " to continue"
        )
        expect(not other, f"{told}, {fix}")
        ours = all(name.startswith((".", "part-", "joined", JOB)) for name in names)
        expect(
            ours,
            f"{self.folder} holds other files: move them, or choose another name for"
            " the result",
        )
        same = all(self._hash in name for name in names if name.startswith("part-"))
        expect(
            same,
            f"{self.folder} holds parts of another job: choose another name for the"
            f" file, {fix}",
        )

    def _names(self) -> set[str]:
        return set(os.listdir(self.folder)) if self.folder.exists() else set()

    def _missing(self) -> list[int]:
        """The parts that are still to be done."""
        names = self._names()
        return [part for part, file in enumerate(self._files) if file.name not in names]

    def _remove(self) -> None:
        """The description of the job goes last: without it, the parts would seem to be
        somebody else's.
        """
        for name in sorted(self._names(), key=JOB.__eq__):
            os.unlink(self.folder / name)
        if self.folder.exists():
            self.folder.rmdir()


@dataclass(frozen=True)
class TableStore:
    """Tables of pyarrow: parts in Parquet, the file in Parquet or CSV. `repeated` are
    columns with few values.

    Parts may have `more` columns, from which `settle` finds what all rows together
    decide: it takes the parts, and returns a function for each of them in turn.
    """

    schema: Any
    kind: str  # of the file: .parquet or .csv
    repeated: Sequence[str] = ()
    values: int = 0  # per row, where columns hold lists
    suffix: str = ".parquet"
    more: Any = ()  # fields of pyarrow
    settle: Callable[[Iterator[Any]], Callable[[Any], Any]] | None = None
    actions: Counter[str] = field(
        default_factory=Counter
    )  # of the rows that were joined, where they have some

    def begin(self, path: Path | None, count: int = 0) -> None:
        pass

    def write(self, path: Path, rows: Any, skipped: bytes) -> None:
        import pyarrow

        metadata = {**(self.schema.metadata or {}), SKIPPED: skipped}
        schema = pyarrow.schema([*self.schema, *self.more], metadata)
        with open_writer(path, schema, self.suffix) as writer:
            writer.write_table(rows.cast(schema))

    def join(
        self, files: Sequence[Path], sizes: Sequence[int], path: Path, job: str
    ) -> bytes:
        from pyarrow import concat_tables

        skipped, schema = (
            b"",
            self.schema.with_metadata({**(self.schema.metadata or {}), MADE_BY: job}),
        )
        group = max(
            1,
            min(GROUP_ROWS, GROUP_VALUES // max(self.values, len(schema)))
            // max(1, *sizes, 1),
        )
        both = list(zip(files, sizes, strict=True))
        settled = (
            None
            if self.settle is None
            else self.settle(self._read(*each) for each in both)
        )
        with open_writer(path, schema, self.kind, self.repeated) as writer:
            for first in range(0, len(files), group):
                tables = [
                    self._read(file, size) for file, size in both[first : first + group]
                ]
                skipped += b"".join(
                    table.schema.metadata.get(SKIPPED, b"") for table in tables
                )
                tables = tables if settled is None else list(map(settled, tables))
                for table in tables if "action" in schema.names else ():
                    self.actions.update(
                        {
                            r["values"]: r["counts"]
                            for r in table["action"].value_counts().to_pylist()
                        }
                    )
                writer.write_table(
                    concat_tables(
                        table.select(schema.names).cast(schema) for table in tables
                    )
                )
        return skipped

    def job_of(self, path: Path) -> str | None:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_schema

        with suppress(OSError, ArrowException):  # it is not there, or somebody else's
            return str((read_schema(path).metadata or {}).get(MADE_BY, b"").decode())
        return None

    def _read(self, file: Path, size: int) -> Any:
        """A part as a table; raises where rows of it are lost."""
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table

        try:
            table = read_table(file, memory_map=False)
        except (OSError, ArrowException) as error:
            raise InputError(f"{file}: cannot be read ({error}); {AGAIN}") from None
        _check_count(
            file,
            table.num_rows
            + (table.schema.metadata or {}).get(SKIPPED, b"").count(b"\n"),
            size,
        )
        return table


@dataclass
class ArrayStore:
    """Arrays with one entry per row, in an `.npz` file that is written without holding
    them in memory.

    The array `split` says which arrays of the file a row belongs to: `train_x`,
    `test_x`, ...; those of a row without a split are called as they are. `constants`
    are written beside them. Rows `x` of one split are joined as they come.
    """

    constants: Mapping[str, Any]
    suffix: str = ".npz"
    _begun: "Begun | None" = None

    def begin(self, path: Path | None, count: int = 0) -> None:
        if self._begun is not None:
            self._begun.close()
            self._begun.path.unlink(
                missing_ok=True
            )  # of no use, unless `join` has moved it
        self._begun = Begun(path, count) if path is not None and count else None

    def write(self, path: Path, rows: Any, skipped: bytes) -> None:
        with path.open("wb") as file:  # numpy would add a suffix to the path
            np.savez(file, **rows, skipped=np.frombuffer(skipped, np.uint8))
        if self._begun is not None and (
            skipped or not self._begun.add(rows["x"], rows["split"])
        ):
            self.begin(None)

    def join(
        self, files: Sequence[Path], sizes: Sequence[int], path: Path, job: str
    ) -> bytes:
        skipped, splits = b"", list[Any]()
        kinds: dict[
            str, tuple[tuple[int, ...], np.dtype[Any]]
        ] = {}  # shape of an entry, and type
        for file, size in zip(files, sizes, strict=True):
            with _opened(file) as part:
                lines, found = part["skipped"].tobytes(), part["split"]
                _check_count(file, len(found) + lines.count(b"\n"), size)
                skipped, splits = skipped + lines, [*splits, found]
                for name in set(part.files) - {"skipped", "split"}:
                    with part.zip.open(f"{name}.npy") as member:
                        shape, _, dtype = read_header(member)
                    kinds[name] = (
                        shape[1:],
                        np.promote_types(kinds.get(name, (shape, dtype))[1], dtype),
                    )  # texts
        with self._begun or zipfile.ZipFile(path, "w", allowZip64=True) as archive:
            there = archive.namelist()
            for split in dict.fromkeys(
                text for part in splits for text in np.unique(part).tolist()
            ):
                rows = [part == split for part in splits]
                for name, (shape, dtype) in kinds.items():
                    called = _called(name, split)
                    if called in there:
                        continue
                    with archive.open(called, "w", force_zip64=True) as member:
                        _write_header(
                            member, (int(sum(map(np.sum, rows))), *shape), dtype
                        )
                        for file, own in zip(files, rows, strict=True):
                            if own.any():
                                found = open_rows(file, name)[0 : len(own)]
                                found = (found if own.all() else found[own]).astype(
                                    dtype, copy=False
                                )
                                member.write(found.reshape(-1).view(np.uint8))
            for name, value in self.constants.items():
                with archive.open(f"{name}.npy", "w") as member:
                    np.lib.format.write_array(member, np.asarray(value))
        if self._begun is not None:
            os.replace(self._begun.path, path)
        return skipped

    def job_of(self, path: Path) -> str | None:
        return None  # of several processes, none knows whether the file is theirs


class Begun:
    """An `.npz` file whose array `x` is written while its rows are computed: all
    `count` of them, of one split.
    """

    def __init__(self, path: Path, count: int) -> None:
        self.path, self.count = path, count
        self.archive: Any = None
        self.member: Any = None
        self.split = ""

    def add(self, rows: NDArray[Any], splits: NDArray[Any]) -> bool:
        """False where these rows are of another split, so that the file is of
        no use.
        """
        if self.archive is None:
            self.split, self.archive = (
                str(splits[0]),
                zipfile.ZipFile(self.path, "w", allowZip64=True),
            )
            self.member = self.archive.open(
                _called("x", self.split), "w", force_zip64=True
            )
            _write_header(self.member, (self.count, *rows.shape[1:]), rows.dtype)
        self.member.write(rows.reshape(-1).view(np.uint8))
        return bool((splits == self.split).all())

    def __enter__(self) -> zipfile.ZipFile:
        self.member.close()
        archive: zipfile.ZipFile = self.archive
        return archive

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        for file in (self.member, self.archive) if self.archive is not None else ():
            file.close()


def _write_header(file: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """What precedes the content of an array in numpy's format."""
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": shape,
    }
    np.lib.format.write_array_header_2_0(file, header)


def _called(name: str, split: str) -> str:
    return f"{split}_{name}.npy" if split else f"{name}.npy"


def ranks() -> tuple[int, int]:
    """The rank of this process and the number of processes, as torchrun sets them."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _check_count(file: Path, found: int, size: int) -> None:
    expect(found == size, f"{file}: holds {found} samples, expected {size}; {AGAIN}")


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with np.load(file, allow_pickle=False) as found:
            yield found
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"{file}: cannot be read ({error}); {AGAIN}") from None

"""Parts: a large result, computed part by part; after a kill, the same call continues.

Parts lie in a resumable folder beside the file that they become. They carry the hash of
their job in their names, so that those of another model or source are never joined.
"""

import json
import os
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rfdlc.errors import InputError
from rfdlc.formats.arrays import open_rows, read_header
from rfdlc.formats.files import replacing
from rfdlc.formats.resumable import ResumableFolder, ranks, share_of
from rfdlc.formats.table_writing import open_writer
from rfdlc.formats.threads import ahead
from rfdlc.progress import live

# Keys of metadata in Parquet files
SKIPPED = b"rfdlc.skipped"
MADE_BY = b"rfdlc.job"
# A row group of a Parquet file has no more than either.
GROUP_ROWS = 2**16
GROUP_VALUES = 2**24
AGAIN = "remove it, and run the command again"

# The rows of a part, and what was wrong with the samples that were left out
Computed = tuple[Any, Sequence[str]]
Kind = tuple[tuple[int, ...], np.dtype[Any]]  # shape of an entry, and type
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

    def write(self, stream: Any, rows: Any, skipped: bytes) -> None:
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
    """Samples 0 to `count` in parts of `size`, which are joined to one file when all
    are there; `job` says what they are.
    """

    def __init__(
        self, out: Path, store: Store, count: int, size: int, job: Mapping[str, Any]
    ) -> None:
        job = {**job, "number of samples": count, "size of parts": size}
        self.out, self.store, self.count, self.size = out, store, count, size
        self._hash = sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:16]
        self._numbers = range(-(-count // size))
        self._names = [
            f"part-{self._hash}-{part:08d}{store.suffix}" for part in self._numbers
        ]
        self._list = out.with_name(f"{out.name}.skipped.txt")
        self._path = out.with_name(f"{out.name}.parts")
        self._folder = ResumableFolder(
            self._path, job, result=out, only_of_job=self._names
        )

    def fill(self, compute: Compute, description: str) -> bool:
        """Compute the missing parts, and join all; False where other processes still
        have parts to do.

        `compute` gets the rows of several parts and yields each in turn; it reports how
        many samples it has done by a function. Under torchrun, processes share the
        parts.
        """
        share = share_of(self._numbers)
        with self._opened() as missing:
            mine = [part for part in share if part in missing]
            if mine == list(self._numbers):
                begun = f".begun{self.out.suffix}.{os.getpid()}.part"
                self.store.begin(self._path / begun, self.count)
            try:
                self._compute(mine, share, compute, description)
                return self.join() or not self._folder.exists()
            finally:
                self.store.begin(None)

    @property
    def skipped(self) -> tuple[int, Path | None]:
        """The number of samples that were left out, and the file that lists them."""
        if not self._list.exists():
            return 0, None
        return self._list.read_bytes().count(b"\n"), self._list

    def rows(self, part: int) -> range:
        """The rows of a part."""
        return range(part * self.size, min(self.count, (part + 1) * self.size))

    def write(self, part: int, rows: Any, broken: Sequence[str]) -> None:
        """Write one finished part, with what was wrong with the samples that were left
        out of it.
        """
        lines = "".join(f"{' '.join(text.split())}\n" for text in broken)
        with self._folder.replacing(self._names[part]) as stream:
            self.store.write(stream, rows, lines.encode("utf-8", "surrogateescape"))

    def join(self) -> bool:
        """Join all parts to the file and remove the folder; False where some are
        missing, or another process did it.
        """
        with self._folder.turn():
            if not self._folder.exists() or self._missing(self._folder.names()):
                return False
            files = [self._path / name for name in self._names]
            sizes = [len(self.rows(part)) for part in self._numbers]
            joined = self._path / f"joined{self.out.suffix}"
            with replacing(joined) as beside:
                skipped = self.store.join(files, sizes, beside, self._hash)
            self._list.unlink(missing_ok=True)
            if skipped:
                with replacing(self._list) as beside:
                    beside.write_bytes(skipped)
            os.replace(joined, self.out)
            self._folder.remove()
        return True

    @contextmanager
    def _opened(self) -> Iterator[set[int]]:
        """Begin or continue the job; gives the parts that are missing."""
        with self._folder.opened() as names:
            if ranks()[1] > 1 and self.store.job_of(self.out) == self._hash:
                # Other processes have joined all parts before this one came.
                with self._folder.turn():
                    self._folder.remove()
                yield set()
            else:
                yield self._missing(names)

    def _missing(self, names: set[str]) -> set[int]:
        return {part for part in self._numbers if self._names[part] not in names}

    def _compute(
        self,
        mine: Sequence[int],
        share: Sequence[int],
        compute: Compute,
        description: str,
    ) -> None:
        """Write the parts in `mine`, which are missing of the share of this process."""
        world_size = ranks()[1]
        if world_size > 1:
            description = f"{description}, 1 of {world_size} shares"
        total = sum(len(self.rows(part)) for part in share)
        done = total - sum(len(self.rows(part)) for part in mine)
        with live(total, description, done) as show:

            def report(samples: int) -> None:
                nonlocal done
                done += samples
                show(samples, f"{done:,} of {total:,}")

            def write(numbered: tuple[int, Computed]) -> None:
                part, (rows, broken) = numbered
                self.write(part, rows, broken)

            computed = compute([self.rows(part) for part in mine], report)
            for _ in ahead(write, zip(mine, computed, strict=True), 1):
                pass


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
    # of the rows that were joined, where they have some
    actions: Counter[str] = field(default_factory=Counter)

    def begin(self, path: Path | None, count: int = 0) -> None:
        pass

    def write(self, stream: Any, rows: Any, skipped: bytes) -> None:
        import pyarrow

        metadata = {**(self.schema.metadata or {}), SKIPPED: skipped}
        schema = pyarrow.schema([*self.schema, *self.more], metadata)
        with open_writer(stream, schema, self.suffix) as writer:
            writer.write_table(rows.cast(schema))

    def join(
        self, files: Sequence[Path], sizes: Sequence[int], path: Path, job: str
    ) -> bytes:
        from pyarrow import concat_tables

        schema = self.schema.with_metadata(
            {**(self.schema.metadata or {}), MADE_BY: job}
        )
        sized = list(zip(files, sizes, strict=True))
        settled = None
        if self.settle is not None:
            settled = self.settle(self._read(file, size) for file, size in sized)
        skipped = b""
        group = self._parts_in_group(sizes)
        with open_writer(path, schema, self.kind, self.repeated) as writer:
            for first in range(0, len(files), group):
                tables = []
                for file, size in sized[first : first + group]:
                    table = self._read(file, size)
                    skipped += table.schema.metadata.get(SKIPPED, b"")
                    if settled is not None:
                        table = settled(table)
                    self._count_actions(table)
                    tables.append(table.select(schema.names).cast(schema))
                writer.write_table(concat_tables(tables))
        return skipped

    def job_of(self, path: Path) -> str | None:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_schema

        with suppress(OSError, ArrowException):  # it is not there, or somebody else's
            return str((read_schema(path).metadata or {}).get(MADE_BY, b"").decode())
        return None

    def _parts_in_group(self, sizes: Sequence[int]) -> int:
        """How many parts become a row group."""
        columns = max(self.values, len(self.schema))
        rows = min(GROUP_ROWS, GROUP_VALUES // columns)
        return max(1, rows // max([1, *sizes]))

    def _count_actions(self, table: Any) -> None:
        if "action" not in self.schema.names:
            return
        for row in table["action"].value_counts().to_pylist():
            self.actions[row["values"]] += row["counts"]

    def _read(self, file: Path, size: int) -> Any:
        """A part as a table; raises where rows of it are lost."""
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table

        try:
            table = read_table(file, memory_map=False)
        except (OSError, ArrowException) as error:
            raise InputError(f"{file}: cannot be read ({error}); {AGAIN}") from None
        skipped = (table.schema.metadata or {}).get(SKIPPED, b"")
        _check_count(file, table.num_rows + skipped.count(b"\n"), size)
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
            # It is of no use, unless `join` has moved it.
            self._begun.path.unlink(missing_ok=True)
        self._begun = Begun(path, count) if path is not None and count else None

    def write(self, stream: Any, rows: Any, skipped: bytes) -> None:
        np.savez(stream, **rows, skipped=np.frombuffer(skipped, np.uint8))
        if self._begun is not None and (
            skipped or not self._begun.add(rows["x"], rows["split"])
        ):
            self.begin(None)

    def join(
        self, files: Sequence[Path], sizes: Sequence[int], path: Path, job: str
    ) -> bytes:
        skipped = b""
        splits = list[NDArray[Any]]()  # of the rows of each part
        kinds: dict[str, Kind] = {}
        for file, size in zip(files, sizes, strict=True):
            with _opened(file) as part:
                lines = part["skipped"].tobytes()
                splits.append(part["split"])
                _check_count(file, len(splits[-1]) + lines.count(b"\n"), size)
                skipped += lines
                _add_kinds(kinds, part)
        names = (text for part in splits for text in np.unique(part).tolist())
        with self._begun or zipfile.ZipFile(path, "w", allowZip64=True) as archive:
            written = archive.namelist()
            for split in dict.fromkeys(names):
                rows = [part == split for part in splits]
                for name, kind in kinds.items():
                    if _called(name, split) in written:
                        continue
                    with archive.open(
                        _called(name, split), "w", force_zip64=True
                    ) as member:
                        _join_arrays(member, name, kind, files, rows)
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
        self.path = path
        self.count = count
        self.archive: Any = None
        self.member: Any = None
        self.split = ""

    def add(self, rows: NDArray[Any], splits: NDArray[Any]) -> bool:
        """False where these rows are of another split, so that the file is of
        no use.
        """
        if self.archive is None:
            self.split = str(splits[0])
            self.archive = zipfile.ZipFile(self.path, "w", allowZip64=True)
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
        if self.archive is not None:
            self.member.close()
            self.archive.close()


def _add_kinds(kinds: dict[str, Kind], part: Any) -> None:
    """Add the shapes and types of the arrays of a part; texts grow with the longest."""
    for name in set(part.files) - {"skipped", "split"}:
        with part.zip.open(f"{name}.npy") as member:
            shape, _, dtype = read_header(member)
        if name in kinds:
            dtype = np.promote_types(kinds[name][1], dtype)
        kinds[name] = shape[1:], dtype


def _join_arrays(
    member: Any,
    name: str,
    kind: Kind,
    files: Sequence[Path],
    rows: Sequence[NDArray[np.bool_]],
) -> None:
    """Write the chosen rows of an array of all parts, one part after another."""
    shape, dtype = kind
    count = sum(int(chosen.sum()) for chosen in rows)
    _write_header(member, (count, *shape), dtype)
    for file, chosen in zip(files, rows, strict=True):
        if not chosen.any():
            continue
        values = open_rows(file, name)[0 : len(chosen)]
        if not chosen.all():
            values = values[chosen]
        member.write(values.astype(dtype, copy=False).reshape(-1).view(np.uint8))


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


def _check_count(file: Path, count: int, size: int) -> None:
    if count != size:
        raise InputError(f"{file}: holds {count} samples, expected {size}; {AGAIN}")


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with np.load(file, allow_pickle=False) as arrays:
            yield arrays
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"{file}: cannot be read ({error}); {AGAIN}") from None

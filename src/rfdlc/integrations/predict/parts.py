"""Parts: a table that is written piece by piece, in a folder beside the file that the pieces become.

Parts carry the hash of their job in their names, so that those of another model or source are never joined.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from rfdlc.errors import InputError
from rfdlc.files import alone, claimed, read_json, replacing
from rfdlc.tables import open_writer

JOB = "job.json"
SKIPPED, MADE_BY = b"rfdlc.skipped", b"rfdlc.job"  # keys of metadata in Parquet files
GROUP_ROWS, GROUP_VALUES = 2**16, 2**24  # of a row group in the file, the smaller of the two


class Parts:
    """Rows 0 to `count` in parts of `size`; each is a Parquet file that is complete or not there.

    `job` describes what makes it this job and no other; `schema` is that of the file, `repeated` its columns of text
    with few different values.
    """

    def __init__(
        self, out: Path, schema: Any, count: int, size: int, job: Mapping[str, Any], repeated: Sequence[str] = ()
    ) -> None:
        self.out, self.count, self.size, self.job, self.repeated = out, count, size, job, repeated
        self.folder = out.with_name(f"{out.name}.parts")
        self.skipped = out.with_name(f"{out.name}.skipped.txt")
        self._parts = range(-(-count // size))
        self._hash = sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:16]
        self.schema = schema.with_metadata({**(schema.metadata or {}), MADE_BY: self._hash})

    @contextmanager
    def opened(self, rank: int = 0, world_size: int = 1) -> Iterator[list[int]]:
        """Begin, or continue what is there if it is the same job; gives the parts that this process has to do.

        Meanwhile no other process writes the file, except for those that share the job.
        """
        with ExitStack() as claims:
            with self._alone():
                try:
                    self.folder.mkdir(exist_ok=True)
                except OSError as error:
                    raise InputError(f"{self.folder}: cannot be created ({error.strerror})") from None
                if not claims.enter_context(claimed(self.folder, shared=world_size > 1)):
                    raise InputError(f"{self.out}: another process is writing it; wait, or choose another file")
                if world_size > 1 and self._is_written():
                    self._remove()
                    mine = []
                else:
                    self._check_same()
                    with replacing(self.folder / JOB) as beside:
                        beside.write_text(json.dumps(self.job, indent=1), encoding="utf-8")
                    mine = [part for part in self.missing() if part % world_size == rank]
            yield mine

    def _alone(self) -> AbstractContextManager[None]:
        return alone(self.out.absolute().parent)

    def rows(self, part: int) -> range:
        """The rows of a part."""
        return range(part * self.size, min(self.count, (part + 1) * self.size))

    def missing(self) -> list[int]:
        """The parts that are still to be done."""
        there = self._there()
        return [part for part in self._parts if self._file(part).name not in there]

    def write(self, part: int, table: Any, broken: Sequence[str]) -> None:
        """Write one finished part, with what was wrong with the samples that were left out of it."""
        lines = "".join(f"{' '.join(text.split())}\n" for text in broken).encode("utf-8", "surrogateescape")
        schema = self.schema.with_metadata({**self.schema.metadata, SKIPPED: lines})
        with replacing(self._file(part)) as beside, open_writer(beside, schema, kind=".parquet") as writer:
            writer.write_table(table.cast(schema))

    def join(self) -> bool:
        """Join all parts to the file and remove the folder; False where some are missing, or another process did it.

        Killed at any instant, the folder is still there and the next process joins them again.
        """
        with self._alone():
            if not (self.folder / JOB).exists() or self.missing():
                return False
            skipped = b"".join(self._checked(part) for part in self._parts)
            self.skipped.unlink(missing_ok=True)
            if skipped:
                with replacing(self.skipped) as beside:
                    beside.write_bytes(skipped)
            joined = self.folder / f"joined{self.out.suffix}"
            with replacing(joined) as beside:
                self._join(beside)
            os.replace(joined, self.out)
            self._remove()
        return True

    def _join(self, path: Path) -> None:
        from pyarrow import concat_tables
        from pyarrow.parquet import read_table

        group = max(1, min(GROUP_ROWS, GROUP_VALUES // len(self.schema)) // self.size)  # parts of a row group
        with open_writer(path, self.schema, kind=self.out.suffix.lower(), repeated=self.repeated) as writer:
            for first in self._parts[::group]:
                tables = [read_table(self._file(part), memory_map=False) for part in self._parts[first : first + group]]
                writer.write_table(concat_tables(table.cast(self.schema) for table in tables))

    def _checked(self, part: int) -> bytes:
        """What was left out of a part; raises where rows of it are lost."""
        from pyarrow import ArrowException
        from pyarrow.parquet import read_metadata

        file = self._file(part)
        try:
            found = read_metadata(file)
        except (OSError, ArrowException) as error:
            raise InputError(f"{file}: cannot be read ({error}); remove it, and run the command again") from None
        skipped = (found.metadata or {}).get(SKIPPED, b"")
        rows, expected = found.num_rows + skipped.count(b"\n"), len(self.rows(part))
        if rows != expected:
            raise InputError(f"{file}: holds {rows} samples, expected {expected}; remove it, and run the command again")
        return skipped

    def leave(self) -> None:
        """Remove the folder where no part was finished: it would only bar other jobs."""
        with self._alone():
            if self._there() <= {JOB}:
                self._remove()

    def _check_same(self) -> None:
        names = self._there()
        begun = read_json(self.folder / JOB) if JOB in names else None
        other = [name for name in self.job if begun is not None and begun.get(name) != self.job[name]]
        again = f"or remove the folder to start over (rm -r '{self.folder}')"
        if other:
            raise InputError(
                f"{self.folder} was begun with another {', another '.join(other)}: run the command that it was begun "
                f"with to continue, {again}"
            )
        if any(not name.startswith((".", "part-", "joined")) and name != JOB for name in names):
            raise InputError(f"{self.folder} holds other files: move them, or choose another name for the predictions")
        if any(name.startswith("part-") and self._hash not in name for name in names):
            raise InputError(f"{self.folder} holds parts of another job: choose another name for the file, {again}")

    def _is_written(self) -> bool:
        """Whether the file is there, made by this job."""
        from pyarrow import ArrowException
        from pyarrow.parquet import read_schema

        with suppress(OSError, ArrowException):  # it is not there, or somebody else's
            return (read_schema(self.out).metadata or {}).get(MADE_BY) == self._hash.encode()
        return False

    def _there(self) -> set[str]:
        with suppress(FileNotFoundError):
            return set(os.listdir(self.folder))
        return set()

    def _remove(self) -> None:
        """The description of the job goes last: without it, the parts would seem to be somebody else's."""
        for name in self._there() - {JOB}:
            os.unlink(self.folder / name)
        (self.folder / JOB).unlink(missing_ok=True)
        if self.folder.exists():
            self.folder.rmdir()

    def _file(self, part: int) -> Path:
        return self.folder / f"part-{self._hash}-{part:08d}.parquet"

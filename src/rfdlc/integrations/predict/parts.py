"""Parts: a table that is written piece by piece, in a folder beside the file that the pieces become.

Parts carry the hash of their job in their names, so that those of another model or source are never joined.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from rfdlc.errors import InputError, expect
from rfdlc.files import locked, read_json, replacing
from rfdlc.tables import open_writer

JOB = "job.json"
SKIPPED, MADE_BY = b"rfdlc.skipped", b"rfdlc.job"  # keys of metadata in Parquet files
REPEATED = ("target", "action", "rfdlc_scores")  # columns of text with few different values
GROUP_ROWS, GROUP_VALUES = 2**16, 2**24  # of a row group in the file, the smaller of the two


class Parts:
    """Rows 0 to `count` in parts of `size`; each is a Parquet file that is complete or not there.

    `job` describes what makes it this job and no other; `schema` is that of the file.
    """

    def __init__(self, out: Path, schema: Any, count: int, size: int, job: Mapping[str, Any]) -> None:
        self.out, self.count, self.size, self.job = out, count, size, json.loads(json.dumps(job))
        self.folder, self.skipped = out.with_name(f"{out.name}.parts"), out.with_name(f"{out.name}.skipped.txt")
        self._hash = sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:16]
        self._schema = schema.with_metadata({**(schema.metadata or {}), MADE_BY: self._hash})
        self._files = [self.folder / f"part-{self._hash}-{part:08d}.parquet" for part in range(-(-count // size))]
        self._parent = out.absolute().parent  # where processes wait for each other: it is always there

    @contextmanager
    def opened(self, rank: int = 0, world_size: int = 1) -> Iterator[list[int]]:
        """Begin, or continue what is there if it is the same job; gives the parts that this process has to do.

        Meanwhile no other process writes the file, except for those that share the job.
        """
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
        """Join all parts to the file and remove the folder; False where some are missing, or another process did it.

        Killed at any instant, the folder is still there and the next process joins them again.
        """
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

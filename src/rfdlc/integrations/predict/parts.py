"""Parts: a folder of finished parts beside the file that they will become. What is in it is never done twice."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rfdlc.errors import InputError
from rfdlc.files import alone, replacing
from rfdlc.integrations.predict.formats import Columns, Format

JOB = "job.json"


class Parts:
    """Rows 0 to `count` in parts of `size`. A part is a file that is whole or not there, whoever wrote it.

    `job` says what makes it this job and no other: {what: its value}.
    """

    def __init__(self, out: Path, layout: Format, count: int, size: int, job: Mapping[str, Any]) -> None:
        self.out, self.layout, self.count, self.size, self.job = out, layout, count, size, job
        self.folder = out.with_name(f"{out.name}.parts")
        self.skipped = out.with_name(f"{out.name}.skipped.txt")

    def open(self) -> None:
        """Begin, or go on with what is there, if it is the same job. Several processes may do so at once."""
        place = self.folder / JOB
        if place.exists():
            self._check_same(json.loads(place.read_text(encoding="utf-8")))
            return
        strangers = [entry for entry in self._there() if not entry.startswith((".", "part-", JOB))]
        if strangers:
            raise InputError(f"{self.folder} holds other files: move them, or choose another name for the predictions")
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise InputError(f"{self.folder}: cannot be made ({error.strerror})") from None
        with replacing(place) as beside:
            beside.write_text(json.dumps(self.job, indent=1), encoding="utf-8")

    def _check_same(self, begun: Mapping[str, Any]) -> None:
        other = [name for name in self.job if begun.get(name) != self.job[name]]
        if other:
            raise InputError(
                f"{self.folder} was begun with another {', another '.join(other)}: run the command that it was begun "
                f"with to go on, or remove the folder to start anew (rm -r '{self.folder}')"
            )

    def share(self, rank: int, world_size: int) -> list[int]:
        """The parts that this process has to do: none where others had finished everything before it began."""
        with alone(self.folder / JOB):
            if world_size > 1 and self.layout.note(self.out) == self._note:
                self._remove()
                return []
            return [part for part in self.missing() if part % world_size == rank]

    @property
    def _note(self) -> str:
        return json.dumps(self.job, sort_keys=True)

    def _there(self) -> set[str]:
        try:
            return set(os.listdir(self.folder))
        except FileNotFoundError:
            return set()

    def rows(self, part: int) -> range:
        """The rows of a part."""
        return range(part * self.size, min(self.count, (part + 1) * self.size))

    def missing(self) -> list[int]:
        """The parts that are still to be done."""
        there = self._there()
        return [part for part in range(-(-self.count // self.size)) if self._file(part).name not in there]

    def write(self, part: int, columns: Columns, broken: Sequence[str]) -> None:
        """One finished part; what was left out of it comes first, so that a part that is there is all there."""
        if broken:
            with replacing(self._skipped(part)) as beside:
                beside.write_text("".join(f"{' '.join(text.split())}\n" for text in broken), "utf-8", "surrogateescape")
        with replacing(self._file(part)) as beside:
            self.layout.write(beside, columns)

    def merge(self, names: Sequence[str]) -> bool:
        """Put everything together and remove the folder. False where another process has done so, or some are missing.

        Killed at any instant, the folder is still there and the next one merges again.
        """
        with alone(self.folder / JOB):
            if not (self.folder / JOB).exists() or self.missing():
                return False
            parts = range(-(-self.count // self.size))
            skipped = [self._skipped(part) for part in parts if self._skipped(part).exists()]
            self.skipped.unlink(missing_ok=True)
            if skipped:
                with replacing(self.skipped) as beside, beside.open("wb") as file:
                    file.writelines(part.read_bytes() for part in skipped)
            merged = self.folder / f"merged{self.out.suffix}"
            with replacing(merged) as beside:
                self.layout.merge((self._file(part) for part in parts), names, beside, self._note)
            os.replace(merged, self.out)
            self._remove()
        return True

    def leave(self) -> None:
        """Where no part was finished there is nothing to go on with: remove the folder, which would bar other jobs."""
        with alone(self.folder / JOB):
            if self._there() <= {JOB}:
                self._remove()

    def _remove(self) -> None:
        """The job's description last: without it the folder would be somebody else's."""
        for name in self._there() - {JOB}:
            os.unlink(self.folder / name)
        (self.folder / JOB).unlink(missing_ok=True)
        if self.folder.exists():
            self.folder.rmdir()

    def _file(self, part: int) -> Path:
        return self.folder / f"part-{part:08d}{self.out.suffix}"

    def _skipped(self, part: int) -> Path:
        return self.folder / f"part-{part:08d}.skipped.txt"

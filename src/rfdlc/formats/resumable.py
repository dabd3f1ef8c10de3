"""A folder that one job fills file by file; after a kill, the same job continues.

A file is complete or absent. A description of the job lies beside the files, so that
another job is refused. Where the folder is local, only one process writes to it, or
the processes that torchrun started, which share the files among them.
"""

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    suppress,
)
from pathlib import Path
from typing import Any, TypeVar

from rfdlc.errors import InputError, listing
from rfdlc.formats.files import locked, parse_json, reason_of
from rfdlc.formats.filesystems import files_below, filesystem

JOB = "_rfdlc.json"  # the description; readers of data sets skip names that begin so
Item = TypeVar("Item")


def ranks() -> tuple[int, int]:
    """The rank of this process and the number of processes, as torchrun sets them."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def share_of(items: Sequence[Item]) -> Sequence[Item]:
    """Those of all items that this process does, where several share them."""
    rank, world_size = ranks()
    return items[rank::world_size]


class ResumableFolder:
    """The folder, local or remote, of the files that a job writes.

    Parameters
    ----------
    place : str or Path
        The folder or its URL.
    job : mapping
        What the files depend on, ready for JSON.
    result : str or Path, optional
        What errors call the result; by default the folder.
    only_of_job : collection of str
        Names that no other job gives to files. Files of other names are somebody
        else's, where the description of the job is missing.
    """

    def __init__(
        self,
        place: str | Path,
        job: Mapping[str, Any],
        *,
        result: str | Path | None = None,
        only_of_job: Collection[str] = (),
    ) -> None:
        self.place = str(place)
        self.result = self.place if result is None else str(result)
        self.job = json.loads(json.dumps(job))
        self.only_of_job = frozenset(only_of_job)
        self.system, self.path = filesystem(self.place)
        self._shared = ranks()[1] > 1

    @contextmanager
    def opened(self) -> Iterator[set[str]]:
        """Begin the job, or continue it; gives the names of the files that are there.

        Other jobs cannot write meanwhile.
        """
        with ExitStack() as stack:
            with self.turn():
                is_of_user = self.exists() and JOB not in self._paths()
                self._create()
                granted = stack.enter_context(
                    self._locked(Path(self.path), wait=False, shared=self._shared)
                )
                if not granted:
                    raise InputError(
                        f"{self.result}: another process is writing it; wait, or choose"
                        " another name"
                    )
                names = self.names()
                self._check_job(names)
                if not self._shared:
                    self._remove_unfinished()
                with self.replacing(JOB) as stream:
                    stream.write(json.dumps(self.job, ensure_ascii=False).encode())
            try:
                yield names
            except InputError:
                if not self._shared:  # others may be at work on their first files
                    self._leave(is_of_user)
                raise

    def turn(self) -> AbstractContextManager[bool]:
        """One process at a time opens a local folder, or completes and removes it."""
        return self._locked(Path(self.path).parent)  # which is always there

    def exists(self) -> bool:
        """Whether the job was begun, and its folder not removed."""
        from pyarrow.fs import FileType

        info = self.system.get_file_info(self.path)
        return bool(info.type == FileType.Directory)

    def names(self) -> set[str]:
        """The files that are complete, by their paths below the folder."""
        return {
            name
            for name in self._paths()
            if not name.rpartition("/")[2].startswith((".", "_"))
        }

    @contextmanager
    def replacing(self, name: str) -> Iterator[Any]:
        """A stream to a hidden file, which takes the place of the named one only when
        all went well.
        """
        subfolder, _, last = name.rpartition("/")
        folder = f"{self.path}/{subfolder}".rstrip("/")
        beside = f"{folder}/.{last}.{os.getpid()}.part"
        try:
            if subfolder:
                self.system.create_dir(folder, recursive=True)
            with self.system.open_output_stream(beside) as stream:
                yield stream
            self.system.move(beside, f"{folder}/{last}")
        except BaseException as error:
            with suppress(OSError):
                self.system.delete_file(beside)
            if isinstance(error, OSError) and not isinstance(error, InterruptedError):
                raise InputError(
                    f"{self.place}/{name}: cannot be written ({reason_of(error)}):"
                    " check it, and start again"
                ) from None
            raise

    def open(self, name: str) -> Any:
        """A file that is there, to be read."""
        return self.system.open_input_file(f"{self.path}/{name}")

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        with suppress(OSError):
            self.system.delete_file(f"{self.path}/{name}")

    def remove(self) -> None:
        """Remove the folder with all that this job alone wrote.

        The description goes last: without it, the files would seem to be somebody
        else's. What is somebody else's stays.
        """
        self._remove_unfinished()
        for name in self.names() & self.only_of_job:
            self.delete(name)
        self.delete(JOB)
        is_local = self.system.type_name == "local"  # others may have no folders
        if is_local and self.exists() and not self._paths():
            self.system.delete_dir(self.path)

    def _create(self) -> None:
        try:
            self.system.create_dir(self.path, recursive=True)
        except OSError as error:
            raise InputError(
                f"{self.place}: cannot be created ({reason_of(error)}): choose another"
                " folder"
            ) from None

    def _locked(
        self, place: Path, *, wait: bool = True, shared: bool = False
    ) -> AbstractContextManager[bool]:
        if self.system.type_name != "local":
            return nullcontext(True)
        return locked(place, wait=wait, shared=shared)

    def _check_job(self, names: set[str]) -> None:
        """Raise where the folder holds files of another job, or of somebody else."""
        begun = self._description()
        if begun is None:
            foreign = sorted(names - self.only_of_job)
            if foreign:
                raise InputError(
                    f"{self.place} holds other files ({listing(foreign)}): move them,"
                    " or choose another name for the result"
                )
            return
        changed = [name for name in self.job if begun.get(name) != self.job[name]]
        if changed:
            raise InputError(
                f"{self.place} was begun with other settings ({', '.join(changed)}):"
                " run that command to continue, or remove the folder to start over"
            )

    def _description(self) -> dict[str, Any] | None:
        """The job that began the folder, if there is one."""
        if JOB not in self._paths():
            return None
        with self.open(JOB) as file:
            content = file.read()
        try:
            job = parse_json(content)
            if not isinstance(job, dict):
                raise ValueError("it is no JSON object")
        except ValueError as error:
            raise InputError(
                f"{self.place}/{JOB}: cannot be read ({error}); remove the folder to"
                " start over"
            ) from None
        return job

    def _leave(self, is_of_user: bool) -> None:
        """Forget the job where no file was finished: it would only bar other jobs."""
        with self.turn():
            if self.names():
                return
            if is_of_user:
                self.delete(JOB)
            else:
                self.remove()

    def _remove_unfinished(self) -> None:
        """Delete what killed processes left of files that they were writing."""
        for name in self._paths():
            last = name.rpartition("/")[2]
            if last.startswith(".") and last.endswith(".part"):
                self.delete(name)

    def _paths(self) -> list[str]:
        """All files, by their paths below the folder."""
        return [
            info.path.removeprefix(f"{self.path}/")
            for info in files_below(self.system, self.path)
        ]

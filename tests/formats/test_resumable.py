"""Folders that a killed job continues: nothing is lost or taken from others."""

import os
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from rfdlc import Decider, InputError, Utility
from rfdlc.formats import resumable
from rfdlc.formats.resumable import JOB, ResumableFolder
from rfdlc.lakes.decide import decide_lake
from rfdlc.lakes.reading import Lake
from rfdlc.predicting.parts import ArrayStore, Parts, TableStore

COUNT = 10
CHANGING = ("create_dir", "open_output_stream", "move", "delete_file", "delete_dir")


class Killed(BaseException):
    """What no code waits for."""


class Steps:
    """Counts what changes a disk; from a number on, nothing changes it any more."""

    def __init__(self, killed_at):
        self.killed_at, self.done = killed_at, 0

    def dying(self, function):
        def counted(*given, **named):
            if self.done == self.killed_at:
                raise Killed
            self.done += 1
            return function(*given, **named)

        return counted


class DyingSystem:
    """A file system of pyarrow that takes part in a kill."""

    def __init__(self, system, steps):
        self.system, self.steps = system, steps

    def __getattr__(self, name):
        method = getattr(self.system, name)
        return self.steps.dying(method) if name in CHANGING else method


@contextmanager
def killed(at):
    """A process that is killed before it changes the disk for the time `at`; gives
    whether it was.
    """
    steps, happened = Steps(at), []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("replace", "unlink"):
            patch.setattr(os, name, steps.dying(getattr(os, name)))
        opened = resumable.filesystem

        def dying(place):
            system, path = opened(place)
            return DyingSystem(system, steps), path

        patch.setattr(resumable, "filesystem", dying)
        try:
            yield happened
        except Killed:
            happened.append(True)


def contents(folder):
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def table_parts(out):
    schema = pa.schema([("row", pa.int64())])

    def compute(parts, report):
        for rows in parts:
            report(len(rows))
            some = [row for row in rows if row != 4]
            yield pa.table({"row": some}, schema), ["row 4 is broken"] * (4 in rows)

    return Parts(out, TableStore(schema, ".parquet"), COUNT, 4, {"of": "rows"}), compute


def array_parts(out):
    def compute(parts, report):
        for rows in parts:
            report(len(rows))
            yield {"x": np.array(rows), "split": np.full(len(rows), "")}, []

    return Parts(out, ArrayStore({}), COUNT, 4, {"of": "rows"}), compute


@pytest.mark.parametrize(
    ("kind", "jobs"), [("parquet", table_parts), ("npz", array_parts)]
)
def test_parts_killed_at_any_step_become_the_same_file(tmp_path, kind, jobs):
    """Before each change of the disk in turn, and again in the second call."""
    (tmp_path / "whole").mkdir()
    parts, compute = jobs(tmp_path / "whole" / f"p.{kind}")
    assert parts.fill(compute, "Rows")
    expected = contents(tmp_path / "whole")
    assert len(expected) == 1 + (kind == "parquet")  # with the list of what is left out
    for step in range(1000):
        folder = tmp_path / str(step)
        folder.mkdir()
        for _ in range(2):
            with killed(step) as happened:
                parts, compute = jobs(folder / f"p.{kind}")
                parts.fill(compute, "Rows")
        parts, compute = jobs(folder / f"p.{kind}")
        assert parts.fill(compute, "Rows")
        assert contents(folder) == expected
        assert not (folder / f"p.{kind}.parts").exists()
        if not happened:
            break
    assert step > 10


def lake_of(folder):
    rng = np.random.default_rng(0)
    for name in ("a", "year=2026/b", "year=2026/c"):
        p = rng.dirichlet([2, 1], 5)
        file = folder / f"{name}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"cat": p[:, 0], "dog": p[:, 1]}), file)
    return folder


def decider(wrong=-5):
    return Decider(Utility([[1, 0], [wrong, 1]], ["cat", "dog"]))


def test_lakes_killed_at_any_step_are_decided_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("rfdlc.lakes.decide.cores", lambda: 1)
    lake = lake_of(tmp_path / "lake")
    decide_lake(lake, tmp_path / "whole", decider())
    expected = contents(tmp_path / "whole")
    assert len(expected) == 4
    for step in range(1000):
        out = tmp_path / str(step)
        with killed(step) as happened:
            decide_lake(lake, out, decider())
        whole = {name for name in expected if (out / name).exists()} - {JOB}
        result = decide_lake(lake, out, decider())
        assert (result.samples, result.before) == (15, len(whole))
        assert contents(out) == expected
        if not happened:
            break
    assert step > 10


def test_a_job_that_failed_before_its_first_file_does_not_bar_another(tmp_path):
    lake = lake_of(tmp_path / "lake")
    for file in lake.rglob("*.parquet"):
        pq.write_table(pa.table({"cat": [2.0], "dog": [2.0]}), file)
    for skip in (False, True):
        with pytest.raises(InputError, match="sums to"):
            decide_lake(lake, tmp_path / "out", decider(), skip_broken=skip)
        assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="sums to"):
        decide_lake(lake, tmp_path / "out", decider())
    assert (tmp_path / "out").is_dir()  # the user's
    assert not contents(tmp_path / "out")
    lake_of(lake)
    assert decide_lake(lake, tmp_path / "out", decider(wrong=-9)).samples == 15


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_description_is_named(tmp_path, content):
    lake = lake_of(tmp_path / "lake")
    decide_lake(lake, tmp_path / "out", decider())
    (tmp_path / "out" / JOB).write_text(content)
    with pytest.raises(InputError, match=f"{JOB}: .*remove the folder to start over"):
        decide_lake(lake, tmp_path / "out", decider())


def test_what_somebody_puts_into_the_folder_of_parts_stays(tmp_path):
    parts, compute = table_parts(tmp_path / "p.parquet")

    def putting(rows, report):
        (tmp_path / "p.parquet.parts" / "mine.txt").write_text("mine")
        yield from compute(rows, report)

    assert parts.fill(putting, "Rows")
    assert pq.read_table(tmp_path / "p.parquet").num_rows == COUNT - 1
    assert contents(tmp_path / "p.parquet.parts") == {"mine.txt": b"mine"}
    with pytest.raises(InputError, match=r"holds other files \(mine.txt\): move them"):
        table_parts(tmp_path / "p.parquet")[0].fill(compute, "Rows")


def test_unfinished_parts_are_no_tables_of_a_lake(tmp_path):
    lake_of(tmp_path)
    with killed(9) as happened:
        parts, compute = table_parts(tmp_path / "p.parquet")
        parts.fill(compute, "Rows")
    assert happened
    assert list((tmp_path / "p.parquet.parts").glob("part-*"))
    assert [Path(unit.name).name for unit in Lake(tmp_path).units] == [
        "a.parquet",
        "b.parquet",
        "c.parquet",
    ]


def test_a_place_that_is_not_utf8_is_told(tmp_path):
    with pytest.raises(InputError, match=r"caf\\xe9.* is not UTF-8: rename it"):
        ResumableFolder(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"), {})


def test_a_folder_cannot_lie_in_a_file(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(InputError, match=r"file/out: cannot be created \(Not a dir"),
        ResumableFolder(tmp_path / "file" / "out", {}).opened(),
    ):
        pass

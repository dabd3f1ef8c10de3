"""Bars are drawn for a program on a terminal, one at a time, and never by the library
alone.
"""

import io
import re
import threading
import time
from contextlib import contextmanager, redirect_stderr

import pytest

from rfdlc import progress
from rfdlc.progress import announce, live, shown, track


class Terminal(io.StringIO):
    def isatty(self):
        return True


@contextmanager
def screen(kind=Terminal):
    """Standard error is this screen within it; a fixture would not do, since pytest
    puts its own there for a test.
    """
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(kind()) as drawn:
        patch.setenv("TERM", "xterm")
        yield drawn


def test_a_library_is_silent():
    with screen() as terminal:
        assert list(track([1, 2], "Counting")) == [1, 2]
        with live(3, "Training") as show:
            show(1, "loss 2")
    assert terminal.getvalue() == ""


def test_a_program_draws():
    with screen() as terminal, shown():
        assert list(track(range(3), "Counting")) == [0, 1, 2]
    assert "Counting" in terminal.getvalue()


def test_a_file_gets_no_bar():
    with screen(io.StringIO) as file, shown():
        assert list(track([1], "Counting")) == [1]
    assert file.getvalue() == ""


def test_a_file_gets_a_line_every_few_seconds(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    with screen(io.StringIO) as file, shown(), live(4, "Training") as show:
        for steps, text in ((1, "loss 2"), (1, ""), (2, "loss 1")):
            time.sleep(
                0.02
            )  # lines are rarer the longer it takes, by a fiftieth of that
            show(steps, text)
            assert list(track([1], "Evaluating")) == [1]
    lines = file.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "Training: 25%",
        "Training: 50%",
        "Training: 100%",
    ]
    assert [line.split("  ")[1] for line in lines] == ["loss 2", "loss 2", "loss 1"]
    assert lines[2].endswith("about 0:00:00 left  loss 1")


def test_more_steps_than_expected_are_no_more_than_all(monkeypatch):
    """A total may be an estimate, as that of trials is: no line says 107%, or
    -1 day.
    """
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    with screen(io.StringIO) as file, shown(), live(10, "Training") as show:
        for steps in (10, 1, 100):
            time.sleep(0.02)
            show(steps, "")
    lines = file.getvalue().splitlines()
    assert lines[0] == "Training: 100%, about 0:00:00 left"
    assert lines[1:] == ["Training: 100%, 0 s so far"] * 2


def test_announcements_are_for_programs():
    with screen(io.StringIO) as file:
        announce("nobody asked")
        with shown():
            announce("data digits-lt")
    assert file.getvalue() == "data digits-lt\n"


def test_only_the_outer_of_two_bars_is_drawn():
    with screen() as terminal, shown():
        with live(2, "Training") as show:
            assert list(track([1, 2], "Evaluating")) == [1, 2]
            show(2, "")
        for _ in track([1], "Outer"):
            list(track([1], "Inner"))
        list(track([1], "Afterwards"))
    assert "Training" in terminal.getvalue()
    assert "Outer" in terminal.getvalue()
    assert "Afterwards" in terminal.getvalue()
    assert "Evaluating" not in terminal.getvalue()
    assert "Inner" not in terminal.getvalue()


@pytest.mark.parametrize(
    ("total", "begins"), [(None, "Measuring: "), (4, "Measuring: 0%, ")]
)
def test_a_file_gets_a_line_where_nothing_moves(monkeypatch, total, begins):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.1)
    monkeypatch.setattr(progress, "TICK", 0.01)
    with screen(io.StringIO) as file, shown(), live(total, "Measuring"):
        time.sleep(1)
    lines = file.getvalue().splitlines()
    assert 2 <= len(lines) <= 11  # not one per tick
    assert re.fullmatch(rf"{re.escape(begins)}[01] s so far", lines[-1])


def test_lines_of_a_clock_count_every_step(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0001)
    monkeypatch.setattr(progress, "TICK", 0.0001)
    with screen(io.StringIO) as file, shown(), live(20_000, "Training") as show:
        for _ in range(20_000):
            show(1, "")
        time.sleep(0.5)
        during = threading.active_count()
    assert file.getvalue().splitlines()[-1].startswith("Training: 100%")
    assert threading.active_count() < during

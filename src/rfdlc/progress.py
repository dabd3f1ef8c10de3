"""Progress that a library may report and only a program shows: silent unless `shown()`
is active.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from datetime import timedelta
from typing import TypeVar

from rfdlc.errors import printable

Item = TypeVar("Item")

SECONDS_BETWEEN_LINES = 5
TICK = 1.0  # seconds after which a line may be due, whether or not anything has moved

_SHOWN: ContextVar[bool] = ContextVar("rfdlc_progress_shown", default=False)


def speaks() -> bool:
    """Whether this process speaks to the user: of several that `torchrun` started, the
    first alone does.
    """
    return (
        os.environ.get("RANK", "0") == "0" or os.environ.get("WORLD_SIZE", "1") == "1"
    )


@contextmanager
def shown(value: bool = True) -> Iterator[None]:
    """Within it, bars with the time left are drawn on standard error. The command line
    turns it on.
    """
    before = _SHOWN.get()
    _SHOWN.set(value)
    try:
        yield
    finally:
        _SHOWN.set(before)


def track(
    items: Iterable[Item], description: str, total: int | None = None
) -> Iterator[Item]:
    """The items one by one, with a progress bar that goes away at the end where a
    program asked for bars.
    """
    with live(
        len(items) if total is None and isinstance(items, Sized) else total, description
    ) as show:
        for item in items:
            yield item
            show(1, "")


def announce(text: str) -> None:
    """Print to standard error, where a program asked for progress."""
    if _SHOWN.get() and speaks():
        print("\n".join(map(printable, text.split("\n"))), file=sys.stderr, flush=True)


@contextmanager
def live(
    total: int | None, description: str, done: int = 0
) -> Iterator[Callable[[int, str], None]]:
    """Progress moved by hand, with a text: `with live(100, "Training") as show: show(1,
    "loss 2")`.

    Only a program shows it, and not inside another one: as a bar on a terminal,
    elsewhere as a line every few seconds, also where nothing moves. An empty text
    leaves the last one. A call is cheap enough for every step of a training.
    """
    if not (_SHOWN.get() and speaks()):
        yield lambda steps, text: None
        return
    terminal, first, began, words = sys.stderr.isatty(), done, time.monotonic(), ""
    description = printable(description)
    last = (
        began if terminal else began - 0.6 * SECONDS_BETWEEN_LINES
    )  # the first line comes early

    def line(done: int, text: str) -> None:
        seconds, moved = time.monotonic() - began, done - first
        left = timedelta(seconds=round(seconds * ((total or 0) - done) / max(1, moved)))
        known = (
            [f"{min(1, done / total):.0%}"] if total else [f"{done:,}"] if moved else []
        )
        told = total and moved and done <= total  # a total may be an estimate
        share = ", ".join(
            [*known, f"about {left} left" if told else f"{seconds:.0f} s so far"]
        )
        print(f"{description}: {share}  {text}".rstrip(), file=sys.stderr, flush=True)

    def draw_if_due() -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= (
            0.1 if terminal else max(SECONDS_BETWEEN_LINES, (now - began) / 50)
        ):  # rarer in long ones
            last = now
            draw(done, words)

    def show(steps: int, text: str) -> None:
        nonlocal done, words
        done, words = done + steps, text or words
        draw_if_due()

    drawn = (
        _bar(total, description, done) if terminal else nullcontext(line)
    )  # a bar moves by itself
    with (
        shown(False),
        drawn as draw,
        nullcontext() if terminal else _ticking(draw_if_due),
    ):
        yield show


@contextmanager
def _ticking(function: Callable[[], None]) -> Iterator[None]:
    """Within it, the function is called every second, in a thread: one step of a large
    network may take minutes.
    """
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(TICK):
            function()

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def _bar(
    total: int | None, description: str, done: int
) -> Iterator[Callable[[int, str], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    text_of = TextColumn(
        "{task.fields[text]}", table_column=Column(ratio=1, no_wrap=True)
    )  # cut in a narrow terminal
    columns = (
        TextColumn("{task.description}"),
        BarColumn(20),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        text_of,
    )
    with Progress(
        *columns, console=Console(stderr=True), transient=True, expand=True
    ) as bar:
        task = bar.add_task(description, total=total, completed=done, text="")
        yield lambda done, text: bar.update(task, completed=done, text=text)

"""Progress that a library may report and only a program shows: silent unless `shown()` is active."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Item = TypeVar("Item")

_SHOWN: ContextVar[bool] = ContextVar("rfdlc_progress_shown", default=False)


def speaks() -> bool:
    """Whether this process speaks to the user: of several that `torchrun` started, the first alone does."""
    return os.environ.get("RANK", "0") == "0" or os.environ.get("WORLD_SIZE", "1") == "1"


@contextmanager
def shown() -> Iterator[None]:
    """Within it, `track` draws a bar with the time left on standard error. The command line turns it on."""
    token = _SHOWN.set(True)
    try:
        yield
    finally:
        _SHOWN.reset(token)


@contextmanager
def _one_bar() -> Iterator[bool]:
    """Whether to draw: only for a program, on a terminal, and not inside of another bar."""
    drawn = _SHOWN.get() and speaks() and sys.stderr.isatty()  # into a file, a bar would leave only empty lines
    if not drawn:
        yield False
        return
    _SHOWN.set(False)
    try:
        yield True
    finally:
        _SHOWN.set(True)


def track(items: Iterable[Item], description: str, total: int | None = None) -> Iterator[Item]:
    """The items one by one, with a progress bar that goes away at the end where a program asked for bars.

    >>> list(track([1, 2], "Counting"))
    [1, 2]
    """
    with _one_bar() as drawn:
        if not drawn:
            yield from items
            return
        from rich.console import Console
        from rich.progress import track as rich_track

        yield from rich_track(items, description, total=total, console=Console(stderr=True), transient=True)


@contextmanager
def live(total: int, description: str, done: int = 0) -> Iterator[Callable[[int, str], None]]:
    """A bar moved by hand, with a line of text: `with live(100, "Training") as show: show(1, "loss 2")`."""
    with _one_bar() as drawn:
        if not drawn:
            yield lambda steps, text: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
        with Progress(*columns, TextColumn("{task.fields[text]}"), console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(description, total=total, completed=done, text="")
            yield lambda steps, text: bar.update(task, advance=steps, text=text)

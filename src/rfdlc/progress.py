"""Progress that a library may report and only a program shows: silent unless `shown()` is active."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Item = TypeVar("Item")

_SHOWN: ContextVar[bool] = ContextVar("rfdlc_progress_shown", default=False)


def speaks() -> bool:
    """Whether this process speaks to the user: of several that `torchrun` started, the first alone does."""
    return os.environ.get("RANK", "0") == "0" or os.environ.get("WORLD_SIZE", "1") == "1"


@contextmanager
def shown(value: bool = True) -> Iterator[None]:
    """Within it, bars with the time left are drawn on standard error. The command line turns it on."""
    before = _SHOWN.get()
    _SHOWN.set(value)
    try:
        yield
    finally:
        _SHOWN.set(before)


def track(items: Iterable[Item], description: str, total: int | None = None) -> Iterator[Item]:
    """The items one by one, with a progress bar that goes away at the end where a program asked for bars."""
    with live(len(items) if total is None and isinstance(items, Sized) else total, description) as show:
        for item in items:
            yield item
            show(1, "")


@contextmanager
def live(total: int | None, description: str, done: int = 0) -> Iterator[Callable[[int, str], None]]:
    """A bar moved by hand, with a line of text: `with live(100, "Training") as show: show(1, "loss 2")`.

    It is drawn only for a program, on a terminal (in a file it would leave empty lines), and not inside another bar.
    """
    if not (_SHOWN.get() and speaks() and sys.stderr.isatty()):
        yield lambda steps, text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    text_of = TextColumn("{task.fields[text]}")
    with shown(False), Progress(*columns, text_of, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total, completed=done, text="")
        yield lambda steps, text: bar.update(task, advance=steps, text=text)

"""Ctrl-C while training."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rfdlc.progress import speaks


@contextmanager
def stop_at_epoch_end() -> Iterator[Any]:
    """Ctrl-C sets a mark, read at the end of an epoch; a second one stops at once."""
    marked: list[bool] = []

    def mark(signum: int, frame: Any) -> None:
        if marked:
            raise KeyboardInterrupt
        marked.append(True)
        if speaks():
            print("stopping at the end of this epoch; press Ctrl-C again to stop at once", file=sys.stderr)

    try:
        previous = signal.signal(signal.SIGINT, mark)
    except ValueError:  # not in the main thread: Ctrl-C is not ours to handle
        yield lambda: False
        return
    try:
        yield lambda: bool(marked)
    finally:
        signal.signal(signal.SIGINT, previous)

"""Work that a thread does ahead of the one that needs its results."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def ahead(
    function: Callable[[Item], Result], items: Iterable[Item], count: int
) -> Iterator[Result]:
    """`function` of each item in turn, computed in a thread; up to `count` results
    wait.

    >>> list(ahead(lambda number: number**2, [1, 2, 3], 2))
    [1, 4, 9]
    """
    waiting = deque[Future[Result]]()
    with ThreadPoolExecutor(1) as worker:
        for item in items:
            waiting.append(worker.submit(function, item))
            if len(waiting) > count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

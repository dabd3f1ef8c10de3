"""Functions of tables for engines that map pandas frames or Arrow batches: Dask and
Spark.
"""

from collections.abc import Callable, Iterator
from typing import Any


def on_frame(frame: Any, function: Callable[[Any], Any]) -> Any:
    """A function of Arrow tables, such as `DecideTable`, on a pandas frame; the index
    stays.

    >>> import pandas
    >>> from rfdlc import Decider, Utility
    >>> from rfdlc.lakes.tables import DecideTable
    >>> decide = DecideTable(Decider(Utility([[1, 0], [-5, 1]], ["healthy", "ill"])))
    >>> frame = pandas.DataFrame({"healthy": [0.9, 0.7], "ill": [0.1, 0.3]})
    >>> on_frame(frame, decide)["action"].tolist()
    ['healthy', 'ill']
    """
    from pyarrow import Table

    found = function(Table.from_pandas(frame, preserve_index=False)).to_pandas()
    found.index = frame.index
    return found


def on_frames(frames: Iterator[Any], function: Callable[[Any], Any]) -> Iterator[Any]:
    """The same for iterators of pandas frames: `partial(on_frames, function=...)` is
    for Spark's `mapInPandas`.
    """
    return (on_frame(frame, function) for frame in frames)


def on_batches(batches: Iterator[Any], function: Callable[[Any], Any]) -> Iterator[Any]:
    """The same for iterators of `pyarrow.RecordBatch`: `partial(on_batches,
    function=...)` is for `mapInArrow`.
    """
    for batch in batches:
        yield from function(batch).to_batches()

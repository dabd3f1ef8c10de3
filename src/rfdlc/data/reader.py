"""What a data format is: how its data sets are recognised, read, and opened."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from rfdlc.data.dataset import Dataset
from rfdlc.data.samples import InputSpec, Samples

Finder = Callable[[Path], Path]


@dataclass(frozen=True)
class Place:
    """Where a data set is on disk."""

    path: Path
    # The folder that the user named: paths in lists of images are relative to it.
    root: Path | None = None
    named: bool = False  # whether it was found by the name of the data set
    drop: tuple[str, ...] = ()  # columns of a table that are left out


@dataclass(frozen=True)
class Request:
    """Which samples are opened, and for which model."""

    spec: InputSpec
    split: str | None = None  # the last one, where none is named
    skip_broken: bool = False
    allow_links: bool = False


@dataclass(frozen=True)
class Listing:
    """The splits of a data set ("" where it has none), the names of the classes in all
    of them, and the groups of a split, where the data say them.
    """

    splits: Sequence[str]
    classes: Sequence[str]
    groups: Mapping[str, NDArray[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class DataReader:
    """A data format: how to recognise a data set, and how to read it.

    Parameters
    ----------
    read
        `read(place, *, option=default, ...) -> Dataset`. Its keyword-only parameters
        are the options of the format. A reader of objects in memory gets the object.
    recognises
        Whether a place is of this format; by default all files with its suffixes are.
    names
        Names of data sets, and how each is found in a folder: `find(root) -> path`.
    suffixes
        Of files; with them, folders and other files are not of this format.
    open
        `open(place, request) -> Samples`: samples to predict, labelled or not, in
        chunks. Without it, a data set is read into memory to predict it.
    list_splits
        `list_splits(place, request) -> Listing`, to open all splits of images. The
        request says the columns of labels and groups, where they are named.
    check
        `check(place, options)` raises for columns that are not there, before anything
        else is read.
    holds_features
        Whether the samples of a place are features rather than images. Without it, they
        are not.
    holds_out
        Whether `read` holds test samples out by itself.
    lists_files
        Whether a data set is a list of files that may lie elsewhere, in the root.
    unlabelled
        Whether samples without a label may lie beside others that have one.
    """

    read: Callable[..., Dataset]
    recognises: Callable[[Any], bool] | None = None
    names: Mapping[str, Finder] = field(default_factory=dict)
    suffixes: Sequence[str] = ()
    open: Callable[[Place, Request], Samples] | None = None
    list_splits: Callable[[Place, Request], Listing] | None = None
    check: Callable[[Place, Mapping[str, Any]], None] | None = None
    holds_features: Callable[[Place], bool] | None = None
    holds_out: bool = False
    lists_files: bool = False
    unlabelled: bool = False

    def matches(self, source: Any) -> bool:
        """Whether a place, or an object in memory, is of this format."""
        if self.suffixes and not has_suffix(source.path, self.suffixes):
            return False
        if self.recognises is None:
            return bool(self.suffixes)
        return self.recognises(source)

    @property
    def options(self) -> list[str]:
        """The names of its options."""
        return [
            parameter.name
            for parameter in inspect.signature(self.read).parameters.values()
            if parameter.kind is parameter.KEYWORD_ONLY
        ]


def has_suffix(path: Path, suffixes: Sequence[str]) -> bool:
    return path.is_file() and path.suffix.lower() in suffixes

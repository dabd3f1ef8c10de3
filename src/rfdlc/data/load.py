"""`load`: a name, a path, arrays or a data frame in; a Dataset out."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    ValidationError,
    create_model,
)

from rfdlc.data.copies import first_copies, hashes, near_copies, with_near_copies
from rfdlc.data.dataset import (
    COPIES,
    HELD_OUT,
    NEARLY_JOINED,
    NEARLY_SHARED,
    SHARED,
    SHARED_GROUPS,
    TOO_MANY_NEAR,
    Dataset,
    Normalisation,
    joined_labels,
    spelt_alike,
)
from rfdlc.data.reader import DataReader, Finder, Place
from rfdlc.data.registry import READERS, find_reader, words
from rfdlc.errors import InputError, counted, expect, listing, suggestion
from rfdlc.formats.tables import read_columns, split_name

# Options of every format: their types and defaults.
COMMON: dict[str, Any] = {
    "groups": (str | Path | None, None),
    "seed": (NonNegativeInt, 0),
    "copies": (Literal["auto", "exact", "near"], "auto"),
    "test_fraction": (Annotated[float, Field(ge=0, lt=1)], 0.2),
}
IDS = ("id", "path", "file", "image", "name")
GROUPS_FORMAT = (
    "a CSV with the columns split,index,GROUP (index from 0 in each split) or id,GROUP"
)


def register_source(
    read: Callable[..., Dataset],
    *,
    names: Mapping[str, Finder] | None = None,
    suffixes: Sequence[str] = (),
    recognises: Callable[[Path], bool] | None = None,
) -> None:
    """Make `rfdlc.load`, and all that takes data in this process, read another format;
    the last one registered wins.

    Parameters
    ----------
    read : callable
        `read(path, *, option=default, ...) -> Dataset`. Its keyword-only parameters are
        the options of the format; values are converted to the annotated types. A
        parameter called `seed` receives the seed given to `load`.
    names : mapping of str to callable, optional
        Names of data sets, and how each is found in the folder `root`: `find(root) ->
        path`.
    suffixes, recognises : sequence of str, callable
        Which files are in this format, such as `.jsonl`; `recognises(path) -> bool`
        also for folders.
    """

    @wraps(read)
    def read_place(place: Place, **options: Any) -> Dataset:
        return read(place.path, **options)

    reader = DataReader(read_place, names=dict(names or {}), suffixes=tuple(suffixes))
    if recognises is not None:
        reader = replace(reader, recognises=lambda place: recognises(place.path))
    READERS.insert(0, reader)


def load(
    source: Any,
    *,
    root: str | Path | None = None,
    groups: str | Path | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    copies: str = "auto",
    **options: Any,
) -> Dataset:
    """Read a data set; raises InputError if it cannot be read, or an option does not
    fit it.

    Parameters
    ----------
    source : str, Path, tuple, dict, data frame or data set
        A name (`digits-lt`), a path, `(X, y)` of arrays or of a data frame and labels,
        a data frame with the classes in a column, or a dict of splits or arrays; a data
        set of Hugging Face or torchvision, or any object with `len(data)` and `data[i]`
        -> (image or features, label), or a dict of these.
    root : str or Path, optional
        The folder that contains a named data set or the path, by default the current
        folder; of a list or table of images, the folder that their paths are relative
        to, by default that of the list.
    groups : str or Path, optional
        A CSV file that says which samples belong together, or a column of a table.
    test_fraction, seed : float, int
        Fraction held out for testing where the data has no splits (0 for none), and the
        seed of all that is drawn.
    copies : str
        Which stay on one side of a split: equal samples (`exact`), also images that
        look the same (`near`), or these unless there are many (`auto`).
    **options
        Options of the format; `docs/data.md` lists them. Text is converted as on the
        command line.

    Examples
    --------
    >>> data = load("digits-lt", factor=10)
    >>> data.classes.count_array[[0, -1]].tolist(), data.input_shape
    ([129, 12], (1, 8, 8))
    """
    reader, place = find_reader(source, root, options.get("drop"))
    common = {
        "groups": groups,
        "test_fraction": test_fraction,
        "seed": seed,
        "copies": copies,
    }
    checked = _validated(reader, common | options, source)
    of_format = {name: checked[name] for name in reader.options if name in checked}
    data = reader.read(place, **of_format)
    if checked["groups"] is not None and "groups" not in reader.options:
        data = _with_groups(data, Path(checked["groups"]).expanduser())
    doubtful_names = [
        *spelt_alike(data.classes.names),
        *joined_labels(data.classes.names),
    ]
    data = replace(data, notes=(*data.notes, *_shared(data), *doubtful_names))
    for told in doubtful_names:
        warnings.warn(told, stacklevel=2)
    data = _compared(data, checked["copies"])
    if data.val is None and (
        copied := int((data.train.first != np.arange(len(data.train))).sum())
    ):
        data = replace(
            data,
            notes=(
                *data.notes,
                COPIES.format(copied),
                *filter(None, [data.train.joined]),
            ),
        )
    if reader.holds_out or list(data.splits) != ["train"]:
        return data
    if not checked["test_fraction"]:
        return data
    moved = data.hold_out(checked["test_fraction"], checked["seed"])
    notes = (
        *moved.notes,
        HELD_OUT.format(len(moved.val or ()), len(data.train), checked["seed"]),
    )
    return replace(
        moved,
        val=None,
        test=moved.val,
        normalisation=Normalisation.of(moved.train.inputs),
        notes=notes,
    )


def check_source(
    source: Any, root: str | Path | None, options: Mapping[str, Any]
) -> None:
    """Raise as `load` would for a wrong path, option or column; of a table only the
    first lines are read.
    """
    reader, place = find_reader(source, root, options.get("drop"))
    checked = _validated(reader, options, source)
    if reader.check is not None:
        reader.check(place, checked)


def _shared(data: Dataset) -> list[str]:
    """Notes on groups, and on images in memory, that are in the training split and in
    another one.
    """
    groups = {
        name: np.unique(split.groups)
        for name, split in data.splits.items()
        if split.groups is not None
    }
    train = groups.pop("train", ())
    notes = [
        SHARED_GROUPS.format(n, name)
        for name, own in groups.items()
        if (n := int(np.isin(own, train).sum()))
    ]
    in_memory = all(
        isinstance(split.inputs, np.ndarray) for split in data.splits.values()
    )
    if data.kind != "images" or len(data.splits) < 2 or not in_memory:
        return notes
    found = {name: hashes(split.array) for name, split in data.splits.items()}
    counts = {
        name: int(np.isin(own, found["train"]).sum())
        for name, own in found.items()
        if name != "train"
    }
    return notes + [
        SHARED.format(n, len(data.splits[name]), name)
        for name, n in counts.items()
        if n
    ]


def _looking(count: int) -> str:
    return f"{counted(count, 'sample')} {'looks' if count == 1 else 'look'}"


def _compared(data: Dataset, copies: str) -> Dataset:
    """With notes and warnings about images that look the same, and with those that stay
    together, as `copies` says.
    """
    splits = list(data.splits.values())
    compared = [split.inputs for split in splits], [split.files for split in splits]
    near = (
        near_copies(*compared)
        if copies != "exact"
        else np.empty((0, 2), dtype=np.int64)
    )
    split_of, train = np.repeat(range(len(splits)), list(map(len, splits))), data.train
    own, across = (
        near[split_of[near[:, 0]] == 0],
        near[np.diff(split_of[near])[:, 0] != 0],
    )
    vars(train)["near"] = own
    if copies == "near" and train.groups is None:
        vars(train)["first"] = with_near_copies(first_copies(train.inputs), own)
    starts = np.cumsum([0, *map(len, splits)])[:-1]
    names = list(data.splits)

    def named(pairs: NDArray[np.int64]) -> list[str]:
        places = [
            [(split_of[place], place - starts[split_of[place]]) for place in pair]
            for pair in pairs.tolist()
        ]
        return [
            " and ".join(f"{names[s]}: {splits[s].name(int(i))}" for s, i in pair)
            for pair in places
        ]

    apart = (
        own
        if train.groups is None
        else own[train.groups[own[:, 0]] != train.groups[own[:, 1]]]
    )
    notes = (
        [NEARLY_SHARED.format(_looking(len(across)), listing(named(across), 3))]
        if len(across)
        else []
    )
    if train.groups is not None and len(apart):
        notes.append(
            NEARLY_JOINED.format(_looking(len(apart)), listing(named(apart), 3))
        )
    elif (
        copies == "auto"
        and train.groups is None
        and data.val is None
        and train.too_many_near
    ):
        notes.append(TOO_MANY_NEAR.format(len(own), len(train), listing(named(own), 1)))
    for note in notes:
        warnings.warn(note, stacklevel=3)
    return replace(data, alike=tuple(named(across)), notes=(*data.notes, *notes))


def all_options() -> set[str]:
    """The options that some format has."""
    options = set(COMMON)
    for reader in READERS:
        options.update(reader.options)
    return options


@cache
def _model(read: Callable[..., Dataset], options: tuple[str, ...]) -> type[BaseModel]:
    """The options of a format and of all formats, with the types of their values."""
    hints = get_type_hints(read, include_extras=True)
    fields = dict[str, Any]()
    for name in options:
        kind = hints.get(name, Any)
        if kind == Sequence[str]:
            kind = Annotated[kind, BeforeValidator(words)]
        fields[name] = (kind, None)
    config = ConfigDict(
        extra="forbid", coerce_numbers_to_str=True, arbitrary_types_allowed=True
    )
    return create_model("Options", __config__=config, **(fields | COMMON))


def _validated(
    reader: DataReader, options: Mapping[str, Any], source: Any
) -> dict[str, Any]:
    model = _model(reader.read, tuple(reader.options))
    try:
        values = model.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            allowed = ["root", *model.model_fields]
            what = source if isinstance(source, str | Path) else "data in memory"
            raise InputError(
                f"{what} has no option {name!r}: expected one of"
                f" {listing(allowed, 40)}{suggestion(name, allowed)}"
            ) from None
        problem = first["msg"]
        raise InputError(
            f"option {name}={first['input']!r} is not valid:"
            f" {problem[0].lower()}{problem[1:]}"
        ) from None
    return {name: getattr(values, name) for name in values.model_fields_set}


class GroupFile:
    """Which samples belong together, from a file in GROUPS_FORMAT; rows for other
    samples are ignored.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_index, self.group_of = _read_groups(path)

    def find(
        self, split: str, count: int, ids: Sequence[str] | None
    ) -> NDArray[np.str_] | None:
        """The group of each sample of a split; None for a test split of its own, which
        needs no groups.
        """
        names = (
            [f"{split}/{i}" for i in range(count)]
            if self.by_index
            else ids or [""] * count
        )
        absent = [name for name in names if name not in self.group_of]
        if split != "train" and len(absent) == count:
            return None
        told = (
            f"{len(absent)} of {count} {split} samples have no group, the first is"
            f" {next(iter(absent), '')!r}"
        )
        expect(
            not absent,
            f"{self.path}: {told}: expected {GROUPS_FORMAT}, with a row for every"
            " sample",
        )
        return np.array([self.group_of[name] for name in names])


def _with_groups(data: Dataset, path: Path) -> Dataset:
    file = GroupFile(path)
    found = {
        name: file.find(name, len(split), split.ids)
        for name, split in data.splits.items()
    }
    splits: dict[str, Any] = {
        name: replace(data.splits[name], groups=own) for name, own in found.items()
    }
    return replace(
        data,
        **{name: split for name, split in splits.items() if split.groups is not None},
    )


def _read_groups(path: Path) -> tuple[bool, dict[str, str]]:
    """Whether samples are named by split and index, and the group of each name."""
    found = {name: column.to_pylist() for name, column in read_columns(path).items()}
    cells = {
        name: ["" if cell is None else str(cell).strip() for cell in own]
        for name, own in found.items()
    }
    columns = {name.lower(): own for name, own in cells.items()}
    by_index = {"split", "index"} <= columns.keys()
    key = next((name for name in IDS if name in columns), "")
    rest = [
        name
        for name in columns
        if name not in ({"split", "index"} if by_index else {key})
    ]
    clear = (by_index or key) and ("group" in rest or len(rest) == 1)
    expect(clear, f"{path}: has the columns {listing(cells)}: expected {GROUPS_FORMAT}")
    pairs = zip(columns["split"], columns["index"], strict=True) if by_index else ()
    places = [
        f"{split_name(split) or split}/{index.lstrip('0') or '0'}"
        for split, index in pairs
    ]
    names = places if by_index else columns[key]
    group_of: dict[str, str] = {}
    for line, (name, value) in enumerate(
        zip(names, columns["group" if "group" in rest else rest[0]], strict=True), 2
    ):
        expect(value, f"{path}, line {line}: the group of {name} is empty")
        first = group_of.setdefault(name, value)
        expect(
            first == value,
            f"{path}, line {line}: {name} is in two groups, {first!r} and {value!r}",
        )
    return by_index, group_of


def id_column(path: Path, columns: Mapping[str, Sequence[str]], ids: set[str]) -> str:
    """The only column that has all ids, with a warning that it was taken; otherwise
    nothing.
    """
    fitting = [name for name, cells in columns.items() if ids <= {*cells}]
    if len(fitting) != 1:
        return ""
    warnings.warn(
        f"{path}: column {fitting[0]!r} has all ids, and was taken for them",
        stacklevel=3,
    )
    return fitting[0]

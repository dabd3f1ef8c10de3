"""Classes: names, training counts, frequency rank, regions and groups.

Frequency rank, never the class index, decides what is head and what is tail.
"""

import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any, SupportsFloat

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rfdlc.errors import (
    CONTROL,
    InputError,
    choose,
    counted,
    expect,
    listing,
    repeated,
    suggestion,
)
from rfdlc.formats.files import parse_json

Indices = NDArray[np.int64]

# of classes numbered from 0: a larger label is a mistake, or not an index
MOST_NUMBERED = 1_000_000
SKIPPING_UNKNOWN = "skip_unknown=True (--skip-unknown)"
FEWEST_NUMBERED, SPARSEST = (
    10_000,
    10,
)  # that are always allowed; of numbered classes per sample
MANY_SHOT, FEW_SHOT = (
    100,
    20,
)  # many: more than 100 training samples; few: fewer than 20 (Liu et al. 2019)


@dataclass(frozen=True)
class Classes:
    """The classes of a problem, in a fixed order that every array of the library
    follows.

    Parameters
    ----------
    names : sequence of str
        Different, non-blank names.
    counts : sequence of int, optional
        Number of training samples of each class. Head and tail are undefined without
        them.
    groups : mapping of str to sequence of str, optional
        Named sets of classes (metaclasses), such as vehicles.

    Raises
    ------
    InputError
        If names repeat, are blank or not UTF-8, or if counts or groups do not fit them.

    Examples
    --------
    >>> classes = Classes.from_counts(
    ...     {"cat": 10, "dog": 500, "newt": 3}, groups={"pets": ["cat", "dog"]}
    ... )
    >>> classes.rank.tolist()
    [1, 0, 2]
    >>> {region: classes.select(members) for region, members in classes.thirds.items()}
    {'head': ('dog',), 'med': ('cat',), 'tail': ('newt',)}
    """

    names: tuple[str, ...]
    counts: tuple[int, ...] | None = None
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = tuple(map(str, self.names))
        object.__setattr__(self, "names", names)
        expect(names, "there are no classes: expected at least one name")
        expect(
            all(map(str.strip, names)),
            f"class names must not be blank, but one of {listing(map(repr, names))} is",
        )
        odd = [
            name for name in (*names, *self.groups) if CONTROL.search(str(name))
        ]  # names of folders, too
        plain = "class names must be UTF-8 without control characters"
        expect(
            not odd,
            f"{plain}, but {listing(map(ascii, odd))} is not: rename it, and its"
            " folder",
        )
        doubled = repeated(names)
        expect(
            not doubled,
            "class names must differ, but these appear more than once:"
            f" {listing(doubled)}",
        )
        if self.counts is not None:
            object.__setattr__(self, "counts", _whole_counts(list(self.counts), names))
        object.__setattr__(
            self,
            "groups",
            {str(k): self.select(self.encode(v)) for k, v in self.groups.items()},
        )

    def __len__(self) -> int:
        return len(self.names)

    @classmethod
    def from_labels(
        cls,
        labels: ArrayLike,
        names: Sequence[str] | None = None,
        groups: Mapping[str, Sequence[str]] | None = None,
    ) -> "Classes":
        """Count training labels: text is class names; numbers are class indices, from 0
        to the largest seen.

        Pass `names` to fix the order, or to include classes that have no training
        sample. If labels are numbers but not indices (1, 2, 3 or -1, 1), pass them as
        text, `y.astype(str)`: they are names.
        """
        labels = as_array(labels)
        shape = labels.shape
        expect(
            len(shape) == 1 and shape[0],
            f"labels must be a non-empty list, one per sample, got shape {shape}",
        )
        if labels.dtype == object:
            missing = [
                f"label {label} at position {i}"
                for i, label in enumerate(labels)
                if is_missing(label)
            ]
            expect(
                not missing, f"{listing(missing, 1)} is missing: leave such samples out"
            )
            if names is None and all(isinstance(label, Integral) for label in labels):
                labels = labels.astype(
                    np.int64
                )  # as a table of mixed columns holds them
        if names is None:
            numbers = labels.dtype.kind in "iufb"
            names = (
                numbered(_whole(labels, "label").max())
                if numbers
                else np.unique(labels.astype(str)).tolist()
            )
        counts = np.bincount(cls(tuple(names)).encode(labels), minlength=len(names))
        return cls(tuple(names), tuple(counts), dict(groups or {}))

    @classmethod
    def from_counts(
        cls,
        counts: Mapping[str, int] | Sequence[int] | NDArray[Any],
        names: Sequence[str] | None = None,
        groups: Mapping[str, Sequence[str]] | None = None,
    ) -> "Classes":
        """From a table {name: count}, or from counts in class order, with or without
        names.

        The names of counted labels (`y.value_counts()`, a Counter) are sorted, as in
        `from_labels` and scikit-learn; so are numbers, which are class indices. A dict
        of names keeps its order.

        >>> Classes.from_counts({2: 5, 0: 100, 1: 20}).counts
        (100, 20, 5)
        """
        if isinstance(counts, Mapping) or (names is None and hasattr(counts, "items")):
            table = dict(counts.items())
            numbers = all(isinstance(name, Integral) for name in table)
            written = isinstance(counts, dict) and not isinstance(counts, Counter)
            names = (
                list(table)
                if written and not numbers
                else sorted(table, key=None if numbers else str)
            )
            counts = [table[name] for name in names]
        return cls(
            tuple(map(str, range(len(counts))) if names is None else names),
            tuple(counts),
            dict(groups or {}),
        )

    @classmethod
    def from_json(cls, source: str | Path | Mapping[str, Any]) -> "Classes":
        """From a file that `to_json` wrote, its text, or the table inside."""
        where = "classes" if isinstance(source, Mapping) else source
        try:
            if isinstance(source, Mapping):
                table = source
            elif isinstance(source, str) and source.lstrip().startswith("{"):
                table = parse_json(source)
            else:
                table = parse_json(Path(source).read_text(encoding="utf-8"))
            names, counts, groups = (
                table["names"],
                table.get("counts"),
                table.get("groups") or {},
            )
            if not all(
                isinstance(each, list)
                for each in (names, [] if counts is None else counts, *groups.values())
            ):
                raise TypeError("one of these is not a list")
            return cls(tuple(names), None if counts is None else tuple(counts), groups)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{where}: cannot be read as classes ({error}): expected JSON with a"
                " list 'names', and optionally a list 'counts' with one count per"
                " class and an object 'groups' with a list of classes per name"
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and tables, ready for JSON."""
        counts = None if self.counts is None else list(self.counts)
        return {
            "names": list(self.names),
            "counts": counts,
            "groups": {k: list(v) for k, v in self.groups.items()},
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """`to_dict()` as JSON text, also written to `path` if given."""
        text = json.dumps(self.to_dict(), ensure_ascii=False, indent=1) + "\n"
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @cached_property
    def _index(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    def encode(self, labels: ArrayLike, what: str = "label") -> Indices:
        """Labels as class indices: text is looked up by name, numbers are checked
        indices.

        >>> Classes(("a", "b")).encode(["b", "a", "b"]).tolist()
        [1, 0, 1]
        """
        array = as_array(labels)
        flat = array.reshape(-1)
        if array.dtype.kind not in "iufb" or (
            array.dtype.kind == "b" and "True" in self._index
        ):
            places = [self._index.get(str(name), -1) for name in flat]
            odd = str(flat[places.index(-1)]) if -1 in places else None
            hint = "" if odd is None else suggestion(odd, self.names)
            expect(
                odd is None,
                f"{what} {odd!r} is not a class: expected one of"
                f" {listing(self.names)}{hint}",
            )
            return np.array(places, dtype=np.int64).reshape(array.shape)
        indices = _whole(array, what)
        for place in np.flatnonzero((indices < 0) | (indices >= len(self)))[:1]:
            value = int(flat[place])
            named = value < 0 or str(value) in self._index
            hint = (
                "; if it is the name of a class, pass labels.astype(str)"
                if named
                else ""
            )
            raise InputError(
                f"{what} {value} at position {place} is out of range: "
                f"expected a class number from 0 on, less than {len(self)}{hint}"
            )
        return indices

    def in_order(self, names: Sequence[str]) -> "Classes":
        """The same classes in the order of `names`, which must be the same set."""
        odd = [
            *sorted({*self.names} - {*names}),
            *sorted({*names} - {*self.names}),
        ] or ["?"]
        other = (
            f"classes {listing(self.names)} do not match {listing(names)}: {odd[0]!r}"
            " is in only one of them"
        )
        expect(
            odd == ["?"] and len(names) == len(self),
            f"{other}{suggestion(odd[0], odd[1:])}",
        )
        counts = (
            None
            if self.counts is None
            else tuple(self.counts[self._index[name]] for name in names)
        )
        return Classes(tuple(names), counts, self.groups)

    def select(self, indices: Iterable[int]) -> tuple[str, ...]:
        """The names at these class indices."""
        return tuple(self.names[i] for i in indices)

    def members(
        self, group: str | Iterable[str], others: Iterable[str] = ()
    ) -> Indices:
        """Class indices of a named group, of one class, or of several named classes;
        errors name `others` too.
        """
        if not isinstance(group, str):
            return self.encode(list(group))
        choose(
            "group or class", group, dict.fromkeys((*self.groups, *self.names, *others))
        )
        return self.encode(self.groups.get(group, [group]))

    @cached_property
    def count_array(self) -> Indices:
        """Training counts as an array; raises if they are not known."""
        expect(
            self.counts is not None,
            "the classes have no training counts, which give the training prior, head"
            " and tail: give them with Classes.from_labels(y_train) or"
            " Classes.from_counts({name: count}) (--classes counts.csv)",
        )
        return np.array(self.counts, dtype=np.int64)

    @cached_property
    def order(self) -> Indices:
        """Class indices by falling count, ties by class order."""
        return np.argsort(-self.count_array, kind="stable")

    @cached_property
    def rank(self) -> Indices:
        """Frequency rank of each class: 0 is the most frequent."""
        return np.argsort(self.order)

    @cached_property
    def prior(self) -> NDArray[np.float64]:
        """Training frequencies, summing to one."""
        total = self.count_array.sum()
        expect(
            total,
            "all training counts are zero, so there is no class prior: expected at"
            " least one sample",
        )
        return self.count_array / total

    @property
    def imbalance_factor(self) -> float:
        """Largest over smallest training count (of the classes that have any)."""
        present = self.count_array[self.count_array > 0]
        return float(present.max() / present.min()) if len(present) else float("nan")

    @cached_property
    def thirds(self) -> dict[str, Indices]:
        """Head, med and tail: equal thirds of the classes by rank (100 classes: 33, 33,
        34).
        """
        head = max(1, len(self) // 3)
        parts = np.split(self.order, [head, max(head, 2 * len(self) // 3)])
        return dict(zip(("head", "med", "tail"), parts, strict=True))

    @cached_property
    def shots(self) -> dict[str, Indices]:
        """Many (over 100 training samples), medium (20 to 100) and few (under 20)."""
        counts = self.count_array[self.order]
        many, few = counts > MANY_SHOT, counts < FEW_SHOT
        return {
            name: self.order[mask]
            for name, mask in (("many", many), ("medium", ~many & ~few), ("few", few))
        }

    def head_mask(self, head_fraction: float) -> NDArray[np.bool_]:
        """True for the most frequent share of the classes (rounded half up, as the
        paper's code does).
        """
        expect(
            0 < head_fraction < 1,
            f"head_fraction {head_fraction} is not a share: expected 0 < share < 1",
        )
        return self.rank < int(len(self) * head_fraction + 0.5)


def as_classes(given: Classes | Sequence[str] | int) -> Classes:
    """Classes unchanged, or made from their names or their number."""
    if isinstance(given, Classes):
        return given
    expect(
        not isinstance(given, str),
        f"classes are the text {given!r}: expected a list of names, such as"
        f" [{given!r}]",
    )
    return Classes(
        tuple(map(str, range(given)))
        if isinstance(given, int | np.integer)
        else tuple(given)
    )


def numbered(largest: float, where: str = "", samples: int | None = None) -> list[str]:
    """The names of classes that are known by their numbers, from 0 to the largest, of
    so many samples.

    >>> numbered(2)
    ['0', '1', '2']
    """
    expected, fix = (
        "expected class numbers from 0 on, less than",
        "renumber the classes, or pass their names as text",
    )
    wrong = f"{where}the label {largest:.0f} is too large"
    expect(largest < MOST_NUMBERED, f"{wrong}: {expected} {MOST_NUMBERED:,}; {fix}")
    if samples is not None:
        few = max(FEWEST_NUMBERED, SPARSEST * samples)
        expect(
            largest < few, f"{wrong} for {samples} samples: {expected} {few:,}; {fix}"
        )
    return [str(c) for c in range(int(largest) + 1)]


def as_array(given: Any) -> NDArray[Any]:
    """Any list as an array, bytes as text. Masked values raise: an array would show
    what the mask hides.
    """
    expect(
        not np.ma.is_masked(given),
        "some values are masked: expected all to be known; leave out those samples",
    )
    try:
        array = np.asarray(given)
        return np.char.decode(array, "utf-8") if array.dtype.kind == "S" else array
    except UnicodeDecodeError as error:
        raise InputError(
            f"some names are bytes that are not UTF-8 ({error}): decode them to text"
            " first"
        ) from None
    except ValueError:
        kind = type(given).__name__
        raise InputError(
            f"a {kind} whose entries differ in length is not an array: give them one"
            " length"
        ) from None


def is_missing(label: Any) -> bool:
    """Whether a label is missing: None, nan or pandas.NA."""
    try:
        return label is None or bool(label != label)
    except TypeError:  # pandas.NA: neither equal nor not
        return True


def _whole(labels: NDArray[Any], what: str) -> Indices:
    with np.errstate(invalid="ignore"):
        wrong = np.flatnonzero(~np.isfinite(labels) | (labels != np.floor(labels)))
    for place in wrong[:1]:
        value = labels.reshape(-1)[place]
        raise InputError(
            f"{what} {value} at position {place} is not a whole number: expected a"
            " class"
        )
    return labels.astype(np.int64)


def _whole_counts(counts: list[Any], names: tuple[str, ...]) -> tuple[int, ...]:
    numbers, classes = len(counts), len(names)
    expect(
        numbers == classes,
        f"{numbers} training counts for {classes} classes: expected one count per"
        " class",
    )
    if all(
        isinstance(value, np.integer) and value >= 0 for value in counts
    ):  # the usual case, which is fast
        return tuple(map(int, counts))
    for name, value in zip(names, counts, strict=True):
        number = float(value) if isinstance(value, SupportsFloat) else np.nan
        whole = number >= 0 and number.is_integer()
        expect(
            whole,
            f"training count {value!r} of class {name!r} is not a whole number of"
            " samples (0 or more)",
        )
    return tuple(map(int, counts))


def labelled_places(
    texts: Sequence[str],
    classes: Classes,
    where: object,
    skip: bool,
    place: Callable[[int], str],
) -> list[int]:
    """The positions of labels that are classes; others raise, unless `skip` leaves them
    out; `place` says their line.

    Those of all labels where none is a class: then they are numbers, or of other data,
    which `encode_targets` checks.
    """
    names, total = {*classes.names}, len(texts)
    labelled = [i for i, text in enumerate(texts) if text]
    expect(
        labelled,
        f"{where}: none of {counted(total, 'sample')} has a label: expected its true"
        " class (or --labels FILE)",
    )
    kept = [i for i in labelled if texts[i] in names] or labelled
    unknown = Counter(texts[i] for i in sorted({*labelled} - {*kept})).most_common()
    which = listing([f"{name} ({count:,})" for name, count in unknown], 5)
    near = suggestion(unknown[0][0], classes.names) if unknown else ""
    for what, lost, fix in (
        ("no label", {*range(total)} - {*labelled}, "fill them in"),
        (
            f"a class that is not in the predictions: {which}",
            {*labelled} - {*kept},
            f"correct the labels{near}",
        ),
    ):
        if lost:
            told = f"{where}: {len(lost):,} of {total:,} samples have {what}"
            expect(
                skip,
                f"{told}, first in {place(min(lost))}; leave them out with"
                f" {SKIPPING_UNKNOWN}, or {fix}",
            )
            warnings.warn(f"{told}; they are left out", stacklevel=2)
    return kept

"""Utility U[true, action]: what each action is worth for each true class."""

import csv
import warnings
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rfdlc.decide.classes import Classes, Indices, as_classes
from rfdlc.errors import InputError, listing, repeated
from rfdlc.tables import CsvFile, number

ABSTAIN = "abstain"
LARGEST = 1e30  # beyond it expected utilities of 32 bits could overflow
SHOWN_CLASSES = 12  # a larger matrix is summarised when printed
SIMILAR, MOST_COMPARED = 0.8, 20  # similarity of names that suggests a misspelling; actions that are compared


class Utility:
    """What each action is worth for each true class: a matrix U[true, action] with names on both axes.

    An action with the name of a class decides for that class; any other action (`abstain`, `call a doctor`) hands the
    sample over. Values are on any scale: only differences within a row matter to a decision.

    Parameters
    ----------
    matrix : array-like of shape (n_classes, n_actions) or data frame
        The values; a data frame also gives the names.
    classes : Classes or sequence of str, optional
        One per row; numbered by default.
    actions : sequence of str, optional
        One per column; by default the classes, and `abstain` if there is one more column.

    Raises
    ------
    InputError
        If the matrix is not a table of finite numbers, or names do not fit it.

    Examples
    --------
    >>> utility = Utility([[1, 0], [-5, 1]], ["healthy", "ill"]).with_abstain(0.2)
    >>> print(utility)
    Utility of 2 classes and 3 actions
    true \\ action  healthy  ill  abstain
          healthy        1    0      0.2
              ill       -5    1      0.2
    """

    def __init__(
        self,
        matrix: ArrayLike,
        classes: Classes | Sequence[str] | None = None,
        actions: Sequence[str] | None = None,
    ) -> None:
        if hasattr(matrix, "columns") and hasattr(matrix, "index"):
            classes, actions = _names_of_frame(matrix, classes, actions)
        values = _as_matrix(matrix)
        if classes is None:
            classes = [str(i) for i in range(len(values))]
        self.classes = as_classes(classes)
        if len(values) != len(self.classes):
            raise InputError(
                f"utility has {len(values)} rows but there are {len(self.classes)} classes: expected one row per class"
            )
        self.actions = _action_names(actions, self.classes.names, values.shape[1])
        _warn_of_misspellings(self.actions, self.classes.names)
        self.matrix = values
        self.matrix.setflags(write=False)

    # -- construction -------------------------------------------------------------------------------------------

    @classmethod
    def one_hot(cls, classes: Classes | Sequence[str] | int) -> "Utility":
        """1 for the true class, 0 otherwise: expected utility is then accuracy."""
        classes = as_classes(classes)
        return cls(np.eye(len(classes)), classes)

    @classmethod
    def tail_sensitive(cls, classes: Classes, penalty: float = -1.0, *, by_rank: bool = False) -> "Utility":
        """One-hot, with `penalty` where the decided class is strictly more frequent than the true one.

        Classes of equal count have no penalty either way. `by_rank` takes the paper's strict order instead:
        of two classes with equal counts the earlier one counts as more frequent.
        """
        _check_penalty(penalty)
        order = -classes.rank if by_rank else classes.count_array
        matrix = np.where(order[None, :] > order[:, None], penalty, 0.0)
        np.fill_diagonal(matrix, 1.0)
        return cls(matrix, classes)

    @classmethod
    def class_sensitive(cls, classes: Classes | Sequence[str], penalties: Mapping[tuple[str, str], float]) -> "Utility":
        """One-hot, with a penalty for each named pair (true class, decided class): `{("bird", "airplane"): -1}`."""
        classes = as_classes(classes)
        matrix = np.eye(len(classes))
        for (true, decided), penalty in penalties.items():
            row, column = classes.encode([true, decided], "class")
            if row == column:
                raise InputError(f"a penalty for deciding {decided!r} when it is true: expected two different classes")
            matrix[row, column] = penalty
        return cls(matrix, classes)

    @classmethod
    def group_sensitive(
        cls, classes: Classes, true: str | Sequence[str], decided: str | Sequence[str], penalty: float = -1.0
    ) -> "Utility":
        """One-hot, with `penalty` where a class of the group `true` is decided as one of the group `decided`.

        A group is a name in `classes.groups`, a class, or a list of classes.
        """
        _check_penalty(penalty)
        rows, columns = classes.members(true), classes.members(decided)
        common = np.intersect1d(rows, columns)
        if len(common):
            raise InputError(f"groups overlap in {listing(classes.select(common))}: expected two disjoint groups")
        matrix = np.eye(len(classes))
        matrix[np.ix_(rows, columns)] = penalty
        return cls(matrix, classes)

    @classmethod
    def from_costs(
        cls, costs: ArrayLike, classes: Classes | Sequence[str] | None = None, actions: Sequence[str] | None = None
    ) -> "Utility":
        """A cost matrix [true, action] turned into a utility: U = -cost."""
        given = cls(costs, classes, actions)
        return cls(-given.matrix + 0.0, given.classes, given.actions)

    def with_abstain(self, value: float | ArrayLike, name: str = ABSTAIN) -> "Utility":
        """Add an action that hands the sample over: worth `value` whatever is true, or one value per class."""
        if name in self.actions:
            raise InputError(f"utility has an action {name!r} already: leave the new one out, or give it another name")
        values = np.asarray(value, dtype=float)
        if values.ndim > 1 or values.size not in (1, len(self.classes)):
            raise InputError(
                f"abstain has {values.size} values: expected one number, or one per class ({len(self.classes)})"
            )
        column = np.broadcast_to(values.reshape(-1), len(self.classes))
        return Utility(np.column_stack([self.matrix, column]), self.classes, [*self.actions, name])

    def with_classes(self, classes: Classes) -> "Utility":
        """The same utility in the order of `classes`, matched by name, with their counts and groups."""
        known = self.classes.in_order(classes.names)
        if classes.counts is None:
            classes = Classes(classes.names, known.counts, classes.groups or known.groups)
        rows = self.classes.encode(list(classes.names))
        others = [name for name in self.actions if name not in set(classes.names)]
        actions = [name for name in classes.names if name in set(self.actions)] + others
        columns = [self.actions.index(name) for name in actions]
        return Utility(self.matrix[rows][:, columns], classes, actions)

    # -- files ------------------------------------------------------------------------------------------------

    @classmethod
    def read_csv(cls, path: str | Path, classes: Classes | None = None) -> "Utility":
        """Read a table with action names in its first line and a true class at the start of each further line.

        Rows and columns are matched by name, never by position, and brought into the order of `classes` if given.
        """
        actions, names, rows = _read_matrix(Path(path))
        try:
            utility = cls(rows, names, actions)
            return utility if classes is None else utility.with_classes(classes)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    def to_csv(self, path: str | Path) -> None:
        """Write what `read_csv` reads."""
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["true", *self.actions])
            for name, row in zip(self.classes.names, self.matrix, strict=True):
                writer.writerow([name, *(repr(float(value)).removesuffix(".0") for value in row)])

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and tables, ready for JSON."""
        return {"classes": self.classes.to_dict(), "actions": list(self.actions), "matrix": self.matrix.tolist()}

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> "Utility":
        """The inverse of `to_dict`."""
        return cls(table["matrix"], Classes.from_json(table["classes"]), table["actions"])

    # -- derived ---------------------------------------------------------------------------------------------

    @cached_property
    def decided_class(self) -> Indices:
        """For each action the class that it decides for, or -1 where it hands the sample over."""
        place = {name: i for i, name in enumerate(self.classes.names)}
        return np.array([place.get(action, -1) for action in self.actions], dtype=np.int64)

    @cached_property
    def class_action(self) -> Indices:
        """For each class the action that decides for it, or -1 where there is none."""
        place = {name: i for i, name in enumerate(self.actions)}
        return np.array([place.get(name, -1) for name in self.classes.names], dtype=np.int64)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Utility) and self.to_dict() == other.to_dict()

    def __repr__(self) -> str:
        title = f"Utility of {len(self.classes)} classes and {len(self.actions)} actions"
        if max(len(self.classes), len(self.actions)) > SHOWN_CLASSES:
            low, high = self.matrix.min(), self.matrix.max()
            return f"{title}: values from {low:g} to {high:g}, {(self.matrix < 0).sum()} of them negative"
        cells = [["true \\ action", *self.actions]]
        cells += [[n, *(f"{v:g}" for v in row)] for n, row in zip(self.classes.names, self.matrix, strict=True)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
        return "\n".join([title, *("  ".join(c.rjust(w) for c, w in zip(r, widths, strict=True)) for r in cells)])


def _names_of_frame(
    frame: Any, classes: Classes | Sequence[str] | None, actions: Sequence[str] | None
) -> tuple[Classes | Sequence[str] | None, Sequence[str] | None]:
    """The names of a data frame; given names must be the same, in the same order."""
    rows, columns = _own_names(frame.index), _own_names(frame.columns)
    given = classes.names if isinstance(classes, Classes) else classes
    for what, own, other in (("rows", rows, given), ("columns", columns, actions)):
        if own is not None and other is not None and [str(name) for name in other] != own:
            raise InputError(
                f"the data frame names its {what} {listing(own)}, but {listing(other)} are given: leave these out, "
                "or reorder the frame"
            )
    return rows if classes is None else classes, columns if actions is None else actions


def _own_names(axis: Any) -> list[str] | None:
    """The names along an axis of a data frame; None if they are positions."""
    names = [str(name) for name in axis]
    return None if names == [str(i) for i in range(len(names))] else names


def _as_matrix(matrix: ArrayLike) -> NDArray[np.float64]:
    try:
        values = np.array(matrix, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"utility must be a table of numbers with rows of equal length ({error})") from None
    if values.ndim != 2 or 0 in values.shape:
        raise InputError(f"utility has shape {values.shape}: expected (classes, actions)")
    usable = np.abs(values) <= LARGEST  # infinities and NaN are not
    if not usable.all():
        row, column = np.argwhere(~usable)[0]
        raise InputError(
            f"utility holds {values[row, column]} in row {row}, column {column}: expected finite numbers of at most "
            f"{LARGEST:g}; for what must never happen -1e6 is enough if the others are around 1"
        )
    return values


def _action_names(actions: Sequence[str] | None, classes: Sequence[str], columns: int) -> tuple[str, ...]:
    if actions is None:
        actions = [*classes, ABSTAIN][:columns] if columns in (len(classes), len(classes) + 1) else []
    names = tuple(str(name) for name in actions)
    if len(names) != columns:
        raise InputError(
            f"utility has {columns} columns for {len(classes)} classes: expected one column per class "
            f"(and one more to abstain), or the names of {columns} actions; got {len(names)} names"
        )
    doubled = repeated(names)
    if doubled:
        raise InputError(f"action {doubled[0]!r} appears more than once; every action name must differ")
    return names


def _warn_of_misspellings(actions: Sequence[str], classes: Sequence[str]) -> None:
    """Warn of an action that hands over and is named almost like a class that has no action."""
    known = set(classes)
    others = [name for name in actions if name not in known]
    decided = set(actions)
    lacking = {name.casefold(): name for name in classes if name not in decided} if others else {}
    for action in others[:MOST_COMPARED]:
        for near in get_close_matches(action.casefold(), lacking, n=1, cutoff=SIMILAR):
            warnings.warn(
                f"the action {action!r} is not a class, so it hands samples over, and no action decides for the class "
                f"{lacking[near]!r}: did you mean {lacking[near]!r}?",
                stacklevel=1,  # one place: warns once however often the utility is rearranged
            )


def _check_penalty(penalty: float) -> None:
    if not penalty <= 0:
        raise InputError(f"penalty {penalty} is not a loss: expected 0 or less, such as -1")


def _read_matrix(path: Path) -> tuple[list[str], list[str], list[list[float]]]:
    """Action names, class names and values of a CSV file."""
    file = CsvFile(path)
    lines = list(file.rows())
    if not lines:
        raise InputError(f"{path}: expected a first line of action names and one line per class")
    corner, *actions = file.names
    names = [row[0] for _, row in lines]
    if corner in names:  # of numbered classes, a first column of values could pass for their names
        raise InputError(
            f"{path}: the first line begins with the class {corner!r}: expected a first column that holds the true "
            "classes, with any other word above it, such as true"
        )
    _check_decimals(path, file.decimal, [cell for _, row in lines for cell in row[1:]])
    return actions, names, [_read_row(path, line, row, actions, file.decimal) for line, row in lines]


def _check_decimals(path: Path, decimal: str, cells: list[str]) -> None:
    """Between semicolons either sign may be the decimal one; if both occur, one of them is for thousands."""
    signs = [next((cell for cell in cells if sign in cell), None) for sign in ",."]
    if decimal == "," and None not in signs:
        raise InputError(
            f"{path}: holds both {signs[0]!r} and {signs[1]!r}: expected one decimal sign, and none for thousands"
        )


def _read_row(path: Path, line: int, row: list[str], actions: list[str], decimal: str) -> list[float]:
    if len(row) != len(actions) + 1:
        raise InputError(f"{path} line {line}: {len(row)} cells, expected {len(actions) + 1} (a class and its values)")
    values = []
    for action, cell in zip(actions, row[1:], strict=True):
        try:
            values.append(number(cell, decimal))
        except ValueError:
            raise InputError(f"{path} line {line}, column {action!r}: {cell!r} is not a number") from None
    return values

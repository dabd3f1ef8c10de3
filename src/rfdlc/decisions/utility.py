"""Utility U[true, action]: what each action is worth for each true class."""

import csv
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rfdlc.errors import CONTROL, InputError, expect, listing, repeated
from rfdlc.formats.tables import CsvFile, escaped, is_number, number
from rfdlc.probabilities.classes import Classes, Indices, as_classes
from rfdlc.probabilities.scores import SUM_TOLERANCE, Floats

ABSTAIN = "abstain"
LARGEST = 1e30  # beyond it expected utilities of 32 bits could overflow
MOST_VALUES = 200_000_000  # of a matrix, which has 8 bytes each
SHOWN_CLASSES = 12  # a larger matrix is summarised when printed
SIMILAR, MOST_COMPARED = (
    0.8,
    20,
)  # similarity of names that suggests a misspelling; actions that are compared

# What the words of a corner cell, or of the axes of a data frame, are about.
TRUE_WORDS = {"true", "truth", "actual", "real", "gold", "reality"}
CLASS_WORDS = {"class", "classes", "label", "labels", "target", "targets", "y"}
ACTION_WORDS = {"decided", "decision", "decisions", "decide", "action", "actions"}
ACTION_WORDS |= {"predicted", "prediction", "predictions", "pred", "chosen", "taken"}
ACTION_WORDS |= {"answer", "answers", "answered", "recommended", "assigned"}
# Between the word of the rows and that of the columns.
BETWEEN = re.compile(r"[\\/|×→,;:]|->|\b(?:x|by|vs|versus)\b")
CORNER = (
    "expected true where each line is a true class (then columns are actions), decided"
    " where each line is an action (then columns are true classes), both as in"
    " `true x decided`, or an empty cell, which is read as true"
)


class Utility:
    """What each action is worth for each true class: a matrix U[true, action] with
    names on both axes.

    An action with the name of a class decides for that class; any other action
    (`abstain`, `call a doctor`) hands the sample over. Values are on any scale: only
    differences within a row matter to a decision.

    Parameters
    ----------
    matrix : array-like of shape (n_classes, n_actions) or data frame
        The values; a data frame also gives the names.
    classes : Classes or sequence of str, optional
        One per row; numbered by default.
    actions : sequence of str, optional
        One per column; by default the classes, and `abstain` if there is one more
        column.

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
            frame: Any = matrix
            if rows_are_actions(str(frame.index.name), str(frame.columns.name)):
                frame = frame.T
            classes = _frame_names(frame.index, classes, "rows")
            actions = _frame_names(frame.columns, actions, "columns")
            matrix = frame
        values = _as_matrix(matrix)
        self.classes = as_classes(len(values) if classes is None else classes)
        count, columns = len(self.classes), values.shape[1]
        rows = len(values)
        expect(
            rows == count,
            f"utility has {rows} rows but there are {count} classes: expected one row"
            " per class",
        )
        if actions is None:
            actions = (
                [*self.classes.names, ABSTAIN][:columns]
                if columns in (count, count + 1)
                else []
            )
        self.actions = tuple(str(name) for name in actions)
        expect(
            len(self.actions) == columns,
            f"utility has {columns} columns for {count} classes: expected one column"
            f" per class (and one more to abstain), or the names of {columns} actions;"
            f" got {len(self.actions)} names",
        )
        for name in repeated(self.actions):
            raise InputError(
                f"action {name!r} appears more than once; action names must differ"
            )
        odd = [name for name in self.actions if CONTROL.search(name)]
        expect(
            not odd,
            "action names must be text without control characters, but"
            f" {listing(map(ascii, odd))} is not",
        )
        _warn_of_missing_actions(self.actions, self.classes.names)
        self.matrix = values

    @classmethod
    def one_hot(cls, classes: Classes | Sequence[str] | int) -> "Utility":
        """1 for the true class, 0 otherwise: expected utility is then accuracy."""
        classes = as_classes(classes)
        matrix = _right(classes)
        matrix.setflags(write=False)
        return cls(matrix, classes)

    @classmethod
    def tail_sensitive(
        cls, classes: Classes, penalty: float = -1.0, *, by_rank: bool = False
    ) -> "Utility":
        """One-hot, with `penalty` where the decided class is strictly more frequent
        than the true one.

        Classes of equal count have no penalty either way. `by_rank` takes the paper's
        strict order instead: of two classes with equal counts the earlier one counts as
        more frequent.
        """
        expect(
            penalty <= 0,
            f"penalty {penalty} is not a loss: expected 0 or less, such as -1",
        )
        order = -classes.rank if by_rank else classes.count_array
        matrix = _right(classes)
        matrix[order[None, :] > order[:, None]] = penalty
        return cls(matrix, classes)

    @classmethod
    def class_sensitive(
        cls,
        classes: Classes | Sequence[str],
        penalties: Mapping[tuple[str, str], float],
    ) -> "Utility":
        """One-hot, with a penalty for each named pair (true class, decided class):
        `{("bird", "airplane"): -1}`.
        """
        classes = as_classes(classes)
        matrix = _right(classes)
        for pair, penalty in penalties.items():
            row, column = classes.encode(list(pair), "class")
            expect(
                row != column,
                f"a penalty for the right decision {pair[0]!r}: expected two different"
                " classes",
            )
            matrix[row, column] = penalty
        return cls(matrix, classes)

    @classmethod
    def group_sensitive(
        cls,
        classes: Classes,
        true: str | Sequence[str],
        decided: str | Sequence[str],
        penalty: float = -1.0,
    ) -> "Utility":
        """One-hot, with `penalty` where a class of a group (name, class or list) is
        decided as one of another.
        """
        expect(
            penalty <= 0,
            f"penalty {penalty} is not a loss: expected 0 or less, such as -1",
        )
        rows, columns = classes.members(true), classes.members(decided)
        common = classes.select(np.intersect1d(rows, columns))
        expect(
            not common,
            f"groups overlap in {listing(common)}: expected two disjoint groups",
        )
        matrix = _right(classes)
        matrix[np.ix_(rows, columns)] = penalty
        return cls(matrix, classes)

    @classmethod
    def from_costs(
        cls,
        costs: ArrayLike | Path,
        classes: Classes | Sequence[str] | None = None,
        actions: Sequence[str] | None = None,
    ) -> "Utility":
        """A cost matrix [true, action], or its CSV file (which names the actions),
        turned into a utility: U = -cost.
        """
        if isinstance(costs, str | Path):
            expect(
                actions is None,
                f"{costs} names its actions: leave out actions={actions!r}",
            )
            given = cls.read_csv(
                costs, None if classes is None else as_classes(classes)
            )
        else:
            given = cls(costs, classes, actions)
        return cls(-given.matrix + 0.0, given.classes, given.actions)

    def with_abstain(self, value: float | ArrayLike, name: str = ABSTAIN) -> "Utility":
        """Add an action that hands the sample over: worth `value` whatever is true, or
        one value per class.
        """
        count, values = len(self.classes), np.asarray(value, dtype=float)
        new = name not in self.actions
        expect(
            new,
            f"utility has an action {name!r} already: leave the new one out, or give it"
            " another name",
        )
        fits = values.ndim < 2 and values.size in (1, count)
        expect(
            fits,
            f"abstain has {values.size} values: expected one number, or one per class"
            f" ({count})",
        )
        column = np.broadcast_to(values.reshape(-1), count)
        return Utility(
            np.column_stack([self.matrix, column]), self.classes, [*self.actions, name]
        )

    def with_expert(
        self, name: str, *, confusion: ArrayLike, cost: float | ArrayLike = 0.0
    ) -> "Utility":
        """Add an action that asks somebody who may be wrong, and then decides for the
        class of the answer.

        It is worth `sum_answer confusion[true, answer] U[true, answer] - cost`.

        Parameters
        ----------
        name : str
            Name of the action.
        confusion : array-like of shape (n_classes, n_classes), or float
            P(answer | true class), each row summing to 1; or the probability of a right
            answer, with mistakes spread evenly over the other classes.
        cost : float or array-like of shape (n_classes,)
            What an answer costs, on the scale of the utility; one number, or one per
            true class.

        Examples
        --------
        >>> utility = Utility([[1, 0], [-5, 1]], ["healthy", "ill"])
        >>> utility.with_expert(
        ...     "radiologist", confusion=[[0.9, 0.1], [0.05, 0.95]], cost=0.1
        ... ).matrix[:, 2]
        array([0.8, 0.6])
        """
        count, own = len(self.classes), self.class_action
        absent = self.classes.select(np.flatnonzero(own < 0))
        expect(
            not absent,
            f"expert {name!r} may answer {listing(absent)}, but no action decides for"
            " it: add one",
        )
        try:
            given, costs = np.array(confusion, dtype=float), np.array(cost, dtype=float)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"expert {name!r}: confusion and cost must be numbers ({error})"
            ) from None
        if given.ndim == 0:
            given = np.where(
                np.eye(count, dtype=bool), given, (1 - given) / max(1, count - 1)
            )
        expected = (
            f"expected ({count}, {count}), P(answer | true class), or the share of"
            " right answers"
        )
        expect(
            given.shape == (count, count),
            f"confusion of expert {name!r} has shape {given.shape}: {expected}",
        )
        wrong = np.flatnonzero(
            ~(
                (given >= 0).all(axis=1)
                & (np.abs(given.sum(axis=1) - 1) <= SUM_TOLERANCE)
            )
        )
        for row in wrong[:1]:
            raise InputError(
                f"confusion of expert {name!r}: the row of true class"
                f" {self.classes.names[row]!r} is"
                f" {listing([f'{v:g}' for v in given[row]])}, with sum"
                f" {given[row].sum():g}: expected shares of answers, 0 or more, that"
                " sum to 1"
            )
        given /= given.sum(axis=1, keepdims=True)
        expect(
            np.isfinite(costs).all(),
            f"cost of expert {name!r} is {cost!r}: expected finite numbers",
        )
        return self.with_abstain(
            (given * self.matrix[:, own]).sum(axis=1) - costs, name
        )

    def with_classes(
        self, classes: Classes, *, same_actions: bool = False
    ) -> "Utility":
        """The same utility in the order of `classes`, matched by name, with their
        counts and groups.

        With `same_actions`, actions keep their order: then their numbers are those of
        this utility.
        """
        known = self.classes.in_order(classes.names)
        if classes.counts is None:
            classes = Classes(
                classes.names, known.counts, classes.groups or known.groups
            )
        rows = self.classes.encode(list(classes.names))
        place = {name: i for i, name in enumerate(self.actions)}
        first = (
            () if same_actions else (name for name in classes.names if name in place)
        )
        actions = list(dict.fromkeys([*first, *self.actions]))
        return Utility(
            self.matrix[rows][:, [place[name] for name in actions]], classes, actions
        )

    @classmethod
    def read_csv(cls, path: str | Path, classes: Classes | None = None) -> "Utility":
        """Read a table with action names in its first line and a true class at the
        start of each further line.

        Rows and columns are matched by name, never by position, and brought into the
        order of `classes` if given. The corner cell says what the lines are: of a table
        with `decided` there, or `decided x true`, lines are actions and columns are
        true classes.
        """
        file = CsvFile(Path(path))
        try:
            matrix, names, actions = _read_matrix(file)
            corner = file.names[0]
            if classes is not None:
                bare = corner in classes.names and not {*names} & {*classes.names}
                fix = "begin each line with its class, and the first with an empty cell"
                expect(not bare, f"lines have no true class: {fix}")
            if rows_are_actions(*_axes_of(corner)):
                matrix = [list(column) for column in zip(*matrix, strict=True)]
                names, actions = actions, names
            if classes is not None:
                absent = [repr(name) for name in classes.names if name not in names]
                one = f"has no row for {listing(absent)}: expected one per class"
                expect(not absent or {*names} - {*classes.names}, one)
                as_classes(names).in_order(
                    classes.names
                )  # a misspelt row: before actions are compared to it
            utility = cls(matrix, names, actions)
            return utility if classes is None else utility.with_classes(classes)
        except InputError as error:
            raise InputError(
                f"{path}{'' if str(error).startswith(' line') else ': '}{error}"
            ) from None

    def to_csv(self, path: str | Path) -> None:
        """Write what `read_csv` reads."""
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["true", *map(escaped, self.actions)])
            for name, row in zip(self.classes.names, self.matrix, strict=True):
                writer.writerow(
                    [
                        escaped(name),
                        *(repr(float(value)).removesuffix(".0") for value in row),
                    ]
                )

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and tables, ready for JSON."""
        return {
            "classes": self.classes.to_dict(),
            "actions": list(self.actions),
            "matrix": self.matrix.tolist(),
        }

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> "Utility":
        """The inverse of `to_dict`."""
        return cls(
            table["matrix"], Classes.from_json(table["classes"]), table["actions"]
        )

    @cached_property
    def decided_class(self) -> Indices:
        """The class that each action decides for, or -1 if it hands the sample over."""
        return _places(self.actions, self.classes.names)

    def deciding(self, name: str) -> Indices:
        """The actions that decide for a class or a class group, or the action of that
        name which hands over.
        """
        if name in self.actions and name not in self.classes.groups:
            return np.array([self.actions.index(name)])
        return np.flatnonzero(
            np.isin(self.decided_class, self.classes.members(name, self.actions))
        )

    def gains(self, probabilities: Floats) -> Floats:
        """The expected utility of every action (N, A), from probabilities (N, C).

        In 64 bits: where all values are large, 32 would not tell one action from
        another.

        >>> Utility([[1, 0], [-5, 1]]).gains(np.array([[0.9, 0.1]])).round(6).tolist()
        [[0.4, 0.1]]
        """
        return np.asarray(probabilities) @ self.matrix

    @cached_property
    def upside_down(self) -> bool:
        """Whether every right decision is worth the least of its row, as if costs were
        taken for utilities.
        """
        own, differs = self.class_action, False
        for true in (
            range(len(own)) if (own >= 0).all() else ()
        ):  # row by row: most utilities are known by the first
            row = self.matrix[true, own]
            if row[true] > row.min():
                return False
            differs |= bool(row[true] < row.max())
        return differs

    @cached_property
    def has_costs(self) -> bool:
        """Whether these are costs with their sign changed: right decisions are worth 0,
        and nothing is worth more.

        Classes that no action decides for, such as misspelt ones, have no right
        decision.
        """
        known = np.flatnonzero(self.class_action >= 0)
        right = len(known) and not self.matrix[known, self.class_action[known]].any()
        return bool(right and self.matrix.max() <= 0 and self.matrix.any())

    @property
    def dominated(self) -> dict[str, str]:
        """Actions that hand over and never have the highest expected utility, each with
        one that is always better.

        >>> utility = Utility.one_hot(["cat", "dog"]).with_abstain(0.5)
        >>> utility.with_abstain(0.4, "ask").dominated
        {'ask': 'abstain'}
        """
        found = dict[str, str]()
        for action in np.flatnonzero(self.decided_class < 0).tolist():
            gains = self.matrix - self.matrix[:, [action]]
            better = (gains >= 0).all(axis=0) & (gains > 0).any(axis=0)
            if better.any():
                found[self.actions[action]] = self.actions[better.argmax()]
        return found

    @property
    def threshold(self) -> float | None:
        """Of two classes and two actions: the probability of the second class above
        which the action changes.

        None for other tables, and where one action is always at least as good.

        >>> Utility.from_costs([[0, 1], [40, 0]], ["good", "bad"]).threshold == 1 / 41
        True
        """
        if self.matrix.shape != (2, 2):
            return None
        first, second = (
            self.matrix[:, 1] - self.matrix[:, 0]
        ).tolist()  # what the second action gains in each class
        return float(first / (first - second)) if first * second < 0 else None

    @cached_property
    def class_action(self) -> Indices:
        """The action that decides for each class, or -1 if there is none."""
        return _places(self.classes.names, self.actions)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Utility) and self.to_dict() == other.to_dict()

    def __repr__(self) -> str:
        title = (
            f"Utility of {len(self.classes)} classes and {len(self.actions)} actions"
        )
        if max(self.matrix.shape) > SHOWN_CLASSES:
            low, high = self.matrix.min(), self.matrix.max()
            return (
                f"{title}: values from {low:g} to {high:g}, {(self.matrix < 0).sum()}"
                " of them negative"
            )
        cells = [["true \\ action", *self.actions]]
        cells += [
            [n, *(f"{v:g}" for v in row)]
            for n, row in zip(self.classes.names, self.matrix, strict=True)
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join(
            [
                title,
                *(
                    "  ".join(c.rjust(w) for c, w in zip(r, widths, strict=True))
                    for r in cells
                ),
            ]
        )


def _axes_of(corner: str) -> tuple[str, str]:
    """What a corner cell says of the lines and of the columns.

    >>> _axes_of("decided x true")
    ('decided', 'true')
    """
    parts = BETWEEN.split(corner.lower()) if corner.strip() else []
    parts = [part.strip() for part in parts]
    expect(
        len(parts) <= 2 and all(map(_axis, parts)),
        f"the corner cell {corner!r} does not say what lines and columns are: {CORNER};"
        " each line begins with its true class, or with its action",
    )
    rows, columns = [*parts, "", ""][:2]
    return rows, columns


def rows_are_actions(rows: str, columns: str = "") -> bool:
    """Whether lines are actions and columns true classes, as the names of the two axes
    say.

    >>> rows_are_actions("true", "action"), rows_are_actions("decided")
    (False, True)
    """
    meant_by_rows = _axis(rows)
    meant_by_columns = _axis(columns)
    expect(
        not meant_by_rows or meant_by_rows != meant_by_columns,
        f"{rows!r} and {columns!r} both name the {meant_by_rows} classes: {CORNER}",
    )
    if meant_by_rows:
        return meant_by_rows == "decided"
    return meant_by_columns == "true"


def _axis(name: str) -> str:
    """`true` or `decided`, whichever the words are about; nothing of other words."""
    words = set(re.findall(r"[^\W\d_]+", name.lower()))
    if words & ACTION_WORDS and words & TRUE_WORDS:
        raise InputError(f"{name!r} names true classes and actions at once: {CORNER}")
    if words & ACTION_WORDS:
        return "decided"
    if words & (TRUE_WORDS | CLASS_WORDS):
        return "true"
    return ""


def _places(names: Sequence[str], among: Sequence[str]) -> Indices:
    place = {name: i for i, name in enumerate(among)}
    return np.array([place.get(name, -1) for name in names], dtype=np.int64)


def _frame_names(axis: Any, given: Any, what: str) -> Any:
    """The names along an axis of a data frame unless they are positions; given names
    must be the same, in order.
    """
    own = [str(name) for name in axis]
    if own == [str(i) for i in range(len(own))]:
        return given
    names = (
        own if given is None else [str(name) for name in getattr(given, "names", given)]
    )
    other = (
        f"the data frame names its {what} {listing(own)}, but {listing(names)} are"
        " given"
    )
    expect(names == own, f"{other}: leave these out, or reorder the frame")
    return own if given is None else given


def _right(classes: Classes) -> NDArray[np.float64]:
    """1 for the true class, 0 for any other; raises for more classes than a matrix may
    have.
    """
    count = len(classes)
    expect(
        count**2 <= MOST_VALUES,
        f"a utility of {count:,} classes would be a matrix of {count:,} x {count:,}"
        f" values: expected at most {math.isqrt(MOST_VALUES):,} classes; if these are"
        " not all classes, name those that are (--classes a,b,c), otherwise merge rare"
        " ones",
    )
    return np.eye(count)


def _is_constant(matrix: ArrayLike) -> TypeGuard[NDArray[np.float64]]:
    """Whether nobody can write to it, so that it needs no copy."""
    return (
        isinstance(matrix, np.ndarray)
        and matrix.dtype == np.float64
        and matrix.base is None
        and not matrix.flags.writeable
    )


def _as_matrix(matrix: ArrayLike) -> NDArray[np.float64]:
    try:
        values = matrix if _is_constant(matrix) else np.array(matrix, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"utility must be a table of numbers with rows of equal length ({error})"
        ) from None
    expect(
        values.ndim == 2 and values.size,
        f"utility has shape {values.shape}: expected (classes, actions)",
    )
    # Two passes without a copy, as a matrix may be large; NaN is in no range.
    if not (values.min() >= -LARGEST and values.max() <= LARGEST):
        row, column = np.argwhere(~(np.abs(values) <= LARGEST))[0]
        raise InputError(
            f"utility holds {values[row, column]} in row {row}, column {column}:"
            f" expected finite numbers of at most {LARGEST:g}; for what must never"
            " happen -1e6 is enough if the others are around 1"
        )
    values.setflags(write=False)
    return values


def _warn_of_missing_actions(actions: Sequence[str], classes: Sequence[str]) -> None:
    """Warn of classes that have no action: one is named almost like the class, or
    others decide for their classes.

    Sorted, and from one place: Python shows each warning once, however often the
    utility is rearranged.
    """
    known, decided = set(classes), set(actions)
    lacking = {name.casefold(): name for name in sorted(known - decided)}
    for action in [name for name in actions if name not in known][:MOST_COMPARED]:
        for near in get_close_matches(action.casefold(), lacking, n=1, cutoff=SIMILAR):
            name = lacking.pop(near)
            warnings.warn(
                f"the action {action!r} is not a class, so it hands samples over, and"
                f" no action decides for the class {name!r}: did you mean {name!r}?"
                " Then rename one of them",
                stacklevel=1,
            )
    if lacking and known & decided:
        warnings.warn(
            f"no action decides for {listing(lacking.values())}, as for other classes:"
            " these can never be decided; if that is not meant, add an action of the"
            " name of each class",
            stacklevel=1,
        )


def _read_matrix(file: CsvFile) -> tuple[list[list[float]], list[str], list[str]]:
    """Values, class names and action names of a CSV file."""
    lines = list(file.rows())
    expect(lines, "expected a first line of action names and one line per class")
    corner, *actions = file.names
    names = [row[0] for _, row in lines]
    expect(  # of numbered classes, a first column of values could pass for their names
        corner not in names,
        f"the first line begins with the class {corner!r}: expected a first column that"
        " holds the true classes, with any other word above it, such as true",
    )
    signs = [
        next((cell for _, row in lines for cell in row[1:] if sign in cell), None)
        for sign in ",."
    ]
    # between semicolons either sign may be the decimal one; if both occur, one of them
    # is for thousands
    expect(
        file.decimal == "." or None in signs,
        f"holds both {signs[0]!r} and {signs[1]!r}: expected one decimal sign, and none"
        " for thousands",
    )
    for line, row in lines:
        expect(
            len(row) == len(file.names),
            f" line {line}: {len(row)} cells, expected {len(file.names)}",
        )
        for action, cell in zip(actions, row[1:], strict=True):
            expect(
                is_number(cell, file.decimal),
                f" line {line}, column {action!r}: {cell!r} is not a number",
            )
    return (
        [[number(cell, file.decimal) for cell in row[1:]] for _, row in lines],
        names,
        actions,
    )

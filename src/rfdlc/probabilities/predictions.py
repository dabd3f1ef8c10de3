"""Predictions: scores of a model for some samples, with their targets and ids; saved
without pickle.
"""

import copy
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rfdlc.errors import BrokenRows, InputError, expect, listing
from rfdlc.formats.files import (
    OBJECTS,
    array_of,
    check_version,
    open_npz,
    parse_json,
    runs_inside,
)
from rfdlc.formats.tables import (
    CSV,
    SUFFIXES,
    CsvFile,
    open_table,
    parquet_files,
    read_numbers,
)
from rfdlc.probabilities.classes import (
    SKIPPING_UNKNOWN,
    Classes,
    Indices,
    as_array,
    as_classes,
    is_missing,
    labelled_places,
)
from rfdlc.probabilities.priors import as_groups
from rfdlc.probabilities.scores import (
    BOOK_KEEPING,
    GIVEN,
    GROUP,
    KIND,
    Scores,
    as_scores,
    check_left_out,
    class_columns,
    column_order,
    is_index,
    told_by,
)

FORMAT = "rfdlc-predictions"
VERSION = 1  # another number for whatever changes what an .npz file says
# Names of arrays in an .npz file; the first of each is the one that `save` writes.
KEYS = {
    "logits": ("logits",),
    "probabilities": ("probabilities", "probs", "proba"),
    "targets": ("targets", "target", "labels", "y"),
    "ids": ("ids", "id"),
    "classes": ("classes", "names"),
    "uncertainty": ("uncertainty",),
    "unfamiliarity": ("unfamiliarity",),
    "groups": ("groups",),
    "corrected": ("corrected",),
    "model": ("rfdlc_model",),
}
NUMBERED = (
    "; text is the name of a class, and a number in it is no position among the"
    " columns, whose order may be another: write the names of the classes"
)
UNNAMED = (
    "; if the classes have names, give these in the order of the columns"
    " (classes=[...], Utility(matrix, [...]), --classes a,b,c) or as the names of the"
    " columns"
)


class Predictions:
    """Scores of N samples by M particles, (M, N, C), with targets, ids and classes if
    known.

    Parameters
    ----------
    logits, probabilities : array-like of shape (n_samples, n_classes) or (n_particles,
    n_samples, n_classes)
        Exactly one of the two.
    targets : array-like of shape (n_samples,), optional
        True classes, as indices or names.
    ids : sequence of str, optional
        One per sample.
    classes : Classes or sequence of str, optional
        One per column; numbered by default.
    uncertainty : array-like of shape (n_samples,), optional
        The model's own uncertainty of each sample, larger for less sure.
    unfamiliarity : array-like of shape (n_samples,), optional
        How far each sample is from the training data, such as a `FeatureDistance`;
        larger for less familiar.
    groups : array-like of shape (n_samples,), optional
        What samples belong to, such as a patient or a site: folds keep groups whole,
        and intervals are about new ones.
    corrected : bool or str, default False
        Whether the probabilities are calibrated and corrected already: a Decider that
        would do so again refuses them. Text, as in tables of `rfdlc predict`, says for
        which class prior.
    model : str, optional
        The name of the model that scored the samples, as files of `rfdlc predict` have
        it: a Decider of another model refuses them.

    Raises
    ------
    InputError
        If shapes do not fit, or a target is not a class.

    Examples
    --------
    >>> predictions = Predictions(
    ...     probabilities=[[0.9, 0.1], [0.2, 0.8]], targets=[0, 1]
    ... )
    >>> predictions
    Predictions(1 particle, 2 samples, 2 classes, probabilities, with targets)
    """

    def __init__(
        self,
        *,
        logits: ArrayLike | None = None,
        probabilities: ArrayLike | None = None,
        targets: ArrayLike | None = None,
        ids: Sequence[str] | NDArray[Any] | None = None,
        classes: Classes | Sequence[str] | None = None,
        uncertainty: ArrayLike | None = None,
        unfamiliarity: ArrayLike | None = None,
        groups: ArrayLike | None = None,
        corrected: bool | str = False,
        model: str = "",
    ) -> None:
        one = (logits is None) != (probabilities is None)
        expect(
            one,
            "predictions hold either logits or probabilities: expected exactly one of"
            " the two",
        )
        given: Any = probabilities if logits is None else logits
        self.named = (
            classes is not None
        )  # whether columns have names, or only positions
        self.classes = as_classes(
            max(1, np.shape(given)[-1] if np.ndim(given) else 0)
            if classes is None
            else classes
        )
        self.scores: Scores = as_scores(given, self.classes, logits=logits is not None)
        self.targets: Indices | None = (
            None if targets is None else encode_targets(targets, self.classes)
        )
        self.ids: NDArray[np.str_] | None = (
            None if ids is None else readable_ids(as_array(ids).astype(str).reshape(-1))
        )
        self.uncertainty = _numbers(uncertainty, "uncertainty")
        self.unfamiliarity = _numbers(unfamiliarity, "unfamiliarity")
        finite = self.unfamiliarity is None or bool(
            np.isfinite(self.unfamiliarity).all()
        )
        expect(
            finite,
            "unfamiliarity has values that are not finite: leave out such samples, or"
            " give numbers",
        )
        known = {"uncertainty": self.uncertainty, "unfamiliarity": self.unfamiliarity}
        for what, values in {"targets": self.targets, "ids": self.ids, **known}.items():
            shape = None if values is None else values.shape
            fits = shape in (None, (len(self),))
            expect(
                fits,
                f"{what} have shape {shape} for {len(self)} samples: expected one per"
                " sample",
            )
        self.groups: Indices | None = (
            None if groups is None else as_groups(groups, len(self))
        )
        self.columns: dict[str, ArrayLike] = {}  # of a table, beside the classes
        self.file = ""  # that they were read from
        self.left_out = 0  # samples of the file without a label, or of an unknown class
        own: dict[str, Any] = {
            "ids": self.ids,
            "unfamiliarity": self.unfamiliarity,
            "groups": self.groups,
        }
        self.scores = replace(
            self.scores,
            corrected=corrected or self.scores.corrected,
            model=model or self.scores.model,
            **own,
        )

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def _kind(self) -> str:
        return "logits" if self.scores.logits else "probabilities"

    def __repr__(self) -> str:
        particles, samples, classes = self.scores.values.shape
        known = f"{self._kind}, {'without' if self.targets is None else 'with'} targets"
        plural = "" if particles == 1 else "s"
        return (
            f"Predictions({particles} particle{plural}, {samples} samples, {classes}"
            f" classes, {known})"
        )

    def scores_for(self, classes: Classes) -> Scores:
        """Scores in the order of `classes`, as `with_classes` has them."""
        alike = self.named and self.classes.names == classes.names
        return self.scores if alike else self.with_classes(classes).scores

    def with_classes(self, classes: Classes) -> "Predictions":
        """The same predictions in the order of `classes`, matched by name where both
        have names.
        """
        values, targets = self.scores.values, self.targets
        if self.named and self.classes.names != classes.names:
            self.classes.in_order(classes.names)
            place, order = (
                classes.encode(list(self.classes.names)),
                self.classes.encode(list(classes.names)),
            )
            values, targets = (
                values[:, :, order],
                None if targets is None else place[targets],
            )
        known = {"targets": targets, "ids": self.ids, "uncertainty": self.uncertainty}
        known |= {"unfamiliarity": self.unfamiliarity, "groups": self.groups}
        reordered = Predictions(
            **{self._kind: values},
            **known,
            classes=classes,
            corrected=self.scores.corrected,
            model=self.scores.model,
        )
        reordered.file = self.file
        return reordered

    def of(self, model: str) -> "Predictions":
        """The same predictions, marked as those of the model of this name."""
        marked = copy.copy(self)
        marked.scores = replace(self.scores, model=model)
        return marked

    def take(self, rows: Indices) -> "Predictions":
        """The samples at these positions, with all that is known of them."""
        own = {
            "targets": self.targets,
            "ids": self.ids,
            "uncertainty": self.uncertainty,
            "groups": self.groups,
        }
        own |= {"unfamiliarity": self.unfamiliarity}
        known: dict[str, Any] = {
            name: None if values is None else values[rows]
            for name, values in own.items()
        }
        known |= {
            "classes": self.classes if self.named else None,
            "corrected": self.scores.corrected,
            "model": self.scores.model,
        }
        taken = Predictions(**known | {self._kind: self.scores.values[:, rows]})
        taken.file = self.file
        taken.columns |= {
            name: as_array(values)[rows] for name, values in self.columns.items()
        }
        return taken

    def save(self, path: str | Path) -> None:
        """Write an .npz file that holds plain arrays only."""
        arrays = {
            "format": np.array(FORMAT),
            "version": np.array(VERSION),
            self._kind: self.scores.values,
            "classes": (
                np.array(json.dumps(self.classes.to_dict(), ensure_ascii=False))
                if self.named
                else None
            ),
            "targets": self.targets,
            "ids": self.ids,
            "uncertainty": self.uncertainty,
            "unfamiliarity": self.unfamiliarity,
            "groups": self.groups,
            "corrected": (
                np.array(self.scores.corrected) if self.scores.corrected else None
            ),
            "rfdlc_model": (np.array(self.scores.model) if self.scores.model else None),
        }
        with open(path, "wb") as file:
            np.savez(
                file,
                allow_pickle=False,
                **{name: a for name, a in arrays.items() if a is not None},
            )

    @classmethod
    def load(
        cls,
        path: str | Path,
        classes: Classes | Sequence[str] | None = None,
        *,
        logits: bool = False,
        others: str = "",
        columns: Sequence[str] = (),
        skip_unknown: bool | None = None,
    ) -> "Predictions":
        """Read .npz, .csv, .tsv, .parquet or .arrow, a folder of Parquet files, or
        predictions.npz of a run folder.

        Tables have one column per class, named after it, and optionally `target`, `id`
        and `rfdlc_scores` (`raw`, or `corrected ...` for those that are calibrated and
        corrected). An .npz file has `logits` or `probabilities`, and optionally
        `targets`, `ids`, `groups` and `classes`. The argument `classes` supplies counts
        and groups of classes. `logits` says that a table holds logits; in an .npz file
        the array's name says so. Columns that are not among `classes` are ignored,
        unless they must be a class; errors call what names the classes `others`, such
        as a table of costs. `columns` are those to keep as text in `.columns`. A table
        with rows without a label has no `targets`, unless `skip_unknown` leaves out
        these and those of unknown classes; if False, they raise.
        """
        path = _in_folder(Path(path))
        reader = _from_table if path.is_dir() else _READERS.get(path.suffix.lower())
        if reader is None or not path.exists():
            trouble = (
                f"unknown kind of file {path.suffix!r}"
                if path.exists()
                else "no such file or run folder"
            )
            raise InputError(f"{path}: {trouble}: expected {listing(_READERS)}")
        names = ""  # a column that is not a class may be why values are wrong
        try:
            loaded = reader(
                path,
                None if classes is None else as_classes(classes),
                logits,
                others,
                columns,
                skip_unknown,
            )
            fix = (
                ""
                if classes is not None
                else " (give their names by classes, --classes, if others are meant)"
            )
            names = (
                f"; taken for classes: {listing(loaded.classes.names)}{fix}"
                if loaded.named
                else ""
            )
            loaded.scores = loaded.scores.checked()  # raises for the first bad value
        except InputError as error:
            told = (
                error.told(_place(path, error.rows[0]))
                if isinstance(error, BrokenRows)
                else str(error)
            )
            raise InputError(
                f"{'' if told.startswith(f'{path}') else f'{path}: '}{told}{names}"
            ) from None
        loaded.file = str(path)
        return loaded


def _in_folder(path: Path) -> Path:
    """The predictions of the test split in a run folder; other paths unchanged."""
    if not path.is_dir() or parquet_files(path):
        return path
    if (path / "predictions.npz").is_file():
        return path / "predictions.npz"
    raise InputError(
        runs_inside(path)
        or f"{path}: has no predictions.npz: its data had no test split, or the"
        f" training is not finished (then `rfdlc resume {path}`). For labelled"
        f" samples: `rfdlc predict {path} DATA --out scored.npz`, then scored.npz"
        f" with --decider {path}/decider.json"
    )


def encode_targets(
    targets: ArrayLike, classes: Classes, what: str = "target"
) -> Indices:
    """Targets as class indices: numbers are indices, text is names, also where it is a
    number.
    """
    array = as_array(targets)
    text = array.dtype.kind in "OU"
    try:
        return classes.encode(
            array.astype(str) if array.dtype.kind == "O" else array, what
        )
    except InputError as error:
        by_number, odd = (
            any(map(is_index, classes.names)),
            text and all(map(is_index, array.reshape(-1))),
        )
        hint = (
            UNNAMED
            if text and all(map(is_index, classes.names))
            else NUMBERED
            if odd and not by_number
            else ""
        )
        raise InputError(f"{error}{hint}") from None


def targets_of(scores: Any, targets: ArrayLike | None, classes: Classes) -> Indices:
    """Given targets, or those of predictions or of a data frame, as indices of
    `classes`.
    """
    if targets is None and isinstance(scores, Predictions):
        targets = scores.with_classes(classes).targets
    elif hasattr(scores, "columns"):
        targets = (
            scores["target"]
            if targets is None and "target" in scores.columns
            else targets
        )
        given = np.asarray(targets)
        lost = sum(map(is_missing, given.tolist())) if given.ndim else 0
        expect(
            not lost,
            f"{lost:,} of {given.size:,} samples have no label: leave them out (dropna"
            " of a data frame)",
        )
        if given.dtype.kind in "iu" or (
            given.dtype.kind == "f" and (given == np.floor(given)).all()
        ):
            targets = _names_or_places(given.astype(np.int64), classes.names)
    if targets is None:
        cells: Any = (
            scores.columns.get("target", ()) if isinstance(scores, Predictions) else ()
        )
        if empty := [row for row, cell in enumerate(cells) if not cell]:
            some = (
                f"{len(empty):,} of {len(cells):,} samples have no label, first in row"
                f" {empty[0]} (counted from 0)"
            )
            raise InputError(
                f"{some}: leave them out by Predictions.load with {SKIPPING_UNKNOWN}"
            )
        raise InputError(
            "no targets: expected the true class of every sample (a column 'target', or"
            " --labels FILE)"
        )
    return encode_targets(targets, classes)


def _names_or_places(numbers: NDArray[Any], names: Iterable[str]) -> NDArray[Any]:
    """Whole numbers as text, where classes are called by numbers."""
    return numbers.astype(str) if any(map(is_index, names)) else numbers


def readable_ids(ids: Iterable[str]) -> NDArray[np.str_]:
    """Names of files may not be UTF-8, but tables are: other bytes are written as
    escapes.
    """
    return np.array(
        [
            text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
            for text in ids
        ]
    )


def _numbers(given: ArrayLike | None, what: str) -> NDArray[np.float64] | None:
    try:
        return None if given is None else np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"{what} must be numbers, one per sample ({error})") from None


def numbers_in(
    batches: Iterable[Any], names: Sequence[str]
) -> Callable[[str], NDArray[np.float64]]:
    """A column as numbers (others raise ValueError), by its name; batches are read when
    the first one is asked for.
    """
    from pyarrow import ArrowNotImplementedError, Table

    table = cache(
        lambda: Table.from_batches([batch.select(names) for batch in batches])
    )

    def numbers(name: str) -> NDArray[np.float64]:
        try:
            return table()[name].cast("float64").to_numpy()
        except ArrowNotImplementedError as error:  # dates and lists are not numbers
            raise ValueError(error) from None

    return numbers


def _from_table(
    path: Path,
    classes: Classes | None,
    logits: bool,
    others: str,
    columns: Sequence[str],
    skip: bool | None,
) -> Predictions:
    """Columns but `id` and `target` are classes, in their order, unless `classes` are
    given, of what `others` names.
    """
    file, known_by = open_table(path), "" if classes is None else others or GIVEN
    unnamed = (
        f"column {[*file.names, ''].index('') + 1} has no name: expected the name of a"
        " class, id or target"
    )
    expect(
        "" not in file.names,
        f"{unnamed}; leave an index out (index=False), or call it id",
    )
    if classes is None:
        names = [name for name in class_columns(file.names) if name not in columns]
        few = (
            f"the class columns are {listing(names) or 'none'}: expected one column per"
            " class, named after it"
        )
        expect(
            len(names) > 1,
            f"{few}; for two classes with one probability add the other one (1 - p)",
        )
        classes = Classes(tuple(names))
    column_order(file.names, classes, str(path), known_by)
    # A class may be called id, as Indonesian is among languages.
    own = (*BOOK_KEEPING, KIND, *({GROUP} - {*class_columns(file.names)}))
    texts = [
        n for n in file.names if n in columns or (n in own and n not in classes.names)
    ]
    try:
        values, found = read_numbers(file, classes.names, texts)
    except InputError as error:
        fix = "leave others out, and call that of the true classes target"
        hint = f"; every column but {' and '.join(BOOK_KEEPING)} is a class: {fix}"
        if {"action", "runner_up"} <= {*file.names}:
            hint = (
                "; these are decisions: give the file of probabilities that they were"
                " made from"
            )
        raise InputError(f"{error}{hint if 'column' in str(error) else ''}") from None
    if known_by:
        beside = [
            name for name in class_columns(file.names) if name not in classes.names
        ]
        check_left_out(
            numbers_in(file.batches(), beside),
            beside,
            values,
            found.get("target", ()),
            known_by,
        )
    labels, rows = found.get("target"), len(values)
    if labels is not None and skip is not None:
        kept = labelled_places(
            labels.tolist(), classes, path, skip, lambda row: _place(path, row)
        )
        if len(kept) < rows:
            values, found = (
                values[kept],
                {name: cells[kept] for name, cells in found.items()},
            )
    kind, known = (
        "logits" if logits else "probabilities",
        {"targets": found.get("target"), "ids": found.get("id")},
    )
    if labels is not None and not all(found["target"]):
        del known["targets"]
    known["groups"] = found.get(GROUP) if KIND in file.names else None
    corrected, model = told_by(found.get(KIND, ()))
    try:
        loaded = Predictions(
            **{kind: values}, **known, classes=classes, corrected=corrected, model=model
        )
    except InputError as error:
        raise InputError(
            f"{_where(path, () if labels is None else labels, str(error))}{error}"
        ) from None
    loaded.columns |= found
    loaded.left_out = rows - len(loaded)
    return loaded


def _where(path: Path, targets: Iterable[str], error: str) -> str:
    """The line or row of a target that is not a class, if the error is about one."""
    place = next(
        (
            i
            for i, text in enumerate(targets)
            if error.startswith(f"target {str(text)!r} is not")
        ),
        None,
    )
    if place is None:
        return ""
    return f"{path} {_place(path, place)}: "


def _place(path: Path, row: int) -> str:
    """A row of a table as its reader finds it."""
    lines = (
        islice(CsvFile(path).rows(), row, None)
        if path.suffix.lower() in CSV
        else iter(())
    )
    return next((f"line {line}" for line, _ in lines), f"row {row} (counted from 0)")


def _from_npz(
    path: Path, classes: Classes | None, logits: bool, *_: Any
) -> Predictions:
    try:
        with open_npz(path) as file:
            found = {key: array_of(file, key) for key in file.files}
    except InputError:
        raise
    except Exception as error:  # a damaged file can fail in any way
        reason = (
            error
            if OBJECTS in str(error)
            else f"damaged, or of another format ({error})"
        )
        raise InputError(f"cannot be read as .npz without pickle: {reason}") from None
    said = {
        name: found[name].tolist() for name in ("format", "version") if name in found
    }
    if said.get("format") == FORMAT:  # not somebody else's file
        check_version(path, said, FORMAT, VERSION)
    arrays: dict[str, Any] = {}
    for name, keys in KEYS.items():
        present = [key for key in keys if key in found]
        expect(
            len(present) < 2,
            f"holds both {' and '.join(map(repr, present))}: expected one of them",
        )
        arrays |= dict(zip([name], map(found.get, present), strict=False))
    one = {"logits", "probabilities"} & set(arrays)
    expect(
        one,
        f"holds {listing(found) or 'nothing'}: expected an array 'probabilities' or"
        " 'logits'",
    )
    wrong = logits and "probabilities" in arrays
    expect(
        not wrong,
        "its array is named probabilities, but logits are asked for: name the array"
        " 'logits'",
    )
    names = arrays.pop("classes", None)
    corrected = arrays.get("corrected", np.False_)
    expect(
        corrected.size == 1,
        f"'corrected' has {corrected.size} values: expected one, for all samples",
    )
    arrays["corrected"] = corrected.item()
    arrays["model"] = str(arrays.get("model", ""))
    own = _classes_in(names, found.get("counts"))
    if (
        own is not None
        and names.ndim
        and "targets" in arrays
        and arrays["targets"].dtype.kind in "iu"
    ):
        arrays["targets"] = _names_or_places(arrays["targets"], own.names)
    predictions = Predictions(**arrays, classes=own or classes)
    return predictions.with_classes(classes) if classes is not None else predictions


def _classes_in(
    array: NDArray[Any] | None, counts: NDArray[Any] | None
) -> Classes | None:
    """Classes as `save` writes them (JSON), or a plain array of names beside one of
    counts.
    """
    if array is None:
        return None
    if array.ndim:
        names = tuple(as_array(array).astype(str))
        return Classes(
            names, None if counts is None else tuple(np.atleast_1d(counts).tolist())
        )
    try:
        return Classes.from_json({} | parse_json(str(array)))
    except InputError:
        raise
    except (TypeError, ValueError):
        raise InputError(
            f"'classes' holds {str(array)!r}: expected an array of names, one per"
            " column"
        ) from None


_READERS = {".npz": _from_npz, **dict.fromkeys(SUFFIXES, _from_table)}

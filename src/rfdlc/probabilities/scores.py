"""Scores: probabilities or logits of any model as one checked array (M particles, N
samples, C classes).
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from rfdlc.errors import BrokenRows, InputError, expect, listing, repeated, suggestion
from rfdlc.probabilities.classes import Classes, Indices, as_array
from rfdlc.progress import track

Floats = NDArray[np.floating[Any]]

BOOK_KEEPING = ("id", "target")  # columns of a table that are not classes
DECIDED = ("action", "expected_utility")  # nor are these two, if both are there
DETAILS = ("reason", "set", "set_size")  # nor these, beside those two
LOGGED = ("time", "decider")  # nor these of a log of decisions
KIND, CORRECTED, RAW = (
    "rfdlc_scores",
    "corrected",
    "raw",
)  # a column that says what the probabilities are
BY_MODEL = " by model "  # in that column, before the name of the model that scored
GROUP = (  # after that column: what samples belong to, if a run was trained with groups
    "group"
)
RESERVED = (*BOOK_KEEPING, *DECIDED, *DETAILS, *LOGGED, KIND)
GIVEN = "the given classes (--classes)"
EXACT, ROUNDING = (
    1e-5,
    0.02,
    # sums of rows differ from 1 by the format of numbers, and by rounding to two
    # decimals
)
PERCENT = 100  # what rows of percentages sum to
# sums of rows may differ from 1 by this much, and by more where rounding explains it
SUM_TOLERANCE = 0.01
ROUNDED, MOST_LOST = (
    (2, 3, 4),
    0.5,
)  # decimals of rounded probabilities, and the most that is explained by it
# decimal digits of agreement between sums of rows and 1, over all rows, that are no
# chance; and those that one row can have, as it is stored in 32 or 64 bits
PROOF, SINGLE_DIGITS, DOUBLE_DIGITS = 12.0, 6.0, 12.0
PROBABILITY_FLOOR = 1e-12  # probabilities are clipped to this before taking logarithms
# nats by which logits of a row differ at most: no probability in 64 bits is much
# smaller than 1e-300
DEEPEST = 690.0
# equal scores of two sets are evidence of the same samples if repeats in one are rarer
# by this
COINCIDENCES = 4.0
CONSECUTIVE = 16  # samples whose scores together are not equal by chance
CHUNK_ELEMENTS = 1 << 18  # work in chunks that stay in the processor's cache
# with thousands of classes, fewer rows would read the whole utility for a small product
CHUNK_ROWS = 512


PROBABILITIES = (
    "these are probabilities, not logits: every row lies between 0 and 1 and sums to 1;"
    " leave logits out (--logits; logits=True), or call the array of an .npz file"
    " 'probabilities'"
)


class CorrectedProbabilities(np.ndarray[Any, np.dtype[Any]]):
    """Probabilities that a Decider has calibrated and corrected, so that no Decider
    does it again.

    `np.asarray(p)` gives an ordinary array, to be treated as the output of a new model.
    """

    # Results of arithmetic are not probabilities: only views and copies keep the mark.
    def __array_wrap__(
        self, array: NDArray[Any], context: Any = None, return_scalar: bool = False
    ) -> Any:
        return array[()] if return_scalar else np.asarray(array)


@dataclass(frozen=True)
class Scores:
    """Probabilities or logits of shape (M, N, C); values are checked chunk by chunk as
    they are read.
    """

    values: Floats
    logits: bool
    # whether a Decider has calibrated and corrected them; its words, if they are known
    corrected: bool | str = False
    ids: NDArray[np.str_] | None = None
    unfamiliarity: NDArray[np.float64] | None = (
        None  # (N,) a score of the model's own, larger for less familiar
    )
    groups: Indices | None = (
        None  # (N,) samples with the same number belong together: of a patient, a site
    )
    names: Sequence[str] = ()  # of the classes, for messages
    model: str = ""  # the name of the model that scored, where it is known

    def __len__(self) -> int:
        return int(self.values.shape[1])

    def chunks(self) -> Iterator[tuple[slice, Floats]]:
        """Checked chunks (M, n, C), each small enough to stay in the cache, but with
        enough rows for a product.
        """
        particles, samples, classes = self.values.shape
        rows = max(CHUNK_ROWS, CHUNK_ELEMENTS // (particles * classes))
        for start in track(range(0, samples, rows), "Reading scores"):
            yield (
                slice(start, start + rows),
                self._checked_chunk(start, rows),
            )

    def only(self, rows: NDArray[Any]) -> "Scores":
        """The samples at some positions, or of a mask (N,)."""
        columns = ("ids", "unfamiliarity", "groups")
        kept = {name: getattr(self, name) for name in columns}
        kept = {name: own[rows] for name, own in kept.items() if own is not None}
        return replace(self, values=self.values[:, rows], **kept)

    def _checked_chunk(self, start: int, rows: int) -> Floats:
        piece = self.values[:, start : start + rows]
        # A model of ours says which of both its scores are.
        if self.logits and not self.model and are_probabilities(piece):
            raise InputError(PROBABILITIES)
        return _checked(piece, start, self.logits, self.names)

    def checked(self) -> "Scores":
        """The same scores, with all values checked; rounded rows are divided by their
        sums.
        """
        pieces = [piece for _, piece in self.chunks()]
        same = all(np.may_share_memory(piece, self.values) for piece in pieces)
        return self if same else replace(self, values=np.concatenate(pieces, axis=1))

    def fingerprints(
        self, targets: Indices, most: int | None = None
    ) -> dict[str, NDArray[np.uint64]]:
        """Hashes of the samples by `scores` and class, by `ids` and by `order`; the
        `most` smallest, if distinct.

        Many samples share the coarse scores of a forest, and ids may only count rows.
        Then `order`, the scores of consecutive samples, tells whether samples are the
        same.
        """
        size, found = len(self.values) * self.values.shape[2], []
        keys = np.random.default_rng(0).integers(
            1, 2**63, size + 1 + CONSECUTIVE, dtype=np.uint64
        )
        of_class, of_scores, of_order = keys[0], keys[1 : size + 1], keys[size + 1 :]
        for rows, chunk in self.chunks():
            bits = (
                chunk.transpose(1, 0, 2)
                .astype(np.float32)
                .reshape(chunk.shape[1], -1)
                .view(np.uint32)
            )
            found.append(
                (bits * of_scores).sum(axis=1, dtype=np.uint64)
                + targets[rows].astype(np.uint64) * of_class
            )
        hashes = {"scores": np.concatenate(found)}
        if len(self) >= CONSECUTIVE:
            hashes["order"] = (
                sliding_window_view(hashes["scores"], CONSECUTIVE) @ of_order
            )
        if self.ids is not None and not _count_rows(self.ids.tolist()):
            digests = b"".join(
                blake2b(name.encode(), digest_size=8).digest()
                for name in self.ids.tolist()
            )
            hashes["ids"] = np.frombuffer(digests, dtype=np.uint64)
        sorted_hashes = {
            kind: (np.unique(each), len(each)) for kind, each in hashes.items()
        }
        return {
            kind: each[:most]
            for kind, (each, n) in sorted_hashes.items()
            if most is None or len(each) > 0.9 * n
        }

    def share_of(
        self, known: Mapping[str, NDArray[np.uint64]], targets: Indices
    ) -> float:
        """The share of the samples with `known` fingerprints that are among these, by
        content or by id.
        """
        found = self.fingerprints(targets) if known else {}
        shares = {
            kind: float(np.isin(own, found[kind]).mean())
            for kind, own in known.items()
            if kind in found
        }
        if "scores" in shares:
            repeats = 1 - len(found["scores"]) / len(self)
            # Other samples may have equal scores, but hardly many in the same order.
            if shares.get("ids") == 0 or shares["scores"] <= COINCIDENCES * repeats:
                del shares["scores"]
        return max([*shares.values(), 0.0])


def as_scores(given: Any, classes: Classes, *, logits: bool = False) -> Scores:
    """An array, tensor or data frame as Scores with one column per class, in the order
    of `classes`.
    """
    expect(
        not isinstance(given, CorrectedProbabilities),
        "a Decider has calibrated and corrected these probabilities already, and a"
        " second time would distort them: pass the model's own output (or np.asarray(p)"
        " to treat them as the output of a new model)",
    )
    check_no_path(given)
    corrected, model, ids = "", "", None
    if hasattr(given, "columns"):
        names = list(given.columns)
        texts = [str(name) for name in names]
        order = column_order(texts, classes, "data frame")
        values = np.stack([_plain_array(given[names[i]]) for i in order], axis=1)
        if beside := [
            name for name in class_columns(texts) if name not in classes.names
        ]:
            targets = (
                map(str, given["target"])
                if "target" in names and "target" not in classes.names
                else ()
            )
            check_left_out(
                lambda name: _plain_array(given[names[texts.index(name)]]),
                beside,
                values,
                targets,
                GIVEN,
            )
        corrected, model = told_by(given[KIND] if KIND in names else ())
        ids = (
            np.asarray(given["id"]).astype(str)
            if "id" in names and "id" not in classes.names
            else None
        )
    else:
        values = _plain_array(given)
    values = values[None] if values.ndim == 2 else values
    shape = (
        f"scores have shape {values.shape}: expected (samples, classes) or (particles,"
        " samples, classes)"
    )
    expect(
        values.ndim == 3 and values.size,
        f"{shape}, with at least one particle and one sample",
    )
    fits = values.shape[2] == len(classes)
    own = (
        f"scores have {values.shape[2]} columns but there are {len(classes)} classes"
        f" ({listing(classes.names, 4)})"
    )
    expect(fits, f"{own}: expected one column per class")
    return Scores(values, logits, corrected, ids, names=classes.names, model=model)


def check_no_path(given: Any) -> None:
    if isinstance(given, str | Path):
        raise InputError(
            f"{str(given)!r} is a path, not scores: read it by"
            " rfdlc.Predictions.load(path)"
        )


def told_by(cells: Iterable[Any]) -> tuple[str, str]:
    """What the column `rfdlc_scores` says of corrected probabilities, nothing of raw
    ones; and the name of the model that scored.

    >>> told_by(["raw by model 0123456789abcdef"])
    ('', '0123456789abcdef')
    """
    texts = sorted(
        {text for text in map(str, cells) if text.startswith((CORRECTED, RAW))}
    )
    expect(
        len(texts) < 2,
        f"the column {KIND} says {listing(map(repr, texts), 3)}: scores of different"
        " models, priors or kinds are not decided together: give each alone",
    )
    words, _, model = "".join(texts).partition(BY_MODEL)
    return (words if words.startswith(CORRECTED) else ""), model


def class_columns(columns: Sequence[str]) -> list[str]:
    """The columns that are classes, by name alone. Others were kept beside them where
    `rfdlc_scores` divides the two.

    >>> (
    ...     class_columns(["id", "cat", "dog", "action", "expected_utility"]),
    ...     class_columns(["cat", "action"]),
    ... )
    (['cat', 'dog'], ['cat', 'action'])
    >>> class_columns(["cat", "dog", "rfdlc_scores", "site"])
    ['cat', 'dog']
    """
    others = (*BOOK_KEEPING, KIND) + (
        DECIDED + DETAILS + LOGGED if set(DECIDED) <= set(columns) else ()
    )
    before = [
        name for name in columns[: [*columns, KIND].index(KIND)] if name not in others
    ]
    return before or [
        name for name in columns if name not in others
    ]  # logs of decisions have classes after it


def check_class_names(names: Sequence[str]) -> None:
    """Raise for a class that tables of predictions could not tell from another
    column.
    """
    clash = listing([repr(name) for name in names if name in RESERVED])
    fix = (
        "rename it in the data, and train; a model that was trained so predicts to .npz"
    )
    expect(
        not clash,
        f"a class is called {clash}, as a column of tables of predictions is: {fix}",
    )


def column_order(
    columns: list[str], classes: Classes, where: str, known: str = GIVEN
) -> list[int]:
    """The position of each class of `known` among the columns, which may be more."""
    doubled = repeated(columns)
    expect(
        not doubled,
        f"{where}: column {listing(map(repr, doubled))} appears more than once; names"
        " must differ",
    )
    place = {name: i for i, name in enumerate(columns)}
    missing = [name for name in classes.names if name not in place]
    hint = suggestion(missing[0], {*columns} - {*classes.names}) if missing else ""
    told = (
        f"{where}: no column for class {listing(map(repr, missing))}; there are"
        f" {listing(columns)}"
    )
    expect(
        not missing,
        f"{told}: rename or add the column, or take the class out of {known}{hint}",
    )
    return [place[name] for name in classes.names]


def check_left_out(
    column: Callable[[str], Floats],
    names: Sequence[str],
    scores: Floats,
    targets: Iterable[str],
    known: str,
) -> None:
    """Raise for columns of classes that `known` lacks: true ones, or the rest of rows
    that do not sum to 1.
    """
    found, why = (
        {text for text in targets if not is_index(text)} & {*names},
        "true classes are called so",
    )
    short, numbers = 1 - scores.sum(axis=1, dtype=np.float64), dict[str, Floats]()
    if names and not found and (scores >= 0).all() and (np.abs(short) > EXACT).any():
        from scipy.optimize import nnls

        for name in names:
            with suppress(ValueError):  # it does not hold numbers
                own = column(name)
                if ((own >= 0) & (own <= np.maximum(short, 0) + ROUNDING)).all():
                    numbers[name] = own
        weights = (
            nnls(np.stack([*numbers.values()], axis=1), short)[0] if numbers else ()
        )
        rest = [
            name for name, weight in zip(numbers, weights, strict=True) if weight > 0.5
        ]
        explained = (
            2 * np.abs(short - sum(map(numbers.__getitem__, rest))).sum()
            < np.abs(short).sum()
        )
        found, why = (
            {*rest} if explained else set(),
            "rows sum to 1 only with its probabilities",
        )
    fix = (
        "add it, or remove the column and divide the other probabilities of each row by"
        " their sum"
    )
    told = listing(repr(name) for name in names if name in found)
    expect(
        not found,
        f"{known}: no class {told}, but there is such a column, and {why}: {fix}",
    )


def is_index(value: Any) -> bool:
    return str(value).lstrip("-").isdecimal()


def safe_log(scores: Floats, logits: bool = False) -> Floats:
    """log p, with p clipped away from 0; of logits, those that are at most DEEPEST
    below the largest of the row.
    """
    floor = (
        scores.max(axis=-1, keepdims=True) - DEEPEST if logits else PROBABILITY_FLOOR
    )
    clipped: Floats = np.maximum(scores, floor)
    return clipped if logits else np.log(clipped)


def nll(true_probability: Floats) -> Floats:
    """-log p(y) per sample (N,), finite where p(y) is 0."""
    return -np.log(np.maximum(true_probability, PROBABILITY_FLOOR))


def softmax(scores: Floats) -> Floats:
    """Along the last axis; the argument is not changed."""
    exponent = scores - scores.max(axis=-1, keepdims=True)
    np.exp(exponent, out=exponent)
    exponent /= exponent.sum(axis=-1, keepdims=True)
    return exponent


def log_softmax(scores: Floats) -> Floats:
    """Along the last axis: log probabilities from logits, or from log probabilities,
    which stay as they are.
    """
    shifted: Floats = scores - scores.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def _plain_array(given: Any) -> Floats:
    if type(given).__module__.split(".")[0] == "torch":
        given = given.detach().cpu()
        given = (
            given.float().numpy() if "bfloat16" in str(given.dtype) else given.numpy()
        )
    try:
        array = as_array(given)
        if array.dtype in (np.float32, np.float64):
            return array
        if array.dtype.kind == "c":
            raise TypeError("they are complex")
        return array.astype(np.float32 if array.dtype == np.float16 else np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"scores must be numbers, but they cannot be read as such ({error})"
        ) from None


def _checked(piece: Floats, start: int, logits: bool, names: Sequence[str]) -> Floats:
    """A chunk (M, n, C), rounded rows divided by their sums; raises for bad rows. A
    good one costs two passes.
    """
    total = piece.sum(axis=2)
    if (
        np.isfinite(total).all()
        if logits
        else (np.abs(total - 1) <= SUM_TOLERANCE).all() and piece.min() >= 0
    ):
        return piece
    rounded = piece.min() > -SUM_TOLERANCE
    fix = (
        "set values that rounding left below 0 to 0"
        if rounded
        else "for logits set logits (--logits)"
    )
    for wrong, expected in (
        (
            ~np.isfinite(piece),
            "finite logits" if logits else "probabilities between 0 and 1",
        ),
        (np.array(not logits) & (piece < 0), f"probabilities between 0 and 1; {fix}"),
    ):
        rows = np.flatnonzero(wrong.any(axis=(0, 2)))
        if len(rows):
            particle, column = np.argwhere(wrong[:, rows[0]])[0]
            told = (
                f", column {[*names][column]!r}: expected {expected}"
                if names
                else f": expected {expected}"
            )
            raise BrokenRows(
                f"scores hold {piece[particle, rows[0], column]} in ",
                (start + rows).tolist(),
                told,
            )
    if logits:
        return piece
    off = np.abs(total - 1)
    far = off > np.maximum(SUM_TOLERANCE, _rounding(piece, total))
    rows = np.flatnonzero(far.any(axis=0))
    if len(rows):
        one = "there is one column: for two classes add the other one (1 - p)"
        fix = (
            one
            if piece.shape[2] == 1
            else (
                "divide each row by its sum, or set logits (--logits) if these are"
                " logits"
            )
        )
        percent = (
            piece.max() <= PERCENT
            and abs(np.median(total) / PERCENT - 1) <= SUM_TOLERANCE
        )
        fix = "these are percentages: divide them by 100" if percent else fix
        told = (
            f"sums to {total[far[:, rows[0]].argmax(), rows[0]]:.6g}: expected rows"
            " that sum to 1"
        )
        raise BrokenRows(
            "", (start + rows).tolist(), f" of the probabilities {told}; {fix}"
        )
    told = (
        "rows that do not sum to 1 are divided by their sums, and a 0 counts as"
        " impossible: better write more decimals"
    )
    warnings.warn(f"the probabilities are rounded: {told}", stacklevel=1)
    return np.asarray(
        piece / np.where(off > SUM_TOLERANCE, total, total.dtype.type(1))[..., None]
    )


def are_probabilities(piece: Floats) -> bool:
    """Whether scores (M, n, C) that are given as logits are probabilities: no row has a
    value outside of [0, 1], and all sum to 1.

    Logits do that by chance alone. A row proves the more, the nearer its sum is to 1;
    equal rows prove it once.
    """
    if piece.shape[2] < 2 or not (piece >= 0).all():
        return False
    off = np.abs(piece.sum(axis=2, dtype=np.float64) - 1).max()
    if not off <= SUM_TOLERANCE:
        return False
    most = SINGLE_DIGITS if piece.dtype == np.float32 else DOUBLE_DIGITS
    digits = min(most, -np.log10(max(off, 1e-300)))
    enough = int(np.ceil(PROOF / digits))
    rows = piece.reshape(-1, piece.shape[2])
    return len(np.unique(rows[: max(CHUNK_ROWS, enough)], axis=0)) >= enough


def _rounding(piece: Floats, total: Floats) -> Floats | float:
    """How much rounding changes sums (M, n) at most: half a unit of the last decimal
    per value; no 0 was enlarged.
    """
    for decimals in ROUNDED:
        if np.allclose(piece, piece.round(decimals), rtol=0, atol=1e-7):
            rounded = np.where(
                total > 1, np.count_nonzero(piece, axis=2), piece.shape[2]
            )
            return np.minimum(
                rounded * 0.5 / 10**decimals + 1e-6, MOST_LOST
            )  # and what adding them up rounds
    return 0.0


def _count_rows(ids: list[str]) -> bool:
    """Whether the ids are consecutive numbers, which say nothing about the sample."""
    numbers = [int(name) for name in ids if name.isdecimal()]
    return len(numbers) == len(ids) and max(numbers) - min(numbers) < len(ids)

"""Dataset: train, val and test samples with their classes, for any format on disk."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any
from unicodedata import category, normalize

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.copies import (
    FEW_NEAR,
    MOST_NEAR,
    first_copies,
    first_of,
    near_copies,
    with_near_copies,
)
from rfdlc.data.embedding import Embedding
from rfdlc.data.images import SUFFIXES, ImageFiles, PackedText, Resizing
from rfdlc.data.longtail import (
    assign_folds,
    far_from_asked,
    hold_out_indices,
    joined_groups,
)
from rfdlc.data.table import TableEncoder
from rfdlc.errors import InputError, expect, listing
from rfdlc.probabilities.classes import Classes
from rfdlc.progress import announce

SPLITS = ("train", "val", "test")
SKIPPING, LINKING = (
    "skip_broken=True (--skip-broken)",
    "allow_links=True (--allow-links)",
)  # the fix, in messages
# What is broken, in a message: a row or a file or both, then why. Some reasons name the
# file inside.
ENDING = "|".join(map(re.escape, sorted(SUFFIXES)))
BROKEN = re.compile(
    rf"(.*?[,:] (?:line|row) \d+:? )?(?:(.*?(?:{ENDING})): )?(.*)",
    re.IGNORECASE | re.DOTALL,
)
INSIDE = re.compile(
    "the (?:file|path) (.*?) (?:does not exist|leaves the root)", re.DOTALL
)
NAMED = 3  # of what is broken for the same reason
SPELT = (
    "classes {} differ in case, spaces, hyphens or hidden characters alone: if they are"
    " one class, spell them alike"
)
# Signs between labels of one sample, where it has several; the latter are in names of
# single classes, too.
BETWEEN, PERHAPS_BETWEEN = "|;", ",/+&"
JOINED = (
    "classes such as {!r} look like several labels of one sample, since {} are in other"
    " classes, too: each combination is a class of its own; give every sample one"
    " label, or train a model per label"
)
LISTED = ": `rfdlc inspect` lists them"  # at the end of a note, but there
SHARED = "{} of {} {} samples are copies of training samples" + LISTED
NEARLY_SHARED = (
    "{} like copies of one in another split, so that scores look better than they"
    " are: {}"
)
NEARLY_JOINED = (
    "{} like copies of one in another group, and may be on the other side of a"
    " split: {}"
)
TOO_MANY_NEAR = (
    "{} of {} images look like copies of others, more than are believed: they may be on"
    " both sides of a split, as {}; copies=near keeps them together, copies=exact"
    " compares their content alone"
)
SHARED_GROUPS = (
    "{} groups of the split {} are in the training split, too: its scores look better"
    " than they are"
)
HELD_OUT = (  # a note
    "the data has no test split: {} of {} samples were held out for it (seed {})"
)
EMBEDDED = 64  # so many features without names, or more, are those of a network
COPIES = (  # a note
    "{} training samples are copies of others, or look like them: they stay on one side"
    " of every split"
)


def by_reason(broken: Sequence[str]) -> list[str]:
    """What is broken, each reason once: `the file is empty: 9 times (a.png; b.png;
    c.png; ...)`.
    """
    found: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for text in broken:
        match = BROKEN.fullmatch(text)
        row, file, why = match.groups("") if match else ("", "", text)
        if not row and not file:  # a folder
            file, _, why = (
                text.rpartition(": ") if text.count(": ") == 1 else ("", "", text)
            )
        elif inside := INSIDE.match(why):
            file, why = inside[1], why[: inside.start(1) - 1] + why[inside.end(1) :]
        found[re.sub(r"\d+", "0", why)].append(
            (text, (row + file).rstrip(": "), why)
        )  # bytes that lack differ
    listed = []
    for own in found.values():
        text, _, why = own[0]
        names = [*(name for _, name, _ in own[:NAMED]), *["..."] * (len(own) > NAMED)]
        listed.append(
            text if len(own) == 1 else f"{why}: {len(own):,} times ({'; '.join(names)})"
        )
    return listed


@dataclass(frozen=True)
class Normalisation:
    """`(x - mean) / std`, one value per channel (images, x in 0..1) or per feature."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, inputs: NDArray[Any] | ImageFiles) -> "Normalisation":
        """Measured on uint8 images (N, channels, H, W) or features (N, F); of files,
        the usual one of photographs.
        """
        if isinstance(inputs, ImageFiles):
            return PHOTOGRAPHS if inputs.channels == 3 else GREY_PHOTOGRAPHS
        if inputs.ndim == 4:
            values = np.arange(256) / 255
            counts = [
                np.bincount(inputs[:, channel].reshape(-1), minlength=256)
                for channel in range(inputs.shape[1])
            ]
            means = [float(np.average(values, weights=n)) for n in counts]
            stds = [
                float(np.average((values - m) ** 2, weights=n)) ** 0.5
                for m, n in zip(means, counts, strict=True)
            ]
            return cls(tuple(means), tuple(std or 1.0 for std in stds))
        mean, std = (
            inputs.mean(axis=0, dtype=np.float64),
            inputs.std(axis=0, dtype=np.float64),
        )
        varies = (inputs != inputs[:1]).any(axis=0) & (std > np.finfo(np.float32).tiny)
        return cls(tuple(mean.tolist()), tuple(np.where(varies, std, 1.0).tolist()))

    @classmethod
    def of_table(
        cls, features: NDArray[np.float32], encoder: TableEncoder
    ) -> "Normalisation":
        """Of numbers; marks (0 or 1) stay as they are: a rare one would become huge."""
        measured, scaled = cls.of(features), encoder.kinds == "number"
        mean, std = (
            np.where(scaled, measured.mean, 0.0),
            np.where(scaled, measured.std, 1.0),
        )
        return cls(tuple(mean.tolist()), tuple(std.tolist()))


# Measured on ImageNet by those who first published models for it; the usual choice for
# photographs.
PHOTOGRAPHS = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
GREY_PHOTOGRAPHS = Normalisation((0.449,), (0.226,))


@dataclass(frozen=True, eq=False)
class Split:
    """Samples and their labels.

    Parameters
    ----------
    inputs : array or ImageFiles
        uint8 images (N, channels, H, W), float32 features (N, F), or image files that
        are decoded later.
    labels : array of int64, shape (N,)
    ids, groups, weights : optional, shape (N,)
        Stable names, such as paths; what must stay on one side of a split: lesion,
        patient, track; sample weights.
    files : ImageFiles, optional
        Where images in memory were read from.

    Examples
    --------
    >>> split = Split(
    ...     np.eye(3, dtype=np.float32), np.array([0, 1, 1]), ids=["a", "b", "c"]
    ... )
    >>> len(split), list(split.take(np.array([2])).ids)
    (3, ['c'])
    """

    inputs: NDArray[Any] | ImageFiles
    labels: NDArray[np.int64]
    ids: Sequence[str] | None = None
    groups: NDArray[Any] | None = None
    weights: NDArray[np.float64] | None = None
    files: ImageFiles | None = None

    def __repr__(self) -> str:
        known = [
            name
            for name in ("ids", "groups", "weights")
            if getattr(self, name) is not None
        ]
        return (
            f"Split({len(self)} samples of shape"
            f" {tuple(self.inputs.shape[1:])}{''.join(f', {k}' for k in known)})"
        )

    def __post_init__(self) -> None:
        if self.ids is not None and not isinstance(self.ids, PackedText):
            object.__setattr__(self, "ids", PackedText(self.ids))
        lengths = {
            name: len(values)
            for name, values in vars(self).items()
            if values is not None
        }
        counts = ", ".join(f"{count} {name}" for name, count in lengths.items())
        expect(
            len(set(lengths.values())) == 1,
            f"a split has {counts}: expected one of each per sample",
        )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def array(self) -> NDArray[Any]:
        """The inputs as an array in memory; raises InputError where they are files."""
        if isinstance(self.inputs, ImageFiles):
            fix = (
                "use a StreamedLoader, or load them with a smaller image_size so that"
                " they fit"
            )
            raise InputError(f"these {len(self)} images are not held in memory: {fix}")
        return self.inputs

    @cached_property
    def near(self) -> NDArray[np.int64]:
        """(P, 2) samples, each with an earlier one that looks the same."""
        return near_copies([self.inputs], [self.files])

    @property
    def too_many_near(self) -> bool:
        """Whether so many samples look like others that they are rather pictures of one
        thing than copies.
        """
        return len(self.near) > max(FEW_NEAR, MOST_NEAR * len(self))

    @cached_property
    def first(self) -> NDArray[np.int64]:
        """(N,) the first sample of which each is a copy, or itself: copies stay on one
        side of a split.

        Near-copies, too, unless there are too many. Where groups are known, near-copies
        do not join them.
        """
        first = first_copies(self.inputs)
        return (
            first
            if self.groups is not None or self.too_many_near
            else with_near_copies(first, self.near)
        )

    @property
    def together(self) -> NDArray[Any] | None:
        """(N,) labels of what stays on one side of a split: groups, and copies where
        they are known; None without.
        """
        own = np.arange(len(self))
        first = vars(self).get(
            "first", own
        )  # comparing the samples of a given validation split would take long
        if (first == own).all():
            return self.groups
        return first if self.groups is None else joined_groups(self.groups, first)

    @property
    def joined(self) -> str:
        """Which groups share copies, and so stay on one side together; empty where none
        do, or copies are not known.
        """
        together = self.together
        if self.groups is None or together is None or together is self.groups:
            return ""
        names, numbers = np.unique(self.groups, return_inverse=True)
        new, old = np.unique(np.stack([together, numbers]), axis=1)
        sets = [
            names[old[new == group]] for group in np.flatnonzero(np.bincount(new) > 1)
        ]
        listed = "; ".join(listing(own, 3) for own in sets[:3]) + "; ..." * (
            len(sets) > 3
        )
        return (
            f"copies join {sum(map(len, sets))} of {len(names)} groups into"
            f" {len(sets)}: {listed}"
            if sets
            else ""
        )

    def hold_out(
        self, fraction: float, seed: int = 0
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Positions (kept, held out): about the fraction of every class; groups and
        copies as a whole.
        """
        kept, held = hold_out_indices(
            self.labels, fraction, seed, self.groups, self.first
        )
        return (
            (kept, held)
            if len(held)
            else hold_out_indices(self.labels, fraction, seed, self.groups)
        )

    def folds(self, count: int, seed: int = 0) -> NDArray[np.int64]:
        """The fold (N,) in which each sample is held out, -1 for never: stratified;
        groups and copies as a whole.
        """
        found = assign_folds(self.labels, count, seed, self.groups, self.first)
        return (
            found
            if (found >= 0).any()
            else assign_folds(self.labels, count, seed, self.groups)
        )

    def name(self, place: int) -> str:
        """The id of a sample, or its place."""
        return str(place) if self.ids is None else str(self.ids[place])

    def take(self, positions: NDArray[np.int64]) -> "Split":
        ids = (
            None
            if self.ids is None
            else PackedText(self.ids[i] for i in positions.tolist())
        )
        groups, weights = (
            None if own is None else own[positions]
            for own in (self.groups, self.weights)
        )
        files = None if self.files is None else self.files[positions]
        taken = Split(
            self.inputs[positions], self.labels[positions], ids, groups, weights, files
        )
        if "first" in vars(self):  # is not computed again
            vars(taken)["first"] = first_of(self.first[positions])
        return taken


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set that is ready to train on, as `rfdlc.load` returns it.

    Parameters
    ----------
    name : str
    classes : Classes
        Class names, counted on the training split.
    train, val, test : Split
        `val` and `test` may be None.
    notes, skipped : tuple of str
        What was done to the data while it was read, and what was broken and left out.
    normalisation, encoder : optional
        How inputs are scaled, and how rows of a table become features.
    resizing, embedding : optional
        How image files become squares, and how images became features.
    alike : tuple of str
        Images that look like a copy of one in another split, and which.

    Examples
    --------
    >>> splits = {"train": Split(np.eye(3, dtype=np.float32), np.array([0, 1, 1]))}
    >>> data = Dataset.of("mine", ["cat", "dog"], splits)
    >>> data.classes.counts, data.kind
    ((1, 2), 'features')
    """

    name: str
    classes: Classes
    train: Split
    val: Split | None = None
    test: Split | None = None
    normalisation: Normalisation | None = None
    notes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    encoder: TableEncoder | None = None
    resizing: Resizing | None = None
    embedding: Embedding | None = None
    alike: tuple[str, ...] = ()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {len(split)}" for name, split in self.splits.items())
        counts = self.classes.counts or (0,)
        classes = (
            f"{len(self.classes)} classes of {max(counts)} to {min(counts)} samples"
        )
        return (
            f"Dataset({self.name!r}: {self.kind} {self.input_shape}, {classes},"
            f" {sizes})"
        )

    @classmethod
    def of(
        cls,
        name: str,
        names: Sequence[str],
        splits: dict[str, Split],
        notes: Sequence[str] = (),
        normalisation: Normalisation | None = None,
    ) -> "Dataset":
        """From class names and splits: counts the classes, and measures the
        normalisation on the training split.
        """
        expect(
            len(splits.get("train", ())),
            f"{name}: there is no training sample; expected a training split",
        )
        train = splits["train"]
        shape = tuple(train.inputs.shape[1:])
        expect(
            0 not in shape,
            f"{name}: samples of shape {shape} hold nothing to learn from",
        )
        for which, own in (
            (which, tuple(split.inputs.shape[1:]))
            for which, split in splits.items()
            if len(split)
        ):
            expect(
                own == shape,
                f"{name}: {which} samples have shape {own}, but training samples"
                f" {shape}",
            )
        present = np.unique(train.labels)
        only = (
            f"{name}: all {len(train)} training samples are of one class"
            f" ({names[int(present[0])]!r}): expected two"
        )
        expect(len(present) > 1, only)
        classes = Classes.from_labels(train.labels, names)
        absent = [
            n
            for n, count in zip(classes.names, classes.counts or (), strict=True)
            if not count
        ]
        if absent:
            notes = [
                *notes,
                (
                    f"{len(absent)} of {len(classes)} classes have no training sample:"
                    f" {listing(absent, 5)}"
                ),
            ]
        val, test = (
            splits[name] if len(splits.get(name, ())) else None for name in SPLITS[1:]
        )
        return cls(
            name,
            classes,
            train,
            val,
            test,
            normalisation or Normalisation.of(train.inputs),
            tuple(notes),
        )

    @property
    def splits(self) -> dict[str, Split]:
        return {
            name: split for name in SPLITS if (split := getattr(self, name)) is not None
        }

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.train.inputs.shape[1:])

    @property
    def kind(self) -> str:
        return "images" if len(self.input_shape) == 3 else "features"

    @property
    def suits(self) -> str:
        """The general preset for data of this kind: images, features (wide, without
        names of columns), or table.
        """
        wide = self.kind == "features" and self.input_shape[0] >= EMBEDDED
        unnamed = wide and (
            self.encoder is None or self.encoder.items >= self.input_shape[0] / 2
        )
        embedded = unnamed or self.embedding is not None
        return (
            "images" if self.kind == "images" else "features" if embedded else "table"
        )

    def hold_out(self, fraction: float = 0.1, seed: int = 0) -> "Dataset":
        """Move a stratified fraction of train into `val`, groups and copies as a whole;
        classes are counted again.

        If groups make it far more or less than the fraction, a note says so.
        """
        expect(
            self.val is None,
            f"{self.name} has validation samples already: hold_out needs val=None",
        )
        kept, held = self.train.hold_out(fraction, seed)
        fix = (
            "add samples, or do without (test_fraction=0 for data without a test split,"
            " hold_out=0 for training)"
        )
        expect(
            len(held),
            f"{self.name}: no class has two samples (or groups), so none can be held"
            f" out: {fix}",
        )
        notes = (
            *self.notes,
            *far_from_asked(
                self.train.labels, self.classes.names, self.train.groups, held, fraction
            ),
        )
        return replace(self.held_apart(kept, held), notes=notes)

    def held_apart(self, kept: NDArray[np.int64], held: NDArray[np.int64]) -> "Dataset":
        """Train on some positions, with others as `val`."""
        train = self.train.take(kept)
        classes = Classes.from_labels(
            train.labels, self.classes.names, self.classes.groups
        )
        return replace(self, train=train, val=self.train.take(held), classes=classes)


def choose_split(name: str, splits: Collection[str], wanted: str | None) -> str:
    """The requested split, or the last of train, val and test that exists; says which,
    where there are several.
    """
    chosen = wanted or next(
        (split for split in reversed(SPLITS) if split in splits), ""
    )
    expect(
        chosen in splits,
        f"{name} has no split {chosen!r}: it has {', '.join(splits) or 'none'}",
    )
    if wanted is None and len(splits) > 1:
        announce(
            f"{name}: using the split {chosen!r} of {', '.join(splits)}; set split to"
            " use another one"
        )
    return chosen


def as_inputs(where: str, inputs: NDArray[Any]) -> NDArray[Any]:
    """uint8 images as (N, channels, H, W), or finite float32 features (N, F)."""
    if inputs.dtype == np.uint8 and inputs.ndim in (3, 4):
        return as_images(where, inputs)
    expected = (
        "expected numbers (N, features), or uint8 images (N, H, W), (N, H, W, 3) or (N,"
        " 3, H, W)"
    )
    numbers = inputs.ndim == 2 and inputs.dtype.kind in "iufb"
    fix = ""
    if (
        not numbers
        and inputs.ndim in (3, 4)
        and inputs.dtype.kind in "iufb"
        and inputs.min(initial=0) >= 0
    ):
        largest = inputs.max(initial=0)
        scaled = (
            "x"
            if 1 < largest <= 255
            else "255 * x"
            if largest <= 1
            else f"x * (255 / {largest:g})"
        )
        fix = (
            f"; of images x with values up to {largest:g}, give"
            f" np.round({scaled}).astype('uint8')"
        )
    expect(
        numbers,
        f"{where}: inputs are {inputs.dtype} of shape {inputs.shape}: {expected}{fix}",
    )
    with np.errstate(
        over="ignore"
    ):  # too large values become infinite, and are reported below
        features = inputs.astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(features).all(axis=1))
    told = (
        f"row {next(iter(wrong), 0)} has a missing, infinite or too large value"
        f" ({len(wrong)} rows have)"
    )
    missing = np.isnan(features).any()
    fix = (
        "; to train with missing values, give a data frame, pd.DataFrame(x), or a table"
        if missing
        else ""
    )
    expect(
        not len(wrong),
        f"{where}: {told}: fill them first, with numbers up to"
        f" {np.finfo(np.float32).max:.1e}{fix}",
    )
    return features


def as_images(where: str, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """uint8 (N, H, W), (N, H, W, channels) or (N, channels, H, W), with 1 or 3
    channels, as (N, channels, H, W).
    """
    if images.ndim == 3:
        return images[:, None]
    if images.shape[1] in (1, 3):
        return images
    rule = (
        f"{where}: images have shape {images.shape}: expected 1 or 3 channels, (N, H,"
        " W[, channels])"
    )
    rule += "; leave out transparency, images[..., :3]" if images.shape[-1] == 4 else ""
    expect(images.shape[-1] in (1, 3), rule)
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def spelt_alike(names: Sequence[str]) -> list[str]:
    """What to say of classes whose names, if they have letters, differ in case, spaces
    or hyphens alone, or in what nobody sees.
    """
    spelt: dict[str, list[str]] = {}
    for name in (name for name in names if re.search(r"[^\W\d_]", name)):
        seen = "".join(letter for letter in name if category(letter) != "Cf")
        bare = normalize("NFKC", seen).casefold()
        spelt.setdefault("".join(re.split(r"[\s_-]+", bare)), []).append(name)
    return [
        SPELT.format(listing(map(repr, each)))
        for each in spelt.values()
        if len(each) > 1
    ]


def joined_labels(names: Sequence[str]) -> list[str]:
    """What to say of classes that are several labels, such as `x|y` beside `x` and
    `y`, or beside `x|z` and `y|z`.
    """
    for sign in BETWEEN + PERHAPS_BETWEEN:
        parts = {name: tuple(map(str.strip, name.split(sign))) for name in names}
        times = Counter(chain.from_iterable(map(set, parts.values())))
        for name, labels in parts.items():
            several = len(set(labels)) > 1 and all(times[one] > 1 for one in labels)
            if several and (sign in BETWEEN or not {*labels}.isdisjoint(names)):
                return [JOINED.format(name, listing(map(repr, labels)))]
    return []

"""Dataset: train, val and test samples with their classes, for any format on disk."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.images import ImageFiles, PackedText
from rfdlc.data.longtail import hold_out_indices
from rfdlc.data.table import TableEncoder
from rfdlc.decide.classes import Classes
from rfdlc.errors import InputError, expect, listing

SPLITS = ("train", "val", "test")
SKIPPING = "skip_broken (--skip-broken; to rfdlc train data.skip_broken=true)"  # how to ask for it, in messages
ALIASES = {"train": "train", "training": "train", "test": "test", "testing": "test"}
ALIASES |= dict.fromkeys(("val", "valid", "validation", "dev"), "val")


@dataclass(frozen=True)
class Normalisation:
    """`(x - mean) / std`, one value per channel (images, x in 0..1) or per feature."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of_images(cls, images: NDArray[np.uint8]) -> "Normalisation":
        """Per channel of uint8 images (N, channels, H, W).

        >>> Normalisation.of_images(np.array([0, 255], dtype=np.uint8).reshape(2, 1, 1, 1))
        Normalisation(mean=(0.5,), std=(0.5,))
        """
        values = np.arange(256) / 255
        counts = [np.bincount(images[:, channel].reshape(-1), minlength=256) for channel in range(images.shape[1])]
        means = [float(np.average(values, weights=n)) for n in counts]
        spreads = [float(np.average((values - m) ** 2, weights=n)) ** 0.5 for m, n in zip(means, counts, strict=True)]
        return cls(tuple(means), tuple(spread or 1.0 for spread in spreads))

    @classmethod
    def of_features(cls, features: NDArray[np.float32]) -> "Normalisation":
        """Per feature of (N, F); a constant feature keeps its scale.

        >>> tiny = 2.0**-60  # however small its unit
        >>> Normalisation.of_features(np.array([[0, 3], [2 * tiny, 3]], dtype=np.float32)).std == (tiny, 1)
        True
        """
        spreads = features.std(axis=0, dtype=np.float64)
        means = features.mean(axis=0, dtype=np.float64)
        varies = (features != features[:1]).any(axis=0) & (spreads > np.finfo(np.float32).tiny)
        return cls(tuple(means.tolist()), tuple(np.where(varies, spreads, 1.0).tolist()))


# Measured on ImageNet by those who first published models for it; the usual choice for photographs.
PHOTOGRAPHS = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
GREY_PHOTOGRAPHS = Normalisation((0.449,), (0.226,))


@dataclass(frozen=True, eq=False)
class Split:
    """Samples and their labels.

    Parameters
    ----------
    inputs : array or ImageFiles
        uint8 images (N, channels, H, W), float32 features (N, F), or image files that are decoded later.
    labels : array of int64, shape (N,)
        Class indices.
    ids : sequence of str, optional
        Stable names of the samples, such as paths or row ids.
    groups : array, shape (N,), optional
        What must stay on one side of a split: lesion, patient, track.
    weights : array of float64, shape (N,), optional
        How much each sample counts; equal weights by default.

    Examples
    --------
    >>> split = Split(np.eye(3, dtype=np.float32), np.array([0, 1, 1]), ids=["a", "b", "c"])
    >>> len(split), list(split.take(np.array([2])).ids)
    (3, ['c'])
    """

    inputs: NDArray[Any] | ImageFiles
    labels: NDArray[np.int64]
    ids: Sequence[str] | None = None
    groups: NDArray[Any] | None = None
    weights: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        if self.ids is not None and not isinstance(self.ids, PackedText):
            object.__setattr__(self, "ids", PackedText(self.ids))
        lengths = {name: len(values) for name, values in vars(self).items() if values is not None}
        counts = ", ".join(f"{count} {name}" for name, count in lengths.items())
        expect(len(set(lengths.values())) == 1, f"a split has {counts}: expected one of each per sample")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def array(self) -> NDArray[Any]:
        """The inputs as an array in memory; raises InputError where they are files."""
        if isinstance(self.inputs, ImageFiles):
            raise InputError(
                f"these {len(self)} images are not held in memory: use a StreamedLoader, or load them with a "
                "smaller image_size so that they fit"
            )
        return self.inputs

    def take(self, positions: NDArray[np.int64]) -> "Split":
        """The samples at these positions, in that order."""
        return Split(
            self.inputs[positions],
            self.labels[positions],
            None if self.ids is None else PackedText(self.ids[i] for i in positions.tolist()),
            None if self.groups is None else self.groups[positions],
            None if self.weights is None else self.weights[positions],
        )


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set that is ready to train on, as `rfdlc.load` returns it.

    Parameters
    ----------
    name : str
    classes : Classes
        Class names, counted on the training split.
    train : Split
    val, test : Split, optional
    normalisation : Normalisation, optional
        Mean and standard deviation per channel or feature.
    notes : tuple of str
        What was done to the data while it was read.
    skipped : tuple of str
        What was broken and left out, one message each.
    encoder : TableEncoder, optional
        How rows of a table become features.

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

    @classmethod
    def of(
        cls,
        name: str,
        names: Sequence[str],
        splits: dict[str, Split],
        notes: Sequence[str] = (),
        normalisation: Normalisation | None = None,
    ) -> "Dataset":
        """From class names and splits: counts the classes, and measures the normalisation on the training split."""
        train = splits.get("train")
        if train is None or not len(train):
            raise InputError(f"{name}: there is no training sample; expected a training split")
        shape = tuple(train.inputs.shape[1:])
        expect(0 not in shape, f"{name}: samples of shape {shape} hold nothing to learn from")
        for which, split in splits.items():
            own = tuple(split.inputs.shape[1:])
            alike = own == shape or not len(split)
            expect(alike, f"{name}: {which} samples have shape {own}, but training samples {shape}")
        present = np.unique(train.labels)
        only = f"{name}: all {len(train)} training samples are of one class ({names[int(present[0])]!r}): expected two"
        expect(len(present) > 1, only)
        classes = Classes.from_labels(train.labels, names)
        absent = [n for n, count in zip(classes.names, classes.counts or (), strict=True) if not count]
        if absent:
            notes = [*notes, f"{len(absent)} of {len(classes)} classes have no training sample: {listing(absent, 5)}"]
        val, test = (splits[name] if len(splits.get(name, ())) else None for name in SPLITS[1:])
        return cls(name, classes, train, val, test, normalisation or _measured(train), tuple(notes))

    @property
    def splits(self) -> dict[str, Split]:
        """The splits that exist, by name: train, val, test."""
        return {name: split for name in SPLITS if (split := getattr(self, name)) is not None}

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample: (channels, H, W) or (F,)."""
        return tuple(self.train.inputs.shape[1:])

    @property
    def kind(self) -> str:
        """`images` or `features`."""
        return "images" if len(self.input_shape) == 3 else "features"

    def hold_out(self, fraction: float = 0.1, seed: int = 0) -> "Dataset":
        """Move a stratified fraction of the training samples into `val`, and count the classes again.

        Where groups are known, no group is on both sides.
        """
        expect(self.val is None, f"{self.name} has validation samples already: hold_out needs val=None")
        kept, held = hold_out_indices(self.train.labels, fraction, seed, self.train.groups)
        expect(
            len(held),
            f"{self.name}: no class has two samples (or groups), so none can be held out: add samples, or do "
            "without (test_fraction=0 for data without a test split, hold_out=0 for training)",
        )
        train = self.train.take(kept)
        classes = Classes.from_labels(train.labels, self.classes.names, self.classes.groups)
        return replace(self, train=train, val=self.train.take(held), classes=classes)

    def with_test(self, fraction: float, seed: int = 0) -> "Dataset":
        """For data without splits: hold out a fraction for `test`, as `hold_out` does, and add a note that says so."""
        moved = self.hold_out(fraction, seed)
        held = len(self.train) - len(moved.train)
        notes = (*self.notes, held_out_note(held, len(self.train), seed))
        return replace(moved, val=None, test=moved.val, normalisation=_measured(moved.train), notes=notes)


def held_out_note(held: int, samples: int, seed: int) -> str:
    """The note for data without a test split."""
    return f"the data has no test split: {held} of {samples} samples were held out for it (seed {seed})"


def _measured(train: Split) -> Normalisation:
    if isinstance(train.inputs, ImageFiles):
        return PHOTOGRAPHS if train.inputs.channels == 3 else GREY_PHOTOGRAPHS
    images = train.inputs.ndim == 4
    return Normalisation.of_images(train.inputs) if images else Normalisation.of_features(train.inputs)


def split_name(word: str) -> str | None:
    """train, val or test for the ways people write them; None for any other word.

    >>> split_name("Validation"), split_name("cats")
    ('val', None)
    """
    return ALIASES.get(word.lower())


def choose_split(name: str, splits: Collection[str], wanted: str | None) -> str:
    """The requested split, or the last of train, val and test that exists."""
    chosen = wanted or next((split for split in reversed(SPLITS) if split in splits), "")
    expect(chosen in splits, f"{name} has no split {chosen!r}: it has {', '.join(splits) or 'none'}")
    return chosen

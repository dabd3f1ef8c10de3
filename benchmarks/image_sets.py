"""Sets of images to compare trainings on: photographs, lesions, letters, sounds, tissue
and land, of 8 to 224 pixels, 200 to 30,000 images and 7 to 200 classes.

    python benchmarks/image_sets.py --data DIR
        what there is
    python benchmarks/image_sets.py NAME --data DIR --folders PHOTOS
        one of them as files: PHOTOS/train/CLASS/*.png and PHOTOS/test/CLASS/*.png

DIR holds what others published: cifar-10-batches-py/, cifar-100-python/ (long-tailed
parts of CIFAR), gentle/cifar-10-batches-py/ and gentle/cifar-100-python/ (with further
images), dermamnist.npz, caltech101/, tinyimagenet/ and plantdoc/ (train/ and test/ with
a folder per class), trashnet/ (a folder per class). What is drawn or simulated needs
none of it. Each set is made once, with a seed, and kept in DIR/image-sets/NAME.npz. A
fifth of the training images is marked as held out: choices are made on these, and test
images are read once, at the end.
"""

import argparse
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import image_drawn as drawn
from image_drawn import Bytes

Labels = NDArray[np.int64]
Split = tuple[Bytes, Labels]
HELD_OUT = 0.2
SEED = 20261119


@dataclass(frozen=True)
class ImageSet:
    """Images of both splits, bytes of shape (samples, side, side, 3), and labels.

    `held_out` marks the training images on which choices are made. `flips`: whether a
    mirror image shows the same class.
    """

    name: str
    train_x: Bytes
    train_y: Labels
    held_out: NDArray[np.bool_]
    test_x: Bytes
    test_y: Labels
    flips: bool

    @property
    def classes(self) -> int:
        return int(self.train_y.max()) + 1

    @property
    def side(self) -> int:
        return self.train_x.shape[1]

    @property
    def counts(self) -> Labels:
        return np.bincount(self.train_y, minlength=self.classes)

    @property
    def balanced_test(self) -> bool:
        """Whether all classes have as many test images: a test split says nothing about
        how frequent they are in service.
        """
        counts = np.bincount(self.test_y, minlength=self.classes)
        return bool(counts.min() == counts.max())

    def write(self, path: Path) -> None:
        np.savez(
            path,
            train_images=self.train_x,
            train_labels=self.train_y,
            test_images=self.test_x,
            test_labels=self.test_y,
            held_out=self.held_out,
        )

    def for_choices(self) -> "ImageSet":
        """The same training images, split: those held out take the place of the test
        images, which are not there.
        """
        held_out = self.held_out
        train_y = self.train_y[~held_out]
        return ImageSet(
            self.name,
            self.train_x[~held_out],
            train_y,
            marked(train_y, SEED + 1),
            self.train_x[held_out],
            self.train_y[held_out],
            self.flips,
        )


@dataclass(frozen=True)
class Source:
    """How a set is made from the folder of published data."""

    make: Callable[[Path], tuple[Split, Split]]
    flips: bool
    suites: tuple[str, ...]
    what: str


def load(name: str, data: Path) -> ImageSet:
    """A set by name: made on first use, then read from DIR/image-sets."""
    if name not in SOURCES:
        raise SystemExit(f"no set {name!r}: expected one of {', '.join(SOURCES)}")
    path = data / "image-sets" / f"{name}.npz"
    source = SOURCES[name]
    if not path.exists():
        (train_x, train_y), (test_x, test_y) = source.make(data)
        held_out = marked(train_y, SEED)
        path.parent.mkdir(parents=True, exist_ok=True)
        made = ImageSet(name, train_x, train_y, held_out, test_x, test_y, source.flips)
        part = path.with_suffix(".part.npz")
        made.write(part)
        part.replace(path)
    return read(path, source.flips)


def read(path: Path, flips: bool) -> ImageSet:
    """A set that `ImageSet.write` wrote."""
    with np.load(path) as arrays:
        return ImageSet(
            path.stem,
            arrays["train_images"],
            arrays["train_labels"],
            arrays["held_out"],
            arrays["test_images"],
            arrays["test_labels"],
            flips,
        )


def marked(labels: Labels, seed: int) -> NDArray[np.bool_]:
    """A fifth of every class, at least one image of a class that has two."""
    rng = np.random.default_rng(seed)
    mask = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        count = max(round(HELD_OUT * len(members)), min(1, len(members) - 1))
        mask[members[:count]] = True
    return mask


def profile(largest: int, classes: int, factor: float) -> list[int]:
    """Counts that fall exponentially, from the largest to the largest / factor."""
    steps = np.arange(classes) / max(1, classes - 1)
    return [int(n) for n in largest * factor**-steps]


def thinned(split: Split, counts: Sequence[int], seed: int = SEED) -> Split:
    """The first classes, with at most so many images of each, at random."""
    rng = np.random.default_rng(seed)
    images, labels = split
    rows = [
        rng.permutation(np.flatnonzero(labels == label))[:count]
        for label, count in enumerate(counts)
    ]
    order = rng.permutation(np.concatenate(rows))
    return images[order], labels[order]


def resized(images: Bytes, side: int) -> Bytes:
    """Square images of another side."""
    return np.stack([_resized(Image.fromarray(image), side) for image in images])


def _resized(image: Image.Image, side: int) -> Bytes:
    """The middle square of a photograph, in colour, at this side."""
    shorter = min(image.size)
    left = (image.width - shorter) // 2
    top = (image.height - shorter) // 2
    square = image.crop((left, top, left + shorter, top + shorter)).convert("RGB")
    scaled = square.resize((side, side), Image.Resampling.BILINEAR)
    return np.asarray(scaled)


# -- what others published
# --------------------------------------------------------------------------------------


def _unpickled(path: Path) -> dict[str, list[int] | Bytes]:
    with path.open("rb") as file:
        batch = pickle.load(file, encoding="latin1")  # noqa: S301 (CIFAR's format)
    return dict(batch)


def _cifar(files: Sequence[Path], labels: str) -> Split:
    batches = [_unpickled(file) for file in files]
    flat = np.concatenate([np.asarray(batch["data"]) for batch in batches])
    classes = np.concatenate([np.asarray(batch[labels]) for batch in batches])
    return flat.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), classes.astype(np.int64)


def cifar10(data: Path) -> tuple[Split, Split]:
    folder = data / "cifar-10-batches-py"
    train = [folder / f"data_batch_{number}" for number in range(1, 6)]
    return _cifar(train, "labels"), _cifar([folder / "test_batch"], "labels")


def cifar100(data: Path) -> tuple[Split, Split]:
    folder = data / "cifar-100-python"
    train = _cifar([folder / "train"], "fine_labels")
    return train, _cifar([folder / "test"], "fine_labels")


def gentle_cifar10(data: Path) -> tuple[Split, Split]:
    """Factor 62.5: exp(-c / 2.1715)."""
    train, test = cifar10(data / "gentle")
    counts = [int(np.ceil(5000 * np.exp(-c / 2.1715))) for c in range(10)]
    return thinned(train, counts), test


def gentle_cifar100(data: Path) -> tuple[Split, Split]:
    """Factor 83.3: exp(-c / 21.7147)."""
    train, test = cifar100(data / "gentle")
    counts = [int(np.ceil(500 * np.exp(-c / 21.7147))) for c in range(100)]
    return thinned(train, counts), test


def few_cifar10(data: Path) -> tuple[Split, Split]:
    """200 photographs for ten classes."""
    train, test = cifar10(data)
    return thinned(train, profile(60, 10, 15)), thinned(test, [200] * 10)


def vehicles(data: Path) -> tuple[Split, Split]:
    """Airplane, automobile and bird of CIFAR-10, 50:10:1, at 24 pixels."""
    train, test = cifar10(data)
    train_x, train_y = thinned(train, [2000, 400, 40])
    test_x, test_y = thinned(test, [500] * 3)
    return (resized(train_x, 24), train_y), (resized(test_x, 24), test_y)


def dermamnist(data: Path) -> tuple[Split, Split]:
    with np.load(data / "dermamnist.npz") as arrays:
        train_y = arrays["train_labels"].ravel().astype(np.int64)
        test_y = arrays["test_labels"].ravel().astype(np.int64)
        return (arrays["train_images"], train_y), (arrays["test_images"], test_y)


def few_dermamnist(data: Path) -> tuple[Split, Split]:
    """A seventh of it: 1,000 images."""
    (images, labels), test = dermamnist(data)
    rows = np.random.default_rng(SEED).permutation(len(labels))[:1000]
    missing = set(range(7)) - set(labels[rows].tolist())
    if missing:
        raise ValueError(f"classes {missing} have no image: choose another seed")
    return (images[rows], labels[rows]), test


def _folders(folder: Path, side: int, names: Sequence[str]) -> Split:
    paths = [
        (path, label)
        for label, name in enumerate(names)
        for path in sorted((folder / name).iterdir())
    ]
    images = np.empty((len(paths), side, side, 3), np.uint8)
    for image, (path, _) in zip(images, paths, strict=True):
        with Image.open(path) as photograph:
            image[:] = _resized(photograph, side)
    return images, np.array([label for _, label in paths])


def photographs(
    data: Path, folder: str, side: int, every: int = 1
) -> tuple[Split, Split]:
    """Folders train/ and test/ with a folder per class; every so many of the classes
    that have both.
    """
    in_test = {path.name for path in (data / folder / "test").iterdir()}
    in_train = {path.name for path in (data / folder / "train").iterdir()}
    names = sorted(in_train & in_test)[::every]
    train = _folders(data / folder / "train", side, names)
    return train, _folders(data / folder / "test", side, names)


def trash(data: Path, side: int) -> tuple[Split, Split]:
    """TrashNet, six classes, 25 of each for the test, factor 20."""
    return _split(data / "trashnet", side, 25, 20)


def _split(folder: Path, side: int, tests: int, factor: float) -> tuple[Split, Split]:
    """Folders of classes: so many images of each at random for the test, and a long
    tail of the others.
    """
    names = sorted(path.name for path in folder.iterdir())
    images, labels = _folders(folder, side, names)
    rng = np.random.default_rng(SEED)
    is_test = np.zeros(len(labels), bool)
    for label in range(len(names)):
        is_test[rng.permutation(np.flatnonzero(labels == label))[:tests]] = True
    largest = int(np.bincount(labels[~is_test]).max())
    train = (images[~is_test], labels[~is_test])
    counts = profile(largest, len(names), factor)
    return thinned(train, counts), (images[is_test], labels[is_test])


def digits(data: Path) -> tuple[Split, Split]:
    """scikit-learn's digits of 8 pixels, 60 of each class for the test."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    grey = np.clip(bunch.images * 16, 0, 255).astype(np.uint8)
    images = np.repeat(grey[..., None], 3, axis=-1)
    labels = bunch.target.astype(np.int64)
    order = np.random.default_rng(SEED).permutation(len(labels))
    is_test = np.zeros(len(labels), bool)
    for label in range(10):
        is_test[order[labels[order] == label][:60]] = True
    train = thinned((images[~is_test], labels[~is_test]), profile(110, 10, 20))
    return train, (images[is_test], labels[is_test])


# -- what is drawn
# --------------------------------------------------------------------------------------


def drawing(
    data: Path,
    paint: drawn.Painter,
    side: int,
    train: Sequence[int],
    test: Sequence[int],
) -> tuple[Split, Split]:
    """Other seeds for the test images."""
    workers = os.cpu_count() or 1
    return (
        drawn.painted(paint, train, side, SEED, workers),
        drawn.painted(paint, test, side, SEED + 1, workers),
    )


def _drawn(
    paint: drawn.Painter,
    side: int,
    train: Sequence[int],
    test: Sequence[int],
    flips: bool,
    suite: str,
    what: str,
) -> Source:
    make = partial(drawing, paint=paint, side=side, train=train, test=test)
    return Source(make, flips, (suite,), what)


CPU = ("cpu",)
GPU = ("gpu",)
SOURCES: dict[str, Source] = {
    "digits": Source(digits, False, CPU, "handwritten digits"),
    "letters-32": _drawn(
        drawn.paint_letter,
        32,
        profile(300, 25, 30),
        [40] * 25,
        False,
        "cpu",
        "letters in thirteen fonts, distorted",
    ),
    "letters-40": _drawn(
        drawn.paint_letter,
        40,
        profile(3000, 47, 100),
        [50] * 47,
        False,
        "gpu",
        "letters and digits in thirteen fonts, distorted",
    ),
    "sounds-32": _drawn(
        drawn.paint_spectrogram,
        32,
        profile(400, 12, 40),
        [60] * 12,
        False,
        "cpu",
        "spectrograms of twelve kinds of sound",
    ),
    "sounds-64": _drawn(
        drawn.paint_spectrogram,
        64,
        profile(2000, 12, 100),
        [100] * 12,
        False,
        "gpu",
        "spectrograms of twelve kinds of sound",
    ),
    "tissue-48": _drawn(
        drawn.paint_tissue,
        48,
        profile(400, 8, 20),
        profile(400, 8, 20),
        True,
        "cpu",
        "stained nuclei, test classes as frequent as in training",
    ),
    "tissue-96": _drawn(
        drawn.paint_tissue,
        96,
        profile(2000, 8, 50),
        profile(1000, 8, 50),
        True,
        "gpu",
        "stained nuclei, test classes as frequent as in training",
    ),
    "land-64": _drawn(
        drawn.paint_land,
        64,
        profile(300, 10, 30),
        [60] * 10,
        True,
        "cpu",
        "land from above",
    ),
    "dermamnist": Source(dermamnist, True, ("cpu", "gpu"), "lesions of the skin"),
    "dermamnist-few": Source(few_dermamnist, True, CPU, "a seventh of dermamnist"),
    "cifar10-few": Source(few_cifar10, True, CPU, "200 photographs of ten classes"),
    "cifar10-three": Source(vehicles, True, CPU, "three classes, 50:10:1"),
    "cifar10-lt": Source(cifar10, True, ("cpu", "gpu"), "photographs, factor 100"),
    "cifar10-gentle": Source(gentle_cifar10, True, (), "photographs, factor 62.5"),
    "cifar100-lt": Source(cifar100, True, GPU, "photographs, factor 100"),
    "cifar100-gentle": Source(gentle_cifar100, True, (), "photographs, factor 83.3"),
    "trash-64": Source(
        partial(trash, side=64), True, CPU, "photographs of waste, factor 20"
    ),
    "trash-224": Source(
        partial(trash, side=224), True, GPU, "photographs of waste, factor 20"
    ),
    "plants-128": Source(
        partial(photographs, folder="plantdoc", side=128),
        True,
        GPU,
        "leaves of plants, healthy and ill, from the web",
    ),
    "caltech20-48": Source(
        partial(photographs, folder="caltech101", side=48, every=5),
        True,
        CPU,
        "every fifth class of Caltech-101",
    ),
    "caltech101-96": Source(
        partial(photographs, folder="caltech101", side=96),
        True,
        (),
        "photographs of 101 classes",
    ),
    "caltech101-224": Source(
        partial(photographs, folder="caltech101", side=224),
        True,
        GPU,
        "the same, enlarged to 224 pixels",
    ),
    "tinyimagenet-lt": Source(
        partial(photographs, folder="tinyimagenet", side=64),
        True,
        GPU,
        "photographs of 200 classes, factor 100",
    ),
    "tinyimagenet100": Source(
        partial(photographs, folder="tinyimagenet", side=64, every=2),
        True,
        (),
        "every second class of it",
    ),
}


def suite(name: str) -> list[str]:
    """The sets for `cpu` or `gpu`."""
    return [key for key, source in SOURCES.items() if name in source.suites]


def family(name: str) -> str:
    """What sets share that are made from the same images: `cifar` of `cifar10-few`."""
    return name.partition("-")[0].rstrip("0123456789")


def write_folders(images: ImageSet, folder: Path) -> None:
    """The set as files: train/CLASS/*.png and test/CLASS/*.png."""
    for split in ("train", "test"):
        pictures: Bytes = getattr(images, f"{split}_x")
        labels: Labels = getattr(images, f"{split}_y")
        for number, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
            path = folder / split / f"{label:03d}" / f"{number:05d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture).save(path)


def _described(name: str, data: Path) -> str:
    try:
        images = load(name, data)
    except FileNotFoundError as error:
        return f"{name:16} not there: {error.filename}"
    counts = images.counts
    return (
        f"{name:16} {images.side:3} pixels, {images.classes:3} classes,"
        f" {len(images.train_y):5} training images ({counts.max()} to {counts.min()}),"
        f" {len(images.test_y):5} test images, {'/'.join(SOURCES[name].suites):7}:"
        f" {SOURCES[name].what}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=SOURCES)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--folders", type=Path)
    options = parser.parse_args()
    if options.name and options.folders:
        write_folders(load(options.name, options.data), options.folders)
    else:
        for name in [options.name] if options.name else SOURCES:
            print(_described(name, options.data), flush=True)

"""MedMNIST: any 2D, single-label `.npz` in its own keys and split, grey or colour, 28 to 224 pixels."""

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from rfdlc.data.dataset import SPLITS, Dataset, Split
from rfdlc.data.images import resized
from rfdlc.data.sources.arrays import as_labels, open_npz
from rfdlc.decide.classes import numbered
from rfdlc.errors import InputError, listing

ORGANS = (
    "bladder",
    "femur-left",
    "femur-right",
    "heart",
    "kidney-left",
    "kidney-right",
    "liver",
    "lung-left",
    "lung-right",
    "pancreas",
    "spleen",
)
# The files hold numbers only. These are the names that the data set's own description gives them.
CLASS_NAMES = {
    "dermamnist": ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc"),
    "pathmnist": (
        "adipose",
        "background",
        "debris",
        "lymphocytes",
        "mucus",
        "smooth muscle",
        "normal colon mucosa",
        "cancer-associated stroma",
        "colorectal adenocarcinoma epithelium",
    ),
    "octmnist": ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
    "pneumoniamnist": ("normal", "pneumonia"),
    "breastmnist": ("malignant", "normal or benign"),
    "bloodmnist": (
        "basophil",
        "eosinophil",
        "erythroblast",
        "immature granulocyte",
        "lymphocyte",
        "monocyte",
        "neutrophil",
        "platelet",
    ),
    "organamnist": ORGANS,
    "organcmnist": ORGANS,
    "organsmnist": ORGANS,
    "retinamnist": ("0", "1", "2", "3", "4"),
    "tissuemnist": ("0", "1", "2", "3", "4", "5", "6", "7"),
}
ROLES = ("images", "labels")
SUPPORTED = "expected 2D images with one label each, as in " + listing(CLASS_NAMES, 20)


def recognises(path: Path) -> bool:
    """Whether an `.npz` has MedMNIST's keys: images and labels of each split, and nothing else, such as names."""
    try:
        with np.load(path, allow_pickle=False) as file:
            splits = {key.partition("_")[0] for key in file.files} & set(SPLITS)
            return "train" in splits and set(file.files) == {f"{split}_{role}" for split in splits for role in ROLES}
    except Exception:  # what is wrong with it is reported when it is read
        return False


def find(root: Path, name: str) -> Path:
    """The file of a named MedMNIST in a folder: `dermamnist.npz`, or the one larger version there is."""
    plain = root / f"{name}.npz"
    if plain.is_file():
        return plain
    sized = sorted(root.glob(f"{name}_*.npz"))
    if len(sized) != 1:
        found = (
            f"there are several, name one by its path: {listing(sized)}" if sized else "download it from medmnist.com"
        )
        raise InputError(f"{name} was not found as {plain}: {found}, or give its folder with root (--root)")
    return sized[0]


def read(path: Path, *, image_size: PositiveInt | None = None) -> Dataset:
    """The file's own train, val and test, its natural tail, classes in the file's order; resized on request."""
    arrays = open_npz(path)
    labels = {split: _labels(path, split, arrays) for split in SPLITS if f"{split}_labels" in arrays}
    names = _class_names(path, max(int(own.max(initial=0)) for own in labels.values()) + 1)
    splits = {}
    for split, own in labels.items():
        images = _images(path, split, arrays)
        images = images if image_size is None else resized(images, image_size)
        ids = [f"{split}/{i}" for i in range(len(own))]
        splits[split] = Split(images, as_labels(f"{path}, {split}", own, names), ids)
    return Dataset.of(path.stem, names, splits)


def _labels(path: Path, split: str, arrays: dict[str, NDArray[Any]]) -> NDArray[Any]:
    labels = arrays[f"{split}_labels"]
    if labels.ndim == 2 and labels.shape[1] > 1:
        raise InputError(
            f"{path}: has {labels.shape[1]} labels per image (multi-label), which is not supported: {SUPPORTED}"
        )
    if labels.dtype.kind not in "iu" or labels.ndim not in (1, 2):
        found = f"{labels.dtype} of shape {labels.shape}"
        raise InputError(f"{path}: {split}_labels are {found}, not integers (N, 1): {SUPPORTED}")
    return labels.reshape(-1)


def _images(path: Path, split: str, arrays: dict[str, NDArray[Any]]) -> NDArray[np.uint8]:
    images = arrays.get(f"{split}_images")
    if images is None:
        raise InputError(f"{path}: has {split}_labels but no {split}_images")
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] != 3):
        found = f"{images.dtype} of shape {images.shape}"
        raise InputError(f"{path}: {split}_images are {found}, not uint8 (N, H, W) or (N, H, W, 3): {SUPPORTED}")
    return images[:, None] if images.ndim == 3 else np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def _class_names(path: Path, count: int) -> list[str]:
    known = CLASS_NAMES.get(re.split(r"[_\-.]", path.stem.lower())[0], ())
    return list(known) if len(known) >= count else numbered(count - 1, f"{path}: ")

"""The data sets of MedMNIST, as their files are published."""

from functools import partial
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from rfdlc.data.dataset import SPLITS, Dataset, as_images
from rfdlc.data.images import resized
from rfdlc.data.reader import DataReader, Place
from rfdlc.data.readers.arrays import from_arrays, words_of
from rfdlc.errors import InputError, listing
from rfdlc.formats.arrays import NPZ, array_names, open_arrays
from rfdlc.probabilities.classes import numbered

ORGANS = (
    "bladder,femur-left,femur-right,heart,kidney-left,kidney-right,liver,"
    "lung-left,lung-right,pancreas,spleen"
)
# The files of MedMNIST hold numbers only. These are the names in its own description.
CLASSES = {
    "dermamnist": "akiec,bcc,bkl,df,mel,nv,vasc",
    "pathmnist": (
        "adipose,background,debris,lymphocytes,mucus,smooth muscle,normal colon mucosa,"
        "cancer-associated stroma,colorectal adenocarcinoma epithelium"
    ),
    "octmnist": "choroidal neovascularization,diabetic macular edema,drusen,normal",
    "pneumoniamnist": "normal,pneumonia",
    "breastmnist": "malignant,normal or benign",
    "bloodmnist": (
        "basophil,eosinophil,erythroblast,immature"
        " granulocyte,lymphocyte,monocyte,neutrophil,platelet"
    ),
    "retinamnist": "0,1,2,3,4",
    "tissuemnist": "0,1,2,3,4,5,6,7",
    **dict.fromkeys(("organamnist", "organcmnist", "organsmnist"), ORGANS),
}


def is_medmnist(place: Place) -> bool:
    """Whether an `.npz` has MedMNIST's keys: images and labels of each split, and
    nothing else, such as names.
    """
    names = set(array_names(place.path))
    usual = {f"{split}_{role}" for split in SPLITS for role in ("images", "labels")}
    return {"train_images", "train_labels"} <= names <= usual


def find(root: Path, name: str) -> Path:
    """The file of a named MedMNIST in a folder: `dermamnist.npz`, or the one larger
    version there is.
    """
    plain = root / f"{name}{NPZ}"
    if plain.is_file():
        return plain
    larger = sorted(root.glob(f"{name}_*{NPZ}"))
    if len(larger) == 1:
        return larger[0]
    fix = "download it from medmnist.com"
    if larger:
        fix = f"there are several, name one by its path: {listing(larger)}"
    raise InputError(
        f"{name} was not found as {plain}: {fix}, or give its folder with root (--root)"
    )


def read(place: Place, *, image_size: PositiveInt | None = None) -> Dataset:
    """The file's own splits and natural tail, classes in the file's order; resized on
    request.
    """
    path = place.path
    arrays = open_arrays(path)
    largest = 0
    for key, values in arrays.items():
        if key.endswith("_labels"):
            if values.dtype.kind not in "iu":
                raise InputError(
                    f"{path}: has labels that are not integers: expected one class"
                    " number per image"
                )
            largest = max(largest, int(values.max(initial=0)))
    names = CLASSES.get(words_of(path.stem)[0], "").split(",")
    if len(names) <= largest:
        names = numbered(largest, f"{path}: ")
    ids = dict[str, Any]()
    for key, values in arrays.items():
        split, _, role = key.partition("_")
        ids[f"{split}_ids"] = [f"{split}/{i}" for i in range(len(values))]
        if image_size is not None and role == "images":
            arrays[key] = resized(as_images(f"{path}, {key}", values), image_size)
    return from_arrays(path.stem, {**arrays, **ids, "names": names})


MEDMNIST = DataReader(
    read,
    recognises=is_medmnist,
    names={name: partial(find, name=name) for name in CLASSES},
    suffixes=[NPZ],
)

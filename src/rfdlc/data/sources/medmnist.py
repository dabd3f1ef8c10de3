"""MedMNIST: any 2D, single-label `.npz` in its own keys and split, grey or colour, 28 to 224 pixels."""

import re
from pathlib import Path

import numpy as np
from pydantic import PositiveInt

from rfdlc.data.dataset import SPLITS, Dataset
from rfdlc.data.images import resized
from rfdlc.data.sources.arrays import as_images, from_arrays, open_arrays
from rfdlc.decide.classes import numbered
from rfdlc.errors import expect, listing

ORGANS = "bladder,femur-left,femur-right,heart,kidney-left,kidney-right,liver,lung-left,lung-right,pancreas,spleen"
# The files hold numbers only. These are the names in the data set's own description.
CLASS_NAMES = {
    "dermamnist": "akiec,bcc,bkl,df,mel,nv,vasc",
    "pathmnist": "adipose,background,debris,lymphocytes,mucus,smooth muscle,normal colon mucosa,"
    "cancer-associated stroma,colorectal adenocarcinoma epithelium",
    "octmnist": "choroidal neovascularization,diabetic macular edema,drusen,normal",
    "pneumoniamnist": "normal,pneumonia",
    "breastmnist": "malignant,normal or benign",
    "bloodmnist": "basophil,eosinophil,erythroblast,immature granulocyte,lymphocyte,monocyte,neutrophil,platelet",
    "organamnist": ORGANS,
    "organcmnist": ORGANS,
    "organsmnist": ORGANS,
    "retinamnist": "0,1,2,3,4",
    "tissuemnist": "0,1,2,3,4,5,6,7",
}
ROLES = ("images", "labels")


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
    found = [plain] if plain.is_file() else sorted(root.glob(f"{name}_*.npz"))
    fix = f"there are several, name one by its path: {listing(found)}" if found else "download it from medmnist.com"
    expect(len(found) == 1, f"{name} was not found as {plain}: {fix}, or give its folder with root (--root)")
    return found[0]


def read(path: Path, *, image_size: PositiveInt | None = None) -> Dataset:
    """The file's own splits and natural tail, classes in the file's order; resized on request."""
    arrays = open_arrays(path)
    labels = {key.partition("_")[0]: values for key, values in arrays.items() if key.endswith("_labels")}
    integers = all(values.dtype.kind in "iu" for values in labels.values())
    expect(integers, f"{path}: has labels that are not integers: expected one class number per image")
    largest = max(int(values.max(initial=0)) for values in labels.values())
    known = CLASS_NAMES.get(re.split(r"[_\-.]", path.stem.lower())[0], "").split(",")
    names = known if len(known) > largest else numbered(largest, f"{path}: ")
    ids = {f"{split}_ids": np.array([f"{split}/{i}" for i in range(len(own))]) for split, own in labels.items()}
    if image_size is not None:
        images = {key: as_images(f"{path}, {key}", arrays[key]) for key in arrays if key.endswith("_images")}
        arrays |= {key: resized(values, image_size) for key, values in images.items()}
    return from_arrays(path.stem, {**arrays, **ids, "names": np.array(names)})

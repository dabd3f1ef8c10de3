"""Datasets of other libraries: objects with items, torchvision, and Hugging Face
`datasets`.
"""

import numpy as np
import pytest
from PIL import Image

import rfdlc
from rfdlc.errors import InputError

RNG = np.random.default_rng(0)
SQUARES = RNG.integers(0, 256, (12, 8, 8), dtype=np.uint8)
LABELS = np.array([0, 1, 2] * 4)


class Items:
    """Like a data set of torchvision: `classes`, and pairs of an image and a class
    number.
    """

    classes = ["cat", "dog", "owl"]  # noqa: RUF012

    def __init__(self, inputs, labels=LABELS):
        self.inputs, self.labels = inputs, labels

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], int(self.labels[index])


@pytest.mark.parametrize("make", [Image.fromarray, np.asarray], ids=["pillow", "array"])
def test_small_squares_keep_their_pixels(make):
    data = rfdlc.load(
        {
            "train": Items([make(x) for x in SQUARES]),
            "validation": Items([make(x) for x in SQUARES[:3]]),
        }
    )
    assert data.train.inputs.tolist() == SQUARES[:, None].tolist()
    assert data.val.labels.tolist() == [0, 1, 2]
    assert data.classes.names == ("cat", "dog", "owl")
    assert data.classes.counts == (4, 4, 4)


def test_images_of_any_size_become_squares_of_their_centre():
    wide = np.zeros((6, 18, 3), np.uint8)
    wide[:, 6:12] = (10, 20, 30)  # the centre; what is cut off is black
    data = rfdlc.load(
        Items([Image.fromarray(wide)] * 12), image_size=4, test_fraction=0
    )
    inner = data.train.inputs[
        :, :, :, 1:3
    ]  # its edges are interpolated with what lies beside
    assert (inner == np.array([10, 20, 30])[None, :, None, None]).all()
    assert data.input_shape == (3, 4, 4)
    assert rfdlc.load(
        Items([Image.fromarray(wide)] * 12), test_fraction=0
    ).input_shape == (3, 224, 224)


def test_features_are_read_as_features():
    features = RNG.normal(size=(12, 5)).astype(np.float32)
    data = rfdlc.load(Items(list(features)), test_fraction=0)
    np.testing.assert_array_equal(data.train.inputs, features)


def test_a_subset_has_the_names_of_the_whole_and_trains(tmp_path):
    from torch.utils.data import Subset

    whole = Items([Image.fromarray(x) for x in SQUARES])
    data = {"train": Subset(whole, range(9)), "test": Subset(whole, range(9, 12))}
    model = rfdlc.train(
        data,
        out=tmp_path / "run",
        method="ce",
        epochs=1,
        backbone="mlp",
        widths=(4,),
        tune="off",
    )
    assert model.classes.names == ("cat", "dog", "owl")
    assert model.predict(rfdlc.load(data).test).targets.tolist() == [0, 1, 2]


def test_splits_that_number_their_classes_differently_are_matched_by_name():
    class Fewer(Items):
        classes = ["dog", "owl"]  # noqa: RUF012  # a folder of test images without cats

    images = [Image.fromarray(x) for x in SQUARES]
    data = rfdlc.load({"train": Items(images), "test": Fewer(images[:4], [0, 1, 1, 0])})
    assert data.classes.names == ("cat", "dog", "owl")
    assert data.test.labels.tolist() == [1, 2, 2, 1]
    with pytest.raises(
        InputError,
        match="Fewer, test: a label is out of range: expected numbers from 0 to 1",
    ):
        rfdlc.load({"train": Items(images), "test": Fewer(images[:4], [0, 1, 1, -1])})
    with pytest.raises(
        InputError, match="label 'cat' is not a class: expected one of dog, owl"
    ):
        rfdlc.load({"train": Fewer(images, LABELS % 2), "test": Items(images)})


@pytest.mark.parametrize("label", [None, np.eye(3)[0]], ids=["none", "one-hot"])
def test_labels_that_are_not_one_class(label):
    class Labelled(Items):
        def __getitem__(self, index):
            return self.inputs[index], label

    with pytest.raises(
        InputError, match=r"train sample 0: its label is .*: expected one class"
    ):
        rfdlc.load(Labelled(SQUARES))


def test_torchvision_is_read_as_it_is():
    from rfdlc.training.networks.pretrained import _timm

    _timm()  # imports torchvision, also where its operators are built for another torch
    from torchvision.datasets import FakeData

    fake = FakeData(size=8, image_size=(3, 20, 20), num_classes=2)
    data = rfdlc.load(fake, test_fraction=0)
    assert (
        data.train.inputs[3].tolist()
        == np.asarray(fake[3][0]).transpose(2, 0, 1).tolist()
    )
    assert data.train.labels.tolist() == [int(fake[i][1]) for i in range(8)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            Items([np.zeros((3, 8, 8), np.float32)] * 12),
            "expected uint8 pixels; leave out transforms such as ToTensor",
        ),
        (Items([np.zeros((8, 8, 4), np.uint8)] * 12), "expected 1 or 3 channels"),
        (Items([Image.new("CMYK", (8, 8))] * 12), "train sample 0: the image is CMYK"),
        (Items([np.zeros(2), np.zeros(3)]), "samples differ in shape"),
        ({"train": Items([]), "test": Items([])}, "train: has no samples"),
        (
            {"left": Items([]), "right": Items([])},
            "splits are called left, right: expected train",
        ),
    ],
)
def test_what_cannot_be_read_is_said(given, message):
    with pytest.raises(InputError, match=message):
        rfdlc.load(given)


def test_items_that_are_not_pairs_and_columns_that_do_not_exist():
    class Single(Items):
        def __getitem__(self, index):
            return self.inputs[index]

    with pytest.raises(
        InputError, match=r"train sample 0: is a ndarray: expected a pair"
    ):
        rfdlc.load(Single(SQUARES))
    with pytest.raises(
        InputError, match="target 'kind' names a column, but a Items has none"
    ):
        rfdlc.load(Items(SQUARES), target="kind")


@pytest.fixture(scope="module")
def hub():
    return pytest.importorskip(
        "datasets", reason='needs Hugging Face datasets: pip install "datasets>=4"'
    )


def test_images_of_hugging_face(hub):
    features = hub.Features(
        {
            "picture": hub.Image(),
            "kind": hub.ClassLabel(names=["cat", "dog", "owl"]),
            "n": hub.Value("int64"),
        }
    )
    rows = {
        "picture": [Image.fromarray(x) for x in SQUARES],
        "kind": LABELS.tolist(),
        "n": list(range(12)),
    }
    one = hub.Dataset.from_dict(rows, features=features)
    data = rfdlc.load(hub.DatasetDict({"train": one, "test": one.select(range(3))}))
    assert data.train.inputs.tolist() == SQUARES[:, None].tolist()
    assert data.test.labels.tolist() == [0, 1, 2]
    assert data.classes.names == ("cat", "dog", "owl")
    assert rfdlc.load(one, target="n", test_fraction=0).train.labels.tolist() == list(
        range(12)
    )
    with pytest.raises(
        InputError, match="which column holds the labels\\? There are picture, kind, n"
    ):
        rfdlc.load(one, target="species")


def test_tables_of_hugging_face(hub):
    features = hub.Features(
        {"age": hub.Value("float64"), "kind": hub.ClassLabel(names=["ill", "well"])}
    )
    one = hub.Dataset.from_dict(
        {"age": [1.0, 2.0, 3.0, 4.0], "kind": [0, 1, 1, 0]}, features=features
    )
    data = rfdlc.load({"train": one, "test": one.select([1])})
    assert data.classes.names == ("ill", "well")
    assert data.train.labels.tolist() == [0, 1, 1, 0]
    assert (data.train.inputs[:, 0].tolist(), data.test.inputs[:, 0].tolist()) == (
        [1, 2, 3, 4],
        [2],
    )


def test_labels_may_be_tensors_without_dimensions():
    torch = pytest.importorskip("torch")
    features = torch.arange(24.0).reshape(12, 2)
    data = rfdlc.load(
        torch.utils.data.TensorDataset(features, torch.tensor(LABELS)), test_fraction=0
    )
    assert data.train.labels.tolist() == LABELS.tolist()
    pairs = torch.utils.data.TensorDataset(features, torch.zeros(12, 2))
    with pytest.raises(InputError, match="expected one class"):
        rfdlc.load(pairs)

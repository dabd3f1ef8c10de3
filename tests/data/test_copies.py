"""Copies: the same samples, or images that look the same, are never on both sides of a
split that is made here.
"""

import io
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import rfdlc
from rfdlc.data.copies import _content, first_copies, near_copies, with_near_copies
from rfdlc.data.dataset import Dataset, Split
from rfdlc.data.images import Resizing, fitted, planes
from rfdlc.data.longtail import assign_folds, hold_out_indices
from rfdlc.errors import InputError
from rfdlc.training.trainer import _image_plan

RNG = np.random.default_rng(0)


def photographs(count: int, side: int = 48) -> np.ndarray:
    """Smooth images (N, 3, side, side) that differ from each other."""
    coarse = RNG.integers(0, 256, (count, 6, 6, 3), dtype=np.uint8)
    images = [
        Image.fromarray(each).resize((side, side), Image.Resampling.BICUBIC)
        for each in coarse
    ]
    return np.stack([np.asarray(image).transpose(2, 0, 1) for image in images])


def alike(images: np.ndarray) -> list[int]:
    return with_near_copies(first_copies(images), near_copies([images])).tolist()


def saved(image: Image.Image, quality: int = 75) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file)


def fixture(rng: np.random.Generator, kind: int, side: int = 64) -> np.ndarray:
    """A picture (side, side) of one product in one fixture: other noise, shift,
    brightness and, of some, a defect.
    """
    fixed, picture = np.random.default_rng(1), np.full((side, side), 90.0)
    for y, x, tall, wide, level in fixed.uniform(
        (0, 0, 4, 4, 20), (56, 56, 14, 18, 230), (14, 5)
    ).astype(int):
        picture[y : y + tall, x : x + wide] = level
    picture = np.roll(picture, rng.integers(-1, 2, 2), (0, 1)) * rng.uniform(0.95, 1.05)
    picture += rng.normal(0, 4, picture.shape)
    y, x = rng.integers(8, side - 8, 2)
    if kind:
        picture[y, x : x + 3] += 90
    return np.clip(picture, 0, 255).astype(np.uint8)


def naive(inputs: np.ndarray) -> list[int]:
    return [
        next(j for j in range(i + 1) if (inputs[j] == inputs[i]).all())
        for i in range(len(inputs))
    ]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_rows_are_copies(dtype: type) -> None:
    rows = RNG.integers(0, 3, (60, 4)).astype(dtype)
    rows[20:] += np.arange(40)[:, None]
    assert first_copies(rows).tolist() == naive(rows)
    coarse = RNG.integers(0, 2, (50, 3)).astype(
        dtype
    )  # most rows occur several times by chance
    assert first_copies(coarse).tolist() == list(range(50))
    many = np.concatenate([np.zeros((150, 4)), RNG.normal(size=(300, 4))]).astype(dtype)
    assert first_copies(many).tolist() == list(
        range(450)
    )  # too frequent to be copies of one sample
    assert (
        len(first_copies(rows[:0]))
        == len(first_copies(np.zeros((0, 3, 40, 40), np.uint8)))
        == 0
    )


def test_oversampled_rows_are_copies_and_few_values_are_not(tmp_path: Path) -> None:
    """Labels that cannot be learned: accuracy above that of the most frequent class
    would be that of copies.
    """
    rng = np.random.default_rng(1)
    noise = rng.normal(size=(300, 4))
    for times in (
        np.full(300, 2),
        np.where(np.arange(300) < 4, 100, 1),
    ):  # all twice, or a rare class often
        rows = rng.permutation(np.repeat(noise, times, axis=0))
        assert first_copies(rows).tolist() == naive(rows)
    few = rng.integers(0, [2, 3, 4, 5], (1_000, 4)).astype(float)
    few[:, 3] = np.where(
        rng.random(1_000) < 0.9, few[:, 2], few[:, 3]
    )  # depend on each other
    assert first_copies(few).tolist() == list(range(1_000))
    many = np.tile(few, (30, 1))  # more rows than are looked at
    assert first_copies(many).tolist() == list(range(30_000))
    assert (
        first_copies(np.tile(rng.normal(size=(15_000, 2)), (2, 1))).tolist()
        == list(range(15_000)) * 2
    )
    mixed = np.column_stack([few, rng.normal(size=1_000)])
    assert first_copies(np.tile(mixed, (3, 1))).tolist() == list(range(1_000)) * 3
    table = np.concatenate([noise, noise[rng.random(300) < 0.7]])
    file = tmp_path / "table.csv"
    lines = [
        f"{','.join(map(str, row))},{'ab'[int(row[0] > 0)]}" for row in table.tolist()
    ]
    file.write_text("\n".join(["a,b,c,d,target", *lines]))
    data = rfdlc.load(file)
    train, test = (
        {row.tobytes() for row in split.array}
        for split in (data.train, data.splits["test"])
    )
    assert not train & test
    assert any("copies" in note for note in data.notes)


def test_images_that_look_the_same_are_copies() -> None:
    images = photographs(40)
    darker = np.clip(0.8 * images[3].astype(float) + 10, 0, 255).astype(np.uint8)
    again = np.asarray(
        saved(Image.fromarray(images[5].transpose(1, 2, 0)), 40)
    ).transpose(2, 0, 1)
    flipped = images[7][:, :, ::-1]
    grey = np.full((2, 3, 48, 48), 90, np.uint8)
    grey[1, 0, 0, 0] = 91
    both = np.concatenate([images, images[:2], [darker, again, flipped], grey])
    assert alike(both) == [*range(40), 0, 1, 3, 5, 44, 45, 46]
    assert first_copies(both).tolist() == [*range(40), 0, 1, *range(42, 47)]
    small = images[:, :, :24, :24]
    assert alike(np.concatenate([small, 0.8 * small[:2]]).astype(np.uint8)) == list(
        range(42)
    )


def test_pictures_of_one_product_in_one_fixture_are_not_copies(tmp_path: Path) -> None:
    """All of these have nearly equal thumbnails; saved, resized and brightened again,
    one of them is a near-copy.
    """
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(fixture(rng, i % 3)) for i in range(150)]
    again = [
        saved(pictures[0], 85),
        pictures[1].resize((48, 48), Image.Resampling.LANCZOS),
    ]
    again += [
        pictures[2].point([min(255, i + 12) for i in range(256)]),
        saved(pictures[3].resize((96, 96)), 85),
    ]
    for i, picture in enumerate([*pictures, *again]):
        place = tmp_path / "abc"[i % 3 if i < 150 else (i - 150) % 3] / f"{i:03}.png"
        place.parent.mkdir(exist_ok=True)
        picture.save(place)
    data = rfdlc.load(tmp_path, test_fraction=0, image_size=64)
    ids = [int(str(name)[2:5]) for name in data.train.ids or ()]
    assert {(ids[a], ids[b]) for a, b in data.train.near} == {
        (150, 0),
        (151, 1),
        (152, 2),
        (153, 3),
    }
    assert (data.train.first != np.arange(154)).sum() == 4
    assert len(rfdlc.load(tmp_path, copies="exact", test_fraction=0).train.near) == 0
    split = rfdlc.load(tmp_path, image_size=64)
    assert split.test is not None
    assert 28 <= len(split.test) <= 33


def test_a_defect_of_three_pixels_is_no_copy() -> None:
    rng = np.random.default_rng(2)
    images = np.stack([fixture(rng, 0) for _ in range(10)])
    damaged = images.copy()
    for image in damaged:
        y, x = rng.integers(8, 56, 2)
        image[y, x : x + 3] = np.where(image[y, x : x + 3] < 128, 255, 0)
    assert alike(np.concatenate([images, damaged])[:, None]) == list(range(20))


def test_chains_do_not_grow() -> None:
    """A copy of a near-copy that is no copy of the first picture joins nothing."""
    assert with_near_copies(
        np.arange(5), np.array([[1, 0], [2, 1], [4, 3]])
    ).tolist() == [0, 0, 2, 3, 3]
    first = np.array([0, 1, 1, 3])
    assert with_near_copies(first, np.array([[1, 0]])).tolist() == [0, 0, 0, 3]


def test_many_near_copies_are_not_believed(tmp_path: Path) -> None:
    images = [Image.fromarray(image.transpose(1, 2, 0)) for image in photographs(40)]
    for i, image in enumerate([*images, *(saved(image, 90) for image in images[:10])]):
        place = tmp_path / "ab"[i % 2] / f"{i:02}.png"
        place.parent.mkdir(exist_ok=True)
        image.save(place)
    with pytest.warns(
        UserWarning,
        match="10 of 50 images look like copies of others, more than are believed",
    ):
        data = rfdlc.load(tmp_path, test_fraction=0)
    assert data.train.first.tolist() == list(range(50))
    near = rfdlc.load(tmp_path, test_fraction=0, copies="near").train
    assert (near.first != np.arange(50)).sum() == 10
    with pytest.raises(InputError, match="copies='none' is not valid"):
        rfdlc.load(tmp_path, copies="none")


def test_near_copies_do_not_join_groups_and_are_found_across_splits(
    tmp_path: Path,
) -> None:
    images = [Image.fromarray(image.transpose(1, 2, 0)) for image in photographs(24)]
    for i, image in enumerate([*images, saved(images[3], 80)]):
        image.save(tmp_path / f"{i:02}.png")
    rows = [
        f"{i:02}.png,{'ab'[i % 2]},{'test' if i > 18 else 'train'},site {i // 4}"
        for i in range(25)
    ]
    (tmp_path / "t.csv").write_text("\n".join(["path,kind,split,site", *rows]))
    with pytest.warns(
        UserWarning,
        match=(
            r"1 sample looks like copies of one in another split.*24.png and train: 03"
        ),
    ):
        data = rfdlc.load(tmp_path / "t.csv", target="kind", groups="site")
    assert data.alike == ("test: 24.png and train: 03.png",)
    (tmp_path / "t.csv").write_text(
        "\n".join(
            [
                "path,kind,site",
                *(row.replace("test,", "").replace("train,", "") for row in rows),
            ]
        )
    )
    with pytest.warns(
        UserWarning, match="1 sample looks like copies of one in another group"
    ):
        data = rfdlc.load(
            tmp_path / "t.csv", target="kind", groups="site", test_fraction=0
        )
    assert data.train.first.tolist() == list(range(25))
    assert data.train.joined == ""


def test_a_class_that_is_not_held_out_is_named() -> None:
    rng = np.random.default_rng(0)
    groups = np.array([*np.repeat(np.arange(20), 5), *["one"] * 15])
    split = Split(
        rng.normal(size=(115, 3)).astype(np.float32),
        np.repeat([0, 1], [100, 15]),
        groups=groups,
    )
    data = Dataset.of("mine", ["good", "crack"], {"train": split})
    with pytest.warns(UserWarning, match="no sample of 'crack' is held out, of 15"):
        data.hold_out(0.2)


@pytest.mark.parametrize("seed", range(20))
def test_copies_and_groups_are_held_out_as_a_whole(seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels, first = rng.integers(0, 4, 80), np.arange(80)
    first[rng.permutation(80)[:20]] = -1
    kept = np.flatnonzero(first >= 0)
    first[first < 0] = rng.choice(
        kept, 20
    )  # the first need not come before its copies here
    groups = rng.integers(0, 40, 80)
    for own in (None, groups):
        train, held = hold_out_indices(labels, 0.3, seed, own, first)
        assert sorted([*train, *held]) == list(range(80))
        assert not set(first[train]) & set(first[held])
        assert own is None or not set(own[train]) & set(own[held])
        assert 0.1 < len(held) / 80 < 0.5
        fold = assign_folds(labels, 3, seed, own, first)
        assert (
            fold.tolist() == fold[first].tolist()
            if own is None
            else all(len(set(fold[own == g])) < 2 for g in own)
        )
        assert all(len(set(fold[first == place])) < 2 for place in first)
        assert (fold >= 0).mean() > 0.5


def test_classes_without_copies_are_split_as_before() -> None:
    labels, first = np.repeat([0, 1, 2], 20), np.arange(60)
    first[45] = 44
    before, after = (
        hold_out_indices(labels, 0.2, 3)[1],
        hold_out_indices(labels, 0.2, 3, None, first)[1],
    )
    assert before[before < 40].tolist() == after[after < 40].tolist()
    assert (
        assign_folds(labels, 4, 3).tolist()
        == assign_folds(labels, 4, 3, None, np.arange(60)).tolist()
    )
    groups = np.arange(60) // 2
    before = hold_out_indices(labels, 0.2, 3, groups)[1]
    assert (
        before.tolist()
        == hold_out_indices(labels, 0.2, 3, groups, np.arange(60))[1].tolist()
    )


def test_samples_that_are_taken_keep_their_copies() -> None:
    split = Split(
        np.array([[1], [2], [1], [3], [2], [4], [5], [6], [7]], np.float32),
        np.zeros(9, np.int64),
    )
    assert split.first.tolist() == [0, 1, 0, 3, 1, 5, 6, 7, 8]
    taken = split.take(np.array([8, 4, 2, 1]))
    assert "first" in vars(taken)
    assert taken.first.tolist() == [0, 1, 2, 1]


def test_a_table_with_copies(tmp_path: Path) -> None:
    rows = [
        f"{a:.4f},{'xyz'[i % 3]},{'ab'[i % 2]}"
        for i, a in enumerate(RNG.normal(size=60))
    ]
    (tmp_path / "t.csv").write_text("\n".join(["size,kind,label", *rows, *rows[:10]]))
    for seed in range(5):
        data = rfdlc.load(tmp_path / "t.csv", seed=seed)
        assert data.test is not None
        train, test = (
            {row.tobytes() for row in split.array} for split in (data.train, data.test)
        )
        assert not train & test
    copies = [note for note in data.notes if "are copies of others" in note]
    assert copies == [
        f"{70 - len(train) - len(data.test)} training samples are copies of others, or"
        " look like them: they stay on one side of every split"
    ]


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_folder_with_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    monkeypatch.setattr(
        "rfdlc.data.readers.image_files.FITS_IN_MEMORY", 2**30 if in_memory else 0
    )
    for i, image in enumerate(photographs(20)):
        place = tmp_path / "ab"[i % 2] / f"{i:02}.png"
        place.parent.mkdir(exist_ok=True)
        Image.fromarray(image.transpose(1, 2, 0)).save(place)
        if i < 12:
            shutil.copy(place, place.with_name(f"{i:02}-copy.png"))
    data = rfdlc.load(tmp_path, test_fraction=0.3)
    assert data.test is not None
    train, test = (
        {str(name)[:4] for name in split.ids or ()} for split in (data.train, data.test)
    )
    assert not train & test
    assert len(test) >= 4
    assert "are copies of others" in " ".join(data.notes)
    held = data.hold_out(0.3)
    assert held.val is not None
    assert not {str(name)[:4] for name in held.train.ids or ()} & {
        str(name)[:4] for name in held.val.ids or ()
    }


def test_the_plan_of_a_training_says_so(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for i in range(20):
        place = tmp_path / "ab"[i % 2] / f"{i:02}.png"
        place.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (20, 50, 3), dtype=np.uint8)).save(place)
        if i < 3:
            shutil.copy(place, place.with_name(f"{i:02}-copy.png"))
    data = rfdlc.load(
        tmp_path, image_size=32, interpolation="bicubic", test_fraction=0
    ).hold_out(0.3)
    told = {
        "images": (
            "32 pixels, padded (typically 32x13 in it; data.image_size=N keeps more),"
            " bicubic"
        ),
        "duplicates": "3 kept on one side of the split",
    }
    assert _image_plan(data) == told
    assert _image_plan(rfdlc.load("digits-lt")) == {}


@pytest.mark.parametrize("seed", range(10))
def test_a_class_of_one_copy_keeps_its_sample(seed: int) -> None:
    """The sample of a class that is a copy of a sample of another class stays in
    training, and so does the other.
    """
    labels, first = np.array([0] * 8 + [1] * 8 + [2]), np.arange(17)
    first[16] = 3
    train, held = hold_out_indices(labels, 0.5, seed, None, first)
    assert set(labels[train]) == {0, 1, 2}
    assert {3, 16} <= set(train)
    assert {0, 1} == set(labels[held])


def test_images_of_one_camera_take_little_memory() -> None:
    """All pairs of 700 images that look the same: once a list of a quarter of a
    million.
    """
    images = np.repeat(photographs(1), 700, axis=0)
    images[:, 0, 0, 0] = np.arange(700) % 256
    images[:, 0, 0, 1] = np.arange(700) // 256
    tracemalloc.start()
    assert Split(images, np.zeros(700, np.int64)).first.tolist() == list(
        range(700)
    )  # too many to be copies of one
    assert tracemalloc.get_traced_memory()[1] < 40e6
    tracemalloc.stop()


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5])
def test_every_seed_holds_out_as_many_samples(fraction):
    """Classes of 400 to 5 samples, some of them copies, and a few with other labels."""
    rng = np.random.default_rng(1)
    labels = np.repeat(np.arange(8), [400, 200, 100, 50, 30, 20, 10, 5])
    first = np.arange(len(labels))
    for _ in range(40):
        one, other = np.sort(
            rng.choice(np.flatnonzero(labels == rng.integers(0, 6)), 2, replace=False)
        )
        first[first == first[other]] = min(first[one], first[other])
    first[801] = first[800] = 3  # of classes 6 and 0
    first = first[first]
    sizes = set()
    for seed in range(20):
        kept, held = hold_out_indices(labels, fraction, seed, None, first)
        assert not set(first[kept]) & set(first[held])
        assert {800, 801, 3} <= set(kept)
        wanted = np.round(np.bincount(labels) * fraction).clip(1)
        np.testing.assert_allclose(
            np.bincount(labels[held], minlength=8), wanted, atol=1
        )
        sizes.add(len(held))
    assert len(sizes) == 1


def test_classes_of_copies_alone():
    """Two pairs are on both sides, one pair is kept, and so is a sample that is
    alone.
    """
    labels, first = np.array([0, 0, 0, 0, 1, 1, 2]), np.array([0, 0, 2, 2, 4, 4, 6])
    for seed in range(6):
        kept, held = hold_out_indices(labels, 0.1, seed, None, first)
        assert held.tolist() in ([0, 1], [2, 3])
        assert {4, 5, 6} <= set(kept)


@pytest.mark.parametrize("grey", [False, True])
@pytest.mark.parametrize("tall", [False, True])
def test_padding_does_not_make_images_alike(grey: bool, tall: bool) -> None:
    """Long images of 130 to 400 by 60, some only a few pixels wide in their square:
    compared by what is inside.
    """
    rng, images = np.random.default_rng(5), []
    for count in np.linspace(130, 400, 60).astype(int).tolist():
        pixels = np.clip(rng.normal(60, 25, (60, count, 3)), 0, 255).astype(np.uint8)
        pixels[rng.integers(5, 50) :][:8] = 220
        start = rng.integers(0, count - 40)
        pixels[:, start : start + 30] = 180
        images.append(Image.fromarray(pixels.transpose(1, 0, 2) if tall else pixels))
    lighter = [
        image.point([min(255, i + 12) for i in range(256)] * 3) for image in images[:4]
    ]
    size, channels = 64, 1 if grey else 3
    found = {}
    for fit in ("pad", "stretch"):
        squares = [
            planes(fitted(image, size, channels, Resizing(fit)))
            for image in [*images, *lighter]
        ]
        found[fit] = alike(np.stack(squares))
    assert found["pad"] == found["stretch"] == [*range(60), 0, 1, 2, 3]


def test_padding_is_a_border_on_both_sides() -> None:
    images = photographs(5)
    images[1, :, :10] = images[2, :, :, 40:] = images[3, :, :10] = np.array(
        [[[124]], [[116]], [[104]]]
    )
    images[3, :, -11:] = images[4] = np.array([[[124]], [[116]], [[104]]])
    assert _content(images).tolist() == [[0, 48, 0, 48]] * 3 + [
        [10, 37, 0, 48],
        [0, 48, 0, 48],
    ]


def test_groups_that_copies_join_are_named(tmp_path: Path) -> None:
    for i, image in enumerate(photographs(24)):
        Image.fromarray(image.transpose(1, 2, 0)).save(tmp_path / f"{i:02}.png")
    for copy, source in ((4, 0), (8, 4), (6, 10)):  # of sites 0, 1, 2 and of sites 1, 2
        shutil.copy(tmp_path / f"{source:02}.png", tmp_path / f"{copy:02}.png")
    rows = [f"{i:02}.png,{'ab'[i % 2]},site {i // 4}" for i in range(24)]
    (tmp_path / "t.csv").write_text("\n".join(["path,kind,site", *rows]))
    data = rfdlc.load(tmp_path / "t.csv", target="kind", groups="site", test_fraction=0)
    told = "copies join 3 of 6 groups into 1: site 0, site 1, site 2"
    assert told in data.notes
    train = data.train
    assert (
        train.take(np.arange(12, 24)).joined
        == Split(train.inputs, train.labels).joined
        == ""
    )
    with pytest.raises(
        InputError,
        match=(
            r"4 groups \(of 6, as copies join groups\) cannot be divided into 5 folds"
        ),
    ):
        train.folds(5)
    some = train.take(
        np.array([0, 1, 2, 4, 5, 12, 14])
    )  # class b at joined sites alone
    two = replace(data, train=some)
    with pytest.raises(
        InputError,
        match=(
            r"do not fill 2 folds \(copies join 2 of 3 groups into 1: site 0, site 1\)"
        ),
    ):
        rfdlc.cross_validate(two, "ce", tmp_path / "cv", folds=2, epochs=1)

"""Image folders and list files, tiny but real: what is read, and which error each
broken file raises.
"""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

import rfdlc
from rfdlc.data import images as image_module
from rfdlc.data.dataset import by_reason
from rfdlc.data.images import (
    BrokenImage,
    ImageFiles,
    PackedText,
    fitted,
    open_image,
    planes,
)
from rfdlc.data.opening import open_samples
from rfdlc.data.readers.image_folder import find_images
from rfdlc.data.samples import InputSpec
from rfdlc.errors import InputError


def picture(
    path: Path,
    colour: tuple[int, int, int] = (200, 100, 50),
    size: tuple[int, int] = (40, 40),
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


def noise(path: Path, mode: str = "RGB") -> Path:
    """A picture that does not pack to nothing, so that it can be cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 256, (60, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, count in (("ant", 5), ("bee", 3)):
        for i in range(count):
            picture(
                tmp_path / name / f"{i}.png", (10 * i, 0, 255 if name == "bee" else 0)
            )
    return tmp_path


# -- folders
# --------------------------------------------------------------------------------------


def test_a_folder_in_one_piece(folder: Path) -> None:
    data = rfdlc.load(folder, test_fraction=0)
    assert data.classes.names == ("ant", "bee")
    assert data.classes.counts == (5, 3)
    assert list(data.train.ids or ()) == [f"ant/{i}.png" for i in range(5)] + [
        f"bee/{i}.png" for i in range(3)
    ]
    assert data.train.array[:, 0, 0, 0].tolist() == [0, 10, 20, 30, 40, 0, 10, 20]
    assert data.train.array[:, 2, 5, 5].tolist() == [0] * 5 + [255] * 3
    assert data.input_shape == (3, 40, 40)
    assert len(rfdlc.load(folder).test or ()) == 2


@pytest.mark.parametrize("val", ["val", "valid", "Validation"])
def test_a_folder_with_splits(tmp_path: Path, val: str) -> None:
    for split, count in (("train", 3), (val, 1), ("test", 2)):
        for name in ("größe", "z"):
            for i in range(count):
                picture(tmp_path / split / name / f"{i}.JPG")
    picture(tmp_path / "test" / "extra" / "0.png")
    data = rfdlc.load(tmp_path)
    assert {split: len(part) for split, part in data.splits.items()} == {
        "train": 6,
        "val": 2,
        "test": 5,
    }
    assert data.classes.names == ("extra", "größe", "z")
    assert data.classes.counts == (0, 3, 3)
    assert "1 of 3 classes have no training sample: extra" in data.notes


def test_hidden_and_other_files_are_ignored(folder: Path) -> None:
    (folder / "ant" / ".hidden.png").write_bytes(b"x")
    (folder / ".git").mkdir()
    (folder / "__MACOSX").mkdir()
    (folder / "ant" / "notes.txt").write_text("x")
    data = rfdlc.load(folder, test_fraction=0)
    assert len(data.train) == 8
    assert (
        "ignored: 1 file that is no image, or of a kind that is not read: 1 .txt"
        in data.notes
    )


@pytest.mark.parametrize("name", ["0.HEIC", "0.dcm", "IM0001"])
def test_files_that_may_be_samples_are_not_ignored_without_a_word(
    folder: Path, name: str
) -> None:
    (folder / "ant" / name).write_bytes(b"x")
    (folder / "bee" / "notes.txt").write_text("x")
    kind = Path(name).suffix.lower() or "without an ending"
    told = f"of a kind that is not read: 1 {kind}, 1 .txt"
    if kind.startswith("."):
        told += f"; convert {kind} to PNG or JPEG"
    with pytest.raises(InputError, match=rf"1 of 9 files would be ignored: .*{told}"):
        rfdlc.load(folder)
    notes = rfdlc.load(folder, skip_broken=True).notes
    assert any(told in note for note in notes)
    few = f"1 of 9 files are of a kind that is not read: 1 {kind}, 1 .txt"
    with pytest.raises(InputError, match=few):
        find_images(folder)
    with pytest.warns(UserWarning, match=few):
        assert len(find_images(folder, skip_broken=True)[2]) == 8
    for i in range(91):  # then the one is 1% of them
        picture(folder / "bee" / f"more-{i}.png")
    assert any(told in note for note in rfdlc.load(folder).notes)
    with pytest.warns(UserWarning, match="1 of 100 files"):
        assert len(find_images(folder)[2]) == 99


@pytest.mark.parametrize(
    ("mode", "channels"), [("L", 1), ("1", 1), ("P", 3), ("RGBA", 3), ("LA", 1)]
)
def test_modes_that_come_out_right(tmp_path: Path, mode: str, channels: int) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.new("L", (32, 32), 255).convert(mode).save(tmp_path / name / "0.png")
    data = rfdlc.load(tmp_path, test_fraction=0)
    assert data.input_shape == (channels, 32, 32)
    assert (data.train.array == 255).all()


def test_sizes_are_chosen_said_and_may_be_given(folder: Path) -> None:
    picture(folder / "bee" / "large.png", size=(300, 150))
    data = rfdlc.load(folder, test_fraction=0)
    assert data.input_shape == (3, 40, 40)  # of most of them, as it is small
    assert "images from 40x40 to 300x150 (2 sizes) become 40x40" in data.notes[0]
    for number in range(9):
        picture(folder / "bee" / f"large-{number}.png", size=(300 + number, 150))
    assert rfdlc.load(folder, test_fraction=0).input_shape == (3, 128, 128)
    assert rfdlc.load(folder, image_size=17).input_shape == (3, 17, 17)
    with pytest.raises(
        InputError, match=r"image_size=0 is not valid: .*greater than 0"
    ):
        rfdlc.load(folder, image_size=0)


def test_resizing_keeps_proportions_and_the_centre(tmp_path: Path) -> None:
    wide = np.zeros((32, 96, 3), dtype=np.uint8)
    wide[:, 32:64] = 255  # the centre square is white
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.fromarray(wide).save(tmp_path / name / "0.png")
    assert (
        rfdlc.load(tmp_path, image_size=32, test_fraction=0, fit="crop").train.array
        == 255
    ).all()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cmyk(path: Path) -> Path:
    Image.new("CMYK", (40, 40)).save(path)
    return path


def animated(path: Path) -> Path:
    frames = [Image.new("L", (40, 40), shade) for shade in (0, 128, 255)]
    frames[0].save(path, save_all=True, append_images=frames[1:])
    return path


BROKEN = {
    "zero.png": (lambda path: path.touch(), "the file is empty"),
    "corrupt.jpg": (
        lambda path: path.write_bytes(b"nonsense" * 20),
        "pillow cannot read this as an image",
    ),
    "truncated.png": (lambda path: cut(noise(path)), "truncated or corrupt"),
    "truncated.jpg": (lambda path: cut(noise(path)), "truncated or corrupt"),
    "print.jpg": (cmyk, "CMYK.*convert it to RGB"),
    "grey16.png": (
        lambda path: Image.fromarray(np.zeros((9, 9), np.uint16)).save(path),
        "16 or more bits",
    ),
    "float.tif": (
        lambda path: Image.fromarray(np.zeros((9, 9), np.float32)).save(path),
        "16 or more bits",
    ),
    "moving.gif": (animated, "animated, or has several pages: save one"),
    "moving.png": (animated, "animated, or has several pages"),
    "pages.tif": (animated, "animated, or has several pages"),
    "gone.png": (
        lambda path: path.symlink_to("nowhere.png"),
        "the file does not exist",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_image_is_named_or_counted(folder: Path, name: str) -> None:
    make, message = BROKEN[name]
    make(folder / "bee" / name)
    with pytest.raises(InputError, match=f"bee/{name}: .*{message}.*skip"):
        rfdlc.load(folder)
    data = rfdlc.load(folder, skip_broken=True, test_fraction=0)
    assert len(data.train) == 8
    assert len(data.skipped) == 1
    assert name in data.skipped[0]
    assert not any(name in note for note in data.notes)  # told once
    assert (
        data.train.array[:, 2, 5, 5].tolist() == [0] * 5 + [255] * 3
    )  # the others keep their labels


def test_broken_files_are_named_together_up_to_a_limit(folder: Path) -> None:
    (folder / "wasp").mkdir()
    for i in range(3):
        (folder / "ant" / f"empty{i}.png").touch()
    with pytest.raises(
        InputError,
        match=(
            r"wasp: .*no image.*3 times \(.*empty0.png; .*empty1.png; .*empty2.png\)."
            r" .*skip"
        ),
    ):
        rfdlc.load(folder)
    for i in range(20):
        (folder / "bee" / f"empty{i}.png").touch()
        cut(noise(folder / "bee" / f"cut{i}.png"))
    with pytest.raises(InputError) as told:
        rfdlc.load(folder)
    assert str(told.value).count("the file is empty (0 bytes): 23 times (") == 1
    assert (
        str(told.value).count("): 20 times (") == 1
    )  # truncated ones, which only decoding finds
    assert (
        str(told.value).count(".png") == 3 + 3 + 1
    )  # and in what the class folder expected
    assert len(rfdlc.load(folder, skip_broken=True).skipped) == 44


def test_what_is_broken_is_listed_by_reason() -> None:
    """Each reason once, in the order of the first ones; a single one word for word."""
    bits = "the image has 16 or more bits per channel: divide all images"
    broken = [f"t.csv, line {i}: /r/{i}.png: {bits}" for i in range(2, 7)]
    broken += [
        "t.csv, line 9: the file /r/no.png does not exist: expected",
        "t.csv, line 8: the label is missing",
    ]
    broken += [
        "t.csv, line 10: the file /r/a b.png does not exist: expected",
        "/r/x: the class folder holds no image",
    ]
    broken += [
        f"/r/{n}.jpg: the image is truncated or corrupt ({n} bytes not processed)"
        for n in (7, 31)
    ]
    broken += ["t.csv: row 3 has no target", "t.csv: row 5 has no target"]
    assert by_reason(broken) == [
        (
            f"{bits}: 5 times (t.csv, line 2: /r/2.png; t.csv, line 3: /r/3.png; t.csv,"
            " line 4: /r/4.png; ...)"
        ),
        (
            "the file does not exist: expected: 2 times (t.csv, line 9: /r/no.png;"
            " t.csv, line 10: /r/a b.png)"
        ),
        "t.csv, line 8: the label is missing",
        "/r/x: the class folder holds no image",
        (
            "the image is truncated or corrupt (7 bytes not processed): 2 times"
            " (/r/7.jpg; /r/31.jpg)"
        ),
        "has no target: 2 times (t.csv: row 3; t.csv: row 5)",
    ]
    assert by_reason([]) == []


@pytest.mark.parametrize("suffix", ["bmp", "tif", "ppm", "webp", "gif", "jpeg"])
def test_other_formats_of_any_width(tmp_path: Path, suffix: str) -> None:
    for width in (16, 72, 160):  # 72 pixels are 216 bytes a row: no sign of 16 bits
        picture(tmp_path / "a" / f"{width}.{suffix}", size=(width, 16))
        picture(tmp_path / "b" / f"{width}.{suffix}", size=(width, 16))
    assert len(rfdlc.load(tmp_path, test_fraction=0).train) == 6


def shape_or_error(path: Path) -> str:
    try:
        return str(planes(fitted(open_image(path), 8, 3)).shape)
    except BrokenImage as error:
        return str(error)


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=150)
@given(
    st.sampled_from(["png", "jpg", "gif", "bmp", "tif", "webp"]),
    st.integers(0, 2**32),
    st.integers(1, 20),
)
def test_damage_is_always_a_clear_error_or_an_image(
    suffix: str, seed: int, count: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = noise(Path(folder) / f"x.{suffix}")
        rng = np.random.default_rng(seed)
        content = bytearray(path.read_bytes())
        for place in rng.integers(0, min(len(content), 600), count):
            content[place] = rng.integers(256)
        path.write_bytes(content)
        outcome = shape_or_error(path)
        assert outcome == "(3, 8, 8)" or outcome.startswith(f"{path}: ")


def test_16_bits_a_channel_in_colour(folder: Path) -> None:
    """A real 16-bit RGB PNG, written by hand: pillow writes none."""
    import struct
    import zlib

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body))
            + kind
            + body
            + struct.pack(">I", zlib.crc32(kind + body))
        )

    rows = b"".join(b"\0" + b"\x12\x34" * 3 * 4 for _ in range(4))
    header = struct.pack(">IIBBBBB", 4, 4, 16, 2, 0, 0, 0)
    content = (
        chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )
    (folder / "ant" / "deep.png").write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    with pytest.raises(InputError, match=r"deep.png: the image has 16 or more bits"):
        rfdlc.load(folder)


def test_an_empty_class_folder(folder: Path) -> None:
    (folder / "wasp").mkdir()
    with pytest.raises(InputError, match="wasp: the class folder holds no image"):
        rfdlc.load(folder)
    data = rfdlc.load(folder, skip_broken=True)
    assert data.classes.names == ("ant", "bee")
    assert "wasp" in data.skipped[0]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_no_image(folder: Path) -> None:
    os.mkfifo(folder / "ant" / "pipe.png")
    with pytest.raises(InputError, match=r"pipe\.png: is no file: remove it"):
        rfdlc.load(folder)
    data = rfdlc.load(folder, skip_broken=True, test_fraction=0)
    assert len(data.train) == 8


def test_one_class_and_no_class(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for path in (folder / "bee").iterdir():
        path.unlink()
    (folder / "bee").rmdir()
    with pytest.raises(InputError, match=r"one class \('ant'\)"):
        rfdlc.load(folder)
    with pytest.raises(InputError, match="no class folders"):
        rfdlc.load(tmp_path_factory.mktemp("empty"))


def test_links_must_stay_inside(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = picture(tmp_path_factory.mktemp("outside") / "x.png")
    (folder / "ant" / "inside.png").symlink_to(folder / "ant" / "0.png")
    assert len(rfdlc.load(folder, test_fraction=0).train) == 9
    (folder / "ant" / "link.png").symlink_to(outside)
    with pytest.raises(InputError, match=r"link.png: is a link to outside"):
        rfdlc.load(folder)
    (folder / "ant" / "link.png").unlink()
    (folder / "wasp").symlink_to(outside.parent)
    with pytest.raises(InputError, match="wasp: is a link to outside"):
        rfdlc.load(folder)


def test_a_link_to_above_is_not_followed_for_ever(folder: Path) -> None:
    (folder / "ant" / "again").symlink_to(folder)
    for read in (rfdlc.load, find_images):
        with pytest.raises(
            InputError, match="again: is a link to a folder that contains it"
        ):
            read(folder)


def test_folders_that_are_not_read_are_told(folder: Path) -> None:
    picture(folder / "ant" / "deep" / "0.png")
    picture(folder / "ant" / "deep" / "1" / "0.png")
    picture(folder / "loose.png")
    deep = (
        "2 images in 1 folder inside class folders, ant/deep: move up into the class"
        " folder"
    )
    loose = (
        "1 image beside class folders, which is in no class: move into a class folder"
    )
    with pytest.raises(
        InputError, match=f"3 of 11 files would be ignored: {loose}; {deep}; or leave"
    ):
        rfdlc.load(folder)
    notes = rfdlc.load(folder, skip_broken=True).notes
    assert f"ignored: {deep}" in notes
    assert f"ignored: {loose}" in notes
    for split in ("train", "test"):
        for name in ("a", "b"):
            picture(folder / split / name / "0.png")
    assert (
        "2 folders beside the splits were ignored: ant, bee" in rfdlc.load(folder).notes
    )


def test_parts_without_one_to_learn_from(folder: Path) -> None:
    for name, part in (("ant", "val"), ("bee", "Test")):
        (folder / name).rename(folder / part)
    with pytest.raises(
        InputError,
        match=r"has Test, val but no training folder: expected .*train/CLASS",
    ):
        rfdlc.load(folder)


MODES = [
    ("jpg", "RGB"),
    ("png", "RGB"),
    ("png", "RGBA"),
    ("webp", "RGBA"),
    ("tif", "RGB"),
    ("tif", "L"),
    ("tif", "RGBA"),
]


@pytest.mark.parametrize(("suffix", "mode"), MODES)
def test_photographs_are_turned_upright(tmp_path: Path, suffix: str, mode: str) -> None:
    """All eight ways to hold a camera, against pillow's own."""
    stored = Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (3, 5, 3), dtype=np.uint8)
    ).convert(mode)
    stored = stored.resize((50, 30), Image.Resampling.NEAREST)
    for held in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = held
        path = tmp_path / f"{held}.{suffix}"
        stored.save(path, exif=exif, quality=100)
        with (
            path.open("rb") as file,
            Image.open(file) as image,
        ):  # by name, pillow reads turned TIFFs wrongly
            shown = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
        shown = shown[:, 10:40] if shown.shape[1] == 50 else shown[10:40]
        assert (
            planes(fitted(open_image(path), 30, 3)) == shown.transpose(2, 0, 1)
        ).all()


def with_transparent_half(path: Path, kind: str) -> None:
    """The upper half is (200, 0, 0), the lower one is transparent, and green below."""
    pixels = np.zeros((40, 40, 4), np.uint8)
    pixels[:20], pixels[20:] = (200, 0, 0, 255), (0, 90, 0, 0)
    image = Image.fromarray(pixels)
    saved: dict = {
        "RGBA": {"lossless": True, "exact": True},
        "RGB": {"transparency": (0, 90, 0)},
    }.get(kind, {})
    if kind == "P":
        image, saved = image.convert("RGB").quantize(2), {}
        saved["transparency"] = image.getpixel((0, 39))
    elif kind != "RGBA":
        image = image.convert(kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **saved)


TRANSPARENT = [
    ("png", "RGBA"),
    ("png", "LA"),
    ("png", "P"),
    ("png", "RGB"),
    ("webp", "RGBA"),
    ("gif", "P"),
    ("tif", "RGBA"),
]


@pytest.mark.parametrize(("suffix", "kind"), TRANSPARENT)
def test_transparent_pixels_are_white_in_training_and_prediction(
    tmp_path: Path, suffix: str, kind: str
) -> None:
    for name in ("a", "b"):
        with_transparent_half(tmp_path / name / f"0.{suffix}", kind)
    data = rfdlc.load(tmp_path, test_fraction=0)
    colour = [60] if kind == "LA" else [200, 0, 0]
    assert data.train.array[0, :, 0, 0].tolist() == colour
    assert (data.train.array[:, :, 20:] == 255).all()
    samples = open_samples(tmp_path, InputSpec(data.classes, data.input_shape))
    np.testing.assert_array_equal(samples.read(range(2)).split.array, data.train.array)
    resized = planes(fitted(open_image(tmp_path / "a" / f"0.{suffix}"), 10, 3))
    assert (resized[:, 6:] == 255).all()  # composed before it is resized


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_images_of_16_bits_are_refused_in_training_and_prediction(
    tmp_path: Path, suffix: str
) -> None:
    grey = np.linspace(0, 65535, 1600).reshape(40, 40).astype(np.uint16)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.fromarray(grey).save(tmp_path / name / f"0.{suffix}")
    fix = (
        "the image has 16 or more bits .* only you know the range .*: divide all"
        f" images by the same.*0.{suffix}"
    )
    with pytest.raises(InputError, match=fix):
        rfdlc.load(tmp_path)
    with pytest.raises(InputError, match=fix):
        open_samples(tmp_path, InputSpec(rfdlc.Classes(("a", "b")), (1, 40, 40))).read(
            range(2)
        )


def test_damaged_orientation_is_no_damage_to_the_picture(tmp_path: Path) -> None:
    Image.new("RGB", (30, 30), (9, 9, 9)).save(
        tmp_path / "x.png", exif=b"Exif\0\0nonsense"
    )
    assert (planes(fitted(open_image(tmp_path / "x.png"), 30, 3)) == 9).all()


def test_two_folders_for_one_split(folder: Path) -> None:
    for name in ("train", "val", "valid"):
        picture(folder / name / "a" / "0.png")
    with pytest.raises(InputError, match="both 'val' and 'valid' mean val"):
        rfdlc.load(folder)


def test_what_does_not_fit_stays_on_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rfdlc.data.readers.image_files.FITS_IN_MEMORY", 1000)
    data = rfdlc.load(folder, test_fraction=0.4)
    assert isinstance(data.train.inputs, ImageFiles)
    assert (data.train.inputs.root / data.train.inputs.names[0]).is_file()
    assert (data.kind, data.input_shape) == ("images", (3, 40, 40))
    assert data.test is not None
    assert len(data.train) + len(data.test) == 8
    with pytest.raises(InputError, match="StreamedLoader"):
        _ = data.train.array


# -- lists
# --------------------------------------------------------------------------------------


@pytest.fixture
def lists(tmp_path: Path) -> Path:
    for split, count in (("train", 3), ("val", 1), ("test", 2)):
        lines = []
        for label, name in enumerate(("n01", "n 02")):
            for i in range(count):
                picture(
                    tmp_path / "pictures" / name / f"{split} {i}.jpg",
                    (100 * label, 0, 0),
                )
                lines.append(f"pictures/{name}/{split} {i}.jpg {label}")
        (tmp_path / f"Mine_LT_{split}.txt").write_text(
            "# a comment\n\n" + "\n".join(lines) + "\n"
        )
    return tmp_path


def test_lists_in_a_root(lists: Path) -> None:
    for source in (lists, lists / "Mine_LT_train.txt"):
        data = rfdlc.load(source)
        assert {split: len(part) for split, part in data.splits.items()} == {
            "train": 6,
            "val": 2,
            "test": 4,
        }
        assert data.classes.names == ("n01", "n 02")
        assert (data.train.array[:, 0, 0, 0] > 50).tolist() == [False] * 3 + [True] * 3
        assert (data.train.ids or ())[0] == "pictures/n01/train 0.jpg"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("pictures/n01/gone.jpg 0", "the file .*pictures/n01/gone.jpg does not exist"),
        ("nowhere/x.jpg 0", "the file .*nowhere/x.jpg does not exist"),
        (f"{'long' * 1000}/x.jpg 0", "the file .*long/x.jpg does not exist"),
        ("a\0b/x.jpg 0", "does not exist"),
        ("../secret.jpg 0", "'../secret.jpg' leaves the root"),
        ("pictures/../../secret.jpg 0", "leaves the root"),
        ("/etc/passwd 0", "'/etc/passwd' leaves the root.*or is absolute"),
        ("pictures/n01/train 0.jpg cat", "the label 'cat' is not a number"),
        ("pictures/n01/train 0.jpg -1", "the label '-1' is not a number"),
        ("pictures/n01/train 0.jpg 1.5", "the label '1.5' is not a number"),
        (
            "pictures/n01/train 0.jpg 99999999",
            "the label 99999999 is too large.*below 1,000,000",
        ),
        ("pictures/n01/train_0.jpg", "expected 'path label'"),
    ],
)
def test_a_wrong_line_is_named_or_counted(lists: Path, line: str, message: str) -> None:
    path = lists / "Mine_LT_train.txt"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(InputError, match=rf"Mine_LT_train.txt, line 9: .*{message}"):
        rfdlc.load(lists)
    data = rfdlc.load(lists, skip_broken=True)
    assert len(data.train) == 6
    assert len(data.skipped) == 1
    assert "line 9" in data.skipped[0]


def test_a_broken_image_in_a_list_is_named_with_its_line(lists: Path) -> None:
    (lists / "pictures" / "n 02" / "train 1.jpg").write_bytes(b"")
    with pytest.raises(
        InputError, match=r"Mine_LT_train.txt, line 7: .*train 1.jpg: the file is empty"
    ):
        rfdlc.load(lists)
    assert rfdlc.load(lists, skip_broken=True).classes.counts == (3, 2)


def test_published_counts_are_compared(lists: Path) -> None:
    for path in lists.glob("Mine_LT_*.txt"):
        path.rename(path.with_name(path.name.replace("Mine", "ImageNet")))
    with pytest.warns(
        UserWarning,
        match=r"6 train images .published: 115846.*2 classes .published: 1000",
    ):
        data = rfdlc.load("imagenet-lt", root=lists)
    assert "differs from the published" in data.notes[0]


def test_the_published_numbers_raise_no_warning(
    lists: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rfdlc.data.readers import image_lists

    monkeypatch.setitem(
        image_lists.PUBLISHED,
        "minelt",
        {"train images": 6, "val images": 2, "test images": 4, "classes": 2},
    )
    assert not any("published" in note for note in rfdlc.load(lists).notes)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("imagenet-lt", "ImageNet_LT"),
        ("places-lt", "Places_LT"),
        ("inaturalist2018", "iNaturalist18"),
    ],
)
def test_lists_that_are_not_there_are_asked_for_by_their_own_name(
    tmp_path: Path, name: str, file: str
) -> None:
    with pytest.raises(
        InputError, match=f"{name} was not found .* such as {file}_train.txt"
    ):
        rfdlc.load(name, root=tmp_path)


def test_inaturalist_has_its_own_normalisation(lists: Path) -> None:
    for split in ("train", "val"):
        (lists / f"Mine_LT_{split}.txt").rename(lists / f"iNaturalist18_{split}.txt")
    (lists / "Mine_LT_test.txt").unlink()
    with pytest.warns(UserWarning, match="437513"):
        data = rfdlc.load("inaturalist2018", root=lists)
    assert data.normalisation is not None
    assert data.normalisation.mean == (0.466, 0.471, 0.380)


def test_several_sets_of_lists_and_a_lonely_one(lists: Path) -> None:
    (lists / "Other_train.txt").write_text("a 0\n")
    with pytest.raises(InputError, match=r"several data sets \(Mine_LT, Other\)"):
        rfdlc.load(lists)
    with pytest.raises(
        InputError, match=r"Other_train.txt, line 1: the file .* does not exist"
    ):
        rfdlc.load(lists / "Other_train.txt")
    (lists / "Lone_test.txt").write_text("a 0\n")
    with pytest.raises(
        InputError, match=r"no training list beside it: expected .*Lone_train.txt"
    ):
        rfdlc.load(lists / "Lone_test.txt")
    (lists / "Other_train.txt").write_text("\n")
    with pytest.raises(InputError, match="holds no usable line"):
        rfdlc.load(lists / "Other_train.txt")
    (lists / "Other_train.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(InputError, match="cannot be read as lines"):
        rfdlc.load(lists / "Other_train.txt")
    with pytest.raises(InputError, match="places-lt was not found"):
        rfdlc.load("places-lt", root=lists)


# -- many files
# --------------------------------------------------------------------------------------


def test_packed_text_is_a_sequence() -> None:
    texts = ["", "a", "ü/ö.png", "b" * 300, os.fsdecode(b"\xff.png")]
    packed = PackedText(texts)
    assert list(packed[1:3]) == texts[1:3]
    assert list(packed) == texts
    assert packed[-1] == texts[-1]
    assert list(packed.take([2, 0])) == [texts[2], texts[0]]
    with pytest.raises(IndexError):
        packed[5]


def test_a_large_jpeg_is_decoded_small(tmp_path: Path) -> None:
    path = picture(tmp_path / "large.jpg", size=(1600, 1200))
    opened = image_module.open_image(path)
    small = image_module.fitted(opened, 64, 3)
    assert small.size == (64, 64)
    assert opened.size == (200, 150)  # an eighth: still twice as large as needed

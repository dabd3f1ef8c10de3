"""Image files: which are accepted, how they are decoded and resized, and compact
sequences of many of them.
"""

import io
import json
import math
import os
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rfdlc.errors import InputError, choose
from rfdlc.formats.files import locked, read_json, replacing
from rfdlc.formats.identity import digest_of_files
from rfdlc.progress import track

if TYPE_CHECKING:
    from PIL.Image import Image

Result = TypeVar("Result")
Box = tuple[float, float, float, float]  # left, top, right, bottom

SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
)
GREY, COLOUR = ("1", "L", "LA"), ("P", "PA", "RGB", "RGBA", "RGBX", "YCbCr")
FITS, INTERPOLATIONS = ("crop", "pad", "stretch"), ("bilinear", "bicubic")
PADDING = {
    1: (114,),
    3: (124, 116, 104),
}  # by channels: the mean of photographs, which normalisation takes to 0
MUCH_CUT = (
    0.25  # of an image, where a square image would lose nothing: more than 4:3 loses
)
# another version of this file's decoding: cached squares of an earlier one are not used
DECODING = 2
# a JPEG is decoded at a fraction of its size that leaves this many times the pixels
# needed per side
OVERSAMPLED = 1.5
ORIENTATION = 0x0112  # EXIF's tag, whose values 2 to 8 mean these transpositions
UPRIGHT = [
    "FLIP_LEFT_RIGHT",
    "ROTATE_180",
    "FLIP_TOP_BOTTOM",
    "TRANSPOSE",
    "ROTATE_270",
    "TRANSVERSE",
    "ROTATE_90",
]


class BrokenImage(InputError):
    """One image file cannot be used; `skip_broken` counts these instead of stopping."""


class PackedText(Sequence[str]):
    """An immutable sequence of texts in two arrays: all bytes, and where each text
    ends.

    Forked workers share it: reading strings in a list changes reference counts, which
    copies memory page by page.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        content, ends = bytearray(), array("q")
        for text in (
            texts
        ):  # one by one: a million names from a generator are never a million objects
            content += text.encode("utf-8", "surrogateescape")
            ends.append(len(content))
        self.packed = (
            np.frombuffer(content, dtype=np.uint8),
            np.frombuffer(ends, dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.packed[1])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.take(range(len(self))[index])
        place = range(len(self))[index]  # raises IndexError, counts from the end
        content, ends = self.packed
        start = int(ends[place - 1]) if place else 0
        return (
            content[start : int(ends[place])]
            .tobytes()
            .decode("utf-8", "surrogateescape")
        )

    def take(self, indices: Iterable[int]) -> "PackedText":
        return PackedText(self[int(i)] for i in indices)


@dataclass(frozen=True)
class Resizing:
    """How an image becomes a square: its centre (crop), all of it on a grey square
    (pad), or all of it stretched.

    `centre` is the fraction of the square that is used: 224 / 256 is resize 256, centre
    crop 224. Antialiased. `usual_cut` is the share that is cut off from the median
    training image, where that is known, and `content` the size of such an image in a
    padded square, "92x25".
    """

    fit: str = "crop"
    interpolation: str = "bilinear"
    centre: float = 1.0
    usual_cut: float = field(default=0.0, compare=False)
    content: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        choose("fit", self.fit, FITS)
        choose("interpolation", self.interpolation, INTERPOLATIONS)

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> "Resizing":
        """As run folders and exported models keep it; as usual for other samples than
        images.
        """
        known = table.get("resizing") or {}
        return cls(**known, usual_cut=float(table.get("usual_cut", 0)))

    def to_dict(self) -> dict[str, Any]:
        """What `of` reads. Users' own programs resize by the first entry
        (docs/export.md).
        """
        known = {
            "fit": self.fit,
            "interpolation": self.interpolation,
            "centre": self.centre,
        }
        return {"resizing": known, "usual_cut": self.usual_cut}

    def frame(self, width: int, height: int) -> Box:
        """What becomes the square: where an image is padded, it reaches over
        the edges.
        """
        short, long = sorted((width, height))
        across, down = {
            "crop": (short, short),
            "pad": (long, long),
            "stretch": (width, height),
        }[self.fit]
        x, y = self.centre * across / 2, self.centre * down / 2
        return width / 2 - x, height / 2 - y, width / 2 + x, height / 2 + y

    def cut(self, width: int, height: int) -> float:
        """The share of an image that is cut off."""
        left, top, right, bottom = self.frame(width, height)
        across, down = (
            min(right, width) - max(left, 0),
            min(bottom, height) - max(top, 0),
        )
        return 1 - across * down / (width * height)

    def cut_warning(self, shares: NDArray[np.float32], embedded: bool = False) -> str:
        """For images that lose these shares; empty where no one loses much more than
        the training images.
        """
        usual = (
            max(self.usual_cut, 1 - (1 - MUCH_CUT) * self.centre**2) + 0.005
        )  # 4:3 is no more than a quarter
        many = int((shares > usual).sum())
        what = "1 image is" if many == 1 else f"{many:,} images are"
        told = (
            f"{what} long, and only the centre was looked at: up to"
            f" {shares.max(initial=0):.0%} of an image is cut off"
        )
        fix = (
            "embed with --fit pad, and train again"
            if embedded
            else "train with data.fit=pad"
        )
        return f"{told}; to use all of it, {fix}" if many else ""


CROPPED = Resizing()


@dataclass(frozen=True, eq=False)
class Packed:
    """Where encoded images lie in shards: tars, or Parquet files with a `column` of
    them.
    """

    files: tuple[Path, ...]
    places: NDArray[
        np.int64
    ]  # (N, 4): file, row group (0 of a tar), row in it or first byte, size in bytes
    column: str = ""

    def __getitem__(self, positions: NDArray[np.int64]) -> "Packed":
        return replace(self, places=self.places[positions])

    def content(self, index: int) -> bytes:
        number, group, start, size = self.places[index].tolist()
        if self.column:
            return bytes(
                _row_group(self.files[number], self.column, group)[start].as_py()
            )
        with self.files[number].open("rb") as file:
            file.seek(start)
            return file.read(size)


@lru_cache(maxsize=8)  # neighbours are read in turn, by several threads
def _row_group(file: Path, column: str, group: int) -> Any:
    from pyarrow import types
    from pyarrow.parquet import ParquetFile

    (cells,) = ParquetFile(file).read_row_group(group, [column]).columns
    cells = cells.combine_chunks()
    return cells.field("bytes") if types.is_struct(cells.type) else cells


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Image files under one root, or packed in shards, decoded on demand to squares of
    side `size`.
    """

    root: Path
    names: PackedText  # paths relative to the root
    size: int
    channels: int = 3
    resizing: Resizing = CROPPED
    cache: tuple[NDArray[np.uint8], NDArray[np.int64]] | None = (
        None  # decoded squares (all, channels, H, W), own rows
    )
    # where these are not files of their own; then `names` are shard and member
    packed: Packed | None = None

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, positions: NDArray[np.int64]) -> "ImageFiles":
        cache = (
            None if self.cache is None else (self.cache[0], self.cache[1][positions])
        )
        packed = None if self.packed is None else self.packed[positions]
        return replace(
            self, names=self.names.take(positions), cache=cache, packed=packed
        )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self), self.channels, self.size, self.size

    def open(self, index: int) -> "Image":
        if self.cache is None:
            content = None if self.packed is None else self.packed.content(index)
            return open_image(self.root / self.names[index], content)
        pixels, rows = self.cache
        return picture(pixels[rows[index]])

    def decode(
        self, file: Path | None = None, cut: NDArray[np.float32] | None = None
    ) -> tuple[NDArray[np.uint8], dict[int, BrokenImage]]:
        """All images in memory, or in an `.npy` file that is mapped into it; and which
        are broken, and why.

        `cut` is filled with the share of each image that is cut off.
        """
        mapped = np.lib.format.open_memmap
        images = (
            np.zeros(self.shape, np.uint8)
            if file is None
            else mapped(file, "w+", np.uint8, self.shape)
        )

        def fill(index: int) -> None:
            with self.open(index) as image:
                if cut is not None:
                    cut[index] = self.resizing.cut(*image.size)
                images[index] = planes(
                    fitted(image, self.size, self.channels, self.resizing)
                )

        return images, attempt(fill, range(len(self)), "Decoding images")[1]

    def sizes(self) -> list[int]:
        """Of the files in bytes; -1 for one that is missing."""
        if self.packed is not None:
            return list(self.packed.places[:, 3].tolist())
        return [_size(self.root / name) for name in self.names]

    def end(self, index: int, size: int, count: int) -> bytes:
        """The last `count` bytes of a file of this size."""
        if self.packed is not None:
            return self.packed.content(index)[-count:]
        with (self.root / self.names[index]).open("rb") as file:
            file.seek(max(0, size - count))
            return file.read()

    def cached(
        self, folder: Path, side: int
    ) -> tuple["ImageFiles", dict[int, BrokenImage]]:
        """The same images, read from squares of this side in a file that is made once;
        and which are broken.
        """
        stored = replace(self, size=side, resizing=replace(self.resizing, centre=1.0))
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{stored._digest()}.npy"
        wrong = file.with_suffix(".json")
        with locked(folder):  # processes that train together decode once
            if not file.exists():
                with replacing(file) as beside, replacing(wrong) as broken_beside:
                    broken = stored.decode(beside)[1]
                    broken_beside.write_text(
                        json.dumps(
                            {index: str(error) for index, error in broken.items()}
                        )
                    )
        known = {
            int(index): BrokenImage(text) for index, text in read_json(wrong).items()
        }
        resizing = replace(
            self.resizing, fit="crop"
        )  # of squares: what is padded stays so
        return (
            replace(
                self,
                cache=(np.load(file, mmap_mode="r"), np.arange(len(self))),
                resizing=resizing,
            ),
            known,
        )

    def content_digest(self, *, times: bool = True) -> str:
        """What the files hold, as `digest_of_files` has it; of shards, those that have
        one of these images.
        """
        if self.packed is None:
            paths = [os.path.join(self.root, name) for name in self.names]
            return digest_of_files(paths, times=times)
        used = np.unique(self.packed.places[:, 0]).tolist()
        shards = [self.packed.files[number] for number in used]
        return digest_of_files(shards, times=times)

    def _digest(self) -> str:
        """Changes with the files and with how they are decoded."""
        packed = self.packed
        resizing = self.resizing.to_dict()["resizing"]
        digest = blake2b(
            repr((DECODING, self.shape, resizing)).encode(), digest_size=16
        )
        digest.update(self.content_digest().encode())
        digest.update(b"".join(part.tobytes() for part in self.names.packed))
        digest.update(b"" if packed is None else packed.places.tobytes())
        return digest.hexdigest()


def _size(path: Path) -> int:
    """Of a file in bytes; of one that is missing, which is named when it is decoded,
    -1.
    """
    try:
        return path.stat().st_size
    except OSError:
        return -1


def attempt(
    function: Callable[[int], Result], items: Sequence[int], description: str
) -> tuple[dict[int, Result], dict[int, BrokenImage]]:
    """`function` of each item on all cores, with a progress bar: the results, and what
    was broken.
    """

    def tried(item: int) -> Result | BrokenImage:
        try:
            return function(item)
        except BrokenImage as error:
            return error

    with ThreadPoolExecutor(
        os.cpu_count()
    ) as pool:  # threads are enough, since pillow decodes without the GIL
        # In portions: a pool makes an object for each item that it is given at once.
        portions = (items[i : i + 4096] for i in range(0, len(items), 4096))
        results = chain.from_iterable(pool.map(tried, portion) for portion in portions)
        found = dict(
            zip(items, track(results, description, total=len(items)), strict=True)
        )
    broken = {
        item: result
        for item, result in found.items()
        if isinstance(result, BrokenImage)
    }
    return {
        i: result for i, result in found.items() if not isinstance(result, BrokenImage)
    }, broken


def open_image(path: Path, content: bytes | None = None) -> "Image":
    """An image with a usable header, of a file or its `content`; its pixels are not
    decoded yet.
    """
    from PIL import Image, UnidentifiedImageError

    if content is None and path.exists() and not path.is_file():  # a pipe would wait
        raise BrokenImage(f"{path}: is no file: remove it")
    try:
        image = Image.open(path if content is None else io.BytesIO(content))
        trouble = unusable(image)
    except FileNotFoundError:
        trouble = "the file does not exist"
    except UnidentifiedImageError:
        empty = not (path.stat().st_size if content is None else content)
        trouble = (
            "the file is empty (0 bytes)"
            if empty
            else "pillow cannot read this as an image, or it is corrupt"
        )
    except Exception as error:  # a damaged file can fail in any way
        trouble = f"the image cannot be opened ({error})"
    if trouble:
        raise BrokenImage(f"{path}: {trouble}")
    if content is not None:
        image.filename = str(path)  # is named where its pixels are damaged
    return image


def unusable(image: "Image") -> str:
    """Why these pixels would be wrong, with the fix; empty when they are right."""
    if (
        getattr(image, "is_animated", False) and image.format != "MPO"
    ):  # a photograph with a preview is one picture
        return (
            "the image is animated, or has several pages: save one of them as its own"
            " file"
        )
    if image.mode == "CMYK":
        return (
            "the image is CMYK, for print, and would get wrong colours: convert it to"
            " RGB with its colour profile"
        )
    # How pixels lie in the file, such as RGB;16B, is the argument, or the first
    # argument, of each of pillow's tiles.
    if image.mode.startswith(("I", "F")) or any(
        ";16" in str(tile[3]) for tile in getattr(image, "tile", ())
    ):
        fix = (
            "divide all images by the same largest value, times 255, and save them as"
            " uint8"
        )
        return (
            "the image has 16 or more bits per channel, and only you know the range"
            f" that is used: {fix}"
        )
    return (
        ""
        if image.mode in GREY + COLOUR
        else f"the image has mode {image.mode}: convert it to grey or RGB"
    )


def fitted(
    image: "Image", size: int, channels: int, resizing: Resizing = CROPPED
) -> "Image":
    return view(
        image, resizing.frame(*image.size), size, channels, resizing.interpolation
    )


def view(
    image: "Image", box: Box, size: int, channels: int, interpolation: str = "bilinear"
) -> "Image":
    """What is inside the box, decoded, resized to `size` and turned upright; grey where
    the box leaves the image.
    """
    from PIL import Image

    (width, height), (x, y, right, bottom) = image.size, box
    needed = OVERSAMPLED * size / min(right - x, bottom - y)
    wanted = math.ceil(width * needed), math.ceil(height * needed)
    _, smaller = (needed <= 0.5 and image.draft(None, wanted)) or (
        "",
        (0, 0, width, height),
    )  # before it is rounded up
    image = decoded(image, channels)
    inside = (
        max(x, 0.0),
        max(y, 0.0),
        min(right, float(width)),
        min(bottom, float(height)),
    )
    left, above, end, below = (  # where in the square the image lies
        round((edge - start) * size / length)
        for edge, start, length in zip(
            inside, (x, y) * 2, (right - x, bottom - y) * 2, strict=True
        )
    )
    shape = max(end - left, 1), max(below - above, 1)
    across, down = smaller[2] / width, smaller[3] / height
    part = inside[0] * across, inside[1] * down, inside[2] * across, inside[3] * down
    if image.size != shape or part != (0.0, 0.0, *map(float, shape)):
        image = image.resize(shape, Image.Resampling[interpolation.upper()], box=part)
    if shape != (size, size):
        content, image = image, Image.new(image.mode, (size, size), PADDING[channels])
        image.paste(content, (left, above))
        image.info = content.info
    return upright(image)


def upright(image: "Image") -> "Image":
    """As a viewer shows it, by the orientation in its EXIF data; damaged EXIF data is
    ignored.
    """
    from PIL import Image

    try:
        held = int(image.getexif().get(ORIENTATION, 1)) if "exif" in image.info else 1
    except Exception:  # EXIF data can be damaged in any way
        held = 1
    return (
        image.transpose(Image.Transpose[UPRIGHT[held - 2]]) if 2 <= held <= 8 else image
    )


def decoded(image: "Image", channels: int) -> "Image":
    """The pixels as 8-bit grey (1 channel) or RGB (3); damage is an error that names
    the file.
    """
    name = getattr(image, "filename", "image")  # an image in memory has none
    if image.format == "TIFF":
        # by its name pillow would map the file into memory, with sides swapped if it is
        # turned
        image.filename = ""
    try:
        image.load()
    except Exception as error:  # a damaged file can fail in any way
        raise BrokenImage(
            f"{name}: the image is truncated or corrupt ({error})"
        ) from None
    if image.has_transparency_data:
        image = on_white(image)
    mode = "L" if channels == 1 else "RGB"
    return image if image.mode == mode else image.convert(mode)


def on_white(image: "Image") -> "Image":
    """Opaque, as a viewer shows it on a white page: the colours of transparent pixels
    are arbitrary.
    """
    from PIL import Image

    shown, page = image.convert("RGBA"), Image.new("RGBA", image.size, "white")
    page.alpha_composite(shown)
    page.info = shown.info  # its EXIF data
    return page.convert("RGB")


def resized(images: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Images in memory (N, channels, H, W) resized to `size`, as files are."""
    channels = images.shape[1]
    found = [planes(fitted(picture(image), size, channels)) for image in images]
    return np.array(found, dtype=np.uint8).reshape(-1, channels, size, size)


def picture(pixels: NDArray[np.uint8]) -> "Image":
    """Pillow's image of pixels (channels, H, W)."""
    from PIL import Image

    return Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))


def planes(image: "Image") -> NDArray[np.uint8]:
    """Pixels (channels, H, W)."""
    pixels = np.asarray(image, dtype=np.uint8)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)

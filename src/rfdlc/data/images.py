"""Image files: which are accepted, how they are decoded and resized, and compact sequences of many of them."""

import math
import os
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rfdlc.errors import InputError
from rfdlc.progress import track

if TYPE_CHECKING:
    from PIL.Image import Image

Result = TypeVar("Result")
Box = tuple[float, float, float, float]  # left, top, right, bottom

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
GREY, COLOUR = ("1", "L", "LA"), ("P", "PA", "RGB", "RGBA", "RGBX", "YCbCr")
ORIENTATION = 0x0112  # EXIF's tag, whose values 2 to 8 mean these transpositions
UPRIGHT = ["FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90"]


class BrokenImage(InputError):
    """One image file cannot be used; `skip_broken` counts these instead of stopping."""


class PackedText(Sequence[str]):
    """An immutable sequence of texts in two arrays: all bytes, and where each text ends.

    Forked workers share it: reading strings in a list changes reference counts, which copies memory page by page.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        content, ends = bytearray(), array("q")
        for text in texts:  # one by one: a million names from a generator are never a million objects
            content += text.encode("utf-8", "surrogateescape")
            ends.append(len(content))
        self.packed = np.frombuffer(content, dtype=np.uint8), np.frombuffer(ends, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.packed[1])

    def __getitem__(self, index: Any) -> Any:
        place = range(len(self))[index]  # raises IndexError, counts from the end
        content, ends = self.packed
        start = int(ends[place - 1]) if place else 0
        return content[start : int(ends[place])].tobytes().decode("utf-8", "surrogateescape")

    def take(self, indices: Iterable[int]) -> "PackedText":
        return PackedText(self[int(i)] for i in indices)


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Image files under one root, decoded on demand to squares of side `size`."""

    root: Path
    names: PackedText  # paths relative to the root
    size: int
    channels: int = 3

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, positions: NDArray[np.int64]) -> "ImageFiles":
        return ImageFiles(self.root, self.names.take(positions), self.size, self.channels)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self), self.channels, self.size, self.size

    def open(self, index: int) -> "Image":
        return open_image(self.root / self.names[index])

    def decode(self, centre: float = 1.0) -> tuple[NDArray[np.uint8], dict[int, BrokenImage]]:
        """All images in memory, of each the `centre` share of its shorter side; and which are broken, and why."""
        images = np.zeros(self.shape, dtype=np.uint8)

        def fill(index: int) -> None:
            with self.open(index) as image:
                images[index] = planes(fitted(image, self.size, self.channels, centre))

        return images, attempt(fill, range(len(self)), "Decoding images")[1]


def attempt(
    function: Callable[[int], Result], items: Sequence[int], description: str
) -> tuple[dict[int, Result], dict[int, BrokenImage]]:
    """`function` of each item on all cores, with a progress bar: the results, and what was broken."""

    def tried(item: int) -> Result | BrokenImage:
        try:
            return function(item)
        except BrokenImage as error:
            return error

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # threads are enough, since pillow decodes without the GIL
        # In portions: a pool makes an object for each item that it is given at once.
        portions = (items[i : i + 4096] for i in range(0, len(items), 4096))
        results = chain.from_iterable(pool.map(tried, portion) for portion in portions)
        found = dict(zip(items, track(results, description, total=len(items)), strict=True))
    broken = {item: result for item, result in found.items() if isinstance(result, BrokenImage)}
    return {i: result for i, result in found.items() if not isinstance(result, BrokenImage)}, broken


def open_image(path: Path) -> "Image":
    """An image with a usable header; its pixels are not decoded yet."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(path)
        trouble = unusable(image)
    except FileNotFoundError:
        trouble = "the file does not exist"
    except UnidentifiedImageError:
        empty = not path.stat().st_size
        trouble = "the file is empty (0 bytes)" if empty else "pillow cannot read this as an image, or it is corrupt"
    except Exception as error:  # a damaged file can fail in any way
        trouble = f"the image cannot be opened ({error})"
    if trouble:
        raise BrokenImage(f"{path}: {trouble}")
    return image


def unusable(image: "Image") -> str:
    """Why these pixels would be wrong, with the fix; empty when they are right."""
    if getattr(image, "is_animated", False) and image.format != "MPO":  # a photograph with a preview is one picture
        return f"the image is animated ({image.n_frames} frames): save one frame of it as its own file"
    if image.mode == "CMYK":
        return "the image is CMYK, for print, and would get wrong colours: convert it to RGB with its colour profile"
    # How pixels lie in the file, such as RGB;16B, is the argument, or the first argument, of each of pillow's tiles.
    if image.mode.startswith(("I", "F")) or any(";16" in str(tile[3]) for tile in image.tile):
        return "the image has 16 or more bits per channel: scale it to 8 bits, since only you know its range"
    return "" if image.mode in GREY + COLOUR else f"the image has mode {image.mode}: convert it to grey or RGB"


def fitted(image: "Image", size: int, channels: int, share: float = 1.0) -> "Image":
    """The centre square of `share` of the shorter side, resized to `size`: 224 / 256 is resize 256, centre crop 224."""
    width, height = image.size
    side = share * min(width, height)
    box = (width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2
    return view(image, box, size, channels)


def view(image: "Image", box: Box, size: int, channels: int) -> "Image":
    """What is inside the box, decoded, resized to `size` (bilinear, antialiased) and turned upright."""
    from PIL import Image

    width, height = image.size
    needed = 2 * size / min(box[2] - box[0], box[3] - box[1])
    if needed <= 0.5:  # a large JPEG is decoded at a fraction of its size that leaves twice as many pixels as needed
        image.draft(None, (math.ceil(width * needed), math.ceil(height * needed)))
    image = decoded(image, channels)
    across, down = image.size[0] / width, image.size[1] / height  # 1 unless it was decoded smaller
    box = (box[0] * across, box[1] * down, box[2] * across, box[3] * down)
    if image.size != (size, size) or box != (0.0, 0.0, float(size), float(size)):
        image = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    return upright(image)


def upright(image: "Image") -> "Image":
    """As a viewer shows it, by the orientation in its EXIF data; damaged EXIF data is ignored."""
    from PIL import Image

    try:
        held = int(image.getexif().get(ORIENTATION, 1)) if "exif" in image.info else 1
    except Exception:  # EXIF data can be damaged in any way
        held = 1
    return image.transpose(Image.Transpose[UPRIGHT[held - 2]]) if 2 <= held <= 8 else image


def decoded(image: "Image", channels: int) -> "Image":
    """The pixels as 8-bit grey (1 channel) or RGB (3); damage is an error that names the file."""
    try:
        image.load()
    except Exception as error:  # a damaged file can fail in any way
        name = getattr(image, "filename", "image")  # an image in memory has none
        raise BrokenImage(f"{name}: the image is truncated or corrupt ({error})") from None
    mode = "L" if channels == 1 else "RGB"
    return image if image.mode == mode else image.convert(mode)


def resized(images: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Images in memory (N, channels, H, W) resized to `size`, as files are."""
    from PIL import Image

    channels = images.shape[1]
    pictures = (Image.fromarray(image[0] if channels == 1 else image.transpose(1, 2, 0)) for image in images)
    found = [planes(fitted(picture, size, channels)) for picture in pictures]
    return np.array(found, dtype=np.uint8).reshape(-1, channels, size, size)


def planes(image: "Image") -> NDArray[np.uint8]:
    """Pixels (channels, H, W)."""
    pixels = np.asarray(image, dtype=np.uint8)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)

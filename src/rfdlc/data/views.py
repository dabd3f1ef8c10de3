"""Views of image files for training and evaluation: random resized crop, flip and colour jitter, in pillow."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rfdlc.data.images import decoded, fitted, view
from rfdlc.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

GREY = 0.299, 0.587, 0.114  # luminance of red, green, blue
TRIES = 10  # boxes that are tried before the centre is taken
DRAWN = 2 * TRIES + 6  # uniform numbers that a view takes: area and proportions a try, place, three colours, flip
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class View:
    """How a training view is drawn: a crop of `area` of the image in proportions up to `ratio`, a flip, colour jitter.

    The default is the paper's for ImageNet-LT; iNaturalist has jitter 0. `evaluated` is the part of the shorter side
    that evaluation keeps: 224 / 256 is what resize 256 and centre crop 224 leave.
    """

    area: tuple[float, float] = (0.08, 1.0)
    ratio: float = 4 / 3
    flip: bool = True
    jitter: float = 0.4
    evaluated: float = 224 / 256

    def __post_init__(self) -> None:
        low, high = self.area
        if not (0 < low <= high <= 1 and self.ratio >= 1 and 0 <= self.jitter <= 1 and 0 < self.evaluated <= 1):
            raise InputError(
                f"{self} is out of range: expected 0 < area <= 1, ratio >= 1, 0 <= jitter <= 1, evaluated in (0, 1]"
            )

    def training(self, image: "Image", size: int, channels: int, drawn: Sequence[float]) -> "Image":
        """A random view, size x size, from DRAWN uniform numbers."""
        from PIL import Image

        width, height = image.size
        shown = view(image, self._box(width, height, drawn), size, channels)
        if self.flip and drawn[-1] < 0.5:
            shown = shown.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if not self.jitter:
            return shown
        brightness, contrast, saturation = (1 + self.jitter * (2 * u - 1) for u in drawn[-4:-1])
        return recoloured(shown, brightness, contrast, saturation)

    def evaluation(self, image: "Image", size: int, channels: int) -> "Image":
        """The centre, size x size."""
        return fitted(image, size, channels, self.evaluated)

    def _box(self, width: int, height: int, drawn: Sequence[float]) -> Box:
        """A box of random area and proportions; the first of some tries that fits, else the largest in the centre."""
        least, most = self.area
        for i in range(0, 2 * TRIES, 2):
            area = (least + drawn[i] * (most - least)) * width * height
            ratio = self.ratio ** (2 * drawn[i + 1] - 1)
            across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 1 <= across <= width and 1 <= down <= height:
                left = math.floor(drawn[2 * TRIES] * (width - across + 1))
                top = math.floor(drawn[2 * TRIES + 1] * (height - down + 1))
                return left, top, left + across, top + down
        w, h = min(width, height * self.ratio), min(height, width * self.ratio)
        return (width - w) / 2, (height - h) / 2, (width + w) / 2, (height + h) / 2


def recoloured(image: "Image", brightness: float, contrast: float, saturation: float) -> "Image":
    """Brightness, contrast and saturation times these factors, as one linear change of colours, cut off at 0 and 255.

    x' = b c (s x + (1 - s) grey(x)) + b (1 - c) mean grey. Their order does not matter: saturation leaves the mean
    grey as it is.
    """
    from PIL import Image

    gain = brightness * contrast
    some = image.resize((32, 32), Image.Resampling.NEAREST)  # a thousand pixels tell the mean well enough
    mean = decoded(some.reduce(32), 1).getpixel((0, 0))
    shift = brightness * (1 - contrast) * mean
    if image.mode == "L":
        return image.point([min(255, max(0, round(gain * value + shift))) for value in range(256)])
    rest = [gain * (1 - saturation) * weight for weight in GREY]
    rows = [[rest[j] + gain * saturation * (i == j) for j in range(3)] for i in range(3)]
    return image.convert("RGB", tuple(value for row in rows for value in (*row, shift)))

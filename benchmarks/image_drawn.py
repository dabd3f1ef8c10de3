"""Images that are drawn or simulated: letters, sounds, tissue and land from above.

Every set is a function of its seed. Classes overlap, as real ones do: no network gets
all of them right. Images are bytes of shape (samples, side, side, 3).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]
Painter = Callable[[int, int, np.random.Generator], Floats]

LETTERS = "abcdefghijkmnopqrstuvwxyzABDEFGHJLMNQRT23456789"
FONTS = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSans-Oblique",
    "DejaVuSansMono",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "DejaVuSerif-Italic",
    "STIXGeneral",
    "STIXGeneralItalic",
    "cmr10",
    "cmss10",
    "cmtt10",
    "cmti10",
)
SAMPLE_RATE = 8000


def painted(
    paint: Painter, counts: Sequence[int], side: int, seed: int, workers: int = 1
) -> tuple[Bytes, NDArray[np.int64]]:
    """`counts[c]` images of each class c, in random order, and their labels.

    Each image has a seed of its own: the number of processes changes nothing.
    """
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    tasks = [
        (paint, int(label), side, (seed, number)) for number, label in enumerate(labels)
    ]
    if workers == 1:
        return np.stack([_one(task) for task in tasks]), labels
    with ProcessPoolExecutor(workers) as pool:
        return np.stack(list(pool.map(_one, tasks, chunksize=64))), labels


def _one(task: tuple[Painter, int, int, tuple[int, int]]) -> Bytes:
    paint, label, side, seed = task
    picture = paint(label, side, np.random.default_rng(seed))
    return np.clip(255 * picture, 0, 255).astype(np.uint8)


def smooth_noise(side: int, cells: int, rng: np.random.Generator) -> Floats:
    """Noise between 0 and 1 with about `cells` bumps along a side."""
    coarse = rng.uniform(0, 255, (cells + 1, cells + 1)).astype(np.uint8)
    fine = Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC)
    return np.asarray(fine) / 255


def blended(mask: Floats, inside: Any, outside: Any) -> Floats:
    """Colour or image `inside` where the mask is 1, `outside` where it is 0."""
    weight = mask[..., None]
    return weight * inside + (1 - weight) * outside


# -- letters
# --------------------------------------------------------------------------------------


@cache
def font(name: str, size: int) -> ImageFont.FreeTypeFont:
    """One of the fonts that come with matplotlib."""
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return ImageFont.truetype(str(folder / f"{name}.ttf"), size)


def paint_letter(label: int, side: int, rng: np.random.Generator) -> Floats:
    """A letter in one of thirteen fonts: moved, turned, sheared, blurred, with noise,
    over a background of its own.
    """
    letter = font(FONTS[rng.integers(len(FONTS))], int(side * rng.uniform(0.5, 0.85)))
    canvas = Image.new("L", (side, side))
    middle = side * rng.uniform(0.4, 0.6, 2)
    ImageDraw.Draw(canvas).text(
        (middle[0], middle[1]), LETTERS[label], 255, letter, anchor="mm"
    )
    shear = rng.normal(0, 0.15)
    canvas = canvas.transform(
        (side, side),
        Image.Transform.AFFINE,
        (1, shear, -shear * side / 2, 0, 1, 0),
        Image.Resampling.BILINEAR,
    )
    canvas = canvas.rotate(rng.normal(0, 10), Image.Resampling.BILINEAR)
    canvas = canvas.filter(ImageFilter.GaussianBlur(rng.uniform(0, side / 32)))

    background = blended(smooth_noise(side, 3, rng), *rng.uniform(0, 1, (2, 3)))
    ink = np.where(background.mean() > 0.5, 0.0, 1.0) * rng.uniform(0.4, 1, 3)
    picture = blended(np.asarray(canvas) / 255 * rng.uniform(0.6, 1), ink, background)
    return picture + rng.normal(0, 0.1, picture.shape)


# -- sounds
# --------------------------------------------------------------------------------------


def sound(label: int, seconds: float, rng: np.random.Generator) -> Floats:
    """One of twelve kinds of sound."""
    times = np.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    pitch = np.exp(rng.uniform(np.log(200), np.log(1200)))
    progress = times / seconds
    rate = rng.uniform(4, 12)
    vibrato = np.cumsum(1 + 0.05 * np.sin(2 * np.pi * rate * times)) / SAMPLE_RATE
    noise = rng.normal(0, 1, len(times))
    pulses = np.sin(2 * np.pi * rate * times) > rng.uniform(0.2, 0.7)

    def tone(phase: Floats, overtones: Sequence[int] = (1,)) -> Floats:
        return sum(np.sin(2 * np.pi * pitch * k * phase) / k for k in overtones)

    match label:
        case 0:
            return tone(times)
        case 1:
            return tone(times, range(1, 9))
        case 2:
            return tone(times, (1, 3, 5, 7))
        case 3:
            return tone(vibrato, range(1, 6))
        case 4:
            return tone(seconds * progress**2 / 2 * rng.uniform(1.5, 3) + times)
        case 5:
            return tone(times - seconds * progress**2 / 2 * rng.uniform(0.4, 0.9))
        case 6:
            return tone(times, range(1, 6)) * pulses
        case 7:
            return tone(times, range(1, 9)) * np.exp(-rng.uniform(3, 9) * progress)
        case 8:
            return noise
        case 9:
            return noise * pulses
        case 10:
            return np.cumsum(noise) / 10
        case _:
            clicks = rng.uniform(0, 1, len(times)) < 3 / SAMPLE_RATE * rate
            return 30 * clicks * rng.uniform(0.5, 1, len(times))


def paint_spectrogram(label: int, side: int, rng: np.random.Generator) -> Floats:
    """The logarithm of a sound's power: time to the right, high tones above."""
    window = 2 * side
    hop = window // 2
    wave = sound(label, (side + 1) * hop / SAMPLE_RATE, rng)
    level = np.exp(rng.uniform(np.log(0.2), np.log(2)))
    wave = wave / (wave.std() + 1e-9) + rng.normal(0, level, len(wave))
    frames = np.lib.stride_tricks.sliding_window_view(wave, window)[::hop][:side]
    power = np.abs(np.fft.rfft(frames * np.hanning(window)))[:, 1 : side + 1] ** 2
    decibels = 10 * np.log10(power.T[::-1] + 1e-6)
    shade = (decibels - decibels.mean()) / 60 + 0.5
    return np.repeat(shade[..., None], 3, axis=-1)


# -- tissue
# --------------------------------------------------------------------------------------

# Of each kind: nuclei per image, their radius, their elongation, how dark they are, and
# how far they keep from a grid (1: anywhere).
TISSUES = (
    (25, 0.045, 1.1, 0.45, 1.0),
    (25, 0.045, 1.9, 0.45, 1.0),
    (45, 0.040, 1.1, 0.55, 1.0),
    (25, 0.060, 1.2, 0.55, 1.0),
    (12, 0.050, 1.3, 0.35, 1.0),
    (30, 0.045, 1.2, 0.45, 0.2),
    (45, 0.035, 2.2, 0.55, 0.6),
    (18, 0.075, 1.5, 0.60, 1.0),
)


def paint_tissue(label: int, side: int, rng: np.random.Generator) -> Floats:
    """Stained nuclei in a matrix; kinds differ by degrees and overlap."""
    nuclei, radius, elongation, darkness, freedom = TISSUES[label]
    count = max(3, rng.poisson(nuclei))
    radii = radius * np.exp(rng.normal(0, 0.15) + rng.normal(0, 0.15, count))
    lengths = 1 + (elongation - 1) * np.exp(rng.normal(0, 0.3, count))

    columns = int(np.ceil(np.sqrt(count)))
    spots = np.stack(np.divmod(np.arange(count), columns)) / columns + 0.5 / columns
    centres = spots + freedom * (rng.uniform(0, 1, (2, count)) - spots)
    centres = centres + rng.normal(0, 0.02, (2, count))
    main_angle = rng.uniform(0, np.pi)
    angles = main_angle + rng.normal(0, 0.2 + freedom, count)

    ticks = np.arange(side) / side
    down = ticks[:, None, None] - centres[0]
    right = ticks[None, :, None] - centres[1]
    cosine = np.cos(angles)
    sine = np.sin(angles)
    along = (right * cosine + down * sine) / (radii * lengths)
    across = (down * cosine - right * sine) / radii
    distance = (along * along + across * across).min(axis=-1)
    nucleus = np.exp(-(distance**2))

    stain = np.array([0.85, 0.65, 0.78]) + rng.normal(0, 0.05, 3)
    matrix = stain - 0.2 * smooth_noise(side, 6, rng)[..., None]
    ink = np.array([0.45, 0.3, 0.6]) + rng.normal(0, 0.05, 3)
    depth = nucleus * np.clip(darkness + rng.normal(0, 0.1), 0.1, 1)
    depth = depth * (0.7 + 0.3 * smooth_noise(side, side // 3, rng))
    picture = blended(depth, ink, matrix)
    return picture + rng.normal(0, 0.03, picture.shape)


# -- land from above
# --------------------------------------------------------------------------------------

LANDS = (
    "fields",
    "forest",
    "water",
    "houses",
    "halls",
    "bare",
    "orchard",
    "river",
    "road",
    "meadow",
)


def stripes(side: int, count: float, angle: float) -> Floats:
    """A wave between 0 and 1 with so many crests along a side."""
    rows, cols = np.mgrid[:side, :side] / side
    ramp = cols * np.cos(angle) + rows * np.sin(angle)
    return 0.5 + 0.5 * np.sin(2 * np.pi * count * ramp)


def band(side: int, width: float, bend: float, rng: np.random.Generator) -> Floats:
    """1 on a line across the image, straight or bent, 0 elsewhere."""
    rows, cols = np.mgrid[:side, :side] / side - 0.5
    angle = rng.uniform(0, np.pi)
    along = cols * np.cos(angle) + rows * np.sin(angle)
    across = rows * np.cos(angle) - cols * np.sin(angle) + rng.uniform(-0.2, 0.2)
    across = across + bend * np.sin(2 * np.pi * (1.2 * along + rng.uniform(0, 1)))
    return np.asarray(np.exp(-((2 * across / width) ** 4)))


def patches(side: int, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Which of `count` random points is the nearest, of each pixel."""
    rows, cols = np.mgrid[:side, :side] / side
    centres = rng.uniform(0, 1, (2, count))
    distance = (rows[..., None] - centres[0]) ** 2 + (cols[..., None] - centres[1]) ** 2
    return np.asarray(distance.argmin(axis=-1))


def blocks(side: int, count: int, size: float, rng: np.random.Generator) -> Floats:
    """1 on rectangles that stand in rows, 0 between them."""
    image = Image.new("L", (side, side))
    draw = ImageDraw.Draw(image)
    step = side / np.ceil(np.sqrt(count))
    for top in np.arange(0, side, step):
        for left in np.arange(0, side, step):
            height, width = side * size * rng.uniform(0.6, 1.3, 2)
            y, x = rng.normal((top + step / 2, left + step / 2), step / 8)
            box = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
            draw.rectangle(box, int(rng.uniform(150, 255)))
    turned = image.rotate(rng.uniform(0, 360), Image.Resampling.BILINEAR)
    return np.asarray(turned) / 255


def paint_land(label: int, side: int, rng: np.random.Generator) -> Floats:
    """Land as a satellite sees it, with haze and a light of its own."""
    green = np.array([0.30, 0.42, 0.22]) * rng.uniform(0.7, 1.3)
    brown = np.array([0.50, 0.42, 0.30]) * rng.uniform(0.7, 1.3)
    blue = np.array([0.12, 0.22, 0.30]) * rng.uniform(0.7, 1.4)
    grey = np.array([0.55, 0.54, 0.52]) * rng.uniform(0.7, 1.2)
    angle = rng.uniform(0, np.pi)

    shades = rng.uniform(0.6, 1.2, (rng.integers(3, 9), 1)) * np.where(
        rng.uniform(size=(1, 1)) < 0.5, green, brown
    )
    parcels = patches(side, len(shades), rng)
    rough = smooth_noise(side, side // 4, rng)
    countryside = shades[parcels] * (0.9 + 0.2 * smooth_noise(side, 8, rng))[..., None]

    match LANDS[label]:
        case "fields":
            rows = stripes(side, rng.uniform(8, 16), angle)
            picture = countryside * (0.85 + 0.3 * rows)[..., None]
        case "forest":
            picture = blended(0.2 + 0.6 * rough, 0.5 * green, green)
        case "water":
            picture = blended(0.3 * smooth_noise(side, 5, rng), grey, blue)
        case "houses":
            roofs = blocks(side, int(rng.integers(16, 50)), 0.09, rng)
            picture = blended(roofs, grey * (1, 0.9, 0.8), 0.8 * countryside)
        case "halls":
            roofs = blocks(side, int(rng.integers(4, 16)), 0.2, rng)
            picture = blended(roofs, 1.3 * grey, 0.7 * grey)
        case "bare":
            dunes = stripes(side, rng.uniform(3, 8), angle) * rough
            picture = blended(dunes, 1.2 * brown, brown)
        case "orchard":
            crowns = stripes(side, 8, angle) * stripes(side, 8, angle + np.pi / 2)
            picture = blended(crowns * rng.uniform(0.3, 1), 0.6 * green, brown)
        case "river":
            course = band(side, rng.uniform(0.08, 0.25), rng.uniform(0.05, 0.15), rng)
            picture = blended(course, blue, countryside)
        case "road":
            course = band(side, rng.uniform(0.03, 0.1), rng.uniform(0, 0.05), rng)
            picture = blended(course, grey, countryside)
        case _:
            picture = blended(0.5 * smooth_noise(side, 10, rng), brown, green)

    haze = rng.uniform(0, 0.5)
    picture = (1 - haze) * picture + haze * np.array([0.6, 0.65, 0.7])
    return picture + rng.normal(0, 0.05, picture.shape)

"""How many photographs one core decodes per second, beside plain pillow (open, resize,
crop) in the same run.

    python benchmarks/decoding.py --photos DIR
        any folder of photographs; they are enlarged to the sizes below

CPU time is measured, so that other load matters little. What must hold: at least 2x
plain pillow on photographs of 1,200 x 900, not slower on 500 x 375, and pixels that
differ from an exact decoding by at most one level on average. Written to
results/decoding.csv; the committed file is of 100 training photographs of Caltech-101.
"""

import argparse
import io
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median

import numpy as np
from PIL import Image

from recording import write

sys.path.insert(
    0, str(Path(__file__).parents[1] / "src")
)  # a checkout needs no installation

from rfdlc.data.images import Resizing, fitted

SIZES = {
    (1200, 900): 2.0,
    (500, 375): 1.0,
}  # and how many times as fast as plain pillow it must be
SIDES, ROUNDS, QUALITY = (224, 160), 5, 90
KINDS = {
    "crop": Resizing(),
    "resize 256, crop 224": Resizing(centre=224 / 256),
    "pad": Resizing("pad"),
}
KINDS |= {"crop, bicubic": Resizing("crop", "bicubic")}
Decode = Callable[[bytes], Image.Image]


def enlarged(photos: list[Path], size: tuple[int, int]) -> list[bytes]:
    """JPEG files in memory; every other one stands upright."""
    found = []
    for place, photo in enumerate(photos):
        file = io.BytesIO()
        with Image.open(photo) as image:
            shown = image.convert("RGB").resize(
                size[:: 1 - 2 * (place % 2)], Image.Resampling.BICUBIC
            )
            shown.save(file, "JPEG", quality=QUALITY)
        found.append(file.getvalue())
    return found


def plain(file: bytes, side: int, resizing: Resizing) -> Image.Image:
    """As it is usually written: decode, resize the shorter (to pad: the longer) side,
    crop (paste).
    """
    image = Image.open(io.BytesIO(file)).convert("RGB")
    edge = min(image.size) if resizing.fit == "crop" else max(image.size)
    width, height = (
        round(side / resizing.centre * length / edge) for length in image.size
    )
    image = image.resize(
        (width, height), Image.Resampling[resizing.interpolation.upper()]
    )
    if resizing.fit == "crop":
        left, top = (width - side) // 2, (height - side) // 2
        return image.crop((left, top, left + side, top + side))
    square = Image.new("RGB", (side, side))
    square.paste(image, ((side - width) // 2, (side - height) // 2))
    return square


def ours(file: bytes, side: int, resizing: Resizing) -> Image.Image:
    return fitted(Image.open(io.BytesIO(file)), side, 3, resizing)


def exact(file: bytes, side: int, resizing: Resizing) -> Image.Image:
    return fitted(Image.open(io.BytesIO(file)).convert("RGB"), side, 3, resizing)


def seconds(decode: Decode, files: list[bytes]) -> float:
    began = time.process_time()
    for file in files:
        decode(file).tobytes()
    return time.process_time() - began


def measure(
    files: list[bytes], size: tuple[int, int], side: int, kind: str
) -> list[dict[str, object]]:
    resizing = KINDS[kind]

    def of(function: Callable[[bytes, int, Resizing], Image.Image]) -> Decode:
        return lambda file: function(file, side, resizing)

    times = [
        (seconds(of(ours), files), seconds(of(plain), files)) for _ in range(ROUNDS)
    ]
    own, other = (len(files) / median(column) for column in zip(*times, strict=True))
    pairs = [
        (np.asarray(of(ours)(file), float), np.asarray(of(exact)(file), float))
        for file in files
    ]
    difference = max(float(np.abs(a - b).mean()) for a, b in pairs)
    what = f"{size[0]}x{size[1]} to {side}, {kind}"
    ratio = median(b / a for a, b in times)
    speed = {
        "what": what,
        "value": round(own, 1),
        "unit": "images/s per core",
        "reference": round(other, 1),
    }
    speed |= {"ratio": round(ratio, 2), "required": f">= {SIZES[size]:g}"}
    worst = {
        "what": f"{what}, mean absolute difference from exact, worst photograph",
        "value": round(difference, 2),
    }
    return [
        speed,
        worst
        | {
            "unit": "grey levels",
            "reference": "",
            "ratio": "",
            "required": "<= 1",
        },
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--count", type=int, default=100)
    given = parser.parse_args()
    photos = Random(0).sample(sorted(given.photos.rglob("*.jpg")), given.count)
    rows = []
    for size in SIZES:
        files = enlarged(photos, size)
        rows += [
            row
            for side in SIDES
            for kind in KINDS
            for row in measure(files, size, side, kind)
        ]
    write("decoding", rows, ("numpy", "pillow"))


if __name__ == "__main__":
    main()

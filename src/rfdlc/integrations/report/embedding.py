"""Arrays and images as text inside the page.

Probabilities take 16 bits on a logarithmic scale, because a temperature and a prior act on logarithms: the relative
error is at most `STEP / 2` (0.02%) down to the floor at which the library takes logarithms. Arrays are deflated and
written in base64; images are data addresses.
"""

import base64
import io
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.images import upright
from rfdlc.decide.classes import Indices
from rfdlc.decide.scores import PROBABILITY_FLOOR, Floats
from rfdlc.errors import InputError, expect
from rfdlc.integrations.report.runs import ReportRun

LEVELS = 65535
STEP = float(-np.log(PROBABILITY_FLOOR) / LEVELS)
MOST_CELLS = 2_000_000  # probabilities in one page, all runs together: two bytes each, about 4 MB as text
SIDE = 72  # pixels of a thumbnail
Images = str | Path | NDArray[Any]


def quantise(probabilities: Floats) -> NDArray[np.uint16]:
    """-log p in steps of `STEP`: 0 is probability 1, `LEVELS` is the floor."""
    levels = np.log(np.clip(probabilities, PROBABILITY_FLOOR, 1.0)) * (-1 / STEP)
    return np.rint(levels).astype(np.uint16)


def pack(array: NDArray[Any]) -> str:
    """Little-endian bytes in planes (all first bytes, then all second bytes, ...), which deflate better, as base64."""
    plain = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    planes = plain.reshape(-1).view(np.uint8).reshape(-1, plain.itemsize).T
    return base64.b64encode(zlib.compress(planes.tobytes(), 6)).decode("ascii")


def stratified(targets: Indices, size: int, seed: int) -> Indices:
    """`size` positions with the class shares of `targets`, up to rounding; all positions if there are fewer.

    Systematic sampling: samples are shuffled, sorted by class, and taken at equal distances.
    """
    if len(targets) <= size:
        return np.arange(len(targets))
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(len(targets))
    by_class = shuffled[np.argsort(targets[shuffled], kind="stable")]
    places = ((np.arange(size) + rng.random()) * (len(targets) / size)).astype(np.int64)
    return np.sort(by_class[places])


def thumbnails(run: ReportRun, rows: Indices, images: Images | None) -> dict[str, str]:
    """Images of these samples by position: from an array of all images, or from files named by the ids.

    A sample without a file has no image; it is an error if no file is found at all.
    """
    if images is None:
        return {}
    try:
        from PIL import Image
    except ImportError:
        raise InputError("thumbnails need Pillow: pip install pillow, or leave images out") from None
    if not isinstance(images, str | Path):
        array = np.asarray(images)
        expect(
            array.ndim in (3, 4) and len(array) == len(run.outcomes),
            f"images have shape {array.shape} for {len(run.outcomes)} samples: "
            "expected (samples, height, width), (samples, height, width, 3) or (samples, 3, height, width)",
        )
        return {str(row): _encode(Image.fromarray(_pixels(array[row]))) for row in rows}
    folder = Path(images)
    named = folder.is_dir() and run.predictions.ids is not None
    expect(named, f"images {str(images)!r}: no such folder, or {run.name} has no ids that name its files")
    paths = {str(row): folder / name for row, name in zip(rows, run.ids_of(rows), strict=True)}
    found = {row: path for row, path in paths.items() if path.is_file()}
    expect(found or not paths, f"images {str(images)!r}: no id is a file in it (tried {[*paths.values(), ''][0]})")
    try:
        return {row: _encode(upright(Image.open(path)).convert("RGB")) for row, path in found.items()}
    except OSError as error:
        raise InputError(f"images {str(images)!r}: one cannot be read ({error})") from None


def _pixels(image: NDArray[Any]) -> NDArray[np.uint8]:
    """(H, W), (H, W, channels) or (channels, H, W) of bytes, or of floats between 0 and 1, as Pillow takes it."""
    if image.ndim == 3 and image.shape[0] in (1, 3) and image.shape[2] not in (1, 3):
        image = image.transpose(1, 2, 0)
    if image.ndim == 3 and image.shape[2] == 1:
        image = image[:, :, 0]
    pixels = np.clip(image * 255, 0, 255) if image.dtype.kind == "f" else image
    return np.ascontiguousarray(pixels.astype(np.uint8))


def _encode(image: Any) -> str:
    """PNG for tiny images, which are enlarged without blur; JPEG for photographs."""
    file, tiny = io.BytesIO(), max(image.size) < SIDE
    if not tiny:
        image.thumbnail((SIDE * 2, SIDE * 2))
    image.save(file, "PNG" if tiny else "JPEG", optimize=True, **({} if tiny else {"quality": 80}))
    return f"data:image/{'png' if tiny else 'jpeg'};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"

"""Small pictures of samples, as data addresses inside the page."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.images import upright
from rfdlc.decide.classes import Indices
from rfdlc.errors import InputError
from rfdlc.integrations.report.source import Run

SIDE = 72  # pixels
Images = str | Path | NDArray[Any]


def thumbnails(run: Run, rows: Indices, images: Images | None) -> dict[int, str]:
    """Pictures of these samples by position: from an array of all images, or from files named by the ids.

    A sample whose file is missing has no picture; when no file is found at all, that is an error.
    """
    if images is None:
        return {}
    if isinstance(images, str | Path):
        return _from_files(run, rows, Path(images))
    array = np.asarray(images)
    if array.ndim not in (3, 4) or len(array) != len(run.targets):
        raise InputError(
            f"images have shape {array.shape} for {len(run.targets)} samples: "
            "expected (samples, height, width), (samples, height, width, 3) or (samples, 3, height, width)"
        )
    return {int(row): _encode(_as_picture(array[row])) for row in rows}


def _from_files(run: Run, rows: Indices, root: Path) -> dict[int, str]:
    if not root.is_dir():
        raise InputError(f"images {str(root)!r}: no such folder; expected the folder that the ids are paths under")
    if run.predictions.ids is None:
        raise InputError(f"{run.name}: has no ids, so its images cannot be found; expected a column 'id' with paths")
    paths = {int(row): root / name for row, name in zip(rows, run.ids_of(rows), strict=True)}
    found = {row: path for row, path in paths.items() if path.is_file()}
    if paths and not found:
        example = next(iter(paths.values()))
        raise InputError(f"images {str(root)!r}: none of the ids is a file under it (tried {example})")
    return {row: _encode(_open(path)) for row, path in found.items()}


def _open(path: Path) -> Any:
    try:
        return upright(_pillow().open(path)).convert("RGB")
    except OSError as error:
        raise InputError(f"{path}: cannot be read as an image ({error})") from None


def _as_picture(image: NDArray[Any]) -> Any:
    """(H, W), (H, W, channels) or (channels, H, W) of bytes, or of floats between 0 and 1."""
    if image.ndim == 3 and image.shape[0] in (1, 3) and image.shape[2] not in (1, 3):
        image = image.transpose(1, 2, 0)
    if image.ndim == 3 and image.shape[2] == 1:
        image = image[:, :, 0]
    if image.dtype.kind == "f":
        image = np.clip(image * 255, 0, 255)
    return _pillow().fromarray(np.ascontiguousarray(image.astype(np.uint8)))


def _encode(picture: Any) -> str:
    """PNG for tiny images, which are enlarged without blur; JPEG for photographs."""
    file, tiny = io.BytesIO(), max(picture.size) < SIDE
    if not tiny:
        picture.thumbnail((SIDE * 2, SIDE * 2))
    picture.save(file, "PNG" if tiny else "JPEG", optimize=True, **({} if tiny else {"quality": 80}))
    kind = "png" if tiny else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise InputError("thumbnails need Pillow: pip install pillow, or leave images out") from None
    return Image

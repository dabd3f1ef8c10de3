"""Where a convolutional network looked: Grad-CAM (Selvaraju et al. 2017) of the class
that was decided for.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.images import fitted, planes
from rfdlc.errors import InputError
from rfdlc.probabilities.classes import Indices
from rfdlc.reporting.runs import ReportRun

if TYPE_CHECKING:
    from rfdlc.training.model import Model

SHOWN = 0.6  # the largest share of the colour in a pixel
COLOUR = (255, 60, 0)


def grad_cam(
    model: "Model", images: NDArray[np.uint8], classes: Sequence[int]
) -> NDArray[np.float64] | None:
    """Maps (N, H, W) from 0 to 1: how much each place of the last feature maps speaks
    for a class, mean of particles.

    Parameters
    ----------
    model : Model
        With a built-in convolutional network; None is returned for another.
    images : array of uint8, shape (N, channels, H, W)
        As the network sees them, before they are normalised.
    classes : sequence of int, shape (N,)
        The class that is explained, of each image.
    """
    import torch

    from rfdlc.data.loader import Normaliser
    from rfdlc.training.networks.backbones import Pooled

    last: Any = next(
        (
            layer
            for layer in reversed(list(model.net.modules()))
            if isinstance(layer, Pooled)
        ),
        None,
    )
    if (
        last is None or model.net.single
    ):  # networks of other libraries, or computed one by one
        return None
    found: list[torch.Tensor] = []
    hook = last.body.register_forward_hook(
        lambda layer, inputs, output: found.append(output)
    )
    scaled = Normaliser(
        model.normalisation, tuple(images.shape[1:]), model.device, torch.float32
    )
    try:
        with torch.enable_grad():
            inputs = scaled(torch.from_numpy(images).to(model.device)).requires_grad_(
                True
            )
            logits = model.net.one_view(inputs[None])[0][0]  # (M, N, C)
            chosen = torch.as_tensor(classes, device=model.device).expand(
                len(logits), -1
            )
            (slopes,) = torch.autograd.grad(
                logits.log_softmax(-1).gather(2, chosen[..., None]).sum(), found[-1]
            )
    finally:
        hook.remove()
    particles = (
        len(logits)
        if found[-1].shape[1] % len(logits) == 0 and len(model.net.branches)
        else 1
    )
    shape = len(images), particles, -1, *slopes.shape[2:]
    maps, slopes = (
        found[-1].detach().float().reshape(shape),
        slopes.float().reshape(shape),
    )  # (N, K, F, h, w)
    seen = (slopes.mean((3, 4), keepdim=True) * maps).sum(2).relu().mean(1)
    return (
        (seen / seen.amax((1, 2), keepdim=True).clamp(min=1e-12)).cpu().double().numpy()
    )


def overlaid(image: NDArray[np.uint8], seen: NDArray[np.float64]) -> Any:
    """An image (channels, H, W) in which a map (h, w) is coloured, for Pillow."""
    from PIL import Image

    pixels = (
        np.broadcast_to(image, (3, *image.shape[1:]))
        .transpose(1, 2, 0)
        .astype(np.float64)
    )
    heat = Image.fromarray((255 * seen).astype(np.uint8)).resize(
        image.shape[:0:-1], Image.Resampling.BILINEAR
    )
    share = SHOWN * np.asarray(heat, dtype=np.float64)[..., None] / 255
    return Image.fromarray(
        np.rint((1 - share) * pixels + share * np.array(COLOUR)).astype(np.uint8)
    )


def highlighted(run: ReportRun, rows: Indices, pictures: Any) -> dict[str, Any]:
    """Coloured images of these samples by row, where the run is a folder with a
    convolutional network.
    """
    source = Path(run.made.get("source", ""))
    if (
        pictures is None
        or not len(rows)
        or not (source / "model.safetensors").is_file()
    ):
        return {}
    try:
        from rfdlc.training.model import Model

        model = Model.load(source)
    except (
        ImportError,
        InputError,
    ):  # without torch, or with a backbone that a folder cannot hold
        return {}
    if len(model.input_shape) != 3 or set(model.classes.names) != set(
        run.classes.names
    ):
        return {}
    if isinstance(pictures, str | Path):
        rows = np.array(
            [
                r
                for r, name in zip(rows, run.ids_of(rows), strict=True)
                if Path(pictures, name).is_file()
            ]
        )
    images = _inputs(model, pictures, rows, run.ids_of(rows)) if len(rows) else None
    if images is None or images.shape[1:] != model.input_shape:
        return {}
    o = run.outcomes
    classes = np.where(o.decided >= 0, o.decided, o.likeliest)[rows]
    maps = grad_cam(
        model,
        images,
        [model.classes.names.index(run.classes.names[c]) for c in classes],
    )
    both = zip(
        rows.tolist(), images, [] if maps is None else maps, strict=maps is not None
    )
    return {str(row): overlaid(image, seen) for row, image, seen in both}


def pixels_of(image: NDArray[Any]) -> NDArray[np.uint8]:
    """(H, W), (H, W, channels) or (channels, H, W) of bytes, or of floats between 0 and
    1, as Pillow takes it.
    """
    if image.ndim == 3 and image.shape[0] in (1, 3) and image.shape[2] not in (1, 3):
        image = image.transpose(1, 2, 0)
    if image.ndim == 3 and image.shape[2] == 1:
        image = image[:, :, 0]
    pixels = np.clip(image * 255, 0, 255).round() if image.dtype.kind == "f" else image
    return np.ascontiguousarray(pixels.astype(np.uint8))


def _inputs(
    model: "Model", pictures: Any, rows: Indices, names: Sequence[str]
) -> NDArray[np.uint8]:
    """The images of these rows as the network sees them: from an array of all, or files
    in a folder.
    """
    if not isinstance(pictures, str | Path):
        return np.stack(
            [planes(pixels_of(image)) for image in np.asarray(pictures)[rows]]
        )
    from PIL import Image

    channels, side = model.input_shape[0], model.input_shape[1]
    opened = (Image.open(Path(pictures) / name) for name in names)
    return np.stack(
        [planes(fitted(image, side, channels, model.resizing)) for image in opened]
    )

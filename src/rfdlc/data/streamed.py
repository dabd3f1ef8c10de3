"""StreamedLoader: image files that do not fit; worker processes decode and resize them,
the device normalises.
"""

import gc
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from rfdlc.data.augment import AUGMENTATION, Augment
from rfdlc.data.dataset import Normalisation, Split
from rfdlc.data.images import (
    CROPPED,
    Box,
    BrokenImage,
    ImageFiles,
    Resizing,
    decoded,
    fitted,
    planes,
    view,
)
from rfdlc.data.loader import EpochLoader, seeded
from rfdlc.data.policy import GREY, Draws
from rfdlc.errors import InputError, expect

if TYPE_CHECKING:
    from PIL.Image import Image

TRIES = 10  # boxes that are tried before the centre is used
DRAWN = (
    2 * TRIES + 6
)  # uniform numbers per view: area and proportions per try, place, three colours, flip


@dataclass(frozen=True)
class View:
    """How a training view is drawn; the default is the paper's for ImageNet-LT,
    iNaturalist uses jitter 0.
    """

    area: tuple[float, float] = (0.08, 1.0)  # of the crop, as a fraction of the image
    ratio: float = 4 / 3  # largest proportion of its sides
    flip: bool = True
    jitter: float = 0.4  # of brightness, contrast and saturation

    @classmethod
    def of(cls, augment: Augment | None, jitter: float) -> "View":
        """Boxes where images are to be cropped, flips where they are to be flipped; the
        whole image otherwise.
        """
        chosen = augment or Augment()
        return cls(
            (0.08, 1.0) if chosen.crop_padding else (1.0, 1.0),
            flip=chosen.flip,
            jitter=jitter,
        )

    def training(
        self,
        image: "Image",
        size: int,
        channels: int,
        drawn: Sequence[float],
        resizing: Resizing = CROPPED,
    ) -> "Image":
        from PIL import Image

        width, height = image.size
        shown = view(
            image,
            self._box(width, height, drawn, resizing.fit),
            size,
            channels,
            resizing.interpolation,
        )
        if self.flip and drawn[-1] < 0.5:
            shown = shown.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if not self.jitter:
            return shown
        brightness, contrast, saturation = (
            1 + self.jitter * (2 * u - 1) for u in drawn[-4:-1]
        )
        return recoloured(shown, brightness, contrast, saturation)

    def _box(
        self, width: int, height: int, drawn: Sequence[float], fit: str = "crop"
    ) -> Box:
        """A box of random area and proportions; the first of some tries that fits, else
        the largest in the centre.

        It lies in the image or, where images are padded, in a square that holds it;
        then it may be wider than the image or higher. Where they are stretched, area
        and proportions are those after it.
        """
        least, most = self.area
        if least == 1:
            return Resizing(fit).frame(width, height)
        wide, high = (width, height) if fit == "crop" else (max(width, height),) * 2
        for i in range(0, 2 * TRIES, 2):
            area = (least + drawn[i] * (most - least)) * wide * high
            ratio = self.ratio ** (2 * drawn[i + 1] - 1)
            across, down = (
                round(math.sqrt(area * ratio)),
                round(math.sqrt(area / ratio)),
            )
            if 1 <= across <= wide and 1 <= down <= high:
                if fit == "stretch":
                    across, down = (
                        max(1, round(across * width / wide)),
                        max(1, round(down * height / high)),
                    )
                left, top = (
                    _start(drawn[2 * TRIES], width, across),
                    _start(drawn[2 * TRIES + 1], height, down),
                )
                return left, top, left + across, top + down
        if fit != "crop":
            return Resizing(fit).frame(width, height)
        w, h = min(width, height * self.ratio), min(height, width * self.ratio)
        return (width - w) / 2, (height - h) / 2, (width + w) / 2, (height + h) / 2


def _start(drawn: float, length: int, part: int) -> int:
    """Where a part begins that lies in the length, or holds it."""
    return (
        math.floor(drawn * (length - part + 1))
        if part <= length
        else -math.floor(drawn * (part - length + 1))
    )


def recoloured(
    image: "Image", brightness: float, contrast: float, saturation: float
) -> "Image":
    """Brightness, contrast and saturation times these factors, as one linear map of
    colours, clipped to 0..255.

    x' = b c (s x + (1 - s) grey(x)) + b (1 - c) mean grey; saturation leaves the mean
    grey as it is.
    """
    from PIL import Image

    gain = brightness * contrast
    some = image.resize(
        (32, 32), Image.Resampling.NEAREST
    )  # a thousand pixels estimate the mean well enough
    mean = decoded(some.reduce(32), 1).getpixel((0, 0))
    shift = brightness * (1 - contrast) * mean
    if image.mode == "L":
        return image.point(
            [min(255, max(0, round(gain * value + shift))) for value in range(256)]
        )
    rest = [gain * (1 - saturation) * weight for weight in GREY]
    rows = [
        [rest[j] + gain * saturation * (i == j) for j in range(3)] for i in range(3)
    ]
    return image.convert("RGB", tuple(value for row in rows for value in (*row, shift)))


# One batch for a worker: which images, and for training (epoch, place of the first in
# the epoch).
_Request = tuple[NDArray[np.int64], tuple[int, int] | None]
_Loader = DataLoader[tuple[Tensor, str]]


class StreamedLoader(EpochLoader):
    """The interface of ResidentLoader for one run; `workers=0` decodes in this process.

    Workers crop and flip (`view`); the random operations and the cutout of `augment`
    follow on the device. What is drawn for an image depends on (seed, epoch, its place
    in the epoch) alone, not on workers or ranks.
    """

    def __init__(
        self,
        split: Split,
        normalisation: Normalisation | None = None,
        *,
        view: View | None = None,
        workers: int | None = None,
        augment: Augment | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(split.inputs, ImageFiles):
            raise InputError(
                "these samples are in memory: use a ResidentLoader, which is faster"
            )
        super().__init__(split, normalisation, "cpu", **options)
        expect(
            len(self.seeds) == 1,
            f"a StreamedLoader feeds one run, got seeds {self.seeds}: give one seed",
        )
        self.augment = augment or Augment()
        self._batches = _Batches(split.inputs, view or View(), self.seeds[0])
        self.workers = min(16, os.cpu_count() or 1) if workers is None else workers
        self._requests: list[_Request] = []
        self._kept = self._new_loader(
            self._requests, keep=True
        )  # its workers live on from epoch to epoch

    def epoch(
        self, epoch: int, start_step: int = 0, weak: bool = False
    ) -> Iterator[tuple[Tensor, ...]]:
        (order,) = self.draw_order(epoch).numpy()
        self._requests[:] = [
            (order[batch], (epoch, batch.start)) for batch in self.slices[start_step:]
        ]
        draws = self.augment.draw(
            self.count, seeded(AUGMENTATION, self.seeds[0], epoch, self.device)
        )
        for batch in self._received(self._kept, self._requests, draws):
            yield tuple(tensor[None] for tensor in (batch if weak else batch[:2]))

    def in_order(self) -> Iterator[tuple[Tensor, ...]]:
        requests: list[_Request] = [
            (np.array(batch), None) for batch in self._evaluated
        ]
        return self._received(self._new_loader(requests, keep=False), requests)

    def _new_loader(self, requests: list[_Request], *, keep: bool) -> _Loader:
        workers = {
            "num_workers": self.workers,
            "persistent_workers": keep and self.workers > 0,
        }
        # Workers keep the garbage collector off what came from the parent: its marks
        # would copy all of that memory. Without a generator of its own, every iteration
        # would advance the caller's.
        own: dict[str, Any] = {
            "worker_init_fn": _freeze,
            "generator": torch.Generator(),
            **workers,
        }
        return DataLoader(
            self._batches,
            None,
            sampler=requests,
            pin_memory=self.device.type == "cuda",
            **own,
        )

    def _received(
        self, loader: _Loader, requests: list[_Request], draws: Draws | None = None
    ) -> Iterator[tuple[Tensor, ...]]:
        # Copies have a stream of their own: while the device computes a step, the next
        # batch is on its way.
        side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        for (indices, training), (images, trouble) in zip(
            requests, loader, strict=True
        ):
            if trouble:
                raise BrokenImage(
                    f"{trouble}. Repair or remove it; rfdlc inspect finds all such"
                    " files"
                )
            targets = self.targets[torch.from_numpy(indices)]
            with torch.cuda.stream(side):  # None: as without
                inputs = images.to(self.device, non_blocking=True)
                batch = (
                    inputs if draws else self._normalised(inputs),
                    targets.to(self.device, non_blocking=True),
                )
            if side is not None:
                step = torch.cuda.current_stream(self.device)
                step.wait_stream(side)
                for tensor in batch:
                    tensor.record_stream(
                        step
                    )  # its memory is used again only after that step
            if draws and training:
                own = {
                    name: drawn[training[1] :][: len(indices)]
                    for name, drawn in draws.items()
                }
                yield (
                    self._normalised(self.augment(inputs, own)),
                    batch[1],
                    self._normalised(inputs),
                )
            else:
                yield batch


def _freeze(worker: int) -> None:
    gc.freeze()


class _Batches(TorchDataset[tuple[Tensor, str]]):
    """Runs in the workers: maps a request to uint8 images (B, channels, size, size), or
    to what is wrong with one.
    """

    def __init__(self, files: ImageFiles, view: View, seed: int) -> None:
        self.files, self.view, self.seed = files, view, seed

    def __getitem__(self, request: _Request) -> tuple[Tensor, str]:
        indices, training = request
        shape, resizing = self.files.shape[1:], self.files.resizing
        images = np.empty((len(indices), *shape), dtype=np.uint8)
        try:
            for place, index in enumerate(indices.tolist()):
                with self.files.open(index) as image:
                    if training is None:
                        shown = fitted(image, shape[-1], shape[0], resizing)
                    else:
                        # Python's generator: numpy's takes four times as long to seed.
                        epoch, first = training
                        rng = Random(
                            (AUGMENTATION << 192)
                            + (self.seed << 128)
                            + (epoch << 64)
                            + first
                            + place
                        )
                        drawn = [rng.random() for _ in range(DRAWN)]
                        shown = self.view.training(
                            image, shape[-1], shape[0], drawn, resizing
                        )
                    images[place] = planes(shown)
        except (
            BrokenImage
        ) as error:  # as text: an exception would come with the worker's traceback
            return torch.empty(0), str(error)
        return torch.from_numpy(images), ""

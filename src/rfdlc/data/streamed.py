"""StreamedLoader: image files that do not fit; worker processes decode and resize them, the device normalises."""

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

from rfdlc.data.augment import AUGMENTATION, GREY
from rfdlc.data.dataset import Normalisation, Split
from rfdlc.data.images import Box, BrokenImage, ImageFiles, decoded, fitted, planes, view
from rfdlc.data.loader import EpochLoader
from rfdlc.errors import InputError, expect

if TYPE_CHECKING:
    from PIL.Image import Image

TRIES = 10  # boxes that are tried before the centre is used
DRAWN = 2 * TRIES + 6  # uniform numbers per view: area and proportions per try, place, three colours, flip


@dataclass(frozen=True)
class View:
    """How a training view is drawn; the default is the paper's for ImageNet-LT, iNaturalist uses jitter 0."""

    area: tuple[float, float] = (0.08, 1.0)  # of the crop, as a fraction of the image
    ratio: float = 4 / 3  # largest proportion of its sides
    flip: bool = True
    jitter: float = 0.4  # of brightness, contrast and saturation
    evaluated: float = 224 / 256  # of the shorter side in evaluation: what resize 256 and centre crop 224 leave

    def training(self, image: "Image", size: int, channels: int, drawn: Sequence[float]) -> "Image":
        from PIL import Image

        width, height = image.size
        shown = view(image, self._box(width, height, drawn), size, channels)
        if self.flip and drawn[-1] < 0.5:
            shown = shown.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if not self.jitter:
            return shown
        brightness, contrast, saturation = (1 + self.jitter * (2 * u - 1) for u in drawn[-4:-1])
        return recoloured(shown, brightness, contrast, saturation)

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
    """Brightness, contrast and saturation times these factors, as one linear map of colours, clipped to 0..255.

    x' = b c (s x + (1 - s) grey(x)) + b (1 - c) mean grey; saturation leaves the mean grey as it is.
    """
    from PIL import Image

    gain = brightness * contrast
    some = image.resize((32, 32), Image.Resampling.NEAREST)  # a thousand pixels estimate the mean well enough
    mean = decoded(some.reduce(32), 1).getpixel((0, 0))
    shift = brightness * (1 - contrast) * mean
    if image.mode == "L":
        return image.point([min(255, max(0, round(gain * value + shift))) for value in range(256)])
    rest = [gain * (1 - saturation) * weight for weight in GREY]
    rows = [[rest[j] + gain * saturation * (i == j) for j in range(3)] for i in range(3)]
    return image.convert("RGB", tuple(value for row in rows for value in (*row, shift)))


# One batch for a worker: which images, and for training (epoch, place of the first in the epoch).
_Request = tuple[NDArray[np.int64], tuple[int, int] | None]
_Loader = DataLoader[tuple[Tensor, str]]


class StreamedLoader(EpochLoader):
    """The interface of ResidentLoader for one run; `workers=0` decodes in this process.

    What is drawn for an image depends on (seed, epoch, its place in the epoch) alone, not on workers or ranks.
    """

    def __init__(
        self, split: Split, normalisation: Normalisation | None = None, *,
        view: View | None = None, workers: int | None = None, **options: Any,
    ) -> None:  # fmt: skip
        if not isinstance(split.inputs, ImageFiles):
            raise InputError("these samples are in memory: use a ResidentLoader, which is faster")
        super().__init__(split, normalisation, "cpu", **options)
        expect(len(self.seeds) == 1, f"a StreamedLoader feeds one run, got seeds {self.seeds}: give one seed")
        self._batches = _Batches(split.inputs, view or View(), self.seeds[0])
        self._workers = min(16, os.cpu_count() or 1) if workers is None else workers
        self._requests: list[_Request] = []
        self._kept = self._new_loader(self._requests, keep=True)  # its workers live on from epoch to epoch

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        (order,) = self.draw_order(epoch).numpy()
        self._requests[:] = [(order[batch], (epoch, batch.start)) for batch in self.slices[start_step:]]
        for inputs, targets in self._received(self._kept, self._requests):
            yield inputs[None], targets[None]

    def in_order(self) -> Iterator[tuple[Tensor, Tensor]]:
        requests: list[_Request] = [(np.array(batch), None) for batch in self._evaluated]
        return self._received(self._new_loader(requests, keep=False), requests)

    def _new_loader(self, requests: list[_Request], *, keep: bool) -> _Loader:
        workers = {"num_workers": self._workers, "persistent_workers": keep and self._workers > 0}
        # Workers keep the garbage collector off what came from the parent: its marks would copy all of that memory.
        # Without a generator of its own, every iteration would advance the caller's.
        own: dict[str, Any] = {"worker_init_fn": _freeze, "generator": torch.Generator(), **workers}
        return DataLoader(self._batches, None, sampler=requests, pin_memory=self.device.type == "cuda", **own)

    def _received(self, loader: _Loader, requests: list[_Request]) -> Iterator[tuple[Tensor, Tensor]]:
        for (indices, _), (images, trouble) in zip(requests, loader, strict=True):
            if trouble:
                raise BrokenImage(f"{trouble}. Repair or remove it; rfdlc inspect finds all such files")
            inputs = self._normalised(images.to(self.device, non_blocking=True))
            yield inputs, self.targets[torch.from_numpy(indices)].to(self.device, non_blocking=True)


def _freeze(worker: int) -> None:
    gc.freeze()


class _Batches(TorchDataset[tuple[Tensor, str]]):
    """Runs in the workers: maps a request to uint8 images (B, channels, size, size), or to what is wrong with one."""

    def __init__(self, files: ImageFiles, view: View, seed: int) -> None:
        self.files, self.view, self.seed = files, view, seed

    def __getitem__(self, request: _Request) -> tuple[Tensor, str]:
        indices, training = request
        shape = self.files.shape[1:]
        images = np.empty((len(indices), *shape), dtype=np.uint8)
        try:
            for place, index in enumerate(indices.tolist()):
                with self.files.open(index) as image:
                    if training is None:
                        shown = fitted(image, shape[-1], shape[0], self.view.evaluated)
                    else:  # Python's generator: numpy's takes four times as long to seed
                        epoch, first = training
                        rng = Random((AUGMENTATION << 192) + (self.seed << 128) + (epoch << 64) + first + place)
                        shown = self.view.training(image, shape[-1], shape[0], [rng.random() for _ in range(DRAWN)])
                    images[place] = planes(shown)
        except BrokenImage as error:  # as text: an exception would come with the worker's traceback
            return torch.empty(0), str(error)
        return torch.from_numpy(images), ""

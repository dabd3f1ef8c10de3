"""StreamedLoader: image files that do not fit; worker processes decode and resize them, the device normalises."""

import gc
import os
from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from rfdlc.data.dataset import Normalisation, Split
from rfdlc.data.images import BrokenImage, ImageFiles, open_image, planes
from rfdlc.data.normaliser import Normaliser
from rfdlc.data.sampling import AUGMENTATION, ORDER, EpochOrder, batch_slices, seeded, shard
from rfdlc.data.views import DRAWN, View
from rfdlc.errors import InputError


class Job(NamedTuple):
    """One batch for a worker: which images, and for training (epoch, place of the first in the epoch)."""

    indices: NDArray[np.int64]
    training: tuple[int, int] | None


class StreamedLoader:
    """The interface of ResidentLoader for one run: inputs (1, B, channels, size, size), targets (1, B).

    What is drawn for an image depends on (seed, epoch, its place in the epoch) alone, not on workers or ranks. Workers
    hand bytes over through shared memory; `workers=0` decodes in this process.
    """

    def __init__(
        self,
        split: Split,
        normalisation: Normalisation | None = None,
        *,
        batch_size: int = 256,
        seeds: Sequence[int] = (0,),
        view: View | None = None,
        sampling: str = "shuffle",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        workers: int | None = None,
    ) -> None:
        if not isinstance(split.inputs, ImageFiles):
            raise InputError("these samples are in memory: use a ResidentLoader, which is faster")
        if len(seeds) != 1:
            raise InputError(f"a StreamedLoader feeds one run, got seeds {tuple(seeds)}: give one seed")
        self.device = torch.device(device)
        self.targets = torch.from_numpy(split.labels)
        self.batch_size, self.seed = batch_size, seeds[0]
        self.rank, self.world_size = rank, world_size
        self.slices = batch_slices(len(split), batch_size, rank=rank, world_size=world_size, drop_last=drop_last)
        self._order = EpochOrder(self.targets, sampling)
        self._normalised = Normaliser(normalisation, split.inputs.shape[1:], self.device, dtype)
        self._batches = _Batches(split.inputs, view or View(), self.seed)
        self._workers = min(16, os.cpu_count() or 1) if workers is None else workers
        self._jobs = _Jobs()
        self._loader: DataLoader[tuple[Tensor, str]] | None = None

    @property
    def steps(self) -> int:
        """Batches in an epoch, on every rank."""
        return len(self.slices)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch from `start_step` on: a resumed epoch continues exactly where it stopped."""
        order = self._order.draw(seeded(ORDER, self.seed, epoch)).numpy()
        self._jobs.pending = [Job(order[part], (epoch, part.start)) for part in self.slices[start_step:]]
        if self._loader is None:  # its workers live on from epoch to epoch
            self._loader = self._new_loader(self._jobs, keep=True)
        for inputs, targets in self._received(self._loader, self._jobs):
            yield inputs[None], targets[None]

    def in_order(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every image of this rank once, in the data set's order, its centre: inputs (B, ...), targets (B,)."""
        mine = np.array(shard(len(self.targets), self.rank, self.world_size, self.batch_size), dtype=np.int64)
        jobs = _Jobs()
        jobs.pending = [Job(mine[i : i + self.batch_size], None) for i in range(0, len(mine), self.batch_size)]
        return self._received(self._new_loader(jobs, keep=False), jobs)

    def _new_loader(self, jobs: "_Jobs", *, keep: bool) -> "DataLoader[tuple[Tensor, str]]":
        return DataLoader(
            self._batches,
            sampler=jobs,
            batch_size=None,
            num_workers=self._workers,
            persistent_workers=keep and self._workers > 0,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_share_memory,
        )

    def _received(self, loader: "DataLoader[tuple[Tensor, str]]", jobs: "_Jobs") -> Iterator[tuple[Tensor, Tensor]]:
        for job, (images, trouble) in zip(jobs.pending, loader, strict=True):
            if trouble:
                raise BrokenImage(f"{trouble}. Mend or remove it; rfdlc inspect finds all such files")
            targets = self.targets[torch.from_numpy(job.indices)]
            yield (
                self._normalised(images.to(self.device, non_blocking=True)),
                targets.to(self.device, non_blocking=True),
            )


def _share_memory(worker: int) -> None:
    """Keep the garbage collector off what came from the parent: its marks would copy all of that memory."""
    gc.freeze()


class _Jobs:
    """What the workers are to do next; filled anew for every epoch."""

    def __init__(self) -> None:
        self.pending: list[Job] = []

    def __iter__(self) -> Iterator[Job]:
        return iter(self.pending)

    def __len__(self) -> int:
        return len(self.pending)


class _Batches(TorchDataset[tuple[Tensor, str]]):
    """Runs in the workers: a job in, uint8 images (B, channels, size, size) out, or what was wrong with one."""

    def __init__(self, files: ImageFiles, view: View, seed: int) -> None:
        self.files, self.view, self.seed = files, view, seed

    def __getitem__(self, job: Job) -> tuple[Tensor, str]:
        images = np.empty((len(job.indices), *self.files.shape[1:]), dtype=np.uint8)
        try:
            for place, index in enumerate(job.indices.tolist()):
                images[place] = self._pixels(index, job.training, place)
        except BrokenImage as error:  # as text: an exception would come with the worker's traceback
            return torch.empty(0), str(error)
        return torch.from_numpy(images), ""

    def _pixels(self, index: int, training: tuple[int, int] | None, place: int) -> NDArray[np.uint8]:
        size, channels = self.files.size, self.files.channels
        with open_image(self.files.path(index)) as image:
            if training is None:
                return planes(self.view.evaluation(image, size, channels))
            epoch, first = training
            # Python's generator: numpy's takes four times as long to seed.
            rng = Random((AUGMENTATION << 192) + (self.seed << 128) + (epoch << 64) + first + place)
            return planes(self.view.training(image, size, channels, [rng.random() for _ in range(DRAWN)]))

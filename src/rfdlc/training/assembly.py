"""From settings and data to what the loop needs: network, loaders, objectives, the training utility."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rfdlc.data.augment import AUGMENTATIONS, Augment
from rfdlc.data.dataset import Dataset, Normalisation, Split
from rfdlc.data.images import ImageFiles
from rfdlc.data.loader import ResidentLoader
from rfdlc.data.streamed import StreamedLoader, View
from rfdlc.decide.classes import Classes
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError
from rfdlc.training.config import Settings
from rfdlc.training.factories import Matrix
from rfdlc.training.loop import Loader, PreparedStage, outputs_of, spans
from rfdlc.training.losses import Loss
from rfdlc.training.methods import Method, Stage
from rfdlc.training.networks.backbones import backbone, own
from rfdlc.training.networks.combinations import Particles
from rfdlc.training.networks.particles import Combine, ParticleNet
from rfdlc.training.per_run import RunLosses
from rfdlc.training.processes.group import ALONE, Processes
from rfdlc.training.step import reduced

OwnBackbone = Callable[[], nn.Module] | nn.Module

SMALL_STEP = 10_000_000  # multiplications
EVALUATED_AT_ONCE = 256  # samples
TRAINING_UTILITIES = ("none", "one-hot", "tail-sensitive", "tail-sensitive-by-rank")


def choose_device(wanted: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise InputError(f"setting device={wanted!r} is no device: expected auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"setting device={wanted!r} needs a GPU, but torch finds none: use device=cpu or device=auto")
    return device


def method_net(
    method: Method,
    settings: Settings,
    shape: tuple[int, ...],
    classes: Classes,
    seeds: Sequence[int],
    network: OwnBackbone | None = None,
) -> ParticleNet:
    """The stack of len(seeds) runs of a method, with its combination."""
    return build_net(settings, shape, len(classes), seeds, network, partial(method.combination, settings, classes))


def build_net(
    settings: Settings,
    shape: tuple[int, ...],
    classes: int,
    seeds: Sequence[int],
    network: OwnBackbone | None = None,
    combine: Combine = lambda runs, width: Particles(),
) -> ParticleNet:
    """The stack of len(seeds) runs for samples of this shape; `network` is a backbone of the user's own."""
    if settings.backbone == "own" and network is None:
        raise InputError("this run has a backbone of its own, which a folder cannot hold: pass backbone=... again")
    name = _automatic(shape) if settings.backbone == "auto" else settings.backbone
    found = backbone(name, shape, settings.widths) if network is None else own(network, torch.zeros(2, *shape))
    net = ParticleNet(
        found,
        classes,
        particles=settings.particles,
        seeds=seeds,
        shared_stages=min(settings.shared_stages, len(found.stages) - (name == "mlp")),
        head=settings.head,
        head_scale=settings.head_scale,
        combine=combine,
    )
    net.recompute = settings.checkpoint_activations
    return net


def _automatic(shape: tuple[int, ...]) -> str:
    """A network by the shape of a sample: (F,), or (channels, height, width)."""
    side = min(shape[1:]) if len(shape) == 3 else 0
    return "mlp" if side < 16 else "resnet32" if side < 64 else "resnet50"


def place(net: ParticleNet, device: torch.device) -> ParticleNet:
    """On the device, in the memory layout that is fast there."""
    moved = net.to(device)
    return moved.to(memory_format=torch.channels_last) if device.type == "cuda" else moved  # type: ignore[call-overload]


@contextmanager
def sensible_threads(net: ParticleNet, settings: Settings) -> Iterator[None]:
    """One thread for steps so small that handing work to others costs more than it saves (small MLPs on a CPU)."""
    before, weights = torch.get_num_threads(), list(net.parameters())
    small = all(w.ndim < 4 for w in weights) and sum(w.numel() for w in weights) * settings.batch_size < SMALL_STEP
    if small:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Recipe(NamedTuple):
    """What one run of a stack trains: its method and settings, its seed, the classes as counted on its samples."""

    method: Method
    settings: Settings
    seed: int
    classes: Classes
    positions: NDArray[np.int64] | None = None  # of its samples in the training part; none: all of them


def build_parts(
    method: Method, settings: Settings, data: Dataset, seeds: Sequence[int], device: torch.device,
    processes: Processes = ALONE,
) -> list[PreparedStage]:  # fmt: skip
    """The method's stages with their loaders and objectives, which see the training part of the data alone."""
    recipes = [Recipe(method, settings, seed, data.classes) for seed in seeds]
    return [stack_part(recipes, data, number, device, processes) for number in range(len(method.stages))]


def stack_part(
    recipes: Sequence[Recipe], data: Dataset, number: int, device: torch.device, processes: Processes = ALONE
) -> PreparedStage:
    """The stage of this number for a stack of runs, each by its own recipe."""
    stages = tuple(recipe.method.stages[number] for recipe in recipes)
    each = tuple(recipe.settings.changed(stage.settings) for recipe, stage in zip(recipes, stages, strict=True))
    start, end = spans(recipes[0].method.stage_epochs(recipes[0].settings))[number]
    loader = training_loader(each[0], data, recipes, device, processes)
    losses = [_loss(*run) for run in zip(recipes, stages, each, strict=True)]
    return PreparedStage(stages, each, start, end, loader, RunLosses(losses).to(device))


def _loss(recipe: Recipe, stage: Stage, settings: Settings) -> Loss:
    make = stage.loss or recipe.method.loss
    return make(settings, recipe.classes, training_utility(recipe.settings, recipe.classes))


def training_loader(
    settings: Settings, data: Dataset, recipes: Sequence[Recipe], device: torch.device, processes: Processes = ALONE
) -> Loader:
    """Batches of the training part: from the device's memory, or decoded by workers where images are files."""
    seeds, positions = [recipe.seed for recipe in recipes], [r.positions for r in recipes if r.positions is not None]
    share = processes.share(settings.batch_size, settings.accumulate)
    common: dict[str, Any] = {"batch_size": share, "sampling": settings.sampling, "seeds": seeds, "device": device}
    common |= {"rank": processes.rank, "world_size": processes.world}
    if isinstance(data.train.inputs, ImageFiles):
        view, workers = View(jitter=settings.jitter), _workers(settings, processes)
        return StreamedLoader(data.train, data.normalisation, view=view, workers=workers, **common)
    augment = augmentation(settings, data.kind)
    return ResidentLoader(data.train, data.normalisation, augment=augment, positions=positions or None, **common)


def augmentation(settings: Settings, kind: str) -> Augment | None:
    """Crop and flip for images unless something else is set; nothing for features."""
    if kind != "images":
        return None
    return replace(
        AUGMENTATIONS["crop-flip" if settings.augment == "auto" else settings.augment], cutout=settings.cutout
    )


def training_utility(settings: Settings, classes: Classes) -> Matrix | None:
    """The matrix trained with. A tail-sensitive one has no diagonal, as the authors': the likelihood has it already."""
    if settings.utility == "none":
        return None
    if settings.utility == "one-hot":
        return np.eye(len(classes))
    if settings.utility.startswith("tail-sensitive"):
        by_rank = settings.utility == "tail-sensitive-by-rank"
        matrix = Utility.tail_sensitive(classes, settings.penalty, by_rank=by_rank).matrix
        return matrix - np.diag(np.diag(matrix))
    if not Path(settings.utility).is_file():
        known = ", ".join(TRAINING_UTILITIES)
        raise InputError(f"setting utility={settings.utility!r} is neither a file nor one of {known}")
    matrix = Utility.read_csv(settings.utility, classes).matrix
    if matrix.shape[0] != matrix.shape[1]:
        raise InputError(f"{settings.utility} has actions beyond the classes: training needs a square utility")
    return matrix


def split_outputs(
    net: ParticleNet, split: Split, normalisation: Normalisation | None, settings: Settings, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Logits (R, M, N, C) of a split, on the CPU, and the uncertainty (R, N) that the network's combination states
    itself, if it does. Labels are not read."""
    logits, unsure = shared_outputs(net, split, normalisation, settings, device, ALONE)
    assert logits is not None
    return logits, unsure


def shared_outputs(
    net: ParticleNet, split: Split, normalisation: Normalisation | None, settings: Settings, device: torch.device,
    processes: Processes,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """The same by several processes, which share the samples out; all must call it, and process 0 has the result."""
    common: dict[str, Any] = {"device": device, "rank": processes.rank, "world_size": processes.world}
    bare = Split(split.inputs, np.zeros(len(split), dtype=np.int64))
    loader: ResidentLoader | StreamedLoader
    if isinstance(split.inputs, ImageFiles):
        workers = _workers(settings, processes)
        loader = StreamedLoader(bare, normalisation, batch_size=EVALUATED_AT_ONCE, workers=workers, **common)
    else:
        loader = ResidentLoader(bare, normalisation, batch_size=EVALUATED_AT_ONCE, **common)
    logits, unsure = outputs_of(net, loader.in_order(), lambda: _precision(settings, device))
    return processes.gathered(logits, 2), processes.gathered(unsure, 1)


def _workers(settings: Settings, processes: Processes) -> int | None:
    """Where nothing is set, processes on one machine share its cores."""
    if settings.workers >= 0 or processes.local == 1:
        return None if settings.workers < 0 else settings.workers
    return max(1, (os.cpu_count() or 1) // processes.local)


def _precision(settings: Settings, device: torch.device) -> Any:
    return torch.autocast(device.type, torch.bfloat16, enabled=reduced(settings, device))

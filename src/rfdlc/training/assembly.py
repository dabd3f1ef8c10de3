"""From config and data to what the loop needs: network, loaders, losses, the training utility."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rfdlc.data.augment import AUGMENTATIONS, Augment, draw_shares
from rfdlc.data.dataset import Dataset, Normalisation, Split
from rfdlc.data.images import ImageFiles
from rfdlc.data.loader import ResidentLoader
from rfdlc.data.streamed import StreamedLoader, View
from rfdlc.decide.classes import Classes
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError, expect
from rfdlc.training.config import TrainConfig
from rfdlc.training.distributed import SINGLE, ProcessGroup
from rfdlc.training.factories import Matrix
from rfdlc.training.losses import RunLosses
from rfdlc.training.methods import Method
from rfdlc.training.networks.backbones import backbone, own
from rfdlc.training.networks.particles import ParticleNet
from rfdlc.training.optimisation import rate
from rfdlc.training.step import reduced

OwnBackbone = Callable[[], nn.Module] | nn.Module
Positions = NDArray[np.int64]

SMALL_STEP = 10_000_000  # multiplications
EVALUATION_BATCH = 256  # samples


def choose_device(wanted: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise InputError(f"setting device={wanted!r} is not a device: expected auto, cpu, cuda or cuda:N") from None
    missing = f"setting device={wanted!r} needs a GPU, but torch finds none: use device=cpu or device=auto"
    expect(device.type != "cuda" or torch.cuda.is_available(), missing)
    return device


def method_net(
    method: Method, config: TrainConfig, shape: tuple[int, ...], classes: Classes, seeds: Sequence[int],
    network: OwnBackbone | None = None,
) -> ParticleNet:  # fmt: skip
    """The network for samples of this shape and len(seeds) runs; `network` is a backbone of the user's own."""
    name = config.backbone
    if ":" in name and network is None:
        try:
            network = resolve_name(name)
        except (ImportError, AttributeError, ValueError) as error:
            problem = f"setting backbone={name!r} cannot be imported ({error})"
            raise InputError(f"{problem}: expected package.module:function on the path") from None
    missing = "this run has a backbone of its own, which a folder cannot hold: pass backbone=... again"
    expect(name != "own" or network is not None, f"{missing}, or train with 'package.module:function'")
    if name == "auto":  # samples are (F,) or (channels, height, width)
        side = min(shape[1:]) if len(shape) == 3 else 0
        name = "mlp" if side < 16 else "resnet32" if side < 64 else "resnet50"
    with torch.random.fork_rng(devices=[]):  # a network of the user's own draws its first weights
        found = backbone(name, shape, config.widths) if network is None else own(network, torch.zeros(2, *shape))
        options: dict[str, Any] = {"head": config.head, "head_scale": config.head_scale, "seeds": seeds}
        options["shared_stages"] = min(config.shared_stages, len(found.stages) - (name == "mlp"))
        combine = partial(method.combination, config, classes)
        net = ParticleNet(found, len(classes), particles=config.particles, combine=combine, **options)
    net.recompute = config.checkpoint_activations
    return net


@contextmanager
def sensible_threads(net: ParticleNet, config: TrainConfig) -> Iterator[None]:
    """One thread for steps so small that more threads cost more than they save (small MLPs on a CPU)."""
    before, weights = torch.get_num_threads(), list(net.parameters())
    small = all(w.ndim < 4 for w in weights) and sum(w.numel() for w in weights) * config.batch_size < SMALL_STEP
    if small:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class PreparedStage:
    """The stage of this number for a stack of runs: what it trains on and for, from the epoch after `start` to `end`.

    Every run has a method, a config and classes of its own, as counted on its samples. `positions` are those of its
    samples in the training split, one array per run; none where all runs have all of it.
    """

    def __init__(
        self, number: int, runs: Sequence[tuple[Method, TrainConfig, Classes]], data: Dataset, device: torch.device,
        group: ProcessGroup = SINGLE, positions: Sequence[Positions] = (),
    ) -> None:  # fmt: skip
        self.stages = [method.stages[number] for method, _, _ in runs]
        both = list(zip(runs, self.stages, strict=True))
        self.each = [config.replace(**stage.settings) for (_, config, _), stage in both]
        self.stage, self.settings = self.stages[0], self.each[0]  # what the runs agree in
        self.start, self.end = runs[0][0].spans(runs[0][1])[number]
        drawn: dict[str, Any] = {"seeds": [config.seed for config in self.each], "sampling": self.settings.sampling}
        drawn["batch_size"] = group.shard_size(self.settings.batch_size, self.settings.accumulate)
        if isinstance(data.train.inputs, ImageFiles):
            drawn["view"] = View(jitter=self.settings.jitter)
        else:
            drawn |= {"augment": augmentation(self.settings, data.kind), "positions": positions or None}
        self.loader = _loader(data.train, data.normalisation, self.settings, device, group, **drawn)
        losses = [
            (stage.loss or method.loss)(changed, classes, training_utility(config, classes))
            for ((method, config, classes), stage), changed in zip(both, self.each, strict=True)
        ]
        self.losses = RunLosses(losses).to(device)

    def rates(self, epoch: int) -> list[float]:
        """The learning rate of each run."""
        rates, done, length = [], epoch - self.start, self.end - self.start
        for stage, it in zip(self.stages, self.each, strict=True):
            factor = rate(done, length, it.schedule, warmup=it.warmup, milestones=it.milestones, decay=it.decay)
            rates.append(it.learning_rate * (stage.number("learning_rate_factor", it) * factor))
        return rates

    def mixing(self, seeds: Sequence[int], epoch: int) -> Tensor:
        """(steps, R, 3): what is drawn for mixing each batch."""
        alphas = [config.mixup or config.cutmix or 1.0 for config in self.each]
        drawn = [draw_shares(a, self.loader.steps, seed, epoch) for a, seed in zip(alphas, seeds, strict=True)]
        return torch.stack(drawn, 1)


def build_stages(
    method: Method, config: TrainConfig, data: Dataset, seeds: Sequence[int], device: torch.device,
    group: ProcessGroup = SINGLE,
) -> list[PreparedStage]:  # fmt: skip
    """The method's stages with their loaders and losses, which see only the training split."""
    runs = [(method, config.replace(seed=seed), data.classes) for seed in seeds]
    return [PreparedStage(number, runs, data, device, group) for number in range(len(method.stages))]


def augmentation(config: TrainConfig, kind: str) -> Augment | None:
    """The augmentation of images that a config names; other kinds of samples have none."""
    chosen = AUGMENTATIONS["crop-flip" if config.augment == "auto" else config.augment]
    return replace(chosen, cutout=config.cutout) if kind == "images" else None


def _loader(
    split: Split, normalisation: Normalisation | None, config: TrainConfig, device: torch.device, group: ProcessGroup,
    **options: Any,
) -> ResidentLoader | StreamedLoader:  # fmt: skip
    """Batches of a split: from the device's memory, or decoded by workers where images are files."""
    options |= {"device": device, "rank": group.rank, "world_size": group.world_size}
    if not isinstance(split.inputs, ImageFiles):
        return ResidentLoader(split, normalisation, **options)
    workers = config.workers if config.workers >= 0 else None
    if workers is None and group.local_world_size > 1:  # processes on one machine divide its cores among them
        workers = max(1, (os.cpu_count() or 1) // group.local_world_size)
    return StreamedLoader(split, normalisation, workers=workers, **options)


def training_utility(config: TrainConfig, classes: Classes) -> Matrix | None:
    """The matrix to train with. A tail-sensitive one has no diagonal, as the authors': the likelihood has it."""
    name = config.utility
    if name in ("none", "one-hot"):
        return np.eye(len(classes)) if name == "one-hot" else None
    if name in ("tail-sensitive", "tail-sensitive-by-rank"):
        matrix = Utility.tail_sensitive(classes, config.penalty, by_rank=name == "tail-sensitive-by-rank").matrix
        return matrix - np.diag(np.diag(matrix))
    known = "none, one-hot, tail-sensitive, tail-sensitive-by-rank"
    expect(Path(name).is_file(), f"setting utility={name!r} is neither a file nor one of {known}")
    matrix = Utility.read_csv(name, classes).matrix
    square = matrix.shape[0] == matrix.shape[1]
    expect(square, f"{name} has actions that are not classes: training needs a square utility")
    return matrix


@torch.no_grad()
def split_outputs(
    net: ParticleNet, split: Split, normalisation: Normalisation | None, config: TrainConfig, device: torch.device,
    group: ProcessGroup = SINGLE,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Logits (R, M, N, C) and, if its combination states it, the uncertainty (R, N) of a split, on the CPU of rank 0.

    Labels are not read. Each rank computes its shard of the samples.
    """
    bare = Split(split.inputs, np.zeros(len(split), dtype=np.int64))
    loader = _loader(bare, normalisation, config, device, group, batch_size=EVALUATION_BATCH)
    logits, unsure = [], []
    net.eval()
    with torch.autocast(device.type, torch.bfloat16, enabled=reduced(config, device)):
        for inputs, _ in loader.in_order():
            particles = net.outputs(inputs.expand(net.runs, *inputs.shape))  # every run sees the same samples
            combined, found = net.combination(*particles)
            logits.append(combined.float())
            unsure += [] if found is None else [found.float()]
    both = ((logits, 2), (unsure, 1))
    of_samples, of_uncertainty = (group.gather(torch.cat(t, dim).cpu() if t else None, dim) for t, dim in both)
    return of_samples, of_uncertainty

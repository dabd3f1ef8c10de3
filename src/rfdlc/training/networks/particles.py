"""ParticleNet: R runs of M particles as one module. A shared trunk per run, then M branches, M heads, a combination."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional

from rfdlc.errors import expect
from rfdlc.training.networks.backbones import Backbone
from rfdlc.training.networks.combinations import Combination
from rfdlc.training.networks.fused.stages import usable
from rfdlc.training.networks.operations import cosines, recomputed
from rfdlc.training.networks.stack import IMAGES_IN_FRONT, Generators, Linear, reset


class CosineHead(nn.Module):
    """Features and class weights L2-normalised: logit = scale * cos(feature, weight). (K, B, F) -> (K, B, C)."""

    def __init__(self, networks: int, features: int, classes: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(networks, features, classes))

    def reset(self, generators: Generators) -> None:
        for part, generator in zip(self.weight.chunk(len(generators)), generators, strict=True):
            part.uniform_(-1, 1, generator=generator)
        self.weight.copy_(functional.normalize(self.weight, dim=1))

    def forward(self, x: Tensor) -> Tensor:
        return cosines(x, self.weight, self.scale)


HEADS = ("cosine", "linear")
Combine = Callable[[int, int], Combination]  # (runs, width of the features) -> a combination


class ParticleNet(nn.Module):
    """One batch per run, (R, B, ...), to the logits it predicts: (R, M, B, C), or (R, 1, B, C) where they are combined.

    The first `shared_stages` stages of the backbone exist once per run, the others once per particle.
    """

    recompute = False  # keep the inputs of stages alone for the backward pass
    fused = False  # whether a training step may use fused stages

    def __init__(
        self, backbone: Backbone, classes: int, *, particles: int = 1, seeds: Sequence[int] = (0,),
        shared_stages: int = 0, head: str = "cosine", head_scale: float = 30.0,
        combine: Combine = lambda runs, width: Combination(),
    ) -> None:  # fmt: skip
        super().__init__()
        most = len(backbone.stages)
        expect(shared_stages <= most, f"shared_stages {shared_stages} is not possible: the backbone has {most} stages")
        self.seeds, self.runs, self.particles = tuple(seeds), len(seeds), particles
        self.layout, self.fusable = backbone.layout, backbone.fused
        networks = self.runs * particles
        self.trunk = nn.Sequential(*(stage(self.runs) for stage in backbone.stages[:shared_stages]))
        self.branches = nn.Sequential(*(stage(networks) for stage in backbone.stages[shared_stages:]))
        size = networks, backbone.width, classes
        self.head = CosineHead(*size, head_scale) if head == "cosine" else Linear(*size)
        self.combination: Combination = combine(self.runs, backbone.width)
        reset(self, seeds)

    def features(self, x: Tensor) -> Tensor:
        """(R, B, ...) -> (R*M, B, F)."""
        fused = self.fused and self.trunk.training and self.branches.training and usable(x)
        layout = IMAGES_IN_FRONT if fused else self.layout
        shared = self._through(self.trunk, layout.fold(x))
        if not len(self.branches):
            return layout.unfold(shared, self.runs).repeat_interleave(self.particles, 0)
        spread = layout.spread(shared, self.runs, self.particles) if self.particles > 1 else shared
        return layout.unfold(self._through(self.branches, spread), self.runs * self.particles)

    def _through(self, stages: nn.Sequential, x: Tensor) -> Tensor:
        for stage in stages:
            x = recomputed(stage, x) if self.recompute else stage(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.combination(*self.outputs(x))[0]

    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (R, M, B, C) of the particles, not combined, and their features (R, M, B, F), in full precision."""
        features, kind = self.features(x).to(self.head.weight.dtype), x.device.type
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
            logits = self.head(features)
        return self._by_run(logits), self._by_run(features)

    def particle_logits(self, x: Tensor) -> Tensor:
        """What losses see: (R, M, B, C)."""
        return self.outputs(x)[0]

    def routing(self, x: Tensor) -> Tensor:
        """What a router's loss sees: logits and, as a last column, its scores (0 for the last expert)."""
        logits, features = self.outputs(x)
        scores = functional.pad(self.combination.scores(logits, features), (0, 0, 0, 1))  # type: ignore[operator]
        return torch.cat([logits, scores[..., None]], -1)

    def _by_run(self, values: Tensor) -> Tensor:
        return values.view(self.runs, self.particles, *values.shape[1:])  # (R*M, ...) -> (R, M, ...)

    @property
    def head_weights(self) -> Tensor:
        """(R, M, F, C): what the paper's repulsion acts on."""
        return self._by_run(self.head.weight)

    def parts(self, name: str) -> list[nn.Module]:
        """What a stage trains: all particles, their heads alone, or the router of its combination."""
        body: list[nn.Module] = [self.trunk, self.branches, self.head]
        return {"all": body, "head": body[2:], "router": [self.get_submodule("combination")]}[name]


def place(net: ParticleNet, device: torch.device, channels_last: bool | None = None) -> ParticleNet:
    """On the device, in the memory layout that is fast there: by default channels last on a GPU."""
    moved = net.to(device)
    if (device.type == "cuda") if channels_last is None else channels_last:
        for tensor in (*moved.parameters(), *moved.buffers()):
            if tensor.ndim in (4, 5):  # 5: stacked weights of copies
                tensor.data = tensor.data.movedim(-3, -1).contiguous().movedim(-1, -3)
    return moved

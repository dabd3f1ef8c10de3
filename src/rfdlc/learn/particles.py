"""ParticleNet: R runs of M particles as one module. A shared trunk a run, then M branches, then M heads."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from rfdlc.errors import InputError, choose
from rfdlc.learn.backbones import Backbone
from rfdlc.learn.stack import Generators, Linear, reset


class CosineHead(nn.Module):
    """Features and class weights L2-normalised: logit = scale * cos(feature, weight). (K, B, F) -> (K, B, C)."""

    def __init__(self, networks: int, features: int, classes: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(networks, features, classes))

    def reset(self, generators: Generators) -> None:
        """Uniform directions, of length one."""
        for part, generator in zip(self.weight.chunk(len(generators)), generators, strict=True):
            part.uniform_(-1, 1, generator=generator)
        self.weight.copy_(functional.normalize(self.weight, dim=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * torch.bmm(functional.normalize(x, dim=-1), functional.normalize(self.weight, dim=1))


HEADS = ("cosine", "linear")


class ParticleNet(nn.Module):
    """A batch a run, (R, B, ...), to logits (R, M, B, C).

    The first `shared_stages` stages of the backbone exist once a run, the others once a particle.
    """

    def __init__(
        self,
        backbone: Backbone,
        classes: int,
        *,
        particles: int = 1,
        seeds: Sequence[int] = (0,),
        shared_stages: int = 0,
        head: str = "cosine",
        head_scale: float = 30.0,
    ) -> None:
        super().__init__()
        if not 0 <= shared_stages <= len(backbone.stages):
            raise InputError(
                f"shared_stages {shared_stages} is not possible: the backbone has {len(backbone.stages)} stages"
            )
        choose("head", head, HEADS)
        self.seeds, self.runs, self.particles = tuple(seeds), len(seeds), particles
        self.layout = backbone.layout
        networks = self.runs * particles
        self.trunk = nn.Sequential(*(stage(self.runs) for stage in backbone.stages[:shared_stages]))
        self.branches = nn.Sequential(*(stage(networks) for stage in backbone.stages[shared_stages:]))
        self.head = (
            CosineHead(networks, backbone.width, classes, head_scale)
            if head == "cosine"
            else Linear(networks, backbone.width, classes)
        )
        reset(self, seeds)

    def features(self, x: Tensor) -> Tensor:
        """(R, B, ...) -> (R*M, B, F)."""
        shared = self.trunk(self.layout.fold(x))
        if not len(self.branches):
            return self.layout.unfold(shared, self.runs).repeat_interleave(self.particles, 0)
        spread = self.layout.spread(shared, self.runs, self.particles) if self.particles > 1 else shared
        return self.layout.unfold(self.branches(spread), self.runs * self.particles)

    def forward(self, x: Tensor) -> Tensor:
        features = self.features(x)
        with torch.autocast(
            x.device.type, enabled=False
        ):  # logits in the weights' precision, whatever the features came in
            logits: Tensor = self.head(features.to(self.head.weight.dtype))
        return logits.unflatten(0, (self.runs, self.particles))

    @property
    def head_weights(self) -> Tensor:
        """(R, M, F, C): what the paper's repulsion acts on."""
        return self.head.weight.unflatten(0, (self.runs, self.particles))

"""Layers that hold K networks as one: grouped convolutions and batched matrix products.

Dimension 0 of every parameter and buffer runs over the networks, run by run, so that `tensor.chunk(R)` is the state of
each of R runs. A network has the same weights whether it is built by itself or inside a stack. Images are folded into
channels, (B, K*C, H, W), so that convolutions are grouped; everything else leads with the networks, (K, B, F).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from rfdlc.training.distributed import ProcessGroup
from rfdlc.training.networks.operations import EPSILON, MOMENTUM, HiddenLayer, affine, by_hand, shared_norm

Generators = Sequence[torch.Generator]  # one per run


def _he_normal(weight: Tensor, fan_in: int, generators: Generators) -> None:
    for part, generator in zip(weight.chunk(len(generators)), generators, strict=True):
        part.normal_(0, (2 / fan_in) ** 0.5, generator=generator)


class Conv(nn.Module):
    """K convolutions without bias: (B, K*inputs, H, W) -> (B, K*outputs, H', W'). He initialisation."""

    def __init__(self, networks: int, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.stride, self.padding, self.groups = stride, kernel // 2, networks * groups
        self.weight = nn.Parameter(torch.empty(networks * outputs, inputs // groups, kernel, kernel))

    def reset(self, generators: Generators) -> None:
        _he_normal(self.weight, self.weight[0].numel(), generators)

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(x, self.weight, None, self.stride, self.padding, 1, self.groups)


class BatchNorm(nn.Module):
    """Batch normalisation of K networks' channels, by the samples of this process or of all `shared` ones."""

    shared: ProcessGroup | None = None
    momentum = MOMENTUM
    mean: Tensor
    variance: Tensor

    def __init__(self, networks: int, channels: int) -> None:
        super().__init__()
        zeros = torch.zeros(networks * channels)
        self.weight, self.bias = nn.Parameter(torch.ones_like(zeros)), nn.Parameter(zeros.clone())
        self.register_buffer("mean", zeros)
        self.register_buffer("variance", torch.ones_like(zeros))

    def forward(self, x: Tensor) -> Tensor:
        own = self.mean, self.variance, self.weight, self.bias
        if self.training and self.shared is not None:
            return shared_norm(x, *own, self.shared)
        return functional.batch_norm(x, *own, self.training, self.momentum, EPSILON)


class Linear(nn.Module):
    """K affine maps: (K, B, inputs) -> (K, B, outputs). He initialisation, bias zero."""

    def __init__(self, networks: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(networks, inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(networks, 1, outputs))

    def reset(self, generators: Generators) -> None:
        _he_normal(self.weight, self.weight.shape[1], generators)
        self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return affine(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class LayerNorm(nn.Module):
    """Layer normalisation with K scales and shifts, on (K, B, F)."""

    def __init__(self, networks: int, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(networks, 1, features))
        self.bias = nn.Parameter(torch.zeros(networks, 1, features))

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], eps=EPSILON) * self.weight + self.bias


class Hidden(nn.Module):
    """Affine map, layer norm, ReLU: (K, B, inputs) -> (K, B, outputs)."""

    def __init__(self, networks: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.map, self.norm = Linear(networks, inputs, outputs), LayerNorm(networks, outputs)

    def forward(self, x: Tensor) -> Tensor:
        if not by_hand(x, self.map.weight):
            return self.norm(self.map(x)).relu()
        return HiddenLayer.apply(x, self.map.weight, self.map.bias, self.norm.weight, self.norm.bias)


def share_statistics(module: nn.Module, processes: ProcessGroup) -> None:
    """From now on, batch norm normalises by the samples of all these processes."""
    for layer in module.modules():
        if isinstance(layer, BatchNorm):
            layer.shared = processes


@torch.no_grad()
def reset(module: nn.Module, seeds: Sequence[int]) -> None:
    """Draw the weights of every layer that has any to draw; run r uses seeds[r] alone, in module order."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    for layer in module.modules():
        if hasattr(layer, "reset"):
            layer.reset(generators)


@dataclass(frozen=True)
class Layout:
    """Where the networks' axis lies: how a batch (R, B, ...) enters a stack, spreads over branches, and leaves it."""

    fold: Callable[[Tensor], Tensor]  # (R, B, ...) -> stacked for R networks
    spread: Callable[[Tensor, int, int], Tensor]  # stacked for R, (R, M) -> stacked for R*M
    unfold: Callable[[Tensor, int], Tensor] = lambda x, networks: x  # pooled features stacked for K -> (K, B, F)


def _spread_channels(x: Tensor, runs: int, particles: int) -> Tensor:
    """Written over the last axis, so that channels-last stays channels-last."""
    batch, _, *size = x.shape
    pixels = x.permute(0, 2, 3, 1).unflatten(-1, (runs, 1, -1))
    return pixels.expand(batch, *size, runs, particles, pixels.shape[-1]).flatten(3).permute(0, 3, 1, 2)


IN_CHANNELS = Layout(
    lambda x: x.transpose(0, 1).flatten(1, 2).contiguous(memory_format=torch.channels_last),
    _spread_channels,
    lambda x, networks: x.unflatten(1, (networks, -1)).transpose(0, 1),
)
# Images with the networks in front and channels last, (K, B, H, W, C): what fused stages take
IMAGES_IN_FRONT = Layout(
    lambda x: x.movedim(2, -1).to(torch.get_autocast_dtype(x.device.type)).contiguous(),
    lambda x, runs, particles: x.repeat_interleave(particles, 0),
)
IN_FRONT = Layout(  # one run is spread without a copy
    lambda x: x,
    lambda x, runs, particles: x.expand(particles, *x.shape[1:]) if runs == 1 else x.repeat_interleave(particles, 0),
)

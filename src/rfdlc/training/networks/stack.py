"""Layers that hold K networks as one: grouped convolutions and batched matrix products.

Dimension 0 of every parameter and buffer runs over the networks, run by run, so that
`tensor.chunk(R)` is the state of each of R runs. A network has the same weights whether
it is built by itself or inside a stack. Images are folded into channels, (B, K*C, H,
W), so that convolutions are grouped; everything else leads with the networks, (K, B,
F).
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rfdlc.training.distributed import ProcessGroup

Generators = Sequence[torch.Generator]  # one per run
EPSILON, MOMENTUM = 1e-5, 0.1  # of layer norm and batch norm; of running statistics
PIXELS, CHANNELS = (
    (0, 2, 3),
    (1, -1, 1, 1),
)  # axes of (B, channels, H, W), and the shape of one value per channel
# a stream of random numbers beside those of order, augmentation, mixing and sampled
# weights
DROPPED = 4
STRIDE, FACTORS, LOW = (
    -1640531527,
    (-2048144789, -1028477387),
    2**17 - 1,
)  # 2^32 / golden ratio, MurmurHash3's, 17 bits
aten = torch.ops.aten


def by_hand(x: Tensor, weight: Tensor) -> bool:
    """Whether gradients are taken as here: in training on a CPU, in full precision."""
    training = torch.is_grad_enabled() and weight.requires_grad
    return training and x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


def _input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    """g @ w^T: BLAS libraries multiply such small matrices several times faster by a
    plain one than by a transposed.
    """
    return gradient.bmm(weight.mT.contiguous())


class _Affine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.baddbmm(bias, x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        by_input = (
            _input_gradient(gradient, weight) if ctx.needs_input_grad[0] else None
        )
        return by_input, x.mT.bmm(gradient), gradient.sum(1, keepdim=True)


class _Cosines(torch.autograd.Function):
    """With u = w/|w| and z = s u'x/|x|: the gradient of z by x is s u/|x| - z x/|x|^2,
    that by u is s x/|x|.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: float) -> Tensor:
        inverse = (
            torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            .clamp_(min=1e-12)
            .reciprocal_()
        )
        length = torch.linalg.vector_norm(weight, dim=1, keepdim=True).clamp_(min=1e-12)
        unit, factor = weight / length, scale * inverse
        logits = torch.bmm(x, unit).mul_(factor)
        ctx.save_for_backward(x, unit, length, inverse, factor, logits)
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None]:
        x, unit, length, inverse, factor, logits = ctx.saved_tensors
        scaled, by_input = gradient * factor, None
        if ctx.needs_input_grad[0]:
            along = (
                (gradient * logits).sum(-1, keepdim=True).mul_(inverse).mul_(inverse)
            )
            by_input = _input_gradient(scaled, unit).addcmul_(x, along, value=-1)
        by_unit = x.mT.bmm(scaled)
        by_weight = by_unit.addcmul_(
            unit, (unit * by_unit).sum(1, keepdim=True), value=-1
        ).div_(length)
        return by_input, by_weight, None


class HiddenLayer(torch.autograd.Function):
    """Affine map, layer norm, ReLU in half as many passes over memory as autograd
    makes.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor
    ) -> Tensor:
        before = torch.baddbmm(bias, x, weight)
        one = x.new_ones(before.shape[-1:])  # a weight, even of one, makes it quicker
        normed, mean, inverse = torch.native_layer_norm(
            before, before.shape[-1:], one, None, EPSILON
        )
        active = torch.addcmul(shift, normed, scale).relu_()
        ctx.save_for_backward(x, weight, scale, before, normed, mean, inverse, active)
        return active

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale, before, normed, mean, inverse, active = ctx.saved_tensors
        ones = gradient.new_ones(
            len(x), 1, x.shape[1]
        )  # a product with them is a sum over the batch
        gated = aten.threshold_backward(gradient, active, 0)
        by_scale, by_shift = ones.bmm(normed.mul_(gated)), ones.bmm(gated)
        statistics = before.shape[-1:], mean, inverse, None, None, (True, False, False)
        by_before = aten.native_layer_norm_backward(
            gated.mul_(scale), before, *statistics
        )[0]
        by_input = (
            _input_gradient(by_before, weight) if ctx.needs_input_grad[0] else None
        )
        return by_input, x.mT.bmm(by_before), ones.bmm(by_before), by_scale, by_shift


class _SharedNorm(torch.autograd.Function):
    """Batch norm with the mean and variance of the global batch, of which every process
    has a shard.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, processes: ProcessGroup
    ) -> Any:
        values = x.to(weight.dtype)
        variance, mean = torch.var_mean(values, PIXELS, correction=0)
        samples = (values[:, :1].numel() * torch.ones_like(mean[:1])).expand_as(mean)
        means, variances, counts = processes.all_gather(
            torch.stack([mean, variance, samples])
        ).unbind(1)  # (world, C)
        total = counts.sum(0)
        mean = (counts * means).sum(0) / total
        variance = (counts * (variances + (means - mean) ** 2)).sum(
            0
        ) / total  # within and between processes
        scale = (variance + EPSILON).rsqrt()
        ctx.save_for_backward(x, weight, mean, scale, total)
        ctx.processes = processes
        normed = (values - mean.view(CHANNELS)) * (scale * weight).view(
            CHANNELS
        ) + bias.view(CHANNELS)
        ctx.mark_non_differentiable(mean, variance, total)
        return normed.to(x.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, mean, scale, total = ctx.saved_tensors
        given = gradients[0].to(weight.dtype)
        normed = (x.to(weight.dtype) - mean.view(CHANNELS)) * scale.view(CHANNELS)
        sums = torch.stack([given.sum(PIXELS), (given * normed).sum(PIXELS)])
        along_one, along_normed = (ctx.processes.all_sum(sums) / total).view(
            2, *CHANNELS
        )
        found = (given - along_one - normed * along_normed) * (scale * weight).view(
            CHANNELS
        )
        return found.to(x.dtype), sums[1], sums[0], None


def called(
    module: nn.Module, tensors: Mapping[str, Tensor], x: Tensor, recompute: bool = False
) -> Tensor:
    """`module(x)` with these tensors in place of its own. With `recompute` only `x` is
    kept for the backward pass.

    The second pass then updates copies of statistics: they count a batch once.
    """
    if not (recompute and module.training and torch.is_grad_enabled()):
        return functional_call(module, dict(tensors), (x,)) if tensors else module(x)
    passes, buffers = (
        count(),
        {name: tensors.get(name, own) for name, own in module.named_buffers()},
    )

    def run(values: Tensor) -> Tensor:
        copies = (
            {name: own.clone() for name, own in buffers.items()} if next(passes) else {}
        )
        return functional_call(module, {**tensors, **copies}, (values,))

    return checkpoint(run, x, use_reentrant=False)


def _he_normal(weight: Tensor, fan_in: int, generators: Generators) -> None:
    for part, generator in zip(weight.chunk(len(generators)), generators, strict=True):
        part.normal_(0, (2 / fan_in) ** 0.5, generator=generator)


def _unit_directions(weight: Tensor, generators: Generators) -> None:
    for part, generator in zip(weight.chunk(len(generators)), generators, strict=True):
        part.uniform_(-1, 1, generator=generator)
    weight.copy_(functional.normalize(weight, dim=1))


class Conv(nn.Module):
    """K convolutions without bias: (B, K*inputs, H, W) -> (B, K*outputs, H', W'). He
    initialisation.
    """

    def __init__(
        self,
        networks: int,
        inputs: int,
        outputs: int,
        kernel: int,
        stride: int = 1,
        groups: int = 1,
    ) -> None:
        super().__init__()
        self.stride, self.padding, self.groups = stride, kernel // 2, networks * groups
        self.weight = nn.Parameter(
            torch.empty(networks * outputs, inputs // groups, kernel, kernel)
        )

    def reset(self, generators: Generators) -> None:
        _he_normal(self.weight, self.weight[0].numel(), generators)

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(
            x, self.weight, None, self.stride, self.padding, 1, self.groups
        )


class BatchNorm(nn.Module):
    """Batch normalisation of K networks' channels, by the samples of this process or of
    all `shared` ones.
    """

    shared: ProcessGroup | None = None
    momentum = MOMENTUM
    mean: Tensor
    variance: Tensor

    def __init__(self, networks: int, channels: int) -> None:
        super().__init__()
        zeros = torch.zeros(networks * channels)
        self.weight, self.bias = (
            nn.Parameter(torch.ones_like(zeros)),
            nn.Parameter(zeros.clone()),
        )
        self.register_buffer("mean", zeros)
        self.register_buffer("variance", torch.ones_like(zeros))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.shared is None:
            own = self.mean, self.variance, self.weight, self.bias
            return functional.batch_norm(x, *own, self.training, self.momentum, EPSILON)
        normed, mean, variance, total = _SharedNorm.apply(
            x, self.weight, self.bias, self.shared
        )
        with torch.no_grad():  # as torch does, with the unbiased variance
            self.mean.lerp_(mean, self.momentum)
            self.variance.lerp_(
                variance * total / (total - 1).clamp(min=1), self.momentum
            )
        return normed


class Linear(nn.Module):
    """K affine maps: (K, B, inputs) -> (K, B, outputs). He initialisation, bias
    zero.
    """

    def __init__(self, networks: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(networks, inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(networks, 1, outputs))

    def reset(self, generators: Generators) -> None:
        _he_normal(self.weight, self.weight.shape[1], generators)
        self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return (
            _Affine.apply(x, weight, bias)
            if by_hand(x, weight)
            else torch.baddbmm(bias, x, weight)
        )


class CosineHead(nn.Module):
    """Features and class weights L2-normalised: logit = scale * cos(feature, weight).
    (K, B, F) -> (K, B, C).
    """

    def __init__(
        self, networks: int, features: int, classes: int, scale: float
    ) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(networks, features, classes))

    def reset(self, generators: Generators) -> None:
        _unit_directions(self.weight, generators)

    def start(self, means: Tensor, present: Tensor) -> None:
        """In the directions of the `means` (K, F, C) of normalised features of the
        classes that are present.
        """
        self.weight.copy_(
            torch.where(present, functional.normalize(means, dim=1), self.weight)
        )

    def factors(self, x: Tensor) -> Tensor:
        """By which features are multiplied, (K, B, 1)."""
        return (x * x).sum(-1, keepdim=True).clamp(min=1e-24).rsqrt()

    def forward(self, x: Tensor) -> Tensor:
        if by_hand(x, self.weight):
            return _Cosines.apply(x, self.weight, self.scale)
        # factors are multiplied last: by C numbers, not F
        return torch.bmm(x, functional.normalize(self.weight, dim=1)) * (
            self.scale * self.factors(x)
        )


class MixedHead(nn.Module):
    """Cosine and linear heads in turn, particle by particle: scale * cos(x, w), or
    scale / 2 * (w'x / sqrt(F) + b).

    Which of them suits features depends on whether their length says something; an
    ensemble of both suits most.
    """

    linear: Tensor

    def __init__(
        self, networks: int, features: int, classes: int, scale: float, particles: int
    ) -> None:
        super().__init__()
        turn = torch.arange(networks) % particles % 2
        self.register_buffer("linear", (turn == 1).view(-1, 1, 1), persistent=False)
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(networks, features, classes))
        self.bias = nn.Parameter(torch.zeros(networks, 1, classes))

    def reset(self, generators: Generators) -> None:
        _unit_directions(self.weight, generators)
        self.bias.zero_()

    def start(self, means: Tensor, present: Tensor) -> None:
        """At the nearest class mean, by angle or by distance; `means` (K, F, C) are
        those of scaled features.
        """
        weight = torch.where(self.linear, means, functional.normalize(means, dim=1))
        bias = torch.where(self.linear, -(means * means).sum(1, keepdim=True) / 2, 0)
        self.weight.copy_(torch.where(present, weight, self.weight))
        self.bias.copy_(torch.where(present, bias, self.bias))

    def factors(self, x: Tensor) -> Tensor:
        """By which features are multiplied, (K, B, 1): cosines need unit vectors."""
        return torch.where(
            self.linear,
            x.shape[-1] ** -0.5,
            (x * x).sum(-1, keepdim=True).clamp(min=1e-24).rsqrt(),
        )

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.where(
            self.linear, self.weight, functional.normalize(self.weight, dim=1)
        )
        bias, scale = (
            torch.where(self.linear, self.bias, 0),
            torch.where(self.linear, self.scale / 2, self.scale),
        )
        return scale * (torch.bmm(x, weight) * self.factors(x) + bias)


class Dropout(nn.Module):
    """Sets a share of the features (K, B, F) to zero in training, and scales the others
    by 1 / (1 - share).

    What is dropped is a hash of the key of a network and the place in the batch: a
    network drops the same in any stack, and a captured step draws new places every
    time.
    """

    key: Tensor

    def __init__(self, networks: int, share: float) -> None:
        super().__init__()
        self.share = share
        self.register_buffer(
            "key", torch.zeros(networks, 1, 1, dtype=torch.int32), persistent=False
        )

    def seed(self, seeds: Sequence[int], epoch: int, rank: int = 0) -> None:
        """Set the keys for an epoch: those of a run depend on its seed, the epoch and
        the rank of the process.
        """
        each = [np.random.SeedSequence([DROPPED, seed, epoch, rank]) for seed in seeds]
        keys = np.concatenate(
            [own.generate_state(len(self.key) // len(seeds)) for own in each]
        )
        self.key.copy_(torch.from_numpy(keys.view(np.int32)).view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and self.share):
            return x
        places = torch.arange(
            x.shape[1] * x.shape[2], dtype=torch.int32, device=x.device
        ).view(x.shape[1:])
        mixed = places * STRIDE + self.key
        for (
            factor
        ) in FACTORS:  # the finalizer of MurmurHash3, in 32 bits that wrap around
            mixed = mixed.bitwise_xor_((mixed >> 15).bitwise_and_(LOW)).mul_(factor)
        self.key += FACTORS[
            0
        ]  # another step: a multiple of the stride would shift the same places
        return torch.where(
            mixed >= round(2**32 * self.share) - 2**31, x / (1 - self.share), 0
        )


class LayerNorm(nn.Module):
    """Layer normalisation with K scales and shifts, on (K, B, F)."""

    def __init__(self, networks: int, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(networks, 1, features))
        self.bias = nn.Parameter(torch.zeros(networks, 1, features))

    def forward(self, x: Tensor) -> Tensor:
        return (
            functional.layer_norm(x, x.shape[-1:], eps=EPSILON) * self.weight
            + self.bias
        )


class Hidden(nn.Module):
    """Affine map, layer norm, ReLU: (K, B, inputs) -> (K, B, outputs)."""

    def __init__(self, networks: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.map, self.norm = (
            Linear(networks, inputs, outputs),
            LayerNorm(networks, outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        if not by_hand(x, self.map.weight):
            return self.norm(self.map(x)).relu()
        return HiddenLayer.apply(
            x, self.map.weight, self.map.bias, self.norm.weight, self.norm.bias
        )


def share_statistics(module: nn.Module, processes: ProcessGroup) -> None:
    """From now on, batch norm normalises by the samples of all these processes."""
    for layer in module.modules():
        if isinstance(layer, BatchNorm):
            layer.shared = processes


@torch.no_grad()
def reset(module: nn.Module, seeds: Sequence[int]) -> None:
    """Draw the weights of every layer that has any to draw; run r uses seeds[r] alone,
    in module order.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    for layer in module.modules():
        getattr(layer, "reset", lambda generators: None)(generators)


class Layout(NamedTuple):
    """Where the networks' axis lies: how a batch (R, B, ...) enters a stack, spreads
    over branches, and leaves it.
    """

    fold: Callable[[Tensor], Tensor]  # (R, B, ...) -> stacked for R networks
    spread: Callable[
        [Tensor, int, int], Tensor
    ]  # stacked for R, (R, M) -> stacked for R*M
    unfold: Callable[[Tensor, int], Tensor] = lambda x, networks: (
        x
    )  # pooled features stacked for K -> (K, B, F)


def _spread_channels(x: Tensor, runs: int, particles: int) -> Tensor:
    batch, _, *size = (
        x.shape
    )  # written over the last axis, so that channels-last stays channels-last
    pixels = x.permute(0, 2, 3, 1).unflatten(-1, (runs, 1, -1))
    return (
        pixels.expand(batch, *size, runs, particles, pixels.shape[-1])
        .flatten(3)
        .permute(0, 3, 1, 2)
    )


IN_CHANNELS = Layout(
    lambda x: (
        x.transpose(0, 1).flatten(1, 2).contiguous(memory_format=torch.channels_last)
    ),
    _spread_channels,
    lambda x, networks: x.unflatten(1, (networks, -1)).transpose(0, 1),
)
# Images with the networks in front and channels last, (K, B, H, W, C): what fused
# stages take
IMAGES_IN_FRONT = Layout(
    lambda x: x.movedim(2, -1).to(torch.get_autocast_dtype(x.device.type)).contiguous(),
    lambda x, runs, particles: x.repeat_interleave(particles, 0),
)
IN_FRONT = Layout(  # one run is spread without a copy
    lambda x: x,
    lambda x, runs, particles: (
        x.expand(particles, *x.shape[1:])
        if runs == 1
        else x.repeat_interleave(particles, 0)
    ),
)

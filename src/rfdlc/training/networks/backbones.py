"""Backbones as stacks of K networks: ResNet-32 for small images, a CNN for less time,
ResNet-50 and others, an MLP.

A backbone is a list of stages. Each stage builds itself for any number of networks, so
that the first few can be shared by the particles of a run. The last stage gives
features, one vector per sample.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import pairwise
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from rfdlc.errors import InputError, choose, expect
from rfdlc.imports import check_trusted
from rfdlc.training.networks.fused import stages as fused
from rfdlc.training.networks.stack import (
    IN_CHANNELS,
    IN_FRONT,
    BatchNorm,
    Conv,
    Generators,
    Hidden,
    Layout,
)

WIDEST = 3072  # features that are still whitened: time grows with the cube
Stage = Callable[[int], nn.Module]  # number of networks -> the stage for all of them


class Backbone(NamedTuple):
    """Stages, the layout of what flows between them, and the width of the features."""

    layout: Layout
    stages: tuple[Stage, ...]
    width: int
    # whether its stages take IMAGES_IN_FRONT as well, where kernels for that are there
    fused: bool = False


class Stem(nn.Module):
    """3 x 3 convolution, batch norm, ReLU; or 7 x 7 with stride 2, and then a 3 x 3
    maximum with stride 2.
    """

    def __init__(
        self, networks: int, inputs: int, outputs: int, kernel: int = 3
    ) -> None:
        super().__init__()
        self.large = kernel > 3
        self.conv, self.norm = (
            Conv(networks, inputs, outputs, kernel, 1 + self.large),
            BatchNorm(networks, outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 5:
            return fused.run([fused.Unit(self.conv, self.norm)], x)
        active = self.norm(self.conv(x)).relu_()
        return functional.max_pool2d(active, 3, 2, 1) if self.large else active


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions; where the size halves, the shortcut takes every other
    pixel and pads channels.
    """

    def __init__(self, networks: int, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.networks, self.stride, self.padding = (
            networks,
            stride,
            (outputs - inputs) // 2,
        )
        self.conv1, self.norm1 = (
            Conv(networks, inputs, outputs, 3, stride),
            BatchNorm(networks, outputs),
        )
        self.conv2, self.norm2 = (
            Conv(networks, outputs, outputs, 3),
            BatchNorm(networks, outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.conv1(x)).relu_()
        return (self.norm2(self.conv2(y)) + self.shortcut(x)).relu_()

    def shortcut(self, x: Tensor) -> Tensor:
        """Padded over the last axis, network by network, so that channels-last memory
        stays channels-last.
        """
        if not self.padding:
            return x
        pixels = (
            x[:, :, :: self.stride, :: self.stride]
            .permute(0, 2, 3, 1)
            .unflatten(-1, (self.networks, -1))
        )
        return (
            functional.pad(pixels, (self.padding, self.padding))
            .flatten(3)
            .permute(0, 3, 1, 2)
        )


class BasicBlocks(nn.Sequential):
    """Residual blocks in a row; images with the networks in front, (K, B, H, W, C), go
    through fused.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 5:
            blocks: list[Any] = list(self)
            pairs = [
                (
                    fused.Unit(b.conv1, b.norm1),
                    fused.Unit(b.conv2, b.norm2, residual=True),
                )
                for b in blocks
            ]
            return fused.run([unit for pair in pairs for unit in pair], x)
        return super().forward(x)


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 (grouped in ResNeXt), 1 x 1; a projection where the shape
    changes.
    """

    def __init__(
        self,
        networks: int,
        inputs: int,
        outputs: int,
        stride: int,
        *,
        middle: int,
        groups: int,
    ) -> None:
        super().__init__()
        self.conv1, self.norm1 = (
            Conv(networks, inputs, middle, 1),
            BatchNorm(networks, middle),
        )
        self.conv2, self.norm2 = (
            Conv(networks, middle, middle, 3, stride, groups),
            BatchNorm(networks, middle),
        )
        self.conv3, self.norm3 = (
            Conv(networks, middle, outputs, 1),
            BatchNorm(networks, outputs),
        )
        projection = [
            Conv(networks, inputs, outputs, 1, stride),
            BatchNorm(networks, outputs),
        ]
        self.shortcut = nn.Sequential(
            *(projection if inputs != outputs or stride > 1 else [])
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.conv1(x)).relu_()
        y = self.norm2(self.conv2(y)).relu_()
        return (self.norm3(self.conv3(y)) + self.shortcut(x)).relu_()


class Pooled(nn.Module):
    """A last stage, averaged over pixels: (B, K*C, H, W) -> (B, K*C), or (K, B, H, W,
    C) -> (K, B, C).
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).mean((2, 3))


Row = tuple[
    Callable[..., nn.Module], int, int
]  # block (networks, inputs, outputs, stride), how many, outputs


def _resnet(
    stem: Stage,
    inputs: int,
    rows: Sequence[Row],
    row: type[nn.Sequential] = nn.Sequential,
) -> Backbone:
    """A stem, then rows of blocks; the size halves where a row begins, but for the
    first.
    """

    def stage(networks: int, number: int, inputs: int) -> nn.Module:
        block, count, outputs = rows[number]
        shapes = [
            (inputs, outputs, 1 + (number > 0)),
            *[(outputs, outputs, 1)] * (count - 1),
        ]
        blocks = row(*(block(networks, *shape) for shape in shapes))
        return blocks if number < len(rows) - 1 else Pooled(blocks)

    widths = [inputs, *(outputs for _, _, outputs in rows)]
    stages = [
        partial(stage, number=number, inputs=width)
        for number, width in enumerate(widths[:-1])
    ]
    return Backbone(IN_CHANNELS, (stem, *stages), widths[-1], fused=row is BasicBlocks)


def small_resnet(channels: int, blocks: int = 5, width: int = 16) -> Backbone:
    """CIFAR ResNet of 6 * blocks + 2 layers (ResNet-32: 5 blocks). Stages: stem, 16, 32
    and 64 channels.
    """
    rows = [(BasicBlock, blocks, outputs) for outputs in (width, 2 * width, 4 * width)]
    return _resnet(
        partial(Stem, inputs=channels, outputs=width), width, rows, BasicBlocks
    )


def large_resnet(
    channels: int, widths: Sequence[int] = (64, 128, 256, 512), groups: int = 1
) -> Backbone:
    """ResNet-50 (He et al. 2016), with 32 groups ResNeXt-50 32x4d (Xie et al. 2017).
    Stages: stem, then four.
    """
    blocks = [
        partial(Bottleneck, middle=width * (2 if groups > 1 else 1), groups=groups)
        for width in widths
    ]
    rows = [
        (block, count, 4 * width)
        for block, count, width in zip(blocks, (3, 4, 6, 3), widths, strict=True)
    ]
    return _resnet(partial(Stem, inputs=channels, outputs=64, kernel=7), 64, rows)


class MaxPooled(nn.Module):
    """3 x 3 convolution, batch norm, ReLU, and the maximum of 2 x 2 pixels; the last
    gives mean plus maximum of all.
    """

    def __init__(self, networks: int, inputs: int, outputs: int, last: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.last = (
            Conv(networks, inputs, outputs, 3),
            BatchNorm(networks, outputs),
            last,
        )

    def forward(self, x: Tensor) -> Tensor:
        active = functional.max_pool2d(
            self.norm(self.conv(x)).relu_(), 2, ceil_mode=True
        )
        return active.mean((2, 3)) + active.amax((2, 3)) if self.last else active


def small_cnn(channels: int, widths: Sequence[int] = (16, 32, 64, 64)) -> Backbone:
    """A plain CNN that learns much in few steps: the size halves after every
    convolution.
    """
    pairs = [*pairwise((channels, *widths))]
    stages = [
        partial(MaxPooled, inputs=i, outputs=o, last=k == len(pairs))
        for k, (i, o) in enumerate(pairs, 1)
    ]
    return Backbone(IN_CHANNELS, tuple(stages), widths[-1])


class Whitening(nn.Module):
    """Damps the directions in which samples of one class differ: x W, (K, B, F) -> (K,
    B, F).

    W is the inverse square root of share S + (1 - share) t I, with the covariance S
    within classes and the mean t of its diagonal (Friedman 1989, regularised
    discriminant analysis), with columns that make every variance one.
    """

    weight: Tensor

    def __init__(self, networks: int, features: int, share: float) -> None:
        super().__init__()
        self.share, self.skipped = (
            share,
            False,
        )  # skipped while inputs are white already
        self.register_buffer("weight", torch.eye(features).repeat(networks, 1, 1))

    def fit(self, within: Tensor, overall: Tensor) -> None:
        """To the covariances (R, F, F) of each run, within classes and of all
        samples.
        """
        values, vectors = torch.linalg.eigh(within)
        values = values.clamp(min=0)
        mean = values.mean(1, keepdim=True)
        shrunk = torch.where(mean > 0, self.share * values + (1 - self.share) * mean, 1)
        root = (vectors * shrunk.rsqrt()[:, None]) @ vectors.mT
        variances = (root * (overall @ root)).sum(1, keepdim=True)
        varies = variances > 1e-4 * variances.amax(
            -1, keepdim=True
        )  # a constant feature has what rounding leaves
        weight = root * torch.where(varies, variances, 1).rsqrt()
        self.weight.copy_(weight.repeat_interleave(len(self.weight) // len(weight), 0))

    def forward(self, x: Tensor) -> Tensor:
        return x if self.skipped else torch.bmm(x, self.weight)


def mlp(features: int, widths: tuple[int, ...], whiten: float = 0.0) -> Backbone:
    """A multilayer perceptron: one stage per hidden layer, if any, after one that
    whitens. Inputs are flattened.
    """
    flat = Layout(lambda x: x.flatten(2), IN_FRONT.spread)
    stages = tuple(
        partial(Hidden, inputs=i, outputs=o) for i, o in pairwise((features, *widths))
    )
    first = (
        (partial(Whitening, features=features, share=whiten),)
        if whiten and features <= WIDEST
        else ()
    )
    return Backbone(flat, (*first, *stages), (features, *widths)[-1])


class Copies(nn.Module):
    """K copies of any module that maps a batch to features, run one after the other:
    (K, B, ...) -> (K, B, F).

    Each is called with views of its slices of the stack, so that what it updates in
    place (batch norm's) is kept.
    """

    def __init__(self, make: Callable[[], nn.Module], networks: int) -> None:
        super().__init__()
        self.make, self.networks = make, networks
        self.template = [
            make()
        ]  # in a list: its own weights are not parameters of the stack
        for name, value in self.template[0].named_parameters():
            self.register_parameter(
                _flat(name),
                nn.Parameter(value.detach().new_empty(networks, *value.shape)),
            )
        for name, buffer in self.template[0].named_buffers():
            self.register_buffer(_flat(name), buffer.new_empty(networks, *buffer.shape))

    def reset(self, generators: Generators) -> None:
        """Network by network: the global generator is seeded from the run's own, since
        modules draw from that one.
        """
        for network in range(self.networks):
            generator = generators[network * len(generators) // self.networks]
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int(torch.randint(2**31, (1,), generator=generator)))
                fresh = self.make()
            for name, value in (*fresh.named_parameters(), *fresh.named_buffers()):
                getattr(self, _flat(name))[network].copy_(value)

    def forward(self, x: Tensor) -> Tensor:
        template = self.template[0].train(self.training)
        names = [
            name
            for name, _ in (*template.named_parameters(), *template.named_buffers())
        ]
        slices = zip(
            *(getattr(self, _flat(name)).unbind() for name in names), strict=True
        )
        calls = zip(
            (dict(zip(names, tensors, strict=True)) for tensors in slices),
            x,
            strict=True,
        )
        return torch.stack(
            [functional_call(template, own, (batch,)) for own, batch in calls]
        )

    def unstacked(self) -> nn.Module:
        """The same copies as plain modules: a graph that is exported from them has no
        slices of weights.
        """
        copies = [deepcopy(self.template[0]) for _ in range(self.networks)]
        for network, copy in enumerate(copies):
            for name, value in (*copy.named_parameters(), *copy.named_buffers()):
                value.data = getattr(self, _flat(name))[network].detach()
        return Unstacked(copies)


class Unstacked(nn.ModuleList):
    """Modules, one per network: (K, B, ...) -> (K, B, F)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([copy(own) for copy, own in zip(self, x, strict=True)])


def _flat(name: str) -> str:
    return "copy_" + name.replace(".", "__")


def own(
    make: Callable[[], nn.Module] | nn.Module,
    example: Tensor,
    start: Mapping[str, Tensor] | None = None,
) -> Backbone:
    """A user's network as a backbone of one stage; a dry run on `example` (B, ...)
    finds the width of its features.

    A function makes a fresh network for each particle; a module (a pretrained one, say)
    is copied as it is. With `start`, all begin with these weights; an empty one leaves
    them as they are, for weights that are loaded later.
    """
    build = (lambda: deepcopy(make)) if isinstance(make, nn.Module) else make
    if start is not None:
        first = build()
        first.load_state_dict(start, strict=bool(start))
        build = partial(deepcopy, first)
    network = build().eval()
    linear = "use backbone=mlp with widths='' for a linear classifier of the inputs"
    expect(
        [*network.parameters()],
        f"the backbone {type(network).__name__} has no parameters to train: {linear}",
    )
    try:
        with torch.no_grad():
            features = network(example)
    except (RuntimeError, ValueError, IndexError) as error:
        name, given = (
            getattr(make, "__name__", type(network).__name__),
            tuple(example.shape),
        )
        told = (
            f"the backbone {name} cannot take a batch of shape {given}, (samples, ...):"
            f" it raised {error}"
        )
        raise InputError(
            f"{told}; expected a network for samples of shape {given[1:]}"
        ) from error
    shape = tuple(getattr(features, "shape", ()))
    found = (
        f"the backbone returns {shape or type(features).__name__} for a batch of shape"
        f" {tuple(example.shape)}"
    )
    fix = (
        "expected features (batch, width); end it with pooling and flattening, without"
        " a classifier"
    )
    expect(len(shape) == 2 and shape[0] == len(example), f"{found}: {fix}")
    return Backbone(IN_FRONT, (partial(Copies, build),), width=features.shape[1])


def imported(name: str, expected: str) -> Any:
    """What "package.module:function" names, if the user's own words do."""
    check_trusted(name)
    try:
        return resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"backbone={name!r} cannot be imported ({error}): expected {expected}"
        ) from None


BACKBONES: dict[
    str, Callable[..., Backbone]
] = {  # (shape of a sample, and of an MLP widths, whiten)
    "cnn": lambda shape, *more: small_cnn(shape[0]),
    "resnet8": lambda shape, *more: small_resnet(shape[0], blocks=1),
    "resnet20": lambda shape, *more: small_resnet(shape[0], blocks=3),
    "resnet32": lambda shape, *more: small_resnet(shape[0]),
    "resnet50": lambda shape, *more: large_resnet(shape[0]),
    "resnet50-slim": lambda shape, *more: large_resnet(
        shape[0], widths=(64, 128, 192, 384)
    ),  # the paper's
    "resnext50": lambda shape, *more: large_resnet(shape[0], groups=32),
    "mlp": lambda shape, *more: mlp(int(torch.Size(shape).numel()), *more),
}


def backbone(
    name: str,
    input_shape: tuple[int, ...],
    widths: tuple[int, ...] = (256, 256),
    whiten: float = 0.0,
) -> Backbone:
    """The backbone of this name for samples of this shape; an MLP has hidden `widths`,
    and may `whiten` its inputs.
    """
    choose("backbone", name, BACKBONES)
    needed = (
        f"backbone {name!r} needs images (channels, height, width), got {input_shape}:"
        " use backbone=mlp"
    )
    expect(name == "mlp" or len(input_shape) == 3, needed)
    return BACKBONES[name](input_shape, widths, whiten)

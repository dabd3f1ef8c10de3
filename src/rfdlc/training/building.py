"""The networks and the Decider of a run, built as its method and settings say."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from rfdlc.decisions.decider import Decider
from rfdlc.errors import InputError
from rfdlc.probabilities.classes import Classes
from rfdlc.training.config import TrainConfig
from rfdlc.training.methods import NETWORKS, Method, find_method
from rfdlc.training.networks.backbones import backbone, imported, own
from rfdlc.training.networks.mixture import (
    Mixture,
    Networks,
    rebuilt_log,
    rebuilt_member,
    rebuilt_range,
)
from rfdlc.training.networks.particles import ParticleNet
from rfdlc.training.networks.pretrained import (
    PREFIX,
    Resize,
    Start,
    Weights,
    starting_point,
    timm_backbone,
)

OwnBackbone = Callable[[], nn.Module] | nn.Module

SMALL_STEP = 10_000_000  # multiplications


def new_decider(method: str, config: TrainConfig, classes: Classes) -> Decider:
    """A Decider that is not fitted, with the prior that the method's probabilities
    carry.
    """
    row = find_method(method)
    target_prior: str | None = row.target_prior or config.target_prior
    if target_prior == "scores":
        target_prior = None
    calibration: str | None = config.calibration
    if calibration == "none":
        calibration = None
    return Decider(
        row.utility(classes),
        calibration=calibration,
        train_prior=row.carried(config, classes),
        target_prior=target_prior,
        combine=config.combine,
    )


def choose_device(wanted: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise InputError(
            f"setting device={wanted!r} is not a device: expected auto, cpu, cuda or"
            " cuda:N"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"setting device={wanted!r} needs a GPU, but torch finds none: use"
            " device=cpu or device=auto"
        )
    return device


def own_network(
    config: TrainConfig, network: OwnBackbone | None = None
) -> OwnBackbone | None:
    """The backbone of the user's own that was passed, or that the config names as
    package.module:function.
    """
    is_named = ":" in config.backbone and not config.backbone.startswith(PREFIX)
    if network is not None or not is_named:
        return network
    named: OwnBackbone = imported(
        config.backbone, "package.module:function on the path, or timm:NAME"
    )
    return named


def start_of(config: TrainConfig, network: OwnBackbone | None = None) -> Start:
    """What a training with this config starts from."""
    return starting_point(
        own_network(config, network),
        backbone=config.backbone,
        pretrained=config.pretrained,
        image_size=config.image_size,
        interpolation=config.interpolation,
        backbone_options=config.backbone_options,
    )


def method_net(
    method: Method,
    config: TrainConfig,
    shape: tuple[int, ...],
    classes: Classes,
    seeds: Sequence[int],
    network: OwnBackbone | None = None,
    start: Weights | None = None,
) -> ParticleNet:
    """The network for samples of this shape and len(seeds) runs.

    Parameters
    ----------
    method, config, classes
        What the network is trained with, and which classes it tells apart.
    shape
        That of a sample: (features,), or (channels, height, width).
    seeds
        One for each run that is trained in this network.
    network
        A backbone of the user's own.
    start
        The weights of a network to start from. An empty mapping leaves first weights
        out, for weights that are loaded later.
    """
    network = own_network(config, network)
    if config.backbone == "own" and network is None:
        raise InputError(
            "this run has a backbone of its own, which a folder cannot hold: pass"
            " backbone=... again, or train with 'package.module:function'"
        )
    name = backbone_name(config, shape)
    _check_backbone(name, config, shape)

    size = config.image_size
    seen = (shape[0], size, size) if size else shape
    # A network of the user's own draws its first weights.
    with torch.random.fork_rng(devices=[]):
        if name.startswith(PREFIX):
            stages = timm_backbone(
                name,
                seen,
                size,
                config.backbone_options,
                start=start,
                lora=config.lora,
            )
        elif network is not None:
            stages = own(network, torch.zeros(2, *seen), start)
        else:
            stages = backbone(name, seen, config.widths, config.whiten)
        is_mlp = name == "mlp" and network is None
        net = ParticleNet(
            stages,
            len(classes),
            particles=config.particles,
            seeds=seeds,
            shared_stages=_shared_stages(config, len(stages.stages), is_mlp),
            head=config.head,
            head_scale=config.head_scale,
            dropout=config.dropout,
            combine=partial(method.combination, config, classes),
        )
    if seen != shape:
        net.resize = Resize(shape[1], shape[2], size, config.interpolation)
    net.name = name
    net.recompute = config.checkpoint_activations
    net.mirrored = config.test_flip
    net.shift = config.test_shift
    net.execute(config.execution)
    return net


def backbone_name(config: TrainConfig, shape: tuple[int, ...]) -> str:
    """The backbone that `auto` is for samples of this shape; any other is itself.

    Examples
    --------
    >>> backbone_name(TrainConfig(), (3, 32, 32))
    'resnet32'
    """
    if config.backbone != "auto":
        return config.backbone
    if len(shape) != 3:  # features
        return "mlp"
    side = config.image_size or min(shape[1:])
    if side < 16:
        return "mlp"
    if side < 64:
        return "resnet32"
    return "resnet50"


def _check_backbone(name: str, config: TrainConfig, shape: tuple[int, ...]) -> None:
    """Raise where settings of the network fit neither it nor the samples."""
    if config.lora and not name.startswith(PREFIX):
        raise InputError(f"lora={config.lora} is for backbone=timm:NAME, got {name!r}")
    if len(shape) == 3:
        return
    if config.image_size:
        raise InputError(
            f"backbone {name!r} with image_size={config.image_size} needs images"
            f" (channels, height, width), got samples of shape {shape}"
        )
    if config.test_flip:
        raise InputError(f"test_flip is for images, got samples of shape {shape}")
    if config.test_shift:
        raise InputError(f"test_shift is for images, got samples of shape {shape}")


def _shared_stages(config: TrainConfig, stages: int, is_mlp: bool) -> int:
    """How many of the first stages the particles share.

    An MLP may begin with whitening, which is the same for all particles, and its last
    stage is each particle's own.
    """
    if not is_mlp:
        return min(config.shared_stages, stages)
    whitening = stages - len(config.widths)
    most = max(0, len(config.widths) - 1)
    return whitening + min(config.shared_stages, most)


def mixture_net(
    method: Method,
    config: TrainConfig,
    shape: tuple[int, ...],
    classes: Classes,
    weights: Mapping[str, Tensor],
) -> Mixture:
    """The mixture that these weights are of: what it has as members, their
    names say.
    """
    states = defaultdict[str, dict[str, Tensor]](dict)
    for key, tensor in weights.items():
        if key.startswith("members."):
            _, member, rest = key.split(".", 2)
            states[member][rest] = tensor
    members = dict[str, nn.Module]()
    for member in sorted(states):  # files sort their tensors
        state = states[member]
        if member in NETWORKS:
            count = len(state["net.head.weight"]) // config.particles
            net = method_net(
                method,
                config.replace(**NETWORKS[member]),
                shape,
                classes,
                seeds=range(count),
            )
            members[member] = Networks(net)
        else:
            members[member] = rebuilt_member(member, state, shape[0], len(classes))
    return Mixture(
        members,
        torch.zeros(len(members)),
        torch.zeros(len(members), len(classes)),
        rebuilt_log(weights, shape[0]),
        rebuilt_range(weights, shape[0]),
    )


@contextmanager
def sensible_threads(net: nn.Module, config: TrainConfig) -> Iterator[None]:
    """One thread for steps so small that more threads cost more than they save (small
    MLPs on a CPU).
    """
    before = torch.get_num_threads()
    weights = list(net.parameters())
    has_filters = any(weight.ndim >= 4 for weight in weights)
    multiplications = config.batch_size * sum(weight.numel() for weight in weights)
    if not has_filters and multiplications < SMALL_STEP:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

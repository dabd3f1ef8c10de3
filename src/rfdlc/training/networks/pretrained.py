"""Networks of timm as backbones, cut into stages that particles may share, and the
weights that a training starts from.

`backbone="timm:NAME"` needs timm (`rfdlc[vision]`). What a network was trained with
(size, mean, deviation and interpolation of its images) is read from timm's
configuration of it.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, library, nn
from torch.nn import functional

from rfdlc.errors import InputError, expect, listing
from rfdlc.progress import announce
from rfdlc.training.networks.backbones import Backbone, Copies
from rfdlc.training.networks.lowrank import adapt, copied
from rfdlc.training.networks.stack import IN_FRONT

PREFIX = "timm:"
INSTALL = 'pip install "rfdlc[vision]"'
HUB, NONE = "hub", "none"  # values of the setting `pretrained` that are not files
SECONDS_FOR_THE_HUB = 10
SMALL = 96  # pixels: enough to see in which order modules are called
SLOW = 0.2  # rate of the layers below the head, as a factor of its own

Weights = Mapping[str, Tensor]
Called = dict[
    str, dict[str, Tensor]
]  # modules in their order, and the tensors that they are given by name


@dataclass(frozen=True)
class Preprocessing:
    """How a network expects its images: square, of this side, with this mean and
    deviation per channel (of 0..1).
    """

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bilinear"
    crop: float = (
        1.0  # the fraction of an image's shorter side that was used in evaluation
    )


def load_backbone(
    name: str,
    pretrained: str = NONE,
    *,
    image_size: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """A network `timm:NAME` that maps images (B, channels, size, size) to features (B,
    width), in evaluation mode.

    Parameters
    ----------
    name, options
        A name that timm knows, with the prefix `timm:`, and further arguments of
        `timm.create_model`.
    pretrained
        A safetensors file, "hub" (timm downloads the weights) or "none".
    image_size
        The side of the images; 0 for that of timm's configuration.

    Returns
    -------
    Module
        With attributes `preprocessing` and `width`.
    """
    network = _create(name, image_size, options or {}, hub=pretrained == HUB)
    if pretrained not in (HUB, NONE):
        load_weights(network, name, pretrained)
    return network


@dataclass(frozen=True)
class Start:
    """What the networks of a training start from: weights, None for random ones, and a
    timm network's preprocessing.
    """

    weights: Weights | None = None
    preprocessing: Preprocessing | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """What a run records, so that it does not depend on timm's configuration any
        more.
        """
        found = self.preprocessing
        return (
            {}
            if found is None
            else {"image_size": found.size, "interpolation": found.interpolation}
        )

    @property
    def usual(self) -> dict[str, Any]:
        """What suits the weights: without batch normalisation, such as in transformers,
        a high rate destroys them.
        """
        careful = self.weights is not None and not any(
            name.endswith("running_var") for name in self.weights
        )
        return {"backbone_rate": SLOW} if careful else {}


def starting_point(
    network: Any,
    *,
    backbone: str,
    pretrained: str,
    image_size: int,
    interpolation: str,
    backbone_options: Mapping[str, Any],
) -> Start:
    """Read or download the weights, and check them. `network` is a module or a factory
    of the user's own, or None.
    """
    name, options = backbone, backbone_options
    if name.startswith(PREFIX):
        found = load_backbone(name, pretrained, image_size=image_size, options=options)
        own = found.preprocessing
        own = (
            own
            if interpolation == "auto"
            else replace(own, interpolation=interpolation)
        )
        return Start(None if pretrained == NONE else found.state_dict(), own)
    expect(
        not options,
        f"backbone_options are for networks of timm, backbone={PREFIX}NAME: got"
        f" backbone={name!r}",
    )
    if pretrained == NONE:
        return Start()
    for_others = (
        f"pretrained={pretrained!r} is for backbone={PREFIX}NAME or a network of"
        " your own"
    )
    expect(network is not None, f"{for_others}, got backbone={name!r}")
    expect(
        pretrained != HUB,
        f"pretrained={HUB} is for backbone={PREFIX}NAME: give a safetensors file",
    )
    module = deepcopy(network) if isinstance(network, nn.Module) else network()
    load_weights(module, name, pretrained)
    return Start(module.state_dict())


def _timm() -> Any:
    """The package. Torchvision, which it imports, does not import where its operators
    are built for another torch.
    """
    try:
        try:
            import torchvision  # noqa: F401
        except (
            RuntimeError
            # the operators are for detection: declaring them is all that the import
            # needs
        ):
            for operator in ("nms", "qnms"):
                library.define(f"torchvision::{operator}", "(Tensor boxes) -> Tensor")
        import timm
    except ImportError as error:
        raise InputError(
            f"backbone=timm:NAME needs timm ({error}): {INSTALL}"
        ) from None
    return timm


def _create(
    name: str, size: int, options: Mapping[str, Any], *, hub: bool = False
) -> Any:
    timm, plain = _timm(), name.removeprefix(PREFIX)
    if not timm.is_model(plain) or plain.startswith("hf"):
        all_of_them = timm.list_models()
        begun = [model for model in all_of_them if plain and model.startswith(plain)][
            :3
        ]
        close = [
            f"{PREFIX}{model}"
            for model in begun or get_close_matches(plain, all_of_them, 3)
        ]
        hint = (
            f"did you mean {', '.join(close)}?"
            if close
            else "timm.list_models() lists them"
        )
        raise InputError(
            f"backbone {name!r} is not a network of timm {timm.__version__}: {hint}"
        )
    arguments = {"in_chans": 3, **options, "num_classes": 0}
    try:
        network = _call(partial(timm.create_model, plain, **arguments), size, hub)
        network.preprocessing = _preprocessing(
            network.pretrained_cfg, size, arguments["in_chans"]
        )
        network.width = getattr(network, "head_hidden_size", network.num_features)
        return network.eval()
    except InputError:
        raise
    except Exception as error:  # of any of the architectures, or of the download
        given = "".join(f", backbone.{key}={value}" for key, value in options.items())
        reason = " ".join(str(error).split())
        raise InputError(
            f"timm cannot make {name!r} with image_size={size}{given}: {reason}"
        ) from None


def _call(create: Callable[..., Any], size: int, hub: bool) -> Any:
    """The network for images of this side: only those with embeddings of positions need
    to know it.
    """
    if hub:
        _check_hub(create(pretrained=False).pretrained_cfg)
    if size:
        try:
            return create(pretrained=hub, img_size=size)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
    return create(pretrained=hub)


def _check_hub(found: Mapping[str, Any]) -> None:
    """Raise at once where the weights cannot be downloaded: timm would try for a
    minute.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache

    fix = (
        "give a file, pretrained=FILE.safetensors, or start from random weights,"
        " pretrained=none (of `rfdlc embed` "
    )
    fix += "--pretrained)"
    place, name = found.get("hf_hub_id"), found["architecture"]
    expect(
        place or found.get("url"),
        f"timm has no pretrained weights of {PREFIX}{name}: {fix}",
    )
    if place and not isinstance(
        try_to_load_from_cache(place, "model.safetensors"), str
    ):
        try:
            HfApi().repo_info(place, timeout=SECONDS_FOR_THE_HUB)
        except Exception as error:  # no network, no access, no such repository
            reason = " ".join(str(error).split())
            raise InputError(
                f"the weights of {PREFIX}{name} cannot be downloaded ({reason}): {fix}"
            ) from None


def _preprocessing(found: Mapping[str, Any], size: int, channels: int) -> Preprocessing:
    """From timm's configuration; another number of channels than it has is normalised
    by the mean of them.
    """
    known = {name: tuple(found[name]) for name in ("mean", "std")}
    mean, std = (
        own if len(own) == channels else (sum(own) / len(own),) * channels
        for own in known.values()
    )
    interpolation = "bicubic" if found["interpolation"] == "bicubic" else "bilinear"
    return Preprocessing(
        size or found["input_size"][-1], mean, std, interpolation, found["crop_pct"]
    )


def load_weights(network: Any, name: str, file: str) -> None:
    """Load a safetensors file into any network; a classifier is ignored, the rest must
    fit.
    """
    expect(
        Path(file).is_file(),
        f"pretrained={file!r} is not a file: expected a safetensors file, {HUB} or"
        f" {NONE}",
    )
    try:
        found = {
            key: value.float() if value.is_floating_point() else value
            for key, value in load_file(file).items()
        }
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(
            f"pretrained={file!r} cannot be read as safetensors: {error}"
        ) from None
    known = getattr(network, "pretrained_cfg", {})
    heads, first = known.get("classifier") or (), known.get("first_conv") or ()
    heads, first = (
        (own,) if isinstance(own, str) else tuple(own) for own in (heads, first)
    )
    head = [key for key in found if key.startswith(tuple(f"{own}." for own in heads))]
    fitting = {key: value for key, value in found.items() if key not in head}
    if wrong := _unfit(
        network, fitting
    ):  # another resolution, another number of channels, weights of other code
        module = sys.modules[type(network).__module__]
        convert = getattr(
            module, "checkpoint_filter_fn", lambda weights, network: weights
        )
        try:
            fitting = _of_channels(network, convert(dict(fitting), network), first)
        except Exception:  # it knows the networks that it is for
            fitting = {}
        still = _unfit(network, fitting)
        shown = f"{listing(wrong, 3)} are missing, unknown or of another shape"
        expect(
            not still,
            f"pretrained={file!r} has weights of another network than {name}: {shown}",
        )
    network.load_state_dict(fitting, strict=False)
    if head:
        classes = next(
            (
                f" of {len(found[key])} classes"
                for key in head
                if key.endswith("weight")
            ),
            "",
        )
        announce(f"{'weights':10} {file}; its classifier{classes} is ignored")


def _unfit(network: nn.Module, found: Weights) -> list[str]:
    """Names of weights that are missing, unknown or of another shape."""
    wanted = {key: value.shape for key, value in network.state_dict().items()}
    shapes = {key: value.shape for key, value in found.items()}
    keys = [
        key
        for key in (*wanted, *(shapes.keys() - wanted.keys()))
        if wanted.get(key) != shapes.get(key)
    ]
    return sorted(key for key in keys if not key.endswith("num_batches_tracked"))


def _of_channels(
    network: nn.Module, found: dict[str, Tensor], first: Sequence[str]
) -> dict[str, Tensor]:
    """The first layer for another number of channels: summed over colours, or repeated,
    as timm does.
    """
    from timm.models import adapt_input_conv

    for key in (f"{name}.weight" for name in first):
        found[key] = adapt_input_conv(network.get_parameter(key).shape[1], found[key])
    return found


class _Constants(nn.Module):
    """Tensors that a module is called with besides its input, such as rotary embeddings
    of positions.
    """

    def __init__(self, given: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in given.items():
            self.register_buffer(name, tensor.detach().clone())


class Segment(nn.Module):
    """Consecutive modules of a network, called one after another. The last segment ends
    with the network's pooling.
    """

    def __init__(
        self,
        network: nn.Module,
        names: Called,
        others: Sequence[str],
        first: bool,
        last: bool,
    ) -> None:
        super().__init__()
        self.constants = nn.ModuleList(
            _Constants(constants) for constants in names.values()
        )
        left_out = {id(network.get_submodule(name)): nn.Identity() for name in others}
        self.network, self.names, self.last = (
            deepcopy(network, left_out),
            tuple(names),
            last,
        )
        if not first:  # embeddings of positions and classes belong to the first modules
            for name, _ in list(self.network.named_parameters(recurse=False)):
                setattr(self.network, name, None)

    def forward(self, x: Tensor) -> Tensor:
        network: Any = self.network
        for name, constants in zip(self.names, self.constants, strict=True):
            x = network.get_submodule(name)(x, **dict(constants.named_buffers()))
            if name == "patch_embed" and hasattr(network, "_pos_embed"):
                embedded = network._pos_embed(x)
                x = (
                    embedded[0] if isinstance(embedded, tuple) else embedded
                )  # others are constants of the blocks
        return network.forward_head(x, pre_logits=True) if self.last else x


def timm_backbone(
    name: str,
    shape: tuple[int, ...],
    size: int,
    options: Mapping[str, Any],
    start: Weights | None = None,
    lora: int = 0,
) -> Backbone:
    """The network `timm:NAME` for images of `size`, with one stage for each of its own.

    Every network has weights of its own, drawn at random, or starts from those of
    `start`; an empty one leaves them as they are, for weights that are loaded later.
    With `lora`, these are frozen, and updates of this rank are trained.
    """
    network = _create(name, size, options)
    channels = len(network.preprocessing.mean)
    fix = (
        f"backbone.in_chans={shape[0]} fits them, in Python"
        f" backbone_options={{'in_chans': {shape[0]}}}"
    )
    expect(
        shape[0] == channels,
        f"backbone {name!r} takes images of {channels} channels, got {shape[0]}: {fix}",
    )
    expect(
        start is not None or not lora,
        f"lora={lora} adapts pretrained weights: set pretrained=FILE or hub",
    )
    cuts = _cuts(network)
    if start is None:
        makes = [
            lambda cut=cut: _segment(_create(name, size, options), cut) for cut in cuts
        ]
    else:
        network.load_state_dict(start, strict=bool(start))
        if lora:
            adapt(network, lora, name, _example(network))
        makes = [partial(copied, _segment(network, cut)) for cut in cuts]
    return Backbone(
        IN_FRONT, tuple(partial(Copies, make) for make in makes), width=network.width
    )


Cut = (
    tuple[Called, list[str], bool, bool] | None
)  # the arguments of a Segment; None for the whole network


def _segment(network: nn.Module, cut: Cut) -> nn.Module:
    return network if cut is None else Segment(network, *cut)


@torch.no_grad()
def _cuts(network: Any) -> list[Cut]:
    """Where the network ends the stages that timm names; one for a network whose
    modules are not a plain sequence.
    """
    example = _example(network)
    name = PREFIX + network.pretrained_cfg["architecture"]
    called: Called = {}
    try:
        features = network(example)
    except (RuntimeError, AssertionError, ValueError) as error:
        problem = (
            f"{name} cannot compute images of side {example.shape[-1]}"
            f" ({' '.join(str(error).split())})"
        )
        raise InputError(f"{problem}: set another image_size") from None
    pooled = (
        f"{name} gives {tuple(features.shape)} for one image: expected features of"
        f" shape (1, {network.width})"
    )
    expect(features.shape == (1, network.width), pooled)

    def record(
        child: str, module: nn.Module, inputs: Any, given: dict[str, Any], output: Any
    ) -> None:
        called[child] = {
            key: value for key, value in given.items() if isinstance(value, Tensor)
        }

    children = {child: network.get_submodule(child) for child in _children(network)}
    hooks = [
        own.register_forward_hook(partial(record, child), with_kwargs=True)
        for child, own in children.items()
    ]
    with torch.enable_grad():
        network.forward_features(example)
    for hook in hooks:
        hook.remove()
    if any(
        tensor.requires_grad for given in called.values() for tensor in given.values()
    ):
        return [None]  # tensors that depend on weights are not constants
    body = [
        child
        for child in called
        if child != "pos_drop" or not hasattr(network, "_pos_embed")
    ]
    ends = [
        i + 1
        for i, child in enumerate(body[:-1])
        if _ends_stage(network, child, body[i + 1])
    ]
    head = [
        child
        for child, own in children.items()
        if child not in called and [*own.parameters()]
    ]
    cuts: list[Cut] = []
    for start, end in zip([0, *ends], [*ends, len(body)], strict=True):
        last, own = (
            end == len(body),
            {child: called[child] for child in body[start:end]},
        )
        cuts.append(
            (
                own,
                [*body[:start], *body[end:], *(() if last else head)],
                start == 0,
                last,
            )
        )
    try:
        found = example
        for cut in cuts:
            found = _segment(network, cut)(found)
        plain = torch.allclose(found, features, rtol=1e-3, atol=1e-4)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        plain = False
    return cuts if plain else [None]


def _example(network: Any) -> Tensor:
    """One image; a small one where the network takes any size."""
    expected = network.preprocessing
    fixed = network.pretrained_cfg.get("fixed_input_size") or hasattr(
        network, "patch_embed"
    )
    side = expected.size if fixed else min(expected.size, SMALL)
    return torch.randn(
        1, len(expected.mean), side, side, generator=torch.Generator().manual_seed(0)
    )


def _children(network: nn.Module) -> list[str]:
    """Names of the modules that a network calls: its children, or theirs where these
    are only a container.
    """
    names = []
    for name, child in network.named_children():
        inner = isinstance(child, nn.Sequential | nn.ModuleList) and len(child)
        names += [f"{name}.{own}" for own in child._modules] if inner else [name]
    return names


def _ends_stage(network: Any, name: str, following: str) -> bool:
    """Whether a stage that timm names ends between these two modules."""
    ends = [found["module"] for found in getattr(network, "feature_info", ())]
    return any(
        name == end
        or (name.startswith(f"{end}.") and not following.startswith(f"{end}."))
        for end in ends
    )


class Resize(nn.Module):
    """The centre square of images (..., H, W) at another size, filtered as pillow does:
    two matrix products.
    """

    rows: Tensor
    columns: Tensor

    def __init__(
        self, height: int, width: int, size: int, interpolation: str = "bilinear"
    ) -> None:
        super().__init__()
        least = min(height, width)
        mode = "bicubic" if interpolation == "bicubic" else "bilinear"
        filters = functional.interpolate(
            torch.eye(least)[None, None], (size, least), mode=mode, antialias=True
        )[0, 0]
        for name, side in (("rows", height), ("columns", width)):
            before = (side - least) // 2
            padded = functional.pad(
                filters, (before, side - least - before)
            )  # (size, side)
            self.register_buffer(name, padded, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return self.rows @ x.to(self.rows.dtype) @ self.columns.T

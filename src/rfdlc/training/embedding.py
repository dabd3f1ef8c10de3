"""Embedder: a network that maps images to features, made from a name and weights, or
again from what a file keeps.
"""

import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from rfdlc.data.dataset import PHOTOGRAPHS, Normalisation
from rfdlc.data.embedding import OUTPUT, Embedding
from rfdlc.data.loader import Normaliser
from rfdlc.errors import InputError, choose, expect
from rfdlc.formats.files import has_external_data, sha256_of
from rfdlc.formats.threads import Item, ahead
from rfdlc.imports import trust
from rfdlc.progress import announce
from rfdlc.training.networks import pretrained as networks
from rfdlc.training.networks.backbones import BACKBONES, backbone, imported
from rfdlc.training.networks.stack import reset

ONNX = "onnx"
KINDS = (
    "timm:NAME, package.module:function, a file .onnx, or one of"
    f" {', '.join(BACKBONES)}"
)
USUAL_SIZE, SMALL_SIZE = (
    224,
    32,
)  # pixels: of networks for photographs, and of those for small images
IN_FLIGHT = (
    2  # batches that a GPU has still to compute when the result of one is awaited
)
GREY = tuple(sum(values) / 3 for values in (PHOTOGRAPHS.mean, PHOTOGRAPHS.std))


class Embedder:
    """Maps uint8 images (N, channels, H, W) to features (N, width), in the order that
    they are given in.

    Images of another size than the network's are resized on the device; grey ones are
    repeated for colour networks.
    """

    def __init__(
        self, embedding: Embedding, network: nn.Module, device: torch.device
    ) -> None:
        self.network, self.device = (
            network.eval().requires_grad_(False).to(device),
            device,
        )
        self.half = embedding.half and device.type == "cuda"
        self._copies: Any = None  # the stream of copies to a GPU
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)
            self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        channels, size, _ = embedding.input_shape
        scale = Normalisation(embedding.mean, embedding.std)
        fits = len(scale.mean) == len(scale.std) == channels
        expect(
            fits,
            f"mean and std have {len(scale.mean)} and {len(scale.std)} numbers:"
            f" expected {channels} channels",
        )
        self._normalise = Normaliser(
            scale, embedding.input_shape, device, torch.float32
        )
        self._resize: dict[tuple[int, int], nn.Module] = {(size, size): nn.Identity()}
        self._seen: dict[str, Tensor] = {}
        self._watch([layer for layer in embedding.layers if layer != OUTPUT])
        self.embedding = embedding
        found = self._features(
            torch.zeros(2, *embedding.input_shape, dtype=torch.uint8, device=device)
        )
        self.embedding = embedding.model_copy(update={"width": found.shape[1]})

    def __call__(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Features of images in memory."""
        size = 256
        batches = (
            (None, images[start : start + size])
            for start in range(0, len(images), size)
        )
        found = [features for _, features in self.stream(batches)]
        return (
            np.concatenate(found)
            if found
            else np.empty((0, self.embedding.width), np.float32)
        )

    def stream(
        self, batches: Iterable[tuple[Item, NDArray[np.uint8]]]
    ) -> Iterator[tuple[Item, NDArray[np.float32]]]:
        """Features of batches, each with what came with it.

        A GPU computes while the next batches are copied to it by a thread, and results
        are fetched without a pause.
        """
        if self._copies is None:
            yield from ((item, self._on_host(images)) for item, images in batches)
            return
        waiting = deque[tuple[Item, Tensor, Any]]()
        for item, images, copied in ahead(self._copy, batches, 1):
            waiting.append((item, *self._launch(images, copied)))
            if len(waiting) > IN_FLIGHT:
                yield _received(*waiting.popleft())
        for each in waiting:
            yield _received(*each)

    def _on_host(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        given = torch.from_numpy(np.ascontiguousarray(images))
        found = (
            self._features(given.to(self.device))
            if len(given)
            else torch.empty(0, self.embedding.width)
        )
        features: NDArray[np.float32] = found.cpu().numpy()
        return features

    def _copy(self, given: tuple[Item, NDArray[np.uint8]]) -> tuple[Item, Tensor, Any]:
        """Images as bytes on the GPU, and when they are there."""
        item, images = given
        with torch.cuda.stream(self._copies):
            here = torch.from_numpy(np.ascontiguousarray(images))
            there = (
                here.pin_memory().to(self.device, non_blocking=True)
                if len(here)
                else here
            )
            return item, there, self._copies.record_event()

    @torch.inference_mode()
    def _launch(self, images: Tensor, copied: Any) -> tuple[Tensor, Any]:
        if not len(images):
            return torch.empty(0, self.embedding.width), copied
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(copied)
        found = self._features(images)
        images.record_stream(
            stream
        )  # made by another one, which may not reuse its memory before this one is done
        host = torch.empty(found.shape, pin_memory=True).copy_(found, non_blocking=True)
        return host, stream.record_event()

    @torch.inference_mode()
    def _features(self, images: Tensor) -> Tensor:
        channels, size, _ = self.embedding.input_shape
        if images.shape[1] == 1 and channels == 3:
            images = images.expand(-1, 3, -1, -1)
        expect(
            images.shape[1] == channels,
            f"images have {images.shape[1]} channels: expected {channels}",
        )
        if self.device.type == "cuda":
            images = images.contiguous(
                memory_format=torch.channels_last
            )  # as bytes: a quarter of the traffic
        sides: Any = tuple(images.shape[2:])
        if sides not in self._resize:
            resize = networks.Resize(
                sides[0], sides[1], size, self.embedding.interpolation
            )
            self._resize[sides] = resize.to(self.device)
        x = self._resize[sides](self._normalise(images))
        if self.device.type == "cuda":
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda", torch.float16) if self.half else nullcontext():
            found = self._through(x)
            return (
                (found + self._through(x.flip(-1))) / 2
                if self.embedding.flips
                else found
            )

    def _through(self, x: Tensor) -> Tensor:
        """(B, width): what the layers return, averaged over pixels or tokens, side by
        side.
        """
        returned = self.network(x)
        return torch.cat(
            [self._pooled(name, returned) for name in self.embedding.layers], dim=1
        )

    def _pooled(self, name: str, returned: Any) -> Tensor:
        value: Any = returned if name == OUTPUT else self._seen.pop(name)
        value = value[0] if isinstance(value, tuple | list) and value else value
        usable = isinstance(value, Tensor) and value.ndim in (2, 3, 4)
        shape = (
            tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        )
        expect(
            usable,
            f"{name} of the network is {shape}: expected (batch, features), tokens or"
            " images; name layers",
        )
        axes = {3: (1,), 4: (2, 3)}
        found: Tensor = (
            value.float() if value.ndim == 2 else value.float().mean(axes[value.ndim])
        )
        return found

    def _watch(self, layers: Sequence[str]) -> None:
        known = dict(self.network.named_modules())
        inside = getattr(self.network, "outputs", ())
        for name in layers:
            choose(
                "layer",
                name,
                [OUTPUT, *inside, *(module for module in known if module)],
            )
            if name in known:
                known[name].register_forward_hook(
                    lambda *given, name=name: self._seen.__setitem__(name, given[2])
                )
        if isinstance(self.network, OnnxNetwork):
            self.network.seen = self._seen

    def save(self, path: Path) -> str:
        """Write the weights for `load_embedder`; returns their SHA-256."""
        if isinstance(self.network, OnnxNetwork):
            shutil.copyfile(self.network.path, path)
        else:
            weights = self.network.state_dict().items()
            path.write_bytes(
                save(
                    {name: value.cpu().contiguous().clone() for name, value in weights}
                )
            )
        return sha256_of(path)


def _received(
    item: Item, features: Tensor, done: Any
) -> tuple[Item, NDArray[np.float32]]:
    done.synchronize()
    return item, features.numpy()


def new_embedder(
    name: str,
    pretrained: str = networks.NONE,
    *,
    device: torch.device,
    image_size: int = 0,
    channels: int = 3,
    options: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Embedder:
    """The network of this name with weights of its own, a file or the hub; `changes`
    are fields of `Embedding`.
    """
    trust(name)
    given = dict(options or {}) | (
        {"in_chans": channels}
        if name.startswith(networks.PREFIX) and channels != 3
        else {}
    )
    network = _network(name, image_size, channels, given, pretrained)
    if pretrained == networks.NONE and (
        name.startswith(networks.PREFIX) or name in BACKBONES
    ):
        announce(
            "the weights are random: pretrained=FILE.safetensors (for timm also hub)"
            " gives trained ones"
        )
    if pretrained != networks.NONE and not name.startswith(networks.PREFIX):
        known = not name.lower().endswith(".onnx") and pretrained != networks.HUB
        expect(
            known,
            f"backbone {name!r} takes no weights from {pretrained}: leave"
            " pretrained out",
        )
        networks.load_weights(network, name, pretrained)
    found = getattr(network, "preprocessing", None)
    usual = SMALL_SIZE if name in ("resnet8", "resnet20", "resnet32") else USUAL_SIZE
    size = image_size or (usual if found is None else found.size)
    fields: dict[str, Any] = {
        "backbone": ONNX if isinstance(network, OnnxNetwork) else name,
        "options": given,
    }
    fields |= {"input_shape": (channels, size, size)}
    if found is None:
        scale = (
            PHOTOGRAPHS
            if channels == 3
            else Normalisation((GREY[0],) * channels, (GREY[1],) * channels)
        )
        fields |= {"mean": scale.mean, "std": scale.std}
    else:
        fields |= {
            "mean": found.mean,
            "std": found.std,
            "interpolation": found.interpolation,
            "crop": found.crop,
        }
    fields |= {key: value for key, value in changes.items() if value is not None}
    return _made(Embedding.read(fields, f"backbone {name}"), network, device)


def load_embedder(
    embedding: Embedding, weights: Path, device: torch.device
) -> Embedder:
    """The network that a file or a run folder describes, with the weights that were
    kept.
    """
    found = sha256_of(weights) if weights.is_file() else None
    other = (
        "are not there"
        if found is None
        else "are not those that the features were made with (SHA-256 differs)"
    )
    expect(
        found == embedding.weights,
        f"{weights}: the weights of the embedding {other}; embed and train again",
    )
    channels, size, _ = embedding.input_shape
    if embedding.backbone == ONNX:
        return _made(embedding, OnnxNetwork(weights), device)
    network = _network(embedding.backbone, size, channels, embedding.options)
    try:
        network.load_state_dict(load_file(weights))
    except (SafetensorError, RuntimeError, OSError) as error:
        reason = str(error).splitlines()[-1].strip()
        raise InputError(
            f"{weights}: does not fit the backbone {embedding.backbone} ({reason})"
        ) from None
    return _made(embedding, network, device)


def _made(embedding: Embedding, network: nn.Module, device: torch.device) -> Embedder:
    """Tried on two images, so that what does not fit raises before long work."""
    try:
        return Embedder(embedding, network, device)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        if isinstance(error, InputError):
            raise
        reason, shape = " ".join(str(error).split())[:200], embedding.input_shape
        raise InputError(
            f"backbone {embedding.backbone} cannot compute images of shape {shape}"
            f" ({reason})"
        ) from None


def _network(
    name: str,
    size: int,
    channels: int,
    options: Mapping[str, Any],
    pretrained: str = networks.NONE,
) -> nn.Module:
    """A fresh network; random weights are the same every time."""
    if name.lower().endswith(".onnx"):
        return OnnxNetwork(Path(name))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name.startswith(networks.PREFIX):
            network: nn.Module = networks.load_backbone(
                name, pretrained, image_size=size, options=options
            )
            return network
        expect(
            not options,
            f"options {', '.join(options)} are for networks of timm, not for {name}:"
            " leave them out",
        )
        return (
            _own(name)
            if ":" in name
            else Plain(
                choose(f"backbone (expected {KINDS})", name, BACKBONES), channels
            )
        )


def _own(name: str) -> nn.Module:
    found = imported(name, KINDS)
    network = found if isinstance(found, nn.Module) else found()
    kind = type(network).__name__
    expect(
        isinstance(network, nn.Module),
        f"backbone {name!r} gives a {kind}: expected a module of torch",
    )
    return network


class Plain(nn.Module):
    """One network of a built-in backbone: (B, channels, H, W) -> (B, F)."""

    def __init__(self, name: str, channels: int) -> None:
        super().__init__()
        expect(name != "mlp", "backbone 'mlp' is for tables: choose another")
        found = backbone(name, (channels, SMALL_SIZE, SMALL_SIZE))
        self.layout, self.stages = (
            found.layout,
            nn.Sequential(*(stage(1) for stage in found.stages)),
        )
        reset(self.stages, (0,))

    def forward(self, x: Tensor) -> Tensor:
        return self.layout.unfold(self.stages(self.layout.fold(x[None])), 1)[0]


class OnnxNetwork(nn.Module):
    """A graph of one input (N, channels, H, W), run by ONNX Runtime; `outputs` are the
    names of what it returns.
    """

    seen: dict[str, Tensor]

    def __init__(self, path: Path) -> None:
        super().__init__()
        try:
            import onnx
            import onnxruntime
        except ImportError:
            raise InputError(
                "a backbone in ONNX needs onnx and onnxruntime: pip install"
                ' "rfdlc[export]"'
            ) from None
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        try:
            graph = path.read_bytes()
            external = has_external_data(onnx.load_model_from_string(graph))
            able, wanted = (
                onnxruntime.get_available_providers(),
                ("CUDAExecutionProvider", "CPUExecutionProvider"),
            )
            given = {
                "sess_options": options,
                "providers": [name for name in wanted if name in able],
            }
            session: Any = (
                None if external else onnxruntime.InferenceSession(graph, **given)
            )
        except Exception as error:  # both have exceptions of their own
            reason = " ".join(str(error).split())[:200]
            raise InputError(
                f"{path}: cannot be read as an ONNX model ({reason})"
            ) from None
        expect(
            session,
            f"{path}: takes weights from other files: save the model as one file",
        )
        self.session, inputs = session, session.get_inputs()
        images = len(inputs) == 1 and inputs[0].type in (
            "tensor(float)",
            "tensor(float16)",
        )
        told = ", ".join(f"{each.name} {each.type} {each.shape}" for each in inputs)
        expect(
            images,
            f"{path}: has the inputs {told}: expected one, float images (N, channels,"
            " H, W)",
        )
        self.path, self.input = path, inputs[0]
        self.outputs, self.seen = (
            [output.name for output in self.session.get_outputs()],
            {},
        )

    def forward(self, x: Tensor) -> Tensor:
        images = (
            x.cpu()
            .numpy()
            .astype(np.float16 if self.input.type == "tensor(float16)" else np.float32)
        )
        fixed = (
            self.input.shape[0] if isinstance(self.input.shape[0], int) else len(images)
        )  # size of a batch
        padded = np.concatenate(
            [images, np.zeros((-len(images) % fixed, *images.shape[1:]), images.dtype)]
        )
        batches = [
            padded[start : start + fixed] for start in range(0, len(padded), fixed)
        ]
        arrays = zip(
            *(self.session.run(None, {self.input.name: batch}) for batch in batches),
            strict=True,
        )
        found = [
            torch.from_numpy(np.concatenate(own)[: len(images)]).to(x.device)
            for own in arrays
        ]
        self.seen.update(zip(self.outputs, found, strict=True))
        return found[0]

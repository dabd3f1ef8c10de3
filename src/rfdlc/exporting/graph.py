"""From raw samples to decisions as one torch module (resize -> normalise -> particles
-> decide), and as bytes.
"""

import io
import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from rfdlc.data.images import PADDING, Resizing
from rfdlc.data.loader import Normaliser
from rfdlc.decisions.decider import Decider
from rfdlc.decisions.sets import PredictionSets, SetUtility
from rfdlc.decisions.unfamiliar import GIVEN, actions_for, unlike_prior
from rfdlc.decisions.utility import Utility
from rfdlc.errors import InputError, expect
from rfdlc.exporting.trees import replace_trees, translation
from rfdlc.predicting.onnx_model import (
    METADATA_KEY,
    check_rule,
    outputs_of,
    with_checksum,
)
from rfdlc.probabilities.calibrators import NoCalibration
from rfdlc.probabilities.scores import DEEPEST, PROBABILITY_FLOOR
from rfdlc.training.familiarity import first_stages
from rfdlc.training.model import Model
from rfdlc.training.networks.backbones import Copies

LARGEST = 2**31 - 1  # bytes: the limit of a protobuf message
QUANTISED_FROM = 256  # elements: biases and scales stay as they are


class DecisionGraph(nn.Module):
    """uint8 images (B, channels, H, W) or features (B, F), and optionally a utility ->
    the outputs of DecisionHead.
    """

    def __init__(
        self, model: Model, *, resize: bool = False, half: bool = False
    ) -> None:
        super().__init__()
        kind, shape = torch.float16 if half else torch.float32, model.input_shape
        self.net = deepcopy(model.net).to("cpu", kind).eval()
        self.net.execute("stacked")
        for name, module in list(self.net.named_modules()):
            if isinstance(module, Copies):
                self.net.set_submodule(name, module.unstacked().eval())
        self.square = (shape[1], model.resizing) if resize else None
        self.normalise = Normaliser(
            model.normalisation, shape, torch.device("cpu"), kind
        )
        with torch.no_grad():  # particles may be combined inside the network
            particles = self.net(torch.zeros(1, 2, *shape, dtype=kind)).shape[
                1
            ]  # (1, M, 2, C)
        self.head = DecisionHead(model.decider, particles)
        self.familiarity = (
            deepcopy(model.familiarity) if GIVEN in self.head.terms else None
        )

    def forward(
        self, inputs: Tensor, utility: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        samples = inputs.to(torch.float32)
        samples = self.normalise(
            as_squares(samples, *self.square) if self.square else samples
        )
        if self.familiarity is None:
            return self.head(self.net(samples.unsqueeze(0))[0].float(), utility)
        with first_stages(self.net) as statistics:
            logits, features = self.net.outputs(samples.unsqueeze(0))
            given = self.familiarity(features[0].float(), statistics(samples))
        return self.head(
            self.net.combination(logits, features)[0][0].float(), utility, given
        )


class DecisionHead(nn.Module):
    """The torch twin of Decider: particle logits (M, B, C), optionally a utility (C, A)
    in 64 bits -> outputs.
    """

    def __init__(self, decider: Decider, particles: int) -> None:
        super().__init__()
        check_rule(decider)
        self.mean_logits = (
            decider.model.combine == "mean-logits" or particles == 1
        )  # one particle's logits are kept
        weights = (
            np.full(particles, 1 / particles)
            if decider.model.weights is None
            else decider.model.weights
        )
        calibrator = decider.model.calibrator or NoCalibration()
        slope, bias = calibrator.as_affine()
        self.power = calibrator.power
        ratio = decider.model.ratio
        ratio = np.ones(len(decider.utility.classes)) if ratio is None else ratio
        self.weights, self.slope, self.bias, self.ratio = (
            nn.Buffer(torch.tensor(values, dtype=torch.float32))
            for values in (weights.reshape(-1, 1, 1), slope, bias, ratio)
        )
        self.utility, self.common = map(
            nn.Buffer, centred(torch.tensor(decider.utility.matrix))
        )
        kept, strange = decider.deferral.budget, decider.deferral.unfamiliar
        self.prices = (
            None
            if kept is None
            else nn.Buffer(torch.tensor(kept.columns(decider.utility)).float())
        )
        limits = None if strange is None else strange.limits(decider.utility.classes)
        self.limits = (
            None
            if limits is None
            else nn.Buffer(torch.tensor(limits, dtype=torch.float32))
        )
        self.evened = nn.Buffer(
            torch.tensor(
                unlike_prior(decider.model.decided_prior, len(decider.utility.classes)),
                dtype=torch.float32,
            )
        )
        self.terms = {} if strange is None else strange.terms
        self.handing = nn.Buffer(torch.tensor(actions_for(decider.utility)))
        self.sets = (
            None
            if decider.sets is None
            else SETS[type(decider.sets)](decider.sets, decider.utility)
        )

    def forward(
        self, logits: Tensor, utility: Tensor | None = None, given: Any = None
    ) -> tuple[Tensor, ...]:
        matrix, common = (
            (self.utility, self.common) if utility is None else centred(utility)
        )
        each = logits.softmax(-1)  # (M, B, C)
        combined = (
            (logits * self.weights).sum(0)
            if self.mean_logits
            else _safe_log((each * self.weights).sum(0))
        )
        combined = torch.maximum(combined, combined.amax(-1, keepdim=True) - DEEPEST)
        log_p = (
            combined.log_softmax(-1) if self.slope.ndim or self.power != 1 else combined
        )
        log_p = (
            log_p if self.power == 1 else -(log_p.abs() ** self.power)
        )  # W: a number, (C,) or (C, C)
        scaled = log_p @ self.slope.T if self.slope.ndim == 2 else log_p * self.slope
        corrected = (scaled + self.bias).softmax(-1) * self.ratio
        probabilities = corrected / corrected.sum(-1, keepdim=True)  # (B, C)
        gains = probabilities @ matrix  # (B, A)
        expected = gains + (probabilities @ common)[:, None]
        uncertainty = _entropy(probabilities) / float(
            np.log(max(2, probabilities.shape[-1]))
        )
        several = (_entropy(each.mean(0)) - _entropy(each).mean(0)).clamp_min(0)
        disagreement = (
            several if len(self.weights) > 1 else several * torch.nan
        )  # as `mutual_information`
        sets = () if self.sets is None else (self.sets(probabilities),)
        action = (gains if self.prices is None else gains - self.prices).argmax(
            -1
        )  # as Decider in 32 bits
        if self.limits is None:
            return probabilities, expected, action, uncertainty, disagreement, *sets
        terms = {
            "energy": lambda: -logits.logsumexp(-1).mean(0),
            "entropy": lambda: _entropy(each.mean(0)),
        }
        terms[GIVEN] = lambda: given
        score = torch.stack(
            [terms[name]() / scale for name, scale in self.terms.items()]
        ).sum(0)
        strange = score > self.limits[(probabilities * self.evened).argmax(-1)]
        action = torch.where(
            strange, self.handing[gains[:, self.handing].argmax(-1)], action
        )
        return (
            probabilities,
            expected,
            action,
            uncertainty,
            disagreement,
            *sets,
            strange,
        )


class CoverageHead(nn.Module):
    """The torch twin of PredictionSets: probabilities (B, C) -> members of the sets (B,
    C).
    """

    def __init__(self, sets: PredictionSets, utility: Utility) -> None:
        super().__init__()
        self.thresholds, self.empty = (
            nn.Buffer(torch.tensor(sets.thresholds, dtype=torch.float32)),
            sets.empty,
        )
        self.most = min(sets.max_size or len(sets.thresholds), len(sets.thresholds))

    def forward(self, probabilities: Tensor) -> Tensor:
        inside, count = probabilities >= self.thresholds, len(self.thresholds)
        if not self.empty:
            nearest = (probabilities / self.thresholds.clamp_min(1e-30)).argmax(-1)
            inside = inside | (
                nn.functional.one_hot(nearest, count).bool()
                & ~inside.any(-1, keepdim=True)
            )
        if self.most == count:
            return inside
        kept = torch.where(inside, probabilities, -1.0).topk(self.most).indices
        return inside & (torch.zeros_like(probabilities).scatter(1, kept, 1.0) > 0)


class SetUtilityHead(nn.Module):
    """The torch twin of SetUtility: probabilities (B, C) -> members of the sets
    (B, C).
    """

    def __init__(self, sets: SetUtility, utility: Utility) -> None:
        super().__init__()
        allowed, gain, alone = sets.terms(utility)
        self.most = min(len(sets.discount), int(allowed.sum()))
        single = utility.decided_class[:, None] == np.arange(len(allowed))  # (A, C)
        values = gain[allowed], alone, sets.discount[1 : self.most]
        self.gain, self.alone, self.discount = (
            nn.Buffer(torch.tensor(v, dtype=torch.float32)) for v in values
        )
        self.single, self.allowed = (
            nn.Buffer(torch.tensor(single)),
            nn.Buffer(torch.tensor(np.flatnonzero(allowed))),
        )

    def forward(self, probabilities: Tensor) -> Tensor:
        plain, best = (probabilities @ self.alone).max(-1, keepdim=True)
        single = self.single[best[:, 0]]
        if self.most < 2:
            return single
        falling, order = (probabilities[:, self.allowed] * self.gain).topk(self.most)
        value, size = (falling.cumsum(-1)[:, 1:] * self.discount).max(
            -1, keepdim=True
        )  # two classes less
        first = (torch.arange(self.most) < size + 2).to(torch.float32)
        several = (
            torch.zeros_like(probabilities).scatter(1, self.allowed[order], first) > 0
        )
        return ((value > plain) & several) | ((value <= plain) & single)


SETS: dict[Any, Callable[[Any, Utility], nn.Module]] = {
    PredictionSets: CoverageHead,
    SetUtility: SetUtilityHead,
}


def centred(utility: Tensor) -> tuple[Tensor, Tensor]:
    """A utility (C, A) in 64 bits as what differs between actions (C, A) and what they
    share (C,), in 32 bits.

    What all actions of a row share does not change a decision, but in 32 bits it would
    cost the digits that do.
    """
    low, high = utility.amin(1), utility.amax(1)
    common = torch.minimum(torch.maximum(torch.zeros_like(low), low), high)
    return (utility - common[:, None]).float(), common.float()


def _cubic(distance: Tensor) -> Tensor:
    near, far = (
        (1.5 * distance - 2.5) * distance**2 + 1,
        ((2.5 - 0.5 * distance) * distance - 4) * distance + 2,
    )
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))


Kernel = Callable[[Tensor], Tensor]
KERNELS: dict[str, Kernel] = {
    "bilinear": lambda distance: (1 - distance).clamp_min(0),
    "bicubic": _cubic,
}


def as_squares(images: Tensor, size: int, resizing: Resizing) -> Tensor:
    """Images (B, channels, H, W) of any size as squares, as `data.images.fitted` makes
    them.

    Images that have the size already are left as they are.
    """
    height, width = (
        torch.scalar_tensor(side, dtype=torch.float32) for side in images.shape[-2:]
    )
    centre = torch.where((height == size) & (width == size), 1.0, resizing.centre)
    longer, shorter = torch.maximum(height, width), torch.minimum(height, width)
    frames = {
        "crop": (shorter, shorter),
        "pad": (longer, longer),
        "stretch": (width, height),
    }[resizing.fit]
    sides = zip((width, height), frames, images.shape[:1:-1], strict=True)
    (across, right), (down, below) = (
        _weights(
            torch.arange(pixels),
            length,
            centre * frame,
            size,
            KERNELS[resizing.interpolation],
        )
        for length, frame, pixels in sides
    )
    squares = _rounded(down @ _rounded(images @ across.T))
    if resizing.fit != "pad":
        return squares
    padding = torch.tensor(PADDING[images.shape[1]], dtype=torch.float32)[:, None, None]
    return torch.where(below[:, None] & right, squares, padding)


def _weights(
    pixels: Tensor, length: Tensor, frame: Tensor, size: int, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    """(size, length), the weight of each pixel in each of the new ones; and (size,),
    whether they lie in the image.
    """
    start, place = (length - frame) / 2, torch.arange(size, dtype=torch.float32)
    low, high = start.clamp_min(0), torch.minimum(start + frame, length)
    first, end = (((edge - start) * size / frame).round() for edge in (low, high))
    count = (end - first).clamp_min(1)
    step = (high - low) / count
    centres = (place - first + 0.5) * step + low
    distance = (
        pixels.to(torch.float32) + 0.5 - centres[:, None]
    ).abs() / step.clamp_min(1)
    weights, inside = kernel(distance), (place >= first) & (place < first + count)
    return weights / torch.where(inside, weights.sum(1), 1.0)[:, None], inside


def _rounded(levels: Tensor) -> Tensor:
    """Half up; by a little more than a half, so that runtimes which add in another
    order agree on ties.
    """
    return (levels + 0.501).floor().clamp(0, 255)


def _safe_log(probabilities: Tensor) -> Tensor:
    return probabilities.clamp_min(PROBABILITY_FLOOR).log()


def _entropy(probabilities: Tensor) -> Tensor:
    return -(probabilities * _safe_log(probabilities)).sum(-1)


def serialise(model: Model, metadata: dict[str, Any], onnx: bool) -> bytes:
    """The graph as torch.export captures it: any batch, any image size with `resize`,
    any number of actions.
    """
    shape, axes, text = (
        model.input_shape,
        [{0: "batch"}],
        json.dumps(metadata, ensure_ascii=False),
    )
    kind = torch.uint8 if len(shape) == 3 else torch.float32
    if metadata["resize"]:
        shape = (shape[0], *(2 * side + 1 for side in shape[1:]))
        axes[0] |= {2: "height", 3: "width"}
    arguments = [torch.zeros(2, *shape, dtype=kind)]
    if metadata["utility_input"]:
        classes, actions = model.decider.utility.matrix.shape
        arguments.append(torch.zeros(classes, actions + 1, dtype=torch.float64))
        axes.append({1: "actions"})
    graph = DecisionGraph(
        model, resize=metadata["resize"], half=metadata["precision"] == "half"
    )
    trees = replace_trees(graph.net) if onnx else []
    shapes = tuple({axis: Dim(name) for axis, name in names.items()} for names in axes)
    with torch.no_grad():
        program = torch.export.export(
            graph, tuple(arguments), dynamic_shapes=shapes, strict=False
        )
    if onnx:
        names = outputs_of(model.decider)
        return _onnx_bytes(
            program,
            tuple(axes),
            names,
            text,
            trees,
            quantised=metadata["precision"] == "int8",
        )
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={"rfdlc.json": text})
    return buffer.getvalue()


def _onnx_bytes(
    program: ExportedProgram,
    axes: tuple[dict[int, str], ...],
    names: tuple[str, ...],
    text: str,
    trees: list[dict[str, Any]],
    *,
    quantised: bool,
) -> bytes:
    """An ONNX file with a checksum. Stack traces of nodes are left out: they name files
    of this machine.
    """
    try:
        from onnxscript import opset18
    except ImportError:
        raise InputError(
            'exporting to ONNX needs onnx and onnxscript: pip install "rfdlc[export]"'
        ) from None

    def product(
        values: Any, axes: Any, output_dtype: Any = None
    ) -> Any:  # torch's exporter has no translation
        return opset18.ReduceProd(
            values, opset18.Constant(value_ints=list(axes)), keepdims=0
        )

    exported = torch.onnx.export(
        program,
        dynamo=True,
        verbose=False,
        input_names=["inputs", "utility"][: len(axes)],
        output_names=list(names),
        dynamic_shapes=axes,  # their names, for those who open the file in a viewer
        custom_translation_table={
            torch.ops.prims.prod.default: product,
            **translation(trees),
        },
    )
    assert exported is not None
    model = exported.model_proto
    graph, model.producer_name = model.graph, "rfdlc"
    for entry in (
        model,
        graph,
        *graph.node,
        *graph.input,
        *graph.output,
        *graph.value_info,
        *graph.initializer,
    ):
        entry.ClearField("metadata_props")
        entry.ClearField("doc_string")
    if quantised:
        _quantise(graph)
    model.metadata_props.add(key=METADATA_KEY, value=text)
    size = model.ByteSize()
    expect(
        size <= LARGEST,
        f"the graph has {size:,} bytes, over the limit of ONNX ({LARGEST:,}): use .pt2",
    )
    return with_checksum(model.SerializeToString(deterministic=True))


def _quantise(graph: Any) -> None:
    """Weights, but not the utility, as 8-bit integers with one scale per output
    channel; arithmetic in 32 bits.
    """
    from onnx import helper, numpy_helper

    for tensor in list(graph.initializer):
        values, name = numpy_helper.to_array(tensor), tensor.name
        weight = (
            values.dtype == np.float32
            and values.ndim > 1
            and not name.endswith("utility")
        )
        if not weight or values.size < QUANTISED_FROM:
            continue
        axis = (
            0 if values.ndim == 4 else values.ndim - 1
        )  # where the output channels are
        largest = np.abs(values).max(
            axis=tuple(i for i in range(values.ndim) if i != axis), keepdims=True
        )
        scale = np.where(largest > 0, largest / 127, 1).astype(np.float32)
        tensor.CopyFrom(
            numpy_helper.from_array(
                np.round(values / scale).astype(np.int8), f"{name}.int8"
            )
        )
        graph.initializer.append(
            numpy_helper.from_array(scale.reshape(-1), f"{name}.scale")
        )
        graph.node.insert(
            0,
            helper.make_node(
                "DequantizeLinear", [f"{name}.int8", f"{name}.scale"], [name], axis=axis
            ),
        )

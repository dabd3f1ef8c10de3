"""export: a run folder as one file that decides, compared with the run before it is written."""

import hashlib
import io
import json
import logging
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.export import Dim, ExportedProgram

from rfdlc import __version__
from rfdlc.decide.priors import PriorLike
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError, choose, expect
from rfdlc.files import replacing
from rfdlc.integrations.onnx.card import write_cards
from rfdlc.integrations.onnx.graph import DecisionGraph
from rfdlc.integrations.onnx.model import FORMAT, METADATA_KEY, OUTPUTS, VERSION, Decisions, OnnxModel, with_checksum
from rfdlc.integrations.onnx.parity import Parity, measure_parity
from rfdlc.training.assembly import OwnBackbone
from rfdlc.training.model import Model
from rfdlc.training.run import Run

PRECISIONS = ("float32", "half", "int8")
LARGEST = 2**31 - 1  # bytes: the limit of a protobuf message
QUANTISED_FROM = 256  # elements: biases and scales stay as they are


@dataclass(frozen=True)
class Exported:
    """The file that was written, and how it compares with the model."""

    path: Path
    precision: str
    parity: Parity
    cards: tuple[Path, ...]


def export(
    run: str | Path,
    out: str | Path,
    *,
    utility: Utility | None = None,
    target_prior: PriorLike | None = None,
    utility_input: bool = False,
    resize: bool = False,
    precision: str = "float32",
    backbone: OwnBackbone | None = None,
) -> Exported:
    """Write a run as one graph from raw samples to actions, unless the graph does not decide as the run does.

    Parameters
    ----------
    run, out : str or Path
        A run folder, and the file to write: ONNX (`.onnx`) or torch.export (`.pt2`).
    utility, target_prior : optional
        Replace the utility of the run's Decider, and the class prior that it decides for.
    utility_input, resize : bool
        Whether the utility is an input of the graph instead of a constant; whether it takes images of any size.
    precision : {"float32", "half", "int8"}
        "half" computes the networks in 16 bits, "int8" stores weights in 8 bits (ONNX only).
    backbone : nn.Module or callable, optional
        The network of a run that was trained with one of the user's own.

    Examples
    --------
    >>> export("runs/a", "model.onnx").parity.decisions_changed  # doctest: +SKIP
    0
    """
    path = Path(out)
    choose("precision", precision, PRECISIONS)
    choose("the suffix of the exported file,", path.suffix, (".onnx", ".pt2"))
    onnx, full = path.suffix == ".onnx", precision == "float32"
    expect(onnx or precision != "int8", "int8 is for ONNX files: choose a name ending in .onnx, or half")
    model = Model.load(run, backbone=backbone, device="cpu")
    prior = model.decider.target_prior if target_prior is None else target_prior
    model.decider = model.decider.replace(utility=utility, target_prior=prior)
    shape = model.input_shape
    square = len(shape) == 3 and shape[1] == shape[2]
    expect(square or not resize, f"resize is for square images, but this model takes samples of shape {shape}")
    metadata = {"resize": resize, "utility_input": utility_input, "precision": precision, **_describe(model)}
    logger = logging.getLogger("torch.onnx")
    with warnings.catch_warnings(action="ignore"), ExitStack() as quiet:
        quiet.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)  # the exporter reports missing optional packages
        data = _serialise(model, metadata, onnx)

    def decide(inputs: NDArray[Any]) -> Decisions:
        extra = (torch.tensor(model.decider.utility.matrix),) if utility_input else ()
        with torch.no_grad():
            return Decisions(*(output.numpy() for output in program(torch.tensor(inputs), *extra)))

    with replacing(path) as beside:
        beside.write_bytes(data)
        program: Any = None if onnx else torch.export.load(io.BytesIO(data)).module()
        parity = measure_parity(model, OnnxModel.load(beside).decide if onnx else decide, full=full)
        if full:
            parity.check(run)
    return Exported(path, precision, parity, write_cards(model, path, precision, parity))


def _describe(model: Model) -> dict[str, Any]:
    """What the graph computes, and where it comes from; nothing about the machine."""
    run, weights = Run(model.path), model.path / "model.safetensors"
    return {
        "format": FORMAT,
        "version": VERSION,
        "decider": model.decider.to_dict(),
        "input_shape": list(model.input_shape),
        "centre": model.centre,
        "encoder": None if model.encoder is None else model.encoder.to_dict(),
        "provenance": {
            "rfdlc": __version__,
            "torch": torch.__version__,
            "run": run.path.resolve().name,
            "method": run.method_name,
            "data": run.metadata["data"]["name"],
            "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest() if weights.exists() else None,
        },
    }


def _serialise(model: Model, metadata: dict[str, Any], onnx: bool) -> bytes:
    """The graph as torch.export captures it: any batch, any image size with `resize`, any number of actions."""
    shape, axes, text = model.input_shape, [{0: "batch"}], json.dumps(metadata, ensure_ascii=False)
    kind = torch.uint8 if len(shape) == 3 else torch.float32
    if metadata["resize"]:
        shape = (shape[0], *(2 * side + 1 for side in shape[1:]))
        axes[0] |= {2: "height", 3: "width"}
    arguments = [torch.zeros(2, *shape, dtype=kind)]
    if metadata["utility_input"]:
        classes, actions = model.decider.utility.matrix.shape
        arguments.append(torch.zeros(classes, actions + 1, dtype=torch.float64))
        axes.append({1: "actions"})
    graph = DecisionGraph(model, resize=metadata["resize"], half=metadata["precision"] == "half")
    shapes = tuple({axis: Dim(name) for axis, name in names.items()} for names in axes)
    with torch.no_grad():
        program = torch.export.export(graph, tuple(arguments), dynamic_shapes=shapes, strict=False)
    if onnx:
        return _onnx_bytes(program, tuple(axes), text, quantised=metadata["precision"] == "int8")
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={"rfdlc.json": text})
    return buffer.getvalue()


def _onnx_bytes(program: ExportedProgram, axes: tuple[dict[int, str], ...], text: str, *, quantised: bool) -> bytes:
    """An ONNX file with a checksum. Stack traces of nodes are left out: they name files of this machine."""
    try:
        import onnx  # noqa: F401
        from onnxscript import opset18
    except ImportError:
        raise InputError('exporting to ONNX needs onnx and onnxscript: pip install "rfdlc[export]"') from None

    def product(values: Any, axes: Any, output_dtype: Any = None) -> Any:  # torch's exporter has no translation
        return opset18.ReduceProd(values, opset18.Constant(value_ints=list(axes)), keepdims=0)

    exported = torch.onnx.export(
        program,
        dynamo=True,
        verbose=False,
        input_names=["inputs", "utility"][: len(axes)],
        output_names=list(OUTPUTS),
        dynamic_shapes=axes,  # their names, for those who open the file in a viewer
        custom_translation_table={torch.ops.prims.prod.default: product},
    )
    assert exported is not None
    model = exported.model_proto
    graph, model.producer_name = model.graph, "rfdlc"
    values = (*graph.input, *graph.output, *graph.value_info)
    for entry in (model, graph, *graph.node, *values, *graph.initializer):
        entry.ClearField("metadata_props")
        entry.ClearField("doc_string")
    if quantised:
        _quantise(graph)
    model.metadata_props.add(key=METADATA_KEY, value=text)
    size = model.ByteSize()
    expect(size <= LARGEST, f"the graph has {size:,} bytes, over the limit of ONNX ({LARGEST:,}): use .pt2")
    return with_checksum(model.SerializeToString(deterministic=True))


def _quantise(graph: Any) -> None:
    """Weights as 8-bit integers with one scale per output channel; arithmetic stays in 32 bits.

    A quarter of the size, and no calibration data are needed. The utility is not a weight: it stays exact.
    """
    from onnx import helper, numpy_helper

    kept, nodes = [], []
    for tensor in graph.initializer:
        values = numpy_helper.to_array(tensor)
        utility, small = tensor.name.endswith("utility"), values.ndim < 2 or values.size < QUANTISED_FROM
        if values.dtype != np.float32 or small or utility:
            kept.append(tensor)
            continue
        axis = 0 if values.ndim == 4 else values.ndim - 1  # where the output channels are
        largest = np.abs(values).max(axis=tuple(i for i in range(values.ndim) if i != axis), keepdims=True)
        scale = np.where(largest > 0, largest / 127, 1).astype(np.float32)
        parts = {"int8": np.round(values / scale).astype(np.int8), "scale": scale.reshape(-1)}
        kept += [numpy_helper.from_array(part, f"{tensor.name}.{name}") for name, part in parts.items()]
        nodes.append(helper.make_node("DequantizeLinear", [each.name for each in kept[-2:]], [tensor.name], axis=axis))
    nodes += graph.node
    del graph.initializer[:], graph.node[:]
    graph.initializer.extend(kept)
    graph.node.extend(nodes)

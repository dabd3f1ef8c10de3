"""The two formats: ONNX, with metadata and a checksum, and torch.export."""

import io
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rfdlc.errors import InputError
from rfdlc.integrations.onnx.graph import DecisionGraph
from rfdlc.integrations.onnx.model import METADATA_KEY, OUTPUTS, with_checksum

LARGEST = 2**31 - 1  # bytes: the limit of a protobuf message
QUANTISED_FROM = 256  # elements: biases and scales stay as they are


@dataclass(frozen=True)
class Form:
    """The inputs of the graph."""

    sample: tuple[int, ...]  # shape of one sample
    resize: bool
    utility_input: bool

    @property
    def images(self) -> bool:
        return len(self.sample) == 3


def trace(graph: DecisionGraph, form: Form) -> torch.export.ExportedProgram:
    """The graph as torch.export captures it: any batch, any image size with `resize`, any number of actions."""
    size = tuple(2 * side + 1 for side in form.sample[1:]) if form.resize else form.sample[1:]
    example = torch.zeros(2, form.sample[0], *size, dtype=torch.uint8 if form.images else torch.float32)
    moving = {0: torch.export.Dim("batch")}
    if form.resize:
        moving |= {2: torch.export.Dim("height"), 3: torch.export.Dim("width")}
    arguments: tuple[Tensor, ...] = (example,)
    shapes: list[dict[int, Any]] = [moving]
    if form.utility_input:
        arguments = (example, torch.zeros(graph.utility.shape[0], graph.utility.shape[1] + 1, dtype=torch.float64))
        shapes.append({1: torch.export.Dim("actions")})
    with torch.no_grad(), _quiet():
        return torch.export.export(graph, arguments, dynamic_shapes=tuple(shapes), strict=False)


def onnx_bytes(
    program: torch.export.ExportedProgram, form: Form, metadata: dict[str, Any], *, int8: bool = False
) -> bytes:
    """An ONNX file with a checksum; everything that names this machine is left out."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise InputError('exporting to ONNX needs onnx and onnxscript: pip install "rfdlc[export]"') from None
    names = ["inputs", "utility"] if form.utility_input else ["inputs"]
    with _quiet():
        exported = torch.onnx.export(
            program,
            dynamo=True,
            input_names=names,
            output_names=list(OUTPUTS),
            custom_translation_table={torch.ops.prims.prod.default: _product},
        )
    assert exported is not None
    model = exported.model_proto
    _strip(model)
    _name_axes(model, form)
    if int8:
        _quantise(model.graph)
    entry = model.metadata_props.add()
    entry.key, entry.value = METADATA_KEY, json.dumps(metadata, ensure_ascii=False)
    if model.ByteSize() > LARGEST:
        raise InputError(f"the graph has {model.ByteSize():,} bytes, over the limit of ONNX ({LARGEST:,}): use .pt2")
    return with_checksum(model.SerializeToString(deterministic=True))


def pt2_bytes(program: torch.export.ExportedProgram, metadata: dict[str, Any]) -> bytes:
    """What torch.export.save writes, with the metadata beside the graph."""
    buffer = io.BytesIO()
    with _quiet():
        torch.export.save(program, buffer, extra_files={"rfdlc.json": json.dumps(metadata, ensure_ascii=False)})
    return buffer.getvalue()


def _product(values: Any, axes: Any, output_dtype: Any = None) -> Any:
    """Cumulative products, for which torch's exporter has no translation."""
    from onnxscript import opset18

    return opset18.ReduceProd(values, opset18.Constant(value_ints=list(axes)), keepdims=0)


def _strip(model: Any) -> None:
    """Remove the stack traces that nodes carry, with file names of this machine."""
    del model.metadata_props[:]
    del model.graph.metadata_props[:]
    model.producer_name = "rfdlc"
    for entry in (*model.graph.node, *model.graph.value_info, *model.graph.input, *model.graph.output):
        entry.ClearField("doc_string")
        del entry.metadata_props[:]
    for tensor in model.graph.initializer:
        del tensor.metadata_props[:]


def _name_axes(model: Any, form: Form) -> None:
    """Give dynamic axes names, for those who open the file in a viewer."""
    shape = model.graph.input[0].type.tensor_type.shape.dim
    words = {shape[0].dim_param: "batch"}
    if form.resize:
        words |= {shape[2].dim_param: "height", shape[3].dim_param: "width"}
    if form.utility_input:
        words[model.graph.input[1].type.tensor_type.shape.dim[1].dim_param] = "actions"
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in words:
                dim.dim_param = words[dim.dim_param]


def _quantise(graph: Any) -> None:
    """Weights as 8-bit integers with one scale per output channel; arithmetic stays in 32 bits.

    A quarter of the size, and no calibration data are needed. The utility is not a weight: it stays exact.
    """
    import numpy as np
    from onnx import helper, numpy_helper

    kept, nodes = [], []
    for tensor in graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.dtype != np.float32 or values.ndim < 2 or values.size < QUANTISED_FROM or tensor.name == "utility":
            kept.append(tensor)
            continue
        axis = 0 if values.ndim == 4 else values.ndim - 1  # where the output channels are
        others = tuple(i for i in range(values.ndim) if i != axis)
        largest = np.abs(values).max(axis=others, keepdims=True)
        scale = np.where(largest > 0, largest / 127, 1).astype(np.float32)
        parts = {"int8": np.round(values / scale).astype(np.int8), "scale": scale.reshape(-1)}
        kept += [numpy_helper.from_array(part, f"{tensor.name}.{name}") for name, part in parts.items()]
        inputs = [f"{tensor.name}.{name}" for name in parts]
        nodes.append(helper.make_node("DequantizeLinear", inputs, [tensor.name], axis=axis))
    old = list(graph.node)
    del graph.initializer[:], graph.node[:]
    graph.initializer.extend(kept)
    graph.node.extend([*nodes, *old])


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporters, which report their progress and missing optional packages."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)

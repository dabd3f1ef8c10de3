"""export: a run folder as one file that decides, compared with the run before it is written."""

import hashlib
import io
import json
import logging
import warnings
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.export import Dim, ExportedProgram

from rfdlc import __version__
from rfdlc.decide.priors import PriorLike
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError, choose, expect
from rfdlc.files import replacing
from rfdlc.integrations.onnx.card import write_cards
from rfdlc.integrations.onnx.graph import DecisionGraph
from rfdlc.integrations.onnx.model import FORMAT, METADATA_KEY, OUTPUTS, VERSION, OnnxModel, with_checksum
from rfdlc.integrations.onnx.parity import Parity, measure_parity, refuse_unequal
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
    """Write a run as one graph from raw samples to actions.

    Parameters
    ----------
    run : str or Path
        A run folder.
    out : str or Path
        The file to write: ONNX (`.onnx`) or torch.export (`.pt2`).
    utility : Utility, optional
        Replaces the utility of the run's Decider.
    target_prior : str, dict or array, optional
        Replaces the class prior that it decides for.
    utility_input : bool, default=False
        Whether the utility is an input of the graph instead of a constant.
    resize : bool, default=False
        Whether the graph takes images of any size.
    precision : {"float32", "half", "int8"}, default="float32"
        "half" computes the networks in 16 bits, "int8" stores weights in 8 bits (ONNX only).
    backbone : nn.Module or callable, optional
        The network of a run that was trained with one of the user's own.

    Returns
    -------
    Exported
        The path, the parity with the run, and the model cards that were written.

    Raises
    ------
    InputError
        If the graph does not decide as the run does; nothing is written then.

    Examples
    --------
    >>> done = export("runs/a", "model.onnx")  # doctest: +SKIP
    >>> done.parity.decisions_changed  # doctest: +SKIP
    0
    """
    path = Path(out)
    choose("precision", precision, PRECISIONS)
    choose("the suffix of the exported file,", path.suffix, (".onnx", ".pt2"))
    onnx, full = path.suffix == ".onnx", precision == "float32"
    expect(onnx or precision != "int8", "int8 is for ONNX files: choose a name ending in .onnx, or half")
    model = Model.load(run, backbone=backbone, device="cpu")
    if target_prior is not None:
        model.decider = model.decider.replace(target_prior=target_prior)
    shape = model.input_shape
    square = len(shape) == 3 and shape[1] == shape[2]
    expect(square or not resize, f"resize is for square images, but this model takes samples of shape {shape}")
    chosen = model.decider.utility if utility is None else utility.with_classes(model.classes)
    metadata = {"resize": resize, "utility_input": utility_input, "precision": precision, **_describe(model, chosen)}
    text = json.dumps(metadata, ensure_ascii=False)
    logger, buffer = logging.getLogger("torch.onnx"), io.BytesIO()
    with warnings.catch_warnings(action="ignore"), redirect_stdout(io.StringIO()), ExitStack() as quiet:
        quiet.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)  # the exporters report their progress and missing optional packages
        program = _trace(DecisionGraph(model, chosen, resize=resize, half=precision == "half"), metadata)
        if onnx:
            buffer.write(_onnx_bytes(program, text, metadata))
        else:
            torch.export.save(program, buffer, extra_files={"rfdlc.json": text})
    with replacing(path) as beside:
        beside.write_bytes(buffer.getvalue())
        buffer.seek(0)
        exported = OnnxModel.load(beside) if onnx else torch.export.load(buffer).module()

        def predict(inputs: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
            if isinstance(exported, OnnxModel):
                decided = exported.decide(inputs)
                return decided.probabilities, decided.action
            extra = (torch.tensor(chosen.matrix),) if utility_input else ()
            with torch.no_grad():
                outputs = exported(torch.from_numpy(np.ascontiguousarray(inputs)), *extra)
            return outputs[0].numpy(), outputs[2].numpy()

        parity = measure_parity(model, chosen, predict, full=full)
        if full:
            refuse_unequal(parity, run)
    return Exported(path, precision, parity, write_cards(model, chosen, path, precision, parity))


def _describe(model: Model, utility: Utility) -> dict[str, Any]:
    """What the graph computes, and where it comes from; nothing about the machine."""
    assert model.path is not None
    run = Run(model.path)
    weights = run.path / "model.safetensors"
    return {
        "format": FORMAT,
        "version": VERSION,
        "decider": model.decider.replace(utility=utility).to_dict(),
        "input_shape": list(model.input_shape),
        "centre": model.centre,
        "encoder": None if model.encoder is None else model.encoder.to_dict(),
        "provenance": {
            "rfdlc": __version__,
            "torch": torch.__version__,
            "run": run.path.resolve().name,
            "method": run.metadata["method"],
            "data": run.metadata["data"]["name"],
            "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest() if weights.exists() else None,
        },
    }


def _trace(graph: DecisionGraph, metadata: dict[str, Any]) -> ExportedProgram:
    """The graph as torch.export captures it: any batch, any image size with `resize`, any number of actions."""
    shape, dynamic = metadata["input_shape"], {0: Dim("batch")}
    kind = torch.uint8 if len(shape) == 3 else torch.float32
    if metadata["resize"]:
        shape = [shape[0], *(2 * side + 1 for side in shape[1:])]
        dynamic |= {2: Dim("height"), 3: Dim("width")}
    arguments: tuple[Tensor, ...] = (torch.zeros(2, *shape, dtype=kind),)
    shapes: tuple[dict[int, Any], ...] = (dynamic,)
    if metadata["utility_input"]:
        classes, actions = graph.utility.shape
        arguments += (torch.zeros(classes, actions + 1, dtype=torch.float64),)
        shapes += ({1: Dim("actions")},)
    with torch.no_grad():
        return torch.export.export(graph, arguments, dynamic_shapes=shapes, strict=False)


def _onnx_bytes(program: ExportedProgram, text: str, metadata: dict[str, Any]) -> bytes:
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
        input_names=["inputs", "utility"] if metadata["utility_input"] else ["inputs"],
        output_names=list(OUTPUTS),
        custom_translation_table={torch.ops.prims.prod.default: product},
    )
    assert exported is not None
    model = exported.model_proto
    graph, model.producer_name = model.graph, "rfdlc"
    values = (*graph.input, *graph.output, *graph.value_info)
    for entry in (*graph.node, *values):
        entry.ClearField("doc_string")
    for entry in (model, graph, *graph.node, *values, *graph.initializer):
        entry.ClearField("metadata_props")
    sides = graph.input[0].type.tensor_type.shape.dim  # dynamic ones get names, for those who open the file in a viewer
    names = {sides[0].dim_param: "batch"}
    if metadata["resize"]:
        names |= {sides[2].dim_param: "height", sides[3].dim_param: "width"}
    if metadata["utility_input"]:
        names[graph.input[1].type.tensor_type.shape.dim[1].dim_param] = "actions"
    for side in (side for value in values for side in value.type.tensor_type.shape.dim if side.dim_param in names):
        side.dim_param = names[side.dim_param]
    if metadata["precision"] == "int8":
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
        if values.dtype != np.float32 or values.ndim < 2 or values.size < QUANTISED_FROM or tensor.name == "utility":
            kept.append(tensor)
            continue
        axis = 0 if values.ndim == 4 else values.ndim - 1  # where the output channels are
        largest = np.abs(values).max(axis=tuple(i for i in range(values.ndim) if i != axis), keepdims=True)
        scale = np.where(largest > 0, largest / 127, 1).astype(np.float32)
        names = [f"{tensor.name}.int8", f"{tensor.name}.scale"]
        kept.append(numpy_helper.from_array(np.round(values / scale).astype(np.int8), names[0]))
        kept.append(numpy_helper.from_array(scale.reshape(-1), names[1]))
        nodes.append(helper.make_node("DequantizeLinear", names, [tensor.name], axis=axis))
    nodes += graph.node
    del graph.initializer[:], graph.node[:]
    graph.initializer.extend(kept)
    graph.node.extend(nodes)

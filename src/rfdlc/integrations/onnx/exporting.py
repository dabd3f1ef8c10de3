"""export: a run folder as one file that decides, compared with the run before it is written."""

import hashlib
import io
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rfdlc import __version__
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError, choose
from rfdlc.files import replacing
from rfdlc.integrations.onnx.card import write_cards
from rfdlc.integrations.onnx.formats import Form, onnx_bytes, pt2_bytes, trace
from rfdlc.integrations.onnx.graph import DecisionGraph
from rfdlc.integrations.onnx.model import FORMAT, VERSION, OnnxModel
from rfdlc.integrations.onnx.parity import Parity, Predict, measure_parity, refuse_unequal
from rfdlc.training.assembly import OwnBackbone
from rfdlc.training.model import Model
from rfdlc.training.run import Run

PRECISIONS = ("float32", "half", "int8")
SUFFIXES = (".onnx", ".pt2")


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
    choose("the suffix of the exported file,", path.suffix, SUFFIXES)
    if precision == "int8" and path.suffix == ".pt2":
        raise InputError("int8 is for ONNX files: choose a name ending in .onnx, or half")
    model = Model.load(run, backbone=backbone, device="cpu")
    if resize and (len(model.input_shape) != 3 or model.input_shape[1] != model.input_shape[2]):
        raise InputError(f"resize is for square images, but this model takes samples of shape {model.input_shape}")
    chosen = model.decider.utility if utility is None else utility.with_classes(model.classes)
    form = Form(model.input_shape, resize, utility_input)
    program = trace(DecisionGraph(model, chosen, resize=resize, half=precision == "half"), form)
    metadata = _metadata(model, chosen, form, precision)
    if path.suffix == ".pt2":
        data = pt2_bytes(program, metadata)
    else:
        data = onnx_bytes(program, form, metadata, int8=precision == "int8")
    full = precision == "float32"
    parity = measure_parity(model, chosen, _predictor(data, path.suffix, form, chosen), full=full)
    if full:
        refuse_unequal(parity, run)
    with replacing(path) as beside:
        beside.write_bytes(data)
    return Exported(path, precision, parity, write_cards(model, chosen, path, precision, parity))


def _metadata(model: Model, utility: Utility, form: Form, precision: str) -> dict[str, Any]:
    """What describes the graph, and where it comes from; nothing about the machine."""
    assert model.path is not None
    run = Run(model.path)
    weights = run.path / "model.safetensors"
    return {
        "format": FORMAT,
        "version": VERSION,
        "decider": model.decider.replace(utility=utility).to_dict(),
        "input_shape": list(model.input_shape),
        "centre": model.centre,
        "resize": form.resize,
        "utility_input": form.utility_input,
        "encoder": None if model.encoder is None else model.encoder.to_dict(),
        "precision": precision,
        "provenance": {
            "rfdlc": __version__,
            "torch": torch.__version__,
            "run": run.path.resolve().name,
            "method": run.metadata["method"],
            "data": run.metadata["data"]["name"],
            "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest() if weights.exists() else None,
        },
    }


def _predictor(data: bytes, suffix: str, form: Form, utility: Utility) -> Predict:
    """The exported graph as a function, run by ONNX Runtime or torch."""
    if suffix == ".pt2":
        module = torch.export.load(io.BytesIO(data)).module()
        extra = (torch.tensor(utility.matrix),) if form.utility_input else ()

        def by_torch(inputs: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
            with torch.no_grad():
                outputs = module(torch.from_numpy(np.ascontiguousarray(inputs)), *extra)
            return outputs[0].numpy(), outputs[2].numpy()

        return by_torch
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        file.write_bytes(data)
        model = OnnxModel.load(file)

    def by_onnx(inputs: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        decided = model.decide(inputs)
        return decided.probabilities, decided.action

    return by_onnx

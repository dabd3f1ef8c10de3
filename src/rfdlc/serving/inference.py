"""The Open Inference Protocol (KServe v2): its requests as those of /decide, and
answers as tensors.

https://github.com/kserve/open-inference-protocol, REST, without the binary extension.
"""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import numpy as np
from fastapi import HTTPException
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json, to_json

from rfdlc import __version__
from rfdlc.serving.backend import Answer
from rfdlc.serving.labels import Ids, ReceivedLabels, read_labels
from rfdlc.serving.requests import Reader, require

SERVER = {"name": "rfdlc", "version": __version__, "extensions": []}
TEXTS, INTEGERS, FLOATS = (
    ("BYTES", "BOOL"),
    ("UINT8", "INT32", "INT64"),
    ("FP32", "FP64"),
)
SIDES, LARGEST = 4, 2**24  # of a tensor
BODY = (
    "expected an object with inputs, a list of tensors (name, shape, datatype, data),"
    " and optionally id and outputs"
)
TENSOR = (
    f"expected datatype {', '.join(INTEGERS + FLOATS + TEXTS)}, and as many values in"
    " data as shape says"
)


class Tensor(BaseModel):
    """One input; `data` is flat or nested."""

    model_config = ConfigDict(strict=True)
    name: str = Field(max_length=1000)
    shape: list[int] = Field(min_length=1, max_length=SIDES)
    datatype: str
    data: list[Any] = Field(max_length=LARGEST)


class Wanted(BaseModel):
    """One output that is asked for."""

    name: str = Field(max_length=1000)


class InferRequest(BaseModel):
    """The body of a request; what else it holds is ignored, as the protocol says."""

    inputs: list[Tensor] = Field(min_length=1, max_length=10_000)
    id: str | None = Field(None, max_length=1000)
    outputs: list[Wanted] | None = Field(None, max_length=100)


class Inference:
    """The tensors of one model."""

    def __init__(self, name: str, version: str, reader: Reader) -> None:
        self.name, self.version, self.reader = name, version, reader
        shape, kind = (
            list(reader.served.input_shape),
            "UINT8" if reader.images else "FP32",
        )
        count = len(reader.classes)
        self.inputs = [
            _described("inputs", kind, -1, *shape),
            _described("probabilities", "FP64", -1, count),
        ]
        if "rows" in reader.readers:
            self.inputs = [
                _described(column.name, "BYTES", -1)
                for column in reader.served.encoder.columns
            ]
        self.inputs.append(_described("utility", "FP64", count, -1))
        floats = (
            "expected_utility",
            "probability",
            "uncertainty",
            "mutual_information",
        )
        self.outputs = [
            _described(name, "BYTES", -1) for name in ("action", "reason", "argmax")
        ]
        self.outputs += [_described(name, "FP64", -1) for name in floats]
        tables = {"probabilities": count, "expected_utilities": -1}
        self.outputs += [
            _described(name, "FP64", -1, side) for name, side in tables.items()
        ]
        self.outputs += [_described("set", "BOOL", -1, count)] if reader.sets else []
        self.work: dict[
            str, Callable[[Any, float], Any]
        ] = {  # what large requests have done in a process
            "infer": self.read,
            "json": reader.read_json,
            "image": reader.read_image,
            "form": reader.read_form,
            "encode": self.encode,
            "labels": self.read_labels,
        }

    def metadata(self, versions: list[str]) -> dict[str, Any]:
        """What a client needs to know of the model."""
        table = {"name": self.name, "versions": versions, "platform": "rfdlc"}
        return {**table, "inputs": self.inputs, "outputs": self.outputs}

    def read(self, body: bytes, deadline: float) -> dict[str, Any]:
        """The question of a request, as /decide reads it, and what its answer must look
        like.
        """
        try:
            given = InferRequest.model_validate(from_json(body, allow_inf_nan=False))
        except (ValueError, ValidationError, RecursionError):
            raise HTTPException(400, BODY) from None
        names = [tensor.name for tensor in given.inputs]
        require(len(names) == len(set(names)), "inputs: expected different names", 400)
        tensors = {tensor.name: _values(tensor) for tensor in given.inputs}
        utility, question = tensors.pop("utility", None), dict[str, Any]()
        if "rows" in self.reader.readers and tensors.keys() != {"probabilities"}:
            question["rows"] = {
                name: values.reshape(-1).tolist() for name, values in tensors.items()
            }
        else:
            question = {
                "arrays" if name == "inputs" else name: values.tolist()
                for name, values in tensors.items()
            }
        if utility is not None:
            question["utility"] = {"matrix": utility.tolist()}
        wanted = (
            None if given.outputs is None else [each.name for each in given.outputs]
        )
        known = [each["name"] for each in self.outputs]
        require(
            wanted is None or set(wanted) <= set(known),
            f"outputs: expected some of {', '.join(known)}",
            400,
        )
        return self.reader.read_question(question, deadline) | {
            "infer": (given.id, wanted)
        }

    def read_labels(
        self, given: tuple[bytes, Ids, tuple[str, ...]], deadline: float
    ) -> ReceivedLabels:
        """The labels in a body, by the ids of a log; designs name actions."""
        return read_labels(self.reader.classes.names, *given)

    def encode(self, given: tuple[Any, ...], deadline: float) -> tuple[Answer, bytes]:
        """An answer for a utility, if one is given, and its JSON: full or not, or what
        tensors were asked for.
        """
        answer, utility, full, asked, named = given
        decided = answer.by(utility)
        table = (
            {**decided.to_dict(full), **named}
            if asked is None
            else self.render(decided, asked, named)
        )
        return decided, to_json(table)

    def render(
        self,
        answer: Answer,
        asked: tuple[str | None, list[str] | None],
        named: Mapping[str, Any],
    ) -> dict[str, Any]:
        """An answer as tensors; sets are a mask over the classes. `named` become
        parameters.
        """
        table = answer.to_dict(full=True)
        classes = table.pop("classes")
        table.pop("actions")
        if "set" in table:
            table["set"] = [
                [name in members for name in classes]
                for members in map(set, table["set"])
            ]
        outputs = [
            _tensor(name, table[name]) for name in asked[1] or table if name in table
        ]
        given = {} if asked[0] is None else {"id": asked[0]}
        told = {
            "parameters": {
                key: each if isinstance(each, str) else ",".join(each)
                for key, each in named.items()
            }
        }
        return {
            "model_name": self.name,
            "model_version": self.version,
            **given,
            **told,
            "outputs": outputs,
        }


def _described(name: str, datatype: str, *shape: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape)}


def _values(tensor: Tensor) -> NDArray[Any]:
    """The data of a tensor in its shape; cells of tables stay as they are."""
    texts, integers = tensor.datatype in TEXTS, tensor.datatype in INTEGERS
    sizes = all(0 < side <= LARGEST for side in tensor.shape)
    require(
        sizes and tensor.datatype in TEXTS + INTEGERS + FLOATS, f"input {TENSOR}", 400
    )
    try:
        values = np.array(tensor.data, object if texts else np.float64)
        cells = not texts or all(
            isinstance(cell, str | bool | None) for cell in values.flat
        )
        whole = not integers or (
            (np.abs(values) < 2**53).all() and (values == np.floor(values)).all()
        )
        require(
            cells and whole and (texts or np.isfinite(values).all()),
            f"input {TENSOR}",
            400,
        )
        return values.reshape(tensor.shape).astype(
            np.int64 if integers else values.dtype
        )
    except (ValueError, TypeError, OverflowError, RecursionError, MemoryError):
        raise HTTPException(400, f"input {TENSOR}") from None


def _tensor(name: str, rows: list[Any]) -> dict[str, Any]:
    nested = isinstance(rows[0], list)
    first = rows[0][0] if nested else rows[0]
    kind = (
        "BYTES"
        if isinstance(first, str)
        else "BOOL"
        if isinstance(first, bool)
        else "FP64"
    )
    shape = (len(rows), len(rows[0])) if nested else (len(rows),)
    return {
        **_described(name, kind, *shape),
        "data": list(chain.from_iterable(rows)) if nested else rows,
    }

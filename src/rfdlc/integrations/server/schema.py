"""POST /decide for the OpenAPI document: bodies are read by hand, so they are described by hand."""

from typing import Any

from rfdlc.integrations.server.backends import Backend
from rfdlc.integrations.server.limits import Limits

NUMBERS = {"type": "array", "items": {"type": "number"}}
TEXTS = {"type": "array", "items": {"type": "string"}}
TABLE = {"type": "array", "items": NUMBERS}
REFUSALS = {
    400: "no JSON",
    401: "no token, or a wrong one",
    408: "the body came too slowly",
    413: "too large: body, image or number of samples",
    415: "unknown content type",
    422: "the values do not fit the model",
    429: "too much is waiting: see Retry-After",
    503: "no answer in time",
}


def described(backend: Backend, limits: Limits, image_types: tuple[str, ...], token: bool) -> dict[str, Any]:
    """Keyword arguments of the route."""
    bodies = {"application/json": {"schema": _question(backend, limits)}}
    bodies |= {kind: {"schema": {"type": "string", "format": "binary"}} for kind in image_types if backend.images}
    error = {"application/json": {"schema": {"type": "object", "properties": {"detail": {"type": "string"}}}}}
    responses: dict[int, Any] = {code: {"description": text, "content": error} for code, text in REFUSALS.items()}
    responses[200] = {"description": "Decisions", "content": {"application/json": {"schema": _answer()}}}
    full = {"name": "full", "in": "query", "schema": {"type": "boolean"}, "description": "Add the tables decided from."}
    extra: dict[str, Any] = {"requestBody": {"required": True, "content": bodies}, "parameters": [full]}
    if token:
        extra["security"] = [{"bearer": []}]
    return {"responses": responses, "openapi_extra": extra}


def _question(backend: Backend, limits: Limits) -> dict[str, Any]:
    classes = len(backend.decider.utility.classes)
    row = {**NUMBERS, "minItems": classes, "maxItems": classes}
    sample: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 255} if backend.images else {"type": "number"}
    for side in reversed(backend.input_shape):
        sample = {"type": "array", "items": sample, "minItems": side, "maxItems": side}
    many = {"type": "array", "minItems": 1, "maxItems": limits.samples}
    kinds: dict[str, Any] = {
        "arrays": {**many, "items": sample},
        "probabilities": {**many, "items": row},
    }
    if backend.images:
        kinds["images"] = {**many, "items": {"type": "string", "format": "byte"}}
    if backend.encoder is not None:
        kinds["rows"] = {"type": "object", "additionalProperties": {"type": "array"}}
    utility = {
        "type": "object",
        "properties": {"matrix": TABLE, "actions": TEXTS, "classes": TEXTS},
        "required": ["matrix"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {**kinds, "utility": utility},
        "oneOf": [{"required": [kind]} for kind in kinds],
        "additionalProperties": False,
    }


def _answer() -> dict[str, Any]:
    words = ("action", "argmax")
    numbers = ("expected_utility", "probability", "uncertainty", "mutual_information")
    columns: dict[str, Any] = dict.fromkeys(words, TEXTS) | dict.fromkeys(numbers, NUMBERS)
    full = {"classes": TEXTS, "actions": TEXTS, "probabilities": TABLE, "expected_utilities": TABLE}
    return {"type": "object", "properties": {**columns, **full}, "required": list(columns)}

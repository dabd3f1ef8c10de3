"""Sealed files: a SHA-256 at the end of an ONNX file, over every byte before it.

A protobuf message may be followed by further fields, so the seal is one more entry of the model's metadata: any ONNX
runtime reads the file as it is, and whoever knows the seal finds damage or a later change without parsing anything.
It proves that a file is what an export wrote, not who exported it.
"""

import hashlib
from pathlib import Path

from rfdlc.errors import InputError

KEY = b"rfdlc.sha256"
METADATA_FIELD = 14  # ModelProto.metadata_props: entries with key = 1 and value = 2
DIGEST_LENGTH = 64


def _field(number: int, data: bytes) -> bytes:
    assert len(data) < 128, "a length of one byte"
    return bytes([number << 3 | 2, len(data)]) + data


def _seal(digest: str) -> bytes:
    return _field(METADATA_FIELD, _field(1, KEY) + _field(2, digest.encode()))


SEAL_LENGTH = len(_seal("0" * DIGEST_LENGTH))


def sealed(data: bytes) -> bytes:
    """The file with its seal."""
    return data + _seal(hashlib.sha256(data).hexdigest())


def read_sealed(path: str | Path) -> bytes:
    """The bytes of a file whose seal is right; what was checked is what the caller gets."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    body, seal = data[:-SEAL_LENGTH], data[-SEAL_LENGTH:]
    if seal[:-DIGEST_LENGTH] != _seal("0" * DIGEST_LENGTH)[:-DIGEST_LENGTH]:
        raise InputError(
            f"{path} has no seal of ours at its end: it is cut off, was saved again by another tool, or is no export "
            "of rfdlc; write it with `rfdlc export RUN model.onnx`"
        )
    if seal != _seal(hashlib.sha256(body).hexdigest()):
        raise InputError(
            f"{path} was changed after it was exported (its SHA-256 differs): it is damaged or was tampered with; "
            "export it again from its run folder"
        )
    return data

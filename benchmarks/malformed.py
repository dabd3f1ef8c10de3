"""Requests that must be refused: made by hand, and by schemathesis from the OpenAPI
document.
"""

import base64
import io
import json
import struct
import zlib
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from load import request as post


def malformed(count: int, seed: int, token: str) -> list[bytes]:
    """Truncated and bombing images, NaN, huge shapes, random bytes, wrong kinds."""
    rng = np.random.default_rng(seed)
    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (200, 200, 3), dtype=np.uint8)).save(
        buffer, "JPEG"
    )
    picture = buffer.getvalue()

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data))
            + kind
            + data
            + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 9000, 9000, 8, 0, 0, 0, 0))
    bomb = (
        b"\x89PNG\r\n\x1a\n"
        + header
        + chunk(b"IDAT", zlib.compress(bytes(81_009_000), 1))
        + chunk(b"IEND", b"")
    )
    request = partial(post, token=token)
    kinds = [
        lambda: request(
            picture[: int(rng.integers(1, len(picture) - 200))], "image/jpeg"
        ),
        lambda: request(bomb, "image/png"),
        lambda: request(
            json.dumps({"images": [base64.b64encode(picture[:500]).decode()]}).encode()
        ),
        lambda: request(b'{"arrays": [[[[NaN]]]]}'),
        lambda: request(json.dumps({"arrays": [[[[0] * 50_000]]]}).encode()),
        lambda: request(
            json.dumps({"arrays": rng.integers(0, 256, (2, 3, 4)).tolist()}).encode()
        ),
        lambda: request(
            json.dumps({"probabilities": rng.normal(size=(3, 10)).tolist()}).encode()
        ),
        lambda: request(b'{"arrays": ' + b"[" * int(rng.integers(1, 50_000))),
        lambda: request(rng.bytes(int(rng.integers(0, 5000)))),
        lambda: request(rng.bytes(1000), "text/plain"),
        lambda: post(b"{}", token="wrong"),
    ]
    return [kinds[i % len(kinds)]() for i in range(count)]


def against_the_document(port: int, token: str, count: int) -> Counter[int]:
    """Statuses of so many requests that schemathesis makes to break the document."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, assume, given, settings

    authorised = {"Authorization": f"Bearer {token}"}
    schema = schemathesis.openapi.from_url(
        f"http://127.0.0.1:{port}/openapi.json", headers=authorised
    )
    statuses: Counter[int] = Counter()
    cases = schema["/decide"]["POST"].as_strategy(
        generation_mode=schemathesis.GenerationMode.NEGATIVE
    )

    @given(case=cases)
    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: Any) -> None:
        assume(
            all(_is_sent(value) for value in (case.query or {}).values())
        )  # what is left may be right otherwise
        parts = (
            case.meta.components.items()
        )  # where the token itself is what is broken, it is sent as it is
        broken = any(
            (part.value, info.mode.value) == ("header", "negative")
            for part, info in parts
        )
        statuses[case.call(headers=None if broken else authorised).status_code] += 1

    ask()
    return statuses


def _is_sent(value: Any) -> bool:
    """Whether a parameter of this value is in the request at all: lists of nothing are
    not.
    """
    return (
        any(_is_sent(each) for each in value)
        if isinstance(value, list | dict)
        else True
    )

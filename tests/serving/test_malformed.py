"""Whatever is sent, the answer is 4xx, says what is expected, and does not repeat what
was sent.
"""

import base64
import http.client
import io
import json
import struct
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import pytest
from PIL import Image

pytest.importorskip("fastapi", reason='server tests need pip install "rfdlc[serve]"')

SECRET = "swordfish"
GOOD = [[[[0] * 8] * 8]]


def image_file(size=(8, 8), mode="L", kind="PNG"):
    buffer = io.BytesIO()
    Image.new(mode, size).save(buffer, kind)
    return buffer.getvalue()


def png(header, pixels):
    def chunk(kind, data):
        return (
            struct.pack(">I", len(data))
            + kind
            + data
            + struct.pack(">I", zlib.crc32(kind + data))
        )

    body = chunk(b"IHDR", struct.pack(">IIBBBBB", *header)) + chunk(
        b"IDAT", zlib.compress(pixels)
    )
    return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IEND", b"")


def bomb(width=60_000, height=60_000):
    """A PNG of a few bytes that claims 3.6 billion pixels."""
    return png((width, height, 8, 0, 0, 0, 0), b"\0" * 1000)


def deep_colour():
    """Colour of 16 bits a channel, which pillow opens as if it had 8."""
    return png((4, 4, 16, 2, 0, 0, 0), (b"\0" + b"\x12\x34" * 12) * 4)


def pages():
    """A TIFF with a directory for each of 20,000 pages: pillow would count them in
    quadratic time.
    """
    first = Image.open(io.BytesIO(image_file(kind="TIFF")))
    content = bytearray(image_file(kind="TIFF"))
    last = (
        first.tag_v2._offset + 2 + 12 * len(first.tag_v2)
    )  # where the offset of the next directory is
    for _ in range(20_000):
        content[last : last + 4] = struct.pack("<I", len(content))
        last = len(content) + 2
        content += struct.pack("<HI", 0, 0)
    return bytes(content)


def coded(data):
    return base64.b64encode(data).decode()


JSON_BODIES = {
    "nothing": b"",
    "no JSON": b'{"arrays": ' + SECRET.encode(),
    "not text": b"\xff\xfe\x00",
    "a list": b"[]",
    "a number": b"7",
    "NaN": b'{"arrays": [[[[NaN]]]]}',
    "infinite": json.dumps({"arrays": GOOD}).replace("0", "1e999", 1).encode(),
    "a long number": b'{"arrays": [' + b"9" * 5000 + b"]}",
    "deep": b'{"arrays": ' + b"[" * 100_000,
    "deep and closed": b'{"arrays": ' + b"[" * 900 + b"]" * 900 + b"}",
    "many dimensions": {"arrays": [[[[[[[0]]]]]]]},
    "ragged": {"arrays": [[[[0] * 8] * 8], [[[0] * 7] * 8]]},
    "empty": {"arrays": []},
    "text": {"arrays": [[[[SECRET] * 8] * 8]]},
    "numbers as text": {"arrays": [[[["1"] * 8] * 8]]},
    "true": {"arrays": [[[[True] * 8] * 8]]},
    "null": {"arrays": [[[[None] * 8] * 8]]},
    "objects": {"arrays": {SECRET: 1}},
    "another shape": {"arrays": [[[[0] * 9] * 8]]},
    "a huge shape": {"arrays": [[[[0] * 100_000]]]},
    "too many samples": {"arrays": GOOD * 257},
    "out of range": {"arrays": [[[[256] * 8] * 8]]},
    "fractions": {"arrays": [[[[0.5] * 8] * 8]]},
    "no kind": {"utility": {"matrix": [[1]]}},
    "two kinds": {"arrays": GOOD, "probabilities": [[0.1] * 10]},
    "an unknown field": {"arrays": GOOD, SECRET: 1},
    "rows for images": {"rows": {"age": [1]}},
    "no base64": {"images": ["*" + SECRET]},
    "no images": {"images": SECRET},
    "numbers for images": {"images": [1, 2]},
    "no picture": {"images": [coded(SECRET.encode())]},
    "a truncated picture": {
        "images": [coded(image_file((300, 300), "RGB", "JPEG")[:-400])]
    },
    "half a header": {"images": [coded(image_file()[:20])]},
    "a broken checksum": {"images": [coded(image_file((40, 40))[:-20] + b"x" * 20)]},
    "a bomb": {"images": [coded(bomb())]},
    "a lesser bomb": {"images": [coded(bomb(6000, 6000))]},
    "print colours": {"images": [coded(image_file(mode="CMYK", kind="JPEG"))]},
    "16 bits in colour": {"images": [coded(deep_colour())]},
    "16 bits": {"images": [coded(image_file(mode="I;16"))]},
    "16 bits in a TIFF": {"images": [coded(image_file(mode="I;16", kind="TIFF"))]},
    "many pages": {"images": [coded(pages())]},
    "another format": {"images": [coded(image_file(kind="TGA"))]},
    "negative": {"probabilities": [[-0.1, 1.1] + [0] * 8]},
    "no sum": {"probabilities": [[0.5] * 10]},
    "too few classes": {"probabilities": [[0.5, 0.5]]},
    "no samples": {"probabilities": [[]]},
    "no particles": {"probabilities": [[[]]]},
    "a text utility": {"arrays": GOOD, "utility": SECRET},
    "a utility of another shape": {"arrays": GOOD, "utility": {"matrix": [[1, 2]]}},
    "an infinite utility": {"arrays": GOOD, "utility": {"matrix": [[1e400] * 10] * 10}},
    "doubled actions": {
        "arrays": GOOD,
        "utility": {"matrix": [[1, 2]] * 10, "actions": [SECRET, SECRET]},
    },
    "unknown classes": {
        "arrays": GOOD,
        "utility": {"matrix": [[1] * 10] * 10, "classes": [SECRET] * 10},
    },
    "classes as numbers": {
        "arrays": GOOD,
        "utility": {"matrix": [[1] * 10] * 10, "classes": list(range(10))},
    },
}


@pytest.mark.parametrize("name", JSON_BODIES)
def test_bodies(served, name):
    status, _, answer = served.ask(JSON_BODIES[name])
    assert 400 <= status < 500, answer
    assert SECRET.encode() not in answer
    assert json.loads(answer)["detail"]


HEAD = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.png"\r\n\r\n'
FORMS = {
    "no boundary": ("multipart/form-data", HEAD + image_file() + b"\r\n--b--"),
    "an empty boundary": (
        'multipart/form-data; boundary=""',
        HEAD + image_file() + b"\r\n--b--",
    ),
    "another boundary": (
        "multipart/form-data; boundary=c",
        HEAD + image_file() + b"\r\n--b--",
    ),
    "nothing": ("multipart/form-data; boundary=b", b""),
    "no parts": ("multipart/form-data; boundary=b", b"--b--\r\n"),
    "cut off": ("multipart/form-data; boundary=b", HEAD + image_file()),
    "no end of headers": (
        "multipart/form-data; boundary=b",
        b"--b\r\nContent-Disposition: form-data\r\n--b--",
    ),
    "text": ("multipart/form-data; boundary=b", HEAD + SECRET.encode() + b"\r\n--b--"),
    "odd characters": (
        "multipart/form-data; boundary*=utf-16''%ff%00b",
        HEAD + image_file() + b"\r\n--b--",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(served, name):
    kind, body = FORMS[name]
    status, _, answer = served.ask(body, Content_Type=kind)
    assert status == 422, answer
    assert SECRET.encode() not in answer
    assert "expected" in json.loads(answer)["detail"]


def test_a_form_has_as_many_files_as_a_request_has_samples(served):
    part, end = HEAD + image_file() + b"\r\n", b"--b--\r\n"
    assert (
        served.ask(256 * part + end, Content_Type="multipart/form-data; boundary=b")[0]
        == 200
    )
    for count in (257, 100_000):
        assert (
            served.ask(
                count * part + end, Content_Type="multipart/form-data; boundary=b"
            )[0]
            == 413
        )
    assert (
        served.ask(
            HEAD + bomb() + b"\r\n" + end,
            Content_Type="multipart/form-data; boundary=b",
        )[0]
        == 413
    )


def test_bombs_are_too_large(served):
    for size in ((60_000, 60_000), (6000, 6000)):
        assert served.ask({"images": [coded(bomb(*size))]})[0] == 413
        assert served.ask(bomb(*size), Content_Type="image/png")[0] == 413


def test_sizes_and_kinds(served):
    assert served.ask(b"x" * (17 * 2**20))[0] == 413
    for kind in (
        "text/plain",
        "multipart/mixed",
        "application/x-www-form-urlencoded",
        "",
        "image/heic",
    ):
        assert served.ask({"arrays": GOOD}, Content_Type=kind)[0] == 415
    assert served.ask({"arrays": GOOD}, path="/decide?full=" + SECRET)[0] == 422
    assert served.ask({"arrays": GOOD}, path="/nothing")[0] == 413
    assert served.ask({"arrays": GOOD}, method="PUT")[0] == 413


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(),
    reason="memory of a process is read from /proc",
)
def test_memory_stays_flat(file):
    process = subprocess.Popen(
        [sys.executable, "-m", "rfdlc", "serve", str(file), "--port", "0", "--quiet"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        port = json.loads(process.stderr.readline())["port"]
        assert json.loads(process.stderr.readline())["event"] == "ready"
        bodies = [
            body if isinstance(body, bytes) else json.dumps(body).encode()
            for body in JSON_BODIES.values()
        ]

        def pages_after(rounds):
            for body in rounds * bodies:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
                connection.request(
                    "POST", "/decide", body, {"Content-Type": "application/json"}
                )
                assert 400 <= connection.getresponse().status < 500
                connection.close()
            return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])

        before = pages_after(2)
        assert pages_after(4) < 1.05 * before
    finally:
        process.kill()
        process.wait()


def test_what_the_document_describes_and_what_it_does_not(served):
    """Schemathesis reads the OpenAPI document and makes requests that follow it, and
    requests that do not.
    """
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings

    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    positive, negative = (
        schemathesis.GenerationMode.POSITIVE,
        schemathesis.GenerationMode.NEGATIVE,
    )
    seen = set()
    for mode in (positive, negative):
        cases = schema["/decide"]["POST"].as_strategy(generation_mode=mode)

        @given(case=cases)
        @settings(
            max_examples=25,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def ask(case):
            response = case.call()
            assert response.status_code < 500
            seen.add(response.status_code)

        ask()
    assert seen & {400, 415, 422}


@pytest.mark.parametrize(
    "body",
    [
        b"{" + b",".join(b'"%x":1' % i for i in range(500_000)) + b"}",
        b'{"utility":{'
        + b",".join(b'"%x":1' % i for i in range(500_000))
        + b'},"arrays":[]}',
        b'{"arrays":[[[[0]]]],"utility":{"matrix":[[1]],"actions":['
        + b",".join([b"1"] * 2_000_000)
        + b"]}}",
        b'{"arrays":[[[' + b",".join([b"[]"] * 1_000_000) + b"]]]}",
    ],
    ids=["fields", "fields of a utility", "actions", "lists"],
)
def test_a_million_errors_cost_little_memory(backend, body):
    """pydantic would make an object of each error: a gigabyte for a body of some
    megabytes.
    """
    from fastapi import HTTPException

    from rfdlc.serving.backend import Limits
    from rfdlc.serving.requests import Reader

    reader = Reader(backend, Limits())
    tracemalloc.start()
    try:
        with pytest.raises(HTTPException):
            reader.read_json(body, 0.0)
        assert tracemalloc.get_traced_memory()[1] < 40 * len(body)
    finally:
        tracemalloc.stop()

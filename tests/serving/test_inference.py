"""The Open Inference Protocol gives the answers of /decide, for every version of a
model.
"""

import json
import time

import numpy as np
import pytest

pytest.importorskip("fastapi", reason='server tests need pip install "rfdlc[serve]"')


def tensor(name, values, datatype, nested=False):
    values = np.asarray(values)
    data = values.tolist() if nested else values.reshape(-1).tolist()
    return {
        "name": name,
        "shape": list(values.shape),
        "datatype": datatype,
        "data": data,
    }


@pytest.fixture(scope="module")
def both(start, backend, by_hand):
    with start({"1": backend, "2": by_hand(lambda: None)}) as found:
        yield found


def get(served, path, **headers):
    status, _, body = served.ask(path=path, method="GET", **headers)
    return status, json.loads(body)


def infer(served, body, path="/v2/models/digits/infer", **headers):
    status, _, answer = served.ask(body, path=path, **headers)
    return status, json.loads(answer)


def outputs(answer):
    return {
        each["name"]: np.reshape(each["data"], each["shape"])
        for each in answer["outputs"]
    }


def test_server_health_and_models(both):
    assert get(both, "/v2")[1]["name"] == "rfdlc"
    for path in (
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/digits/ready",
        "/v2/models/digits/versions/2/ready",
    ):
        assert get(both, path)[0] == 200
    status, table = get(both, "/v2/models/digits")
    assert (status, table["name"], table["versions"]) == (200, "digits", ["1", "2"])
    assert table["inputs"][0] == {
        "name": "inputs",
        "datatype": "UINT8",
        "shape": [-1, 1, 8, 8],
    }
    assert {"name": "action", "datatype": "BYTES", "shape": [-1]} in table["outputs"]
    for path in (
        "/v2/models/other",
        "/v2/models/digits/versions/3",
        "/v2/models/digits/versions/3/ready",
    ):
        assert get(both, path) == (404, {"error": "there is no such model or version"})


@pytest.mark.parametrize("nested", [False, True])
def test_answers_are_those_of_decide(both, samples, nested):
    status, answer = infer(
        both, {"id": "42", "inputs": [tensor("inputs", samples[:5], "UINT8", nested)]}
    )
    assert status == 200
    assert (answer["id"], answer["model_name"], answer["model_version"]) == (
        "42",
        "digits",
        "1",
    )
    expected = json.loads(
        both.ask({"arrays": samples[:5].tolist()}, path="/decide?full=true")[2]
    )
    found = outputs(answer)
    assert found["action"].tolist() == expected["action"]
    for name in (
        "expected_utility",
        "probability",
        "uncertainty",
        "probabilities",
        "expected_utilities",
    ):
        np.testing.assert_allclose(found[name], expected[name], atol=2e-7)
    kinds = {each["name"]: each["datatype"] for each in answer["outputs"]}
    assert (kinds["action"], kinds["probabilities"]) == ("BYTES", "FP64")
    again = [tensor("probabilities", expected["probabilities"], "FP64")]
    some = {"inputs": again, "outputs": [{"name": "argmax"}, {"name": "probability"}]}
    assert [each["name"] for each in infer(both, some)[1]["outputs"]] == [
        "argmax",
        "probability",
    ]


def test_a_utility_as_a_tensor(both, samples):
    utility = np.eye(10)
    utility[:, 3] = 5
    body = {
        "inputs": [
            tensor("inputs", samples[:2], "UINT8"),
            tensor("utility", utility, "FP32"),
        ]
    }
    assert outputs(infer(both, body)[1])["action"].tolist() == ["3", "3"]


def test_versions_side_by_side(both, samples):
    one = [tensor("inputs", samples[:1], "UINT8")]
    path = "/v2/models/digits/versions/{}/infer"
    first, second = (
        infer(both, {"inputs": one}, path.format(version))[1] for version in "12"
    )
    assert outputs(second)["probabilities"].tolist() == [[0.1] * 10]
    assert outputs(first)["probabilities"].max() > 0.2
    assert second["model_version"] == "2"
    decided = json.loads(
        both.ask({"arrays": samples[:1].tolist()}, path="/decide?version=2&full=true")[
            2
        ]
    )
    assert decided["probabilities"] == [[0.1] * 10]
    assert (
        both.ask({"arrays": samples[:1].tolist()}, path="/decide?version=3")[0] == 422
    )
    pages = [
        both.ask(path=path, method="GET")[2]
        for path in ("/metrics", "/metrics?version=2")
    ]
    assert pages[0] != pages[1]
    assert both.ask(path="/metrics?version=3", method="GET")[0] == 404
    assert infer(both, {"inputs": one}, path.format(3))[0] == 404


def test_wrong_requests(both, samples):
    good = tensor("inputs", samples[:1], "UINT8")
    wrong = [
        b"",
        b"[1]",
        b"[" * 100_000,
        b'{"inputs": [{}]}',
        {"inputs": []},
        {"inputs": [good, good]},
        {"inputs": [good | {"shape": [1, 1, 8, 9]}]},
        {"inputs": [good | {"shape": [-1, 1, 8, 8]}]},
        {"inputs": [good | {"shape": [2**40, 2**40]}]},
        {"inputs": [good | {"shape": [1] * 100}]},
        {"inputs": [good | {"shape": [0]}]},
        {"inputs": [good | {"datatype": "FP16"}]},
        {"inputs": [good | {"datatype": "BYTES"}]},
        {"inputs": [good | {"data": [0.5] * 64}]},
        {"inputs": [good | {"data": [300] * 64}]},
        {"inputs": [good | {"data": [None] * 64}]},
        {"inputs": [good | {"data": [[0] * 63, [0]]}]},
        {"inputs": [good | {"data": [1e300] * 64}]},
        {"inputs": [good | {"name": "\ud800"}]},
        {"inputs": [good | {"name": "other"}]},
        {"inputs": [good], "outputs": [{"name": "nothing"}]},
        {"inputs": [tensor("inputs", np.zeros((300, 1, 8, 8), int), "UINT8")]},
    ]
    for body in wrong:
        status, answer = infer(both, body)
        assert 400 <= status < 500, (status, answer, str(body)[:200])
        assert list(answer) == ["error"]
    assert infer(both, {"inputs": [good]}, Content_Type="image/png")[0] == 415
    assert (
        infer(both, {"inputs": [good]}, Inference_Header_Content_Length="10")[0] == 400
    )
    assert infer(both, {"inputs": [good]})[0] == 200


def test_tokens_and_limits_are_those_of_decide(start, backend, samples):
    token = "0123456789abcdef-token"
    with start(backend, None, token) as served:
        assert (
            get(served, "/v2/health/live")[0]
            == get(served, "/v2/health/ready")[0]
            == 200
        )
        assert get(served, "/v2/models/digits")[0] == 401
        body = {"inputs": [tensor("inputs", samples[:1], "UINT8")]}
        assert infer(served, body)[0] == 401
        assert infer(served, body, Authorization=f"Bearer {token}")[0] == 200
        status, answer = infer(
            served, b" " * (2**24 + 1), Authorization=f"Bearer {token}"
        )
        assert (status, list(answer)) == (413, ["error"])


def test_rows_of_a_table(start, tmp_path):
    import rfdlc
    from rfdlc.serving.backend import open_backend

    rng = np.random.default_rng(0)
    ages, colours = rng.integers(20, 80, 200), rng.choice(["red", "blue"], 200)
    table = "age,colour,seen,class\n" + "".join(
        f"{age},{colour},2024-01-{i % 30 + 1:02},{'old' if age > 50 else 'young'}\n"
        for i, (age, colour) in enumerate(zip(ages, colours, strict=True))
    )
    (tmp_path / "t.csv").write_text(table)
    options = {"backbone": "mlp", "epochs": 1, "device": "cpu"}
    rfdlc.train(
        tmp_path / "t.csv",
        out=tmp_path / "run",
        data_options={"target": "class"},
        **options,
    )
    with start(open_backend(tmp_path / "run")) as served:
        rows = {
            "age": [31, 70],
            "colour": ["red", None],
            "seen": ["2031-01-01T10:00Z", None],
        }
        inputs = [
            tensor("age", rows["age"], "INT64"),
            *(tensor(name, rows[name], "BYTES") for name in ("colour", "seen")),
        ]
        status, answer = infer(served, {"inputs": inputs}, "/v2/models/run/infer")
        assert status == 200, answer
        expected = json.loads(served.ask({"rows": rows})[2])
        assert outputs(answer)["action"].tolist() == expected["action"]
        np.testing.assert_allclose(
            outputs(answer)["probability"], expected["probability"], atol=2e-7
        )
        records = [
            dict(zip(rows, cells, strict=True))
            for cells in zip(*rows.values(), strict=True)
        ]
        assert (
            json.loads(served.ask({"rows": records})[2])["probability"]
            == expected["probability"]
        )
        status, _, body = served.ask({"rows": [records[0], {"age": 1}]})
        assert (
            status,
            "there is no column colour, seen" in json.loads(body)["detail"],
        ) == (422, True)
        status, _, body = served.ask({"rows": rows | {"seen": ["soon", None]}})
        assert (status, json.loads(body)["detail"]) == (
            422,
            "rows: 'seen': expected dates as in training, or null",
        )
        began = time.monotonic()
        assert infer(served, {"inputs": inputs[:1]}, "/v2/models/run/infer")[0] == 422
        assert time.monotonic() - began < 1

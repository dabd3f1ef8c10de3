"""What a server answers is what the library says."""

import base64
import io
import json
import mimetypes
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

import rfdlc
from rfdlc.data.images import SUFFIXES, fitted, open_image, planes
from rfdlc.serving.backend import Answer, open_backend

pytest.importorskip("fastapi", reason='server tests need pip install "rfdlc[serve]"')


def png(image):
    buffer = io.BytesIO()
    Image.fromarray(image[0]).save(buffer, "PNG")
    return buffer.getvalue()


def check(answer, model, samples, utility=None):
    decider = (
        model.decider if utility is None else model.decider.replace(utility=utility)
    )
    predictions = model.predict(samples)
    explained = decider.explain(predictions)
    assert answer["action"] == [decider.utility.actions[i] for i in explained.action]
    np.testing.assert_allclose(answer["expected_utility"], explained.value, atol=1e-5)
    assert answer["argmax"] == [model.classes.names[i] for i in explained.argmax]
    np.testing.assert_allclose(answer["probability"], explained.probability, atol=1e-5)


@pytest.fixture(scope="module")
def client(served):
    return rfdlc.Client(served.url)


def test_arrays(client, model, samples):
    answer = client.decide(arrays=samples, full=True)
    check(answer, model, samples)
    expected = model.decider.probabilities(model.predict(samples))
    np.testing.assert_allclose(answer["probabilities"], expected, atol=1e-5)
    assert answer["classes"] == list(model.classes.names)


def test_one_image_is_a_list_of_one():
    with pytest.raises(rfdlc.InputError, match="images is one image: expected a list"):
        rfdlc.Client("http://127.0.0.1:1").decide(images="a.png")


def test_many_at_once(served, model):
    """Requests of several sizes that share batches: everybody gets the answer to their
    own samples.
    """
    samples = rfdlc.load("digits-lt").test.inputs[:96]
    explained = model.decider.explain(model.predict(samples))
    names, answers = np.array(model.decider.utility.actions), {}

    def ask(first):
        for start in range(first, 96, 24):
            rows = slice(start, min(96, start + 1 + start % 3))
            answers[start] = rows, served.ask({"arrays": samples[rows].tolist()})

    threads = [threading.Thread(target=ask, args=(first,)) for first in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(answers) == 96
    for rows, (status, _, body) in answers.values():
        answer = json.loads(body)
        assert status == 200
        assert answer["action"] == names[explained.action[rows]].tolist()
        np.testing.assert_allclose(
            answer["expected_utility"], explained.value[rows], atol=1e-5
        )


def test_images(client, served, model, samples, tmp_path):
    files = [png(image) for image in samples[:3]]
    check(client.decide(images=files), model, samples[:3])
    (tmp_path / "digit.png").write_bytes(files[0])
    check(client.decide(images=[tmp_path / "digit.png"]), model, samples[:1])
    pgm = b"P5 8 8 255\n" + np.asarray(samples[1], np.uint8).tobytes()
    for file, kind in ((files[1], "image/png"), (pgm, "image/x-portable-pixmap")):
        status, _, body = served.ask(file, Content_Type=kind)
        assert status == 200
        check(json.loads(body), model, samples[1:2])


@pytest.mark.parametrize("kind", sorted(SUFFIXES))
def test_what_training_reads_is_decided(served, model, kind, tmp_path):
    path = tmp_path / f"digit{kind}"
    Image.fromarray(np.arange(0, 256, 4, dtype=np.uint8).reshape(8, 8)).save(path)
    shown = planes(fitted(open_image(path), 8, 1))[None]
    sent = mimetypes.guess_type(path)[0]
    for body, headers in (
        (path.read_bytes(), {"Content_Type": sent}),
        form(path.read_bytes()),
    ):
        status, _, answer = served.ask(body, **headers)
        assert status == 200, answer
        check(json.loads(answer), model, shown)


def form(*files, boundary="x-7", field='name="file"; filename="a.png"'):
    """As curl -F sends files; returns the body and its content type."""
    parts = [
        f"--{boundary}\r\nContent-Disposition: form-data; {field}\r\n\r\n".encode()
        + file
        for file in files
    ]
    body = b"\r\n".join([*parts, f"--{boundary}--\r\n".encode()])
    return body, {"Content_Type": f'multipart/form-data; boundary="{boundary}"'}


def test_a_form_with_several_files(served, model, samples):
    body, headers = form(*(png(image) for image in samples[:5]))
    status, _, answer = served.ask(b"preamble\r\n" + body + b"epilogue", **headers)
    assert status == 200
    check(json.loads(answer), model, samples[:5])


def test_a_form_as_curl_writes_it(served, model, samples):
    """curl -F file=@0.png -F file=@1.png: a boundary of many dashes without quotes, and
    the type of each file.
    """
    dashes = "-" * 24 + "KxUxpDfBp0fgWjt7gZ2wTJ"
    head = (
        'form-data; name="file"; filename="{}.png"\r\nContent-Type: image/png\r\n\r\n'
    )
    body = b""
    for i in range(2):
        body += (
            f"--{dashes}\r\nContent-Disposition: {head.format(i)}".encode()
            + png(samples[i])
            + b"\r\n"
        )
    status, _, answer = served.ask(
        body + f"--{dashes}--\r\n".encode(),
        Content_Type=f"multipart/form-data; boundary={dashes}",
    )
    assert status == 200
    check(json.loads(answer), model, samples[:2])


def test_forms_of_web_pages_of_other_origins_are_refused(
    served, backend, start, samples
):
    """Browsers send them without asking; other bodies they do not. A token cannot be
    sent so.
    """
    body, headers = form(png(samples[0]))
    for origin in (
        "http://evil.example",
        "null",
        "https://127.0.0.1.evil.example",
        "http://127.0.0.1",
    ):
        assert served.ask(body, Origin=origin, **headers)[0] == 403
    assert served.ask(body, Origin=served.url, **headers)[0] == 200
    token = "a-long-enough-token"
    with start(backend, token=token) as guarded:
        known = {"Authorization": f"Bearer {token}"}
        assert guarded.ask(body, Origin="http://evil.example", **headers)[0] == 401
        assert (
            guarded.ask(body, Origin="http://app.example", **known, **headers)[0] == 200
        )


def test_transparent_pixels_are_white(client, model, samples):
    pixels, buffer = np.repeat(samples[0].transpose(1, 2, 0), 4, axis=2), io.BytesIO()
    pixels[..., 3] = 255 * (np.arange(8) < 4)
    Image.fromarray(pixels).save(buffer, "PNG")
    shown = samples[:1].copy()
    shown[..., 4:] = 255
    check(client.decide(images=[buffer.getvalue()]), model, shown)


def test_a_utility_in_the_request(client, model, samples):
    utility = rfdlc.Utility.tail_sensitive(model.classes, -3).with_abstain(0.4)
    answer = client.decide(arrays=samples, utility=utility)
    check(answer, model, samples, utility)
    assert "abstain" in answer["action"]
    shuffled = rfdlc.Utility(
        utility.matrix[::-1], model.classes.names[::-1], utility.actions
    )
    assert client.decide(arrays=samples, utility=shuffled) == answer  # matched by name


def test_what_all_actions_are_worth_alike_decides_nothing():
    p = np.random.default_rng(0).dirichlet([1, 1, 1], 500).astype(np.float32)
    plain = rfdlc.Utility(np.eye(3), ["a", "b", "c"])
    lifted = rfdlc.Utility(
        np.eye(3) + 1e7, plain.classes
    )  # in 32 bits 1e7 + 0.3 is 1e7
    answers = [
        Answer.of(rfdlc.Decider(utility), p, np.zeros(len(p)))
        for utility in (plain, lifted)
    ]
    assert answers[0].columns["action"] == [plain.actions[i] for i in p.argmax(1)]
    assert answers[1].columns["action"] == answers[0].columns["action"]


def test_probabilities(client, model):
    scores = np.random.default_rng(0).dirichlet(np.ones(10), (3, 20))
    for given in (scores, scores[0]):
        answer, explained = (
            client.decide(probabilities=given),
            model.decider.explain(given),
        )
        assert answer["action"] == [
            model.decider.utility.actions[i] for i in explained.action
        ]
        np.testing.assert_allclose(
            answer["expected_utility"], explained.value, atol=1e-6
        )
        assert ("mutual_information" in answer) == (
            given.ndim == 3
        )  # one particle has none


@pytest.mark.usefixtures("quick_exports")
def test_an_exported_file_without_torch(run, model, samples, tmp_path, start):
    file = rfdlc.export(run, tmp_path / "model.onnx").path
    utility = rfdlc.Utility.one_hot(model.classes).with_abstain(0.4)
    with start(open_backend(file, utility)) as served:
        check(rfdlc.Client(served.url).decide(arrays=samples), model, samples, utility)
    code = f"""import sys
from rfdlc.serving.backend import open_backend
from rfdlc.serving.app import create_app
import numpy as np
create_app(open_backend({str(file)!r}))
sys.exit('torch' in sys.modules)"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_rows_of_a_table(tmp_path, start):
    lines = ["age,colour,kind", *(f"{30 + i % 20},blue,well" for i in range(60))]
    lines += [f"{50 + i % 20},red,ill" for i in range(20)]
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    model = rfdlc.train(
        tmp_path / "rows.csv",
        "ce",
        tmp_path / "run",
        data_options={"target": "kind"},
        epochs=3,
        device="cpu",
    )
    rows = {"age": [39, "61", None], "colour": ["blue", "red", "green"]}
    with start(open_backend(tmp_path / "run")) as served:
        client = rfdlc.Client(served.url)
        expected = [model.decider.utility.actions[i] for i in model.decide(rows)]
        answer = client.decide(rows=rows)
        assert answer["action"] == expected
        empty, told = answer["warnings"]
        assert empty.startswith(
            "column 'age' is empty in 33% of the rows, but never was in training: the"
            " model uses"
        )
        assert told.startswith(
            "column 'colour' has categories that training did not see"
        )
        assert "green" not in told
        assert "warnings" not in client.decide(rows={"age": [39], "colour": ["red"]})
        each = [
            dict(zip(rows, cells, strict=True))
            for cells in zip(*rows.values(), strict=True)
        ]
        assert client.decide(rows=each)["action"] == expected
        with pytest.raises(
            rfdlc.InputError,
            match="413: rows: more than 256 samples in one request: send them in",
        ):
            client.decide(rows={"age": [39] * 257, "colour": ["red"] * 257})
        with pytest.raises(
            rfdlc.InputError, match="422: probabilities: expected nested lists"
        ):  # too many classes
            client.decide(probabilities=[[0.2, 0.3, 0.5]])
        with pytest.raises(
            rfdlc.InputError,
            match=r"rows holds \[39, 'red'\]: expected a {column: cell} for each row",
        ):
            client.decide(rows=[[39, "red"]])
        assert client.decide(rows={"age": [39], "colour": ["RED"]})["warnings"] == [
            told
        ]
        (far,) = client.decide(rows={"age": [610], "colour": ["red"]})["warnings"]
        assert far.startswith(
            "column 'age' has values far outside of those in training: "
        )
        assert "610" not in far
        nothing = client.decide(rows={"age": [None], "colour": [None]})["warnings"]
        assert [" is empty in 100% of the rows" in each for each in nothing] == [
            True,
            True,
        ]
        assert "rfdlc_unseen_categories_total 9.0" in client.metrics()
        for bad in (
            {"age": [1]},
            {"age": [1e39], "colour": ["red"]},
            {"age": [3e38], "colour": ["red"]},
            {"age": ["secret"], "colour": ["red"]},
            {"age": [1, 2], "colour": ["red"]},
        ):
            with pytest.raises(rfdlc.InputError, match="422") as refused:
                client.decide(rows=bad)
            assert "secret" not in str(refused.value)
        status, _, body = served.ask(
            b'{"rows": {"age": [39, 1e999], "colour": ["red", "red"]}}'
        )
        assert status == 422
        assert json.loads(body)["detail"].startswith(
            "rows: 'age': expected a list of texts, finite numbers"
        )
        pandas = pytest.importorskip(
            "pandas"
        )  # numpy's numbers, and nan where something is missing
        for ages in ([39, 61, 50], [39, None, 50]):
            frame = pandas.DataFrame(
                {"age": ages, "colour": pandas.Categorical(rows["colour"])}
            )
            explained = model.decider.explain(model.predict(frame))
            np.testing.assert_allclose(
                client.decide(rows=frame)["expected_utility"],
                explained.value,
                atol=1e-5,
            )


def test_lists_of_numbers_are_columns_as_in_training(tmp_path, start):
    pandas, rng = pytest.importorskip("pandas"), np.random.default_rng(0)
    labels = np.repeat(["well", "ill"], [60, 20])
    vectors = list(rng.normal(size=(80, 4)) + 3 * (labels == "ill")[:, None])
    frame = pandas.DataFrame({"vector": vectors, "kind": labels})
    frame.to_parquet(tmp_path / "rows.parquet")
    settings = {"data_options": {"target": "kind"}, "epochs": 3, "device": "cpu"}
    model = rfdlc.train(tmp_path / "rows.parquet", "ce", tmp_path / "run", **settings)
    expected = [
        model.decider.utility.actions[i] for i in model.decide(frame[["vector"]])
    ]
    assert len(set(expected)) == 2
    with start(open_backend(tmp_path / "run")) as served:
        client = rfdlc.Client(served.url)
        assert client.decide(rows=frame[["vector"]])["action"] == expected
        assert (
            client.decide(rows=[{"vector": list(vector)} for vector in vectors])[
                "action"
            ]
            == expected
        )
        with pytest.raises(
            rfdlc.InputError,
            match=r"lists in column 'vector' have 3, 4 numbers: expected as many each",
        ):
            client.decide(rows={"vector": [[1, 2, 3], [1, 2, 3, 4]]})
        with pytest.raises(
            rfdlc.InputError,
            match=r"probabilities\[1, 0\] is nan: expected finite numbers",
        ):
            client.decide(probabilities=[[0.5, 0.5], [np.nan, 1]])


def test_metrics(start, backend, model):
    with start(backend) as served:
        client = rfdlc.Client(served.url)
        rare = np.full((200, 10), 0.02)
        rare[:, 9] = 0.82
        utility = rfdlc.Utility.one_hot(model.classes).with_abstain(
            2
        )  # better than being right
        client.decide(probabilities=rare)
        client.decide(probabilities=rare[:7], utility=utility)
        assert served.ask({"arrays": 1})[0] == 422
        lines = dict(
            line.rsplit(" ", 1)
            for line in client.metrics().splitlines()
            if not line.startswith("#")
        )
    lines = {name: float(value) for name, value in lines.items()}
    assert lines['rfdlc_requests_total{path="/decide",status="200"}'] == 2
    assert lines['rfdlc_requests_total{path="/decide",status="422"}'] == 1
    assert lines["rfdlc_request_seconds_count"] == 3
    assert lines['rfdlc_decisions_total{class="9"}'] == 200
    assert lines['rfdlc_abstentions_total{action="other"}'] == 7
    assert lines["rfdlc_uncertainty_count"] == 207
    prior = [
        lines[f'rfdlc_class_prior{{class="{name}"}}'] for name in model.classes.names
    ]
    assert abs(sum(prior) - 1) < 1e-4
    assert prior[9] > 0.15  # was 0.1: drift is visible


def test_documents(served):
    assert served.ask(method="GET", path="/health")[0] == 200
    assert json.loads(served.ask(method="GET", path="/ready")[2])["ready"] is True
    document = json.loads(served.ask(method="GET", path="/openapi.json")[2])
    content = document["paths"]["/decide"]["post"]["requestBody"]["content"]
    kinds = (
        "png",
        "jpeg",
        "tiff",
        "webp",
        "bmp",
        "gif",
        "x-portable-pixmap",
        "x-portable-graymap",
    )
    assert set(content) == {
        "application/json",
        "multipart/form-data",
        *(f"image/{kind}" for kind in kinds),
    }
    schema = content["application/json"]["schema"]
    assert {"arrays", "images", "probabilities", "utility"} == set(schema["properties"])
    assert "$ref" not in json.dumps(
        schema
    )  # it would point into the document, where there is no such thing
    assert served.ask(method="GET", path="/docs")[0] == 200
    assert served.ask(method="GET")[0] == 405


def test_base64_is_strict(served):
    assert (
        served.ask(
            {"images": ["data:image/png;base64," + base64.b64encode(b"x").decode()]}
        )[0]
        == 422
    )


def test_a_target_prior_without_some_classes_says_what_is_wrong(start, backend):
    decider = backend.decider.replace(
        calibrator=None, train_prior="uniform", target_prior=np.eye(10)[:2].sum(axis=0)
    )
    with start(replace(backend, decider=decider)) as served:
        status, _, body = served.ask({"probabilities": [[0.0] * 9 + [1.0]]})
        assert status == 422
        assert (
            "some probability for a class whose target prior is not 0"
            in json.loads(body)["detail"]
        )
        assert served.ask({"probabilities": [[0.1] * 10]})[0] == 200

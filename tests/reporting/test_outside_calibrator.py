"""A calibrator registered from outside the library works on every surface, known only
by the protocol.
"""

import json
import sys
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
from scipy.special import log_softmax, softmax
from sklearn.linear_model import LogisticRegression

import rfdlc
from rfdlc.cli import main
from rfdlc.probabilities.calibrators import CALIBRATORS, Calibrator, register_calibrator
from rfdlc.reporting.runs import ReportRun
from rfdlc.training.config import TrainConfig

from .conftest import make_folder, make_predictions

NAME = "mixing"


@dataclass(frozen=True)
class Mixing(Calibrator):
    """A matrix that mixes the log probabilities of neighbouring classes: asymmetric, so
    that its order matters.
    """

    strength: float
    name = NAME
    classes: int = 0

    @classmethod
    def fit(cls, log_p, targets, **context):
        assert np.allclose(
            np.exp(log_p).sum(axis=1), 1
        )  # log probabilities, never bare logits
        return cls(
            0.2 + 0.1 * float(np.mean(log_p.argmax(axis=1) == targets)), log_p.shape[1]
        )

    def as_affine(self):
        return np.eye(self.classes) * 0.6 + self.strength * np.eye(
            self.classes, k=1
        ), np.linspace(0, 0.5, self.classes)

    def __str__(self):
        return f"mixed by {self.strength:.3f}"


@pytest.fixture(autouse=True, scope="module")
def registered():
    register_calibrator(Mixing)
    yield
    del CALIBRATORS[NAME]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "digits"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rfdlc.train(
            "digits-lt",
            "ce",
            folder,
            epochs=2,
            device="cpu",
            particles=2,
            calibration=NAME,
        )
    return folder


def by_hand(fitted, log_p):
    W, b = fitted.as_affine()
    return softmax(
        [[W[i] @ row + b[i] for i in range(len(b))] for row in log_p], axis=1
    )


def test_a_decider_fits_saves_and_loads_it(tmp_path):
    predictions = make_predictions()
    utility = rfdlc.Utility.tail_sensitive(predictions.classes)
    decider = rfdlc.Decider(utility, combine="mean-logits", calibration=NAME).fit(
        predictions
    )
    decider.save(tmp_path / "decider.json")
    loaded = rfdlc.Decider.load(tmp_path / "decider.json")
    assert loaded.model.calibrator == decider.model.calibrator
    assert isinstance(loaded.model.calibrator, Mixing)
    p = np.asarray(loaded.probabilities(predictions))
    log_p = log_softmax(predictions.scores.values.mean(axis=0), axis=1)
    np.testing.assert_allclose(p, by_hand(decider.model.calibrator, log_p), atol=1e-6)
    np.testing.assert_array_equal(
        loaded.decide(predictions), (p @ utility.matrix).argmax(axis=1)
    )


def test_the_command_line(tmp_path, monkeypatch, capsys):
    predictions = make_predictions()
    predictions.save(tmp_path / "p.npz")
    words = [
        "decide",
        tmp_path / "p.npz",
        "--calibrate",
        tmp_path / "p.npz",
        "--calibration",
        NAME,
        "--json",
    ]
    monkeypatch.setattr(sys, "argv", ["rfdlc", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    answer = json.loads(capsys.readouterr().out)
    expected = rfdlc.Decider(
        rfdlc.Utility.one_hot(predictions.classes), calibration=NAME
    ).fit(predictions)
    assert str(expected.model.calibrator) in json.dumps(answer)
    actions = [row["action"] for row in answer["decisions"]]
    assert actions == [
        predictions.classes.names[i] for i in expected.decide(predictions)
    ]


def test_the_estimators():
    rng = np.random.default_rng(0)
    y = rng.choice(3, 300, p=[0.6, 0.3, 0.1])
    X = rng.normal(size=(300, 4)) + y[:, None]
    wrapped = rfdlc.UtilityClassifier(
        LogisticRegression(), calibration=NAME, ensemble=False
    ).fit(X, y)
    log_p = np.log(wrapped.estimator_.predict_proba(X))
    np.testing.assert_allclose(
        wrapped.predict_proba(X),
        by_hand(wrapped.decider_.model.calibrator, log_p),
        atol=1e-6,
    )
    own = rfdlc.RFDLCClassifier(
        backbone="mlp", calibrate=NAME, epochs=2, particles=1, device="cpu"
    ).fit(X, y)
    assert isinstance(own.decider_.model.calibrator, Mixing)
    assert (own.predict(X) == own.predict_proba(X).argmax(axis=1)).all()


@pytest.mark.usefixtures("quick_exports")
def test_training_fits_it_and_the_exported_graph_agrees(trained, tmp_path):
    pytest.importorskip("onnxruntime", reason='needs pip install "rfdlc[export]"')
    assert TrainConfig(calibration=NAME).calibration == NAME
    model = rfdlc.Model.load(trained, device="cpu")
    assert isinstance(model.decider.model.calibrator, Mixing)
    rfdlc.export(
        trained, tmp_path / "model.onnx"
    )  # refuses a graph that is not the model
    exported = rfdlc.OnnxModel.load(tmp_path / "model.onnx")
    inputs = rfdlc.load("digits-lt").test.inputs[:50]
    predictions, decided = model.predict(inputs), exported.decide(inputs)
    np.testing.assert_allclose(
        decided.probabilities, model.decider.probabilities(predictions), atol=2e-5
    )
    np.testing.assert_array_equal(decided.action, model.decider.decide(predictions))


def test_the_server_answers_by_it(trained):
    testing = pytest.importorskip(
        "fastapi.testclient", reason='needs pip install "rfdlc[serve]" httpx'
    )
    from rfdlc.serving.app import create_app
    from rfdlc.serving.backend import open_backend

    model, inputs = (
        rfdlc.Model.load(trained, device="cpu"),
        rfdlc.load("digits-lt").test.inputs[:20],
    )
    with testing.TestClient(
        create_app(open_backend(trained)), "http://localhost"
    ) as client:
        answer = client.post(
            "/decide?full=true", json={"arrays": inputs.tolist()}
        ).json()
    expected = model.decider.probabilities(model.predict(inputs))
    np.testing.assert_allclose(answer["probabilities"], expected, atol=1e-5)


def test_the_page_decides_by_it_and_gives_it_back(browser, tmp_path):
    from .test_browser import Page, downloaded

    folder = make_folder(tmp_path / "run", make_predictions(), calibration=NAME)
    decider = rfdlc.Decider.load(folder / "decider.json")
    path = rfdlc.report(folder, out=tmp_path / "report.html", bootstrap=0)
    predictions = rfdlc.Predictions.load(folder)
    page = Page(browser, path, ReportRun("run", predictions, decider))
    assert str(decider.model.calibrator) in page.element("#lead").text
    assert page.actions == [
        decider.utility.actions[a] for a in decider.decide(predictions)
    ]
    page.write("#temperature-value", "1.5")
    saved = rfdlc.Decider.load(downloaded(page, "#save-decider", "decider.json"))
    assert [saved.utility.actions[a] for a in saved.decide(predictions)] == page.actions
    W, b = decider.model.calibrator.as_affine()
    np.testing.assert_allclose(saved.model.calibrator.as_affine()[0], W / 1.5)
    np.testing.assert_allclose(saved.model.calibrator.as_affine()[1], b / 1.5)

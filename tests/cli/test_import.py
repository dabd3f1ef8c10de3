"""`rfdlc --import`: own methods, metrics, calibrators and formats in every command;
nothing else imports them.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rfdlc
from rfdlc import imports
from rfdlc.data.registry import READERS
from rfdlc.evaluation.metrics import METRICS
from rfdlc.methods import METHODS
from rfdlc.probabilities.calibrators import CALIBRATORS
from rfdlc.serving.workers import Child

OWN = """
from dataclasses import dataclass
from pathlib import Path
import numpy as np
from rfdlc.data.dataset import Dataset, Split
from rfdlc.data.load import register_source
from rfdlc.probabilities.calibrators import Calibrator, register_calibrator
from rfdlc.evaluation.metrics import Metric, register_metric
from rfdlc.methods import METHODS, Method, Option
from beside_own import halved

with Path(__file__).with_name("times.txt").open("a") as file:
    file.write("x")
METHODS["own-method"] = Method(
    "halved cross-entropy",
    "here",
    {"head": "linear"},
    loss=lambda *given: halved,
    options={"own_number": Option(0.5, "nothing")},
)


def is_first_class(outcomes):
    return (outcomes.decided == 0).astype(float)


register_metric(Metric("own_metric", "own metric", is_first_class, unit="%"))


@register_calibrator
@dataclass(frozen=True)
class Doubled(Calibrator):
    name = "own-calibrator"

    @classmethod
    def fit(cls, log_p, targets, **context):
        return cls()

    def as_affine(self):
        return np.array(2.0), np.array(0.0)


def read(path):
    rows = np.loadtxt(path)
    x, y = rows[:, 1:].astype(np.float32), rows[:, 0].astype(int)
    parts = {"train": Split(x, y), "test": Split(x[::2], y[::2])}
    return Dataset.of(path.stem, ["a", "b"], parts)


register_source(read, suffixes=[".own"])
"""
BESIDE = """
def halved(logits, targets, epoch):
    targets = targets.expand(len(logits), -1)[..., None]
    return -0.5 * logits.log_softmax(-1).gather(-1, targets)[..., 0]
"""
SMALL = ("epochs=1", "widths=4", "calibration=own-calibrator")
GRID = """
data = "data.own"
settings = { epochs = 1, widths = [4] }
grid = { method = ["own-method", "ce"] }
"""


REGISTRIES = METHODS, METRICS, CALIBRATORS


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a module, what it imports, and data; nothing is registered after a
    test.
    """
    path = sys.path[:]
    (tmp_path / "own_module.py").write_text(OWN)
    (tmp_path / "beside_own.py").write_text(BESIDE)
    (tmp_path / "grid.toml").write_text(GRID)
    rng, y = np.random.default_rng(0), np.repeat([0, 1], [60, 20])
    np.savetxt(
        tmp_path / "data.own",
        np.column_stack([y, rng.normal(size=(80, 3)) + y[:, None]]),
    )
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    forget()
    sys.path[:] = path


def forget():
    """As in a new process."""
    READERS[:] = [
        reader for reader in READERS if reader.read.__module__ != "own_module"
    ]
    for registry in REGISTRIES:
        for name in [name for name in registry if name.startswith("own")]:
            del registry[name]
    imports.IMPORTED.clear()
    for name in ("own_module", "beside_own"):
        sys.modules.pop(name, None)


def times(folder):
    return len((folder / "times.txt").read_text())


def test_every_command_knows_what_a_module_registers(run, folder):
    given = "--import", "own_module.py"
    code, _, err = run(
        *given,
        "train",
        "data.own",
        "--out",
        "run",
        "-m",
        "own-method",
        "own_number=0.25",
        *SMALL,
    )
    assert code == 0, err
    assert json.loads(Path("run/config.json").read_text())["imports"] == [
        str(folder / "own_module.py")
    ]
    assert (
        json.loads(Path("run/decider.json").read_text())["model"]["calibrator"]["name"]
        == "own-calibrator"
    )
    decided = rfdlc.Decider.load("run").decide(rfdlc.Predictions.load("run"))
    assert json.loads(run(*given, "evaluate", "run", "--json")[1])[
        "own_metric"
    ] == np.mean(decided == 0)
    assert "own-method" in run(*given, "methods")[1]
    for words in (("predict", "run", "data.own", "--out", "p.csv"), ("resume", "run")):
        assert run(*given, *words)[0] == 0, words
    own = "--calibrate", "run/held-out.npz", "--calibration", "own-calibrator"
    assert (
        "Calibrated: own-calibrator."
        in run(*given, "decide", "run/predictions.npz", *own)[1]
    )
    assert times(folder) == 1  # once for all of them, in one process


def test_without_it_nothing_is_imported_and_the_error_names_it(run, folder):
    train = "train", "data.own", "--out", "run", "-m", "own-method", *SMALL
    assert run("--import", "own_module.py", *train)[0] == 0
    forget()
    named = (
        f"it was made with `rfdlc --import {folder / 'own_module.py'} ...`: give that"
        " again, if you trust"
    )
    for words in (
        ("resume", "run"),
        ("evaluate", "run"),
        ("predict", "run", "data.own"),
        ("fork", "run", "--out", "f"),
    ):
        code, out, err = run(*words)
        assert (code, out, named in err) == (2, "", True), (words, err)
    first = "one of your own must be registered first: `rfdlc --import MODULE ...`"
    np.savez("data.npz", train_x=np.zeros((9, 2), np.float32), train_y=[0, 0, 1] * 3)
    for words in (
        ("train", "data.own"),
        ("train", "data.npz", "-m", "own-method"),
        ("train", "data.npz", "calibration=own-calibrator"),
        ("train", "data.npz", "calibration=vector"),
        ("sweep", "grid.toml"),
    ):
        code, _, err = run(*words, *(("--out", "other") if words[0] == "train" else ()))
        assert (code, first in err) == (2, True), (words, err)
    assert "none, none" not in err
    assert times(folder) == 1


def test_a_command_line_that_imports_what_it_should_not(run, folder):
    (folder / "json.py").write_text("raise SystemExit")
    (folder / "wrong.py").write_text("x = 1\ny = x.nothing\n")
    for name, words in {
        "json.py": "another module is called json",
        "wrong.py": (
            "AttributeError: 'int' object has no attribute 'nothing');"
            f" {folder / 'wrong.py'}, line 2"
        ),
        "absent.py": "--import absent.py: no such file",
        "absent_module": "expected the path of a .py file, or a module on PYTHONPATH",
    }.items():
        code, out, err = run("--import", name, "methods")
        assert (code, out, words in err) == (2, "", True), err
    assert json.loads("1") == 1
    assert imports.IMPORTED == []


def test_workers_import_it_too(run, folder):
    given = "--import", "own_module.py"
    assert (
        run(*given, "train", "data.own", "--out", "run", "-m", "own-method", *SMALL)[0]
        == 0
    )
    child = Child(
        "compute", (folder / "run", None, None, rfdlc.Decider.load("run")), {}
    )
    child.start()
    backend, _ = child.pipe.recv()
    child.close()
    assert backend.decider.model.calibrator.name == "own-calibrator"
    job = (
        "from rfdlc.training.plans import Job, RunSpec; from rfdlc.training.sweep"
        " import _train_in; "
    )
    job += (
        "j = Job('data.own', None, {}, [RunSpec('ray', 'own-method', {'epochs': 1,"
        " 'widths': [4]})])\n"
    )
    for modules in ([], imports.IMPORTED):
        job += (
            f"try:\n _train_in({str(folder)!r}, {modules!r}, j, 1)\nexcept"
            " rfdlc.InputError:\n pass\n"
        )
        job += f"print(Path({str(folder)!r}, 'ray/metrics.json').exists())\n"
    words = [sys.executable, "-c", f"import rfdlc; from pathlib import Path; {job}"]
    done = subprocess.run(words, capture_output=True, text=True, cwd="/")
    assert done.stdout.split() == ["False", "True"], done.stderr
    sweep = "sweep", "grid.toml", "--out", "grid"
    words = [sys.executable, "-m", "rfdlc", *given, *sweep, "--job", "0"]
    subprocess.run(words, check=True, capture_output=True)
    rows = rfdlc.sweep("grid.toml", "grid", collect=True)
    assert [row["state"] for row in rows] == ["finished", "waiting"]

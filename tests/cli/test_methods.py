"""`rfdlc methods`."""

import json

from typer.testing import CliRunner

from rfdlc.cli import app
from rfdlc.training.methods import METHODS


def run(*words):
    result = CliRunner().invoke(app, ["methods", *words], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_method_is_listed():
    shown = run()
    told = json.loads(run("--json"))["methods"]
    assert list(told) == list(METHODS)
    assert all(name in shown for name in METHODS)
    options = told["ride"].pop("options")
    assert options["diversity"] == {
        "default": 0.2,
        "help": "factor of the divergence between experts",
    }
    assert "diversity=0.2" in shown
    assert told["ride"] == {
        "summary": METHODS["ride"].summary,
        "reference": "Wang et al. 2021",
        "particles": 3,
        "stages": ["all", "router"],
        "cost": 3.02,
    }
    assert "all + router" in shown

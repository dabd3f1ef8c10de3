"""Command lines as a user runs them."""

import sys

import pytest

from rfdlc.cli import main


@pytest.fixture
def run(capsys, monkeypatch):
    """Run a command line; returns (exit code, standard output, standard error)."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["rfdlc", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return call
